//! Function pointers of cuBLASLt.

use std::ffi::{CStr, c_char, c_int, c_void};

use super::types::{
    Candidate, SUCCESS, Status, cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t,
    cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t,
    cudaDataType,
};
use crate::library::Library;
use crate::{Error, Result};

/// Sets an attribute of a descriptor.
pub(super) type Set<T, A> = unsafe extern "C" fn(T, A, *const c_void, usize) -> Status;
/// Destroys a descriptor.
pub(super) type Destroy<T> = unsafe extern "C" fn(T) -> Status;

/// The functions in use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Functions {
    pub(super) version: unsafe extern "C" fn() -> usize,
    pub(super) create: unsafe extern "C" fn(*mut cublasLtHandle_t) -> Status,
    pub(super) destroy: Destroy<cublasLtHandle_t>,
    pub(super) matmul: unsafe extern "C" fn(
        cublasLtHandle_t,
        cublasLtMatmulDesc_t,
        *const c_void,
        *const c_void,
        cublasLtMatrixLayout_t,
        *const c_void,
        cublasLtMatrixLayout_t,
        *const c_void,
        *const c_void,
        cublasLtMatrixLayout_t,
        *mut c_void,
        cublasLtMatrixLayout_t,
        *const cublasLtMatmulAlgo_t,
        *mut c_void,
        usize,
        *mut c_void,
    ) -> Status,
    pub(super) operation_create: unsafe extern "C" fn(
        *mut cublasLtMatmulDesc_t,
        cublasComputeType_t,
        cudaDataType,
    ) -> Status,
    pub(super) operation_destroy: Destroy<cublasLtMatmulDesc_t>,
    pub(super) operation_set: Set<cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t>,
    pub(super) layout_create:
        unsafe extern "C" fn(*mut cublasLtMatrixLayout_t, cudaDataType, u64, u64, i64) -> Status,
    pub(super) layout_destroy: Destroy<cublasLtMatrixLayout_t>,
    pub(super) layout_set: Set<cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t>,
    pub(super) preference_create: unsafe extern "C" fn(*mut cublasLtMatmulPreference_t) -> Status,
    pub(super) preference_destroy: Destroy<cublasLtMatmulPreference_t>,
    pub(super) preference_set:
        Set<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t>,
    pub(super) heuristic: unsafe extern "C" fn(
        cublasLtHandle_t,
        cublasLtMatmulDesc_t,
        cublasLtMatrixLayout_t,
        cublasLtMatrixLayout_t,
        cublasLtMatrixLayout_t,
        cublasLtMatrixLayout_t,
        cublasLtMatmulPreference_t,
        c_int,
        *mut Candidate,
        *mut c_int,
    ) -> Status,
    status_name: unsafe extern "C" fn(Status) -> *const c_char,
}

impl Functions {
    /// Looks up the functions in a library.
    ///
    /// Errors if one is missing because the library is too old.
    pub(super) fn load(library: &Library) -> Result<Functions> {
        // SAFETY: the types are those of cublasLt.h.
        unsafe {
            Ok(Functions {
                create: library.function("cublasLtCreate")?,
                version: library.function("cublasLtGetVersion")?,
                destroy: library.function("cublasLtDestroy")?,
                matmul: library.function("cublasLtMatmul")?,
                operation_create: library.function("cublasLtMatmulDescCreate")?,
                operation_destroy: library.function("cublasLtMatmulDescDestroy")?,
                operation_set: library.function("cublasLtMatmulDescSetAttribute")?,
                layout_create: library.function("cublasLtMatrixLayoutCreate")?,
                layout_destroy: library.function("cublasLtMatrixLayoutDestroy")?,
                layout_set: library.function("cublasLtMatrixLayoutSetAttribute")?,
                preference_create: library.function("cublasLtMatmulPreferenceCreate")?,
                preference_destroy: library.function("cublasLtMatmulPreferenceDestroy")?,
                preference_set: library.function("cublasLtMatmulPreferenceSetAttribute")?,
                heuristic: library.function("cublasLtMatmulAlgoGetHeuristic")?,
                status_name: library.function("cublasLtGetStatusName")?,
            })
        }
    }

    /// Errors unless the call of `op` succeeded.
    pub(super) fn check(&self, op: &'static str, status: Status) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: the library returns a static string or null.
        let name = unsafe {
            let name = (self.status_name)(status);
            (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy())
        };
        Err(Error::new(
            op,
            name.map_or_else(|| format!("status {status}"), |name| name.into_owned()),
        ))
    }
}
