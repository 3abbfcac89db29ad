//! The parameters of a rank's modules, in the order in which a forward pass uses them.

use ferrotron_autograd::Leaf;
use ferrotron_nn::{Module, Param, ParamAndGradBuffer};
use std::collections::HashMap;
use std::ops::Range;

/// The parameters of modules, which are the chunks of a pipeline stage.
pub(super) struct ModuleParams {
    /// Each parameter once.
    pub params: Vec<Param>,
    /// The name of a parameter that two modules use, if there is one.
    pub shared: Option<String>,
    /// Number of uses of each parameter.
    uses: Vec<usize>,
    /// The places in `params`, by name.
    positions: HashMap<String, usize>,
    /// The places in `params` of all uses.
    visited: Vec<usize>,
    /// The starts of each module in `params` and in `visited`, and the ends.
    bounds: Vec<[usize; 2]>,
}

impl ModuleParams {
    pub fn new(modules: &[&dyn Module]) -> ModuleParams {
        let (mut params, mut uses): (Vec<Param>, Vec<usize>) = Default::default();
        let mut positions: HashMap<String, usize> = HashMap::new();
        let (mut visited, mut bounds, mut shared) = (Vec::new(), Vec::new(), None);
        for module in modules {
            let start = params.len();
            bounds.push([start, visited.len()]);
            module.visit(&mut |param| {
                let known = positions.get(param.name()).copied();
                // Buffers reject duplicate names.
                let known = known.filter(|&known| params[known].leaf() == param.leaf());
                let position = known.unwrap_or(params.len());
                if position < start {
                    shared = Some(param.name().to_string());
                }
                if known.is_none() {
                    positions.insert(param.name().to_string(), position);
                    params.push(param.clone());
                    uses.push(0);
                }
                uses[position] += 1;
                visited.push(position);
            });
        }
        bounds.push([params.len(), visited.len()]);
        ModuleParams { params, shared, uses, positions, visited, bounds }
    }

    /// The parameters of each module, without those of modules before it.
    pub fn chunks(&self) -> Vec<&[Param]> {
        self.bounds.windows(2).map(|ends| &self.params[ends[0][0]..ends[1][0]]).collect()
    }

    /// Each use of a trainable parameter with its bucket, and the range of each module in these.
    pub fn visits(&self, buffers: &ParamAndGradBuffer) -> (Vec<(Leaf, usize)>, Vec<Range<usize>>) {
        let mut buckets = vec![0; self.params.len()];
        for (bucket, group) in buffers.groups().iter().enumerate() {
            group.params.iter().for_each(|param| buckets[self.positions[param.name()]] = bucket);
        }
        let visit = |&index: &usize| (self.params[index].leaf().clone(), buckets[index]);
        let trained = |index: &&usize| self.params[**index].is_trainable();
        let before = |visit: usize| self.visited[..visit].iter().filter(trained).count();
        let ranges = self.bounds.windows(2).map(|ends| before(ends[0][1])..before(ends[1][1]));
        (self.visited.iter().filter(trained).map(visit).collect(), ranges.collect())
    }

    /// Number of uses of each parameter of each bucket in a forward pass.
    pub fn uses(&self, buffers: &ParamAndGradBuffer) -> Vec<Vec<usize>> {
        let uses = |param: &Param| self.uses[self.positions[param.name()]];
        let groups = buffers.groups().iter();
        groups.map(|group| group.params.iter().map(uses).collect()).collect()
    }
}
