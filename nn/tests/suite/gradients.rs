//! Gradients that tests of the optimizers make up, and the values that steps then leave.

use ferrotron_nn::Param;
use ferrotron_tensor::{Result, Tensor};

/// Gives element `i` of parameter `k` the gradient `gradient(k, i)`, in their order; returns what is kept of them.
pub fn give_gradients(
    params: &[Param],
    mut gradient: impl FnMut(usize, usize) -> f64,
) -> Result<Vec<Vec<f64>>> {
    let mut all = Vec::new();
    for (k, param) in params.iter().enumerate() {
        let leaf = param.leaf();
        let values: Vec<f64> = (0..leaf.numel()).map(|i| gradient(k, i)).collect();
        let values = Tensor::from_slice(leaf.device(), &values, leaf.dims())?.cast(leaf.dtype())?;
        leaf.zero_gradient();
        leaf.accumulate_with(|gradient, _| gradient.copy_from(&values.cast(gradient.dtype())?))?;
        all.push(leaf.gradient()?.expect("just set").to_f64()?);
    }
    Ok(all)
}

/// The values of all parameters.
pub fn values(params: &[Param]) -> Result<Vec<Vec<f64>>> {
    params.iter().map(|param| param.leaf().value()?.to_f64()).collect()
}
