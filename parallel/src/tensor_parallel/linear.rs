//! Linear layers with weights sharded by rows (column parallel) or by columns (row parallel).
//!
//! Each is a single operation, so that communication and compute overlap. With x replicated or, with sequence
//! parallelism, gathered:
//!
//! - column: y_r = x W_r^T + b_r. Backward: dx_r = dy_r W_r, start the all-reduce of dx, compute dW_r = dy_r^T x,
//!   then wait.
//! - row: y = sum over ranks of x_r W_r^T, plus b. Backward: dx_r = dy W_r, dW_r = dy^T x_r.
//!
//! With sequence parallelism the sums are reduce-scattered, and the column's backward gathers x again while dx_r is
//! computed: only this rank's positions are saved. The mappings in [`mappings`](super::mappings) around a plain
//! linear layer are equivalent.

use ferrotron_autograd::ops::linear::{Gelu, SavedLinear, give_parameter_gradients};
use ferrotron_autograd::{Accum, Backward, Cotangents, InputGrads, Var, forward_span};
use ferrotron_nn::{Axis, Bias, Init, Module, Param, Scope, WeightDecay};
use ferrotron_tensor::ops::linear::{
    fuses_residual, linear, linear_bias_gradient, linear_gelu, linear_input_gradient,
    linear_weight_gradient,
};
use ferrotron_tensor::{At, DType, Error, Result, Tensor};

use super::branch::Branch;
use super::mappings::{all_gather_dim, reduce_scatter_dim};
use super::sharding::{SEQUENCE, SequenceParallel, TensorParallel};
use crate::collective::{Reduction, Work};

/// The sharded dim of the weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TpStyle {
    /// Outputs.
    Colwise,
    /// Inputs.
    Rowwise,
}

impl TpStyle {
    fn name(self) -> &'static str {
        match self {
            TpStyle::Colwise => "column_parallel_linear",
            TpStyle::Rowwise => "row_parallel_linear",
        }
    }
}

impl TensorParallel {
    /// The same ranks, for calls whose results are needed at once.
    pub(super) fn blocking(&self) -> TensorParallel {
        TensorParallel { group: self.group.blocking(), ..self.clone() }
    }

    /// Gathers all positions of an activation on the residual stream.
    #[track_caller]
    pub(super) fn gathered(&self, x: &Tensor) -> Result<Work<Tensor>> {
        match self.sequence {
            SequenceParallel::Off => Ok(Work::ready(x.clone())),
            SequenceParallel::On => {
                let len = x.dim(SEQUENCE as isize)? * self.group.size();
                all_gather_dim(x, SEQUENCE, len, &self.group)
            }
        }
    }

    /// Sums over the ranks, and scatters the positions with sequence parallelism.
    #[track_caller]
    pub(super) fn reduced(&self, x: Tensor) -> Result<Work<Tensor>> {
        match self.sequence {
            SequenceParallel::Off => self.group.all_reduce(x, Reduction::Sum),
            SequenceParallel::On => reduce_scatter_dim(&x, SEQUENCE, &self.group),
        }
    }

    /// The product with a sharded weight, as one operation.
    pub(super) fn linear(
        &self,
        x: &Var,
        weight: &Var,
        bias: Option<&Var>,
        cut: TpStyle,
    ) -> Result<Var> {
        if self.group.size() == 1 {
            return x.linear(weight, bias);
        }
        let _span = forward_span(cut.name());
        let value = match cut {
            TpStyle::Colwise => {
                let whole = self.blocking().gathered(x.value())?.wait()?;
                linear(&whole, weight.value(), bias.map(Var::value))?
            }
            TpStyle::Rowwise => self.rowwise(x.value(), weight, bias)?,
        };
        self.record(x, weight, bias, cut, value, || SavedLinear::new(x, weight))
    }

    /// The value of a product with a weight sharded by columns.
    fn rowwise(&self, x: &Tensor, weight: &Var, bias: Option<&Var>) -> Result<Tensor> {
        let part = linear(x, weight.value(), None)?;
        let sum = self.blocking().reduced(part)?.wait()?;
        bias.map_or(Ok(sum.clone()), |bias| sum.add(bias.value()))
    }

    /// GELU, tanh form, of the product with a weight sharded by rows: see [`Var::linear_gelu`].
    fn linear_gelu(&self, x: &Var, weight: &Var, bias: Option<&Var>) -> Result<Gelu> {
        if self.group.size() == 1 {
            return x.linear_gelu(weight, bias);
        }
        let span = forward_span(TpStyle::Colwise.name());
        let whole = self.blocking().gathered(x.value())?.wait()?;
        let (hidden, value) = linear_gelu(&whole, weight.value(), bias.map(Var::value))?;
        drop((span, whole));
        let saved = || SavedLinear::new(x, weight);
        Gelu::new(self.record(x, weight, bias, TpStyle::Colwise, hidden, saved)?, value)
    }

    /// The product of GELU with a weight sharded by columns: see [`Gelu::linear`].
    fn gelu_linear(&self, x: &Gelu, weight: &Var, bias: Option<&Var>) -> Result<Var> {
        if self.group.size() == 1 {
            return x.linear(weight, bias);
        }
        let _span = forward_span(TpStyle::Rowwise.name());
        let (value, saved) =
            (self.rowwise(x.value(), weight, bias)?, || SavedLinear::of_gelu(x, weight));
        self.record(x.hidden(), weight, bias, TpStyle::Rowwise, value, saved)
    }

    fn record(
        &self,
        operand: &Var,
        weight: &Var,
        bias: Option<&Var>,
        cut: TpStyle,
        value: Tensor,
        saved: impl FnOnce() -> SavedLinear,
    ) -> Result<Var> {
        let inputs: Vec<&Var> = [operand, weight].into_iter().chain(bias).collect();
        Var::record(&inputs, value, || ParallelLinear { tp: self.clone(), cut, saved: saved() })
    }
}

struct ParallelLinear {
    tp: TensorParallel,
    cut: TpStyle,
    saved: SavedLinear,
}

impl Backward for ParallelLinear {
    fn name(&self) -> &'static str {
        self.cut.name()
    }

    fn saved(&self) -> Vec<Tensor> {
        self.saved.tensors()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let ParallelLinear { tp, cut, mut saved } = *self;
        let dy = dy.single()?;
        // The bias gradient covers only this rank's positions.
        let part = cut == TpStyle::Rowwise && tp.sequence == SequenceParallel::On;
        let dy = match part {
            false => dy,
            true => {
                let whole = tp.gathered(&dy)?; // overlaps with the bias gradient
                if dx.needs_input_grad(2) {
                    dx.accumulate(2, linear_bias_gradient(&dy)?)?;
                }
                whole.wait()?
            }
        };
        if cut == TpStyle::Rowwise {
            saved.give_input_gradient(dx, &dy)?;
        }
        let x = saved.x.take().map(|x| match cut {
            TpStyle::Rowwise => Ok(Work::ready(()).map(move |()| x.value())),
            TpStyle::Colwise if dx.defers_weight(1) => {
                let tp = tp.clone();
                Ok(Work::ready(()).map(move |()| tp.gathered(&x.value()?)?.wait()))
            }
            TpStyle::Colwise => tp.gathered(&x.value()?), // overlaps with dx
        });
        let x = x.transpose()?;
        let mut summing = None;
        if let (TpStyle::Colwise, Some(weight)) = (cut, &saved.weight) {
            let weight = weight.value()?; // (N, K)
            let dims = [&dy.dims()[..dy.rank() - 1], &weight.dims()[1..]].concat();
            let mut part = Tensor::empty(dy.device(), dy.dtype(), &dims)?;
            linear_input_gradient(&mut part, Accum::Replace, &dy, &weight)?;
            summing = Some(tp.reduced(part)?);
        }
        match (part, x) {
            (false, x) => give_parameter_gradients(dx, dy, x.map(|x| move || x.wait()))?,
            (true, Some(x)) => dx.accumulate_or_defer(1, move |out, accum| {
                linear_weight_gradient(out, accum, &dy, &x.wait()?)
            })?,
            (true, None) => {}
        }
        summing.map_or(Ok(()), |work| dx.accumulate(0, work.wait()?))
    }
}

/// y = x W^T + b with sharded outputs: the weight (out, in) is sharded by rows.
///
/// x is equal on every rank or, with sequence parallelism, holds this rank's positions.
#[derive(Debug, Clone, Module)]
pub struct ColumnParallelLinear {
    #[module(skip)]
    tp: TensorParallel,
    path: String,
    weight: Param,
    bias: Option<Param>,
}

impl ColumnParallelLinear {
    /// A layer from `inputs` features to blocks of `outputs` features; each block is sharded separately.
    ///
    /// Errors if a size is 0.
    ///
    /// ```
    /// use ferrotron_autograd::Var;
    /// use ferrotron_nn::{Bias, Init, Scope};
    /// use ferrotron_parallel::tensor_parallel::{ColumnParallelLinear, TensorParallel};
    /// use ferrotron_tensor::{DType, Device, Tensor};
    /// let device = Device::cpu(1)?;
    /// let scope = Scope::new(&device, DType::F32, 0).child("fc");
    /// let tp = TensorParallel::single();
    /// let layer = ColumnParallelLinear::new(&scope, &tp, 3, &[5], Bias::Yes, Init::XavierUniform)?;
    /// let x = Var::constant(Tensor::zeros(&device, DType::F32, &[2, 4, 3])?);
    /// assert_eq!(layer.forward(&x)?.dims(), [2, 4, 5]);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn new(
        scope: &Scope,
        tp: &TensorParallel,
        inputs: usize,
        outputs: &[usize],
        bias: Bias,
        init: Init,
    ) -> Result<ColumnParallelLinear> {
        let width = outputs.iter().sum();
        check_sizes(scope, inputs, width)?;
        let cut = scope.clone().sharded_along(Axis::Tensor);
        let weight = tp.shard(&[width, inputs], 0, outputs)?;
        let place = tp.shard(&[width], 0, outputs)?;
        let bias = (bias == Bias::Yes)
            .then(|| cut.param_at("bias", place, Init::Zeros, WeightDecay::Off).packed(outputs))
            .transpose()?;
        Ok(ColumnParallelLinear {
            tp: tp.clone(),
            path: scope.path().to_string(),
            weight: cut.param_at("weight", weight, init, WeightDecay::On).packed(outputs)?,
            bias,
        })
    }

    /// (B, T, in), or (B, T/tp, in) under sequence parallelism -> (B, T, out/tp)
    pub fn forward(&self, x: &Var) -> Result<Var> {
        forward(&self.tp, x, &self.weight, self.bias.as_ref(), TpStyle::Colwise).at(&self.path)
    }

    /// GELU of [`ColumnParallelLinear::forward`], tanh form, for [`RowParallelLinear::forward_of_gelu`].
    pub fn forward_gelu(&self, x: &Var) -> Result<Gelu> {
        let bias = self.bias.as_ref().map(|bias| bias.var_as(x.dtype())).transpose()?;
        self.tp.linear_gelu(x, &self.weight.var_as(x.dtype())?, bias.as_ref()).at(&self.path)
    }
}

/// y = x W^T + b with sharded inputs. The weight (out, in) is sharded by columns, the products are summed, and the bias
/// is added once.
#[derive(Debug, Clone, Module)]
pub struct RowParallelLinear {
    #[module(skip)]
    tp: TensorParallel,
    path: String,
    weight: Param,
    bias: Option<Param>,
}

impl RowParallelLinear {
    /// A layer from `inputs` to `outputs` features. Errors if either is 0.
    pub fn new(
        scope: &Scope,
        tp: &TensorParallel,
        inputs: usize,
        outputs: usize,
        bias: Bias,
        init: Init,
    ) -> Result<RowParallelLinear> {
        check_sizes(scope, inputs, outputs)?;
        let cut = scope.clone().sharded_along(Axis::Tensor);
        let weight = tp.shard(&[outputs, inputs], 1, &[inputs])?;
        let bias_scope = tp.residual_scope(scope);
        Ok(RowParallelLinear {
            tp: tp.clone(),
            path: scope.path().to_string(),
            weight: cut.param_at("weight", weight, init, WeightDecay::On),
            bias: (bias == Bias::Yes)
                .then(|| bias_scope.param("bias", &[outputs], Init::Zeros, WeightDecay::Off)),
        })
    }

    /// (B, T, in/tp) -> (B, T, out), or (B, T/tp, out) under sequence parallelism
    pub fn forward(&self, x: &Var) -> Result<Var> {
        forward(&self.tp, x, &self.weight, self.bias.as_ref(), TpStyle::Rowwise).at(&self.path)
    }

    /// [`RowParallelLinear::forward`] of GELU: see [`Gelu::linear`].
    pub fn forward_of_gelu(&self, x: &Gelu) -> Result<Var> {
        let (weight, bias) = self.vars(x.hidden().dtype())?;
        self.tp.gelu_linear(x, &weight, bias.as_ref()).at(&self.path)
    }

    /// [`RowParallelLinear::forward`], with the residual (B, T, out) if it can be added in the pass of the product: see
    /// [`Branch`].
    pub fn forward_onto(&self, residual: Option<&Var>, x: &Var) -> Result<Branch> {
        let Some(residual) = self.fused(residual, x.value()) else {
            return self.forward(x).map(Branch::Term);
        };
        let (weight, bias) = self.vars(x.dtype())?;
        x.linear_onto(residual, &weight, bias.as_ref()).map(Branch::Sum).at(&self.path)
    }

    /// [`RowParallelLinear::forward_onto`] of GELU.
    pub fn forward_of_gelu_onto(&self, residual: Option<&Var>, x: &Gelu) -> Result<Branch> {
        let Some(residual) = self.fused(residual, x.value()) else {
            return self.forward_of_gelu(x).map(Branch::Term);
        };
        let (weight, bias) = self.vars(x.hidden().dtype())?;
        x.linear_onto(residual, &weight, bias.as_ref()).map(Branch::Sum).at(&self.path)
    }

    /// The residual if the product of `x` adds it. The product of one rank of several is a part of a sum, to which the
    /// residual would be added as many times as there are ranks.
    fn fused<'a>(&self, residual: Option<&'a Var>, x: &Tensor) -> Option<&'a Var> {
        residual.filter(|_| self.tp.group.size() == 1 && fuses_residual(x))
    }

    fn vars(&self, dtype: DType) -> Result<(Var, Option<Var>)> {
        let bias = self.bias.as_ref().map(|bias| bias.var_as(dtype)).transpose()?;
        Ok((self.weight.var_as(dtype)?, bias))
    }
}

fn forward(
    tp: &TensorParallel,
    x: &Var,
    weight: &Param,
    bias: Option<&Param>,
    cut: TpStyle,
) -> Result<Var> {
    let bias = bias.map(|bias| bias.var_as(x.dtype())).transpose()?;
    tp.linear(x, &weight.var_as(x.dtype())?, bias.as_ref(), cut)
}

fn check_sizes(scope: &Scope, inputs: usize, outputs: usize) -> Result<()> {
    if inputs == 0 || outputs == 0 {
        let message = format!("sizes must be positive, got {inputs} inputs and {outputs} outputs");
        return Err(Error::config("linear", message).at(scope.path()));
    }
    Ok(())
}
