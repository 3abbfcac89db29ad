//! The ports of this machine: rank 0 listens at one that the system gives to no connection.

use ferrotron_tensor::{Error, Result};
use std::net::TcpListener;

use super::random_bytes;

/// Services mostly have ports below this.
const LOWEST_PORT: u16 = 10_000;

/// A value for MASTER_PORT such that the port after it is free on this machine. The system does not give that port to
/// connections, so that no process gets it by chance before rank 0 listens there.
pub fn free_port() -> Result<u16> {
    let none = |error| Error::io("launch", format!("no port of 127.0.0.1 is free: {error}"));
    let bind = |port| TcpListener::bind(("127.0.0.1", port)).and_then(|l| l.local_addr());
    let ports = LOWEST_PORT..first_connection_port();
    // Another job may look for one at the same moment, so each begins somewhere else.
    for _ in 0..if ports.is_empty() { 0 } else { 100 } {
        let random = u16::from_le_bytes(random_bytes()?);
        if let Ok(free) = bind(ports.start + random % ports.len() as u16) {
            return Ok(free.port() - 1);
        }
    }
    // Next to none is left by the system's settings.
    Ok(bind(0).map_err(none)?.port() - 1)
}

/// The first port that the system gives to connections.
pub fn first_connection_port() -> u16 {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range");
    let first = range.ok().and_then(|range| range.split_whitespace().next()?.parse().ok());
    first.unwrap_or(32_768) // Linux's own choice
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_0_gets_a_port_that_no_connection_gets() {
        for _ in 0..20 {
            let port = free_port().unwrap() + 1;
            assert!((LOWEST_PORT..first_connection_port()).contains(&port), "{port}");
        }
    }
}
