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
    CUBLASLT_EPILOGUE_DGELU = 192,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::headers::{claim, constant, program};
    use std::mem::offset_of;

    macro_rules! constants {
        ($($type:ident: $($name:ident)*;)*) => {
            [$($(constant(stringify!($name), $type::$name as i64)),*),*]
        };
    }

    #[test]
    fn types_are_those_of_the_header() {
        let mut claims = constants! {
            cublasComputeType_t: CUBLAS_COMPUTE_32F CUBLAS_COMPUTE_64F;
            cudaDataType: CUDA_R_32F CUDA_R_64F CUDA_R_16F CUDA_R_16BF;
            cublasLtEpilogue_t: CUBLASLT_EPILOGUE_DEFAULT CUBLASLT_EPILOGUE_BIAS
                CUBLASLT_EPILOGUE_GELU_AUX CUBLASLT_EPILOGUE_GELU_AUX_BIAS
                CUBLASLT_EPILOGUE_DGELU CUBLASLT_EPILOGUE_BGRADB;
            cublasLtMatmulDescAttributes_t: CUBLASLT_MATMUL_DESC_TRANSA CUBLASLT_MATMUL_DESC_TRANSB
                CUBLASLT_MATMUL_DESC_EPILOGUE CUBLASLT_MATMUL_DESC_BIAS_POINTER
                CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD;
            cublasLtMatmulPreferenceAttributes_t: CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
                CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK
                CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES
                CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES
                CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES
                CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES;
            cublasLtMatrixLayoutAttribute_t: CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT
                CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
        }
        .to_vec();
        let scheme = i64::from(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
        let (found, state) = (size_of::<Candidate>(), offset_of!(Candidate, state));
        claims.extend([
            constant("CUBLAS_STATUS_SUCCESS", i64::from(SUCCESS)),
            constant("CUBLAS_STATUS_INVALID_VALUE", i64::from(INVALID_VALUE)),
            constant("CUBLAS_STATUS_NOT_SUPPORTED", i64::from(NOT_SUPPORTED)),
            constant("CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE", scheme),
            claim(&format!("sizeof(cublasLtMatmulHeuristicResult_t) == {found}")),
            claim(&format!("offsetof(cublasLtMatmulHeuristicResult_t, state) == {state}")),
            claim(&format!(
                "offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize) == {}",
                offset_of!(Candidate, workspace)
            )),
        ]);
        program("types_are_those_of_the_header", "cublasLt.h", &claims, "");
    }
}
