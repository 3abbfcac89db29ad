//! Matrix products with cuBLASLt. The first product of a kind creates a plan; later ones are a single call.
//!
//! Matrices are row-major here. cuBLASLt's are column-major unless slower paths are requested, and a row-major matrix
//! is the transpose of a column-major one. Therefore out = left right is computed as out^T = right^T left^T, with the
//! operands exchanged (cuBLAS documentation, "Data Layout").
//!
//! An [`Epilogue`] is fused with a product: a bias, GELU with the input that backward needs, the derivative of GELU at
//! that input, or a bias gradient with the weight gradient. Not every type and size supports each; the plan records
//! which do.
//!
//! An [`AlgorithmChoice`] says which of cuBLASLt's algorithms a plan takes.

mod algorithms;
mod autotune;
mod functions;
mod handle;
mod plan;
mod product;
#[cfg(test)]
mod real;
mod types;

pub use algorithms::{AlgorithmChoice, AlgorithmFolder};
pub use product::{Epilogue, Matmul, Matrices, StorageOrder};

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
use handle::Handle;
use plan::{MatmulPlan, Shape};

/// A cuBLASLt handle of one GPU, for products that run sequentially.
#[derive(Debug)]
pub struct CublasLt {
    context: Arc<Context>,
    /// `None` for a fake GPU.
    library: Option<Handle>,
    /// Workspace of algorithms.
    workspace: Arena,
    /// `None` for products without a cuBLASLt algorithm.
    plans: Mutex<HashMap<Shape, Option<MatmulPlan>>>,
    choice: AlgorithmChoice,
    searches: AtomicU64,
    timings: AtomicU64,
}

impl CublasLt {
    /// Loads the library and allocates the workspace: 32 MiB from Hopper on, 4 MiB before, as the cuBLAS
    /// documentation recommends ("cublasSetWorkspace()").
    ///
    /// Errors, with the remedy, if the library is missing or too old, or if there is no memory for the workspace.
    pub fn new(
        search: &Search,
        context: &Arc<Context>,
        choice: AlgorithmChoice,
    ) -> Result<CublasLt> {
        let functions = Functions::load(&search.load(Kind::CublasLt)?)?;
        context.bind()?;
        let bytes = workspace_bytes(context);
        let mut workspace = Arena::reserve(context, bytes)?;
        workspace.map(0, bytes)?;
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a live variable; `drop` destroys the handle.
        functions.check("cublasLtCreate", unsafe { (functions.create)(&mut raw) })?;
        let library = Some(Handle { functions, raw, context: context.clone() });
        Ok(CublasLt::with(library, context, workspace, choice))
    }

    /// A fake handle with a workspace of the same size.
    pub(crate) fn fake(context: &Arc<Context>) -> Result<CublasLt> {
        let workspace = Arena::reserve(context, workspace_bytes(context))?;
        Ok(CublasLt::with(None, context, workspace, AlgorithmChoice::Heuristic))
    }

    fn with(
        library: Option<Handle>,
        context: &Arc<Context>,
        workspace: Arena,
        choice: AlgorithmChoice,
    ) -> CublasLt {
        let [searches, timings] = [0, 0].map(AtomicU64::new);
        let (context, plans) = (context.clone(), Mutex::default());
        CublasLt { context, library, workspace, plans, choice, searches, timings }
    }

    /// Bytes of the workspace.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace.len()
    }

    /// Number of algorithm searches. It is constant once every kind of product has been used.
    pub fn searches(&self) -> u64 {
        self.searches.load(Ordering::Relaxed)
    }

    /// Number of kinds of product whose algorithms were timed.
    pub fn timings(&self) -> u64 {
        self.timings.load(Ordering::Relaxed)
    }

    /// The index of the algorithm that products of this kind take, among those of
    /// [`time_algorithms`](crate::gpu::Gpu::time_algorithms). `None` before the first of them has run.
    pub fn algorithm(&self, product: &Matmul) -> Option<usize> {
        let plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        plans.get(&Shape::from_matmul(product))?.as_ref()?.chosen
    }

    /// Returns whether there is an algorithm for the product: not every type supports every epilogue.
    pub fn supports(&self, product: &Matmul) -> Result<bool> {
        let Some(library) = &self.library else {
            return Ok(Shape::from_matmul(product).is_possible()); // rejected on every GPU
        };
        self.planned(library, product, |plan| Ok(plan.is_some()))
    }

    /// Calls `f` with the plan of the product, if there is one.
    fn planned<R>(
        &self,
        library: &Handle,
        product: &Matmul,
        f: impl FnOnce(Option<&mut MatmulPlan>) -> Result<R>,
    ) -> Result<R> {
        self.context.bind()?;
        let shape = Shape::from_matmul(product);
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get_mut(&shape) {
            return f(plan.as_mut());
        }
        self.searches.fetch_add(1, Ordering::Relaxed);
        let plan = MatmulPlan::new(library, &shape, &product.epilogue, self.workspace.len())?;
        f(plans.entry(shape).or_insert(plan).as_mut())
    }

    /// Enqueues a product in the stream.
    ///
    /// Errors if cuBLASLt has no algorithm for it.
    ///
    /// # Safety
    /// The addresses are device memory that contains all elements described by the matrices and the epilogue. Nothing
    /// outside of the stream uses them meanwhile; outputs overlap neither themselves nor anything else. All products
    /// use the same stream.
    pub(crate) unsafe fn run(&self, stream: &Stream, product: &Matmul) -> Result<()> {
        let Some(library) = &self.library else { return Ok(()) };
        self.planned(library, product, |plan| {
            let plan = plan.ok_or_else(|| no_algorithm(product))?;
            let index = match plan.chosen {
                Some(index) => index,
                // SAFETY: the caller's promise.
                None => unsafe { self.choose(library, stream, product, plan) }?,
            };
            // SAFETY: the caller's promise.
            unsafe { self.run_planned(library, stream, product, (plan, index)) }
        })
    }

    /// Seconds that a product takes with each algorithm that cuBLASLt offers, in the order of its heuristic.
    ///
    /// Errors if there is none.
    ///
    /// # Safety
    /// The conditions are those of [`CublasLt::run`].
    pub(crate) unsafe fn time_algorithms(
        &self,
        stream: &Stream,
        product: &Matmul,
    ) -> Result<Vec<f64>> {
        let Some(library) = &self.library else { return Ok(Vec::new()) };
        self.planned(library, product, |plan| {
            let plan = plan.ok_or_else(|| no_algorithm(product))?;
            // SAFETY: the caller's promise.
            unsafe { self.time(library, stream, product, plan) }
        })
    }

    /// Like [`CublasLt::run`], with the product's plan and the index of one of its algorithms.
    unsafe fn run_planned(
        &self,
        library: &Handle,
        stream: &Stream,
        product: &Matmul,
        (plan, algorithm): (&MatmulPlan, usize),
    ) -> Result<()> {
        let Handle { functions, raw, .. } = library;
        plan.point_at(functions, &product.epilogue)?;
        let (alpha, beta) = (Scale::new(product, 1.0), Scale::new(product, product.beta));
        let address = |address: u64| address as *const c_void;
        let out = address(product.out.address).cast_mut();
        // SAFETY: descriptors, algorithm and handle are alive and belong to this kind of product; the scales have the
        // type named by the plan. The caller guarantees the addresses, and products use the workspace one after
        // another.
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
                address(product.addend.unwrap_or(product.out).address),
                plan.addend(),
                out,
                plan.out(),
                &plan.algorithms()[algorithm],
                self.workspace.base() as *mut c_void,
                self.workspace.len(),
                stream.handle(),
            )
        };
        functions.check("cublasLtMatmul", status).map_err(|error| {
            Error::new("matmul", format!("{}: {}", Shape::from_matmul(product), error.context()))
        })
    }
}

fn no_algorithm(product: &Matmul) -> Error {
    let message = format!("cuBLASLt has no algorithm for {}", Shape::from_matmul(product));
    Error::new("matmul", message)
}

fn workspace_bytes(context: &Context) -> usize {
    if context.architecture().major >= 9 { 32 << 20 } else { 4 << 20 }
}

/// A scalar factor in the accumulator type of a product.
union Scale {
    single: f32,
    double: f64,
}

impl Scale {
    fn new(product: &Matmul, value: f64) -> Scale {
        match product.operands {
            ElementType::F64 => Scale { double: value },
            _ => Scale { single: value as f32 },
        }
    }

    fn address(&self) -> *const c_void {
        ptr::from_ref(self).cast()
    }
}
