//! Many tensors laid end to end in one allocation.
//!
//! Weights, gradients and moments live in flats, so that the optimizer is one pass over one slice and
//! a collective needs no packing. Each range is a buffer of its own: a kernel may write one range in
//! place while it is the only holder, and the whole only while nobody holds any.

use std::sync::Arc;

use crate::buffer::Buffer;
use crate::layout::{Dims, Layout};
use crate::pool::Category;
use crate::{DType, Device, Error, Result, Scalar, Tensor};

/// Consecutive named ranges of one dtype.
pub struct Flat {
    ranges: Vec<Range>,
    dtype: DType,
    device: Device,
}

struct Range {
    name: String,
    dims: Dims,
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
    /// let bias = flat.tensor(1);
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
        let lens: Vec<usize> =
            parts.iter().map(|(_, dims)| dims.iter().product::<usize>() * dtype.size()).collect();
        let buffers = Buffer::split(device.pool(), &lens, category)?;
        let ranges = parts
            .iter()
            .zip(buffers)
            .map(|((name, dims), buffer)| Range {
                name: name.clone(),
                dims: dims.as_slice().into(),
                buffer: Arc::new(buffer),
            })
            .collect();
        let mut flat = Flat { ranges, dtype, device: device.clone() };
        crate::dispatch_any!(dtype, T => flat.whole_mut::<T>()?.fill(bytemuck::Zeroable::zeroed()));
        Ok(flat)
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
    pub fn tensor(&self, range: usize) -> Tensor {
        let Range { dims, buffer, .. } = &self.ranges[range];
        Tensor::view_of(buffer.clone(), Layout::contiguous(dims), self.dtype, &self.device)
    }

    /// Lends a range as a unique tensor to `f`, which may write it.
    ///
    /// Errors, naming the range, if a tensor still reads it.
    pub fn update<R>(
        &mut self,
        range: usize,
        f: impl FnOnce(&mut Tensor) -> Result<R>,
    ) -> Result<R> {
        self.check_unique(range..range + 1)?;
        // The tensor takes the range's own `Arc`, so that it is unique; an empty range stands in.
        let empty = Arc::new(Buffer::new(self.device.pool(), 0, Category::Workspace)?);
        let entry = &mut self.ranges[range];
        let buffer = std::mem::replace(&mut entry.buffer, empty);
        let id = Arc::as_ptr(&buffer);
        let mut tensor =
            Tensor::view_of(buffer, Layout::contiguous(&entry.dims), self.dtype, &self.device);
        let result = f(&mut tensor);
        let buffer = tensor.into_buffer();
        if Arc::as_ptr(&buffer) != id {
            // The range's memory is gone with the tensor that was lent: nothing may reach it from here.
            self.ranges.clear();
            return Err(Error::memory(
                "flat",
                "a range was replaced instead of written; the flat is now empty",
            ));
        }
        self.ranges[range].buffer = buffer;
        result
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
        // SAFETY: as in `whole`; every range's `Arc` is unique and `self` is borrowed mutably, so nobody
        // else can reach an element.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.pointer().cast::<T>(), self.numel()) })
    }

    fn pointer(&self) -> *mut u8 {
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

    fn check_unique(&self, ranges: std::ops::Range<usize>) -> Result<()> {
        match self.ranges[ranges].iter().find(|range| Arc::strong_count(&range.buffer) > 1) {
            None => Ok(()),
            Some(range) => Err(Error::memory(
                "flat",
                format!(
                    "'{}' cannot be written while {} other tensors read it (a graph that was not walked, or a kept clone)",
                    range.name,
                    Arc::strong_count(&range.buffer) - 1
                ),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let held = flat.tensor(0);
        assert!(
            flat.update(0, |_| Ok(())).unwrap_err().to_string().contains("'a' cannot be written")
        );
        drop(held);
        assert!(flat.whole_mut::<f64>().is_ok());
        Ok(())
    }
}
