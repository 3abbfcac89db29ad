//! Samples of a micro-batch on the host: named arrays, and the rows of tokens of a language model.

use ferrotron_tensor::{Error, Result};

/// The target of a position that does not count, as `ignore_index` in PyTorch. Any negative target
/// means the same.
pub const IGNORE: i64 = -100;

/// The samples of one forward pass of one rank, as named arrays.
///
/// ```
/// use ferrotron_data::Batch;
/// // Two images of 3 x 4 x 4 pixels in 16 patches, and their classes.
/// let batch = Batch::new(0, 2, 16)
///     .with("pixels", vec![0.0_f32; 2 * 3 * 4 * 4], &[2, 3, 4, 4])?
///     .with("labels", vec![7_i64, 1], &[2])?;
/// assert_eq!(batch.get::<i64>("labels")?, [7, 1]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// The number, in the whole run, of the first sample; later ones follow on.
    pub first_sample: u64,
    /// Number of samples.
    pub micro_batch: usize,
    /// Positions of a sample.
    pub seq_length: usize,
    rows_per_sample: usize,
    arrays: Vec<BatchArray>,
    key_lengths: Option<Vec<usize>>,
    documents: Option<Vec<Vec<usize>>>,
}

/// One array of a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchArray {
    /// Its name.
    pub name: String,
    /// Its dims; the first counts samples, or rows of them if the second counts positions.
    pub dims: Vec<usize>,
    /// Its elements, row-major.
    pub values: ArrayValues,
    /// Whether the second dim counts positions, which context parallelism shards.
    pub has_positions: bool,
}

/// The elements of an array.
#[derive(Debug, Clone, PartialEq)]
pub enum ArrayValues {
    /// Indices.
    U32(Vec<u32>),
    /// Targets and labels.
    I64(Vec<i64>),
    /// Numbers, which the model casts to the dtype of its weights.
    F32(Vec<f32>),
}

impl ArrayValues {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            ArrayValues::U32(values) => values.len(),
            ArrayValues::I64(values) => values.len(),
            ArrayValues::F32(values) => values.len(),
        }
    }

    /// Bytes of the elements.
    pub fn bytes(&self) -> usize {
        let size = if matches!(self, ArrayValues::I64(_)) { 8 } else { 4 };
        size * self.len()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// An element type of arrays: `u32`, `i64` or `f32`.
pub trait ArrayElement: Sized {
    /// Wraps elements.
    fn wrap(values: Vec<Self>) -> ArrayValues;
    /// The elements, if they are of this type.
    fn unwrap(values: &ArrayValues) -> Option<&[Self]>;
}

macro_rules! array_element {
    ($type:ty, $variant:ident) => {
        impl ArrayElement for $type {
            fn wrap(values: Vec<$type>) -> ArrayValues {
                ArrayValues::$variant(values)
            }

            fn unwrap(values: &ArrayValues) -> Option<&[$type]> {
                match values {
                    ArrayValues::$variant(values) => Some(values),
                    _ => None,
                }
            }
        }
    };
}
array_element!(u32, U32);
array_element!(i64, I64);
array_element!(f32, F32);

impl Batch {
    /// A batch without arrays.
    pub fn new(first_sample: u64, micro_batch: usize, seq_length: usize) -> Batch {
        let arrays = Vec::new();
        let (key_lengths, documents) = (None, None);
        let rows_per_sample = 1;
        Batch {
            first_sample,
            micro_batch,
            seq_length,
            rows_per_sample,
            arrays,
            key_lengths,
            documents,
        }
    }

    /// Makes each sample `rows` sequences, one after another: the choices of a question, say. Arrays with positions, key
    /// lengths and documents then have `micro_batch` x `rows` rows.
    ///
    /// # Errors
    /// No row; a batch that has arrays already.
    pub fn with_rows_per_sample(self, rows: usize) -> Result<Batch> {
        if rows == 0 || !self.arrays.is_empty() || self.restricts_attention() {
            let message = format!("{rows} rows a sample must be at least 1, and set before arrays");
            return Err(Error::shape("batch", message));
        }
        Ok(Batch { rows_per_sample: rows, ..self })
    }

    /// Sequences of each sample.
    pub fn rows_per_sample(&self) -> usize {
        self.rows_per_sample
    }

    /// Sequences of all samples.
    pub fn rows(&self) -> usize {
        self.micro_batch * self.rows_per_sample
    }

    /// Adds an array that every rank along the context axis has whole.
    ///
    /// # Errors
    /// A name that is taken; a first dim other than the number of samples; another number of elements than `dims` say.
    pub fn with<T: ArrayElement>(
        self,
        name: &str,
        values: Vec<T>,
        dims: &[usize],
    ) -> Result<Batch> {
        self.add(name, T::wrap(values), dims, false)
    }

    /// Adds an array whose second dim counts positions: context parallelism shards it.
    ///
    /// # Errors
    /// The errors of [`Batch::with`]; a second dim other than the number of positions.
    pub fn with_positions<T: ArrayElement>(
        self,
        name: &str,
        values: Vec<T>,
        dims: &[usize],
    ) -> Result<Batch> {
        self.add(name, T::wrap(values), dims, true)
    }

    fn add(
        mut self,
        name: &str,
        values: ArrayValues,
        dims: &[usize],
        has_positions: bool,
    ) -> Result<Batch> {
        let refuse = |why: String| Err(Error::shape("batch", format!("'{name}' {dims:?} {why}")));
        if self.arrays.iter().any(|array| array.name == name) {
            return refuse("is there already".into());
        }
        let (rows, kind) = match has_positions {
            true if self.rows_per_sample > 1 => (self.rows(), "rows"),
            _ => (self.micro_batch, "samples"),
        };
        if dims.first() != Some(&rows) {
            return refuse(format!("must have {rows} {kind} in the first dim"));
        }
        if has_positions && dims.get(1) != Some(&self.seq_length) {
            return refuse(format!("must have {} positions in the second dim", self.seq_length));
        }
        if dims.iter().product::<usize>() != values.len() {
            return refuse(format!("has {} elements", values.len()));
        }
        self.arrays.push(BatchArray {
            name: name.into(),
            dims: dims.into(),
            values,
            has_positions,
        });
        Ok(self)
    }

    /// Tells attention that samples are padded: sample b has `lengths[b]` positions, and none sees a key beyond them, as by
    /// `Context::with_key_lengths`.
    ///
    /// # Errors
    /// Lengths of another number of samples, or beyond the number of positions.
    pub fn with_key_lengths(self, lengths: Vec<usize>) -> Result<Batch> {
        let (samples, positions) = (self.rows(), self.seq_length);
        if lengths.len() != samples || lengths.iter().any(|&length| length > positions) {
            let message = format!(
                "key lengths {lengths:?} are not of {samples} samples of at most {positions} positions"
            );
            return Err(Error::shape("batch", message));
        }
        Ok(Batch { key_lengths: Some(lengths), ..self })
    }

    /// The number of positions of each sample that attention sees, if samples are padded.
    pub fn key_lengths(&self) -> Option<&[usize]> {
        self.key_lengths.as_deref()
    }

    /// Tells attention that samples are packed documents: `boundaries[b]` (`cu_seqlens`) begins with 0 and holds the end of
    /// each document of sample b, as for `Context::with_documents`.
    ///
    /// # Errors
    /// Boundaries of another number of samples, or that do not ascend from 0 to the number of positions.
    pub fn with_documents(self, boundaries: Vec<Vec<usize>>) -> Result<Batch> {
        let (samples, positions) = (self.rows(), self.seq_length);
        let fits = |ends: &Vec<usize>| {
            ends.first() == Some(&0) && ends.is_sorted() && ends.last() == Some(&positions)
        };
        if boundaries.len() != samples || !boundaries.iter().all(fits) {
            let message = format!(
                "document boundaries {boundaries:?} do not ascend from 0 to {positions} in each of {samples} samples"
            );
            return Err(Error::shape("batch", message));
        }
        Ok(Batch { documents: Some(boundaries), ..self })
    }

    /// The boundaries of the documents of each sample, if attention keeps them apart.
    pub fn documents(&self) -> Option<&[Vec<usize>]> {
        self.documents.as_deref()
    }

    /// Returns whether attention is told key lengths or documents.
    pub fn restricts_attention(&self) -> bool {
        self.key_lengths.is_some() || self.documents.is_some()
    }

    /// The arrays, in the order in which they were added.
    pub fn arrays(&self) -> &[BatchArray] {
        &self.arrays
    }

    /// The elements of an array.
    ///
    /// # Errors
    /// An array that is not there, or has elements of another type.
    pub fn get<T: ArrayElement>(&self, name: &str) -> Result<&[T]> {
        let array = self.arrays.iter().find(|array| array.name == name);
        array.and_then(|array| T::unwrap(&array.values)).ok_or_else(|| {
            let names: Vec<&str> = self.arrays.iter().map(|array| array.name.as_str()).collect();
            let message = format!("no array '{name}' of this type among {}", names.join(", "));
            Error::value("batch", message)
        })
    }
}

/// Rows of tokens, and for each token the one that follows it.
///
/// The arrays of its [`Batch`] are `inputs` and `targets`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenBatch {
    /// (micro_batch, seq_length) token ids.
    pub inputs: Vec<u32>,
    /// (micro_batch, seq_length) next tokens, or [`IGNORE`].
    pub targets: Vec<i64>,
    /// The number, in the whole run, of the sample in the first row; later rows follow on.
    pub first_sample: u64,
    /// Rows.
    pub micro_batch: usize,
    /// Tokens of a row.
    pub seq_length: usize,
}

impl TokenBatch {
    /// Name of the token ids in a [`Batch`].
    pub const INPUTS: &str = "inputs";
    /// Name of the positions of the tokens in a [`Batch`], (micro_batch, seq_length), where they do not count through.
    pub const POSITIONS: &str = "positions";
    /// Name of the next tokens in a [`Batch`].
    pub const TARGETS: &str = "targets";

    /// A batch in which no position counts yet: inputs 0, targets [`IGNORE`].
    pub fn blank(first_sample: u64, micro_batch: usize, seq_length: usize) -> Self {
        let n = micro_batch * seq_length;
        TokenBatch {
            inputs: vec![0; n],
            targets: vec![IGNORE; n],
            first_sample,
            micro_batch,
            seq_length,
        }
    }

    /// Fills the front of row `row` from `tokens`: all but the last are inputs, all but the first
    /// targets.
    pub(super) fn fill(&mut self, row: usize, tokens: &[u32]) {
        let row = row * self.seq_length;
        for (i, pair) in tokens.windows(2).enumerate() {
            self.inputs[row + i] = pair[0];
            self.targets[row + i] = i64::from(pair[1]);
        }
    }

    /// Copies the one row of `other` into row `row`.
    pub(super) fn copy_row(&mut self, row: usize, other: &TokenBatch) {
        let row = row * self.seq_length..(row + 1) * self.seq_length;
        self.inputs[row.clone()].copy_from_slice(&other.inputs);
        self.targets[row].copy_from_slice(&other.targets);
    }

    /// Positions that count in the loss.
    pub fn num_valid_tokens(&self) -> u64 {
        num_valid(&self.targets)
    }
}

/// The number of targets that count: those that are not negative.
pub fn num_valid(targets: &[i64]) -> u64 {
    targets.iter().filter(|&&target| target >= 0).count() as u64
}

impl TryFrom<TokenBatch> for Batch {
    type Error = Error;

    /// Errors if there are not `micro_batch * seq_length` inputs and targets.
    fn try_from(tokens: TokenBatch) -> Result<Batch> {
        let dims = [tokens.micro_batch, tokens.seq_length];
        Batch::new(tokens.first_sample, dims[0], dims[1])
            .with_positions(TokenBatch::INPUTS, tokens.inputs, &dims)?
            .with_positions(TokenBatch::TARGETS, tokens.targets, &dims)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_that_do_not_fit_are_refused_by_name() {
        let batch = || Batch::new(3, 2, 4).with("labels", vec![1_i64, 2], &[2]);
        let refused = |batch: Result<Batch>| batch.unwrap_err().to_string();
        let error = refused(batch().unwrap().with("labels", vec![0_u32; 2], &[2]));
        assert_eq!(error, "batch: 'labels' [2] is there already");
        let error = refused(batch().unwrap().with("x", vec![0.0_f32; 3], &[3]));
        assert_eq!(error, "batch: 'x' [3] must have 2 samples in the first dim");
        let error = refused(batch().unwrap().with("x", vec![0.0_f32; 3], &[2, 2]));
        assert_eq!(error, "batch: 'x' [2, 2] has 3 elements");
        let error = refused(batch().unwrap().with_positions("x", vec![0.0_f32; 6], &[2, 3]));
        assert_eq!(error, "batch: 'x' [2, 3] must have 4 positions in the second dim");
        for lengths in [vec![4], vec![4, 5]] {
            let error = refused(batch().unwrap().with_key_lengths(lengths.clone()));
            let message = "are not of 2 samples of at most 4 positions";
            assert_eq!(error, format!("batch: key lengths {lengths:?} {message}"));
        }
        for ends in [
            vec![],
            vec![vec![0, 4]; 3],
            vec![vec![0, 4], vec![0, 3]],
            vec![vec![1, 4], vec![0, 4]],
        ] {
            let error = refused(batch().unwrap().with_documents(ends));
            assert!(error.ends_with("do not ascend from 0 to 4 in each of 2 samples"), "{error}");
        }
        let error = batch().unwrap().get::<f32>("labels").unwrap_err().to_string();
        assert_eq!(error, "batch: no array 'labels' of this type among labels");
    }
}
