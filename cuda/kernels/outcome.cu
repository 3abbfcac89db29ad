// Decides whether a step is applied, the gradient scale, and the next loss scale, from the loss and the squared gradient norm.
// The numbers are recorded for the host, which reads them later.

#include "loss_scale.cuh"

// Mirrors `arguments::Outcome` on the host.
struct Outcome {
    double tokens, max_norm;
    u64 skips;               // not 0: a step whose gradients overflow is skipped
    u64 window, hysteresis;  // of the loss scale, which is adapted then
    double minimum;
    u64 rows;
};

// `outcomes` starts with the number of steps so far and the number (from 1) of the first failed step, or 0; rows of
// loss, norm and loss scale follow. `others`, if not null, is not finite if another replica has failed.
KERNEL(32, outcome)(Step* step, LossScale* scale, double* outcomes, const double* loss_sum, const double* sq_norm, const double* others, Outcome c) {
    if (thread_number() > 0) return;
    const auto is_finite = [](double x) { return real::abs(x) < real::infinity<double>(); };
    LossScale now = *scale;
    const double loss_scale = now.scale;
    const double loss = *loss_sum / c.tokens, norm = real::sqrt(*sq_norm) / loss_scale;
    const bool overflow = !is_finite(norm);
    const bool lost = !is_finite(loss) || (overflow && !c.skips) || (others && !is_finite(*others));
    const u64 before = (u64)outcomes[0];
    double* row = outcomes + 2 + 3 * (before % c.rows);
    row[0] = loss;
    row[1] = norm;
    row[2] = loss_scale;
    outcomes[0] = (double)(before + 1);
    if (lost && outcomes[1] == 0) outcomes[1] = (double)(before + 1);
    const bool stopped = outcomes[1] != 0;
    const double clipped = c.max_norm / (norm + 1e-6);
    step->grad_scale = (c.max_norm > 0 && clipped < 1 ? clipped : 1.0) / loss_scale;
    step->found_inf = overflow || stopped;
    if (stopped) return;
    if (!overflow) now.updates++;
    // Megatron-LM's rule: `LossScaleRule::next` on the host.
    if (c.skips && overflow) {
        now.steady = 0;
        if (now.patience > 0) now.patience--;
        if (now.patience == 0) now.scale = real::max(loss_scale / 2, c.minimum);
    } else if (c.skips && ++now.steady == c.window) {
        now.steady = 0;
        now.patience = c.hysteresis;
        now.scale *= 2;
    }
    *scale = now;
}
