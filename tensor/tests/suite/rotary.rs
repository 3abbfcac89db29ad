//! Rotary embedding against naive f64 arithmetic.

use crate::reference::*;
use ferrotron_tensor::ops::rotary::*;
use ferrotron_tensor::{DType, Device, Result, Tensor};

const BASE: f64 = 10_000.0;

/// Hugging Face's formula: `x * cos + rotate_half(x) * sin` with the angles written twice.
fn naive(x: &Tensor, positions: &[usize], dim: usize, heads: usize) -> Result<Vec<f64>> {
    let (all, width) = (x.dims()[2], x.dims()[3]);
    let values = x.to_f64()?;
    let mut y = values.clone();
    for (row, (x, y)) in values.chunks(width).zip(y.chunks_mut(width)).enumerate() {
        if row % all >= heads {
            continue;
        }
        let position = positions[row / all % positions.len()] as f64;
        for i in 0..dim {
            let pair = (2 * (i % (dim / 2))) as f64;
            let angle = position / BASE.powf(pair / dim as f64);
            let turned = if i < dim / 2 { -x[i + dim / 2] } else { x[i - dim / 2] };
            y[i] = x[i] * angle.cos() + turned * angle.sin();
        }
    }
    Ok(y)
}

#[test]
fn forward_agrees_with_the_formula_in_every_dtype() -> Result<()> {
    let device = Device::cpu(2)?;
    for dtype in FLOATS {
        for (dims, dim, heads) in [
            ([2, 65, 3, 64], 64, 3),
            ([1, 7, 5, 80], 32, 3),
            ([3, 1, 1, 2], 2, 1),
            ([2, 3, 4, 6], 0, 4),
            ([2, 3, 4, 6], 6, 0),
        ] {
            let x = normal(&device, dtype, &dims, "x")?;
            let positions: Vec<usize> = (0..dims[1]).map(|t| 3 * t + 11).collect();
            let table = RotaryTable::new(&device, dtype, positions.iter().copied(), dim, BASE)?;
            let y = rotary(&x, &table, heads, Direction::Forward)?;
            let want = naive(&x, &positions, dim, heads)?;
            // The angle itself is rounded in f64.
            let angle = 4.0 * *positions.last().unwrap() as f64 * f64::EPSILON;
            let tolerance = 8.0 * dtype.accumulator().epsilon() + dtype.epsilon() + angle;
            assert_close(&format!("{dtype} {dims:?}"), &y, &want, tolerance);
            let back = rotary(&y, &table, heads, Direction::Backward)?;
            let tolerance = 16.0 * dtype.accumulator().epsilon() + 2.0 * dtype.epsilon();
            assert_close("inverse", &back, &x.to_f64()?, tolerance);
        }
    }
    Ok(())
}

#[test]
fn backward_is_the_transposed_rotation() -> Result<()> {
    let device = Device::cpu(1)?;
    let x = normal(&device, DType::F64, &[2, 3, 2, 4], "x")?;
    let dy = normal(&device, DType::F64, &[2, 3, 2, 4], "dy")?;
    let table = RotaryTable::new(&device, DType::F64, 5..8, 4, BASE)?;
    let dx = rotary(&dy, &table, 1, Direction::Backward)?;
    assert_gradient("rotary", &x, &dx, |x| dot(&rotary(x, &table, 1, Direction::Forward)?, &dy))
}

#[test]
fn strides_threads_and_narrowed_tables_change_no_bit() -> Result<()> {
    for threads in [1, 2, 3] {
        let device = Device::cpu(threads)?;
        let packed = normal(&device, DType::F32, &[3, 40, 8, 64], "packed")?;
        let table = RotaryTable::new(&device, DType::F32, 0..50, 64, BASE)?.narrow(10, 40)?;
        let exact = RotaryTable::new(&device, DType::F32, 10..50, 64, BASE)?;
        let view = packed.narrow(2, 2, 4)?;
        let want = rotary(&view.contiguous()?, &exact, 4, Direction::Forward)?;
        assert_same_bits("narrowed", &rotary(&view, &table, 4, Direction::Forward)?, &want);
        let whole = rotary(&packed, &table, 8, Direction::Forward)?.narrow(2, 2, 4)?;
        assert_same_bits("within the packed tensor", &whole, &want);
        let turned = view.transpose(1, 3)?.contiguous()?.transpose(1, 3)?;
        assert_same_bits("strided", &rotary(&turned, &table, 4, Direction::Forward)?, &want);
        let one = packed.narrow(2, 0, 1)?.broadcast_to(&[3, 40, 4, 64])?;
        let want = rotary(&one.contiguous()?, &table, 4, Direction::Forward)?;
        assert_same_bits("broadcast", &rotary(&one, &table, 4, Direction::Forward)?, &want);
    }
    Ok(())
}

#[test]
fn wrong_operands_are_refused_by_name() -> Result<()> {
    let device = Device::cpu(1)?;
    let new = |dim, base| RotaryTable::new(&device, DType::F32, 0..4, dim, base);
    assert_eq!(new(3, BASE).unwrap_err().to_string(), "rotary_table: the dim must be even, got 3");
    assert_eq!(new(4, 0.0).unwrap_err().to_string(), "rotary_table: base must be positive, got 0");
    let table = new(4, BASE)?;
    let x = |dims: &[usize]| Tensor::zeros(&device, DType::F32, dims);
    let says =
        |x: Tensor, heads| rotary(&x, &table, heads, Direction::Forward).unwrap_err().to_string();
    assert_eq!(says(x(&[4, 2, 4])?, 2), "rotary: x must be (B, T, H, D), got [4, 2, 4]");
    assert_eq!(
        says(x(&[1, 3, 2, 4])?, 2),
        "rotary: x [1, 3, 2, 4] does not go with 2 heads and a table of 4 positions and dim 4"
    );
    let wide = Tensor::zeros(&device, DType::F64, &[1, 4, 2, 4])?;
    assert_eq!(says(wide, 2), "rotary: the table is f32, x is f64: it needs a table of f64");
    for dims in [[0, 4, 2, 4], [2, 4, 0, 4]] {
        assert_eq!(rotary(&x(&dims)?, &table, 0, Direction::Forward)?.dims(), dims);
    }
    Ok(())
}
