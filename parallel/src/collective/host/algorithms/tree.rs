//! All-reduce, all-gather, reduce-scatter and broadcast along the tree of a group, for buffers whose parts would be too
//! small to go round a ring: n ranks send 2 (n - 1) messages, where a ring needs as many for each of n parts.
//!
//! Sums go up in pieces, each rank adding its children's in their order to its own; results come down. So all ranks have
//! the bits of rank 0.

use bytemuck::cast_slice_mut;
use std::ops::Range;

use crate::collective::host::algorithms::combine::ReduceKernels;
use crate::collective::host::transport::channel::SendChannel;
use crate::collective::host::transport::peer_channels::{PeerChannels, pieces};
use crate::collective::host::transport::piece::ChannelResult;
use crate::collective::tree;

/// The parent of a rank and its children, by their numbers within the group.
pub fn neighbours(links: &PeerChannels) -> (Option<usize>, Range<usize>) {
    (tree::parent(links.rank), tree::children(links.rank, links.size()))
}

/// Reduces everybody's bytes on every rank.
pub async fn all_reduce(
    links: &mut PeerChannels,
    bytes: &mut [u8],
    kernels: &ReduceKernels,
) -> ChannelResult<()> {
    let (parent, children) = neighbours(links);
    for place in pieces(bytes.len()) {
        for child in children.clone() {
            let child = links.from(child)?;
            let sum = child.piece(place.len()).await?;
            (kernels.accumulate)(&mut bytes[place.clone()], sum);
            child.release();
        }
        if let Some(parent) = parent {
            send(links.to(parent)?, &bytes[place]).await?;
        }
    }
    broadcast(links, bytes).await
}

/// The bytes of rank 0, to everybody.
pub async fn broadcast(links: &mut PeerChannels, bytes: &mut [u8]) -> ChannelResult<()> {
    let (parent, children) = neighbours(links);
    for place in pieces(bytes.len()) {
        if let Some(parent) = parent {
            links.from(parent)?.recv(&mut bytes[place.clone()]).await?;
        }
        for child in children.clone() {
            send(links.to(child)?, &bytes[place.clone()]).await?;
        }
    }
    Ok(())
}

/// Copies a piece, so that its memory need not outlive the call.
async fn send(to: &mut SendChannel, piece: &[u8]) -> ChannelResult<()> {
    to.space(piece.len()).await?.copy_from_slice(piece);
    to.commit()
}

/// Fills `bytes` from every rank's part: where others have theirs, each begins with zeros.
pub async fn all_gather(
    links: &mut PeerChannels,
    own: &Range<usize>,
    bytes: &mut [u8],
) -> ChannelResult<()> {
    bytes[..own.start].fill(0);
    bytes[own.end..].fill(0);
    let either = |a: &mut [u8], b: &[u8]| a.iter_mut().zip(b).for_each(|(a, b)| *a |= b);
    let unused = |_: &mut [u8], _: &[u8], _: &[u8]| ();
    all_reduce(links, bytes, &ReduceKernels { combine: unused, accumulate: either }).await
}

/// Reduces everybody's bytes so that this rank's part is right; the others stay as they were.
pub async fn reduce_scatter(
    links: &mut PeerChannels,
    own: &Range<usize>,
    bytes: &mut [u8],
    kernels: &ReduceKernels,
) -> ChannelResult<()> {
    let mut words = vec![0_u64; bytes.len().div_ceil(size_of::<u64>())]; // aligned for any element
    let sum = &mut cast_slice_mut(&mut words)[..bytes.len()];
    sum.copy_from_slice(bytes);
    all_reduce(links, sum, kernels).await?;
    bytes[own.clone()].copy_from_slice(&sum[own.clone()]);
    Ok(())
}
