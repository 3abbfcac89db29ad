//! The loss of a step: terms, each a mean over the global batch.

use ferrotron_parallel::agreement::wait_for_all;
use ferrotron_parallel::collective::{Group, Reduction, Work};
use ferrotron_tensor::ops::concat::concat;
use ferrotron_tensor::ops::reduce::sum_all;
use ferrotron_tensor::{Device, Error, Result, Tensor};

use crate::io::data::Batch;
use crate::training::model::{LossTerm, Model};

/// The numbers of elements of each loss term that a rank's batches have.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LossCounts(Vec<LossTerm>);

impl LossCounts {
    /// Counts the elements of `batches`.
    ///
    /// Errors if a model has no term, or one that cannot be a mean, or if names or weights differ between batches.
    pub fn new<M: Model>(config: &M::Config, batches: &[Batch]) -> Result<LossCounts> {
        let mut counts: Option<Vec<LossTerm>> = None;
        for batch in batches {
            let terms = M::loss_terms(config, batch)?;
            check(&terms)?;
            match &mut counts {
                None => counts = Some(terms),
                Some(counts) => {
                    let key = |term: &LossTerm| (term.name, term.weight.to_bits());
                    if !counts.iter().map(key).eq(terms.iter().map(key)) {
                        let message = "names or weights of its terms differ between batches";
                        return Err(Error::value("loss", message));
                    }
                    counts.iter_mut().zip(terms).for_each(|(sum, term)| sum.count += term.count);
                }
            }
        }
        match counts.filter(|counts| !counts.is_empty()) {
            Some(counts) => Ok(LossCounts(counts)),
            None => Err(Error::value("loss", "the model has no loss term")),
        }
    }

    /// The same terms with the numbers of both.
    pub fn add(mut self, other: &LossCounts) -> LossCounts {
        self.0.iter_mut().zip(&other.0).for_each(|(sum, term)| sum.count += term.count);
        self
    }

    /// Number of terms.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The number of elements of each term.
    pub fn numbers(&self) -> Vec<f64> {
        self.0.iter().map(|term| term.count).collect()
    }

    /// The same terms with other numbers of elements.
    pub fn with_numbers(&self, numbers: &[f64]) -> LossCounts {
        let other = |(term, &count): (&LossTerm, &f64)| LossTerm { count, ..term.clone() };
        LossCounts(self.0.iter().zip(numbers).map(other).collect())
    }

    /// The number of elements of the first term.
    pub fn first(&self) -> f64 {
        self.0[0].count
    }

    /// The same terms with their numbers over all ranks of a group, in one call.
    #[track_caller]
    pub fn over(&self, ranks: &Group, host: &Device) -> Result<LossCounts> {
        let sums = ranks.sums(host, &self.numbers())?;
        Ok(self.with_numbers(&sums))
    }
}

/// Errors if two terms of a batch have one name, if a weight or a number of elements is none, or if the only weight is 0.
fn check(terms: &[LossTerm]) -> Result<()> {
    let refuse = |message: String| Err(Error::value("loss", message));
    for (i, LossTerm { name, weight, count }) in terms.iter().enumerate() {
        if terms[..i].iter().any(|term| term.name == *name) {
            return refuse(format!("two terms are named '{name}'"));
        }
        if !weight.is_finite() || !count.is_finite() || *count < 0.0 {
            return refuse(format!(
                "the term '{name}' has the weight {weight} and {count} elements: needs finite numbers, and elements of \
                 at least 0"
            ));
        }
    }
    match terms {
        [LossTerm { name, weight: 0.0, .. }] => {
            refuse(format!("the only term '{name}' has the weight 0: nothing would be trained"))
        }
        _ => Ok(()),
    }
}

/// The loss terms of a rank, in the order of their names.
pub(crate) struct LossSums {
    /// The sum of each over the micro-batches on this rank: f64 scalars.
    pub sums: Vec<Tensor>,
    /// Whether a chunk of this rank has returned it.
    pub returned: Vec<bool>,
}

/// Turns the sums of loss terms into the loss and its gradients.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LossReduction {
    /// Names of the terms.
    pub names: Vec<&'static str>,
    /// The gradient of the loss that backward starts with, without the loss scale.
    pub cotangent: f64,
    /// The factor of each term's sum in that loss. A single term has 1.
    pub relative: Vec<f64>,
    /// The factor of each term's sum over the world in its mean.
    pub mean: Vec<f64>,
    /// The weight of each mean in the reported loss.
    weights: Vec<f64>,
    /// The number by which the reported sum is divided.
    pub denominator: f64,
}

impl LossReduction {
    /// The reduction for gradients over the elements `own` and reports over `all`; the two differ where replicas take
    /// steps of their own.
    pub fn new(own: &LossCounts, all: &LossCounts) -> LossReduction {
        // A rank may have no valid tokens if ranks take independent steps.
        let factor =
            |term: &LossTerm| if term.count > 0.0 { term.weight / term.count } else { 0.0 };
        let inverse = |term: &LossTerm| if term.count > 0.0 { 1.0 / term.count } else { 0.0 };
        let names = own.0.iter().map(|term| term.name).collect();
        let mean = all.0.iter().map(inverse).collect();
        let weights = all.0.iter().map(|term| term.weight).collect();
        // One term gets its factor as the gradient, several as factors of their sums.
        let (cotangent, relative, denominator) = match (&own.0[..], &all.0[..]) {
            ([own], [all]) => (factor(own), vec![1.0], all.count / all.weight),
            // Nothing divided by nothing is not finite, and such a step is bad.
            (own, all) => {
                let counts = all.iter().any(|term| term.weight != 0.0 && term.count > 0.0);
                (1.0, own.iter().map(factor).collect(), f64::from(u8::from(counts)))
            }
        };
        LossReduction { names, cotangent, relative, mean, weights, denominator }
    }

    /// The reduction for an evaluation, which has no gradients.
    pub fn evaluation(counts: &LossCounts) -> LossReduction {
        LossReduction::new(counts, counts)
    }

    /// Says why there is no loss, if no term with a weight has elements over all ranks.
    pub fn why_empty(&self) -> Option<String> {
        let terms = || self.names.iter().zip(&self.weights).zip(&self.mean);
        let counted = |((_, weight), mean): ((_, &f64), &f64)| *weight != 0.0 && *mean > 0.0;
        if terms().any(counted) {
            return None;
        }
        let names: Vec<&str> = self.names.to_vec();
        Some(format!(
            "`Model::loss_terms` gives '{}' 0 elements over all samples and ranks: give samples that count, or count what \
             `Model::forward` sums",
            names.join("', '")
        ))
    }

    /// The number to divide by the denominator, from the sum of each term over the world.
    pub fn weighted(&self, sums: &[f64]) -> f64 {
        match sums {
            [sum] => *sum,
            sums => sums.iter().zip(self.factors()).map(|(sum, factor)| sum * factor).sum(),
        }
    }

    /// The factor of each of several terms' sums in the reported loss.
    fn factors(&self) -> Vec<f64> {
        self.mean.iter().zip(&self.weights).map(|(mean, weight)| mean * weight).collect()
    }

    /// Starts to sum each term over `world`. The result is their weighted sum, a scalar to divide by the denominator, and,
    /// if there are several, the sum of each, (terms).
    pub fn reduce(
        &self,
        mut sums: Vec<Tensor>,
        world: &Group,
    ) -> Result<Work<(Tensor, Option<Tensor>)>> {
        if sums.len() == 1 {
            let sum = world.all_reduce(sums.remove(0), Reduction::Sum)?;
            return Ok(sum.map(|sum| Ok((sum, None))));
        }
        let vectors = sums.iter().map(|sum| sum.reshape(&[1])).collect::<Result<Vec<_>>>()?;
        let terms = concat(&vectors.iter().collect::<Vec<_>>(), 0)?;
        let factors = self.factors();
        Ok(world.all_reduce(terms, Reduction::Sum)?.map(move |terms| {
            let factors = Tensor::constant(terms.device(), &factors, &[factors.len()])?;
            Ok((sum_all(&terms.mul(&factors)?)?, Some(terms)))
        }))
    }

    /// The reported loss for these sums of its terms over the world.
    pub fn total(&self, sums: &[f64]) -> f64 {
        self.weighted(sums) / self.denominator
    }

    /// Errors, with the same line on every rank of `world`, if no rank returned a term that has elements: it would train
    /// nothing. A fake device has no other ranks to ask.
    ///
    /// Terms in `known` were returned before, and are not asked for; the others join them. All ranks call this.
    pub fn check_returned(
        &self,
        losses: &LossSums,
        known: &mut Vec<&'static str>,
        world: &Group,
    ) -> Result<()> {
        // One rank need not ask, and looks in every step.
        let is_known = |name| world.size() > 1 && known.contains(name);
        let is_new = |&term: &usize| self.mean[term] > 0.0 && !is_known(&self.names[term]);
        let new: Vec<usize> = (0..self.names.len()).filter(is_new).collect();
        if new.is_empty() || losses.sums[0].device().is_fake() {
            return Ok(());
        }
        let returned = |&term: &usize| f64::from(u8::from(losses.returned[term]));
        let mut all: Vec<f64> = new.iter().map(returned).collect();
        if world.size() > 1 {
            let own = Tensor::from_slice(&Device::cpu(1)?, &all, &[new.len()])?;
            all = world.all_reduce(own, Reduction::Max)?.wait()?.to_vec::<f64>()?;
        }
        for (&term, &returned) in new.iter().zip(&all) {
            if returned == 0.0 {
                let name = self.names[term];
                let message = format!(
                    "`Model::loss_terms` names '{name}', and `Model::forward` did not return it on any rank: add it by \
                     `StageOutput::loss` or `with_loss`"
                );
                wait_for_all(world);
                return Err(Error::value("loss", message));
            }
        }
        let names = new.into_iter().map(|term| self.names[term]);
        known.extend(names.filter(|_| world.size() > 1));
        Ok(())
    }

    /// The mean of each term, by name: from the reported loss, or from the sums of several terms over the world. It is 0 for
    /// a term without elements.
    ///
    /// Errors, naming it, if a term without elements has a sum other than 0, which no gradient contains.
    pub fn means(&self, loss: f64, sums: Option<&[f64]>) -> Result<Vec<(&'static str, f64)>> {
        // A sum that is not finite makes a loss that is not.
        let stray =
            |&(term, sum): &(usize, f64)| self.mean[term] == 0.0 && sum != 0.0 && sum.is_finite();
        let mut by_term = sums.into_iter().flatten().copied().enumerate();
        if let Some((term, sum)) = by_term.find(stray) {
            let name = self.names[term];
            let message = format!(
                "`Model::loss_terms` gives '{name}' 0 elements over all samples and ranks, and `Model::forward` returned \
                 a sum of {sum}: count what it sums"
            );
            return Err(Error::value("loss", message));
        }
        let means: Vec<f64> = match sums {
            Some(sums) => self.mean.iter().zip(sums).map(|(mean, sum)| mean * sum).collect(),
            None => self.weights.iter().map(|weight| loss / weight).collect(),
        };
        Ok(self.names.iter().copied().zip(means).collect())
    }
}
