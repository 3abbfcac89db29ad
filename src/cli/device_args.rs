//! The options that say where and in what type to compute.

use clap::Args;
use ferrotron::{DType, Device, Error, Result};

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Device")]
pub struct DeviceArgs {
    /// Where to compute: cpu
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: String,
    /// Threads that compute [default: all cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Type of weights and activations: f32 or f64
    #[arg(long, value_name = "DTYPE", default_value = "f32")]
    pub dtype: String,
}

impl DeviceArgs {
    pub fn threads(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, |cores| cores.get());
        self.threads.unwrap_or_else(cores)
    }

    pub fn open(&self) -> Result<Device> {
        if self.device != "cpu" {
            return Err(Error::config(
                "--device",
                format!("'{}' is not supported: use cpu", self.device),
            ));
        }
        Device::cpu(self.threads())
    }

    pub fn dtype(&self) -> Result<DType> {
        match self.dtype.parse() {
            Ok(dtype @ (DType::F32 | DType::F64)) => Ok(dtype),
            _ => Err(Error::config(
                "--dtype",
                format!("'{}' cannot be trained in: use f32 or f64", self.dtype),
            )),
        }
    }
}
