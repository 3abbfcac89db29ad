//! Updates that ranks do not wait for.

use ferrotron_nn::{
    Module, Optimizer, OptimizerConfig, Param, ParamAndGradBuffer, Sharding, StepConfig, Unused,
    clip_coefficient,
};
use ferrotron_parallel::data_parallel::{
    AsyncUpdates, DataParallelConfig, ReplicaCheck, UpdateSums, unsupported_reason,
};
use ferrotron_parallel::mesh::ParallelDims;
use ferrotron_tensor::{Category, Device, Result, Tensor};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::harness::{Named, Plan, Rank, assert_bitwise, ranks, scale, train};
use crate::toy::{Toy, sample};

fn plan(data: usize, max_staleness: usize, steps: usize) -> Plan {
    let updates = AsyncUpdates { max_staleness, ..AsyncUpdates::default() };
    let config =
        DataParallelConfig { async_updates: Some(updates), ..DataParallelConfig::default() };
    Plan { data, microbatches: 2, config, steps, ..Plan::default() }
}

/// Updates with the sums of a step.
fn update(rank: &mut Rank) -> Result<()> {
    let norm = rank.parallel.grad_norm()?;
    rank.update(norm)
}

/// A step, with the updates that have come in by then; `on_the_way` runs before its gradients are launched. Returns the
/// sums of the steps that were applied.
fn step(rank: &mut Rank, number: usize, on_the_way: impl FnOnce(&Rank)) -> Result<Vec<UpdateSums>> {
    let mut applied = Vec::new();
    while rank.parallel.update_is_ready() {
        applied.extend(rank.parallel.complete_update()?);
        update(rank)?;
    }
    let (loss, _) = rank.backward(number, scale(&rank.plan, number)?)?;
    on_the_way(rank);
    if let Some(sums) = rank.parallel.launch_update(&[loss])? {
        applied.push(sums);
        update(rank)?;
    }
    Ok(applied)
}

fn drain(rank: &mut Rank) -> Result<Vec<UpdateSums>> {
    let mut applied = Vec::new();
    while let Some(sums) = rank.parallel.complete_update()? {
        applied.push(sums);
        update(rank)?;
    }
    Ok(applied)
}

fn weights(rank: &Rank) -> Named {
    rank.weight_pieces().into_iter().map(|(name, _, values, _)| (name, values)).collect()
}

fn set(params: &[Param], values: &[Vec<f64>]) -> Result<()> {
    for (param, values) in params.iter().zip(values) {
        let leaf = param.leaf();
        leaf.set_value(&Tensor::from_slice(leaf.device(), values, leaf.dims())?)?;
    }
    Ok(())
}

/// Applies a log on one rank, with nothing of this crate: the gradient of each rank at the weights that it had.
fn replay(plan: &Plan, log: &[UpdateSums]) -> Result<Named> {
    let device = Device::cpu(1)?;
    let toy = Toy::part(&device, plan.shape, 0, 1)?;
    let params = toy.params();
    let buffers = ParamAndGradBuffer::new(&params)?;
    let mut optimizer = Optimizer::new(plan.optimizer, &buffers)?;
    let values = || -> Result<Vec<Vec<f64>>> {
        params.iter().map(|param| param.leaf().value()?.to_vec()).collect()
    };
    let mut versions = Vec::new();
    for (number, sums) in log.iter().enumerate() {
        versions.push(values()?);
        buffers.zero_gradients();
        let scale = scale(plan, number)?;
        let mut total = 0.0;
        for (rank, missed) in sums.staleness.iter().enumerate() {
            set(&params, &versions[number - missed])?;
            for microbatch in 0..plan.microbatches {
                let index = microbatch * plan.data + rank;
                let loss = toy.run(&sample(&device, plan.shape.vocab, number, index)?, None)?;
                total += loss.value().item()? * scale;
                loss.backward_scaled(scale)?;
            }
        }
        set(&params, &versions[number])?;
        assert!((total - sums.numbers[0]).abs() <= 1e-12 * total, "loss of step {number}");
        let grad_scale = clip_coefficient(buffers.sq_norm()?.sqrt(), plan.max_norm);
        optimizer.step(&buffers, &StepConfig { lr: 0.02, grad_scale })?;
    }
    let named = |param: &Param| param.name().to_string();
    Ok(params.iter().map(named).zip(values()?).collect())
}

fn assert_replayed(plan: &Plan, log: &[UpdateSums], found: &Named) -> Result<()> {
    let want = replay(plan, log)?;
    assert!(found.keys().eq(want.keys()));
    for (name, want) in &want {
        let largest = want.iter().fold(0.0_f64, |max, x| max.max(x.abs()));
        for (i, (got, want)) in found[name].iter().zip(want).enumerate() {
            let off = (got - want).abs();
            assert!(off <= 1e-12 * largest, "{plan:?}: {name}[{i}]: {got}, want {want}");
        }
    }
    Ok(())
}

/// One rank is held up in its first step: the other goes on until K of its steps are outstanding, and not further.
#[test]
fn a_slow_rank_stops_the_others_at_the_bound() -> Result<()> {
    for bound in [1, 2, 4] {
        let plan = plan(2, bound, bound + 3);
        let (at_bound, held) = channel();
        let (at_bound, held) = (Mutex::new(at_bound), Mutex::new(held));
        let released = AtomicBool::new(false);
        let found = ranks(&plan, |mut rank| {
            let slow = rank.mesh.rank() == 1;
            let mut applied = Vec::new();
            for number in 0..plan.steps {
                applied.extend(step(&mut rank, number, |rank| match (slow, number) {
                    (true, 0) => {
                        held.lock().unwrap().recv_timeout(Duration::from_secs(30)).unwrap();
                        // The other rank is here, or waits, before this one goes on.
                        std::thread::sleep(Duration::from_millis(50));
                        released.store(true, Ordering::SeqCst);
                    }
                    (false, number) if number == bound => {
                        assert_eq!(rank.parallel.outstanding_steps(), bound);
                        assert!(!rank.parallel.update_is_ready());
                        at_bound.lock().unwrap().send(()).unwrap();
                    }
                    _ => {}
                })?);
                if !slow && number >= bound {
                    assert!(released.load(Ordering::SeqCst), "step {number} did not wait");
                }
            }
            applied.extend(drain(&mut rank)?);
            Ok((applied, weights(&rank)))
        });
        let (log, want) = &found[0];
        assert_eq!(&found[1].0, log);
        assert_bitwise(&plan, "weight", &found[1].1, want, &[]);
        // The first rank's gradients miss one update more in each step up to the bound.
        for (number, sums) in log.iter().enumerate() {
            assert!(sums.staleness.iter().all(|&missed| missed <= bound), "{log:?}");
            assert!(number > bound || sums.staleness[0] == number, "{log:?}");
        }
        assert_eq!(log.len(), plan.steps);
        assert_replayed(&plan, log, want)?;
    }
    Ok(())
}

/// Ranks that are held up in different steps: their log, applied by a serial program, gives their weights.
#[test]
fn the_log_repeats_the_run() -> Result<()> {
    for (data, bound, optimizer) in [(3, 2, OptimizerConfig::ADAMW), (2, 3, OptimizerConfig::SGD)] {
        let plan = Plan { optimizer, ..plan(data, bound, 14) };
        let found = ranks(&plan, |mut rank| {
            let number_of_rank = rank.mesh.rank();
            let mut applied = Vec::new();
            for number in 0..plan.steps {
                applied.extend(step(&mut rank, number, |_| {
                    if number % 5 == 2 * number_of_rank {
                        std::thread::sleep(Duration::from_millis(6));
                    }
                })?);
                if number == 7 {
                    applied.extend(drain(&mut rank)?);
                }
            }
            applied.extend(drain(&mut rank)?);
            Ok((applied, weights(&rank)))
        });
        let (log, want) = &found[0];
        for (applied, weights) in &found[1..] {
            assert_eq!(applied, log);
            assert_bitwise(&plan, "weight", weights, want, &[]);
        }
        assert!(log.iter().flat_map(|sums| &sums.staleness).all(|&missed| missed <= bound));
        assert_eq!(log[8].staleness, vec![0; data], "all updates were applied before");
        assert_replayed(&plan, log, want)?;
    }
    Ok(())
}

/// Where all updates are applied before each step, it is the synchronous step; so it is with staleness 0.
#[test]
fn without_staleness_it_is_the_synchronous_run() {
    let plan = plan(3, 1, 4);
    let want = train(&Plan { config: DataParallelConfig::default(), ..plan });
    let found = ranks(&plan, |mut rank| {
        for number in 0..plan.steps {
            step(&mut rank, number, |_| ())?;
            drain(&mut rank)?;
        }
        let sent = rank.mesh.dp_cp().traffic().bytes();
        let expected = rank.parallel.expected_traffic(plan.microbatches, plan.steps).batch;
        Ok((weights(&rank), sent.checked_sub(expected)))
    });
    for (weights, over) in found {
        assert_bitwise(&plan, "weight", &weights, &want.weights, &[]);
        // The loss, and a number of each rank.
        assert!(over.is_some_and(|over| over <= 4 * 2 * 4 * 8), "{over:?} bytes");
    }
    let updates = AsyncUpdates { max_staleness: 0, ..AsyncUpdates::default() };
    let config = DataParallelConfig { async_updates: Some(updates), ..plan.config };
    let found = train(&Plan { config, ..plan });
    assert_bitwise(&plan, "weight", &found.weights, &want.weights, &[]);
    assert_eq!((found.losses, found.norms), (want.losses, want.norms));
}

/// As many gradient buffers as steps may be outstanding, beside the one that backward fills.
#[test]
fn each_outstanding_step_has_a_gradient_buffer() {
    for bound in [0, 1, 3] {
        let plan = plan(2, bound, 1);
        let found = ranks(&plan, |rank| {
            Ok((rank.device.memory().bytes(Category::Gradients), rank.parallel.buffers().numel()))
        });
        for (bytes, numel) in found {
            assert_eq!(bytes, (bound + 1) * 8 * numel);
        }
    }
}

#[test]
fn layouts_that_exclude_stale_updates_are_refused() {
    let layout = |tp, cp, pp| ParallelDims::new(8, tp, cp, pp).unwrap();
    let of_staleness = |max_staleness| plan(1, max_staleness, 1).config;
    let stale = of_staleness(2);
    let (one, skip, every) = (layout(1, 1, 1), Unused::Skip, ReplicaCheck::EveryStep);
    for (config, layout, remedy) in [
        (stale, layout(2, 1, 1), "--tensor-model-parallel-size 2"),
        (stale, layout(1, 2, 1), "--context-parallel-size 2"),
        (stale, layout(1, 1, 2), "--pipeline-model-parallel-size 2"),
        (DataParallelConfig { sharding: Sharding::Optimizer, ..stale }, one, "use --zero-stage 0"),
        (DataParallelConfig { synchronize_every: 8, ..stale }, one, "--local-sgd-steps 8"),
        (DataParallelConfig { unused: skip, ..stale }, one, "use `Unused::Refuse`"),
        (DataParallelConfig { replica_check: every, ..stale }, one, "use `ReplicaCheck::Off`"),
        (of_staleness(10), one, "--max-staleness 10 cannot be reached"),
    ] {
        let found = unsupported_reason(&config, &layout).expect(remedy);
        assert!(found.contains(remedy) && !found.contains('\n'), "{found}");
    }
    let synchronous = DataParallelConfig { sharding: Sharding::Weights, ..of_staleness(0) };
    for (config, layout) in [(of_staleness(9), one), (synchronous, layout(2, 2, 1))] {
        assert_eq!(unsupported_reason(&config, &layout), None);
    }
}

#[test]
fn calls_out_of_order_are_refused() {
    let plan = plan(1, 1, 1);
    let found = ranks(&plan, |mut rank| {
        let early = rank.parallel.launch_update(&[]).unwrap_err().to_string();
        rank.backward(0, 1.0)?;
        rank.parallel.launch_update(&[])?;
        rank.backward(1, 1.0)?;
        let busy = rank.parallel.complete_update().unwrap_err().to_string();
        let unsummed = rank.parallel.grad_norm().unwrap_err().to_string();
        Ok([early, busy, unsummed])
    });
    let [early, busy, unsummed] = &found[0];
    assert!(early.contains("once for each `begin_step`"), "{early}");
    assert!(busy.contains("call `launch_update` first"), "{busy}");
    assert!(unsummed.contains("not summed over ranks"), "{unsummed}");
}
