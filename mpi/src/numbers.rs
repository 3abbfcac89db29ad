//! Elements as MPI adds and moves them.

use ferrotron_parallel::collective::narrow_sums::{is_narrow, round, widen_add};
use ferrotron_tensor::{DType, Error, Result};
use mpi::ffi::{self, MPI_Datatype};
use std::ffi::c_int;

/// Memory for elements of any dtype.
pub struct Scratch {
    words: Vec<u64>,
    len: usize,
}

impl Scratch {
    /// `len` bytes of zeros.
    pub fn new(len: usize) -> Scratch {
        Scratch { words: vec![0; len.div_ceil(size_of::<u64>())], len }
    }

    /// A copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> Scratch {
        let mut scratch = Scratch::new(bytes.len());
        scratch.bytes_mut().copy_from_slice(bytes);
        scratch
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }

    /// The bytes, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len]
    }
}

/// The numbers of a buffer, in [`DType::accumulator`]: MPI adds none of 16 bits.
pub fn addends(dtype: DType, bytes: &[u8]) -> Scratch {
    if !is_narrow(dtype) {
        return Scratch::copy_of(bytes);
    }
    let mut wide = Scratch::new(bytes.len() / dtype.size() * size_of::<f32>());
    let numbers = bytemuck::cast_slice_mut(wide.bytes_mut());
    numbers.fill(-0.0); // what a sum begins with so that -0 stays -0
    widen_add(dtype, numbers, bytes);
    wide
}

/// Writes sums to a buffer: those of 16-bit numbers are rounded once.
pub fn write_sums(dtype: DType, sums: &Scratch, bytes: &mut [u8]) {
    match is_narrow(dtype) {
        true => round(dtype, bytes, bytemuck::cast_slice(sums.bytes())),
        false => bytes.copy_from_slice(sums.bytes()),
    }
}

/// The MPI type of numbers that are added.
pub fn datatype(dtype: DType) -> MPI_Datatype {
    // SAFETY: constants of the library, read after it was initialised.
    unsafe {
        match dtype {
            DType::F64 => ffi::RSMPI_DOUBLE,
            DType::F32 => ffi::RSMPI_FLOAT,
            DType::U8 => ffi::RSMPI_UINT8_T,
            DType::U32 => ffi::RSMPI_UINT32_T,
            DType::I64 => ffi::RSMPI_INT64_T,
            // Moved, never added.
            DType::BF16 | DType::F16 => ffi::RSMPI_UINT16_T,
        }
    }
}

/// A number of elements for MPI, which counts in 32 bits.
///
/// Errors if it is too large.
pub fn count(elements: usize) -> Result<c_int> {
    c_int::try_from(elements).map_err(|_| {
        let message = format!(
            "MPI moves at most 2147483647 elements in a call, got {elements}: use a smaller --ddp-bucket-size"
        );
        Error::communication("mpi", message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrotron_tensor::bf16;

    #[test]
    fn sums_of_16_bits_are_rounded_once() {
        let numbers = [1.0_f32, -2.5, 3.0e-3].map(bf16::from_f32);
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_bits().to_ne_bytes()).collect();
        let wide = addends(DType::BF16, &bytes);
        let values: &[f32] = bytemuck::cast_slice(wide.bytes());
        assert_eq!(values, numbers.map(bf16::to_f32));
        let mut back = vec![0; bytes.len()];
        write_sums(DType::BF16, &wide, &mut back);
        assert_eq!(back, bytes);
    }

    #[test]
    fn counts_that_mpi_cannot_state_are_refused() {
        assert_eq!(count(7).unwrap(), 7);
        let error = count(1 << 31).unwrap_err().to_string();
        assert!(error.contains("got 2147483648: use a smaller --ddp-bucket-size"), "{error}");
    }
}
