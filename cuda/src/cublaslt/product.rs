//! A matrix product as a caller describes it: sizes, types, addresses and the epilogue.

use crate::kernels::ElementType;

/// The storage order of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StorageOrder {
    /// Row-major.
    Rows,
    /// Column-major.
    Columns,
}

/// Matrices in device memory, one per product of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Matrices {
    /// Address of the first element.
    pub address: u64,
    /// Storage order of each matrix.
    pub order: StorageOrder,
    /// Stride in elements between rows or columns.
    pub leading: usize,
    /// Stride in elements between matrices; 0 uses the same matrix in every product.
    pub batch_stride: usize,
}

/// A computation fused with a product. Vectors are contiguous.
#[derive(Debug, Clone, Copy)]
pub enum Epilogue {
    /// Nothing.
    None,
    /// Adds N elements at this address, of the result type, to every row.
    Bias(u64),
    /// Applies GELU, tanh form, to the product plus an optional bias.
    Gelu {
        /// Address of the bias, as in [`Epilogue::Bias`].
        bias: Option<u64>,
        /// Address to which the input of GELU is written, in rows of the result type.
        input: u64,
        /// Stride in elements between these rows: a multiple of 8.
        leading: usize,
    },
    /// Multiplies the product by the derivative of GELU, tanh form, at an input.
    GeluDerivative {
        /// Address of the input, in rows of the result type; nothing is written there.
        input: u64,
        /// Stride in elements between these rows: a multiple of 8.
        leading: usize,
    },
    /// Writes the sum of each row of the left factor to this address: M elements of the result type. They are
    /// overwritten for any beta.
    RowSums(u64),
}

/// out = left right + beta addend for matrices (M, K), (K, N) and (M, N), followed by the epilogue.
///
/// Sums are in f32 (f64 for f64): true f32, never TF32. A 16-bit result is rounded once.
#[derive(Debug, Clone, Copy)]
pub struct Matmul {
    /// Number of products.
    pub batch: usize,
    /// M, N and K; none is 0.
    pub sizes: [usize; 3],
    /// Type of both factors: f64, f32, bf16 or f16.
    pub operands: ElementType,
    /// The same type, or f32 for 16-bit factors.
    pub result: ElementType,
    /// Left factors.
    pub left: Matrices,
    /// Right factors.
    pub right: Matrices,
    /// Results, row-major.
    pub out: Matrices,
    /// Factor of the addends; if it is 0 they are not read.
    pub beta: f64,
    /// The addends, row-major, if they are others than the old results: out is then only written.
    pub addend: Option<Matrices>,
    /// The fused computation; `None` is required for batches of several products.
    pub epilogue: Epilogue,
}

impl Matmul {
    /// Bytes from the first to the last element of the results.
    pub(super) fn out_bytes(&self) -> usize {
        let ([m, n, _], out) = (self.sizes, &self.out);
        let last = (self.batch - 1) * out.batch_stride + (m - 1) * out.leading + n;
        last * self.result.bytes()
    }
}
