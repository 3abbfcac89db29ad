//! A request to stop: set by a signal handler or another thread, read by the loops that may take long.

use ferrotron_parallel::collective::{Group, Reduction, Work};
use ferrotron_tensor::{DType, Device, Result, Tensor};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A flag that asks a run to stop. Clones share it.
///
/// ```
/// use ferrotron_models::stop::StopFlag;
/// let stop = StopFlag::default();
/// let other = stop.clone();
/// other.set();
/// assert!(stop.is_set());
/// ```
#[derive(Debug, Clone, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// Asks for the end.
    pub fn set(&self) {
        self.0.store(true, Relaxed);
    }

    /// Whether this process was asked.
    pub fn is_set(&self) -> bool {
        self.0.load(Relaxed)
    }

    /// Whether any rank of `world` was asked: the same answer on every rank, which all call this and wait for one another.
    ///
    /// # Errors
    /// As the communication does.
    pub fn is_set_on_any(&self, world: &Group) -> Result<bool> {
        self.ask_all(world, &Device::cpu(1)?)?.wait()
    }

    /// Whether any rank of `world` was asked: the same answer on every rank. All ranks call this; waiting for the result
    /// waits for the other ranks. The number goes through memory of `host`.
    pub(crate) fn ask_all(&self, world: &Group, host: &Device) -> Result<Work<bool>> {
        if world.size() == 1 {
            return Ok(Work::ready(self.is_set()));
        }
        let own = Tensor::full(host, DType::F64, &[1], f64::from(u8::from(self.is_set())))?;
        let sum = world.all_reduce(own, Reduction::Sum)?;
        Ok(sum.map(|sum| Ok(sum.item()? > 0.0)))
    }
}

impl From<Arc<AtomicBool>> for StopFlag {
    /// A flag that other code sets: the handler of a signal.
    fn from(flag: Arc<AtomicBool>) -> StopFlag {
        StopFlag(flag)
    }
}
