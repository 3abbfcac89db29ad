//! A step as a CUDA graph is the step as it is, to the last bit.

use super::loss_scale::{MOVING, half};
use super::numbers::numbers;
use super::waits::trainer;
use super::*;
use ferrotron_autograd::{ActivationCompressionConfig, ZeroEncoding};
use ferrotron_models::bert::{Bert, BertConfig, NormPlacement};
use ferrotron_models::checkpoint::Checkpoint;
use ferrotron_models::data::{PairBatch, TokenSource, Validation};
use ferrotron_models::generate::{Sampling, generate};
use ferrotron_models::gpt::{Gpt, Recompute, SavedActivations};
use ferrotron_models::stop::StopFlag;
use ferrotron_models::trainer::ExecutionMode;
use ferrotron_nn::{AdafactorConfig, OptimizerConfig, Rounding};
use ferrotron_tensor::MemoryKind;
use std::ops::ControlFlow::Continue;

/// Samples; from number `since` on, some of their positions do not count.
pub struct Masked {
    pub since: u64,
}

impl Samples for Masked {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let mut batch = Noise.tokens(first_sample, micro_batch);
        if first_sample >= self.since {
            batch.targets[3] = -1;
        }
        batch.try_into()
    }

    fn seq_length(&self) -> usize {
        LENGTH
    }
}

fn graph(config: &mut TrainerConfig) {
    config.execution = ExecutionMode::CudaGraph;
}

/// Losses and norms of steps, which may be read every now and then.
fn found(trainer: &mut Trainer<Gpt>, samples: &dyn Samples) -> Result<Vec<(u64, f64, f64)>> {
    let reports = trainer.drain_reports(samples)?;
    // The norm of a step that overflows is no number, which equals nothing.
    let norm = |norm: f64| if norm.is_finite() { norm } else { -1.0 };
    Ok(reports.iter().map(|report| (report.step, report.loss, norm(report.grad_norm))).collect())
}

#[test]
fn a_graph_trains_as_its_steps_do() -> Result<()> {
    let Some(gpu) = ferrotron_cuda_sim::gpu("a_graph_trains_as_its_steps_do") else {
        return Ok(());
    };
    let [gpt2, llama, bf16] = Case::all();
    let adamw = |_: &mut TrainerConfig| {};
    let recomputing = |config: &mut TrainerConfig| config.parallel.recompute = Recompute::FULL;
    let adafactor = |config: &mut TrainerConfig| {
        config.optimizer = OptimizerConfig::Adafactor(AdafactorConfig::default());
        config.precision.rounding = Rounding::Stochastic { seed: 5 };
    };
    let half = half();
    let scaled = |config: &mut TrainerConfig| config.precision.loss_scale = MOVING;
    type Change<'a> = &'a dyn Fn(&mut TrainerConfig);
    let cases: [(&Case, Change); 5] = [
        (&bf16, &adamw),
        (&llama, &adamw),
        (&bf16, &adafactor),
        (&gpt2, &recomputing),
        (&half, &scaled),
    ];
    for (index, (case, change)) in cases.into_iter().enumerate() {
        let what = format!("{}, case {index}", case.name);
        let device = Device::cuda(&gpu)?;
        let mut plain = trainer(case, &device, change)?;
        let mut graphed = trainer(case, &device, |config| {
            change(config);
            graph(config);
        })?;
        for step in 0..6 {
            plain.step_async(&Noise)?;
            let blocks = device.memory().n_alloc;
            graphed.step_async(&Noise)?;
            // From the fourth on they are replays, which make no tensors.
            assert_eq!(device.memory().n_alloc == blocks, step >= 3, "{what}, step {step}");
            // In between, what is computed takes memory where it likes.
            if step % 2 == 1 {
                let (want, got) = (found(&mut plain, &Noise)?, found(&mut graphed, &Noise)?);
                assert_eq!(got, want, "{what}");
                assert!(numbers(&graphed)? == numbers(&plain)?, "{what}: other weights");
            }
        }
        assert_eq!(graphed.optimizer().steps(), plain.optimizer().steps(), "{what}");
    }
    Ok(())
}

/// Random pairs of sentences, in which every fourth token is to be predicted.
struct Pairs;

impl Samples for Pairs {
    fn batch(&self, first_sample: u64, samples: usize) -> Result<Batch> {
        let (key, dims) = (RandomKey::new(5, 0, "pairs"), [samples, LENGTH]);
        let numbers = first_sample * LENGTH as u64..(first_sample + samples as u64) * LENGTH as u64;
        let token = |i: u64, what: u64| (key.uniform(2 * i + what) * VOCAB as f64) as u32;
        let target = |i: u64| if i % 4 == 1 { i64::from(token(i, 1)) } else { -100 };
        let segment = |i: u64| u32::from(i % LENGTH as u64 >= 5);
        let tokens = numbers.clone().map(|i| token(i, 0)).collect();
        let labels = (first_sample..).take(samples).map(|sample| (sample / 2 % 2) as i64).collect();
        Batch::new(first_sample, samples, LENGTH)
            .with_positions(PairBatch::TOKENS, tokens, &dims)?
            .with_positions(PairBatch::SEGMENTS, numbers.clone().map(segment).collect(), &dims)?
            .with_positions(PairBatch::TARGETS, numbers.map(target).collect(), &dims)?
            .with(PairBatch::ORDER, labels, &[samples])
    }

    fn seq_length(&self) -> usize {
        LENGTH
    }
}

/// A BERT has two loss terms, whose sums each step reports.
#[test]
fn a_graph_reports_every_loss_term() -> Result<()> {
    let Some(gpu) = ferrotron_cuda_sim::gpu("a_graph_reports_every_loss_term") else {
        return Ok(());
    };
    let model = BertConfig {
        hidden_dropout: 0.1,
        ..BertConfig::new(NormPlacement::Pre, VOCAB, 2, 32, 4, LENGTH)
    };
    let run = |execution: ExecutionMode| -> Result<_> {
        let scope = Scope::new(&Device::cuda(&gpu)?, DType::F32, 1234);
        let config = TrainerConfig { execution, ..some_config()? };
        let mut trainer = Trainer::<Bert>::new(&scope, &model, config)?;
        let mut found = Vec::new();
        for step in 0..8 {
            trainer.step_async(&Pairs)?;
            // Several replays are read together.
            if step == 0 || step == 3 || step == 7 {
                let reports = trainer.drain_reports(&Pairs)?;
                found.extend(reports.into_iter().map(|report| (report.loss, report.losses)));
            }
        }
        Ok((found, numbers(&trainer)?))
    };
    let (want, weights) = run(ExecutionMode::Eager)?;
    let (got, graphed) = run(ExecutionMode::CudaGraph)?;
    assert_eq!(got, want);
    assert!(graphed == weights, "other weights");
    assert!(got.iter().all(|(_, terms)| terms.len() == 2));
    assert!(got.windows(2).all(|two| two[0].1[0] != two[1].1[0] && two[0].1[1] != two[1].1[1]));
    Ok(())
}

/// Evaluations, samples and checkpoints come between replays; other steps are captured anew.
#[test]
fn other_work_comes_between_replays() -> Result<()> {
    let Some(gpu) = ferrotron_cuda_sim::gpu("other_work_comes_between_replays") else {
        return Ok(());
    };
    let [case, ..] = Case::all();
    // Four steps of 4 samples, then those with fewer valid tokens.
    let samples = Masked { since: 16 };
    let run = |execution: ExecutionMode| -> Result<_> {
        let device = Device::cuda(&gpu)?;
        let configured = |config: &mut TrainerConfig| config.execution = execution;
        let mut trainer = trainer(&case, &device, configured)?;
        let folder = tempfile::tempdir().unwrap();
        let tokens = (0..400_u32).map(|i| i * 7 % VOCAB as u32).collect();
        let validation = Validation::new(TokenSource::from_tokens(tokens, VOCAB)?, LENGTH)?;
        let mut all = Vec::new();
        for step in 0..12 {
            trainer.step_async(&samples)?;
            if step == 3 || step == 6 {
                let found = trainer.evaluate(&validation, &StopFlag::default())?;
                let loss = found.expect("nobody asks to stop").loss;
                let text =
                    generate(&trainer.parts()[0], &[1, 2], 4, &Sampling::GREEDY, |_| Continue(()))?;
                all.push((0, loss, text.iter().map(|&token| f64::from(token)).sum()));
            }
            if step == 7 {
                let told = trainer.local_shards().err().expect("a step may be lost").to_string();
                assert!(told.contains("ask for the reports first"), "{told}");
                all.extend(found(&mut trainer, &samples)?);
                let saved = trainer.save(folder.path(), None, serde_json::Value::Null)?;
                trainer.step_async(&samples)?;
                trainer.drain_reports(&samples)?;
                trainer.load(&Checkpoint::open(&saved)?)?;
            }
        }
        all.extend(found(&mut trainer, &samples)?);
        Ok((all, numbers(&trainer)?))
    };
    let (want, got) = (run(ExecutionMode::Eager)?, run(ExecutionMode::CudaGraph)?);
    assert_eq!(got.0, want.0);
    assert!(got.1 == want.1, "other weights");
    assert_eq!(got.0.len(), 14);
    Ok(())
}

/// A replayed step asks nothing of the host but its tokens and numbers.
#[test]
fn a_replayed_step_is_one_launch() -> Result<()> {
    let test = "a_replayed_step_is_one_launch";
    let Some(gpu) = ferrotron_cuda_sim::stand_in(test) else { return Ok(()) };
    let [case, ..] = Case::all();
    let device = Device::cuda(&gpu)?;
    let mut trainer = trainer(&case, &device, graph)?;
    (0..4).try_for_each(|_| trainer.step_async(&Noise))?;
    let launches = || device.gpu().map_or(0, |gpu| gpu.launches() + gpu.product_launches());
    let (before, blocks) = (ferrotron_cuda_sim::waits(), device.memory().n_alloc);
    let launched = launches();
    (0..3).try_for_each(|_| trainer.step_async(&Noise))?;
    assert_eq!(ferrotron_cuda_sim::waits(), before);
    assert_eq!(device.memory().n_alloc, blocks, "tensors were made");
    // The optimizer's numbers, and the step of random numbers.
    assert_eq!(launches() - launched, 3 * 2, "kernels beside the graph");
    // The host is four replays ahead at most.
    trainer.step_async(&Noise)?;
    assert_eq!(ferrotron_cuda_sim::waits(), (before.0 + 1, before.1));
    assert_eq!(trainer.drain_reports(&Noise)?.len(), 8);
    Ok(())
}

#[test]
fn what_cannot_be_captured_is_refused() -> Result<()> {
    let Some(gpu) = ferrotron_cuda_sim::gpu("what_cannot_be_captured_is_refused") else {
        return Ok(());
    };
    let [case, ..] = Case::all();
    let refused = |device: &Device, change: &dyn Fn(&mut TrainerConfig)| {
        let made = trainer(&case, device, |config| {
            graph(config);
            change(config);
        });
        made.err().expect("it is refused").to_string()
    };
    let device = Device::cuda(&gpu)?;
    for (part, told) in [
        ("add --device cuda", refused(&Device::cpu(1)?, &|_| {})),
        (
            "offloading",
            refused(&device, &|config| config.parallel.optimizer_states = MemoryKind::Host),
        ),
        (
            "sparse",
            refused(&device, &|config| {
                let packing = ActivationCompressionConfig {
                    zeros: ZeroEncoding::Bitmap,
                    ..ActivationCompressionConfig::default()
                };
                config.parallel.saved_activations =
                    SavedActivations { packing, ..SavedActivations::default() };
            }),
        ),
    ] {
        assert!(told.starts_with("enable-cuda-graph: ") && told.contains(part), "{told}");
        assert_eq!(told.lines().count(), 1, "{told}");
    }
    let config = TrainerConfig { execution: ExecutionMode::CudaGraph, ..some_config()? };
    let told = config.check_execution(2).unwrap_err().to_string();
    assert!(told.contains("pipeline of 2 stages"), "{told}");
    let data_parallel =
        DataParallelConfig { synchronize_every: 4, ..DataParallelConfig::default() };
    let parallel = ParallelConfig { data_parallel, ..config.parallel };
    let told = TrainerConfig { parallel, ..config }.check_execution(1).unwrap_err().to_string();
    assert!(told.contains("--local-sgd-steps"), "{told}");
    Ok(())
}

fn some_config() -> Result<TrainerConfig> {
    let batch_size = BatchSize::new(BatchSizeConfig::default())?;
    Ok(TrainerConfig::new(7, LrSchedule::constant(1e-2)?, batch_size))
}

/// A lost step is found behind replays too, and named by the step alone.
#[test]
fn a_graph_stops_where_a_step_is_lost() -> Result<()> {
    let Some(gpu) = ferrotron_cuda_sim::gpu("a_graph_stops_where_a_step_is_lost") else {
        return Ok(());
    };
    let [case, ..] = Case::all();
    let mut trainer = trainer(&case, &Device::cuda(&gpu)?, graph)?;
    (0..4).try_for_each(|_| trainer.step_async(&Noise))?;
    let norm = trainer.buffers().params().find(|param| param.name() == "norm_f.weight");
    let leaf = norm.expect("the last norm").leaf().clone();
    let fine = leaf.value()?.copy()?;
    leaf.set_value(&fine.mul_scalar(3e38)?)?; // so that logits are infinite
    let before = numbers(&trainer)?;
    (0..3).try_for_each(|_| trainer.step_async(&Noise))?;
    let told = trainer.drain_reports(&Noise).unwrap_err().to_string();
    assert!(
        told.contains("step 5: loss ") && told.contains("first offender: the gradient of"),
        "{told}"
    );
    assert!(numbers(&trainer)? == before, "something has changed");
    assert_eq!((trainer.progress().step, trainer.optimizer().steps()), (4, 4));
    leaf.set_value(&fine)?;
    assert_eq!(trainer.step(&Noise)?.step, 5);
    Ok(())
}
