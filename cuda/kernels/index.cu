// Deterministic addition at indices, in the order of the index: the gradients of embedding, index_select and gather.

// y (outer, size, inner) += slices of x (outer, count, inner) at the keys, in the `order` that sorts them: see sort.cu. A
// block of the grid handles a sorted position, 128 elements of a slice and a share of `outer`; only the first position of
// each key does the work.
template <class Y>
INLINE void add_slices(const T* x, const i64* keys, const i64* order, Y* y, u64 outer, u64 count, i64 size, u64 inner) {
    const u64 first = blockIdx.x, column = (u64)blockIdx.y * blockDim.x + threadIdx.x;
    const i64 key = keys[order[first]];
    if (key >= size || column >= inner) return;
    if (first > 0 && keys[order[first - 1]] == key) return;
    for (u64 block = blockIdx.z; block < outer; block += gridDim.z) {
        Y* to = y + (block * (u64)size + key) * inner + column;
        const T* from = x + block * count * inner + column;
        A sum = widen(*to);
#pragma unroll 4
        for (u64 k = first; k < count; k++) {
            const u64 position = order[k];
            if (keys[position] != key) break;
            sum += widen(from[position * inner]);
        }
        *to = rounded<Y>(sum);
    }
}

KERNEL(128, index_add)
(const T* x, const i64* keys, const i64* order, T* y, u64 outer, u64 count, i64 size, u64 inner) {
    add_slices(x, keys, order, y, outer, count, size, inner);
}

// Accumulates into sums in A.
KERNEL(128, index_add_wide)
(const T* x, const i64* keys, const i64* order, A* y, u64 outer, u64 count, i64 size, u64 inner) {
    add_slices(x, keys, order, y, outer, count, size, inner);
}

// y[.., index[.., k, ..], ..] += x[.., k, ..], or = x: then the last of repeated indices counts. One thread per element of
// y along the dim (of `size`) and row of the index; adjacent threads have adjacent elements of y where the dim is the
// innermost, else rows. `layout` has the other dims, with the strides of y, index and x. `bad` receives the memory offset
// of the first bad index.
template <bool ADD>
INLINE void scatter_elements(T* y, const void* index, int type, const T* x, u64 rows, u64 size, u64 count, i64 y_stride, i64 index_stride,
                             i64 x_stride, u64* bad, const Layout& layout) {
    const bool innermost = y_stride == 1;
    for (u64 i = thread_number(); i < rows * size; i += thread_count()) {
        i64 at[3];
        locate<3>(layout, innermost ? i / size : i % rows, at);
        const i64 own = innermost ? i % size : i / rows;
        A sum = widen(y[at[0] + own * y_stride]);
        for (u64 k = 0; k < count; k++) {
            const i64 id = read_index(index, type, at[1] + (i64)k * index_stride);
            if (own == 0 && (id < 0 || id >= (i64)size)) atomicMin(bad, (u64)(at[1] + (i64)k * index_stride));
            if (id != own) continue;
            const A value = widen(x[at[2] + (i64)k * x_stride]);
            sum = ADD ? sum + value : value;
        }
        y[at[0] + own * y_stride] = rounded<T>(sum);
    }
}

KERNEL(256, scatter_add)
(T* y, const void* index, int type, const T* x, u64 rows, u64 size, u64 count, i64 y_stride, i64 index_stride, i64 x_stride,
 u64* bad, Layout layout) {
    scatter_elements<true>(y, index, type, x, rows, size, count, y_stride, index_stride, x_stride, bad, layout);
}

KERNEL(256, scatter)
(T* y, const void* index, int type, const T* x, u64 rows, u64 size, u64 count, i64 y_stride, i64 index_stride, i64 x_stride,
 u64* bad, Layout layout) {
    scatter_elements<false>(y, index, type, x, rows, size, count, y_stride, index_stride, x_stride, bad, layout);
}
