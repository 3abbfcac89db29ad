// Attention in f32 and f64, for which tensor cores have no exact products. One warp per query, and one per key for
// the gradients of keys and values. Formulas and the order of sums are those of attention.cu; heads have at most 256
// elements. For checks and small models; not optimized for speed.

#include "philox.cuh"
#include "attention.cuh"

constexpr int WARPS = 4, MAX_WIDTH = 256, PER_LANE = MAX_WIDTH / 32;

// Loads a row into shared memory of its warp.
INLINE void keep_row(A* row, const T* from, i64 width) {
    for (i64 d = threadIdx.x & 31; d < width; d += 32) row[d] = widen(from[d]);
}

INLINE A dot(const A* row, const T* other, i64 width) {
    A sum = A(0);
    for (i64 d = 0; d < width; d++) sum += row[d] * widen(other[d]);
    return sum;
}

// sum += the weights of the lanes times `count` rows.
INLINE void add_rows(A* sum, A weight, const T* rows, i64 stride, i64 count, i64 width) {
    const int lane = threadIdx.x & 31;
    for (int l = 0; l < 32 && l < count; l++) {
        const A w = __shfl_sync(0xffffffffu, weight, l);
#pragma unroll
        for (int r = 0; r < PER_LANE; r++)
            if (lane + 32 * r < width) sum[r] += w * widen(rows[l * stride + lane + 32 * r]);
    }
}

INLINE void store_row(T* to, const A* sum, A factor, i64 width) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int r = 0; r < PER_LANE; r++)
        if (lane + 32 * r < width) to[lane + 32 * r] = rounded<T>(sum[r] * factor);
}

template <class Drops>
INLINE void forward(const T* q, const T* k, const T* v, T* out, A* lse, const Attention& a, Drops drops) {
    SHARED(A, rows, WARPS * MAX_WIDTH);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 query = (i64)blockIdx.x * WARPS + warp, head = blockIdx.y, batch = blockIdx.z;
    if (query >= a.queries) return;
    const i64 group = head * a.groups / a.heads;
    k += batch * a.k[0] + group * a.k[2];
    v += batch * a.v[0] + group * a.v[2];
    A* row = rows + warp * MAX_WIDTH;
    keep_row(row, q + batch * a.q[0] + query * a.q[1] + head * a.q[2], a.width);
    __syncwarp();
    const i64 start = keys_of(a, batch, query).start, end = keys_of(a, batch, query).end;
    const A cap = (A)a.softcap;
    A max = -real::infinity<A>(), sum = A(0), result[PER_LANE] = {};
    for (i64 key = start; key < end; key += 32) {
        const i64 own = key + lane;
        A s = own < end ? (A)a.scale * dot(row, k + own * a.k[1], a.width) : -real::infinity<A>();
        if (cap > A(0) && own < end) s = soft_cap(s, cap);
        if (a.bias && own < end) s += bias_of(a, batch, head, query, own);
        const A largest = real::max(max, join_warp(s, Larger()));
        // Biases of minus infinity may hide every key so far.
        const A shift = largest == -real::infinity<A>() ? A(0) : largest, shrink = real::exp(max - shift);
        const A p = real::exp(s - shift);
        max = largest;
        sum = sum * shrink + join_warp(p, Plus());
#pragma unroll
        for (int r = 0; r < PER_LANE; r++) result[r] *= shrink;
        add_rows(result, p * drops.factor(batch, head, query, own), v + key * a.v[1], a.v[1], end - key, a.width);
    }
    store_row(out + batch * a.out[0] + query * a.out[1] + head * a.out[2], result, sum > A(0) ? A(1) / sum : A(0), a.width);
    if (lane == 0) lse[(batch * a.heads + head) * a.queries + query] = sum > A(0) ? max + real::ln(sum) : -real::infinity<A>();
}

// A query whose every score is minus infinity has such an lse, too.
INLINE A probability(A score, A lse) { return score > -real::infinity<A>() ? real::exp(score - lse) : A(0); }

template <class Drops>
INLINE void backward_queries(const T* q, const T* k, const T* v, const T* dout, const A* lse, const A* delta, T* dq, const Attention& a, Drops drops) {
    SHARED(A, rows, 2 * WARPS * MAX_WIDTH);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 query = (i64)blockIdx.x * WARPS + warp, head = blockIdx.y, batch = blockIdx.z;
    if (query >= a.queries) return;
    const i64 group = head * a.groups / a.heads, at = (batch * a.heads + head) * a.queries + query;
    k += batch * a.k[0] + group * a.k[2];
    v += batch * a.v[0] + group * a.v[2];
    A *q_row = rows + 2 * warp * MAX_WIDTH, *dout_row = q_row + MAX_WIDTH;
    keep_row(q_row, q + batch * a.q[0] + query * a.q[1] + head * a.q[2], a.width);
    keep_row(dout_row, dout + batch * a.dout[0] + query * a.dout[1] + head * a.dout[2], a.width);
    __syncwarp();
    const i64 start = keys_of(a, batch, query).start, end = keys_of(a, batch, query).end;
    const A cap = (A)a.softcap;
    A result[PER_LANE] = {};
    for (i64 key = start; key < end; key += 32) {
        const i64 own = key + lane;
        A ds = A(0);
        if (own < end) {
            A s = (A)a.scale * dot(q_row, k + own * a.k[1], a.width), slope = A(1);
            if (cap > A(0)) {
                s = soft_cap(s, cap);
                slope = soft_cap_slope(s, cap);
            }
            if (a.bias) s += bias_of(a, batch, head, query, own);
            const A p = probability(s, lse[at]) * slope;
            const A m = drops.factor(batch, head, query, own);
            ds = p * (m * dot(dout_row, v + own * a.v[1], a.width) - delta[at]);
        }
        add_rows(result, ds, k + key * a.k[1], a.k[1], end - key, a.width);
    }
    store_row(dq + batch * a.dq[0] + query * a.dq[1] + head * a.dq[2], result, (A)a.scale, a.width);
}

template <class Drops>
INLINE void backward_keys(const T* q, const T* k, const T* v, const T* dout, const A* lse, const A* delta, T* dk, T* dv, const Attention& a, Drops drops) {
    SHARED(A, rows, 2 * WARPS * MAX_WIDTH);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 key = (i64)blockIdx.x * WARPS + warp, group = blockIdx.y, batch = blockIdx.z;
    if (key >= a.keys) return;
    A *k_row = rows + 2 * warp * MAX_WIDTH, *v_row = k_row + MAX_WIDTH;
    keep_row(k_row, k + batch * a.k[0] + key * a.k[1] + group * a.k[2], a.width);
    keep_row(v_row, v + batch * a.v[0] + key * a.v[1] + group * a.v[2], a.width);
    __syncwarp();
    const i64 per_group = a.heads / a.groups;
    const A cap = (A)a.softcap;
    A dk_sum[PER_LANE] = {}, dv_sum[PER_LANE] = {};
    for (i64 head = group * per_group; head < (group + 1) * per_group; head++) {
        const T* q_head = q + batch * a.q[0] + head * a.q[2];
        const T* dout_head = dout + batch * a.dout[0] + head * a.dout[2];
        for (i64 query = 0; query < a.queries; query += 32) {
            const Range tile = keys_of_tile(a, batch, query, 32);
            if (key < tile.start || key >= tile.end) continue;
            const i64 own = query + lane, at = (batch * a.heads + head) * a.queries + own;
            A p = A(0), ds = A(0);
            if (keys_of(a, batch, own).has(key)) {
                A s = (A)a.scale * dot(k_row, q_head + own * a.q[1], a.width), slope = A(1);
                if (cap > A(0)) {
                    s = soft_cap(s, cap);
                    slope = soft_cap_slope(s, cap);
                }
                if (a.bias) s += bias_of(a, batch, head, own, key);
                p = probability(s, lse[at]);
                const A m = drops.factor(batch, head, own, key);
                ds = p * (m * dot(v_row, dout_head + own * a.dout[1], a.width) - delta[at]) * slope;
                p *= m;
            }
            add_rows(dv_sum, p, dout_head + query * a.dout[1], a.dout[1], a.queries - query, a.width);
            add_rows(dk_sum, ds, q_head + query * a.q[1], a.q[1], a.queries - query, a.width);
        }
    }
    store_row(dk + batch * a.dk[0] + key * a.dk[1] + group * a.dk[2], dk_sum, (A)a.scale, a.width);
    store_row(dv + batch * a.dv[0] + key * a.dv[1] + group * a.dv[2], dv_sum, A(1), a.width);
}

// The gradient of the bias (samples, heads, queries, keys), zero before, where samples are the batch, or 1 for the sum
// over the batch in order.
template <class Drops>
INLINE void backward_bias(const T* q, const T* k, const T* v, const T* dout, const A* lse, const A* delta, A* dbias, i64 samples, i64 all, const Attention& a, Drops drops) {
    SHARED(A, rows, 2 * WARPS * MAX_WIDTH);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 query = (i64)blockIdx.x * WARPS + warp;
    const i64 head = head_and_sample(a.heads).head, sample = head_and_sample(a.heads).sample;
    if (query >= a.queries || sample >= samples) return;
    const i64 begin = samples == all ? sample : 0, end = samples == all ? sample + 1 : all;
    const i64 group = head * a.groups / a.heads;
    A *q_row = rows + 2 * warp * MAX_WIDTH, *dout_row = q_row + MAX_WIDTH;
    const A cap = (A)a.softcap;
    dbias += ((sample * a.heads + head) * a.queries + query) * a.keys;
    for (i64 batch = begin; batch < end; batch++) {
        const i64 at = (batch * a.heads + head) * a.queries + query;
        const Range seen = keys_of(a, batch, query);
        __syncwarp();  // the rows of the sample before have been read
        keep_row(q_row, q + batch * a.q[0] + query * a.q[1] + head * a.q[2], a.width);
        keep_row(dout_row, dout + batch * a.dout[0] + query * a.dout[1] + head * a.dout[2], a.width);
        __syncwarp();
        // A lane has the same keys of every sample.
        for (i64 key = lane; key < seen.end; key += 32) {
            if (!seen.has(key)) continue;
            A s = (A)a.scale * dot(q_row, k + batch * a.k[0] + group * a.k[2] + key * a.k[1], a.width);
            if (cap > A(0)) s = soft_cap(s, cap);
            if (a.bias) s += bias_of(a, batch, head, query, key);
            const A m = drops.factor(batch, head, query, key);
            const A dp = m * dot(dout_row, v + batch * a.v[0] + group * a.v[2] + key * a.v[1], a.width);
            dbias[key] += probability(s, lse[at]) * (dp - delta[at]);
        }
    }
}

KERNEL(128, attention_rows)(const T* q, const T* k, const T* v, T* out, A* lse, Attention a) {
    forward(q, k, v, out, lse, a, KeepAll());
}
KERNEL(128, attention_rows_dropout)
(const T* q, const T* k, const T* v, T* out, A* lse, Attention a, u64 key, const Step* step, u32 last_dropped, double scale, Place place) {
    forward(q, k, v, out, lse, a, DropSome(key, step, last_dropped, scale, place));
}

KERNEL(128, attention_rows_backward_queries)
(const T* q, const T* k, const T* v, const T* dout, const A* lse, const A* delta, T* dq, Attention a) {
    backward_queries(q, k, v, dout, lse, delta, dq, a, KeepAll());
}
KERNEL(128, attention_rows_backward_queries_dropout)
(const T* q, const T* k, const T* v, const T* dout, const A* lse, const A* delta, T* dq, Attention a, u64 key, const Step* step, u32 last_dropped, double scale, Place place) {
    backward_queries(q, k, v, dout, lse, delta, dq, a, DropSome(key, step, last_dropped, scale, place));
}

KERNEL(128, attention_rows_backward_keys)
(const T* q, const T* k, const T* v, const T* dout, const A* lse, const A* delta, T* dk, T* dv, Attention a) {
    backward_keys(q, k, v, dout, lse, delta, dk, dv, a, KeepAll());
}
KERNEL(128, attention_rows_backward_keys_dropout)
(const T* q, const T* k, const T* v, const T* dout, const A* lse, const A* delta, T* dk, T* dv, Attention a, u64 key, const Step* step, u32 last_dropped, double scale, Place place) {
    backward_keys(q, k, v, dout, lse, delta, dk, dv, a, DropSome(key, step, last_dropped, scale, place));
}

KERNEL(128, attention_rows_backward_bias)
(const T* q, const T* k, const T* v, const T* dout, const A* lse, const A* delta, A* dbias, i64 samples, i64 all, Attention a) {
    backward_bias(q, k, v, dout, lse, delta, dbias, samples, all, a, KeepAll());
}
KERNEL(128, attention_rows_backward_bias_dropout)
(const T* q, const T* k, const T* v, const T* dout, const A* lse, const A* delta, A* dbias, i64 samples, i64 all, Attention a, u64 key, const Step* step, u32 last_dropped, double scale, Place place) {
    backward_bias(q, k, v, dout, lse, delta, dbias, samples, all, a, DropSome(key, step, last_dropped, scale, place));
}
