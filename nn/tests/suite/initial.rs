//! Initial values: slices of one global tensor, with the right spread.

use ferrotron_nn::{Fan, Init, Scope, WeightDecay};
use ferrotron_tensor::{DType, Device, Result, ShardSpec};

#[test]
fn a_part_starts_as_a_slice_of_the_whole() -> Result<()> {
    let device = Device::cpu(1)?;
    let scope = Scope::new(&device, DType::F32, 1234).child("blocks.0.attn.qkv");
    let columns = [(0, 2), (4, 1)];
    for init in [
        Init::Normal { std: 0.02 },
        Init::TruncatedNormal { std: 0.02, low: -0.03, high: 0.04 },
        Init::XavierNormal,
        Init::XavierUniform,
        Init::KAIMING_NORMAL,
        Init::KAIMING_UNIFORM,
        Init::Ones,
        Init::Constant { value: 0.75 },
    ] {
        let whole = scope.param("weight", &[8, 6], init, WeightDecay::On);
        let place = ShardSpec::new(&[8, 6], &[&[(2, 3)], &columns])?;
        let part = scope.param_at("weight", place, init, WeightDecay::On);
        assert_eq!(part.name(), "blocks.0.attn.qkv.weight");
        let whole = whole.leaf().value()?.to_vec::<f32>()?;
        let rows = (2..5).flat_map(|row| [0, 1, 4].map(|column| whole[6 * row + column]));
        assert_eq!(part.leaf().value()?.to_vec::<f32>()?, rows.collect::<Vec<_>>(), "{init:?}");
    }
    Ok(())
}

#[test]
fn values_depend_on_seed_and_name_alone() -> Result<()> {
    let device = Device::cpu(2)?;
    let value = |seed: u64, child: &str| {
        let scope = Scope::new(&device, DType::F64, seed).child(child);
        scope.param("weight", &[4, 3], Init::XavierNormal, WeightDecay::On).leaf().value()?.to_f64()
    };
    assert_eq!(value(1, "fc")?, value(1, "fc")?);
    assert_ne!(value(1, "fc")?, value(2, "fc")?);
    assert_ne!(value(1, "fc")?, value(1, "proj")?);
    Ok(())
}

#[test]
fn values_have_the_promised_spread() -> Result<()> {
    let device = Device::cpu(1)?;
    let scope = Scope::new(&device, DType::F64, 5);
    let (rows, columns) = (100, 300);
    let n = (rows * columns) as f64;
    let fans = (rows + columns) as f64;
    for (init, std) in [
        (Init::Normal { std: 0.02 }, 0.02),
        (Init::XavierNormal, (2.0 / fans).sqrt()),
        (Init::XavierUniform, (2.0 / fans).sqrt()), // bound / sqrt(3)
        (Init::KAIMING_NORMAL, (2.0 / 300.0_f64).sqrt()),
        (Init::KaimingNormal { fan: Fan::Out, gain: 1.0 }, 0.1),
        (Init::KaimingUniform { fan: Fan::In, gain: 5.0 / 3.0 }, 5.0 / 3.0 / 300.0_f64.sqrt()),
        // 0.8796256610342398 is the deviation of a standard normal between -2 and 2.
        (Init::TruncatedNormal { std: 0.5, low: -1.0, high: 1.0 }, 0.5 * 0.8796256610342398),
    ] {
        let param = scope.param("weight", &[rows, columns], init, WeightDecay::On);
        let values = param.leaf().value()?.to_f64()?;
        let mean = values.iter().sum::<f64>() / n;
        let spread = (values.iter().map(|x| x * x).sum::<f64>() / n).sqrt();
        // Five standard errors: std / sqrt(n) of a mean, std / sqrt(2 n) of a deviation.
        assert!(mean.abs() <= 5.0 * std / n.sqrt(), "{init:?}: mean {mean}");
        assert!(
            (spread - std).abs() <= 5.0 * std / (2.0 * n).sqrt(),
            "{init:?}: {spread} for {std}"
        );
        if init == Init::XavierUniform {
            let bound = (6.0 / fans).sqrt();
            assert!(values.iter().all(|x| x.abs() <= bound));
        }
    }
    let zeros = scope.param("bias", &[5], Init::Zeros, WeightDecay::Off);
    assert_eq!(zeros.leaf().value()?.to_f64()?, [0.0; 5]);
    Ok(())
}

/// A convolution (out 4, in 3, 5 x 5): the fan in is 75, the fan out 100.
#[test]
fn further_dims_multiply_fans_and_vectors_have_none() -> Result<()> {
    let scope = Scope::new(&Device::cpu(1)?, DType::F64, 5);
    let largest = |name: &str, init| {
        let values = scope.param(name, &[4, 3, 5, 5], init, WeightDecay::On).leaf().value()?;
        Ok(values.to_f64()?.iter().fold(0.0, |most: f64, x| most.max(x.abs())))
    };
    for (fan, size) in [(Fan::In, 75.0_f64), (Fan::Out, 100.0)] {
        let bound = (3.0 / size).sqrt();
        let found: Result<f64> = largest("kernel", Init::KaimingUniform { fan, gain: 1.0 });
        let found = found?;
        assert!(found <= bound && found > 0.95 * bound, "{fan:?}: {found} for {bound}");
    }
    let vector = scope.param("bias", &[4], Init::KAIMING_NORMAL, WeightDecay::Off);
    let error = vector.leaf().value().unwrap_err().to_string();
    assert!(error.starts_with("bias: init: KaimingNormal"), "{error}");
    assert!(error.ends_with("needs a weight (out, in, ..), got [4]"), "{error}");
    Ok(())
}

#[test]
fn nothing_is_allocated_before_it_is_asked_for() -> Result<()> {
    let device = Device::cpu(1)?;
    let scope = Scope::new(&device, DType::F64, 5);
    let param = scope.param("weight", &[4, 3], Init::XavierNormal, WeightDecay::On);
    assert_eq!(device.memory().n_alloc, 0);
    param.leaf().value()?;
    assert_eq!(device.memory().current, 4 * 3 * 8);
    Ok(())
}
