//! `put`, `get`, `del`: single keys.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read};

use serde_json::{Map, Value, json};

use crate::args::{DelArgs, GetArgs, PutArgs};
use crate::failure::{Answer, Failure, Result, complain};
use crate::open;
use crate::output::Output;
use crate::{display, encoding};

/// Writes one entry.
pub(crate) fn put(args: &PutArgs, output: &mut Output) -> Result<Answer> {
    let hex = args.hex.hex;
    let key = encoding::argument(&args.key, hex)?;
    let value = match (&args.file, &args.value) {
        (Some(file), _) => fs::read(file).map_err(|e| Failure::os("read the value", file, e))?,
        (None, Some(text)) if text == OsStr::new("-") => read_stdin()?,
        (None, Some(text)) => encoding::argument(text, hex)?,
        (None, None) => return Err(Failure::Usage("a value, \"-\" or --file is needed".into())),
    };
    let target = open::map_to_fill(&args.map)?;
    let stored = target.partition.insert(&key, &value);
    target.close(stored.is_ok())?;
    stored?;
    if output.json() {
        let mut object = Map::new();
        encoding::put_json(&mut object, "key", &key, hex);
        object.insert("bytes".into(), Value::from(value.len()));
        output.line(Value::Object(object))?;
    }
    Ok(Answer::Yes)
}

/// A value from standard input, cut off where no database would take more.
fn read_stdin() -> Result<Vec<u8>> {
    let mut value = Vec::new();
    let limit = u64::from(u32::MAX) + 1;
    io::stdin()
        .lock()
        .take(limit)
        .read_to_end(&mut value)
        .map_err(|e| Failure::os("read the value", "standard input", e))?;
    Ok(value)
}

/// Prints the value of a key.
pub(crate) fn get(args: &GetArgs, output: &mut Output) -> Result<Answer> {
    let hex = args.hex.hex;
    let key = encoding::argument(&args.key, hex)?;
    let (_db, partition) = open::map_to_read(&args.map)?;
    let value = partition.get(&key)?;
    if output.json() {
        let mut object = Map::new();
        encoding::put_json(&mut object, "key", &key, hex);
        object.insert("found".into(), Value::from(value.is_some()));
        if let Some(value) = &value {
            encoding::put_json(&mut object, "value", value, hex);
        }
        output.line(Value::Object(object))?;
        return Ok(Answer::yes_if(value.is_some()));
    }
    match value {
        Some(value) if hex => output.line(encoding::to_hex(&value))?,
        Some(value) => {
            output.raw(&value)?;
            // Redirected, the value comes byte for byte; a person wants the prompt on its own line.
            if output.is_terminal() && !value.ends_with(b"\n") {
                output.raw(b"\n")?;
            }
        }
        None => {
            complain(format_args!("azekura: no value for {}.", encoding::shown(&key, hex)));
            return Ok(Answer::No);
        }
    }
    Ok(Answer::Yes)
}

/// Removes keys, all in one commit.
pub(crate) fn del(args: &DelArgs, output: &mut Output) -> Result<Answer> {
    let keys: Vec<Vec<u8>> = args.keys.iter().map(|k| encoding::argument(k, args.hex.hex)).collect::<Result<_>>()?;
    let db = open::to_change(&args.map.db.path)?;
    let partition = open::existing(&db, &args.map.partition)?;
    let mut batch = db.batch();
    let mut existed = 0u64;
    for key in &keys {
        existed += u64::from(partition.contains_key(key)?);
        batch.remove(&partition, key);
    }
    batch.commit()?;
    drop(partition);
    db.close()?;
    if output.json() {
        output.line(json!({ "asked": keys.len(), "existed": existed }))?;
    } else {
        output.line(format!("{existed} of {} removed", display::plural(keys.len() as u64, "key")))?;
    }
    Ok(Answer::Yes)
}
