//! Gradients of gated linear units. They save x, (.., 2F); what reads the result computes it again from x.

use ferrotron_tensor::ops::glu::{self as kernels, GluKind, glu_backward};
use ferrotron_tensor::{Result, Tensor};

use crate::{Backward, Cotangents, InputGrads, Saved, Var, forward_span};

struct GluBackward {
    kind: GluKind,
    x: Saved,
}

impl Backward for GluBackward {
    fn name(&self) -> &'static str {
        self.kind.name()
    }

    fn saved(&self) -> Vec<Tensor> {
        self.x.resident_tensor().into_iter().collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let GluBackward { kind, x } = *self;
        let value = x.value()?;
        drop(x); // so that the gradient may overwrite it
        dx.accumulate(0, glu_backward(kind, value, &dy.single()?)?)
    }
}

/// silu(gate) up, (.., F), for x (.., 2F).
pub(crate) fn swiglu(x: &Var) -> Result<Var> {
    glu(GluKind::SwiGlu, kernels::swiglu, x)
}

/// gelu(gate) up, (.., F), for x (.., 2F), with GELU in its tanh form.
pub(crate) fn geglu(x: &Var) -> Result<Var> {
    glu(GluKind::GeGlu, kernels::geglu, x)
}

fn glu(kind: GluKind, value: fn(&Tensor) -> Result<Tensor>, x: &Var) -> Result<Var> {
    let _span = forward_span(kind.name());
    let saved = x.save();
    let y = Var::record(&[x], value(x.value())?, || GluBackward { kind, x: saved.clone() })?;
    Ok(y.with_recompute(move || value(&saved.value()?)))
}
