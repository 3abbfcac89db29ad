//! Control messages: JSON with its length in front, which is bounded.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::io::{Error, ErrorKind, Result};
use std::net::SocketAddr;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::super::runtime::world_health;
use super::super::runtime::world_health::Entry;

/// Bytes of the longest message; the addresses of some ten thousand ranks fit.
const LONGEST: usize = 1 << 20;

/// The first message on a connection.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Introduction {
    /// The job of the rank that has connected.
    pub job_id: Option<String>,
    /// Its number in the world.
    pub rank: usize,
    /// The purpose of the connection.
    pub purpose: Purpose,
}

/// The purpose for which a rank connects to another.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Purpose {
    /// A rank comes to rank 0.
    Join {
        /// Number of ranks that it was told.
        size: usize,
        /// Port at which it listens for channels.
        port: u16,
    },
    /// A member of a group comes to another.
    Pipe {
        /// The name of the group.
        group: String,
    },
}

/// An answer to a rank that has connected.
#[derive(Debug, Serialize, Deserialize)]
pub enum Admission {
    /// The connection is the one it asked for.
    Admitted,
    /// Sent by rank 0: all are there; this is where they listen, from rank 0 on.
    Addresses(Vec<SocketAddr>),
    /// There is no place for this rank.
    Refused(String),
}

/// A message between two ranks, by way of rank 0.
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
    /// The world has failed.
    Failed(String),
    /// Have you entered this call?
    Ask {
        /// Comes back with the answer.
        question: u64,
        /// The group's id.
        group: String,
        /// The call.
        entry: Entry,
    },
    /// The answer to a question.
    Answer {
        /// The number of the question.
        question: u64,
        /// The answer.
        answer: world_health::Answer,
    },
    /// This rank is done and will close its connection.
    Bye,
}

/// Writes one message.
pub async fn write<T: Serialize>(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &T,
) -> Result<()> {
    let text = serde_json::to_vec(message)?;
    if text.len() > LONGEST {
        return Err(Error::new(ErrorKind::InvalidInput, "a control message is too long"));
    }
    let mut bytes = (text.len() as u32).to_le_bytes().to_vec();
    bytes.extend(text);
    stream.write_all(&bytes).await
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
    fn messages_come_back_and_long_ones_are_refused() {
        let mut bytes = Vec::new();
        let purpose = Purpose::Pipe { group: "dp [0, 1] #1".to_string() };
        run(write(&mut bytes, &purpose)).unwrap();
        let read_back = run(read::<Purpose>(&mut &bytes[..])).unwrap();
        assert!(matches!(read_back, Purpose::Pipe { group } if group == "dp [0, 1] #1"));

        let long = ControlMessage { from: 0, to: 1, body: Body::Failed("x".repeat(LONGEST)) };
        assert!(run(write(&mut bytes, &long)).is_err());
        // A length beyond any memory, and bytes that are no text.
        for bytes in [&[255; 8][..], &[4, 0, 0, 0, b'{', b'"', 0, 0], &[4, 0]] {
            assert!(run(read::<Purpose>(&mut &bytes[..])).is_err(), "{bytes:?}");
        }
    }
}
