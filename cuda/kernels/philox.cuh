// Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011), and shards of global
// tensors. The numbers are those of tensor/src/numeric/philox.rs: functions of the key, the step and the element's index in
// the global, unsharded tensor.

struct Block { u32 word[4]; };

INLINE Block philox(u64 counter, u64 step, u64 key) {
    Block c = {{(u32)counter, (u32)(counter >> 32), (u32)step, (u32)(step >> 32)}};
    u32 k0 = (u32)key, k1 = (u32)(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 p0 = (u64)0xD2511F53u * c.word[0], p1 = (u64)0xCD9E8D57u * c.word[2];
        c = {{(u32)(p1 >> 32) ^ c.word[1] ^ k0, (u32)p1, (u32)(p0 >> 32) ^ c.word[3] ^ k1, (u32)p0}};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

// A shard: for each dim the local size, the global stride, and the local ranges. Mirrors `arguments::Place` on the
// host.
constexpr int MAX_PLACE_RANK = 6, MAX_PIECES = 4;
struct Place {
    i64 rank;
    struct {
        u64 size, stride;
        u64 pieces;
        u64 offset[MAX_PIECES], length[MAX_PIECES];
    } dim[MAX_PLACE_RANK];
};

// The global coordinate of a local one.
INLINE u64 global_coordinate(const Place& place, int d, u64 local) {
    u64 global = 0;
#pragma unroll
    for (int k = 0; k < MAX_PIECES; k++) {
        if (k >= place.dim[d].pieces) continue;
        if (local < place.dim[d].length[k]) {
            global = place.dim[d].offset[k] + local;
            break;
        }
        local -= place.dim[d].length[k];
    }
    return global;
}

// The global index of the local element `index`.
INLINE u64 global_index(const Place& place, u64 index) {
    u64 global = 0;
#pragma unroll
    for (int d = MAX_PLACE_RANK - 1; d >= 0; d--) {
        if (d >= place.rank) continue;
        global += global_coordinate(place, d, index % place.dim[d].size) * place.dim[d].stride;
        index /= place.dim[d].size;
    }
    return global;
}

// The 32 random bits of elements. Four adjacent elements share a block, which is drawn once.
struct Draws {
    u64 key, step, drawn;
    Block block;
    INLINE Draws(u64 key, u64 step) : key(key), step(step), drawn(~0ull) {}
    INLINE u32 at(u64 index) {
        if (index >> 2 != drawn) {
            drawn = index >> 2;
            block = philox(drawn, step, key);
        }
        // Selected, not indexed: registers cannot be indexed.
        u32 low = index & 1 ? block.word[1] : block.word[0], high = index & 1 ? block.word[3] : block.word[2];
        return index & 2 ? high : low;
    }
    // 16 bits: two adjacent elements share 32, the first has the lower half.
    INLINE u32 half_at(u64 index) { return index & 1 ? at(index >> 1) >> 16 : at(index >> 1) & 0xffff; }
};
