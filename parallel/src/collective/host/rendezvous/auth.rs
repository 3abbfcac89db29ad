//! The first bytes of every connection: both ends prove that they know the job's secret, and agree on keys.
//!
//! ```text
//!  connector -> acceptor   "ferrojob", version; e, and sealed: its machine, its wish
//!  acceptor -> connector   e, and sealed: whether records follow; or zeros: the key is another one
//!  connector -> acceptor   nothing, sealed
//! ```
//!
//! These are the messages of `Noise_NNpsk0_25519_ChaChaPoly_SHA256` (Noise Protocol Framework, revision 34; crate
//! `snow`), whose pre-shared key is the secret's SHA-256. Every connection has keys of its own, which nobody can compute
//! later from what was sent and the secret. The acceptor sends nothing that depends on the secret before the connector
//! has proved to know it. A connection that fails a proof is dropped.
//!
//! Between machines all further bytes are [sealed](super::super::transport::seal). Within a machine they are plain,
//! unless an end wants otherwise: nobody else can read them there, and processes share memory anyway.

use sha2::{Digest, Sha256};
use snow::HandshakeState;
use std::io::{Error, ErrorKind, Result};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};

use super::super::transport::seal::{Seal, TAG, session, wrong};
use super::config::Encryption;
use super::connection::Connection;
use super::network::Stream;

/// The first bytes of a connection. The last two are the version of the protocol.
const HELLO: [u8; 10] = *b"ferrojob04";

/// Bytes of a public key.
const KEY: usize = 32;

/// Bytes of the connector's payload: the id of its machine's boot, and its wish.
const WISH: usize = 17;

/// Bytes of the first message.
const FIRST: usize = KEY + WISH + TAG;

/// Bytes of the second message, whose payload says whether records follow.
const SECOND: usize = KEY + 1 + TAG;

/// The acceptor's answer to a wrong key. It tells the connector that trying again would not help, unlike after a
/// hang-up.
const REFUSED: [u8; SECOND] = [0; SECOND];

/// Knows the job's secret, and which connections are sealed.
#[derive(Clone)]
pub struct Secret {
    key: [u8; 32],
    encryption: Encryption,
    machine: [u8; 16],
}

impl Secret {
    /// The secret, or the empty one where there is none: both ends then prove that they know that.
    pub fn new(secret: Option<&str>, encryption: Encryption) -> Secret {
        let key = Sha256::digest(secret.unwrap_or_default().as_bytes()).into();
        Secret { key, encryption, machine: machine() }
    }

    /// Proves this end's knowledge and checks the other's, as the end that has connected.
    pub async fn connect(&self, stream: impl Into<Stream>) -> Result<Connection> {
        let mut stream = stream.into();
        let session = session(stream.resolver(), &self.key, &HELLO)?;
        let mut session = session.build_initiator().map_err(wrong)?;
        let mut first = [0; HELLO.len() + FIRST];
        let (hello, message) = first.split_at_mut(HELLO.len());
        hello.copy_from_slice(&HELLO);
        let mut wish = [self.encryption as u8; WISH];
        wish[1..].copy_from_slice(&self.machine);
        session.write_message(&wish, message).map_err(wrong)?;
        stream.write_all(&first).await?;

        let answer: [u8; SECOND] = read(&mut stream).await?;
        if answer == REFUSED {
            let what = "it refuses this rank's proof of the job's secret: give all ranks the same \
                FERROTRON_JOB_SECRET, or, if another job listens there, another --rendezvous-port";
            return Err(Error::new(ErrorKind::PermissionDenied, what));
        }
        let mut is_sealed = [0];
        session.read_message(&answer, &mut is_sealed).map_err(unknown)?;
        let keys = keys(session)?;
        let mut last = [0; TAG];
        keys.write_message(0, &[], &mut last).map_err(wrong)?;
        stream.write_all(&last).await?;
        let seal = (is_sealed != [0]).then(|| Seal::new(keys, 1, 0));
        Ok(Connection::new(stream, seal))
    }

    /// Performs [`Secret::connect`]'s handshake at the accepting end.
    ///
    /// The error of a rank which cannot belong to this job is [`ErrorKind::PermissionDenied`].
    pub async fn accept(&self, stream: impl Into<Stream>) -> Result<Connection> {
        let mut stream = stream.into();
        let hello: [u8; HELLO.len()] = read(&mut stream).await?;
        if hello != HELLO {
            let (kind, what) = match hello.starts_with(b"ferrojob") {
                true => (ErrorKind::PermissionDenied, "it is of another version of the program"),
                false => (ErrorKind::InvalidData, "it speaks something else"),
            };
            return Err(Error::new(kind, what));
        }
        let first: [u8; FIRST] = read(&mut stream).await?;
        let session = session(stream.resolver(), &self.key, &HELLO)?;
        let mut session = session.build_responder().map_err(wrong)?;
        let mut wish = [0; WISH];
        if session.read_message(&first, &mut wish).is_err() {
            stream.write_all(&REFUSED).await?;
            return Err(unknown(snow::Error::Decrypt));
        }
        let is_sealed = self.seals(wish[0], &wish[1..]);
        let mut second = [0; SECOND];
        session.write_message(&[u8::from(is_sealed)], &mut second).map_err(wrong)?;
        stream.write_all(&second).await?;
        let keys = keys(session)?;
        // The first message may have been overheard; only who has made it can go on.
        let last: [u8; TAG] = read(&mut stream).await?;
        keys.read_message(0, &last, &mut []).map_err(unknown)?;
        let seal = is_sealed.then(|| Seal::new(keys, 0, 1));
        Ok(Connection::new(stream, seal))
    }

    /// Whether a connection with an end that `wishes` so, on `machine`, is sealed.
    fn seals(&self, wishes: u8, machine: &[u8]) -> bool {
        let both = [wishes, self.encryption as u8];
        if both.contains(&(Encryption::Always as u8)) {
            return true;
        }
        let is_here = self.machine != [0; 16] && machine == self.machine;
        !is_here && both != [Encryption::Never as u8; 2]
    }
}

/// The keys of a handshake that has ended.
fn keys(session: HandshakeState) -> Result<snow::StatelessTransportState> {
    session.into_stateless_transport_mode().map_err(wrong)
}

fn unknown(_: snow::Error) -> Error {
    let what = "it does not know the job's secret (FERROTRON_JOB_SECRET)";
    Error::new(ErrorKind::PermissionDenied, what)
}

/// The start of the machine's id of this boot, or zeros where the system has none.
fn machine() -> [u8; 16] {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mut machine = [0; 16];
    if !boot.is_empty() {
        machine.copy_from_slice(&Sha256::digest(boot)[..16]);
    }
    machine
}

async fn read<const N: usize>(stream: &mut (impl AsyncRead + Unpin)) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).await?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::super::connection::tests::sockets;
    use super::*;
    use Encryption::{Always, BetweenHosts, Never};

    fn run<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(future)
    }

    fn sesame() -> Secret {
        Secret::new(Some("sesame"), BetweenHosts)
    }

    fn kind(result: Result<Connection>) -> ErrorKind {
        result.err().expect("the proof is wrong").kind()
    }

    #[test]
    fn only_the_same_secret_is_let_in() {
        for (theirs, is_let_in) in [(Some("sesame"), true), (Some("barley"), false), (None, false)]
        {
            let (connected, accepted) = run(async {
                let (connector, acceptor) = sockets().await;
                let (own, other) = (sesame(), Secret::new(theirs, BetweenHosts));
                tokio::join!(other.connect(connector), own.accept(acceptor))
            });
            assert_eq!((connected.is_ok(), accepted.is_ok()), (is_let_in, is_let_in), "{theirs:?}");
            if !is_let_in {
                assert_eq!(kind(connected), ErrorKind::PermissionDenied, "{theirs:?}");
                assert_eq!(kind(accepted), ErrorKind::PermissionDenied, "{theirs:?}");
            }
        }
    }

    #[test]
    fn connections_between_machines_are_sealed() {
        let ([here, there], unknown) = ([[1; 16], [2; 16]], [0; 16]);
        let cases = [
            ((BetweenHosts, here), (BetweenHosts, here), false),
            ((BetweenHosts, here), (BetweenHosts, there), true),
            ((BetweenHosts, unknown), (BetweenHosts, unknown), true),
            ((Always, here), (BetweenHosts, here), true),
            ((Never, here), (Always, here), true),
            ((Never, here), (BetweenHosts, there), true),
            ((Never, here), (Never, there), false),
        ];
        for (one, other, want) in cases {
            let end = |(encryption, machine)| Secret { encryption, machine, ..sesame() };
            for (connector, acceptor) in [(one, other), (other, one)] {
                let sealed = run(async {
                    let (stream, accepted) = sockets().await;
                    let (connector, acceptor) = (end(connector), end(acceptor));
                    let both = tokio::join!(connector.connect(stream), acceptor.accept(accepted));
                    [both.0, both.1].map(|end| end.unwrap().into_parts().1.is_some())
                });
                assert_eq!(sealed, [want; 2], "{connector:?} and {acceptor:?}");
            }
        }
    }

    /// Nobody can make both ends believe that they are on one machine.
    #[test]
    fn a_wish_cannot_be_changed() {
        let refused = run(async {
            let (connector, mut between) = sockets().await;
            let (mut onward, acceptor) = sockets().await;
            let change = async {
                let mut first: [u8; HELLO.len() + FIRST] = read(&mut between).await?;
                first[HELLO.len() + KEY] ^= 1;
                onward.write_all(&first).await?;
                between.write_all(&read::<SECOND>(&mut onward).await?).await
            };
            let (one, other) = (sesame(), sesame());
            let both = tokio::join!(one.connect(connector), other.accept(acceptor), change);
            both.2.unwrap();
            [both.0, both.1].map(kind)
        });
        assert_eq!(refused, [ErrorKind::PermissionDenied; 2]);
    }

    /// An acceptor that does not know the secret sends a connector's own message back to it.
    #[test]
    fn a_proof_cannot_be_reflected() {
        let refused = run(async {
            let (connector, mut acceptor) = sockets().await;
            let mirror = async {
                let first: [u8; HELLO.len() + FIRST] = read(&mut acceptor).await?;
                acceptor.write_all(&first[HELLO.len()..][..SECOND]).await
            };
            let secret = sesame();
            let (refused, told) = tokio::join!(secret.connect(connector), mirror);
            told.unwrap();
            refused
        });
        assert_eq!(kind(refused), ErrorKind::PermissionDenied);
    }

    /// An eavesdropper sends a rank's bytes again.
    #[test]
    fn a_proof_cannot_be_replayed() {
        run(async {
            let secret = sesame();
            let (connector, mut listener) = sockets().await;
            let (mut onward, acceptor) = sockets().await;
            let overheard = async {
                let first: [u8; HELLO.len() + FIRST] = read(&mut listener).await?;
                onward.write_all(&first).await?;
                listener.write_all(&read::<SECOND>(&mut onward).await?).await?;
                let last: [u8; TAG] = read(&mut listener).await?;
                onward.write_all(&last).await?;
                Result::Ok((first, last))
            };
            let (connected, accepted, overheard) =
                tokio::join!(secret.connect(connector), secret.accept(acceptor), overheard);
            assert!(connected.is_ok() && accepted.is_ok());
            let (first, last) = overheard.unwrap();

            let (mut connector, acceptor) = sockets().await;
            let replay = async {
                connector.write_all(&first).await?;
                let _second: [u8; SECOND] = read(&mut connector).await?;
                connector.write_all(&last).await
            };
            let (refused, told) = tokio::join!(secret.accept(acceptor), replay);
            told.unwrap();
            assert_eq!(kind(refused), ErrorKind::PermissionDenied);
        });
    }

    /// A stranger learns nothing that depends on the secret.
    #[test]
    fn a_stranger_is_told_zeros() {
        run(async {
            let (mut stranger, acceptor) = sockets().await;
            let ask = async {
                stranger.write_all(&[&HELLO[..], &[9; FIRST]].concat()).await?;
                read::<SECOND>(&mut stranger).await
            };
            let secret = sesame();
            let (refused, told) = tokio::join!(secret.accept(acceptor), ask);
            assert_eq!(kind(refused), ErrorKind::PermissionDenied);
            assert_eq!(told.unwrap(), REFUSED);
        });
    }

    #[test]
    fn a_hang_up_is_no_refusal() {
        let error = run(async {
            let (connector, mut acceptor) = sockets().await;
            let hang_up = async {
                let _first: [u8; HELLO.len() + FIRST] = read(&mut acceptor).await?;
                drop(acceptor);
                Result::Ok(())
            };
            let secret = sesame();
            let (connected, hung_up) = tokio::join!(secret.connect(connector), hang_up);
            hung_up.unwrap();
            connected
        });
        assert_ne!(kind(error), ErrorKind::PermissionDenied);
    }
}
