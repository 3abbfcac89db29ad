//! The first bytes of every connection: both ends prove that they know the job's secret.
//!
//! ```text
//!  connector -> acceptor   "ferrojob", version, 32 random bytes c
//!  acceptor -> connector   32 random bytes a
//!  connector -> acceptor   HMAC-SHA256(secret, "connector" c a)
//!  acceptor -> connector   HMAC-SHA256(secret, "acceptor" c a)
//! ```
//!
//! The acceptor tells nothing that depends on the secret to somebody who has not proved to know it. Whoever
//! fails is dropped.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::io::{Error, ErrorKind, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// What the first bytes are. The last two are the version of the protocol.
const HELLO: [u8; 10] = *b"ferrojob01";

/// Knows the job's secret.
#[derive(Clone)]
pub struct Secret(Hmac<Sha256>);

impl Secret {
    /// Without a secret both ends prove that they know the empty one.
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
        let own = random()?;
        stream.write_all(&[&HELLO[..], &own].concat()).await?;
        let randoms = [own, read(stream).await?];
        let proof = self.proof("connector", &randoms).finalize().into_bytes();
        stream.write_all(&proof).await?;
        // Who has answered so far and hangs up now was not convinced. Trying again would not help.
        let refused = |_| {
            let what = "it hung up when it saw this rank's proof of the job's secret";
            Error::new(ErrorKind::PermissionDenied, what)
        };
        let theirs: [u8; 32] = read(stream).await.map_err(refused)?;
        self.check("acceptor", &randoms, &theirs)
    }

    /// As [`Secret::connect`] for the end that has accepted.
    pub async fn accept(&self, stream: &mut TcpStream) -> Result<()> {
        let hello: [u8; HELLO.len()] = read(stream).await?;
        if hello != HELLO {
            return Err(Error::new(ErrorKind::InvalidData, "it speaks something else"));
        }
        let theirs = read(stream).await?;
        let randoms = [theirs, random()?];
        stream.write_all(&randoms[1]).await?;
        let proof: [u8; 32] = read(stream).await?;
        self.check("connector", &randoms, &proof)?;
        let proof = self.proof("acceptor", &randoms).finalize().into_bytes();
        stream.write_all(&proof).await
    }

    fn check(&self, side: &str, randoms: &[[u8; 32]; 2], proof: &[u8]) -> Result<()> {
        // Takes as long wherever the first difference is.
        let wrong =
            |_| Error::new(ErrorKind::PermissionDenied, "it does not know the job's secret");
        self.proof(side, randoms).verify_slice(proof).map_err(wrong)
    }
}

fn random() -> Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(Error::other)?;
    Ok(bytes)
}

async fn read<const N: usize>(stream: &mut TcpStream) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).await?;
    Ok(bytes)
}
