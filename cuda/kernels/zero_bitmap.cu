// Vectors with many zeros as a bitmap and the nonzero elements, byte-compatible with the CPU: `head` bytes of 64-bit
// words, then the elements. Only elements with all bits zero count as zero.
//
// A chunk is 4096 elements. `starts` has the number of nonzero elements before each chunk, and their total at the
// end. A warp has a run of words at a time, a lane every 32nd of their elements.

constexpr u32 CHUNK_WORDS = 64;
constexpr u32 RUN_WORDS = 4, RUN = 2 * RUN_WORDS;  // words of a run, and elements that a lane has of it

template <class I> INLINE bool is_zero(I x) { return x == 0; }
INLINE bool is_zero(bf16 x) { return x.bits == 0; }

// Calls f(at) for the first word of each of this warp's runs. There are whole runs of words.
template <class F> INLINE void for_runs(u64 words, F f) {
    for (u64 run = thread_number() / 32; run * RUN_WORDS < words; run += thread_count() / 32) f(run * RUN_WORDS);
}

// The position of this lane's element k of the run from word `at` on.
INLINE u64 element(u64 at, u32 k) { return at * 64 + k * 32 + (threadIdx.x & 31); }

// The bitmap words of x, followed by zeros up to `words`.
KERNEL(256, zero_mask)(const T* x, u64* mask, u64 n, u64 words) {
    const u32 lane = threadIdx.x & 31;
    for_runs(words, [&](u64 at) {
        u64 own = 0;
#pragma unroll
        for (u32 k = 0; k < RUN; k++) {
            const u64 i = element(at, k), bits = __ballot_sync(0xffffffffu, i < n && !is_zero(x[i]));
            if (lane == k / 2) own |= bits << k % 2 * 32;
        }
        if (lane < RUN_WORDS) mask[at + lane] = own;
    });
}

// The number of bits set in each chunk of words, by a warp.
KERNEL(128, zero_counts)(const u64* mask, i64* counts, u64 words, u64 chunks) {
    const u64 chunk = group_row();
    if (chunk >= chunks) return;
    i64 count = 0;
    for (u64 at = chunk * CHUNK_WORDS + threadIdx.x; at < (chunk + 1) * CHUNK_WORDS && at < words; at += 32) count += __popcll(mask[at]);
    count = join_warp(count, Plus());
    if (threadIdx.x == 0) counts[chunk] = count;
}

// Prefix sums of the counts and their total, by one block whose threads each sum a range.
KERNEL(256, zero_starts)(const i64* __restrict__ counts, i64* __restrict__ starts, u64 chunks) {
    SHARED(i64, sums, 256);
    const u64 run = (chunks + blockDim.x - 1) / blockDim.x, first = threadIdx.x * run;
    const u64 end = first + run < chunks ? first + run : chunks;
    i64 sum = 0;
    for (u64 chunk = first; chunk < end; chunk++) sum += counts[chunk];
    sums[threadIdx.x] = sum;
    __syncthreads();
    i64 before = 0;
    for (u32 thread = 0; thread < threadIdx.x; thread++) before += sums[thread];
    for (u64 chunk = first; chunk < end; chunk++) {
        starts[chunk] = before;
        before += counts[chunk];
    }
    if (threadIdx.x == blockDim.x - 1) starts[chunks] = before;
}

// The number of nonzero elements before a run: its warp counts those of the words before in the chunk.
INLINE i64 run_start(const u64* mask, const i64* starts, u64 at) {
    const u64 chunk = at / CHUNK_WORDS, first = chunk * CHUNK_WORDS + (threadIdx.x & 31);
    u32 count = 0;
#pragma unroll
    for (u32 k = 0; k < CHUNK_WORDS; k += 32) count += first + k < at ? __popcll(mask[first + k]) : 0;
    return starts[chunk] + join_warp(count, Plus());
}

// Calls f(k, is_set, before) for this lane's elements of a run, with the number of nonzero elements before.
template <class F> INLINE void for_bits(const u64* mask, const i64* starts, u64 at, F f) {
    i64 before = run_start(mask, starts, at);
#pragma unroll
    for (u32 k = 0; k < RUN; k++) {
        const u64 word = mask[at + k / 2];
        const u32 bit = k % 2 * 32 + (threadIdx.x & 31);
        f(k, word >> bit & 1, before + __popcll(word & ((1ull << bit) - 1)));
        if (k % 2) before += __popcll(word);
    }
}

KERNEL(256, zero_pack)
(const T* __restrict__ x, const u64* __restrict__ mask, const i64* __restrict__ starts, u8* __restrict__ packed, u64 n, u64 head) {
    const u32 lane = threadIdx.x & 31;
    T* values = reinterpret_cast<T*>(packed + head);
    for_runs(head / 8, [&](u64 at) {
        T own[RUN];
#pragma unroll
        for (u32 k = 0; k < RUN; k++) own[k] = element(at, k) < n ? x[element(at, k)] : T{};
        if (lane < RUN_WORDS) reinterpret_cast<u64*>(packed)[at + lane] = mask[at + lane];
        for_bits(mask, starts, at, [&](u32 k, bool is_set, i64 to) {
            if (is_set) values[to] = own[k];
        });
    });
}

// `kept` elements are stored; elements beyond them are zero.
KERNEL(256, zero_expand)
(const u8* __restrict__ packed, const i64* __restrict__ starts, T* __restrict__ y, u64 n, u64 head, i64 kept) {
    const T* values = reinterpret_cast<const T*>(packed + head);
    for_runs(head / 8, [&](u64 at) {
        T own[RUN];
        for_bits(reinterpret_cast<const u64*>(packed), starts, at, [&](u32 k, bool is_set, i64 from) {
            own[k] = is_set && from < kept ? values[from] : T{};
        });
#pragma unroll
        for (u32 k = 0; k < RUN; k++)
            if (element(at, k) < n) y[element(at, k)] = own[k];
    });
}
