// Elementwise functions. The rows, UNARY and BINARY lines generated from the CPU's table, are appended to this text.
//
// Values and derivatives are computed in A and rounded once.

#include "activations.cuh"

INLINE A normal_cdf(A x) { return A(0.5) * (A(1) + real::erf(x * A(0.7071067811865476))); }
INLINE A share(bool wins, bool equal) { return wins ? A(1) : equal ? A(0.5) : A(0); }

// y = f(x) for n contiguous elements.
template <class F> INLINE void unary(const T* x, T* y, u64 n, F f) {
    map_row(x, y, n, (u32)thread_number(), (u32)thread_count(), [&](u64, T x, T) { return rounded<T>(f(widen(x))); });
}

// dx = dx f'(saved), in place.
template <class F> INLINE void unary_backward(T* dx, const T* saved, u64 n, F f) {
    map_row(saved, dx, n, (u32)thread_number(), (u32)thread_count(),
            [&](u64, T s, T d) { return rounded<T>(widen(d) * f(widen(s))); });
}

// f(y, a, b) elementwise, with a and b broadcast to n elements; y is contiguous.
template <class F> INLINE void binary(const T* a, const T* b, T* y, u64 n, const Layout& layout, F f) {
    const auto value = [&](u64, T a, T b, T y) { return rounded<T>(f(widen(y), widen(a), widen(b))); };
    if (layout.dense) {
        map_rows(y, n, (u32)thread_number(), (u32)thread_count(), value, a, b, (const T*)y);
        return;
    }
    for (u64 i = thread_number(); i < n; i += thread_count()) {
        i64 at[2];
        locate<2>(layout, i, at);
        y[i] = value(i, a[at[0]], b[at[1]], y[i]);
    }
}

// x *= factor, which is in device memory.
KERNEL(256, scale)(T* x, const A* factor, u64 n) {
    const A by = *factor;
    map_rows(x, n, (u32)thread_number(), (u32)thread_count(), [=](u64, T x) { return rounded<T>(widen(x) * by); }, x);
}

// y += x for a strided y and a contiguous x.
KERNEL(256, add_assign)(T* y, const T* x, u64 n, Layout layout) {
    if (layout.dense) {
        map_row(x, y, n, (u32)thread_number(), (u32)thread_count(), [](u64, T x, T y) { return rounded<T>(widen(y) + widen(x)); });
        return;
    }
    for (u64 i = thread_number(); i < n; i += thread_count()) {
        i64 at[1];
        locate<1>(layout, i, at);
        y[at[0]] = rounded<T>(widen(y[at[0]]) + widen(x[i]));
    }
}
