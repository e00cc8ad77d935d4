//! Every state that a power failure can leave, of every kind of change.
//!
//! A change is made on the simulator; at each of its fences, and when it has returned, every image is opened that could
//! be left. It must hold what was there before the change or after it, and only the latter once the change has
//! returned; what opening it repairs may fail half way, too. Then the pool must go on to work.

use std::collections::{HashMap, HashSet};

use super::model::options;
use super::world::{FILE_ID, Model, Op, World};
use crate::base::checksum::xxh3;
use crate::base::{ErrorKind, KeyOrder, SeqNo};
use crate::engine::ReadPoints;
use crate::engine::Visible;
use crate::mem::atomic::Ordering;
use crate::mem::epoch::tests::eventually;
use crate::mem::region::PAGE;
use crate::pmem::leaf::SLOTS;
use crate::pmem::medium::{Granularity, Medium, Site};
use crate::pmem::notes::{Note, is_closed, noted};
use crate::pmem::recover::create;
use crate::pmem::sim::{Planted, Point, Sim};
use crate::pmem::tree::{PoolOptions, Tree};
use crate::vfs::dice::Dice;

/// Images of one point are all shown up to this number.
const BOUND: usize = 256;
const LEN_MAX: u64 = 10 * PAGE;

/// What was seen, for those who want to know how much that was.
#[derive(Debug, Default)]
struct Seen {
    points: usize,
    states: usize,
    /// Of those, left by a failure while an image was opened.
    again: usize,
    sites: HashSet<Site>,
    repairs: u64,
    splits: u64,
    joins: u64,
    /// Leaves freed by packing.
    packed: u64,
    /// Shifts of records between leaves by packing, with power failing at each of their points.
    shifted: u64,
    grown: u64,
}

impl Seen {
    fn add(&mut self, other: Seen) {
        self.points += other.points;
        self.states += other.states;
        self.again += other.again;
        self.sites.extend(other.sites);
        self.repairs += other.repairs;
        self.splits += other.splits;
        self.joins += other.joins;
        self.packed += other.packed;
        self.shifted += other.shifted;
        self.grown += other.grown;
    }
}

/// Who judges images, and opens them with the same fault planted.
struct Judge {
    options: PoolOptions,
    granularity: Granularity,
    planted: Option<Planted>,
    dice: Dice,
    seen: Seen,
    /// Images that were judged, and what they held, and whether they said that they were closed: most changes begin
    /// where the one before ended.
    known: HashMap<u64, (Model, bool)>,
    /// Whether images must say that they were closed, or must not.
    closed: Option<bool>,
}

type Verdict = Result<(), String>;

impl Judge {
    /// Every image of `point` holds one of the `allowed` models.
    fn point(&mut self, point: &Point, allowed: &[&Model]) -> Verdict {
        let mut verdict = Ok(());
        let mut images = Vec::new();
        let mut dice = self.dice.clone();
        self.seen.states += point.images(BOUND, &mut dice, |image| images.push(image.to_vec()));
        self.seen.points += 1;
        self.dice.throw();
        for image in images {
            verdict = verdict.and_then(|()| self.image(&image, allowed, true));
        }
        verdict
    }

    fn image(&mut self, image: &[u8], allowed: &[&Model], outer: bool) -> Verdict {
        let hash = xxh3(2, image);
        let wanted = self.closed;
        let is_wrong = |closed| outer && wanted.is_some_and(|wanted| closed != wanted);
        if let (true, Some((model, closed))) = (outer, self.known.get(&hash)) {
            return if is_wrong(*closed) {
                Err("it was closed and open before, or the other way round".into())
            } else if allowed.contains(&model) {
                Ok(())
            } else {
                Err("it holds what was there at another time".into())
            };
        }
        let sim = Sim::new(image, LEN_MAX, self.granularity, self.planted);
        let closed = is_closed(sim.region(), &FILE_ID);
        if is_wrong(closed) {
            return Err(format!("closed: {closed}"));
        }
        sim.record();
        let (mut world, report) =
            World::open(sim, &self.options).map_err(|error| format!("it was refused: {error}"))?;
        self.seen.repairs += report.repairs;
        self.seen.sites.extend(world.tree.medium.met());
        let mut model = world.contents();
        if !allowed.contains(&&model) {
            let allowed: Vec<usize> = allowed.iter().map(|model| model.len()).collect();
            return Err(format!("{} records where {allowed:?} belong, or others", model.len()));
        }
        let points = world.tree.medium.take_points();
        if outer && report.repairs > 0 {
            for point in points {
                let mut images = Vec::new();
                let mut dice = self.dice.clone();
                self.seen.again += point.images(BOUND, &mut dice, |image| images.push(image.to_vec()));
                for image in images {
                    self.image(&image, allowed, false)?;
                }
            }
        }
        if outer {
            self.known.insert(hash, (model.clone(), closed));
            // Where faults are planted, only what goes on from a repair can show one.
            if report.repairs > 0 {
                self.first_change_fails(&mut world, &mut model)?;
            }
            if self.planted.is_none() || report.repairs > 0 {
                self.goes_on(&mut world, &mut model)?;
            }
        }
        Ok(())
    }

    /// Power fails in the first change after a repair, one that needs a single fence.
    fn first_change_fails(&mut self, world: &mut World<Sim>, model: &mut Model) -> Verdict {
        let Some(key) = model.keys().nth(self.dice.below(model.len())).cloned() else { return Ok(()) };
        let (op, before) = (Op::Remove(key), model.clone());
        op.apply_to(model);
        world.tree.medium.record();
        world.apply(&op).map_err(|error| format!("nothing can be removed: {error}"))?;
        let mut verdict = Ok(());
        for point in world.tree.medium.take_points() {
            point.images(BOUND, &mut self.dice.clone(), |image| {
                let sim = Sim::new(image, LEN_MAX, self.granularity, None);
                match World::open(sim, &self.options).map(|(world, _)| world.contents()) {
                    Ok(contents) if contents == before || contents == *model => {}
                    Ok(_) => verdict = Err("the first change after a repair went wrong".into()),
                    Err(error) => verdict = Err(format!("refused in the first change after a repair: {error}")),
                }
            });
        }
        verdict
    }

    /// The pool is closed, and opened again: it says so when it was, and not any more before it may change.
    fn life(&mut self, world: &World<Sim>, model: &Model, opened: &impl Fn(&Tree<Sim>)) -> Verdict {
        for closed in [true, false] {
            world.tree.medium.record();
            match closed {
                true => world.tree.note_closed(),
                false => opened(&world.tree),
            }
            let mut points = world.tree.medium.take_points();
            let last = points.pop().expect("now is a point");
            self.closed = None;
            points.iter().try_for_each(|point| self.point(point, &[model]))?;
            self.closed = Some(closed);
            self.point(&last, &[model])?;
        }
        Ok(())
    }

    /// Every image of `point` has the note that was made last.
    fn noted(&mut self, point: &Point, wanted: SeqNo) -> Verdict {
        let mut verdict = Ok(());
        self.seen.states += point.images(BOUND, &mut self.dice.clone(), |image| {
            let sim = Sim::new(image, LEN_MAX, self.granularity, None);
            match World::open(sim, &self.options) {
                Ok((world, _))
                    if noted(world.tree.region(), &world.tree.file_id, Note::Applied)
                        .is_ok_and(|noted| noted == wanted) => {}
                Ok(_) => verdict = Err("a note is not there".into()),
                Err(error) => verdict = Err(format!("it was refused after a note: {error}")),
            }
        });
        verdict
    }

    /// Twenty changes more, and the pool is opened once again.
    fn goes_on(&mut self, world: &mut World<Sim>, model: &mut Model) -> Verdict {
        for _ in 0..20 {
            let op = random_op(&mut self.dice, model);
            match world.apply(&op) {
                Ok(()) => op.apply_to(model),
                Err(error) if error.kind() == ErrorKind::OutOfSpace => {}
                Err(error) => return Err(format!("it did not go on: {error}")),
            }
        }
        if world.contents() != *model {
            return Err("twenty changes later it was wrong".into());
        }
        let mut verdict = Ok(());
        let point = world.tree.medium.take_points().pop().expect("now is a point");
        point.images(BOUND, &mut self.dice.clone(), |image| {
            let sim = Sim::new(image, LEN_MAX, self.granularity, None);
            match World::open(sim, &self.options) {
                Ok((again, _)) if again.contents() == *model => {}
                Ok(_) => verdict = Err("twenty changes and a power failure later it was wrong".into()),
                Err(error) => {
                    verdict = Err(format!("twenty changes and a power failure later it was refused: {error}"))
                }
            }
        });
        verdict
    }
}

/// Few keys, of which some are there: puts, replacements and removals that meet.
fn random_op(dice: &mut Dice, model: &Model) -> Op {
    let key = vec![b'a' + dice.below(26) as u8; 1 + dice.below(2)];
    if dice.below(5) < 3 {
        return Op::Put(key, vec![dice.throw() as u8; [3, 9, 30][dice.below(3)]]);
    }
    let some = model.range(key.clone()..).next().map(|(key, _)| key.clone());
    Op::Remove(some.unwrap_or(key))
}

/// Random changes, grown to some size and shrunk again, and every state of each judged.
fn explore(granularity: Granularity, planted: Option<Planted>, seed: u64, ops: usize) -> Result<Seen, String> {
    explore_with(granularity, planted, seed, ops, Tree::note_open)
}

/// The same; `opened` is called when the pool was closed, and goes on.
fn explore_with(
    granularity: Granularity,
    planted: Option<Planted>,
    seed: u64,
    ops: usize,
    opened: impl Fn(&Tree<Sim>),
) -> Result<Seen, String> {
    let options = PoolOptions { grow_by: PAGE, ..options(LEN_MAX, 6) };
    let (mut dice, seen) = (Dice::new(seed, 0), Seen::default());
    let (known, closed) = (HashMap::new(), Some(false));
    let mut judge =
        Judge { options: options.clone(), granularity, planted, dice: Dice::new(seed, 1), seen, known, closed };
    let sim = Sim::new(&[], LEN_MAX, granularity, planted);
    sim.record();
    let mut world = World::create(sim, &options);
    let mut model = Model::new();
    let created = world.tree.medium.take_points().pop().expect("now is a point");
    judge.point(&created, &[&model])?;
    for round in 0..ops {
        let op = match random_op(&mut dice, &model) {
            Op::Put(key, _) if round % 60 > 35 && model.len() > 2 => Op::Remove(key),
            Op::Remove(_) if round % 60 < 20 => Op::Put(vec![b'a' + (round % 26) as u8; 2], vec![1; 40]),
            op => op,
        };
        let before = model.clone();
        op.apply_to(&mut model);
        // What was let go is reused at once, whatever other tests of this process are reading.
        eventually(|| world.tree.space().unwrap().settle(true));
        let leaves = world.tree.usage().unwrap();
        world.tree.medium.record();
        if let Err(error) = world.apply(&op) {
            assert_eq!(error.kind(), ErrorKind::OutOfSpace);
            model = before.clone();
        }
        let mut points = world.tree.medium.take_points();
        let now = world.tree.usage().unwrap();
        judge.seen.splits += u64::from(now.1 > leaves.1);
        judge.seen.joins += u64::from(now.1 < leaves.1);
        judge.seen.grown += u64::from(now.0.len > leaves.0.len);
        let last = points.pop().expect("now is a point");
        for point in &points {
            judge.point(point, &[&before, &model])?;
        }
        judge.point(&last, &[&model])?;
        // Where leaves are packed, few are joined by removals.
        if seed % 4 == 3 && round % 6 == 5 {
            world.tree.medium.record();
            judge.seen.packed += world.tree.pack().map_err(|error| error.to_string())? as u64;
            for point in &world.tree.medium.take_points() {
                judge.point(point, &[&model])?;
            }
            judge.seen.shifted += world.tree.shifts.swap(0, Ordering::Relaxed);
        }
        if round % 10 == 9 {
            let now = SeqNo(round as u64);
            world.tree.medium.record();
            world.tree.note(Note::Applied, now);
            let noted = world.tree.medium.take_points().pop().expect("now is a point");
            judge.noted(&noted, now)?;
            judge.life(&world, &model, &opened)?;
        }
    }
    judge.seen.sites.extend(world.tree.medium.met());
    if world.contents() != model {
        return Err("without any failure it was wrong".into());
    }
    Ok(judge.seen)
}

#[test]
fn before_or_after_whenever_power_fails() {
    for granularity in [Granularity::Line, Granularity::Word] {
        let mut seen = Seen::default();
        for seed in 0..4 {
            seen.add(explore(granularity, None, seed, 120).unwrap());
        }
        let Seen { points, states, again, repairs, splits, joins, packed, shifted, grown, .. } = seen;
        assert!(packed > 3 && shifted > 0, "{packed} leaves were freed by packing, after {shifted} shifts");
        println!(
            "{granularity:?}: {states} states at {points} points, {again} more while opening; {repairs} repairs, \
             {splits} splits, {joins} leaves joined or emptied, grown {grown} times"
        );
        assert!(states > 5_000 && again > 20 && repairs > 50 && splits > 20 && joins > 15 && grown > 2);
    }
}

/// With any flush or fence left out, or two stores in the other order, something is lost.
#[test]
fn every_flush_fence_and_order_is_needed() {
    let mut planted = Vec::new();
    for granularity in [Granularity::Line, Granularity::Word] {
        planted.extend(explore(granularity, None, 1, 150).unwrap().sites);
    }
    planted.sort();
    planted.dedup();
    assert_eq!(planted.len(), Site::OpenedDone as usize + 1, "all sites were met: {planted:?}");
    let faults = planted.iter().flat_map(|site| {
        [Planted::NoFlush(*site), Planted::NoFence(*site), Planted::Swapped(*site)]
            .into_iter()
            .filter(|planted| does_something(*planted))
    });
    let mut unnoticed = Vec::new();
    let mut tried = 0;
    for fault in faults {
        let noticed = [Granularity::Line, Granularity::Word]
            .into_iter()
            .any(|granularity| (0..12).any(|seed| explore(granularity, Some(fault), seed, 100).is_err()));
        tried += 1;
        if !noticed {
            unnoticed.push(fault);
        }
    }
    println!("{tried} faults planted, {} not noticed", unnoticed.len());
    assert_eq!(unnoticed, [], "not needed, or not tested");
}

/// Who goes on with a pool that was closed and does not take back that it was is found out.
#[test]
fn a_pool_that_is_changed_does_not_say_that_it_is_closed() {
    for granularity in [Granularity::Line, Granularity::Word] {
        let found = explore_with(granularity, None, 1, 40, |_| ());
        assert!(found.is_err_and(|error| error.contains("closed")), "{granularity:?}");
    }
}

/// Whether a site flushes, fences, or orders two stores.
fn does_something(planted: Planted) -> bool {
    use Site::*;
    match planted {
        Planted::NoFence(site) => matches!(
            site,
            FormatDone
                | PutReady
                | PutDone
                | RemoveDone
                | SplitReady
                | SplitLink
                | SplitDone
                | MergeReady
                | MergeJoin
                | MergeDone
                | UnlinkDone
                | RepairDone
                | NoteDone
                | ClosedDone
                | OpenedDone
        ),
        Planted::NoFlush(site) => !does_something(Planted::NoFence(site)) || matches!(site, SplitLink | MergeJoin),
        Planted::Swapped(site) => matches!(site, SplitLink | MergeJoin),
    }
}

/// The fences of each kind of change, no more and no less.
#[test]
fn fences_are_within_their_budget() {
    for (granularity, extra) in [(Granularity::Line, 2), (Granularity::Word, 3)] {
        let options = options(1 << 20, SLOTS);
        let mut world = World::create(Sim::new(&[], 1 << 20, granularity, None), &options);
        let fences = |world: &mut World<Sim>, op: Op| {
            let before = world.tree.medium.counts();
            world.apply(&op).unwrap();
            let after = world.tree.medium.counts();
            (after.0 - before.0, after.1 - before.1)
        };
        let put = |n: u32| Op::Put((n * 7919 % 1000).to_be_bytes().to_vec(), vec![1; 50]);
        // The last key first, so that no leaf is split at the end.
        world.apply(&Op::Put(vec![0xFF], vec![1; 50])).unwrap();
        let mut splits = 0;
        for n in 0..500 {
            let leaves = world.tree.usage().unwrap().1;
            let (count, lines) = fences(&mut world, put(n));
            let split = world.tree.usage().unwrap().1 - leaves;
            assert_eq!(count, 2 + extra * split, "put, {split} splits");
            // Record, slot, header; of a split the new leaf as far as it is filled, and the old one's header.
            let words = u64::from(granularity == Granularity::Word);
            assert!(lines <= 5 + words + split * (1 + 3 + 1 + words), "{lines} lines");
            splits += split;
        }
        assert!(splits > 8);
        let (counted, moved) = world.tree.splits.so_far();
        assert_eq!(
            (counted, moved.fences),
            (splits, extra * splits),
            "what a split counts is what the medium was told"
        );
        // Half of the slots, all fingerprints, two words of a header, the link and the commit; never a key or a value.
        let most = SLOTS as u64 / 2 * 8 + SLOTS as u64 + 16 + 16;
        assert!(moved.stored_bytes <= splits * most && moved.flushed_lines >= splits * 2, "{moved:?}");
        let ascending = (0..100).map(|n| fences(&mut world, Op::Put(vec![0xFF, n], vec![1; 50])).0);
        assert_eq!(ascending.max(), Some(4), "at the end one word links the new leaf");
        assert_eq!(fences(&mut world, put(3)).0, 2, "replaced");
        let before = world.tree.usage().unwrap().1;
        assert_eq!(fences(&mut world, Op::Remove((3 * 7919u32 % 1000).to_be_bytes().to_vec())).0, 1, "removed");
        assert_eq!(world.tree.usage().unwrap().1, before);
        assert_eq!(fences(&mut world, Op::Remove(b"absent".to_vec())).0, 0);
    }
}

#[test]
fn a_pool_that_is_not_made_yet_is_refused_or_empty() {
    for granularity in [Granularity::Line, Granularity::Word] {
        let options = options(LEN_MAX, 4);
        let sim = Sim::new(&[], LEN_MAX, granularity, None);
        sim.record();
        let readers = || ReadPoints::new(Visible::default());
        let tree = create(sim, FILE_ID, KeyOrder::bytewise(), &options, readers()).unwrap();
        let (mut refused, mut opened) = (0, 0);
        for point in tree.medium.take_points() {
            point.images(1000, &mut Dice::new(1, 0), |image| {
                match World::open(Sim::new(image, LEN_MAX, granularity, None), &options) {
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
