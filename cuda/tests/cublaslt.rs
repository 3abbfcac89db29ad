//! Plans of matrix products: one search for each kind of product, and what cuBLASLt refuses.

use ferrotron_cuda::Result;
use ferrotron_cuda::cublaslt::{Matrices, Order, Product};
use ferrotron_cuda::gpu::{Gpu, GpuConfig};
use ferrotron_cuda::kernels::ElementType;
use ferrotron_cuda::memory::{Arena, GRANULE};
use ferrotron_cuda_stand_in as stand_in;

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
        // SAFETY: the memory is larger, and nobody else has it.
        unsafe { gpu.compute().upload(memory.base(), &numbers) }?;
        Ok(Some(Bench { memory, gpu }))
    }

    /// Matrices of f32, `offset` elements from the start.
    fn at(&self, offset: usize, leading: usize) -> Matrices {
        let address = self.memory.base() + 4 * offset as u64;
        Matrices { address, order: Order::Rows, leading, batch_stride: 0 }
    }

    /// (1 2; 3 4) times (17 18; 19 20).
    fn product(&self) -> Product {
        Product {
            batch: 1,
            sizes: [2, 2, 2],
            operands: ElementType::F32,
            result: ElementType::F32,
            left: self.at(0, 2),
            right: self.at(16, 2),
            out: self.at(64, 2),
            beta: 0.0,
            bias: None,
        }
    }

    /// The four numbers from where results go, after a product.
    fn run(&self, product: &Product) -> Result<[f32; 4]> {
        let mut bytes = [0; 16];
        // SAFETY: all matrices are within the memory, which is used in this stream alone.
        unsafe {
            self.gpu.product(product)?;
            self.gpu.compute().download(&mut bytes, product.out.address)?;
        }
        Ok([0, 4, 8, 12].map(|i| f32::from_le_bytes(bytes[i..i + 4].try_into().unwrap())))
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
    // What differs in addresses, in what is added or in strides that nobody follows is of the same kind.
    assert_eq!(bench.run(&product)?, [55.0, 58.0, 127.0, 134.0]);
    assert_eq!(bench.run(&Product { beta: 1.0, ..product })?, [110.0, 116.0, 254.0, 268.0]);
    let elsewhere = Product { left: bench.at(4, 2), out: bench.at(32, 2), ..product };
    assert_eq!(bench.run(&elsewhere)?, [199.0, 210.0, 271.0, 286.0]);
    let unused = Matrices { batch_stride: 4, ..product.left };
    bench.run(&Product { left: unused, ..product })?;
    assert_eq!(searches(), 1);
    // Everything else is a kind of its own.
    let columns = Matrices { order: Order::Columns, ..product.left };
    let rows = |matrices| Matrices { batch_stride: 2, ..matrices };
    let (left, out) = (rows(product.left), rows(product.out));
    let both = Product { batch: 2, sizes: [1, 2, 2], left, out, ..product };
    let kinds = [
        (
            Product { left: columns, ..product },
            [17.0 + 57.0, 18.0 + 60.0, 34.0 + 76.0, 36.0 + 80.0],
        ),
        (Product { right: bench.at(16, 4), ..product }, [17.0 + 42.0, 18.0 + 44.0, 135.0, 142.0]),
        (Product { left: bench.at(1, 2), ..product }, [91.0, 96.0, 163.0, 172.0]),
        (Product { bias: Some(bench.at(0, 0).address), ..product }, [56.0, 60.0, 128.0, 136.0]),
        (Product { bias: Some(bench.at(1, 0).address), ..product }, [57.0, 61.0, 129.0, 137.0]),
        (Product { sizes: [1, 2, 2], ..product }, [55.0, 58.0, 129.0, 137.0]),
        (both, [55.0, 58.0, 127.0, 134.0]),
    ];
    for (i, (product, want)) in kinds.iter().enumerate() {
        assert_eq!(bench.run(product)?, *want, "kind {i}");
        assert_eq!(searches(), i as u64 + 2, "kind {i}");
    }
    for (i, (product, want)) in kinds.iter().enumerate() {
        assert_eq!(bench.run(product)?, *want, "kind {i}");
        assert_eq!(searches(), kinds.len() as u64 + 1, "kind {i}");
    }
    // Of a bias only its alignment is planned for.
    let biased = Product { bias: Some(bench.at(4, 0).address), ..product };
    assert_eq!(bench.run(&biased)?, [60.0, 64.0, 132.0, 140.0]);
    assert_eq!(searches(), kinds.len() as u64 + 1);
    Ok(())
}

#[test]
fn what_has_no_algorithm_is_an_error_that_names_it() -> Result<()> {
    let Some(bench) =
        Bench::new(stand_in::stand_in("what_has_no_algorithm_is_an_error_that_names_it"))?
    else {
        return Ok(());
    };
    let refused = |product: Product| bench.run(&product).unwrap_err().to_string();
    let product = bench.product();
    let error = refused(Product { operands: ElementType::I64, ..product });
    assert_eq!(error, "matmul: i64 has no products");
    let error = refused(Product { result: ElementType::BF16, ..product });
    let want = "matmul: cuBLASLt has no algorithm for 1 x (2, 2) (2, 2) of f32 into bf16";
    assert_eq!(error, want);
    let bias = Some(bench.at(0, 0).address);
    let doubles = Product { operands: ElementType::F64, result: ElementType::F64, ..product };
    assert!(bench.gpu.products().supports(&doubles)?);
    // The stand-in adds no bias in f64.
    assert!(!bench.gpu.products().supports(&Product { bias, ..doubles })?);
    let error = refused(Product { left: bench.at(0, 1), ..product });
    assert!(error.ends_with("f32 into f32: CUBLAS_STATUS_INVALID_VALUE"), "{error}");
    assert_eq!(bench.run(&product)?, [55.0, 58.0, 127.0, 134.0]);
    Ok(())
}
