//! The blocks of the tensor-core kernels of attention: what the host must know of `kernels/attention_*.cuh`.

/// A pass of attention, named by its outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
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
    pub fn products(self) -> usize {
        match self {
            Pass::Forward | Pass::Bias => 2,
            Pass::Queries => 3,
            Pass::Keys => 4,
        }
    }
}

/// The size of a kernel's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocks {
    /// Rows of the result that a block computes: keys for dk and dv, else queries.
    pub rows: usize,
    /// Threads of a block.
    pub threads: usize,
    /// Bytes of dynamic shared memory of a block, at most 97 KiB: small GPUs have 99, of which masks and statistics take
    /// some. By products of warpgroups at most 128 KiB of 227.
    pub shared: usize,
}

impl Blocks {
    /// Returns the blocks of `pass` in tiles for heads of `width` elements, which is 64, 96 or 128. A kernel is `plain`
    /// without a bias and without dropout, which take registers.
    ///
    /// ```
    /// use ferrotron_cuda::attention::{Blocks, Pass};
    /// let blocks = Blocks::new(Pass::Forward, 64, true);
    /// assert_eq!((blocks.rows, blocks.threads, blocks.shared), (128, 128, 256 * 72 * 2));
    /// ```
    pub fn new(pass: Pass, width: usize, plain: bool) -> Blocks {
        // Rows of tiles in shared memory: queries and, for gradients, as many of dout; keys and values.
        let (rows, threads, tiles) = match pass {
            Pass::Forward if plain => (128, 128, 128 + 2 * 64),
            Pass::Forward => (64, 128, 64 + 2 * 64),
            // Two tiles of keys, and two of values unless that is too much.
            Pass::Queries => (128, 128, 2 * 128 + if width == 128 { 3 * 32 } else { 4 * 32 }),
            // Two tiles of queries, which take the room of keys and values in a plain kernel.
            Pass::Keys if plain => (128, if width == 64 { 128 } else { 256 }, 4 * 64),
            Pass::Keys if width == 64 => (128, 128, 2 * 128 + 4 * 32),
            Pass::Keys => (64, 128, 2 * 64 + 4 * 32),
            Pass::Bias => (64, 128, 4 * 64),
        };
        // Each row is padded by 8 elements.
        Blocks { rows, threads, shared: tiles * (width + 8) * 2 }
    }

    /// Returns the blocks of a plain `pass` by products of warpgroups (`attention_warpgroup.cu`), if it has such kernels.
    ///
    /// ```
    /// use ferrotron_cuda::attention::{Blocks, Pass};
    /// let blocks = Blocks::of_warpgroups(Pass::Forward, 64).unwrap();
    /// assert_eq!((blocks.rows, blocks.threads, blocks.shared), (128, 256, 384 * 64 * 2));
    /// ```
    pub fn of_warpgroups(pass: Pass, width: usize) -> Option<Blocks> {
        // Rows of tiles: those of the block, and for gradients as many of dout or of values; two tiles each of the others.
        let tiles = match pass {
            Pass::Forward => 128 + 4 * 64,
            Pass::Queries | Pass::Keys => 2 * 128 + 4 * 64,
            Pass::Bias => return None,
        };
        Some(Blocks { rows: 128, threads: 256, shared: tiles * width * 2 })
    }
}
