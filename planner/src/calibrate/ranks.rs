//! Times collectives between two ranks, and kernels of several ranks at once.

use ferrotron_models::bench::{median, trainer};
use ferrotron_models::data::Sampler;
use ferrotron_models::gpt::Gpt;
use ferrotron_models::trainer::Trainer;
use ferrotron_parallel::collective::{
    Encryption, Group, RankConfig, Reduction, Transport, WorldConfig, run_rank_process,
};
use ferrotron_parallel::mesh::Mesh;
use ferrotron_tensor::{DType, Device, Error, Result, Tensor};
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::panic::AssertUnwindSafe;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use super::kernels::model;
use crate::cluster::Link;
use crate::curve::Curve;

/// Rounds of each measurement, whose median counts.
const ROUNDS: usize = 5;
/// Bytes of the buffers of collectives.
const SIZES: [usize; 5] = [1 << 10, 1 << 14, 1 << 18, 1 << 21, 1 << 23];
/// Bytes of all calls of a round, and its calls at least and at most.
const ROUND_BYTES: usize = 1 << 25;
const CALLS: [usize; 2] = [4, 128];
/// Longest time that ranks wait for one another.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Takes part in one call of a group of two, on a buffer of this many elements.
type Operation = fn(&Group, &Device, usize) -> Result<()>;

/// The collectives that are timed, by name.
const OPERATIONS: [(&str, Operation); 6] = [
    ("all_reduce", |group, device, elements| {
        group.all_reduce(buffer(device, elements)?, Reduction::Sum)?.wait().map(drop)
    }),
    ("all_gather", |group, device, elements| {
        group.all_gather(buffer(device, elements / 2)?, elements)?.wait().map(drop)
    }),
    ("reduce_scatter", |group, device, elements| {
        group.reduce_scatter(buffer(device, elements)?, Reduction::Sum)?.wait().map(drop)
    }),
    ("all_to_all", |group, device, elements| {
        group.all_to_all(buffer(device, elements)?)?.wait().map(drop)
    }),
    ("broadcast", |group, device, elements| {
        group.broadcast(buffer(device, elements)?, 0)?.wait().map(drop)
    }),
    ("send_recv", |group, device, elements| {
        let other = 1 - group.rank();
        group.send_recv(buffer(device, elements)?, other, other)?.wait().map(drop)
    }),
];
/// One message, there and back.
const MESSAGE: (&str, Operation) = ("send", |group, device, elements| {
    let message = buffer(device, elements)?;
    match group.rank() {
        0 => {
            group.send(message, 1)?.wait()?;
            group.recv(buffer(device, elements)?, 1)?.wait().map(drop)
        }
        _ => group.send(group.recv(message, 0)?.wait()?, 0)?.wait(),
    }
});

fn buffer(device: &Device, elements: usize) -> Result<Tensor> {
    Tensor::empty(device, DType::F32, &[elements])
}

/// Seconds of collectives between two ranks by bytes, and the link that all-reduces of the smallest and of the largest
/// buffer see: each rank sends half of the bytes twice, in two messages.
pub(super) fn collectives() -> Result<(BTreeMap<String, Curve>, Link)> {
    let mut curves = BTreeMap::new();
    for (seconds, (name, _)) in measured()?.into_iter().zip(all()) {
        let messages = if name == MESSAGE.0 { 2.0 } else { 1.0 };
        let points = SIZES.into_iter().zip(seconds);
        let points = points.map(|(bytes, seconds)| [bytes as f64, seconds / messages]);
        curves.insert(name.to_string(), Curve::new(points.collect()));
    }
    let points = curves["all_reduce"].points();
    let ([small, quick], [large, slow]) = (points[0], points[points.len() - 1]);
    let bandwidth = (large - small) / (slow - quick).max(1e-9);
    Ok((curves, Link { bandwidth, latency: ((quick - small / bandwidth) / 2.0).max(0.0) }))
}

fn all() -> impl Iterator<Item = (&'static str, Operation)> {
    OPERATIONS.into_iter().chain([MESSAGE])
}

/// Seconds of a call by operation and size.
fn measured() -> Result<Vec<Vec<f64>>> {
    let port = TcpListener::bind(("127.0.0.1", 0))
        .and_then(|listener| listener.local_addr())
        .map_err(|error| Error::communication("calibrate", format!("no free port: {error}")))?
        .port();
    let rank = |rank: usize| {
        let config = RankConfig {
            rank,
            size: 2,
            master: "127.0.0.1".to_string(),
            port,
            secret: None,
            job_id: None,
            transport: Transport::Auto,
            encryption: Encryption::BetweenHosts,
            world: WorldConfig { timeout: TIMEOUT },
        };
        run_rank_process(&config, |world| {
            let (device, group) = (Device::cpu(1)?, world.everyone()?);
            // Both ranks take equally many calls.
            let time = |operation: Operation, bytes: usize| -> Result<f64> {
                let calls = (ROUND_BYTES / bytes).clamp(CALLS[0], CALLS[1]);
                let round = |_| {
                    let started = Instant::now();
                    (0..calls).try_for_each(|_| operation(&group, &device, bytes / 4))?;
                    Ok(started.elapsed().as_secs_f64() / calls as f64)
                };
                // The first round touches the memory.
                let rounds = (0..=ROUNDS).map(round).collect::<Result<Vec<f64>>>()?;
                Ok(median(rounds[1..].to_vec()))
            };
            let times = |(_, operation): (&'static str, Operation)| {
                SIZES.into_iter().map(|bytes| time(operation, bytes)).collect::<Result<_>>()
            };
            all().map(times).collect::<Result<Vec<Vec<f64>>>>()
        })
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| rank(1));
        let own = rank(0);
        let other = other.join().unwrap_or_else(|_| Err(Error::value("calibrate", "a rank ended")));
        other.and(own)
    })
}

/// The time of a step while so many `ranks` of `threads` each take one of their own, over its time alone.
pub(super) fn contention(dtype: DType, threads: usize, ranks: usize) -> Result<f64> {
    if ranks < 2 {
        return Ok(1.0);
    }
    let together = Barrier::new(ranks);
    // Times of steps alone, and of those of all ranks at once. A rank that fails goes on to the barriers.
    let rank = |rank: usize| -> Result<[Vec<f64>; 2]> {
        let made = caught(|| trainer(&model(dtype, STEP), &Device::cpu(threads)?, &Mesh::single()));
        let mut made = made.map(|(trainer, samples)| (trainer, samples, [Vec::new(), Vec::new()]));
        for round in 0..=ROUNDS {
            for (alone, others) in [(0, false), (1, true)] {
                together.wait();
                if rank > 0 && !others {
                    continue;
                }
                let step = |(trainer, samples, times): &mut (
                    Trainer<Gpt>,
                    Sampler,
                    [Vec<f64>; 2],
                )|
                 -> Result<()> {
                    let started = Instant::now();
                    trainer.step(samples)?;
                    if round > 0 {
                        times[alone].push(started.elapsed().as_secs_f64());
                    }
                    Ok(())
                };
                if let Ok(state) = &mut made
                    && let Err(error) = caught(|| step(state))
                {
                    made = Err(error);
                }
            }
            together.wait();
        }
        made.map(|(_, _, times)| times)
    };
    let times = std::thread::scope(|scope| {
        let others: Vec<_> = (1..ranks).map(|number| scope.spawn(move || rank(number))).collect();
        let mut times = vec![rank(0)];
        times.extend(others.into_iter().map(|other| {
            other.join().unwrap_or_else(|_| Err(Error::value("calibrate", "a rank ended")))
        }));
        times.into_iter().collect::<Result<Vec<_>>>()
    })?;
    let alone = median(times[0][0].clone());
    let together = median(times.into_iter().flat_map(|[_, together]| together).collect());
    Ok((together / alone).max(1.0))
}

/// The result of `work`, whose panic is an error too: other ranks would wait for this one for ever.
fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let found = std::panic::catch_unwind(AssertUnwindSafe(work));
    found.unwrap_or_else(|_| Err(Error::value("calibrate", "a step of a rank panicked")))
}

/// Samples and tokens of the steps that ranks take at once.
const STEP: [usize; 2] = [4, 256];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_a_rank_is_an_error() {
        let panics = || -> Result<()> { panic!("on purpose") };
        let error = caught(panics).unwrap_err().to_string();
        assert!(error.contains("a step of a rank panicked"), "{error}");
        assert_eq!(caught(|| Ok(1)).unwrap(), 1);
    }
}
