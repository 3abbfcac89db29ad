//! Losses of a run by step.

/// Losses by step.
#[derive(Debug, Clone, Default)]
pub struct LossCurve {
    /// Loss of each step.
    pub training: Vec<(u64, f64)>,
    /// Loss of each evaluation.
    pub validation: Vec<(u64, f64)>,
}
