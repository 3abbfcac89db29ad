//! Plans of matrix products: one search for each kind of product, and what cuBLASLt refuses.

use ferrotron_cuda::Result;
use ferrotron_cuda::cublaslt::{Epilogue, Matmul, Matrices, StorageOrder};
use ferrotron_cuda::gpu::{Gpu, GpuConfig};
use ferrotron_cuda::kernels::ElementType;
use ferrotron_cuda::memory::{Arena, GRANULE};
use ferrotron_cuda_sim as stand_in;

/// A GPU and some of its memory, with the numbers 1, 2, 3, .. in f32 at its start.
struct Bench {
    memory: Arena,
    gpu: Gpu,
}

impl Bench {
    fn new(config: Option<GpuConfig>) -> Result<Option<Bench>> {
        let Some(config) = config else { return Ok(None) };
        let gpu = Gpu::new(&config, String::new())?;
        let mut memory = Arena::reserve(gpu.context(), GRANULE)?;
        memory.map(0, GRANULE)?;
        let numbers: Vec<u8> = (1..=1024).flat_map(|i| (i as f32).to_le_bytes()).collect();
        // SAFETY: the memory is larger, and no other code has it.
        unsafe { gpu.compute().upload(memory.base(), &numbers) }?;
        Ok(Some(Bench { memory, gpu }))
    }

    /// Matrices of f32, `offset` elements from the start.
    fn at(&self, offset: usize, leading: usize) -> Matrices {
        let address = self.memory.base() + 4 * offset as u64;
        Matrices { address, order: StorageOrder::Rows, leading, batch_stride: 0 }
    }

    /// (1 2; 3 4) times (17 18; 19 20).
    fn product(&self) -> Matmul {
        Matmul {
            batch: 1,
            sizes: [2, 2, 2],
            operands: ElementType::F32,
            result: ElementType::F32,
            left: self.at(0, 2),
            right: self.at(16, 2),
            out: self.at(64, 2),
            beta: 0.0,
            addend: None,
            epilogue: Epilogue::None,
        }
    }

    /// The four numbers from where results go, after a product.
    fn run(&self, product: &Matmul) -> Result<[f32; 4]> {
        // SAFETY: all matrices are within the memory, which is used in this stream alone.
        unsafe { self.gpu.product(product) }?;
        self.numbers(product.out.address)
    }

    /// The numbers from an address on.
    fn numbers<const N: usize>(&self, address: u64) -> Result<[f32; N]> {
        let mut bytes = [[0; 4]; N];
        // SAFETY: within the memory, which is used in this stream alone.
        unsafe { self.gpu.compute().download(bytes.as_flattened_mut(), address) }?;
        Ok(bytes.map(f32::from_le_bytes))
    }

    /// Puts numbers `offset` elements from the start.
    fn put(&self, offset: usize, numbers: &[f32]) -> Result<()> {
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        // SAFETY: as above.
        unsafe { self.gpu.compute().upload(self.at(offset, 0).address, &bytes) }
    }
}

#[test]
fn an_algorithm_is_searched_for_once() -> Result<()> {
    let Some(bench) = Bench::new(stand_in::gpu("an_algorithm_is_searched_for_once"))? else {
        return Ok(());
    };
    let searches = || bench.gpu.products().searches();
    let product = bench.product();
    assert_eq!(searches(), 0);
    assert_eq!(bench.run(&product)?, [55.0, 58.0, 127.0, 134.0]);
    assert_eq!(searches(), 1);
    // Products that differ in addresses, in addends or in strides that are not followed are of the same kind.
    assert_eq!(bench.run(&product)?, [55.0, 58.0, 127.0, 134.0]);
    assert_eq!(bench.run(&Matmul { beta: 1.0, ..product })?, [110.0, 116.0, 254.0, 268.0]);
    let elsewhere = Matmul { left: bench.at(4, 2), out: bench.at(32, 2), ..product };
    assert_eq!(bench.run(&elsewhere)?, [199.0, 210.0, 271.0, 286.0]);
    let unused = Matrices { batch_stride: 4, ..product.left };
    bench.run(&Matmul { left: unused, ..product })?;
    assert_eq!(searches(), 1);
    // Everything else is a kind of its own.
    let columns = Matrices { order: StorageOrder::Columns, ..product.left };
    let rows = |matrices| Matrices { batch_stride: 2, ..matrices };
    let (left, out) = (rows(product.left), rows(product.out));
    let bias = |at: usize| Epilogue::Bias(bench.at(at, 0).address);
    let both = Matmul { batch: 2, sizes: [1, 2, 2], left, out, ..product };
    let kinds = [
        (Matmul { left: columns, ..product }, [17.0 + 57.0, 18.0 + 60.0, 34.0 + 76.0, 36.0 + 80.0]),
        (Matmul { right: bench.at(16, 4), ..product }, [17.0 + 42.0, 18.0 + 44.0, 135.0, 142.0]),
        (Matmul { left: bench.at(1, 2), ..product }, [91.0, 96.0, 163.0, 172.0]),
        (Matmul { epilogue: bias(0), ..product }, [56.0, 60.0, 128.0, 136.0]),
        (Matmul { epilogue: bias(1), ..product }, [57.0, 61.0, 129.0, 137.0]),
        (Matmul { sizes: [1, 2, 2], ..product }, [55.0, 58.0, 129.0, 137.0]),
        (both, [55.0, 58.0, 127.0, 134.0]),
    ];
    // cuBLASLt may refuse an epilogue, for which it searches once, too.
    let takes = |product: &Matmul| bench.gpu.products().supports(product);
    for (i, (product, want)) in kinds.iter().enumerate() {
        let taken = takes(product)?;
        assert!(taken || !matches!(product.epilogue, Epilogue::None), "kind {i}");
        assert!(!taken || bench.run(product)? == *want, "kind {i}");
        assert_eq!(searches(), i as u64 + 2, "kind {i}");
    }
    for (i, (product, want)) in kinds.iter().enumerate() {
        assert!(!takes(product)? || bench.run(product)? == *want, "kind {i}");
        assert_eq!(searches(), kinds.len() as u64 + 1, "kind {i}");
    }
    // Of a bias only its alignment is planned for.
    let biased = Matmul { epilogue: bias(4), ..product };
    assert!(!takes(&biased)? || bench.run(&biased)? == [60.0, 64.0, 132.0, 140.0]);
    assert_eq!(searches(), kinds.len() as u64 + 1);
    Ok(())
}

/// Addends in wider rows elsewhere stay as they are, and old results are not read.
#[test]
fn addends_may_be_others_than_the_old_results() -> Result<()> {
    let test = "addends_may_be_others_than_the_old_results";
    let Some(bench) = Bench::new(stand_in::gpu(test))? else { return Ok(()) };
    bench.put(64, &[f32::NAN; 4])?;
    // (33 34; 36 37)
    let product = Matmul { beta: 1.0, addend: Some(bench.at(32, 3)), ..bench.product() };
    assert_eq!(bench.run(&product)?, [88.0, 92.0, 163.0, 171.0]);
    assert_eq!(bench.numbers(bench.at(32, 3).address)?, [33.0, 34.0, 35.0, 36.0, 37.0]);
    // Where they lie is a kind of its own.
    assert_eq!(bench.run(&Matmul { addend: None, ..product })?, [143.0, 150.0, 290.0, 305.0]);
    assert_eq!(bench.gpu.products().searches(), 2);
    // cuBLASLt may refuse them together with a bias.
    let biased = Matmul { epilogue: Epilogue::Bias(bench.at(0, 0).address), ..product };
    let taken = bench.gpu.products().supports(&biased)?;
    assert!(!taken || bench.run(&biased)? == [89.0, 94.0, 164.0, 173.0]);
    assert_eq!(bench.gpu.products().searches(), 3);
    Ok(())
}

#[test]
fn what_has_no_algorithm_is_an_error_that_names_it() -> Result<()> {
    let Some(bench) =
        Bench::new(stand_in::stand_in("what_has_no_algorithm_is_an_error_that_names_it"))?
    else {
        return Ok(());
    };
    let refused = |product: Matmul| bench.run(&product).unwrap_err().to_string();
    let product = bench.product();
    let error = refused(Matmul { operands: ElementType::I64, ..product });
    assert_eq!(error, "matmul: i64 has no products");
    let error = refused(Matmul { result: ElementType::BF16, ..product });
    let want = "matmul: cuBLASLt has no algorithm for 1 x (2, 2) (2, 2) of f32 into bf16";
    assert_eq!(error, want);
    let epilogue = Epilogue::Bias(bench.at(0, 0).address);
    let doubles = Matmul { operands: ElementType::F64, result: ElementType::F64, ..product };
    assert!(bench.gpu.products().supports(&doubles)?);
    // The stand-in has no epilogue in f64.
    let biased = Matmul { epilogue, ..doubles };
    assert!(!bench.gpu.products().supports(&biased)?);
    let error = refused(biased);
    let want = "of f64 into f64 with CUBLASLT_EPILOGUE_BIAS";
    assert!(error.ends_with(want), "{error}");
    let error = refused(Matmul { left: bench.at(0, 1), ..product });
    assert!(error.ends_with("f32 into f32: CUBLAS_STATUS_INVALID_VALUE"), "{error}");
    assert_eq!(bench.run(&product)?, [55.0, 58.0, 127.0, 134.0]);
    Ok(())
}

/// A row of 1 and 0 picks the first of two rows, of numbers from -1 to 1.
#[test]
fn gelu_leaves_what_went_in() -> Result<()> {
    let Some(bench) = Bench::new(stand_in::stand_in("gelu_leaves_what_went_in"))? else {
        return Ok(());
    };
    let row: [f32; 8] = std::array::from_fn(|i| i as f32 / 4.0 - 1.0);
    bench.put(512, &[1.0, 0.0])?;
    bench.put(520, &row)?;
    bench.put(528, &[9.0; 8])?;
    let product = Matmul {
        sizes: [1, 8, 2],
        left: bench.at(512, 2),
        right: bench.at(520, 8),
        out: bench.at(536, 8),
        ..bench.product()
    };
    for (bias, added) in [(None, 0.0), (Some(bench.at(0, 0).address), 1.0)] {
        // A row of what goes in is wider than one of results.
        bench.put(560, &[-7.0; 17])?;
        let input = bench.at(560, 16).address;
        let product = Matmul { epilogue: Epilogue::Gelu { bias, input, leading: 16 }, ..product };
        // SAFETY: as in `run`.
        unsafe { bench.gpu.product(&product) }?;
        let found: [f32; 17] = bench.numbers(input)?;
        let values: [f32; 8] = bench.numbers(product.out.address)?;
        for i in 0..8 {
            let want = row[i] + if added == 0.0 { 0.0 } else { (i + 1) as f32 };
            assert_eq!(found[i], want, "input {i}");
            let x = f64::from(want);
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            let want = 0.5 * x * (1.0 + inner.tanh());
            let off = (f64::from(values[i]) - want).abs();
            assert!(off <= f64::from(f32::EPSILON) * want.abs(), "{i}: {} not {want}", values[i]);
        }
        assert_eq!(found[8..], [-7.0; 9], "beside the row");
    }
    // What GELU demands is no matter of luck: rows of 4 elements are refused, without a call that could go wrong.
    let narrow = Matmul { sizes: [1, 4, 2], ..product };
    let input = bench.at(560, 0).address;
    for (product, leading, takes) in [(product, 8, true), (product, 12, false), (narrow, 4, false)]
    {
        let epilogue = Epilogue::Gelu { bias: None, input, leading };
        let product = Matmul { epilogue, ..product };
        assert_eq!(bench.gpu.products().supports(&product)?, takes, "{leading}");
    }
    // Of what goes in, too, the alignment is part of the kind.
    let searches = bench.gpu.products().searches();
    for (at, more) in [(564, 0), (561, 1)] {
        let input = bench.at(at, 0).address;
        let epilogue = Epilogue::Gelu { bias: None, input, leading: 8 };
        bench.run(&Matmul { epilogue, ..product })?;
        assert_eq!(bench.gpu.products().searches(), searches + more, "at {at}");
    }
    Ok(())
}

/// Multiplies the product above by the derivative at numbers in wider rows, which stay as they are.
#[test]
fn the_derivative_of_gelu_is_a_factor() -> Result<()> {
    let Some(bench) = Bench::new(stand_in::stand_in("the_derivative_of_gelu_is_a_factor"))? else {
        return Ok(());
    };
    let (row, inputs): ([f32; 8], [f32; 17]) =
        (std::array::from_fn(|i| i as f32 - 3.5), std::array::from_fn(|i| 1.5 - i as f32 / 4.0));
    bench.put(512, &[1.0, 0.0])?;
    bench.put(520, &row)?;
    bench.put(528, &[9.0; 8])?;
    bench.put(560, &inputs)?;
    let input = bench.at(560, 16).address;
    let product = Matmul {
        sizes: [1, 8, 2],
        left: bench.at(512, 2),
        right: bench.at(520, 8),
        out: bench.at(536, 8),
        epilogue: Epilogue::GeluDerivative { input, leading: 16 },
        ..bench.product()
    };
    // SAFETY: as in `run`.
    unsafe { bench.gpu.product(&product) }?;
    let values: [f32; 8] = bench.numbers(product.out.address)?;
    let gelu = |x: f64| {
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
        0.5 * x * (1.0 + inner.tanh())
    };
    for i in 0..8 {
        let (x, step) = (f64::from(inputs[i]), 1e-5);
        let derivative = (gelu(x + step) - gelu(x - step)) / (2.0 * step);
        let want = f64::from(row[i]) * derivative;
        // Differences are off by step^2, and by rounding over the step.
        assert!((f64::from(values[i]) - want).abs() < 1e-6, "{i}: {} not {want}", values[i]);
    }
    assert_eq!(bench.numbers::<17>(input)?, inputs);
    for (leading, takes) in [(8, true), (12, false)] {
        let epilogue = Epilogue::GeluDerivative { input, leading };
        assert_eq!(bench.gpu.products().supports(&Matmul { epilogue, ..product })?, takes);
    }
    Ok(())
}

#[test]
fn sums_of_rows_come_with_a_product_and_are_never_added_to() -> Result<()> {
    let test = "sums_of_rows_come_with_a_product_and_are_never_added_to";
    let Some(bench) = Bench::new(stand_in::stand_in(test))? else { return Ok(()) };
    let product = bench.product();
    // (1 2; 3 4), then (1 3; 2 4): as it lies, and as the transpose that the gradient of a layer is.
    for (order, result, sums) in [
        (StorageOrder::Rows, [55.0, 58.0, 127.0, 134.0], [3.0, 7.0]),
        (StorageOrder::Columns, [74.0, 78.0, 110.0, 116.0], [4.0, 6.0]),
    ] {
        let to = bench.at(640, 0).address;
        let left = Matrices { order, ..product.left };
        let product = Matmul { left, epilogue: Epilogue::RowSums(to), ..product };
        bench.put(640, &[-1.0; 3])?;
        assert!(bench.gpu.products().supports(&product)?);
        assert_eq!(bench.run(&product)?, result);
        assert_eq!(bench.numbers::<3>(to)?, [sums[0], sums[1], -1.0]);
        let twice = bench.run(&Matmul { beta: 1.0, ..product })?;
        assert_eq!(twice, result.map(|x| 2.0 * x));
        assert_eq!(bench.numbers::<3>(to)?, [sums[0], sums[1], -1.0]);
    }
    Ok(())
}

/// Each algorithm that cuBLASLt offers is timed, and the product is computed.
#[test]
fn all_algorithms_of_a_product_are_timed() -> Result<()> {
    let Some(bench) = Bench::new(stand_in::gpu("all_algorithms_of_a_product_are_timed"))? else {
        return Ok(());
    };
    let product = bench.product();
    // SAFETY: all matrices are within the memory, which is used in this stream alone.
    let seconds = unsafe { bench.gpu.time_algorithms(&product) }?;
    assert!(!seconds.is_empty() && seconds.iter().all(|&one| one >= 0.0), "{seconds:?}");
    assert_eq!(bench.numbers(product.out.address)?, [55.0, 58.0, 127.0, 134.0]);
    assert_eq!(bench.gpu.products().searches(), 1);
    let impossible = Matmul { operands: ElementType::I64, ..product };
    // SAFETY: as above.
    assert!(unsafe { bench.gpu.time_algorithms(&impossible) }.is_err());
    Ok(())
}
