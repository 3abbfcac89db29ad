//! Many tensors laid end to end in one allocation.
//!
//! Weights, gradients and moments live in flats, so that the optimizer is one pass over one slice and
//! a collective needs no packing. Each range is a buffer of its own: a kernel may write one range in
//! place while it is the only holder, and the whole only while nobody holds any.

use std::sync::Arc;

use crate::buffer::Buffer;
use crate::layout::Layout;
use crate::pool::Category;
use crate::{DType, Device, Error, MemoryKind, Result, Scalar, Tensor};

/// Consecutive named ranges of one dtype.
pub struct Flat {
    ranges: Vec<Range>,
    dtype: DType,
    device: Device,
}

struct Range {
    name: String,
    layout: Layout,
    buffer: Arc<Buffer>,
}

impl Flat {
    /// A flat of zeros with a range of `dims` for each name.
    ///
    /// ```
    /// use ferrotron_tensor::{Category, DType, Device, Flat};
    /// let device = Device::cpu(1)?;
    /// let parts = [("weight".to_string(), vec![2, 3]), ("bias".to_string(), vec![3])];
    /// let mut flat = Flat::new(&device, DType::F32, Category::Weights, &parts)?;
    /// flat.whole_mut::<f32>()?[6] = 1.0;
    /// let bias = flat.tensor(1)?;
    /// assert_eq!(bias.to_vec::<f32>()?, [1.0, 0.0, 0.0]);
    /// let error = flat.whole_mut::<f32>().unwrap_err(); // `bias` still reads it
    /// assert!(error.to_string().contains("'bias'"));
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn new(
        device: &Device,
        dtype: DType,
        category: Category,
        parts: &[(String, Vec<usize>)],
    ) -> Result<Flat> {
        Self::new_in(MemoryKind::Device, device, dtype, category, parts)
    }

    /// As [`Flat::new`], in one of the device's two kinds of memory.
    pub fn new_in(
        kind: MemoryKind,
        device: &Device,
        dtype: DType,
        category: Category,
        parts: &[(String, Vec<usize>)],
    ) -> Result<Flat> {
        let mut flat = Self::empty_in(kind, device, dtype, category, parts)?;
        crate::dispatch_any!(dtype, T => {
            let zeros = |_, part: &mut [T]| part.fill(bytemuck::Zeroable::zeroed());
            device.for_each_rows(flat.whole_mut::<T>()?, 1, zeros);
        });
        Ok(flat)
    }

    /// As [`Flat::new`], with unspecified contents.
    pub fn empty(
        device: &Device,
        dtype: DType,
        category: Category,
        parts: &[(String, Vec<usize>)],
    ) -> Result<Flat> {
        Self::empty_in(MemoryKind::Device, device, dtype, category, parts)
    }

    fn empty_in(
        kind: MemoryKind,
        device: &Device,
        dtype: DType,
        category: Category,
        parts: &[(String, Vec<usize>)],
    ) -> Result<Flat> {
        let layouts =
            parts.iter().map(|(_, dims)| Layout::contiguous(dims)).collect::<Result<Vec<_>>>()?;
        let lens: Vec<usize> = layouts.iter().map(|layout| layout.numel() * dtype.size()).collect();
        let buffers = Buffer::split(device.pool_of(kind), &lens, category)?;
        let ranges = parts
            .iter()
            .zip(layouts)
            .zip(buffers)
            .map(|(((name, _), layout), buffer)| Range {
                name: name.clone(),
                layout,
                buffer: Arc::new(buffer),
            })
            .collect();
        Ok(Flat { ranges, dtype, device: device.clone() })
    }

    /// A flat without ranges and without memory.
    pub fn none(device: &Device, dtype: DType) -> Flat {
        Flat { ranges: Vec::new(), dtype, device: device.clone() }
    }

    /// Number of ranges.
    pub fn n_ranges(&self) -> usize {
        self.ranges.len()
    }

    /// Number of elements of all ranges.
    pub fn numel(&self) -> usize {
        self.ranges.iter().map(|range| range.buffer.len()).sum::<usize>() / self.dtype.size()
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the elements are.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The name of a range.
    pub fn name(&self, range: usize) -> &str {
        &self.ranges[range].name
    }

    /// First element and number of elements of a range within the whole.
    pub fn span(&self, range: usize) -> (usize, usize) {
        let elements = |range: &Range| range.buffer.len() / self.dtype.size();
        (self.ranges[..range].iter().map(elements).sum(), elements(&self.ranges[range]))
    }

    /// A tensor that reads a range; while it lives, the range cannot be written.
    ///
    /// Errors if there is no such range.
    pub fn tensor(&self, range: usize) -> Result<Tensor> {
        let Range { layout, buffer, .. } =
            self.ranges.get(range).ok_or_else(|| self.no_range(range))?;
        Ok(Tensor::view_of(buffer.clone(), layout.clone(), self.dtype, &self.device))
    }

    fn no_range(&self, range: usize) -> Error {
        let count = self.n_ranges();
        Error::memory("flat", format!("asked for range {range} of {count}: its memory is not here"))
    }

    /// Lends a range as a unique tensor to `f`, which may write it.
    ///
    /// Errors, naming the range, if a tensor still reads it. If `f` panics, or puts another tensor in the
    /// place of the one it was lent, the flat is empty from then on.
    pub fn update<R>(
        &mut self,
        range: usize,
        f: impl FnOnce(&mut Tensor) -> Result<R>,
    ) -> Result<R> {
        if range >= self.n_ranges() {
            return Err(self.no_range(range));
        }
        self.check_unique(range..range + 1)?;
        // The tensor takes the range's own `Arc`, so that it is unique. Meanwhile the flat has no ranges:
        // should `f` panic, nothing reaches the memory that went with the tensor.
        let mut ranges = std::mem::take(&mut self.ranges);
        let Range { name, layout, buffer } = ranges.swap_remove(range);
        let place = (buffer.pointer(), buffer.len());
        let mut tensor = Tensor::view_of(buffer, layout.clone(), self.dtype, &self.device);
        let result = f(&mut tensor);
        let buffer = tensor.into_buffer();
        if (buffer.pointer(), buffer.len()) != place {
            return Err(Error::memory(
                "flat",
                "a range was replaced instead of written; the flat is now empty",
            ));
        }
        ranges.push(Range { name, layout, buffer });
        let last = ranges.len() - 1;
        ranges.swap(range, last); // where it was, and the former last one at the end again
        self.ranges = ranges;
        result
    }

    /// Begins to read these elements if the flat is in host memory, since they are going to be used soon.
    pub fn prefetch(&self, elements: std::ops::Range<usize>) {
        if let Some(first) = self.ranges.first() {
            let size = self.dtype.size();
            first.buffer.prefetch(elements.start * size, elements.len() * size);
        }
    }

    /// All elements, for reading.
    pub fn whole<T: Scalar>(&self) -> Result<&[T]> {
        self.check_dtype::<T>()?;
        // SAFETY: the ranges are consecutive parts of one allocation, so `numel` initialised elements of
        // the plain type T follow the first; writers need `&mut self` or the unique `Arc` of a range,
        // which `update` takes through `&mut self`.
        Ok(unsafe { std::slice::from_raw_parts(self.pointer().cast::<T>(), self.numel()) })
    }

    /// All elements, for writing.
    ///
    /// Errors, naming the range, if a tensor still reads one.
    pub fn whole_mut<T: Scalar>(&mut self) -> Result<&mut [T]> {
        self.check_dtype::<T>()?;
        self.check_unique(0..self.ranges.len())?;
        // SAFETY: as in `whole`; every range's `Arc` has just been found unique and `self` is borrowed
        // mutably, so nobody else can reach an element.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.pointer().cast::<T>(), self.numel()) })
    }

    pub(crate) fn pointer(&self) -> *mut u8 {
        self.ranges
            .first()
            .map_or(std::ptr::dangling_mut::<u64>().cast(), |range| range.buffer.pointer())
    }

    fn check_dtype<T: Scalar>(&self) -> Result<()> {
        if T::DTYPE != self.dtype {
            return Err(Error::dtype(
                "flat",
                format!("the flat is {}, asked for {}", self.dtype, T::DTYPE),
            ));
        }
        Ok(())
    }

    /// Errors unless nobody else holds the ranges. `Arc::get_mut`, unlike a look at the count, also makes
    /// the reads of those who held one on other threads happen before the writes that follow.
    pub(crate) fn check_unique(&mut self, ranges: std::ops::Range<usize>) -> Result<()> {
        for range in &mut self.ranges[ranges] {
            let holders = Arc::strong_count(&range.buffer);
            if Arc::get_mut(&mut range.buffer).is_none() {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn ranges_are_written_in_place_and_lie_end_to_end() -> Result<()> {
        let device = Device::cpu(1)?;
        let parts = [
            ("a".to_string(), vec![2]),
            ("empty".to_string(), vec![0]),
            ("b".to_string(), vec![1, 3]),
        ];
        let mut flat = Flat::new(&device, DType::F64, Category::Gradients, &parts)?;
        assert_eq!(device.memory().of(Category::Gradients), 40);
        let pointer = flat.pointer();
        flat.update(2, |b| {
            b.as_mut_slice::<f64>()?.copy_from_slice(&[1.0, 2.0, 3.0]);
            Ok(())
        })?;
        assert_eq!(flat.pointer(), pointer);
        assert_eq!(flat.whole::<f64>()?, [0.0, 0.0, 1.0, 2.0, 3.0]);
        assert_eq!((flat.span(0), flat.span(1), flat.span(2)), ((0, 2), (2, 0), (2, 3)));
        assert_eq!(device.memory().current, 40);
        let held = flat.tensor(0)?;
        assert!(
            flat.update(0, |_| Ok(())).unwrap_err().to_string().contains("'a' cannot be written")
        );
        drop(held);
        assert!(flat.whole_mut::<f64>().is_ok());
        Ok(())
    }

    fn two(device: &Device) -> Result<Flat> {
        let parts = [("a".to_string(), vec![2]), ("b".to_string(), vec![3])];
        Flat::new(device, DType::F32, Category::Weights, &parts)
    }

    #[test]
    fn a_panic_in_an_update_empties_the_flat() -> Result<()> {
        let device = Device::cpu(1)?;
        let mut flat = two(&device)?;
        let update = || flat.update(0, |_| -> Result<()> { panic!("on purpose") });
        assert!(catch_unwind(AssertUnwindSafe(update)).is_err());
        assert_eq!((flat.n_ranges(), flat.numel()), (0, 0));
        assert!(flat.whole::<f32>()?.is_empty() && flat.whole_mut::<f32>()?.is_empty());
        assert_eq!(device.memory().current, 0);
        Ok(())
    }

    #[test]
    fn a_replaced_range_empties_the_flat() -> Result<()> {
        let device = Device::cpu(1)?;
        let mut flat = two(&device)?;
        let error = flat.update(1, |tensor| {
            // The lent tensor goes first, so that the new one may get its place among the allocations.
            *tensor = Tensor::zeros(&device, DType::F32, &[1])?;
            *tensor = Tensor::zeros(&device, DType::F32, &[3])?;
            Ok(())
        });
        assert!(error.unwrap_err().to_string().contains("replaced instead of written"));
        assert!(flat.whole::<f32>()?.is_empty());
        let huge = [("a".to_string(), vec![1 << 59]), ("b".to_string(), vec![1 << 59])];
        assert!(Flat::new(&device, DType::F64, Category::Weights, &huge).is_err());
        Ok(())
    }
}
