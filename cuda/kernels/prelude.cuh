// The common prefix of all kernel files: number types and conversions, arithmetic in f32 or f64 under one name,
// 16-byte vectors, and sums and maxima over groups of threads.
//
// A kernel file is compiled once per element type. It uses `T`, the storage type; `A`, the accumulator type (f64 for
// f64, else f32); and KERNEL(threads, name), which appends the element type to the entry's name. There are no
// includes of system headers: a user's machine has the run-time compiler, not the toolkit.
//
// Hardware-specific code is guarded by CUSIM: the tests run this text on a CPU, where the shim supplies those names.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// 16-bit floats are stored, never computed with.
struct bf16 { u16 bits; };
struct f16 { u16 bits; };

#ifndef CUSIM
#define INLINE __device__ __forceinline__
#define SHARED(type, name, count) __shared__ type name[count]
#define DYNAMIC_ALIGNMENT 128
#define DYNAMIC_SHARED(type, name)                                               \
    extern __shared__ __align__(DYNAMIC_ALIGNMENT) unsigned char dynamic_shared[]; \
    type* name = reinterpret_cast<type*>(dynamic_shared)
INLINE float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
INLINE float widen(f16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
INLINE void narrow(float x, bf16& y) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
INLINE void narrow(float x, f16& y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
// 2^x within 2 ulp, 0 for minus infinity; 1 / x within 1 ulp. Of one instruction each.
INLINE float fast_exp2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INLINE float fast_reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
#endif

INLINE float widen(float x) { return x; }
INLINE double widen(double x) { return x; }
INLINE u8 widen(u8 x) { return x; }
INLINE u32 widen(u32 x) { return x; }
INLINE i64 widen(i64 x) { return x; }
INLINE void narrow(float x, float& y) { y = x; }
INLINE void narrow(double x, double& y) { y = x; }

// Rounds to the nearest number of the type, ties to even.
template <class T, class A> INLINE T rounded(A x) { T y; narrow(x, y); return y; }

// The functions of Rust's trait `Real`, in f32 and f64.
namespace real {
INLINE float exp(float x) { return ::expf(x); }
INLINE double exp(double x) { return ::exp(x); }
INLINE float ln(float x) { return ::logf(x); }
INLINE double ln(double x) { return ::log(x); }
INLINE float sqrt(float x) { return ::sqrtf(x); }
INLINE double sqrt(double x) { return ::sqrt(x); }
INLINE float tanh(float x) { return ::tanhf(x); }
INLINE double tanh(double x) { return ::tanh(x); }
INLINE float erf(float x) { return ::erff(x); }
INLINE double erf(double x) { return ::erf(x); }
INLINE float pow(float x, float p) { return ::powf(x, p); }
INLINE double pow(double x, double p) { return ::pow(x, p); }
INLINE float sin(float x) { return ::sinf(x); }
INLINE double sin(double x) { return ::sin(x); }
INLINE float cos(float x) { return ::cosf(x); }
INLINE double cos(double x) { return ::cos(x); }
INLINE float log1p(float x) { return ::log1pf(x); }
INLINE double log1p(double x) { return ::log1p(x); }
INLINE float expm1(float x) { return ::expm1f(x); }
INLINE double expm1(double x) { return ::expm1(x); }
INLINE float abs(float x) { return ::fabsf(x); }
INLINE double abs(double x) { return ::fabs(x); }
// The larger number; NaN only if both are.
INLINE float larger(float x, float y) { return ::fmaxf(x, y); }
INLINE double larger(double x, double y) { return ::fmax(x, y); }
template <class A> INLINE A max(A x, A y) { return x > y ? x : y; }
template <class A> INLINE A sigmoid(A x) { return A(1) / (A(1) + exp(-x)); }
INLINE float infinity(float) { return __uint_as_float(0x7f800000u); }
INLINE double infinity(double) { return __longlong_as_double(0x7ff0000000000000ll); }
template <class A> INLINE A infinity() { return infinity(A(0)); }
}  // namespace real

// e^x and 1 / (1 + e^-x) for results of type T. For 16 bits they take few instructions, which would bind a kernel before
// memory does; e^x is then off by up to (|x| + 4) 2^-24 of itself.
template <class T, class A> INLINE A exp_for(A x) {
    if constexpr (sizeof(T) == 2) return fast_exp2(x * 1.4426950408889634f);
    else return real::exp(x);
}
template <class T, class A> INLINE A sigmoid_for(A x) {
    if constexpr (sizeof(T) == 2) return fast_reciprocal(1.0f + exp_for<T>(-x));
    else return real::sigmoid(x);
}

INLINE u64 thread_number() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
INLINE u64 thread_count() { return (u64)gridDim.x * blockDim.x; }

// 16 bytes of elements, the widest load or store of one instruction.
template <class T> struct alignas(16) Vector {
    static constexpr int SIZE = 16 / sizeof(T);
    T at[SIZE];
};
INLINE bool aligned16(const void* pointer) { return (reinterpret_cast<u64>(pointer) & 15) == 0; }

// Calls f(i, x) for this thread's elements of a row, among `threads` threads; in units of 16 bytes if the row is
// aligned.
template <class T, class F> INLINE void for_row(const T* row, u64 width, u32 thread, u32 threads, F f) {
    u64 vectors = aligned16(row) ? width / Vector<T>::SIZE : 0;
    for (u64 i = thread; i < vectors; i += threads) {
        Vector<T> x = reinterpret_cast<const Vector<T>*>(row)[i];
#pragma unroll
        for (int j = 0; j < Vector<T>::SIZE; j++) f(i * Vector<T>::SIZE + j, x.at[j]);
    }
    for (u64 i = vectors * Vector<T>::SIZE + thread; i < width; i += threads) f(i, row[i]);
}

// N elements, which are loaded and stored in units of 16 bytes.
template <class T, int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack { T at[N]; };

template <int N, class F, class... Packs> INLINE void for_packs(u64 first, F f, Packs... packs) {
#pragma unroll
    for (int j = 0; j < N; j++) f(first + j, packs.at[j]...);
}

// Like for_row for several rows of equal width, whose types may differ: calls f(i, x, y, ...).
template <class F, class T, class... Others>
INLINE void for_rows(u64 width, u32 thread, u32 threads, F f, const T* row, const Others*... others) {
    constexpr int SIZE = Vector<T>::SIZE;
    const u64 packs = aligned16(row) && (aligned16(others) && ...) ? width / SIZE : 0;
    for (u64 i = thread; i < packs; i += threads)
        for_packs<SIZE>(i * SIZE, f, reinterpret_cast<const Pack<T, SIZE>*>(row)[i], reinterpret_cast<const Pack<Others, SIZE>*>(others)[i]...);
    for (u64 i = packs * SIZE + thread; i < width; i += threads) f(i, row[i], others[i]...);
}

template <class T, int N, class F, class... Packs> INLINE Pack<T, N> map_packs(u64 first, F f, Packs... packs) {
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; j++) out.at[j] = f(first + j, packs.at[j]...);
    return out;
}

// Calls f for this thread's packs of a row: 16 bytes or, behind the last of them or if the row is not aligned, one element.
// Four are loaded before the first is used.
template <class T, class F> INLINE void for_row_packs(const T* row, u64 width, u32 thread, u32 threads, F f) {
    constexpr int SIZE = Vector<T>::SIZE, DEPTH = 4;
    const u64 packs = aligned16(row) ? width / SIZE : 0;
    for (u64 i = thread; i < packs; i += DEPTH * threads) {
        Pack<T, SIZE> loaded[DEPTH];
#pragma unroll
        for (int k = 0; k < DEPTH; k++)
            if (i + k * threads < packs) loaded[k] = reinterpret_cast<const Pack<T, SIZE>*>(row)[i + k * threads];
#pragma unroll
        for (int k = 0; k < DEPTH; k++)
            if (i + k * threads < packs) f(loaded[k]);
    }
    for (u64 i = packs * SIZE + thread; i < width; i += threads) f(Pack<T, 1>{{row[i]}});
}

// Sets a row to f(i, x, y, ...) of others, whose types may differ, or of its own elements.
template <class T, class F, class... Rows>
INLINE void map_rows(T* out, u64 width, u32 thread, u32 threads, F f, const Rows*... rows) {
    constexpr int SIZE = Vector<T>::SIZE;
    const u64 packs = aligned16(out) && (aligned16(rows) && ...) ? width / SIZE : 0;
    for (u64 i = thread; i < packs; i += threads)
        reinterpret_cast<Pack<T, SIZE>*>(out)[i] = map_packs<T, SIZE>(i * SIZE, f, reinterpret_cast<const Pack<Rows, SIZE>*>(rows)[i]...);
    for (u64 i = packs * SIZE + thread; i < width; i += threads) out[i] = f(i, rows[i]...);
}

// Overwrites the second of two rows of equal width with f(i, x, y).
template <class T, class F> INLINE void map_row(const T* row, T* out, u64 width, u32 thread, u32 threads, F f) {
    map_rows(out, width, thread, threads, f, row, (const T*)out);
}

// Groups of threads that work on one row: blockDim.x threads, a multiple of 32. If blockDim.x is 32, the rows of a
// block are along y, else a block has one row. Every thread of a group gets the result, and the order of additions
// depends on blockDim.x only.
struct Plus { template <class A> INLINE A operator()(A x, A y) const { return x + y; } };
// NaN wins on either side.
struct Larger { template <class A> INLINE A operator()(A x, A y) const { return y > x || y != y ? y : x; } };

template <class A, class Op> INLINE A join_warp(A x, Op op) {
#pragma unroll
    for (int distance = 16; distance > 0; distance >>= 1) x = op(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

template <class A, class Op> INLINE A join_group(A x, A start, Op op) {
    x = join_warp(x, op);
    if (blockDim.x == 32) return x;
    SHARED(A, parts, 32);
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    __syncthreads();  // the parts of an earlier call have been read
    if (lane == 0) parts[warp] = x;
    __syncthreads();
    return join_warp(lane < warps ? parts[lane] : start, op);
}

template <class A> INLINE A group_sum(A x) { return join_group(x, A(0), Plus()); }
template <class A> INLINE A group_max(A x) { return join_group(x, -real::infinity<A>(), Larger()); }

// The row of this group of threads.
INLINE u64 group_row() { return (u64)blockIdx.x * blockDim.y + threadIdx.y; }

// Dims and strides of up to three operands, outermost first. Mirrors `arguments::Layout` on the host.
constexpr int MAX_RANK = 8;
struct Layout {
    int rank;
    int dense;  // not 0: all operands are contiguous
    u64 dims[MAX_RANK];
    i64 strides[3][MAX_RANK];
};

// The offsets of element `index`, in row-major order, in each of the first N operands.
template <int N> INLINE void locate(const Layout& layout, u64 index, i64* at) {
#pragma unroll
    for (int k = 0; k < N; k++) at[k] = 0;
#pragma unroll
    for (int d = MAX_RANK - 1; d >= 0; d--) {
        if (d >= layout.rank) continue;
        u64 coordinate = index % layout.dims[d];
        index /= layout.dims[d];
#pragma unroll
        for (int k = 0; k < N; k++) at[k] += (i64)coordinate * layout.strides[k][d];
    }
}

// Dtypes of ids, indices and targets.
enum IndexType { INDEX_U8, INDEX_U32, INDEX_I64 };
INLINE i64 read_index(const void* indices, int type, u64 at) {
    if (type == INDEX_U8) return static_cast<const u8*>(indices)[at];
    if (type == INDEX_U32) return static_cast<const u32*>(indices)[at];
    return static_cast<const i64*>(indices)[at];
}

// Optimizer step parameters in device memory, so that a captured step can be replayed with other values. Mirrors
// `arguments::Step` on the host.
struct Step {
    u64 number;        // the training step: counter of the random numbers
    u64 update;        // number of this optimizer step, from 1
    double lr;
    double grad_scale;  // clip coefficient x inverse loss scale
    u64 found_inf;      // not 0: a gradient is not finite, and no weight may change
};
