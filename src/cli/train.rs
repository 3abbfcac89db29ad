//! `ferrotron train`.

use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::models::data::Dataset;
use ferrotron::models::entropy::bigram_entropy;
use ferrotron::models::evaluate::Evaluation;
use ferrotron::models::memory::{self, StageMemory};
use ferrotron::models::run::{Ended, Intervals, Outcome, RunConfig, run};
use ferrotron::models::stop::StopFlag;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::models::traffic::{StepTraffic, expected_traffic};
use ferrotron::models::trainer::Trainer;
use ferrotron::nn::{Axis, Scope, Sharding};
use ferrotron::parallel::launch::{INTERRUPTED, RankEnvironment};
use ferrotron::parallel::mesh::Mesh;
use ferrotron::{Device, Error, Result};
use serde_json::json;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use super::device_args::Place;
use super::generate::sample;
use super::job::{self, Job};
use super::offload_args::OFFLOAD;
use super::options::{overridden, values, without};
use super::parallel_args::{LAYOUT, RECOMPUTE};
use super::precision_args::meaningless_in;
use super::progress::Progress;
use super::train_args::TrainArgs;
use super::{bytes, corpus, failed, memory_limits, output, run_folder};

/// Options that belong to one process of a run and are not remembered.
const PASSING: &[&str] = &[
    "--load",
    "--save",
    "--metrics",
    "--trace",
    "--trace-steps",
    "--exit-interval",
    "--offload-folder",
    "--rendezvous-port",
    "--distributed-timeout-minutes",
    "--transport",
    "--memory-limit",
    "--device",
    "--enable-cuda-graph",
];

/// Evaluations of more tokens than this are not searched for their bigrams, which takes memory and
/// time of its own.
const BIGRAM_TOKENS: u64 = 10_000_000;

/// Puts the options with which a run was started in front of those that continue it; returns them all
/// and those that the next checkpoint remembers.
///
/// How many ranks there were does not matter to `rank`, which a launcher has started. The options of the
/// layout are remembered together or not at all, and so are those of recomputation, and those of offloading. What
/// the precision that is typed does not have is forgotten.
pub fn with_saved_options(
    typed: &[OsString],
    rank: Option<&RankEnvironment>,
) -> Result<(Vec<OsString>, Vec<String>)> {
    let saved = match values(typed, "--load").as_deref() {
        Some([path]) => {
            if values(typed, "--tokenizer").is_some() {
                return Err(Error::config(
                    "--tokenizer",
                    "a run keeps the tokenizer that it was started with",
                ));
            }
            let mut saved = saved_options(&Checkpoint::peek(Path::new(path))?);
            if rank.is_some() {
                saved = without(&saved, &["--nproc"]);
            }
            let alone = values(typed, "--nproc").is_some_and(|nproc| nproc == ["1"]);
            let any = |names: &[&str]| names.iter().any(|name| values(typed, name).is_some());
            if alone || any(LAYOUT) {
                saved = without(&saved, LAYOUT);
            }
            for together in [RECOMPUTE, OFFLOAD] {
                if any(together) {
                    saved = without(&saved, together);
                }
            }
            saved = without(&saved, meaningless_in(typed));
            saved
        }
        _ => Vec::new(),
    };
    let options = overridden(&saved, typed);
    let remembered = without(&options, PASSING);
    let remembered = remembered.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    Ok((options, remembered))
}

/// The options with which a checkpoint's run was started.
pub fn saved_options(checkpoint: &Checkpoint) -> Vec<OsString> {
    let words = checkpoint.run().as_array().map(Vec::as_slice).unwrap_or_default();
    words.iter().filter_map(|word| word.as_str().map(OsString::from)).collect()
}

/// Trains, reports and leaves a run folder behind; or starts processes that do.
pub fn train(
    args: &TrainArgs,
    remembered: Vec<String>,
    rank: Option<RankEnvironment>,
) -> Result<ExitCode> {
    let job = Job::new(&args.parallel, rank)?;
    match &job {
        Job::Alone => Plan::new(args, &job)?.train(&job, &Mesh::single(), remembered),
        Job::Launcher(ranks) => {
            Plan::new(args, &job)?; // what is refused is refused here, once
            job::start_ranks(*ranks, args.parallel.timeout())
        }
        Job::Rank(rank) => {
            let train = || {
                let plan = Plan::new(args, &job)?;
                job::connect(&args.parallel, rank, |world| {
                    let mesh = Mesh::new(&world, plan.run.layout, args.parallel.sequence())?;
                    plan.train(&job, &mesh, remembered)
                })
            };
            // Under other launchers nothing else says whose error it is.
            Ok(train().unwrap_or_else(|error| failed(&format!("rank {}: ", rank.rank), &error)))
        }
    }
}

/// A run of which everything that can be refused has been checked, before anything starts.
struct Plan<'a> {
    args: &'a TrainArgs,
    resumed: Option<Checkpoint>,
    tokenizer: Tokenizer,
    run: memory::Plan,
    stages: Vec<StageMemory>,
    intervals: Intervals,
}

impl Plan<'_> {
    fn new<'a>(args: &'a TrainArgs, job: &Job) -> Result<Plan<'a>> {
        args.run.validate()?;
        args.device.dtype()?;
        let resumed = args.run.load.as_deref().map(Checkpoint::peek).transpose()?;
        run_folder::check(args, resumed.as_ref())?;
        if !matches!(job, Job::Rank(rank) if rank.rank > 0) {
            run_folder::check_files(args, resumed.as_ref())?;
        }
        let tokenizer = open_tokenizer(args, resumed.as_ref())?;
        let run = args.plan(job.world_size(), job.local_size(), tokenizer.vocab_size())?;
        if let Some(checkpoint) = &resumed {
            checkpoint.check_config(&run.model)?;
        }
        let intervals = args.intervals(&run.trainer.parallel)?;
        let stages = run.stages()?;
        memory_limits::check(args, &run, &stages, job)?;
        if args.device.place()? == Place::Cpu {
            args.offload.check(&args.run)?;
        }
        Ok(Plan { args, resumed, tokenizer, run, stages, intervals })
    }

    /// Trains as one rank of `mesh`; the first one reports.
    fn train(self, job: &Job, mesh: &Mesh, remembered: Vec<String>) -> Result<ExitCode> {
        let Plan { args, resumed, tokenizer, run: plan, stages, intervals } = self;
        let folder = args.offload.folder(&args.run);
        let device = args.device.open_shared(job.local_size(), job.local_rank(), folder)?;
        let mesh = &job::between_gpus(args, mesh, &device)?;
        let dataset = open_dataset(args, &tokenizer)?;
        let scope = Scope::new(&device, args.device.dtype()?, args.optimization.seed);
        let mut trainer = Trainer::on_mesh(&scope, mesh, &plan.model, plan.trainer)?;
        if let Some(checkpoint) = &resumed {
            trainer.load(checkpoint)?;
        }
        same_data(&mut trainer, dataset.train.len())?;

        let folder = run_folder::make(args, resumed.as_ref(), mesh.world(), &device)?;
        let config = run_config(args, &trainer, intervals, folder, remembered)?;
        let first = mesh.rank() == 0;
        if first {
            output::note(&format!(
                "{:.2} M parameters, {} training tokens, {} tokenizer of {}, {}, {}",
                plan.model.num_parameters() as f64 / 1e6,
                dataset.train.len(),
                tokenizer.name(),
                tokenizer.vocab_size(),
                place(args, &device)?,
                config.folder.display()
            ));
            if let Some(lines) = layout_lines(&trainer, config.seq_length) {
                output::note(&lines);
            }
            let memory = memory_limits::largest(&stages).memory;
            let host = match memory.host_bytes {
                0 => String::new(),
                bytes => format!(", and {} of host memory", bytes::display(bytes as u64)),
            };
            let sentence = memory_limits::sentence(&memory);
            output::note(&format!("memory of a rank: at most {sentence}{host}"));
        }
        let done = trainer.progress().step;
        let mut progress = match first {
            true => Progress::new(done, intervals.train_iters, args.run.log_interval),
            false => Progress::silent(),
        };
        // Until here there is nothing to save: a signal ends the process as it ends any other.
        let stop = StopFlag::from(job::stop_on_signals(INTERRUPTED)?);
        let outcome = run(&mut trainer, &dataset, &tokenizer, &config, &stop, &mut progress);
        progress.finish();
        let outcome = outcome?;
        if first {
            report(args, &trainer, &dataset, &tokenizer, &outcome, &stop)?;
        }
        // All steps may be taken, and something behind them left out.
        Ok(match outcome.ended {
            Ended::Finished | Ended::ExitInterval if !stop.is_set() => ExitCode::SUCCESS,
            _ => ExitCode::from(INTERRUPTED),
        })
    }
}

/// Where the run computes.
fn place(args: &TrainArgs, device: &Device) -> Result<String> {
    Ok(match (args.device.place()?, device.threads()) {
        (Place::Cpu, 1) => "1 thread".to_string(),
        (Place::Cpu, threads) => format!("{threads} threads"),
        (Place::Gpus | Place::Gpu(_), _) => format!("{device:?}"),
    })
}

/// How several ranks are laid out, and what they will send.
fn layout_lines(trainer: &Trainer, seq_length: usize) -> Option<String> {
    let layout = trainer.mesh().layout();
    let [tp, cp, dp, pp] = Axis::ALL.map(|axis| layout.size(axis));
    let parallel = &trainer.config().parallel;
    let chunks = match parallel.chunks {
        1 => String::new(),
        chunks => format!(", {chunks} chunks"),
    };
    let microbatches =
        trainer.config().batch_size.microbatches(trainer.progress().consumed_samples);
    (layout.world() > 1).then(|| {
        let StepTraffic { tensor, context, pipeline, data, optimizer, average } =
            expected_traffic(trainer, seq_length);
        let parts = [
            (tensor, "of activations of shared layers"),
            (context, "of keys and values"),
            (pipeline, "between stages"),
            (data, "of gradients and weights"),
            (optimizer, "of the optimizer's sums"),
        ];
        let sent: Vec<String> = parts
            .iter()
            .filter(|(bytes, _)| *bytes > 0)
            .map(|(bytes, what)| format!("{} {what}", bytes::display(*bytes)))
            .collect();
        let mut sent = match (sent.is_empty(), average) {
            (false, _) => format!("in a step: {}", sent.join(", ")),
            (true, 0) => "in a step: nothing but numbers".to_string(),
            (true, _) => String::new(),
        };
        if average > 0 {
            let every = parallel.data_parallel.synchronize_every;
            let and = if sent.is_empty() { "" } else { "; " };
            sent += &format!("{and}every {every} steps: {} of weights", bytes::display(average));
        }
        format!(
            "{} ranks: tensor {tp} x context {cp} x data {dp} x pipeline {pp} ({}{chunks}), ZeRO {}, \
             {microbatches} x {} samples a step on each data-parallel rank\n\
             rank 0 sends {sent}",
            layout.world(),
            parallel.pipeline_schedule,
            parallel.data_parallel.sharding as usize,
            trainer.config().batch_size.micro(),
        )
    })
}

/// Prints what came out.
fn report(
    args: &TrainArgs,
    trainer: &Trainer,
    dataset: &Dataset,
    tokenizer: &Tokenizer,
    outcome: &Outcome,
    stop: &StopFlag,
) -> Result<()> {
    if let (Some(evaluation), Some(source)) = (&outcome.evaluation, &dataset.validation) {
        let Evaluation { loss, tokens, .. } = *evaluation;
        output::report(&if tokens < BIGRAM_TOKENS && !stop.is_set() {
            // Those that were evaluated, and the one before them.
            let bigrams = bigram_entropy(&source.slice(0..tokens + 1)?.to_vec()?);
            format!("validation loss {loss:.4} (bigrams of the same {tokens} tokens: {bigrams:.4})")
        } else {
            format!("validation loss {loss:.4} over {tokens} tokens")
        });
    }
    if outcome.ended == Ended::Finished && args.run.sample_length > 0 && !stop.is_set() {
        if one_rank_has_all(trainer) {
            let text = sample(&trainer.parts()[0], tokenizer, args.run.sample_length, stop)?;
            text.iter().for_each(|text| output::report(&format!("sample: {text}")));
        } else {
            output::report("no sample: no rank has the whole model");
        }
    }
    let checkpoint = outcome.checkpoint.display();
    output::report(&format!(
        "continue a text: ferrotron generate --load {checkpoint} --prompt TEXT"
    ));
    Ok(())
}

/// Whether this rank can run the model without others.
fn one_rank_has_all(trainer: &Trainer) -> bool {
    let layout = trainer.mesh().layout();
    let sharded = trainer.config().parallel.data_parallel.sharding == Sharding::Weights;
    layout.size(Axis::Data) == layout.world() && !(sharded && layout.world() > 1)
}

pub fn open_tokenizer(args: &TrainArgs, resumed: Option<&Checkpoint>) -> Result<Tokenizer> {
    let embedded = args.data.data.is_empty();
    if embedded && !args.data.valid_data.is_empty() {
        return Err(Error::config(
            "--valid-data",
            "needs --data: the built-in corpus brings its own validation part",
        ));
    }
    match resumed.and_then(Checkpoint::tokenizer) {
        Some(tokenizer) => Ok(tokenizer.clone()),
        None => args
            .data
            .tokenizer()?
            .build(|| if embedded { Ok(corpus::text()) } else { args.data.config().text() }),
    }
}

fn open_dataset(args: &TrainArgs, tokenizer: &Tokenizer) -> Result<Dataset> {
    match args.data.data.is_empty() {
        true => Dataset::from_text(&corpus::text(), tokenizer, args.data.split),
        false => Dataset::open(&args.data.config(), tokenizer),
    }
}

/// The order of samples is a function of the number of tokens: a run goes on with the data that it was
/// started with, or not at all.
fn same_data(trainer: &mut Trainer, tokens: u64) -> Result<()> {
    const KEY: &str = "training_tokens";
    let mut progress = trainer.progress().clone();
    match progress.extra.get(KEY).and_then(serde_json::Value::as_u64) {
        Some(before) if before != tokens => Err(Error::config(
            "--data",
            format!(
                "holds {tokens} training tokens, the run was started with {before}: give the same data and --split"
            ),
        )),
        _ => {
            progress.extra.insert(KEY.into(), json!(tokens));
            trainer.set_progress(progress);
            Ok(())
        }
    }
}

fn run_config(
    args: &TrainArgs,
    trainer: &Trainer,
    intervals: Intervals,
    folder: PathBuf,
    mut remembered: Vec<String>,
) -> Result<RunConfig> {
    // Its default depends on the layout, which whoever goes on may change; the run shall not.
    if args.optimization.global_batch_size.is_none() {
        let size = trainer.config().batch_size.full();
        remembered.extend(["--global-batch-size".to_string(), size.to_string()]);
    }
    Ok(RunConfig {
        metrics: run_folder::metrics(args, &folder),
        folder,
        intervals,
        seq_length: args.model.seq_length()?,
        save_retain: args.run.save_retain,
        eval_iters: args.run.eval_iters.0,
        trace: args.run.trace(trainer.progress().step),
        options: json!(remembered),
    })
}
