// The kernels of attention.cu and attention_bias.cu for each width of a head, without and with dropout. Included after
// attention_backward.cuh. The host gives the grid, (tiles of rows, heads, batch) with key-value heads for dk and dv, and the
// shared memory for tiles (`cuda/src/attention.rs`).

KERNEL(128, attention_64)(OPERANDS, T* out, float* lse, Attention a) FORWARD(64, KeepAll())
KERNEL(128, attention_96)(OPERANDS, T* out, float* lse, Attention a) FORWARD(96, KeepAll())
KERNEL(128, attention_128)(OPERANDS, T* out, float* lse, Attention a) FORWARD(128, KeepAll())
KERNEL(128, attention_dropout_64)(OPERANDS, T* out, float* lse, Attention a, DROPPING) FORWARD(64, DROPS)
KERNEL(128, attention_dropout_96)(OPERANDS, T* out, float* lse, Attention a, DROPPING) FORWARD(96, DROPS)
KERNEL(128, attention_dropout_128)(OPERANDS, T* out, float* lse, Attention a, DROPPING) FORWARD(128, DROPS)

KERNEL(128, attention_backward_queries_64)(GRADIENTS, T* dq, Attention a) BACKWARD_QUERIES(64, KeepAll())
KERNEL(128, attention_backward_queries_96)(GRADIENTS, T* dq, Attention a) BACKWARD_QUERIES(96, KeepAll())
KERNEL(128, attention_backward_queries_128)(GRADIENTS, T* dq, Attention a) BACKWARD_QUERIES(128, KeepAll())
KERNEL(128, attention_backward_queries_dropout_64)(GRADIENTS, T* dq, Attention a, DROPPING) BACKWARD_QUERIES(64, DROPS)
KERNEL(128, attention_backward_queries_dropout_96)(GRADIENTS, T* dq, Attention a, DROPPING) BACKWARD_QUERIES(96, DROPS)
KERNEL(128, attention_backward_queries_dropout_128)(GRADIENTS, T* dq, Attention a, DROPPING) BACKWARD_QUERIES(128, DROPS)

KERNEL(128, attention_backward_keys_dropout_64)(GRADIENTS, T* dk, T* dv, Attention a, DROPPING) BACKWARD_KEYS(64, DROPS)
KERNEL(128, attention_backward_keys_dropout_96)(GRADIENTS, T* dk, T* dv, Attention a, DROPPING) BACKWARD_KEYS(96, DROPS)
KERNEL(128, attention_backward_keys_dropout_128)(GRADIENTS, T* dk, T* dv, Attention a, DROPPING) BACKWARD_KEYS(128, DROPS)
