// Stochastic rounding from A: of the two representable neighbours low <= x <= high, high with probability
// (x - low) / (high - low) (Gupta et al., arXiv 1502.02551, section 3.1). Numbers beyond the largest are rounded to
// nearest. After a skipped step nothing is rounded.

#include "philox.cuh"

// The next representable number above or below: numbers of one sign are ordered by their bits.
INLINE T neighbour(T x, bool above) {
    const u16 sign = 0x8000;
    const bool negative = x.bits & sign;
    if ((x.bits & ~sign & 0xffff) == 0) return T{(u16)((above ? 0 : sign) | 1)};
    return T{(u16)(negative == above ? x.bits - 1 : x.bits + 1)};
}

KERNEL(256, round_stochastic)(const A* source, T* target, u64 n, u64 key, const Step* step, Place place) {
    if (step->found_inf) return;
    Draws draws(key, step->number);
    const u64 quads = (n + 3) / 4;
    for (u64 quad = thread_number(); quad < quads; quad += thread_count()) {
#pragma unroll
        for (u64 i = 4 * quad; i < 4 * quad + 4; i++) {
            if (i >= n) break;
            const A x = source[i];
            const T nearest = rounded<T>(x);
            const A error = x - widen(nearest);
            const T other = neighbour(nearest, error > A(0));
            const double uniform = draws.at(global_index(place, i)) * (1.0 / 4294967296.0);
            // Comparison with NaN, from x or from an infinite distance, is false.
            const double share = (double)(error / (widen(other) - widen(nearest)));
            target[i] = uniform < share ? other : nearest;
        }
    }
}
