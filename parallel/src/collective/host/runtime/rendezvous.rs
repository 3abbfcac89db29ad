//! The interface through which groups reach other ranks: connections, and questions how far they are.

use std::future::Future;
use std::pin::Pin;

use crate::collective::ControlVolume;
use crate::collective::host::runtime::census::{Census, Query};
use crate::collective::host::runtime::world_health::{Entry, Reply};
use crate::collective::host::transport::connect::{Connect, GroupId};

/// Connects ranks and asks them.
pub trait Rendezvous: Connect {
    /// Asks ranks, by their numbers in the world, whether they have entered calls of a group; one reply for
    /// each question.
    fn ask<'a>(
        &'a self,
        group: GroupId,
        questions: &'a [(usize, Entry)],
    ) -> Pin<Box<dyn Future<Output = Vec<Reply>> + 'a>>;

    /// Asks all ranks of the world whether they are there and, with a query, whether they have entered its call.
    fn census(&self, query: Option<Query>) -> Pin<Box<dyn Future<Output = Census> + '_>>;

    /// Returns how it stands with a rank of a group that this rank has tried in vain to reach.
    fn unreached(&self, _group: GroupId) -> Option<String> {
        None
    }

    /// Counts this rank's connections, and its messages that belong to no call.
    fn traffic(&self) -> ControlVolume {
        ControlVolume::default()
    }
}
