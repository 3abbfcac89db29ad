//! Views, and the copies that only rearrange: concatenation, stacks and repetition.

/// Implements the methods of this file for a type.
#[doc(hidden)]
#[macro_export]
#[allow(clippy::crate_in_macro_def)] // the invoking crate's operations
macro_rules! view_methods {
    ($Array:ident) => {
        impl $Array {
            /// The same elements under other dims, in row-major order: a view if strides permit, else a copy.
            ///
            /// Errors if the number of elements differs.
            pub fn reshape(&self, dims: &[usize]) -> $crate::Result<$Array> {
                crate::ops::view::reshape(self, dims)
            }

            /// Exchanges two dims, counted from the end if negative.
            pub fn transpose(&self, a: isize, b: isize) -> $crate::Result<$Array> {
                let resolve =
                    |dim| $crate::methods::dims::resolve_dim("transpose", self.dims(), dim);
                let (a, b) = (resolve(a)?, resolve(b)?);
                let mut order: $crate::Dims = (0..self.dims().len()).collect();
                order.swap(a, b);
                self.permute(&order)
            }

            /// Reorders the dims.
            pub fn permute(&self, order: &[usize]) -> $crate::Result<$Array> {
                crate::ops::view::permute(self, order)
            }

            /// Expands dims of size 1 and adds leading dims (NumPy's rule).
            pub fn broadcast_to(&self, dims: &[usize]) -> $crate::Result<$Array> {
                crate::ops::view::broadcast_to(self, dims)
            }

            /// Elements `start..start + len` of one dim, counted from the end if negative.
            pub fn narrow(&self, dim: isize, start: usize, len: usize) -> $crate::Result<$Array> {
                crate::ops::view::narrow(self, dim, start, len)
            }

            /// Elements of a range of one dim. Dim and bounds are counted from the end if negative, as in Python.
            ///
            /// Errors if the range exceeds the dim.
            ///
            /// ```
            /// use ferrotron_tensor::{Device, Tensor};
            /// let x = Tensor::from_slice(&Device::cpu(1)?, &[1_u8, 2, 3, 4, 5], &[5])?;
            /// assert_eq!(x.slice(0, 1..-1)?.to_vec::<u8>()?, [2, 3, 4]);
            /// assert_eq!(x.slice(0, -2..)?.to_vec::<u8>()?, [4, 5]);
            /// # Ok::<(), ferrotron_tensor::Error>(())
            /// ```
            pub fn slice(
                &self,
                dim: isize,
                range: impl std::ops::RangeBounds<isize>,
            ) -> $crate::Result<$Array> {
                let at = $crate::methods::dims::resolve_dim("slice", self.dims(), dim)?;
                let range = $crate::methods::dims::resolve_range("slice", self.dims()[at], &range)?;
                self.narrow(dim, range.start, range.len())
            }

            /// Position `index` of one dim, which is dropped. Both are counted from the end if negative.
            ///
            /// ```
            /// use ferrotron_tensor::{Device, Tensor};
            /// let x = Tensor::from_slice(&Device::cpu(1)?, &[1_u8, 2, 3, 4], &[2, 2])?;
            /// assert_eq!(x.select(1, -1)?.to_vec::<u8>()?, [2, 4]);
            /// # Ok::<(), ferrotron_tensor::Error>(())
            /// ```
            pub fn select(&self, dim: isize, index: isize) -> $crate::Result<$Array> {
                let at = $crate::methods::dims::resolve_dim("select", self.dims(), dim)?;
                let size = self.dims()[at];
                let range = $crate::methods::dims::resolve_range("select", size, &(index..=index))?;
                let mut dims = self.dims().to_vec();
                dims.remove(at);
                self.narrow(dim, range.start, 1)?.reshape(&dims)
            }

            /// Removes a dim of size 1; a dim of another size stays, as in PyTorch.
            pub fn squeeze(&self, dim: isize) -> $crate::Result<$Array> {
                self.reshape(&$crate::methods::dims::squeezed(self.dims(), dim)?)
            }

            /// Adds a dim of size 1 before dim `dim`; -1 adds it behind the last.
            ///
            /// ```
            /// use ferrotron_tensor::{DType, Device, Tensor};
            /// let x = Tensor::zeros(&Device::cpu(1)?, DType::F32, &[2, 3])?;
            /// assert_eq!(x.unsqueeze(1)?.dims(), [2, 1, 3]);
            /// assert_eq!(x.unsqueeze(-1)?.squeeze(-1)?.dims(), [2, 3]);
            /// # Ok::<(), ferrotron_tensor::Error>(())
            /// ```
            pub fn unsqueeze(&self, dim: isize) -> $crate::Result<$Array> {
                self.reshape(&$crate::methods::dims::unsqueezed("unsqueeze", self.dims(), dim)?)
            }

            /// Merges the dims from `start` to `end`, inclusive: `x.flatten(0, -1)` is a vector.
            pub fn flatten(&self, start: isize, end: isize) -> $crate::Result<$Array> {
                self.reshape(&$crate::methods::dims::flattened(self.dims(), start, end)?)
            }

            /// Splits one dim into consecutive parts of these sizes.
            ///
            /// Errors if the sizes do not add up to the dim.
            ///
            /// ```
            /// use ferrotron_tensor::{Device, Tensor};
            /// let x = Tensor::from_slice(&Device::cpu(1)?, &[1_u8, 2, 3, 4, 5], &[5])?;
            /// let parts = x.split(&[2, 3], 0)?;
            /// assert_eq!(parts[1].to_vec::<u8>()?, [3, 4, 5]);
            /// # Ok::<(), ferrotron_tensor::Error>(())
            /// ```
            pub fn split(&self, sizes: &[usize], dim: isize) -> $crate::Result<Vec<$Array>> {
                crate::ops::view::split(self, sizes, dim)
            }

            /// Splits one dim into parts of equal size; the last may be smaller. As in PyTorch, there may be fewer than
            /// `chunks`: 12 elements in 5 chunks are 4 times 3.
            pub fn chunk(&self, chunks: usize, dim: isize) -> $crate::Result<Vec<$Array>> {
                let at = $crate::methods::dims::resolve_dim("chunk", self.dims(), dim)?;
                self.split(&$crate::methods::dims::chunk_sizes(self.dims()[at], chunks)?, dim)
            }

            /// Concatenates along `dim`; the other dims must be equal.
            pub fn concat(parts: &[&$Array], dim: isize) -> $crate::Result<$Array> {
                crate::ops::concat::concat(parts, dim)
            }

            /// Concatenates along a new dim; all dims must be equal.
            ///
            /// ```
            /// use ferrotron_tensor::{Device, Tensor};
            /// let device = Device::cpu(1)?;
            /// let a = Tensor::from_slice(&device, &[1_u8, 2], &[2])?;
            /// let b = Tensor::from_slice(&device, &[3_u8, 4], &[2])?;
            /// assert_eq!(Tensor::stack(&[&a, &b], 1)?.to_vec::<u8>()?, [1, 3, 2, 4]);
            /// # Ok::<(), ferrotron_tensor::Error>(())
            /// ```
            pub fn stack(parts: &[&$Array], dim: isize) -> $crate::Result<$Array> {
                let rows = parts
                    .iter()
                    .map(|part| {
                        let dims = $crate::methods::dims::unsqueezed("stack", part.dims(), dim)?;
                        part.reshape(&dims)
                    })
                    .collect::<$crate::Result<Vec<_>>>()?;
                Self::concat(&rows.iter().collect::<Vec<_>>(), dim)
            }

            /// Repeats the whole tensor `counts[d]` times along each dim; counts for more dims add leading ones.
            ///
            /// ```
            /// use ferrotron_tensor::{Device, Tensor};
            /// let x = Tensor::from_slice(&Device::cpu(1)?, &[1_u8, 2], &[2])?;
            /// assert_eq!(x.repeat(&[2, 2])?.to_vec::<u8>()?, [1, 2, 1, 2, 1, 2, 1, 2]);
            /// # Ok::<(), ferrotron_tensor::Error>(())
            /// ```
            pub fn repeat(&self, counts: &[usize]) -> $crate::Result<$Array> {
                let [apart, expanded, merged] =
                    $crate::methods::dims::repeated(self.dims(), counts)?;
                self.reshape(&apart)?.broadcast_to(&expanded)?.reshape(&merged)
            }
        }
    };
}
