//! Refuses what several pipeline stages hold without saying so: parameters, of which each stage would train a copy, and
//! random layers on one path, which would draw the same numbers.

use ferrotron_nn::{Axis, Param, check_option_patterns, option_patterns, random_sites};
use ferrotron_tensor::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

use crate::agreement::{by_rank, gather_distinct, wait_for_all};
use crate::mesh::Mesh;

/// The names of a stage.
#[derive(Debug, Serialize, Deserialize)]
struct StageNames {
    /// Each parameter, and whether it is declared replicated along the pipeline, with partial gradients if it is trained.
    params: Vec<(String, bool)>,
    random_sites: Vec<String>,
    /// The patterns of options by name, and whether each matches one of these parameters.
    option_patterns: Vec<(String, bool)>,
}

/// Errors, on all ranks along the pipeline, if stages share a parameter that is not declared tied, or that others than
/// the first and the last stage hold, or hold in another order, or if they have random layers on one path, and if options
/// were given by a pattern that matches no parameter of any stage. Does nothing for several stages on a fake device.
pub(super) fn check_stages(params: &[Param], mesh: &Mesh) -> Result<()> {
    let stages = mesh.axis(Axis::Pipeline);
    if stages.size() == 1 {
        return check_option_patterns(&option_patterns(params), params.len());
    }
    if params.iter().any(|param| param.leaf().device().is_fake()) {
        return Ok(());
    }
    let named = |param: &Param| {
        let summed = !param.is_trainable() || param.grad_partial().contains(Axis::Pipeline);
        let tied = summed && param.replicated().contains(Axis::Pipeline);
        (param.name().to_string(), tied)
    };
    let params_of_stage = params.iter().map(named).collect();
    let own = StageNames {
        params: params_of_stage,
        random_sites: random_sites(params),
        option_patterns: option_patterns(params),
    };
    let all = gather_distinct(stages, &[own])?;
    let all: Vec<&StageNames> = by_rank(&all).into_iter().map(|(_, names)| names).collect();
    let shared = shared_parameter(&all).or_else(|| tied_order(&all)).or_else(|| shared_site(&all));
    let checked = match shared {
        Some(message) => Err(Error::config("data_parallel", message)),
        None => {
            let patterns = all.iter().flat_map(|stage| stage.option_patterns.clone());
            let count = all.iter().map(|stage| stage.params.len()).sum();
            check_option_patterns(&patterns.collect::<Vec<_>>(), count)
        }
    };
    checked.inspect_err(|_| wait_for_all(stages))
}

/// The first parameter that stages share wrongly.
fn shared_parameter(all: &[&StageNames]) -> Option<String> {
    let last = all.len() - 1;
    let mut first: HashMap<&str, (usize, bool)> = HashMap::new();
    for (stage, names) in all.iter().enumerate() {
        for (name, tied) in &names.params {
            let (other, other_tied) = *first.entry(name).or_insert((stage, *tied));
            let why = match *tied && other_tied {
                _ if other == stage => continue,
                true if other == 0 && stage == last => continue,
                true => {
                    "only the first and the last stage can share a parameter: give each stage its own"
                }
                false => {
                    "each stage would train a copy of its own: make it in `mesh.tied_scope(..)` on both, or give each \
                     stage a parameter with a name of its own"
                }
            };
            return Some(format!("'{name}' is held by pipeline stages {other} and {stage}: {why}"));
        }
    }
    None
}

/// The first two tied parameters that the ends of the pipeline meet in different orders.
fn tied_order(all: &[&StageNames]) -> Option<String> {
    let last = all.len() - 1;
    let tied = |stage: usize, other: usize| {
        let is_tied = move |(name, tied): &&(String, bool)| {
            *tied && all[other].params.iter().any(|(held, _)| held == name)
        };
        all[stage].params.iter().filter(is_tied).map(|(name, _)| name)
    };
    let (one, other) = tied(0, last).zip(tied(last, 0)).find(|(one, other)| one != other)?;
    Some(format!(
        "pipeline stage 0 meets the tied parameter '{one}' where stage {last} meets '{other}', and their gradients are summed \
         in that order: visit tied parameters in one order on both"
    ))
}

/// The first path by which layers of two stages draw.
fn shared_site(all: &[&StageNames]) -> Option<String> {
    let mut first: HashMap<&str, usize> = HashMap::new();
    for (stage, names) in all.iter().enumerate() {
        for path in &names.random_sites {
            let other = *first.entry(path).or_insert(stage);
            if other != stage {
                return Some(format!(
                    "layers on pipeline stages {other} and {stage} draw random numbers at the path '{path}': they would \
                     draw the same there, and others on one stage: give each a path of its own"
                ));
            }
        }
    }
    None
}
