//! Algorithms in which every rank talks with every other: all-to-all, exchanges, and sums of 16-bit numbers. Those sums
//! must not be rounded on their way round a ring.

use ferrotron_tensor::DType;
use std::ops::Range;

use crate::collective::host::algorithms::combine::{round, widen_add};
use crate::collective::host::transport::peer_channels::{PeerChannels, clip, pieces};
use crate::collective::host::transport::piece::{ChannelResult, PIECE, WINDOW};

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
            // SAFETY: `run` settles, and nothing here writes `output`.
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
                // SAFETY: `run` settles. Only this rank's own part is written here; an all-gather that
                // follows writes the others when their owners have received what was sent.
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
