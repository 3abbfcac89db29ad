//! A BERT that chooses among answers: its logits and gradients, the same losses in every layout, and what it learns.

use super::{ALONE, Layout, SPLIT, small};
use ferrotron_autograd::Var;
use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron_models::bert::{Bert, BertConfig, NormPlacement};
use ferrotron_models::data::tasks::{NUM_CHOICES, Race, RaceArticle, RaceQuestion};
use ferrotron_models::data::{ChoiceBatch, FiniteSamples, PairBatch, Samples};
use ferrotron_models::hugging_face;
use ferrotron_models::stop::StopFlag;
use ferrotron_models::tokenizer::Tokenizer;
use ferrotron_models::trainer::{Microbatch, Model, Trainer, TrainerConfig};
use ferrotron_nn::schedule::LrSchedule;
use ferrotron_nn::{Context, Mode, Module, Param, Scope, Sharding};
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::mesh::Mesh;
use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, RandomKey, Result, Tensor};

const LENGTH: usize = 16;

/// Token ids of the byte tokenizer, with BERT's.
const VOCAB: usize = 260;

/// Questions whose right choice is the one with a z in it, two on an article of 0 to 7 letters.
fn race(seed: u64, questions: u64) -> Race {
    let made = |number: u64| {
        let key = RandomKey::new(seed, number, "race");
        let below = |at: u64, count: usize| (key.uniform(at) * count as f64) as usize;
        let word = |first: u64, length: usize| -> String {
            (first..).take(length).map(|at| (b'a' + below(at, 25) as u8) as char).collect()
        };
        let answer = below(0, NUM_CHOICES);
        let choices = std::array::from_fn(|choice| {
            let word = word(10 * choice as u64 + 10, 1 + below(choice as u64 + 1, 4));
            if choice == answer { word + "z" } else { word }
        });
        (word(100, below(9, 8)), RaceQuestion { choices, answer })
    };
    let articles: Vec<RaceArticle> = (0..questions)
        .map(|number| {
            let (text, question) = made(number);
            RaceArticle { text, questions: vec![question] }
        })
        .collect();
    Race::new(&articles, &Tokenizer::Byte, LENGTH).unwrap()
}

fn config(placement: NormPlacement) -> BertConfig {
    small(BertConfig::new(placement, VOCAB, 4, 16, 4, LENGTH)).with_choices(NUM_CHOICES)
}

fn named<'a>(params: &'a [Param], name: &str) -> &'a Param {
    params.iter().find(|param| param.name() == name).unwrap_or_else(|| panic!("no {name}"))
}

/// The logit of a choice is that of "in order" of a BERT in pre-training, which is compared with PyTorch elsewhere. The loss
/// is the sum of -log softmax at the answers, and its gradient agrees with finite differences.
#[test]
fn logits_loss_and_gradients_are_those_of_plain_formulas() -> Result<()> {
    let device = Device::cpu(1)?;
    let config =
        BertConfig { hidden_dropout: 0.0, attention_dropout: 0.0, ..config(NormPlacement::Pre) };
    let bert = Bert::new(&Scope::new(&device, DType::F64, 3), &config)?;
    let params = bert.params();
    assert_eq!(
        params.iter().map(|param| param.leaf().numel() as u64).sum::<u64>(),
        config.num_parameters()
    );
    let batch = race(1, 3).batch(0, 3)?;
    let answers = batch.get::<i64>(ChoiceBatch::ANSWERS)?.to_vec();
    let ctx = Context::new(0, 0, Mode::Train, 3, LENGTH);
    let microbatch = Microbatch::new(&device, &Mesh::single(), &batch, ctx)?;
    let ids = [microbatch.get(PairBatch::TOKENS)?, microbatch.get(PairBatch::SEGMENTS)?];
    let logits = bert.choice_logits(microbatch.ctx(), ids[0], ids[1])?;
    assert_eq!(logits.dims(), [3, NUM_CHOICES]);
    let logits = logits.value().to_f64()?;

    let twin = BertConfig { num_choices: None, binary_head: true, ..config.clone() };
    let twin = Bert::new(&Scope::new(&device, DType::F64, 3), &twin)?;
    for param in twin.params() {
        let rows = |name: &str| named(&params, name).leaf().value();
        let value = match param.name() {
            "binary_head.weight" | "binary_head.bias" => {
                let row = rows(&param.name().replace("binary", "multichoice"))?;
                Tensor::concat(&[&row, &row.mul_scalar(2.0)?], 0)?
            }
            name if name.starts_with("mlm_head") => continue,
            name => rows(name)?,
        };
        param.leaf().set_value(&value)?;
    }
    let order = twin.forward(microbatch.ctx(), ids[0], ids[1])?.order_logits.unwrap();
    let order = order.value().to_f64()?;
    let first: Vec<f64> = order.chunks(2).map(|row| row[0]).collect();
    let off = first.iter().zip(&logits).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(first.len() == logits.len() && off < 1e-12, "{first:?} {logits:?}");

    let loss = || -> Result<(Var, f64)> {
        let losses = Model::forward(&bert, &microbatch, None)?.losses;
        assert_eq!((losses[0].0, losses[1].0), ("multiple_choice", "accuracy"));
        Ok((losses[0].1.clone(), losses[1].1.value().item()?))
    };
    let rows = logits.chunks(NUM_CHOICES).zip(&answers);
    let want: f64 = rows
        .clone()
        .map(|(row, &answer)| {
            row.iter().map(|logit| logit.exp()).sum::<f64>().ln() - row[answer as usize]
        })
        .sum();
    let right =
        rows.filter(|(row, answer)| row.iter().all(|logit| *logit <= row[**answer as usize]));
    let (got, correct) = loss()?;
    assert!((got.value().item()? - want).abs() < 1e-12, "{want}");
    assert_eq!(correct, right.count() as f64);
    got.backward()?;
    for (name, element) in [
        ("multichoice_head.weight", 3),
        ("pooler.weight", 17),
        ("pooler.bias", 2),
        ("norm_f.weight", 1),
        ("blocks.0.attn.qkv.weight", 40),
        ("wse.weight", 20),
    ] {
        let param = named(&params, name);
        let gradient = param.leaf().gradient()?.expect("a gradient").to_f64()?[element];
        let value = param.leaf().value()?.to_f64()?;
        let at = |step: f64| -> Result<f64> {
            let mut moved = value.clone();
            moved[element] += step;
            let moved = Tensor::from_slice(&device, &moved, param.leaf().dims())?;
            param.leaf().set_value(&moved)?;
            loss()?.0.value().item()
        };
        let difference = (at(1e-5)? - at(-1e-5)?) / 2e-5;
        at(0.0)?;
        assert!((gradient - difference).abs() < 1e-7, "{name}: {gradient} {difference}");
    }
    Ok(())
}

/// Trains four steps of four questions; returns (loss, accuracy, norm) of each and, last, (loss, accuracy, questions) of an
/// evaluation.
fn train(layout: Layout, model: &BertConfig) -> Vec<[f64; 3]> {
    let trainer = || -> Result<TrainerConfig> {
        let sizes = BatchSize::new(BatchSizeConfig {
            micro_batch_size: layout.micro_batch,
            data_parallel_size: layout.sizes[2],
            global_batch_size: Some(4),
            ..BatchSizeConfig::default()
        })?;
        Ok(TrainerConfig { batch_size: sizes, ..layout.trainer()? })
    };
    let ranks = run_threads(layout.dims().world(), &WorldConfig::default(), |world| {
        let mesh = Mesh::new(&world, layout.dims(), layout.sequence)?;
        let scope = Scope::new(&Device::cpu(1)?, DType::F64, 7);
        let mut trainer = Trainer::<Bert>::on_mesh(&scope, &mesh, model, trainer()?)?;
        let samples = race(2, 9).shuffled(1);
        let mut found = Vec::new();
        for _ in 0..4 {
            let report = trainer.step(&samples)?;
            assert_eq!(report.losses[1].0, "accuracy");
            assert_eq!((report.samples, report.tokens), (4, 4 * 4 * LENGTH as u64));
            assert_eq!(report.loss, report.losses[0].1);
            found.push([report.loss, report.losses[1].1, report.grad_norm]);
        }
        let found_by = trainer.evaluate(&race(3, 7), &StopFlag::default())?.expect("not stopped");
        found.push([found_by.loss, found_by.losses[1].1, found_by.tokens as f64]);
        Ok(found)
    });
    let ranks: Vec<_> = ranks.into_iter().collect::<Result<_>>().unwrap();
    assert!(ranks.iter().all(|found| *found == ranks[0]), "{layout:?}");
    ranks[0].clone()
}

#[test]
fn choices_train_in_every_layout_as_on_one_rank() {
    let parts = Layout { micro_batch: 1, ..SPLIT };
    for placement in [NormPlacement::Pre, NormPlacement::Post] {
        let model = config(placement);
        let want = train(Layout { micro_batch: 4, ..ALONE }, &model);
        assert_eq!(want[4][2], 7.0);
        for layout in [
            parts,
            Layout { sizes: [2, 1, 1, 1], ..parts },
            Layout { sizes: [2, 1, 1, 1], sequence: SequenceParallel::On, ..parts },
            Layout { sizes: [1, 2, 1, 1], ..parts },
            Layout { sizes: [1, 1, 2, 1], sharding: Sharding::Weights, ..parts },
            Layout { sizes: [1, 1, 1, 2], schedule: ScheduleKind::Interleaved, chunks: 2, ..parts },
            Layout {
                sizes: [2, 1, 2, 2],
                sequence: SequenceParallel::On,
                sharding: Sharding::Optimizer,
                ..parts
            },
        ] {
            let got = train(layout, &model);
            for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
                assert!((got - want).abs() <= 1e-11 * want.abs(), "{layout:?}: {got} {want}");
            }
        }
    }
}

#[test]
fn a_rule_is_learnt_and_holds_for_other_questions() -> Result<()> {
    let sizes = BatchSizeConfig { micro_batch_size: 16, ..BatchSizeConfig::default() };
    let options = TrainerConfig::new(7, LrSchedule::constant(3e-3)?, BatchSize::new(sizes)?);
    let model =
        BertConfig::new(NormPlacement::Pre, VOCAB, 1, 32, 2, LENGTH).with_choices(NUM_CHOICES);
    let scope = Scope::new(&Device::cpu(1)?, DType::F32, 7);
    let mut trainer = Trainer::<Bert>::new(&scope, &model, options)?;
    let (samples, held_out) = (race(4, 200).shuffled(1), race(5, 50));
    let accuracy = |trainer: &Trainer<Bert>| -> Result<f64> {
        Ok(trainer.evaluate(&held_out, &StopFlag::default())?.expect("not stopped").losses[1].1)
    };
    let before = accuracy(&trainer)?;
    for _ in 0..100 {
        trainer.step(&samples)?;
    }
    let after = accuracy(&trainer)?;
    assert!(before < 0.6 && after == 1.0, "{before} {after} of {}", held_out.len());
    Ok(())
}

/// The classes of transformers have these names; of the number of choices they know nothing.
#[test]
fn an_export_is_imported_bit_for_bit_and_an_encoder_gets_a_new_head() -> Result<()> {
    let (folder, device) = (tempfile::tempdir().unwrap(), Device::cpu(1)?);
    for placement in [NormPlacement::Pre, NormPlacement::Post] {
        let config =
            BertConfig { hidden_dropout: 0.0, attention_dropout: 0.0, ..config(placement) };
        let made = |config: &BertConfig| Bert::new(&Scope::new(&device, DType::F32, 3), config);
        let path = folder.path().join(format!("choices-{placement:?}"));
        let bert = made(&config)?;
        hugging_face::bert::export(&bert, &path)?;
        let text = std::fs::read_to_string(path.join("config.json")).unwrap();
        assert!(text.contains("BertForMultipleChoice"), "{text}");
        let again = hugging_face::bert::import(&path, &device, DType::F32)?;
        assert_eq!(again.config(), &config);
        let value = |param: &Param| param.leaf().value()?.to_vec::<f32>();
        for (got, want) in again.params().iter().zip(bert.params()) {
            assert_eq!((got.name(), value(got)?), (want.name(), value(&want)?));
        }
        let path = folder.path().join(format!("encoder-{placement:?}"));
        let encoder = BertConfig { num_choices: None, ..config.clone() };
        hugging_face::bert::export(&made(&encoder)?, &path)?;
        let weights = hugging_face::bert::pretrained_weights(&path, &config)?;
        let fresh: Vec<&str> = weights.fresh().collect();
        let head = ["multichoice_head.bias", "multichoice_head.weight"];
        assert_eq!(fresh, [&head[..], &["pooler.bias", "pooler.weight"]].concat());
        let error = hugging_face::bert::weights(&path, &config).err().unwrap().to_string();
        assert!(error.contains("has no tensor 'bert.pooler.dense.weight'"), "{error}");
    }
    Ok(())
}

#[test]
fn heads_that_do_not_go_together_are_refused() {
    let good = config(NormPlacement::Pre);
    for (config, part) in [
        (good.clone().with_choices(1), "num-choices 1 must be at least 2"),
        (BertConfig { binary_head: true, ..good.clone() }, "no place for the binary head"),
        (BertConfig { num_token_types: 1, ..good.clone() }, "num-token-types 1 must be at least 2"),
    ] {
        let error = config.validate().unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let device = Device::cpu(1).unwrap();
    let bert = Bert::new(&Scope::new(&device, DType::F32, 0), &good).unwrap();
    let ids = Tensor::from_slice(&device, &[0_u32; 16], &[1, 16]).unwrap();
    let error = bert.forward(&Context::eval(1, 16), &ids, &ids).unwrap_err().to_string();
    assert!(error.contains("has no head for tokens"), "{error}");
}
