//! A control connection on which anything may come, for the fuzzing of this workspace.

use std::sync::Arc;
use tokio::io::{AsyncWriteExt, duplex, split};
use tokio::task::LocalSet;

use super::super::super::runtime::census::{Members, Query};
use super::super::super::runtime::world_health::{Answer, Entry, Kind, WorldHealth};
use super::super::frame::{self, Body, ControlMessage};
use super::Control;
use crate::collective::host::runtime::census::Census;
use crate::collective::tree;

/// Ranks of the world.
const RANKS: usize = 22;

/// The rank that reads: it has a parent and children.
const OWN: usize = 1;

/// Runs with one thread and timers, and drops what is still under way.
fn run<T>(future: impl Future<Output = T>) -> Option<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().ok()?;
    Some(LocalSet::new().block_on(&runtime, future))
}

/// Messages that neighbours may write, behind a byte with the neighbour's number.
pub fn message_seeds() -> Vec<Vec<u8>> {
    let entry = Entry { kind: Kind::Call, number: 1 };
    let query = Some(Query { group: 7, members: Members::new(&[1, 5, 9]), entry });
    let census = Census { silent: vec![6], missing: vec![(7, Answer::missing("it has left"))] };
    let answer = Answer { entered: true, last: "it is in a call".to_string(), waits: false };
    let address = Some(([127, 0, 0, 1], 21_234).into());
    let of_parent = [
        Body::Welcome,
        Body::There { question: 0, address },
        Body::Answer { question: 1, answer },
        Body::Ask { question: 2, group: 7, entry },
        Body::Count { query: query.clone() },
        Body::Alive,
    ];
    let of_child = [
        Body::Complete,
        Body::Where { question: 3, rank: 4 },
        Body::Counted { query, census },
        Body::Failed("no".to_string()),
        Body::Bye,
    ];
    let written = |peer: usize, bodies: &[Body]| {
        let mut bytes = vec![peer as u8];
        run(async {
            for body in bodies {
                let message = ControlMessage { from: peer, to: OWN, body: body.clone() };
                let _ = frame::write(&mut bytes, &message).await;
            }
        });
        bytes
    };
    vec![written(0, &of_parent), written(5, &of_child), written(8, &of_child[..1])]
}

/// Reads messages from the neighbour that the first byte says until the connection ends. Returns whether all were taken.
pub fn read_messages(bytes: &[u8]) -> bool {
    let Some((&peer, bytes)) = bytes.split_first() else { return false };
    let peer = usize::from(peer);
    let taken = run(async {
        let shared = WorldHealth::new();
        let control = Control::start(OWN, RANKS, &shared);
        let neighbours = tree::parent(OWN).into_iter().chain(tree::children(OWN, RANKS));
        let mut ends = Vec::new();
        for neighbour in neighbours {
            let (near, far) = duplex(bytes.len().max(1) + (64 << 10));
            let (reader, writer) = split(near);
            control.attach_halves(neighbour, reader, writer).ok()?;
            ends.push((neighbour, far));
        }
        let (_, far) = ends.iter_mut().find(|(neighbour, _)| *neighbour == peer)?;
        far.write_all(bytes).await.ok()?;
        far.shutdown().await.ok()?;
        control.ended.wait_for(|ended| ended.contains(&peer)).await;
        Some(no_message_was_refused(&shared))
    });
    taken.flatten().unwrap_or(false)
}

fn no_message_was_refused(shared: &Arc<WorldHealth>) -> bool {
    let Err(error) = shared.check() else { return true };
    let reason = error.to_string();
    reason == "no" || reason.ends_with("is gone: early eof")
}
