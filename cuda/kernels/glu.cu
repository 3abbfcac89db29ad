// Gated linear units of contiguous rows (gate, up), one group of threads per row: y = f(gate) up, dgate = dy up f'(gate) and
// dup = dy f(gate). f(gate) and dy up are rounded to T before they are factors, as separate operations would round them.

#include "activations.cuh"

template <class F> INLINE void forward(const T* x, T* y, u64 rows, u64 width, F f) {
    const u64 row = group_row();
    if (row >= rows) return;
    const T* gate = x + 2 * row * width;
    map_rows(y + row * width, width, threadIdx.x, blockDim.x,
             [&](u64, T gate, T up) { return rounded<T>(widen(rounded<T>(f(widen(gate)))) * widen(up)); }, gate, gate + width);
}

// Overwrites x with the gradients of its halves.
template <class F, class D> INLINE void backward(T* x, const T* dy, u64 rows, u64 width, F f, D derivative) {
    const u64 row = group_row();
    if (row >= rows) return;
    T *gate = x + 2 * row * width, *up = gate + width;
    dy += row * width;
    auto replace = [&](T& gate, T& up, T dy) {
        const A at = widen(gate), factor = widen(rounded<T>(f(at))), inner = widen(rounded<T>(widen(dy) * widen(up)));
        up = rounded<T>(widen(dy) * factor);
        gate = rounded<T>(inner * derivative(at));
    };
    const u64 vectors = aligned16(gate) && aligned16(up) && aligned16(dy) ? width / Vector<T>::SIZE : 0;
    for (u64 i = threadIdx.x; i < vectors; i += blockDim.x) {
        Vector<T> gates = reinterpret_cast<Vector<T>*>(gate)[i], ups = reinterpret_cast<Vector<T>*>(up)[i];
        const Vector<T> dys = reinterpret_cast<const Vector<T>*>(dy)[i];
#pragma unroll
        for (int j = 0; j < Vector<T>::SIZE; j++) replace(gates.at[j], ups.at[j], dys.at[j]);
        reinterpret_cast<Vector<T>*>(gate)[i] = gates;
        reinterpret_cast<Vector<T>*>(up)[i] = ups;
    }
    for (u64 i = vectors * Vector<T>::SIZE + threadIdx.x; i < width; i += blockDim.x) replace(gate[i], up[i], dy[i]);
}

KERNEL(512, swiglu)(const T* x, T* y, u64 rows, u64 width) {
    forward(x, y, rows, width, [](A x) { return silu(x); });
}
KERNEL(512, swiglu_backward)(T* x, const T* dy, u64 rows, u64 width) {
    backward(x, dy, rows, width, [](A x) { return silu(x); }, [](A x) { return silu_derivative(x); });
}
KERNEL(512, geglu)(const T* x, T* y, u64 rows, u64 width) {
    forward(x, y, rows, width, [](A x) { return gelu_tanh(x); });
}
KERNEL(512, geglu_backward)(T* x, const T* dy, u64 rows, u64 width) {
    backward(x, dy, rows, width, [](A x) { return gelu_tanh(x); }, [](A x) { return gelu_tanh_derivative(x); });
}
