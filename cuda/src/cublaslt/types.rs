//! Types of cublasLt.h, whose names they keep, with the values in use.
#![allow(non_camel_case_types)]

use std::ffi::{c_int, c_void};

pub(super) type cublasLtHandle_t = *mut c_void;
pub(super) type cublasLtMatmulDesc_t = *mut c_void;
pub(super) type cublasLtMatmulPreference_t = *mut c_void;
pub(super) type cublasLtMatrixLayout_t = *mut c_void;

/// `cublasStatus_t`; later versions may have values that are not listed here.
pub(super) type Status = c_int;
pub(super) const SUCCESS: Status = 0;
pub(super) const INVALID_VALUE: Status = 7;
pub(super) const NOT_SUPPORTED: Status = 15;

/// An algorithm, in the library's encoding.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct cublasLtMatmulAlgo_t {
    pub(super) data: [u64; 8],
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Candidate {
    pub(super) algorithm: cublasLtMatmulAlgo_t,
    pub(super) workspace: usize,
    pub(super) state: Status,
    pub(super) waves: f32,
    pub(super) reserved: [c_int; 4],
}

#[repr(u32)]
#[derive(Debug, Clone, Copy)]
pub(super) enum cublasComputeType_t {
    CUBLAS_COMPUTE_32F = 68,
    CUBLAS_COMPUTE_64F = 70,
}

#[repr(u32)]
#[derive(Debug, Clone, Copy)]
pub(super) enum cudaDataType {
    CUDA_R_32F = 0,
    CUDA_R_64F = 1,
    CUDA_R_16F = 2,
    CUDA_R_16BF = 14,
}

#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum cublasLtEpilogue_t {
    CUBLASLT_EPILOGUE_DEFAULT = 1,
    CUBLASLT_EPILOGUE_BIAS = 4,
    CUBLASLT_EPILOGUE_GELU_AUX = 160,
    CUBLASLT_EPILOGUE_GELU_AUX_BIAS = 164,
    CUBLASLT_EPILOGUE_BGRADB = 512,
}

/// `cublasLtReductionScheme_t` for partial sums in the accumulator type.
pub(super) const CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: u32 = 2;

#[repr(u32)]
#[derive(Debug, Clone, Copy)]
pub(super) enum cublasLtMatmulDescAttributes_t {
    CUBLASLT_MATMUL_DESC_TRANSA = 3,
    CUBLASLT_MATMUL_DESC_TRANSB = 4,
    CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
    CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER = 11,
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD = 12,
}

#[repr(u32)]
#[derive(Debug, Clone, Copy)]
pub(super) enum cublasLtMatmulPreferenceAttributes_t {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8,
}

#[repr(u32)]
#[derive(Debug, Clone, Copy)]
pub(super) enum cublasLtMatrixLayoutAttribute_t {
    CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5,
    CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 6,
}
