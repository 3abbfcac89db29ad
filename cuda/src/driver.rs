//! NVIDIA's driver: loaded once in a process, its statuses as errors.

use cudarc::driver::sys::{self, CUresult};
use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::OnceLock;

use crate::library::{Kind, Search};
use crate::{Error, Result};

/// Functions that are called. They are looked for when the driver is loaded: the binding would panic at a missing one.
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

/// Loads the driver and starts it, unless that was done before: the first call decides from where.
///
/// Errors, naming the remedy, if there is none or it is too old.
pub(crate) fn load(search: &Search) -> Result<()> {
    static DRIVER: OnceLock<Result<()>> = OnceLock::new();
    let start = || {
        let library = search.load(Kind::Driver)?;
        for name in FUNCTIONS {
            // SAFETY: the address is not used.
            unsafe { library.function::<*const c_void>(name) }?;
        }
        // The binding looks for the driver itself, by other names first: `libcuda.so` may be a toolkit's stub.
        // SAFETY: it loads a library of that name only if one is there; the addresses are not used.
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

/// Errors unless a call succeeded.
pub(crate) fn check(op: &'static str, status: CUresult) -> Result<()> {
    match status {
        CUresult::CUDA_SUCCESS => Ok(()),
        status => Err(Error::new(op, reason(status))),
    }
}

fn reason(status: CUresult) -> String {
    let text = |get: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = ptr::null();
        // SAFETY: the driver writes the address of a text that stays, or null for a status that it does not know.
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
