//! The loaded library with its handle for one GPU.

use std::sync::Arc;

use super::functions::Functions;
use super::types::cublasLtHandle_t;
use crate::context::Context;

/// The library and its handle for one GPU.
#[derive(Debug)]
pub(super) struct Handle {
    pub functions: Functions,
    pub raw: cublasLtHandle_t,
    /// Bound before the handle is destroyed, which frees device memory.
    pub context: Arc<Context>,
}

// SAFETY: the handle may be used from any thread, concurrently.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: the handle has no other user.
        let _ = unsafe { (self.functions.destroy)(self.raw) };
    }
}
