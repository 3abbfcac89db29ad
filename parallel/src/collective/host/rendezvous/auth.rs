//! The first bytes of every connection: both ends prove that they know the job's secret.
//!
//! ```text
//!  connector -> acceptor   "ferrojob", version, 32 random bytes c
//!  acceptor -> connector   32 random bytes a
//!  connector -> acceptor   HMAC-SHA256(secret, "connector" c a)
//!  acceptor -> connector   HMAC-SHA256(secret, "acceptor" c a), or 32 zeros: the proof is wrong
//! ```
//!
//! The acceptor sends nothing that depends on the secret before the connector has proved to know it. A connection that
//! fails the proof is dropped.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::io::{Error, ErrorKind, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The first bytes of a connection. The last two are the version of the protocol.
const HELLO: [u8; 10] = *b"ferrojob03";

/// The acceptor's answer to a wrong proof. It tells the connector that trying again would not help, unlike after a
/// hang-up.
const REFUSED: [u8; 32] = [0; 32];

/// Knows the job's secret.
#[derive(Clone)]
pub struct Secret(Hmac<Sha256>);

impl Secret {
    /// The secret, or the empty one where there is none: both ends then prove that they know that.
    pub fn new(secret: Option<&str>) -> Secret {
        let key = secret.unwrap_or_default().as_bytes();
        // Keys of any length are taken.
        Secret(<Hmac<Sha256> as KeyInit>::new_from_slice(key).expect("a key of any length"))
    }

    fn proof(&self, side: &str, randoms: &[[u8; 32]; 2]) -> Hmac<Sha256> {
        let mut mac = self.0.clone();
        mac.update(side.as_bytes());
        randoms.iter().for_each(|random| mac.update(random));
        mac
    }

    /// Proves this end's knowledge and checks the other's, as the end that has connected.
    pub async fn connect(&self, stream: &mut TcpStream) -> Result<()> {
        let own = random::<32>()?;
        stream.write_all(&[&HELLO[..], &own].concat()).await?;
        let randoms = [own, read(stream).await?];
        let proof = self.proof("connector", &randoms).finalize().into_bytes();
        stream.write_all(&proof).await?;
        let theirs = read(stream).await?;
        if theirs == REFUSED {
            let what = "it refuses this rank's proof of the job's secret: give all ranks the same \
                FERROTRON_JOB_SECRET, or, if another job listens there, another --rendezvous-port";
            return Err(Error::new(ErrorKind::PermissionDenied, what));
        }
        self.check("acceptor", &randoms, &theirs)
    }

    /// Performs [`Secret::connect`]'s handshake at the accepting end.
    ///
    /// The error of a rank which cannot belong to this job is [`ErrorKind::PermissionDenied`].
    pub async fn accept(&self, stream: &mut TcpStream) -> Result<()> {
        let hello: [u8; HELLO.len()] = read(stream).await?;
        if hello != HELLO {
            let (kind, what) = match hello.starts_with(b"ferrojob") {
                true => (ErrorKind::PermissionDenied, "it is of another version of the program"),
                false => (ErrorKind::InvalidData, "it speaks something else"),
            };
            return Err(Error::new(kind, what));
        }
        let theirs = read(stream).await?;
        let randoms = [theirs, random::<32>()?];
        stream.write_all(&randoms[1]).await?;
        let proof: [u8; 32] = read(stream).await?;
        if let Err(error) = self.check("connector", &randoms, &proof) {
            stream.write_all(&REFUSED).await?;
            return Err(error);
        }
        let proof = self.proof("acceptor", &randoms).finalize().into_bytes();
        stream.write_all(&proof).await
    }

    fn check(&self, side: &str, randoms: &[[u8; 32]; 2], proof: &[u8]) -> Result<()> {
        // Takes as long wherever the first difference is.
        let wrong = |_| {
            Error::new(
                ErrorKind::PermissionDenied,
                "it does not know the job's secret (FERROTRON_JOB_SECRET)",
            )
        };
        self.proof(side, randoms).verify_slice(proof).map_err(wrong)
    }
}

/// Returns random bytes of the system.
pub fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(Error::other)?;
    Ok(bytes)
}

async fn read<const N: usize>(stream: &mut TcpStream) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).await?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    fn run<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(future)
    }

    /// The connecting and the accepting end of a connection.
    async fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let connect = TcpStream::connect(listener.local_addr().unwrap());
        let (connector, acceptor) = tokio::join!(connect, listener.accept());
        (connector.unwrap(), acceptor.unwrap().0)
    }

    fn kind(result: Result<()>) -> ErrorKind {
        result.expect_err("the proof is wrong").kind()
    }

    #[test]
    fn only_the_same_secret_is_let_in() {
        for (theirs, is_let_in) in [(Some("sesame"), true), (Some("barley"), false), (None, false)]
        {
            let (connected, accepted) = run(async {
                let (mut connector, mut acceptor) = connection().await;
                let (secret, other) = (Secret::new(Some("sesame")), Secret::new(theirs));
                tokio::join!(other.connect(&mut connector), secret.accept(&mut acceptor))
            });
            assert_eq!((connected.is_ok(), accepted.is_ok()), (is_let_in, is_let_in), "{theirs:?}");
            if !is_let_in {
                assert_eq!(kind(connected), ErrorKind::PermissionDenied, "{theirs:?}");
            }
        }
    }

    /// An acceptor that does not know the secret sends a connector's own proof back to it.
    #[test]
    fn a_proof_cannot_be_reflected() {
        for same_random in [true, false] {
            let refused = run(async {
                let (mut connector, mut acceptor) = connection().await;
                let mirror = async {
                    let hello: [u8; HELLO.len()] = read(&mut acceptor).await?;
                    let random: [u8; 32] = read(&mut acceptor).await?;
                    acceptor.write_all(&if same_random { random } else { [7; 32] }).await?;
                    let proof: [u8; 32] = read(&mut acceptor).await?;
                    acceptor.write_all(&proof).await?;
                    Result::Ok(hello)
                };
                let secret = Secret::new(Some("sesame"));
                let (refused, told) = tokio::join!(secret.connect(&mut connector), mirror);
                assert_eq!(told.unwrap(), HELLO);
                refused
            });
            assert_eq!(kind(refused), ErrorKind::PermissionDenied);
        }
    }

    /// An eavesdropper sends a rank's bytes again.
    #[test]
    fn a_proof_cannot_be_replayed() {
        run(async {
            let secret = Secret::new(Some("sesame"));
            let (mut connector, mut listener) = connection().await;
            let (mut onward, mut acceptor) = connection().await;
            let overheard = async {
                let said: [u8; HELLO.len() + 32] = read(&mut listener).await?;
                onward.write_all(&said).await?;
                listener.write_all(&read::<32>(&mut onward).await?).await?;
                let proof: [u8; 32] = read(&mut listener).await?;
                onward.write_all(&proof).await?;
                listener.write_all(&read::<32>(&mut onward).await?).await?;
                Result::Ok((said, proof))
            };
            let (connected, accepted, overheard) = tokio::join!(
                secret.connect(&mut connector),
                secret.accept(&mut acceptor),
                overheard
            );
            connected.unwrap();
            accepted.unwrap();
            let (said, proof) = overheard.unwrap();

            let (mut connector, mut acceptor) = connection().await;
            let replay = async {
                connector.write_all(&said).await?;
                let _random: [u8; 32] = read(&mut connector).await?;
                connector.write_all(&proof).await?;
                read::<32>(&mut connector).await
            };
            let (refused, told) = tokio::join!(secret.accept(&mut acceptor), replay);
            assert_eq!(kind(refused), ErrorKind::PermissionDenied);
            assert_eq!(told.unwrap(), REFUSED, "nothing that depends on the secret");
        });
    }

    #[test]
    fn a_hang_up_is_no_refusal() {
        let error = run(async {
            let (mut connector, mut acceptor) = connection().await;
            let hang_up = async {
                let _said: [u8; HELLO.len() + 32] = read(&mut acceptor).await?;
                acceptor.write_all(&[7; 32]).await?;
                let _proof: [u8; 32] = read(&mut acceptor).await?;
                drop(acceptor);
                Result::Ok(())
            };
            let secret = Secret::new(Some("sesame"));
            let (connected, hung_up) = tokio::join!(secret.connect(&mut connector), hang_up);
            hung_up.unwrap();
            connected
        });
        assert_ne!(kind(error), ErrorKind::PermissionDenied);
    }
}
