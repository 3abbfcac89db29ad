//! A flat buffer: many tensors contiguous in one allocation.
//!
//! Weights, gradients and moments are in flat buffers, so the optimizer is one pass and a collective needs no
//! packing. Each range is a [`Buffer`]. A kernel may write a range in place while it is the sole holder, and elements
//! across ranges only while none of them has another holder.

mod runs;

use std::ops::{Bound, Range as Span, RangeBounds};
use std::sync::Arc;

use crate::core::layout::Layout;
use crate::memory::buffer::Buffer;
use crate::memory::pool::Category;
use crate::{DType, Device, Error, MemoryKind, Result, Tensor};

/// Consecutive named ranges of one dtype in one allocation.
pub struct FlatBuffer {
    ranges: Vec<Range>,
    /// The memory of each range: apart from them, since lending moves it.
    buffers: Vec<Arc<Buffer>>,
    dtype: DType,
    device: Device,
}

struct Range {
    name: String,
    /// Offset of its first element in the flat buffer.
    start: usize,
    layout: Layout,
}

impl Range {
    fn end(&self) -> usize {
        self.start + self.layout.numel()
    }
}

impl FlatBuffer {
    /// A zero-filled flat buffer with a range of `dims` for each name.
    ///
    /// ```
    /// use ferrotron_tensor::{Category, DType, Device, FlatBuffer, Tensor};
    /// let device = Device::cpu(1)?;
    /// let parts = [("weight".to_string(), vec![2, 3]), ("bias".to_string(), vec![3])];
    /// let mut flat = FlatBuffer::new(&device, DType::F32, Category::Weights, &parts)?;
    /// let bias = flat.tensor(1)?;
    /// assert_eq!(bias.to_vec::<f32>()?, [0.0; 3]);
    /// let error = flat.with_slice_mut(.., Tensor::zero_fill).unwrap_err(); // `bias` still reads it
    /// assert!(error.to_string().contains("'bias'"));
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn new(
        device: &Device,
        dtype: DType,
        category: Category,
        parts: &[(String, Vec<usize>)],
    ) -> Result<FlatBuffer> {
        Self::new_in(MemoryKind::Device, device, dtype, category, parts)
    }

    /// Like [`FlatBuffer::new`], in one of the device's two kinds of memory.
    pub fn new_in(
        kind: MemoryKind,
        device: &Device,
        dtype: DType,
        category: Category,
        parts: &[(String, Vec<usize>)],
    ) -> Result<FlatBuffer> {
        let mut flat = Self::uninit_in(kind, device, dtype, category, parts)?;
        flat.with_slice_mut(.., Tensor::zero_fill)?;
        Ok(flat)
    }

    /// Like [`FlatBuffer::new`], with unspecified contents.
    pub fn uninit(
        device: &Device,
        dtype: DType,
        category: Category,
        parts: &[(String, Vec<usize>)],
    ) -> Result<FlatBuffer> {
        Self::uninit_in(MemoryKind::Device, device, dtype, category, parts)
    }

    fn uninit_in(
        kind: MemoryKind,
        device: &Device,
        dtype: DType,
        category: Category,
        parts: &[(String, Vec<usize>)],
    ) -> Result<FlatBuffer> {
        let layouts =
            parts.iter().map(|(_, dims)| Layout::contiguous(dims)).collect::<Result<Vec<_>>>()?;
        let lens: Vec<usize> = layouts.iter().map(|layout| layout.numel() * dtype.size()).collect();
        let buffers = Buffer::split(&device.pool_of(kind), &lens, category)?;
        let mut end = 0;
        let ranges = parts
            .iter()
            .zip(layouts)
            .map(|((name, _), layout)| {
                let range = Range { name: name.clone(), start: end, layout };
                end = range.end();
                range
            })
            .collect();
        let buffers = buffers.into_iter().map(Arc::new).collect();
        Ok(FlatBuffer { ranges, buffers, dtype, device: device.clone() })
    }

    /// A flat buffer without ranges or memory.
    pub fn empty(device: &Device, dtype: DType) -> FlatBuffer {
        FlatBuffer { ranges: Vec::new(), buffers: Vec::new(), dtype, device: device.clone() }
    }

    /// Number of ranges.
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Whether there are no ranges.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Number of elements in all ranges.
    pub fn numel(&self) -> usize {
        self.ranges.last().map_or(0, Range::end)
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device of the elements.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The name of a range. Errors if there is no such range.
    pub fn name(&self, range: usize) -> Result<&str> {
        Ok(&self.place(range)?.name)
    }

    /// Offset and number of elements of a range. Errors if there is no such range.
    pub fn range(&self, range: usize) -> Result<(usize, usize)> {
        let range = self.place(range)?;
        Ok((range.start, range.layout.numel()))
    }

    /// A tensor that reads a range. While it lives, the range cannot be written.
    ///
    /// Errors if there is no such range.
    pub fn tensor(&self, range: usize) -> Result<Tensor> {
        let layout = self.place(range)?.layout.clone();
        Ok(Tensor::view_of(self.buffers[range].clone(), layout, self.dtype, &self.device))
    }

    fn place(&self, range: usize) -> Result<&Range> {
        self.ranges.get(range).ok_or_else(|| self.no_range(range))
    }

    fn no_range(&self, range: usize) -> Error {
        let count = self.len();
        Error::memory("flat", format!("asked for range {range} of {count}: its memory is not here"))
    }

    /// Passes a range as a unique tensor to `f`, which may write it.
    ///
    /// # Errors
    ///
    /// Errors, naming the range, if a tensor still reads it. If `f` panics or replaces the tensor it was passed, the
    /// flat buffer is empty afterwards.
    pub fn with_mut<R>(
        &mut self,
        range: usize,
        f: impl FnOnce(&mut Tensor) -> Result<R>,
    ) -> Result<R> {
        if range >= self.len() {
            return Err(self.no_range(range));
        }
        self.check_unique(range..range + 1)?;
        // The tensor takes the range's own `Arc`, so that it is unique. Meanwhile `self` is empty: if `f` panics, nothing
        // refers to the memory that the tensor freed.
        let (ranges, mut buffers) = self.take();
        let last = buffers.len() - 1;
        let buffer = buffers.swap_remove(range);
        let place = (buffer.pointer(), buffer.len());
        let layout = ranges[range].layout.clone();
        let mut tensor = Tensor::view_of(buffer, layout, self.dtype, &self.device);
        let result = f(&mut tensor);
        let buffer = tensor.into_buffer();
        if (buffer.pointer(), buffer.len()) != place {
            return Err(replaced());
        }
        buffers.push(buffer);
        buffers.swap(range, last); // Restores the order: the range at its index, the former last range at the end.
        (self.ranges, self.buffers) = (ranges, buffers);
        result
    }

    /// Moves out all ranges and their memory.
    fn take(&mut self) -> (Vec<Range>, Vec<Arc<Buffer>>) {
        (std::mem::take(&mut self.ranges), std::mem::take(&mut self.buffers))
    }

    /// Starts reading these elements if they are in a mapped file, because they will be used soon.
    pub fn prefetch(&self, elements: Span<usize>) {
        if let Some(first) = self.buffers.first() {
            let size = self.dtype.size();
            first.prefetch(elements.start * size, elements.len() * size);
        }
    }

    /// A vector that reads a range of elements, across named ranges. While it lives, none of these ranges can be
    /// written.
    ///
    /// Errors if the buffer has fewer elements.
    ///
    /// ```
    /// use ferrotron_tensor::{Category, DType, Device, FlatBuffer};
    /// let parts = [("a".to_string(), vec![2]), ("b".to_string(), vec![2, 2])];
    /// let mut flat = FlatBuffer::new(&Device::cpu(1)?, DType::F32, Category::Weights, &parts)?;
    /// flat.with_slice_mut(1..4, |x| {
    ///     x.as_mut_slice::<f32>()?.copy_from_slice(&[1.0, 2.0, 3.0]);
    ///     Ok(())
    /// })?;
    /// assert_eq!(flat.tensor(1)?.to_vec::<f32>()?, [2.0, 3.0, 0.0, 0.0]);
    /// assert_eq!(flat.slice(..3)?.to_vec::<f32>()?, [0.0, 1.0, 2.0]);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn slice(&self, elements: impl RangeBounds<usize>) -> Result<Tensor> {
        let elements = self.resolve(elements)?;
        let (ranges, first) = self.over(&elements);
        self.vector(self.buffers[ranges].to_vec(), elements.start - first, elements.len())
    }

    /// Passes a range of elements, across named ranges, as a vector to `f`, which may write it.
    ///
    /// # Errors
    ///
    /// Errors if the buffer has fewer elements. Errors, naming the range, if a tensor still reads one of the ranges.
    /// If `f` panics or replaces the tensor it was passed, the flat buffer is empty afterwards.
    pub fn with_slice_mut<R>(
        &mut self,
        elements: impl RangeBounds<usize>,
        f: impl FnOnce(&mut Tensor) -> Result<R>,
    ) -> Result<R> {
        let elements = self.resolve(elements)?;
        let (over, first) = self.over(&elements);
        self.check_unique(over.clone())?;
        // As in `with_mut`: the tensor takes the ranges' own buffers. They are swapped to the end and back, so the cost
        // does not depend on the number of other ranges.
        let (ranges, mut buffers) = self.take();
        let at_end = buffers.len() - over.len()..buffers.len();
        let swaps = over.zip(at_end.clone());
        swaps.clone().rev().for_each(|(place, at_end)| buffers.swap(place, at_end));
        let parts = buffers.split_off(at_end.start);
        let lent = places(&parts);
        let mut tensor = self.vector(parts, elements.start - first, elements.len())?;
        let result = f(&mut tensor);
        let buffer = tensor.into_buffer();
        if places(buffer.parts()) != lent {
            return Err(replaced());
        }
        // A clone that `f` kept also holds the ranges; they then cannot be written.
        buffers.extend_from_slice(buffer.parts());
        swaps.for_each(|(place, at_end)| buffers.swap(place, at_end));
        (self.ranges, self.buffers) = (ranges, buffers);
        result
    }

    /// The bytes of all elements, in host memory.
    ///
    /// Errors, naming the range, if a tensor still reads one, and if the elements are in GPU memory.
    pub fn host_bytes_mut(&mut self) -> Result<&mut [u8]> {
        self.check_writable()?;
        if self.device.gpu().is_some() {
            let message = format!("the elements are in memory of {:?}", self.device);
            return Err(Error::device("flat", message));
        }
        let (pointer, len) = (self.pointer(), self.numel() * self.dtype.size());
        // SAFETY: the ranges are consecutive in one allocation of initialised bytes. Every range's `Arc` has just
        // been found unique and `self` is borrowed mutably, so there is no other reference to these bytes.
        Ok(unsafe { std::slice::from_raw_parts_mut(pointer, len) })
    }

    /// Errors, naming the range, if a tensor still reads one.
    pub fn check_writable(&mut self) -> Result<()> {
        self.check_unique(0..self.ranges.len())
    }

    /// Keeps the allocation for the capture in progress, whose work contains its address.
    pub(crate) fn keep_in_capture(&self) {
        if let (Some(capture), Some(buffer)) = (self.device.capture(), self.buffers.first()) {
            capture.uses(buffer.allocation());
        }
    }

    pub(crate) fn pointer(&self) -> *mut u8 {
        let first = self.buffers.first();
        first.map_or(std::ptr::dangling_mut::<u64>().cast(), |buffer| buffer.pointer())
    }

    /// A vector of `len` elements from `start` on over the buffers of consecutive ranges.
    fn vector(&self, parts: Vec<Arc<Buffer>>, start: usize, len: usize) -> Result<Tensor> {
        if parts.is_empty() {
            return Tensor::empty(&self.device, self.dtype, &[0]);
        }
        let size = self.dtype.size();
        let buffer = Arc::new(Buffer::span(parts, start * size, len * size)?);
        Ok(Tensor::view_of(buffer, Layout::vector(len), self.dtype, &self.device))
    }

    /// The requested elements as a half-open range. Errors if they are out of bounds.
    fn resolve(&self, elements: impl RangeBounds<usize>) -> Result<Span<usize>> {
        let start = match elements.start_bound() {
            Bound::Included(&start) => Some(start),
            Bound::Excluded(&before) => before.checked_add(1),
            Bound::Unbounded => Some(0),
        };
        let end = match elements.end_bound() {
            Bound::Included(&last) => last.checked_add(1),
            Bound::Excluded(&end) => Some(end),
            Bound::Unbounded => Some(self.numel()),
        };
        match (start, end) {
            (Some(start), Some(end)) if start <= end && end <= self.numel() => Ok(start..end),
            _ => {
                let (asked, numel) = ((elements.start_bound(), elements.end_bound()), self.numel());
                Err(Error::shape("flat", format!("asked for elements {asked:?} of {numel}")))
            }
        }
    }

    /// The ranges that contain these elements, and the first element of the first of them; empty for no elements.
    fn over(&self, elements: &Span<usize>) -> (Span<usize>, usize) {
        if elements.is_empty() {
            return (0..0, elements.start);
        }
        let before = self.ranges.partition_point(|range| range.end() <= elements.start);
        let end = self.ranges.partition_point(|range| range.start < elements.end);
        (before..end, self.ranges[before].start)
    }

    /// Errors unless the ranges have no other holder. Unlike reading the count, `Arc::get_mut` orders reads by former
    /// holders on other threads before the following writes.
    fn check_unique(&mut self, ranges: Span<usize>) -> Result<()> {
        for (range, buffer) in self.ranges[ranges.clone()].iter().zip(&mut self.buffers[ranges]) {
            let holders = Arc::strong_count(buffer);
            if Arc::get_mut(buffer).is_none() {
                return Err(Error::memory(
                    "flat",
                    format!(
                        "'{}' cannot be written while {} other tensors read it (a graph that was not walked, or a kept clone)",
                        range.name,
                        holders - 1
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// Addresses and lengths of buffers.
fn places(buffers: &[Arc<Buffer>]) -> Vec<(*mut u8, usize)> {
    buffers.iter().map(|buffer| (buffer.pointer(), buffer.len())).collect()
}

fn replaced() -> Error {
    Error::memory("flat", "what was lent was replaced instead of written; the flat is now empty")
}

#[cfg(test)]
mod tests;
