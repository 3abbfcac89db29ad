//! Samples that end their documents: attention, positions and loss stop at the end-of-document token.
//!
//! Megatron-LM's `--reset-attention-mask`, `--reset-position-ids` and `--eod-mask-loss`, without a dense mask: a batch has
//! the boundaries of its documents (`cu_seqlens`), by which attention leaves out what lies before. A document ends with its
//! end-of-document token; the next one begins behind it.

use crate::{Batch, FiniteSamples, IGNORE, Samples, TokenBatch};
use ferrotron_tensor::Result;

/// The properties of a sample that stop at the end of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DocumentConfig {
    /// The token that ends a document.
    pub end_of_document: u32,
    /// Tokens attend to those of their own document alone.
    pub reset_attention: bool,
    /// Positions count from 0 in each document. Rotary positions do not change: they are relative.
    pub reset_positions: bool,
    /// The target behind an end of a document does not count.
    pub mask_loss: bool,
}

/// Rows of tokens in which documents end.
///
/// ```
/// use ferrotron_data::{DocumentConfig, DocumentSamples, Samples, TokenBatch, TokenSource, Validation};
/// let source = TokenSource::from_tokens(vec![5, 6, 0, 7, 8, 9, 0, 1, 2], 10)?;
/// let config =
///     DocumentConfig { end_of_document: 0, reset_attention: true, reset_positions: true, mask_loss: true };
/// let samples = DocumentSamples::new(Validation::new(source, 8)?, config);
/// let batch = samples.batch(0, 1)?;
/// assert_eq!(batch.documents().unwrap(), [[0, 3, 7, 8]]);
/// assert_eq!(batch.get::<u32>(TokenBatch::POSITIONS)?, [0, 1, 2, 0, 1, 2, 3, 0]);
/// assert_eq!(batch.get::<i64>(TokenBatch::TARGETS)?, [6, 0, -100, 8, 9, 0, -100, 2]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct DocumentSamples<S> {
    samples: S,
    config: DocumentConfig,
}

impl<S: Samples> DocumentSamples<S> {
    /// Ends the documents of `samples`, whose batches are [token batches](TokenBatch).
    pub fn new(samples: S, config: DocumentConfig) -> DocumentSamples<S> {
        DocumentSamples { samples, config }
    }
}

impl<S: Samples> Samples for DocumentSamples<S> {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let DocumentConfig { end_of_document, reset_attention, reset_positions, mask_loss } =
            self.config;
        let batch = self.samples.batch(first_sample, micro_batch)?;
        let length = self.samples.seq_length();
        let inputs = batch.get::<u32>(TokenBatch::INPUTS)?.to_vec();
        let mut targets = batch.get::<i64>(TokenBatch::TARGETS)?.to_vec();
        if mask_loss {
            for (target, _) in
                targets.iter_mut().zip(&inputs).filter(|(_, input)| **input == end_of_document)
            {
                *target = IGNORE;
            }
        }
        let boundaries = |row: &[u32]| {
            let ends = row.iter().enumerate().filter(|(_, token)| **token == end_of_document);
            let inner = ends.map(|(place, _)| place + 1).filter(|&end| end < row.len());
            std::iter::once(0).chain(inner).chain([row.len()]).collect::<Vec<usize>>()
        };
        let documents: Vec<Vec<usize>> = inputs.chunks(length).map(boundaries).collect();
        let tokens = TokenBatch { inputs, targets, first_sample, micro_batch, seq_length: length };
        let positions = reset_positions.then(|| positions(&documents));
        let mut ended = Batch::try_from(tokens)?;
        if let Some(positions) = positions {
            let dims = [micro_batch, length];
            ended = ended.with_positions(TokenBatch::POSITIONS, positions, &dims)?;
        }
        if reset_attention {
            ended = ended.with_documents(documents)?;
        }
        Ok(ended)
    }

    fn seq_length(&self) -> usize {
        self.samples.seq_length()
    }

    fn prefetch(&self, batches: &[(u64, usize)]) {
        self.samples.prefetch(batches);
    }

    fn order_state(&self, sample: u64) -> Option<Vec<u64>> {
        self.samples.order_state(sample)
    }

    fn resume_order(&self, state: &[u64]) {
        self.samples.resume_order(state);
    }
}

/// Positions that count from 0 in each document.
fn positions(documents: &[Vec<usize>]) -> Vec<u32> {
    let lengths = documents.iter().flat_map(|ends| ends.windows(2).map(|two| two[1] - two[0]));
    lengths.flat_map(|length| 0..length as u32).collect()
}

/// Rows of tokens and the documents that end in them, while they are filled.
pub(crate) struct DocumentRows {
    pub tokens: TokenBatch,
    /// The boundaries of each row: 0 and the ends of its documents.
    boundaries: Vec<Vec<usize>>,
}

impl DocumentRows {
    /// Rows in which nothing counts and no document ends.
    pub fn blank(first_sample: u64, micro_batch: usize, seq_length: usize) -> DocumentRows {
        let tokens = TokenBatch::blank(first_sample, micro_batch, seq_length);
        DocumentRows { tokens, boundaries: vec![vec![0]; micro_batch] }
    }

    /// Ends a document of a row in front of position `end`.
    pub fn end_document(&mut self, row: usize, end: usize) {
        self.boundaries[row].push(end);
    }

    /// The batch, in which attention and positions stop at the ends of documents. The rest of a row is a document too.
    pub fn batch(mut self) -> Result<Batch> {
        let dims = [self.tokens.micro_batch, self.tokens.seq_length];
        for boundaries in &mut self.boundaries {
            if boundaries.last() != Some(&dims[1]) {
                boundaries.push(dims[1]);
            }
        }
        Batch::try_from(self.tokens)?
            .with_positions(TokenBatch::POSITIONS, positions(&self.boundaries), &dims)?
            .with_documents(self.boundaries)
    }
}

impl<S: FiniteSamples> FiniteSamples for DocumentSamples<S> {
    fn len(&self) -> u64 {
        self.samples.len()
    }

    fn has_blank_samples(&self) -> bool {
        self.samples.has_blank_samples()
    }

    fn of_evaluation(&self, number: u64) -> Option<Box<dyn FiniteSamples + '_>> {
        let samples = self.samples.of_evaluation(number)?;
        Some(Box::new(DocumentSamples::new(samples, self.config)))
    }
}
