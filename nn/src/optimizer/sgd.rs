//! Gradient descent with momentum, also in Nesterov's form, as `torch.optim.SGD`.

use ferrotron_tensor::ops::rounded::Rounded;
use ferrotron_tensor::ops::sgd::{Sgd, sgd};
use ferrotron_tensor::{Result, Tensor};

use super::check::{fractions, non_negative};
use super::rule::{UpdateRule, UpdateStep, updates_in_one_pass};
use super::state::StateSpec;

impl UpdateRule for Sgd {
    fn name(&self) -> &'static str {
        "sgd"
    }

    fn validate(&self) -> Result<()> {
        fractions(&[("momentum", self.momentum)])?;
        non_negative(&[("weight decay", self.weight_decay)])
    }

    fn states(&self, _dims: &[usize]) -> Vec<StateSpec> {
        vec![StateSpec::per_element("momentum")]
    }

    fn is_fused(&self) -> bool {
        true
    }

    updates_in_one_pass!(pass);
}

/// One pass over weights, gradients and momentum, and over the rounded weights if there are any.
fn pass(
    rule: &Sgd,
    weights: &mut Tensor,
    gradient: &Tensor,
    states: &mut [&mut Tensor],
    rounded: Option<Rounded>,
    step: &UpdateStep,
) -> Result<()> {
    let config = Sgd { weight_decay: step.weight_decay(rule.weight_decay), ..*rule };
    sgd(&config, step.device_params(), weights, gradient, states[0], rounded)
}
