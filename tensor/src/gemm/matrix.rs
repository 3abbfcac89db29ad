//! Matrices in memory, as a product reads and writes them.

/// The treatment of the values that a destination holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accum {
    /// Overwrites them, and never reads them.
    Replace,
    /// The result is added to them.
    Add,
}

/// A matrix to read: element (i, j) is at `data + i * row_stride + j * col_stride`, in elements.
#[derive(Debug)]
pub struct MatRef<T> {
    /// Element (0, 0).
    pub data: *const T,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// Elements from one row to the next.
    pub row_stride: isize,
    /// Elements from one column to the next.
    pub col_stride: isize,
}

/// A matrix to write: element (i, j) is at `data + i * row_stride + j * col_stride`, in elements.
#[derive(Debug)]
pub struct MatMut<T> {
    /// Element (0, 0).
    pub data: *mut T,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// Elements from one row to the next.
    pub row_stride: isize,
    /// Elements from one column to the next.
    pub col_stride: isize,
}

impl<T> Clone for MatRef<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for MatRef<T> {}

// SAFETY: a description of memory; code that reads through it vouches for that.
unsafe impl<T: Sync> Send for MatRef<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for MatRef<T> {}
// SAFETY: a description of memory; code that writes through it vouches for that.
unsafe impl<T: Send> Send for MatMut<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for MatMut<T> {}

impl<T> MatRef<T> {
    /// A row-major matrix.
    pub fn row_major(data: *const T, rows: usize, cols: usize) -> Self {
        MatRef { data, rows, cols, row_stride: cols as isize, col_stride: 1 }
    }

    /// The transposed view.
    pub fn transposed(self) -> Self {
        let MatRef { data, rows, cols, row_stride, col_stride } = self;
        MatRef { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }
}

impl<T> MatMut<T> {
    /// A row-major matrix.
    pub fn row_major(data: *mut T, rows: usize, cols: usize) -> Self {
        MatMut { data, rows, cols, row_stride: cols as isize, col_stride: 1 }
    }

    /// The transposed view.
    pub fn transposed(self) -> Self {
        let MatMut { data, rows, cols, row_stride, col_stride } = self;
        MatMut { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }
}
