//! Helpers of several test programs.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};

/// A free port, below those that the system gives to connections. No other call in this process gets it, and hardly one
/// in another.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let base = 10_000 + (std::process::id() % 100) as u16 * 200;
    loop {
        let port = base + NEXT.fetch_add(1, Ordering::Relaxed) % 2000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
