//! The memory limit of a loss's logits.

use ferrotron_tensor::Device;

/// Bytes of the logits that a loss has at once: of all tokens if they fit, else of a chunk.
///
/// On a GPU a chunk has to fill the multiprocessors: 1 GiB is 10,000 tokens of GPT-2's 50,257 classes in 16 bits. It does not
/// depend on the GPU's memory, so that memory can be predicted without the GPU.
pub(crate) fn max_logits_bytes(device: &Device) -> usize {
    if device.gpu().is_some() { 1 << 30 } else { 256 << 20 }
}
