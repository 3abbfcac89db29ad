//! Kernel sources, which are compiled for one element type at a time.
//!
//! A file of `kernels/` contains entries `KERNEL(threads, name)(...)`. [`KernelSource::source`] generates the complete text
//! for one element type, in which the entry's name is `name_f32`. The crate with the pointwise table supplies its
//! rows as CUDA expressions.

use std::fmt::Write;

use crate::nvrtc::{Architecture, Nvrtc};

/// The element type of a kernel's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ElementType {
    /// IEEE 754 binary64
    F64,
    /// IEEE 754 binary32
    F32,
    /// bfloat16
    BF16,
    /// IEEE 754 binary16
    F16,
    /// Unsigned bytes
    U8,
    /// Unsigned 32 bits
    U32,
    /// Signed 64 bits
    I64,
}

impl ElementType {
    /// Floating-point types.
    pub const FLOATS: &[ElementType] =
        &[ElementType::F64, ElementType::F32, ElementType::BF16, ElementType::F16];
    /// 16-bit types, which tensor cores multiply.
    pub const HALVES: &[ElementType] = &[ElementType::BF16, ElementType::F16];
    /// Floating-point types that are their own accumulator type.
    pub const EXACT: &[ElementType] = &[ElementType::F64, ElementType::F32];
    /// Every type.
    pub const ALL: &[ElementType] = &[
        ElementType::F64,
        ElementType::F32,
        ElementType::BF16,
        ElementType::F16,
        ElementType::U8,
        ElementType::U32,
        ElementType::I64,
    ];

    /// One type per size of 1, 2, 4 and 8 bytes, for kernels that only move elements.
    pub const SIZES: &[ElementType] =
        &[ElementType::U8, ElementType::BF16, ElementType::U32, ElementType::I64];
    /// Only signed 64 bits, for kernels that write indices.
    const ONLY_I64: &[ElementType] = &[ElementType::I64];
    /// Only f64, for kernels on scalars.
    const ONLY_F64: &[ElementType] = &[ElementType::F64];

    /// The name, which is the suffix of entry names.
    pub const fn name(self) -> &'static str {
        match self {
            ElementType::F64 => "f64",
            ElementType::F32 => "f32",
            ElementType::BF16 => "bf16",
            ElementType::F16 => "f16",
            ElementType::U8 => "u8",
            ElementType::U32 => "u32",
            ElementType::I64 => "i64",
        }
    }

    /// Bytes of an element.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            ElementType::F64 | ElementType::I64 => 8,
            ElementType::F32 | ElementType::U32 => 4,
            ElementType::BF16 | ElementType::F16 => 2,
            ElementType::U8 => 1,
        }
    }

    /// The C++ names of the type and of its accumulator type.
    const fn text(self) -> (&'static str, &'static str) {
        match self {
            ElementType::F64 => ("double", "double"),
            ElementType::F32 => ("float", "float"),
            ElementType::BF16 => ("bf16", "float"),
            ElementType::F16 => ("f16", "float"),
            ElementType::U8 => ("u8", "u8"),
            ElementType::U32 => ("u32", "u32"),
            ElementType::I64 => ("i64", "i64"),
        }
    }
}

/// The architecture whose tensor cores multiply for four warps together: Hopper.
pub const WARPGROUPS: Architecture = Architecture { major: 9, minor: 0 };

/// Whether NVRTC of this version compiles products of warpgroups for a GPU.
pub(crate) fn compiles_warpgroups(architecture: Architecture, nvrtc: (u32, u32)) -> bool {
    architecture == WARPGROUPS && nvrtc >= (12, 0)
}

/// A file of kernels.
#[derive(Debug, Clone, Copy)]
pub struct KernelSource {
    /// The file's name, equal to that of the CPU file of the same operation.
    pub name: &'static str,
    /// The source text.
    pub text: &'static str,
    /// The element types for which it is compiled.
    pub types: &'static [ElementType],
    /// Compiler options besides the architecture.
    pub options: &'static [&'static str],
}

/// The common prefix of all files.
pub const PRELUDE: &str = include_str!("../kernels/prelude.cuh");

/// Headers of `#include` lines. Their text is substituted, so the compiler reads no files.
const HEADERS: &[(&str, &str)] = &[
    ("activations.cuh", include_str!("../kernels/activations.cuh")),
    ("attention.cuh", include_str!("../kernels/attention.cuh")),
    ("attention_backward.cuh", include_str!("../kernels/attention_backward.cuh")),
    ("attention_forward.cuh", include_str!("../kernels/attention_forward.cuh")),
    ("attention_passes.cuh", include_str!("../kernels/attention_passes.cuh")),
    ("attention_scores.cuh", include_str!("../kernels/attention_scores.cuh")),
    ("attention_tiles.cuh", include_str!("../kernels/attention_tiles.cuh")),
    ("attention_warpgroup_tiles.cuh", include_str!("../kernels/attention_warpgroup_tiles.cuh")),
    ("attention_warps.cuh", include_str!("../kernels/attention_warps.cuh")),
    ("loss_scale.cuh", include_str!("../kernels/loss_scale.cuh")),
    ("mma.cuh", include_str!("../kernels/mma.cuh")),
    ("philox.cuh", include_str!("../kernels/philox.cuh")),
    ("statistics.cuh", include_str!("../kernels/statistics.cuh")),
    ("wgmma.cuh", include_str!("../kernels/wgmma.cuh")),
];

macro_rules! files {
    ($($name:literal $types:ident $options:expr;)*) => {
        /// Every file.
        pub const FILES: &[KernelSource] = &[$(KernelSource {
            name: $name,
            text: include_str!(concat!("../kernels/", $name, ".cu")),
            types: ElementType::$types,
            options: &$options,
        }),*];
    };
}
files! {
    "adafactor" FLOATS [];
    "adamw" FLOATS [];
    "argsort" ALL [];
    "attention" HALVES [];
    "attention_bias" HALVES [];
    "attention_rows" EXACT [];
    "attention_warpgroup" HALVES [];
    "cast" ALL [];
    "compare" ALL [];
    "copy" SIZES [];
    "cross_entropy" FLOATS [];
    "dropout" FLOATS [];
    "ema" FLOATS [];
    "glu" FLOATS [];
    "index" FLOATS [];
    "lion" FLOATS [];
    "loss_scale" ONLY_F64 [];
    "norm" FLOATS [];
    "outcome" ONLY_F64 [];
    "pointwise" FLOATS [];
    "random" FLOATS ["--fmad=false"];
    "reduce" FLOATS [];
    "rotary" FLOATS [];
    "round" HALVES [];
    "sgd" FLOATS [];
    "softmax" FLOATS [];
    "sort" ONLY_I64 [];
    "sq_norm" FLOATS [];
    "step" ONLY_F64 [];
    "zero_bitmap" SIZES [];
}

impl KernelSource {
    /// The file called `name`.
    pub fn named(name: &str) -> Option<&'static KernelSource> {
        FILES.iter().find(|file| file.name == name)
    }

    /// Whether the kernels use products of warpgroups, which are compiled for [`WARPGROUPS`] only.
    pub fn uses_warpgroups(&self) -> bool {
        self.text.contains("#include \"wgmma.cuh\"")
    }

    /// Compiler options for a GPU; `None` if the kernels are for other GPUs.
    pub fn options(&self, architecture: Architecture) -> Option<Vec<String>> {
        let target = match self.uses_warpgroups() {
            true if architecture == WARPGROUPS => format!("{architecture}a"),
            true => return None,
            false => architecture.to_string(),
        };
        Some(Nvrtc::options(&target, self.options))
    }

    /// The complete text for one element type. `rows` is [`pointwise_rows`] for the file "pointwise", else empty.
    pub fn source(&self, element: ElementType, rows: &str) -> String {
        format!("{PRELUDE}\n{}", instance(self.text, element, rows))
    }
}

/// The text of a kernel file and its rows for one element type, without the prelude.
pub fn instance(text: &str, element: ElementType, rows: &str) -> String {
    let (name, (t, a)) = (element.name(), element.text());
    let mut out = format!("namespace of_{name} {{\nusing T = {t};\nusing A = {a};\n");
    let mut add = |line: &str| {
        // `KERNEL(threads, entry)` begins a definition, or `KERNEL(threads, blocks, entry)`, which bounds registers so that a
        // multiprocessor holds as many blocks.
        let parts = line.strip_prefix("KERNEL(").and_then(|rest| rest.split_once(')'));
        let definition = parts.and_then(|(inside, rest)| Some((inside.rsplit_once(", ")?, rest)));
        let _ = match definition {
            Some(((bounds, entry), rest)) => {
                writeln!(out, "{ENTRY}{bounds}) {entry}_{name}{rest}")
            }
            None => writeln!(out, "{line}"),
        };
    };
    for line in text.lines().chain(rows.lines()) {
        let included = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"'));
        match included.and_then(|name| HEADERS.iter().find(|(header, _)| *header == name)) {
            Some((_, header)) => header.lines().for_each(&mut add),
            None => add(line),
        }
    }
    let _ = writeln!(out, "}}  // namespace of_{name}");
    out
}

/// The beginning of a kernel definition in a generated source.
const ENTRY: &str = "extern \"C\" __global__ void __launch_bounds__(";

/// The entries of a source, each with its maximum number of threads per block: (threads, name).
///
/// ```
/// use ferrotron_cuda::kernels::{ElementType, KernelSource, entries};
/// let source = KernelSource::named("dropout").unwrap().source(ElementType::F32, "");
/// assert_eq!(entries(&source), [(256, "dropout_f32".to_string())]);
/// ```
pub fn entries(source: &str) -> Vec<(u32, String)> {
    let parse = |line: &str| {
        let (bounds, rest) = line.strip_prefix(ENTRY)?.split_once(") ")?;
        let threads = bounds.split(',').next()?;
        let name = rest.split('(').next()?;
        Some((threads.parse().ok()?, name.trim().to_string()))
    };
    source.lines().filter_map(parse).collect()
}

/// A pointwise function of one element, as CUDA expressions.
#[derive(Debug, Clone, Copy)]
pub struct UnaryRow<'a> {
    /// The entry's name.
    pub name: &'a str,
    /// The value, in terms of `x` and the parameter `p`.
    pub value: &'a str,
    /// The derivative, in terms of the saved value `s` and `p`; `None` if constant.
    pub derivative: Option<&'a str>,
}

/// A pointwise function of two elements, as CUDA expressions of `a` and `b`.
#[derive(Debug, Clone, Copy)]
pub struct BinaryRow<'a> {
    /// The entry's name.
    pub name: &'a str,
    /// The value.
    pub value: &'a str,
    /// The derivatives by `a` and by `b`; `None` if constant.
    pub derivatives: [Option<&'a str>; 2],
}

/// Generates the entries of the pointwise table: `name` and `name_backward` of a unary row; `name`, `name_d_lhs` and
/// `name_d_rhs` of a binary row.
///
/// ```
/// use ferrotron_cuda::kernels::{UnaryRow, pointwise_rows};
/// let square = UnaryRow { name: "square", value: "x * x", derivative: Some("s + s") };
/// assert!(pointwise_rows(&[square], &[]).contains("KERNEL(256, square_backward)(T* dx, const T* saved"));
/// ```
pub fn pointwise_rows(unary: &[UnaryRow], binary: &[BinaryRow]) -> String {
    let mut out = String::new();
    for UnaryRow { name, value, derivative } in unary {
        let _ = writeln!(
            out,
            "KERNEL(256, {name})(const T* x, T* y, u64 n, double parameter) {{\n\
             \x20   [[maybe_unused]] const A p = (A)parameter;\n\
             \x20   unary(x, y, n, [=](A x) {{ return A({value}); }});\n}}"
        );
        if let Some(derivative) = derivative {
            let _ = writeln!(
                out,
                "KERNEL(256, {name}_backward)(T* dx, const T* saved, u64 n, double parameter) {{\n\
                 \x20   [[maybe_unused]] const A p = (A)parameter;\n\
                 \x20   unary_backward(dx, saved, n, [=](A s) {{ return A({derivative}); }});\n}}"
            );
        }
    }
    for BinaryRow { name, value, derivatives: [lhs, rhs] } in binary {
        let mut kernel = |name: &str, result: &str| {
            let _ = writeln!(
                out,
                "KERNEL(256, {name})(const T* a, const T* b, T* y, u64 n, Layout layout) {{\n\
                 \x20   binary(a, b, y, n, layout, [=](A y, A a, A b) {{ return A({result}); }});\n}}"
            );
        };
        kernel(name, value);
        for (side, derivative) in [("lhs", lhs), ("rhs", rhs)] {
            if let Some(derivative) = derivative {
                kernel(&format!("{name}_d_{side}"), &format!("y * ({derivative})"));
            }
        }
    }
    out
}
