//! Groups whose calls MPI carries out.

use ferrotron_parallel::collective::{Call, Collective, CommVolume, Group, Memory, Work};
use ferrotron_parallel::mesh::Mesh;
use ferrotron_tensor::{Device, Error, Result, Tensor};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tracing::trace_span;

use crate::calls::bytes_sent;
use crate::numbers::count;
use crate::progress::{NewGroup, QueuedCall, start};

/// The same mesh, whose calls MPI carries out: initialises MPI, once in a process, and makes a communicator for each group.
/// All ranks call this. `timeout` is that of a call, from when it is the first in its group's queue.
///
/// # Errors
/// Errors if MPI has another number of ranks than the mesh, as in a process that no MPI launcher has started, or has been
/// initialised before.
///
/// ```no_run
/// use ferrotron_parallel::collective::{Reduction, run_rank_process};
/// use ferrotron_parallel::launch::RankEnvironment;
/// use ferrotron_parallel::mesh::{Mesh, ParallelDims};
/// use ferrotron_parallel::tensor_parallel::SequenceParallel;
/// use ferrotron_tensor::{Device, Tensor};
/// use std::time::Duration;
///
/// let timeout = Duration::from_secs(600);
/// let own = RankEnvironment::from_variables(&std::env::vars().collect())?;
/// let own = own.expect("mpirun has started this process");
/// let sum = run_rank_process(&own.rank_config(None, timeout)?, |world| {
///     let layout = ParallelDims::new(world.size(), 1, 1, 1)?;
///     let mesh = Mesh::new(&world, layout, SequenceParallel::Off)?;
///     let mesh = ferrotron_mpi::with_mpi(&mesh, timeout)?;
///     let x = Tensor::from_slice(&Device::cpu(1)?, &[1.0_f32], &[1])?;
///     mesh.dp_cp().all_reduce(x, Reduction::Sum)?.wait()?.item()
/// })?;
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn with_mpi(mesh: &Mesh, timeout: Duration) -> Result<Mesh> {
    if mesh.layout().world() == 1 {
        return Ok(mesh.clone());
    }
    let (groups, rank, ranks) = start()?;
    if ranks != mesh.layout().world() {
        let message = format!(
            "the job has {} ranks, and MPI {ranks}: start them by mpirun, or leave out --distributed-backend mpi",
            mesh.layout().world()
        );
        return Err(Error::communication("mpi", message));
    }
    mesh.map_groups(|group, _, _| {
        let Some(host) = group.collective() else { return Ok(group.clone()) };
        let (name, rank) = (host.name().to_string(), count(rank)?);
        let made = MpiCollective::new(host.clone(), group, &groups, rank, timeout);
        let made = made.map_err(|error| error.at(&name))?;
        Ok(Group::new(Arc::new(made)))
    })
}

/// The name and version of the MPI library.
pub fn library_version() -> String {
    let version = mpi::environment::library_version().unwrap_or_default();
    version.split(',').next().unwrap_or_default().trim().to_string()
}

/// One rank's end of a group.
struct MpiCollective {
    host: Arc<dyn Collective>,
    calls: UnboundedSender<QueuedCall>,
    traffic: Mutex<CommVolume>,
}

impl MpiCollective {
    /// The group of the ranks of `host`, of which this is MPI's `rank`.
    fn new(
        host: Arc<dyn Collective>,
        group: &Group,
        groups: &UnboundedSender<NewGroup>,
        rank: i32,
        timeout: Duration,
    ) -> Result<MpiCollective> {
        let own = Tensor::from_slice(&Device::cpu(1)?, &[i64::from(rank)], &[1])?;
        let ranks = group.all_gather(own, host.size())?.wait()?.to_vec::<i64>()?;
        let ranks = ranks.into_iter().map(|rank| rank as i32).collect();
        let (calls, receiver) = unbounded_channel();
        let (made, outcome) = channel();
        // If the thread has ended, so has the sender of `made`, and its receiver says so.
        let _ = groups.send(NewGroup { ranks, host: host.clone(), timeout, calls: receiver, made });
        let gone = |_| Error::communication("mpi", "the thread of MPI has ended");
        outcome.recv().map_err(gone)??;
        Ok(MpiCollective { host, calls, traffic: Mutex::default() })
    }
}

impl Collective for MpiCollective {
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
        let (work, completion) = Work::new();
        let sent = bytes_sent(&call, self.rank(), self.size());
        self.traffic.lock().unwrap_or_else(PoisonError::into_inner).count(call.op, sent);
        let span = trace_span!(
            "collective",
            name = call.op.name(),
            op = %call.op,
            bytes = call.len * call.dtype.size(),
            group = self.name(),
            site = %call.site,
        );
        // If the thread has ended, so has the completion, and the work says so.
        let _ = self.calls.send(QueuedCall { call, memory, completion, span });
        work
    }

    fn traffic(&self) -> CommVolume {
        self.traffic.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn check(&self) -> Result<()> {
        self.host.check()
    }

    fn fail(&self, reason: &str) {
        self.host.fail(reason);
    }
}
