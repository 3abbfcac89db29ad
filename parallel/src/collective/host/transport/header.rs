//! The first message of every call: its fingerprint.

use bytemuck::{Pod, Zeroable};
use ferrotron_tensor::DType;

use crate::collective::{Call, Op, Reduction};

/// Says that a header begins here, and which version of its layout.
const MAGIC: u64 = u64::from_le_bytes(*b"ferroh01");

/// Bytes of the path of a source file that are kept: its end.
const FILE: usize = 64;

/// A call's number and facts as 112 bytes.
#[derive(Debug, Clone, Copy, Pod, Zeroable, PartialEq, Eq)]
#[repr(C)]
pub struct Header {
    magic: u64,
    number: u64,
    len: u64,
    unit: u64,
    /// Root of an operation that has one.
    root: u32,
    line: u32,
    op: u8,
    max: u8,
    dtype: u8,
    file_len: u8,
    padding: [u8; 4],
    file: [u8; FILE],
}

/// Numbers of the operations.
mod number {
    pub const ALL_REDUCE: u8 = 1;
    pub const ALL_GATHER: u8 = 2;
    pub const REDUCE_SCATTER: u8 = 3;
    pub const BROADCAST: u8 = 4;
    pub const REDUCE: u8 = 5;
    pub const GATHER: u8 = 6;
    pub const SCATTER: u8 = 7;
    pub const ALL_TO_ALL: u8 = 8;
    pub const SEND: u8 = 9;
    pub const RECV: u8 = 10;
    pub const SEND_RECV: u8 = 11;
    pub const BARRIER: u8 = 12;
}
use number::*;

/// Their names, as of [`Op::name`].
fn name(op: u8) -> Option<&'static str> {
    Op::NAMES.get(usize::from(op).checked_sub(1)?).copied()
}

/// Sends, receives and exchanges are messages between two ranks, which agree with one another.
fn is_message(op: u8) -> bool {
    matches!(op, SEND | RECV | SEND_RECV)
}

impl Header {
    /// The header of call `number`.
    pub fn new(call: &Call, number: u64) -> Header {
        let (op, root, reduction) = match call.op {
            Op::AllReduce(reduction) => (ALL_REDUCE, 0, reduction),
            Op::AllGather => (ALL_GATHER, 0, Reduction::Sum),
            Op::ReduceScatter(reduction) => (REDUCE_SCATTER, 0, reduction),
            Op::Broadcast { root } => (BROADCAST, root, Reduction::Sum),
            Op::Reduce { root, reduction } => (REDUCE, root, reduction),
            Op::Gather { root } => (GATHER, root, Reduction::Sum),
            Op::Scatter { root } => (SCATTER, root, Reduction::Sum),
            Op::AllToAll => (ALL_TO_ALL, 0, Reduction::Sum),
            Op::Send { .. } => (SEND, 0, Reduction::Sum),
            Op::Recv { .. } => (RECV, 0, Reduction::Sum),
            Op::SendRecv { .. } => (SEND_RECV, 0, Reduction::Sum),
            Op::Barrier => (BARRIER, 0, Reduction::Sum),
        };
        let path = call.site.file().as_bytes();
        let path = &path[path.len().saturating_sub(FILE)..];
        let mut file = [0; FILE];
        file[..path.len()].copy_from_slice(path);
        // Only some operations cut the buffer by rows.
        let cut = matches!(op, ALL_GATHER | REDUCE_SCATTER | GATHER | SCATTER | ALL_TO_ALL);
        Header {
            magic: MAGIC,
            number,
            len: call.len as u64,
            unit: if cut { call.unit as u64 } else { 1 },
            root: root as u32,
            line: call.site.line(),
            op,
            max: u8::from(reduction == Reduction::Max),
            dtype: DType::ALL.iter().position(|&dtype| dtype == call.dtype).unwrap_or(0) as u8,
            file_len: path.len() as u8,
            padding: [0; 4],
            file,
        }
    }

    /// Whether two ranks mean the same call. The place in the program counts for operations in which all
    /// ranks do the same: two such calls that differ in nothing else may have been swapped.
    pub fn agrees(&self, other: &Header) -> bool {
        let class = |op| if is_message(op) { SEND } else { op };
        let facts =
            |h: &Header| (h.magic, h.number, h.len, h.unit, h.root, class(h.op), h.max, h.dtype);
        let symmetric =
            matches!(self.op, ALL_REDUCE | ALL_GATHER | REDUCE_SCATTER | ALL_TO_ALL | BARRIER);
        facts(self) == facts(other)
            && (!symmetric || (self.line == other.line && self.file == other.file))
    }

    /// The call and its number, for an error message; whatever the bytes are.
    pub fn describe(&self) -> String {
        let (Some(name), Some(dtype), true) =
            (name(self.op), DType::ALL.get(usize::from(self.dtype)), self.magic == MAGIC)
        else {
            return "something that is no call".to_string();
        };
        let file = &self.file[..usize::from(self.file_len).min(FILE)];
        let file = String::from_utf8_lossy(file);
        let Header { len, unit, root, line, number, .. } = self;
        let max = if self.max == 1 { " (max)" } else { "" };
        let root = if matches!(self.op, BROADCAST | REDUCE | GATHER | SCATTER) {
            format!(" (root {root})")
        } else {
            String::new()
        };
        let rows = if *unit == 1 { String::new() } else { format!(" in rows of {unit}") };
        let number = if is_message(self.op) {
            format!("message {number}")
        } else {
            format!("call {number}")
        };
        format!("{name}{max}{root} of {len} x {dtype}{rows} at {file}:{line} ({number})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::Location;

    #[track_caller]
    fn call(op: Op, dtype: DType, len: usize) -> Call {
        Call { op, dtype, len, unit: 1, site: Location::caller() }
    }

    #[test]
    fn every_fact_counts() {
        let header = |op, dtype, len, number| Header::new(&call(op, dtype, len), number);
        let sum = Op::AllReduce(Reduction::Sum);
        let base = header(sum, DType::F32, 8, 3);
        assert!(base.agrees(&base));
        for other in [
            header(Op::AllReduce(Reduction::Max), DType::F32, 8, 3),
            header(Op::Barrier, DType::F32, 8, 3),
            header(sum, DType::U32, 8, 3),
            header(sum, DType::F32, 9, 3),
            header(sum, DType::F32, 8, 4),
            Header::new(&call(sum, DType::F32, 8), 3), // another line
        ] {
            assert!(!base.agrees(&other), "{}", other.describe());
        }
        let send = header(Op::Send { to: 1 }, DType::F32, 8, 3);
        let recv = Header::new(&call(Op::Recv { from: 0 }, DType::F32, 8), 3);
        assert!(send.agrees(&recv));
    }

    #[test]
    fn any_bytes_can_be_described() {
        assert_eq!(Header::zeroed().describe(), "something that is no call");
        let mut header = Header::new(&call(Op::Broadcast { root: 2 }, DType::BF16, 5), 7);
        let line = header.line;
        let want = format!("broadcast (root 2) of 5 x bf16 at {}:{line} (call 7)", file!());
        assert_eq!(header.describe(), want);
        header.op = 200;
        header.file_len = 255;
        assert_eq!(header.describe(), "something that is no call");
    }
}
