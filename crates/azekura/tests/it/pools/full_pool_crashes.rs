//! Full pools that are killed, lose power, and are reopened with a smaller or larger `max_size`. Some get a smaller
//! `max_size` while they are open, some write many times their size before they are killed.
//!
//! - `AZEKURA_CRASH_POINTS`: number of crashes.

use std::collections::BTreeMap;

use azekura::testing::{MemFs, SeededRng, Survival, is_in_own_process};
use azekura::{
    Database, EngineType, ErrorKind, Partition, PartitionCreateOptions, PersistMode, PmemOptions, Slice, Snapshot,
};

use super::{config, is_refused};
use crate::testkit::env_u64;
use crate::testkit::test_dir::crash_or_kill;

/// A value is one byte, repeated this many times.
type PoolRecords = BTreeMap<Vec<u8>, (u8, usize)>;
type TwoPoolModel = [PoolRecords; 2];

/// Sizes that the pools of one search may have.
struct PoolSizes {
    max: u64,
    step: u64,
}

impl PoolSizes {
    fn pool(&self, eighths: u64) -> PartitionCreateOptions {
        let sizes = PmemOptions::default().max_size(self.max / 8 * eighths).growth_step(self.step);
        PartitionCreateOptions::default().engine(EngineType::Pmem(sizes))
    }
}

struct FullPoolRun {
    db: Database,
    partitions: [Partition; 2],
    model: TwoPoolModel,
    /// The states from the last sync on; power loss leaves one of them.
    states: Vec<TwoPoolModel>,
    snapshot: Option<(Snapshot, TwoPoolModel)>,
    times_full: u64,
    /// `max_size` of both pools, in eighths of [`PoolSizes::max`].
    eighths: u64,
    /// Number of changes per checkpoint. If there are few checkpoints, the WAL has many times the bytes of the pool.
    flush_every: u64,
}

/// Bytes of keys and values.
fn data_bytes(records: &PoolRecords) -> u64 {
    records.iter().map(|(key, (_, len))| (key.len() + len) as u64).sum()
}

fn read_pairs(pairs: impl Iterator<Item = azekura::Result<(Slice, Slice)>>) -> PoolRecords {
    let record = |(key, value): (Slice, Slice)| {
        let byte = value.first().copied().unwrap_or_default();
        assert!(value.iter().all(|other| *other == byte), "a value is torn");
        (key.to_vec(), (byte, value.len()))
    };
    pairs.map(|pair| record(pair.unwrap())).collect()
}

fn open(fs: &MemFs, options: &PartitionCreateOptions) -> (Database, [Partition; 2]) {
    let db = config(fs).wal_segment_size(64 << 10).open().unwrap();
    let partitions = ["left", "right"].map(|name| db.open_partition(name, options.clone()).unwrap());
    partitions.iter().for_each(|part| part.set_options(options.clone()).unwrap());
    (db, partitions)
}

impl FullPoolRun {
    fn random_value(sizes: &PoolSizes, rng: &mut SeededRng) -> (u8, usize) {
        let len = match rng.below(12) {
            0 => rng.below(sizes.max / 6),
            1..=3 => rng.below(sizes.max / 40),
            4 | 5 => rng.below(3000),
            6 => 1,
            _ => rng.below(200),
        };
        (if len == 0 { 0 } else { rng.next_u64() as u8 }, len as usize)
    }

    /// Makes one change, which either is acknowledged or changes nothing.
    fn random_change(&mut self, sizes: &PoolSizes, rng: &mut SeededRng) {
        let key = |rng: &mut SeededRng| format!("{:03}", rng.below(400)).into_bytes();
        let mut new = self.model.clone();
        let done = match rng.below(8) {
            0..=3 => {
                let (at, key, value) = (rng.below(2), key(rng), FullPoolRun::random_value(sizes, rng));
                new[at].insert(key.clone(), value);
                self.partitions[at].insert(&key, vec![value.0; value.1])
            }
            4 => {
                let (at, key) = (rng.below(2), key(rng));
                new[at].remove(&key);
                self.partitions[at].remove(&key)
            }
            _ => {
                let mut batch = self.db.batch();
                for _ in 0..1 + rng.below(20) {
                    let (at, key, value) = (rng.below(2), key(rng), FullPoolRun::random_value(sizes, rng));
                    if rng.chance_one_in(3) {
                        batch.remove(&self.partitions[at], &key);
                        new[at].remove(&key);
                    } else {
                        batch.insert(&self.partitions[at], &key, vec![value.0; value.1]);
                        new[at].insert(key, value);
                    }
                }
                batch.commit()
            }
        };
        match done {
            Ok(()) => {
                for (old, new) in self.model.iter().zip(&new) {
                    let (old, new) = (data_bytes(old), data_bytes(new));
                    assert!(new <= old || new <= self.limit(sizes), "{new} bytes in a pool of {}", self.limit(sizes));
                }
                self.model = new;
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::OutOfSpace, "{error}");
                self.times_full += 1;
                // Mostly few records, so that the pool is usually full.
                if rng.chance_one_in(2) {
                    let one_in = rng.pick(&[2, 8, 8]);
                    self.remove_some(one_in, rng);
                }
            }
        }
        self.states.push(self.model.clone());
    }

    /// Bytes that each pool may hold.
    fn limit(&self, sizes: &PoolSizes) -> u64 {
        sizes.max / 8 * self.eighths
    }

    /// Removes most records and lowers `max_size` of the open pools. The records in the WAL do not fit into the new
    /// size.
    fn lower_max_size(&mut self, sizes: &PoolSizes, rng: &mut SeededRng) {
        (0..3).for_each(|_| self.remove_some(2, rng));
        self.eighths = if sizes.max > 64 << 10 { rng.pick(&[2, 4]) } else { 8 };
        let options = sizes.pool(self.eighths);
        self.partitions.iter().for_each(|part| part.set_options(options.clone()).unwrap());
    }

    /// Removes about one of `one_in` records, which a full pool allows.
    fn remove_some(&mut self, one_in: u64, rng: &mut SeededRng) {
        self.snapshot = None;
        for (part, at) in self.partitions.iter().zip(0..) {
            let removed_keys: Vec<_> = self.model[at].keys().filter(|_| rng.chance_one_in(one_in)).cloned().collect();
            for key in removed_keys {
                part.remove(&key).unwrap();
                self.model[at].remove(&key);
                self.states.push(self.model.clone());
            }
        }
    }

    /// Takes a snapshot, or checks the existing one and drops it.
    fn check_or_take_snapshot(&mut self) {
        match self.snapshot.take() {
            None => self.snapshot = Some((self.db.snapshot(), self.model.clone())),
            Some((snapshot, model)) => {
                for (part, model) in self.partitions.iter().zip(&model) {
                    assert!(read_pairs(snapshot.iter(part)) == *model, "a snapshot shows something else");
                }
            }
        }
    }
}

/// Crashes and reopens one database `crashes` times. Returns how often a pool was full.
fn run_crash_search(seed: u64, crashes: u64) -> u64 {
    let mut rng = SeededRng::new(seed);
    let sizes =
        PoolSizes { max: rng.pick(&[64 << 10, 256 << 10, 1 << 20]), step: rng.pick(&[4 << 10, 64 << 10, 4 << 20]) };
    let (mut fs, mut eighths, mut fulls) = (MemFs::new(), 8, 0);
    let mut model = TwoPoolModel::default();
    for life in 0..crashes {
        let (db, partitions) = open(&fs, &sizes.pool(eighths));
        db.persist(PersistMode::SyncData).unwrap();
        let states = vec![model.clone()];
        let (changes, flush_every) = if rng.chance_one_in(2) { (500, 10_000) } else { (100, 30) };
        let mut now =
            FullPoolRun { db, partitions, model, states, snapshot: None, times_full: 0, eighths, flush_every };
        for _ in 0..20 + rng.below(changes) {
            now.random_change(&sizes, &mut rng);
            match rng.below(30) {
                0 => now.check_or_take_snapshot(),
                1 => {
                    now.db.persist(PersistMode::SyncData).unwrap();
                    now.states = vec![now.model.clone()];
                }
                _ => {}
            }
            match rng.below(now.flush_every) {
                0 => now.partitions[rng.below(2)].flush().unwrap(),
                1 => while now.db.step().unwrap() {},
                _ => {}
            }
            for part in &now.partitions {
                let pool = part.metrics().pool.unwrap();
                assert!(pool.bytes <= 4 * sizes.max, "seed {seed}, life {life}: {} of {} bytes", pool.bytes, sizes.max);
            }
        }
        if rng.chance_one_in(4) {
            now.lower_max_size(&sizes, &mut rng);
            (0..rng.below(40)).for_each(|_| now.random_change(&sizes, &mut rng));
        }
        let (survival, is_kill) =
            if rng.chance_one_in(2) { (Survival::Everything, true) } else { (Survival::Random, false) };
        let after = fs.fork();
        crash_or_kill(&after, survival, rng.next_u64());
        fulls += now.times_full;
        // No pool is smaller than 64 KiB.
        eighths = if sizes.max > 64 << 10 { rng.pick(&[8, 8, 6, 12]) } else { rng.pick(&[8, 12]) };
        let reader = config(&after).open_read_only().unwrap();
        let found = ["left", "right"].map(|name| read_pairs(reader.partition(name).unwrap().iter()));
        drop(reader);
        let is_known = if is_kill { found == now.model } else { now.states.contains(&found) };
        assert!(
            is_known,
            "seed {seed}, life {life}, killed: {is_kill}: {:?} records",
            found.each_ref().map(BTreeMap::len)
        );
        let (db, partitions) = open(&after, &sizes.pool(eighths));
        assert!(partitions.each_ref().map(|part| read_pairs(part.iter())) == found, "seed {seed}, life {life}");
        drop((db, partitions, now));
        (fs, model) = (after, found);
    }
    check_emptied_pool(&fs, &sizes, seed);
    check_thinned_pool(&sizes, seed);
    fulls
}

/// Puts records under the keys `prefix` + `from`, `from + 1`, … until the pool is full. Returns how many it took.
fn fill(part: &Partition, prefix: u8, from: u32) -> u32 {
    let key = |n: u32| [&[prefix][..], &n.to_be_bytes()].concat();
    let fits = |n: &u32| !is_refused(part, &key(*n), &[1; 300]);
    (from..).take_while(fits).count() as u32
}

/// An emptied pool takes nearly as many records as a new one.
fn check_emptied_pool(fs: &MemFs, sizes: &PoolSizes, seed: u64) {
    let (_db, partitions) = open(fs, &sizes.pool(8));
    for key in partitions[0].keys().map(Result::unwrap).collect::<Vec<_>>() {
        partitions[0].remove(key).unwrap();
    }
    let again = fill(&partitions[0], 0, 0);
    let (_new, partitions) = open(&MemFs::new(), &sizes.pool(8));
    let new = fill(&partitions[0], 0, 0);
    assert!(again * 10 >= new * 9, "seed {seed}: an emptied pool takes {again} records, a new one {new}");
}

/// A full pool of which every second record was removed takes most of them again, under keys in another part of the
/// order.
fn check_thinned_pool(sizes: &PoolSizes, seed: u64) {
    let (_db, partitions) = open(&MemFs::new(), &sizes.pool(8));
    let count = fill(&partitions[0], 0, 0);
    for key in partitions[0].keys().step_by(2).map(Result::unwrap).collect::<Vec<_>>() {
        partitions[0].remove(key).unwrap();
    }
    let again = fill(&partitions[0], 1, 0);
    assert!(again * 10 >= count / 2 * 7, "seed {seed}: {again} records fit where {} were removed", count / 2);
}

#[test]
fn full_pool_survives_kill_and_power_loss() {
    if !is_in_own_process("pools::full_pool_crashes::full_pool_survives_kill_and_power_loss") {
        return;
    }
    let crashes = env_u64("AZEKURA_CRASH_POINTS", 60);
    let fulls: u64 = (0..crashes.div_ceil(5)).map(|seed| run_crash_search(seed, 5)).sum();
    println!("{fulls} times full");
    assert!(fulls > crashes, "{fulls} times full");
}
