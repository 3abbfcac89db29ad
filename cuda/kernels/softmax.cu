// Softmax and log-softmax of contiguous rows, and their gradients; one group of threads per row.
//
// - softmax: y_i = e^(x_i - m) / sum_j e^(x_j - m), m = max_j x_j; dx = y (dy - sum_j dy_j y_j).
// - log_softmax: y_i = x_i - m - ln sum_j e^(x_j - m); dx = dy - e^y sum_j dy_j.

#include "statistics.cuh"

INLINE Statistics row_statistics(const T* x, u64 width) {
    Statistics own;
    for_row_packs(x, width, threadIdx.x, blockDim.x, [&](const auto& pack) { own.add(pack); });
    return own.joined();
}

KERNEL(512, softmax)(const T* x, T* y, u64 rows, u64 width) {
    const u64 row = group_row();
    if (row >= rows) return;
    x += row * width;
    y += row * width;
    const Statistics found = row_statistics(x, width);
    const A inverse = A(1) / found.sum_exp;
    map_row(x, y, width, threadIdx.x, blockDim.x,
            [&](u64, T x, T) { return rounded<T>(real::exp(widen(x) - found.max) * inverse); });
}

KERNEL(512, log_softmax)(const T* x, T* y, u64 rows, u64 width) {
    const u64 row = group_row();
    if (row >= rows) return;
    x += row * width;
    y += row * width;
    const Statistics found = row_statistics(x, width);
    const A log_sum = found.log_sum_exp();
    map_row(x, y, width, threadIdx.x, blockDim.x, [&](u64, T x, T) { return rounded<T>(widen(x) - log_sum); });
}

// Overwrites dy with dx.
KERNEL(512, softmax_backward)(const T* y, T* dy, u64 rows, u64 width) {
    const u64 row = group_row();
    if (row >= rows) return;
    y += row * width;
    dy += row * width;
    A dot = A(0);
    for_rows(width, threadIdx.x, blockDim.x, [&](u64, T dy, T y) { dot += widen(dy) * widen(y); }, dy, y);
    dot = group_sum(dot);
    map_row(y, dy, width, threadIdx.x, blockDim.x,
            [&](u64, T y, T dy) { return rounded<T>(widen(y) * (widen(dy) - dot)); });
}

KERNEL(512, log_softmax_backward)(const T* y, T* dy, u64 rows, u64 width) {
    const u64 row = group_row();
    if (row >= rows) return;
    y += row * width;
    dy += row * width;
    A total = A(0);
    for_row(dy, width, threadIdx.x, blockDim.x, [&](u64, T dy) { total += widen(dy); });
    total = group_sum(total);
    map_row(y, dy, width, threadIdx.x, blockDim.x,
            [&](u64, T y, T dy) { return rounded<T>(widen(dy) - real::exp(widen(y)) * total); });
}
