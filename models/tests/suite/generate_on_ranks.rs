//! Generation on ranks that share a model: the tokens of one rank, at the cost of one position each.

use ferrotron_models::evaluate::LocalModel;
use ferrotron_models::generate::{GenerationRequest, Sampling, generate_batch};
use ferrotron_models::generate_on_ranks::generate_on_ranks;
use ferrotron_models::gpt::{Gpt, GptConfig};
use ferrotron_models::trainer::ModelChunk;
use ferrotron_nn::{Axis, Module, Scope};
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, ErrorKind, Result, Tensor};
use std::ops::ControlFlow::{self, Break, Continue};

const SINGLE: [usize; 4] = [1; 4];

/// The texts that every rank gets, the tokens that rank 0 is told, and the bytes that tensor-parallel ranks send.
type Generated = (Vec<Vec<u32>>, Vec<(usize, u32)>, u64);

/// The rank's part of the model of `config` on `mesh`.
fn part(scope: &Scope, mesh: &Mesh, config: &GptConfig) -> Result<Gpt> {
    let stages = mesh.axis(Axis::Pipeline);
    let chunk = ModelChunk::chunks(config.num_layers, stages.rank(), stages.size(), 1)?.remove(0);
    Gpt::from_chunk(scope, mesh, config, &chunk)
}

/// Continues `requests` in a layout of tensor, context, data and pipeline parallelism; rank 0 ends texts as `until` says.
fn on_ranks(
    config: &GptConfig,
    [tensor, context, data, pipeline]: [usize; 4],
    requests: &[GenerationRequest],
    until: impl Fn(usize, u32) -> ControlFlow<()> + Sync,
) -> Result<Vec<Generated>> {
    let world = tensor * context * data * pipeline;
    let layout = ParallelDims::new(world, tensor, context, pipeline)?;
    let ranks = run_threads(world, &WorldConfig::default(), |world| {
        let mesh = Mesh::new(&world, layout, SequenceParallel::Off)?;
        let scope = Scope::new(&Device::cpu(1)?, DType::F64, 3);
        let parts = [part(&scope, &mesh, config)?];
        let model = LocalModel { parts: &parts, config, scope: &scope, mesh: &mesh };
        let mut told = Vec::new();
        let texts = generate_on_ranks(&model, requests, 2, |index, token| {
            told.push((index, token));
            until(index, token)
        })?;
        Ok((texts, told, mesh.axis(Axis::Tensor).traffic().bytes()))
    });
    ranks.into_iter().collect()
}

fn request(prompt: Vec<u32>, max_new_tokens: usize) -> GenerationRequest {
    GenerationRequest { prompt, max_new_tokens, sampling: Sampling::GREEDY }
}

/// Models of which no two tokens are close in the tests.
fn configs() -> [GptConfig; 2] {
    let wide = |config| GptConfig { init_method_std: 0.5, ..config };
    [GptConfig::gpt2(11, 4, 8, 4, 8), GptConfig::llama(11, 4, 8, 4, 2, 8)].map(wide)
}

/// Prompts of all lengths, which end, are broken off and slide at different times.
#[test]
fn texts_are_those_of_one_rank_in_every_layout() -> Result<()> {
    let until = |index: usize, token: u32| match (index, token) {
        (4, 7) => Break(()),
        _ => Continue(()),
    };
    for config in configs() {
        let requests: Vec<GenerationRequest> = [1_u32, 5, 3, 8, 5, 12, 1]
            .into_iter()
            .enumerate()
            .map(|(index, length)| {
                let prompt = (0..length).map(|i| (i * i * 7 + index as u32) % 11).collect();
                let sampling = Sampling {
                    temperature: [0.0, 1.0][index % 2],
                    seed: index as u64,
                    end_of_text: Some(4),
                    ..Sampling::GREEDY
                };
                let max_new_tokens = [14, 2, 0, 9, 14, 5, 6][index];
                GenerationRequest { sampling, ..request(prompt, max_new_tokens) }
            })
            .collect();
        let scope = Scope::new(&Device::cpu(1)?, DType::F64, 3);
        let want = generate_batch(&Gpt::new(&scope, &config)?, &requests, until)?;
        let added: usize = want.iter().zip(&requests).map(|(a, b)| a.len() - b.prompt.len()).sum();
        for layout in [
            SINGLE,
            [2, 1, 1, 1],
            [1, 2, 1, 1],
            [1, 1, 2, 1],
            [1, 1, 1, 2],
            [2, 1, 2, 1],
            [1, 1, 3, 2],
            [2, 2, 2, 1],
            [1, 3, 1, 2],
        ] {
            for (rank, (found, told, _)) in
                on_ranks(&config, layout, &requests, until)?.into_iter().enumerate()
            {
                assert_eq!(found, want, "{layout:?}, rank {rank}");
                assert_eq!(
                    told.len(),
                    if rank == 0 { added } else { 0 },
                    "{layout:?}, rank {rank}"
                );
            }
        }
    }
    Ok(())
}

/// Eight more tokens send as much, whatever stands before them: the keys and values of the prompt are not computed again.
#[test]
fn a_token_costs_one_position() -> Result<()> {
    let config = GptConfig::llama(11, 2, 8, 4, 2, 64);
    for layout in [[2, 1, 1, 1], [2, 2, 1, 1]] {
        let bytes = |prompt: u32, count: usize| -> Result<u64> {
            let request = request((0..prompt).map(|i| i % 11).collect(), count);
            let ranks = on_ranks(&config, layout, &[request], |_, _| Continue(()))?;
            Ok(ranks.iter().map(|(_, _, bytes)| bytes).sum())
        };
        let more = |prompt: u32| -> Result<u64> { Ok(bytes(prompt, 10)? - bytes(prompt, 2)?) };
        assert_eq!(more(4)?, more(48)?, "{layout:?}");
        assert!(bytes(48, 2)? > 2 * bytes(4, 2)?, "the prompt itself costs its positions");
    }
    Ok(())
}

#[test]
fn sequence_parallelism_and_damaged_weights_are_refused() -> Result<()> {
    let [config, _] = configs();
    let texts = [request(vec![1, 2], 3)];
    let layout = ParallelDims::new(2, 2, 1, 1)?;
    for refused in run_threads(2, &WorldConfig::default(), |world| {
        let mesh = Mesh::new(&world, layout, SequenceParallel::On)?;
        let scope = Scope::new(&Device::cpu(1)?, DType::F64, 3);
        let parts = [part(&scope, &mesh, &config)?];
        let model = LocalModel { parts: &parts, config: &config, scope: &scope, mesh: &mesh };
        generate_on_ranks(&model, &texts, 1, |_, _| Continue(()))
    }) {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("switch sequence parallelism off"), "{error}");
    }
    let scope = Scope::new(&Device::cpu(1)?, DType::F64, 3);
    let gpt = Gpt::new(&scope, &config)?;
    let params = gpt.params();
    let bias = params.iter().find(|param| param.name() == "blocks.1.mlp.fc.bias").unwrap();
    bias.leaf().set_value(&Tensor::full(scope.device(), DType::F64, &[32], f64::NAN)?)?;
    let mesh = Mesh::single();
    let model = LocalModel {
        parts: std::slice::from_ref(&gpt),
        config: &config,
        scope: &scope,
        mesh: &mesh,
    };
    let error = generate_on_ranks(&model, &texts, 1, |_, _| Continue(())).unwrap_err().to_string();
    assert!(error.contains("a logit is not finite"), "{error}");
    Ok(())
}

/// A rank that cannot make its caches, and a replica that cannot compute: all ranks have the error, and go on with the next
/// requests. A rank that cannot do its part of a shared model ends the others with its reason.
#[test]
fn an_error_of_one_rank_is_one_of_all() -> Result<()> {
    let [_, config] = configs();
    let (large, few) = (1 << 40, [request(vec![1, 2, 3, 4], 3), request(vec![4, 3, 2, 1], 3)]);
    let many = few.clone().map(|request| GenerationRequest { max_new_tokens: large, ..request });
    let longest = 1 << 32;
    // Petabytes of keys and values.
    let wide = GptConfig {
        num_attention_heads: 64,
        num_query_groups: 64,
        kv_channels: 256,
        max_position_embeddings: longest,
        ..config.clone()
    };
    let short = GptConfig { max_position_embeddings: 2, ..config.clone() };
    let scope = Scope::new(&Device::cpu(1)?, DType::F64, 3);
    let want = generate_batch(&Gpt::new(&scope, &config)?, &few, |_, _| Continue(()))?;
    for ([tensor, context, pipeline], other, requests, goes_on) in [
        ([2, 1, 1], &wide, &many, true),
        ([1, 2, 1], &wide, &many, true),
        ([1, 1, 2], &wide, &many, true),
        ([1, 1, 1], &wide, &many, true),
        ([1, 2, 1], &short, &few, true),
        ([1, 1, 1], &short, &few, true),
        ([1, 1, 2], &short, &few, false),
    ] {
        let layout = ParallelDims::new(2, tensor, context, pipeline)?;
        let ranks = run_threads(2, &WorldConfig::default(), |world| {
            let mesh = Mesh::new(&world, layout, SequenceParallel::Off)?;
            let generated = |own: &GptConfig, requests: &[GenerationRequest]| {
                let scope = Scope::new(&Device::cpu(1)?, DType::F64, 3);
                let parts = [part(&scope, &mesh, own)?];
                let model =
                    LocalModel { parts: &parts, config: &config, scope: &scope, mesh: &mesh };
                generate_on_ranks(&model, requests, 2, |_, _| Continue(()))
            };
            let own = if world.rank() == 1 { other } else { &config };
            let error = generated(own, requests).unwrap_err();
            match error.kind() {
                ErrorKind::Value => Ok((error.to_string(), generated(&config, &few)?)),
                _ => Err(error),
            }
        });
        let case = format!("{layout:?}, {} positions", other.max_position_embeddings);
        for (rank, ended) in ranks.into_iter().enumerate() {
            let line = match ended {
                Ok((line, texts)) => {
                    assert!(goes_on && texts == want, "{case}: {line}");
                    line
                }
                Err(error) => {
                    assert!(!goes_on, "{case}: {error}");
                    error.to_string()
                }
            };
            assert!(rank == 1 || line.contains("rank 1"), "{case}: {line}");
        }
    }
    Ok(())
}
