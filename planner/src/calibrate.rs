//! Measures this machine's processor, and describes it as a cluster.
//!
//! - Peaks and bandwidths of caches and memory are the [`Ceilings`] of the device.
//! - Products, memory-bound kernels and attention have the speeds of profiled training steps of three sizes, and what passes
//!   between kernels is the time of a launch.
//! - Products of several shapes are timed, for those that no profiled step has. Two numbers are fitted to them, with the least
//!   relative squares: the time of an operation and that of a byte.
//! - Two ranks, each a thread with one thread of its own, call each collective with buffers of several sizes.
//! - Ranks on all cores take steps of their own at once, and alone.

mod kernels;
mod ranks;

use ferrotron_tensor::ceilings::Ceilings;
use ferrotron_tensor::{DType, Device, Result};
use std::collections::BTreeMap;

use crate::cluster::{Link, OTHER};
use crate::cost::PRODUCT;
use crate::curve::Curve;

/// Second-level caches whose bytes no such cache holds.
const BEYOND_CACHES: f64 = 16.0;

/// The measured ceilings and shares.
#[derive(Debug, Clone, PartialEq)]
pub struct Calibration {
    /// Dtype of the products, the kernels and attention.
    pub dtype: DType,
    /// Threads of a rank.
    pub threads: usize,
    /// Cores of the machine.
    pub cores: usize,
    /// Bytes of the machine's memory.
    pub memory: u64,
    /// Peaks and memory bandwidth of a rank's threads.
    pub ceilings: Ceilings,
    /// Operations a second of a product's arithmetic.
    pub products: f64,
    /// Operations a second of attention.
    pub attention: f64,
    /// Bytes a second of kernels, by name and bytes of a call.
    pub kernels: BTreeMap<String, Curve>,
    /// Operations a second of kernels with products, by name and operations of a call.
    pub rates: BTreeMap<String, Curve>,
    /// Seconds between two kernels.
    pub launch: f64,
    /// The link between two ranks.
    pub link: Link,
    /// Seconds of collectives between two ranks, by name and bytes.
    pub collectives: BTreeMap<String, Curve>,
    /// Time of a step while ranks on all cores take one, over its time alone.
    pub contention: f64,
}

/// Measures the threads of `device`, in a minute. Kernels compute in `dtype`.
///
/// Errors if the device is none of this machine's processor, or if two ranks cannot meet.
pub fn calibrate(device: &Device, dtype: DType) -> Result<Calibration> {
    let (threads, ceilings) = (device.threads(), Ceilings::measure(device)?);
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let [operation, byte] = kernels::fit(&kernels::products(device, dtype)?);
    let profiles = kernels::profiles(device, dtype)?;
    let mut curves = kernels::kernels(&profiles);
    if byte > 0.0 {
        curves.insert(PRODUCT.to_string(), Curve::new(vec![[1.0, 1.0 / byte]])); // the same for all bytes
    }
    let cache = Ceilings::cache_bytes() as f64;
    let levels = vec![[cache, ceilings.cache], [BEYOND_CACHES * cache, ceilings.update]];
    curves.insert(OTHER.to_string(), Curve::new(levels));
    let (collectives, link) = ranks::collectives()?;
    Ok(Calibration {
        dtype,
        threads,
        cores,
        memory: memory(),
        ceilings,
        products: 1.0 / operation,
        attention: kernels::attention(&profiles),
        kernels: curves,
        rates: kernels::rates(&profiles),
        launch: kernels::launch(&profiles),
        link,
        collectives,
        contention: ranks::contention(dtype, threads, cores / threads)?,
    })
}

/// Bytes of memory that Linux states.
fn memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kibibytes = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kibibytes.map_or(1 << 30, |kibibytes| kibibytes << 10)
}

impl Calibration {
    /// How the file begins.
    pub const BEGIN: &str = "# Measured by ferrotron bench --calibrate";

    /// The file that `--cluster` reads.
    pub fn to_toml(&self) -> String {
        let Calibration { dtype, threads, cores, ceilings, link, contention, .. } = self;
        let ranks = (cores / threads).max(1);
        // A kernel may be faster than the loop that measures the peak: shares are of the faster of both.
        let registers = ceilings.products(*dtype);
        let peak = registers.max(self.products).max(self.attention);
        let share = |rate: f64| (rate / peak).max(0.001);
        let memory = (self.memory / ranks as u64) as f64 / 1e9;
        let peaks = [DType::BF16, DType::F16, DType::F32, DType::F64];
        let peaks = peaks.map(|of| match of == *dtype && peak > registers {
            true => format!(
                "{of} = {:.6} # of a kernel; {:.6} on registers\n",
                peak / 1e12,
                registers / 1e12
            ),
            false => format!("{of} = {:.6}\n", ceilings.products(of) / 1e12),
        });
        let kernels = tables("gpu.kernel_gb_per_s", &self.kernels, 1e-9);
        let rates = tables("gpu.kernel_gflops", &self.rates, 1e-9);
        let collectives = tables("node.collective_us", &self.collectives, 1e6);
        let link = format!(
            "gb_per_s = {:.4}\nlatency_us = {:.2}\n",
            link.bandwidth / 1e9,
            1e6 * link.latency
        );
        format!(
            "{}, with kernels in {dtype}.\n\
             description = \"processor of {cores} cores, {threads} for each rank, kernels in {dtype}\"\n\
             device = \"cpu\"\n\n\
             [gpu] # a rank\n\
             threads = {threads}\n\
             dtype = \"{dtype}\" # of the kernels\n\
             memory_gb = {memory:.3}\n\
             memory_gb_per_s = {:.4} # each element read, changed and written; {:.4} only read\n\
             product_efficiency = {:.4} # of large products\n\
             attention_efficiency = {:.4}\n\
             memory_efficiency = 1.0\n\
             launch_us = {:.3}\n\n\
             [gpu.peak_tflops] # on registers\n{}\n\
             # by bytes of a call; {OTHER} is for kernels that are not listed\n\
             {kernels}\n\
             # by operations of a call\n\
             {rates}\n\
             [node]\n\
             gpus = {ranks}\n\
             cores = {cores}\n\
             contention = {contention:.4} # time of a step while all cores take one, over its time alone\n\
             {link}\n\
             # by bytes of the whole buffer, between two ranks\n\
             {collectives}\n\
             [network] # assumed: as within the machine\n\
             {link}\n\
             [software]\n\
             attention = \"fused\"\n\
             overlap_grad_reduce = true # assumed\n\
             overlap_messages = true # assumed\n\
             scatter_gather = true # assumed\n",
            Calibration::BEGIN,
            ceilings.update / 1e9,
            ceilings.read / 1e9,
            share(self.products),
            share(self.attention),
            1e6 * self.launch,
            peaks.concat(),
        )
    }
}

/// Curves as tables of a TOML file, in so large a `unit`.
fn tables(of: &str, curves: &BTreeMap<String, Curve>, unit: f64) -> String {
    let table = |(name, curve): (&String, &Curve)| {
        let point = |[bytes, value]: &[f64; 2]| format!("{bytes:.0} = {:.4}\n", unit * value);
        let points: String = curve.points().iter().map(point).collect();
        format!("[{of}.{name}]\n{points}")
    };
    curves.iter().map(table).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cluster;
    use crate::cluster::Cores;
    use crate::network::{Spread, seconds};
    use crate::sharing::Sharing;

    #[test]
    fn the_file_is_a_cluster() {
        let calibration = Calibration {
            dtype: DType::F32,
            threads: 1,
            cores: 2,
            memory: 8_000_000_000,
            ceilings: Ceilings {
                f32: 1e11,
                f64: 5e10,
                bf16: 2e11,
                f16: 1e11,
                read: 1e10,
                update: 1.5e10,
                cache: 6e10,
            },
            products: 8e10,
            attention: 2e10,
            kernels: BTreeMap::from([(
                "gelu_tanh".to_string(),
                Curve::new(vec![[1e5, 3e9], [1e7, 1e9]]),
            )]),
            rates: BTreeMap::from([(
                "linear".to_string(),
                Curve::new(vec![[1e6, 5e10], [1e8, 7e10]]),
            )]),
            launch: 2e-6,
            link: Link { bandwidth: 4e9, latency: 1e-5 },
            collectives: BTreeMap::from([(
                "all_reduce".to_string(),
                Curve::new(vec![[1e3, 1e-5], [1e6, 1e-3]]),
            )]),
            contention: 1.25,
        };
        let cluster = Cluster::parse("own.toml", &calibration.to_toml()).unwrap();
        let close = |got: f64, want: f64| assert!((got / want - 1.0).abs() < 1e-3, "{got} {want}");
        let cores = Some(Cores { count: 2, contention: 1.25 });
        assert_eq!((cluster.gpus_per_node, cluster.cores), (2, cores));
        close(cluster.gpu.peak(DType::F32).unwrap(), 1e11);
        close(cluster.gpu.product_efficiency, 0.8);
        close(cluster.gpu.bandwidth_of("gelu_tanh", 1e5), 3e9);
        close(cluster.gpu.bandwidth_of("gelu_tanh", 1e6), 2e9);
        close(cluster.gpu.bandwidth_of("layer_norm", 1e6), 1.5e10);
        close(cluster.gpu.products["linear"].rate(1e7), 6e10);
        // Four ranks take three steps of a quarter each, two ranks one of a half.
        close(seconds("all_reduce", 1e6, Spread { ranks: 2, nodes: 1 }, &cluster), 1e-3);
        let steps = 3.0 * cluster.collectives["all_reduce"].seconds(5e5);
        close(seconds("all_reduce", 1e6, Spread { ranks: 4, nodes: 1 }, &cluster), steps);
        close(cluster.node.latency, 1e-5);
        assert_eq!(cluster.gpu.measured, Some(DType::F32));
        let sharing = Sharing { cores: 2, ranks: 1, threads: 1, contention: 1.25 };
        assert_eq!(cluster.sharing(2, 2).unwrap(), Some(sharing));
        let error = cluster.sharing(4, 2).unwrap_err().to_string();
        assert!(error.contains("--nodes: 2, but ranks that share node.cores"), "{error}");

        // A product that was faster than the measured peak is predicted as fast as it was.
        let fast = Calibration { products: 1.25e11, ..calibration };
        let gpu = Cluster::parse("own.toml", &fast.to_toml()).unwrap().gpu;
        close(gpu.peak(DType::F32).unwrap() * gpu.product_efficiency, 1.25e11);
        close(gpu.peak(DType::F32).unwrap() * gpu.attention_efficiency, 2e10);
        close(gpu.peak(DType::BF16).unwrap(), 2e11);
    }
}
