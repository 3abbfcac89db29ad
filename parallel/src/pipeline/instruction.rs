//! What a rank of a pipeline is told to do: the instructions, and how a rank names its messages.

use std::fmt;

/// Which way a message travels. Each direction between two ranks is a channel of its own, whose
/// messages arrive in the order in which they were sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// Activations, from a virtual stage to the next one.
    Forward,
    /// Gradients of activations, from a virtual stage to the previous one.
    Backward,
}

/// One tensor on its way between neighbouring virtual stages, as the rank that handles it names it.
///
/// Both ends name their own chunk, so that a rank need not know how the other one counts. Sending
/// forward, `chunk` is the one whose output leaves; receiving forward, the one whose input arrives.
/// Sending backward, it is the one whose input gradient leaves; receiving backward, the one whose output
/// gradient arrives. The two differ where a message goes between the last rank and the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Message {
    /// The channel.
    pub direction: Direction,
    /// Number of the microbatch.
    pub microbatch: usize,
    /// This rank's chunk that made the tensor or needs it.
    pub chunk: usize,
    /// The rank at the other end.
    pub peer: usize,
}

/// One step of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Instruction {
    /// Run the chunk on a microbatch. Its input was received before, unless it is the first virtual stage.
    Forward {
        /// Number of the microbatch.
        microbatch: usize,
        /// Chunk of this rank.
        chunk: usize,
    },
    /// The whole backward: gradients of the input and of the weights.
    Backward {
        /// Number of the microbatch.
        microbatch: usize,
        /// Chunk of this rank.
        chunk: usize,
    },
    /// The gradient of the input alone; that of the weights is deferred.
    BackwardInput {
        /// Number of the microbatch.
        microbatch: usize,
        /// Chunk of this rank.
        chunk: usize,
    },
    /// The deferred gradients of the weights.
    BackwardWeight {
        /// Number of the microbatch.
        microbatch: usize,
        /// Chunk of this rank.
        chunk: usize,
    },
    /// Hand a tensor to another rank.
    Send(Message),
    /// Take a tensor from another rank. It is enough to start this: the computation that needs the
    /// tensor, which may come later, waits for it.
    Receive(Message),
    /// Sends and receives that are started together and may end in any order. A rank that sends first
    /// and receives later would wait for ever for one that does the same towards it, if sends wait for
    /// their receivers.
    Exchange {
        /// What leaves.
        sends: Vec<Message>,
        /// What arrives.
        receives: Vec<Message>,
    },
}

impl Instruction {
    /// The messages that the instruction sends.
    pub fn sends(&self) -> &[Message] {
        match self {
            Instruction::Send(message) => std::slice::from_ref(message),
            Instruction::Exchange { sends, .. } => sends,
            _ => &[],
        }
    }

    /// The messages that the instruction receives.
    pub fn receives(&self) -> &[Message] {
        match self {
            Instruction::Receive(message) => std::slice::from_ref(message),
            Instruction::Exchange { receives, .. } => receives,
            _ => &[],
        }
    }

    /// The microbatch and the chunk of a computation; `None` for messages.
    pub fn place(&self) -> Option<(usize, usize)> {
        match *self {
            Instruction::Forward { microbatch, chunk }
            | Instruction::Backward { microbatch, chunk }
            | Instruction::BackwardInput { microbatch, chunk }
            | Instruction::BackwardWeight { microbatch, chunk } => Some((microbatch, chunk)),
            Instruction::Send(_) | Instruction::Receive(_) | Instruction::Exchange { .. } => None,
        }
    }

    /// Which way a computation passes its result on, its microbatch and chunk; `None` for the weight part
    /// of a backward, whose result stays, and for messages.
    pub(super) fn along(&self) -> Option<(Direction, usize, usize)> {
        match *self {
            Instruction::Forward { microbatch, chunk } => {
                Some((Direction::Forward, microbatch, chunk))
            }
            Instruction::Backward { microbatch, chunk }
            | Instruction::BackwardInput { microbatch, chunk } => {
                Some((Direction::Backward, microbatch, chunk))
            }
            _ => None,
        }
    }
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Message { microbatch, chunk, peer, .. } = self;
        write!(f, "(microbatch {microbatch}, chunk {chunk}, peer {peer})")
    }
}

impl fmt::Display for Instruction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sent = |message: &Message| match message.direction {
            Direction::Forward => format!("SendForward{message}"),
            Direction::Backward => format!("SendBackward{message}"),
        };
        let received = |message: &Message| match message.direction {
            Direction::Forward => format!("ReceiveForward{message}"),
            Direction::Backward => format!("ReceiveBackward{message}"),
        };
        match self {
            Instruction::Forward { microbatch, chunk } => {
                write!(f, "Forward(microbatch {microbatch}, chunk {chunk})")
            }
            Instruction::Backward { microbatch, chunk } => {
                write!(f, "Backward(microbatch {microbatch}, chunk {chunk})")
            }
            Instruction::BackwardInput { microbatch, chunk } => {
                write!(f, "BackwardInput(microbatch {microbatch}, chunk {chunk})")
            }
            Instruction::BackwardWeight { microbatch, chunk } => {
                write!(f, "BackwardWeight(microbatch {microbatch}, chunk {chunk})")
            }
            Instruction::Send(message) => f.write_str(&sent(message)),
            Instruction::Receive(message) => f.write_str(&received(message)),
            Instruction::Exchange { sends, receives } => {
                let parts: Vec<String> =
                    sends.iter().map(sent).chain(receives.iter().map(received)).collect();
                write!(f, "Exchange[{}]", parts.join(", "))
            }
        }
    }
}
