// Finds races: pairs of accesses to one byte, at least one of them a write, that no barrier orders. Each byte of shared and
// global memory has a shadow cell with its last write and the reads since then.
//
// g++ -fsanitize=thread calls a function before each access of a kernel. The functions are those below: libtsan, which
// calls would go to otherwise, is not linked, since its clocks are those of host threads.
//
// Only `__syncthreads` orders accesses of a block, and `__syncwarp` those of a warp; shuffles and products on tensor cores
// do not. Nothing orders the blocks of a grid. What `cp.async` writes is nobody's before the thread has waited for it.
// Atomics are ordered among themselves. The answer does not depend on the order in which threads run.
#pragma once
#include <dlfcn.h>

#define UNCHECKED __attribute__((no_sanitize("thread")))
#define HOOK extern "C" __attribute__((used, visibility("hidden"))) UNCHECKED

namespace cusim {
// When a thread has an access: in which interval between barriers of its block, and of its warp. For accesses of several
// threads, ANY where they differ.
struct Access {
    uint32_t block, block_interval, warp_interval;  // blocks count from 1: 0 is no access
    uint8_t warp, lane;
    bool atomic;
};
constexpr uint32_t ANY_BLOCK = ~0u;
constexpr uint8_t ANY = 255;
struct Cell { Access write, reads; };

// Cells of the bytes that a grid has touched, in pages.
struct ShadowPage {
    static constexpr uintptr_t BYTES = 1024;
    uintptr_t number;
    ShadowPage* next;
    Cell cells[BYTES];
};
struct Shadow {
    static constexpr uintptr_t BUCKETS = 4096;
    ShadowPage* pages[BUCKETS];
    char message[512];

    UNCHECKED Cell& at(uintptr_t address) {
        const uintptr_t number = address / ShadowPage::BYTES;
        ShadowPage*& bucket = pages[number % BUCKETS];
        ShadowPage* page = bucket;
        while (page && page->number != number) page = page->next;
        if (!page) {
            page = (ShadowPage*)calloc(1, sizeof(ShadowPage));
            page->number = number;
            page->next = bucket;
            bucket = page;
        }
        return page->cells[address % ShadowPage::BYTES];
    }
    UNCHECKED void clear() {
        for (ShadowPage*& bucket : pages)
            while (ShadowPage* page = bucket) {
                bucket = page->next;
                free(page);
            }
    }
};

// Whether all of `before` happened before the thread of `now` came here.
inline UNCHECKED bool ordered(const Access& before, const Access& now) {
    if (before.block != now.block) return before.block == 0;
    if (before.block_interval != now.block_interval) return true;
    if (before.warp != now.warp) return false;
    return before.warp_interval != now.warp_interval || before.lane == now.lane;
}
// Adds an access to others. Those that are ordered before it need not be kept, and of the others only how far they lie
// apart.
inline UNCHECKED void join(Access& others, const Access& now) {
    if (ordered(others, now)) others = now;
    else if (others.block != now.block) others.block = ANY_BLOCK;
    else if (others.warp != now.warp) others.warp = ANY;
    else others.lane = ANY;
}

enum AccessKind { READ, WRITE, ATOMIC };
inline UNCHECKED Access here(AccessKind kind) {
    const Machine& m = *machine;
    const Fiber& me = *m.current;
    return {m.block_number, me.block_interval, me.warp_interval, (uint8_t)(me.number / WARP), (uint8_t)me.lane, kind == ATOMIC};
}

inline UNCHECKED void race(uintptr_t at, const char* what, const Access& now, const Access& before, const char* had, void* code) {
    Machine& m = *machine;
    char place[64], other[64];
    snprintf(place, sizeof place, "global memory at %#zx", (size_t)at);
    for (int i = 0; i < m.n_arrays; i++)
        if (at - (uintptr_t)m.arrays[i].memory < m.arrays[i].bytes)
            snprintf(place, sizeof place, "byte %zu of shared array %d", (size_t)(at - (uintptr_t)m.arrays[i].memory), i);
    if (before.block == ANY_BLOCK) snprintf(other, sizeof other, "several blocks, or a copy under way, have");
    else if (before.warp == ANY) snprintf(other, sizeof other, "several warps have");
    else if (before.lane == ANY) snprintf(other, sizeof other, "several lanes have");
    else snprintf(other, sizeof other, "thread %d of block %u has", before.warp * WARP + before.lane, before.block - 1);
    Dl_info library = {};
    dladdr(code, &library);
    snprintf(m.shadow->message, sizeof m.shadow->message,
             "race: thread %d of block %u %s %s, which %s %s, with no barrier between (addr2line -fie %s %#zx)",
             now.warp * WARP + now.lane, now.block - 1, what, place, other, had, library.dli_fname,
             (size_t)((char*)code - (char*)library.dli_fbase - 1));
    fail(m.shadow->message);
}

// Whether an address is of shared or global memory: not of the stacks, nor of the shim.
inline UNCHECKED bool is_device_memory(const void* address) {
    return machine && (uintptr_t)address - (uintptr_t)machine >= sizeof(Machine) && address != &machine;
}
// Notes an access, and fails if it races with an earlier one.
__attribute__((noinline)) inline UNCHECKED void access(const void* address, size_t bytes, AccessKind kind, void* code) {
    const uintptr_t first = (uintptr_t)address;
    const Access now = here(kind);
    for (uintptr_t at = first; at < first + bytes; at++) {
        Cell& cell = machine->shadow->at(at);
        const bool among_atomics = kind == ATOMIC && cell.write.atomic;
        const char* what = kind == READ ? "reads" : kind == WRITE ? "writes" : "changes atomically";
        if (!among_atomics && !ordered(cell.write, now)) race(at, what, now, cell.write, "written", code);
        if (kind != READ && !ordered(cell.reads, now)) race(at, what, now, cell.reads, "read", code);
        if (kind == READ) join(cell.reads, now);
        else if (among_atomics) join(cell.write, now);
        else cell = {now, {}};
    }
}
inline UNCHECKED void access_atomically(const void* address, size_t bytes) {
    access(address, bytes, ATOMIC, __builtin_return_address(0));
}
// An asynchronous copy of 16 bytes reads and writes from its beginning, and until it has arrived nobody else may.
inline UNCHECKED void copy_begins(const Copy& copy) {
    if (copy.from) access(copy.from, 16, READ, __builtin_return_address(0));
    access(copy.to, 16, WRITE, __builtin_return_address(0));
    for (int i = 0; i < 16; i++) machine->shadow->at((uintptr_t)copy.to + i).write.block = ANY_BLOCK;
}
inline UNCHECKED void copy_ends(const Copy& copy) {
    if (copy.from) access(copy.from, 16, READ, __builtin_return_address(0));
    for (int i = 0; i < 16; i++) machine->shadow->at((uintptr_t)copy.to + i) = {here(WRITE), {}};
}
inline UNCHECKED void memory_begins(const void* memory, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) machine->shadow->at((uintptr_t)memory + i) = {};
}
inline UNCHECKED void grid_begins() {
    if (!machine->shadow) machine->shadow = (Shadow*)calloc(1, sizeof(Shadow));
    machine->shadow->clear();
}
}  // namespace cusim

#define ACCESS_HOOK(name, bytes, kind)                                                                        \
    HOOK void __tsan_##name(void* at) {                                                                       \
        if (cusim::is_device_memory(at)) cusim::access(at, bytes, cusim::kind, __builtin_return_address(0)); \
    }
#define ACCESS_HOOKS(bytes)                            \
    ACCESS_HOOK(read##bytes, bytes, READ)              \
    ACCESS_HOOK(write##bytes, bytes, WRITE)            \
    ACCESS_HOOK(unaligned_read##bytes, bytes, READ)    \
    ACCESS_HOOK(unaligned_write##bytes, bytes, WRITE)
ACCESS_HOOKS(1)
ACCESS_HOOKS(2)
ACCESS_HOOKS(4)
ACCESS_HOOKS(8)
ACCESS_HOOKS(16)
HOOK void __tsan_read_range(void* at, size_t bytes) {
    if (cusim::is_device_memory(at)) cusim::access(at, bytes, cusim::READ, __builtin_return_address(0));
}
HOOK void __tsan_write_range(void* at, size_t bytes) {
    if (cusim::is_device_memory(at)) cusim::access(at, bytes, cusim::WRITE, __builtin_return_address(0));
}
HOOK void __tsan_init() {}
HOOK void __tsan_func_entry(void*) {}
HOOK void __tsan_func_exit() {}
