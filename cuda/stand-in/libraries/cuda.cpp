// A stand-in for NVIDIA's driver: the host's memory as a GPU's, kernels as libraries for the CPU.
//
// It is as late as a driver may be: what is given to a stream is done when somebody waits for it, on the host or through
// an event. So a missing wait shows as work that was not done. The GPU's memory can be touched only while work is done:
// host code that follows an address of the GPU ends with a segmentation fault.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {
enum Status { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, NOT_FOUND = 500, LAUNCH_FAILED = 719 };
constexpr size_t GRANULE = 2 << 20, MEMORY = 4ull << 30;
constexpr int DEVICES = 8;

struct Dim3 { unsigned x, y, z; };
using Launch = const char* (*)(const char*, Dim3, Dim3, size_t, int, void**);
using Sizes = const size_t* (*)(const char*);

struct Stream;
struct Event { Stream* stream = nullptr; uint64_t number = 0; };
struct Graph { std::vector<std::function<void()>> work; };
struct Stream {
    std::deque<std::function<void()>> work;
    uint64_t given = 0, done = 0;
    Graph* graph = nullptr;  // what is given is recorded here
};
struct Module { Launch launch; Sizes sizes; };
struct Function { Launch launch; const size_t* sizes; std::string name; };

std::recursive_mutex lock;
size_t used = 0;                       // bytes that are mapped
int running = 0;                       // nested work
const char* failure = nullptr;         // of any kernel: it stays
std::map<char*, size_t> mapped;        // granules with memory
std::map<char*, size_t> reserved;
thread_local void* current = nullptr;  // the context

void protect(int protection) {
    char* start = nullptr;
    size_t length = 0;
    auto flush = [&] { if (length) mprotect(start, length, protection); };
    for (auto& [at, size] : mapped) {
        if (start + length != at) { flush(); start = at; length = 0; }
        length += size;
    }
    flush();
}

// The next piece of a stream's work.
void advance(Stream* stream) {
    auto work = std::move(stream->work.front());
    stream->work.pop_front();
    if (running++ == 0) protect(PROT_READ | PROT_WRITE);
    work();
    if (--running == 0) protect(PROT_NONE);
    stream->done++;
}

void finish(Stream* stream, uint64_t number) {
    while (stream->done < number && !stream->work.empty()) advance(stream);
}

int give(Stream* stream, std::function<void()> work) {
    if (stream->graph) {
        stream->graph->work.push_back(std::move(work));
    } else {
        stream->work.push_back(std::move(work));
        stream->given++;
    }
    return SUCCESS;
}

int outcome() { return failure ? LAUNCH_FAILED : SUCCESS; }
}  // namespace

#define API extern "C" __attribute__((visibility("default"))) int
#define LOCKED std::lock_guard<std::recursive_mutex> guard(lock)

// Gives other stand-ins' work to a stream: a matrix product, a collective.
extern "C" __attribute__((visibility("default"))) void stand_in_give(void* stream, void (*call)(void*), void* data) {
    LOCKED;
    give((Stream*)stream, [=] { call(data); });
}

API cuInit(unsigned) { return SUCCESS; }
API cuDriverGetVersion(int* version) { *version = 13000; return SUCCESS; }
API cuDeviceGetCount(int* count) { *count = DEVICES; return SUCCESS; }
API cuDeviceGet(int* device, int ordinal) { *device = ordinal; return ordinal >= 0 && ordinal < DEVICES ? SUCCESS : INVALID_DEVICE; }
API cuDeviceGetName(char* name, int length, int device) { snprintf(name, length, "stand-in %d", device); return SUCCESS; }
API cuDeviceTotalMem_v2(size_t* bytes, int) { *bytes = MEMORY; return SUCCESS; }
API cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 16: *value = 4; break;  // multiprocessors
        case 75: *value = 9; break;  // compute capability, major
        case 76: *value = 0; break;
        default: return INVALID_VALUE;
    }
    return SUCCESS;
}
API cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(uintptr_t)(device + 1); return SUCCESS; }
API cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
API cuCtxSetCurrent(void* context) { current = context; return SUCCESS; }
API cuGetErrorName(int status, const char** text) {
    *text = status == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : status == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR";
    return SUCCESS;
}
API cuGetErrorString(int status, const char** text) {
    *text = status == OUT_OF_MEMORY ? "out of memory" : status == LAUNCH_FAILED && failure ? failure : "stand-in";
    return SUCCESS;
}

API cuStreamCreateWithPriority(void** stream, unsigned, int) {
    if (!current) return INVALID_VALUE;
    *stream = new Stream;
    return SUCCESS;
}
API cuStreamDestroy_v2(void* stream) {
    LOCKED;
    finish((Stream*)stream, UINT64_MAX);
    delete (Stream*)stream;
    return SUCCESS;
}
API cuStreamSynchronize(void* stream) { LOCKED; finish((Stream*)stream, UINT64_MAX); return outcome(); }
API cuEventCreate(void** event, unsigned) { *event = new std::shared_ptr<Event>(new Event); return SUCCESS; }
API cuEventDestroy_v2(void* event) { LOCKED; delete (std::shared_ptr<Event>*)event; return SUCCESS; }
API cuEventRecord(void* event, void* handle) {
    LOCKED;
    Stream* stream = (Stream*)handle;
    **(std::shared_ptr<Event>*)event = Event{stream, stream->given};
    return SUCCESS;
}
API cuStreamWaitEvent(void* handle, void* event, unsigned) {
    LOCKED;
    const Event moment = **(std::shared_ptr<Event>*)event;
    Stream* stream = (Stream*)handle;
    if (!moment.stream || moment.stream == stream) return SUCCESS;
    return give(stream, [=] { finish(moment.stream, moment.number); });
}
API cuEventSynchronize(void* event) {
    LOCKED;
    const Event moment = **(std::shared_ptr<Event>*)event;
    if (moment.stream) finish(moment.stream, moment.number);
    return outcome();
}

API cuMemGetAllocationGranularity(size_t* granule, const void*, int) { *granule = GRANULE; return SUCCESS; }
API cuMemAddressReserve(uint64_t* address, size_t length, size_t alignment, uint64_t, unsigned long long) {
    LOCKED;
    char* at = (char*)mmap(nullptr, length + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return OUT_OF_MEMORY;
    char* aligned = (char*)(((uintptr_t)at + alignment - 1) / alignment * alignment);
    if (aligned != at) munmap(at, aligned - at);
    munmap(aligned + length, at + alignment - aligned);
    reserved[aligned] = length;
    *address = (uint64_t)aligned;
    return SUCCESS;
}
API cuMemAddressFree(uint64_t address, size_t length) {
    LOCKED;
    auto found = reserved.find((char*)address);
    if (found == reserved.end() || found->second != length) return INVALID_VALUE;
    munmap((char*)address, length);
    reserved.erase(found);
    return SUCCESS;
}
API cuMemCreate(unsigned long long* handle, size_t length, const void*, unsigned long long) {
    LOCKED;
    if (used + length > MEMORY) return OUT_OF_MEMORY;
    *handle = length;
    return SUCCESS;
}
API cuMemMap(uint64_t address, size_t length, size_t, unsigned long long handle, unsigned long long) {
    LOCKED;
    if (handle != length || mapped.count((char*)address)) return INVALID_VALUE;
    mapped[(char*)address] = length;
    used += length;
    return SUCCESS;
}
API cuMemRelease(unsigned long long) { return SUCCESS; }
API cuMemSetAccess(uint64_t, size_t, const void*, size_t) { return SUCCESS; }
API cuMemUnmap(uint64_t address, size_t length) {
    LOCKED;
    auto found = mapped.find((char*)address);
    if (found == mapped.end() || found->second != length) return INVALID_VALUE;
    madvise(found->first, length, MADV_DONTNEED);
    mprotect(found->first, length, PROT_NONE);
    mapped.erase(found);
    used -= length;
    return SUCCESS;
}
API cuMemHostAlloc(void** pointer, size_t length, unsigned) {
    *pointer = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    LOCKED;
    reserved[(char*)*pointer] = length;
    return *pointer == MAP_FAILED ? OUT_OF_MEMORY : SUCCESS;
}
API cuMemFreeHost(void* pointer) {
    LOCKED;
    auto found = reserved.find((char*)pointer);
    if (found == reserved.end()) return INVALID_VALUE;
    munmap(pointer, found->second);
    reserved.erase(found);
    return SUCCESS;
}
API cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t length, void* stream) {
    LOCKED;
    auto staged = std::make_shared<std::string>((const char*)from, length);
    return give((Stream*)stream, [=] { memcpy((void*)to, staged->data(), length); });
}
API cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t length, void* stream) {
    LOCKED;
    return give((Stream*)stream, [=] { memcpy(to, (const void*)from, length); });
}
API cuMemcpyAsync(uint64_t to, uint64_t from, size_t length, void* stream) {
    LOCKED;
    return give((Stream*)stream, [=] { memcpy((void*)to, (const void*)from, length); });
}
API cuMemsetD8Async(uint64_t at, unsigned char value, size_t length, void* stream) {
    LOCKED;
    return give((Stream*)stream, [=] { memset((void*)at, value, length); });
}

// An image is what the stand-in of NVRTC made: the path of a library for the CPU.
API cuModuleLoadData(void** module, const void* image) {
    void* library = dlopen((const char*)image, RTLD_NOW | RTLD_LOCAL);
    Launch launch = library ? (Launch)dlsym(library, "cusim_launch") : nullptr;
    if (!launch) {
        fprintf(stderr, "stand-in libcuda: %s\n", dlerror());
        return INVALID_VALUE;
    }
    *module = new Module{launch, (Sizes)dlsym(library, "cusim_sizes")};
    return SUCCESS;
}
API cuModuleUnload(void* module) { delete (Module*)module; return SUCCESS; }
API cuModuleGetFunction(void** function, void* handle, const char* name) {
    const Module* module = (const Module*)handle;
    const size_t* sizes = module->sizes(name);
    if (!sizes) return NOT_FOUND;
    *function = new Function{module->launch, sizes, name};  // as many as there are kernels: they stay
    return SUCCESS;
}
API cuFuncSetAttribute(void*, int, int) { return SUCCESS; }
API cuLaunchKernel(void* handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void* stream, void** arguments, void**) {
    LOCKED;
    const Function* function = (const Function*)handle;
    if (!gx || !gy || !gz || bx * by * bz > 1024) return INVALID_VALUE;
    // As with the driver, the arguments are copied now.
    auto copies = std::make_shared<std::vector<std::string>>();
    for (const size_t* size = function->sizes; *size; size++) copies->emplace_back((const char*)*arguments++, *size);
    return give((Stream*)stream, [=] {
        std::vector<void*> pointers;
        for (auto& copy : *copies) pointers.push_back(copy.data());
        const char* error = function->launch(function->name.c_str(), {gx, gy, gz}, {bx, by, bz}, shared, 0, pointers.data());
        if (error && !failure) {
            fprintf(stderr, "stand-in libcuda: %s: %s\n", function->name.c_str(), error);
            failure = strdup(error);
        }
    });
}
