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
    map_row(x, y, width, threadIdx.x, blockDim.x, [&](u64 i, T x, T) {
        A h = (widen(x) - m) * r * widen(weight[i]);
        return rounded<T>(bias ? h + widen(bias[i]) : h);
    });
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
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        A g = widen(dy[i]) * widen(weight[i]);
        total += g;
        along += g * ((widen(x[i]) - m) * r);
    }
    total = CENTRED ? group_sum(total) / (A)width : A(0);
    along = group_sum(along) / (A)width;
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        A h = (widen(x[i]) - m) * r;
        dx[i] = rounded<T>(r * (widen(dy[i]) * widen(weight[i]) - total - h * along));
    }
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

// Block (i, j) of the grid handles 128 columns and `block_rows` rows.
template <bool CENTRED>
INLINE void backward_partials(const T* dy, const T* x, const A* mean, const A* rstd, A* partials, u64 rows, u64 width, u64 block_rows) {
    const u64 column = thread_number();
    if (column >= width) return;
    const u64 first = blockIdx.y * block_rows, end = first + block_rows < rows ? first + block_rows : rows;
    A along = A(0), total = A(0);
#pragma unroll 4
    for (u64 row = first; row < end; row++) {
        A g = widen(dy[row * width + column]);
        along += g * ((widen(x[row * width + column]) - (CENTRED ? mean[row] : A(0))) * rstd[row]);
        total += g;
    }
    partials += blockIdx.y * 2 * width + column;
    partials[0] = along;
    partials[width] = total;
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
