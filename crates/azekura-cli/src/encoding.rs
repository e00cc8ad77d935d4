//! Encodings of bytes on the command line and in the output: raw, escaped, hexadecimal, JSON.

use std::ffi::OsStr;
use std::fmt::Write;

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

/// Adds `bytes` under `name`, or in hexadecimal under `name_hex` if they are not UTF-8 or `hex` is set.
pub(crate) fn put_json(object: &mut Map<String, Value>, name: &str, bytes: &[u8], hex: bool) {
    match std::str::from_utf8(bytes) {
        Ok(text) if !hex => object.insert(name.to_string(), Value::from(text)),
        _ => object.insert(format!("{name}_hex"), Value::from(to_hex(bytes))),
    };
}

/// Removes and decodes the field that [`put_json`] added. The error is a sentence about the field.
pub(crate) fn take_json(object: &mut Map<String, Value>, name: &str) -> Result<Vec<u8>, String> {
    let hex_name = format!("{name}_hex");
    match (object.remove(name), object.remove(&hex_name)) {
        (Some(Value::String(text)), None) => Ok(text.into_bytes()),
        (None, Some(Value::String(hex))) => {
            from_hex(hex.as_bytes()).ok_or(format!("\"{hex_name}\" is not hexadecimal"))
        }
        (None, None) => Err(format!("neither \"{name}\" nor \"{hex_name}\" is present")),
        (Some(_), Some(_)) => Err(format!("\"{name}\" and \"{hex_name}\" are both present")),
        _ => Err(format!("\"{name}\" must be a string")),
    }
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
    fn json_round_trips_text_and_bytes() {
        for bytes in [&b""[..], b"text", b"\0\x01", b"\xff\xfe", "é\"\\\n".as_bytes()] {
            for hex in [false, true] {
                let mut object = Map::new();
                put_json(&mut object, "value", bytes, hex);
                let line = Value::Object(object).to_string();
                let Value::Object(mut back) = serde_json::from_str(&line).unwrap() else { panic!("not an object") };
                assert_eq!(take_json(&mut back, "value").unwrap(), bytes);
            }
        }
        let Value::Object(mut both) = serde_json::json!({"key": "a", "key_hex": "61"}) else { unreachable!() };
        assert!(take_json(&mut both, "key").is_err());
    }

    #[test]
    fn escaping_keeps_one_line() {
        assert_eq!(escaped(b"a\tb\nc\\\xff\0"), "a\\tb\\nc\\\\\\xff\\x00");
        assert_eq!(escaped("für".as_bytes()), "für");
    }
}
