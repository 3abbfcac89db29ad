//! Bytes that each operation saves for its gradient, exactly.

use ferrotron_autograd::ops::attention::{attention, packed_attention};
use ferrotron_autograd::ops::linear::Gelu;
use ferrotron_autograd::ops::pointwise::{binary, unary};
use ferrotron_autograd::{Leaf, Var, checkpoint, checkpoint_discard_output};
use ferrotron_tensor::ops::attention::{AttentionConfig, KeyRanges};
use ferrotron_tensor::ops::cross_entropy::CrossEntropyConfig;
use ferrotron_tensor::ops::reduce::KeepDims;
use ferrotron_tensor::ops::table::{Binary, Saves, Unary};
use ferrotron_tensor::{Category, DType, Device, RandomKey, Result, ShardSpec, Tensor};

/// Bytes of an f32 and of an i64.
const F: usize = 4;
const I: usize = 8;

/// A computed value, so that saving it counts; its own node saves nothing.
fn computed(device: &Device, dims: &[usize]) -> Result<Var> {
    let leaf = Leaf::new("x", Tensor::full(device, DType::F32, dims, 0.5)?);
    leaf.var()?.add_scalar(0.25)
}

fn parameter(device: &Device, dims: &[usize]) -> Result<Var> {
    Leaf::new("w", Tensor::full(device, DType::F32, dims, 0.5)?).var()
}

fn ids(device: &Device, dims: &[usize]) -> Result<Tensor> {
    Tensor::from_slice(device, &vec![1_i64; dims.iter().product()], dims)
}

#[test]
fn pointwise_operations_keep_what_their_rows_say() -> Result<()> {
    let device = Device::cpu(1)?;
    for &op in Unary::ALL {
        let y = unary(op, 1.5, &computed(&device, &[2, 3])?)?;
        let want = if op.saves() == Saves::Nothing { 0 } else { 6 * F };
        assert_eq!(y.saved_bytes(), want, "{}", op.name());
        let constant = Var::constant(Tensor::full(&device, DType::F32, &[2, 3], 0.5)?);
        assert_eq!(unary(op, 1.5, &constant)?.saved_bytes(), 0, "{}", op.name());
    }
    for &op in Binary::ALL {
        let (a, b) = (computed(&device, &[2, 3])?, computed(&device, &[3])?);
        let constants = [a.detach(), b.detach()];
        let [by_lhs, by_rhs] = op.reads();
        let bytes = |lhs: bool, rhs: bool| (if lhs { 6 } else { 0 } + if rhs { 3 } else { 0 }) * F;
        for (y, want) in [
            (binary(op, &a, &b)?, bytes(by_lhs[0] || by_rhs[0], by_lhs[1] || by_rhs[1])),
            (binary(op, &a, &constants[1])?, bytes(by_lhs[0], by_lhs[1])),
            (binary(op, &constants[0], &b)?, bytes(by_rhs[0], by_rhs[1])),
            (binary(op, &constants[0], &constants[1])?, 0),
        ] {
            assert_eq!(y.saved_bytes(), want, "{}", op.name());
        }
    }
    // Both operands are one buffer, which counts once.
    let x = computed(&device, &[2, 3])?;
    assert_eq!(x.mul(&x)?.saved_bytes(), 6 * F);
    let condition = Tensor::from_slice(&device, &[1_u8, 0, 1], &[3])?;
    assert_eq!(x.where_cond(&condition, &x)?.saved_bytes(), 3);
    Ok(())
}

#[test]
fn views_sums_and_dropout_keep_nothing() -> Result<()> {
    let device = Device::cpu(1)?;
    let x = computed(&device, &[2, 3])?;
    let place = ShardSpec::unsharded(&[2, 3]);
    let all = [
        x.reshape(&[6])?,
        x.transpose(0, 1)?,
        x.permute(&[1, 0])?,
        x.broadcast_to(&[4, 2, 3])?,
        x.narrow(1, 0, 2)?,
        x.split(&[1, 2], 1)?.remove(1),
        x.sum(&[0], KeepDims::Drop)?,
        x.mean(&[0], KeepDims::Keep)?,
        x.sum_all()?,
        x.mean_all()?,
        x.cast(DType::BF16)?,
        x.dropout(0.5, &RandomKey::new(0, 0, "site"), &place)?,
        ferrotron_autograd::ops::concat::concat(&[&x, &x], 0)?,
    ];
    for (i, y) in all.iter().enumerate() {
        assert_eq!(y.saved_bytes(), 0, "operation {i}");
    }
    Ok(())
}

#[test]
fn reductions_and_indexing_keep_operands_and_indices() -> Result<()> {
    let device = Device::cpu(1)?;
    let x = computed(&device, &[2, 3])?;
    let index = ids(&device, &[1, 3])?;
    for (op, y, want) in [
        ("amax", x.amax(&[1], KeepDims::Drop)?, (6 + 2) * F),
        ("log_sum_exp", x.log_sum_exp(&[1], KeepDims::Drop)?, (6 + 2) * F),
        ("softmax", x.softmax(0)?, 6 * F),
        ("log_softmax", x.log_softmax(0)?, 6 * F),
        ("embedding", x.embedding(&ids(&device, &[5])?)?, 5 * I),
        ("gather", x.gather(0, &index)?, 3 * I),
        ("index_select", x.index_select(1, &ids(&device, &[4])?)?, 4 * I),
        ("scatter_add", x.scatter_add(0, &index, &computed(&device, &[1, 3])?)?, 3 * I),
    ] {
        assert_eq!(y.saved_bytes(), want, "{op}");
    }
    Ok(())
}

#[test]
fn products_keep_operands_but_no_parameters() -> Result<()> {
    let device = Device::cpu(1)?;
    let (x, w) = (computed(&device, &[7, 3])?, parameter(&device, &[5, 3])?);
    let b = parameter(&device, &[5])?;
    let (v, gelu) = (parameter(&device, &[2, 5])?, x.linear_gelu(&w, Some(&b))?);
    let of_data = Gelu::new(gelu.hidden().detach(), None)?;
    for (case, y, want) in [
        ("linear", x.linear(&w, Some(&b))?, 21 * F),
        ("linear of data", x.detach().linear(&w, None)?, 21 * F),
        ("linear with a frozen weight", x.linear(&w.detach(), None)?, 15 * F),
        ("linear of a parameter", parameter(&device, &[2, 3])?.linear(&w, None)?, 0),
        ("linear_gelu", gelu.linear(&v, None)?, (21 + 35) * F),
        ("linear_gelu with a frozen weight", gelu.linear(&v.detach(), None)?, (21 + 35 + 10) * F),
        ("linear of GELU of data", of_data.linear(&v, None)?, 35 * F),
        ("matmul", x.matmul(&computed(&device, &[3, 4])?)?, (21 + 12) * F),
        ("matmul by data", x.matmul(&computed(&device, &[3, 4])?.detach())?, 12 * F),
    ] {
        assert_eq!(y.saved_bytes(), want, "{case}");
    }
    Ok(())
}

#[test]
fn norms_keep_the_operand_and_the_statistics_of_each_row() -> Result<()> {
    let device = Device::cpu(1)?;
    let (x, w) = (computed(&device, &[7, 3])?, parameter(&device, &[3])?);
    assert_eq!(x.layer_norm(&w, Some(&w), 1e-5)?.saved_bytes(), (21 + 7 + 7) * F);
    assert_eq!(x.rms_norm(&w, 1e-5)?.saved_bytes(), (21 + 7) * F);
    Ok(())
}

/// A linear layer does not save the value of a norm or GELU that it can recompute from what is saved anyway.
#[test]
fn an_mlp_keeps_neither_the_norm_nor_the_activation() -> Result<()> {
    let device = Device::cpu(1)?;
    let (x, scale) = (computed(&device, &[7, 3])?, parameter(&device, &[3])?);
    let (fc, proj) = (parameter(&device, &[12, 3])?, parameter(&device, &[3, 12])?);
    let statistics = (7 + 7) * F;
    let normed = x.layer_norm(&scale, None, 1e-5)?;
    let hidden = normed.linear(&fc, None)?;
    assert_eq!(hidden.saved_bytes(), 21 * F + statistics);
    let y = hidden.gelu_tanh()?.linear(&proj, None)?;
    assert_eq!(y.saved_bytes(), 21 * F + statistics + 7 * 12 * F);
    let gelu = y.clone();
    drop((normed, hidden));
    // And it is so: of all that was computed, x, the statistics, the hidden values and y are in memory.
    let values = (21 + 7 * 12 + 21) * F + statistics;
    let parameters = (21 + 3 + 36 + 36) * F; // and the leaf behind x
    assert_eq!(device.memory().current, values + parameters);
    assert_eq!(device.memory().bytes(Category::Saved), values - 21 * F);
    gelu.sum_all()?.backward()
}

#[test]
fn attention_keeps_operands_result_and_log_sum_exp() -> Result<()> {
    let device = Device::cpu(1)?;
    let (b, t, h, g, d) = (2, 5, 4, 2, 3);
    let masked = AttentionConfig {
        window: Some(3),
        ranges: Some(KeyRanges::from_lengths(&[t, 2], t)?),
        softcap: Some(1.0),
        ..AttentionConfig::bidirectional(d)
    };
    let config = AttentionConfig::causal(d);
    let q = computed(&device, &[b, t, h, d])?;
    let [k, v] = [computed(&device, &[b, t, g, d])?, computed(&device, &[b, t, g, d])?];
    let want = (2 * b * t * h * d + 2 * b * t * g * d + b * h * t) * F;
    assert_eq!(attention(&q, &k, &v, &config)?.saved_bytes(), want);
    // A mask is no tensor: padding costs what no padding costs.
    assert_eq!(attention(&q, &k, &v, &masked)?.saved_bytes(), want);
    let qkv = computed(&device, &[b, t, (h + 2 * g) * d])?;
    assert_eq!(packed_attention(&qkv, h, g, &config)?.saved_bytes(), want);
    assert_eq!(packed_attention(&qkv, h, g, &masked)?.saved_bytes(), want);
    // A bias is kept with the dims that it has.
    let bias = Tensor::zeros(&device, DType::F32, &[h, 1, t])?;
    let biased = AttentionConfig { bias: Some(bias), ..config };
    assert_eq!(attention(&q, &k, &v, &biased)?.saved_bytes(), want + h * t * F);
    Ok(())
}

#[test]
fn losses_keep_logits_only_within_the_bound() -> Result<()> {
    let device = Device::cpu(1)?;
    let (n, c, v) = (6, 4, 10);
    let targets = ids(&device, &[n])?;
    let config = CrossEntropyConfig::default();
    let logits = computed(&device, &[n, v])?;
    let want = n * v * F + n * I + n * F;
    assert_eq!(logits.cross_entropy(&targets, &config)?.sum.saved_bytes(), want);
    let (x, w) = (computed(&device, &[n, c])?, parameter(&device, &[v, c])?);
    let kept = n * c * F + n * I + n * F + n * v * F;
    // Beyond the bound the gradients of x and w.
    let formed = n * c * F + v * c * F;
    for (bound, want) in [(n * v * F, kept), (n * v * F - 1, formed), (0, formed)] {
        let loss = x.linear_cross_entropy(&w, &targets, &config, bound)?;
        assert_eq!(loss.sum.saved_bytes(), want, "bound {bound}");
    }
    Ok(())
}

#[test]
fn a_region_keeps_its_inputs_but_no_parameters() -> Result<()> {
    let device = Device::cpu(1)?;
    let (x, w) = (computed(&device, &[7, 3])?, parameter(&device, &[5, 3])?);
    let f = |x: &[Var]| Ok(vec![x[0].linear(&x[1], None)?.gelu_erf()?.softmax(-1)?]);
    assert_eq!(checkpoint(&[&x, &w], f)?[0].saved_bytes(), 21 * F);
    Ok(())
}

/// Neither its own gradient nor the layer behind it keeps the output; between the two it is there once.
#[test]
fn a_region_without_outputs_keeps_its_inputs_alone() -> Result<()> {
    let device = Device::cpu(1)?;
    let (b, t, h, d) = (2, 5, 4, 3);
    let (qkv, w) = (computed(&device, &[b, t, 3 * h * d])?, parameter(&device, &[h * d, h * d])?);
    let attend = move |qkv: &[Var]| {
        let y = packed_attention(&qkv[0], h, h, &AttentionConfig::causal(d))?;
        Ok(vec![y])
    };
    let (operand, output) = (b * t * 3 * h * d * F, b * t * h * d * F);
    let kept = attend(std::slice::from_ref(&qkv))?.remove(0).linear(&w, None)?;
    assert_eq!(kept.saved_bytes(), operand + output + b * h * t * F);
    let y = checkpoint_discard_output(&[&qkv], attend)?.remove(0).linear(&w, None)?;
    assert_eq!(y.saved_bytes(), operand);
    y.sum_all()?.backward()
}

#[test]
fn the_only_gradient_of_a_product_overwrites_its_cotangent() -> Result<()> {
    let device = Device::cpu(1)?;
    let allocations = |is_lhs: bool| -> Result<usize> {
        let x = parameter(&device, &[64, 64])?;
        let factor = Var::constant(Tensor::full(&device, DType::F32, &[64, 64], 0.5)?);
        let y = if is_lhs { x.mul(&factor)? } else { factor.mul(&x)? };
        let loss = y.square()?.sum(&[0, 1], KeepDims::Drop)?;
        drop(y);
        device.reset_memory_peaks();
        loss.backward()?;
        Ok(device.memory().n_alloc)
    };
    assert_eq!(allocations(true)?, allocations(false)?);
    Ok(())
}
