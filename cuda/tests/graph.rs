//! Recorded work: that it waits for its launch, can be given again and again, and takes other streams along.

use ferrotron_cuda::Result;
use ferrotron_cuda::cublaslt::{Epilogue, Matmul, Matrices, StorageOrder};
use ferrotron_cuda::gpu::Gpu;
use ferrotron_cuda::graph::StreamCapture;
use ferrotron_cuda::kernels::ElementType;
use ferrotron_cuda::memory::{Arena, GRANULE};
use ferrotron_cuda::stream::Stream;

/// A GPU, a second stream of it, and numbers in f32 in its memory: 2, 3, and then zeros.
struct Bench {
    memory: Arena,
    side: Stream,
    gpu: Gpu,
}

impl Bench {
    fn new(test: &str) -> Result<Option<Bench>> {
        let Some(config) = ferrotron_cuda_sim::gpu(test) else { return Ok(None) };
        let gpu = Gpu::new(&config, String::new())?;
        let side = Stream::new(gpu.context())?;
        let mut memory = Arena::reserve(gpu.context(), GRANULE)?;
        memory.map(0, GRANULE)?;
        let bench = Bench { memory, side, gpu };
        let numbers: Vec<u8> = [2.0_f32, 3.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        // SAFETY: the memory is larger, and no other code has it.
        unsafe {
            bench.gpu.compute().zero_fill(bench.at(0), 4096)?;
            bench.gpu.compute().upload(bench.at(0), &numbers)?;
        }
        // The kernel of products is loaded when it first runs, which a driver may refuse while streams are recorded.
        bench.add_six()?;
        // SAFETY: as above.
        unsafe { bench.gpu.compute().zero_fill(bench.at(4), 4)? };
        bench.gpu.compute().synchronize()?;
        Ok(Some(bench))
    }

    fn at(&self, number: usize) -> u64 {
        self.memory.base() + 4 * number as u64
    }

    fn number(&self, at: usize) -> Result<f32> {
        let mut bytes = [0; 4];
        // SAFETY: within the memory; work of other streams is waited for.
        unsafe { self.gpu.compute().download(&mut bytes, self.at(at)) }?;
        Ok(f32::from_le_bytes(bytes))
    }

    /// Adds the product of the first two numbers, 6, to number 4.
    fn add_six(&self) -> Result<()> {
        let number = |at| {
            let address = self.at(at);
            Matrices { address, order: StorageOrder::Rows, leading: 1, batch_stride: 0 }
        };
        let product = Matmul {
            batch: 1,
            sizes: [1, 1, 1],
            operands: ElementType::F32,
            result: ElementType::F32,
            left: number(0),
            right: number(1),
            out: number(4),
            beta: 1.0,
            addend: None,
            epilogue: Epilogue::None,
        };
        // SAFETY: three numbers of the memory, which streams use one after another.
        unsafe { self.gpu.product(&product) }
    }

    fn copy(&self, stream: &Stream, to: usize, from: usize) -> Result<()> {
        // SAFETY: two numbers of the memory, which streams use one after another.
        unsafe { stream.copy(self.at(to), self.at(from), 4) }
    }
}

#[test]
fn recorded_work_runs_as_often_as_it_is_launched() -> Result<()> {
    let Some(bench) = Bench::new("recorded_work_runs_as_often_as_it_is_launched")? else {
        return Ok(());
    };
    let compute = bench.gpu.compute();
    let recording = StreamCapture::begin(&bench.gpu)?;
    bench.add_six()?;
    bench.copy(compute, 8, 4)?;
    let mut graph = recording.end()?;
    assert_eq!(bench.number(4)?, 0.0);
    for launch in 1..=3 {
        // SAFETY: the memory is still there.
        unsafe { graph.launch(&bench.gpu, 0) }?;
        // What is given afterwards runs afterwards.
        bench.add_six()?;
        assert_eq!(bench.number(8)?, 12.0 * launch as f32 - 6.0);
        assert_eq!(bench.number(4)?, 12.0 * launch as f32);
    }
    assert_eq!(bench.gpu.products().searches(), 1);
    Ok(())
}

#[test]
fn streams_that_wait_for_one_another_are_recorded_together() -> Result<()> {
    let Some(bench) = Bench::new("streams_that_wait_for_one_another_are_recorded_together")? else {
        return Ok(());
    };
    let (compute, side) = (bench.gpu.compute(), &bench.side);
    let recording = StreamCapture::begin(&bench.gpu)?;
    bench.add_six()?;
    side.wait(&compute.record()?)?;
    bench.copy(side, 8, 4)?;
    bench.copy(compute, 12, 4)?; // beside it
    compute.wait(&side.record()?)?;
    bench.copy(compute, 16, 8)?;
    let mut graph = recording.end()?;
    // The streams are as before: nothing is recorded any more, nothing has run.
    bench.copy(side, 20, 0)?;
    side.synchronize()?;
    assert_eq!([bench.number(20)?, bench.number(4)?, bench.number(16)?], [2.0, 0.0, 0.0]);
    for launch in 1..=2 {
        // SAFETY: the memory is still there.
        unsafe { graph.launch(&bench.gpu, 0) }?;
        let sum = 6.0 * launch as f32;
        assert_eq!([4, 8, 12, 16].map(|at| bench.number(at)), [(); 4].map(|()| Ok(sum)));
    }
    Ok(())
}

#[test]
fn a_recording_that_cannot_be_is_forgotten() -> Result<()> {
    let Some(bench) = Bench::new("a_recording_that_cannot_be_is_forgotten")? else {
        return Ok(());
    };
    let (compute, side) = (bench.gpu.compute(), &bench.side);
    // No stream waits for the second one.
    let recording = StreamCapture::begin(&bench.gpu)?;
    side.wait(&compute.record()?)?;
    bench.copy(side, 8, 0)?;
    let error = recording.end().unwrap_err().to_string();
    assert!(error.contains("CUDA_ERROR_STREAM_CAPTURE_UNJOINED"), "{error}");
    // The host wants what was not computed, or gives what will be gone: nothing has happened to the recording.
    let recording = StreamCapture::begin(&bench.gpu)?;
    bench.add_six()?;
    let error = bench.number(4).unwrap_err().to_string();
    assert_eq!(
        error,
        "cuMemcpyDtoH: the stream is recorded: nothing runs that the host could wait for, or that reads what it has now"
    );
    // SAFETY: the memory is larger, and no other code has it.
    assert!(unsafe { compute.upload(bench.at(8), &[0; 4]) }.is_err());
    let _ = recording.end()?;
    // The host waits for what does not run: nothing can be made of the recording.
    let event = side.record()?;
    for wait in [
        &(|| compute.synchronize()) as &dyn Fn() -> Result<()>,
        &|| compute.record()?.synchronize(),
        &|| compute.record()?.has_passed().map(drop),
    ] {
        let recording = StreamCapture::begin(&bench.gpu)?;
        bench.add_six()?;
        assert!(StreamCapture::begin(&bench.gpu).is_err(), "recorded twice");
        event.synchronize()?; // that one is done
        let error = wait().unwrap_err().to_string();
        assert!(error.contains("CUDA_ERROR_"), "{error}");
        assert!(error.contains("CAPTURE"), "{error}");
        let error = bench.copy(compute, 12, 8).unwrap_err().to_string();
        assert!(error.contains("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"), "{error}");
        let error = recording.end().unwrap_err().to_string();
        assert!(error.contains("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"), "{error}");
    }
    // An event of before the recording is none of its moments.
    let before = side.record()?;
    let recording = StreamCapture::begin(&bench.gpu)?;
    let error = compute.wait(&before).unwrap_err().to_string();
    assert!(error.contains("CUDA_ERROR_STREAM_CAPTURE_ISOLATION"), "{error}");
    drop(recording);
    bench.add_six()?;
    assert_eq!([bench.number(4)?, bench.number(8)?], [6.0, 0.0]);
    Ok(())
}

#[test]
fn recorded_work_draws_with_the_step_of_its_launch() -> Result<()> {
    let Some(bench) = Bench::new("recorded_work_draws_with_the_step_of_its_launch")? else {
        return Ok(());
    };
    let recording = StreamCapture::begin(&bench.gpu)?;
    let cell = bench.gpu.step(3)?.address();
    // SAFETY: the cell is longer than eight bytes, and the memory is larger.
    unsafe { bench.gpu.compute().copy(bench.at(4), cell, 8) }?;
    let error = bench.gpu.step(4).unwrap_err().to_string();
    assert_eq!(
        error,
        "random: draws random numbers of step 4 after some of step 3: recorded work has one step"
    );
    let mut graph = recording.end()?;
    // No graph within a recording: the step would be that of the outer one.
    let recording = StreamCapture::begin(&bench.gpu)?;
    // SAFETY: the memory is still there.
    let error = unsafe { graph.launch(&bench.gpu, 9) }.unwrap_err().to_string();
    assert!(error.starts_with("cuGraphLaunch: the stream is recorded"), "{error}");
    let _ = recording.end()?;
    let step = |bench: &Bench| bench.number(4).map(f32::to_bits);
    for number in [3, 3, 7] {
        // SAFETY: the memory is still there.
        unsafe { graph.launch(&bench.gpu, number) }?;
        drop(bench.gpu.step(100)?); // of other work in between
        assert_eq!(step(&bench)?, number as u32);
    }
    Ok(())
}
