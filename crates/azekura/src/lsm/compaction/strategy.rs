//! Which tables to merge or to move next: a pure function of plain values.
//!
//! In this order: what the shape of the levels asks for ([`leveled`]), then tables full of tombstones or of superseded
//! versions, then, at rest, what reads gain by, then what may keep too much in blob files; then, if forced, whatever
//! still keeps the tree from being one clean run at the bottom.

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
    let shape = leveled::choose(view).or_else(|| tombstones(view)).or_else(|| superseded(view));
    let shape = shape.or_else(|| leveled::at_rest(view)).or_else(|| hiding(view));
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

/// A bottom table of which at least a quarter are versions behind newer ones, if some of them can go now: a snapshot
/// needed them when the table was written. Each rewrite drops at least one.
fn superseded<T: Described>(view: &View<'_, T>) -> Option<Plan> {
    let mut tables = view.version.run(BOTTOM)?.tables().iter();
    let table = tables.find(|table| {
        let superseded = table.superseded();
        superseded.can_go(view.oldest_point) && superseded.versions >= table.meta().entries.div_ceil(4)
    })?;
    Some(rewrite(Reason::Superseded, BOTTOM, vec![table]))
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
            let to = view.next_with_data(from);
            let hides = |table: &Arc<T>| view.version.hides(table.meta().pointed_bytes(), table.meta().tombstones);
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
    let to = view.next_with_data(from);
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

/// Tables of the bottom that [`force`] would rewrite.
pub(crate) fn unclean_at_bottom<T: Described>(view: &View<'_, T>) -> BTreeSet<FileId> {
    let tables = view.version.run(BOTTOM).map(|run| run.tables()).unwrap_or_default();
    tables.iter().filter(|table| view.may_be_cleaned(BOTTOM, table)).map(|table| table.meta().id).collect()
}

/// Pushes the shallowest data down, a bounded merge at a time, until all of it is at the bottom; then rewrites the
/// bottom tables that hold tombstones or superseded versions.
fn force<T: Described>(view: &View<'_, T>) -> Option<Plan> {
    let (shallowest, _) = view.version.levels().find(|(_, level)| !level.is_empty())?;
    let to = view.next_with_data(shallowest);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::KeyOrder;
    use crate::base::edit::{BlobMeta, BlobSection, BlobUse, TableMeta};
    use crate::lsm::blobs::options::KvSeparationOptions;
    use crate::lsm::compaction::view::Positions;
    use crate::lsm::options::LsmOptions;
    use crate::lsm::tests::harness::World;
    use crate::lsm::version::tests::table;
    use crate::lsm::version::{Change, Version};

    /// From, to, upper, lower, whether it is a move.
    type Chosen = (u8, u8, Vec<u64>, Vec<u64>, bool);
    type Table = Arc<TableMeta>;

    fn version(young: Vec<Table>, deep: Vec<(u8, Table)>) -> Version<TableMeta> {
        let change = Change { flushed: young, added: deep, ..Change::default() };
        Version::empty().with(change, &KeyOrder::bytewise())
    }

    fn ask(
        version: &Version<TableMeta>,
        options: &LsmOptions,
        choose: impl FnOnce(&View<'_, TableMeta>) -> Option<Plan>,
    ) -> Option<Chosen> {
        ask_at(false, version, options, choose)
    }

    fn ask_at(
        at_rest: bool,
        version: &Version<TableMeta>,
        options: &LsmOptions,
        choose: impl FnOnce(&View<'_, TableMeta>) -> Option<Plan>,
    ) -> Option<Chosen> {
        let (order, positions, oldest_point) = (KeyOrder::bytewise(), Positions::default(), SeqNo::MAX);
        let plan = choose(&View { version, order: &order, options, positions: &positions, oldest_point, at_rest })?;
        assert_eq!(plan.reason, Reason::Collection);
        let ids = |ids: Vec<FileId>| ids.into_iter().map(|id| id.0).collect();
        Some((plan.from, plan.to, ids(plan.upper), ids(plan.lower), plan.moves))
    }

    fn small_tables(table_size: u64) -> LsmOptions {
        let mut options = LsmOptions::default();
        options.compaction.table_size = table_size;
        options
    }

    fn push(version: &Version<TableMeta>, through: u64) -> Option<Chosen> {
        ask(version, &small_tables(100), |view| push_to_bottom(view, SeqNo(through)))
    }

    #[test]
    fn what_is_old_enough_goes_down_from_the_shallowest_level() {
        let deep = vec![(5, table(3, "a", "c")), (6, table(1, "a", "c")), (6, table(2, "x", "z"))];
        let three = version(vec![table(4, "b", "f")], deep);
        assert_eq!(push(&three, 49), Some((0, 5, vec![4], vec![3], false)), "to the next level that has data");
        assert_eq!(push(&three, 40), push(&three, 49), "one record is enough");
        assert_eq!(push(&three, 39), Some((5, 6, vec![3], vec![1], false)), "4 came later");
        assert_eq!(push(&three, 29), None, "what is at the bottom already does not count");
        let apart = version(vec![], vec![(2, table(3, "p", "q")), (2, table(4, "r", "s")), (6, table(1, "a", "c"))]);
        assert_eq!(push(&apart, 39), Some((2, 6, vec![3, 4], vec![], true)), "what meets nothing is moved");
        assert_eq!(push(&version(vec![table(1, "a", "c")], vec![]), 99), Some((0, 6, vec![1], vec![], true)));
        assert_eq!(push(&version(vec![], vec![]), 99), None);
    }

    #[test]
    fn pushing_down_ends_also_while_others_write() {
        let deep = (1..40u64).map(|n| (1 + (n % 6) as u8, table(n, &format!("k{n:02}"), &format!("k{n:02}x"))));
        let mut now = version(vec![table(50, "k00", "k30"), table(51, "k31", "k99")], deep.collect());
        let (through, mut next_id) = (600, 100);
        for round in 0..100 {
            let Some((_, to, upper, lower, moves)) = push(&now, through) else {
                let above = now.tables().filter(|(level, _)| *level < BOTTOM);
                assert!(above.into_iter().all(|(_, table)| table.lowest.0 > through) && round > 3, "round {round}");
                return;
            };
            let taken: Vec<Table> = now
                .tables()
                .filter(|(_, t)| upper.iter().chain(&lower).any(|id| *id == t.id.0))
                .map(|t| Arc::clone(t.1))
                .collect();
            let removed = taken.iter().map(|table| table.id).collect();
            let added = match moves {
                true => taken.into_iter().map(|table| (to, table)).collect(),
                false => {
                    let smallest = taken.iter().map(|table| table.smallest.clone()).min().unwrap();
                    let largest = taken.iter().map(|table| table.largest.clone()).max().unwrap();
                    let lowest = taken.iter().map(|table| table.lowest).min().unwrap();
                    next_id += 1;
                    let id = FileId(next_id);
                    vec![(to, Arc::new(TableMeta { id, smallest, largest, lowest, ..(*taken[0]).clone() }))]
                }
            };
            let flushed = vec![table(1_000 + round, "k00", "k99")];
            now = now.with(Change { flushed, added, removed, ..Change::default() }, &KeyOrder::bytewise());
        }
        panic!("it does not end");
    }

    #[test]
    fn of_the_bottom_only_what_is_wanted_is_rewritten_and_no_more_than_a_merge_takes() {
        let bottom = vec![(6, table(1, "a", "c")), (6, table(2, "d", "e")), (6, table(3, "f", "g"))];
        let all = version(vec![], [bottom, vec![(5, table(4, "a", "b"))]].concat());
        let rewritten = |wanted: &[u64], table_size| {
            let wanted = wanted.iter().map(|&id| FileId(id)).collect();
            ask(&all, &small_tables(table_size), |view| rewrite_at_bottom(view, &wanted))
        };
        assert_eq!(rewritten(&[1, 3], 100), Some((6, 6, vec![1, 3], vec![], false)));
        assert_eq!(rewritten(&[1, 2, 3], 8), Some((6, 6, vec![1, 2], vec![], false)), "25 times 8 bytes");
        assert_eq!(rewritten(&[2, 3], 1), Some((6, 6, vec![2], vec![], false)), "one at least");
        assert_eq!(rewritten(&[4, 9], 100), None, "one is not at the bottom, one is gone");
        assert_eq!(rewritten(&[], 100), None);
        let empty =
            ask(&version(vec![], vec![]), &small_tables(100), |view| rewrite_at_bottom(view, &[FileId(1)].into()));
        assert_eq!(empty, None);
    }

    /// A table that refers to so many bytes of a logical file, and holds so many tombstones.
    fn referring(id: u64, range: (&str, &str), uses: &[(u64, u64)], tombstones: u64) -> Table {
        let uses = uses.iter().map(|&(logical, bytes)| BlobUse { logical: FileId(logical), count: 1, bytes });
        let blobs = uses.collect();
        Arc::new(TableMeta { blobs, tombstones, ..(*table(id, range.0, range.1)).clone() })
    }

    #[test]
    fn level_0_goes_down_if_it_may_hide_more_than_is_allowed() {
        let world = World::new(KeyOrder::bytewise(), LsmOptions::default(), 1);
        let file = |id: u64, bytes| {
            let sections = vec![BlobSection { logical: FileId(id), values: 10, bytes, rewritten: false }];
            world.tree.context.blob_handle(BlobMeta { id: FileId(id), size: bytes + 100, created_ms: 0, sections })
        };
        let apart = |target| {
            let apart = KvSeparationOptions::default().automatic_gc(target);
            LsmOptions { kv_separation: Some(apart), ..LsmOptions::default() }
        };
        let bottom = || vec![(6, referring(1, ("a", "m"), &[(7, 1_000)], 0))];
        let asked = |young: &[Table], options: &LsmOptions| {
            let blobs_added = vec![file(7, 1_000), file(8, 300)];
            let change = Change { flushed: young.to_vec(), added: bottom(), blobs_added, ..Change::default() };
            let version = Version::empty().with(change, &KeyOrder::bytewise());
            ask(&version, options, hiding)
        };
        // Its 300 bytes may overwrite 300 of the 1,000: 1,300 for each 1,000.
        let overwriting = [referring(4, ("b", "f"), &[(8, 300)], 0)];
        let merged = Some((0, 6, vec![4], vec![1], false));
        assert_eq!(asked(&overwriting, &apart(Some(1.29))), merged);
        assert_eq!(asked(&overwriting, &apart(Some(1.31))), None);
        assert_eq!(asked(&overwriting, &apart(None)), None, "left to the caller");
        assert_eq!(asked(&overwriting, &LsmOptions::default()), None);
        // 300 are stale already. Six tombstones among 14 values may hide 6/14 of the 1,000: 1,300 for each 571.
        let burying = [referring(4, ("b", "f"), &[], 6)];
        assert_eq!(asked(&burying, &apart(Some(2.2))), merged);
        assert_eq!(asked(&burying, &apart(Some(2.3))), None);
        assert_eq!(asked(&[], &apart(Some(1.0))), None, "level 0 is empty");
        let no_blobs = version(burying.to_vec(), vec![(6, table(1, "a", "m"))]);
        assert_eq!(ask(&no_blobs, &apart(Some(1.0)), hiding), None);
    }

    /// Deletes that leave the memtable and level 0 soon, and then lie for long on a level between.
    #[test]
    fn the_level_that_may_hide_most_goes_down_one_level_and_only_if_that_is_worth_it() {
        let world = World::new(KeyOrder::bytewise(), LsmOptions::default(), 1);
        let file = |id: u64, bytes| {
            let sections = vec![BlobSection { logical: FileId(id), values: 10, bytes, rewritten: false }];
            world.tree.context.blob_handle(BlobMeta { id: FileId(id), size: bytes + 100, created_ms: 0, sections })
        };
        let asked = |young: &[Table], deep: &[(u8, Table)], target, at_rest| {
            let apart = KvSeparationOptions::default().automatic_gc(Some(target));
            let options = LsmOptions { kv_separation: Some(apart), ..LsmOptions::default() };
            let blobs_added = vec![file(7, 100_000), file(8, 9_000)];
            let change = Change { flushed: young.to_vec(), added: deep.to_vec(), blobs_added, ..Change::default() };
            ask_at(at_rest, &Version::empty().with(change, &KeyOrder::bytewise()), &options, hiding)
        };
        let bottom =
            || [(6, referring(1, ("a", "g"), &[(7, 60_000)], 0)), (6, referring(2, ("h", "z"), &[(7, 40_000)], 0))];
        // Two tables of level 4: a tombstone of each ten entries hides a 28th of 109,000.
        let between = |first, second| {
            [(4, referring(3, ("b", "c"), &[(8, 9_000)], first)), (4, referring(4, ("x", "y"), &[], second))]
        };
        let deep = |first, second| [&bottom()[..], &between(first, second)[..]].concat();
        assert_eq!(asked(&[], &deep(0, 5), 1.2, false), Some((4, 6, vec![4], vec![2], false)), "the fuller table");
        assert_eq!(asked(&[], &deep(5, 0), 1.2, false), Some((4, 6, vec![3], vec![1], false)));
        assert_eq!(asked(&[], &deep(0, 5), 2.0, false), None, "that much is allowed");
        let young = [referring(5, ("b", "f"), &[], 9)];
        assert_eq!(asked(&young, &deep(0, 5), 1.2, false), Some((0, 4, vec![5], vec![3], false)));
        assert_eq!(asked(&young, &bottom(), 1.2, false), Some((0, 6, vec![5], vec![1], false)));
        // 9,000 bytes are more than a sixteenth of 109,000, half of that is not.
        let few = |bytes| [&bottom()[..], &[(4, referring(3, ("b", "c"), &[(8, bytes)], 0))]].concat();
        assert_eq!(asked(&[], &few(9_000), 1.0, false), Some((4, 6, vec![3], vec![1], false)));
        assert_eq!(asked(&[], &few(4_500), 1.0, false), None);
        assert_eq!(asked(&[], &few(4_500), 1.0, true), Some((4, 6, vec![3], vec![1], false)), "at rest, anything is");
        // Where tables are a good part of it all, a merge below level 0 costs more than it shows.
        let large = |table: &Table| Arc::new(TableMeta { size: 30_000, ..(**table).clone() });
        let heavy: Vec<(u8, Table)> = deep(0, 5).iter().map(|(level, table)| (*level, large(table))).collect();
        assert_eq!(asked(&[], &heavy, 1.2, false), None);
        assert_eq!(asked(&young, &heavy, 1.2, false), Some((0, 4, vec![5], vec![3], false)));
    }
}
