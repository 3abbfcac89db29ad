//! The CUDA driver: loaded once per process, with status codes converted to errors.

pub(crate) mod sys;

use std::ffi::{CStr, c_char};
use std::ptr;
use std::sync::OnceLock;

use crate::library::{Kind, Search};
use crate::{Error, Result};
use sys::{CUDA_SUCCESS, CUresult};

/// Loads and initialises the driver on the first call, whose `search` is used.
///
/// Errors, with the remedy, if there is no driver or it is too old.
pub(crate) fn load(search: &Search) -> Result<()> {
    static DRIVER: OnceLock<Result<()>> = OnceLock::new();
    let start = || {
        sys::load(&search.load(Kind::Driver)?)?;
        // SAFETY: `cuInit` may be called at any time.
        check("cuInit", unsafe { sys::cuInit(0) })
    };
    DRIVER.get_or_init(start).clone()
}

/// Errors unless the call of `op` succeeded.
pub(crate) fn check(op: &'static str, status: CUresult) -> Result<()> {
    match status {
        CUDA_SUCCESS => Ok(()),
        status => Err(Error::new(op, reason(status))),
    }
}

fn reason(status: CUresult) -> String {
    let text = |get: unsafe fn(CUresult, *mut *const c_char) -> CUresult| {
        let mut text = ptr::null();
        // SAFETY: the driver writes the address of a static string, or null for an unknown status.
        unsafe {
            get(status, &mut text);
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    };
    match (text(sys::cuGetErrorName), text(sys::cuGetErrorString)) {
        (Some(name), Some(meaning)) => format!("{name}: {meaning}"),
        _ => format!("failed with status {status}"),
    }
}
