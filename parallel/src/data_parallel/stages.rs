//! Refuses parameters that several pipeline stages hold without saying so: each stage would train a copy of its own.

use ferrotron_nn::{Axis, Param};
use ferrotron_tensor::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

use super::replicas::gather;
use crate::mesh::Mesh;

/// A parameter of a stage.
#[derive(Debug, Serialize, Deserialize)]
struct Held {
    name: String,
    /// Whether it is declared replicated along the pipeline, with partial gradients if it is trained.
    tied: bool,
}

/// Errors, on all ranks along the pipeline, if stages share a parameter that is not declared tied, or that others than
/// the first and the last stage hold. Does nothing on one stage or a fake device.
pub(super) fn check_stages(params: &[Param], mesh: &Mesh) -> Result<()> {
    let stages = mesh.axis(Axis::Pipeline);
    if stages.size() == 1 || params.iter().any(|param| param.leaf().device().is_fake()) {
        return Ok(());
    }
    let held = |param: &Param| {
        let summed = !param.is_trainable() || param.grad_partial().contains(Axis::Pipeline);
        let tied = summed && param.replicated().contains(Axis::Pipeline);
        Held { name: param.name().to_string(), tied }
    };
    let own: Vec<Held> = params.iter().map(held).collect();
    let last = stages.size() - 1;
    let all = gather(stages, &own)?;
    let mut first: HashMap<&str, (usize, bool)> = HashMap::new();
    let every = all.iter().enumerate();
    for (stage, held) in every.flat_map(|(stage, held)| held.iter().map(move |held| (stage, held)))
    {
        let (other, tied) = *first.entry(&held.name).or_insert((stage, held.tied));
        if other == stage {
            continue;
        }
        let why = match tied && held.tied {
            true if other == 0 && stage == last => continue,
            true => {
                "only the first and the last stage can share a parameter: give these stages one each"
            }
            false => {
                "each stage would train a copy of its own: make it in `mesh.tied_scope(..)` on both, or give each stage \
                 a parameter with a name of its own"
            }
        };
        // A rank that ends with an error ends the calls of the others, which must have the names first.
        drop(stages.barrier().wait());
        let message =
            format!("'{}' is held by pipeline stages {other} and {stage}: {why}", held.name);
        return Err(Error::config("data_parallel", message));
    }
    Ok(())
}
