// Writes the optimizer step parameters. They are a kernel argument, so no copy or synchronization is needed.

KERNEL(32, set_step)(Step* step, Step value) {
    if (thread_number() == 0) *step = value;
}
