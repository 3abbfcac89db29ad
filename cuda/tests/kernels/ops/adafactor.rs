use ferrotron_cuda::arguments::{self, Step};
use ferrotron_tensor::ops::adafactor::{
    Adafactor, MatrixBatch, NormalizeBy, RowColFactors, SecondMomentDecay, SquareSums, adafactor,
    matrix_factors, square_sums, update_mean_squares, update_means, update_sq_norm,
};
use ferrotron_tensor::ops::step::{DeviceStepParams as HostStep, StepParams};
use ferrotron_tensor::{Element, Real, Tensor, bf16, f16};

use crate::simulator::Simulator;
use crate::support::*;

const NUMBERS: StepParams = StepParams { update: 4, lr: 0.3, grad_scale: 0.4 };
const DECAY: SecondMomentDecay = SecondMomentDecay { rate: 0.8, eps1: 1e-3 };

pub fn check(simulator: &Simulator) {
    for dims in [&[7, 5][..], &[2, 70, 65], &[33], &[3, 1, 600], &[40, 1]] {
        let shape = MatrixBatch::from_dims(dims);
        check_type::<f64>(simulator, &shape);
        check_type::<f32>(simulator, &shape);
        check_type::<bf16>(simulator, &shape);
        check_type::<f16>(simulator, &shape);
    }
}

fn check_type<T: Element>(simulator: &Simulator, shape: &MatrixBatch) {
    sums::<T>(simulator, shape);
    means::<T>(simulator, shape);
    mean_squares::<T>(simulator, shape);
    for found_inf in [0, 1] {
        step::<T, T, T>(simulator, "adafactor", shape, found_inf);
        step::<T, T, T::Acc>(simulator, "adafactor_wide", shape, found_inf);
        step::<T, T::Acc, T>(simulator, "adafactor_master", shape, found_inf);
    }
}

/// Rows and columns of all matrices.
fn sides(shape: &MatrixBatch) -> (usize, usize) {
    (shape.count * shape.rows, shape.count * shape.columns)
}

fn list<T: Element>(n: usize, seed: u64, f: impl Fn(f64) -> f64) -> Vec<T> {
    values(n, seed).into_iter().map(|x| T::from_acc(Real::from_f64(f(x)))).collect()
}

fn positive(x: f64) -> f64 {
    x * x + 0.125
}

fn host_step() -> HostStep {
    HostStep::new(&device(), &NUMBERS).unwrap()
}

fn device_step(found_inf: u64) -> [Step; 1] {
    let StepParams { update, lr, grad_scale } = NUMBERS;
    [Step { number: 9, update, lr, grad_scale, found_inf }]
}

/// Sums of squares, which are exact, and of the squares of updates.
fn sums<T: Element>(simulator: &Simulator, shape: &MatrixBatch) {
    let ((rows, columns), width) = (sides(shape), shape.columns);
    let grads: Vec<T> = list(shape.numel(), 1, |x| x);
    let (mut got_rows, mut got_columns) = (vec![0.0_f64; rows], vec![0.0_f64; columns]);
    let kernel = simulator.kernel("adafactor_row_sums", element(T::DTYPE)).input(&grads);
    let kernel = kernel.output(&mut got_rows).value(rows as u64).value(width as u64);
    let (grid, block) = rowwise(rows, width);
    kernel.run(grid, block);
    let blocks = width.div_ceil(32);
    let kernel = simulator.kernel("adafactor_column_sums", element(T::DTYPE)).input(&grads);
    let kernel = kernel.output(&mut got_columns).value(shape.rows as u64).value(width as u64);
    kernel.value(blocks as u64).run([shape.count * blocks, 1, 1], [32, 16, 1]);
    let (mut want_rows, mut want_columns) = (tensor_of(&got_rows), tensor_of(&got_columns));
    let grads_tensor = tensor_of(&grads);
    square_sums(shape, &grads_tensor, &mut want_rows, &mut want_columns).unwrap();
    assert_same("row sums", &tensor_of(&got_rows), &want_rows);
    assert_same("column sums", &tensor_of(&got_columns), &want_columns);

    let row_factors: Vec<T::Acc> = list(rows, 2, positive);
    let column_factors: Vec<T::Acc> = list(columns, 3, positive);
    let (mut got, step) = (vec![0.0_f64; rows], device_step(0));
    let kernel = simulator.kernel("adafactor_update_sums", element(T::DTYPE)).input(&step);
    let kernel = kernel.input(&grads).input(&row_factors).input(&column_factors).output(&mut got);
    let kernel = kernel.value(rows as u64).value(shape.rows as u64).value(width as u64);
    kernel.run(grid, block);
    let (rows, columns) = (tensor_of(&row_factors), tensor_of(&column_factors));
    let factors = RowColFactors { shape: *shape, rows, columns };
    let want = update_sq_norm(&host_step(), &grads_tensor, &factors).unwrap();
    let got = tensor_of(&[got.iter().sum::<f64>()]);
    // Two orders of additions of positive numbers.
    assert_close("update sums", &got, &want, shape.numel() as f64 * f64::EPSILON, 0.0);
}

/// Means of sums, and the factors that come of them.
fn means<T: Element>(simulator: &Simulator, shape: &MatrixBatch) {
    let ((rows, columns), name) = (sides(shape), element(T::DTYPE));
    let eps = 4.0 * T::DTYPE.accumulator().epsilon();
    for found_inf in [0, 1] {
        let start: Vec<T::Acc> = list(rows, 4, positive);
        let sums: Vec<f64> = values(rows, 5).into_iter().map(positive).collect();
        let (mut got, step) = (start.clone(), device_step(found_inf));
        let kernel = simulator.kernel("adafactor_means", name).input(&step).in_out(&mut got);
        let kernel = kernel.input(&sums).value(rows as u64).value(17_u64).value(DECAY.rate);
        let (grid, block) = elementwise(rows);
        kernel.value(DECAY.eps1).run(grid, block);
        let mut want = tensor_of(&start);
        if found_inf == 0 {
            update_means(&DECAY, &host_step(), &mut want, &tensor_of(&sums), 17).unwrap();
        }
        assert_close("means", &tensor_of(&got), &want, eps, 0.0);
    }
    let (of_rows, of_columns): (Vec<T::Acc>, Vec<T::Acc>) =
        (list(rows, 6, positive), list(columns, 7, positive));
    let (mut got_rows, mut got_columns) = (of_rows.clone(), of_columns.clone());
    let (grid, block) = elementwise(columns);
    let kernel = simulator.kernel("adafactor_inverse_roots", name).input(&of_columns);
    kernel.output(&mut got_columns).value(columns as u64).run(grid, block);
    for (mean_of, others, count) in [
        (NormalizeBy::Rows, &of_rows, shape.rows),
        (NormalizeBy::Columns, &of_columns, shape.columns),
    ] {
        let (grid, block) = rowwise(shape.count, shape.rows.max(count));
        let kernel = simulator.kernel("adafactor_row_factors", name).input(&of_rows);
        let kernel = kernel.input(others).output(&mut got_rows).value(shape.count as u64);
        kernel.value(shape.rows as u64).value(count as u64).run(grid, block);
        let (rows, columns) = (tensor_of(&of_rows), tensor_of(&of_columns));
        let want = matrix_factors(shape, &rows, &columns, mean_of).unwrap();
        // A mean of up to 600 numbers in f64, rounded once.
        assert_close("row factors", &tensor_of(&got_rows), &want.rows, 150.0 * eps, 0.0);
        assert_close("column factors", &tensor_of(&got_columns), &want.columns, eps, 0.0);
    }
}

fn mean_squares<T: Element>(simulator: &Simulator, shape: &MatrixBatch) {
    let n = shape.numel();
    let (start, grads): (Vec<T::Acc>, Vec<T>) = (list(n, 4, positive), list(n, 1, |x| x));
    for found_inf in [0, 1] {
        let (mut got, step) = (start.clone(), device_step(found_inf));
        let kernel = simulator.kernel("adafactor_mean_squares", element(T::DTYPE)).input(&step);
        let kernel = kernel.in_out(&mut got).input(&grads).value(n as u64).value(DECAY.rate);
        let (grid, block) = elementwise(n);
        kernel.value(DECAY.eps1).run(grid, block);
        let mut want = tensor_of(&start);
        if found_inf == 0 {
            update_mean_squares(&DECAY, &host_step(), &mut want, &tensor_of(&grads)).unwrap();
        }
        let eps = 4.0 * T::DTYPE.accumulator().epsilon();
        assert_close("mean squares", &tensor_of(&got), &want, eps, 0.0);
    }
}

fn step<T: Element, W: Element<Acc = T::Acc>, G: Element<Acc = T::Acc>>(
    simulator: &Simulator,
    name: &str,
    shape: &MatrixBatch,
    found_inf: u64,
) {
    let ((rows, columns), n) = (sides(shape), shape.numel());
    let config = Adafactor { eps2: 1e-3, clip_threshold: 0.5, beta1: 0.9, weight_decay: 0.1 };
    let (weights, grads): (Vec<W>, Vec<G>) = (list(n, 1, |x| x), list(n, 2, |x| x));
    let means: Vec<T::Acc> = list(n, 3, |x| 0.1 * x);
    let row_factors: Vec<T::Acc> = list(rows, 4, positive);
    let column_factors: Vec<T::Acc> = list(columns, 5, positive);
    let (rows_tensor, columns_tensor) = (tensor_of(&row_factors), tensor_of(&column_factors));
    let factors = RowColFactors { shape: *shape, rows: rows_tensor, columns: columns_tensor };
    let Adafactor { eps2, clip_threshold, beta1, weight_decay } = config;
    let numel = 3 * n as u64; // of the parts of other ranks, too
    let constants = arguments::Adafactor { eps2, clip_threshold, beta1, weight_decay, numel };
    // Relative steps or not, updates that are clipped or not, with a mean or not.
    for (relative, update, has_mean) in
        [(Some([2.5 * n as f64]), [9.0 * n as f64], true), (None, [0.1 * n as f64], false)]
    {
        let (mut got, mut got_means, step) =
            (weights.clone(), means.clone(), device_step(found_inf));
        let kernel = simulator.kernel(name, element(T::DTYPE)).input(&step).in_out(&mut got);
        let kernel = kernel.input(&grads).input(&row_factors).input(&column_factors);
        let kernel = if has_mean { kernel.in_out(&mut got_means) } else { kernel.null() };
        let kernel = match &relative {
            Some(sum) => kernel.input(sum),
            None => kernel.null(),
        };
        let kernel = kernel.input(&update).value(rows as u64).value(shape.rows as u64);
        let (grid, block) = rowwise(rows, shape.columns);
        kernel.value(shape.columns as u64).value(constants).run(grid, block);

        let (mut want, mut want_means) = (tensor_of(&weights), tensor_of(&means));
        if found_inf == 0 {
            let of = |sum: &[f64; 1]| Tensor::from_slice(&device(), sum, &[1]).unwrap();
            let (update, numel) = (of(&update), numel as usize);
            let sums = SquareSums { weights: relative.as_ref().map(of), update, numel };
            let (step, grads) = (host_step(), tensor_of(&grads));
            let mean = has_mean.then_some(&mut want_means);
            adafactor(&config, &step, &mut want, &grads, (&factors, &sums), mean, None).unwrap();
        }
        // Four products and sums, fused or not.
        let eps = 8.0 * T::DTYPE.accumulator().epsilon();
        let stored =
            if W::DTYPE == T::DTYPE.accumulator() { eps } else { eps + W::DTYPE.epsilon() };
        let what = format!("{name} of {shape:?}");
        assert_close(&what, &tensor_of(&got), &want, stored, 4.0 * eps);
        assert_close(&format!("{what}, mean"), &tensor_of(&got_means), &want_means, eps, 4.0 * eps);
    }
}
