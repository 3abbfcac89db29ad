//! One call of a collective: the facts that all ranks of a group must agree on.

use ferrotron_tensor::DType;
use std::fmt;
use std::ops::Range;
use std::panic::Location;

use super::partition_range;

/// The reduction of elements of different ranks to one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Their sum. f32 and f64 are added in ring order, 16-bit numbers in f32 and in rank order.
    Sum,
    /// The largest.
    Max,
}

/// The operations. Ranks are numbers within the group; "part i" is the i-th of as many balanced parts as
/// there are ranks, see [`partition_range`](super::partition_range).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Every rank gets the reduction of all buffers.
    AllReduce(Reduction),
    /// Rank i contributes part i; every rank gets all.
    AllGather,
    /// Rank i gets part i of the reduction; the rest of its buffer stays as it was.
    ReduceScatter(Reduction),
    /// Every rank gets the root's buffer.
    Broadcast {
        /// The rank that gives it.
        root: usize,
    },
    /// The root gets the reduction of all buffers.
    Reduce {
        /// The rank that gets it.
        root: usize,
        /// The reduction of elements.
        reduction: Reduction,
    },
    /// Rank i contributes part i; the root gets all.
    Gather {
        /// The rank that gets it.
        root: usize,
    },
    /// Rank i gets part i of the root's buffer.
    Scatter {
        /// The rank that gives it.
        root: usize,
    },
    /// Rank i gets part i of every rank's buffer, in rank order.
    AllToAll,
    /// One buffer to one rank.
    Send {
        /// The rank that receives it.
        to: usize,
    },
    /// One buffer from one rank.
    Recv {
        /// The rank that sent it.
        from: usize,
    },
    /// A send and a receive at the same time.
    SendRecv {
        /// The rank that receives.
        to: usize,
        /// The rank that sends.
        from: usize,
    },
    /// No rank returns before all have entered.
    Barrier,
}

impl Op {
    /// The name of each operation.
    pub const NAMES: [&str; 12] = [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "all_to_all",
        "send",
        "recv",
        "send_recv",
        "barrier",
    ];

    /// The operation's name, as in an error message.
    pub fn name(self) -> &'static str {
        match self {
            Op::AllReduce(_) => "all_reduce",
            Op::AllGather => "all_gather",
            Op::ReduceScatter(_) => "reduce_scatter",
            Op::Broadcast { .. } => "broadcast",
            Op::Reduce { .. } => "reduce",
            Op::Gather { .. } => "gather",
            Op::Scatter { .. } => "scatter",
            Op::AllToAll => "all_to_all",
            Op::Send { .. } => "send",
            Op::Recv { .. } => "recv",
            Op::SendRecv { .. } => "send_recv",
            Op::Barrier => "barrier",
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match *self {
            Op::AllReduce(Reduction::Sum) | Op::ReduceScatter(Reduction::Sum) => Ok(()),
            Op::AllReduce(Reduction::Max) | Op::ReduceScatter(Reduction::Max) => {
                f.write_str(" (max)")
            }
            Op::Reduce { root, reduction: Reduction::Sum } => write!(f, " (root {root})"),
            Op::Reduce { root, reduction: Reduction::Max } => write!(f, " (max, root {root})"),
            Op::Broadcast { root } | Op::Gather { root } | Op::Scatter { root } => {
                write!(f, " (root {root})")
            }
            Op::Send { to } => write!(f, " (to {to})"),
            Op::Recv { from } => write!(f, " (from {from})"),
            Op::SendRecv { to, from } => write!(f, " (to {to}, from {from})"),
            Op::AllGather | Op::AllToAll | Op::Barrier => Ok(()),
        }
    }
}

/// One call: the operation, the type and number of elements of the whole buffer, and where in the program
/// it was made. Together with the number of the call in its group this is its fingerprint: ranks whose
/// fingerprints differ find out before any of them uses the other's data. Where the operation has a root
/// or two sides, ranks may call it from different places; all others they call from the same place.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// The operation.
    pub op: Op,
    /// Type of the elements.
    pub dtype: DType,
    /// Elements of the whole buffer: the same on every rank, also where a rank holds a part.
    pub len: usize,
    /// Elements that stay together, a row: parts are balanced in these. Divides `len`.
    pub unit: usize,
    /// The rank that called.
    pub site: &'static Location<'static>,
}

impl Call {
    /// The elements of part `index` of `parts`.
    pub fn chunk_range(&self, parts: usize, index: usize) -> Range<usize> {
        let rows = partition_range(self.len / self.unit, parts, index);
        rows.start * self.unit..rows.end * self.unit
    }

    /// Bytes that rank `rank` of `size` sends, if parts go round a ring: those of backends that do not tell.
    pub fn bytes_sent(&self, rank: usize, size: usize) -> u64 {
        let (whole, own) = (self.len, self.chunk_range(size, rank).len());
        let elements = match self.op {
            Op::AllReduce(_) => 2 * whole * (size - 1) / size,
            Op::AllGather | Op::ReduceScatter(_) => whole * (size - 1) / size,
            Op::AllToAll => whole - own,
            Op::Scatter { root } if root == rank => whole - own,
            Op::Gather { root } if root != rank => own,
            Op::Broadcast { .. } | Op::Reduce { .. } | Op::Send { .. } | Op::SendRecv { .. } => {
                whole
            }
            _ => 0,
        };
        (elements * self.dtype.size()) as u64
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Call { op, dtype, len, site, .. } = self;
        write!(f, "{op} of {len} x {dtype} at {}:{}", site.file(), site.line())
    }
}
