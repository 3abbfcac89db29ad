//! The interface through which a group forms, and asks ranks how far they are.

use ferrotron_tensor::Result;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use crate::collective::host::runtime::progress::ProgressThread;
use crate::collective::host::runtime::world_health::{Entry, Reply};
use crate::collective::host::transport::peer_channels::PeerChannels;

/// Gives the members of a group channels to each other.
pub trait Rendezvous: Send + Sync {
    /// The pipes of member `own` of the group `id` of `ranks`.
    fn links(
        &self,
        progress: &ProgressThread,
        id: &Arc<str>,
        own: usize,
        ranks: &[usize],
    ) -> Result<PeerChannels>;

    /// Asks ranks, by their numbers in the world, whether they have entered calls of a group; one reply for
    /// each question.
    fn ask<'a>(
        &'a self,
        group: &'a Arc<str>,
        questions: &'a [(usize, Entry)],
    ) -> Pin<Box<dyn Future<Output = Vec<Reply>> + 'a>>;

    /// Asks all ranks of the world whether they are there; returns those that do not answer.
    fn silent(&self) -> Pin<Box<dyn Future<Output = Vec<usize>> + '_>>;
}
