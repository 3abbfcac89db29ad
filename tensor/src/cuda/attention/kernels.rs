//! Names and sizes of the attention kernels.

use crate::ops::attention::config::AttentionDropout;
use crate::{DType, Error, Result};

/// Rows of a tensor-core tile.
pub(super) const ROWS: usize = 64;

/// The kernel family for a call.
#[derive(Clone, Copy)]
pub(super) enum AttentionKernels {
    /// Tensor cores, for head dims of at most this many elements.
    Tiles(usize),
    /// One warp per row.
    Rows,
}

impl AttentionKernels {
    pub(super) fn new(op: &'static str, dtype: DType, width: usize) -> Result<AttentionKernels> {
        let (kernels, most) = match (dtype, width) {
            (DType::BF16 | DType::F16, 0..=64) => (AttentionKernels::Tiles(64), 128),
            (DType::BF16 | DType::F16, _) => (AttentionKernels::Tiles(128), 128),
            _ => (AttentionKernels::Rows, 256),
        };
        match width <= most {
            true => Ok(kernels),
            false => Err(Error::shape(
                op,
                format!("a GPU takes heads of at most {most} elements in {dtype}, got {width}"),
            )),
        }
    }

    /// The file of the kernels, with or without a bias of the scores.
    pub(super) fn file(self, biased: bool) -> &'static str {
        match self {
            AttentionKernels::Tiles(_) if biased => "attention_bias",
            AttentionKernels::Tiles(_) => "attention",
            AttentionKernels::Rows => "attention_rows",
        }
    }

    /// Number of blocks for `rows` queries or keys.
    pub(super) fn blocks(self, rows: usize) -> usize {
        match self {
            AttentionKernels::Tiles(_) => rows.div_ceil(ROWS),
            AttentionKernels::Rows => rows.div_ceil(4),
        }
    }

    /// Bytes of shared memory for `rows` rows of a tile; each row is padded by 8 elements.
    pub(super) fn shared(self, rows: usize) -> usize {
        match self {
            AttentionKernels::Tiles(width) => rows * (width + 8) * 2,
            AttentionKernels::Rows => 0,
        }
    }

    /// The kernel of `pass` for these heads, with or without dropout.
    pub(super) fn name(self, pass: Pass, dropout: Option<&AttentionDropout>) -> &'static str {
        let [plain, dropping] = match (self, pass) {
            (AttentionKernels::Tiles(64), Pass::Forward) => {
                ["attention_64", "attention_dropout_64"]
            }
            (AttentionKernels::Tiles(_), Pass::Forward) => {
                ["attention_128", "attention_dropout_128"]
            }
            (AttentionKernels::Tiles(64), Pass::Queries) => {
                ["attention_backward_queries_64", "attention_backward_queries_dropout_64"]
            }
            (AttentionKernels::Tiles(_), Pass::Queries) => {
                ["attention_backward_queries_128", "attention_backward_queries_dropout_128"]
            }
            (AttentionKernels::Tiles(64), Pass::Keys) => {
                ["attention_backward_keys_64", "attention_backward_keys_dropout_64"]
            }
            (AttentionKernels::Tiles(_), Pass::Keys) => {
                ["attention_backward_keys_128", "attention_backward_keys_dropout_128"]
            }
            (AttentionKernels::Tiles(64), Pass::Bias) => {
                ["attention_backward_bias_64", "attention_backward_bias_dropout_64"]
            }
            (AttentionKernels::Tiles(_), Pass::Bias) => {
                ["attention_backward_bias_128", "attention_backward_bias_dropout_128"]
            }
            (AttentionKernels::Rows, Pass::Bias) => {
                ["attention_rows_backward_bias", "attention_rows_backward_bias_dropout"]
            }
            (AttentionKernels::Rows, Pass::Forward) => ["attention_rows", "attention_rows_dropout"],
            (AttentionKernels::Rows, Pass::Queries) => {
                ["attention_rows_backward_queries", "attention_rows_backward_queries_dropout"]
            }
            (AttentionKernels::Rows, Pass::Keys) => {
                ["attention_rows_backward_keys", "attention_rows_backward_keys_dropout"]
            }
        };
        if dropout.is_some() { dropping } else { plain }
    }
}

/// A pass of attention, named by its outputs.
#[derive(Clone, Copy)]
pub(super) enum Pass {
    /// out and lse.
    Forward,
    /// dq.
    Queries,
    /// dk and dv.
    Keys,
    /// The gradient of the bias.
    Bias,
}

impl Pass {
    /// Number of matrix products for each tile: the scores, and those with the probabilities or their gradients.
    pub(super) fn products(self) -> usize {
        match self {
            Pass::Forward | Pass::Bias => 2,
            Pass::Queries => 3,
            Pass::Keys => 4,
        }
    }
}
