//! The interface through which a member of a group gets a pipe to another when it first needs one.

use std::future::Future;
use std::pin::Pin;

use crate::collective::host::transport::channel::{RecvChannelKind, SendChannelKind};
use crate::collective::host::transport::piece::ChannelResult;

/// Number of a group: the same on all its members, and another one for every other group.
pub type GroupId = u64;

/// The pipes between two ranks, to and from the other.
pub type Pipes = (SendChannelKind, RecvChannelKind);

/// Connects the members of groups. Ranks are numbers in the world.
pub trait Connect: Send + Sync {
    /// The pipes between `own` and `peer` for the calls of a group. Either may ask first, or both at once. Waits for the
    /// progress thread of `peer`, but not for its calls, so that no order of calls can end in a deadlock.
    fn connect(
        &self,
        group: GroupId,
        own: usize,
        peer: usize,
    ) -> Pin<Box<dyn Future<Output = ChannelResult<Pipes>> + '_>>;

    /// Says that `own` makes no further calls in a group: pipes that it has not taken are closed.
    fn close(&self, group: GroupId, own: usize);
}
