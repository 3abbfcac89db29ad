//! The options that say where and in what type to compute.

use clap::Args;
use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::{DType, Device, Error, Result};

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Device")]
pub struct DeviceArgs {
    /// Where to compute: cpu
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: String,
    /// Threads that compute [default: all cores, shared out among the ranks of the machine]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Type of weights and activations, f32 or f64 [default: that of the checkpoint, or f32]
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<String>,
}

impl DeviceArgs {
    pub fn threads(&self) -> usize {
        self.threads.unwrap_or_else(cores)
    }

    pub fn open(&self) -> Result<Device> {
        self.open_shared(1)
    }

    /// The device of one of `ranks` on this machine.
    pub fn open_shared(&self, ranks: usize) -> Result<Device> {
        if self.device != "cpu" {
            return Err(Error::config(
                "--device",
                format!("'{}' is not supported: use cpu", self.device),
            ));
        }
        Device::cpu(self.threads.unwrap_or_else(|| (cores() / ranks).max(1)))
    }

    pub fn dtype(&self) -> Result<DType> {
        match self.dtype.as_deref().unwrap_or("f32").parse() {
            Ok(dtype @ (DType::F32 | DType::F64)) => Ok(dtype),
            _ => Err(Error::config(
                "--dtype",
                format!(
                    "'{}' cannot be computed in: use f32 or f64",
                    self.dtype.as_deref().unwrap_or_default()
                ),
            )),
        }
    }

    /// The dtype of a checkpoint, which an option must not contradict.
    pub fn dtype_of(&self, checkpoint: &Checkpoint) -> Result<DType> {
        let dtype = checkpoint.dtype()?;
        if self.dtype.is_some() && self.dtype()? != dtype {
            return Err(Error::config("--dtype", format!("the checkpoint holds {dtype}")));
        }
        Ok(dtype)
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get())
}
