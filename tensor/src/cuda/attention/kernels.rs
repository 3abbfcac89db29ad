//! Names and sizes of the attention kernels.

use ferrotron_cuda::attention::{Blocks, Pass};

use crate::ops::attention::config::AttentionDropout;
use crate::{DType, Error, Result};

/// Head dims that tiles are made for; other heads take the next one. Above 64 at most a third of the products are with
/// padding. More of them would take longer to compile, before the first step.
const TILES: [usize; 3] = [64, 96, 128];

/// The kernels of a family by pass, without and with dropout.
macro_rules! names {
    ($family:literal, $tile:literal) => {
        [
            [concat!($family, $tile), concat!($family, "_dropout", $tile)],
            [
                concat!($family, "_backward_queries", $tile),
                concat!($family, "_backward_queries_dropout", $tile),
            ],
            [
                concat!($family, "_backward_keys", $tile),
                concat!($family, "_backward_keys_dropout", $tile),
            ],
            [
                concat!($family, "_backward_bias", $tile),
                concat!($family, "_backward_bias_dropout", $tile),
            ],
        ]
    };
}

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
        let (kernels, most) = match dtype {
            DType::BF16 | DType::F16 => {
                let tile = TILES.into_iter().find(|&tile| width <= tile);
                (tile.map(AttentionKernels::Tiles), TILES[TILES.len() - 1])
            }
            _ => ((width <= 256).then_some(AttentionKernels::Rows), 256),
        };
        kernels.ok_or_else(|| {
            let message =
                format!("a GPU takes heads of at most {most} elements in {dtype}, got {width}");
            Error::shape(op, message)
        })
    }

    /// The file of the kernels, with or without a bias of the scores.
    pub(super) fn file(self, biased: bool) -> &'static str {
        match self {
            AttentionKernels::Tiles(_) if biased => "attention_bias",
            AttentionKernels::Tiles(_) => "attention",
            AttentionKernels::Rows => "attention_rows",
        }
    }

    /// The blocks of `pass`, which is plain without a bias and without dropout.
    pub(super) fn blocks(self, pass: Pass, plain: bool) -> Blocks {
        match self {
            AttentionKernels::Tiles(width) => Blocks::new(pass, width, plain),
            AttentionKernels::Rows => Blocks { rows: 4, threads: 128, shared: 0 },
        }
    }

    /// The kernel of `pass` for these heads, with or without dropout.
    pub(super) fn name(self, pass: Pass, dropout: Option<&AttentionDropout>) -> &'static str {
        let names = match self {
            AttentionKernels::Tiles(64) => names!("attention", "_64"),
            AttentionKernels::Tiles(96) => names!("attention", "_96"),
            AttentionKernels::Tiles(_) => names!("attention", "_128"),
            AttentionKernels::Rows => names!("attention_rows", ""),
        };
        names[pass as usize][usize::from(dropout.is_some())]
    }
}
