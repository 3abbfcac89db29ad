//! Moments in the work of a device, between which its time is measured.

use std::time::Instant;

use crate::{Device, Error, Result};

/// A moment in the work of a device: of a processor the present, of a GPU the moment at which the work enqueued so far is
/// done.
#[derive(Debug)]
pub struct Moment(Clock);

#[derive(Debug)]
enum Clock {
    Host(Instant),
    Gpu(ferrotron_cuda::stream::Moment),
}

impl Device {
    /// Notes a moment in the device's work. Nothing waits for it.
    ///
    /// ```
    /// use ferrotron_tensor::{DType, Device, Tensor};
    /// let device = Device::cpu(1)?;
    /// let before = device.moment()?;
    /// let x = Tensor::zeros(&device, DType::F32, &[1000])?.exp()?;
    /// assert!(device.moment()?.seconds_since(&before)? > 0.0);
    /// # drop(x);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    ///
    /// Errors while the device's work is recorded.
    pub fn moment(&self) -> Result<Moment> {
        self.expect_no_capture("moment")?;
        Ok(Moment(match self.gpu() {
            Some(gpu) => Clock::Gpu(gpu.compute().moment().map_err(Error::from_gpu)?),
            None => Clock::Host(Instant::now()),
        }))
    }
}

impl Moment {
    /// Returns the seconds since an earlier moment of the same device. Waits until both have come.
    ///
    /// Errors if the work before them failed, or if the moments are of two kinds of devices.
    pub fn seconds_since(&self, earlier: &Moment) -> Result<f64> {
        match (&self.0, &earlier.0) {
            (Clock::Host(now), Clock::Host(then)) => Ok(now.duration_since(*then).as_secs_f64()),
            (Clock::Gpu(now), Clock::Gpu(then)) => now.seconds_since(then).map_err(Error::from_gpu),
            _ => Err(Error::device("moment", "a processor and a GPU have no clock in common")),
        }
    }
}
