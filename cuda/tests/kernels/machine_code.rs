//! Reads what the compiler made of kernels: registers and memory from its log, and instructions from the disassembler,
//! `nvdisasm`. The numbers of every kernel are a table in the repository.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;

use ferrotron_cuda::attention::{Blocks, Pass};
use ferrotron_cuda::nvrtc::Architecture;

/// Set to write the table anew.
const UPDATE: &str = "UPDATE_MACHINE_CODE";

/// Instructions of an iteration that the compiler may make more or fewer in another run: 4794 and 4795 were seen.
const RUNS: u32 = 2;

/// The numbers of one kernel's code for one generation of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Facts {
    registers: u32,
    /// Bytes stored to local memory because registers are too few.
    spilled: u32,
    /// Bytes of shared memory, fixed and, for tiles of attention, given by the host.
    shared: u32,
    /// Blocks that a multiprocessor holds at once.
    blocks: u32,
    /// Instructions that load and store 128 bits of global memory.
    wide: [usize; 2],
    inner: Option<Loop>,
}

/// The loop that multiplies on tensor cores, over tiles or, where these have parts, over parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Loop {
    /// Products of 16 x 16 by 16 x 8, or of a warpgroup's 64 x 16 by 16 x N.
    products: usize,
    /// Loads of four 8 x 8 matrices from shared memory.
    matrices: usize,
    /// Copies of 16 bytes from global to shared memory.
    copies: usize,
    /// Exponentials, reciprocals and the like.
    special: usize,
    /// All instructions.
    all: usize,
    /// Instructions of the shortest way through the loop that does all products: without what only masks, caps or rare
    /// arguments need. `None` where a subroutine lies between the products.
    least: Option<usize>,
}

/// Kernels whose loads and stores, or loads alone, must be of 128 bits: those that mostly move memory, by file. `*` is
/// every kernel of the file.
const WIDE: &[(&str, &str, [bool; 2])] = &[
    ("adamw", "adamw adamw_wide adamw_master adamw_master_wide", [true, true]),
    ("cast", "cast_to_f16 cast_to_bf16", [true, true]),
    ("copy", "copy index_select", [true, true]),
    ("cross_entropy", "cross_entropy cross_entropy_shard", [true, false]),
    ("cross_entropy", "cross_entropy_backward", [true, true]),
    ("glu", "*", [true, true]),
    (
        "norm",
        "layer_norm layer_norm_wide rms_norm rms_norm_wide layer_norm_backward_input \
         layer_norm_wide_backward_input rms_norm_backward_input rms_norm_wide_backward_input \
         layer_norm_backward_partials rms_norm_backward_partials",
        [true, true],
    ),
    ("pointwise", "*", [true, true]),
    ("reduce", "sum_rows max_rows sum_exp_rows argmax_rows", [true, false]),
    ("rotary", "rotary", [true, true]),
    ("softmax", "*", [true, true]),
];

/// The disassembler beside the compiler's library, or on the path.
pub fn disassembler(nvrtc: &Path) -> Option<PathBuf> {
    let beside = nvrtc.parent()?.with_file_name("bin").join("nvdisasm");
    let candidates = [beside, "nvdisasm".into()];
    let runs = |tool: &PathBuf| Command::new(tool).arg("--version").output().is_ok();
    candidates.into_iter().find(runs)
}

/// The facts of each kernel of a file's module, by name without the element type. `kernels` are threads per block and names.
pub fn facts(
    disassembler: &Path,
    architecture: Architecture,
    (file, cubin, log): (&str, &[u8], &str),
    kernels: &[(u32, String)],
) -> BTreeMap<String, Facts> {
    let mut module = tempfile::NamedTempFile::new().unwrap();
    std::io::Write::write_all(&mut module, cubin).unwrap();
    let out = Command::new(disassembler).arg("-c").arg(module.path()).output().unwrap();
    assert!(out.status.success(), "nvdisasm: {}", String::from_utf8_lossy(&out.stderr));
    let text = String::from_utf8_lossy(&out.stdout);
    let sections: HashMap<&str, &str> =
        text.split("\n.text.").skip(1).filter_map(|section| section.split_once(':')).collect();
    let of = |(threads, entry): &(u32, String)| {
        let code = Code::parse(sections.get(entry.as_str()).expect("a section for each kernel"));
        let name = entry.rsplit_once('_').unwrap().0.to_string();
        let mut facts = Facts { wide: code.wide(), inner: code.inner_loop(), ..Facts::default() };
        let mut lines = log.lines().skip_while(|line| !line.ends_with(&format!("for {entry}")));
        let properties = lines.nth(1).unwrap_or_default();
        let used = lines.next().unwrap_or_default();
        facts.spilled = number_before(properties, " bytes spill stores").unwrap();
        facts.registers = number_before(used, " registers").unwrap();
        facts.shared = number_before(used, " bytes smem").unwrap_or(0) + tiles(file, &name);
        facts.blocks = blocks(architecture, *threads, &facts);
        (name, facts)
    };
    kernels.iter().map(of).collect()
}

fn number_before(line: &str, unit: &str) -> Option<u32> {
    line.split(unit).next().filter(|rest| rest.len() < line.len())?.rsplit(' ').next()?.parse().ok()
}

/// Bytes of tiles that the host asks for.
fn tiles(file: &str, name: &str) -> u32 {
    let Some(width) = name.rsplit('_').next().and_then(|width| width.parse().ok()) else {
        return 0;
    };
    let pass = match name {
        name if name.contains("backward_queries") => Pass::Queries,
        name if name.contains("backward_keys") => Pass::Keys,
        name if name.contains("backward_bias") => Pass::Bias,
        _ => Pass::Forward,
    };
    if file == "attention_warpgroup" {
        return Blocks::of_warpgroups(pass, width).unwrap().shared as u32;
    }
    let plain = file == "attention" && !name.contains("dropout");
    Blocks::new(pass, width, plain).shared as u32
}

/// Blocks that fit on a multiprocessor at once (CUDA C++ Programming Guide, "Technical Specifications per Compute
/// Capability"): four quarters with 16384 registers, given out by 256 for each warp; 64 warps; 32 blocks; and 164 or
/// 228 KiB of shared memory, of which each block takes 1 KiB besides its own.
fn blocks(architecture: Architecture, threads: u32, facts: &Facts) -> u32 {
    let warps = threads.div_ceil(32);
    let registers = (facts.registers * 32).next_multiple_of(256);
    let by_registers = 4 * (16384 / registers) / warps;
    let shared = if architecture.major == 8 { 164 << 10 } else { 228 << 10 };
    let by_shared = shared / ((facts.shared + 1024).next_multiple_of(128));
    by_registers.min(by_shared).min(64 / warps).min(32)
}

/// The instructions of a kernel, and where labels point.
struct Code<'a> {
    instructions: Vec<&'a str>,
    labels: HashMap<&'a str, usize>,
}

impl<'a> Code<'a> {
    fn parse(section: &'a str) -> Code<'a> {
        let (mut instructions, mut labels) = (Vec::new(), HashMap::new());
        for line in section.lines().map(str::trim) {
            if let Some(label) = line.strip_suffix(':').filter(|label| label.starts_with(".L_")) {
                labels.insert(label, instructions.len());
            } else if let Some((_, instruction)) =
                line.strip_prefix("/*").and_then(|rest| rest.split_once("*/"))
            {
                // A line with the second half of an encoding has no instruction.
                if !instruction.trim().is_empty() {
                    instructions.push(instruction.trim());
                }
            }
        }
        Code { instructions, labels }
    }

    /// The operation of an instruction, without the predicate that guards it.
    fn operation(instruction: &str) -> &str {
        let mut words = instruction.split_whitespace();
        words.find(|word| !word.starts_with('@')).unwrap_or_default()
    }

    fn count(&self, range: std::ops::Range<usize>, what: impl Fn(&str) -> bool) -> usize {
        self.instructions[range].iter().filter(|one| what(Code::operation(one))).count()
    }

    fn wide(&self) -> [usize; 2] {
        ["LDG", "STG"].map(|operation| {
            let wide = |name: &str| {
                let mut parts = name.trim_end_matches(';').split('.');
                parts.next() == Some(operation) && parts.any(|part| part == "128")
            };
            self.count(0..self.instructions.len(), wide)
        })
    }

    /// The target of a branch, and whether it is always taken.
    fn branch(&self, at: usize) -> Option<(usize, bool)> {
        let instruction = self.instructions[at];
        if !Code::operation(instruction).starts_with("BRA") {
            return None;
        }
        let (before, label) = instruction.split_once("`(")?;
        let target = *self.labels.get(label.split(')').next()?)?;
        let operands = before.rsplit("BRA").next().unwrap_or_default();
        Some((target, !instruction.starts_with('@') && !operands.contains('P')))
    }

    /// The shortest of the loops that have the most products on tensor cores.
    fn inner_loop(&self) -> Option<Loop> {
        let loops = (0..self.instructions.len()).filter_map(|end| {
            let (start, _) = self.branch(end)?;
            // What is not on the straight way through a loop may lie behind it, and branch back.
            (start <= end && self.count(start..end, is_product) > 0).then_some(start..end + 1)
        });
        let range = loops.max_by_key(|range| {
            (self.count(range.clone(), is_product), std::cmp::Reverse(range.len()))
        })?;
        let count = |prefix: &str| self.count(range.clone(), |name| name.starts_with(prefix));
        Some(Loop {
            products: self.count(range.clone(), is_product),
            matrices: count("LDSM"),
            copies: count("LDGSTS"),
            special: count("MUFU"),
            all: range.len(),
            least: self.shortest(range.clone()),
        })
    }

    /// Instructions of the shortest way from the first of a loop to the first that has all products on tensor cores, in
    /// their order. Of an inner loop without products one iteration is counted.
    fn shortest(&self, range: std::ops::Range<usize>) -> Option<usize> {
        let first = range.start;
        let is_product = |at: &usize| is_product(Code::operation(self.instructions[*at]));
        let products: Vec<usize> = range.filter(is_product).collect();
        // Where ways are, and how many products they have.
        let (mut reached, mut known) = (vec![(first, 0)], BTreeSet::from([(first, 0)]));
        for length in 1.. {
            let mut next = Vec::new();
            for (at, had) in reached {
                let has = had + usize::from(is_product(&at));
                if has > had && products.get(had) != Some(&at) {
                    continue;
                }
                let branch = self.branch(at);
                let ends = Code::operation(self.instructions[at]).starts_with("EXIT")
                    && !self.instructions[at].starts_with('@');
                let along = (!ends && !branch.is_some_and(|(_, always)| always)).then_some(at + 1);
                for to in branch.map(|(target, _)| target).into_iter().chain(along) {
                    if to == first && has == products.len() {
                        return Some(length);
                    }
                    if to < self.instructions.len() && known.insert((to, has)) {
                        next.push((to, has));
                    }
                }
            }
            if next.is_empty() {
                return None;
            }
            reached = next;
        }
        None
    }
}

/// Whether an operation multiplies on tensor cores.
fn is_product(operation: &str) -> bool {
    operation.starts_with("HMMA") || operation.starts_with("HGMMA")
}

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels/machine_code.txt")
}

/// Whether the table is of this version of the compiler, or is to become so.
pub fn is_of_table((major, minor): (u32, u32)) -> bool {
    let title = format!("NVRTC {major}.{minor},");
    std::env::var_os(UPDATE).is_some()
        || std::fs::read_to_string(path()).unwrap().starts_with(&title)
}

/// Compares facts, by "file/kernel" and generation, with the claims, and those of the table's compiler with the table.
pub fn compare(version: (u32, u32), all: &BTreeMap<String, BTreeMap<Architecture, Facts>>) {
    let path = path();
    let made = table(version, all);
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let mut narrow = Vec::new();
    for (file, kernels, [loads, stores]) in WIDE {
        let own = |name: &&String| {
            let (of, kernel) = name.split_once('/').unwrap();
            of == *file && (*kernels == "*" || kernels.split_whitespace().any(|one| one == kernel))
        };
        let found: Vec<_> = all.keys().filter(own).collect();
        assert!(!found.is_empty(), "{file} has no kernel called {kernels}");
        for name in found {
            for (architecture, facts) in &all[name] {
                if *loads && facts.wide[0] == 0 || *stores && facts.wide[1] == 0 {
                    narrow.push(format!("{name} on {architecture}: {:?}", facts.wide));
                }
            }
        }
    }
    assert!(
        narrow.is_empty(),
        "these move few bytes at once, as 128-bit loads and stores: {narrow:#?}"
    );
    if !is_of_table(version) {
        return;
    }
    let kept = std::fs::read_to_string(&path).unwrap();
    let only = |left: &str, right: &str, sign: &str| -> String {
        let lines = left.lines().filter(|line| !right.lines().any(|other| other == *line));
        lines.map(|line| format!("{sign} {line}\n")).collect()
    };
    let (gone, new) = (only(&kept, &made, "-"), only(&made, &kept, "+"));
    assert!(
        alike(&kept, &made),
        "the machine code has changed; {UPDATE}=1 writes {} anew:\n{gone}{new}",
        path.display()
    );
}

/// Whether two tables have the same names and numbers. Numbers of hundreds of instructions may differ by [`RUNS`]; bytes, which
/// are multiples of 4, may not.
fn alike(kept: &str, made: &str) -> bool {
    let near = |one: &str, other: &str| match (one.parse::<u32>(), other.parse::<u32>()) {
        (Ok(one), Ok(other)) if one > 200 => one.abs_diff(other) <= RUNS,
        _ => one == other,
    };
    let words = |table: &str| table.split_whitespace().count();
    let mut pairs = kept.split_whitespace().zip(made.split_whitespace());
    words(kept) == words(made) && pairs.all(|(one, other)| near(one, other))
}

#[test]
fn tables_that_two_runs_of_the_compiler_wrote_are_alike() {
    let table = "a 1024 12 4795 1083\nb 16 -\n";
    assert!(alike(table, "a 1024  12 4794 1082\nb 16 -\n"));
    for other in
        ["a 1020 12 4795 1083", "a 1024 13 4795 1083", "a 1024 12 - 1083", "a 1024 12 4795"]
    {
        assert!(!alike(table, &format!("{other}\nb 16 -\n")), "{other}");
    }
}

fn table(
    (major, minor): (u32, u32),
    all: &BTreeMap<String, BTreeMap<Architecture, Facts>>,
) -> String {
    let generations: BTreeSet<&Architecture> = all.values().flat_map(BTreeMap::keys).collect();
    let generations: Vec<String> = generations.into_iter().map(ToString::to_string).collect();
    let mut out = format!(
        "NVRTC {major}.{minor}, bf16 (f32, f64 or i64 for kernels without it; f16 for tensor cores of sm_90; bf16 for warpgroups of\n\
         sm_90a, who have one column)\n\n\
         Registers, bytes spilled, bytes of shared memory, blocks on a multiprocessor, 128-bit loads and stores of global\n\
         memory; for {}.\n\n",
        generations.join(", ")
    );
    let mut row =
        |name: &str, facts: &BTreeMap<Architecture, Facts>, text: &dyn Fn(&Facts) -> String| {
            let columns: Vec<String> = facts.values().map(text).collect();
            out.push_str(&format!("{name:52} {}\n", columns.join(" | ")));
        };
    for (name, facts) in all {
        row(name, facts, &|Facts {
                               registers,
                               spilled,
                               shared,
                               blocks,
                               wide: [loads, stores],
                               ..
                           }| {
            format!("{registers:3} {spilled:3} {shared:6} {blocks:2} {loads:2} {stores:2}")
        });
    }
    row("", &BTreeMap::new(), &|_| String::new());
    let title = "Tensor cores: HMMA or HGMMA, LDSM, LDGSTS, MUFU, all and least instructions of an iteration.";
    row(title, &BTreeMap::new(), &|_| String::new());
    row("", &BTreeMap::new(), &|_| String::new());
    for (name, facts) in
        all.iter().filter(|(_, facts)| facts.values().any(|one| one.inner.is_some()))
    {
        row(name, facts, &|facts| match facts.inner {
            None => "-".to_string(),
            Some(Loop { products, matrices, copies, special, all, least }) => {
                let least = least.map_or("-".to_string(), |least| least.to_string());
                format!("{products:3} {matrices:3} {copies:2} {special:3} {all:4} {least:4}")
            }
        });
    }
    out.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}
