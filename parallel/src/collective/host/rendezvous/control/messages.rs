//! Reading and writing of control messages, and what each does to the rank that it is for.

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::spawn_local;
use tokio::time::Instant;

use super::super::frame::{self, Body, ControlMessage};
use super::{Control, lock};
use crate::collective::tree;

impl Control {
    pub(super) async fn write_messages(
        self: Arc<Self>,
        mut writer: impl AsyncWrite + Unpin,
        mut messages: UnboundedReceiver<ControlMessage>,
    ) {
        while let Some(message) = messages.recv().await {
            match frame::write(&mut writer, &message).await {
                Ok(_) if matches!(message.body, Body::Alive) => {
                    self.heartbeats.fetch_add(1, Ordering::Relaxed);
                }
                Ok(bytes) => {
                    self.messages.fetch_add(1, Ordering::Relaxed);
                    self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
                }
                // Somebody may wait for it.
                Err(error) if error.kind() == ErrorKind::InvalidInput => {
                    let (rank, to) = (self.rank, message.to);
                    self.shared.fail(&format!("rank {rank} cannot write to rank {to}: {error}"));
                }
                Err(_) => return,
            }
        }
        let _ = writer.shutdown().await;
    }

    pub(super) async fn read_messages(
        self: Arc<Self>,
        peer: usize,
        mut reader: impl AsyncRead + Unpin,
    ) {
        loop {
            match frame::read::<ControlMessage>(&mut reader).await {
                Ok(message) => {
                    lock(&self.heard).insert(peer, Instant::now());
                    self.take(peer, message);
                }
                Err(error) => {
                    if !lock(&self.departed).contains(&peer) {
                        self.shared.fail(&format!("rank {peer} is gone: {error}"));
                    }
                    lock(&self.outgoing).remove(&peer);
                    self.ended.change(|ended| ended.insert(peer));
                    return;
                }
            }
        }
    }

    /// Takes or passes on what has come from neighbour `peer`. Ends the world if no rank of it writes such messages.
    pub(in super::super) fn take(self: &Arc<Self>, peer: usize, message: ControlMessage) {
        if let Some(what) = self.refusal(peer, &message) {
            self.shared.fail(&format!("rank {peer} wrote {what}"));
        } else if message.to == self.rank {
            self.receive(message);
        } else {
            self.post(message);
        }
    }

    /// Says what is wrong with a message from neighbour `peer`.
    fn refusal(&self, peer: usize, message: &ControlMessage) -> Option<String> {
        let ControlMessage { from, to, ref body } = *message;
        // Ranks write in their own name only, or pass on what those behind them wrote.
        let is_behind = to < self.size
            && from < self.size
            && from != self.rank
            && tree::next_hop(self.rank, from) == peer;
        if !is_behind {
            return Some("a message in another's name".to_string());
        }
        let is_above = tree::parent(self.rank) == Some(peer);
        let is_between_neighbours = from == peer && to == self.rank;
        let may_be = match body {
            Body::Where { .. } | Body::There { .. } | Body::Ask { .. } | Body::Answer { .. } => {
                true
            }
            Body::Complete => is_between_neighbours && !is_above,
            Body::Welcome => is_between_neighbours && is_above,
            _ => is_between_neighbours,
        };
        if !may_be {
            return Some("a message that is none of its".to_string());
        }
        let (Body::Count { query: Some(query) } | Body::Counted { query: Some(query), .. }) = body
        else {
            return None;
        };
        let size = self.size;
        (!query.members.are_within(size))
            .then(|| format!("a question about members of a group beyond the {size} ranks"))
    }

    /// Does what a message for this rank says.
    fn receive(self: &Arc<Self>, ControlMessage { from, body, .. }: ControlMessage) {
        match body {
            Body::Complete => {
                self.complete.change(|complete| complete.insert(from));
            }
            Body::Welcome => {
                self.welcomed.change(|welcomed| *welcomed = true);
            }
            Body::Failed(reason) => {
                self.shared.fail(&reason);
            }
            Body::Where { question, rank } => {
                let address = self.place(rank);
                self.post(self.message(from, Body::There { question, address }));
            }
            Body::Ask { question, group, entry } => {
                let answer = self.shared.answer(group, self.rank, entry);
                self.post(self.message(from, Body::Answer { question, answer }));
            }
            Body::There { .. } | Body::Answer { .. } => self.answered(body),
            Body::Count { query } => {
                let control = self.clone();
                spawn_local(async move { control.count_for(query, from).await });
            }
            Body::Counted { query, census } => self.counted(from, query, census),
            Body::Alive => {}
            Body::Bye => {
                lock(&self.departed).insert(from);
                self.count_no_more(from);
            }
        }
    }
}
