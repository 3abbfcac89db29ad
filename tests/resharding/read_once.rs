//! The bytes that ranks read and write: each byte of a checkpoint is read once over all ranks, and data-parallel ranks
//! write equal shares.

use ferrotron::nn::Sharding;
use ferrotron::tensor::Result;
use std::path::Path;

use super::train::{Layout, Task, difference, run};
use super::{task, tied, untied};

/// The lengths of the files of tensors of the last checkpoint in `folder`, by name.
fn files(folder: &Path) -> Vec<(String, u64)> {
    let latest = std::fs::read_to_string(folder.join("latest")).unwrap();
    let entries =
        std::fs::read_dir(folder.join(latest.trim())).unwrap().map(|entry| entry.unwrap());
    let entries = entries
        .map(|entry| (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().len()));
    let mut files: Vec<_> = entries.filter(|(name, _)| name.ends_with(".safetensors")).collect();
    files.sort();
    files
}

/// Bytes of the lists of what ranks want, which one rank sends up the tree at most, and a checksum.
const LISTS: u64 = 12_000;

const LAYOUTS: [Layout; 5] = [
    Layout { tp: 2, pp: 2, dp: 2, sharding: Sharding::Optimizer, ..Layout::SERIAL },
    Layout::SERIAL,
    Layout { tp: 2, dp: 4, sharding: Sharding::Weights, ..Layout::SERIAL },
    Layout { pp: 2, dp: 2, chunks: 2, ..Layout::SERIAL },
    Layout { dp: 8, ..Layout::SERIAL },
];

#[test]
fn every_byte_is_read_once() -> Result<()> {
    let model = untied();
    for saved_in in &LAYOUTS[..2] {
        let folder = tempfile::tempdir().unwrap();
        let save = Task { steps: 1, save: Some(folder.path()), ..task(&model, *saved_in) };
        let saved = run(&save)?;
        let total: u64 = files(folder.path()).iter().map(|(_, bytes)| bytes).sum();
        for layout in LAYOUTS {
            let load = Task { seed: 4321, load: Some(folder.path()), ..task(&model, layout) };
            let loaded = run(&load)?;
            assert_eq!(difference(&loaded.tensors, &saved.tensors), None, "{saved_in} -> {layout}");
            let read: u64 = loaded.traffic.iter().map(|(read, _)| read).sum();
            assert_eq!(read, total, "{saved_in} -> {layout}: {:?}", loaded.traffic);
            for &(read, sent) in &loaded.traffic {
                let share = total / layout.ranks() as u64;
                // Cuts are multiples of 8 bytes, also in files.
                assert!(read.abs_diff(share) <= 8 * 20, "{layout}: {read} of {total}");
                let most = read * (layout.ranks() as u64 - 1) + LISTS;
                assert!(sent <= most, "{layout}: sent {sent} of {read} bytes");
            }
        }
        // Nothing is sent that no rank needs: a serial run and ranks that hold the same get each byte once.
        let load =
            Task { load: Some(folder.path()), ..task(&model, Layout::data(2, Sharding::None)) };
        let sent: u64 = run(&load)?.traffic.iter().map(|(_, sent)| sent).sum();
        assert!(
            sent <= total + LISTS && sent + 2 * 65_536 >= total,
            "{saved_in}: sent {sent} of {total}"
        );
    }
    Ok(())
}

#[test]
fn data_parallel_ranks_write_equal_shares() -> Result<()> {
    let model = tied();
    for sharding in [Sharding::None, Sharding::Optimizer] {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout::data(4, sharding);
        run(&Task { steps: 1, save: Some(folder.path()), ..task(&model, layout) })?;
        let files = files(folder.path());
        assert_eq!(files.len(), 8, "{files:?}");
        let total: u64 = files.iter().map(|(_, bytes)| bytes).sum();
        for rank in 1..=4 {
            let own = files.iter().filter(|(name, _)| name.contains(&format!("-{rank:05}-of-")));
            let own: u64 = own.map(|(_, bytes)| bytes).sum();
            assert!(
                own * 4 <= total * 11 / 10,
                "{sharding:?}: rank {rank} writes {own} of {total}"
            );
        }
    }
    Ok(())
}
