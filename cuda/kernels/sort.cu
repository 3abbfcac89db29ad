// The keys by which positions are grouped by id, for the sort of argsort.cu. The order makes scattered sums deterministic.

// keys = the ids less `offset`; ids outside offset .. offset + size, those of other shards, become `size` and sort last.
// `bad` receives the first position of an id that is not below `global`; it is the same on every shard.
KERNEL(256, local_ids)(const void* ids, int type, T* keys, u64 n, i64 offset, i64 size, i64 global, u64* bad) {
    for (u64 i = thread_number(); i < n; i += thread_count()) {
        const i64 id = read_index(ids, type, i), own = id - offset;
        keys[i] = own >= 0 && own < size ? own : size;
        if (id < 0 || id >= global) atomicMin(bad, i);
    }
}
