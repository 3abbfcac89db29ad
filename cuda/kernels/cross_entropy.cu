// Cross-entropy of contiguous rows of logits, one group of threads per row. With V classes, label smoothing e and
// lse = ln sum_j e^(x_j):
//
// - loss = lse - (1 - e) x_t - e/V sum_j x_j, 0 in ignored rows;
// - dx_j = scale (e^(x_j - lse) - e/V - (1 - e) [j = t]).
//
// The classes may be sharded: maxima, and then sums, are all-reduced over the shards between kernels.

#include "statistics.cuh"

// Mirrors `arguments::CrossEntropy` on the host. Class numbers are those of the whole vocabulary.
struct CrossEntropy {
    i64 ignore_index;
    i64 offset;  // first class of this shard
    i64 global;  // classes in all shards
    double smoothing;
    i64 first;  // row of the whole call that corresponds to row 0
};
struct Targets : CrossEntropy {
    const void* classes;
    int type;
    INLINE Targets(CrossEntropy config, const void* classes, int type) : CrossEntropy(config), classes(classes), type(type) {}
};
enum : i64 { IGNORED = -1, ELSEWHERE = -2 };

// The target class of a row relative to this shard's `width` classes.
INLINE i64 local_target(const Targets& targets, u64 row, u64 width) {
    const i64 target = read_index(targets.classes, targets.type, row);
    if (target < 0 || target == targets.ignore_index) return IGNORED;
    const i64 local = target - targets.offset;
    return local >= 0 && local < (i64)width ? local : ELSEWHERE;
}

INLINE double row_loss(const Targets& targets, i64 target, double lse, double predicted, double total) {
    if (target == IGNORED) return 0;
    return lse - (1 - targets.smoothing) * predicted - (targets.smoothing == 0 ? 0 : targets.smoothing * (total / (double)targets.global));
}

INLINE void check_target(const Targets& targets, u64 row, u64* bad) {
    const i64 target = read_index(targets.classes, targets.type, row);
    if (target >= targets.global && target != targets.ignore_index) atomicMin(bad, (u64)targets.first + row);
}

// The statistics of a row, and the sum of its logits if labels are smoothed.
INLINE Statistics row_statistics(const Targets& targets, const T* x, u64 width, double& total) {
    Statistics own;
    A sum = A(0);
    for_row_packs(x, width, threadIdx.x, blockDim.x, [&](const auto& pack) {
        own.add(pack);
        for (T x : pack.at) sum += widen(x);
    });
    total = targets.smoothing == 0 ? 0 : group_sum((double)sum);
    return own.joined();
}

KERNEL(512, cross_entropy)(const T* logits, const void* classes, int type, CrossEntropy config, A* lse, double* losses, u64 rows, u64 width, u64* bad) {
    const u64 row = group_row();
    if (row >= rows) return;
    const Targets targets(config, classes, type);
    const T* x = logits + row * width;
    double total;
    const Statistics found = row_statistics(targets, x, width, total);
    if (threadIdx.x > 0) return;
    check_target(targets, row, bad);
    const i64 target = local_target(targets, row, width);
    const double log_sum = (double)found.max + real::ln((double)found.sum_exp);
    lse[row] = (A)log_sum;
    losses[row] = row_loss(targets, target, log_sum, target >= 0 ? (double)widen(x[target]) : 0, total);
}

// For a shard: `max` (rows), and `sums` (2 or, with smoothing, 3, rows): sum_j e^(x_j - max), x_t or 0, sum_j x_j.
KERNEL(512, cross_entropy_shard)(const T* logits, const void* classes, int type, CrossEntropy config, A* max, A* sums, u64 rows, u64 width, u64* bad) {
    const u64 row = group_row();
    if (row >= rows) return;
    const Targets targets(config, classes, type);
    const T* x = logits + row * width;
    double total;
    const Statistics found = row_statistics(targets, x, width, total);
    if (threadIdx.x > 0) return;
    check_target(targets, row, bad);
    const i64 target = local_target(targets, row, width);
    max[row] = found.max;
    sums[row] = found.sum_exp;
    sums[rows + row] = target >= 0 ? widen(x[target]) : A(0);
    if (targets.smoothing != 0) sums[2 * rows + row] = (A)total;
}

// Rescales a shard's sums from its own maximum to the global one.
KERNEL(256, cross_entropy_rescale)(A* sums, const A* own_max, const A* max, u64 rows) {
    const u64 row = thread_number();
    // The difference of two equal infinities is NaN, but the ratio of their exponentials must be 1.
    if (row < rows && own_max[row] != max[row]) sums[row] *= real::exp(own_max[row] - max[row]);
}

// lse and losses from the reduced statistics.
KERNEL(256, cross_entropy_finish)(const A* max, const A* sums, const void* classes, int type, CrossEntropy config, A* lse, double* losses, u64 rows) {
    const u64 row = thread_number();
    if (row >= rows) return;
    const Targets targets(config, classes, type);
    const double log_sum = (double)max[row] + real::ln((double)sums[row]);
    lse[row] = (A)log_sum;
    const double total = targets.smoothing == 0 ? 0 : (double)sums[2 * rows + row];
    losses[row] = row_loss(targets, local_target(targets, row, 0), log_sum, (double)sums[rows + row], total);
}

// Overwrites logits with their gradient. `scale` is in device memory: loss scale / number of valid tokens.
KERNEL(512, cross_entropy_backward)(T* logits, const void* classes, int type, CrossEntropy config, const A* lse, const A* scale, u64 rows, u64 width) {
    const u64 row = group_row();
    if (row >= rows) return;
    const Targets targets(config, classes, type);
    T* x = logits + row * width;
    const i64 target = local_target(targets, row, width);
    if (target == IGNORED) {
        // Apart from the other rows: the compiler loads element by element what only some rows need.
        map_row(x, x, width, threadIdx.x, blockDim.x, [](u64, T, T) { return rounded<T>(A(0)); });
        return;
    }
    const A uniform = (A)(targets.smoothing / (double)targets.global * (double)*scale);
    const A peak = (A)((1 - targets.smoothing) * (double)*scale), log_sum = lse[row], factor = *scale;
    map_row(x, x, width, threadIdx.x, blockDim.x, [&](u64 j, T x, T) {
        A dx = exp_for<T>(widen(x) - log_sum) * factor - uniform;
        return rounded<T>((i64)j == target ? dx - peak : dx);
    });
}

// The sum of the losses, by one block.
KERNEL(512, cross_entropy_total)(const double* losses, A* loss, u64 rows) {
    double sum = 0;
    for (u64 row = threadIdx.x; row < rows; row += blockDim.x) sum += losses[row];
    sum = group_sum(sum);
    if (threadIdx.x == 0) *loss = (A)sum;
}
