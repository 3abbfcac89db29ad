//! The keys that each query may see, as one range per query: key lengths, documents, and any mask of this form.

use crate::{Device, Error, Result, Tensor};
use std::sync::{Arc, Mutex, PoisonError};

/// Name in errors.
const OP: &str = "attention";

/// The range of keys that each query of each batch row may see. It describes key lengths of padded sequences, documents
/// packed into one row, and every other mask with ranges whose beginnings and ends do not decrease from query to query.
///
/// The options of [`AttentionConfig`](super::AttentionConfig) apply within the range: a query sees the keys that the
/// mask, the window and its range have in common. A query whose range is empty has out = 0, and no gradient.
///
/// ```
/// use ferrotron_tensor::ops::attention::{AttentionConfig, AttentionMask, KeyRanges, attention};
/// use ferrotron_tensor::{DType, Device, Tensor};
/// let x = Tensor::full(&Device::cpu(1)?, DType::F32, &[2, 5, 4, 8], 1.0)?;
/// // The second sequence ends after 3 of 5 positions.
/// let ranges = Some(KeyRanges::from_lengths(&[5, 3], 5)?);
/// let config = AttentionConfig { mask: AttentionMask::None, ranges, ..AttentionConfig::causal(8) };
/// let (_, lse) = attention(&x, &x, &x, &config)?;
/// assert!(lse.to_f64()?[0] > lse.to_f64()?[4 * 5]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct KeyRanges(Arc<Table>);

#[derive(Debug)]
struct Table {
    /// Batch rows; one row stands for every row of a batch.
    rows: usize,
    queries: usize,
    /// The first key of each query of each row, and the one after the last.
    ranges: Vec<[u32; 2]>,
    /// The copy on the GPU that used it last.
    copy: Mutex<Option<Tensor>>,
}

impl KeyRanges {
    /// The ranges (first key, one after the last) of `queries` queries in each of `rows` batch rows, row by row. One row
    /// stands for every row of a batch.
    ///
    /// Errors unless there is a range for each query, and in each row neither end of the ranges decreases.
    pub fn new(rows: usize, queries: usize, ranges: Vec<[u32; 2]>) -> Result<KeyRanges> {
        if rows.checked_mul(queries) != Some(ranges.len()) {
            let message = format!("{} ranges for {rows} rows of {queries} queries", ranges.len());
            return Err(Error::shape(OP, message));
        }
        for (row, ranges) in ranges.chunks_exact(queries.max(1)).enumerate() {
            for (i, pair) in ranges.windows(2).enumerate() {
                let ([start, end], [next_start, next_end]) = (pair[0], pair[1]);
                if next_start < start || next_end < end {
                    let message = format!(
                        "the ranges of keys must not decrease: row {row} has {start}..{end} for query {i} and \
                         {next_start}..{next_end} for the next"
                    );
                    return Err(Error::value(OP, message));
                }
            }
        }
        Ok(KeyRanges(Arc::new(Table { rows, queries, ranges, copy: Mutex::new(None) })))
    }

    /// Padded sequences: every query of row b sees the first `lengths[b]` keys.
    pub fn from_lengths(lengths: &[usize], queries: usize) -> Result<KeyRanges> {
        let of_row = |&length: &usize| std::iter::repeat_n([0, id(length)], queries);
        KeyRanges::new(lengths.len(), queries, lengths.iter().flat_map(of_row).collect())
    }

    /// Packed documents: `boundaries[b]` (`cu_seqlens`) begins with 0 and holds the end of each document of row b. A
    /// query sees the keys of its own document; positions after the last boundary see nothing.
    ///
    /// Errors, naming the row, unless boundaries begin with 0, do not decrease and end at `positions` at most.
    ///
    /// ```
    /// use ferrotron_tensor::ops::attention::KeyRanges;
    /// let ranges = KeyRanges::from_documents(&[vec![0, 3, 8], vec![0, 8]], 8)?;
    /// assert_eq!((ranges.range(0, 2), ranges.range(0, 3), ranges.range(1, 3)), ([0, 3], [3, 8], [0, 8]));
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn from_documents(boundaries: &[Vec<usize>], positions: usize) -> Result<KeyRanges> {
        let mut ranges = Vec::with_capacity(boundaries.len() * positions);
        for (row, boundaries) in boundaries.iter().enumerate() {
            let last = boundaries.last().copied().unwrap_or(0);
            if boundaries.first() != Some(&0) || !boundaries.is_sorted() || last > positions {
                let message = format!(
                    "document boundaries must begin with 0, not decrease, and end at {positions} at most: row {row} \
                     has {boundaries:?}"
                );
                return Err(Error::value(OP, message));
            }
            for document in boundaries.windows(2) {
                let range = [id(document[0]), id(document[1])];
                ranges.extend(std::iter::repeat_n(range, document[1] - document[0]));
            }
            ranges.extend(std::iter::repeat_n([id(last); 2], positions - last));
        }
        KeyRanges::new(boundaries.len(), positions, ranges)
    }

    /// The intersection of both ranges.
    ///
    /// Errors unless they are for the same queries, and for as many rows or one.
    pub fn intersect(&self, other: &KeyRanges) -> Result<KeyRanges> {
        let (rows, queries) = (self.rows().max(other.rows()), self.queries());
        if other.queries() != queries || [self, other].iter().any(|x| !x.is_for(rows, queries)) {
            let message = format!(
                "ranges for {} rows of {queries} queries and for {} rows of {} have nothing in common",
                self.rows(),
                other.rows(),
                other.queries()
            );
            return Err(Error::shape(OP, message));
        }
        let places = (0..rows).flat_map(|row| (0..queries).map(move |query| (row, query)));
        let ranges = places.map(|(row, query)| {
            let [[a, b], [c, d]] = [self.range(row, query), other.range(row, query)];
            let end = b.min(d);
            [a.max(c).min(end), end]
        });
        KeyRanges::new(rows, queries, ranges.collect())
    }

    /// The range of `query` in batch row `row`: its first key, and the one after its last.
    pub fn range(&self, row: usize, query: usize) -> [u32; 2] {
        let row = if self.0.rows == 1 { 0 } else { row };
        self.0.ranges[row * self.0.queries + query]
    }

    /// The end of the range that reaches farthest.
    ///
    /// ```
    /// use ferrotron_tensor::ops::attention::KeyRanges;
    /// assert_eq!(KeyRanges::from_lengths(&[2, 5, 3], 4)?.end(), 5);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn end(&self) -> usize {
        let rows = self.0.ranges.chunks(self.0.queries.max(1));
        rows.filter_map(|row| row.last()).map(|range| range[1] as usize).max().unwrap_or(0)
    }

    /// Whether no query sees a key.
    pub fn is_empty(&self) -> bool {
        self.0.ranges.iter().all(|[start, end]| start >= end)
    }

    /// Number of batch rows; one row stands for every row of a batch.
    pub fn rows(&self) -> usize {
        self.0.rows
    }

    /// Number of queries of a row.
    pub fn queries(&self) -> usize {
        self.0.queries
    }

    /// Whether these are ranges for a batch of `rows` rows of `queries` queries.
    pub(super) fn is_for(&self, rows: usize, queries: usize) -> bool {
        (self.0.rows == 1 || self.0.rows == rows) && self.0.queries == queries
    }

    /// The table (rows, queries, 2) in the memory of `device`, copied there once.
    ///
    /// Errors while work of `device` is captured: a graph would repeat the ranges of one batch for every other.
    pub(crate) fn tensor(&self, device: &Device) -> Result<Tensor> {
        if device.capture().is_some() {
            let message = "a CUDA graph would repeat the key ranges (key lengths, documents) of this batch for every \
                           other: run without a CUDA graph, or attend without them";
            return Err(Error::config(OP, message));
        }
        let mut copy = self.0.copy.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(copy) = copy.as_ref().filter(|copy| copy.device() == device) {
            return Ok(copy.clone());
        }
        let dims = [self.0.rows, self.0.queries, 2];
        let table = Tensor::from_slice(device, self.0.ranges.as_flattened(), &dims)?;
        Ok(copy.insert(table).clone())
    }
}

/// A position as the table holds it: no sequence has more than 2^32 - 1.
fn id(position: usize) -> u32 {
    u32::try_from(position).unwrap_or(u32::MAX)
}
