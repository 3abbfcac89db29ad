//! Answers prompts: those that wait are continued and scored together, on all ranks.
//!
//! Rank 0 has the requests; it tells the others what to continue and to score. They wait in a broadcast, which has a time
//! limit, so rank 0 sends them something each second.

use ferrotron::models::data::tasks::{ScoreRequest, TokenScore};
use ferrotron::models::evaluate::LocalModel;
use ferrotron::models::generate::{GenerationRequest, Sampling, generate_batch};
use ferrotron::models::generate_on_ranks::generate_on_ranks;
use ferrotron::models::gpt::Gpt;
use ferrotron::models::score::{ScoreConfig, score};
use ferrotron::models::stop::StopFlag;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::nn::Axis;
use ferrotron::parallel::agreement::broadcast_bytes;
use ferrotron::{Error, ErrorKind, Result};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use super::api::{Completion, Prompt, first_stop};
use super::message::Message;

/// Time between two messages to the other ranks.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// The prompts of a request.
pub struct Job {
    pub prompts: Vec<Prompt>,
    pub client: Box<dyn Client>,
}

/// Whoever waits for the completions of a request.
pub trait Client: Send {
    /// Called with all tokens that were added to a prompt so far: with none before the first one, and then behind each but
    /// one with which a stop is complete. Returns whether anybody still waits.
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
    /// Counts the tokens that are added to prompts.
    pub added_tokens: &'a AtomicU64,
}

impl Engine<'_> {
    /// Answers `jobs` on rank 0 until nobody can send any more.
    ///
    /// # Errors
    /// As the communication does, and those that [`is_of_all_ranks`](Engine::is_of_all_ranks) does not accept. A model that fails
    /// otherwise answers with its error.
    pub fn answer_all(&self, jobs: &Receiver<Job>) -> Result<()> {
        let mut seed = 0;
        loop {
            let first = match jobs.recv_timeout(HEARTBEAT) {
                Ok(job) => job,
                Err(RecvTimeoutError::Timeout) => {
                    self.tell(&Message::Wait)?;
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => {
                    self.tell(&Message::End)?;
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
                Err(error) if self.is_of_all_ranks(&error) => Err(error.to_string()),
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

    /// Continues and scores what rank 0 asks for, on another rank, until it has told the end.
    ///
    /// # Errors
    /// As the communication does, and those that [`is_of_all_ranks`](Engine::is_of_all_ranks) does not accept.
    pub fn follow(&self) -> Result<()> {
        loop {
            let message = broadcast_bytes(self.model.mesh.world(), Vec::new())?;
            let answered = match Message::decode(&message)? {
                Message::Wait => continue,
                Message::End => return Ok(()),
                Message::Score { requests, top } => {
                    let config = ScoreConfig { micro_batch_size: self.micro_batch_size, top };
                    let stop = StopFlag::default();
                    score(&self.model, &requests, config, &stop, |_| ()).map(drop)
                }
                Message::Generate(requests) => {
                    self.on_ranks(&requests, |_, _| ControlFlow::Continue(()))
                }
            };
            match answered {
                // Rank 0 has it, too, and answers with it.
                Err(error) if self.is_of_all_ranks(&error) => {}
                answered => answered?,
            }
        }
    }

    /// Whether all ranks have this error, so that they can go on. Any other may be of this rank alone, memory that it lacks say:
    /// the others wait for it, and are ended with its reason when it ends.
    fn is_of_all_ranks(&self, error: &Error) -> bool {
        self.model.mesh.world().size() == 1
            || matches!(error.kind(), ErrorKind::Value | ErrorKind::Config)
    }

    fn count_token(&self) {
        self.added_tokens.fetch_add(1, Relaxed);
    }

    fn tell(&self, message: &Message) -> Result<()> {
        broadcast_bytes(self.model.mesh.world(), message.encode()).map(drop)
    }

    /// Scores requests on all ranks, at most so many likeliest tokens each.
    fn score(&self, requests: &[ScoreRequest], top: usize) -> Result<Vec<Vec<TokenScore>>> {
        if self.model.mesh.world().size() > 1 {
            self.tell(&Message::Score { requests: requests.to_vec(), top })?;
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
                if self.tokenizer.end_of_text() != Some(next.token) {
                    self.count_token();
                }
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
        let mut added = self.with_cache(&several, watch)?.into_iter();
        let completion = |prompt: &Prompt| match is_single_step(prompt) {
            true => self.completion(prompt, Vec::new()),
            false => self.completion(prompt, added.next().unwrap_or_default()),
        };
        Ok(prompts.iter().map(completion).collect())
    }

    /// Continues as many prompts together as fill the model at once, with key-value caches.
    fn with_cache(&self, prompts: &[(usize, &Prompt)], watch: &mut Watch) -> Result<Vec<Vec<u32>>> {
        let mesh = self.model.mesh;
        let at_once =
            self.micro_batch_size * mesh.dp_cp().size() * mesh.axis(Axis::Pipeline).size();
        let mut added = vec![Vec::new(); prompts.len()];
        for (prompts, added) in prompts.chunks(at_once).zip(added.chunks_mut(at_once)) {
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
            if requests.is_empty() {
                continue;
            }
            let on_token = |place: usize, token: u32| {
                let index = waiting[place];
                let (number, prompt) = prompts[index];
                added[index].push(token);
                self.count_token();
                match self.is_stopped(prompt, &added[index]) || !watch(number, &added[index]) {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            };
            match self.model.parts {
                [gpt] if self.model.mesh.world().size() == 1 => {
                    generate_batch(gpt, &requests, on_token)?;
                }
                _ => {
                    self.tell(&Message::Generate(requests.clone()))?;
                    self.on_ranks(&requests, on_token)?;
                }
            }
        }
        Ok(added)
    }

    fn on_ranks(
        &self,
        requests: &[GenerationRequest],
        on_token: impl FnMut(usize, u32) -> ControlFlow<()>,
    ) -> Result<()> {
        generate_on_ranks(&self.model, requests, self.micro_batch_size, on_token).map(drop)
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

#[cfg(test)]
mod tests;
