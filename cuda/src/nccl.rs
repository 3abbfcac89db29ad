//! NCCL: collectives between GPUs. Nothing blocks: communicators are non-blocking, so that their user can check for
//! dead peers and abort.

mod functions;
mod types;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use crate::context::Context;
use crate::kernels::ElementType;
use crate::library::{Kind, Search};
use crate::stream::Stream;
use crate::{Error, Result};
use functions::Functions;
use types::{
    IN_PROGRESS, SUCCESS, Status, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t,
    ncclUniqueId,
};

/// Bytes of the id of a new communicator.
pub const ID_BYTES: usize = 128;

/// The reduction of elements over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// Their sum.
    Sum,
    /// Their maximum.
    Max,
}

/// The loaded NCCL library.
#[derive(Debug)]
pub struct Nccl {
    functions: Functions,
}

impl Nccl {
    /// Loads the library.
    ///
    /// Errors, with the remedy, if it is missing or too old.
    pub fn load(search: &Search) -> Result<Arc<Nccl>> {
        let functions = Functions::load(&search.load(Kind::Nccl)?)?;
        Ok(Arc::new(Nccl { functions }))
    }

    /// Creates the id that all ranks of a new communicator need; one rank distributes it to the others.
    pub fn unique_id(&self) -> Result<[u8; ID_BYTES]> {
        let mut id = ncclUniqueId { internal: [0; ID_BYTES] };
        // SAFETY: the pointer is to a live variable.
        let status = unsafe { (self.functions.get_unique_id)(&mut id) };
        self.check("ncclGetUniqueId", status, ptr::null_mut())?;
        Ok(id.internal.map(|byte| byte as u8))
    }

    /// Errors unless a call succeeded or is in progress.
    fn check(&self, op: &'static str, status: Status, comm: ncclComm_t) -> Result<()> {
        match status {
            SUCCESS | IN_PROGRESS => Ok(()),
            status => {
                // SAFETY: both return static strings or null.
                let texts = unsafe {
                    [(self.functions.error_string)(status), (self.functions.last_error)(comm)]
                        .map(|text| (!text.is_null()).then(|| CStr::from_ptr(text)))
                };
                let texts = texts.into_iter().flatten().map(CStr::to_string_lossy);
                let message = texts.filter(|text| !text.is_empty()).collect::<Vec<_>>().join(": ");
                Err(Error::new(op, message))
            }
        }
    }
}

/// One rank's handle of a group of GPUs. All ranks must make the same calls in the same order, each after the
/// previous one is [ready](Communicator::is_ready).
#[derive(Debug)]
pub struct Communicator {
    nccl: Arc<Nccl>,
    context: Arc<Context>,
    handle: ncclComm_t,
}

// SAFETY: a communicator may be used from any thread, one at a time, which `&mut self` ensures.
unsafe impl Send for Communicator {}

/// A range of device memory used by a call.
#[derive(Debug, Clone, Copy)]
pub struct Elements {
    /// Address of the first element.
    pub address: u64,
    /// Number of elements.
    pub count: usize,
    /// Element type.
    pub element: ElementType,
}

impl Communicator {
    /// Starts creating a communicator with all ranks that have `id`; each must call this. It can be used once it is
    /// [ready](Communicator::is_ready).
    pub fn begin(
        nccl: &Arc<Nccl>,
        context: &Arc<Context>,
        id: [u8; ID_BYTES],
        rank: usize,
        size: usize,
    ) -> Result<Communicator> {
        context.bind()?;
        let mut config = ncclConfig_t::non_blocking();
        let id = ncclUniqueId { internal: id.map(|byte| byte as c_char) };
        let mut handle = ptr::null_mut();
        // SAFETY: the pointers are to live variables; `drop` aborts the communicator.
        let status = unsafe {
            (nccl.functions.init)(&mut handle, size as c_int, id, rank as c_int, &mut config)
        };
        let communicator = Communicator { nccl: nccl.clone(), context: context.clone(), handle };
        nccl.check("ncclCommInitRankConfig", status, handle)?;
        Ok(communicator)
    }

    /// Returns whether the last call is enqueued in its stream.
    ///
    /// Errors if it failed, or if the communicator did, for example because a peer has exited.
    pub fn is_ready(&mut self) -> Result<bool> {
        let mut state = SUCCESS;
        // SAFETY: the communicator is alive, the pointer is to a live variable.
        let status = unsafe { (self.nccl.functions.async_error)(self.handle, &mut state) };
        self.nccl.check("ncclCommGetAsyncError", status, self.handle)?;
        self.nccl.check("nccl", state, self.handle)?;
        Ok(state == SUCCESS)
    }

    /// Enqueues several calls as one, so that they progress concurrently.
    pub fn group(&mut self, f: impl FnOnce(&mut Communicator) -> Result<()>) -> Result<()> {
        self.context.bind()?;
        // SAFETY: the group is ended below, on this thread.
        let status = unsafe { (self.nccl.functions.group_start)() };
        self.nccl.check("ncclGroupStart", status, self.handle)?;
        let result = f(self);
        // SAFETY: it was begun above.
        let status = unsafe { (self.nccl.functions.group_end)() };
        result?;
        self.nccl.check("ncclGroupEnd", status, self.handle)
    }

    /// Reduces all ranks' elements, in place.
    ///
    /// # Safety
    /// For this and the following calls: the addresses are device memory that nothing outside of `stream` uses until
    /// the call has completed in the stream.
    pub unsafe fn all_reduce(
        &mut self,
        stream: &Stream,
        at: Elements,
        reduction: Reduction,
    ) -> Result<()> {
        let (pointer, dtype, op) = (at.address as *mut c_void, dtype(at.element), op(reduction));
        let Functions { all_reduce, .. } = self.nccl.functions;
        // SAFETY: the caller guarantees the memory.
        self.call("ncclAllReduce", stream, |comm, stream| unsafe {
            all_reduce(pointer, pointer, at.count, dtype, op, comm, stream)
        })
    }

    /// Reduces the ranks' buffers at `whole`, which have `at.count` elements per rank, and writes this rank's part to
    /// `at`, which is its range of `whole`.
    ///
    /// # Safety
    /// As for [`Communicator::all_reduce`].
    pub unsafe fn reduce_scatter(
        &mut self,
        stream: &Stream,
        whole: u64,
        at: Elements,
        reduction: Reduction,
    ) -> Result<()> {
        let (from, to) = (whole as *const c_void, at.address as *mut c_void);
        let (dtype, op) = (dtype(at.element), op(reduction));
        let Functions { reduce_scatter, .. } = self.nccl.functions;
        // SAFETY: the caller guarantees the memory.
        self.call("ncclReduceScatter", stream, |comm, stream| unsafe {
            reduce_scatter(from, to, at.count, dtype, op, comm, stream)
        })
    }

    /// Gathers all ranks' `at.count` elements contiguously at `whole`; `at` is this rank's range of it.
    ///
    /// # Safety
    /// As for [`Communicator::all_reduce`].
    pub unsafe fn all_gather(&mut self, stream: &Stream, whole: u64, at: Elements) -> Result<()> {
        let (from, to) = (at.address as *const c_void, whole as *mut c_void);
        let dtype = dtype(at.element);
        let Functions { all_gather, .. } = self.nccl.functions;
        // SAFETY: the caller guarantees the memory.
        self.call("ncclAllGather", stream, |comm, stream| unsafe {
            all_gather(from, to, at.count, dtype, comm, stream)
        })
    }

    /// Broadcasts the root's elements, in place.
    ///
    /// # Safety
    /// As for [`Communicator::all_reduce`].
    pub unsafe fn broadcast(&mut self, stream: &Stream, at: Elements, root: usize) -> Result<()> {
        let (pointer, dtype) = (at.address as *mut c_void, dtype(at.element));
        let Functions { broadcast, .. } = self.nccl.functions;
        // SAFETY: the caller guarantees the memory.
        self.call("ncclBroadcast", stream, |comm, stream| unsafe {
            broadcast(pointer, pointer, at.count, dtype, root as c_int, comm, stream)
        })
    }

    /// Reduces all ranks' elements to the root, in place; the other ranks keep theirs.
    ///
    /// # Safety
    /// As for [`Communicator::all_reduce`].
    pub unsafe fn reduce(
        &mut self,
        stream: &Stream,
        at: Elements,
        root: usize,
        reduction: Reduction,
    ) -> Result<()> {
        let (pointer, dtype, op) = (at.address as *mut c_void, dtype(at.element), op(reduction));
        let Functions { reduce, .. } = self.nccl.functions;
        // SAFETY: the caller guarantees the memory.
        self.call("ncclReduce", stream, |comm, stream| unsafe {
            reduce(pointer, pointer, at.count, dtype, op, root as c_int, comm, stream)
        })
    }

    /// Sends elements to rank `to`.
    ///
    /// # Safety
    /// As for [`Communicator::all_reduce`].
    pub unsafe fn send(&mut self, stream: &Stream, at: Elements, to: usize) -> Result<()> {
        let (pointer, dtype) = (at.address as *const c_void, dtype(at.element));
        let Functions { send, .. } = self.nccl.functions;
        // SAFETY: the caller guarantees the memory.
        self.call("ncclSend", stream, |comm, stream| unsafe {
            send(pointer, at.count, dtype, to as c_int, comm, stream)
        })
    }

    /// Receives elements from rank `from`.
    ///
    /// # Safety
    /// As for [`Communicator::all_reduce`].
    pub unsafe fn recv(&mut self, stream: &Stream, at: Elements, from: usize) -> Result<()> {
        let (pointer, dtype) = (at.address as *mut c_void, dtype(at.element));
        let Functions { recv, .. } = self.nccl.functions;
        // SAFETY: the caller guarantees the memory.
        self.call("ncclRecv", stream, |comm, stream| unsafe {
            recv(pointer, at.count, dtype, from as c_int, comm, stream)
        })
    }

    fn call(
        &mut self,
        op: &'static str,
        stream: &Stream,
        f: impl FnOnce(ncclComm_t, *mut c_void) -> Status,
    ) -> Result<()> {
        self.context.bind()?;
        let status = f(self.handle, stream.handle());
        self.nccl.check(op, status, self.handle)
    }

    /// Starts finalizing, which all ranks must do; it is complete when it is [ready](Communicator::is_ready).
    pub fn begin_leave(&mut self) -> Result<()> {
        // SAFETY: the communicator is alive.
        let status = unsafe { (self.nccl.functions.finalize)(self.handle) };
        self.nccl.check("ncclCommFinalize", status, self.handle)
    }

    /// Frees the communicator after all ranks have finalized. Dropping it instead aborts pending calls.
    pub fn destroy(mut self) {
        let handle = std::mem::replace(&mut self.handle, ptr::null_mut());
        // SAFETY: the handle has no other user.
        let _ = unsafe { (self.nccl.functions.destroy)(handle) };
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            let _ = self.context.bind();
            // SAFETY: the handle has no other user. Enqueued calls end.
            let _ = unsafe { (self.nccl.functions.abort)(self.handle) };
        }
    }
}

fn dtype(element: ElementType) -> ncclDataType_t {
    match element {
        ElementType::F64 => ncclDataType_t::ncclFloat64,
        ElementType::F32 => ncclDataType_t::ncclFloat32,
        ElementType::BF16 => ncclDataType_t::ncclBfloat16,
        ElementType::F16 => ncclDataType_t::ncclFloat16,
        ElementType::U8 => ncclDataType_t::ncclUint8,
        ElementType::U32 => ncclDataType_t::ncclUint32,
        ElementType::I64 => ncclDataType_t::ncclInt64,
    }
}

fn op(reduction: Reduction) -> ncclRedOp_t {
    match reduction {
        Reduction::Sum => ncclRedOp_t::ncclSum,
        Reduction::Max => ncclRedOp_t::ncclMax,
    }
}
