//! The promise of the project: loss, gradient norm, gradients and weights do not depend on the layout.
//!
//! A small GPT or BERT with dropout, tied embeddings, clipping, ignored labels, and a vocabulary and layers that
//! nothing divides, is trained in f64 in layouts that cover every pair of values of the axes, every rank a
//! thread, and compared with a training loop on one rank that knows no layout. Evaluations of such models are compared
//! as well.

mod asynchronous;
mod evaluation;
mod grid_model;
#[path = "../../nn/tests/common/heavy_ball.rs"]
mod heavy_ball;
mod layout;
mod mutants;
#[path = "../../nn/tests/common/orthogonalized.rs"]
mod orthogonalized;
#[path = "../common/pairs.rs"]
mod pairs;
mod precision;
mod prefetch;
mod reductions;
mod reference;
#[path = "../common/tensors.rs"]
mod tensors;
mod train;

use ferrotron::models::bert::{BertConfig, NormPlacement};
use ferrotron::models::gpt::{GptConfig, WindowPattern};
use ferrotron::nn::{
    AdafactorConfig, MuonConfig, MuonScale, Nesterov, NewtonSchulz, OptimizerConfig, RopeScaling,
    Sharding, StepSize,
};
use ferrotron::tensor::{DType, RandomKey};
use grid_model::{FineTunedGpt, GridConfig, PackedGpt};
use heavy_ball::HeavyBall;
use layout::{Layout, all, covering};
use orthogonalized::Orthogonalized;
use reference::reference;
use train::{CLIP, Found, Numbers, difference, first_difference, train};

/// GPT-2 style: tied, learned positions, biases.
fn gpt2() -> GptConfig {
    GptConfig {
        hidden_dropout: 0.1,
        attention_dropout: 0.1,
        init_method_std: 0.3,
        ..GptConfig::gpt2(13, 9, 16, 4, 16)
    }
}

/// Llama style: its own head, rotary positions, SwiGLU, grouped queries.
fn llama() -> GptConfig {
    GptConfig {
        hidden_dropout: 0.1,
        attention_dropout: 0.1,
        init_method_std: 0.3,
        ffn_hidden_size: 21,
        ..GptConfig::llama(11, 7, 16, 4, 2, 16)
    }
}

/// BERT, with a vocabulary and an MLP that nothing divides.
fn bert(norms: NormPlacement) -> BertConfig {
    BertConfig {
        hidden_dropout: 0.1,
        attention_dropout: 0.1,
        init_method_std: 0.3,
        ffn_hidden_size: 21,
        ..BertConfig::new(norms, 13, 7, 16, 4, 16)
    }
}

fn compare<C: GridConfig>(model: &C, numbers: &Numbers, layouts: &[Layout]) {
    compare_by(model, numbers, layouts, &[difference]);
}

/// A comparison of a run with the reference: the first difference.
type Compare = fn(&Found, &Found) -> Option<String>;

fn compare_by<C: GridConfig>(
    model: &C,
    numbers: &Numbers,
    layouts: &[Layout],
    comparisons: &[Compare],
) {
    let reference = reference(model, numbers).unwrap().without_key_biases(model.sizes());
    assert!(reference.steps.iter().all(|&(_, norm)| norm > CLIP), "nothing was clipped");
    let mut failures = Vec::new();
    for layout in [&Layout::SERIAL].into_iter().chain(layouts) {
        match train(model, layout, numbers, &|collective| collective) {
            Ok(found) => {
                let found = found.without_key_biases(model.sizes());
                let differences = comparisons.iter().filter_map(|find| find(&found, &reference));
                failures.extend(differences.map(|what| format!("{layout}: {what}")));
            }
            Err(error) => failures.push(format!("{layout}: {error}")),
        }
    }
    let (failed, count) = (failures.len(), 1 + layouts.len());
    assert!(failures.is_empty(), "{failed} of {count} layouts differ:\n{}", failures.join("\n"));
}

#[test]
fn every_pair_of_axis_values_trains_as_one_rank_does() {
    let model = gpt2();
    let all = all(&model);
    let layouts = [covering(&all), random(&all, 24, 2)].concat();
    assert!(layouts.len() >= 40, "only {} layouts", layouts.len());
    compare(&model, &Numbers::with_dtype(DType::F64), &layouts);
}

/// Random layouts: others for each seed.
fn random(all: &[Layout], count: u64, seed: u64) -> Vec<Layout> {
    let key = RandomKey::new(seed, 0, "layouts");
    (0..count).map(|i| all[(key.uniform(i) * all.len() as f64) as usize]).collect()
}

#[test]
fn the_llama_style_trains_alike_too() {
    let model = llama();
    let all = all(&model);
    let layouts = [covering(&all), random(&all, 12, 3)].concat();
    compare(&model, &Numbers::with_dtype(DType::F64), &layouts);
}

/// Several documents in a sample, with learned and with rotary positions: the reference takes each by itself.
#[test]
fn packed_documents_train_as_each_alone() {
    let plain =
        |config| PackedGpt(GptConfig { hidden_dropout: 0.0, attention_dropout: 0.0, ..config });
    for (model, seed) in [(plain(gpt2()), 21), (plain(llama()), 22)] {
        let all = all(&model.0);
        let layouts = [covering(&all), random(&all, 8, seed)].concat();
        assert!(layouts.len() >= 30, "only {} layouts", layouts.len());
        let numbers = Numbers::with_dtype(DType::F64);
        compare_by(&model, &numbers, &layouts, &[difference, first_difference]);
    }
}

/// Prompts and completions that first-fit packs: the reference takes each pair by itself.
#[test]
fn packed_completions_train_as_each_pair_alone() {
    for config in [gpt2(), llama()] {
        let config = GptConfig { hidden_dropout: 0.0, attention_dropout: 0.0, ..config };
        let model = FineTunedGpt::new(config).unwrap();
        let serial = Layout::SERIAL;
        let layouts = [
            Layout { micro: 3, ..serial },
            Layout { tp: 2, ..serial },
            Layout { dp: 2, micro: 2, sharding: Sharding::Weights, ..serial },
            Layout { cp: 2, pp: 2, micro: 2, ..serial },
        ];
        let numbers = Numbers::with_dtype(DType::F64);
        compare_by(&model, &numbers, &layouts, &[difference, first_difference]);
    }
}

/// Two losses, padding, and attention to all positions; the norms before attention and MLP, and behind the additions.
#[test]
fn bert_trains_alike_too() {
    for (norms, seed) in [(NormPlacement::Pre, 12), (NormPlacement::Post, 13)] {
        let model = bert(norms);
        let all = all(&model);
        let layouts = [covering(&all), random(&all, 8, seed)].concat();
        assert!(layouts.len() >= 30, "only {} layouts", layouts.len());
        compare(&model, &Numbers::with_dtype(DType::F64), &layouts);
    }
}

/// Everything in front of the fourth block, a stage with nothing to train, every norm and bias, and tied embeddings.
#[test]
fn frozen_parameters_change_in_no_layout() {
    let front = &["wte", "blocks.0.", "blocks.1.", "blocks.2.", "blocks.3."];
    for (model, frozen, seed) in [
        (llama(), &front[..], 7),
        (gpt2(), &["bias", "norm"], 8),
        (gpt2(), &["wte"], 9),
        (llama(), &["attn.qkv", "mlp.gate_up"], 10),
    ] {
        let all = all(&model);
        let numbers = Numbers { frozen, clip_grad: 0.01, ..Numbers::with_dtype(DType::F64) };
        let mut layouts: Vec<Layout> = Sharding::ALL
            .map(|sharding| Layout { dp: 2, micro: 2, sharding, ..Layout::SERIAL })
            .into();
        layouts.extend([
            Layout { pp: 2, micro: 2, ..Layout::SERIAL },
            Layout { tp: 2, pp: 2, micro: 2, ..Layout::SERIAL },
        ]);
        layouts.extend(random(&all, 8, seed));
        layouts.retain(|layout| layout.allowed(&model));
        compare(&model, &numbers, &layouts);
    }
}

/// A scaling that changes some of the frequencies of sequences as short as these.
const SCALING: RopeScaling =
    RopeScaling { original_max_position_embeddings: 8, ..RopeScaling::llama3(4.0) };

/// Norms of queries and keys, a partial rotation with scaled frequencies, a bias of their projection, windows that every
/// other block has, and an MLP that reads the input of attention.
#[test]
fn attention_with_all_its_options_trains_alike_too() {
    let model = GptConfig {
        rotary_percent: 0.5,
        qk_layernorm: true,
        add_qkv_bias: true,
        window_size: Some(5),
        window_attn_skip_freq: Some(WindowPattern::SkipEvery(2)),
        attn_logit_softcapping: Some(5.0),
        rope_scaling: Some(SCALING),
        use_parallel_residual: true,
        ..llama()
    };
    let layouts = random(&all(&model), 10, 7);
    compare(&model, &Numbers::with_dtype(DType::F64), &layouts);
}

/// Norms of queries and keys around 0; LayerNorms with a bias behind linear layers without, and the other way round.
#[test]
fn norms_of_every_kind_train_alike_too() {
    let around_zero = GptConfig { qk_layernorm: true, apply_layernorm_1p: true, ..llama() };
    let norms_alone = GptConfig { add_bias: false, add_norm_bias: Some(true), ..gpt2() };
    let linear_alone = GptConfig { add_norm_bias: Some(false), apply_layernorm_1p: true, ..gpt2() };
    for (model, seed) in [(around_zero, 41), (norms_alone, 42), (linear_alone, 43)] {
        let layouts = random(&all(&model), 5, seed);
        compare(&model, &Numbers::with_dtype(DType::F64), &layouts);
    }
}

/// GeGLU, heads that are not hidden / heads wide, norms around 0 before and behind attention and MLP, scaled embeddings,
/// soft caps of scores and logits, a scale of the scores; and biases, and windows in listed blocks.
#[test]
fn the_gemma_style_trains_alike_too() {
    let plain = GptConfig {
        hidden_dropout: 0.1,
        attention_dropout: 0.1,
        init_method_std: 0.3,
        ffn_hidden_size: 21,
        kv_channels: 6,
        window_size: Some(5),
        query_pre_attn_scalar: Some(10.0),
        attn_logit_softcapping: Some(5.0),
        final_logit_softcapping: Some(4.0),
        ..GptConfig::gemma2(11, 7, 16, 4, 2, 16)
    };
    let listed = GptConfig {
        window_attn_skip_freq: Some(WindowPattern::Blocks(vec![0, 1, 1, 0, 1, 0, 1])),
        add_attention_bias: true,
        add_mlp_bias: true,
        tie_embeddings: false,
        ..plain.clone()
    };
    for (model, seed) in [(plain, 31), (listed, 32)] {
        let layouts = random(&all(&model), 8, seed);
        compare(&model, &Numbers::with_dtype(DType::F64), &layouts);
    }
}

/// Adafactor sees a tensor whole: its sums go over the ranks that have parts of it, and ZeRO's shards are made of
/// parameters.
#[test]
fn adafactor_trains_in_every_layout_as_on_one_rank() {
    let relative = AdafactorConfig::default();
    let scheduled = AdafactorConfig { step_size: StepSize::Scheduled, ..relative };
    for (model, config, seed) in [
        (gpt2(), AdafactorConfig { weight_decay: 0.1, ..scheduled }, 4),
        (gpt2(), AdafactorConfig { clip_threshold: 0.5, ..relative }, 5),
        (llama(), AdafactorConfig { beta1: 0.9, weight_decay: 0.1, ..relative }, 6),
    ] {
        let all = all(&model);
        let optimizer = OptimizerConfig::Adafactor(config);
        let numbers = Numbers { optimizer, ..Numbers::with_dtype(DType::F64) };
        let zero =
            Sharding::ALL.map(|sharding| Layout { dp: 2, micro: 2, sharding, ..Layout::SERIAL });
        let mut layouts = vec![
            Layout { tp: 2, micro: 2, ..Layout::SERIAL },
            Layout { pp: 2, micro: 2, ..Layout::SERIAL },
            // Two stages with the same matrix, and four ranks whose sums could be added up in other orders.
            Layout { tp: 4, pp: 2, micro: 2, ..Layout::SERIAL },
        ];
        layouts.retain(|layout| layout.allowed(&model));
        layouts.extend(zero);
        layouts.extend(if seed == 4 { covering(&all) } else { random(&all, 8, seed) });
        compare(&model, &numbers, &layouts);
    }
}

/// Muon and a user's rule see a matrix whole, which the ranks that have parts of it gather. Lion and another rule of a
/// user's update any ranges of elements.
#[test]
fn other_rules_train_in_every_layout_as_on_one_rank() {
    let muon = MuonConfig { extra_scale: 0.2, ..MuonConfig::default() };
    let nesterov = MuonConfig {
        nesterov: Nesterov::On,
        coefficients: NewtonSchulz::Simple,
        scale: MuonScale::ShapeScaling,
        ..muon
    };
    for (model, optimizer, seed) in [
        (gpt2(), OptimizerConfig::Muon(muon), 7),
        (llama(), OptimizerConfig::Muon(nesterov), 8),
        (gpt2(), OptimizerConfig::NesterovSgd { momentum: 0.9, weight_decay: 0.1 }, 9),
        (llama(), OptimizerConfig::Lion { beta1: 0.95, beta2: 0.98, weight_decay: 0.1 }, 10),
        (llama(), OptimizerConfig::custom(&HeavyBall { weight_decay: 0.0 }), 11),
        (llama(), OptimizerConfig::custom(&Orthogonalized), 12),
        (gpt2(), OptimizerConfig::custom(&Orthogonalized), 13),
    ] {
        let all = all(&model);
        let numbers = Numbers { optimizer, ..Numbers::with_dtype(DType::F64) };
        let zero =
            Sharding::ALL.map(|sharding| Layout { dp: 2, micro: 2, sharding, ..Layout::SERIAL });
        let mut layouts = vec![
            Layout { tp: 2, micro: 2, ..Layout::SERIAL },
            Layout { pp: 2, micro: 2, ..Layout::SERIAL },
            Layout { tp: 4, pp: 2, micro: 2, ..Layout::SERIAL },
            Layout { tp: 2, dp: 2, micro: 2, sharding: Sharding::Gradients, ..Layout::SERIAL },
            Layout { tp: 2, dp: 2, micro: 2, sharding: Sharding::Weights, ..Layout::SERIAL },
        ];
        layouts.retain(|layout| layout.allowed(&model));
        layouts.extend(zero);
        layouts.extend(random(&all, if seed < 9 { 12 } else { 4 }, seed));
        compare(&model, &numbers, &layouts);
    }
}

/// Neither can the clip coefficient.
#[test]
fn unclipped_gradients_are_noticed() {
    let model = gpt2();
    let f64 = Numbers::with_dtype(DType::F64);
    let reference = reference(&model, &f64).unwrap();
    let unclipped = Numbers { clip_grad: 0.0, ..f64 };
    for layout in random(&all(&model), 2, 2).into_iter().chain([Layout::SERIAL]) {
        let found = train(&model, &layout, &unclipped, &|collective| collective).unwrap();
        assert!(difference(&found, &reference).is_some(), "{layout}");
    }
}
