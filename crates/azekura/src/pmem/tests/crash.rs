//! Checks every state that a power failure can leave, for every kind of change.
//!
//! Each change is made on the simulator. At each of its fences, and after it has returned, every image that a power
//! failure could leave is opened. The image must contain the records before or after the change, and only those after
//! it once the change has returned. The repairs at open may be interrupted by a power failure too. Then the pool must
//! remain usable.

use std::collections::{HashMap, HashSet};

use super::fixture::{FILE_ID, POOL, PoolFixture, PoolOp, PoolTreeModel};
use super::model::options;
use crate::base::checksum::xxh3;
use crate::base::{ErrorKind, KeyOrder, SeqNo};
use crate::engine::LastVisibleSeqno;
use crate::engine::SnapshotList;
use crate::mem::atomic::Ordering;
use crate::mem::epoch::tests::wait_until;
use crate::mem::pages::PAGE;
use crate::pmem::leaf::SLOTS;
use crate::pmem::persistence::{PersistGranularity, PersistSite, PersistenceBackend};
use crate::pmem::pool::pool_recovery::create;
use crate::pmem::pool_header::{PoolSeqnoField, has_clean_shutdown_mark, read_seqno_field};
use crate::pmem::sim::{CrashPoint, Sim, SimFault};
use crate::pmem::tree::{PoolOptions, PoolTree};
use crate::testing::seeded_rng::SeededRng;

/// Up to this number, all images of a crash point are checked.
const BOUND: usize = 256;
const LEN_MAX: u64 = 10 * PAGE;

/// Counts of the checked states.
#[derive(Debug, Default)]
struct CrashTestCounts {
    points: usize,
    states: usize,
    /// Number of those states that a failure while an image was opened left.
    states_in_recovery: usize,
    sites: HashSet<PersistSite>,
    repairs: u64,
    splits: u64,
    merges: u64,
    /// Number of leaves that packing freed.
    merged_leaves: u64,
    /// Number of shifts of records between leaves by packing. Power fails at each of their crash points.
    shifted: u64,
    growths: u64,
}

impl CrashTestCounts {
    fn add(&mut self, other: CrashTestCounts) {
        self.points += other.points;
        self.states += other.states;
        self.states_in_recovery += other.states_in_recovery;
        self.sites.extend(other.sites);
        self.repairs += other.repairs;
        self.splits += other.splits;
        self.merges += other.merges;
        self.merged_leaves += other.merged_leaves;
        self.shifted += other.shifted;
        self.growths += other.growths;
    }
}

/// Checks images, and opens them with the same planted fault.
struct CrashChecker {
    options: PoolOptions,
    granularity: PersistGranularity,
    fault: Option<SimFault>,
    rng: SeededRng,
    counts: CrashTestCounts,
    /// By hash, the images that were checked, with their records and whether they have the mark of a clean shutdown.
    /// Most changes begin in a state in which the one before ended.
    checked_images: HashMap<u64, (PoolTreeModel, bool)>,
    /// Whether images must have the mark of a clean shutdown; `None` if they may have it or not.
    expect_clean_mark: Option<bool>,
}

type CrashCheckResult = Result<(), String>;

impl CrashChecker {
    fn new(options: &PoolOptions, granularity: PersistGranularity, fault: Option<SimFault>, seed: u64) -> CrashChecker {
        CrashChecker {
            options: options.clone(),
            granularity,
            fault,
            rng: SeededRng::with_stream(seed, 1),
            counts: CrashTestCounts::default(),
            checked_images: HashMap::new(),
            expect_clean_mark: Some(false),
        }
    }

    /// Checks that every image of `point` contains one of the `allowed` models.
    fn check_point(&mut self, point: &CrashPoint, allowed: &[&PoolTreeModel]) -> CrashCheckResult {
        let mut verdict = Ok(());
        let mut images = Vec::new();
        let mut rng = self.rng.clone();
        self.counts.states += point.images(BOUND, &mut rng, |image| images.push(image.to_vec()));
        self.counts.points += 1;
        self.rng.next_u64();
        for image in images {
            verdict = verdict.and_then(|()| self.check_image(&image, allowed, true));
        }
        verdict
    }

    fn check_image(&mut self, image: &[u8], allowed: &[&PoolTreeModel], outer: bool) -> CrashCheckResult {
        let hash = xxh3(2, image);
        let wanted = self.expect_clean_mark;
        let is_wrong = |closed| outer && wanted.is_some_and(|wanted| closed != wanted);
        if let (true, Some((model, closed))) = (outer, self.checked_images.get(&hash)) {
            return if is_wrong(*closed) {
                Err("the mark of a clean shutdown is wrong".into())
            } else if allowed.contains(&model) {
                Ok(())
            } else {
                Err("the records are those of another point in time".into())
            };
        }
        let sim = Sim::new(image, LEN_MAX, self.granularity, self.fault);
        let closed = has_clean_shutdown_mark(sim.region(), &FILE_ID);
        if is_wrong(closed) {
            return Err(format!("the mark of a clean shutdown: {closed}"));
        }
        sim.start_recording();
        let (mut fixture, report) =
            PoolFixture::open(sim, &self.options).map_err(|error| format!("the open failed: {error}"))?;
        self.counts.repairs += report.repairs;
        self.counts.sites.extend(fixture.tree.backend.sites_seen());
        let mut model = fixture.contents();
        if !allowed.contains(&&model) {
            let allowed: Vec<usize> = allowed.iter().map(|model| model.len()).collect();
            return Err(format!("{} records where {allowed:?} belong, or others", model.len()));
        }
        let points = fixture.tree.backend.take_crash_points();
        if outer && report.repairs > 0 {
            for point in points {
                let mut images = Vec::new();
                let mut rng = self.rng.clone();
                self.counts.states_in_recovery += point.images(BOUND, &mut rng, |image| images.push(image.to_vec()));
                for image in images {
                    self.check_image(&image, allowed, false)?;
                }
            }
        }
        if outer {
            self.checked_images.insert(hash, (model.clone(), closed));
            // With a planted fault, only the operations after a repair can reveal it.
            if report.repairs > 0 {
                self.check_first_change(&mut fixture, &mut model)?;
            }
            if self.fault.is_none() || report.repairs > 0 {
                self.check_continues(&mut fixture, &mut model)?;
            }
        }
        Ok(())
    }

    /// Power fails in the first change after a repair. The change needs a single fence.
    fn check_first_change(&mut self, fixture: &mut PoolFixture<Sim>, model: &mut PoolTreeModel) -> CrashCheckResult {
        let Some(key) = model.keys().nth(self.rng.below(model.len())).cloned() else { return Ok(()) };
        let (op, before) = (PoolOp::Remove(key), model.clone());
        op.apply_to(model);
        fixture.tree.backend.start_recording();
        fixture.apply(&op).map_err(|error| format!("the removal failed: {error}"))?;
        let mut verdict = Ok(());
        for point in fixture.tree.backend.take_crash_points() {
            point.images(BOUND, &mut self.rng.clone(), |image| {
                let sim = Sim::new(image, LEN_MAX, self.granularity, None);
                match PoolFixture::open(sim, &self.options).map(|(fixture, _)| fixture.contents()) {
                    Ok(contents) if contents == before || contents == *model => {}
                    Ok(_) => verdict = Err("the records are wrong after the first change that follows a repair".into()),
                    Err(error) => verdict = Err(format!("the second open failed after a repair: {error}")),
                }
            });
        }
        verdict
    }

    /// Closes the pool and opens it again. It has the mark after the close, and loses the mark before it may change.
    fn check_clean_mark(
        &mut self,
        fixture: &PoolFixture<Sim>,
        model: &PoolTreeModel,
        opened: &impl Fn(&PoolTree<Sim>),
    ) -> CrashCheckResult {
        for closed in [true, false] {
            fixture.tree.backend.start_recording();
            match closed {
                true => fixture.tree.set_clean_shutdown_mark(),
                false => opened(&fixture.tree),
            }
            let mut points = fixture.tree.backend.take_crash_points();
            let last = points.pop().expect("the last crash point is the present");
            self.expect_clean_mark = None;
            points.iter().try_for_each(|point| self.check_point(point, &[model]))?;
            self.expect_clean_mark = Some(closed);
            self.check_point(&last, &[model])?;
        }
        Ok(())
    }

    /// Checks that every image of `point` contains the sequence number that was written last to the header.
    fn check_seqno_field(&mut self, point: &CrashPoint, wanted: SeqNo) -> CrashCheckResult {
        let mut verdict = Ok(());
        self.counts.states += point.images(BOUND, &mut self.rng.clone(), |image| {
            let sim = Sim::new(image, LEN_MAX, self.granularity, None);
            match PoolFixture::open(sim, &self.options) {
                Ok((fixture, _))
                    if read_seqno_field(
                        fixture.tree.region(),
                        &fixture.tree.file_id,
                        PoolSeqnoField::AppliedThrough,
                    )
                    .is_ok_and(|noted| noted == wanted) => {}
                Ok(_) => verdict = Err("the recorded sequence number is missing".into()),
                Err(error) => verdict = Err(format!("the open failed after a sequence number was recorded: {error}")),
            }
        });
        verdict
    }

    /// Makes twenty more changes, and opens the pool once again.
    fn check_continues(&mut self, fixture: &mut PoolFixture<Sim>, model: &mut PoolTreeModel) -> CrashCheckResult {
        for _ in 0..20 {
            let op = random_op(&mut self.rng, model);
            match fixture.apply(&op) {
                Ok(()) => op.apply_to(model),
                Err(error) if error.kind() == ErrorKind::OutOfSpace => {}
                Err(error) => return Err(format!("the pool accepted no changes: {error}")),
            }
        }
        if fixture.contents() != *model {
            return Err("wrong records after twenty changes".into());
        }
        let mut verdict = Ok(());
        let point = fixture.tree.backend.take_crash_points().pop().expect("the last crash point is the present");
        point.images(BOUND, &mut self.rng.clone(), |image| {
            let sim = Sim::new(image, LEN_MAX, self.granularity, None);
            match PoolFixture::open(sim, &self.options) {
                Ok((again, _)) if again.contents() == *model => {}
                Ok(_) => verdict = Err("wrong records after twenty changes and a power failure".into()),
                Err(error) => {
                    verdict = Err(format!("the open failed after twenty changes and a power failure: {error}"))
                }
            }
        });
        verdict
    }
}

/// Random changes of few keys, some of which exist: puts, replacements and removals that affect each other.
fn random_op(rng: &mut SeededRng, model: &PoolTreeModel) -> PoolOp {
    let key = vec![b'a' + rng.below(26) as u8; 1 + rng.below(2)];
    if rng.below(5) < 3 {
        return PoolOp::Put(key, vec![rng.next_u64() as u8; [3, 9, 30][rng.below(3)]]);
    }
    let some = model.range(key.clone()..).next().map(|(key, _)| key.clone());
    PoolOp::Remove(some.unwrap_or(key))
}

/// Makes random changes that grow and shrink the pool repeatedly, and checks every state of each change.
fn explore(
    granularity: PersistGranularity,
    fault: Option<SimFault>,
    seed: u64,
    ops: usize,
) -> Result<CrashTestCounts, String> {
    explore_with(granularity, fault, seed, ops, PoolTree::clear_clean_shutdown_mark)
}

/// As above. `opened` is called after the pool was closed and opened again.
fn explore_with(
    granularity: PersistGranularity,
    fault: Option<SimFault>,
    seed: u64,
    ops: usize,
    opened: impl Fn(&PoolTree<Sim>),
) -> Result<CrashTestCounts, String> {
    let options = PoolOptions { grow_by: PAGE, ..options(LEN_MAX, 6) };
    let mut rng = SeededRng::new(seed);
    let mut judge = CrashChecker::new(&options, granularity, fault, seed);
    let sim = Sim::new(&[], LEN_MAX, granularity, fault);
    sim.start_recording();
    let mut fixture = PoolFixture::create(sim, &options);
    let mut model = PoolTreeModel::new();
    let created = fixture.tree.backend.take_crash_points().pop().expect("the last crash point is the present");
    judge.check_point(&created, &[&model])?;
    for round in 0..ops {
        let op = match random_op(&mut rng, &model) {
            PoolOp::Put(key, _) if round % 60 > 35 && model.len() > 2 => PoolOp::Remove(key),
            PoolOp::Remove(_) if round % 60 < 20 => PoolOp::Put(vec![b'a' + (round % 26) as u8; 2], vec![1; 40]),
            op => op,
        };
        let before = model.clone();
        op.apply_to(&mut model);
        // Retired space is reused at once. Other tests of this process may be pinned, so this waits for them.
        wait_until(|| fixture.tree.lock_allocator().unwrap().reclaim_retired(true));
        let leaves = fixture.tree.usage().unwrap();
        fixture.tree.backend.start_recording();
        if let Err(error) = fixture.apply(&op) {
            assert_eq!(error.kind(), ErrorKind::OutOfSpace);
            model = before.clone();
        }
        let mut points = fixture.tree.backend.take_crash_points();
        let now = fixture.tree.usage().unwrap();
        judge.counts.splits += u64::from(now.1 > leaves.1);
        judge.counts.merges += u64::from(now.1 < leaves.1);
        judge.counts.growths += u64::from(now.0.len > leaves.0.len);
        let last = points.pop().expect("the last crash point is the present");
        for point in &points {
            judge.check_point(point, &[&before, &model])?;
        }
        judge.check_point(&last, &[&model])?;
        // If packing runs, removals merge only a few leaves.
        if seed % 4 == 3 && round % 6 == 5 {
            fixture.tree.backend.start_recording();
            judge.counts.merged_leaves += fixture.tree.merge_sparse_leaves().map_err(|error| error.to_string())? as u64;
            for point in &fixture.tree.backend.take_crash_points() {
                judge.check_point(point, &[&model])?;
            }
            judge.counts.shifted += fixture.tree.shifts.swap(0, Ordering::Relaxed);
        }
        if round % 10 == 9 {
            let now = SeqNo(round as u64);
            fixture.tree.backend.start_recording();
            fixture.tree.write_seqno_field(PoolSeqnoField::AppliedThrough, now);
            let noted = fixture.tree.backend.take_crash_points().pop().expect("the last crash point is the present");
            judge.check_seqno_field(&noted, now)?;
            judge.check_clean_mark(&fixture, &model, &opened)?;
        }
    }
    judge.counts.sites.extend(fixture.tree.backend.sites_seen());
    if fixture.contents() != model {
        return Err("wrong records without any failure".into());
    }
    Ok(judge.counts)
}

#[test]
fn change_is_atomic_when_power_fails() {
    for granularity in [PersistGranularity::Line, PersistGranularity::Word] {
        let mut seen = CrashTestCounts::default();
        for seed in 0..4 {
            seen.add(explore(granularity, None, seed, 120).unwrap());
        }
        let CrashTestCounts {
            points,
            states,
            states_in_recovery: again,
            repairs,
            splits,
            merges: joins,
            merged_leaves: packed,
            shifted,
            growths: grown,
            ..
        } = seen;
        assert!(packed > 3 && shifted > 0, "{packed} leaves were freed by packing, after {shifted} shifts");
        println!(
            "{granularity:?}: {states} states at {points} points, {again} more while opening; {repairs} repairs, \
             {splits} splits, {joins} leaves joined or emptied, grown {grown} times"
        );
        assert!(states > 5_000 && again > 20 && repairs > 50 && splits > 20 && joins > 15 && grown > 2);
    }
}

/// If any flush or fence is skipped, or two stores are made in the opposite order, a check fails.
#[test]
fn every_skipped_flush_or_fence_is_detected() {
    let mut sites = Vec::new();
    for granularity in [PersistGranularity::Line, PersistGranularity::Word] {
        sites.extend(explore(granularity, None, 1, 150).unwrap().sites);
    }
    sites.sort();
    sites.dedup();
    assert_eq!(sites.len(), PersistSite::ClearCleanMarkDone as usize + 1, "all sites were met: {sites:?}");
    let faults = sites.iter().flat_map(|site| {
        [SimFault::NoFlush(*site), SimFault::NoFence(*site), SimFault::Swapped(*site)]
            .into_iter()
            .filter(|sites| fault_has_effect(*sites))
    });
    let mut unnoticed = Vec::new();
    let mut tried = 0;
    for fault in faults {
        let noticed = [PersistGranularity::Line, PersistGranularity::Word]
            .into_iter()
            .any(|granularity| (0..12).any(|seed| explore(granularity, Some(fault), seed, 100).is_err()));
        tried += 1;
        if !noticed {
            unnoticed.push(fault);
        }
    }
    println!("{tried} faults fault, {} not noticed", unnoticed.len());
    assert_eq!(unnoticed, [], "these sites are not needed, or not tested");
}

/// A process that continues with a closed pool and does not clear the mark of the clean close is detected.
#[test]
fn changed_pool_has_no_clean_shutdown_mark() {
    for granularity in [PersistGranularity::Line, PersistGranularity::Word] {
        let found = explore_with(granularity, None, 1, 40, |_| ());
        assert!(found.is_err_and(|error| error.contains("clean shutdown")), "{granularity:?}");
    }
}

/// Whether a site flushes, fences, or orders two stores.
fn fault_has_effect(planted: SimFault) -> bool {
    use PersistSite::*;
    match planted {
        SimFault::NoFence(site) => matches!(
            site,
            FormatDone
                | PutReady
                | PutDone
                | RemoveDone
                | SplitReady
                | SplitLink
                | SplitDone
                | MergeReady
                | MergeLink
                | MergeDone
                | UnlinkDone
                | RepairDone
                | SeqnoFieldDone
                | SetCleanMarkDone
                | ClearCleanMarkDone
        ),
        SimFault::NoFlush(site) => !fault_has_effect(SimFault::NoFence(site)) || matches!(site, SplitLink | MergeLink),
        SimFault::Swapped(site) => matches!(site, SplitLink | MergeLink),
    }
}

/// Each kind of change issues exactly its number of fences.
#[test]
fn fences_are_within_their_budget() {
    for (granularity, extra) in [(PersistGranularity::Line, 2), (PersistGranularity::Word, 3)] {
        let options = options(1 << 20, SLOTS);
        let mut world = PoolFixture::create(Sim::new(&[], 1 << 20, granularity, None), &options);
        let fences = |world: &mut PoolFixture<Sim>, op: PoolOp| {
            let before = world.tree.backend.counts();
            world.apply(&op).unwrap();
            let after = world.tree.backend.counts();
            (after.0 - before.0, after.1 - before.1)
        };
        let put = |n: u32| PoolOp::Put((n * 7919 % 1000).to_be_bytes().to_vec(), vec![1; 50]);
        // The last key is put first, so that no leaf is split at the end.
        world.apply(&PoolOp::Put(vec![0xFF], vec![1; 50])).unwrap();
        let mut splits = 0;
        for n in 0..500 {
            let leaves = world.tree.usage().unwrap().1;
            let (count, lines) = fences(&mut world, put(n));
            let split = world.tree.usage().unwrap().1 - leaves;
            assert_eq!(count, 2 + extra * split, "put, {split} splits");
            // A put flushes the record, the slot and the header. A split flushes the filled part of the new leaf, and
            // the header of the old one.
            let words = u64::from(granularity == PersistGranularity::Word);
            assert!(lines <= 5 + words + split * (1 + 3 + 1 + words), "{lines} lines");
            splits += split;
        }
        assert!(splits > 8);
        let (counted, moved) = world.tree.split_stats.totals();
        assert_eq!(
            (counted, moved.fences),
            (splits, extra * splits),
            "the counters of a split equal those of the backend"
        );
        // A split stores half of the slots, all fingerprints, two words of a header, the link and the commit word,
        // but no key or value.
        let max_stored = SLOTS as u64 / 2 * 8 + SLOTS as u64 + 16 + 16;
        assert!(moved.stored_bytes <= splits * max_stored && moved.flushed_lines >= splits * 2, "{moved:?}");
        let ascending = (0..100).map(|n| fences(&mut world, PoolOp::Put(vec![0xFF, n], vec![1; 50])).0);
        assert_eq!(ascending.max(), Some(4), "at the end one word links the new leaf");
        assert_eq!(fences(&mut world, put(3)).0, 2, "replaced");
        let before = world.tree.usage().unwrap().1;
        assert_eq!(fences(&mut world, PoolOp::Remove((3 * 7919u32 % 1000).to_be_bytes().to_vec())).0, 1, "removed");
        assert_eq!(world.tree.usage().unwrap().1, before);
        assert_eq!(fences(&mut world, PoolOp::Remove(b"absent".to_vec())).0, 0);
    }
}

#[test]
fn half_created_pool_is_refused_or_empty() {
    for granularity in [PersistGranularity::Line, PersistGranularity::Word] {
        let options = options(LEN_MAX, 4);
        let sim = Sim::new(&[], LEN_MAX, granularity, None);
        sim.start_recording();
        let readers = || SnapshotList::new(LastVisibleSeqno::default()).readers_of(POOL);
        let tree = create(sim, FILE_ID, KeyOrder::bytewise(), &options, readers()).unwrap();
        let (mut refused, mut opened) = (0, 0);
        for point in tree.backend.take_crash_points() {
            point.images(1000, &mut SeededRng::new(1), |image| {
                match PoolFixture::open(Sim::new(image, LEN_MAX, granularity, None), &options) {
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Corruption);
                        refused += 1;
                    }
                    Ok((world, _)) => {
                        assert!(world.contents().is_empty());
                        opened += 1;
                    }
                }
            });
        }
        assert!(refused > 5 && opened >= 1, "{refused} {opened}");
    }
}
