// Vectors with many zeros as a bitmap and the nonzero elements, byte-compatible with the CPU: `head` bytes of 64-bit
// words, then the elements. Only elements with all bits zero count as zero.
//
// A chunk is 4096 elements. `starts` has the number of nonzero elements before each chunk, and their total at the
// end.

constexpr u64 CHUNK_WORDS = 64;

template <class I> INLINE bool is_zero(I x) { return x == 0; }
INLINE bool is_zero(bf16 x) { return x.bits == 0; }

// The bitmap words of x, followed by zeros up to `words`.
KERNEL(256, zero_mask)(const T* x, u64* mask, u64 n, u64 words) {
    for (u64 at = thread_number(); at < words; at += thread_count()) {
        const u64 first = at * 64, end = first + 64 < n ? first + 64 : n;
        u64 word = 0;
        for (u64 i = first; i < end; i++) word |= (u64)!is_zero(x[i]) << (i - first);
        mask[at] = word;
    }
}

// The number of bits set in each chunk of words.
KERNEL(256, zero_counts)(const u64* mask, i64* counts, u64 words, u64 chunks) {
    for (u64 chunk = thread_number(); chunk < chunks; chunk += thread_count()) {
        i64 count = 0;
        for (u64 at = chunk * CHUNK_WORDS; at < (chunk + 1) * CHUNK_WORDS && at < words; at++) count += __popcll(mask[at]);
        counts[chunk] = count;
    }
}

// Prefix sums of the counts and their total, by one block whose threads each sum a range.
KERNEL(256, zero_starts)(const i64* counts, i64* starts, u64 chunks) {
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

// The index of a word's first nonzero element.
INLINE i64 word_start(const u64* mask, const i64* starts, u64 at) {
    const u64 chunk = at / CHUNK_WORDS;
    i64 start = starts[chunk];
    for (u64 word = chunk * CHUNK_WORDS; word < at; word++) start += __popcll(mask[word]);
    return start;
}

KERNEL(256, zero_pack)(const T* x, const u64* mask, const i64* starts, u8* packed, u64 n, u64 head) {
    T* values = reinterpret_cast<T*>(packed + head);
    for (u64 at = thread_number(); at < head / 8; at += thread_count()) {
        const u64 word = mask[at];
        reinterpret_cast<u64*>(packed)[at] = word;
        if (at * 64 >= n) continue;
        i64 to = word_start(mask, starts, at);
#pragma unroll 4
        for (u32 bit = 0; bit < 64; bit++)
            if (word >> bit & 1) values[to++] = x[at * 64 + bit];
    }
}

// `kept` elements are stored; elements beyond them are zero.
KERNEL(256, zero_expand)(const u8* packed, const i64* starts, T* y, u64 n, u64 head, i64 kept) {
    const u64* mask = reinterpret_cast<const u64*>(packed);
    const T* values = reinterpret_cast<const T*>(packed + head);
    for (u64 at = thread_number(); at * 64 < n; at += thread_count()) {
        const u64 word = mask[at], end = at * 64 + 64 < n ? at * 64 + 64 : n;
        i64 from = word_start(mask, starts, at);
        for (u64 i = at * 64; i < end; i++) {
            const bool is_kept = (word >> (i % 64) & 1) && from < kept;
            y[i] = is_kept ? values[from] : T{};
            from += is_kept;
        }
    }
}
