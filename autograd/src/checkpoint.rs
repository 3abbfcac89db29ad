//! Activation checkpointing: a region's forward saves only its inputs, and backward recomputes the rest.
//!
//! Operations that use a region's output save it like any operand. If the output is most of what the region could
//! save, [`checkpoint_discard_output`] discards it too, and its users recompute the region.
//!
//! Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.

use ferrotron_tensor::{Result, Tensor};
use std::sync::{Arc, Mutex};

use crate::engine::backward;
use crate::engine::calls::{CallLog, logged, rewound};
use crate::engine::node::{Edge, Source};
use crate::engine::recording::{Recording, with};
use crate::{Backward, Cotangents, InputGrads, Leaf, Saved, Var, forward_span, lock};

/// Runs `f` on `inputs` and saves only the inputs; backward reruns `f` and then backpropagates through its graph.
///
/// Parameters captured by `f` get their gradients. Any other variable must be an input: capturing one is an error.
/// Random numbers are functions of their keys, and the recomputation counts the calls of random layers
/// ([`CallCounts`](crate::CallCounts)) as the first run did. It draws the same numbers, and the gradients have the same
/// bits as without the region.
///
/// ```
/// use ferrotron_autograd::{Leaf, Var, checkpoint};
/// use ferrotron_tensor::{Device, Tensor};
/// let device = Device::cpu(1)?;
/// let w = Leaf::new("w", Tensor::from_slice(&device, &[3.0_f64], &[1])?);
/// let x = Leaf::new("x", Tensor::from_slice(&device, &[0.5_f64], &[1])?);
///
/// let captured = w.clone();
/// let y = checkpoint(&[&x.var()?], move |inputs| Ok(vec![inputs[0].mul(&captured.var()?)?.square()?]))?;
/// y[0].backward()?;
/// assert_eq!(w.gradient()?.unwrap().item()?, 2.0 * 3.0 * 0.25); // 2 w x^2
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn checkpoint(
    inputs: &[&Var],
    f: impl Fn(&[Var]) -> Result<Vec<Var>> + Send + 'static,
) -> Result<Vec<Var>> {
    let _span = forward_span("checkpoint");
    let (values, used) = run_unrecorded(inputs, &f)?;
    Var::record_edges(edges(inputs, &used.leaves), values, || Region::new(f, inputs, used))
}

/// Like [`checkpoint`], for a region whose outputs are not saved either. The first backward that needs an output
/// recomputes the region, once for all users and for its own gradient.
///
/// This pays if the outputs are a large share of the region's activations: attention, for example, whose output its
/// own gradient and the next layer would save. The operation after the region must run backward before the region,
/// which always holds. If that operation is deferred, the outputs live until it runs.
///
/// ```
/// use ferrotron_autograd::{Leaf, checkpoint_discard_output};
/// use ferrotron_tensor::{Device, Tensor};
/// let device = Device::cpu(1)?;
/// let x = Leaf::new("x", Tensor::from_slice(&device, &[0.5_f64], &[1])?);
/// let input = x.var()?.mul_scalar(2.0)?;
/// let y = checkpoint_discard_output(&[&input], |inputs| Ok(vec![inputs[0].tanh()?]))?.remove(0);
/// let z = y.square()?;
/// assert_eq!(z.saved_bytes(), 8); // `input`, but not `y`
/// z.backward()?;
/// let tanh = 1.0_f64.tanh();
/// assert_eq!(x.gradient()?.unwrap().item()?, 2.0 * tanh * (1.0 - tanh * tanh) * 2.0);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn checkpoint_discard_output(
    inputs: &[&Var],
    f: impl Fn(&[Var]) -> Result<Vec<Var>> + Send + 'static,
) -> Result<Vec<Var>> {
    let _span = forward_span("checkpoint");
    let (values, used) = run_unrecorded(inputs, &f)?;
    let mut shared = None;
    let outputs = Var::record_edges(edges(inputs, &used.leaves), values, || {
        let region = Region::new(f, inputs, used);
        let kept = region.inputs.clone();
        let rerun = Rerun { region: Some(region), ran: None, outputs: Vec::new() };
        let rerun = Arc::new(Mutex::new(rerun));
        shared = Some(rerun.clone());
        WithoutOutputs { kept, rerun }
    })?;
    let Some(rerun) = shared else { return Ok(outputs) };
    let discard = |(i, output): (usize, Var)| {
        let rerun = rerun.clone();
        output.with_recompute(move || Ok(lock(&rerun).outputs()?[i].clone()))
    };
    Ok(outputs.into_iter().enumerate().map(discard).collect())
}

/// The parameters and random layers that a region's first run used.
struct Used {
    /// The parameters that it read.
    leaves: Vec<Leaf>,
    /// The counts of random layers that it drew from.
    calls: CallLog,
}

/// The values of the region's outputs, and what it used.
fn run_unrecorded(
    inputs: &[&Var],
    f: &impl Fn(&[Var]) -> Result<Vec<Var>>,
) -> Result<(Vec<Tensor>, Used)> {
    let detached: Vec<Var> = inputs.iter().map(|input| input.detach()).collect();
    let run = || logged(|| f(&detached));
    let ((outputs, calls), ended) = with(Recording::Region(Vec::new()), run);
    let outputs = outputs?;
    let Recording::Region(mut touched) = ended else {
        unreachable!("the mode set above comes back")
    };
    // An output may be a variable that no operation used.
    outputs.iter().try_for_each(|output| output.log_use(&mut touched))?;
    let used = Used { leaves: distinct(touched), calls };
    Ok((outputs.into_iter().map(Var::into_value).collect(), used))
}

/// Edges to the inputs and to the parameters that the region read. The graph reaches the parameters even if no input
/// needs a gradient, and an outer region logs them.
fn edges(inputs: &[&Var], leaves: &[Leaf]) -> Vec<Edge> {
    let of_leaf = |leaf: &Leaf| (Some(Source::Leaf(leaf.clone())), leaf.spec().clone());
    inputs.iter().map(|input| input.edge()).chain(leaves.iter().map(of_leaf)).collect()
}

fn distinct(leaves: Vec<Leaf>) -> Vec<Leaf> {
    let mut out: Vec<Leaf> = Vec::new();
    for leaf in leaves {
        if !out.contains(&leaf) {
            out.push(leaf);
        }
    }
    out
}

type Forward = Box<dyn Fn(&[Var]) -> Result<Vec<Var>> + Send>;

struct Region {
    f: Forward,
    /// Parameters that the region read, saved only to check that they are unchanged.
    captured: Vec<Saved>,
    inputs: Vec<Saved>,
    wanted: Vec<bool>,
    calls: CallLog,
}

impl Region {
    fn new(
        f: impl Fn(&[Var]) -> Result<Vec<Var>> + Send + 'static,
        inputs: &[&Var],
        used: Used,
    ) -> Region {
        let captured = |leaf: Leaf| {
            let dtype = leaf.dtype();
            Saved::leaf(leaf, dtype)
        };
        Region {
            f: Box::new(f),
            captured: used.leaves.into_iter().map(captured).collect(),
            inputs: inputs.iter().map(|input| input.save()).collect(),
            wanted: inputs.iter().map(|input| input.needs_gradient()).collect(),
            calls: used.calls,
        }
    }

    fn run_again(&self) -> Result<Ran> {
        self.captured.iter().try_for_each(Saved::check)?;
        let inputs = self.inputs.iter().map(Saved::value).collect::<Result<Vec<_>>>()?;
        let stand_ins: Vec<Option<Leaf>> = inputs
            .iter()
            .zip(&self.wanted)
            .map(|(input, &wanted)| wanted.then(|| Leaf::input("checkpoint input", input.clone())))
            .collect();
        let variables = inputs
            .into_iter()
            .zip(&stand_ins)
            .map(|(input, leaf)| leaf.as_ref().map_or_else(|| Ok(Var::constant(input)), Leaf::var))
            .collect::<Result<Vec<_>>>()?;
        let outputs = rewound(&self.calls, || with(Recording::On, || (self.f)(&variables)).0)?;
        Ok(Ran { stand_ins, outputs })
    }
}

/// The recorded graph of a rerun region.
struct Ran {
    /// Leaves of the graph that replace the inputs which need a gradient.
    stand_ins: Vec<Option<Leaf>>,
    outputs: Vec<Var>,
}

impl Ran {
    fn backward(self, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let with_gradient: Vec<(&Var, Tensor)> = self
            .outputs
            .iter()
            .zip(dy.into_vec())
            .filter_map(|(output, dy)| {
                dy.filter(|_| output.needs_gradient()).map(|dy| (output, dy))
            })
            .collect();
        let deferred = backward(&with_gradient, dx.mode)?;
        dx.deferred.append(deferred);
        for (i, leaf) in self.stand_ins.iter().enumerate() {
            if let Some(gradient) = leaf.as_ref().and_then(Leaf::take_gradient) {
                dx.accumulate(i, gradient)?;
            }
        }
        Ok(())
    }
}

impl Backward for Region {
    fn name(&self) -> &'static str {
        "checkpoint"
    }

    fn saved(&self) -> Vec<Tensor> {
        self.inputs.iter().filter_map(Saved::resident_tensor).collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let ran = self.run_again()?;
        drop(self);
        ran.backward(dy, dx)
    }
}

/// State shared by the region's gradient and the users of its outputs.
struct Rerun {
    /// `None` after the rerun.
    region: Option<Region>,
    /// The recorded graph, from the rerun until the region's gradient takes it.
    ran: Option<Ran>,
    /// The recomputed outputs, as long as they may be needed.
    outputs: Vec<Tensor>,
}

impl Rerun {
    fn outputs(&mut self) -> Result<&[Tensor]> {
        if let Some(region) = &self.region {
            let ran = region.run_again()?;
            self.outputs = ran.outputs.iter().map(|output| output.value().clone()).collect();
            self.ran = Some(ran);
            self.region = None;
        }
        Ok(&self.outputs)
    }
}

struct WithoutOutputs {
    /// The saved inputs of the region, for memory reports.
    kept: Vec<Saved>,
    rerun: Arc<Mutex<Rerun>>,
}

impl Backward for WithoutOutputs {
    fn name(&self) -> &'static str {
        "checkpoint"
    }

    fn saved(&self) -> Vec<Tensor> {
        self.kept.iter().filter_map(Saved::resident_tensor).collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let mut rerun = lock(&self.rerun);
        rerun.outputs()?;
        let ran = rerun.ran.take();
        drop(rerun);
        drop(self);
        ran.map_or(Ok(()), |ran| ran.backward(dy, dx))
    }
}
