//! One call, from its memory to its last byte: which ranks talk along which pipes, and by which algorithm.

use ferrotron_tensor::Error;
use std::ops::Range;

use crate::collective::direct::is_direct;
use crate::collective::host::algorithms::combine::{is_narrow, kernels};
use crate::collective::host::algorithms::{pairwise, ring, rooted};
use crate::collective::host::transport::header::Header;
use crate::collective::host::transport::peer_channels::PeerChannels;
use crate::collective::host::transport::piece::ChannelResult;
use crate::collective::{Buffer, Bytes, Call, Memory, Op, Reduction, partition_range};

/// The bytes that a call works on, locked.
#[derive(Default)]
pub struct Locked<'a> {
    input: Option<Bytes<'a>>,
    output: Option<Bytes<'a>>,
}

/// Carries out a call after its ranks have agreed that they mean the same. An exchange has two headers,
/// that of what it sends and that of what it receives.
///
/// The memory is locked here and stays so as long as `locked` lives. If this fails, or is not run to its end,
/// memory may still be lent and must stay locked until [`PeerChannels::revoke`] has returned.
pub async fn run<'a>(
    links: &mut PeerChannels,
    call: &Call,
    headers: &[Header],
    memory: &'a mut Memory,
    locked: &mut Locked<'a>,
) -> ChannelResult<()> {
    check_ranks(links, call)?;
    locked.input = lock(&mut memory.input).await?;
    locked.output = lock(&mut memory.output).await?;
    transfer(links, call, headers, locked).await?;
    links.recv_headers().await?;
    links.wait_sends().await?;
    let committed = locked.output.as_mut().map_or(Ok(()), Bytes::commit);
    committed.map_err(|error| error.to_string().into())
}

async fn transfer(
    links: &mut PeerChannels,
    call: &Call,
    headers: &[Header],
    Locked { input, output }: &mut Locked<'_>,
) -> ChannelResult<()> {
    let (rank, n, size) = (links.rank, links.size(), call.dtype.size());
    let parts: Vec<Range<usize>> = (0..n).map(|i| scale(call.chunk_range(n, i), size)).collect();
    let (whole, own) = (call.len * size, parts[rank].len());

    let narrow = is_narrow(call.dtype);
    let header = &headers[0];
    let others = links.others();
    let (next, previous) = ([links.after(1)], [links.before(1)]);
    // Ranks that only send hear from others too: without it, two that both take themselves for the root
    // would not find out.
    match call.op {
        Op::AllReduce(Reduction::Sum) if narrow => {
            let bytes = slice(output, whole)?;
            let parts = even_parts(call, n);
            links.send_headers(header, &others, &others).await?;
            pairwise::reduce_scatter_narrow(links, call.dtype, &parts, bytes).await?;
            if is_direct(n, whole) {
                return pairwise::all_gather_small(links, &parts, bytes).await;
            }
            let kernels = kernels(call.dtype, Reduction::Max);
            ring::ring(links, &parts, ring::all_gather(n), bytes, &kernels).await
        }
        Op::AllReduce(reduction) if is_direct(n, whole) => {
            let bytes = slice(output, whole)?;
            let (parts, kernels) = (even_parts(call, n), kernels(call.dtype, reduction));
            links.send_headers(header, &others, &others).await?;
            pairwise::reduce_scatter_small(links, &parts, bytes, &kernels).await?;
            pairwise::all_gather_small(links, &parts, bytes).await
        }
        Op::AllReduce(reduction) => {
            let bytes = slice(output, whole)?;
            let (parts, kernels) = (even_parts(call, n), kernels(call.dtype, reduction));
            links.send_headers(header, &next, &previous).await?;
            ring::ring(links, &parts, ring::all_reduce(n), bytes, &kernels).await
        }
        Op::ReduceScatter(Reduction::Sum) if narrow => {
            let bytes = slice(output, whole)?;
            links.send_headers(header, &others, &others).await?;
            pairwise::reduce_scatter_narrow(links, call.dtype, &parts, bytes).await
        }
        Op::ReduceScatter(reduction) if is_direct(n, whole) => {
            let bytes = slice(output, whole)?;
            links.send_headers(header, &others, &others).await?;
            let kernels = kernels(call.dtype, reduction);
            pairwise::reduce_scatter_small(links, &parts, bytes, &kernels).await
        }
        Op::ReduceScatter(reduction) => {
            let bytes = slice(output, whole)?;
            let kernels = kernels(call.dtype, reduction);
            links.send_headers(header, &next, &previous).await?;
            ring::ring(links, &parts, ring::reduce_scatter(n), bytes, &kernels).await
        }
        Op::AllGather if is_direct(n, whole) => {
            let bytes = slice(output, whole)?;
            links.send_headers(header, &others, &others).await?;
            pairwise::all_gather_small(links, &parts, bytes).await
        }
        Op::AllGather => {
            let bytes = slice(output, whole)?;
            links.send_headers(header, &next, &previous).await?;
            let kernels = kernels(call.dtype, Reduction::Max);
            ring::ring(links, &parts, ring::all_gather(n), bytes, &kernels).await
        }
        Op::Broadcast { root } => {
            let bytes = slice(output, whole)?;
            links.check_headers(header, &next, &previous).await?;
            rooted::broadcast(links, root, bytes).await
        }
        Op::Reduce { root, reduction: Reduction::Sum } if narrow => {
            let bytes = slice(output, whole)?;
            links.send_headers(header, &others, &others).await?;
            rooted::reduce_narrow(links, root, call.dtype, &even_parts(call, n), bytes).await
        }
        Op::Reduce { root, reduction } => {
            let bytes = slice(output, whole)?;
            links.check_headers(header, &next, &previous).await?;
            rooted::reduce(links, root, bytes, &kernels(call.dtype, reduction)).await
        }
        Op::Gather { root } => {
            let part = slice(input, own)?;
            links.check_headers(header, &others, &others).await?;
            if root == rank {
                let bytes = slice(output, whole)?;
                return rooted::gather(links, &parts, part, bytes).await;
            }
            rooted::send(links, root, part).await
        }
        Op::Scatter { root } => {
            let part = slice(output, own)?;
            links.check_headers(header, &others, &others).await?;
            if root == rank {
                let bytes = slice(input, whole)?;
                return rooted::scatter(links, &parts, bytes, part).await;
            }
            rooted::recv(links, root, part).await
        }
        Op::AllToAll => {
            let (input, output) = (slice(input, whole)?, slice(output, own * n)?);
            links.send_headers(header, &others, &others).await?;
            pairwise::all_to_all(links, &parts, input, output).await
        }
        Op::Send { to } => {
            let bytes = slice(input, whole)?;
            links.check_headers(header, &[to], &[]).await?;
            rooted::send(links, to, bytes).await
        }
        Op::Recv { from } => {
            let bytes = slice(output, whole)?;
            links.check_headers(header, &[], &[from]).await?;
            rooted::recv(links, from, bytes).await
        }
        Op::SendRecv { to, from } => {
            let (input, output) = (slice(input, whole)?, slice(output, whole)?);
            links.send_headers(header, &[to], &[]).await?;
            links.send_headers(&headers[1], &[], &[from]).await?;
            pairwise::send_recv(links, to, from, input, output).await
        }
        Op::Barrier => {
            // Dissemination: after round k everybody has heard, at first or second hand, from the
            // 2^(k+1) - 1 ranks before it (Hensgen, Finkel and Manber, "Two algorithms for barrier
            // synchronization", Int. J. Parallel Program. 17, 1988).
            let mut distance = 1;
            while distance < n {
                let (to, from) = (links.after(distance), links.before(distance));
                links.check_headers(header, &[to], &[from]).await?;
                distance *= 2;
            }
            Ok(())
        }
    }
}

/// Parts of a buffer by elements, whatever its rows are, for algorithms that do not expose the parts.
fn even_parts(call: &Call, n: usize) -> Vec<Range<usize>> {
    (0..n).map(|i| scale(partition_range(call.len, n, i), call.dtype.size())).collect()
}

fn scale(range: Range<usize>, size: usize) -> Range<usize> {
    range.start * size..range.end * size
}

fn check_ranks(links: &PeerChannels, call: &Call) -> ChannelResult<()> {
    let (n, own) = (links.size(), links.rank);
    let (named, may_be_own): (&[usize], bool) = match &call.op {
        Op::Broadcast { root }
        | Op::Reduce { root, .. }
        | Op::Gather { root }
        | Op::Scatter { root } => (&[*root], true),
        Op::Send { to } => (&[*to], false),
        Op::Recv { from } => (&[*from], false),
        Op::SendRecv { to, from } => (&[*to, *from], false),
        _ => (&[], true),
    };
    match named.iter().find(|&&rank| rank >= n || (rank == own && !may_be_own)) {
        Some(rank) if *rank >= n => Err(format!("rank {rank} is not among the group's {n}").into()),
        Some(rank) => Err(format!("rank {rank} of the group names itself").into()),
        None => Ok(()),
    }
}

/// The bytes of a buffer, as soon as it is not locked.
async fn lock(buffer: &mut Option<Buffer>) -> ChannelResult<Option<Bytes<'_>>> {
    let Some(buffer) = buffer else { return Ok(None) };
    buffer.bytes().await.map(Some).map_err(|error| error.to_string().into())
}

fn slice<'a>(bytes: &'a mut Option<Bytes<'_>>, len: usize) -> ChannelResult<&'a mut [u8]> {
    let bytes = bytes.as_mut().ok_or_else(|| "the call lacks a buffer".to_string())?;
    let bytes = bytes.as_mut_slice().map_err(|error: Error| error.to_string())?;
    if bytes.len() != len {
        return Err(format!("a buffer has {} bytes where {len} are due", bytes.len()).into());
    }
    Ok(bytes)
}
