// Counts what a kernel's accesses to memory cost, in the units of Nsight Compute: sectors of 32 bytes of global memory, and
// wavefronts of shared memory, in each of which a bank serves one of its words of 4 bytes.
//
// A request is what the lanes of a warp access at one place of the code, and as often since the warp last met. Lanes that
// take 8 or 16 bytes of shared memory are served by halves or quarters of a warp; so are the rows of `ldmatrix`.
#pragma once

namespace cusim {
struct LaneAccess {
    uintptr_t code, at;  // twice the address of the code, and 1 for a store
    uint32_t turn;       // number of the access, from 0
    uint32_t bytes, lane;
};
// What was counted, and the least for as many different bytes.
struct Cost { uint64_t counted, least; };
struct Costs { Cost load_sectors, store_sectors, wavefronts; };
struct Requests {
    LaneAccess* log;  // since the warp last met, lane by lane
    size_t length, room;
    Costs costs;  // of the grid
};

// Notes an access of at most 16 bytes.
inline UNCHECKED void note_access(Requests& requests, const void* address, size_t bytes, bool store, void* code) {
    if (requests.length == requests.room) {
        requests.room = requests.room ? 2 * requests.room : 1024;
        requests.log = (LaneAccess*)realloc(requests.log, requests.room * sizeof(LaneAccess));
    }
    const uint32_t number = requests.length++, lane = machine->current->lane;
    const LaneAccess one = {2 * (uintptr_t)code + store, (uintptr_t)address, number, (uint32_t)bytes, lane};
    memcpy(requests.log + number, &one, sizeof one);
}

// Counts one request, whose accesses are sorted by address.
inline UNCHECKED void count_sectors(Cost& cost, const LaneAccess* first, const LaneAccess* end) {
    uintptr_t next_sector = 0, next_byte = 0, bytes = 0;
    for (const LaneAccess* one = first; one < end; one++) {
        const uintptr_t behind = one->at + one->bytes, sector = one->at / 32, last = (behind - 1) / 32;
        if (last >= next_sector) cost.counted += last + 1 - (sector > next_sector ? sector : next_sector), next_sector = last + 1;
        if (behind > next_byte) bytes += behind - (one->at > next_byte ? one->at : next_byte), next_byte = behind;
    }
    cost.least += (bytes + 31) / 32;
}
inline UNCHECKED void count_wavefronts(Cost& cost, const LaneAccess* first, const LaneAccess* end) {
    const uint32_t lanes = first->bytes <= 4 ? WARP : WARP * 4 / first->bytes;
    for (uint32_t group = 0; group < WARP / lanes; group++) {
        uintptr_t next_word = 0;
        unsigned of_bank[32] = {}, words = 0, most = 0;
        for (const LaneAccess* one = first; one < end; one++) {
            if (one->lane / lanes != group) continue;
            const uintptr_t word = one->at / 4, last = (one->at + one->bytes - 1) / 4;
            for (uintptr_t at = word > next_word ? word : next_word; at <= last; at++, words++)
                if (++of_bank[at % 32] > most) most = of_bank[at % 32];
            if (last >= next_word) next_word = last + 1;
        }
        cost.counted += most;
        cost.least += (words + 31) / 32;
    }
}

inline UNCHECKED int by_code_turn_and_address(const void* left, const void* right) {
    const LaneAccess &a = *(const LaneAccess*)left, &b = *(const LaneAccess*)right;
    if (a.code != b.code) return a.code < b.code ? -1 : 1;
    if (a.turn != b.turn) return a.turn < b.turn ? -1 : 1;
    return a.at < b.at ? -1 : a.at > b.at;
}
// Counts the requests since the warp last met.
inline UNCHECKED void count_requests(Requests& requests) {
    LaneAccess *log = requests.log, *end = log + requests.length;
    requests.length = 0;
    qsort(log, end - log, sizeof *log, by_code_turn_and_address);
    // From the number among all to the number of the lane at this place.
    for (LaneAccess* one = log; one < end; one++)
        one->turn = one > log && one->code == one[-1].code && one->lane == one[-1].lane ? one[-1].turn + 1 : 0;
    qsort(log, end - log, sizeof *log, by_code_turn_and_address);
    for (LaneAccess *first = log, *next; first < end; first = next) {
        next = first + 1;
        while (next < end && next->code == first->code && next->turn == first->turn) next++;
        if (shared_array(first->at)) count_wavefronts(requests.costs.wavefronts, first, next);
        else count_sectors(first->code % 2 ? requests.costs.store_sectors : requests.costs.load_sectors, first, next);
    }
}
}  // namespace cusim
