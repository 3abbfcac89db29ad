//! Every reduction matters: with any one call of a reduction left out, some layout trains differently.
//!
//! The calls are not listed here. They are found by running a few layouts and noting where in the program
//! each collective came from; then, one place after the other, that call does nothing, on every rank.

use ferrotron::parallel::collective::{Call, Collective, Memory, Op, Traffic, Work};
use std::collections::BTreeMap;
use std::panic::Location;
use std::sync::{Arc, Mutex};

use super::layout::Layout;

/// Where a reduction is called.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Site {
    group: String,
    op: &'static str,
    file: &'static str,
    line: u32,
}

impl Site {
    fn of(group: &str, call: &Call) -> Site {
        let location: &'static Location<'static> = call.site;
        let (op, group) = (call.op.name(), group.to_string());
        Site { group, op, file: location.file(), line: location.line() }
    }
}

/// The reductions that were called, with the layouts in which they were.
#[derive(Default)]
pub struct Sites(Mutex<BTreeMap<Site, Vec<Layout>>>);

impl Sites {
    pub fn note(&self, group: &str, call: &Call, layout: &Layout) {
        if matches!(call.op, Op::AllReduce(_) | Op::ReduceScatter(_) | Op::Reduce { .. }) {
            let mut sites = self.0.lock().unwrap();
            let layouts = sites.entry(Site::of(group, call)).or_default();
            if !layouts.contains(layout) {
                layouts.push(*layout);
            }
        }
    }

    pub fn into_map(self) -> BTreeMap<Site, Vec<Layout>> {
        self.0.into_inner().unwrap()
    }
}

/// Does what the collective inside does, and tells of every call first; a call that `leave_out` wants left
/// out leaves its memory as it is.
pub struct Watched<F> {
    pub inner: Arc<dyn Collective>,
    pub leave_out: F,
}

impl<F: Fn(&str, &Call) -> bool + Send + Sync> Collective for Watched<F> {
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
        if (self.leave_out)(self.inner.name(), &call) {
            return Work::ready(memory);
        }
        self.inner.start(call, memory)
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }
}

/// Leaves out the reductions of one site.
pub fn without(site: Site) -> impl Fn(&str, &Call) -> bool + Send + Sync {
    move |group, call| Site::of(group, call) == site
}
