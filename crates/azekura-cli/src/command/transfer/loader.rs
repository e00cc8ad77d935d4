//! Stores the entries of an import in batches, or only checks them.

use std::path::Path;

use azekura::{Database, Error, ErrorKind, Partition, PartitionCreateOptions};

use crate::command::transfer::report::TransferReport;
use crate::error::{CliError, Result};
use crate::progress::ProgressReporter;
use crate::{encoding, interrupt, open};

/// Limits of one import batch: large enough for throughput, small enough for memory.
const BATCH_BYTES: u64 = 4 << 20;
const BATCH_ENTRIES: usize = 1000;

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
}

/// Whether a pool has no space for a write. The error of a full disk has the file, or that of the system.
fn is_full_pool(error: &Error) -> bool {
    error.kind() == ErrorKind::OutOfSpace && error.os_kind().is_none() && error.file().is_none()
}

/// Stores entries in batches. Opens the partition, and creates it if it is missing, at the first entry: input that is
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
    /// The entries of the next batch.
    pending: Vec<PendingEntry>,
    pending_bytes: u64,
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

    fn target(&mut self) -> Result<&TargetPartition> {
        if self.db.is_none() {
            self.db = Some(open::open_or_create_for(self.db_path, self.largest_entry)?);
        }
        let db = self.db.as_ref().expect("it was opened above");
        if self.target.is_none() {
            let (partition, created_now) = open::open_or_create_partition(db, &self.name, self.options.clone())?;
            if created_now {
                self.created.push(self.name.clone());
            }
            let is_pool = partition.metrics().pool.is_some();
            self.target = Some(TargetPartition { partition, created: self.created.contains(&self.name), is_pool });
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

    /// Adds one entry to the batch. Stores a large entry alone, and skips it if it exceeds the limits of the database.
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
        self.target()?;
        self.pending.push(PendingEntry { key: key.to_vec(), value: value.to_vec(), expiry });
        self.pending_bytes += bytes;
        match self.pending_bytes >= BATCH_BYTES || self.pending.len() >= BATCH_ENTRIES {
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

    /// Stores the entries of the batch, or none of them. A batch needs more space in a pool than its entries one by
    /// one, so these are stored alone if the pool has no space for the batch.
    pub(crate) fn commit(&mut self) -> Result<()> {
        let entries = std::mem::take(&mut self.pending);
        self.pending_bytes = 0;
        let (Some(db), Some(target)) = (&self.db, &self.target) else { return Ok(()) };
        if entries.is_empty() {
            return Ok(());
        }
        let mut batch = db.batch();
        for PendingEntry { key, value, expiry } in &entries {
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

    /// Commits the last batch. Deletes the partition if this import created it and it is empty, unless `keep_empty`.
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

    /// Commits the last batch and closes the database. Valid input without entries creates an empty partition.
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
        self.pending_bytes = 0;
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
}
