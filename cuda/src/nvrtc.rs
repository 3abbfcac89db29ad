//! NVRTC, the run-time compiler: compiles kernel source to a cubin for one architecture. It needs no GPU.
//!
//! It never produces PTX: drivers reject PTX from a newer compiler ("unsupported toolchain"), but run cubins of the
//! same major version.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::Path;

use crate::library::{Kind, Library, Search};
use crate::{Error, Result};

/// A GPU architecture: compute capability 9.0 is `Architecture { major: 9, minor: 0 }`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Architecture {
    /// Major version.
    pub major: u32,
    /// Minor version.
    pub minor: u32,
}

impl std::fmt::Display for Architecture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "sm_{}{}", self.major, self.minor)
    }
}

impl std::str::FromStr for Architecture {
    type Err = Error;

    /// Reads a compute capability, such as `9.0`.
    fn from_str(text: &str) -> Result<Architecture> {
        let numbers = text.split_once('.').map(|(major, minor)| (major.parse(), minor.parse()));
        let Some((Ok(major), Ok(minor))) = numbers else {
            let message = format!("'{text}' is no compute capability, such as 9.0");
            return Err(Error::new("architecture", message));
        };
        Ok(Architecture { major, minor })
    }
}

/// A compiled module, with the compiler's log.
#[derive(Debug, Clone)]
pub struct Cubin {
    /// The cubin, which the driver loads.
    pub bytes: Vec<u8>,
    /// Warnings, and each kernel's register count if `--ptxas-options=-v` is set.
    pub log: String,
}

#[repr(C)]
struct Program {
    _opaque: [u8; 0],
}
type Handle = *mut Program;
type Status = c_int;

/// The loaded compiler.
#[derive(Debug)]
pub struct Nvrtc {
    create: unsafe extern "C" fn(
        *mut Handle,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    compile: unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> Status,
    log_size: unsafe extern "C" fn(Handle, *mut usize) -> Status,
    log: unsafe extern "C" fn(Handle, *mut c_char) -> Status,
    cubin_size: unsafe extern "C" fn(Handle, *mut usize) -> Status,
    cubin: unsafe extern "C" fn(Handle, *mut c_char) -> Status,
    destroy: unsafe extern "C" fn(*mut Handle) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    version: (u32, u32),
    library: Library,
}

impl Nvrtc {
    /// Finds and loads the compiler.
    ///
    /// Errors if it is missing, or too old to produce cubins (before CUDA 11.1).
    pub fn load(search: &Search) -> Result<Nvrtc> {
        let library = search.load(Kind::Nvrtc)?;
        // SAFETY: the types are those of nvrtc.h.
        let nvrtc = unsafe {
            let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status =
                library.function("nvrtcVersion")?;
            let (mut major, mut minor) = (0, 0);
            if version(&mut major, &mut minor) != 0 {
                return Err(Error::new("nvrtc", "nvrtcVersion failed"));
            }
            Nvrtc {
                create: library.function("nvrtcCreateProgram")?,
                compile: library.function("nvrtcCompileProgram")?,
                log_size: library.function("nvrtcGetProgramLogSize")?,
                log: library.function("nvrtcGetProgramLog")?,
                cubin_size: library.function("nvrtcGetCUBINSize")?,
                cubin: library.function("nvrtcGetCUBIN")?,
                destroy: library.function("nvrtcDestroyProgram")?,
                error_string: library.function("nvrtcGetErrorString")?,
                version: (major as u32, minor as u32),
                library,
            }
        };
        Ok(nvrtc)
    }

    /// Major and minor version of the toolkit.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// The file it was loaded from.
    pub fn path(&self) -> &Path {
        self.library.path()
    }

    /// All options of a compilation: language, target (`sm_90`, or `sm_90a` with what only this architecture has), and the
    /// file's own. NVRTC 13.0 takes a generic lambda for a function of the host unless it is told otherwise.
    pub fn options(target: &str, of_file: &[&str]) -> Vec<String> {
        let mut options = vec!["--std=c++17".into(), format!("--gpu-architecture={target}")];
        options.push("--device-as-default-execution-space".into());
        options.extend(of_file.iter().map(|option| option.to_string()));
        options
    }

    /// Compiles `source`; messages refer to it as `name`.
    ///
    /// Errors with the compiler's log if compilation fails or an option is rejected.
    pub fn compile(&self, name: &str, source: &str, options: &[String]) -> Result<Cubin> {
        let text = |text: &str| {
            CString::new(text)
                .map_err(|_| Error::new("nvrtc", format!("{name} has a zero byte in it")))
        };
        let (source, file) = (text(source)?, text(name)?);
        let options = options.iter().map(|option| text(option)).collect::<Result<Vec<_>>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = OwnedProgram { handle: std::ptr::null_mut(), nvrtc: self };
        let none = std::ptr::null();
        // SAFETY: strings and lists outlive the calls; `OwnedProgram` destroys the handle.
        unsafe {
            let status =
                (self.create)(&mut program.handle, source.as_ptr(), file.as_ptr(), 0, none, none);
            self.check(status, name, "")?;
            let status = (self.compile)(program.handle, pointers.len() as c_int, pointers.as_ptr());
            let log = read(
                |size| (self.log_size)(program.handle, size),
                |to| (self.log)(program.handle, to),
            );
            let log = String::from_utf8_lossy(&log.unwrap_or_default())
                .trim_end_matches('\0')
                .to_string();
            self.check(status, name, &log)?;
            let bytes = read(
                |size| (self.cubin_size)(program.handle, size),
                |to| (self.cubin)(program.handle, to),
            )
            .map_err(|status| self.check(status, name, &log).unwrap_err())?;
            Ok(Cubin { bytes, log })
        }
    }

    fn check(&self, status: Status, name: &str, log: &str) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the function returns a static string for every number.
        let reason = unsafe { CStr::from_ptr((self.error_string)(status)) }.to_string_lossy();
        Err(Error::new("nvrtc", format!("{name}: {reason}\n{log}")))
    }
}

struct OwnedProgram<'a> {
    handle: Handle,
    nvrtc: &'a Nvrtc,
}

impl Drop for OwnedProgram<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: the handle is from nvrtcCreateProgram and has no other user.
            unsafe { (self.nvrtc.destroy)(&mut self.handle) };
        }
    }
}

/// Reads bytes with a pair of functions that return their number and contents.
fn read(
    size: impl FnOnce(&mut usize) -> Status,
    fill: impl FnOnce(*mut c_char) -> Status,
) -> std::result::Result<Vec<u8>, Status> {
    let mut length = 0;
    match size(&mut length) {
        0 => {}
        status => return Err(status),
    }
    let mut bytes = vec![0_u8; length];
    match fill(bytes.as_mut_ptr().cast()) {
        0 => Ok(bytes),
        status => Err(status),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::headers::{constant, function, program};

    #[test]
    fn the_real_compiler_has_every_function_as_its_header_declares_it() {
        let test = "the_real_compiler_has_every_function_as_its_header_declares_it";
        let nvrtc = match Nvrtc::load(&Search::from_environment()) {
            Ok(nvrtc) => nvrtc,
            Err(error) => return println!("skipped: {test}: {error}"),
        };
        let claims = [
            constant("NVRTC_SUCCESS", 0),
            function("nvrtcCreateProgram", nvrtc.create),
            function("nvrtcCompileProgram", nvrtc.compile),
            function("nvrtcGetProgramLogSize", nvrtc.log_size),
            function("nvrtcGetProgramLog", nvrtc.log),
            function("nvrtcGetCUBINSize", nvrtc.cubin_size),
            function("nvrtcGetCUBIN", nvrtc.cubin),
            function("nvrtcDestroyProgram", nvrtc.destroy),
            function("nvrtcGetErrorString", nvrtc.error_string),
        ];
        program(test, "nvrtc.h", &claims, "");
    }
}
