//! Reads the parts of a cluster from the keys of its file.

use ferrotron_cuda::nvrtc::Architecture;
use ferrotron_models::memory::PlannedDevice;
use ferrotron_tensor::{DType, Result};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use toml::Value;

use super::{Cores, DTYPES, GpuSpec, HOST, Link};
use crate::curve::Curve;
use crate::keys::Keys;

/// The numbers of a GPU, or of a rank's share of a processor.
pub(super) fn gpu(keys: &Keys<'_>) -> Result<GpuSpec> {
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
        memory_efficiency: keys.share("gpu.memory_efficiency")?,
        kernels: curves(keys, "gpu.kernel_gb_per_s", 1e-6..=1e6, 1e9)?,
        products: match device {
            PlannedDevice::Cpu { .. } => curves(keys, "gpu.kernel_gflops", 1e-6..=1e9, 1e9)?,
            PlannedDevice::Gpu(_) => BTreeMap::new(),
        },
        host: keys
            .find(HOST)
            .map(|_| keys.number(HOST, 1e-3..=1e5))
            .transpose()?
            .map(|gb| 1e9 * gb),
        launch: 1e-6 * keys.number("gpu.launch_us", 0.0..=1e4)?,
    })
}

pub(super) fn cores(keys: &Keys<'_>) -> Result<Cores> {
    let contention = match keys.find("node.contention") {
        Some(_) => keys.number("node.contention", 0.1..=100.0)?,
        None => 1.0,
    };
    Ok(Cores { count: keys.count("node.cores", 100_000)?, contention })
}

/// The curves of a table: each is a number, or a table of numbers by the bytes or operations of a call. Values are in so
/// large a `unit`.
pub(super) fn curves(
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
            let message = "is no size of a call with a value, as 65536 = 1.5";
            let bytes = bytes.parse::<u64>().map_err(|_| keys.error(&key, message))?;
            Ok([bytes as f64, value])
        };
        let points = keys.names(&key)?.into_iter().map(point).collect::<Result<Vec<_>>>()?;
        match points.is_empty() {
            true => Err(keys.error(&key, "is empty: leave it out")),
            false => Ok((name, Curve::new(points))),
        }
    };
    keys.names(of)?.into_iter().map(curve).collect()
}

pub(super) fn link(keys: &Keys<'_>, of: &str) -> Result<Link> {
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
