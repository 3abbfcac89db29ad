//! Hooks of what is kept for backward, and the packing that is made of them.

use ferrotron_autograd::ops::attention::packed_attention;
use ferrotron_autograd::{
    ActivationCompression, ActivationCompressionConfig, Leaf, Offloader, Packed, SavedKind,
    SavedTensorHandle, Var, ZeroEncoding, checkpoint, no_grad, saved_tensors_hooks,
};
use ferrotron_tensor::ops::attention::AttentionConfig;
use ferrotron_tensor::{Category, DType, Device, Error, MemoryKind, Result, Tensor};
use std::sync::{Arc, Mutex};

use crate::inputs::{Seen, bits, report, run, samples, which};
use crate::table::table;

/// Twice the tensor, so that unpacking it shows.
struct Doubled(Tensor);

impl Packed for Doubled {
    fn unpack(&self) -> Result<Tensor> {
        self.0.mul_scalar(2.0)
    }

    fn resident_tensor(&self) -> Option<Tensor> {
        None
    }
}

fn leaf(device: &Device, dims: &[usize], value: f64) -> Result<Leaf> {
    Ok(Leaf::new("x", Tensor::full(device, DType::F32, dims, value)?))
}

/// Runs `f`; also the roles and lengths of what it keeps.
fn kept<R>(f: impl FnOnce() -> Result<R>) -> Result<(R, Vec<(SavedKind, usize)>)> {
    let mut found = Vec::new();
    let result = saved_tensors_hooks(
        |kept| {
            for kept in kept {
                let tensor = kept.tensor()?.expect("it is kept");
                found.push((kept.kind(), tensor.numel()));
            }
            Ok(())
        },
        f,
    )?;
    Ok((result, found))
}

#[test]
fn hooks_see_each_buffer_that_is_kept_once() -> Result<()> {
    use SavedKind::{Activation, Sparse, Statistic};
    let device = Device::cpu(1)?;
    let (x, w) = (leaf(&device, &[7, 12], 0.5)?, leaf(&device, &[4, 4], 0.5)?);
    let y = x.var()?.add_scalar(1.0)?;
    // Neither the parameter, nor what was not computed; x once for both of its uses.
    let (_, found) = kept(|| y.square()?.mul(&y)?.sum_all())?;
    assert_eq!(found, [(Activation, 84)]);
    let weight = w.var()?;
    let (_, found) = kept(|| weight.square()?.linear(&weight, None)?.sum_all())?;
    assert_eq!(found, [], "a square is computed again from the parameter");
    // The result of attention is its own gradient's and the next layer's.
    let qkv = y.reshape(&[1, 7, 12])?;
    let attend = || {
        let out = packed_attention(&qkv, 1, 1, &AttentionConfig::causal(4))?;
        out.linear(&weight, None)?.relu()?.linear(&weight, None)
    };
    let (_, found) = kept(attend)?;
    assert_eq!(found, [(Activation, 28), (Statistic, 7), (Activation, 84), (Sparse, 28)]);
    // The strictest role counts.
    let (_, found) =
        kept(|| y.softmax(-1)?.log_sum_exp(&[1], ferrotron_tensor::ops::reduce::KeepDims::Drop))?;
    assert_eq!(found, [(Activation, 84), (Statistic, 7)]);
    Ok(())
}

#[test]
fn what_is_unpacked_is_what_gradients_are_made_of() -> Result<()> {
    let device = Device::cpu(1)?;
    let x = leaf(&device, &[3], 0.5)?;
    let mut handles = Vec::new();
    let y = x.var()?.add_scalar(1.0)?;
    let z = saved_tensors_hooks(
        |kept| {
            for kept in kept {
                kept.replace(Doubled(kept.tensor()?.expect("it is kept")));
                handles.push(kept);
            }
            Ok(())
        },
        || y.square()?.sum_all(),
    )?;
    assert_eq!((z.saved_bytes(), handles.len()), (0, 1));
    z.backward()?;
    assert_eq!(x.gradient()?.expect("a gradient").to_f64()?, [2.0 * 2.0 * 1.5; 3]);
    assert!(handles[0].tensor()?.is_none(), "backward has used it up");
    handles[0].replace(Doubled(y.value().clone())); // too late, and nobody minds
    assert_eq!(z.saved_bytes(), 0);
    Ok(())
}

#[test]
fn hooks_are_called_where_something_is_kept_and_nowhere_else() -> Result<()> {
    let device = Device::cpu(1)?;
    let x = leaf(&device, &[3], 0.5)?;
    let never = |_: Vec<SavedTensorHandle>| -> Result<()> { panic!("nothing is recorded") };
    no_grad(|| saved_tensors_hooks(never, || x.var()?.add_scalar(1.0)?.square()))?;
    // A region saves its input; hooks do not see what it recomputes in backward.
    let y = x.var()?.add_scalar(1.0)?;
    let region = || {
        let y = checkpoint(&[&y], |y| {
            let inside = saved_tensors_hooks(|_| Ok(()), || y[0].square()?.tanh()?.square())?;
            Ok(vec![inside])
        })?;
        y[0].sum_all()
    };
    let (z, found) = kept(region)?;
    assert_eq!(found, [(SavedKind::Activation, 3)]);
    z.backward()?;
    // An error of either side is the caller's.
    let refuse = |_: Vec<SavedTensorHandle>| Err(Error::value("hook", "no"));
    let refused = saved_tensors_hooks(refuse, || y.square());
    assert_eq!(refused.unwrap_err().to_string(), "hook: no");
    let refused: Result<Var> = saved_tensors_hooks(never, || Err(Error::value("f", "no")));
    assert_eq!(refused.unwrap_err().to_string(), "f: no");
    // And recording continues as before.
    assert_eq!(y.square()?.saved_bytes(), 3 * 4);
    Ok(())
}

#[test]
fn backward_tells_when_it_arrives() -> Result<()> {
    let device = Device::cpu(1)?;
    let x = leaf(&device, &[2], 0.5)?;
    let order = Arc::new(Mutex::new(Vec::new()));
    let note = |what: &'static str| {
        let order = order.clone();
        move |gradient: Tensor| {
            order.lock().unwrap().push(what);
            Ok(gradient)
        }
    };
    let y = x
        .var()?
        .exp()?
        .register_hook(note("first made"))?
        .exp()?
        .register_hook(note("last made"))?;
    y.sum_all()?.backward()?;
    assert_eq!(*order.lock().unwrap(), ["last made", "first made"]);
    let want = (0.5_f64.exp().exp() * 0.5_f64.exp()) as f32;
    let got = x.gradient()?.expect("a gradient").to_f64()?[0];
    assert!((got - f64::from(want)).abs() < 4.0 * f64::from(f32::EPSILON) * got, "{got}, {want}");
    let failing = x.var()?.register_hook(|_| Err(Error::io("fetch", "no")))?;
    assert_eq!(failing.sum_all()?.backward().unwrap_err().to_string(), "fetch: no");
    Ok(())
}

/// Every row of the table: what was in host memory, or stored with a bit for each zero, gives the same bits.
#[test]
fn exact_packing_changes_no_bit_of_any_gradient() {
    let offloader = Arc::new(Offloader::start(&Device::cpu(1).unwrap()).unwrap());
    let bitmap = ActivationCompressionConfig {
        zeros: ZeroEncoding::Bitmap,
        ..ActivationCompressionConfig::default()
    };
    let mut failures = Vec::new();
    for case in table() {
        for (shapes, dtype) in case
            .shapes
            .iter()
            .flat_map(|&shapes| [DType::F64, DType::BF16].map(|dtype| (shapes, dtype)))
        {
            // Computed, so that the operands are kept and not their leaves, and transposed in memory.
            let computed = |x: &[Var]| -> Result<Var> {
                let transposed = |x: &Var| {
                    let order: Vec<usize> = (0..x.dims().len()).rev().collect();
                    x.permute(&order)?.mul_scalar(1.0)?.permute(&order)
                };
                (case.f)(&x.iter().map(transposed).collect::<Result<Vec<_>>>()?)
            };
            let compare = |packing: &ActivationCompression| -> Result<()> {
                let inputs = samples(&case, shapes, Seen::Contiguous, &Device::cpu(1)?, dtype)?;
                let packed = |x: &[Var]| {
                    let (y, _) = packing.run(|| computed(x))?;
                    offloader.wait()?;
                    Ok(y)
                };
                let (want, got) = (run(&computed, &inputs)?, run(&packed, &inputs)?);
                for (i, (want, got)) in want.iter().zip(&got).enumerate() {
                    if bits(want)? != bits(got)? {
                        let message = format!("{}: want {want:?}, got {got:?}", which(i));
                        return Err(Error::value("packing", message));
                    }
                }
                Ok(())
            };
            for packing in [
                ActivationCompression::new(
                    ActivationCompressionConfig::default(),
                    Some(offloader.clone()),
                ),
                ActivationCompression::new(bitmap, Some(offloader.clone())),
                ActivationCompression::new(bitmap, None),
            ] {
                if let Err(error) = compare(&packing) {
                    failures.push(format!("{} {shapes:?} {dtype}: {error}", case.name()));
                }
            }
        }
    }
    report(&failures);
}

#[test]
fn packing_moves_and_narrows_the_bytes_it_says() -> Result<()> {
    let device = Device::cpu(1)?;
    let offloader = Arc::new(Offloader::start(&device)?);
    let (n, saved) = (1 << 12, Category::Saved);
    // Half of the elements are positive.
    let values: Vec<f32> = (0..n).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 } * i as f32).collect();
    let positive = n / 2 - 1; // 0 is not
    let x = Leaf::new("x", Tensor::from_slice(&device, &values, &[n])?);
    let in_16_bits = |zeros| ActivationCompressionConfig { dtype: Some(DType::BF16), zeros };
    for (config, here) in [
        (ActivationCompressionConfig::default(), 4 * n),
        (in_16_bits(ZeroEncoding::Kept), 2 * n),
        (
            ActivationCompressionConfig {
                zeros: ZeroEncoding::Bitmap,
                ..ActivationCompressionConfig::default()
            },
            n / 8 + 4 * positive,
        ),
        (in_16_bits(ZeroEncoding::Bitmap), n / 8 + 2 * positive),
    ] {
        for offloader in [None, Some(offloader.clone())] {
            let before = device.memory().bytes(saved);
            let packing = ActivationCompression::new(config, offloader.clone());
            let x = x.var()?.mul_scalar(1.0)?;
            // The ReLU keeps its result, which the square keeps too.
            let (y, offloaded) = packing.run(move || x.relu()?.square())?;
            let there = match &offloader {
                Some(offloader) => {
                    // Moved or not, it is in use until it is waited for: how much is in use when depends on no thread.
                    while y.saved_bytes() > 0 {
                        std::thread::yield_now();
                    }
                    assert_eq!(device.memory().bytes(saved) - before, here, "{config:?}");
                    offloader.wait()?;
                    here
                }
                None => 0,
            };
            assert_eq!(y.saved_bytes(), here - there, "{config:?}");
            assert_eq!(device.memory().bytes(saved) - before, here - there, "{config:?}");
            assert_eq!(device.memory_of(MemoryKind::Host).bytes(saved), there, "{config:?}");
            assert_eq!(offloaded.is_some(), there > 0);
            offloaded.map_or(Ok(()), |offloaded| offloaded.prefetch())?;
            let sum = y.sum_all()?;
            drop(y); // it knows how to be computed again
            sum.backward()?;
            packing.run(|| Ok(()))?; // the thread has let go of what it fetched
            assert_eq!(device.memory_of(MemoryKind::Host).current, 0, "{config:?}");
        }
    }
    Ok(())
}
