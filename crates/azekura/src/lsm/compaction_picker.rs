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
    /// More than half of a table are tombstones.
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

    /// Compacts a table with more than one half tombstones into the next level. If no deeper level overlaps it,
    /// rewrites it without the tombstones, if these can be dropped.
    fn pick_tombstones(&self) -> Option<PickedCompaction> {
        let dense = |table: &T| table.meta().tombstones > table.meta().entries / 2;
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

#[cfg(test)]
mod leveled_tests {
    use std::cmp::Ordering;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering as Memory};

    use super::*;
    use crate::base::version_edit::{ExpiryTimes, FileNumber, TableMeta};
    use crate::base::{KeyOrder, SeqNo};
    use crate::lsm::options::LsmOptions;
    use crate::lsm::version::VersionChange;
    use crate::lsm::version::tests::table;
    use crate::testing::FnComparator;

    /// Reason, start level, output level, inputs of both levels, trivial move.
    type LeveledPick = (CompactionReason, u8, u8, Vec<u64>, Vec<u64>, bool);

    /// The runs of level 0, oldest first, and the tables of deeper levels.
    struct LeveledFixture {
        version: Version<TableMeta>,
        options: LsmOptions,
        compact_pointers: CompactPointers,
        expiry_limits: ExpiryLimits,
        idle: bool,
    }

    impl LeveledFixture {
        fn new(l0: Vec<Vec<Arc<TableMeta>>>, deep: Vec<(u8, Arc<TableMeta>)>) -> LeveledFixture {
            let order = KeyOrder::bytewise();
            let mut version = Version::empty();
            for flushed in l0 {
                version = version.with_changes(VersionChange { flushed, ..VersionChange::default() }, &order);
            }
            version = version.with_changes(VersionChange { added: deep, ..VersionChange::default() }, &order);
            let mut options = LsmOptions::default();
            options.compaction.target_file_size = 100;
            options.compaction.base_level_size = 400;
            options.compaction.l0_compaction_trigger = 2;
            let (compact_pointers, expiry_limits) = (CompactPointers::default(), ExpiryLimits::default());
            LeveledFixture { version, options, compact_pointers, expiry_limits, idle: false }
        }

        fn picker<'a>(&'a self, order: &'a KeyOrder) -> CompactionPicker<'a, TableMeta> {
            let (version, options, positions) = (&self.version, &self.options, &self.compact_pointers);
            CompactionPicker {
                version,
                order,
                options,
                compact_pointers: positions,
                oldest_snapshot: SeqNo::MAX,
                expiry_limits: &self.expiry_limits,
                idle: self.idle,
            }
        }

        fn pick(&self, forced: bool) -> Option<LeveledPick> {
            let plan = self.picker(&KeyOrder::bytewise()).pick_compaction(forced)?;
            let ids = |ids: Vec<FileNumber>| ids.into_iter().map(|id| id.0).collect::<Vec<_>>();
            Some((
                plan.reason,
                plan.start_level,
                plan.output_level,
                ids(plan.start_level_inputs),
                ids(plan.output_level_inputs),
                plan.trivial_move,
            ))
        }
    }

    fn sized(id: u64, smallest: &str, largest: &str, size: u64) -> Arc<TableMeta> {
        Arc::new(TableMeta { size, ..(*table(id, smallest, largest)).clone() })
    }

    fn table_with_tombstones(id: u64, smallest: &str, largest: &str, tombstones: u64) -> Arc<TableMeta> {
        Arc::new(TableMeta { tombstones, ..(*table(id, smallest, largest)).clone() })
    }

    fn expiring_table(id: u64, smallest: &str, largest: &str, expiring: u64) -> Arc<TableMeta> {
        let expiry = ExpiryTimes { entries: expiring, lowest_ms: 1_000, highest_ms: 1_999 };
        Arc::new(TableMeta { expiry, ..(*table(id, smallest, largest)).clone() })
    }

    /// Regression: an assertion about the sizes of inputs failed if a comparator contradicted itself.
    #[test]
    fn a_contradiction_fails_no_assertion() {
        let deep = vec![(5, table(1, "a", "c")), (5, table(2, "e", "g")), (6, table(3, "a", "c"))];
        let shape = LeveledFixture::new(vec![], deep);
        // After some comparisons, no table overlaps another one.
        for right in 0..20 {
            let calls = AtomicU64::new(0);
            let order = KeyOrder::custom(Arc::new(FnComparator(move |a: &[u8], b: &[u8]| {
                if calls.fetch_add(1, Memory::Relaxed) < right { a.cmp(b) } else { Ordering::Greater }
            })));
            let picked = shape.picker(&order).pick_from_level(CompactionReason::LevelSize, 5, 6, 0, 1, true);
            assert_eq!((picked.start_level, picked.output_level), (5, 6));
        }
    }

    #[test]
    fn tables_are_compacted_when_half_has_expired() {
        let deep = vec![(5, expiring_table(1, "a", "c", 10)), (6, table(2, "b", "d")), (6, table(3, "x", "z"))];
        let mut shape = LeveledFixture::new(vec![], deep);
        // Level 5 is used, and not too large.
        (shape.options.compaction.base_level_size, shape.options.compaction.level_size_multiplier) = (150, 2);
        let mut pick = |now_ms, forced| {
            shape.expiry_limits.now_ms = now_ms;
            shape.pick(forced)
        };
        assert_eq!((pick(0, false), pick(1_400, false)), (None, None));
        let merge = Some((CompactionReason::Expired, 5, 6, vec![1], vec![2], false));
        assert_eq!((pick(1_499, false), pick(9_999, false)), (merge.clone(), merge), "an older table overlaps");

        let mut shape = LeveledFixture::new(vec![], vec![(6, expiring_table(1, "a", "c", 6))]);
        let mut pick = |now_ms, forced| {
            shape.expiry_limits.now_ms = now_ms;
            shape.pick(forced)
        };
        let rewrite = |reason| Some((reason, 6, 6, vec![1], vec![], false));
        assert_eq!((pick(1_700, false), pick(1_900, false)), (None, rewrite(CompactionReason::Expired)));
        assert_eq!((pick(999, true), pick(1_200, true)), (None, rewrite(CompactionReason::Forced)));
        let l0 = vec![vec![expiring_table(4, "a", "c", 10)], vec![table(5, "b", "d")]];
        let mut shape = LeveledFixture::new(l0, vec![]);
        shape.options.compaction.l0_compaction_trigger = 9;
        shape.expiry_limits.now_ms = 2_000;
        assert_eq!(shape.pick(false), Some((CompactionReason::Expired, 0, 6, vec![4], vec![], true)), "moved first");
    }

    #[test]
    fn base_level_rises_with_data_size() {
        let at = |bytes| {
            let shape = LeveledFixture::new(vec![], vec![(6, sized(1, "a", "b", bytes))]);
            let targets = level_targets(&shape.version, &shape.options.compaction);
            (targets.base_level, targets.bytes)
        };
        assert_eq!(at(100), (6, [0, 0, 0, 0, 0, 0, 400]));
        assert_eq!(at(400), (6, [0, 0, 0, 0, 0, 0, 400]));
        assert_eq!(at(1000), (5, [0, 0, 0, 0, 0, 100, 1000]));
        assert_eq!(at(50_000), (3, [0, 0, 0, 50, 500, 5000, 50_000]));
        assert_eq!(at(u64::MAX).0, 1);
    }

    #[test]
    fn l0_compacts_at_trigger_with_overlaps() {
        let deep = vec![(6, table(1, "a", "c")), (6, table(2, "e", "g")), (6, table(3, "x", "z"))];
        assert_eq!(LeveledFixture::new(vec![vec![table(4, "b", "f")]], deep.clone()).pick(false), None);
        let shape = LeveledFixture::new(vec![vec![table(4, "b", "f")], vec![table(5, "a", "b")]], deep);
        assert_eq!(shape.pick(false), Some((CompactionReason::L0Runs, 0, 6, vec![5, 4], vec![1, 2], false)));
    }

    #[test]
    fn l0_output_level_never_skips_data() {
        let deep = vec![(4, sized(1, "p", "q", 1)), (6, table(2, "a", "z"))];
        let l0 = vec![vec![table(4, "b", "f")], vec![table(5, "a", "b")], vec![table(6, "b", "r")]];
        let shape = LeveledFixture::new(l0.clone(), deep.clone());
        assert_eq!(shape.pick(false), Some((CompactionReason::L0Runs, 0, 4, vec![4], vec![], true)));
        let shape = LeveledFixture::new(l0[1..].to_vec(), deep);
        assert_eq!(
            shape.pick(false),
            Some((CompactionReason::LevelSize, 4, 5, vec![1], vec![], true)),
            "drained first"
        );
    }

    #[test]
    fn disjoint_l0_tables_move_together() {
        let l0 = vec![vec![table(4, "d", "f")], vec![table(5, "g", "h"), table(6, "i", "k")], vec![table(7, "e", "g")]];
        let shape = LeveledFixture::new(l0, vec![(6, table(1, "a", "c"))]);
        assert_eq!(shape.pick(false), Some((CompactionReason::L0Runs, 0, 6, vec![4, 5, 6], vec![], true)));
        let mut other = shape;
        other.options.compression_per_level =
            vec![crate::base::compression::CompressionType::None, crate::base::compression::CompressionType::Lz4];
        let plan = other.pick(false).unwrap();
        assert_eq!((plan.3, plan.5), (vec![7, 5, 6, 4], false), "another codec: the tables must be rewritten");
    }

    #[test]
    fn l0_table_never_moves_past_older_table() {
        let l0 = vec![vec![table(4, "b", "e")], vec![table(5, "d", "f"), table(6, "x", "z")]];
        let shape = LeveledFixture::new(l0, vec![(6, table(1, "a", "c"))]);
        assert_eq!(
            shape.pick(false),
            Some((CompactionReason::L0Runs, 0, 6, vec![6], vec![], true)),
            "4 stays, and so does 5"
        );
    }

    #[test]
    fn a_full_level_goes_down_in_turn() {
        let deep = vec![
            (5, table(1, "a", "c")),
            (5, table(2, "e", "g")),
            (5, table(3, "i", "k")),
            (6, sized(10, "a", "b", 500)),
            (6, sized(11, "f", "f", 500)),
        ];
        let mut shape = LeveledFixture::new(vec![], deep);
        assert_eq!(shape.pick(false), Some((CompactionReason::LevelSize, 5, 6, vec![1], vec![10], false)));
        shape.compact_pointers[5] = Some(b"c".to_vec());
        let (_, _, _, upper, lower, moves) = shape.pick(false).unwrap();
        assert_eq!((upper, lower, moves), (vec![2, 3], vec![11], false), "3 brings nothing new of level 6");
        shape.compact_pointers[5] = Some(b"g".to_vec());
        assert_eq!(shape.pick(false), Some((CompactionReason::LevelSize, 5, 6, vec![3], vec![], true)));
        shape.compact_pointers[5] = Some(b"k".to_vec());
        assert_eq!(shape.pick(false).unwrap().3, [1], "round again");
    }

    #[test]
    fn a_merge_stays_bounded() {
        let mut deep: Vec<_> =
            (0..60u64).map(|i| (5, table(100 + i, &format!("b{i:02}"), &format!("b{i:02}")))).collect();
        deep.push((6, sized(1, "a", "c", 9000)));
        let shape = LeveledFixture::new(vec![], deep);
        let (_, _, _, upper, lower, moves) = shape.pick(false).unwrap();
        assert!(!moves && lower == [1] && upper.len() == 1, "the lower table alone is over the limit");
        let deep: Vec<_> = (0..60u64).map(|i| (5, table(100 + i, &format!("b{i:02}"), &format!("b{i:02}")))).collect();
        let shape = LeveledFixture::new(vec![], [deep, vec![(6, sized(1, "a", "c", 200))]].concat());
        let (_, _, _, upper, ..) = shape.pick(false).unwrap();
        assert_eq!(upper.len(), 23);
    }

    #[test]
    fn data_above_the_base_is_drained() {
        let shape = LeveledFixture::new(vec![], vec![(3, table(1, "a", "b")), (3, table(2, "c", "d"))]);
        assert_eq!(shape.pick(false), Some((CompactionReason::LevelSize, 3, 4, vec![1, 2], vec![], true)));
    }

    #[test]
    fn tombstones_are_compacted_when_idle() {
        let l0 = LeveledFixture::new(vec![vec![table_with_tombstones(4, "b", "f", 6)]], vec![(6, table(1, "a", "c"))]);
        assert_eq!(l0.pick(false), Some((CompactionReason::Tombstones, 0, 6, vec![4], vec![1], false)));
        let half =
            LeveledFixture::new(vec![vec![table_with_tombstones(4, "b", "f", 5)]], vec![(6, table(1, "a", "c"))]);
        assert_eq!(half.pick(false), None);
        let bottom =
            LeveledFixture::new(vec![], vec![(6, table_with_tombstones(1, "a", "c", 9)), (6, table(2, "d", "e"))]);
        assert_eq!(bottom.pick(false), Some((CompactionReason::Tombstones, 6, 6, vec![1], vec![], false)));
        let deep = vec![(5, table_with_tombstones(1, "a", "c", 9)), (6, sized(2, "b", "b", 5000))];
        assert_eq!(
            LeveledFixture::new(vec![], deep).pick(false),
            Some((CompactionReason::Tombstones, 5, 6, vec![1], vec![2], false))
        );
    }

    #[test]
    fn forced_ends_with_one_clean_run() {
        let l0 = LeveledFixture::new(vec![vec![table(4, "b", "f")]], vec![(6, table(1, "h", "i"))]);
        assert_eq!(l0.pick(true), Some((CompactionReason::Forced, 0, 6, vec![4], vec![], true)));
        let buried_young =
            LeveledFixture::new(vec![vec![table_with_tombstones(4, "b", "f", 1)]], vec![(6, table(1, "h", "i"))]);
        assert_eq!(buried_young.pick(true), Some((CompactionReason::Forced, 0, 6, vec![4], vec![], false)));
        let middle = LeveledFixture::new(vec![], vec![(5, sized(4, "b", "f", 9)), (6, sized(1, "a", "i", 500))]);
        assert_eq!(middle.pick(false), None);
        assert_eq!(middle.pick(true), Some((CompactionReason::Forced, 5, 6, vec![4], vec![1], false)));
        let bottom = LeveledFixture::new(
            vec![],
            vec![
                (6, table_with_tombstones(1, "a", "c", 1)),
                (6, table_with_tombstones(2, "d", "e", 1)),
                (6, table(3, "x", "y")),
            ],
        );
        assert_eq!(bottom.pick(true), Some((CompactionReason::Forced, 6, 6, vec![1, 2], vec![], false)));
        assert_eq!(LeveledFixture::new(vec![], vec![(6, table(1, "a", "c"))]).pick(true), None);
        assert_eq!(LeveledFixture::new(vec![], vec![]).pick(true), None);
    }

    #[test]
    fn idle_l0_goes_as_deep_as_cost_allows() {
        let at_rest = |l0, deep| LeveledFixture { idle: true, ..LeveledFixture::new(l0, deep) }.pick(false);
        let l0 = || vec![vec![table(4, "b", "f")]];
        let below = |size| vec![(6, sized(1, "a", "c", size)), (6, sized(2, "x", "z", 9000))];
        assert_eq!(LeveledFixture::new(l0(), below(400)).pick(false), None, "somebody writes");
        assert_eq!(
            at_rest(l0(), below(400)),
            Some((CompactionReason::IdleL0, 0, 6, vec![4], vec![1], false)),
            "past the base"
        );
        assert_eq!(
            at_rest(l0(), below(401)),
            Some((CompactionReason::IdleL0, 0, 5, vec![4], vec![], true)),
            "too much there"
        );
        let middle = vec![(5, sized(3, "a", "b", 90)), (6, sized(1, "a", "c", 900))];
        assert_eq!(
            at_rest(l0(), middle),
            Some((CompactionReason::IdleL0, 0, 5, vec![4], vec![3], false)),
            "never past data"
        );
        let middle = vec![(5, sized(3, "a", "b", 300)), (6, sized(1, "a", "c", 3900))];
        assert_eq!(at_rest(vec![vec![sized(4, "b", "f", 74)]], middle), None, "little for so much");
        assert_eq!(at_rest(vec![], below(400)), None);
    }

    #[test]
    fn debt_counts_bytes_over_target() {
        let deep = vec![(5, sized(1, "a", "c", 150)), (6, sized(2, "a", "b", 1000))];
        let shape = LeveledFixture::new(vec![vec![table(4, "b", "f")], vec![table(5, "a", "b")]], deep);
        assert_eq!(compaction_debt(&shape.version, &shape.options), 50 + 200);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::KeyOrder;
    use crate::base::version_edit::{BlobFileMeta, BlobFileSection, TableBlobUsage, TableMeta};
    use crate::lsm::options::{KvSeparationOptions, LsmOptions};
    use crate::lsm::tests::harness::LsmFixture;
    use crate::lsm::version::tests::table;
    use crate::lsm::version::{Version, VersionChange};

    /// Start level, output level, inputs of both levels, trivial move.
    type HiddenBlobPick = (u8, u8, Vec<u64>, Vec<u64>, bool);
    type TestTable = Arc<TableMeta>;

    fn version(l0: Vec<TestTable>, deep: Vec<(u8, TestTable)>) -> Version<TableMeta> {
        let change = VersionChange { flushed: l0, added: deep, ..VersionChange::default() };
        Version::empty().with_changes(change, &KeyOrder::bytewise())
    }

    fn run_pick(
        version: &Version<TableMeta>,
        options: &LsmOptions,
        choose: impl FnOnce(&CompactionPicker<'_, TableMeta>) -> Option<PickedCompaction>,
    ) -> Option<HiddenBlobPick> {
        run_pick_with_idle(false, version, options, choose)
    }

    fn run_pick_with_idle(
        at_rest: bool,
        version: &Version<TableMeta>,
        options: &LsmOptions,
        choose: impl FnOnce(&CompactionPicker<'_, TableMeta>) -> Option<PickedCompaction>,
    ) -> Option<HiddenBlobPick> {
        let (order, positions, oldest_point) = (KeyOrder::bytewise(), CompactPointers::default(), SeqNo::MAX);
        let plan = choose(&CompactionPicker {
            version,
            order: &order,
            options,
            compact_pointers: &positions,
            oldest_snapshot: oldest_point,
            expiry_limits: &ExpiryLimits::default(),
            idle: at_rest,
        })?;
        assert_eq!(plan.reason, CompactionReason::HiddenBlobs);
        let ids = |ids: Vec<FileNumber>| ids.into_iter().map(|id| id.0).collect();
        Some((
            plan.start_level,
            plan.output_level,
            ids(plan.start_level_inputs),
            ids(plan.output_level_inputs),
            plan.trivial_move,
        ))
    }

    fn small_tables(table_size: u64) -> LsmOptions {
        let mut options = LsmOptions::default();
        options.compaction.target_file_size = table_size;
        options
    }

    fn run_pick_to_bottom(version: &Version<TableMeta>, through: u64) -> Option<HiddenBlobPick> {
        run_pick(version, &small_tables(100), |picker| picker.pick_to_bottom(SeqNo(through)))
    }

    #[test]
    fn to_bottom_starts_at_shallowest_level() {
        let deep = vec![(5, table(3, "a", "c")), (6, table(1, "a", "c")), (6, table(2, "x", "z"))];
        let three = version(vec![table(4, "b", "f")], deep);
        assert_eq!(
            run_pick_to_bottom(&three, 49),
            Some((0, 5, vec![4], vec![3], false)),
            "to the next level that has data"
        );
        assert_eq!(run_pick_to_bottom(&three, 40), run_pick_to_bottom(&three, 49), "one record is enough");
        assert_eq!(run_pick_to_bottom(&three, 39), Some((5, 6, vec![3], vec![1], false)), "table 4 is newer");
        assert_eq!(run_pick_to_bottom(&three, 29), None, "records at the bottom do not count");
        let separation =
            version(vec![], vec![(2, table(3, "p", "q")), (2, table(4, "r", "s")), (6, table(1, "a", "c"))]);
        assert_eq!(
            run_pick_to_bottom(&separation, 39),
            Some((2, 6, vec![3, 4], vec![], true)),
            "tables without overlap are moved"
        );
        assert_eq!(
            run_pick_to_bottom(&version(vec![table(1, "a", "c")], vec![]), 99),
            Some((0, 6, vec![1], vec![], true))
        );
        assert_eq!(run_pick_to_bottom(&version(vec![], vec![]), 99), None);
    }

    #[test]
    fn to_bottom_ends_while_writes_continue() {
        let deep = (1..40u64).map(|n| (1 + (n % 6) as u8, table(n, &format!("k{n:02}"), &format!("k{n:02}x"))));
        let mut now = version(vec![table(50, "k00", "k30"), table(51, "k31", "k99")], deep.collect());
        let (through, mut next_id) = (600, 100);
        for round in 0..100 {
            let Some((_, to, upper, lower, moves)) = run_pick_to_bottom(&now, through) else {
                let above = now.tables().filter(|(level, _)| *level < BOTTOM_LEVEL);
                assert!(
                    above.into_iter().all(|(_, table)| table.smallest_seqno.0 > through) && round > 3,
                    "round {round}"
                );
                return;
            };
            let taken: Vec<TestTable> = now
                .tables()
                .filter(|(_, t)| upper.iter().chain(&lower).any(|id| *id == t.number.0))
                .map(|t| Arc::clone(t.1))
                .collect();
            let removed = taken.iter().map(|table| table.number).collect();
            let added = match moves {
                true => taken.into_iter().map(|table| (to, table)).collect(),
                false => {
                    let smallest = taken.iter().map(|table| table.smallest_key.clone()).min().unwrap();
                    let largest = taken.iter().map(|table| table.largest_key.clone()).max().unwrap();
                    let lowest = taken.iter().map(|table| table.smallest_seqno).min().unwrap();
                    next_id += 1;
                    let id = FileNumber(next_id);
                    vec![(
                        to,
                        Arc::new(TableMeta {
                            number: id,
                            smallest_key: smallest,
                            largest_key: largest,
                            smallest_seqno: lowest,
                            ..(*taken[0]).clone()
                        }),
                    )]
                }
            };
            let flushed = vec![table(1_000 + round, "k00", "k99")];
            now = now.with_changes(
                VersionChange { flushed, added, removed, ..VersionChange::default() },
                &KeyOrder::bytewise(),
            );
        }
        panic!("compactions do not end");
    }

    #[test]
    fn bottom_rewrite_is_bounded_and_selective() {
        let bottom = vec![(6, table(1, "a", "c")), (6, table(2, "d", "e")), (6, table(3, "f", "g"))];
        let all = version(vec![], [bottom, vec![(5, table(4, "a", "b"))]].concat());
        let rewritten = |wanted: &[u64], table_size| {
            let wanted = wanted.iter().map(|&id| FileNumber(id)).collect();
            run_pick(&all, &small_tables(table_size), |picker| picker.pick_bottom_rewrite(&wanted))
        };
        assert_eq!(rewritten(&[1, 3], 100), Some((6, 6, vec![1, 3], vec![], false)));
        assert_eq!(rewritten(&[1, 2, 3], 8), Some((6, 6, vec![1, 2], vec![], false)), "25 times 8 bytes");
        assert_eq!(rewritten(&[2, 3], 1), Some((6, 6, vec![2], vec![], false)), "at least one table");
        assert_eq!(rewritten(&[4, 9], 100), None, "table 4 is not at the bottom, table 9 does not exist");
        assert_eq!(rewritten(&[], 100), None);
        let empty = run_pick(&version(vec![], vec![]), &small_tables(100), |picker| {
            picker.pick_bottom_rewrite(&[FileNumber(1)].into())
        });
        assert_eq!(empty, None);
    }

    /// A table that refers to this many bytes of a logical file, and has this many tombstones.
    fn referring(id: u64, range: (&str, &str), uses: &[(u64, u64)], tombstones: u64) -> TestTable {
        let uses =
            uses.iter().map(|&(logical, bytes)| TableBlobUsage { logical_file: FileNumber(logical), count: 1, bytes });
        let blobs = uses.collect();
        Arc::new(TableMeta { blob_usage: blobs, tombstones, ..(*table(id, range.0, range.1)).clone() })
    }

    #[test]
    fn l0_compacts_when_it_hides_too_much() {
        let fixture = LsmFixture::new(KeyOrder::bytewise(), LsmOptions::default(), 1);
        let file = |id: u64, bytes| {
            let sections = vec![BlobFileSection { logical_file: FileNumber(id), values: 10, bytes, rewritten: false }];
            fixture.tree.context.blob_handle(BlobFileMeta {
                number: FileNumber(id),
                size: bytes + 100,
                created_ms: 0,
                sections,
            })
        };
        let separation = |target| {
            let separation = KvSeparationOptions::default().automatic_gc(target);
            LsmOptions { kv_separation: Some(separation), ..LsmOptions::default() }
        };
        let bottom = || vec![(6, referring(1, ("a", "m"), &[(7, 1_000)], 0))];
        let asked = |l0: &[TestTable], options: &LsmOptions| {
            let blobs_added = vec![file(7, 1_000), file(8, 300)];
            let change =
                VersionChange { flushed: l0.to_vec(), added: bottom(), blobs_added, ..VersionChange::default() };
            let version = Version::empty().with_changes(change, &KeyOrder::bytewise());
            run_pick(&version, options, |picker| picker.pick_hidden_blobs())
        };
        // Its 300 bytes may supersede 300 of the 1,000 bytes: 1,300 bytes for 1,000 referenced ones.
        let overwriting = [referring(4, ("b", "f"), &[(8, 300)], 0)];
        let merged = Some((0, 6, vec![4], vec![1], false));
        assert_eq!(asked(&overwriting, &separation(Some(1.29))), merged);
        assert_eq!(asked(&overwriting, &separation(Some(1.31))), None);
        assert_eq!(asked(&overwriting, &separation(None)), None, "blob GC is manual");
        assert_eq!(asked(&overwriting, &LsmOptions::default()), None);
        // 300 bytes are stale already. Six tombstones among 14 values may hide 6/14 of the 1,000 bytes: 1,300 bytes for
        // 571 referenced ones.
        let tombstones = [referring(4, ("b", "f"), &[], 6)];
        assert_eq!(asked(&tombstones, &separation(Some(2.2))), merged);
        assert_eq!(asked(&tombstones, &separation(Some(2.3))), None);
        assert_eq!(asked(&[], &separation(Some(1.0))), None, "level 0 is empty");
        let no_blobs = version(tombstones.to_vec(), vec![(6, table(1, "a", "m"))]);
        assert_eq!(run_pick(&no_blobs, &separation(Some(1.0)), |picker| picker.pick_hidden_blobs()), None);
    }

    /// Tombstones that are compacted out of level 0 soon, and then stay on a level above the bottom.
    #[test]
    fn level_hiding_most_compacts_when_worth_it() {
        let fixture = LsmFixture::new(KeyOrder::bytewise(), LsmOptions::default(), 1);
        let file = |id: u64, bytes| {
            let sections = vec![BlobFileSection { logical_file: FileNumber(id), values: 10, bytes, rewritten: false }];
            fixture.tree.context.blob_handle(BlobFileMeta {
                number: FileNumber(id),
                size: bytes + 100,
                created_ms: 0,
                sections,
            })
        };
        let asked = |l0: &[TestTable], deep: &[(u8, TestTable)], target, at_rest| {
            let separation = KvSeparationOptions::default().automatic_gc(Some(target));
            let options = LsmOptions { kv_separation: Some(separation), ..LsmOptions::default() };
            let blobs_added = vec![file(7, 100_000), file(8, 9_000)];
            let change =
                VersionChange { flushed: l0.to_vec(), added: deep.to_vec(), blobs_added, ..VersionChange::default() };
            run_pick_with_idle(
                at_rest,
                &Version::empty().with_changes(change, &KeyOrder::bytewise()),
                &options,
                |picker| picker.pick_hidden_blobs(),
            )
        };
        let bottom =
            || [(6, referring(1, ("a", "g"), &[(7, 60_000)], 0)), (6, referring(2, ("h", "z"), &[(7, 40_000)], 0))];
        // Two tables of level 4. One tombstone in each ten entries hides a 28th of 109,000 bytes.
        let between = |first, second| {
            [(4, referring(3, ("b", "c"), &[(8, 9_000)], first)), (4, referring(4, ("x", "y"), &[], second))]
        };
        let deep = |first, second| [&bottom()[..], &between(first, second)[..]].concat();
        assert_eq!(asked(&[], &deep(0, 5), 1.2, false), Some((4, 6, vec![4], vec![2], false)), "the fuller table");
        assert_eq!(asked(&[], &deep(5, 0), 1.2, false), Some((4, 6, vec![3], vec![1], false)));
        assert_eq!(asked(&[], &deep(0, 5), 2.0, false), None, "the target allows this amplification");
        let l0 = [referring(5, ("b", "f"), &[], 9)];
        assert_eq!(asked(&l0, &deep(0, 5), 1.2, false), Some((0, 4, vec![5], vec![3], false)));
        assert_eq!(asked(&l0, &bottom(), 1.2, false), Some((0, 6, vec![5], vec![1], false)));
        // 9,000 bytes are more than a sixteenth of 109,000 bytes, and half of them is less.
        let few = |bytes| [&bottom()[..], &[(4, referring(3, ("b", "c"), &[(8, bytes)], 0))]].concat();
        assert_eq!(asked(&[], &few(9_000), 1.0, false), Some((4, 6, vec![3], vec![1], false)));
        assert_eq!(asked(&[], &few(4_500), 1.0, false), None);
        assert_eq!(asked(&[], &few(4_500), 1.0, true), Some((4, 6, vec![3], vec![1], false)), "at rest, anything is");
        // If tables have a large part of the bytes, a compaction below level 0 costs more than it gains.
        let large = |table: &TestTable| Arc::new(TableMeta { size: 30_000, ..(**table).clone() });
        let heavy: Vec<(u8, TestTable)> = deep(0, 5).iter().map(|(level, table)| (*level, large(table))).collect();
        assert_eq!(asked(&[], &heavy, 1.2, false), None);
        assert_eq!(asked(&l0, &heavy, 1.2, false), Some((0, 4, vec![5], vec![3], false)));
    }
}
