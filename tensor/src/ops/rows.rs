//! What the row-wise ops share: parallel loops over rows of several slices at once, and the buffer
//! of an operand that nobody else holds.

use crate::disjoint::Disjoint;
use crate::{Device, Result, Scalar, Tensor};

/// Elements that are copied or added in a nanosecond.
pub(crate) const CHEAP: usize = 8;

/// Loops of less work than this run on the calling thread: a fork costs microseconds.
///
/// Work is counted in nanoseconds, roughly: an exponential or a random number is one, [`CHEAP`] elements that
/// are only copied or added are one.
pub(crate) const SERIAL: usize = 16 * 1024;

/// Rows a task takes of `rows` that are `work` together; all of them if a fork is not worth it. Only who
/// computes a row depends on it, never what is computed.
fn rows_per_task(device: &Device, rows: usize, work: usize) -> usize {
    if work < SERIAL || device.threads() == 1 {
        return rows;
    }
    rows.div_ceil(4 * device.threads()).max((SERIAL / 4).saturating_mul(rows).div_ceil(work))
}

/// Cuts `out` into rows of `width` and calls `f(first_row, rows)` on runs of whole rows, on all
/// threads when `work` is worth it.
pub(crate) fn for_rows<A: Send>(
    device: &Device,
    (out, width): (&mut [A], usize),
    work: usize,
    f: impl Fn(usize, &mut [A]) + Send + Sync,
) {
    let rows = out.len().checked_div(width).unwrap_or(0);
    let step = rows_per_task(device, rows, work);
    if step >= rows {
        if rows > 0 && !device.is_dry() {
            f(0, out);
        }
        return;
    }
    let parts = Disjoint::new(out);
    device.for_each(rows.div_ceil(step), work, |task| {
        let (first, count) = (task * step, step.min(rows - task * step));
        // SAFETY: tasks take consecutive runs of rows.
        f(first, unsafe { parts.part(first * width, count * width) });
    });
}

/// As [`for_rows`] for two slices that are cut into as many rows.
pub(crate) fn for_rows2<A: Send, B: Send>(
    device: &Device,
    (a, a_width): (&mut [A], usize),
    (b, b_width): (&mut [B], usize),
    work: usize,
    f: impl Fn(usize, &mut [A], &mut [B]) + Send + Sync,
) {
    let rows = a.len().checked_div(a_width).unwrap_or(0);
    debug_assert_eq!(rows * b_width, b.len());
    let step = rows_per_task(device, rows, work);
    if step >= rows || b_width == 0 {
        if rows > 0 && !device.is_dry() {
            f(0, a, b);
        }
        return;
    }
    let (a, b) = (Disjoint::new(a), Disjoint::new(b));
    device.for_each(rows.div_ceil(step), work, |task| {
        let (first, count) = (task * step, step.min(rows - task * step));
        // SAFETY: tasks take consecutive runs of rows.
        let (a, b) = unsafe {
            (a.part(first * a_width, count * a_width), b.part(first * b_width, count * b_width))
        };
        f(first, a, b);
    });
}

/// Calls `f(element, source element)` for every element of the unique `out`, whose view may have gaps, and the dense
/// `source`, which has as many.
pub(crate) fn for_elements<T: Scalar>(
    out: &mut Tensor,
    source: &[T],
    f: impl Fn(&mut T, &T) + Send + Sync,
) -> Result<()> {
    let (layout, device) = (out.layout().clone(), out.device().clone());
    let (width, stride) = layout.row();
    let out = Disjoint::new(out.buffer_slice_mut::<T>()?);
    let rows = source.len().checked_div(width).unwrap_or(0);
    device.for_each(rows, source.len() / CHEAP, |row| {
        let start = layout.row_offset(row);
        for (j, x) in source[row * width..][..width].iter().enumerate() {
            // SAFETY: a view that may be written shows no element twice.
            let element = unsafe { out.part(start + j * stride, 1) };
            f(&mut element[0], x);
        }
    });
    Ok(())
}

/// `x` itself if a kernel may overwrite it (contiguous, nobody else holds its buffer), else a copy.
pub(crate) fn owned(x: Tensor) -> Result<Tensor> {
    if overwritable(&x) { Ok(x) } else { x.copy() }
}

/// Whether a kernel may overwrite `x`.
pub(crate) fn overwritable(x: &Tensor) -> bool {
    x.is_contiguous() && x.is_unique()
}

/// Elements before, along and behind one dim of a dense tensor.
pub(crate) fn around(dims: &[usize], dim: usize) -> (usize, usize, usize) {
    (dims[..dim].iter().product(), dims[dim], dims[dim + 1..].iter().product())
}
