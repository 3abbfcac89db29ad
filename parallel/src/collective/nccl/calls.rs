//! The calls of a group as NCCL's.

use ferrotron_cuda::kernels::ElementType;
use ferrotron_cuda::nccl::{self, Communicator, Elements};
use ferrotron_cuda::stream::Stream;
use ferrotron_tensor::{Error, Result};
use std::ops::Range;
use std::sync::PoisonError;

use super::super::{Buffer, Call, Memory, Op, Reduction};

/// Gives a call of a group's rank `rank` to the stream; `ranks` are those of the group in the communicator.
///
/// NCCL cuts buffers into equal parts. Where parts differ, each is a broadcast or a reduction of its own, all in one go.
///
/// # Safety
/// As for [`Communicator::all_reduce`], for all that `memory` holds.
pub unsafe fn give(
    communicator: &mut Communicator,
    stream: &Stream,
    (rank, ranks): (usize, &[usize]),
    call: &Call,
    memory: &mut Memory,
) -> Result<()> {
    if call.len == 0 {
        return Ok(());
    }
    let size = ranks.len();
    let parts: Vec<Range<usize>> = (0..size).map(|i| call.chunk_range(size, i)).collect();
    let (own, len) = (parts[rank].clone(), call.len);
    let equal = parts.iter().all(|part| part.len() == own.len());
    let others = || (0..size).filter(|&i| i != rank);
    let element = ElementType::from(call.dtype);
    let bytes = call.dtype.size();
    let at = move |address: u64, part: &Range<usize>| Elements {
        address: address + (part.start * bytes) as u64,
        count: part.len(),
        element,
    };
    let filled = |part: &&Range<usize>| !part.is_empty();
    // SAFETY: the caller answers for the memory, and `address` has checked its size; parts lie within the whole.
    let result = unsafe {
        match call.op {
            Op::AllReduce(reduction) => {
                let whole = at(address(&mut memory.output, len)?, &(0..len));
                communicator.all_reduce(stream, whole, reduction_op(reduction))
            }
            Op::AllGather if equal => {
                let whole = address(&mut memory.output, len)?;
                communicator.all_gather(stream, whole, at(whole, &own))
            }
            Op::AllGather => {
                let whole = address(&mut memory.output, len)?;
                communicator.group(|communicator| {
                    let mut parts = parts.iter().enumerate().filter(|(_, part)| filled(part));
                    parts.try_for_each(|(root, part)| {
                        communicator.broadcast(stream, at(whole, part), root)
                    })
                })
            }
            Op::ReduceScatter(reduction) if equal => {
                let whole = address(&mut memory.output, len)?;
                communicator.reduce_scatter(stream, whole, at(whole, &own), reduction_op(reduction))
            }
            Op::ReduceScatter(reduction) => {
                let whole = address(&mut memory.output, len)?;
                communicator.group(|communicator| {
                    let mut parts = parts.iter().enumerate().filter(|(_, part)| filled(part));
                    parts.try_for_each(|(root, part)| {
                        communicator.reduce(stream, at(whole, part), root, reduction_op(reduction))
                    })
                })
            }
            Op::Broadcast { root } => {
                let whole = at(address(&mut memory.output, len)?, &(0..len));
                communicator.broadcast(stream, whole, root)
            }
            Op::Reduce { root, reduction } => {
                let whole = at(address(&mut memory.output, len)?, &(0..len));
                communicator.reduce(stream, whole, root, reduction_op(reduction))
            }
            Op::Gather { root } => {
                let part = at(address(&mut memory.input, own.len())?, &(0..own.len()));
                if root != rank {
                    return sent(communicator, stream, part, root);
                }
                let whole = address(&mut memory.output, len)?;
                stream
                    .copy(at(whole, &own).address, part.address, part.count * bytes)
                    .map_err(Error::from_gpu)?;
                communicator.group(|communicator| {
                    let mut others = others().filter(|&i| !parts[i].is_empty());
                    others.try_for_each(|i| communicator.recv(stream, at(whole, &parts[i]), i))
                })
            }
            Op::Scatter { root } => {
                let part = at(address(&mut memory.output, own.len())?, &(0..own.len()));
                if root != rank {
                    return match part.count {
                        0 => Ok(()),
                        _ => communicator.recv(stream, part, root).map_err(Error::from_gpu),
                    };
                }
                let whole = address(&mut memory.input, len)?;
                stream
                    .copy(part.address, at(whole, &own).address, part.count * bytes)
                    .map_err(Error::from_gpu)?;
                communicator.group(|communicator| {
                    let mut others = others().filter(|&i| !parts[i].is_empty());
                    others.try_for_each(|i| communicator.send(stream, at(whole, &parts[i]), i))
                })
            }
            Op::AllToAll => {
                let (from, count) = (address(&mut memory.input, len)?, own.len());
                let to = address(&mut memory.output, count * size)?;
                communicator.group(|communicator| {
                    (0..size).try_for_each(|i| {
                        if !parts[i].is_empty() {
                            communicator.send(stream, at(from, &parts[i]), i)?;
                        }
                        match count {
                            0 => Ok(()),
                            _ => {
                                communicator.recv(stream, at(to, &(i * count..(i + 1) * count)), i)
                            }
                        }
                    })
                })
            }
            Op::Send { to } => {
                let whole = at(address(&mut memory.input, len)?, &(0..len));
                communicator.send(stream, whole, ranks[to])
            }
            Op::Recv { from } => {
                let whole = at(address(&mut memory.output, len)?, &(0..len));
                communicator.recv(stream, whole, ranks[from])
            }
            Op::SendRecv { to, from } => {
                let input = at(address(&mut memory.input, len)?, &(0..len));
                let output = at(address(&mut memory.output, len)?, &(0..len));
                communicator.group(|communicator| {
                    communicator.send(stream, input, ranks[to])?;
                    communicator.recv(stream, output, ranks[from])
                })
            }
            Op::Barrier => Ok(()),
        }
    };
    result.map_err(Error::from_gpu)
}

/// Sends a part, unless it is empty.
///
/// # Safety
/// The requirements of [`Communicator::send`].
unsafe fn sent(
    communicator: &mut Communicator,
    stream: &Stream,
    part: Elements,
    to: usize,
) -> Result<()> {
    match part.count {
        0 => Ok(()),
        // SAFETY: the caller answers for the memory.
        _ => unsafe { communicator.send(stream, part, to) }.map_err(Error::from_gpu),
    }
}

/// Returns the address of a buffer of so many elements.
fn address(buffer: &mut Option<Buffer>, numel: usize) -> Result<u64> {
    match buffer {
        Some(Buffer::Tensor(tensor)) => tensor.device_ptr(numel),
        Some(Buffer::Flat(flat)) => {
            flat.lock().unwrap_or_else(PoisonError::into_inner).device_ptr(numel)
        }
        None => Err(Error::communication("nccl", "the call lacks a buffer")),
    }
}

fn reduction_op(reduction: Reduction) -> nccl::Reduction {
    match reduction {
        Reduction::Sum => nccl::Reduction::Sum,
        Reduction::Max => nccl::Reduction::Max,
    }
}
