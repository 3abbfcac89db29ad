//! Instructions of kernels: a kernel that the compiler no longer vectorizes executes several times as many. Limits are about
//! twice the numbers of AVX-512 and 512 elements a row, since compilers differ.

use super::cast::cast;
use super::cross_entropy::{CrossEntropyConfig, cross_entropy, cross_entropy_backward};
use super::layer_norm::{layer_norm, layer_norm_backward};
use super::optim::adamw::{AdamW, adamw};
use super::optim::round::{Stochastic, round};
use super::optim::rounded::Rounded;
use super::optim::sgd::{Nesterov, Sgd, sgd};
use super::optim::sq_norm::add_sq_norm;
use super::optim::step::{DeviceStepParams, StepParams};
use super::pointwise::{add_assign, unary, unary_backward};
use super::rms_norm::rms_norm;
use super::softmax::{softmax, softmax_backward};
use super::table::Unary;
use crate::numeric::instructions::instructions;
use crate::{DType, Device, RandomKey, Result, ShardSpec, SimdLevel, Tensor};

const WIDTH: usize = 512;

/// Prepares a kernel on so many rows of [`WIDTH`] elements, and returns a run of it.
type Prepare<'a> = &'a dyn Fn(usize) -> Result<Box<dyn FnMut() -> Result<()>>>;

/// Instructions for each vector of f32: the difference between many rows and few.
fn per_vector(lanes: usize, prepare: Prepare) -> f64 {
    let count = |rows| {
        let mut run = prepare(rows).unwrap();
        run().unwrap(); // takes memory from the system
        instructions(|| run().unwrap()) as f64
    };
    (count(8) - count(4)) / (4 * WIDTH / lanes) as f64
}

#[test]
fn kernels_execute_the_instructions_of_vectors() {
    let lanes = match SimdLevel::detect() {
        SimdLevel::Portable => return println!("not on this processor: it lacks AVX2"),
        SimdLevel::Avx2 => 8,
        SimdLevel::Avx512 => 16,
    };
    let device = Device::cpu(1).unwrap();
    let device = &device;
    let full = |dtype, rows: usize, x| Tensor::full(device, dtype, &[rows, WIDTH], x);
    let flat = |dtype, rows: usize, x| Tensor::full(device, dtype, &[rows * WIDTH], x);
    let step =
        || DeviceStepParams::new(device, &StepParams { update: 1, lr: 0.1, grad_scale: 0.5 });
    let mut found = Vec::new();
    let mut check = |name: &str, limit: f64, prepare: Prepare| {
        found.push((name.to_string(), per_vector(lanes, prepare), limit));
    };

    for (dtype, name, wide) in [(DType::F32, "f32", 0.0), (DType::BF16, "bf16", 1.0)] {
        for (op, forward, backward) in [
            (Unary::GeluTanh, 80.0, 90.0),
            (Unary::Exp, 50.0, 15.0),
            (Unary::Tanh, 90.0, 15.0),
            (Unary::Silu, 70.0, 80.0),
            (Unary::Relu, 15.0, 15.0),
        ] {
            check(&format!("{op:?} {name}"), forward + 20.0 * wide, &|rows| {
                let x = full(dtype, rows, 0.5)?;
                Ok(Box::new(move || unary(op, 0.0, &x).map(drop)))
            });
            check(&format!("{op:?} {name} backward"), backward + 20.0 * wide, &|rows| {
                let (x, mut dx) = (full(dtype, rows, 0.5)?, Some(full(dtype, rows, 0.5)?));
                Ok(Box::new(move || {
                    dx = Some(unary_backward(op, 0.0, dx.take().unwrap(), Some(&x))?);
                    Ok(())
                }))
            });
        }
        check(&format!("add_assign {name}"), 10.0 + 20.0 * wide, &|rows| {
            let (mut y, x) = (full(dtype, rows, 0.5)?, full(dtype, rows, 0.5)?);
            Ok(Box::new(move || add_assign(&mut y, &x)))
        });
        check(&format!("add_assign {name} to a part"), 17.0 + 20.0 * wide, &|rows| {
            let x = full(dtype, rows, 0.5)?;
            let mut y = Tensor::full(device, dtype, &[rows, 2 * WIDTH], 0.5)?;
            Ok(Box::new(move || y.narrow_mut(1, 0, WIDTH, |y| add_assign(y, &x))))
        });
        check(&format!("softmax {name}"), 140.0 + 40.0 * wide, &|rows| {
            let x = full(dtype, rows, 0.5)?;
            Ok(Box::new(move || softmax(&x, 1).map(drop)))
        });
        check(&format!("softmax {name} backward"), 40.0 + 20.0 * wide, &|rows| {
            let (y, mut dy) = (full(dtype, rows, 0.5)?, Some(full(dtype, rows, 0.5)?));
            Ok(Box::new(move || {
                dy = Some(softmax_backward(&y, dy.take().unwrap(), 1)?);
                Ok(())
            }))
        });
        check(&format!("cross-entropy {name}"), 100.0 + 20.0 * wide, &|rows| {
            let (x, config) = (full(dtype, rows, 0.5)?, CrossEntropyConfig::default());
            let targets = Tensor::from_slice(device, &vec![7_i64; rows], &[rows])?;
            Ok(Box::new(move || cross_entropy(&x, &targets, &config).map(drop)))
        });
        check(&format!("cross-entropy {name} backward"), 90.0 + 20.0 * wide, &|rows| {
            let (x, config) = (full(dtype, rows, 0.5)?, CrossEntropyConfig::default());
            let targets = Tensor::from_slice(device, &vec![7_i64; rows], &[rows])?;
            let lse = cross_entropy(&x, &targets, &config)?.lse;
            let (one, mut x) = (Tensor::full(device, DType::F32, &[], 1.0)?, Some(x));
            Ok(Box::new(move || {
                let logits = x.take().unwrap();
                x = Some(cross_entropy_backward(logits, &targets, &lse, &config, &one)?);
                Ok(())
            }))
        });
        // In narrow rows their ends count.
        for (width, forward, backward) in [
            (WIDTH, 40.0 + 25.0 * wide, 85.0 + 30.0 * wide),
            (128, 45.0 + 20.0 * wide, 75.0 + 25.0 * wide),
        ] {
            let operands = |rows| {
                let x = full(dtype, rows, 0.5)?.reshape(&[rows * WIDTH / width, width])?;
                Result::Ok((x, Tensor::full(device, dtype, &[width], 1.0)?))
            };
            check(&format!("layer_norm {name} of {width}"), forward, &|rows| {
                let (x, weight) = operands(rows)?;
                Ok(Box::new(move || layer_norm(&x, &weight, Some(&weight), 1e-5).map(drop)))
            });
            check(&format!("layer_norm {name} of {width}, backward"), backward, &|rows| {
                let (x, weight) = operands(rows)?;
                let (y, mean, rstd) = layer_norm(&x, &weight, None, 1e-5)?;
                let gradients = move || layer_norm_backward(&y, &x, &mean, &rstd, &weight, None);
                Ok(Box::new(move || gradients().map(drop)))
            });
        }
        check(&format!("layer_norm {name} backward, added"), 90.0 + 45.0 * wide, &|rows| {
            let (x, weight) =
                (full(dtype, rows, 0.5)?, Tensor::full(device, dtype, &[WIDTH], 1.0)?);
            let (y, mean, rstd) = layer_norm(&x, &weight, None, 1e-5)?;
            let gradients = move || layer_norm_backward(&y, &x, &mean, &rstd, &weight, Some(&x));
            Ok(Box::new(move || gradients().map(drop)))
        });
        check(&format!("rms_norm {name}"), 20.0 + 20.0 * wide, &|rows| {
            let (x, weight) =
                (full(dtype, rows, 0.5)?, Tensor::full(device, dtype, &[WIDTH], 1.0)?);
            Ok(Box::new(move || rms_norm(&x, &weight, 1e-5).map(drop)))
        });
        check(&format!("sq_norm {name}"), 25.0, &|rows| {
            let (mut sum, x) = (Tensor::zeros(device, DType::F64, &[1])?, flat(dtype, rows, 0.5)?);
            Ok(Box::new(move || add_sq_norm(&mut sum, &x)))
        });
        let other = if dtype == DType::F32 { DType::BF16 } else { DType::F32 };
        check(&format!("cast {name} to {other}"), 20.0, &|rows| {
            let x = full(dtype, rows, 0.5)?;
            Ok(Box::new(move || cast(&x, other).map(drop)))
        });
    }
    let copied = [None, Some(DType::BF16)];
    for (copy, limit) in copied.into_iter().zip([40.0, 60.0]) {
        check(&format!("adamw with {copy:?}"), limit, &|rows| {
            let all = || flat(DType::F32, rows, 0.5);
            let (mut w, g, mut m, mut v) = (all()?, all()?, all()?, all()?);
            let (step, config) = (step()?, AdamW::default());
            let mut copy = copy.map(|dtype| flat(dtype, rows, 0.5)).transpose()?;
            Ok(Box::new(move || {
                adamw(
                    &config,
                    &step,
                    &mut w,
                    &g,
                    &mut m,
                    &mut v,
                    copy.as_mut().map(Rounded::nearest),
                )
            }))
        });
    }
    check("sgd", 30.0, &|rows| {
        let all = || flat(DType::F32, rows, 0.5);
        let (mut w, g, mut m, step) = (all()?, all()?, all()?, step()?);
        let config = Sgd { momentum: 0.9, weight_decay: 0.1, nesterov: Nesterov::On };
        Ok(Box::new(move || sgd(&config, &step, &mut w, &g, &mut m, None)))
    });
    check("stochastic rounding", 220.0, &|rows| {
        let (mut y, x) = (flat(DType::BF16, rows, 0.5)?, flat(DType::F32, rows, 0.3)?);
        let (key, place) = (RandomKey::new(1, 2, "weight"), ShardSpec::unsharded(&[rows * WIDTH]));
        Ok(Box::new(move || {
            round(&mut y, &x, Some(Stochastic { key: &key, place: &place, step: None }))
        }))
    });

    for (name, count, limit) in &found {
        println!("{name}: {count:.1} instructions a vector, at most {limit}");
    }
    let slow: Vec<_> = found.iter().filter(|(_, count, limit)| count > limit).collect();
    assert!(slow.is_empty(), "instructions for {lanes} elements, and at most: {slow:?}");
}
