//! Puts sends and receives between the computations of a schedule.
//!
//! Between two computations there is one place for messages. A send goes right behind the computation
//! that made the tensor, a receive right before the one that needs it. With sends that wait for their
//! receivers this can deadlock where a tensor is needed long after it was made, which happens between
//! the last rank and the first of an interleaved pipeline. There the receive is moved to the place at
//! which its rank waits anyhow. It may be started there long before its tensor exists; an executor waits
//! where the tensor is needed, so this costs no time.

use ferrotron_tensor::{Error, Result};

use super::instruction::{Instruction, Message};
use super::rendezvous::Rendezvous;
use super::schedule::Schedule;

/// The instructions of every rank: the computations that `order` lists, with their messages.
pub fn insert(order: &Schedule) -> Result<Vec<Vec<Instruction>>> {
    let mut lists: Vec<Vec<Instruction>> =
        (0..order.stages()).map(|rank| with_places(order, rank)).collect();
    let mut rendezvous = Rendezvous::new(order, &lists);
    while !rendezvous.advance(&lists) {
        let early = find_early_receive(order, &lists, &rendezvous).ok_or_else(|| {
            Error::value("pipeline schedule", "the order of computations waits for itself")
        })?;
        let EarlyReceive { rank, from, to, message } = early;
        if let Instruction::Exchange { receives, .. } = &mut lists[rank][from] {
            receives.retain(|&other| other != message);
        }
        if let Instruction::Exchange { receives, .. } = &mut lists[rank][to] {
            receives.push(message);
        }
        rendezvous.add_receive(rank, message);
    }
    Ok(lists.into_iter().map(|list| list.into_iter().filter_map(simplified).collect()).collect())
}

/// The computations of a rank with an exchange, perhaps empty, before, between and behind them.
fn with_places(order: &Schedule, rank: usize) -> Vec<Instruction> {
    let mut list = Vec::new();
    let mut sent = None;
    for computation in order.instructions(rank) {
        list.push(place(sent, order.needed(rank, computation)));
        list.push(computation.clone());
        sent = order.made(rank, computation);
    }
    list.push(place(sent, None));
    list
}

fn place(sent: Option<Message>, received: Option<Message>) -> Instruction {
    Instruction::Exchange {
        sends: sent.into_iter().collect(),
        receives: received.into_iter().collect(),
    }
}

struct EarlyReceive {
    rank: usize,
    from: usize,
    to: usize,
    message: Message,
}

/// Of all ranks that wait at their places, the first whose send is received at a later one.
fn find_early_receive(
    order: &Schedule,
    lists: &[Vec<Instruction>],
    rendezvous: &Rendezvous,
) -> Option<EarlyReceive> {
    (0..lists.len()).find_map(|sender| {
        rendezvous.waiting_sends(sender).iter().find_map(|sent| {
            let message = order.at_receiver(sender, sent)?;
            let (rank, to) = (sent.peer, rendezvous.position(sent.peer));
            let later = lists[rank].get(to + 1..)?;
            let distance = later.iter().position(|place| place.receives().contains(&message))?;
            Some(EarlyReceive { rank, from: to + 1 + distance, to, message })
        })
    })
}

/// A place as what it is: nothing, a send, a receive, or several of them together.
fn simplified(instruction: Instruction) -> Option<Instruction> {
    let Instruction::Exchange { sends, receives } = &instruction else { return Some(instruction) };
    match (&sends[..], &receives[..]) {
        ([], []) => None,
        ([message], []) => Some(Instruction::Send(*message)),
        ([], [message]) => Some(Instruction::Receive(*message)),
        _ => Some(instruction),
    }
}
