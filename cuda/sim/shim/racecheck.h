// Finds races: pairs of accesses to one byte, at least one of them a write, that no barrier orders. Each byte of shared and
// global memory has a shadow cell with its last write and the reads since then.
//
// Only `__syncthreads` orders accesses of a block, and `__syncwarp` those of a warp; shuffles and products on tensor cores
// do not. Nothing orders the blocks of a grid. What `cp.async` writes is nobody's before the thread has waited for it.
// Atomics are ordered among themselves. The answer does not depend on the order in which threads run.
#pragma once
#include <dlfcn.h>

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
// Written by memcpy and memset, because the assignment of a struct is a function, whose accesses would be checked.
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
    // What `cp.async` writes is nobody's until it is waited for.
    UNCHECKED void leave_to_copy(const void* memory, size_t bytes) {
        for (size_t i = 0; i < bytes; i++) at((uintptr_t)memory + i).write.block = ANY_BLOCK;
    }
    UNCHECKED void forget(const void* memory, size_t bytes) {
        for (size_t i = 0; i < bytes; i++) memset(&at((uintptr_t)memory + i), 0, sizeof(Cell));
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
    if (ordered(others, now)) memcpy(&others, &now, sizeof now);
    else if (others.block != now.block) others.block = ANY_BLOCK;
    else if (others.warp != now.warp) others.warp = ANY;
    else others.lane = ANY;
}

enum AccessKind { READ, WRITE, ATOMIC };
inline UNCHECKED void race(Shadow& shadow, uintptr_t at, const char* what, const Access& now, const Access& before, const char* had,
                           void* code) {
    const Machine& m = *machine;
    char place[64], other[64];
    snprintf(place, sizeof place, "global memory at %#zx", (size_t)at);
    if (const Array* array = shared_array(at))
        snprintf(place, sizeof place, "byte %zu of shared array %d", (size_t)(at - (uintptr_t)array->memory), (int)(array - m.arrays));
    if (before.block == ANY_BLOCK) snprintf(other, sizeof other, "several blocks, or a copy under way, have");
    else if (before.warp == ANY) snprintf(other, sizeof other, "several warps have");
    else if (before.lane == ANY) snprintf(other, sizeof other, "several lanes have");
    else snprintf(other, sizeof other, "thread %d of block %u has", before.warp * WARP + before.lane, before.block - 1);
    Dl_info library = {};
    dladdr(code, &library);
    snprintf(shadow.message, sizeof shadow.message,
             "race: thread %d of block %u %s %s, which %s %s, with no barrier between (addr2line -fie %s %#zx)",
             now.warp * WARP + now.lane, now.block - 1, what, place, other, had, library.dli_fname,
             (size_t)((char*)code - (char*)library.dli_fbase - 1));
    fail(shadow.message);
}

// Notes an access, and fails if it races with an earlier one.
inline UNCHECKED void check_access(Shadow& shadow, const void* address, size_t bytes, AccessKind kind, void* code) {
    const uintptr_t first = (uintptr_t)address;
    const Fiber& me = *machine->current;
    const Access now = {machine->block_number,        me.block_interval, me.warp_interval,
                        (uint8_t)(me.number / WARP), (uint8_t)me.lane,  kind == ATOMIC};
    for (uintptr_t at = first; at < first + bytes; at++) {
        Cell& cell = shadow.at(at);
        const bool among_atomics = kind == ATOMIC && cell.write.atomic;
        const char* what = kind == READ ? "reads" : kind == WRITE ? "writes" : "changes atomically";
        if (!among_atomics && !ordered(cell.write, now)) race(shadow, at, what, now, cell.write, "written", code);
        if (kind != READ && !ordered(cell.reads, now)) race(shadow, at, what, now, cell.reads, "read", code);
        if (kind == READ) join(cell.reads, now);
        else if (among_atomics) join(cell.write, now);
        else {
            memcpy(&cell.write, &now, sizeof now);
            memset(&cell.reads, 0, sizeof cell.reads);
        }
    }
}
}  // namespace cusim
