//! The tables and blob files of a tree, as immutable versions.

use std::collections::HashSet;
use std::ops::{Bound, Range};
use std::sync::Arc;

use crate::base::key::key_prefix_u64;
use crate::base::key_range::RangeTombstone;
use crate::base::version_edit::{FileNumber, TableMeta};
use crate::base::{Error, KeyOrder, Result, SeqNo};
use crate::iter::range_tombstones::RangeTombstones;
use crate::lsm::blob_map::{BlobHandle, BlobMap, FIGURE_LIMIT};

/// Number of levels of a tree. The last one is the bottom level.
pub(crate) const NUM_LEVELS: usize = 7;
/// The number of the bottom level.
pub(crate) const BOTTOM_LEVEL: u8 = NUM_LEVELS as u8 - 1;

/// The versions in a table that are below newer versions of their keys.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SupersededVersions {
    pub(crate) count: u64,
    /// The lowest sequence number of a version directly above one of them; 0 if there is none.
    pub(crate) lowest_newer_seqno: SeqNo,
}

impl SupersededVersions {
    /// Whether a compaction to the bottom level certainly drops one of them, if no snapshot is before `oldest`.
    pub(crate) fn can_drop(&self, oldest: SeqNo) -> bool {
        self.count > 0 && self.lowest_newer_seqno <= oldest
    }
}

/// A table, as versions and compaction picking see it.
pub(crate) trait HasTableMeta {
    fn meta(&self) -> &TableMeta;

    /// The superseded versions in the table, as far as they are known.
    fn superseded(&self) -> SupersededVersions {
        SupersededVersions::default()
    }

    /// The last estimate of the bytes that range deletes cover.
    fn covered_bytes(&self) -> u64 {
        0
    }

    /// Whether scans have passed too many deleted keys in the key range of the table, for its size.
    fn delays_scans(&self) -> bool {
        false
    }

    /// The oldest snapshot when a compaction wrote this table, if one did. The tombstones that it kept could not be
    /// dropped at that snapshot.
    fn oldest_snapshot_when_written(&self) -> Option<SeqNo> {
        None
    }
}

#[cfg(test)]
impl HasTableMeta for TableMeta {
    fn meta(&self) -> &TableMeta {
        self
    }
}

/// Tables in key order with disjoint key ranges: no user key is in two of them.
pub(crate) struct SortedRun<T> {
    tables: Vec<Arc<T>>,
    /// Only with the bytewise order: the first eight bytes of each table's largest key, so that a search reads one
    /// array.
    largest_key_prefixes: Vec<u64>,
}

impl<T: HasTableMeta> SortedRun<T> {
    pub(crate) fn new(tables: Vec<Arc<T>>, order: &KeyOrder) -> SortedRun<T> {
        debug_assert!(
            order.is_custom() || tables.is_sorted_by_key(|table| &table.meta().smallest_key.0),
            "the tables of a run are in key order"
        );
        let largest_key_prefixes = match order.is_bytewise() {
            true => tables.iter().map(|table| key_prefix_u64(&table.meta().largest_key.0)).collect(),
            false => Vec::new(),
        };
        SortedRun { tables, largest_key_prefixes }
    }

    pub(crate) fn tables(&self) -> &[Arc<T>] {
        &self.tables
    }

    /// The index of the first table that does not end before `key`.
    fn lower_bound(&self, key: &[u8], order: &KeyOrder) -> usize {
        let (mut from, mut to) = (0, self.tables.len());
        if !self.largest_key_prefixes.is_empty() {
            let wanted = key_prefix_u64(key);
            from = self.largest_key_prefixes.partition_point(|&prefix| prefix < wanted);
            to = from + self.largest_key_prefixes[from..].partition_point(|&prefix| prefix == wanted);
        }
        let at =
            from + self.tables[from..to].partition_point(|table| order.cmp(&table.meta().largest_key.0, key).is_lt());
        debug_assert!(
            order.is_custom() || at == 0 || &self.tables[at - 1].meta().largest_key.0[..] < key,
            "the tables before the result end before the key"
        );
        debug_assert!(
            order.is_custom() || self.tables.get(at).is_none_or(|table| &table.meta().largest_key.0[..] >= key),
            "the result does not end before the key"
        );
        at
    }

    /// The only table that may contain `key`.
    pub(crate) fn find(&self, key: &[u8], order: &KeyOrder) -> Option<&Arc<T>> {
        let table = self.tables.get(self.lower_bound(key, order))?;
        order.cmp(&table.meta().smallest_key.0, key).is_le().then_some(table)
    }

    /// The tables whose key ranges overlap the bounds.
    pub(crate) fn tables_within(&self, lower: Bound<&[u8]>, upper: Bound<&[u8]>, order: &KeyOrder) -> Range<usize> {
        let from = match lower {
            Bound::Included(key) | Bound::Excluded(key) => self.lower_bound(key, order),
            Bound::Unbounded => 0,
        };
        let starts_before = |table: &Arc<T>| match upper {
            Bound::Included(key) => order.cmp(&table.meta().smallest_key.0, key).is_le(),
            Bound::Excluded(key) => order.cmp(&table.meta().smallest_key.0, key).is_lt(),
            Bound::Unbounded => true,
        };
        from..from + self.tables[from..].partition_point(starts_before)
    }

    /// The tables whose key ranges overlap that of `table`.
    pub(crate) fn overlapping_tables(&self, table: &TableMeta, order: &KeyOrder) -> Range<usize> {
        self.overlapping(&table.smallest_key.0, &table.largest_key.0, order)
    }

    /// The tables whose key ranges overlap `smallest..=largest`.
    pub(crate) fn overlapping(&self, smallest: &[u8], largest: &[u8], order: &KeyOrder) -> Range<usize> {
        debug_assert!(order.is_custom() || smallest <= largest, "the keys are a range");
        let from = self.lower_bound(smallest, order);
        let len = self.tables[from..].partition_point(|table| order.cmp(&table.meta().smallest_key.0, largest).is_le());
        debug_assert!(
            order.is_custom()
                || self.tables.get(from + len).is_none_or(|table| &table.meta().smallest_key.0[..] > largest),
            "the tables after the result begin after the range"
        );
        from..from + len
    }
}

/// The runs of one level.
pub(crate) struct Level<T> {
    /// Newest first. At most one below level 0.
    pub(crate) runs: Vec<Arc<SortedRun<T>>>,
    pub(crate) tables: u64,
    pub(crate) bytes: u64,
    pub(crate) entries: u64,
    pub(crate) tombstones: u64,
    /// Number of entries that expire.
    pub(crate) expiring: u64,
    /// Bytes in blob files that the tables point to.
    pub(crate) blob_bytes: u64,
}

impl<T: HasTableMeta> Level<T> {
    fn new(runs: Vec<Arc<SortedRun<T>>>) -> Level<T> {
        let mut level = Level { runs, tables: 0, bytes: 0, entries: 0, tombstones: 0, expiring: 0, blob_bytes: 0 };
        for table in level.runs.iter().flat_map(|run| run.tables()) {
            let meta = table.meta();
            level.tables += 1;
            level.bytes += meta.size;
            level.entries += meta.entries;
            level.tombstones += meta.tombstones;
            level.expiring += meta.expiry.entries;
            level.blob_bytes += meta.referenced_blob_bytes();
        }
        level
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tables == 0
    }

    /// All tables, those of newer runs first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<T>> {
        self.runs.iter().flat_map(|run| run.tables())
    }
}

/// An immutable list of runs per level. For one key, everything in a newer run, or on a shallower level, is newer.
pub(crate) struct Version<T> {
    levels: Vec<Level<T>>,
    blobs: Arc<BlobMap>,
    /// The flushed range deletes that may cover entries of the tables.
    range_tombstones: Arc<RangeTombstones>,
}

/// The difference between two versions.
pub(crate) struct VersionChange<T> {
    pub(crate) removed: HashSet<FileNumber>,
    /// The newest run of level 0.
    pub(crate) flushed: Vec<Arc<T>>,
    /// Tables for levels 1 and deeper.
    pub(crate) added: Vec<(u8, Arc<T>)>,
    /// Blob files to add and to remove.
    pub(crate) blobs_added: Vec<Arc<BlobHandle>>,
    pub(crate) blobs_removed: Vec<FileNumber>,
    /// The new set of range tombstones, if it changes.
    pub(crate) range_tombstones: Option<Arc<RangeTombstones>>,
}

impl<T> Default for VersionChange<T> {
    fn default() -> VersionChange<T> {
        VersionChange {
            removed: HashSet::new(),
            flushed: Vec::new(),
            added: Vec::new(),
            blobs_added: Vec::new(),
            blobs_removed: Vec::new(),
            range_tombstones: None,
        }
    }
}

impl<T: HasTableMeta> Version<T> {
    pub(crate) fn empty() -> Version<T> {
        Version {
            levels: (0..NUM_LEVELS).map(|_| Level::new(Vec::new())).collect(),
            blobs: Arc::default(),
            range_tombstones: Arc::default(),
        }
    }

    /// Builds the version that a manifest lists.
    ///
    /// Flushes have increasing, disjoint ranges of sequence numbers. So the runs of level 0 follow from these: newest
    /// first, and adjacent tables are joined to one run while their keys do not overlap.
    ///
    /// # Errors
    /// `Corruption` for a level that does not exist, a table that is listed twice or whose figures contradict each
    /// other, or overlapping tables on a level below 0.
    pub(crate) fn restore(tables: Vec<(u8, Arc<T>)>, order: &KeyOrder) -> Result<Version<T>> {
        let mut levels: Vec<Vec<Arc<T>>> = (0..NUM_LEVELS).map(|_| Vec::new()).collect();
        let mut seen = HashSet::new();
        for (level, table) in tables {
            let meta = table.meta();
            let number = meta.number.0;
            if !seen.insert(number) {
                return Err(Error::corruption(format!("manifest lists table {number} twice")));
            }
            if order.cmp(&meta.smallest_key.0, &meta.largest_key.0).is_gt() {
                return Err(Error::corruption(format!("smallest key of table {number} is above its largest key")));
            }
            let is_possible = meta.tombstones.max(meta.expiry.entries) <= meta.entries
                && meta.entries.max(meta.raw_bytes) < FIGURE_LIMIT
                && meta.blob_usage.iter().all(|usage| usage.bytes < FIGURE_LIMIT);
            if meta.smallest_seqno > meta.largest_seqno || !is_possible {
                return Err(Error::corruption(format!("figures of table {number} contradict each other")));
            }
            let Some(list) = levels.get_mut(usize::from(level)) else {
                return Err(Error::corruption(format!("table {number} is on level {level}, which does not exist")));
            };
            list.push(table);
        }
        let mut l0 = std::mem::take(&mut levels[0]);
        l0.sort_by_key(|table| std::cmp::Reverse((table.meta().largest_seqno, table.meta().number)));
        let mut groups: Vec<Vec<Arc<T>>> = Vec::new();
        for table in l0 {
            match groups.last_mut() {
                Some(group) if group.iter().all(|other| disjoint(other.meta(), table.meta(), order)) => {
                    group.push(table)
                }
                _ => groups.push(vec![table]),
            }
        }
        let l0 = Level::new(groups.into_iter().map(|g| sorted_run(g, order)).collect());
        let mut version = Version { levels: vec![l0], ..Version::empty() };
        for (level, tables) in levels.into_iter().enumerate().skip(1) {
            let run = sorted_run(tables, order);
            if let Some(pair) = run.tables().windows(2).find(|pair| !disjoint(pair[0].meta(), pair[1].meta(), order)) {
                let (a, b) = (pair[0].meta().number.0, pair[1].meta().number.0);
                return Err(Error::corruption(format!("tables {a} and {b} of level {level} overlap")));
            }
            version.levels.push(Level::new(if run.tables().is_empty() { Vec::new() } else { vec![run] }));
        }
        Ok(version)
    }

    /// Adds the blob files that the manifest lists.
    ///
    /// # Errors
    /// `Corruption` if the tables point to values that these blob files do not have.
    pub(crate) fn restore_blobs(self, handles: Vec<Arc<BlobHandle>>) -> Result<Version<T>> {
        let blobs = BlobMap::restore(handles, self.tables().flat_map(|(_, table)| &table.meta().blob_usage))?;
        Ok(Version { blobs: Arc::new(blobs), ..self })
    }

    /// Adds the range tombstones that the manifest lists.
    ///
    /// # Errors
    /// `Corruption` if they overlap.
    pub(crate) fn restore_range_tombstones(
        self,
        fragments: Vec<RangeTombstone>,
        order: &KeyOrder,
    ) -> Result<Version<T>> {
        let range_tombstones = Arc::new(RangeTombstones::from_fragments(fragments, order)?);
        Ok(Version { range_tombstones, ..self })
    }

    pub(crate) fn range_tombstones(&self) -> &Arc<RangeTombstones> {
        &self.range_tombstones
    }

    /// Whether a table has entries that expire.
    pub(crate) fn has_expiring_entries(&self) -> bool {
        self.levels.iter().any(|level| level.expiring > 0)
    }

    pub(crate) fn blobs(&self) -> &Arc<BlobMap> {
        &self.blobs
    }

    /// Average number of blob bytes that this many entries refer to.
    pub(crate) fn estimated_blob_bytes(&self, entries: u64) -> u64 {
        let values: u64 = self.levels.iter().map(|level| level.entries.saturating_sub(level.tombstones)).sum();
        let bytes = u128::from(self.blobs.totals().referenced) * u128::from(entries) / u128::from(values.max(1));
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }

    /// Upper estimate of the blob bytes that entries may hide, that is, supersede although tables still refer to them:
    /// each pointer hides about as many bytes as it points to, and each tombstone the average of an entry.
    pub(crate) fn max_hidden_bytes(&self, pointed: u64, tombstones: u64) -> u64 {
        pointed.saturating_add(self.estimated_blob_bytes(tombstones))
    }

    /// For each level, the upper estimate of the blob bytes on this and deeper levels that its entries hide. A level
    /// below level 0 hides no bytes of its own.
    pub(crate) fn max_hidden_bytes_per_level(&self) -> [u64; NUM_LEVELS] {
        let mut hides = [0; NUM_LEVELS];
        let mut below = 0u64;
        for (at, level) in self.levels.iter().enumerate().rev() {
            let reach = below + if at == 0 { level.blob_bytes } else { 0 };
            hides[at] = self.max_hidden_bytes(level.blob_bytes, level.tombstones).min(reach);
            below += level.blob_bytes;
        }
        hides
    }

    pub(crate) fn level(&self, level: u8) -> &Level<T> {
        &self.levels[usize::from(level)]
    }

    pub(crate) fn levels(&self) -> impl DoubleEndedIterator<Item = (u8, &Level<T>)> {
        (0..=BOTTOM_LEVEL).zip(&self.levels)
    }

    /// The only run of a level below 0, if the level has tables.
    pub(crate) fn run(&self, level: u8) -> Option<&Arc<SortedRun<T>>> {
        self.level(level).runs.first()
    }

    /// Every run, newest first.
    pub(crate) fn runs(&self) -> impl Iterator<Item = &Arc<SortedRun<T>>> {
        self.levels.iter().flat_map(|level| &level.runs)
    }

    /// The runs of the levels below `level`.
    pub(crate) fn runs_below(&self, level: u8) -> Vec<Arc<SortedRun<T>>> {
        self.levels.iter().skip(usize::from(level) + 1).flat_map(|level| &level.runs).map(Arc::clone).collect()
    }

    /// All tables with their levels.
    pub(crate) fn tables(&self) -> impl Iterator<Item = (u8, &Arc<T>)> {
        self.levels().flat_map(|(number, level)| level.iter().map(move |table| (number, table)))
    }

    /// The version after `change`. Unchanged runs are shared.
    pub(crate) fn with_changes(&self, change: VersionChange<T>, order: &KeyOrder) -> Version<T> {
        let expected = if cfg!(debug_assertions) { self.table_count_after(&change) } else { 0 };
        let blobs = self.blobs_with(&change);
        let range_tombstones = change.range_tombstones.clone().unwrap_or_else(|| Arc::clone(&self.range_tombstones));
        let mut levels: Vec<Vec<Arc<SortedRun<T>>>> = Vec::with_capacity(NUM_LEVELS);
        for (number, level) in self.levels() {
            let added: Vec<&Arc<T>> = change.added.iter().filter(|(to, _)| *to == number).map(|(_, t)| t).collect();
            assert!(number > 0 || added.is_empty(), "level 0 grows by flushes only");
            let mut runs: Vec<Arc<SortedRun<T>>> = Vec::new();
            for run in &level.runs {
                let touched =
                    !added.is_empty() || run.tables().iter().any(|t| change.removed.contains(&t.meta().number));
                if !touched {
                    runs.push(Arc::clone(run));
                    continue;
                }
                let stay = run.tables().iter().filter(|table| !change.removed.contains(&table.meta().number));
                let tables: Vec<Arc<T>> = stay.chain(added.iter().copied()).map(Arc::clone).collect();
                if !tables.is_empty() {
                    runs.push(sorted_run(tables, order));
                }
            }
            if level.runs.is_empty() && !added.is_empty() {
                runs.push(sorted_run(added.into_iter().map(Arc::clone).collect(), order));
            }
            levels.push(runs);
        }
        if !change.flushed.is_empty() {
            levels[0].insert(0, sorted_run(change.flushed, order));
        }
        let levels: Vec<Level<T>> = levels.into_iter().map(Level::new).collect();
        let version = Version { levels, blobs, range_tombstones };
        if cfg!(debug_assertions) {
            assert_eq!(version.tables().count(), expected, "no table is lost");
            version.check_invariants(order);
        }
        version
    }

    /// The number of tables after `change`. Panics if it removes tables that the version does not have, or adds some to
    /// levels that do not exist.
    fn table_count_after(&self, change: &VersionChange<T>) -> usize {
        let removed = self.tables().filter(|(_, table)| change.removed.contains(&table.meta().number)).count();
        assert_eq!(removed, change.removed.len(), "the version has the tables to be removed");
        assert!(change.added.iter().all(|(level, _)| usize::from(*level) < NUM_LEVELS), "a table is added to a level");
        self.tables().count() - removed + change.added.len() + change.flushed.len()
    }

    /// Panics if the runs, the tables and the blob files contradict each other.
    fn check_invariants(&self, order: &KeyOrder) {
        assert_eq!(self.levels.len(), NUM_LEVELS);
        assert!(self.levels[1..].iter().all(|level| level.runs.len() <= 1), "a level below level 0 is one run");
        let mut numbers = HashSet::new();
        for run in self.runs() {
            assert!(!run.tables().is_empty(), "a run has at least one table");
            for pair in run.tables().windows(2) {
                let is_disjoint = order.is_custom() || disjoint(pair[0].meta(), pair[1].meta(), order);
                assert!(is_disjoint, "no user key is in two tables of a run");
            }
            for meta in run.tables().iter().map(|table| table.meta()) {
                let is_range = order.is_custom() || meta.smallest_key.0 <= meta.largest_key.0;
                assert!(is_range, "the smallest key of table {} is above its largest key", meta.number.0);
                assert!(numbers.insert(meta.number), "table {} is in the version twice", meta.number.0);
                assert!(meta.smallest_seqno <= meta.largest_seqno && meta.tombstones <= meta.entries, "{meta:?}");
            }
        }
        self.blobs.check_invariants(self.tables().flat_map(|(_, table)| &table.meta().blob_usage));
        let blob_bytes: u64 = self.levels.iter().map(|level| level.blob_bytes).sum();
        assert_eq!(blob_bytes, self.blobs.totals().referenced, "the levels point to the referenced bytes");
    }

    fn blobs_with(&self, change: &VersionChange<T>) -> Arc<BlobMap> {
        let removed =
            || self.tables().map(|(_, table)| table).filter(|table| change.removed.contains(&table.meta().number));
        let added = || change.flushed.iter().chain(change.added.iter().map(|(_, table)| table));
        let untouched = change.blobs_added.is_empty() && change.blobs_removed.is_empty();
        if untouched && added().chain(removed()).all(|table| table.meta().blob_usage.is_empty()) {
            return Arc::clone(&self.blobs);
        }
        let gained = added().flat_map(|table| &table.meta().blob_usage);
        let lost = removed().flat_map(|table| &table.meta().blob_usage);
        Arc::new(self.blobs.with_changes(&change.blobs_added, &change.blobs_removed, gained, lost))
    }
}

/// Whether a table may have entries that a range delete over its keys covers.
pub(crate) fn may_have_covered_entries(table: &TableMeta, range_delete: SeqNo) -> bool {
    table.smallest_seqno < range_delete && table.range_deletes_applied_through < range_delete
}

/// Whether the key ranges of two tables are disjoint.
pub(crate) fn disjoint(a: &TableMeta, b: &TableMeta, order: &KeyOrder) -> bool {
    order.cmp(&a.largest_key.0, &b.smallest_key.0).is_lt() || order.cmp(&b.largest_key.0, &a.smallest_key.0).is_lt()
}

fn sorted_run<T: HasTableMeta>(mut tables: Vec<Arc<T>>, order: &KeyOrder) -> Arc<SortedRun<T>> {
    tables.sort_by(|a, b| order.cmp(&a.meta().smallest_key.0, &b.meta().smallest_key.0));
    Arc::new(SortedRun::new(tables, order))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::base::version_edit::{ExpiryTimes, TableBlobUsage};
    use crate::testing::{FnComparator, TestOrder};

    /// A table of 100 bytes and 10 entries.
    pub(crate) fn table(id: u64, smallest: &str, largest: &str) -> Arc<TableMeta> {
        table_at(id, smallest, largest, (id * 10, id * 10 + 9))
    }

    pub(crate) fn table_at(id: u64, smallest: &str, largest: &str, seqnos: (u64, u64)) -> Arc<TableMeta> {
        Arc::new(TableMeta {
            number: FileNumber(id),
            size: 100,
            entries: 10,
            tombstones: 0,
            smallest_seqno: SeqNo(seqnos.0),
            largest_seqno: SeqNo(seqnos.1),
            created_ms: 0,
            raw_bytes: 100,
            smallest_key: (smallest.into(), SeqNo(seqnos.1)),
            largest_key: (largest.into(), SeqNo(seqnos.0)),
            blob_usage: Vec::new(),
            range_deletes_applied_through: SeqNo::ZERO,
            expiry: ExpiryTimes::default(),
            global_seqno: None,
        })
    }

    pub(crate) fn run(tables: Vec<Arc<TableMeta>>) -> Arc<SortedRun<TableMeta>> {
        sorted_run(tables, &KeyOrder::bytewise())
    }

    fn ids(version: &Version<TableMeta>, level: u8) -> Vec<Vec<u64>> {
        let runs = version.level(level).runs.iter();
        runs.map(|run| run.tables().iter().map(|table| table.number.0).collect()).collect()
    }

    /// Regression: the sums of the bytes to which damaged tables pointed overflowed.
    #[test]
    fn impossible_blob_usage_is_corruption() {
        let usage = |file, bytes| TableBlobUsage { logical_file: FileNumber(file), count: 1, bytes };
        let restore = |usage: &[TableBlobUsage]| {
            let with_usage = |meta: &TableMeta| Arc::new(TableMeta { blob_usage: usage.to_vec(), ..meta.clone() });
            let tables = [table(1, "a", "c"), table(2, "e", "g")].map(|meta| (6, with_usage(&meta)));
            Version::restore(tables.to_vec(), &KeyOrder::bytewise())
        };
        restore(&[usage(8, 1 << 40), usage(9, 1 << 40)]).unwrap();
        for bad in [&[usage(8, u64::MAX)][..], &[usage(8, u64::MAX), usage(9, 1)], &[usage(8, 1 << 48)]] {
            assert_eq!(restore(bad).err().unwrap().kind(), crate::base::ErrorKind::Corruption);
        }
    }

    /// Regression: the sums of damaged figures overflowed.
    #[test]
    fn impossible_figures_are_corruption() {
        let restore = |change: &dyn Fn(&mut TableMeta)| {
            let mut meta = (*table(1, "a", "c")).clone();
            change(&mut meta);
            Version::restore(vec![(6, Arc::new(meta)), (6, table(2, "e", "g"))], &KeyOrder::bytewise())
        };
        restore(&|_| ()).unwrap();
        let changes: [&dyn Fn(&mut TableMeta); 3] =
            [&|meta| meta.entries = u64::MAX, &|meta| meta.raw_bytes = 1 << 48, &|meta| meta.expiry.entries = 11];
        for change in changes {
            assert_eq!(restore(change).err().unwrap().kind(), crate::base::ErrorKind::Corruption);
        }
    }

    /// Regression: an assertion about the tables of a run failed if a comparator contradicted itself.
    #[test]
    fn a_contradiction_fails_no_assertion() {
        let order = KeyOrder::custom(Arc::new(FnComparator(|_: &[u8], _: &[u8]| std::cmp::Ordering::Equal)));
        let added = vec![(1, table(1, "a", "c")), (1, table(2, "e", "g"))];
        let version = Version::empty().with_changes(VersionChange { added, ..VersionChange::default() }, &order);
        assert_eq!(ids(&version, 1), [[1, 2]]);
    }

    #[test]
    fn finds_table_when_key_prefixes_are_equal() {
        let tables = vec![
            table(1, "a", "c"),
            table(2, "longprefix-a", "longprefix-c"),
            table(3, "longprefix-e", "longprefix-g"),
        ];
        for order in [KeyOrder::bytewise(), KeyOrder::custom(Arc::new(TestOrder::Bytes))] {
            let run = SortedRun::new(tables.clone(), &order);
            let find = |key: &str| run.find(key.as_bytes(), &order).map(|table| table.number.0);
            let keys = [
                "",
                "a",
                "b",
                "c",
                "d",
                "longprefix-b",
                "longprefix-d",
                "longprefix-e",
                "longprefix-g",
                "longprefix-h",
                "z",
            ];
            let found = keys.map(find);
            assert_eq!(found, [None, Some(1), Some(1), Some(1), None, Some(2), None, Some(3), Some(3), None, None]);
            let overlapping = |a: &str, b: &str| run.overlapping(a.as_bytes(), b.as_bytes(), &order);
            assert_eq!(overlapping("", "z"), 0..3);
            assert_eq!(overlapping("c", "longprefix-a"), 0..2);
            assert_eq!(overlapping("d", "e"), 1..1);
            assert_eq!(overlapping("longprefix-d", "longprefix-d"), 2..2);
            assert_eq!(overlapping("longprefix-f", "z"), 2..3);
        }
    }

    #[test]
    fn restores_l0_run_order_from_seqnos() {
        let order = KeyOrder::bytewise();
        let tables = vec![
            (0, table_at(7, "a", "k", (10, 18))),
            (0, table_at(3, "m", "z", (11, 19))),
            (0, table_at(9, "a", "z", (30, 39))),
            (0, table_at(8, "c", "d", (20, 29))),
            (6, table_at(2, "p", "q", (0, 0))),
            (6, table_at(1, "a", "b", (0, 0))),
        ];
        let version = Version::restore(tables, &order).unwrap();
        assert_eq!(ids(&version, 0), [vec![9], vec![8, 3], vec![7]], "8 and 3 do not overlap, 7 is older than 8");
        assert_eq!(ids(&version, 6), [vec![1, 2]]);
        assert_eq!((version.level(0).tables, version.level(0).bytes, version.level(6).entries), (4, 400, 20));
    }

    #[test]
    fn refuses_impossible_table_sets() {
        let order = KeyOrder::bytewise();
        for bad in [
            vec![(7, table(1, "a", "b"))],
            vec![(1, table(1, "b", "a"))],
            vec![(1, table(1, "a", "b")), (2, table(1, "a", "b"))],
            vec![(1, table(1, "a", "c")), (1, table(2, "c", "d"))],
        ] {
            let error = Version::restore(bad, &order).map(drop).unwrap_err();
            assert_eq!(error.kind(), crate::base::ErrorKind::Corruption);
        }
    }

    #[test]
    fn changes_touch_only_what_they_name() {
        let order = KeyOrder::bytewise();
        let version = Version::empty()
            .with_changes(VersionChange { flushed: vec![table(1, "a", "f")], ..VersionChange::default() }, &order);
        let version = version.with_changes(
            VersionChange { flushed: vec![table(3, "p", "z"), table(2, "a", "k")], ..VersionChange::default() },
            &order,
        );
        assert_eq!(ids(&version, 0), [vec![2, 3], vec![1]]);
        let removed = HashSet::from([FileNumber(1), FileNumber(2)]);
        let added = vec![(6, table(5, "g", "k")), (6, table(4, "a", "f"))];
        let after = version.with_changes(VersionChange { removed, added, ..VersionChange::default() }, &order);
        assert_eq!(ids(&after, 0), [vec![3]]);
        assert_eq!(ids(&after, 6), [vec![4, 5]]);
        assert_eq!(ids(&version, 0), [vec![2, 3], vec![1]], "the old version is unchanged");
        let moved = after.with_changes(
            VersionChange {
                removed: HashSet::from([FileNumber(3)]),
                added: vec![(6, table(3, "p", "z"))],
                ..VersionChange::default()
            },
            &order,
        );
        assert_eq!(ids(&moved, 6), [vec![4, 5, 3]]);
        assert!(moved.level(0).is_empty() && moved.level(0).runs.is_empty());
        let emptied = moved.with_changes(
            VersionChange {
                removed: HashSet::from([FileNumber(3), FileNumber(4), FileNumber(5)]),
                ..VersionChange::default()
            },
            &order,
        );
        assert_eq!(emptied.tables().count(), 0);
        assert_eq!(emptied.runs().count(), 0);
    }
}
