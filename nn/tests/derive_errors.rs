//! The messages of the compiler about `#[derive(Module)]`: `derive_errors/*.rs` do not compile, for the reasons in the
//! files `*.stderr` beside them.

use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn errors_name_the_field_and_the_remedy() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for name in ["attributes", "forgotten"] {
        let source = format!("tests/derive_errors/{name}.rs");
        let expected =
            std::fs::read_to_string(root.join(&source).with_extension("stderr")).unwrap();
        let found = messages(root, &source);
        let mut lines = found.lines().map(str::trim_end);
        for line in expected.lines().filter(|line| !line.is_empty()) {
            assert!(lines.any(|found| found == line), "{source}: no line '{line}' in\n{found}");
        }
        let count = |text: &str| text.lines().filter(|line| line.starts_with("error")).count();
        // rustc ends with a line that counts the errors.
        assert_eq!(count(&found), count(&expected) + 1, "{source}:\n{found}");
    }
}

/// Compiles a source that uses the library as built for this test, and returns rustc's messages.
fn messages(root: &Path, source: &str) -> String {
    let program = std::env::current_exe().unwrap();
    let built = program.parent().unwrap();
    let rustc = std::env::var_os("RUSTC").unwrap_or("rustc".into());
    let out = Command::new(rustc)
        .current_dir(root)
        .args(["--edition", "2024", "--emit", "metadata", "--color", "never"])
        .args(["--out-dir", env!("CARGO_TARGET_TMPDIR")])
        .arg("-L")
        .arg(format!("dependency={}", built.display()))
        .arg("--extern")
        .arg(format!("ferrotron={}", newest_library(built).display()))
        .arg(source)
        .output()
        .unwrap();
    assert!(!out.status.success(), "{source} compiles");
    String::from_utf8(out.stderr).unwrap()
}

/// The library may have been built several times, with other options.
fn newest_library(folder: &Path) -> PathBuf {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_library = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        name.starts_with("libferrotron_nn-") && name.ends_with(".rlib")
    };
    let modified = |path: &PathBuf| path.metadata().unwrap().modified().unwrap();
    files.filter(is_library).max_by_key(modified).unwrap()
}
