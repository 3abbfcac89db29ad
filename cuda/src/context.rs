//! Contexts of GPUs.

use std::ffi::{CStr, c_char, c_int};
use std::ptr;
use std::sync::Arc;

use crate::driver::sys::{self, CUcontext};
use crate::driver::{self, check};
use crate::library::Search;
use crate::nvrtc::Architecture;
use crate::{Error, Result};

/// Minimum major compute capability: the first with asynchronous copies and bf16.
const OLDEST: u32 = 8;

/// The primary context of a GPU, shared by all its users in this process. It is never released: libraries cache what
/// they load into it, and would not notice that it was recreated.
#[derive(Debug)]
pub struct Context {
    ordinal: usize,
    handle: CUcontext,
    name: String,
    architecture: Architecture,
    multiprocessors: usize,
    memory: usize,
}

// SAFETY: contexts may be used from any thread, concurrently.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// The context of GPU number `ordinal`.
    ///
    /// Errors, with the remedy, if there is no driver, no such GPU, or its compute capability is too low.
    pub fn new(search: &Search, ordinal: usize) -> Result<Arc<Context>> {
        driver::load(search)?;
        let (mut device, mut handle, mut memory) = (0, ptr::null_mut(), 0);
        let mut text: [c_char; 256] = [0; 256];
        let attribute = |device, attribute| {
            let mut value: c_int = 0;
            // SAFETY: the pointer is to a live variable.
            let status = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) };
            check("cuDeviceGetAttribute", status).map(|()| value as usize)
        };
        // SAFETY: every pointer is to a live variable; the driver was started.
        unsafe {
            check("cuDeviceGet", sys::cuDeviceGet(&mut device, ordinal as c_int)).map_err(
                |error| Error::new("cuda", format!("there is no GPU {ordinal}: {error}")),
            )?;
            let room = text.len() as c_int - 1;
            check("cuDeviceGetName", sys::cuDeviceGetName(text.as_mut_ptr(), room, device))?;
            check("cuDeviceTotalMem", sys::cuDeviceTotalMem_v2(&mut memory, device))?;
        }
        let architecture = Architecture {
            major: attribute(device, sys::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32,
            minor: attribute(device, sys::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32,
        };
        if architecture.major < OLDEST {
            let (Architecture { major, minor }, name) = (architecture, text_of(&text));
            let message = format!(
                "GPU {ordinal} ({name}) has compute capability {major}.{minor}: {OLDEST}.0 is the least, that of the A100"
            );
            return Err(Error::new("cuda", message));
        }
        let multiprocessors = attribute(device, sys::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        // SAFETY: as above.
        let status = unsafe { sys::cuDevicePrimaryCtxRetain(&mut handle, device) };
        check("cuDevicePrimaryCtxRetain", status)?;
        let name = text_of(&text);
        let context = Context { ordinal, handle, name, architecture, multiprocessors, memory };
        context.bind()?;
        Ok(Arc::new(context))
    }

    /// A fake context for a GPU that executes nothing: its users make no driver calls.
    pub(crate) fn fake(architecture: Architecture) -> Arc<Context> {
        Arc::new(Context {
            ordinal: 0,
            handle: ptr::null_mut(),
            name: "fake".to_string(),
            architecture,
            multiprocessors: 1,
            memory: usize::MAX,
        })
    }

    /// Returns whether the context is fake.
    pub(crate) fn is_fake(&self) -> bool {
        self.handle.is_null()
    }

    /// Makes this the calling thread's current context, before driver calls that need one.
    ///
    /// Errors for a fake GPU, whose users make no driver calls.
    pub(crate) fn bind(&self) -> Result<()> {
        if self.is_fake() {
            return Err(Error::new("cuda", "a fake GPU does nothing"));
        }
        // SAFETY: the context is alive as long as `self`.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.handle) })
    }

    /// The GPU's index.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// The GPU's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The GPU's compute capability.
    pub fn architecture(&self) -> Architecture {
        self.architecture
    }

    /// Number of multiprocessors: at least this many blocks run concurrently.
    pub fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    /// Bytes of device memory.
    pub fn memory(&self) -> usize {
        self.memory
    }
}

/// The driver's text in a zero-initialised array whose last byte it did not write.
pub(crate) fn text_of(text: &[c_char; 256]) -> String {
    // SAFETY: the array ends with a zero.
    unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
}
