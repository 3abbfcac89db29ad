//! Durations of kernels from their operations, bytes and shapes.
//!
//! On a GPU:
//!
//! - Any kernel takes at least the time of a launch, and that of its bytes at the bandwidth that kernels reach.
//! - A matrix product runs in waves of tiles, one a multiprocessor. The last wave may be partly empty, and each tile
//!   pays for its beginning and end. The fastest of a few tile shapes and divisions of the inner dim is taken, as the
//!   heuristic of a library does.
//! - Fused attention reaches a constant share of the peak, or that of its kernel. Unfused attention is batched products
//!   and passes of softmax and dropout over the scores.
//!
//! On a processor a kernel takes the time of its call, and its operations or bytes at the speed that was measured for it, else
//! at that of its kind.

use ferrotron_models::memory::PlannedDevice;
use ferrotron_tensor::Result;

use crate::cluster::{AttentionKernels, Cluster, GpuSpec, OptimizerPasses};
use crate::record::Launch;

/// The name of all matrix products among the kernels' bandwidths.
pub(crate) const PRODUCT: &str = "product";
/// The name of a copy between a GPU's memory and the host's. Assumed: no kernel runs beside it.
const HOST_COPY: &str = "host_copy";
/// The updates of Adam in mixed precision, with the bytes that they move for each parameter, and those of passes of their own.
/// The one kernel reads the gradient, in 16 bits or in 32, reads and writes moments and master weight (24), and writes the
/// weight in 16 bits (2). In passes, gradients of 16 bits are copied to 32 (6) and read so for the norm (2 more); they are
/// unscaled (8), clipped (8) and read (4); weights are copied back (6).
const UPDATES: [(&str, f64, f64); 2] =
    [("adamw_master", 28.0, 58.0), ("adamw_master_wide", 30.0, 50.0)];
/// Rows and columns of the tiles of a matrix product: five of the eight that NVIDIA's "Matrix Multiplication Background
/// User's Guide" (DU-09799-001, section 2.3, <https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication>)
/// lists for cuBLAS, from the most to the least efficient. Those left out are 256 x 64, 64 x 256 and 64 x 128.
const TILES: [[usize; 2]; 5] = [[256, 128], [128, 256], [128, 128], [128, 64], [64, 64]];
/// A tile of r rows and c columns computes r c products for each r + c loaded elements. It reaches the peak's share
/// 1 / (1 + LOADS (1/r + 1/c)). Assumed: 0.89 for tiles of 128 x 128, 0.80 for 64 x 64, so that small tiles pay only
/// where larger ones leave multiprocessors idle.
const LOADS: f64 = 8.0;
/// Divisions of the inner dim, whose partial sums are added afterwards. Assumed: powers of two, of which 8 fill the
/// multiprocessors of all clusters with the smallest weights' gradients.
const SPLITS: [usize; 4] = [1, 2, 4, 8];
/// Least elements of a part of the inner dim. Assumed: a part is several times `product_setup`.
const SPLIT_INNER: usize = 512;

/// The kind of a kernel, as a report sums them up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KernelKind {
    /// A matrix product.
    Product,
    /// Attention between its projections.
    Attention,
    /// Anything that memory bounds.
    Memory,
}

impl KernelKind {
    /// The kind of a launch.
    pub fn from_launch(launch: &Launch) -> KernelKind {
        match launch.count {
            _ if launch.kernel.starts_with("attention") => KernelKind::Attention,
            0 => KernelKind::Memory,
            _ => KernelKind::Product,
        }
    }
}

/// The duration of a launch.
///
/// Errors if the cluster has no peak for its dtype.
pub fn seconds(launch: &Launch, cluster: &Cluster) -> Result<f64> {
    let gpu = &cluster.gpu;
    if let PlannedDevice::Cpu { .. } = gpu.device {
        return Ok(gpu.launch + on_processor(launch, gpu)?);
    }
    let update = UPDATES.iter().find(|(kernel, ..)| *kernel == launch.kernel);
    let passes = match (cluster.software.optimizer, update) {
        (OptimizerPasses::Unfused, Some((_, fused, unfused))) => unfused / fused,
        _ => 1.0,
    };
    let bytes = passes * launch.bytes as f64;
    if launch.kernel == HOST_COPY {
        return Ok(bytes / gpu.host_bandwidth()? + gpu.launch);
    }
    let memory = bytes / gpu.bandwidth_of(&launch.kernel, bytes);
    let computed = match KernelKind::from_launch(launch) {
        _ if launch.count == 0 => 0.0,
        KernelKind::Product => product(launch, 1, gpu)?,
        _ => match cluster.software.attention {
            AttentionKernels::Fused => {
                let share = gpu.attention_share(&launch.kernel);
                launch.operations() / (gpu.peak(launch.dtype)? * share)
            }
            AttentionKernels::Unfused => unfused_attention(launch, gpu)?,
        },
    };
    Ok(computed.max(memory).max(gpu.launch))
}

/// A kernel of a processor, without its launch: operations and bytes of a product are added, since packing and computing
/// take turns.
fn on_processor(launch: &Launch, gpu: &GpuSpec) -> Result<f64> {
    let (operations, bytes) = (launch.operations(), launch.bytes as f64);
    let memory = |kernel| bytes / gpu.bandwidth_of(kernel, bytes);
    if let Some(rates) = gpu.products.get(&launch.kernel).filter(|_| operations > 0.0) {
        return Ok(operations / rates.rate(operations));
    }
    Ok(match KernelKind::from_launch(launch) {
        KernelKind::Attention if launch.count > 0 => {
            operations / (gpu.peak(launch.dtype)? * gpu.attention_efficiency)
        }
        KernelKind::Memory | KernelKind::Attention => memory(&launch.kernel),
        KernelKind::Product => {
            operations / (gpu.peak(launch.dtype)? * gpu.product_efficiency) + memory(PRODUCT)
        }
    })
}

/// The products of a launch, `count` times.
fn product(launch: &Launch, count: usize, gpu: &GpuSpec) -> Result<f64> {
    let Launch { batch, rows, columns, inner, dtype, .. } = *launch;
    let peak = gpu.peak(dtype)? * gpu.product_efficiency;
    let whole = gpu.bandwidth * gpu.memory_efficiency;
    let one = |[high, wide]: [usize; 2], split: usize| {
        let tiles = batch * rows.div_ceil(high) * columns.div_ceil(wide) * split;
        let waves = tiles.div_ceil(gpu.multiprocessors) as f64;
        let share = 1.0 / (1.0 + LOADS * (1.0 / high as f64 + 1.0 / wide as f64));
        let each = peak * share / gpu.multiprocessors as f64;
        let steps = inner as f64 / split as f64 + gpu.product_setup;
        // Partial sums in f32 are written and read.
        let sums =
            if split == 1 { 0.0 } else { (8 * split * batch * rows * columns) as f64 / whole };
        waves * 2.0 * (high * wide) as f64 * steps / each + sums
    };
    let divided = |split: &&usize| **split == 1 || inner / **split >= SPLIT_INNER;
    let choices =
        SPLITS.iter().filter(divided).flat_map(|split| TILES.map(|tile| one(tile, *split)));
    Ok(count as f64 * choices.fold(f64::INFINITY, f64::min))
}

/// Two products of each pass, over all pairs of positions, and the passes over the scores: forward, softmax reads and
/// writes them; in the pass of dq its backward reads two and writes one. Dropout reads, writes, and keeps a mask of bytes.
fn unfused_attention(launch: &Launch, gpu: &GpuSpec) -> Result<f64> {
    let backward = launch.kernel.contains("backward");
    let size = launch.dtype.size();
    let scores = launch.batch * launch.rows * launch.columns;
    let dropout = if launch.kernel.contains("dropout") { 2 * size + 1 } else { 0 };
    let bytes = match (backward, launch.kernel.contains("keys")) {
        (false, _) => 2 * size + dropout,
        (true, false) => 3 * size + dropout,
        (true, true) => 0,
    };
    let bandwidth = gpu.bandwidth * gpu.memory_efficiency;
    let products = product(launch, 2, gpu)?.max((2 * size * scores) as f64 / bandwidth);
    let kernels = if bytes == 0 { 0.0 } else { 2.0 * gpu.launch };
    Ok(products + ((bytes * scores) as f64 / bandwidth).max(kernels))
}
