//! Options of weight updates and of the placement of optimizer state.

use ferrotron_tensor::MemoryKind;

/// The update of 16-bit weights; other weights are updated in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WeightUpdate {
    /// Update an f32 copy, the master weights, and round it to the weights: Micikevicius et al., "Mixed Precision
    /// Training", arXiv 1710.03740, section 3.1.
    #[default]
    MasterCopy,
    /// Update in place. Changes below half the spacing of the weights are lost, unless rounding is stochastic.
    InPlace,
}

/// The rounding of updated weights to 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Rounding {
    /// Rounds to nearest even.
    #[default]
    Nearest,
    /// Stochastic rounding: up or down at random with expectation equal to the value, by the element's index in the
    /// global tensor. See [`round`](ferrotron_tensor::ops::round).
    Stochastic {
        /// Seed of the run.
        seed: u64,
    },
}

/// Options of weight updates and of the placement of optimizer state.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct UpdateConfig {
    /// The update of 16-bit weights.
    pub weights: WeightUpdate,
    /// The rounding of 16-bit weights.
    pub rounding: Rounding,
    /// Memory kind of moments and master weights. ZeRO-Offload, Ren et al., arXiv 2101.06840, keeps them in host
    /// memory.
    pub states: MemoryKind,
    /// Decay of an exponential moving average of the weights, in f32 (f64 for f64 weights): Polyak and Juditsky, SIAM
    /// J. Control Optim. 30 (1992), with exponential weights. The average is a state like others. After the first step
    /// it is the weights, as in `torch.optim.swa_utils.AveragedModel`; a skipped step leaves it alone.
    pub ema_decay: Option<f64>,
}
