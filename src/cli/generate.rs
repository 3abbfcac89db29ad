//! `ferrotron generate`.

use clap::Args;
use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::models::generate::{Sampling, generate as continue_tokens};
use ferrotron::models::gpt::Gpt;
use ferrotron::models::hugging_face;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::nn::{Module, Scope};
use ferrotron::{Error, Result};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use super::device_args::DeviceArgs;
use super::train::newest_run;

#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Run folder or checkpoint [default: the newest of runs/]
    #[arg(long, value_name = "PATH")]
    load: Option<PathBuf>,
    /// Text to continue
    #[arg(long, value_name = "TEXT", default_value = "\n")]
    prompt: String,
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
    #[command(flatten)]
    device: DeviceArgs,
}

/// A trained model with its tokenizer.
pub struct Loaded {
    pub scope: Scope,
    pub gpt: Gpt,
    pub tokenizer: Option<Tokenizer>,
}

impl Loaded {
    /// Loads a run folder, a checkpoint or a Hugging Face folder.
    pub fn open(path: &Path, device: &DeviceArgs) -> Result<Loaded> {
        let device_handle = device.open()?;
        if hugging_face::is_folder(path) {
            let scope = Scope::new(&device_handle, device.dtype()?, 0);
            let gpt = hugging_face::import(path, &device_handle, device.dtype()?)?;
            return Ok(Loaded { scope, gpt, tokenizer: hugging_face::read_tokenizer(path)? });
        }
        let checkpoint = Checkpoint::open(path)?;
        let scope = Scope::new(&device_handle, checkpoint.dtype()?, 0);
        let gpt = Gpt::new(&scope, checkpoint.config())?;
        checkpoint.load_params(&gpt.params())?;
        Ok(Loaded { scope, gpt, tokenizer: checkpoint.tokenizer().cloned() })
    }

    /// As [`Loaded::open`], of the newest run if none is named, with the tokenizer that text needs.
    pub fn with_tokenizer(
        path: Option<&PathBuf>,
        device: &DeviceArgs,
    ) -> Result<(Loaded, Tokenizer)> {
        let newest = || match newest_run() {
            Some((_, path)) => Ok(path),
            None => Err(Error::config(
                "--load",
                "there is no run in runs/: train one first or name a checkpoint",
            )),
        };
        let path = path.cloned().map_or_else(newest, Ok)?;
        let mut loaded = Self::open(&path, device)?;
        match loaded.tokenizer.take() {
            Some(tokenizer) => Ok((loaded, tokenizer)),
            None => Err(Error::config("--load", format!("{} has no tokenizer", path.display()))),
        }
    }
}

/// Continues the prompt and prints each piece as it comes.
pub fn generate(args: &GenerateArgs) -> Result<ExitCode> {
    let (loaded, tokenizer) = Loaded::with_tokenizer(args.load.as_ref(), &args.device)?;
    let prompt = tokenizer.encode(&args.prompt)?;
    let sampling = Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        seed: args.seed,
    };
    let mut printer = Printer::new(&tokenizer, &prompt);
    print!("{}", args.prompt);
    let tokens = continue_tokens(
        &loaded.gpt,
        &loaded.scope,
        &prompt,
        args.max_new_tokens,
        &sampling,
        |token| {
            printer.push(token);
        },
    )?;
    drop(tokens);
    println!();
    Ok(ExitCode::SUCCESS)
}

/// Prints tokens as text; a character that spans several tokens waits for the last of them.
struct Printer<'a> {
    tokenizer: &'a Tokenizer,
    tokens: Vec<u32>,
    printed: usize,
}

impl<'a> Printer<'a> {
    fn new(tokenizer: &'a Tokenizer, prompt: &[u32]) -> Self {
        Printer { tokenizer, printed: tokenizer.decode(prompt).len(), tokens: prompt.to_vec() }
    }

    fn push(&mut self, token: u32) {
        self.tokens.push(token);
        let text = self.tokenizer.decode(&self.tokens);
        if !text.ends_with('\u{FFFD}')
            && let Some(new) = text.get(self.printed..)
        {
            print!("{new}");
            // A closed pipe is noticed by the final newline.
            let _ = std::io::stdout().flush();
            self.printed = text.len();
        }
    }
}

/// A short sample that starts from a line break, or from the first token of the vocabulary.
pub fn sample(gpt: &Gpt, scope: &Scope, tokenizer: &Tokenizer, length: usize) -> Result<String> {
    let prompt = tokenizer.encode("\n").unwrap_or_else(|_| vec![0]);
    let sampling = Sampling { temperature: 0.8, top_k: None, top_p: None, seed: 1234 };
    let tokens = continue_tokens(gpt, scope, &prompt, length, &sampling, |_| {})?;
    Ok(tokenizer.decode(&tokens))
}
