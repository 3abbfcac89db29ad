//! Layers that are given a residual: one rank of a GPU adds it in the pass of its product, others leave it to the caller.

use ferrotron_autograd::{Leaf, Var, WeightGrads, backward};
use ferrotron_nn::{
    Activation, AttentionConfig, Bias, Context, DimShard, Init, MlpConfig, Mode, Module, Scope,
};
use ferrotron_parallel::context_parallel::ContextParallel;
use ferrotron_parallel::tensor_parallel::{Branch, ParallelAttention, ParallelMlp, TensorParallel};
use ferrotron_tensor::{DType, Device, Result, Tensor};

use crate::ranks::*;

const DIMS: [usize; 3] = [2, 4, 16];

/// A layer with and without a residual.
struct Layer<'a> {
    module: &'a dyn Module,
    run: &'a dyn Fn(Option<&Var>, &Var) -> Result<Branch>,
}

impl Layer<'_> {
    /// The sum, and the gradients of residual, input and parameters.
    fn found(&self, given: bool, tensors: &[Tensor; 3]) -> Result<(Tensor, Vec<Tensor>, bool)> {
        self.module.params().iter().for_each(|param| param.leaf().zero_gradient());
        let [residual, x, dy] = tensors;
        let leaves = [Leaf::new("residual", residual.clone()), Leaf::new("x", x.clone())];
        let [residual, x] = [leaves[0].var()?, leaves[1].var()?];
        let branch = (self.run)(given.then_some(&residual), &x)?;
        let is_sum = matches!(branch, Branch::Sum(_));
        let sum = branch.onto(&residual, |y| Ok(y.clone()))?;
        backward(&[(&sum, dy.clone())], WeightGrads::Now)?.run()?;
        let mut gradients: Vec<Tensor> = leaves.iter().map(gradient).collect();
        for param in self.module.params() {
            gradients.push(gradient(param.leaf()).copy()?);
        }
        Ok((sum.value().clone(), gradients, is_sum))
    }

    fn check(&self, what: &str, on: (&Device, DType), tp: &TensorParallel) -> Result<()> {
        let (device, dtype) = on;
        let tensors = ["residual", "x", "dy"].map(|name| {
            residual(tp, &normal(&DIMS, name)).contiguous()?.to_device(device)?.cast(dtype)
        });
        let [residual, x, dy] = tensors;
        let tensors = [residual?, x?, dy?];
        let (want, gradients, _) = self.found(false, &tensors)?;
        let (got, found, is_sum) = self.found(true, &tensors)?;
        let fuses = device.is_gpu() && dtype == DType::BF16 && tp.group().size() == 1;
        assert_eq!(is_sum, fuses, "{what}");
        // The layer's result is rounded once more before the residual is added.
        let tolerance = if fuses { dtype.epsilon() } else { 0.0 };
        assert_close(what, &got, &want, tolerance);
        for (i, (got, want)) in found.iter().zip(&gradients).enumerate() {
            assert_equal(&format!("{what}: gradient {i}"), got, want);
        }
        Ok(())
    }
}

#[test]
fn a_residual_is_added_once() -> Result<()> {
    let gpu = ferrotron_cuda_sim::stand_in("branch::a_residual_is_added_once");
    let gpu = gpu.map(|gpu| Device::cuda(&gpu)).transpose()?;
    let cpu = Device::cpu(1)?;
    let devices: Vec<(&Device, DType)> = [(&cpu, DType::F64), (&cpu, DType::BF16)]
        .into_iter()
        .chain(gpu.iter().flat_map(|gpu| [(gpu, DType::F32), (gpu, DType::BF16)]))
        .collect();
    let init = Init::Normal { std: 0.25 };
    for (ranks, sequence) in [(1, BOTH[0]), (2, BOTH[0]), (2, BOTH[1])] {
        on_tensor_ranks(ranks, sequence, |tp| {
            for &(device, dtype) in &devices {
                let scope = |name: &str| Scope::new(device, dtype, SEED).child(name);
                for (bias, activation) in
                    [(Bias::Yes, Activation::GeluTanh), (Bias::No, Activation::SwiGlu)]
                {
                    let what = format!("{dtype} {ranks} {sequence:?} {bias:?}");
                    let config = MlpConfig {
                        hidden: DIMS[2],
                        ffn_hidden: 32,
                        activation,
                        bias,
                        init,
                        residual_init: init,
                    };
                    let mlp = ParallelMlp::new(&scope("mlp"), &tp, &config)?;
                    let run = |residual: Option<&Var>, x: &Var| mlp.forward_onto(residual, x);
                    Layer { module: &mlp, run: &run }.check(&what, (device, dtype), &tp)?;

                    let config = AttentionConfig {
                        bias,
                        init,
                        residual_init: init,
                        ..AttentionConfig::new(DIMS[2], 2)
                    };
                    let cp = ContextParallel::single();
                    let attention = ParallelAttention::new(&scope("attn"), &tp, &cp, &config)?;
                    let mut ctx = Context::new(SEED, 3, Mode::Train, DIMS[0], DIMS[1]);
                    ctx.residual = tp.residual(&DimShard::unsharded(DIMS[1]))?;
                    let run = |residual: Option<&Var>, x: &Var| {
                        attention.forward_onto(residual, &ctx, x, None)
                    };
                    Layer { module: &attention, run: &run }.check(&what, (device, dtype), &tp)?;
                    let run = |residual: Option<&Var>, x: &Var| {
                        attention.forward_checkpointed(residual, &ctx, x)
                    };
                    Layer { module: &attention, run: &run }.check(&what, (device, dtype), &tp)?;
                }
            }
            Ok(())
        });
    }
    Ok(())
}
