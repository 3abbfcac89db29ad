//! An update rule of a user's with states of other shapes and dtypes than the weights.

use ferrotron_nn::{ShardUnit, StateSpec, UpdateRule, UpdateStep};
use ferrotron_tensor::ops::reduce::KeepDims;
use ferrotron_tensor::{DType, Result, Tensor};

/// Momentum in bf16. In matrices it is divided by the root of a mean of its squares in each row.
#[derive(Debug)]
pub struct RowScaled;

impl UpdateRule for RowScaled {
    fn name(&self) -> &'static str {
        "row_scaled"
    }

    fn shard_unit(&self) -> ShardUnit {
        ShardUnit::Parameters
    }

    fn states(&self, dims: &[usize]) -> Vec<StateSpec> {
        let momentum = StateSpec::per_element("momentum").with_dtype(DType::BF16);
        match dims.len() {
            0 | 1 => vec![momentum],
            _ => vec![momentum, StateSpec::per_row("squares")],
        }
    }

    fn update(
        &self,
        weights: &mut Tensor,
        gradient: &Tensor,
        states: &mut [&mut Tensor],
        step: &UpdateStep,
    ) -> Result<()> {
        let block = step.block()?;
        let momentum = states[0].cast(gradient.dtype())?.mul_scalar(0.9)?.add(gradient)?;
        states[0].copy_from(&momentum.cast(DType::BF16)?)?;
        let mut direction = momentum.reshape(block.dims())?;
        if let [_, squares] = states {
            let (own, all) = (block.dims().last(), block.global_dims().last());
            let mut sums = direction.square()?.sum(&[-1], KeepDims::Keep)?;
            if own < all {
                sums = step.sum_over_shards(sums)?;
            }
            let new = sums.mul_scalar(0.1 / *all.unwrap_or(&1) as f64)?;
            let mean = squares.reshape(new.dims())?.mul_scalar(0.9)?.add(&new)?;
            squares.copy_from(&mean.reshape(squares.dims())?)?;
            direction = direction.div(&mean.sqrt()?.add_scalar(1e-3)?)?;
        }
        let update = direction.reshape(weights.dims())?.mul_scalar(step.lr()?)?;
        weights.copy_from(&weights.sub(&update)?)
    }
}
