//! Leaves: hooks, deferred weight gradients, missing gradients, and gradients that are written in place.

use ferrotron_autograd::{
    Fetch, GradientReduction, Leaf, SharedFlatBuffer, Var, WeightGrads, backward, missing_gradients,
};
use ferrotron_tensor::ops::layer_norm::{layer_norm, layer_norm_backward};
use ferrotron_tensor::{Category, DType, Device, Error, FlatBuffer, Result, Tensor, bf16};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use crate::engine::{gradient, leaf};
use crate::inputs::bits;

/// A counter of calls that saw the complete gradient.
fn count_calls(leaf: &Leaf, expected: usize) -> (Arc<AtomicUsize>, Arc<GradientReduction>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let (counter, watched) = (calls.clone(), leaf.clone());
    let reduction = leaf.set_reduction(move || {
        assert_eq!(watched.contributions(), expected, "{}", watched.name());
        assert!(watched.gradient()?.is_some());
        counter.fetch_add(1, Relaxed);
        Ok(())
    });
    let reduction = reduction.expect("the leaf has no owner");
    reduction.expect(expected);
    (calls, reduction)
}

/// x W^T twice, so that the weight has two uses, and a bias with one.
fn twice(x: &Leaf, w: &Leaf, b: &Leaf) -> Result<Var> {
    let y = x.var()?.linear(&w.var()?, Some(&b.var()?))?.tanh()?;
    y.linear(&w.var()?, None)?.square()?.sum_all()
}

fn three(device: &Device) -> Result<[Leaf; 3]> {
    Ok([leaf(device, "x", &[4, 3])?, leaf(device, "weight", &[3, 3])?, leaf(device, "bias", &[3])?])
}

#[test]
fn a_reduction_runs_once_after_the_expected_contributions() -> Result<()> {
    let device = Device::cpu(1)?;
    let [x, w, b] = three(&device)?;
    // Two uses and two microbatches.
    let ((of_w, _w), (of_b, _b)) = (count_calls(&w, 4), count_calls(&b, 2));
    for step in 1..=2 {
        [&w, &b].into_iter().for_each(Leaf::zero_gradient);
        twice(&x, &w, &b)?.backward()?;
        assert_eq!((of_w.load(Relaxed), of_b.load(Relaxed)), (step - 1, step - 1));
        twice(&x, &w, &b)?.backward()?;
        assert_eq!((of_w.load(Relaxed), of_b.load(Relaxed)), (step, step));
    }
    Ok(())
}

#[test]
fn a_reduction_waits_for_deferred_contributions_and_its_error_comes_back() -> Result<()> {
    let device = Device::cpu(1)?;
    let [x, w, b] = three(&device)?;
    let ((of_w, w_owner), (of_b, _b)) = (count_calls(&w, 2), count_calls(&b, 1));
    let one = || Tensor::full(&device, DType::F64, &[], 1.0);
    let y = twice(&x, &w, &b)?;
    let deferred = backward(&[(&y, one()?)], WeightGrads::Deferred)?;
    assert_eq!((deferred.len(), of_w.load(Relaxed), of_b.load(Relaxed)), (2, 0, 1));
    assert!(w.gradient()?.is_none());
    deferred.run()?;
    assert_eq!(of_w.load(Relaxed), 1);
    drop(w_owner);
    let failing =
        w.set_reduction(|| Err(ferrotron_tensor::Error::io("all_reduce", "rank 3 left")))?;
    failing.expect(4);
    let y = twice(&x, &w, &b)?;
    let error = backward(&[(&y, one()?)], WeightGrads::Deferred)?.run().unwrap_err();
    assert_eq!(error.to_string(), "weight: all_reduce: rank 3 left");
    Ok(())
}

/// Hooks that provide memory are replaced, unless an owner that still exists needs them.
#[test]
fn the_memory_hooks_of_an_owner_stay_as_long_as_it_exists() -> Result<()> {
    let w = leaf(&Device::cpu(1)?, "weight", &[3])?;
    let value = w.value()?;
    let fetch = || -> Fetch { Arc::new(|| Ok(())) };
    let owner = w.set_reduction(|| Ok(()))?;
    w.set_unshard_hook(fetch())?;
    w.set_gradient_alloc_hook(fetch())?;
    let again = [w.set_unshard_hook(fetch()), w.set_gradient_alloc_hook(fetch())];
    for (what, refused) in ["value", "gradient"].into_iter().zip(again) {
        let error = refused.unwrap_err().to_string();
        let start = format!("leaf: the {what} of 'weight' comes from a DataParallel or Trainer");
        assert!(error.starts_with(&start), "{error}");
    }
    drop(owner);
    w.set_unshard_hook(fetch())?;
    w.set_gradient_alloc_hook(fetch())?;
    let error = w.set_value(&value).unwrap_err().to_string();
    assert!(error.starts_with("leaf: 'weight' is fetched before each use"), "{error}");
    w.unbind()?;
    w.set_value(&value)
}

#[test]
fn hooks_are_a_list_and_the_reduction_is_not_in_it() -> Result<()> {
    let device = Device::cpu(1)?;
    let [x, w, b] = three(&device)?;
    let (reductions, _owner) = count_calls(&w, 2);
    let error = w.set_reduction(|| Ok(())).map(drop).unwrap_err().to_string();
    let refused = "leaf: 'weight' belongs to a DataParallel or Trainer that still exists: ";
    assert!(error.starts_with(refused), "{error}");
    let seen = Arc::new(Mutex::new(Vec::new()));
    let watch = |name: &'static str| {
        let (seen, reductions) = (seen.clone(), reductions.clone());
        w.add_hook(move |leaf, gradient| {
            assert_eq!(bits(gradient)?, bits(&leaf.gradient()?.expect("a gradient"))?);
            assert_eq!(reductions.load(Relaxed), 0, "hooks come first");
            seen.lock().unwrap().push((name, leaf.contributions()));
            Ok(())
        })
    };
    let (first, _second) = (watch("first"), watch("second"));
    twice(&x, &w, &b)?.backward()?;
    let all = [("first", 1), ("second", 1), ("first", 2), ("second", 2)];
    assert_eq!(std::mem::take(&mut *seen.lock().unwrap()), all);
    assert_eq!(reductions.swap(0, Relaxed), 1);

    assert!(w.remove_hook(first) && !w.remove_hook(first));
    // A hook may remove itself, and others, while it runs.
    let once = Arc::new(Mutex::new(None));
    let slot = once.clone();
    *once.lock().unwrap() = Some(w.add_hook(move |leaf, _| {
        slot.lock().unwrap().take().map(|id| leaf.remove_hook(id));
        Ok(())
    }));
    w.zero_gradient();
    twice(&x, &w, &b)?.backward()?;
    assert_eq!(*seen.lock().unwrap(), [("second", 1), ("second", 2)]);
    assert_eq!((reductions.swap(0, Relaxed), once.lock().unwrap().is_none()), (1, true));

    let failing = w.add_hook(|_, _| Err(Error::value("hook", "enough")));
    w.zero_gradient();
    assert_eq!(twice(&x, &w, &b)?.backward().unwrap_err().to_string(), "hook: enough");
    assert!(w.remove_hook(failing));
    Ok(())
}

#[test]
fn deferred_gradients_are_the_same_bits() -> Result<()> {
    let device = Device::cpu(1)?;
    let [x, w, b] = three(&device)?;
    let run = |mode: WeightGrads| -> Result<Vec<Vec<u64>>> {
        [&x, &w, &b].into_iter().for_each(Leaf::zero_gradient);
        let mut waiting = Vec::new();
        for scale in [1.0, -0.7] {
            let y = twice(&x, &w, &b)?;
            let cotangent = Tensor::full(&device, DType::F64, &[], scale)?;
            waiting.push(backward(&[(&y, cotangent)], mode)?);
        }
        waiting.into_iter().try_for_each(|deferred| deferred.run())?;
        [&x, &w, &b].map(|leaf| bits(&leaf.gradient()?.expect("a gradient"))).into_iter().collect()
    };
    assert_eq!(run(WeightGrads::Deferred)?, run(WeightGrads::Now)?);
    Ok(())
}

#[test]
fn missing_gradients_are_named() -> Result<()> {
    let device = Device::cpu(1)?;
    let [x, w, b] = three(&device)?;
    x.var()?.linear(&w.var()?, None)?.sum_all()?.backward()?;
    assert_eq!(missing_gradients([&x, &w, &b]), ["bias"]);
    w.zero_gradient();
    assert_eq!(missing_gradients([&x, &w, &b]), ["weight", "bias"]);
    assert!(w.gradient()?.is_none());
    Ok(())
}

#[test]
fn zeroing_makes_the_next_contribution_overwrite() -> Result<()> {
    let device = Device::cpu(1)?;
    let [x, w, b] = three(&device)?;
    let run = || twice(&x, &w, &b)?.backward();
    run()?;
    let once = [gradient(&x)?, gradient(&w)?, gradient(&b)?];
    run()?;
    let close =
        |got: f64, want: f64| (got - want).abs() <= 8.0 * f64::EPSILON * want.abs().max(1.0);
    for (leaf, once) in [&x, &w, &b].into_iter().zip(&once) {
        assert!(gradient(leaf)?.iter().zip(once).all(|(&got, once)| close(got, 2.0 * once)));
        leaf.zero_gradient();
    }
    run()?;
    assert_eq!([gradient(&x)?, gradient(&w)?, gradient(&b)?], once);
    Ok(())
}

fn pointer(leaf: &Leaf) -> Result<*const f64> {
    Ok(leaf.gradient()?.expect("a gradient").as_slice::<f64>()?.as_ptr())
}

#[test]
fn gradients_are_written_in_place() -> Result<()> {
    let device = Device::cpu(1)?;
    let [x, w, b] = three(&device)?;
    let parts = [("weight".to_string(), vec![3, 3]), ("bias".to_string(), vec![3])];
    let flat = |category| -> Result<SharedFlatBuffer> {
        Ok(SharedFlatBuffer::new(FlatBuffer::new(&device, DType::F64, category, &parts)?))
    };
    // Gradients of leaves on their own first, then of leaves in flats.
    twice(&x, &w, &b)?.backward()?;
    let (want, own) = ([gradient(&w)?, gradient(&b)?], pointer(&w)?);
    [&x, &w, &b].into_iter().for_each(Leaf::zero_gradient);
    twice(&x, &w, &b)?.backward()?;
    assert_eq!(pointer(&w)?, own, "the weight's gradient moved");

    let (weights, gradients) = (flat(Category::Weights)?, flat(Category::Gradients)?);
    let values = [w.value()?, b.value()?];
    for (range, leaf) in [&w, &b].into_iter().enumerate() {
        leaf.bind_value(&weights, range)?;
        leaf.bind_gradient(&gradients, range);
        assert!(leaf.gradient()?.is_none());
        assert_eq!(bits(&leaf.value()?)?, bits(&values[range])?);
    }
    drop(values);
    let base = gradients.lock().unwrap().slice(..)?.as_slice::<f64>()?.as_ptr();
    let allocated = device.memory().bytes(Category::Gradients);
    for _ in 0..2 {
        [&w, &b].into_iter().for_each(Leaf::zero_gradient);
        twice(&x, &w, &b)?.backward()?;
        assert_eq!([gradient(&w)?, gradient(&b)?], want);
        assert_eq!([pointer(&w)?, pointer(&b)?], [base, base.wrapping_add(9)]);
        assert_eq!(device.memory().bytes(Category::Gradients), allocated);
    }
    assert_eq!(gradients.lock().unwrap().slice(..)?.to_vec::<f64>()?, want.concat());
    // The weights are free to be written as soon as the graph is gone.
    weights.lock().unwrap().with_slice_mut(.., |weights| {
        weights.as_mut_slice::<f64>()?.fill(0.5);
        Ok(())
    })?;
    [&w, &b].into_iter().for_each(Leaf::mark_updated);
    assert_eq!(w.value()?.to_f64()?, [0.5; 9]);
    Ok(())
}

#[test]
fn a_gradient_may_be_wider_than_its_leaf() -> Result<()> {
    let device = Device::cpu(1)?;
    let narrow = |x: &Leaf| Ok(Leaf::new(x.name(), x.value()?.cast(DType::BF16)?));
    let [x, w, b] = three(&device)?.map(|leaf| narrow(&leaf)).map(Result::unwrap);
    let parts = [("weight".to_string(), vec![3, 3]), ("bias".to_string(), vec![3])];
    let flat = FlatBuffer::new(&device, DType::F32, Category::Gradients, &parts)?;
    let flat = SharedFlatBuffer::new(flat);
    w.bind_gradient(&flat, 0);
    b.bind_gradient(&flat, 1);
    for _ in 0..2 {
        twice(&x, &w, &b)?.backward()?;
    }
    let (of_w, of_b) = (w.gradient()?.unwrap(), b.gradient()?.unwrap());
    assert_eq!((of_w.dtype(), of_b.dtype()), (DType::F32, DType::F32));
    // Against f64 at the same bf16 values: each of the roundings to bf16 in between is at most 2^-8.
    let wide = |x: &Leaf| Ok(Leaf::new(x.name(), x.value()?.cast(DType::F64)?));
    let [x, w, b] = [&x, &w, &b].map(wide).map(Result::unwrap);
    for _ in 0..2 {
        twice(&x, &w, &b)?.backward()?;
    }
    for (got, want) in [(of_w, gradient(&w)?), (of_b, gradient(&b)?)] {
        let largest = want.iter().fold(1.0, |a: f64, b| a.max(b.abs()));
        for (got, want) in got.to_f64()?.iter().zip(&want) {
            assert!((got - want).abs() <= 8.0 * 2.0_f64.powi(-8) * largest, "{got} {want}");
        }
    }
    Ok(())
}

#[test]
fn what_a_norm_adds_up_in_f32_is_not_rounded_on_its_way() -> Result<()> {
    let device = Device::cpu(1)?;
    let leaf = |name: &str, dims: &[usize]| {
        let numel = dims.iter().product::<usize>();
        let numbers: Vec<bf16> = (0..numel).map(|i| bf16::from_f32((i * i % 23) as f32)).collect();
        Ok::<_, Error>(Leaf::new(name, Tensor::from_slice(&device, &numbers, dims)?))
    };
    let (x, w, b) = (leaf("x", &[5, 4])?, leaf("w", &[4])?, leaf("b", &[4])?);
    let parts = [("weight".to_string(), vec![4]), ("bias".to_string(), vec![4])];
    let flat = FlatBuffer::new(&device, DType::F32, Category::Gradients, &parts)?;
    let flat = SharedFlatBuffer::new(flat);
    w.bind_gradient(&flat, 0);
    let dy = leaf("dy", &[5, 4])?.value()?;
    let y = x.var()?.layer_norm(&w.var()?, Some(&b.var()?), 1e-5)?;
    backward(&[(&y, dy.clone())], WeightGrads::Now)?.run()?;

    let (_, mean, rstd) = layer_norm(&x.value()?, &w.value()?, None, 1e-5)?;
    let (_, of_w, of_b) = layer_norm_backward(&dy, &x.value()?, &mean, &rstd, &w.value()?, None)?;
    let exact = of_w.to_f64()?;
    assert_ne!(exact, of_w.cast(DType::BF16)?.to_f64()?, "the sums need more than 16 bits");
    assert_eq!(gradient(&w)?, exact);
    // A gradient that is collected in 16 bits is rounded once.
    assert_eq!(b.gradient()?.unwrap().dtype(), DType::BF16);
    assert_eq!(gradient(&b)?, of_b.cast(DType::BF16)?.to_f64()?);
    Ok(())
}

#[test]
fn a_lazy_leaf_is_made_once_and_where_it_belongs() -> Result<()> {
    let device = Device::cpu(1)?;
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = calls.clone();
    let w = Leaf::lazy("w", &device, DType::F64, &[2], move |tensor| {
        counter.fetch_add(1, Relaxed);
        tensor.as_mut_slice::<f64>()?.copy_from_slice(&[1.5, -0.5]);
        Ok(())
    });
    assert_eq!((device.memory().current, w.numel()), (0, 2));
    let parts = [("w".to_string(), vec![2])];
    let flat =
        SharedFlatBuffer::new(FlatBuffer::new(&device, DType::F64, Category::Weights, &parts)?);
    w.bind_value(&flat, 0)?;
    assert_eq!(flat.lock().unwrap().slice(..)?.to_vec::<f64>()?, [1.5, -0.5]);
    assert_eq!(w.value()?.to_f64()?, [1.5, -0.5]);
    assert_eq!(calls.load(Relaxed), 1);
    let failing = Leaf::lazy("w", &device, DType::F64, &[2], |_| {
        Err(ferrotron_tensor::Error::io("checkpoint", "the file is short"))
    });
    assert_eq!(failing.value().unwrap_err().to_string(), "checkpoint: the file is short");
    let again = failing.value().unwrap_err().to_string();
    assert_eq!(again, "leaf: 'w' has no value: its initialisation failed before");
    Ok(())
}

/// It would wait for itself.
#[test]
fn a_hook_that_leads_to_its_own_call_is_refused() -> Result<()> {
    let leaf = Leaf::new("w", Tensor::full(&Device::cpu(1)?, DType::F64, &[2], 1.0)?);
    let own = leaf.clone();
    let hook = leaf.add_hook(move |_, _| own.accumulate_with(|gradient, _| gradient.zero_fill()));
    let error = leaf.var()?.sum_all()?.backward().unwrap_err().to_string();
    assert_eq!(error, "hook: a hook of 'w' adds to the gradient of 'w' itself");
    assert!(leaf.remove_hook(hook));
    leaf.zero_gradient();
    leaf.var()?.sum_all()?.backward()
}
