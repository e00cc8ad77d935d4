//! Encodings of bytes on the command line and in the output: raw, escaped, hexadecimal, base64, JSON.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::fmt::Write;

use base64::Engine;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use clap::ValueEnum;
use serde_json::{Map, Value};

use crate::error::{CliError, Result};

/// The bytes of an argument.
///
/// # Errors
/// `Usage` if `hex` is set and `text` is not hexadecimal.
pub(crate) fn argument_bytes(text: &OsStr, hex: bool) -> Result<Vec<u8>> {
    let bytes = text.as_encoded_bytes();
    if !hex {
        return Ok(bytes.to_vec());
    }
    from_hex(bytes).ok_or_else(|| {
        CliError::usage(format!("\"{}\" is not hexadecimal: each byte needs two digits 0-9a-f", text.display()))
    })
}

/// Two lowercase digits per byte.
pub(crate) fn to_hex(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        write!(out, "{byte:02x}").expect("writing to a string cannot fail");
    }
    out
}

/// Decodes two digits per byte, in either case; `None` for anything else.
pub(crate) fn from_hex(text: &[u8]) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) {
        return None;
    }
    let digit = |c: u8| (c as char).to_digit(16).map(|d| d as u8);
    text.chunks_exact(2).map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?)).collect()
}

/// One line of text: printable characters unchanged, all others as `\n`, `\t`, `\\`, `\xNN` or `\u{N}`.
pub(crate) fn escaped(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\\' | '\t' | '\n' | '\r' => out.extend(c.escape_default()),
                '\0'..='\x1f' | '\x7f' => push_byte(&mut out, c as u8),
                c if c.is_control() => out.extend(c.escape_unicode()),
                c => out.push(c),
            }
        }
        chunk.invalid().iter().for_each(|&byte| push_byte(&mut out, byte));
    }
    out
}

fn push_byte(out: &mut String, byte: u8) {
    write!(out, "\\x{byte:02x}").expect("writing to a string cannot fail");
}

/// Hexadecimal if `hex` is set, else one escaped line.
pub(crate) fn display_bytes(bytes: &[u8], hex: bool) -> String {
    if hex { to_hex(bytes) } else { escaped(bytes) }
}

/// Bytes as text in CSV, JSON lines and JSON output. The name of a column or field states its encoding: `key` is UTF-8,
/// `key_hex`, `key_base64` and `key_escape` are the others.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TextEncoding {
    /// UTF-8 text; other bytes have no representation.
    Utf8,
    /// Two hexadecimal digits for each byte.
    Hex,
    /// Base64 with the standard alphabet, with or without padding.
    Base64,
    /// UTF-8 text with `\\`, `\t`, `\n`, `\r`, `\xNN` and `\u{N}`, as `scan` prints it.
    Escape,
}

/// Decodes base64 with and without padding; encodes with padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

impl TextEncoding {
    pub(crate) const ALL: [TextEncoding; 4] =
        [TextEncoding::Utf8, TextEncoding::Hex, TextEncoding::Base64, TextEncoding::Escape];

    /// The encoding of output: UTF-8 if `is_text`, else hexadecimal.
    pub(crate) fn for_text(is_text: bool) -> TextEncoding {
        if is_text { TextEncoding::Utf8 } else { TextEncoding::Hex }
    }

    fn suffix(self) -> &'static str {
        match self {
            TextEncoding::Utf8 => "",
            TextEncoding::Hex => "_hex",
            TextEncoding::Base64 => "_base64",
            TextEncoding::Escape => "_escape",
        }
    }

    /// The column or field that holds `name` ("key" or "value") in this encoding.
    pub(crate) fn field(self, name: &str) -> String {
        format!("{name}{}", self.suffix())
    }

    /// The encoding that the column or field `field` states for `name`; `None` if it is not a field of `name`.
    pub(crate) fn of_field(field: &str, name: &str) -> Option<TextEncoding> {
        let suffix = field.strip_prefix(name)?;
        TextEncoding::ALL.into_iter().find(|encoding| encoding.suffix() == suffix)
    }

    /// The text of `bytes`; `None` if they are not UTF-8 and the encoding is.
    pub(crate) fn encode(self, bytes: &[u8]) -> Option<Cow<'_, str>> {
        match self {
            TextEncoding::Utf8 => std::str::from_utf8(bytes).ok().map(Cow::Borrowed),
            TextEncoding::Hex => Some(to_hex(bytes).into()),
            TextEncoding::Base64 => Some(BASE64.encode(bytes).into()),
            TextEncoding::Escape => Some(escaped(bytes).into()),
        }
    }

    /// The bytes of `text`. The error is the end of a sentence about the text.
    pub(crate) fn decode(self, text: &str) -> Result<Vec<u8>, String> {
        match self {
            TextEncoding::Utf8 => Ok(text.as_bytes().to_vec()),
            TextEncoding::Hex => {
                from_hex(text.as_bytes()).ok_or("is not hexadecimal: each byte needs two digits 0-9a-f".into())
            }
            TextEncoding::Base64 => BASE64.decode(text).map_err(|error| format!("is not base64: {error}")),
            TextEncoding::Escape => unescaped(text),
        }
    }
}

/// The bytes of a text that [`escaped`] wrote.
fn unescaped(text: &str) -> Result<Vec<u8>, String> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        out.extend_from_slice(before.as_bytes());
        let bad = || {
            let start: String = after.chars().take(4).collect();
            format!("contains \"\\{start}\", which is no escape: \\\\, \\t, \\n, \\r, \\xNN and \\u{{N}} are")
        };
        let escape = after.chars().next().ok_or_else(bad)?;
        rest = &after[escape.len_utf8()..];
        match escape {
            '\\' => out.push(b'\\'),
            't' => out.push(b'\t'),
            'n' => out.push(b'\n'),
            'r' => out.push(b'\r'),
            'x' => {
                out.extend(rest.get(..2).and_then(|digits| from_hex(digits.as_bytes())).ok_or_else(bad)?);
                rest = &rest[2..];
            }
            'u' => {
                let (digits, end) = rest.strip_prefix('{').and_then(|rest| rest.split_once('}')).ok_or_else(bad)?;
                let c = u32::from_str_radix(digits, 16).ok().and_then(char::from_u32).ok_or_else(bad)?;
                out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
                rest = end;
            }
            _ => return Err(bad()),
        }
    }
    out.extend_from_slice(rest.as_bytes());
    Ok(out)
}

/// Adds `bytes` under `name` if they are UTF-8, else in hexadecimal under `name_hex`, as also if `hex` is set.
pub(crate) fn put_json(object: &mut Map<String, Value>, name: &str, bytes: &[u8], hex: bool) {
    let encoding = TextEncoding::for_text(!hex && std::str::from_utf8(bytes).is_ok());
    put_json_as(object, name, bytes, encoding);
}

/// Adds `bytes` in `encoding` under the field that states it; returns whether the encoding can represent them.
pub(crate) fn put_json_as(object: &mut Map<String, Value>, name: &str, bytes: &[u8], encoding: TextEncoding) -> bool {
    let text = encoding.encode(bytes);
    text.map(|text| object.insert(encoding.field(name), Value::from(text.into_owned()))).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_round_trips_and_rejects_other_text() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(from_hex(to_hex(&all).as_bytes()), Some(all));
        assert_eq!(from_hex(b"CaFe"), Some(vec![0xca, 0xfe]));
        for bad in ["a", "0g", "+1", "a b ", "\u{e9}"] {
            assert_eq!(from_hex(bad.as_bytes()), None, "{bad}");
        }
        assert!(argument_bytes(OsStr::new("xyz"), true).is_err());
    }

    #[test]
    fn encodings_round_trip_every_byte() {
        let all: Vec<u8> = (0..=255).collect();
        let text = "\0\x7f\u{80}\u{9f}f\u{fc}r \\x41 \u{1f600}\"'\r\n".as_bytes();
        for bytes in [&b""[..], b"text", b"\\", b"\xff\\xfe", &all, text] {
            for encoding in TextEncoding::ALL {
                let Some(encoded) = encoding.encode(bytes) else {
                    assert!(encoding == TextEncoding::Utf8 && std::str::from_utf8(bytes).is_err());
                    continue;
                };
                assert_eq!(encoding.decode(&encoded).as_deref(), Ok(bytes), "{encoding:?} {encoded}");
                assert_eq!(TextEncoding::of_field(&encoding.field("key"), "key"), Some(encoding));
            }
        }
        assert_eq!(TextEncoding::of_field("keyhole", "key"), None);
        assert_eq!(TextEncoding::Base64.decode("/w").unwrap(), b"\xff", "padding is optional");
    }

    #[test]
    fn decoders_reject_other_text() {
        for bad in ["\\", "\\x", "\\x4", "\\xg0", "\\u41", "\\u{110000}", "\\u{", "\\q", "\\\u{e9}", "\\x\u{e9}"] {
            assert!(TextEncoding::Escape.decode(bad).is_err(), "{bad}");
        }
        assert!(TextEncoding::Base64.decode("a b=").is_err());
        assert!(TextEncoding::Hex.decode("0").is_err());
    }

    #[test]
    fn escaping_keeps_one_line() {
        assert_eq!(escaped(b"a\tb\nc\\\xff\0"), "a\\tb\\nc\\\\\\xff\\x00");
        assert_eq!(escaped("für".as_bytes()), "für");
    }
}
