//! The connecting side: proves to know the secret, and says what the connection is for.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::auth::Secret;
use super::connection::Connection;
use super::frame::{self, Admission, Introduction};
use super::network::Network;
use crate::descriptors::explained;

/// Pause before a rank is tried again.
pub const PAUSE: Duration = Duration::from_millis(50);

/// Longest time until the system has a connection, which it tries for minutes where a firewall drops packets.
const REACHED: Duration = Duration::from_secs(10);

/// The end of a time limit that begins now, however long it is.
pub fn deadline(limit: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
    Instant::now() + limit.min(YEAR)
}

/// Reaches other ranks of the job.
#[derive(Clone)]
pub struct Connector {
    /// Leads to them.
    pub network: Network,
    /// Proves that this rank belongs to the job.
    pub secret: Secret,
}

impl Connector {
    /// Connects to a rank once. Returns its answer.
    pub async fn connect_once(
        &self,
        address: SocketAddr,
        introduction: &Introduction,
    ) -> io::Result<(Connection, Admission)> {
        let reached = timeout(REACHED, self.network.connect(address)).await;
        let stream = reached.unwrap_or(Err(ErrorKind::TimedOut.into())).map_err(explained)?;
        let mut connection = self.secret.connect(stream).await?;
        frame::write(&mut connection, introduction).await?;
        let admission = frame::read(&mut connection).await?;
        Ok((connection, admission))
    }

    /// Connects to a rank, which `listens` already, so that it is gone if nobody does, or may not listen yet.
    ///
    /// Errors at once if the rank refuses, or if this process has no descriptor left.
    pub async fn connect(
        &self,
        rank: usize,
        (address, listens): (SocketAddr, bool),
        introduction: &Introduction,
        deadline: Instant,
    ) -> io::Result<Connection> {
        loop {
            let late = Err(ErrorKind::TimedOut.into());
            let attempt = self.connect_once(address, introduction);
            let error = match timeout_at(deadline, attempt).await.unwrap_or(late) {
                Ok((connection, Admission::Admitted)) => return Ok(connection),
                Ok((_, Admission::Refused(why))) => {
                    io::Error::new(ErrorKind::PermissionDenied, why)
                }
                Ok(_) => io::Error::new(ErrorKind::InvalidData, "it answers something else"),
                Err(error) => error,
            };
            let in_vain =
                matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::QuotaExceeded);
            let is_gone = listens && error.kind() == ErrorKind::ConnectionRefused;
            if in_vain || is_gone || Instant::now() + PAUSE >= deadline {
                let what = format!("no connection to rank {rank} at {address}: {error}");
                return Err(io::Error::new(error.kind(), what));
            }
            sleep(self.network.jittered(PAUSE)).await;
        }
    }
}
