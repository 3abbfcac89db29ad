//! Adafactor: Shazeer and Stern, arXiv 1804.04235, algorithms 4 to 6.
//!
//! If tensors are sharded over ranks, a step has two all-reduces: of sums of squared gradients and weights, and of
//! sums of squared updates.

use ferrotron_tensor::ops::adafactor::{
    Adafactor, NormalizeBy, RowColFactors, SecondMomentDecay, SquareSums, adafactor,
    matrix_factors, square_sums, update_mean_squares, update_means, update_sq_norm, vector_factors,
};
use ferrotron_tensor::ops::concat::concat;
use ferrotron_tensor::ops::rounded::Rounded;
use ferrotron_tensor::ops::sq_norm::add_sq_norm;
use ferrotron_tensor::{DType, Device, Error, Result, Tensor};

use super::block::Block;
use super::check::{fractions, non_negative};
use super::rule::{StepTensors, UpdateRule, UpdateStep, updates_in_one_pass};
use super::shard_exchange::{ExchangeSize, ShardedSum};
use super::shard_unit::ShardUnit;
use super::state::StateSpec;
use crate::AxisSet;

/// Hyperparameters of Adafactor: Shazeer and Stern, arXiv 1804.04235, named as in Hugging Face transformers'
/// `Adafactor`.
///
/// Queries, keys and values are separate tensors to it, and so are gate and up, although each set is stored as one
/// parameter.
///
/// `torch.optim.Adafactor` differs as follows. It uses eps1 as a lower bound of the mean squares instead of adding
/// it. It takes the smaller of the learning rate and 1 / sqrt(t), and always scales it by the parameter. It decays
/// weights by the learning rate before that scaling, and it has no beta1.
///
/// ```
/// use ferrotron_nn::{AdafactorConfig, OptimizerConfig, StepSize};
/// let relative = OptimizerConfig::Adafactor(AdafactorConfig::default());
/// assert_eq!(relative.learning_rate(3e-4, 40_000), 0.005);
/// let scheduled = AdafactorConfig { step_size: StepSize::Scheduled, ..AdafactorConfig::default() };
/// assert_eq!(OptimizerConfig::Adafactor(scheduled).learning_rate(3e-4, 100), 3e-4);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdafactorConfig {
    /// The source of the step size.
    pub step_size: StepSize,
    /// Decay of the running mean of updates; 0 disables it.
    pub beta1: f64,
    /// The decay of the mean squares at step t is 1 - t^-decay_rate.
    pub decay_rate: f64,
    /// Added to squared gradients.
    pub eps1: f64,
    /// Lower bound of the parameter RMS that scales a relative step.
    pub eps2: f64,
    /// Upper bound of the RMS of an update, d in the paper.
    pub clip_threshold: f64,
    /// Decoupled decay per unit of step size, for parameters with weight decay.
    pub weight_decay: f64,
}

/// The source of the step size of Adafactor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StepSize {
    /// min(0.01, 1 / sqrt(t)) at step t, times the larger of the tensor's RMS and eps2: section 8.
    #[default]
    Relative,
    /// The schedule's learning rate, for all tensors.
    Scheduled,
}

impl Default for AdafactorConfig {
    /// The defaults of algorithm 6 of the paper.
    fn default() -> AdafactorConfig {
        AdafactorConfig {
            step_size: StepSize::Relative,
            beta1: 0.0,
            decay_rate: 0.8,
            eps1: 1e-30,
            eps2: 1e-3,
            clip_threshold: 1.0,
            weight_decay: 0.0,
        }
    }
}

impl AdafactorConfig {
    fn is_relative(&self) -> bool {
        self.step_size == StepSize::Relative
    }

    /// The index of the second moments among the states.
    fn second_moments(&self) -> usize {
        usize::from(self.beta1 > 0.0)
    }

    /// The second pass over a block: weights, and the rounded weights if there are any.
    fn pass(
        &self,
        weights: &mut Tensor,
        gradient: &Tensor,
        states: &mut [&mut Tensor],
        rounded: Option<Rounded>,
        step: &UpdateStep,
    ) -> Result<()> {
        let config = Adafactor {
            eps2: self.eps2,
            clip_threshold: self.clip_threshold,
            beta1: self.beta1,
            weight_decay: step.weight_decay(self.weight_decay),
        };
        let block = step.block()?;
        let factors = self.factors(block, states)?;
        let [update, rest @ ..] = step.prepared() else {
            return Err(Error::config("adafactor", "the sums of this step are missing"));
        };
        let (update, of_weights) = (update.clone(), rest.first().cloned());
        let sums = SquareSums { weights: of_weights, update, numel: block.numel() };
        let mean = (self.beta1 > 0.0).then(|| &mut *states[0]);
        let facts = (&factors, &sums);
        adafactor(&config, step.device_params(), weights, gradient, facts, mean, rounded)
    }

    /// The factors that multiply the gradient of a block, from its states.
    fn factors(&self, block: &Block, states: &[&mut Tensor]) -> Result<RowColFactors> {
        match &states[self.second_moments()..] {
            [rows, columns] => {
                let mean_of = match block.spans_ranks() {
                    (_, false) => NormalizeBy::Rows,
                    (_, true) => NormalizeBy::Columns,
                };
                matrix_factors(&block.shape(), rows, columns, mean_of)
            }
            elements => vector_factors(elements[0]),
        }
    }
}

impl UpdateRule for AdafactorConfig {
    fn name(&self) -> &'static str {
        "adafactor"
    }

    fn validate(&self) -> Result<()> {
        fractions(&[("beta1", self.beta1)])?;
        non_negative(&[
            ("decay rate", self.decay_rate),
            ("eps1", self.eps1),
            ("eps2", self.eps2),
            ("weight decay", self.weight_decay),
        ])?;
        let refuse = |message| Err(Error::config("optimizer", message));
        let (eps1, clip) = (self.eps1, self.clip_threshold);
        if eps1 < f64::from(f32::MIN_POSITIVE) {
            return refuse(format!(
                "eps1 must be positive, got {eps1:e}, which is 0 in f32: rows without gradient divide by it"
            ));
        }
        if clip.is_nan() || clip <= 0.0 {
            return refuse(format!("the clip threshold must be positive, got {clip}"));
        }
        Ok(())
    }

    fn shard_unit(&self) -> ShardUnit {
        ShardUnit::Parameters
    }

    /// The mean of updates, if there is one, and mean squares: per row and per column of a matrix, per element of a
    /// vector.
    fn states(&self, dims: &[usize]) -> Vec<StateSpec> {
        let mean = (self.beta1 > 0.0).then_some(StateSpec::per_element("exp_avg"));
        let squares = match dims.len() {
            0 | 1 => vec![StateSpec::per_element("exp_avg_sq")],
            _ => {
                vec![StateSpec::per_row("exp_avg_sq_row"), StateSpec::per_column("exp_avg_sq_col")]
            }
        };
        mean.into_iter().chain(squares).collect()
    }

    fn learning_rate(&self, scheduled: f64, step: u64) -> f64 {
        if self.is_relative() { (1.0 / (step as f64).sqrt()).min(1e-2) } else { scheduled }
    }

    fn is_fused(&self) -> bool {
        true
    }

    /// Updates the mean squares. Returns the sums of squares over whole tensors of each update and, for relative
    /// steps, of the weights.
    fn prepare(
        &self,
        tensors: &mut dyn StepTensors,
        step: &UpdateStep,
    ) -> Result<Vec<Vec<Tensor>>> {
        let mut all = Vec::new();
        for index in 0..tensors.len() {
            let (block, grads) = (tensors.block(index), tensors.gradient(index)?);
            let mut sums = Sums::zeros(self, grads.device(), block)?;
            if let Some(sum) = &mut sums.weights {
                add_sq_norm(sum, &tensors.weights(index)?)?;
            }
            if !block.is_vector() {
                square_sums(&block.shape(), &grads, &mut sums.rows, &mut sums.columns)?;
            }
            all.push(sums);
        }
        add_up(&mut all, ShardedSum::Squares, step)?;

        let decay = SecondMomentDecay { rate: self.decay_rate, eps1: self.eps1 };
        let first = self.second_moments();
        for (index, sums) in all.iter_mut().enumerate() {
            if tensors.is_unused(index) {
                continue;
            }
            let grads = tensors.gradient(index)?;
            tensors.with_states(index, &mut |states| {
                match &mut states[first..] {
                    [rows, columns] => {
                        let (height, width) = sums.block.sides();
                        update_means(&decay, step.device_params(), rows, &sums.rows, width)?;
                        update_means(&decay, step.device_params(), columns, &sums.columns, height)?;
                    }
                    elements => {
                        update_mean_squares(&decay, step.device_params(), elements[0], &grads)?;
                    }
                }
                let factors = self.factors(&sums.block, states)?;
                sums.update = update_sq_norm(step.device_params(), &grads, &factors)?;
                Ok(())
            })?;
        }
        add_up(&mut all, ShardedSum::Updates, step)?;
        let totals = |sums: Sums| [sums.update].into_iter().chain(sums.weights).collect();
        Ok(all.into_iter().map(totals).collect())
    }

    fn shard_exchanges(&self, blocks: &[&Block], _accumulator: DType) -> Vec<ExchangeSize> {
        let mut blocks = blocks.to_vec();
        blocks.sort_by(|a, b| a.name().cmp(b.name()));
        let relative = usize::from(self.is_relative());
        let numbers = |block: &Block, what| {
            let (shape, (rows_go_on, columns_go_on)) = (block.shape(), block.spans_ranks());
            match what {
                _ if !block.is_part() => 0,
                ShardedSum::Squares => {
                    relative
                        + usize::from(rows_go_on) * shape.count * shape.rows
                        + usize::from(columns_go_on) * shape.count * shape.columns
                }
                _ => 1,
            }
        };
        let mut lengths: Vec<usize> = Vec::new();
        for what in [ShardedSum::Squares, ShardedSum::Updates] {
            for kind in kinds(blocks.iter().copied()) {
                let alike = blocks.iter().filter(|block| block.piece.replicated == kind);
                lengths.push(alike.map(|block| numbers(block, what)).sum());
            }
        }
        lengths.retain(|&length| length > 0);
        let sum = |numel| ExchangeSize { numel, dtype: DType::F64, gathered_dim: None };
        lengths.into_iter().map(sum).collect()
    }

    updates_in_one_pass!(Self::pass);
}

/// The sums of one block: local first, then global.
struct Sums {
    block: Block,
    rows: Tensor,
    columns: Tensor,
    update: Tensor,
    weights: Option<Tensor>,
}

impl Sums {
    fn zeros(config: &AdafactorConfig, device: &Device, block: &Block) -> Result<Sums> {
        let zeros = |n| Tensor::zeros(device, DType::F64, &[n]);
        let (shape, matrix) = (block.shape(), usize::from(!block.is_vector()));
        Ok(Sums {
            block: block.clone(),
            rows: zeros(matrix * shape.count * shape.rows)?,
            columns: zeros(matrix * shape.count * shape.columns)?,
            update: zeros(1)?,
            weights: config.is_relative().then(|| zeros(1)).transpose()?,
        })
    }

    /// The sums that span ranks, and therefore need a reduction.
    fn parts(&mut self, what: ShardedSum) -> Vec<&mut Tensor> {
        if !self.block.is_part() {
            return Vec::new();
        }
        if what == ShardedSum::Updates {
            return vec![&mut self.update];
        }
        let (rows_go_on, columns_go_on) = self.block.spans_ranks();
        let rows = rows_go_on.then_some(&mut self.rows);
        let columns = columns_go_on.then_some(&mut self.columns);
        self.weights.iter_mut().chain(rows).chain(columns).collect()
    }
}

/// The distinct sets of axes along which blocks are replicated.
fn kinds<'a>(blocks: impl Iterator<Item = &'a Block>) -> Vec<AxisSet> {
    let mut kinds = Vec::new();
    for block in blocks {
        if !kinds.contains(&block.piece.replicated) {
            kinds.push(block.piece.replicated);
        }
    }
    kinds
}

/// Reduces the sums `what`, in one call per set of replicated axes. The order of additions depends on the position in
/// the message. Two stages that hold the same parameter get the same bits only from messages of the same layout. The
/// sums are sorted by name, since groups may differ between ranks.
fn add_up(all: &mut [Sums], what: ShardedSum, step: &UpdateStep) -> Result<()> {
    let mut sums: Vec<&mut Sums> = all.iter_mut().collect();
    sums.sort_by(|a, b| a.block.name().cmp(b.block.name()));
    for kind in kinds(sums.iter().map(|sums| &sums.block)) {
        let alike = sums.iter_mut().filter(|sums| sums.block.piece.replicated == kind);
        let mut parts: Vec<&mut Tensor> = alike.flat_map(|sums| sums.parts(what)).collect();
        let own: Vec<&Tensor> = parts.iter().map(|part| &**part).collect();
        if own.iter().all(|part| part.numel() == 0) {
            continue;
        }
        let sums = step.sum(what, concat(&own, 0)?)?;
        let mut start = 0;
        for part in &mut parts {
            **part = sums.narrow(0, start, part.numel())?.copy()?;
            start += part.numel();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows without gradient have this mean square, in f32.
    #[test]
    fn an_eps1_that_is_zero_in_f32_is_refused() {
        let with = |eps1| AdafactorConfig { eps1, ..AdafactorConfig::default() };
        let error = with(1e-50).validate().unwrap_err().to_string();
        assert!(error.contains("eps1 must be positive, got 1e-50"), "{error}");
        assert!(with(f64::from(f32::MIN_POSITIVE)).validate().is_ok());
    }
}
