//! Losses against PyTorch's numbers, in f64, and their gradients against finite differences.

use ferrotron_autograd::{GradcheckOptions, Leaf, Var, gradcheck};
use ferrotron_nn::loss::{
    CrossEntropyLoss, Reduction, binary_cross_entropy_with_logits, kl_divergence,
    mean_squared_error,
};
use ferrotron_tensor::ops::cross_entropy::{VocabAllReduce, VocabShard};
use ferrotron_tensor::{DType, Device, Result, Tensor};
use std::f64::consts::LN_2;
use std::sync::{Barrier, Mutex, OnceLock};

const REDUCTIONS: [Reduction; 3] = [Reduction::None, Reduction::Mean, Reduction::Sum];

fn device() -> &'static Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(|| Device::cpu(1).expect("a device"))
}

fn tensor(values: &[f64], dims: &[usize]) -> Result<Tensor> {
    Tensor::from_slice(device(), values, dims)
}

fn waves(count: usize, step: f64, height: f64) -> Vec<f64> {
    (0..count).map(|i| height * (i as f64 * step).sin()).collect()
}

#[track_caller]
fn assert_close(got: &Tensor, want: &[f64]) {
    let got = got.to_f64().unwrap();
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= 1e-13 * want.abs().max(1.0), "{i}: {got} for {want}");
    }
}

/// The loss and the gradient of the sum of its elements.
#[track_caller]
fn assert_loss(x: &Leaf, loss: &Var, value: &[f64], gradient: &[f64]) {
    assert_close(loss.value(), value);
    x.zero_gradient();
    loss.sum_all().unwrap().backward().unwrap();
    assert_close(&x.gradient().unwrap().unwrap(), gradient);
}

/// Five tokens of four classes: the second has the target -100, and every token a weight.
fn tokens() -> Result<(Leaf, Tensor, Tensor)> {
    let logits = Leaf::new("logits", tensor(&waves(20, 0.7, 3.0), &[5, 4])?);
    let targets = Tensor::from_slice(device(), &[3_i64, -100, 0, 2, 1], &[5])?;
    Ok((logits, targets, tensor(&[1.0, 0.5, 2.0, 0.25, 1.0], &[5])?))
}

const ALL: CrossEntropyLoss = CrossEntropyLoss {
    ignore_index: -100,
    label_smoothing: 0.1,
    z_loss: 1e-2,
    reduction: Reduction::None,
};

/// `(F.cross_entropy(x, t, reduction="none", label_smoothing=0.1) + 1e-2 * x.logsumexp(-1)**2 * (t != -100)) * w`,
/// PyTorch 2.15, and its gradient. The mean divides by 4.25, the weights of the valid tokens.
#[test]
fn cross_entropy_is_that_of_pytorch() -> Result<()> {
    let (x, targets, weights) = tokens()?;
    #[rustfmt::skip]
    let gradient = [
        0.001544713636246514, 0.1583659127775923, 0.48539238287371705, -0.5712965967344815, 0.0, 0.0, 0.0, 0.0,
        -1.838438399612616, 0.03079627884332584, 0.5013936626092517, 1.439199357747926, 0.20796850108644724,
        0.03671968598638345, -0.22575541855271486, -0.005071653101172148, -0.0186942199935306, -0.9063734398933272,
        0.1066134218258521, 0.8618795233053924,
    ];
    let losses =
        [1.3196133063855264, 0.0, 10.12272878088909, 0.9610011906101983, 3.954437502621043];
    let loss = |reduction| {
        let loss = CrossEntropyLoss { reduction, ..ALL };
        loss.forward(&x.var()?, &targets, Some(&weights))
    };
    assert_loss(&x, &loss(Reduction::None)?, &losses, &gradient);
    assert_loss(&x, &loss(Reduction::Sum)?, &[16.35778078050586], &gradient);
    assert_loss(&x, &loss(Reduction::Mean)?, &[3.8488895954131435], &gradient.map(|g| g / 4.25));
    let plain = CrossEntropyLoss::default().forward(&x.var()?, &targets, None)?;
    assert_close(plain.value(), &[3.5564002503740513]);
    Ok(())
}

#[test]
fn gradients_are_those_of_finite_differences() -> Result<()> {
    let (x, targets, weights) = tokens()?;
    let logits = x.value()?;
    let options = GradcheckOptions::default();
    let (y, q) = (waves(20, 0.9, 1.0), tensor(&[0.25; 20], &[5, 4])?);
    let y = tensor(&y, &[5, 4])?;
    for reduction in REDUCTIONS {
        gradcheck(
            |x| CrossEntropyLoss { reduction, ..ALL }.forward(&x[0], &targets, Some(&weights)),
            std::slice::from_ref(&logits),
            &options,
        )?;
        gradcheck(
            |x| mean_squared_error(&x[0], &x[1], reduction),
            &[logits.clone(), y.clone()],
            &options,
        )?;
        gradcheck(
            |x| binary_cross_entropy_with_logits(&x[0], &q, 3.0, reduction),
            &[logits.add_scalar(0.01)?],
            &options,
        )?;
        gradcheck(
            |x| kl_divergence(&x[0].log_softmax(-1)?, &q, reduction),
            std::slice::from_ref(&logits),
            &options,
        )?;
    }
    Ok(())
}

/// Sums and maxima over two threads; each holds half of the classes.
struct Exchange {
    barrier: Barrier,
    values: Mutex<Vec<Tensor>>,
}

impl Exchange {
    fn join(&self, own: Tensor, join: fn(&Tensor, &Tensor) -> Result<Tensor>) -> Result<Tensor> {
        self.values.lock().unwrap().push(own);
        self.barrier.wait();
        let joined = {
            let values = self.values.lock().unwrap();
            join(&values[0], &values[1])
        };
        self.barrier.wait();
        self.values.lock().unwrap().clear();
        self.barrier.wait();
        joined
    }
}

impl VocabAllReduce for Exchange {
    fn max(&self, per_token: Tensor) -> Result<Tensor> {
        self.join(per_token, Tensor::maximum)
    }

    fn sum(&self, per_token: Tensor) -> Result<Tensor> {
        self.join(per_token, Tensor::add)
    }
}

#[test]
fn a_sharded_vocabulary_has_the_same_losses_and_gradients() -> Result<()> {
    let (x, targets, weights) = tokens()?;
    let whole = ALL.forward(&x.var()?, &targets, Some(&weights))?;
    whole.sum_all()?.backward()?;
    let gradient = x.gradient()?.unwrap();
    let exchange = Exchange { barrier: Barrier::new(2), values: Mutex::default() };
    std::thread::scope(|scope| {
        let run = |offset: usize| {
            let part = Leaf::new("part", x.value()?.narrow(1, offset, 2)?.copy()?);
            let shard = (VocabShard { offset, global: 4, shards: 2 }, &exchange as _);
            let losses = ALL.forward_shard(&part.var()?, &targets, Some(&weights), shard)?;
            assert_close(losses.value(), &whole.value().to_f64()?);
            losses.sum_all()?.backward()?;
            assert_close(&part.gradient()?.unwrap(), &gradient.narrow(1, offset, 2)?.to_f64()?);
            Ok(())
        };
        let other = scope.spawn(move || run(2));
        let own: Result<()> = run(0);
        own.and(other.join().expect("the other shard panicked"))
    })
}

#[test]
fn sixteen_bits_are_rounded_once() -> Result<()> {
    let (x, targets, weights) = tokens()?;
    let narrow = Leaf::new("narrow", x.value()?.cast(DType::BF16)?);
    let wide = Leaf::new("wide", narrow.value()?.cast(DType::F32)?);
    for leaf in [&narrow, &wide] {
        ALL.forward(&leaf.var()?, &targets, Some(&weights))?.sum_all()?.backward()?;
    }
    let rounded = wide.gradient()?.unwrap().cast(DType::BF16)?.to_f64()?;
    assert_eq!(narrow.gradient()?.unwrap().to_f64()?, rounded);
    Ok(())
}

/// `F.mse_loss`, `F.binary_cross_entropy_with_logits(.., pos_weight=3)` and `F.kl_div` of PyTorch 2.15.
#[test]
fn losses_of_elements_are_those_of_pytorch() -> Result<()> {
    let a = Leaf::new("a", tensor(&waves(6, 1.3, 2.0), &[6])?);
    let b: Vec<f64> = (0..6).map(|i| (f64::from(i) * 0.9).cos()).collect();
    #[rustfmt::skip]
    let gradient = [
        -0.3333333333333333, 0.4351688008545738, 0.4194016127786718, -0.15715339211696233, -0.29005029836871976,
        0.21367859186880356,
    ];
    let b = Var::constant(tensor(&b, &[6])?);
    let loss = mean_squared_error(&a.var()?, &b, Reduction::Mean)?;
    assert_loss(&a, &loss, &[0.9462984210155333], &gradient);

    let x = Leaf::new("x", tensor(&[0.0, 0.0, -30.0, 2.0, 50.0, -0.5], &[6])?);
    let y = tensor(&[0.0, 1.0, 0.25, 1.0, 0.0, 0.5], &[6])?;
    let loss = binary_cross_entropy_with_logits(&x.var()?, &y, 3.0, Reduction::None)?;
    #[rustfmt::skip]
    let losses = [
        LN_2, 2.0794415416798357, 22.500000000000142, 0.3807840331289175, 50.0, 1.6981539683602134,
    ];
    #[rustfmt::skip]
    let gradient = [0.5, -1.5, -0.7499999999998597, -0.35760876606635295, 1.0, -0.7449186624037092];
    assert_loss(&x, &loss, &losses, &gradient);

    let q = tensor(&[0.5, 0.5, 0.0, 0.1, 0.2, 0.7], &[2, 3])?;
    let log_probs = || a.var()?.reshape(&[2, 3])?.log_softmax(-1);
    #[rustfmt::skip]
    let losses = [
        0.8373106780941035, -0.12624750732308934, 0.0, -0.025350044387957904, 0.16620474595054474, -0.07935381255749185,
    ];
    #[rustfmt::skip]
    let gradient = [
        -0.40631044200299793, 0.14361653941322516, 0.2626939025897727, 0.028852795143640975, -0.11287937637794467,
        0.08402658123430373,
    ];
    assert_loss(&a, &kl_divergence(&log_probs()?, &q, Reduction::None)?, &losses, &gradient);
    let mean = kl_divergence(&log_probs()?, &q, Reduction::Mean)?;
    assert_close(mean.value(), &[0.12876067662935153]);
    Ok(())
}

#[test]
fn errors_name_the_shapes() -> Result<()> {
    let (x, targets, weights) = tokens()?;
    let x = x.var()?;
    let message = |result: Result<Var>| result.unwrap_err().to_string();
    let error = message(ALL.forward(&x, &targets, Some(&weights.narrow(0, 0, 4)?)));
    assert_eq!(error, "cross_entropy: weights are [4], targets [5]");
    let negative = CrossEntropyLoss { z_loss: -1.0, ..ALL };
    let error = message(negative.forward(&x, &targets, None));
    assert_eq!(error, "cross_entropy: the factor of the z-loss is at least 0, got -1");
    let error = message(mean_squared_error(&x, &Var::constant(weights), Reduction::Mean));
    let shown = "predictions are [5, 4], targets [5]: they need the same dims";
    assert_eq!(error, format!("mean_squared_error: {shown}"));
    Ok(())
}
