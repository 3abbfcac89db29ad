//! Undoes the tokenization of the WikiText files, with the replacements that Megatron-LM and lm-evaluation-harness list
//! (`wikitext_detokenizer`, `preprocess_wikitext.py`), in their order.
//!
//! Their rule for a literal `/' 5/` is left out: no text has it.

/// Replacements in front of those of brackets.
const FIRST: [(&str, &str); 10] = [
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    (" : ", ": "),
    (" ; ", "; "),
    (" . ", ". "),
    (" ! ", "! "),
    (" ? ", "? "),
    (" , ", ", "),
];

/// Brackets and quotes whose inner spaces go.
const PAIRS: [(char, char); 5] = [('(', ')'), ('[', ']'), ('{', '}'), ('"', '"'), ('\'', '\'')];

/// Replacements behind those of brackets.
const LAST: [(&str, &str); 8] = [
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" \u{b0} ", "\u{b0}"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
];

/// Returns the plain text of a WikiText file.
///
/// ```
/// use ferrotron_data::tasks::detokenize_wikitext;
/// let text = " = Title = \n It has 1 @,@ 000 words ( and \" quotes \" ) . \n";
/// assert_eq!(detokenize_wikitext(text), " = Title =\nIt has 1,000 words (and \"quotes\").\n");
/// ```
pub fn detokenize_wikitext(text: &str) -> String {
    let replaced = |text: String, list: &[(&str, &str)]| {
        list.iter().fold(text, |text, (from, to)| text.replace(from, to))
    };
    let text = replaced(text.to_string(), &FIRST);
    let text = PAIRS.iter().fold(text, |text, &(open, close)| close_up(&text, open, close));
    replaced(text, &LAST)
}

/// Removes white space behind each `open` and in front of the first `close` behind it.
fn close_up(text: &str, open: char, close: char) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(open) {
        let inner = &rest[start + open.len_utf8()..];
        let Some(length) = inner.find(close) else { break };
        out.push_str(&rest[..start]);
        out.push(open);
        out.push_str(inner[..length].trim());
        out.push(close);
        rest = &inner[length + close.len_utf8()..];
    }
    out + rest
}
