//! `scan` and `count`: entries of a key range.

use std::ops::Bound;
use std::path::Path;

use azekura::{Partition, Slice};
use serde_json::{Map, Value, json};

use crate::args::{CountArgs, RangeArgs, ScanArgs};
use crate::error::{CliError, CommandOutcome, Result};
use crate::output::CommandOutput;
use crate::{encoding, interrupt, open};

/// The keys between which a scan reads.
pub(crate) type ScanBounds = (Bound<Vec<u8>>, Bound<Vec<u8>>);

/// Number of characters of a value that are printed on a terminal.
const VALUE_CHARS_ON_TERMINAL: usize = 100;

/// Lists entries.
pub(crate) fn scan(args: &ScanArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let bounds = bounds(&args.range, args.hex.hex)?;
    let (_db, partition) = open::partition_to_read(db, &args.partition.name)?;
    scan_in(&partition, args, bounds, output)?;
    Ok(CommandOutcome::Success)
}

/// Lists entries of a partition.
pub(crate) fn scan_in(
    partition: &Partition,
    args: &ScanArgs,
    bounds: Option<ScanBounds>,
    output: &mut CommandOutput,
) -> Result<()> {
    let Some(bounds) = bounds else { return Ok(()) };
    let limit = usize::try_from(args.limit.unwrap_or(u64::MAX)).unwrap_or(usize::MAX);
    let entries = partition.range(bounds);
    if args.reverse {
        entries.rev().take(limit).try_for_each(|entry| print_entry(args, output, entry))
    } else {
        entries.into_iter().take(limit).try_for_each(|entry| print_entry(args, output, entry))
    }
}

fn print_entry(args: &ScanArgs, output: &mut CommandOutput, entry: azekura::Result<(Slice, Slice)>) -> Result<()> {
    interrupt::check()?;
    let (key, value) = entry?;
    let hex = args.hex.hex;
    if output.json() {
        let mut object = Map::new();
        encoding::put_json(&mut object, "key", &key, hex);
        if args.sizes {
            object.insert("size".into(), Value::from(value.len()));
        } else if !args.keys_only {
            encoding::put_json(&mut object, "value", &value, hex);
        }
        return output.line(Value::Object(object));
    }
    let key = encoding::display_bytes(&key, hex);
    if args.keys_only {
        return output.line(key);
    }
    if args.sizes {
        return output.line(format!("{key}\t{}", value.len()));
    }
    let shown = if output.is_terminal() { shortened(&value, hex) } else { encoding::display_bytes(&value, hex) };
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
    let (_db, partition) = open::partition_to_read(db, &args.partition.name)?;
    print_count(count_in(&partition, bounds)?, output)?;
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
