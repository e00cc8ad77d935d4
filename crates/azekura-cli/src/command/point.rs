//! `put`, `merge`, `get`, `del`: single keys, and the removal of ranges; `clear`.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Read};
use std::path::Path;

use azekura::{Batch, Database, Partition};
use serde_json::{Map, Value, json};

use crate::args::{ClearArgs, DelArgs, EntryArgs, GetArgs, PutArgs};
use crate::command::partitions;
use crate::command::range::{self, ScanBounds};
use crate::error::{CliError, CommandOutcome, Result, print_error};
use crate::open;
use crate::output::CommandOutput;
use crate::{display, encoding};

/// Stores one entry.
pub(crate) fn put(args: &PutArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let put = PutEntry::of(args, entry_to_put(&args.entry)?)?;
    let bytes = (put.key.len() + put.value.len()) as u64;
    let target = open::partition_to_write(db, &args.entry.partition.name, args.create, bytes)?;
    let mut batch = target.db.batch();
    put.add_to(&mut batch, &target.partition);
    let stored = batch.commit().map_err(CliError::refused);
    target.close(stored.is_ok())?;
    stored?;
    print_put(&args.entry, &put.key, &put.value, output)?;
    Ok(CommandOutcome::Success)
}

/// Writes one operand.
pub(crate) fn merge(args: &EntryArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let (key, operand) = entry_to_put(args)?;
    let db = open::open_existing_for(db, (key.len() + operand.len()) as u64)?;
    open::existing_partition(&db, &args.partition.name)?.merge(&key, &operand)?;
    db.close()?;
    print_put(args, &key, &operand, output)?;
    Ok(CommandOutcome::Success)
}

/// An entry to store, with the condition and the time to live of the arguments.
pub(crate) struct PutEntry<'a> {
    args: &'a PutArgs,
    pub(crate) key: Vec<u8>,
    pub(crate) value: Vec<u8>,
    /// The value that the key must have.
    expected: Option<Vec<u8>>,
}

impl PutEntry<'_> {
    pub(crate) fn of(args: &PutArgs, (key, value): (Vec<u8>, Vec<u8>)) -> Result<PutEntry<'_>> {
        let expected = args.condition.if_value.as_ref();
        let expected = expected.map(|value| encoding::argument_bytes(value, args.entry.hex.hex)).transpose()?;
        Ok(PutEntry { args, key, value, expected })
    }

    pub(crate) fn add_to(&self, batch: &mut Batch, partition: &Partition) {
        let PutEntry { args, key, value, expected } = self;
        if args.condition.if_absent || expected.is_some() {
            batch.expect(partition, key, expected.as_deref());
        }
        match args.ttl {
            Some(ttl) => batch.insert_with_ttl(partition, key, value, ttl),
            None => batch.insert(partition, key, value),
        }
    }
}

/// The key and the value of the arguments. Reads the file or the standard input that has the value.
pub(crate) fn entry_to_put(args: &EntryArgs) -> Result<(Vec<u8>, Vec<u8>)> {
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

/// Prints the stored entry or operand as JSON, and nothing as text.
pub(crate) fn print_put(args: &EntryArgs, key: &[u8], value: &[u8], output: &mut CommandOutput) -> Result<()> {
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
    let (_opened, partition) = open::partition_to_read(db, &args.partition.name, output.json())?;
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

/// What `del` removes.
pub(crate) enum Removal {
    /// Keys, and the value that each of them must have.
    Keys(Vec<Vec<u8>>, Option<Vec<u8>>),
    /// The keys of a range; `None` if no key can be in it.
    Range(Option<ScanBounds>),
}

/// Removes keys, or a range of keys, in one commit.
pub(crate) fn del(args: &DelArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let removal = removal(args)?;
    let db = open::open_existing(db)?;
    let partition = open::existing_partition(&db, &args.partition.name)?;
    let existed = remove_in(&db, &partition, &removal)?;
    drop(partition);
    db.close()?;
    print_removed(&removal, existed, output)?;
    Ok(CommandOutcome::Success)
}

/// The keys or the range of the arguments.
pub(crate) fn removal(args: &DelArgs) -> Result<Removal> {
    if args.keys.is_empty() {
        return range::bounds(&args.range, args.hex.hex).map(Removal::Range);
    }
    let bytes = |argument: &OsString| encoding::argument_bytes(argument, args.hex.hex);
    let keys: Result<_> = args.keys.iter().map(bytes).collect();
    Ok(Removal::Keys(keys?, args.if_value.as_ref().map(bytes).transpose()?))
}

/// Removes keys in one commit. Returns how many of the named keys existed.
pub(crate) fn remove_in(db: &Database, partition: &Partition, removal: &Removal) -> Result<u64> {
    let mut existed = 0u64;
    if let Removal::Keys(keys, _) = removal {
        for key in keys {
            existed += u64::from(partition.contains_key(key)?);
        }
    }
    let mut batch = db.batch();
    add_removal(&mut batch, partition, removal);
    batch.commit().map_err(CliError::refused)?;
    Ok(existed)
}

/// Adds a removal to a batch.
pub(crate) fn add_removal(batch: &mut Batch, partition: &Partition, removal: &Removal) {
    match removal {
        Removal::Keys(keys, expected) => {
            expected.iter().for_each(|value| keys.iter().for_each(|key| batch.expect(partition, key, Some(value))));
            keys.iter().for_each(|key| batch.remove(partition, key));
        }
        Removal::Range(Some(bounds)) => batch.remove_range(partition, bounds.clone()),
        Removal::Range(None) => {}
    }
}

/// Prints how many keys existed, or that a range was removed.
pub(crate) fn print_removed(removal: &Removal, existed: u64, output: &mut CommandOutput) -> Result<()> {
    let Removal::Keys(keys, _) = removal else {
        return output.json_or_text(json!({ "range_removed": true }), "range removed");
    };
    let text = format!("{existed} of {} removed", display::plural(keys.len() as u64, "key"));
    output.json_or_text(json!({ "asked": keys.len(), "existed": existed }), text)
}

/// Asks whether all entries of a partition may be removed, unless `--yes` is given.
///
/// # Errors
/// As [`partitions::confirm`].
pub(crate) fn confirm_clear(args: &ClearArgs) -> Result<()> {
    partitions::confirm(&format!("all entries of the partition \"{}\"", args.partition.name), args.confirmation)
}

/// Removes all entries of a partition.
pub(crate) fn clear(args: &ClearArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    confirm_clear(args)?;
    let db = open::open_existing(db)?;
    let partition = open::existing_partition(&db, &args.partition.name)?;
    clear_in(&partition, output)?;
    drop(partition);
    db.close()?;
    Ok(CommandOutcome::Success)
}

/// Removes all entries of a partition in an open database, and prints its size on disk before and after.
pub(crate) fn clear_in(partition: &Partition, output: &mut CommandOutput) -> Result<()> {
    let before = partition.disk_space();
    partition.clear()?;
    let after = partition.disk_space();
    output.json_or_text(
        json!({ "name": &*partition.name, "bytes_before": before, "bytes_after": after }),
        format!("{}: {} before, {} now", partition.name, display::bytes(before), display::bytes(after)),
    )
}
