// AdamW in one pass over flat buffers (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019):
// g = grad_scale * gradient
// m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2
// w = w (1 - lr * weight_decay) - lr / (1 - beta1^update) * m / (sqrt(v / (1 - beta2^update)) + eps)
//
// One thread computes the coefficients in f64 beforehand, from the step parameters. If a gradient is not finite,
// nothing changes.

struct Coefficients {
    A grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, keep, step_size, inverse_root, eps;
};

KERNEL(32, adamw_coefficients)
(Coefficients* c, const Step* step, double beta1, double beta2, double eps, double weight_decay) {
    if (thread_number() > 0) return;
    const double update = (double)step->update;
    c->grad_scale = (A)step->grad_scale;
    c->beta1 = (A)beta1;
    c->one_minus_beta1 = (A)(1 - beta1);
    c->beta2 = (A)beta2;
    c->one_minus_beta2 = (A)(1 - beta2);
    c->keep = (A)(1 - step->lr * weight_decay);
    c->step_size = (A)(step->lr / (1 - real::pow(beta1, update)));
    c->inverse_root = (A)(1 / real::sqrt(1 - real::pow(beta2, update)));
    c->eps = (A)eps;
}

template <class N> struct alignas(4 * sizeof(N)) Four { N at[4]; };
template <class N> INLINE bool by_four(const N* pointer) {
    return (reinterpret_cast<u64>(pointer) & (4 * sizeof(N) - 1)) == 0;
}

// Updates the moments of one weight and returns the new weight in A.
INLINE A updated(const Coefficients& c, A w, A g, A& m, A& v) {
    g *= c.grad_scale;
    m = m * c.beta1 + g * c.one_minus_beta1;
    v = v * c.beta2 + g * g * c.one_minus_beta2;
    return w * c.keep - c.step_size * m / (real::sqrt(v) * c.inverse_root + c.eps);
}

// Updates weights W from gradients G; a `copy` receives the weights rounded to T.
template <class W, class G, bool COPIES>
INLINE void step_weights(const Coefficients* coefficients, const Step* step, W* weights, const G* grads, A* m, A* v, T* copy, u64 n) {
    if (step->found_inf) return;
    const Coefficients c = *coefficients;
    const u64 first = thread_number(), stride = thread_count();
    u64 fours = by_four(weights) && by_four(grads) && by_four(m) && by_four(v) ? n / 4 : 0;
    if (COPIES && !by_four(copy)) fours = 0;
    for (u64 i = first; i < fours; i += stride) {
        Four<W> w = reinterpret_cast<Four<W>*>(weights)[i];
        const Four<G> g = reinterpret_cast<const Four<G>*>(grads)[i];
        Four<A> mean = reinterpret_cast<Four<A>*>(m)[i], square = reinterpret_cast<Four<A>*>(v)[i];
        Four<T> rounded_copy;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            A value = updated(c, widen(w.at[j]), widen(g.at[j]), mean.at[j], square.at[j]);
            w.at[j] = rounded<W>(value);
            if (COPIES) rounded_copy.at[j] = rounded<T>(value);
        }
        reinterpret_cast<Four<W>*>(weights)[i] = w;
        reinterpret_cast<Four<A>*>(m)[i] = mean;
        reinterpret_cast<Four<A>*>(v)[i] = square;
        if (COPIES && copy) reinterpret_cast<Four<T>*>(copy)[i] = rounded_copy;
    }
    for (u64 i = 4 * fours + first; i < n; i += stride) {
        A value = updated(c, widen(weights[i]), widen(grads[i]), m[i], v[i]);
        weights[i] = rounded<W>(value);
        if (COPIES && copy) copy[i] = rounded<T>(value);
    }
}

// Weights and gradients in the element type.
KERNEL(256, adamw)(const Coefficients* c, const Step* step, T* weights, const T* grads, A* m, A* v, u64 n) {
    step_weights<T, T, false>(c, step, weights, grads, m, v, nullptr, n);
}

// Gradients in A.
KERNEL(256, adamw_wide)(const Coefficients* c, const Step* step, T* weights, const A* grads, A* m, A* v, u64 n) {
    step_weights<T, A, false>(c, step, weights, grads, m, v, nullptr, n);
}

// Master weights in A with copies in the element type, and gradients of either type.
KERNEL(256, adamw_master)(const Coefficients* c, const Step* step, A* master, const T* grads, A* m, A* v, T* copy, u64 n) {
    step_weights<A, T, true>(c, step, master, grads, m, v, copy, n);
}

KERNEL(256, adamw_master_wide)
(const Coefficients* c, const Step* step, A* master, const A* grads, A* m, A* v, T* copy, u64 n) {
    step_weights<A, A, true>(c, step, master, grads, m, v, copy, n);
}
