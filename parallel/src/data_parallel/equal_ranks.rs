//! Refuses ranks that would train different models: with other seeds or configurations, which are compared once, or with
//! other learning rates, which travel with the number by which ranks refuse a step together.

use ferrotron_nn::{Axis, Optimizer, Param, ParamOptions, StepConfig};
use ferrotron_tensor::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};

use super::config::DataParallelConfig;
use super::digests::{Comparison, compare_digests};
use crate::agreement::{Facts, agree, by_rank, digest, gather_distinct, wait_for_all};
use crate::mesh::Mesh;

/// Largest difference of the factor of gradients between ranks, relative to it: groups may add the parts of the norm in
/// other orders.
const ROUNDING: f64 = 1e-6;

/// The name of the seeds in a refusal, with the remedy.
const SEED: &str =
    "the seed of the model's scope (use one seed and `Scope::child` on all pipeline stages)";

/// Errors, on all ranks of the mesh, if their parameters have other seeds, their gradients other reductions, or ranks of a
/// stage other parameters. A rank that cannot continue gives its error instead. Reduces digests twice, and sends nothing on a
/// fake device.
pub(super) fn check_setup(
    params: &[Param],
    mesh: &Mesh,
    config: &DataParallelConfig,
    checked: Result<()>,
) -> Result<()> {
    if params.iter().any(|param| param.leaf().device().is_fake()) {
        return checked;
    }
    let seeds: BTreeSet<u64> = params.iter().map(Param::seed).collect();
    let seeds: Vec<String> = seeds.iter().map(u64::to_string).collect();
    let DataParallelConfig {
        sharding,
        optimizer,
        bucket_numel,
        synchronize_every,
        async_updates,
        gradients,
        unused,
        replica_check,
    } = config;
    let facts = [
        (SEED, seeds.join(" and ")),
        ("sharding", format!("{sharding:?}")),
        ("optimizer", format!("{optimizer:?}")),
        ("bucket_numel", format!("{bucket_numel:?}")),
        ("synchronize_every", synchronize_every.to_string()),
        ("async_updates", format!("{async_updates:?}")),
        ("gradients", format!("{gradients:?}")),
        ("unused", format!("{unused:?}")),
        ("replica_check", format!("{replica_check:?}")),
    ];
    let facts: Facts = facts.map(|(name, value)| (name.to_string(), value)).into();
    let agreed = agree(mesh.world(), checked.as_ref().map(|_| &facts));
    checked?;
    agreed?;
    check_params(params, mesh)
}

/// Errors, on all ranks of the mesh, if ranks of a pipeline stage do not have the same parameters in the same order: they
/// would add up gradients of different ones. Ranks reduce a digest for each stage, and gather the parameters if one differs.
fn check_params(params: &[Param], mesh: &Mesh) -> Result<()> {
    let world = mesh.world();
    if world.size() == 1 {
        return Ok(());
    }
    let describe = |param: &Param| {
        let trained = if param.is_trainable() { "trained" } else { "frozen" };
        let (dims, dtype) = (param.shard_spec().global_dims(), param.leaf().dtype());
        let options = match param.options() {
            options if *options == ParamOptions::default() => String::new(),
            options => format!(", {options:?}"),
        };
        format!("'{}' {dims:?} {dtype}, seed {}, {trained}{options}", param.name(), param.seed())
    };
    let own: Vec<String> = params.iter().map(describe).collect();
    // Ranks of a stage differ from its first one along the other axes only.
    let layout = mesh.layout();
    let stage = |rank: usize| layout.coordinate(rank, Axis::Pipeline);
    let summary = digest(own.join("\n").as_bytes());
    let is_own = |other: usize| other == stage(world.rank());
    let of_stages: Vec<Option<&str>> = (0..layout.size(Axis::Pipeline))
        .map(|stage| is_own(stage).then_some(summary.as_str()))
        .collect();
    if !compare_digests(world, &of_stages)?.contains(&Comparison::Differ) {
        return Ok(());
    }
    let all = gather_distinct(world, &[own])?;
    // The first rank of each stage, and its parameters.
    let mut known: BTreeMap<usize, (usize, &Vec<String>)> = BTreeMap::new();
    let differing = by_rank(&all).into_iter().find_map(|(rank, params)| {
        let &mut (first, expected) = known.entry(stage(rank)).or_insert((rank, params));
        (params != expected).then_some((rank, params, first, expected))
    });
    let Some((rank, other, first, one)) = differing else { return Ok(()) };
    let at = one.iter().zip(other).take_while(|(one, other)| one == other).count();
    let shown = |params: &[String]| params.get(at).map_or("absent".into(), String::clone);
    wait_for_all(world);
    let message = format!(
        "parameter {} is {} on rank {} and {} on rank {rank}: ranks of a pipeline stage need the same parameters in the \
         same order",
        at + 1,
        shown(one),
        first,
        shown(other)
    );
    Err(Error::config("data_parallel", message))
}

/// A number of a step that all ranks have alike.
pub(super) struct Equal {
    name: &'static str,
    /// This rank's, exact in f64.
    pub own: f64,
    /// The value of which the number is a digest.
    shown: Option<String>,
    /// Largest difference, relative to the number.
    rounding: f64,
    remedy: &'static str,
}

/// The numbers of the next step that all ranks have alike.
pub(super) fn equal_numbers(optimizer: &Optimizer, step: &StepConfig) -> [Equal; 4] {
    let config = format!("{:?}", optimizer.config());
    let number = u64::from_str_radix(&digest(config.as_bytes())[..12], 16);
    let number = number.map_or(0.0, |number| number as f64);
    let same = "give all ranks the same";
    let equal = |name, own, remedy| Equal { name, own, shown: None, rounding: 0.0, remedy };
    let norm = "compute it from `DataParallel::grad_norm`, the norm over all ranks";
    [
        equal("the learning rate", step.lr, same),
        Equal { rounding: ROUNDING, ..equal("the factor of the gradients", step.grad_scale, norm) },
        equal(
            "the number of the optimizer's steps",
            optimizer.steps() as f64,
            "load the same checkpoint on all ranks",
        ),
        Equal { shown: Some(config), ..equal("the optimizer's configuration", number, same) },
    ]
}

/// The first number that ranks do not have alike, from the largest of each and of its negative.
pub(super) fn difference(equal: &[Equal], most: &[f64], rank: usize) -> Option<String> {
    equal.iter().zip(most.chunks_exact(2)).find_map(|(number, most)| {
        let Equal { name, own, shown, rounding, remedy } = number;
        let (low, high) = (-most[1], most[0]);
        (high - low > rounding * high.abs().max(low.abs())).then(|| match shown {
            Some(own) => {
                format!("{name} is {own} on rank {rank}, and another on other ranks: {remedy}")
            }
            None => {
                format!("{name} is {own} on rank {rank}, and from {low} to {high} on all: {remedy}")
            }
        })
    })
}
