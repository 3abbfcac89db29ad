//! Gradients of the pointwise table: dx = dy f'(x), summed over the dims along which an operand was broadcast.

use ferrotron_tensor::ops::pointwise::{self as kernels, binary_backward, unary_backward};
use ferrotron_tensor::ops::table::{Binary, Saves, Unary};
use ferrotron_tensor::{Result, Tensor};

use crate::{Backward, Cotangents, InputGrads, Saved, Var, forward_span};

struct UnaryBackward {
    op: Unary,
    p: f64,
    saved: Option<Saved>,
}

impl Backward for UnaryBackward {
    fn name(&self) -> &'static str {
        self.op.name()
    }

    fn saved(&self) -> Vec<Tensor> {
        self.saved.iter().filter_map(Saved::resident_tensor).collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let saved = self.saved.as_ref().map(Saved::value).transpose()?;
        dx.accumulate(0, unary_backward(self.op, self.p, dy.single()?, saved.as_ref())?)
    }
}

/// `op(x)`. `p` is the parameter of the rows that take one.
pub fn unary(op: Unary, p: f64, x: &Var) -> Result<Var> {
    let _span = forward_span(op.name());
    let value = kernels::unary(op, p, x.value())?;
    let saved = match op.saves() {
        Saves::Input => Some(x.save()),
        Saves::Output if x.needs_gradient() => Some(match op {
            Unary::Relu => Saved::sparse(&value),
            _ => Saved::tensor(&value),
        }),
        Saves::Output | Saves::Nothing => None,
    };
    let y = Var::record(&[x], value, || UnaryBackward { op, p, saved: saved.clone() })?;
    Ok(match (op.saves(), saved) {
        // The argument is saved anyway, so consumers need not save the value as well.
        (Saves::Input, Some(saved)) => {
            y.with_recompute(move || kernels::unary(op, p, &saved.value()?))
        }
        _ => y,
    })
}

struct BinaryBackward {
    op: Binary,
    lhs: Option<Saved>,
    rhs: Option<Saved>,
}

impl Backward for BinaryBackward {
    fn name(&self) -> &'static str {
        self.op.name()
    }

    fn saved(&self) -> Vec<Tensor> {
        self.lhs.iter().chain(&self.rhs).filter_map(Saved::resident_tensor).collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let dy = dy.single()?;
        let lhs = self.lhs.as_ref().map(Saved::value).transpose()?;
        let rhs = self.rhs.as_ref().map(Saved::value).transpose()?;
        // The last gradient overwrites `dy`, so that an earlier one works on a copy.
        let cotangents = match [0, 1].map(|side| dx.needs_input_grad(side)) {
            [true, true] => [Some(dy.clone()), Some(dy)],
            [true, false] => [Some(dy), None],
            [false, true] => [None, Some(dy)],
            [false, false] => return Ok(()),
        };
        for (side, dy) in cotangents.into_iter().enumerate() {
            if let Some(dy) = dy {
                let gradient = binary_backward(self.op, side, dy, lhs.as_ref(), rhs.as_ref())?;
                dx.accumulate(side, gradient)?;
            }
        }
        Ok(())
    }
}

/// `op(lhs, rhs)`, with broadcasting.
pub fn binary(op: Binary, lhs: &Var, rhs: &Var) -> Result<Var> {
    let _span = forward_span(op.name());
    let value = kernels::binary(op, lhs.value(), rhs.value())?;
    Var::record(&[lhs, rhs], value, || {
        let [by_lhs, by_rhs] = op.reads();
        let wanted = |operand: usize| {
            (lhs.needs_gradient() && by_lhs[operand]) || (rhs.needs_gradient() && by_rhs[operand])
        };
        BinaryBackward {
            op,
            lhs: wanted(0).then(|| lhs.save()),
            rhs: wanted(1).then(|| rhs.save()),
        }
    })
}

struct WhereBackward {
    condition: Tensor,
}

impl Backward for WhereBackward {
    fn name(&self) -> &'static str {
        "where"
    }

    fn saved(&self) -> Vec<Tensor> {
        vec![self.condition.clone()]
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let dy = dy.single()?;
        let zero = Tensor::zeros(dy.device(), dy.dtype(), &[])?;
        if dx.needs_input_grad(0) {
            dx.accumulate(0, kernels::where_cond(&self.condition, &dy, &zero)?)?;
        }
        if dx.needs_input_grad(1) {
            dx.accumulate(1, kernels::where_cond(&self.condition, &zero, &dy)?)?;
        }
        Ok(())
    }
}

/// Elements of `yes` where the u8 `condition` is not 0, else of `no`; all three broadcast.
pub(crate) fn where_cond(condition: &Tensor, yes: &Var, no: &Var) -> Result<Var> {
    let _span = forward_span("where");
    let value = kernels::where_cond(condition, yes.value(), no.value())?;
    Var::record(&[yes, no], value, || WhereBackward { condition: condition.clone() })
}
