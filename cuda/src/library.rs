//! Finds and loads NVIDIA's libraries.
//!
//! Folders are searched in this order:
//!
//! - the folders in `FERROTRON_CUDA_PATH`;
//! - `lib64` of `CUDA_HOME` and `CUDA_PATH`;
//! - pip's `nvidia-*` packages in the active Python environment (`VIRTUAL_ENV`, `CONDA_PREFIX`), then those of each
//!   `python3` on `PATH` and of its link targets, then the user's (`~/.local`) and the system's (`/usr/local`);
//! - `lib` of `CONDA_PREFIX`;
//! - `/usr/local/cuda/lib64`, `/usr/local/nvidia/lib64`, `/usr/lib/wsl/lib`;
//! - the system's loader.
//!
//! A library is loaded by its absolute path, so `LD_LIBRARY_PATH` is not needed.

use libloading::os::unix::{Library as Handle, RTLD_GLOBAL, RTLD_NOW, Symbol};
use std::collections::HashSet;
use std::ffi::{OsString, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// A library used on GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The driver, `libcuda`
    Driver,
    /// The run-time compiler, NVRTC
    Nvrtc,
    /// Matrix products, cuBLASLt
    CublasLt,
    /// Collectives between GPUs, NCCL
    Nccl,
}

impl Kind {
    /// Every library.
    pub const ALL: [Kind; 4] = [Kind::Driver, Kind::Nvrtc, Kind::CublasLt, Kind::Nccl];

    /// The file name without the version.
    pub const fn stem(self) -> &'static str {
        match self {
            Kind::Driver => "libcuda.so",
            Kind::Nvrtc => "libnvrtc.so",
            Kind::CublasLt => "libcublasLt.so",
            Kind::Nccl => "libnccl.so",
        }
    }

    /// Versions requested from the system's loader, best first.
    const fn versions(self) -> &'static [&'static str] {
        match self {
            Kind::Driver => &["1"],
            Kind::Nvrtc | Kind::CublasLt => &["13", "12"],
            Kind::Nccl => &["2"],
        }
    }

    /// Libraries in the same folder that must be loaded first: the library looks them up by name only.
    const fn before(self) -> &'static [&'static str] {
        match self {
            Kind::Nvrtc => &["libnvrtc-builtins.so"],
            _ => &[],
        }
    }

    /// The purpose, for error messages.
    pub const fn purpose(self) -> &'static str {
        match self {
            Kind::Driver => "everything on a GPU",
            Kind::Nvrtc => "compiling kernels",
            Kind::CublasLt => "matrix products",
            Kind::Nccl => "more than one GPU",
        }
    }

    /// The installation instructions, for error messages.
    pub const fn remedy(self) -> &'static str {
        match self {
            Kind::Driver => "install NVIDIA's driver, R580 or later for CUDA 13 (needs root)",
            Kind::Nvrtc => "pip install nvidia-cuda-nvrtc",
            Kind::CublasLt => "pip install nvidia-cublas",
            Kind::Nccl => "pip install nvidia-nccl-cu13",
        }
    }
}

/// The folders that are searched, in order.
///
/// ```
/// use ferrotron_cuda::library::Search;
/// let search = Search::with(&|name| (name == "CUDA_HOME").then(|| "/opt/cuda".into()));
/// assert_eq!(search.folders()[0].to_str(), Some("/opt/cuda/lib64"));
/// ```
#[derive(Debug, Clone)]
pub struct Search {
    folders: Vec<PathBuf>,
}

impl Search {
    /// The search path from this process's environment.
    pub fn from_environment() -> Search {
        Search::with(&|name| std::env::var_os(name))
    }

    /// The search path from an environment in which `variable` looks up names.
    pub fn with(variable: &dyn Fn(&str) -> Option<OsString>) -> Search {
        let mut folders = Vec::new();
        if let Some(list) = variable("FERROTRON_CUDA_PATH") {
            folders.extend(std::env::split_paths(&list));
        }
        for name in ["CUDA_HOME", "CUDA_PATH"] {
            folders.extend(variable(name).map(|home| Path::new(&home).join("lib64")));
        }
        for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
            if let Some(prefix) = variable(name) {
                folders.extend(package_folders(Path::new(&prefix)));
            }
        }
        let path = variable("PATH").unwrap_or_default();
        for bin in std::env::split_paths(&path) {
            folders.extend(prefixes(bin.join("python3")).iter().flat_map(|at| package_folders(at)));
        }
        // Folders where pip installs packages for a system Python.
        folders.extend(
            variable("HOME")
                .iter()
                .flat_map(|home| package_folders(&Path::new(home).join(".local"))),
        );
        folders.extend(package_folders(Path::new("/usr/local")));
        folders.extend(variable("CONDA_PREFIX").map(|prefix| Path::new(&prefix).join("lib")));
        let system = ["/usr/local/cuda/lib64", "/usr/local/nvidia/lib64", "/usr/lib/wsl/lib"];
        folders.extend(system.map(PathBuf::from));
        let mut seen = HashSet::new();
        folders.retain(|folder| seen.insert(folder.clone()));
        Search { folders }
    }

    /// Only these folders, then the system's loader.
    pub fn only(folders: Vec<PathBuf>) -> Search {
        Search { folders }
    }

    /// The folders, in order.
    pub fn folders(&self) -> &[PathBuf] {
        &self.folders
    }

    /// The newest file of a library in the first folder that has it.
    pub fn find(&self, kind: Kind) -> Option<PathBuf> {
        self.folders.iter().find_map(|folder| newest(folder, kind.stem()))
    }

    /// Finds and loads a library.
    ///
    /// Errors, with the remedy, if neither a folder nor the system's loader has it, or if it cannot be loaded.
    pub fn load(&self, kind: Kind) -> Result<Library> {
        let Some(path) = self.find(kind) else {
            let named = kind.versions().iter().find_map(|version| {
                let name = format!("{}.{version}", kind.stem());
                let handle = ManuallyDrop::new(open(Path::new(&name)).ok()?);
                Some(Library { handle, path: name.into() })
            });
            return named.ok_or_else(|| {
                let message =
                    format!("not found, needed for {}: {}", kind.purpose(), kind.remedy());
                Error::new(kind.stem(), message)
            });
        };
        let folder = path.parent().unwrap_or(Path::new("/"));
        for stem in kind.before() {
            if let Some(path) = newest(folder, stem) {
                // Leaked, so that it stays loaded: the library finds it by name.
                std::mem::forget(open(&path).map_err(|error| Error::new(kind.stem(), error))?);
            }
        }
        let handle = open(&path).map_err(|error| Error::new(kind.stem(), error))?;
        Ok(Library { handle: ManuallyDrop::new(handle), path })
    }
}

/// The prefixes of a Python interpreter and of its chain of link targets. A link may lead to a virtual environment,
/// whose own interpreter links to the system's.
fn prefixes(python: PathBuf) -> Vec<PathBuf> {
    /// Maximum number of links followed, as in Linux.
    const MOST_LINKS: usize = 40;
    let target = |python: &PathBuf| Some(python.parent()?.join(std::fs::read_link(python).ok()?));
    std::iter::successors(python.exists().then_some(python), target)
        .take(MOST_LINKS)
        .filter_map(|python| python.parent()?.parent()?.canonicalize().ok())
        .collect()
}

/// The library folders of pip's packages in a Python environment: `nvidia/*/lib`.
fn package_folders(prefix: &Path) -> Vec<PathBuf> {
    let entries = |folder: &Path| -> Vec<PathBuf> {
        let Ok(list) = std::fs::read_dir(folder) else { return Vec::new() };
        let mut paths: Vec<PathBuf> = list.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        paths
    };
    let is_python = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"))
    };
    let mut folders = Vec::new();
    for python in entries(&prefix.join("lib")).iter().filter(|path| is_python(path)) {
        for packages in ["site-packages", "dist-packages"] {
            let packages = entries(&python.join(packages).join("nvidia"));
            folders.extend(
                packages.iter().map(|package| package.join("lib")).filter(|lib| lib.is_dir()),
            );
        }
    }
    folders
}

/// The file `stem` or `stem.VERSION` of a folder with the highest version.
fn newest(folder: &Path, stem: &str) -> Option<PathBuf> {
    let version = |name: &str| -> Option<Vec<u64>> {
        match name.strip_prefix(stem)? {
            "" => Some(Vec::new()),
            rest => rest.strip_prefix('.')?.split('.').map(|part| part.parse().ok()).collect(),
        }
    };
    std::fs::read_dir(folder)
        .ok()?
        .flatten()
        .filter_map(|entry| Some((version(entry.file_name().to_str()?)?, entry.path())))
        .max()
        .map(|(_, path)| path)
}

fn open(path: &Path) -> std::result::Result<Handle, String> {
    // SAFETY: NVIDIA's libraries may be loaded at any time, from any thread.
    unsafe { Handle::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }
        .map_err(|error| format!("{} cannot be loaded: {error}", path.display()))
}

/// A loaded library. It is never unloaded: NVIDIA's libraries leave threads running, which need its code.
#[derive(Debug)]
pub struct Library {
    handle: ManuallyDrop<Handle>,
    path: PathBuf,
}

impl Library {
    /// The file's path, or only its name if the system's loader found it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The function called `name`.
    ///
    /// Errors if the library does not have it because it is too old.
    ///
    /// # Safety
    /// `F` is the function's type, as its header declares it.
    pub unsafe fn function<F: Copy>(&self, name: &'static str) -> Result<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let address = self.address(name)?;
        // SAFETY: the caller guarantees that `F` is the type of the function at this address.
        Ok(unsafe { std::mem::transmute_copy(&address) })
    }

    fn address(&self, name: &'static str) -> Result<*mut c_void> {
        // SAFETY: the address is not used here.
        let symbol: std::result::Result<Symbol<*mut c_void>, _> = unsafe { self.handle.get(name) };
        symbol.map(|symbol| *symbol).map_err(|_| {
            let path = self.path.display();
            Error::new(name, format!("{path} has no such function: it is too old"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, b"not a library").unwrap();
    }

    #[test]
    fn folders_are_searched_in_order_and_versions_as_numbers() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        let packages = "venv/lib/python3.11/site-packages/nvidia";
        for path in [
            "toolkit/lib64/libnvrtc.so.12",
            "explicit/libnvrtc-builtins.so.13.0",
            "explicit/libnccl.so.2",
            &format!("{packages}/cu13/lib/libnvrtc.so.9"),
            &format!("{packages}/cu13/lib/libnvrtc.so.13"),
            &format!("{packages}/cu13/lib/libcublasLt.so.13"),
            &format!("{packages}/nccl/lib/libnccl.so.2"),
            "system/bin/python3",
            "toolkits/lib/libcublasLt.so.12",
            "home/.local/lib/python3.12/site-packages/nvidia/cublas/lib/libcublasLt.so.12",
        ] {
            touch(&at(path));
        }
        for (link, python) in
            [("venv/bin", "../../system/bin/python3"), ("bin", "../venv/bin/python3")]
        {
            std::fs::create_dir_all(at(link)).unwrap();
            std::os::unix::fs::symlink(python, at(link).join("python3")).unwrap();
        }
        let found = |variables: &[(&str, &str)], kind| {
            let search = Search::with(&|name| {
                let (_, value) = variables.iter().find(|(known, _)| *known == name)?;
                Some(at(value).into_os_string())
            });
            search.find(kind).map(|path| path.strip_prefix(root.path()).unwrap().to_path_buf())
        };
        let package = |path: &str| Some(PathBuf::from(format!("{packages}/{path}")));
        let nvrtc = package("cu13/lib/libnvrtc.so.13");
        for variable in [
            ("VIRTUAL_ENV", "venv"),
            ("CONDA_PREFIX", "venv"),
            ("PATH", "venv/bin"),
            ("PATH", "bin"), // a link
        ] {
            assert_eq!(found(&[variable], Kind::Nvrtc), nvrtc, "{variable:?}");
            assert_eq!(found(&[variable], Kind::CublasLt), package("cu13/lib/libcublasLt.so.13"));
        }
        for (variable, folder) in [
            (("HOME", "home"), "home/.local/lib/python3.12/site-packages/nvidia/cublas/lib"),
            (("CONDA_PREFIX", "toolkits"), "toolkits/lib"),
        ] {
            let want = Path::new(folder).join("libcublasLt.so.12");
            assert_eq!(found(&[variable], Kind::CublasLt), Some(want), "{variable:?}");
        }
        let all = [
            ("FERROTRON_CUDA_PATH", "explicit"),
            ("CUDA_HOME", "toolkit"),
            ("VIRTUAL_ENV", "venv"),
        ];
        assert_eq!(found(&all, Kind::Nccl), Some("explicit/libnccl.so.2".into()));
        assert_eq!(found(&all, Kind::Nvrtc), Some("toolkit/lib64/libnvrtc.so.12".into()));
        assert_eq!(found(&all[2..], Kind::Nccl), package("nccl/lib/libnccl.so.2"));
    }

    #[test]
    fn what_is_missing_or_no_library_is_an_error_that_says_so() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("libnccl.so.2");
        touch(&path);
        let error = Search::only(vec![root.path().into()]).load(Kind::Nccl).unwrap_err();
        let want = format!("libnccl.so: {} cannot be loaded: ", path.display());
        assert!(error.to_string().starts_with(&want), "{error}");
        if let Err(error) = Search::only(Vec::new()).load(Kind::CublasLt) {
            let want =
                "libcublasLt.so: not found, needed for matrix products: pip install nvidia-cublas";
            assert_eq!(error.to_string(), want);
        }
    }
}
