//! AdamW: Loshchilov and Hutter, arXiv 1711.05101, as `torch.optim.AdamW`.

use ferrotron_tensor::ops::adamw::{AdamW, adamw};
use ferrotron_tensor::ops::rounded::Rounded;
use ferrotron_tensor::{Result, Tensor};

use super::check::{fractions, non_negative};
use super::rule::{UpdateRule, UpdateStep, updates_in_one_pass};
use super::state::StateSpec;

impl UpdateRule for AdamW {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn validate(&self) -> Result<()> {
        fractions(&[("beta1", self.beta1), ("beta2", self.beta2)])?;
        non_negative(&[("eps", self.eps), ("weight decay", self.weight_decay)])
    }

    fn states(&self, _dims: &[usize]) -> Vec<StateSpec> {
        vec![StateSpec::per_element("exp_avg"), StateSpec::per_element("exp_avg_sq")]
    }

    fn is_fused(&self) -> bool {
        true
    }

    updates_in_one_pass!(pass);
}

/// One pass over weights, gradients and moments, and over the rounded weights if there are any.
fn pass(
    rule: &AdamW,
    weights: &mut Tensor,
    gradient: &Tensor,
    states: &mut [&mut Tensor],
    rounded: Option<Rounded>,
    step: &UpdateStep,
) -> Result<()> {
    let config = AdamW { weight_decay: step.weight_decay(rule.weight_decay), ..*rule };
    let (mean, square) = states.split_at_mut(1);
    let (m, v) = (&mut *mean[0], &mut *square[0]);
    adamw(&config, step.device_params(), weights, gradient, m, v, rounded)
}
