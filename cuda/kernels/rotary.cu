// Rotary position embedding (Su et al., 2021), rotate-half. With h = R/2, i < h and the angle of the position and i:
// y[i] = x[i] cos - x[i+h] sin, y[i+h] = x[i+h] cos + x[i] sin. The gradient is the inverse rotation, sign = -1.
//
// x is (B, T, H, D) with a dense last dim, y is contiguous; heads from `heads` on, and elements from R on, are
// copied.

struct Rotary {
    u64 batch, positions, all, heads, width, half;
    i64 batch_stride, position_stride, head_stride;
    A sign;
};

// A thread's share in units of N elements of a head, which begin at multiples of N.
template <int N> INLINE void rotate(const T* x, const A* cos, const A* sin, T* y, const Rotary& r) {
    using Elements = Pack<T, N>;
    using Factors = Pack<A, N>;
    const u64 per_head = (r.width - r.half) / N, n = r.batch * r.positions * r.all * per_head;
    for (u64 index = thread_number(); index < n; index += thread_count()) {
        const u64 i = index % per_head * N, row = index / per_head;
        const u64 head = row % r.all, position = row / r.all % r.positions, sample = row / r.all / r.positions;
        const T* from = x + (i64)sample * r.batch_stride + (i64)position * r.position_stride + (i64)head * r.head_stride + i;
        T* to = y + row * r.width + i;
        const Elements upper = *reinterpret_cast<const Elements*>(from + r.half);
        if (i >= r.half) {
            *reinterpret_cast<Elements*>(to + r.half) = upper;
            continue;
        }
        const Elements lower = *reinterpret_cast<const Elements*>(from);
        if (head >= r.heads) {
            *reinterpret_cast<Elements*>(to) = lower;
            *reinterpret_cast<Elements*>(to + r.half) = upper;
            continue;
        }
        const Factors c = *reinterpret_cast<const Factors*>(cos + position * r.half + i);
        const Factors s = *reinterpret_cast<const Factors*>(sin + position * r.half + i);
        Elements first, second;
#pragma unroll
        for (int j = 0; j < N; j++) {
            const A a = widen(lower.at[j]), b = widen(upper.at[j]), own = r.sign * s.at[j];
            first.at[j] = rounded<T>(a * c.at[j] - b * own);
            second.at[j] = rounded<T>(b * c.at[j] + a * own);
        }
        *reinterpret_cast<Elements*>(to) = first;
        *reinterpret_cast<Elements*>(to + r.half) = second;
    }
}

KERNEL(256, rotary)
(const T* x, const A* cos, const A* sin, T* y, u64 batch, u64 positions, u64 all, u64 heads, u64 width, u64 half, i64 batch_stride,
 i64 position_stride, i64 head_stride, int sign) {
    const Rotary r = {batch, positions, all, heads, width, half, batch_stride, position_stride, head_stride, (A)sign};
    constexpr int SIZE = Vector<T>::SIZE;
    const u64 steps = width | half | (u64)batch_stride | (u64)position_stride | (u64)head_stride;
    if (steps % SIZE == 0 && aligned16(x) && aligned16(y) && aligned16(cos) && aligned16(sin))
        rotate<SIZE>(x, cos, sin, y, r);
    else
        rotate<1>(x, cos, sin, y, r);
}
