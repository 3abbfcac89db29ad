//! Escapes texts of runs, which may hold anything, for HTML, and numbers in words.

/// A text between tags or in a quoted attribute.
pub fn html(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            character => escaped.push(character),
        }
    }
    escaped
}

/// JSON inside a `script` element, which `</script` would end.
pub fn json(value: &serde_json::Value) -> String {
    value.to_string().replace('<', "\\u003c")
}

/// A number of at most five digits, with a power of ten if it is very small or large.
pub fn number(value: f64) -> String {
    let size = value.abs();
    match size {
        _ if !value.is_finite() => value.to_string(),
        0.0 => "0".to_string(),
        _ if !(1e-3..1e7).contains(&size) => {
            let text = format!("{value:.3e}");
            let (mantissa, power) = text.split_once('e').expect("the format has an exponent");
            match mantissa.contains('.') {
                true => format!("{}e{power}", mantissa.trim_end_matches('0').trim_end_matches('.')),
                false => text,
            }
        }
        _ => {
            let digits = (4 - size.log10().floor() as i32).max(0) as usize;
            let text = format!("{value:.digits$}");
            match text.contains('.') {
                true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
                false => text,
            }
        }
    }
}

/// A count with thin spaces between groups of three digits.
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push('\u{202f}');
        }
        grouped.push(digit);
    }
    grouped
}

/// A duration in the two largest units.
pub fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        _ if seconds < 60.0 => format!("{} s", number((seconds * 10.0).round() / 10.0)),
        0..3600 => format!("{} min {} s", whole / 60, whole % 60),
        3600..86_400 => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
        _ => format!("{} d {} h", whole / 86_400, whole % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_cannot_become_markup() {
        assert_eq!(html("<a href='x'>\"&"), "&lt;a href=&#39;x&#39;&gt;&quot;&amp;");
        let value = serde_json::json!("</script><b>");
        assert_eq!(json(&value), "\"\\u003c/script>\\u003cb>\"");
    }

    #[test]
    fn numbers_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (2.5, "2.5"),
            (2.71234567, "2.7123"),
            (123456.7, "123457"),
            (0.0003, "3e-4"),
            (1.23456e9, "1.235e9"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(number(value), text);
        }
        assert_eq!(count(1234567), "1\u{202f}234\u{202f}567");
        assert_eq!(count(12), "12");
        assert_eq!(
            [duration(4.26), duration(75.0), duration(4000.0), duration(100_000.0)],
            ["4.3 s", "1 min 15 s", "1 h 6 min", "1 d 3 h"]
        );
    }
}
