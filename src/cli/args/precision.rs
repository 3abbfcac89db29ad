//! The options that say how a model is trained in 16 bits, with Megatron's names and defaults.

use clap::Args;
use ferrotron::models::trainer::PrecisionConfig;
use ferrotron::nn::{GradDType, LossScale, ParamPatterns, Rounding, WeightUpdate};
use ferrotron::{DType, Error, Result};

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Mixed precision")]
pub struct PrecisionArgs {
    /// Multiply the loss by this before backward [default: 1, or dynamic with --fp16]
    #[arg(long, value_name = "X")]
    pub loss_scale: Option<f64>,
    /// First dynamic scale
    #[arg(long, value_name = "X", default_value_t = 4_294_967_296.0)]
    pub initial_loss_scale: f64,
    /// Smallest dynamic scale
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    pub min_loss_scale: f64,
    /// Steps without an overflow after which the dynamic scale is doubled
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub loss_scale_window: u64,
    /// Overflows after which the dynamic scale is halved at each further one
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub hysteresis: u64,
    /// Add up and reduce the gradients of --bf16 in bf16 instead of f32
    #[arg(long)]
    pub grad_reduce_in_bf16: bool,
    /// Update 16-bit weights in place instead of in an f32 copy
    #[arg(long)]
    pub no_master_weights: bool,
    /// Round updated 16-bit weights up or down at random, right in the mean
    #[arg(long)]
    pub stochastic_rounding: bool,
    /// Parameters or modules whose weights stay in f32 with --bf16 or --fp16, by name as for --freeze-parameters: '*norm*',
    /// say
    #[arg(long, value_name = "PATTERN", num_args = 1.., value_delimiter = ',')]
    keep_in_fp32: Vec<String>,
}

impl PrecisionArgs {
    /// The precision of training weights of `dtype`.
    pub fn config(&self, dtype: DType, seed: u64) -> Result<PrecisionConfig> {
        let narrow = matches!(dtype, DType::BF16 | DType::F16);
        for (name, given, fits, needs) in [
            ("--grad-reduce-in-bf16", self.grad_reduce_in_bf16, dtype == DType::BF16, "--bf16"),
            ("--no-master-weights", self.no_master_weights, narrow, "--bf16 or --fp16"),
            ("--stochastic-rounding", self.stochastic_rounding, narrow, "--bf16 or --fp16"),
            ("--keep-in-fp32", !self.keep_in_fp32.is_empty(), narrow, "--bf16 or --fp16"),
        ] {
            if given && !fits {
                return Err(Error::config(name, format!("needs {needs}, got {dtype}")));
            }
        }
        let dynamic = LossScale::Dynamic {
            initial: self.initial_loss_scale,
            window: self.loss_scale_window,
            hysteresis: self.hysteresis,
            minimum: self.min_loss_scale,
        };
        Ok(PrecisionConfig {
            weight_update: match self.no_master_weights {
                true => WeightUpdate::InPlace,
                false => WeightUpdate::MasterCopy,
            },
            rounding: match self.stochastic_rounding {
                true => Rounding::Stochastic { seed },
                false => Rounding::Nearest,
            },
            loss_scale: match self.loss_scale {
                Some(scale) => LossScale::Constant(scale),
                None if dtype == DType::F16 => dynamic,
                None => LossScale::NONE,
            },
        })
    }

    /// The parameters that stay in f32.
    ///
    /// Errors as [`ParamPatterns::new`].
    pub fn keep_in_fp32(&self) -> Result<ParamPatterns> {
        ParamPatterns::new(&self.keep_in_fp32)
            .map_err(|error| Error::config("--keep-in-fp32", error.context()))
    }

    /// The type in which gradients are summed.
    pub fn gradients(&self) -> GradDType {
        match self.grad_reduce_in_bf16 {
            true => GradDType::Weight,
            false => GradDType::Accumulator,
        }
    }
}
