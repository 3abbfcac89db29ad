//! Views: the same elements under other dims. Views do not copy unless stated.

use crate::core::layout::{Layout, count};
use crate::{Error, Result, Tensor};

/// The same elements under other dims, in row-major order: a view if strides permit, else a copy.
pub(crate) fn reshape(x: &Tensor, dims: &[usize]) -> Result<Tensor> {
    if count("reshape", dims)? != x.numel() {
        return Err(Error::shape("reshape", format!("{:?} does not become {dims:?}", x.dims())));
    }
    match x.layout().reshape(dims) {
        Some(layout) => Ok(x.with_layout(layout)),
        None => {
            let dense = x.contiguous()?;
            let layout = Layout::contiguous(dims)?;
            Ok(dense.with_layout(layout))
        }
    }
}

/// Reorders the dims.
pub(crate) fn permute(x: &Tensor, order: &[usize]) -> Result<Tensor> {
    Ok(x.with_layout(x.layout().permute(order)?))
}

/// Elements `start..start + len` of one dim, counted from the end if negative.
pub(crate) fn narrow(x: &Tensor, dim: isize, start: usize, len: usize) -> Result<Tensor> {
    let dim = x.resolve("narrow", dim)?;
    Ok(x.with_layout(x.layout().narrow(dim, start, len)?))
}

/// Expands dims of size 1 and adds leading dims (NumPy's rule).
pub(crate) fn broadcast_to(x: &Tensor, dims: &[usize]) -> Result<Tensor> {
    Ok(x.with_layout(x.layout().broadcast_to(dims)?))
}

/// Splits one dim into consecutive parts of these sizes.
pub(crate) fn split(x: &Tensor, sizes: &[usize], dim: isize) -> Result<Vec<Tensor>> {
    let resolved = x.resolve("split", dim)?;
    let sum = sizes.iter().try_fold(0_usize, |sum, &size| sum.checked_add(size));
    if sum != Some(x.dims()[resolved]) {
        return Err(Error::shape(
            "split",
            format!("parts {sizes:?} do not add up to dim {dim} of {:?}", x.dims()),
        ));
    }
    let mut start = 0;
    sizes
        .iter()
        .map(|&len| {
            let part = x.narrow(dim, start, len);
            start += len;
            part
        })
        .collect()
}

impl Tensor {
    /// Passes this tensor to `f` under other dims, for writing.
    ///
    /// Errors if the number of elements differs or strides do not permit a view.
    pub fn reshape_mut<R>(
        &mut self,
        dims: &[usize],
        f: impl FnOnce(&mut Tensor) -> Result<R>,
    ) -> Result<R> {
        let layout = self.layout().reshape(dims).ok_or_else(|| {
            Error::shape(
                "reshape",
                format!("{:?} does not become {dims:?} without a copy", self.dims()),
            )
        })?;
        self.with_layout_mut(layout, f)
    }

    /// Passes a range of one dim to `f`, for writing.
    pub fn narrow_mut<R>(
        &mut self,
        dim: isize,
        start: usize,
        len: usize,
        f: impl FnOnce(&mut Tensor) -> Result<R>,
    ) -> Result<R> {
        let layout = self.layout().narrow(self.resolve("narrow", dim)?, start, len)?;
        self.with_layout_mut(layout, f)
    }

    /// All elements of the buffer behind the view, as a vector.
    pub fn whole_buffer(&self) -> Tensor {
        let elements = self.buffer_bytes() / self.dtype().size();
        self.with_layout(Layout::vector(elements))
    }

    /// The buffer behind the view under another layout. With [`Tensor::whole_buffer`] it recreates a view over a copy
    /// of the buffer.
    ///
    /// Errors if the layout exceeds the buffer.
    ///
    /// ```
    /// use ferrotron_tensor::{Device, Tensor};
    /// let x = Tensor::from_slice(&Device::cpu(1)?, &[1.0_f32, 2.0, 3.0, 4.0], &[2, 2])?;
    /// let column = x.narrow(1, 1, 1)?;
    /// let doubled = column.whole_buffer().mul_scalar(2.0)?;
    /// assert_eq!(doubled.as_strided(column.layout())?.to_vec::<f32>()?, [4.0, 8.0]);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn as_strided(&self, layout: &Layout) -> Result<Tensor> {
        let elements = self.buffer_bytes() / self.dtype().size();
        if layout.end() > elements {
            let message = format!("{layout:?} reaches beyond a buffer of {elements} elements");
            return Err(Error::shape("as_strided", message));
        }
        Ok(self.with_layout(layout.clone()))
    }

    /// Merges all dims but the last: (rows, width). Copies only if strides do not permit a view.
    pub fn as_matrix(&self) -> Result<Tensor> {
        let width = self.dims().last().copied().unwrap_or(1);
        let rows =
            if self.rank() == 0 { 1 } else { self.dims()[..self.rank() - 1].iter().product() };
        self.reshape(&[rows, width])
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::matmul::{Accum, matmul_into};
    use crate::ops::pointwise::add_assign;
    use crate::{DType, Device, ErrorKind, Result, Tensor};

    #[test]
    fn views_show_the_elements_in_row_major_order() -> Result<()> {
        let device = Device::cpu(1)?;
        let x = Tensor::from_slice(&device, &(0..24).collect::<Vec<u32>>(), &[2, 3, 4])?;
        let y = x.transpose(0, 2)?.narrow(1, 1, 2)?;
        assert_eq!(y.dims(), [4, 2, 2]);
        assert_eq!(y.to_vec::<u32>()?, [4, 16, 8, 20, 5, 17, 9, 21, 6, 18, 10, 22, 7, 19, 11, 23]);
        assert_eq!(y.reshape(&[16])?.to_vec::<u32>()?, y.to_vec::<u32>()?);
        let parts = x.split(&[1, 3], -1)?;
        assert_eq!(parts[0].to_vec::<u32>()?, [0, 4, 8, 12, 16, 20]);
        let b = x.narrow(0, 0, 1)?.narrow(2, 0, 1)?.broadcast_to(&[2, 3, 2])?;
        assert_eq!(b.to_vec::<u32>()?, [0, 0, 4, 4, 8, 8, 0, 0, 4, 4, 8, 8]);
        Ok(())
    }

    #[test]
    fn errors_name_the_op_and_the_dims() -> Result<()> {
        let x = Tensor::from_slice(&Device::cpu(1)?, &[0.0_f32; 6], &[2, 3])?;
        let message = |r: Result<Tensor>| r.unwrap_err().to_string();
        assert_eq!(message(x.reshape(&[4])), "reshape: [2, 3] does not become [4]");
        assert_eq!(message(x.narrow(1, 2, 2)), "narrow: 2..4 of dim 1 is outside of [2, 3]");
        assert_eq!(message(x.transpose(0, 2)), "transpose: there is no dim 2 in [2, 3]");
        assert_eq!(
            message(x.permute(&[0, 0])),
            "permute: [0, 0] is no order of the dims of [2, 3]"
        );
        assert_eq!(
            x.split(&[1, 2], 0).unwrap_err().to_string(),
            "split: parts [1, 2] do not add up to dim 0 of [2, 3]"
        );
        Ok(())
    }

    #[test]
    fn sizes_that_overflow_are_errors() -> Result<()> {
        let device = Device::cpu(1)?;
        let x = Tensor::from_slice(&device, &[1.0_f32; 2], &[2])?;
        let empty = Tensor::zeros(&device, DType::F32, &[0])?;
        assert!(x.narrow(0, usize::MAX, 2).is_err());
        assert!(x.split(&[usize::MAX, 3], 0).is_err());
        assert!(empty.reshape(&[1 << 63, 2]).is_err());
        assert!(x.narrow(0, 0, 1)?.broadcast_to(&[1 << 32, 1 << 32]).is_err());
        assert!(Tensor::empty(&device, DType::F64, &[1 << 61]).is_err());
        assert!(Tensor::from_slice::<f32>(&device, &[], &[1 << 63, 2]).is_err());
        // Few enough elements to be addressed, but more than the system provides.
        let error = Tensor::empty(&device, DType::F64, &[1 << 59]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Memory);
        Ok(())
    }

    #[test]
    fn broadcast_views_are_not_written_through() -> Result<()> {
        let device = Device::cpu(2)?;
        let ones = Tensor::full(&device, DType::F32, &[4, 4], 1.0)?;
        let mut stretched = Tensor::zeros(&device, DType::F32, &[1, 4])?.broadcast_to(&[4, 4])?;
        assert!(stretched.is_unique());
        let refused = "as_mut_slice: the elements of the broadcast view [4, 4] overlap";
        assert_eq!(stretched.copy_from(&ones).unwrap_err().to_string(), refused);
        assert_eq!(add_assign(&mut stretched, &ones).unwrap_err().to_string(), refused);
        let product = matmul_into(&mut stretched, Accum::Replace, &ones, &ones);
        assert_eq!(product.unwrap_err().to_string(), refused);
        assert!(
            stretched.reshape_mut(&[2, 2, 4], |x| x.copy_from(&ones.reshape(&[2, 2, 4])?)).is_err()
        );
        assert!(stretched.narrow_mut(0, 1, 2, |x| x.copy_from(&ones.narrow(0, 0, 2)?)).is_err());
        // A single row of it does not overlap.
        stretched.narrow_mut(0, 1, 1, |x| x.copy_from(&ones.narrow(0, 0, 1)?))?;
        assert_eq!(stretched.to_f64()?, [1.0; 16]);
        Ok(())
    }

    #[test]
    fn a_lent_view_that_is_replaced_is_an_error() -> Result<()> {
        let device = Device::cpu(1)?;
        let mut x = Tensor::zeros(&device, DType::F32, &[100, 100])?;
        let replaced = x.narrow_mut(0, 0, 1, |part| {
            *part = Tensor::zeros(&device, DType::F32, &[1])?;
            Ok(())
        });
        let message = replaced.unwrap_err().to_string();
        assert_eq!(message, "view: a lent view was replaced instead of written");
        assert_eq!(x.dims(), [1]);
        Ok(())
    }
}
