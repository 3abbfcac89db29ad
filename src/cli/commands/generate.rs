//! `ferrotron generate`.

use clap::Args;
use ferrotron::models::evaluate::LocalModel;
use ferrotron::models::generate::{GenerationRequest, Sampling, generate_batch};
use ferrotron::models::generate_on_ranks::generate_on_ranks;
use ferrotron::models::gpt::Gpt;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::nn::Axis;
use ferrotron::parallel::agreement::Facts;
use ferrotron::tensor::At;
use ferrotron::{Error, Result};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::cli::args::device::DeviceArgs;
use crate::cli::args::ranks::RankArgs;
use crate::cli::job::{ModelRank, all_ready_with, run_on_ranks};
use crate::cli::loaded::{Loaded, is_bert, named_or_newest};
use crate::cli::output;
use crate::cli::sample::line_break;

#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Run folder, checkpoint or Hugging Face folder of a GPT [default: the newest of runs/]
    #[arg(long, value_name = "PATH")]
    load: Option<PathBuf>,
    /// Text to continue; several are continued together [default: a line break, or the first token where there is none]
    #[arg(long, value_name = "TEXT", num_args = 1..)]
    prompt: Vec<String>,
    /// File of texts to continue, one a line
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompts_file: Option<PathBuf>,
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
    #[command(flatten)]
    ranks: RankArgs,
}

/// Continues the prompt and prints each piece as it comes; several prompts together, printing all texts at the end.
pub fn generate(args: &GenerateArgs) -> Result<ExitCode> {
    let path = named_or_newest(args.load.as_ref())?;
    if is_bert(&path)? {
        let path = path.display();
        let message = format!("'{path}' holds a BERT, which continues no text: name a GPT");
        return Err(Error::config("--load", message));
    }
    run_on_ranks(&args.ranks, &args.device, |place| {
        let (loaded, requests) =
            all_ready_with(place, prepare(args, &path, place), |(_, requests)| facts(requests))?;
        print(&loaded, &requests, place)?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Loads the model, or this rank's part of it, and reads what is to be continued.
fn prepare(
    args: &GenerateArgs,
    path: &Path,
    place: &ModelRank,
) -> Result<(Loaded<Gpt>, Vec<GenerationRequest>)> {
    let loaded = Loaded::<Gpt>::open_on(path, &args.device, args.ema, place)?;
    let tokenizer = tokenizer_of(&loaded, path)?;
    let sampling = Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        seed: args.seed,
        end_of_text: tokenizer.end_of_text(),
    };
    sampling.validate()?; // before anything is printed
    let max_new_tokens = args.max_new_tokens;
    let request = |prompt| GenerationRequest { prompt, max_new_tokens, sampling };
    let requests = prompts(args, tokenizer)?.into_iter().map(request).collect();
    Ok((loaded, requests))
}

fn tokenizer_of<'a>(loaded: &'a Loaded<Gpt>, path: &Path) -> Result<&'a Tokenizer> {
    loaded.tokenizer.as_ref().ok_or_else(|| {
        let message =
            format!("{0} has no tokenizer: put its tokenizer.json into {0}", path.display());
        Error::config("--load", message)
    })
}

/// The facts that all ranks must have alike.
fn facts(requests: &[GenerationRequest]) -> Facts {
    let mut hasher = DefaultHasher::new();
    requests.iter().for_each(|request| request.prompt.hash(&mut hasher));
    let prompts = format!("digest {:016x} (texts: {})", hasher.finish(), requests.len());
    let rule = requests.first().map(|request| (request.max_new_tokens, request.sampling));
    [("--prompt".to_string(), prompts), ("the choice of tokens".to_string(), format!("{rule:?}"))]
        .into()
}

/// Continues a text and prints each piece as it comes, or several and prints all at the end; on the first rank.
fn print(loaded: &Loaded<Gpt>, requests: &[GenerationRequest], place: &ModelRank) -> Result<()> {
    let mesh = &place.mesh;
    let Some(tokenizer) = &loaded.tokenizer else { return Ok(()) };
    let mut printer = match requests {
        [request] if mesh.rank() == 0 => Some(Printer::new(tokenizer, &request.prompt)),
        _ => None,
    };
    let on_token = |_, token| {
        if let Some(printer) = &mut printer {
            printer.push(token);
        }
        ControlFlow::Continue(())
    };
    let texts = match mesh.world().size() {
        1 => generate_batch(&loaded.model, requests, on_token),
        _ => {
            let parts = std::slice::from_ref(&loaded.model);
            let model = LocalModel { parts, config: &loaded.config, scope: &loaded.scope, mesh };
            // As many at once as give every stage of the pipeline something to do.
            let own = requests.len().div_ceil(mesh.dp_cp().size());
            let at_once = own.div_ceil(mesh.axis(Axis::Pipeline).size());
            generate_on_ranks(&model, requests, at_once, on_token)
        }
    };
    if let Some(printer) = printer {
        printer.finish();
        return texts.map(drop);
    }
    let texts = texts?;
    if mesh.rank() == 0 {
        for (index, text) in texts.iter().enumerate() {
            output::line(&format!("--- text {} of {}", index + 1, texts.len()));
            output::line(&tokenizer.decode(text));
        }
    }
    Ok(())
}

/// The tokens of each text to continue.
fn prompts(args: &GenerateArgs, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>> {
    if let Some(path) = &args.prompts_file {
        let refuse =
            |why: String| Error::config("--prompts-file", format!("'{}' {why}", path.display()));
        let text = std::fs::read_to_string(path)
            .map_err(|error| refuse(format!("cannot be read: {error}")))?;
        if let Some(empty) = text.lines().position(str::is_empty) {
            return Err(refuse(format!("has an empty line {}: name a text in each", empty + 1)));
        }
        if text.is_empty() {
            return Err(refuse("is empty: it needs a text a line".into()));
        }
        return text.lines().map(|line| tokenizer.encode(line).at("--prompts-file")).collect();
    }
    if args.prompt.iter().any(String::is_empty) {
        let message = "is empty: name a text, or leave it out to begin with a line break";
        return Err(Error::config("--prompt", message));
    }
    match &args.prompt[..] {
        [] => Ok(vec![line_break(tokenizer)]),
        texts => texts.iter().map(|text| tokenizer.encode(text).at("--prompt")).collect(),
    }
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

    fn finish(mut self) {
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
