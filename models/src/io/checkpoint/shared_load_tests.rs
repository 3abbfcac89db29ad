//! Loads by several ranks together, in windows that cut tensors anywhere.

use super::shared_load::{WINDOW, Wanted, load_shared};
use super::*;
use ferrotron_parallel::collective::{Group, WorldConfig, run_threads};
use ferrotron_tensor::{DType, Device, Result, ShardSpec, Tensor};
use std::fs;
use std::path::{Path, PathBuf};

const DIMS: [usize; 2] = [6, 5];

fn values(tensor: usize) -> Vec<f32> {
    (0..30).map(|i| (100 * tensor + i) as f32).collect()
}

/// A checkpoint of two matrices, by two ranks that have rows of the first and columns of the second.
fn saved(dir: &Path) -> PathBuf {
    let ranks = run_threads(2, &WorldConfig::default(), |world| {
        let (world, device) = (world.everyone()?, Device::cpu(1)?);
        let (r, half) = (world.rank(), [(0, 2), (2, 3)]);
        let places = [
            ShardSpec::new(&DIMS, &[&[(3 * r, 3)], &[(0, 5)]])?,
            ShardSpec::new(&DIMS, &[&[(0, 6)], &[half[r]]])?,
        ];
        let shard = |(i, place): (usize, ShardSpec)| -> Result<LocalShard> {
            let mut tensor = Tensor::from_slice(&device, &values(i), &DIMS)?;
            for d in 0..2 {
                let (start, length) = place.pieces(d)[0];
                tensor = tensor.narrow(d as isize, start, length)?;
            }
            Ok(LocalShard { name: format!("w{i}"), place, tensor: tensor.copy()? })
        };
        let snapshot = Snapshot {
            weights: places.into_iter().enumerate().map(shard).collect::<Result<_>>()?,
            moments: None,
            model: SavedModel::new("matrices", &())?,
            progress: &TrainState { step: 1, ..TrainState::default() },
            tokenizer: None,
            run: serde_json::Value::Null,
        };
        save(dir, &world, snapshot)
    });
    ranks.into_iter().next().unwrap().unwrap()
}

/// The tensors that each rank wants, not in the order of the index, and one of them twice.
const WANTED: [usize; 3] = [1, 0, 1];

/// The numbers of each tensor that was wanted, and the bytes that this rank read.
type Loaded = (Vec<Vec<f64>>, u64);

/// Loads a part of each wanted matrix, in a dtype, and returns the values and the bytes that were read.
fn load(
    checkpoint: &Checkpoint,
    (world, window): (&Group, u64),
    place: &ShardSpec,
    dtype: DType,
) -> Result<std::result::Result<Loaded, String>> {
    let host = Device::cpu(1)?;
    let record = |tensor| &checkpoint.index.tensors[&format!("w{tensor}")];
    let wanted: Vec<Wanted> = WANTED.map(|tensor| (record(tensor), place.clone())).into();
    let empty = |_| Tensor::full(&host, dtype, place.dims(), -1.0);
    let mut targets = wanted.iter().map(empty).collect::<Result<Vec<_>>>()?;
    let read = load_shared(
        (&checkpoint.folder, &checkpoint.index),
        (world, window),
        &wanted,
        &mut |target, write| write(&mut targets[target]),
    )?;
    let found = targets.iter().map(Tensor::to_f64).collect::<Result<_>>()?;
    Ok(read.map(|read| (found, read)))
}

#[test]
fn windows_of_any_size_give_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::peek(&saved(folder.path())).unwrap();
    let bytes: u64 = (1..=2)
        .map(|i| checkpoint.index.files[&format!("model-{i:05}-of-00002.safetensors")].bytes)
        .sum();
    let pieces: [[&[(usize, usize)]; 2]; 4] = [
        [&[(0, 6)], &[(0, 5)]],
        [&[(1, 4)], &[(2, 2)]],
        [&[(5, 1), (0, 2)], &[(4, 1), (0, 3)]],
        [&[(2, 0)], &[(0, 5)]],
    ];
    for (ranks, window) in [(1, 8), (1, 1000), (2, 24), (3, 8), (4, 100), (4, 1 << 20)] {
        for dtype in [DType::F32, DType::BF16] {
            let found = run_threads(ranks, &WorldConfig::default(), |world| {
                let world = world.everyone()?;
                let place = ShardSpec::new(&DIMS, &pieces[world.rank()])?;
                load(&checkpoint, (&world, window), &place, dtype)
            });
            let mut read = 0;
            for (rank, found) in found.into_iter().enumerate() {
                let (found, own) = found.unwrap().unwrap();
                read += own;
                for (tensor, found) in WANTED.into_iter().zip(&found) {
                    let all = |ranges: &[(usize, usize)]| -> Vec<usize> {
                        ranges.iter().flat_map(|&(start, len)| start..start + len).collect()
                    };
                    let [rows, columns] = pieces[rank].map(all);
                    let numbers =
                        rows.iter().flat_map(|row| columns.iter().map(move |c| 5 * row + c));
                    let want: Vec<f64> = numbers.map(|i| values(tensor)[i].into()).collect();
                    assert_eq!(*found, want, "{ranks} ranks, {window} bytes, rank {rank}, {dtype}");
                }
            }
            assert_eq!(read, bytes);
        }
    }
}

/// Damage is found by one rank and told by all, and their group still works.
#[test]
fn all_ranks_tell_of_damage() {
    let folder = tempfile::tempdir().unwrap();
    let saved = saved(folder.path());
    let checkpoint = Checkpoint::peek(&saved).unwrap();
    let file = saved.join("model-00002-of-00002.safetensors");
    let whole = fs::read(&file).unwrap();
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    for (bytes, told) in [(&flipped[..], "checksum"), (&whole[..whole.len() - 1], "bytes, not")] {
        fs::write(&file, bytes).unwrap();
        for window in [24, 1 << 20] {
            let found = run_threads(3, &WorldConfig::default(), |world| {
                let world = world.everyone()?;
                let place = ShardSpec::unsharded(&DIMS);
                let found = load(&checkpoint, (&world, window), &place, DType::F32)?;
                world.barrier().wait()?;
                Ok(found)
            });
            let faults: Vec<String> =
                found.into_iter().map(|found| found.unwrap().unwrap_err()).collect();
            assert!(
                faults[0].contains("model-00002-of-00002") && faults[0].contains(told),
                "{faults:?}"
            );
            assert!(faults.iter().all(|fault| *fault == faults[0]), "{faults:?}");
        }
    }
}

/// Ranks that hold shards of their own, as with ZeRO, are told of the wishes of the few that need bytes of theirs.
#[test]
fn bytes_of_wishes_grow_as_ranks() {
    const ROWS: usize = 4096;
    let folder = tempfile::tempdir().unwrap();
    let host = Device::cpu(1).unwrap();
    let shard = |name: &str, dims: &[usize]| LocalShard {
        name: name.into(),
        place: ShardSpec::unsharded(dims),
        tensor: Tensor::full(&host, DType::F32, dims, 1.0).unwrap(),
    };
    let saved = run_threads(1, &WorldConfig::default(), |world| {
        let snapshot = Snapshot {
            weights: vec![shard("w0", &[ROWS, 1]), shard("w1", &[1])],
            moments: None,
            model: SavedModel::new("rows", &())?,
            progress: &TrainState { step: 1, ..TrainState::default() },
            tokenizer: None,
            run: serde_json::Value::Null,
        };
        save(folder.path(), &world.everyone()?, snapshot)
    });
    let checkpoint = Checkpoint::peek(&saved.into_iter().next().unwrap().unwrap()).unwrap();
    let sent = |size: usize| -> u64 {
        let ranks = run_threads(size, &WorldConfig::default(), |world| {
            let world = world.everyone()?;
            let rows = ROWS / size;
            let rows = ShardSpec::new(&[ROWS, 1], &[&[(rows * world.rank(), rows)], &[(0, 1)]])?;
            let tensors = &checkpoint.index.tensors;
            let wanted: [Wanted; 2] =
                [(&tensors["w0"], rows.clone()), (&tensors["w1"], ShardSpec::unsharded(&[1]))];
            let mut targets = [
                Tensor::full(&host, DType::F32, rows.dims(), 0.0)?,
                Tensor::full(&host, DType::F32, &[1], 0.0)?,
            ];
            let read = load_shared(
                (&checkpoint.folder, &checkpoint.index),
                (&world, WINDOW),
                &wanted,
                &mut |target, write| write(&mut targets[target]),
            )?;
            assert!(read.is_ok());
            assert!(targets.iter().all(|it| it.to_f64().unwrap().iter().all(|&x| x == 1.0)));
            Ok(world.traffic().bytes())
        });
        ranks.into_iter().map(std::result::Result::unwrap).sum()
    };
    let (few, many) = (sent(16), sent(128));
    assert!(many < 16 * few, "{few} and {many} bytes");
}
