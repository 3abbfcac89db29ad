use super::*;
use ferrotron::models::gpt::GptConfig;
use ferrotron::models::trainer::ModelChunk;
use ferrotron::nn::Scope;
use ferrotron::parallel::collective::{WorldConfig, run_threads};
use ferrotron::parallel::mesh::{Mesh, ParallelDims};
use ferrotron::parallel::tensor_parallel::SequenceParallel;
use ferrotron::{DType, Device};
use std::sync::{Mutex, mpsc};

/// A client that waits for so many tokens, and tells how often it was called.
struct Leaving {
    tokens: usize,
    calls: mpsc::Sender<usize>,
}

impl Client for Leaving {
    fn added(&mut self, _: usize, tokens: &[u32]) -> bool {
        self.calls.send(tokens.len()).unwrap();
        tokens.len() < self.tokens
    }

    fn answered(self: Box<Self>, _: std::result::Result<Vec<Completion>, String>) {}
}

/// A greedy prompt for nine tokens.
fn prompt(tokens: &[u32]) -> Prompt {
    Prompt {
        tokens: tokens.to_vec(),
        max_tokens: 9,
        temperature: 0.0,
        top_p: None,
        seed: None,
        stop: Vec::new(),
        logprobs: None,
        echo: false,
    }
}

/// Runs `test` with the engine of a small model on one rank.
fn on_one_rank(test: impl FnOnce(Engine)) {
    let config = GptConfig::gpt2(256, 1, 8, 2, 16);
    let (scope, mesh) = (Scope::new(&Device::cpu(1).unwrap(), DType::F32, 1), Mesh::single());
    let parts = [Gpt::new(&scope, &config).unwrap()];
    let model = LocalModel { parts: &parts, config: &config, scope: &scope, mesh: &mesh };
    let (tokenizer, added_tokens) = (Tokenizer::Byte, AtomicU64::new(0));
    test(Engine { model, tokenizer: &tokenizer, micro_batch_size: 2, added_tokens: &added_tokens });
}

/// Nothing is computed for a client that has left: each of its prompts is looked at once.
#[test]
fn work_for_a_client_ends_when_it_leaves() {
    on_one_rank(|engine| {
        let prompt = prompt(&[1, 2]);
        let (sender, jobs) = mpsc::channel();
        let mut told = Vec::new();
        for (prompts, tokens) in [(100, 0), (1, 3), (1, 99)] {
            let (calls, told_here) = mpsc::channel();
            let client = Box::new(Leaving { tokens, calls });
            sender.send(Job { prompts: vec![prompt.clone(); prompts], client }).unwrap();
            told.push(told_here);
        }
        drop(sender);
        engine.answer_all(&jobs).unwrap();
        let told: Vec<Vec<usize>> = told.iter().map(|told| told.try_iter().collect()).collect();
        assert_eq!(told, [vec![0; 100], (0..4).collect(), (0..10).collect()]);
        assert_eq!(engine.added_tokens.load(Relaxed), 3 + 9);
    });
}

/// Tokens count when they are added: one that ends its text by `stop`, too, and the only one of a prompt.
#[test]
fn each_added_token_counts_once() {
    on_one_rank(|engine| {
        let whole = prompt(&[1, 2]);
        let added = engine.answer(std::slice::from_ref(&whole), &mut |_, _| true).unwrap();
        assert_eq!((added[0].tokens.len(), engine.added_tokens.swap(0, Relaxed)), (9, 9));
        let stop = vec![engine.tokenizer.decode(&added[0].tokens[..1])];
        for prompt in [Prompt { stop, ..whole.clone() }, Prompt { max_tokens: 1, ..whole }] {
            let added = engine.answer(&[prompt], &mut |_, _| true).unwrap();
            assert_eq!((added[0].tokens.len(), engine.added_tokens.swap(0, Relaxed)), (1, 1));
        }
    });
}

/// A stage whose model takes two positions fails at a prompt of three: both ranks end with its reason.
#[test]
fn a_rank_that_fails_alone_ends_the_server() {
    let config = GptConfig::llama(256, 2, 8, 4, 2, 16);
    let layout = ParallelDims::new(2, 1, 1, 2).unwrap();
    let (calls, _told) = mpsc::channel();
    let (sender, jobs) = mpsc::channel();
    let client = Box::new(Leaving { tokens: 99, calls });
    sender.send(Job { prompts: vec![prompt(&[1, 2, 3])], client }).unwrap();
    // Without an error the server goes on.
    drop(sender);
    let jobs = Mutex::new(jobs);
    let ranks = run_threads(2, &WorldConfig::default(), |world| {
        let mesh = Mesh::new(&world, layout, SequenceParallel::Off)?;
        let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1);
        let (rank, tokenizer) = (world.rank(), Tokenizer::Byte);
        let chunk = ModelChunk::chunks(2, rank, 2, 1)?.remove(0);
        let own = GptConfig { max_position_embeddings: [16, 2][rank], ..config.clone() };
        let parts = [Gpt::from_chunk(&scope, &mesh, &own, &chunk)?];
        let model = LocalModel { parts: &parts, config: &config, scope: &scope, mesh: &mesh };
        let engine = Engine {
            model,
            tokenizer: &tokenizer,
            micro_batch_size: 2,
            added_tokens: &AtomicU64::new(0),
        };
        match rank {
            0 => engine.answer_all(&jobs.lock().unwrap()),
            _ => engine.follow(),
        }
    });
    let [first, second] = [0, 1].map(|rank| ranks[rank].as_ref().unwrap_err().to_string());
    assert!(first.contains("rank 1 ended with an error") && first.contains(&second), "{first}");
}
