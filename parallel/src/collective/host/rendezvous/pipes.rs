//! From a connection to pipes: shared memory where both ends can, else TCP.

use std::io;

use super::super::transport::channel::{RecvChannelKind, SendChannelKind};
use super::super::transport::connect::Pipes;
use super::super::transport::{shm, tcp};
use super::config::Transport;
use super::connection::Connection;
use super::frame;
use super::network::Stream;

/// Makes pipes of a connection, together with the other end. Must be called on the progress thread.
pub async fn pipes(mut connection: Connection, transport: Transport) -> io::Result<Pipes> {
    connection.stream().keep_alive();
    let mine = match transport {
        Transport::Auto => shm::offer()?,
        Transport::Tcp => None,
    };
    frame::write(&mut connection, &mine.as_ref().map(|(offer, _)| offer)).await?;
    let theirs: Option<shm::Offer> = frame::read(&mut connection).await?;
    let mut shared = None;
    if let (Some((offer, offered)), Some(theirs)) = (mine, theirs) {
        let (verdict, ring) = shm::accept(&offer, &theirs)?;
        frame::write(&mut connection, &verdict).await?;
        let other: shm::Verdict = frame::read(&mut connection).await?;
        let ring = ring.filter(|_| other.maps);
        shared = ring.map(|ring| (offered, ring, theirs.pid(), other.reads));
    }
    let (stream, seal) = match connection.into_parts() {
        (Stream::Tcp(stream), seal) => (stream, seal),
        #[cfg(test)]
        (Stream::Simulated(stream), _) => return Ok(stream.pipes()),
    };
    if let Some((offered, ring, pid, reads)) = shared {
        let (to, from) = shm::pipes(offered, ring, pid, reads, stream);
        return Ok((SendChannelKind::Shared(to), RecvChannelKind::Shared(from)));
    }
    let (writer, reader, task) = tcp::pipes(stream, seal);
    tokio::task::spawn_local(task);
    Ok((SendChannelKind::Tcp(writer), RecvChannelKind::Tcp(reader)))
}
