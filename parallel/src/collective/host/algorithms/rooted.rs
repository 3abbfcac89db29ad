//! Broadcast, reduce, gather and scatter: one rank has, or gets, what concerns all.

use ferrotron_tensor::DType;
use std::ops::Range;

use crate::collective::host::algorithms::combine::ReduceKernels;
use crate::collective::host::algorithms::pairwise::reduce_scatter_narrow;
use crate::collective::host::transport::peer_channels::{PeerChannels, pieces};
use crate::collective::host::transport::piece::ChannelResult;

/// The root's bytes, to everybody: along a chain that begins at the root, piece after piece.
pub async fn broadcast(
    links: &mut PeerChannels,
    root: usize,
    bytes: &mut [u8],
) -> ChannelResult<()> {
    let (receives, sends) = chain(links, root);
    for place in pieces(bytes.len()) {
        if receives {
            links.from(links.before(1))?.recv(&mut bytes[place.clone()]).await?;
        }
        if sends {
            // SAFETY: `run` waits until it is sent, or its caller gives it up, and a piece that has come in does not
            // change again.
            unsafe { links.to(links.after(1))?.lend(&bytes[place]).await? };
        }
    }
    Ok(())
}

/// Returns whether a rank receives and whether it sends in a chain that begins at `first`.
fn chain(links: &PeerChannels, first: usize) -> (bool, bool) {
    (links.rank != first, links.after(1) != first)
}

/// The reduction of everybody's bytes, to the root: along a chain that ends there. The bytes of the others
/// stay as they are.
pub async fn reduce(
    links: &mut PeerChannels,
    root: usize,
    bytes: &mut [u8],
    kernels: &ReduceKernels,
) -> ChannelResult<()> {
    let first = (root + 1) % links.size();
    for place in pieces(bytes.len()) {
        if links.rank == first {
            // SAFETY: `run` waits until it is sent, or its caller gives it up, and only the root writes its bytes.
            unsafe { links.to(links.after(1))?.lend(&bytes[place]).await? };
        } else if links.rank == root {
            let left = links.from(links.before(1))?;
            let sum = left.piece(place.len()).await?;
            (kernels.accumulate)(&mut bytes[place], sum);
            left.release();
        } else {
            let (right, left) = links.pair(links.after(1), links.before(1))?;
            let space = right.space(place.len()).await?;
            let sum = left.piece(place.len()).await?;
            (kernels.combine)(space, sum, &bytes[place]);
            left.release();
            right.commit()?;
        }
    }
    Ok(())
}

/// Reduces 16-bit numbers like [`reduce`], and rounds once: ranks sum the parts as [`reduce_scatter_narrow`] does, and
/// the root gathers them.
pub async fn reduce_narrow(
    links: &mut PeerChannels,
    root: usize,
    dtype: DType,
    parts: &[Range<usize>],
    bytes: &mut [u8],
) -> ChannelResult<()> {
    if links.rank == root {
        reduce_scatter_narrow(links, dtype, parts, bytes).await?;
        for from in links.others() {
            recv(links, from, &mut bytes[parts[from].clone()]).await?;
        }
        return Ok(());
    }
    // The sum is made in this rank's part, which must be as before in the end.
    let own = parts[links.rank].clone();
    let before = bytes[own.clone()].to_vec();
    reduce_scatter_narrow(links, dtype, parts, bytes).await?;
    send(links, root, &bytes[own.clone()]).await?;
    links.wait_sends().await?;
    bytes[own].copy_from_slice(&before);
    Ok(())
}

/// Receives everybody's part, at the root whose own is `part`, in the order of ranks.
pub async fn gather(
    links: &mut PeerChannels,
    parts: &[Range<usize>],
    part: &[u8],
    whole: &mut [u8],
) -> ChannelResult<()> {
    whole[parts[links.rank].clone()].copy_from_slice(part);
    for from in links.others() {
        recv(links, from, &mut whole[parts[from].clone()]).await?;
    }
    Ok(())
}

/// Sends everybody their part of `whole`, from the root that keeps `part`.
pub async fn scatter(
    links: &mut PeerChannels,
    parts: &[Range<usize>],
    whole: &[u8],
    part: &mut [u8],
) -> ChannelResult<()> {
    part.copy_from_slice(&whole[parts[links.rank].clone()]);
    for to in links.others() {
        send(links, to, &whole[parts[to].clone()]).await?;
    }
    Ok(())
}

/// One buffer to one rank.
pub async fn send(links: &mut PeerChannels, to: usize, bytes: &[u8]) -> ChannelResult<()> {
    let to = links.to(to)?;
    for place in pieces(bytes.len()) {
        // SAFETY: `run` waits until it is sent, or its caller gives it up, and nothing here writes what is sent.
        unsafe { to.lend(&bytes[place]).await? };
    }
    Ok(())
}

/// One buffer from one rank.
pub async fn recv(links: &mut PeerChannels, from: usize, bytes: &mut [u8]) -> ChannelResult<()> {
    let from = links.from(from)?;
    for place in pieces(bytes.len()) {
        from.recv(&mut bytes[place]).await?;
    }
    Ok(())
}
