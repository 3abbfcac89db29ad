// A stand-in for NCCL: ranks are threads of one process.
//
// Nothing is done when it is called. Calls go into their streams, in the stand-in for the driver, and run when somebody
// waits for one and all ranks concerned have come as far. It is strict where NCCL may be: a communicator takes its next
// call only when somebody has heard that the one before has begun. And the GPU of a rank, which is the thread that makes its
// communicators, runs one kernel of all of them at a time, in the order of launches, as far as their streams have come: NCCL
// promises no more.
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace {
enum Status { SUCCESS = 0, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };
enum Type { UINT8 = 1, UINT32 = 3, INT64 = 4, FLOAT16 = 6, FLOAT32 = 7, FLOAT64 = 8, BFLOAT16 = 9 };
enum Operation { SUM = 0, MAX = 2 };
enum class Kind { AllReduce, ReduceScatter, AllGather, Broadcast, Reduce, Message };

struct Id { char bytes[128]; };
struct Config { size_t size; unsigned magic, version; int blocking; };

// One rank's part in a call.
struct Part {
    const char* from;
    char* to;
    size_t count;
    int type, operation, root;
    void* stream;
    std::thread::id gpu;
    uint64_t before;  // pieces of work in the stream before it
    std::shared_ptr<bool> aborted;  // that of its communicator
};
struct Call {
    Kind kind;
    std::map<int, Part> parts;  // by rank; a message's sender and receiver are 0 and 1
    bool done = false;
};
struct World {
    int size;
    std::map<int, bool> come, gone;
    std::map<std::tuple<int, int, uint64_t>, std::shared_ptr<Call>> calls;  // by kind or pair of ranks, and number
};
struct Communicator;
// One rank's part in a call among `pair` that is to come, of which `needed` parts are to come.
struct Given {
    Communicator* communicator;
    Kind kind;
    std::pair<int, int> pair;
    int rank, needed;
    Part part;
};
struct Communicator {
    std::shared_ptr<World> world;
    int rank;
    std::thread::id gpu = std::this_thread::get_id();
    std::map<std::tuple<int, int, int>, uint64_t> numbers;  // calls so far, of messages by side
    bool pending = true;
    std::shared_ptr<bool> aborted = std::make_shared<bool>(false);
};
// What one rank gives to a stream at once.
struct Item {
    std::vector<std::shared_ptr<Call>> calls;
    std::vector<int> needed;  // parts of each
    std::shared_ptr<bool> aborted;
    void* stream;
    std::thread::id gpu;
    uint64_t before;  // as that of a part
};

std::mutex lock;
std::map<std::string, std::shared_ptr<World>> worlds;
uint64_t made = 0;
uint64_t called[7] = {};  // communicators, and calls of each kind
std::map<std::thread::id, std::list<Item*>> launched;  // of each GPU, in order, as far as they have not ended
thread_local int depth = 0;
thread_local std::vector<Given> grouped;

size_t bytes(int type) {
    switch (type) {
        case UINT8: return 1;
        case FLOAT16: case BFLOAT16: return 2;
        case UINT32: case FLOAT32: return 4;
        case INT64: case FLOAT64: return 8;
        default: return 0;
    }
}

template <typename T> T join(T a, T b, int operation) { return operation == SUM ? T(a + b) : a >= b ? a : b; }

float widen(uint16_t bits, int type) {
    if (type == BFLOAT16) {
        const uint32_t wide = uint32_t(bits) << 16;
        float value;
        memcpy(&value, &wide, 4);
        return value;
    }
    _Float16 half;
    memcpy(&half, &bits, 2);
    return float(half);
}
uint16_t narrow(float value, int type) {
    uint16_t bits;
    if (type == BFLOAT16) {
        uint32_t wide;
        memcpy(&wide, &value, 4);
        bits = uint16_t((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
        return value == value ? bits : 0x7fc0;
    }
    const _Float16 half = _Float16(value);
    memcpy(&bits, &half, 2);
    return bits;
}

template <typename T> void accumulate(char* sum, const char* x, size_t count, int operation) {
    for (size_t i = 0; i < count; i++) ((T*)sum)[i] = join(((T*)sum)[i], ((const T*)x)[i], operation);
}
// Every addition of 16-bit numbers is rounded, as in a ring.
void accumulate(char* sum, const char* x, size_t count, int type, int operation) {
    switch (type) {
        case UINT8: return accumulate<uint8_t>(sum, x, count, operation);
        case UINT32: return accumulate<uint32_t>(sum, x, count, operation);
        case INT64: return accumulate<int64_t>(sum, x, count, operation);
        case FLOAT32: return accumulate<float>(sum, x, count, operation);
        case FLOAT64: return accumulate<double>(sum, x, count, operation);
    }
    for (size_t i = 0; i < count; i++) {
        uint16_t& at = ((uint16_t*)sum)[i];
        at = narrow(join(widen(at, type), widen(((const uint16_t*)x)[i], type), operation), type);
    }
}

// The reduction of `length` elements of all ranks from `offset` on.
std::string reduced(const Call& call, size_t offset, size_t length) {
    const Part& first = call.parts.begin()->second;
    const size_t size = bytes(first.type);
    std::string sum(first.from + offset * size, length * size);
    for (auto part = std::next(call.parts.begin()); part != call.parts.end(); part++)
        accumulate(sum.data(), part->second.from + offset * size, length, first.type, first.operation);
    return sum;
}

void carry_out(Call& call) {
    const Part& any = call.parts.begin()->second;
    const size_t length = any.count * bytes(any.type);
    std::map<int, std::string> results;
    switch (call.kind) {
        case Kind::AllReduce: for (auto& [rank, part] : call.parts) results[rank] = reduced(call, 0, any.count); break;
        case Kind::ReduceScatter: for (auto& [rank, part] : call.parts) results[rank] = reduced(call, rank * any.count, any.count); break;
        case Kind::Broadcast: for (auto& [rank, part] : call.parts) results[rank] = std::string(call.parts[any.root].from, length); break;
        case Kind::Reduce: results[any.root] = reduced(call, 0, any.count); break;
        case Kind::Message: results[1] = std::string(call.parts[0].from, length); break;
        case Kind::AllGather:
            for (auto& [rank, part] : call.parts)
                for (auto& [other, from] : call.parts) results[rank].append(from.from, length);
            break;
    }
    for (auto& [rank, result] : results) memcpy(call.parts[rank].to, result.data(), result.size());
}

template <typename F> F driver(const char* name) { return (F)dlsym(RTLD_DEFAULT, name); }

bool finish(void* stream, uint64_t number) {
    static const auto finish = driver<bool (*)(void*, uint64_t)>("stand_in_finish");
    return finish(stream, number);
}

// Whether the GPU of a part runs it: it has run the kernels that were launched before, where their streams have come to them.
bool has_turn(const Part& part) {
    std::vector<std::pair<void*, uint64_t>> earlier;
    {
        std::lock_guard<std::mutex> guard(lock);
        for (Item* item : launched[part.gpu]) {
            if (item->stream == part.stream && item->before == part.before) break;
            earlier.push_back({item->stream, item->before});
        }
    }
    for (auto& [stream, before] : earlier)
        if (finish(stream, before) && !finish(stream, before + 1)) return false;
    return true;
}

bool ready(void* data) {
    const Item& item = *(const Item*)data;
    if (*item.aborted) return true;
    for (size_t i = 0; i < item.calls.size(); i++) {
        Call& call = *item.calls[i];
        std::vector<Part> parts;
        {
            std::lock_guard<std::mutex> guard(lock);
            if (call.done) continue;
            if ((int)call.parts.size() < item.needed[i]) return false;
            for (auto& [rank, part] : call.parts) parts.push_back(part);
        }
        // The others wait for an aborted part until they are aborted themselves: its memory may be gone.
        for (const Part& part : parts)
            if (*part.aborted || part.before == UINT64_MAX || !finish(part.stream, part.before) || !has_turn(part)) return false;
    }
    return true;
}

void run(void* data) {
    Item* item = (Item*)data;
    for (auto& call : item->calls) {
        if (*item->aborted) break;
        if (!call->done) carry_out(*call);
        call->done = true;
    }
    {
        std::lock_guard<std::mutex> guard(lock);
        launched[item->gpu].remove(item);
    }
    delete item;
}

// Gives parts, all of one communicator, to a stream as one item. Replays come here too: each is a call of its own.
int launch(const std::vector<Given>& parts, void* stream) {
    static const auto give = driver<uint64_t (*)(void*, bool (*)(void*), void (*)(void*), void*)>("stand_in_give_when");
    Communicator* communicator = parts[0].communicator;
    Item* item = new Item{{}, {}, communicator->aborted, stream, communicator->gpu, UINT64_MAX};
    std::vector<std::pair<std::shared_ptr<Call>, int>> own;
    {
        std::lock_guard<std::mutex> guard(lock);
        for (Given given : parts) {
            const auto [from, to] = given.pair;
            const uint64_t number = communicator->numbers[{from, to, given.kind == Kind::Message ? given.rank : 0}]++;
            auto& call = communicator->world->calls[{from, to, number}];
            if (!call) call = std::make_shared<Call>(Call{given.kind});
            if (call->kind != given.kind) return delete item, INVALID_USAGE;
            given.part.before = UINT64_MAX;
            given.part.gpu = communicator->gpu;
            given.part.stream = stream;
            given.part.aborted = communicator->aborted;
            call->parts[given.rank] = given.part;
            called[1 + (int)given.kind]++;
            item->calls.push_back(call);
            item->needed.push_back(given.needed);
            own.push_back({call, given.rank});
        }
    }
    const uint64_t before = give(stream, ready, run, item);
    std::lock_guard<std::mutex> guard(lock);
    item->before = before;
    launched[item->gpu].push_back(item);
    for (auto& [call, rank] : own) call->parts[rank].before = before;
    return SUCCESS;
}

// The parts of a recorded item, for each replay. They stay: a test makes few recordings.
void replay(void* data, void* stream) { launch(*(const std::vector<Given>*)data, stream); }

int submit() {
    static const auto record = driver<bool (*)(void*, void (*)(void*, void*), void*)>("stand_in_record");
    std::map<std::pair<Communicator*, void*>, std::vector<Given>> items;
    for (Given& given : grouped) items[{given.communicator, given.part.stream}].push_back(given);
    grouped.clear();
    int status = items.empty() ? SUCCESS : IN_PROGRESS;
    for (auto& [key, parts] : items) {
        key.first->pending = true;
        auto* kept = new std::vector<Given>(parts);
        if (record(key.second, replay, kept)) continue;
        delete kept;
        if (int failed = launch(parts, key.second)) status = failed;
    }
    return status;
}

int take(const Given& given) {
    if (!bytes(given.part.type)) return INVALID_ARGUMENT;
    if (given.communicator->pending) return INVALID_USAGE;
    grouped.push_back(given);
    return depth ? SUCCESS : submit();
}

int collective(Communicator* communicator, Kind kind, const void* from, void* to, size_t count, int type, int operation, int root, void* stream) {
    if (!communicator) return INVALID_ARGUMENT;
    return take({communicator, kind, {-1, -1}, communicator->rank, communicator->world->size,
                 {(const char*)from, (char*)to, count, type, operation, root, stream, {}, 0}});
}
}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// How many communicators were made, and calls of each kind, by all ranks of the process; messages by both sides.
API void stand_in_nccl_calls(uint64_t* out) {
    std::lock_guard<std::mutex> guard(lock);
    memcpy(out, called, sizeof called);
}

API int ncclGetVersion(int* version) { *version = 23000; return SUCCESS; }
API const char* ncclGetErrorString(int status) {
    return status == INVALID_USAGE ? "invalid usage" : status == INVALID_ARGUMENT ? "invalid argument" : "error";
}
API const char* ncclGetLastError(Communicator*) { return ""; }
API int ncclGetUniqueId(Id* id) {
    std::lock_guard<std::mutex> guard(lock);
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "stand-in %d %llu", (int)getpid(), (unsigned long long)made++);
    return SUCCESS;
}
API int ncclCommInitRankConfig(Communicator** communicator, int size, Id id, int rank, Config* config) {
    if (config->magic != 0xcafebeef || config->blocking != 0 || rank < 0 || rank >= size) return INVALID_ARGUMENT;
    if (atoi(id.bytes + strlen("stand-in ")) != getpid()) return INVALID_USAGE;  // ranks are threads of one process
    std::lock_guard<std::mutex> guard(lock);
    auto& world = worlds[std::string(id.bytes, sizeof id.bytes)];
    if (!world) world = std::make_shared<World>(World{size});
    if (world->size != size || world->come[rank]) return INVALID_ARGUMENT;
    world->come[rank] = true;
    called[0]++;
    *communicator = new Communicator{world, rank};
    return IN_PROGRESS;
}
API int ncclCommGetAsyncError(Communicator* communicator, int* state) {
    std::lock_guard<std::mutex> guard(lock);
    const bool together = (int)communicator->world->come.size() == communicator->world->size;
    *state = communicator->pending ? IN_PROGRESS : SUCCESS;
    if (together) communicator->pending = false;  // who asks again hears so
    return SUCCESS;
}
API int ncclCommFinalize(Communicator* communicator) { communicator->pending = true; return IN_PROGRESS; }
API int ncclCommDestroy(Communicator* communicator) {
    std::lock_guard<std::mutex> guard(lock);
    communicator->world->gone[communicator->rank] = true;
    delete communicator;
    return SUCCESS;
}
// Calls end at once; that a rank is freed takes all others (NVIDIA/nccl issue 863).
API int ncclCommAbort(Communicator* communicator) {
    const std::shared_ptr<World> world = communicator->world;
    *communicator->aborted = true;
    ncclCommDestroy(communicator);
    for (;;) {
        {
            std::lock_guard<std::mutex> guard(lock);
            if (world->gone.size() == world->come.size()) return SUCCESS;
        }
        usleep(1000);
    }
}
API int ncclGroupStart() { depth++; return SUCCESS; }
API int ncclGroupEnd() { return --depth ? SUCCESS : submit(); }

API int ncclAllReduce(const void* from, void* to, size_t count, int type, int operation, Communicator* communicator, void* stream) {
    return collective(communicator, Kind::AllReduce, from, to, count, type, operation, 0, stream);
}
API int ncclReduceScatter(const void* from, void* to, size_t count, int type, int operation, Communicator* communicator, void* stream) {
    return collective(communicator, Kind::ReduceScatter, from, to, count, type, operation, 0, stream);
}
API int ncclAllGather(const void* from, void* to, size_t count, int type, Communicator* communicator, void* stream) {
    return collective(communicator, Kind::AllGather, from, to, count, type, SUM, 0, stream);
}
API int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Communicator* communicator, void* stream) {
    return collective(communicator, Kind::Broadcast, from, to, count, type, SUM, root, stream);
}
API int ncclReduce(const void* from, void* to, size_t count, int type, int operation, int root, Communicator* communicator, void* stream) {
    return collective(communicator, Kind::Reduce, from, to, count, type, operation, root, stream);
}
API int ncclSend(const void* from, size_t count, int type, int to, Communicator* communicator, void* stream) {
    if (!communicator) return INVALID_ARGUMENT;
    return take({communicator, Kind::Message, {communicator->rank, to}, 0, 2, {(const char*)from, nullptr, count, type, SUM, 0, stream, {}, 0}});
}
API int ncclRecv(void* to, size_t count, int type, int from, Communicator* communicator, void* stream) {
    if (!communicator) return INVALID_ARGUMENT;
    return take({communicator, Kind::Message, {from, communicator->rank}, 1, 2, {nullptr, (char*)to, count, type, SUM, 0, stream, {}, 0}});
}
