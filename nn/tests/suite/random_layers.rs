//! Random numbers of layers: of their own in each call and sample, and the same when a region runs again.

use ferrotron_autograd::{Leaf, Var, checkpoint};
use ferrotron_nn::{Attention, Context, CrossAttention, Dropout, Mode};
use ferrotron_tensor::{Device, Result, Tensor};

use crate::layers::{DIMS, attention_config, check, context, normal, scope};

#[test]
fn dropout_is_active_only_in_training() -> Result<()> {
    let device = Device::cpu(1)?;
    let dropout = Dropout::new(&scope(&device).child("dropout"), 0.5)?;
    check(&device, &dropout, |x| dropout.forward(&context(Mode::Train), x))?;
    let x = Var::constant(normal(&device, &DIMS, "x")?);
    let [train, eval] = [Mode::Train, Mode::Eval].map(|mode| dropout.forward(&context(mode), &x));
    assert_eq!(eval?.value().to_f64()?, x.value().to_f64()?);
    let train = train?.value().to_f64()?;
    let dropped = train.iter().filter(|&&y| y == 0.0).count();
    assert!((1..train.len()).contains(&dropped), "{dropped} of {} dropped", train.len());
    let flat = Var::constant(normal(&device, &[4], "x")?);
    let error = dropout.forward(&context(Mode::Train), &flat).unwrap_err().to_string();
    assert_eq!(error, "dropout: dropout: needs (batch, sequence, ..), got [4]");
    Ok(())
}

/// A sample's numbers do not depend on the batch around it, dropout included.
#[test]
fn a_micro_batch_is_a_slice_of_the_batch() -> Result<()> {
    let device = Device::cpu(1)?;
    let dropout = Dropout::new(&scope(&device).child("dropout"), 0.5)?;
    let config = attention_config(2, Some(100.0), 0.3);
    let attention = Attention::new(&scope(&device).child("attn"), &config)?;
    let run = |ctx: &Context, x: &Tensor| -> Result<Tensor> {
        let y = attention.forward(ctx, &Var::constant(x.clone()), None)?;
        Ok(dropout.forward(ctx, &y)?.into_value())
    };
    let x = normal(&device, &DIMS, "x")?;
    let ctx = context(Mode::Train);
    let whole = run(&ctx, &x)?;
    for sample in 0..DIMS[0] {
        let part = run(&ctx.clone().micro_batch(sample, 1), &x.narrow(0, sample, 1)?)?;
        assert_eq!(part.to_f64()?, whole.narrow(0, sample, 1)?.to_f64()?, "sample {sample}");
    }
    assert_ne!(run(&Context { step: 4, ..ctx }, &x)?.to_f64()?, whole.to_f64()?);
    Ok(())
}

/// Stages of a pipeline would count the calls of two layers on one path apart, and one stage together.
#[test]
fn a_second_random_layer_on_one_path_is_refused() -> Result<()> {
    let scope = scope(&Device::cpu(1)?).child("block");
    let refused = |layer: Result<()>, path: &str| {
        let error = layer.unwrap_err().to_string();
        let want =
            "random_site: another layer draws random numbers at this path: give each a scope";
        assert!(error.starts_with(&format!("{path}: {want}")), "{error}");
    };
    let (path, drops) = (scope.path(), attention_config(2, None, 0.3));
    let dropout = Dropout::new(&scope, 0.5)?;
    refused(Dropout::new(&scope, 0.1).map(drop), path);
    Dropout::new(&scope, 0.0)?; // nothing is drawn
    let copy = dropout.clone(); // the same layer
    drop(dropout);
    refused(Dropout::new(&scope, 0.5).map(drop), path);
    drop(copy);
    Dropout::new(&scope, 0.5)?;

    let attention = Attention::new(&scope, &drops)?;
    refused(Attention::new(&scope, &drops).map(drop), &format!("{path}.dropout"));
    refused(CrossAttention::new(&scope, &drops, 3).map(drop), &format!("{path}.dropout"));
    refused(Dropout::new(&scope.child("dropout"), 0.5).map(drop), &format!("{path}.dropout"));
    drop(attention);
    Ok(())
}

/// Each call of a layer that is used twice draws other numbers, which a region that is run again repeats.
#[test]
fn each_call_of_a_random_layer_draws_its_own_numbers() -> Result<()> {
    let device = Device::cpu(1)?;
    let dropout = Dropout::new(&scope(&device).child("dropout"), 0.5)?;
    let attention = Attention::new(&scope(&device).child("attn"), &attention_config(2, None, 0.3))?;
    let x = Var::constant(normal(&device, &DIMS, "x")?);
    let run = |ctx: &Context| -> Result<Vec<Vec<f64>>> {
        let all = [
            dropout.forward(ctx, &x)?,
            dropout.forward(ctx, &x)?,
            dropout.clone().forward(&ctx.clone(), &x)?,
            attention.forward(ctx, &x, None)?,
            attention.forward(ctx, &x, None)?,
        ];
        all.iter().map(|y| y.value().to_f64()).collect()
    };
    let ctx = context(Mode::Train);
    let first = run(&ctx)?;
    for (i, one) in first.iter().enumerate() {
        assert!(first[..i].iter().all(|other| other != one), "call {i}");
    }
    assert_eq!(run(&context(Mode::Train))?, first, "another pass of the same step");
    assert_eq!(run(&ctx.clone().micro_batch(0, DIMS[0]))?, first, "another micro-batch");
    assert_ne!(run(&ctx)?, first);

    let source = Leaf::new("x", normal(&device, &DIMS, "x")?);
    let gradient = |regions: usize| -> Result<Vec<f64>> {
        source.zero_gradient();
        let (ctx, layer) = (context(Mode::Train), dropout.clone());
        let (inner, drop) = (ctx.clone(), layer.clone());
        // Two calls, with one region for both or one within the other.
        let twice = move |x: &[Var]| -> Result<Vec<Var>> {
            let once = drop.forward(&inner, &x[0])?;
            let (inner, drop) = (inner.clone(), drop.clone());
            let again = move |x: &[Var]| Ok(vec![drop.forward(&inner, &x[0])?.square()?]);
            if regions < 2 { again(&[once]) } else { checkpoint(&[&once], again) }
        };
        let x = layer.forward(&ctx, &source.var()?)?;
        let y = if regions == 0 { twice(&[x])? } else { checkpoint(&[&x], twice)? };
        // The calls after a region continue the count.
        layer.forward(&ctx, &y[0].tanh()?)?.sum_all()?.backward()?;
        source.gradient()?.expect("a gradient").to_f64()
    };
    let plain = gradient(0)?;
    assert!(plain.iter().any(|&g| g != 0.0));
    assert_eq!((gradient(1)?, gradient(2)?), (plain.clone(), plain));
    Ok(())
}
