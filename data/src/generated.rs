//! Samples that a function makes.

use super::{Batch, FiniteSamples, Samples};
use ferrotron_tensor::Result;

/// Samples of `seq_length` positions that `batch(first_sample, samples)` makes: the same for equal arguments, on every
/// rank. An evaluation takes the first `len`; training takes as many as it needs.
///
/// ```
/// use ferrotron_data::{Batch, GeneratedSamples, Samples};
/// let batch = |first: u64, n: usize| {
///     let x: Vec<f32> = (0..n as u64).map(|i| (first + i) as f32).collect();
///     Batch::new(first, n, 1).with("x", x, &[n, 1])
/// };
/// let numbers = GeneratedSamples::new(1, 100, batch);
/// assert_eq!(numbers.batch(8, 2)?.get::<f32>("x")?, [8.0, 9.0]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct GeneratedSamples<F> {
    seq_length: usize,
    len: u64,
    batch: F,
}

impl<F: Fn(u64, usize) -> Result<Batch> + Send + Sync> GeneratedSamples<F> {
    /// Samples that `batch` makes.
    pub fn new(seq_length: usize, len: u64, batch: F) -> GeneratedSamples<F> {
        GeneratedSamples { seq_length, len, batch }
    }
}

impl<F: Fn(u64, usize) -> Result<Batch> + Send + Sync> Samples for GeneratedSamples<F> {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        (self.batch)(first_sample, micro_batch)
    }

    fn seq_length(&self) -> usize {
        self.seq_length
    }
}

impl<F: Fn(u64, usize) -> Result<Batch> + Send + Sync> FiniteSamples for GeneratedSamples<F> {
    fn len(&self) -> u64 {
        self.len
    }

    fn has_blank_samples(&self) -> bool {
        false
    }
}
