//! Matrix products against the CPU's: bitwise for integers, whose sums are exact in any order.

use ferrotron_tensor::ops::linear::{
    linear, linear_bias_gradient, linear_input_gradient, linear_parameter_gradients,
    linear_weight_gradient,
};
use ferrotron_tensor::ops::matmul::{Accum, matmul, matmul_into};
use ferrotron_tensor::{DType, Device, ErrorKind, RandomKey, Result, Tensor};
use std::process::Command;

use crate::support::{FLOATS, assert_like_cpu, gpu, stand_in};

/// Integers from -3 to 3.
pub fn integers(device: &Device, dtype: DType, dims: &[usize], seed: u64) -> Result<Tensor> {
    let key = RandomKey::new(seed, 0, "integers");
    let numel = dims.iter().product::<usize>() as u64;
    let values: Vec<f64> = (0..numel).map(|i| f64::from(key.bits(i) % 7) - 3.0).collect();
    Tensor::from_slice(device, &values, dims)?.cast(dtype)
}

/// Asserts that `f` computes the same numbers on both devices.
pub fn same(what: &str, gpu: &Device, f: impl Fn(&Device) -> Result<Tensor>) -> Result<()> {
    assert_like_cpu(what, gpu, 0.0, f)
}

/// Every way in which a matrix may lie, under a name.
fn views(
    device: &Device,
    dtype: DType,
    [m, n]: [usize; 2],
    seed: u64,
) -> Result<Vec<(&'static str, Tensor)>> {
    let make = |dims: &[usize]| integers(device, dtype, dims, seed);
    Ok(vec![
        ("dense", make(&[m, n])?),
        ("transposed", make(&[n, m])?.transpose(0, 1)?),
        ("wide rows", make(&[m, n + 3])?.narrow(1, 2, n)?),
        ("wide columns", make(&[n, m + 5])?.narrow(1, 1, m)?.transpose(0, 1)?),
        ("every second element", make(&[m, n, 2])?.narrow(2, 1, 1)?.reshape(&[m, n])?),
        ("one row", make(&[1, n])?.broadcast_to(&[m, n])?),
        ("one column", make(&[m, 1])?.broadcast_to(&[m, n])?),
    ])
}

#[test]
fn integers_of_every_dtype_and_size() -> Result<()> {
    let Some(device) = gpu("integers_of_every_dtype_and_size")? else { return Ok(()) };
    let sizes = [[1, 1, 1], [3, 5, 7], [16, 8, 4], [1, 9, 2], [9, 1, 2], [33, 2, 65], [2, 40, 1]];
    for dtype in FLOATS {
        for [m, n, k] in sizes {
            same(&format!("{dtype} {m} {n} {k}"), &device, |device| {
                let (a, b) =
                    (integers(device, dtype, &[m, k], 1)?, integers(device, dtype, &[k, n], 2)?);
                matmul(&a, &b)
            })?;
        }
    }
    Ok(())
}

#[test]
fn operands_may_lie_in_any_way() -> Result<()> {
    let Some(device) = gpu("operands_may_lie_in_any_way")? else { return Ok(()) };
    for [m, n, k] in [[6, 4, 5], [1, 3, 4], [3, 1, 4], [4, 3, 1]] {
        let count = views(&device, DType::F32, [m, k], 1)?.len();
        for (i, j) in (0..count).flat_map(|i| [(i, 0), (0, i), (i, i)]) {
            let names = views(&device, DType::F32, [m, k], 1)?;
            let what = format!("{} x {} of {m} {n} {k}", names[i].0, names[j].0);
            same(&what, &device, |device| {
                let a = views(device, DType::F32, [m, k], 1)?.swap_remove(i).1;
                let b = views(device, DType::F32, [k, n], 2)?.swap_remove(j).1;
                matmul(&a, &b)
            })?;
        }
    }
    Ok(())
}

#[test]
fn results_may_lie_in_any_way_and_be_added_to() -> Result<()> {
    let Some(device) = gpu("results_may_lie_in_any_way_and_be_added_to")? else {
        return Ok(());
    };
    let [m, n, k] = [5, 3, 4];
    let pairs = FLOATS.map(|dtype| (dtype, dtype));
    let wider = [DType::BF16, DType::F16].map(|dtype| (dtype, DType::F32));
    for (dtype, result) in pairs.into_iter().chain(wider) {
        // Those without elements that show twice.
        for i in 0..5 {
            for accum in [Accum::Replace, Accum::Add] {
                let name = views(&device, result, [m, n], 3)?[i].0;
                let what = format!("{dtype} {accum:?} into {result} {name}");
                same(&what, &device, |device| {
                    let a = integers(device, dtype, &[m, k], 1)?;
                    let b = integers(device, dtype, &[k, n], 2)?;
                    let mut out = views(device, result, [m, n], 3)?.swap_remove(i).1;
                    matmul_into(&mut out, accum, &a, &b)?;
                    // What lies around the view must be as before.
                    Ok(out.whole_buffer())
                })?;
            }
        }
    }
    Ok(())
}

#[test]
fn batches_are_broadcast_and_joined() -> Result<()> {
    let Some(device) = gpu("batches_are_broadcast_and_joined")? else { return Ok(()) };
    let cases: &[(&str, &[usize], &[usize])] = &[
        ("both", &[4, 3, 5], &[4, 5, 2]),
        ("left alone", &[4, 3, 5], &[5, 2]),
        ("right alone", &[3, 5], &[4, 5, 2]),
        ("left stretched", &[1, 3, 5], &[4, 5, 2]),
        ("two dims", &[2, 3, 4, 5], &[2, 3, 5, 2]),
        ("crosswise", &[2, 1, 4, 5], &[3, 5, 2]),
        ("three dims", &[2, 1, 3, 4, 5], &[2, 1, 5, 2]),
        ("batch of nothing", &[0, 3, 5], &[0, 5, 2]),
        ("single", &[1, 3, 5], &[1, 5, 2]),
    ];
    for (what, lhs, rhs) in cases {
        same(what, &device, |device| {
            matmul(&integers(device, DType::BF16, lhs, 1)?, &integers(device, DType::BF16, rhs, 2)?)
        })?;
    }
    // Heads of (B, T, H, D) as (B, H, T, D): two dims of the batch that cannot be one.
    same("heads", &device, |device| {
        let heads = |seed| integers(device, DType::F32, &[2, 5, 3, 4], seed)?.transpose(1, 2);
        matmul(&heads(1)?, &heads(2)?.transpose(-1, -2)?)
    })?;
    // The result as (B, T, H, D) again, and every second product of it.
    same("into heads", &device, |device| {
        let mut out = integers(device, DType::F32, &[2, 5, 3, 4], 3)?.transpose(1, 2)?;
        let (a, b) = (
            integers(device, DType::F32, &[2, 3, 5, 6], 1)?,
            integers(device, DType::F32, &[6, 4], 2)?,
        );
        matmul_into(&mut out, Accum::Add, &a, &b)?;
        Ok(out)
    })
}

#[test]
fn empty_sizes_leave_zeros_the_bias_or_what_was_there() -> Result<()> {
    let Some(device) = gpu("empty_sizes_leave_zeros_the_bias_or_what_was_there")? else {
        return Ok(());
    };
    for (m, n, k) in [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)] {
        for accum in [Accum::Replace, Accum::Add] {
            for dense in [true, false] {
                same(&format!("{m} {n} {k} {accum:?} {dense}"), &device, |device| {
                    let (a, b) = (
                        integers(device, DType::F32, &[m, k], 1)?,
                        integers(device, DType::F32, &[k, n], 2)?,
                    );
                    let mut out = integers(device, DType::F32, &[m, n + 1], 3)?;
                    match dense {
                        true => out = out.narrow(1, 0, n)?.contiguous()?.copy()?,
                        false => out = out.narrow(1, 0, n)?,
                    }
                    matmul_into(&mut out, accum, &a, &b)?;
                    out.contiguous()
                })?;
            }
        }
        same(&format!("linear {m} {n} {k}"), &device, |device| {
            let (x, w) = (
                integers(device, DType::F32, &[m, k], 1)?,
                integers(device, DType::F32, &[n, k], 2)?,
            );
            linear(&x, &w, Some(&integers(device, DType::F32, &[n], 3)?))
        })?;
    }
    Ok(())
}

#[test]
fn a_linear_layer_and_its_gradients() -> Result<()> {
    let Some(device) = gpu("a_linear_layer_and_its_gradients")? else { return Ok(()) };
    for dtype in FLOATS {
        for (rows, k, n) in [(&[2_usize, 3][..], 8, 5), (&[7], 3, 1), (&[], 4, 6)] {
            let wide = |last: usize| [rows, &[last]].concat();
            let x = |device: &Device| integers(device, dtype, &wide(k), 1);
            let dy = |device: &Device| integers(device, dtype, &wide(n), 2);
            let weight = |device: &Device| integers(device, dtype, &[n, k], 3);
            let what = |name: &str| format!("{name} {dtype} {rows:?} {k} {n}");
            same(&what("linear"), &device, |device| linear(&x(device)?, &weight(device)?, None))?;
            same(&what("with a bias"), &device, |device| {
                // Neither dense nor at a multiple of 16 bytes.
                let bias =
                    integers(device, dtype, &[n + 1, 2], 4)?.narrow(1, 1, 1)?.reshape(&[n + 1])?;
                linear(&x(device)?, &weight(device)?, Some(&bias.narrow(0, 1, n)?))
            })?;
            for accum in [Accum::Replace, Accum::Add] {
                same(&what("dx"), &device, |device| {
                    let mut dx = x(device)?;
                    linear_input_gradient(&mut dx, accum, &dy(device)?, &weight(device)?)?;
                    Ok(dx)
                })?;
                for wider in [dtype, DType::F32].into_iter().filter(|_| dtype != DType::F64) {
                    same(&what("dw"), &device, |device| {
                        let mut dw = integers(device, wider, &[n, k], 5)?;
                        linear_weight_gradient(&mut dw, accum, &dy(device)?, &x(device)?)?;
                        Ok(dw)
                    })?;
                    for gradient in ["dw with db", "db"] {
                        same(&what(gradient), &device, |device| {
                            let mut dw = integers(device, wider, &[n, k], 5)?;
                            let (dy, x) = (dy(device)?, x(device)?);
                            let db = linear_parameter_gradients(&mut dw, accum, &dy, &x)?;
                            let fused = device.is_gpu() && dtype != DType::F64;
                            assert!(if all_are_taken() {
                                db.is_some() == fused
                            } else {
                                fused || db.is_none()
                            });
                            let db =
                                db.map_or_else(|| linear_bias_gradient(&dy)?.cast(wider), Ok)?;
                            Ok(if gradient == "db" { db } else { dw })
                        })?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// A number with which the stand-in refuses half of the epilogues.
const REFUSES: &str = "FERROTRON_STAND_IN_REFUSES";

/// Whether every epilogue is one that cuBLASLt takes, if its types and sizes can be at all: on a GPU nobody knows.
pub fn all_are_taken() -> bool {
    ["FERROTRON_TEST_GPU", REFUSES].iter().all(|name| std::env::var_os(name).is_none())
}

/// Products and a small model, in processes in which other epilogues are refused each time.
#[test]
fn refused_epilogues_are_done_without() -> Result<()> {
    let test = "refused_epilogues_are_done_without";
    if !all_are_taken() || stand_in(test)?.is_none() {
        return Ok(());
    }
    for seed in ["1", "2"] {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["matmul::", "linear::", "graph::", "linear_cross_entropy::"]);
        let out = command.env(REFUSES, seed).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(out.status.success(), "{seed}:\n{}{}", text(&out.stdout), text(&out.stderr));
    }
    Ok(())
}

#[test]
fn fractions_are_as_close_as_their_sums_allow() -> Result<()> {
    let Some(device) = gpu("fractions_are_as_close_as_their_sums_allow")? else {
        return Ok(());
    };
    let [m, n, k] = [37, 21, 130];
    for dtype in FLOATS {
        let key = RandomKey::new(7, 0, "fractions");
        let values = |first: u64, len: usize| -> Vec<f64> {
            (0..len as u64).map(|i| key.normal(first + i)).collect()
        };
        let on = |device: &Device| -> Result<[Tensor; 3]> {
            let make = |first, dims: &[usize]| {
                Tensor::from_slice(device, &values(first, dims.iter().product()), dims)?.cast(dtype)
            };
            Ok([make(0, &[m, k])?, make(10_000, &[n, k])?, make(20_000, &[n])?])
        };
        let [x, w, b] = on(&Device::cpu(1)?)?;
        let want = linear(&x, &w, Some(&b))?.to_f64()?;
        let [gx, gw, gb] = on(&device)?;
        let got = linear(&gx, &gw, Some(&gb))?.to_f64()?;
        // Each of k + 1 additions rounds a partial sum. The result is rounded to its dtype, and before that the product
        // may be, by half a unit: cuBLASLt 13.1 on an H200 adds the bias to a product that it has rounded to bf16.
        let magnitudes = linear(&x.abs()?, &w.abs()?, Some(&b.abs()?))?.to_f64()?;
        let sums = if dtype == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
        let biases = b.to_f64()?;
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let product = (want - biases[i % n]).abs();
            let rounded = dtype.epsilon() * (want.abs() + 0.5 * product);
            let bound = sums * (k + 2) as f64 * magnitudes[i] + rounded;
            assert!((got - want).abs() <= bound, "{dtype} [{i}]: {got}, not {want} within {bound}");
        }
    }
    Ok(())
}

#[test]
fn what_cannot_be_is_an_error() -> Result<()> {
    let Some(gpu) = gpu("what_cannot_be_is_an_error")? else { return Ok(()) };
    let x = Tensor::zeros(&gpu, DType::F32, &[2, 2])?;
    let mut out = Tensor::zeros(&gpu, DType::F32, &[2, 2])?;
    let held = out.clone();
    let error = matmul_into(&mut out, Accum::Replace, &x, &x).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Memory, "{error}");
    drop(held);
    matmul_into(&mut out, Accum::Replace, &x, &x)?;
    let error = matmul(&x, &Tensor::zeros(&Device::cpu(1)?, DType::F32, &[2, 2])?).unwrap_err();
    assert!(error.to_string().starts_with("matmul: operands are on different devices"), "{error}");
    let error = matmul_into(&mut Tensor::zeros(&gpu, DType::BF16, &[2, 2])?, Accum::Add, &x, &x);
    assert_eq!(error.unwrap_err().to_string(), "matmul: cannot put a product of f32 into bf16");
    Ok(())
}
