//! The tables of options in `docs/command-line.md`, which are made of the definitions that parse them.
//!
//! In the page, `<!-- options: train, Data -->` stands in front of the table of a subcommand's options under a heading,
//! `<!-- options: eval -->` in front of those without one, and `<!-- end -->` behind each.

use clap::Arg;
use std::collections::BTreeSet;
use std::path::PathBuf;

use super::Cli;
use super::definition::{Definition, help_and_default};
use clap::CommandFactory;

const BEGIN: &str = "<!-- options: ";
const END: &str = "<!-- end -->";

/// Writes the page instead of comparing it.
const UPDATE: &str = "UPDATE_DOCS";

/// The options of a subcommand under a heading, as they are printed by `--help`.
fn options(subcommand: &str, heading: Option<&str>) -> Vec<Arg> {
    let definition = Definition::new(Cli::command()).subcommand(subcommand);
    let shown = definition.get_arguments().filter(|arg| !arg.is_hide_set());
    shown.filter(|arg| arg.get_help_heading() == heading && !arg.is_global_set()).cloned().collect()
}

/// A table with a row for each option.
fn table(options: &[Arg]) -> String {
    let mut text = String::from("| option | default | meaning |\n|---|---|---|\n");
    for arg in options {
        let (help, default) = meaning_and_default(arg);
        text +=
            &format!("| `{}` | {default} | {help} |\n", flag_and_value(arg)).replace("|  |", "| |");
    }
    text
}

/// An option with its value, or the values that it may have.
fn flag_and_value(arg: &Arg) -> String {
    let name = match arg.get_long() {
        Some(long) => format!("--{long}"),
        None => String::new(),
    };
    let count = arg.get_num_args().unwrap_or_default();
    let values: Vec<String> =
        arg.get_possible_values().iter().map(|value| value.get_name().into()).collect();
    let value = match arg.get_value_names() {
        _ if count.min_values() == 0 => return name, // a flag
        _ if !values.is_empty() => values.join("\\|"),
        Some(names) => names.iter().map(|name| name.to_string()).collect::<Vec<_>>().join(" "),
        None => "VALUE".to_string(),
    };
    let several = if count.max_values() == usize::MAX { "..." } else { "" };
    format!("{name} {value}{several}").trim_start().to_string()
}

/// The help of an option, and its default.
fn meaning_and_default(arg: &Arg) -> (String, String) {
    let (help, in_words) = help_and_default(arg);
    let defaults = arg.get_default_values().iter().map(|value| value.to_string_lossy());
    let defaults = || defaults.collect::<Vec<_>>().join(" ");
    let is_flag = arg.get_num_args().is_some_and(|count| count.min_values() == 0);
    let default = if is_flag { String::new() } else { in_words.unwrap_or_else(defaults) };
    (help.replace('|', "\\|"), default.replace('|', "\\|"))
}

/// The page with the tables that the definitions make, and which tables it has.
fn with_tables(page: &str) -> (String, BTreeSet<(String, Option<String>)>) {
    let (mut text, mut found) = (String::new(), BTreeSet::new());
    let mut rest = page;
    while let Some((before, behind)) = rest.split_once(BEGIN) {
        let (name, behind) = behind.split_once(" -->").expect("the end of a marker");
        let (_, behind) =
            behind.split_once(END).unwrap_or_else(|| panic!("no {END} behind {name}"));
        let (subcommand, heading) = match name.split_once(", ") {
            Some((subcommand, heading)) => (subcommand, Some(heading)),
            None => (name, None),
        };
        let options = options(subcommand, heading);
        assert!(!options.is_empty(), "{name} has no options");
        text += &format!("{before}{BEGIN}{name} -->\n{}{END}", table(&options));
        assert!(
            found.insert((subcommand.to_string(), heading.map(String::from))),
            "{name} is there twice"
        );
        rest = behind;
    }
    (text + rest, found)
}

/// The subcommands, and those below them.
fn subcommands() -> Vec<String> {
    let below = |command: &clap::Command| {
        let name = command.get_name().to_string();
        let inner = command.get_subcommands().map(|inner| format!("{name} {}", inner.get_name()));
        inner.chain([name.clone()]).collect::<Vec<_>>()
    };
    Cli::command().get_subcommands().flat_map(below).collect()
}

#[test]
fn the_page_has_the_options_that_the_program_parses() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("docs/command-line.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (want, tables) = with_tables(&page);
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&path, &want).unwrap();
    } else if let Some((line, _)) =
        page.lines().zip(want.lines()).enumerate().find(|(_, (is, want))| is != want)
    {
        panic!(
            "docs/command-line.md, line {}, is not what the program parses: write the tables anew with \
             {UPDATE}=1 cargo test --release --bin ferrotron the_page_has_the_options",
            line + 1
        );
    }
    // Every option is in a table: those with a heading in that of `train`, since other subcommands share them.
    for name in &subcommands() {
        for arg in Definition::new(Cli::command())
            .subcommand(name)
            .get_arguments()
            .filter(|arg| !arg.is_hide_set() && !arg.is_global_set())
        {
            let heading = arg.get_help_heading().map(String::from);
            let owner = if heading.is_some() { "train" } else { name };
            let is_there = tables.contains(&(owner.to_string(), heading));
            assert!(is_there, "docs/command-line.md has no table with {} of {name}", arg.get_id());
        }
    }
}
