// Attention by products of warpgroups, for sm_90a: the passes of attention.cu where they gain the most. Formulas, masks and
// softmax are the same text; tiles lie otherwise in shared memory, and four warps multiply together.
//
// A warpgroup has 64 rows. A block has two, which share the tiles of the other operand, and a multiprocessor has two blocks, so
// that products of one warpgroup run while others compute exponentials; one, where gradients take the registers of both.

constexpr bool BIASED = false;

#include "philox.cuh"
#include "attention.cuh"
#include "mma.cuh"
#include "wgmma.cuh"
#include "attention_warps.cuh"
#include "attention_warpgroup_tiles.cuh"
#include "attention_scores.cuh"
#include "attention_forward.cuh"
#include "attention_backward.cuh"

KERNEL(256, 2, attention_64)(OPERANDS, T* out, float* lse, Attention a) FORWARD(64, KeepAll())
KERNEL(256, 2, attention_96)(OPERANDS, T* out, float* lse, Attention a) FORWARD(96, KeepAll())
KERNEL(256, 2, attention_128)(OPERANDS, T* out, float* lse, Attention a) FORWARD(128, KeepAll())
KERNEL(256, 2, attention_backward_queries_64)(GRADIENTS, T* dq, Attention a) BACKWARD_QUERIES(64, KeepAll())
KERNEL(256, 1, attention_backward_queries_96)(GRADIENTS, T* dq, Attention a) BACKWARD_QUERIES(96, KeepAll())
KERNEL(256, 1, attention_backward_queries_128)(GRADIENTS, T* dq, Attention a) BACKWARD_QUERIES(128, KeepAll())
KERNEL(256, 1, attention_backward_keys_64)(GRADIENTS, T* dk, T* dv, Attention a) BACKWARD_KEYS(64, KeepAll())
KERNEL(256, 1, attention_backward_keys_96)(GRADIENTS, T* dk, T* dv, Attention a) BACKWARD_KEYS(96, KeepAll())
KERNEL(256, 1, attention_backward_keys_128)(GRADIENTS, T* dk, T* dv, Attention a) BACKWARD_KEYS(128, KeepAll())
