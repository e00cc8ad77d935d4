//! Ingest: writes sorted entries to tables, and adds all of them to the tree with one edit and one sequence number.
//!
//! The tables are written before the sequence number is assigned. Their entries have [`INGEST_PLACEHOLDER`], and the
//! manifest has the sequence number ([`TableMeta::global_seqno`]), which readers use instead.
//!
//! An ingested table is newer than everything else in the tree. A table goes to the deepest level
//! where no table of that level and of the levels above overlaps it. Any other table becomes part of a new run on level
//! 0. No memtable may have a key in
//! the range of the tables, because a reader searches memtables first, and none may have a range delete: the caller
//! flushes such memtables before.

use std::sync::Arc;

use crate::base::key::put_expiry;
use crate::base::sync::lock;
use crate::base::version_edit::{
    FileNumber, INGEST_PLACEHOLDER, PartitionEdit, PartitionId, TableMeta, VersionEdit, WalEpoch,
};
use crate::base::{EntryRef, ErrorKind, InternalKey, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::{EngineHost, TaskReport};
use crate::iter::InternalIter;
use crate::lsm::compaction_picker::level_targets;
use crate::lsm::options::{LeveledOptions, LsmOptions};
use crate::lsm::output::{OutputOptions, PendingOutputs, TableOutputWriter};
use crate::lsm::table_handle::TableHandle;
use crate::lsm::tree::{LsmTree, TaskLockGuard};
use crate::lsm::version::{BOTTOM_LEVEL, HasTableMeta, Version, VersionChange};
use crate::memtable::Memtable;
use crate::table::format::TableOrigin;

/// Writes the tables of one ingest. If it is dropped, the files become obsolete.
pub(crate) struct IngestWriter {
    output: TableOutputWriter,
    /// The expiry time of all entries, if they expire.
    expires_ms: Option<u64>,
    /// The expiry time and the value of the last entry.
    expiring_value: Vec<u8>,
}

/// Finished tables and blob files of one ingest, which no edit names yet.
pub(crate) struct IngestOutputs {
    outputs: PendingOutputs,
    /// Bytes of the files.
    pub(crate) bytes: u64,
}

/// The locks of a tree while tables are added to it: no flush runs, and if `compaction` is held, no compaction.
pub(crate) struct IngestLocks<'a> {
    flush: TaskLockGuard<'a>,
    compaction: Option<TaskLockGuard<'a>>,
}

impl IngestWriter {
    /// Adds the next entry. The caller has checked that its key is above the last one.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace`.
    pub(crate) fn add(&mut self, user_key: &[u8], value: &[u8]) -> Result<()> {
        let mut entry = EntryRef { user_key, seqno: INGEST_PLACEHOLDER, kind: RecordKind::Put, value };
        if let Some(expires_ms) = self.expires_ms {
            self.expiring_value.clear();
            put_expiry(&mut self.expiring_value, expires_ms, value);
            entry = EntryRef { kind: RecordKind::ExpiringPut, value: &self.expiring_value, ..entry };
        }
        self.output.add(entry, true)
    }

    /// Finishes the files, and makes them and their names durable.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace`.
    pub(crate) fn finish(self) -> Result<IngestOutputs> {
        let mut outputs = self.output.outputs;
        outputs.finish()?;
        let bytes = outputs.finished_bytes();
        Ok(IngestOutputs { outputs, bytes })
    }
}

impl IngestOutputs {
    /// The number of the first table, which identifies the ingest.
    pub(crate) fn first_table(&self) -> FileNumber {
        self.outputs.tables.first().map_or(FileNumber(0), |table| table.number)
    }

    /// The smallest and the largest user key.
    pub(crate) fn key_range(&self) -> Option<(&[u8], &[u8])> {
        let tables = &self.outputs.tables;
        Some((&tables.first()?.smallest_key.0, &tables.last()?.largest_key.0))
    }
}

/// The level for a table with this key range: the deepest level that has no table in the range, if none of the levels
/// above has one either. 0 if that level is above the base level, because its tables would be compacted at once.
fn choose_level<T: HasTableMeta>(
    version: &Version<T>,
    (smallest, largest): (&[u8], &[u8]),
    order: &KeyOrder,
    options: &LeveledOptions,
) -> u8 {
    let is_free = |level: &u8| {
        let mut runs = version.level(*level).runs.iter();
        runs.all(|run| run.overlapping(smallest, largest, order).is_empty())
    };
    let deepest = (0..=BOTTOM_LEVEL).take_while(is_free).last().unwrap_or(0);
    if deepest < level_targets(version, options).base_level { 0 } else { deepest }
}

impl LsmTree {
    /// Begins the tables of an ingest whose smallest key is `first_key`. Its entries expire at `expires_ms`, if that is
    /// given.
    pub(crate) fn begin_ingest(&self, first_key: &[u8], now_ms: u64, expires_ms: Option<u64>) -> IngestWriter {
        let options = self.options();
        let level = choose_level(&self.version(), (first_key, first_key), &self.context.order, &options.compaction);
        let mut output = PendingOutputs::new(&self.context, now_ms);
        output.origin = TableOrigin::Ingest { first_output: FileNumber(0), visible: SeqNo::ZERO };
        let output = TableOutputWriter::new(output, ingest_output_options(&options, level));
        IngestWriter { output, expires_ms, expiring_value: Vec::new() }
    }

    /// Takes the locks that [`install_ingest`](LsmTree::install_ingest) needs. Waits while a flush runs, but not for a
    /// compaction.
    pub(crate) fn lock_for_ingest(&self) -> IngestLocks<'_> {
        let flush = self.flush_lock.lock();
        let compaction = self.compaction_lock.acquire(false);
        let is_paused = lock(&self.compaction_state).paused_compaction.is_some();
        // The tables of a paused compaction will be on its output level.
        IngestLocks { flush, compaction: compaction.filter(|_| !is_paused) }
    }

    /// Whether a memtable has a key in the range of the tables, or a range delete. A compaction may set the sequence
    /// numbers of the tables' entries to 0 if no flushed range delete covers them, and then an older range delete that
    /// is still in a memtable would cover them.
    ///
    /// # Errors
    /// Those of the memtable's iterator.
    pub(crate) fn memtables_overlap(&self, ingest: &IngestOutputs) -> Result<bool> {
        let Some((smallest, largest)) = ingest.key_range() else { return Ok(false) };
        let now = self.current.get();
        let has_key = |memtable: &Arc<Memtable>| -> Result<bool> {
            let mut iter = memtable.iter();
            iter.seek(InternalKey::before_versions_of(smallest))?;
            Ok(iter.current().is_some_and(|entry| self.context.order.cmp(entry.user_key, largest).is_le()))
        };
        for memtable in std::iter::once(&now.active).chain(now.sealed.iter()).filter(|memtable| !memtable.is_empty()) {
            if memtable.has_range_deletes() || has_key(memtable)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Flushes all memtables, for a caller that holds the locks and prevents commits.
    ///
    /// # Errors
    /// Those of a flush.
    pub(crate) fn flush_for_ingest(&self, locks: &IngestLocks<'_>, host: &dyn EngineHost) -> Result<TaskReport> {
        // The first flush may be one whose edit could not be committed before.
        let mut sum = TaskReport::default();
        loop {
            crate::engine::Engine::seal(self);
            if self.current.with(|now| now.sealed.is_empty()) {
                return Ok(sum);
            }
            let report = self.flush_exclusively(&locks.flush, host)?;
            sum.tables += report.tables;
            sum.bytes_written += report.bytes_written;
        }
    }

    /// Panics if a memtable has a record at `seqno` or above, or if the tables are not those of an ingest in key order.
    fn check_ingest(&self, ingest: &IngestOutputs, seqno: SeqNo) {
        let tables = &ingest.outputs.tables;
        assert!(self.current.with(|now| now.largest_memtable_seqno()) < seqno, "memtables are older");
        let has_placeholder = |table: &TableMeta| {
            table.global_seqno.is_none()
                && (table.smallest_seqno, table.largest_seqno) == (INGEST_PLACEHOLDER, INGEST_PLACEHOLDER)
        };
        assert!(tables.iter().all(has_placeholder), "no sequence number is assigned to the tables yet");
        if !self.context.order.is_custom() {
            let is_before = |a: &TableMeta, b: &TableMeta| a.largest_key.0 < b.smallest_key.0;
            assert!(tables.is_sorted_by(is_before), "the tables of an ingest are in key order");
            assert!(!self.memtables_overlap(ingest).unwrap_or(false), "no memtable has a key in the range");
        }
    }

    /// Adds the tables to the tree with the sequence number `seqno`, which is above that of every record in the tree.
    /// The caller prevents commits, and publishes `seqno` afterwards. No memtable overlaps the tables. The edit also
    /// records that the partition id `marker` is used up.
    ///
    /// # Errors
    /// `Closed` if the partition was deleted, `OutOfSpace`: nothing has changed, and the files become obsolete.
    /// `Poisoned` if it is unknown whether the manifest names the tables.
    pub(crate) fn install_ingest(
        &self,
        mut ingest: IngestOutputs,
        seqno: SeqNo,
        marker: PartitionId,
        locks: &IngestLocks<'_>,
        host: &dyn EngineHost,
    ) -> Result<TaskReport> {
        debug_assert!(locks.flush.holds(&self.flush_lock), "no flush runs");
        debug_assert!(
            locks.compaction.as_ref().is_none_or(|held| held.holds(&self.compaction_lock)),
            "no compaction runs"
        );
        self.check_open()?;
        // All records before the ingest are durable before the edit makes the ingest durable.
        host.sync_wal_through(seqno)?;
        if cfg!(debug_assertions) {
            self.check_ingest(&ingest, seqno);
        }
        let outputs = &mut ingest.outputs;
        let metas = std::mem::take(&mut outputs.tables).into_iter().map(|table| table.with_global_seqno(seqno));
        let (version, options) = (self.version(), self.options());
        let place = |table: TableMeta| match locks.compaction {
            Some(_) => {
                let range = (&table.smallest_key.0[..], &table.largest_key.0[..]);
                (choose_level(&version, range, &self.context.order, &options.compaction), table)
            }
            None => (0, table),
        };
        let tables: Vec<(u8, TableMeta)> = metas.map(place).collect();
        let added =
            |(level, table): &(u8, TableMeta)| PartitionEdit::TableAdded { level: *level, table: table.clone() };
        outputs.keep();
        let blobs = std::mem::take(&mut outputs.blobs);
        let blob_edits = blobs.iter().map(|file| PartitionEdit::BlobFileAdded { file: file.clone() });
        let used_up =
            VersionEdit::NextNumbers { file: FileNumber(0), partition: PartitionId(marker.0 + 1), epoch: WalEpoch(0) };
        let details = tables.iter().flat_map(|(_, table)| table.detail_edits());
        let edits = blob_edits.chain(tables.iter().map(added)).chain(details);
        let edits: Vec<_> = edits.map(|edit| edit.of(self.context.partition)).chain([used_up]).collect();
        let committed = self.check_open().and_then(|()| host.commit_edits(&edits));
        if let Err(error) = committed {
            // The manifest may contain the edits after `Poisoned` only.
            if error.kind() != ErrorKind::Poisoned {
                ingest.outputs.discard();
            }
            return Err(error);
        }
        let report = TaskReport {
            level: tables.iter().map(|(level, _)| *level).min().unwrap_or_default(),
            tables: tables.len() as u64,
            bytes_written: ingest.bytes,
            ..TaskReport::default()
        };
        let mut change = VersionChange {
            blobs_added: blobs.into_iter().map(|meta| self.context.blob_handle(meta)).collect(),
            ..VersionChange::default()
        };
        for (level, meta) in tables {
            let table = TableHandle::new(meta, None, Arc::clone(&self.context), options.read_options(level));
            if level == 0 { change.flushed.push(table) } else { change.added.push((level, table)) }
        }
        self.apply_change(change);
        self.dead_ranges.note_ingest();
        Ok(report)
    }
}

fn ingest_output_options(options: &LsmOptions, level: u8) -> OutputOptions {
    OutputOptions {
        table: options.table_options(level),
        target_file_size: options.compaction.target_file_size,
        output_level_boundaries: Vec::new(),
        separation: options.kv_separation.clone(),
        new_value_separation: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lsm::version::tests::table;

    #[test]
    fn table_goes_to_deepest_level_without_overlap() {
        let (order, options) = (KeyOrder::bytewise(), LeveledOptions::default());
        let level = |version: &Version<TableMeta>, smallest: &str, largest: &str| {
            choose_level(version, (smallest.as_bytes(), largest.as_bytes()), &order, &options)
        };
        assert_eq!(level(&Version::empty(), "a", "z"), 6);
        let tables = vec![(6, table(1, "c", "f")), (6, table(2, "k", "m")), (0, table(3, "m", "p"))];
        let version = Version::restore(tables, &order).unwrap();
        let placed = [("a", "b"), ("g", "j"), ("q", "z"), ("a", "c"), ("d", "e"), ("n", "o"), ("g", "m")];
        assert_eq!(placed.map(|(from, to)| level(&version, from, to)), [6, 6, 6, 0, 0, 0, 0]);
        // With a small base level, the base level is above the bottom.
        let small = LeveledOptions::default().base_level_size(1).level_size_multiplier(2);
        assert_eq!(choose_level(&version, (b"d", b"e"), &order, &small), 5);
        assert_eq!(choose_level(&version, (b"n", b"o"), &order, &small), 0);
    }
}
