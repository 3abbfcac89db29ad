use ferrotron_cuda::arguments::{Attention, Place as DevicePlace, Step};
use ferrotron_cuda::attention::{Blocks, Pass};
use ferrotron_tensor::ops::attention::{
    AttentionConfig, AttentionDropout, AttentionMask, attention, attention_backward,
    attention_backward_bias, split_packed,
};
use ferrotron_tensor::ops::reduce::{KeepDims, sum};
use ferrotron_tensor::{DType, RandomKey, ShardSpec, Tensor};

use super::attention_merge::merges;
use super::attention_problems::{dropouts, problems, restricted, scaled};
use super::far;
use crate::simulator::{Launch, Simulator};
use crate::support::*;

pub fn check(simulator: &Simulator) {
    let sizes = [
        [1, 1, 1, 1, 1, 64],
        [2, 64, 64, 2, 2, 64],
        [1, 150, 150, 2, 1, 64],
        [1, 40, 131, 2, 2, 128],
        [1, 131, 70, 1, 1, 128], // queries that see no key, where the mask is causal
        [1, 65, 65, 2, 2, 40],
        [1, 33, 97, 1, 1, 72],
        [1, 24, 2048, 1, 1, 96], // the last queries of a long sequence
    ];
    // What the most mutants fail at comes first.
    let both = [DType::BF16, DType::F16];
    for dtype in both {
        merges(simulator, dtype);
        let sizes = [1, 20, 70, 2, 1, 128];
        compare(simulator, &Problem::dropping(dtype, sizes, AttentionMask::Causal));
    }
    far::attentions(simulator, |pass| Blocks::new(pass, 64, true));
    for problem in dropouts(both, [[2, 70, 90, 4, 2, 64], [1, 40, 70, 2, 2, 96]]) {
        compare(simulator, &problem);
    }
    for problem in scaled(DType::BF16, [1, 40, 300, 1, 1, 64]) {
        compare(simulator, &problem);
    }
    for problem in restricted(DType::BF16, [2, 150, 150, 2, 1, 64], [2, 40, 70, 2, 2, 96]) {
        compare(simulator, &problem);
    }
    for problem in problems(both, &sizes) {
        compare(simulator, &problem);
    }
}

/// Operands and what the CPU makes of them.
pub struct Problem {
    pub name: String,
    pub a: Attention,
    /// The table of ranges, whose address is among the arguments.
    _table: Option<Vec<[u32; 2]>>,
    /// The bias, whose address is among the arguments.
    _bias: Option<Vec<u8>>,
    /// Key, step and place of dropout, if there is any.
    drops: Option<(u64, Step, DevicePlace)>,
    /// Memory of q, k and v, which begins where they do.
    pub memory: [Vec<u8>; 3],
    pub dout: Vec<u8>,
    /// Results of the CPU: out, lse, dq, dk, dv.
    want: [Tensor; 5],
    /// The gradient of the bias before it is summed over what it is broadcast along, except for the batch.
    dbias: Option<Tensor>,
    /// dout . out of each query.
    delta: Tensor,
}

/// Probability of dropout.
const DROPPED: f64 = 0.25;

/// Numbers on [-1, 1).
fn small(dtype: DType, dims: &[usize], seed: u64) -> Tensor {
    random(dtype, dims, seed).mul_scalar(0.5).unwrap()
}

impl Problem {
    /// Operands that are dense, each for itself.
    pub fn separate(dtype: DType, sizes: [usize; 6], mask: AttentionMask) -> Problem {
        let config = AttentionConfig { mask, ..AttentionConfig::causal(sizes[5]) };
        Problem::with(dtype, sizes, config, None)
    }

    /// Builds the problem of [`Problem::separate`] with these options.
    pub fn with(
        dtype: DType,
        sizes: [usize; 6],
        config: AttentionConfig,
        place: Option<ShardSpec>,
    ) -> Problem {
        let [batch, queries, keys, heads, groups, width] = sizes;
        let q = small(dtype, &[batch, queries, heads, width], 1);
        let k = small(dtype, &[batch, keys, groups, width], 2);
        let v = small(dtype, &[batch, keys, groups, width], 3);
        Problem::new([&q, &k, &v], [bytes(&q), bytes(&k), bytes(&v)], config, place)
    }

    /// Builds the problem of [`Problem::separate`] with dropout: of some heads, two pieces of the queries and the end
    /// of the keys.
    pub fn dropping(dtype: DType, sizes: [usize; 6], mask: AttentionMask) -> Problem {
        let [batch, queries, keys, heads, groups, width] = sizes;
        let (q, v) = (small(dtype, &[batch, queries, heads, width], 6), [keys, groups, width]);
        let [k, v] = [7, 8].map(|seed| small(dtype, &[&[batch], &v[..]].concat(), seed));
        let half = queries / 2;
        let place = ShardSpec::new(
            &[batch + 1, 2 * heads, 3 * queries, keys + 5],
            &[
                &[(1, batch)],
                &[(heads - 1, heads)],
                &[(1, half), (queries + half, queries - half)],
                &[(5, keys)],
            ],
        );
        let config = AttentionConfig { mask, ..AttentionConfig::causal(width) };
        let memory = [bytes(&q), bytes(&k), bytes(&v)];
        Problem::new([&q, &k, &v], memory, config, Some(place.unwrap()))
    }

    /// Views of one packed projection.
    pub fn packed(dtype: DType) -> Problem {
        let (heads, groups, width, positions) = (4, 2, 64, 90);
        let projection = small(dtype, &[2, positions, (heads + 2 * groups) * width], 4);
        let (q, k, v) = split_packed(&projection, heads, groups).unwrap();
        let all = bytes(&projection);
        let memory = [&q, &k, &v].map(|x| all[x.layout().offset() * dtype.size()..].to_vec());
        Problem::new([&q, &k, &v], memory, AttentionConfig::causal(width), None)
    }

    fn new(
        [q, k, v]: [&Tensor; 3],
        memory: [Vec<u8>; 3],
        config: AttentionConfig,
        place: Option<ShardSpec>,
    ) -> Problem {
        let (&[_, queries, heads, width], &[_, keys, groups, _]) = (q.dims(), k.dims()) else {
            unreachable!()
        };
        // Twice the usual scale makes rows differ more.
        let usual = AttentionConfig::causal(width).scale;
        let scale = if config.scale == usual { 2.0 * usual } else { config.scale };
        let key = RandomKey::new(7, 12, "blocks.0.attn");
        let drops = place.as_ref().map(|place| {
            let (key, step) = draws(&key);
            (key, step, device_place(place))
        });
        let dropout = place.map(|place| AttentionDropout::new(DROPPED, key, place).unwrap());
        let config = AttentionConfig { scale, dropout, ..config };
        let (out, lse) = attention(q, k, v, &config).unwrap();
        let dout = small(q.dtype(), q.dims(), 5);
        let (dq, dk, dv) = attention_backward(&dout, (q, k, v), (&out, &lse), &config).unwrap();
        let batch = q.dims()[0];
        let dbias = config.bias.as_ref().map(|bias| {
            let samples = if bias.rank() == 4 { bias.dims()[0] } else { 1 };
            let whole = bias.broadcast_to(&[samples, heads, queries, keys]).unwrap();
            let config =
                AttentionConfig { bias: Some(whole.contiguous().unwrap()), ..config.clone() };
            attention_backward_bias(&dout, (q, k, v), (&out, &lse), &config).unwrap()
        });
        let acc = q.dtype().accumulator();
        let bias = config.bias.as_ref().map(|bias| {
            let bias = bias.cast(acc).unwrap();
            let view = bias.broadcast_to(&[batch, heads, queries, keys]).unwrap();
            let strides = view.layout().strides();
            (bytes(&bias), [0, 1, 2].map(|d: usize| strides[d] as i64))
        });
        let wide = |x: &Tensor| x.cast(DType::F64).unwrap();
        let products = wide(&dout).mul(&wide(&out)).unwrap();
        let delta = sum(&products, &[3], KeepDims::Drop).unwrap().transpose(1, 2).unwrap();
        // The table of ranges as the device has it.
        let table = config.ranges.as_ref().map(|ranges| -> Vec<[u32; 2]> {
            let places = (0..ranges.rows() * queries).map(|i| (i / queries, i % queries));
            places.map(|(row, query)| ranges.range(row, query)).collect()
        });
        let strides = |x: &Tensor| std::array::from_fn(|d| x.layout().strides()[d] as i64);
        let a = Attention {
            queries: queries as i64,
            keys: keys as i64,
            heads: heads as i64,
            groups: groups as i64,
            width: width as i64,
            causal: i64::from(config.mask == AttentionMask::Causal),
            window: config.window.unwrap_or(0) as i64,
            ranges: table.as_ref().map_or(0, |table| table.as_ptr() as u64),
            ranges_row: config.ranges.as_ref().map_or(0, |ranges| 2 * ranges.queries() as i64),
            scale,
            softcap: config.softcap.unwrap_or(0.0),
            bias: bias.as_ref().map_or(0, |(bias, _)| bias.as_ptr() as u64),
            bias_step: bias.as_ref().map_or([0; 3], |(_, step)| *step),
            q: strides(q),
            k: strides(k),
            v: strides(v),
            out: strides(&out),
            dout: strides(&dout),
            dq: strides(&dq),
            dk: strides(&dk),
            dv: strides(&dv),
        };
        let name = format!("attention of {:?} to {:?} {config:?}", q.dims(), k.dims());
        let delta = delta.cast(q.dtype().accumulator()).unwrap();
        let want = [out, lse, dq, dk, dv];
        let (_table, _bias) = (table, bias.map(|(bias, _)| bias));
        Problem { name, a, _table, _bias, drops, memory, dout: bytes(&dout), want, dbias, delta }
    }

    pub fn dtype(&self) -> DType {
        self.want[0].dtype()
    }

    pub fn batch(&self) -> usize {
        self.want[0].dims()[0]
    }

    /// The factor by which dropout makes probabilities larger.
    pub fn kept(&self) -> f64 {
        if self.drops.is_some() { 1.0 / (1.0 - DROPPED) } else { 1.0 }
    }

    /// The blocks of a pass on tensor cores.
    pub fn blocks(&self, pass: Pass) -> Blocks {
        let plain = self._bias.is_none() && self.drops.is_none();
        Blocks::new(pass, tile(self.a.width as usize), plain)
    }

    /// Adds what follows the tensors, and runs.
    pub fn run(&self, kernel: Launch<'_>, blocks: Blocks, grid: [usize; 3]) {
        let kernel = kernel.value(self.a).dynamic(blocks.shared);
        let block = [blocks.threads, 1, 1];
        match &self.drops {
            None => kernel.run(grid, block),
            Some((key, step, place)) => {
                let last_dropped = (DROPPED * 4_294_967_296.0) as u32 - 1;
                let kernel = kernel.value(*key).input(std::slice::from_ref(step));
                let kernel = kernel.value(last_dropped).value(self.kept()).value(*place);
                kernel.run(grid, block);
            }
        }
    }

    /// A launch with q, k and v of the kernel `name`, of its variant for dropout where there is some.
    pub fn forward<'a>(&'a self, simulator: &'a Simulator, name: &str, tile: &str) -> Launch<'a> {
        let dropout = if self.drops.is_some() { "_dropout" } else { "" };
        let kernel = simulator.kernel(&format!("{name}{dropout}{tile}"), element(self.dtype()));
        self.memory.iter().fold(kernel, |kernel, memory| kernel.input(memory))
    }

    /// A launch with q, k, v, dout, lse and delta.
    pub fn backward<'a>(
        &'a self,
        simulator: &'a Simulator,
        (name, tile): (&str, &str),
        statistics: &'a [Vec<u8>; 2],
    ) -> Launch<'a> {
        self.forward(simulator, name, tile)
            .input(&self.dout)
            .input(&statistics[0])
            .input(&statistics[1])
    }

    /// Memory for result number `which` of out, lse, dq, dk and dv.
    pub fn room(&self, which: usize) -> Vec<u8> {
        room(self.want[which].dtype(), self.want[which].numel())
    }

    /// Runs the kernel of the bias's gradient, if there is a bias, and asserts that it is the CPU's.
    pub fn compare_bias(
        &self,
        simulator: &Simulator,
        name: (&str, &str),
        statistics: &[Vec<u8>; 2],
        blocks: Blocks,
        tolerance: f64,
    ) {
        let Some(want) = &self.dbias else { return };
        let &[samples, heads, queries, keys] = want.dims() else { unreachable!() };
        let mut dbias = room(want.dtype(), want.numel()); // zeros, to which the rows kernel adds
        let kernel = self.backward(simulator, name, statistics).in_out(&mut dbias);
        let kernel = kernel.value(samples as i64).value(self.batch() as i64);
        // Warps that have a row each have all of its keys.
        let columns = if blocks.shared == 0 { 1 } else { keys.div_ceil(blocks.rows) };
        let grid = folded(queries.div_ceil(blocks.rows) * columns, heads, samples);
        self.run(kernel, blocks, grid);
        let got = read(want.dtype(), want.dims(), &dbias);
        assert_close(&format!("{}, dbias", self.name), &got, want, tolerance, tolerance);
    }

    /// Asserts that a result is the CPU's.
    pub fn assert_close(&self, which: usize, memory: &[u8], relative: f64, absolute: f64) {
        let (want, name) = (&self.want[which], ["out", "lse", "dq", "dk", "dv"][which]);
        let what = format!("{}, {name}", self.name);
        assert_close(&what, &read(want.dtype(), want.dims(), memory), want, relative, absolute);
    }

    /// The CPU's lse, and delta, which the kernel computes.
    pub fn statistics(&self, simulator: &Simulator) -> [Vec<u8>; 2] {
        let (out, acc) = (bytes(&self.want[0]), self.delta.dtype());
        let mut delta = room(acc, self.delta.numel());
        let kernel = simulator
            .kernel("attention_delta", element(self.dtype()))
            .input(&self.dout)
            .input(&out);
        let kernel = kernel.output(&mut delta).value(self.batch() as u64).value(self.a);
        let &[batch, heads, queries] = self.delta.dims() else { unreachable!() };
        let warps = batch * heads * queries.div_ceil(32);
        kernel.run([warps.div_ceil(8), 1, 1], [256, 1, 1]);
        // A sum of products up to 1.
        let eps = acc.epsilon() * self.a.width as f64;
        let got = read(acc, self.delta.dims(), &delta);
        assert_close(&format!("{}, delta", self.name), &got, &self.delta, eps, eps);
        [bytes(&self.want[1]), delta]
    }
}

/// The grid of a bias's gradient, with two samples along y, as that of a batch too large for z.
fn folded(blocks: usize, heads: usize, samples: usize) -> [usize; 3] {
    [blocks, 2 * heads, samples.div_ceil(2)]
}

/// The width of the tiles for heads of `width` elements.
pub fn tile(width: usize) -> usize {
    [64, 96, 128].into_iter().find(|&tile| width <= tile).unwrap()
}

/// Compares each pass with the CPU.
pub fn compare(simulator: &Simulator, problem: &Problem) {
    compare_passes(simulator, problem, |pass| problem.blocks(pass));
}

/// Compares each pass, of the kernels with these blocks, with the CPU.
pub fn compare_passes(
    simulator: &Simulator,
    problem: &Problem,
    blocks_of: impl Fn(Pass) -> Blocks,
) {
    let a = problem.a;
    let [queries, keys, heads, groups, width] =
        [a.queries, a.keys, a.heads, a.groups, a.width].map(|n| n as usize);
    let (batch, eps) = (problem.batch(), problem.dtype().epsilon());
    let suffix = format!("_{}", tile(width));

    let (mut out, mut lse) = (problem.room(0), problem.room(1));
    let kernel = problem.forward(simulator, "attention", &suffix).output(&mut out).output(&mut lse);
    let blocks = blocks_of(Pass::Forward);
    problem.run(kernel, blocks, [queries.div_ceil(blocks.rows), heads, batch]);
    // Probabilities are rounded to the dtype, up to half an epsilon each, and weigh values up to 1; so is the result.
    let kept = problem.kept();
    problem.assert_close(0, &out, eps, eps * kept);
    // Scores are sums of `width` products up to 1, in f32, of which tensor cores add 16 at a time and may truncate each
    // sum; and as many exponentials as keys are added.
    let truncated = (width as f64 / 16.0).max(1.0);
    let sums = DType::F32.epsilon()
        * (truncated * width as f64 * a.scale.abs() + keys as f64 / 16.0 + 16.0);
    problem.assert_close(1, &lse, sums, sums);

    // ds is rounded to the dtype. With p summing to 1 over the keys, and dp - delta of deviation sqrt(D) / 3, the
    // error of dq is below half an epsilon of six deviations; keys get as many such terms as queries see them, with
    // weights that sum to the column's, a few at most. A row's error in p is the other half.
    let gradient = eps * a.scale.abs() * 6.0 * (width as f64).sqrt() / 3.0 * kept;
    let statistics = problem.statistics(simulator);
    let mut dq = problem.room(2);
    let name = ("attention_backward_queries", &suffix[..]);
    let kernel = problem.backward(simulator, name, &statistics).output(&mut dq);
    let blocks = blocks_of(Pass::Queries);
    problem.run(kernel, blocks, [queries.div_ceil(blocks.rows), heads, batch]);
    problem.assert_close(2, &dq, eps, gradient);

    let (mut dk, mut dv) = (problem.room(3), problem.room(4));
    let name = ("attention_backward_keys", &suffix[..]);
    let kernel = problem.backward(simulator, name, &statistics).output(&mut dk).output(&mut dv);
    let blocks = blocks_of(Pass::Keys);
    problem.run(kernel, blocks, [keys.div_ceil(blocks.rows), groups, batch]);
    let column = 2.0 * (heads / groups) as f64;
    problem.assert_close(3, &dk, eps, gradient * column);
    problem.assert_close(4, &dv, eps, eps * column * kept);

    // p (dp - delta) with the rounding of out in delta, for each sample.
    let name = ("attention_backward_bias", &suffix[..]);
    let tolerance = eps * (width as f64).sqrt() * kept * batch as f64;
    if problem.dbias.is_some() {
        problem.compare_bias(simulator, name, &statistics, blocks_of(Pass::Bias), tolerance);
    }
}
