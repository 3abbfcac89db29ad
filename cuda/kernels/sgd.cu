// SGD with momentum: g = grad_scale * gradient + weight_decay * w, m = momentum * m + g, w = w - lr m, or in Nesterov's
// form w = w - lr (g + momentum * m). Without momentum m is null, and g replaces it. If a gradient is not finite,
// nothing changes.

template <class W, class G>
INLINE void step_weights(const Step* step, W* weights, const G* grads, A* m, u64 n, double momentum, double weight_decay, u64 nesterov) {
    if (step->found_inf) return;
    const A lr = (A)step->lr, scale = (A)step->grad_scale;
    for (u64 i = thread_number(); i < n; i += thread_count()) {
        A w = widen(weights[i]), g = widen(grads[i]) * scale + w * (A)weight_decay;
        if (m) {
            const A buffer = m[i] * (A)momentum + g;
            m[i] = buffer;
            g = nesterov ? g + buffer * (A)momentum : buffer;
        }
        weights[i] = rounded<W>(w - lr * g);
    }
}

KERNEL(256, sgd)(const Step* step, T* weights, const T* grads, A* m, u64 n, double momentum, double weight_decay, u64 nesterov) {
    step_weights(step, weights, grads, m, n, momentum, weight_decay, nesterov);
}

// Gradients in A.
KERNEL(256, sgd_wide)(const Step* step, T* weights, const A* grads, A* m, u64 n, double momentum, double weight_decay, u64 nesterov) {
    step_weights(step, weights, grads, m, n, momentum, weight_decay, nesterov);
}

// Weights in A.
KERNEL(256, sgd_master)(const Step* step, A* weights, const T* grads, A* m, u64 n, double momentum, double weight_decay, u64 nesterov) {
    step_weights(step, weights, grads, m, n, momentum, weight_decay, nesterov);
}
