// Sees every access of a kernel to memory: g++ -fsanitize=thread calls a function before each. The functions are those
// below, which check accesses for races and count their cost. libtsan, which the calls would go to otherwise, is not linked:
// its clocks are those of host threads.
//
// The shim tells of what is no plain access: atomic operations, asynchronous copies, rows of matrices.
#pragma once

// Functions whose own accesses are not the kernel's.
#define UNCHECKED __attribute__((no_sanitize("thread")))
#define HOOK extern "C" __attribute__((used, visibility("hidden"))) UNCHECKED

namespace cusim {
// Whether a thread accesses shared or global memory: not its stack, a parameter or the shim's memory.
inline UNCHECKED bool is_device_memory(const void* address) {
    return machine && machine->current && (uintptr_t)address - (uintptr_t)machine >= sizeof(Machine) && address != &machine;
}
// The shared array of an address, or none.
inline UNCHECKED const Array* shared_array(uintptr_t at) {
    for (const Array* array = machine->arrays; array < machine->arrays + machine->n_arrays; array++)
        if (at - (uintptr_t)array->memory < array->bytes) return array;
    return nullptr;
}
}  // namespace cusim

#include "racecheck.h"
#include "requests.h"

namespace cusim {
struct Instruments {
    Shadow shadow;
    Requests requests;
};

__attribute__((noinline)) inline UNCHECKED void access(const void* address, size_t bytes, bool store, void* code) {
    check_access(machine->instruments->shadow, address, bytes, store ? WRITE : READ, code);
    // No instruction has more than 16 bytes.
    for (size_t at = 0; at < bytes; at += 16)
        note_access(machine->instruments->requests, (const char*)address + at, bytes - at < 16 ? bytes - at : 16, store, code);
}
inline UNCHECKED void access_atomically(const void* address, size_t bytes) {
    check_access(machine->instruments->shadow, address, bytes, ATOMIC, __builtin_return_address(0));
}
inline UNCHECKED void copy_begins(const Copy& copy) {
    void* code = __builtin_return_address(0);
    if (copy.from) access(copy.from, 16, false, code);
    access(copy.to, 16, true, code);
    machine->instruments->shadow.leave_to_copy(copy.to, 16);
}
inline UNCHECKED void copy_ends(const Copy& copy) {
    Shadow& shadow = machine->instruments->shadow;
    if (copy.from) check_access(shadow, copy.from, 16, READ, __builtin_return_address(0));
    shadow.forget(copy.to, 16);
    check_access(shadow, copy.to, 16, WRITE, __builtin_return_address(0));
}
// A lane gives the row, and others read its elements.
inline UNCHECKED void matrix_row(const void* row) {
    note_access(machine->instruments->requests, row, 16, false, __builtin_return_address(0));
}
inline UNCHECKED void read_of_row(const void* element) {
    check_access(machine->instruments->shadow, element, 2, READ, __builtin_return_address(0));
}
inline UNCHECKED void memory_begins(const void* memory, size_t bytes) { machine->instruments->shadow.forget(memory, bytes); }
inline UNCHECKED void grid_begins() {
    if (!machine->instruments) machine->instruments = (Instruments*)calloc(1, sizeof(Instruments));
    machine->instruments->shadow.clear();
    memset(&machine->instruments->requests.costs, 0, sizeof(Costs));
    machine->instruments->requests.length = 0;
}
inline UNCHECKED void warp_meets() { count_requests(machine->instruments->requests); }
}  // namespace cusim

// The costs of the last grid of this host thread.
extern "C" inline __attribute__((used)) UNCHECKED const cusim::Costs* cusim_costs() {
    return &cusim::machine->instruments->requests.costs;
}

#define ACCESS_HOOK(name, bytes, store)                                                                \
    HOOK void __tsan_##name(void* at) {                                                                \
        if (cusim::is_device_memory(at)) cusim::access(at, bytes, store, __builtin_return_address(0)); \
    }
#define ACCESS_HOOKS(bytes)                          \
    ACCESS_HOOK(read##bytes, bytes, false)           \
    ACCESS_HOOK(write##bytes, bytes, true)           \
    ACCESS_HOOK(unaligned_read##bytes, bytes, false) \
    ACCESS_HOOK(unaligned_write##bytes, bytes, true)
ACCESS_HOOKS(1)
ACCESS_HOOKS(2)
ACCESS_HOOKS(4)
ACCESS_HOOKS(8)
ACCESS_HOOKS(16)
HOOK void __tsan_read_range(void* at, size_t bytes) {
    if (cusim::is_device_memory(at)) cusim::access(at, bytes, false, __builtin_return_address(0));
}
HOOK void __tsan_write_range(void* at, size_t bytes) {
    if (cusim::is_device_memory(at)) cusim::access(at, bytes, true, __builtin_return_address(0));
}
HOOK void __tsan_init() {}
HOOK void __tsan_func_entry(void*) {}
HOOK void __tsan_func_exit() {}
