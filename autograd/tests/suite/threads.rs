//! Every row on one, two and three threads: the same bits; and two callers on one device.

use ferrotron_autograd::{Leaf, Var, checkpoint, no_grad, saved_tensors_hooks};
use ferrotron_tensor::{DType, Device, Result, Tensor};
use std::thread;

use crate::inputs::{bits, report, run, tensor, values, which};
use crate::table::{OpCase, table};

/// Minimum elements of the largest input, enough to be shared out among threads. Loops that only add, eight elements in
/// a nanosecond, are shared out from 8192 nanoseconds on; products are larger still.
const ELEMENTS: usize = 8 * 16_384;

/// The dims of the inputs, all multiplied with the smallest number that makes one large enough.
fn enlarged(case: &OpCase) -> Vec<Vec<usize>> {
    let scaled = |scale: usize| -> Vec<Vec<usize>> {
        let larger = |&size: &usize| if size > 1 { scale * size } else { size };
        case.shapes[0].iter().map(|dims| dims.iter().map(larger).collect()).collect()
    };
    let enough = |shapes: &Vec<Vec<usize>>| {
        shapes.iter().any(|dims| dims.iter().product::<usize>() >= ELEMENTS)
    };
    (2..).map(scaled).find(enough).expect("every row has an input with two elements")
}

fn compare(case: &OpCase, dtype: DType, failures: &mut Vec<String>) -> Result<()> {
    let shapes = enlarged(case);
    let answers = |threads| -> Result<Vec<Tensor>> {
        let device = Device::cpu(threads)?;
        let sample = |(input, dims): (usize, &Vec<usize>)| {
            let values = values(case.domain, input, dims.iter().product());
            tensor(&device, dtype, dims, &values)
        };
        let inputs: Vec<_> = shapes.iter().enumerate().map(sample).collect::<Result<_>>()?;
        run(&case.f, &inputs)
    };
    let one = answers(1)?;
    for threads in [2, 3] {
        for (i, (one, more)) in one.iter().zip(&answers(threads)?).enumerate() {
            if bits(one)? != bits(more)? {
                let (name, what) = (case.name(), which(i));
                failures
                    .push(format!("{name} {shapes:?} {dtype}, {threads} threads: {what} differs"));
            }
        }
    }
    Ok(())
}

#[test]
fn one_two_and_three_threads_give_the_same_bits() {
    let mut failures = Vec::new();
    for case in table() {
        for dtype in [DType::F32, DType::BF16] {
            if let Err(error) = compare(&case, dtype, &mut failures) {
                failures.push(format!("{} {dtype}: {error}", case.name()));
            }
        }
    }
    report(&failures);
}

/// Threads that call operations of one device at the same time share its threads, and each keeps its recording mode.
#[test]
fn training_and_evaluation_share_a_device() -> Result<()> {
    let device = Device::cpu(2)?;
    let dims = [256, 256];
    let leaf =
        || -> Result<Leaf> { Ok(Leaf::new("w", Tensor::full(&device, DType::F32, &dims, 0.5)?)) };
    let x = Tensor::full(&device, DType::F32, &dims, 0.25)?;
    let value = |w: &Leaf| w.var()?.matmul(&Var::constant(x.clone()))?.sum_all();
    const ROUNDS: usize = 200;
    let train = || -> Result<()> {
        let w = leaf()?;
        for _ in 0..ROUNDS {
            w.zero_gradient();
            value(&w)?.backward()?;
            // Each element of w meets a row of 256 elements 1/4.
            assert!(w.gradient()?.expect("a gradient").to_f64()?.iter().all(|&g| g == 64.0));
        }
        Ok(())
    };
    let evaluate = || -> Result<()> {
        let w = leaf()?;
        for _ in 0..ROUNDS {
            assert!(!no_grad(|| value(&w))?.needs_gradient());
        }
        Ok(())
    };
    thread::scope(|scope| {
        let others = [scope.spawn(evaluate), scope.spawn(evaluate)];
        train()?;
        others.into_iter().try_for_each(|other| other.join().expect("no panic"))
    })
}

/// A mode ends with its closure, also by a panic, on any number of threads.
#[test]
fn the_recording_mode_ends_with_its_closure() -> Result<()> {
    for device in [Device::cpu(1)?, Device::cpu(2)?] {
        let w = Leaf::new("w", Tensor::full(&device, DType::F64, &[3], 0.5)?);
        let value = || w.var()?.exp()?.sum_all();
        assert!(!no_grad(value)?.needs_gradient());
        assert!(!no_grad(|| no_grad(value))?.needs_gradient());
        assert!(value()?.needs_gradient());
        let panics = || no_grad(|| -> Result<Var> { panic!("on purpose") });
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics));
        assert!(caught.is_err());
        assert!(value()?.needs_gradient());

        // The parameters of a region are known, and its saved tensors.
        let captured = w.clone();
        let x = Leaf::new("x", Tensor::full(&device, DType::F64, &[3], 2.0)?);
        let y = checkpoint(&[&x.var()?], move |x| Ok(vec![x[0].mul(&captured.var()?)?.square()?]))?;
        y[0].sum_all()?.backward()?;
        assert_eq!(w.gradient()?.expect("a gradient").to_f64()?, [2.0 * 0.5 * 4.0; 3]);
        let mut handles = 0;
        let count = |kept: Vec<_>| {
            handles = kept.len();
            Ok(())
        };
        saved_tensors_hooks(count, || x.var()?.add_scalar(1.0)?.square())?;
        assert_eq!(handles, 1);
    }
    Ok(())
}
