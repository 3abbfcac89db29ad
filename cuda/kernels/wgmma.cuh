// Products of warpgroups as thin wrappers over PTX (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"): four adjacent
// warps multiply 64 x 16 by 16 x N in f32, while they go on. Requires sm_90a. In the tests the shim supplies the same names.
//
// The accumulators of warp w are rows 16 w to 16 w + 15, each a fragment of mma.cuh. Until `products_wait` nothing may touch
// them, nor what the products read of shared memory.

#ifndef CUSIM
// Lets products read what this thread has written to shared memory, or has copied there and waited for. A barrier must follow.
INLINE void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Precedes products that read or write registers which were written otherwise.
INLINE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until all but the last N groups have completed.
template <int N> INLINE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Keeps the compiler from moving accesses to fragments past this place: of results before the wait that precedes, of operands
// behind the `products_begin` that follows.
template <int N> INLINE void settle(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
        asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
}
template <int N> INLINE void settle(u32 (&a)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
        asm volatile("" : "+r"(a[n][0]), "+r"(a[n][1]), "+r"(a[n][2]), "+r"(a[n][3])::"memory");
}

#define FRAGMENT(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define FRAGMENTS_64 FRAGMENT(0), FRAGMENT(1), FRAGMENT(2), FRAGMENT(3), FRAGMENT(4), FRAGMENT(5), FRAGMENT(6), FRAGMENT(7)
#define FRAGMENTS_96 FRAGMENTS_64, FRAGMENT(8), FRAGMENT(9), FRAGMENT(10), FRAGMENT(11)
#define FRAGMENTS_128 FRAGMENTS_96, FRAGMENT(12), FRAGMENT(13), FRAGMENT(14), FRAGMENT(15)
#define REGISTERS_64                                                                                               \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_96 REGISTERS_64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS_128 REGISTERS_96 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// The operands behind the accumulators have other numbers for each N.
#define GROUP_PRODUCT(N, type, left, right, add, immediates)                                                      \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\n"                                                            \
    "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" REGISTERS_##N "}, " left ", " right ", p, 1, 1, " immediates ";\n}"
#define FROM_TILES(N, type, a, b, add, transposed)                          \
    asm volatile(GROUP_PRODUCT(N, type, a, b, add, "0, " transposed)        \
                 : FRAGMENTS_##N : "l"(left), "l"(right), "r"((int)sum), "n"((int)TRANSPOSED))
#define FROM_REGISTERS(N, type, a, b, add, transposed)                                                                  \
    asm volatile(GROUP_PRODUCT(N, type, "{" a "}", b, add, transposed)                                                  \
                 : FRAGMENTS_##N : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"((int)sum), "n"((int)TRANSPOSED))

// Starts c (64, N) = left (64, 16) right (16, N), added to c if `sum`. `right` describes a tile in shared memory whose rows are
// those of N, or of 16 if TRANSPOSED; `left` describes a tile whose rows are those of 64, or is a fragment of mma.cuh.
#define GROUP_PRODUCTS(H, type)                                                                                     \
    template <int N, bool TRANSPOSED> INLINE void multiply_group(H, float (*c)[4], u64 left, u64 right, bool sum) {       \
        static_assert(N == 64 || N == 96 || N == 128, "the widths of heads and of tiles");                                \
        if constexpr (N == 64) FROM_TILES(64, type, "%32", "%33", "%34", "%35");                                          \
        if constexpr (N == 96) FROM_TILES(96, type, "%48", "%49", "%50", "%51");                                          \
        if constexpr (N == 128) FROM_TILES(128, type, "%64", "%65", "%66", "%67");                                        \
    }                                                                                                                     \
    template <int N, bool TRANSPOSED> INLINE void multiply_group(H, float (*c)[4], const u32* left, u64 right, bool sum) { \
        static_assert(N == 64 || N == 96 || N == 128, "the widths of heads and of tiles");                                \
        if constexpr (N == 64) FROM_REGISTERS(64, type, "%32, %33, %34, %35", "%36", "%37", "%38");                       \
        if constexpr (N == 96) FROM_REGISTERS(96, type, "%48, %49, %50, %51", "%52", "%53", "%54");                       \
        if constexpr (N == 128) FROM_REGISTERS(128, type, "%64, %65, %66, %67", "%68", "%69", "%70");                     \
    }
GROUP_PRODUCTS(bf16, "bf16")
GROUP_PRODUCTS(f16, "f16")
#endif
