//! Patterns of parameter names, by which a configuration or a command line chooses parameters.

use ferrotron_tensor::{Error, Result};

/// A list of patterns of parameter names.
///
/// In a pattern `*` stands for any text, dots included. A pattern chooses the parameters that it matches and those of
/// the modules that it matches: `blocks.3` stands for `blocks.3.*`. After a leading `!` it takes parameters out again;
/// the last pattern that matches a name decides.
///
/// ```
/// use ferrotron_nn::ParamPatterns;
/// let patterns = ParamPatterns::new(["*", "!head", "!*.bias"])?;
/// assert!(patterns.matches("blocks.0.mlp.fc.weight"));
/// assert!(!patterns.matches("head.weight") && !patterns.matches("blocks.0.mlp.fc.bias"));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ParamPatterns(Vec<String>);

impl ParamPatterns {
    /// Creates the patterns. Errors if one is empty, or if the first takes parameters out before any is chosen.
    pub fn new(patterns: impl IntoIterator<Item = impl Into<String>>) -> Result<ParamPatterns> {
        let patterns: Vec<String> = patterns.into_iter().map(Into::into).collect();
        let refuse = |message: String| Err(Error::config("parameter patterns", message));
        if patterns.iter().any(|pattern| body(pattern).is_empty()) {
            return refuse(format!("one of {patterns:?} is empty"));
        }
        if let Some(first) = patterns.first().filter(|first| first.starts_with('!')) {
            return refuse(format!(
                "'{first}' takes parameters out before any is chosen: begin with '*', say"
            ));
        }
        Ok(ParamPatterns(patterns))
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether the patterns choose the parameter `name`.
    pub fn matches(&self, name: &str) -> bool {
        let last = self.0.iter().rev().find(|pattern| covers(body(pattern), name));
        last.is_some_and(|pattern| !pattern.starts_with('!'))
    }

    /// Each pattern with whether it matches one of `names`.
    pub(crate) fn matched(&self, names: &[&str]) -> Vec<(String, bool)> {
        let matches = |pattern: &str| names.iter().any(|name| covers(body(pattern), name));
        self.0.iter().map(|pattern| (pattern.clone(), matches(pattern))).collect()
    }

    /// Errors, naming it, if a pattern matches none of `names`.
    pub fn check(&self, names: &[&str]) -> Result<()> {
        match self.matched(names).into_iter().find(|(_, matched)| !matched) {
            None => Ok(()),
            Some((pattern, _)) => {
                let (first, last) = (names.first().unwrap_or(&""), names.last().unwrap_or(&""));
                let message = format!(
                    "'{pattern}' matches none of {} parameters, from '{first}' to '{last}'",
                    names.len()
                );
                Err(Error::config("parameter patterns", message))
            }
        }
    }
}

/// The pattern without the mark that takes parameters out.
fn body(pattern: &str) -> &str {
    pattern.strip_prefix('!').unwrap_or(pattern)
}

/// Returns whether `pattern` matches a parameter or a module that it is in.
fn covers(pattern: &str, name: &str) -> bool {
    let modules = name.match_indices('.').map(|(end, _)| &name[..end]);
    modules.chain([name]).any(|path| matches(pattern, path))
}

/// Returns whether `pattern`, in which `*` stands for any text, matches all of `text`.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(mut text) = text.strip_prefix(start) else { return false };
    // Each piece at its first place leaves the most for those behind it; the last one ends the text.
    let mut pieces = rest.split('*').peekable();
    while let Some(piece) = pieces.next() {
        if pieces.peek().is_none() {
            return text.ends_with(piece);
        }
        match text.find(piece) {
            Some(at) => text = &text[at + piece.len()..],
            None => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_choose_parameters_and_whole_modules() -> Result<()> {
        for (pattern, chosen, others) in [
            ("wte", &["wte.weight", "wte"][..], &["wte2.weight", "blocks.wte.weight"][..]),
            ("blocks.1", &["blocks.1.attn.qkv.weight"], &["blocks.10.attn.qkv.weight"]),
            ("blocks.*.attn", &["blocks.1.attn.qkv.bias"], &["blocks.1.mlp.fc.bias"]),
            ("*.bias", &["a.bias", "a.b.bias"], &["bias", "a.bias2"]),
            ("*ln*", &["ln_f.weight", "blocks.0.ln1.bias"], &["blocks.0.mlp.fc.bias"]),
            ("a*b*b", &["abb", "axbxb"], &["ab", "axb"]),
            ("**", &["anything.at.all"], &[]),
        ] {
            let patterns = ParamPatterns::new([pattern])?;
            assert!(chosen.iter().all(|name| patterns.matches(name)), "{pattern}");
            assert!(others.iter().all(|name| !patterns.matches(name)), "{pattern}");
        }
        assert!(!ParamPatterns::default().matches("wte"));
        let again = ParamPatterns::new(["*", "!blocks", "blocks.0"])?;
        let names = ["wte.w", "blocks.0.w", "blocks.1.w"];
        assert_eq!(names.map(|name| again.matches(name)), [true, true, false]);
        Ok(())
    }

    #[test]
    fn errors_name_the_pattern() -> Result<()> {
        let message = |error: Error| error.to_string();
        let error = ParamPatterns::new(["wte", "!"]).map_err(message).unwrap_err();
        assert_eq!(error, r#"parameter patterns: one of ["wte", "!"] is empty"#);
        let error = ParamPatterns::new(["!head"]).map_err(message).unwrap_err();
        assert!(error.contains("'!head' takes parameters out before any is chosen"), "{error}");
        let patterns = ParamPatterns::new(["*", "!haed"])?;
        let error = patterns.check(&["wte.weight", "head.weight"]).map_err(message).unwrap_err();
        let shown = "matches none of 2 parameters, from 'wte.weight' to 'head.weight'";
        assert_eq!(error, format!("parameter patterns: '!haed' {shown}"));
        patterns.check(&["haed.weight"])
    }
}
