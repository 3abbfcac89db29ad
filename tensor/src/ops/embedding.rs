//! Embedding: one row of a table per id.
//!
//! y\[t\] = weight\[ids\[t\]\]. Gradient: dweight\[ids\[t\]\] += dy\[t\]; needs the ids.
//!
//! A table may be sharded by rows. An id of another shard gives a row of zeros and no gradient. The sum over the
//! shards therefore equals the result of the whole table.
//!
//! The gradient accumulates in `Element::Acc`, the rows of one id in the order of their positions. Each table row
//! belongs to one thread, so the result does not depend on the number of threads.

use bytemuck::Zeroable;

use super::cross_entropy::VocabShard;
use super::index::{Groups, add_rows, indices};
use super::rows::{CHEAP, for_rows};
use crate::core::tensor::check_device;
use crate::cuda;
use crate::kernel_span::kernel_span;
use crate::{Element, Error, Result, Scalar, Tensor, dispatch_any, dispatch_float};

/// Looks up rows of `weight` (V, C) for `ids` of any dims: (ids.., C).
///
/// Errors, with position and value, if an id is not below V.
///
/// ```
/// use ferrotron_tensor::{Device, Tensor, ops::embedding::embedding};
/// let device = Device::cpu(1)?;
/// let weight = Tensor::from_slice(&device, &[0.0_f32, 0.1, 1.0, 1.1], &[2, 2])?;
/// let ids = Tensor::from_slice(&device, &[1_u32, 0, 1], &[3])?;
/// assert_eq!(embedding(&weight, &ids)?.to_vec::<f32>()?, [1.0, 1.1, 0.0, 0.1, 1.0, 1.1]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn embedding(weight: &Tensor, ids: &Tensor) -> Result<Tensor> {
    let rows = check_table("embedding", weight)?.0;
    embedding_shard(weight, ids, VocabShard::unsharded(rows))
}

/// [`embedding`] of a sharded table, where `weight` (V, C) holds the shard's rows: zeros for the ids of other shards.
///
/// Errors, with position and value, if an id is not below the number of all rows; every shard returns the same error.
///
/// ```
/// use ferrotron_tensor::ops::{cross_entropy::VocabShard, embedding::embedding_shard};
/// use ferrotron_tensor::{Device, Tensor};
/// let device = Device::cpu(1)?;
/// let weight = Tensor::from_slice(&device, &[3.0_f32, 3.1, 4.0, 4.1], &[2, 2])?; // rows 3 and 4 of 5
/// let ids = Tensor::from_slice(&device, &[4_u32, 0], &[2])?;
/// let shard = VocabShard { offset: 3, global: 5, shards: 2 };
/// assert_eq!(embedding_shard(&weight, &ids, shard)?.to_vec::<f32>()?, [4.0, 4.1, 0.0, 0.0]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn embedding_shard(weight: &Tensor, ids: &Tensor, shard: VocabShard) -> Result<Tensor> {
    check_device("embedding", weight, ids)?;
    let (rows, width) = check_table("embedding", weight)?;
    shard.check("embedding", rows)?;
    let weight = weight.contiguous()?;
    let mut y = Tensor::empty(weight.device(), weight.dtype(), &[ids.dims(), &[width]].concat())?;
    if y.device().gpu().is_some() {
        let (sizes, bounds) = ([1, rows, width], [shard.offset, shard.global]);
        cuda::index::select("embedding", &weight, &ids.contiguous()?, &mut y, sizes, bounds)?;
        return Ok(y);
    }
    let _span = kernel_span!("embedding", weight.dtype(), 0, [&y] => [&y]);
    let list = held_rows("embedding", ids, rows, shard)?;
    dispatch_any!(weight.dtype(), T => {
        let (work, table) = (y.numel() / CHEAP, weight.as_slice::<T>()?);
        for_rows(weight.device(), (y.as_mut_slice::<T>()?, width), work, |first, out| {
            for (out, &row) in out.chunks_exact_mut(width).zip(&list[first..]) {
                if row < rows {
                    out.copy_from_slice(&table[row * width..][..width]);
                } else {
                    out.fill(T::zeroed());
                }
            }
        });
    });
    Ok(y)
}

/// Adds dy (ids.., C) to the rows `ids` of the unique, contiguous `dweight` (V, C). Its dtype is that of dy or the
/// accumulator dtype of dy.
pub fn embedding_backward(dy: &Tensor, ids: &Tensor, dweight: &mut Tensor) -> Result<()> {
    let rows = check_table(OP_BACKWARD, dweight)?.0;
    embedding_shard_backward(dy, ids, VocabShard::unsharded(rows), dweight)
}

/// [`embedding_backward`] of [`embedding_shard`]: adds to the rows of this shard.
pub fn embedding_shard_backward(
    dy: &Tensor,
    ids: &Tensor,
    shard: VocabShard,
    dweight: &mut Tensor,
) -> Result<()> {
    const OP: &str = OP_BACKWARD;
    check_device(OP, dy, ids)?;
    check_device(OP, dy, dweight)?;
    let (rows, width) = check_table(OP, dweight)?;
    if dy.dims() != [ids.dims(), &[width]].concat() {
        return Err(Error::shape(
            OP,
            format!("dy is {:?}, ids {:?}, table {:?}", dy.dims(), ids.dims(), dweight.dims()),
        ));
    }
    if ![dy.dtype(), dy.dtype().accumulator()].contains(&dweight.dtype()) {
        let (dy, table) = (dy.dtype(), dweight.dtype());
        return Err(Error::dtype(OP, format!("dy is {dy}, the table {table}")));
    }
    shard.check(OP, rows)?;
    let dy = dy.contiguous()?;
    if dy.device().gpu().is_some() {
        dweight.expect_contiguous(OP)?;
        let (sizes, bounds) = ([1, rows, width], [shard.offset, shard.global]);
        return cuda::index::add(OP, &dy, &ids.contiguous()?, dweight, sizes, bounds);
    }
    let _span = kernel_span!(OP, dy.dtype(), 0, [&dy, &dy] => [&dy]);
    let list = held_rows(OP, ids, rows, shard)?;
    if dy.device().is_fake() {
        return Ok(()); // the groups of ids would take memory for every row of the table
    }
    dispatch_float!(OP, dy.dtype(), T => {
        if dweight.dtype() == T::DTYPE {
            add::<T, T>(&dy, &list, dweight)
        } else {
            add::<<T as Element>::Acc, T>(&dy, &list, dweight)
        }
    })
}

const OP_BACKWARD: &str = "embedding_backward";

/// Rows and width of a table.
fn check_table(op: &'static str, table: &Tensor) -> Result<(usize, usize)> {
    match table.dims() {
        &[rows, width] => Ok((rows, width)),
        dims => Err(Error::shape(op, format!("the table is (V, C), got {dims:?}"))),
    }
}

/// The local row of each id, in row-major order, or `rows` for an id of another shard.
fn held_rows(op: &'static str, ids: &Tensor, rows: usize, shard: VocabShard) -> Result<Vec<usize>> {
    // Error positions are those of the tensor.
    let mut list = indices(op, ids, ids.rank().saturating_sub(1), shard.global)?;
    list.iter_mut().for_each(|id| *id = id.wrapping_sub(shard.offset).min(rows));
    Ok(list)
}

fn add<W: Element, T: Element<Acc = W::Acc>>(
    dy: &Tensor,
    list: &[usize],
    dweight: &mut Tensor,
) -> Result<()> {
    let &[rows, width] = dweight.dims() else { return Ok(()) };
    let device = dy.device();
    let source = dy.as_slice::<T>()?;
    // The last group holds the ids of other shards.
    let groups = Groups::new(list, rows + 1);
    // Consecutive table rows with about equal numbers of tokens: token frequencies are very uneven.
    let pieces = if source.len() < 16 * 1024 { 1 } else { 4 * device.threads() };
    let mut rest = dweight.as_mut_slice::<W>()?;
    let mut tasks = Vec::with_capacity(pieces);
    let mut first = 0;
    for piece in 1..=pieces {
        let goal = groups.before(rows) * piece / pieces;
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
                add_rows::<W, T>(row, source, groups.positions(*first + i));
            }
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;
    use crate::{DType, Device, partition_range};

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
            // Squares favour small ids.
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
    fn shards_hold_the_rows_of_the_whole() {
        let device = Device::cpu(2).unwrap();
        // More shards than rows, so some are empty.
        for (v, c, n, shards) in [(13, 3, 40, 4), (3, 2, 7, 5), (300, 48, 600, 3), (2, 5, 0, 2)] {
            let list: Vec<i64> = (0..n).map(|i| (i * i * 7 + i) % v as i64).collect();
            let ids = Tensor::from_slice(&device, &list, &[n as usize]).unwrap();
            let dims = [n as usize, c];
            for dtype in FLOATS {
                let weight = tensor(&device, dtype, &[v, c], &values(v * c, 1));
                let dy = tensor(&device, dtype, &dims, &values(n as usize * c, 2));
                let y = embedding(&weight, &ids).unwrap().to_f64().unwrap();
                let mut dweight = weight.copy().unwrap();
                embedding_backward(&dy, &ids, &mut dweight).unwrap();
                for rank in 0..shards {
                    let own = partition_range(v, shards, rank);
                    let shard = VocabShard { offset: own.start, global: v, shards };
                    let part = weight.narrow(0, own.start, own.len()).unwrap();
                    let held = |t: usize| own.contains(&(list[t] as usize));
                    let want: Vec<f64> =
                        (0..y.len()).map(|i| if held(i / c) { y[i] } else { 0.0 }).collect();
                    let got = embedding_shard(&part, &ids, shard).unwrap();
                    assert_close(&format!("shard {rank} of {shards}"), &got, &want, 0.0);
                    let mut sums = part.copy().unwrap();
                    embedding_shard_backward(&dy, &ids, shard, &mut sums).unwrap();
                    let want = dweight.narrow(0, own.start, own.len()).unwrap().to_f64().unwrap();
                    assert_close(&format!("gradient of {rank} of {shards}"), &sums, &want, 0.0);
                }
            }
        }
    }

    #[test]
    fn every_shard_refuses_what_no_shard_has() {
        let device = Device::cpu(1).unwrap();
        let ids = Tensor::from_slice(&device, &[0_i64, 5], &[2]).unwrap();
        for (offset, rows) in [(0, 2), (2, 3)] {
            let weight = Tensor::zeros(&device, DType::F32, &[rows, 2]).unwrap();
            let shard = VocabShard { offset, global: 5, shards: 2 };
            let want = "embedding: index 5 at position [1] is not below 5";
            assert_eq!(message(embedding_shard(&weight, &ids, shard)), want);
            let shard = VocabShard { offset: 4, ..shard };
            let refused = message(embedding_shard(&weight, &ids, shard));
            assert!(refused.contains("are no shard of 5 classes in 2 shards"), "{refused}");
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
