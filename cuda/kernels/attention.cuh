// Shared code of the attention kernels: sizes, mask and dropout. Included after philox.cuh.

// Mirrors `arguments::Attention` on the host. Strides are for (batch, position, head), in elements; heads are dense.
struct Attention {
    i64 queries, keys, heads, groups, width;
    i64 causal;         // not 0: query i sees keys j <= i + keys - queries
    i64 window;         // not 0: query i sees keys j with |i + keys - queries - j| < window
    const u32* ranges;  // not null: the first key that each query may see, and the one after the last
    i64 ranges_row;     // elements of a batch row of them; 0 if all rows have the same
    double scale;
    double softcap;  // not 0: scores s become softcap tanh(s / softcap)
    const A* bias;   // not null: added to the scores after that
    i64 bias_step[3];  // its strides of batch, head and query; keys are dense
    i64 q[3], k[3], v[3], out[3], dout[3], dq[3], dk[3], dv[3];
};

// The head and the sample of a block of the gradient of a bias. Where z of a grid is too small for the samples, y has the
// heads of several. The last blocks may have samples out of bounds.
struct HeadAndSample {
    i64 head, sample;
};
INLINE HeadAndSample head_and_sample(i64 heads) {
    return {blockIdx.y % heads, blockIdx.z * (gridDim.y / heads) + blockIdx.y / heads};
}

// The keys from `start` to `end` - 1. Neither decreases from a query to the next.
struct Range {
    i64 start, end;
    INLINE bool has(i64 key) const { return start <= key && key < end; }
};

// The keys that a query sees; none for a query out of bounds.
INLINE Range keys_of(const Attention& a, i64 batch, i64 query) {
    if (query >= a.queries) return {0, 0};
    const i64 position = query + a.keys - a.queries;
    i64 start = 0, end = a.causal && position + 1 < a.keys ? position + 1 : a.keys;
    if (a.window) {
        if (position + 1 - a.window > start) start = position + 1 - a.window;
        if (position + a.window < end) end = position + a.window;
    }
    if (a.ranges) {
        const u32* own = a.ranges + batch * a.ranges_row + 2 * query;
        if (own[0] > start) start = own[0];
        if (own[1] < end) end = own[1];
    }
    if (end < 0) end = 0;
    return {start < end ? start : end, end};
}

// The keys that a tile of queries sees; the last may be out of bounds.
INLINE Range keys_of_tile(const Attention& a, i64 batch, i64 first, i64 count) {
    const i64 last = first + count < a.queries ? first + count - 1 : a.queries - 1;
    return {keys_of(a, batch, first).start, keys_of(a, batch, last).end};
}

// A capped score; the derivative of the cap at a capped score.
template <class Number> INLINE Number soft_cap(Number score, Number cap) { return cap * real::tanh(score / cap); }
template <class Number> INLINE Number soft_cap_slope(Number capped, Number cap) { return Number(1) - (capped / cap) * (capped / cap); }

// The bias of a score.
INLINE A bias_of(const Attention& a, i64 batch, i64 head, i64 query, i64 key) {
    return a.bias[batch * a.bias_step[0] + head * a.bias_step[1] + query * a.bias_step[2] + key];
}

// Dropout factors of the probabilities, 0 or `scale`: element (sample, head, query, key) of the global tensor is kept
// if its random bits exceed `last_dropped`.
//
// The mask of a tile is drawn before its scores are computed, and stored as bits, so that random numbers and scores
// are not in registers at the same time. Bit 4 n + e is element e of column tile n, in the layout of a fragment.
struct KeepAll {
    static constexpr bool DRAWS = false;
    INLINE A factor(i64, i64, i64, i64) const { return A(1); }
    template <int N> INLINE u32 rows_of_queries(i64, i64, i64, i64) const { return 0; }
    template <int N> INLINE u32 rows_of_keys(i64, i64, i64, i64) const { return 0; }
    INLINE A factor(u32, int) const { return A(1); }
};
struct DropSome {
    static constexpr bool DRAWS = true;
    u64 key;
    const Step* step;
    u32 last_dropped;
    A scale;
    const Place& place;
    INLINE DropSome(u64 key, const Step* step, u32 last_dropped, double scale, const Place& place)
        : key(key), step(step), last_dropped(last_dropped), scale((A)scale), place(place) {}
    INLINE u64 coordinate(int d, i64 local) const { return global_coordinate(place, d, local) * place.dim[d].stride; }
    INLINE u64 row(i64 batch, i64 head, i64 query) const {
        return coordinate(0, batch) + coordinate(1, head) + coordinate(2, query);
    }
    INLINE A factor(i64 batch, i64 head, i64 query, i64 own_key) const {
        Draws draws(key, step->number);
        return draws.at(row(batch, head, query) + coordinate(3, own_key)) > last_dropped ? scale : A(0);
    }
    // The mask of rows `query` and `query` + 8, for columns from `first_key` on.
    template <int N> INLINE u32 rows_of_queries(i64 batch, i64 head, i64 query, i64 first_key) const {
        const u64 rows[2] = {row(batch, head, query), row(batch, head, query + 8)};
        return draw<N>([&](int n, int e) { return rows[e / 2] + coordinate(3, first_key + n * 8 + e % 2); });
    }
    // The mask of rows `own_key` and `own_key` + 8, for columns from `first_query` on.
    template <int N> INLINE u32 rows_of_keys(i64 batch, i64 head, i64 own_key, i64 first_query) const {
        const u64 keys[2] = {coordinate(3, own_key), coordinate(3, own_key + 8)};
        return draw<N>([&](int n, int e) { return row(batch, head, first_query + n * 8 + e % 2) + keys[e / 2]; });
    }
    template <int N, class Index> INLINE u32 draw(Index index) const {
        Draws draws(key, step->number);
        u32 kept = 0;
#pragma unroll 1
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) kept |= (u32)(draws.at(index(n, e)) > last_dropped) << (4 * n + e);
        return kept;
    }
    INLINE A factor(u32 kept, int bit) const { return kept >> bit & 1 ? scale : A(0); }
};

// Whether heads begin at multiples of 16 bytes.
INLINE bool aligned_heads(const T* x, const i64* strides) {
    return aligned16(x) && (strides[0] | strides[1] | strides[2]) % Vector<T>::SIZE == 0;
}

// delta of 32 queries of a head from `first` on, one for each lane. A row has `lanes` lanes with packs of N elements in
// turn, and they have as many adjacent rows, of which those of ROWS rows are loaded at once.
template <int N> INLINE A delta_of_lane(const T* dout, const T* out, i64 first, const Attention& a) {
    constexpr u32 ROWS = 4;
    const u32 packs = a.width / N, lane = threadIdx.x & 31;
    u32 lanes = ROWS;
    while (lanes < packs && lanes < 32) lanes *= 2;
    const u32 own = lane % lanes;
    const i64 of_group = first + lane - own;
    A delta = A(0);
    for (u32 row = 0; row < lanes; row += ROWS) {
        A sums[ROWS] = {};
        for (u32 i = own; i < packs; i += lanes) {
            Pack<T, N> left[ROWS], right[ROWS];
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) {
                const i64 query = of_group + row + r;
                if (query >= a.queries) continue;  // its sum stays 0
                left[r] = reinterpret_cast<const Pack<T, N>*>(dout + query * a.dout[1])[i];
                right[r] = reinterpret_cast<const Pack<T, N>*>(out + query * a.out[1])[i];
            }
#pragma unroll
            for (u32 r = 0; r < ROWS; r++)
                if (of_group + row + r < a.queries)
                    for_packs<N>(0, [&](u64, T x, T y) { sums[r] += widen(x) * widen(y); }, left[r], right[r]);
        }
        for (u32 distance = lanes / 2; distance > 0; distance /= 2)
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], distance);
#pragma unroll
        for (u32 r = 0; r < ROWS; r++)
            if (own == row + r) delta = sums[r];
    }
    return delta;
}

// delta_i = dout_i . out_i (batch, heads, queries): a warp has 32 queries of a head, so that it stores adjacent numbers, and
// the next warp those of the next head, whose elements are adjacent.
KERNEL(256, attention_delta)(const T* dout, const T* out, A* delta, u64 batch, Attention a) {
    const u64 warp = thread_number() / 32, tiles = (a.queries + 31) / 32;
    const i64 head = warp % a.heads, first = warp / a.heads % tiles * 32, sample = warp / a.heads / tiles;
    if (sample >= (i64)batch) return;
    dout += sample * a.dout[0] + head * a.dout[2];
    out += sample * a.out[0] + head * a.out[2];
    constexpr int SIZE = Vector<T>::SIZE;
    const bool packs = a.width % SIZE == 0 && aligned_heads(dout, a.dout) && aligned_heads(out, a.out);
    const A own = packs ? delta_of_lane<SIZE>(dout, out, first, a) : delta_of_lane<1>(dout, out, first, a);
    const i64 query = first + (threadIdx.x & 31);
    if (query < a.queries) delta[(sample * a.heads + head) * a.queries + query] = own;
}

// Merges a block of keys into out (batch, queries, heads, width) and lse (batch, heads, queries). The block covers
// `rows` queries from `first` on; one warp per query and head.
KERNEL(256, attention_merge)
(A* out, A* lse, const T* block_out, const A* block_lse, u64 batch, u64 queries, u64 rows, u64 heads, u64 width, u64 first) {
    const u64 index = thread_number() / 32, lane = threadIdx.x & 31;
    if (index >= batch * rows * heads) return;
    const u64 head = index % heads, row = index / heads % rows, sample = index / heads / rows;
    A* own = lse + (sample * heads + head) * queries + first + row;
    const A before = *own, other = block_lse[(sample * heads + head) * rows + row];
    const A max = real::max(before, other);
    A kept = A(0), gained = A(0);
    __syncwarp();  // every lane has read lse before one lane overwrites it
    if (max > -real::infinity<A>()) {
        kept = real::exp(before - max);
        gained = real::exp(other - max);
        const A sum = kept + gained;
        kept /= sum;
        gained /= sum;
        if (lane == 0) *own = max + real::ln(sum);
    }
    out += ((sample * queries + first + row) * heads + head) * width;
    block_out += index * width;
    // If `kept` is 0, the old contents are ignored: they may be NaN.
    for (u64 i = lane; i < width; i += 32) out[i] = gained * widen(block_out[i]) + (kept == A(0) ? A(0) : kept * out[i]);
}
