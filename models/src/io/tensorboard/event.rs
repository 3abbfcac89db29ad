//! The messages `Event`, `Summary` and their parts in the wire format of protocol buffers.
//!
//! Field numbers are those of `event.proto`, `summary.proto`, `tensor.proto` and `tensor_shape.proto` of TensorBoard.

/// Wire types of protocol buffers.
const VARINT: u64 = 0;
const FIXED_64: u64 = 1;
const LENGTH: u64 = 2;
const FIXED_32: u64 = 5;

/// `DT_STRING` of `types.proto`.
const STRING: u64 = 7;
/// `DATA_CLASS_TENSOR` of `summary.proto`.
const TENSOR_CLASS: u64 = 2;
/// `START` of `SessionLog.SessionStatus`.
const SESSION_START: u64 = 1;

/// One value of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum EventValue<'a> {
    /// A point of a curve.
    Scalar(f32),
    /// A text in Markdown.
    Text(&'a str),
}

/// A message on its way to bytes.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn raw_varint(mut self, mut value: u64) -> Self {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
        self
    }

    fn key(self, field: u64, wire_type: u64) -> Self {
        self.raw_varint(field << 3 | wire_type)
    }

    fn varint(self, field: u64, value: u64) -> Self {
        self.key(field, VARINT).raw_varint(value)
    }

    fn double(self, field: u64, value: f64) -> Self {
        let mut message = self.key(field, FIXED_64);
        message.0.extend(value.to_le_bytes());
        message
    }

    fn float(self, field: u64, value: f32) -> Self {
        let mut message = self.key(field, FIXED_32);
        message.0.extend(value.to_le_bytes());
        message
    }

    fn bytes(self, field: u64, value: &[u8]) -> Self {
        let mut message = self.key(field, LENGTH).raw_varint(value.len() as u64);
        message.0.extend(value);
        message
    }

    fn message(self, field: u64, value: Message) -> Self {
        self.bytes(field, &value.0)
    }
}

/// The first event of every file.
pub fn file_version(wall_time: f64) -> Vec<u8> {
    Message::default().double(1, wall_time).bytes(3, b"brain.Event:2").0
}

/// Tells readers that events of `step` and of later steps in earlier files are void.
pub fn session_start(wall_time: f64, step: u64) -> Vec<u8> {
    let start = Message::default().varint(1, SESSION_START);
    Message::default().double(1, wall_time).varint(2, step).message(7, start).0
}

/// The values of a step, each under its tag.
pub fn summary(wall_time: f64, step: u64, values: &[(String, EventValue)]) -> Vec<u8> {
    let values = values.iter().fold(Message::default(), |summary, (tag, value)| {
        let named = Message::default().bytes(1, tag.as_bytes());
        summary.message(
            1,
            match value {
                EventValue::Scalar(value) => named.float(2, *value),
                EventValue::Text(text) => named.message(8, tensor(text)).message(9, text_plugin()),
            },
        )
    });
    Message::default().double(1, wall_time).varint(2, step).message(5, values).0
}

/// A tensor of one string.
fn tensor(text: &str) -> Message {
    let dim = Message::default().varint(1, 1);
    let shape = Message::default().message(2, dim);
    Message::default().varint(1, STRING).message(2, shape).bytes(8, text.as_bytes())
}

/// The metadata with which TensorBoard shows a tensor on its page of texts.
fn text_plugin() -> Message {
    let plugin = Message::default().bytes(1, b"text");
    Message::default().message(1, plugin).varint(4, TENSOR_CLASS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::tensorboard::record;

    fn hex(event: &[u8]) -> String {
        let mut records = Vec::new();
        record::push(&mut records, event);
        records.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Records that TensorBoard 2.21 reads as these events.
    #[test]
    fn events_are_those_of_tensorboard() {
        assert_eq!(
            hex(&file_version(1.0)),
            "1800000000000000a37f4b2209000000000000f03f1a0d627261696e2e4576656e743a3286bf577a"
        );
        let loss = [("loss".to_string(), EventValue::Scalar(2.5))];
        assert_eq!(
            hex(&summary(1.0, 7, &loss)),
            "1a00000000000000129bd82d09000000000000f03f10072a0d0a0b0a046c6f7373150000204087ccc43d"
        );
    }

    #[test]
    fn long_numbers_take_several_bytes() {
        assert_eq!(Message::default().varint(1, 300).0, [0x08, 0xac, 0x02]);
        assert_eq!(Message::default().raw_varint(u64::MAX).0.len(), 10);
    }
}
