//! Asks the real cuBLASLt, which needs no GPU to describe a product: every function in use is declared as it is called,
//! and every attribute that is set is read back.

use std::ffi::{c_int, c_void};

use super::functions::Functions;
use super::plan::{MatmulPlan, Shape, preference};
use super::product::{Epilogue, Matmul, Matrices, StorageOrder};
use super::types::Status;
use crate::headers::{constant, function, program};
use crate::kernels::ElementType;
use crate::library::{Kind, Library, Search};

/// The functions that read an attribute into a number of bytes, and say how many there are.
type Get = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, usize, *mut usize) -> Status;

/// The attribute's value of exactly `bytes` bytes.
fn read(get: Get, from: *mut c_void, attribute: c_int, bytes: usize) -> u64 {
    let (mut value, mut written) = (0_u64, 0);
    // SAFETY: the descriptor is alive, and the variables have room.
    let status = unsafe {
        let size = get(from, attribute, std::ptr::null_mut(), 0, &mut written);
        assert_eq!((size, written), (0, bytes), "attribute {attribute}");
        get(from, attribute, std::ptr::from_mut(&mut value).cast(), bytes, &mut written)
    };
    assert_eq!((status, written), (0, bytes), "attribute {attribute}");
    value
}

fn library(test: &str) -> Option<(Library, Functions)> {
    let library = match Search::from_environment().load(Kind::CublasLt) {
        Ok(library) => library,
        Err(error) => {
            println!("skipped: {test}: {error}");
            return None;
        }
    };
    let functions = Functions::load(&library).unwrap();
    Some((library, functions))
}

#[test]
fn functions_are_called_as_the_header_declares_them() {
    let test = "functions_are_called_as_the_header_declares_them";
    let Some((library, functions)) = library(test) else { return };
    // SAFETY: the type is that of cublasLt.h, as the claims below say.
    let get = unsafe { library.function::<Get>("cublasLtMatmulDescGetAttribute").unwrap() };
    let mut claims = vec![
        function("cublasLtGetVersion", functions.version),
        function("cublasLtCreate", functions.create),
        function("cublasLtDestroy", functions.destroy),
        function("cublasLtMatmul", functions.matmul),
        function("cublasLtMatmulDescCreate", functions.operation_create),
        function("cublasLtMatmulDescDestroy", functions.operation_destroy),
        function("cublasLtMatmulDescSetAttribute", functions.operation_set),
        function("cublasLtMatmulDescGetAttribute", get),
        function("cublasLtMatrixLayoutCreate", functions.layout_create),
        function("cublasLtMatrixLayoutDestroy", functions.layout_destroy),
        function("cublasLtMatrixLayoutSetAttribute", functions.layout_set),
        function("cublasLtMatrixLayoutGetAttribute", get),
        function("cublasLtMatmulPreferenceCreate", functions.preference_create),
        function("cublasLtMatmulPreferenceDestroy", functions.preference_destroy),
        function("cublasLtMatmulPreferenceSetAttribute", functions.preference_set),
        function("cublasLtMatmulPreferenceGetAttribute", get),
        function("cublasLtMatmulAlgoGetHeuristic", functions.heuristic),
    ];
    // Attributes that are read below and never set.
    claims.extend([
        constant("CUBLASLT_MATMUL_DESC_COMPUTE_TYPE", 0),
        constant("CUBLASLT_MATMUL_DESC_SCALE_TYPE", 1),
        constant("CUBLASLT_MATRIX_LAYOUT_TYPE", 0),
        constant("CUBLASLT_MATRIX_LAYOUT_ORDER", 1),
        constant("CUBLASLT_MATRIX_LAYOUT_ROWS", 2),
        constant("CUBLASLT_MATRIX_LAYOUT_COLS", 3),
        constant("CUBLASLT_MATRIX_LAYOUT_LD", 4),
        constant("CUBLASLT_ORDER_COL", 0),
    ]);
    program(test, "cublasLt.h", &claims, "");
}

#[test]
fn what_is_set_is_read_back() {
    let Some((library, functions)) = library("what_is_set_is_read_back") else { return };
    // SAFETY: the types are those of cublasLt.h, as the test above says.
    let [of_operation, of_layout, of_preference] = unsafe {
        [
            library.function::<Get>("cublasLtMatmulDescGetAttribute").unwrap(),
            library.function::<Get>("cublasLtMatrixLayoutGetAttribute").unwrap(),
            library.function::<Get>("cublasLtMatmulPreferenceGetAttribute").unwrap(),
        ]
    };
    let matrices =
        |address, order, leading, batch_stride| Matrices { address, order, leading, batch_stride };
    use StorageOrder::{Columns, Rows};
    // (48, 80) times (80, 32), with rows or columns of more elements than are in use.
    let product = Matmul {
        batch: 1,
        sizes: [48, 32, 80],
        operands: ElementType::BF16,
        result: ElementType::F32,
        left: matrices(0x7000_0000_1010, Rows, 88, 0),
        right: matrices(0x7000_0000_2008, Rows, 40, 0),
        out: matrices(0x7000_0000_3004, Rows, 36, 0),
        beta: 1.0,
        addend: None,
        epilogue: Epilogue::None,
    };
    let (vector, input, leading) = (0x7000_0000_4000, 0x7000_0000_5000, 40);
    let gelu = |bias| Epilogue::Gelu { bias, input, leading };
    let apart = |matrices, batch_stride| Matrices { batch_stride, ..matrices };
    let products = [
        // Each with cuBLASLt's numbers of the compute type, the scale type, and the types of operands and result.
        (product, [68, 0, 14, 0]),
        (
            Matmul { result: ElementType::BF16, epilogue: Epilogue::Bias(vector), ..product },
            [68, 0, 14, 14],
        ),
        (
            Matmul {
                operands: ElementType::F16,
                result: ElementType::F16,
                epilogue: gelu(None),
                ..product
            },
            [68, 0, 2, 2],
        ),
        (
            Matmul { result: ElementType::BF16, epilogue: gelu(Some(vector)), ..product },
            [68, 0, 14, 14],
        ),
        (
            Matmul {
                result: ElementType::BF16,
                epilogue: Epilogue::GeluDerivative { input, leading },
                ..product
            },
            [68, 0, 14, 14],
        ),
        (
            Matmul {
                left: matrices(product.left.address, Columns, 56, 0),
                right: matrices(product.right.address, Columns, 96, 0),
                epilogue: Epilogue::RowSums(vector),
                ..product
            },
            [68, 0, 14, 0],
        ),
        (
            Matmul {
                batch: 3,
                operands: ElementType::F64,
                result: ElementType::F64,
                left: apart(product.left, 1 << 33), // beyond 32 bits
                right: apart(product.right, 0),
                out: apart(product.out, 48 * 36),
                ..product
            },
            [70, 1, 1, 1],
        ),
        (
            Matmul {
                addend: Some(matrices(0x7000_0000_6008, Rows, 34, 0)),
                epilogue: Epilogue::Bias(vector),
                ..product
            },
            [68, 0, 14, 0],
        ),
        (Matmul { operands: ElementType::F32, ..product }, [68, 0, 0, 0]),
    ];
    for (product, [compute, scale, operands, result]) in products {
        let shape = Shape::from_matmul(&product);
        let plan = MatmulPlan::describe(&functions, &shape, &product.epilogue).unwrap();
        let operation = |attribute, bytes| read(of_operation, plan.operation(), attribute, bytes);
        assert_eq!((operation(0, 4), operation(1, 4)), (compute, scale), "{shape}");
        // cuBLASLt's A is the right factor.
        let transposed = |matrices: Matrices| u64::from(matrices.order == Columns);
        assert_eq!(operation(3, 4), transposed(product.right), "{shape}");
        assert_eq!(operation(4, 4), transposed(product.left), "{shape}");
        let (epilogue, pointers) = match product.epilogue {
            Epilogue::None => (1, [0, 0, 0]),
            Epilogue::Bias(at) => (4, [at, 0, 0]),
            Epilogue::RowSums(at) => (512, [at, 0, 0]),
            Epilogue::GeluDerivative { .. } => (192, [0, input, leading as u64]),
            Epilogue::Gelu { bias: None, .. } => (160, [0, input, leading as u64]),
            Epilogue::Gelu { .. } => (164, [vector, input, leading as u64]),
        };
        assert_eq!(operation(7, 4), epilogue, "{shape}");
        assert_eq!([8, 11, 12].map(|attribute| operation(attribute, 8)), pointers, "{shape}");

        let [m, n, k] = product.sizes.map(|size| size as u64);
        for (handle, matrices, dtype, [rows, columns]) in [
            (plan.left(), product.left, operands, [m, k]),
            (plan.right(), product.right, operands, [k, n]),
            (plan.out(), product.out, result, [m, n]),
            (plan.addend(), product.addend.unwrap_or(product.out), result, [m, n]),
        ] {
            let layout = |attribute, bytes| read(of_layout, handle, attribute, bytes);
            assert_eq!((layout(0, 4), layout(1, 4)), (dtype, 0), "{shape}: type and order");
            let [inner, outer] =
                if matrices.order == Rows { [columns, rows] } else { [rows, columns] };
            assert_eq!([2, 3].map(|attribute| layout(attribute, 8)), [inner, outer], "{shape}");
            assert_eq!(layout(4, 8), matrices.leading as u64, "{shape}");
            assert_eq!(layout(5, 4), product.batch as u64, "{shape}");
            assert_eq!(layout(6, 8), matrices.batch_stride as u64, "{shape}");
        }

        let preference = preference(&functions, &shape, 5 << 30).unwrap();
        let wanted = |attribute, bytes| read(of_preference, preference.raw, attribute, bytes);
        assert_eq!(wanted(1, 8), 5 << 30, "{shape}: workspace, beyond 32 bits");
        assert_eq!(wanted(3, 4), 2, "{shape}: reduction scheme");
        let of_addend = if product.addend.is_some() { 8 } else { 4 };
        let alignments = [5, 6, 7, 8].map(|attribute| wanted(attribute, 4));
        assert_eq!(alignments, [8, 16, of_addend, 4], "{shape}");
    }
}

#[test]
fn without_a_gpu_the_handle_says_so() {
    let Some((_library, functions)) = library("without_a_gpu_the_handle_says_so") else { return };
    if std::env::var_os("FERROTRON_TEST_GPU").is_some() {
        return;
    }
    let mut raw = std::ptr::null_mut();
    // SAFETY: the pointer is to a live variable. A handle would stay, which a process with a GPU can afford.
    let status = unsafe { (functions.create)(&mut raw) };
    if let Err(error) = functions.check("cublasLtCreate", status) {
        assert_eq!(error.to_string(), "cublasLtCreate: CUBLAS_STATUS_NOT_INITIALIZED");
    }
}
