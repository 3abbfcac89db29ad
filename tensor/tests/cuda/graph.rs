//! Captured work: that replays give what the work itself gives, from memory of their own, and what cannot be captured.

use ferrotron_cuda::nvrtc::Architecture;
use ferrotron_tensor::ops::attention::{AttentionConfig, KeyRanges, attention};
use ferrotron_tensor::ops::dropout::dropout;
use ferrotron_tensor::ops::index::gather;
use ferrotron_tensor::ops::sq_norm::all_finite;
use ferrotron_tensor::ops::step::DeviceStepParams;
use ferrotron_tensor::ops::zero_bitmap::compress;
use ferrotron_tensor::{
    CudaGraph, DType, Device, MemoryKind, RandomKey, Result, ShardSpec, Tensor, copy_async,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::small_model::{Model, numbers};
use crate::support::{gpu, stand_in};

use DType::{F32, F64};

fn bytes(tensors: &[&Tensor]) -> Result<Vec<Vec<u8>>> {
    tensors.iter().map(|x| Ok(x.bytes()?.into_owned())).collect()
}

#[test]
fn a_replay_gives_what_the_work_gives() -> Result<()> {
    const STEPS: u64 = 5;
    let (Some(plain), Some(device)) =
        (gpu("a_replay_gives_what_the_work_gives")?, gpu("a_replay_gives_what_the_work_gives")?)
    else {
        return Ok(());
    };
    let (mut want, mut got) = (Model::new(&plain)?, Model::new(&device)?);
    got.feed(0)?;
    drop(got.work(0)?);
    // The keys' step is that of the capture, which no replay has.
    let (mut graph, results) = CudaGraph::capture(&device, || got.work(77))?;
    want.feed(0)?;
    drop(want.work(0)?);
    assert_eq!(bytes(&got.state())?, bytes(&want.state())?, "nothing ran in the capture");
    let mut others = Vec::new();
    for step in 1..STEPS {
        want.feed(step)?;
        let expected = want.work(step)?;
        got.feed(step)?;
        graph.replay(step)?;
        // Other work comes and goes between replays, and draws numbers of other steps.
        for (i, n) in [1, 1000, 100_000, 3].into_iter().enumerate() {
            let place = ShardSpec::unsharded(&[n]);
            let key = RandomKey::new(1, 100 + step, "other");
            let x = Tensor::full(&device, F32, &[n], step as f64)?;
            drop(dropout(&x, 0.5, &key, &place)?);
            if i as u64 % 2 == step % 2 {
                others.push((step, x));
            }
        }
        assert_eq!(bytes(&got.state())?, bytes(&want.state())?, "state after step {step}");
        let results: Vec<&Tensor> = results.iter().collect();
        assert_eq!(bytes(&results)?, bytes(&expected.iter().collect::<Vec<_>>())?, "step {step}");
    }
    for (step, x) in &others {
        assert!(x.to_vec::<f32>()?.iter().all(|&x| x == *step as f32), "written by a replay");
    }
    // Results stay where they are when the graph is gone.
    let last = bytes(&results.iter().collect::<Vec<_>>())?;
    drop(graph);
    drop((0..20).map(|_| Tensor::full(&device, F32, &[1000], 1.0)).collect::<Result<Vec<_>>>()?);
    assert_eq!(bytes(&results.iter().collect::<Vec<_>>())?, last);
    Ok(())
}

#[test]
fn inputs_are_sent_while_the_gpu_is_behind() -> Result<()> {
    let Some(device) = gpu("inputs_are_sent_while_the_gpu_is_behind")? else { return Ok(()) };
    let mut x = Tensor::from_slice(&device, &[0.0_f32; 3000], &[3000])?;
    let mut sum = Tensor::zeros(&device, F32, &[3000])?;
    let mut add = || -> Result<()> {
        let next = sum.add(&x)?;
        sum.copy_from(&next)
    };
    add()?;
    let (mut graph, ()) = CudaGraph::capture(&device, add)?;
    for i in 1..=100 {
        x.write_slice(&[i as f32; 3000])?;
        graph.replay(0)?;
    }
    assert!(sum.to_vec::<f32>()?.iter().all(|&sum| sum == 5050.0));
    Ok(())
}

#[test]
fn a_graph_has_memory_of_its_own() -> Result<()> {
    const N: usize = 1 << 20; // 4 MiB
    let Some(device) = stand_in("a_graph_has_memory_of_its_own")? else { return Ok(()) };
    let x = Tensor::full(&device, F32, &[N], 2.0)?;
    let mut written = Tensor::full(&device, F32, &[N], 0.0)?;
    let mut work = || -> Result<Tensor> {
        let square = x.square()?;
        let cube = square.mul(&x)?;
        let fourth = cube.mul(&x)?;
        written.copy_from(&fourth)?;
        square.add(&fourth)
    };
    drop(work()?);
    let (outside, most) = (8 << 20, (8 + 16) << 20);
    device.reset_memory_peaks();
    assert_eq!(device.memory().current, outside);
    let (mut graph, result) = CudaGraph::capture(&device, work)?;
    // What the plain run has left is not kept beside that of the graph, which counts whole.
    let stats = device.memory();
    assert_eq!((stats.current, stats.peak), (most, most));
    assert!(stats.reserved <= most + (2 << 20), "{stats:?}");
    device.reset_memory_peaks();
    // No other handle shares these, but the graph reads and writes them.
    let addresses = [x, written].map(|mut x| x.device_ptr(N).unwrap());
    graph.replay(0)?;
    let mut others = (0..6)
        .map(|i| Tensor::full(&device, F32, &[N], f64::from(i)))
        .collect::<Result<Vec<_>>>()?;
    for (i, other) in others.iter_mut().enumerate() {
        assert!(!addresses.contains(&other.device_ptr(N)?), "the graph's memory was given away");
        graph.replay(i as u64)?;
    }
    for (i, other) in others.iter().enumerate() {
        assert!(other.to_vec::<f32>()?.iter().all(|&x| x == i as f32), "written by a replay");
    }
    assert_eq!(result.to_vec::<f32>()?[N - 1], 20.0);
    assert_eq!(device.memory().peak, most - outside + (7 << 22), "one in between");
    drop((others, graph));
    assert_eq!(device.memory().current, 4 << 20, "the result is left");
    drop(result);
    assert_eq!(device.memory().current, 0);
    Ok(())
}

#[test]
fn what_the_host_waits_for_or_sends_cannot_be_captured() -> Result<()> {
    let Some(device) = gpu("what_the_host_waits_for_or_sends_cannot_be_captured")? else {
        return Ok(());
    };
    let device = &device;
    let mut x = Tensor::from_slice(device, &[1.0_f32, 0.0, 2.0], &[3])?;
    let (a, b) = (RandomKey::new(0, 3, "a"), RandomKey::new(0, 4, "b"));
    let place = ShardSpec::unsharded(&[3]);
    let mut step = DeviceStepParams::new(device, &numbers(1))?;
    let mut y = x.copy()?;
    let heads = Tensor::zeros(device, DType::F32, &[1, 3, 1, 8])?;
    let ranges = Some(KeyRanges::from_lengths(&[2], 3)?);
    let padded = AttentionConfig { ranges, ..AttentionConfig::bidirectional(8) };
    attention(&heads, &heads, &heads, &padded)?; // also if the ranges are on the device already
    let cases: [(&str, &mut dyn FnMut() -> Result<()>); 14] = [
        ("attention", &mut || attention(&heads, &heads, &heads, &padded).map(drop)),
        ("to_vec", &mut || x.square()?.to_vec::<f32>().map(drop)),
        ("to_vec", &mut || x.narrow(0, 0, 1)?.item().map(drop)),
        ("bytes", &mut || x.bytes().map(drop)),
        ("from_slice", &mut || Tensor::from_slice(device, &[1.0], &[1]).map(drop)),
        ("write_slice", &mut || y.write_slice(&[1.0_f32; 3])),
        ("synchronize", &mut || device.synchronize()),
        ("step", &mut || DeviceStepParams::new(device, &numbers(1)).map(drop)),
        ("step", &mut || step.set(&numbers(1))),
        ("stage", &mut || x.stage().map(drop)),
        ("all_finite", &mut || all_finite(&x).map(drop)),
        ("zero_bitmap", &mut || compress(&x).map(drop)),
        ("cuda_graph", &mut || CudaGraph::capture(device, || Ok(())).map(drop)),
        ("random", &mut || {
            drop(dropout(&x, 0.5, &a, &place)?);
            dropout(&x, 0.5, &b, &place).map(drop)
        }),
    ];
    for (op, case) in cases {
        let before = device.memory().current;
        let error = CudaGraph::capture(device, case).err().expect(op).to_string();
        assert!(error.starts_with(&format!("{op}: ")) && !error.contains('\n'), "{error}");
        assert_eq!(device.memory().current, before, "{op}");
        // Nothing is left of it.
        assert_eq!(x.add(&x)?.to_vec::<f32>()?, [2.0, 0.0, 4.0], "{op}");
    }
    assert_eq!(
        CudaGraph::capture(device, || x.item()).err().unwrap().to_string(),
        "to_vec: work of cuda:0 is being captured and does not run: the host does this before, or after a replay"
    );
    let lost = catch_unwind(AssertUnwindSafe(|| {
        let _ = CudaGraph::capture(device, || -> Result<()> { panic!("in the midst") });
    }));
    assert!(lost.is_err());
    // The driver's own refusals are errors, too; the stream works after them.
    let swallowed = CudaGraph::capture(device, || {
        let _ = device.gpu().unwrap().compute().synchronize();
        x.square()
    });
    let error = swallowed.err().unwrap().to_string();
    assert!(error.contains("CUDA_ERROR_STREAM_CAPTURE_"), "{error}");
    let (mut graph, square) = CudaGraph::capture(device, || x.square())?;
    graph.replay(0)?;
    assert_eq!(square.to_vec::<f32>()?, [1.0, 0.0, 4.0]);
    x.write_slice(&[3.0_f32; 3])?;
    graph.replay(0)?;
    assert_eq!(square.to_vec::<f32>()?, [9.0; 3]);
    Ok(())
}

#[test]
fn a_gpu_that_does_nothing_captures_nothing() -> Result<()> {
    let device = Device::fake_cuda(Architecture { major: 9, minor: 0 })?;
    let error = CudaGraph::capture(&device, || Ok(())).err().unwrap().to_string();
    assert_eq!(error, "cuda_graph: fake(cuda) is no GPU, whose work could be captured");
    Ok(())
}

#[test]
fn a_first_call_may_be_captured_and_graphs_may_follow_one_another() -> Result<()> {
    let Some(device) = gpu("a_first_call_may_be_captured_and_graphs_may_follow_one_another")?
    else {
        return Ok(());
    };
    // Kernels are loaded, pinned memory is taken and an index is found to be bad for the first time.
    let x = Tensor::from_slice(&device, &[1.0_f64, 2.0], &[2])?;
    let mut ids = Tensor::from_slice(&device, &[0_u32, 1], &[2])?;
    let (mut first, y) = CudaGraph::capture(&device, || {
        let mut host = Tensor::empty_in(MemoryKind::Host, &device, F64, &[2])?;
        host.copy_from(&gather(&x, 0, &ids)?)?;
        assert_eq!(host.memory_kind(), MemoryKind::Host);
        // In the stream of copies, which is captured with the other.
        let near = Tensor::empty(&device, F64, &[2])?;
        let mut coming = copy_async(vec![(host, near)])?;
        coming.remove(0).into_inner()?.1.exp()
    })?;
    let (mut second, z) = CudaGraph::capture(&device, || y.add(&y.square()?))?;
    first.replay(0)?;
    second.replay(0)?;
    let e = 1.0_f64.exp();
    assert!((z.to_vec::<f64>()?[0] - (e + e * e)).abs() < 1e-12);
    drop((first, y));
    second.replay(0)?;
    assert!((z.to_vec::<f64>()?[0] - (e + e * e)).abs() < 1e-12);
    let (mut first, _y) = CudaGraph::capture(&device, || gather(&x, 0, &ids))?;
    ids.write_slice(&[0_u32, 7])?;
    first.replay(0)?;
    let error = x.to_vec::<f64>().unwrap_err().to_string();
    assert_eq!(error, "gather: the index at position 1 in row-major order is out of range");
    // A graph goes in the midst of another's capture: its memory stays until a thread can wait.
    let (_, ()) = CudaGraph::capture(&device, || {
        drop((second, z));
        Ok(())
    })?;
    Ok(())
}
