//! Options of Megatron-LM that this program does not have, and the nearest way to their purpose.

/// Remedy of options that ask for a thing that is always so.
const ALWAYS: &str = "it is always so here; leave it out";

/// Remedy of options that take others from a checkpoint, even where these are typed.
const FROM_CHECKPOINT: &str =
    "options of the checkpoint hold where none is typed: leave out those options as well";

/// Remedy of options without a counterpart.
const NONE: &str = "it has no counterpart here; leave it out";

/// Options, and the way to their purpose, with `-` for `_`. A name that ends in `-` stands for all that begin with it.
const ABSENT: &[(&[&str], &str)] = &[
    // Data
    (
        &["num-workers"],
        "one thread reads the samples of the next step ahead; of `tokenize`, --workers is the number of threads",
    ),
    (
        &["no-create-attention-mask-in-dataloader"],
        "samples are read without attention masks; leave it out",
    ),
    (
        &["tokenizer-type", "tiktoken-"],
        "--tokenizer takes gpt2 or the path of a tokenizer.json; token ids without a tokenizer need --vocab-size alone",
    ),
    (
        &["tokenizer-model", "tokenizer-name-or-path", "vocab-file", "merge-file"],
        "--tokenizer takes gpt2, whose files are in the program, or the path of a tokenizer.json or of BERT's vocab.txt",
    ),
    (
        &["data-cache-path", "dataloader-fast-cache-load", "dataloader-defer-npy-index-mmap"],
        "the order of samples is computed when a run starts, and no file keeps it; leave it out",
    ),
    (
        &[
            "data-impl",
            "dataset-impl",
            "no-mmap-bin-files",
            "mmap-warmup",
            "num-dataset-builder-threads",
        ],
        "data sets are recognised by their files, and read in place; leave it out",
    ),
    (&["mock-data"], "without --data a run trains on a text that the program carries"),
    (&["mid-level-dataset-surplus", "per-dataset-sequences-path"], NONE),
    (&["dataloader-type"], "--data-order computed or megatron decides the order of samples"),
    (
        &["make-vocab-size-divisible-by", "padded-vocab-size"],
        "vocabularies are not padded; leave it out",
    ),
    (&["mask-prob"], "a BERT predicts 15 % of the tokens"),
    (&["short-seq-prob"], "a tenth of the samples of a BERT aim at a shorter length"),
    (
        &["partitions", "keep-sequential-samples", "find-optimal-num-workers"],
        "documents stay in the order of the input; --workers is the number of threads",
    ),
    (&["keep-newlines", "lang"], "--split-sentences has one rule for all languages; leave it out"),
    // Model
    (
        &["squared-relu", "openai-gelu", "onnx-safe", "quick-geglu"],
        "--activation takes gelu-tanh, gelu-erf, relu, swiglu and geglu",
    ),
    (&["num-experts", "moe-", "expert-"], "there are no mixtures of experts"),
    (&["multi-latent-attention"], "there is no multi-latent attention"),
    (&["mtp-"], "a model predicts one token ahead alone"),
    (
        &["rope-type"],
        "--position-embedding-type rope has rotary positions, and --use-rope-scaling scales them",
    ),
    (
        &["embedding-init-method-std", "init-method-xavier-uniform"],
        "initial weights, embeddings too, are normal: --init-method-std is their standard deviation",
    ),
    (&["no-initialization"], "--load replaces the initial weights; leave it out"),
    (
        &[
            "use-flash-attn",
            "attention-backend",
            "transformer-impl",
            "use-mcore-models",
            "use-legacy-models",
            "no-masked-softmax-fusion",
            "no-bias-gelu-fusion",
            "no-bias-swiglu-fusion",
            "no-bias-dropout-fusion",
            "no-rope-fusion",
            "no-persist-layer-norm",
            "no-gradient-accumulation-fusion",
            "cross-entropy-loss-fusion",
            "cross-entropy-fusion-impl",
        ],
        "each operation has one implementation; leave it out",
    ),
    (&["apply-query-key-layer-scaling", "fp32-residual-connection", "fp16-lm-cross-entropy"], NONE),
    // Training
    (&["rl-", "grpo-"], "there is no reinforcement learning"),
    (
        &["batch-size"],
        "--micro-batch-size is the number of samples that a rank computes together, --global-batch-size that of a step",
    ),
    (
        &["warmup"],
        "--lr-warmup-fraction, --lr-warmup-iters or --lr-warmup-samples is the length of the warm-up",
    ),
    (
        &["step-batch-size-schedule"],
        "--rampup-batch-size START INCREMENT SAMPLES lets the batch grow by equal increments",
    ),
    (&["decrease-batch-size-if-needed"], "--global-batch-size must suit the ranks"),
    (
        &["start-weight-decay", "end-weight-decay", "weight-decay-incr-style"],
        "--weight-decay is the same at each step",
    ),
    (&["decoupled-lr", "decoupled-min-lr"], "--lr and --min-lr are those of all parameters"),
    (
        &["override-opt-param-scheduler"],
        "options that are given go before those of the checkpoint; leave it out",
    ),
    (
        &[
            "use-checkpoint-args",
            "use-checkpoint-opt-param-scheduler",
            "use-mp-args-from-checkpoint-args",
        ],
        FROM_CHECKPOINT,
    ),
    (
        &[
            "attention-softmax-in-fp32",
            "calculate-per-token-loss",
            "deterministic-mode",
            "use-cpu-initialization",
        ],
        ALWAYS,
    ),
    (
        &["data-parallel-random-init"],
        "initial weights are a function of --seed, the same in each layout",
    ),
    (
        &["no-check-for-nan-in-loss-and-grad", "check-for-nan-in-loss-and-grad", "rerun-mode"],
        "a step that is not finite changes nothing; --on-bad-step says what follows",
    ),
    (
        &["check-for-large-grads"],
        "--clip-grad bounds the norm of the gradient, which --metrics records",
    ),
    (&["muon-tp-mode"], "--optimizer muon takes whole matrices in each layout; leave it out"),
    (&["check-for-spiky-loss"], "--loss-spike-factor names spikes, and --on-bad-step what follows"),
    (&["iterations-to-skip"], "--on-bad-step skip leaves out steps that are not finite"),
    (&["skip-train"], "`ferrotron eval` evaluates without training"),
    (
        &["recompute-activations"],
        "--recompute-granularity selective computes attention's core again",
    ),
    (&["checkpoint-activations"], "--recompute-granularity full computes whole blocks again"),
    (
        &[
            "optimizer-cpu-offload",
            "optimizer-offload-fraction",
            "use-torch-optimizer-for-cpu-offload",
        ],
        "--offload-optimizer-states keeps the states in host memory, and the GPU updates the weights",
    ),
    (
        &[
            "use-precision-aware-optimizer",
            "main-grads-dtype",
            "main-params-dtype",
            "exp-avg-dtype",
            "exp-avg-sq-dtype",
        ],
        "the optimizer's states are f32, or f64 in f64; --no-master-weights saves the copy of the weights",
    ),
    (
        &["accumulate-allreduce-grads-in-fp32", "ddp-reduce-scatter-with-fp32-accumulation"],
        "it is so unless --grad-reduce-in-bf16 is given; leave it out",
    ),
    (&["fp8-", "fp4-", "first-last-layers-bf16"], "--bf16 and --fp16 are the shortest formats"),
    // Ranks
    (
        &[
            "overlap-",
            "no-overlap-",
            "tp-comm-",
            "disable-tp-comm-",
            "no-async-tensor-model-parallel-allreduce",
            "no-align-",
            "defer-embedding-wgrad-compute",
        ],
        "sums of gradients and messages of pipelines overlap without an option; leave it out",
    ),
    (
        &["delay-wgrad-compute"],
        "--pipeline-schedule zb-h1 computes gradients of weights later than those of activations",
    ),
    (
        &["no-scatter-gather-tensors-in-pipeline"],
        "tensor-parallel ranks send a shard each, without an option; leave it out",
    ),
    (
        &["model-parallel-size"],
        "--tensor-model-parallel-size is the number of ranks that share each layer",
    ),
    (
        &["num-layers-per-virtual-pipeline-stage"],
        "--num-virtual-stages-per-pipeline-rank is the number of chunks of a rank",
    ),
    (
        &[
            "decoder-first-pipeline-num-layers",
            "decoder-last-pipeline-num-layers",
            "account-for-",
            "pipeline-model-parallel-layout",
            "microbatch-group-size-per-virtual-pipeline-stage",
        ],
        "stages have the layers as evenly as they go; leave it out",
    ),
    (
        &["cp-comm-type", "hierarchical-context-parallel-sizes"],
        "keys and values go round a ring; leave it out",
    ),
    (
        &["use-megatron-fsdp", "use-torch-fsdp2"],
        "--zero-stage 3 shards weights, gradients and optimizer states",
    ),
    (
        &["ddp-num-buckets", "ddp-pad-buckets-for-high-nccl-busbw", "ddp-average-in-collective"],
        "--ddp-bucket-size is the size of a bucket",
    ),
    (
        &[
            "num-distributed-optimizer-instances",
            "use-tp-pp-dp-mapping",
            "disable-gloo-process-groups",
            "manual-gc",
            "manual-gc-",
            "no-manual-gc-eval",
            "use-nccl-ub",
            "check-weight-hash-across-dp-replicas-interval",
        ],
        NONE,
    ),
    // Checkpoints
    (&["persistent-save-interval"], "--save-interval is the number of steps between checkpoints"),
    (
        &["load-main-params-from-ckpt"],
        "--load takes the master weights, where a checkpoint has them; leave it out",
    ),
    (&["ckpt-step"], "--load takes a checkpoint too, as in --load RUN/iter_0000500"),
    (
        &["exit-on-missing-checkpoint"],
        "--load of a folder without a checkpoint is an error unless --save names it too; leave it out",
    ),
    (
        &["finetune", "no-load-optim", "no-load-rng"],
        "--load takes a Hugging Face folder, by `ferrotron export`, for a new run with its weights",
    ),
    (&["no-save-optim", "no-save-rng"], "`ferrotron export` writes the weights alone"),
    (
        &[
            "ckpt-",
            "no-ckpt-",
            "dist-ckpt-",
            "auto-detect-ckpt-format",
            "use-dist-ckpt",
            "use-persistent-ckpt-worker",
            "non-persistent-",
        ],
        "checkpoints have one format, which any layout reads; leave it out",
    ),
    // Reports
    (
        &["tensorboard-queue-size", "log-energy", "logging-level", "no-one-logger", "one-logger-"],
        NONE,
    ),
    (&["wandb-"], "--tensorboard-dir writes event files, and `ferrotron report` a page"),
    (
        &["timing-log-", "use-pytorch-profiler", "record-memory-history"],
        "--trace writes what each rank does in some steps",
    ),
    (
        &["straggler-minmax-count", "straggler-ctrlr-port", "disable-straggler-on-startup"],
        "--log-straggler names the slowest rank of each phase, from the first step on",
    ),
    (
        &[
            "log-params-norm",
            "log-num-zeros-in-grad",
            "log-learning-rate-to-tensorboard",
            "log-progress",
        ],
        "--metrics and --tensorboard-dir have the numbers that a run reports",
    ),
];

/// The line that refuses an option of Megatron-LM, with the way to its purpose; none for other options.
pub fn remedy(typed: &str) -> Option<String> {
    let name = typed.replace('_', "-");
    let is = |known: &&str| *known == name || (known.ends_with('-') && name.starts_with(*known));
    let (_, remedy) = ABSENT.iter().find(|(names, _)| names.iter().any(is))?;
    Some(format!("there is no option --{typed}: {remedy}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::CommandFactory;

    /// The options of some commands.
    fn known(is_asked: impl Fn(&str) -> bool) -> Vec<String> {
        let commands = Cli::command();
        let asked = commands.get_subcommands().filter(|command| is_asked(command.get_name()));
        let names = asked.flat_map(|command| command.get_arguments()).flat_map(|arg| {
            arg.get_long().into_iter().chain(arg.get_all_aliases().into_iter().flatten())
        });
        names.map(String::from).collect()
    }

    #[test]
    fn absent_options_are_none_of_this_program_and_remedies_name_its_options() {
        let known_to_all = known(|_| true);
        // A command that has an option takes it, as `bench --warmup`.
        let known = known(|command| ["train", "memory", "tokenize"].contains(&command));
        for (names, remedy) in ABSENT {
            for name in *names {
                assert!(!name.contains('_'), "{name} is never found");
                let is = |known: &String| match name.ends_with('-') {
                    true => known.starts_with(name),
                    false => known == name,
                };
                assert_eq!(known.iter().find(|known| is(known)), None, "{name}");
            }
            let mut options =
                remedy.split([' ', ',', ';', ':']).filter_map(|word| word.strip_prefix("--"));
            assert_eq!(
                options.find(|option| !known_to_all.contains(&option.to_string())),
                None,
                "{remedy}"
            );
        }
    }

    #[test]
    fn the_first_remedy_of_a_name_is_its_own() {
        let names: Vec<&str> = ABSENT.iter().flat_map(|(names, _)| *names).copied().collect();
        for (index, name) in names.iter().enumerate() {
            let hides = |other: &&&str| {
                **other == *name || (other.ends_with('-') && name.starts_with(**other))
            };
            assert_eq!(names[..index].iter().find(hides), None, "{name}");
        }
        assert!(remedy("fp8-format").unwrap().contains("--fp8-format: --bf16"));
        assert_eq!(remedy("no-such-flag"), None);
    }

    #[test]
    fn a_name_is_found_in_both_spellings_and_shown_as_typed() {
        for typed in ["override-opt_param-scheduler", "override-opt-param-scheduler"] {
            let line = remedy(typed).unwrap();
            let want = format!("there is no option --{typed}: options that are given go before");
            assert!(line.starts_with(&want), "{line}");
        }
        let line = remedy("use-checkpoint-opt_param-scheduler").unwrap();
        assert!(line.ends_with("where none is typed: leave out those options as well"), "{line}");
    }
}
