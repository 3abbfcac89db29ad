//! Cross-attention against a composition, by finite differences, and with a padded memory.

use ferrotron_autograd::ops::concat::concat;
use ferrotron_autograd::{GradcheckOptions, Leaf, Var, gradcheck_leaves};
use ferrotron_nn::{AttentionConfig, Context, CrossAttention, Mode, Module, PositionBias};
use ferrotron_tensor::{Device, Result, Tensor};

use crate::layers::{DIMS, attention_config, check, context, normal, scope};

/// Gradients of both sequences, and the values of a composition: softmax(q k^T / sqrt(D)) v by head.
#[test]
fn cross_attention_sees_all_of_another_sequence() -> Result<()> {
    let device = Device::cpu(1)?;
    let memory = Leaf::new("memory", normal(&device, &[2, 5, 3], "memory")?);
    for groups in [4, 2, 1] {
        let config = attention_config(groups, None, 0.0);
        let cross = CrossAttention::new(&scope(&device).child("cross"), &config, 3)?;
        let ctx = context(Mode::Train);
        check(&device, &cross, |x| cross.forward(&ctx, x, &memory.var()?))?;
        gradcheck_leaves(
            || {
                let x = Var::constant(normal(&device, &DIMS, "x")?);
                cross.forward(&ctx, &x, &memory.var()?)
            },
            std::slice::from_ref(&memory),
            &GradcheckOptions::default(),
        )?;
        let x = Var::constant(normal(&device, &DIMS, "x")?);
        let params = cross.params();
        let linear = |x: &Var, i: usize| x.linear(&params[i].var()?, Some(&params[i + 1].var()?));
        let (q, kv) = (linear(&x, 0)?, linear(&memory.var()?, 2)?);
        let mut heads = Vec::new();
        for head in 0..4 {
            let group = head * groups / 4;
            let q = q.narrow(2, 2 * head, 2)?;
            let (k, v) = (kv.narrow(2, 2 * group, 2)?, kv.narrow(2, 2 * (groups + group), 2)?);
            let scores = q.matmul(&k.transpose(1, 2)?)?.mul_scalar(0.5_f64.sqrt())?;
            heads.push(scores.softmax(-1)?.matmul(&v)?);
        }
        let want = linear(&concat(&heads.iter().collect::<Vec<_>>(), 2)?, 4)?.value().to_f64()?;
        let got = cross.forward(&ctx, &x, &memory.var()?)?.value().to_f64()?;
        let far = got.iter().zip(&want).any(|(got, want)| (got - want).abs() > 1e-13);
        assert!(!far, "{groups} groups: {got:?}, {want:?}");
    }
    Ok(())
}

#[test]
fn cross_attention_drops_weights_and_refuses_what_does_not_fit() -> Result<()> {
    let device = Device::cpu(1)?;
    let var = |dims: &[usize]| normal(&device, dims, "x").map(Var::constant);
    let scope = scope(&device).child("cross");
    let cross = CrossAttention::new(&scope, &attention_config(2, None, 0.5), 3)?;
    let run =
        |mode| cross.forward(&context(mode), &var(&DIMS)?, &var(&[2, 5, 3])?)?.value().to_f64();
    assert_eq!(run(Mode::Train)?, run(Mode::Train)?);
    assert_ne!(run(Mode::Train)?, run(Mode::Eval)?);
    let rotary = CrossAttention::new(&scope, &attention_config(2, Some(100.0), 0.0), 3);
    let error = rotary.unwrap_err().to_string();
    assert!(error.starts_with("cross: cross_attention: cross-attention has no rotary"), "{error}");
    let error = cross.forward(&context(Mode::Eval), &var(&DIMS)?, &var(&[1, 5, 3])?).unwrap_err();
    let shown = "cross: cross_attention: 2 samples attend to the memory of 1";
    assert_eq!(error.to_string(), shown);
    Ok(())
}

/// Each sample gives, with its gradients, what it gives alone with a memory that ends where its own does.
#[test]
fn padding_of_the_memory_changes_nothing() -> Result<()> {
    let device = Device::cpu(1)?;
    let (lengths, longest) = ([2, 5], 5);
    for groups in [4, 1] {
        let config = attention_config(groups, None, 0.0);
        let cross = CrossAttention::new(&scope(&device).child("cross"), &config, 3)?;
        let (x, dy) = (normal(&device, &DIMS, "x")?, normal(&device, &DIMS, "dy")?);
        let memory = normal(&device, &[2, longest, 3], "memory")?;
        // The result, and the gradients of input and memory.
        let run =
            |ctx: &Context, x: &Tensor, memory: &Tensor, dy: &Tensor| -> Result<[Tensor; 3]> {
                let leaves = [Leaf::new("x", x.clone()), Leaf::new("memory", memory.clone())];
                let y = cross.forward(ctx, &leaves[0].var()?, &leaves[1].var()?)?;
                y.mul(&Var::constant(dy.clone()))?.sum_all()?.backward()?;
                let [dx, dmemory] = leaves.map(|leaf| leaf.gradient().unwrap().unwrap());
                Ok([y.into_value(), dx, dmemory])
            };
        let ctx = Context::eval(DIMS[0], DIMS[1]).with_memory_lengths(&lengths)?;
        let padded = run(&ctx, &x, &memory, &dy)?;
        for (sample, &length) in lengths.iter().enumerate() {
            let own = |x: &Tensor| x.narrow(0, sample, 1);
            let short = |x: &Tensor| own(x)?.narrow(1, 0, length);
            let ctx = Context::eval(1, DIMS[1]);
            let [y, dx, dmemory] = run(&ctx, &own(&x)?, &short(&memory)?, &own(&dy)?)?;
            let pairs =
                [(own(&padded[0])?, y), (own(&padded[1])?, dx), (short(&padded[2])?, dmemory)];
            for (i, (got, want)) in pairs.iter().enumerate() {
                for (got, want) in got.to_f64()?.iter().zip(want.to_f64()?) {
                    assert!((got - want).abs() <= 1e-12, "{sample}, result {i}: {got}, {want}");
                }
            }
            let padding = own(&padded[2])?.narrow(1, length, longest - length)?.to_f64()?;
            assert!(padding.iter().all(|&x| x == 0.0), "{sample}: {padding:?}");
        }
    }
    Ok(())
}

#[test]
fn lengths_of_the_memory_that_do_not_fit_are_refused() -> Result<()> {
    let device = Device::cpu(1)?;
    let scope = scope(&device).child("cross");
    let config = attention_config(2, None, 0.0);
    let cross = CrossAttention::new(&scope, &config, 3)?;
    let var = |dims: &[usize]| normal(&device, dims, "x").map(Var::constant);
    let error = context(Mode::Eval).with_memory_lengths(&[1, 2, 3]).unwrap_err().to_string();
    assert_eq!(error, "context: memory lengths [1, 2, 3] are not of 2 samples");
    let ctx = context(Mode::Eval).with_memory_lengths(&[6, 2])?;
    let error = cross.forward(&ctx, &var(&DIMS)?, &var(&[2, 5, 3])?).unwrap_err().to_string();
    let shown = "cross: cross_attention: a memory length of 6 exceeds the 5 positions of the memory [2, 5, 3]";
    assert_eq!(error, shown);
    let biased = AttentionConfig { position_bias: Some(PositionBias::Alibi), ..config };
    let error = CrossAttention::new(&scope, &biased, 3).unwrap_err().to_string();
    let shown = "cross: cross_attention: cross-attention has no bias by position: set `position_bias: None`";
    assert_eq!(error, shown);
    Ok(())
}
