//! A load by all ranks together: each byte is read once, by one of them, and sent to those that need it.
//!
//! ```text
//!  reader thread     reads a window of this rank's share, and adds to the checksums of its files
//!                        |
//!  training thread   flags [unready, failed], summed over ranks every tenth of a second until all have a window
//!                    copies to its own tensors what it needs; exchanges the rest with one rank after another
//! ```
//!
//! No call takes as long as a disk does, so that none times out. At the end each rank compares the checksums of the files
//! that end in its share, and hands that of the last beginning to the next rank. If a file cannot be read or is damaged, all ranks return the same fault, and their group still works; tensors
//! may be overwritten in part.

use ferrotron_parallel::agreement::{gather_distinct, tell_distinct};
use ferrotron_parallel::collective::{Group, Reduction};
use ferrotron_parallel::long_work::POLL_INTERVAL;
use ferrotron_tensor::{DType, Device, Error, Result, ShardSpec, Tensor};
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel, sync_channel};
use std::thread;

use super::index::{Index, TensorRecord};
use super::read_plan::{Part, ReadPlan, bytes_in, in_order, overlapping};
use super::share_reader::{ShareReader, Stretch, compare};
use crate::io::checked_file::Fault;

/// Bytes that a rank reads at a time. It holds two windows, and a message of this size at most in each direction.
pub(super) const WINDOW: u64 = 4 << 20;

/// A tensor to be filled: what is stored of it, and this rank's part.
pub(super) type Wanted<'a> = (&'a TensorRecord, ShardSpec);

/// Calls a function with the target of a number, a contiguous tensor, to overwrite a part of it.
pub(super) type WriteTarget<'t> =
    dyn FnMut(usize, &mut dyn FnMut(&mut Tensor) -> Result<()>) -> Result<()> + 't;

/// Part of a tensor in messages between ranks: its number in the index, the ranges of each dim, and how many targets of the
/// same rank before this one want the same.
type Wish = (usize, Vec<Vec<(usize, usize)>>, usize);

/// Fills the tensors that this rank wants, and returns the number of bytes that it has read. All ranks of `world` call
/// this, each with what it wants, and with the same size of windows.
///
/// Errors as collectives and `write` do. A fault of the checkpoint is returned as such, on all ranks.
pub(super) fn load_shared(
    (folder, index): (&Path, &Index),
    (world, window): (&Group, u64),
    wanted: &[Wanted],
    write: &mut WriteTarget,
) -> Result<std::result::Result<u64, Fault>> {
    let plan = ReadPlan::new(index, world.size(), window);
    let rank = world.rank();
    let wishes = wishes(index, wanted);
    let others = exchange_wishes(&plan, index, world, &wishes)?;
    let own = own_parts(&plan, wanted, &wishes)?;
    let (host, staged) = (Device::cpu(1)?, HashMap::new());
    let mut exchange = Exchange { plan: &plan, world, host, own, others, staged };
    thread::scope(|scope| {
        let (full, windows) = sync_channel(0);
        let (spent, empty) = channel();
        let mut reader = ShareReader::new(&plan, folder);
        let read = scope.spawn(move || {
            for round in 0..reader.rounds() {
                let buffer = empty.try_recv().unwrap_or_default();
                let window = reader.read(rank, round, buffer);
                let failed = window.is_err();
                // The receiver is gone if the load was given up.
                if full.send(window).is_err() || failed {
                    break;
                }
            }
            reader.stretches()
        });
        for round in 0..plan.rounds() {
            let window = match exchange.next(&windows)? {
                Ok(window) => window,
                Err(fault) => return Ok(Err(fault)),
            };
            exchange.round(round, &window, write)?;
            // The reader is gone behind its last window.
            let _ = spent.send(window);
        }
        let stretches =
            read.join().map_err(|_| Error::value("checkpoint", "a thread has failed"))?;
        let bytes: u64 = stretches.iter().map(|stretch| stretch.bytes).sum();
        Ok(compare_together(&plan, folder, world, &stretches)?.map(|()| bytes))
    })
}

/// Compares the checksums of all files. A rank compares those that end in its share: from the rank before it, it gets the
/// checksum of what that one and others have read of the first.
fn compare_together(
    plan: &ReadPlan,
    folder: &Path,
    world: &Group,
    own: &[Stretch],
) -> Result<std::result::Result<(), Fault>> {
    let (rank, last) = (world.rank(), world.size() - 1);
    let device = Device::cpu(1)?;
    let before = match rank {
        0 => None,
        _ => {
            let numbers = Tensor::full(&device, DType::I64, &[3], 0.0)?;
            let numbers = world.recv(numbers, rank - 1)?.wait()?.to_vec::<i64>()?;
            let [file, bytes, crc32] = numbers[..] else { unreachable!("it has three elements") };
            let stretch = Stretch { file: file as usize, bytes: bytes as u64, crc32: crc32 as u32 };
            (bytes > 0).then_some(stretch)
        }
    };
    let compared = compare(plan, folder, before, own);
    if rank < last {
        let open = compared.as_ref().ok().and_then(|checked| checked.open);
        let numbers = open.map_or([0; 3], |Stretch { file, bytes, crc32 }| {
            [file as i64, bytes as i64, i64::from(crc32)]
        });
        world.send(Tensor::from_slice(&device, &numbers, &[3])?, rank + 1)?.wait()?;
    }
    let files = compared.as_ref().map_or(0, |checked| checked.files) as f64;
    let failed = f64::from(u8::from(compared.is_err()));
    let sums = Tensor::from_slice(&device, &[failed, files], &[2])?;
    let sums = world.all_reduce(sums, Reduction::Sum)?.wait()?.to_vec::<f64>()?;
    if sums[0] > 0.0 {
        return first_fault(world, compared.err()).map(Err);
    }
    let all = plan.files.iter().filter(|(_, record, _)| record.bytes > 0).count();
    Ok(match sums[1] == all as f64 {
        true => Ok(()),
        false => {
            Err(format!("only {} of {all} files in '{}' were read", sums[1], folder.display()))
        }
    })
}

/// The fault of the first rank that has one, on all ranks.
fn first_fault(world: &Group, own: Option<Fault>) -> Result<Fault> {
    let faults = gather_distinct(world, own.as_slice())?;
    let first = faults.into_iter().min_by_key(|(_, ranks)| ranks.first());
    Ok(first.map(|(fault, _)| fault).unwrap_or_default())
}

/// The targets of this rank as others are told of them.
fn wishes(index: &Index, wanted: &[Wanted]) -> Vec<Wish> {
    let records = index.tensors.values().map(std::ptr::from_ref);
    let numbers: HashMap<_, _> = records.enumerate().map(|(i, record)| (record, i)).collect();
    let mut before: HashMap<_, usize> = HashMap::new();
    let wish = |(record, place): &Wanted| -> Wish {
        let ranges = (0..place.dims().len()).map(|d| place.pieces(d).to_vec());
        let (number, ranges) = (numbers[&std::ptr::from_ref(*record)], ranges.collect::<Vec<_>>());
        let count = before.entry((number, ranges.clone())).or_default();
        *count += 1;
        (number, ranges, *count - 1)
    };
    wanted.iter().map(wish).collect()
}

/// The parts of all files that this rank needs: of one piece in the order of the wishes, which others know.
fn own_parts<'a>(
    plan: &ReadPlan<'a>,
    wanted: &[Wanted<'a>],
    wishes: &[Wish],
) -> Result<Vec<Part<'a>>> {
    let mut targets: Vec<usize> = (0..wanted.len()).collect();
    targets.sort_unstable_by_key(|&target| &wishes[target]);
    let sorted: Vec<Wanted> = targets.iter().map(|&target| wanted[target].clone()).collect();
    let mut parts = plan.parts(&sorted, plan.all())?;
    parts.iter_mut().for_each(|part| part.target = targets[part.target]);
    Ok(parts)
}

/// The parts of this rank's share that each rank needs. A wish is told to the ranks that read something of it.
fn exchange_wishes<'a>(
    plan: &ReadPlan<'a>,
    index: &'a Index,
    world: &Group,
    own: &[Wish],
) -> Result<Vec<Vec<Part<'a>>>> {
    let records: Vec<&TensorRecord> = index.tensors.values().collect();
    let wanted = |(number, ranges, _): &Wish| -> Result<Wanted<'a>> {
        let record = *records.get(*number).ok_or_else(|| {
            Error::value("checkpoint", format!("another rank wants tensor {number} of the index"))
        })?;
        let ranges: Vec<&[(usize, usize)]> = ranges.iter().map(Vec::as_slice).collect();
        Ok((record, ShardSpec::new(&record.shape, &ranges)?))
    };
    let mut told = tell_distinct(world, own, |wish| plan.readers(wanted(wish)?))?;
    told.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
    let mut parts: Vec<Vec<Part>> = (0..world.size()).map(|_| Vec::new()).collect();
    for (wish, ranks) in &told {
        let needed = plan.parts(&[wanted(wish)?], plan.share(world.rank()))?;
        ranks.iter().for_each(|rank| parts[rank].extend_from_slice(&needed));
    }
    parts.iter_mut().for_each(|parts| in_order(parts));
    Ok(parts)
}

/// The exchange of what ranks have read.
struct Exchange<'a> {
    plan: &'a ReadPlan<'a>,
    world: &'a Group,
    host: Device,
    /// The parts of all files that this rank needs.
    own: Vec<Part<'a>>,
    /// The parts of this rank's share that each rank needs.
    others: Vec<Vec<Part<'a>>>,
    /// Tensors of GPUs, in host memory until they are complete, and the number of bytes that are missing.
    staged: HashMap<usize, (Vec<u8>, usize)>,
}

impl Exchange<'_> {
    /// Waits until every rank has read its next window. A fault of one is returned on all.
    fn next(
        &self,
        windows: &Receiver<std::result::Result<Vec<u8>, Fault>>,
    ) -> Result<std::result::Result<Vec<u8>, Fault>> {
        let mut own = None;
        loop {
            if own.is_none() {
                own = match windows.recv_timeout(POLL_INTERVAL) {
                    Ok(window) => Some(window),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => {
                        Some(Err("the thread that reads has ended without a result".into()))
                    }
                };
            }
            let flags = [own.is_none(), matches!(own, Some(Err(_)))];
            let flags = flags.map(|flag| f64::from(u8::from(flag)));
            let flags = Tensor::from_slice(&self.host, &flags, &[2])?;
            let sums = self.world.all_reduce(flags, Reduction::Sum)?.wait()?.to_vec::<f64>()?;
            if sums[1] > 0.0 {
                let own = own.and_then(std::result::Result::err);
                return first_fault(self.world, own).map(Err);
            }
            if sums[0] == 0.0
                && let Some(own) = own.take()
            {
                return Ok(own);
            }
        }
    }

    /// Delivers what all ranks have read in a round; `window` is what this one has.
    ///
    /// Ranks meet in pairs, as in a tournament: in each step a rank has one partner, and the lower of both sends first.
    fn round(&mut self, round: u64, window: &[u8], write: &mut WriteTarget) -> Result<()> {
        let (rank, size) = (self.world.rank(), self.world.size());
        for step in 0..size {
            let peer = (step + size - rank) % size;
            if peer == rank {
                self.keep(round, window, write)?;
            } else if rank < peer {
                self.send(round, window, peer)?;
                self.receive(round, peer, write)?;
            } else {
                self.receive(round, peer, write)?;
                self.send(round, window, peer)?;
            }
        }
        Ok(())
    }

    /// Copies to this rank's tensors what it has read for itself.
    fn keep(&mut self, round: u64, window: &[u8], write: &mut WriteTarget) -> Result<()> {
        let positions = self.plan.window(self.world.rank(), round);
        for part in overlapping(&self.own, &positions) {
            let source = |position: u64, length: usize| {
                let at = (position - positions.start) as usize;
                &window[at..at + length]
            };
            deliver(&self.host, part, &positions, source, &mut self.staged, write)?;
        }
        Ok(())
    }

    fn send(&self, round: u64, window: &[u8], peer: usize) -> Result<()> {
        let positions = self.plan.window(self.world.rank(), round);
        let parts = overlapping(&self.others[peer], &positions);
        let bytes = bytes_in(parts, &positions);
        if bytes == 0 {
            return Ok(());
        }
        let mut message = Tensor::empty(&self.host, DType::U8, &[bytes])?;
        message.write_bytes(|mut message| {
            for part in parts {
                part.runs(&positions, |position, _, length| {
                    let (run, rest) = std::mem::take(&mut message).split_at_mut(length);
                    let at = (position - positions.start) as usize;
                    run.copy_from_slice(&window[at..at + length]);
                    message = rest;
                    Ok::<(), Error>(())
                })?;
            }
            Ok(())
        })?;
        self.world.send(message, peer)?.wait()
    }

    fn receive(&mut self, round: u64, peer: usize, write: &mut WriteTarget) -> Result<()> {
        let positions = self.plan.window(peer, round);
        let parts = overlapping(&self.own, &positions);
        let bytes = bytes_in(parts, &positions);
        if bytes == 0 {
            return Ok(());
        }
        let message = Tensor::empty(&self.host, DType::U8, &[bytes])?;
        let message = self.world.recv(message, peer)?.wait()?;
        let message = message.bytes()?;
        let mut at = 0;
        for part in parts {
            let source = |_: u64, length: usize| {
                at += length;
                &message[at - length..at]
            };
            deliver(&self.host, part, &positions, source, &mut self.staged, write)?;
        }
        Ok(())
    }
}

/// Writes the bytes of a part that lie in a window to its target, in the target's dtype. `source` gives the bytes from a
/// position on, run by run.
fn deliver<'s>(
    host: &Device,
    part: &Part,
    window: &Range<u64>,
    mut source: impl FnMut(u64, usize) -> &'s [u8],
    staged: &mut HashMap<usize, (Vec<u8>, usize)>,
    write: &mut WriteTarget,
) -> Result<()> {
    write(part.target, &mut |tensor: &mut Tensor| {
        let dtype = tensor.dtype();
        let mut cast = None;
        if dtype != part.dtype {
            let mut stored = Vec::new();
            part.runs(window, |position, _, length| {
                stored.extend_from_slice(source(position, length));
                Ok::<(), Error>(())
            })?;
            let mut values = Tensor::empty(host, part.dtype, &[stored.len() / part.dtype.size()])?;
            values.write_bytes(|bytes| {
                bytes.copy_from_slice(&stored);
                Ok(())
            })?;
            cast = Some(values.cast(dtype)?);
        }
        let cast = cast.as_ref().map(Tensor::bytes).transpose()?;
        let scaled = |bytes: usize| bytes / part.dtype.size() * dtype.size();
        let mut copied = 0;
        let mut copy = |bytes: &mut [u8]| {
            part.runs(window, |position, to, length| {
                let (to, length_there) = (scaled(to), scaled(length));
                let run = &mut bytes[to..to + length_there];
                match &cast {
                    Some(cast) => run.copy_from_slice(&cast[copied..copied + length_there]),
                    None => run.copy_from_slice(source(position, length)),
                }
                copied += length_there;
                Ok::<(), Error>(())
            })
        };
        if !tensor.device().is_gpu() {
            return tensor.write_bytes(copy);
        }
        let whole = tensor.numel() * dtype.size();
        let (bytes, missing) = staged.entry(part.target).or_insert_with(|| (vec![0; whole], whole));
        copy(bytes)?;
        *missing -= copied;
        if *missing == 0 {
            tensor.write_bytes(|target| {
                target.copy_from_slice(bytes);
                Ok(())
            })?;
            staged.remove(&part.target);
        }
        Ok(())
    })
}
