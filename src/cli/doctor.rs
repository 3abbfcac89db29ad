//! `ferrotron doctor`.

use clap::Args;
use ferrotron::Result;
use ferrotron::cuda::cubin_cache::CubinCache;
use ferrotron::cuda::library::{Kind, Search};
use ferrotron::cuda::probe::{Probe, probe};
use serde_json::{Value, json};
use std::fmt::Write;
use std::process::ExitCode;

use super::output;

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Prints what this machine offers for GPUs: libraries with versions, devices with memory, and what is missing and
/// how to get it.
pub fn doctor(args: &DoctorArgs) -> Result<ExitCode> {
    let search = Search::from_environment();
    let found = probe(&search);
    let cache = CubinCache::of_user();
    if args.json {
        output::line(&object(&found, &cache).to_string());
    } else {
        output::print(&text(&found, &search, &cache));
    }
    Ok(ExitCode::SUCCESS)
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

fn object(found: &Probe, cache: &CubinCache) -> Value {
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
    json!({ "libraries": libraries, "devices": devices, "cubin_cache": cache.folder() })
}
