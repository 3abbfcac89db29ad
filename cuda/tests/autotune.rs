//! Timed choices of algorithms: between runs, processes that start at once, damaged files, and folders that cannot be
//! written.
//!
//! A process has one stand-in for cuBLASLt, whose slow algorithm is that of the environment: each run is a child.

use ferrotron_cuda::cublaslt::{
    AlgorithmChoice, AlgorithmFolder, Epilogue, Matmul, Matrices, StorageOrder,
};
use ferrotron_cuda::gpu::{Gpu, GpuConfig};
use ferrotron_cuda::graph::StreamCapture;
use ferrotron_cuda::kernels::ElementType;
use ferrotron_cuda::memory::{Arena, GRANULE};
use ferrotron_cuda_sim as stand_in;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Names the folder to a child process, and what it shall do.
const FOLDER: &str = "FERROTRON_TEST_CHOICES";
const ROLE: &str = "FERROTRON_TEST_ROLE";
/// The algorithm that the stand-in makes slow.
const SLOW: &str = "FERROTRON_STAND_IN_SLOW";

const LEFT: [f32; 4] = [1.0, 2.0, 3.0, 4.0];
const OUT: u64 = 1024;
const SUMS: u64 = 2048;

/// The child process of the tests; run by itself it does nothing. It prints the algorithm of its products, how many
/// kinds it has timed, and the result.
#[test]
fn child() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let role = std::env::var(ROLE).unwrap();
    let algorithms = match role.as_str() {
        "heuristic" => AlgorithmChoice::Heuristic,
        _ => AlgorithmChoice::Autotuned(AlgorithmFolder::new(folder)),
    };
    let config = GpuConfig { algorithms, ..stand_in::stand_in("child").unwrap() };
    let gpu = Gpu::new(&config, String::new()).unwrap();
    let mut memory = Arena::reserve(gpu.context(), GRANULE).unwrap();
    memory.map(0, GRANULE).unwrap();
    let numbers: Vec<u8> = LEFT.iter().flat_map(|x| x.to_le_bytes()).collect();
    let base = memory.base();
    let matrix = |at| Matrices {
        address: base + at,
        order: StorageOrder::Rows,
        leading: 2,
        batch_stride: 0,
    };
    // Added to what is there, with the sums of rows: neither shows that the product has been timed.
    let product = Matmul {
        batch: 1,
        sizes: [2, 2, 2],
        operands: ElementType::F32,
        result: ElementType::F32,
        left: matrix(0),
        right: matrix(0),
        out: matrix(OUT),
        beta: if role == "replaces" { 0.0 } else { 1.0 },
        addend: (role == "adds others").then(|| matrix(0)),
        epilogue: Epilogue::RowSums(base + SUMS),
    };
    let numbers_at = |at| {
        let mut bytes = [[0; 4]; 4];
        // SAFETY: within the memory, which is used in this stream alone.
        unsafe { gpu.compute().download(bytes.as_flattened_mut(), base + at) }.unwrap();
        bytes.map(f32::from_le_bytes)
    };
    // SAFETY: all matrices are within the memory, which is used in this stream alone, or the graph's products are
    // never launched.
    unsafe {
        for at in [0, OUT] {
            gpu.compute().upload(base + at, &numbers).unwrap();
        }
        if role == "captures" {
            let capture = StreamCapture::begin(&gpu).unwrap();
            gpu.product(&product).unwrap();
            capture.end().unwrap();
            assert_eq!((gpu.products().algorithm(&product), gpu.products().timings()), (None, 0));
        }
        gpu.product(&product).unwrap();
    }
    let added = if role == "replaces" { [0.0; 4] } else { LEFT };
    let want = [7.0, 10.0, 15.0, 22.0].iter().zip(added).map(|(x, y)| x + y).collect::<Vec<_>>();
    assert_eq!(numbers_at(OUT), *want);
    assert_eq!(numbers_at(SUMS)[..2], [3.0, 7.0]);
    let products = gpu.products();
    println!(
        "\nalgorithm {} timings {}",
        products.algorithm(&product).unwrap(),
        products.timings()
    );
}

fn start(folder: &Path, role: &str, slow: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["child", "--exact", "--nocapture"]);
    command.env(FOLDER, folder).env(ROLE, role).env(SLOW, slow);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The line that a child prints, and its standard error.
fn ended(child: Child) -> (String, String) {
    let out = child.wait_with_output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (told, error) = (text(&out.stdout), text(&out.stderr));
    assert!(out.status.success(), "{told}{error}");
    let line = told.lines().find(|line| line.starts_with("algorithm ")).unwrap();
    (line.to_string(), error)
}

fn run(folder: &Path, role: &str, slow: &str) -> (String, String) {
    ended(start(folder, role, slow))
}

fn said(algorithm: usize, timings: usize) -> (String, String) {
    (format!("algorithm {algorithm} timings {timings}"), String::new())
}

fn files(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

fn skips(test: &str) -> bool {
    stand_in::stand_in(test).is_none()
}

#[test]
fn the_fastest_algorithm_is_kept() {
    if skips("the_fastest_algorithm_is_kept") {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let folder = &root.path().join("choices");
    // Without the option the first one is taken, and nothing is written.
    assert_eq!(run(folder, "heuristic", "0"), said(0, 0));
    assert!(!folder.exists());
    // A capture times nothing; the product behind it does.
    assert_eq!(run(folder, "captures", "0"), said(1, 1));
    let [file] = &files(folder)[..] else { panic!("{:?}", files(folder)) };
    let text = fs::read_to_string(file).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("GPU ") && lines[1].starts_with("cuBLASLt "), "{text}");
    assert!(lines[2].contains("sizes: [2, 2, 2]") && lines[3].starts_with("algorithm "), "{text}");
    // From then on nothing is timed, even if another one has become the fastest.
    for (role, slow) in [("adds", "0"), ("adds", "1"), ("replaces", "1")] {
        assert_eq!(run(folder, role, slow), said(1, 0), "{role} {slow}");
    }
    // The first stays if none is faster.
    let other = &root.path().join("other");
    assert_eq!(run(other, "replaces", "1"), said(0, 1));
    assert_eq!(run(other, "replaces", "0"), said(0, 0));
    // Addends elsewhere need no other memory while their product is timed.
    assert_eq!(run(&root.path().join("others"), "adds others", "0"), said(1, 1));
}

#[test]
fn processes_that_start_at_once_agree() {
    if skips("processes_that_start_at_once_agree") {
        return;
    }
    for _ in 0..3 {
        let root = tempfile::tempdir().unwrap();
        // What is fastest differs between them.
        let children: Vec<Child> =
            (0..6).map(|i| start(root.path(), "adds", ["0", "1"][i % 2])).collect();
        let told: Vec<(String, String)> = children.into_iter().map(ended).collect();
        let algorithm = |line: &str| line.split(' ').nth(1).unwrap().to_string();
        let first = algorithm(&told[0].0);
        assert!(
            told.iter().all(|(line, error)| algorithm(line) == first && error.is_empty()),
            "{told:?}"
        );
        assert_eq!(files(root.path()).len(), 1, "no temporary file stays");
        assert_eq!(run(root.path(), "adds", "0").0, format!("algorithm {first} timings 0"));
    }
}

#[test]
fn what_cannot_be_kept_is_not_taken() {
    if skips("what_cannot_be_kept_is_not_taken") {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let folder = &root.path().join("choices");
    run(folder, "adds", "0");
    let [file] = &files(folder)[..] else { panic!("{:?}", files(folder)) };
    let text = fs::read_to_string(file).unwrap();
    let (key, rest) = text.split_once("algorithm ").unwrap();
    for (damaged, why) in [
        (String::new(), "is damaged"),
        ("garbage\n".into(), "is damaged"),
        (key.into(), "is damaged"),
        (format!("x{text}"), "is damaged"),
        (format!("{key}algorithm {}", &rest[..40]), "is damaged"),
        (format!("{key}algorithm 00{rest}"), "names no algorithm that cuBLASLt offers"),
    ] {
        fs::write(file, &damaged).unwrap();
        let (line, error) = run(folder, "adds", "0");
        assert_eq!(line, "algorithm 0 timings 0", "{damaged}");
        let path = file.display();
        let want = format!(
            "autotuning: '{path}' {why}: a product takes cuBLASLt's first choice; delete the file to time again\n"
        );
        assert_eq!(error, want);
        assert_eq!(fs::read_to_string(file).unwrap(), damaged, "it stays for whoever looks");
    }
    // No folder can be made below a file.
    let below = file.join("choices");
    let (line, error) = run(&below, "adds", "0");
    assert_eq!(line, "algorithm 0 timings 1");
    let begin = format!("autotuning: nothing can be kept in '{}' (", below.display());
    assert!(error.starts_with(&begin) && error.lines().count() == 1, "{error}");
}
