//! The storage format of saved activations.

use ferrotron_tensor::DType;

/// The storage format of saved activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ActivationCompressionConfig {
    /// 16-bit type to which f32 activations are rounded; backward widens them. Statistics, such as those of norms and
    /// attention, are not rounded.
    pub dtype: Option<DType>,
    /// Encoding of zeros in the result of a ReLU.
    pub zeros: ZeroEncoding,
}

/// Encoding of zeros in an activation with many zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ZeroEncoding {
    /// Zeros are stored like other numbers.
    #[default]
    Kept,
    /// A bitmap marks the nonzero elements, and only these are stored. Lossless; activations with too few zeros are
    /// stored as they are.
    Bitmap,
}
