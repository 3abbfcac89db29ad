//! A rank's part in one group: takes calls from its queue in order, carries each out, and finds out why
//! one cannot be.

use ferrotron_tensor::{DType, Error, Result};
use std::collections::HashSet;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;
use tokio::sync::Mutex as AsyncMutex;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::yield_now;
use tracing::Instrument;

use crate::collective::host::runtime::awake::awake_for;
use crate::collective::host::runtime::queued_call::QueuedCall;
use crate::collective::host::runtime::rendezvous::Rendezvous;
use crate::collective::host::runtime::run::{Locked, call_route, run};
use crate::collective::host::runtime::run_rank::panicked;
use crate::collective::host::runtime::world_health::{Entry, Kind, WorldHealth};
use crate::collective::host::silence::blame;
use crate::collective::host::transport::connect::GroupId;
use crate::collective::host::transport::header::Header;
use crate::collective::host::transport::peer_channels::PeerChannels;
use crate::collective::host::transport::piece::{ChannelResult, Fault};
use crate::collective::routes::Route;
use crate::collective::work::Polling;
use crate::collective::{Call, CommVolume, Memory, Op};

/// A rank's part in one group.
pub struct GroupTask {
    /// The name by which the present call was made.
    pub name: Arc<str>,
    /// The same for all members and for no other group.
    pub id: GroupId,
    /// Numbers in the world of the group's ranks.
    pub ranks: Arc<[usize]>,
    /// Pipes to the others.
    pub links: PeerChannels,
    /// State shared with other ranks.
    pub shared: Arc<WorldHealth>,
    /// Knows how to ask other ranks.
    pub rendezvous: Arc<dyn Rendezvous>,
    /// Longest time that a call may take.
    pub timeout: Duration,
    /// Counters of what the calls by this name have sent.
    pub traffic: Arc<Mutex<CommVolume>>,
    /// Kinds of calls that have been carried out: by all that decides which pipes they need.
    pub familiar: HashSet<(Op, DType, Route)>,
}

impl GroupTask {
    /// Carries out calls until all handles of the group are dropped.
    pub async fn serve(task: Arc<AsyncMutex<GroupTask>>, mut jobs: UnboundedReceiver<QueuedCall>) {
        while let Some(next) = next(&mut jobs).await {
            let QueuedCall { call, mut memory, completion, span, name, traffic, queued } = next;
            let mut member = task.lock().await;
            (member.name, member.traffic) = (name, traffic);
            let result = member.carry_out(&call, &mut memory).instrument(span).await;
            drop((member, queued));
            completion.complete(result.map(|()| memory));
        }
    }

    /// Tells the other ranks of this process that this rank has made the group.
    pub fn announce(&self) {
        self.shared.note(self.id, self.ranks[self.links.rank], |_| ());
    }

    /// Returns whether all pipes that a call needs are made, and none is a connection.
    pub fn is_near(&self, call: &Call) -> bool {
        self.familiar.contains(&self.kind(call)) && self.links.is_near()
    }

    fn kind(&self, call: &Call) -> (Op, DType, Route) {
        (call.op, call.dtype, call_route(self.links.size(), call))
    }

    /// Carries out one call.
    pub async fn carry_out(&mut self, call: &Call, memory: &mut Memory) -> Result<()> {
        let entries = self.enter(call);
        let entry = entries[0];
        self.shared.check().map_err(|error| self.interrupted(call, entry, &error))?;
        let me = self.ranks[self.links.rank];
        let headers: Vec<_> = entries.iter().map(|entry| Header::new(call, entry.number)).collect();
        let (shared, id, limit) = (self.shared.clone(), self.id, self.timeout);
        shared.note(id, me, |progress| progress.begin(&self.name, headers[0]));

        let before = self.links.payload();
        // Locked until the call has ended, well or not, and nothing is lent any more.
        let mut locked = Locked::default();
        let done = tokio::select! {
            biased;
            done = awake_for(limit, caught(run(&mut self.links, call, &headers, memory, &mut locked))) => done,
            () = shared.failed() => Some(Ok(())),
        };
        let failure = match done {
            Some(Ok(())) => None,
            Some(Err(Fault::Protocol(what))) => Some(self.describe(call, entry, &what)),
            Some(Err(Fault::PeerGone(what))) => {
                // Why it has gone is better to know than that it has.
                let silent = tokio::select! {
                    biased;
                    () = shared.failed() => None,
                    census = self.wait_for_reason() => blame(&census.silent),
                };
                let why = silent.map_or(what.clone(), |silent| format!("{silent}; {what}"));
                Some(self.describe(call, entry, &why))
            }
            None => tokio::select! {
                biased;
                () = shared.failed() => None,
                failure = self.diagnose(call, &entries) => Some(failure),
            },
        };
        let told = failure.is_some_and(|failure| shared.fail(&failure));
        if let Err(error) = shared.check() {
            // The memory goes back to the caller, so no rank may read it any more. Not earlier: ranks that
            // come late hear from the diagnosis, not from a pipe, why the call is over.
            self.links.cancel_sends();
            // A reason that this call has told names the call already.
            return Err(if told { error } else { self.interrupted(call, entry, &error) });
        }
        shared.note(id, me, |progress| progress.end());
        self.familiar.insert(self.kind(call));
        let sent = self.links.payload() - before;
        self.traffic.lock().unwrap_or_else(PoisonError::into_inner).count(call.op, sent);
        Ok(())
    }

    /// Counts the call.
    fn enter(&self, call: &Call) -> Vec<Entry> {
        let kinds = match call.op {
            Op::Send { to } => vec![Kind::Sent(to)],
            Op::Recv { from } => vec![Kind::Received(from)],
            Op::SendRecv { to, from } => vec![Kind::Sent(to), Kind::Received(from)],
            _ => vec![Kind::Call],
        };
        self.shared.note(self.id, self.ranks[self.links.rank], |progress| {
            kinds.into_iter().map(|kind| Entry { kind, number: progress.enter(kind) }).collect()
        })
    }

    fn describe(&self, call: &Call, entry: Entry, what: &str) -> String {
        format!("{}: {what}; {}", call.op.name(), self.place(call, entry))
    }

    /// The error of a call that ended because of another rank or call.
    fn interrupted(&self, call: &Call, entry: Entry, reason: &Error) -> Error {
        Error::communication("", format!("{reason}; {}", self.place(call, entry)))
    }

    fn place(&self, call: &Call, entry: Entry) -> String {
        let (name, me) = (&self.name, self.ranks[self.links.rank]);
        format!("rank {me} was in {entry} of group {name} ({call})")
    }
}

impl Drop for GroupTask {
    fn drop(&mut self) {
        self.shared.leave(self.id, self.ranks[self.links.rank]);
    }
}

/// The next call. Polls first, since one call often follows another soon.
async fn next(jobs: &mut UnboundedReceiver<QueuedCall>) -> Option<QueuedCall> {
    let polling = Polling::start();
    while jobs.is_empty() && !jobs.is_closed() && polling.pause() {
        yield_now().await;
    }
    jobs.recv().await
}

/// A call that panics fails like any other: its memory must be taken back, and its caller and the other
/// ranks hear what it was.
async fn caught(run: impl Future<Output = ChannelResult<()>>) -> ChannelResult<()> {
    let mut run = pin!(run);
    poll_fn(|context| {
        let poll = AssertUnwindSafe(|| run.as_mut().poll(context));
        catch_unwind(poll).unwrap_or_else(|panic| Poll::Ready(Err(panicked(panic).into())))
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::Buffer;
    use crate::collective::host::runtime::census::{Census, Query};
    use crate::collective::host::runtime::world_health::Reply;
    use crate::collective::host::transport::channel::{RecvChannelKind, SendChannelKind};
    use crate::collective::host::transport::connect::{Connect, Pipes};
    use crate::collective::host::transport::tcp;
    use ferrotron_tensor::{Category, Device, FlatBuffer};
    use std::panic::Location;
    use std::pin::Pin;
    use std::sync::atomic::{AtomicBool, Ordering};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::time::sleep;

    const PAUSE: Duration = Duration::from_millis(30);

    /// Elements of a part: more than two small sockets hold.
    const PART: usize = 200_000;

    fn is_locked(flat: &Arc<Mutex<FlatBuffer>>) -> bool {
        flat.try_lock().is_err()
    }

    /// Answers for ranks that are asked, and looks meanwhile whether the flat is locked.
    struct Witness {
        flat: Arc<Mutex<FlatBuffer>>,
        was_locked: AtomicBool,
        pipes: Mutex<Option<Pipes>>,
    }

    impl Connect for Witness {
        fn connect(
            &self,
            _: GroupId,
            _: usize,
            _: usize,
        ) -> Pin<Box<dyn Future<Output = ChannelResult<Pipes>> + '_>> {
            let pipes = self.pipes.lock().unwrap().take().expect("one other rank");
            Box::pin(std::future::ready(Ok(pipes)))
        }

        fn close(&self, _: GroupId, _: usize) {}
    }

    impl Rendezvous for Witness {
        fn ask<'a>(
            &'a self,
            _: GroupId,
            _: &'a [(usize, Entry)],
        ) -> Pin<Box<dyn Future<Output = Vec<Reply>> + 'a>> {
            Box::pin(std::future::ready(Vec::new()))
        }

        fn census(&self, _: Option<Query>) -> Pin<Box<dyn Future<Output = Census> + '_>> {
            Box::pin(async {
                sleep(PAUSE).await;
                self.was_locked.store(is_locked(&self.flat), Ordering::SeqCst);
                Census::default()
            })
        }
    }

    /// An all-gather of rank 0 of two; the other is `peer`, at the other end of the connection, who has sent
    /// all that is due. Returns what came of it, and who was asked.
    fn all_gather_beside<F: Future<Output = TcpStream>>(
        limit: Duration,
        peer: impl Fn(TcpStream, Arc<Mutex<FlatBuffer>>) -> F,
    ) -> (Result<()>, Arc<Witness>) {
        let ranges = [("w".to_string(), vec![2 * PART])];
        let device = Device::cpu(1).unwrap();
        let flat = FlatBuffer::new(&device, DType::F32, Category::Weights, &ranges).unwrap();
        let flat: Arc<Mutex<FlatBuffer>> = Arc::new(Mutex::new(flat));
        let site = Location::caller();
        let call = Call { op: Op::AllGather, dtype: DType::F32, len: 2 * PART, unit: 1, site };
        let witness = Arc::new(Witness {
            flat: flat.clone(),
            was_locked: AtomicBool::new(false),
            pipes: Mutex::default(),
        });
        let member = async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let connect = TcpStream::connect(listener.local_addr().unwrap());
            let (mine, theirs) = tokio::join!(connect, listener.accept());
            let (mine, mut theirs) = (mine.unwrap(), theirs.unwrap().0);
            socket2::SockRef::from(&mine).set_send_buffer_size(16 << 10).unwrap();
            socket2::SockRef::from(&theirs).set_recv_buffer_size(16 << 10).unwrap();
            let (writer, reader, task) = tcp::pipes(mine, None);
            tokio::spawn(task);
            let pipes = (SendChannelKind::Tcp(writer), RecvChannelKind::Tcp(reader));
            *witness.pipes.lock().unwrap() = Some(pipes);
            let ranks: Arc<[usize]> = Arc::from([0, 1]);
            let mut member = GroupTask {
                name: Arc::from("dp"),
                id: 7,
                links: PeerChannels::new(7, 0, ranks.clone(), witness.clone()),
                ranks,
                shared: WorldHealth::new(),
                rendezvous: witness.clone(),
                timeout: limit,
                traffic: Arc::default(),
                familiar: HashSet::new(),
            };
            let mut memory = Memory::in_place(Buffer::Flat(flat.clone()));
            let peer = async {
                theirs.write_all(bytemuck::bytes_of(&Header::new(&call, 1))).await.unwrap();
                theirs.write_all(&[0; 4 * PART]).await.unwrap();
                peer(theirs, flat.clone()).await
            };
            let (result, _open) = tokio::join!(member.carry_out(&call, &mut memory), peer);
            assert!(!is_locked(&flat), "the call is over");
            assert!(!member.is_near(&call), "its pipe is a connection");
            result
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        (runtime.block_on(member), witness)
    }

    #[test]
    fn a_flat_is_locked_until_it_is_sent() {
        let (result, _) = all_gather_beside(Duration::from_secs(60), async |mut theirs, flat| {
            sleep(PAUSE).await; // all has come in, but not all can go out
            assert!(is_locked(&flat), "its bytes are still to be sent");
            let mut sent = vec![0; size_of::<Header>() + 4 * PART];
            theirs.read_exact(&mut sent).await.unwrap();
            theirs
        });
        result.unwrap();
    }

    #[test]
    fn a_flat_is_locked_until_what_is_not_sent_is_taken_back() {
        let (result, witness) = all_gather_beside(PAUSE * 2, async |theirs, _| theirs);
        assert!(result.unwrap_err().to_string().contains("did not end within 60ms on rank 0"));
        assert!(witness.was_locked.load(Ordering::SeqCst), "while rank 1 was asked");
    }
}
