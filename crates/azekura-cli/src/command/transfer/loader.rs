//! Stores the entries of an import in batches, or only checks them.

use std::path::Path;

use azekura::{Batch, Database, ErrorKind, Partition, PartitionCreateOptions};

use crate::command::transfer::report::TransferReport;
use crate::error::Result;
use crate::open;
use crate::progress::ProgressReporter;

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

/// The partition that receives entries.
struct TargetPartition {
    partition: Partition,
    /// Whether this import created the partition.
    created: bool,
    batch: Batch,
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
    batch_bytes: u64,
    /// Entries of the current partition.
    partition_entries: u64,
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
            batch_bytes: 0,
            partition_entries: 0,
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
        if self.mode == LoadMode::Store {
            self.target()?;
        }
        Ok(())
    }

    fn target(&mut self) -> Result<&mut TargetPartition> {
        if self.db.is_none() {
            self.db = Some(open::open_or_create(self.db_path)?);
        }
        let db = self.db.as_ref().expect("it was opened above");
        if self.target.is_none() {
            let (partition, created) = open::open_or_create_partition(db, &self.name, self.options.clone())?;
            if created {
                self.created.push(self.name.clone());
            }
            self.target = Some(TargetPartition { partition, created, batch: db.batch() });
        }
        Ok(self.target.as_mut().expect("it was opened above"))
    }

    /// Adds one entry to the batch. Stores a large entry alone, and skips it if it exceeds the limits of the database.
    pub(crate) fn put(&mut self, key: &[u8], value: &[u8], name: impl Fn() -> String) -> Result<()> {
        if self.mode == LoadMode::Check {
            self.check(key, value, name);
            return Ok(());
        }
        let bytes = (key.len() + value.len()) as u64;
        if bytes >= BATCH_BYTES || key.len() > KEY_BYTES_MAX {
            self.commit()?;
            let target = self.target()?;
            let (stored, is_existing) = (target.partition.insert(key, value), !target.created);
            self.wrote_to_existing |= is_existing && stored.is_ok();
            match stored {
                Ok(()) => self.count(key, value),
                Err(error) if error.kind() == ErrorKind::Invalid => self.report.skip(name(), error.message()),
                Err(error) => return Err(error.into()),
            }
            return Ok(());
        }
        let target = self.target()?;
        target.batch.insert(&target.partition, key, value);
        let entries = target.batch.len();
        self.batch_bytes += bytes;
        self.count(key, value);
        if self.batch_bytes >= BATCH_BYTES || entries >= BATCH_ENTRIES {
            self.commit()?;
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

    fn commit(&mut self) -> Result<()> {
        self.batch_bytes = 0;
        if let (Some(db), Some(target)) = (&self.db, &mut self.target) {
            let mut batch = std::mem::replace(&mut target.batch, db.batch());
            let is_existing = !target.created && !batch.is_empty();
            batch.commit()?;
            self.wrote_to_existing |= is_existing;
        }
        Ok(())
    }

    /// Commits the last batch. Unless the partition is `kept` or has entries, it is deleted if this import created it.
    fn end_partition(&mut self, kept: bool) -> Result<()> {
        self.commit()?;
        if let (Some(db), Some(target)) = (&self.db, self.target.take()) {
            drop(target.batch);
            if target.created && !kept && target.partition.is_empty()? {
                db.delete_partition(target.partition)?;
            }
        }
        Ok(())
    }

    /// Commits the last batch and closes the database. Valid input without entries creates an empty partition.
    pub(crate) fn finish(mut self) -> Result<TransferReport> {
        let kept = self.report.skipped.is_empty() || self.partition_entries > 0;
        if kept && self.mode == LoadMode::Store {
            self.target()?;
        }
        self.close(kept)
    }

    /// Commits the entries before an invalid one and closes the database. Returns the number of stored entries.
    pub(crate) fn finish_after_error(self) -> Result<u64> {
        let (stored, kept) = (self.mode == LoadMode::Store, self.partition_entries > 0);
        let entries = self.close(kept)?.entries;
        Ok(if stored { entries } else { 0 })
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

    fn close(mut self, kept: bool) -> Result<TransferReport> {
        self.end_partition(kept)?;
        match self.db {
            Some(db) => db.close().map(|()| self.report).map_err(Into::into),
            None => Ok(self.report),
        }
    }
}
