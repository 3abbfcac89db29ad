//! Parameters that some or all ranks do not use in a step: [`Unused::Skip`].
//!
//! A rank that does not use a parameter adds zeros, and all agree on which parameters anybody used. Buckets are reduced
//! in their order, since each rank completes others first.

use ferrotron_autograd::lock;
use ferrotron_nn::{Axis, ParamAndGradBucket, Sharding, Unused};
use ferrotron_tensor::{Device, Result, Tensor};

use super::reductions::{ReductionState, miscount};
use crate::collective::{Group, Reduction};

impl ReductionState {
    /// Returns whether parameters may be unused.
    pub fn skips_unused(&self) -> bool {
        self.config.unused == Unused::Skip
    }

    /// Returns whether sharded weights are gathered all at once.
    pub fn gathers_all(&self) -> bool {
        self.skips_unused() && self.sharding() == Sharding::Weights
    }

    /// Returns whether ranks wait within a pass for others than those along the tensor axis, which use the same
    /// parameters: for keys of the same sequence, or another stage. Reductions that each starts elsewhere in its pass might
    /// then wait for each other, if a rank's calls run in one order.
    pub fn waits_within_passes(&self) -> bool {
        let layout = self.mesh.layout();
        layout.size(Axis::Context) > 1 || layout.size(Axis::Pipeline) > 1
    }

    /// Starts the reductions of buckets whose turn it is.
    pub fn reduce_ready(&self) -> Result<()> {
        loop {
            let mut turn = lock(&self.turn);
            let bucket = *turn;
            let is_ready = self.reductions.get(bucket).is_some_and(|one| lock(one).is_ready);
            if !is_ready {
                return Ok(());
            }
            lock(&self.reductions[bucket]).is_ready = false;
            *turn += 1;
            drop(turn);
            self.reduce(bucket)?;
        }
    }

    /// Completes by zeros the buckets in which this rank did not use all parameters, and starts their reductions. Called
    /// behind the last backward of a step or, if gradients are sharded, of a micro-batch. Does nothing with
    /// [`Unused::Refuse`], or the second time in a step.
    ///
    /// Errors, naming it, if a parameter got more contributions than it has uses.
    pub fn complete_unused(&self) -> Result<()> {
        if !self.skips_unused() {
            return Ok(());
        }
        let first = *lock(&self.turn);
        (first..self.reductions.len()).try_for_each(|bucket| self.complete(bucket))?;
        self.reduce_ready()?;
        // Another micro-batch may follow only if each one is reduced.
        *lock(&self.turn) = if self.keeps_gradients() { self.reductions.len() } else { 0 };
        Ok(())
    }

    fn complete(&self, bucket: usize) -> Result<()> {
        let group = &self.buffers.groups()[bucket];
        let mut reducing = lock(&self.reductions[bucket]);
        if std::mem::replace(&mut reducing.is_ready, true) {
            return Ok(());
        }
        if reducing.rounds == 0 {
            return Err(self.miscounted(bucket, 0));
        }
        let microbatches = if self.keeps_gradients() { reducing.microbatches } else { 1 };
        group.alloc_gradients()?;
        for (i, (param, uses)) in group.params.iter().zip(&self.uses[bucket]).enumerate() {
            let (found, most) = (param.leaf().contributions(), uses * microbatches);
            if found > most {
                return Err(miscount(param.name(), found, most));
            }
            if found == 0 {
                group.zero_gradient(i)?;
            }
            reducing.contributed[i] |= found > 0;
        }
        reducing.rounds -= 1;
        reducing.missing = group.params.len();
        Ok(())
    }

    /// Tells the buffers which parameters any rank contributed to, once all gradients are reduced.
    pub fn tell_contributions(&self, device: &Device) -> Result<()> {
        let groups = self.buffers.groups();
        if !self.skips_unused() {
            let all = |group: &ParamAndGradBucket| vec![true; group.params.len()];
            groups.iter().for_each(|group| group.set_contributed(Some(all(group))));
            return Ok(());
        }
        let own = self.reductions.iter().map(|one| lock(one).contributed.clone());
        let mut flags: Vec<Vec<bool>> = own.collect();
        if !device.is_fake() {
            let every: Vec<usize> = (0..groups.len()).collect();
            if !self.is_local() {
                any(self.mesh.dp_cp(), &mut flags, &every)?;
            }
            any(self.mesh.axis(Axis::Tensor), &mut flags, &every)?;
            let tied = |&bucket: &usize| groups[bucket].replicated.contains(Axis::Pipeline);
            let tied: Vec<usize> = every.into_iter().filter(tied).collect();
            any(&self.mesh.stages().embedding_group, &mut flags, &tied)?;
        }
        groups.iter().zip(flags).for_each(|(group, flags)| group.set_contributed(Some(flags)));
        Ok(())
    }
}

/// Sets the flags of some buckets that are set on any rank.
fn any(ranks: &Group, flags: &mut [Vec<bool>], buckets: &[usize]) -> Result<()> {
    let own: Vec<f32> = buckets
        .iter()
        .flat_map(|&bucket| &flags[bucket])
        .map(|&flag| f32::from(u8::from(flag)))
        .collect();
    if ranks.size() == 1 || own.is_empty() {
        return Ok(());
    }
    let own = Tensor::from_slice(&Device::cpu(1)?, &own, &[own.len()])?;
    let all = ranks.all_reduce(own, Reduction::Max)?.wait()?.to_vec::<f32>()?;
    let places =
        buckets.iter().flat_map(|&bucket| (0..flags[bucket].len()).map(move |i| (bucket, i)));
    let places: Vec<(usize, usize)> = places.collect();
    places.into_iter().zip(all).for_each(|((bucket, i), flag)| flags[bucket][i] = flag > 0.0);
    Ok(())
}
