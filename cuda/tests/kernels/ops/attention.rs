use bytemuck::Zeroable;
use ferrotron_cuda::arguments::Attention;
use ferrotron_tensor::ops::attention::{
    AttentionConfig, AttentionMask, attention, attention_backward, split_packed,
};
use ferrotron_tensor::{DType, Tensor};

use crate::simulator::Simulator;
use crate::support::*;

/// (batch, queries, keys, heads, key-value heads, width)
type Sizes = [usize; 6];

pub fn check(simulator: &Simulator) {
    for dtype in [DType::BF16, DType::F16] {
        let sizes: [Sizes; 7] = [
            [1, 1, 1, 1, 1, 64],
            [2, 64, 64, 2, 2, 64],
            [1, 150, 150, 2, 1, 64],
            [1, 40, 131, 2, 2, 128],
            [1, 131, 70, 1, 1, 128], // queries that see no key, where the mask is causal
            [1, 65, 65, 2, 2, 40],
            [1, 33, 97, 1, 1, 96],
        ];
        for sizes in sizes {
            for mask in [AttentionMask::None, AttentionMask::Causal] {
                separate(simulator, dtype, sizes, mask);
            }
        }
        packed(simulator, dtype);
    }
}

/// Operands that lie one behind another, each dense.
fn separate(simulator: &Simulator, dtype: DType, sizes: Sizes, mask: AttentionMask) {
    let [batch, queries, keys, heads, groups, width] = sizes;
    let q = small(dtype, &[batch, queries, heads, width], 1);
    let k = small(dtype, &[batch, keys, groups, width], 2);
    let v = small(dtype, &[batch, keys, groups, width], 3);
    compare(simulator, (&q, &k, &v), [&bytes(&q), &bytes(&k), &bytes(&v)], mask);
}

/// Views of one packed projection.
fn packed(simulator: &Simulator, dtype: DType) {
    let (heads, groups, width, positions) = (4, 2, 64, 90);
    let projection = small(dtype, &[2, positions, (heads + 2 * groups) * width], 4);
    let (q, k, v) = split_packed(&projection, heads, groups).unwrap();
    let all = bytes(&projection);
    let from = |x: &Tensor| &all[x.layout().offset() * dtype.size()..];
    compare(simulator, (&q, &k, &v), [from(&q), from(&k), from(&v)], AttentionMask::Causal);
}

/// Numbers on [-1, 1).
fn small(dtype: DType, dims: &[usize], seed: u64) -> Tensor {
    random(dtype, dims, seed).mul_scalar(0.5).unwrap()
}

fn strides(x: &Tensor) -> [i64; 3] {
    std::array::from_fn(|d| x.layout().strides()[d] as i64)
}

fn compare(
    simulator: &Simulator,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    memory: [&[u8]; 3],
    mask: AttentionMask,
) {
    let dtype = q.dtype();
    let &[batch, queries, heads, width] = q.dims() else { unreachable!() };
    let &[_, keys, groups, _] = k.dims() else { unreachable!() };
    // Twice the usual scale makes rows differ more.
    let scale = 2.0 / (width as f64).sqrt();
    let config = AttentionConfig { mask, scale, dropout: None };
    let tile = if width <= 64 { 64 } else { 128 };
    let what = format!("attention of {:?} to {:?} {mask:?}", q.dims(), k.dims());
    let (want, want_lse) = attention(q, k, v, &config).unwrap();
    let dout = small(dtype, q.dims(), 5);
    let (want_dq, want_dk, want_dv) =
        attention_backward(&dout, (q, k, v), (&want, &want_lse), &config).unwrap();
    let a = Attention {
        queries: queries as i64,
        keys: keys as i64,
        heads: heads as i64,
        groups: groups as i64,
        width: width as i64,
        causal: i64::from(mask == AttentionMask::Causal),
        scale,
        q: strides(q),
        k: strides(k),
        v: strides(v),
        out: strides(&want),
        dout: strides(&dout),
        dq: strides(&want_dq),
        dk: strides(&want_dk),
        dv: strides(&want_dv),
        ..Attention::zeroed()
    };
    let rows = |rows: usize| rows * (tile + 8) * dtype.size();
    let eps = dtype.epsilon();

    let (mut out, mut lse) = (room(dtype, want.numel()), room(DType::F32, want_lse.numel()));
    let kernel = simulator.kernel(&format!("attention_{tile}"), element(dtype));
    let kernel = memory.iter().fold(kernel, |kernel, memory| kernel.input(memory));
    let kernel = kernel.output(&mut out).output(&mut lse).value(a).dynamic(rows(3 * 64));
    kernel.run([queries.div_ceil(64), heads, batch], [128, 1, 1]);
    // Probabilities are rounded to the dtype, up to half an epsilon each, and weigh values up to 1; so is the result.
    assert_close(&what, &read(dtype, want.dims(), &out), &want, eps, eps);
    // Scores are sums of `width` products up to 1, in f32, and as many exponentials as keys are added.
    let sums = DType::F32.epsilon() * (width as f64 * scale + keys as f64 / 16.0 + 16.0);
    assert_close(
        &format!("{what}, lse"),
        &read(DType::F32, want_lse.dims(), &lse),
        &want_lse,
        sums,
        sums,
    );

    let (dout_in, out_in, lse_in) = (bytes(&dout), bytes(&want), bytes(&want_lse));
    let mut delta = vec![0.0_f32; want_lse.numel()];
    let kernel = simulator.kernel("attention_delta", element(dtype)).input(&dout_in).input(&out_in);
    let kernel = kernel.output(&mut delta).value(batch as u64).value(a);
    kernel.run([(batch * heads * queries).div_ceil(8), 1, 1], [256, 1, 1]);
    let products = dout.cast(DType::F64).unwrap().mul(&want.cast(DType::F64).unwrap()).unwrap();
    let sums = ferrotron_tensor::ops::reduce::sum(
        &products,
        &[3],
        ferrotron_tensor::ops::reduce::KeepDims::Drop,
    )
    .unwrap();
    let sums = sums.transpose(1, 2).unwrap().cast(DType::F32).unwrap();
    let f32_sums = DType::F32.epsilon() * width as f64;
    assert_close(
        &format!("{what}, delta"),
        &read(DType::F32, want_lse.dims(), bytemuck::cast_slice(&delta)),
        &sums,
        f32_sums,
        f32_sums,
    );

    let backward = |name: &str| {
        let kernel = simulator.kernel(&format!("attention_backward_{name}_{tile}"), element(dtype));
        let kernel = memory.iter().fold(kernel, |kernel, memory| kernel.input(memory));
        kernel.input(&dout_in).input(&lse_in).input(&delta)
    };
    // ds is rounded to the dtype. With p summing to 1 over the keys, and dp - delta of deviation sqrt(D) / 3, the
    // error of dq is below half an epsilon of six deviations; keys get as many such terms as queries see them, with
    // weights that sum to the column's, a few at most. A row's error in p is the other half.
    let deviation = 6.0 * (width as f64).sqrt() / 3.0;
    let gradient = eps * scale * deviation;
    let mut dq = room(dtype, want_dq.numel());
    let kernel = backward("queries").output(&mut dq).value(a).dynamic(rows(4 * 64));
    kernel.run([queries.div_ceil(64), heads, batch], [128, 1, 1]);
    assert_close(
        &format!("{what}, dq"),
        &read(dtype, want_dq.dims(), &dq),
        &want_dq,
        eps,
        gradient,
    );

    let (mut dk, mut dv) = (room(dtype, want_dk.numel()), room(dtype, want_dv.numel()));
    let query_tile = if tile == 64 { 64 } else { 32 };
    let kernel = backward("keys")
        .output(&mut dk)
        .output(&mut dv)
        .value(a)
        .dynamic(rows(2 * 64 + 2 * query_tile));
    kernel.run([keys.div_ceil(64), groups, batch], [128, 1, 1]);
    let column = 2.0 * (heads / groups) as f64;
    assert_close(
        &format!("{what}, dk"),
        &read(dtype, want_dk.dims(), &dk),
        &want_dk,
        eps,
        gradient * column,
    );
    assert_close(
        &format!("{what}, dv"),
        &read(dtype, want_dv.dims(), &dv),
        &want_dv,
        eps,
        eps * column,
    );
}
