//! Every row of the op table on a GPU against the CPU, values and gradients, in every dtype and through every view. The GPU is a stand-in
//! unless `FERROTRON_TEST_GPU` names a real one.

#[allow(dead_code)] // the other program uses all of it
#[path = "suite/inputs.rs"]
mod inputs;
#[path = "suite/scores.rs"]
mod scores;
#[path = "suite/table.rs"]
mod table;

use ferrotron_autograd::{Leaf, SharedFlatBuffer, Var};
use ferrotron_tensor::{
    Category, CudaGraph, DType, Device, FlatBuffer, RandomKey, Result, ShardSpec, Tensor,
};

use crate::inputs::{Seen, bits, report, run, samples, which};
use crate::table::{OpCase, Shapes, table};

/// Allowed difference. Both compute in f32 or f64, by functions that are some ulps apart and sums in another order.
/// Where that leads to the neighbour of a number that is stored in a narrow dtype (the value, what is saved of it, a
/// gradient, the shares of attention), it is a rounding of the largest one. `inside` is the size of terms that cancel
/// to a small rest. `cancelled` is the size of terms that cancel to nothing but their rounding.
fn tolerance(dtype: DType, want: &[f64], inside: f64, cancelled: f64) -> f64 {
    let largest = want.iter().filter(|x| x.is_finite()).fold(0.0, |a: f64, b| a.max(b.abs()));
    let stored = if dtype == dtype.accumulator() { 0.0 } else { 3.0 * dtype.epsilon() };
    stored * largest.max(cancelled) + 32.0 * dtype.accumulator().epsilon() * largest.max(inside)
}

/// About how large numbers become inside of an operation. Operands are up to 2; a layer norm of equal numbers divides by
/// the root of its eps, 1e-5.
fn inside(case: &OpCase, shapes: Shapes, seen: Seen) -> f64 {
    let equal = seen == Seen::Broadcast && shapes[0].len() == 1;
    if equal && case.op == "layer_norm" { 1e5_f64.sqrt() } else { 1.0 }
}

/// Estimates the size of terms that cancel in a gradient. With all options of attention, most queries see one key,
/// whose weight is 1 whatever the query is. A bias adds up the gradients of up to four scores that share it, which cancel
/// along each row. Gradients between two linear layers are rounded, and sums of up to 8 features and several rows of them
/// cancel in those of the first input.
fn cancelled(case: &OpCase) -> f64 {
    match (case.op, case.case) {
        ("attention", "all options") => 1.0,
        ("attention_with_bias", _) => 4.0,
        ("linear_gelu", _) => 8.0,
        _ => 0.0,
    }
}

/// Value and gradients of a row whose operands are views of leaves.
fn answers(
    case: &OpCase,
    shapes: Shapes,
    seen: Seen,
    device: &Device,
    dtype: DType,
) -> Result<Vec<Tensor>> {
    let f = |leaves: &[Var]| {
        let view = |(leaf, dims): (&Var, &&[usize])| seen.view(leaf, dims);
        (case.f)(&leaves.iter().zip(shapes).map(view).collect::<Result<Vec<_>>>()?)
    };
    run(&f, &samples(case, shapes, seen, device, dtype)?)
}

/// The first difference between the answers of `gpu` and those of the CPU.
fn compare(
    case: &OpCase,
    shapes: Shapes,
    seen: Seen,
    gpu: &Device,
    dtype: DType,
) -> Result<Option<String>> {
    let want = answers(case, shapes, seen, &Device::cpu(1)?, dtype)?;
    let got = answers(case, shapes, seen, gpu, dtype)?;
    for (i, (want, got)) in want.iter().zip(&got).enumerate() {
        assert_eq!((got.dtype(), got.dims()), (want.dtype(), want.dims()), "{}", case.name());
        let (want, got) = (want.to_f64()?, got.to_f64()?);
        let allowed = tolerance(dtype, &want, inside(case, shapes, seen), cancelled(case));
        for (element, (want, got)) in want.iter().zip(&got).enumerate() {
            let same = want == got || (want.is_nan() && got.is_nan());
            let close = (want - got).abs() <= allowed; // never true of a NaN
            if !same && !close {
                let what = which(i);
                return Ok(Some(format!(
                    "{what}, element {element}: got {got}, want {want} +- {allowed}"
                )));
            }
        }
    }
    Ok(None)
}

fn every_row_agrees(test: &str, dtype: DType) {
    let Some(config) = ferrotron_cuda_sim::gpu(test) else { return };
    let gpu = Device::cuda(&config).unwrap();
    let mut failures = Vec::new();
    for case in table() {
        for shapes in case.shapes {
            for seen in Seen::ALL {
                let difference = match compare(&case, shapes, seen, &gpu, dtype) {
                    Ok(difference) => difference,
                    Err(error) => Some(error.to_string()),
                };
                let name = case.name();
                failures.extend(
                    difference.map(|what| format!("{name} {shapes:?} {dtype} {seen:?}, {what}")),
                );
            }
        }
    }
    report(&failures);
}

#[test]
fn a_gpu_agrees_with_the_cpu_in_f64() {
    every_row_agrees("a_gpu_agrees_with_the_cpu_in_f64", DType::F64);
}

#[test]
fn a_gpu_agrees_with_the_cpu_in_f32() {
    every_row_agrees("a_gpu_agrees_with_the_cpu_in_f32", DType::F32);
}

#[test]
fn a_gpu_agrees_with_the_cpu_in_bf16() {
    every_row_agrees("a_gpu_agrees_with_the_cpu_in_bf16", DType::BF16);
}

#[test]
fn a_gpu_agrees_with_the_cpu_in_f16() {
    every_row_agrees("a_gpu_agrees_with_the_cpu_in_f16", DType::F16);
}

/// Two micro-batches through a layer that is used twice, with gradients in a flat.
struct Training {
    batches: [Tensor; 2],
    weight: Leaf,
    gradients: SharedFlatBuffer,
}

impl Training {
    fn new(device: &Device) -> Result<Training> {
        let numbers =
            |n: usize| (0..n).map(|i| (i * 7 % 23) as f32 / 8.0 - 1.0).collect::<Vec<_>>();
        let weight = Leaf::new("weight", Tensor::from_slice(device, &numbers(64), &[8, 8])?);
        let parts = [("weight".to_string(), vec![8, 8])];
        let flat = FlatBuffer::new(device, DType::F32, Category::Gradients, &parts)?;
        let gradients = SharedFlatBuffer::new(flat);
        weight.bind_gradient(&gradients, 0);
        let batch = || Tensor::zeros(device, DType::F32, &[5, 8]);
        Ok(Training { batches: [batch()?, batch()?], weight, gradients })
    }

    fn feed(&mut self, step: u64) -> Result<()> {
        for (i, batch) in self.batches.iter_mut().enumerate() {
            let numbers: Vec<f32> =
                (0..40).map(|n| (n as f32 + step as f32 * (i + 1) as f32).sin()).collect();
            batch.write_slice(&numbers)?;
        }
        Ok(())
    }

    /// The losses. The gradient of the first replaces what was there, that of the second is added.
    fn step(&self, step: u64) -> Result<Vec<Tensor>> {
        self.weight.zero_gradient();
        let key = RandomKey::new(3, step, "dropout");
        let losses = self.batches.iter().map(|batch| {
            let weight = self.weight.var()?;
            let hidden = Var::constant(batch.clone()).linear(&weight, None)?;
            let hidden = hidden.dropout(0.3, &key, &ShardSpec::unsharded(&[5, 8]))?;
            let loss = hidden.linear(&weight, None)?.sum_all()?;
            loss.backward_scaled(0.25)?;
            Ok(loss.into_value())
        });
        losses.collect()
    }

    fn gradient(&self) -> Result<Vec<u64>> {
        bits(&self.gradients.lock().unwrap().tensor(0)?)
    }
}

#[test]
fn a_captured_step_gives_the_gradients_of_the_step() -> Result<()> {
    let test = "a_captured_step_gives_the_gradients_of_the_step";
    let Some(config) = ferrotron_cuda_sim::gpu(test) else { return Ok(()) };
    let device = Device::cuda(&config)?;
    let (mut want, mut got) = (Training::new(&Device::cuda(&config)?)?, Training::new(&device)?);
    drop(got.step(0)?);
    let (mut graph, losses) = CudaGraph::capture(&device, || got.step(0))?;
    let mut seen = vec![];
    for step in 1..4 {
        want.feed(step)?;
        got.feed(step)?;
        let expected = want.step(step)?;
        graph.replay(step)?;
        assert_eq!(got.gradient()?, want.gradient()?, "gradient of step {step}");
        for (got, want) in losses.iter().zip(&expected) {
            assert_eq!(bits(got)?, bits(want)?, "loss of step {step}");
        }
        seen.push(got.gradient()?);
    }
    assert!(seen[0] != seen[1] && seen[1] != seen[2]);
    Ok(())
}
