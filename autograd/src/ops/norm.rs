//! Gradients of LayerNorm and RMSNorm. Both save x and the statistics of each row. Users of the result recompute it
//! from these instead of saving it.

use ferrotron_tensor::ops::layer_norm::{
    layer_norm, layer_norm_backward, layer_norm_backward_input,
};
use ferrotron_tensor::ops::rms_norm::{rms_norm, rms_norm_backward, rms_norm_backward_input};
use ferrotron_tensor::{Result, Tensor};

use crate::engine::node::Named;
use crate::{Backward, Cotangents, InputGrads, Saved, Var, forward_span};

struct LayerNormBackward {
    x: Saved,
    mean: Saved,
    rstd: Saved,
    weight: Saved,
}

impl Backward for LayerNormBackward {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn saved(&self) -> Vec<Tensor> {
        [&self.x, &self.mean, &self.rstd, &self.weight]
            .into_iter()
            .filter_map(Saved::resident_tensor)
            .collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let (dy, x, weight) = (dy.single()?, self.x.value()?, self.weight.value()?);
        let (mean, rstd) = (self.mean.value()?, self.rstd.value()?);
        let before = dx.take(0);
        if !dx.needs_input_grad(1) && !dx.needs_input_grad(2) {
            let to_x = layer_norm_backward_input(&dy, &x, &mean, &rstd, &weight, before.as_ref())?;
            drop(before);
            return dx.accumulate(0, to_x);
        }
        let (to_x, to_weight, to_bias) =
            layer_norm_backward(&dy, &x, &mean, &rstd, &weight, before.as_ref())?;
        drop(before);
        dx.accumulate(0, to_x)?;
        dx.accumulate(1, to_weight)?;
        dx.accumulate(2, to_bias)
    }
}

struct RmsNormBackward {
    x: Saved,
    rstd: Saved,
    weight: Saved,
}

impl Backward for RmsNormBackward {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn saved(&self) -> Vec<Tensor> {
        [&self.x, &self.rstd, &self.weight].into_iter().filter_map(Saved::resident_tensor).collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let (dy, x, weight) = (dy.single()?, self.x.value()?, self.weight.value()?);
        let rstd = self.rstd.value()?;
        let before = dx.take(0);
        if !dx.needs_input_grad(1) {
            let to_x = rms_norm_backward_input(&dy, &x, &rstd, &weight, before.as_ref())?;
            drop(before);
            return dx.accumulate(0, to_x);
        }
        let (to_x, to_weight) = rms_norm_backward(&dy, &x, &rstd, &weight, before.as_ref())?;
        drop(before);
        dx.accumulate(0, to_x)?;
        dx.accumulate(1, to_weight)
    }
}

impl Var {
    /// 1 + w of these weights w in the accumulator dtype: the gain of a norm with weights around 0, which 16 bits hold
    /// more exactly than those around 1. The norm takes the result as its weight; nothing but w is saved.
    pub fn centered_gain(&self) -> Result<Var> {
        let acc = self.dtype().accumulator();
        let gain = move |weight: &Tensor| weight.cast(acc)?.add_scalar(1.0);
        let saved = self.save();
        let y = Var::record(&[self], gain(self.value())?, || {
            Named("centered_gain", |dy: Tensor, dx: &mut InputGrads| dx.accumulate(0, dy))
        })?;
        Ok(y.with_recompute(move || gain(&saved.value()?)))
    }

    /// (x - mean) / sqrt(variance + eps) * weight + bias over the last dim: Ba et al., arXiv 1607.06450.
    pub fn layer_norm(&self, weight: &Var, bias: Option<&Var>, eps: f64) -> Result<Var> {
        let _span = forward_span("layer_norm");
        let (value, mean, rstd) =
            layer_norm(self.value(), weight.value(), bias.map(Var::value), eps)?;
        let mut inputs = vec![self, weight];
        inputs.extend(bias);
        let (x, scale, shift) = (self.save(), weight.save(), bias.map(Var::save));
        let y = Var::record(&inputs, value, || {
            let [mean, rstd] = [&mean, &rstd].map(Saved::statistic);
            LayerNormBackward { x: x.clone(), mean, rstd, weight: scale.clone() }
        })?;
        Ok(y.with_recompute(move || {
            let shift = shift.as_ref().map(Saved::value).transpose()?;
            Ok(layer_norm(&x.value()?, &scale.value()?, shift.as_ref(), eps)?.0)
        }))
    }

    /// x / sqrt(mean of squares + eps) * weight over the last dim: Zhang and Sennrich, arXiv 1910.07467.
    pub fn rms_norm(&self, weight: &Var, eps: f64) -> Result<Var> {
        let _span = forward_span("rms_norm");
        let (value, rstd) = rms_norm(self.value(), weight.value(), eps)?;
        let (x, scale) = (self.save(), weight.save());
        let y = Var::record(&[self, weight], value, || RmsNormBackward {
            x: x.clone(),
            rstd: Saved::statistic(&rstd),
            weight: scale.clone(),
        })?;
        Ok(y.with_recompute(move || Ok(rms_norm(&x.value()?, &scale.value()?, eps)?.0)))
    }
}
