// Writes the optimizer step parameters. They are a kernel argument, so no copy or synchronization is needed.

KERNEL(32, set_step)(Step* step, Step value) {
    if (thread_number() == 0) *step = value;
}

// The same step with the learning rate times `factor`.
KERNEL(32, scale_lr)(Step* to, const Step* from, double factor) {
    if (thread_number() > 0) return;
    Step step = *from;
    step.lr *= factor;
    *to = step;
}
