//! Shards of a group on several ranks: together they hold every element once.

use ferrotron_autograd::Accum;
use ferrotron_nn::{
    AdafactorConfig, Axis, AxisSet, BufferConfig, Init, Optimizer, OptimizerConfig, Param,
    ParamAndGradBuffer, Scope, Sharding, StepSize, WeightDecay,
};
use ferrotron_tensor::{DType, Device, Result, ShardSpec, Tensor};
use std::collections::BTreeMap;

const SGD: OptimizerConfig = OptimizerConfig::Sgd { momentum: 0.9, weight_decay: 0.0 };

/// An optimizer for which parameters are not cut.
const WHOLE: OptimizerConfig = OptimizerConfig::Adafactor(AdafactorConfig {
    step_size: StepSize::Scheduled,
    beta1: 0.0,
    decay_rate: 0.8,
    eps1: 1e-30,
    eps2: 1e-3,
    clip_threshold: 1.0,
    weight_decay: 0.0,
});

/// Parameters of odd sizes in two decay groups; one is a shard of rows of a larger tensor.
fn params() -> Result<Vec<Param>> {
    let scope = Scope::new(&Device::cpu(1)?, DType::F64, 5);
    let init = Init::Normal { std: 1.0 };
    let rows = ShardSpec::new(&[6, 4], &[&[(0, 1), (3, 2)], &[(0, 4)]])?;
    Ok(vec![
        scope.param("a", &[5, 3], init, WeightDecay::On),
        scope.param("b", &[7], init, WeightDecay::Off),
        scope.param_at("c", rows, init, WeightDecay::On),
        scope.param("d", &[2, 3, 4], init, WeightDecay::On),
        scope.param("e", &[1], init, WeightDecay::Off),
    ])
}

fn buffers(config: &BufferConfig) -> Result<ParamAndGradBuffer> {
    ParamAndGradBuffer::with_config(&params()?, config)
}

/// The names of the parameters of each bucket.
fn names(buffers: &ParamAndGradBuffer) -> Vec<Vec<&str>> {
    let groups = buffers.groups().iter();
    groups.map(|group| group.params.iter().map(Param::name).collect()).collect()
}

/// Every sharding of 1 to 5 ranks, into elements and into parameters, and every size of buckets.
fn configs() -> impl Iterator<Item = (usize, impl Fn(usize) -> BufferConfig)> {
    let units = [SGD, WHOLE];
    let kinds =
        move || Sharding::ALL.into_iter().flat_map(move |kind| units.map(|unit| (kind, unit)));
    (1..=5).flat_map(move |ranks| {
        kinds().flat_map(move |(sharding, optimizer)| {
            [1, 13, 30, usize::MAX].map(|bucket_numel| {
                let config = move |rank| BufferConfig {
                    bucket_numel,
                    sharding,
                    optimizer,
                    shard: (rank, ranks),
                    ..BufferConfig::default()
                };
                (ranks, config)
            })
        })
    })
}

/// The elements of the global tensor that a place holds, in the order in which it holds them.
fn elements(place: &ShardSpec) -> Vec<usize> {
    let mut found = vec![0];
    for (dim, &size) in place.global_dims().iter().enumerate() {
        let here = || place.pieces(dim).iter().flat_map(|&(offset, len)| offset..offset + len);
        found = found.iter().flat_map(|&outer| here().map(move |i| outer * size + i)).collect();
    }
    found
}

type Global = BTreeMap<(String, usize), f64>;

fn add(global: &mut Global, name: &str, place: &ShardSpec, value: &Tensor) -> Result<()> {
    let values = value.to_vec::<f64>()?;
    let elements = elements(place);
    assert_eq!(values.len(), elements.len(), "{name} {place:?}");
    for (element, value) in elements.into_iter().zip(values) {
        let old = global.insert((name.to_string(), element), value);
        assert!(old.is_none(), "element {element} of {name} is in two pieces");
    }
    Ok(())
}

#[test]
fn every_element_is_in_one_piece_of_one_rank() -> Result<()> {
    let mut want = Global::new();
    for param in params()? {
        add(&mut want, param.name(), param.shard_spec(), &param.leaf().value()?)?;
    }
    assert_eq!(want.len(), 15 + 7 + 12 + 24 + 1);
    for (ranks, config) in configs() {
        let (mut weights, mut moments) = (Global::new(), Global::new());
        for rank in 0..ranks {
            let config = config(rank);
            let buffers = buffers(&config)?;
            if rank == 0 || config.sharding == Sharding::Weights {
                for group in buffers.groups() {
                    group.visit_weights(|name, place, value| {
                        add(&mut weights, name, place, &value)
                    })?;
                }
            }
            if rank == 0 || config.sharding > Sharding::None {
                Optimizer::new(SGD, &buffers)?
                    .visit(|name, _, place, value| add(&mut moments, name, place, &value))?;
            }
        }
        assert_eq!(weights, want, "{:?}", config(0));
        assert!(moments.keys().eq(want.keys()), "{:?}", config(0));
    }
    Ok(())
}

/// Whole parameters, as evenly as they go: by the middle of each within those of equal facts, and the same
/// whatever the buckets are.
#[test]
fn parameters_are_owned_whole() -> Result<()> {
    // Of 15, 24 (12 of them here) and 24 elements that decay, and of 7 and 1 that do not.
    let among_two = vec![vec!["a", "b", "c"], vec!["d", "e"]];
    let among_three = vec![vec!["a"], vec!["b", "c"], vec!["d", "e"]];
    let cases = [1, 13, 30, usize::MAX].map(|numel| [(numel, &among_two), (numel, &among_three)]);
    for (bucket_numel, want) in cases.into_iter().flatten() {
        let mut owned = vec![Vec::new(); want.len()];
        for (rank, owned) in owned.iter_mut().enumerate() {
            let config = BufferConfig {
                bucket_numel,
                sharding: Sharding::Optimizer,
                optimizer: WHOLE,
                shard: (rank, want.len()),
                ..BufferConfig::default()
            };
            for group in buffers(&config)?.groups() {
                let (mut start, pieces) = (0, group.pieces());
                for (param, &owner) in group.params.iter().zip(&group.owners) {
                    let end = start + param.leaf().numel();
                    let own = group.owned.start <= start && end <= group.owned.end;
                    assert_eq!(own, owner == rank, "{}", param.name());
                    let piece = (param.name().to_string(), param.shard_spec().clone());
                    assert_eq!(own, pieces.contains(&piece), "{}", param.name());
                    owned.extend(own.then(|| param.name().to_string()));
                    start = end;
                }
            }
            owned.sort();
        }
        assert_eq!(owned, *want, "buckets of {bucket_numel}");
    }
    Ok(())
}

#[test]
fn buckets_close_once_they_are_full() -> Result<()> {
    for (bucket_numel, want) in [
        (1, vec![vec!["e"], vec!["d"], vec!["c"], vec!["b"], vec!["a"]]),
        (13, vec![vec!["b", "e"], vec!["d"], vec!["a", "c"]]),
        (30, vec![vec!["b", "e"], vec!["c", "d"], vec!["a"]]),
        (usize::MAX, vec![vec!["b", "e"], vec!["a", "c", "d"]]),
    ] {
        let buffers = buffers(&BufferConfig { bucket_numel, ..BufferConfig::default() })?;
        assert_eq!(names(&buffers), want, "buckets of {bucket_numel}");
    }
    Ok(())
}

/// Sharded and replicated parameters share buckets along axes that are not listed.
#[test]
fn axes_with_several_ranks_divide_buckets() -> Result<()> {
    let batch = AxisSet::from([Axis::Data, Axis::Context]);
    for (axes, want) in [
        (AxisSet::none(), vec![vec!["a", "b", "c"]]),
        (batch, vec![vec!["a", "b", "c"]]),
        (batch.with(Axis::Pipeline), vec![vec!["b", "c"], vec!["a"]]),
        (batch.with(Axis::Tensor), vec![vec!["c"], vec!["a", "b"]]),
        (Axis::ALL.into_iter().collect(), vec![vec!["c"], vec!["b"], vec!["a"]]),
    ] {
        let scope = Scope::new(&Device::cpu(1)?, DType::F64, 5);
        let tied =
            scope.clone().replicated_along(Axis::Pipeline).with_partial_gradients(Axis::Pipeline);
        let sharded = scope.clone().sharded_along(Axis::Tensor);
        let params = [("a", &tied), ("b", &scope), ("c", &sharded)]
            .map(|(name, scope)| scope.param(name, &[2], Init::Ones, WeightDecay::On));
        let config = BufferConfig { axes, ..BufferConfig::default() };
        let buffers = ParamAndGradBuffer::with_config(&params, &config)?;
        assert_eq!(names(&buffers), want, "{axes:?}");
        for group in buffers.groups() {
            for param in &group.params {
                let of_param = [param.replicated(), param.grad_partial()];
                let of_group = [group.replicated, group.grad_partial];
                assert_eq!(of_param.map(|set| set.intersection(axes)), of_group);
            }
        }
    }
    Ok(())
}

/// The owned elements of the whole replace what is kept, or are added to it, and the whole is freed.
#[test]
fn gradients_are_kept_in_shards() -> Result<()> {
    for (_, config) in configs() {
        let config = config(0);
        if config.sharding < Sharding::Gradients {
            continue;
        }
        let buffers = buffers(&config)?;
        for group in buffers.groups() {
            for (accum, times) in [(Accum::Replace, 1.0), (Accum::Add, 2.0), (Accum::Replace, 1.0)]
            {
                assert_eq!(group.gradients.lock().unwrap().len(), 0, "nothing is whole in between");
                group.alloc_gradients()?;
                let fill = |(i, x): (usize, &mut f64)| *x = i as f64 + 1.0;
                group.gradients.lock().unwrap().with_slice_mut(.., |gradients| {
                    gradients.as_mut_slice::<f64>()?.iter_mut().enumerate().for_each(fill);
                    Ok(())
                })?;
                group.write_back_gradients(accum)?;
                let want: Vec<f64> =
                    group.owned.clone().map(|i| times * (i as f64 + 1.0)).collect();
                let sums = group.reduced_grads().lock().unwrap().slice(..)?.to_vec::<f64>()?;
                assert_eq!(sums, want, "{config:?}, {accum:?}");
            }
            let squares: f64 = group.owned.clone().map(|i| (i as f64 + 1.0).powi(2)).sum();
            let mut total = Tensor::full(&Device::cpu(1)?, DType::F64, &[1], 0.5)?;
            assert!(group.add_sq_norm(&mut total).is_err(), "on another device");
            let device = group.params[0].leaf().device();
            let mut total = Tensor::full(device, DType::F64, &[1], 0.5)?;
            group.add_sq_norm(&mut total)?;
            assert_eq!(total.item()?, 0.5 + squares, "{config:?}");
        }
    }
    Ok(())
}

#[test]
fn sums_of_replicas_are_divided() -> Result<()> {
    let buffers = buffers(&BufferConfig::default())?;
    for group in buffers.groups() {
        group.weights.lock().unwrap().with_slice_mut(.., |weights| {
            weights.as_mut_slice::<f64>()?.fill(6.0);
            Ok(())
        })?;
        group.divide_weights(4)?;
        assert!(group.weights.lock().unwrap().slice(..)?.to_f64()?.iter().all(|&x| x == 1.5));
        let held = group.params[0].leaf().value()?;
        let error = group.divide_weights(2).unwrap_err().to_string();
        assert!(error.contains(group.params[0].name()), "{error}");
        assert_eq!(held.to_vec::<f64>()?[0], 1.5);
    }
    Ok(())
}
