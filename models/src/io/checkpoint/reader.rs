//! Reading parts of tensors out of the files that hold their pieces.

use ferrotron_tensor::{Error, Result, ShardSpec, Tensor};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;

use super::index::TensorRecord;
use super::read_plan::difference;
use super::slices::{Copy, boxes};
use crate::io::tensor_file::TensorFile;

/// Most files of a checkpoint that are open at once: systems allow a process 256 to 1024 in all.
const MAX_OPEN: usize = 32;

/// The files of a checkpoint, opened as they are needed. Their headers stay in memory.
pub(super) struct CheckpointReader<'a> {
    folder: &'a Path,
    files: BTreeMap<&'a str, TensorFile>,
    /// The files that are open, the one used last at the end.
    open: VecDeque<&'a str>,
}

impl<'a> CheckpointReader<'a> {
    pub fn new(folder: &'a Path) -> CheckpointReader<'a> {
        CheckpointReader { folder, files: BTreeMap::new(), open: VecDeque::new() }
    }

    /// The file of this name, ready to be read.
    fn file(&mut self, name: &'a str) -> Result<&mut TensorFile> {
        self.open.retain(|other| *other != name);
        if self.open.len() == MAX_OPEN
            && let Some(oldest) = self.open.pop_front().and_then(|name| self.files.get_mut(name))
        {
            oldest.close();
        }
        self.open.push_back(name);
        match self.files.entry(name) {
            Entry::Occupied(file) => Ok(file.into_mut()),
            Entry::Vacant(entry) => {
                let file = TensorFile::open(&self.folder.join(name));
                Ok(entry.insert(file.map_err(|fault| Error::io("checkpoint", fault))?))
            }
        }
    }

    /// Writes what lies at `place` to `target`, a contiguous tensor of its local dims, in the target's type.
    pub fn read(
        &mut self,
        record: &'a TensorRecord,
        place: &ShardSpec,
        target: &mut Tensor,
    ) -> Result<()> {
        if record.dtype()? == target.dtype() {
            return self.fill(record, place, target);
        }
        let mut stored = Tensor::empty(target.device(), record.dtype()?, target.dims())?;
        self.fill(record, place, &mut stored)?;
        target.copy_from(&stored.cast(target.dtype())?)
    }

    /// Writes what lies at `place` to `target`, a contiguous tensor of its local dims and the stored type.
    fn fill(
        &mut self,
        record: &'a TensorRecord,
        place: &ShardSpec,
        target: &mut Tensor,
    ) -> Result<()> {
        let size = target.dtype().size();
        let dims = target.dims().to_vec();
        target.write_bytes(|bytes| self.fill_bytes(record, place, (size, &dims), bytes))
    }

    /// The same for the bytes of elements of `size` bytes.
    fn fill_bytes(
        &mut self,
        record: &'a TensorRecord,
        place: &ShardSpec,
        (size, dims): (usize, &[usize]),
        target: &mut [u8],
    ) -> Result<()> {
        for (wanted, local) in boxes(place) {
            for piece in &record.pieces {
                let Some(both) = wanted.intersection(&piece.slice) else { continue };
                let file = self.file(&piece.file)?;
                let from = difference(&both.offset, &piece.slice.offset);
                let to: Vec<usize> = difference(&both.offset, &wanted.offset)
                    .iter()
                    .zip(&local)
                    .map(|(a, b)| a + b)
                    .collect();
                let copy = Copy {
                    shape: &both.shape,
                    source: (&piece.slice.shape, &from),
                    target: (dims, &to),
                };
                copy.runs(|from, to, length| {
                    let run = &mut target[to * size..(to + length) * size];
                    file.read(&piece.key, from * size, run)
                })
                .map_err(|fault| Error::io("checkpoint", fault))?;
            }
        }
        Ok(())
    }
}
