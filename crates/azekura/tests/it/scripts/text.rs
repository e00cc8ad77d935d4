//! Keys, values and bounds as text.
//!
//! - `k00..20/2`: the keys `k00`, `k02` … `k18`; `""`: the empty key.
//! - `v{}x*30`: the value `v07x`, 30 times, where `07` is the number of the key.
//! - `a..c`, `a..=c`, `>a..c`, `..c`, `prefix=a`: bounds of an iterator.

use std::ops::Bound;
use std::time::Duration;

/// A key of a script with the text that replaces `{}` in its value: its number, or the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ScriptKey {
    pub(super) key: String,
    number: String,
}

impl ScriptKey {
    /// The value that `pattern` describes for this key.
    pub(super) fn value(&self, pattern: &str) -> Vec<u8> {
        let pattern = pattern.replace("{}", &self.number);
        match pattern.split_once('*') {
            Some((unit, count)) => unit.repeat(parse_number(count)).into_bytes(),
            None => pattern.into_bytes(),
        }
    }
}

/// The keys that a word describes: itself, or a sequence of numbered keys.
pub(super) fn parse_keys(word: &str) -> Vec<ScriptKey> {
    let word = if word == "\"\"" { "" } else { word };
    let Some((first, rest)) = word.split_once("..") else {
        return vec![ScriptKey { key: word.into(), number: word.into() }];
    };
    let (end, step) = rest.split_once('/').unwrap_or((rest, "1"));
    let stem = first.trim_end_matches(|c: char| c.is_ascii_digit());
    let digits = &first[stem.len()..];
    let numbers = (parse_number::<u32>(digits)..parse_number(end)).step_by(parse_number(step));
    let width = digits.len();
    let texts = numbers.map(|n| format!("{n:0width$}"));
    texts.map(|number| ScriptKey { key: format!("{stem}{number}"), number }).collect()
}

pub(super) fn parse_number<N: std::str::FromStr>(word: &str) -> N {
    word.parse().unwrap_or_else(|_| panic!("{word:?} is no number"))
}

/// A time to live of this many milliseconds.
pub(super) fn parse_ttl(word: &str) -> Duration {
    Duration::from_millis(parse_number(word))
}

/// The bounds of an iterator.
pub(super) enum ScriptBounds {
    All,
    Prefix(String),
    Range(Bound<String>, Bound<String>),
}

/// The bounds that a word describes; `None` if the word has another meaning.
pub(super) fn parse_bounds(word: &str) -> Option<ScriptBounds> {
    if let Some(prefix) = word.strip_prefix("prefix=") {
        return Some(ScriptBounds::Prefix(prefix.into()));
    }
    let (low, high) = word.split_once("..")?;
    let low = match low.strip_prefix('>') {
        Some(key) => Bound::Excluded(key.to_owned()),
        None if low.is_empty() => Bound::Unbounded,
        None => Bound::Included(low.to_owned()),
    };
    let high = match high.strip_prefix('=') {
        Some(key) => Bound::Included(key.to_owned()),
        None if high.is_empty() => Bound::Unbounded,
        None => Bound::Excluded(high.to_owned()),
    };
    Some(ScriptBounds::Range(low, high))
}

/// A key or value as text: a long repetition as its unit and the number of units.
pub(super) fn show_bytes(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "\"\"".into();
    }
    if bytes.len() <= 16 {
        return bytes.escape_ascii().to_string();
    }
    let is_unit =
        |len: &usize| bytes.len().is_multiple_of(*len) && bytes.chunks(*len).all(|chunk| chunk == &bytes[..*len]);
    match (1..=16).find(is_unit) {
        Some(len) => format!("{}*{}", bytes[..len].escape_ascii(), bytes.len() / len),
        None => format!("{}… ({} bytes)", bytes[..16].escape_ascii(), bytes.len()),
    }
}

/// Appends the words to `output` in lines of at most 100 columns.
pub(super) fn append_wrapped(output: &mut String, words: &[String]) {
    let mut columns = 0;
    for word in words {
        if columns > 0 && columns + word.len() > 100 {
            output.push('\n');
            columns = 0;
        }
        if columns > 0 {
            output.push(' ');
        }
        output.push_str(word);
        columns += word.len() + 1;
    }
    output.push('\n');
}

#[test]
fn patterns_give_keys_and_values() {
    let keys = parse_keys("k08..12/2");
    assert_eq!(keys.iter().map(|key| key.key.as_str()).collect::<Vec<_>>(), ["k08", "k10"]);
    assert_eq!(keys[1].value("<{}>*3"), b"<10><10><10>");
    assert_eq!(parse_keys("plain")[0].value("x{}"), b"xplain");
}

#[test]
fn long_values_are_shown_by_their_unit() {
    assert_eq!(show_bytes(b""), "\"\"");
    assert_eq!(show_bytes(b"short\n"), "short\\n");
    assert_eq!(show_bytes(&[b'a'; 40]), "a*40");
    assert_eq!(show_bytes(&b"v10x".repeat(9)), "v10x*9");
    let mut damaged = b"v10x".repeat(9);
    damaged[20] = b'!';
    assert_eq!(show_bytes(&damaged), "v10xv10xv10xv10x… (36 bytes)");
}
