// The loss scale of a step, and the parameters of a step before which the device may have skipped some.

#include "loss_scale.cuh"

// Mirrors `arguments::NextStep` on the host.
struct NextStep {
    Step step;        // if no step before it is skipped
    LossScale known;
    u64 is_known;     // not 0: `known` replaces the device's
    u64 rows;         // learning rates kept
};

// Writes the parameters of the next step. Behind the loss scale lie the learning rates of the latest possible updates, by their
// number: that of an update does not depend on which steps are skipped before it.
KERNEL(32, next_step)(Step* step, LossScale* scale, NextStep next) {
    if (thread_number() > 0) return;
    double* lrs = (double*)(scale + 1);
    if (next.is_known) *scale = next.known;
    lrs[next.step.update % next.rows] = next.step.lr;
    const u64 update = scale->updates + 1;
    Step own = next.step;
    own.number = own.update = update;
    own.lr = lrs[update % next.rows];
    *step = own;
}

// The gradient with which backward starts.
KERNEL(32, loss_gradient)(double* gradient, const LossScale* scale, double factor) {
    if (thread_number() == 0) *gradient = factor * scale->scale;
}
