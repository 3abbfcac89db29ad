// Streams of the stand-in for NVIDIA's driver: what is given waits until somebody waits for it, and may be recorded.
#pragma once
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {
constexpr int CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901;
enum CaptureMode { GLOBAL, THREAD_LOCAL, RELAXED };

struct Stream;
struct Work {
    std::function<void()> run;
    std::function<bool()> ready = {};  // whether it may run yet, if that is not certain
};
// What was given to streams while they were recorded: a lane for each stream, in which pieces are work, give work to the
// stream of a replay, or wait for another lane. As in streams, the work of a lane is done when somebody waits for it.
struct Graph {
    struct Piece {
        std::function<void()> work;
        size_t lane, number;
        std::function<void(Stream*)> give = {};
        bool waits() const { return !work && !give; }
    };
    std::vector<std::vector<Piece>> lanes;
    std::vector<Stream*> streams;  // empty once the recording has ended
    CaptureMode mode = GLOBAL;
    std::thread::id thread = std::this_thread::get_id();  // that began the recording
    bool invalid = false;          // something was done that a recording does not allow: nothing comes of it

    // Hands over the lane's first pieces of work, in the order in which they are done; `done` counts those of each lane.
    void visit(std::vector<size_t>& done, size_t lane, size_t number, const std::function<void(const Piece&)>& f) const {
        while (done[lane] < number) {
            const Piece& piece = lanes[lane][done[lane]++];
            if (piece.waits()) visit(done, piece.lane, piece.number, f);
            else f(piece);
        }
    }
};
struct Event {
    Stream* stream = nullptr;
    uint64_t number = 0;
    std::shared_ptr<Graph> graph = nullptr;  // of a moment of a recording
    size_t lane = 0;
    bool asked = false;  // whether it has passed
    std::shared_ptr<double> time = nullptr;  // milliseconds, once it has, of one that is timed
};
struct Stream {
    std::deque<Work> work;
    uint64_t given = 0, done = 0;
    std::shared_ptr<Graph> graph = nullptr;  // what is given is recorded here
    size_t lane = 0;
    bool busy = false;  // its next piece is being asked whether it may run
    bool hasty = false; // what is given is done at once, as far as it waits for nobody
};
std::recursive_mutex lock;
int running = 0;                       // nested work
std::map<char*, size_t> mapped;        // granules with memory
std::vector<std::shared_ptr<Graph>> captures;  // recordings that have not ended

// Opens or closes the memory of the GPU to everybody.
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

// The next piece of a stream's work; false if it may not run yet.
bool advance(Stream* stream) {
    auto& [run, ready] = stream->work.front();
    if (ready) {
        stream->busy = true;
        const bool may = ready();
        stream->busy = false;
        if (!may) return false;
    }
    auto work = std::move(run);
    stream->work.pop_front();
    work();
    stream->done++;
    return true;
}

// Does a stream's work until so many pieces are done; false if one may not run yet. The memory is opened once for all of
// them: that takes longer than most of them.
bool finish(Stream* stream, uint64_t number) {
    if (stream->done >= number || stream->work.empty()) return true;
    if (stream->busy) return false;
    if (running++ == 0) protect(PROT_READ | PROT_WRITE);
    bool may = true;
    while (may && stream->done < number && !stream->work.empty()) may = advance(stream);
    if (--running == 0) protect(PROT_NONE);
    return may;
}

// The same for whoever waits for it.
void wait_for(Stream* stream, uint64_t number) {
    for (;;) {
        {
            std::lock_guard<std::recursive_mutex> guard(lock);
            if (finish(stream, number)) return;
        }
        usleep(50);  // another rank's thread is to give its part
    }
}

// What a recording does not allow makes it invalid (CUDA programming guide, "Prohibited and Unhandled Operations", "Invalidation").
int refuse(const std::shared_ptr<Graph>& graph, int status) {
    if (graph->invalid) return CAPTURE_INVALIDATED;
    graph->invalid = true;
    return status;
}

// The status of a "potentially unsafe" call, which does not belong to a stream: not while this thread records, unless it said
// that it knows what it does (driver API, "cuThreadExchangeStreamCaptureMode").
int unsafe_call() {
    for (auto& graph : captures)
        if (graph->mode == GLOBAL || (graph->mode == THREAD_LOCAL && graph->thread == std::this_thread::get_id()))
            return refuse(graph, CAPTURE_UNSUPPORTED);
    return 0;
}

int give(Stream* stream, std::function<void()> work) {
    if (stream->graph && stream->graph->invalid) return CAPTURE_INVALIDATED;
    if (stream->graph) {
        stream->graph->lanes[stream->lane].push_back({std::move(work), 0, 0});
    } else {
        stream->work.push_back({std::move(work)});
        stream->given++;
        if (stream->hasty) finish(stream, UINT64_MAX);
    }
    return 0;
}

// From now on the stream's work is recorded.
void join(Stream* stream, const std::shared_ptr<Graph>& graph) {
    stream->graph = graph;
    stream->lane = graph->lanes.size();
    graph->lanes.emplace_back();
    graph->streams.push_back(stream);
}
}  // namespace
