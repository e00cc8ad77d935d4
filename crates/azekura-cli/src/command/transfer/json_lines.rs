//! JSON lines: one object with a key and a value per line.

use std::io::BufRead;
use std::path::Path;

use azekura::Partition;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::args::EncodingArgs;
use crate::command::transfer::loader::EntryLoader;
use crate::command::transfer::report::{ImportError, TransferReport};
use crate::command::transfer::text_fields::{OutputEncodings, input_encoding};
use crate::command::transfer::writer::ExportWriter;
use crate::encoding::TextEncoding;
use crate::error::{CliError, Result};
use crate::progress::ProgressReporter;

/// Writes all entries. The names of the fields state the encodings.
pub(super) fn export(
    partition: &Partition,
    encodings: OutputEncodings,
    out: &mut ExportWriter<'_>,
    progress: &ProgressReporter,
) -> Result<TransferReport> {
    let (key_field, value_field) = (encodings.key.field("key"), encodings.value.field("value"));
    encodings.write_rows(partition, out, progress, |bytes, key, value| {
        let fields = [(key_field.clone(), Value::from(key)), (value_field.clone(), Value::from(value))];
        serde_json::to_writer(&mut *bytes, &Map::from_iter(fields)).expect("writing to memory cannot fail");
        bytes.push(b'\n');
    })
}

/// Stores the entry of every line. Empty lines are ignored.
pub(super) fn import(
    mut input: impl BufRead,
    source: &Path,
    args: EncodingArgs,
    loader: &mut EntryLoader<'_>,
) -> Result<(), ImportError> {
    let mut line = Vec::new();
    let mut offset = 0;
    for number in 1u64.. {
        line.clear();
        let n = input.read_until(b'\n', &mut line).map_err(|e| CliError::os("read the input", source, e))?;
        if n == 0 {
            break;
        }
        loader.progress.add(n as u64);
        if !line.trim_ascii().is_empty() {
            let not_an_entry = |reason| ImportError::input(format!("line {number} is not an entry: {reason}"), offset);
            let (key, value) = parse_line(&line, args).map_err(not_an_entry)?;
            loader.put(&key, &value, || format!("line {number}"))?;
        }
        offset += n as u64;
    }
    Ok(())
}

/// The fields of a line. Deserializing fails if a field occurs twice; other fields are ignored.
#[derive(Deserialize)]
struct JsonEntry {
    key: Option<Value>,
    key_hex: Option<Value>,
    key_base64: Option<Value>,
    key_escape: Option<Value>,
    value: Option<Value>,
    value_hex: Option<Value>,
    value_base64: Option<Value>,
    value_escape: Option<Value>,
}

fn parse_line(line: &[u8], args: EncodingArgs) -> Result<(Vec<u8>, Vec<u8>), String> {
    if !line.trim_ascii_start().starts_with(b"{") {
        // Names the place of a syntax error, unless the line is JSON.
        return Err(serde_json::from_slice::<Value>(line).err().map_or("it is not a JSON object".into(), json_reason));
    }
    let entry: JsonEntry = serde_json::from_slice(line).map_err(json_reason)?;
    let key = [entry.key, entry.key_hex, entry.key_base64, entry.key_escape];
    let value = [entry.value, entry.value_hex, entry.value_base64, entry.value_escape];
    Ok((take_field(key, "key", args.key_encoding)?, take_field(value, "value", args.value_encoding)?))
}

/// The message of an error in one line, without the line number that the parser has, which is always 1.
fn json_reason(error: serde_json::Error) -> String {
    let text = error.to_string();
    match text.split_once(" at line 1 column ") {
        Some((message, column)) => format!("{message} at column {column}"),
        None => text.split(" at line ").next().unwrap_or_default().to_string(),
    }
}

/// The bytes of the one field among `fields`, in the order of [`TextEncoding::ALL`]. The error is a sentence.
fn take_field(fields: [Option<Value>; 4], name: &str, given: Option<TextEncoding>) -> Result<Vec<u8>, String> {
    let mut present =
        TextEncoding::ALL.into_iter().zip(fields).filter_map(|(encoding, field)| Some((encoding, field?)));
    let Some((stated, value)) = present.next() else {
        return Err(format!(
            "neither \"{name}\" nor \"{name}_hex\", \"{name}_base64\" or \"{name}_escape\" is present"
        ));
    };
    let field = stated.field(name);
    if let Some((other, _)) = present.next() {
        return Err(format!("\"{field}\" and \"{}\" are both present", other.field(name)));
    }
    let Value::String(text) = value else { return Err(format!("\"{field}\" must be a string")) };
    input_encoding(stated, given, name)?.decode(&text).map_err(|why| format!("\"{field}\" {why}"))
}
