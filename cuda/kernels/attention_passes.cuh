// The passes of attention.cu and attention_bias.cu, whose constant BIASED tells whether a bias is added to the scores:
// registers are too scarce for a choice at run time. Included after attention_tiles.cuh.

// Exponentials are powers of two, so scores are multiplied by log2 e with their scale. Biased scores are not: the product
// of a finite bias below -2.4e38 would be minus infinity, and hide a key that others of its kind may leave as the largest.
constexpr float UNIT = BIASED ? 1.0f : LOG2E;
INLINE float exponential(float x) { return fast_exp2(BIASED ? x * LOG2E : x); }

// A range of keys in 32 bits, of which a comparison is one instruction.
struct Keys {
    int start, end;
    INLINE bool has(int key) const { return start <= key && key < end; }
};
INLINE Keys keys_seen(const Attention& a, i64 batch, i64 query) {
    const Range seen = keys_of(a, batch, query);
    return {(int)seen.start, (int)seen.end};
}

// A query that sees no key has an lse of minus infinity, which must not be subtracted: its scores are minus infinity, too.
INLINE float subtracted(float lse) { return lse == -real::infinity<float>() ? 0.0f : lse; }

template <int D, class Drops>
INLINE void forward(const T* q, const T* k, const T* v, T* out, float* lse, const Attention& a, Drops drops) {
    constexpr int KEYS = 64, TILE = D + PAD;
    DYNAMIC_SHARED(T, memory);
    T *q_tile = memory, *k_tile = q_tile + ROWS * TILE, *v_tile = k_tile + KEYS * TILE;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    // The last queries see the most keys, so their blocks start first.
    const i64 first = (i64)(gridDim.x - 1 - blockIdx.x) * ROWS, head = blockIdx.y, batch = blockIdx.z;
    const i64 group = head * a.groups / a.heads;
    q += batch * a.q[0] + head * a.q[2];
    k += batch * a.k[0] + group * a.k[2];
    v += batch * a.v[0] + group * a.v[2];
    out += batch * a.out[0] + head * a.out[2];

    const Range tile = keys_of_tile(a, batch, first, ROWS);
    const int end = (int)tile.end, begin = (int)tile.start / KEYS * KEYS, own_first = (int)first + warp * 16;
    const Keys seen[2] = {keys_seen(a, batch, own_first + lane / 4), keys_seen(a, batch, own_first + lane / 4 + 8)};
    // Keys that every query of this warp sees.
    const int seen_from = (int)keys_of(a, batch, own_first + 15).start, seen_to = (int)keys_of(a, batch, own_first).end;
    const bool partial = own_first + 15 >= a.queries;
    const float scale = (float)a.scale * UNIT, cap = (float)a.softcap * UNIT, left_to_scale = cap > 0 ? 1.0f : scale;
    float sum[2] = {0, 0}, max[2] = {-real::infinity<float>(), -real::infinity<float>()};
    float result[D / 8][4] = {};
    load_rows<D, ROWS>(q_tile, q, a.q[1], first, a.queries, a.width);
    if (begin < end) load_rows<D, KEYS>(k_tile, k, a.k[1], begin, a.keys, a.width);
    copy_commit();
    for (int key = begin; key < end; key += KEYS) {
        // Values are loaded while scores are computed, and the next keys while values are summed.
        load_rows<D, KEYS>(v_tile, v, a.v[1], key, a.keys, a.width);
        copy_commit();
        const u32 kept = drops.template rows_of_queries<KEYS / 8>(batch, head, own_first + lane / 4, key + lane % 4 * 2);
        copy_wait<1>();
        __syncthreads();
        float s[KEYS / 8][4] = {};
        multiply_rows<D, KEYS / 8>(s, q_tile + warp * 16 * TILE, k_tile);
        __syncthreads();
        if (key + KEYS < end) load_rows<D, KEYS>(k_tile, k, a.k[1], key + KEYS, a.keys, a.width);
        copy_commit();

        const bool masked = partial || key < seen_from || key + KEYS > seen_to;
        float largest[2] = {max[0], max[1]};
        // One branch for the cap and one for the mask, not two for each score.
        if (cap > 0) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) s[n][e] = soft_cap(s[n][e] * scale, cap);
        }
        if (masked) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (!seen[e / 2].has(key + n * 8 + lane % 4 * 2 + e % 2)) s[n][e] = -real::infinity<float>();
        }
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[n][e] *= left_to_scale;
                // Only of a key that is seen.
                if (BIASED && s[n][e] > -real::infinity<float>())
                    s[n][e] += bias_of(a, batch, head, own_first + lane / 4 + e / 2 * 8, key + n * 8 + lane % 4 * 2 + e % 2);
                largest[e / 2] = real::max(largest[e / 2], s[n][e]);
            }
        float shift[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // The four lanes of a row.
            largest[half] = real::max(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 1));
            largest[half] = real::max(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 2));
            // A row without visible keys so far must not subtract infinities.
            shift[half] = largest[half] == -real::infinity<float>() ? 0.0f : largest[half];
            const float shrink = exponential(max[half] - shift[half]);
            max[half] = largest[half];
            sum[half] *= shrink;
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                result[n][2 * half] *= shrink;
                result[n][2 * half + 1] *= shrink;
            }
        }
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[n][e] = exponential(s[n][e] - shift[e / 2]);
                sum[e / 2] += s[n][e];
                s[n][e] *= drops.factor(kept, 4 * n + e);
            }
        copy_wait<1>();
        __syncthreads();
        multiply_fragments<D, KEYS / 8>(result, s, v_tile);
        __syncthreads();
    }
    copy_wait<0>();
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
        sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
        factor[half] = sum[half] > 0 ? 1 / sum[half] : 0.0f;
        const i64 row = own_first + lane / 4 + half * 8;
        // ln sum_j e^(s_j) = max + ln sum; minus infinity if no key is visible.
        if (lane % 4 == 0 && row < a.queries)
            lse[(batch * a.heads + head) * a.queries + row] =
                sum[half] > 0 ? max[half] * (BIASED ? 1.0f : 0.6931471805599453f) + real::ln(sum[half]) : -real::infinity<float>();
    }
    store_rows<D>(out, a.out[1], own_first, a.queries, a.width, result, factor[0], factor[1]);
}

// Computes p and ds from scores and dp, in place; ds without the slope of the soft cap unless SLOPES. `seen` tells whether
// element e of column tile n is visible, all are unless `masked`; `of` gives its lse, as `subtracted`, and delta, `bias` its
// bias, `factor` its dropout factor.
template <int N, bool SLOPES, bool CAPPED, class Seen, class Statistics, class Bias, class Factor>
INLINE void score_gradients(float (*s)[4], float (*dp)[4], const Attention& a, bool masked, Seen seen, Statistics of, Bias bias, Factor factor) {
    const float scale = (float)a.scale * UNIT, cap = (float)a.softcap * UNIT;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[n][e] = CAPPED ? soft_cap(s[n][e] * scale, cap) : s[n][e] * scale;
    if (masked) {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (!seen(n, e)) s[n][e] = -real::infinity<float>();
    }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float lse, delta, slope = 1, score = s[n][e];
            of(n, e, lse, delta);
            const bool visible = score > -real::infinity<float>();
            if (CAPPED && SLOPES) slope = visible ? soft_cap_slope(score, cap) : 0.0f;
            if (BIASED && visible) score += bias(n, e);
            const float p = exponential(score - lse * UNIT), m = factor(n, e);
            s[n][e] = p * m;
            dp[n][e] = p * (dp[n][e] * m - delta) * slope;
        }
}

// With one branch for the cap, not one for each score.
template <int N, bool SLOPES, class... Functions>
INLINE void score_gradients(float (*s)[4], float (*dp)[4], const Attention& a, bool masked, Functions... functions) {
    if (a.softcap > 0)
        score_gradients<N, SLOPES, true>(s, dp, a, masked, functions...);
    else
        score_gradients<N, SLOPES, false>(s, dp, a, masked, functions...);
}

template <int D, class Drops>
INLINE void backward_queries(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, T* dq, const Attention& a, Drops drops) {
    constexpr int KEYS = 64, TILE = D + PAD;
    DYNAMIC_SHARED(T, memory);
    T *q_tile = memory, *dout_tile = q_tile + ROWS * TILE, *k_tile = dout_tile + ROWS * TILE, *v_tile = k_tile + KEYS * TILE;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 first = (i64)(gridDim.x - 1 - blockIdx.x) * ROWS, head = blockIdx.y, batch = blockIdx.z;
    const i64 group = head * a.groups / a.heads;
    const int own_first = (int)first + warp * 16;
    q += batch * a.q[0] + head * a.q[2];
    k += batch * a.k[0] + group * a.k[2];
    v += batch * a.v[0] + group * a.v[2];
    dout += batch * a.dout[0] + head * a.dout[2];
    dq += batch * a.dq[0] + head * a.dq[2];
    float row_lse[2], row_delta[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const i64 row = own_first + lane / 4 + half * 8;
        const i64 at = (batch * a.heads + head) * a.queries + (row < a.queries ? row : 0);
        row_lse[half] = subtracted(lse[at]);
        row_delta[half] = delta[at];
    }
    const Keys seen[2] = {keys_seen(a, batch, own_first + lane / 4), keys_seen(a, batch, own_first + lane / 4 + 8)};
    // Keys that every query of this warp sees.
    const int seen_from = keys_seen(a, batch, own_first + 15).start, seen_to = keys_seen(a, batch, own_first).end;
    const bool partial = own_first + 15 >= a.queries;
    const Range tile = keys_of_tile(a, batch, first, ROWS);
    const float* bias = a.bias + batch * a.bias_step[0] + head * a.bias_step[1] + (own_first + lane / 4) * a.bias_step[2] + lane % 4 * 2;
    float result[D / 8][4] = {};
    load_rows<D, ROWS>(q_tile, q, a.q[1], first, a.queries, a.width);
    load_rows<D, ROWS>(dout_tile, dout, a.dout[1], first, a.queries, a.width);
    for (int key = (int)tile.start / KEYS * KEYS, end = (int)tile.end; key < end; key += KEYS) {
        load_rows<D, KEYS>(k_tile, k, a.k[1], key, a.keys, a.width);
        load_rows<D, KEYS>(v_tile, v, a.v[1], key, a.keys, a.width);
        copy_commit();
        const u32 kept = drops.template rows_of_queries<KEYS / 8>(batch, head, own_first + lane / 4, key + lane % 4 * 2);
        copy_wait<0>();
        __syncthreads();
        float s[KEYS / 8][4] = {}, dp[KEYS / 8][4] = {};
        multiply_rows<D, KEYS / 8>(s, q_tile + warp * 16 * TILE, k_tile);
        multiply_rows<D, KEYS / 8>(dp, dout_tile + warp * 16 * TILE, v_tile);
        const bool masked = partial || key < seen_from || key + KEYS > seen_to;
        score_gradients<KEYS / 8, true>(
            s, dp, a, masked, [&](int n, int e) { return seen[e / 2].has(key + n * 8 + lane % 4 * 2 + e % 2); },
            [&](int, int e, float& lse, float& delta) {
                lse = row_lse[e / 2];
                delta = row_delta[e / 2];
            },
            [&](int n, int e) { return bias[e / 2 * 8 * a.bias_step[2] + key + n * 8 + e % 2]; },
            [&](int n, int e) { return drops.factor(kept, 4 * n + e); });
        multiply_fragments<D, KEYS / 8>(result, dp, k_tile);
        __syncthreads();
    }
    copy_commit();
    copy_wait<0>();
    store_rows<D>(dq, a.dq[1], own_first, a.queries, a.width, result, (float)a.scale, (float)a.scale);
}

// dk and dv of 64 keys of a key-value head: sums over its query heads in order.
template <int D, int QUERIES, class Drops>
INLINE void backward_keys(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, T* dk, T* dv, const Attention& a, Drops drops) {
    constexpr int TILE = D + PAD;
    DYNAMIC_SHARED(T, memory);
    T *k_tile = memory, *v_tile = k_tile + ROWS * TILE, *q_tile = v_tile + ROWS * TILE, *dout_tile = q_tile + QUERIES * TILE;
    SHARED(float, lse_tile, QUERIES);
    SHARED(float, delta_tile, QUERIES);
    SHARED(Keys, seen_tile, QUERIES);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 first = (i64)blockIdx.x * ROWS, group = blockIdx.y, batch = blockIdx.z, own_first = first + warp * 16;
    k += batch * a.k[0] + group * a.k[2];
    v += batch * a.v[0] + group * a.v[2];
    load_rows<D, ROWS>(k_tile, k, a.k[1], first, a.keys, a.width);
    load_rows<D, ROWS>(v_tile, v, a.v[1], first, a.keys, a.width);
    float dk_sum[D / 8][4] = {}, dv_sum[D / 8][4] = {};
    const i64 per_group = a.heads / a.groups;
    // The first query that sees one of these keys.
    i64 begin = a.causal ? first - (a.keys - a.queries) : 0;
    begin = begin < 0 ? 0 : begin / QUERIES * QUERIES;
    for (i64 head = group * per_group; head < (group + 1) * per_group; head++) {
        const T* q_head = q + batch * a.q[0] + head * a.q[2];
        const T* dout_head = dout + batch * a.dout[0] + head * a.dout[2];
        const i64 statistics = (batch * a.heads + head) * a.queries;
        for (i64 query = begin; query < a.queries; query += QUERIES) {
            const Range tile = keys_of_tile(a, batch, query, QUERIES);
            if (tile.start >= first + ROWS || tile.end <= first) continue;  // no query of the tile sees these keys
            load_rows<D, QUERIES>(q_tile, q_head, a.q[1], query, a.queries, a.width);
            load_rows<D, QUERIES>(dout_tile, dout_head, a.dout[1], query, a.queries, a.width);
            copy_commit();
            const u32 kept = drops.template rows_of_keys<QUERIES / 8>(batch, head, own_first + lane / 4, query + lane % 4 * 2);
            if (threadIdx.x < QUERIES) {
                const i64 at = statistics + (query + threadIdx.x < a.queries ? query + threadIdx.x : 0);
                lse_tile[threadIdx.x] = subtracted(lse[at]);
                delta_tile[threadIdx.x] = delta[at];
                seen_tile[threadIdx.x] = keys_seen(a, batch, query + threadIdx.x);
            }
            copy_wait<0>();
            __syncthreads();
            float s[QUERIES / 8][4] = {}, dp[QUERIES / 8][4] = {};
            multiply_rows<D, QUERIES / 8>(s, k_tile + warp * 16 * TILE, q_tile);
            multiply_rows<D, QUERIES / 8>(dp, v_tile + warp * 16 * TILE, dout_tile);
            // Unless every query of the tile sees every key of this warp.
            const bool masked = query + QUERIES > a.queries || seen_tile[QUERIES - 1].start > own_first || seen_tile[0].end < own_first + 16;
            score_gradients<QUERIES / 8, true>(
                s, dp, a, masked,
                [&](int n, int e) { return seen_tile[n * 8 + lane % 4 * 2 + e % 2].has((int)own_first + lane / 4 + e / 2 * 8); },
                [&](int n, int e, float& lse, float& delta) {
                    lse = lse_tile[n * 8 + lane % 4 * 2 + e % 2];
                    delta = delta_tile[n * 8 + lane % 4 * 2 + e % 2];
                },
                [&](int n, int e) {
                    return bias_of(a, batch, head, query + n * 8 + lane % 4 * 2 + e % 2, own_first + lane / 4 + e / 2 * 8);
                },
                [&](int n, int e) { return drops.factor(kept, 4 * n + e); });
            multiply_fragments<D, QUERIES / 8>(dv_sum, s, dout_tile);
            multiply_fragments<D, QUERIES / 8>(dk_sum, dp, q_tile);
            __syncthreads();
        }
    }
    copy_commit();
    copy_wait<0>();
    dk += batch * a.dk[0] + group * a.dk[2];
    dv += batch * a.dv[0] + group * a.dv[2];
    store_rows<D>(dk, a.dk[1], own_first, a.keys, a.width, dk_sum, (float)a.scale, (float)a.scale);
    store_rows<D>(dv, a.dv[1], own_first, a.keys, a.width, dv_sum, 1, 1);
}

// The grid is (tiles of 64 rows, heads, batch), with key-value heads for dk and dv. Shared memory holds (64 + 64 +
// 64), (64 + 64 + 64 + 64) and (64 + 64 + 2 QUERIES) rows of D + 8 elements, respectively.
KERNEL(128, attention_64)(const T* q, const T* k, const T* v, T* out, float* lse, Attention a) {
    forward<64>(q, k, v, out, lse, a, KeepAll());
}
KERNEL(128, attention_dropout_64)
(const T* q, const T* k, const T* v, T* out, float* lse, Attention a, u64 key, const Step* step, u32 last_dropped, double scale, Place place) {
    forward<64>(q, k, v, out, lse, a, DropSome(key, step, last_dropped, scale, place));
}
KERNEL(128, attention_backward_queries_64)
(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, T* dq, Attention a) {
    backward_queries<64>(q, k, v, dout, lse, delta, dq, a, KeepAll());
}
KERNEL(128, attention_backward_queries_dropout_64)
(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, T* dq, Attention a, u64 key, const Step* step, u32 last_dropped, double scale, Place place) {
    backward_queries<64>(q, k, v, dout, lse, delta, dq, a, DropSome(key, step, last_dropped, scale, place));
}
KERNEL(128, attention_backward_keys_64)
(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, T* dk, T* dv, Attention a) {
    backward_keys<64, 64>(q, k, v, dout, lse, delta, dk, dv, a, KeepAll());
}
KERNEL(128, attention_backward_keys_dropout_64)
(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, T* dk, T* dv, Attention a, u64 key, const Step* step, u32 last_dropped, double scale, Place place) {
    backward_keys<64, 64>(q, k, v, dout, lse, delta, dk, dv, a, DropSome(key, step, last_dropped, scale, place));
}

KERNEL(128, attention_96)(const T* q, const T* k, const T* v, T* out, float* lse, Attention a) {
    forward<96>(q, k, v, out, lse, a, KeepAll());
}
KERNEL(128, attention_dropout_96)
(const T* q, const T* k, const T* v, T* out, float* lse, Attention a, u64 key, const Step* step, u32 last_dropped, double scale, Place place) {
    forward<96>(q, k, v, out, lse, a, DropSome(key, step, last_dropped, scale, place));
}
KERNEL(128, attention_backward_queries_96)
(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, T* dq, Attention a) {
    backward_queries<96>(q, k, v, dout, lse, delta, dq, a, KeepAll());
}
KERNEL(128, attention_backward_queries_dropout_96)
(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, T* dq, Attention a, u64 key, const Step* step, u32 last_dropped, double scale, Place place) {
    backward_queries<96>(q, k, v, dout, lse, delta, dq, a, DropSome(key, step, last_dropped, scale, place));
}
KERNEL(128, attention_backward_keys_96)
(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, T* dk, T* dv, Attention a) {
    backward_keys<96, 64>(q, k, v, dout, lse, delta, dk, dv, a, KeepAll());
}
KERNEL(128, attention_backward_keys_dropout_96)
(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, T* dk, T* dv, Attention a, u64 key, const Step* step, u32 last_dropped, double scale, Place place) {
    backward_keys<96, 64>(q, k, v, dout, lse, delta, dk, dv, a, DropSome(key, step, last_dropped, scale, place));
}

KERNEL(128, attention_128)(const T* q, const T* k, const T* v, T* out, float* lse, Attention a) {
    forward<128>(q, k, v, out, lse, a, KeepAll());
}
KERNEL(128, attention_dropout_128)
(const T* q, const T* k, const T* v, T* out, float* lse, Attention a, u64 key, const Step* step, u32 last_dropped, double scale, Place place) {
    forward<128>(q, k, v, out, lse, a, DropSome(key, step, last_dropped, scale, place));
}
KERNEL(128, attention_backward_queries_128)
(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, T* dq, Attention a) {
    backward_queries<128>(q, k, v, dout, lse, delta, dq, a, KeepAll());
}
KERNEL(128, attention_backward_queries_dropout_128)
(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, T* dq, Attention a, u64 key, const Step* step, u32 last_dropped, double scale, Place place) {
    backward_queries<128>(q, k, v, dout, lse, delta, dq, a, DropSome(key, step, last_dropped, scale, place));
}
KERNEL(128, attention_backward_keys_128)
(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, T* dk, T* dv, Attention a) {
    backward_keys<128, 32>(q, k, v, dout, lse, delta, dk, dv, a, KeepAll());
}
KERNEL(128, attention_backward_keys_dropout_128)
(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, T* dk, T* dv, Attention a, u64 key, const Step* step, u32 last_dropped, double scale, Place place) {
    backward_keys<128, 32>(q, k, v, dout, lse, delta, dk, dv, a, DropSome(key, step, last_dropped, scale, place));
}
