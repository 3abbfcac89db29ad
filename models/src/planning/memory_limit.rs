//! Finds the memory that the processes of this machine may use together: the machine's, or the limit of their control
//! group.

use std::fs::read_to_string;
use std::path::Path;

/// A number of bytes, and where it comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimit {
    /// The bytes.
    pub bytes: u64,
    /// The end of the phrase "the bytes that ..." which names the source: "this machine has".
    pub source: &'static str,
}

/// The smaller of the machine's memory and the limit of the control group; `None` where neither can be read.
pub fn memory_limit() -> Option<MemoryLimit> {
    let machine = read_to_string("/proc/meminfo").ok().and_then(|text| machine_bytes(&text));
    let membership = read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = group_bytes(Path::new("/sys/fs/cgroup"), &membership);
    let machine = machine.map(|bytes| MemoryLimit { bytes, source: "this machine has" });
    let group = group.map(|bytes| MemoryLimit { bytes, source: "the control group allows" });
    [machine, group].into_iter().flatten().min_by_key(|limit| limit.bytes)
}

/// `MemTotal` of /proc/meminfo.
fn machine_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// The least limit of the groups that /proc/self/cgroup, `membership`, names and of those around them. In a container
/// the file may name a folder that is not to be seen; then those around it count.
fn group_bytes(root: &Path, membership: &str) -> Option<u64> {
    let limits = membership.lines().flat_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next().unwrap_or(""), fields.next().unwrap_or("/"));
        let (folder, file) = match controllers {
            "" => (root.to_path_buf(), "memory.max"), // version 2
            _ if controllers.split(',').any(|name| name == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes")
            }
            _ => return Vec::new(),
        };
        let around = Path::new(path.trim_start_matches('/')).ancestors();
        let limit = |path: &Path| read_to_string(folder.join(path).join(file)).ok();
        around.filter_map(|path| limit(path)?.trim().parse().ok()).collect::<Vec<u64>>()
    });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{create_dir_all, write};

    #[test]
    fn the_least_limit_of_the_groups_around_a_process_counts() {
        let root = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = root.path().join(path);
            create_dir_all(path.parent().unwrap()).unwrap();
            write(path, text).unwrap();
        };
        put("memory.max", "max\n");
        put("a/memory.max", "4096\n");
        put("a/b/memory.max", "8192\n");
        put("memory/memory.limit_in_bytes", "9223372036854771712\n");
        put("memory/c/memory.limit_in_bytes", "2048\n");
        for (membership, want) in [
            ("0::/a/b\n", Some(4096)),
            ("0::/\n", None),
            ("0::/a/absent\n", Some(4096)),
            ("5:cpu:/a\n4:memory,hugetlb:/c\n0::/a\n", Some(2048)),
            ("4:memory:/absent\n", Some(9_223_372_036_854_771_712)),
            ("", None),
            ("nonsense\n", None),
        ] {
            assert_eq!(group_bytes(root.path(), membership), want, "{membership:?}");
        }
        assert_eq!(machine_bytes("MemFree: 1 kB\nMemTotal:   24 kB\n"), Some(24 << 10));
        assert_eq!(machine_bytes("MemTotal: lots\n"), None);
    }
}
