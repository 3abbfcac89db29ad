//! Copies beside the GPU's other work, where that is replayed.

use ferrotron_tensor::{CudaGraph, DType, MemoryKind, Result, Tensor, copy_async};

use crate::support::gpu;

const N: usize = 1 << 16;

#[test]
fn a_replay_comes_after_copies_that_are_out() -> Result<()> {
    let Some(device) = gpu("a_replay_comes_after_copies_that_are_out")? else { return Ok(()) };
    let mut x = Tensor::full(&device, DType::F32, &[N], 1.0)?;
    let two = Tensor::full(&device, DType::F32, &[N], 2.0)?;
    let mut work = || x.copy_from(&two);
    work()?;
    let (mut graph, ()) = CudaGraph::capture(&device, work)?;
    x.write_slice(&[1.0_f32; N])?;
    let host = Tensor::empty_in(MemoryKind::Host, &device, DType::F32, &[N])?;
    let mut lent = copy_async(vec![(x.clone(), host)])?;
    graph.replay(0)?;
    device.synchronize()?;
    let (_, host) = lent.remove(0).into_inner()?;
    assert_eq!(host.to_vec::<f32>()?, [1.0; N], "written by the replay");
    assert_eq!(x.to_vec::<f32>()?, [2.0; N]);
    Ok(())
}
