//! Reads the strings under some keys of a JSON object, without keeping its other values.

use serde::Deserializer;
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// Names of an object that a message has, and bytes of each.
const NAMES: usize = 8;
const NAME: usize = 80;

/// The strings under `keys` of the JSON object in a line; none if the line is blank. Errors with the reason.
///
/// Of a key that occurs several times the last value counts. Other values are read over, so a line takes no more memory
/// than its bytes and the strings.
pub fn json_texts(
    line: &[u8],
    number: u64,
    keys: &[String],
) -> Result<Option<Vec<String>>, String> {
    let line = match number {
        1 => line.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(line),
        _ => line,
    };
    if line.trim_ascii().is_empty() {
        return Ok(None);
    }
    let broken = |why: &str, column: usize| format!("no JSON object: {why}, column {column}");
    let line = std::str::from_utf8(line)
        .map_err(|error| broken("invalid unicode code point", error.valid_up_to() + 1))?;
    let mut input = serde_json::Deserializer::from_str(line);
    let object = Wanted(keys).deserialize(&mut input);
    let Object { values, names } =
        object.and_then(|object| input.end().map(|()| object)).map_err(|error| {
            let why = error.to_string();
            let why = why.rsplit_once(" at line ").map_or(why.as_str(), |(why, _)| why);
            broken(why, error.column())
        })?;
    let text = |(value, key): (Option<Found>, &String)| match value {
        Some(Found::Text(text)) => Ok(text),
        Some(Found::Other(kind)) => Err(format!("the value of '{key}' is no string, but {kind}")),
        None if names.is_empty() => Err(format!("no key '{key}'; it has none")),
        None => Err(format!("no key '{key}'; it has {}", names.join(", "))),
    };
    values.into_iter().zip(keys).map(text).collect::<Result<_, _>>().map(Some)
}

/// The object of a line, as far as it is wanted.
struct Object {
    /// The last value of each key.
    values: Vec<Option<Found>>,
    /// The first names, for messages.
    names: Vec<String>,
}

/// A value: a string, or another kind.
enum Found {
    Text(String),
    Other(&'static str),
}

/// Reads an object, and keeps the values of these keys.
struct Wanted<'a>(&'a [String]);

impl<'de> DeserializeSeed<'de> for Wanted<'_> {
    type Value = Object;

    fn deserialize<D: Deserializer<'de>>(self, input: D) -> Result<Object, D::Error> {
        input.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Wanted<'_> {
    type Value = Object;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object, A::Error> {
        let mut object =
            Object { values: self.0.iter().map(|_| None).collect(), names: Vec::new() };
        loop {
            let Some(place) = map.next_key_seed(Name(self.0, &mut object.names))? else {
                return Ok(object);
            };
            match place {
                Some(place) => {
                    // A value that no longer counts is freed first.
                    object.values[place] = None;
                    object.values[place] = Some(map.next_value_seed(Value)?);
                }
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
    }
}

/// Reads a name: its place among the keys, if it is one of them. The first names are kept.
struct Name<'a>(&'a [String], &'a mut Vec<String>);

impl<'de> DeserializeSeed<'de> for Name<'_> {
    type Value = Option<usize>;

    fn deserialize<D: Deserializer<'de>>(self, input: D) -> Result<Option<usize>, D::Error> {
        input.deserialize_str(self)
    }
}

impl Visitor<'_> for Name<'_> {
    type Value = Option<usize>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Option<usize>, E> {
        let Name(keys, names) = self;
        if names.len() < NAMES {
            let end = (0..=NAME).rev().find(|&end| name.is_char_boundary(end)).unwrap_or(0);
            let shown = match name.len() > NAME {
                true => format!("'{}..'", &name[..end]),
                false => format!("'{name}'"),
            };
            if !names.contains(&shown) {
                names.push(shown);
            }
        }
        Ok(keys.iter().position(|key| key == name))
    }
}

/// Reads a value, and keeps it if it is a string.
struct Value;

impl<'de> DeserializeSeed<'de> for Value {
    type Value = Found;

    fn deserialize<D: Deserializer<'de>>(self, input: D) -> Result<Found, D::Error> {
        input.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Value {
    type Value = Found;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Found, E> {
        Ok(Found::Text(text.to_string()))
    }

    fn visit_unit<E: Error>(self) -> Result<Found, E> {
        Ok(Found::Other("null"))
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Found, E> {
        Ok(Found::Other("a boolean"))
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<Found, E> {
        Ok(Found::Other("a number"))
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Found, E> {
        Ok(Found::Other("a number"))
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Found, E> {
        Ok(Found::Other("a number"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Found, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Found::Other("a list"))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Found, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Found::Other("an object"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(line: &str, keys: &[&str]) -> Result<Option<Vec<String>>, String> {
        let keys: Vec<String> = keys.iter().map(|key| key.to_string()).collect();
        json_texts(line.as_bytes(), 1, &keys)
    }

    #[test]
    fn the_last_value_of_a_key_counts() {
        for (line, want) in [
            (r#"{"a": "1", "b": [1, {"a": "no"}], "a": "2"}"#, "2"),
            (r#"{"a": 7, "\u0061": "\u00e9\n"}"#, "\u{e9}\n"),
            (r#" {"b": {"c": [1e999, null, "\ud800"]}, "a": ""} "#, ""),
        ] {
            assert_eq!(texts(line, &["a"]).unwrap().unwrap(), [want], "{line}");
        }
        let both = texts(r#"{"a": "1", "b": "2"}"#, &["b", "a"]);
        assert_eq!(both.unwrap().unwrap(), ["2", "1"]);
        assert_eq!(texts(" \r", &["a"]), Ok(None));
    }

    #[test]
    fn other_values_and_lines_are_refused_with_their_kind() {
        for (value, kind) in [
            ("null", "null"),
            ("true", "a boolean"),
            ("1", "a number"),
            ("-1", "a number"),
            ("1.5", "a number"),
            ("[[1], {}]", "a list"),
            (r#"{"a": [1]}"#, "an object"),
        ] {
            let want = format!("the value of 'a' is no string, but {kind}");
            let line = format!(r#"{{"a": "", "a": {value}}}"#);
            assert_eq!(texts(&line, &["a"]), Err(want), "{line}");
        }
        for (line, want) in [
            ("{}", "no key 'a'; it has none"),
            (r#"{"c": 1, "b": 2, "c": 3}"#, "no key 'a'; it has 'c', 'b'"),
            ("{} {}", "no JSON object: trailing characters, column 4"),
            ("[1]", "no JSON object: invalid type: sequence, expected a map, column 0"),
            (r#"{"a": [1, 2}"#, "no JSON object: expected `,` or `]`, column 12"),
        ] {
            assert_eq!(texts(line, &["a"]), Err(want.to_string()), "{line}");
        }
        let long = "\u{4e2d}".repeat(1000);
        let why = texts(&format!(r#"{{"{long}": 1}}"#), &["a"]).unwrap_err();
        assert!(why.len() < 120 && why.ends_with("\u{4e2d}..'"), "{why}");
        let many: Vec<String> = (0..20).map(|i| format!(r#""{i}": 1"#)).collect();
        let why = texts(&format!("{{{}}}", many.join(", ")), &["a"]).unwrap_err();
        assert!(why.ends_with("'6', '7'"), "{why}");
        let invalid = json_texts(b"{\"text\": \"\xff\"}", 1, &["text".to_string()]);
        let want = "no JSON object: invalid unicode code point, column 11";
        assert_eq!(invalid, Err(want.to_string()));
    }
}
