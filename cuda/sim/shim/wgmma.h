// The names of kernels/wgmma.cuh on a CPU: matrices and fragments lie as the PTX ISA says of wgmma.mma_async ("Asynchronous
// Warpgroup Level Matrix Instructions").
//
// A product is computed when it is waited for, as late as it may, and its accumulators are NaN until then. It fails if it reads
// what was copied without `fence.proxy.async` of the thread that copied, if `wgmma.fence` does not precede it, or if only
// some warps of a warpgroup start it.
#pragma once

namespace cusim {
constexpr int WARPGROUP = 4 * WARP;
// Where the dynamic shared memory begins in the addresses of descriptors.
constexpr uint32_t SHARED_BEGIN = 1024;

// The address of 8 elements, adjacent in memory, that a descriptor tells of: elements `inner` to `inner` + 7 along the dimension
// that is adjacent in memory, of which a block holds `span` bytes, and element `outer` along the other one.
inline UNCHECKED const u16* described(uint64_t descriptor, int inner, int outer) {
    const uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
    const uint32_t base = descriptor >> 49 & 7, mode = descriptor >> 62, span = 256 >> mode;
    if (mode == 0 || base != 0) fail("the shim knows only descriptors with a swizzle and the base offset 0");
    uint32_t at = start + inner * 2 % span + inner * 2 / span * leading + outer % 8 * span + outer / 8 * stride;
    at ^= at >> 3 & (span - 16);  // the swizzle, of addresses
    const uint32_t offset = at - SHARED_BEGIN;
    if (offset >= machine->dynamic_bytes) {
        fail("a product reads outside of the dynamic shared memory");
    } else {
        const Fence& fence = machine->fences[offset / 16];
        if (fence.thread && machine->fiber[fence.thread - 1].fences == fence.number)
            fail("a product reads what was copied without fence.proxy.async behind the wait for the copy");
    }
    return (const u16*)((char*)dynamic_shared() + offset);
}

// Notes what a thread has its warpgroup read, so that each part of 16 bytes is noted once. Eight lanes have the matrix of 8 x 8
// that is read at once.
inline UNCHECKED void note_part(const u16* part) {
    matrix_row(part);
    for (int i = 0; i < 8; i++) read_of_row(part + i);
}

template <class H> UNCHECKED void compute(Product& product) {
    const Fiber& me = *machine->current;
    const int thread = me.number % WARPGROUP, lane = me.lane, own = thread / WARP * 16 + lane / 4;
    const int n = product.columns;
    for (int part = thread; part < 2 * n; part += WARPGROUP)
        note_part(product.transposed ? described(product.right, part / 16 * 8, part % 16) : described(product.right, part / n * 8, part % n));
    if (!product.of_registers) {
        note_part(described(product.left, lane / 16 * 8, thread / WARP * 16 + lane % 16));
        for (int half = 0; half < 2; half++)
            for (int row = 0; row < 2; row++) {
                const u16* part = described(product.left, half * 8, own + 8 * row);
                for (int k = 0; k < 8; k++) product.rows[row][half * 8 + k] = widen(H{part[k]});
            }
    }
    for (int fragment = 0; fragment < n / 8; fragment++) {
        // Each part has 8 elements: of a row of the right factor if it is transposed, else of half a column.
        const u16* rows[16];
        for (int k = 0; product.transposed && k < 16; k++) rows[k] = described(product.right, fragment * 8, k);
        for (int e = 0; e < 2; e++) {
            const int column = lane % 4 * 2 + e;
            const u16* halves[2];
            for (int half = 0; !product.transposed && half < 2; half++)
                halves[half] = described(product.right, half * 8, fragment * 8 + column);
            float* c = product.c + fragment * 4 + e;
            for (int k = 0; k < 16; k++) {
                const float right = widen(H{product.transposed ? rows[k][column] : halves[k / 8][k % 8]});
                c[0] += product.rows[0][k] * right;
                c[2] += product.rows[1][k] * right;
            }
        }
    }
}

// Starts a product; `left` is null if the left factor is in shared memory.
template <class H> UNCHECKED void start_product(float* c, int columns, const u32* left, const Product& operands) {
    Fiber& me = *machine->current;
    if (!me.products_begun) fail("a product without wgmma.fence before it");
    if (me.n_products == MAX_PRODUCTS) fail("more products in flight than the shim holds");
    Product& product = me.products[me.n_products++];
    memcpy(&product, &operands, sizeof product);
    product.c = c;
    product.columns = columns;
    product.of_registers = left != nullptr;
    product.group = me.product_groups;
    product.compute = compute<H>;
    product.first = true;
    for (int i = 0; i < me.n_products - 1; i++) product.first &= me.products[i].c != c;
    me.products_started++;
    if (product.first)
        for (int i = 0; i < columns / 2; i++) {
            product.before[i] = product.sum ? c[i] : 0;
            c[i] = NAN;
        }
    else if (!product.sum) fail("a product that forgets those before it");
    exchange(left, [&](auto of) UNCHECKED {
        for (int k = 0; left && k < 16; k++)
            for (int row = 0; row < 2; row++) {
                const u32 pair = of(me.lane / 4 * 4 + k % 8 / 2)[row + k / 8 * 2];
                product.rows[row][k] = widen(H{(u16)(pair >> (k % 2 * 16))});
            }
    });
    wait(AT_WARP);  // the others have read `left`
}
}  // namespace cusim

inline u32 shared_address(const void* pointer) { return (u32)((const char*)pointer - (char*)cusim::dynamic_shared()) + cusim::SHARED_BEGIN; }
inline void show_to_products() { cusim::machine->current->fences++; }
inline void products_begin() {
    cusim::wait(cusim::AT_WARP);
    cusim::machine->current->products_begun = true;
}
inline void products_commit() { cusim::machine->current->product_groups++; }
template <int N> UNCHECKED void products_wait() {
    using namespace cusim;
    Fiber& me = *machine->current;
    wait(AT_WARP);
    me.products_begun = false;
    int kept = 0;
    for (int i = 0; i < me.n_products; i++) {
        Product& product = me.products[i];
        if (product.group >= me.product_groups - N) {
            if (kept != i) memcpy(&me.products[kept], &product, sizeof product);
            kept++;
            continue;
        }
        if (product.first) memcpy(product.c, product.before, product.columns / 2 * sizeof(float));
        product.compute(product);
    }
    me.n_products = kept;
}
template <class Fragments> void settle(Fragments&) {}
template <int N, bool TRANSPOSED, class H> void multiply_group(H, float (*c)[4], u64 left, u64 right, bool sum) {
    cusim::start_product<H>(c[0], N, nullptr, {.left = left, .right = right, .sum = sum, .transposed = TRANSPOSED});
}
template <int N, bool TRANSPOSED, class H> void multiply_group(H, float (*c)[4], const u32* left, u64 right, bool sum) {
    cusim::start_product<H>(c[0], N, left, {.right = right, .sum = sum, .transposed = TRANSPOSED});
}
