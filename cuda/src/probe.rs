//! Probes a machine for NVIDIA's libraries with their versions, and for devices.

use std::ffi::{c_char, c_int, c_uint};
use std::path::{Path, PathBuf};

use crate::context::text_of;
use crate::library::{Kind, Library, Search};
use crate::nvrtc::{Architecture, Nvrtc};
use crate::{Error, Result};

/// A library that was found, with its version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// The file's path, or only its name if the system's loader found it.
    pub path: PathBuf,
    /// The version in NVIDIA's notation: `13.2`, `2.30.7`.
    pub version: String,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// The name reported by the driver.
    pub name: String,
    /// Compute capability.
    pub architecture: Architecture,
    /// Bytes of memory.
    pub memory: usize,
}

/// The result of a probe.
#[derive(Debug, Clone)]
pub struct Probe {
    /// The libraries, in the order of [`Kind::ALL`].
    pub libraries: Vec<(Kind, Result<Version>)>,
    /// The devices, or the reason why they cannot be enumerated.
    pub devices: Result<Vec<Device>>,
}

/// Probes all libraries and devices. Creates no context on any device.
pub fn probe(search: &Search) -> Probe {
    let driver = search.load(Kind::Driver);
    let devices = match &driver {
        Ok(driver) => devices_of(driver),
        Err(error) => Err(error.clone()),
    };
    let version = |kind| match kind {
        Kind::Driver => driver.as_ref().map_err(Error::clone).and_then(driver_version),
        Kind::Nvrtc => Nvrtc::load(search).map(|nvrtc| {
            let (major, minor) = nvrtc.version();
            found(nvrtc.path(), format!("{major}.{minor}"))
        }),
        Kind::CublasLt => search.load(kind).and_then(|library| cublaslt_version(&library)),
        Kind::Nccl => search.load(kind).and_then(|library| nccl_version(&library)),
    };
    Probe { libraries: Kind::ALL.iter().map(|&kind| (kind, version(kind))).collect(), devices }
}

fn found(path: &Path, version: String) -> Version {
    Version { path: path.into(), version }
}

fn driver_version(driver: &Library) -> Result<Version> {
    let mut number = 0;
    // SAFETY: the type is that of cuda.h.
    let status = unsafe {
        let version: unsafe extern "C" fn(*mut c_int) -> c_int =
            driver.function("cuDriverGetVersion")?;
        version(&mut number)
    };
    check("cuDriverGetVersion", status)?;
    Ok(found(driver.path(), format!("{}.{}", number / 1000, number % 1000 / 10)))
}

fn cublaslt_version(library: &Library) -> Result<Version> {
    // SAFETY: the type is that of cublasLt.h.
    let number = unsafe {
        let version: unsafe extern "C" fn() -> usize = library.function("cublasLtGetVersion")?;
        version()
    };
    let version = format!("{}.{}.{}", number / 10_000, number % 10_000 / 100, number % 100);
    Ok(found(library.path(), version))
}

fn nccl_version(library: &Library) -> Result<Version> {
    let mut number = 0;
    // SAFETY: the type is that of nccl.h.
    let status = unsafe {
        let version: unsafe extern "C" fn(*mut c_int) -> c_int =
            library.function("ncclGetVersion")?;
        version(&mut number)
    };
    check("ncclGetVersion", status)?;
    let version = format!("{}.{}.{}", number / 10_000, number % 10_000 / 100, number % 100);
    Ok(found(library.path(), version))
}

/// Enumerates the devices without creating contexts.
///
/// Errors, with the remedy, if there is no driver or it sees no GPU.
pub fn devices(search: &Search) -> Result<Vec<Device>> {
    devices_of(&search.load(Kind::Driver)?)
}

fn devices_of(driver: &Library) -> Result<Vec<Device>> {
    // CUdevice_attribute: major and minor compute capability.
    const MAJOR: c_int = 75;
    const MINOR: c_int = 76;
    // SAFETY: the types are those of cuda.h, and every pointer is to a live variable of that type.
    unsafe {
        let init: unsafe extern "C" fn(c_uint) -> c_int = driver.function("cuInit")?;
        let count: unsafe extern "C" fn(*mut c_int) -> c_int =
            driver.function("cuDeviceGetCount")?;
        let get: unsafe extern "C" fn(*mut c_int, c_int) -> c_int =
            driver.function("cuDeviceGet")?;
        let name: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int =
            driver.function("cuDeviceGetName")?;
        let memory: unsafe extern "C" fn(*mut usize, c_int) -> c_int =
            driver.function("cuDeviceTotalMem_v2")?;
        let attribute: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int =
            driver.function("cuDeviceGetAttribute")?;
        check("cuInit", init(0))?;
        let mut devices = 0;
        check("cuDeviceGetCount", count(&mut devices))?;
        let device = |number| {
            let (mut device, mut major, mut minor, mut bytes) = (0, 0, 0, 0);
            let mut text: [c_char; 256] = [0; 256];
            check("cuDeviceGet", get(&mut device, number))?;
            check("cuDeviceGetName", name(text.as_mut_ptr(), text.len() as c_int - 1, device))?;
            check("cuDeviceGetAttribute", attribute(&mut major, MAJOR, device))?;
            check("cuDeviceGetAttribute", attribute(&mut minor, MINOR, device))?;
            check("cuDeviceTotalMem", memory(&mut bytes, device))?;
            Ok(Device {
                name: text_of(&text),
                architecture: Architecture { major: major as u32, minor: minor as u32 },
                memory: bytes,
            })
        };
        (0..devices).map(device).collect()
    }
}

/// Converts a CUresult to an error, with text for common statuses.
fn check(op: &'static str, status: c_int) -> Result<()> {
    let reason = match status {
        0 => return Ok(()),
        100 => "the driver sees no GPU",
        803 => {
            "the driver's kernel module and library are of different versions: restart the machine"
        }
        _ => return Err(Error::new(op, format!("failed with status {status}"))),
    };
    Err(Error::new(op, reason))
}
