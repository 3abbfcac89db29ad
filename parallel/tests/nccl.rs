//! Launches of NCCL, here a stand-in that runs one kernel of a rank at a time: their order, and how many there are. It counts
//! those of a process, so this is one, and its tests take turns.

use ferrotron_autograd::Var;
use ferrotron_cuda::gpu::GpuConfig;
use ferrotron_cuda_sim::NcclCalls;
use ferrotron_nn::{
    Axis, Bias, Init, Linear, Module, Optimizer, OptimizerConfig, Param, Sharding, StepConfig,
};
use ferrotron_parallel::collective::{Group, NcclConfig, Reduction, WorldConfig, run_threads};
use ferrotron_parallel::data_parallel::{DataParallel, DataParallelConfig};
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::pipeline::{
    PipelineConfig, PipelineModel, PipelineSchedule, ScheduleKind, execute,
};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, Result, Tensor};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

static TURN: Mutex<()> = Mutex::new(());

/// Runs `f` on each rank of a layout of tensor, context and pipeline axes, with NCCL between stand-ins, and returns the
/// results and the calls; nothing, and says so for `test`, where there is no stand-in.
fn on_gpus<T: Send>(
    test: &str,
    [ranks, tensor, context, pipeline]: [usize; 4],
    timeout: Duration,
    f: impl Fn(&Mesh, &Device) -> Result<T> + Sync,
) -> Option<(Vec<Result<T>>, NcclCalls)> {
    let gpu = ferrotron_cuda_sim::stand_in(test)?;
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let before = ferrotron_cuda_sim::nccl_calls();
    let results = run_threads(ranks, &WorldConfig::default(), |world| {
        let device = Device::cuda(&GpuConfig { ordinal: world.rank(), ..gpu.clone() })?;
        let layout = ParallelDims::new(ranks, tensor, context, pipeline)?;
        let mesh = Mesh::new(&world, layout, SequenceParallel::Off)?;
        let nccl = NcclConfig { search: gpu.search.clone(), timeout };
        f(&mesh.with_nccl(&device, &nccl)?, &device)
    });
    let after = ferrotron_cuda_sim::nccl_calls();
    let calls = NcclCalls {
        communicators: after.communicators - before.communicators,
        all_reduces: after.all_reduces - before.all_reduces,
        reduce_scatters: after.reduce_scatters - before.reduce_scatters,
        all_gathers: after.all_gathers - before.all_gathers,
        broadcasts: after.broadcasts - before.broadcasts,
        reduces: after.reduces - before.reduces,
        messages: after.messages - before.messages,
    };
    Some((results, calls))
}

const MINUTE: Duration = Duration::from_secs(60);

#[test]
fn groups_of_the_same_ranks_share_a_communicator() {
    for (sizes, communicators) in [
        ([2, 1, 1, 1], 2),     // dp, dp-cp and world
        ([2, 2, 1, 1], 2),     // tp and world
        ([2, 1, 2, 1], 2),     // cp, dp-cp and world
        ([2, 1, 1, 2], 2),     // pp, its four channels, its ends, and world
        ([4, 2, 1, 1], 3 * 4), // tp; dp and dp-cp; world
        ([4, 1, 2, 1], 3 * 4), // cp; dp; dp-cp and world
        ([4, 1, 1, 4], 4 + 2), // pp, its channels, and world; its ends
        ([4, 2, 1, 2], 3 * 4), // tp; pp, its channels and its ends; world
    ] {
        let test = "groups_of_the_same_ranks_share_a_communicator";
        let Some((ranks, calls)) = on_gpus(test, sizes, MINUTE, |_, _| Ok(())) else { return };
        ranks.into_iter().for_each(|rank| rank.unwrap());
        assert_eq!(calls.communicators, communicators, "{sizes:?}");
    }
}

/// A rank gives calls of all groups and waits for none. Threads of groups would launch them in orders of their own.
#[test]
fn calls_of_all_groups_run_in_the_order_of_the_program() {
    let test = "calls_of_all_groups_run_in_the_order_of_the_program";
    let found = on_gpus(test, [6, 2, 1, 1], MINUTE, |mesh, device| {
        let groups = [mesh.axis(Axis::Tensor), mesh.dp_cp(), mesh.world()];
        let mut works = Vec::new();
        for round in 0..30 {
            let group = groups[round * round % 7 % 3];
            let x = Tensor::full(device, DType::F32, &[7], (mesh.rank() + round) as f64)?;
            works.push((group.size(), round, group.all_reduce(x, Reduction::Max)?));
        }
        for (_, round, work) in works {
            let largest = work.wait()?.to_vec::<f32>()?[6];
            assert!(largest >= (mesh.rank() + round) as f32);
        }
        Ok(())
    });
    for rank in found.into_iter().flat_map(|(ranks, _)| ranks) {
        rank.unwrap();
    }
}

#[test]
fn ranks_that_call_groups_in_two_orders_hear_of_it() {
    let test = "ranks_that_call_groups_in_two_orders_hear_of_it";
    let (limit, start) = (Duration::from_secs(3), Instant::now());
    let found = on_gpus(test, [4, 2, 1, 1], limit, |mesh, device| {
        let sum = |group: &Group| {
            let x = Tensor::full(device, DType::F32, &[3], 1.0)?;
            group.all_reduce(x, Reduction::Sum)
        };
        let groups = [mesh.axis(Axis::Tensor), mesh.world()];
        let order = if mesh.rank() == 1 { [1, 0] } else { [0, 1] };
        let works = order.map(|which| sum(groups[which]));
        for work in works {
            work?.wait()?.to_vec::<f32>()?;
        }
        sum(mesh.world())?.wait().map(drop)
    });
    for rank in found.into_iter().flat_map(|(ranks, _)| ranks) {
        let error = rank.unwrap_err().to_string();
        assert!(error.contains("did not end within 3s"), "{error}");
        assert!(error.contains("has called groups in another order"), "{error}");
    }
    assert!(start.elapsed() < Duration::from_secs(40), "{:?}", start.elapsed());
}

/// Layers of odd sizes.
struct Layers(Vec<Linear>);

impl Layers {
    fn new(mesh: &Mesh, device: &Device) -> Result<Layers> {
        let scope = mesh.scope(device, DType::F32, 3);
        let layer =
            |i: usize| Linear::new(&scope.child(&i.to_string()), 5, 5, Bias::Yes, Init::Ones);
        Ok(Layers((0..3).map(layer).collect::<Result<_>>()?))
    }
}

impl Module for Layers {
    fn visit(&self, f: &mut dyn FnMut(&Param)) {
        self.0.iter().for_each(|layer| layer.visit(f));
    }
}

const STEPS: usize = 2;
const MICROBATCHES: usize = 2;

/// Trains, and returns the weights and the number of buckets.
fn train(mesh: &Mesh, device: &Device, sharding: Sharding) -> Result<(Vec<f64>, usize)> {
    let layers = Layers::new(mesh, device)?;
    let config =
        DataParallelConfig { sharding, bucket_numel: Some(30), ..DataParallelConfig::default() };
    let parallel = DataParallel::new(&[&layers], mesh, &config)?;
    let mut optimizer = Optimizer::new(OptimizerConfig::SGD, parallel.buffers())?;
    for _ in 0..STEPS {
        parallel.begin_step(MICROBATCHES);
        for microbatch in 0..MICROBATCHES {
            let x = Tensor::full(device, DType::F32, &[1, 5], (mesh.rank() + microbatch) as f64)?;
            let run = |x: Var, layer: &Linear| layer.forward(&x);
            let y = layers.0.iter().try_fold(Var::constant(x), run)?;
            y.sum_all()?.backward_scaled(0.25)?;
            parallel.end_backward()?;
        }
        parallel.finish_step()?;
        parallel.update(&mut optimizer, &StepConfig { lr: 1e-3, grad_scale: 1.0 })?;
    }
    parallel.wait_for_weights()?;
    let mut weights = Vec::new();
    for param in layers.params() {
        weights.extend(param.leaf().value()?.to_f64()?);
    }
    Ok((weights, parallel.buffers().groups().len()))
}

/// Three ranks cannot share 25 or 30 elements evenly: without padding each bucket would be a broadcast and a reduction of
/// every rank.
#[test]
fn a_bucket_is_one_reduce_scatter_and_one_all_gather() {
    let test = "a_bucket_is_one_reduce_scatter_and_one_all_gather";
    let ranks = 3;
    for sharding in [Sharding::Optimizer, Sharding::Gradients] {
        let found =
            on_gpus(test, [ranks, 1, 1, 1], MINUTE, |mesh, device| train(mesh, device, sharding));
        let Some((results, calls)) = found else { return };
        let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
        let on_host = Mesh::run_threads(ParallelDims::new(ranks, 1, 1, 1).unwrap(), |mesh| {
            train(mesh, &Device::cpu(1)?, sharding)
        });
        for ((got, buckets), (want, same)) in results.iter().zip(&on_host.unwrap()) {
            assert_eq!(buckets, same);
            let near = |(got, want): (&f64, &f64)| (got - want).abs() <= 1e-6 * want.abs();
            assert!(got.iter().zip(want).all(near), "{sharding:?}: {got:?}, {want:?}");
        }
        let buckets = results[0].1;
        assert!(buckets > 2, "{buckets}");
        let rounds = if sharding == Sharding::Optimizer { 1 } else { MICROBATCHES };
        let want = NcclCalls {
            communicators: ranks as u64,
            reduce_scatters: (ranks * buckets * STEPS * rounds) as u64,
            all_gathers: (ranks * buckets * STEPS) as u64,
            ..NcclCalls::default()
        };
        assert_eq!(calls, want, "{sharding:?}");
    }
}

/// A weight in each chunk: y = w x, and the loss y.
struct Weights {
    chunks: Vec<Linear>,
    is_last: bool,
    device: Device,
}

impl PipelineModel for Weights {
    fn activation(&self, _microbatch: usize) -> (Vec<usize>, DType, Device) {
        (vec![1, 1], DType::F32, self.device.clone())
    }

    fn forward(&mut self, microbatch: usize, chunk: usize, input: Option<Var>) -> Result<Var> {
        let first = || {
            let x = Tensor::full(&self.device, DType::F32, &[1, 1], microbatch as f64 + 1.0)?;
            Ok(Var::constant(x))
        };
        let y = self.chunks[chunk].forward(&input.map_or_else(first, Ok)?)?.mul_scalar(2.0)?;
        if self.is_last && chunk + 1 == self.chunks.len() { y.square()?.sum_all() } else { Ok(y) }
    }

    fn end_backward(&mut self, _microbatch: usize, _chunk: usize) -> Result<()> {
        Ok(())
    }
}

/// The gradient of each chunk's weight, in a schedule in which ranks exchange messages.
fn gradients(mesh: &Mesh, device: &Device, config: &PipelineConfig) -> Result<Vec<f64>> {
    let scope = mesh.scope(device, DType::F32, 1).child(&mesh.rank().to_string());
    let layer = |i: usize| Linear::new(&scope.child(&i.to_string()), 1, 1, Bias::No, Init::Ones);
    let chunks = (0..config.chunks).map(layer).collect::<Result<Vec<_>>>()?;
    let is_last = mesh.rank() + 1 == config.stages;
    let mut model = Weights { chunks, is_last, device: device.clone() };
    execute(&PipelineSchedule::new(config)?, &mut model, mesh, 1.0)?;
    let mut found = Vec::new();
    for layer in &model.chunks {
        found.extend(layer.weight().leaf().gradient()?.expect("it has one").to_f64()?);
    }
    Ok(found)
}

#[test]
fn stages_exchange_messages_in_any_schedule() {
    let test = "stages_exchange_messages_in_any_schedule";
    for (kind, stages, microbatches, chunks) in [
        (ScheduleKind::OneFOneB, 2, 4, 1),
        (ScheduleKind::ZbH1, 3, 4, 1),
        (ScheduleKind::Interleaved, 2, 4, 2),
        (ScheduleKind::Interleaved, 2, 6, 3),
        (ScheduleKind::Interleaved, 4, 8, 2),
    ] {
        let config = PipelineConfig { kind, stages, microbatches, chunks };
        let found = on_gpus(test, [stages, 1, 1, stages], MINUTE, |mesh, device| {
            gradients(mesh, device, &config)
        });
        let Some((results, calls)) = found else { return };
        let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
        let on_host = Mesh::run_threads(ParallelDims::new(stages, 1, 1, stages).unwrap(), |mesh| {
            gradients(mesh, &Device::cpu(1)?, &config)
        });
        assert_eq!(results, on_host.unwrap(), "{config:?}");
        // There and back, over each border between two chunks, on both sides.
        let borders = stages * chunks - 1;
        assert_eq!(calls.messages, (2 * 2 * borders * microbatches) as u64, "{config:?}");
    }
}
