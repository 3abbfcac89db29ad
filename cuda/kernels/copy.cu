// Strided copies, transposes, and reads at indices. These kernels depend only on the element size, not on the element
// type.

// y = x with arbitrary strides of both: contiguous copies of views, concatenation, zero padding.
KERNEL(256, copy)(const T* x, T* y, u64 n, Layout layout) {
    if (layout.dense) {
        map_row(x, y, n, (u32)thread_number(), (u32)thread_count(), [](u64, T x, T) { return x; });
        return;
    }
    for (u64 i = thread_number(); i < n; i += thread_count()) {
        i64 at[2];
        locate<2>(layout, i, at);
        y[at[1]] = x[at[0]];
    }
}

// y (batch, columns, rows) = x (batch, rows, columns) with the last dims exchanged, by tiles of 32 x 32 in shared
// memory, so that loads and stores are coalesced. A block is (32, 8); x's matrices and rows are strided.
KERNEL(256, transpose)(const T* x, T* y, u64 rows, u64 columns, i64 batch_stride, i64 row_stride) {
    SHARED(T, tile, 32 * 33);
    x += (i64)blockIdx.z * batch_stride;
    y += (u64)blockIdx.z * rows * columns;
    u64 row = (u64)blockIdx.y * 32 + threadIdx.y, column = (u64)blockIdx.x * 32 + threadIdx.x;
#pragma unroll
    for (u32 k = 0; k < 32; k += 8)
        if (row + k < rows && column < columns) tile[(threadIdx.y + k) * 33 + threadIdx.x] = x[(i64)(row + k) * row_stride + (i64)column];
    __syncthreads();
    row = (u64)blockIdx.y * 32 + threadIdx.x;
    column = (u64)blockIdx.x * 32 + threadIdx.y;
#pragma unroll
    for (u32 k = 0; k < 32; k += 8)
        if (row < rows && column + k < columns) y[(column + k) * rows + row] = tile[threadIdx.x * 33 + threadIdx.y + k];
}

// y = x at `index` along one dim. `layout` has the dims of the index, x's strides with 0 along that dim, and the
// index's strides; y is contiguous. An index out of range yields zero bits, and `bad` receives the first such
// position.
KERNEL(256, gather)
(const T* x, const void* index, int type, T* y, u64 n, i64 size, i64 dim_stride, u64* bad, Layout layout) {
    for (u64 i = thread_number(); i < n; i += thread_count()) {
        i64 at[2] = {0, (i64)i};
        locate<2>(layout, i, at);
        const i64 id = read_index(index, type, at[1]);
        const bool inside = id >= 0 && id < size;
        if (!inside) atomicMin(bad, i);
        y[i] = inside ? x[at[0] + id * dim_stride] : T{};
    }
}

// y (outer, count, inner) = slices of x (outer, size, inner) at `ids`; rows of an embedding if outer = 1. x holds ids
// offset .. offset + size of `global`; ids of other shards yield zero bits.
KERNEL(256, index_select)
(const T* x, const void* ids, int type, T* y, u64 outer, u64 size, u64 count, u64 inner, i64 offset, i64 global, u64* bad) {
    for (u64 row = blockIdx.x; row < outer * count; row += gridDim.x) {
        const u64 k = row % count;
        const i64 id = read_index(ids, type, k);
        if (threadIdx.x == 0 && (id < 0 || id >= global)) atomicMin(bad, k);
        const bool here = id >= offset && id < offset + (i64)size && id < global;
        const T* from = x + (row / count * size + (here ? id - offset : 0)) * inner;
        if (here)
            map_row(from, y + row * inner, inner, threadIdx.x, blockDim.x, [](u64, T x, T) { return x; });
        else
            for (u64 i = threadIdx.x; i < inner; i += blockDim.x) y[row * inner + i] = T{};
    }
}

// Elements of `yes` where the condition is not 0, else of `no`; all broadcast.
KERNEL(256, select)(const u8* condition, const T* yes, const T* no, T* y, u64 n, Layout layout) {
    for (u64 i = thread_number(); i < n; i += thread_count()) {
        i64 at[3] = {(i64)i, (i64)i, (i64)i};
        if (!layout.dense) locate<3>(layout, i, at);
        y[i] = condition[at[0]] ? yes[at[1]] : no[at[2]];
    }
}
