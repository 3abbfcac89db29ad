//! All-reduce, reduce-scatter and all-gather round a ring: every rank sends to the next and receives from
//! the one before.
//!
//! The buffer is cut into as many parts as there are ranks, n. In step s, rank r sends part r - 1 - s and
//! receives part r - 2 - s (modulo n). In the first n - 1 steps a rank adds what it receives to its own part and sends
//! the sum to the next rank, which makes a reduce-scatter: part r arrives at rank r at the end. In the n - 1 steps that
//! follow, finished parts go round, which makes an all-gather. An all-reduce is both. In every step a rank sends what
//! it received in the step before. Every part is sent n - 1 times in each half, so all ranks together send 2 (n - 1)
//! times the buffer, the least there is (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
//! workstations", J. Parallel Distrib. Comput. 69, 2009).
//!
//! Part c is the sum ((x_{c+1} + x_{c+2}) + ...) + x_c, made once, so all ranks have the same bits.

use std::ops::Range;

use crate::collective::host::algorithms::combine::ReduceKernels;
use crate::collective::host::transport::peer_channels::{PeerChannels, clip};
use crate::collective::host::transport::piece::{ChannelResult, PIECE, WINDOW};

/// The steps of a reduce-scatter.
pub fn reduce_scatter(n: usize) -> Range<usize> {
    0..n - 1
}

/// The steps of an all-gather.
pub fn all_gather(n: usize) -> Range<usize> {
    n - 1..2 * (n - 1)
}

/// The steps of an all-reduce.
pub fn all_reduce(n: usize) -> Range<usize> {
    0..2 * (n - 1)
}

/// Goes round the ring. `parts` are ranges of `bytes`.
///
/// The parts are sent in pieces, a few of them always in flight, so that ranks add and forward while others are still
/// sending. Partial sums live in the pipes, so parts that end up elsewhere stay as they are.
pub async fn ring(
    links: &mut PeerChannels,
    parts: &[Range<usize>],
    steps: Range<usize>,
    bytes: &mut [u8],
    kernels: &ReduceKernels,
) -> ChannelResult<()> {
    let (rank, n) = (links.rank, links.size());
    let longest = parts.iter().map(Range::len).max().unwrap_or(0);
    // What is sent in a step. What is received is what is sent in the next.
    let sent =
        |step: usize, start: usize| clip(&parts[(rank + 2 * n - 1 - step) % n], start, PIECE);
    let window = WINDOW * PIECE;
    let starts = |segment: usize| (segment..segment + window).step_by(PIECE);
    let last = steps.end - 1;

    for segment in (0..longest).step_by(window) {
        // A new round begins with what is here; it goes out as what ends the round before comes in.
        for start in starts(segment) {
            if segment > 0 {
                let place = sent(last + 1, start - window);
                receive(links, last, place, bytes, kernels).await?;
            }
            send(links, sent(steps.start, start), bytes).await?;
        }
        if segment == 0 {
            links.recv_headers().await?;
        }
        for step in steps.start..last {
            for start in starts(segment) {
                let place = sent(step + 1, start);
                if step + 2 < n {
                    pass_sum_on(links, place, bytes, kernels).await?;
                } else {
                    receive(links, step, place.clone(), bytes, kernels).await?;
                    send(links, place, bytes).await?;
                }
            }
        }
    }
    let segment = longest.saturating_sub(1) / window * window;
    for start in starts(segment) {
        receive(links, last, sent(last + 1, start), bytes, kernels).await?;
    }
    Ok(())
}

async fn send(links: &mut PeerChannels, place: Range<usize>, bytes: &[u8]) -> ChannelResult<()> {
    if place.is_empty() {
        return Ok(());
    }
    // SAFETY: `run` waits until it is sent, or its caller gives it up. What is lent changes again in one case: a part
    // that was sent first in a reduce-scatter comes back reduced, which it cannot be before the next rank has
    // received it.
    unsafe { links.to(links.after(1))?.lend(&bytes[place]).await }
}

/// Receives what ends up here: the last addend of this rank's part, or a finished part.
async fn receive(
    links: &mut PeerChannels,
    step: usize,
    place: Range<usize>,
    bytes: &mut [u8],
    kernels: &ReduceKernels,
) -> ChannelResult<()> {
    if place.is_empty() {
        return Ok(());
    }
    let reduces = step + 1 < links.size();
    let left = links.from(links.before(1))?;
    if !reduces {
        return left.recv(&mut bytes[place]).await;
    }
    let sum = left.piece(place.len()).await?;
    (kernels.accumulate)(&mut bytes[place], sum);
    left.release();
    Ok(())
}

/// Receives a partial sum, adds what is here and sends it on.
async fn pass_sum_on(
    links: &mut PeerChannels,
    place: Range<usize>,
    bytes: &[u8],
    kernels: &ReduceKernels,
) -> ChannelResult<()> {
    if place.is_empty() {
        return Ok(());
    }
    let (right, left) = links.pair(links.after(1), links.before(1))?;
    let space = right.space(place.len()).await?;
    let sum = left.piece(place.len()).await?;
    (kernels.combine)(space, sum, &bytes[place]);
    left.release();
    right.commit()
}
