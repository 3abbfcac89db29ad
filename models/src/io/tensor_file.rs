//! Safetensors files, written and read as streams: no tensor is ever held twice.
//!
//! The format (<https://github.com/huggingface/safetensors>): 8 bytes with the length n of the header,
//! n bytes of JSON that give each tensor's dtype, shape and byte range, then the bytes, little-endian
//! and row-major. The header is the `safetensors` crate's, what follows is ours.
//!
//! Functions here fail with a [`Fault`]; callers add what to do about it.

use ferrotron_tensor::{DType, Tensor};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use std::cmp::Ordering;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use crate::io::checked_file::{CHUNK, ChecksumWriter, Fault, FileRecord, cannot, write_chunks};

/// Largest header in bytes: the limit of the `safetensors` crate.
const MAX_HEADER: u64 = 100_000_000;

/// A tensor of a file, without its values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileTensor {
    pub name: String,
    pub dtype: DType,
    pub dims: Vec<usize>,
}

impl FileTensor {
    pub fn new(name: String, tensor: &Tensor) -> FileTensor {
        FileTensor { name, dtype: tensor.dtype(), dims: tensor.dims().to_vec() }
    }

    /// The order in a file: wide types first, so that every tensor is aligned; the order of the names makes files equal.
    pub fn file_order(&self, other: &FileTensor) -> Ordering {
        other.dtype.size().cmp(&self.dtype.size()).then(self.name.cmp(&other.name))
    }
}

/// Writes tensors and a line of metadata to a new safetensors file, and waits until the disk has it. Views are made
/// dense one by one.
pub(crate) fn write_tensors(
    path: &Path,
    metadata: Option<(&str, &str)>,
    tensors: Vec<(String, Tensor)>,
) -> Result<FileRecord, Fault> {
    let described = |(name, tensor)| (FileTensor::new(name, &tensor), tensor);
    let mut tensors: Vec<(FileTensor, Tensor)> = tensors.into_iter().map(described).collect();
    tensors.sort_by(|(a, _), (b, _)| a.file_order(b));
    let (contents, tensors): (Vec<FileTensor>, Vec<Tensor>) = tensors.into_iter().unzip();
    write_tensor_file(path, metadata, &contents, &AtomicBool::new(false), |i, writer| {
        put_tensor(&tensors[i], writer)
    })
}

/// Writes the bytes of a tensor, which is made dense for it.
pub(crate) fn put_tensor(tensor: &Tensor, writer: &mut ChecksumWriter) -> std::io::Result<()> {
    let dense = tensor.contiguous().map_err(std::io::Error::other)?;
    writer.put(&dense.bytes().map_err(std::io::Error::other)?)
}

/// Writes a new safetensors file with a line of metadata and the tensors `contents`, in their
/// [order](FileTensor::file_order), and waits until the disk has it. `put` writes the bytes of the tensor with a number.
///
/// Errors soon after `cancelled` is set.
pub(crate) fn write_tensor_file(
    path: &Path,
    metadata: Option<(&str, &str)>,
    contents: &[FileTensor],
    cancelled: &AtomicBool,
    mut put: impl FnMut(usize, &mut ChecksumWriter) -> std::io::Result<()>,
) -> Result<FileRecord, Fault> {
    let (count, mut end) = (contents.len(), 0);
    let infos = contents.iter().map(|tensor| {
        let start = end;
        end += tensor.dims.iter().product::<usize>() * tensor.dtype.size();
        let (dtype, shape) = (file_dtype(tensor.dtype), tensor.dims.clone());
        (tensor.name.clone(), TensorInfo { dtype, shape, data_offsets: (start, end) })
    });
    let metadata = metadata.map(|(key, value)| [(key.to_string(), value.to_string())].into());
    let header = Metadata::new(metadata, infos.collect())
        .map_err(|error| error.to_string())
        .and_then(|header| serde_json::to_string(&header).map_err(|error| error.to_string()))
        .map_err(|error| format!("cannot describe '{}': {error}", path.display()))?;
    let padded = header.len().next_multiple_of(8); // the bytes that follow are aligned
    if padded as u64 > MAX_HEADER {
        return Err(format!(
            "cannot write '{}': {count} tensors need a header of {padded} bytes, and a safetensors file takes at \
             most {MAX_HEADER}",
            path.display()
        ));
    }
    write_chunks(path, cancelled, |writer| {
        writer.put(&(padded as u64).to_le_bytes())?;
        writer.put(header.as_bytes())?;
        writer.put(&b"       "[..padded - header.len()])?;
        (0..count).try_for_each(|i| put(i, writer))
    })
}

const DTYPES: [(DType, Dtype); 7] = [
    (DType::F64, Dtype::F64),
    (DType::F32, Dtype::F32),
    (DType::BF16, Dtype::BF16),
    (DType::F16, Dtype::F16),
    (DType::U8, Dtype::U8),
    (DType::U32, Dtype::U32),
    (DType::I64, Dtype::I64),
];

fn file_dtype(dtype: DType) -> Dtype {
    DTYPES.iter().find(|(ours, _)| *ours == dtype).expect("the table lists every dtype").1
}

/// A safetensors file whose header has been read.
pub(crate) struct TensorFile {
    path: PathBuf,
    header: Metadata,
    /// Offset of the first tensor's bytes.
    start: u64,
    /// The open file, and the position of its next byte.
    reader: Option<(BufReader<File>, u64)>,
}

impl TensorFile {
    /// Reads the header.
    ///
    /// Errors if it is no safetensors file or not as long as the header says.
    pub fn open(path: &Path) -> Result<TensorFile, Fault> {
        let io = |error| cannot("read", path, &error);
        let refuse =
            |what: String| format!("'{}' is not a valid safetensors file: {what}", path.display());
        let mut file = File::open(path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        let mut length = [0; 8];
        if size < 8 {
            return Err(refuse(format!("{size} bytes are too few for a header")));
        }
        file.read_exact(&mut length).map_err(io)?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER || length > size - 8 {
            return Err(refuse(format!(
                "its header should have {length} bytes, but {} follow",
                size - 8
            )));
        }
        let mut header = vec![0; length as usize];
        file.read_exact(&mut header).map_err(io)?;
        let header: Metadata = serde_json::from_slice(&header)
            .map_err(|error| refuse(format!("its header is unreadable ({error})")))?;
        let (start, data) = (8 + length, header.data_len() as u64);
        if size - start != data {
            return Err(refuse(format!(
                "it is truncated or has surplus bytes ({} bytes of tensors, its header says {data})",
                size - start
            )));
        }
        let reader = Some((BufReader::with_capacity(CHUNK, file), start));
        Ok(TensorFile { path: path.to_path_buf(), header, start, reader })
    }

    /// Gives the file descriptor and the buffer back; the next [`TensorFile::read`] opens the file again.
    pub fn close(&mut self) {
        self.reader = None;
    }

    /// The file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names = self.header.offset_keys();
        names.sort_unstable();
        names
    }

    /// Dtype and dims of a tensor.
    ///
    /// Errors if there is none of this name or its dtype is unknown here.
    pub fn describe(&self, name: &str) -> Result<(DType, &[usize]), Fault> {
        let info = self
            .header
            .info(name)
            .ok_or_else(|| format!("'{}' has no tensor '{name}'", self.path.display()))?;
        let (dtype, _) =
            DTYPES.iter().find(|(_, theirs)| *theirs == info.dtype).ok_or_else(|| {
                format!("'{name}' in '{}' has dtype {:?}", self.path.display(), info.dtype)
            })?;
        Ok((*dtype, &info.shape))
    }

    /// The first byte of a tensor in the file.
    ///
    /// Errors if there is none of this name.
    pub fn start_of(&self, name: &str) -> Result<u64, Fault> {
        match self.header.info(name) {
            Some(info) => Ok(self.start + info.data_offsets.0 as u64),
            None => Err(format!("'{}' has no tensor '{name}'", self.path.display())),
        }
    }

    /// Fills `target` with the bytes of a tensor from byte `offset` on.
    pub fn read(&mut self, name: &str, offset: usize, target: &mut [u8]) -> Result<(), Fault> {
        let (first, end) = match self.header.info(name) {
            Some(info) => info.data_offsets,
            None => return Err(format!("'{}' has no tensor '{name}'", self.path.display())),
        };
        if offset + target.len() > end - first {
            return Err(format!("'{name}' in '{}' is too short", self.path.display()));
        }
        let from = self.start + (first + offset) as u64;
        let mut read = || {
            let (mut reader, position) = match self.reader.take() {
                Some(opened) => opened,
                None => (BufReader::with_capacity(CHUNK, File::open(&self.path)?), 0),
            };
            reader.seek_relative(from.wrapping_sub(position) as i64)?;
            reader.read_exact(target)?;
            self.reader = Some((reader, from + target.len() as u64));
            Ok(())
        };
        read().map_err(|error| cannot("read", &self.path, &error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrotron_tensor::Device;

    /// `count` scalars whose names have `length` characters each, in order.
    fn scalars(count: usize, length: usize) -> Vec<(String, Tensor)> {
        let device = Device::cpu(1).unwrap();
        let scalar = |i: usize| Tensor::full(&device, DType::F32, &[], i as f64).unwrap();
        (0..count).map(|i| (format!("{i:0>length$}"), scalar(i))).collect()
    }

    #[test]
    fn headers_of_any_length_come_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("many.safetensors");
        // Headers of 200 kB and 6 MB, and every number of padding bytes.
        let sizes = [(2100, 40), (30_000, 140)].into_iter().chain((1..=8).map(|n| (1, n)));
        for (count, length) in sizes {
            let record =
                write_tensors(&path, Some(("format", "pt")), scalars(count, length)).unwrap();
            record.verify(&path).unwrap();
            let mut file = TensorFile::open(&path).unwrap();
            assert_eq!(file.start % 8, 0);
            assert!(count == 1 || file.start > 200_000, "{}", file.start);
            assert_eq!(file.names().len(), count);
            for i in [0, count / 2, count - 1] {
                let mut bytes = [0; 4];
                file.close();
                file.read(&format!("{i:0>length$}"), 0, &mut bytes).unwrap();
                assert_eq!(f32::from_le_bytes(bytes), i as f32);
            }
        }
    }

    #[test]
    fn a_header_beyond_the_limit_is_refused_before_anything_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("many.safetensors");
        let fault = write_tensors(&path, None, scalars(1_700, 60_000)).unwrap_err();
        assert!(fault.contains("1700 tensors need a header of 102"), "{fault}");
        assert!(fault.contains("at most 100000000") && !path.exists(), "{fault}");
    }
}
