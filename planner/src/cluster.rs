//! Descriptions of clusters, read from TOML files: one a cluster, each number with its source.

mod parts;

use ferrotron_models::memory::PlannedDevice;
use ferrotron_tensor::{DType, Error, Result};
use std::collections::BTreeMap;
use std::path::Path;

use crate::cost::OTHER;
use crate::curve::Curve;
use crate::keys::Keys;
use crate::sharing::Sharing;
use parts::{cores, curves, gpu, link};

/// The clusters that the program carries, by name.
const KNOWN: &[(&str, &str)] = &[
    ("v100-32-jz", include_str!("../clusters/v100-32-jz.toml")),
    ("dgx-2", include_str!("../clusters/dgx-2.toml")),
    ("dgx-a100-40", include_str!("../clusters/dgx-a100-40.toml")),
    ("dgx-a100-80", include_str!("../clusters/dgx-a100-80.toml")),
    ("h100", include_str!("../clusters/h100.toml")),
    ("h200", include_str!("../clusters/h200.toml")),
];

/// The key of the link to host memory.
const HOST: &str = "gpu.host_gb_per_s";

/// The dtypes of matrix products.
const DTYPES: [DType; 4] = [DType::BF16, DType::F16, DType::F32, DType::F64];

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
    /// Share of the bandwidth that memory-bound kernels reach.
    pub memory_efficiency: f64,
    /// Bytes a second of single kernels by name and bytes, in place of that share. `product` is the name of all matrix
    /// products.
    pub kernels: BTreeMap<String, Curve>,
    /// Operations a second of single kernels of a processor that compute products, by name and operations of a call, in place
    /// of the shares of the peak.
    pub products: BTreeMap<String, Curve>,
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
    /// How `world` ranks in so many stages share the cores of their nodes; GPUs share none.
    pub fn sharing(&self, world: usize, stages: usize) -> Option<Sharing> {
        let (PlannedDevice::Cpu { threads }, Some(cores)) = (self.gpu.device, self.cores) else {
            return None;
        };
        let nodes = world.div_ceil(self.gpus_per_node);
        let Cores { count, contention } = cores;
        Some(Sharing { cores: count * nodes, ranks: world / stages, threads, contention })
    }

    /// The names of the clusters that the program carries.
    pub fn names() -> impl Iterator<Item = &'static str> {
        KNOWN.iter().map(|(name, _)| *name)
    }

    /// The cluster of a name, or of a TOML file.
    ///
    /// Errors, naming the key, if the file lacks a number or has an absurd one.
    pub fn named(name: &str) -> Result<Cluster> {
        if let Some((_, text)) = KNOWN.iter().find(|(known, _)| *known == name) {
            return Cluster::parse(name, text);
        }
        if !name.ends_with(".toml") {
            let known: Vec<&str> = Cluster::names().collect();
            let message = format!(
                "'{name}' is neither a file that ends in .toml nor one of {}",
                known.join(", ")
            );
            return Err(Error::config("--cluster", message));
        }
        let text = std::fs::read_to_string(Path::new(name))
            .map_err(|error| Error::config("--cluster", format!("cannot read {name}: {error}")))?;
        Cluster::parse(name, &text)
    }

    /// The cluster that `text` describes; `name` is for messages.
    ///
    /// Errors as [`Cluster::named`].
    pub fn parse(name: &str, text: &str) -> Result<Cluster> {
        let keys = Keys::parse(name, text)?;
        let (description, gpus_per_node) =
            (keys.text("description")?, keys.count("node.gpus", 1024)?);
        let gpu = gpu(&keys)?;
        let shares_cores =
            matches!(gpu.device, PlannedDevice::Cpu { .. }) && keys.find("node.cores").is_some();
        let cluster = Cluster {
            name: name.to_string(),
            description,
            gpus_per_node,
            cores: shares_cores.then(|| cores(&keys)).transpose()?,
            gpu,
            node: link(&keys, "node")?,
            collectives: curves(&keys, "node.collective_us", 0.0..=1e9, 1e-6)?,
            network: link(&keys, "network")?,
            software: Software {
                attention: match keys.text("software.attention")?.as_str() {
                    "fused" => AttentionKernels::Fused,
                    "unfused" => AttentionKernels::Unfused,
                    other => {
                        let message = format!("is '{other}', and must be fused or unfused");
                        return Err(keys.error("software.attention", &message));
                    }
                },
                overlap_grad_reduce: keys.flag("software.overlap_grad_reduce")?,
                overlap_messages: keys.flag("software.overlap_messages")?,
                scatter_gather: keys.flag("software.scatter_gather")?,
            },
        };
        keys.all_are_read()?;
        Ok(cluster)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_cluster_can_be_read() {
        for name in Cluster::names() {
            let cluster = Cluster::named(name).unwrap();
            assert!(cluster.gpu.peak(DType::F16).unwrap() > 1e14, "{cluster:?}");
            assert!(cluster.node.bandwidth >= cluster.network.bandwidth, "{cluster:?}");
        }
    }

    #[test]
    fn a_bad_file_is_refused_by_its_key() {
        let good = KNOWN.iter().find(|(name, _)| *name == "dgx-a100-80").unwrap().1;
        for (from, to, part) in [
            ("multiprocessors = 108", "", "gpu.multiprocessors is missing"),
            ("multiprocessors = 108", "multiprocessors = 0", "gpu.multiprocessors is 0"),
            ("multiprocessors = 108", "multiprocessors = 1.5", "gpu.multiprocessors is 1.5"),
            ("multiprocessors = 108", "multiprocessors = \"many\"", "must be a number"),
            ("launch_us = ", "launch_us = -", "gpu.launch_us is -"),
            ("launch_us = ", "lunch_us = 1\nlaunch_us = ", "gpu.lunch_us is no key"),
            ("\"fused\"", "\"flash\"", "software.attention is 'flash'"),
            ("architecture = \"8.0\"", "architecture = \"8\"", "gpu.architecture is '8'"),
            ("[gpu]", "device = \"tpu\"\n[gpu]", "device is 'tpu', and must be gpu or cpu"),
            ("[gpu]", "device = \"cpu\"\n[gpu]", "gpu.threads is missing"),
            ("[gpu]", "device = \"cpu\"\n[gpu]\nthreads = 1", "gpu.dtype is missing"),
            ("[gpu]", "device = \"cpu\"\n[gpu]\nthreads = 1\ndtype = \"u8\"", "gpu.dtype is 'u8'"),
            ("[node]", "[node]\ncores = 64", "node.cores is no key"),
            ("memory_gb = 85.9", "memory_gb = 85900000", "gpu.memory_gb is 85900000"),
            ("memory_gb = 85.9", "memory_gb = nan", "gpu.memory_gb is NaN"),
            ("bf16 = 312", "bf16 = -312", "gpu.peak_tflops.bf16 is -312"),
            ("[node]", "[gpu.kernel_gb_per_s]\ngelu = 0\n[node]", "gpu.kernel_gb_per_s.gelu is 0"),
            (
                "[node]",
                "[gpu.kernel_gb_per_s.gelu]\n1k = 1\n[node]",
                "gelu.1k is no size of a call",
            ),
            ("[node]", "[gpu.kernel_gb_per_s.gelu]\n[node]", "gpu.kernel_gb_per_s.gelu is empty"),
            (
                "[node]",
                "[node]\ncollective_us.all_reduce.64 = -1\n",
                "node.collective_us.all_reduce.64 is -1",
            ),
            ("host_gb_per_s = 25", "host_gb_per_s = 0", "gpu.host_gb_per_s is 0"),
            ("gb_per_s = 20 #", "gb_per_s = \"20 GB/s\" #", "network.gb_per_s is"),
            ("[node]", "[node", "is no TOML"),
        ] {
            assert!(good.contains(from), "{from}");
            let error = Cluster::parse("my.toml", &good.replacen(from, to, 1)).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(part) && text.contains("my.toml"), "{text}");
            assert_eq!(text.lines().count(), 1, "{text}");
        }
        for name in ["dgx-3", "absent.toml"] {
            let error = Cluster::named(name).unwrap_err().to_string();
            assert!(error.contains("--cluster") && error.contains(name), "{error}");
        }
    }

    #[test]
    fn a_missing_peak_is_named() {
        let error = Cluster::named("v100-32-jz").unwrap().gpu.peak(DType::BF16).unwrap_err();
        assert!(error.to_string().contains("gpu.peak_tflops.bf16"), "{error}");
    }
}
