//! Measures this machine's processor, and describes it as a cluster.
//!
//! - Peaks and memory bandwidth are the [`Ceilings`] of the device.
//! - Products of several shapes are timed. Two numbers are fitted to them, with the least relative squares: the time of an
//!   operation and that of a byte.
//! - Memory-bound kernels and attention have the speeds of a profiled training step, and what passes between kernels is
//!   the time of a launch.
//! - Two ranks, each a thread with one thread of its own, reduce a small and a large tensor.

use ferrotron_models::bench::{BenchConfig, bench};
use ferrotron_models::gpt::GptConfig;
use ferrotron_models::profile::Profile;
use ferrotron_parallel::collective::{
    RankConfig, Reduction, Transport, WorldConfig, run_rank_process,
};
use ferrotron_tensor::ceilings::Ceilings;
use ferrotron_tensor::ops::matmul::matmul;
use ferrotron_tensor::{DType, Device, Error, Result, Tensor};
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use crate::cluster::Link;
use crate::cost::PRODUCT;

/// Rows, inner dim and columns of the products that are timed.
const SHAPES: [[usize; 3]; 7] = [
    [1024, 256, 256],
    [1024, 256, 1024],
    [1024, 1024, 256],
    [256, 64, 256],
    [256, 1024, 256],
    [512, 512, 512],
    [1024, 512, 2048],
];
/// Elements of the tensors that ranks reduce.
const REDUCED: [usize; 2] = [1 << 12, 1 << 21];
/// Rounds of each measurement, of which the best counts, and seconds of a round at least.
const ROUNDS: usize = 5;
const SECONDS: f64 = 0.02;
/// Bytes of a call from which on its bandwidth is that of larger calls.
const LEAST_BYTES: f64 = 65_536.0;
/// Longest time that ranks wait for one another.
const TIMEOUT: Duration = Duration::from_secs(60);

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
    /// Bytes a second of kernels, by name.
    pub kernels: BTreeMap<String, f64>,
    /// Seconds between two kernels.
    pub launch: f64,
    /// The link between two ranks.
    pub link: Link,
}

/// Measures the threads of `device`, in half a minute. Kernels compute in `dtype`.
///
/// Errors if the device is none of this machine's processor, or if two ranks cannot meet.
pub fn calibrate(device: &Device, dtype: DType) -> Result<Calibration> {
    let ceilings = Ceilings::measure(device)?;
    let [operation, byte] = fit(&products(device, dtype)?);
    let report = bench(&BenchConfig { dtype, profile: true, ..model() }, device)?;
    let profile = report.profile.ok_or_else(|| Error::value("calibrate", "there is no profile"))?;
    let mut kernels = kernels(&profile);
    if byte > 0.0 {
        kernels.insert(PRODUCT.to_string(), 1.0 / byte);
    }
    let calls: f64 = profile.operations.iter().map(|operation| operation.calls).sum();
    Ok(Calibration {
        dtype,
        threads: device.threads(),
        cores: std::thread::available_parallelism().map_or(1, |cores| cores.get()),
        memory: memory(),
        ceilings,
        products: 1.0 / operation,
        attention: attention(&profile),
        kernels,
        launch: 1e-3 * profile.other_ms.max(0.0) / calls.max(1.0),
        link: link()?,
    })
}

/// A small model whose step has all kernels of training.
fn model() -> BenchConfig {
    BenchConfig { steps: 3, ..BenchConfig::new(GptConfig::gpt2(4096, 4, 256, 4, 256)) }
}

/// The best of some rounds of `f`, in seconds of a call.
fn seconds(mut f: impl FnMut() -> Result<()>) -> Result<f64> {
    f()?;
    let mut times = 1;
    let mut best = f64::INFINITY;
    let mut round = 0;
    while round < ROUNDS {
        let started = Instant::now();
        (0..times).try_for_each(|_| f())?;
        let taken = started.elapsed().as_secs_f64();
        if taken < SECONDS && times < 1 << 20 {
            times *= 2;
            continue;
        }
        best = best.min(taken / f64::from(times));
        round += 1;
    }
    Ok(best)
}

/// Operations, bytes and seconds of the products.
fn products(device: &Device, dtype: DType) -> Result<Vec<[f64; 3]>> {
    let time = |[rows, inner, columns]: [usize; 3]| -> Result<[f64; 3]> {
        let a = Tensor::full(device, dtype, &[rows, inner], 0.5)?;
        let b = Tensor::full(device, dtype, &[inner, columns], 0.5)?;
        let seconds = seconds(|| matmul(&a, &b).map(drop))?;
        let elements = rows * inner + inner * columns + rows * columns;
        let operations = 2.0 * (rows * inner * columns) as f64;
        Ok([operations, (elements * dtype.size()) as f64, seconds])
    };
    SHAPES.into_iter().map(time).collect()
}

/// The seconds of an operation and of a byte that give the least sum of squared relative errors, none negative.
fn fit(measured: &[[f64; 3]]) -> [f64; 2] {
    let sum = |of: &dyn Fn([f64; 2]) -> f64| -> f64 {
        measured.iter().map(|[x, y, seconds]| of([x / seconds, y / seconds])).sum()
    };
    let (xx, xy, yy) = (sum(&|[x, _]| x * x), sum(&|[x, y]| x * y), sum(&|[_, y]| y * y));
    let (x, y) = (sum(&|[x, _]| x), sum(&|[_, y]| y));
    let determinant = xx * yy - xy * xy;
    let found = [(x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant];
    match found {
        [a, b] if a > 0.0 && b >= 0.0 => found,
        _ => [x / xx, 0.0],
    }
}

/// Bytes a second of the kernels without products, over all passes. Those of small calls say nothing of larger ones.
fn kernels(profile: &Profile) -> BTreeMap<String, f64> {
    let mut sums: BTreeMap<&str, [f64; 3]> = BTreeMap::new();
    for operation in profile.operations.iter().filter(|operation| operation.gflops.is_none()) {
        let Some(rate) = operation.gb_per_s else { continue };
        let sum = sums.entry(&operation.operation).or_default();
        sum[0] += 1e6 * rate * operation.ms;
        sum[1] += 1e-3 * operation.ms;
        sum[2] += operation.calls;
    }
    let is_key = |name: &str| name.chars().all(|letter| letter.is_alphanumeric() || letter == '_');
    let large = |[bytes, seconds, calls]: [f64; 3]| bytes >= LEAST_BYTES * calls && seconds > 0.0;
    let rates = sums.into_iter().filter(|(name, sum)| is_key(name) && large(*sum));
    rates.map(|(name, [bytes, seconds, _])| (name.to_string(), bytes / seconds)).collect()
}

/// Operations a second of attention, forward and backward.
fn attention(profile: &Profile) -> f64 {
    let found = profile.operations.iter().filter(|it| it.operation.starts_with("attention"));
    let (work, ms) = found.fold((0.0, 0.0), |(work, ms), operation| {
        (work + operation.gflops.unwrap_or(0.0) * operation.ms, ms + operation.ms)
    });
    1e9 * work / ms.max(1e-9)
}

/// Bytes of memory that Linux states.
fn memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kibibytes = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kibibytes.map_or(1 << 30, |kibibytes| kibibytes << 10)
}

/// The link between two ranks of this machine, by the time of an all-reduce: each rank sends half of the bytes twice, in
/// two messages.
fn link() -> Result<Link> {
    let port = TcpListener::bind(("127.0.0.1", 0))
        .and_then(|listener| listener.local_addr())
        .map_err(|error| Error::communication("calibrate", format!("no free port: {error}")))?
        .port();
    let rank = |rank: usize| {
        let config = RankConfig {
            rank,
            size: 2,
            master: "127.0.0.1".to_string(),
            port,
            secret: None,
            job_id: None,
            transport: Transport::Auto,
            world: WorldConfig { timeout: TIMEOUT },
        };
        run_rank_process(&config, |world| {
            let (device, group) = (Device::cpu(1)?, world.everyone()?);
            let time = |elements: usize| -> Result<f64> {
                let tensor = Tensor::zeros(&device, DType::F32, &[elements])?;
                // Both ranks take equally many calls.
                let mut best = f64::INFINITY;
                for _ in 0..ROUNDS {
                    let (started, calls) =
                        (Instant::now(), if elements > 1 << 16 { 4 } else { 64 });
                    for _ in 0..calls {
                        group.all_reduce(tensor.contiguous()?, Reduction::Sum)?.wait()?;
                    }
                    best = best.min(started.elapsed().as_secs_f64() / f64::from(calls));
                }
                Ok(best)
            };
            Ok([time(REDUCED[0])?, time(REDUCED[1])?])
        })
    };
    let times = std::thread::scope(|scope| {
        let other = scope.spawn(|| rank(1));
        let own = rank(0);
        let other = other.join().unwrap_or_else(|_| Err(Error::value("calibrate", "a rank ended")));
        other.and(own)
    })?;
    let bytes = REDUCED.map(|elements| 4.0 * elements as f64);
    let bandwidth = (bytes[1] - bytes[0]) / (times[1] - times[0]).max(1e-9);
    let latency = ((times[0] - bytes[0] / bandwidth) / 2.0).max(0.0);
    Ok(Link { bandwidth, latency })
}

impl Calibration {
    /// How the file begins.
    pub const BEGIN: &str = "# Measured by ferrotron bench --calibrate";

    /// The file that `--cluster` reads.
    pub fn to_toml(&self) -> String {
        let Calibration { dtype, threads, cores, ceilings, link, .. } = self;
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
        let kernel = |(name, rate): (&String, &f64)| format!("{name} = {:.4}\n", rate / 1e9);
        let kernels: String = self.kernels.iter().map(kernel).collect();
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
             memory_efficiency = 1.0 # assumed, for kernels that are not listed\n\
             launch_us = {:.3}\n\n\
             [gpu.peak_tflops] # on registers\n{}\n\
             [gpu.kernel_gb_per_s]\n{kernels}\n\
             [node]\n\
             gpus = {ranks}\n\
             cores = {cores}\n\
             {link}\n\
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cluster;

    #[test]
    fn the_fit_finds_two_speeds_and_none_that_is_negative() {
        let measured = |a: f64, b: f64| {
            [[4e9, 1e6], [1e9, 5e6], [2e9, 1e7]].map(|[x, y]| [x, y, a * x + b * y])
        };
        let [a, b] = fit(&measured(1e-11, 2e-9));
        assert!((a / 1e-11 - 1.0).abs() < 1e-9 && (b / 2e-9 - 1.0).abs() < 1e-9, "{a} {b}");
        let [a, b] = fit(&measured(1e-11, -1e-10));
        assert!(a > 0.0 && b == 0.0, "{a} {b}");
    }

    #[test]
    fn the_file_is_a_cluster() {
        let calibration = Calibration {
            dtype: DType::F32,
            threads: 1,
            cores: 2,
            memory: 8_000_000_000,
            ceilings: Ceilings { f32: 1e11, f64: 5e10, bf16: 2e11, read: 1e10, update: 1.5e10 },
            products: 8e10,
            attention: 2e10,
            kernels: BTreeMap::from([("gelu_tanh".to_string(), 3e9)]),
            launch: 2e-6,
            link: Link { bandwidth: 4e9, latency: 1e-5 },
        };
        let cluster = Cluster::parse("own.toml", &calibration.to_toml()).unwrap();
        let close = |got: f64, want: f64| assert!((got / want - 1.0).abs() < 1e-3, "{got} {want}");
        assert_eq!((cluster.gpus_per_node, cluster.cores), (2, Some(2)));
        close(cluster.gpu.peak(DType::F32).unwrap(), 1e11);
        close(cluster.gpu.product_efficiency, 0.8);
        close(cluster.gpu.bandwidth_of("gelu_tanh"), 3e9);
        close(cluster.gpu.bandwidth_of("layer_norm"), 1.5e10);
        close(cluster.node.latency, 1e-5);
        assert_eq!((cluster.slowdown(), cluster.gpu.measured), (1.0, Some(DType::F32)));
        assert_eq!(Cluster { gpus_per_node: 4, ..cluster }.slowdown(), 2.0);

        // A product that was faster than the measured peak is predicted as fast as it was.
        let fast = Calibration { products: 1.25e11, ..calibration };
        let gpu = Cluster::parse("own.toml", &fast.to_toml()).unwrap().gpu;
        close(gpu.peak(DType::F32).unwrap() * gpu.product_efficiency, 1.25e11);
        close(gpu.peak(DType::F32).unwrap() * gpu.attention_efficiency, 2e10);
        close(gpu.peak(DType::BF16).unwrap(), 2e11);
    }
}
