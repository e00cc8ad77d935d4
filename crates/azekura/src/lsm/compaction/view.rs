//! A tree as a strategy sees it: plain values, and the plans that can be made of them.

use std::ops::Range;
use std::sync::Arc;

use crate::base::edit::FileId;
use crate::base::{KeyOrder, SeqNo};
use crate::lsm::compaction::plan::{Plan, Reason};
use crate::lsm::options::LsmOptions;
use crate::lsm::version::{BOTTOM, Described, LEVELS, Level, Run, Version};

/// A merge below level 0 takes at most this many tables' worth of bytes, unless one table alone overlaps more.
const MERGE_TABLES_MAX: u64 = 25;

/// Where the last compaction of each level ended; the next one goes on behind it.
pub(crate) type Positions = [Option<Vec<u8>>; LEVELS];

/// What is known when choosing.
pub(crate) struct View<'a, T> {
    pub(crate) version: &'a Version<T>,
    pub(crate) order: &'a KeyOrder,
    pub(crate) options: &'a LsmOptions,
    pub(crate) positions: &'a Positions,
    /// The oldest read point as far as is known; a bottom table whose tombstones could not go when it was written is
    /// tried again when this has risen since.
    pub(crate) oldest_point: SeqNo,
    /// Nothing is in memory: whoever wrote has stopped and had it flushed.
    pub(crate) at_rest: bool,
}

impl<T: Described> View<'_, T> {
    pub(crate) fn level(&self, level: u8) -> &Level<T> {
        self.version.level(level)
    }

    /// Whether any deeper level has a table that meets the range of `table`.
    pub(crate) fn overlaps_below(&self, level: u8, table: &T) -> bool {
        let meta = table.meta();
        self.version
            .levels()
            .skip(usize::from(level) + 1)
            .flat_map(|(_, level)| &level.runs)
            .any(|run| !run.overlapping(&meta.smallest.0, &meta.largest.0, self.order).is_empty())
    }

    /// Whether rewriting `table` where it lies may rid it of tombstones, or rids it of superseded versions.
    pub(crate) fn may_be_cleaned(&self, level: u8, table: &T) -> bool {
        let tried = table.settled_at().is_some_and(|at| self.oldest_point <= at);
        let holds = (table.meta().tombstones > 0 && !tried) || table.superseded().can_go(self.oldest_point);
        holds && !self.overlaps_below(level, table)
    }

    /// Whether a table may change levels as it is.
    pub(crate) fn may_move(&self, from: u8, to: u8) -> bool {
        self.options.compression_at(from) == self.options.compression_at(to)
    }

    /// The level that level 0 goes to: `base`, or a shallower one that still holds data.
    pub(crate) fn below_young(&self, base: u8) -> u8 {
        (1..base).find(|&level| !self.level(level).is_empty()).unwrap_or(base)
    }

    /// The first level below that holds data, or else the bottom.
    pub(crate) fn next_with_data(&self, above: u8) -> u8 {
        (above + 1..=BOTTOM).find(|&level| !self.level(level).is_empty()).unwrap_or(BOTTOM)
    }

    pub(crate) fn merge_bytes_max(&self) -> u64 {
        self.options.compaction.table_size.saturating_mul(MERGE_TABLES_MAX)
    }

    /// All of level 0 into `to`, or, for nothing, those tables of it that meet neither an older table of level 0 nor
    /// one of `to`.
    pub(crate) fn young(&self, reason: Reason, to: u8, move_tombstones: bool) -> Plan {
        let movable = if self.may_move(0, to) { self.movable_young(to, move_tombstones) } else { Vec::new() };
        if !movable.is_empty() {
            return Plan { reason, from: 0, to, upper: movable, lower: Vec::new(), moves: true };
        }
        let upper: Vec<&Arc<T>> = self.level(0).iter().collect();
        let lower = self.lower_for(to, &upper);
        Plan { reason, from: 0, to, upper: ids(upper), lower: ids(lower), moves: false }
    }

    fn movable_young(&self, to: u8, move_tombstones: bool) -> Vec<FileId> {
        let mut movable: Vec<&Arc<T>> = Vec::new();
        let mut staying: Vec<&Arc<T>> = Vec::new();
        for table in self.level(0).runs.iter().rev().flat_map(|run| run.tables()) {
            let meta = table.meta();
            let below = self.version.run(to);
            let meets = below
                .is_some_and(|run| !run.overlapping(&meta.smallest.0, &meta.largest.0, self.order).is_empty())
                || staying.iter().chain(&movable).any(|older| !self.disjoint(older, table));
            let clean = move_tombstones || meta.tombstones == 0;
            if meets || !clean { staying.push(table) } else { movable.push(table) }
        }
        ids(movable)
    }

    fn disjoint(&self, a: &Arc<T>, b: &Arc<T>) -> bool {
        crate::lsm::version::disjoint(&**a, &**b, self.order)
    }

    /// The tables of `level` that meet the range from the smallest to the largest key of `upper`'s tables one by one.
    fn lower_for<'v>(&'v self, level: u8, upper: &[&Arc<T>]) -> Vec<&'v Arc<T>> {
        let Some(run) = self.version.run(level) else { return Vec::new() };
        let mut wanted = vec![false; run.tables().len()];
        for table in upper {
            let meta = table.meta();
            wanted[run.overlapping(&meta.smallest.0, &meta.largest.0, self.order)].fill(true);
        }
        run.tables().iter().zip(wanted).filter_map(|(table, wanted)| wanted.then_some(table)).collect()
    }

    /// Tables of `from`, beginning at `first`, into `to`: as many in a row as can be moved for nothing, at most
    /// `excess` bytes, or else as many as a merge of bounded size takes.
    pub(crate) fn push_down(
        &self,
        reason: Reason,
        from: u8,
        to: u8,
        first: usize,
        excess: u64,
        move_tombstones: bool,
    ) -> Plan {
        let run = self.version.run(from).expect("a table to begin at is on the level");
        let tables = run.tables();
        let movable = |table: &Arc<T>| {
            self.may_move(from, to)
                && self.lower_for(to, &[table]).is_empty()
                && (move_tombstones || !self.may_be_cleaned(to, table))
        };
        let mut bytes = 0;
        let in_row = tables[first..].iter().take_while(|table| {
            let room = bytes < excess;
            bytes += table.meta().size;
            room && movable(table)
        });
        let upper: Vec<&Arc<T>> = in_row.collect();
        if !upper.is_empty() {
            return Plan { reason, from, to, upper: ids(upper), lower: Vec::new(), moves: true };
        }
        let range = self.grown(run, first, to);
        let upper: Vec<&Arc<T>> = tables[range].iter().collect();
        let lower = self.lower_for(to, &upper);
        Plan { reason, from, to, upper: ids(upper), lower: ids(lower), moves: false }
    }

    /// The table at `first` and those behind it that make the merge no larger than allowed and bring little new of
    /// the lower level.
    fn grown(&self, run: &Run<T>, first: usize, to: u8) -> Range<usize> {
        let cost = |end: usize| {
            let upper: Vec<&Arc<T>> = run.tables()[first..end].iter().collect();
            let above: u64 = upper.iter().map(|table| table.meta().size).sum();
            let below: u64 = self.lower_for(to, &upper).iter().map(|table| table.meta().size).sum();
            (above, below)
        };
        let mut end = first + 1;
        let (_, mut below) = cost(end);
        while end < run.tables().len() {
            let (more_above, more_below) = cost(end + 1);
            if more_above + more_below > self.merge_bytes_max() || more_below > below {
                break;
            }
            (end, below) = (end + 1, more_below);
        }
        first..end
    }
}

pub(crate) fn ids<T: Described>(tables: Vec<&Arc<T>>) -> Vec<FileId> {
    tables.into_iter().map(|table| table.meta().id).collect()
}
