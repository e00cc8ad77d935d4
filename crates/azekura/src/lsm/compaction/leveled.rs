//! Leveled compaction: how large each level may be, and which one is most over it.
//!
//! The bottom is what it is; every level above it is allowed `level_ratio` times less, up to the *base*, the level that
//! level 0 is merged into. A small tree has its base at the bottom, so that it is never rewritten more often than
//! needed and holds few versions twice; as it grows, the base moves up. Data above the base, left from before, is
//! drained.

use crate::lsm::compaction::plan::{Plan, Reason};
use crate::lsm::compaction::view::View;
use crate::lsm::options::LeveledOptions;
use crate::lsm::version::{BOTTOM, Described, LEVELS, Version};

/// At rest, level 0 is merged if that rewrites at most this many times its bytes: less than it would cost later, when
/// it is full and goes down level by level.
const REST_COST: u64 = 4;

/// How many bytes each level may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Targets {
    pub(crate) base: u8,
    /// 0 above the base.
    pub(crate) bytes: [u64; LEVELS],
}

pub(crate) fn targets<T: Described>(version: &Version<T>, options: &LeveledOptions) -> Targets {
    let largest = version.levels().skip(1).map(|(_, level)| level.bytes).max().unwrap_or(0);
    let base_size = options.base_size.max(1);
    let mut targets = Targets { base: BOTTOM, bytes: [0; LEVELS] };
    let mut bytes = largest.max(base_size);
    targets.bytes[usize::from(BOTTOM)] = bytes;
    while bytes > base_size && targets.base > 1 {
        bytes = (bytes / u64::from(options.level_ratio.max(2))).max(1);
        targets.base -= 1;
        targets.bytes[usize::from(targets.base)] = bytes;
    }
    targets
}

/// At 1 and above a level wants to be compacted.
fn score<T: Described>(view: &View<'_, T>, targets: &Targets, level: u8) -> f64 {
    let bytes = view.level(level).bytes as f64;
    match level {
        0 => view.level(0).runs.len() as f64 / f64::from(view.options.compaction.l0_trigger.max(1)),
        BOTTOM => 0.0,
        _ if bytes == 0.0 => 0.0,
        _ if level < targets.base => 1.0 + bytes / view.options.compaction.base_size.max(1) as f64,
        // Strictly more than the target, which is a full level's right.
        _ => (bytes - 1.0) / targets.bytes[usize::from(level)] as f64,
    }
}

/// The compaction of the level that is most over its target, the shallower one if two are equally so.
pub(crate) fn choose<T: Described>(view: &View<'_, T>) -> Option<Plan> {
    let targets = targets(view.version, &view.options.compaction);
    let mut best: Option<(u8, f64)> = None;
    for level in 0..BOTTOM {
        let score = score(view, &targets, level);
        if score >= 1.0 && best.is_none_or(|(_, other)| score > other) {
            best = Some((level, score));
        }
    }
    let (level, _) = best?;
    if level == 0 {
        return Some(view.young(Reason::YoungRuns, view.below_young(targets.base), true));
    }
    let first = next_in_turn(view, level);
    let excess = view.level(level).bytes - targets.bytes[usize::from(level)];
    Some(view.push_down(Reason::Size, level, level + 1, first, excess, true))
}

/// Level 0, as deep as it can go for at most [`REST_COST`] times its own bytes, when the tree is at rest: a lookup asks
/// every run of level 0, and nobody waits for the disk.
pub(crate) fn at_rest<T: Described>(view: &View<'_, T>) -> Option<Plan> {
    if !view.at_rest || view.level(0).is_empty() {
        return None;
    }
    let base = targets(view.version, &view.options.compaction).base;
    let shallowest = view.below_young(base);
    let deepest = (shallowest..BOTTOM).find(|&level| !view.level(level).is_empty()).unwrap_or(BOTTOM);
    let bytes = view.level(0).bytes;
    (shallowest..=deepest).rev().map(|to| view.young(Reason::Rest, to, true)).find(|plan| {
        let lower = view.level(plan.to).iter().map(|table| table.meta()).filter(|meta| plan.lower.contains(&meta.id));
        plan.moves || lower.map(|meta| meta.size).sum::<u64>() <= bytes.saturating_mul(REST_COST)
    })
}

/// The table behind the one where the last compaction of the level ended.
fn next_in_turn<T: Described>(view: &View<'_, T>, level: u8) -> usize {
    let (Some(run), Some(position)) = (view.version.run(level), &view.positions[usize::from(level)]) else { return 0 };
    let behind = |table: &T| view.order.cmp(&table.meta().smallest.0, position).is_gt();
    run.tables().iter().position(|table| behind(table)).unwrap_or(0)
}

/// Bytes that have to move before every level is within its target.
pub(crate) fn debt<T: Described>(version: &Version<T>, options: &LeveledOptions) -> u64 {
    let targets = targets(version, options);
    let young = version.level(0);
    let late = young.runs.len() >= options.l0_trigger as usize;
    let deeper = version.levels().skip(1).filter(|(number, _)| *number < BOTTOM);
    let excess =
        deeper.map(|(number, level)| level.bytes.saturating_sub(targets.bytes[usize::from(number)])).sum::<u64>();
    excess + if late { young.bytes } else { 0 }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::base::edit::{FileId, TableMeta};
    use crate::base::{KeyOrder, SeqNo};
    use crate::lsm::compaction::strategy::choose;
    use crate::lsm::compaction::view::Positions;
    use crate::lsm::options::LsmOptions;
    use crate::lsm::version::Change;
    use crate::lsm::version::tests::table;

    /// Why, from, to, upper, lower, whether it is a move.
    type Chosen = (Reason, u8, u8, Vec<u64>, Vec<u64>, bool);

    /// Level 0 runs oldest first, then (level, table).
    struct Shape {
        version: Version<TableMeta>,
        options: LsmOptions,
        positions: Positions,
        at_rest: bool,
    }

    impl Shape {
        fn new(young: Vec<Vec<Arc<TableMeta>>>, deep: Vec<(u8, Arc<TableMeta>)>) -> Shape {
            let order = KeyOrder::bytewise();
            let mut version = Version::empty();
            for flushed in young {
                version = version.with(Change { flushed, ..Change::default() }, &order);
            }
            version = version.with(Change { added: deep, ..Change::default() }, &order);
            let mut options = LsmOptions::default();
            options.compaction.table_size = 100;
            options.compaction.base_size = 400;
            options.compaction.l0_trigger = 2;
            Shape { version, options, positions: Positions::default(), at_rest: false }
        }

        fn view<'a>(&'a self, order: &'a KeyOrder) -> View<'a, TableMeta> {
            let (version, options, positions) = (&self.version, &self.options, &self.positions);
            View { version, order, options, positions, oldest_point: SeqNo::MAX, at_rest: self.at_rest }
        }

        fn choose(&self, forced: bool) -> Option<Chosen> {
            let plan = choose(&self.view(&KeyOrder::bytewise()), forced)?;
            let ids = |ids: Vec<FileId>| ids.into_iter().map(|id| id.0).collect::<Vec<_>>();
            Some((plan.reason, plan.from, plan.to, ids(plan.upper), ids(plan.lower), plan.moves))
        }
    }

    fn sized(id: u64, smallest: &str, largest: &str, size: u64) -> Arc<TableMeta> {
        Arc::new(TableMeta { size, ..(*table(id, smallest, largest)).clone() })
    }

    fn buried(id: u64, smallest: &str, largest: &str, tombstones: u64) -> Arc<TableMeta> {
        Arc::new(TableMeta { tombstones, ..(*table(id, smallest, largest)).clone() })
    }

    #[test]
    fn the_base_rises_with_the_data() {
        let at = |bytes| {
            let shape = Shape::new(vec![], vec![(6, sized(1, "a", "b", bytes))]);
            let targets = targets(&shape.version, &shape.options.compaction);
            (targets.base, targets.bytes)
        };
        assert_eq!(at(100), (6, [0, 0, 0, 0, 0, 0, 400]));
        assert_eq!(at(400), (6, [0, 0, 0, 0, 0, 0, 400]));
        assert_eq!(at(1000), (5, [0, 0, 0, 0, 0, 100, 1000]));
        assert_eq!(at(50_000), (3, [0, 0, 0, 50, 500, 5000, 50_000]));
        assert_eq!(at(u64::MAX).0, 1);
    }

    #[test]
    fn level_0_waits_for_its_trigger_and_takes_what_it_overlaps() {
        let deep = vec![(6, table(1, "a", "c")), (6, table(2, "e", "g")), (6, table(3, "x", "z"))];
        assert_eq!(Shape::new(vec![vec![table(4, "b", "f")]], deep.clone()).choose(false), None);
        let shape = Shape::new(vec![vec![table(4, "b", "f")], vec![table(5, "a", "b")]], deep);
        assert_eq!(shape.choose(false), Some((Reason::YoungRuns, 0, 6, vec![5, 4], vec![1, 2], false)));
    }

    #[test]
    fn level_0_never_jumps_over_data() {
        let deep = vec![(4, sized(1, "p", "q", 1)), (6, table(2, "a", "z"))];
        let young = vec![vec![table(4, "b", "f")], vec![table(5, "a", "b")], vec![table(6, "b", "r")]];
        let shape = Shape::new(young.clone(), deep.clone());
        assert_eq!(shape.choose(false), Some((Reason::YoungRuns, 0, 4, vec![4], vec![], true)));
        let shape = Shape::new(young[1..].to_vec(), deep);
        assert_eq!(shape.choose(false), Some((Reason::Size, 4, 5, vec![1], vec![], true)), "drained first");
    }

    #[test]
    fn disjoint_young_tables_move_together() {
        let young =
            vec![vec![table(4, "d", "f")], vec![table(5, "g", "h"), table(6, "i", "k")], vec![table(7, "e", "g")]];
        let shape = Shape::new(young, vec![(6, table(1, "a", "c"))]);
        assert_eq!(shape.choose(false), Some((Reason::YoungRuns, 0, 6, vec![4, 5, 6], vec![], true)));
        let mut other = shape;
        other.options.compression_per_level =
            vec![crate::base::compression::CompressionType::None, crate::base::compression::CompressionType::Lz4];
        let plan = other.choose(false).unwrap();
        assert_eq!((plan.3, plan.5), (vec![7, 5, 6, 4], false), "another codec: the tables must be rewritten");
    }

    #[test]
    fn a_young_table_never_moves_past_an_older_one() {
        let young = vec![vec![table(4, "b", "e")], vec![table(5, "d", "f"), table(6, "x", "z")]];
        let shape = Shape::new(young, vec![(6, table(1, "a", "c"))]);
        assert_eq!(
            shape.choose(false),
            Some((Reason::YoungRuns, 0, 6, vec![6], vec![], true)),
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
        let mut shape = Shape::new(vec![], deep);
        assert_eq!(shape.choose(false), Some((Reason::Size, 5, 6, vec![1], vec![10], false)));
        shape.positions[5] = Some(b"c".to_vec());
        let (_, _, _, upper, lower, moves) = shape.choose(false).unwrap();
        assert_eq!((upper, lower, moves), (vec![2, 3], vec![11], false), "3 brings nothing new of level 6");
        shape.positions[5] = Some(b"g".to_vec());
        assert_eq!(shape.choose(false), Some((Reason::Size, 5, 6, vec![3], vec![], true)));
        shape.positions[5] = Some(b"k".to_vec());
        assert_eq!(shape.choose(false).unwrap().3, [1], "round again");
    }

    #[test]
    fn a_merge_stays_bounded() {
        let mut deep: Vec<_> =
            (0..60u64).map(|i| (5, table(100 + i, &format!("b{i:02}"), &format!("b{i:02}")))).collect();
        deep.push((6, sized(1, "a", "c", 9000)));
        let shape = Shape::new(vec![], deep);
        let (_, _, _, upper, lower, moves) = shape.choose(false).unwrap();
        assert!(!moves && lower == [1] && upper.len() == 1, "the lower table alone is over the limit");
        let deep: Vec<_> = (0..60u64).map(|i| (5, table(100 + i, &format!("b{i:02}"), &format!("b{i:02}")))).collect();
        let shape = Shape::new(vec![], [deep, vec![(6, sized(1, "a", "c", 200))]].concat());
        let (_, _, _, upper, ..) = shape.choose(false).unwrap();
        assert_eq!(upper.len(), 23);
    }

    #[test]
    fn data_above_the_base_is_drained() {
        let shape = Shape::new(vec![], vec![(3, table(1, "a", "b")), (3, table(2, "c", "d"))]);
        assert_eq!(shape.choose(false), Some((Reason::Size, 3, 4, vec![1, 2], vec![], true)));
    }

    #[test]
    fn tombstones_are_compacted_when_idle() {
        let young = Shape::new(vec![vec![buried(4, "b", "f", 6)]], vec![(6, table(1, "a", "c"))]);
        assert_eq!(young.choose(false), Some((Reason::Tombstones, 0, 6, vec![4], vec![1], false)));
        let half = Shape::new(vec![vec![buried(4, "b", "f", 5)]], vec![(6, table(1, "a", "c"))]);
        assert_eq!(half.choose(false), None);
        let bottom = Shape::new(vec![], vec![(6, buried(1, "a", "c", 9)), (6, table(2, "d", "e"))]);
        assert_eq!(bottom.choose(false), Some((Reason::Tombstones, 6, 6, vec![1], vec![], false)));
        let deep = vec![(5, buried(1, "a", "c", 9)), (6, sized(2, "b", "b", 5000))];
        assert_eq!(Shape::new(vec![], deep).choose(false), Some((Reason::Tombstones, 5, 6, vec![1], vec![2], false)));
    }

    #[test]
    fn forced_ends_with_one_clean_run() {
        let young = Shape::new(vec![vec![table(4, "b", "f")]], vec![(6, table(1, "h", "i"))]);
        assert_eq!(young.choose(true), Some((Reason::Forced, 0, 6, vec![4], vec![], true)));
        let buried_young = Shape::new(vec![vec![buried(4, "b", "f", 1)]], vec![(6, table(1, "h", "i"))]);
        assert_eq!(buried_young.choose(true), Some((Reason::Forced, 0, 6, vec![4], vec![], false)));
        let middle = Shape::new(vec![], vec![(5, sized(4, "b", "f", 9)), (6, sized(1, "a", "i", 500))]);
        assert_eq!(middle.choose(false), None);
        assert_eq!(middle.choose(true), Some((Reason::Forced, 5, 6, vec![4], vec![1], false)));
        let bottom =
            Shape::new(vec![], vec![(6, buried(1, "a", "c", 1)), (6, buried(2, "d", "e", 1)), (6, table(3, "x", "y"))]);
        assert_eq!(bottom.choose(true), Some((Reason::Forced, 6, 6, vec![1, 2], vec![], false)));
        assert_eq!(Shape::new(vec![], vec![(6, table(1, "a", "c"))]).choose(true), None);
        assert_eq!(Shape::new(vec![], vec![]).choose(true), None);
    }

    #[test]
    fn at_rest_level_0_goes_as_deep_as_is_cheap() {
        let at_rest = |young, deep| Shape { at_rest: true, ..Shape::new(young, deep) }.choose(false);
        let young = || vec![vec![table(4, "b", "f")]];
        let below = |size| vec![(6, sized(1, "a", "c", size)), (6, sized(2, "x", "z", 9000))];
        assert_eq!(Shape::new(young(), below(400)).choose(false), None, "somebody writes");
        assert_eq!(at_rest(young(), below(400)), Some((Reason::Rest, 0, 6, vec![4], vec![1], false)), "past the base");
        assert_eq!(at_rest(young(), below(401)), Some((Reason::Rest, 0, 5, vec![4], vec![], true)), "too much there");
        let middle = vec![(5, sized(3, "a", "b", 90)), (6, sized(1, "a", "c", 900))];
        assert_eq!(at_rest(young(), middle), Some((Reason::Rest, 0, 5, vec![4], vec![3], false)), "never past data");
        let middle = vec![(5, sized(3, "a", "b", 300)), (6, sized(1, "a", "c", 3900))];
        assert_eq!(at_rest(vec![vec![sized(4, "b", "f", 74)]], middle), None, "little for so much");
        assert_eq!(at_rest(vec![], below(400)), None);
    }

    #[test]
    fn debt_counts_what_is_over() {
        let deep = vec![(5, sized(1, "a", "c", 150)), (6, sized(2, "a", "b", 1000))];
        let shape = Shape::new(vec![vec![table(4, "b", "f")], vec![table(5, "a", "b")]], deep);
        assert_eq!(debt(&shape.version, &shape.options.compaction), 50 + 200);
    }
}
