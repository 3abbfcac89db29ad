//! Communication and arithmetic overlap. The proof is the order of events on one rank, with collectives that record
//! when they are started and when they are waited for.

use ferrotron_autograd::{Leaf, Var, WeightGrads, backward};
use ferrotron_nn::{Bias, Init, Module, Param};
use ferrotron_parallel::collective::{Call, Collective, CommVolume, Group, Memory, Work};
use ferrotron_parallel::tensor_parallel::{
    ColumnParallelLinear, RowParallelLinear, SequenceParallel, TensorParallel,
};
use ferrotron_tensor::Result;
use std::sync::{Arc, Mutex};

use crate::ranks::*;

type Events = Arc<Mutex<Vec<String>>>;

/// Rank 0 of two; the other does not exist, since the numbers do not matter here.
struct Recorder(Events);

impl Collective for Recorder {
    fn name(&self) -> &str {
        "recorder"
    }

    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        2
    }

    fn start(&self, call: Call, memory: Memory) -> Work<Memory> {
        let (events, op) = (self.0.clone(), call.op.name());
        note(&events, &format!("start {op}"));
        let (work, completion) = Work::new();
        completion.complete(Ok(memory));
        work.map(move |memory| {
            note(&events, &format!("wait {op}"));
            Ok(memory)
        })
    }

    fn traffic(&self) -> CommVolume {
        CommVolume::default()
    }
}

fn note(events: &Events, event: &str) {
    events.lock().unwrap().push(event.to_string());
}

/// Records when the value of a weight is asked for, just before a product with it. Also records when the gradient of a
/// weight or bias is complete.
fn watch(param: &Param, events: &Events) -> Result<()> {
    let name = param.name().rsplit('.').next().unwrap_or_default().to_string();
    let (asked, event) = (events.clone(), format!("{name} asked for"));
    param.leaf().set_unshard_hook(Arc::new(move || {
        note(&asked, &event);
        Ok(())
    }));
    let (done, event) = (events.clone(), format!("{name} gradient done"));
    param.leaf().add_hook(move |_, _| {
        note(&done, &event);
        Ok(())
    });
    Ok(())
}

/// The parameters of a layer, its input and its output.
type Watched = (Vec<Param>, Leaf, Var);

/// The events of backward; with deferred weight gradients, "deferred" stands before those that come later.
fn events_of_backward(
    sequence: SequenceParallel,
    mode: WeightGrads,
    layer: fn(&TensorParallel) -> Result<Watched>,
) -> Result<Vec<String>> {
    let events = Events::default();
    let tp = TensorParallel::new(Group::new(Arc::new(Recorder(events.clone()))), sequence);
    let (params, _x, y) = layer(&tp)?;
    params.iter().try_for_each(|param| watch(param, &events))?;
    events.lock().unwrap().clear();
    let deferred = backward(&[(&y, y.value().clone())], mode)?;
    if !deferred.is_empty() {
        note(&events, "deferred");
    }
    deferred.run()?;
    let events = events.lock().unwrap().clone();
    Ok(events)
}

fn column(tp: &TensorParallel) -> Result<Watched> {
    let init = Init::XavierUniform;
    let layer = ColumnParallelLinear::new(&scope("fc"), tp, 3, &[4], Bias::No, init)?;
    let x = Leaf::new("x", residual(tp, &normal(&[2, 4, 3], "x")));
    let y = layer.forward(&x.var()?)?;
    Ok((layer.params(), x, y))
}

fn row(tp: &TensorParallel) -> Result<Watched> {
    let layer = RowParallelLinear::new(&scope("proj"), tp, 4, 3, Bias::Yes, Init::XavierUniform)?;
    let x = Leaf::new("x", normal(&[2, 4, 2], "x"));
    let y = layer.forward(&x.var()?)?;
    Ok((layer.params(), x, y))
}

#[test]
fn the_input_gradient_is_summed_while_the_weights_is_computed() -> Result<()> {
    let got = events_of_backward(SequenceParallel::Off, WeightGrads::Now, column)?;
    let want = ["weight asked for", "start all_reduce", "weight gradient done", "wait all_reduce"];
    assert_eq!(got, want);
    let got = events_of_backward(SequenceParallel::Off, WeightGrads::Deferred, column)?;
    let want = [
        "weight asked for",
        "start all_reduce",
        "wait all_reduce",
        "deferred",
        "weight gradient done",
    ];
    assert_eq!(got, want);
    Ok(())
}

#[test]
fn the_input_is_gathered_again_while_its_gradient_is_computed() -> Result<()> {
    let got = events_of_backward(SequenceParallel::On, WeightGrads::Now, column)?;
    let want = [
        "start all_gather",
        "weight asked for", // the product dy W begins
        "start reduce_scatter",
        "wait all_gather", // the product dy^T x begins
        "weight gradient done",
        "wait reduce_scatter",
    ];
    assert_eq!(got, want);
    // Deferred, only this rank's positions wait for their time.
    let got = events_of_backward(SequenceParallel::On, WeightGrads::Deferred, column)?;
    let want = [
        "weight asked for",
        "start reduce_scatter",
        "wait reduce_scatter",
        "deferred",
        "start all_gather",
        "wait all_gather",
        "weight gradient done",
    ];
    assert_eq!(got, want);
    Ok(())
}

/// Backward of a row-parallel layer has nothing to sum. The bias's gradient comes with the weight's, unless it needs this
/// rank's positions only.
#[test]
fn a_row_gathers_its_cotangent_at_most() -> Result<()> {
    let got = events_of_backward(SequenceParallel::Off, WeightGrads::Now, row)?;
    assert_eq!(got, ["weight asked for", "weight gradient done", "bias gradient done"]);
    let got = events_of_backward(SequenceParallel::On, WeightGrads::Now, row)?;
    let want = [
        "start all_gather",
        "bias gradient done",
        "wait all_gather",
        "weight asked for",
        "weight gradient done",
    ];
    assert_eq!(got, want);
    Ok(())
}
