//! The thread that makes all calls of the MPI library.

use ferrotron_parallel::collective::{Call, Collective, Completion, Memory};
use ferrotron_tensor::{Error, Result};
use mpi::ffi::{self, MPI_Comm};
use std::ffi::c_int;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::runtime::Builder;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::LocalSet;
use tracing::{Instrument, Span};

use crate::calls::Communicator;

/// A call of a group.
pub struct QueuedCall {
    pub call: Call,
    pub memory: Memory,
    pub completion: Completion,
    pub span: Span,
}

/// A group to be made: its ranks among all of MPI's, in their order.
pub struct NewGroup {
    pub ranks: Vec<c_int>,
    pub host: Arc<dyn Collective>,
    pub timeout: Duration,
    pub calls: UnboundedReceiver<QueuedCall>,
    pub made: Sender<Result<()>>,
}

/// The thread, for which the process waits at its exit, and no sooner: a rank that fails must tell the others first.
static THREAD: Mutex<Option<JoinHandle<()>>> = Mutex::new(None);

extern "C" fn join_at_exit() {
    let thread = THREAD.lock().unwrap_or_else(PoisonError::into_inner).take();
    let _ = thread.map(JoinHandle::join);
}

/// Initialises MPI on a thread of its own. Returns the queue of groups to be made, and the rank and the number of ranks that
/// MPI has. When the queue is gone and all calls of all groups have ended, the thread ends the library, for which all ranks
/// wait there.
///
/// Errors if this process has initialised MPI before: it can do so once.
pub fn start() -> Result<(UnboundedSender<NewGroup>, usize, usize)> {
    let mut started = THREAD.lock().unwrap_or_else(PoisonError::into_inner);
    if started.is_some() {
        let message = "this process has initialised MPI before, and it can do so once";
        return Err(Error::communication("mpi", message));
    }
    let (groups, receiver) = unbounded_channel();
    let (sender, initialised) = channel();
    let work = move || {
        let place = initialise();
        let serves = place.is_ok();
        let _ = sender.send(place);
        if serves {
            serve(receiver);
        }
    };
    let thread = std::thread::Builder::new().name("mpi".into()).spawn(work);
    *started =
        Some(thread.map_err(|error| Error::communication("mpi", format!("no thread: {error}")))?);
    // SAFETY: the function takes nothing, and does not panic.
    unsafe { libc::atexit(join_at_exit) };
    let gone = |_| Error::communication("mpi", "MPI_Init_thread did not return");
    let (rank, ranks) = initialised.recv().map_err(gone)??;
    Ok((groups, rank, ranks))
}

fn initialise() -> Result<(usize, usize)> {
    let (mut provided, mut rank, mut ranks) = (0, 0, 0);
    // SAFETY: the first call of the library in this process; MPI takes null for arguments.
    unsafe {
        let wanted = ffi::RSMPI_THREAD_FUNNELED;
        let null = std::ptr::null_mut();
        ffi::MPI_Init_thread(null, null.cast(), wanted, &mut provided);
        ffi::MPI_Comm_rank(ffi::RSMPI_COMM_WORLD, &mut rank);
        ffi::MPI_Comm_size(ffi::RSMPI_COMM_WORLD, &mut ranks);
        if provided >= wanted {
            return Ok((rank as usize, ranks as usize));
        }
    }
    let message = "this MPI library does not allow processes with several threads";
    Err(Error::communication("mpi", message))
}

fn serve(mut groups: UnboundedReceiver<NewGroup>) {
    let runtime = match Builder::new_current_thread().enable_time().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("ferrotron: mpi: no runtime: {error}");
            return;
        }
    };
    let local = LocalSet::new();
    let mut failed = false;
    runtime.block_on(local.run_until(async {
        let mut tasks = Vec::new();
        while let Some(group) = groups.recv().await {
            match communicator(&group.ranks) {
                Ok(comm) => {
                    let NewGroup { host, timeout, calls, made, .. } = group;
                    let communicator = Communicator { comm, host, timeout };
                    tasks.push(tokio::task::spawn_local(serve_group(communicator, calls)));
                    let _ = made.send(Ok(()));
                }
                Err(error) => {
                    let _ = group.made.send(Err(error));
                }
            }
        }
        for task in tasks {
            failed |= task.await.unwrap_or(true);
        }
    }));
    if !failed {
        // SAFETY: this thread initialised the library, and no call is under way.
        unsafe { ffi::MPI_Finalize() };
    }
}

/// Carries out the calls of a group, one after another. Returns whether a rank has failed: MPI is not ended then, since the
/// others would wait there.
async fn serve_group(group: Communicator, mut calls: UnboundedReceiver<QueuedCall>) -> bool {
    while let Some(QueuedCall { call, mut memory, completion, span }) = calls.recv().await {
        let done = match group.host.check() {
            Ok(()) => group.carry_out(&call, &mut memory).instrument(span).await,
            Err(error) => Err(error),
        };
        completion.complete(done.map(|()| memory));
    }
    group.host.check().is_err()
}

/// The communicator of some of all ranks, which they make together.
fn communicator(ranks: &[c_int]) -> Result<MPI_Comm> {
    // SAFETY: `all` and `some` are groups of the library, made and freed here; `ranks` has as many elements as are named.
    let (code, comm) = unsafe {
        let (mut all, mut some) = (ffi::RSMPI_GROUP_NULL, ffi::RSMPI_GROUP_NULL);
        let mut comm = ffi::RSMPI_COMM_NULL;
        let world = ffi::RSMPI_COMM_WORLD;
        ffi::MPI_Comm_group(world, &mut all);
        ffi::MPI_Group_incl(all, ranks.len() as c_int, ranks.as_ptr(), &mut some);
        let code = ffi::MPI_Comm_create_group(world, some, 0, &mut comm); // one group at a time on each rank
        ffi::MPI_Group_free(&mut some);
        ffi::MPI_Group_free(&mut all);
        (code, comm)
    };
    match code {
        0 => Ok(comm),
        code => {
            let message = format!("no communicator of ranks {ranks:?}: code {code}");
            Err(Error::communication("mpi", message))
        }
    }
}
