// Places of elements in order: runs of 256 elements are sorted in shared memory, then pairs of runs are merged until one is
// left. An element's place in a merged run is its place in its own run plus the number of elements of the other run that
// come before it, by binary search. The order is total, so every place is taken once.

constexpr u32 RUN = 256;

// Whether x comes before y. NaN counts as largest.
INLINE bool before(A x, A y, bool descending) {
    const bool x_nan = x != x, y_nan = y != y;
    if (x_nan || y_nan) return descending ? x_nan && !y_nan : y_nan && !x_nan;
    return descending ? x > y : x < y;
}

// order (rows, width): the places of each row of x (rows, width), sorted in runs of RUN; of equal elements the first comes
// first. One block per run of one row, `runs` of which make a row.
KERNEL(256, sort_runs)(const T* x, i64* order, u64 width, u64 runs, int descending) {
    SHARED(A, tile, RUN);
    const u64 row = blockIdx.x / runs * width, first = blockIdx.x % runs * RUN, own = first + threadIdx.x;
    const u32 count = width - first < RUN ? (u32)(width - first) : RUN;
    if (own < width) tile[threadIdx.x] = widen(x[row + own]);
    __syncthreads();
    if (own >= width) return;
    const A value = tile[threadIdx.x];
    u32 rank = 0;
    for (u32 j = 0; j < count; j++)
        rank += before(tile[j], value, descending) || (j < threadIdx.x && !before(value, tile[j], descending));
    order[row + first + rank] = (i64)own;
}

// to = the places in `from`, sorted in runs of 2 `run`. One thread per element of the n = rows x width.
KERNEL(256, merge_runs)(const T* x, const i64* from, i64* to, u64 n, u64 width, u64 run, int descending) {
    for (u64 i = thread_number(); i < n; i += thread_count()) {
        const u64 row = i / width * width, at = i - row, begin = at / run * run;
        const bool left = at / run % 2 == 0;
        // The other run of the pair, which may be short or missing at the end of the row.
        const u64 other = left ? (begin + run < width ? begin + run : width) : begin - run;
        const u64 end = other + run < width ? other + run : width;
        const i64 own = from[i];
        const A value = widen(x[row + (u64)own]);
        u64 low = other, high = end;
        while (low < high) {
            const u64 middle = low + (high - low) / 2;
            const A element = widen(x[row + (u64)from[row + middle]]);
            // Equal elements of the left run come first.
            const bool first = left ? before(element, value, descending) : !before(value, element, descending);
            if (first) low = middle + 1; else high = middle;
        }
        const u64 pair = left ? begin : other;
        to[row + pair + (at - begin) + (low - other)] = own;
    }
}
