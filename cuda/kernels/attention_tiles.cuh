// Products of tiles on tensor cores for attention.cu: rows of a head are copied to shared memory and multiplied. Included after
// mma.cuh.

constexpr int PAD = 8;  // row padding in shared memory: no two of 8 rows share a bank
// Warps that multiply together, those of a block, and the most rows of a warp's results, in units of 16.
constexpr int TOGETHER = 1, BLOCK_WARPS = 4, MOST_ROWS = 2;
constexpr bool WARPGROUPS = false;
// Elements that a row of a tile takes in all, and from a row to the next.
template <int D> constexpr int ROW_SIZE = D + PAD;
template <int D> constexpr int ROW_STEP = D + PAD;

// Starts copying COUNT rows of one head from `first` on to shared memory; rows out of bounds become zero.
//
// Lanes side by side copy a part of a row, so that a thread has one column of each part and needs few addresses. Parts of
// 64 bytes, where D is no multiple of 64 elements, share no bank with those of the row 4 below, which are copied at once.
template <int D, int COUNT, int WARPS = BLOCK_WARPS>
INLINE void load_rows(T* to, const T* head, i64 stride, int first, int rows, int width) {
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

// Tiles need nothing but a barrier, and products are complete at once.
INLINE void show_tiles() {}
template <int LATER, int N> INLINE void finish(float (*)[N][4]) {}

// The left factor of `multiply_rows`: 16 M rows of a tile of ROWS, of which fragments are loaded when they are needed or, if
// HELD, once.
template <int D, int M, bool HELD, int ROWS> struct Rows {
    const T* tile;
    u32 held[HELD ? M : 1][HELD ? D / 16 : 1][4];
    INLINE Rows(const T* tile) : tile(tile) {}
    INLINE void load(u32* to, int m, int k) const {
        const int lane = threadIdx.x & 31;
        load_matrices(to, tile + (m * 16 + (lane & 15)) * (D + PAD) + k * 16 + (lane >> 4) * 8);
    }
    INLINE void hold() {
        if constexpr (HELD) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int k = 0; k < D / 16; k++) load(held[m][k], m, k);
        }
    }
    INLINE void get(u32* to, int m, int k) const {
        if constexpr (HELD) {
#pragma unroll
            for (int i = 0; i < 4; i++) to[i] = held[m][k][i];
        } else {
            load(to, m, k);
        }
    }
};

// c (16 M, 8 N) += a (16 M, D) b (8 N, D)^T, with the rows of b in shared memory. What is loaded of b serves all of a.
template <int D, int N, int M, bool HELD, int ROWS>
INLINE void multiply_rows(float (*c)[N][4], const Rows<D, M, HELD, ROWS>& a, const T* b) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        u32 left[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) a.get(left[m], m, k / 16);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 right[4];
            load_matrices(right, b + (n * 8 + (lane & 7) + (lane >> 4) * 8) * (D + PAD) + k + (lane >> 3 & 1) * 8);
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add(T(), c[m][n], left[m], right);
                multiply_add(T(), c[m][n + 1], left[m], right + 2);
            }
        }
    }
}

// c (16 M, D) += p (16 M, 8 N) b (8 N, D), with p in result fragments and b in shared memory.
template <int D, int N, int M> INLINE void multiply_fragments(float (*c)[D / 8][4], const float (*p)[N][4], const T* b) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < N; k += 2) {
        u32 left[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) left[m][i] = packed(T(), p[m][k + i / 2][i % 2 * 2], p[m][k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            u32 right[4];
            load_matrices_transposed(right, b + (k * 8 + (lane & 15)) * (D + PAD) + n * 8 + (lane >> 4) * 8);
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add(T(), c[m][n], left[m], right);
                multiply_add(T(), c[m][n + 1], left[m], right + 2);
            }
        }
    }
}
