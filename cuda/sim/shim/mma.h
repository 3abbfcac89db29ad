// The names of kernels/mma.cuh on a CPU. Fragments are laid out as the PTX ISA says of ldmatrix and of
// mma.m16n8k16 with halves.
#pragma once

namespace cusim {
inline UNCHECKED void arrive(const Copy& copy) {
    if (copy.from) memcpy(copy.to, copy.from, 16);
    else memset(copy.to, 0, 16);
}
}  // namespace cusim

// Arrives as late as it may, when it is waited for, or at once where the order of threads is reversed: a copy that
// is not waited for shows in one, and one that overwrites what others still read in the other.
inline void copy_async(void* to, const void* from, bool valid) {
    using namespace cusim;
    Fiber& me = *machine->current;
    if (me.n_copies == MAX_COPIES) fail("more asynchronous copies in flight than the shim holds");
    if (((uintptr_t)to | (uintptr_t)from) & 15) fail("an asynchronous copy of 16 bytes at an address that is no multiple of 16");
    Copy& copy = me.copies[me.n_copies++] = {to, valid ? from : nullptr, me.groups};
    copy_begins(copy);
    if (machine->reversed) arrive(copy);
}
inline void copy_commit() { cusim::machine->current->groups++; }
template <int N> inline void copy_wait() {
    using namespace cusim;
    Fiber& me = *machine->current;
    int kept = 0;
    for (int i = 0; i < me.n_copies; i++) {
        const Copy& copy = me.copies[i];
        if (copy.group >= me.groups - N) {
            me.copies[kept++] = copy;
            continue;
        }
        if (!machine->reversed) arrive(copy);
        copy_ends(copy);
        const size_t offset = (char*)copy.to - (char*)dynamic_shared();
        if (offset < machine->dynamic_bytes) machine->fences[offset / 16] = {(unsigned)me.number + 1, me.fences};
    }
    me.n_copies = kept;
}

namespace cusim {
inline void load(u32* r, const void* row, bool transposed) {
    if ((uintptr_t)row & 15) fail("ldmatrix at an address that is no multiple of 16");
    const int lane = machine->current->lane;
    matrix_row(row);
    exchange((const u16*)row, [&](auto of) UNCHECKED {
        for (int matrix = 0; matrix < 4; matrix++) {
            u16 pair[2];
            for (int k = 0; k < 2; k++) {
                const int i = lane / 4, j = lane % 4 * 2 + k;
                const u16* element = transposed ? of(matrix * 8 + j) + i : of(matrix * 8 + i) + j;
                read_of_row(element);
                pair[k] = *element;
            }
            r[matrix] = pair[0] | (u32)pair[1] << 16;
        }
    });
    wait(AT_WARP);
}
// The operands of a lane, widened: two halves from each of the 32-bit registers.
struct Fragments { float a[8], b[4]; };
template <class H> inline void multiply(float* c, const u32* a, const u32* b) {
    Fragments mine;
    const auto half = [](u32 pair, int k) { return widen(H{(u16)(pair >> (16 * k))}); };
    for (int k = 0; k < 2; k++) {
        for (int r = 0; r < 4; r++) mine.a[2 * r + k] = half(a[r], k);
        for (int r = 0; r < 2; r++) mine.b[2 * r + k] = half(b[r], k);
    }
    const int lane = machine->current->lane;
    exchange(&mine, [&](auto of) UNCHECKED {
        // This lane's two rows of the left factor and two columns of the right one, of four lanes each. Most of the time of
        // attention's tests is spent here.
        float left[16][2], right[16][2];
        for (int q = 0; q < 4; q++) {
            const Fragments* rows = of(lane / 4 * 4 + q);
            const Fragments* columns[2] = {of(lane % 4 * 8 + q), of(lane % 4 * 8 + 4 + q)};
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                const int at = k / 2 * 8 + q * 2 + k % 2;
                left[at][0] = rows->a[k / 2 * 4 + k % 2];
                left[at][1] = rows->a[k / 2 * 4 + k % 2 + 2];
                right[at][0] = columns[0]->b[k];
                right[at][1] = columns[1]->b[k];
            }
        }
        float sums[4] = {c[0], c[1], c[2], c[3]};
        for (int k = 0; k < 16; k++)
#pragma GCC unroll 4
            for (int e = 0; e < 4; e++) sums[e] += left[k][e / 2] * right[k][e % 2];
        memcpy(c, sums, sizeof sums);
    });
    wait(AT_WARP);  // the others have read `mine`
}
}  // namespace cusim

inline void load_matrices(u32* r, const void* row) { cusim::load(r, row, false); }
inline void load_matrices_transposed(u32* r, const void* row) { cusim::load(r, row, true); }
inline void multiply_add(bf16, float* c, const u32* a, const u32* b) { cusim::multiply<bf16>(c, a, b); }
inline void multiply_add(f16, float* c, const u32* a, const u32* b) { cusim::multiply<f16>(c, a, b); }
template <class H> inline u32 packed(H, float low, float high) {
    H a, b;
    narrow(low, a);
    narrow(high, b);
    return a.bits | (u32)b.bits << 16;
}

#include "wgmma.h"
