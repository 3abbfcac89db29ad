//! Plans of matrix products: cuBLASLt's descriptors for a kind of product, and the algorithms that it offers.

use bytemuck::NoUninit;
use std::ptr;

use super::functions::{Destroy, Functions, Set};
use super::handle::Handle;
use super::product::{Epilogue, Matmul, Matrices, StorageOrder};
use super::types::cublasLtMatmulDescAttributes_t as OperationAttribute;
use super::types::cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute;
use super::types::cublasLtMatrixLayoutAttribute_t as LayoutAttribute;
use super::types::{
    CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, Candidate, INVALID_VALUE, NOT_SUPPORTED, SUCCESS,
    cublasComputeType_t, cublasLtEpilogue_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulPreference_t, cublasLtMatrixLayout_t, cudaDataType,
};
use crate::kernels::ElementType;
use crate::{Error, Result};

/// Maximum alignment that distinguishes addresses, as tensor cores require ("Tensor Core Usage"). With more, the
/// choice of algorithm, and thus the last bits of results, would depend on where memory happens to be allocated.
const ALIGNMENT: u64 = 16;

/// Number of algorithms requested. cuBLASLt sorts them by its estimate, best first.
const CANDIDATES: usize = 8;

/// Required multiple of the leading dimension of GELU's input ("CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD").
const GELU_LEADING: usize = 8;

/// The key of a plan: products with equal shapes share one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    batch: usize,
    sizes: [usize; 3],
    operands: ElementType,
    result: ElementType,
    /// Order, leading dimension, batch stride and alignment of left, right, out and the addends.
    matrices: [(StorageOrder, usize, usize, u64); 4],
    epilogue: cublasLtEpilogue_t,
    /// Alignment of the epilogue's vector.
    vector: Option<u64>,
    /// Alignment and leading dimension of GELU's input.
    input: Option<(u64, usize)>,
}

impl Shape {
    pub(super) fn from_matmul(product: &Matmul) -> Shape {
        let &Matmul { batch, sizes, operands, result, left, right, out, epilogue, .. } = product;
        let addend = product.addend.unwrap_or(out);
        let matrices =
            [left, right, out, addend].map(|Matrices { address, order, leading, batch_stride }| {
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

    /// Returns whether the epilogue's constraints on sizes hold, without asking the library.
    pub(super) fn is_possible(&self) -> bool {
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
            Epilogue::GeluDerivative { .. } => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DGELU,
            // The left factor is cuBLASLt's B, and the row sums are its bias gradient.
            Epilogue::RowSums(_) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BGRADB,
        }
    }

    /// The address of the bias or of the row sums.
    fn vector(&self) -> Option<u64> {
        match *self {
            Epilogue::None | Epilogue::GeluDerivative { .. } => None,
            Epilogue::Bias(vector) | Epilogue::RowSums(vector) => Some(vector),
            Epilogue::Gelu { bias, .. } => bias,
        }
    }

    /// The address of GELU's input, and its leading dimension.
    fn input(&self) -> Option<(u64, usize)> {
        match *self {
            Epilogue::Gelu { input, leading, .. } | Epilogue::GeluDerivative { input, leading } => {
                Some((input, leading))
            }
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

type MatrixLayout = Owned<cublasLtMatrixLayout_t, LayoutAttribute>;
type Preference = Owned<cublasLtMatmulPreference_t, PreferenceAttribute>;

/// The descriptors of a kind of product, and its algorithms.
#[derive(Debug)]
pub(super) struct MatmulPlan {
    operation: Owned<cublasLtMatmulDesc_t, OperationAttribute>,
    left: MatrixLayout,
    right: MatrixLayout,
    out: MatrixLayout,
    addend: MatrixLayout,
    algorithms: Vec<cublasLtMatmulAlgo_t>,
    /// The index of the algorithm in use, once that is decided.
    pub(super) chosen: Option<usize>,
}

impl MatmulPlan {
    /// Lets cuBLASLt choose algorithms that need at most `workspace` bytes; `None` if there is none. The addresses
    /// of `epilogue` have the same alignment as later ones.
    pub(super) fn new(
        library: &Handle,
        shape: &Shape,
        epilogue: &Epilogue,
        workspace: usize,
    ) -> Result<Option<MatmulPlan>> {
        if !shape.is_possible() {
            return Ok(None);
        }
        let plan = MatmulPlan::describe(&library.functions, shape, epilogue)?;
        let algorithms = plan.search(library, shape, workspace)?;
        Ok((!algorithms.is_empty()).then_some(MatmulPlan { algorithms, ..plan }))
    }

    /// The descriptors, without an algorithm.
    pub(super) fn describe(
        functions: &Functions,
        shape: &Shape,
        epilogue: &Epilogue,
    ) -> Result<MatmulPlan> {
        let [m, n, k] = shape.sizes;
        let [left, right, out, addend] = shape.matrices;
        let (compute, scale) = match shape.operands {
            ElementType::F64 => (cublasComputeType_t::CUBLAS_COMPUTE_64F, cudaDataType::CUDA_R_64F),
            _ => (cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F),
        };
        // A row-major factor is transposed for cuBLASLt, as intended, so only column-major ones need the transpose
        // flag.
        let transposed = |order| i32::from(order == StorageOrder::Columns);
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a live variable; `Owned` destroys the descriptor.
        let status = unsafe { (functions.operation_create)(&mut raw, compute, scale) };
        functions.check("cublasLtMatmulDescCreate", status)?;
        let (destroy, set) = (functions.operation_destroy, functions.operation_set);
        let operation = Owned { raw, destroy, set };
        use OperationAttribute as Attribute;
        let set = |attribute, value: i32| operation.set(functions, attribute, value);
        set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, transposed(right.0))?;
        set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, transposed(left.0))?;
        set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, shape.epilogue as i32)?;
        if let Some((_, leading)) = shape.input {
            let attribute = Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD;
            operation.set(functions, attribute, leading as i64)?;
        }
        let layout = |element, (rows, columns), (order, leading, stride, _)| {
            matrix(functions, element, [rows, columns], (order, leading, stride), shape.batch)
        };
        let plan = MatmulPlan {
            operation,
            left: layout(shape.operands, (m, k), left)?,
            right: layout(shape.operands, (k, n), right)?,
            out: layout(shape.result, (m, n), out)?,
            addend: layout(shape.result, (m, n), addend)?,
            algorithms: Vec::new(),
            chosen: None,
        };
        // The alignment of the addresses matters ("cublasLtMatmulDescAttributes_t").
        plan.point_at(functions, epilogue)?;
        Ok(plan)
    }

    fn search(
        &self,
        library: &Handle,
        shape: &Shape,
        workspace: usize,
    ) -> Result<Vec<cublasLtMatmulAlgo_t>> {
        let functions = &library.functions;
        let preference = preference(functions, shape, workspace)?;
        let unknown = Candidate {
            algorithm: cublasLtMatmulAlgo_t { data: [0; 8] },
            workspace: 0,
            state: NOT_SUPPORTED,
            waves: 0.0,
            reserved: [0; 4],
        };
        let (mut found, mut count) = ([unknown; CANDIDATES], 0);
        // SAFETY: descriptors and handle are alive, and the pointers are to live variables with capacity for
        // `CANDIDATES` results.
        let status = unsafe {
            (functions.heuristic)(
                library.raw,
                self.operation(),
                self.right(),
                self.left(),
                self.addend(),
                self.out(),
                preference.raw,
                CANDIDATES as i32,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        // cuBLASLt reports some epilogues of some types as invalid. If the product itself is invalid, it also is
        // without an epilogue.
        let plain = shape.epilogue == cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT;
        match status {
            NOT_SUPPORTED => return Ok(Vec::new()),
            INVALID_VALUE if !plain => return Ok(Vec::new()),
            _ => {}
        }
        functions
            .check("cublasLtMatmulAlgoGetHeuristic", status)
            .map_err(|error| Error::new("matmul", format!("{shape}: {}", error.context())))?;
        let found = found[..(count as usize).min(CANDIDATES)].iter();
        let possible = found.filter(|found| found.state == SUCCESS);
        Ok(possible.map(|found| found.algorithm).collect())
    }

    /// Sets the addresses of the next product's epilogue in the descriptor.
    pub(super) fn point_at(&self, functions: &Functions, epilogue: &Epilogue) -> Result<()> {
        let set = |attribute, address: u64| self.operation.set(functions, attribute, address);
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

    pub(super) fn addend(&self) -> cublasLtMatrixLayout_t {
        self.addend.raw
    }

    /// The algorithms, those first that cuBLASLt takes for the fastest.
    pub(super) fn algorithms(&self) -> &[cublasLtMatmulAlgo_t] {
        &self.algorithms
    }
}

// SAFETY: descriptors are host memory that only the plan uses.
unsafe impl Send for MatmulPlan {}

/// The workspace that an algorithm may take, and the alignments that it may rely on.
pub(super) fn preference(
    functions: &Functions,
    shape: &Shape,
    workspace: usize,
) -> Result<Preference> {
    let mut raw = ptr::null_mut();
    // SAFETY: the pointer is to a live variable; `Owned` destroys the preference.
    let status = unsafe { (functions.preference_create)(&mut raw) };
    functions.check("cublasLtMatmulPreferenceCreate", status)?;
    let (destroy, set) = (functions.preference_destroy, functions.preference_set);
    let preference = Owned { raw, destroy, set };
    let set = |attribute, value: u32| preference.set(functions, attribute, value);
    use PreferenceAttribute as Attribute;
    let limit = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
    preference.set(functions, limit, workspace as u64)?;
    // Partial sums over k are added in the accumulator type, never in 16 bits.
    let scheme = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, scheme)?;
    let alignments = shape.matrices.map(|(_, _, _, alignment)| alignment as u32);
    let [left, right, out, addend] = alignments;
    set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, right)?;
    set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, left)?;
    set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, addend)?;
    set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out)?;
    Ok(preference)
}

/// The descriptor of a row-major matrix (`rows`, `columns`), which is transposed for cuBLASLt.
fn matrix(
    functions: &Functions,
    element: ElementType,
    [rows, columns]: [usize; 2],
    (order, leading, stride): (StorageOrder, usize, usize),
    batch: usize,
) -> Result<MatrixLayout> {
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
        StorageOrder::Rows => (columns, rows),
        StorageOrder::Columns => (rows, columns),
    };
    let mut raw = ptr::null_mut();
    // SAFETY: the pointer is to a live variable; `Owned` destroys the layout.
    let status = unsafe {
        let (inner, outer, leading) = (inner as u64, outer as u64, leading as i64);
        (functions.layout_create)(&mut raw, element, inner, outer, leading)
    };
    functions.check("cublasLtMatrixLayoutCreate", status)?;
    let layout = Owned { raw, destroy: functions.layout_destroy, set: functions.layout_set };
    if batch > 1 {
        let count = i32::try_from(batch)
            .map_err(|_| Error::new("matmul", format!("{batch} products are too many at once")))?;
        layout.set(functions, LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, count)?;
        let attribute = LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
        layout.set(functions, attribute, stride as i64)?;
    }
    Ok(layout)
}

/// An owned cuBLASLt object with attributes.
#[derive(Debug)]
pub(super) struct Owned<T: Copy, A> {
    pub(super) raw: T,
    destroy: Destroy<T>,
    set: Set<T, A>,
}

impl<T: Copy, A> Drop for Owned<T, A> {
    fn drop(&mut self) {
        // SAFETY: the object was created by the matching function, and has no other user.
        let _ = unsafe { (self.destroy)(self.raw) };
    }
}

impl<T: Copy, A: std::fmt::Debug + Copy> Owned<T, A> {
    fn set<V: NoUninit>(&self, functions: &Functions, attribute: A, value: V) -> Result<()> {
        let bytes = bytemuck::bytes_of(&value);
        // SAFETY: the descriptor is alive, and copies `bytes.len()` bytes.
        let status = unsafe { (self.set)(self.raw, attribute, bytes.as_ptr().cast(), bytes.len()) };
        functions
            .check("cublasLt", status)
            .map_err(|error| Error::new("cublasLt", format!("{attribute:?}: {error}")))
    }
}
