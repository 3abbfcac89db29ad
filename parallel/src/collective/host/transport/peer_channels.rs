//! Channels of a rank to the others of its group, one each way.

use crate::collective::host::transport::channel::{RecvChannel, SendChannel};
use crate::collective::host::transport::header::Header;
use crate::collective::host::transport::piece::{ChannelResult, Fault, PIECE};
use std::ops::Range;

/// The pipes of one rank, by number within the group.
pub struct PeerChannels {
    /// This rank's number within the group.
    pub rank: usize,
    /// This rank's number in the world.
    pub world_rank: usize,
    /// Pipes to everybody but this rank itself.
    pub outgoing: Vec<Option<SendChannel>>,
    /// Pipes from everybody but this rank itself.
    pub incoming: Vec<Option<RecvChannel>>,
}

impl PeerChannels {
    /// No pipes yet, in the group of `ranks`.
    pub fn empty(rank: usize, ranks: &[usize]) -> PeerChannels {
        let (outgoing, incoming) = ranks.iter().map(|_| (None, None)).unzip();
        PeerChannels { rank, world_rank: ranks[rank], outgoing, incoming }
    }

    /// Ranks in the group.
    pub fn size(&self) -> usize {
        self.outgoing.len()
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

    /// The pipe to `to`.
    pub fn to(&mut self, to: usize) -> ChannelResult<&mut SendChannel> {
        self.outgoing[to].as_mut().ok_or_else(no_channel)
    }

    /// The pipe from `from`.
    pub fn from(&mut self, from: usize) -> ChannelResult<&mut RecvChannel> {
        self.incoming[from].as_mut().ok_or_else(no_channel)
    }

    /// A pipe each way.
    pub fn pair(
        &mut self,
        to: usize,
        from: usize,
    ) -> ChannelResult<(&mut SendChannel, &mut RecvChannel)> {
        let outgoing = self.outgoing[to].as_mut().ok_or_else(no_channel)?;
        Ok((outgoing, self.incoming[from].as_mut().ok_or_else(no_channel)?))
    }

    /// Bytes of payload sent so far, to everybody.
    pub fn payload(&self) -> u64 {
        self.outgoing.iter().flatten().map(SendChannel::payload).sum()
    }

    /// Waits until no memory is lent any more.
    pub async fn wait_sends(&mut self) -> ChannelResult<()> {
        for outgoing in self.outgoing.iter_mut().flatten() {
            outgoing.wait_sends().await?;
        }
        Ok(())
    }

    /// Takes back what is lent, after a call that has failed.
    pub fn cancel_sends(&mut self) {
        self.outgoing.iter_mut().flatten().for_each(SendChannel::cancel_sends);
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
        self.outgoing.iter().flatten().for_each(SendChannel::flush);
        for incoming in self.incoming.iter_mut().flatten() {
            incoming.recv_header().await?;
        }
        Ok(())
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
