//! `put`, `get`, `del`: single keys.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read};
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::args::{DelArgs, GetArgs, PutArgs};
use crate::error::{CliError, CommandOutcome, Result, print_error};
use crate::open;
use crate::output::CommandOutput;
use crate::{display, encoding};

/// Stores one entry.
pub(crate) fn put(args: &PutArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let hex = args.hex.hex;
    let key = encoding::argument_bytes(&args.key, hex)?;
    let value = match (&args.file, &args.value) {
        (Some(file), _) => fs::read(file).map_err(|e| CliError::os("read the value", file, e))?,
        (None, Some(text)) if text == OsStr::new("-") => read_stdin()?,
        (None, Some(text)) => encoding::argument_bytes(text, hex)?,
        (None, None) => return Err(CliError::usage("a value, \"-\" or --file is needed")),
    };
    let target = open::partition_to_write(db, &args.partition.name)?;
    let stored = target.partition.insert(&key, &value);
    target.close(stored.is_ok())?;
    stored?;
    if output.json() {
        let mut object = Map::new();
        encoding::put_json(&mut object, "key", &key, hex);
        object.insert("bytes".into(), Value::from(value.len()));
        output.line(Value::Object(object))?;
    }
    Ok(CommandOutcome::Success)
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
    let hex = args.hex.hex;
    let key = encoding::argument_bytes(&args.key, hex)?;
    let (_db, partition) = open::partition_to_read(db, &args.partition.name)?;
    let value = partition.get(&key)?;
    if output.json() {
        let mut object = Map::new();
        encoding::put_json(&mut object, "key", &key, hex);
        object.insert("found".into(), Value::from(value.is_some()));
        if let Some(value) = &value {
            encoding::put_json(&mut object, "value", value, hex);
        }
        output.line(Value::Object(object))?;
        return Ok(CommandOutcome::success_if(value.is_some()));
    }
    match value {
        Some(value) if hex => output.line(encoding::to_hex(&value))?,
        Some(value) => {
            output.write_bytes(&value)?;
            // On a terminal the prompt starts on a new line; redirected output is the value byte for byte.
            if output.is_terminal() && !value.ends_with(b"\n") {
                output.write_bytes(b"\n")?;
            }
        }
        None => {
            print_error(format_args!("azekura: no value for {}.", encoding::display_bytes(&key, hex)));
            return Ok(CommandOutcome::Negative);
        }
    }
    Ok(CommandOutcome::Success)
}

/// Removes keys in one commit.
pub(crate) fn del(args: &DelArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let keys: Vec<Vec<u8>> =
        args.keys.iter().map(|k| encoding::argument_bytes(k, args.hex.hex)).collect::<Result<_>>()?;
    let db = open::open_existing(db)?;
    let partition = open::existing_partition(&db, &args.partition.name)?;
    let mut batch = db.batch();
    let mut existed = 0u64;
    for key in &keys {
        existed += u64::from(partition.contains_key(key)?);
        batch.remove(&partition, key);
    }
    batch.commit()?;
    drop(partition);
    db.close()?;
    let text = format!("{existed} of {} removed", display::plural(keys.len() as u64, "key"));
    output.json_or_text(json!({ "asked": keys.len(), "existed": existed }), text)?;
    Ok(CommandOutcome::Success)
}
