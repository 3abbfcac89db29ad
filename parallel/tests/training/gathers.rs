//! Gathers of weights overlap with what comes after the update (ZeRO 1 and 2).

use ferrotron_nn::{Module, Optimizer, OptimizerConfig, Sharding, StepConfig};
use ferrotron_parallel::collective::{Call, Collective, CommVolume, Memory, Op, Work};
use ferrotron_parallel::data_parallel::DataParallel;
use ferrotron_parallel::mesh::Mesh;
use ferrotron_tensor::ops::step::DeviceStepParams;
use ferrotron_tensor::{Category, Device, Error, Result, Tensor};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::thawing::{Layers, on_two_ranks, place};

const STEP: StepConfig = StepConfig { lr: 0.05, grad_scale: 1.0 };

/// Two ranks with reduced gradients, before their update, which compares nothing over ranks.
fn before_update<T: Send>(
    sharding: Sharding,
    f: impl Fn(&Mesh, Layers, DataParallel, &mut dyn FnMut(&DataParallel) -> Result<()>) -> Result<T>
    + Sync,
) -> Vec<Result<T>> {
    on_two_ranks(|mesh| {
        let device = Device::cpu(1)?;
        let layers = Layers::new(mesh, &device)?;
        let parallel = place(&layers, mesh, sharding)?;
        let mut optimizer = Optimizer::new(OptimizerConfig::SGD, parallel.buffers())?;
        parallel.begin_step(1);
        layers.loss(mesh.rank())?.backward_scaled(0.5)?;
        parallel.end_backward()?;
        parallel.finish_step()?;
        let step = DeviceStepParams::new(&device, &optimizer.numbers(&STEP))?;
        f(mesh, layers, parallel, &mut |parallel| parallel.update_with(&mut optimizer, &step))
    })
}

/// The values behind an update with gradients that are all-reduced.
fn updated_without_sharding() -> Vec<Vec<f64>> {
    let mut found = before_update(Sharding::None, |_, layers, parallel, update| {
        update(&parallel)?;
        layers.values()
    });
    found.swap_remove(0).expect("both ranks update")
}

/// Rank 1 updates after rank 0 has returned from its update, which would otherwise wait for ever.
#[test]
fn an_update_does_not_wait_for_weights_of_other_ranks() {
    let want = updated_without_sharding();
    for sharding in [Sharding::Optimizer, Sharding::Gradients] {
        let (returned, waits) = channel();
        let waits = Mutex::new(waits);
        let found = before_update(sharding, |mesh, layers, parallel, update| {
            let barrier = || mesh.world().barrier(); // ranks compare the places of their calls
            if mesh.rank() == 0 {
                update(&parallel)?;
                // A barrier among the same ranks does not wait for the weights either.
                let others = barrier();
                returned.send(()).expect("rank 1 waits");
                others.wait()?;
            } else {
                let limit = Duration::from_secs(60);
                waits.lock().unwrap().recv_timeout(limit).expect("rank 0 returns");
                barrier().wait()?;
                update(&parallel)?;
            }
            // Weights on their way belong to the leaves, not to the `DataParallel`.
            drop(parallel);
            layers.values()
        });
        for values in found {
            assert_eq!(values.expect("both ranks update"), want, "{sharding:?}");
        }
    }
}

/// A way to the values of the first weight.
type Access = fn(&Layers, &DataParallel) -> Result<Vec<f64>>;

/// Changes and readers behind an update see the updated weights, however they get at them.
#[test]
fn every_access_waits_for_the_weights() {
    let want = &updated_without_sharding()[0];
    let accesses: [(&str, Access); 4] = [
        ("a value", |layers, _| layers.params()[0].leaf().value()?.to_f64()),
        ("a flat", |_, parallel| {
            let buffers = parallel.buffers().groups();
            let first = buffers.iter().find(|group| group.params[0].name() == "0.weight");
            first.expect("a bucket").weights.lock()?.tensor(0)?.to_f64()
        }),
        ("a visitor", |_, parallel| {
            let mut found = Vec::new();
            for group in parallel.buffers().groups() {
                group.visit_weights(|name, _, tensor| {
                    if name == "0.weight" {
                        found = tensor.to_f64()?;
                    }
                    Ok(())
                })?;
            }
            Ok(found)
        }),
        ("a change", |layers, _| {
            let weight = &layers.params()[0];
            let (device, dims) = (weight.leaf().device(), weight.leaf().dims());
            // The gather would write over it.
            weight.leaf().set_value(&Tensor::full(device, weight.leaf().dtype(), dims, 8.0)?)?;
            weight.leaf().value()?.to_f64()
        }),
    ];
    for (what, access) in accesses {
        let found = before_update(Sharding::Optimizer, |mesh, layers, parallel, update| {
            if mesh.rank() == 1 {
                std::thread::sleep(Duration::from_millis(20)); // so that rank 0 is early
            }
            update(&parallel)?;
            let first = access(&layers, &parallel)?;
            mesh.world().barrier().wait()?;
            let last = layers.params()[0].leaf().value()?.to_f64()?;
            assert_eq!(first, last, "{what}");
            Ok(first)
        });
        for values in found {
            let values = values.expect(what);
            let want = if what == "a change" { &vec![8.0; 9] } else { want };
            assert_eq!(&values, want, "{what}");
        }
    }
}

/// A rank that leaves before its update is named by the first use of a weight, and by every later one.
#[test]
fn weights_that_do_not_come_are_an_error_of_every_use() {
    let found = before_update(Sharding::Optimizer, |mesh, layers, parallel, update| {
        if mesh.rank() == 1 {
            return Ok(());
        }
        update(&parallel)?;
        let leaf = layers.params()[0].leaf().clone();
        let zeros = Tensor::zeros(leaf.device(), leaf.dtype(), leaf.dims())?;
        let uses: [&dyn Fn() -> Result<()>; 4] = [
            &|| leaf.value().map(drop),
            &|| layers.loss(0).map(drop),
            &|| leaf.set_value(&zeros),
            &|| update_again(&parallel),
        ];
        for at in uses {
            let error = at().expect_err("rank 1 has left").to_string();
            assert!(error.contains("rank 1 has left"), "{error}");
        }
        Ok(())
    });
    found.into_iter().for_each(|rank| rank.expect("the errors are as they should be"));
}

fn update_again(parallel: &DataParallel) -> Result<()> {
    let mut optimizer = Optimizer::new(OptimizerConfig::SGD, parallel.buffers())?;
    let step = DeviceStepParams::new(&Device::cpu(1)?, &optimizer.numbers(&STEP))?;
    parallel.update_with(&mut optimizer, &step)
}

/// Notes the elements of every gather, in the order of the calls.
struct Notes {
    inner: Arc<dyn Collective>,
    gathers: Arc<Mutex<Vec<usize>>>,
}

impl Collective for Notes {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn start(&self, call: Call, memory: Memory) -> Work<Memory> {
        if call.op == Op::AllGather {
            self.gathers.lock().unwrap().push(call.len);
        }
        self.inner.start(call, memory)
    }

    fn traffic(&self) -> CommVolume {
        self.inner.traffic()
    }
}

/// The bucket that forward uses first is gathered first.
#[test]
fn weights_are_gathered_in_the_order_of_forward() {
    let found = on_two_ranks(|mesh| {
        let gathers = Arc::default();
        let noted =
            mesh.map_collectives(&|inner| Arc::new(Notes { inner, gathers: Arc::clone(&gathers) }));
        let device = Device::cpu(1)?;
        let layers = Layers::new(mesh, &device)?;
        let parallel = place(&layers, &noted, Sharding::Optimizer)?;
        let mut optimizer = Optimizer::new(OptimizerConfig::SGD, parallel.buffers())?;
        parallel.begin_step(1);
        layers.loss(0)?.backward()?;
        parallel.finish_step()?;
        gathers.lock().unwrap().clear();
        parallel.update(&mut optimizer, &STEP)?;
        let buckets = parallel.buffers().groups().iter().rev();
        let forward: Vec<usize> = buckets.map(|bucket| bucket.padded_numel()).collect();
        let first = parallel.buffers().groups().last().map(|bucket| bucket.params[0].name());
        assert!(first.is_some_and(|name| name.starts_with("0.")), "{first:?}");
        let gathered = gathers.lock().unwrap().clone();
        layers.values()?;
        Ok::<_, Error>((gathered, forward))
    });
    for rank in found {
        let (gathered, forward) = rank.expect("an update");
        assert!(forward.len() > 2);
        assert_eq!(gathered, forward);
    }
}

/// Weights whose gather nobody waits for are freed with their leaves, when the call has ended.
#[test]
fn weights_that_nobody_waits_for_leave_no_memory_behind() {
    let found = before_update(Sharding::Optimizer, |_, layers, parallel, update| {
        update(&parallel)?;
        let device = layers.params()[0].leaf().device().clone();
        assert!(device.memory().bytes(Category::Weights) > 0);
        Ok(device)
    });
    // The worlds are gone, and with them all calls.
    for device in found {
        assert_eq!(device.expect("an update").memory().bytes(Category::Weights), 0);
    }
}
