//! The printed form of tensors, as PyTorch prints them: nested rows, aligned columns, long dims summarised, and then shape,
//! dtype and device.

use std::fmt::{self, Write};

use crate::{DType, Result, Tensor};

/// Tensors with more elements than this are summarised: the first and last [`EDGE`] positions of each dim are printed.
const MOST_ELEMENTS: usize = 1000;
/// Positions that are printed at each end of a summarised dim.
const EDGE: usize = 3;
/// Characters of a line.
const LINE: usize = 80;
/// Digits after the decimal point.
const DIGITS: usize = 4;

/// Prints the elements, shape, dtype and device. Long dims are summarised.
///
/// ```
/// use ferrotron_tensor::{Device, Tensor};
/// let x = Tensor::from_slice(&Device::cpu(1)?, &[1.0_f32, -2.5, 3.25, 4.0], &[2, 2])?;
/// assert_eq!(
///     x.to_string(),
///     "tensor([[ 1.0000, -2.5000],
///         [ 3.2500,  4.0000]], shape=[2, 2], dtype=f32, device=cpu)"
/// );
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tensor(")?;
        if self.device().is_fake() {
            f.write_str("...")?;
        } else {
            match printed(self) {
                Ok(text) => f.write_str(&text)?,
                Err(error) => write!(f, "<{error}>")?,
            }
        }
        let (dims, dtype) = (self.dims(), self.dtype());
        write!(f, ", shape={dims:?}, dtype={dtype}, device={})", self.device())
    }
}

/// The elements between brackets, on lines that are indented for "tensor(".
fn printed(x: &Tensor) -> Result<String> {
    let summarise = x.numel() > MOST_ELEMENTS;
    let mut edges = x.clone();
    if summarise {
        for (d, &size) in x.dims().iter().enumerate() {
            if size > 2 * EDGE {
                let d = d as isize;
                let (first, last) =
                    (edges.narrow(d, 0, EDGE)?, edges.narrow(d, size - EDGE, EDGE)?);
                edges = Tensor::concat(&[&first, &last], d)?;
            }
        }
    }
    let words = words(&edges)?;
    let width = words.iter().map(String::len).max().unwrap_or(0);
    let long: Vec<bool> = x.dims().iter().map(|&size| summarise && size > 2 * EDGE).collect();
    let mut out = String::new();
    rows(&mut out, &words, edges.dims(), &long, width, 0);
    Ok(out)
}

/// Writes the elements of `dims` as nested brackets; `long` tells which dims have a gap in the middle.
fn rows(
    out: &mut String,
    words: &[String],
    dims: &[usize],
    long: &[bool],
    width: usize,
    depth: usize,
) {
    let indent = "tensor(".len() + depth;
    match dims {
        [] => out.push_str(words.first().map_or("", |word| word.as_str())),
        [size] => {
            out.push('[');
            let mut column = indent + 1;
            for (i, word) in words.iter().enumerate() {
                if i > 0 {
                    out.push(',');
                    let gap = long[0] && i == EDGE;
                    let needed = width + 2 + if gap { 6 } else { 0 };
                    if column + needed > LINE {
                        let _ = write!(out, "\n{:1$}", "", indent + 1);
                        column = indent + 1;
                    } else {
                        out.push(' ');
                    }
                    if gap {
                        out.push_str(" ..., ");
                        column += 6;
                    }
                }
                let _ = write!(out, "{word:>width$}");
                column += width + 2;
            }
            debug_assert_eq!(*size, words.len());
            out.push(']');
        }
        [size, inner @ ..] => {
            out.push('[');
            let part = words.len() / (*size).max(1);
            for i in 0..*size {
                if i > 0 {
                    let lines = "\n".repeat(inner.len());
                    let _ = write!(out, ",{lines}{:1$}", "", indent + 1);
                    if long[0] && i == EDGE {
                        let _ = write!(out, "...,{lines}{:1$}", "", indent + 1);
                    }
                }
                rows(out, &words[i * part..][..part], inner, &long[1..], width, depth + 1);
            }
            out.push(']');
        }
    }
}

/// The elements as text, all in one notation: integers, decimals or, where these would not show them, exponents.
fn words(x: &Tensor) -> Result<Vec<String>> {
    if x.dtype() == DType::I64 {
        return Ok(x.to_vec::<i64>()?.iter().map(i64::to_string).collect());
    }
    let values = x.cast(DType::F64)?.to_f64()?;
    if !x.dtype().is_float() {
        return Ok(values.iter().map(f64::to_string).collect());
    }
    let finite = || values.iter().copied().filter(|x| x.is_finite());
    let sizes = || finite().map(f64::abs).filter(|&x| x > 0.0);
    let (most, least) = (sizes().fold(0.0, f64::max), sizes().fold(f64::INFINITY, f64::min));
    let whole = finite().all(|x| x.fract() == 0.0);
    let exponents = most / least > 1e3 || most > 1e8 || (!whole && least < 1e-4);
    Ok(values.iter().map(|&x| word(x, exponents, whole)).collect())
}

fn word(x: f64, exponents: bool, whole: bool) -> String {
    if x.is_nan() {
        "nan".into()
    } else if x.is_infinite() {
        if x > 0.0 { "inf".into() } else { "-inf".into() }
    } else if exponents {
        let text = format!("{x:.DIGITS$e}");
        let (digits, power) = text.split_once('e').unwrap_or((&text, "0"));
        let power: i32 = power.parse().unwrap_or(0);
        let sign = if power < 0 { '-' } else { '+' };
        format!("{digits}e{sign}{:02}", power.abs())
    } else if whole {
        format!("{x}.")
    } else {
        format!("{x:.DIGITS$}")
    }
}

#[cfg(test)]
mod tests {
    use crate::{DType, Device, Result, Tensor};

    fn show(values: &[f64], dims: &[usize]) -> String {
        Tensor::from_slice(&Device::cpu(1).unwrap(), values, dims).unwrap().to_string()
    }

    // Elements and brackets as PyTorch 2 prints them; what follows them is this library's.
    #[test]
    fn elements_are_printed_as_by_pytorch() -> Result<()> {
        let device = Device::cpu(1)?;
        let end = |dims: &str| format!(", shape={dims}, dtype=f64, device=cpu)");
        assert_eq!(show(&[1.0, 2.0], &[2]), format!("tensor([1., 2.]{}", end("[2]")));
        assert_eq!(show(&[0.5], &[]), format!("tensor(0.5000{}", end("[]")));
        assert_eq!(show(&[], &[0]), format!("tensor([]{}", end("[0]")));
        assert_eq!(
            show(&[f64::NAN, -1.5, f64::INFINITY], &[3]),
            format!("tensor([    nan, -1.5000,     inf]{}", end("[3]"))
        );
        assert_eq!(
            show(&[1e-6, 1.0], &[2]),
            format!("tensor([1.0000e-06, 1.0000e+00]{}", end("[2]"))
        );
        assert_eq!(
            show(&[1.0, 2.0, 3.0, 4.0], &[2, 1, 2]),
            format!("tensor([[[1., 2.]],\n\n        [[3., 4.]]]{}", end("[2, 1, 2]"))
        );
        let x = Tensor::arange(&device, DType::I64, 0.0, 1001.0, 1.0)?;
        assert_eq!(
            x.to_string(),
            "tensor([   0,    1,    2,  ...,  998,  999, 1000], shape=[1001], dtype=i64, device=cpu)"
        );
        let x = Tensor::zeros(&device, DType::BF16, &[2000, 2])?;
        assert_eq!(
            x.to_string(),
            "tensor([[0., 0.],\n        [0., 0.],\n        [0., 0.],\n        ...,\n        [0., 0.],\n        [0., 0.],\n        [0., 0.]], shape=[2000, 2], dtype=bf16, device=cpu)"
        );
        let x = Tensor::arange(&device, DType::U32, 0.0, 30.0, 1.0)?;
        assert_eq!(
            x.to_string(),
            "tensor([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11, 12, 13, 14, 15, 16, 17,\n        18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29], shape=[30], dtype=u32, device=cpu)"
        );
        Ok(())
    }

    #[test]
    fn a_fake_tensor_shows_no_elements() -> Result<()> {
        let x = Tensor::zeros(&Device::fake(1)?, DType::F32, &[1 << 20, 1 << 20])?;
        assert!(x.to_string().starts_with("tensor(..., shape=[1048576, 1048576], dtype=f32"));
        Ok(())
    }
}
