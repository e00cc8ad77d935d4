//! `scan` and `count`: entries of a key range.

use std::ops::Bound;
use std::path::Path;

use azekura::{Partition, Slice};
use serde_json::{Map, Value, json};

use crate::args::{CountArgs, RangeArgs, ScanArgs};
use crate::encoding::{self, TextEncoding};
use crate::error::{CliError, CommandOutcome, Result};
use crate::output::CommandOutput;
use crate::{interrupt, open};

/// The keys between which a scan reads.
pub(crate) type ScanBounds = (Bound<Vec<u8>>, Bound<Vec<u8>>);

/// Number of characters of a value that are printed on a terminal.
const VALUE_CHARS_ON_TERMINAL: usize = 100;

/// Encodings of all keys and all values that a scan prints.
#[derive(Clone, Copy)]
struct ScanEncodings {
    key: TextEncoding,
    value: TextEncoding,
}

/// Lists entries.
pub(crate) fn scan(args: &ScanArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let bounds = bounds(&args.range, args.hex.hex)?;
    check_encodings(args, output)?;
    let (opened, partition) = open::partition_to_read(db, &args.partition.name, output.json())?;
    scan_in(&partition, args, bounds, output)?;
    output.finish()?;
    opened.print_lag(output.json());
    Ok(CommandOutcome::Success)
}

/// Lists entries of a partition.
pub(crate) fn scan_in(
    partition: &Partition,
    args: &ScanArgs,
    bounds: Option<ScanBounds>,
    output: &mut CommandOutput,
) -> Result<()> {
    check_encodings(args, output)?;
    let Some(bounds) = bounds else { return Ok(()) };
    let encodings = if output.json() { Some(scan_encodings(args, partition, &bounds)?) } else { None };
    for_each_entry(args, partition, bounds, |key, value| {
        match encodings {
            Some(encodings) => output.line(entry_json(args, encodings, &key, &value)?)?,
            None => print_entry(args, output, &key, &value)?,
        }
        Ok(true)
    })
}

fn check_encodings(args: &ScanArgs, output: &CommandOutput) -> Result<()> {
    if !output.json() && (args.key_encoding.is_some() || args.value_encoding.is_some()) {
        return Err(CliError::usage("--key-encoding and --value-encoding apply to --json only; see also --hex"));
    }
    Ok(())
}

/// Calls `visit` with the entries of the scan until it returns false.
fn for_each_entry(
    args: &ScanArgs,
    partition: &Partition,
    bounds: ScanBounds,
    mut visit: impl FnMut(Slice, Slice) -> Result<bool>,
) -> Result<()> {
    let mut entries = partition.range(bounds);
    for _ in 0..args.limit.unwrap_or(u64::MAX) {
        interrupt::check()?;
        let entry = if args.reverse { entries.next_back() } else { entries.next() };
        let Some((key, value)) = entry.transpose()? else { break };
        if !visit(key, value)? {
            break;
        }
    }
    Ok(())
}

/// The given encodings; UTF-8 or hexadecimal where none is given. Then it reads the entries to see which.
fn scan_encodings(args: &ScanArgs, partition: &Partition, bounds: &ScanBounds) -> Result<ScanEncodings> {
    let has_values = !args.keys_only && !args.sizes;
    let mut keys_are_text = !args.hex.hex;
    let mut values_are_text = !args.hex.hex;
    let mut search = !args.hex.hex && (args.key_encoding.is_none() || has_values && args.value_encoding.is_none());
    if search {
        for_each_entry(args, partition, bounds.clone(), |key, value| {
            keys_are_text &= std::str::from_utf8(&key).is_ok();
            values_are_text &= !has_values || std::str::from_utf8(&value).is_ok();
            search = keys_are_text && args.key_encoding.is_none()
                || values_are_text && has_values && args.value_encoding.is_none();
            Ok(search)
        })?;
    }
    Ok(ScanEncodings {
        key: args.key_encoding.unwrap_or(TextEncoding::for_text(keys_are_text)),
        value: args.value_encoding.unwrap_or(TextEncoding::for_text(values_are_text)),
    })
}

fn entry_json(args: &ScanArgs, encodings: ScanEncodings, key: &[u8], value: &[u8]) -> Result<Value> {
    let not_text = |name: &str| {
        let key = encoding::escaped(key);
        CliError::usage(format!("the {name} of {key} is not UTF-8; choose another --{name}-encoding"))
    };
    let mut object = Map::new();
    if !encoding::put_json_as(&mut object, "key", key, encodings.key) {
        return Err(not_text("key"));
    }
    if args.sizes {
        object.insert("size".into(), Value::from(value.len()));
    } else if !args.keys_only && !encoding::put_json_as(&mut object, "value", value, encodings.value) {
        return Err(not_text("value"));
    }
    Ok(Value::Object(object))
}

fn print_entry(args: &ScanArgs, output: &mut CommandOutput, key: &[u8], value: &[u8]) -> Result<()> {
    let hex = args.hex.hex;
    let key = encoding::display_bytes(key, hex);
    if args.keys_only {
        return output.line(key);
    }
    if args.sizes {
        return output.line(format!("{key}\t{}", value.len()));
    }
    let shown = if output.is_terminal() { shortened(value, hex) } else { encoding::display_bytes(value, hex) };
    output.line(format!("{key}\t{shown}"))
}

/// A value as one line on a terminal.
fn shortened(value: &[u8], hex: bool) -> String {
    // A character has at most four bytes, so the rest of a large value need not be decoded.
    let head = &value[..value.len().min(4 * VALUE_CHARS_ON_TERMINAL)];
    let text = encoding::display_bytes(head, hex);
    if head.len() == value.len() && text.chars().count() <= VALUE_CHARS_ON_TERMINAL {
        return text;
    }
    let start: String = text.chars().take(VALUE_CHARS_ON_TERMINAL).collect();
    format!("{start}… ({})", crate::display::bytes(value.len() as u64))
}

/// Counts entries.
pub(crate) fn count(args: &CountArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let bounds = bounds(&args.range, args.hex.hex)?;
    let (opened, partition) = open::partition_to_read(db, &args.partition.name, output.json())?;
    print_count(count_in(&partition, bounds)?, output)?;
    output.finish()?;
    opened.print_lag(output.json());
    Ok(CommandOutcome::Success)
}

/// Prints a number of entries.
pub(crate) fn print_count(n: u64, output: &mut CommandOutput) -> Result<()> {
    output.json_or_text(json!({ "count": n }), n)
}

/// Counts entries of a partition.
pub(crate) fn count_in(partition: &Partition, bounds: Option<ScanBounds>) -> Result<u64> {
    match bounds {
        None => Ok(0),
        Some((Bound::Unbounded, Bound::Unbounded)) => Ok(partition.len()?),
        Some(bounds) => {
            let mut n = 0;
            for entry in partition.range(bounds) {
                interrupt::check()?;
                entry?;
                n += 1;
            }
            Ok(n)
        }
    }
}

/// The bounds of a range; `None` if no key can be between them.
pub(crate) fn bounds(args: &RangeArgs, hex: bool) -> Result<Option<ScanBounds>> {
    let bytes = |text: &Option<_>| text.as_deref().map(|text| encoding::argument_bytes(text, hex)).transpose();
    if let Some(prefix) = bytes(&args.prefix)? {
        let end = prefix_end(&prefix).map_or(Bound::Unbounded, Bound::Excluded);
        return Ok(Some((Bound::Included(prefix), end)));
    }
    let (from, to) = (bytes(&args.from)?, bytes(&args.to)?);
    if let (Some(from), Some(to)) = (&from, &to) {
        if from > to {
            return Err(CliError::usage("--from must not be greater than --to; --reverse reverses the order"));
        }
        if from == to {
            return Ok(None);
        }
    }
    Ok(Some((from.map_or(Bound::Unbounded, Bound::Included), to.map_or(Bound::Unbounded, Bound::Excluded))))
}

/// The least key that is greater than all keys with `prefix`; `None` if there is no such key.
pub(crate) fn prefix_end(prefix: &[u8]) -> Option<Vec<u8>> {
    let last = prefix.iter().rposition(|&byte| byte != 0xff)?;
    let mut end = prefix[..=last].to_vec();
    end[last] += 1;
    Some(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_end_is_next_key_without_prefix() {
        assert_eq!(prefix_end(b"ab"), Some(b"ac".to_vec()));
        assert_eq!(prefix_end(b"a\xff\xff"), Some(b"b".to_vec()));
        assert_eq!(prefix_end(b"\xff"), None);
        assert_eq!(prefix_end(b""), None);
    }

    #[test]
    fn long_values_are_shortened_on_terminal() {
        assert_eq!(shortened(b"short", false), "short");
        let long = shortened("ä".repeat(5000).as_bytes(), false);
        assert!(long.starts_with("ääää") && long.ends_with("… (9.8 KiB)"), "{long}");
        assert!(long.chars().count() < 120);
    }
}
