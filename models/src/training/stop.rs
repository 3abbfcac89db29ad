//! A request to stop: set by a signal handler or another thread, read by the loops that may take long.

use ferrotron_parallel::collective::{Group, Reduction, Work};
use ferrotron_tensor::{Device, Result, Tensor};
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

    /// Whether any rank of `world` was asked: the same answer on every rank. All ranks call this. The number goes
    /// through memory of `host`.
    pub fn is_set_on_any_rank(&self, world: &Group, host: &Device) -> Result<bool> {
        self.ask_all(world, host)?.wait()
    }

    /// Starts [`StopFlag::is_set_on_any_rank`]; waiting for the result waits for the other ranks.
    pub(crate) fn ask_all(&self, world: &Group, host: &Device) -> Result<Work<bool>> {
        Ok(set_on_any_rank([self.is_set()], world, host)?.map(|[is_set]| Ok(is_set)))
    }
}

/// Whether each of `flags` is set on any rank of `world`: one call, with the same answer on every rank.
pub(crate) fn set_on_any_rank<const N: usize>(
    flags: [bool; N],
    world: &Group,
    host: &Device,
) -> Result<Work<[bool; N]>> {
    if world.size() == 1 {
        return Ok(Work::ready(flags));
    }
    let own = Tensor::from_slice(host, &flags.map(|flag| f64::from(u8::from(flag))), &[N])?;
    let sums = world.all_reduce(own, Reduction::Sum)?;
    Ok(sums.map(|sums| {
        let sums = sums.to_vec::<f64>()?;
        Ok(std::array::from_fn(|i| sums[i] > 0.0))
    }))
}

impl From<Arc<AtomicBool>> for StopFlag {
    /// A flag that other code sets: the handler of a signal.
    fn from(flag: Arc<AtomicBool>) -> StopFlag {
        StopFlag(flag)
    }
}
