//! A table as the versions of a tree refer to it.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::base::version_edit::TableMeta;
use crate::base::{KeyOrder, Result, SeqNo};
use crate::iter::dead_ranges::{PassedKeyCounts, passed_keys_max};
use crate::lsm::older_ranges::OlderRanges;
use crate::lsm::tree_context::TreeContext;
use crate::lsm::version::{HasTableMeta, SupersededVersions, Version};
use crate::table::options::TableReadOptions;
use crate::table::reader::TableReader;
use crate::vfs::open_files::DataFileKind;

/// A table that is opened on first use. When the last holder drops an obsolete table, its file may be removed; the
/// holder, which may be any reader, does not remove it. Thread safe.
pub(crate) struct TableHandle {
    meta: TableMeta,
    oldest_snapshot_when_written: Option<SeqNo>,
    context: Arc<TreeContext>,
    /// Encoded [`TableReadOptions`] for when the table is opened.
    options: AtomicU8,
    table: OnceLock<Arc<TableReader>>,
    /// An estimate of the bytes that range deletes cover, and the newest range delete at the estimate.
    covered_bytes: AtomicU64,
    covered_as_of: AtomicU64,
    older_ranges: OlderRanges,
    /// Number of deleted keys that scans have passed one by one in the key range of the table.
    passed_keys: AtomicU64,
    obsolete: AtomicBool,
}

impl TableHandle {
    /// See [`HasTableMeta::oldest_snapshot_when_written`] for that argument.
    pub(crate) fn new(
        meta: TableMeta,
        oldest_snapshot_when_written: Option<SeqNo>,
        context: Arc<TreeContext>,
        options: TableReadOptions,
    ) -> Arc<TableHandle> {
        let (table, obsolete) = (OnceLock::new(), AtomicBool::new(false));
        let (covered_bytes, covered_as_of) = (AtomicU64::new(0), AtomicU64::new(0));
        let options = AtomicU8::new(options.to_bits());
        debug_assert!(
            meta.number.0 < context.next_file_id.load(Ordering::Relaxed),
            "the number of a table was taken from the database"
        );
        context.files.add_live_bytes(meta.size);
        Arc::new(TableHandle {
            meta,
            oldest_snapshot_when_written,
            context,
            options,
            table,
            covered_bytes,
            covered_as_of,
            older_ranges: OlderRanges::default(),
            passed_keys: AtomicU64::new(0),
            obsolete,
        })
    }

    /// Returns the open table, and opens it on first use. If two threads open it at the same time, one of the two
    /// results is kept.
    ///
    /// # Errors
    /// Those of [`TableReader::open`]; the next call tries again.
    pub(crate) fn table(&self) -> Result<&Arc<TableReader>> {
        if let Some(table) = self.table.get() {
            return Ok(table);
        }
        let context = &self.context;
        let (files, cache) = (&context.files, Arc::clone(&context.cache));
        let options = TableReadOptions::from_bits(self.options.load(Ordering::Relaxed));
        let table = TableReader::open(files, cache, &self.meta, context.order.clone(), context.hash_seed, options)?;
        Ok(self.table.get_or_init(|| Arc::new(table)))
    }

    /// Takes effect when the table is opened. An open table does not change.
    pub(crate) fn set_options(&self, options: TableReadOptions) {
        self.options.store(options.to_bits(), Ordering::Relaxed);
    }

    /// The table, if it is open.
    pub(crate) fn opened(&self) -> Option<&Arc<TableReader>> {
        self.table.get()
    }

    /// Sets the estimate of the bytes that range deletes up to `as_of` cover.
    pub(crate) fn set_covered_bytes(&self, bytes: u64, as_of: SeqNo) {
        self.covered_bytes.store(bytes, Ordering::Relaxed);
        self.covered_as_of.store(as_of.0, Ordering::Release);
    }

    /// Whether the bytes that range deletes up to `newest` cover were estimated.
    pub(crate) fn has_covered_bytes(&self, newest: SeqNo) -> bool {
        self.covered_as_of.load(Ordering::Acquire) >= newest.0
    }

    /// The ranges whose entries are known to be old.
    pub(crate) fn older_ranges(&self) -> &OlderRanges {
        &self.older_ranges
    }

    /// Wakes a worker when the table [should be compacted](HasTableMeta::delays_scans).
    fn note_passed_keys(&self, count: u64) {
        let limit = passed_keys_max(self.meta.entries);
        let before = self.passed_keys.fetch_add(count, Ordering::Relaxed);
        if (before..before.saturating_add(count)).contains(&(limit - 1)) {
            self.context.work_available.notify_all();
        }
    }

    /// No manifest names the table any more: dropping the last handle makes its file obsolete.
    pub(crate) fn mark_obsolete(&self) {
        self.obsolete.store(true, Ordering::Release);
    }
}

impl HasTableMeta for TableHandle {
    fn meta(&self) -> &TableMeta {
        &self.meta
    }

    /// Known only while the table is open.
    fn superseded(&self) -> SupersededVersions {
        let properties = self.opened().map(|table| table.properties());
        properties.map_or_else(SupersededVersions::default, |properties| SupersededVersions {
            count: properties.superseded_entries,
            lowest_newer_seqno: properties.smallest_superseding_seqno,
        })
    }

    fn covered_bytes(&self) -> u64 {
        self.covered_bytes.load(Ordering::Relaxed)
    }

    fn delays_scans(&self) -> bool {
        self.passed_keys.load(Ordering::Relaxed) >= passed_keys_max(self.meta.entries)
    }

    fn oldest_snapshot_when_written(&self) -> Option<SeqNo> {
        self.oldest_snapshot_when_written
    }
}

impl PassedKeyCounts for Version<TableHandle> {
    /// Counts them for the tables with tombstones that may contain `key`.
    fn note_passed_keys(&self, key: &[u8], count: u64, order: &KeyOrder) {
        for run in self.levels().filter(|(_, level)| level.tombstones > 0).flat_map(|(_, level)| &level.runs) {
            if let Some(table) = run.find(key, order).filter(|table| table.meta().tombstones > 0) {
                table.note_passed_keys(count);
            }
        }
    }
}

impl Drop for TableHandle {
    fn drop(&mut self) {
        self.context.files.remove_live_bytes(self.meta.size);
        if *self.obsolete.get_mut() {
            self.table.take();
            self.context.obsolete_files.push(DataFileKind::Table, self.meta.number);
        }
    }
}
