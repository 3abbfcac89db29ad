//! The memory number before the start: what it says is what the pools of the ranks then count.

mod case;
#[path = "../../../nn/tests/common/orthogonalized.rs"]
mod orthogonalized;
#[path = "../../../nn/tests/common/row_scaled.rs"]
mod row_scaled;

use ferrotron_autograd::ActivationCompressionConfig;
use ferrotron_models::gpt::{GptConfig, Recompute, SavedActivations, WindowPattern};
use ferrotron_models::memory::StageMemory;
use ferrotron_models::trainer::SaveMode;
use ferrotron_nn::{AdafactorConfig, MuonConfig, OptimizerConfig, RopeScaling, Sharding};
use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, MemoryKind};

use orthogonalized::Orthogonalized;
use row_scaled::RowScaled;

use case::{Case, PLAIN, SEQ_LENGTH, VOCAB, check, model};

#[test]
fn the_number_before_the_start_is_what_the_pools_count() {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        for recompute in [Recompute::None, Recompute::SELECTIVE, Recompute::FULL] {
            for sharding in Sharding::ALL {
                let micro = 1 + cases.len() % 3;
                let sizes = [1, 1, 2, 1];
                cases.push(Case { dtype, recompute, sharding, micro, sizes, ..PLAIN });
            }
            for (at, schedule) in ScheduleKind::FLUSHED.into_iter().enumerate() {
                let micro = 1 + cases.len() % 2;
                let (pipeline, data) = if at % 2 == 0 { (2, 2) } else { (4, 1) };
                let pipeline = if schedule == ScheduleKind::Interleaved { 2 } else { pipeline };
                let sharding = if data > 1 { Sharding::Optimizer } else { Sharding::None };
                let sizes = [1, 1, data, pipeline];
                cases.push(Case { dtype, recompute, sharding, schedule, micro, sizes, ..PLAIN });
            }
        }
    }
    assert!(cases.len() >= 30);
    check(&cases, &model());
}

#[test]
fn it_is_in_every_kind_of_layout() {
    let mut cases = Vec::new();
    for (sizes, sequence) in [
        ([2, 1, 1, 1], SequenceParallel::Off),
        ([2, 1, 1, 2], SequenceParallel::Off),
        ([2, 1, 1, 2], SequenceParallel::On),
        ([1, 2, 1, 1], SequenceParallel::Off),
        ([2, 2, 1, 1], SequenceParallel::On),
    ] {
        for recompute in [Recompute::None, Recompute::FULL] {
            cases.push(Case { sizes, sequence, recompute, ..PLAIN });
        }
    }
    check(&cases, &model());
    check(&cases, &GptConfig::llama(VOCAB, 4, 32, 4, 2, SEQ_LENGTH));
    switched().iter().for_each(|model| check(&cases, model));
}

/// Models with the switches of Gemma 2, of GPT-NeoX, and of Qwen and Mistral.
fn switched() -> [GptConfig; 3] {
    let gemma = GptConfig {
        kv_channels: 6,
        window_size: Some(5),
        query_pre_attn_scalar: Some(10.0),
        ..GptConfig::gemma2(VOCAB, 4, 32, 4, 2, SEQ_LENGTH)
    };
    let llama = GptConfig::llama(VOCAB, 4, 32, 4, 2, SEQ_LENGTH);
    let windowed = GptConfig {
        qk_layernorm: true,
        add_qkv_bias: true,
        window_size: Some(5),
        window_attn_skip_freq: Some(WindowPattern::SkipEvery(2)),
        rope_scaling: Some(RopeScaling {
            original_max_position_embeddings: 8,
            ..RopeScaling::llama3(4.0)
        }),
        ..llama.clone()
    };
    let neox = GptConfig {
        rotary_percent: 0.5,
        use_parallel_residual: true,
        add_attention_bias: true,
        add_mlp_bias: true,
        ..llama
    };
    [gemma, neox, windowed]
}

/// Frozen parameters have weights, but no gradients, moments or masters, on any rank.
#[test]
fn it_leaves_out_the_gradients_and_moments_of_frozen_parameters() {
    let model = model();
    let mut cases = Vec::new();
    for frozen in [&["wte", "blocks.0", "blocks.1"][..], &["*", "!blocks.3", "!*.bias"]] {
        for (sizes, sharding) in [
            ([1; 4], Sharding::None),
            ([1, 1, 2, 1], Sharding::Optimizer),
            ([1, 1, 2, 1], Sharding::Gradients),
            ([1, 1, 2, 1], Sharding::Weights),
            ([2, 1, 1, 2], Sharding::None),
            ([1, 1, 2, 2], Sharding::Gradients),
            ([1, 1, 2, 2], Sharding::Weights),
        ] {
            for recompute in [Recompute::None, Recompute::FULL] {
                let dtype = if recompute == Recompute::None { DType::BF16 } else { DType::F32 };
                cases.push(Case { frozen, sizes, sharding, recompute, dtype, ..PLAIN });
            }
        }
    }
    check(&cases, &model);
    let of = |frozen| Case { frozen, dtype: DType::BF16, ..PLAIN }.plan(&model).unwrap().rank(0);
    let whole = of(&[]).unwrap();
    // A block of width h has 12 h^2 + 13 h parameters; per parameter 2, 4 and 4 + 4 + 4 bytes.
    let trained = 12 * 32 * 32 + 13 * 32;
    let found = of(&["*", "!blocks.3"]).unwrap();
    assert_eq!(found.weights_bytes, whole.weights_bytes);
    assert_eq!((found.gradients_bytes, found.optimizer_bytes), (4 * trained, 12 * trained));
}

/// The estimate leaves out data offloaded to host memory, and halves what is saved in 16 bits.
#[test]
fn it_knows_what_waits_elsewhere() {
    let (host, saved) = (MemoryKind::Host, SavedActivations::default());
    let narrow = ActivationCompressionConfig {
        dtype: Some(DType::BF16),
        ..ActivationCompressionConfig::default()
    };
    let offloaded = |offloaded_layers| SavedActivations { offloaded_layers, ..saved };
    let both = SavedActivations { packing: narrow, ..offloaded(3) };
    let narrow = SavedActivations { packing: narrow, ..saved };
    let mut cases = Vec::new();
    for recompute in [Recompute::None, Recompute::SELECTIVE, Recompute::FULL] {
        for (sizes, sharding) in [
            ([1; 4], Sharding::None),
            ([1, 1, 2, 1], Sharding::Weights),
            ([2, 1, 1, 1], Sharding::None),
        ] {
            let case = Case { recompute, sizes, sharding, ..PLAIN };
            cases.push(Case { optimizer_states: host, ..case });
            cases.push(Case { optimizer_states: host, dtype: DType::BF16, ..case });
            cases.push(Case { saved_activations: narrow, ..case });
            cases.push(Case { saved_activations: both, ..case });
            // All but two layers, and those that are needed again at once.
            for layers in 2..=4 {
                cases.push(Case { saved_activations: offloaded(layers), ..case });
            }
        }
        for layers in 1..=2 {
            let sizes = [1, 1, 1, 2];
            let saved_activations = offloaded(layers);
            cases.push(Case { recompute, sizes, saved_activations, ..PLAIN });
        }
    }
    check(&cases, &model());
}

/// Each rank has a copy of what it writes: of weights and moments that several ranks hold, a share.
#[test]
fn it_has_the_copy_from_which_checkpoints_are_written() {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        let case = Case { dtype, saves: SaveMode::Async, ..PLAIN };
        for sizes in [[1; 4], [1, 1, 3, 1], [2, 1, 1, 2], [1, 2, 1, 1]] {
            cases.push(Case { sizes, ..case });
        }
        for sharding in [Sharding::Optimizer, Sharding::Weights] {
            cases.push(Case { sizes: [1, 1, 2, 1], sharding, ..case });
        }
        cases.push(Case { optimizer_states: MemoryKind::Host, ema_decay: Some(0.9), ..case });
    }
    check(&cases, &model());
    let [alone, plain] =
        [&cases[0], &PLAIN].map(|case| case.plan(&model()).unwrap().rank(0).unwrap());
    assert_eq!(alone.snapshot_bytes, alone.weights_bytes + alone.optimizer_bytes);
    assert_eq!(alone.total_bytes, plain.total_bytes + alone.snapshot_bytes);
}

/// States of any rule are counted, and so is a moving average of the weights.
#[test]
fn it_is_with_every_rule() {
    let muon = OptimizerConfig::Muon(MuonConfig::default());
    let lion = OptimizerConfig::Lion { beta1: 0.95, beta2: 0.98, weight_decay: 0.1 };
    let mut cases = Vec::new();
    let orthogonalized = OptimizerConfig::custom(&Orthogonalized);
    let row_scaled = OptimizerConfig::custom(&RowScaled);
    for optimizer in [muon, lion, OptimizerConfig::ADAMW, orthogonalized, row_scaled] {
        for dtype in [DType::F32, DType::BF16] {
            let case = Case { optimizer, dtype, ema_decay: Some(0.999), ..PLAIN };
            cases.push(case);
            cases.push(Case { sizes: [2, 1, 1, 1], ..case });
            cases.push(Case { sizes: [1, 1, 1, 2], ema_decay: None, ..case });
            cases.push(Case { optimizer_states: MemoryKind::Host, ..case });
        }
        for sharding in [Sharding::Optimizer, Sharding::Weights] {
            let sizes = [1, 1, 2, 1];
            cases.push(Case { optimizer, sharding, sizes, ema_decay: Some(0.999), ..PLAIN });
        }
    }
    for sharding in Sharding::ALL {
        cases.push(Case { optimizer: orthogonalized, sharding, sizes: [2, 1, 2, 1], ..PLAIN });
    }
    check(&cases, &model());
}

/// Parameters that keep f32 are counted: norms, and a matrix and the tied embedding, which layers cast.
#[test]
fn it_is_with_parameters_in_f32() {
    let mut cases = Vec::new();
    for keep_in_fp32 in [&["*norm*"][..], &["*norm*", "wte", "blocks.1.mlp"]] {
        let case = Case { dtype: DType::BF16, keep_in_fp32, ..PLAIN };
        for sharding in Sharding::ALL {
            let recompute = if cases.len() % 2 == 0 { Recompute::None } else { Recompute::FULL };
            cases.push(Case { sharding, recompute, sizes: [1, 1, 2, 1], ..case });
        }
        cases.push(Case { sizes: [2, 1, 1, 2], sequence: SequenceParallel::On, ..case });
        cases.push(Case { optimizer_states: MemoryKind::Host, ema_decay: Some(0.9), ..case });
    }
    check(&cases, &model());
}

/// The estimate is that of the rank that takes most, where ranks own whole parameters and differ.
#[test]
fn it_is_that_of_the_rank_which_takes_most() {
    let rule = AdafactorConfig { beta1: 0.9, ..AdafactorConfig::default() };
    let adafactor = Case { optimizer: OptimizerConfig::Adafactor(rule), ..PLAIN };
    let mut cases = Vec::new();
    for sharding in [Sharding::Optimizer, Sharding::Gradients, Sharding::Weights] {
        for sizes in [[1, 1, 3, 1], [1, 2, 2, 1], [2, 1, 2, 1], [1, 1, 8, 1]] {
            cases.push(Case { sharding, sizes, ..adafactor });
        }
    }
    cases.push(Case { sharding: Sharding::Optimizer, sizes: [1, 1, 3, 2], ..adafactor });
    let mut others = 0;
    for case in &cases {
        let plan = case.plan(&model()).unwrap();
        for StageMemory { ranks, rank, memory, stage, .. } in plan.stages().unwrap() {
            let total = |rank: usize| plan.rank(rank).unwrap().total_bytes;
            let all = stage * ranks..(stage + 1) * ranks;
            let most = all.clone().map(total).max().unwrap();
            // Of those with as many elements one may have more rows and columns.
            let short = most - memory.total_bytes;
            assert!(short * 100 <= most, "{short} of {most}: {case:?}");
            others += usize::from(rank + 1 < all.end);
        }
    }
    assert!(others > 3, "only {others} times another one than the last");
    check(&cases[..3], &model());
}

/// Sharded weights and gradients are whole a few buckets at a time, however many there are.
#[test]
fn buffers_do_not_grow_with_the_model() {
    // A bucket is closed when it has 10000 elements or more, of parameters that have 4096 at most.
    let bucket = 4 * (10_000 + 4096);
    for (sharding, kinds) in [(Sharding::Gradients, 1), (Sharding::Weights, 2)] {
        let case = Case { sharding, sizes: [1, 1, 4, 1], ..PLAIN };
        for layers in [8, 64, 512] {
            let model = GptConfig::gpt2(VOCAB, layers, 32, 4, SEQ_LENGTH);
            let found = case.plan(&model).unwrap().rank(3).unwrap().buffers_bytes;
            let at = format!("{sharding:?}, {layers} layers: {found} bytes");
            assert!(found > bucket && found <= 5 * kinds * bucket, "{at}");
        }
    }
}

/// The estimate of many micro-batches simulates only as many as suffice.
#[test]
fn it_is_with_many_micro_batches() {
    let mut cases = Vec::new();
    for schedule in ScheduleKind::FLUSHED {
        for stages in [1, 2, 4] {
            if stages == 1 && schedule == ScheduleKind::Interleaved
                || stages == 4 && schedule == ScheduleKind::GPipe
            {
                continue;
            }
            cases.push(Case { schedule, sizes: [1, 1, 1, stages], microbatches: 16, ..PLAIN });
            if stages == 2 && !schedule.splits_backward() {
                for sharding in [Sharding::Gradients, Sharding::Weights] {
                    let sizes = [1, 1, 2, stages];
                    cases.push(Case { schedule, sizes, sharding, microbatches: 8, ..PLAIN });
                }
            }
        }
    }
    let model = GptConfig::gpt2(VOCAB, 8, 32, 4, SEQ_LENGTH);
    check(&cases, &model);
    // Without a flush an update is in flight as well, and steps are cut too.
    let schedule = ScheduleKind::PipeDream2Bw;
    let mut cases = Vec::new();
    for (stages, microbatches) in [(2, 9), (2, 13), (4, 9), (4, 13)] {
        let sizes = [1, 1, 1, stages];
        for recompute in [Recompute::None, Recompute::FULL] {
            let case = Case { schedule, sizes, microbatches, recompute, ..PLAIN };
            cases.push(Case { drain_interval: 7, ..case });
        }
    }
    check(&cases, &GptConfig { tie_embeddings: false, ..model });
}

/// A rank has a gradient buffer for each step that may be outstanding, whenever its update is applied.
#[test]
fn it_has_the_gradients_of_outstanding_steps() {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        for max_staleness in [1, 3] {
            for recompute in [Recompute::None, Recompute::FULL] {
                let sizes = [1, 1, 2, 1];
                cases.push(Case { dtype, max_staleness, recompute, sizes, ..PLAIN });
            }
        }
    }
    check(&cases, &model());
    let plain = PLAIN.plan(&model()).unwrap().rank(0).unwrap();
    let stale = Case { max_staleness: 3, ..PLAIN }.plan(&model()).unwrap().rank(0).unwrap();
    assert_eq!(stale.gradients_bytes, 4 * plain.gradients_bytes);
    assert_eq!(stale.total_bytes, plain.total_bytes + 3 * plain.gradients_bytes);
}

/// Stage s of p holds p - s versions of its weights; with vertical sync p, with PipeDream-2BW two.
#[test]
fn it_has_the_stored_versions_of_the_weights() {
    let model = GptConfig { tie_embeddings: false, ..model() };
    let mut cases = Vec::new();
    for schedule in ScheduleKind::UNFLUSHED {
        for (at, sizes) in
            [[1, 1, 1, 2], [1, 1, 2, 2], [2, 1, 1, 2], [1, 1, 1, 4]].into_iter().enumerate()
        {
            let stages = sizes[3];
            let microbatches =
                if schedule == ScheduleKind::PipeDream2Bw { stages - 1 + at } else { 1 };
            let sharding = if sizes[2] > 1 { Sharding::Optimizer } else { Sharding::None };
            let dtype = if at % 2 == 0 { DType::F32 } else { DType::BF16 };
            let recompute = if at == 3 { Recompute::FULL } else { Recompute::None };
            for drain_interval in [2, 11] {
                let case = Case {
                    schedule,
                    sizes,
                    microbatches,
                    sharding,
                    dtype,
                    recompute,
                    drain_interval,
                    ..PLAIN
                };
                let bytes = |case: Case| -> Vec<usize> {
                    let stages = case.plan(&model).unwrap().stages().unwrap();
                    stages.iter().map(|stage| stage.memory.weights_bytes).collect()
                };
                let flushed = bytes(Case { schedule: ScheduleKind::OneFOneB, ..case });
                for (stage, (found, one)) in bytes(case).into_iter().zip(flushed).enumerate() {
                    let versions = match schedule {
                        ScheduleKind::PipeDream => stages - stage,
                        ScheduleKind::PipeDreamVerticalSync => stages,
                        _ => 2,
                    };
                    assert_eq!(found, versions * one, "{case:?}: stage {stage}");
                }
                cases.push(case);
            }
        }
    }
    check(&cases, &model);
}

/// With one micro-batch, GPT-2 124M takes far less than the sum of the columns: when the logits are there, most gradients
/// have no memory yet, and when the last gradients come, there are few activations.
#[test]
fn gradients_take_the_place_of_activations() {
    let model = GptConfig::gpt2(50257, 12, 768, 12, 1024);
    let total = |microbatches| {
        let case = Case { micro: 32, microbatches, ..PLAIN };
        case.plan(&model).unwrap().stages().unwrap()[0].memory
    };
    let (one, two) = (total(1), total(2));
    assert_eq!(one.gradients_bytes, one.weights_bytes);
    let activations = one.activations_bytes + one.logits_bytes;
    assert!(two.total_bytes > 4 * one.weights_bytes + activations);
    assert!(one.total_bytes < 4 * one.weights_bytes + activations / 2, "{one:?}");
}
