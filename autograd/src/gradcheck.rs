//! Gradient checks by finite differences.
//!
//! Central differences in f64 with step h = cbrt(eps) max(1, |x|), which balances truncation against rounding (Press
//! et al., Numerical Recipes, section 5.7). The result is weighted by a random cotangent rather than summed: the sum
//! of a softmax is constant and would hide any error.

use ferrotron_tensor::{DType, Device, Error, RandomKey, Result, ShardSpec, Tensor};
use std::fmt;

use crate::engine::calls::logged;
use crate::{Leaf, Var, WeightGrads, backward, no_grad};

/// Options of [`gradcheck`].
#[derive(Debug, Clone, Copy)]
pub struct GradcheckOptions {
    /// Allowed difference relative to the larger of the two.
    pub relative: f64,
    /// Allowed absolute difference.
    pub absolute: f64,
    /// Size limit for exhaustive checks. If inputs and outputs have at most this many elements, the full Jacobian is
    /// compared. Otherwise each element of an input of at most this size is compared under a random cotangent, and
    /// larger inputs along random directions.
    pub full: usize,
    /// Number of random directions for a large input.
    pub directions: usize,
    /// Seed of cotangents and directions.
    pub seed: u64,
}

impl Default for GradcheckOptions {
    fn default() -> Self {
        GradcheckOptions { relative: 1e-6, absolute: 1e-8, full: 64, directions: 4, seed: 0 }
    }
}

/// A difference between analytic and numeric gradient.
#[derive(Debug, Clone)]
pub struct Mismatch {
    /// Name of the leaf ("input 0" in [`gradcheck`]).
    pub input: String,
    /// Element of that leaf, or `None` for a random direction.
    pub element: Option<usize>,
    /// The derivative computed by backward.
    pub analytic: f64,
    /// The derivative computed by central differences.
    pub numeric: f64,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = self
            .element
            .map_or("along a random direction".to_string(), |element| format!("element {element}"));
        write!(
            f,
            "{}, {place}: analytic {:.12e}, numeric {:.12e}",
            self.input, self.analytic, self.numeric
        )
    }
}

/// Checks the gradient of `f` with respect to each of `inputs` (f64 tensors) by finite differences.
///
/// Errors if `f` fails, an input is not f64, or a gradient differs; the message names input, element and both values.
///
/// ```
/// use ferrotron_autograd::{GradcheckOptions, InputGrads, Var, gradcheck};
/// use ferrotron_tensor::{Device, Result, Tensor};
/// let device = Device::cpu(1)?;
/// let x = Tensor::from_slice(&device, &[0.3_f64, -1.2, 2.0], &[3])?;
/// gradcheck(|x| x[0].tanh()?.mul(&x[0]), &[x.clone()], &GradcheckOptions::default())?;
///
/// // x^2 with a wrong gradient.
/// let wrong = |x: &[Var]| -> Result<Var> {
///     let saved = x[0].save();
///     Var::record(&[&x[0]], x[0].value().square()?, || {
///         move |dy: Tensor, dx: &mut InputGrads| dx.accumulate(0, dy.mul(&saved.value()?)?)
///     })
/// };
/// let report = gradcheck(wrong, &[x], &GradcheckOptions::default()).unwrap_err().to_string();
/// assert!(report.contains("input 0, element 0: analytic 3.0"));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn gradcheck(
    f: impl Fn(&[Var]) -> Result<Var>,
    inputs: &[Tensor],
    options: &GradcheckOptions,
) -> Result<()> {
    let leaves = inputs
        .iter()
        .enumerate()
        .map(|(i, input)| Ok(Leaf::new(format!("input {i}"), input.copy()?)))
        .collect::<Result<Vec<_>>>()?;
    gradcheck_leaves(
        || f(&leaves.iter().map(Leaf::var).collect::<Result<Vec<_>>>()?),
        &leaves,
        options,
    )
}

/// Checks the gradient of `f` with respect to `leaves`, for example a model's parameters. Their values are perturbed
/// and then restored. Random layers that count their calls ([`CallCounts`](crate::CallCounts)) draw the same numbers
/// in each evaluation.
pub fn gradcheck_leaves(
    f: impl Fn() -> Result<Var>,
    leaves: &[Leaf],
    options: &GradcheckOptions,
) -> Result<()> {
    if let Some(leaf) = leaves.iter().find(|leaf| leaf.dtype() != DType::F64) {
        return Err(Error::dtype(
            "gradcheck",
            format!("needs f64, '{}' is {}", leaf.name(), leaf.dtype()),
        ));
    }
    let f = || {
        let (output, calls) = logged(&f);
        calls.rewind(); // the next call draws the same random numbers
        output
    };
    let mismatches = mismatches(&f, leaves, options)?;
    match mismatches.first() {
        None => Ok(()),
        Some(first) => Err(Error::value(
            "gradcheck",
            format!("{first} ({} mismatches in all)", mismatches.len()),
        )),
    }
}

fn mismatches(
    f: &impl Fn() -> Result<Var>,
    leaves: &[Leaf],
    options: &GradcheckOptions,
) -> Result<Vec<Mismatch>> {
    let output = no_grad(f)?;
    let (numel, dims) = (output.value().numel(), output.dims().to_vec());
    let device = output.device().clone();
    let inputs: usize = leaves.iter().map(Leaf::numel).sum();
    let cotangents: Vec<Tensor> = if numel <= options.full && inputs <= options.full {
        let unit = |i: usize| {
            let mut values = vec![0.0; numel];
            values[i] = 1.0;
            Tensor::from_slice(&device, &values, &dims)
        };
        (0..numel).map(unit).collect::<Result<_>>()?
    } else {
        vec![random(&device, &dims, options.seed, "cotangent")?]
    };
    let mut found = Vec::new();
    for cotangent in &cotangents {
        let analytic = gradients(f, leaves, cotangent)?;
        // <f, cotangent> as a function of the leaves.
        let value = || Ok::<f64, Error>(dot(&no_grad(f)?.value().to_f64()?, &cotangent.to_f64()?));
        for (leaf, gradient) in leaves.iter().zip(&analytic) {
            compare(leaf, gradient, &value, options, &mut found)?;
        }
    }
    Ok(found)
}

fn gradients(
    f: &impl Fn() -> Result<Var>,
    leaves: &[Leaf],
    cotangent: &Tensor,
) -> Result<Vec<Vec<f64>>> {
    leaves.iter().for_each(Leaf::zero_gradient);
    backward(&[(&f()?, cotangent.clone())], WeightGrads::Now)?.run()?;
    leaves
        .iter()
        .map(|leaf| leaf.gradient()?.map_or(Ok(vec![0.0; leaf.numel()]), |g| g.to_f64()))
        .collect()
}

fn compare(
    leaf: &Leaf,
    gradient: &[f64],
    value: &impl Fn() -> Result<f64>,
    options: &GradcheckOptions,
    found: &mut Vec<Mismatch>,
) -> Result<()> {
    let original = leaf.value()?.copy()?;
    let base = original.to_f64()?;
    // The derivative along `direction`, with a step scaled to the magnitude of the point.
    let derivative = |direction: &dyn Fn(usize) -> f64, size: f64| -> Result<f64> {
        let h = f64::EPSILON.cbrt() * size.max(1.0);
        let at = |sign: f64| -> Result<f64> {
            let moved: Vec<f64> =
                base.iter().enumerate().map(|(i, x)| x + sign * h * direction(i)).collect();
            leaf.set_value(&Tensor::from_slice(leaf.device(), &moved, leaf.dims())?)?;
            value()
        };
        let difference = at(1.0)? - at(-1.0)?;
        leaf.set_value(&original)?;
        Ok(difference / (2.0 * h))
    };
    let mut judge = |element: Option<usize>, analytic: f64, numeric: f64| {
        let allowed = options.absolute + options.relative * analytic.abs().max(numeric.abs());
        let close = (analytic - numeric).abs() <= allowed; // false for NaN
        if !close {
            found.push(Mismatch { input: leaf.name().to_string(), element, analytic, numeric });
        }
    };
    if leaf.numel() <= options.full {
        for element in 0..leaf.numel() {
            let unit = |i: usize| if i == element { 1.0 } else { 0.0 };
            judge(Some(element), gradient[element], derivative(&unit, base[element].abs())?);
        }
    } else {
        for n in 0..options.directions {
            let direction =
                random(leaf.device(), leaf.dims(), options.seed, &format!("direction {n}"))?
                    .to_f64()?;
            judge(None, dot(gradient, &direction), derivative(&|i| direction[i], 1.0)?);
        }
    }
    Ok(())
}

fn random(device: &Device, dims: &[usize], seed: u64, site: &str) -> Result<Tensor> {
    let key = RandomKey::new(seed, 0, site);
    ferrotron_tensor::ops::random::normal(
        device,
        DType::F64,
        &ShardSpec::unsharded(dims),
        &key,
        0.0,
        1.0,
    )
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
