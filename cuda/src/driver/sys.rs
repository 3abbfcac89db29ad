//! Function pointers of the driver, with the types of cuda.h, whose names they keep. Functions that differ between
//! versions of CUDA have the suffix under which cuda.h calls them.
#![allow(non_camel_case_types, non_snake_case)]

use std::ffi::{c_char, c_float, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use crate::Result;
use crate::library::Library;

/// Status of a call; later versions may have values that are not listed here.
pub(crate) type CUresult = c_int;
pub(crate) const CUDA_SUCCESS: CUresult = 0;
pub(crate) const CUDA_ERROR_NOT_INITIALIZED: CUresult = 3;
pub(crate) const CUDA_ERROR_NOT_READY: CUresult = 600;

pub(crate) type CUdevice = c_int;
pub(crate) type CUdeviceptr = c_ulonglong;
pub(crate) type CUcontext = *mut c_void;
pub(crate) type CUevent = *mut c_void;
pub(crate) type CUfunction = *mut c_void;
pub(crate) type CUgraph = *mut c_void;
pub(crate) type CUgraphExec = *mut c_void;
pub(crate) type CUmodule = *mut c_void;
pub(crate) type CUstream = *mut c_void;
pub(crate) type CUmemGenericAllocationHandle = c_ulonglong;

pub(crate) const CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: c_uint = 16;
pub(crate) const CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: c_uint = 75;
pub(crate) const CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: c_uint = 76;
pub(crate) const CU_EVENT_DEFAULT: c_uint = 0;
pub(crate) const CU_EVENT_DISABLE_TIMING: c_uint = 2;
pub(crate) const CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: c_uint = 8;
pub(crate) const CU_MEM_ACCESS_FLAGS_PROT_READWRITE: c_uint = 3;
pub(crate) const CU_MEM_ALLOCATION_TYPE_PINNED: c_uint = 1;
pub(crate) const CU_MEM_ALLOC_GRANULARITY_MINIMUM: c_uint = 0;
pub(crate) const CU_MEM_LOCATION_TYPE_DEVICE: c_uint = 1;
pub(crate) const CU_STREAM_CAPTURE_MODE_RELAXED: c_uint = 2;
pub(crate) const CU_STREAM_CAPTURE_STATUS_NONE: c_uint = 0;
pub(crate) const CU_STREAM_NON_BLOCKING: c_uint = 1;

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CUmemLocation {
    pub(crate) kind: c_uint,
    pub(crate) id: c_int,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CUmemAllocationProp {
    pub(crate) kind: c_uint,
    pub(crate) requested_handle_types: c_uint,
    pub(crate) location: CUmemLocation,
    pub(crate) win32_handle_metadata: *mut c_void,
    /// Compression, remote access and usage; zero is none of them.
    pub(crate) flags: [u8; 8],
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CUmemAccessDesc {
    pub(crate) location: CUmemLocation,
    pub(crate) flags: c_uint,
}

static FUNCTIONS: OnceLock<Functions> = OnceLock::new();

/// Looks up the functions in a library. The first call's library serves the whole process.
///
/// Errors if one is missing because the driver is too old.
pub(super) fn load(library: &Library) -> Result<()> {
    let functions = Functions::load(library)?;
    FUNCTIONS.get_or_init(|| functions);
    Ok(())
}

/// Declares the table of pointers and, for each, a function of the same name that calls it.
macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($type),*) -> CUresult,)*
        }

        impl Functions {
            fn load(library: &Library) -> Result<Functions> {
                // SAFETY: the types are those of cuda.h.
                unsafe { Ok(Functions { $($name: library.function(stringify!($name))?,)* }) }
            }
        }

        /// Names, and bytes of each argument.
        #[cfg(test)]
        const SIGNATURES: &[(&str, &[usize])] =
            &[$((stringify!($name), &[$(size_of::<$type>()),*])),*];

        $(
            /// Calls the driver's function of this name.
            ///
            /// # Safety
            /// The arguments are as its documentation demands.
            #[allow(clippy::too_many_arguments)]
            pub(crate) unsafe fn $name($($argument: $type),*) -> CUresult {
                match FUNCTIONS.get() {
                    // SAFETY: the caller's promise.
                    Some(functions) => unsafe { (functions.$name)($($argument),*) },
                    None => CUDA_ERROR_NOT_INITIALIZED,
                }
            }
        )*
    };
}

functions! {
    cuCtxSetCurrent(context: CUcontext);
    cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: CUdevice);
    cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
    cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
    cuEventCreate(event: *mut CUevent, flags: c_uint);
    cuEventDestroy_v2(event: CUevent);
    cuEventElapsedTime(milliseconds: *mut c_float, start: CUevent, end: CUevent);
    cuEventQuery(event: CUevent);
    cuEventRecord(event: CUevent, stream: CUstream);
    cuEventSynchronize(event: CUevent);
    cuFuncSetAttribute(function: CUfunction, attribute: c_uint, value: c_int);
    cuGetErrorName(status: CUresult, text: *mut *const c_char);
    cuGetErrorString(status: CUresult, text: *mut *const c_char);
    cuGraphDestroy(graph: CUgraph);
    cuGraphExecDestroy(graph: CUgraphExec);
    cuGraphInstantiateWithFlags(executable: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong);
    cuGraphLaunch(graph: CUgraphExec, stream: CUstream);
    cuInit(flags: c_uint);
    cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: CUstream,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void
    );
    cuMemAddressFree(address: CUdeviceptr, len: usize);
    cuMemAddressReserve(
        address: *mut CUdeviceptr,
        len: usize,
        alignment: usize,
        wanted: CUdeviceptr,
        flags: c_ulonglong
    );
    cuMemCreate(
        handle: *mut CUmemGenericAllocationHandle,
        len: usize,
        properties: *const CUmemAllocationProp,
        flags: c_ulonglong
    );
    cuMemGetAllocationGranularity(
        granularity: *mut usize,
        properties: *const CUmemAllocationProp,
        option: c_uint
    );
    cuMemHostRegister_v2(start: *mut c_void, len: usize, flags: c_uint);
    cuMemHostUnregister(start: *mut c_void);
    cuMemMap(
        address: CUdeviceptr,
        len: usize,
        offset: usize,
        handle: CUmemGenericAllocationHandle,
        flags: c_ulonglong
    );
    cuMemRelease(handle: CUmemGenericAllocationHandle);
    cuMemSetAccess(address: CUdeviceptr, len: usize, access: *const CUmemAccessDesc, count: usize);
    cuMemUnmap(address: CUdeviceptr, len: usize);
    cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, len: usize, stream: CUstream);
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, len: usize, stream: CUstream);
    cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, len: usize, stream: CUstream);
    cuMemsetD8Async(to: CUdeviceptr, value: c_uchar, len: usize, stream: CUstream);
    cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    cuModuleUnload(module: CUmodule);
    cuStreamBeginCapture_v2(stream: CUstream, mode: c_uint);
    cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int);
    cuStreamDestroy_v2(stream: CUstream);
    cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
    cuStreamIsCapturing(stream: CUstream, status: *mut c_uint);
    cuStreamSynchronize(stream: CUstream);
    cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::headers::{claim, constant, program, takes};
    use std::mem::offset_of;

    macro_rules! constants {
        ($($name:ident)*) => { [$(constant(stringify!($name), i64::from($name))),*] };
    }

    #[test]
    fn the_driver_is_called_as_its_header_declares() {
        let mut claims: Vec<_> =
            SIGNATURES.iter().map(|(name, sizes)| takes(name, sizes)).collect();
        claims.extend(constants! {
            CUDA_SUCCESS CUDA_ERROR_NOT_INITIALIZED CUDA_ERROR_NOT_READY
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
            CU_EVENT_DEFAULT CU_EVENT_DISABLE_TIMING CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            CU_MEM_ACCESS_FLAGS_PROT_READWRITE CU_MEM_ALLOCATION_TYPE_PINNED
            CU_MEM_ALLOC_GRANULARITY_MINIMUM CU_MEM_LOCATION_TYPE_DEVICE
            CU_STREAM_CAPTURE_MODE_RELAXED CU_STREAM_CAPTURE_STATUS_NONE CU_STREAM_NON_BLOCKING
        });
        let (location, access) = (size_of::<CUmemLocation>(), size_of::<CUmemAccessDesc>());
        let properties = size_of::<CUmemAllocationProp>();
        let at = [
            offset_of!(CUmemAllocationProp, location),
            offset_of!(CUmemAllocationProp, win32_handle_metadata),
            offset_of!(CUmemAllocationProp, flags),
        ];
        claims.extend([
            claim(&format!("sizeof(CUmemLocation) == {location}")),
            claim(&format!("sizeof(CUmemAccessDesc) == {access}")),
            claim(&format!("sizeof(CUmemAllocationProp) == {properties}")),
            claim(&format!("offsetof(CUmemAllocationProp, location) == {}", at[0])),
            claim(&format!("offsetof(CUmemAllocationProp, win32HandleMetaData) == {}", at[1])),
            claim(&format!("offsetof(CUmemAllocationProp, allocFlags) == {}", at[2])),
            claim(&format!(
                "offsetof(CUmemAccessDesc, flags) == {}",
                offset_of!(CUmemAccessDesc, flags)
            )),
        ]);
        program("the_driver_is_called_as_its_header_declares", "cuda.h", &claims, "");
    }
}
