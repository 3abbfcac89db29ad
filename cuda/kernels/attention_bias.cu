// Attention with a bias of the scores: the kernels of attention.cu, with the bias added after the soft cap, and the gradient
// of the bias, which is ds_ij before the slope of the soft cap, summed over the samples that share it.

constexpr bool BIASED = true;

#include "philox.cuh"
#include "attention.cuh"
#include "mma.cuh"
#include "attention_warps.cuh"
#include "attention_tiles.cuh"
#include "attention_scores.cuh"
#include "attention_forward.cuh"
#include "attention_backward.cuh"
#include "attention_passes.cuh"

KERNEL(128, attention_backward_keys_64)(GRADIENTS, T* dk, T* dv, Attention a) BACKWARD_KEYS(64, KeepAll())
KERNEL(128, attention_backward_keys_96)(GRADIENTS, T* dk, T* dv, Attention a) BACKWARD_KEYS(96, KeepAll())
KERNEL(128, attention_backward_keys_128)(GRADIENTS, T* dk, T* dv, Attention a) BACKWARD_KEYS(128, KeepAll())

// The gradient of the bias (samples, heads, queries, keys) for 64 queries and 64 keys, where samples are the batch, or 1
// for the sum over the batch in order.
template <int D, class Drops>
INLINE void backward_bias(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, float* dbias, i64 samples, i64 all, const Attention& a, Drops drops) {
    constexpr int ROWS = 64, KEYS = 64, TILE = D + PAD;
    DYNAMIC_SHARED(T, memory);
    T *q_tile = memory, *dout_tile = q_tile + ROWS * TILE, *k_tile = dout_tile + ROWS * TILE, *v_tile = k_tile + KEYS * TILE;
    const int lane = threadIdx.x & 31, warp = warp_number();
    const i64 tiles = (a.queries + ROWS - 1) / ROWS;
    const i64 first = blockIdx.x % tiles * ROWS, key = blockIdx.x / tiles * KEYS, own_first = first + warp * 16;
    const i64 head = head_and_sample(a.heads).head, sample = head_and_sample(a.heads).sample;
    if (sample >= samples) return;
    const i64 group = head * a.groups / a.heads;
    const i64 begin = samples == all ? sample : 0, end = samples == all ? sample + 1 : all;
    float sum[KEYS / 8][4] = {};
    for (i64 batch = begin; batch < end; batch++) {
        const Range tile = keys_of_tile(a, batch, first, ROWS);
        if (tile.start >= key + KEYS || tile.end <= key) continue;  // no query of the tile sees these keys
        load_rows<D, ROWS>(q_tile, q + batch * a.q[0] + head * a.q[2], a.q[1], first, a.queries, a.width);
        load_rows<D, ROWS>(dout_tile, dout + batch * a.dout[0] + head * a.dout[2], a.dout[1], first, a.queries, a.width);
        load_rows<D, KEYS>(k_tile, k + batch * a.k[0] + group * a.k[2], a.k[1], key, a.keys, a.width);
        load_rows<D, KEYS>(v_tile, v + batch * a.v[0] + group * a.v[2], a.v[1], key, a.keys, a.width);
        copy_commit();
        const u32 kept = drops.template rows_of_queries<KEYS / 8>(batch, head, own_first + lane / 4, key + lane % 4 * 2);
        float row_lse[2], row_delta[2];
        Keys seen[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const i64 row = own_first + lane / 4 + half * 8;
            const i64 at = (batch * a.heads + head) * a.queries + (row < a.queries ? row : 0);
            row_lse[half] = subtracted(lse[at]);
            row_delta[half] = delta[at];
            seen[half] = keys_seen(a, batch, row);
        }
        copy_wait<0>();
        __syncthreads();
        float s[1][KEYS / 8][4] = {}, dp[1][KEYS / 8][4] = {};
        multiply_rows<D, KEYS / 8>(s, Rows<D, 1, false, ROWS>(q_tile + warp * 16 * TILE), k_tile);
        multiply_rows<D, KEYS / 8>(dp, Rows<D, 1, false, ROWS>(dout_tile + warp * 16 * TILE), v_tile);
        score_gradients<KEYS / 8, false>(
            s[0], dp[0], a, true, [&](int n, int e) { return seen[e / 2].has((int)key + n * 8 + lane % 4 * 2 + e % 2); },
            [&](int, int e, float& lse, float& delta) {
                lse = row_lse[e / 2];
                delta = row_delta[e / 2];
            },
            [&](int n, int e) {
                return bias_of(a, batch, head, own_first + lane / 4 + e / 2 * 8, key + n * 8 + lane % 4 * 2 + e % 2);
            },
            [&](int n, int e) { return drops.factor(kept, 4 * n + e); });
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum[n][e] += dp[0][n][e];
        __syncthreads();  // the tiles have been read
    }
    dbias += (sample * a.heads + head) * a.queries * a.keys;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const i64 row = own_first + lane / 4 + e / 2 * 8, column = key + n * 8 + lane % 4 * 2 + e % 2;
            if (row < a.queries && column < a.keys) dbias[row * a.keys + column] = sum[n][e];
        }
}

// The grid is (tiles of queries x tiles of keys, heads, samples), folded as `head_and_sample` reads it.
#define BACKWARD_BIAS(D, drops) { backward_bias<D>(q, k, v, dout, lse, delta, dbias, samples, all, a, drops); }
#define SAMPLES float *dbias, i64 samples, i64 all
KERNEL(128, attention_backward_bias_64)(GRADIENTS, SAMPLES, Attention a) BACKWARD_BIAS(64, KeepAll())
KERNEL(128, attention_backward_bias_96)(GRADIENTS, SAMPLES, Attention a) BACKWARD_BIAS(96, KeepAll())
KERNEL(128, attention_backward_bias_128)(GRADIENTS, SAMPLES, Attention a) BACKWARD_BIAS(128, KeepAll())
KERNEL(128, attention_backward_bias_dropout_64)(GRADIENTS, SAMPLES, Attention a, DROPPING) BACKWARD_BIAS(64, DROPS)
KERNEL(128, attention_backward_bias_dropout_96)(GRADIENTS, SAMPLES, Attention a, DROPPING) BACKWARD_BIAS(96, DROPS)
KERNEL(128, attention_backward_bias_dropout_128)(GRADIENTS, SAMPLES, Attention a, DROPPING) BACKWARD_BIAS(128, DROPS)
