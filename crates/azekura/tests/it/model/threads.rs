//! Writers with distinct keys, readers that look for half a batch, and threads that flush, compact and checkpoint.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use azekura::fs::{DiskFs, Fs};
use azekura::testing::{MemFs, SeededRng};
use azekura::{Config, Database, Partition, PartitionCreateOptions, PersistMode};

use crate::testkit::env_u64;

const WRITERS: u64 = 3;
const KEYS: u64 = 8;

/// The value of all keys of a writer, in both partitions, after its `round`; every fifth round removes the keys.
fn value(round: u64) -> Option<Vec<u8>> {
    (!round.is_multiple_of(5)).then(|| {
        let mut value = format!("{round:08} ").into_bytes();
        value.resize(20 + (round % 7) as usize * 40, b'.');
        value
    })
}

fn key(writer: u64, index: u64) -> String {
    format!("w{writer}/{index}")
}

struct ThreadTest {
    db: Database,
    partitions: [Partition; 2],
    /// The last acknowledged round of each writer.
    rounds: [AtomicU64; WRITERS as usize],
    stop: AtomicBool,
    checks: AtomicU64,
}

impl ThreadTest {
    fn new(db: Database, partitions: [Partition; 2]) -> ThreadTest {
        let (stop, checks) = (AtomicBool::new(false), AtomicU64::new(0));
        ThreadTest { db, partitions, rounds: Default::default(), stop, checks }
    }

    fn write(&self, writer: u64, rounds: u64) {
        let mut rng = SeededRng::new(writer);
        for round in 1..=rounds {
            let mode = if rng.chance_one_in(50) { PersistMode::SyncData } else { PersistMode::Buffer };
            let mut batch = self.db.batch();
            batch.durability(mode);
            for part in &self.partitions {
                for index in 0..KEYS {
                    match value(round) {
                        Some(value) => batch.insert(part, key(writer, index), value),
                        None => batch.remove(part, key(writer, index)),
                    }
                }
            }
            batch.commit().unwrap();
            self.rounds[writer as usize].store(round, Ordering::SeqCst);
        }
    }

    /// The round that a set of values of one writer shows, or that all are removed. Panics at half a batch.
    fn round_of_values(values: &[Option<Vec<u8>>], how: &str) -> Option<u64> {
        let first = &values[0];
        assert!(values.iter().all(|value| value == first), "half a batch by {how}: {values:.40?}");
        let value = first.as_ref()?;
        let round: u64 = std::str::from_utf8(&value[..8]).unwrap().parse().unwrap();
        assert_eq!(Some(value), self::value(round).as_ref(), "by {how}");
        Some(round)
    }

    fn read(&self, salt: u64) {
        let mut rng = SeededRng::new(salt);
        let mut seen = [0; WRITERS as usize];
        while !self.stop.load(Ordering::SeqCst) {
            let writer = rng.below(WRITERS);
            let before = self.rounds[writer as usize].load(Ordering::SeqCst);
            let way = rng.below(4);
            let (values, how) = self.read_all_ways(writer, way);
            if let Some(round) = ThreadTest::round_of_values(&values, how) {
                let least = before.max(seen[writer as usize]);
                assert!(round >= least, "{how}: round {round} after round {least} was acknowledged or seen");
                seen[writer as usize] = round;
            }
            self.checks.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// All values of a writer at one point in time, read in one of the possible ways.
    fn read_all_ways(&self, writer: u64, way: u64) -> (Vec<Option<Vec<u8>>>, &'static str) {
        let keys: Vec<String> = (0..KEYS).map(|index| key(writer, index)).collect();
        let owned = |slice: Option<azekura::Slice>| slice.map(|slice| slice.to_vec());
        let fill = |mut found: Vec<Option<Vec<u8>>>| {
            assert!(found.is_empty() || found.len() == KEYS as usize, "half a batch: {} keys", found.len());
            found.resize(KEYS as usize, None);
            found
        };
        let prefix = format!("w{writer}/");
        match way {
            0 => {
                let snapshot = self.db.snapshot();
                let both = self.partitions.iter().flat_map(|part| keys.iter().map(|k| snapshot.get(part, k).unwrap()));
                (both.map(owned).collect(), "snapshot")
            }
            1 => (self.partitions[0].multi_get(&keys).unwrap().into_iter().map(owned).collect(), "multi_get"),
            2 => {
                let pairs = self.partitions[1].prefix(&prefix).map(|pair| Some(pair.unwrap().1.to_vec()));
                (fill(pairs.collect()), "prefix")
            }
            _ => {
                let end = format!("w{writer}0");
                let pairs = self.partitions[0].range(prefix..end).rev().map(|pair| Some(pair.unwrap().1.to_vec()));
                (fill(pairs.collect()), "range backward")
            }
        }
    }

    /// Copies the database repeatedly; each copy opens, and its state is between the writes acknowledged before the
    /// copy and the writes requested by its end.
    fn run_checkpoints(&self, fs: &Arc<dyn Fs>, path: &Path) {
        while !self.stop.load(Ordering::SeqCst) {
            let before: Vec<u64> = self.rounds.iter().map(|round| round.load(Ordering::SeqCst)).collect();
            self.db.checkpoint(path).unwrap();
            let after: Vec<u64> = self.rounds.iter().map(|round| round.load(Ordering::SeqCst) + 1).collect();
            let copy = Config::new(path).fs(Arc::clone(fs)).workers(0).open().unwrap();
            let partitions = ["left", "right"].map(|name| copy.open_partition(name, Default::default()).unwrap());
            for writer in 0..WRITERS {
                let keys = (0..KEYS).map(|index| key(writer, index));
                let both = partitions.iter().flat_map(|part| keys.clone().map(|key| part.get(key).unwrap()));
                let values: Vec<_> = both.map(|slice| slice.map(|slice| slice.to_vec())).collect();
                let span = before[writer as usize]..=after[writer as usize];
                match ThreadTest::round_of_values(&values, "checkpoint") {
                    Some(round) => {
                        assert!(span.contains(&round), "round {round} of writer {writer} is not in {span:?}")
                    }
                    None => assert!(
                        span.clone().any(|round| value(round).is_none()),
                        "nothing of writer {writer}, {span:?}"
                    ),
                }
            }
            drop((partitions, copy));
            fs.remove_dir_all(path).unwrap();
            self.checks.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn run_maintenance(&self) {
        let mut rng = SeededRng::new(77);
        while !self.stop.load(Ordering::SeqCst) {
            let part = &self.partitions[rng.below(2)];
            if rng.chance_one_in(4) {
                part.major_compact().unwrap()
            } else {
                part.flush().unwrap()
            }
            thread::yield_now();
        }
    }
}

fn run_threads(fs: Arc<dyn Fs>, dir: &Path, rounds: u64) {
    let config = || Config::new(dir).fs(Arc::clone(&fs)).workers(2).wal_segment_size(256 << 10).cache_size(256 << 10);
    let options = || PartitionCreateOptions::default().max_memtable_size(32 << 10).block_size(512);
    let db = config().open().unwrap();
    let partitions = ["left", "right"].map(|name| db.open_partition(name, options()).unwrap());
    let test = ThreadTest::new(db, partitions);
    thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|salt| {
                scope.spawn({
                    let test = &test;
                    move || test.read(salt)
                })
            })
            .collect();
        let maintenance = scope.spawn(|| test.run_maintenance());
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                scope.spawn({
                    let test = &test;
                    move || test.write(writer, rounds)
                })
            })
            .collect();
        let written: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        test.stop.store(true, Ordering::SeqCst);
        let others: Vec<_> = readers.into_iter().chain([maintenance]).map(|thread| thread.join()).collect();
        written.into_iter().chain(others).for_each(|joined| joined.unwrap());
    });
    println!("{} rounds of {WRITERS} writers, {} checks", rounds, test.checks.load(Ordering::Relaxed));
    assert!(test.db.metrics().flushes > 2, "there were too few flushes");
    let ThreadTest { db, partitions, .. } = test;
    drop(partitions);
    db.close().unwrap();
    let db = config().open().unwrap();
    for name in ["left", "right"] {
        let part = db.open_partition(name, options()).unwrap();
        for writer in 0..WRITERS {
            for index in 0..KEYS {
                assert_eq!(part.get(key(writer, index)).unwrap().as_deref(), value(rounds).as_deref());
            }
        }
    }
}

#[test]
fn checkpoint_under_load_is_one_snapshot() {
    let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
    let config = Config::new("/db").fs(Arc::clone(&fs)).workers(2).wal_segment_size(64 << 10).cache_size(256 << 10);
    let db = config.open().unwrap();
    let options = || PartitionCreateOptions::default().max_memtable_size(16 << 10).block_size(512);
    let partitions = ["left", "right"].map(|name| db.open_partition(name, options()).unwrap());
    let test = ThreadTest::new(db, partitions);
    let rounds = env_u64("AZEKURA_ROUNDS", 1_200);
    thread::scope(|scope| {
        let copier = scope.spawn(|| test.run_checkpoints(&fs, Path::new("/copy")));
        let maintenance = scope.spawn(|| test.run_maintenance());
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let test = &test;
                scope.spawn(move || test.write(writer, rounds))
            })
            .collect();
        let written: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        test.stop.store(true, Ordering::SeqCst);
        let others = [copier.join(), maintenance.join()];
        written.into_iter().chain(others).for_each(|joined| joined.unwrap());
    });
    println!("{} copies", test.checks.load(Ordering::Relaxed));
}

#[test]
fn readers_never_see_half_a_batch_in_memory() {
    run_threads(Arc::new(MemFs::new()), Path::new("/db"), env_u64("AZEKURA_ROUNDS", 1_200));
}

#[test]
fn readers_never_see_half_a_batch_on_disk() {
    let dir = tempfile::tempdir().unwrap();
    run_threads(Arc::new(DiskFs::new()), &dir.path().join("db"), env_u64("AZEKURA_ROUNDS", 1_200));
}
