//! Times every algorithm that cuBLASLt offers for the products of a step: whether the one that it takes for the fastest is.

use ferrotron::Result;
use ferrotron::cuda::cublaslt::{Epilogue, Matmul, Matrices, StorageOrder};
use ferrotron::cuda::gpu::{Gpu, GpuConfig};
use ferrotron::cuda::kernels::ElementType;
use ferrotron::cuda::memory::{Arena, GRANULE};
use serde_json::json;

/// Tokens of a chunk of the head at most.
const CHUNK: usize = 8192;

/// The epilogues of a linear layer's products.
#[derive(Clone, Copy, PartialEq)]
enum Fused {
    Nothing,
    Bias,
    BiasAndGelu,
    /// The layer behind the one with GELU, whose derivative its gradient of inputs takes.
    BiasAfterGelu,
}

/// Prints a line for each product of a GPT-2 with biases, in bf16 with gradients of weights in f32.
pub fn algorithms(model: &str, width: usize, tokens: usize, vocabulary: usize) -> Result<()> {
    let gpu = Gpu::new(&GpuConfig::new(0), String::new()).map_err(ferrotron::Error::from_gpu)?;
    for (layer, features, inputs, tokens, fused) in [
        ("qkv", 3 * width, width, tokens, Fused::Bias),
        ("proj", width, width, tokens, Fused::Bias),
        ("fc1", 4 * width, width, tokens, Fused::BiasAndGelu),
        ("fc2", width, 4 * width, tokens, Fused::BiasAfterGelu),
        ("head", vocabulary, width, tokens.min(CHUNK), Fused::Nothing),
    ] {
        let name = format!("{model} {layer}");
        linear(&gpu, &name, [tokens, features, inputs], fused)
            .map_err(ferrotron::Error::from_gpu)?;
    }
    Ok(())
}

/// The three products of a linear layer.
fn linear(
    gpu: &Gpu,
    name: &str,
    [tokens, features, inputs]: [usize; 3],
    fused: Fused,
) -> ferrotron::cuda::Result<()> {
    let mut next = 0;
    let mut place = |numbers: usize, bytes: usize| {
        let at = next;
        next += (numbers * bytes).next_multiple_of(256) as u64;
        at
    };
    let (x, weight) = (place(tokens * inputs, 2), place(features * inputs, 2));
    let (y, gelu_input) = (place(tokens * features, 2), place(tokens * features, 2));
    let (vector, gradient) = (place(features, 4), place(features * inputs, 4));
    let hidden = place(tokens * inputs, 2);
    let bytes = (next as usize).next_multiple_of(GRANULE);
    let mut memory = Arena::reserve(gpu.context(), bytes)?;
    memory.map(0, bytes)?;
    fill(gpu, &memory)?;
    let base = memory.base();
    let rows = |at: u64, leading: usize| Matrices {
        address: base + at,
        order: StorageOrder::Rows,
        leading,
        batch_stride: 0,
    };
    let columns = |at, leading| Matrices { order: StorageOrder::Columns, ..rows(at, leading) };
    let epilogue = match fused {
        Fused::Nothing => Epilogue::None,
        Fused::Bias | Fused::BiasAfterGelu => Epilogue::Bias(base + vector),
        Fused::BiasAndGelu => {
            let (bias, input) = (Some(base + vector), base + gelu_input);
            Epilogue::Gelu { bias, input, leading: features }
        }
    };
    let forward = Matmul {
        batch: 1,
        sizes: [tokens, features, inputs],
        operands: ElementType::BF16,
        result: ElementType::BF16,
        left: rows(x, inputs),
        right: columns(weight, inputs),
        out: rows(y, features),
        beta: 0.0,
        addend: None,
        epilogue,
    };
    let of_inputs = Matmul {
        sizes: [tokens, inputs, features],
        left: rows(y, features),
        right: rows(weight, inputs),
        out: rows(x, inputs),
        epilogue: match fused {
            Fused::BiasAfterGelu => {
                Epilogue::GeluDerivative { input: base + hidden, leading: inputs }
            }
            _ => Epilogue::None,
        },
        ..forward
    };
    let row_sums = Epilogue::RowSums(base + vector);
    let of_weights = Matmul {
        sizes: [features, inputs, tokens],
        result: ElementType::F32,
        left: columns(y, features),
        right: rows(x, inputs),
        out: rows(gradient, inputs),
        beta: 1.0,
        epilogue: if fused == Fused::Nothing { Epilogue::None } else { row_sums },
        ..forward
    };
    let products = [
        ("forward", forward),
        ("gradient of inputs", of_inputs),
        ("gradient of weights", of_weights),
    ];
    for (kind, product) in products {
        let taken = gpu.products().supports(&product)?;
        let product = if taken { product } else { Matmul { epilogue: Epilogue::None, ..product } };
        // SAFETY: all matrices and vectors lie in `memory`, apart from each other, and only this stream uses it.
        let seconds = unsafe { gpu.time_algorithms(&product) }?;
        let work = 2.0 * product.sizes.iter().map(|&size| size as f64).product::<f64>() / 1e12;
        let speeds: Vec<f64> = seconds.iter().map(|seconds| work / seconds).collect();
        let best = speeds.iter().copied().fold(0.0, f64::max);
        let line = json!({
            "name": format!("product {name} {kind}"), "value": speeds[0], "unit": "TFLOP/s", "best": best,
            "fused": taken, "algorithms": speeds,
        });
        println!("{line}");
    }
    gpu.compute().synchronize()
}

/// Fills memory with numbers of bf16 between -1 and 1: products of zeros take less power, and so less time.
fn fill(gpu: &Gpu, memory: &Arena) -> ferrotron::cuda::Result<()> {
    let mut state = 1_u64;
    let numbers = (0..GRANULE / 2).flat_map(|_| {
        // Knuth's linear congruential generator, MMIX.
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        // A sign, an exponent of -1 to -8, and a fraction.
        let bits = (state >> 33) as u16;
        ((bits & 0x807f) | ((126 - (bits >> 7 & 7)) << 7)).to_le_bytes()
    });
    let numbers: Vec<u8> = numbers.collect();
    for at in (0..memory.len()).step_by(GRANULE) {
        // SAFETY: within the memory, which no other work uses.
        unsafe { gpu.compute().upload(memory.base() + at as u64, &numbers) }?;
    }
    Ok(())
}
