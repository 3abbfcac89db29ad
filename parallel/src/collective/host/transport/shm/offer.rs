//! The handshake in which two ends of a connection find out that they are on one machine, and what each may do.
//!
//! Each makes the ring that it will write and offers it; each tries to map the other's and to read a word
//! of the other's memory, and says what succeeded. Only what both can do is done. The file behind a ring has
//! no name: it is opened through the other process's table of files, and nothing is left when both are gone.

use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{ErrorKind, Result};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use tokio::net::TcpStream;

use super::ring::Ring;
use super::{Doorbell, ShmReader, ShmWriter, remote};
use crate::descriptors::explained;

/// The offer of one end.
#[derive(Debug, Serialize, Deserialize)]
pub struct Offer {
    boot: String,
    pid: u32,
    fd: i32,
    token: u64,
    /// Address of the token in its memory.
    address: u64,
}

/// The use that one end can make of the other's offer.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Verdict {
    /// Whether it has mapped the ring.
    pub maps: bool,
    /// Whether it can read the other process's memory.
    pub reads: bool,
}

/// The resources of an offer: the ring, its file, and the word in memory.
pub struct Offered {
    ring: Ring,
    _file: File,
    _word: Box<u64>,
}

/// Makes an offer of a new ring, or `None` where the system has no such memory.
///
/// Errors if there are no file descriptors for it.
pub fn offer() -> Result<Option<(Offer, Offered)>> {
    let Some(boot) = unless_missing(std::fs::read_to_string("/proc/sys/kernel/random/boot_id"))?
    else {
        return Ok(None);
    };
    let mut token = [0; 8];
    if getrandom::fill(&mut token).is_err() {
        return Ok(None);
    }
    let token = u64::from_le_bytes(token);
    let Some((ring, file)) = unless_missing(Ring::create(token))? else { return Ok(None) };
    let word = Box::new(token);
    let address = &raw const *word as u64;
    let offer = Offer { boot, pid: std::process::id(), fd: file.as_raw_fd(), token, address };
    Ok(Some((offer, Offered { ring, _file: file, _word: word })))
}

/// Finds out what this end can do with an offer.
///
/// Errors if there are no file descriptors to find out.
pub fn accept(mine: &Offer, theirs: &Offer) -> Result<(Verdict, Option<Ring>)> {
    if mine.boot != theirs.boot {
        return Ok((Verdict { maps: false, reads: false }, None));
    }
    let path = format!("/proc/{}/fd/{}", theirs.pid, theirs.fd);
    let file = File::options().read(true).write(true).open(path);
    let ring = unless_missing(file.and_then(|file| Ring::open(&file, theirs.token)))?;
    let mut word = [0; 8];
    let reads = remote::read(theirs.pid, theirs.address, &mut word).is_ok()
        && u64::from_ne_bytes(word) == theirs.token;
    Ok((Verdict { maps: ring.is_some(), reads }, ring))
}

/// `None` without shared memory, where there is still TCP; an error without descriptors, where there is neither.
fn unless_missing<T>(result: Result<T>) -> Result<Option<T>> {
    match result.map_err(explained) {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == ErrorKind::QuotaExceeded => Err(error),
        Err(_) => Ok(None),
    }
}

/// The pipes of both directions, when both ends have mapped. `reads` says whether the other end may read
/// this process's memory.
pub fn pipes(
    mine: Offered,
    theirs: Ring,
    pid: u32,
    reads: bool,
    stream: TcpStream,
) -> (ShmWriter, ShmReader) {
    let bell = Doorbell(Arc::new(stream));
    let writer = ShmWriter {
        ring: mine.ring,
        bell: bell.clone(),
        lends: reads,
        written: 0,
        lent: 0,
        current: None,
    };
    let reader = ShmReader { ring: theirs, bell, pid, read: 0, scratch: None, holds: false };
    (writer, reader)
}

impl Offer {
    /// The process that made it.
    pub fn pid(&self) -> u32 {
        self.pid
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::host::transport::piece::{PIECE, SLOTS};
    use tokio::net::TcpListener;

    fn offered() -> (Offer, Offered) {
        offer().unwrap().expect("the system has such memory")
    }

    #[test]
    fn what_cannot_be_reached_is_not_shared() {
        let (mine, _mine) = offered();
        let verdict = |spoil: &dyn Fn(&mut Offer)| {
            let (mut theirs, _theirs) = offered();
            spoil(&mut theirs);
            let (verdict, ring) = accept(&mine, &theirs).unwrap();
            assert_eq!(verdict.maps, ring.is_some());
            (verdict.maps, verdict.reads)
        };
        assert_eq!(verdict(&|_| ()), (true, true));
        assert_eq!(verdict(&|theirs| theirs.boot.push('x')), (false, false)); // another machine
        assert_eq!(verdict(&|theirs| theirs.fd = -1), (false, true)); // another namespace of files
        assert_eq!(verdict(&|theirs| theirs.address = 8), (true, false)); // the kernel does not allow it
        assert_eq!(verdict(&|theirs| theirs.token ^= 1), (false, false)); // another process by that number
    }

    #[test]
    fn large_pieces_go_through_the_ring_where_memory_cannot_be_read() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let connect = TcpStream::connect(listener.local_addr().unwrap());
            let (left, right) = tokio::join!(connect, listener.accept());
            let ((one, ones), (two, twos)) = (offered(), offered());
            let (ring_of_one, ring_of_two) =
                (accept(&two, &one).unwrap().1, accept(&one, &two).unwrap().1);
            let end = |mine, ring: Option<Ring>, stream| {
                pipes(mine, ring.unwrap(), std::process::id(), false, stream)
            };
            let (mut writer, _reader) = end(ones, ring_of_two, left.unwrap());
            let (_writer, mut reader) = end(twos, ring_of_one, right.unwrap().0);

            let piece =
                |i: usize| (0..PIECE).map(move |k| (k * 31 + i * 7) as u8).collect::<Vec<_>>();
            let count = 2 * SLOTS;
            let send = async {
                for i in 0..count {
                    // SAFETY: what is not lent is copied.
                    unsafe { writer.lend(&piece(i)).await.unwrap() };
                    assert_eq!(writer.lent, 0, "it lies in this process's memory");
                }
                writer.wait_sends().await.unwrap();
            };
            let receive = async {
                for i in 0..count {
                    let mut got = vec![0; PIECE];
                    reader.recv(&mut got).await.unwrap();
                    assert!(got == piece(i), "piece {i}");
                }
            };
            tokio::join!(send, receive);
        });
    }
}
