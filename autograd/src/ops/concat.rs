//! Gradient of the concatenation: the slice of each operand.

use ferrotron_tensor::ops::concat::concat as concat_values;
use ferrotron_tensor::{Result, Tensor};

use crate::engine::node::Named;
use crate::{InputGrads, Var, forward_span};

/// Concatenates `parts` along `dim`.
pub fn concat(parts: &[&Var], dim: isize) -> Result<Var> {
    let _span = forward_span("concat");
    let values: Vec<&Tensor> = parts.iter().map(|part| part.value()).collect();
    let value = concat_values(&values, dim)?;
    let sizes = values.iter().map(|value| value.dim(dim)).collect::<Result<Vec<_>>>()?;
    Var::record(parts, value, || {
        Named("concat", move |dy: Tensor, dx: &mut InputGrads| {
            dy.split(&sizes, dim)?
                .into_iter()
                .enumerate()
                .try_for_each(|(i, part)| dx.accumulate(i, part))
        })
    })
}
