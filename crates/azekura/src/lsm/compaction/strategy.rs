//! Picks the tables to compact or to move next: a pure function of plain values.
//!
//! In this order: levels that exceed their targets ([`leveled`]); tables with many tombstones or superseded versions;
//! in an idle tree, level 0, for faster reads; tables that may keep too many stale blob bytes; and if forced,
//! everything until the tree is one run at the bottom without droppable entries.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

use crate::base::SeqNo;
use crate::base::version_edit::FileNumber;
use crate::lsm::compaction::leveled;
use crate::lsm::compaction::picker::{CompactionPicker, CompactionReason, PickedCompaction, file_ids};
use crate::lsm::version::{BOTTOM_LEVEL, HasTableMeta};

/// Tables are small compared to blob files if they have at most one part in this many of the bytes of the blob files.
const TREE_SHARE: u64 = 4;

/// The most useful compaction; `None` if none is useful.
pub(crate) fn pick_compaction<T: HasTableMeta>(
    picker: &CompactionPicker<'_, T>,
    forced: bool,
) -> Option<PickedCompaction> {
    let shape = leveled::pick_leveled(picker).or_else(|| pick_tombstones(picker)).or_else(|| pick_superseded(picker));
    let shape = shape.or_else(|| leveled::pick_idle_l0(picker)).or_else(|| pick_hidden_blobs(picker));
    shape.or_else(|| if forced { pick_forced(picker) } else { None })
}

/// Compacts a table with more than one half tombstones into the next level. If no deeper level overlaps it, rewrites it
/// without the tombstones, if these can be dropped.
fn pick_tombstones<T: HasTableMeta>(picker: &CompactionPicker<'_, T>) -> Option<PickedCompaction> {
    let dense = |table: &T| table.meta().tombstones > table.meta().entries / 2;
    for (number, level) in picker.version.levels().filter(|(_, level)| level.tombstones > 0) {
        if number == 0 {
            if level.iter().any(|table| dense(table)) {
                let base = leveled::level_targets(picker.version, &picker.options.compaction).base_level;
                return Some(picker.pick_l0(CompactionReason::Tombstones, picker.l0_output_level(base), false));
            }
            continue;
        }
        for (at, table) in level.iter().enumerate().filter(|(_, table)| dense(table)) {
            if picker.overlaps_below(number, table) {
                return Some(picker.pick_from_level(CompactionReason::Tombstones, number, number + 1, at, 1, true));
            }
            if picker.can_drop_entries(number, table) {
                return Some(in_place(CompactionReason::Tombstones, number, vec![table]));
            }
        }
    }
    None
}

/// Rewrites a bottom table of which at least a quarter are superseded versions, if some of them can be dropped now: a
/// snapshot needed them when the table was written. Each rewrite drops at least one.
fn pick_superseded<T: HasTableMeta>(picker: &CompactionPicker<'_, T>) -> Option<PickedCompaction> {
    let mut tables = picker.version.run(BOTTOM_LEVEL)?.tables().iter();
    let table = tables.find(|table| {
        let superseded = table.superseded();
        superseded.can_drop(picker.oldest_snapshot) && superseded.count >= table.meta().entries.div_ceil(4)
    })?;
    Some(in_place(CompactionReason::Superseded, BOTTOM_LEVEL, vec![table]))
}

/// Compacts the tables that may hide the most blob bytes into the next level, if the hidden bytes may exceed the target
/// of background blob GC. Unless the tree is idle, the hidden bytes must also justify a compaction.
fn pick_hidden_blobs<T: HasTableMeta>(picker: &CompactionPicker<'_, T>) -> Option<PickedCompaction> {
    let target = picker.options.kv_separation.as_ref()?.automatic_gc?;
    let (hides, totals) = (picker.version.max_hidden_bytes_per_level(), picker.version.blobs().totals());
    let hidden: u64 = hides.iter().sum();
    let worth = picker.idle || hidden >= totals.min_hidden_bytes_to_compact();
    if hidden == 0 || !worth || !totals.exceed_space_amp(target, hidden) {
        return None;
    }
    let tables: u64 = picker.version.levels().map(|(_, level)| level.bytes).sum();
    // Compactions below level 0 rewrite complete tables. This is cheap if most of the bytes are in blob files.
    let deepest = if tables <= totals.bytes / TREE_SHARE { BOTTOM_LEVEL } else { 0 };
    let from = (0..=deepest).max_by_key(|&level| (hides[usize::from(level)], Reverse(level)))?;
    match (from, hides[usize::from(from)]) {
        (_, 0) => None,
        (0, _) => {
            let base = leveled::level_targets(picker.version, &picker.options.compaction).base_level;
            Some(picker.pick_l0(CompactionReason::HiddenBlobs, picker.l0_output_level(base), true))
        }
        (from, _) => {
            let to = picker.next_nonempty_level(from);
            let hides = |table: &Arc<T>| {
                picker.version.max_hidden_bytes(table.meta().referenced_blob_bytes(), table.meta().tombstones)
            };
            let tables = picker.version.run(from)?.tables();
            let first = (0..tables.len()).max_by_key(|&at| (hides(&tables[at]), Reverse(at)))?;
            Some(picker.pick_from_level(CompactionReason::HiddenBlobs, from, to, first, u64::MAX, true))
        }
    }
}

fn in_place<T: HasTableMeta>(reason: CompactionReason, level: u8, tables: Vec<&Arc<T>>) -> PickedCompaction {
    PickedCompaction {
        reason,
        start_level: level,
        output_level: level,
        start_level_inputs: file_ids(tables),
        output_level_inputs: Vec::new(),
        trivial_move: false,
    }
}

/// Compacts the shallowest records up to `through` into the next level, one limited compaction at a time, until all of
/// them are at the bottom. Records that are written meanwhile do not delay the end.
pub(crate) fn pick_to_bottom<T: HasTableMeta>(
    picker: &CompactionPicker<'_, T>,
    through: SeqNo,
) -> Option<PickedCompaction> {
    let old = |table: &Arc<T>| table.meta().smallest_seqno <= through;
    let (from, level) =
        picker.version.levels().take(usize::from(BOTTOM_LEVEL)).find(|(_, level)| level.iter().any(old))?;
    let to = picker.next_nonempty_level(from);
    if from == 0 {
        return Some(picker.pick_l0(CompactionReason::HiddenBlobs, to, true));
    }
    Some(picker.pick_from_level(CompactionReason::HiddenBlobs, from, to, level.iter().position(old)?, u64::MAX, true))
}

/// Rewrites as many of the `wanted` tables of the bottom level as one limited compaction has, because of their
/// invisible entries.
pub(crate) fn pick_bottom_rewrite<T: HasTableMeta>(
    picker: &CompactionPicker<'_, T>,
    wanted: &BTreeSet<FileNumber>,
) -> Option<PickedCompaction> {
    let mut tables =
        picker.version.run(BOTTOM_LEVEL)?.tables().iter().filter(|table| wanted.contains(&table.meta().number));
    let first = tables.next()?;
    let mut bytes = first.meta().size;
    let more = tables.take_while(|table| {
        bytes += table.meta().size;
        bytes <= picker.compaction_bytes_max()
    });
    Some(in_place(CompactionReason::HiddenBlobs, BOTTOM_LEVEL, std::iter::once(first).chain(more).collect()))
}

/// Tables of the bottom level that [`pick_forced`] would rewrite.
pub(crate) fn bottom_tables_to_clean<T: HasTableMeta>(picker: &CompactionPicker<'_, T>) -> BTreeSet<FileNumber> {
    let tables = picker.version.run(BOTTOM_LEVEL).map(|run| run.tables()).unwrap_or_default();
    tables
        .iter()
        .filter(|table| picker.can_drop_entries(BOTTOM_LEVEL, table))
        .map(|table| table.meta().number)
        .collect()
}

/// Compacts the shallowest data into the next level, one limited compaction at a time, until all of it is at the
/// bottom. Then rewrites the bottom tables with tombstones or superseded versions that can be dropped.
fn pick_forced<T: HasTableMeta>(picker: &CompactionPicker<'_, T>) -> Option<PickedCompaction> {
    let (shallowest, _) = picker.version.levels().find(|(_, level)| !level.is_empty())?;
    let to = picker.next_nonempty_level(shallowest);
    if shallowest == 0 {
        return Some(picker.pick_l0(CompactionReason::Forced, to, to < BOTTOM_LEVEL));
    }
    if shallowest < BOTTOM_LEVEL {
        return Some(picker.pick_from_level(CompactionReason::Forced, shallowest, to, 0, u64::MAX, false));
    }
    let tables = picker.version.run(BOTTOM_LEVEL)?.tables();
    let first = tables.iter().position(|table| picker.can_drop_entries(BOTTOM_LEVEL, table))?;
    let mut bytes = 0;
    let in_row = tables[first..].iter().take_while(|table| {
        bytes += table.meta().size;
        picker.can_drop_entries(BOTTOM_LEVEL, table) && bytes <= picker.compaction_bytes_max()
    });
    let some: Vec<&Arc<T>> = in_row.collect();
    Some(in_place(CompactionReason::Forced, BOTTOM_LEVEL, if some.is_empty() { vec![&tables[first]] } else { some }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::KeyOrder;
    use crate::base::version_edit::{BlobFileMeta, BlobFileSection, TableBlobUsage, TableMeta};
    use crate::lsm::blob::options::KvSeparationOptions;
    use crate::lsm::compaction::picker::CompactPointers;
    use crate::lsm::options::LsmOptions;
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
        run_pick(version, &small_tables(100), |picker| pick_to_bottom(picker, SeqNo(through)))
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
        panic!("it does not end");
    }

    #[test]
    fn bottom_rewrite_is_bounded_and_selective() {
        let bottom = vec![(6, table(1, "a", "c")), (6, table(2, "d", "e")), (6, table(3, "f", "g"))];
        let all = version(vec![], [bottom, vec![(5, table(4, "a", "b"))]].concat());
        let rewritten = |wanted: &[u64], table_size| {
            let wanted = wanted.iter().map(|&id| FileNumber(id)).collect();
            run_pick(&all, &small_tables(table_size), |picker| pick_bottom_rewrite(picker, &wanted))
        };
        assert_eq!(rewritten(&[1, 3], 100), Some((6, 6, vec![1, 3], vec![], false)));
        assert_eq!(rewritten(&[1, 2, 3], 8), Some((6, 6, vec![1, 2], vec![], false)), "25 times 8 bytes");
        assert_eq!(rewritten(&[2, 3], 1), Some((6, 6, vec![2], vec![], false)), "at least one table");
        assert_eq!(rewritten(&[4, 9], 100), None, "table 4 is not at the bottom, table 9 does not exist");
        assert_eq!(rewritten(&[], 100), None);
        let empty = run_pick(&version(vec![], vec![]), &small_tables(100), |picker| {
            pick_bottom_rewrite(picker, &[FileNumber(1)].into())
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
            run_pick(&version, options, pick_hidden_blobs)
        };
        // Its 300 bytes may supersede 300 of the 1,000 bytes: 1,300 bytes for 1,000 referenced ones.
        let overwriting = [referring(4, ("b", "f"), &[(8, 300)], 0)];
        let merged = Some((0, 6, vec![4], vec![1], false));
        assert_eq!(asked(&overwriting, &separation(Some(1.29))), merged);
        assert_eq!(asked(&overwriting, &separation(Some(1.31))), None);
        assert_eq!(asked(&overwriting, &separation(None)), None, "left to the caller");
        assert_eq!(asked(&overwriting, &LsmOptions::default()), None);
        // 300 bytes are stale already. Six tombstones among 14 values may hide 6/14 of the 1,000 bytes: 1,300 bytes for
        // 571 referenced ones.
        let tombstones = [referring(4, ("b", "f"), &[], 6)];
        assert_eq!(asked(&tombstones, &separation(Some(2.2))), merged);
        assert_eq!(asked(&tombstones, &separation(Some(2.3))), None);
        assert_eq!(asked(&[], &separation(Some(1.0))), None, "level 0 is empty");
        let no_blobs = version(tombstones.to_vec(), vec![(6, table(1, "a", "m"))]);
        assert_eq!(run_pick(&no_blobs, &separation(Some(1.0)), pick_hidden_blobs), None);
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
                pick_hidden_blobs,
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
        assert_eq!(asked(&[], &deep(0, 5), 2.0, false), None, "that much is allowed");
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
