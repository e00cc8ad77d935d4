//! One Rust file, split as far as the rules need it: code, comments, strings, tests, functions.
//!
//! A scanner, not a parser: it recognizes strings, characters, lifetimes and comments, and matches brackets.

use std::ops::Range;

pub(crate) struct RustSource {
    pub(crate) text: String,
    /// The text with comments and the insides of strings and characters blanked, byte for byte.
    pub(crate) code: String,
    /// Comments with the offset of their first `/`.
    pub(crate) comments: Vec<(usize, String)>,
    /// String literals with the offset of their opening quote.
    pub(crate) strings: Vec<(usize, String)>,
    /// Offsets that are compiled for tests only.
    tests: Vec<Range<usize>>,
    line_starts: Vec<usize>,
}

/// A function with a body.
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) first_line: usize,
    pub(crate) last_line: usize,
}

impl RustSource {
    pub(crate) fn new(text: String) -> RustSource {
        let mut scanner =
            SourceScanner { text: text.as_bytes(), at: 0, code: text.clone().into_bytes(), tokens: Vec::new() };
        scanner.run();
        let SourceScanner { code, tokens: pieces, .. } = scanner;
        let code = String::from_utf8(code).expect("whole characters are blanked");
        let of = |kind: TokenKind| {
            let wanted = pieces.iter().filter(move |(k, _)| *k == kind);
            wanted.map(|(_, range)| (range.start, text[range.clone()].to_string())).collect::<Vec<_>>()
        };
        let (comments, strings) = (of(TokenKind::Comment), of(TokenKind::String));
        let line_starts = std::iter::once(0).chain(text.match_indices('\n').map(|(i, _)| i + 1)).collect();
        let tests = test_ranges(&code);
        RustSource { text, code, comments, strings, tests, line_starts }
    }

    /// Counted from 1.
    pub(crate) fn line_of(&self, offset: usize) -> usize {
        self.line_starts.partition_point(|start| *start <= offset)
    }

    /// Lines in the file.
    pub(crate) fn lines(&self) -> usize {
        self.text.lines().count()
    }

    /// Lines that are not compiled for tests only.
    pub(crate) fn lines_without_tests(&self) -> usize {
        let tests: usize = self.tests.iter().map(|r| self.line_of(r.end - 1) - self.line_of(r.start) + 1).sum();
        self.lines().saturating_sub(tests)
    }

    pub(crate) fn is_test(&self, offset: usize) -> bool {
        self.tests.iter().any(|range| range.contains(&offset))
    }

    pub(crate) fn mark_as_test(&mut self) {
        self.tests = std::iter::once(0..self.text.len().max(1)).collect();
    }

    /// The words of the code with their offsets: identifiers, keywords, and numbers.
    pub(crate) fn words(&self) -> impl Iterator<Item = (usize, &str)> {
        words_from(&self.code, 0)
    }

    /// Names of `mod name;` under `cfg(test)` or the feature `testing`.
    pub(crate) fn test_modules(&self) -> impl Iterator<Item = &str> {
        self.modules().filter(|(offset, _)| self.is_test(*offset)).map(|(_, name)| name)
    }

    /// Every `mod name;` or `mod name {` with its offset.
    pub(crate) fn modules(&self) -> impl Iterator<Item = (usize, &str)> {
        self.words().filter(|(_, word)| *word == "mod").filter_map(|(at, _)| {
            let (_, name) = words_from(&self.code, at + 3).next()?;
            Some((at, name))
        })
    }

    /// The string literal that the code at `offset` begins with, after blanks and opening brackets.
    pub(crate) fn string_at(&self, offset: usize) -> Option<&str> {
        let skipped = self.code[offset..].find(|c: char| !c.is_whitespace() && c != '(')?;
        let quoted = self.strings.iter().find(|(at, _)| *at == offset + skipped)?;
        Some(quoted.1.trim_matches('"'))
    }

    /// Functions with a body, those inside of others too.
    pub(crate) fn functions(&self) -> Vec<Function> {
        let mut found = Vec::new();
        for (at, _) in self.words().filter(|(_, word)| *word == "fn") {
            let after = &self.code[at + 2..];
            if !after.trim_start().starts_with(|c: char| c.is_alphabetic() || c == '_') {
                continue; // the type of a function pointer
            }
            let name = words_from(&self.code, at + 2).next().map_or("", |(_, name)| name);
            let Some(open) = find_outside_brackets(&self.code, at, |byte| matches!(byte, b'{' | b';')) else {
                continue;
            };
            if self.code.as_bytes()[open] == b'{' {
                let end = matching_bracket(&self.code, open);
                let (first_line, last_line) = (self.line_of(at), self.line_of(end));
                found.push(Function { name: name.into(), first_line, last_line });
            }
        }
        found
    }
}

/// Words of `code` from offset `from` on.
pub(crate) fn words_from(code: &str, from: usize) -> impl Iterator<Item = (usize, &str)> {
    let mut at = from;
    std::iter::from_fn(move || {
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        at += code[at..].find(is_word)?;
        let len = code[at..].find(|c| !is_word(c)).unwrap_or(code.len() - at);
        let word = (at, &code[at..at + len]);
        at += len;
        Some(word)
    })
}

/// The first offset from `from` on, outside of round and square brackets, whose byte is `wanted`.
fn find_outside_brackets(code: &str, from: usize, wanted: impl Fn(u8) -> bool) -> Option<usize> {
    let mut depth = 0i32;
    for (i, byte) in code.bytes().enumerate().skip(from) {
        match byte {
            _ if depth == 0 && wanted(byte) => return Some(i),
            b'(' | b'[' => depth += 1,
            b')' | b']' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// The offset of the bracket that closes the one at `open`, or the end of the code.
pub(crate) fn matching_bracket(code: &str, open: usize) -> usize {
    let mut depth = 0i32;
    for (i, byte) in code.bytes().enumerate().skip(open) {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return i;
        }
    }
    code.len().saturating_sub(1)
}

fn test_ranges(code: &str) -> Vec<Range<usize>> {
    if code.contains("#![cfg(test)]") {
        return std::iter::once(0..code.len()).collect();
    }
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for needle in ["#[cfg(test)]", "#[cfg(all(test", "#[cfg(any(test, feature ="] {
        for (start, _) in code.match_indices(needle) {
            if !ranges.iter().any(|range| range.contains(&start)) {
                ranges.push(start..item_end(code, start) + 1);
            }
        }
    }
    ranges
}

/// The end of the item (or field, or match arm) whose first attribute is at `start`.
fn item_end(code: &str, start: usize) -> usize {
    const ITEMS: &[&str] = &[
        "pub",
        "fn",
        "mod",
        "use",
        "impl",
        "struct",
        "enum",
        "const",
        "static",
        "type",
        "trait",
        "unsafe",
        "extern",
        "let",
        "async",
        "macro_rules",
    ];
    let mut at = start;
    while code[at..].starts_with('#') {
        let close = matching_bracket(code, at + code[at..].find('[').unwrap_or(0));
        at = close + 1 + code[close + 1..].find(|c: char| !c.is_whitespace()).unwrap_or(0);
    }
    let is_item = words_from(code, at).next().is_some_and(|(_, word)| ITEMS.contains(&word));
    let ends = |byte: u8| matches!(byte, b';' | b'{' | b'}') || (byte == b',' && !is_item);
    match find_outside_brackets(code, at, ends) {
        Some(open) if code.as_bytes()[open] == b'{' => matching_bracket(code, open),
        Some(end) => end,
        None => code.len().saturating_sub(1),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum TokenKind {
    Comment,
    String,
    Char,
}

struct SourceScanner<'a> {
    text: &'a [u8],
    at: usize,
    code: Vec<u8>,
    tokens: Vec<(TokenKind, Range<usize>)>,
}

impl SourceScanner<'_> {
    fn run(&mut self) {
        while self.at < self.text.len() {
            let start = self.at;
            let rest = &self.text[start..];
            let kind = if rest.starts_with(b"//") {
                self.at += rest.iter().position(|b| *b == b'\n').unwrap_or(rest.len());
                Some(TokenKind::Comment)
            } else if rest.starts_with(b"/*") {
                self.block_comment();
                Some(TokenKind::Comment)
            } else if rest[0] == b'"' {
                self.quoted(b'"');
                Some(TokenKind::String)
            } else if rest[0] == b'r' && self.at_word_start() && self.raw_string() {
                Some(TokenKind::String)
            } else if rest[0] == b'\'' && is_char_literal(rest) {
                self.quoted(b'\'');
                Some(TokenKind::Char)
            } else {
                self.at += 1;
                None
            };
            if let Some(kind) = kind {
                self.push_token(kind, start);
            }
        }
    }

    /// Whether the current `r` begins a word; `br` and `cr` count as well.
    fn at_word_start(&self) -> bool {
        let is_word = |i: usize| self.text.get(i).is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_');
        match self.at.checked_sub(1) {
            None => true,
            Some(i) if matches!(self.text[i], b'b' | b'c') => i.checked_sub(1).is_none_or(|i| !is_word(i)),
            Some(i) => !is_word(i),
        }
    }

    fn push_token(&mut self, kind: TokenKind, start: usize) {
        for byte in &mut self.code[start..self.at] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        if kind == TokenKind::String {
            // A string stays visible as a pair of quotes, so that `string_at` can find it.
            self.code[start] = b'"';
            self.code[self.at - 1] = b'"';
        }
        self.tokens.push((kind, start..self.at));
    }

    fn block_comment(&mut self) {
        let mut depth = 0;
        while self.at < self.text.len() {
            let rest = &self.text[self.at..];
            let step = match rest {
                [b'/', b'*', ..] => {
                    depth += 1;
                    2
                }
                [b'*', b'/', ..] => {
                    depth -= 1;
                    2
                }
                _ => 1,
            };
            self.at += step;
            if depth == 0 {
                return;
            }
        }
    }

    fn quoted(&mut self, quote: u8) {
        self.at += 1;
        while let Some(byte) = self.text.get(self.at) {
            self.at += if *byte == b'\\' { 2 } else { 1 };
            if *byte == quote {
                break;
            }
        }
        self.at = self.at.min(self.text.len());
    }

    /// Skips `r"…"` or `r#"…"#`; returns false for anything else, such as `r#type`.
    fn raw_string(&mut self) -> bool {
        let rest = &self.text[self.at + 1..];
        let hashes = rest.iter().take_while(|b| **b == b'#').count();
        if rest.get(hashes) != Some(&b'"') {
            return false;
        }
        let end: Vec<u8> = std::iter::once(b'"').chain(std::iter::repeat_n(b'#', hashes)).collect();
        let inside = &rest[hashes + 1..];
        let len = inside.windows(end.len()).position(|w| w == end).map_or(inside.len(), |i| i + end.len());
        self.at += 1 + hashes + 1 + len;
        true
    }
}

/// Distinguishes `'a'` and `'\n'` from the lifetime `'a`.
fn is_char_literal(rest: &[u8]) -> bool {
    let Some(first) = rest.get(1) else { return false };
    let len = match first {
        b'\\' => return true,
        0..0x80 => 1,
        0xc0..0xe0 => 2,
        0xe0..0xf0 => 3,
        _ => 4,
    };
    rest.get(1 + len) == Some(&b'\'')
}
