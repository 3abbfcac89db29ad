//! Lion, whose steps are signs of a mean of gradients: Chen et al., arXiv 2302.06675.

use ferrotron_tensor::ops::lion::{Lion, lion};
use ferrotron_tensor::ops::rounded::Rounded;
use ferrotron_tensor::{Result, Tensor};

use super::check::{fractions, non_negative};
use super::rule::{UpdateRule, UpdateStep, updates_in_one_pass};
use super::state::StateSpec;

impl UpdateRule for Lion {
    fn name(&self) -> &'static str {
        "lion"
    }

    fn validate(&self) -> Result<()> {
        fractions(&[("beta1", self.beta1), ("beta2", self.beta2)])?;
        non_negative(&[("weight decay", self.weight_decay)])
    }

    fn states(&self, _dims: &[usize]) -> Vec<StateSpec> {
        vec![StateSpec::per_element("exp_avg")]
    }

    fn is_fused(&self) -> bool {
        true
    }

    updates_in_one_pass!(pass);
}

/// One pass over weights, gradients and momentum, and over the rounded weights if there are any.
fn pass(
    rule: &Lion,
    weights: &mut Tensor,
    gradient: &Tensor,
    states: &mut [&mut Tensor],
    rounded: Option<Rounded>,
    step: &UpdateStep,
) -> Result<()> {
    let config = Lion { weight_decay: step.weight_decay(rule.weight_decay), ..*rule };
    lion(&config, step.device_params(), weights, gradient, states[0], rounded)
}
