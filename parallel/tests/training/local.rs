//! Steps that ranks take by themselves.

use ferrotron_nn::{Axis, Module, Optimizer, OptimizerConfig, ParamAndGradBuffer, StepConfig};
use ferrotron_parallel::data_parallel::DataParallelConfig;
use ferrotron_tensor::{Device, Result};

use crate::harness::{
    Named, Piece, Plan, Rank, assert_bitwise, assert_close, ranks, scale, serial, train,
};
use crate::toy::{Toy, sample};

fn plan(data: usize, synchronize_every: usize) -> Plan {
    let config = DataParallelConfig { synchronize_every, ..DataParallelConfig::default() };
    Plan { data, microbatches: 2, config, optimizer: OptimizerConfig::SGD, ..Plan::default() }
}

/// A step with the scale of this rank's own samples where its loss is its own.
fn step(rank: &mut Rank, number: usize) -> Result<f64> {
    let scale = match rank.parallel.loss_ranks().size() {
        1 => {
            let counted: usize = rank.samples(number)?.iter().map(|sample| sample.counted).sum();
            1.0 / counted as f64
        }
        _ => scale(&rank.plan, number)?,
    };
    let found = rank.gradients(number, scale)?;
    rank.update(found.norm)?;
    Ok(found.norm)
}

/// Local steps of one are no local steps: gradients of all samples count, as one rank sees them.
#[test]
fn synchronizing_every_step_is_the_synchronous_path() {
    let plan = plan(3, 1);
    assert_close(&plan, &train(&plan), &serial(&plan).unwrap());
    for counted in ranks(&plan, |rank| Ok(rank.parallel.loss_ranks().size())) {
        assert_eq!(counted, 3);
    }
}

/// The weights after two steps of their own on each of three ranks are the mean of what three serial runs
/// have; and again.
#[test]
fn two_steps_alone_then_the_mean() -> Result<()> {
    let plan = plan(3, 2);
    let device = Device::cpu(1)?;
    let mut replicas = Vec::new();
    for _ in 0..plan.data {
        let toy = Toy::part(&device, plan.shape, 0, 1)?;
        let buffers = ParamAndGradBuffer::new(&toy.params())?;
        let optimizer = Optimizer::new(OptimizerConfig::SGD, &buffers)?;
        replicas.push((toy, buffers, optimizer));
    }
    for number in 0..4 {
        for (rank, (toy, buffers, optimizer)) in replicas.iter_mut().enumerate() {
            let samples = (0..plan.microbatches)
                .map(|i| sample(&device, plan.shape.vocab, number, i * plan.data + rank))
                .collect::<Result<Vec<_>>>()?;
            let counted: usize = samples.iter().map(|sample| sample.counted).sum();
            buffers.zero_gradients();
            for sample in &samples {
                toy.run(sample, None)?.backward_scaled(1.0 / counted as f64)?;
            }
            let norm = buffers.sq_norm()?.sqrt();
            let grad_scale = ferrotron_nn::clip_coefficient(norm, plan.max_norm);
            optimizer.step(buffers, &StepConfig { lr: 0.02, grad_scale })?;
        }
        if number % 2 == 1 {
            let params: Vec<_> = replicas.iter().map(|(toy, ..)| toy.params()).collect();
            for i in 0..params[0].len() {
                let mut mean = params[0][i].leaf().value()?;
                for other in &params[1..] {
                    mean = mean.add(&other[i].leaf().value()?)?;
                }
                let mean = mean.mul_scalar(1.0 / 3.0)?;
                params.iter().try_for_each(|params| params[i].leaf().set_value(&mean))?;
            }
        }
    }
    let found = ranks(&plan, |mut rank| {
        for number in 0..4 {
            step(&mut rank, number)?;
        }
        Ok(rank.weight_pieces())
    });
    let want: Vec<(String, Vec<f64>)> = replicas[0]
        .0
        .params()
        .iter()
        .map(|param| Ok((param.name().to_string(), param.leaf().value()?.to_vec()?)))
        .collect::<Result<_>>()?;
    for (rank, pieces) in found.iter().enumerate() {
        let values = |pieces: &[Piece]| -> Vec<(String, Vec<f64>)> {
            pieces.iter().map(|(name, _, values, _)| (name.clone(), values.clone())).collect()
        };
        assert_eq!(values(pieces), values(&found[0]), "rank {rank} and rank 0");
        for (name, want) in &want {
            let got = &pieces.iter().find(|piece| &piece.0 == name).expect("the weight is here").2;
            for (i, (got, want)) in got.iter().zip(want).enumerate() {
                assert!(
                    (got - want).abs() <= 1e-14,
                    "rank {rank}: {name}[{i}]: {got}, want {want}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn eight_steps_send_an_eighth() {
    let bytes = |every: usize| {
        let found = ranks(&plan(4, every), |mut rank| {
            for number in 0..8 {
                step(&mut rank, number)?;
                let sent = rank.mesh.dp_cp().traffic().bytes();
                assert_eq!(sent, rank.parallel.expected_traffic(2, number + 1).batch);
            }
            Ok(rank.mesh.dp_cp().traffic().bytes())
        });
        found.into_iter().sum::<u64>()
    };
    let synchronous = bytes(1);
    for every in [2, 4, 8] {
        assert_eq!(bytes(every) * every as u64, synchronous, "every {every}");
    }
}

/// Tied matrices, and norms over stages, still belong to one replica each.
#[test]
fn pipelines_take_steps_of_their_own() {
    let found = |stages: usize| {
        let plan = Plan { stages, ..plan(2, 2) };
        ranks(&plan, |mut rank| {
            let norms = (0..2).map(|number| step(&mut rank, number)).collect::<Result<Vec<_>>>()?;
            let replica = rank.mesh.axis(Axis::Data).rank();
            let pieces = rank.weight_pieces();
            let weights = pieces.into_iter().map(|(name, _, values, _)| (name, values)).collect();
            Ok((replica, norms, weights))
        })
    };
    let one: Vec<(usize, Vec<f64>, Named)> = found(1);
    assert_ne!(one[0].1, one[1].1, "each replica has a norm of its own");
    for (replica, norms, weights) in found(3) {
        for (norm, want) in norms.iter().zip(&one[replica].1) {
            assert!((norm - want).abs() <= 1e-10 * want, "replica {replica}: {norm}, want {want}");
        }
        for (name, values) in weights {
            for (value, want) in values.iter().zip(&one[replica].2[&name]) {
                assert!((value - want).abs() <= 1e-10, "{name}: {value}, want {want}");
            }
        }
    }
}

#[test]
fn one_rank_alone_is_its_own_mean() {
    let (alone, every) = (train(&plan(1, 1)), train(&plan(1, 3)));
    assert_bitwise(&plan(1, 3), "weight", &every.weights, &alone.weights, &[]);
}
