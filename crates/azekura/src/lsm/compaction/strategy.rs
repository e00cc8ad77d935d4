//! Which tables to merge or to move next: a pure function of plain values.
//!
//! In this order: what the shape of the levels asks for ([`leveled`](super::leveled)), then tables full of tombstones,
//! then, if forced, whatever still keeps the tree from being one clean run at the bottom.

use std::ops::Range;
use std::sync::Arc;

use crate::base::edit::FileId;
use crate::base::{KeyOrder, SeqNo};
use crate::lsm::compaction::leveled;
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
}

/// Why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// Too many runs on level 0.
    YoungRuns,
    /// A level has outgrown its target.
    Size,
    /// More than half of a table are tombstones.
    Tombstones,
    /// `major_compact`.
    Forced,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) reason: Reason,
    pub(crate) from: u8,
    pub(crate) to: u8,
    /// Tables of `from`.
    pub(crate) upper: Vec<FileId>,
    /// Tables of `to` that overlap them; none if `from` is `to`.
    pub(crate) lower: Vec<FileId>,
    /// Only the level changes, no table is rewritten.
    pub(crate) moves: bool,
}

/// The most useful compaction, if any is worth it.
pub(crate) fn choose<T: Described>(view: &View<'_, T>, forced: bool) -> Option<Plan> {
    leveled::choose(view).or_else(|| tombstones(view)).or_else(|| if forced { force(view) } else { None })
}

impl<T: Described> View<'_, T> {
    pub(crate) fn level(&self, level: u8) -> &Level<T> {
        self.version.level(level)
    }

    /// Whether any deeper level has a table that meets the range of `table`.
    fn overlaps_below(&self, level: u8, table: &T) -> bool {
        let meta = table.meta();
        self.version
            .levels()
            .skip(usize::from(level) + 1)
            .flat_map(|(_, level)| &level.runs)
            .any(|run| !run.overlapping(&meta.smallest.0, &meta.largest.0, self.order).is_empty())
    }

    /// Whether rewriting `table` where it lies may rid it of tombstones.
    fn may_be_cleaned(&self, level: u8, table: &T) -> bool {
        let tried = table.settled_at().is_some_and(|at| self.oldest_point <= at);
        table.meta().tombstones > 0 && !tried && !self.overlaps_below(level, table)
    }

    /// Whether a table may change levels as it is.
    pub(crate) fn may_move(&self, from: u8, to: u8) -> bool {
        self.options.compression_at(from) == self.options.compression_at(to)
    }

    /// The level that level 0 goes to: `base`, or a shallower one that still holds data.
    pub(crate) fn below_young(&self, base: u8) -> u8 {
        (1..base).find(|&level| !self.level(level).is_empty()).unwrap_or(base)
    }

    fn merge_bytes_max(&self) -> u64 {
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

/// A table whose tombstones are more than half of it goes where they meet what they hide; at the bottom, or with
/// nothing below, it is rewritten without them.
fn tombstones<T: Described>(view: &View<'_, T>) -> Option<Plan> {
    let dense = |table: &T| table.meta().tombstones > table.meta().entries / 2;
    for (number, level) in view.version.levels().filter(|(_, level)| level.tombstones > 0) {
        if number == 0 {
            if level.iter().any(|table| dense(table)) {
                let base = leveled::targets(view.version, &view.options.compaction).base;
                return Some(view.young(Reason::Tombstones, view.below_young(base), false));
            }
            continue;
        }
        for (at, table) in level.iter().enumerate().filter(|(_, table)| dense(table)) {
            if view.overlaps_below(number, table) {
                return Some(view.push_down(Reason::Tombstones, number, number + 1, at, 1, true));
            }
            if view.may_be_cleaned(number, table) {
                return Some(rewrite(Reason::Tombstones, number, vec![table]));
            }
        }
    }
    None
}

fn rewrite<T: Described>(reason: Reason, level: u8, tables: Vec<&Arc<T>>) -> Plan {
    Plan { reason, from: level, to: level, upper: ids(tables), lower: Vec::new(), moves: false }
}

/// Pushes the shallowest data down, a bounded merge at a time, until all of it is at the bottom; then rewrites the
/// bottom tables that hold tombstones.
fn force<T: Described>(view: &View<'_, T>) -> Option<Plan> {
    let (shallowest, _) = view.version.levels().find(|(_, level)| !level.is_empty())?;
    let to = (shallowest + 1..=BOTTOM).find(|&level| !view.level(level).is_empty()).unwrap_or(BOTTOM);
    if shallowest == 0 {
        return Some(view.young(Reason::Forced, to, to < BOTTOM));
    }
    if shallowest < BOTTOM {
        return Some(view.push_down(Reason::Forced, shallowest, to, 0, u64::MAX, false));
    }
    let tables = view.version.run(BOTTOM)?.tables();
    let first = tables.iter().position(|table| view.may_be_cleaned(BOTTOM, table))?;
    let mut bytes = 0;
    let in_row = tables[first..].iter().take_while(|table| {
        bytes += table.meta().size;
        view.may_be_cleaned(BOTTOM, table) && bytes <= view.merge_bytes_max()
    });
    let some: Vec<&Arc<T>> = in_row.collect();
    Some(rewrite(Reason::Forced, BOTTOM, if some.is_empty() { vec![&tables[first]] } else { some }))
}
