//! Ranks as threads that join what they found, for tests of sharded vocabularies.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use ferrotron_tensor::ops::cross_entropy::{VocabAllReduce, VocabShard};
use ferrotron_tensor::{Error, Result, Tensor};

/// One of several ranks. A rank that is gone is an error on the others, so that no test hangs.
pub struct Rank {
    pub rank: usize,
    pub ranks: usize,
    to: Vec<Sender<Tensor>>,
    from: Vec<Mutex<Receiver<Tensor>>>,
    /// Elements handed to the join so far.
    pub elements: AtomicUsize,
    /// Calls of the join so far.
    pub calls: AtomicUsize,
}

impl Rank {
    /// Gathers every rank's tensor, in the order of ranks.
    pub fn gather(&self, mine: &Tensor) -> Result<Vec<Tensor>> {
        let gone = |_| Error::value("gather", format!("rank {} misses another", self.rank));
        for to in &self.to {
            to.send(mine.copy()?).map_err(|_| gone(()))?;
        }
        let receive = |from: &Mutex<Receiver<Tensor>>| from.lock().unwrap().recv();
        self.from.iter().map(|from| receive(from).map_err(|_| gone(()))).collect()
    }

    /// The sum over the ranks, added up in f64 in their order.
    pub fn sum_over_ranks(&self, mine: &Tensor) -> Result<Tensor> {
        self.fold(mine, |a, b| a + b)
    }

    fn fold(&self, mine: &Tensor, f: impl Fn(f64, f64) -> f64) -> Result<Tensor> {
        let mut all = self.gather(mine)?.into_iter().map(|x| x.to_f64());
        let first = all.next().expect("there is a rank")?;
        let values = all.try_fold(first, |sum, x| -> Result<Vec<f64>> {
            Ok(sum.iter().zip(x?).map(|(&a, b)| f(a, b)).collect())
        })?;
        Tensor::from_slice(mine.device(), &values, mine.dims())?.cast(mine.dtype())
    }

    fn count(&self, x: &Tensor) {
        self.elements.fetch_add(x.numel(), Ordering::Relaxed);
        self.calls.fetch_add(1, Ordering::Relaxed);
    }
}

impl VocabAllReduce for Rank {
    fn max(&self, per_token: Tensor) -> Result<Tensor> {
        self.count(&per_token);
        self.fold(&per_token, f64::max)
    }

    fn sum(&self, per_token: Tensor) -> Result<Tensor> {
        self.count(&per_token);
        self.sum_over_ranks(&per_token)
    }
}

/// Runs `f` as each of `ranks` ranks, on a thread each; the results in the order of the ranks.
pub fn on_ranks<R: Send>(ranks: usize, f: impl Fn(Rank) -> R + Sync) -> Vec<R> {
    let mut senders: Vec<Vec<Sender<Tensor>>> = (0..ranks).map(|_| Vec::new()).collect();
    let mut receivers: Vec<Vec<Mutex<Receiver<Tensor>>>> = Vec::new();
    for _ in 0..ranks {
        let channels: Vec<_> = (0..ranks).map(|_| channel()).collect();
        let (to, from): (Vec<_>, Vec<_>) = channels.into_iter().unzip();
        senders.iter_mut().zip(to).for_each(|(senders, to)| senders.push(to));
        receivers.push(from.into_iter().map(Mutex::new).collect());
    }
    let zero = || AtomicUsize::new(0);
    thread::scope(|scope| {
        let threads: Vec<_> = (senders.into_iter().zip(receivers).enumerate())
            .map(|(rank, (to, from))| {
                let rank = Rank { rank, ranks, to, from, elements: zero(), calls: zero() };
                let f = &f;
                scope.spawn(move || f(rank))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("the rank ends")).collect()
    })
}

/// The shard of rank `rank` and its number of classes: balanced, the larger ones first.
pub fn shard_of(rank: usize, ranks: usize, global: usize) -> (VocabShard, usize) {
    let start = |rank: usize| rank * (global / ranks) + rank.min(global % ranks);
    let offset = start(rank);
    (VocabShard { offset, global, shards: ranks }, start(rank + 1) - offset)
}
