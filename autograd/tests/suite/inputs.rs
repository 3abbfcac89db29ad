//! Sample inputs of the op table, and the views through which operations see them.

use ferrotron_autograd::{Leaf, Var, WeightGrads, backward};
use ferrotron_tensor::{DType, Device, Result, Tensor};

use crate::table::{Domain, OpCase, Shapes};

/// The view through which an operation sees a leaf.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Seen {
    /// The leaf itself.
    Contiguous,
    /// All dims reversed in memory.
    Transposed,
    /// The inner part of a leaf that is larger by two in every dim.
    Narrowed,
    /// Stretched from a leaf that has one element in its first dim.
    Broadcast,
}

impl Seen {
    pub const ALL: [Seen; 4] =
        [Seen::Contiguous, Seen::Transposed, Seen::Narrowed, Seen::Broadcast];

    /// The dims of the leaf that is seen as `dims`.
    pub fn leaf_dims(self, dims: &[usize]) -> Vec<usize> {
        match self {
            Seen::Contiguous => dims.to_vec(),
            Seen::Transposed => dims.iter().rev().copied().collect(),
            Seen::Narrowed => dims.iter().map(|size| size + 2).collect(),
            Seen::Broadcast => {
                let mut leaf = dims.to_vec();
                leaf.first_mut().into_iter().for_each(|size| *size = 1);
                leaf
            }
        }
    }

    /// The view of dims `dims` of a leaf of dims [`Seen::leaf_dims`].
    pub fn view(self, leaf: &Var, dims: &[usize]) -> Result<Var> {
        match self {
            Seen::Contiguous => Ok(leaf.clone()),
            Seen::Transposed => leaf.permute(&(0..dims.len()).rev().collect::<Vec<_>>()),
            Seen::Narrowed => dims
                .iter()
                .enumerate()
                .try_fold(leaf.clone(), |view, (d, &size)| view.narrow(d as isize, 1, size)),
            Seen::Broadcast => leaf.broadcast_to(dims),
        }
    }
}

/// Sample values of input `input`: multiples of 1/128 of few bits, so that every dtype represents them. No two are
/// equal up to 250 elements in all, so that a maximum is far from its kinks.
pub fn values(domain: Domain, input: usize, count: usize) -> Vec<f64> {
    let any = |i: usize| (2 * ((37 * i + 83 * input + 11) % 251) + 1) as f64 / 128.0 - 2.0;
    (0..count)
        .map(|i| match domain {
            // Inputs differ by an offset that no two multiples of 1/64 have.
            Domain::Any => {
                any(i) + if input % 2 == 1 && any(i).abs() > 0.5 { 1.0 / 128.0 } else { 0.0 }
            }
            Domain::Positive => 0.25 + any(i).abs() * 0.75,
        })
        .collect()
}

/// A floating-point tensor of any dtype.
pub fn tensor(device: &Device, dtype: DType, dims: &[usize], values: &[f64]) -> Result<Tensor> {
    Tensor::from_slice(device, values, dims)?.cast(dtype)
}

/// The sample inputs of a row, as the leaves from which `seen` makes them.
pub fn samples(
    case: &OpCase,
    shapes: Shapes,
    seen: Seen,
    device: &Device,
    dtype: DType,
) -> Result<Vec<Tensor>> {
    let sample = |(input, dims): (usize, &&[usize])| {
        let dims = seen.leaf_dims(dims);
        let count = dims.iter().product();
        tensor(device, dtype, &dims, &values(case.domain, input, count))
    };
    shapes.iter().enumerate().map(sample).collect()
}

/// A cotangent for a result: as many distinct numbers as there may be.
pub fn cotangent(of: &Var) -> Result<Tensor> {
    let values = values(Domain::Any, 5, of.value().numel());
    tensor(of.device(), of.dtype(), of.dims(), &values)
}

/// The value of `f` at `inputs` and the gradient of each under [`cotangent`].
pub fn run(f: &dyn Fn(&[Var]) -> Result<Var>, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    let leaf = |(i, input): (usize, &Tensor)| Leaf::new(format!("input {i}"), input.clone());
    let leaves: Vec<Leaf> = inputs.iter().enumerate().map(leaf).collect();
    let y = f(&leaves.iter().map(Leaf::var).collect::<Result<Vec<_>>>()?)?;
    backward(&[(&y, cotangent(&y)?)], WeightGrads::Now)?.run()?;
    let mut all = vec![y.into_value()];
    for leaf in &leaves {
        // An input that the result does not depend on at all has gradient 0.
        let zeros = || Tensor::zeros(leaf.device(), leaf.dtype(), leaf.dims());
        all.push(leaf.gradient()?.map_or_else(zeros, Ok)?);
    }
    Ok(all)
}

/// Everything of a tensor that must not differ: f64 represents every value of every float.
pub fn bits(x: &Tensor) -> Result<Vec<u64>> {
    Ok(x.to_f64()?.into_iter().map(f64::to_bits).collect())
}

/// Names element `i` of [`run`]'s answer in a report.
pub fn which(i: usize) -> String {
    if i == 0 { "value".into() } else { format!("gradient of input {}", i - 1) }
}

/// Panics with every failure on a line of its own.
pub fn report(failures: &[String]) {
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}
