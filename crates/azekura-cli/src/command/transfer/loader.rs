//! Stores the entries of an import, or only checks them.
//!
//! Many entries for an LSM partition are stored by [`Partition::bulk`], which writes tables directly. Few entries,
//! those for a pool, and those with expiry times of their own are stored in batches.

use std::path::Path;

use azekura::{Database, Error, ErrorKind, Partition, PartitionCreateOptions};

use crate::command::transfer::report::TransferReport;
use crate::error::{CliError, Result};
use crate::progress::ProgressReporter;
use crate::{encoding, interrupt, open};

/// Limits of one batch: large enough for throughput, small enough for memory.
const BATCH_BYTES: u64 = 4 << 20;
const BATCH_ENTRIES: usize = 1000;
/// Limits of one bulk load. Each syncs its files and adds at least one table.
const BULK_BYTES: u64 = 32 << 20;
const BULK_ENTRIES: usize = 200_000;
/// Fewer bytes are stored in batches.
const BULK_BYTES_MIN: u64 = 1 << 20;

/// Largest key of a database, in bytes.
const KEY_BYTES_MAX: usize = u16::MAX as usize;

/// What a loader does with entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadMode {
    Store,
    /// Counts and checks entries; opens no database.
    Check,
}

/// When an entry expires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadedExpiry {
    /// After the default time to live of its partition, if that has one.
    Default,
    /// At this time in milliseconds since 1970, or never.
    At(Option<u64>),
}

/// An entry of the next batch.
struct PendingEntry {
    key: Vec<u8>,
    value: Vec<u8>,
    expiry: LoadedExpiry,
}

/// The partition that receives entries.
struct TargetPartition {
    partition: Partition,
    /// Whether this import created the partition.
    created: bool,
    is_pool: bool,
    has_default_ttl: bool,
}

impl TargetPartition {
    /// Whether a bulk load may store the entry, which gets the default time to live.
    fn can_bulk(&self, entry: &PendingEntry) -> bool {
        match entry.expiry {
            _ if self.is_pool => false,
            LoadedExpiry::Default => true,
            LoadedExpiry::At(expiry_ms) => expiry_ms.is_none() && !self.has_default_ttl,
        }
    }
}

/// Whether a pool has no space for a write. The error of a full disk has the file, or that of the system.
fn is_full_pool(error: &Error) -> bool {
    error.kind() == ErrorKind::OutOfSpace && error.os_kind().is_none() && error.file().is_none()
}

/// Stores entries. Opens the partition, and creates it if it is missing, at the first entry: input that is
/// invalid before its first entry creates nothing.
pub(crate) struct EntryLoader<'a> {
    db_path: &'a Path,
    mode: LoadMode,
    db: Option<Database>,
    name: String,
    options: PartitionCreateOptions,
    target: Option<TargetPartition>,
    /// Names of the partitions that this import created, and whether it wrote to another one.
    created: Vec<String>,
    wrote_to_existing: bool,
    /// Size of an entry that the database can store, with its memory budget.
    largest_entry: u64,
    /// The entries that are stored next, in batches or by one bulk load.
    pending: Vec<PendingEntry>,
    pending_bytes: u64,
    /// Whether a bulk load may store all of them.
    can_bulk: bool,
    /// Entries of the current partition.
    partition_entries: u64,
    /// Whether nothing more is stored in the current partition.
    has_given_up: bool,
    pub(crate) report: TransferReport,
    pub(crate) progress: ProgressReporter,
}

impl<'a> EntryLoader<'a> {
    /// A loader into the partition `name`, until another is begun.
    pub(crate) fn new(db_path: &'a Path, name: &str, mode: LoadMode, progress: ProgressReporter) -> EntryLoader<'a> {
        EntryLoader {
            db_path,
            mode,
            db: None,
            name: name.into(),
            options: PartitionCreateOptions::default(),
            target: None,
            created: Vec::new(),
            wrote_to_existing: false,
            largest_entry: 0,
            pending: Vec::new(),
            pending_bytes: 0,
            can_bulk: true,
            partition_entries: 0,
            has_given_up: false,
            report: TransferReport::default(),
            progress,
        }
    }

    /// Ends the current partition. The next entries go to the partition `name`, which is created with `options` unless
    /// it exists.
    pub(crate) fn begin_partition(&mut self, name: &str, options: PartitionCreateOptions) -> Result<()> {
        self.end_partition(true)?;
        self.name = name.into();
        self.options = options;
        self.partition_entries = 0;
        self.has_given_up = false;
        if self.mode == LoadMode::Store {
            self.target()?;
        }
        Ok(())
    }

    /// Opens the database, or creates it.
    fn open(&mut self) -> Result<()> {
        if self.db.is_none() {
            self.db = Some(open::open_or_create_for(self.db_path, self.largest_entry)?);
        }
        Ok(())
    }

    /// Loads an input that has no partition: an empty database.
    pub(super) fn begin_no_partition(&mut self) -> Result<()> {
        self.give_up_partition(); // otherwise an import without entries creates a partition
        if self.mode == LoadMode::Store { self.open() } else { Ok(()) }
    }

    fn target(&mut self) -> Result<&TargetPartition> {
        self.open()?;
        let db = self.db.as_ref().expect("it was opened above");
        if self.target.is_none() {
            let (partition, created_now) = open::open_or_create_partition(db, &self.name, self.options.clone())?;
            if created_now {
                self.created.push(self.name.clone());
            }
            let is_pool = partition.metrics().pool.is_some();
            let options = partition.options();
            let has_default_ttl = options.clone().default_ttl(None) != options;
            let created = self.created.contains(&self.name);
            self.target = Some(TargetPartition { partition, created, is_pool, has_default_ttl });
        }
        Ok(self.target.as_ref().expect("it was opened above"))
    }

    /// Opens the database again if its memory budget is too small for an entry.
    fn fit_memory_budget(&mut self, bytes: u64) -> Result<()> {
        if open::memory_budget_for(bytes) > open::memory_budget_for(self.largest_entry) {
            self.commit()?;
            self.target = None;
            if let Some(db) = self.db.take() {
                db.close()?;
            }
            self.largest_entry = bytes;
        }
        Ok(())
    }

    /// Adds one entry to those that are stored next. Stores a large entry alone, and skips it if it exceeds the limits
    /// of the database.
    pub(crate) fn put(&mut self, key: &[u8], value: &[u8], name: impl Fn() -> String) -> Result<()> {
        self.put_expiring(key, value, LoadedExpiry::Default, name)
    }

    /// As [`put`](EntryLoader::put), with an expiry time.
    pub(crate) fn put_expiring(
        &mut self,
        key: &[u8],
        value: &[u8],
        expiry: LoadedExpiry,
        name: impl Fn() -> String,
    ) -> Result<()> {
        interrupt::check()?;
        if expiry == LoadedExpiry::At(Some(u64::MAX)) {
            self.report.skip(name(), "it would expire 2^64 ms or more after 1970");
            return Ok(());
        }
        if self.mode == LoadMode::Check {
            self.check(key, value, name);
            return Ok(());
        }
        let bytes = (key.len() + value.len()) as u64;
        if bytes >= BATCH_BYTES || key.len() > KEY_BYTES_MAX {
            self.commit()?;
            self.fit_memory_budget(bytes)?;
            return self.put_one(key, value, expiry, name);
        }
        let entry = PendingEntry { key: key.to_vec(), value: value.to_vec(), expiry };
        self.can_bulk &= self.target()?.can_bulk(&entry);
        self.pending.push(entry);
        self.pending_bytes += bytes;
        let (bytes_max, entries_max) =
            if self.can_bulk { (BULK_BYTES, BULK_ENTRIES) } else { (BATCH_BYTES, BATCH_ENTRIES) };
        match self.pending_bytes >= bytes_max || self.pending.len() >= entries_max {
            true => self.commit(),
            false => Ok(()),
        }
    }

    /// Stores one entry. Skips it if it exceeds a limit.
    fn put_one(&mut self, key: &[u8], value: &[u8], expiry: LoadedExpiry, name: impl Fn() -> String) -> Result<()> {
        let is_existing = !self.target()?.created;
        let (Some(db), Some(target)) = (&self.db, &self.target) else { return Ok(()) };
        let stored = match expiry {
            LoadedExpiry::Default => target.partition.insert(key, value),
            LoadedExpiry::At(expiry_ms) => {
                let mut batch = db.batch();
                batch.insert_with_expiry(&target.partition, key, value, expiry_ms);
                batch.commit()
            }
        };
        match stored {
            Ok(()) => {
                self.wrote_to_existing |= is_existing;
                self.count(key, value);
            }
            Err(error) if error.kind() == ErrorKind::Invalid => self.report.skip(name(), error.message()),
            Err(error) if target.is_pool && is_full_pool(&error) => {
                return Err(CliError::pool_full(&self.name, &error));
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn check(&mut self, key: &[u8], value: &[u8], name: impl Fn() -> String) {
        if key.len() > KEY_BYTES_MAX {
            self.report.skip(name(), format!("key has {} bytes, at most {KEY_BYTES_MAX} are allowed", key.len()));
        } else if u32::try_from(value.len()).is_err() {
            self.report.skip(name(), format!("value has {} bytes, at most {} are allowed", value.len(), u32::MAX));
        } else {
            self.count(key, value);
        }
    }

    fn count(&mut self, key: &[u8], value: &[u8]) {
        self.report.count(key, value);
        self.partition_entries += 1;
    }

    /// Stores the entries that were put. After an error, all entries that it has counted are stored.
    pub(crate) fn commit(&mut self) -> Result<()> {
        let entries = std::mem::take(&mut self.pending);
        let is_bulk = std::mem::replace(&mut self.can_bulk, true) && self.pending_bytes >= BULK_BYTES_MIN;
        self.pending_bytes = 0;
        if is_bulk {
            return self.bulk(&entries);
        }
        let mut rest = &entries[..];
        while !rest.is_empty() {
            let mut bytes = 0;
            let mut fits = |entry: &PendingEntry| {
                let is_full = bytes >= BATCH_BYTES;
                bytes += (entry.key.len() + entry.value.len()) as u64;
                !is_full
            };
            let count = rest.iter().take(BATCH_ENTRIES).take_while(|entry| fits(entry)).count();
            let (batch, others) = rest.split_at(count);
            self.commit_batch(batch)?;
            rest = others;
        }
        Ok(())
    }

    /// Stores the entries by one bulk load, or none of them. Of entries with the same key, the last one counts.
    fn bulk(&mut self, entries: &[PendingEntry]) -> Result<()> {
        let Some(target) = &self.target else { return Ok(()) };
        target.partition.bulk(entries.iter().map(|entry| (&entry.key, &entry.value)))?;
        self.wrote_to_existing |= !target.created;
        entries.iter().for_each(|entry| self.count(&entry.key, &entry.value));
        Ok(())
    }

    /// Stores the entries in one batch, or none of them. A batch needs more space in a pool than its entries one by
    /// one, so these are stored alone if the pool has no space for the batch.
    fn commit_batch(&mut self, entries: &[PendingEntry]) -> Result<()> {
        let (Some(db), Some(target)) = (&self.db, &self.target) else { return Ok(()) };
        let mut batch = db.batch();
        for PendingEntry { key, value, expiry } in entries {
            match expiry {
                LoadedExpiry::Default => batch.insert(&target.partition, key, value),
                LoadedExpiry::At(expiry_ms) => batch.insert_with_expiry(&target.partition, key, value, *expiry_ms),
            }
        }
        match batch.commit() {
            Ok(()) => {
                self.wrote_to_existing |= !target.created;
                entries.iter().for_each(|entry| self.count(&entry.key, &entry.value));
                Ok(())
            }
            Err(error) if target.is_pool && is_full_pool(&error) => {
                let name = |key: &[u8]| encoding::escaped(&key[..key.len().min(100)]);
                let mut entries = entries.iter();
                entries
                    .try_for_each(|PendingEntry { key, value, expiry }| self.put_one(key, value, *expiry, || name(key)))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Stores the last entries. Deletes the partition if this import created it and it is empty, unless `keep_empty`.
    fn end_partition(&mut self, keep_empty: bool) -> Result<()> {
        self.commit()?;
        if let (Some(db), Some(target)) = (&self.db, self.target.take())
            && target.created
            && !keep_empty
            && target.partition.is_empty()?
        {
            db.delete_partition(target.partition)?;
        }
        Ok(())
    }

    /// Stores the last entries and closes the database. Valid input without entries creates an empty partition.
    pub(crate) fn finish(mut self) -> Result<TransferReport> {
        self.commit()?;
        let keep_empty = self.report.skipped.is_empty() || self.partition_entries > 0;
        if keep_empty && self.mode == LoadMode::Store && !self.has_given_up {
            self.target()?;
        }
        self.close(keep_empty)
    }

    /// Stores the entries before an error, unless the database refuses that, and closes the database. Returns the
    /// number of stored entries.
    pub(crate) fn finish_after_error(mut self) -> u64 {
        // The error that ends the import is reported.
        let _ = self.commit();
        let (is_stored, entries) = (self.mode == LoadMode::Store, self.report.entries);
        let keep_empty = self.partition_entries > 0;
        let _ = self.close(keep_empty);
        if is_stored { entries } else { 0 }
    }

    /// Ends the current partition although its last entries cannot be stored.
    pub(crate) fn give_up_partition(&mut self) {
        self.pending.clear();
        (self.pending_bytes, self.can_bulk) = (0, true);
        self.target = None;
        self.has_given_up = true;
    }

    /// Deletes the partitions that this import created, and closes the database. Returns whether entries remain that
    /// this import stored in other partitions.
    #[cfg_attr(not(feature = "_peer"), allow(dead_code, reason = "only the importers of other engines call this"))]
    pub(super) fn abandon(mut self) -> Result<bool> {
        drop(self.target.take());
        if let Some(db) = self.db {
            self.created.iter().try_for_each(|name| db.delete_partition_by_name(name))?;
            db.close()?;
        }
        Ok(self.wrote_to_existing)
    }

    fn close(mut self, keep_empty: bool) -> Result<TransferReport> {
        self.end_partition(keep_empty)?;
        match self.db {
            Some(db) => db.close().map(|()| self.report).map_err(Into::into),
            None => Ok(self.report),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A full disk was reported as a full pool, whose entries were skipped.
    #[test]
    fn full_disk_is_no_full_pool() {
        let full = || Error::new(ErrorKind::OutOfSpace, "no space");
        assert!(is_full_pool(&full()));
        assert!(!is_full_pool(&full().in_file("db/RESERVE")));
        let disk = Error::io("write", &std::io::ErrorKind::StorageFull.into());
        assert!(disk.kind() == ErrorKind::OutOfSpace && !is_full_pool(&disk));
    }

    /// Puts entries with the keys `numbers`, about 100 bytes each, and stores them. Returns the number of bulk loads.
    fn store(loader: &mut EntryLoader<'_>, numbers: impl Iterator<Item = u32>, expiry: LoadedExpiry) -> u64 {
        for n in numbers {
            loader.put_expiring(&n.to_be_bytes(), &[n as u8; 100], expiry, String::new).unwrap();
        }
        loader.commit().unwrap();
        loader.db.as_ref().unwrap().metrics().ingests
    }

    /// An import wrote all entries to the log, to memory, and then to tables.
    #[test]
    fn many_entries_are_loaded_by_bulk() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("db");
        let mut loader = EntryLoader::new(&path, "p", LoadMode::Store, ProgressReporter::spinner(true, "test"));
        assert_eq!(store(&mut loader, 0..100, LoadedExpiry::Default), 0, "few entries are stored in batches");
        assert_eq!(store(&mut loader, (0..20_000).rev().chain([7]), LoadedExpiry::At(None)), 1);
        assert_eq!(loader.target.as_ref().unwrap().partition.len().unwrap(), 20_000);
        // An entry with an expiry time is no part of a bulk load.
        let later = LoadedExpiry::At(Some(u64::MAX / 2));
        assert_eq!(store(&mut loader, 0..20_000, later), 1);
        // Nor is one that never expires, if others do by default.
        let ttl = PartitionCreateOptions::default().default_ttl(std::time::Duration::from_secs(3_600));
        loader.begin_partition("expiring", ttl).unwrap();
        assert_eq!(store(&mut loader, 0..20_000, LoadedExpiry::At(None)), 1);
        assert_eq!(store(&mut loader, 0..20_000, LoadedExpiry::Default), 2);
        assert_eq!(loader.finish().unwrap().entries, 80_101);
    }
}
