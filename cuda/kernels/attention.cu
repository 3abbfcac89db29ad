// Scaled-dot-product attention without a T x S matrix, on tensor cores, multi-head and grouped-query (Dao et al.,
// "FlashAttention", 2022, and "FlashAttention-2", 2023, for the order of the loops):
//
// - forward: s = scale q_i . k_j, lse_i = log sum_j exp(s_ij), p_ij = exp(s_ij - lse_i), out_i = sum_j p_ij v_j;
// - backward: dp_ij = dout_i . v_j, delta_i = dout_i . out_i, ds_ij = p_ij (dp_ij - delta_i),
//   dq_i = scale sum_j ds_ij k_j, dk_j = scale sum_i ds_ij q_i, dv_j = sum_i p_ij dout_i;
// - with a soft cap c, s_ij = c tanh(x_ij / c) where x_ij = scale q_i . k_j, and dq and dk take ds_ij (1 - (s_ij / c)^2);
// - with dropout, whose factors m_ij are 0 or 1 / (1 - probability): out_i = sum_j m_ij p_ij v_j,
//   dp_ij = m_ij (dout_i . v_j), dv_j = sum_i m_ij p_ij dout_i.
//
// A warp has 32 rows, or 16 where registers are scarce: queries in forward and for dq, keys for dk and dv. What it loads of
// the other operand serves all of them, since reading shared memory would else take longer than the products. The next tile
// is copied while one is multiplied. Sums are f32 in a fixed order, since no block adds to another's result; p and ds are
// rounded to the element type for their products. Heads narrower than the tile are padded with zeros; heads begin at
// multiples of 16 bytes.

constexpr bool BIASED = false;

#include "philox.cuh"
#include "attention.cuh"
#include "mma.cuh"
#include "attention_warps.cuh"
#include "attention_tiles.cuh"
#include "attention_scores.cuh"
#include "attention_forward.cuh"
#include "attention_backward.cuh"
#include "attention_passes.cuh"

// Wider heads have eight warps of 16 keys, so that keys, values and the sums of both stay in registers.
KERNEL(128, attention_backward_keys_64)(GRADIENTS, T* dk, T* dv, Attention a) BACKWARD_KEYS(64, KeepAll())
KERNEL(256, attention_backward_keys_96)(GRADIENTS, T* dk, T* dv, Attention a) BACKWARD_KEYS(96, KeepAll())
KERNEL(256, attention_backward_keys_128)(GRADIENTS, T* dk, T* dv, Attention a) BACKWARD_KEYS(128, KeepAll())
