//! Copies beside the GPU's other work, where that is captured or replayed.

use ferrotron_tensor::{CudaGraph, DType, Error, MemoryKind, Result, Tensor, copy_aside};

use crate::support::gpu;

const N: usize = 1 << 16;

#[test]
fn a_replay_comes_after_copies_that_are_out() -> Result<()> {
    let Some(device) = gpu("a_replay_comes_after_copies_that_are_out")? else { return Ok(()) };
    let mut x = Tensor::full(&device, DType::F32, &[N], 1.0)?;
    let two = Tensor::full(&device, DType::F32, &[N], 2.0)?;
    let mut work = || x.write(&two);
    work()?;
    let (mut graph, ()) = CudaGraph::capture(&device, work)?;
    x.write_slice(&[1.0_f32; N])?;
    let host = Tensor::empty_in(MemoryKind::Host, &device, DType::F32, &[N])?;
    let mut lent = copy_aside(vec![(x.clone(), host)])?;
    graph.replay(0)?;
    device.synchronize()?;
    let (_, host) = lent.remove(0).take_back()?;
    assert_eq!(host.to_vec::<f32>()?, [1.0; N], "written by the replay");
    assert_eq!(x.to_vec::<f32>()?, [2.0; N]);
    Ok(())
}

#[test]
fn a_copy_that_is_given_back_in_a_capture_has_ended() -> Result<()> {
    let Some(device) = gpu("a_copy_that_is_given_back_in_a_capture_has_ended")? else {
        return Ok(());
    };
    let mut from = Tensor::empty_in(MemoryKind::Host, &device, DType::F32, &[N])?;
    from.write_slice(&[1.0_f32; N])?;
    for taken in [false, true] {
        let near = Tensor::empty(&device, DType::F32, &[N])?;
        let mut lent = copy_aside(vec![(from.clone(), near)])?;
        let refused = CudaGraph::capture(&device, || {
            let lent = lent.remove(0);
            if taken { lent.take_back().map(drop) } else { Err(Error::value("work", "no")) }
        });
        assert!(refused.is_err());
        // It gets the block that the copy went to.
        let seven = Tensor::full(&device, DType::F32, &[N], 7.0)?;
        device.synchronize()?;
        let near = Tensor::empty(&device, DType::F32, &[N])?;
        let (_, ones) = copy_aside(vec![(from.clone(), near)])?.remove(0).take_back()?;
        assert_eq!(ones.to_vec::<f32>()?, [1.0; N]);
        assert_eq!(seven.to_vec::<f32>()?, [7.0; N], "written by the copy, taken: {taken}");
    }
    Ok(())
}
