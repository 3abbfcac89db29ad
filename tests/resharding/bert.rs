//! BERT, with two losses and padded samples, from layout to layout.

use ferrotron::models::bert::{BertConfig, NormPlacement};
use ferrotron::nn::Sharding;
use ferrotron::parallel::tensor_parallel::SequenceParallel;
use ferrotron::tensor::Result;

use super::train::{Layout, SEQ_LENGTH, Task, difference, run};
use super::{task, try_all};

/// A vocabulary, widths and layers that nothing divides.
fn bert(norms: NormPlacement) -> BertConfig {
    BertConfig {
        hidden_dropout: 0.1,
        attention_dropout: 0.1,
        init_method_std: 0.3,
        ffn_hidden_size: 21,
        ..BertConfig::new(norms, 13, 9, 16, 8, SEQ_LENGTH)
    }
}

#[test]
fn bert_between_layouts_of_every_axis() -> Result<()> {
    let tp_sp = Layout { sequence: SequenceParallel::On, ..Layout::model(2, 1) };
    let sharded = Layout { dp: 2, sharding: Sharding::Weights, ..tp_sp };
    let pipeline = Layout { dp: 2, sharding: Sharding::Optimizer, ..Layout::model(2, 2) };
    let interleaved = Layout { chunks: 2, ..Layout::model(2, 2) };
    let context = Layout { cp: 2, ..Layout::data(2, Sharding::Gradients) };
    let pairs = [
        (Layout::SERIAL, Layout::model(1, 8)),
        (Layout::model(2, 4), Layout::model(4, 2)),
        (Layout::data(4, Sharding::Weights), Layout::data(2, Sharding::None)),
        (sharded, context),
        (pipeline, Layout { cp: 4, ..tp_sp }),
        (interleaved, Layout::model(8, 1)),
    ];
    for norms in [NormPlacement::Pre, NormPlacement::Post] {
        assert_eq!(try_all(&bert(norms), &pairs), pairs.len());
    }
    // Evaluations and checkpoints between steps change nothing.
    let (model, folder) = (bert(NormPlacement::Post), tempfile::tempdir().unwrap());
    let plain = Task { steps: 3, ..task(&model, sharded) };
    let (with, without) = (run(&Task { between: Some(folder.path()), ..plain })?, run(&plain)?);
    assert_eq!((with.evaluations.len(), with.losses), (3, without.losses));
    assert_eq!(difference(&with.tensors, &without.tensors), None);
    Ok(())
}
