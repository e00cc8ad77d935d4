//! Which tables to merge or to move next: a pure function of plain values.
//!
//! In this order: what the shape of the levels asks for ([`leveled`]), then tables full of tombstones, then, at rest,
//! what reads gain by, then what may keep too much in blob files; then, if forced, whatever still keeps the tree from
//! being one clean run at the bottom.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

use crate::base::SeqNo;
use crate::base::edit::FileId;
use crate::lsm::compaction::leveled;
use crate::lsm::compaction::plan::{Plan, Reason};
use crate::lsm::compaction::view::{View, ids};
use crate::lsm::version::{BOTTOM, Described};

/// Tables of a tree are few beside blob files if they have no more than this part of the bytes.
const TREE_SHARE: u64 = 4;

/// The most useful compaction, if any is worth it.
pub(crate) fn choose<T: Described>(view: &View<'_, T>, forced: bool) -> Option<Plan> {
    let shape = leveled::choose(view).or_else(|| tombstones(view)).or_else(|| leveled::at_rest(view));
    let shape = shape.or_else(|| hiding(view));
    shape.or_else(|| if forced { force(view) } else { None })
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

/// What may hide most of what blob files hold, one level down, if that may be more than automatic collection allows.
/// Unless the tree is at rest that has to be worth a merge.
fn hiding<T: Described>(view: &View<'_, T>) -> Option<Plan> {
    let target = view.options.kv_separation.as_ref()?.automatic_gc?;
    let (hides, totals) = (view.version.may_hide(), view.version.blobs().totals());
    let hidden: u64 = hides.iter().sum();
    let worth = view.at_rest || hidden >= totals.worth_showing();
    if hidden == 0 || !worth || !totals.exceed(target, hidden) {
        return None;
    }
    let tables: u64 = view.version.levels().map(|(_, level)| level.bytes).sum();
    // Merges below level 0 carry all that tables hold: little, where most of the bytes are in blob files.
    let deepest = if tables <= totals.bytes / TREE_SHARE { BOTTOM } else { 0 };
    let from = (0..=deepest).max_by_key(|&level| (hides[usize::from(level)], Reverse(level)))?;
    match (from, hides[usize::from(from)]) {
        (_, 0) => None,
        (0, _) => {
            let base = leveled::targets(view.version, &view.options.compaction).base;
            Some(view.young(Reason::Collection, view.below_young(base), true))
        }
        (from, _) => {
            let to = (from + 1..=BOTTOM).find(|&level| !view.level(level).is_empty()).unwrap_or(BOTTOM);
            let hides = |table: &Arc<T>| {
                let pointed: u64 = table.meta().blobs.iter().map(|uses| uses.bytes).sum();
                pointed.saturating_add(view.version.referenced_by(table.meta().tombstones))
            };
            let tables = view.version.run(from)?.tables();
            let first = (0..tables.len()).max_by_key(|&at| (hides(&tables[at]), Reverse(at)))?;
            Some(view.push_down(Reason::Collection, from, to, first, u64::MAX, true))
        }
    }
}

fn rewrite<T: Described>(reason: Reason, level: u8, tables: Vec<&Arc<T>>) -> Plan {
    Plan { reason, from: level, to: level, upper: ids(tables), lower: Vec::new(), moves: false }
}

/// Pushes the shallowest records up to `through` down, a bounded merge at a time, until all of them are at the bottom.
/// What others write meanwhile may come along and does not keep it from ending.
pub(crate) fn push_to_bottom<T: Described>(view: &View<'_, T>, through: SeqNo) -> Option<Plan> {
    let old = |table: &Arc<T>| table.meta().lowest <= through;
    let (from, level) = view.version.levels().take(usize::from(BOTTOM)).find(|(_, level)| level.iter().any(old))?;
    let to = (from + 1..=BOTTOM).find(|&level| !view.level(level).is_empty()).unwrap_or(BOTTOM);
    if from == 0 {
        return Some(view.young(Reason::Collection, to, true));
    }
    Some(view.push_down(Reason::Collection, from, to, level.iter().position(old)?, u64::MAX, true))
}

/// Rewrites tables of the bottom, as many of these as a bounded merge takes, for what they hold that nobody can see.
pub(crate) fn rewrite_at_bottom<T: Described>(view: &View<'_, T>, wanted: &BTreeSet<FileId>) -> Option<Plan> {
    let mut tables = view.version.run(BOTTOM)?.tables().iter().filter(|table| wanted.contains(&table.meta().id));
    let first = tables.next()?;
    let mut bytes = first.meta().size;
    let more = tables.take_while(|table| {
        bytes += table.meta().size;
        bytes <= view.merge_bytes_max()
    });
    Some(rewrite(Reason::Collection, BOTTOM, std::iter::once(first).chain(more).collect()))
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
