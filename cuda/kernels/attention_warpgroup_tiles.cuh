// Products of tiles by warpgroups, with the names of attention_tiles.cuh: four warps together multiply 64 rows. Included after
// mma.cuh and wgmma.cuh.
//
// A tile lies in shared memory as blocks of 64 columns, or of 32 where D is no multiple of 64. A row of a block has 128 or 64
// bytes, whose parts of 16 bytes are exchanged so that 8 adjacent rows, of one part, share no bank: bits 4 to 6 of an
// address (4 and 5) are xored with bits 7 to 9 (7 and 8). Tiles therefore begin at multiples of 1024 bytes. A product
// sums over the columns of such a tile, of keys for scores, or over its rows, of values for results.

#undef DYNAMIC_ALIGNMENT
#define DYNAMIC_ALIGNMENT 1024

// Warps that multiply together, those of a block, and the most rows of a warp's results, in units of 16.
constexpr int TOGETHER = 4, BLOCK_WARPS = 8, MOST_ROWS = 1;
constexpr bool WARPGROUPS = true;
// Elements that a row of a tile takes in all, and from a row of a block to the next.
template <int D> constexpr int ROW_SIZE = D;
template <int D> constexpr int ROW_STEP = D % 64 ? 32 : 64;

// The place of an element in a tile of ROWS rows.
template <int D, int ROWS> INLINE int place_in_tile(int row, int column) {
    constexpr int STEP = ROW_STEP<D>;
    const int exchanged = STEP == 64 ? row & 7 : row >> 1 & 3;
    return column / STEP * ROWS * STEP + row * STEP + ((column % STEP / 8) ^ exchanged) * 8;
}

// Starts copying COUNT rows of one head from `first` on to a tile; rows out of bounds become zero. Lanes side by side copy a
// row of a block.
template <int D, int COUNT, int WARPS = BLOCK_WARPS>
INLINE void load_rows(T* to, const T* head, i64 stride, int first, int rows, int width) {
    constexpr int PART = ROW_STEP<D>, LANES = PART / 8, STEP = 32 * WARPS / LANES;
    static_assert(COUNT % STEP == 0 && STEP % 8 == 0, "every thread copies as much, to the same place of its rows");
    const int row = threadIdx.x / LANES, column = threadIdx.x % LANES * 8;
    const T* from = head + (first + row) * stride + column;
    to += place_in_tile<D, COUNT>(row, column);
#pragma unroll
    for (int down = 0; down < COUNT; down += STEP)
#pragma unroll
        for (int right = 0; right < D; right += PART) {
            const bool valid = first + row + down < rows && column + right < width;
            copy_async(to + right * COUNT + down * PART, from + down * stride + right, valid);
        }
}
// Lets products read what `load_rows` has copied, when the copies have been waited for. A barrier must follow.
INLINE void show_tiles() { show_to_products(); }

// Describes a tile of ROWS rows to products (PTX ISA, "Matrix Descriptor Format"): the address, the distance of blocks of
// columns, that of groups of 8 rows, and how parts of rows are exchanged.
template <int D, int ROWS> INLINE u64 descriptor(const T* tile) {
    constexpr u64 ROW_BYTES = 2 * ROW_STEP<D>, BLOCKS_APART = ROWS * ROW_BYTES, GROUPS_APART = 8 * ROW_BYTES, MODE = ROW_BYTES == 128 ? 1 : 2;
    return shared_address(tile) >> 4 | BLOCKS_APART >> 4 << 16 | GROUPS_APART >> 4 << 32 | MODE << 62;
}
// Moves a descriptor on by elements.
INLINE u64 moved(u64 descriptor, int elements) { return descriptor + (elements * 2 >> 4); }

// The left factor of `multiply_rows`: 64 rows of a tile of ROWS rows, which products read from shared memory. They are not held in
// fragments: NVRTC 13.0 gives the registers of fragments that a loop's products read to others behind the first of them.
template <int D, int M, bool HELD, int ROWS> struct Rows {
    static_assert(!HELD, "products would read other numbers from the second iteration on");
    const T* tile;
    INLINE Rows(const T* tile) : tile(tile) {}
    INLINE void hold() {}
};

// Elements from a tile's first column to another, of which the part in a block is a multiple of 16.
template <int D, int ROWS> INLINE int to_column(int column) { return column / ROW_STEP<D> * ROWS * ROW_STEP<D> + column % ROW_STEP<D>; }

// Waits until c is there: all products but the last LATER are complete.
template <int LATER, int N> INLINE void finish(float (*c)[N][4]) {
    products_wait<LATER>();
    settle(c[0]);
}

// Starts c (64, 8 N) = a (64, D) b (8 N, D)^T, with b in shared memory; `finish` completes it.
template <int D, int N, int M, bool HELD, int ROWS> INLINE void multiply_rows(float (*c)[N][4], const Rows<D, M, HELD, ROWS>& a, const T* b) {
    const u64 left = descriptor<D, ROWS>(a.tile), right = descriptor<D, 8 * N>(b);
    products_begin();
#pragma unroll
    for (int k = 0; k < D; k += 16)
        multiply_group<8 * N, false>(T(), c[0], moved(left, to_column<D, ROWS>(k)), moved(right, to_column<D, 8 * N>(k)), k > 0);
    products_commit();
}

// Starts c (64, D) += p (64, 8 N) b (8 N, D), with p in result fragments and b in shared memory; `finish` completes it.
template <int D, int N, int M> INLINE void multiply_fragments(float (*c)[D / 8][4], const float (*p)[N][4], const T* b) {
    const u64 right = descriptor<D, 8 * N>(b);
    u32 left[N / 2][4];
#pragma unroll
    for (int k = 0; k < N; k += 2)
#pragma unroll
        for (int i = 0; i < 4; i++) left[k / 2][i] = packed(T(), p[0][k + i / 2][i % 2 * 2], p[0][k + i / 2][i % 2 * 2 + 1]);
    settle(left);
    settle(c[0]);
    products_begin();
#pragma unroll
    for (int k = 0; k < N; k += 2) multiply_group<D, true>(T(), c[0], left[k / 2], moved(right, k * 8 * ROW_STEP<D>), true);
    products_commit();
}
