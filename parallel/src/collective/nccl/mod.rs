//! The backend that runs on GPUs, each rank on one of its own: NCCL.
//!
//! It stands on groups of the host's, through which ranks meet, which carry tensors of the host, and which know when a
//! rank is gone. All groups of a rank have one thread, which gives their calls to one stream and looks after them:
//!
//! ```text
//!  Group --call, event--> thread: stream waits for the event, NCCL --> event --> Work
//!    |                       |  timeout, a rank that is gone: abort, tell all ranks
//!  compute stream <-------- wait: waits for the event, the memory goes back to the pool in its order
//! ```
//!
//! # One order of launches
//!
//! A kernel of NCCL occupies a part of the GPU until all ranks of its communicator have launched it. Two communicators whose
//! kernels two ranks launch in different orders may therefore wait for each other for ever, if the GPU does not run both
//! (NVIDIA's documentation, "Using multiple NCCL communicators concurrently"). Here a rank's kernels run one after another,
//! in the order in which its program makes the calls. So they can wait for each other only where a program whose every
//! call waited for its end would: where two ranks call two groups in different orders.
//!
//! Ranks of one pipeline stage run one program and make the same calls within the stage, in the same order. Between stages
//! travel the messages of a schedule, which was checked with messages that wait for each other; those that it lets a rank
//! exchange are launched [together](super::Group::together), by the one communicator of all stages.
//!
//! # Captured calls
//!
//! While a GPU's work is [captured](ferrotron_tensor::CudaGraph), the stream of calls joins the capture by the event of the
//! compute stream, and ends in it where the compute stream waits for the call. A replay runs all calls again, on all ranks,
//! which must have captured the same (NVIDIA's documentation, "Using NCCL with CUDA Graphs"). The thread looks after the replay as
//! a whole. Graphs must be dropped before the groups: a communicator is freed after all graphs that have calls of it.
//!
//! Differences from the host's backend: 16-bit numbers are rounded at every addition on their way, and how numbers are
//! added depends on NCCL's choice of an algorithm, so sums are bitwise the same on all ranks and in a rerun, but not those
//! of the host; the largest of numbers may pass a NaN over; and ranks that call different things hang until the timeout.

mod calls;
mod launcher;
mod worker;

use ferrotron_cuda::library::Search;
use ferrotron_cuda::nccl::{Communicator, ID_BYTES, Nccl};
use ferrotron_tensor::{Device, Error, Result, Tensor};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::{Buffer, Call, Collective, CommVolume, Group, Memory, Op, Work};
use launcher::{Launcher, ended, gpu};
use worker::{Member, abort, until_ready};

/// Configuration of NCCL.
#[derive(Debug, Clone)]
pub struct NcclConfig {
    /// Search for the library.
    pub search: Search,
    /// Timeout of the rendezvous and of each call.
    pub timeout: Duration,
}

/// Makes the groups of a rank whose tensors are on a GPU. Groups of the same ranks share a communicator.
pub(crate) struct NcclGroups {
    nccl: Arc<Nccl>,
    launcher: Arc<Launcher>,
    timeout: Duration,
    /// The ranks of each communicator.
    communicators: Vec<Vec<usize>>,
}

impl NcclGroups {
    /// No group yet. Errors if `device` is not a GPU, or NCCL is missing.
    pub fn new(device: &Device, config: &NcclConfig) -> Result<NcclGroups> {
        let nccl = Nccl::load(&config.search).map_err(Error::from_gpu)?;
        let launcher = Arc::new(Launcher::new(device, config.timeout)?);
        Ok(NcclGroups { nccl, launcher, timeout: config.timeout, communicators: Vec::new() })
    }

    /// The group of the ranks `members`, with the communicator of the ranks `all`. If `members` are only some of these,
    /// it must be there already, and carries messages alone.
    pub fn group(&mut self, group: &Group, members: &[usize], all: &[usize]) -> Result<Group> {
        let Some(host) = group.collective() else { return Ok(group.clone()) };
        let known = self.communicators.iter().position(|ranks| ranks == all);
        let communicator = known.unwrap_or(self.communicators.len());
        if known.is_none() {
            debug_assert_eq!(members, all);
            self.launcher.add(self.meet(host)?, host)?;
            self.communicators.push(all.to_vec());
        }
        let place = |member| all.iter().position(|rank| rank == member).expect("it is one of all");
        let ranks: Vec<usize> = members.iter().map(place).collect();
        let has_all = ranks.len() == all.len();
        let (traffic, calls) = (Default::default(), Default::default());
        let member = Arc::new(Member { host: host.clone(), communicator, ranks, traffic, calls });
        let launcher = self.launcher.clone();
        Ok(Group::new(Arc::new(NcclCollective { member, has_all, launcher })))
    }

    /// A new communicator of the ranks of `host`, which must all come with a device of their own.
    fn meet(&self, host: &Arc<dyn Collective>) -> Result<Communicator> {
        let gpu = gpu(self.launcher.device())?;
        let own = match host.rank() {
            0 => self.nccl.unique_id().map_err(Error::from_gpu)?,
            _ => [0; ID_BYTES],
        };
        let id = Tensor::from_slice(&Device::cpu(1)?, &own, &[ID_BYTES])?;
        let id = Group::new(host.clone()).broadcast(id, 0)?.wait()?.to_vec::<u8>()?;
        let id = id.try_into().map_err(|_| Error::communication("nccl", "the id is cut off"))?;
        let (rank, size) = (host.rank(), host.size());
        let communicator = Communicator::begin(&self.nccl, gpu.context(), id, rank, size);
        let mut communicator = communicator.map_err(Error::from_gpu)?;
        let late = || format!("the ranks of group {} did not meet", host.name());
        match until_ready(&mut communicator, &**host, self.timeout, &late) {
            Ok(()) => Ok(communicator),
            Err(error) => {
                abort([communicator]);
                Err(error)
            }
        }
    }
}

/// One rank's end of a group whose tensors are on GPUs.
struct NcclCollective {
    member: Arc<Member>,
    /// Whether all ranks of the communicator are in the group.
    has_all: bool,
    launcher: Arc<Launcher>,
}

impl NcclCollective {
    /// Returns whether NCCL carries out a call: on tensors of this rank's GPU, and among all ranks of the communicator or
    /// two. The host carries out all others.
    fn is_ours(&self, call: &Call, memory: &Memory) -> bool {
        let is_message = matches!(call.op, Op::Send { .. } | Op::Recv { .. } | Op::SendRecv { .. });
        let device = self.launcher.device();
        let mut buffers = memory.input.iter().chain(&memory.output);
        (self.has_all || is_message)
            && buffers.any(|buffer| match buffer {
                Buffer::Tensor(tensor) => tensor.device() == device,
                Buffer::Flat(flat) => {
                    flat.lock().unwrap_or_else(PoisonError::into_inner).device() == device
                }
            })
    }
}

impl Collective for NcclCollective {
    fn name(&self) -> &str {
        self.member.host.name()
    }

    fn rank(&self) -> usize {
        self.member.host.rank()
    }

    fn size(&self) -> usize {
        self.member.host.size()
    }

    fn start(&self, call: Call, memory: Memory) -> Work<Memory> {
        if call.op == Op::Barrier || !self.is_ours(&call, &memory) {
            return self.member.host.start(call, memory);
        }
        let given = self.launcher.launch(&self.member, call, memory);
        Work::from_fn(move || given?.recv().map_err(|_| ended())??.into_inner())
    }

    fn together(&self, f: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.launcher.together(f)
    }

    fn is_capturable(&self) -> bool {
        self.has_all
    }

    fn watch_replay(&self) -> Result<()> {
        self.launcher.watch_replay(&self.member)
    }

    fn traffic(&self) -> CommVolume {
        let mut traffic = self.member.host.traffic();
        traffic.add(&self.member.traffic.lock().unwrap_or_else(PoisonError::into_inner));
        traffic
    }

    fn check(&self) -> Result<()> {
        self.member.host.check()
    }

    fn fail(&self, reason: &str) {
        self.member.host.fail(reason);
    }
}
