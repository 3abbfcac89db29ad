// Tensor-core primitives as thin wrappers over PTX: asynchronous copies to shared memory, loads of 8 x 8 matrices of
// 16-bit elements from shared memory to registers, and products of 16 x 16 by 16 x 8 in f32. Requires compute
// capability 8.0. In the tests the shim supplies the same names.

#ifndef CUSIM
INLINE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// Copies 16 bytes to shared memory; zeros if not `valid`, and then nothing is read.
INLINE void copy_async(void* to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0));
}
INLINE void copy_commit() { asm volatile("cp.async.commit_group;"); }
// Waits until all but the last N groups of this thread have completed.
template <int N> INLINE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Loads four matrices. Lane l passes the address of row l % 8 of matrix l / 8, and receives two adjacent elements of
// row l / 4 of each matrix.
INLINE void load_matrices(u32* r, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
INLINE void load_matrices_transposed(u32* r, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

#define MULTIPLY_ADD(type)                                                                                                 \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
                 "{%0, %1, %2, %3};"                                                                                       \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
// c += a b.
INLINE void multiply_add(bf16, float* c, const u32* a, const u32* b) { MULTIPLY_ADD("bf16"); }
INLINE void multiply_add(f16, float* c, const u32* a, const u32* b) { MULTIPLY_ADD("f16"); }

INLINE u32 packed(bf16, float low, float high) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
INLINE u32 packed(f16, float low, float high) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
#endif
