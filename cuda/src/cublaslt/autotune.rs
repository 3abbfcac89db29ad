//! Times the algorithms that cuBLASLt offers for a kind of product.

use std::sync::atomic::Ordering;

use super::CublasLt;
use super::algorithms::AlgorithmChoice;
use super::handle::Handle;
use super::plan::{MatmulPlan, Shape};
use super::product::{Matmul, Matrices};
use crate::memory::{Arena, GRANULE};
use crate::stream::Stream;
use crate::{Error, Result};

/// Seconds for which an algorithm runs in one measurement, if at most [`MOST_CALLS`] products take so long.
const MEASURED: f64 = 1e-3;

const MOST_CALLS: f64 = 50.0;

/// Measurements of each algorithm. Those of different algorithms alternate, so that a GPU whose clock changes prefers
/// none.
const ROUNDS: usize = 4;

/// Addresses whose remainders by this are equal have every alignment in common that matters to an algorithm.
const ADDRESSES: u64 = 256;

impl CublasLt {
    /// The index of the algorithm of a plan, which is decided from then on. A captured stream runs nothing that could
    /// be timed: there a product takes what is known, and nothing is decided.
    ///
    /// # Safety
    /// The conditions are those of [`CublasLt::run`].
    pub(super) unsafe fn choose(
        &self,
        library: &Handle,
        stream: &Stream,
        product: &Matmul,
        plan: &mut MatmulPlan,
    ) -> Result<usize> {
        let (index, is_decided) = match &self.choice {
            AlgorithmChoice::Autotuned(folder) if plan.algorithms().len() > 1 => {
                let key = self.key(library, product);
                let is_captured = stream.is_captured()?;
                // SAFETY: the caller's promise.
                let seconds = || unsafe { self.time_before(library, stream, product, plan) };
                let seconds = (!is_captured).then_some(seconds);
                (folder.index(&key, plan.algorithms(), seconds)?, !is_captured)
            }
            _ => (0, true),
        };
        plan.chosen = is_decided.then_some(index);
        Ok(index)
    }

    /// All that the choice of an algorithm depends on, as lines.
    fn key(&self, library: &Handle, product: &Matmul) -> String {
        let (context, workspace) = (&self.context, self.workspace.len());
        let (name, capability) = (context.name(), context.architecture());
        let multiprocessors = context.multiprocessors();
        // SAFETY: the function has no conditions.
        let version = unsafe { (library.functions.version)() };
        let shape = Shape::from_matmul(product);
        format!(
            "GPU {name}, {capability:?}, {multiprocessors} multiprocessors\n\
             cuBLASLt {version}, workspace {workspace}\n{shape:?}\n"
        )
    }

    /// Times the algorithms of a product that has not run yet, whose addends stay as they are. What else it writes is
    /// written again when it runs.
    ///
    /// # Safety
    /// The conditions are those of [`CublasLt::run`].
    unsafe fn time_before(
        &self,
        library: &Handle,
        stream: &Stream,
        product: &Matmul,
        plan: &MatmulPlan,
    ) -> Result<Vec<f64>> {
        if product.beta == 0.0 || product.addend.is_some() {
            // SAFETY: the caller's promise.
            return unsafe { self.time(library, stream, product, plan) };
        }
        // Elsewhere, with the same alignment.
        let offset = product.out.address % ADDRESSES;
        let bytes = (offset as usize + product.out_bytes()).next_multiple_of(GRANULE);
        let mut memory = Arena::reserve(&self.context, bytes)?;
        memory.map(0, bytes).map_err(|error| {
            let shape = Shape::from_matmul(product);
            let message = format!("no {bytes} bytes to time {shape} in: {}", error.context());
            Error::new("autotuning", message)
        })?;
        let out = Matrices { address: memory.base() + offset, ..product.out };
        // SAFETY: the caller's promise; the result goes to memory of its own.
        let timed = unsafe { self.time(library, stream, &Matmul { out, ..*product }, plan) };
        stream.synchronize()?; // before the memory goes
        timed
    }

    /// The shortest mean of each algorithm over [`ROUNDS`] measurements; infinity for one that does not run.
    ///
    /// # Safety
    /// The conditions are those of [`CublasLt::run`].
    pub(super) unsafe fn time(
        &self,
        library: &Handle,
        stream: &Stream,
        product: &Matmul,
        plan: &MatmulPlan,
    ) -> Result<Vec<f64>> {
        self.timings.fetch_add(1, Ordering::Relaxed);
        let indices = 0..plan.algorithms().len();
        // SAFETY: the caller's promise.
        let run = |index| unsafe { self.run_planned(library, stream, product, (plan, index)) };
        let mean = |index, calls| {
            let start = stream.moment()?;
            (0..calls).try_for_each(|_| run(index))?;
            Ok::<f64, Error>(stream.moment()?.seconds_since(&start)? / calls as f64)
        };
        // The first product with an algorithm may load its kernel.
        let runs: Vec<usize> = indices.clone().filter(|&index| run(index).is_ok()).collect();
        let mut shortest = vec![f64::INFINITY; indices.len()];
        let Some(&first) = runs.first() else { return Ok(shortest) };
        let calls = (MEASURED / mean(first, 1)?).clamp(1.0, MOST_CALLS) as usize;
        for _ in 0..ROUNDS {
            for &index in &runs {
                shortest[index] = shortest[index].min(mean(index, calls)?);
            }
        }
        Ok(shortest)
    }
}
