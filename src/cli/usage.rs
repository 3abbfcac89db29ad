//! The parser's errors, each in one line with its remedy.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use ferrotron::Error;

use super::options::absent;

/// The error of words that do not parse as those of `command`, as `ferrotron checkpoint ls`. Prints help and ends the
/// program if the words ask for it.
pub fn refuse(error: &clap::Error, command: &str) -> Error {
    let is_help = error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    if is_help || !error.use_stderr() {
        error.exit();
    }
    Error::config("", explain(error, command))
}

/// One line with the reason of an error and its remedy.
pub fn explain(error: &clap::Error, command: &str) -> String {
    let unknown = (error.kind() == ErrorKind::UnknownArgument)
        .then(|| context(error, ContextKind::InvalidArg));
    let why = match unknown.flatten().map(|arg| escaped(&arg)) {
        Some(arg) => match arg.strip_prefix("--").and_then(absent::remedy) {
            Some(remedy) => return one_line(&remedy),
            None if arg.starts_with('-') => format!("there is no option {arg}"),
            None => format!("'{arg}' belongs to no option"),
        },
        None => first_paragraph(error),
    };
    let similar =
        [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand, ContextKind::SuggestedValue];
    let similar = similar.into_iter().find_map(|kind| context(error, kind));
    let similar = similar.map_or(String::new(), |similar| format!(": do you mean {similar}?"));
    one_line(&format!("{why}{similar} (`{command} -h` lists what there is)"))
}

fn context(error: &clap::Error, kind: ContextKind) -> Option<String> {
    match error.get(kind)? {
        ContextValue::String(text) => Some(text.clone()),
        ContextValue::Strings(texts) => texts.first().cloned(),
        _ => None,
    }
}

/// The parser's own first paragraph, with the typed words on one line each.
fn first_paragraph(error: &clap::Error) -> String {
    let typed =
        [ContextKind::InvalidArg, ContextKind::InvalidValue, ContextKind::InvalidSubcommand];
    let typed = typed.into_iter().filter_map(|kind| context(error, kind));
    let broken = typed.filter(|typed| typed.contains(char::is_control));
    let text = broken.fold(error.to_string(), |text, typed| text.replace(&typed, &escaped(&typed)));
    let lines = text.lines().take_while(|line| !line.is_empty());
    let paragraph = lines.collect::<Vec<_>>().join("\n");
    paragraph.strip_prefix("error: ").unwrap_or(&paragraph).to_string()
}

/// A typed word with control characters, such as line breaks, as escapes.
fn escaped(typed: &str) -> String {
    let escape = |c: char| match c.is_control() {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    typed.chars().map(escape).collect()
}

fn one_line(text: &str) -> String {
    text.lines().map(str::trim).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use crate::cli::definition::Definition;
    use clap::CommandFactory;
    use std::ffi::OsString;

    #[test]
    fn lines_name_the_command_whatever_the_file_of_the_program_is_called() {
        let definition = Definition::new(Cli::command());
        for (words, want) in [
            (
                "ft train --lr fast",
                "invalid value 'fast' for '--lr <X>': invalid float literal (`ferrotron train -h`",
            ),
            ("ft train --no-such-flag", "there is no option --no-such-flag (`ferrotron train -h`"),
            ("/bin/ft --foo", "there is no option --foo (`ferrotron -h`"),
            ("ft checkpoint ls --newest", "no option --newest (`ferrotron checkpoint ls -h`"),
        ] {
            let words: Vec<OsString> = words.split(' ').map(OsString::from).collect();
            let error = definition.lenient().try_get_matches_from(&words).unwrap_err();
            let line = explain(&error, &definition.command_in(&words));
            assert!(line.contains(want) && line.ends_with(" lists what there is)"), "{line}");
        }
    }

    #[test]
    fn line_breaks_in_typed_words_are_escapes() {
        let definition = Definition::new(Cli::command());
        for (words, want) in [
            (
                &["ft", "train", "--lr", "a\n\nb"][..],
                r"invalid value 'a\n\nb' for '--lr <X>': invalid",
            ),
            (&["ft", "train", "--optimizer", "a\n\nb"], r"invalid value 'a\n\nb' for '--optimizer"),
            (&["ft", "train", "--foo\n\nbar"], r"there is no option --foo\n\nbar"),
            (&["ft", "fly\n\nfar"], r"unrecognized subcommand 'fly\n\nfar'"),
        ] {
            let error = definition.lenient().try_get_matches_from(words).unwrap_err();
            let line = explain(&error, "ferrotron train");
            assert!(line.starts_with(want) && line.lines().count() == 1, "{line}");
        }
    }
}
