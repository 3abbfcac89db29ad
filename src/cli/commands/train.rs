//! `ferrotron train`: alone, as one rank of a job, or as the launcher of one.

use ferrotron::models::bert::Bert;
use ferrotron::models::checkpoint::{Checkpoint, TrainState, processor_change, record_processor};
use ferrotron::models::data::{DataFingerprint, DataOrigin};
use ferrotron::models::gpt::Gpt;
use ferrotron::models::memory::{self, StageMemory};
use ferrotron::models::run::{
    EvaluationTask, Intervals, ORDER_STATE, Observer, StopReason, TensorboardLog, run,
};
use ferrotron::models::tensorboard::event_files;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::models::trainer::Trainer;
use ferrotron::nn::Scope;
use ferrotron::parallel::agreement::{Facts, agree};
use ferrotron::parallel::collective::{Group, World};
use ferrotron::parallel::launch::{INTERRUPTED, RankEnvironment};
use ferrotron::parallel::mesh::Mesh;
use ferrotron::{ErrorKind, Result};
use std::process::ExitCode;

use crate::cli::architecture::TrainedModel;
use crate::cli::args::data::DataOrder;
use crate::cli::args::device::DeviceChoice;
use crate::cli::args::model::Architecture;
use crate::cli::args::run::RunArgs;
use crate::cli::args::train::TrainArgs;
use crate::cli::configuration::{Configuration, data_facts};
use crate::cli::definition::Definition;
use crate::cli::exit_signals::ExitSignals;
use crate::cli::job::{self, ProcessRole};
use crate::cli::loaded::{check_vocab_size, unused_ids};
use crate::cli::options::{Options, other_optimizers};
use crate::cli::output::failed;
use crate::cli::plan::plan;
use crate::cli::progress::{TrainProgress, code_block};
use crate::cli::rank_environment::rank_environment;
use crate::cli::run_config::run_config;
use crate::cli::run_samples::{OrderLength, RunInput, SampleScope};
use crate::cli::run_tokenizer::{known_vocab_size, open_tokenizer};
use crate::cli::tasks::task_facts;
use crate::cli::{corpus, memory_limits, output, report, resume, run_folder};

/// Trains, reports and leaves a run folder behind; or starts processes that do. `given` holds the options that were
/// typed or stand in the file of `--config`; `args` is made from it.
pub fn train(args: &TrainArgs, given: Options, definition: &Definition) -> Result<ExitCode> {
    let signals = ExitSignals::register(args.run.exit_signal.map(|signal| signal.0))?;
    let rank = rank_environment()?;
    let Some(rank) = rank else {
        let resumed = resume::open(&args.run)?;
        let configuration = Configuration::new(given, resumed.as_ref(), None, definition)?;
        return match configuration.args.model.architecture {
            Architecture::Gpt2 | Architecture::Llama | Architecture::Gemma2 => {
                start::<Gpt>(configuration, resumed, &signals)
            }
            Architecture::Bert => start::<Bert>(configuration, resumed, &signals),
        };
    };
    // How ranks meet is no matter of a checkpoint, which they choose together. What one of them cannot do is told to all
    // behind that.
    let trained = job::connect(&args.parallel.ranks, &rank, |world| {
        train_as_rank(&world, &args.run, given, (&rank, &signals), definition)
    });
    // Under other launchers nothing else says whose error it is.
    Ok(trained.unwrap_or_else(|error| failed(&format!("rank {}: ", rank.rank), &error)))
}

/// Trains alone, or starts the ranks that train.
fn start<M: TrainedModel>(
    configuration: Configuration,
    resumed: Option<Checkpoint>,
    signals: &ExitSignals,
) -> Result<ExitCode> {
    let plan = PreparedRun::<M>::new(configuration, resumed, None)?; // what is refused is refused here, once
    match plan.job {
        ProcessRole::Launcher(ranks) => {
            let timeout = plan.configuration.args.parallel.ranks.timeout();
            job::start_ranks(ranks, timeout, signals, std::io::stdout())
        }
        _ => {
            let data = plan.data()?;
            plan.train(&Mesh::single(), &data, signals)
        }
    }
}

/// Trains as one rank of `world`, after all ranks have found that they are about the same.
fn train_as_rank(
    world: &World,
    run: &RunArgs,
    given: Options,
    (rank, signals): (&RankEnvironment, &ExitSignals),
    definition: &Definition,
) -> Result<ExitCode> {
    let everyone = world.everyone()?;
    let resumed = resume::open_together(&everyone, run)?;
    let configuration = Configuration::new(given, resumed.as_ref(), Some(rank), definition);
    let architecture = |found: &Configuration| found.args.model.architecture;
    match configuration.as_ref().is_ok_and(|found| architecture(found) == Architecture::Bert) {
        true => train_planned::<Bert>(world, configuration, resumed, (rank, signals)),
        false => train_planned::<Gpt>(world, configuration, resumed, (rank, signals)),
    }
}

/// Trains a model of the given architecture as one rank; an error of the configuration is told to the others, too.
fn train_planned<M: TrainedModel>(
    world: &World,
    configuration: Result<Configuration>,
    resumed: Option<Checkpoint>,
    (rank, signals): (&RankEnvironment, &ExitSignals),
) -> Result<ExitCode> {
    let everyone = world.everyone()?;
    let plan = |configuration| PreparedRun::<M>::new(configuration, resumed, Some(rank));
    let planned = configuration.and_then(plan);
    let agreed = agree(&everyone, planned.as_ref().map(|plan| &plan.configuration.facts));
    let mut plan = planned?;
    agreed?;
    plan.share_stages(&everyone)?;
    let data = plan.data().and_then(|data| {
        let mut facts = data_facts(&data.fingerprint, &data.input.dataset, &plan.tokenizer)?;
        facts.extend(task_facts(data.tasks.iter().map(|task| &**task)));
        Ok((data, facts))
    });
    let agreed = agree(&everyone, data.as_ref().map(|(_, facts)| facts));
    let (data, _) = data?;
    agreed?;
    let sequence = plan.configuration.args.parallel.sequence();
    let mesh = Mesh::new(world, plan.run.layout, sequence)?;
    plan.train(&mesh, &data, signals)
}

/// The opened data of a run, and the tasks on which it evaluates its model.
struct Data<M: TrainedModel> {
    input: RunInput,
    fingerprint: DataFingerprint,
    tasks: Vec<Box<dyn EvaluationTask<M>>>,
}

/// A run after every check that can refuse it, before anything starts.
struct PreparedRun<M: TrainedModel> {
    configuration: Configuration,
    job: ProcessRole,
    resumed: Option<Checkpoint>,
    tokenizer: Tokenizer,
    run: memory::MemoryEstimator<M>,
    /// The memory of all pipeline stages; until [`PreparedRun::share_stages`], a rank knows its own.
    stages: Vec<StageMemory>,
    /// The progress with which it begins.
    start: TrainState,
    intervals: Intervals,
}

impl<M: TrainedModel> PreparedRun<M> {
    fn new(
        mut configuration: Configuration,
        resumed: Option<Checkpoint>,
        rank: Option<&RankEnvironment>,
    ) -> Result<PreparedRun<M>> {
        let Configuration { args, options, imported, .. } = &configuration;
        let check = || {
            other_optimizers::check(options)?;
            args.data.source()?;
            let job = ProcessRole::new(&args.parallel.ranks, rank.cloned())?;
            args.run.validate()?;
            args.evaluation.validate()?;
            let samples = args.tensorboard.log_samples_to_tensorboard;
            args.evaluation.check_used(options, &args.run, samples)?;
            args.tensorboard.validate()?;
            args.device.dtype()?;
            if let Some(checkpoint) = &resumed {
                args.device.check_resumable(checkpoint)?;
            }
            run_folder::check(args, resumed.as_ref(), &job)?;
            let tokenizer = open_tokenizer(args, resumed.as_ref(), imported.as_ref())?;
            let own = M::vocab_size(&tokenizer)?;
            let known = known_vocab_size::<M>(resumed.as_ref(), imported.as_ref())?;
            let vocab_size = known.unwrap_or(own);
            check_vocab_size(vocab_size, own)?;
            let run = plan::<M>(args, job.world_size(), job.local_size(), vocab_size)?;
            if let Some(imported) = imported {
                imported.check_config::<M>(&run.model)?;
            }
            if let Some(checkpoint) = &resumed {
                M::check_checkpoint(checkpoint, &run.model)?;
            }
            let start = match &resumed {
                Some(checkpoint) => checkpoint.progress().clone(),
                None => args.optimization.start(&run.trainer)?,
            };
            let intervals = args.intervals(&run.trainer, &start)?;
            let stages = match rank {
                None => run.stages()?,
                Some(rank) => vec![run.stage(run.stage_of(rank.rank))?],
            };
            if rank.is_none() {
                memory_limits::check(args, &run, &stages, &job)?;
            }
            if args.device.place()? == DeviceChoice::Cpu {
                args.offload.check(&args.run)?;
            }
            Ok((job, tokenizer, run, stages, start, intervals))
        };
        let (job, tokenizer, run, stages, start, intervals) =
            check().map_err(|error| options.name_sources(error))?;
        if configuration.imported.is_some() {
            let ids = (M::sizes(&run.model).vocab_size, M::vocab_size(&tokenizer)?);
            configuration.notes.extend(unused_ids(ids.0, ids.1));
        }
        Ok(PreparedRun { configuration, job, resumed, tokenizer, run, stages, start, intervals })
    }

    /// Learns what the other stages take, each of which its ranks have planned alone. Errors on all ranks if one of them
    /// would take too much.
    fn share_stages(&mut self, world: &Group) -> Result<()> {
        self.stages = self.run.stages_together(&self.stages[0], world)?;
        let Configuration { args, options, .. } = &self.configuration;
        let checked = memory_limits::check(args, &self.run, &self.stages, &self.job);
        let checked = checked.map_err(|error| options.name_sources(error));
        let facts = Facts::new();
        let agreed = agree(world, checked.as_ref().map(|()| &facts));
        checked.and(agreed)
    }

    /// The samples of the whole run, if their order depends on the number.
    fn samples(&self) -> Result<Option<u64>> {
        let args = &self.configuration.args;
        let full = self.run.trainer.batch_size.full_batch_size();
        match args.data.data_order {
            DataOrder::Computed => Ok(None),
            DataOrder::Megatron => {
                args.optimization.samples(self.intervals.train_iters, full).map(Some)
            }
        }
    }

    /// Opens the data, and compares it with that of the checkpoint.
    fn data(&self) -> Result<Data<M>> {
        let Configuration { args, options, .. } = &self.configuration;
        let first = !matches!(&self.job, ProcessRole::Rank(rank) if rank.rank > 0);
        let warn = |warning: &str| {
            if first {
                output::note(warning);
            }
        };
        let open = || {
            let origin = match args.data.is_built_in() {
                true => DataOrigin::BuiltIn,
                false => DataOrigin::Files,
            };
            let progress = self.resumed.as_ref().map(Checkpoint::progress);
            let state = progress.and_then(|found| found.extra.get(ORDER_STATE)).cloned();
            let order = OrderLength {
                samples: self.samples()?,
                seed: args.optimization.seed,
                state: state.and_then(|state| serde_json::from_value(state).ok()),
            };
            let input = M::open(args, &args.data.source()?, &order, &self.tokenizer, warn);
            let input = input.map_err(|error| match (origin, &self.resumed) {
                (DataOrigin::BuiltIn, Some(_)) => corpus::not_encoded(&error),
                _ => error,
            })?;
            let fingerprint = DataFingerprint::new(&input.dataset, &self.tokenizer)?
                .with_order(input.order_crc32());
            if let Some(checkpoint) = &self.resumed {
                fingerprint.check(&checkpoint.progress().extra, args.data.change(), origin)?;
            }
            let tasks = M::tasks(args, &self.tokenizer, &self.run.model, &self.run.layout)?;
            Ok(Data { input, fingerprint, tasks })
        };
        open().map_err(|error| options.name_sources(error))
    }

    /// Trains as one rank of `mesh`; the first one reports.
    fn train(self, mesh: &Mesh, data: &Data<M>, signals: &ExitSignals) -> Result<ExitCode> {
        let options = self.configuration.options.clone();
        self.take_steps(mesh, data, signals).map_err(|error| options.name_sources(error))
    }

    fn take_steps(self, mesh: &Mesh, data: &Data<M>, signals: &ExitSignals) -> Result<ExitCode> {
        let Data { input, fingerprint, tasks } = data;
        let PreparedRun {
            configuration,
            job,
            resumed,
            tokenizer,
            run: plan,
            stages,
            start,
            intervals,
        } = self;
        let args = &configuration.args;
        let device = args.open_device(job.local_size(), job.local_rank())?;
        let mesh = &job::with_backend(&args.parallel.ranks, &args.device, mesh, &device)?;
        let scope = Scope::new(&device, args.device.dtype()?, args.optimization.seed);
        let mut trainer = Trainer::<M>::on_mesh(&scope, mesh, &plan.model, plan.trainer)?;
        if let Some(checkpoint) = &resumed {
            trainer.load(checkpoint)?;
        }
        let imported = configuration.imported.as_ref();
        let fresh = imported.map(|imported| imported.load(&mut trainer)).transpose()?;
        let TrainState { step, consumed_samples, steps_before, .. } = start;
        let mut progress =
            TrainState { step, consumed_samples, steps_before, ..trainer.progress().clone() };
        fingerprint.record(&mut progress.extra);
        if let Some(imported) = imported {
            imported.companions(&args.data)?.record(&mut progress.extra);
        }
        let change = processor_change(&progress.extra, &device, scope.dtype());
        record_processor(&mut progress.extra, &device);
        trainer.set_progress(progress);

        let folder = run_folder::make(args, resumed.as_ref(), mesh.world())?;
        let loaded = resumed.as_ref().map(|found| found.folder().to_path_buf());
        let config = run_config(&configuration, &trainer, intervals, folder, loaded)?;
        let first = mesh.rank() == 0;
        let full = trainer.config().batch_size.full_batch_size();
        let eval_batch = args.evaluation.eval_global_batch_size.unwrap_or(full);
        let scope = SampleScope {
            seed: trainer.config().seed,
            eval_batch,
            test_iters: args.run.eval_iters.0,
        };
        let samples = M::samples(input, &config, &scope).inspect_err(|_| {
            if first {
                run_folder::remove_if_empty(&config.folder);
            }
        })?;
        if first {
            report::before(&configuration, &trainer, &input.dataset, &tokenizer, &stages, &config)?;
            input.packing().iter().for_each(|packing| output::note(&packing.to_string()));
            change.iter().for_each(|line| output::note(line));
            if let Some(names) = fresh.filter(|names| !names.is_empty()) {
                output::note(&format!("not among these weights, and new: {}", names.join(", ")));
            }
        }
        let done = trainer.progress().step;
        if first && done >= intervals.train_iters {
            output::note(&format!(
                "nothing to train: the run is at step {done} and ends at step {}; a larger --train-iters or --train-samples goes on",
                intervals.train_iters
            ));
        }
        let mut progress = match first {
            true => TrainProgress::new(done, intervals.train_iters, args.run.log_interval),
            false => TrainProgress::silent(),
        };
        if let Some(events) = args.tensorboard.config(mesh.world().size()).filter(|_| first) {
            if done == 0 && !event_files(&events.folder).is_empty() {
                let folder = events.folder.display();
                progress.warning(&format!(
                    "{folder} has event files of another run: TensorBoard will show this one in their place"
                ));
            }
            progress.write_events(TensorboardLog::create(events, done)?);
            progress.event(|log| log.text("options", done, &configuration.table()));
        }
        let samples_on_its_way = args.tensorboard.log_samples_to_tensorboard
            && intervals.eval_tasks_interval > 0
            && done < intervals.train_iters;
        // Until here there is nothing to save, and a signal ends the process.
        let stop = signals.stop_flag()?;
        let data = samples.run_data(tasks, &tokenizer);
        let outcome = run(&mut trainer, &data, &config, &stop, &mut progress);
        progress.finish();
        let at_once = stop.is_set() && trainer.progress().step == done;
        let outcome = match outcome {
            // Ranks that were still loading have ended at the signal, so nobody has taken a step.
            Err(error) if at_once && error.kind() == ErrorKind::Communication => {
                let told = format!("interrupted before the first step: {error}");
                first.then(|| output::note(&told));
                return Ok(ExitCode::from(INTERRUPTED));
            }
            outcome => outcome?,
        };
        // All ranks have the same reason.
        let test = samples.test().filter(|_| outcome.stop_reason == StopReason::Finished);
        let test = test.map(|test| trainer.evaluate(test, &stop)).transpose()?.flatten();
        if first {
            report::stopped(&outcome, trainer.progress().step, &config);
            if let Some(evaluation) = &test {
                output::report(&format!("test {}", M::evaluation_line(evaluation)));
            }
            let sampling = (args.run.sample_length(), &stop);
            let sample = M::report(&trainer, input, &tokenizer, &outcome, sampling)?;
            // A run that samples on its way has sampled behind the last step, too.
            if let Some(sample) = sample.filter(|_| !samples_on_its_way) {
                let step = trainer.progress().step;
                progress.event(|log| log.text("sample", step, &code_block(&sample)));
            }
        }
        // All steps may be taken, and something behind them left out.
        Ok(match outcome.stop_reason {
            StopReason::Stopped => ExitCode::from(INTERRUPTED),
            _ if stop.is_set() => ExitCode::from(INTERRUPTED),
            _ => ExitCode::SUCCESS,
        })
    }
}
