//! Range deletes of a tree: their insertion into the memtable, the flushed set in the version, and the removal of
//! tables whose every entry is covered or has expired.
//!
//! A fragment of the version's set is *needed* while a table may have an entry that it covers. Memtables have newer
//! records only. The flush or the compaction whose tables make it superfluous removes it, in the same edit.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::base::key_range::{KeyBoundary, KeyRange, RangeTombstone};
use crate::base::sync::lock;
use crate::base::version_edit::{FileNumber, PartitionEdit, TableMeta};
use crate::base::{EntryRef, Error, InternalKey, KeyOrder, Result, SeqNo};
use crate::engine::{EngineHost, ExpiryLimits, TaskReport};
use crate::iter::range_tombstones::RangeTombstones;
use crate::lsm::blob_gc::BlobGcJob;
use crate::lsm::compaction_job::CompactionJob;
use crate::lsm::output::UncommittedFlush;
use crate::lsm::read::SuperVersion;
use crate::lsm::table_handle::TableHandle;
use crate::lsm::tree::{LsmTree, TaskLockGuard};
use crate::lsm::version::{HasTableMeta, SortedRun, Version, VersionChange, may_have_covered_entries};

/// A memtable with this many records is sealed before a range delete if range deletes would cover about as many. Scans
/// skip covered records of older memtables, but read those of the memtable that has the range delete. In a smaller
/// memtable, covered records are not counted, so up to twice as many are covered. A record counts once for each range
/// delete that covers it, which bounds the cost of counting.
const COVERED_RECORDS_MAX: u64 = 4096;
/// A memtable is sealed when its range deletes have this many fragments, because a range delete over all of them
/// visits each.
const MEMTABLE_FRAGMENTS_MAX: usize = 1 << 15;

impl LsmTree {
    /// Adds a range delete to the active memtable. True if this sealed a memtable.
    ///
    /// # Errors
    /// `Corruption` if the entry is not a range in the order of the partition; `Poisoned` if a comparator panicked.
    #[cold]
    pub(crate) fn insert_range_delete(&self, entry: EntryRef<'_>) -> Result<bool> {
        let range = KeyRange::decode(entry.user_key, entry.value)?.to_owned();
        if range.is_empty(&self.context.order) {
            return Err(Error::corruption("the start of a range delete is not before its end"));
        }
        let mut active = lock(&self.active_memtable);
        let mut sealed = false;
        if active.len() >= COVERED_RECORDS_MAX
            && active.count_covered(&range, COVERED_RECORDS_MAX)? >= COVERED_RECORDS_MAX
        {
            self.seal_active(&mut active);
            sealed = true;
        }
        active.insert_range_delete(range, entry.seqno, &self.context.snapshots.seqnos())?;
        if active.range_tombstones_arc().len() >= MEMTABLE_FRAGMENTS_MAX
            || active.bytes() >= self.max_memtable_size.load(Ordering::Relaxed)
        {
            self.seal_active(&mut active);
            sealed = true;
        }
        Ok(sealed)
    }

    /// The edit that changes the flushed range tombstones to `new`. `turn`: the guard of `version_change_lock`.
    pub(crate) fn range_tombstones_edit(&self, new: &RangeTombstones, turn: &TaskLockGuard<'_>) -> PartitionEdit {
        debug_assert!(turn.holds(&self.version_change_lock), "no other task changes the version");
        let (removed, added) = self.version().range_tombstones().difference(new, &self.context.order);
        PartitionEdit::RangeTombstones { removed, added }
    }

    /// The range tombstones after a flush, if they change. `turn`: the guard of `version_change_lock`.
    pub(crate) fn range_tombstones_after_flush(
        &self,
        written: &UncommittedFlush,
        turn: &TaskLockGuard<'_>,
    ) -> Option<Arc<RangeTombstones>> {
        debug_assert!(turn.holds(&self.version_change_lock), "no other task changes the version");
        if written.range_tombstones.is_empty() {
            return None;
        }
        let (version, order) = (self.version(), &self.context.order);
        let old = version.range_tombstones();
        let merged = old.merged_with(&written.range_tombstones, &written.snapshots, order);
        let is_old = |fragment: &RangeTombstone| fragment.seqnos[0] <= old.largest_seqno();
        let is_needed = |fragment: &RangeTombstone| {
            is_old(fragment) || is_needed(fragment, &version, &HashSet::new(), &written.outputs.tables, order)
        };
        let new = merged.filtered(is_needed, order);
        (!new.is_empty() || !old.is_empty()).then(|| Arc::new(new))
    }

    /// The range tombstones after a compaction, if they change. `turn`: the guard of `version_change_lock`.
    pub(crate) fn range_tombstones_after_compaction(
        &self,
        removed: &[Arc<TableHandle>],
        added: &[TableMeta],
        turn: &TaskLockGuard<'_>,
    ) -> Option<Arc<RangeTombstones>> {
        debug_assert!(turn.holds(&self.version_change_lock), "no other task changes the version");
        let (version, order) = (self.version(), &self.context.order);
        let old = version.range_tombstones();
        if old.is_empty() {
            return None;
        }
        let numbers: HashSet<FileNumber> = removed.iter().map(|table| table.meta().number).collect();
        let stays = |fragment: &RangeTombstone| {
            !removed.iter().any(|table| overlaps(fragment, table.meta(), order))
                || is_needed(fragment, &version, &numbers, added, order)
        };
        let new = old.filtered(stays, order);
        debug_assert!(new.len() <= old.len() && new.largest_seqno() <= old.largest_seqno(), "no range delete is added");
        (new.len() < old.len()).then(|| Arc::new(new))
    }

    /// Whether [`drop_whole_tables`](LsmTree::drop_whole_tables) would remove a table.
    pub(crate) fn has_droppable_tables(&self, now: &SuperVersion) -> bool {
        has_drop_reason(&now.version)
            && !self.droppable_tables(&now.version, &self.context.snapshots.seqnos()).is_empty()
    }

    /// The tables of which no reader can see an entry. `snapshots`: as for [`covered_tables`].
    fn droppable_tables(&self, version: &Version<TableHandle>, snapshots: &[SeqNo]) -> Vec<Arc<TableHandle>> {
        let mut tables = covered_tables(version, snapshots, &self.context.order);
        tables.extend(expired_tables(version, &self.expiry_limits_of(version), &self.context.order));
        tables.sort_by_key(|table| table.meta().number);
        tables.dedup_by_key(|table| table.meta().number);
        tables
    }

    /// Removes the tables whose every entry is covered or has expired for every reader, without reading them, and the
    /// blob files that no other table refers to. `None` if there are none, or if a compaction runs and `wait` is false.
    /// With `wait`, removes blob files without references even if there are no such tables, the open one among them.
    pub(crate) fn drop_whole_tables(&self, wait: bool, host: &dyn EngineHost) -> Result<Option<TaskReport>> {
        if !wait && !has_drop_reason(&self.version()) {
            return Ok(None);
        }
        let Some(occupied) = self.compaction_lock.acquire(wait) else { return Ok(None) };
        self.check_open()?;
        // Taken before the version: a pointer that is not counted any more is in the tables of the version.
        let counted = self.direct_blobs.files_with_pointers();
        let snapshots = host.snapshot_seqnos();
        let now = self.current.get();
        let tables = self.droppable_tables(&now.version, &snapshots);
        let numbers: HashSet<FileNumber> = tables.iter().map(|table| table.meta().number).collect();
        if (numbers.is_empty() && !wait) || !self.discard_paused_compaction_of(&numbers) {
            return Ok(None);
        }
        let lost = tables.iter().flat_map(|table| &table.meta().blob_usage);
        let dead = now.version.blobs().unreferenced(&counted, std::iter::empty(), lost);
        if wait {
            self.drop_unused_direct_blob_file();
        }
        if numbers.is_empty() && dead.is_empty() {
            if wait {
                self.discard_outdated_blob_gc(&occupied);
            }
            return Ok(None);
        }
        let removed = numbers.iter().map(|&table| PartitionEdit::TableRemoved { table });
        let dropped = dead.iter().map(|file| PartitionEdit::BlobFileRemoved { file: file.meta().number });
        let turn = self.version_change_lock.lock();
        let range_tombstones = self.range_tombstones_after_compaction(&tables, &[], &turn);
        let changed = range_tombstones.as_deref().map(|set| self.range_tombstones_edit(set, &turn));
        self.commit_edits(removed.chain(dropped).chain(changed), host)?;
        tables.iter().for_each(|table| table.mark_obsolete());
        dead.iter().for_each(|file| file.mark_obsolete());
        let blobs_removed = dead.iter().map(|file| file.meta().number).collect();
        let report = TaskReport {
            tables: numbers.len() as u64,
            bytes_freed: dead.iter().map(|file| file.meta().size).sum(),
            ..TaskReport::default()
        };
        let change = VersionChange { removed: numbers, blobs_removed, range_tombstones, ..VersionChange::default() };
        self.apply_change(change);
        Ok(Some(report))
    }

    /// Discards a paused blob GC whose files were removed since, because it keeps them open. `held`: the guard of
    /// `compaction_lock`.
    fn discard_outdated_blob_gc(&self, held: &TaskLockGuard<'_>) {
        debug_assert!(held.holds(&self.compaction_lock), "no blob GC runs");
        let version = self.version();
        let is_outdated = |job: &mut BlobGcJob| !job.inputs_exist(version.blobs());
        let outdated = lock(&self.compaction_state).paused_blob_gc.take_if(is_outdated);
        outdated.into_iter().for_each(|job| job.outputs.discard());
    }

    /// Estimates how many bytes range deletes cover of each table, as far as that is not known. A table that cannot be
    /// read counts as not covered; the next read reports the error.
    pub(crate) fn estimate_covered_bytes(&self) {
        let (version, order) = (self.version(), &self.context.order);
        let newest = version.range_tombstones().largest_seqno();
        for table in tables_to_estimate(&version, order) {
            let bytes = covered_bytes(table, version.range_tombstones(), order).unwrap_or(0);
            table.set_covered_bytes(bytes, newest);
        }
    }

    /// Discards a paused compaction if it reads one of `tables`. False if an edit may name its tables: it must be
    /// installed first.
    fn discard_paused_compaction_of(&self, tables: &HashSet<FileNumber>) -> bool {
        let mut state = lock(&self.compaction_state);
        let reads = |job: &mut CompactionJob| {
            let mut inputs = job.picked.start_level_inputs.iter().chain(&job.picked.output_level_inputs);
            inputs.any(|input| tables.contains(input))
        };
        let Some(mut job) = state.paused_compaction.take_if(reads) else { return true };
        if job.outputs().is_kept() {
            let before = state.paused_compaction.replace(job);
            debug_assert!(before.is_none(), "a tree has one paused compaction");
            return false;
        }
        drop(state);
        job.discard();
        true
    }
}

/// Whether there may be tables of which no reader can see an entry.
fn has_drop_reason(version: &Version<TableHandle>) -> bool {
    !version.range_tombstones().is_empty() || version.has_expiring_entries()
}

/// The tables whose every entry is covered for every reader. `snapshots` are ascending; the last one is the last
/// visible sequence number.
fn covered_tables<T: HasTableMeta>(version: &Version<T>, snapshots: &[SeqNo], order: &KeyOrder) -> Vec<Arc<T>> {
    debug_assert!(!snapshots.is_empty() && snapshots.is_sorted(), "the last one is the last visible sequence number");
    let set = version.range_tombstones();
    let stripe = |seqno: SeqNo| snapshots.partition_point(|&snapshot| snapshot < seqno);
    let is_covered = |meta: &TableMeta| {
        let covers_all = |range_delete: SeqNo| {
            let is_closed = stripe(range_delete) < snapshots.len();
            range_delete > meta.largest_seqno && is_closed && stripe(meta.smallest_seqno) == stripe(range_delete)
        };
        set.covers(&meta.smallest_key.0, &meta.largest_key.0, order, covers_all)
    };
    let tables = version.tables().map(|(_, table)| table).filter(|table| !set.is_empty() && is_covered(table.meta()));
    tables.map(Arc::clone).collect()
}

/// The tables that range deletes may cover, and for which it was not estimated how much of them the newest ones cover.
pub(crate) fn tables_to_estimate<'a>(
    version: &'a Version<TableHandle>,
    order: &'a KeyOrder,
) -> impl Iterator<Item = &'a Arc<TableHandle>> {
    let set = version.range_tombstones();
    let tables = version.tables().map(|(_, table)| table).filter(|_| !set.is_empty());
    tables.filter(move |table| {
        let meta = table.meta();
        meta.range_deletes_applied_through < set.largest_seqno()
            && !table.has_covered_bytes(set.largest_seqno())
            && set
                .overlapping(&meta.smallest_key.0, &meta.largest_key.0, order)
                .any(|fragment| may_have_covered_entries(meta, fragment.seqnos[0]))
    })
}

/// An estimate of the bytes of `table` that range deletes may cover, from its index.
fn covered_bytes(table: &TableHandle, set: &RangeTombstones, order: &KeyOrder) -> Result<u64> {
    let (meta, reader) = (table.meta(), table.table()?);
    let offset = |boundary: &KeyBoundary| match boundary {
        KeyBoundary::Min => Ok(0),
        KeyBoundary::Before(key) => reader.approximate_offset(InternalKey::before_versions_of(key)),
        KeyBoundary::After(key) => reader.approximate_offset(InternalKey::new(key, SeqNo::ZERO)),
        KeyBoundary::Max => Ok(meta.size),
    };
    debug_assert!(may_have_covered_entries(meta, set.largest_seqno()), "a range delete may cover entries of the table");
    let mut covered = 0;
    for fragment in set.overlapping(&meta.smallest_key.0, &meta.largest_key.0, order) {
        if may_have_covered_entries(meta, fragment.seqnos[0]) {
            covered += offset(&fragment.range.end)?.saturating_sub(offset(&fragment.range.start)?);
        }
    }
    Ok(covered)
}

fn overlaps(fragment: &RangeTombstone, table: &TableMeta, order: &KeyOrder) -> bool {
    fragment.range.start.cmp_key(&table.largest_key.0, order).is_lt()
        && fragment.range.end.cmp_key(&table.smallest_key.0, order).is_gt()
}

/// Whether a table of `version` that is not `removed`, or one of `added`, may have an entry that the fragment covers.
fn is_needed<T: HasTableMeta>(
    fragment: &RangeTombstone,
    version: &Version<T>,
    removed: &HashSet<FileNumber>,
    added: &[TableMeta],
    order: &KeyOrder,
) -> bool {
    let may_cover = |table: &TableMeta| may_have_covered_entries(table, fragment.seqnos[0]);
    let in_run = |run: &Arc<SortedRun<T>>| {
        let tables = run.tables();
        let first = tables.partition_point(|t| fragment.range.start.cmp_key(&t.meta().largest_key.0, order).is_gt());
        let tables = tables[first..].iter().map(|table| table.meta());
        let mut tables = tables.take_while(|table| overlaps(fragment, table, order));
        tables.any(|table| may_cover(table) && !removed.contains(&table.number))
    };
    version.runs().any(in_run) || added.iter().any(|table| overlaps(fragment, table, order) && may_cover(table))
}

impl LsmTree {
    /// The limits for the entries of `version`. Reads no clock if none of them expires.
    pub(crate) fn expiry_limits_of(&self, version: &Version<TableHandle>) -> ExpiryLimits {
        match version.has_expiring_entries() {
            true => self.context.snapshots.expiry_limits(),
            false => ExpiryLimits::default(),
        }
    }
}

/// The tables whose every value has expired for every reader, and which no older table overlaps. Without them, no older
/// version becomes visible, and their tombstones are not needed either.
pub(crate) fn expired_tables<T: HasTableMeta>(
    version: &Version<T>,
    limits: &ExpiryLimits,
    order: &KeyOrder,
) -> Vec<Arc<T>> {
    let has_expired = |table: &T| {
        let (meta, expiry) = (table.meta(), &table.meta().expiry);
        let values = meta.entries.saturating_sub(meta.tombstones);
        expiry.entries > 0 && expiry.entries == values && expiry.highest_ms <= limits.limit_ms(meta.smallest_seqno)
    };
    let runs: Vec<_> = version.runs().collect();
    let mut tables = Vec::new();
    for (at, run) in runs.iter().enumerate() {
        let is_oldest =
            |table: &T| runs[at + 1..].iter().all(|older| older.overlapping_tables(table.meta(), order).is_empty());
        tables.extend(run.tables().iter().filter(|table| has_expired(table) && is_oldest(table)).map(Arc::clone));
    }
    tables
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::base::version_edit::ExpiryTimes;
    use crate::engine::{LastVisibleSeqno, SnapshotList};
    use crate::lsm::version::tests::{table, table_at};
    use crate::testing::TestEnv;
    use crate::vfs::expiry_clock::ExpiryClock;

    const START_MS: u64 = 1_700_000_000_000;

    fn fragment(start: &str, end: &str, seqnos: &[u64]) -> RangeTombstone {
        let boundary = |key: &str| KeyBoundary::Before(key.as_bytes().into());
        let seqnos = seqnos.iter().map(|&seqno| SeqNo(seqno)).collect();
        RangeTombstone { range: KeyRange { start: boundary(start), end: boundary(end) }, seqnos }
    }

    /// Tables 1 (`a`..`c`, records 10 to 19), 2 (`d`..`f`, 10 to 19) and 3 (`g`..`i`, 30 to 39) of the bottom level.
    fn version(fragments: Vec<RangeTombstone>) -> Version<TableMeta> {
        let tables =
            [table_at(1, "a", "c", (10, 19)), table_at(2, "d", "f", (10, 19)), table_at(3, "g", "i", (30, 39))];
        let order = KeyOrder::bytewise();
        let version = Version::restore(tables.map(|table| (6, table)).into(), &order).unwrap();
        version.restore_range_tombstones(fragments, &order).unwrap()
    }

    fn covered(fragments: Vec<RangeTombstone>, snapshots: &[u64]) -> Vec<u64> {
        let snapshots: Vec<SeqNo> = snapshots.iter().map(|&seqno| SeqNo(seqno)).collect();
        let tables = covered_tables(&version(fragments), &snapshots, &KeyOrder::bytewise());
        tables.iter().map(|table| table.number.0).collect()
    }

    #[test]
    fn covered_tables_have_no_reader() {
        let all = || vec![fragment("", "z", &[25])];
        assert_eq!(covered(all(), &[40]), [1, 2], "the records of 3 are newer");
        assert_eq!(covered(all(), &[9, 40]), [1, 2], "the snapshot is older than all");
        for snapshot in [10, 15, 24] {
            assert_eq!(covered(all(), &[snapshot, 40]), [], "a snapshot at {snapshot} sees some");
        }
        assert_eq!(covered(all(), &[25, 40]), [1, 2], "the snapshot sees the range delete");
        assert_eq!(covered(all(), &[24]), [], "the range delete is not visible");
        assert_eq!(covered(Vec::new(), &[40]), []);
    }

    #[test]
    fn covered_tables_are_covered_to_both_ends() {
        assert_eq!(covered(vec![fragment("a", "cc", &[25])], &[40]), [1]);
        assert_eq!(covered(vec![fragment("a", "c", &[25])], &[40]), [], "the last key is not covered");
        assert_eq!(covered(vec![fragment("aa", "z", &[25])], &[40]), [2], "the first key of 1 is not covered");
        let adjacent = vec![fragment("a", "e", &[25]), fragment("e", "g", &[50, 22])];
        assert_eq!(covered(adjacent, &[40]), [1, 2], "one fragment after the other");
        assert_eq!(covered(vec![fragment("a", "e", &[25]), fragment("ea", "g", &[25])], &[40]), [1]);
    }

    #[test]
    fn fragment_goes_when_no_table_has_its_keys() {
        let (version, order) = (version(Vec::new()), KeyOrder::bytewise());
        let needed = |fragment: RangeTombstone, removed: &[u64], added: &[TableMeta]| {
            let removed = removed.iter().map(|&number| FileNumber(number)).collect();
            is_needed(&fragment, &version, &removed, added, &order)
        };
        assert!(needed(fragment("b", "b1", &[25]), &[], &[]));
        assert!(!needed(fragment("b", "b1", &[25]), &[1], &[]), "its table is removed");
        assert!(!needed(fragment("b", "b1", &[10]), &[], &[]), "all records are newer");
        assert!(!needed(fragment("c1", "d", &[25]), &[], &[]), "no table has the keys");
        assert!(needed(fragment("c1", "d1", &[25]), &[], &[]));
        let rewritten = |through: u64| {
            let table = table_at(4, "a", "c", (0, 19));
            TableMeta { range_deletes_applied_through: SeqNo(through), ..(*table).clone() }
        };
        assert!(!needed(fragment("b", "b1", &[25]), &[1], &[rewritten(25)]), "it was applied");
        assert!(needed(fragment("b", "b1", &[25, 20]), &[1], &[rewritten(24)]), "it was applied in part");
    }

    /// As [`table`], with 10 entries of which `expiring` expire, the last of them `ms` after the start of the test.
    fn expiring(id: u64, keys: (&str, &str), expiring: u64, ms: u64) -> Arc<TableMeta> {
        let highest_ms = START_MS + ms;
        let expiry = ExpiryTimes { entries: expiring, lowest_ms: START_MS, highest_ms };
        Arc::new(TableMeta { expiry, ..(*table(id, keys.0, keys.1)).clone() })
    }

    #[test]
    fn tables_expire_when_no_reader_sees_them() {
        let (env, visible, order) = (TestEnv::new(1), LastVisibleSeqno::default(), KeyOrder::bytewise());
        let list = SnapshotList::with_clock(visible.clone(), ExpiryClock::new(Arc::new(env.clone())));
        list.note_expiry_use();
        let tables = vec![
            (6, expiring(1, ("a", "c"), 10, 50)),
            (6, expiring(2, ("d", "f"), 9, 50)),
            (6, expiring(3, ("g", "i"), 10, 90)),
            (5, expiring(4, ("c", "d"), 10, 50)),
            (5, expiring(5, ("j", "k"), 10, 50)),
            (0, expiring(6, ("k", "l"), 10, 50)),
        ];
        let version = Version::restore(tables, &order).unwrap();
        let found = |limits: &ExpiryLimits| {
            let tables = expired_tables(&version, limits, &order);
            tables.iter().map(|table| table.number.0).collect::<Vec<_>>()
        };
        assert_eq!(found(&list.expiry_limits()), [0; 0]);
        visible.publish(SeqNo(15)); // sees a part of table 1
        let early = list.register();
        env.advance(Duration::from_millis(50));
        assert_eq!(found(&list.expiry_limits()), [5], "others have plain values or overlap older tables");
        drop(early);
        assert_eq!(found(&list.expiry_limits()), [5, 1]);
        env.jump_wall_clock(-40);
        assert_eq!(found(&list.expiry_limits()), [5, 1]);
        env.advance(Duration::from_millis(80));
        assert_eq!(found(&list.expiry_limits()), [5, 1, 3]);
        assert_eq!(found(&ExpiryLimits::default()), [0; 0]);
    }
}
