//! No operation without a row: the table is compared with the sources.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use ferrotron_tensor::ops::table::{Binary, Unary};

use crate::table::table;

/// The sources of the operations: (file name, text).
fn sources() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops");
    let mut all: Vec<(String, String)> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .map(|path| {
            (path.file_name().unwrap().to_string_lossy().into(), fs::read_to_string(path).unwrap())
        })
        .collect();
    all.sort();
    assert!(all.len() > 10, "only {} files found", all.len());
    all
}

/// Names of the public functions of a source; those of macros (`pub fn $method`) are rows of the
/// pointwise table.
fn public_functions(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .filter_map(|line| line.trim_start().strip_prefix("pub fn "))
        .map(|rest| rest.split(['(', '<']).next().unwrap_or(rest))
        .filter(|name| !name.starts_with('$'))
}

#[test]
fn every_operation_has_a_row() {
    let table = table();
    let rows: BTreeSet<&str> = table.iter().map(|case| case.op).collect();
    // Two take any row of the pointwise table, each of which has one here; one asks a loss for the number of its tokens; two
    // are parts of linear layers, of this crate's and of others.
    let others = [
        "apply_unary",
        "apply_binary",
        "num_valid_tokens",
        "give_parameter_gradients",
        "gelu_from_preactivation",
    ];
    let mut missing = Vec::new();
    for (file, text) in &sources() {
        let found: Vec<&str> = public_functions(text).collect();
        let missed = found.iter().filter(|op| !rows.contains(*op) && !others.contains(op));
        missing.extend(missed.map(|op| format!("{file}: {op}")));
        if found.is_empty() && file != "mod.rs" {
            missing.push(format!("{file}: no operation found"));
        }
    }
    let pointwise =
        Unary::ALL.iter().map(|op| op.name()).chain(Binary::ALL.iter().map(|op| op.name()));
    missing.extend(pointwise.filter(|op| !rows.contains(op)).map(|op| format!("pointwise: {op}")));
    assert!(missing.is_empty(), "no row in tests/suite/table.rs for {missing:#?}");
}

#[test]
fn every_row_has_ordinary_shapes_and_an_own_name() {
    let mut names = BTreeSet::new();
    for case in table() {
        assert!(case.shapes[0].iter().all(|dims| !dims.contains(&0)), "{}", case.name());
        assert!(names.insert(case.name()), "two rows are called {}", case.name());
    }
}

/// `neg Neg "-x";` in the macro's table makes `Var::neg` from `Unary::Neg`: a slip there would pass every
/// check of the rows.
#[test]
fn pointwise_methods_call_the_rows_of_their_names() {
    let sources = sources();
    let text = &sources.iter().find(|(file, _)| file == "pointwise.rs").unwrap().1;
    let rows = text.lines().filter_map(|line| {
        let (names, _) = line.trim().split_once(" \"")?;
        names.split_once(' ').filter(|(method, row)| !method.contains('#') && !row.contains(' '))
    });
    let methods: Vec<(&str, &str)> = rows.collect();
    let known: Vec<(&str, String)> = Unary::ALL
        .iter()
        .map(|op| (op.name(), format!("{op:?}")))
        .chain(Binary::ALL.iter().map(|op| (op.name(), format!("{op:?}"))))
        .collect();
    assert_eq!(methods.len(), known.len(), "{methods:?}");
    for (method, row) in methods {
        assert!(known.contains(&(method, row.into())), "Var::{method} calls row {row}");
    }
}
