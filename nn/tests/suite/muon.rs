//! Muon against a loop in f64 with named coefficients.

use ferrotron_nn::{
    BufferConfig, MuonConfig, MuonScale, Nesterov, NewtonSchulz, Optimizer, OptimizerConfig,
    ParamAndGradBuffer, Scope,
};
use ferrotron_tensor::{DType, Device, Result};

use crate::gradients::values;
use crate::rules::{LR, SCALE, params, set_gradients, train};

/// Newton-Schulz in plain loops.
fn orthogonal(matrix: &[f64], rows: usize, columns: usize, config: &MuonConfig) -> Vec<f64> {
    let norm = matrix.iter().map(|x| x * x).sum::<f64>().sqrt() + 1e-7;
    let mut x: Vec<f64> = matrix.iter().map(|x| x / norm).collect();
    for step in 0..config.steps {
        let [a, b, c] = config.coefficients.coefficients(step);
        let gram: Vec<f64> = (0..rows * rows)
            .map(|at| {
                let (i, j) = (at / rows, at % rows);
                (0..columns).map(|k| x[i * columns + k] * x[j * columns + k]).sum()
            })
            .collect();
        let cubic: Vec<f64> = (0..rows * rows)
            .map(|at| {
                let (i, j) = (at / rows, at % rows);
                let square: f64 = (0..rows).map(|k| gram[i * rows + k] * gram[k * rows + j]).sum();
                b * gram[at] + c * square
            })
            .collect();
        x = (0..rows * columns)
            .map(|at| {
                let (i, j) = (at / columns, at % columns);
                let sum: f64 = (0..rows).map(|k| cubic[i * rows + k] * x[k * columns + j]).sum();
                a * x[at] + sum
            })
            .collect();
    }
    x
}

#[test]
fn muon_equals_a_loop_and_leaves_tables_and_vectors_to_adamw() -> Result<()> {
    let wild = MuonConfig {
        momentum: 0.95,
        nesterov: Nesterov::On,
        coefficients: NewtonSchulz::Simple,
        scale: MuonScale::ShapeScaling,
        extra_scale: 0.5,
        ..MuonConfig::default()
    };
    let unit = MuonConfig { scale: MuonScale::UnitRmsNorm, steps: 7, ..MuonConfig::default() };
    for config in [MuonConfig::default(), wild, unit] {
        let device = Device::cpu(2)?;
        let params = params(&Scope::new(&device, DType::F64, 1))?;
        let choice = OptimizerConfig::Muon(config);
        let layout = BufferConfig { optimizer: choice, ..BufferConfig::default() };
        let mut want = values(&params)?;
        let buffers = ParamAndGradBuffer::with_config(&params, &layout)?;
        let mut optimizer = Optimizer::new(choice, &buffers)?;
        train(&buffers, &mut optimizer, &params, 10)?;
        let after = values(&params)?;

        let mut momenta: Vec<Vec<f64>> = want.iter().map(|w| vec![0.0; w.len()]).collect();
        // Each with its parameter, its rows there, and its dims.
        let matrices = [(0, 0, 4, 7), (1, 0, 6, 3), (2, 0, 4, 5), (2, 4, 2, 5)];
        for step in 0..10 {
            let gradients = set_gradients(&params, step)?;
            for (k, first, rows, columns) in matrices {
                let range = first * columns..(first + rows) * columns;
                let (mut m, mut u) = (momenta[k][range.clone()].to_vec(), Vec::new());
                for (m, g) in m.iter_mut().zip(&gradients[k][range.clone()]) {
                    let new = (1.0 - config.momentum) * SCALE * g;
                    *m = config.momentum * *m + new;
                    u.push(match config.nesterov {
                        Nesterov::Off => *m,
                        Nesterov::On => config.momentum * *m + new,
                    });
                }
                momenta[k][range.clone()].copy_from_slice(&m);
                let transposed = |x: &[f64], rows: usize, columns: usize| -> Vec<f64> {
                    let at = |i: usize| x[i % rows * columns + i / rows];
                    (0..rows * columns).map(at).collect()
                };
                let x = match rows > columns {
                    false => orthogonal(&u, rows, columns, &config),
                    true => {
                        let x = transposed(&u, rows, columns);
                        transposed(&orthogonal(&x, columns, rows, &config), columns, rows)
                    }
                };
                let (height, width) = (rows as f64, columns as f64);
                let scale = match config.scale {
                    MuonScale::Spectral => height.max(width).sqrt(),
                    MuonScale::ShapeScaling => (height / width).max(1.0).sqrt(),
                    MuonScale::UnitRmsNorm => (height / width).sqrt(),
                };
                for (w, x) in want[k][range].iter_mut().zip(&x) {
                    *w = *w * (1.0 - LR * 0.1) - LR * scale * config.extra_scale * x;
                }
            }
        }
        for k in 0..3 {
            for (i, (got, want)) in after[k].iter().zip(&want[k]).enumerate() {
                let close = (got - want).abs() <= 1e-10;
                assert!(close, "{} of {i}: {got}, want {want}", params[k].name());
            }
        }
        // The rest is what AdamW alone makes of them.
        let others = params_of_adamw(&device)?;
        for (k, other) in (3..5).zip(&others) {
            assert_eq!(&after[k], other, "{}", params[k].name());
        }
        let mut states: Vec<String> = Vec::new();
        optimizer.visit(|name, state, _, _| {
            states.push(format!("{state}.{name}"));
            Ok(())
        })?;
        states.sort();
        let want = [
            "exp_avg.bias",
            "exp_avg.table",
            "exp_avg_sq.bias",
            "exp_avg_sq.table",
            "momentum_buffer.packed",
            "momentum_buffer.packed",
            "momentum_buffer.tall",
            "momentum_buffer.wide",
        ];
        assert_eq!(states, want);
    }
    Ok(())
}

/// The last two parameters after ten steps of AdamW.
fn params_of_adamw(device: &Device) -> Result<Vec<Vec<f64>>> {
    let params = params(&Scope::new(device, DType::F64, 1))?;
    let buffers = ParamAndGradBuffer::new(&params)?;
    train(&buffers, &mut Optimizer::new(OptimizerConfig::ADAMW, &buffers)?, &params, 10)?;
    Ok(values(&params)?.split_off(3))
}

#[test]
fn muon_refuses_buffers_that_cut_matrices() -> Result<()> {
    let params = params(&Scope::new(&Device::cpu(1)?, DType::F32, 1))?;
    let buffers = ParamAndGradBuffer::new(&params)?;
    let muon = OptimizerConfig::Muon(MuonConfig::default());
    let error = Optimizer::new(muon, &buffers).err().expect("a refusal").to_string();
    assert!(error.contains("'muon' has to see the whole of '"), "{error}");
    assert!(error.contains("name it as the `optimizer` of BufferConfig"), "{error}");
    Ok(())
}
