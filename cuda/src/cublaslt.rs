//! Matrix products by cuBLASLt. A product is planned when one of its kind is first asked for; from then on it is one
//! call.
//!
//! Matrices are row-major here. cuBLASLt's are column-major unless its slower ways are asked for, and a row-major matrix
//! is the transpose of a column-major one: so out = left right is computed as out^T = right^T left^T, with the operands
//! exchanged (cuBLAS documentation, "Data Layout").
//!
//! What belongs to a product is computed in its pass, by an [`Epilogue`]: a bias, GELU with the argument that backward
//! needs, the gradient of a bias with that of the weight. Not every type and size has each; the plan knows.

mod functions;
mod plan;

use cudarc::cublaslt::sys::cublasLtHandle_t;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::context::Context;
use crate::kernels::ElementType;
use crate::library::{Kind, Search};
use crate::memory::Arena;
use crate::stream::Stream;
use crate::{Error, Result};
use functions::Functions;
use plan::{Plan, Shape};

/// How the elements of a matrix lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    /// Those of a row side by side.
    Rows,
    /// Those of a column side by side.
    Columns,
}

/// Matrices in memory of the GPU, one for each product of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Matrices {
    /// Of the first element.
    pub address: u64,
    /// How the elements of each lie.
    pub order: Order,
    /// Elements from one row, or column, to the next.
    pub leading: usize,
    /// Elements from one matrix to the next; 0 for the same one in every product.
    pub batch_stride: usize,
}

/// What is computed along with a product, in the same pass over it. Vectors have no gaps.
#[derive(Debug, Clone, Copy)]
pub enum Epilogue {
    /// Nothing.
    None,
    /// N elements of the type of the results at this address are added to every row.
    Bias(u64),
    /// What would be the results, a bias added to every row if there is one, goes through GELU, tanh form.
    Gelu {
        /// As in [`Epilogue::Bias`].
        bias: Option<u64>,
        /// Where it is put before, in rows of the type of the results.
        input: u64,
        /// Elements from one of these rows to the next: a multiple of 8.
        leading: usize,
    },
    /// The sum of each row of the left factor goes to this address: M elements of the type of the results. They are
    /// overwritten, whatever beta is.
    RowSums(u64),
}

/// out = left right + beta out for matrices (M, K), (K, N) and (M, N), and what the epilogue says.
///
/// Sums run in f32, those of f64 in f64: true f32, never TF32. A 16-bit result is rounded once.
#[derive(Debug, Clone, Copy)]
pub struct Product {
    /// How many products.
    pub batch: usize,
    /// M, N and K; none is 0.
    pub sizes: [usize; 3],
    /// f64, f32, bf16 or f16: of both factors.
    pub operands: ElementType,
    /// The same, or f32 from 16 bits.
    pub result: ElementType,
    /// First factors.
    pub left: Matrices,
    /// Second factors.
    pub right: Matrices,
    /// Results, in the order of rows.
    pub out: Matrices,
    /// What the results' old values are multiplied with; with 0 they are not read.
    pub beta: f64,
    /// What else is computed; a batch of several products has nothing.
    pub epilogue: Epilogue,
}

/// cuBLASLt on one GPU, for products that run one after another.
#[derive(Debug)]
pub struct CublasLt {
    context: Arc<Context>,
    /// Nothing where nothing is multiplied.
    library: Option<Handle>,
    /// What algorithms may write while they run.
    workspace: Arena,
    /// Nothing for what cuBLASLt has no algorithm for.
    plans: Mutex<HashMap<Shape, Option<Plan>>>,
    searches: AtomicU64,
}

/// The library, and what it keeps for one GPU.
#[derive(Debug)]
struct Handle {
    functions: Functions,
    raw: cublasLtHandle_t,
    /// It frees what it has there.
    context: Arc<Context>,
}

// SAFETY: the handle may be used from any thread, also at the same time.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: nobody has the handle any more.
        let _ = unsafe { (self.functions.destroy)(self.raw) };
    }
}

impl CublasLt {
    /// Finds the library, and takes the workspace: 32 MiB from Hopper on, 4 MiB before, as the cuBLAS documentation
    /// recommends ("cublasSetWorkspace()").
    ///
    /// Errors, naming the remedy, if the library is missing or too old, or the GPU has no memory for the workspace.
    pub fn new(search: &Search, context: &Arc<Context>) -> Result<CublasLt> {
        let functions = Functions::of(&search.load(Kind::CublasLt)?)?;
        context.bind()?;
        let bytes = workspace_bytes(context);
        let mut workspace = Arena::reserve(context, bytes)?;
        workspace.map(0, bytes)?;
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a live variable; `drop` destroys the handle.
        functions.check("cublasLtCreate", unsafe { (functions.create)(&mut raw) })?;
        let library = Some(Handle { functions, raw, context: context.clone() });
        let (plans, searches) = (Mutex::default(), AtomicU64::new(0));
        Ok(CublasLt { context: context.clone(), library, workspace, plans, searches })
    }

    /// Takes as much, and multiplies nothing.
    pub(crate) fn dry(context: &Arc<Context>) -> Result<CublasLt> {
        let workspace = Arena::reserve(context, workspace_bytes(context))?;
        let (plans, searches) = (Mutex::default(), AtomicU64::new(0));
        Ok(CublasLt { context: context.clone(), library: None, workspace, plans, searches })
    }

    /// Bytes that algorithms may write while they run.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace.len()
    }

    /// How often an algorithm was searched for. It stays the same once every kind of product was seen.
    pub fn searches(&self) -> u64 {
        self.searches.load(Ordering::Relaxed)
    }

    /// Whether there is an algorithm for such a product: not every type has every epilogue.
    pub fn supports(&self, product: &Product) -> Result<bool> {
        let Some(library) = &self.library else {
            return Ok(Shape::of(product).is_possible()); // what is refused on every GPU
        };
        self.planned(library, product, |plan| Ok(plan.is_some()))
    }

    /// Calls `f` with the plan, if there is one.
    fn planned<R>(
        &self,
        library: &Handle,
        product: &Product,
        f: impl FnOnce(Option<&Plan>) -> Result<R>,
    ) -> Result<R> {
        self.context.bind()?;
        let shape = Shape::of(product);
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&shape) {
            return f(plan.as_ref());
        }
        self.searches.fetch_add(1, Ordering::Relaxed);
        let plan = Plan::new(library, &shape, &product.epilogue, self.workspace.len())?;
        f(plans.entry(shape).or_insert(plan).as_ref())
    }

    /// Gives a product to the stream.
    ///
    /// Errors if cuBLASLt has no algorithm for it.
    ///
    /// # Safety
    /// The addresses are memory of the GPU with all the elements that the matrices and the epilogue describe, which nothing
    /// outside of the stream uses meanwhile; what is written overlaps neither itself nor anything else. All products are
    /// given to the same stream.
    pub(crate) unsafe fn run(&self, stream: &Stream, product: &Product) -> Result<()> {
        let Some(library) = &self.library else { return Ok(()) };
        self.planned(library, product, |plan| {
            let plan = plan.ok_or_else(|| {
                let message = format!("cuBLASLt has no algorithm for {}", Shape::of(product));
                Error::new("matmul", message)
            })?;
            // SAFETY: the caller's promise, passed on.
            unsafe { self.run_planned(library, stream, product, plan) }
        })
    }

    /// As [`CublasLt::run`], by the plan of such products.
    unsafe fn run_planned(
        &self,
        library: &Handle,
        stream: &Stream,
        product: &Product,
        plan: &Plan,
    ) -> Result<()> {
        let Handle { functions, raw, .. } = library;
        plan.point_at(functions, &product.epilogue)?;
        let (alpha, beta) = (Scale::of(product, 1.0), Scale::of(product, product.beta));
        let address = |address: u64| address as *const c_void;
        let out = address(product.out.address).cast_mut();
        // SAFETY: descriptors, algorithm and handle are alive and of one kind of product; the scales are of the type that
        // the plan names; the caller answers for the addresses, and the workspace serves one product after another.
        let status = unsafe {
            (functions.matmul)(
                *raw,
                plan.operation(),
                alpha.address(),
                address(product.right.address),
                plan.right(),
                address(product.left.address),
                plan.left(),
                beta.address(),
                out,
                plan.out(),
                out,
                plan.out(),
                plan.algorithm(),
                self.workspace.base() as *mut c_void,
                self.workspace.len(),
                stream.handle().cast(),
            )
        };
        functions.check("cublasLtMatmul", status).map_err(|error| {
            Error::new("matmul", format!("{}: {}", Shape::of(product), error.context()))
        })
    }
}

fn workspace_bytes(context: &Context) -> usize {
    if context.architecture().major >= 9 { 32 << 20 } else { 4 << 20 }
}

/// A factor in the type in which a product is summed.
union Scale {
    single: f32,
    double: f64,
}

impl Scale {
    fn of(product: &Product, value: f64) -> Scale {
        match product.operands {
            ElementType::F64 => Scale { double: value },
            _ => Scale { single: value as f32 },
        }
    }

    fn address(&self) -> *const c_void {
        ptr::from_ref(self).cast()
    }
}
