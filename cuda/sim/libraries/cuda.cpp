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

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "streams.h"

namespace {
enum Status {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, NOT_FOUND = 500, NOT_READY = 600, LAUNCH_FAILED = 719,
    CAPTURE_MERGE = 902, CAPTURE_UNMATCHED = 903, CAPTURE_UNJOINED = 904, CAPTURE_ISOLATION = 905, CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908
};
constexpr size_t GRANULE = 2 << 20, MEMORY = 4ull << 30;
constexpr int GARBAGE = 0x7b;  // 1.3e36 in f32 and bf16, 61e3 in f16
constexpr int DEVICES = 8;
constexpr int MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;  // of CUfunction_attribute

struct Dim3 { unsigned x, y, z; };
using Launch = const char* (*)(const char*, Dim3, Dim3, size_t, int, void**);
using Sizes = const size_t* (*)(const char*);

struct Module { Launch launch; Sizes sizes; };
struct Function { Launch launch; const size_t* sizes; std::string name; int shared = 0; };

size_t used = 0;                       // bytes that are mapped
const char* failure = nullptr;         // of any kernel: it stays
std::map<char*, size_t> reserved, pinned;
thread_local void* current = nullptr;  // the context
thread_local uint64_t waits = 0, reads = 0;  // of this thread: for the GPU, and copies from there

int outcome() { return failure ? LAUNCH_FAILED : SUCCESS; }

bool is_within(const std::map<char*, size_t>& ranges, const void* at) {
    auto after = ranges.upper_bound((char*)at);
    return after != ranges.begin() && (after--, (char*)at < after->first + after->second);
}

// Whether some of it was given back.
bool is_gone(uint64_t at, size_t length) {
    for (uint64_t byte : {at, at + length - 1})
        if (!is_within(pinned, (void*)byte) && !is_within(reserved, (void*)byte)) return true;
    return false;
}
}  // namespace

#define API extern "C" __attribute__((visibility("default"))) int
#define LOCKED std::lock_guard<std::recursive_mutex> guard(lock)

// Gives other stand-ins' work to a stream: a matrix product, a collective.
extern "C" __attribute__((visibility("default"))) void stand_in_give(void* stream, void (*call)(void*), void* data) {
    LOCKED;
    give((Stream*)stream, [=] { call(data); });
}

// The same for work that may run when `ready` says so: it is asked whenever somebody waits for the stream. Returns how many
// pieces come before it.
extern "C" __attribute__((visibility("default"))) uint64_t stand_in_give_when(void* handle, bool (*ready)(void*), void (*call)(void*), void* data) {
    LOCKED;
    Stream* stream = (Stream*)handle;
    stream->work.push_back({[=] { call(data); }, [=] { return ready(data); }});
    return stream->given++;
}

// Records, if the stream is recorded, that `call` gives work to the stream of each replay; false if it is not.
extern "C" __attribute__((visibility("default"))) bool stand_in_record(void* handle, void (*call)(void*, void*), void* data) {
    LOCKED;
    Stream* stream = (Stream*)handle;
    if (!stream->graph) return false;
    if (!stream->graph->invalid)
        stream->graph->lanes[stream->lane].push_back({nullptr, 0, 0, [=](Stream* replay) { call(data, replay); }});
    return true;
}

// Does a stream's first pieces of work; false if one may not run yet.
extern "C" __attribute__((visibility("default"))) bool stand_in_finish(void* stream, uint64_t number) {
    LOCKED;
    return finish((Stream*)stream, number);
}

// How often this thread has waited for a stream, and how often it has read memory of the GPU.
extern "C" __attribute__((visibility("default"))) void stand_in_waits(uint64_t* out) { out[0] = waits; out[1] = reads; }
// From now on a stream does what it is given at once, as far as it waits for nobody: a wait that it lacks shows as work that
// was done too early.
extern "C" __attribute__((visibility("default"))) void stand_in_hasten(void* stream) {
    LOCKED;
    ((Stream*)stream)->hasty = true;
}

API cuInit(unsigned) { return SUCCESS; }
API cuDriverGetVersion(int* version) { *version = 13000; return SUCCESS; }
API cuDeviceGetCount(int* count) { *count = DEVICES; return SUCCESS; }
API cuDeviceGet(int* device, int ordinal) { *device = ordinal; return ordinal >= 0 && ordinal < DEVICES ? SUCCESS : INVALID_DEVICE; }
API cuDeviceGetName(char* name, int length, int device) { snprintf(name, length, "stand-in %d", device); return SUCCESS; }
API cuDeviceTotalMem_v2(size_t* bytes, int) { *bytes = MEMORY; return SUCCESS; }
// The last device is one that is too old.
API cuDeviceGetAttribute(int* value, int attribute, int device) {
    switch (attribute) {
        case 16: *value = 4; break;  // multiprocessors
        case 75: *value = device < DEVICES - 1 ? 9 : 7; break;  // compute capability, major
        case 76: *value = device < DEVICES - 1 ? 0 : 5; break;
        default: return INVALID_VALUE;
    }
    return SUCCESS;
}
API cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(uintptr_t)(device + 1); return SUCCESS; }
API cuCtxSetCurrent(void* context) { current = context; return SUCCESS; }
API cuGetErrorName(int status, const char** text) {
    switch (status) {
        case OUT_OF_MEMORY: *text = "CUDA_ERROR_OUT_OF_MEMORY"; break;
        case LAUNCH_FAILED: *text = "CUDA_ERROR_LAUNCH_FAILED"; break;
        case CAPTURE_UNSUPPORTED: *text = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"; break;
        case CAPTURE_INVALIDATED: *text = "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"; break;
        case CAPTURED_EVENT: *text = "CUDA_ERROR_CAPTURED_EVENT"; break;
        case CAPTURE_WRONG_THREAD: *text = "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"; break;
        case CAPTURE_UNJOINED: *text = "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"; break;
        case CAPTURE_ISOLATION: *text = "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"; break;
        default: *text = "CUDA_ERROR";
    }
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
    if (((Stream*)stream)->graph) std::erase(((Stream*)stream)->graph->streams, (Stream*)stream);
    // Its memory stays: events and other streams may still wait for it, and it may have work that is not ready yet.
    return SUCCESS;
}
API cuStreamSynchronize(void* handle) {
    Stream* stream = (Stream*)handle;
    {
        LOCKED;
        if (stream->graph) return refuse(stream->graph, CAPTURE_UNSUPPORTED);
        if (int status = unsafe_call()) return status;
    }
    waits++;
    wait_for(stream, UINT64_MAX);
    return outcome();
}
API cuEventCreate(void** event, unsigned flags) {
    Event* made = new Event;
    if (!(flags & 2)) made->time = std::make_shared<double>(-1);
    *event = new std::shared_ptr<Event>(made);
    return SUCCESS;
}
API cuEventDestroy_v2(void* event) { LOCKED; delete (std::shared_ptr<Event>*)event; return SUCCESS; }
API cuEventRecord(void* event, void* handle) {
    LOCKED;
    Stream* stream = (Stream*)handle;
    if (stream->graph && stream->graph->invalid) return CAPTURE_INVALIDATED;
    const std::shared_ptr<double> time = (*(std::shared_ptr<Event>*)event)->time;
    if (time)
        give(stream, [time] {
            *time = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
        });
    const uint64_t number = stream->graph ? stream->graph->lanes[stream->lane].size() : stream->given;
    **(std::shared_ptr<Event>*)event = Event{stream, number, stream->graph, stream->lane, false, time};
    return SUCCESS;
}
API cuEventElapsedTime(float* milliseconds, void* start, void* end) {
    LOCKED;
    const auto from = (*(std::shared_ptr<Event>*)start)->time, to = (*(std::shared_ptr<Event>*)end)->time;
    if (!from || !to) return INVALID_VALUE;
    if (*from < 0 || *to < 0) return NOT_READY;
    *milliseconds = *to - *from;
    return outcome();
}
API cuStreamWaitEvent(void* handle, void* event, unsigned) {
    LOCKED;
    const Event moment = **(std::shared_ptr<Event>*)event;
    Stream* stream = (Stream*)handle;
    if (!moment.stream) return SUCCESS;
    if (stream->graph && stream->graph->invalid) return CAPTURE_INVALIDATED;
    if (moment.graph) {
        if (moment.graph->streams.empty()) return CAPTURED_EVENT;
        if (moment.graph->invalid) return CAPTURE_INVALIDATED;
        if (!stream->graph) join(stream, moment.graph);
        if (stream->graph != moment.graph) return refuse(moment.graph, CAPTURE_MERGE), refuse(stream->graph, CAPTURE_MERGE);
        moment.graph->lanes[stream->lane].push_back({nullptr, moment.lane, moment.number});
        return SUCCESS;
    }
    if (stream->graph) return refuse(stream->graph, CAPTURE_ISOLATION);
    if (moment.stream == stream) return SUCCESS;
    stream->work.push_back({[] {}, [=] { return finish(moment.stream, moment.number); }});
    stream->given++;
    return SUCCESS;
}
API cuEventSynchronize(void* event) {
    Event moment;
    {
        LOCKED;
        moment = **(std::shared_ptr<Event>*)event;
        if (moment.graph) return refuse(moment.graph, CAPTURED_EVENT);
        if (int status = unsafe_call()) return status;
    }
    waits++;
    if (moment.stream) wait_for(moment.stream, moment.number);
    return outcome();
}
API cuEventQuery(void* event) {
    LOCKED;
    Event& moment = **(std::shared_ptr<Event>*)event;
    if (moment.graph) return refuse(moment.graph, CAPTURED_EVENT);
    if (int status = unsafe_call()) return status;
    // Who asks once is too early.
    if (moment.stream && moment.stream->done < moment.number && !moment.asked) return moment.asked = true, NOT_READY;
    return moment.stream && !finish(moment.stream, moment.number) ? NOT_READY : outcome();
}

API cuStreamBeginCapture_v2(void* stream, int mode) {
    LOCKED;
    if (((Stream*)stream)->graph) return INVALID_VALUE;
    captures.push_back(std::make_shared<Graph>());
    captures.back()->mode = (CaptureMode)mode;
    join((Stream*)stream, captures.back());
    return SUCCESS;
}
API cuStreamIsCapturing(void* handle, int* status) {
    LOCKED;
    const Stream* stream = (const Stream*)handle;
    *status = !stream->graph ? 0 : stream->graph->invalid ? 2 : 1;
    return SUCCESS;
}
API cuStreamEndCapture(void* handle, void** out) {
    LOCKED;
    Stream* stream = (Stream*)handle;
    const std::shared_ptr<Graph> graph = stream->graph;
    *out = nullptr;
    if (!graph || stream->lane != 0) return CAPTURE_UNMATCHED;
    if (graph->mode != RELAXED && graph->thread != std::this_thread::get_id()) return CAPTURE_WRONG_THREAD;
    for (Stream* joined : graph->streams) joined->graph = nullptr;
    graph->streams.clear();
    std::erase(captures, graph);
    if (graph->invalid) return CAPTURE_INVALIDATED;
    // Whatever the first stream does not wait for would have no end.
    std::vector<size_t> done(graph->lanes.size());
    graph->visit(done, 0, graph->lanes[0].size(), [](const Graph::Piece&) {});
    for (size_t lane = 0; lane < done.size(); lane++)
        for (size_t i = done[lane]; i < graph->lanes[lane].size(); i++)
            if (!graph->lanes[lane][i].waits()) return CAPTURE_UNJOINED;
    *out = new std::shared_ptr<Graph>(graph);
    return SUCCESS;
}
API cuGraphDestroy(void* graph) { LOCKED; delete (std::shared_ptr<Graph>*)graph; return SUCCESS; }
API cuGraphInstantiateWithFlags(void** out, void* graph, unsigned long long) {
    *out = new std::shared_ptr<Graph>(*(std::shared_ptr<Graph>*)graph);
    return SUCCESS;
}
API cuGraphExecDestroy(void* graph) { return cuGraphDestroy(graph); }
API cuGraphLaunch(void* handle, void* stream) {
    LOCKED;
    if (((Stream*)stream)->graph) return refuse(((Stream*)stream)->graph, CAPTURE_UNSUPPORTED);
    const std::shared_ptr<Graph> graph = *(std::shared_ptr<Graph>*)handle;
    std::vector<size_t> done(graph->lanes.size());
    // A collective waits for other ranks, so each piece is one of the stream's.
    graph->visit(done, 0, graph->lanes[0].size(), [&](const Graph::Piece& piece) {
        if (piece.give) piece.give((Stream*)stream);
        else give((Stream*)stream, [graph, &piece] { piece.work(); });
    });
    return SUCCESS;
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
    // What memory holds at first is unknown. The beginning of a granule is where tests' tensors lie.
    mprotect((void*)address, length, PROT_READ | PROT_WRITE);
    memset((void*)address, GARBAGE, length < 65536 ? length : 65536);
    mprotect((void*)address, length, PROT_NONE);
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
API cuMemHostRegister_v2(void* at, size_t length, unsigned) {
    LOCKED;
    if (int status = unsafe_call()) return status;
    pinned[(char*)at] = length;
    return SUCCESS;
}
API cuMemHostUnregister(void* at) {
    LOCKED;
    if (int status = unsafe_call()) return status;
    return pinned.erase((char*)at) ? SUCCESS : INVALID_VALUE;
}
// Copies of nothing are refused, as a driver may. Pinned memory of the host is read and written when the copy's turn comes.
// Other memory must be staged, which cannot be part of a recording. Of more than a little of it the driver takes no copy
// before the stream has come so far.
API cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t length, void* handle) {
    LOCKED;
    if (!length) return INVALID_VALUE;
    Stream* stream = (Stream*)handle;
    if (is_within(pinned, from)) return give(stream, [=] { memcpy((void*)to, from, length); });
    if (stream->graph) return refuse(stream->graph, CAPTURE_UNSUPPORTED);
    waits += length > (64 << 10);
    auto staged = std::make_shared<std::string>((const char*)from, length);
    return give(stream, [=] { memcpy((void*)to, staged->data(), length); });
}
API cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t length, void* handle) {
    LOCKED;
    if (!length) return INVALID_VALUE;
    Stream* stream = (Stream*)handle;
    if (stream->graph && !is_within(pinned, to)) return refuse(stream->graph, CAPTURE_UNSUPPORTED);
    reads++;
    return give(stream, [=] { memcpy(to, (const void*)from, length); });
}
API cuMemcpyAsync(uint64_t to, uint64_t from, size_t length, void* handle) {
    LOCKED;
    if (!length) return INVALID_VALUE;
    Stream* stream = (Stream*)handle;
    for (uint64_t at : {to, from})
        if (stream->graph && !is_within(pinned, (void*)at) && !is_within(reserved, (void*)at))
            return refuse(stream->graph, CAPTURE_UNSUPPORTED);
    return give(stream, [=] {
        const bool gone = is_gone(to, length) || is_gone(from, length);
        if (!gone) memcpy((void*)to, (const void*)from, length);
        else if (!failure) failure = "a copy's memory is gone when its turn comes";
    });
}
API cuMemsetD8Async(uint64_t at, unsigned char value, size_t length, void* stream) {
    LOCKED;
    if (!length) return INVALID_VALUE;
    return give((Stream*)stream, [=] { memset((void*)at, value, length); });
}

// An image is what the stand-in of NVRTC made: the path of a library for the CPU.
API cuModuleLoadData(void** module, const void* image) {
    {
        LOCKED;
        if (int status = unsafe_call()) return status;
    }
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
API cuFuncSetAttribute(void* function, int attribute, int value) {
    if (attribute == MAX_DYNAMIC_SHARED_SIZE_BYTES) ((Function*)function)->shared = value;
    return SUCCESS;
}
// Kernels whose names begin with FERROTRON_STAND_IN_FAILS fail. As with the driver, the error is returned to whoever waits next, or
// by the launch with CUDA_LAUNCH_BLOCKING=1.
API cuLaunchKernel(void* handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void* handle_of_stream, void** arguments, void**) {
    static const char *const fails = getenv("FERROTRON_STAND_IN_FAILS"), *const blocking = getenv("CUDA_LAUNCH_BLOCKING");
    Stream* stream = (Stream*)handle_of_stream;
    uint64_t number;
    {
        LOCKED;
        const Function* function = (const Function*)handle;
        if (!gx || !gy || !gz || bx * by * bz > 1024) return INVALID_VALUE;
        // 48 KiB need no opt-in, of which a kernel may take some itself.
        if (shared > 40 << 10 && (int)shared > function->shared) return INVALID_VALUE;
        // As with the driver, the arguments are copied now.
        auto copies = std::make_shared<std::vector<std::string>>();
        for (const size_t* size = function->sizes; *size; size++) copies->emplace_back((const char*)*arguments++, *size);
        const int status = give(stream, [=] {
            std::vector<void*> pointers;
            for (auto& copy : *copies) pointers.push_back(copy.data());
            const char *name = function->name.c_str(), *error = "an access that a test has planted";
            if (!fails || function->name.rfind(fails, 0) != 0)
                error = function->launch(name, {gx, gy, gz}, {bx, by, bz}, shared, 0, pointers.data());
            if (error && !failure) {
                fprintf(stderr, "stand-in libcuda: %s: %s\n", name, error);
                failure = strdup(error);
            }
        });
        if (status || stream->graph || !blocking || strcmp(blocking, "1")) return status;
        number = stream->given;
    }
    wait_for(stream, number);
    return outcome();
}
