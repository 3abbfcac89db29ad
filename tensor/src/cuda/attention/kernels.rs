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
    /// Tensor cores, for head dims of at most `width` elements.
    Tiles {
        width: usize,
        /// Whether passes that have kernels for products of warpgroups take them: those without a bias and without dropout.
        warpgroups: bool,
    },
    /// One warp per row.
    Rows,
}
use AttentionKernels::{Rows, Tiles};

impl AttentionKernels {
    /// Returns the kernels for heads of `width` elements, with `warpgroups` where these suffice.
    pub(super) fn new(
        op: &'static str,
        dtype: DType,
        width: usize,
        warpgroups: bool,
    ) -> Result<AttentionKernels> {
        let (kernels, most) = match dtype {
            DType::BF16 | DType::F16 => {
                let tile = TILES.into_iter().find(|&tile| width <= tile);
                (tile.map(|width| Tiles { width, warpgroups }), TILES[TILES.len() - 1])
            }
            _ => ((width <= 256).then_some(Rows), 256),
        };
        kernels.ok_or_else(|| {
            let message =
                format!("a GPU takes heads of at most {most} elements in {dtype}, got {width}");
            Error::shape(op, message)
        })
    }

    /// The file of the kernels without a bias of the scores.
    pub(super) fn file(self) -> &'static str {
        match self {
            Tiles { .. } => "attention",
            Rows => "attention_rows",
        }
    }

    /// The file and the blocks of `pass`, with or without a bias of the scores and dropout.
    pub(super) fn pass(self, pass: Pass, biased: bool, drops: bool) -> (&'static str, Blocks) {
        let plain = !biased && !drops;
        match self {
            Tiles { width, warpgroups } => {
                let groups = Blocks::of_warpgroups(pass, width).filter(|_| warpgroups && plain);
                let file = if biased { "attention_bias" } else { self.file() };
                groups.map_or_else(
                    || (file, Blocks::new(pass, width, plain)),
                    |blocks| ("attention_warpgroup", blocks),
                )
            }
            Rows => (self.file(), Blocks { rows: 4, threads: 128, shared: 0 }),
        }
    }

    /// The kernel of `pass` for these heads, with or without dropout.
    pub(super) fn name(self, pass: Pass, dropout: Option<&AttentionDropout>) -> &'static str {
        let names = match self {
            Tiles { width: 64, .. } => names!("attention", "_64"),
            Tiles { width: 96, .. } => names!("attention", "_96"),
            Tiles { .. } => names!("attention", "_128"),
            Rows => names!("attention_rows", ""),
        };
        names[pass as usize][usize::from(dropout.is_some())]
    }
}
