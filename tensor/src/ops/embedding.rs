//! Embedding: rows of a table, one for each id.
//!
//! y\[t\] = weight\[ids\[t\]\]. Gradient: dweight\[ids\[t\]\] += dy\[t\]; needs the ids.
//!
//! The gradient accumulates in `Element::Acc`, the rows of one id in the order of their positions. Each row
//! of the table belongs to one thread, so nothing depends on their number.

use super::index::{Groups, add_rows, indices};
use super::rows::{CHEAP, for_rows};
use crate::tensor::check_device;
use crate::{Element, Error, Result, Scalar, Tensor, dispatch_any, dispatch_float};

/// Rows of `weight` (V, C) for `ids` of any dims: (ids.., C).
///
/// ```
/// use ferrotron_tensor::{Device, Tensor, ops::embedding::embedding};
/// let device = Device::cpu(1)?;
/// let weight = Tensor::from_slice(&device, &[0.0_f32, 0.1, 1.0, 1.1], &[2, 2])?;
/// let ids = Tensor::from_slice(&device, &[1_u32, 0, 1], &[3])?;
/// assert_eq!(embedding(&weight, &ids)?.to_vec::<f32>()?, [1.0, 1.1, 0.0, 0.1, 1.0, 1.1]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// Errors, naming position and value, if an id is not below V.
pub fn embedding(weight: &Tensor, ids: &Tensor) -> Result<Tensor> {
    check_device("embedding", weight, ids)?;
    let &[rows, width] = weight.dims() else {
        return Err(Error::shape(
            "embedding",
            format!("the table is (V, C), got {:?}", weight.dims()),
        ));
    };
    let list = flat_ids("embedding", ids, rows)?;
    let weight = weight.contiguous()?;
    let mut y = Tensor::empty(weight.device(), weight.dtype(), &[ids.dims(), &[width]].concat())?;
    dispatch_any!(weight.dtype(), T => {
        let (work, table) = (y.numel() / CHEAP, weight.as_slice::<T>()?);
        for_rows(weight.device(), (y.as_mut_slice::<T>()?, width), work, |first, rows| {
            for (row, id) in rows.chunks_exact_mut(width).zip(&list[first..]) {
                row.copy_from_slice(&table[id * width..][..width]);
            }
        });
    });
    Ok(y)
}

/// Adds dy (ids.., C) to the rows of the unique, contiguous `dweight` (V, C) that `ids` names. Its dtype is
/// that of dy, or the one that dy accumulates in.
pub fn embedding_backward(dy: &Tensor, ids: &Tensor, dweight: &mut Tensor) -> Result<()> {
    const OP: &str = "embedding_backward";
    check_device(OP, dy, ids)?;
    check_device(OP, dy, dweight)?;
    let &[rows, width] = dweight.dims() else {
        return Err(Error::shape(OP, format!("the table is (V, C), got {:?}", dweight.dims())));
    };
    if dy.dims() != [ids.dims(), &[width]].concat() {
        return Err(Error::shape(
            OP,
            format!("dy is {:?}, ids {:?}, table {:?}", dy.dims(), ids.dims(), dweight.dims()),
        ));
    }
    let list = flat_ids(OP, ids, rows)?;
    let dy = dy.contiguous()?;
    dispatch_float!(OP, dy.dtype(), T => {
        if dweight.dtype() == T::DTYPE {
            add::<T, T>(&dy, &list, dweight)
        } else if dweight.dtype() == <T as Element>::Acc::DTYPE {
            add::<<T as Element>::Acc, T>(&dy, &list, dweight)
        } else {
            Err(Error::dtype(OP, format!("dy is {}, the table {}", dy.dtype(), dweight.dtype())))
        }
    })
}

/// The ids in row-major order; positions in errors are those of the tensor.
fn flat_ids(op: &'static str, ids: &Tensor, rows: usize) -> Result<Vec<usize>> {
    indices(op, ids, ids.rank().saturating_sub(1), rows)
}

fn add<W: Element, T: Element<Acc = W::Acc>>(
    dy: &Tensor,
    ids: &[usize],
    dweight: &mut Tensor,
) -> Result<()> {
    let &[rows, width] = dweight.dims() else { return Ok(()) };
    let device = dy.device();
    let source = dy.as_slice::<T>()?;
    let groups = Groups::new(ids, rows);
    // Consecutive rows of the table with about as many tokens each: a few ids are most of a text.
    let pieces = if source.len() < 16 * 1024 { 1 } else { 4 * device.threads() };
    let mut rest = dweight.as_mut_slice::<W>()?;
    let mut tasks = Vec::with_capacity(pieces);
    let mut first = 0;
    for piece in 1..=pieces {
        let goal = ids.len() * piece / pieces;
        let mut end = first;
        while end < rows && (groups.before(end + 1) <= goal || piece == pieces) {
            end += 1;
        }
        let (part, behind) = rest.split_at_mut((end - first) * width);
        tasks.push((first, part));
        (first, rest) = (end, behind);
    }
    for_rows(device, (&mut tasks, 1), source.len(), |_, tasks| {
        for (first, part) in tasks {
            for (i, row) in part.chunks_exact_mut(width.max(1)).enumerate() {
                add_rows::<W, T>(row, source, groups.of(*first + i));
            }
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;
    use crate::{DType, Device};

    #[test]
    fn rows_and_their_gradient_equal_naive_ones() {
        let device = Device::cpu(2).unwrap();
        for (v, c, dims) in [
            (5, 3, &[4][..]),
            (7, 1, &[2, 3]),
            (1, 600, &[40]),
            (300, 48, &[5, 100]),
            (3, 2, &[]),
            (3, 0, &[2]),
            (3, 2, &[0]),
        ] {
            let n: usize = dims.iter().product();
            // Squares make small ids frequent.
            let ids: Vec<u32> = (0..n).map(|i| (i * i * 7 % 11 * i % v) as u32).collect();
            let (table, dy) = (values(v * c, 1), values(n * c, 2));
            let want: Vec<f64> =
                ids.iter().flat_map(|&id| table[id as usize * c..][..c].to_vec()).collect();
            let mut sums = table.clone();
            for (t, &id) in ids.iter().enumerate() {
                for j in 0..c {
                    sums[id as usize * c + j] += dy[t * c + j];
                }
            }
            let index = Tensor::from_slice(&device, &ids, dims).unwrap();
            let y_dims = [dims, &[c]].concat();
            for dtype in FLOATS {
                let weight = tensor(&device, dtype, &[v, c], &table);
                for (weight, index) in variants(&weight).iter().zip(variants(&index)) {
                    let y = embedding(weight, &index).unwrap();
                    assert_eq!(y.dims(), y_dims);
                    assert_close("embedding", &y, &want, 0.0);
                }
                for dy in variants(&tensor(&device, dtype, &y_dims, &dy)) {
                    let mut dweight = weight.copy().unwrap();
                    embedding_backward(&dy, &index, &mut dweight).unwrap();
                    assert_close("embedding_backward", &dweight, &sums, 2.0 * dtype.epsilon());
                    if dtype != DType::F64 {
                        let mut dweight = tensor(&device, DType::F32, &[v, c], &table);
                        embedding_backward(&dy, &index, &mut dweight).unwrap();
                        let eps = 64.0 * DType::F32.epsilon();
                        assert_close("embedding_backward in f32", &dweight, &sums, eps);
                    }
                }
            }
        }
    }

    #[test]
    fn the_number_of_threads_does_not_show() {
        let ids: Vec<i64> = (0..2000).map(|i| i * i % 97 % 50).collect();
        assert_same_bits("embedding_backward", |device| {
            let dy = tensor(device, DType::F32, &[2000, 40], &values(80_000, 1));
            let mut dweight = tensor(device, DType::F32, &[50, 40], &values(2000, 2));
            embedding_backward(&dy, &Tensor::from_slice(device, &ids, &[2000])?, &mut dweight)?;
            Ok(vec![dweight])
        });
    }

    #[test]
    fn errors_name_position_id_and_rows() {
        let device = Device::cpu(1).unwrap();
        let weight = Tensor::zeros(&device, DType::F32, &[5, 2]).unwrap();
        let ids = Tensor::from_slice(&device, &[0_i64, 5], &[1, 2]).unwrap();
        assert_eq!(
            message(embedding(&weight, &ids)),
            "embedding: index 5 at position [0, 1] is not below 5"
        );
        let mut dweight = weight.copy().unwrap();
        let dy = Tensor::zeros(&device, DType::F32, &[1, 2, 3]).unwrap();
        assert_eq!(
            message(embedding_backward(&dy, &ids, &mut dweight)),
            "embedding_backward: dy is [1, 2, 3], ids [1, 2], table [5, 2]"
        );
        let _held = dweight.clone();
        let dy = Tensor::zeros(&device, DType::F32, &[1, 2]).unwrap();
        let ids = Tensor::zeros(&device, DType::I64, &[1]).unwrap();
        assert_eq!(
            message(embedding_backward(&dy, &ids, &mut dweight)),
            "as_mut_slice: the buffer has 2 holders, writing needs 1"
        );
    }
}
