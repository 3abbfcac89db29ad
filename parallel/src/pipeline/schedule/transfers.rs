//! Inserts sends and receives between the computations of a schedule.
//!
//! There is one slot for messages between two computations. A send is placed right after the computation that
//! produces its tensor, a receive right before the one that consumes it. With blocking sends this can deadlock if a
//! tensor is consumed long after it was produced. This happens between the last and the first rank of an interleaved
//! pipeline. The receive is then moved to the slot where its rank waits anyway. It may be started long before its
//! tensor exists. This costs no time, since an executor waits only where the tensor is consumed.

use ferrotron_tensor::{Error, Result};

use crate::pipeline::schedule::PipelineSchedule;
use crate::pipeline::schedule::blocking_sim::BlockingSim;
use crate::pipeline::schedule::instruction::{Instruction, Message};

/// The instructions of every rank: the computations of `order`, with their messages.
pub fn add_send_recv(order: &PipelineSchedule) -> Result<Vec<Vec<Instruction>>> {
    let mut lists: Vec<Vec<Instruction>> =
        (0..order.stages()).map(|rank| with_places(order, rank)).collect();
    let mut rendezvous = BlockingSim::new(order, &lists);
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

/// The computations of a rank with an exchange, possibly empty, before, between and after them. Instructions of weights
/// stay right before the computation that follows: messages are on their way during an update.
fn with_places(order: &PipelineSchedule, rank: usize) -> Vec<Instruction> {
    let mut list = Vec::new();
    let (mut sent, mut of_weights) = (None, Vec::new());
    for computation in order.instructions(rank) {
        if computation.is_of_weights() {
            of_weights.push(computation.clone());
            continue;
        }
        list.push(place(sent, order.consumed(rank, computation)));
        list.append(&mut of_weights);
        list.push(computation.clone());
        sent = order.produced(rank, computation);
    }
    list.push(place(sent, None));
    list.append(&mut of_weights);
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

/// Finds a rank with a pending send whose receive is in a later slot of the receiver.
fn find_early_receive(
    order: &PipelineSchedule,
    lists: &[Vec<Instruction>],
    rendezvous: &BlockingSim,
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

/// Simplifies a slot: to nothing, a send, a receive, or an exchange.
fn simplified(instruction: Instruction) -> Option<Instruction> {
    let Instruction::Exchange { sends, receives } = &instruction else { return Some(instruction) };
    match (&sends[..], &receives[..]) {
        ([], []) => None,
        ([message], []) => Some(Instruction::Send(*message)),
        ([], [message]) => Some(Instruction::Receive(*message)),
        _ => Some(instruction),
    }
}
