// Decides whether a step is applied, and the gradient scale, from the loss and the squared gradient norm. Both
// numbers are recorded for the host, which reads them later.

// Mirrors `arguments::Outcome` on the host.
struct Outcome {
    double tokens, loss_scale, max_norm;
    u64 skips;  // not 0: a step whose gradients overflow is skipped
    u64 rows;
};

// `outcomes` starts with the number of steps so far and the number (from 1) of the first failed step, or 0; rows of
// loss and norm follow. `others`, if not null, is not finite if another replica has failed.
KERNEL(32, outcome)(Step* step, double* outcomes, const double* loss_sum, const double* sq_norm, const double* others, Outcome c) {
    if (thread_number() > 0) return;
    const auto is_finite = [](double x) { return real::abs(x) < real::infinity<double>(); };
    const double loss = *loss_sum / c.tokens, norm = real::sqrt(*sq_norm) / c.loss_scale;
    const bool overflow = !is_finite(norm);
    const bool lost = !is_finite(loss) || (overflow && !c.skips) || (others && !is_finite(*others));
    const u64 before = (u64)outcomes[0];
    double* row = outcomes + 2 + 2 * (before % c.rows);
    row[0] = loss;
    row[1] = norm;
    outcomes[0] = (double)(before + 1);
    if (lost && outcomes[1] == 0) outcomes[1] = (double)(before + 1);
    const double clipped = c.max_norm / (norm + 1e-6);
    step->grad_scale = (c.max_norm > 0 && clipped < 1 ? clipped : 1.0) / c.loss_scale;
    step->found_inf = overflow || outcomes[1] != 0;
}
