//! ZeRO stage 3: prefetches sharded weights one bucket ahead of their use, and frees them afterwards.
//!
//! Buckets with equal properties form a line, in the order in which backward needs them. While a bucket is in use,
//! the next one in the direction of travel is gathered, and the previous one is freed. Tensors that still read a
//! freed bucket keep its memory.

use ferrotron_nn::{ParamAndGradBucket, Unused};
use ferrotron_tensor::Result;

use super::whole_parameters;
use crate::collective::Group;

/// All lines, with their gathered buckets.
pub(super) struct UnshardPrefetcher {
    lines: Vec<BucketChain>,
    /// Whether the first use of any weight gathers all of them.
    gathers_all: bool,
}

/// Buckets with equal properties.
struct BucketChain {
    buckets: Vec<usize>,
    walk: PrefetchWindow,
    /// Positions with gathered weights, or weights on their way.
    here: Vec<usize>,
}

/// The gathered positions of a line: the one in use and a companion.
#[derive(Debug, Default)]
pub(super) struct PrefetchWindow {
    len: usize,
    /// The position in use, if any.
    current: Option<usize>,
    companion: Option<usize>,
}

impl PrefetchWindow {
    pub fn new(len: usize) -> PrefetchWindow {
        PrefetchWindow { len, ..PrefetchWindow::default() }
    }

    /// Moves to a position and returns the positions to gather, this one first if it is not gathered yet.
    ///
    /// The companion is the next position in the direction of travel. At an end the direction reverses, so it is the
    /// previous position, which is already gathered. After a jump, for example to a tied embedding, the companion is
    /// the origin of the jump, since a jump back is likely.
    pub fn advance(&mut self, position: usize) -> Vec<usize> {
        if self.current == Some(position) {
            return Vec::new();
        }
        let companion = match self.current {
            Some(from) if from.abs_diff(position) > 1 => Some(from),
            Some(from) => self.turning(position, position > from),
            None => self.turning(position, position == 0),
        };
        let wanted = [Some(position), companion];
        let known = [self.current, self.companion];
        (self.current, self.companion) = (Some(position), companion);
        wanted.into_iter().filter(|place| !known.contains(place)).flatten().collect()
    }

    /// The neighbour of a position in a direction, or the other neighbour at an end.
    fn turning(&self, position: usize, up: bool) -> Option<usize> {
        let above = Some(position + 1).filter(|&above| above < self.len);
        let below = position.checked_sub(1);
        if up { above.or(below) } else { below.or(above) }
    }

    /// Returns whether a position is gathered.
    fn holds(&self, position: usize) -> bool {
        [self.current, self.companion].contains(&Some(position))
    }
}

/// The buckets of each line, in order.
pub(super) fn lines(groups: &[ParamAndGradBucket]) -> Vec<Vec<usize>> {
    let mut lines: Vec<Vec<usize>> = Vec::new();
    for bucket in 0..groups.len() {
        match lines.iter_mut().find(|line| groups[line[0]].is_like(&groups[bucket])) {
            Some(line) => line.push(bucket),
            None => lines.push(vec![bucket]),
        }
    }
    lines
}

/// Starts gathering the weights of a bucket over the ranks along the batch axes. Their next use waits for them.
pub(super) fn gather_weights(batch: &Group, bucket: &ParamAndGradBucket) -> Result<()> {
    if !bucket.owners.is_empty() {
        return whole_parameters::gather(batch, bucket);
    }
    let gathering = batch.all_gather_flat(&bucket.weights);
    match gathering.is_done() {
        true => gathering.wait(),
        false => bucket.weights.expect(|| gathering.wait()),
    }
}

impl UnshardPrefetcher {
    /// The lines of these buckets. Ranks that may leave weights unused ([`Unused::Skip`]) must not gather them one
    /// after the other, since each would gather others.
    pub fn new(groups: &[ParamAndGradBucket], unused: Unused) -> UnshardPrefetcher {
        let line = |buckets: Vec<usize>| {
            let walk = PrefetchWindow::new(buckets.len());
            BucketChain { buckets, walk, here: Vec::new() }
        };
        let lines = lines(groups).into_iter().map(line).collect();
        UnshardPrefetcher { lines, gathers_all: unused == Unused::Skip }
    }

    /// Starts gathering the weights of a bucket, unless they are gathered, and the next ones.
    pub fn fetch(
        &mut self,
        batch: &Group,
        buckets: &[ParamAndGradBucket],
        bucket: usize,
    ) -> Result<()> {
        if self.gathers_all {
            self.gather_all(batch, buckets)?;
        }
        let found = self.lines.iter_mut().find_map(|line| {
            let position = line.buckets.iter().position(|&other| other == bucket)?;
            Some((line, position))
        });
        let (line, position) = found.expect("every bucket is on a line");
        if self.gathers_all {
            return Ok(());
        }
        let gathered = line.walk.advance(position);
        line.free(buckets)?;
        gathered.into_iter().try_for_each(|position| line.gather(batch, buckets, position))
    }

    fn gather_all(&mut self, batch: &Group, buckets: &[ParamAndGradBucket]) -> Result<()> {
        for line in self.lines.iter_mut().filter(|line| line.here.is_empty()) {
            (0..line.buckets.len())
                .try_for_each(|position| line.gather(batch, buckets, position))?;
        }
        Ok(())
    }

    /// Frees all gathered weights, because they are about to change.
    pub fn free_all(&mut self, buckets: &[ParamAndGradBucket]) -> Result<()> {
        self.lines.iter_mut().try_for_each(|line| {
            line.walk = PrefetchWindow::new(line.buckets.len());
            line.free(buckets)
        })
    }
}

impl BucketChain {
    fn gather(
        &mut self,
        batch: &Group,
        buckets: &[ParamAndGradBucket],
        position: usize,
    ) -> Result<()> {
        let group = &buckets[self.buckets[position]];
        group.alloc_weights()?;
        group.copy_in_weights()?;
        gather_weights(batch, group)?;
        self.here.push(position);
        Ok(())
    }

    /// Frees the positions that are no longer needed.
    fn free(&mut self, buckets: &[ParamAndGradBucket]) -> Result<()> {
        let (held, unused): (Vec<usize>, Vec<usize>) = std::mem::take(&mut self.here)
            .into_iter()
            .partition(|&position| self.walk.holds(position));
        self.here = held;
        unused
            .into_iter()
            .try_for_each(|position| buckets[self.buckets[position]].reshard_weights())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gathered(walk: &mut PrefetchWindow, path: &[usize]) -> Vec<Vec<usize>> {
        path.iter().map(|&position| walk.advance(position)).collect()
    }

    #[test]
    fn a_walk_gathers_one_ahead_and_turns_around_for_nothing() {
        let mut walk = PrefetchWindow::new(4);
        assert_eq!(
            gathered(&mut walk, &[3, 3, 2, 1, 0]),
            [vec![3, 2], vec![], vec![1], vec![0], vec![]]
        );
        assert_eq!(
            gathered(&mut walk, &[0, 1, 2, 3, 3, 2, 1, 0]),
            [vec![], vec![2], vec![3], vec![], vec![], vec![1], vec![0], vec![]],
        );
        assert_eq!(gathered(&mut PrefetchWindow::new(1), &[0, 0]), [vec![0], vec![]]);
        assert_eq!(
            gathered(&mut PrefetchWindow::new(2), &[1, 0, 0, 1]),
            [vec![1, 0], vec![], vec![], vec![]]
        );
    }

    #[test]
    fn a_jump_keeps_where_it_came_from() {
        let mut walk = PrefetchWindow::new(5);
        // Forward, with the first matrix again at the end, then backward.
        gathered(&mut walk, &[4, 3, 2, 1, 0]);
        assert_eq!(
            gathered(&mut walk, &[4, 4, 0, 1, 2, 3, 4]),
            [vec![4], vec![], vec![], vec![1, 2], vec![3], vec![4], vec![]]
        );
    }
}
