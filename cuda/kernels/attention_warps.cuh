// What the kernels of attention do by warps, however they multiply tiles. Included before attention_tiles.cuh or
// attention_warpgroup_tiles.cuh.

constexpr float LOG2E = 1.4426950408889634f;

// The number of this warp, which the compiler knows to be the same for all lanes.
INLINE int warp_number() { return __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0); }
// Whether a condition holds, which does for all lanes or none.
INLINE bool uniform(bool condition) { return __ballot_sync(0xffffffffu, condition) != 0; }

// Writes a warp's 16 rows of results, multiplied by a factor for each of this thread's two rows.
template <int D>
INLINE void store_rows(T* head, i64 stride, i64 first, i64 rows, i64 width, const float (*c)[4], float upper, float lower) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const i64 row = first + lane / 4 + half * 8;
        const float factor = half ? lower : upper;
        if (row >= rows) continue;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            const int column = n * 8 + lane % 4 * 2;
            if (column < width)
                *reinterpret_cast<u32*>(head + row * stride + column) = packed(T(), c[n][2 * half] * factor, c[n][2 * half + 1] * factor);
        }
    }
}
