//! `ferrotron serve`: an HTTP server that answers OpenAI's completion requests with a trained model.

mod api;
mod counted;
mod engine;
mod http;
mod message;
mod stream;

use clap::Args;
use ferrotron::models::evaluate::LocalModel;
use ferrotron::models::gpt::Gpt;
use ferrotron::nn::Axis;
use ferrotron::parallel::mesh::Mesh;
use ferrotron::{Error, Result};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, mpsc};

use crate::cli::args::device::DeviceArgs;
use crate::cli::args::ranks::RankArgs;
use crate::cli::exit_signals::ExitSignals;
use crate::cli::job::{ModelRank, all_ready, run_on_ranks};
use crate::cli::loaded::{Loaded, check_vocab_size, is_bert, named_or_newest};
use crate::cli::output;
use engine::Engine;
use http::Service;

#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Run folder, checkpoint or Hugging Face folder of a GPT [default: the newest of runs/]
    #[arg(long, value_name = "PATH")]
    load: Option<PathBuf>,
    /// Address at which requests are taken; 0.0.0.0 for those of other machines
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: String,
    /// Port at which requests are taken; 0 for any that is free
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    port: u16,
    /// Prompts that go through the model at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=65536))]
    micro_batch_size: u32,
    /// Take the moving average of the weights, which a run with --ema-decay keeps
    #[arg(long)]
    ema: bool,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    ranks: RankArgs,
}

/// Serves until a signal asks it to stop; requests that have come are answered first.
pub fn serve(args: &ServeArgs) -> Result<ExitCode> {
    let path = named_or_newest(args.load.as_ref())?;
    if is_bert(&path)? {
        let message =
            format!("'{}' holds a BERT, which continues no text: name a GPT", path.display());
        return Err(Error::config("--load", message));
    }
    run_on_ranks(&args.ranks, &args.device, |place| {
        // Until the model is loaded a signal ends the process.
        let signals = ExitSignals::register(None)?;
        let ready = all_ready(place, prepare(args, &path, place))?;
        serve_on(args, &path, place, ready, &signals)
    })
}

/// Loads the model; rank 0 listens already, so that a port in use is told at once.
fn prepare(
    args: &ServeArgs,
    path: &Path,
    place: &ModelRank,
) -> Result<(Loaded<Gpt>, Option<TcpListener>)> {
    let listen = || {
        TcpListener::bind((args.host.as_str(), args.port)).map_err(|error| {
            let message = format!(
                "cannot listen at {}:{}: {error}; choose another port, or 0 for any that is free",
                args.host, args.port
            );
            Error::config("--port", message)
        })
    };
    let listener = (place.mesh.rank() == 0).then(listen).transpose()?;
    let loaded = Loaded::<Gpt>::open_on(path, &args.device, args.ema, place)?;
    let tokenizer = loaded.tokenizer.as_ref().ok_or_else(|| {
        let message =
            format!("{0} has no tokenizer: put its tokenizer.json into {0}", path.display());
        Error::config("--load", message)
    })?;
    check_vocab_size(loaded.config.vocab_size, tokenizer.vocab_size())?;
    Ok((loaded, listener))
}

/// The longest text of a prompt and its completion on `mesh`, whose ranks along the context axis share padded sequences.
fn longest(positions: usize, mesh: &Mesh) -> usize {
    match mesh.axis(Axis::Context).size() {
        1 => positions,
        ranks => positions - positions % (2 * ranks),
    }
}

fn serve_on(
    args: &ServeArgs,
    path: &Path,
    place: &ModelRank,
    (loaded, listener): (Loaded<Gpt>, Option<TcpListener>),
    signals: &ExitSignals,
) -> Result<ExitCode> {
    let Loaded { model, config, scope, tokenizer, .. } = &loaded;
    let Some(tokenizer) = tokenizer else { return Ok(ExitCode::FAILURE) };
    let (parts, mesh) = (std::slice::from_ref(model), &place.mesh);
    let model = LocalModel { parts, config, scope, mesh };
    let micro_batch_size = args.micro_batch_size as usize;
    let added_tokens = Arc::new(AtomicU64::new(0));
    let engine = Engine { model, tokenizer, micro_batch_size, added_tokens: &added_tokens };
    let stop = signals.stop_flag()?;
    let Some(listener) = listener else {
        engine.follow()?;
        return Ok(ExitCode::SUCCESS);
    };
    let address = listener.local_addr().map_err(|error| Error::io("serve", error.to_string()))?;
    let (sender, jobs) = mpsc::channel();
    let service = Service {
        tokenizer: Arc::new(tokenizer.clone()),
        vocab_size: config.vocab_size,
        longest: longest(config.max_position_embeddings, mesh),
        model: path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(),
        jobs: Mutex::new(sender),
        count: Default::default(),
        added_tokens: added_tokens.clone(),
    };
    output::report(&format!("listening at http://{address}/v1/completions"));
    std::thread::scope(|threads| {
        let server = threads.spawn(|| http::serve(listener, service, &stop));
        let answered = engine.answer_all(&jobs);
        if answered.is_err() {
            stop.set();
        }
        drop(jobs);
        let served =
            server.join().map_err(|_| Error::io("serve", "the server's thread panicked"))?;
        answered.and(served)
    })?;
    Ok(ExitCode::SUCCESS)
}
