//! A model that the crate does not know trains, resumes and is evaluated in every layout with the same loss. It has
//! blocks on several stages and two loss terms; each block adds to one.

mod bad_steps;
mod freezing;
mod outputs;
mod unknown_entries;

use ferrotron_autograd::Var;
use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron_models::checkpoint::Checkpoint;
use ferrotron_models::data::{Batch, FiniteSamples, Samples};
use ferrotron_models::memory::{DocumentResets, MemoryEstimator, PlannedDevice};
use ferrotron_models::stop::StopFlag;
use ferrotron_models::trainer::{
    LossTerm, Microbatch, Model, ModelChunk, ParallelConfig, StageOutput, Trainer, TrainerConfig,
};
use ferrotron_nn::schedule::LrSchedule;
use ferrotron_nn::{Bias, Init, Linear, Module, Param, ParamPatterns, Scope, Sharding};
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::data_parallel::DataParallelConfig;
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, RandomKey, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

const SAMPLES: usize = 8;
const STEPS: usize = 4;

/// Layers of tanh with a penalty on each, fitted to the squares of the errors of one output.
struct Mlp {
    layers: Vec<Linear>,
    head: Option<Linear>,
    width: usize,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct MlpConfig {
    width: usize,
    layers: usize,
    penalty: f64,
}

const CONFIG: MlpConfig = MlpConfig { width: 6, layers: 4, penalty: 0.1 };

impl Module for Mlp {
    fn visit(&self, f: &mut dyn FnMut(&Param)) {
        self.layers.iter().chain(&self.head).for_each(|layer| layer.visit(f));
    }
}

impl Model for Mlp {
    const ARCHITECTURE: &str = "mlp";
    const TRAINING_FIELDS: &[&str] = &["penalty"];
    type Config = MlpConfig;

    fn new_chunk(scope: &Scope, _: &Mesh, config: &MlpConfig, chunk: &ModelChunk) -> Result<Mlp> {
        let (width, init) = (config.width, Init::Normal { std: 0.5 });
        let layer = |i: usize| {
            Linear::new(&scope.child(&format!("layers.{i}")), width, width, Bias::Yes, init)
        };
        let head = || Linear::new(&scope.child("head"), width, 1, Bias::No, init);
        Ok(Mlp {
            layers: chunk.blocks.clone().map(layer).collect::<Result<_>>()?,
            head: chunk.last.then(head).transpose()?,
            width,
        })
    }

    fn num_blocks(config: &MlpConfig) -> usize {
        config.layers
    }

    fn loss_terms(config: &MlpConfig, batch: &Batch) -> Result<Vec<LossTerm>> {
        let samples = batch.micro_batch as f64;
        let activations = samples * (config.layers * config.width) as f64;
        let penalty = LossTerm::mean("penalty", activations).weighted(config.penalty);
        Ok(vec![LossTerm::mean("squares", samples), penalty])
    }

    fn activation_dims(&self, microbatch: &Microbatch) -> Vec<usize> {
        vec![microbatch.samples(), self.width]
    }

    fn forward(&self, microbatch: &Microbatch, input: Option<Var>) -> Result<StageOutput> {
        let mut x = match input {
            Some(x) => x,
            None => Var::constant(microbatch.get_as("x", DType::F64)?), // (B, width)
        };
        let mut penalty: Option<Var> = None;
        for layer in &self.layers {
            x = layer.forward(&x)?.tanh()?;
            let squares = x.square()?.sum_all()?;
            penalty = Some(match penalty {
                Some(penalty) => penalty.add(&squares)?,
                None => squares,
            });
        }
        let output = match &self.head {
            Some(head) => {
                let y = Var::constant(microbatch.get_as("y", DType::F64)?); // (B, 1)
                let error = head.forward(&x)?.sub(&y)?;
                StageOutput::loss("squares", error.square()?.sum_all()?)
            }
            None => StageOutput::activation(x),
        };
        Ok(output.with_loss("penalty", penalty.expect("every chunk has a layer")))
    }

    fn example_batch(config: &MlpConfig, samples: usize, _: usize) -> Result<Batch> {
        Points { width: config.width, count: 0 }.batch(0, samples)
    }
}

struct Points {
    width: usize,
    count: u64,
}

impl Samples for Points {
    fn batch(&self, first_sample: u64, samples: usize) -> Result<Batch> {
        let key = RandomKey::new(5, 0, "points");
        let first = first_sample * self.width as u64;
        let x = (0..(samples * self.width) as u64).map(|i| key.uniform(first + i) as f32);
        let x: Vec<f32> = x.collect();
        let y = x.chunks(self.width).map(|x| x.iter().sum::<f32>().sin()).collect();
        let batch = Batch::new(first_sample, samples, 1);
        batch.with("x", x, &[samples, self.width])?.with("y", y, &[samples, 1])
    }

    fn seq_length(&self) -> usize {
        1
    }
}

impl FiniteSamples for Points {
    fn len(&self) -> u64 {
        self.count
    }
}

const POINTS: Points = Points { width: CONFIG.width, count: SAMPLES as u64 };

#[derive(Debug, Clone, Copy)]
struct Layout {
    data: usize,
    pipeline: usize,
    chunks: usize,
    micro_batch: usize,
    sharding: Sharding,
    frozen: &'static [&'static str],
}

const ALONE: Layout = Layout {
    data: 1,
    pipeline: 1,
    chunks: 1,
    micro_batch: SAMPLES,
    sharding: Sharding::None,
    frozen: &[],
};

impl Layout {
    fn config(&self) -> Result<TrainerConfig> {
        let sizes = BatchSize::new(BatchSizeConfig {
            micro_batch_size: self.micro_batch,
            data_parallel_size: self.data,
            global_batch_size: Some(SAMPLES),
            ..BatchSizeConfig::default()
        })?;
        let parallel = ParallelConfig {
            chunks: self.chunks,
            pipeline_schedule: match self.chunks {
                1 => ScheduleKind::OneFOneB,
                _ => ScheduleKind::Interleaved,
            },
            data_parallel: DataParallelConfig {
                sharding: self.sharding,
                ..DataParallelConfig::default()
            },
            ..ParallelConfig::default()
        };
        let frozen = ParamPatterns::new(self.frozen.iter().copied())?;
        let config = TrainerConfig::new(7, LrSchedule::constant(0.05)?, sizes);
        Ok(TrainerConfig { parallel, frozen, ..config })
    }

    /// Trains from `load` or from the beginning; returns (loss, squares, penalty, norm) of each step and, last, the
    /// evaluation.
    fn train(&self, load: Option<&Path>, steps: usize, save: Option<&Path>) -> Vec<[f64; 4]> {
        let world = self.data * self.pipeline;
        let dims = ParallelDims::new(world, 1, 1, self.pipeline).unwrap();
        let ranks = run_threads(world, &WorldConfig::default(), |world| {
            let mesh = Mesh::new(&world, dims, SequenceParallel::Off)?;
            let scope = Scope::new(&Device::cpu(1)?, DType::F64, 7);
            let mut trainer = Trainer::<Mlp>::on_mesh(&scope, &mesh, &CONFIG, self.config()?)?;
            if let Some(folder) = load {
                trainer.load(&Checkpoint::peek(folder)?)?;
            }
            let before = frozen_values(&trainer)?;
            let mut found = Vec::new();
            for _ in 0..steps {
                let report = trainer.step(&POINTS)?;
                let names: Vec<&str> = report.losses.iter().map(|(name, _)| *name).collect();
                assert_eq!(names, ["squares", "penalty"]);
                let [squares, penalty] = [report.losses[0].1, report.losses[1].1];
                assert!((squares + 0.1 * penalty - report.loss).abs() < 1e-14);
                found.push([report.loss, squares, penalty, report.grad_norm]);
            }
            let evaluation = trainer.evaluate(&POINTS, &StopFlag::default())?.expect("not stopped");
            let [squares, penalty] = [evaluation.losses[0].1, evaluation.losses[1].1];
            found.push([evaluation.loss, squares, penalty, evaluation.tokens as f64]);
            assert_eq!(frozen_values(&trainer)?, before);
            if let Some(folder) = save {
                trainer.save(folder, None, serde_json::Value::Null)?;
            }
            Ok(found)
        });
        let ranks: Vec<_> = ranks.into_iter().collect::<Result<_>>().unwrap();
        assert!(ranks.iter().all(|found| *found == ranks[0]), "{self:?}");
        ranks[0].clone()
    }
}

fn frozen_values(trainer: &Trainer<Mlp>) -> Result<Vec<Vec<f64>>> {
    trainer.buffers().frozen().iter().map(|param| param.leaf().value()?.to_f64()).collect()
}

fn close(got: &[[f64; 4]], want: &[[f64; 4]], what: &dyn std::fmt::Debug) {
    assert_eq!(got.len(), want.len());
    for (step, (got, want)) in got.iter().zip(want).enumerate() {
        for (got, want) in got.iter().zip(want) {
            assert!(
                (got - want).abs() <= 1e-12 * want.abs(),
                "{what:?}, step {step}: {got} {want}"
            );
        }
    }
}

const LAYOUTS: [Layout; 5] = [
    Layout { micro_batch: 2, ..ALONE },
    Layout { data: 2, micro_batch: 2, sharding: Sharding::Optimizer, ..ALONE },
    Layout { data: 2, micro_batch: 4, sharding: Sharding::Weights, ..ALONE },
    Layout { pipeline: 2, chunks: 2, micro_batch: 2, ..ALONE },
    Layout { data: 2, pipeline: 2, micro_batch: 2, ..ALONE },
];

#[test]
fn every_layout_trains_as_one_rank() {
    let want = ALONE.train(None, STEPS, None);
    assert!(want[STEPS - 1][0] < want[0][0], "{want:?}");
    for layout in LAYOUTS {
        close(&layout.train(None, STEPS, None), &want, &layout);
    }
}

#[test]
fn every_layout_resumes_what_another_saved() {
    let folder = tempfile::tempdir().unwrap();
    let want = ALONE.train(None, STEPS, None);
    for (layout, next) in LAYOUTS.iter().zip(LAYOUTS.iter().cycle().skip(2)) {
        let run = folder.path().join(format!("{}-{}", layout.data, layout.pipeline));
        layout.train(None, 2, Some(&run));
        close(&next.train(Some(&run), STEPS - 2, None), &want[2..], &(layout, next));
    }
}

#[test]
fn a_checkpoint_says_what_it_holds() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    ALONE.train(None, 1, Some(folder.path()));
    let checkpoint = Checkpoint::open(folder.path())?;
    assert_eq!(checkpoint.model().architecture, "mlp");
    assert_eq!(Mlp::config_from(&checkpoint)?, CONFIG);
    let error = ferrotron_models::gpt::Gpt::config_from(&checkpoint).unwrap_err().to_string();
    assert!(error.ends_with("it holds a model of architecture 'mlp', not 'gpt'"), "{error}");
    // A penalty is in no weight; a width is.
    Mlp::check_checkpoint(&checkpoint, &MlpConfig { penalty: 0.5, ..CONFIG })?;
    let wider = MlpConfig { width: 7, ..CONFIG };
    let error = Mlp::check_checkpoint(&checkpoint, &wider).unwrap_err().to_string();
    assert!(error.ends_with("width 6 there, 7 here"), "{error}");
    Ok(())
}

#[test]
fn memory_is_the_number_of_a_step() -> Result<()> {
    let mut totals = Vec::new();
    for frozen in [&[][..], &["layers.0", "layers.1"], &["*.bias"]] {
        let config = Layout { frozen, ..ALONE }.config()?;
        let plan = MemoryEstimator::<Mlp> {
            model: CONFIG,
            layout: ParallelDims::single(),
            sequence_parallel: SequenceParallel::Off,
            trainer: config.clone(),
            dtype: DType::F64,
            seq_length: 1,
            documents: DocumentResets::default(),
            device: PlannedDevice::Cpu { threads: 1 },
        };
        let device = Device::cpu(1)?;
        let scope = Scope::new(&device, DType::F64, 7);
        let mut trainer = Trainer::<Mlp>::new(&scope, &CONFIG, config)?;
        trainer.step(&POINTS)?;
        let found = plan.stages()?[0].memory;
        assert_eq!(found.total_bytes, device.memory().peak);
        totals.push((found.gradients_bytes, found.optimizer_bytes));
    }
    // Four layers of 6 x 6 + 6 and a head of 6 elements, in f64.
    let bytes = |elements: usize| (8 * elements, 16 * elements);
    assert_eq!(totals, [bytes(174), bytes(90), bytes(150)]);
    Ok(())
}

/// Names a loss that is none of its terms.
struct Stray(Mlp);

impl Module for Stray {
    fn visit(&self, f: &mut dyn FnMut(&Param)) {
        self.0.visit(f);
    }
}

impl Model for Stray {
    const ARCHITECTURE: &str = "stray";
    type Config = MlpConfig;

    fn new_chunk(
        scope: &Scope,
        mesh: &Mesh,
        config: &MlpConfig,
        chunk: &ModelChunk,
    ) -> Result<Stray> {
        Mlp::new_chunk(scope, mesh, config, chunk).map(Stray)
    }

    fn loss_terms(_: &MlpConfig, _: &Batch) -> Result<Vec<LossTerm>> {
        Ok(vec![LossTerm::mean("squares", 1.0)])
    }

    fn forward(&self, microbatch: &Microbatch, input: Option<Var>) -> Result<StageOutput> {
        self.0.forward(microbatch, input)
    }
}

#[test]
fn what_a_model_cannot_do_is_one_line() -> Result<()> {
    let scope = Scope::new(&Device::cpu(1)?, DType::F64, 7);
    let mut stray = Trainer::<Stray>::new(&scope, &CONFIG, ALONE.config()?)?;
    let error = stray.step(&POINTS).unwrap_err().to_string();
    assert_eq!(error, "loss: 'penalty' is none of squares");
    let mut config = ALONE.config()?;
    config.parallel.recompute = ferrotron_models::gpt::Recompute::Full {
        method: ferrotron_models::gpt::RecomputeMethod::Uniform,
        layers: 1,
        inputs: ferrotron_models::gpt::RegionInputs::Whole,
    };
    let error = Trainer::<Mlp>::new(&scope, &CONFIG, config).err().expect("an error").to_string();
    assert_eq!(error, "model: mlp does not support recompute");
    Ok(())
}
