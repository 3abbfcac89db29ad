//! The cache of compiled kernels between processes: at the same time, killed, and over damaged entries.

use ferrotron_cuda::Error;
use ferrotron_cuda::cubin_cache::{CubinCache, Key};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime};

/// Names the folder to a child process, and what it shall do.
const FOLDER: &str = "FERROTRON_TEST_CACHE";
const ROLE: &str = "FERROTRON_TEST_ROLE";

const SOURCE: &str = "__global__ void nothing() {}";

fn key<'a>(options: &'a [String]) -> Key<'a> {
    Key { source: SOURCE, options, version: (13, 0) }
}

fn cubin() -> Vec<u8> {
    (0..3_000_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// The child process of the other tests; run by itself it does nothing.
#[test]
fn child() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let cache = CubinCache::new(folder);
    let stuck = std::env::var(ROLE).unwrap() == "stuck";
    let got = cache.get(&key(&[]), || {
        println!("\ncompiling");
        std::thread::sleep(Duration::from_millis(if stuck { 600_000 } else { 50 }));
        Ok(cubin())
    });
    assert!(got.unwrap() == cubin());
}

fn start(folder: &Path, role: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["child", "--exact", "--nocapture"]).env(FOLDER, folder).env(ROLE, role);
    command.stdout(Stdio::piped()).spawn().unwrap()
}

#[test]
fn processes_that_miss_at_the_same_time_all_get_the_entry() {
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..3 {
        let children: Vec<Child> = (0..6).map(|_| start(folder.path(), "compile")).collect();
        for child in children {
            let out = child.wait_with_output().unwrap();
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
        }
        let files = files(folder.path());
        assert_eq!(files.len(), 1, "only the entry stays: {files:?}");
        let cache = CubinCache::new(folder.path());
        assert!(cache.get(&key(&[]), || Err(Error::new("test", "not there"))).unwrap() == cubin());
        fs::remove_file(&files[0]).unwrap();
    }
}

#[test]
fn a_process_that_is_killed_in_a_compilation_blocks_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = start(folder.path(), "stuck");
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line == "compiling"));
    child.kill().unwrap(); // SIGKILL
    child.wait().unwrap();
    let begun = std::time::Instant::now();
    let cache = CubinCache::new(folder.path());
    assert!(cache.get(&key(&[]), || Ok(cubin())).unwrap() == cubin());
    assert!(begun.elapsed() < Duration::from_secs(60));
}

#[test]
fn a_process_that_is_killed_while_it_writes_leaves_nothing_that_is_read_or_stays() {
    let folder = tempfile::tempdir().unwrap();
    let (old, young) = (folder.path().join("1-0.tmp"), folder.path().join("2-0.tmp"));
    for path in [&old, &young] {
        fs::write(path, b"half an ent").unwrap();
    }
    let hours_ago = SystemTime::now() - Duration::from_secs(2 * 3600);
    fs::File::options().write(true).open(&old).unwrap().set_modified(hours_ago).unwrap();
    let cache = CubinCache::new(folder.path());
    assert!(cache.get(&key(&[]), || Ok(cubin())).unwrap() == cubin());
    // The young one may be of a process that is still at it.
    assert!(!old.exists() && young.exists() && files(folder.path()).len() == 2);
}

#[test]
fn damaged_entries_are_compiled_again() {
    let folder = tempfile::tempdir().unwrap();
    let cache = CubinCache::new(folder.path());
    let bytes = vec![7; 1000];
    cache.get(&key(&[]), || Ok(bytes.clone())).unwrap();
    let path = files(folder.path()).remove(0);
    let whole = fs::read(&path).unwrap();
    let flipped = |at: usize| {
        let mut entry = whole.clone();
        entry[at] ^= 1;
        entry
    };
    for damaged in
        [Vec::new(), whole[..20].to_vec(), whole[..500].to_vec(), flipped(0), flipped(700)]
    {
        fs::write(&path, damaged).unwrap();
        let mut compiled = 0;
        for _ in 0..2 {
            let got = cache.get(&key(&[]), || {
                compiled += 1;
                Ok(bytes.clone())
            });
            assert!(got.unwrap() == bytes);
        }
        assert_eq!((compiled, fs::read(&path).unwrap() == whole), (1, true));
    }
}

#[test]
fn everything_that_a_cubin_depends_on_names_its_entry() {
    let folder = tempfile::tempdir().unwrap();
    let cache = CubinCache::new(folder.path());
    let (ab, a_b, arch) =
        (["ab".to_string()], ["a".to_string(), "b".to_string()], ["sm_90".to_string()]);
    let keys = [
        key(&[]),
        key(&ab),
        key(&a_b),
        key(&arch),
        Key { source: "other", ..key(&[]) },
        Key { version: (13, 1), ..key(&[]) },
        Key { version: (131, 0), ..key(&[]) },
    ];
    for (i, key) in keys.iter().enumerate() {
        cache.get(key, || Ok(vec![i as u8])).unwrap();
    }
    for (i, key) in keys.iter().enumerate() {
        assert_eq!(cache.get(key, || Ok(vec![99])).unwrap(), [i as u8]);
    }
}

#[test]
fn a_folder_that_cannot_be_written_costs_time_only() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, b"").unwrap();
    let cache = CubinCache::new(file.join("cubin"));
    assert_eq!(cache.get(&key(&[]), || Ok(vec![1])).unwrap(), [1]);
    let refused = cache.get(&key(&[]), || Err(Error::new("nvrtc", "no")));
    assert_eq!(refused.unwrap_err().to_string(), "nvrtc: no");
}
