//! One call, from its memory to its last byte: which ranks talk along which pipes, and by which algorithm.

use ferrotron_tensor::{DType, Error};
use std::ops::Range;

use crate::collective::host::algorithms::combine::kernels;
use crate::collective::host::algorithms::{pairwise, ring, rooted, tree};
use crate::collective::host::runtime::routed::{joined, reduce, send_route_headers};
use crate::collective::host::runtime::wide;
use crate::collective::host::transport::header::Header;
use crate::collective::host::transport::peer_channels::PeerChannels;
use crate::collective::host::transport::piece::ChannelResult;
use crate::collective::narrow_sums::is_narrow;
use crate::collective::routes::{Route, is_pairwise, route};
use crate::collective::{Buffer, Bytes, Call, Memory, Op, Reduction, partition_range};

/// The bytes that a call works on, locked.
#[derive(Default)]
pub struct Locked<'a> {
    input: Option<Bytes<'a>>,
    output: Option<Bytes<'a>>,
    /// Sums in f32 of 16-bit numbers, of which no more are held at a time than [`wide::HELD`].
    wide: Vec<f32>,
}

/// Carries out a call after its ranks have agreed that they mean the same. An exchange has two headers,
/// that of what it sends and that of what it receives.
///
/// The memory is locked here and stays so as long as `locked` lives. If this fails, or is not run to its end,
/// memory may still be lent and must stay locked until [`PeerChannels::cancel_sends`] has returned.
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
    Locked { input, output, wide }: &mut Locked<'_>,
) -> ChannelResult<()> {
    let (rank, n, size) = (links.rank, links.size(), call.dtype.size());
    let parts: Vec<Range<usize>> = (0..n).map(|i| scale(call.chunk_range(n, i), size)).collect();
    let (whole, own) = (call.len * size, parts[rank].len());

    let narrow = is_narrow(call.dtype);
    let header = &headers[0];
    let others = links.others();
    let (next, previous) = ([links.after(1)], [links.before(1)]);
    let way = call_route(n, call);
    // Ranks that only send hear from others too: without it, two that both take themselves for the root
    // would not find out.
    match call.op {
        Op::AllReduce(Reduction::Sum) | Op::ReduceScatter(Reduction::Sum)
            if narrow && !is_pairwise(n) =>
        {
            let bytes = slice(output, whole)?;
            let parts =
                if matches!(call.op, Op::AllReduce(_)) { even_parts(call, n) } else { parts };
            wide::reduce(links, call, header, way, &parts, bytes, wide).await
        }
        Op::AllReduce(Reduction::Sum) if narrow => {
            let bytes = slice(output, whole)?;
            let parts = even_parts(call, n);
            links.send_headers(header, &others, &others).await?;
            pairwise::reduce_scatter_narrow(links, call.dtype, &parts, bytes).await?;
            if way == Route::Direct {
                return pairwise::all_gather_small(links, &parts, bytes).await;
            }
            let kernels = kernels(call.dtype, Reduction::Max);
            ring::ring(links, &parts, ring::all_gather(n), bytes, &kernels).await
        }
        Op::ReduceScatter(Reduction::Sum) if narrow => {
            let bytes = slice(output, whole)?;
            links.send_headers(header, &others, &others).await?;
            pairwise::reduce_scatter_narrow(links, call.dtype, &parts, bytes).await
        }
        Op::AllReduce(reduction) => {
            let bytes = slice(output, whole)?;
            let (parts, kernels) = (even_parts(call, n), kernels(call.dtype, reduction));
            send_route_headers(links, header, way).await?;
            reduce(links, call.op, way, &parts, bytes, &kernels).await
        }
        Op::ReduceScatter(reduction) => {
            let (bytes, kernels) = (slice(output, whole)?, kernels(call.dtype, reduction));
            send_route_headers(links, header, way).await?;
            reduce(links, call.op, way, &parts, bytes, &kernels).await
        }
        Op::AllGather => {
            let bytes = slice(output, whole)?;
            send_route_headers(links, header, way).await?;
            match way {
                Route::Direct => pairwise::all_gather_small(links, &parts, bytes).await,
                Route::Tree => tree::all_gather(links, &parts[rank], bytes).await,
                Route::Ring => {
                    let kernels = kernels(call.dtype, Reduction::Max);
                    ring::ring(links, &parts, ring::all_gather(n), bytes, &kernels).await
                }
            }
        }
        Op::Broadcast { root: 0 } if way == Route::Tree => {
            let bytes = slice(output, whole)?;
            let (parent, children) = tree::neighbours(links);
            let (to, from) = (joined(next, children), joined(previous, parent));
            links.check_headers(header, &to, &from).await?;
            tree::broadcast(links, bytes).await
        }
        Op::Broadcast { root } => {
            let bytes = slice(output, whole)?;
            links.check_headers(header, &next, &previous).await?;
            rooted::broadcast(links, root, bytes).await
        }
        Op::Reduce { root, reduction: Reduction::Sum } if narrow && !is_pairwise(n) => {
            let bytes = slice(output, whole)?;
            links.check_headers(header, &next, &previous).await?;
            wide::reduce_to_root(links, root, call.dtype, bytes, wide).await
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
            check_rooted(links, header, root).await?;
            if root == rank {
                let bytes = slice(output, whole)?;
                return rooted::gather(links, &parts, part, bytes).await;
            }
            rooted::send(links, root, part).await
        }
        Op::Scatter { root } => {
            let part = slice(output, own)?;
            check_rooted(links, header, root).await?;
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
        Op::Barrier if way == Route::Tree => {
            send_route_headers(links, header, way).await?;
            let kernels = kernels(DType::U8, Reduction::Max);
            tree::all_reduce(links, &mut [0], &kernels).await
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

/// The route of a call among `n` ranks. Together with operation and element type it decides which pipes the call needs.
pub fn call_route(n: usize, call: &Call) -> Route {
    let (unit, size) = match call.op {
        Op::AllReduce(_) => (1, call.dtype.size()), // parts are by elements, whatever its rows are
        _ => (call.unit, call.dtype.size()),
    };
    let is_sum =
        matches!(call.op, Op::AllReduce(Reduction::Sum) | Op::ReduceScatter(Reduction::Sum));
    let is_wide = is_sum && is_narrow(call.dtype) && !is_pairwise(n);
    let size = if is_wide { DType::F32.size() } else { size };
    route(n, call.len / unit, unit * size)
}

/// Compares the headers of a call in which one rank sends to all or hears from all: those of every two ranks, of many
/// ranks those of neighbours in the ring.
async fn check_rooted(links: &mut PeerChannels, header: &Header, root: usize) -> ChannelResult<()> {
    let others = links.others();
    if route(links.size(), 0, 0) != Route::Tree {
        return links.check_headers(header, &others, &others).await;
    }
    links.check_headers(header, &[links.after(1)], &[links.before(1)]).await?;
    links.open(if root == links.rank { &others } else { std::slice::from_ref(&root) }).await
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
