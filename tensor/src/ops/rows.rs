//! Helpers of row-wise operations: parallel loops over rows of several slices, and reuse of uniquely held operands.

use crate::device::SERIAL;
use crate::numeric::disjoint::Disjoint;
use crate::{Device, Result, Scalar, Tensor};

/// Elements that are copied or added per nanosecond.
pub(crate) const CHEAP: usize = 8;

impl Device {
    /// Splits `out` into rows of `width` and calls `f(first_row, rows)` on blocks of whole rows. Uses all threads where
    /// that pays if `f` does no more than copy or add elements. A fake device calls nothing.
    ///
    /// ```
    /// let device = ferrotron_tensor::Device::cpu(2)?;
    /// let mut squares = [0; 100];
    /// device.for_each_rows(&mut squares, 1, |first, part| {
    ///     part.iter_mut().enumerate().for_each(|(i, x)| *x = (first + i) * (first + i));
    /// });
    /// assert_eq!(squares[99], 9801);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn for_each_rows<T: Send>(
        &self,
        out: &mut [T],
        width: usize,
        f: impl Fn(usize, &mut [T]) + Send + Sync,
    ) {
        let work = out.len() / CHEAP;
        for_rows(self, (out, width), work, f);
    }
}

/// Number of rows per task, for `rows` rows with total `work`; all rows if sharing does not pay. It affects only the
/// assignment of rows to threads, never the result.
fn rows_per_task(device: &Device, rows: usize, work: usize) -> usize {
    if work < SERIAL || device.threads() == 1 {
        return rows;
    }
    // A last part holds the other threads up: with 4 parts for each, they waited for a fifth of GELU's time.
    rows.div_ceil(16 * device.threads()).max((SERIAL / 4).saturating_mul(rows).div_ceil(work))
}

/// Splits `out` into rows of `width` and calls `f(first_row, rows)` on blocks of whole rows, on all threads if `work`
/// is large enough.
pub(crate) fn for_rows<A: Send>(
    device: &Device,
    (out, width): (&mut [A], usize),
    work: usize,
    f: impl Fn(usize, &mut [A]) + Send + Sync,
) {
    for_rows_dyn(device, (out, width), work, &f);
}

/// [`for_rows`], compiled once for a type and not for every closure.
fn for_rows_dyn<A: Send>(
    device: &Device,
    (out, width): (&mut [A], usize),
    work: usize,
    f: &(dyn Fn(usize, &mut [A]) + Send + Sync),
) {
    let rows = out.len().checked_div(width).unwrap_or(0);
    let out = Disjoint::new(out);
    for_blocks(device, rows, work, &|first, count| {
        // SAFETY: blocks are consecutive.
        f(first, unsafe { out.part(first * width, count * width) });
    });
}

/// Calls `f(first, count)` for consecutive blocks of `rows`, on all threads if `work` is large enough.
fn for_blocks(device: &Device, rows: usize, work: usize, f: &(dyn Fn(usize, usize) + Send + Sync)) {
    let step = rows_per_task(device, rows, work);
    if step >= rows {
        if rows > 0 && !device.is_fake() {
            f(0, rows);
        }
        return;
    }
    let block = |task| f(task * step, step.min(rows - task * step));
    device.for_each(rows.div_ceil(step), work, &block);
}

/// Like [`for_rows`], for two slices with the same number of rows.
pub(crate) fn for_rows2<A: Send, B: Send>(
    device: &Device,
    (a, a_width): (&mut [A], usize),
    (b, b_width): (&mut [B], usize),
    work: usize,
    f: impl Fn(usize, &mut [A], &mut [B]) + Send + Sync,
) {
    let rows = a.len().checked_div(a_width).unwrap_or(0);
    debug_assert_eq!(rows * b_width, b.len());
    let (a, b) = (Disjoint::new(a), Disjoint::new(b));
    for_blocks(device, rows, work, &|first, count| {
        // SAFETY: blocks are consecutive.
        let (a, b) = unsafe {
            (a.part(first * a_width, count * a_width), b.part(first * b_width, count * b_width))
        };
        f(first, a, b);
    });
}

/// Calls `f(run, source run)` for every run of the unique `out`, which may be strided. `source` is contiguous and as long.
/// A run is a dense row, or one element of another row.
pub(crate) fn for_runs<T: Scalar>(
    out: &mut Tensor,
    source: &[T],
    f: impl Fn(&mut [T], &[T]) + Send + Sync,
) -> Result<()> {
    let (layout, device) = (out.layout().clone(), out.device().clone());
    let (width, stride) = layout.row();
    let out = Disjoint::new(out.buffer_slice_mut::<T>()?);
    let rows = source.len().checked_div(width).unwrap_or(0);
    device.for_each(rows, source.len() / CHEAP, &|row| {
        let start = layout.row_offset(row);
        let run = if stride == 1 { width } else { 1 };
        for (j, source) in source[row * width..][..width].chunks_exact(run).enumerate() {
            // SAFETY: a writable view contains no element twice, so runs are disjoint.
            f(unsafe { out.part(start + j * stride, run) }, source);
        }
    });
    Ok(())
}

/// Returns whether a kernel may overwrite `x`.
pub(crate) fn can_reuse(x: &Tensor) -> bool {
    x.is_contiguous() && x.is_unique()
}

/// Products of the dims before, at and after `dim` of a contiguous tensor.
pub(crate) fn around(dims: &[usize], dim: usize) -> (usize, usize, usize) {
    (dims[..dim].iter().product(), dims[dim], dims[dim + 1..].iter().product())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    /// The parts into which a loop over so many elements is cut.
    fn parts(elements: usize) -> usize {
        let (parts, mut out) = (AtomicUsize::new(0), vec![0_u8; elements]);
        Device::cpu(2).unwrap().for_each_rows(&mut out, 1, |_, part| {
            part.fill(1);
            parts.fetch_add(1, Relaxed);
        });
        assert!(out.iter().all(|&x| x == 1));
        parts.into_inner()
    }

    #[test]
    fn cheap_loops_are_shared_only_where_they_take_longer_than_that() {
        assert_eq!(parts(SERIAL * CHEAP - 1), 1);
        assert!(parts(SERIAL * CHEAP) >= 2);
    }
}
