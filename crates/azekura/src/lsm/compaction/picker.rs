//! The shape of a tree as plain values, and the compactions that it permits.

use std::ops::Range;
use std::sync::Arc;

use crate::base::version_edit::FileNumber;
use crate::base::{KeyOrder, SeqNo};
use crate::lsm::options::LsmOptions;
use crate::lsm::version::{BOTTOM_LEVEL, HasTableMeta, Level, NUM_LEVELS, SortedRun, Version};

/// A compaction below level 0 has at most the bytes of this many tables, unless one table alone overlaps more.
const COMPACTION_TABLES_MAX: u64 = 25;

/// By level, the largest key of the last compaction. The next compaction starts after it.
pub(crate) type CompactPointers = [Option<Vec<u8>>; NUM_LEVELS];

/// The inputs of a pick.
pub(crate) struct CompactionPicker<'a, T> {
    pub(crate) version: &'a Version<T>,
    pub(crate) order: &'a KeyOrder,
    pub(crate) options: &'a LsmOptions,
    pub(crate) compact_pointers: &'a CompactPointers,
    /// The oldest snapshot that is known. A bottom table with tombstones that could not be dropped when it was written
    /// is compacted again when this has increased since.
    pub(crate) oldest_snapshot: SeqNo,
    /// All memtables are empty.
    pub(crate) idle: bool,
}

impl<T: HasTableMeta> CompactionPicker<'_, T> {
    pub(crate) fn level(&self, level: u8) -> &Level<T> {
        self.version.level(level)
    }

    /// Whether a deeper level has a table that overlaps the key range of `table`.
    pub(crate) fn overlaps_below(&self, level: u8, table: &T) -> bool {
        let meta = table.meta();
        self.version
            .levels()
            .skip(usize::from(level) + 1)
            .flat_map(|(_, level)| &level.runs)
            .any(|run| !run.overlapping(&meta.smallest_key.0, &meta.largest_key.0, self.order).is_empty())
    }

    /// Whether a rewrite of `table` on its level drops superseded versions or may drop tombstones.
    pub(crate) fn can_drop_entries(&self, level: u8, table: &T) -> bool {
        let tried = table.oldest_snapshot_when_written().is_some_and(|at| self.oldest_snapshot <= at);
        let holds = (table.meta().tombstones > 0 && !tried) || table.superseded().can_drop(self.oldest_snapshot);
        holds && !self.overlaps_below(level, table)
    }

    /// Whether a table can be moved without a rewrite.
    pub(crate) fn allows_trivial_move(&self, from: u8, to: u8) -> bool {
        self.options.compression_at(from) == self.options.compression_at(to)
    }

    /// The output level of level 0: `base`, or a shallower one that still has data.
    pub(crate) fn l0_output_level(&self, base: u8) -> u8 {
        (1..base).find(|&level| !self.level(level).is_empty()).unwrap_or(base)
    }

    /// The first deeper level that has data, or else the bottom.
    pub(crate) fn next_nonempty_level(&self, above: u8) -> u8 {
        (above + 1..=BOTTOM_LEVEL).find(|&level| !self.level(level).is_empty()).unwrap_or(BOTTOM_LEVEL)
    }

    pub(crate) fn compaction_bytes_max(&self) -> u64 {
        self.options.compaction.target_file_size.saturating_mul(COMPACTION_TABLES_MAX)
    }

    /// Compacts level 0 into `to`. If there are tables that overlap neither an older table of level 0 nor a table of
    /// `to`, moves only these. Tables with tombstones are moved only if `move_tombstones`.
    pub(crate) fn pick_l0(&self, reason: CompactionReason, to: u8, move_tombstones: bool) -> PickedCompaction {
        let movable =
            if self.allows_trivial_move(0, to) { self.movable_l0_tables(to, move_tombstones) } else { Vec::new() };
        if !movable.is_empty() {
            return PickedCompaction {
                reason,
                start_level: 0,
                output_level: to,
                start_level_inputs: movable,
                output_level_inputs: Vec::new(),
                trivial_move: true,
            };
        }
        let upper: Vec<&Arc<T>> = self.level(0).iter().collect();
        let lower = self.overlapping_tables(to, &upper);
        PickedCompaction {
            reason,
            start_level: 0,
            output_level: to,
            start_level_inputs: file_ids(upper),
            output_level_inputs: file_ids(lower),
            trivial_move: false,
        }
    }

    fn movable_l0_tables(&self, to: u8, move_tombstones: bool) -> Vec<FileNumber> {
        let mut movable: Vec<&Arc<T>> = Vec::new();
        let mut staying: Vec<&Arc<T>> = Vec::new();
        for table in self.level(0).runs.iter().rev().flat_map(|run| run.tables()) {
            let meta = table.meta();
            let below = self.version.run(to);
            let overlaps = below
                .is_some_and(|run| !run.overlapping(&meta.smallest_key.0, &meta.largest_key.0, self.order).is_empty())
                || staying.iter().chain(&movable).any(|older| !self.disjoint(older, table));
            let clean = move_tombstones || meta.tombstones == 0;
            if overlaps || !clean { staying.push(table) } else { movable.push(table) }
        }
        file_ids(movable)
    }

    fn disjoint(&self, a: &Arc<T>, b: &Arc<T>) -> bool {
        crate::lsm::version::disjoint(&**a, &**b, self.order)
    }

    /// The tables of `level` that overlap the key range of a table of `upper`.
    fn overlapping_tables<'v>(&'v self, level: u8, upper: &[&Arc<T>]) -> Vec<&'v Arc<T>> {
        let Some(run) = self.version.run(level) else { return Vec::new() };
        let mut wanted = vec![false; run.tables().len()];
        for table in upper {
            let meta = table.meta();
            wanted[run.overlapping(&meta.smallest_key.0, &meta.largest_key.0, self.order)].fill(true);
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
            return PickedCompaction {
                reason,
                start_level: from,
                output_level: to,
                start_level_inputs: file_ids(upper),
                output_level_inputs: Vec::new(),
                trivial_move: true,
            };
        }
        let range = self.expand_inputs(run, first, to);
        let upper: Vec<&Arc<T>> = tables[range].iter().collect();
        let lower = self.overlapping_tables(to, &upper);
        PickedCompaction {
            reason,
            start_level: from,
            output_level: to,
            start_level_inputs: file_ids(upper),
            output_level_inputs: file_ids(lower),
            trivial_move: false,
        }
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
            if more_above + more_below > self.compaction_bytes_max() || more_below > below {
                break;
            }
            (end, below) = (end + 1, more_below);
        }
        first..end
    }
}

pub(crate) fn file_ids<T: HasTableMeta>(tables: Vec<&Arc<T>>) -> Vec<FileNumber> {
    tables.into_iter().map(|table| table.meta().number).collect()
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
