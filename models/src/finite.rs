//! Names the weights that explain a loss or a logit that is not finite.

use ferrotron_nn::Module;
use ferrotron_tensor::ops::sq_norm::all_finite;
use ferrotron_tensor::{Result, Tensor};

/// Returns one line about the first weight of `model` that is NaN or infinite: its name, index and value. Weights come
/// in the order of the forward pass. `None` if all are finite.
///
/// Reads every weight once. Only for a model whose weights are whole on this rank.
pub fn first_not_finite(model: &impl Module) -> Result<Option<String>> {
    for param in model.params() {
        if let Some(found) = not_finite_in(param.name(), &param.leaf().value()?)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Returns the line of [`first_not_finite`] about the weight `name` if it is NaN or infinite somewhere.
///
/// # Errors
/// Those of the device.
pub fn not_finite_in(name: &str, value: &Tensor) -> Result<Option<String>> {
    let (dims, flat) = (value.dims().to_vec(), value.reshape(&[value.numel()])?);
    if all_finite(&flat)? {
        return Ok(None);
    }
    let numbers = flat.to_f64()?;
    let Some(at) = numbers.iter().position(|x| !x.is_finite()) else { return Ok(None) };
    let (mut index, mut rest) = (vec![0; dims.len()], at);
    for (index, dim) in index.iter_mut().zip(&dims).rev() {
        (*index, rest) = (rest % dim, rest / dim);
    }
    Ok(Some(format!("the weights are damaged: {name}{index:?} is {}", numbers[at])))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::gpt::{Gpt, GptConfig};
    use ferrotron_nn::Scope;
    use ferrotron_tensor::{DType, Device};

    #[test]
    fn the_first_weight_is_named_with_index_and_value() -> Result<()> {
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let device = Device::cpu(1)?;
            let gpt = Gpt::new(&Scope::new(&device, dtype, 3), &GptConfig::gpt2(11, 2, 8, 2, 4))?;
            assert_eq!(first_not_finite(&gpt)?, None);
            for (name, flat, wanted) in [
                ("blocks.1.norm_2.bias", 5, "blocks.1.norm_2.bias[5] is inf"),
                ("blocks.0.mlp.fc.weight", 19, "blocks.0.mlp.fc.weight[2, 3] is inf"),
            ] {
                let params = gpt.params();
                let param = params.iter().find(|param| param.name() == name).unwrap();
                let mut values = param.leaf().value()?.to_f64()?;
                values[flat] = f64::INFINITY;
                let values = Tensor::from_slice(&device, &values, param.leaf().dims())?;
                param.leaf().set_value(&values.cast(dtype)?)?;
                let found = first_not_finite(&gpt)?.unwrap();
                assert_eq!(found, format!("the weights are damaged: {wanted}"));
            }
        }
        Ok(())
    }
}
