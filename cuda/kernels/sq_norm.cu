// The sum of squares, in f64: per block, then over blocks. It is not finite exactly if an element is not: squares of
// any f32 are finite in f64.

KERNEL(512, sq_norm_partials)(const T* x, double* partials, u64 n) {
    double sum = 0;
    for_row(x, n, (u32)thread_number(), (u32)thread_count(), [&](u64, T x) { sum += (double)widen(x) * (double)widen(x); });
    sum = group_sum(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// One block adds the partial sums to the total.
KERNEL(512, sq_norm_finish)(const double* partials, double* total, u64 count) {
    double sum = 0;
    for (u64 i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
    sum = group_sum(sum);
    if (threadIdx.x == 0) *total += sum;
}

// Sets `found` if an element is infinite or NaN.
KERNEL(256, find_not_finite)(const T* x, u64* found, u64 n) {
    bool finite = true;
    for_row(x, n, (u32)thread_number(), (u32)thread_count(), [&](u64, T x) {
        finite = finite && real::abs(widen(x)) < real::infinity<A>();
    });
    if (!finite) *found = 1;  // all writers write the same value
}
