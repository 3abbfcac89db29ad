//! Helpers of the kernels' tests: inputs, conversions between tensors and memory, comparisons.

use ferrotron_cuda::arguments::{IndexType, Layout, Place as DevicePlace, Step};
use ferrotron_cuda::kernels::ElementType;
use ferrotron_tensor::{DType, Device, Element, RandomKey, ShardSpec, Tensor, dispatch_any};
use std::sync::OnceLock;

pub const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

pub fn element(dtype: DType) -> ElementType {
    dtype.into()
}

/// Relative error of storing in `dtype` what is computed in its accumulator.
pub fn rounding(dtype: DType) -> f64 {
    if dtype == dtype.accumulator() { 0.0 } else { dtype.epsilon() }
}

/// One device, so that all tensors are on it.
pub fn device() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(|| Device::cpu(1).unwrap()).clone()
}

/// `n` numbers on [-2, 2), multiples of 1/64, so that every dtype represents them.
pub fn values(n: usize, seed: u64) -> Vec<f64> {
    let key = RandomKey::new(seed, 0, "kernels");
    (0..n as u64).map(|i| (key.uniform(i) * 256.0).floor() / 64.0 - 2.0).collect()
}

pub fn tensor(dtype: DType, dims: &[usize], values: &[f64]) -> Tensor {
    Tensor::from_slice(&device(), values, dims).unwrap().cast(dtype).unwrap()
}

/// Random numbers of [`values`] as a tensor.
pub fn random(dtype: DType, dims: &[usize], seed: u64) -> Tensor {
    tensor(dtype, dims, &values(dims.iter().product(), seed))
}

/// A bias of attention scores that hides every fifth key, and every key of some queries if it has a row for each.
pub fn hiding(dtype: DType, dims: &[usize]) -> Tensor {
    let (rows, keys) = (dims[dims.len() - 2], dims[dims.len() - 1]);
    let list = values(dims.iter().product(), 9).into_iter().enumerate().map(|(i, x)| {
        let hidden = i % keys % 5 == 3 || rows > 1 && i / keys % rows % 9 == 4;
        if hidden { f64::NEG_INFINITY } else { x }
    });
    tensor(dtype, dims, &list.collect::<Vec<_>>())
}

/// The elements in row-major order.
pub fn bytes(x: &Tensor) -> Vec<u8> {
    dispatch_any!(x.dtype(), T => bytemuck::cast_slice(&x.to_vec::<T>().unwrap()).to_vec())
}

/// Memory for a tensor.
pub fn room(dtype: DType, n: usize) -> Vec<u8> {
    vec![0; n * dtype.size()]
}

/// Returns the contents of `memory` as a tensor.
pub fn read(dtype: DType, dims: &[usize], memory: &[u8]) -> Tensor {
    let make = || -> ferrotron_tensor::Result<Tensor> {
        dispatch_any!(dtype, T => {
            let elements: Vec<T> = bytemuck::pod_collect_to_vec(memory);
            Tensor::from_slice(&device(), &elements, dims)
        })
    };
    make().unwrap()
}

/// A list of elements as a tensor.
pub fn tensor_of<T: Element>(list: &[T]) -> Tensor {
    Tensor::from_slice(&device(), list, &[list.len()]).unwrap()
}

/// Dims and strides of views, broadcast to `dims`.
pub fn layout(dims: &[usize], operands: &[&Tensor]) -> Layout {
    let strides: Vec<Vec<isize>> = operands
        .iter()
        .map(|x| {
            let x = x.broadcast_to(dims).unwrap();
            x.layout().strides().iter().map(|&stride| stride as isize).collect()
        })
        .collect();
    let strides: Vec<&[isize]> = strides.iter().map(Vec::as_slice).collect();
    Layout::new(dims, &strides).unwrap()
}

/// A place as kernels take it.
pub fn device_place(place: &ShardSpec) -> DevicePlace {
    let pieces: Vec<_> = (0..place.dims().len()).map(|d| place.pieces(d)).collect();
    DevicePlace::new(place.global_dims(), &pieces).unwrap()
}

/// A dense tensor whose elements `variants` shows in several ways, as (memory, view): the memory begins where the view
/// does.
pub fn variants(x: &Tensor) -> Vec<(Vec<u8>, Tensor)> {
    let mut all = vec![(bytes(x), x.contiguous().unwrap())];
    if x.rank() > 1 {
        let reversed: Vec<usize> = (0..x.rank()).rev().collect();
        let base = x.permute(&reversed).unwrap().contiguous().unwrap();
        all.push((bytes(&base), base.permute(&reversed).unwrap()));
        // A gap behind each row, and an odd element before the first.
        let width = x.dims()[x.rank() - 1];
        let mut wide = x.dims().to_vec();
        *wide.last_mut().unwrap() = 1;
        let gap = Tensor::zeros(x.device(), x.dtype(), &wide).unwrap();
        let base = ferrotron_tensor::ops::concat::concat(&[&gap, x, &gap], -1).unwrap();
        let memory = bytes(&base)[x.dtype().size()..].to_vec();
        all.push((memory, base.narrow(-1, 1, width).unwrap()));
    }
    all
}

/// Blocks and threads for elementwise kernels: fewer threads than elements, so that each takes several.
pub fn elementwise(n: usize) -> ([usize; 3], [usize; 3]) {
    ([n.div_ceil(1024).clamp(1, 3), 1, 1], [256, 1, 1])
}

/// Blocks and threads for kernels that give each row a group of threads.
pub fn rowwise(rows: usize, width: usize) -> ([usize; 3], [usize; 3]) {
    if width <= 256 { ([rows.div_ceil(4), 1, 1], [32, 4, 1]) } else { ([rows, 1, 1], [128, 1, 1]) }
}

/// The elements of any dtype in f64.
pub fn numbers(x: &Tensor) -> Vec<f64> {
    x.cast(DType::F64).unwrap().to_vec().unwrap()
}

/// Asserts `|got - want| <= relative |want| + absolute` for every element; `what` names operation and shape.
pub fn assert_close(what: &str, got: &Tensor, want: &Tensor, relative: f64, absolute: f64) {
    let (dtype, dims) = (got.dtype(), got.dims().to_vec());
    assert_eq!((dtype, &dims[..]), (want.dtype(), want.dims()), "{what}");
    let (got, want) = (numbers(got), numbers(want));
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        let same = got == want || (got.is_nan() && want.is_nan());
        let tolerance = relative * want.abs() + absolute;
        assert!(
            same || (got - want).abs() <= tolerance,
            "{what} {dtype} {dims:?} at {i}: got {got}, want {want}, tolerance {tolerance:e}"
        );
    }
}

/// Asserts the same bits.
pub fn assert_same(what: &str, got: &Tensor, want: &Tensor) {
    assert_close(what, got, want, 0.0, 0.0);
}

/// Launches that draw random numbers: the key's words, and the step that kernels read.
pub fn draws(key: &RandomKey) -> (u64, Step) {
    let (words, number) = key.words();
    (words, Step { number, ..bytemuck::Zeroable::zeroed() })
}

/// Places that cut tensors in every way: whole, in pieces, and beyond 2^32 elements.
pub fn places() -> Vec<ShardSpec> {
    vec![
        ShardSpec::unsharded(&[1]),
        ShardSpec::unsharded(&[5, 33]),
        ShardSpec::unsharded(&[2, 3, 4, 5, 6]),
        ShardSpec::new(&[6, 5, 33], &[&[(1, 3)], &[(0, 5)], &[(0, 33)]]).unwrap(),
        ShardSpec::new(&[6, 5, 33], &[&[(0, 6)], &[(2, 1), (4, 1)], &[(3, 9), (20, 13)]]).unwrap(),
        ShardSpec::new(&[1 << 21, 1 << 14], &[&[(2_000_000, 3)], &[(5, 70)]]).unwrap(),
    ]
}

/// The type of a tensor of indices.
pub fn index_type(ids: &Tensor) -> i32 {
    match ids.dtype() {
        DType::U8 => IndexType::U8 as i32,
        DType::U32 => IndexType::U32 as i32,
        _ => IndexType::I64 as i32,
    }
}

pub const INDICES: [DType; 3] = [DType::U8, DType::U32, DType::I64];
