//! Weights that are gathered just in time and freed when the next are in use: ZeRO stage 3.
//!
//! Buckets of equal facts form a line, in the order in which backward needs them. Walking along a line, in
//! either direction, a bucket is gathered while the one before it is in use; the one behind is freed. Tensors
//! that still read a freed bucket keep its memory until they are gone.

use ferrotron_nn::ParamGroup;
use ferrotron_tensor::Result;

use crate::collective::Work;
use crate::data_parallel::Shared;

pub(crate) struct GatheredWeights {
    lines: Vec<Line>,
}

/// Buckets of equal facts.
struct Line {
    buckets: Vec<usize>,
    /// The position on the line that was asked for last.
    last: Option<usize>,
    /// Positions whose weights are here or, with work, on their way.
    here: Vec<(usize, Option<Work<()>>)>,
}

impl GatheredWeights {
    pub fn new(groups: &[ParamGroup]) -> GatheredWeights {
        let facts = |group: &ParamGroup| (group.decay, group.replicated, group.grad_partial);
        let mut lines: Vec<Line> = Vec::new();
        for (bucket, group) in groups.iter().enumerate() {
            let line =
                lines.iter_mut().find(|line| facts(&groups[line.buckets[0]]) == facts(group));
            match line {
                Some(line) => line.buckets.push(bucket),
                None => lines.push(Line { buckets: vec![bucket], last: None, here: Vec::new() }),
            }
        }
        GatheredWeights { lines }
    }

    /// Makes sure that the weights of a bucket are here, and begins to gather those that come next.
    pub fn fetch(&mut self, shared: &Shared, bucket: usize) -> Result<()> {
        let found = self.lines.iter_mut().find_map(|line| {
            let position = line.buckets.iter().position(|&other| other == bucket)?;
            Some((line, position))
        });
        let (line, position) = found.expect("every bucket is on a line");
        line.gather(shared, position)?;
        line.arrive(position)?;
        let last = line.last.replace(position);
        // Walks go step by step. A jump, to a tied embedding for example, says nothing of what follows.
        let ahead = last
            .filter(|last| last.abs_diff(position) == 1)
            .and_then(|last| (2 * position).checked_sub(last))
            .filter(|&ahead| ahead < line.buckets.len());
        if last != Some(position) {
            line.free(shared, |other| other != position && Some(other) != ahead)?;
        }
        ahead.map_or(Ok(()), |ahead| line.gather(shared, ahead))
    }

    /// Frees all weights: they are about to change.
    pub fn free_all(&mut self, shared: &Shared) -> Result<()> {
        self.lines.iter_mut().try_for_each(|line| {
            line.last = None;
            line.free(shared, |_| true)
        })
    }
}

impl Line {
    fn gather(&mut self, shared: &Shared, position: usize) -> Result<()> {
        if self.here.iter().all(|&(other, _)| other != position) {
            let group = &shared.buffers.groups()[self.buckets[position]];
            let batch = shared.mesh.batch();
            group.take_weights()?;
            group.place_weights()?;
            self.here.push((position, Some(batch.all_gather_flat(&group.weights))));
        }
        Ok(())
    }

    fn arrive(&mut self, position: usize) -> Result<()> {
        let entry = self.here.iter_mut().find(|(other, _)| *other == position);
        entry.and_then(|(_, work)| work.take()).map_or(Ok(()), Work::wait)
    }

    fn free(&mut self, shared: &Shared, which: impl Fn(usize) -> bool) -> Result<()> {
        for (position, work) in std::mem::take(&mut self.here) {
            if which(position) {
                work.map_or(Ok(()), Work::wait)?;
                shared.buffers.groups()[self.buckets[position]].free_weights();
            } else {
                self.here.push((position, work));
            }
        }
        Ok(())
    }
}
