//! Picks the tables to compact or to move next: a pure function of plain values.
//!
//! In this order: levels that exceed their targets; tables with many tombstones, superseded versions, entries that
//! range deletes cover, or expired entries; in an idle tree, level 0, for faster reads; tables that may keep too many
//! stale blob bytes; and if forced, everything until the tree is one run at the bottom without droppable entries.
//!
//! Leveled compaction: the bottom level has no limit. The target of each level above it is `level_size_multiplier`
//! times smaller, up to the *base level*, into which level 0 is compacted. In a small tree the bottom is the base
//! level, so that data is rewritten as seldom as possible and few superseded versions are kept. As the tree grows, the
//! base level moves up. Data that remains on levels between level 0 and the base level is moved down.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use crate::base::version_edit::{FileNumber, TableMeta};
use crate::base::{KeyOrder, SeqNo};
use crate::engine::ExpiryLimits;
use crate::lsm::options::{LeveledOptions, LsmOptions};
use crate::lsm::version::{
    BOTTOM_LEVEL, HasTableMeta, Level, NUM_LEVELS, SortedRun, Version, disjoint, may_have_covered_entries,
};

/// A compaction below level 0 has at most the bytes of this many tables, unless one table alone overlaps more.
const COMPACTION_TABLES_MAX: u64 = 25;
/// Tables are small compared to blob files if they have at most one part in this many of the bytes of the blob files.
const TREE_SHARE: u64 = 4;
/// In an idle tree, level 0 is compacted if that rewrites at most this many times its bytes. This is less than its
/// compaction from level to level would cost later.
const IDLE_L0_COST_MAX: u64 = 4;
/// If forced, a table is rewritten when about one in this many of its entries has expired.
const EXPIRED_SHARE: u64 = 16;
/// Bytes of debt for each byte of range tombstones above the limit: about the bytes of tables that are compacted to
/// drop it.
const RANGE_TOMBSTONE_DEBT: u64 = 64;

/// By level, the largest key of the last compaction. The next compaction starts after it.
pub(crate) type CompactPointers = [Option<Vec<u8>>; NUM_LEVELS];

/// Maximum number of bytes of each level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LevelTargets {
    pub(crate) base_level: u8,
    /// 0 for levels above the base level.
    pub(crate) bytes: [u64; NUM_LEVELS],
}

pub(crate) fn level_targets<T: HasTableMeta>(version: &Version<T>, options: &LeveledOptions) -> LevelTargets {
    let largest = version.levels().skip(1).map(|(_, level)| level.bytes).max().unwrap_or(0);
    let base_size = options.base_level_size.max(1);
    let mut targets = LevelTargets { base_level: BOTTOM_LEVEL, bytes: [0; NUM_LEVELS] };
    let mut bytes = largest.max(base_size);
    targets.bytes[usize::from(BOTTOM_LEVEL)] = bytes;
    while bytes > base_size && targets.base_level > 1 {
        bytes = (bytes / u64::from(options.level_size_multiplier.max(2))).max(1);
        targets.base_level -= 1;
        targets.bytes[usize::from(targets.base_level)] = bytes;
    }
    debug_assert!((1..=BOTTOM_LEVEL).contains(&targets.base_level), "the base level is below level 0");
    debug_assert!(targets.bytes.is_sorted(), "a deeper level has a larger target");
    debug_assert!(targets.bytes[usize::from(targets.base_level)] > 0, "the base level has a target");
    targets
}

/// The inputs of a pick.
pub(crate) struct CompactionPicker<'a, T> {
    pub(crate) version: &'a Version<T>,
    pub(crate) order: &'a KeyOrder,
    pub(crate) options: &'a LsmOptions,
    pub(crate) compact_pointers: &'a CompactPointers,
    /// The oldest snapshot that is known. A bottom table with tombstones that could not be dropped when it was written
    /// is compacted again when this has increased since.
    pub(crate) oldest_snapshot: SeqNo,
    pub(crate) expiry_limits: &'a ExpiryLimits,
    /// All memtables are empty.
    pub(crate) idle: bool,
}

/// The reason for a compaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CompactionReason {
    /// Too many runs on level 0.
    L0Runs,
    /// A level exceeds its size target.
    LevelSize,
    /// There are no writes, and reducing the number of runs is cheap.
    IdleL0,
    /// More than half of a table are tombstones, or a table has tombstones and scans have passed many deleted keys.
    Tombstones,
    /// A quarter of the versions of a table are superseded ones that a reader needed when it was written. At least one
    /// of them can be dropped now.
    Superseded,
    /// Range deletes cover a quarter of a table, or there are too many range tombstones.
    RangeDeletes,
    /// About half of the entries of a table have expired.
    Expired,
    /// `major_compact`.
    Forced,
    /// Invisible pointers keep values in blob files.
    HiddenBlobs,
}

/// A compaction to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PickedCompaction {
    pub(crate) reason: CompactionReason,
    pub(crate) start_level: u8,
    pub(crate) output_level: u8,
    /// Tables of `start_level`.
    pub(crate) start_level_inputs: Vec<FileNumber>,
    /// Tables of `output_level` that overlap them; none if both levels are the same.
    pub(crate) output_level_inputs: Vec<FileNumber>,
    /// Only the level of the tables changes. No table is rewritten.
    pub(crate) trivial_move: bool,
}

impl PickedCompaction {
    /// Panics if the compaction would lose an entry or change the order of two versions of a key.
    pub(crate) fn check_invariants<T: HasTableMeta>(&self, version: &Version<T>, order: &KeyOrder) {
        let (from, to) = (self.start_level, self.output_level);
        assert!(from <= to && (1..=BOTTOM_LEVEL).contains(&to), "tables of level {from} cannot go to level {to}");
        assert!(from < to || self.output_level_inputs.is_empty(), "a rewrite has inputs of one level");
        assert!(!self.trivial_move || from < to, "a move changes the level of its tables");
        assert!(!self.trivial_move || self.output_level_inputs.is_empty(), "moved tables overlap no table");
        let has_all = |level: u8, inputs: &[FileNumber]| {
            let found = version.level(level).iter().filter(|table| inputs.contains(&table.meta().number)).count();
            found == inputs.len()
        };
        assert!(!self.start_level_inputs.is_empty(), "a compaction has an input");
        assert!(has_all(from, &self.start_level_inputs), "level {from} has each input once");
        assert!(has_all(to, &self.output_level_inputs), "level {to} has each input once");
        if order.is_custom() {
            return;
        }
        let tables: Vec<&TableMeta> = version.level(from).iter().map(|table| table.meta()).collect();
        for (at, table) in tables.iter().enumerate().filter(|(_, t)| self.start_level_inputs.contains(&t.number)) {
            let number = table.number.0;
            // Level 0 lists newer tables first.
            let is_above = |older: &&TableMeta| {
                (!self.trivial_move && self.start_level_inputs.contains(&older.number)) || disjoint(older, table, order)
            };
            let stay_below = &tables[if from == 0 { at + 1 } else { tables.len() }..];
            assert!(stay_below.iter().all(is_above), "table {number} would go below an older table of level 0");
            for level in from + 1..=to {
                let overlapping = version.run(level).map(|run| &run.tables()[run.overlapping_tables(table, order)]);
                let is_input = |other: &T| level == to && self.output_level_inputs.contains(&other.meta().number);
                let are_inputs = overlapping.unwrap_or_default().iter().all(|other| is_input(other));
                assert!(are_inputs, "table {number} overlaps a table of level {level} that is no input");
            }
        }
    }
}

impl<T: HasTableMeta> CompactionPicker<'_, T> {
    /// The most useful compaction; `None` if none is useful.
    pub(crate) fn pick_compaction(&self, forced: bool) -> Option<PickedCompaction> {
        let shape = self.pick_leveled().or_else(|| self.pick_tombstones()).or_else(|| self.pick_superseded());
        let shape = shape.or_else(|| self.pick_range_deleted()).or_else(|| self.pick_expired());
        let shape = shape.or_else(|| self.pick_idle_l0()).or_else(|| self.pick_hidden_blobs());
        shape.or_else(|| if forced { self.pick_forced() } else { None })
    }

    /// Compacts a table with more than one half tombstones, or one whose tombstones delay scans, into the next level.
    /// If no deeper level overlaps it, rewrites it without the tombstones, if these can be dropped.
    fn pick_tombstones(&self) -> Option<PickedCompaction> {
        let dense = |table: &T| {
            let meta = table.meta();
            meta.tombstones > meta.entries / 2 || (meta.tombstones > 0 && table.delays_scans())
        };
        for (number, level) in self.version.levels().filter(|(_, level)| level.tombstones > 0) {
            if number == 0 {
                if level.iter().any(|table| dense(table)) {
                    return Some(self.pick_l0(CompactionReason::Tombstones, self.l0_output_level(), false));
                }
                continue;
            }
            for (at, table) in level.iter().enumerate().filter(|(_, table)| dense(table)) {
                if self.overlaps_below(number, table) {
                    return Some(self.pick_from_level(CompactionReason::Tombstones, number, number + 1, at, 1, true));
                }
                if self.can_drop_entries(number, table) {
                    return Some(self.merge(CompactionReason::Tombstones, number, number, &[table]));
                }
            }
        }
        None
    }

    /// Rewrites a bottom table of which at least a quarter are superseded versions, if some of them can be dropped now:
    /// a snapshot needed them when the table was written. Each rewrite drops at least one.
    fn pick_superseded(&self) -> Option<PickedCompaction> {
        let mut tables = self.version.run(BOTTOM_LEVEL)?.tables().iter();
        let table = tables.find(|table| {
            let superseded = table.superseded();
            superseded.can_drop(self.oldest_snapshot) && superseded.count >= table.meta().entries.div_ceil(4)
        })?;
        Some(self.merge(CompactionReason::Superseded, BOTTOM_LEVEL, BOTTOM_LEVEL, &[table]))
    }

    /// Rewrites a table of which range deletes cover at least a quarter. If there are too many range tombstones,
    /// rewrites the table that overlaps most of them.
    fn pick_range_deleted(&self) -> Option<PickedCompaction> {
        let set = self.version.range_tombstones();
        if set.is_empty() {
            return None;
        }
        let tables = || self.version.tables().filter(|(_, table)| self.can_apply_range_deletes(table));
        let is_dense = |table: &T| table.covered_bytes() > 0 && table.covered_bytes() >= table.meta().size / 4;
        let dense = tables().find(|(_, table)| is_dense(table));
        let overlapping =
            |meta: &TableMeta| set.overlapping(&meta.smallest_key.0, &meta.largest_key.0, self.order).count();
        let (level, table) = match dense {
            None if set.bytes() > self.options.range_tombstone_bytes_max() => {
                tables().max_by_key(|(_, table)| overlapping(table.meta()))?
            }
            dense => dense?,
        };
        match level {
            0 => Some(self.pick_l0(CompactionReason::RangeDeletes, self.l0_output_level(), false)),
            level => Some(self.merge(CompactionReason::RangeDeletes, level, level, &[table])),
        }
    }

    /// Compacts a table of which about half has expired into the next level, if a deeper level overlaps it, because
    /// tombstones would stay otherwise. Else rewrites it. No rewritten table is picked again before more entries
    /// expire.
    fn pick_expired(&self) -> Option<PickedCompaction> {
        let is_dense = |table: &&Arc<T>| self.estimate_expired(table) >= table.meta().entries.div_ceil(2);
        for (number, level) in self.version.levels().filter(|(_, level)| level.expiring > 0) {
            let Some((at, table)) = level.iter().enumerate().find(|(_, table)| is_dense(table)) else { continue };
            return Some(match number {
                0 => self.pick_l0(CompactionReason::Expired, self.l0_output_level(), false),
                _ if self.overlaps_below(number, table) => {
                    self.pick_from_level(CompactionReason::Expired, number, number + 1, at, 1, true)
                }
                _ => self.merge(CompactionReason::Expired, number, number, &[table]),
            });
        }
        None
    }

    /// An estimate of the number of entries of `table` that have expired for all readers that can see them.
    fn estimate_expired(&self, table: &T) -> u64 {
        let meta = table.meta();
        meta.expiry.estimate_expired(self.expiry_limits.limit_ms(meta.smallest_seqno))
    }

    /// Compacts the tables that may hide the most blob bytes into the next level, if the hidden bytes may exceed the
    /// target of background blob GC. Unless the tree is idle, the hidden bytes must also justify a compaction.
    fn pick_hidden_blobs(&self) -> Option<PickedCompaction> {
        let target = self.options.kv_separation.as_ref()?.automatic_gc?;
        let (hides, totals) = (self.version.max_hidden_bytes_per_level(), self.version.blobs().totals());
        let hidden: u64 = hides.iter().sum();
        let worth = self.idle || hidden >= totals.min_hidden_bytes_to_compact();
        if hidden == 0 || !worth || !totals.exceed_space_amp(target, hidden) {
            return None;
        }
        let tables: u64 = self.version.levels().map(|(_, level)| level.bytes).sum();
        // Compactions below level 0 rewrite complete tables. This is cheap if most of the bytes are in blob files.
        let deepest = if tables <= totals.bytes / TREE_SHARE { BOTTOM_LEVEL } else { 0 };
        let from = (0..=deepest).max_by_key(|&level| (hides[usize::from(level)], Reverse(level)))?;
        match (from, hides[usize::from(from)]) {
            (_, 0) => None,
            (0, _) => Some(self.pick_l0(CompactionReason::HiddenBlobs, self.l0_output_level(), true)),
            (from, _) => {
                let to = self.next_nonempty_level(from);
                let hides = |table: &Arc<T>| {
                    self.version.max_hidden_bytes(table.meta().referenced_blob_bytes(), table.meta().tombstones)
                };
                let tables = self.version.run(from)?.tables();
                let first = (0..tables.len()).max_by_key(|&at| (hides(&tables[at]), Reverse(at)))?;
                Some(self.pick_from_level(CompactionReason::HiddenBlobs, from, to, first, u64::MAX, true))
            }
        }
    }

    /// Compacts the shallowest records up to `through` into the next level, one limited compaction at a time, until all
    /// of them are at the bottom. Records that are written meanwhile do not delay the end.
    pub(crate) fn pick_to_bottom(&self, through: SeqNo) -> Option<PickedCompaction> {
        let old = |table: &Arc<T>| table.meta().smallest_seqno <= through;
        let (from, level) =
            self.version.levels().take(usize::from(BOTTOM_LEVEL)).find(|(_, level)| level.iter().any(old))?;
        let to = self.next_nonempty_level(from);
        if from == 0 {
            return Some(self.pick_l0(CompactionReason::HiddenBlobs, to, true));
        }
        Some(self.pick_from_level(CompactionReason::HiddenBlobs, from, to, level.iter().position(old)?, u64::MAX, true))
    }

    /// Rewrites as many of the `wanted` tables of the bottom level as one limited compaction has, because of their
    /// invisible entries.
    pub(crate) fn pick_bottom_rewrite(&self, wanted: &BTreeSet<FileNumber>) -> Option<PickedCompaction> {
        let mut tables =
            self.version.run(BOTTOM_LEVEL)?.tables().iter().filter(|table| wanted.contains(&table.meta().number));
        let first = tables.next()?;
        let mut bytes = first.meta().size;
        let more = tables.take_while(|table| {
            bytes += table.meta().size;
            bytes <= self.compaction_bytes_max()
        });
        let some: Vec<&Arc<T>> = std::iter::once(first).chain(more).collect();
        Some(self.merge(CompactionReason::HiddenBlobs, BOTTOM_LEVEL, BOTTOM_LEVEL, &some))
    }

    /// Tables of the bottom level that [`pick_forced`](CompactionPicker::pick_forced) would rewrite, or that have any
    /// expired entry.
    pub(crate) fn bottom_tables_to_clean(&self) -> BTreeSet<FileNumber> {
        let tables = self.version.run(BOTTOM_LEVEL).map(|run| run.tables()).unwrap_or_default();
        tables
            .iter()
            .filter(|table| self.can_drop_entries(BOTTOM_LEVEL, table) || self.estimate_expired(table) > 0)
            .map(|table| table.meta().number)
            .collect()
    }

    /// Compacts the shallowest data into the next level, one limited compaction at a time, until all of it is at the
    /// bottom. Then rewrites the bottom tables with tombstones or superseded versions that can be dropped.
    fn pick_forced(&self) -> Option<PickedCompaction> {
        let (shallowest, _) = self.version.levels().find(|(_, level)| !level.is_empty())?;
        let to = self.next_nonempty_level(shallowest);
        if shallowest == 0 {
            return Some(self.pick_l0(CompactionReason::Forced, to, to < BOTTOM_LEVEL));
        }
        if shallowest < BOTTOM_LEVEL {
            return Some(self.pick_from_level(CompactionReason::Forced, shallowest, to, 0, u64::MAX, false));
        }
        let tables = self.version.run(BOTTOM_LEVEL)?.tables();
        let first = tables.iter().position(|table| self.can_drop_entries(BOTTOM_LEVEL, table))?;
        let mut bytes = 0;
        let in_row = tables[first..].iter().take_while(|table| {
            bytes += table.meta().size;
            self.can_drop_entries(BOTTOM_LEVEL, table) && bytes <= self.compaction_bytes_max()
        });
        let mut some: Vec<&Arc<T>> = in_row.collect();
        if some.is_empty() {
            some.push(&tables[first]);
        }
        Some(self.merge(CompactionReason::Forced, BOTTOM_LEVEL, BOTTOM_LEVEL, &some))
    }

    /// A level with a score of 1 or more needs a compaction.
    fn score(&self, targets: &LevelTargets, level: u8) -> f64 {
        let bytes = self.level(level).bytes as f64;
        match level {
            0 => self.level(0).runs.len() as f64 / f64::from(self.options.compaction.l0_compaction_trigger.max(1)),
            BOTTOM_LEVEL => 0.0,
            _ if bytes == 0.0 => 0.0,
            _ if level < targets.base_level => 1.0 + bytes / self.options.compaction.base_level_size.max(1) as f64,
            // A level that is exactly at its target needs no compaction.
            _ => (bytes - 1.0) / targets.bytes[usize::from(level)] as f64,
        }
    }

    /// The compaction of the level with the highest score; of two equal ones, of the shallower level.
    pub(crate) fn pick_leveled(&self) -> Option<PickedCompaction> {
        let targets = self.level_targets();
        let mut best: Option<(u8, f64)> = None;
        for level in 0..BOTTOM_LEVEL {
            let score = self.score(&targets, level);
            debug_assert!(score.is_finite() && score >= 0.0, "a level with a score has a target");
            if score >= 1.0 && best.is_none_or(|(_, other)| score > other) {
                best = Some((level, score));
            }
        }
        let (level, _) = best?;
        if level == 0 {
            return Some(self.pick_l0(CompactionReason::L0Runs, self.l0_output_level(), true));
        }
        let first = self.next_after_compact_pointer(level);
        // The score is a rounded number.
        let excess = self.level(level).bytes.saturating_sub(targets.bytes[usize::from(level)]);
        Some(self.pick_from_level(CompactionReason::LevelSize, level, level + 1, first, excess, true))
    }

    /// In an idle tree, compacts level 0 as deep as possible for at most [`IDLE_L0_COST_MAX`] times its own bytes,
    /// because a lookup searches every run of level 0, and no writer needs the disk.
    pub(crate) fn pick_idle_l0(&self) -> Option<PickedCompaction> {
        if !self.idle || self.level(0).is_empty() {
            return None;
        }
        let shallowest = self.l0_output_level();
        let deepest = (shallowest..BOTTOM_LEVEL).find(|&level| !self.level(level).is_empty()).unwrap_or(BOTTOM_LEVEL);
        let bytes = self.level(0).bytes;
        (shallowest..=deepest).rev().map(|to| self.pick_l0(CompactionReason::IdleL0, to, true)).find(|plan| {
            let lower = self
                .level(plan.output_level)
                .iter()
                .map(|table| table.meta())
                .filter(|meta| plan.output_level_inputs.contains(&meta.number));
            plan.trivial_move || lower.map(|meta| meta.size).sum::<u64>() <= bytes.saturating_mul(IDLE_L0_COST_MAX)
        })
    }

    /// The index of the first table after the compact pointer of the level; 0 if there is none.
    fn next_after_compact_pointer(&self, level: u8) -> usize {
        let (Some(run), Some(position)) = (self.version.run(level), &self.compact_pointers[usize::from(level)]) else {
            return 0;
        };
        let behind = |table: &T| self.order.cmp(&table.meta().smallest_key.0, position).is_gt();
        run.tables().iter().position(|table| behind(table)).unwrap_or(0)
    }

    pub(crate) fn level(&self, level: u8) -> &Level<T> {
        self.version.level(level)
    }

    /// Whether a deeper level has a table that overlaps the key range of `table`.
    pub(crate) fn overlaps_below(&self, level: u8, table: &T) -> bool {
        let mut deeper = self.version.levels().skip(usize::from(level) + 1).flat_map(|(_, level)| &level.runs);
        deeper.any(|run| !run.overlapping_tables(table.meta(), self.order).is_empty())
    }

    /// Whether a rewrite of `table` on its level drops superseded versions or may drop tombstones.
    pub(crate) fn can_drop_entries(&self, level: u8, table: &T) -> bool {
        let tried = table.oldest_snapshot_when_written().is_some_and(|at| self.oldest_snapshot <= at);
        let holds = (table.meta().tombstones > 0 && !tried) || table.superseded().can_drop(self.oldest_snapshot);
        // A bound, because more entries may expire while a table is rewritten.
        let holds = holds || self.estimate_expired(table) >= table.meta().entries.div_ceil(EXPIRED_SHARE);
        (holds && !self.overlaps_below(level, table)) || self.can_apply_range_deletes(table)
    }

    /// Whether a rewrite of `table` drops entries that range deletes may cover.
    pub(crate) fn can_apply_range_deletes(&self, table: &T) -> bool {
        let (meta, set) = (table.meta(), self.version.range_tombstones());
        meta.range_deletes_applied_through < set.largest_seqno()
            && set.overlapping(&meta.smallest_key.0, &meta.largest_key.0, self.order).any(|fragment| {
                let applicable = fragment.seqnos.iter().find(|&&seqno| seqno <= self.oldest_snapshot);
                applicable.is_some_and(|&seqno| may_have_covered_entries(meta, seqno))
            })
    }

    /// Whether a table can be moved without a rewrite.
    pub(crate) fn allows_trivial_move(&self, from: u8, to: u8) -> bool {
        self.options.compression_at(from) == self.options.compression_at(to)
    }

    pub(crate) fn level_targets(&self) -> LevelTargets {
        level_targets(self.version, &self.options.compaction)
    }

    /// The output level of level 0: the base level, or a shallower one that still has data.
    pub(crate) fn l0_output_level(&self) -> u8 {
        let base = self.level_targets().base_level;
        (1..base).find(|&level| !self.level(level).is_empty()).unwrap_or(base)
    }

    /// The first deeper level that has data, or else the bottom.
    pub(crate) fn next_nonempty_level(&self, above: u8) -> u8 {
        (above + 1..=BOTTOM_LEVEL).find(|&level| !self.level(level).is_empty()).unwrap_or(BOTTOM_LEVEL)
    }

    pub(crate) fn compaction_bytes_max(&self) -> u64 {
        self.options.compaction.target_file_size.saturating_mul(COMPACTION_TABLES_MAX)
    }

    /// Compacts `tables` of level `from` into `to`, with the tables of `to` that overlap them. If both levels are the
    /// same, rewrites the tables on their level.
    pub(crate) fn merge(&self, reason: CompactionReason, from: u8, to: u8, tables: &[&Arc<T>]) -> PickedCompaction {
        let lower = if from == to { Vec::new() } else { self.overlapping_tables(to, tables) };
        self.checked(PickedCompaction {
            reason,
            start_level: from,
            output_level: to,
            start_level_inputs: file_ids(tables),
            output_level_inputs: file_ids(&lower),
            trivial_move: false,
        })
    }

    /// Moves `tables` of level `from`, which overlap no table of `to`, to level `to`.
    fn move_tables(&self, reason: CompactionReason, from: u8, to: u8, tables: &[&Arc<T>]) -> PickedCompaction {
        debug_assert!(self.allows_trivial_move(from, to), "a table keeps its compression");
        self.checked(PickedCompaction {
            reason,
            start_level: from,
            output_level: to,
            start_level_inputs: file_ids(tables),
            output_level_inputs: Vec::new(),
            trivial_move: true,
        })
    }

    fn checked(&self, picked: PickedCompaction) -> PickedCompaction {
        if cfg!(debug_assertions) {
            picked.check_invariants(self.version, self.order);
        }
        picked
    }

    /// Compacts level 0 into `to`. If there are tables that overlap neither an older table of level 0 nor a table of
    /// `to`, moves only these. Tables with tombstones are moved only if `move_tombstones`.
    pub(crate) fn pick_l0(&self, reason: CompactionReason, to: u8, move_tombstones: bool) -> PickedCompaction {
        let movable = self.movable_l0_tables(to, move_tombstones);
        if !movable.is_empty() {
            return self.move_tables(reason, 0, to, &movable);
        }
        self.merge(reason, 0, to, &self.level(0).iter().collect::<Vec<_>>())
    }

    fn movable_l0_tables(&self, to: u8, move_tombstones: bool) -> Vec<&Arc<T>> {
        debug_assert!(!self.level(0).is_empty(), "level 0 has a table to compact");
        let (mut movable, mut staying): (Vec<&Arc<T>>, Vec<&Arc<T>>) = (Vec::new(), Vec::new());
        if !self.allows_trivial_move(0, to) {
            return movable;
        }
        for table in self.level(0).runs.iter().rev().flat_map(|run| run.tables()) {
            let overlaps = !self.overlapping_tables(to, &[table]).is_empty()
                || staying.iter().chain(&movable).any(|older| !disjoint(older.meta(), table.meta(), self.order));
            let clean = move_tombstones || table.meta().tombstones == 0;
            if overlaps || !clean { staying.push(table) } else { movable.push(table) }
        }
        movable
    }

    /// The tables of `level` that overlap the key range of a table of `upper`.
    fn overlapping_tables<'v>(&'v self, level: u8, upper: &[&Arc<T>]) -> Vec<&'v Arc<T>> {
        let Some(run) = self.version.run(level) else { return Vec::new() };
        let mut wanted = vec![false; run.tables().len()];
        for table in upper {
            wanted[run.overlapping_tables(table.meta(), self.order)].fill(true);
        }
        run.tables().iter().zip(wanted).filter_map(|(table, wanted)| wanted.then_some(table)).collect()
    }

    /// Compacts tables of `from` into `to`, starting at index `first`. Moves as many adjacent tables as can be moved,
    /// until these have `excess` bytes. If the first one cannot be moved, compacts as many as a compaction of limited
    /// size has.
    pub(crate) fn pick_from_level(
        &self,
        reason: CompactionReason,
        from: u8,
        to: u8,
        first: usize,
        excess: u64,
        move_tombstones: bool,
    ) -> PickedCompaction {
        let run = self.version.run(from).expect("the start level has a table at `first`");
        let tables = run.tables();
        debug_assert!(0 < from && from < to, "level 0 is compacted as a whole");
        debug_assert!(first < tables.len(), "the start level has a table at `first`");
        let movable = |table: &Arc<T>| {
            self.allows_trivial_move(from, to)
                && self.overlapping_tables(to, &[table]).is_empty()
                && (move_tombstones || !self.can_drop_entries(to, table))
        };
        let mut bytes = 0;
        let in_row = tables[first..].iter().take_while(|table| {
            let below_excess = bytes < excess;
            bytes += table.meta().size;
            below_excess && movable(table)
        });
        let upper: Vec<&Arc<T>> = in_row.collect();
        if !upper.is_empty() {
            return self.move_tables(reason, from, to, &upper);
        }
        let range = self.expand_inputs(run, first, to);
        self.merge(reason, from, to, &tables[range].iter().collect::<Vec<_>>())
    }

    /// The table at `first` and the following ones, as long as the compaction is within its size limit and no more
    /// bytes of the output level overlap.
    fn expand_inputs(&self, run: &SortedRun<T>, first: usize, to: u8) -> Range<usize> {
        let cost = |end: usize| {
            let upper: Vec<&Arc<T>> = run.tables()[first..end].iter().collect();
            let above: u64 = upper.iter().map(|table| table.meta().size).sum();
            let below: u64 = self.overlapping_tables(to, &upper).iter().map(|table| table.meta().size).sum();
            (above, below)
        };
        let mut end = first + 1;
        let (_, mut below) = cost(end);
        while end < run.tables().len() {
            let (more_above, more_below) = cost(end + 1);
            debug_assert!(self.order.is_custom() || more_below >= below, "more tables overlap at least as many bytes");
            if more_above + more_below > self.compaction_bytes_max() || more_below > below {
                break;
            }
            (end, below) = (end + 1, more_below);
        }
        debug_assert!(first < end && end <= run.tables().len(), "the inputs are tables of the run");
        first..end
    }
}

fn file_ids<T: HasTableMeta>(tables: &[&Arc<T>]) -> Vec<FileNumber> {
    tables.iter().map(|table| table.meta().number).collect()
}

/// Bytes that compactions have to move until every level is within its target.
pub(crate) fn compaction_debt<T: HasTableMeta>(version: &Version<T>, options: &LsmOptions) -> u64 {
    let targets = level_targets(version, &options.compaction);
    let l0 = version.level(0);
    let late = l0.runs.len() >= options.compaction.l0_compaction_trigger as usize;
    let deeper = version.levels().skip(1).filter(|(number, _)| *number < BOTTOM_LEVEL);
    let excess =
        deeper.map(|(number, level)| level.bytes.saturating_sub(targets.bytes[usize::from(number)])).sum::<u64>();
    let overdue = version.range_tombstones().bytes().saturating_sub(options.range_tombstone_bytes_max());
    excess + if late { l0.bytes } else { 0 } + overdue.saturating_mul(RANGE_TOMBSTONE_DEBT)
}
