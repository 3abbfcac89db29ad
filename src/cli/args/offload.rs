//! The options of offloading and of the form of saved activations, with the names of Megatron-LM where it has the
//! option.

use clap::{Args, ValueEnum};
use ferrotron::autograd::{ActivationCompressionConfig, ZeroEncoding};
use ferrotron::models::gpt::SavedActivations;
use ferrotron::models::trainer::ParallelConfig;
use ferrotron::{DType, Device, Error, MemoryKind, Result, Tensor};
use std::path::{Path, PathBuf};

use crate::cli::args::run::RunArgs;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HalfArg {
    Bf16,
    F16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EncodingArg {
    Dense,
    Sparse,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Offloading and compression")]
pub struct OffloadArgs {
    /// Keep the optimizer's moments and master weights in host memory: on a CPU, in a mapped file
    #[arg(long)]
    pub offload_optimizer_states: bool,
    /// Keep in host memory what the first N blocks of each pipeline stage's chunk need for backward [default: 0]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub cpu_offloading_num_layers: usize,
    /// Folder of the files of host memory, which have no names [default: the run's place: --save, --load or runs]
    #[arg(long, value_name = "DIR")]
    pub offload_folder: Option<PathBuf>,
    /// Keep the f32 activations of blocks for backward in 16 bits [default: as they are]
    #[arg(long, value_name = "DTYPE", value_enum)]
    pub saved_activations_dtype: Option<HalfArg>,
    /// sparse: keep of a ReLU's result what is not zero, and a bit for each element [default: dense]
    #[arg(
        long,
        value_name = "HOW",
        value_enum,
        default_value = "dense",
        hide_default_value = true
    )]
    pub saved_activations_encoding: EncodingArg,
}

impl OffloadArgs {
    /// `parallel` with these options, for activations of `dtype`.
    pub fn config(&self, parallel: ParallelConfig, dtype: DType) -> Result<ParallelConfig> {
        let offloads = self.offload_optimizer_states || self.cpu_offloading_num_layers > 0;
        if self.offload_folder.is_some() && !offloads {
            let needs = "needs --offload-optimizer-states or --cpu-offloading-num-layers";
            return Err(Error::config("--offload-folder", needs));
        }
        if self.saved_activations_dtype.is_some() && dtype != DType::F32 {
            let message = format!("needs activations in f32, got {dtype}");
            return Err(Error::config("--saved-activations-dtype", message));
        }
        Ok(ParallelConfig {
            optimizer_states: match self.offload_optimizer_states {
                true => MemoryKind::Host,
                false => MemoryKind::Device,
            },
            saved_activations: SavedActivations {
                offloaded_layers: self.cpu_offloading_num_layers,
                packing: ActivationCompressionConfig {
                    dtype: self.saved_activations_dtype.map(|dtype| match dtype {
                        HalfArg::Bf16 => DType::BF16,
                        HalfArg::F16 => DType::F16,
                    }),
                    zeros: match self.saved_activations_encoding {
                        EncodingArg::Dense => ZeroEncoding::Kept,
                        EncodingArg::Sparse => ZeroEncoding::Bitmap,
                    },
                },
            },
            ..parallel
        })
    }

    /// Errors if something is to wait in host memory of a CPU and no file can be made for it.
    pub fn check(&self, run: &RunArgs) -> Result<()> {
        if self.offload_optimizer_states || self.cpu_offloading_num_layers > 0 {
            let device = Device::cpu_with_offload_folder(1, self.folder(run))?;
            Tensor::empty_in(MemoryKind::Host, &device, DType::U8, &[1])?;
        }
        Ok(())
    }

    /// The folder of the files of host memory: on the disk of the run, unless another is given. The system's folder for
    /// temporary files is memory on many machines.
    pub fn folder(&self, run: &RunArgs) -> PathBuf {
        let loaded = run.load.as_deref().filter(|path| path.is_dir());
        let folder = self.offload_folder.as_deref().or(run.save.as_deref()).or(loaded);
        folder.unwrap_or(Path::new("runs")).to_path_buf()
    }
}
