// LayerNorm and RMSNorm of contiguous rows, and their gradients. With m the row's mean (0 for RMSNorm),
// r = 1 / sqrt(mean((x - m)^2) + eps) and h = (x - m) r:
//
// - forward: y = h w + b;
// - backward: dx = r (dy w - mean(dy w) - h mean(dy w h)) (RMSNorm: without the middle term),
//   dw = sum over rows of dy h, db = sum over rows of dy.
//
// w and b are of type W: T, or, in the kernels called `wide`, A. One group of threads per row. Sums over rows are
// computed in blocks of rows, one thread per column, and then added in order: `partials` is (blocks, 2, width).

template <bool CENTRED, class W>
INLINE void forward(const T* x, const W* weight, const W* bias, T* y, A* mean, A* rstd, u64 rows, u64 width, double eps) {
    const u64 row = group_row();
    if (row >= rows) return;
    x += row * width;
    y += row * width;
    A m = A(0);
    if (CENTRED) {
        for_row(x, width, threadIdx.x, blockDim.x, [&](u64, T x) { m += widen(x); });
        m = group_sum(m) / (A)width;
    }
    A squares = A(0);
    for_row(x, width, threadIdx.x, blockDim.x, [&](u64, T x) { squares += (widen(x) - m) * (widen(x) - m); });
    const A r = A(1) / real::sqrt(group_sum(squares) / (A)width + (A)eps);
    if (threadIdx.x == 0) {
        if (CENTRED) mean[row] = m;
        rstd[row] = r;
    }
    // Without a bias something else is loaded in its place, so that the loop has no branch.
    map_rows(
        y, width, threadIdx.x, blockDim.x,
        [&](u64, T x, W scale, W shift) {
            A h = (widen(x) - m) * r * widen(scale);
            return rounded<T>(bias ? h + widen(shift) : h);
        },
        x, weight, bias ? bias : weight);
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
INLINE void backward_input(const T* dy, const T* x, const A* mean, const A* rstd, const W* weight, T* dx, u64 rows, u64 width) {
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
    map_rows(
        dx, width, threadIdx.x, blockDim.x,
        [&](u64, T dy, T x, W weight) {
            A h = (widen(x) - m) * r;
            return rounded<T>(r * (widen(dy) * widen(weight) - total - h * along));
        },
        dy, x, weight);
}

KERNEL(512, layer_norm_backward_input)
(const T* dy, const T* x, const A* mean, const A* rstd, const T* weight, T* dx, u64 rows, u64 width) {
    backward_input<true>(dy, x, mean, rstd, weight, dx, rows, width);
}

KERNEL(512, layer_norm_wide_backward_input)
(const T* dy, const T* x, const A* mean, const A* rstd, const A* weight, T* dx, u64 rows, u64 width) {
    backward_input<true>(dy, x, mean, rstd, weight, dx, rows, width);
}

KERNEL(512, rms_norm_backward_input)
(const T* dy, const T* x, const A* rstd, const T* weight, T* dx, u64 rows, u64 width) {
    backward_input<false>(dy, x, nullptr, rstd, weight, dx, rows, width);
}

KERNEL(512, rms_norm_wide_backward_input)
(const T* dy, const T* x, const A* rstd, const A* weight, T* dx, u64 rows, u64 width) {
    backward_input<false>(dy, x, nullptr, rstd, weight, dx, rows, width);
}

// The partial sums of N columns and `block_rows` rows, whose bytes are enough in flight by UNROLL rows at a time.
template <bool CENTRED, int N, int UNROLL>
INLINE void column_partials(const T* dy, const T* x, const A* mean, const A* rstd, A* partials, u64 rows, u64 width, u64 block_rows, u64 column) {
    const u64 first = blockIdx.y * block_rows, end = first + block_rows < rows ? first + block_rows : rows;
    Pack<A, N> along = {}, total = {};
#pragma unroll UNROLL
    for (u64 row = first; row < end; row++) {
        const Pack<T, N> g = *reinterpret_cast<const Pack<T, N>*>(dy + row * width + column);
        const Pack<T, N> own = *reinterpret_cast<const Pack<T, N>*>(x + row * width + column);
        const A m = CENTRED ? mean[row] : A(0), r = rstd[row];
#pragma unroll
        for (int j = 0; j < N; j++) {
            along.at[j] += widen(g.at[j]) * ((widen(own.at[j]) - m) * r);
            total.at[j] += widen(g.at[j]);
        }
    }
    partials += blockIdx.y * 2 * width + column;
    *reinterpret_cast<Pack<A, N>*>(partials) = along;
    *reinterpret_cast<Pack<A, N>*>(partials + width) = total;
}

// Blocks (i, j) of the grid handle all columns, 16 bytes or one at a time, and `block_rows` rows each.
template <bool CENTRED>
INLINE void backward_partials(const T* dy, const T* x, const A* mean, const A* rstd, A* partials, u64 rows, u64 width, u64 block_rows) {
    constexpr int SIZE = Vector<T>::SIZE;
    const bool packs = width % SIZE == 0 && aligned16(dy) && aligned16(x) && aligned16(partials);
    for (u64 column = thread_number() * (packs ? SIZE : 1); column < width; column += thread_count() * (packs ? SIZE : 1)) {
        if (packs)
            column_partials<CENTRED, SIZE, 8>(dy, x, mean, rstd, partials, rows, width, block_rows, column);
        else
            column_partials<CENTRED, 1, 4>(dy, x, mean, rstd, partials, rows, width, block_rows, column);
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

// dweight and, unless it is null, dbias from the partial sums.
KERNEL(128, norm_backward_weights)(const A* partials, A* dweight, A* dbias, u64 blocks, u64 width) {
    const u64 column = thread_number();
    if (column >= width) return;
    A along = A(0), total = A(0);
    for (u64 block = 0; block < blocks; block++) {
        along += partials[2 * block * width + column];
        total += partials[(2 * block + 1) * width + column];
    }
    dweight[column] = along;
    if (dbias) dbias[column] = total;
}
