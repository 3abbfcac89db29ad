use ferrotron_cuda::arguments::NO_BAD_INDEX;
use ferrotron_tensor::ops::concat::{concat, pad_narrow};
use ferrotron_tensor::ops::cross_entropy::VocabShard;
use ferrotron_tensor::ops::embedding::embedding_shard;
use ferrotron_tensor::ops::index::{gather, index_select};
use ferrotron_tensor::ops::pointwise::where_cond;
use ferrotron_tensor::{DType, Tensor};

use super::far;
use crate::simulator::Simulator;
use crate::support::*;

/// One dtype of each size.
const SIZES: [DType; 4] = [DType::U8, DType::BF16, DType::U32, DType::I64];

pub fn check(simulator: &Simulator) {
    for dtype in SIZES {
        copies(simulator, dtype);
        transposes(simulator, dtype);
        gathers(simulator, dtype);
        selected_slices(simulator, dtype);
        choices(simulator, dtype);
    }
    far::copies(simulator);
}

/// Small integers, which every dtype represents.
fn integers(dtype: DType, dims: &[usize], seed: u64) -> Tensor {
    let all: Vec<f64> =
        values(dims.iter().product(), seed).iter().map(|x| ((x + 2.0) * 60.0).floor()).collect();
    tensor(dtype, dims, &all)
}

/// Copies the view in `source` to where `to` lies in `target`.
fn copy(simulator: &Simulator, source: &[u8], from: &Tensor, target: &mut [u8], to: &Tensor) {
    let n = from.numel();
    let (grid, block) = elementwise(n);
    let kernel = simulator.kernel("copy", element(from.dtype())).input(source).in_out(target);
    kernel.value(n as u64).value(layout(from.dims(), &[from, to])).run(grid, block);
}

fn copies(simulator: &Simulator, dtype: DType) {
    for dims in [&[1][..], &[1001], &[5, 33], &[3, 4, 9], &[2, 3, 2, 2, 5]] {
        let x = integers(dtype, dims, 1);
        for (source, view) in variants(&x) {
            let mut target = room(dtype, x.numel());
            copy(simulator, &source, &view, &mut target, &x);
            assert_same(&format!("copy of {view:?}"), &read(dtype, dims, &target), &x);
        }
        // Into the middle of a larger tensor, one behind another: concat, and the gradient of narrow.
        let last = dims.len() as isize - 1;
        for dim in [0, last] {
            let other = integers(dtype, dims, 2);
            let want = concat(&[&x, &other], dim).unwrap();
            let padded = pad_narrow(&x, dim, 0, 2 * dims[dim as usize]).unwrap();
            let (mut target, mut zeros) = (room(dtype, want.numel()), room(dtype, want.numel()));
            let mut start = 0;
            for part in [&x, &other] {
                let place = want.narrow(dim, start, part.dims()[dim as usize]).unwrap();
                let skipped = place.layout().offset() * dtype.size();
                copy(simulator, &bytes(part), part, &mut target[skipped..], &place);
                start += part.dims()[dim as usize];
            }
            assert_same(
                &format!("concat of {dims:?} along {dim}"),
                &read(dtype, want.dims(), &target),
                &want,
            );
            let place = padded.narrow(dim, 0, dims[dim as usize]).unwrap();
            copy(simulator, &bytes(&x), &x, &mut zeros, &place);
            assert_same(
                &format!("pad_narrow of {dims:?} along {dim}"),
                &read(dtype, want.dims(), &zeros),
                &padded,
            );
        }
    }
}

fn transposes(simulator: &Simulator, dtype: DType) {
    for dims in [[1, 1, 1], [2, 33, 5], [1, 64, 32], [3, 31, 70]] {
        let [batch, rows, columns] = dims;
        let x = integers(dtype, &dims, 3);
        let want = x.transpose(1, 2).unwrap().contiguous().unwrap();
        for (source, view) in variants(&x) {
            let strides = view.layout().strides();
            if strides[2] != 1 {
                continue;
            }
            let mut target = room(dtype, x.numel());
            let kernel =
                simulator.kernel("transpose", element(dtype)).input(&source).output(&mut target);
            let kernel = kernel
                .value(rows as u64)
                .value(columns as u64)
                .value(strides[0] as i64)
                .value(strides[1] as i64);
            kernel.run([columns.div_ceil(32), rows.div_ceil(32), batch], [32, 8, 1]);
            assert_same(
                &format!("transpose of {view:?}"),
                &read(dtype, want.dims(), &target),
                &want,
            );
        }
    }
}

fn ids(index: DType, dims: &[usize], size: usize) -> Tensor {
    let n: usize = dims.iter().product();
    let all: Vec<f64> = (0..n).map(|i| ((i * i * 7 + i) % size) as f64).collect();
    tensor(index, dims, &all)
}

fn gathers(simulator: &Simulator, dtype: DType) {
    for (dims, index_dims, dim) in [
        (&[9][..], &[20][..], 0),
        (&[5, 7], &[4, 7], 0),
        (&[5, 7], &[5, 11], 1),
        (&[3, 4, 6], &[2, 9, 6], 1),
    ] {
        let x = integers(dtype, dims, 4);
        for index in INDICES {
            let index = ids(index, index_dims, dims[dim]);
            let want = gather(&x, dim as isize, &index).unwrap();
            for (source, view) in variants(&x) {
                for (index_memory, index_view) in variants(&index) {
                    // x's strides with 0 along the dim: one slice of it, broadcast.
                    let mut slice = view.narrow(dim as isize, 0, 1).unwrap();
                    for (d, &size) in index_dims.iter().enumerate().filter(|(d, _)| *d != dim) {
                        slice = slice.narrow(d as isize, 0, size).unwrap();
                    }
                    let (n, mut bad) = (index.numel(), [NO_BAD_INDEX]);
                    let (grid, block) = elementwise(n);
                    let mut out = room(dtype, n);
                    let kernel = simulator
                        .kernel("gather", element(dtype))
                        .input(&source)
                        .input(&index_memory);
                    let kernel = kernel.value(index_type(&index)).output(&mut out).value(n as u64);
                    let kernel =
                        kernel.value(dims[dim] as i64).value(view.layout().strides()[dim] as i64);
                    kernel
                        .in_out(&mut bad)
                        .value(layout(index_dims, &[&slice, &index_view]))
                        .run(grid, block);
                    assert_eq!(bad, [NO_BAD_INDEX]);
                    assert_same(
                        &format!("gather of {view:?} at {index_view:?}"),
                        &read(dtype, index_dims, &out),
                        &want,
                    );
                }
            }
        }
    }
    // The first bad position is reported; its element is zero.
    let (x, index) =
        (integers(dtype, &[4], 5), tensor(DType::I64, &[5], &[0.0, 3.0, 4.0, -1.0, 2.0]));
    let (mut out, mut bad) = (room(dtype, 5), [NO_BAD_INDEX]);
    let slice = x.narrow(0, 0, 1).unwrap();
    let (source, index_memory) = (bytes(&x), bytes(&index));
    let kernel = simulator.kernel("gather", element(dtype)).input(&source).input(&index_memory);
    let kernel =
        kernel.value(index_type(&index)).output(&mut out).value(5_u64).value(4_i64).value(1_i64);
    kernel.in_out(&mut bad).value(layout(&[5], &[&slice, &index])).run([1; 3], [256, 1, 1]);
    assert_eq!(bad, [2]);
    assert_eq!(numbers(&read(dtype, &[5], &out))[2..4], [0.0; 2]);
}

fn selected_slices(simulator: &Simulator, dtype: DType) {
    let select = |x: &Tensor,
                  ids: &Tensor,
                  sizes: [usize; 4],
                  offset: usize,
                  global: usize,
                  bad: &mut [u64]| {
        let [outer, size, count, inner] = sizes.map(|size| size as u64);
        let (source, index) = (bytes(x), bytes(ids));
        let mut out = room(dtype, sizes[0] * sizes[2] * sizes[3]);
        let kernel = simulator.kernel("index_select", element(dtype)).input(&source).input(&index);
        let kernel = kernel
            .value(index_type(ids))
            .output(&mut out)
            .value(outer)
            .value(size)
            .value(count)
            .value(inner);
        let kernel = kernel.value(offset as i64).value(global as i64).in_out(bad);
        kernel.run([(outer * count).min(7) as usize, 1, 1], [64, 1, 1]);
        out
    };
    for ([outer, size, inner], count) in [([1, 5, 3], 4), ([3, 7, 40], 9), ([2, 4, 1], 3)] {
        let x = integers(dtype, &[outer, size, inner], 6);
        for index in INDICES {
            let ids = ids(index, &[count], size);
            let mut bad = [NO_BAD_INDEX];
            let out = select(&x, &ids, [outer, size, count, inner], 0, size, &mut bad);
            let want = index_select(&x, 1, &ids).unwrap();
            assert_same("index_select", &read(dtype, want.dims(), &out), &want);
            assert_eq!(bad, [NO_BAD_INDEX]);
        }
    }
    // A shard of an embedding: rows 5..9 of 13.
    let (table, tokens) = (integers(dtype, &[4, 24], 7), ids(DType::U32, &[40], 13));
    let mut bad = [NO_BAD_INDEX];
    let out = select(&table, &tokens, [1, 4, 40, 24], 5, 13, &mut bad);
    let want =
        embedding_shard(&table, &tokens, VocabShard { offset: 5, global: 13, shards: 3 }).unwrap();
    assert_same("embedding_shard", &read(dtype, want.dims(), &out), &want);
    assert_eq!(bad, [NO_BAD_INDEX]);
    let out =
        select(&table, &tensor(DType::I64, &[3], &[2.0, -1.0, 4.0]), [1, 4, 3, 24], 0, 4, &mut bad);
    assert_eq!(bad, [1]);
    assert_eq!(numbers(&read(dtype, &[3, 24], &out))[24..], [0.0; 48]);
}

fn choices(simulator: &Simulator, dtype: DType) {
    for (c_dims, yes_dims, no_dims) in [
        (&[700][..], &[700][..], &[700][..]),
        (&[5, 1], &[5, 33], &[33]),
        (&[3, 1, 7], &[5, 1], &[1]),
    ] {
        let flags: Vec<f64> =
            values(c_dims.iter().product(), 8).iter().map(|x| f64::from(*x > 0.0)).collect();
        let condition = tensor(DType::U8, c_dims, &flags);
        let (yes, no) = (integers(dtype, yes_dims, 9), integers(dtype, no_dims, 10));
        let want = where_cond(&condition, &yes, &no).unwrap();
        let n = want.numel();
        let (grid, block) = elementwise(n);
        for (c_memory, c_view) in variants(&condition) {
            for (yes_memory, yes_view) in variants(&yes) {
                for (no_memory, no_view) in variants(&no) {
                    let mut out = room(dtype, n);
                    let kernel = simulator
                        .kernel("select", element(dtype))
                        .input(&c_memory)
                        .input(&yes_memory);
                    let kernel = kernel.input(&no_memory).output(&mut out).value(n as u64);
                    kernel
                        .value(layout(want.dims(), &[&c_view, &yes_view, &no_view]))
                        .run(grid, block);
                    assert_same("select", &read(dtype, want.dims(), &out), &want);
                }
            }
        }
    }
}
