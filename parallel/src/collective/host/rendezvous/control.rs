//! Control connections: every rank has one to rank 0, which passes messages on.
//!
//! A control connection that closes before its rank has said goodbye means that the rank is gone, which
//! ends the world. So does a failure on any rank: it tells rank 0, and rank 0 tells all.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout, timeout_at};

use super::super::runtime::world_health::{Answer, Entry, Kind, Reply, WorldHealth};
use super::frame::{self, Body, ControlMessage};

/// Timeout of an answer: the other side's progress thread is never busy for long.
const ANSWER: Duration = Duration::from_secs(3);

/// Time that a leaving rank waits for its last messages to be read.
const LAST_MESSAGES: Duration = Duration::from_secs(1);

/// One rank's messages.
pub struct Control {
    rank: usize,
    size: usize,
    shared: Arc<WorldHealth>,
    /// Queues of messages by destination: on rank 0 every other rank, elsewhere rank 0 only.
    outgoing: Mutex<HashMap<usize, UnboundedSender<ControlMessage>>>,
    /// Questions asked so far: the number of the next one.
    asked: AtomicU64,
    questions: Mutex<HashMap<u64, oneshot::Sender<Answer>>>,
    /// Ranks whose connection has ended, well or not.
    ended: watch::Sender<BTreeSet<usize>>,
    departed: Mutex<BTreeSet<usize>>,
}

impl Control {
    /// Messages over `connections`, and the tasks that carry them.
    pub fn start(
        rank: usize,
        size: usize,
        shared: &Arc<WorldHealth>,
        connections: Vec<(usize, TcpStream)>,
    ) -> Arc<Control> {
        let control = Arc::new(Control {
            rank,
            size,
            shared: shared.clone(),
            outgoing: Mutex::default(),
            asked: AtomicU64::new(0),
            questions: Mutex::default(),
            ended: watch::Sender::default(),
            departed: Mutex::default(),
        });
        for (peer, stream) in connections {
            let (reader, writer) = stream.into_split();
            let (sender, messages) = unbounded_channel();
            lock(&control.outgoing).insert(peer, sender);
            tokio::task::spawn_local(write_messages(writer, messages));
            tokio::task::spawn_local(read_messages(control.clone(), peer, reader));
        }
        let watcher = control.clone();
        tokio::task::spawn_local(async move {
            watcher.shared.failed().await;
            watcher.tell_failure();
        });
        control
    }

    /// Asks ranks whether they have entered calls. One that is silent is blamed only if rank 0, which passes
    /// messages on, is not.
    pub async fn ask(&self, group: &str, questions: &[(usize, Entry)]) -> Vec<Reply> {
        let deadline = Instant::now() + ANSWER;
        let relay = (0, Entry { kind: Kind::Call, number: 0 });
        let asked: Vec<_> = std::iter::once(&relay)
            .chain(questions)
            .map(|&(rank, entry)| self.question(rank, group, entry))
            .collect();
        let mut answers = Vec::with_capacity(asked.len());
        for (question, receiver) in asked {
            answers.push(timeout_at(deadline, receiver).await.ok().and_then(Result::ok));
            lock(&self.questions).remove(&question);
        }
        let relay_is_silent = answers.remove(0).is_none();
        let reply = |(&(rank, _), answer): (&(usize, Entry), Option<Answer>)| {
            answer.ok_or(if relay_is_silent { 0 } else { rank })
        };
        questions.iter().zip(answers).map(reply).collect()
    }

    /// Asks all ranks whether they are there; returns those that do not answer, or rank 0 alone if it does not.
    pub async fn silent(&self) -> Vec<usize> {
        let anything = Entry { kind: Kind::Call, number: 0 };
        let others = (0..self.size).filter(|&rank| rank != self.rank);
        let questions: Vec<_> = others.map(|rank| (rank, anything)).collect();
        let replies = self.ask("", &questions).await;
        let silent: BTreeSet<usize> = replies.into_iter().filter_map(Reply::err).collect();
        silent.into_iter().collect()
    }

    /// Asks one rank; returns the question's number and where the answer will be.
    fn question(&self, to: usize, group: &str, entry: Entry) -> (u64, oneshot::Receiver<Answer>) {
        let (sender, receiver) = oneshot::channel();
        let question = self.asked.fetch_add(1, Ordering::Relaxed);
        lock(&self.questions).insert(question, sender);
        let group = group.to_string();
        self.post(ControlMessage {
            from: self.rank,
            to,
            body: Body::Ask { question, group, entry },
        });
        (question, receiver)
    }

    /// Takes leave: says goodbye, on rank 0 after all others have, at most after `limit`.
    pub async fn leave(&self, limit: Duration) {
        if self.shared.check().is_err() {
            self.tell_failure();
        } else if self.rank == 0 {
            let all = self.size - 1;
            let mut ended = self.ended.subscribe();
            tokio::select! {
                _ = timeout(limit, ended.wait_for(|ended| ended.len() == all)) => {}
                () = self.shared.failed() => self.tell_failure(),
            }
        }
        for to in self.neighbours() {
            self.post(ControlMessage { from: self.rank, to, body: Body::Bye });
        }
        let neighbours = self.neighbours().len();
        lock(&self.outgoing).clear(); // the writers end when they have written all
        let mut ended = self.ended.subscribe();
        let _ = timeout(LAST_MESSAGES, ended.wait_for(|ended| ended.len() == neighbours)).await;
    }

    fn neighbours(&self) -> Vec<usize> {
        if self.rank == 0 { (1..self.size).collect() } else { vec![0] }
    }

    fn tell_failure(&self) {
        if let Err(error) = self.shared.check() {
            for to in self.neighbours() {
                let body = Body::Failed(error.to_string());
                self.post(ControlMessage { from: self.rank, to, body });
            }
        }
    }

    fn post(&self, message: ControlMessage) {
        if message.to == self.rank {
            return self.receive(message);
        }
        if let Body::Ask { question, .. } = message.body
            && lock(&self.departed).contains(&message.to)
        {
            let answer = Answer { entered: false, last: "it has left".to_string() };
            let body = Body::Answer { question, answer };
            return self.post(ControlMessage { from: message.to, to: message.from, body });
        }
        let next = if self.rank == 0 { message.to } else { 0 };
        if let Some(sender) = lock(&self.outgoing).get(&next) {
            // A connection that has closed has been noticed where it is read.
            let _ = sender.send(message);
        }
    }

    fn receive(&self, message: ControlMessage) {
        match message.body {
            Body::Failed(reason) => {
                self.shared.fail(&reason);
            }
            Body::Ask { question, group, entry } => {
                let answer = self.shared.answer(&Arc::from(group), self.rank, entry);
                let body = Body::Answer { question, answer };
                self.post(ControlMessage { from: self.rank, to: message.from, body });
            }
            Body::Answer { question, answer } => {
                if let Some(sender) = lock(&self.questions).remove(&question) {
                    let _ = sender.send(answer);
                }
            }
            Body::Bye => {
                lock(&self.departed).insert(message.from);
            }
        }
    }
}

async fn write_messages(
    mut writer: OwnedWriteHalf,
    mut messages: UnboundedReceiver<ControlMessage>,
) {
    while let Some(message) = messages.recv().await {
        if frame::write(&mut writer, &message).await.is_err() {
            return;
        }
    }
    let _ = writer.shutdown().await;
}

async fn read_messages(control: Arc<Control>, peer: usize, mut reader: OwnedReadHalf) {
    loop {
        match frame::read::<ControlMessage>(&mut reader).await {
            // Others write in their own name only; rank 0 passes on what others wrote.
            Ok(message) if message.to < control.size && (message.from == peer || peer == 0) => {
                if message.to == control.rank || control.rank == 0 {
                    control.post(message);
                }
            }
            Ok(_) => {
                control.shared.fail(&format!("rank {peer} wrote a message in another's name"));
            }
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
