//! Options before they are parsed: groups of a flag and its values, so that a file or a checkpoint can
//! supply some and the command line override them.

use std::ffi::{OsStr, OsString};

/// Flags that decide the same thing: the one that was typed replaces the other.
const ALIASES: &[(&str, &str)] =
    &[("--swiglu", "--activation"), ("--lr-warmup-fraction", "--lr-warmup-iters")];

/// A flag with its values, as written.
type Group = Vec<OsString>;

/// Cuts options into groups; a group starts at each word that begins with two dashes.
fn groups(options: &[OsString]) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for option in options {
        match groups.last_mut() {
            Some(group) if flag(option).is_none() => group.push(option.clone()),
            _ => groups.push(vec![option.clone()]),
        }
    }
    groups
}

/// The flag that a word sets, `--flag` or `--flag=value`.
fn flag(word: &OsStr) -> Option<&str> {
    let bytes = word.as_encoded_bytes();
    let name = bytes.split(|&byte| byte == b'=').next().unwrap_or(bytes);
    std::str::from_utf8(name).ok().filter(|name| name.starts_with("--"))
}

/// What the flag of a group decides.
fn decides(group: &Group) -> Option<&str> {
    let flag = group.first().and_then(|word| flag(word))?;
    Some(ALIASES.iter().find(|(alias, _)| *alias == flag).map_or(flag, |(_, name)| name))
}

/// The options of `base` that `typed` does not decide, then `typed`.
pub fn overridden(base: &[OsString], typed: &[OsString]) -> Vec<OsString> {
    let typed_groups = groups(typed);
    let kept = groups(base).into_iter().filter(|group| {
        decides(group)
            .is_none_or(|name| !typed_groups.iter().any(|typed| decides(typed) == Some(name)))
    });
    kept.flatten().chain(typed.iter().cloned()).collect()
}

/// The options without those named.
pub fn without(options: &[OsString], names: &[&str]) -> Vec<OsString> {
    let named = |group: &Group| {
        group.first().and_then(|word| flag(word)).is_some_and(|flag| names.contains(&flag))
    };
    groups(options).into_iter().filter(|group| !named(group)).flatten().collect()
}

/// The values of the last occurrence of a flag.
pub fn values(options: &[OsString], name: &str) -> Option<Vec<OsString>> {
    let all = groups(options);
    let group =
        all.iter().rev().find(|group| group.first().and_then(|word| flag(word)) == Some(name))?;
    let inline = group[0]
        .as_encoded_bytes()
        .iter()
        .position(|&byte| byte == b'=')
        .and_then(|at| group[0].to_str().map(|text| OsString::from(&text[at + 1..])));
    Some(inline.into_iter().chain(group[1..].iter().cloned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn what_is_typed_replaces_lists_and_aliases_whole() {
        let base = words("--data a.txt b.txt --lr 1 --swiglu --rampup-batch-size 1 2 3");
        let typed = words("--data=c.txt --activation relu");
        assert_eq!(
            overridden(&base, &typed),
            words("--lr 1 --rampup-batch-size 1 2 3 --data=c.txt --activation relu")
        );
    }

    #[test]
    fn values_are_those_of_the_last_occurrence() {
        let options = words("--load a --data x y --load=b");
        assert_eq!(values(&options, "--load"), Some(words("b")));
        assert_eq!(values(&options, "--data"), Some(words("x y")));
        assert_eq!(values(&options, "--save"), None);
        assert_eq!(without(&options, &["--load"]), words("--data x y"));
    }
}
