//! The options that say how many ranks train and how the work is spread over them, with Megatron's names.

use clap::{Args, ValueEnum};
use ferrotron::models::gpt::{
    Recompute, RecomputeMethod, RecomputeModules, RecomputedAttention, RecomputedMlp, RegionInputs,
};
use ferrotron::models::support::ModelSizes;
use ferrotron::models::trainer::ParallelConfig;
use ferrotron::nn::{Axis, GradDType, Sharding};
use ferrotron::parallel::data_parallel::{AsyncUpdates, DataParallelConfig};
use ferrotron::parallel::mesh::ParallelDims;
use ferrotron::parallel::pipeline::ScheduleKind;
use ferrotron::parallel::tensor_parallel::SequenceParallel;
use ferrotron::{Error, Result};

use super::ranks::RankArgs;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Granularity {
    None,
    Selective,
    Full,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MethodArg {
    Uniform,
    Block,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ModuleArg {
    #[value(name = "core_attn")]
    CoreAttention,
    #[value(name = "attn")]
    Attention,
    Mlp,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Parallelism")]
pub struct ParallelArgs {
    #[command(flatten)]
    pub ranks: RankArgs,
    /// Cut activations between tensor-parallel layers along the sequence
    #[arg(long)]
    pub sequence_parallel: bool,
    /// Order of the pipeline's work: naive, gpipe, 1f1b, interleaved or zb-h1; without a flush, with weights of earlier
    /// steps: pipedream, pipedream-vertical-sync or pipedream-2bw [default: 1f1b, or interleaved with several chunks]
    #[arg(long, value_name = "NAME")]
    pub pipeline_schedule: Option<String>,
    /// Steps between those after which a pipeline without a flush is drained, to be saved and evaluated; SIGTERM and other
    /// requests to stop wait for the next one [default: 50]
    #[arg(long, value_name = "N")]
    pub pipeline_drain_interval: Option<usize>,
    /// Chunks of the model on each pipeline rank [default: 1, or 2 if interleaved]
    #[arg(long, value_name = "N")]
    pub num_virtual_stages_per_pipeline_rank: Option<usize>,
    /// State sharded over data-parallel ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too
    #[arg(long, value_name = "STAGE", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=3))]
    pub zero_stage: u8,
    /// Elements of a gradient bucket, which is reduced as soon as it is complete [default: 40 million, or a million for
    /// each data-parallel rank if that is more; a block's share with ZeRO stages 2 and 3; with nothing to reduce 6.5
    /// million on CPUs and no limit on GPUs]
    #[arg(long, value_name = "N")]
    pub ddp_bucket_size: Option<usize>,
    /// Steps that data-parallel ranks take by themselves before they average their weights (local SGD)
    /// [default: 1, gradients are summed in every step]
    #[arg(long, value_name = "N", default_value_t = 1, hide_default_value = true)]
    pub local_sgd_steps: usize,
    /// Data-parallel ranks go on with weights that miss the updates of the latest steps, instead of waiting for the slowest
    #[arg(long)]
    pub async_data_parallel: bool,
    /// Largest number of updates that a rank's weights miss, with --async-data-parallel; 0 is the synchronous run
    /// [default: 1]
    #[arg(long, value_name = "K")]
    pub max_staleness: Option<usize>,
    /// Steps after which all ranks apply all updates, with --async-data-parallel: a run saves, evaluates and ends there,
    /// and SIGTERM and other requests to stop wait for it [default: 10]
    #[arg(long, value_name = "N")]
    pub drain_interval: Option<usize>,
    /// Keep what backward needs (none), or compute parts of each block (selective) or whole blocks (full) again
    #[arg(long, value_name = "WHAT", value_enum, default_value = "none")]
    pub recompute_granularity: Granularity,
    /// Blocks that are computed again: runs of N of them (uniform), or the first N of each stage, one by one
    /// [default: uniform]
    #[arg(long, value_name = "HOW", value_enum)]
    pub recompute_method: Option<MethodArg>,
    /// N of --recompute-method [default: 1]
    #[arg(long, value_name = "N")]
    pub recompute_num_layers: Option<usize>,
    /// Parts that selective recomputation computes again: core_attn, attn, mlp [default: core_attn]
    #[arg(long, value_name = "PART", value_enum, value_delimiter = ',', num_args = 1..)]
    pub recompute_modules: Option<Vec<ModuleArg>>,
    /// Tensor-parallel ranks each keep a part of the inputs of what full recomputation computes again, and gather
    /// them in backward
    #[arg(long)]
    pub distribute_saved_activations: bool,
}

impl ParallelArgs {
    /// Sizes of the axes for `world` ranks.
    pub fn layout(&self, world: usize) -> Result<ParallelDims> {
        self.ranks.layout(world)
    }

    /// Whether positions are cut; one rank has nothing to cut.
    pub fn sequence(&self) -> SequenceParallel {
        match self.sequence_parallel && self.ranks.tensor_model_parallel_size > 1 {
            true => SequenceParallel::On,
            false => SequenceParallel::Off,
        }
    }

    /// The parallelism of training `model` in `layout`.
    pub fn config(
        &self,
        layout: &ParallelDims,
        model: &ModelSizes,
        gradients: GradDType,
    ) -> Result<ParallelConfig> {
        if self.local_sgd_steps == 0 {
            return Err(Error::config("--local-sgd-steps", "must be positive, got 0"));
        }
        if self.ddp_bucket_size == Some(0) {
            return Err(Error::config("--ddp-bucket-size", "must be positive, got 0"));
        }
        let named = self.pipeline_schedule.as_deref().map(str::parse).transpose()?;
        let chunks = self.num_virtual_stages_per_pipeline_rank;
        let chunks = chunks.unwrap_or(if named == Some(ScheduleKind::Interleaved) { 2 } else { 1 });
        let implied = if chunks > 1 { ScheduleKind::Interleaved } else { ScheduleKind::OneFOneB };
        // As Megatron-LM's default: larger with more ranks, so that latency does not come to dominate.
        let bucket = (1_000_000 * layout.size(Axis::Data)).max(40_000_000);
        // What is gathered and freed must be a small part of the model.
        let share =
            (model.num_parameters as usize / (model.num_layers * layout.size(Axis::Tensor))).max(1);
        let reduces = layout.size(Axis::Data) * layout.size(Axis::Context) > 1;
        let bucket = match self.zero_stage {
            0 | 1 if !reduces => None,
            0 | 1 => Some(bucket),
            _ => Some(bucket.min(share)),
        };
        let pipeline_schedule = named.unwrap_or(implied);
        if pipeline_schedule.flushes() && self.pipeline_drain_interval.is_some() {
            let message = format!(
                "needs --pipeline-schedule pipedream, or another without a flush: \
                 {pipeline_schedule} is drained after each step"
            );
            return Err(Error::config("--pipeline-drain-interval", message));
        }
        let default = ParallelConfig::default();
        Ok(ParallelConfig {
            pipeline_schedule,
            drain_interval: self.pipeline_drain_interval.unwrap_or(default.drain_interval),
            chunks,
            data_parallel: DataParallelConfig {
                sharding: Sharding::ALL[usize::from(self.zero_stage)],
                bucket_numel: self.ddp_bucket_size.or(bucket),
                synchronize_every: self.local_sgd_steps,
                async_updates: self.async_updates()?,
                gradients,
                ..DataParallelConfig::default()
            },
            recompute: self.recompute()?,
            ..default
        })
    }

    /// The updates that ranks do not wait for.
    fn async_updates(&self) -> Result<Option<AsyncUpdates>> {
        let options = [
            ("--max-staleness", self.max_staleness.is_some()),
            ("--drain-interval", self.drain_interval.is_some()),
        ];
        let typed = options.into_iter().find(|(_, typed)| *typed && !self.async_data_parallel);
        if let Some((option, _)) = typed {
            let message = "needs --async-data-parallel: add it, or leave this out";
            return Err(Error::config(option, message));
        }
        if self.drain_interval == Some(0) {
            return Err(Error::config("--drain-interval", "must be positive, got 0"));
        }
        let default = AsyncUpdates::default();
        Ok(self.async_data_parallel.then(|| AsyncUpdates {
            max_staleness: self.max_staleness.unwrap_or(default.max_staleness),
            drain_interval: self.drain_interval.unwrap_or(default.drain_interval),
        }))
    }

    /// The recomputation in backward that the options ask for.
    fn recompute(&self) -> Result<Recompute> {
        let granularity = self.recompute_granularity;
        let full = "--recompute-granularity full";
        for (name, typed, needs, there) in [
            ("--recompute-method", self.recompute_method.is_some(), full, Granularity::Full),
            (
                "--recompute-num-layers",
                self.recompute_num_layers.is_some(),
                full,
                Granularity::Full,
            ),
            (
                "--distribute-saved-activations",
                self.distribute_saved_activations,
                full,
                Granularity::Full,
            ),
            (
                "--recompute-modules",
                self.recompute_modules.is_some(),
                "--recompute-granularity selective",
                Granularity::Selective,
            ),
        ] {
            if typed && granularity != there {
                return Err(Error::config(name, format!("needs {needs}")));
            }
        }
        Ok(match granularity {
            Granularity::None => Recompute::None,
            Granularity::Selective => match &self.recompute_modules {
                None => Recompute::SELECTIVE,
                Some(modules) => Recompute::Selective(selected(modules)?),
            },
            Granularity::Full => Recompute::Full {
                method: match self.recompute_method {
                    None | Some(MethodArg::Uniform) => RecomputeMethod::Uniform,
                    Some(MethodArg::Block) => RecomputeMethod::Block,
                },
                layers: self.recompute_num_layers.unwrap_or(1),
                inputs: match self.distribute_saved_activations {
                    false => RegionInputs::Whole,
                    true => RegionInputs::Distributed,
                },
            },
        })
    }
}

fn selected(modules: &[ModuleArg]) -> Result<RecomputeModules> {
    let named = |module| modules.contains(&module);
    if named(ModuleArg::CoreAttention) && named(ModuleArg::Attention) {
        let message = "core_attn is a part of attn: give one of them";
        return Err(Error::config("--recompute-modules", message));
    }
    Ok(RecomputeModules {
        attention: match (named(ModuleArg::CoreAttention), named(ModuleArg::Attention)) {
            (true, _) => RecomputedAttention::Core,
            (_, true) => RecomputedAttention::Layer,
            _ => RecomputedAttention::None,
        },
        mlp: if named(ModuleArg::Mlp) { RecomputedMlp::Layer } else { RecomputedMlp::None },
    })
}
