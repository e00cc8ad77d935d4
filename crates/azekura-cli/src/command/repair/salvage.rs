//! Reads a partition around its damage.
//!
//! A scan ends at a damaged block. A seek to a key in the range of that block fails, too; a seek beyond it succeeds. So
//! a bisection of the key space finds the next readable key. Two seeks that fail with the same error are in the range
//! of the same block, and no key between them can be read.
//!
//! The scan merges all tables. So no older version of a key is read where the block with its newer version is damaged.
//! A lookup of one key searches from new to old and ends at the first version, so it also succeeds in the range of a
//! damaged block if a newer table or the log has the key.

use azekura::{Entries, Entry, Error, Partition};

use crate::error::Result;

/// Longest key, in bytes, up to which the bisection is exact.
const EXACT_KEY_BYTES: usize = 256;

/// Keys that cannot be read.
#[derive(Debug)]
pub(super) struct LostRange {
    /// The last readable key before the range; `None` at the start of the partition.
    pub(super) after: Option<Vec<u8>>,
    /// A readable position after the range; `None` if it extends to the end of the partition.
    pub(super) before: Option<Vec<u8>>,
    pub(super) error: Error,
    /// Number of keys in the range that were recovered nevertheless.
    pub(super) recovered: u64,
}

impl LostRange {
    /// All keys of a partition, except `recovered` ones.
    pub(super) fn whole(error: Error, recovered: u64) -> LostRange {
        LostRange { after: None, before: None, error, recovered }
    }
}

/// What could not be read of a partition.
#[derive(Debug, Default)]
pub(super) struct PartitionLosses {
    pub(super) ranges: Vec<LostRange>,
    /// Keys whose values in blob files cannot be read.
    pub(super) values: Vec<(Vec<u8>, Error)>,
}

/// Outcome of a seek.
enum Probe {
    Readable,
    Damaged(Error),
}

struct Salvager {
    entries: Entries,
    /// No key of a table is at or after this key.
    end: Vec<u8>,
    longest_key: usize,
}

/// Calls `put` with every entry that can be read. `largest` is the largest key of all tables.
pub(super) fn salvage(
    partition: &Partition,
    largest: &[u8],
    mut put: impl FnMut(&[u8], &[u8]) -> Result<()>,
) -> Result<PartitionLosses> {
    let mut losses = PartitionLosses::default();
    let end = [largest, &[0]].concat();
    let mut salvager = Salvager { entries: partition.entries(), longest_key: end.len(), end };
    let mut last_key: Option<Vec<u8>> = None;
    let mut start = Vec::new();
    loop {
        match salvager.entries.next() {
            None => return Ok(losses),
            Some(Ok(entry)) => {
                put_entry(&entry, &mut losses, &mut put)?;
                let key = last_key.get_or_insert_default();
                key.clear();
                key.extend_from_slice(entry.key());
                salvager.longest_key = salvager.longest_key.max(key.len());
            }
            Some(Err(error)) => {
                // The scan fails behind the last key, or where it was started.
                let failed = last_key.as_ref().map_or(Vec::new(), |key| [key, &[0][..]].concat()).max(start);
                let before = salvager.next_readable(failed, &error);
                let range = LostRange { after: last_key.clone(), before: before.clone(), error, recovered: 0 };
                losses.ranges.push(range);
                let Some(next) = before else { return Ok(losses) };
                salvager.entries.seek(&next);
                start = next;
            }
        }
    }
}

/// Calls `put` with every entry in the lost ranges whose key is in `others`, a view of the partition without its
/// damaged tables, and whose newest version can be read. Counts them in the ranges.
pub(super) fn look_up_in_lost_ranges(
    partition: &Partition,
    others: &Partition,
    losses: &mut PartitionLosses,
    mut put: impl FnMut(&[u8], &[u8]) -> Result<()>,
) -> Result<()> {
    for range in &mut losses.ranges {
        let mut entries = others.entries();
        if let Some(after) = &range.after {
            entries.seek([after, &[0][..]].concat());
        }
        // After an error the rest of the range is lost, as it is reported already.
        while let Some(Ok(entry)) = entries.next() {
            let key = entry.key();
            if range.before.as_ref().is_some_and(|before| **key >= **before) {
                break;
            }
            if let Ok(Some(value)) = partition.get(key) {
                put(key, &value)?;
                range.recovered += 1;
            }
        }
    }
    Ok(())
}

fn put_entry(
    entry: &Entry,
    losses: &mut PartitionLosses,
    put: &mut impl FnMut(&[u8], &[u8]) -> Result<()>,
) -> Result<()> {
    match entry.value() {
        Ok(value) => put(entry.key(), &value),
        Err(error) => {
            losses.values.push((entry.key().to_vec(), error));
            Ok(())
        }
    }
}

impl Salvager {
    fn probe(&mut self, key: &[u8]) -> Probe {
        self.entries.seek(key);
        match self.entries.next() {
            Some(Err(error)) => Probe::Damaged(error),
            Some(Ok(_)) | None => Probe::Readable,
        }
    }

    /// The first key after `failed` from which the partition can be read; a seek to `failed` ends with `error`.
    fn next_readable(&mut self, failed: Vec<u8>, error: &Error) -> Option<Vec<u8>> {
        let end = self.end.clone();
        if failed >= end {
            return None;
        }
        let at_end = self.probe(&end);
        self.first_readable(failed, error, &end, &at_end)
    }

    /// The first readable key after `low`, at which a seek fails with `low_error`, up to `high`.
    fn first_readable(&mut self, low: Vec<u8>, low_error: &Error, high: &[u8], at_high: &Probe) -> Option<Vec<u8>> {
        if let Probe::Damaged(high_error) = at_high
            && is_same_damage(low_error, high_error)
        {
            return None;
        }
        let digits = (self.longest_key + 2).min(EXACT_KEY_BYTES);
        let Some(middle) = midpoint(&low, high, digits) else {
            return matches!(at_high, Probe::Readable).then(|| high.to_vec());
        };
        let at_middle = self.probe(&middle);
        if let Some(found) = self.first_readable(low, low_error, &middle, &at_middle) {
            return Some(found);
        }
        match &at_middle {
            Probe::Readable => Some(middle),
            Probe::Damaged(error) => self.first_readable(middle.clone(), error, high, at_high),
        }
    }
}

fn is_same_damage(a: &Error, b: &Error) -> bool {
    (a.file(), a.offset(), a.message()) == (b.file(), b.offset(), b.message())
}

/// A key about halfway between two keys, with at most `digits` bytes; `None` if there is none.
fn midpoint(low: &[u8], high: &[u8], digits: usize) -> Option<Vec<u8>> {
    // Keys are numbers in base 256 behind a point. The sum of two has a carry before the point.
    let digit = |key: &[u8], i: usize| u16::from(key.get(i).copied().unwrap_or(0));
    let mut sums = vec![0; digits + 1];
    for i in (0..digits).rev() {
        let sum = digit(low, i) + digit(high, i) + sums[i + 1];
        sums[i + 1] = sum & 0xff;
        sums[i] = sum >> 8;
    }
    let mut middle = Vec::with_capacity(digits);
    let mut rest = sums[0];
    for sum in &sums[1..] {
        let value = rest << 8 | sum;
        middle.push((value >> 1) as u8);
        rest = value & 1;
    }
    while middle.last() == Some(&0) {
        middle.pop();
    }
    (low < &*middle && &*middle < high).then_some(middle)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn midpoint_is_between_until_digits_end() {
        assert_eq!(midpoint(b"a", b"c", 4), Some(b"b".to_vec()));
        assert_eq!(midpoint(b"", b"\xff\xff", 4), Some(b"\x7f\xff\x80".to_vec()));
        assert_eq!(midpoint(b"a", b"b", 1), None);
        assert_eq!(midpoint(b"a", b"a\0", 8), None);
        let (mut low, high) = (b"key10".to_vec(), b"key11".to_vec());
        let mut steps = 0;
        while let Some(middle) = midpoint(&low, &high, 8) {
            assert!(low < middle && middle < high);
            low = middle;
            steps += 1;
        }
        assert!((20..=32).contains(&steps), "{steps}");
    }
}
