// Sorts ids: positions grouped by id, ascending. The order makes scattered sums deterministic.
//
// The rank of a position is the number of smaller ids plus the number of equal ones before it: n^2 comparisons, but
// of integers in shared memory, and n is the number of tokens of a micro-batch.

// Ids outside offset .. offset + size, those of other shards, are mapped to `size` and sort last.
INLINE i64 local_id(const void* ids, int type, u64 at, i64 offset, i64 size) {
    const i64 id = read_index(ids, type, at) - offset;
    return id >= 0 && id < size ? id : size;
}

// `bad` receives the first position of an id that is not below `global`; it is the same on every shard.
KERNEL(256, sort_ids)(const void* ids, int type, T* order, u64 n, i64 offset, i64 size, i64 global, u64* bad) {
    SHARED(i64, tile, 256);
    const u64 own = thread_number();
    const i64 id = own < n ? local_id(ids, type, own, offset, size) : 0;
    u64 place = 0;
    for (u64 first = 0; first < n; first += 256) {
        __syncthreads();  // the tile before has been read
        if (first + threadIdx.x < n) tile[threadIdx.x] = local_id(ids, type, first + threadIdx.x, offset, size);
        __syncthreads();
        const u32 count = n - first < 256 ? (u32)(n - first) : 256;
        for (u32 k = 0; k < count; k++) place += tile[k] < id || (tile[k] == id && first + k < own);
    }
    if (own >= n) return;
    order[place] = (T)own;
    const i64 id_of_all = read_index(ids, type, own);
    if (id_of_all < 0 || id_of_all >= global) atomicMin(bad, own);
}
