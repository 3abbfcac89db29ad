// Runs the text of CUDA kernels on a CPU: one fiber for each CUDA thread, the blocks of a grid one after another.
//
// A warp runs as far as it can before the next one starts, in either order of warps and lanes, so that a missing
// barrier shows as another result. Shared memory is one allocation for each array, filled with garbage at the start
// of every block. What `cp.async` copies arrives when it is waited for, or at once in the other order. A barrier that some threads never
// reach, because they wait at another one or have ended, is an error that says so. Built with -fsanitize=thread, every
// access is checked for races and its cost is counted (`instrumentation.h`).
//
// Emulates what the kernels here use of the CUDA C++ Programming Guide (barriers, shuffles) and of the PTX ISA
// (`cp.async`, `ldmatrix`, `mma.sync.m16n8k16`, `wgmma.mma_async`): fragments are laid out as their documentation says.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <utility>

#define CUSIM
#define __global__
#define __device__
#define __launch_bounds__(...)
#define INLINE inline
#define KERNEL_ENTRY extern "C"

struct dim3 { unsigned x, y, z; };

namespace cusim {
constexpr int MAX_THREADS = 1024, WARP = 32, MAX_ARRAYS = 16, MAX_COPIES = 64, MAX_PRODUCTS = 32, MAX_SHARED = 228 << 10, MAX_ARGUMENTS = 64, MAX_PARAMETER_BYTES = 4096;
constexpr unsigned char GARBAGE = 0x7b;  // 1.3e36 in f32 and bf16, 61e3 in f16
#ifdef __SANITIZE_ADDRESS__
constexpr size_t STACK = 256 << 10;
#else
constexpr size_t STACK = 64 << 10;
#endif

enum Wait { RUNNING, AT_BLOCK, AT_WARP, ENDED };
struct Copy { void* to; const void* from; int group; };  // of 16 bytes; zeros if there is no source
// A product of a warpgroup that is under way (wgmma.h): what this thread computes of it.
struct Product {
    float* c;
    int columns, group;
    uint64_t left, right;
    bool sum, transposed, of_registers, first;
    void (*compute)(Product&);
    float rows[2][16], before[64];  // the left factor's rows; the accumulators before the first product
};
// Who has copied 16 bytes of shared memory, counted from 1, and how many fences of that thread came before.
struct Fence { unsigned thread, number; };
struct Fiber {
    void* stack_pointer;
    dim3 index;
    int number, lane;
    Wait wait;
    uint64_t slot[2];  // what the lane shows to its warp, by turns
    unsigned exchanges;
    unsigned block_interval, warp_interval;  // how many barriers of each kind the thread has passed
    Copy* copies;  // MAX_COPIES
    int n_copies, groups;
    Product* products;  // MAX_PRODUCTS
    int n_products, product_groups;
    unsigned products_started, fences;
    bool products_begun;
};
struct Array { const void* tag; char* memory; size_t bytes; };
struct Instruments;
struct Machine {
    Fiber fiber[MAX_THREADS];  // a few lines of the cache each, since every switch reads them
    Copy copies[MAX_THREADS][MAX_COPIES];
    Product products[MAX_THREADS][MAX_PRODUCTS];
    Fiber* current;  // the thread that runs
    void* scheduler;
    dim3 block, block_dim, grid_dim;
    unsigned block_number;  // from 1
    int threads;
    Array arrays[MAX_ARRAYS];
    int n_arrays;
    bool reversed;
    size_t dynamic_bytes;
    Fence fences[MAX_SHARED / 16];  // of the dynamic shared memory
    void (*call)(void**);
    void* arguments[MAX_ARGUMENTS];
    alignas(16) char parameters[MAX_PARAMETER_BYTES];  // what the arguments point to
    const char* error;
    Instruments* instruments;
    alignas(64) char stacks[MAX_THREADS][STACK];
};
// Each host thread has its own; the model spares a function call at every threadIdx.
inline thread_local __attribute__((tls_model("initial-exec"))) Machine* machine = nullptr;

extern "C" void cusim_switch(void** save, void* load);
asm(R"(.text
.globl cusim_switch
.hidden cusim_switch
cusim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

inline void stop() { cusim_switch(&machine->current->stack_pointer, machine->scheduler); }
inline void fail(const char* error) {
    if (!machine->error) machine->error = error;
    stop();
}
}  // namespace cusim

#ifdef __SANITIZE_THREAD__
#include "instrumentation.h"
#else
#define UNCHECKED
namespace cusim {
inline void access_atomically(const void*, size_t) {}
inline void copy_begins(const Copy&) {}
inline void copy_ends(const Copy&) {}
inline void matrix_row(const void*) {}
inline void read_of_row(const void*) {}
inline void memory_begins(const void*, size_t) {}
inline void grid_begins() {}
inline void warp_meets() {}
}  // namespace cusim
#endif

namespace cusim {
// The end of a fiber; it is never resumed.
inline void entry() {
    machine->call(machine->arguments);
    machine->current->wait = ENDED;
    stop();
    abort();
}
inline void wait(Wait kind) {
    machine->current->wait = kind;
    stop();
}

// Every lane of the warp shows a value; `read(lane)` then reads another's.
template <class T, class F> UNCHECKED void exchange(T mine, F read) {
    static_assert(sizeof(T) <= 8);
    Fiber* me = machine->current;
    const unsigned turn = me->exchanges++ & 1;
    memcpy(&me->slot[turn], &mine, sizeof(T));
    wait(AT_WARP);
    Fiber* warp = me - me->lane;
    read([&](int lane) UNCHECKED {
        T value;
        memcpy(&value, &warp[lane].slot[turn], sizeof(T));
        return value;
    });
}

inline void* shared(const void* tag, size_t bytes) {
    Machine& m = *machine;
    for (int i = 0; i < m.n_arrays; i++)
        if (m.arrays[i].tag == tag) return m.arrays[i].memory;
    if (m.n_arrays == MAX_ARRAYS) abort();
    char* memory = (char*)aligned_alloc(1024, (bytes + 1023) / 1024 * 1024);
    memset(memory, GARBAGE, bytes);
    memory_begins(memory, bytes);
    m.arrays[m.n_arrays++] = {tag, memory, bytes};
    return memory;
}
inline void* dynamic_shared() {
    static char tag;
    return shared(&tag, machine->dynamic_bytes);
}

// Lets every thread that waits at a barrier go on if all have reached it. False if nothing can.
inline bool release(int warps) {
    Machine& m = *machine;
    bool any = false, all_at_block = true;
    for (int w = 0; w < warps; w++) {
        bool all = true;
        for (int l = 0; l < WARP; l++) {
            Wait wait = m.fiber[w * WARP + l].wait;
            all &= wait == AT_WARP;
            all_at_block &= wait == AT_BLOCK;
        }
        if (!all) continue;
        any = true;
        for (int l = 0; l < WARP; l++) m.fiber[w * WARP + l].wait = RUNNING;
    }
    for (int w = 0; w < warps && all_at_block; w++)
        if (m.fiber[w * WARP].products_started != m.fiber[w / 4 * 4 * WARP].products_started)
            m.error = "a product of a warpgroup that only some of its warps start";
    if (all_at_block) {
        any = true;
        for (int i = 0; i < m.threads; i++) m.fiber[i].wait = RUNNING;
    }
    return any;
}

// Runs what can run in a warp until all of its lanes wait for another warp or have ended.
inline bool run_warp(int w, bool reversed) {
    Machine& m = *machine;
    bool ran = false;
    for (bool again = true; again && !m.error;) {
        again = false;
        bool all_at_warp = true;
        for (int i = 0; i < WARP && !m.error; i++) {
            Fiber& fiber = m.fiber[w * WARP + (reversed ? WARP - 1 - i : i)];
            if (fiber.wait == RUNNING) {
                m.current = &fiber;
                cusim_switch(&m.scheduler, fiber.stack_pointer);
                m.current = nullptr;
                ran = again = true;
            }
            all_at_warp &= fiber.wait == AT_WARP;
        }
        warp_meets();
        if (all_at_warp) {
            again = true;
            for (int l = 0; l < WARP; l++) m.fiber[w * WARP + l].wait = RUNNING;
        }
    }
    return ran;
}

inline void start(Fiber& fiber, int number) {
    Machine& m = *machine;
    fiber.number = number;
    fiber.lane = number % WARP;
    fiber.wait = RUNNING;
    fiber.exchanges = fiber.block_interval = fiber.warp_interval = 0;
    fiber.copies = m.copies[number];
    fiber.products = m.products[number];
    fiber.n_copies = fiber.groups = fiber.n_products = fiber.product_groups = 0;
    fiber.products_started = fiber.fences = 0;
    fiber.products_begun = false;
    unsigned n = number;
    fiber.index = {n % m.block_dim.x, n / m.block_dim.x % m.block_dim.y, n / (m.block_dim.x * m.block_dim.y)};
    // Stacks begin at different sets of the cache. The entry sees the alignment that a call leaves.
    uint64_t* top = (uint64_t*)(m.stacks[number] + STACK - 64 - number % 61 * 192);
    *--top = 0;
    *--top = (uint64_t)(void*)entry;
    for (int i = 0; i < 6; i++) *--top = 0;
    fiber.stack_pointer = top;
}

inline const char* run_block(dim3 block, bool reversed) {
    Machine& m = *machine;
    m.block = block;
    const int warps = m.threads / WARP;
    for (int i = 0; i < m.threads; i++) start(m.fiber[i], i);
    m.n_arrays = 0;
    memset(m.fences, 0, m.dynamic_bytes / 16 * sizeof(Fence));
    m.reversed = reversed;
    while (!m.error) {
        bool ran = false, ended = true;
        for (int w = 0; w < warps && !m.error; w++) ran |= run_warp(reversed ? warps - 1 - w : w, reversed);
        for (int i = 0; i < m.threads; i++) ended &= m.fiber[i].wait == ENDED;
        if (ended) break;
        bool released = release(warps);
        if (!ran && !released) m.error = "barrier divergence: some threads wait at a barrier that others never reach";
    }
    for (int i = 0; i < m.n_arrays; i++) free(m.arrays[i].memory);
    for (int i = 0; i < m.threads && !m.error; i++)
        if (m.fiber[i].n_copies) m.error = "a thread ends before its asynchronous copies have arrived";
        else if (m.fiber[i].n_products) m.error = "a thread ends before its products are complete";
    return m.error;
}

// `sizes` are those of the arguments, and a zero.
struct Kernel { const char* name; void (*call)(void**); const size_t* sizes; };
template <auto F> struct Caller;
template <class... P, void (*F)(P...)> struct Caller<F> {
    template <size_t... I> static void each(void** a, std::index_sequence<I...>) { F(*(std::remove_cv_t<P>*)a[I]...); }
    static void call(void** a) { each(a, std::index_sequence_for<P...>()); }
    static constexpr size_t sizes[] = {sizeof(P)..., 0};
};
extern const Kernel kernels[];
extern const int n_kernels;
}  // namespace cusim

// The sizes of a kernel's arguments, and a zero; null if there is no such kernel.
extern "C" inline __attribute__((used)) const size_t* cusim_sizes(const char* name) {
    for (int i = 0; i < cusim::n_kernels; i++)
        if (!strcmp(cusim::kernels[i].name, name)) return cusim::kernels[i].sizes;
    return nullptr;
}

// Runs a grid; null, or what went wrong. `arguments` are pointers to the kernel's, as in cuLaunchKernel.
extern "C" inline __attribute__((used)) const char* cusim_launch(const char* name, dim3 grid, dim3 block, size_t dynamic_bytes,
                                          int reversed, void** arguments) {
    using namespace cusim;
    if (!machine) {
        void* memory = mmap(nullptr, sizeof(Machine), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) return "no memory for the threads' stacks";
        machine = (Machine*)memory;
    }
    Machine& m = *machine;
    m.error = nullptr;
    m.threads = block.x * block.y * block.z;
    if (m.threads % WARP || m.threads > MAX_THREADS || m.threads == 0) return "a block is whole warps, 1024 threads at most";
    if (dynamic_bytes > MAX_SHARED) return "more shared memory than a GPU has";
    m.grid_dim = grid;
    m.block_dim = block;
    m.dynamic_bytes = dynamic_bytes;
    const Kernel* kernel = nullptr;
    for (int i = 0; i < n_kernels; i++)
        if (!strcmp(kernels[i].name, name)) kernel = &kernels[i];
    if (!kernel) return "there is no kernel of this name";
    m.call = kernel->call;
    size_t bytes = 0;
    for (int i = 0; kernel->sizes[i]; i++) {
        const size_t size = kernel->sizes[i];
        if (i == MAX_ARGUMENTS || bytes + size > MAX_PARAMETER_BYTES) return "more arguments than the shim holds";
        m.arguments[i] = memcpy(m.parameters + bytes, arguments[i], size);
        bytes += (size + 15) / 16 * 16;
    }
    grid_begins();
    const uint64_t blocks = (uint64_t)grid.x * grid.y * grid.z;
    for (uint64_t i = 0; i < blocks; i++) {
        const uint64_t n = reversed ? blocks - 1 - i : i;
        dim3 at = {(unsigned)(n % grid.x), (unsigned)(n / grid.x % grid.y), (unsigned)(n / grid.x / grid.y)};
        m.block_number = n + 1;
        if (const char* error = run_block(at, reversed)) return error;
    }
    return nullptr;
}

#define threadIdx (cusim::machine->current->index)
#define blockIdx (cusim::machine->block)
#define blockDim (cusim::machine->block_dim)
#define gridDim (cusim::machine->grid_dim)
#define SHARED(type, name, count)                                                          \
    type* name = ({                                                                        \
        static char tag;                                                                   \
        static_cast<type*>(cusim::shared(&tag, sizeof(type) * (count)));                   \
    })
#define DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(cusim::dynamic_shared())

inline void __syncthreads() {
    cusim::wait(cusim::AT_BLOCK);
    cusim::machine->current->block_interval++;
}
inline void __syncwarp() {
    cusim::wait(cusim::AT_WARP);
    cusim::machine->current->warp_interval++;
}
template <class T> T __shfl_xor_sync(unsigned, T mine, int mask) {
    T result;
    cusim::exchange(mine, [&](auto of) { result = of(cusim::machine->current->lane ^ mask); });
    return result;
}
template <class T> T __shfl_sync(unsigned, T mine, int lane) {
    T result;
    cusim::exchange(mine, [&](auto of) { result = of(lane & 31); });
    return result;
}
inline unsigned __ballot_sync(unsigned, bool mine) {
    unsigned result = 0;
    cusim::exchange(mine, [&](auto of) {
        for (int lane = 0; lane < cusim::WARP; lane++) result |= (unsigned)of(lane) << lane;
    });
    return result;
}
inline float fast_exp2(float x) { return exp2f(x); }
inline float fast_reciprocal(float x) { return 1 / x; }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline UNCHECKED unsigned long long atomicMin(unsigned long long* at, unsigned long long value) {
    cusim::access_atomically(at, sizeof *at);
    unsigned long long old = *at;
    if (value < old) *at = value;
    return old;
}
inline float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
inline unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
inline double __longlong_as_double(long long bits) { double x; memcpy(&x, &bits, 8); return x; }
inline long long __double_as_longlong(double x) { long long bits; memcpy(&bits, &x, 8); return bits; }
