//! `scan` and `count`: keys in order.

use std::ops::Bound;

use azekura::{Partition, Slice};
use serde_json::{Map, Value, json};

use crate::args::{CountArgs, RangeArgs, ScanArgs};
use crate::encoding;
use crate::failure::{Answer, Failure, Result};
use crate::open;
use crate::output::Output;

type Bounds = (Bound<Vec<u8>>, Bound<Vec<u8>>);

/// How many characters of a value a person sees.
const VALUE_CHARS_ON_TERMINAL: usize = 100;

/// Lists entries.
pub(crate) fn scan(args: &ScanArgs, output: &mut Output) -> Result<Answer> {
    let bounds = bounds(&args.range, args.hex.hex)?;
    let (_db, partition) = open::map_to_read(&args.map)?;
    let Some(bounds) = bounds else { return Ok(Answer::Yes) };
    let limit = usize::try_from(args.limit.unwrap_or(u64::MAX)).unwrap_or(usize::MAX);
    let entries = partition.range(bounds);
    if args.reverse {
        entries.rev().take(limit).try_for_each(|entry| print_entry(args, output, entry))?;
    } else {
        entries.into_iter().take(limit).try_for_each(|entry| print_entry(args, output, entry))?;
    }
    Ok(Answer::Yes)
}

fn print_entry(args: &ScanArgs, output: &mut Output, entry: azekura::Result<(Slice, Slice)>) -> Result<()> {
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
    let key = encoding::shown(&key, hex);
    if args.keys_only {
        return output.line(key);
    }
    if args.sizes {
        return output.line(format!("{key}\t{}", value.len()));
    }
    let shown = if output.is_terminal() { shortened(&value, hex) } else { encoding::shown(&value, hex) };
    output.line(format!("{key}\t{shown}"))
}

/// A value as one line of a screen.
fn shortened(value: &[u8], hex: bool) -> String {
    // A character takes at most four bytes, so this much is enough and no more of a large value is looked at.
    let head = &value[..value.len().min(4 * VALUE_CHARS_ON_TERMINAL)];
    let text = encoding::shown(head, hex);
    if head.len() == value.len() && text.chars().count() <= VALUE_CHARS_ON_TERMINAL {
        return text;
    }
    let start: String = text.chars().take(VALUE_CHARS_ON_TERMINAL).collect();
    format!("{start}… ({})", crate::display::bytes(value.len() as u64))
}

/// Counts entries.
pub(crate) fn count(args: &CountArgs, output: &mut Output) -> Result<Answer> {
    let bounds = bounds(&args.range, args.hex.hex)?;
    let (_db, partition) = open::map_to_read(&args.map)?;
    let n = count_in(&partition, bounds)?;
    if output.json() {
        output.line(json!({ "count": n }))?;
    } else {
        output.line(n)?;
    }
    Ok(Answer::Yes)
}

fn count_in(partition: &Partition, bounds: Option<Bounds>) -> Result<u64> {
    match bounds {
        None => Ok(0),
        Some((Bound::Unbounded, Bound::Unbounded)) => Ok(partition.len()?),
        Some(bounds) => {
            let mut n = 0;
            for entry in partition.range(bounds) {
                entry?;
                n += 1;
            }
            Ok(n)
        }
    }
}

/// The bounds that were asked for; `None` if no key can lie between them.
fn bounds(args: &RangeArgs, hex: bool) -> Result<Option<Bounds>> {
    let bytes = |text: &Option<_>| text.as_deref().map(|text| encoding::argument(text, hex)).transpose();
    if let Some(prefix) = bytes(&args.prefix)? {
        let end = behind_prefix(&prefix).map_or(Bound::Unbounded, Bound::Excluded);
        return Ok(Some((Bound::Included(prefix), end)));
    }
    let (from, to) = (bytes(&args.from)?, bytes(&args.to)?);
    if let (Some(from), Some(to)) = (&from, &to) {
        if from > to {
            return Err(Failure::Usage("--from must not be greater than --to; use --reverse to go backwards".into()));
        }
        if from == to {
            return Ok(None);
        }
    }
    Ok(Some((from.map_or(Bound::Unbounded, Bound::Included), to.map_or(Bound::Unbounded, Bound::Excluded))))
}

/// The first key behind all keys that begin with `prefix`; `None` if there is no such key.
fn behind_prefix(prefix: &[u8]) -> Option<Vec<u8>> {
    let last = prefix.iter().rposition(|&byte| byte != 0xff)?;
    let mut end = prefix[..=last].to_vec();
    end[last] += 1;
    Some(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_prefix_is_the_next_key_that_lacks_it() {
        assert_eq!(behind_prefix(b"ab"), Some(b"ac".to_vec()));
        assert_eq!(behind_prefix(b"a\xff\xff"), Some(b"b".to_vec()));
        assert_eq!(behind_prefix(b"\xff"), None);
        assert_eq!(behind_prefix(b""), None);
    }

    #[test]
    fn long_values_are_shortened_for_people() {
        assert_eq!(shortened(b"short", false), "short");
        let long = shortened("ä".repeat(5000).as_bytes(), false);
        assert!(long.starts_with("ääää") && long.ends_with("… (9.8 KiB)"), "{long}");
        assert!(long.chars().count() < 120);
    }
}
