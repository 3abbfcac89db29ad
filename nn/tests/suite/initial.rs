//! Initial values: slices of one global tensor, with the right spread.

use ferrotron_nn::{Init, Scope, WeightDecay};
use ferrotron_tensor::{DType, Device, Result, ShardSpec};

#[test]
fn a_part_starts_as_a_slice_of_the_whole() -> Result<()> {
    let device = Device::cpu(1)?;
    let scope = Scope::new(&device, DType::F32, 1234).child("blocks.0.attn.qkv");
    let columns = [(0, 2), (4, 1)];
    for init in [Init::Normal { std: 0.02 }, Init::XavierNormal, Init::XavierUniform, Init::Ones] {
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
