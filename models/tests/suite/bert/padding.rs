//! Attention leaves out padding: rows that are padded more have the same losses and gradients.

use ferrotron_models::bert::{Bert, BertConfig, NormPlacement};
use ferrotron_models::data::{Batch, PairBatch};
use ferrotron_models::trainer::{Microbatch, Model};
use ferrotron_nn::{Context, Mode, Module, Scope};
use ferrotron_parallel::mesh::Mesh;
use ferrotron_tensor::{DType, Device, Result};

const PAD: u32 = 0;
const LENGTHS: [usize; 3] = [7, 4, 12];
const LONGEST: usize = 24;

/// The same three samples, padded to `length` positions.
fn batch(length: usize) -> PairBatch {
    let mut batch = PairBatch::blank(0, LENGTHS.len(), length, PAD);
    for (row, own) in LENGTHS.into_iter().enumerate() {
        for i in 0..own {
            let at = row * length + i;
            batch.tokens[at] = 1 + ((5 * i + 7 * row) % 12) as u32;
            batch.segments[at] = u32::from(2 * i > own);
            if i % 3 == 1 {
                batch.targets[at] = (1 + (i + row) % 12) as i64;
            }
        }
        batch.order[row] = (row % 2) as i64;
        batch.lengths[row] = own;
    }
    batch
}

/// The sums of both losses, and the gradients of all parameters.
fn pass(placement: NormPlacement, pairs: PairBatch) -> Result<Vec<f64>> {
    let config =
        BertConfig { init_method_std: 0.2, ..BertConfig::new(placement, 13, 3, 16, 4, LONGEST) };
    let device = Device::cpu(1)?;
    let bert = Bert::new(&Scope::new(&device, DType::F64, 7), &config)?;
    let ctx = Context::new(0, 0, Mode::Train, pairs.micro_batch, pairs.seq_length);
    let microbatch = Microbatch::new(&device, &Mesh::single(), &Batch::try_from(pairs)?, ctx)?;
    let losses = Model::forward(&bert, &microbatch, None)?.losses;
    let [(_, masked), (_, order)] = &losses[..] else { panic!("{losses:?}") };
    let mut found = vec![masked.value().item()?, order.value().item()?];
    masked.add(order)?.backward()?;
    for param in bert.params() {
        found.extend(param.leaf().gradient()?.expect("a gradient").to_f64()?);
    }
    Ok(found)
}

/// The largest difference.
fn gap(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(got, want)| (got - want).abs()).fold(0.0, f64::max)
}

#[test]
fn more_padding_changes_nothing() -> Result<()> {
    for placement in [NormPlacement::Pre, NormPlacement::Post] {
        let want = pass(placement, batch(12))?;
        for length in [13, 16, LONGEST] {
            let off = gap(&pass(placement, batch(length))?, &want);
            assert!(off <= 1e-12, "{placement:?}, {length} positions: {off:e} off");
        }
        // With the padding in sight, something does change.
        let lengths = vec![LONGEST; LENGTHS.len()];
        let seen = PairBatch { lengths, ..batch(LONGEST) };
        assert!(gap(&pass(placement, seen)?, &want) > 1e-3, "{placement:?}");
    }
    Ok(())
}
