//! Readers of what other ranks send, as functions of any bytes, for the fuzzing of this workspace. They are no interface.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::net::{Ipv4Addr, SocketAddr};
use std::panic::Location;

use super::super::transport::header::Header;
use super::super::transport::shm;
use super::control;
use super::frame::{self, Admission, Body, ControlMessage, Introduction, Purpose};
use crate::collective::{Call, Op, Reduction};
use ferrotron_tensor::DType;

pub use control::fuzzing::{message_seeds, read_messages};

fn run<T>(future: impl Future<Output = T>) -> Option<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().ok()?;
    Some(runtime.block_on(future))
}

fn framed<T: Serialize>(kind: u8, message: &T) -> Vec<u8> {
    let mut bytes = vec![kind];
    let _ = run(frame::write(&mut bytes, message));
    bytes
}

fn is_read<T: DeserializeOwned>(mut bytes: &[u8]) -> bool {
    run(frame::read::<T>(&mut bytes)).is_some_and(|read| read.is_ok())
}

/// A frame of each kind, behind a byte for the kind.
pub fn frame_seeds() -> Vec<Vec<u8>> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 21_234));
    let introduction = |purpose| Introduction {
        job_id: Some("Slurm 12.0".to_string()),
        rank: 3,
        incarnation: Some(5),
        purpose,
    };
    vec![
        framed(0, &introduction(Purpose::Join { size: 4, port: 21_234 })),
        framed(0, &introduction(Purpose::Pipe { group: u64::MAX })),
        framed(1, &Admission::Parent { address, incarnation: 5 }),
        framed(1, &Admission::Refused("no".to_string())),
        framed(2, &ControlMessage { from: 1, to: 0, body: Body::Failed("no".to_string()) }),
        framed(3, &None::<shm::Offer>),
    ]
}

/// Reads a frame of the kind that the first byte says, as it comes over a connection.
pub fn read_frame(bytes: &[u8]) -> bool {
    match bytes.split_first() {
        Some((0, frame)) => is_read::<Introduction>(frame),
        Some((1, frame)) => is_read::<Admission>(frame),
        Some((2, frame)) => is_read::<ControlMessage>(frame),
        Some((3, frame)) => is_read::<Option<shm::Offer>>(frame),
        Some((4, frame)) => is_read::<shm::Verdict>(frame),
        _ => false,
    }
}

/// Headers of calls.
pub fn header_seeds() -> Vec<Vec<u8>> {
    let ops = [Op::AllReduce(Reduction::Sum), Op::Reduce { root: 3, reduction: Reduction::Max }];
    let ops = ops.into_iter().chain([Op::AllGather, Op::SendRecv { to: 1, from: 2 }]);
    let call = |op| Call { op, dtype: DType::F32, len: 1000, unit: 10, site: Location::caller() };
    ops.map(|op| bytemuck::bytes_of(&Header::new(&call(op), 7)).to_vec()).collect()
}

/// Compares a header with this rank's own, and describes it.
pub fn read_header(bytes: &[u8]) -> bool {
    let Ok(header) = bytemuck::try_pod_read_unaligned::<Header>(bytes) else { return false };
    !header.describe().is_empty() && header.agrees(&header)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_read_and_no_part_of_them_panics() {
        type Reader = (fn() -> Vec<Vec<u8>>, fn(&[u8]) -> bool);
        let readers: [Reader; 3] = [
            (frame_seeds, read_frame),
            (message_seeds, read_messages),
            (header_seeds, read_header),
        ];
        for (number, (seeds, read)) in readers.into_iter().enumerate() {
            for seed in seeds() {
                assert!(read(&seed), "reader {number} refuses {seed:?}");
                for end in 0..seed.len() {
                    read(&seed[..end]);
                    let mut changed = seed.clone();
                    changed[end] ^= 1;
                    read(&changed);
                }
            }
        }
    }
}
