//! Reads a partition around its damage.
//!
//! A scan ends at a damaged block. The index of its table states the last key that the block can have, so the scan goes
//! on behind that key. If the index is damaged, it goes on behind the last key of the table.
//!
//! The scan merges all tables. So no older version of a key is read where the block with its newer version is damaged.
//! A lookup of one key searches from new to old and ends at the first version, so it also succeeds in the range of a
//! damaged block if a newer table or the log has the key.

use azekura::{Entry, Error, Partition};

use crate::error::Result;

/// Stores a key, its value and its expiry time.
type PutEntry<'a> = dyn FnMut(&[u8], &[u8], Option<u64>) -> Result<()> + 'a;

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
    /// Keys of which a version was recovered, while a newer one may be lost.
    pub(super) older: Vec<Vec<u8>>,
    /// Keys whose newest version was recovered, while its expiry time is not known.
    pub(super) unknown_expiry: Vec<Vec<u8>>,
}

impl LostRange {
    /// All keys of a partition, except `recovered` ones.
    pub(super) fn whole(error: Error, recovered: u64) -> LostRange {
        LostRange { after: None, before: None, error, recovered, older: Vec::new(), unknown_expiry: Vec::new() }
    }
}

/// What could not be read of a partition.
#[derive(Debug, Default)]
pub(super) struct PartitionLosses {
    pub(super) ranges: Vec<LostRange>,
    /// Keys whose values in blob files cannot be read, or whose merge operator fails.
    pub(super) values: Vec<(Vec<u8>, Error)>,
    /// Whether an entry that was read expires.
    pub(super) has_expiring: bool,
    /// Why the rest of the partition could not be stored.
    pub(super) unstored: Option<String>,
}

/// Calls `put` with every entry that can be read. `last_damaged_key` is the last key that the damage of an error can
/// hide.
pub(super) fn salvage(
    partition: &Partition,
    last_damaged_key: impl Fn(&Error) -> Option<Vec<u8>>,
    losses: &mut PartitionLosses,
    put: &mut PutEntry<'_>,
) -> Result<()> {
    let mut entries = partition.entries();
    let mut last_key: Option<Vec<u8>> = None;
    // The key from which the scan was continued after damage.
    let mut start: Option<Vec<u8>> = None;
    while let Some(next) = entries.next() {
        match next {
            Ok(entry) => {
                losses.has_expiring |= entry.expiry_ms().is_some();
                put_entry(&entry, losses, put)?;
                let key = last_key.get_or_insert_default();
                key.clear();
                key.extend_from_slice(entry.key());
            }
            // Only this key is lost. The scan goes on behind it.
            Err(error) if error.unmerged_key().is_some_and(|key| Some(key) > last_key.as_deref()) => {
                let key = error.unmerged_key().unwrap_or_default().to_vec();
                entries.seek([&*key, &[0]].concat());
                losses.values.push((key.clone(), error));
                last_key = Some(key);
            }
            Err(error) => {
                let before = last_damaged_key(&error).map(|key| [&*key, &[0]].concat());
                // Damage whose keys are all behind the scan would be met again.
                let before = before.filter(|key| Some(key) > start.as_ref() && Some(key) > last_key.as_ref());
                if let Some(before) = &before {
                    entries.seek(before);
                    start = Some(before.clone());
                }
                let is_last = before.is_none();
                losses.ranges.push(LostRange {
                    after: last_key.clone(),
                    before,
                    error,
                    recovered: 0,
                    older: Vec::new(),
                    unknown_expiry: Vec::new(),
                });
                if is_last {
                    break;
                }
            }
        }
    }
    Ok(())
}

/// Calls `put` with every entry in the lost ranges whose key is in `others`, a view of the partition without its
/// damaged tables, and whose newest version can be read. Counts them in the ranges. With `older_versions`, also calls
/// it with the versions in `others` of keys whose newest version may be lost, and lists these keys. Lists the keys
/// whose expiry time is not known.
pub(super) fn look_up_in_lost_ranges(
    partition: &Partition,
    others: &Partition,
    older_versions: bool,
    losses: &mut PartitionLosses,
    put: &mut PutEntry<'_>,
) -> Result<()> {
    // If one table is damaged, a lookup that succeeds has ended before that table, at the version in `others`.
    let has_same_versions = losses.ranges.iter().all(|range| range.error.file() == losses.ranges[0].error.file());
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
            match partition.get(key) {
                Ok(Some(value)) => {
                    // A lookup does not tell the expiry time. It is that of `others` if this has the same version.
                    let is_equal = entry.value().is_ok_and(|other| other == value);
                    let expiry_ms = entry.expiry_ms().filter(|_| is_equal);
                    put(key, &value, expiry_ms)?;
                    let may_expire = entry.expiry_ms().is_some() || losses.has_expiring && !is_equal;
                    if may_expire && !(has_same_versions && is_equal) {
                        range.unknown_expiry.push(key.to_vec());
                    }
                    range.recovered += 1;
                }
                Err(_) if older_versions => {
                    if let Ok(value) = entry.value() {
                        put(key, &value, entry.expiry_ms())?;
                        range.older.push(key.to_vec());
                    }
                }
                Ok(None) | Err(_) => {}
            }
        }
    }
    Ok(())
}

fn put_entry(entry: &Entry, losses: &mut PartitionLosses, put: &mut PutEntry<'_>) -> Result<()> {
    match entry.value() {
        Ok(value) => put(entry.key(), &value, entry.expiry_ms()),
        Err(error) => {
            losses.values.push((entry.key().to_vec(), error));
            Ok(())
        }
    }
}
