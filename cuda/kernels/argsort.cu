// Places of elements in order: the rank of an element is the number of those before it. That is n^2 comparisons in a
// row of n, all independent, and rows are short: the experts of a router, the candidates of a sampler.

// Whether x comes before y. NaN counts as largest.
INLINE bool before(A x, A y, bool descending) {
    const bool x_nan = x != x, y_nan = y != y;
    if (x_nan || y_nan) return descending ? x_nan && !y_nan : y_nan && !x_nan;
    return descending ? x > y : x < y;
}

// indices (rows, k) = the places of the first k elements of each row of x (rows, width); of equal elements the first
// comes first. One thread per element.
KERNEL(256, first_in_order)(const T* x, i64* indices, u64 n, u64 width, u64 k, int descending) {
    for (u64 i = thread_number(); i < n; i += thread_count()) {
        const T* row = x + i / width * width;
        const u64 own = i % width;
        const A value = widen(row[own]);
        u64 rank = 0;
        for (u64 j = 0; j < width && rank < k; j++) {
            const A other = widen(row[j]);
            rank += before(other, value, descending) || (j < own && !before(value, other, descending));
        }
        if (rank < k) indices[i / width * k + rank] = (i64)own;
    }
}
