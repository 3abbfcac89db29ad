//! The work that a GPU is given, and the moments between which it does each piece.

use ferrotron_tensor::{DType, Device, Moment, Result};
use std::fmt;
use std::time::Duration;
use tracing::field::{Field, Visit};

use super::rows::{Amount, Recording};

/// Launches in the order of the stream, each with the moment before it.
pub(super) struct Launches {
    device: Device,
    marks: Vec<(Moment, Mark)>,
}

/// What comes behind a moment.
enum Mark {
    /// A launch within this pass.
    Launch(&'static str, Launch),
    /// Work outside of launches: a step begins.
    StepBegins,
    /// No work of a step.
    StepEnds,
}

/// The fields of a launch.
#[derive(Default)]
pub(super) struct Launch {
    kernel: String,
    dtype: Option<DType>,
    bytes: u64,
    count: u64,
    batch: u64,
    rows: u64,
    columns: u64,
    inner: u64,
    causal: bool,
}

impl Launches {
    pub fn of(device: &Device) -> Launches {
        Launches { device: device.clone(), marks: Vec::new() }
    }

    /// A launch of `pass` follows.
    pub fn launch(&mut self, pass: &'static str, launch: Launch) -> Result<()> {
        self.mark(Mark::Launch(pass, launch))
    }

    /// A step begins or ends.
    pub fn step(&mut self, begins: bool) -> Result<()> {
        self.mark(if begins { Mark::StepBegins } else { Mark::StepEnds })
    }

    fn mark(&mut self, mark: Mark) -> Result<()> {
        self.marks.push((self.device.moment()?, mark));
        Ok(())
    }

    /// The times of all launches, when the GPU has done them.
    pub fn recording(&self) -> Result<Recording> {
        let mut recording = Recording::default();
        for pair in self.marks.windows(2) {
            let [(before, mark), (after, _)] = pair else { continue };
            let time = match mark {
                Mark::StepEnds => continue,
                _ => Duration::from_secs_f64(after.seconds_since(before)?.max(0.0)),
            };
            recording.total += time;
            match mark {
                Mark::Launch(pass, launch) => {
                    let row = recording.rows.entry((pass, launch.name())).or_default();
                    let amount = Amount {
                        dtype: launch.dtype.unwrap_or(DType::F32),
                        flops: launch.flops(),
                        read: launch.bytes as f64,
                        written: 0.0,
                    };
                    row.add(amount, time);
                }
                _ => {
                    recording.steps += 1;
                    recording.outside += time;
                }
            }
        }
        Ok(recording)
    }
}

impl Launch {
    /// The kernel, of products with their sizes.
    fn name(&self) -> String {
        let Launch { kernel, batch, rows, columns, inner, .. } = self;
        match (kernel == "matmul", batch) {
            (true, 1) => format!("{rows} x {inner} x {columns}"),
            (true, _) => format!("{batch} of {rows} x {inner} x {columns}"),
            (false, _) => kernel.clone(),
        }
    }

    /// Floating-point operations of its products.
    fn flops(&self) -> f64 {
        let sizes = [self.count, self.batch, self.rows, self.columns, self.inner];
        let all = 2.0 * sizes.iter().map(|&size| size as f64).product::<f64>();
        if self.causal { all / 2.0 } else { all }
    }
}

impl Visit for Launch {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "bytes" => self.bytes = value,
            "count" => self.count = value,
            "batch" => self.batch = value,
            "rows" => self.rows = value,
            "columns" => self.columns = value,
            "inner" => self.inner = value,
            _ => {}
        }
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        if field.name() == "causal" {
            self.causal = value;
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "kernel" {
            self.kernel = value.to_string();
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "dtype" {
            self.dtype = format!("{value:?}").parse().ok();
        }
    }
}
