//! Algorithms in which every rank talks with every other: all-to-all, exchanges, sums of 16-bit numbers, and small
//! all-reduces. Sums of 16-bit numbers must not be rounded on their way round a ring.

use ferrotron_tensor::DType;
use std::ops::Range;

use crate::collective::host::algorithms::combine::ReduceKernels;
use crate::collective::host::transport::peer_channels::{PeerChannels, clip, pieces};
use crate::collective::host::transport::piece::{ChannelResult, PIECE, WINDOW};
use crate::collective::narrow_sums::{round, widen_add};

/// Sends `output` to rank `to` while `input` comes from rank `from`.
pub async fn send_recv(
    links: &mut PeerChannels,
    to: usize,
    from: usize,
    output: &[u8],
    input: &mut [u8],
) -> ChannelResult<()> {
    let (mut outgoing, mut incoming) = (pieces(output.len()), pieces(input.len()));
    for round in 0.. {
        let sends = outgoing.next();
        if let Some(place) = sends.clone() {
            // SAFETY: `run` waits until it is sent, or its caller gives it up, and nothing here writes `output`.
            unsafe { links.to(to)?.lend(&output[place]).await? };
        }
        if round < WINDOW {
            continue;
        }
        if round == WINDOW {
            links.recv_headers().await?;
        }
        let receives = incoming.next();
        if let Some(place) = receives.clone() {
            links.from(from)?.recv(&mut input[place]).await?;
        }
        if sends.is_none() && receives.is_none() {
            break;
        }
    }
    Ok(())
}

/// Part i of `input` goes to rank i; what they send comes to `output`, in the order of ranks.
pub async fn all_to_all(
    links: &mut PeerChannels,
    parts: &[Range<usize>],
    input: &[u8],
    output: &mut [u8],
) -> ChannelResult<()> {
    let rank = links.rank;
    let own = parts[rank].len();
    output[rank * own..(rank + 1) * own].copy_from_slice(&input[parts[rank].clone()]);
    for steps in 1..links.size() {
        let (to, from) = (links.after(steps), links.before(steps));
        let place = &mut output[from * own..(from + 1) * own];
        send_recv(links, to, from, &input[parts[to].clone()], place).await?;
    }
    Ok(())
}

/// Sums all ranks' 16-bit numbers in f32 in the order of ranks and rounds once. Part i arrives on rank i, at its place
/// in `bytes`.
pub async fn reduce_scatter_narrow(
    links: &mut PeerChannels,
    dtype: DType,
    parts: &[Range<usize>],
    bytes: &mut [u8],
) -> ChannelResult<()> {
    let own = parts[links.rank].clone();
    let longest = parts.iter().map(Range::len).max().unwrap_or(0);
    let mut sum = vec![0.0_f32; longest.min(PIECE) / 2];
    let window = WINDOW * PIECE;
    for start in (0..longest + window).step_by(PIECE) {
        for to in links.others() {
            let place = clip(&parts[to], start, PIECE);
            if !place.is_empty() {
                // SAFETY: `run` waits until it is sent, or its caller gives it up. Only this rank's own part is
                // written here; an all-gather that follows writes the others when their owners have received what was
                // sent.
                unsafe { links.to(to)?.lend(&bytes[place]).await? };
            }
        }
        if start < window {
            continue;
        }
        if start == window {
            links.recv_headers().await?;
        }
        let place = clip(&own, start - window, PIECE);
        if place.is_empty() {
            continue;
        }
        let sum = &mut sum[..place.len() / 2];
        sum.fill(-0.0); // what a sum begins with so that -0 stays -0
        for from in 0..links.size() {
            if from == links.rank {
                widen_add(dtype, sum, &bytes[place.clone()]);
            } else {
                let from = links.from(from)?;
                widen_add(dtype, sum, from.piece(place.len()).await?);
                from.release();
            }
        }
        round(dtype, &mut bytes[place], sum);
    }
    Ok(())
}

/// Reduces to parts: part i arrives on rank i, at its place in `bytes`, added in the order of the ring, so with the ring's
/// bits. Parts are at most a piece.
///
/// Ranks wait once, not once for each step round a ring: ranks that share a core take turns that often.
pub async fn reduce_scatter_small(
    links: &mut PeerChannels,
    parts: &[Range<usize>],
    bytes: &mut [u8],
    kernels: &ReduceKernels,
) -> ChannelResult<()> {
    for to in links.others() {
        let place = parts[to].clone();
        if !place.is_empty() {
            // SAFETY: `run` waits until it is sent, or its caller gives it up. Only this rank's own part is written
            // here; an all-gather that follows writes the others when their owners have received what was sent.
            unsafe { links.to(to)?.lend(&bytes[place]).await? };
        }
    }
    links.recv_headers().await?;
    let own = parts[links.rank].clone();
    if own.is_empty() {
        return Ok(());
    }
    let mut words = vec![0_u64; own.len().div_ceil(size_of::<u64>())]; // aligned for any element
    let sum = &mut bytemuck::cast_slice_mut(&mut words)[..own.len()];
    for (index, from) in links.others().into_iter().enumerate() {
        let from = links.from(from)?;
        if index == 0 {
            from.recv(sum).await?;
        } else {
            (kernels.accumulate)(sum, from.piece(own.len()).await?);
            from.release();
        }
    }
    (kernels.accumulate)(&mut bytes[own], sum);
    Ok(())
}

/// Sends this rank's part of `bytes` to all others, and receives theirs. Parts are at most a piece.
pub async fn all_gather_small(
    links: &mut PeerChannels,
    parts: &[Range<usize>],
    bytes: &mut [u8],
) -> ChannelResult<()> {
    let own = parts[links.rank].clone();
    for to in links.others().into_iter().filter(|_| !own.is_empty()) {
        // SAFETY: `run` waits until it is sent, or its caller gives it up, and nothing here writes this rank's part.
        unsafe { links.to(to)?.lend(&bytes[own.clone()]).await? };
    }
    links.recv_headers().await?;
    for from in links.last_first() {
        let place = parts[from].clone();
        if !place.is_empty() {
            links.from(from)?.recv(&mut bytes[place]).await?;
        }
    }
    Ok(())
}
