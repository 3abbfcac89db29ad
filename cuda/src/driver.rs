//! The CUDA driver: loaded once per process, with status codes converted to errors.

use cudarc::driver::sys::{self, CUresult};
use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::OnceLock;

use crate::library::{Kind, Search};
use crate::{Error, Result};

/// The driver functions in use. They are checked when the driver is loaded: the binding would panic if one were
/// missing.
const FUNCTIONS: &[&str] = &[
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemGetAllocationGranularity",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyAsync",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamBeginCapture_v2",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

/// Loads and initialises the driver on the first call, whose `search` is used.
///
/// Errors, with the remedy, if there is no driver or it is too old.
pub(crate) fn load(search: &Search) -> Result<()> {
    static DRIVER: OnceLock<Result<()>> = OnceLock::new();
    let start = || {
        let library = search.load(Kind::Driver)?;
        for name in FUNCTIONS {
            // SAFETY: the address is not used.
            unsafe { library.function::<*const c_void>(name) }?;
        }
        // The binding loads the driver itself and tries other names first: `libcuda.so` may be a toolkit's stub.
        // SAFETY: the binding loads a library only if it exists; the addresses are not used.
        let (own, bound) = unsafe {
            let own = library.function::<*const c_void>("cuInit")?;
            let present = sys::is_culib_present();
            let bound = present.then(|| sys::culib().get::<*const c_void>(b"cuInit\0").ok());
            (own, bound.flatten().map(|symbol| *symbol))
        };
        if bound != Some(own) {
            let path = library.path().display();
            let message = format!(
                "{path} is not what the system's loader finds as libcuda.so or libcuda.so.1: take other drivers and stubs off LD_LIBRARY_PATH"
            );
            return Err(Error::new("cuda", message));
        }
        // SAFETY: `cuInit` may be called at any time.
        check("cuInit", unsafe { sys::cuInit(0) })
    };
    DRIVER.get_or_init(start).clone()
}

/// Errors unless the call of `op` succeeded.
pub(crate) fn check(op: &'static str, status: CUresult) -> Result<()> {
    match status {
        CUresult::CUDA_SUCCESS => Ok(()),
        status => Err(Error::new(op, reason(status))),
    }
}

fn reason(status: CUresult) -> String {
    let text = |get: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = ptr::null();
        // SAFETY: the driver writes the address of a static string, or null for an unknown status.
        unsafe {
            get(status, &mut text);
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    };
    match (text(sys::cuGetErrorName), text(sys::cuGetErrorString)) {
        (Some(name), Some(meaning)) => format!("{name}: {meaning}"),
        _ => format!("failed with status {}", status as u32),
    }
}
