//! Builds a kernel file for the CPU and launches its kernels as a driver would.

use ferrotron_cuda::kernels::{self, ElementType, KernelSource};
use libloading::{Library, Symbol};
use std::cell::{OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::PathBuf;

use ferrotron_tensor::ops::table::kernel_rows;

use crate::memory::Memory;

/// Set for a child process: names the mutant whose change is made to the kernels.
pub const MUTANT: &str = "FERROTRON_TEST_MUTANT";
/// Set for a child process, to `address` or `thread`: kernels are built with this sanitizer.
pub const SANITIZE: &str = "FERROTRON_TEST_SANITIZE";

/// The checks beside those of results, by instructions that g++ adds to kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sanitizer {
    /// Nothing: two orders of threads must give the same bits.
    Off,
    /// Accesses outside of memory, by libasan.
    Address,
    /// Races, and the cost of accesses, by `instrumentation.h` of the shim. One order is enough.
    Thread,
}

impl Sanitizer {
    pub fn from_environment() -> Sanitizer {
        match std::env::var(SANITIZE).as_deref() {
            Ok("address") => Sanitizer::Address,
            Ok("thread") => Sanitizer::Thread,
            _ => Sanitizer::Off,
        }
    }

    /// Options for g++. Without default libraries there is no libtsan, whose functions are the shim's. Loads and stores of
    /// vectors stay whole, as on a GPU.
    fn options(self) -> &'static [&'static str] {
        match self {
            Sanitizer::Off => &[],
            Sanitizer::Address => &["-fsanitize=address", "-fno-omit-frame-pointer"],
            Sanitizer::Thread => &[
                "-fsanitize=thread",
                "-fno-tree-sra",
                "-fno-elide-constructors",
                "-fno-exceptions",
                "-nodefaultlibs",
                "-lm",
                "-lc",
                "-lgcc",
            ],
        }
    }
}

/// The kernels of one file, built for the CPU before the first of them is launched.
pub struct Simulator {
    file: KernelSource,
    /// By the first of the types that are built together.
    libraries: BTreeMap<ElementType, OnceCell<Library>>,
    sanitizer: Sanitizer,
    entries: Vec<(u32, String)>,
    launched: RefCell<BTreeSet<String>>,
    costs: RefCell<BTreeMap<String, Costs>>,
}

/// Costs of a launch's accesses to memory: for each the count, and the least for as many different bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Costs {
    /// Sectors of 32 bytes of global memory.
    pub load_sectors: [u64; 2],
    pub store_sectors: [u64; 2],
    /// Wavefronts of shared memory.
    pub wavefronts: [u64; 2],
}

impl Costs {
    fn least(&self) -> u64 {
        self.load_sectors[1] + self.store_sectors[1] + self.wavefronts[1]
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Dim3 {
    x: u32,
    y: u32,
    z: u32,
}

type LaunchFunction =
    unsafe extern "C" fn(*const c_char, Dim3, Dim3, usize, i32, *mut *mut c_void) -> *const c_char;

impl Simulator {
    /// The kernels of `file` with the sanitizer of this process.
    pub fn new(file: &KernelSource) -> Simulator {
        Simulator::with(file, Sanitizer::from_environment())
    }

    /// Like [`Simulator::new`], with a sanitizer.
    pub fn with(file: &KernelSource, sanitizer: Sanitizer) -> Simulator {
        let entries = |&element| kernels::entries(&instance(file, element));
        Simulator {
            file: *file,
            libraries: file.types.iter().map(|&element| (element, OnceCell::new())).collect(),
            sanitizer,
            entries: file.types.iter().flat_map(entries).collect(),
            launched: RefCell::default(),
            costs: RefCell::default(),
        }
    }

    /// The kernels for an element type, built now or before. All types of a file are in one library, since each takes some
    /// of the few bytes that a process has for `machine`; a mutant fails with one type and is not built for the others.
    fn library(&self, element: ElementType) -> &Library {
        let mutant = std::env::var_os(MUTANT).is_some();
        let types = if mutant { std::slice::from_ref(&element) } else { self.file.types };
        self.libraries[&types[0]].get_or_init(|| {
            let path = build(&self.file, types, self.sanitizer);
            // SAFETY: the library has no initialisers beside those of the sanitizer.
            unsafe { Library::new(&path) }.unwrap()
        })
    }

    /// A launch of the kernel `name` for elements of `element`.
    pub fn kernel<'a>(&'a self, name: &str, element: ElementType) -> Launch<'a> {
        let name = format!("{name}_{}", element.name());
        Launch { simulator: self, name, element, arguments: Vec::new(), dynamic: 0 }
    }

    /// The costs of each kernel, in the first of its largest launches. The sanitizer of threads counts them.
    pub fn costs(&self) -> BTreeMap<String, Costs> {
        self.costs.borrow().clone()
    }

    fn note_costs(&self, name: &str, element: ElementType) {
        // SAFETY: this is how the shim declares it, and a grid of this thread has run.
        let costs = unsafe {
            let costs: Symbol<unsafe extern "C" fn() -> *const Costs> =
                self.library(element).get("cusim_costs").unwrap();
            *costs()
        };
        let mut known = self.costs.borrow_mut();
        if known.get(name).is_none_or(|largest| costs.least() > largest.least()) {
            known.insert(name.to_string(), costs);
        }
    }

    /// Asserts that every kernel of the file has been launched.
    pub fn assert_all_launched(&self) {
        let launched = self.launched.borrow();
        let missing: Vec<_> =
            self.entries.iter().filter(|(_, name)| !launched.contains(name)).collect();
        assert!(missing.is_empty(), "these kernels were never launched: {missing:?}");
    }
}

/// The text, with the mutant's change if there is one.
fn changed(file: &KernelSource, text: &str) -> String {
    match std::env::var(MUTANT) {
        Ok(mutant) => crate::mutants::apply(&mutant, file.name, text),
        Err(_) => text.to_string(),
    }
}

/// `softmax_f32` is in the namespace `of_f32`.
fn qualified(name: &str) -> String {
    format!("of_{}::{name}", name.rsplit('_').next().unwrap_or_default())
}

/// The text of a file for an element type.
fn instance(file: &KernelSource, element: ElementType) -> String {
    let rows = if file.name == "pointwise" { kernel_rows() } else { String::new() };
    changed(file, &kernels::instance(file.text, element, &rows))
}

/// The shared library of a file for some element types, which is made once for each text.
fn build(file: &KernelSource, types: &[ElementType], sanitizer: Sanitizer) -> PathBuf {
    let prelude = changed(file, kernels::PRELUDE);
    let text: String = types.iter().map(|&element| instance(file, element)).collect();
    let entries = kernels::entries(&text);
    let listed = entries.iter().map(|(_, name)| {
        let caller = format!("cusim::Caller<{}>", qualified(name));
        format!("    {{\"{name}\", {caller}::call, {caller}::sizes}},\n")
    });
    let source = format!(
        "#include \"cusim.h\"\n{prelude}#include \"types.h\"\n#include \"mma.h\"\n{text}\
         const cusim::Kernel cusim::kernels[] = {{\n{}}};\nconst int cusim::n_kernels = {};\n",
        listed.collect::<String>(),
        entries.len()
    );
    // A mutant runs until its first failure, and a check for races once.
    let short = std::env::var_os(MUTANT).is_some() || sanitizer == Sanitizer::Thread;
    let level = if short { "-O1" } else { "-O2" };
    ferrotron_cuda_sim::library(file.name, &source, &[&[level], sanitizer.options()].concat())
}

enum Argument<'a> {
    Input(&'a [u8]),
    Output(&'a mut [u8]),
    InOut(&'a mut [u8]),
    Null,
    Value(Vec<u8>),
}

/// A launch that is being put together: arguments in the kernel's order.
pub struct Launch<'a> {
    simulator: &'a Simulator,
    name: String,
    element: ElementType,
    arguments: Vec<Argument<'a>>,
    dynamic: usize,
}

impl<'a> Launch<'a> {
    /// Memory that the kernel reads.
    pub fn input<E: bytemuck::NoUninit>(mut self, data: &'a [E]) -> Self {
        self.arguments.push(Argument::Input(bytemuck::cast_slice(data)));
        self
    }

    /// Memory that the kernel writes, and finds garbage in.
    pub fn output<E: bytemuck::Pod>(mut self, data: &'a mut [E]) -> Self {
        self.arguments.push(Argument::Output(bytemuck::cast_slice_mut(data)));
        self
    }

    /// Memory that the kernel reads and writes.
    pub fn in_out<E: bytemuck::Pod>(mut self, data: &'a mut [E]) -> Self {
        self.arguments.push(Argument::InOut(bytemuck::cast_slice_mut(data)));
        self
    }

    /// A null pointer.
    pub fn null(mut self) -> Self {
        self.arguments.push(Argument::Null);
        self
    }

    /// A number or struct.
    pub fn value<E: bytemuck::NoUninit>(mut self, value: E) -> Self {
        self.arguments.push(Argument::Value(bytemuck::bytes_of(&value).to_vec()));
        self
    }

    /// Bytes of dynamic shared memory.
    pub fn dynamic(mut self, bytes: usize) -> Self {
        self.dynamic = bytes;
        self
    }

    /// Runs in both orders, which must give the same bits, and writes nothing outside of its memory.
    pub fn run(self, grid: [usize; 3], block: [usize; 3]) {
        let name = self.name.clone();
        self.try_run(grid, block).unwrap_or_else(|error| panic!("{name}: {error}"));
    }

    /// Like [`Launch::run`], with an error where memory depends on the order or the shim finds one.
    pub fn try_run(mut self, grid: [usize; 3], block: [usize; 3]) -> Result<(), String> {
        let Launch { simulator, name, .. } = &self;
        let limit = simulator.entries.iter().find(|(_, entry)| entry == name);
        let limit = limit.unwrap_or_else(|| panic!("there is no kernel {name}")).0 as usize;
        let threads: usize = block.iter().product();
        assert!(threads <= limit, "{name}: {threads} threads in a block, {limit} at most");
        assert!(grid[0] < 1 << 31 && grid[1] < 65536 && grid[2] < 65536, "{name}: grid {grid:?}");
        simulator.launched.borrow_mut().insert(name.clone());
        if grid.contains(&0) {
            return Ok(()); // as hosts do, who may not launch an empty grid
        }
        let forward = self.once(grid, block, false)?;
        if simulator.sanitizer == Sanitizer::Thread {
            simulator.note_costs(&self.name, self.element);
        } else {
            let reversed = self.once(grid, block, true)?;
            for (number, (one, other)) in forward.iter().zip(&reversed).enumerate() {
                if let Some(at) = one.iter().zip(other).position(|(one, other)| one != other) {
                    return Err(format!(
                        "memory {number} depends on the order of threads, byte {at}"
                    ));
                }
            }
        }
        let mut results = forward.into_iter();
        for argument in &mut self.arguments {
            if let Argument::Output(data) | Argument::InOut(data) = argument {
                data.copy_from_slice(&results.next().unwrap());
            }
        }
        Ok(())
    }

    fn once(
        &self,
        grid: [usize; 3],
        block: [usize; 3],
        reversed: bool,
    ) -> Result<Vec<Vec<u8>>, String> {
        let mut memory: Vec<Memory> = Vec::new();
        let mut slots: Vec<Vec<u8>> = Vec::new();
        for argument in &self.arguments {
            let bytes = match argument {
                Argument::Value(bytes) => {
                    slots.push(bytes.clone());
                    continue;
                }
                Argument::Null => {
                    slots.push(vec![0; 8]);
                    continue;
                }
                Argument::Input(data) => data.to_vec(),
                Argument::InOut(data) => data.to_vec(),
                Argument::Output(data) => vec![GARBAGE; data.len()],
            };
            let fence = if self.simulator.sanitizer == Sanitizer::Address { 0 } else { 256 };
            memory.push(Memory::new(&bytes, matches!(argument, Argument::Input(_)), fence));
            slots.push((memory.last().unwrap().pointer() as u64).to_ne_bytes().to_vec());
        }
        // Arguments lie at addresses of 16: a struct may hold numbers of any size.
        let mut aligned: Vec<Vec<u128>> = slots
            .iter()
            .map(|bytes| {
                let mut words = vec![0_u128; bytes.len().div_ceil(16)];
                bytemuck::cast_slice_mut::<u128, u8>(&mut words)[..bytes.len()]
                    .copy_from_slice(bytes);
                words
            })
            .collect();
        let mut pointers: Vec<*mut c_void> =
            aligned.iter_mut().map(|words| words.as_mut_ptr().cast()).collect();
        let dim = |[x, y, z]: [usize; 3]| Dim3 { x: x as u32, y: y as u32, z: z as u32 };
        let name = CString::new(self.name.clone()).unwrap();
        // SAFETY: the function is the shim's, and the arguments are those of the kernel, or its test is wrong.
        let error = unsafe {
            let launch: Symbol<LaunchFunction> =
                self.simulator.library(self.element).get("cusim_launch").unwrap();
            launch(
                name.as_ptr(),
                dim(grid),
                dim(block),
                self.dynamic,
                i32::from(reversed),
                pointers.as_mut_ptr(),
            )
        };
        if !error.is_null() {
            // SAFETY: errors are strings that live until the next launch.
            return Err(unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned());
        }
        memory.iter().for_each(|memory| memory.check(&self.name));
        let results = memory.into_iter().filter(|memory| !memory.constant);
        Ok(results.map(|memory| memory.bytes().to_vec()).collect())
    }
}

const GARBAGE: u8 = 0x7b;
