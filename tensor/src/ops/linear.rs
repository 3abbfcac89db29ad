//! The linear layer y = x W^T + b, with its gradients.
//!
//! A GPU fuses a bias, GELU, a bias gradient or the derivative of GELU with a product, where cuBLASLt has that epilogue,
//! and in 16 bits the addition of a residual.

use crate::core::layout::Dims;
use crate::core::tensor::check_pair;
use crate::cuda;
use crate::ops::matmul::{Accum, check_place, named_product_into, product_dims, product_into};
use crate::ops::pointwise::{binary, gelu_and_backward, unary, unary_backward};
use crate::ops::reduce::sum_to_size;
use crate::ops::table::{Binary, Unary};
use crate::{DType, Error, Result, Tensor};

/// The linear layer x W^T + b for x (.., K), W (N, K) and b (N): (.., N).
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let dims = linear_dims(x, weight, bias)?;
    let rows = x.as_matrix()?;
    let matrix = [rows.dims()[0], weight.dims()[0]];
    let mut out = Tensor::empty(x.device(), x.dtype(), &matrix)?;
    let bias = bias.map(Tensor::contiguous).transpose()?;
    let weight = weight.transpose(0, 1)?;
    product_into("linear", &mut out, Accum::Replace, &rows, &weight, bias.as_ref(), &matrix)?;
    out.reshape(&dims)
}

/// r + x W^T + b for the operands of [`linear`] and r (.., N), the residual: (.., N).
///
/// If [`fuses_residual`] and cuBLASLt takes the operands, the sum is formed in the pass of the product; cuBLASLt may round
/// it before it adds a bias. Elsewhere the layer's result is rounded, and then r is added.
///
/// ```
/// use ferrotron_tensor::{Device, Tensor, ops::linear::linear_onto};
/// let device = Device::cpu(1)?;
/// let x = Tensor::from_slice(&device, &[1.0_f32, 2.0], &[1, 2])?;
/// let w = Tensor::from_slice(&device, &[3.0_f32, 4.0], &[1, 2])?;
/// let r = Tensor::from_slice(&device, &[100.0_f32], &[1, 1])?;
/// assert_eq!(linear_onto(&r, &x, &w, None)?.item()?, 111.0);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn linear_onto(
    residual: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    let dims = linear_dims(x, weight, bias)?;
    if residual.dims() != &dims[..] {
        let message = format!("the residual {:?} is not of dims {dims:?}", residual.dims());
        return Err(Error::shape("linear", message));
    }
    check_pair("linear", x, residual)?;
    if fuses_residual(x) {
        let bias = bias.map(Tensor::contiguous).transpose()?;
        let (x, weight) = (x.as_matrix()?, weight.transpose(0, 1)?);
        let fused = cuda::matmul::linear_onto(&residual.as_matrix()?, &x, &weight, bias.as_ref())?;
        if let Some(sum) = fused {
            return sum.reshape(&dims);
        }
    }
    binary(Binary::Add, residual, &linear(x, weight, bias)?)
}

/// Returns whether [`linear_onto`] of operands like `x` adds in the pass of the product, unless cuBLASLt refuses: on a
/// GPU, in 16 bits. Wider types keep the bits of two passes.
pub fn fuses_residual(x: &Tensor) -> bool {
    x.device().is_gpu() && matches!(x.dtype(), DType::BF16 | DType::F16)
}

/// h = x W^T + b as in [`linear`], and gelu(h) in tanh form, if the device fuses both. cuBLASLt does so in 16 bits and
/// applies gelu before h is rounded.
pub fn linear_gelu(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<(Tensor, Option<Tensor>)> {
    let dims = linear_dims(x, weight, bias)?;
    if x.device().is_gpu() {
        let bias = bias.map(Tensor::contiguous).transpose()?;
        let weight = weight.transpose(0, 1)?;
        let both = cuda::matmul::linear_gelu(&x.as_matrix()?, &weight, bias.as_ref())?;
        if let Some((input, value)) = both {
            return Ok((input.reshape(&dims)?, Some(value.reshape(&dims)?)));
        }
    }
    Ok((linear(x, weight, bias)?, None))
}

/// The dims of the result of a linear layer.
fn linear_dims(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Dims> {
    let (&[n, k], Some(&width)) = (weight.dims(), x.dims().last()) else {
        return Err(Error::shape(
            "linear",
            format!("needs x (.., K) and W (N, K), got {:?} and {:?}", x.dims(), weight.dims()),
        ));
    };
    if width != k || bias.is_some_and(|bias| bias.dims() != [n]) {
        let bias = bias.map(Tensor::dims);
        return Err(Error::shape(
            "linear",
            format!("x {:?}, W {:?} and bias {bias:?} do not fit", x.dims(), weight.dims()),
        ));
    }
    check_pair("linear", x, weight)?;
    bias.map_or(Ok(()), |bias| check_pair("linear", x, bias))?;
    let mut dims = Dims::from_slice(x.dims());
    dims[x.rank() - 1] = n;
    Ok(dims)
}

/// dx = dy W of [`linear`] for dy (.., N) and W (N, K), written or added to the unique `dx` (.., K).
pub fn linear_input_gradient(
    dx: &mut Tensor,
    accum: Accum,
    dy: &Tensor,
    weight: &Tensor,
) -> Result<()> {
    let dy = dy.as_matrix()?;
    let dims = [dy.dims()[0], weight.dim(-1)?];
    dx.reshape_mut(&dims, |dx| named_product_into("linear_input_gradient", dx, accum, &dy, weight))
}

/// dh = dx gelu'(h), tanh form, for dx = dy W of [`linear`] whose x is gelu(h): dy (.., N), W (N, K) and h (.., K) give
/// (.., K). If cuBLASLt fuses both, in 16 bits, dx is not rounded before the derivative enters.
pub fn linear_gelu_input_gradient(dy: &Tensor, weight: &Tensor, hidden: &Tensor) -> Result<Tensor> {
    match fused_gelu_gradient(dy, weight, hidden)? {
        Some(dh) => Ok(dh),
        None => {
            unary_backward(Unary::GeluTanh, 0.0, behind_gelu(dy, weight, hidden)?, Some(hidden))
        }
    }
}

/// gelu(h) and dh of [`linear_gelu_input_gradient`]. A CPU computes both in one pass.
///
/// ```
/// use ferrotron_tensor::{DType, Device, Tensor, ops::linear::linear_gelu_gradients};
/// let device = Device::cpu(1)?;
/// let [dy, w, h] = [4.0, 3.0, 0.0].map(|x| Tensor::full(&device, DType::F64, &[1, 1], x));
/// let [x, dh] = linear_gelu_gradients(&dy?, &w?, &h?)?;
/// assert_eq!((x.item()?, dh.item()?), (0.0, 6.0)); // gelu(0), and 12 gelu'(0)
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn linear_gelu_gradients(dy: &Tensor, weight: &Tensor, hidden: &Tensor) -> Result<[Tensor; 2]> {
    match fused_gelu_gradient(dy, weight, hidden)? {
        Some(dh) => Ok([unary(Unary::GeluTanh, 0.0, hidden)?, dh]),
        None => gelu_and_backward(behind_gelu(dy, weight, hidden)?, hidden),
    }
}

/// dh of [`linear_gelu_input_gradient`] if the device fuses product and derivative.
fn fused_gelu_gradient(dy: &Tensor, weight: &Tensor, hidden: &Tensor) -> Result<Option<Tensor>> {
    if !dy.device().is_gpu() {
        return Ok(None);
    }
    let (dy, hidden_rows) = (dy.as_matrix()?, hidden.as_matrix()?);
    product_dims(&dy, weight)?;
    let fused = cuda::matmul::product_and_gelu_derivative(&dy, weight, &hidden_rows)?;
    fused.map(|dh| dh.reshape(hidden.dims())).transpose()
}

/// dx = dy W with the dims of h.
fn behind_gelu(dy: &Tensor, weight: &Tensor, hidden: &Tensor) -> Result<Tensor> {
    let mut dx = Tensor::empty(dy.device(), dy.dtype(), hidden.dims())?;
    linear_input_gradient(&mut dx, Accum::Replace, dy, weight)?;
    Ok(dx)
}

/// dW = dy^T x of [`linear`] for dy (.., N) and x (.., K), written or added to the unique `dweight` (N, K).
pub fn linear_weight_gradient(
    dweight: &mut Tensor,
    accum: Accum,
    dy: &Tensor,
    x: &Tensor,
) -> Result<()> {
    let dy = dy.as_matrix()?.transpose(0, 1)?;
    named_product_into("linear_weight_gradient", dweight, accum, &dy, &x.as_matrix()?)
}

/// db of [`linear`], the sum of dy (.., N) over rows: (N).
pub fn linear_bias_gradient(dy: &Tensor) -> Result<Tensor> {
    sum_to_size(&dy.as_matrix()?, &dy.dims()[dy.rank() - 1..])
}

/// Like [`linear_weight_gradient`], and [`linear_bias_gradient`] if the device fuses both, in the dtype of `dweight`.
pub fn linear_parameter_gradients(
    dweight: &mut Tensor,
    accum: Accum,
    dy: &Tensor,
    x: &Tensor,
) -> Result<Option<Tensor>> {
    if dy.device().is_gpu() {
        let (lhs, rhs) = (dy.as_matrix()?.transpose(0, 1)?, x.as_matrix()?);
        check_place(dweight, &lhs, &product_dims(&lhs, &rhs)?)?;
        if let Some(dbias) = cuda::matmul::product_and_row_sums(dweight, accum, &lhs, &rhs)? {
            return Ok(Some(dbias));
        }
    }
    linear_weight_gradient(dweight, accum, dy, x)?;
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    #[test]
    fn a_linear_layer_of_a_narrowed_view_adds_its_bias() -> Result<()> {
        let device = Device::cpu(1)?;
        let x = Tensor::from_slice(&device, &[1.0_f32, 2.0, 9.0, 3.0, 4.0, 9.0], &[2, 3])?
            .narrow(1, 0, 2)?;
        let w = Tensor::from_slice(&device, &[1.0_f32, 0.0, 0.0, 1.0, 1.0, 1.0], &[3, 2])?;
        let b = Tensor::from_slice(&device, &[10.0_f32, 20.0, 30.0], &[3])?;
        assert_eq!(
            linear(&x, &w, Some(&b))?.to_vec::<f32>()?,
            [11.0, 22.0, 33.0, 13.0, 24.0, 37.0]
        );
        let error = linear(&x, &w.transpose(0, 1)?, None).unwrap_err().to_string();
        assert_eq!(error, "linear: x [2, 2], W [2, 3] and bias None do not fit");
        Ok(())
    }
}
