//! Saves and loads of a 350M model with its optimizer's state in several layouts, against the time of copying the bytes
//! once, and memory beyond what ranks hold anyway. Ranks are threads; each phase is a process of its own.

use ferrotron::models::bench::median;
use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::models::gpt::Gpt;
use ferrotron::models::presets::Preset;
use ferrotron::models::trainer::{ParallelConfig, SaveMode, Trainer, TrainerConfig};
use ferrotron::nn::{Scope, Sharding};
use ferrotron::parallel::data_parallel::DataParallelConfig;
use ferrotron::parallel::mesh::{Mesh, ParallelDims};
use ferrotron::{DType, Device, Error, Result};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// The layouts by their number of ranks: tensor, pipeline and data parallel sizes, and how much is sharded.
const LAYOUTS: [(&str, [usize; 3], Sharding); 3] = [
    ("1", [1, 1, 1], Sharding::None),
    ("8", [2, 2, 2], Sharding::Optimizer),
    ("2", [2, 1, 1], Sharding::None),
];
/// Rounds; medians are compared.
const ROUNDS: usize = 3;
/// Time of a save or a load, in copies of the bytes, that it should stay below.
const TIME_LIMIT: f64 = 1.5;
/// Peak memory, in shares of the ranks, that it should stay below.
const MEMORY_LIMIT: f64 = 1.1;

/// Saves in each layout of the first two and loads in the last two, in processes of their own, under `folder`; each phase
/// in turns with a copy.
pub fn all(preset: &str, folder: &Path) {
    for save in ["1", "8"] {
        let run = folder.join(format!("saved-by-{save}"));
        let (mut copies, mut phases) = (Vec::new(), [const { Vec::new() }; 3]);
        for _ in 0..ROUNDS {
            for (index, (what, layout)) in
                [("save", save), ("load", "8"), ("load", "2")].into_iter().enumerate()
            {
                if what == "save" && run.exists() {
                    fs::remove_dir_all(&run).expect("it can be deleted");
                }
                phases[index].push(in_process(what, layout, preset, &run));
                copies.push(copy(&run));
            }
        }
        fs::remove_dir_all(&run).expect("it can be deleted");
        let copy = median(copies);
        let [save_time, load_8, load_2] = phases.map(|seconds| median(seconds) / copy);
        println!(
            "medians of {ROUNDS} rounds: a copy {copy:.2} s; in copies: save by {save} {save_time:.2}, load by 8 {load_8:.2}, \
             load by 2 {load_2:.2}"
        );
    }
    println!("aims: {TIME_LIMIT} copies, {MEMORY_LIMIT} shares");
}

/// Runs a phase in a process of its own and returns its seconds.
fn in_process(what: &str, layout: &str, preset: &str, run: &Path) -> f64 {
    let path = std::env::current_exe().expect("the program has a path");
    let output = Command::new(path)
        .args(["phase", what, layout, preset])
        .arg(run)
        .stderr(Stdio::inherit())
        .output()
        .expect("the program starts");
    assert!(output.status.success(), "{what} {layout}");
    let line = String::from_utf8_lossy(&output.stdout);
    print!("{line}");
    let seconds = line.split_once("): ").and_then(|(_, rest)| rest.split_once(" s;"));
    seconds.and_then(|(seconds, _)| seconds.parse().ok()).expect("a phase prints its seconds")
}

/// Reads and writes all files of the checkpoint once, waits for the disk, and returns the seconds.
fn copy(run: &Path) -> f64 {
    let (from, to) = (run.join("iter_0000000"), run.join("copy"));
    fs::create_dir_all(&to).expect("the folder can be made");
    let (started, mut bytes, mut buffer) = (Instant::now(), 0, vec![0; 1 << 20]);
    for entry in fs::read_dir(&from).expect("the checkpoint is there").flatten() {
        let mut source = File::open(entry.path()).expect("it can be read");
        let mut target = File::create(to.join(entry.file_name())).expect("it can be written");
        loop {
            let length = source.read(&mut buffer).expect("it can be read");
            if length == 0 {
                break;
            }
            target.write_all(&buffer[..length]).expect("it can be written");
            bytes += length as u64;
        }
        target.sync_all().expect("it can be written");
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("copy: {bytes} bytes in {seconds:.2} s");
    fs::remove_dir_all(&to).expect("it can be deleted");
    seconds
}

/// One phase, in this process: `save` or `load` in a layout.
pub fn phase(
    [what, layout, preset]: [&str; 3],
    folder: &Path,
    config: &(dyn Fn(usize) -> Result<TrainerConfig> + Sync),
) -> Result<()> {
    let (name, [tensor, pipeline, data], sharding) = *LAYOUTS
        .iter()
        .find(|(name, ..)| *name == layout)
        .ok_or_else(|| Error::config("bench", format!("there is no layout {layout}")))?;
    let preset = Preset::find(preset)?;
    let dims = ParallelDims::new(tensor * pipeline * data, tensor, 1, pipeline)?;
    let (share, before, peak) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let seconds = Mesh::run_threads(dims, |mesh| {
        let data_parallel = DataParallelConfig { sharding, ..DataParallelConfig::default() };
        let parallel = ParallelConfig { data_parallel, ..ParallelConfig::default() };
        let config = TrainerConfig { parallel, saves: SaveMode::Blocking, ..config(data)? };
        let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1);
        let mut trainer = Trainer::<Gpt>::on_mesh(&scope, mesh, &preset.config(), config)?;
        share.fetch_add(held(&trainer)?, Relaxed);
        let first = mesh.rank() == 0;
        mesh.world().barrier().wait()?;
        if first {
            before.store(memory("VmRSS"), Relaxed);
            // Forgets the peak so far.
            fs::write("/proc/self/clear_refs", "5").expect("Linux has this file");
        }
        mesh.world().barrier().wait()?;
        let started = Instant::now();
        match what {
            "save" => drop(trainer.save(folder, None, serde_json::Value::Null)?),
            _ => trainer.load(&Checkpoint::peek(folder)?)?,
        }
        mesh.world().barrier().wait()?;
        let seconds = started.elapsed().as_secs_f64();
        if first {
            // What a load has filled stays.
            before.fetch_max(memory("VmRSS"), Relaxed);
            peak.store(memory("VmHWM"), Relaxed);
        }
        mesh.world().barrier().wait()?;
        Ok(seconds)
    })?;
    let [share, before, peak] = [share, before, peak].map(|number| number.into_inner());
    let more = peak.saturating_sub(before);
    println!(
        "{what}, {name} ranks (tp {tensor} x pp {pipeline} x dp {data}): {:.2} s; {share} bytes of weights and states, {more} \
         more at the peak: {:.3} shares",
        seconds[0],
        1.0 + more as f64 / share as f64
    );
    Ok(())
}

/// The bytes of weights and optimizer state that a rank holds.
fn held(trainer: &Trainer<Gpt>) -> Result<u64> {
    let mut bytes = 0;
    let mut add =
        |tensor: &ferrotron::Tensor| bytes += (tensor.numel() * tensor.dtype().size()) as u64;
    for group in trainer.buffers().groups() {
        group.visit_weights(|_, _, tensor| {
            add(&tensor);
            Ok(())
        })?;
    }
    trainer.optimizer().visit(|_, _, _, tensor| {
        add(&tensor);
        Ok(())
    })?;
    Ok(bytes)
}

/// A line of `/proc/self/status`, in bytes.
fn memory(name: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("Linux has this file");
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let number = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    1024 * number.expect("the file has this line")
}
