//! `put`, `get`, `del`: single keys.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read};
use std::path::Path;

use azekura::{Database, Partition};
use serde_json::{Map, Value, json};

use crate::args::{DelArgs, GetArgs, PutArgs};
use crate::error::{CliError, CommandOutcome, Result, print_error};
use crate::open;
use crate::output::CommandOutput;
use crate::{display, encoding};

/// Stores one entry.
pub(crate) fn put(args: &PutArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let (key, value) = entry_to_put(args)?;
    let target = open::partition_to_write(db, &args.partition.name)?;
    let stored = target.partition.insert(&key, &value);
    target.close(stored.is_ok())?;
    stored?;
    print_put(args, &key, &value, output)?;
    Ok(CommandOutcome::Success)
}

/// The key and the value of the arguments. Reads the file or the standard input that has the value.
pub(crate) fn entry_to_put(args: &PutArgs) -> Result<(Vec<u8>, Vec<u8>)> {
    let hex = args.hex.hex;
    let key = encoding::argument_bytes(&args.key, hex)?;
    let value = match (&args.file, &args.value) {
        (Some(file), _) => fs::read(file).map_err(|e| CliError::os("read the value", file, e))?,
        (None, Some(text)) if text == OsStr::new("-") => read_stdin()?,
        (None, Some(text)) => encoding::argument_bytes(text, hex)?,
        (None, None) => return Err(CliError::usage("a value, \"-\" or --file is needed")),
    };
    Ok((key, value))
}

/// Prints the stored entry as JSON, and nothing as text.
pub(crate) fn print_put(args: &PutArgs, key: &[u8], value: &[u8], output: &mut CommandOutput) -> Result<()> {
    if !output.json() {
        return Ok(());
    }
    let mut object = Map::new();
    encoding::put_json(&mut object, "key", key, args.hex.hex);
    object.insert("bytes".into(), Value::from(value.len()));
    output.line(Value::Object(object))
}

/// Reads a value from standard input, at most 4 GiB, which is one byte above the maximum size of a value.
fn read_stdin() -> Result<Vec<u8>> {
    let mut value = Vec::new();
    let limit = u64::from(u32::MAX) + 1;
    io::stdin()
        .lock()
        .take(limit)
        .read_to_end(&mut value)
        .map_err(|e| CliError::os("read the value", "standard input", e))?;
    Ok(value)
}

/// Prints the value of a key.
pub(crate) fn get(args: &GetArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let key = encoding::argument_bytes(&args.key, args.hex.hex)?;
    let (_db, partition) = open::partition_to_read(db, &args.partition.name)?;
    let value = partition.get(&key)?;
    if value.is_none() && !output.json() {
        print_error(format_args!("azekura: {}.", no_value(args, &key)));
        return Ok(CommandOutcome::Negative);
    }
    print_get(args, &key, value.as_deref(), ValueForm::Bytes, output)?;
    Ok(CommandOutcome::success_if(value.is_some()))
}

/// How `get` prints a value as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ValueForm {
    /// Unchanged.
    Bytes,
    /// As one line, with escapes.
    Line,
}

/// A clause that says that a key does not exist.
pub(crate) fn no_value(args: &GetArgs, key: &[u8]) -> String {
    format!("no value for {}", encoding::display_bytes(key, args.hex.hex))
}

/// Prints the value of a key. As text, a value that does not exist is not printed.
pub(crate) fn print_get(
    args: &GetArgs,
    key: &[u8],
    value: Option<&[u8]>,
    form: ValueForm,
    output: &mut CommandOutput,
) -> Result<()> {
    let hex = args.hex.hex;
    if output.json() {
        let mut object = Map::new();
        encoding::put_json(&mut object, "key", key, hex);
        object.insert("found".into(), Value::from(value.is_some()));
        if let Some(value) = value {
            encoding::put_json(&mut object, "value", value, hex);
        }
        return output.line(Value::Object(object));
    }
    let Some(value) = value else { return Ok(()) };
    if hex || form == ValueForm::Line {
        return output.line(encoding::display_bytes(value, hex));
    }
    output.write_bytes(value)?;
    // On a terminal the prompt starts on a new line; redirected output is the value byte for byte.
    if output.is_terminal() && !value.ends_with(b"\n") {
        output.write_bytes(b"\n")?;
    }
    Ok(())
}

/// Removes keys in one commit.
pub(crate) fn del(args: &DelArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let keys = keys_to_remove(args)?;
    let db = open::open_existing(db)?;
    let partition = open::existing_partition(&db, &args.partition.name)?;
    let existed = remove_in(&db, &partition, &keys)?;
    drop(partition);
    db.close()?;
    print_removed(keys.len(), existed, output)?;
    Ok(CommandOutcome::Success)
}

/// The keys of the arguments.
pub(crate) fn keys_to_remove(args: &DelArgs) -> Result<Vec<Vec<u8>>> {
    args.keys.iter().map(|k| encoding::argument_bytes(k, args.hex.hex)).collect()
}

/// Removes keys in one commit. Returns how many of them existed.
pub(crate) fn remove_in(db: &Database, partition: &Partition, keys: &[Vec<u8>]) -> Result<u64> {
    let mut batch = db.batch();
    let mut existed = 0u64;
    for key in keys {
        existed += u64::from(partition.contains_key(key)?);
        batch.remove(partition, key);
    }
    batch.commit()?;
    Ok(existed)
}

/// Prints how many keys existed.
pub(crate) fn print_removed(asked: usize, existed: u64, output: &mut CommandOutput) -> Result<()> {
    let text = format!("{existed} of {} removed", display::plural(asked as u64, "key"));
    output.json_or_text(json!({ "asked": asked, "existed": existed }), text)
}
