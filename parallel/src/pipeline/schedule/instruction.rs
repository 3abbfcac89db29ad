//! Pipeline instructions and messages of a rank.

use std::fmt;

/// The direction of a message. Each direction between two ranks is a separate channel, which delivers messages in the
/// order of sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// Activations, from a virtual stage to the next one.
    Forward,
    /// Gradients of activations, from a virtual stage to the previous one.
    Backward,
}

/// A tensor between adjacent virtual stages, as named by the rank that sends or receives it.
///
/// Each end uses its own chunk number. For a forward send, `chunk` is the one whose output is sent; for a forward
/// receive, the one whose input arrives. For a backward send it is the one whose input gradient is sent; for a
/// backward receive, the one whose output gradient arrives. The two numbers differ for messages between the last rank
/// and the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Message {
    /// The channel.
    pub direction: Direction,
    /// Index of the micro-batch.
    pub microbatch: usize,
    /// This rank's chunk that produces or consumes the tensor.
    pub chunk: usize,
    /// The rank at the other end.
    pub peer: usize,
}

/// An instruction of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Instruction {
    /// Run the chunk on a micro-batch. Its input was received before, unless this is the first virtual stage.
    Forward {
        /// Index of the micro-batch.
        microbatch: usize,
        /// Chunk of this rank.
        chunk: usize,
    },
    /// The whole backward: gradients of the input and of the weights.
    Backward {
        /// Index of the micro-batch.
        microbatch: usize,
        /// Chunk of this rank.
        chunk: usize,
    },
    /// The gradient of the input; the gradients of the weights are deferred.
    BackwardInput {
        /// Index of the micro-batch.
        microbatch: usize,
        /// Chunk of this rank.
        chunk: usize,
    },
    /// The deferred gradients of the weights.
    BackwardWeight {
        /// Index of the micro-batch.
        microbatch: usize,
        /// Chunk of this rank.
        chunk: usize,
    },
    /// Select the version of the weights for the computations that follow. Version v has the updates of the first v steps
    /// of the schedule.
    UseWeights {
        /// The version.
        version: usize,
    },
    /// Update the newest weights by the gradients since the last update, which are those of a step. Keep the version before
    /// as long as a later computation selects it, and select the new one, `step + 1`.
    Update {
        /// Index of the step within the schedule.
        step: usize,
    },
    /// Send a tensor to another rank.
    Send(Message),
    /// Receive a tensor from another rank. Executors only start it: the computation that consumes the tensor waits
    /// for it.
    Receive(Message),
    /// Sends and receives that are started together and complete in any order. With blocking sends, two ranks that
    /// both send first and receive afterwards would deadlock.
    Exchange {
        /// Messages sent.
        sends: Vec<Message>,
        /// Messages received.
        receives: Vec<Message>,
    },
}

impl Instruction {
    /// The messages sent by the instruction.
    pub fn sends(&self) -> &[Message] {
        match self {
            Instruction::Send(message) => std::slice::from_ref(message),
            Instruction::Exchange { sends, .. } => sends,
            _ => &[],
        }
    }

    /// The messages received by the instruction.
    pub fn receives(&self) -> &[Message] {
        match self {
            Instruction::Receive(message) => std::slice::from_ref(message),
            Instruction::Exchange { receives, .. } => receives,
            _ => &[],
        }
    }

    /// Micro-batch and chunk of a computation; `None` for messages and for instructions of weights.
    pub fn microbatch_and_chunk(&self) -> Option<(usize, usize)> {
        match *self {
            Instruction::Forward { microbatch, chunk }
            | Instruction::Backward { microbatch, chunk }
            | Instruction::BackwardInput { microbatch, chunk }
            | Instruction::BackwardWeight { microbatch, chunk } => Some((microbatch, chunk)),
            Instruction::UseWeights { .. }
            | Instruction::Update { .. }
            | Instruction::Send(_)
            | Instruction::Receive(_)
            | Instruction::Exchange { .. } => None,
        }
    }

    /// Whether the instruction concerns this rank's weights alone: it computes no micro-batch and sends nothing.
    pub fn is_of_weights(&self) -> bool {
        matches!(self, Instruction::UseWeights { .. } | Instruction::Update { .. })
    }

    /// The direction of a computation's result, with its micro-batch and chunk. `None` for messages and for the
    /// weight part of a backward, whose result stays local.
    pub(in crate::pipeline) fn along(&self) -> Option<(Direction, usize, usize)> {
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
            Instruction::UseWeights { version } => write!(f, "UseWeights(version {version})"),
            Instruction::Update { step } => write!(f, "Update(step {step})"),
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
