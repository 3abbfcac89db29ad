//! Training in 16 bits: steps that overflow, checkpoints between precisions, and what scaling the loss is for.

use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron_models::checkpoint::Checkpoint;
use ferrotron_models::data::{Batch, Samples, TokenBatch};
use ferrotron_models::gpt::{Gpt, GptConfig};
use ferrotron_models::trainer::{
    ParallelConfig, PrecisionConfig, StepReport, Trainer, TrainerConfig,
};
use ferrotron_nn::schedule::LrSchedule;
use ferrotron_nn::{Axis, GradDType, LossScale, ParamPatterns, Scope, Sharding};
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::data_parallel::DataParallelConfig;
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, RandomKey, Result};
use std::collections::BTreeMap;
use std::path::Path;

use crate::numbers::numbers;

const SEQ_LENGTH: usize = 8;

/// Sequences in which each token follows from the one before.
struct Chain;

impl Samples for Chain {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let key = RandomKey::new(1, 0, "chain");
        let tokens = (0..micro_batch as u64).flat_map(|sample| {
            let start = (key.uniform(first_sample + sample) * 13.0) as u32;
            (0..SEQ_LENGTH as u32).map(move |i| (start + 5 * i) % 13)
        });
        let inputs: Vec<u32> = tokens.collect();
        let targets = inputs.iter().map(|token| i64::from((token + 5) % 13)).collect();
        TokenBatch { inputs, targets, first_sample, micro_batch, seq_length: SEQ_LENGTH }.try_into()
    }

    fn seq_length(&self) -> usize {
        SEQ_LENGTH
    }
}

fn model() -> GptConfig {
    GptConfig::gpt2(13, 2, 16, 2, SEQ_LENGTH)
}

fn trainer(
    dtype: DType,
    mesh: &Mesh,
    precision: PrecisionConfig,
    gradients: GradDType,
) -> Result<Trainer<Gpt>> {
    let scope = Scope::new(&Device::cpu(1)?, dtype, 1234);
    let data_parallel = DataParallelConfig { gradients, ..DataParallelConfig::default() };
    let batch_size = BatchSize::new(BatchSizeConfig {
        micro_batch_size: 2,
        data_parallel_size: mesh.layout().size(Axis::Data),
        global_batch_size: Some(8),
        ..BatchSizeConfig::default()
    })?;
    let config = TrainerConfig {
        parallel: ParallelConfig { data_parallel, ..ParallelConfig::default() },
        precision,
        ..TrainerConfig::new(7, LrSchedule::constant(1e-2)?, batch_size)
    };
    Trainer::<Gpt>::on_mesh(&scope, mesh, &model(), config)
}

fn alone(dtype: DType, loss_scale: LossScale) -> Result<Trainer<Gpt>> {
    let precision = PrecisionConfig { loss_scale, ..PrecisionConfig::default() };
    trainer(dtype, &Mesh::single(), precision, GradDType::Accumulator)
}

/// Every number of the weights, moments and master weights.
fn state(trainer: &Trainer<Gpt>) -> Result<BTreeMap<String, Vec<f64>>> {
    let (weights, moments) = trainer.local_shards()?;
    let all = weights.iter().chain(&moments.shards);
    all.map(|held| Ok((format!("{} {:?}", held.name, held.place), held.tensor.to_f64()?))).collect()
}

fn saved(trainer: &Trainer<Gpt>, folder: &Path) -> Result<Checkpoint> {
    Checkpoint::open(&trainer.save(folder, None, serde_json::Value::Null)?)
}

#[test]
fn a_step_that_overflows_changes_nothing_on_any_rank() -> Result<()> {
    let steps = 40;
    let run = |trainer: &mut Trainer<Gpt>| -> Result<Vec<StepReport>> {
        (0..steps)
            .map(|_| {
                let (before, taken) = (numbers(trainer)?, trainer.optimizer().steps());
                let report = trainer.step(&Chain)?;
                let unchanged = before == numbers(trainer)?;
                assert_eq!(unchanged, report.skipped, "step {}", report.step);
                assert_eq!(trainer.optimizer().steps() - taken, u64::from(!report.skipped));
                assert_eq!(report.grad_norm.is_finite(), !report.skipped);
                Ok(report)
            })
            .collect()
    };
    let mut serial = alone(DType::F16, LossScale::DYNAMIC)?;
    let reports = run(&mut serial)?;
    let skipped = reports.iter().filter(|report| report.skipped).count();
    assert!((3..30).contains(&skipped), "{skipped} of {steps} steps were skipped");
    // One overflow is forgiven, each further one halves the scale.
    let halved = 0.5_f64.powi(skipped as i32 - 1);
    assert_eq!(reports[steps - 1].loss_scale, 4_294_967_296.0 * halved);
    assert!(reports[steps - 1].loss < 0.7 * reports[0].loss, "{:?}", reports[steps - 1]);
    assert_eq!(serial.progress().consumed_samples, 8 * steps as u64);

    // Tensor, data and pipeline parallel: 8 ranks.
    let ranks = run_threads(8, &WorldConfig::default(), |world| {
        let mesh = Mesh::new(&world, ParallelDims::new(8, 2, 1, 2)?, SequenceParallel::On)?;
        let precision =
            PrecisionConfig { loss_scale: LossScale::DYNAMIC, ..PrecisionConfig::default() };
        run(&mut trainer(DType::F16, &mesh, precision, GradDType::Accumulator)?)
    });
    let ranks = ranks.into_iter().collect::<Result<Vec<_>>>()?;
    for (rank, found) in ranks.iter().enumerate() {
        for (report, want) in found.iter().zip(&ranks[0]) {
            let agreed = (report.skipped, report.loss_scale, report.loss);
            assert_eq!(agreed, (want.skipped, want.loss_scale, want.loss), "rank {rank}");
        }
    }
    // Where the largest gradient is just below 65504 another layout may round it beyond.
    let parallel = ranks[0].iter().filter(|report| report.skipped).count();
    assert!(parallel.abs_diff(skipped) <= 1, "{parallel} steps skipped, {skipped} by one rank");
    Ok(())
}

#[test]
fn an_overflow_with_a_constant_scale_is_an_error() -> Result<()> {
    let mut trainer = alone(DType::F16, LossScale::Constant(1e12))?;
    let before = state(&trainer)?;
    let error = trainer.step(&Chain).unwrap_err().to_string();
    assert!(error.contains("gradient norm"), "{error}");
    assert_eq!(state(&trainer)?, before);
    Ok(())
}

#[test]
fn a_run_in_16_bits_goes_on_to_the_last_bit() -> Result<()> {
    for dtype in [DType::BF16, DType::F16] {
        let folder = tempfile::tempdir().unwrap();
        let scale = if dtype == DType::F16 { LossScale::DYNAMIC } else { LossScale::NONE };
        let mut whole = alone(dtype, scale)?;
        let mut first = alone(dtype, scale)?;
        (0..30).try_for_each(|_| whole.step(&Chain).map(drop))?;
        (0..17).try_for_each(|_| first.step(&Chain).map(drop))?;
        let mut second = alone(dtype, scale)?;
        second.load(&saved(&first, folder.path())?)?;
        (17..30).try_for_each(|_| second.step(&Chain).map(drop))?;
        assert_eq!(second.progress().loss_scaler, whole.progress().loss_scaler, "{dtype}");
        assert_eq!(second.optimizer().steps(), whole.optimizer().steps(), "{dtype}");
        assert!(state(&second)? == state(&whole)?, "{dtype}: another state");
    }
    Ok(())
}

/// The weights in the type in which they are updated.
fn exact(trainer: &Trainer<Gpt>) -> Result<BTreeMap<String, Vec<f64>>> {
    let state = state(trainer)?;
    let of = |prefix: &str| -> BTreeMap<String, Vec<f64>> {
        let named = state.iter().filter_map(|(name, values)| {
            Some((name.strip_prefix(prefix)?.to_string(), values.clone()))
        });
        named.collect()
    };
    let masters = of("optimizer.master.");
    let weights = of("").into_iter().filter(|(name, _)| !name.starts_with("optimizer."));
    Ok(if masters.is_empty() { weights.collect() } else { masters })
}

#[test]
fn a_run_goes_on_in_another_precision_with_all_it_knew() -> Result<()> {
    let precisions = [DType::F32, DType::BF16, DType::F16];
    for from in precisions {
        let folder = tempfile::tempdir().unwrap();
        let scale = |dtype| if dtype == DType::F16 { LossScale::DYNAMIC } else { LossScale::NONE };
        let mut first = alone(from, scale(from))?;
        (0..20).try_for_each(|_| first.step(&Chain).map(drop))?;
        let checkpoint = saved(&first, folder.path())?;
        for to in precisions {
            let mut second = alone(to, scale(to))?;
            second.load(&checkpoint)?;
            assert!(exact(&second)? == exact(&first)?, "{from} to {to}: other weights");
            let weights = second.parts()[0].clone();
            for param in ferrotron_nn::Module::params(&weights) {
                assert_eq!(param.leaf().value()?.dtype(), to);
            }
            assert!(second.step(&Chain)?.loss.is_finite(), "{from} to {to}");
        }
    }
    Ok(())
}

/// Norms, the tied embedding and a layer of an MLP.
const KEPT: [&str; 3] = ["*norm*", "wte", "blocks.0.mlp.fc"];

/// A run on two ranks in bf16 whose parameters of `kept` are f32.
fn kept_trainer(mesh: &Mesh, sharding: Sharding, kept: &[&str]) -> Result<Trainer<Gpt>> {
    let plain = trainer(DType::BF16, mesh, PrecisionConfig::default(), GradDType::Accumulator)?;
    let data_parallel =
        DataParallelConfig { sharding, bucket_numel: Some(500), ..DataParallelConfig::default() };
    let config = TrainerConfig {
        keep_in_fp32: ParamPatterns::new(kept.iter().copied())?,
        parallel: ParallelConfig { data_parallel, ..ParallelConfig::default() },
        ..plain.config().clone()
    };
    Trainer::on_mesh(plain.scope(), mesh, &model(), config)
}

/// A run is the same, but for roundings, in every stage of ZeRO, with tensor parallelism and on one rank.
#[test]
fn parameters_in_f32_train_in_every_layout() -> Result<()> {
    let losses = |dp: usize, tp: usize, sharding| -> Result<Vec<f64>> {
        let ranks = run_threads(dp * tp, &WorldConfig::default(), |world| {
            let dims = ParallelDims::new(dp * tp, tp, 1, 1)?;
            let mesh = Mesh::new(&world, dims, SequenceParallel::On)?;
            let mut trainer = kept_trainer(&mesh, sharding, &KEPT)?;
            (0..12).map(|_| Ok(trainer.step(&Chain)?.loss)).collect::<Result<Vec<f64>>>()
        });
        ranks.into_iter().next().expect("a rank")
    };
    let serial = losses(1, 1, Sharding::None)?;
    assert!(serial[11] < 0.8 * serial[0], "{serial:?}");
    for (dp, tp) in [(2, 1), (1, 2), (2, 2)] {
        for sharding in Sharding::ALL {
            let found = losses(dp, tp, sharding)?;
            // The first loss differs by the order of sums; later ones by what 16 bits make of that.
            for (step, (got, want)) in found.iter().zip(&serial).enumerate() {
                let off = (got - want).abs() / want;
                let allowed = if step == 0 { 2e-3 } else { 2e-2 };
                assert!(off <= allowed, "dp {dp} tp {tp} {sharding:?}: {found:?}, {serial:?}");
            }
        }
    }
    Ok(())
}

/// The weights as they are updated: the master weight of each, or the weight.
fn updated(trainer: &Trainer<Gpt>) -> Result<BTreeMap<String, Vec<f64>>> {
    let (states, mut weights): (BTreeMap<_, _>, BTreeMap<_, _>) =
        state(trainer)?.into_iter().partition(|(name, _)| name.starts_with("optimizer."));
    let masters = states.into_iter().filter_map(|(name, values)| {
        Some((name.strip_prefix("optimizer.master.")?.to_string(), values))
    });
    weights.extend(masters);
    Ok(weights)
}

/// A checkpoint goes on to the last bit, and so do weights and moments where other parameters are f32, or all, or none.
#[test]
fn a_checkpoint_of_parameters_in_f32_goes_on_with_others() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let kept = |kept: &[&str]| kept_trainer(&Mesh::single(), Sharding::None, kept);
    let mut first = kept(&KEPT)?;
    (0..9).try_for_each(|_| first.step(&Chain).map(drop))?;
    let checkpoint = saved(&first, folder.path())?;
    assert_eq!(checkpoint.dtype()?, DType::BF16);
    assert!(checkpoint.kept_in_fp32()?.matches("norm_f.weight"));
    assert!(!checkpoint.kept_in_fp32()?.matches("blocks.1.mlp.fc.weight"));
    let weights = updated(&first)?;
    let losses = |trainer: &mut Trainer<Gpt>| -> Result<Vec<f64>> {
        (0..4).map(|_| Ok(trainer.step(&Chain)?.loss)).collect()
    };
    let want = losses(&mut first)?;
    // A weight in f32 is rounded where it is used, to what a 16-bit weight with a master copy holds.
    for (patterns, same) in [(&KEPT[..], true), (&[], false), (&["*"], true)] {
        let mut second = kept(patterns)?;
        second.load(&checkpoint)?;
        assert!(updated(&second)? == weights, "{patterns:?}: other weights");
        let found = losses(&mut second)?;
        assert_eq!(found == want, same, "{patterns:?}: {found:?}, {want:?}");
        assert!(found.iter().zip(&want).all(|(got, want)| (got - want).abs() < 2e-2 * want));
        // And back again.
        let again = tempfile::tempdir().unwrap();
        let mut third = kept(&KEPT)?;
        third.load(&saved(&second, again.path())?)?;
        assert!(updated(&third)? == updated(&second)?, "{patterns:?}: other weights");
    }
    Ok(())
}

#[test]
fn patterns_that_keep_nothing_in_f32_are_refused() -> Result<()> {
    let error = kept_trainer(&Mesh::single(), Sharding::None, &["layernorm"]).err().unwrap();
    let error = error.to_string();
    assert!(error.contains("keep-in-fp32: 'layernorm' matches none of"), "{error}");
    let plain = alone(DType::F32, LossScale::NONE)?;
    let keep_in_fp32 = ParamPatterns::new(["*norm*"])?;
    let config = TrainerConfig { keep_in_fp32, ..plain.config().clone() };
    let error = Trainer::<Gpt>::new(plain.scope(), &model(), config).err().unwrap().to_string();
    assert!(error.contains("keep-in-fp32: needs --bf16 or --fp16, got f32"), "{error}");
    Ok(())
}

/// Nothing is learned with a scale so small that f16 holds no gradient.
#[test]
fn the_loss_falls_with_a_scale_and_not_without() -> Result<()> {
    let losses = |scale| -> Result<Vec<f64>> {
        let mut trainer = alone(DType::F16, LossScale::Constant(scale))?;
        (0..40).map(|_| Ok(trainer.step(&Chain)?.loss)).collect()
    };
    let (scaled, lost) = (losses(1024.0)?, losses(0.5_f64.powi(24))?);
    assert!(scaled[39] < 0.7 * scaled[0], "{scaled:?}");
    assert!(lost[39] > 0.9 * lost[0], "{lost:?}");
    Ok(())
}

/// The share of zeros among the f16 gradients of a first step, with a loss multiplied by `scale`.
fn zeros(scale: f64) -> Result<f64> {
    let precision =
        PrecisionConfig { loss_scale: LossScale::Constant(scale), ..PrecisionConfig::default() };
    let mut trainer = trainer(DType::F16, &Mesh::single(), precision, GradDType::Weight)?;
    trainer.step(&Chain)?;
    let (mut zeros, mut all) = (0, 0);
    for group in trainer.buffers().groups() {
        let gradients = group.gradients.lock().unwrap();
        for range in 0..gradients.len() {
            // A token that no sample has gets no gradient, whatever the scale.
            if gradients.name(range)? != "embedding.weight" {
                let values = gradients.tensor(range)?.to_f64()?;
                zeros += values.iter().filter(|&&value| value == 0.0).count();
                all += values.len();
            }
        }
    }
    Ok(zeros as f64 / all as f64)
}

#[test]
fn gradients_below_the_range_of_f16_are_saved_by_scaling_the_loss() -> Result<()> {
    let found: Vec<f64> =
        [1.0 / 4096.0, 1.0, 4096.0].into_iter().map(zeros).collect::<Result<_>>()?;
    println!("zeros among the gradients with scales 2^-12, 1, 2^12: {found:?}");
    assert!(found[0] > 10.0 * found[1].max(found[2]), "{found:?}");
    assert!(found[2] <= found[1], "{found:?}");
    Ok(())
}
