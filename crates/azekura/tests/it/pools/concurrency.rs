//! Several threads that write to pools at the same time, with concurrent readers, batches and checkpoints.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use azekura::fs::{DiskFs, Fs, SystemEnv};
use azekura::testing::{MemFs, SeededRng, Survival};
use azekura::{Config, Database, Partition, PersistenceLevel};

use super::pool_options;
use crate::testkit::env_u64;

const WRITERS: u64 = 3;
/// Keys that all writers write.
const SHARED: u64 = 4;

struct PoolThreadTest {
    db: Database,
    pool: Partition,
    tree: Partition,
    stop: AtomicBool,
    checks: AtomicU64,
}

/// `first` is written before `second`, in each round.
fn key(writer: u64, which: &str) -> String {
    format!("{which} of {writer}")
}

fn value(writer: u64, round: u64) -> Vec<u8> {
    let mut value = [writer.to_le_bytes(), round.to_le_bytes()].concat();
    value.resize(16 + (round * 13 % 90) as usize, (writer ^ round) as u8);
    value
}

/// The writer and the round of a value; 0 if there is none.
fn writer_and_round_of(bytes: Option<&[u8]>) -> (u64, u64) {
    let Some(bytes) = bytes else { return (0, 0) };
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    assert_eq!(bytes, value(word(0), word(8)), "a value is torn");
    (word(0), word(8))
}

impl PoolThreadTest {
    fn open(config: Config) -> PoolThreadTest {
        let db = config.env(Arc::new(SystemEnv::new())).workers(1).wal_segment_size(64 << 10).open().unwrap();
        let pool = db.open_partition("pool", pool_options(16 << 20)).unwrap();
        let tree = db.open_partition("tree", Default::default()).unwrap();
        PoolThreadTest { db, pool, tree, stop: AtomicBool::new(false), checks: AtomicU64::new(0) }
    }

    fn round(&self, key: &str) -> u64 {
        writer_and_round_of(self.pool.get(key).unwrap().as_deref()).1
    }

    /// A writer finds its acknowledged writes.
    fn write(&self, writer: u64, rounds: u64) {
        let mut rng = SeededRng::new(writer);
        for round in 1..=rounds {
            for which in ["first", "second"] {
                let key = key(writer, which);
                self.pool.insert(&key, value(writer, round)).unwrap();
                assert_eq!(self.round(&key), round);
            }
            let shared = format!("shared {}", rng.below(SHARED));
            match rng.chance_one_in(4) {
                true => self.pool.remove(shared).unwrap(),
                false => self.pool.insert(shared, value(writer, round)).unwrap(),
            }
            if round % 8 == 0 {
                let mut batch = self.db.batch();
                for part in [&self.pool, &self.tree] {
                    batch.insert(part, key(writer, "batch"), value(writer, round));
                }
                batch.commit().unwrap();
            }
        }
    }

    /// A snapshot has no change without all changes before it, and does not change.
    fn check_snapshot(&self) {
        let snapshot = self.db.snapshot();
        let round = |part: &Partition, key: &str| writer_and_round_of(snapshot.get(part, key).unwrap().as_deref()).1;
        for writer in 0..WRITERS {
            // The second key first: if it were read from a later state, it would be too new.
            let (second, first) = (round(&self.pool, &key(writer, "second")), round(&self.pool, &key(writer, "first")));
            assert!(first == second || first == second + 1, "round {second} behind round {first}");
            let batch = key(writer, "batch");
            assert_eq!(round(&self.pool, &batch), round(&self.tree, &batch), "half a batch");
            assert!(round(&self.pool, &batch) <= second);
        }
        let all = || snapshot.iter(&self.pool).map(Result::unwrap).collect::<Vec<_>>();
        let once = all();
        once.iter().for_each(|(_, value)| _ = writer_and_round_of(Some(value)));
        assert_eq!(once, all(), "a snapshot has changed");
    }

    /// Values that were read once never become older.
    fn read(&self, seed: u64) {
        let (mut rng, mut seen) = (SeededRng::new(seed), [[0; 2]; WRITERS as usize]);
        while !self.stop.load(Ordering::SeqCst) {
            for _ in 0..50 {
                let (writer, which) = (rng.below(WRITERS) as usize, rng.below(2) as usize);
                let round = self.round(&key(writer as u64, ["first", "second"][which]));
                assert!(round >= seen[writer][which], "round {round} behind {:?}", seen[writer]);
                seen[writer][which] = round;
            }
            self.check_snapshot();
            if rng.chance_one_in(8) {
                self.pool.flush().unwrap();
            }
            self.checks.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn run_threads(&self, rounds: u64) {
        thread::scope(|scope| {
            for reader in 0..2 {
                scope.spawn(move || self.read(100 + reader));
            }
            let writers: Vec<_> = (0..WRITERS).map(|writer| scope.spawn(move || self.write(writer, rounds))).collect();
            let results: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
            while self.checks.load(Ordering::SeqCst) < 2 && results.iter().all(Result::is_ok) {
                thread::yield_now();
            }
            self.stop.store(true, Ordering::SeqCst);
            results.into_iter().for_each(|result| result.unwrap());
        });
    }

    fn check_final_values(&self, rounds: u64) {
        self.check_snapshot();
        for writer in 0..WRITERS {
            assert_eq!(self.round(&key(writer, "first")), rounds);
            assert_eq!(self.round(&key(writer, "second")), rounds);
        }
        let metrics = self.pool.metrics().pool.unwrap();
        assert_eq!(metrics.records, self.pool.len().unwrap());
    }
}

fn rounds() -> u64 {
    env_u64("AZEKURA_THREAD_ROUNDS", 400)
}

#[test]
fn pool_writers_keep_order_on_every_backend() {
    for level in [PersistenceLevel::WalOnly, PersistenceLevel::ProcessCrash, PersistenceLevel::PowerLoss] {
        for ends_well in [true, false] {
            let fs = MemFs::new();
            if level > PersistenceLevel::WalOnly {
                fs.set_mapped_memory(level);
            }
            let config = || Config::new("/db").fs(Arc::new(fs.clone()));
            let test = PoolThreadTest::open(config());
            assert_eq!(test.pool.metrics().pool.unwrap().persistence, level);
            test.run_threads(rounds());
            test.check_final_values(rounds());
            let pairs = |test: &PoolThreadTest| test.pool.iter().map(Result::unwrap).collect::<Vec<_>>();
            let (before, counts) = (pairs(&test), test.db.metrics());
            let singles = WRITERS * rounds() * 3;
            assert_eq!(counts.commits, singles + WRITERS * (rounds() / 8));
            assert_eq!(counts.records, singles + WRITERS * (rounds() / 8) * 2);
            if ends_well {
                test.db.clone().close().unwrap();
                assert!(test.pool.insert("late", "").is_err());
            } else {
                fs.crash(Survival::Everything, 0);
            }
            drop(test);
            let again = PoolThreadTest::open(config());
            again.check_final_values(rounds());
            assert_eq!(pairs(&again), before);
            // New sequence numbers are above all used ones.
            again.pool.insert("first of 0", value(0, rounds() + 1)).unwrap();
            assert_eq!(again.round("first of 0"), rounds() + 1);
        }
    }
}

#[test]
fn pool_writers_keep_order_on_real_files() {
    let places = [Some(tempfile::tempdir().unwrap()), tempfile::tempdir_in("/dev/shm").ok()];
    for place in places.into_iter().flatten() {
        let fs: Arc<dyn Fs> = Arc::new(DiskFs::new());
        let path: &Path = &place.path().join("db");
        let test = PoolThreadTest::open(Config::new(path).fs(Arc::clone(&fs)));
        test.run_threads(rounds());
        test.check_final_values(rounds());
        test.db.clone().close().unwrap();
        drop(test);
        PoolThreadTest::open(Config::new(path).fs(fs)).check_final_values(rounds());
    }
}

/// Writers get `Closed`, and all their acknowledged writes are there.
#[test]
fn closing_during_writes_loses_nothing() {
    for level in [PersistenceLevel::WalOnly, PersistenceLevel::PowerLoss] {
        let fs = MemFs::new();
        if level > PersistenceLevel::WalOnly {
            fs.set_mapped_memory(level);
        }
        let config = || Config::new("/db").fs(Arc::new(fs.clone()));
        let test = PoolThreadTest::open(config());
        let written: Vec<u64> = thread::scope(|scope| {
            let write = |writer| {
                let test = &test;
                move || {
                    let mut round = 0;
                    while test.pool.insert(key(writer, "first"), value(writer, round + 1)).is_ok() {
                        round += 1;
                        test.checks.fetch_add(1, Ordering::SeqCst);
                    }
                    round
                }
            };
            let writers: Vec<_> = (0..WRITERS).map(|writer| scope.spawn(write(writer))).collect();
            while test.checks.load(Ordering::SeqCst) < 500 {
                thread::yield_now();
            }
            test.db.clone().close().unwrap();
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        drop(test);
        let again = PoolThreadTest::open(config());
        for (writer, round) in (0..).zip(written) {
            assert_eq!(again.round(&key(writer, "first")), round);
        }
    }
}

/// The keys that one writer has inserted: a sequence without a gap, so that a copy has a prefix of it.
#[test]
fn checkpoint_during_writes_is_one_snapshot() {
    let number_of = |n: u64| (n.wrapping_mul(0x9E37_79B9_7F4A_7C15)).to_be_bytes();
    for level in [PersistenceLevel::WalOnly, PersistenceLevel::ProcessCrash, PersistenceLevel::PowerLoss] {
        let fs = MemFs::new();
        if level > PersistenceLevel::WalOnly {
            fs.set_mapped_memory(level);
        }
        let test = PoolThreadTest::open(Config::new("/db").fs(Arc::new(fs.clone())));
        let copies: Vec<String> = (0..4).map(|n| format!("/copy {n}")).collect();
        let row = |writer: u64, n: u64| [&[writer as u8][..], &number_of(n)].concat();
        let at_least: Vec<[u64; 2]> = thread::scope(|scope| {
            let counts: [Arc<AtomicU64>; 2] = Default::default();
            let writers = [0, 1].map(|writer| {
                let (test, count) = (&test, Arc::clone(&counts[writer as usize]));
                scope.spawn(move || {
                    while !test.stop.load(Ordering::SeqCst) && count.load(Ordering::SeqCst) < 40_000 {
                        let n = count.load(Ordering::SeqCst);
                        test.pool.insert(row(writer, n), value(writer, n)).unwrap();
                        count.store(n + 1, Ordering::SeqCst);
                    }
                })
            });
            let are_at_it = || writers.iter().all(|writer| !writer.is_finished());
            let seen = || [0, 1].map(|writer: usize| counts[writer].load(Ordering::SeqCst));
            let copied = copies.iter().enumerate().map(|(n, copy)| {
                while are_at_it() && seen().iter().any(|count| *count < 300 * (n as u64 + 1)) {
                    thread::yield_now();
                }
                let before = seen();
                test.db.checkpoint(copy).map(|()| before)
            });
            let copied: Vec<_> = copied.collect();
            test.stop.store(true, Ordering::SeqCst);
            copied.into_iter().map(Result::unwrap).collect()
        });
        for (copy, at_least) in copies.iter().zip(at_least) {
            let copied = PoolThreadTest::open(Config::new(copy).fs(Arc::new(fs.clone())));
            let mut all = 0;
            for (writer, at_least) in (0..).zip(at_least) {
                let there = (0..).take_while(|n| {
                    let found = copied.pool.get(row(writer, *n)).unwrap();
                    found.is_some_and(|found| writer_and_round_of(Some(&found)) == (writer, *n))
                });
                let there = there.count() as u64;
                assert!(there >= at_least, "{there} of {at_least} in {copy} at {level:?}");
                all += there;
            }
            assert_eq!(copied.pool.len().unwrap(), all, "a sequence of keys has a gap in {copy} at {level:?}");
        }
    }
}

/// Makes single changes of the pool.
fn insert_and_remove_until_stopped(test: &PoolThreadTest) {
    for n in (0..).take_while(|_| !test.stop.load(Ordering::SeqCst)) {
        test.pool.insert(format!("single {:03}", n % 300), value(9, n)).unwrap();
        test.pool.remove(format!("single {:03}", n * 7 % 300)).unwrap();
    }
}

/// Each batch replaces all keys of a group by a range delete and inserts of a new generation. Readers see the keys of
/// one generation, whole, in each kind of read, during single changes, old snapshots and checkpoints.
#[test]
fn range_deletes_are_atomic_for_readers() {
    const GROUP: u64 = 150;
    for level in [PersistenceLevel::WalOnly, PersistenceLevel::PowerLoss] {
        let fs = MemFs::new();
        if level > PersistenceLevel::WalOnly {
            fs.set_mapped_memory(level);
        }
        let config = || Config::new("/db").fs(Arc::new(fs.clone()));
        let test = PoolThreadTest::open(config());
        let row = |group: u64, n: u64| format!("group {group} {n:04}");
        let generation = |bytes: &[u8]| writer_and_round_of(Some(bytes)).1;
        let replace = |group: u64, round: u64| {
            let mut batch = test.db.batch();
            batch.remove_range(&test.pool, row(group, 0)..=row(group, 9999));
            (0..GROUP).for_each(|n| batch.insert(&test.pool, row(group, n), value(group, round)));
            batch.insert(&test.tree, row(group, 0), value(group, round));
            batch.commit().unwrap();
        };
        (0..2).for_each(|group| replace(group, 1));
        let check = |group: u64, seen: &mut u64| {
            let snapshot = test.db.snapshot();
            let prefix = format!("group {group} ");
            let of = |pairs: Vec<azekura::Result<(azekura::Slice, azekura::Slice)>>| {
                pairs.into_iter().map(|pair| generation(&pair.unwrap().1)).collect::<Vec<_>>()
            };
            let up = of(snapshot.prefix(&test.pool, &prefix).collect());
            let down = of(snapshot.prefix(&test.pool, &prefix).rev().collect());
            let round = generation(&snapshot.get(&test.tree, row(group, 0)).unwrap().unwrap());
            assert_eq!((up, down), (vec![round; GROUP as usize], vec![round; GROUP as usize]));
            assert_eq!(generation(&snapshot.get(&test.pool, row(group, GROUP - 1)).unwrap().unwrap()), round);
            let newest = generation(&test.pool.get(row(group, 7)).unwrap().expect("a batch replaces it"));
            assert!(round >= *seen && newest >= round, "{newest}, {round}, {seen}");
            *seen = newest;
        };
        thread::scope(|scope| {
            for reader in 0..2 {
                let (test, check) = (&test, &check);
                scope.spawn(move || {
                    let mut seen = [0; 2];
                    while !test.stop.load(Ordering::SeqCst) {
                        (0..2).for_each(|group| check(group, &mut seen[group as usize]));
                        if reader == 0 {
                            test.pool.flush().unwrap();
                        }
                    }
                });
            }
            let test = &test;
            scope.spawn(move || insert_and_remove_until_stopped(test));
            let replace = &replace;
            let writers: Vec<_> = (0..2)
                .map(|group| scope.spawn(move || (2..=rounds() / 8).for_each(|round| replace(group, round))))
                .collect();
            let results: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
            test.stop.store(true, Ordering::SeqCst);
            results.into_iter().for_each(|result| result.unwrap());
        });
        let records = test.pool.metrics().pool.unwrap().records;
        assert_eq!(records, test.pool.len().unwrap());
        let before: Vec<_> = test.pool.iter().map(Result::unwrap).collect();
        fs.crash(Survival::Everything, 0);
        drop(test);
        let again = PoolThreadTest::open(config());
        assert!(again.pool.iter().map(Result::unwrap).eq(before));
        again.pool.clear().unwrap();
        assert!(again.pool.is_empty().unwrap());
    }
}
