//! Function pointers of NCCL.

use std::ffi::{c_char, c_int, c_void};

use super::types::{Status, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use crate::Result;
use crate::library::Library;

/// The functions in use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Functions {
    pub(super) get_unique_id: unsafe extern "C" fn(*mut ncclUniqueId) -> Status,
    pub(super) init: unsafe extern "C" fn(
        *mut ncclComm_t,
        c_int,
        ncclUniqueId,
        c_int,
        *mut ncclConfig_t,
    ) -> Status,
    pub(super) async_error: unsafe extern "C" fn(ncclComm_t, *mut Status) -> Status,
    pub(super) finalize: unsafe extern "C" fn(ncclComm_t) -> Status,
    pub(super) destroy: unsafe extern "C" fn(ncclComm_t) -> Status,
    pub(super) abort: unsafe extern "C" fn(ncclComm_t) -> Status,
    pub(super) error_string: unsafe extern "C" fn(Status) -> *const c_char,
    pub(super) last_error: unsafe extern "C" fn(ncclComm_t) -> *const c_char,
    pub(super) group_start: unsafe extern "C" fn() -> Status,
    pub(super) group_end: unsafe extern "C" fn() -> Status,
    pub(super) all_reduce: Reduce,
    pub(super) reduce_scatter: Reduce,
    pub(super) all_gather: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        ncclDataType_t,
        ncclComm_t,
        *mut c_void,
    ) -> Status,
    pub(super) broadcast: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        ncclDataType_t,
        c_int,
        ncclComm_t,
        *mut c_void,
    ) -> Status,
    pub(super) reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        ncclDataType_t,
        ncclRedOp_t,
        c_int,
        ncclComm_t,
        *mut c_void,
    ) -> Status,
    pub(super) send: unsafe extern "C" fn(
        *const c_void,
        usize,
        ncclDataType_t,
        c_int,
        ncclComm_t,
        *mut c_void,
    ) -> Status,
    pub(super) recv: unsafe extern "C" fn(
        *mut c_void,
        usize,
        ncclDataType_t,
        c_int,
        ncclComm_t,
        *mut c_void,
    ) -> Status,
}

type Reduce = unsafe extern "C" fn(
    *const c_void,
    *mut c_void,
    usize,
    ncclDataType_t,
    ncclRedOp_t,
    ncclComm_t,
    *mut c_void,
) -> Status;

impl Functions {
    /// Looks up the functions in a library.
    ///
    /// Errors if one is missing because the library is too old.
    pub(super) fn load(library: &Library) -> Result<Functions> {
        // SAFETY: the types are those of nccl.h.
        unsafe {
            Ok(Functions {
                get_unique_id: library.function("ncclGetUniqueId")?,
                init: library.function("ncclCommInitRankConfig")?,
                async_error: library.function("ncclCommGetAsyncError")?,
                finalize: library.function("ncclCommFinalize")?,
                destroy: library.function("ncclCommDestroy")?,
                abort: library.function("ncclCommAbort")?,
                error_string: library.function("ncclGetErrorString")?,
                last_error: library.function("ncclGetLastError")?,
                group_start: library.function("ncclGroupStart")?,
                group_end: library.function("ncclGroupEnd")?,
                all_reduce: library.function("ncclAllReduce")?,
                reduce_scatter: library.function("ncclReduceScatter")?,
                all_gather: library.function("ncclAllGather")?,
                broadcast: library.function("ncclBroadcast")?,
                reduce: library.function("ncclReduce")?,
                send: library.function("ncclSend")?,
                recv: library.function("ncclRecv")?,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::headers::{function, program};
    use crate::library::{Kind, Search};

    #[test]
    fn the_real_library_has_every_function_as_its_header_declares_it() {
        let test = "the_real_library_has_every_function_as_its_header_declares_it";
        let library = match Search::from_environment().load(Kind::Nccl) {
            Ok(library) => library,
            Err(error) => return println!("skipped: {test}: {error}"),
        };
        let functions = Functions::load(&library).unwrap();
        let claims = [
            function("ncclGetUniqueId", functions.get_unique_id),
            function("ncclCommInitRankConfig", functions.init),
            function("ncclCommGetAsyncError", functions.async_error),
            function("ncclCommFinalize", functions.finalize),
            function("ncclCommDestroy", functions.destroy),
            function("ncclCommAbort", functions.abort),
            function("ncclGetErrorString", functions.error_string),
            function("ncclGetLastError", functions.last_error),
            function("ncclGroupStart", functions.group_start),
            function("ncclGroupEnd", functions.group_end),
            function("ncclAllReduce", functions.all_reduce),
            function("ncclReduceScatter", functions.reduce_scatter),
            function("ncclAllGather", functions.all_gather),
            function("ncclBroadcast", functions.broadcast),
            function("ncclReduce", functions.reduce),
            function("ncclSend", functions.send),
            function("ncclRecv", functions.recv),
        ];
        program(test, "nccl.h", &claims, "");
    }
}
