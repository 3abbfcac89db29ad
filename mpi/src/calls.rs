//! The calls of one group, by MPI's nonblocking operations.

use ferrotron_parallel::collective::{Buffer, Bytes, Call, Collective, Memory, Op, Reduction};
use ferrotron_tensor::{Error, Result};
use mpi::ffi::{self, MPI_Comm, MPI_Op, MPI_Request};
use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;
use std::thread::{sleep, yield_now};
use std::time::{Duration, Instant};

use crate::numbers::{Scratch, addends, count, datatype, write_sums};

/// Time for which a call is asked for without a pause: MPI moves data while it is asked.
const SPIN_TIME: Duration = Duration::from_millis(50);

/// The pause between two questions after that.
const PAUSE: Duration = Duration::from_micros(30);

/// The pause between two looks at the other ranks.
const LOOK: Duration = Duration::from_millis(100);

/// The tag of messages, whose order MPI keeps.
const TAG: c_int = 0;

/// One rank's end of a communicator.
pub struct Communicator {
    pub comm: MPI_Comm,
    /// The host's group of the same ranks, which knows when one is gone.
    pub host: Arc<dyn Collective>,
    pub timeout: Duration,
}

/// Elements of each part, and the offset of each.
struct Parts {
    counts: Vec<c_int>,
    offsets: Vec<c_int>,
}

impl Parts {
    fn new(call: &Call, ranks: usize) -> Result<Parts> {
        count(call.len)?; // so that all below fit
        let parts = (0..ranks).map(|rank| call.chunk_range(ranks, rank));
        let (counts, offsets) =
            parts.map(|part| (part.len() as c_int, part.start as c_int)).unzip();
        Ok(Parts { counts, offsets })
    }

    /// Parts of `each` elements, one for each rank.
    fn equal(each: usize, ranks: usize) -> Result<Parts> {
        count(each * ranks)?;
        let offsets = (0..ranks).map(|rank| (rank * each) as c_int).collect();
        Ok(Parts { counts: vec![each as c_int; ranks], offsets })
    }
}

/// Starts an operation of the library on this communicator with the arguments before the last two, and waits for its end.
macro_rules! ended {
    ($self:ident, $call:ident, $function:ident($($argument:expr),*)) => {
        $self
            .ended($call, |request| {
                // SAFETY: where this is used, the buffers have the elements that the arguments name: `check` has compared
                // their lengths with those of the call. They and the lists of counts outlive the wait for the
                // end, and nothing else uses them meanwhile.
                unsafe { ffi::$function($($argument,)* $self.comm, request) }
            })
            .await?
    };
}

fn operation(reduction: Reduction) -> MPI_Op {
    // SAFETY: constants of the library, read after it was initialised.
    unsafe {
        match reduction {
            Reduction::Sum => ffi::RSMPI_SUM,
            Reduction::Max => ffi::RSMPI_MAX,
        }
    }
}

/// The address of a buffer. One without bytes has an address that MPI would take for `MPI_IN_PLACE`, and gets another.
fn address(bytes: &[u8]) -> *const c_void {
    if bytes.is_empty() {
        NonNull::<u64>::dangling().as_ptr().cast()
    } else {
        bytes.as_ptr().cast()
    }
}

fn address_mut(bytes: &mut [u8]) -> *mut c_void {
    match bytes.is_empty() {
        true => address(bytes).cast_mut(),
        false => bytes.as_mut_ptr().cast(),
    }
}

async fn bytes(buffer: &mut Option<Buffer>) -> Result<Option<Bytes<'_>>> {
    match buffer {
        Some(buffer) => buffer.bytes().await.map(Some),
        None => Ok(None),
    }
}

fn slice<'a>(bytes: &'a mut Option<Bytes<'_>>) -> Result<&'a mut [u8]> {
    bytes.as_mut().map_or(Ok(&mut []), Bytes::as_mut_slice)
}

impl Communicator {
    /// Carries out a call on its memory.
    ///
    /// Errors if the memory cannot be used. Ends the process if the call does not end in time, or another rank is gone.
    pub async fn carry_out(&self, call: &Call, memory: &mut Memory) -> Result<()> {
        let mut input = bytes(&mut memory.input).await?;
        let mut output = bytes(&mut memory.output).await?;
        let (from, to) = (slice(&mut input)?, slice(&mut output)?);
        self.check(call, (from.len(), to.len()))?;
        self.run(call, from, to).await?;
        output.as_mut().map_or(Ok(()), Bytes::commit)
    }

    /// Errors unless the buffers have the bytes of the call, and the ranks that it names are others of the group, or any for
    /// a root.
    fn check(&self, call: &Call, bytes: (usize, usize)) -> Result<()> {
        let (rank, ranks) = (self.host.rank(), self.host.size());
        let (whole, own) = (call.len, call.chunk_range(ranks, rank).len());
        let at = |root: usize| if rank == root { whole } else { 0 };
        let (from, to, named) = match call.op {
            Op::Barrier => (0, 0, None),
            Op::Gather { root } => (own, at(root), Some(root)),
            Op::Scatter { root } => (at(root), own, Some(root)),
            Op::AllToAll => (whole, own * ranks, None),
            Op::Send { to } => (whole, 0, Some(to)),
            Op::Recv { from } => (0, whole, Some(from)),
            Op::SendRecv { to, from } => (whole, whole, Some(to.max(from))),
            Op::Broadcast { root } | Op::Reduce { root, .. } => (0, whole, Some(root)),
            Op::AllReduce(_) | Op::AllGather | Op::ReduceScatter(_) => (0, whole, None),
        };
        let size = call.dtype.size();
        let message = match named.filter(|&named| named >= ranks) {
            Some(named) => format!("{call}: rank {named} is not among the group's {ranks}"),
            None if bytes == (from * size, to * size) => return Ok(()),
            None => format!(
                "{call}: buffers have {} and {} bytes where {} and {} are due",
                bytes.0,
                bytes.1,
                from * size,
                to * size
            ),
        };
        Err(Error::communication("mpi", message))
    }

    async fn run(&self, call: &Call, input: &mut [u8], output: &mut [u8]) -> Result<()> {
        let (rank, ranks) = (self.host.rank(), self.host.size());
        let (dtype, size) = (call.dtype, call.dtype.size());
        let (whole, own) = (count(call.len)?, call.chunk_range(ranks, rank));
        let (element, number) = (datatype(dtype), datatype(dtype.accumulator()));
        let bytes_of = |range: std::ops::Range<usize>| range.start * size..range.end * size;
        let sums = |elements: usize| Scratch::new(elements * dtype.accumulator().size());
        match call.op {
            Op::AllReduce(reduction) => {
                let (from, mut to) = (addends(dtype, output), sums(call.len));
                let operation = operation(reduction);
                let (out, into) = (address(from.bytes()), address_mut(to.bytes_mut()));
                ended!(self, call, MPI_Iallreduce(out, into, whole, number, operation));
                write_sums(dtype, &to, output);
            }
            Op::ReduceScatter(reduction) => {
                let parts = Parts::new(call, ranks)?;
                let (from, mut to) = (addends(dtype, output), sums(own.len()));
                let operation = operation(reduction);
                let (out, into) = (address(from.bytes()), address_mut(to.bytes_mut()));
                let counts = parts.counts.as_ptr();
                ended!(self, call, MPI_Ireduce_scatter(out, into, counts, number, operation));
                write_sums(dtype, &to, &mut output[bytes_of(own)]);
            }
            Op::Reduce { root, reduction } => {
                let (from, mut to) = (addends(dtype, output), sums(call.len));
                let operation = operation(reduction);
                let (out, into) = (address(from.bytes()), address_mut(to.bytes_mut()));
                let root_rank = count(root)?;
                ended!(self, call, MPI_Ireduce(out, into, whole, number, operation, root_rank));
                if rank == root {
                    write_sums(dtype, &to, output);
                }
            }
            Op::AllGather => {
                let parts = Parts::new(call, ranks)?;
                let from = Scratch::copy_of(&output[bytes_of(own)]);
                let (out, into) = (address(from.bytes()), address_mut(output));
                let (counts, offsets) = (parts.counts.as_ptr(), parts.offsets.as_ptr());
                let sent = parts.counts[rank];
                ended!(
                    self,
                    call,
                    MPI_Iallgatherv(out, sent, element, into, counts, offsets, element)
                );
            }
            Op::Broadcast { root } => {
                let (place, root) = (address_mut(output), count(root)?);
                ended!(self, call, MPI_Ibcast(place, whole, element, root));
            }
            Op::Gather { root } => {
                let parts = Parts::new(call, ranks)?;
                let (out, into) = (address(input), address_mut(output));
                let (counts, offsets) = (parts.counts.as_ptr(), parts.offsets.as_ptr());
                let (sent, root) = (parts.counts[rank], count(root)?);
                ended!(
                    self,
                    call,
                    MPI_Igatherv(out, sent, element, into, counts, offsets, element, root)
                );
            }
            Op::Scatter { root } => {
                let parts = Parts::new(call, ranks)?;
                let (out, into) = (address(input), address_mut(output));
                let (counts, offsets) = (parts.counts.as_ptr(), parts.offsets.as_ptr());
                let (received, root) = (parts.counts[rank], count(root)?);
                ended!(
                    self,
                    call,
                    MPI_Iscatterv(out, counts, offsets, element, into, received, element, root)
                );
            }
            Op::AllToAll => {
                let (sent, received) = (Parts::new(call, ranks)?, Parts::equal(own.len(), ranks)?);
                let (out, into) = (address(input), address_mut(output));
                let from = (sent.counts.as_ptr(), sent.offsets.as_ptr());
                let to = (received.counts.as_ptr(), received.offsets.as_ptr());
                ended!(
                    self,
                    call,
                    MPI_Ialltoallv(out, from.0, from.1, element, into, to.0, to.1, element)
                );
            }
            Op::Send { to } => self.exchange(call, Some((input, to)), None).await?,
            Op::Recv { from } => self.exchange(call, None, Some((output, from))).await?,
            Op::SendRecv { to, from } => {
                self.exchange(call, Some((input, to)), Some((output, from))).await?;
            }
            Op::Barrier => {
                ended!(self, call, MPI_Ibarrier());
            }
        }
        Ok(())
    }

    /// Sends and receives whole buffers.
    async fn exchange(
        &self,
        call: &Call,
        sent: Option<(&mut [u8], usize)>,
        received: Option<(&mut [u8], usize)>,
    ) -> Result<()> {
        let (whole, element, comm) = (count(call.len)?, datatype(call.dtype), self.comm);
        let receiving = match received {
            Some((place, from)) => {
                let (place, from) = (address_mut(place), count(from)?);
                Some(self.begun(call, |request| {
                    // SAFETY: the place has the elements of the call, and lives until the request has ended.
                    unsafe { ffi::MPI_Irecv(place, whole, element, from, TAG, comm, request) }
                })?)
            }
            None => None,
        };
        if let Some((from, to)) = sent {
            let (from, to) = (address(from), count(to)?);
            let sending = self.begun(call, |request| {
                // SAFETY: as above; it is only read.
                unsafe { ffi::MPI_Isend(from, whole, element, to, TAG, comm, request) }
            })?;
            self.wait(call, sending).await;
        }
        if let Some(receiving) = receiving {
            self.wait(call, receiving).await;
        }
        Ok(())
    }

    /// Starts an operation, and waits for its end.
    async fn ended(
        &self,
        call: &Call,
        start: impl FnOnce(&mut MPI_Request) -> c_int,
    ) -> Result<()> {
        let request = self.begun(call, start)?;
        self.wait(call, request).await;
        Ok(())
    }

    fn begun(
        &self,
        call: &Call,
        start: impl FnOnce(&mut MPI_Request) -> c_int,
    ) -> Result<MPI_Request> {
        // SAFETY: a constant of the library.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        match start(&mut request) {
            0 => Ok(request),
            code => {
                Err(Error::communication("mpi", format!("{call} was refused with code {code}")))
            }
        }
    }

    async fn wait(&self, call: &Call, mut request: MPI_Request) {
        let started = Instant::now();
        let mut looked = started;
        loop {
            let mut flag = 0;
            // SAFETY: the request was made by this thread and has not ended.
            let code = unsafe { ffi::MPI_Test(&mut request, &mut flag, ffi::RSMPI_STATUS_IGNORE) };
            if code != 0 {
                self.abort(call, &format!("MPI_Test gave code {code}"));
            }
            if flag != 0 {
                return;
            }
            let now = Instant::now();
            if now - looked > LOOK {
                looked = now;
                if let Err(error) = self.host.check() {
                    self.abort(call, &error.to_string());
                }
                if now - started > self.timeout {
                    self.abort(call, &format!("it did not end within {:?}", self.timeout));
                }
            }
            match now - started > SPIN_TIME {
                true => sleep(PAUSE),
                false => yield_now(),
            }
            tokio::task::yield_now().await;
        }
    }

    /// Ends the job: MPI may use the memory of the call for as long as this process lives.
    fn abort(&self, call: &Call, why: &str) -> ! {
        let (name, rank) = (self.host.name(), self.host.rank());
        let line = format!("rank {rank} of group {name} was in {call}: {why}");
        self.host.fail(&line);
        eprintln!("ferrotron: mpi: {line}; MPI cannot end one call, so the job ends");
        // SAFETY: the library is initialised, and this is the thread that calls it.
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, 1) };
        std::process::exit(1);
    }
}

/// Bytes that a ring, or a message, makes this rank send.
pub fn bytes_sent(call: &Call, rank: usize, ranks: usize) -> u64 {
    let dtype = match call.op {
        Op::AllReduce(_) | Op::ReduceScatter(_) | Op::Reduce { .. } => call.dtype.accumulator(),
        _ => call.dtype,
    };
    Call { dtype, ..*call }.bytes_sent(rank, ranks)
}
