//! Descriptions of clusters, read from TOML files: one a cluster, each number with its source.

use ferrotron_cuda::nvrtc::Architecture;
use ferrotron_tensor::{DType, Error, Result};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::Path;
use toml::{Table, Value};

/// The clusters that the program carries, by name.
const KNOWN: &[(&str, &str)] = &[
    ("v100-32-jz", include_str!("../clusters/v100-32-jz.toml")),
    ("dgx-2", include_str!("../clusters/dgx-2.toml")),
    ("dgx-a100-40", include_str!("../clusters/dgx-a100-40.toml")),
    ("dgx-a100-80", include_str!("../clusters/dgx-a100-80.toml")),
    ("h100", include_str!("../clusters/h100.toml")),
    ("h200", include_str!("../clusters/h200.toml")),
];

/// The dtypes of matrix products.
const DTYPES: [DType; 4] = [DType::BF16, DType::F16, DType::F32, DType::F64];

/// A cluster of equal nodes with equal GPUs. Bandwidths are in bytes a second, times in seconds.
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
    /// Number of GPUs of a node.
    pub gpus_per_node: usize,
    /// Each GPU.
    pub gpu: GpuSpec,
    /// The links between GPUs of a node.
    pub node: Link,
    /// The links between nodes, as one GPU's share of them.
    pub network: Link,
    /// The software of its time.
    pub software: Software,
}

/// A GPU, and the share of its peaks that kernels reach.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuSpec {
    /// Compute capability.
    pub architecture: Architecture,
    /// Number of multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes a second of memory.
    pub bandwidth: f64,
    /// Peak operations a second of dense matrix products, by dtype of the operands.
    pub peaks: Vec<(DType, f64)>,
    /// Share of the peak that a large matrix product reaches on each multiprocessor.
    pub product_efficiency: f64,
    /// Elements of the inner dim whose time the beginning and end of a product take.
    pub product_setup: f64,
    /// Share of the peak that fused attention reaches.
    pub attention_efficiency: f64,
    /// Share of the bandwidth that memory-bound kernels reach.
    pub memory_efficiency: f64,
    /// Shortest time from one kernel to the next.
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
        let table = text.parse::<Table>().map_err(|error| {
            Error::config("--cluster", format!("{name} is no TOML: {}", error.message()))
        })?;
        let keys = Keys { name, table, read: RefCell::default() };
        let cluster = Cluster {
            name: name.to_string(),
            description: keys.text("description")?,
            gpus_per_node: keys.count("node.gpus", 1024)?,
            gpu: keys.gpu()?,
            node: keys.link("node")?,
            network: keys.link("network")?,
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
            },
        };
        keys.all_are_read()?;
        Ok(cluster)
    }
}

/// The keys of a file, of which each must be read.
struct Keys<'a> {
    name: &'a str,
    table: Table,
    read: RefCell<BTreeSet<String>>,
}

impl Keys<'_> {
    fn gpu(&self) -> Result<GpuSpec> {
        let peak = |dtype: DType| {
            let key = format!("gpu.peak_tflops.{dtype}");
            let known = self.find(&key).is_some();
            known.then(|| Ok((dtype, 1e12 * self.number(&key, 0.01..=1e6)?)))
        };
        Ok(GpuSpec {
            architecture: self.architecture("gpu.architecture")?,
            multiprocessors: self.count("gpu.multiprocessors", 10_000)?,
            memory: (1e9 * self.number("gpu.memory_gb", 0.1..=1e5)?) as u64,
            bandwidth: 1e9 * self.number("gpu.memory_gb_per_s", 1.0..=1e6)?,
            peaks: DTYPES.into_iter().filter_map(peak).collect::<Result<_>>()?,
            product_efficiency: self.share("gpu.product_efficiency")?,
            product_setup: self.number("gpu.product_setup", 0.0..=1e5)?,
            attention_efficiency: self.share("gpu.attention_efficiency")?,
            memory_efficiency: self.share("gpu.memory_efficiency")?,
            launch: 1e-6 * self.number("gpu.launch_us", 0.0..=1e4)?,
        })
    }

    fn link(&self, of: &str) -> Result<Link> {
        Ok(Link {
            bandwidth: 1e9 * self.number(&format!("{of}.gb_per_s"), 1e-3..=1e5)?,
            latency: 1e-6 * self.number(&format!("{of}.latency_us"), 0.0..=1e6)?,
        })
    }

    fn architecture(&self, key: &str) -> Result<Architecture> {
        let text = self.text(key)?;
        let parts = text.split_once('.').and_then(|(major, minor)| {
            Some(Architecture { major: major.parse().ok()?, minor: minor.parse().ok()? })
        });
        parts.ok_or_else(|| self.error(key, &format!("is '{text}', and must be as '8.0'")))
    }

    fn count(&self, key: &str, most: usize) -> Result<usize> {
        let value = self.number(key, 1.0..=most as f64)?;
        match value.fract() {
            0.0 => Ok(value as usize),
            _ => Err(self.error(key, &format!("is {value}, and must be whole"))),
        }
    }

    fn share(&self, key: &str) -> Result<f64> {
        self.number(key, 0.001..=1.0)
    }

    fn number(&self, key: &str, range: RangeInclusive<f64>) -> Result<f64> {
        let value = match self.value(key)? {
            Value::Float(value) => *value,
            Value::Integer(value) => *value as f64,
            other => return Err(self.error(key, &format!("is {other}, and must be a number"))),
        };
        if range.contains(&value) {
            return Ok(value);
        }
        let message = format!("is {value}, and must be from {} to {}", range.start(), range.end());
        Err(self.error(key, &message))
    }

    fn text(&self, key: &str) -> Result<String> {
        match self.value(key)? {
            Value::String(text) => Ok(text.clone()),
            other => Err(self.error(key, &format!("is {other}, and must be a text"))),
        }
    }

    fn flag(&self, key: &str) -> Result<bool> {
        match self.value(key)? {
            Value::Boolean(flag) => Ok(*flag),
            other => Err(self.error(key, &format!("is {other}, and must be true or false"))),
        }
    }

    fn value(&self, key: &str) -> Result<&Value> {
        self.find(key).ok_or_else(|| self.error(key, "is missing"))
    }

    fn find(&self, key: &str) -> Option<&Value> {
        self.read.borrow_mut().insert(key.to_string());
        let mut parts = key.split('.');
        let first = self.table.get(parts.next()?)?;
        parts.try_fold(first, |value, part| value.get(part))
    }

    fn error(&self, key: &str, message: &str) -> Error {
        Error::config("--cluster", format!("{}: {key} {message}", self.name))
    }

    fn all_are_read(&self) -> Result<()> {
        let mut left: Vec<(String, &Value)> =
            self.table.iter().map(|(key, value)| (key.clone(), value)).collect();
        while let Some((key, value)) = left.pop() {
            match value {
                Value::Table(table) => {
                    left.extend(table.iter().map(|(name, value)| (format!("{key}.{name}"), value)));
                }
                _ if !self.read.borrow().contains(&key) => {
                    return Err(self.error(&key, "is no key of a cluster"));
                }
                _ => {}
            }
        }
        Ok(())
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
