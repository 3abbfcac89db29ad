//! Channels of a rank to the others of its group, one each way, made when they are first used.

use crate::collective::host::transport::channel::{RecvChannel, SendChannel};
use crate::collective::host::transport::connect::{Connect, GroupId};
use crate::collective::host::transport::header::Header;
use crate::collective::host::transport::piece::{ChannelResult, Fault, PIECE};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The pipes of one rank, by number within the group, each made when it is first needed.
pub struct PeerChannels {
    /// This rank's number within the group.
    pub rank: usize,
    /// This rank's number in the world.
    pub world_rank: usize,
    group: GroupId,
    ranks: Arc<[usize]>,
    connect: Arc<dyn Connect>,
    outgoing: BTreeMap<usize, SendChannel>,
    incoming: BTreeMap<usize, RecvChannel>,
}

impl PeerChannels {
    /// No pipes yet, in the group of `ranks`.
    pub fn new(
        group: GroupId,
        rank: usize,
        ranks: Arc<[usize]>,
        connect: Arc<dyn Connect>,
    ) -> PeerChannels {
        let (outgoing, incoming) = (BTreeMap::new(), BTreeMap::new());
        let world_rank = ranks[rank];
        PeerChannels { rank, world_rank, group, ranks, connect, outgoing, incoming }
    }

    /// Makes sure that there are pipes to and from `peers`.
    pub async fn open(&mut self, peers: &[usize]) -> ChannelResult<()> {
        for &peer in peers.iter().filter(|&&peer| peer != self.rank) {
            if !self.outgoing.contains_key(&peer) {
                let rank = self.ranks[peer];
                let (to, from) = self.connect.connect(self.group, self.world_rank, rank).await?;
                self.outgoing.insert(peer, SendChannel::new(rank, to));
                self.incoming.insert(peer, RecvChannel::new(rank, from));
            }
        }
        Ok(())
    }

    /// Returns whether no pipe that is made is a connection.
    pub fn is_near(&self) -> bool {
        self.outgoing.values().all(SendChannel::is_near)
    }

    /// Ranks in the group.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// The rank `steps` further round the ring.
    pub fn after(&self, steps: usize) -> usize {
        (self.rank + steps) % self.size()
    }

    /// The rank `steps` back round the ring, at most as many as there are ranks.
    pub fn before(&self, steps: usize) -> usize {
        (self.rank + self.size() - steps) % self.size()
    }

    /// Everybody else, beginning with the next rank round the ring.
    pub fn others(&self) -> Vec<usize> {
        (1..self.size()).map(|steps| self.after(steps)).collect()
    }

    /// The ranks to which there are pipes, beginning with the one before round the ring, which probably comes last: ranks
    /// that take turns on a core come in the order of the ring, in which they are sent to and woken. A rank that waits for
    /// the last one first is woken once, not once for each.
    pub fn last_first(&self) -> Vec<usize> {
        let (below, above) = (self.outgoing.range(..self.rank), self.outgoing.range(self.rank..));
        below.rev().chain(above.rev()).map(|(&rank, _)| rank).collect()
    }

    /// The pipe to `to`.
    pub fn to(&mut self, to: usize) -> ChannelResult<&mut SendChannel> {
        self.outgoing.get_mut(&to).ok_or_else(no_channel)
    }

    /// The pipe from `from`.
    pub fn from(&mut self, from: usize) -> ChannelResult<&mut RecvChannel> {
        self.incoming.get_mut(&from).ok_or_else(no_channel)
    }

    /// A pipe each way.
    pub fn pair(
        &mut self,
        to: usize,
        from: usize,
    ) -> ChannelResult<(&mut SendChannel, &mut RecvChannel)> {
        let outgoing = self.outgoing.get_mut(&to).ok_or_else(no_channel)?;
        Ok((outgoing, self.incoming.get_mut(&from).ok_or_else(no_channel)?))
    }

    /// Bytes of payload sent so far, to everybody.
    pub fn payload(&self) -> u64 {
        self.outgoing.values().map(SendChannel::payload).sum()
    }

    /// Waits until no memory is lent any more.
    pub async fn wait_sends(&mut self) -> ChannelResult<()> {
        for to in self.last_first() {
            self.to(to)?.wait_sends().await?;
        }
        Ok(())
    }

    /// Takes back what is lent, after a call that has failed.
    pub fn cancel_sends(&mut self) {
        self.release();
        self.outgoing.values_mut().for_each(SendChannel::cancel_sends);
    }

    /// Gives back what others have lent, and wait for: a call that panicked may hold it.
    fn release(&mut self) {
        self.incoming.values_mut().for_each(RecvChannel::release);
    }

    /// Tells `to` what this rank calls, and expects the same of `from`. No data of theirs is read before their header
    /// has come and been compared. An algorithm that sends
    /// [`WINDOW`](crate::collective::host::transport::piece::WINDOW) pieces must have called
    /// [`PeerChannels::recv_headers`] before it sends more. If ranks mean different calls, one of them must listen.
    pub async fn send_headers(
        &mut self,
        mine: &Header,
        to: &[usize],
        from: &[usize],
    ) -> ChannelResult<()> {
        self.open(to).await?;
        self.open(from).await?;
        for &to in to {
            self.to(to)?.send_header(mine).await?;
        }
        let me = self.world_rank;
        for &from in from {
            self.from(from)?.expect(*mine, me);
        }
        Ok(())
    }

    /// Sends the headers that have not gone out with data, and waits for those that have not come.
    ///
    /// Errors if a rank calls something else.
    pub async fn recv_headers(&mut self) -> ChannelResult<()> {
        self.flush();
        for from in self.last_first() {
            self.from(from)?.recv_header().await?;
        }
        Ok(())
    }

    /// Sends the headers that have not gone out with data.
    pub fn flush(&self) {
        self.outgoing.values().for_each(SendChannel::flush);
    }

    /// Tells `to` what this rank calls and hears from `from` what they call.
    ///
    /// Errors if one of them calls something else.
    pub async fn check_headers(
        &mut self,
        mine: &Header,
        to: &[usize],
        from: &[usize],
    ) -> ChannelResult<()> {
        self.send_headers(mine, to, from).await?;
        self.recv_headers().await
    }
}

impl Drop for PeerChannels {
    fn drop(&mut self) {
        self.release();
        self.connect.close(self.group, self.world_rank);
    }
}

fn no_channel() -> Fault {
    Fault::Protocol("a rank has no pipe to itself".to_string())
}

/// The pieces that `len` bytes are sent in.
pub fn pieces(len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(PIECE).map(move |start| start..len.min(start + PIECE))
}

/// The bytes of `part` from `start` on, counted from its beginning, at most `len` of them.
pub fn clip(part: &Range<usize>, start: usize, len: usize) -> Range<usize> {
    let from = part.end.min(part.start + start);
    from..part.end.min(from + len)
}
