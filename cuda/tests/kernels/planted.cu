// Kernels with one race each, which those compiled with RIGHT do not have. They read x (128 elements a block) and write y.

#include "mma.cuh"

// The other warp's half of a tile is read without a barrier.
KERNEL(64, no_barrier)(const T* x, T* y) {
    SHARED(T, tile, 64);
    tile[threadIdx.x] = x[threadIdx.x];
    if (RIGHT) __syncthreads();
    y[threadIdx.x] = tile[63 - threadIdx.x];
}

// The tile is overwritten for the next iteration while the other warp may still read it.
KERNEL(64, overwritten_in_a_loop)(const T* x, T* y) {
    SHARED(T, tile, 64);
    T sum = 0;
    for (int i = 0; i < 2; i++) {
        if (RIGHT) __syncthreads();
        tile[threadIdx.x] = x[64 * i + threadIdx.x];
        __syncthreads();
        sum += tile[63 - threadIdx.x];
    }
    y[threadIdx.x] = sum;
}

// Two lanes of a warp exchange elements. The shuffle makes the warp meet, but does not order what it has written.
KERNEL(32, shuffle_for_a_warp_barrier)(const T* x, T* y) {
    SHARED(T, tile, 32);
    tile[threadIdx.x] = x[threadIdx.x];
    T sum = __shfl_xor_sync(0xffffffffu, x[threadIdx.x], 1);
    if (RIGHT) __syncwarp();
    y[threadIdx.x] = sum + tile[threadIdx.x ^ 1];
}

// A barrier of the warp orders nothing between warps. Here only the second warp waits for the first to have ended its part,
// by a barrier of the block that comes too early.
KERNEL(64, warp_barrier_for_a_barrier)(const T* x, T* y) {
    SHARED(T, tile, 64);
    tile[threadIdx.x] = x[threadIdx.x];
    if (RIGHT) __syncthreads(); else __syncwarp();
    y[threadIdx.x] = tile[threadIdx.x ^ 32];
}

// All blocks write one element; that it is the same value shows in no order.
KERNEL(32, same_element_of_two_blocks)(const T* x, T* y) {
    if (threadIdx.x == 0) y[RIGHT ? blockIdx.x : 0] = x[0];
}

// A block reads what another one writes.
KERNEL(32, element_of_another_block)(const T* x, T* y) {
    const u32 own = blockIdx.x * 32 + threadIdx.x;
    y[own] = x[own];
    if (!RIGHT && blockIdx.x == 0) y[own] += 0 * y[own + 32];
}

// Lanes write one flag of a warp, all of them the same value.
KERNEL(32, same_flag_of_many_lanes)(const T* x, T* y) {
    SHARED(u32, flag, 1);
    if (threadIdx.x == 0) flag[0] = 0;
    __syncwarp();
    if (RIGHT ? threadIdx.x == 31 : x[threadIdx.x] == x[threadIdx.x]) flag[0] = 1;
    __syncwarp();
    y[threadIdx.x] = flag[0];
}

// The least of all elements, once without an atomic operation.
KERNEL(64, minimum_without_atomics)(const T* x, u64* least) {
    const u64 own = (u64)x[threadIdx.x];
    if (RIGHT) atomicMin(least, own);
    else if (own < *least) *least = own;
}

// An asynchronous copy is read before it has been waited for; the barrier changes nothing.
KERNEL(32, copy_read_too_early)(const T* x, T* y) {
    SHARED(T, tile, 128);
    copy_async(tile + threadIdx.x * 4, x + threadIdx.x * 4, true);
    copy_commit();
    if (RIGHT) copy_wait<0>();
    __syncthreads();
    y[threadIdx.x] = tile[threadIdx.x];
    copy_wait<0>();
}

// What this thread has waited for, another one may not read without a barrier.
KERNEL(32, copy_of_another_lane)(const T* x, T* y) {
    SHARED(T, tile, 128);
    copy_async(tile + threadIdx.x * 4, x + threadIdx.x * 4, true);
    copy_commit();
    copy_wait<0>();
    if (RIGHT) __syncthreads();
    y[threadIdx.x] = tile[127 - threadIdx.x * 4];
}

// An asynchronous copy overwrites what another lane still reads.
KERNEL(32, copy_over_what_is_read)(const T* x, T* y) {
    SHARED(T, tile, 128);
    for (int i = 0; i < 4; i++) tile[threadIdx.x * 4 + i] = x[threadIdx.x * 4 + i];
    __syncthreads();
    y[threadIdx.x] = tile[127 - threadIdx.x * 4];
    if (RIGHT) __syncthreads();
    copy_async(tile + threadIdx.x * 4, x + threadIdx.x * 4, true);
    copy_commit();
    copy_wait<0>();
}

// Rows of a matrix that other lanes have written are loaded for tensor cores.
KERNEL(32, matrices_without_a_barrier)(const T* x, T* y) {
    SHARED(T, tile, 128);
    for (int i = 0; i < 4; i++) tile[threadIdx.x * 4 + i] = x[threadIdx.x * 4 + i];
    if (RIGHT) __syncwarp();
    u32 r[4];
    load_matrices(r, tile + threadIdx.x * 4);
    y[threadIdx.x] = __uint_as_float(r[0]);
}

// Below, what costs too many sectors or wavefronts.

// Lanes read elements that lie in sectors of their own.
KERNEL(32, strided_loads)(const T* x, T* y) { y[threadIdx.x] = x[RIGHT ? threadIdx.x : threadIdx.x * 32]; }

// Lanes write rows of 16 bytes, an element at a time.
KERNEL(32, scattered_stores)(const T* x, T* y) {
    for (int i = 0; i < 4; i++) y[RIGHT ? i * 32 + threadIdx.x : threadIdx.x * 4 + i] = x[threadIdx.x];
}

// A column of a tile whose rows have as many words as there are banks.
KERNEL(32, conflict_of_32_ways)(const T* x, T* y) {
    constexpr int WIDTH = RIGHT ? 33 : 32;
    SHARED(T, tile, 32 * WIDTH);
    for (int i = 0; i < 32; i++) tile[i * WIDTH + threadIdx.x] = x[threadIdx.x];
    __syncwarp();
    y[threadIdx.x] = tile[threadIdx.x * WIDTH];
}

// Every fourth word.
KERNEL(32, conflict_of_4_ways)(const T* x, T* y) {
    SHARED(T, tile, 128);
    tile[threadIdx.x * (RIGHT ? 1 : 4)] = x[threadIdx.x];
    y[threadIdx.x] = tile[threadIdx.x * (RIGHT ? 1 : 4)];
}

// Vectors of 16 bytes in rows of 128, of which a quarter of a warp reads a column.
KERNEL(32, conflict_of_vectors)(const T* x, T* y) {
    constexpr int WIDTH = RIGHT ? 36 : 32;
    SHARED(T, tile, 32 * WIDTH);
    Vector<T>* own = reinterpret_cast<Vector<T>*>(tile + threadIdx.x * WIDTH);
    *own = reinterpret_cast<const Vector<T>*>(x)[threadIdx.x];
    reinterpret_cast<Vector<T>*>(y)[threadIdx.x] = *own;
}

// Matrices whose rows all lie in the same banks.
KERNEL(32, conflict_of_matrices)(const T* x, T* y) {
    constexpr int WIDTH = RIGHT ? 36 : 32;
    SHARED(T, tile, 32 * WIDTH);
    for (int i = 0; i < 32; i++) tile[i * WIDTH + threadIdx.x] = x[threadIdx.x];
    __syncwarp();
    u32 r[4];
    load_matrices(r, tile + threadIdx.x * WIDTH);
    y[threadIdx.x] = __uint_as_float(r[0]);
}
