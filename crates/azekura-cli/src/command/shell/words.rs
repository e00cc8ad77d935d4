//! Splits a line into words. Quotes and escapes allow any bytes in a word; the escapes are those that `scan` prints.

use crate::encoding;

/// Help text about words.
pub(super) const WORDS_HELP: &str = "\
Words are separated by spaces. A word in 'single quotes' is kept as it is. In \"double quotes\" and without quotes, \
the escapes that `scan` prints are replaced: \\n \\t \\r \\\\ \\xNN \\u{N}; and \\\" \\' and a backslash before a \
space. A line that begins with # is a comment.";

/// A word, and where it begins.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Word {
    pub(super) bytes: Vec<u8>,
    /// Position of its first byte in the line, of the quote if it begins with one.
    pub(super) start: usize,
    /// Whether the line ends within double quotes of this word.
    pub(super) is_open: bool,
    /// Why the word is not valid.
    problem: Option<String>,
}

/// The words of a line.
///
/// # Errors
/// A clause about a quote that is not closed or an unknown escape.
pub(super) fn split(line: &[u8]) -> Result<Vec<Vec<u8>>, String> {
    let mut at = 0;
    let words = std::iter::from_fn(|| next_word(line, &mut at));
    words.map(|word| word.problem.map_or(Ok(word.bytes), Err)).collect()
}

/// The words before the end of an unfinished line, and the word at its end, which may be empty.
pub(super) fn split_unfinished(line: &str) -> (Vec<Vec<u8>>, Word) {
    let mut at = 0;
    let mut words = Vec::new();
    while let Some(word) = next_word(line.as_bytes(), &mut at) {
        if at == line.len() {
            return (words, word);
        }
        words.push(word.bytes);
    }
    (words, Word { start: line.len(), ..Word::default() })
}

/// The next word from position `at` on. Moves `at` behind the word.
fn next_word(line: &[u8], at: &mut usize) -> Option<Word> {
    *at += line[*at..].iter().position(|byte| !byte.is_ascii_whitespace())?;
    let mut word = Word { start: *at, ..Word::default() };
    let mut quote = None;
    while let Some(&byte) = line.get(*at) {
        *at += 1;
        match (quote, byte) {
            (None, byte) if byte.is_ascii_whitespace() => {
                *at -= 1;
                break;
            }
            (None, b'"' | b'\'') => quote = Some((byte, *at)),
            (Some((open, _)), byte) if byte == open => quote = None,
            (None | Some((b'"', _)), b'\\') => match escape(&line[*at..]) {
                Some((bytes, len)) => {
                    word.bytes.extend(bytes);
                    *at += len;
                }
                None => {
                    let rest = String::from_utf8_lossy(&line[*at..]);
                    let text: String = rest.chars().take(1).collect();
                    word.problem.get_or_insert(format!("\"\\{text}\" is not an escape; a backslash is \"\\\\\""));
                    word.bytes.push(byte);
                }
            },
            (_, byte) => word.bytes.push(byte),
        }
    }
    if let Some((open, column)) = quote {
        word.is_open = open == b'"';
        word.problem.get_or_insert(format!("the quote in column {column} is not closed"));
    }
    Some(word)
}

/// The bytes of the escape behind a backslash, and its length.
fn escape(rest: &[u8]) -> Option<(Vec<u8>, usize)> {
    let byte = match rest.first()? {
        b'n' => b'\n',
        b't' => b'\t',
        b'r' => b'\r',
        b'x' => return Some((encoding::from_hex(rest.get(1..3)?)?, 3)),
        b'u' => {
            let len = rest.iter().take(10).position(|byte| *byte == b'}')?;
            let digits = std::str::from_utf8(&rest[1..len]).ok()?.strip_prefix('{')?;
            let c = char::from_u32(u32::from_str_radix(digits, 16).ok()?)?;
            return Some((c.to_string().into_bytes(), len + 1));
        }
        byte @ (b'\\' | b'"' | b'\'' | b' ' | b'#') => *byte,
        _ => return None,
    };
    Some((vec![byte], 1))
}

/// Text that [`split`] reads as one word with these bytes, in double quotes if needed or if `always` is set.
pub(super) fn quoted(bytes: &[u8], always: bool) -> String {
    let text = encoding::escaped(bytes);
    let needs_quotes = |c: char| c.is_whitespace() || c == '"' || c == '\'';
    if always || text.is_empty() || text.starts_with('#') || text.contains(needs_quotes) {
        return format!("\"{}\"", text.replace('"', "\\\""));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        split(line.as_bytes()).unwrap().iter().map(|word| encoding::escaped(word)).collect()
    }

    #[test]
    fn quotes_and_escapes_make_one_word() {
        assert_eq!(words("  put a\tb  "), ["put", "a", "b"]);
        assert_eq!(words(r#"put "a b" 'c "d' e" f"g"#), ["put", "a b", "c \"d", "e fg"]);
        assert_eq!(words(r#"'' "" \  \\"#), ["", "", " ", "\\\\"]);
        assert_eq!(words(r#"a\x00\xFF "\n\t\u{e9}" '\n'"#), ["a\\x00\\xff", "\\n\\té", "\\\\n"]);
        for (bad, why) in [
            ("put \"a", "column 5"),
            ("'", "column 1"),
            (r"a\q", r#""\q" is not an escape"#),
            (r"\x0", "not an escape"),
            (r"\u{110000}", "not an escape"),
            (r"\u{+41}x\", "not an escape"),
            ("a\\", "not an escape"),
        ] {
            assert!(split(bad.as_bytes()).unwrap_err().contains(why), "{bad}: {:?}", split(bad.as_bytes()));
        }
    }

    #[test]
    fn quoted_words_are_read_back() {
        for bytes in [&b""[..], b"plain", b"two words", b"\"'\\", b"\0\xff", b"#", "é\u{85}\u{2028}".as_bytes()] {
            for always in [false, true] {
                let text = quoted(bytes, always);
                assert_eq!(split(text.as_bytes()).unwrap(), [bytes], "{text}");
            }
        }
        assert_eq!((quoted(b"a", false), quoted(b"a", true)), ("a".into(), "\"a\"".into()));
    }

    #[test]
    fn unfinished_line_has_last_word() {
        let (before, last) = split_unfinished("get a");
        assert_eq!((before.len(), last), (1, Word { bytes: b"a".into(), start: 4, ..Word::default() }));
        let (before, last) = split_unfinished("get a ");
        assert_eq!((before.len(), last.start, last.bytes.len()), (2, 6, 0));
        let (before, last) = split_unfinished("get \"a b");
        assert_eq!((before.len(), last.bytes, last.start, last.is_open), (1, b"a b".into(), 4, true));
        assert_eq!(split_unfinished("").1, Word::default());
    }
}
