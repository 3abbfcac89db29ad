// Stochastic rounding from A: of the two representable neighbours low <= x <= high, high with probability
// (x - low) / (high - low) (Gupta et al., arXiv 1502.02551, section 3.1). Numbers beyond the largest are rounded to
// nearest. After a skipped step nothing is rounded.

#include "philox.cuh"

// The next representable number above or below: numbers of one sign are ordered by their bits.
INLINE f16 neighbour(f16 x, bool above) {
    const u16 sign = 0x8000;
    const bool negative = x.bits & sign;
    if ((x.bits & ~sign & 0xffff) == 0) return f16{(u16)((above ? 0 : sign) | 1)};
    return f16{(u16)(negative == above ? x.bits - 1 : x.bits + 1)};
}

// bf16 is the upper half of f32: the neighbour towards zero, or the other one if the half that is discarded and 16 random
// bits add up to a carry. NaN and what is not below the largest number are rounded to nearest.
INLINE bf16 up_or_down(float x, bf16 nearest, Draws& draws, u64 index) {
    const u32 bits = __float_as_uint(x), sum = bits + draws.half_at(index);
    return (bits & 0x7fffffffu) < 0x7f7f0000u ? bf16{(u16)(sum >> 16)} : nearest;
}

// The neighbour on the other side of x if a uniform number is below the fraction of the distance to it.
INLINE f16 up_or_down(float x, f16 nearest, Draws& draws, u64 index) {
    const float error = x - widen(nearest);
    const f16 other = neighbour(nearest, error > 0);
    const double uniform = draws.at(index) * (1.0 / 4294967296.0);
    // Comparison with NaN, from x or from an infinite distance, is false.
    const double share = (double)(error / (widen(other) - widen(nearest)));
    return uniform < share ? other : nearest;
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
            target[i] = up_or_down(x, rounded<T>(x), draws, global_index(place, i));
        }
    }
}
