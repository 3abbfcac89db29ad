//! The engine: shared graphs, second walks, updates in between, regions, recording.

use ferrotron_autograd::{
    Leaf, Var, WeightGrads, backward, checkpoint, checkpoint_discard_output, no_grad,
};
use ferrotron_tensor::ops::reduce::KeepDims;
use ferrotron_tensor::{Category, DType, Device, ErrorKind, RandomKey, Result, ShardSpec, Tensor};

use crate::inputs::{bits, values};
use crate::table::Domain;

pub fn leaf(device: &Device, name: &str, dims: &[usize]) -> Result<Leaf> {
    let seed = name.len();
    let values = values(Domain::Any, seed, dims.iter().product());
    Ok(Leaf::new(name, Tensor::from_slice(device, &values, dims)?))
}

pub fn gradient(leaf: &Leaf) -> Result<Vec<f64>> {
    leaf.gradient()?.expect("a gradient").to_f64()
}

fn message<T>(result: Result<T>) -> String {
    let error = result.err().expect("an error");
    assert_eq!(error.kind(), ErrorKind::Graph, "{error}");
    error.to_string()
}

#[test]
fn a_shared_graph_adds_up() -> Result<()> {
    let device = Device::cpu(1)?;
    let x = Leaf::new("x", Tensor::from_slice(&device, &[3.0_f64, -2.0], &[2])?);
    let v = x.var()?;
    let square = v.mul(&v)?; // both operands are one leaf
    let y = square.add(&square)?.mul(&square)?; // 2 x^4, the node used three times
    y.sum_all()?.backward()?;
    assert_eq!(gradient(&x)?, [8.0 * 27.0, 8.0 * -8.0]);
    Ok(())
}

#[test]
fn several_outputs_of_one_graph_are_walked_once() -> Result<()> {
    let device = Device::cpu(1)?;
    let x = Leaf::new("x", Tensor::from_slice(&device, &[2.0_f64], &[1])?);
    let square = x.var()?.square()?;
    let cube = square.mul(&x.var()?)?;
    let one = || Tensor::full(&device, DType::F64, &[1], 1.0);
    let leaf = x.var()?;
    backward(
        &[(&square, one()?), (&cube, one()?), (&cube, one()?), (&leaf, one()?)],
        WeightGrads::Now,
    )?
    .run()?;
    assert_eq!(gradient(&x)?, [2.0 * 2.0 + 2.0 * (3.0 * 4.0) + 1.0]);
    Ok(())
}

#[test]
fn an_unused_part_of_a_split_gets_zeros() -> Result<()> {
    let device = Device::cpu(1)?;
    let x = leaf(&device, "x", &[2, 6])?;
    let parts = x.var()?.split(&[1, 2, 3], 1)?;
    let kept = parts[1].square()?;
    drop(parts);
    kept.sum_all()?.backward()?;
    let (value, gradient) = (x.value()?.to_f64()?, gradient(&x)?);
    for (i, (value, gradient)) in value.iter().zip(gradient).enumerate() {
        let want = if (1..3).contains(&(i % 6)) { 2.0 * value } else { 0.0 };
        assert_eq!(gradient, want, "element {i}");
    }
    Ok(())
}

#[test]
fn a_second_walk_is_an_error_that_says_what_to_do() -> Result<()> {
    let device = Device::cpu(1)?;
    let x = leaf(&device, "x", &[3])?;
    let y = x.var()?.exp()?.sum_all()?;
    y.backward()?;
    assert_eq!(
        message(y.backward()),
        "backward: the graph through sum_all was walked before; its saved values are gone. Run forward again"
    );
    let shared = x.var()?.exp()?;
    shared.square()?.sum_all()?.backward()?;
    assert!(message(shared.sum_all()?.backward()).contains("through exp was walked before"));
    Ok(())
}

#[test]
fn what_cannot_be_walked_is_refused() -> Result<()> {
    let device = Device::cpu(1)?;
    let x = leaf(&device, "x", &[3])?;
    let error = x.var()?.exp()?.backward().unwrap_err();
    assert_eq!(
        error.to_string(),
        "backward: needs a scalar, got [3]; give cotangents to `backward(&[(&var, cotangent)], ..)`"
    );
    assert_eq!(
        message(no_grad(|| x.var()?.sum_all())?.backward()),
        "backward: the value depends on no leaf that was recorded; was it made under no_grad, or is every parameter frozen?"
    );
    assert!(message(x.var()?.detach().sum_all()?.backward()).contains("depends on no leaf"));
    let cotangent = Tensor::zeros(&device, DType::F64, &[4])?;
    let error = backward(&[(&x.var()?.exp()?, cotangent)], WeightGrads::Now).err().unwrap();
    assert!(error.to_string().contains("[4]") && error.to_string().contains("[3]"), "{error}");
    Ok(())
}

#[test]
fn an_update_between_forward_and_backward_is_an_error_that_names_the_leaf() -> Result<()> {
    let device = Device::cpu(1)?;
    let (w, x) = (leaf(&device, "blocks.0.weight", &[2, 3])?, leaf(&device, "x", &[4, 3])?);
    let plain = x.var()?.linear(&w.var()?, None)?.sum_all()?;
    let captured = w.clone();
    let in_region = checkpoint(&[&x.var()?], move |x| {
        Ok(vec![x[0].linear(&captured.var()?, None)?.sum_all()?])
    })?;
    let given =
        checkpoint(&[&x.var()?, &w.var()?], |x| Ok(vec![x[0].linear(&x[1], None)?.sum_all()?]))?;
    w.set_value(&w.value()?)?;
    for y in [&plain, &in_region[0], &given[0]] {
        assert_eq!(
            message(y.backward()),
            "backward: 'blocks.0.weight' was updated between forward and backward; call backward before the optimizer step"
        );
    }
    Ok(())
}

#[test]
fn a_captured_variable_is_an_error_but_a_captured_leaf_is_not() -> Result<()> {
    let device = Device::cpu(1)?;
    let x = leaf(&device, "x", &[3])?;
    let outside = x.var()?.exp()?;
    let captured = outside.clone();
    let result = checkpoint(&[&x.var()?], move |x| Ok(vec![x[0].mul(&captured)?]));
    assert_eq!(
        message(result),
        "checkpoint: the region uses a variable made outside by exp; pass it as an input"
    );
    // Also where a region within the region does it, and after the failure recording continues.
    let captured = outside.clone();
    let result = checkpoint(&[&x.var()?], move |x| {
        let captured = captured.clone();
        checkpoint(&[&x[0]], move |x| Ok(vec![x[0].mul(&captured)?]))
    });
    assert!(message(result).contains("made outside by exp"));
    assert!(x.var()?.exp()?.needs_gradient());
    Ok(())
}

/// Dropout, a parameter that is captured, one that is given, and an output without users.
fn block(w: &Leaf, x: &[Var]) -> Result<Vec<Var>> {
    let key = RandomKey::new(3, 1, "block.dropout");
    let hidden = x[0].linear(&x[1], None)?.gelu_tanh()?;
    let dropped = hidden.dropout(0.5, &key, &ShardSpec::unsharded(hidden.dims()))?;
    Ok(vec![dropped.linear(&w.var()?, None)?, hidden])
}

#[test]
fn nested_regions_give_the_same_bits() -> Result<()> {
    let device = Device::cpu(1)?;
    let [x, fc, proj] = [("x", [4, 3]), ("fc", [5, 3]), ("proj", [3, 5])]
        .map(|(name, dims)| leaf(&device, name, &dims).unwrap());
    let run = |depth: usize, mode: WeightGrads| -> Result<Vec<Vec<u64>>> {
        [&x, &fc, &proj].into_iter().for_each(Leaf::zero_gradient);
        let (w, inner) = (proj.clone(), proj.clone());
        let inputs = [x.var()?, fc.var()?];
        let operands: Vec<&Var> = inputs.iter().collect();
        let y = match depth {
            0 => block(&w, &inputs)?,
            1 => checkpoint(&operands, move |x| block(&w, x))?,
            2 => checkpoint_discard_output(&operands, move |x| block(&w, x))?,
            _ => checkpoint(&operands, move |x| {
                let inner = inner.clone();
                checkpoint(&x.iter().collect::<Vec<_>>(), move |x| block(&inner, x))
            })?,
        };
        // The same region's output feeds a second one, whose other operand is a leaf again.
        let again = y[0].mul(&x.var()?)?.sum_all()?;
        let one = Tensor::full(&device, DType::F64, &[], 1.0)?;
        let deferred = backward(&[(&again, one)], mode)?;
        let expected = match (mode, depth) {
            (WeightGrads::Now, _) => 0,
            (WeightGrads::Deferred, 0) => 2,
            (WeightGrads::Deferred, _) => 1, // an input of a region is needed at once
        };
        assert_eq!(deferred.len(), expected, "depth {depth}, {mode:?}");
        deferred.run()?;
        let gradients = [&x, &fc, &proj].map(|leaf| bits(&leaf.gradient()?.expect("a gradient")));
        [bits(y[0].value())].into_iter().chain(gradients).collect()
    };
    let want = run(0, WeightGrads::Now)?;
    for depth in 0..4 {
        for mode in [WeightGrads::Now, WeightGrads::Deferred] {
            assert_eq!(run(depth, mode)?, want, "depth {depth}, {mode:?}");
        }
    }
    Ok(())
}

#[test]
fn a_region_of_constants_still_leads_to_its_parameters() -> Result<()> {
    let device = Device::cpu(1)?;
    let w = leaf(&device, "w", &[3])?;
    let data = Var::constant(Tensor::from_slice(&device, &[1.0_f64, 2.0, 3.0], &[3])?);
    let captured = w.clone();
    let y = checkpoint(&[&data], move |x| Ok(vec![x[0].mul(&captured.var()?)?, x[0].exp()?]))?;
    y[0].sum_all()?.backward()?;
    assert_eq!(gradient(&w)?, [1.0, 2.0, 3.0]);
    Ok(())
}

#[test]
fn no_grad_keeps_nothing() -> Result<()> {
    let device = Device::cpu(1)?;
    let [x, w, scale] = [("x", [4, 6].as_slice()), ("w", &[6, 6]), ("scale", &[6])]
        .map(|(name, dims)| leaf(&device, name, dims).unwrap());
    let before = device.memory();
    let run = || -> Result<Var> {
        let x = x.var()?.layer_norm(&scale.var()?, None, 1e-5)?.linear(&w.var()?, None)?;
        x.gelu_tanh()?.softmax(-1)?.mul(&x)?.amax(&[1], KeepDims::Drop)
    };
    let y = no_grad(run)?;
    assert!(!y.needs_gradient());
    assert_eq!(y.saved_bytes(), 0);
    assert_eq!(device.memory().current, before.current + y.value().buffer_bytes());
    assert_eq!(device.memory().peak_by_category[Category::Saved as usize], 0);
    drop(y);
    assert_eq!(device.memory().by_category, before.by_category);
    Ok(())
}

#[test]
fn a_forward_that_is_not_walked_leaves_nothing_behind() -> Result<()> {
    let device = Device::cpu(1)?;
    let [x, w] = [("x", [4, 6]), ("w", [6, 6])].map(|(name, d)| leaf(&device, name, &d).unwrap());
    let forward = || -> Result<Var> {
        let captured = w.clone();
        let y = checkpoint(&[&x.var()?.tanh()?], move |x| {
            Ok(vec![x[0].linear(&captured.var()?, None)?.gelu_tanh()?])
        })?;
        y[0].matmul(&w.var()?)?.log_softmax(-1)?.sum_all()
    };
    let before = device.memory().by_category;
    drop(forward()?);
    assert_eq!(device.memory().by_category, before);
    // A walked graph keeps nothing either while its variables live: only the value and the gradients.
    let y = forward()?;
    y.backward()?;
    let gradients = 8 * (4 * 6 + 6 * 6);
    let now = device.memory();
    assert_eq!(now.bytes(Category::Saved), 0);
    assert_eq!(now.current, before.iter().sum::<usize>() + gradients + y.value().buffer_bytes());
    Ok(())
}
