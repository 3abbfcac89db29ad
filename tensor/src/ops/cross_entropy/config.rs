//! The options of cross-entropy.

/// Selects the valid tokens, and sets the label smoothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropyConfig {
    /// Tokens with this target are not valid; neither are tokens with negative targets.
    pub ignore_index: i64,
    /// Probability in [0, 1] that is distributed over all classes.
    pub label_smoothing: f64,
}

impl Default for CrossEntropyConfig {
    /// PyTorch's defaults: -100 and 0.
    fn default() -> Self {
        CrossEntropyConfig { ignore_index: -100, label_smoothing: 0.0 }
    }
}
