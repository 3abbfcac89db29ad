//! What a forward pass needs to know besides its input: seed, step, mode, and which samples and
//! positions of the global batch it sees. From these come all random numbers, so nothing depends on
//! the layout.

use ferrotron_tensor::{Place, RandomKey, Result};
use smallvec::{SmallVec, smallvec};

/// Whether dropout drops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Training: dropout is active.
    Train,
    /// Evaluation and generation: dropout is the identity.
    Eval,
}

/// Which part of a global dim is present: (offset, length) pieces in local order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// Size of the whole dim.
    pub global: usize,
    /// The pieces that are here.
    pub pieces: SmallVec<[(usize, usize); 2]>,
}

impl Extent {
    /// All of it.
    pub fn whole(size: usize) -> Extent {
        Extent::part(size, 0, size)
    }

    /// One piece.
    pub fn part(global: usize, offset: usize, len: usize) -> Extent {
        Extent { global, pieces: smallvec![(offset, len)] }
    }
}

/// The arguments of a forward pass that are the same for every layer.
///
/// ```
/// use ferrotron_nn::{Context, Mode};
/// // The second micro-batch of 4 samples in a global batch of 8, sequences of 128 tokens.
/// let ctx = Context::new(1234, 7, Mode::Train, 8, 128).micro_batch(4, 4);
/// assert_eq!(ctx.batch.pieces[0], (4, 4));
/// ```
#[derive(Debug, Clone)]
pub struct Context {
    /// Seed of the run.
    pub seed: u64,
    /// Training step, from 0.
    pub step: u64,
    /// Whether dropout drops.
    pub mode: Mode,
    /// Samples of the global batch that are here.
    pub batch: Extent,
    /// Positions of the sequence that are here.
    pub sequence: Extent,
}

impl Context {
    /// A pass over a whole global batch of sequences.
    pub fn new(
        seed: u64,
        step: u64,
        mode: Mode,
        global_batch: usize,
        seq_length: usize,
    ) -> Context {
        Context {
            seed,
            step,
            mode,
            batch: Extent::whole(global_batch),
            sequence: Extent::whole(seq_length),
        }
    }

    /// The same pass over the `len` samples from `offset` of the global batch.
    #[must_use]
    pub fn micro_batch(mut self, offset: usize, len: usize) -> Context {
        self.batch = Extent::part(self.batch.global, offset, len);
        self
    }

    /// The random stream of `site`, a module's global path.
    pub fn key(&self, site: &str) -> RandomKey {
        RandomKey::new(self.seed, self.step, site)
    }

    /// The place of a (batch, sequence, features..) activation whose features are all here.
    pub fn place(&self, features: &[usize]) -> Result<Place> {
        let mut global = vec![self.batch.global, self.sequence.global];
        global.extend(features);
        let whole: Vec<[(usize, usize); 1]> = features.iter().map(|&size| [(0, size)]).collect();
        let mut pieces: Vec<&[(usize, usize)]> = vec![&self.batch.pieces, &self.sequence.pieces];
        pieces.extend(whole.iter().map(|piece| piece.as_slice()));
        Place::new(&global, &pieces)
    }
}
