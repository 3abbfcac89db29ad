//! Every reduction and every scale matters: with a fault in any one call of a reduction, some layout trains
//! differently.
//!
//! The calls are not listed here. They are found by running a few layouts and noting where in the program
//! each collective came from; then, one place after the other, that call is faulty on every rank. Half of a
//! buffer is left out at a time: numbers that travel together, such as the sum of exponentials and the predicted logit
//! in one buffer, are told apart. The single numbers that make up scales (valid tokens, the norm) are left out, and
//! once are 1 whatever the ranks have.

use ferrotron::parallel::collective::{Call, Collective, CommVolume, Memory, Op, Reduction, Work};
use ferrotron::tensor::Result;
use std::collections::BTreeMap;
use std::future::Future;
use std::panic::Location;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use super::layout::Layout;

/// The place of a call of a reduction.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Site {
    group: String,
    op: &'static str,
    file: &'static str,
    line: u32,
}

impl Site {
    fn from_call(group: &str, call: &Call) -> Site {
        let location: &'static Location<'static> = call.site;
        let (op, group) = (call.op.name(), group.to_string());
        Site { group, op, file: location.file(), line: location.line() }
    }

    /// Whether it is in the file with this path, whose beginning is left out.
    pub fn is_in(&self, file: &str) -> bool {
        self.file.ends_with(file)
    }
}

/// The fault of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Leaves these elements as they were, those of the half that begins at none or one.
    HalfLeftOut(usize),
    /// Does not make the call.
    LeftOut,
    /// The result is 1.
    One,
}

impl Fault {
    /// The faults of a call of `len` elements. The largest of some flags may be 1 anyway.
    fn all(len: usize, is_largest: bool) -> Vec<Fault> {
        match (len, is_largest) {
            (1, true) => vec![Fault::LeftOut],
            (1, false) => vec![Fault::LeftOut, Fault::One],
            _ => vec![Fault::HalfLeftOut(0), Fault::HalfLeftOut(1)],
        }
    }
}

/// The calls of a reduction: their layouts, most elements, and whether they find the largest.
#[derive(Default)]
struct Calls {
    layouts: Vec<Layout>,
    len: usize,
    is_largest: bool,
}

/// The reductions that were called.
#[derive(Default)]
pub struct Sites(Mutex<BTreeMap<Site, Calls>>);

impl Sites {
    pub fn note(&self, group: &str, call: &Call, layout: &Layout) {
        if matches!(call.op, Op::AllReduce(_) | Op::ReduceScatter(_) | Op::Reduce { .. }) {
            let mut sites = self.0.lock().unwrap();
            let calls = sites.entry(Site::from_call(group, call)).or_default();
            calls.len = call.len.max(calls.len);
            calls.is_largest = call.op == Op::AllReduce(Reduction::Max);
            if !calls.layouts.contains(layout) {
                calls.layouts.push(*layout);
            }
        }
    }

    /// Every fault of every site, with the layouts in which it is called.
    pub fn into_mutants(self) -> Vec<(Site, Fault, Vec<Layout>)> {
        let sites = self.0.into_inner().unwrap().into_iter();
        let faults = |(site, calls): (Site, Calls)| {
            let all = Fault::all(calls.len, calls.is_largest).into_iter();
            all.map(move |fault| (site.clone(), fault, calls.layouts.clone()))
        };
        sites.flat_map(faults).collect()
    }
}

/// Does what the collective inside does, and asks of every call first whether it is faulty.
pub struct Watched<F> {
    pub inner: Arc<dyn Collective>,
    pub fault: F,
}

impl<F: Fn(&str, &Call) -> Option<Fault> + Send + Sync> Collective for Watched<F> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn start(&self, call: Call, mut memory: Memory) -> Work<Memory> {
        match (self.fault)(self.inner.name(), &call) {
            None => self.inner.start(call, memory),
            Some(Fault::LeftOut) => Work::ready(memory),
            Some(Fault::HalfLeftOut(half)) => {
                let own = in_place(&mut memory, |all| all.to_vec());
                let cut = call.len / 2 * call.dtype.size();
                let kept = if half == 0 { 0..cut } else { cut..call.len * call.dtype.size() };
                self.inner.start(call, memory).map(move |mut memory| {
                    let own = own?;
                    in_place(&mut memory, |all| all[kept.clone()].copy_from_slice(&own[kept]))?;
                    Ok(memory)
                })
            }
            Some(Fault::One) => self.inner.start(call, memory).map(|mut memory| {
                in_place(&mut memory, |number| number.copy_from_slice(&1_f64.to_ne_bytes()))?;
                Ok(memory)
            }),
        }
    }

    fn traffic(&self) -> CommVolume {
        self.inner.traffic()
    }
}

/// The bytes that a reduction changes.
fn in_place<R>(memory: &mut Memory, f: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
    let buffer = memory.output.as_mut().expect("a reduction has its buffer in place");
    // It is not locked, so there is nothing to wait for.
    let bytes = pin!(buffer.bytes()).poll(&mut Context::from_waker(Waker::noop()));
    match bytes {
        Poll::Ready(bytes) => Ok(f(bytes?.as_mut_slice()?)),
        Poll::Pending => panic!("somebody else has locked what a reduction changes"),
    }
}

/// A fault at one site.
pub fn faulty(site: Site, fault: Fault) -> impl Fn(&str, &Call) -> Option<Fault> + Send + Sync {
    move |group, call| (Site::from_call(group, call) == site).then_some(fault)
}
