//! An update rule of a user's for whole matrices, which several tests train with.

use ferrotron_nn::{OptimizerConfig, ShardUnit, StateSpec, UpdateRule, UpdateStep};
use ferrotron_tensor::{Result, Tensor};

/// Momentum of which a Newton-Schulz iteration makes a matrix with singular values near 1; Lion for all but hidden
/// matrices.
#[derive(Debug)]
pub struct Orthogonalized;

impl UpdateRule for Orthogonalized {
    fn name(&self) -> &'static str {
        "orthogonalized"
    }

    fn shard_unit(&self) -> ShardUnit {
        ShardUnit::HiddenMatrices
    }

    fn fallback(&self) -> Option<Box<dyn UpdateRule>> {
        Some(OptimizerConfig::Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.1 }.rule())
    }

    fn states(&self, _dims: &[usize]) -> Vec<StateSpec> {
        vec![StateSpec::per_element("smoothed")]
    }

    fn update(
        &self,
        weights: &mut Tensor,
        gradient: &Tensor,
        states: &mut [&mut Tensor],
        step: &UpdateStep,
    ) -> Result<()> {
        let smoothed = states[0].mul_scalar(0.9)?.add(gradient)?;
        states[0].copy_from(&smoothed)?;
        let direction = step.on_whole_matrix(&smoothed, orthogonalize)?;
        let kept = weights.mul_scalar(1.0 - step.lr()? * step.weight_decay(0.1))?;
        weights.copy_from(&kept.sub(&direction.mul_scalar(step.lr()?)?)?)
    }
}

/// X = 1.5 X - 0.5 X X^T X brings singular values below sqrt(3) to 1: Bjorck and Bowie, "An iterative algorithm for
/// computing the best estimate of an orthogonal matrix", 1971.
fn orthogonalize(matrix: &Tensor) -> Result<Tensor> {
    let norm = matrix.square()?.sum_all()?.sqrt()?.add_scalar(1e-12)?;
    let mut x = matrix.div(&norm)?;
    for _ in 0..6 {
        let gram = x.matmul(&x.transpose(0, 1)?)?;
        x = x.mul_scalar(1.5)?.sub(&gram.matmul(&x)?.mul_scalar(0.5)?)?;
    }
    Ok(x)
}
