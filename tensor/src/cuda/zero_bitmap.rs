//! Launches lossless compression of vectors with many zeros. The size of the result depends on the number of zeros,
//! so compressing synchronizes with the GPU.

use super::copy::by_size;
use super::kernel;
use crate::ops::zero_bitmap::format::{CHUNK, mask_bytes};
use crate::{DType, Error, Result, Tensor};

/// Threads of the single block that sums the counts of all chunks.
const SUMMED: usize = 256;

/// GPU version of [`crate::ops::zero_bitmap::compress`].
pub(crate) fn compress(x: &Tensor) -> Result<Option<Tensor>> {
    if !x.is_contiguous() {
        return Err(Error::shape("zero_bitmap", format!("{x:?} is not contiguous")));
    }
    let (device, dtype, n) = (x.device(), by_size(x.dtype()), x.numel());
    device.expect_no_capture("zero_bitmap")?;
    let head = mask_bytes(n);
    let mut mask = Tensor::empty(device, DType::I64, &[head / 8])?;
    kernel(device, "zero_bitmap", dtype, "zero_mask")?
        .input(x)
        .output(&mut mask)
        .value(n as u64)
        .value((head / 8) as u64)
        .run_elements(n)?;
    let starts = starts(&mask, dtype, n)?;
    let kept = starts.narrow(0, n.div_ceil(CHUNK), 1)?.to_vec::<i64>()?[0] as usize;
    let bytes = head + kept * x.dtype().size();
    if bytes >= n * x.dtype().size() {
        return Ok(None);
    }
    let mut packed = Tensor::empty(device, DType::U8, &[bytes])?;
    kernel(device, "zero_bitmap", dtype, "zero_pack")?
        .input(x)
        .input(&mask)
        .input(&starts)
        .output(&mut packed)
        .value(n as u64)
        .value(head as u64)
        .run_elements(n)?;
    Ok(Some(packed))
}

/// Fills the vector `y` from the `packed` result of [`compress`]. Other bytes of the same length give unspecified
/// values.
pub(crate) fn expand(packed: &Tensor, y: &mut Tensor) -> Result<()> {
    let (device, n, size) = (packed.device(), y.numel(), y.dtype().size());
    let (head, dtype) = (mask_bytes(n), by_size(y.dtype()));
    let values = packed.numel().checked_sub(head).filter(|bytes| bytes % size == 0);
    let (Some(bytes), true) =
        (values, packed.is_contiguous() && packed.address().is_multiple_of(8))
    else {
        let message = format!("{} bytes are not {n} elements", packed.numel());
        return Err(Error::shape("zero_bitmap", message));
    };
    let starts = starts(packed, dtype, n)?;
    kernel(device, "zero_bitmap", dtype, "zero_expand")?
        .input(packed)
        .input(&starts)
        .output(y)
        .value(n as u64)
        .value(head as u64)
        .value((bytes / size) as i64)
        .run_elements(n)
}

/// Prefix sums of the kept elements per chunk and their total, from the mask at the beginning of `mask`.
fn starts(mask: &Tensor, dtype: DType, n: usize) -> Result<Tensor> {
    let (device, chunks) = (mask.device(), n.div_ceil(CHUNK));
    let mut counts = Tensor::empty(device, DType::I64, &[chunks])?;
    kernel(device, "zero_bitmap", dtype, "zero_counts")?
        .input(mask)
        .output(&mut counts)
        .value(n.div_ceil(64) as u64)
        .value(chunks as u64)
        .run_rows(chunks, 32)?;
    let mut starts = Tensor::empty(device, DType::I64, &[chunks + 1])?;
    kernel(device, "zero_bitmap", dtype, "zero_starts")?
        .input(&counts)
        .output(&mut starts)
        .value(chunks as u64)
        .run([1; 3], [SUMMED, 1, 1])?;
    Ok(starts)
}
