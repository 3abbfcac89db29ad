//! Reads clusters from TOML files, and has those that the program carries.

use ferrotron_cuda::nvrtc::Architecture;
use ferrotron_models::memory::PlannedDevice;
use ferrotron_tensor::{DType, Error, Result};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::Path;
use toml::Value;

use super::{
    AttentionKernels, CHANNELS, Cluster, Cores, GpuSpec, HOST, Link, OptimizerPasses, Software,
};
use crate::curve::Curve;
use crate::keys::Keys;

/// The clusters that the program carries, by name.
const KNOWN: &[(&str, &str)] = &[
    ("v100-32-jz", include_str!("../../clusters/v100-32-jz.toml")),
    ("dgx-2", include_str!("../../clusters/dgx-2.toml")),
    ("dgx-a100-40", include_str!("../../clusters/dgx-a100-40.toml")),
    ("dgx-a100-80", include_str!("../../clusters/dgx-a100-80.toml")),
    ("h100", include_str!("../../clusters/h100.toml")),
    ("h200", include_str!("../../clusters/h200.toml")),
];

/// The dtypes of matrix products.
const DTYPES: [DType; 4] = [DType::BF16, DType::F16, DType::F32, DType::F64];

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
            network_collectives: curves(&keys, "network.collective_us", 0.0..=1e9, 1e-6)?,
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
                optimizer: optimizer(&keys)?,
                sequence_first: optional_flag(&keys, "software.sequence_first")?,
                copies_gradients: optional_flag(&keys, "software.copies_gradients")?,
            },
        };
        keys.all_are_read()?;
        Ok(cluster)
    }
}

/// The numbers of a GPU, or of a rank's share of a processor.
fn gpu(keys: &Keys<'_>) -> Result<GpuSpec> {
    let peak = |dtype: DType| {
        let key = format!("gpu.peak_tflops.{dtype}");
        let known = keys.find(&key).is_some();
        known.then(|| Ok((dtype, 1e12 * keys.number(&key, 1e-6..=1e6)?)))
    };
    let device = match keys.find("device").is_some() {
        true => keys.text("device")?,
        false => "gpu".to_string(),
    };
    let (device, measured, multiprocessors, product_setup) = match device.as_str() {
        "gpu" => (
            PlannedDevice::Gpu(architecture(keys, "gpu.architecture")?),
            None,
            keys.count("gpu.multiprocessors", 10_000)?,
            keys.number("gpu.product_setup", 0.0..=1e5)?,
        ),
        "cpu" => {
            let threads = keys.count("gpu.threads", 10_000)?;
            (PlannedDevice::Cpu { threads }, Some(dtype(keys, "gpu.dtype")?), 1, 0.0)
        }
        other => return Err(keys.error("device", &format!("is '{other}', and must be gpu or cpu"))),
    };
    Ok(GpuSpec {
        device,
        measured,
        multiprocessors,
        memory: (1e9 * keys.number("gpu.memory_gb", 0.1..=1e5)?) as u64,
        bandwidth: 1e9 * keys.number("gpu.memory_gb_per_s", 0.1..=1e6)?,
        peaks: DTYPES.into_iter().filter_map(peak).collect::<Result<_>>()?,
        product_efficiency: keys.share("gpu.product_efficiency")?,
        product_setup,
        attention_efficiency: keys.share("gpu.attention_efficiency")?,
        attention_kernels: match device {
            PlannedDevice::Gpu(_) => shares(keys, "gpu.kernel_efficiency")?,
            PlannedDevice::Cpu { .. } => BTreeMap::new(),
        },
        memory_efficiency: keys.share("gpu.memory_efficiency")?,
        kernels: curves(keys, "gpu.kernel_gb_per_s", 1e-6..=1e6, 1e9)?,
        products: match device {
            PlannedDevice::Cpu { .. } => curves(keys, "gpu.kernel_gflops", 1e-6..=1e9, 1e9)?,
            PlannedDevice::Gpu(_) => BTreeMap::new(),
        },
        collective_multiprocessors: match device {
            PlannedDevice::Gpu(_) if keys.find(CHANNELS).is_some() => {
                keys.number(CHANNELS, 0.0..=(multiprocessors - 1) as f64)? as usize
            }
            _ => 0,
        },
        host: keys
            .find(HOST)
            .map(|_| keys.number(HOST, 1e-3..=1e5))
            .transpose()?
            .map(|gb| 1e9 * gb),
        launch: 1e-6 * keys.number("gpu.launch_us", 0.0..=1e4)?,
    })
}

/// A truth value that is false unless the file has it.
fn optional_flag(keys: &Keys<'_>, key: &str) -> Result<bool> {
    keys.find(key).map_or(Ok(false), |_| keys.flag(key))
}

/// The passes of an update: fused unless the file says otherwise.
fn optimizer(keys: &Keys<'_>) -> Result<OptimizerPasses> {
    let key = "software.optimizer";
    let stated = keys.find(key).map(|_| keys.text(key)).transpose()?;
    match stated.as_deref() {
        None | Some("fused") => Ok(OptimizerPasses::Fused),
        Some("unfused") => Ok(OptimizerPasses::Unfused),
        Some(other) => Err(keys.error(key, &format!("is '{other}', and must be fused or unfused"))),
    }
}

fn cores(keys: &Keys<'_>) -> Result<Cores> {
    let contention = match keys.find("node.contention") {
        Some(_) => keys.number("node.contention", 1.0..=100.0)?,
        None => 1.0,
    };
    Ok(Cores { count: keys.count("node.cores", 100_000)?, contention })
}

/// The shares of a table.
fn shares(keys: &Keys<'_>, of: &str) -> Result<BTreeMap<String, f64>> {
    let share = |name: String| {
        if !name.starts_with("attention") {
            return Err(keys.error(&format!("{of}.{name}"), "is no kernel of fused attention"));
        }
        let value = keys.share(&format!("{of}.{name}"))?;
        Ok((name, value))
    };
    keys.names(of)?.into_iter().map(share).collect()
}

/// The curves of a table: each is a number, or a table of numbers by the bytes or operations of a call. Values are in so
/// large a `unit`.
fn curves(
    keys: &Keys<'_>,
    of: &str,
    range: RangeInclusive<f64>,
    unit: f64,
) -> Result<BTreeMap<String, Curve>> {
    let curve = |name: String| {
        let key = format!("{of}.{name}");
        if !matches!(keys.find(&key), Some(Value::Table(_))) {
            let value = unit * keys.number(&key, range.clone())?;
            return Ok((name, Curve::new(vec![[0.0, value]])));
        }
        let point = |bytes: String| {
            let key = format!("{key}.{bytes}");
            let value = unit * keys.number(&key, range.clone())?;
            let message = "is no size of a call above 0 with a value, as 65536 = 1.5";
            let size = bytes.parse::<u64>().ok().filter(|size| *size > 0);
            Ok([size.ok_or_else(|| keys.error(&key, message))? as f64, value])
        };
        let points = keys.names(&key)?.into_iter().map(point).collect::<Result<Vec<_>>>()?;
        match points.is_empty() {
            true => Err(keys.error(&key, "is empty: leave it out")),
            false => Ok((name, Curve::new(points))),
        }
    };
    keys.names(of)?.into_iter().map(curve).collect()
}

fn link(keys: &Keys<'_>, of: &str) -> Result<Link> {
    Ok(Link {
        bandwidth: 1e9 * keys.number(&format!("{of}.gb_per_s"), 1e-3..=1e5)?,
        latency: 1e-6 * keys.number(&format!("{of}.latency_us"), 0.0..=1e6)?,
    })
}

fn dtype(keys: &Keys<'_>, key: &str) -> Result<DType> {
    let text = keys.text(key)?;
    let known = DTYPES.into_iter().find(|dtype| dtype.to_string() == text);
    known.ok_or_else(|| {
        keys.error(
            key,
            &format!("is '{text}', and must be the dtype of the measured kernels, as 'f32'"),
        )
    })
}

fn architecture(keys: &Keys<'_>, key: &str) -> Result<Architecture> {
    let text = keys.text(key)?;
    let parts = text.split_once('.').and_then(|(major, minor)| {
        Some(Architecture { major: major.parse().ok()?, minor: minor.parse().ok()? })
    });
    parts.ok_or_else(|| keys.error(key, &format!("is '{text}', and must be as '8.0'")))
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
                "[gpu.kernel_efficiency]\nattention_64 = 1.5\n[node]",
                "gpu.kernel_efficiency.attention_64 is 1.5",
            ),
            (
                "[node]",
                "[gpu.kernel_efficiency]\ngelu = 0.5\n[node]",
                "gpu.kernel_efficiency.gelu is no kernel of fused attention",
            ),
            (
                "[node]",
                "[gpu.kernel_gb_per_s.gelu]\n1k = 1\n[node]",
                "gelu.1k is no size of a call",
            ),
            (
                "[node]",
                "[gpu.kernel_gb_per_s.gelu]\n0 = 1\n65536 = 2\n[node]",
                "gelu.0 is no size of a call above 0",
            ),
            ("[node]", "[gpu.kernel_gb_per_s.gelu]\n[node]", "gpu.kernel_gb_per_s.gelu is empty"),
            (
                "[node]",
                "[node]\ncollective_us.all_reduce.64 = -1\n",
                "node.collective_us.all_reduce.64 is -1",
            ),
            (
                "[network]",
                "[network.collective_us.all_reduce]\n64 = -1\n[network]",
                "network.collective_us.all_reduce.64 is -1",
            ),
            (
                "[network]",
                "[network.collective_us.all_reduce]\n1e6 = 1\n[network]",
                "all_reduce.1e6 is no size of a call",
            ),
            (
                "[network]",
                "[network.collective_us.broadcast]\n[network]",
                "network.collective_us.broadcast is empty",
            ),
            ("host_gb_per_s = 25", "host_gb_per_s = 0", "gpu.host_gb_per_s is 0"),
            ("multiprocessors = 24", "multiprocessors = 108", "and must be from 0 to 107"),
            ("[software]", "[software]\noptimizer = \"slow\"", "software.optimizer is 'slow'"),
            ("gb_per_s = 20 #", "gb_per_s = \"20 GB/s\" #", "network.gb_per_s is"),
            ("[node]", "[node", "is no TOML"),
        ] {
            assert!(good.contains(from), "{from}");
            let error = Cluster::parse("my.toml", &good.replacen(from, to, 1)).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(part) && text.contains("my.toml"), "{text}");
            assert_eq!(text.lines().count(), 1, "{text}");
        }
        // All cores take no less time than one.
        let processor = "device = \"cpu\"\n[gpu]\nthreads = 1\ndtype = \"f32\"";
        let text = good.replacen("[gpu]", processor, 1);
        let text = text.replacen("[node]", "[node]\ncores = 4\ncontention = 0.9", 1);
        let error = Cluster::parse("my.toml", &text).unwrap_err().to_string();
        assert!(error.contains("node.contention is 0.9"), "{error}");
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
