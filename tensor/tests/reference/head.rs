//! The gradients of a loss, as it keeps them or its logits.

use ferrotron_tensor::ops::cross_entropy::CrossEntropyConfig;
use ferrotron_tensor::ops::linear_cross_entropy::{
    Gradients, HeadWeights, Kept, WantedGradients, linear_cross_entropy_backward,
};
use ferrotron_tensor::ops::matmul::Accum;
use ferrotron_tensor::ops::pointwise::add_assign;
use ferrotron_tensor::{Result, Tensor};

pub const ALL: WantedGradients = WantedGradients { input: true, weight: true, bias: false };

/// dx of `scale` times the loss. dW is added to `dweight`.
pub fn gradients(
    kept: Kept,
    (x, head, targets): (&Tensor, HeadWeights, &Tensor),
    lse: &Tensor,
    config: &CrossEntropyConfig,
    scale: f64,
    dweight: &mut Tensor,
) -> Result<Tensor> {
    let scale = Tensor::full(x.device(), lse.dtype(), &[], scale)?;
    let mut dx = None;
    match kept {
        Kept::Nothing => {}
        Kept::Gradients(formed) => {
            let formed = formed.scaled(&scale)?;
            add_assign(dweight, &formed.weight.expect("dW is wanted"))?;
            dx = formed.input;
        }
        Kept::Logits(kept) => {
            let mut take = |found| {
                dx = Some(found);
                Ok(())
            };
            let weight = Some((dweight, Accum::Add));
            let wanted = Gradients { scale: &scale, input: Some(&mut take), weight, bias: None };
            linear_cross_entropy_backward(kept, x, head, targets, lse, config, wanted)?;
        }
    }
    Ok(dx.expect("dx is handed over"))
}
