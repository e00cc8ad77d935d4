//! Leveled compaction: the size targets of the levels, and the level that exceeds its target the most.
//!
//! The bottom level has no limit. The target of each level above it is `level_size_multiplier` times smaller, up to the
//! *base level*, into which level 0 is compacted. In a small tree the bottom is the base level, so that data is
//! rewritten as seldom as possible and few superseded versions are kept. As the tree grows, the base level moves up.
//! Data that remains on levels between level 0 and the base level is moved down.

use crate::lsm::compaction::picker::{CompactionPicker, CompactionReason, PickedCompaction};
use crate::lsm::options::LeveledOptions;
use crate::lsm::version::{BOTTOM_LEVEL, HasTableMeta, NUM_LEVELS, Version};

/// In an idle tree, level 0 is compacted if that rewrites at most this many times its bytes. This is less than its
/// compaction from level to level would cost later.
const IDLE_L0_COST_MAX: u64 = 4;

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
    targets
}

/// A level with a score of 1 or more needs a compaction.
fn score<T: HasTableMeta>(picker: &CompactionPicker<'_, T>, targets: &LevelTargets, level: u8) -> f64 {
    let bytes = picker.level(level).bytes as f64;
    match level {
        0 => picker.level(0).runs.len() as f64 / f64::from(picker.options.compaction.l0_compaction_trigger.max(1)),
        BOTTOM_LEVEL => 0.0,
        _ if bytes == 0.0 => 0.0,
        _ if level < targets.base_level => 1.0 + bytes / picker.options.compaction.base_level_size.max(1) as f64,
        // A level that is exactly at its target needs no compaction.
        _ => (bytes - 1.0) / targets.bytes[usize::from(level)] as f64,
    }
}

/// The compaction of the level with the highest score; of two equal ones, of the shallower level.
pub(crate) fn pick_leveled<T: HasTableMeta>(picker: &CompactionPicker<'_, T>) -> Option<PickedCompaction> {
    let targets = level_targets(picker.version, &picker.options.compaction);
    let mut best: Option<(u8, f64)> = None;
    for level in 0..BOTTOM_LEVEL {
        let score = score(picker, &targets, level);
        if score >= 1.0 && best.is_none_or(|(_, other)| score > other) {
            best = Some((level, score));
        }
    }
    let (level, _) = best?;
    if level == 0 {
        return Some(picker.pick_l0(CompactionReason::L0Runs, picker.l0_output_level(targets.base_level), true));
    }
    let first = next_after_compact_pointer(picker, level);
    let excess = picker.level(level).bytes - targets.bytes[usize::from(level)];
    Some(picker.pick_from_level(CompactionReason::LevelSize, level, level + 1, first, excess, true))
}

/// In an idle tree, compacts level 0 as deep as possible for at most [`IDLE_L0_COST_MAX`] times its own bytes, because
/// a lookup searches every run of level 0, and no writer needs the disk.
pub(crate) fn pick_idle_l0<T: HasTableMeta>(picker: &CompactionPicker<'_, T>) -> Option<PickedCompaction> {
    if !picker.idle || picker.level(0).is_empty() {
        return None;
    }
    let base = level_targets(picker.version, &picker.options.compaction).base_level;
    let shallowest = picker.l0_output_level(base);
    let deepest = (shallowest..BOTTOM_LEVEL).find(|&level| !picker.level(level).is_empty()).unwrap_or(BOTTOM_LEVEL);
    let bytes = picker.level(0).bytes;
    (shallowest..=deepest).rev().map(|to| picker.pick_l0(CompactionReason::IdleL0, to, true)).find(|plan| {
        let lower = picker
            .level(plan.output_level)
            .iter()
            .map(|table| table.meta())
            .filter(|meta| plan.output_level_inputs.contains(&meta.number));
        plan.trivial_move || lower.map(|meta| meta.size).sum::<u64>() <= bytes.saturating_mul(IDLE_L0_COST_MAX)
    })
}

/// The index of the first table after the compact pointer of the level; 0 if there is none.
fn next_after_compact_pointer<T: HasTableMeta>(picker: &CompactionPicker<'_, T>, level: u8) -> usize {
    let (Some(run), Some(position)) = (picker.version.run(level), &picker.compact_pointers[usize::from(level)]) else {
        return 0;
    };
    let behind = |table: &T| picker.order.cmp(&table.meta().smallest_key.0, position).is_gt();
    run.tables().iter().position(|table| behind(table)).unwrap_or(0)
}

/// Bytes that compactions have to move until every level is within its target.
pub(crate) fn compaction_debt<T: HasTableMeta>(version: &Version<T>, options: &LeveledOptions) -> u64 {
    let targets = level_targets(version, options);
    let l0 = version.level(0);
    let late = l0.runs.len() >= options.l0_compaction_trigger as usize;
    let deeper = version.levels().skip(1).filter(|(number, _)| *number < BOTTOM_LEVEL);
    let excess =
        deeper.map(|(number, level)| level.bytes.saturating_sub(targets.bytes[usize::from(number)])).sum::<u64>();
    excess + if late { l0.bytes } else { 0 }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::base::version_edit::{FileNumber, TableMeta};
    use crate::base::{KeyOrder, SeqNo};
    use crate::lsm::compaction::picker::CompactPointers;
    use crate::lsm::compaction::strategy::pick_compaction;
    use crate::lsm::options::LsmOptions;
    use crate::lsm::version::VersionChange;
    use crate::lsm::version::tests::table;

    /// Reason, start level, output level, inputs of both levels, trivial move.
    type LeveledPick = (CompactionReason, u8, u8, Vec<u64>, Vec<u64>, bool);

    /// The runs of level 0, oldest first, and the tables of deeper levels.
    struct LeveledFixture {
        version: Version<TableMeta>,
        options: LsmOptions,
        compact_pointers: CompactPointers,
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
            LeveledFixture { version, options, compact_pointers: CompactPointers::default(), idle: false }
        }

        fn picker<'a>(&'a self, order: &'a KeyOrder) -> CompactionPicker<'a, TableMeta> {
            let (version, options, positions) = (&self.version, &self.options, &self.compact_pointers);
            CompactionPicker {
                version,
                order,
                options,
                compact_pointers: positions,
                oldest_snapshot: SeqNo::MAX,
                idle: self.idle,
            }
        }

        fn pick(&self, forced: bool) -> Option<LeveledPick> {
            let plan = pick_compaction(&self.picker(&KeyOrder::bytewise()), forced)?;
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
        assert_eq!(compaction_debt(&shape.version, &shape.options.compaction), 50 + 200);
    }
}
