//! An update rule of a user's, which several tests train with.

use ferrotron_nn::{StateSpec, UpdateRule, UpdateStep};
use ferrotron_tensor::{Result, Tensor};

/// Momentum by operations on tensors, for which the host reads the numbers of a step: what the kernel of
/// `OptimizerConfig::Sgd` does with a momentum of 0.9.
#[derive(Debug)]
pub struct HeavyBall {
    pub weight_decay: f64,
}

impl UpdateRule for HeavyBall {
    fn name(&self) -> &'static str {
        "heavy_ball"
    }

    fn states(&self, _dims: &[usize]) -> Vec<StateSpec> {
        vec![StateSpec::per_element("velocity")]
    }

    fn update(
        &self,
        weights: &mut Tensor,
        gradient: &Tensor,
        states: &mut [&mut Tensor],
        step: &UpdateStep,
    ) -> Result<()> {
        let decay = step.weight_decay(self.weight_decay);
        let gradient = gradient.add(&weights.mul_scalar(decay)?)?;
        let velocity = states[0].mul_scalar(0.9)?.add(&gradient)?;
        states[0].copy_from(&velocity)?;
        weights.copy_from(&weights.sub(&velocity.mul_scalar(step.lr()?)?)?)
    }
}
