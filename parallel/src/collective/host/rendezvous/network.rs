//! The network that ranks meet in: the system's, or in tests a simulated one.

use snow::resolvers::BoxedCryptoResolver;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};

use super::super::transport::seal::Resolver;
#[cfg(test)]
use super::simulation::{self, Host, SimulatedListener, SimulatedStream};

/// Time after which the system gives up a connection whose bytes are not acknowledged.
#[cfg(target_os = "linux")]
const UNACKNOWLEDGED: Duration = Duration::from_secs(30);

/// A network, as one process sees it.
#[derive(Clone)]
pub enum Network {
    /// The system's.
    System,
    /// That of a simulation.
    #[cfg(test)]
    Simulated(Host),
}

/// Takes the connections of others.
pub enum Listener {
    /// The system's.
    Tcp(TcpListener),
    /// That of a simulation.
    #[cfg(test)]
    Simulated(SimulatedListener),
}

/// A connection that carries bytes both ways.
pub enum Stream {
    /// The system's.
    Tcp(TcpStream),
    /// That of a simulation.
    #[cfg(test)]
    Simulated(SimulatedStream),
}

impl Network {
    /// Connects to an address.
    pub async fn connect(&self, address: SocketAddr) -> io::Result<Stream> {
        match self {
            Network::System => {
                let stream = TcpStream::connect(address).await?;
                // While nobody listens at a port of connections, the system may connect a socket to itself.
                if stream.local_addr()? == stream.peer_addr()? {
                    return Err(ErrorKind::ConnectionRefused.into());
                }
                stream.set_nodelay(true)?;
                Ok(Stream::Tcp(stream))
            }
            #[cfg(test)]
            Network::Simulated(host) => host.connect(address).await.map(Stream::Simulated),
        }
    }

    /// Listens at an address: at a free port, if its port is 0.
    pub async fn listen(&self, address: SocketAddr) -> io::Result<Listener> {
        match self {
            Network::System => TcpListener::bind(address).await.map(Listener::Tcp),
            #[cfg(test)]
            Network::Simulated(host) => host.listen(address).map(Listener::Simulated),
        }
    }

    /// Returns random bytes.
    pub fn random<const N: usize>(&self) -> io::Result<[u8; N]> {
        match self {
            Network::System => {
                let mut bytes = [0; N];
                getrandom::fill(&mut bytes).map_err(io::Error::other)?;
                Ok(bytes)
            }
            #[cfg(test)]
            Network::Simulated(host) => Ok(host.random()),
        }
    }

    /// Returns between half of a pause and one and a half: ranks that begin together do not come again together.
    pub fn jittered(&self, pause: Duration) -> Duration {
        // Without random bytes there was no proof of the secret either.
        let share = u16::from_le_bytes(self.random().unwrap_or_default());
        pause / 2 + pause.mul_f64(f64::from(share) / f64::from(u16::MAX))
    }

    /// Writes a line to standard error: in vain if that is closed.
    pub fn warn(&self, line: &str) {
        match self {
            Network::System => {
                let _ = io::Write::write_all(&mut io::stderr(), format!("{line}\n").as_bytes());
            }
            #[cfg(test)]
            Network::Simulated(_) => {}
        }
    }
}

impl Listener {
    /// Waits for the next connection, and tells from where it comes.
    pub async fn accept(&self) -> io::Result<(Stream, SocketAddr)> {
        match self {
            Listener::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                stream.set_nodelay(true)?;
                Ok((Stream::Tcp(stream), address))
            }
            #[cfg(test)]
            Listener::Simulated(listener) => {
                let (stream, address) = listener.accept().await;
                Ok((Stream::Simulated(stream), address))
            }
        }
    }

    /// The port of this machine.
    pub fn port(&self) -> io::Result<u16> {
        match self {
            Listener::Tcp(listener) => Ok(listener.local_addr()?.port()),
            #[cfg(test)]
            Listener::Simulated(listener) => Ok(listener.port()),
        }
    }
}

impl Stream {
    /// The cryptography of the connection.
    pub fn resolver(&self) -> BoxedCryptoResolver {
        match self {
            Stream::Tcp(_) => Box::new(Resolver::default()),
            #[cfg(test)]
            Stream::Simulated(_) => simulation::resolver(),
        }
    }

    /// Lets the system notice within a minute when a machine dies without closing its connections. While bytes that were sent
    /// are not acknowledged it sends no probes, so these have a time of their own.
    pub fn keep_alive(&self) {
        match self {
            Stream::Tcp(stream) => {
                let keep_alive = socket2::TcpKeepalive::new()
                    .with_time(Duration::from_secs(10))
                    .with_interval(Duration::from_secs(5))
                    .with_retries(4);
                // Without it a dead machine is noticed by its silence.
                let socket = socket2::SockRef::from(stream);
                let _ = socket.set_tcp_keepalive(&keep_alive);
                #[cfg(target_os = "linux")]
                let _ = socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED));
            }
            #[cfg(test)]
            Stream::Simulated(stream) => stream.keep_alive(),
        }
    }
}

impl From<TcpStream> for Stream {
    fn from(stream: TcpStream) -> Stream {
        Stream::Tcp(stream)
    }
}

impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Listener {
        Listener::Tcp(listener)
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_read(context, into),
            #[cfg(test)]
            Stream::Simulated(stream) => Pin::new(stream).poll_read(context, into),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
            #[cfg(test)]
            Stream::Simulated(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_flush(context),
            #[cfg(test)]
            Stream::Simulated(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            #[cfg(test)]
            Stream::Simulated(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
