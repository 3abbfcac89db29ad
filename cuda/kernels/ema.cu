// Exponential moving average of weights: a = decay a + (1 - decay) w, and a = w in the first step. If a gradient is not
// finite, nothing changes.

KERNEL(256, ema)(const Step* step, A* average, const T* weights, u64 n, double decay) {
    if (step->found_inf) return;
    const double share = step->update == 1 ? 0.0 : decay;
    const A old_share = (A)share, new_share = (A)(1 - share);
    for (u64 i = thread_number(); i < n; i += thread_count()) {
        average[i] = average[i] * old_share + widen(weights[i]) * new_share;
    }
}
