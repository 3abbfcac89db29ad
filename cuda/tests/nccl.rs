//! Calls of NCCL's communicators: on a stand-in by two ranks, on a GPU by one. Two ranks share a GPU where
//! `FERROTRON_TEST_NCCL_RANKS` says so, which takes NCCL 2.30 and its `NCCL_MULTI_RANK_GPU_ENABLE`.

use ferrotron_cuda::context::Context;
use ferrotron_cuda::gpu::GpuConfig;
use ferrotron_cuda::kernels::ElementType;
use ferrotron_cuda::memory::{Arena, GRANULE};
use ferrotron_cuda::nccl::{Communicator, Elements, ID_BYTES, Nccl, Reduction};
use ferrotron_cuda::stream::{Event, Stream};
use ferrotron_cuda::{Error, Result};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Elements of a rank's part.
const PART: usize = 1000;

/// One rank of `size`: its communicator, and memory for two wholes of `size` parts.
struct Rank {
    size: usize,
    rank: usize,
    communicator: Communicator,
    stream: Stream,
    memory: Arena,
}

impl Rank {
    fn meet(config: &GpuConfig, id: [u8; ID_BYTES], rank: usize, size: usize) -> Result<Rank> {
        let nccl = Nccl::load(&config.search)?;
        let context = Context::new(&config.search, config.ordinal)?;
        let mut communicator = Communicator::begin(&nccl, &context, id, rank, size)?;
        until_ready(&mut communicator)?;
        let mut memory = Arena::reserve(&context, GRANULE)?;
        memory.map(0, GRANULE)?;
        Ok(Rank { size, rank, communicator, stream: Stream::new(&context)?, memory })
    }

    /// Part `part` of the whole `number`.
    fn part(&self, number: usize, part: usize) -> Elements {
        let at = (number * self.size + part) * PART * 4;
        let (address, element) = (self.memory.base() + at as u64, ElementType::F32);
        Elements { address, count: PART, element }
    }

    fn whole(&self, number: usize) -> Elements {
        Elements { count: self.size * PART, ..self.part(number, 0) }
    }

    /// Fills the whole 0 with this rank's numbers and the whole 1 with zeros, makes a call, and returns both wholes.
    fn after(&mut self, call: impl FnOnce(&mut Rank) -> Result<()>) -> Result<[Vec<f32>; 2]> {
        let n = self.size * PART;
        let own: Vec<u8> = (0..n).flat_map(|i| value(self.rank, i).to_le_bytes()).collect();
        // SAFETY: the memory is this rank's, and is used in this stream alone.
        unsafe {
            self.stream.upload(self.whole(0).address, &own)?;
            self.stream.zero_fill(self.whole(1).address, 4 * n)?;
        }
        call(self)?;
        until_ready(&mut self.communicator)?;
        let read = |number| -> Result<Vec<f32>> {
            let mut bytes = vec![0; 4 * n];
            // SAFETY: as above.
            unsafe { self.stream.download(&mut bytes, self.whole(number).address) }?;
            let numbers = bytes.chunks_exact(4).map(|four| four.try_into().unwrap());
            Ok(numbers.map(f32::from_le_bytes).collect())
        };
        Ok([read(0)?, read(1)?])
    }
}

/// Small integers, exact when they are added.
fn value(rank: usize, index: usize) -> f32 {
    (100 * rank + index % 97) as f32
}

fn until_ready(communicator: &mut Communicator) -> Result<()> {
    let start = Instant::now();
    while !communicator.is_ready()? {
        if start.elapsed() > Duration::from_secs(60) {
            return Err(Error::new("nccl", "not ready after a minute"));
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(())
}

/// Returns whether all events pass within `limit`.
fn pass_within(events: &[Event], limit: Duration) -> Result<bool> {
    let start = Instant::now();
    while start.elapsed() < limit {
        if events.iter().try_fold(true, |all, event| Ok::<_, Error>(event.has_passed()? && all))? {
            return Ok(true);
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(false)
}

/// Asserts that a whole holds `want(i)` in the parts that `parts` names.
fn check(what: &str, got: &[f32], parts: std::ops::Range<usize>, want: impl Fn(usize) -> f32) {
    let elements = parts.start * PART..parts.end * PART;
    for (i, got) in elements.clone().zip(&got[elements]) {
        assert_eq!(*got, want(i), "{what}, element {i}");
    }
}

fn calls(config: &GpuConfig, id: [u8; ID_BYTES], rank: usize, size: usize) -> Result<()> {
    let mut own = Rank::meet(config, id, rank, size)?;
    let sum = |i: usize| (0..size).map(|rank| value(rank, i)).sum::<f32>();
    // SAFETY: of all calls, the memory is the rank's own and is used in its stream alone.
    let [reduced, _] = own.after(|own| unsafe {
        own.communicator.all_reduce(&own.stream, own.whole(0), Reduction::Sum)
    })?;
    check("all_reduce", &reduced, 0..size, sum);
    // SAFETY: as above.
    let [reduced, _] = own.after(|own| unsafe {
        own.communicator.all_reduce(&own.stream, own.whole(0), Reduction::Max)
    })?;
    check("all_reduce (max)", &reduced, 0..size, |i| value(size - 1, i));
    // SAFETY: as above.
    let [scattered, _] = own.after(|own| unsafe {
        let (whole, part) = (own.whole(0).address, own.part(0, rank));
        own.communicator.reduce_scatter(&own.stream, whole, part, Reduction::Sum)
    })?;
    check("reduce_scatter", &scattered, rank..rank + 1, sum);
    // SAFETY: as above.
    let [gathered, _] = own.after(|own| unsafe {
        let (whole, part) = (own.whole(0).address, own.part(0, rank));
        own.communicator.all_gather(&own.stream, whole, part)
    })?;
    check("all_gather", &gathered, 0..size, |i| value(i / PART, i));
    // SAFETY: as above.
    let [sent, _] = own
        .after(|own| unsafe { own.communicator.broadcast(&own.stream, own.whole(0), size - 1) })?;
    check("broadcast", &sent, 0..size, |i| value(size - 1, i));
    // SAFETY: as above.
    let [reduced, _] = own.after(|own| unsafe {
        own.communicator.reduce(&own.stream, own.whole(0), 0, Reduction::Sum)
    })?;
    check("reduce", &reduced, 0..size, |i| if rank == 0 { sum(i) } else { value(rank, i) });
    // Everybody's part for everybody, its own included.
    let [_, exchanged] = own.after(|own| {
        let parts: Vec<_> = (0..size).map(|i| (own.part(0, i), own.part(1, i))).collect();
        let stream = &own.stream;
        own.communicator.group(|communicator| {
            parts.iter().enumerate().try_for_each(|(i, &(from, to))| {
                // SAFETY: as above.
                unsafe {
                    communicator.send(stream, from, i)?;
                    communicator.recv(stream, to, i)
                }
            })
        })
    })?;
    check("all_to_all", &exchanged, 0..size, |i| value(i / PART, rank * PART + i % PART));
    own.communicator.begin_leave()?;
    until_ready(&mut own.communicator)?;
    own.communicator.destroy();
    Ok(())
}

#[test]
fn every_call_gives_what_it_promises() -> Result<()> {
    let Some(config) = ferrotron_cuda_sim::gpu("every_call_gives_what_it_promises") else {
        return Ok(());
    };
    let told = std::env::var("FERROTRON_TEST_NCCL_RANKS").ok();
    let on_gpu = std::env::var_os("FERROTRON_TEST_GPU").is_some();
    let size = told.map_or(if on_gpu { 1 } else { 2 }, |ranks| ranks.parse().unwrap());
    let id = Nccl::load(&config.search)?.unique_id()?;
    std::thread::scope(|scope| {
        let config = &config;
        let ranks: Vec<_> =
            (0..size).map(|rank| scope.spawn(move || calls(config, id, rank, size))).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics"))
    })
}

/// Lets two ranks sum over each of two communicators, in streams of their own, the second rank in the other order if
/// `swaps`. Returns whether both sums came within `limit`.
fn two_communicators(config: &GpuConfig, swaps: bool, limit: Duration) -> Result<bool> {
    let nccl = Nccl::load(&config.search)?;
    let ids = [nccl.unique_id()?, nccl.unique_id()?];
    let sums_came = |rank: usize| -> Result<bool> {
        let meet = |id| Rank::meet(config, id, rank, 2);
        let [first, second] = ids.map(meet);
        let mut both = [first?, second?];
        let order = if swaps && rank == 1 { [1, 0] } else { [0, 1] };
        for which in order {
            let own = &mut both[which];
            // SAFETY: the memory is the rank's own and is used in its stream alone.
            unsafe { own.communicator.all_reduce(&own.stream, own.whole(0), Reduction::Sum)? };
            until_ready(&mut own.communicator)?;
        }
        let ends = [both[0].stream.record()?, both[1].stream.record()?];
        pass_within(&ends, limit)
    };
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| scope.spawn(move || sums_came(rank)));
        let [first, second] = ranks.map(|rank| rank.join().expect("no rank panics"));
        Ok(first? && second?)
    })
}

/// The stand-in runs one kernel of a GPU at a time, as a GPU may: of two communicators in two orders none ends.
#[test]
fn communicators_in_two_orders_wait_for_each_other() -> Result<()> {
    let test = "communicators_in_two_orders_wait_for_each_other";
    let Some(config) = ferrotron_cuda_sim::stand_in(test) else { return Ok(()) };
    assert!(two_communicators(&config, false, Duration::from_secs(60))?);
    assert!(!two_communicators(&config, true, Duration::from_millis(300))?);
    Ok(())
}

/// Lets the first of two ranks abort its call and free all it has before the second calls, which ends only with its own
/// abort.
#[test]
fn a_call_without_an_aborted_rank_waits_for_its_own_abort() -> Result<()> {
    let test = "a_call_without_an_aborted_rank_waits_for_its_own_abort";
    let Some(config) = ferrotron_cuda_sim::stand_in(test) else { return Ok(()) };
    let id = Nccl::load(&config.search)?.unique_id()?;
    let (is_freed, freed) = channel();
    let begin = |own: &mut Rank| -> Result<Event> {
        // SAFETY: the memory is the rank's own, is used in its stream alone, and stays until the event has passed.
        unsafe { own.communicator.all_reduce(&own.stream, own.whole(0), Reduction::Sum)? };
        until_ready(&mut own.communicator)?;
        own.stream.record()
    };
    std::thread::scope(|scope| {
        let (config, begin) = (&config, &begin);
        let first = scope.spawn(move || -> Result<()> {
            let mut own = Rank::meet(config, id, 0, 2)?;
            let end = begin(&mut own)?;
            let Rank { communicator, stream, memory, .. } = own;
            let abort = scope.spawn(move || drop(communicator)); // ends with the abort of the other rank
            assert!(pass_within(&[end], Duration::from_secs(60))?);
            drop((stream, memory));
            is_freed.send(()).expect("the other rank waits");
            abort.join().expect("an abort does not panic");
            Ok(())
        });
        let mut own = Rank::meet(config, id, 1, 2)?;
        freed.recv().expect("the other rank frees its memory");
        let end = [begin(&mut own)?];
        assert!(!pass_within(&end, Duration::from_millis(100))?);
        drop(own.communicator);
        assert!(pass_within(&end, Duration::from_secs(60))?);
        first.join().expect("no rank panics")
    })
}
