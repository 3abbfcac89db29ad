use ferrotron_tensor::DType;
use ferrotron_tensor::ops::layer_norm::{layer_norm, layer_norm_backward};
use ferrotron_tensor::ops::rms_norm::{rms_norm, rms_norm_backward};

use crate::simulator::Simulator;
use crate::support::*;

pub fn check(simulator: &Simulator) {
    for dtype in FLOATS {
        for (rows, width) in [(1, 1), (5, 7), (3, 33), (70, 64), (2, 1031), (9, 1024), (2, 2304)] {
            for centred in [true, false] {
                check_norm(simulator, dtype, (rows, width), centred, false);
                check_norm(simulator, dtype, (rows, width), centred, true);
            }
        }
    }
}

/// Compares a norm with its reference; if `wide`, weight and bias have the accumulator dtype.
fn check_norm(
    simulator: &Simulator,
    dtype: DType,
    (rows, width): (usize, usize),
    centred: bool,
    wide: bool,
) {
    let eps = 1e-5_f64;
    let dims = [rows, width];
    let (x, dy) = (random(dtype, &dims, 1), random(dtype, &dims, 2));
    let of_weight = if wide { dtype.accumulator() } else { dtype };
    let (weight, bias) = (random(of_weight, &[width], 3), random(of_weight, &[width], 4));
    let (grid, block) = rowwise(rows, width);
    let acc = dtype.accumulator();
    let (x_in, w_in, b_in, dy_in) = (bytes(&x), bytes(&weight), bytes(&bias), bytes(&dy));
    let (n, m) = (rows as u64, width as u64);
    // Sums of n terms in different orders differ by n / 32 + 32 roundings of a term; what is computed from them is
    // rounded once. A row of one element has deviation 0, and rstd = eps^(-1/2) multiplies all errors.
    let sums = acc.epsilon() * (width as f64 / 32.0 + 40.0);
    let rounded = rounding(dtype);
    let blown = if width == 1 { eps.powf(-0.5) } else { 1.0 };
    let what = if centred { "layer_norm" } else { "rms_norm" };
    let named = if wide { format!("{what}_wide") } else { what.to_string() };

    let mut y = room(dtype, rows * width);
    let (mut mean, mut rstd) = (room(acc, rows), room(acc, rows));
    let (want_y, want_mean, want_rstd) = if centred {
        let (y, mean, rstd) = layer_norm(&x, &weight, Some(&bias), eps).unwrap();
        (y, Some(mean), rstd)
    } else {
        let (y, rstd) = rms_norm(&x, &weight, eps).unwrap();
        (y, None, rstd)
    };
    let kernel = simulator.kernel(&named, element(dtype)).input(&x_in).input(&w_in);
    if centred {
        let kernel = kernel.input(&b_in).output(&mut y).output(&mut mean).output(&mut rstd);
        kernel.value(n).value(m).value(eps).run(grid, block);
        assert_close(
            "mean",
            &read(acc, &[rows], &mean),
            want_mean.as_ref().unwrap(),
            sums,
            2.0 * sums,
        );
        let mut plain = room(dtype, rows * width);
        let kernel = simulator.kernel(&named, element(dtype)).input(&x_in).input(&w_in).null();
        let (mut mean, mut rstd) = (room(acc, rows), room(acc, rows));
        let kernel = kernel.output(&mut plain).output(&mut mean).output(&mut rstd);
        kernel.value(n).value(m).value(eps).run(grid, block);
        let (want, ..) = layer_norm(&x, &weight, None, eps).unwrap();
        assert_close(
            "layer_norm without bias",
            &read(dtype, &dims, &plain),
            &want,
            rounded + sums,
            8.0 * sums * blown,
        );
    } else {
        kernel.output(&mut y).output(&mut rstd).value(n).value(m).value(eps).run(grid, block);
    }
    assert_close("rstd", &read(acc, &[rows], &rstd), &want_rstd, sums * blown, 0.0);
    assert_close(what, &read(dtype, &dims, &y), &want_y, rounded + sums, 8.0 * sums * blown);

    // The gradients, from the CPU's statistics.
    let rstd = bytes(&want_rstd);
    let mean = want_mean.as_ref().map(bytes);
    let (want_dx, want_dw, want_db) = match &want_mean {
        Some(mean) => {
            let (dx, dw, db) =
                layer_norm_backward(&dy, &x, mean, &want_rstd, &weight, None).unwrap();
            (dx, dw, Some(db))
        }
        None => {
            let (dx, dw) = rms_norm_backward(&dy, &x, &want_rstd, &weight, None).unwrap();
            (dx, dw, None)
        }
    };
    let largest = want_rstd.to_f64().unwrap().into_iter().fold(1.0, f64::max);
    let run = |before: Option<&[u8]>| {
        let mut dx = room(dtype, rows * width);
        let kernel = simulator
            .kernel(&format!("{named}_backward_input"), element(dtype))
            .input(&dy_in)
            .input(&x_in);
        let kernel = match &mean {
            Some(mean) => kernel.input(mean),
            None => kernel,
        };
        let kernel = kernel.input(&rstd).input(&w_in);
        let kernel = match before {
            Some(before) => kernel.input(before),
            None => kernel.null(),
        };
        kernel.output(&mut dx).value(n).value(m).run(grid, block);
        read(dtype, &dims, &dx)
    };
    let dx = run(None);
    // Products of two numbers up to 2 and of the rstd.
    let far = 16.0 * sums * largest * blown;
    assert_close(&format!("{what}, dx"), &dx, &want_dx, rounded + sums, far);
    assert_same(
        &format!("{what}, dx and another gradient"),
        &run(Some(&x_in)),
        &dx.add(&x).unwrap(),
    );

    let block_rows = 32;
    let blocks = rows.div_ceil(block_rows);
    let mut partials = room(acc, blocks * 2 * width);
    let kernel = simulator
        .kernel(&format!("{what}_backward_partials"), element(dtype))
        .input(&dy_in)
        .input(&x_in);
    let kernel = match &mean {
        Some(mean) => kernel.input(mean),
        None => kernel,
    };
    let kernel = kernel.input(&rstd).output(&mut partials);
    kernel
        .value(n)
        .value(m)
        .value(block_rows as u64)
        .run([width.div_ceil(256), blocks, 1], [32, 4, 1]);
    let (mut dw, mut db) = (room(acc, width), room(acc, width));
    let kernel =
        simulator.kernel("norm_backward_weights", element(dtype)).input(&partials).output(&mut dw);
    let kernel = if centred { kernel.output(&mut db) } else { kernel.null() };
    kernel.value(blocks as u64).value(m).run([width.div_ceil(32), 1, 1], [32, 8, 1]);
    let columns = acc.epsilon() * (rows as f64 + 8.0);
    assert_close(
        &format!("{what}, dw"),
        &read(acc, &[width], &dw),
        &want_dw,
        columns,
        4.0 * columns * rows as f64 * largest,
    );
    if let Some(want_db) = want_db {
        assert_close(
            "layer_norm, db",
            &read(acc, &[width], &db),
            &want_db,
            columns,
            columns * rows as f64,
        );
    }
}
