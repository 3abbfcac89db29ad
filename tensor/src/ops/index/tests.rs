use super::*;
use crate::ops::testing::*;
use crate::{DType, Device};

fn ids(device: &Device, dims: &[usize], size: usize, seed: u64) -> Tensor {
    let n = dims.iter().product();
    let ids: Vec<i64> = values(n, seed).iter().map(|x| (x * 64.0) as i64).collect();
    let ids: Vec<i64> = ids.iter().map(|id| id.rem_euclid(size as i64)).collect();
    Tensor::from_slice(device, &ids, dims).unwrap()
}

fn flat(dims: &[usize], at: &[usize]) -> usize {
    at.iter().zip(dims).fold(0, |flat, (c, size)| flat * size + c)
}

/// (x dims, dim, index dims)
const CASES: &[(&[usize], isize, &[usize])] = &[
    (&[5], 0, &[9]),
    (&[4, 6], 1, &[4, 1]),
    (&[4, 6], 0, &[3, 6]),
    (&[4, 6], 0, &[7, 2]),
    (&[3, 4, 5], 1, &[2, 6, 5]),
    (&[3, 4, 5], -1, &[3, 4, 5]),
    (&[3, 4, 5], 0, &[0, 4, 5]),
    (&[70, 300], 1, &[70, 280]),
];

#[test]
fn gather_and_scatter_add_equal_naive_ones() {
    let device = Device::cpu(2).unwrap();
    for &(dims, dim, index_dims) in CASES {
        let d = dim.rem_euclid(dims.len() as isize) as usize;
        let x = values(dims.iter().product(), 1);
        let src = values(index_dims.iter().product(), 2);
        let index = ids(&device, index_dims, dims[d], 3);
        let list = index.to_vec::<i64>().unwrap();
        let (mut want, mut sums) = (vec![], x.clone());
        for (i, &id) in list.iter().enumerate() {
            let mut at = coordinates(index_dims, i);
            at[d] = id as usize;
            want.push(x[flat(dims, &at)]);
            sums[flat(dims, &at)] += src[i];
        }
        for dtype in FLOATS {
            let src = variants(&tensor(&device, dtype, index_dims, &src));
            let indices = variants(&index);
            for (i, x) in variants(&tensor(&device, dtype, dims, &x)).into_iter().enumerate() {
                let index = &indices[i % indices.len()];
                let y = gather(&x, dim, index).unwrap();
                assert_eq!(y.dims(), index_dims);
                assert_close("gather", &y, &want, 0.0);
                let y = scatter_add(x, dim, index, &src[src.len() - 1 - i]).unwrap();
                assert_eq!(y.dims(), dims);
                assert_close("scatter_add", &y, &sums, dtype.epsilon());
            }
        }
    }
}

#[test]
fn selected_slices_and_their_adjoint_equal_naive_ones() {
    let device = Device::cpu(2).unwrap();
    let dims = [3, 5, 4];
    let x = values(60, 1);
    for dim in 0..3 {
        for count in [0, 1, 9] {
            let list = ids(&device, &[count], dims[dim], 4);
            let ids = list.to_vec::<i64>().unwrap();
            let mut out = dims;
            out[dim] = count;
            let dy = values(out.iter().product(), 5);
            let (mut want, mut sums) = (vec![], vec![0.0; 60]);
            for (i, dy) in dy.iter().enumerate() {
                let mut at = coordinates(&out, i);
                at[dim] = ids[at[dim]] as usize;
                want.push(x[flat(&dims, &at)]);
                sums[flat(&dims, &at)] += dy;
            }
            for dtype in FLOATS {
                let eps = 2.0 * dtype.epsilon();
                for x in variants(&tensor(&device, dtype, &dims, &x)) {
                    let y = index_select(&x, dim as isize, &list).unwrap();
                    assert_eq!(y.dims(), out);
                    assert_close("index_select", &y, &want, 0.0);
                }
                for dy in variants(&tensor(&device, dtype, &out, &dy)) {
                    let base = Tensor::zeros(&device, dtype, &dims).unwrap();
                    let dx = index_add(base, dim as isize, &list, &dy).unwrap();
                    assert_eq!(dx.dims(), dims);
                    assert_close("index_add", &dx, &sums, eps);
                }
            }
        }
    }
}

#[test]
fn the_number_of_threads_does_not_show() {
    assert_same_bits("index", |device| {
        let x = tensor(device, DType::F32, &[60, 400], &values(24_000, 1));
        let index = ids(device, &[60, 400], 60, 2);
        let list = ids(device, &[60], 7, 3);
        let scattered = scatter_add(x.clone(), 0, &index, &x)?;
        let zeros = Tensor::zeros(device, DType::F32, &[7, 400])?;
        Ok(vec![gather(&x, 0, &index)?, scattered, index_add(zeros, 0, &list, &x)?])
    });
}

#[test]
fn a_unique_base_is_overwritten_and_no_other() {
    let device = Device::cpu(1).unwrap();
    let base = tensor(&device, DType::F32, &[2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let index = Tensor::from_slice(&device, &[1_u32, 0], &[2, 1]).unwrap();
    let src = tensor(&device, DType::F32, &[2, 1], &[10.0, 20.0]);
    let y = scatter_add(base.clone(), 1, &index, &src).unwrap();
    assert_eq!(y.to_f64().unwrap(), [1.0, 12.0, 23.0, 4.0]);
    assert_eq!(base.to_f64().unwrap(), [1.0, 2.0, 3.0, 4.0]);
    let id = base.buffer_id();
    assert_eq!(scatter_add(base, 1, &index, &src).unwrap().buffer_id(), id);
}

#[test]
fn errors_name_position_index_and_size() {
    let device = Device::cpu(1).unwrap();
    let x = Tensor::zeros(&device, DType::F32, &[2, 3]).unwrap();
    let index = Tensor::from_slice(&device, &[0_i64, 1, 0, 2], &[2, 2]).unwrap();
    assert_eq!(message(gather(&x, 0, &index)), "gather: index 2 at position [1, 1] is not below 2");
    let negative = Tensor::from_slice(&device, &[0_i64, -4], &[2]).unwrap();
    assert_eq!(
        message(index_select(&x, 1, &negative)),
        "index_select: index -4 at position [1] is not below 3"
    );
    assert_eq!(
        message(scatter_add(x.clone(), 1, &index, &x)),
        "scatter_add: src is [2, 3], index [2, 2]"
    );
    assert_eq!(message(gather(&x, 1, &negative)), "gather: index [2] does not fit [2, 3] along 1");
    assert_eq!(message(index_select(&x, 0, &x)), "index_select: ids are a list, got [2, 3]");
    assert_eq!(
        message(index_add(x.clone(), 0, &Tensor::zeros(&device, DType::I64, &[3]).unwrap(), &x)),
        "index_add: 3 ids along dim 0 of [2, 3] need a source of [3, 3], got [2, 3]"
    );
    let ids = Tensor::from_slice(&device, &[0_i64, 3], &[1, 2]).unwrap();
    assert_eq!(message(ids.one_hot(3)), "one_hot: index 3 at position [1] is not below 3");
    assert_eq!(message(gather(&x, 0, &x)), "gather: takes integer indices, got f32");
}
