//! The files that one rank writes into a checkpoint: model and optimizer, of live tensors or of copies of them.

use ferrotron_parallel::collective::Group;
use ferrotron_tensor::{Error, Result, Tensor};
use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use super::index::{Index, SliceRecord, TensorRecord};
use super::shards::LocalShard;
use super::slices::boxes;
use super::snapshot_buffers::SnapshotBuffers;
use crate::io::checked_file::{ChecksumWriter, Fault, write_bytes};
use crate::io::tensor_file::{FileTensor, put_tensor, write_tensor_file};

/// The output of a rank: tensors by file, in the order of the files, and their places in the checkpoint.
pub(super) struct RankFiles {
    index: Index,
    files: Vec<(String, Vec<FileTensor>)>,
    values: Values,
}

/// The values of all tensors, one after another.
enum Values {
    Live(Vec<Tensor>),
    Copied(SnapshotBuffers),
}

impl RankFiles {
    pub fn new() -> RankFiles {
        RankFiles { index: Index::new(), files: Vec::new(), values: Values::Live(Vec::new()) }
    }

    /// The files of this rank of `world`.
    pub fn of_rank(
        world: &Group,
        weights: Vec<LocalShard>,
        moments: Option<Vec<LocalShard>>,
    ) -> Result<RankFiles> {
        let mut files = RankFiles::new();
        files.add(&file_name("model", world), weights)?;
        files.add(&file_name("optimizer", world), moments.unwrap_or_default())?;
        Ok(files)
    }

    /// Adds a file with a tensor for each box of the shards' places; none if there are no shards.
    pub fn add(&mut self, file: &str, shards: Vec<LocalShard>) -> Result<()> {
        let Values::Live(values) = &mut self.values else {
            return Err(Error::value("checkpoint", "copies of tensors are complete"));
        };
        let (mut tensors, mut parts) = (Vec::new(), HashMap::<String, usize>::new());
        for LocalShard { name, place, tensor } in shards {
            let record = self.index.tensors.entry(name.clone()).or_insert_with(|| TensorRecord {
                dtype: tensor.dtype().to_string(),
                shape: place.global_dims().to_vec(),
                pieces: Vec::new(),
            });
            for (slice, local) in boxes(&place) {
                // A whole tensor has its own name; the parts of one are numbered.
                let number = parts.entry(name.clone()).or_default();
                let key = match slice.shape == record.shape {
                    true => name.clone(),
                    false => format!("{name}#{number}"),
                };
                *number += 1;
                let mut part = tensor.clone();
                for (d, (&start, &len)) in local.iter().zip(&slice.shape).enumerate() {
                    part = part.narrow(d as isize, start, len)?;
                }
                let (file, start) = (file.to_string(), 0);
                record.pieces.push(SliceRecord { file, key: key.clone(), slice, start });
                tensors.push((FileTensor::new(key, &part), part));
            }
        }
        if !tensors.is_empty() {
            tensors.sort_by(|(a, _), (b, _)| a.file_order(b));
            let (described, parts): (Vec<_>, Vec<_>) = tensors.into_iter().unzip();
            self.files.push((file.to_string(), described));
            values.extend(parts);
        }
        Ok(())
    }

    /// The tensors, unless they were replaced by copies.
    pub fn live(&self) -> &[Tensor] {
        match &self.values {
            Values::Live(tensors) => tensors,
            Values::Copied(_) => &[],
        }
    }

    /// The same files with copies of the values in `buffers`.
    pub fn copied(self, buffers: &SnapshotBuffers) -> Result<RankFiles> {
        let copies = buffers.copy(self.live())?;
        Ok(RankFiles { values: Values::Copied(copies), ..self })
    }

    /// Writes the files into `folder`, and returns what is in them. Errors soon after `cancelled` is set.
    pub fn write(self, folder: &Path, cancelled: &AtomicBool) -> std::result::Result<Index, Fault> {
        let RankFiles { mut index, files, values } = self;
        let mut copies = match &values {
            Values::Live(_) => None,
            Values::Copied(buffers) => Some(buffers.lock()),
        };
        let mut first = 0;
        for (file, tensors) in files {
            let put = |i: usize, writer: &mut ChecksumWriter| match (&values, &mut copies) {
                (Values::Live(tensors), _) => put_tensor(&tensors[first + i], writer),
                (_, Some(copies)) => copies[first + i].put(writer),
                (Values::Copied(_), None) => Err(io::Error::other("copies that were not locked")),
            };
            let path = folder.join(&file);
            let record =
                write_tensor_file(&path, Some(("format", "pt")), &tensors, cancelled, put)?;
            first += tensors.len();
            index.files.insert(file, record);
        }
        Ok(index)
    }
}

/// Leaves what this rank wrote beside its files, for the first rank.
pub(super) fn write_part(
    folder: &Path,
    rank: usize,
    index: &Index,
) -> std::result::Result<(), Fault> {
    let text = serde_json::to_string_pretty(index).map_err(|error| error.to_string())?;
    write_bytes(&folder.join(part_name(rank)), text.as_bytes()).map(drop)
}

/// The list of a rank's files, which the first rank puts into the index.
pub(super) fn part_name(rank: usize) -> String {
    format!("index-{rank:05}.json")
}

/// One ordinary file where there is one rank; else numbered as Hugging Face numbers shards.
fn file_name(name: &str, world: &Group) -> String {
    match (world.rank() + 1, world.size()) {
        (_, 1) => format!("{name}.safetensors"),
        (rank, ranks) => format!("{name}-{rank:05}-of-{ranks:05}.safetensors"),
    }
}
