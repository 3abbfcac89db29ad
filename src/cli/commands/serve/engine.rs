//! Answers prompts: those that wait are scored together, on all ranks.
//!
//! Rank 0 has the requests and chooses tokens; it tells the others what to score. They wait in a broadcast, which has a
//! time limit, so rank 0 sends them something each second.

use ferrotron::models::data::tasks::{ScoreRequest, TokenScore};
use ferrotron::models::evaluate::LocalModel;
use ferrotron::models::generate::{GenerationRequest, Sampling, generate_batch};
use ferrotron::models::gpt::Gpt;
use ferrotron::models::score::{ScoreConfig, score};
use ferrotron::models::stop::StopFlag;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::parallel::agreement::broadcast_bytes;
use ferrotron::{Error, ErrorKind, Result};
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use super::api::{Completion, Prompt, first_stop};

/// Time between two messages to the other ranks.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// The prompts of a request.
pub struct Job {
    pub prompts: Vec<Prompt>,
    pub client: Box<dyn Client>,
}

/// Whoever waits for the completions of a request.
pub trait Client: Send {
    /// Called with all tokens that were added to a prompt so far: with none before the first one, and then behind each that
    /// is not the last one asked for. Returns whether anybody still waits.
    fn added(&mut self, prompt: usize, tokens: &[u32]) -> bool;

    /// Takes the completions, or the reason why there are none.
    fn answered(self: Box<Self>, completions: std::result::Result<Vec<Completion>, String>);
}

/// Told of all tokens that were added to a prompt, by its number; returns whether anybody still waits.
type Watch<'a> = dyn FnMut(usize, &[u32]) -> bool + 'a;

/// A model that answers prompts.
pub struct Engine<'a> {
    pub model: LocalModel<'a, Gpt>,
    pub tokenizer: &'a Tokenizer,
    pub micro_batch_size: usize,
}

impl Engine<'_> {
    /// Answers `jobs` on rank 0 until nobody can send any more.
    ///
    /// # Errors
    /// As the communication does. A model that fails answers with its error.
    pub fn answer_all(&self, jobs: &Receiver<Job>) -> Result<()> {
        let mut seed = 0;
        loop {
            let first = match jobs.recv_timeout(HEARTBEAT) {
                Ok(job) => job,
                Err(RecvTimeoutError::Timeout) => {
                    self.tell(&json!("wait"))?;
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => {
                    self.tell(&json!("end"))?;
                    return Ok(());
                }
            };
            let mut jobs: Vec<Job> = std::iter::once(first).chain(jobs.try_iter()).collect();
            let mut prompts: Vec<Prompt> =
                jobs.iter().flat_map(|job| job.prompts.iter().cloned()).collect();
            for prompt in &mut prompts {
                seed += 1;
                prompt.seed.get_or_insert(seed);
            }
            let owners: Vec<(usize, usize)> = (jobs.iter().enumerate())
                .flat_map(|(job, Job { prompts, .. })| {
                    (0..prompts.len()).map(move |own| (job, own))
                })
                .collect();
            let mut watch = |prompt: usize, tokens: &[u32]| {
                let (job, own) = owners[prompt];
                jobs[job].client.added(own, tokens)
            };
            let completions = match self.answer(&prompts, &mut watch) {
                Err(error) if error.kind() != ErrorKind::Communication => Err(error.to_string()),
                answered => Ok(answered?),
            };
            let mut completions = completions.map(Vec::into_iter);
            for job in jobs {
                let count = job.prompts.len();
                let own = completions.as_mut().map(|all| all.take(count).collect());
                job.client.answered(own.map_err(|error| error.clone()));
            }
        }
    }

    /// Scores what rank 0 asks for, on another rank, until it has told the end.
    ///
    /// # Errors
    /// As the communication does.
    pub fn follow(&self) -> Result<()> {
        let broken = || Error::value("serve", "rank 0 sent no request");
        loop {
            let message = broadcast_bytes(self.model.mesh.world(), Vec::new())?;
            let message: Value = serde_json::from_slice(&message).map_err(|_| broken())?;
            match message.as_str() {
                Some("wait") => continue,
                Some(_) => return Ok(()),
                None => {}
            }
            let (requests, top) = decode(&message).ok_or_else(broken)?;
            let config = ScoreConfig { micro_batch_size: self.micro_batch_size, top };
            match score(&self.model, &requests, config, &StopFlag::default(), |_| ()) {
                // Rank 0 has it, too, and answers with it.
                Err(error) if error.kind() == ErrorKind::Communication => return Err(error),
                _ => {}
            }
        }
    }

    fn tell(&self, message: &Value) -> Result<()> {
        broadcast_bytes(self.model.mesh.world(), message.to_string().into_bytes()).map(drop)
    }

    /// Scores requests on all ranks, at most so many likeliest tokens each.
    fn score(&self, requests: &[ScoreRequest], top: usize) -> Result<Vec<Vec<TokenScore>>> {
        if self.model.mesh.world().size() > 1 {
            self.tell(&encode(requests, top))?;
        }
        let config = ScoreConfig { micro_batch_size: self.micro_batch_size, top };
        // A signal is seen between requests.
        let scores = score(&self.model, requests, config, &StopFlag::default(), |_| ())?;
        Ok(scores.expect("a score that is not asked to stop has a result"))
    }

    fn answer(&self, prompts: &[Prompt], watch: &mut Watch) -> Result<Vec<Completion>> {
        let mut completions = self.generate(prompts, watch)?;
        // What is scored, and whose it is.
        let (mut requests, mut owners) = (Vec::new(), Vec::new());
        for (index, (prompt, completion)) in prompts.iter().zip(&completions).enumerate() {
            let tokens = [&prompt.tokens[..], &completion.tokens[..]].concat();
            let wants_next = is_single_step(prompt) && prompt.max_tokens == 1;
            let first_target =
                if prompt.echo && prompt.logprobs.is_some() { 1 } else { prompt.tokens.len() };
            let request = ScoreRequest { tokens, first_target, wants_next };
            if (wants_next || prompt.logprobs.is_some()) && request.num_scores() > 0 {
                requests.push(request);
                owners.push(index);
            }
        }
        let top = prompts.iter().filter_map(|prompt| prompt.logprobs).max().unwrap_or(1);
        let scores = match requests.is_empty() {
            true => Vec::new(),
            false => self.score(&requests, top.max(1))?,
        };
        for ((index, request), scores) in owners.into_iter().zip(&requests).zip(scores) {
            let completion = &mut completions[index];
            if let Some(next) = scores.last().filter(|_| request.wants_next) {
                let added = vec![next.token];
                *completion = self.completion(&prompts[index], added);
            }
            completion.scores = scores;
        }
        Ok(completions)
    }

    /// Continues the prompts that take more than a look at the likeliest next token.
    fn generate(&self, prompts: &[Prompt], watch: &mut Watch) -> Result<Vec<Completion>> {
        let several = prompts.iter().enumerate().filter(|(_, prompt)| !is_single_step(prompt));
        let several: Vec<(usize, &Prompt)> = several.collect();
        let mut added = match self.model.mesh.world().size() {
            1 => self.with_cache(&several, watch)?,
            _ => self.by_scores(&several, watch)?,
        }
        .into_iter();
        let completion = |prompt: &Prompt| match is_single_step(prompt) {
            true => self.completion(prompt, Vec::new()),
            false => self.completion(prompt, added.next().unwrap_or_default()),
        };
        Ok(prompts.iter().map(completion).collect())
    }

    /// Continues as many prompts together on a single rank as go through the model at once, with key-value caches.
    fn with_cache(&self, prompts: &[(usize, &Prompt)], watch: &mut Watch) -> Result<Vec<Vec<u32>>> {
        let [gpt] = self.model.parts else {
            return Err(Error::config("serve", "a rank must have one chunk of the model"));
        };
        let mut added = vec![Vec::new(); prompts.len()];
        for (prompts, added) in
            (prompts.chunks(self.micro_batch_size)).zip(added.chunks_mut(self.micro_batch_size))
        {
            // Nobody waits any more for the others.
            let waits = |&index: &usize| watch(prompts[index].0, &[]);
            let waiting: Vec<usize> = (0..prompts.len()).filter(waits).collect();
            let request = |&index: &usize| {
                let prompt = prompts[index].1;
                GenerationRequest {
                    prompt: prompt.tokens.clone(),
                    max_new_tokens: prompt.max_tokens,
                    sampling: self.sampling(prompt),
                }
            };
            let requests: Vec<GenerationRequest> = waiting.iter().map(request).collect();
            generate_batch(gpt, &requests, |place, token| {
                let index = waiting[place];
                let (number, prompt) = prompts[index];
                added[index].push(token);
                match self.is_stopped(prompt, &added[index]) || !watch(number, &added[index]) {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            })?;
        }
        Ok(added)
    }

    /// Continues prompts together on several ranks. Each token costs a forward over all positions.
    fn by_scores(&self, several: &[(usize, &Prompt)], watch: &mut Watch) -> Result<Vec<Vec<u32>>> {
        let prompts: Vec<&Prompt> = several.iter().map(|(_, prompt)| *prompt).collect();
        let mut added = vec![Vec::new(); prompts.len()];
        let mut active: Vec<usize> = (0..prompts.len()).collect();
        let samples = prompts.iter().any(|prompt| prompt.temperature > 0.0);
        let vocab = self.model.config.vocab_size;
        let top = if samples { vocab } else { 1 };
        active.retain(|&index| prompts[index].max_tokens > 0 && watch(several[index].0, &[]));
        while !active.is_empty() {
            let request = |&index: &usize| {
                let tokens = [&prompts[index].tokens[..], &added[index][..]].concat();
                ScoreRequest { first_target: tokens.len(), tokens, wants_next: true }
            };
            let requests: Vec<ScoreRequest> = active.iter().map(request).collect();
            let scores = self.score(&requests, top)?;
            let mut going_on = Vec::new();
            for ((&index, scores), request) in active.iter().zip(&scores).zip(&requests) {
                let (prompt, score) = (prompts[index], &scores[0]);
                let token = if prompt.temperature > 0.0 {
                    let mut logits = vec![f64::NEG_INFINITY; vocab];
                    score.top.iter().for_each(|&(id, logit)| logits[id as usize] = logit);
                    self.sampling(prompt).choose(&logits, request.tokens.len() as u64)
                } else {
                    score.token
                };
                if self.tokenizer.end_of_text() == Some(token) {
                    continue;
                }
                added[index].push(token);
                let tokens = &added[index];
                if tokens.len() < prompt.max_tokens
                    && !self.is_stopped(prompt, tokens)
                    && watch(several[index].0, tokens)
                {
                    going_on.push(index);
                }
            }
            active = going_on;
        }
        Ok(added)
    }

    fn sampling(&self, prompt: &Prompt) -> Sampling {
        Sampling {
            temperature: prompt.temperature,
            top_k: None,
            top_p: prompt.top_p,
            seed: prompt.seed.unwrap_or(0),
            end_of_text: self.tokenizer.end_of_text(),
        }
    }

    fn is_stopped(&self, prompt: &Prompt, added: &[u32]) -> bool {
        !prompt.stop.is_empty() && first_stop(&self.tokenizer.decode(added), &prompt.stop).is_some()
    }

    /// The completion of `prompt` by `tokens`, without scores.
    fn completion(&self, prompt: &Prompt, tokens: Vec<u32>) -> Completion {
        let ends = |token: &u32| self.tokenizer.end_of_text() == Some(*token);
        let text_tokens = tokens.split(ends).next().unwrap_or_default();
        let mut text = self.tokenizer.decode(text_tokens);
        let mut stopped = text_tokens.len() < prompt.max_tokens;
        if let Some(at) = first_stop(&text, &prompt.stop) {
            text.truncate(at);
            stopped = true;
        }
        Completion { tokens, text, stopped, scores: Vec::new() }
    }
}

/// Whether the likeliest next token, or none, is all that is asked for.
fn is_single_step(prompt: &Prompt) -> bool {
    prompt.max_tokens == 0 || (prompt.max_tokens == 1 && prompt.temperature == 0.0)
}

/// The message of rank 0 that asks for scores.
fn encode(requests: &[ScoreRequest], top: usize) -> Value {
    let request =
        |request: &ScoreRequest| json!([request.tokens, request.first_target, request.wants_next]);
    json!({ "top": top, "requests": requests.iter().map(request).collect::<Vec<_>>() })
}

fn decode(message: &Value) -> Option<(Vec<ScoreRequest>, usize)> {
    let request = |value: &Value| {
        let tokens = value[0].as_array()?.iter().map(|token| Some(token.as_u64()? as u32));
        Some(ScoreRequest {
            tokens: tokens.collect::<Option<_>>()?,
            first_target: value[1].as_u64()? as usize,
            wants_next: value[2].as_bool()?,
        })
    };
    let requests = message["requests"].as_array()?.iter().map(request).collect::<Option<_>>()?;
    Some((requests, message["top"].as_u64()? as usize))
}
