//! Control connections: every rank has one to its parent in the tree of all ranks, and one to each of its children.
//!
//! They carry the end of the meeting, failures, questions, heartbeats and goodbyes. A control connection that closes before
//! its rank has said goodbye means that the rank is gone, which ends the world. So does a failure on any rank: it tells its
//! neighbours, and these tell theirs.

mod census;
pub mod fuzzing;
pub mod heartbeat;
mod messages;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::task::spawn_local;
use tokio::time::{Instant, timeout, timeout_at};

use super::super::runtime::awake::awake_for;
use super::super::runtime::census::{Census, Query};
use super::super::runtime::diagnosis::OTHERS_FIRST;
use super::super::runtime::watched::Watched;
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
    incarnation: Watched<Option<u64>>,
    /// The known addresses at which ranks listen: on rank 0 all of them.
    places: Mutex<BTreeMap<usize, SocketAddr>>,
    /// Queues of messages to the neighbours in the tree.
    outgoing: Mutex<BTreeMap<usize, UnboundedSender<ControlMessage>>>,
    /// Questions asked so far: the number of the next one.
    asked: AtomicU64,
    questions: Mutex<BTreeMap<u64, oneshot::Sender<Body>>>,
    /// The callers that wait for a neighbour's count.
    counts: Mutex<BTreeMap<(usize, Option<Query>), Asking>>,
    /// Children below which all have met.
    complete: Watched<BTreeSet<usize>>,
    welcomed: Watched<bool>,
    /// Neighbours whose connection has ended, well or not.
    ended: Watched<BTreeSet<usize>>,
    departed: Mutex<BTreeSet<usize>>,
    /// Whether the neighbours have been told that the world has failed.
    told: AtomicBool,
    /// Messages written, and their bytes.
    messages: AtomicU64,
    bytes: AtomicU64,
    /// The moment at which each neighbour has last sent anything.
    heard: Mutex<BTreeMap<usize, Instant>>,
    heartbeats: AtomicU64,
}

/// A question to another rank. It is forgotten when this is dropped.
struct Question<'a> {
    control: &'a Control,
    number: u64,
    answer: oneshot::Receiver<Body>,
}

impl Drop for Question<'_> {
    fn drop(&mut self) {
        lock(&self.control.questions).remove(&self.number);
    }
}

impl Control {
    /// No neighbours yet. Must be called on the progress thread.
    pub fn start(rank: usize, size: usize, shared: &Arc<WorldHealth>) -> Arc<Control> {
        let control = Arc::new(Control {
            rank,
            size,
            shared: shared.clone(),
            incarnation: Watched::default(),
            places: Mutex::default(),
            outgoing: Mutex::default(),
            asked: AtomicU64::new(0),
            questions: Mutex::default(),
            counts: Mutex::default(),
            complete: Watched::default(),
            welcomed: Watched::default(),
            ended: Watched::default(),
            departed: Mutex::default(),
            told: AtomicBool::new(false),
            messages: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            heard: Mutex::default(),
            heartbeats: AtomicU64::new(0),
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
        connection.stream().keep_alive();
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
        spawn_local(self.clone().write_messages(writer, messages));
        spawn_local(self.clone().read_messages(peer, reader));
        // The others have been told already.
        if self.told.load(Ordering::Relaxed)
            && let Some(failure) = self.failure()
        {
            self.post(self.message(peer, failure));
        }
        Ok(())
    }

    /// Number of ranks of the world.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns whether a child in the tree has not come yet.
    pub fn awaits_children(&self) -> bool {
        let (mut children, here) = (tree::children(self.rank, self.size), lock(&self.outgoing));
        // Those who have come may have left since.
        self.complete.get().len() < children.len()
            && children.any(|child| !here.contains_key(&child))
    }

    /// Remembers the number of this incarnation of the job, which differs from those of earlier ones.
    pub fn incarnate(&self, incarnation: u64) {
        self.incarnation.change(|known| *known = Some(incarnation));
    }

    /// Waits until the number of this incarnation is known here.
    pub async fn incarnation(&self) -> Option<u64> {
        self.incarnation.wait_for(Option::is_some).await;
        *self.incarnation.get()
    }

    /// Waits until all ranks below this one have met, tells the parent, and waits until all ranks of the world have.
    ///
    /// Errors, with the children that have not come by the deadline, if not all below have met by then.
    pub async fn meet_all(&self, deadline: Instant) -> Result<(), Vec<usize>> {
        let children = tree::children(self.rank, self.size);
        let all = self.complete.wait_for(|complete| complete.len() == children.len());
        if timeout_at(deadline, all).await.is_err() {
            let here = lock(&self.outgoing);
            return Err(children.filter(|child| !here.contains_key(child)).collect());
        }
        if let Some(parent) = tree::parent(self.rank) {
            self.post(self.message(parent, Body::Complete));
            self.welcomed.wait_for(|welcomed| *welcomed).await; // rank 0 knows whom it waits for
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
        let mut question = self.question(0, |question| Body::Where { question, rank });
        match (&mut question.answer).await {
            Ok(Body::There { address: Some(address), .. }) => Ok(address),
            _ => Err(io::Error::other(format!("rank 0 does not tell where rank {rank} listens"))),
        }
    }

    /// Asks ranks whether they have entered calls.
    pub async fn ask(&self, group: GroupId, questions: &[(usize, Entry)]) -> Vec<Reply> {
        let ask = |&(rank, entry): &(usize, Entry)| {
            self.question(rank, |question| Body::Ask { question, group, entry })
        };
        let mut asked: Vec<_> = questions.iter().map(ask).collect();
        let mut replies: Vec<Reply> = vec![None; asked.len()];
        let answer = |body| match body {
            Body::Answer { answer, .. } => Some(answer),
            _ => None,
        };
        let all = async {
            for (reply, question) in replies.iter_mut().zip(&mut asked) {
                *reply = (&mut question.answer).await.ok().and_then(answer);
            }
        };
        awake_for(ANSWER, all).await;
        // Those behind the first that has not answered may have.
        for (reply, question) in replies.iter_mut().zip(&mut asked) {
            if reply.is_none() {
                *reply = question.answer.try_recv().ok().and_then(answer);
            }
        }
        replies
    }

    /// Asks one rank.
    fn question(&self, to: usize, body: impl FnOnce(u64) -> Body) -> Question<'_> {
        let (sender, answer) = oneshot::channel();
        let number = self.asked.fetch_add(1, Ordering::Relaxed);
        lock(&self.questions).insert(number, sender);
        let question = Question { control: self, number, answer };
        self.post(self.message(to, body(number)));
        question
    }

    /// Takes leave: says goodbye when all ranks below have. Those that wait in vain in a call of at most `limit` have then found
    /// out why, for which they need this rank.
    pub async fn leave(&self, limit: Duration) {
        let limit =
            limit.saturating_add(limit / OTHERS_FIRST).saturating_add(self.longest_census());
        if self.shared.check().is_err() {
            self.tell_failure();
        } else {
            let below: BTreeSet<_> = tree::children(self.rank, self.size).collect();
            let ended = self.ended.wait_for(|ended| ended.is_superset(&below));
            tokio::select! {
                biased;
                _ = awake_for(limit, ended) => {}
                () = self.shared.failed() => self.tell_failure(),
            }
        }
        let neighbours = self.neighbours();
        neighbours.iter().for_each(|&peer| self.post(self.message(peer, Body::Bye)));
        lock(&self.outgoing).clear(); // the writers end when they have written all
        let all = |ended: &BTreeSet<usize>| neighbours.iter().all(|peer| ended.contains(peer));
        let _ = timeout(LAST_MESSAGES, self.ended.wait_for(all)).await;
    }

    /// Counts the neighbours, the messages sent to them or passed on, and heartbeats.
    pub fn traffic(&self) -> ControlVolume {
        ControlVolume {
            control_connections: self.neighbours().len() as u64,
            messages: self.messages.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            heartbeats: self.heartbeats.load(Ordering::Relaxed),
            ..ControlVolume::default()
        }
    }

    /// The ranks to which there are connections.
    fn neighbours(&self) -> Vec<usize> {
        lock(&self.outgoing).keys().copied().collect()
    }

    fn tell_failure(&self) {
        if let Some(failure) = self.failure()
            && !self.told.swap(true, Ordering::Relaxed)
        {
            for peer in self.neighbours() {
                self.post(self.message(peer, failure.clone()));
            }
        }
    }

    /// The reason for which the world has failed, as others are told.
    fn failure(&self) -> Option<Body> {
        let error = self.shared.check().err()?;
        Some(Body::Failed(frame::shortened(error.to_string())))
    }

    fn message(&self, to: usize, body: Body) -> ControlMessage {
        ControlMessage { from: self.rank, to, body }
    }

    /// Sends a message that is for another rank on its way. A question that cannot get there is answered here.
    fn post(&self, message: ControlMessage) {
        let next = tree::next_hop(self.rank, message.to);
        let has_departed = || lock(&self.departed).contains(&next);
        let answer = match message.body {
            Body::Ask { question, .. } if has_departed() => {
                Some(Body::Answer { question, answer: has_left() })
            }
            Body::Where { question, .. }
                if has_departed() || !lock(&self.outgoing).contains_key(&next) =>
            {
                Some(Body::There { question, address: None })
            }
            _ => None,
        };
        if let Some(body) = answer {
            return match message.from == self.rank {
                true => self.answered(body),
                false => self.post(ControlMessage { from: message.to, to: message.from, body }),
            };
        }
        if let Some(sender) = lock(&self.outgoing).get(&next) {
            // A connection that has closed has been noticed where it is read.
            let _ = sender.send(message);
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
    Answer::missing("it has left")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
