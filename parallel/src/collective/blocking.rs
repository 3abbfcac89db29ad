//! A handle of a group whose calls have ended when they return.

use ferrotron_tensor::Result;
use std::sync::Arc;

use super::work::waiting;
use super::{Call, Collective, CommVolume, Memory, Work};

/// Carries out calls with [`Collective::run`].
pub(super) struct Blocking(pub Arc<dyn Collective>);

impl Collective for Blocking {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn start(&self, call: Call, memory: Memory) -> Work<Memory> {
        Work::ended(waiting(|| self.0.run(call, memory)))
    }

    fn traffic(&self) -> CommVolume {
        self.0.traffic()
    }

    fn named(&self, name: &str) -> Option<Arc<dyn Collective>> {
        Some(Arc::new(Blocking(self.0.named(name)?)))
    }

    fn check(&self) -> Result<()> {
        self.0.check()
    }

    fn fail(&self, reason: &str) {
        self.0.fail(reason);
    }
}
