//! Control messages: JSON with its length in front, which is bounded.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::io::{Error, ErrorKind, Result};
use std::net::SocketAddr;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::super::runtime::census::{Census, Query};
use super::super::runtime::world_health::{Answer, Entry};
use super::super::transport::connect::GroupId;

/// Bytes of the longest message.
const LONGEST: usize = 1 << 20;

/// Bytes of the longest reason that ranks tell each other. JSON writes a byte as six at most.
const LONGEST_REASON: usize = 64 << 10;

/// The first message on a connection.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Introduction {
    /// The job of the rank that has connected.
    pub job_id: Option<String>,
    /// Its number in the world.
    pub rank: usize,
    /// The incarnation of the job, which a rank that joins does not know yet.
    pub incarnation: Option<u64>,
    /// The purpose of the connection.
    pub purpose: Purpose,
}

/// The purpose for which a rank connects to another.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Purpose {
    /// A rank comes to rank 0 and asks where its parent in the tree listens.
    Join {
        /// Number of ranks that it was told.
        size: usize,
        /// Port at which it listens.
        port: u16,
    },
    /// A rank comes to its parent, for messages.
    Child,
    /// A member of a group comes to another.
    Pipe {
        /// The group.
        group: GroupId,
    },
}

/// An answer to a rank that has connected.
#[derive(Debug, Serialize, Deserialize)]
pub enum Admission {
    /// The connection is the one it asked for.
    Admitted,
    /// Sent by rank 0 to a rank that has joined.
    Parent {
        /// The address at which the rank's parent listens.
        address: SocketAddr,
        /// The incarnation of the job.
        incarnation: u64,
    },
    /// Sent by rank 0 to a rank that has joined, instead of its parent's address, which is not known yet: come again.
    Later,
    /// The other side has begun to connect too, and its connection goes before. If it does not come, try again.
    Crossed,
    /// The other side makes no further calls in the group.
    Left,
    /// There is no place for this rank.
    Refused(String),
}

/// A message between two ranks. The tree passes it on.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ControlMessage {
    /// The rank that wrote it.
    pub from: usize,
    /// The rank that it is for.
    pub to: usize,
    /// The message.
    pub body: Body,
}

/// A message.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Body {
    /// All ranks below the writer have met it.
    Complete,
    /// All ranks have met.
    Welcome,
    /// The world has failed.
    Failed(String),
    /// Asks rank 0 for the address of a rank.
    Where {
        /// Comes back with the answer.
        question: u64,
        /// The rank.
        rank: usize,
    },
    /// The answer to [`Body::Where`].
    There {
        /// The number of the question.
        question: u64,
        /// The address, if it is known.
        address: Option<SocketAddr>,
    },
    /// Have you entered this call?
    Ask {
        /// Comes back with the answer.
        question: u64,
        /// The group.
        group: GroupId,
        /// The call.
        entry: Entry,
    },
    /// The answer to a question.
    Answer {
        /// The number of the question.
        question: u64,
        /// The answer.
        answer: Answer,
    },
    /// Asks for the ranks on the other's side of the tree that do not answer, or have not entered a call.
    Count {
        /// The call.
        query: Option<Query>,
    },
    /// Those.
    Counted {
        /// The call.
        query: Option<Query>,
        /// The ranks that stand out.
        census: Census,
    },
    /// This rank is there.
    Alive,
    /// This rank is done and will close its connection.
    Bye,
}

/// Writes one message; returns its bytes.
pub async fn write<T: Serialize>(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &T,
) -> Result<usize> {
    let text = serde_json::to_vec(message)?;
    if text.len() > LONGEST {
        return Err(Error::new(ErrorKind::InvalidInput, "a control message is too long"));
    }
    let mut bytes = (text.len() as u32).to_le_bytes().to_vec();
    bytes.extend(text);
    stream.write_all(&bytes).await?;
    stream.flush().await?;
    Ok(bytes.len())
}

/// Cuts a reason that is too long for a message.
pub fn shortened(mut reason: String) -> String {
    if reason.len() > LONGEST_REASON {
        let mut ends = (0..=LONGEST_REASON).rev();
        let end = ends.find(|&end| reason.is_char_boundary(end)).unwrap_or(0);
        reason.truncate(end);
        reason.push_str("...");
    }
    reason
}

/// Reads one message.
pub async fn read<T: DeserializeOwned>(stream: &mut (impl AsyncRead + Unpin)) -> Result<T> {
    let mut len = [0; 4];
    stream.read_exact(&mut len).await?;
    let len = u32::from_le_bytes(len) as usize;
    if len > LONGEST {
        return Err(Error::new(ErrorKind::InvalidData, "a control message is too long"));
    }
    let mut text = vec![0; len];
    stream.read_exact(&mut text).await?;
    Ok(serde_json::from_slice(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    #[test]
    fn a_long_reason_is_cut_so_that_it_can_be_told() {
        assert_eq!(shortened("no".to_string()), "no");
        for text in ["\u{1}".repeat(LONGEST), "a".to_string() + &"\u{1F980}".repeat(LONGEST)] {
            let cut = shortened(text.clone());
            assert!(cut.len() <= LONGEST_REASON + 3 && cut.ends_with("..."));
            assert!(text.starts_with(&cut[..cut.len() - 3]));
            let told = ControlMessage { from: 0, to: 1, body: Body::Failed(cut) };
            run(write(&mut Vec::new(), &told)).unwrap();
        }
    }

    #[test]
    fn messages_come_back_and_long_ones_are_refused() {
        let mut bytes = Vec::new();
        let purpose = Purpose::Pipe { group: 77 };
        run(write(&mut bytes, &purpose)).unwrap();
        let read_back = run(read::<Purpose>(&mut &bytes[..])).unwrap();
        assert!(matches!(read_back, Purpose::Pipe { group: 77 }));

        let long = ControlMessage { from: 0, to: 1, body: Body::Failed("x".repeat(LONGEST)) };
        assert!(run(write(&mut bytes, &long)).is_err());
        // A length beyond any memory, and bytes that are no text.
        for bytes in [&[255; 8][..], &[4, 0, 0, 0, b'{', b'"', 0, 0], &[4, 0]] {
            assert!(run(read::<Purpose>(&mut &bytes[..])).is_err(), "{bytes:?}");
        }
    }
}
