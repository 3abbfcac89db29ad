//! The use of this thread so far, by Linux's count: what others do at the same time changes it little or not at all.

/// Seconds that a processor spent on it.
pub fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux has it");
    let nanoseconds = stat.split(' ').next().and_then(|number| number.parse::<f64>().ok());
    nanoseconds.expect("a number") / 1e9
}

/// Calls that read, and the bytes that they read.
pub fn reads() -> (u64, u64) {
    let io = std::fs::read_to_string("/proc/thread-self/io").expect("Linux has it");
    let field = |name: &str| {
        let line = io.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|number| number.trim().parse().ok()).expect("a number")
    };
    (field("syscr:"), field("rchar:"))
}
