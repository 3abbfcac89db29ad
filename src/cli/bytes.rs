//! Numbers of bytes as people write and read them.

/// Powers of 1000, as disks and networks are sold, and of 1024, as memory is.
const UNITS: &[(&str, u64)] = &[
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1000),
    ("KB", 1000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("B", 1),
    ("", 1),
];

/// `8GiB`, `500MB`, `1.5 TB` or a plain number of bytes.
pub fn parse(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let number_of = |(unit, size): &(&str, u64)| {
        let number = text.strip_suffix(unit)?.trim_end().parse::<f64>().ok()?;
        let bytes = number * *size as f64;
        (1.0..u64::MAX as f64).contains(&bytes).then_some(bytes as u64)
    };
    UNITS.iter().find_map(number_of).ok_or_else(|| {
        "must be a positive number of bytes, perhaps with a unit: 8GiB, 500MB".to_string()
    })
}

/// Bytes in a decimal unit that leaves one to three digits before the point.
pub fn display(bytes: u64) -> String {
    let bytes = bytes as f64;
    match bytes {
        0.0 => "0".to_string(),
        _ if bytes < 1e6 => format!("{:.1} kB", bytes / 1e3),
        _ if bytes < 1e9 => format!("{:.2} MB", bytes / 1e6),
        _ if bytes < 1e12 => format!("{:.2} GB", bytes / 1e9),
        _ => format!("{:.2} TB", bytes / 1e12),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_read_and_written() {
        for (text, want) in [
            ("8GiB", 8 << 30),
            ("500MB", 500_000_000),
            ("1.5 TB", 1_500_000_000_000),
            ("3.5 kB", 3500),
            ("4096", 4096),
            ("12B", 12),
        ] {
            assert_eq!(parse(text), Ok(want), "{text}");
        }
        for text in ["", "GiB", "-1", "0", "8 apples", "nan", "inf", "1e30"] {
            assert!(parse(text).is_err(), "{text}");
        }
        for (bytes, want) in [(900, "0.9 kB"), (12_345_678, "12.35 MB"), (3_000_000_000, "3.00 GB")]
        {
            assert_eq!(display(bytes), want);
        }
    }
}
