//! The head with a vocabulary in shards, on threads as ranks, against the head in one piece.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use ferrotron_autograd::ops::linear_cross_entropy::{PendingGradient, VocabParallelComm};
use ferrotron_autograd::{Leaf, WeightGrads, backward};
use ferrotron_tensor::ops::concat::concat;
use ferrotron_tensor::ops::cross_entropy::{CrossEntropyConfig, VocabAllReduce};
use ferrotron_tensor::{DType, Device, Result, Tensor};

use crate::inputs::{tensor, values};
use crate::table::Domain;
use ranks::{Rank, on_ranks, shard_of};

#[path = "../../../tensor/tests/reference/shards.rs"]
mod ranks;

const N: usize = 12;
const C: usize = 4;
const V: usize = 13;

/// The distribution of the tokens over ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Tokens {
    /// All of them on every rank.
    Copied,
    /// A part on each rank, gathered for the head.
    Parted,
}

/// Sums dx over the ranks, and checks when it is asked to.
struct Exchange {
    rank: Rank,
    tokens: Tokens,
    weight: Leaf,
    gathers: AtomicUsize,
}

impl VocabAllReduce for Exchange {
    fn max(&self, per_token: Tensor) -> Result<Tensor> {
        self.rank.max(per_token)
    }

    fn sum(&self, per_token: Tensor) -> Result<Tensor> {
        self.rank.sum(per_token)
    }
}

impl VocabParallelComm for Exchange {
    fn gather_input(&self, x: Tensor) -> Result<Tensor> {
        self.gathers.fetch_add(1, Relaxed);
        match self.tokens {
            Tokens::Copied => Ok(x),
            Tokens::Parted => concat(&self.rank.gather(&x)?.iter().collect::<Vec<_>>(), 0),
        }
    }

    fn reduce_input_gradient(&self, dx: Tensor) -> Result<PendingGradient> {
        let sum = self.rank.sum_over_ranks(&dx)?;
        let part = match self.tokens {
            Tokens::Copied => sum,
            Tokens::Parted => {
                let count = N / self.rank.ranks;
                sum.narrow(0, self.rank.rank * count, count)?
            }
        };
        let weight = self.weight.clone();
        Ok(Box::new(move || {
            assert!(weight.gradient()?.is_some(), "dW is computed before dx is waited for");
            Ok(part)
        }))
    }
}

fn operands(device: &Device) -> Result<(Tensor, Tensor, Tensor)> {
    let x = tensor(device, DType::F64, &[N, C], &values(Domain::Any, 0, N * C))?;
    let weight = tensor(device, DType::F64, &[V, C], &values(Domain::Any, 1, V * C))?;
    let targets: Vec<i64> =
        (0..N as i64).map(|i| if i % 5 == 3 { -1 } else { i * i % V as i64 }).collect();
    Ok((x, weight, Tensor::from_slice(device, &targets, &[N])?))
}

fn assert_close(what: &str, got: &Tensor, want: &Tensor) -> Result<()> {
    assert_eq!(got.dims(), want.dims(), "{what}");
    for (i, (got, want)) in got.to_f64()?.into_iter().zip(want.to_f64()?).enumerate() {
        // Sums over V classes or N tokens of numbers up to 2, in another order.
        let tolerance = 8.0 * (V + N) as f64 * f64::EPSILON * want.abs().max(1.0);
        assert!((got - want).abs() <= tolerance, "{what} at {i}: got {got}, want {want}");
    }
    Ok(())
}

#[test]
fn shards_give_the_loss_and_the_gradients_of_the_whole() -> Result<()> {
    let device = Device::cpu(1)?;
    let (x, weight, targets) = operands(&device)?;
    let scale = || Tensor::full(&device, DType::F64, &[], 0.25);
    for smoothing in [0.0, 0.125] {
        for chunk in [5, N] {
            let config = CrossEntropyConfig { label_smoothing: smoothing, ..Default::default() };
            let (of_x, of_w) = (Leaf::new("x", x.clone()), Leaf::new("weight", weight.clone()));
            let want =
                of_x.var()?.linear_cross_entropy(&of_w.var()?, &targets, &config, 1 << 20)?;
            backward(&[(&want.sum, scale()?)], WeightGrads::Now)?.run()?;
            let (dx, dw) = (of_x.gradient()?.unwrap(), of_w.gradient()?.unwrap());
            for (ranks, tokens) in [1, 2, 3, 4]
                .into_iter()
                .flat_map(|ranks| [(ranks, Tokens::Copied), (ranks, Tokens::Parted)])
            {
                let name = format!("{ranks} ranks, {tokens:?}, chunk {chunk}, {smoothing}");
                let bound = chunk * V.div_ceil(ranks) * 8;
                let found = on_ranks(ranks, |rank| -> Result<()> {
                    let at = rank.rank;
                    let (shard, classes) = shard_of(at, ranks, V);
                    let (first, count) = match tokens {
                        Tokens::Copied => (0, N),
                        Tokens::Parted => (at * N / ranks, N / ranks),
                    };
                    let of_x = Leaf::new("x", x.narrow(0, first, count)?.copy()?);
                    let of_w =
                        Leaf::new("weight", weight.narrow(0, shard.offset, classes)?.copy()?);
                    let weight = of_w.clone();
                    let gathers = AtomicUsize::new(0);
                    let exchange = Arc::new(Exchange { rank, tokens, weight, gathers });
                    let loss = of_x.var()?.linear_cross_entropy_shard(
                        &of_w.var()?,
                        &targets,
                        &config,
                        bound,
                        (shard, exchange.clone()),
                    )?;
                    assert_eq!(loss.num_valid_tokens()?, want.num_valid_tokens()?, "{name}");
                    assert_close(&format!("{name} loss"), loss.sum.value(), want.sum.value())?;
                    backward(&[(&loss.sum, scale()?)], WeightGrads::Now)?.run()?;
                    let want = dx.narrow(0, first, count)?;
                    assert_close(&format!("{name} dx"), &of_x.gradient()?.unwrap(), &want)?;
                    let want = dw.narrow(0, shard.offset, classes)?;
                    assert_close(&format!("{name} dW"), &of_w.gradient()?.unwrap(), &want)?;
                    // Gradients that forward has formed need x no more.
                    let gathers = if chunk < N { 1 } else { 2 };
                    assert_eq!(exchange.gathers.load(Relaxed), gathers, "{name}");
                    let per_token = if smoothing == 0.0 { 3 } else { 4 };
                    assert_eq!(exchange.rank.elements.load(Relaxed), per_token * N, "{name}");
                    assert_eq!(exchange.rank.calls.load(Relaxed), 2 * N.div_ceil(chunk), "{name}");
                    Ok(())
                });
                found.into_iter().collect::<Result<Vec<()>>>()?;
            }
        }
    }
    Ok(())
}

#[test]
fn a_part_of_the_tokens_is_kept_and_no_gradient_is_exchanged_that_nobody_wants() -> Result<()> {
    let device = Device::cpu(1)?;
    let (x, weight, targets) = operands(&device)?;
    let config = CrossEntropyConfig::default();
    for bound in [0, 1 << 20] {
        let found = on_ranks(2, |rank| -> Result<(usize, usize)> {
            let (shard, classes) = shard_of(rank.rank, 2, V);
            let x = x.narrow(0, rank.rank * N / 2, N / 2)?.copy()?;
            let of_w = Leaf::new("weight", weight.narrow(0, shard.offset, classes)?.copy()?);
            let weight = of_w.clone();
            let exchange =
                Exchange { rank, tokens: Tokens::Parted, weight, gathers: AtomicUsize::new(0) };
            let shard = (shard, Arc::new(exchange) as Arc<dyn VocabParallelComm>);
            let (x, weight) = (ferrotron_autograd::Var::constant(x), of_w.var()?);
            let loss = x.linear_cross_entropy_shard(&weight, &targets, &config, bound, shard)?;
            let kept = loss.sum.saved_bytes();
            loss.sum.backward()?;
            assert!(of_w.gradient()?.is_some());
            Ok((kept, classes))
        });
        for found in found {
            let (kept, classes) = found?;
            let want = match bound {
                0 => classes * C,                     // dW
                _ => N / 2 * C + N + N + N * classes, // x, the targets, lse and logits
            };
            assert_eq!(kept, want * 8);
        }
    }
    Ok(())
}
