// What the kernels of attention share: its sizes, and which keys a query sees.

// Strides are of (batch, position, head), in elements; heads are dense. As `arguments::Attention` on the host.
struct Attention {
    i64 queries, keys, heads, groups, width;
    i64 causal;  // not 0: query i sees keys j <= i + keys - queries
    double scale;
    i64 q[3], k[3], v[3], out[3], dout[3], dq[3], dk[3], dv[3];
};

INLINE i64 key_end(const Attention& a, i64 last_query) {
    if (!a.causal) return a.keys;
    const i64 end = last_query + 1 + a.keys - a.queries;
    return end < 0 ? 0 : end < a.keys ? end : a.keys;
}

INLINE bool visible(const Attention& a, i64 query, i64 key) {
    return key < a.keys && query < a.queries && (!a.causal || key <= query + a.keys - a.queries);
}

// delta_i = dout_i . out_i (batch, heads, queries): a warp for each.
KERNEL(256, attention_delta)(const T* dout, const T* out, A* delta, u64 batch, Attention a) {
    const u64 row = thread_number() / 32, lane = threadIdx.x & 31;
    if (row >= batch * a.heads * a.queries) return;
    const i64 query = row % a.queries, head = row / a.queries % a.heads, sample = row / a.queries / a.heads;
    dout += sample * a.dout[0] + query * a.dout[1] + head * a.dout[2];
    out += sample * a.out[0] + query * a.out[1] + head * a.out[2];
    A sum = A(0);
    for (i64 i = lane; i < a.width; i += 32) sum += widen(dout[i]) * widen(out[i]);
    sum = join_warp(sum, Plus());
    if (lane == 0) delta[row] = sum;
}
