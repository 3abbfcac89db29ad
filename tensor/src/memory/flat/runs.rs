//! Streams offloaded flat buffers in chunks: prefetch i+1, update i, write back i-1.

use std::ops::Range as Span;

use super::FlatBuffer;
use crate::memory::pool::Category;
use crate::memory::stream_guard::{Transfer, enqueue_copies};
use crate::{Error, Result, StreamGuard, Tensor};

impl FlatBuffer {
    /// Passes the element ranges `runs` of each flat buffer, one range after another, to `f`. `f` gets the range's
    /// number and a vector per buffer that it may write. The buffers have equal lengths and one device. Runs ascend and
    /// do not overlap.
    ///
    /// Offloaded elements are prefetched one run ahead. On a GPU they are copied to device memory while `f` works on
    /// the current run and the previous one is written back. Three runs are in device memory at a time; only the GPU
    /// waits.
    ///
    /// # Errors
    ///
    /// Errors as [`FlatBuffer::with_slice_mut`], if a run begins before the end of the previous one, and if `f` does.
    /// Offloaded elements of earlier runs are then already updated.
    ///
    /// ```
    /// use ferrotron_tensor::{Category, DType, Device, FlatBuffer};
    /// let (device, parts) = (Device::cpu(1)?, [("a".to_string(), vec![5])]);
    /// let flat = || FlatBuffer::new(&device, DType::F32, Category::Optimizer, &parts);
    /// let (mut ones, mut twos) = (flat()?, flat()?);
    /// FlatBuffer::for_each_chunk_mut(&mut [&mut ones, &mut twos], &[0..3, 3..5], |index, tensors| {
    ///     tensors[0].as_mut_slice::<f32>()?.fill(1.0);
    ///     tensors[1].as_mut_slice::<f32>()?.fill(2.0 + index as f32);
    ///     Ok(())
    /// })?;
    /// assert_eq!(twos.slice(..)?.to_vec::<f32>()?, [2.0, 2.0, 2.0, 3.0, 3.0]);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn for_each_chunk_mut(
        flats: &mut [&mut FlatBuffer],
        runs: &[Span<usize>],
        mut f: impl FnMut(usize, &mut [&mut Tensor]) -> Result<()>,
    ) -> Result<()> {
        // A run is fetched before the previous one is written back, so they must not overlap.
        if let Some(pair) = runs.windows(2).find(|pair| pair[1].start < pair[0].end) {
            let message = format!("run {:?} begins before the end of {:?}", pair[1], pair[0]);
            return Err(Error::shape("flat", message));
        }
        if flats.iter().any(|flat| flat.is_offloaded()) {
            return through(flats, runs, &mut f);
        }
        for (index, run) in runs.iter().enumerate() {
            if let Some(next) = runs.get(index + 1) {
                flats.iter().for_each(|flat| flat.prefetch(next.clone()));
            }
            lend(flats, run, Vec::new(), &mut |tensors| f(index, tensors))?;
        }
        Ok(())
    }

    /// Returns whether the elements are offloaded from a GPU: see [`Tensor::is_offloaded`].
    fn is_offloaded(&self) -> bool {
        let mut first = self.buffers.iter().take(1);
        self.device.is_gpu() && first.any(|buffer| self.device.has_in_host_memory(buffer))
    }
}

/// Passes the elements `run` of the flat buffers to `f`, in place.
fn lend(
    flats: &mut [&mut FlatBuffer],
    run: &Span<usize>,
    mut lent: Vec<&mut Tensor>,
    f: &mut dyn FnMut(&mut [&mut Tensor]) -> Result<()>,
) -> Result<()> {
    match flats.split_first_mut() {
        None => f(&mut lent),
        Some((first, rest)) => first.with_slice_mut(run.clone(), |tensor| {
            lend(rest, run, lent.into_iter().chain([tensor]).collect(), f)
        }),
    }
}

/// Passes runs to `f` as copies in device memory.
fn through(
    flats: &mut [&mut FlatBuffer],
    runs: &[Span<usize>],
    f: &mut dyn FnMut(usize, &mut [&mut Tensor]) -> Result<()>,
) -> Result<()> {
    flats.iter_mut().try_for_each(|flat| flat.check_writable())?;
    let mut coming = runs.first().map(|run| prefetch_chunk(flats, run)).transpose()?;
    let mut going = None;
    for (index, run) in runs.iter().enumerate() {
        let here = coming.take();
        coming = runs.get(index + 1).map(|run| prefetch_chunk(flats, run)).transpose()?;
        let mut here = here.map_or(Ok(Vec::new()), StreamGuard::into_inner)?;
        f(index, &mut here.iter_mut().collect::<Vec<_>>())?;
        let before = going.replace(write_back_chunk(flats, run, here)?);
        before.map(StreamGuard::into_inner).transpose()?;
    }
    // After this wait the flat buffers may be used elsewhere or dropped.
    going.map(StreamGuard::into_inner).transpose().map(drop)
}

/// Starts copying elements of flat buffers into device tensors.
fn prefetch_chunk(
    flats: &mut [&mut FlatBuffer],
    run: &Span<usize>,
) -> Result<StreamGuard<Vec<Tensor>>> {
    let resident = |flat: &&mut FlatBuffer| {
        let resident = Tensor::empty(&flat.device, flat.dtype, &[run.len()])?;
        resident.set_category(Category::Workspace);
        Ok(resident)
    };
    let resident = flats.iter().map(resident).collect::<Result<Vec<_>>>()?;
    copy(flats, run, resident, |flat, resident| (resident, flat))
}

/// Starts copying device tensors back into flat buffers.
fn write_back_chunk(
    flats: &mut [&mut FlatBuffer],
    run: &Span<usize>,
    resident: Vec<Tensor>,
) -> Result<StreamGuard<Vec<Tensor>>> {
    copy(flats, run, resident, |flat, resident| (flat, resident))
}

/// Copies between flat buffers and tensors; `way` orders a pair of addresses as (destination, source).
fn copy(
    flats: &mut [&mut FlatBuffer],
    run: &Span<usize>,
    resident: Vec<Tensor>,
    way: impl Fn(u64, u64) -> (u64, u64),
) -> Result<StreamGuard<Vec<Tensor>>> {
    let mut copies = Vec::with_capacity(resident.len());
    for (flat, resident) in flats.iter_mut().zip(&resident) {
        let inside = run.start <= run.end && run.end <= flat.numel();
        let fits = resident.numel() == run.len() && resident.dtype() == flat.dtype;
        if !inside || !fits || !resident.is_contiguous() || *resident.device() != flat.device {
            let message = format!("{resident:?} is not elements {run:?} of {}", flat.numel());
            return Err(Error::shape("flat", message));
        }
        if !resident.is_unique() {
            return Err(Error::memory("flat", format!("{resident:?} has other holders")));
        }
        flat.keep_in_capture();
        let size = flat.dtype.size();
        let (to, from) = way(flat.pointer() as u64 + (run.start * size) as u64, resident.address());
        copies.push(Transfer { to, from, len: run.len() * size });
    }
    let Some(device) = flats.first().map(|flat| flat.device.clone()) else {
        return Err(Error::memory("flat", "there are no flats to update"));
    };
    // SAFETY: the run lies within each flat buffer, whose ranges are contiguous, unique, and borrowed until the last
    // of these events was waited for. Copies execute in the order of one stream. The tensors have no other holder and
    // are held until they are taken back.
    let (until, copied) = unsafe { enqueue_copies(&device, &copies) }?;
    let lent = StreamGuard::new(&device, until, resident);
    copied.map(|()| lent)
}
