//! Descriptions of clusters, read from TOML files: one a cluster, each number with its source.

mod file;

use ferrotron_models::memory::PlannedDevice;
use ferrotron_tensor::{DType, Error, Result};
use std::collections::BTreeMap;

use crate::curve::Curve;
use crate::sharing::Sharing;

/// The name of all kernels that have no bandwidth of their own.
pub(crate) const OTHER: &str = "other";
/// The key of the multiprocessors of a collective.
const CHANNELS: &str = "gpu.collective_multiprocessors";
/// The key of the link to host memory.
const HOST: &str = "gpu.host_gb_per_s";

/// A cluster of equal nodes with equal GPUs, or processors. Bandwidths are in bytes a second, times in seconds.
///
/// ```
/// use ferrotron_planner::Cluster;
/// use ferrotron_tensor::DType;
/// let cluster = Cluster::named("dgx-a100-80")?;
/// assert_eq!((cluster.gpus_per_node, cluster.gpu.peak(DType::BF16)?), (8, 312e12));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    /// Its name or file.
    pub name: String,
    /// One line on it.
    pub description: String,
    /// Number of GPUs of a node, or of ranks on its processors.
    pub gpus_per_node: usize,
    /// Cores that the ranks of a node share, if these are no GPUs.
    pub cores: Option<Cores>,
    /// Each GPU.
    pub gpu: GpuSpec,
    /// The links between GPUs of a node.
    pub node: Link,
    /// Seconds of single collectives between two ranks of a node by bytes, in place of that link.
    pub collectives: BTreeMap<String, Curve>,
    /// The links between nodes, as one GPU's share of them.
    pub network: Link,
    /// Seconds of single collectives between two ranks of different nodes by bytes, in place of that link.
    pub network_collectives: BTreeMap<String, Curve>,
    /// The software of its time.
    pub software: Software,
}

/// The cores of a node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cores {
    /// Their number.
    pub count: usize,
    /// Time of a kernel while all of them compute, over its time alone.
    pub contention: f64,
}

/// A GPU, or the threads of a rank on a processor, and the share of its peaks that kernels reach.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuSpec {
    /// Compute capability, or number of threads.
    pub device: PlannedDevice,
    /// Dtype in which the kernels of a processor were measured; none for a GPU.
    pub measured: Option<DType>,
    /// Number of multiprocessors; 1 on a processor.
    pub multiprocessors: usize,
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes a second of memory.
    pub bandwidth: f64,
    /// Peak operations a second of dense matrix products, by dtype of the operands.
    pub peaks: Vec<(DType, f64)>,
    /// Share of the peak that a large matrix product reaches on each multiprocessor.
    pub product_efficiency: f64,
    /// Elements of the inner dim whose time the beginning and end of a product take; on a processor its bytes count.
    pub product_setup: f64,
    /// Share of the peak that fused attention reaches.
    pub attention_efficiency: f64,
    /// Shares of the peak that single kernels of fused attention reach on a GPU, by name, in place of that share.
    pub attention_kernels: BTreeMap<String, f64>,
    /// Share of the bandwidth that memory-bound kernels reach.
    pub memory_efficiency: f64,
    /// Bytes a second of single kernels by name and bytes, in place of that share. `product` is the name of all matrix
    /// products.
    pub kernels: BTreeMap<String, Curve>,
    /// Operations a second of single kernels of a processor that compute products, by name and operations of a call, in place
    /// of the shares of the peak.
    pub products: BTreeMap<String, Curve>,
    /// Multiprocessors that a collective takes from the products beside which it runs.
    pub collective_multiprocessors: usize,
    /// Bytes a second in each direction between this memory and the host's, if it is stated.
    pub host: Option<f64>,
    /// Shortest time from one kernel to the next. On a processor it is added to the time of each kernel.
    pub launch: f64,
}

/// A link as one GPU uses it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Bytes a second in each direction that collectives reach.
    pub bandwidth: f64,
    /// Time of an empty message.
    pub latency: f64,
}

/// Properties of the software that changed over the years.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Software {
    /// The kernels of attention.
    pub attention: AttentionKernels,
    /// Whether gradients are reduced during backward.
    pub overlap_grad_reduce: bool,
    /// Whether kernels run beside messages between stages. Without it a sender waits until its message has come.
    pub overlap_messages: bool,
    /// Whether a tensor-parallel rank sends only its shard of an activation to the next stage, where ranks gather them.
    pub scatter_gather: bool,
    /// The passes of an update.
    pub optimizer: OptimizerPasses,
    /// Whether activations have the sequence as their first dim, as in Megatron-LM (`core/tensor_parallel/mappings.py`): the
    /// parts of tensor-parallel ranks then follow one another, and are not copied around collectives.
    pub sequence_first: bool,
    /// Whether gradients that are not reduced during backward are copied into one tensor, divided and copied back, as
    /// Megatron-LM's `model/distributed.py` of 2019 does.
    pub copies_gradients: bool,
}

/// The passes of an update over gradients and weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptimizerPasses {
    /// One, beside that of the norm.
    Fused,
    /// In mixed precision gradients are copied to 32 bits, unscaled, clipped, and weights copied back, each in a pass of its
    /// own, as Megatron-LM's `Float16OptimizerWithFloat16Params` does with Apex.
    Unfused,
}

/// The kernels of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionKernels {
    /// Scores stay on the multiprocessor.
    Fused,
    /// Scores are written to memory: batched products, softmax and dropout are kernels of their own.
    Unfused,
}

impl GpuSpec {
    /// Bytes a second that the kernel of this name reaches in a call of `bytes`.
    pub fn bandwidth_of(&self, kernel: &str, bytes: f64) -> f64 {
        match self.kernels.get(kernel).or_else(|| self.kernels.get(OTHER)) {
            Some(rates) => rates.rate(bytes),
            None => self.bandwidth * self.memory_efficiency,
        }
    }

    /// Share of the peak that the kernel of this name reaches in fused attention.
    pub fn attention_share(&self, kernel: &str) -> f64 {
        self.attention_kernels.get(kernel).copied().unwrap_or(self.attention_efficiency)
    }

    /// Bytes a second between this memory and the host's.
    ///
    /// Errors if the cluster's file states none.
    pub fn host_bandwidth(&self) -> Result<f64> {
        let missing = format!("{HOST} is missing: state it, or keep everything on the GPU");
        self.host.ok_or_else(|| Error::config("--cluster", missing))
    }

    /// Peak operations a second for operands of `dtype`.
    ///
    /// Errors if the cluster's file states none.
    pub fn peak(&self, dtype: DType) -> Result<f64> {
        let found = self.peaks.iter().find(|(known, _)| *known == dtype);
        found.map(|(_, peak)| *peak).ok_or_else(|| {
            let known: Vec<String> = self.peaks.iter().map(|(dtype, _)| dtype.to_string()).collect();
            let message = format!(
                "gpu.peak_tflops.{dtype} is missing: the cluster has peaks for {}, so choose such a --dtype",
                known.join(", ")
            );
            Error::config("--cluster", message)
        })
    }
}

impl Cluster {
    /// The sharing of a node's cores by `world` ranks in so many stages; GPUs share none.
    ///
    /// Errors if they are on several nodes.
    pub fn sharing(&self, world: usize, stages: usize) -> Result<Option<Sharing>> {
        let (PlannedDevice::Cpu { threads }, Some(cores)) = (self.gpu.device, self.cores) else {
            return Ok(None);
        };
        let nodes = world.div_ceil(self.gpus_per_node);
        if nodes > 1 {
            let message = format!(
                "{nodes}, but ranks that share node.cores of {} are predicted on one node: leave --nodes out, or \
                 node.cores so that each rank has cores of its own",
                self.name
            );
            return Err(Error::config("--nodes", message));
        }
        let Cores { count, contention } = cores;
        Ok(Some(Sharing { cores: count, ranks: world / stages, threads, contention }))
    }
}
