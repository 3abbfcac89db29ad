//! `ferrotron generate`.

use clap::Args;
use ferrotron::models::bert::Bert;
use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::models::generate::{Sampling, generate as continue_tokens};
use ferrotron::models::gpt::Gpt;
use ferrotron::models::hugging_face;
use ferrotron::models::stop::StopFlag;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::models::trainer::{Model, ModelChunk};
use ferrotron::nn::Scope;
use ferrotron::parallel::mesh::Mesh;
use ferrotron::tensor::At;
use ferrotron::{DType, Device, Error, Result};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::cli::args::device::DeviceArgs;
use crate::cli::output;
use crate::cli::run_folder::newest_run;

#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Run folder or checkpoint [default: the newest of runs/]
    #[arg(long, value_name = "PATH")]
    load: Option<PathBuf>,
    /// Text to continue [default: a line break, or the first token where there is none]
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Tokens to add
    #[arg(long, value_name = "N", default_value_t = 300)]
    max_new_tokens: usize,
    /// Divides the logits; 0 takes the likeliest token
    #[arg(long, value_name = "X", default_value_t = 0.8)]
    temperature: f64,
    /// Choose among the K likeliest tokens
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Choose among the likeliest tokens that have this share of the probability
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    /// Seed of the choice
    #[arg(long, value_name = "N", default_value_t = 1234)]
    seed: u64,
    /// Take the moving average of the weights, which a run with --ema-decay keeps
    #[arg(long)]
    ema: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// A trained model with its tokenizer.
pub struct Loaded {
    pub gpt: Gpt,
    pub tokenizer: Option<Tokenizer>,
    /// The checkpoint of both, unless they come from a Hugging Face folder.
    pub checkpoint: Option<Checkpoint>,
}

impl Loaded {
    /// Loads a run folder, a checkpoint or a Hugging Face folder; with `averaged` the moving average of a run's weights.
    pub fn open(path: &Path, device: &DeviceArgs, averaged: bool) -> Result<Loaded> {
        let device_handle = device.open()?;
        if hugging_face::is_folder(path) {
            if averaged {
                let message = format!("{} has no moving average: leave it out", path.display());
                return Err(Error::config("--ema", message));
            }
            let gpt = hugging_face::import(path, &device_handle, folder_dtype(path, device)?)?;
            return Ok(Loaded {
                gpt,
                tokenizer: hugging_face::read_tokenizer(path)?,
                checkpoint: None,
            });
        }
        if is_bert(path)? {
            let path = path.display();
            let message = format!("'{path}' holds a BERT, which continues no text: name a GPT");
            return Err(Error::config("--load", message));
        }
        let checkpoint = open_checkpoint(path, averaged)?;
        let gpt = read(&checkpoint, &device_handle, device.given_dtype()?)?;
        Ok(Loaded { gpt, tokenizer: checkpoint.tokenizer().cloned(), checkpoint: Some(checkpoint) })
    }

    /// Loads like [`Loaded::open`], the newest run if `path` is `None`, with the tokenizer that text needs.
    pub fn with_tokenizer(
        path: Option<&PathBuf>,
        device: &DeviceArgs,
        averaged: bool,
    ) -> Result<(Loaded, Tokenizer)> {
        let path = named_or_newest(path)?;
        let mut loaded = Self::open(&path, device, averaged)?;
        match loaded.tokenizer.take() {
            Some(tokenizer) => Ok((loaded, tokenizer)),
            None => Err(Error::config(
                "--load",
                format!("{0} has no tokenizer: put its tokenizer.json into {0}", path.display()),
            )),
        }
    }
}

/// Whether `path` is a checkpoint of a BERT.
pub fn is_bert(path: &Path) -> Result<bool> {
    Ok(!hugging_face::is_folder(path)
        && Checkpoint::peek(path)?.model().architecture == Bert::ARCHITECTURE)
}

/// Opens a checkpoint; with `averaged`, with the moving average for its weights.
pub fn open_checkpoint(path: &Path, averaged: bool) -> Result<Checkpoint> {
    let checkpoint = Checkpoint::open(path)?;
    if averaged { checkpoint.averaged() } else { Ok(checkpoint) }
}

/// The path, or else the newest run.
pub fn named_or_newest(path: Option<&PathBuf>) -> Result<PathBuf> {
    let newest = || match newest_run() {
        Some((_, path)) => Ok(path),
        None => Err(Error::config(
            "--load",
            "there is no run in runs/: train one first or name a checkpoint",
        )),
    };
    path.cloned().map_or_else(newest, Ok)
}

/// The model of `checkpoint` in the dtype that was asked for, or in that of the checkpoint.
pub fn read<M: Model>(checkpoint: &Checkpoint, device: &Device, dtype: Option<DType>) -> Result<M> {
    let held = checkpoint.dtype()?;
    let dtype = dtype.unwrap_or(held);
    let config = M::config_from(checkpoint)?;
    let whole = ModelChunk::whole(M::num_blocks(&config));
    let kept = checkpoint.kept_in_fp32()?;
    let empty = |dtype| {
        let scope = Scope::new(device, dtype, 0);
        let scope = if dtype == held { scope.with_accumulator_dtype(&kept) } else { scope };
        M::new_chunk(&scope, &Mesh::single(), &config, &whole)
    };
    // f32, bf16 and f16 are converted while they are read.
    let read_as = if (held == DType::F64) == (dtype == DType::F64) { dtype } else { held };
    let model = empty(read_as)?;
    checkpoint.load_params(&model.params())?;
    if read_as == dtype {
        return Ok(model);
    }
    let converted = empty(dtype)?;
    for (to, from) in converted.params().iter().zip(model.params()) {
        to.leaf().set_value(&from.leaf().value()?.cast(dtype)?)?;
    }
    Ok(converted)
}

/// The dtype that was asked for, or the one in which no weight of a Hugging Face folder is rounded.
fn folder_dtype(folder: &Path, device: &DeviceArgs) -> Result<DType> {
    if let Some(dtype) = device.given_dtype()? {
        return Ok(dtype);
    }
    let stored = hugging_face::stored_dtypes(folder)?;
    let dtype = hugging_face::common_dtype(&stored);
    if stored.len() > 1 {
        let names: Vec<String> = stored.iter().map(DType::to_string).collect();
        output::note(&format!(
            "'{}' has weights in {}: read as {dtype}, which holds all of them exactly",
            folder.display(),
            names.join(" and ")
        ));
    }
    Ok(dtype)
}

/// Continues the prompt and prints each piece as it comes.
pub fn generate(args: &GenerateArgs) -> Result<ExitCode> {
    let (loaded, tokenizer) = Loaded::with_tokenizer(args.load.as_ref(), &args.device, args.ema)?;
    let prompt = match args.prompt.as_deref() {
        Some("") => {
            let message = "is empty: name a text, or leave it out to begin with a line break";
            return Err(Error::config("--prompt", message));
        }
        Some(text) => tokenizer.encode(text).at("--prompt")?,
        None => line_break(&tokenizer),
    };
    let sampling = Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        seed: args.seed,
        end_of_text: tokenizer.end_of_text(),
    };
    let mut printer = Printer::new(&tokenizer, &prompt);
    let all = continue_tokens(&loaded.gpt, &prompt, args.max_new_tokens, &sampling, |token| {
        printer.push(token);
        ControlFlow::Continue(())
    });
    printer.finish();
    all.map(|_| ExitCode::SUCCESS)
}

/// A short sample; `None` if the program is asked to stop.
pub fn sample(
    gpt: &Gpt,
    tokenizer: &Tokenizer,
    length: usize,
    stop: &StopFlag,
) -> Result<Option<String>> {
    let end_of_text = tokenizer.end_of_text();
    let sampling = Sampling { temperature: 0.8, top_k: None, top_p: None, seed: 1234, end_of_text };
    let until_stopped = |_| match stop.is_set() {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    };
    let tokens = continue_tokens(gpt, &line_break(tokenizer), length, &sampling, until_stopped)?;
    Ok((!stop.is_set()).then(|| tokenizer.decode(&tokens)))
}

/// The tokens of a line break, or the first of a vocabulary that has none.
fn line_break(tokenizer: &Tokenizer) -> Vec<u32> {
    let found = tokenizer.encode("\n").ok().filter(|tokens| !tokens.is_empty());
    found.unwrap_or_else(|| vec![0])
}

/// Prints tokens as text; a character that spans several tokens waits for the last of them.
struct Printer<'a> {
    tokenizer: &'a Tokenizer,
    tokens: Vec<u32>,
    printed: usize,
}

impl<'a> Printer<'a> {
    fn new(tokenizer: &'a Tokenizer, prompt: &[u32]) -> Self {
        let text = tokenizer.decode(prompt);
        output::print(&text);
        Printer { tokenizer, printed: text.len(), tokens: prompt.to_vec() }
    }

    fn push(&mut self, token: u32) {
        self.tokens.push(token);
        let text = self.tokenizer.decode(&self.tokens);
        if !text.ends_with('\u{FFFD}') {
            self.print_rest(&text);
        }
    }

    fn finish(&mut self) {
        let text = self.tokenizer.decode(&self.tokens);
        self.print_rest(&text);
        output::line("");
    }

    fn print_rest(&mut self, text: &str) {
        if let Some(new) = text.get(self.printed..) {
            output::print(new);
            self.printed = text.len();
        }
    }
}
