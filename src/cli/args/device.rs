//! The options that say where and in what type to compute.

use clap::Args;
use ferrotron::cuda::cublaslt::AlgorithmChoice;
use ferrotron::cuda::gpu::GpuConfig;
use ferrotron::cuda::library::Search;
use ferrotron::cuda::nvrtc::Architecture;
use ferrotron::cuda::probe::devices;
use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::models::memory::PlannedDevice;
use ferrotron::models::trainer::ExecutionMode;
use ferrotron::{DType, Device, Error, Result};
use std::ops::Range;
use std::path::PathBuf;

use crate::cli::rank_environment::rank_environment;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Device")]
pub struct DeviceArgs {
    /// Device to compute on: cpu, cuda:N for a GPU by its number, or cuda for that of LOCAL_RANK, else the first
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: String,
    /// Threads that compute [default: all cores, shared out among the ranks of the machine]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Type of weights and activations: f32, f64, bf16 or f16 [default: that of the checkpoint or folder, or f32]
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<String>,
    /// The same as --dtype bf16
    #[arg(long)]
    pub bf16: bool,
    /// The same as --dtype f16
    #[arg(long)]
    pub fp16: bool,
}

/// The way in which a GPU is given its work.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Device")]
pub struct ExecutionArgs {
    /// Capture a step as one CUDA graph, and replay it for those that are alike
    #[arg(long)]
    pub(super) enable_cuda_graph: bool,
    /// Time the algorithms of matrix products on the GPU, and keep the fastest ones in the user's cache
    #[arg(long)]
    autotune_gemm: bool,
}

impl ExecutionArgs {
    /// Whether steps become CUDA graphs.
    pub fn captures_steps(&self) -> bool {
        self.enable_cuda_graph
    }

    /// The chosen mode. Errors if a mode for GPUs was asked of a CPU.
    pub fn execution(&self, device: &DeviceArgs) -> Result<ExecutionMode> {
        match (self.enable_cuda_graph, device.place()?) {
            (false, _) => Ok(ExecutionMode::Eager),
            (true, DeviceChoice::Cpu) => {
                Err(Error::config("--enable-cuda-graph", ExecutionMode::NEEDS_GPU))
            }
            (true, DeviceChoice::Gpus | DeviceChoice::Gpu(_)) => Ok(ExecutionMode::CudaGraph),
        }
    }

    /// The rule by which algorithms of matrix products are chosen. Errors if a CPU, which has one, was asked to choose.
    pub fn algorithms(&self, device: &DeviceArgs) -> Result<AlgorithmChoice> {
        match (self.autotune_gemm, device.place()?) {
            (false, _) => Ok(AlgorithmChoice::Heuristic),
            (true, DeviceChoice::Cpu) => {
                let message = "chooses among the algorithms of a GPU: add --device cuda";
                Err(Error::config("--autotune-gemm", message))
            }
            (true, DeviceChoice::Gpus | DeviceChoice::Gpu(_)) => Ok(AlgorithmChoice::autotuned()),
        }
    }
}

/// The value of `--device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChoice {
    Cpu,
    /// The GPU of each rank's number on its machine.
    Gpus,
    /// One GPU, for all ranks of the machine.
    Gpu(usize),
}

/// Memory of a GPU, and who is to share it.
#[derive(Debug, Clone, Copy)]
pub struct GpuMemory {
    pub bytes: u64,
    pub shared: bool,
}

impl DeviceArgs {
    /// Threads of one of `ranks` on this machine.
    pub fn shared_threads(&self, ranks: usize) -> usize {
        match self.place() {
            Ok(DeviceChoice::Gpus | DeviceChoice::Gpu(_)) => 1,
            _ => self.threads.unwrap_or_else(|| (cores() / ranks.max(1)).max(1)),
        }
    }

    /// The device of one of `ranks` on this machine, as far as its memory is concerned.
    pub fn planned(&self, ranks: usize) -> PlannedDevice {
        /// The architecture of a GPU that is not here: Hopper's.
        const USUAL: Architecture = Architecture { major: 9, minor: 0 };
        let ordinal = match self.place() {
            Ok(DeviceChoice::Gpus) => 0,
            Ok(DeviceChoice::Gpu(ordinal)) => ordinal,
            _ => return PlannedDevice::Cpu { threads: self.shared_threads(ranks) },
        };
        let found = devices(&Search::from_environment()).unwrap_or_default();
        PlannedDevice::Gpu(found.get(ordinal).map_or(USUAL, |device| device.architecture))
    }

    pub fn place(&self) -> Result<DeviceChoice> {
        let number = |text: &str| text.parse().ok().map(DeviceChoice::Gpu);
        let place = match self.device.as_str() {
            "cpu" => Some(DeviceChoice::Cpu),
            "cuda" => Some(DeviceChoice::Gpus),
            text => text.strip_prefix("cuda:").and_then(number),
        };
        place.ok_or_else(|| {
            let message = format!("'{}' is no device: use cpu, cuda or cuda:N", self.device);
            Error::config("--device", message)
        })
    }

    /// The device of a process that computes alone, or under a launcher beside others.
    pub fn open(&self) -> Result<Device> {
        self.open_with(AlgorithmChoice::Heuristic)
    }

    /// Like [`DeviceArgs::open`], with this choice of a GPU's algorithms.
    pub fn open_with(&self, algorithms: AlgorithmChoice) -> Result<Device> {
        let local_rank = rank_environment()?.map_or(0, |rank| rank.local_rank);
        self.open_shared(1, local_rank, std::env::temp_dir(), algorithms)
    }

    /// The device of rank `local_rank` of `ranks` on this machine, with a CPU's host memory in files of a folder.
    pub fn open_shared(
        &self,
        ranks: usize,
        local_rank: usize,
        offload_folder: PathBuf,
        algorithms: AlgorithmChoice,
    ) -> Result<Device> {
        let ordinal = match self.place()? {
            DeviceChoice::Cpu => {
                let threads = self.shared_threads(ranks);
                return Device::cpu_with_offload_folder(threads, offload_folder);
            }
            DeviceChoice::Gpus => local_rank,
            DeviceChoice::Gpu(ordinal) => ordinal,
        };
        let config = GpuConfig { algorithms, ..GpuConfig::new(ordinal) };
        Device::cuda(&config).map_err(|error| self.unavailable(&error))
    }

    /// The memory of the GPUs of the ranks with these numbers on this machine, of the smallest if there are several;
    /// `None` on a CPU.
    ///
    /// Errors, naming the remedy, if one is not there. Nothing is started on any.
    pub fn gpu_memory(&self, numbers: Range<usize>) -> Result<Option<GpuMemory>> {
        let (ordinals, shared): (Vec<usize>, bool) = match self.place()? {
            DeviceChoice::Cpu => return Ok(None),
            DeviceChoice::Gpus => (numbers.collect(), false),
            DeviceChoice::Gpu(ordinal) => (vec![ordinal], true),
        };
        let found =
            devices(&Search::from_environment()).map_err(|error| self.unavailable(&error))?;
        let bytes = |&ordinal: &usize| match found.get(ordinal) {
            Some(device) => Ok(device.memory as u64),
            None => {
                let there = match found.len() {
                    1 => "1 GPU".to_string(),
                    count => format!("{count} GPUs"),
                };
                let share =
                    if shared { "" } else { "; --device cuda:0 lets ranks share the first" };
                Err(self.unavailable(&format!("there is no GPU {ordinal}, only {there}{share}")))
            }
        };
        let smallest = ordinals.iter().map(bytes).collect::<Result<Vec<_>>>()?.into_iter().min();
        Ok(smallest.map(|bytes| GpuMemory { bytes, shared }))
    }

    fn unavailable(&self, why: &dyn std::fmt::Display) -> Error {
        let message = format!("{}: {why} ('ferrotron doctor' tells what is there)", self.device);
        Error::config("--device", message)
    }

    pub fn dtype(&self) -> Result<DType> {
        Ok(self.given_dtype()?.unwrap_or(DType::F32))
    }

    /// The dtype that was asked for. Errors if there are two.
    pub fn given_dtype(&self) -> Result<Option<DType>> {
        let named = self.dtype.as_deref().map(|name| (format!("--dtype {name}"), name));
        let flags = [(self.bf16, "--bf16", "bf16"), (self.fp16, "--fp16", "f16")];
        let flags = flags.into_iter().filter(|(is_on, ..)| *is_on);
        let flags = flags.map(|(_, flag, name)| (flag.to_string(), name));
        let given: Vec<(String, &str)> = named.into_iter().chain(flags).collect();
        let name = given.first().map(|(_, name)| *name);
        if let Some((other, _)) = given.iter().find(|(_, other)| Some(*other) != name) {
            let message =
                format!("{} and {other} exclude each other: give one of them", given[0].0);
            return Err(Error::config("", message));
        }
        let float = |name: &str| match name.parse() {
            Ok(dtype @ (DType::F32 | DType::F64 | DType::BF16 | DType::F16)) => Ok(dtype),
            _ => Err(Error::config(
                "--dtype",
                format!("'{name}' cannot be computed in: use f32, f64, bf16 or f16"),
            )),
        };
        name.map(float).transpose()
    }

    /// Errors if a run cannot resume from `checkpoint` in the dtype that was asked for.
    pub fn check_resumable(&self, checkpoint: &Checkpoint) -> Result<()> {
        let (held, wanted) = (checkpoint.dtype()?, self.dtype()?);
        // f32, bf16 and f16 share their optimizer's state, which is in f32.
        if (wanted == DType::F64) != (held == DType::F64) {
            let message = format!(
                "the checkpoint holds {held}, and its optimizer's state cannot be resumed in {wanted}: leave --dtype \
                 out, or give --dtype {held}"
            );
            return Err(Error::config("--dtype", message));
        }
        Ok(())
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get())
}
