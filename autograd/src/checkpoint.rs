//! Checkpoint regions: run forward without keeping anything but the inputs, and again in backward.
//!
//! Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.

use ferrotron_tensor::{Result, Tensor};

use crate::engine::backward;
use crate::node::{Slot, Source};
use crate::recording::{Recording, with};
use crate::{Backward, Cotangents, Grads, Leaf, Saved, Var, forward_span};

/// Runs `f` on `inputs`, keeping only the inputs; backward runs it again and then walks its graph.
///
/// Parameters that `f` captures get their gradients. Any other variable must be an input: capturing one
/// is an error. Since all randomness is a function of its key, the second run draws the same numbers,
/// and the gradients are the same bits as without the region.
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
    let detached: Vec<Var> = inputs.iter().map(|input| input.detach()).collect();
    let (outputs, ended) = with(Recording::Region(Vec::new()), || f(&detached));
    let outputs = outputs?;
    let Recording::Region(mut touched) = ended else {
        unreachable!("the mode set above comes back")
    };
    // A variable may be returned without having been an operand of anything.
    outputs.iter().try_for_each(|output| output.log_use(&mut touched))?;
    let values: Vec<Tensor> = outputs.into_iter().map(Var::into_value).collect();
    // The parameters that the region read are its operands too: the graph leads to them even if no
    // input wants a gradient, and an outer region learns of them.
    let leaves = distinct(touched);
    let of_input = |input: &&Var| (input.source().cloned(), Slot::of(input.value()));
    let of_leaf = |leaf: &Leaf| (Some(Source::Leaf(leaf.clone())), Slot::of_leaf(leaf));
    let edges = inputs.iter().map(of_input).chain(leaves.iter().map(of_leaf)).collect();
    Var::record_edges(edges, values, || Region {
        f: Box::new(f),
        captured: leaves.into_iter().map(Saved::leaf).collect(),
        inputs: inputs.iter().map(|input| input.save()).collect(),
        wanted: inputs.iter().map(|input| input.needs_gradient()).collect(),
    })
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

type Rerun = Box<dyn Fn(&[Var]) -> Result<Vec<Var>> + Send>;

struct Region {
    f: Rerun,
    /// Parameters that the region read: only that they are unchanged is of interest.
    captured: Vec<Saved>,
    inputs: Vec<Saved>,
    wanted: Vec<bool>,
}

impl Backward for Region {
    fn name(&self) -> &'static str {
        "checkpoint"
    }

    fn saved(&self) -> Vec<&Tensor> {
        self.inputs.iter().filter_map(Saved::held).collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut Grads) -> Result<()> {
        let Region { f, captured, inputs, wanted } = *self;
        captured.iter().try_for_each(Saved::check)?;
        let inputs = inputs.iter().map(Saved::value).collect::<Result<Vec<_>>>()?;
        // Leaves of the inner graph stand in for the inputs that want a gradient.
        let stand_ins: Vec<Option<Leaf>> = inputs
            .iter()
            .zip(&wanted)
            .map(|(input, &wanted)| wanted.then(|| Leaf::stand_in(input.clone())))
            .collect();
        let variables = inputs
            .into_iter()
            .zip(&stand_ins)
            .map(|(input, leaf)| leaf.as_ref().map_or_else(|| Ok(Var::constant(input)), Leaf::var))
            .collect::<Result<Vec<_>>>()?;
        let outputs = with(Recording::On, || f(&variables)).0?;
        drop(variables);
        drop(f);
        let with_gradient: Vec<(&Var, Tensor)> = outputs
            .iter()
            .zip(dy.into_vec())
            .filter_map(|(output, dy)| {
                dy.filter(|_| output.needs_gradient()).map(|dy| (output, dy))
            })
            .collect();
        let deferred = backward(&with_gradient, dx.mode)?;
        dx.deferred.append(deferred);
        for (i, leaf) in stand_ins.iter().enumerate() {
            if let Some(gradient) = leaf.as_ref().map(Leaf::take_gradient).transpose()?.flatten() {
                dx.give(i, gradient)?;
            }
        }
        Ok(())
    }
}
