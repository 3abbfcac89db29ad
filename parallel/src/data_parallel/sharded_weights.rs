//! Weights that are gathered just in time and freed when the next are in use: ZeRO stage 3.
//!
//! Buckets of equal facts form a line, in the order in which backward needs them. Walking along a line, in
//! either direction, a bucket is gathered while the one before it is in use; the one behind is freed. Tensors
//! that still read a freed bucket keep its memory until they are gone.

use ferrotron_nn::ParamGroup;
use ferrotron_tensor::Result;

use super::reductions::Shared;
use crate::collective::Work;

/// All lines, and what of them is here.
pub(super) struct GatheredWeights {
    lines: Vec<Line>,
}

/// Buckets of equal facts.
struct Line {
    buckets: Vec<usize>,
    walk: Walk,
    /// Positions whose weights are here or, with work, on their way: those of the walk.
    here: Vec<(usize, Option<Work<()>>)>,
}

/// Which positions of a line are whole: the one in use and a companion.
#[derive(Debug, Default)]
pub(super) struct Walk {
    len: usize,
    /// The position in use, if any.
    current: Option<usize>,
    companion: Option<usize>,
}

impl Walk {
    pub fn new(len: usize) -> Walk {
        Walk { len, ..Walk::default() }
    }

    /// Goes to a position and returns those that have to be gathered: this one first, if it is not here.
    ///
    /// The companion is the next in the direction of the walk. At an end the walk turns around, so that it
    /// is the one before, which is here. A jump, to a tied embedding for example, says nothing of what
    /// follows, except that a jump back is likely: the companion is where it came from.
    pub fn go(&mut self, position: usize) -> Vec<usize> {
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

    /// The neighbour of a position in a direction, or the other one at an end.
    fn turning(&self, position: usize, up: bool) -> Option<usize> {
        let above = Some(position + 1).filter(|&above| above < self.len);
        let below = position.checked_sub(1);
        if up { above.or(below) } else { below.or(above) }
    }

    /// Whether a position is here.
    fn holds(&self, position: usize) -> bool {
        [self.current, self.companion].contains(&Some(position))
    }
}

/// The buckets of each line, in order.
pub(super) fn lines(groups: &[ParamGroup]) -> Vec<Vec<usize>> {
    let facts = |bucket: usize| {
        let group: &ParamGroup = &groups[bucket];
        (group.decay, group.replicated, group.grad_partial)
    };
    let mut lines: Vec<Vec<usize>> = Vec::new();
    for bucket in 0..groups.len() {
        match lines.iter_mut().find(|line| facts(line[0]) == facts(bucket)) {
            Some(line) => line.push(bucket),
            None => lines.push(vec![bucket]),
        }
    }
    lines
}

impl GatheredWeights {
    pub fn new(groups: &[ParamGroup]) -> GatheredWeights {
        let line = |buckets: Vec<usize>| {
            let walk = Walk::new(buckets.len());
            Line { buckets, walk, here: Vec::new() }
        };
        GatheredWeights { lines: lines(groups).into_iter().map(line).collect() }
    }

    /// Makes sure that the weights of a bucket are here, and begins to gather those that come next.
    pub fn fetch(&mut self, shared: &Shared, bucket: usize) -> Result<()> {
        let found = self.lines.iter_mut().find_map(|line| {
            let position = line.buckets.iter().position(|&other| other == bucket)?;
            Some((line, position))
        });
        let (line, position) = found.expect("every bucket is on a line");
        let gathered = line.walk.go(position);
        line.free(shared)?;
        gathered.into_iter().try_for_each(|position| line.gather(shared, position))?;
        line.arrive(position)
    }

    /// Frees all weights: they are about to change.
    pub fn free_all(&mut self, shared: &Shared) -> Result<()> {
        self.lines.iter_mut().try_for_each(|line| {
            line.walk = Walk::new(line.buckets.len());
            line.free(shared)
        })
    }
}

impl Line {
    fn gather(&mut self, shared: &Shared, position: usize) -> Result<()> {
        let group = &shared.buffers.groups()[self.buckets[position]];
        group.take_weights()?;
        group.place_weights()?;
        self.here.push((position, Some(shared.gather_weights(group)?)));
        Ok(())
    }

    fn arrive(&mut self, position: usize) -> Result<()> {
        let entry = self.here.iter_mut().find(|(other, _)| *other == position);
        entry.and_then(|(_, work)| work.take()).map_or(Ok(()), Work::wait)
    }

    /// Frees what the walk has left.
    fn free(&mut self, shared: &Shared) -> Result<()> {
        for (position, work) in std::mem::take(&mut self.here) {
            if self.walk.holds(position) {
                self.here.push((position, work));
            } else {
                work.map_or(Ok(()), Work::wait)?;
                shared.buffers.groups()[self.buckets[position]].free_weights();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gathered(walk: &mut Walk, path: &[usize]) -> Vec<Vec<usize>> {
        path.iter().map(|&position| walk.go(position)).collect()
    }

    #[test]
    fn a_walk_gathers_one_ahead_and_turns_around_for_nothing() {
        let mut walk = Walk::new(4);
        assert_eq!(
            gathered(&mut walk, &[3, 3, 2, 1, 0]),
            [vec![3, 2], vec![], vec![1], vec![0], vec![]]
        );
        assert_eq!(
            gathered(&mut walk, &[0, 1, 2, 3, 3, 2, 1, 0]),
            [vec![], vec![2], vec![3], vec![], vec![], vec![1], vec![0], vec![]],
        );
        assert_eq!(gathered(&mut Walk::new(1), &[0, 0]), [vec![0], vec![]]);
        assert_eq!(
            gathered(&mut Walk::new(2), &[1, 0, 0, 1]),
            [vec![1, 0], vec![], vec![], vec![]]
        );
    }

    #[test]
    fn a_jump_keeps_where_it_came_from() {
        let mut walk = Walk::new(5);
        // Forward, with the first matrix again at the end; then back.
        gathered(&mut walk, &[4, 3, 2, 1, 0]);
        assert_eq!(
            gathered(&mut walk, &[4, 4, 0, 1, 2, 3, 4]),
            [vec![4], vec![], vec![], vec![1, 2], vec![3], vec![4], vec![]]
        );
    }
}
