// Deterministic addition at indices, in the order of the index: the gradients of embedding, index_select and gather.

// Sorted positions whose sum is a serial one. Longer runs of a key, of a frequent token say, are divided at its multiples.
constexpr u64 CHUNK = 32;

// y (outer, size, inner) += slices of x (outer, count, inner) at the keys, in the `order` that sorts them: see sort.cu. A
// block of the grid handles a sorted position, 128 elements of a slice and a share of `outer`; only the first position of
// each key does the work. Where its run of the key goes on in the next chunk, `partials` (outer, chunks, inner) gets the sums
// of the chunks behind the first, and add_long_runs adds all.
template <class Y>
INLINE void add_slices(const T* x, const i64* keys, const i64* order, Y* y, A* partials, u64 outer, u64 count, i64 size, u64 inner) {
    const u64 first = blockIdx.x, column = (u64)blockIdx.y * blockDim.x + threadIdx.x;
    const i64 key = keys[order[first]];
    if (key >= size || column >= inner) return;
    const bool begins = first == 0 || keys[order[first - 1]] != key;
    if (!begins && first % CHUNK != 0) return;
    const u64 chunk = first / CHUNK, chunks = (count + CHUNK - 1) / CHUNK, bound = chunk + 1 < chunks ? (chunk + 1) * CHUNK : count;
    if (begins && bound < count && keys[order[bound]] == key) return;
    for (u64 block = blockIdx.z; block < outer; block += gridDim.z) {
        Y* to = y + (block * (u64)size + key) * inner + column;
        const T* from = x + block * count * inner + column;
        A sum = begins ? widen(*to) : A(0);
#pragma unroll 4
        for (u64 k = first; k < bound; k++) {
            const u64 position = order[k];
            if (keys[position] != key) break;
            sum += widen(from[position * inner]);
        }
        if (begins)
            *to = rounded<Y>(sum);
        else
            partials[(block * chunks + chunk) * inner + column] = sum;
    }
}

// Adds the runs that add_slices leaves: the positions up to the end of a run's first chunk, then the sums of the others. A
// block handles the second chunk of a run.
template <class Y>
INLINE void add_long_runs(const T* x, const i64* keys, const i64* order, Y* y, const A* partials, u64 outer, u64 count, i64 size, u64 inner) {
    const u64 second = (blockIdx.x + 1) * CHUNK, column = (u64)blockIdx.y * blockDim.x + threadIdx.x;
    const u64 chunks = (count + CHUNK - 1) / CHUNK;
    const i64 key = keys[order[second]];
    if (key >= size || column >= inner || keys[order[second - 1]] != key) return;
    if (second > CHUNK && keys[order[second - CHUNK - 1]] == key) return;  // a later chunk of the run
    u64 first = second;
    while (first > second - CHUNK && keys[order[first - 1]] == key) first--;
    for (u64 block = blockIdx.z; block < outer; block += gridDim.z) {
        Y* to = y + (block * (u64)size + key) * inner + column;
        const T* from = x + block * count * inner + column;
        A sum = widen(*to);
#pragma unroll 4
        for (u64 k = first; k < second; k++) sum += widen(from[(u64)order[k] * inner]);
#pragma unroll 4
        for (u64 chunk = second / CHUNK; chunk < chunks; chunk++) {
            if (keys[order[chunk * CHUNK]] != key) break;
            sum += partials[(block * chunks + chunk) * inner + column];
        }
        *to = rounded<Y>(sum);
    }
}

KERNEL(128, index_add)
(const T* x, const i64* keys, const i64* order, T* y, A* partials, u64 outer, u64 count, i64 size, u64 inner) {
    add_slices(x, keys, order, y, partials, outer, count, size, inner);
}

KERNEL(128, index_add_long_runs)
(const T* x, const i64* keys, const i64* order, T* y, const A* partials, u64 outer, u64 count, i64 size, u64 inner) {
    add_long_runs(x, keys, order, y, partials, outer, count, size, inner);
}

// Accumulates into sums in A.
KERNEL(128, index_add_wide)
(const T* x, const i64* keys, const i64* order, A* y, A* partials, u64 outer, u64 count, i64 size, u64 inner) {
    add_slices(x, keys, order, y, partials, outer, count, size, inner);
}

KERNEL(128, index_add_wide_long_runs)
(const T* x, const i64* keys, const i64* order, A* y, const A* partials, u64 outer, u64 count, i64 size, u64 inner) {
    add_long_runs(x, keys, order, y, partials, outer, count, size, inner);
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
