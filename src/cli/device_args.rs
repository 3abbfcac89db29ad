//! The options that say where and in what type to compute.

use clap::Args;
use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::{DType, Device, Error, Result};
use std::path::PathBuf;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Device")]
pub struct DeviceArgs {
    /// Where to compute: cpu
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: String,
    /// Threads that compute [default: all cores, shared out among the ranks of the machine]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Type of weights and activations: f32, f64, bf16 or f16 [default: that of the checkpoint, or f32]
    #[arg(long, value_name = "DTYPE", overrides_with_all = ["bf16", "fp16"])]
    pub dtype: Option<String>,
    /// The same as --dtype bf16
    #[arg(long, overrides_with_all = ["dtype", "fp16"])]
    pub bf16: bool,
    /// The same as --dtype f16
    #[arg(long, overrides_with_all = ["dtype", "bf16"])]
    pub fp16: bool,
}

impl DeviceArgs {
    pub fn threads(&self) -> usize {
        self.shared_threads(1)
    }

    /// Threads of one of `ranks` on this machine.
    pub fn shared_threads(&self, ranks: usize) -> usize {
        self.threads.unwrap_or_else(|| (cores() / ranks.max(1)).max(1))
    }

    pub fn open(&self) -> Result<Device> {
        self.open_shared(1, std::env::temp_dir())
    }

    /// The device of one of `ranks` on this machine, with host memory in files of a folder.
    pub fn open_shared(&self, ranks: usize, offload_folder: PathBuf) -> Result<Device> {
        self.check()?;
        Device::cpu_with_offload_folder(self.shared_threads(ranks), offload_folder)
    }

    /// Errors if there is no such device.
    pub fn check(&self) -> Result<()> {
        match self.device.as_str() {
            "cpu" => Ok(()),
            other => {
                let message = format!("'{other}' is not supported: use cpu");
                Err(Error::config("--device", message))
            }
        }
    }

    pub fn dtype(&self) -> Result<DType> {
        Ok(self.given_dtype()?.unwrap_or(DType::F32))
    }

    fn given_dtype(&self) -> Result<Option<DType>> {
        let name = match (self.bf16, self.fp16) {
            (true, _) => Some("bf16"),
            (_, true) => Some("f16"),
            _ => self.dtype.as_deref(),
        };
        let float = |name: &str| match name.parse() {
            Ok(dtype @ (DType::F32 | DType::F64 | DType::BF16 | DType::F16)) => Ok(dtype),
            _ => Err(Error::config(
                "--dtype",
                format!("'{name}' cannot be computed in: use f32, f64, bf16 or f16"),
            )),
        };
        name.map(float).transpose()
    }

    /// The dtype that was asked for, or that of a checkpoint.
    pub fn dtype_of(&self, checkpoint: &Checkpoint) -> Result<DType> {
        let held = checkpoint.dtype()?;
        let dtype = self.given_dtype()?.unwrap_or(held);
        // f32, bf16 and f16 are rounded or widened to one another.
        if (dtype == DType::F64) != (held == DType::F64) {
            return Err(Error::config("--dtype", format!("the checkpoint holds {held}")));
        }
        Ok(dtype)
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get())
}
