use ferrotron_cuda::arguments::NO_BAD_INDEX;
use ferrotron_cuda::kernels::KernelSource;
use ferrotron_tensor::ops::cross_entropy::VocabShard;
use ferrotron_tensor::ops::embedding::{embedding_backward, embedding_shard_backward};
use ferrotron_tensor::ops::index::{index_add, scatter, scatter_add};
use ferrotron_tensor::{DType, Tensor};

use super::sort::keys;
use crate::simulator::Simulator;
use crate::support::*;

/// `CHUNK` of `index.cu`.
const CHUNK: usize = 32;

pub fn check(simulator: &Simulator) {
    let sorter = Simulator::new(KernelSource::named("sort").unwrap());
    for dtype in FLOATS {
        for ([outer, size, inner], count) in
            [([1, 5, 3], 40), ([3, 7, 130], 9), ([2, 1, 1], 30), ([2, 2, 3], 150)]
        {
            for index in INDICES {
                let ids = ids(index, &[count], size);
                let dy = random(dtype, &[outer, count, inner], 1);
                let zeros = Tensor::zeros(&device(), dtype, &[outer, size, inner]).unwrap();
                let want = index_add(zeros.clone(), 1, &ids, &dy).unwrap();
                let got = add(simulator, &sorter, &dy, &ids, &zeros, 0);
                sums("index_add", &got, &want, count);
            }
        }
        // An embedding's gradient, into its dtype and wider, whole and a shard of it; most ids are few.
        let (v, c, n) = (13, 48, 300);
        let tokens = ids(DType::I64, &[n], v);
        let dy = random(dtype, &[n, c], 2);
        for wide in [dtype, dtype.accumulator()] {
            let table = random(wide, &[v, c], 3);
            let mut want = table.copy().unwrap();
            embedding_backward(&dy, &tokens, &mut want).unwrap();
            let got = add(simulator, &sorter, &dy, &tokens, &table, 0);
            sums("embedding_backward", &got, &want, n);
            let part = table.narrow(0, 5, 4).unwrap();
            let mut want = part.copy().unwrap();
            let shard = VocabShard { offset: 5, global: v, shards: 3 };
            embedding_shard_backward(&dy, &tokens, shard, &mut want).unwrap();
            let got = add(simulator, &sorter, &dy, &tokens, &part, 5);
            sums("embedding_shard_backward", &got, &want, n);
        }
        scatters(simulator, dtype);
    }
}

fn ids(index: DType, dims: &[usize], size: usize) -> Tensor {
    let n: usize = dims.iter().product();
    tensor(index, dims, &(0..n).map(|i| ((i * i * 7 + i) % size) as f64).collect::<Vec<_>>())
}

/// Both round once; the sums of more than 32 slices, of numbers up to 2, are added in another order.
fn sums(what: &str, got: &Tensor, want: &Tensor, count: usize) {
    let (dtype, eps) = (got.dtype(), got.dtype().accumulator().epsilon());
    match count <= CHUNK {
        true => assert_same(what, got, want),
        false => assert_close(what, got, want, rounding(dtype), eps * (2 * count) as f64),
    }
}

/// `to` (outer, size, inner) with the slices of `x` added where `ids` says, less `offset`.
fn add(
    simulator: &Simulator,
    sorter: &Simulator,
    x: &Tensor,
    ids: &Tensor,
    to: &Tensor,
    offset: usize,
) -> Tensor {
    let dims = to.dims();
    let [size, inner] = [dims[dims.len() - 2], dims[dims.len() - 1]];
    let (outer, count) = (to.numel() / size / inner, ids.numel());
    let keys = keys(sorter, ids, offset, size);
    let mut order: Vec<i64> = (0..count as i64).collect();
    order.sort_by_key(|&at| keys[at as usize]); // stable, as argsort.cu
    let (source, mut memory) = (bytes(x), bytes(to));
    let chunks = count.div_ceil(CHUNK);
    let add = |wide: bool, memory: &mut [u8]| {
        let (short, long) = match wide {
            true => ("index_add_wide", "index_add_wide_long_runs"),
            false => ("index_add", "index_add_long_runs"),
        };
        let mut partials = room(x.dtype().accumulator(), outer * chunks * inner);
        let start = |name| simulator.kernel(name, element(x.dtype())).input(&source).input(&keys);
        let grid = |positions| [positions, inner.div_ceil(128), outer.min(2)];
        let kernel = start(short).input(&order).in_out(memory).output(&mut partials);
        let kernel = kernel.value(outer as u64).value(count as u64);
        kernel.value(size as i64).value(inner as u64).run(grid(count), [128, 1, 1]);
        if chunks > 1 {
            let kernel = start(long).input(&order).in_out(memory).input(&partials);
            let kernel = kernel.value(outer as u64).value(count as u64);
            kernel.value(size as i64).value(inner as u64).run(grid(chunks - 1), [128, 1, 1]);
        }
    };
    let before = memory.clone();
    add(to.dtype() != x.dtype(), &mut memory);
    if to.dtype() == x.dtype().accumulator() {
        let mut again = before;
        add(true, &mut again);
        assert_eq!(again, memory);
    }
    read(to.dtype(), dims, &memory)
}

fn scatters(simulator: &Simulator, dtype: DType) {
    for (dims, index_dims, dim) in [
        (&[9][..], &[20][..], 0),
        (&[5, 7], &[4, 7], 0),
        (&[5, 7], &[5, 11], 1),
        (&[3, 4, 6], &[2, 9, 6], 1),
        (&[3, 300], &[2, 8], 1),
        (&[9, 70], &[8, 70], 0),
    ] {
        let (base, src) = (random(dtype, dims, 4), random(dtype, index_dims, 5));
        let index = ids(DType::U32, index_dims, dims[dim]);
        let d = dim as isize;
        let wanted = [
            ("scatter_add", scatter_add(base.copy().unwrap(), d, &index, &src).unwrap()),
            ("scatter", scatter(base.copy().unwrap(), d, &index, &src).unwrap()),
        ];
        for (name, want) in &wanted {
            for (index_memory, index_view) in variants(&index) {
                for (src_memory, src_view) in variants(&src) {
                    let index = (&index_memory[..], &index_view);
                    let src = (&src_memory[..], &src_view);
                    let got = launch(simulator, name, &base, index, src, dim, None);
                    assert_same(name, &got, want);
                }
            }
        }
    }
    let base = random(dtype, &[4], 6);
    let (index, src) = (tensor(DType::I64, &[3], &[1.0, 4.0, -1.0]), random(dtype, &[3], 7));
    let (at, from) = (bytes(&index), bytes(&src));
    launch(simulator, "scatter_add", &base, (&at, &index), (&from, &src), 0, Some(1));
}

fn launch(
    simulator: &Simulator,
    name: &str,
    base: &Tensor,
    (index_memory, index): (&[u8], &Tensor),
    (src_memory, src): (&[u8], &Tensor),
    dim: usize,
    first_bad: Option<u64>,
) -> Tensor {
    // Rows: everything but the dim, as far as the index goes.
    let row = |x: &Tensor| {
        let mut x = x.narrow(dim as isize, 0, 1).unwrap();
        for (d, &size) in index.dims().iter().enumerate().filter(|(d, _)| *d != dim) {
            x = x.narrow(d as isize, 0, size).unwrap();
        }
        x
    };
    let rows = [row(base), row(index), row(src)];
    let (n, size, count) = (rows[0].numel(), base.dims()[dim], index.dims()[dim]);
    let (grid, block) = elementwise(n * size);
    let (mut memory, mut bad) = (bytes(base), [NO_BAD_INDEX]);
    let kernel =
        simulator.kernel(name, element(base.dtype())).in_out(&mut memory).input(index_memory);
    let kernel = kernel.value(index_type(index)).input(src_memory);
    let kernel = kernel.value(n as u64).value(size as u64).value(count as u64);
    let kernel = [base, index, src]
        .iter()
        .fold(kernel, |kernel, x| kernel.value(x.layout().strides()[dim] as i64));
    let operands: Vec<&Tensor> = rows.iter().collect();
    kernel.in_out(&mut bad).value(layout(rows[0].dims(), &operands)).run(grid, block);
    assert_eq!(bad, [first_bad.unwrap_or(NO_BAD_INDEX)]);
    read(base.dtype(), base.dims(), &memory)
}
