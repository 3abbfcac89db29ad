//! Evaluations: the same samples and the same loss in every layout, and an end on all ranks together.

use super::layout::{GLOBAL_BATCH, Layout, SEQ_LENGTH, all, covering};
use super::train::{SEED, WEIGHTS, schedule};
use super::{gpt2, llama};
use ferrotron::models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron::models::data::tasks::{ScoreRequest, TokenScore};
use ferrotron::models::data::{TokenSource, Validation};
use ferrotron::models::evaluate::Evaluation;
use ferrotron::models::gpt::{Gpt, GptConfig};
use ferrotron::models::score::{ScoreConfig, score};
use ferrotron::models::stop::StopFlag;
use ferrotron::models::trainer::{Trainer, TrainerConfig};
use ferrotron::nn::Scope;
use ferrotron::parallel::collective::{WorldConfig, run_threads};
use ferrotron::parallel::mesh::Mesh;
use ferrotron::tensor::{DType, Device, RandomKey, Result};
use std::time::Duration;

/// Windows of the validation stream: two global batches, and a third with too few windows for every rank. Its last
/// window is cut short.
const WINDOWS: usize = 2 * GLOBAL_BATCH + 5;

/// Each rank's evaluation over the first `batches` global batches, or all; rank `asked` is asked to stop before.
fn evaluations(
    model: &GptConfig,
    layout: &Layout,
    dtype: DType,
    batches: Option<u64>,
    asked: Option<usize>,
) -> Result<Vec<Option<Evaluation>>> {
    on_ranks(model, layout, dtype, asked, |trainer, stop| {
        let key = RandomKey::new(9, 0, "validation");
        let token = |i| (key.uniform(i) * model.vocab_size as f64) as u32;
        let tokens = (0..(WINDOWS * SEQ_LENGTH - 3) as u64).map(token).collect();
        let source = TokenSource::from_tokens(tokens, model.vocab_size)?;
        let all = Validation::new(source, SEQ_LENGTH)?;
        let validation = match batches {
            Some(batches) => all.first(batches * GLOBAL_BATCH as u64)?,
            None => all,
        };
        trainer.evaluate(&validation, stop)
    })
}

/// The results of a trainer on each rank; rank `asked` is asked to stop before.
fn on_ranks<T: Send>(
    model: &GptConfig,
    layout: &Layout,
    dtype: DType,
    asked: Option<usize>,
    find: impl Fn(&Trainer<Gpt>, &StopFlag) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let config = WorldConfig { timeout: Duration::from_secs(60) };
    let ranks = run_threads(layout.ranks(), &config, |world| {
        let mesh = Mesh::new(&world, layout.mesh(), layout.sequence())?;
        let scope = Scope::new(&Device::cpu(1)?, dtype, WEIGHTS);
        let sizes = BatchSize::new(BatchSizeConfig {
            micro_batch_size: layout.micro,
            data_parallel_size: layout.dp,
            global_batch_size: Some(GLOBAL_BATCH),
            rampup: None,
        })?;
        let config = TrainerConfig {
            parallel: layout.parallel(),
            ..TrainerConfig::new(SEED, schedule()?, sizes)
        };
        let trainer = Trainer::<Gpt>::on_mesh(&scope, &mesh, model, config)?;
        let stop = StopFlag::default();
        if asked == Some(mesh.rank()) {
            stop.set();
        }
        find(&trainer, &stop)
    });
    ranks.into_iter().collect()
}

/// The scores of `count` requests of all lengths, with some scored tokens each, as the ranks of a layout find them.
fn scores(
    model: &GptConfig,
    layout: &Layout,
    count: usize,
    asked: Option<usize>,
) -> Result<Vec<Option<Vec<Vec<TokenScore>>>>> {
    let key = RandomKey::new(10, 0, "requests");
    let request = |index: usize| {
        let length = 2 + index * 7 % SEQ_LENGTH;
        let token = |i| (key.uniform((index * 100 + i) as u64) * model.vocab_size as f64) as u32;
        let tokens = (0..length).map(token).collect();
        ScoreRequest { tokens, first_target: 1 + index % (length - 1), wants_next: false }
    };
    let requests: Vec<ScoreRequest> = (0..count).map(request).collect();
    on_ranks(model, layout, DType::F64, asked, |trainer, stop| {
        let config = ScoreConfig { micro_batch_size: 3, top: 2 };
        score(&trainer.local_model(), &requests, config, stop, |_| ())
    })
}

/// The requests are as many as leave replicas without one, and enough for several rounds. Weights, positions and layers
/// may be shared in any way.
#[test]
fn scores_are_the_same_in_every_layout() {
    for model in [gpt2(), llama()] {
        for count in [1, 40] {
            let want = scores(&model, &Layout::SERIAL, count, None).unwrap().remove(0).unwrap();
            for layout in covering(&all(&model)) {
                let found = scores(&model, &layout, count, None);
                for found in found.unwrap_or_else(|error| panic!("{layout}: {error}")) {
                    let found = found.expect("nobody asks to stop");
                    assert_eq!(found.len(), count);
                    for (got, want) in found.iter().flatten().zip(want.iter().flatten()) {
                        assert_eq!((got.token, got.top[0].0), (want.token, want.top[0].0));
                        let difference = (got.log_prob - want.log_prob).abs();
                        assert!(difference <= 1e-12 * want.log_prob.abs(), "{layout}: {got:?}");
                    }
                }
            }
        }
    }
}

/// The one thing that all ranks find.
fn agreed(model: &GptConfig, layout: &Layout, dtype: DType, batches: Option<u64>) -> Evaluation {
    let found = evaluations(model, layout, dtype, batches, None);
    let found = found.unwrap_or_else(|error| panic!("{layout}: {error}"));
    assert!(found.iter().all(|other| *other == found[0]), "{layout}: {found:?}");
    found[0].clone().expect("nobody asks to stop")
}

#[test]
fn an_evaluation_finds_the_same_in_every_layout() {
    for model in [gpt2(), llama()] {
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-6)] {
            let few = [
                Layout { micro: 1, ..Layout::SERIAL },
                Layout { micro: 4, ..Layout::SERIAL },
                Layout { dp: 3, micro: 1, ..Layout::SERIAL },
                Layout { dp: 3, micro: 4, ..Layout::SERIAL },
                Layout { tp: 2, micro: 4, ..Layout::SERIAL },
                Layout { pp: 2, micro: 1, ..Layout::SERIAL },
                Layout { pp: 2, micro: 4, ..Layout::SERIAL },
            ];
            for batches in [Some(1), Some(2), None] {
                let layouts = match (dtype, batches) {
                    (DType::F64, None) => [&few[..], &covering(&all(&model))].concat(),
                    _ => few.to_vec(),
                };
                let want = agreed(&model, &Layout::SERIAL, dtype, batches);
                let predicted = match batches {
                    Some(batches) => batches as usize * GLOBAL_BATCH * SEQ_LENGTH,
                    None => WINDOWS * SEQ_LENGTH - 4,
                };
                assert_eq!(want.tokens, predicted as u64);
                for layout in &layouts {
                    let got = agreed(&model, layout, dtype, batches);
                    assert_eq!(got.tokens, want.tokens, "{layout}");
                    let difference = (got.loss - want.loss).abs();
                    assert!(difference <= tolerance * want.loss, "{layout}: {got:?}, {want:?}");
                }
            }
        }
    }
}

/// Ranks ask before each batch whether to go on, and nothing else: the sum of the losses stays where it is until the end.
/// With a pipeline a batch is a global one, whose micro-batches follow one another.
#[test]
fn the_loss_of_an_evaluation_is_read_once() {
    let model = gpt2();
    for layout in [
        Layout { pp: 2, micro: 1, ..Layout::SERIAL },
        Layout { tp: 2, dp: 2, micro: 2, ..Layout::SERIAL },
    ] {
        let calls = |batches: u64| {
            let found = on_ranks(&model, &layout, DType::F32, None, |trainer, stop| {
                let tokens = vec![1; WINDOWS * SEQ_LENGTH];
                let source = TokenSource::from_tokens(tokens, model.vocab_size)?;
                let all = Validation::new(source, SEQ_LENGTH)?;
                let world = trainer.mesh().world();
                let before = world.traffic().calls_and_bytes("all_reduce").0;
                trainer.evaluate(&all.first(batches * GLOBAL_BATCH as u64)?, stop)?;
                Ok(world.traffic().calls_and_bytes("all_reduce").0 - before)
            });
            found.unwrap()
        };
        let [one, two] = [1, 2].map(calls);
        let more: Vec<u64> = two.iter().zip(one).map(|(two, one)| two - one).collect();
        let batches = if layout.pp > 1 { 1 } else { GLOBAL_BATCH / (layout.micro * layout.dp) };
        assert!(more.iter().all(|&calls| calls == batches as u64), "{layout}: {more:?}");
    }
}

#[test]
fn a_rank_that_is_asked_to_stop_ends_the_evaluation_of_all() {
    for layout in [
        Layout { micro: 1, ..Layout::SERIAL },
        Layout { dp: 2, micro: 2, ..Layout::SERIAL },
        Layout { tp: 2, pp: 2, micro: 2, ..Layout::SERIAL },
    ] {
        for rank in 0..layout.ranks() {
            let found = evaluations(&gpt2(), &layout, DType::F32, None, Some(rank)).unwrap();
            assert!(found.iter().all(Option::is_none), "{layout}: {found:?}");
            let found = scores(&gpt2(), &layout, 40, Some(rank)).unwrap();
            assert!(found.iter().all(Option::is_none), "{layout}: {found:?}");
        }
    }
}
