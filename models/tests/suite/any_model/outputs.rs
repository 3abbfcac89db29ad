//! Models whose chunks return what the trainer cannot train by: errors, where a step would train something else.

use ferrotron_autograd::Var;
use ferrotron_models::data::{Batch, GeneratedSamples, Samples};
use ferrotron_models::stop::StopFlag;
use ferrotron_models::trainer::{LossTerm, Microbatch, Model, ModelChunk, StageOutput, Trainer};
use ferrotron_nn::{Module, Param, Scope};
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, Result};
use serde::{Deserialize, Serialize};

use super::{ALONE, CONFIG, Layout, Mlp, POINTS};

/// A mistake in a model.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
enum Mistake {
    /// The last chunk returns its activation beside the losses.
    ActivationBehindTheLast,
    /// The last chunk returns its activation alone.
    NoLoss,
    /// The activation between chunks is transposed.
    Transposed,
    /// The activation between chunks has another dtype.
    Cast,
    /// A loss is not summed.
    NoSum,
    /// A loss is left out.
    LeftOut,
    /// A term has the numbers of elements and weights of this table, by its number.
    Term(usize),
    /// There are so many terms, and none has elements.
    Empty(usize),
    /// The first term has no elements, and a sum.
    Uncounted,
}

/// Weight and number of elements of terms that are none.
const TERMS: [(f64, f64); 4] = [(f64::NAN, 1.0), (1.0, f64::NAN), (1.0, -1.0), (0.0, 1.0)];

struct Wrong(Mlp, Mistake);

impl Module for Wrong {
    fn visit(&self, f: &mut dyn FnMut(&Param)) {
        self.0.visit(f);
    }
}

impl Model for Wrong {
    const ARCHITECTURE: &str = "wrong";
    type Config = Mistake;

    fn new_chunk(scope: &Scope, mesh: &Mesh, config: &Mistake, chunk: &ModelChunk) -> Result<Self> {
        Ok(Wrong(Mlp::new_chunk(scope, mesh, &CONFIG, chunk)?, *config))
    }

    fn num_blocks(_: &Mistake) -> usize {
        CONFIG.layers
    }

    fn loss_terms(config: &Mistake, batch: &Batch) -> Result<Vec<LossTerm>> {
        match *config {
            Mistake::Term(number) => {
                let (weight, count) = TERMS[number];
                Ok(vec![LossTerm { name: "squares", weight, count }])
            }
            Mistake::Empty(terms) => {
                let all = Mlp::loss_terms(&CONFIG, batch)?.into_iter().take(terms);
                Ok(all.map(|term| LossTerm { count: 0.0, ..term }).collect())
            }
            Mistake::Uncounted => {
                let mut terms = Mlp::loss_terms(&CONFIG, batch)?;
                terms[0].count = 0.0;
                Ok(terms)
            }
            _ => Mlp::loss_terms(&CONFIG, batch),
        }
    }

    fn activation_dims(&self, microbatch: &Microbatch) -> Vec<usize> {
        self.0.activation_dims(microbatch)
    }

    fn forward(&self, microbatch: &Microbatch, input: Option<Var>) -> Result<StageOutput> {
        let Wrong(mlp, mistake) = self;
        let mut output = mlp.forward(microbatch, input)?;
        match mistake {
            Mistake::ActivationBehindTheLast | Mistake::NoLoss => {
                output.activation = Some(Var::constant(microbatch.get_as("x", DType::F64)?));
                if *mistake == Mistake::NoLoss {
                    output.losses.clear();
                }
            }
            Mistake::Transposed => {
                let turned = output.activation.map(|x| x.transpose(0, 1)).transpose()?;
                output.activation = turned;
            }
            Mistake::Cast => {
                let narrow = output.activation.map(|x| x.cast(DType::F32)).transpose()?;
                output.activation = narrow;
            }
            Mistake::NoSum => output.losses[0].1 = output.losses[0].1.reshape(&[1])?,
            Mistake::LeftOut => output.losses.retain(|(name, _)| *name != "penalty"),
            Mistake::Empty(1) => output.losses.retain(|(name, _)| *name == "squares"),
            Mistake::Term(_) | Mistake::Empty(_) | Mistake::Uncounted => {}
        }
        Ok(output)
    }
}

const LEFT_OUT: &str = "loss: `Model::loss_terms` names 'penalty', and `Model::forward` did not return it on any rank: add \
                        it by `StageOutput::loss` or `with_loss`";

/// The errors of the ranks of a step.
fn errors(mistake: Mistake, layout: &Layout) -> Result<Vec<String>> {
    let world = layout.pipeline;
    let dims = ParallelDims::new(world, 1, 1, world)?;
    let ranks = run_threads(world, &WorldConfig::default(), |world| {
        let mesh = Mesh::new(&world, dims, SequenceParallel::Off)?;
        let scope = Scope::new(&Device::cpu(1)?, DType::F64, 7);
        let mut trainer = Trainer::<Wrong>::on_mesh(&scope, &mesh, &mistake, layout.config()?)?;
        let before: Vec<Vec<f64>> = values(&trainer)?;
        let step = trainer.step(&POINTS);
        assert_eq!(values(&trainer)?, before);
        step
    });
    Ok(ranks.into_iter().map(|rank| rank.expect_err("a refusal").to_string()).collect())
}

fn values(trainer: &Trainer<Wrong>) -> Result<Vec<Vec<f64>>> {
    trainer.buffers().params().map(|param| param.leaf().value()?.to_f64()).collect()
}

#[test]
fn a_step_of_a_chunk_that_returns_something_else_is_refused() -> Result<()> {
    let last = "the last chunk must return a loss of one element and no activation, got f64 [8, 6]";
    let activation = "the next stage receives an activation f64 [2, 6], as the model says, and the chunk returned";
    let term = "has the weight";
    let stages = Layout { pipeline: 2, micro_batch: 2, ..ALONE };
    for (mistake, layout, want) in [
        (Mistake::ActivationBehindTheLast, ALONE, last.to_string()),
        (Mistake::NoLoss, ALONE, last.to_string()),
        (Mistake::Transposed, stages, format!("{activation} f64 [6, 2]")),
        (Mistake::Cast, stages, format!("{activation} f32 [2, 6]")),
        (Mistake::NoSum, ALONE, "'squares' must be a sum, a scalar, got [1]".into()),
        (Mistake::LeftOut, ALONE, LEFT_OUT.into()),
        (Mistake::Term(0), ALONE, format!("{term} NaN")),
        (Mistake::Term(1), ALONE, format!("{term} 1 and NaN elements")),
        (Mistake::Term(2), ALONE, format!("{term} 1 and -1 elements")),
        (
            Mistake::Term(3),
            ALONE,
            "loss: the only term 'squares' has the weight 0: nothing would be trained".into(),
        ),
    ] {
        let errors = errors(mistake, &layout)?;
        assert!(errors.iter().any(|error| error.contains(&want)), "{mistake:?}: {errors:?}");
    }
    Ok(())
}

/// A rank cannot tell by itself: another sample or a later stage may have the term.
#[test]
fn a_term_that_no_rank_returns_ends_all_ranks_with_one_line() -> Result<()> {
    let layout = Layout { data: 2, pipeline: 2, micro_batch: 2, ..ALONE };
    let dims = ParallelDims::new(4, 1, 1, 2)?;
    for evaluates in [false, true] {
        let ranks = run_threads(4, &WorldConfig::default(), |world| {
            let mesh = Mesh::new(&world, dims, SequenceParallel::Off)?;
            let scope = Scope::new(&Device::cpu(1)?, DType::F64, 7);
            let config = layout.config()?;
            let mut trainer = Trainer::<Wrong>::on_mesh(&scope, &mesh, &Mistake::LeftOut, config)?;
            let found = match evaluates {
                true => trainer.evaluate(&POINTS, &StopFlag::default()).map(drop),
                false => trainer.step(&POINTS).map(drop),
            };
            Ok(found.expect_err("a refusal").to_string())
        });
        for rank in ranks {
            assert_eq!(rank?, LEFT_OUT, "evaluates {evaluates}");
        }
    }
    Ok(())
}

const NONE: &str = "0 elements over all samples and ranks";

/// Nothing divided by nothing would be reported as NaN, and a sum that nobody divides would not be trained.
#[test]
fn terms_without_elements_are_named_on_every_rank() -> Result<()> {
    let empty = |names: &str| {
        format!("`Model::loss_terms` gives '{names}' {NONE}: give samples that count")
    };
    let uncounted = format!(
        "`Model::loss_terms` gives 'squares' {NONE}, and `Model::forward` returned a sum of"
    );
    for (mistake, want) in [
        (Mistake::Empty(1), empty("squares")),
        (Mistake::Empty(2), empty("squares', 'penalty")),
        (Mistake::Uncounted, uncounted),
    ] {
        for (data, pipeline) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
            // The last stage has the only term.
            if mistake == Mistake::Empty(1) && pipeline > 1 {
                continue;
            }
            let layout = Layout { data, pipeline, micro_batch: 2, ..ALONE };
            let ranks = data * pipeline;
            let dims = ParallelDims::new(ranks, 1, 1, pipeline)?;
            let ranks = run_threads(ranks, &WorldConfig::default(), |world| {
                let mesh = Mesh::new(&world, dims, SequenceParallel::Off)?;
                let scope = Scope::new(&Device::cpu(1)?, DType::F64, 7);
                let config = layout.config()?;
                let mut trainer = Trainer::<Wrong>::on_mesh(&scope, &mesh, &mistake, config)?;
                let before = values(&trainer)?;
                let evaluated = trainer.evaluate(&POINTS, &StopFlag::default());
                let step = trainer.step(&POINTS).unwrap_err().to_string();
                assert_eq!(values(&trainer)?, before);
                Ok([evaluated.unwrap_err().to_string(), step])
            });
            let ranks = ranks.into_iter().collect::<Result<Vec<_>>>()?;
            for errors in &ranks {
                assert_eq!(errors, &ranks[0], "{layout:?}");
                assert!(errors.iter().all(|error| error.contains(&want)), "{errors:?}");
            }
        }
    }
    Ok(())
}

/// Ranks would take the samples of others again.
#[test]
fn batch_sizes_of_another_layout_are_refused() -> Result<()> {
    let dims = ParallelDims::new(2, 1, 1, 1)?;
    let ranks = run_threads(2, &WorldConfig::default(), |world| {
        let mesh = Mesh::new(&world, dims, SequenceParallel::Off)?;
        let scope = Scope::new(&Device::cpu(1)?, DType::F64, 7);
        let trainer = Trainer::<Mlp>::on_mesh(&scope, &mesh, &CONFIG, ALONE.config()?);
        // A rank that fails would stop the other one, which may be making its groups still.
        Ok(trainer.map(drop).unwrap_err().to_string())
    });
    let want = "batch size: it is for a data-parallel size of 1, and the mesh has 2 ranks along the data axis: set \
                `data_parallel_size` of BatchSizeConfig";
    for rank in ranks {
        assert_eq!(rank?, want);
    }
    Ok(())
}

/// Fewer samples, those of another number, and positions that the context does not have.
#[test]
fn samples_that_are_not_those_asked_for_are_refused() -> Result<()> {
    let scope = Scope::new(&Device::cpu(1)?, DType::F64, 7);
    let mut trainer = Trainer::<Mlp>::new(&scope, &CONFIG, ALONE.config()?)?;
    trainer.step(&POINTS)?;
    for (shift, fewer, length, got) in [
        (0, 1, 1, "7 from 8 on, of 1 positions"),
        (-8, 0, 1, "8 from 0 on, of 1 positions"),
        (0, 0, 2, "8 from 8 on, of 2 positions"),
    ] {
        let samples = GeneratedSamples::new(1, u64::MAX, move |first: u64, count| {
            let mut batch = POINTS.batch(first.saturating_add_signed(shift), count - fewer)?;
            batch.seq_length = length;
            Ok(batch)
        });
        let error = trainer.step(&samples).unwrap_err().to_string();
        let want = format!("samples: asked for 8 from 8 on, of 1 positions each, and got {got}");
        assert_eq!(error, want);
    }
    trainer.step(&POINTS).map(drop)
}
