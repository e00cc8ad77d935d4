//! Which tables to merge or to move next: a pure function of plain values.
//!
//! In this order: what the shape of the levels asks for ([`leveled`]), then tables full of tombstones, then, at rest,
//! what reads gain by, then what may keep too much in blob files; then, if forced, whatever still keeps the tree from
//! being one clean run at the bottom.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::base::SeqNo;
use crate::base::edit::FileId;
use crate::lsm::compaction::leveled;
use crate::lsm::compaction::plan::{Plan, Reason};
use crate::lsm::compaction::view::{View, ids};
use crate::lsm::version::{BOTTOM, Described};

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

/// Level 0, also with few runs, if it may hide more values of blob files than automatic collection allows.
fn hiding<T: Described>(view: &View<'_, T>) -> Option<Plan> {
    let target = view.options.kv_separation.as_ref()?.automatic_gc?;
    let (young, totals) = (view.level(0), view.version.blobs().totals());
    if young.is_empty() || totals.bytes == 0 {
        return None;
    }
    // Each pointer may hide one to about as much, and each tombstone whatever an entry has on average.
    let pointed: u64 = young.iter().flat_map(|table| &table.meta().blobs).map(|uses| uses.bytes).sum();
    let hidden = pointed.saturating_add(view.version.referenced_by(young.tombstones));
    totals.exceed(target, hidden).then(|| {
        let base = leveled::targets(view.version, &view.options.compaction).base;
        view.young(Reason::Collection, view.below_young(base), true)
    })
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
