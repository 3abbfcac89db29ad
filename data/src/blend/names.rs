//! Short names of data sets, by which their losses are told apart.

use ferrotron_tensor::{Error, Result};
use std::path::Path;

/// The name of each path: its last part, with as many of those before it as make all names differ.
///
/// ```
/// use ferrotron_data::distinct_names;
/// use std::path::Path;
/// let names = |paths: &[&str]| {
///     distinct_names("--valid-data-path", &paths.iter().map(Path::new).collect::<Vec<_>>())
/// };
/// assert_eq!(names(&["data/wiki", "data/code"])?, ["wiki", "code"]);
/// assert_eq!(names(&["wiki/valid", "code/valid"])?, ["wiki/valid", "code/valid"]);
/// assert!(names(&["wiki", "wiki"]).is_err());
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// # Errors
/// A path that is there twice, with the `option` that names them.
pub fn distinct_names(option: &'static str, paths: &[&Path]) -> Result<Vec<String>> {
    let parts = |path: &&Path| -> Vec<String> {
        path.components().map(|part| part.as_os_str().to_string_lossy().into_owned()).collect()
    };
    let parts: Vec<Vec<String>> = paths.iter().map(parts).collect();
    let longest = parts.iter().map(Vec::len).max().unwrap_or(0);
    for kept in 1..=longest {
        let name = |parts: &Vec<String>| parts[parts.len().saturating_sub(kept)..].join("/");
        let names: Vec<String> = parts.iter().map(name).collect();
        let is_new = |index: usize| !names[..index].contains(&names[index]);
        if (0..names.len()).all(is_new) {
            return Ok(names);
        }
    }
    let again = (0..parts.len()).find(|&index| parts[..index].contains(&parts[index]));
    let path = again.map_or_else(String::new, |index| paths[index].display().to_string());
    let message = format!(
        "names '{path}' twice, and --multiple-validation-sets tells sets apart by name: leave one out"
    );
    Err(Error::config(option, message))
}
