// LayerNorm and RMSNorm of contiguous rows, and their gradients. With m the row's mean (0 for RMSNorm),
// r = 1 / sqrt(mean((x - m)^2) + eps) and h = (x - m) r:
//
// - forward: y = h w + b;
// - backward: dx = r (dy w - mean(dy w) - h mean(dy w h)) (RMSNorm: without the middle term), rounded and then added to
//   the gradient `before`, unless it is null; dw = sum over rows of dy h, db = sum over rows of dy.
//
// w and b are of type W: T, or, in the kernels called `wide`, A. One group of threads per row. Sums over rows are
// computed in blocks of rows, and then over blocks: `partials` is (blocks, 2, width).

// Packs of a row that each of its threads holds in registers, so that all of its loads are in flight at once and none is
// repeated. Mirrors `HELD` on the host.
constexpr u32 HELD = 4;

// Calls f(k, i) for this thread's packs i of a row: k is below HELD for those that are held, else HELD.
template <class F> INLINE void for_own_packs(u32 packs, F f) {
#pragma unroll
    for (u32 k = 0; k < HELD; k++)
        if (threadIdx.x + k * blockDim.x < packs) f(k, threadIdx.x + k * blockDim.x);
    for (u32 i = threadIdx.x + HELD * blockDim.x; i < packs; i += blockDim.x) f(HELD, i);
}

// This thread's packs of a row; the first HELD are loaded at once.
template <class W, int N> struct OwnPacks {
    const Pack<W, N>* row;
    Pack<W, N> held[HELD];
    INLINE OwnPacks(const W* from, u32 packs) : row(reinterpret_cast<const Pack<W, N>*>(from)) {
#pragma unroll
        for (u32 k = 0; k < HELD; k++)
            if (threadIdx.x + k * blockDim.x < packs) held[k] = row[threadIdx.x + k * blockDim.x];
    }
    INLINE Pack<W, N> at(u32 k, u32 i) const { return k < HELD ? held[k] : row[i]; }
};

template <bool CENTRED, int N, class W>
INLINE void forward_row(const T* x, const W* weight, const W* bias, T* y, A* mean, A* rstd, u64 row, u64 width, double eps) {
    const u32 packs = width / N;
    OwnPacks<T, N> own(x + row * width, packs);
    // Without a bias something else is loaded in its place, so that the loop has no branch.
    const Pack<W, N>* scale = reinterpret_cast<const Pack<W, N>*>(weight);
    const Pack<W, N>* shift = bias ? reinterpret_cast<const Pack<W, N>*>(bias) : scale;
    A m = A(0);
    if (CENTRED) {
        for_own_packs(packs, [&](u32 k, u32 i) { for_packs<N>(0, [&](u64, T x) { m += widen(x); }, own.at(k, i)); });
        m = group_sum(m) / (A)width;
    }
    A squares = A(0);
    for_own_packs(packs, [&](u32 k, u32 i) {
        for_packs<N>(0, [&](u64, T x) { squares += (widen(x) - m) * (widen(x) - m); }, own.at(k, i));
    });
    const A r = A(1) / real::sqrt(group_sum(squares) / (A)width + (A)eps);
    if (threadIdx.x == 0) {
        if (CENTRED) mean[row] = m;
        rstd[row] = r;
    }
    for_own_packs(packs, [&](u32 k, u32 i) {
        const auto result = [&](u64, T x, W scale, W shift) {
            const A h = (widen(x) - m) * r * widen(scale);
            return rounded<T>(bias ? h + widen(shift) : h);
        };
        reinterpret_cast<Pack<T, N>*>(y + row * width)[i] = map_packs<T, N>(0, result, own.at(k, i), scale[i], shift[i]);
    });
}

template <bool CENTRED, class W>
INLINE void forward(const T* x, const W* weight, const W* bias, T* y, A* mean, A* rstd, u64 rows, u64 width, double eps) {
    constexpr int SIZE = Vector<T>::SIZE;
    const u64 row = group_row();
    if (row >= rows) return;
    if (width % SIZE == 0 && aligned16(x) && aligned16(weight) && aligned16(bias) && aligned16(y))
        forward_row<CENTRED, SIZE>(x, weight, bias, y, mean, rstd, row, width, eps);
    else
        forward_row<CENTRED, 1>(x, weight, bias, y, mean, rstd, row, width, eps);
}

KERNEL(512, layer_norm)
(const T* x, const T* weight, const T* bias, T* y, A* mean, A* rstd, u64 rows, u64 width, double eps) {
    forward<true>(x, weight, bias, y, mean, rstd, rows, width, eps);
}

KERNEL(512, layer_norm_wide)
(const T* x, const A* weight, const A* bias, T* y, A* mean, A* rstd, u64 rows, u64 width, double eps) {
    forward<true>(x, weight, bias, y, mean, rstd, rows, width, eps);
}

KERNEL(512, rms_norm)(const T* x, const T* weight, T* y, A* rstd, u64 rows, u64 width, double eps) {
    forward<false>(x, weight, (const T*)nullptr, y, nullptr, rstd, rows, width, eps);
}

KERNEL(512, rms_norm_wide)(const T* x, const A* weight, T* y, A* rstd, u64 rows, u64 width, double eps) {
    forward<false>(x, weight, (const A*)nullptr, y, nullptr, rstd, rows, width, eps);
}

template <bool CENTRED, class W>
INLINE void backward_input(const T* dy, const T* x, const A* mean, const A* rstd, const W* weight, const T* before, T* dx, u64 rows,
                           u64 width) {
    const u64 row = group_row();
    if (row >= rows) return;
    dy += row * width;
    x += row * width;
    dx += row * width;
    const A m = CENTRED ? mean[row] : A(0), r = rstd[row];
    A total = A(0), along = A(0);
    for_rows(
        width, threadIdx.x, blockDim.x,
        [&](u64, T dy, T x, W weight) {
            A g = widen(dy) * widen(weight);
            total += g;
            along += g * ((widen(x) - m) * r);
        },
        dy, x, weight);
    total = CENTRED ? group_sum(total) / (A)width : A(0);
    along = group_sum(along) / (A)width;
    // Without a gradient before something else is loaded in its place, so that the loop has no branch.
    map_rows(
        dx, width, threadIdx.x, blockDim.x,
        [&](u64, T dy, T x, W weight, T first) {
            A h = (widen(x) - m) * r;
            const T own = rounded<T>(r * (widen(dy) * widen(weight) - total - h * along));
            return before ? rounded<T>(widen(first) + widen(own)) : own;
        },
        dy, x, weight, before ? before + row * width : dy);
}

KERNEL(512, layer_norm_backward_input)
(const T* dy, const T* x, const A* mean, const A* rstd, const T* weight, const T* before, T* dx, u64 rows, u64 width) {
    backward_input<true>(dy, x, mean, rstd, weight, before, dx, rows, width);
}

KERNEL(512, layer_norm_wide_backward_input)
(const T* dy, const T* x, const A* mean, const A* rstd, const A* weight, const T* before, T* dx, u64 rows, u64 width) {
    backward_input<true>(dy, x, mean, rstd, weight, before, dx, rows, width);
}

KERNEL(512, rms_norm_backward_input)
(const T* dy, const T* x, const A* rstd, const T* weight, const T* before, T* dx, u64 rows, u64 width) {
    backward_input<false>(dy, x, nullptr, rstd, weight, before, dx, rows, width);
}

KERNEL(512, rms_norm_wide_backward_input)
(const T* dy, const T* x, const A* rstd, const A* weight, const T* before, T* dx, u64 rows, u64 width) {
    backward_input<false>(dy, x, nullptr, rstd, weight, before, dx, rows, width);
}

// The sums of 32 N columns from `base` on over rows `first` to `end`: a lane has N columns, and a warp every fourth row.
constexpr u32 WARPS = 4;
template <bool CENTRED, int N>
INLINE void column_partials(const T* dy, const T* x, const A* mean, const A* rstd, A* partials, u64 width, u64 first, u64 end, u64 base) {
    // A lane's sums of dy h, then those of dy, by 16 bytes if there are as many.
    constexpr u32 SIZE = N < Vector<A>::SIZE ? N : Vector<A>::SIZE, PARTS = N / SIZE, LANES = 32 / PARTS;
    using Part = Pack<A, SIZE>;
    SHARED(Part, parts, WARPS * 2 * PARTS * 32);
    const u32 lane = threadIdx.x, warp = threadIdx.y;
    const u64 column = base + lane * N;
    Part sums[2 * PARTS] = {};
    if (column < width) {
#pragma unroll 8
        for (u64 row = first + warp; row < end; row += WARPS) {
            const Pack<T, N> g = *reinterpret_cast<const Pack<T, N>*>(dy + row * width + column);
            const Pack<T, N> own = *reinterpret_cast<const Pack<T, N>*>(x + row * width + column);
            const A m = CENTRED ? mean[row] : A(0), r = rstd[row];
#pragma unroll
            for (u32 j = 0; j < N; j++) {
                sums[j / SIZE].at[j % SIZE] += widen(g.at[j]) * ((widen(own.at[j]) - m) * r);
                sums[PARTS + j / SIZE].at[j % SIZE] += widen(g.at[j]);
            }
        }
    }
    __syncthreads();  // the parts of the columns before have been read
#pragma unroll
    for (u32 k = 0; k < 2 * PARTS; k++) parts[(warp * 2 * PARTS + k) * 32 + lane] = sums[k];
    __syncthreads();
    if (warp >= 2 * PARTS) return;
    // A warp adds and stores 32 parts of adjacent columns.
    const u32 kind = warp / PARTS, of_lane = warp % PARTS * LANES + lane % LANES, number = lane / LANES;
    const u64 to = base + of_lane * N + number * SIZE;
    if (to >= width) return;
    const Part* part = parts + (kind * PARTS + number) * 32 + of_lane;
    Part sum = part[0];
#pragma unroll
    for (u32 k = 1; k < WARPS; k++) {
        const Part other = part[k * 2 * PARTS * 32];
#pragma unroll
        for (u32 j = 0; j < SIZE; j++) sum.at[j] += other.at[j];
    }
    *reinterpret_cast<Part*>(partials + (2 * blockIdx.y + kind) * width + to) = sum;
}

// Blocks (i, j) of the grid handle all columns, 16 bytes or one for a lane, and `block_rows` rows each.
template <bool CENTRED>
INLINE void backward_partials(const T* dy, const T* x, const A* mean, const A* rstd, A* partials, u64 rows, u64 width, u64 block_rows) {
    constexpr int SIZE = Vector<T>::SIZE;
    const bool packs = width % SIZE == 0 && aligned16(dy) && aligned16(x) && aligned16(partials);
    const u64 first = blockIdx.y * block_rows, end = first + block_rows < rows ? first + block_rows : rows;
    const u64 columns = packs ? 32 * SIZE : 32;
    for (u64 base = blockIdx.x * columns; base < width; base += gridDim.x * columns) {
        if (packs)
            column_partials<CENTRED, SIZE>(dy, x, mean, rstd, partials, width, first, end, base);
        else
            column_partials<CENTRED, 1>(dy, x, mean, rstd, partials, width, first, end, base);
    }
}

KERNEL(128, layer_norm_backward_partials)
(const T* dy, const T* x, const A* mean, const A* rstd, A* partials, u64 rows, u64 width, u64 block_rows) {
    backward_partials<true>(dy, x, mean, rstd, partials, rows, width, block_rows);
}

KERNEL(128, rms_norm_backward_partials)
(const T* dy, const T* x, const A* rstd, A* partials, u64 rows, u64 width, u64 block_rows) {
    backward_partials<false>(dy, x, nullptr, rstd, partials, rows, width, block_rows);
}

// dweight and, unless it is null, dbias from the partial sums: a lane has a column, and a warp every eighth of its sums.
KERNEL(256, norm_backward_weights)(const A* partials, A* dweight, A* dbias, u64 blocks, u64 width) {
    SHARED(A, parts, 8 * 64);
    const u32 lane = threadIdx.x, warp = threadIdx.y;
    const u64 column = (u64)blockIdx.x * 32 + lane;
    A along = A(0), total = A(0);
    for (u64 block = warp; block < blocks && column < width; block += 8) {
        along += partials[2 * block * width + column];
        total += partials[(2 * block + 1) * width + column];
    }
    parts[warp * 64 + lane] = along;
    parts[warp * 64 + 32 + lane] = total;
    __syncthreads();
    A* to = warp == 0 ? dweight : dbias;
    if (warp > 1 || column >= width || !to) return;
    A sum = A(0);
#pragma unroll
    for (u32 k = 0; k < 8; k++) sum += parts[k * 64 + warp * 32 + lane];
    to[column] = sum;
}
