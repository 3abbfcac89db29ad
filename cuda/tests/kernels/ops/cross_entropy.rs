use ferrotron_cuda::arguments::{CrossEntropy, NO_BAD_INDEX};
use ferrotron_tensor::ops::cross_entropy::{
    CrossEntropyConfig, cross_entropy, cross_entropy_backward,
};
use ferrotron_tensor::{DType, Tensor};

use crate::simulator::{Launch, Simulator};
use crate::support::*;

pub fn check(simulator: &Simulator) {
    for dtype in FLOATS {
        for (rows, width) in [(1, 1), (5, 7), (6, 33), (3, 1031), (2, 2048)] {
            for smoothing in [0.0, 0.1] {
                for index in INDICES {
                    let mut classes: Vec<f64> =
                        (0..rows).map(|i| ((i * i * 97 + i) % width.min(200)) as f64).collect();
                    if index == DType::I64 && rows > 2 {
                        (classes[1], classes[2]) = (-100.0, -3.0);
                    }
                    let logits = random(dtype, &[rows, width], 1).mul_scalar(2.0).unwrap();
                    let targets = tensor(index, &[rows], &classes);
                    whole(simulator, &logits, &targets, smoothing);
                    for shards in [1, 3] {
                        in_shards(simulator, &logits, &targets, smoothing, shards);
                    }
                }
            }
        }
        // The first target that is no class is reported; one that is ignored is not.
        let (logits, targets) =
            (random(dtype, &[4, 3], 2), tensor(DType::I64, &[4], &[0.0, 9.0, 3.0, 4.0]));
        let config =
            CrossEntropy { ignore_index: 9, offset: 0, global: 3, smoothing: 0.0, first: 40 };
        let (mut lse, mut losses, mut bad) =
            (room(dtype.accumulator(), 4), [0.0; 4], [NO_BAD_INDEX]);
        let (x, classes) = (bytes(&logits), bytes(&targets));
        let kernel = simulator.kernel("cross_entropy", element(dtype)).input(&x);
        let kernel =
            with_targets(kernel, &classes, &targets, config).output(&mut lse).output(&mut losses);
        let (grid, block) = rowwise(4, 3);
        kernel.value(4_u64).value(3_u64).in_out(&mut bad).run(grid, block);
        assert_eq!((bad, losses[1]), ([42], 0.0));
    }
}

fn with_targets<'a>(
    kernel: Launch<'a>,
    classes: &'a [u8],
    targets: &Tensor,
    config: CrossEntropy,
) -> Launch<'a> {
    kernel.input(classes).value(index_type(targets)).value(config)
}

/// Sums of n exponentials in different orders; logits and losses are up to 16.
fn tolerance(dtype: DType, width: usize) -> f64 {
    dtype.accumulator().epsilon() * (width as f64 / 32.0 + 40.0)
}

fn check_loss(
    simulator: &Simulator,
    logits: &Tensor,
    targets: &Tensor,
    smoothing: f64,
    lse: &[u8],
    losses: &[f64],
) -> Tensor {
    let (dtype, rows, width) = (logits.dtype(), logits.dims()[0], logits.dims()[1]);
    let acc = dtype.accumulator();
    let config = CrossEntropyConfig { label_smoothing: smoothing, ..CrossEntropyConfig::default() };
    let want = cross_entropy(logits, targets, &config).unwrap();
    let eps = tolerance(dtype, width);
    assert_close("lse", &read(acc, &[rows], lse), &want.lse, eps, 4.0 * eps);
    let mut loss = room(acc, 1);
    let kernel =
        simulator.kernel("cross_entropy_total", element(dtype)).input(losses).output(&mut loss);
    kernel.value(rows as u64).run([1; 3], [64, 1, 1]);
    assert_close("loss", &read(acc, &[], &loss), &want.loss, eps, 16.0 * eps * rows as f64);
    want.lse
}

/// The gradient of all classes from `offset` on that `logits` has.
fn check_gradient(
    simulator: &Simulator,
    logits: &Tensor,
    targets: &Tensor,
    config: CrossEntropy,
    lse: &Tensor,
    want: &Tensor,
) {
    let (dtype, rows, width) = (logits.dtype(), logits.dims()[0], logits.dims()[1]);
    let (mut dx, classes, lse) = (bytes(logits), bytes(targets), bytes(lse));
    let scale = bytes(&scale(dtype));
    let kernel = simulator.kernel("cross_entropy_backward", element(dtype)).in_out(&mut dx);
    let kernel = with_targets(kernel, &classes, targets, config).input(&lse).input(&scale);
    let (grid, block) = rowwise(rows, width);
    kernel.value(rows as u64).value(width as u64).run(grid, block);
    // e^(x - lse), whose argument is up to 16 and off by its rounding.
    let eps = 32.0 * dtype.accumulator().epsilon();
    // The smallest numbers of f16 are 2^-24 apart.
    let smallest = if dtype == DType::F16 { 2.0_f64.powi(-24) } else { 0.0 };
    assert_close(
        "cross_entropy_backward",
        &read(dtype, logits.dims(), &dx),
        want,
        rounding(dtype) + eps,
        eps * SCALE + smallest,
    );
}

const SCALE: f64 = 0.3;

fn scale(dtype: DType) -> Tensor {
    tensor(dtype.accumulator(), &[], &[SCALE])
}

fn gradient(logits: &Tensor, targets: &Tensor, lse: &Tensor, smoothing: f64) -> Tensor {
    let config = CrossEntropyConfig { label_smoothing: smoothing, ..CrossEntropyConfig::default() };
    let scale = scale(logits.dtype());
    cross_entropy_backward(logits.copy().unwrap(), targets, lse, &config, &scale).unwrap()
}

fn whole(simulator: &Simulator, logits: &Tensor, targets: &Tensor, smoothing: f64) {
    let (dtype, rows, width) = (logits.dtype(), logits.dims()[0], logits.dims()[1]);
    let global = width as i64;
    let config = CrossEntropy { ignore_index: -100, offset: 0, global, smoothing, first: 0 };
    let (x, classes) = (bytes(logits), bytes(targets));
    let (mut lse, mut losses, mut bad) =
        (room(dtype.accumulator(), rows), vec![0.0; rows], [NO_BAD_INDEX]);
    let kernel = simulator.kernel("cross_entropy", element(dtype)).input(&x);
    let kernel =
        with_targets(kernel, &classes, targets, config).output(&mut lse).output(&mut losses);
    let (grid, block) = rowwise(rows, width);
    kernel.value(rows as u64).value(width as u64).in_out(&mut bad).run(grid, block);
    assert_eq!(bad, [NO_BAD_INDEX]);
    let lse = check_loss(simulator, logits, targets, smoothing, &lse, &losses);
    let want = gradient(logits, targets, &lse, smoothing);
    check_gradient(simulator, logits, targets, config, &lse, &want);
}

/// The classes in parts: maxima and sums are joined here as collectives would.
fn in_shards(
    simulator: &Simulator,
    logits: &Tensor,
    targets: &Tensor,
    smoothing: f64,
    shards: usize,
) {
    let (dtype, rows, width) = (logits.dtype(), logits.dims()[0], logits.dims()[1]);
    if width < shards {
        return;
    }
    let acc = dtype.accumulator();
    let classes = bytes(targets);
    let terms = if smoothing == 0.0 { 2 } else { 3 };
    let config = |offset: usize| CrossEntropy {
        ignore_index: -100,
        offset: offset as i64,
        global: width as i64,
        smoothing,
        first: 0,
    };
    let parts: Vec<_> =
        (0..shards).map(|rank| ferrotron_tensor::partition_range(width, shards, rank)).collect();
    let found: Vec<(Tensor, Vec<u8>)> = parts
        .iter()
        .map(|part| {
            let x = bytes(&logits.narrow(1, part.start, part.len()).unwrap());
            let (mut max, mut sums, mut bad) =
                (room(acc, rows), room(acc, terms * rows), [NO_BAD_INDEX]);
            let kernel = simulator.kernel("cross_entropy_shard", element(dtype)).input(&x);
            let kernel = with_targets(kernel, &classes, targets, config(part.start))
                .output(&mut max)
                .output(&mut sums);
            let (grid, block) = rowwise(rows, part.len());
            kernel.value(rows as u64).value(part.len() as u64).in_out(&mut bad).run(grid, block);
            assert_eq!(bad, [NO_BAD_INDEX]);
            (read(acc, &[rows], &max), sums)
        })
        .collect();
    let max =
        found.iter().map(|(max, _)| max.clone()).reduce(|a, b| a.maximum(&b).unwrap()).unwrap();
    let max_in = bytes(&max);
    let sums = found
        .into_iter()
        .map(|(own, mut sums)| {
            let own = bytes(&own);
            let kernel = simulator
                .kernel("cross_entropy_rescale", element(dtype))
                .in_out(&mut sums)
                .input(&own);
            kernel.input(&max_in).value(rows as u64).run([1; 3], [64, 1, 1]);
            read(acc, &[terms * rows], &sums)
        })
        .reduce(|a, b| a.add(&b).unwrap())
        .unwrap();
    let (sums, mut lse, mut losses) = (bytes(&sums), room(acc, rows), vec![0.0; rows]);
    let kernel =
        simulator.kernel("cross_entropy_finish", element(dtype)).input(&max_in).input(&sums);
    let kernel =
        with_targets(kernel, &classes, targets, config(0)).output(&mut lse).output(&mut losses);
    kernel.value(rows as u64).run([1; 3], [64, 1, 1]);
    let lse = check_loss(simulator, logits, targets, smoothing, &lse, &losses);
    let want = gradient(logits, targets, &lse, smoothing);
    for part in parts {
        let narrow =
            |x: &Tensor| x.narrow(1, part.start, part.len()).unwrap().contiguous().unwrap();
        check_gradient(
            simulator,
            &narrow(logits),
            targets,
            config(part.start),
            &lse,
            &narrow(&want),
        );
    }
}
