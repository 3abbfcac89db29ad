//! The differences between two checkpoints, whatever layouts wrote them.

use ferrotron_parallel::agreement::digest;
use ferrotron_tensor::{DType, Device, Result, ShardSpec, Tensor};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeSet;

use super::index::TensorRecord;
use super::load::Checkpoint;
use super::reader::CheckpointReader;
use super::slices::numel;
use crate::io::tokenizer::Tokenizer;

/// Most elements of a tensor that are compared at once.
const CHUNK: usize = 1 << 20;

/// Largest difference of two values that count as equal: |a - b| <= atol + rtol |b|, as in `torch.allclose`. Two NaNs are
/// equal.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Tolerance {
    /// The absolute part.
    pub atol: f64,
    /// The part relative to the second value.
    pub rtol: f64,
}

/// The differences between two checkpoints.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Fields of the model's configuration and of the progress that differ, and the tokenizers, by name.
    pub fields: Vec<FieldDifference>,
    /// Tensors that differ, by name.
    pub tensors: Vec<TensorDifference>,
    /// Number of tensors that are equal.
    pub equal_tensors: usize,
}

/// A field with its two values, `null` where there is none.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FieldDifference {
    /// Name of the field.
    pub name: String,
    /// Value in each checkpoint.
    pub values: [Value; 2],
}

/// A tensor that differs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorDifference {
    /// Global name.
    pub name: String,
    /// The kind of difference.
    #[serde(flatten)]
    pub kind: TensorDifferenceKind,
}

/// The kind of difference between two tensors of one name.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum TensorDifferenceKind {
    /// Only one checkpoint has it.
    Missing {
        /// Number of the checkpoint that lacks it: 0 or 1.
        from: usize,
    },
    /// The shapes differ.
    Shape {
        /// Dims in each checkpoint.
        shapes: [Vec<usize>; 2],
    },
    /// The dtypes or the values differ.
    Values {
        /// Dtype in each checkpoint.
        dtypes: [String; 2],
        /// Number of elements that differ by more than the tolerance.
        differing: usize,
        /// Number of elements.
        numel: usize,
        /// Largest |a - b|; NaN if one value is NaN and the other is not.
        largest: f64,
    },
}

impl Comparison {
    /// Compares every tensor, the model's configuration and the progress of two checkpoints. Reads both once, a few
    /// megabytes at a time.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn new(
        first: &Checkpoint,
        second: &Checkpoint,
        tolerance: Tolerance,
    ) -> Result<Comparison> {
        let mut compared =
            Comparison { fields: fields(first, second), tensors: Vec::new(), equal_tensors: 0 };
        let (a, b) = (&first.index.tensors, &second.index.tensors);
        let mut readers =
            [first, second].map(|checkpoint| CheckpointReader::new(&checkpoint.folder));
        let device = Device::cpu(1)?;
        for name in a.keys().chain(b.keys()).collect::<BTreeSet<_>>() {
            let kind = match (a.get(name), b.get(name)) {
                (Some(a), Some(b)) if a.shape == b.shape => {
                    values(&mut readers, [a, b], tolerance, &device)?
                }
                (Some(a), Some(b)) => {
                    Some(TensorDifferenceKind::Shape { shapes: [a.shape.clone(), b.shape.clone()] })
                }
                (a, _) => Some(TensorDifferenceKind::Missing { from: usize::from(a.is_some()) }),
            };
            match kind {
                Some(kind) => compared.tensors.push(TensorDifference { name: name.clone(), kind }),
                None => compared.equal_tensors += 1,
            }
        }
        Ok(compared)
    }

    /// Whether nothing differs.
    pub fn is_equal(&self) -> bool {
        self.fields.is_empty() && self.tensors.is_empty()
    }
}

/// The fields of configuration, progress and tokenizer that differ.
fn fields(first: &Checkpoint, second: &Checkpoint) -> Vec<FieldDifference> {
    let of = |checkpoint: &Checkpoint| {
        let mut fields = serde_json::Map::new();
        let mut add = |prefix: &str, value: Value| match value {
            Value::Object(inner) => {
                fields.extend(
                    inner.into_iter().map(|(name, value)| (format!("{prefix}.{name}"), value)),
                );
            }
            value => drop(fields.insert(prefix.into(), value)),
        };
        add("architecture", Value::from(checkpoint.model.architecture.as_str()));
        add("model", checkpoint.model.config.clone());
        add("progress", serde_json::to_value(&checkpoint.progress).unwrap_or_default());
        add("tokenizer", checkpoint.tokenizer().map_or(Value::Null, described));
        fields
    };
    let (a, b) = (of(first), of(second));
    let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let value = |fields: &serde_json::Map<String, Value>, name: &String| {
        fields.get(name).cloned().unwrap_or_default()
    };
    let differs = |name: &String| {
        let values = [value(&a, name), value(&b, name)];
        (values[0] != values[1]).then(|| FieldDifference { name: name.clone(), values })
    };
    names.into_iter().filter_map(differs).collect()
}

/// A tokenizer in a few words, which are other ones for another tokenizer.
fn described(tokenizer: &Tokenizer) -> Value {
    let digest = digest(tokenizer.to_json().as_bytes());
    format!("{} of {} tokens, {digest}", tokenizer.name(), tokenizer.vocab_size()).into()
}

/// Compares two tensors of one shape, rows by rows; `None` if they are equal.
fn values<'a>(
    readers: &mut [CheckpointReader<'a>; 2],
    records: [&'a TensorRecord; 2],
    tolerance: Tolerance,
    device: &Device,
) -> Result<Option<TensorDifferenceKind>> {
    let dims = &records[0].shape;
    let numel = numel(dims);
    let (mut differing, mut largest) = (0, 0.0_f64);
    for place in chunks(dims)? {
        let mut read = |i: usize| {
            let mut values = Tensor::empty(device, DType::F64, place.dims())?;
            readers[i].read(records[i], &place, &mut values)?;
            values.to_vec::<f64>()
        };
        for (a, b) in read(0)?.into_iter().zip(read(1)?) {
            if a == b || (a.is_nan() && b.is_nan()) {
                continue;
            }
            let difference = (a - b).abs();
            // What is not finite is within no tolerance, and a NaN stays the largest.
            let within =
                difference.is_finite() && difference <= tolerance.atol + tolerance.rtol * b.abs();
            differing += usize::from(!within);
            largest = if difference.is_nan() || largest.is_nan() {
                f64::NAN
            } else {
                largest.max(difference)
            };
        }
    }
    let dtypes = records.map(|record| record.dtype.clone());
    let equal = differing == 0 && dtypes[0] == dtypes[1];
    Ok((!equal).then_some(TensorDifferenceKind::Values { dtypes, differing, numel, largest }))
}

/// Blocks of rows that together are a tensor of `dims`.
fn chunks(dims: &[usize]) -> Result<Vec<ShardSpec>> {
    let Some((&rows, inner)) = dims.split_first() else {
        return Ok(vec![ShardSpec::unsharded(dims)]);
    };
    let step = (CHUNK / numel(inner).max(1)).max(1);
    let whole: Vec<[(usize, usize); 1]> = inner.iter().map(|&size| [(0, size)]).collect();
    let block = |start: usize| {
        let rows = [(start, step.min(rows - start))];
        let pieces: Vec<&[(usize, usize)]> =
            std::iter::once(&rows[..]).chain(whole.iter().map(|piece| &piece[..])).collect();
        ShardSpec::new(dims, &pieces)
    };
    (0..rows).step_by(step).map(block).collect()
}
