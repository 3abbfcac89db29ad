//! The backend that runs on GPUs, each rank on one of its own: NCCL.
//!
//! It stands on a group of the host's, through which its ranks meet, which carries tensors of the host, and which knows
//! when a rank is gone. A group has a thread, which gives calls to a stream of the group's own and looks after them:
//!
//! ```text
//!  Group --call, event--> thread: stream waits for the event, NCCL --> event --> Work
//!    |                       |  timeout, a rank that is gone: abort, tell all ranks
//!  compute stream <-------- wait: waits for the event, the memory goes back to the pool in its order
//! ```
//!
//! Differences from the host's backend: 16-bit numbers are rounded at every addition on their way, and how numbers are
//! added depends on NCCL's choice of an algorithm, so sums are bitwise the same on all ranks and in a rerun, but not those
//! of the host; the largest of numbers may pass a NaN over; and ranks that call different things hang until the timeout.

mod calls;
mod worker;

use ferrotron_cuda::library::Search;
use ferrotron_cuda::nccl::{Communicator, ID_BYTES, Nccl};
use ferrotron_cuda::stream::Stream;
use ferrotron_tensor::{Device, Error, Result, StreamGuard, Tensor};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{Buffer, Call, Collective, CommVolume, Group, Memory, Op, Work};
use worker::{NcclCall, Worker, abort, until_ready};

/// Configuration of NCCL.
#[derive(Debug, Clone)]
pub struct NcclConfig {
    /// Search for the library.
    pub search: Search,
    /// Timeout of the rendezvous and of each call.
    pub timeout: Duration,
}

impl Group {
    /// The same group, whose calls on tensors of `device`, a GPU that no other rank has, NCCL carries out. All ranks
    /// must call this, each with its device.
    ///
    /// Errors, naming the remedy, if NCCL is missing; if the others do not come within the timeout.
    pub fn with_nccl(&self, device: &Device, config: &NcclConfig) -> Result<Group> {
        let Some(host) = self.collective() else { return Ok(self.clone()) };
        let collective = NcclCollective::new(host.clone(), device, config)?;
        Ok(Group::new(Arc::new(collective)))
    }
}

/// One rank's end of a group whose tensors are on GPUs.
struct NcclCollective {
    host: Arc<dyn Collective>,
    device: Device,
    /// Closed before the thread is joined.
    jobs: Option<Sender<NcclCall>>,
    thread: Option<JoinHandle<()>>,
    traffic: Arc<Mutex<CommVolume>>,
}

impl NcclCollective {
    /// Meets the other ranks of `host`, which must all come with a device of their own.
    fn new(
        host: Arc<dyn Collective>,
        device: &Device,
        config: &NcclConfig,
    ) -> Result<NcclCollective> {
        let gpu = device.gpu().ok_or_else(|| {
            Error::config("nccl", format!("moves tensors of GPUs, this rank's are on {device:?}"))
        })?;
        let nccl = Nccl::load(&config.search).map_err(Error::from_gpu)?;
        let own = match host.rank() {
            0 => nccl.unique_id().map_err(Error::from_gpu)?,
            _ => [0; ID_BYTES],
        };
        let id = Tensor::from_slice(&Device::cpu(1)?, &own, &[ID_BYTES])?;
        let id = Group::new(host.clone()).broadcast(id, 0)?.wait()?.to_vec::<u8>()?;
        let id = id.try_into().map_err(|_| Error::communication("nccl", "the id is cut off"))?;
        let (rank, size) = (host.rank(), host.size());
        let communicator = Communicator::begin(&nccl, gpu.context(), id, rank, size);
        let mut communicator = communicator.map_err(Error::from_gpu)?;
        let late = || format!("the ranks of group {} did not meet", host.name());
        if let Err(error) = until_ready(&mut communicator, &*host, config.timeout, &late) {
            abort(communicator);
            return Err(error);
        }
        let stream = Stream::new(gpu.context()).map_err(Error::from_gpu)?;
        let traffic = Arc::default();
        let worker = Worker::new(&host, communicator, stream, device, config.timeout, &traffic);
        let (jobs, queue) = channel();
        let thread = std::thread::Builder::new()
            .name(format!("nccl of {}", host.name()))
            .spawn(move || worker.serve(&queue))
            .map_err(|error| Error::communication("nccl", format!("no thread: {error}")))?;
        let device = device.clone();
        Ok(NcclCollective { host, device, jobs: Some(jobs), thread: Some(thread), traffic })
    }

    /// Returns whether a call works on tensors of this rank's GPU; the host carries out all others.
    fn is_ours(&self, memory: &Memory) -> bool {
        let mut buffers = memory.input.iter().chain(&memory.output);
        buffers.any(|buffer| match buffer {
            Buffer::Tensor(tensor) => *tensor.device() == self.device,
            Buffer::Flat(flat) => {
                *flat.lock().unwrap_or_else(PoisonError::into_inner).device() == self.device
            }
        })
    }

    fn give(&self, call: Call, memory: Memory) -> Result<Receiver<Result<StreamGuard<Memory>>>> {
        let gone = || Error::communication("nccl", "the group's thread has ended");
        let (Some(gpu), Some(jobs)) = (self.device.gpu(), &self.jobs) else { return Err(gone()) };
        // A group whose calls were captured could not be looked after: it would be given up.
        self.device.expect_no_capture("nccl")?;
        // What the compute stream was given until now comes before the call.
        let given = gpu.compute().record().map_err(Error::from_gpu)?;
        let (completion, done) = channel();
        jobs.send(NcclCall { call, memory, given, completion }).map_err(|_| gone())?;
        Ok(done)
    }
}

impl Collective for NcclCollective {
    fn name(&self) -> &str {
        self.host.name()
    }

    fn rank(&self) -> usize {
        self.host.rank()
    }

    fn size(&self) -> usize {
        self.host.size()
    }

    fn start(&self, call: Call, memory: Memory) -> Work<Memory> {
        if call.op == Op::Barrier || !self.is_ours(&memory) {
            return self.host.start(call, memory);
        }
        let given = self.give(call, memory);
        Work::from_fn(move || {
            let gone = |_| Error::communication("nccl", "the group's thread has ended");
            given?.recv().map_err(gone)??.into_inner()
        })
    }

    fn traffic(&self) -> CommVolume {
        let mut traffic = self.host.traffic();
        traffic.add(&self.traffic.lock().unwrap_or_else(PoisonError::into_inner));
        traffic
    }

    fn check(&self) -> Result<()> {
        self.host.check()
    }

    fn fail(&self, reason: &str) {
        self.host.fail(reason);
    }
}

impl Drop for NcclCollective {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // the waiting caller gets a panic as an error
        }
    }
}
