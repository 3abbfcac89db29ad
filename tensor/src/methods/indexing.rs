//! Elements and slices at indices, sorted elements, and triangles of matrices. Indices are tensors of integers and have
//! no gradient.

/// Implements the methods of this file for a type.
#[doc(hidden)]
#[macro_export]
#[allow(clippy::crate_in_macro_def)] // the invoking crate's operations
macro_rules! indexing_methods {
    ($Array:ident) => {
        impl $Array {
            /// Elements at `index` along `dim`: `out[i][j] = x[index[i][j]][j]` for dim 0. The result has the dims of
            /// `index`, which has the rank of this array and, except along `dim`, no larger sizes.
            ///
            /// ```
            /// use ferrotron_tensor::{Device, Tensor};
            /// let device = Device::cpu(1)?;
            /// let logits = Tensor::from_slice(&device, &[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3])?;
            /// let targets = Tensor::from_slice(&device, &[2_i64, 0], &[2, 1])?;
            /// assert_eq!(logits.gather(1, &targets)?.to_vec::<f32>()?, [3.0, 4.0]);
            /// # Ok::<(), ferrotron_tensor::Error>(())
            /// ```
            pub fn gather(&self, dim: isize, index: &$crate::Tensor) -> $crate::Result<$Array> {
                crate::ops::index::gather(self, dim, index)
            }

            /// This array with the elements of `source` added at `index`, which has the dims of `source`, along `dim`.
            /// Indices may repeat.
            ///
            /// ```
            /// use ferrotron_tensor::{DType, Device, Tensor};
            /// let device = Device::cpu(1)?;
            /// let index = Tensor::from_slice(&device, &[2_i64, 2, 0], &[3])?;
            /// let source = Tensor::from_slice(&device, &[1.0_f32, 2.0, 4.0], &[3])?;
            /// let sums = Tensor::zeros(&device, DType::F32, &[3])?.scatter_add(0, &index, &source)?;
            /// assert_eq!(sums.to_vec::<f32>()?, [4.0, 0.0, 3.0]);
            /// # Ok::<(), ferrotron_tensor::Error>(())
            /// ```
            pub fn scatter_add(
                &self,
                dim: isize,
                index: &$crate::Tensor,
                source: &$Array,
            ) -> $crate::Result<$Array> {
                crate::ops::index::scatter_add(self.clone(), dim, index, source)
            }

            /// This array with the elements at `index`, which has the dims of `source`, along `dim` replaced by those of
            /// `source`. Of repeated indices the last one counts.
            ///
            /// ```
            /// use ferrotron_tensor::{DType, Device, Tensor};
            /// let device = Device::cpu(1)?;
            /// let index = Tensor::from_slice(&device, &[2_i64, 0], &[2])?;
            /// let source = Tensor::from_slice(&device, &[1.0_f32, 4.0], &[2])?;
            /// let x = Tensor::ones(&device, DType::F32, &[3])?.scatter(0, &index, &source)?;
            /// assert_eq!(x.to_vec::<f32>()?, [4.0, 1.0, 1.0]);
            /// # Ok::<(), ferrotron_tensor::Error>(())
            /// ```
            pub fn scatter(
                &self,
                dim: isize,
                index: &$crate::Tensor,
                source: &$Array,
            ) -> $crate::Result<$Array> {
                crate::ops::index::scatter(self.clone(), dim, index, source)
            }

            /// The slices at the positions `ids`, a list, of `dim`.
            pub fn index_select(&self, dim: isize, ids: &$crate::Tensor) -> $crate::Result<$Array> {
                crate::ops::index::index_select(self, dim, ids)
            }

            /// This array with the slices of `source` along `dim` added at the positions `ids`, a list. Ids may repeat.
            ///
            /// ```
            /// use ferrotron_tensor::{DType, Device, Tensor};
            /// let device = Device::cpu(1)?;
            /// let ids = Tensor::from_slice(&device, &[1_i64, 1], &[2])?;
            /// let rows = Tensor::from_slice(&device, &[1.0_f32, 2.0, 3.0, 4.0], &[2, 2])?;
            /// let sums = Tensor::zeros(&device, DType::F32, &[2, 2])?.index_add(0, &ids, &rows)?;
            /// assert_eq!(sums.to_vec::<f32>()?, [0.0, 0.0, 4.0, 6.0]);
            /// # Ok::<(), ferrotron_tensor::Error>(())
            /// ```
            pub fn index_add(
                &self,
                dim: isize,
                ids: &$crate::Tensor,
                source: &$Array,
            ) -> $crate::Result<$Array> {
                crate::ops::index::index_add(self.clone(), dim, ids, source)
            }

            /// The `k` largest elements along `dim`, in descending order, and their indices (i64). NaN counts as
            /// largest; of equal elements the first comes first.
            ///
            /// Errors if `k` exceeds the dim.
            ///
            /// ```
            /// use ferrotron_tensor::{Device, Tensor};
            /// let x = Tensor::from_slice(&Device::cpu(1)?, &[1.0_f32, 4.0, 2.0, 4.0], &[4])?;
            /// let (values, indices) = x.topk(3, -1)?;
            /// assert_eq!(values.to_vec::<f32>()?, [4.0, 4.0, 2.0]);
            /// assert_eq!(indices.to_vec::<i64>()?, [1, 3, 2]);
            /// # Ok::<(), ferrotron_tensor::Error>(())
            /// ```
            pub fn topk(&self, k: usize, dim: isize) -> $crate::Result<($Array, $crate::Tensor)> {
                let order = $crate::ops::argsort::SortOrder::Descending;
                let indices = $crate::ops::argsort::first("topk", self.as_ref(), dim, order, k)?;
                Ok((self.gather(dim, &indices)?, indices))
            }

            /// The elements in order along `dim`, and their indices (i64). NaN counts as largest; of equal elements the
            /// first comes first.
            pub fn sort(
                &self,
                dim: isize,
                order: $crate::ops::argsort::SortOrder,
            ) -> $crate::Result<($Array, $crate::Tensor)> {
                let indices = self.argsort(dim, order)?;
                Ok((self.gather(dim, &indices)?, indices))
            }

            /// The indices (i64) that sort along `dim`, as [`sort`](Self::sort) does.
            pub fn argsort(
                &self,
                dim: isize,
                order: $crate::ops::argsort::SortOrder,
            ) -> $crate::Result<$crate::Tensor> {
                let at = $crate::methods::dims::resolve_dim("argsort", self.dims(), dim)?;
                $crate::ops::argsort::first("argsort", self.as_ref(), dim, order, self.dims()[at])
            }

            /// The lower triangle of matrices (.., M, N), else 0: elements whose column exceeds their row by at most
            /// `diagonal`.
            ///
            /// ```
            /// use ferrotron_tensor::{DType, Device, Tensor};
            /// let x = Tensor::full(&Device::cpu(1)?, DType::F32, &[2, 2], 1.0)?;
            /// assert_eq!(x.tril(0)?.to_vec::<f32>()?, [1.0, 0.0, 1.0, 1.0]);
            /// assert_eq!(x.triu(1)?.to_vec::<f32>()?, [0.0, 1.0, 0.0, 0.0]);
            /// # Ok::<(), ferrotron_tensor::Error>(())
            /// ```
            pub fn tril(&self, diagonal: isize) -> $crate::Result<$Array> {
                let (rows, columns) =
                    $crate::methods::coordinates("tril", self.as_ref(), diagonal)?;
                self.masked_fill(&columns.gt(&rows)?, 0.0)
            }

            /// The upper triangle of matrices (.., M, N), else 0: elements whose column exceeds their row by at least
            /// `diagonal`.
            pub fn triu(&self, diagonal: isize) -> $crate::Result<$Array> {
                let (rows, columns) =
                    $crate::methods::coordinates("triu", self.as_ref(), diagonal)?;
                self.masked_fill(&columns.lt(&rows)?, 0.0)
            }
        }
    };
}
