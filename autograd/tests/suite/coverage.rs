//! No operation without a row: the table is compared with the sources.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use ferrotron_tensor::ops::table::{Binary, Unary};

use crate::table::table;

/// The sources in a folder: (file name, text).
fn sources(folder: &str) -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let mut all: Vec<(String, String)> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .map(|path| {
            (path.file_name().unwrap().to_string_lossy().into(), fs::read_to_string(path).unwrap())
        })
        .collect();
    all.sort();
    assert!(all.len() > 5, "only {} files found", all.len());
    all
}

/// The macros of the shared list of methods, without what is the tensor's alone.
fn shared_list() -> Vec<(String, String)> {
    let mut all = sources("../tensor/src/methods");
    all.retain(|(file, _)| !["mod.rs", "dims.rs", "einsum.rs"].contains(&file.as_str()));
    for (_, text) in &mut all {
        let end = text.find("\nimpl Tensor").unwrap_or(text.len());
        text.truncate(end);
    }
    all
}

/// Names of the public functions of a source; those of macros (`pub fn $method`) are rows of the
/// pointwise table.
fn public_functions(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .map(str::trim_start)
        .filter_map(|line| line.strip_prefix("pub fn ").or(line.strip_prefix("pub(crate) fn ")))
        .map(|rest| rest.split(['(', '<']).next().unwrap_or(rest))
        .filter(|name| !name.starts_with('$'))
}

#[test]
fn every_operation_has_a_row() {
    let table = table();
    let rows: BTreeSet<&str> = table.iter().map(|case| case.op).collect();
    // Two take any row of the pointwise table, and each row has one here; one asks a loss for the number of its tokens;
    // one is a part of linear layers, of this crate's and of others; the last ones give constants.
    let others = [
        "unary",
        "binary",
        "num_valid_tokens",
        "give_parameter_gradients",
        "argmax",
        "argmin",
        "argsort",
        "zeros_like",
        "ones_like",
        "full_like",
        "randn_like",
    ];
    let mut missing = Vec::new();
    let list = shared_list();
    for (file, text) in sources("src/ops").iter().chain(&list) {
        let found: Vec<&str> = public_functions(text).collect();
        let missed = found.iter().filter(|op| !rows.contains(*op) && !others.contains(op));
        missing.extend(missed.map(|op| format!("{file}: {op}")));
        if found.is_empty() && !["mod.rs", "operators.rs"].contains(&file.as_str()) {
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

/// `neg Neg "-x";` in the list makes `Var::neg` from `Unary::Neg`: a slip there would pass every check of the rows.
#[test]
fn pointwise_methods_call_the_rows_of_their_names() {
    let list = shared_list();
    let text = &list.iter().find(|(file, _)| file == "pointwise.rs").unwrap().1;
    let (rows_of_the_table, _) = text.split_once("@compare").unwrap();
    let rows = rows_of_the_table.lines().filter_map(|line| {
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
