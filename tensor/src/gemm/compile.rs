//! The generic kernels, compiled for an instruction set.

/// Compiles the generic kernels for an instruction set, with the features that `$with` lists (see
/// [`crate::numeric::simd`]): the tables `F32` and `F64`.
macro_rules! isa {
    ($f32:ty, $f64:ty, [$($rows:literal),*], $with:ident) => {
        $crate::numeric::simd::$with! { enabled!
            unsafe fn tile<V: Vector<Scalar: $crate::gemm::kernel::Compute>, const R: usize, const N: usize>(
                tile: &$crate::gemm::kernel::MicroTile<V::Scalar>,
            ) {
                // SAFETY: the caller's promise, passed on.
                unsafe { $crate::gemm::kernel::tile::<V, $crate::gemm::kernel::Single, R, N>(tile) }
            }
        }
        $crate::numeric::simd::$with! { enabled!
            unsafe fn stream<
                V: Vector<Scalar: $crate::gemm::kernel::Compute>,
                S: $crate::Element<Acc = V::Scalar>,
                const R: usize,
            >(
                tile: &$crate::gemm::kernel::MicroTile<V::Scalar>,
                columns: &$crate::gemm::kernel::StoredColumns,
            ) {
                // SAFETY: the caller's promise, passed on.
                unsafe { $crate::gemm::stream::stream::<V, $crate::gemm::kernel::Single, S, R>(tile, columns) }
            }
        }
        $crate::numeric::simd::$with! { enabled!
            unsafe fn pack<V: Vector, S: $crate::Element<Acc = V::Scalar>>(
                task: &$crate::gemm::pack_task::PackTask<V::Scalar>,
            ) {
                // SAFETY: the caller's promise, passed on.
                unsafe { $crate::gemm::pack::pack::<V, S>(task) }
            }
        }
        $crate::numeric::simd::$with! { enabled!
            unsafe fn epilogue<V: Vector, D: $crate::Element<Acc = V::Scalar>>(
                task: &$crate::gemm::pack::Epilogue<V::Scalar>,
            ) {
                // SAFETY: the caller's promise, passed on.
                unsafe { $crate::gemm::pack::epilogue::<V, D>(task) }
            }
        }
        $crate::numeric::simd::$with! { enabled!
            unsafe fn multiply<V: Vector>(times: usize) -> usize {
                // SAFETY: the caller's promise, passed on.
                unsafe { $crate::gemm::kernel::multiply::<V, $crate::gemm::kernel::Single>(times) }
            }
        }
        /// The f32 kernels.
        pub(in crate::gemm) static F32: $crate::gemm::kernel::GemmKernels<f32> = $crate::gemm::kernel::GemmKernels {
            lanes: <$f32>::LANES,
            free_masks: <$f32>::FREE_MASKS,
            tiles: &[$(&[tile::<$f32, $rows, 1>, tile::<$f32, $rows, 2>, tile::<$f32, $rows, 3>]),*],
            stream: |dtype| match dtype {
                $crate::DType::BF16 => &[$(stream::<$f32, $crate::bf16, $rows>),*],
                $crate::DType::F16 => &[$(stream::<$f32, $crate::f16, $rows>),*],
                _ => &[$(stream::<$f32, f32, $rows>),*],
            },
            pack: |dtype| match dtype {
                $crate::DType::BF16 => pack::<$f32, $crate::bf16>,
                $crate::DType::F16 => pack::<$f32, $crate::f16>,
                _ => pack::<$f32, f32>,
            },
            widen: |dtype| match dtype {
                $crate::DType::BF16 => pack::<$f32, $crate::bf16>,
                $crate::DType::F16 => pack::<$f32, $crate::f16>,
                _ => pack::<$f32, f32>,
            },
            epilogue: |dtype| match dtype {
                $crate::DType::BF16 => epilogue::<$f32, $crate::bf16>,
                $crate::DType::F16 => epilogue::<$f32, $crate::f16>,
                _ => epilogue::<$f32, f32>,
            },
            multiply: multiply::<$f32>,
        };
        /// The f64 kernels.
        pub(in crate::gemm) static F64: $crate::gemm::kernel::GemmKernels<f64> = $crate::gemm::kernel::GemmKernels {
            lanes: <$f64>::LANES,
            free_masks: <$f64>::FREE_MASKS,
            tiles: &[$(&[tile::<$f64, $rows, 1>, tile::<$f64, $rows, 2>, tile::<$f64, $rows, 3>]),*],
            stream: |_| &[$(stream::<$f64, f64, $rows>),*],
            pack: |_| pack::<$f64, f64>,
            widen: |_| pack::<$f64, f64>,
            epilogue: |_| epilogue::<$f64, f64>,
            multiply: multiply::<$f64>,
        };
    };
}
pub(super) use isa;
