//! Softmax, log-softmax and their gradients.

use ferrotron_tensor::ops::softmax::{
    log_softmax, log_softmax_backward, softmax, softmax_backward,
};
use ferrotron_tensor::{DType, Result, Tensor};
use std::process::Command;

use crate::both::{assert_close, cpu, rounding, there, views};
use crate::support::{FLOATS, gpu, random, stand_in};

#[test]
fn softmax_along_any_dim_gives_what_the_cpu_gives() -> Result<()> {
    let Some(gpu) = gpu("softmax_along_any_dim_gives_what_the_cpu_gives")? else { return Ok(()) };
    type Forward = fn(&Tensor, isize) -> Result<Tensor>;
    type Backward = fn(&Tensor, Tensor, isize) -> Result<Tensor>;
    let both: [(&str, Forward, Backward); 2] = [
        ("softmax", softmax, softmax_backward),
        ("log_softmax", log_softmax, log_softmax_backward),
    ];
    for dtype in FLOATS {
        for (dims, dim) in [
            (&[7][..], 0),
            (&[3, 1], 1),
            (&[4, 33, 5], 1),
            (&[9, 2, 3], 0),
            (&[6, 128], -1),
            (&[2, 1031], 1),
            (&[0, 4], 1),
        ] {
            let own = random(&cpu()?, dtype, dims, 1)?.mul_scalar(3.0)?;
            let dy = random(&cpu()?, dtype, dims, 2)?;
            let width = own.dim(dim)? as f64;
            // Sums of n exponentials in different orders are n / 32 + 32 roundings apart at most.
            let eps = rounding(dtype) + dtype.accumulator().epsilon() * (width / 32.0 + 40.0);
            let all = if own.numel() > 0 { views(&own)? } else { vec![own] };
            for x in all {
                for (name, forward, backward) in both {
                    let what = format!("{name} along {dim} of {x:?}");
                    let want = forward(&x, dim)?;
                    // Logarithms are differences of numbers as large as the logits, 6 here.
                    let log = name == "log_softmax";
                    let far = if log { 6.0 * eps } else { 0.0 };
                    assert_close(&what, &forward(&there(&gpu, &x)?, dim)?, &want, eps, far)?;
                    let dx = backward(&want, dy.copy()?, dim)?;
                    let got = backward(&there(&gpu, &want)?, there(&gpu, &dy)?, dim)?;
                    // A sum of n numbers up to 2 is subtracted, of softmax as far as probabilities go.
                    let far = 2.0 * eps * if log { width } else { 1.0 };
                    assert_close(&format!("gradient of {what}"), &got, &dx, eps, far)?;
                }
            }
        }
    }
    Ok(())
}

/// The beginning of the names of kernels that the stand-in lets fail.
const FAILS: &str = "FERROTRON_STAND_IN_FAILS";

/// An error of the GPU is returned to whoever waits next; with the driver's variable to the launch of the kernel.
#[test]
fn a_kernel_that_fails_is_named_where_launches_wait() -> Result<()> {
    let test = "a_kernel_that_fails_is_named_where_launches_wait";
    let Some(device) = stand_in(test)? else { return Ok(()) };
    if std::env::var_os(FAILS).is_some() {
        let x = random(&device, DType::F32, &[3, 5], 1)?;
        let y = softmax(&x.add(&x)?, 1).and_then(|y| y.add(&y))?;
        return y.to_vec::<f32>().map(drop);
    }
    for (blocking, named) in [
        ("0", "Error: Device error: cuStreamSynchronize: "),
        ("1", "Error: Device error: softmax: the launch failed: "),
    ] {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([&format!("softmax::{test}"), "--exact", "--nocapture"]);
        let out =
            command.env(FAILS, "softmax").env("CUDA_LAUNCH_BLOCKING", blocking).output().unwrap();
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && text.contains(named), "{blocking}: {text}");
    }
    Ok(())
}

#[test]
fn the_gradient_overwrites_a_unique_dy_and_only_that() -> Result<()> {
    let Some(gpu) = gpu("the_gradient_overwrites_a_unique_dy_and_only_that")? else {
        return Ok(());
    };
    let y = softmax(&random(&gpu, FLOATS[1], &[2, 3], 1)?, 1)?;
    let dy = random(&gpu, FLOATS[1], &[2, 3], 2)?;
    let (id, before) = (dy.buffer_id(), dy.to_f64()?);
    let dx = softmax_backward(&y, dy.clone(), 1)?;
    assert_eq!(dy.to_f64()?, before);
    let over = softmax_backward(&y, dy, 1)?;
    assert_eq!((over.buffer_id(), over.to_f64()?), (id, dx.to_f64()?));
    Ok(())
}
