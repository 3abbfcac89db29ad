// Reductions of a contiguous (outer, reduced, inner) tensor. Blocks along the reduced dim give partial values in A,
// which are combined in f64 in a fixed order, so that results are deterministic.
//
// `partials` is (outer, blocks, inner). NaN wins a maximum; an empty reduction has no blocks.

// inner = 1: one group of threads per (outer, block).
template <class Fold> INLINE A fold_block(const T* x, u64 reduced, u64 blocks, u64 block_size, Fold step, A start) {
    const u64 row = group_row(), at = row / blocks, first = row % blocks * block_size;
    const u64 end = first + block_size < reduced ? first + block_size : reduced;
    A value = start;
    for_row(x + at * reduced + first, end - first, threadIdx.x, blockDim.x, [&](u64, T x) { value = step(value, (A)widen(x)); });
    return value;
}

KERNEL(512, sum_rows)(const T* x, A* partials, u64 outer, u64 reduced, u64 blocks, u64 block_size) {
    if (group_row() >= outer * blocks) return;
    A sum = group_sum(fold_block(x, reduced, blocks, block_size, Plus(), A(0)));
    if (threadIdx.x == 0) partials[group_row()] = sum;
}

KERNEL(512, max_rows)(const T* x, A* partials, u64 outer, u64 reduced, u64 blocks, u64 block_size) {
    if (group_row() >= outer * blocks) return;
    A max = group_max(fold_block(x, reduced, blocks, block_size, Larger(), -real::infinity<A>()));
    if (threadIdx.x == 0) partials[group_row()] = max;
}

// An infinite maximum is not subtracted: infinity minus infinity is NaN.
INLINE A finite_or_zero(A x) { return real::abs(x) < real::infinity<A>() ? x : A(0); }

// Sums of e^(x - max), with the maximum of each row.
KERNEL(512, sum_exp_rows)(const T* x, const A* max, A* partials, u64 outer, u64 reduced, u64 blocks, u64 block_size) {
    const u64 row = group_row();
    if (row >= outer * blocks) return;
    const A shift = finite_or_zero(max[row / blocks]);
    A sum = group_sum(fold_block(
        x, reduced, blocks, block_size, [&](A sum, A x) { return sum + real::exp(x - shift); }, A(0)));
    if (threadIdx.x == 0) partials[row] = sum;
}

// The index of the first maximum of each row, or of its first NaN.
KERNEL(512, argmax_rows)(const T* x, i64* index, u64 outer, u64 reduced) {
    const u64 row = group_row();
    if (row >= outer) return;
    A max = group_max(fold_block(x, reduced, 1, reduced, Larger(), -real::infinity<A>()));
    i64 own = reduced;
    for_row(x + row * reduced, reduced, threadIdx.x, blockDim.x, [&](u64 i, T x) {
        bool found = widen(x) == max || (max != max && widen(x) != widen(x));
        if (found && (i64)i < own) own = i;
    });
    struct Smaller { INLINE i64 operator()(i64 x, i64 y) const { return y < x ? y : x; } };
    i64 first = join_group(own, (i64)reduced, Smaller());
    if (threadIdx.x == 0) index[row] = first;
}

// inner > 1: one thread per column, block y of the grid for each (outer, block).
template <class Fold>
INLINE void fold_columns(const T* x, A* partials, u64 outer, u64 reduced, u64 inner, u64 blocks, u64 block_size, Fold step, A start) {
    const u64 column = thread_number();
    if (column >= inner) return;
    for (u64 row = blockIdx.y; row < outer * blocks; row += gridDim.y) {
        const u64 at = row / blocks, first = row % blocks * block_size;
        const u64 end = first + block_size < reduced ? first + block_size : reduced;
        A value = start;
#pragma unroll 4
        for (u64 i = first; i < end; i++) value = step(value, (A)widen(x[(at * reduced + i) * inner + column]));
        partials[row * inner + column] = value;
    }
}

KERNEL(128, sum_columns)(const T* x, A* partials, u64 outer, u64 reduced, u64 inner, u64 blocks, u64 block_size) {
    fold_columns(x, partials, outer, reduced, inner, blocks, block_size, Plus(), A(0));
}

KERNEL(128, max_columns)(const T* x, A* partials, u64 outer, u64 reduced, u64 inner, u64 blocks, u64 block_size) {
    fold_columns(x, partials, outer, reduced, inner, blocks, block_size, Larger(), -real::infinity<A>());
}

// The combined partials of one result.
template <class Op> INLINE double joined(const A* partials, u64 i, u64 blocks, u64 inner, Op op, double start) {
    double value = start;
    for (u64 block = 0; block < blocks; block++) value = op(value, (double)partials[(i / inner * blocks + block) * inner + i % inner]);
    return value;
}

// Sums divided by `divisor`, which is 1 or, for a mean, the number of elements.
KERNEL(128, sum_finish)(const A* partials, T* y, u64 outer, u64 inner, u64 blocks, double divisor) {
    const u64 i = thread_number();
    if (i < outer * inner) y[i] = rounded<T>((A)joined(partials, i, blocks, inner, Plus(), 0.0) / (A)divisor);
}

// Maxima, rounded to T, in A, or both; an unused output is null.
KERNEL(128, max_finish)(const A* partials, T* y, A* max, u64 outer, u64 inner, u64 blocks) {
    const u64 i = thread_number();
    if (i >= outer * inner) return;
    A value = (A)joined(partials, i, blocks, inner, Larger(), -real::infinity<double>());
    if (y) y[i] = rounded<T>(value);
    if (max) max[i] = value;
}

KERNEL(128, log_sum_exp_finish)(const A* partials, const A* max, T* y, u64 outer, u64 blocks) {
    const u64 i = thread_number();
    if (i < outer) y[i] = rounded<T>(real::ln((A)joined(partials, i, blocks, 1, Plus(), 0.0)) + finite_or_zero(max[i]));
}
