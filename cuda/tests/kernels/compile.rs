//! Compiles every kernel, for every element type, to machine code for one generation of GPUs, and for bf16 for three. All
//! numbers must be in registers, but for the kernels of a list, and what else the machine code is stands in a table. With
//! another compiler than the table's it is one type of each file, for one generation.

use ferrotron_cuda::compile::{all_cubins, cubin};
use ferrotron_cuda::cubin_cache::CubinCache;
use ferrotron_cuda::kernels::{self, ElementType, FILES, KernelSource};
use ferrotron_cuda::library::Search;
use ferrotron_cuda::nvrtc::{Architecture, Nvrtc};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use ferrotron_tensor::ops::table::kernel_rows;

use crate::machine_code::{Facts, compare, disassembler, facts, is_of_table};

/// A100, H100 and H200, B200.
const ARCHITECTURES: [Architecture; 3] = [
    Architecture { major: 8, minor: 0 },
    Architecture { major: 9, minor: 0 },
    Architecture { major: 10, minor: 0 },
];

/// Kernels that keep something in memory, with the reason.
const STACK: &[(&str, &str)] = &[
    ("adamw_master_bf16", RARE),
    ("adamw_master_f16", RARE),
    ("adamw_master_f32", RARE),
    ("adamw_master_wide_f32", RARE),
    ("attention/attention_128_bf16", TIGHT),
    ("attention/attention_128_f16", TIGHT),
    ("attention/attention_96_bf16", TIGHT),
    ("attention/attention_backward_keys_128_bf16", TIGHT),
    ("attention/attention_backward_keys_64_bf16", TIGHT),
    ("attention/attention_backward_keys_64_f16", TIGHT),
    ("attention/attention_backward_keys_dropout_96_bf16", DROPOUT),
    ("attention/attention_dropout_128_bf16", DROPOUT),
    ("attention/attention_dropout_96_bf16", DROPOUT),
    ("attention_backward_queries_dropout_128_bf16", DROPOUT),
    ("attention_backward_queries_dropout_128_f16", DROPOUT),
    ("attention_bias/attention_backward_bias_64_bf16", TIGHT),
    ("attention_bias/attention_backward_bias_96_bf16", TIGHT),
    ("attention_bias/attention_backward_keys_dropout_64_bf16", DROPOUT),
    ("attention_bias/attention_backward_keys_dropout_64_f16", DROPOUT),
    ("attention_bias/attention_backward_keys_dropout_96_f16", DROPOUT),
    ("attention_bias/attention_backward_queries_128_f16", TIGHT),
    ("attention_bias/attention_dropout_64_bf16", DROPOUT),
    ("attention_rows/attention_rows_backward_bias_dropout_f64", TIGHT),
    ("attention_rows/attention_rows_backward_bias_f32", TIGHT),
    ("attention_rows/attention_rows_backward_bias_f64", TIGHT),
    ("attention_rows/attention_rows_backward_keys_f32", TIGHT),
    ("attention_rows/attention_rows_backward_queries_dropout_f32", TIGHT),
    ("attention_rows/attention_rows_backward_queries_f64", TIGHT),
    ("attention_rows/attention_rows_dropout_f32", TIGHT),
    ("attention_rows_backward_queries_dropout_f64", DROPOUT),
    ("attention_warpgroup/attention_backward_keys_128_bf16", TIGHT),
    ("attention_warpgroup/attention_backward_queries_64_bf16", TIGHT),
    ("attention_rows_f64", RARE),
    ("cos_backward_f64", ANGLE),
    ("cos_f64", ANGLE),
    ("cross_entropy/cross_entropy_backward_f64", RARE),
    ("exp_f64", RARE),
    ("log_softmax_backward_f64", RARE),
    ("norm/rms_norm_f32", RARE),
    ("norm/rms_norm_wide_f32", RARE),
    ("pointwise/div_scalar_f32", RARE),
    ("pow_d_rhs_f64", RARE),
    ("sigmoid_f64", RARE),
    ("sin_backward_f64", ANGLE),
    ("sin_f64", ANGLE),
];

/// Division, root and the f64 functions leave rare arguments to a subroutine.
const RARE: &str = "8 or 16 bytes are put aside around a subroutine for rare arguments";

/// Sine and cosine in f64 reduce a huge angle by an array of the digits of 2 / pi.
const ANGLE: &str =
    "the words of a huge angle's product with 2 / pi are kept in an array, 56 bytes at most";

/// A tile's sums take nearly all registers, and what is dropped is drawn beside them.
const DROPOUT: &str =
    "some of the tile's addresses, 88 bytes at most, are put aside while random numbers are drawn";

/// A tile's sums take nearly all registers, and masks or a bias are held beside them.
const TIGHT: &str = "some numbers, 108 bytes at most, are put aside on some generations of GPUs";

/// Bytes of stack that other compilers than the table's may put aside in any kernel of attention.
const OTHERS: usize = 108;

#[test]
fn kernels_compile_and_spill_only_where_listed() {
    let nvrtc = match Nvrtc::load(&Search::from_environment()) {
        Ok(nvrtc) => nvrtc,
        Err(error) => {
            return println!("skipped: kernels_compile_and_spill_only_where_listed: {error}");
        }
    };
    let rows = kernel_rows();
    let (major, minor) = nvrtc.version();
    let own = is_of_table((major, minor));
    if !own {
        let middle = ARCHITECTURES[1];
        println!(
            "NVRTC {major}.{minor}: a type of each file for {middle}; the table is of another version"
        );
    }
    let jobs: Vec<(&KernelSource, ElementType, Architecture)> = FILES
        .iter()
        .flat_map(|file| file.types.iter().map(move |&element| (file, element)))
        .flat_map(|(file, element)| ARCHITECTURES.map(|architecture| (file, element, architecture)))
        .filter(|&(file, element, architecture)| generation(file, element, architecture))
        .filter(|&job| own || job.2 == ARCHITECTURES[1] && in_table(job.0, job.1, job.2))
        .collect();
    let tool = disassembler(nvrtc.path());
    if tool.is_none() {
        println!(
            "skipped: the table of machine code: no nvdisasm (pip install nvidia-cuda-nvdisasm)"
        );
    }
    let (next, spilled) = (AtomicUsize::new(0), Mutex::new(BTreeSet::new()));
    let known: Mutex<BTreeMap<String, BTreeMap<Architecture, Facts>>> = Mutex::default();
    let work = || {
        while let Some(&(file, element, architecture)) = jobs.get(next.fetch_add(1, Relaxed)) {
            let tool = tool.as_deref().filter(|_| in_table(file, element, architecture));
            let (found, facts) = compile(&nvrtc, tool, (file, element, &rows), architecture);
            spilled.lock().unwrap().extend(found);
            let mut known = known.lock().unwrap();
            for (name, facts) in facts {
                known
                    .entry(format!("{}/{name}", file.name))
                    .or_default()
                    .insert(architecture, facts);
            }
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(work)).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    if tool.is_some() {
        compare(nvrtc.version(), &known.into_inner().unwrap());
    }
    // Of one file, or of all.
    let named = |name: &str| {
        let entry = name.rsplit('/').next();
        STACK.iter().any(|(known, _)| *known == name || Some(*known) == entry)
    };
    // "sm_90: 8 bytes stack frame, ..."
    let stack =
        |properties: &str| properties.split(' ').nth(1).and_then(|bytes| bytes.parse().ok());
    let others = |name: &str, properties: &str| {
        !own && name.starts_with("attention")
            && stack(properties).is_some_and(|bytes: usize| bytes <= OTHERS)
    };
    let spilled: Vec<_> = spilled
        .into_inner()
        .unwrap()
        .into_iter()
        .filter(|(name, properties)| !named(name) && !others(name, properties))
        .collect();
    assert!(spilled.is_empty(), "{spilled:#?}");
}

/// Whether the test compiles a file for a generation: plain CUDA for the one in the middle, and what the table shows.
fn generation(file: &KernelSource, element: ElementType, architecture: Architecture) -> bool {
    if file.options(architecture).is_none() {
        return false;
    }
    let plain = architecture == ARCHITECTURES[1] && !uses_tensor_cores(file);
    plain || in_table(file, element, architecture)
}

/// Whether the table shows a file for a type and a generation: one type, bf16 if it can be. Of tensor cores bf16 stands for
/// the oldest and the newest generation and f16, which takes the same registers, for the one in the middle, since a
/// compilation takes up to a minute.
fn in_table(file: &KernelSource, element: ElementType, architecture: Architecture) -> bool {
    let middle = architecture == ARCHITECTURES[1];
    let best = match uses_tensor_cores(file) && middle && !file.uses_warpgroups() {
        true => ElementType::F16,
        false => ElementType::BF16,
    };
    let stands = [best, ElementType::F32].into_iter().find(|one| file.types.contains(one));
    element == stands.unwrap_or(file.types[0])
}

fn uses_tensor_cores(file: &KernelSource) -> bool {
    file.text.contains("#include \"mma.cuh\"")
}

/// Compiles, and returns the kernels that need memory for numbers, with what the compiler says about them; and, with the
/// tool, what the machine code is.
fn compile(
    nvrtc: &Nvrtc,
    tool: Option<&Path>,
    (file, element, rows): (&KernelSource, ElementType, &str),
    architecture: Architecture,
) -> (Vec<(String, String)>, BTreeMap<String, Facts>) {
    let what = format!("{} {} {architecture}", file.name, element.name());
    let source = file.source(element, if file.name == "pointwise" { rows } else { "" });
    let mut options = file.options(architecture).unwrap();
    options.push("--ptxas-options=-v".into());
    let cubin = nvrtc
        .compile(file.name, &source, &options)
        .unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(cubin.bytes.starts_with(b"\x7fELF"), "{what} is no cubin");
    assert!(!cubin.log.contains("warning"), "{what}:\n{}", cubin.log);
    // "Potential Performance Loss: wgmma.mma_async instructions are serialized", "wgmma.wait_group is injected".
    assert!(!cubin.log.contains("wgmma"), "{what}:\n{}", cubin.log);
    let properties = |entry: &str| {
        // "Function properties for NAME", and on the line behind it "0 bytes stack frame, 0 bytes spill stores, ...".
        let title = format!("Function properties for {entry}");
        let mut lines = cubin.log.lines();
        lines
            .find(|line| line.trim_end().ends_with(&title))
            .unwrap_or_else(|| panic!("{what}: no {entry} in\n{}", cubin.log));
        lines.next().unwrap_or_default().replace("ptxas", "").trim_matches([' ', '.']).to_string()
    };
    let clean = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads";
    let kernels = kernels::entries(&source);
    let module = (file.name, &cubin.bytes[..], &cubin.log[..]);
    let facts = tool.map(|tool| facts(tool, architecture, module, &kernels)).unwrap_or_default();
    let spilled = kernels
        .into_iter()
        .map(|(_, entry)| entry)
        .map(|entry| (entry.clone(), properties(&entry)))
        .filter(|(_, properties)| properties != clean)
        .map(|(entry, properties)| {
            (format!("{}/{entry}", file.name), format!("{architecture}: {properties}"))
        })
        .collect();
    (spilled, facts)
}

#[test]
fn a_cubin_is_compiled_once_and_an_error_shows_the_line() {
    let nvrtc = match Nvrtc::load(&Search::from_environment()) {
        Ok(nvrtc) => nvrtc,
        Err(error) => {
            return println!(
                "skipped: a_cubin_is_compiled_once_and_an_error_shows_the_line: {error}"
            );
        }
    };
    let folder = tempfile::tempdir().unwrap();
    let cache = CubinCache::new(folder.path());
    let file = KernelSource::named("sq_norm").unwrap();
    let entries = || std::fs::read_dir(folder.path()).unwrap().count();
    for (number, architecture) in ARCHITECTURES.into_iter().enumerate() {
        let first = cubin(&nvrtc, &cache, (file, ElementType::F32, ""), architecture).unwrap();
        let again = cubin(&nvrtc, &cache, (file, ElementType::F32, ""), architecture).unwrap();
        assert!(first == again && first.starts_with(b"\x7fELF"));
        assert_eq!(entries(), number + 1);
    }
    let wrong = KernelSource {
        name: "wrong",
        text: "KERNEL(32, wrong)(T* x) {\n    x[0] = nothing;\n}",
        ..*file
    };
    let error =
        cubin(&nvrtc, &cache, (&wrong, ElementType::F32, ""), ARCHITECTURES[0]).unwrap_err();
    assert!(error.to_string().contains("\"nothing\" is undefined"), "{error}");
    assert_eq!(entries(), ARCHITECTURES.len());
    // All of them are wanted to be kept.
    let nowhere = CubinCache::new("/dev/null/cubin");
    let all = (&nvrtc, &nowhere, &kernel_rows()[..]);
    let error = all_cubins(all, &ARCHITECTURES[..1], 1, &|_, _| ()).unwrap_err();
    assert!(error.to_string().contains("cannot be kept in '/dev/null/cubin'"), "{error}");
}
