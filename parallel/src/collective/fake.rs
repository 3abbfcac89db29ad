//! Collectives without others: for a rank whose memory is of interest, and nothing else.

use super::{Call, Collective, CommVolume, Memory, Work};

/// One rank's end of a group that has no other members.
pub(super) struct Fake {
    pub name: String,
    pub rank: usize,
    pub size: usize,
}

impl Collective for Fake {
    fn name(&self) -> &str {
        &self.name
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn start(&self, _: Call, memory: Memory) -> Work<Memory> {
        Work::ready(memory)
    }

    fn traffic(&self) -> CommVolume {
        CommVolume::default()
    }
}
