//! `ferrotron doctor`.

use clap::Args;
use ferrotron::cuda::compile::all_cubins;
use ferrotron::cuda::cubin_cache::CubinCache;
use ferrotron::cuda::library::{Kind, Search};
use ferrotron::cuda::nvrtc::{Architecture, Nvrtc};
use ferrotron::cuda::probe::{Probe, probe};
use ferrotron::tensor::gemm::{InstructionSets, instruction_sets};
use ferrotron::tensor::ops::table::kernel_rows;
use ferrotron::{Error, Result};
use serde_json::{Value, json};
use std::fmt::Write;
use std::process::ExitCode;
use std::sync::Mutex;

use crate::cli::output;
use crate::cli::progress::CountProgress;

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Compile all kernels for GPUs of these compute capabilities, such as 9.0, so that the first runs find them: takes
    /// minutes, and NVRTC, but no GPU
    #[arg(long, value_name = "CAPABILITY", value_delimiter = ',', value_parser = capability)]
    compile_kernels: Vec<Architecture>,
}

fn capability(text: &str) -> std::result::Result<Architecture, String> {
    text.parse().map_err(|error: ferrotron::cuda::Error| error.context().to_string())
}

/// Prints the instruction sets of the processor, and the GPUs with their memory. For GPUs it adds the libraries with
/// their versions, and whatever is missing with the way to get it.
pub fn doctor(args: &DoctorArgs) -> Result<ExitCode> {
    let search = Search::from_environment();
    let found = probe(&search);
    let cache = CubinCache::for_user();
    if args.json {
        output::line(&object(&found, &cache, &instruction_sets()).to_string());
    } else {
        output::print(&processor(&instruction_sets()));
        output::print(&text(&found, &search, &cache));
    }
    if !args.compile_kernels.is_empty() {
        compile_kernels(&search, &cache, &args.compile_kernels).map_err(Error::from_gpu)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Fills the cache of compiled kernels.
fn compile_kernels(
    search: &Search,
    cache: &CubinCache,
    architectures: &[Architecture],
) -> ferrotron::cuda::Result<()> {
    let nvrtc = Nvrtc::load(search)?;
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get());
    let progress = Mutex::new(None);
    let done = |done: usize, all: usize| {
        let mut progress = progress.lock().unwrap_or_else(|held| held.into_inner());
        progress.get_or_insert_with(|| CountProgress::new("kernels", all as u64)).show(done as u64);
    };
    let count = all_cubins((&nvrtc, cache, &kernel_rows()), architectures, threads, &done)?;
    if let Some(progress) = progress.into_inner().unwrap_or_else(|held| held.into_inner()) {
        progress.finish();
    }
    let names: Vec<_> = architectures.iter().map(Architecture::to_string).collect();
    output::note(&format!("{count} files of kernels are compiled for {}", names.join(", ")));
    Ok(())
}

/// The line about the processor, and one about what it is refused.
fn processor(sets: &InstructionSets) -> String {
    let refusal = sets.refusal.iter().map(|refusal| format!("{:<16} {refusal}\n", ""));
    let line = format!("{:<16} products by {}, of bf16 by {}\n", "processor", sets.f32, sets.bf16);
    refusal.fold(line, |lines, refusal| lines + &refusal)
}

fn text(found: &Probe, search: &Search, cache: &CubinCache) -> String {
    let mut out = String::new();
    for (kind, library) in &found.libraries {
        let _ = match library {
            Ok(library) => {
                writeln!(
                    out,
                    "{:<16} {:<8} {}",
                    kind.stem(),
                    library.version,
                    library.path.display()
                )
            }
            Err(error) => writeln!(out, "{:<16} {}", kind.stem(), error.context()),
        };
    }
    if let Some((library, own, driver)) = too_new(found) {
        let _ = writeln!(
            out,
            "{:<16} is of CUDA {own}, the driver is for CUDA {driver}: use a later driver, or pip's packages that end in -cu{driver}",
            library.stem()
        );
    }
    let driver =
        found.libraries.iter().any(|(kind, library)| *kind == Kind::Driver && library.is_ok());
    match &found.devices {
        Err(_) if !driver => out.push_str("GPUs             none can be used without the driver\n"),
        Err(error) => {
            let _ = writeln!(out, "GPUs             none can be used: {error}");
        }
        Ok(devices) if devices.is_empty() => out.push_str("GPUs             none\n"),
        Ok(devices) => {
            for (number, device) in devices.iter().enumerate() {
                let gib = device.memory as f64 / (1_u64 << 30) as f64;
                let label = format!("cuda:{number}");
                let (architecture, name) = (device.architecture, &device.name);
                let _ = writeln!(out, "{label:<16} {name}, {architecture}, {gib:.1} GiB");
            }
        }
    }
    let _ = writeln!(out, "compiled kernels {}", cache.folder().display());
    if found.libraries.iter().any(|(_, library)| library.is_err()) {
        out.push_str("searched         ");
        let folders: Vec<_> =
            search.folders().iter().map(|folder| folder.display().to_string()).collect();
        let _ = writeln!(
            out,
            "{}, then the system's loader; FERROTRON_CUDA_PATH adds folders",
            folders.join(", ")
        );
    }
    out
}

/// A library of a later CUDA than the driver is for, and the two major versions.
fn too_new(found: &Probe) -> Option<(Kind, u32, u32)> {
    let major = |wanted: Kind| {
        let (_, library) = found.libraries.iter().find(|(kind, _)| *kind == wanted)?;
        library.as_ref().ok()?.version.split('.').next()?.parse::<u32>().ok()
    };
    let driver = major(Kind::Driver)?;
    let libraries = [Kind::Nvrtc, Kind::CublasLt].into_iter();
    let mut versions = libraries.filter_map(|kind| Some((kind, major(kind)?, driver)));
    versions.find(|(_, own, driver)| own > driver)
}

fn object(found: &Probe, cache: &CubinCache, sets: &InstructionSets) -> Value {
    let libraries: serde_json::Map<String, Value> = found
        .libraries
        .iter()
        .map(|(kind, library)| {
            let value = match library {
                Ok(library) => json!({ "version": library.version, "path": library.path }),
                Err(error) => json!({ "missing": error.context() }),
            };
            (kind.stem().trim_end_matches(".so").to_string(), value)
        })
        .collect();
    let devices = match &found.devices {
        Err(error) => json!({ "missing": error.to_string() }),
        Ok(devices) => devices
            .iter()
            .map(|device| {
                let architecture = device.architecture.to_string();
                json!({ "name": device.name, "architecture": architecture, "memory": device.memory })
            })
            .collect(),
    };
    let processor = json!({ "f32": sets.f32, "bf16": sets.bf16, "refusal": sets.refusal });
    json!({ "processor": processor, "libraries": libraries, "devices": devices, "cubin_cache": cache.folder() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrotron::cuda::probe::Version;

    #[test]
    fn a_refused_instruction_set_is_named_with_its_reason() {
        let refusal = Some("this processor has AMX, but".to_string());
        let sets = InstructionSets { f32: "AVX-512", bf16: "AVX512-BF16", refusal };
        let told = processor(&sets);
        assert!(told.contains("products by AVX-512, of bf16 by AVX512-BF16\n"), "{told}");
        assert!(told.contains("this processor has AMX, but"), "{told}");
    }

    #[test]
    fn a_library_that_is_newer_than_the_driver_is_named() {
        let probe = |versions: [&str; 3]| {
            let kinds = [Kind::Driver, Kind::Nvrtc, Kind::CublasLt].into_iter();
            let found = |version: &str| Version { path: "/lib".into(), version: version.into() };
            let libraries = kinds.zip(versions).map(|(kind, version)| (kind, Ok(found(version))));
            Probe { libraries: libraries.collect(), devices: Ok(Vec::new()) }
        };
        assert_eq!(too_new(&probe(["13.0", "13.2", "13.4.1"])), None);
        assert_eq!(too_new(&probe(["13.0", "12.8", "12.8.4"])), None);
        assert_eq!(too_new(&probe(["12.4", "12.8", "13.4.1"])), Some((Kind::CublasLt, 13, 12)));
        let found = probe(["12.4", "13.2", "13.4.1"]);
        let told = text(&found, &Search::only(Vec::new()), &CubinCache::new("/cache"));
        let want = "libnvrtc.so      is of CUDA 13, the driver is for CUDA 12: use a later driver";
        assert!(told.contains(want), "{told}");
    }
}
