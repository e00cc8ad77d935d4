//! Followers: databases that are read while another handle, which stands for another process, writes to them.

mod checkpoints;
mod closing;
mod damage;
mod faults;
mod full_disk;
mod interleaved;
mod open_hook;
mod opened_late;
mod windows;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use azekura::fs::Fs;
use azekura::testing::{MemFs, Survival};
use azekura::{
    ChangePosition, Config, Database, ErrorKind, KvSeparationOptions, Partition, PartitionCreateOptions, PlantedBug,
    Result, Snapshot,
};

use crate::changes::{DIR, Fixture};
use crate::pools::pool_options;
use crate::testkit::history::differences;
use crate::testkit::read_database::read_database;
use crate::testkit::seeds::test_seeds;
use crate::testkit::{FailureReport, Map, State};

/// A follower, and states of the past that its snapshots must show.
struct FollowedState {
    db: Database,
    partitions: Vec<Partition>,
    snapshots: Vec<(Snapshot, State)>,
    position: ChangePosition,
}

impl FollowedState {
    fn open(fixture: &Fixture, bug: Option<PlantedBug>) -> Result<FollowedState> {
        let fs: Arc<dyn Fs> = Arc::new(fixture.machine.clone());
        let config = fixture.options.config(DIR.as_ref(), fs, &fixture.env);
        let db = bug.map_or(config.clone(), |bug| config.plant_bug(bug)).open_follower()?;
        let position = db.change_position()?;
        Ok(FollowedState { db, partitions: Vec::new(), snapshots: Vec::new(), position })
    }

    /// Catches up with a writer that does nothing meanwhile, and checks that the states are equal.
    fn check(&mut self, fixture: &mut Fixture, wanted: &State) {
        let position = self.db.catch_up().unwrap();
        assert!(position >= self.position, "a follower does not go back");
        if let Some(writer) = &fixture.db {
            assert_eq!(position, writer.change_position().unwrap());
            match (read_changes(writer, self.position), read_changes(&self.db, self.position)) {
                (Ok(wanted), Ok(found)) => assert_eq!(found, wanted),
                (wanted, found) => {
                    let kinds = [wanted.err(), found.err()].map(|error| error.map(|error| error.kind()));
                    let is_stale = |kind: &Option<ErrorKind>| kind.is_none_or(|kind| kind == ErrorKind::Stale);
                    assert!(kinds.iter().all(is_stale), "{kinds:?}");
                }
            }
        }
        self.position = position;
        let found = read_database(&self.db, &fixture.options).unwrap();
        check_equal(wanted, &found);
        for (snapshot, wanted) in &self.snapshots {
            check_equal(wanted, &read_snapshot(snapshot, &self.partitions));
        }
        if fixture.rng.chance_one_in(3) {
            for name in self.db.list_partitions() {
                if self.partitions.iter().all(|partition| *partition.name != *name || partition.get("x").is_err()) {
                    self.partitions.push(fixture.options.open(&self.db, &name).unwrap());
                }
            }
            self.snapshots.push((self.db.snapshot(), wanted.clone()));
            if self.snapshots.len() > 3 {
                let at = fixture.rng.below(3);
                self.snapshots.remove(at);
            }
        }
    }
}

/// The positions of the commits after `position`, with the number of their changes.
fn read_changes(db: &Database, position: ChangePosition) -> Result<Vec<(ChangePosition, usize)>> {
    let changes = db.changes_since(position)?;
    changes.map(|commit| commit.map(|commit| (commit.position(), commit.changes().count()))).collect()
}

fn check_equal(wanted: &State, found: &State) {
    let without_empty = |state: &State| {
        let mut state = state.clone();
        state.retain(|_, map| !map.is_empty());
        state
    };
    let differences = differences(&without_empty(wanted), &without_empty(found));
    assert!(differences.is_empty(), "{differences:?}");
}

/// Reads partitions by iterators, gets and batches of gets.
fn read_snapshot(snapshot: &Snapshot, partitions: &[Partition]) -> State {
    let mut state = State::new();
    for partition in partitions {
        // A handle of a deleted partition that was created again later.
        let pairs = match snapshot.iter(partition).collect::<Result<Vec<_>>>() {
            Err(error) if error.kind() == ErrorKind::Closed => continue,
            pairs => pairs.unwrap(),
        };
        let map: Map = pairs.into_iter().map(|(key, value)| (key.to_vec(), value.to_vec())).collect();
        let values = snapshot.multi_get(partition, map.keys()).unwrap();
        for ((key, value), found) in map.iter().zip(values) {
            assert_eq!(snapshot.get(partition, key).unwrap().as_deref(), Some(&value[..]));
            assert_eq!(found.as_deref(), Some(&value[..]));
            assert_eq!(snapshot.size_of(partition, key).unwrap(), Some(value.len() as u32));
            let same = snapshot.get_with(partition, key, |found| found == &value[..]).unwrap();
            assert_eq!(same, Some(true));
        }
        let backward = snapshot.iter(partition).rev().map(|pair| pair.unwrap().0.to_vec());
        assert!(backward.eq(map.keys().rev().cloned()), "backward as forward");
        state.entry(partition.name.to_string()).or_default().extend(map);
    }
    state
}

fn writer_state(fixture: &Fixture) -> State {
    read_database(fixture.db(), &fixture.options).unwrap()
}

/// A follower beside a writer that flushes, compacts, ingests, separates values, collects blobs, closes, is killed and
/// opens again.
fn check_follower(seed: u64, bug: Option<PlantedBug>) -> u64 {
    let report = FailureReport::new("follower::", seed);
    let mut fixture = Fixture::new(seed, 0);
    let mut follower = FollowedState::open(&fixture, bug).unwrap();
    let mut checks = 0;
    for n in 0..150 {
        report.set_progress(format!("step {n}"));
        match fixture.rng.below(40) {
            0 => {
                fixture.reopen(None);
                let wanted = writer_state(&fixture);
                follower.check(&mut fixture, &wanted);
            }
            1 => {
                // The process is killed. The follower goes on without a writer, and then with the next one.
                let wanted = writer_state(&fixture);
                fixture.machine.freeze_after(Some(0));
                fixture.db = None;
                fixture.machine.freeze_after(None);
                follower.check(&mut fixture, &wanted);
                let seed = fixture.rng.next_u64();
                fixture.reopen(Some((Survival::Everything, seed)));
                follower.check(&mut fixture, &wanted);
            }
            2 => {
                let wanted = writer_state(&fixture);
                fixture.db.take().unwrap().close().unwrap();
                follower.check(&mut fixture, &wanted);
                fixture.reopen(None);
            }
            3 => {
                let name = fixture.rng.pick(&["d", "e"]);
                match fixture.db().partition_exists(name) {
                    true => fixture.db().delete_partition_by_name(name).unwrap(),
                    false => drop(fixture.options.open(fixture.db(), name).unwrap().insert("k", "new")),
                }
            }
            4 => follower = FollowedState::open(&fixture, bug).unwrap(),
            _ => fixture.step().unwrap(),
        }
        if fixture.rng.chance_one_in(4) {
            let wanted = writer_state(&fixture);
            follower.check(&mut fixture, &wanted);
            checks += 1;
        }
    }
    checks
}

#[test]
fn a_follower_has_the_state_of_the_writer() {
    test_seeds(40).into_iter().for_each(|seed| assert!(check_follower(seed, None) > 10));
}

#[test]
fn planted_bugs_of_followers_are_found() {
    let bugs =
        [PlantedBug::FollowerTearsCommits, PlantedBug::FollowerMissesRecycling, PlantedBug::FollowerForgetsSnapshots];
    for bug in bugs {
        let fails = |seed: &u64| std::panic::catch_unwind(|| check_follower(*seed, Some(bug))).is_err();
        assert!((0..40).find(fails).is_some(), "{bug:?} was not noticed");
    }
}

/// A copy that a follower makes is a database of its own, as of a commit that is not before what the follower shows.
#[test]
fn a_follower_makes_checkpoints() {
    for seed in test_seeds(12) {
        let report = FailureReport::new("follower::", seed);
        let mut fixture = Fixture::new(seed, 0);
        let follower = FollowedState::open(&fixture, None).unwrap();
        for n in 0..60 {
            report.set_progress(format!("step {n}"));
            fixture.step().unwrap();
            if n % 10 == 9 {
                let path = format!("/copies/{n}");
                follower.db.checkpoint(&path).unwrap();
                let machine = fixture.machine.fork();
                machine.crash(Survival::Nothing, seed);
                let fs: Arc<dyn Fs> = Arc::new(machine);
                let copy = fixture.options.config(path.as_ref(), fs, &fixture.env).open().unwrap();
                check_equal(&writer_state(&fixture), &read_database(&copy, &fixture.options).unwrap());
                let (position, of_writer) = (copy.change_position().unwrap(), fixture.db().change_position().unwrap());
                assert_eq!(position.sequence_number(), of_writer.sequence_number());
                assert_eq!(position.partial_cmp(&of_writer), None, "it is another instance");
            }
        }
        assert_eq!(follower.db.checkpoint("/copies/9").unwrap_err().kind(), ErrorKind::Invalid);
    }
}

/// Every commit of the writers sets the same key of three partitions. Readers of the follower see all three or none,
/// while it catches up and the writer flushes, compacts, collects blobs and recycles the log.
#[test]
fn readers_see_whole_commits() {
    let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
    let config = || Config::new(DIR).fs(Arc::clone(&fs)).wal_segment_size(64 << 10).memory_budget(1 << 20);
    let db = config().workers(2).open().unwrap();
    let small = || PartitionCreateOptions::default().max_memtable_size(32 << 10);
    let separated = KvSeparationOptions::default().separation_threshold(300).direct_write_threshold(300);
    let options = [small(), small().with_kv_separation(separated), pool_options(16 << 20)];
    let partitions: Vec<_> = ["a", "b", "c"]
        .into_iter()
        .zip(options)
        .map(|(name, options)| db.open_partition(name, options).unwrap())
        .collect();
    let follower = config().open_follower().unwrap();
    let followed: Vec<_> = ["a", "b", "c"].into_iter().map(|name| follower.partition(name).unwrap()).collect();
    let is_done = AtomicBool::new(false);
    let states = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|n| {
                let (follower, followed, is_done) = (&follower, &followed, &is_done);
                scope.spawn(move || read_pairs(follower, followed, n == 0, is_done))
            })
            .collect();
        scope.spawn(|| {
            while !is_done.load(Ordering::Acquire) {
                follower.catch_up().unwrap();
            }
        });
        for n in 0..3_000u32 {
            let mut batch = db.batch();
            let value = [&n.to_be_bytes()[..], &[7; 400]].concat();
            partitions.iter().for_each(|partition| batch.insert(partition, (n % 40).to_be_bytes(), &value));
            if n % 50 == 49 {
                // Removes older keys of all three.
                partitions.iter().for_each(|partition| {
                    batch.remove_range(partition, 10u32.to_be_bytes()..19u32.to_be_bytes());
                });
            }
            batch.commit().unwrap();
            if n % 500 == 499 {
                partitions.iter().for_each(|partition| partition.major_compact().unwrap());
            }
        }
        is_done.store(true, Ordering::Release);
        readers.into_iter().map(|reader| reader.join().unwrap()).sum::<u64>()
    });
    assert!(states > 0);
    follower.catch_up().unwrap();
    let pairs = |partition: &Partition| partition.iter().collect::<Result<Vec<_>>>().unwrap();
    for (wanted, found) in partitions.iter().zip(&followed) {
        assert_eq!(pairs(found), pairs(wanted));
    }
}

/// Reads three partitions that are equal after each commit. Returns how often.
fn read_pairs(db: &Database, partitions: &[Partition], by_keys: bool, is_done: &AtomicBool) -> u64 {
    let (mut states, mut last) = (0, 0);
    while !is_done.load(Ordering::Acquire) || states == 0 {
        let snapshot = db.snapshot();
        let read = |partition: &Partition| match by_keys {
            true => {
                let keys = (0..40u32).map(u32::to_be_bytes);
                let values = snapshot.multi_get(partition, keys.clone()).unwrap();
                let pairs = keys.zip(values).filter_map(|(key, value)| Some((key.to_vec(), value?.to_vec())));
                pairs.collect::<Vec<_>>()
            }
            false => {
                let pairs = snapshot.iter(partition).map(|pair| pair.unwrap());
                pairs.map(|(key, value)| (key.to_vec(), value.to_vec())).collect()
            }
        };
        let first = read(&partitions[0]);
        let numbers = |pairs: &[(Vec<u8>, Vec<u8>)]| {
            let number = |bytes: &[u8]| u32::from_be_bytes(bytes[..4].try_into().unwrap());
            pairs.iter().map(|(key, value)| (number(key), number(value))).collect::<Vec<_>>()
        };
        for other in &partitions[1..] {
            let name = &other.name;
            assert_eq!(numbers(&read(other)), numbers(&first), "{name} is read at another moment, by keys: {by_keys}");
        }
        let newest = first.iter().map(|(_, value)| u32::from_be_bytes(value[..4].try_into().unwrap())).max();
        assert!(newest.unwrap_or(last) >= last, "a later snapshot is not older");
        last = newest.unwrap_or(last);
        states += 1;
    }
    states
}
