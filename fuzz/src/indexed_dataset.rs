//! Megatron's `.idx`, behind a byte for the length of the `.bin`.

use crate::folder::{path, write};
use ferrotron_data::{IndexedDataset, IndexedDatasetBuilder, TokenType};
use ferrotron_tensor::Result;

/// Sequences and documents that are read at most.
const MOST: u64 = 100;

pub fn seeds() -> Vec<Vec<u8>> {
    [TokenType::U16, TokenType::I32].map(seed).into()
}

/// Two documents of three and two tokens.
fn seed(token_type: TokenType) -> Vec<u8> {
    let prefix = path("seed");
    let mut builder = IndexedDatasetBuilder::new(&prefix, token_type).expect("files can be made");
    for sequence in [&[5, 6, 7][..], &[8, 9]] {
        builder.add_sequence(sequence).expect("tokens fit");
        builder.end_document().expect("a document can end");
    }
    builder.finish().expect("files can be written");
    let bin = std::fs::metadata(path("seed.bin")).expect("it was written").len();
    let index = std::fs::read(path("seed.idx")).expect("it was written");
    [vec![u8::try_from(bin).expect("it is short")], index].concat()
}

pub fn read(bytes: &[u8]) -> bool {
    let Some((&length, index)) = bytes.split_first() else { return false };
    write(&path("a.bin"), &vec![1; length.into()]);
    write(&path("a.idx"), index);
    read_all().is_ok()
}

fn read_all() -> Result<()> {
    let dataset = IndexedDataset::open(&path("a"))?;
    let checked = dataset.check();
    for i in 0..dataset.num_sequences().min(MOST) {
        let (sequence, mode) = (dataset.sequence(i), dataset.mode(i));
        if checked.is_ok() {
            sequence?;
            mode?;
        }
    }
    for i in 0..dataset.num_documents().min(MOST) {
        let document = dataset.document(i);
        if checked.is_ok() {
            document?;
        }
    }
    checked
}
