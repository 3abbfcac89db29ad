//! Control connections: every rank has one to its parent in the tree of all ranks, and one to each of its children.
//!
//! They carry the end of the meeting, failures, questions and goodbyes. A control connection that closes before its rank
//! has said goodbye means that the rank is gone, which ends the world. So does a failure on any rank: it tells its
//! neighbours, and these tell theirs.

mod census;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{oneshot, watch};
use tokio::task::spawn_local;
use tokio::time::{Instant, timeout, timeout_at};

use super::super::runtime::census::{Census, Query};
use super::super::runtime::world_health::{Answer, Entry, Reply, WorldHealth};
use super::super::transport::connect::GroupId;
use super::connection::Connection;
use super::frame::{self, Body, ControlMessage};
use crate::collective::ControlVolume;
use crate::collective::tree;

/// Timeout of an answer: the other side's progress thread is never busy for long.
const ANSWER: Duration = Duration::from_secs(3);

/// Time that a leaving rank waits for its last messages to be read.
const LAST_MESSAGES: Duration = Duration::from_secs(1);

/// The callers that wait for one count.
type Asking = Vec<oneshot::Sender<Census>>;

/// One rank's messages.
pub struct Control {
    rank: usize,
    size: usize,
    shared: Arc<WorldHealth>,
    /// The number of this incarnation of the job, when it is known.
    incarnation: watch::Sender<Option<u64>>,
    /// The known addresses at which ranks listen: on rank 0 all of them.
    places: Mutex<BTreeMap<usize, SocketAddr>>,
    /// Queues of messages to the neighbours in the tree.
    outgoing: Mutex<BTreeMap<usize, UnboundedSender<ControlMessage>>>,
    /// Questions asked so far: the number of the next one.
    asked: AtomicU64,
    questions: Mutex<HashMap<u64, oneshot::Sender<Body>>>,
    /// The callers that wait for a neighbour's count.
    counts: Mutex<HashMap<(usize, Option<Query>), Asking>>,
    /// Children below which all have met.
    complete: watch::Sender<BTreeSet<usize>>,
    welcomed: watch::Sender<bool>,
    /// Neighbours whose connection has ended, well or not.
    ended: watch::Sender<BTreeSet<usize>>,
    departed: Mutex<BTreeSet<usize>>,
    /// Whether the neighbours have been told that the world has failed.
    told: AtomicBool,
    /// Messages written, and their bytes.
    messages: AtomicU64,
    bytes: AtomicU64,
}

impl Control {
    /// No neighbours yet. Must be called on the progress thread.
    pub fn start(rank: usize, size: usize, shared: &Arc<WorldHealth>) -> Arc<Control> {
        let control = Arc::new(Control {
            rank,
            size,
            shared: shared.clone(),
            incarnation: watch::Sender::default(),
            places: Mutex::default(),
            outgoing: Mutex::default(),
            asked: AtomicU64::new(0),
            questions: Mutex::default(),
            counts: Mutex::default(),
            complete: watch::Sender::default(),
            welcomed: watch::Sender::default(),
            ended: watch::Sender::default(),
            departed: Mutex::default(),
            told: AtomicBool::new(false),
            messages: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        });
        let watcher = control.clone();
        spawn_local(async move {
            watcher.shared.failed().await;
            watcher.tell_failure();
        });
        control
    }

    /// Sends and receives messages over a connection to a neighbour in the tree.
    ///
    /// Errors if that rank is none, or is connected already.
    pub fn attach(self: &Arc<Self>, peer: usize, connection: Connection) -> Result<(), String> {
        keep_alive(connection.stream());
        let (reader, writer) = tokio::io::split(connection);
        self.attach_halves(peer, reader, writer)
    }

    fn attach_halves(
        self: &Arc<Self>,
        peer: usize,
        reader: impl AsyncRead + Unpin + 'static,
        writer: impl AsyncWrite + Unpin + 'static,
    ) -> Result<(), String> {
        let (rank, size) = (self.rank, self.size);
        if tree::parent(rank) != Some(peer) && !tree::children(rank, size).contains(&peer) {
            return Err(format!("rank {rank} of {size} is not the parent of rank {peer}"));
        }
        let (sender, messages) = unbounded_channel();
        match lock(&self.outgoing).entry(peer) {
            std::collections::btree_map::Entry::Occupied(_) => {
                return Err(format!("rank {peer} is here already"));
            }
            std::collections::btree_map::Entry::Vacant(place) => drop(place.insert(sender)),
        }
        spawn_local(write_messages(self.clone(), writer, messages));
        spawn_local(read_messages(self.clone(), peer, reader));
        // The others have been told already.
        if self.told.load(Ordering::Relaxed)
            && let Err(error) = self.shared.check()
        {
            self.post(self.message(peer, Body::Failed(error.to_string())));
        }
        Ok(())
    }

    /// Remembers the number of this incarnation of the job, which differs from those of earlier ones.
    pub fn incarnate(&self, incarnation: u64) {
        self.incarnation.send_replace(Some(incarnation));
    }

    /// Waits until the number of this incarnation is known here.
    pub async fn incarnation(&self) -> Option<u64> {
        // The sender lives as long as `self`.
        self.incarnation.subscribe().wait_for(Option::is_some).await.ok().and_then(|known| *known)
    }

    /// Waits until all ranks below this one have met, tells the parent, and waits until all ranks of the world have.
    ///
    /// Errors, with the children that have not come by the deadline, if not all below have met by then.
    pub async fn meet_all(&self, deadline: Instant) -> Result<(), Vec<usize>> {
        let children = tree::children(self.rank, self.size);
        let mut complete = self.complete.subscribe();
        let all = complete.wait_for(|complete| complete.len() == children.len());
        if timeout_at(deadline, all).await.is_err() {
            let here = lock(&self.outgoing);
            return Err(children.filter(|child| !here.contains_key(child)).collect());
        }
        if let Some(parent) = tree::parent(self.rank) {
            self.post(self.message(parent, Body::Complete));
            // The sender lives as long as `self`. Rank 0 knows whom it waits for.
            let _ = self.welcomed.subscribe().wait_for(|welcomed| *welcomed).await;
        }
        children.for_each(|child| self.post(self.message(child, Body::Welcome)));
        Ok(())
    }

    /// Remembers where a rank listens.
    pub fn know(&self, rank: usize, address: SocketAddr) {
        lock(&self.places).insert(rank, address);
    }

    /// Returns where a rank listens, if it is known here.
    pub fn place(&self, rank: usize) -> Option<SocketAddr> {
        lock(&self.places).get(&rank).copied()
    }

    /// Asks rank 0 where a rank listens.
    pub async fn ask_place(&self, rank: usize) -> io::Result<SocketAddr> {
        let (question, receiver) = self.question(0, |question| Body::Where { question, rank });
        let answer = receiver.await;
        lock(&self.questions).remove(&question);
        match answer {
            Ok(Body::There { address, .. }) => Ok(address),
            _ => Err(io::Error::other("rank 0 does not tell where it listens")),
        }
    }

    /// Asks ranks whether they have entered calls. One that is silent, or behind a silent one, is the error.
    pub async fn ask(&self, group: GroupId, questions: &[(usize, Entry)]) -> Vec<Reply> {
        let deadline = Instant::now() + ANSWER;
        let ask = |&(rank, entry): &(usize, Entry)| {
            self.question(rank, |question| Body::Ask { question, group, entry })
        };
        let asked: Vec<_> = questions.iter().map(ask).collect();
        let mut replies = Vec::with_capacity(asked.len());
        for (&(rank, _), (question, receiver)) in questions.iter().zip(asked) {
            let answer = timeout_at(deadline, receiver).await;
            lock(&self.questions).remove(&question);
            replies.push(match answer {
                Ok(Ok(Body::Answer { answer, .. })) => Ok(answer),
                _ => Err(rank),
            });
        }
        replies
    }

    /// Asks one rank; returns the question's number and where the answer will be.
    fn question(
        &self,
        to: usize,
        body: impl FnOnce(u64) -> Body,
    ) -> (u64, oneshot::Receiver<Body>) {
        let (sender, receiver) = oneshot::channel();
        let question = self.asked.fetch_add(1, Ordering::Relaxed);
        lock(&self.questions).insert(question, sender);
        self.post(self.message(to, body(question)));
        (question, receiver)
    }

    /// Takes leave: says goodbye when all ranks below have, at most after `limit`.
    pub async fn leave(&self, limit: Duration) {
        if self.shared.check().is_err() {
            self.tell_failure();
        } else {
            let below: BTreeSet<_> = tree::children(self.rank, self.size).collect();
            let mut ended = self.ended.subscribe();
            tokio::select! {
                _ = timeout(limit, ended.wait_for(|ended| ended.is_superset(&below))) => {}
                () = self.shared.failed() => self.tell_failure(),
            }
        }
        let neighbours = self.neighbours();
        neighbours.iter().for_each(|&peer| self.post(self.message(peer, Body::Bye)));
        lock(&self.outgoing).clear(); // the writers end when they have written all
        let mut ended = self.ended.subscribe();
        let all = |ended: &BTreeSet<usize>| neighbours.iter().all(|peer| ended.contains(peer));
        let _ = timeout(LAST_MESSAGES, ended.wait_for(all)).await;
    }

    /// Counts the neighbours, and the messages sent to them or passed on.
    pub fn traffic(&self) -> ControlVolume {
        ControlVolume {
            control_connections: self.neighbours().len() as u64,
            messages: self.messages.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            ..ControlVolume::default()
        }
    }

    /// The ranks to which there are connections.
    fn neighbours(&self) -> Vec<usize> {
        lock(&self.outgoing).keys().copied().collect()
    }

    fn tell_failure(&self) {
        if let Err(error) = self.shared.check()
            && !self.told.swap(true, Ordering::Relaxed)
        {
            for peer in self.neighbours() {
                self.post(self.message(peer, Body::Failed(error.to_string())));
            }
        }
    }

    fn message(&self, to: usize, body: Body) -> ControlMessage {
        ControlMessage { from: self.rank, to, body }
    }

    /// Sends a message that is for another rank on its way.
    fn post(&self, message: ControlMessage) {
        let next = tree::next_hop(self.rank, message.to);
        if let Body::Ask { question, .. } = message.body
            && lock(&self.departed).contains(&next)
        {
            let body = Body::Answer { question, answer: has_left() };
            let answer = ControlMessage { from: message.to, to: message.from, body };
            return if answer.to == self.rank {
                self.answered(answer.body)
            } else {
                self.post(answer)
            };
        }
        if let Some(sender) = lock(&self.outgoing).get(&next) {
            // A connection that has closed has been noticed where it is read.
            let _ = sender.send(message);
        }
    }

    /// Takes a message that is for this rank.
    fn receive(self: &Arc<Self>, ControlMessage { from, body, .. }: ControlMessage) {
        match body {
            Body::Complete => {
                self.complete.send_modify(|complete| {
                    complete.insert(from);
                });
            }
            Body::Welcome => {
                self.welcomed.send_replace(true);
            }
            Body::Failed(reason) => {
                self.shared.fail(&reason);
            }
            Body::Where { question, rank } => {
                if let Some(address) = self.place(rank) {
                    self.post(self.message(from, Body::There { question, address }));
                }
            }
            Body::Ask { question, group, entry } => {
                let answer = self.shared.answer(group, self.rank, entry);
                self.post(self.message(from, Body::Answer { question, answer }));
            }
            Body::There { .. } | Body::Answer { .. } => self.answered(body),
            Body::Count { query } => {
                let control = self.clone();
                spawn_local(async move {
                    let census = control.count(query.clone(), Some(from)).await;
                    control.post(control.message(from, Body::Counted { query, census }));
                });
            }
            Body::Counted { query, census } => self.counted(from, query, census),
            Body::Bye => {
                lock(&self.departed).insert(from);
                self.count_no_more(from);
            }
        }
    }

    fn answered(&self, body: Body) {
        if let Body::There { question, .. } | Body::Answer { question, .. } = body
            && let Some(sender) = lock(&self.questions).remove(&question)
        {
            let _ = sender.send(body);
        }
    }
}

fn has_left() -> Answer {
    Answer { entered: false, last: "it has left".to_string() }
}

async fn write_messages(
    control: Arc<Control>,
    mut writer: impl AsyncWrite + Unpin,
    mut messages: UnboundedReceiver<ControlMessage>,
) {
    while let Some(message) = messages.recv().await {
        let Ok(bytes) = frame::write(&mut writer, &message).await else { return };
        control.messages.fetch_add(1, Ordering::Relaxed);
        control.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
    let _ = writer.shutdown().await;
}

async fn read_messages(control: Arc<Control>, peer: usize, mut reader: impl AsyncRead + Unpin) {
    loop {
        match frame::read::<ControlMessage>(&mut reader).await {
            Ok(message) if !control.may_come_from(&message, peer) => {
                control.shared.fail(&format!("rank {peer} wrote a message in another's name"));
            }
            Ok(message) if message.to == control.rank => control.receive(message),
            Ok(message) => control.post(message),
            Err(error) => {
                if !lock(&control.departed).contains(&peer) {
                    control.shared.fail(&format!("rank {peer} is gone: {error}"));
                }
                lock(&control.outgoing).remove(&peer);
                control.ended.send_modify(|ended| {
                    ended.insert(peer);
                });
                return;
            }
        }
    }
}

impl Control {
    /// Ranks write in their own name only, or pass on what those behind them wrote.
    fn may_come_from(&self, message: &ControlMessage, peer: usize) -> bool {
        let ControlMessage { from, to, .. } = *message;
        to < self.size
            && from < self.size
            && from != self.rank
            && tree::next_hop(self.rank, from) == peer
    }
}

/// Notices within half a minute when a machine dies without closing its connections.
fn keep_alive(stream: &TcpStream) {
    let keep_alive = socket2::TcpKeepalive::new()
        .with_time(Duration::from_secs(10))
        .with_interval(Duration::from_secs(5))
        .with_retries(4);
    // Without it a dead machine is noticed by the next call's timeout.
    let _ = socket2::SockRef::from(stream).set_tcp_keepalive(&keep_alive);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
