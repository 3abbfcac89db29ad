// Lion (Chen et al., arXiv 2302.06675): g = grad_scale * gradient,
// w = w (1 - lr * weight_decay) - lr * sign(beta1 m + (1 - beta1) g), m = beta2 m + (1 - beta2) g. If a gradient is not
// finite, nothing changes.

template <class W, class G>
INLINE void step_weights(const Step* step, W* weights, const G* grads, A* m, u64 n, double beta1, double beta2, double weight_decay) {
    if (step->found_inf) return;
    const A lr = (A)step->lr, scale = (A)step->grad_scale, keep = (A)(1 - step->lr * weight_decay);
    const A first = (A)beta1, one_minus_first = (A)(1 - beta1), second = (A)beta2, one_minus_second = (A)(1 - beta2);
    for (u64 i = thread_number(); i < n; i += thread_count()) {
        A g = widen(grads[i]) * scale, mixed = m[i] * first + g * one_minus_first;
        m[i] = m[i] * second + g * one_minus_second;
        A direction = mixed > A(0) ? A(1) : mixed < A(0) ? A(-1) : A(0);
        weights[i] = rounded<W>(widen(weights[i]) * keep - lr * direction);
    }
}

KERNEL(256, lion)(const Step* step, T* weights, const T* grads, A* m, u64 n, double beta1, double beta2, double weight_decay) {
    step_weights(step, weights, grads, m, n, beta1, beta2, weight_decay);
}

// Gradients in A.
KERNEL(256, lion_wide)
(const Step* step, T* weights, const A* grads, A* m, u64 n, double beta1, double beta2, double weight_decay) {
    step_weights(step, weights, grads, m, n, beta1, beta2, weight_decay);
}

// Weights in A.
KERNEL(256, lion_master)
(const Step* step, A* weights, const T* grads, A* m, u64 n, double beta1, double beta2, double weight_decay) {
    step_weights(step, weights, grads, m, n, beta1, beta2, weight_decay);
}
