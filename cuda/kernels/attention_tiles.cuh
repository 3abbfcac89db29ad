// Products of tiles on tensor cores for attention.cu: rows of a head are copied to shared memory, multiplied, and stored.
// Included after mma.cuh.

constexpr int WARPS = 4, ROWS = 16 * WARPS, PAD = 8;  // row padding in shared memory: no two of 8 rows share a bank
constexpr float LOG2E = 1.4426950408889634f;

// Starts copying COUNT rows of one head from `first` on to shared memory; rows out of bounds become zero.
//
// Lanes side by side copy a part of a row, so that a thread has one column of each part and needs few addresses. Parts of
// 64 bytes, where D is no multiple of 64 elements, share no bank with those of the row 4 below, which are copied at once.
template <int D, int COUNT>
INLINE void load_rows(T* to, const T* head, i64 stride, i64 first, i64 rows, i64 width) {
    constexpr int PART = D % 64 ? 32 : 64, LANES = PART / 8, STEP = 32 * WARPS / LANES;
    static_assert(D % PART == 0 && COUNT % STEP == 0, "every thread copies as much");
    const int group = threadIdx.x / LANES, column = threadIdx.x % LANES * 8;
    const int row = LANES == 8 ? group : group / 8 * 8 + group % 2 * 4 + group % 8 / 2;
    const T* from = head + (first + row) * stride + column;
    to += row * (D + PAD) + column;
#pragma unroll
    for (int down = 0; down < COUNT; down += STEP)
#pragma unroll
        for (int right = 0; right < D; right += PART) {
            const bool valid = first + row + down < rows && column + right < width;
            copy_async(to + down * (D + PAD) + right, from + down * stride + right, valid);
        }
}

// c (16, 8 N) += a (16, D) b (8 N, D)^T, with the rows of both in shared memory.
template <int D, int N> INLINE void multiply_rows(float (*c)[4], const T* a, const T* b) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < D; k += 32) {
        u32 left[2][4];
        load_matrices(left[0], a + (lane & 15) * (D + PAD) + k + (lane >> 4) * 8);
        load_matrices(left[1], a + (lane & 15) * (D + PAD) + k + 16 + (lane >> 4) * 8);
#pragma unroll
        for (int n = 0; n < N; n++) {
            u32 right[4];
            load_matrices(right, b + (n * 8 + (lane & 7)) * (D + PAD) + k + (lane >> 3) * 8);
            multiply_add(T(), c[n], left[0], right);
            multiply_add(T(), c[n], left[1], right + 2);
        }
    }
}

// c (16, D) += p (16, 8 N) b (8 N, D), with p in result fragments and b in shared memory.
template <int D, int N> INLINE void multiply_fragments(float (*c)[4], const float (*p)[4], const T* b) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < N; k += 2) {
        const u32 left[4] = {packed(T(), p[k][0], p[k][1]), packed(T(), p[k][2], p[k][3]),
                             packed(T(), p[k + 1][0], p[k + 1][1]), packed(T(), p[k + 1][2], p[k + 1][3])};
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            u32 right[4];
            load_matrices_transposed(right, b + (k * 8 + (lane & 15)) * (D + PAD) + n * 8 + (lane >> 4) * 8);
            multiply_add(T(), c[n], left, right);
            multiply_add(T(), c[n + 1], left, right + 2);
        }
    }
}

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
