//! The search for the operation that makes a NaN, in the forward pass and in backward.
//!
//! Each check reads one number from the device.

use ferrotron_tensor::{Error, Result, Tensor};
use std::collections::BTreeSet;

use crate::engine::nan::{detecting, is_nan, set_detecting, take_nan_parameter};
use crate::engine::node::{Node, Pending, Source};

/// Parameters that an error names.
const MOST_NAMES: usize = 3;

/// Runs `f`, which may hold forward and backward passes, and makes the first NaN an error. The error names the
/// operation, the result or operand that is NaN, and the parameters nearest to the operation, whose names begin with the
/// path of their module. Infinities pass: masks and overflowing losses hold them.
///
/// Only recorded operations are checked, each of them by reading a number from the device: use it to find a NaN, not to
/// train.
///
/// ```
/// use ferrotron_autograd::{Leaf, detect_anomaly};
/// use ferrotron_tensor::{Device, Tensor};
/// let w = Leaf::new("head.weight", Tensor::from_slice(&Device::cpu(1)?, &[0.0_f32], &[1])?);
/// let error = detect_anomaly(|| w.var()?.sqrt()?.mul(&w.var()?)?.sum_all()?.backward()).unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "detect_anomaly: backward of sqrt: the gradient of operand 0, f32 [1], is NaN; the nearest parameter is 'head.weight'"
/// );
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn detect_anomaly<R>(f: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            set_detecting(self.0);
        }
    }
    let _restore = Restore(set_detecting(true));
    f()
}

/// Errors if this thread looks for NaN and a result of the operation has one.
pub(crate) fn check_forward(node: &Node, values: &[Tensor]) -> Result<()> {
    if !detecting() {
        return Ok(());
    }
    for (i, value) in values.iter().enumerate() {
        if is_nan(value)? {
            let (name, dtype, dims) = (node.name, value.dtype(), value.dims());
            return Err(found(node, format!("{name}: result {i}, {dtype} {dims:?}, is NaN")));
        }
    }
    Ok(())
}

/// The result `done` of the node's backward, or an error if this thread looks for NaN and the gradient of an operand has
/// one. An error for another reason stays as it is.
pub(crate) fn check_backward(node: &Node, pending: &Pending, done: Result<()>) -> Result<()> {
    if !detecting() {
        return done;
    }
    let nan_leaf = take_nan_parameter();
    if done.is_err() && nan_leaf.is_none() {
        return done;
    }
    for (i, (source, spec)) in node.inputs.iter().enumerate() {
        let nan = match source {
            Some(Source::Node(node, output)) => {
                pending.get(node, *output).map_or(Ok(false), is_nan)?
            }
            Some(Source::Leaf(leaf)) => nan_leaf == Some(leaf.address()),
            None => false,
        };
        if nan {
            let (name, dtype, dims) = (node.name, spec.dtype, &spec.dims);
            let what = format!(
                "backward of {name}: the gradient of operand {i}, {dtype} {dims:?}, is NaN"
            );
            return Err(found(node, what));
        }
    }
    done
}

fn found(node: &Node, what: String) -> Error {
    let names = nearest_parameters(node);
    let place = match &names[..] {
        [] => String::new(),
        [name] => format!("; the nearest parameter is '{name}'"),
        names => format!("; the nearest parameters are '{}'", names.join("', '")),
    };
    Error::value("detect_anomaly", format!("{what}{place}"))
}

/// The parameters from which the fewest operations lead to the node.
fn nearest_parameters(node: &Node) -> Vec<String> {
    let mut seen = BTreeSet::new();
    let mut level: Vec<&Node> = vec![node];
    while !level.is_empty() {
        let sources = || level.iter().flat_map(|node| &node.inputs).filter_map(|(s, _)| s.as_ref());
        let names: BTreeSet<String> = sources()
            .filter_map(|source| match source {
                Source::Leaf(leaf) => Some(leaf.name().to_string()),
                Source::Node(..) => None,
            })
            .collect();
        if !names.is_empty() {
            return names.into_iter().take(MOST_NAMES).collect();
        }
        level = sources()
            .filter_map(|source| match source {
                Source::Node(node, _) if seen.insert(node.seq) => Some(&**node),
                _ => None,
            })
            .collect();
    }
    vec![]
}
