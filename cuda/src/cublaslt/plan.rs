//! What cuBLASLt must be told about a kind of product, and the algorithm that it chose.

use bytemuck::NoUninit;
use cudarc::cublaslt::sys::cublasLtMatmulDescAttributes_t as OperationAttribute;
use cudarc::cublaslt::sys::cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute;
use cudarc::cublaslt::sys::cublasLtMatrixLayoutAttribute_t as LayoutAttribute;
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtEpilogue_t, cublasLtHandle_t, cublasLtMatmulAlgo_t,
    cublasLtMatmulDesc_t, cublasLtMatmulHeuristicResult_t, cublasLtMatrixLayout_t,
    cublasLtReductionScheme_t, cublasStatus_t, cudaDataType,
};
use std::ffi::c_void;
use std::ptr;

use super::{Epilogue, Matrices, Order, Product, check};
use crate::kernels::ElementType;
use crate::{Error, Result};

/// Pointers are told apart by alignment up to so many bytes: what tensor cores ask for ("Tensor Core Usage"). More would
/// let the choice of an algorithm, and with it the last bits, depend on where memory happens to lie.
const ALIGNMENT: u64 = 16;

/// Algorithms that are asked for. They come best first, and the first that is possible is taken.
const CANDIDATES: usize = 8;

/// The leading dimension of what goes into GELU is a multiple of it ("CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD").
const GELU_LEADING: usize = 8;

/// Products of one shape have one plan.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    batch: usize,
    sizes: [usize; 3],
    operands: ElementType,
    result: ElementType,
    /// Order, leading dimension, batch stride and alignment of left, right and out.
    matrices: [(Order, usize, usize, u64); 3],
    epilogue: cublasLtEpilogue_t,
    /// The alignment of its vector.
    vector: Option<u64>,
    /// The alignment of GELU's input, and its leading dimension.
    input: Option<(u64, usize)>,
}

impl Shape {
    pub(super) fn of(product: &Product) -> Shape {
        let &Product { batch, sizes, operands, result, left, right, out, epilogue, .. } = product;
        let matrices =
            [left, right, out].map(|Matrices { address, order, leading, batch_stride }| {
                (order, leading, if batch == 1 { 0 } else { batch_stride }, alignment(address))
            });
        Shape {
            batch,
            sizes,
            operands,
            result,
            matrices,
            epilogue: epilogue.kind(),
            vector: epilogue.vector().map(alignment),
            input: epilogue.input().map(|(address, leading)| (alignment(address), leading)),
        }
    }

    /// Whether the epilogue is one at all. What it demands of sizes need not be asked of the library.
    fn is_possible(&self) -> bool {
        let plain = self.epilogue == cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT;
        let fits = |(_, leading): (_, usize)| {
            leading.is_multiple_of(GELU_LEADING) && leading >= self.sizes[1]
        };
        plain || (self.batch == 1 && self.input.is_none_or(fits))
    }
}

impl Epilogue {
    fn kind(&self) -> cublasLtEpilogue_t {
        match self {
            Epilogue::None => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
            Epilogue::Bias(_) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            Epilogue::Gelu { bias: None, .. } => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX,
            Epilogue::Gelu { .. } => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            // The left factor is cuBLASLt's B, the gradient of whose bias this is to it.
            Epilogue::RowSums(_) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BGRADB,
        }
    }

    /// What is added, or where sums go.
    fn vector(&self) -> Option<u64> {
        match *self {
            Epilogue::None => None,
            Epilogue::Bias(vector) | Epilogue::RowSums(vector) => Some(vector),
            Epilogue::Gelu { bias, .. } => bias,
        }
    }

    /// Where GELU's input goes, and its leading dimension.
    fn input(&self) -> Option<(u64, usize)> {
        match *self {
            Epilogue::Gelu { input, leading, .. } => Some((input, leading)),
            _ => None,
        }
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ([m, n, k], batch) = (self.sizes, self.batch);
        let (operands, result) = (self.operands.name(), self.result.name());
        write!(f, "{batch} x ({m}, {k}) ({k}, {n}) of {operands} into {result}")?;
        match self.epilogue {
            cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT => Ok(()),
            epilogue => write!(f, " with {epilogue:?}"),
        }
    }
}

fn alignment(address: u64) -> u64 {
    (1 << address.trailing_zeros().min(63)).min(ALIGNMENT)
}

/// Descriptors and an algorithm.
#[derive(Debug)]
pub(super) struct Plan {
    operation: Owned<cublasLtMatmulDesc_t>,
    left: Owned<cublasLtMatrixLayout_t>,
    right: Owned<cublasLtMatrixLayout_t>,
    out: Owned<cublasLtMatrixLayout_t>,
    algorithm: cublasLtMatmulAlgo_t,
}

impl Plan {
    /// Lets cuBLASLt choose an algorithm that needs at most `workspace` bytes, if it has one. The addresses of `epilogue`
    /// have the alignment that later ones have.
    pub(super) fn new(
        handle: cublasLtHandle_t,
        shape: &Shape,
        epilogue: &Epilogue,
        workspace: usize,
    ) -> Result<Option<Plan>> {
        if !shape.is_possible() {
            return Ok(None);
        }
        let [m, n, k] = shape.sizes;
        let [left, right, out] = shape.matrices;
        let (compute, scale) = match shape.operands {
            ElementType::F64 => (cublasComputeType_t::CUBLAS_COMPUTE_64F, cudaDataType::CUDA_R_64F),
            _ => (cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F),
        };
        // A factor that lies in rows is its own transpose to cuBLASLt, which is what is asked for.
        let transposed = |order| i32::from(order == Order::Columns);
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a live variable; `Owned` destroys what was made.
        let status = unsafe { sys::cublasLtMatmulDescCreate(&mut raw, compute, scale) };
        check("cublasLtMatmulDescCreate", status)?;
        let operation = Owned { raw, destroy: sys::cublasLtMatmulDescDestroy };
        operation.set(OperationAttribute::CUBLASLT_MATMUL_DESC_TRANSA, transposed(right.0))?;
        operation.set(OperationAttribute::CUBLASLT_MATMUL_DESC_TRANSB, transposed(left.0))?;
        operation.set(OperationAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE, shape.epilogue as u32)?;
        if let Some((_, leading)) = shape.input {
            let leading = leading as i64;
            operation.set(OperationAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, leading)?;
        }
        let layout = |element, (rows, columns), (order, leading, stride, _)| {
            matrix(element, rows, columns, (order, leading, stride), shape.batch)
        };
        let plan = Plan {
            operation,
            left: layout(shape.operands, (m, k), left)?,
            right: layout(shape.operands, (k, n), right)?,
            out: layout(shape.result, (m, n), out)?,
            algorithm: cublasLtMatmulAlgo_t { data: [0; 8] },
        };
        // The addresses' alignment counts ("cublasLtMatmulDescAttributes_t").
        plan.point_at(epilogue)?;
        let found = plan.search(handle, shape, workspace)?;
        Ok(found.map(|algorithm| Plan { algorithm, ..plan }))
    }

    fn search(
        &self,
        handle: cublasLtHandle_t,
        shape: &Shape,
        workspace: usize,
    ) -> Result<Option<cublasLtMatmulAlgo_t>> {
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a live variable; `Owned` destroys what was made.
        let status = unsafe { sys::cublasLtMatmulPreferenceCreate(&mut raw) };
        check("cublasLtMatmulPreferenceCreate", status)?;
        let preference = Owned { raw, destroy: sys::cublasLtMatmulPreferenceDestroy };
        let set = |attribute, value: u32| preference.set(attribute, value);
        use PreferenceAttribute as Attribute;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace as u64)?;
        // Parts of a sum over k that are computed side by side are added in the type of the sum, never in 16 bits.
        let scheme = cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, scheme)?;
        let [left, right, out] = shape.matrices.map(|(_, _, _, alignment)| alignment as u32);
        set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, right)?;
        set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, left)?;
        set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out)?;
        set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out)?;
        let unknown = cublasLtMatmulHeuristicResult_t {
            algo: cublasLtMatmulAlgo_t { data: [0; 8] },
            workspaceSize: 0,
            state: cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
            wavesCount: 0.0,
            reserved: [0; 4],
        };
        let (mut found, mut count) = ([unknown; CANDIDATES], 0);
        // SAFETY: descriptors and handle are alive, and the pointers are to live variables with room for as many results.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.operation(),
                self.right(),
                self.left(),
                self.out(),
                self.out(),
                preference.raw,
                CANDIDATES as i32,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        // Some epilogues of some types are called invalid. If the product itself is, it will be so without one.
        let plain = shape.epilogue == cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT;
        match status {
            cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED => return Ok(None),
            cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE if !plain => return Ok(None),
            _ => {}
        }
        check("cublasLtMatmulAlgoGetHeuristic", status)
            .map_err(|error| Error::new("matmul", format!("{shape}: {}", error.context())))?;
        let mut found = found[..(count as usize).min(CANDIDATES)].iter();
        let possible = found.find(|found| found.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        Ok(possible.map(|found| found.algo))
    }

    /// Sets the addresses of the next product's epilogue.
    pub(super) fn point_at(&self, epilogue: &Epilogue) -> Result<()> {
        let set = |attribute, address: u64| self.operation.set(attribute, address);
        if let Some(vector) = epilogue.vector() {
            set(OperationAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, vector)?;
        }
        match epilogue.input() {
            Some((input, _)) => {
                set(OperationAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, input)
            }
            None => Ok(()),
        }
    }

    pub(super) fn operation(&self) -> cublasLtMatmulDesc_t {
        self.operation.raw
    }

    pub(super) fn left(&self) -> cublasLtMatrixLayout_t {
        self.left.raw
    }

    pub(super) fn right(&self) -> cublasLtMatrixLayout_t {
        self.right.raw
    }

    pub(super) fn out(&self) -> cublasLtMatrixLayout_t {
        self.out.raw
    }

    pub(super) fn algorithm(&self) -> &cublasLtMatmulAlgo_t {
        &self.algorithm
    }
}

// SAFETY: descriptors are memory of the host that nobody but the plan has.
unsafe impl Send for Plan {}

/// The descriptor of a row-major matrix (`rows`, `columns`), which cuBLASLt sees transposed.
fn matrix(
    element: ElementType,
    rows: usize,
    columns: usize,
    (order, leading, stride): (Order, usize, usize),
    batch: usize,
) -> Result<Owned<cublasLtMatrixLayout_t>> {
    let element = match element {
        ElementType::F64 => cudaDataType::CUDA_R_64F,
        ElementType::F32 => cudaDataType::CUDA_R_32F,
        ElementType::BF16 => cudaDataType::CUDA_R_16BF,
        ElementType::F16 => cudaDataType::CUDA_R_16F,
        other => {
            return Err(Error::new("matmul", format!("{} has no products", other.name())));
        }
    };
    let (inner, outer) = match order {
        Order::Rows => (columns, rows),
        Order::Columns => (rows, columns),
    };
    let mut raw = ptr::null_mut();
    // SAFETY: the pointer is to a live variable; `Owned` destroys what was made.
    let status = unsafe {
        let (inner, outer, leading) = (inner as u64, outer as u64, leading as i64);
        sys::cublasLtMatrixLayoutCreate(&mut raw, element, inner, outer, leading)
    };
    check("cublasLtMatrixLayoutCreate", status)?;
    let layout = Owned { raw, destroy: sys::cublasLtMatrixLayoutDestroy };
    if batch > 1 {
        let count = i32::try_from(batch)
            .map_err(|_| Error::new("matmul", format!("{batch} products are too many at once")))?;
        layout.set(LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, count)?;
        let stride = stride as i64;
        layout.set(LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride)?;
    }
    Ok(layout)
}

/// Something of cuBLASLt that is destroyed with this.
#[derive(Debug)]
struct Owned<T: Copy> {
    raw: T,
    destroy: unsafe fn(T) -> cublasStatus_t,
}

impl<T: Copy> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: it was made by the function that belongs to this one, and nobody else has it.
        let _ = unsafe { (self.destroy)(self.raw) };
    }
}

/// What attributes are set by.
trait Attribute<T> {
    const SET: unsafe fn(T, Self, *const c_void, usize) -> cublasStatus_t;
}

impl Attribute<cublasLtMatmulDesc_t> for OperationAttribute {
    const SET: unsafe fn(cublasLtMatmulDesc_t, Self, *const c_void, usize) -> cublasStatus_t =
        sys::cublasLtMatmulDescSetAttribute;
}

impl Attribute<cublasLtMatrixLayout_t> for LayoutAttribute {
    const SET: unsafe fn(cublasLtMatrixLayout_t, Self, *const c_void, usize) -> cublasStatus_t =
        sys::cublasLtMatrixLayoutSetAttribute;
}

impl Attribute<sys::cublasLtMatmulPreference_t> for PreferenceAttribute {
    const SET: unsafe fn(
        sys::cublasLtMatmulPreference_t,
        Self,
        *const c_void,
        usize,
    ) -> cublasStatus_t = sys::cublasLtMatmulPreferenceSetAttribute;
}

impl<T: Copy> Owned<T> {
    fn set<A: Attribute<T> + std::fmt::Debug + Copy, V: NoUninit>(
        &self,
        attribute: A,
        value: V,
    ) -> Result<()> {
        let bytes = bytemuck::bytes_of(&value);
        // SAFETY: the descriptor is alive, and takes a copy of as many bytes.
        let status = unsafe { A::SET(self.raw, attribute, bytes.as_ptr().cast(), bytes.len()) };
        check("cublasLt", status)
            .map_err(|error| Error::new("cublasLt", format!("{attribute:?}: {error}")))
    }
}
