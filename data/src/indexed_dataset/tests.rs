//! The published bytes, an independent reader and writer in Python, every field that can be wrong, and damaged files.

use super::*;
use proptest::prelude::*;
use std::process::Command;
use std::time::Instant;
use tempfile::TempDir;

use crate::{DataConfig, Dataset, Split, TokenSource, thread_use, tokenizer::Tokenizer};

/// The index of two documents of one sequence each, of 3 and 2 tokens of 16 bits.
const VECTOR: &str = "4d4d494449445800000100000000000000080200000000000000030000000000000003000000020000000000000000000000060000000000000000000000000000000100000000000000\
                      0200000000000000";

fn from_hex(hex: &str) -> Vec<u8> {
    let digits = hex.as_bytes().as_chunks::<2>().0.iter();
    digits.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

/// Writes documents of sequences.
fn write(prefix: &Path, token_type: TokenType, documents: &[Vec<Vec<u32>>]) {
    let mut builder = IndexedDatasetBuilder::new(prefix, token_type).unwrap();
    for document in documents {
        document.iter().for_each(|sequence| builder.add_sequence(sequence).unwrap());
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
}

/// A folder with the two documents of [`VECTOR`] as `a.idx` and `a.bin`.
fn example() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("a");
    write(&prefix, TokenType::U16, &[vec![vec![5, 6, 7]], vec![vec![8, 9]]]);
    (folder, prefix)
}

/// Opens and reads all that can be read.
fn read_all(path: &Path) -> Result<Vec<Vec<u32>>> {
    let dataset = IndexedDataset::open(path)?;
    dataset.check()?;
    let sequences: Result<Vec<_>> =
        (0..dataset.num_sequences()).map(|sequence| dataset.sequence(sequence)).collect();
    for document in 0..dataset.num_documents() {
        dataset.document(document)?;
    }
    sequences
}

#[test]
fn the_bytes_are_those_of_megatron() {
    let (folder, prefix) = example();
    assert_eq!(std::fs::read(folder.path().join("a.idx")).unwrap(), from_hex(VECTOR));
    assert_eq!(
        std::fs::read(folder.path().join("a.bin")).unwrap(),
        from_hex("05000600070008000900")
    );
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "no part is left");
    for name in ["a", "a.idx", "a.bin"] {
        let read = read_all(&folder.path().join(name)).unwrap();
        assert_eq!(read, [vec![5, 6, 7], vec![8, 9]], "{name}");
    }
    let dataset = IndexedDataset::open(&prefix).unwrap();
    assert_eq!((dataset.document(1).unwrap(), dataset.mode(0).unwrap()), (1..2, None));
    assert_eq!(dataset.sequence_lengths(0..2).unwrap(), [3, 2]);
    for error in [dataset.document(2).err(), dataset.sequence(2).err(), dataset.mode(2).err()] {
        assert!(error.unwrap().to_string().contains(" 2 in a data set of 2"));
    }
}

#[test]
fn a_prefix_may_have_dots_and_modes_and_empty_documents_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("wiki.2026_text_document");
    let mut builder = IndexedDatasetBuilder::new(&prefix, TokenType::I32).unwrap();
    builder.add_sequence_with_mode(&[70_000], 0).unwrap();
    builder.add_sequence_with_mode(&[], -3).unwrap();
    builder.end_document().unwrap();
    builder.end_document().unwrap();
    assert!(builder.add_sequence(&[1]).is_err());
    builder.finish().unwrap();
    let dataset = IndexedDataset::open(&prefix).unwrap();
    assert_eq!((dataset.document(0).unwrap(), dataset.document(1).unwrap()), (0..2, 2..2));
    assert_eq!((dataset.mode(0).unwrap(), dataset.mode(1).unwrap()), (Some(0), Some(-3)));
    assert_eq!((dataset.num_tokens(), dataset.sequence(1).unwrap()), (1, vec![]));
}

#[test]
fn what_cannot_be_written_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("a");
    assert!(IndexedDatasetBuilder::new(&prefix, TokenType::U32).is_err());
    let mut builder = IndexedDatasetBuilder::new(&prefix, TokenType::U16).unwrap();
    let error = builder.add_sequence(&[1, 65_536]).unwrap_err().to_string();
    assert_eq!(error, "data: sequence 0 has token 65536 at position 1, but U16 holds 0 to 65535");
    builder.add_sequence(&[1]).unwrap();
    let error = builder.finish().unwrap_err().to_string();
    assert!(error.contains("1 sequences lie behind the last document"), "{error}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
}

/// A reader and a writer from the description of the format, in nothing but Python's `struct`.
const PYTHON: &str = r#"
import random, struct, sys
FORMATS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
def write(prefix, code, documents):
    sequences = [sequence for document in documents for sequence in document]
    width = struct.calcsize("<" + FORMATS[code])
    with open(prefix + ".bin", "wb") as file:
        for sequence in sequences:
            file.write(struct.pack(f"<{len(sequence)}{FORMATS[code]}", *sequence))
    with open(prefix + ".idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(documents) + 1))
        file.write(struct.pack(f"<{len(sequences)}i", *map(len, sequences)))
        at = 0
        for sequence in sequences:
            file.write(struct.pack("<q", at))
            at += width * len(sequence)
        at = 0
        file.write(struct.pack("<q", 0))
        for document in documents:
            at += len(document)
            file.write(struct.pack("<q", at))
def read(prefix):
    data = open(prefix + ".idx", "rb").read()
    assert data[:9] == b"MMIDIDX\x00\x00"
    version, code, n, d = struct.unpack_from("<QBQQ", data, 9)
    assert version == 1 and len(data) == 34 + 12 * n + 8 * d
    lengths = struct.unpack_from(f"<{n}i", data, 34)
    offsets = struct.unpack_from(f"<{n}q", data, 34 + 4 * n)
    bounds = struct.unpack_from(f"<{d}q", data, 34 + 12 * n)
    tokens = open(prefix + ".bin", "rb").read()
    sequences = [list(struct.unpack_from(f"<{l}{FORMATS[code]}", tokens, o)) for l, o in zip(lengths, offsets)]
    return code, [sequences[a:b] for a, b in zip(bounds, bounds[1:])]
command, folder = sys.argv[1:]
if command == "write":
    random.seed(1234)
    for code, limit in (1, 255), (2, 127), (3, 32767), (4, 2**31 - 1), (5, 2**32 - 1), (8, 65535):
        documents = [[[random.randint(0, limit) for _ in range(random.choice([0, 1, 7, 900]))]
                      for _ in range(random.choice([0, 1, 1, 3]))] for _ in range(300)]
        write(f"{folder}/python{code}", code, documents)
else:
    for code in FORMATS:
        assert read(f"{folder}/python{code}") == read(f"{folder}/rust{code}"), code
"#;

#[test]
fn an_independent_reader_and_writer_agree_to_the_last_bit() {
    let folder = tempfile::tempdir().unwrap();
    let run = |command: &str| {
        Command::new("python3").args(["-c", PYTHON, command]).arg(folder.path()).output()
    };
    let Ok(output) = run("write") else {
        println!("skipped: there is no python3");
        return;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for code in [1, 2, 3, 4, 5, 8] {
        let path = |writer: &str| folder.path().join(format!("{writer}{code}"));
        let dataset = IndexedDataset::open(&path("python")).unwrap();
        dataset.check().unwrap();
        let documents: Vec<Vec<Vec<u32>>> = (0..dataset.num_documents())
            .map(|document| {
                let sequences = dataset.document(document).unwrap();
                sequences.map(|sequence| dataset.sequence(sequence).unwrap()).collect()
            })
            .collect();
        assert_eq!(documents.len(), 300);
        write(&path("rust"), dataset.token_type(), &documents);
        for extension in ["idx", "bin"] {
            let bytes =
                |writer: &str| std::fs::read(path(writer).with_extension(extension)).unwrap();
            assert!(bytes("python") == bytes("rust"), "{code}.{extension}");
        }
    }
    let output = run("read").unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn every_wrong_field_is_named() {
    let rows: [(usize, &[u8], &str); 13] = [
        (0, b"X", "magic: 'XMIDIDX\\x00\\x00' in place of 'MMIDIDX\\x00\\x00'"),
        (9, &[2], "version: 2, and only 1 is known"),
        (17, &[6], "dtype code: 6 is floating-point numbers"),
        (17, &[9], "dtype code: 9 is unknown"),
        (17, &[4], "no multiple of 4, but the dtype code"),
        (18, &[3], "sequence count and document index count: 3 and 3 make a file of 94 bytes"),
        (26, &[0], "document index count: 0"),
        (26, &[0xFF; 8], "and 18446744073709551615 make a file of"),
        (34, &[0xFF; 4], "sequence lengths: -1 for sequence 0, below 0"),
        (34, &[4], "sequence offsets: 6 for sequence 1, but the lengths before it make 8"),
        (50, &[7], "sequence offsets: 7 for sequence 1, no multiple of 2"),
        (58, &[1], "document index: begins with 1, not 0"),
        (74, &[1], "document index: ends with 1, but the sequence count is 2"),
    ];
    let more: [(usize, &[u8], &str); 5] = [
        (38, &[3], "sequence 1 has 3 tokens from byte 6 on, but the .bin has 10 bytes"),
        (38, &[1], "the last sequence ends at byte 8, but"),
        (38, &[0xFE; 4], "sequence lengths: -16843010 for sequence 1, below 0"),
        (50, &[0xFE; 8], "sequence offsets: -"),
        (66, &[9], "document index: entry 1 is 9, not within 0 to 2"),
    ];
    for (at, bytes, words) in rows.into_iter().chain(more) {
        let (folder, prefix) = example();
        let index = folder.path().join("a.idx");
        let mut damaged = from_hex(VECTOR);
        damaged[at..at + bytes.len()].copy_from_slice(bytes);
        std::fs::write(&index, &damaged).unwrap();
        let error = read_all(&prefix).unwrap_err().to_string();
        assert!(
            error.contains(words) && error.contains("a.idx'"),
            "byte {at}: '{error}', not '{words}'"
        );
        // A stream refuses it too.
        assert!(TokenSource::open(&[&prefix], &Tokenizer::Null(100)).is_err(), "byte {at}");
    }
    for (cut, words) in [(20, "header: the file has 20 bytes"), (81, "is it truncated?")] {
        let (folder, prefix) = example();
        std::fs::write(folder.path().join("a.idx"), &from_hex(VECTOR)[..cut]).unwrap();
        let error = read_all(&prefix).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("a.idx'"), "{error}");
    }
    let (folder, prefix) = example();
    std::fs::remove_file(folder.path().join("a.bin")).unwrap();
    let error = read_all(&prefix).unwrap_err().to_string();
    assert!(error.contains("a.bin', which has the tokens of '"), "{error}");
}

#[test]
fn parts_find_wrong_boundaries_up_to_their_end() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("a");
    let documents = [3, 2, 2, 2, 3].map(|sequences| vec![vec![1, 2]; sequences]);
    write(&prefix, TokenType::U16, &documents);
    let index = prefix.with_extension("idx");
    let bytes = std::fs::read(&index).unwrap();
    let dataset = IndexedDataset::open(&prefix).unwrap();
    assert_eq!(dataset.part(0..12).unwrap(), (vec![2; 12], vec![3, 5, 7, 9]));
    assert_eq!(dataset.part(3..9).unwrap(), (vec![2; 6], vec![5, 7]));
    assert_eq!(dataset.part(4..8).unwrap(), (vec![2; 4], vec![5, 7]));
    // The boundaries are the last 6 entries of 8 bytes: 0, 3, 5, 7, 9, 12.
    for (entry, before) in [(1, 0), (2, 3), (3, 5), (4, 7)] {
        let mut damaged = bytes.clone();
        let at = bytes.len() - 8 * (6 - entry);
        damaged[at..at + 8].copy_from_slice(&(-1_i64).to_le_bytes());
        std::fs::write(&index, damaged).unwrap();
        let dataset = IndexedDataset::open(&prefix).unwrap();
        let want = format!("document index: entry {entry} is -1, not within {before} to 12");
        let error = dataset.check().unwrap_err().to_string();
        assert!(error.contains(&want), "{error}");
        for sequences in [0..12, 3..12, 5..12, 7..12, 9..12, 8..10] {
            let error = dataset.part(sequences.clone()).unwrap_err().to_string();
            assert!(error.contains(&want), "{sequences:?} with entry {entry}: {error}");
        }
        // A part that ends in front of it does not read it.
        if before > 0 {
            assert_eq!(dataset.part(0..before).unwrap().0.len(), before as usize);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn damaged_bytes_are_an_error_or_data_that_fits(
        damage in proptest::collection::vec((0..82_usize, any::<u8>()), 1..6),
        cut in prop_oneof![4 => Just(82_usize), 1 => 0..82_usize],
        longer in prop_oneof![4 => Just(0_usize), 1 => 0..40_usize],
        bin in prop_oneof![4 => Just(10_usize), 1 => 0..24_usize],
    ) {
        let (folder, prefix) = example();
        let mut bytes = from_hex(VECTOR);
        damage.iter().for_each(|&(at, byte)| bytes[at] = byte);
        bytes.truncate(cut);
        bytes.resize(bytes.len() + longer, 0);
        std::fs::write(folder.path().join("a.idx"), bytes).unwrap();
        std::fs::write(folder.path().join("a.bin"), vec![1; bin]).unwrap();
        match read_all(&prefix) {
            Ok(sequences) => {
                let dataset = IndexedDataset::open(&prefix).unwrap();
                let tokens: usize = sequences.iter().map(Vec::len).sum();
                prop_assert_eq!(tokens as u64, dataset.num_tokens());
                prop_assert_eq!(tokens * dataset.token_type().bytes(), bin);
            }
            Err(error) => prop_assert!(error.to_string().contains("a.idx'"), "{}", error),
        }
        // Without the check, what is read is within the file or refused.
        if let Ok(dataset) = IndexedDataset::open(&prefix) {
            for i in 0..dataset.num_sequences().max(dataset.num_documents()).min(100) {
                let _ = (dataset.sequence(i), dataset.document(i), dataset.mode(i));
            }
        }
    }
}

#[test]
fn data_sets_are_streams_like_other_token_files() {
    let (folder, prefix) = example();
    write(&folder.path().join("b"), TokenType::I32, &[vec![vec![70_000, 1]]]);
    let both = [prefix, folder.path().join("b.idx")];
    let source = TokenSource::open(&both, &Tokenizer::Null(70_001)).unwrap();
    assert_eq!(source.to_vec().unwrap(), [5, 6, 7, 8, 9, 70_000, 1]);
    // A folder's .bin files have their indices beside them.
    let mut config = DataConfig::new(folder.path());
    config.split = Split::valid_fraction(0.0).unwrap();
    let dataset = Dataset::open(&config, &Tokenizer::Null(70_001)).unwrap();
    assert_eq!(dataset.train.to_vec().unwrap(), source.to_vec().unwrap());
    let error = TokenSource::open(&both, &Tokenizer::Null(100)).unwrap_err().to_string();
    assert!(
        error.contains("b.bin' has token 70000 at position 0, but the vocabulary has 100"),
        "{error}"
    );
    let error = config.text().unwrap_err().to_string();
    assert!(error.contains("holds tokens") && error.contains("--vocab-size"), "{error}");
    let negative = folder.path().join("c");
    write(&negative, TokenType::I32, &[vec![vec![1, 2]]]);
    std::fs::write(folder.path().join("c.bin"), [1, 0, 0, 0, 0xFE, 0xFF, 0xFF, 0xFF]).unwrap();
    let error = TokenSource::open(&[negative], &Tokenizer::Null(100)).unwrap_err().to_string();
    assert!(error.contains("c.bin' has token -2 at position 1"), "{error}");
}

/// Ten terabytes: 10 000 sets of 5 x 10^8 tokens, as sparse files.
#[test]
fn ten_terabytes_in_ten_thousand_files_open_at_once() {
    const FILES: usize = 10_000;
    const TOKENS: u64 = 500_000_000;
    let folder = tempfile::tempdir().unwrap();
    let first = folder.path().join("shard-0");
    write(&first, TokenType::U16, &[vec![vec![7]]]);
    let mut index = std::fs::read(first.with_extension("idx")).unwrap();
    index[34..38].copy_from_slice(&(TOKENS as i32).to_le_bytes());
    let prefixes: Vec<PathBuf> =
        (0..FILES).map(|file| folder.path().join(format!("shard-{file}"))).collect();
    for prefix in &prefixes {
        std::fs::write(prefix.with_extension("idx"), &index).unwrap();
        File::create(prefix.with_extension("bin")).unwrap().set_len(2 * TOKENS).unwrap();
    }
    let open_files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let (before, start, reads) = (open_files(), Instant::now(), thread_use::reads());
    let processor = thread_use::processor_seconds();
    let source = TokenSource::open(&prefixes, &Tokenizer::Null(50_304)).unwrap();
    let processor = thread_use::processor_seconds() - processor;
    let seconds = start.elapsed().as_secs_f64();
    let (calls, bytes) = thread_use::reads();
    let reads = ((calls - reads.0) / FILES as u64, (bytes - reads.1) / FILES as u64);
    println!(
        "{FILES} data sets of {} tokens in {seconds:.2} s, {processor:.2} of a processor; reads of each and their bytes: {reads:?}",
        source.len()
    );
    assert_eq!(source.len(), FILES as u64 * TOKENS);
    assert!(open_files() < before + 64, "{} descriptors", open_files());
    // By the clock it is as long, unless others use the machine.
    assert!(processor < 1.0, "{processor} s");
    assert!(reads.0 <= 8 && reads.1 <= 128, "{reads:?}");
    let mut tokens = [1; 4];
    source.read(source.len() - 4, &mut tokens).unwrap();
    source.read(TOKENS * 5000 - 2, &mut tokens).unwrap();
    assert_eq!(tokens, [0; 4]);
}
