//! Loaded kernels: compiled on first use and kept until the GPU is dropped.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::{Arc, PoisonError, RwLock};

use crate::compile;
use crate::context::Context;
use crate::cubin_cache::CubinCache;
use crate::driver::check;
use crate::driver::sys::{self, CUfunction, CUmodule};
use crate::kernels::{self, ElementType, KernelSource};
use crate::nvrtc::Nvrtc;
use crate::{Error, Result};

/// A kernel of a loaded module.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Function {
    pub(crate) handle: CUfunction,
    /// Maximum number of threads per block.
    pub(crate) threads: usize,
}

impl Function {
    /// A placeholder for a fake GPU, which is never launched.
    pub(crate) fn fake() -> Function {
        /// The limit of current GPUs.
        const THREADS: usize = 1024;
        Function { handle: ptr::null_mut(), threads: THREADS }
    }
}

// SAFETY: functions may be launched from any thread; they live as long as the registry.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// The kernels of one file for one element type.
#[derive(Debug)]
struct Module {
    context: Arc<Context>,
    handle: CUmodule,
    /// Functions by name without the element type.
    functions: HashMap<String, Function>,
}

// SAFETY: modules may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// The kernels of a GPU.
#[derive(Debug)]
pub(crate) struct Modules {
    context: Arc<Context>,
    nvrtc: Nvrtc,
    cache: CubinCache,
    /// The pointwise table as kernel source.
    rows: String,
    loaded: RwLock<HashMap<(&'static str, ElementType), Module>>,
}

impl Modules {
    pub(crate) fn new(
        context: &Arc<Context>,
        nvrtc: Nvrtc,
        cache: CubinCache,
        rows: String,
    ) -> Modules {
        Modules { context: context.clone(), nvrtc, cache, rows, loaded: RwLock::default() }
    }

    /// The kernel `name` of `file` for elements of `element`.
    ///
    /// Errors if there is no such kernel, or if it cannot be compiled or loaded.
    pub(crate) fn function(
        &self,
        file: &'static str,
        element: ElementType,
        name: &str,
    ) -> Result<Function> {
        {
            let loaded = self.loaded.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(module) = loaded.get(&(file, element)) {
                return module.function(file, element, name);
            }
        }
        let module = self.load(file, element)?;
        let mut loaded = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        loaded.entry((file, element)).or_insert(module).function(file, element, name)
    }

    fn load(&self, name: &'static str, element: ElementType) -> Result<Module> {
        let file = KernelSource::named(name)
            .filter(|file| file.types.contains(&element))
            .ok_or_else(|| Error::new(name, format!("has no kernels for {}", element.name())))?;
        let rows = if name == "pointwise" { &self.rows[..] } else { "" };
        let key = (file, element, rows);
        let cubin = compile::cubin(&self.nvrtc, &self.cache, key, self.context.architecture())?;
        self.context.bind()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the image is a complete cubin, which the driver copies.
        let status = unsafe { sys::cuModuleLoadData(&mut handle, cubin.as_ptr().cast::<c_void>()) };
        check("cuModuleLoadData", status).map_err(|error| {
            let (major, minor) = self.nvrtc.version();
            let message = format!(
                "for {}: {error}; NVRTC {major}.{minor} has compiled it, which takes a driver for CUDA {major} or later",
                element.name()
            );
            Error::new(name, message)
        })?;
        let mut module =
            Module { context: self.context.clone(), handle, functions: HashMap::new() };
        let suffix = format!("_{}", element.name());
        for (threads, entry) in kernels::entries(&file.source(element, rows)) {
            let function = module.find(&entry, threads as usize)?;
            let name = entry.strip_suffix(&suffix).unwrap_or(&entry).to_string();
            module.functions.insert(name, function);
        }
        Ok(module)
    }
}

impl Module {
    fn find(&self, entry: &str, threads: usize) -> Result<Function> {
        let text = CString::new(entry).map_err(|_| Error::new("cuda", "a name with a zero"))?;
        let mut handle = ptr::null_mut();
        // SAFETY: the pointers are to live variables, the module is loaded.
        let status = unsafe { sys::cuModuleGetFunction(&mut handle, self.handle, text.as_ptr()) };
        check("cuModuleGetFunction", status)
            .map_err(|error| Error::new("cuda", format!("kernel '{entry}': {error}")))?;
        Ok(Function { handle, threads })
    }

    fn function(&self, file: &'static str, element: ElementType, name: &str) -> Result<Function> {
        self.functions.get(name).copied().ok_or_else(|| {
            Error::new(file, format!("there is no kernel '{name}' for {}", element.name()))
        })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: its functions have no user left.
        let _ = unsafe { sys::cuModuleUnload(self.handle) };
    }
}

impl Function {
    /// Opts in to `bytes` of dynamic shared memory: together with what the kernel itself declares it may exceed the 48 KiB
    /// that need no opt-in.
    pub(crate) fn allow_shared(&self, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let attribute = sys::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded.
        let status = unsafe { sys::cuFuncSetAttribute(self.handle, attribute, bytes as i32) };
        check("cuFuncSetAttribute", status)
    }
}
