//! Pools that are full, small or hold versions for old snapshots.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use azekura::fs::Fs;
use azekura::testing::{MemFs, SeededRng, Survival, TestEnv, is_in_own_process, wait_for_readers};
use azekura::{Config, Database, EngineType, ErrorKind, Partition, PartitionCreateOptions, PmemOptions, RecoveryMode};

use crate::pools::is_refused;
use crate::testkit::watchdog::wait_until;

fn config(machine: &MemFs) -> Config {
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    Config::new(Path::new("/db")).fs(fs).env(Arc::new(TestEnv::new(1))).workers(0)
}

fn pool_options(max_size: u64, growth_step: u64) -> PartitionCreateOptions {
    let sizes = PmemOptions::default().max_size(max_size).growth_step(growth_step);
    PartitionCreateOptions::default().engine(EngineType::Pmem(sizes))
}

fn open(machine: &MemFs, options: &PartitionCreateOptions) -> (Database, Partition) {
    let db = config(machine).open().unwrap();
    let part = db.open_partition("p", options.clone()).unwrap();
    part.set_options(options.clone()).unwrap();
    (db, part)
}

/// The machine after the process was killed.
fn after_kill(machine: &MemFs) -> MemFs {
    let after = machine.fork();
    after.crash(Survival::Everything, 0);
    after
}

/// Bytes of the pool that are in use.
fn used_bytes(part: &Partition) -> u64 {
    let pool = part.metrics().pool.unwrap();
    pool.bytes - pool.free_bytes - 448 * pool.free_leaves
}

/// The number of records that fit.
fn insert_until_full(part: &Partition, from: u32, value: &[u8]) -> u32 {
    (from..).find(|n| is_refused(part, &n.to_be_bytes(), value)).unwrap() - from
}

/// Replay inserts records in another order of sizes than the process did, and ran out of space in a pool that had space
/// for them. After a kill, 95 of 100 databases with a full pool did not open in any mode.
#[test]
fn a_full_pool_opens_when_killed() {
    for (seed, step) in [(1, 4 << 20), (2, 4 << 20), (3, 64 << 10), (4, 4 << 10)] {
        let (options, mut rng) = (pool_options(1 << 20, step), SeededRng::new(seed));
        let mut machine = MemFs::new();
        let mut model: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
        for life in 0..3 {
            let (db, part) = open(&machine, &options);
            assert!(part.len().unwrap() == model.len() as u64, "seed {seed}, life {life}");
            for (key, value) in &model {
                assert_eq!(part.get(key).unwrap().as_deref(), Some(value.as_slice()));
            }
            for _ in 0..700 {
                let key = rng.below(500u64).to_be_bytes().to_vec();
                let len = rng.pick(&[20_000, 5_000, 900, 60]);
                let value = vec![rng.next_u64() as u8; len];
                match part.insert(&key, &value) {
                    Ok(()) => drop(model.insert(key, value)),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::OutOfSpace);
                        let removed: Vec<_> = model.keys().filter(|_| rng.chance_one_in(8)).cloned().collect();
                        removed.iter().for_each(|key| part.remove(key).unwrap());
                        removed.iter().for_each(|key| drop(model.remove(key)));
                    }
                }
            }
            let after = after_kill(&machine);
            assert_eq!(db.metrics().open_snapshots, 0);
            if life == 2 {
                for mode in [RecoveryMode::Strict, RecoveryMode::PointInTime, RecoveryMode::Salvage] {
                    let db = config(&after.fork()).recovery_mode(mode).open().unwrap();
                    assert_eq!(db.partition("p").unwrap().len().unwrap(), model.len() as u64);
                }
                let db = config(&after).open_read_only().unwrap();
                assert_eq!(db.partition("p").unwrap().len().unwrap(), model.len() as u64);
            }
            machine = after;
        }
    }
}

/// The WAL contained records that were written under a larger `max_size`. A smaller one was applied to their replay,
/// and the database did not open after a kill.
#[test]
fn a_lowered_pool_opens_when_killed() {
    let machine = MemFs::new();
    let (_db, part) = open(&machine, &pool_options(8 << 20, 64 << 10));
    (0..3000u32).for_each(|n| part.insert(n.to_be_bytes(), [7; 1000]).unwrap());
    (2500..3000u32).for_each(|n| part.remove(n.to_be_bytes()).unwrap());
    let before = after_kill(&machine);
    let options = pool_options(1 << 20, 64 << 10);
    part.set_options(options.clone()).unwrap();
    assert_eq!(part.metrics().pool.unwrap().checkpoints, 1, "lowering `max_size` takes a checkpoint");
    // The size was lowered when the database was opened again, too.
    for machine in [after_kill(&machine), before] {
        let (db, part) = open(&machine, &options);
        assert_eq!(part.len().unwrap(), 2500);
        // The pool is above its limit: it refuses inserts until enough was removed.
        assert_eq!(part.insert("k", "v").unwrap_err().kind(), ErrorKind::OutOfSpace);
        assert_eq!(part.insert(3u32.to_be_bytes(), [8; 1000]).unwrap_err().kind(), ErrorKind::OutOfSpace);
        (300..2500u32).for_each(|n| part.remove(n.to_be_bytes()).unwrap());
        let more = insert_until_full(&part, 10_000, &[1; 1000]);
        assert!((500..800).contains(&more), "{more} records of 1 kB in addition to 300 in 1 MiB");
        assert!(used_bytes(&part) <= 1 << 20);
        let again = after_kill(&machine);
        drop((part, db));
        let (_db, part) = open(&again, &options);
        assert_eq!(part.len().unwrap(), u64::from(300 + more));
        assert!(is_refused(&part, b"k", &[1; 60_000]));
    }
}

/// Each replay of the same WAL began with the pool that the previous replay had filled, so the pool grew at each kill.
#[test]
fn kills_do_not_let_a_pool_grow() {
    let options = pool_options(256 << 10, 16 << 10);
    let (mut machine, mut rng, mut sizes) = (MemFs::new(), SeededRng::new(5), Vec::new());
    for _ in 0..30 {
        let (_db, part) = open(&machine, &options);
        for _ in 0..150 {
            let key = rng.below(100u64).to_be_bytes();
            let value = vec![1; rng.pick(&[10, 900, 5_000, 30_000])];
            if part.insert(key, value).is_err() {
                (0..100).filter(|_| rng.chance_one_in(3)).for_each(|n: u64| part.remove(n.to_be_bytes()).unwrap());
            }
        }
        if rng.chance_one_in(3) {
            part.flush().unwrap();
        }
        sizes.push(part.metrics().pool.unwrap().bytes);
        machine = after_kill(&machine);
    }
    assert!(sizes.iter().all(|bytes| *bytes <= 3 * (256 << 10)), "{sizes:?}");
}

/// The first growth step ignored `max_size`, so a new pool had up to twice that size.
#[test]
fn max_size_holds_where_a_step_is_larger() {
    for max in [64 << 10, 1 << 20, 3 << 20] {
        let (_db, part) = open(&MemFs::new(), &pool_options(max, 4 << 20));
        let count = insert_until_full(&part, 0, &[7; 1000]);
        assert!(u64::from(count) * 1004 <= max && part.metrics().pool.unwrap().bytes <= max);
        assert!(u64::from(count) * 1004 >= max * 3 / 4, "{count} records in {max} bytes");
    }
}

/// Every second record of a full pool was removed. After that only 40 more records fit: they needed leaves, and no leaf
/// could be cut from the freed space.
#[test]
fn a_half_emptied_pool_takes_as_much_again() {
    if !is_in_own_process("regressions::pool_space::a_half_emptied_pool_takes_as_much_again") {
        return;
    }
    for (max, step) in [(512 << 10, 2), (512 << 10, 3), (5 << 20, 2)] {
        let (_db, part) = open(&MemFs::new(), &pool_options(max, 64 << 10));
        let first = insert_until_full(&part, 0, &[1; 100]);
        (0..first).step_by(step).for_each(|n| part.remove(n.to_be_bytes()).unwrap());
        let removed = first / step as u32;
        let second = insert_until_full(&part, 10_000_000, &[1; 100]);
        assert!(second >= removed * 7 / 10, "{first} fit, {removed} were removed, then {second} fit");
        (0..first).for_each(|n| part.remove(n.to_be_bytes()).unwrap());
        (0..second).for_each(|n| part.remove((10_000_000 + n).to_be_bytes()).unwrap());
        let third = insert_until_full(&part, 0, &[1; 100]);
        assert!(third >= first * 9 / 10, "empty again, {third} of {first} fit");
    }
}

/// Removals ignored the limit on versions that snapshots retain: a pool retained 54 MB with a limit of 2 MiB.
#[test]
fn removals_under_a_snapshot_are_bounded() {
    let (db, part) = open(&MemFs::new(), &pool_options(2 << 20, 64 << 10));
    let count = insert_until_full(&part, 0, b"v");
    let snapshot = db.snapshot();
    let refused = (0..count).find_map(|n| part.remove(n.to_be_bytes()).err().map(|error| (n, error)));
    let (n, error) = refused.expect("the bound on versions refuses a removal");
    assert!(error.kind() == ErrorKind::OutOfSpace && error.to_string().contains("snapshot"), "{error}");
    assert!(error.to_string().contains(&format!("{n} records old")), "{error}");
    let mut batch = db.batch();
    batch.remove(&part, n.to_be_bytes());
    assert_eq!(batch.commit().unwrap_err().kind(), ErrorKind::OutOfSpace);
    assert!(part.metrics().pool.unwrap().version_bytes < 2 << 20);
    assert_eq!((snapshot.len(&part).unwrap(), part.len().unwrap()), (u64::from(count), u64::from(count - n)));
    drop(snapshot);
    let mut batch = db.batch();
    batch.remove(&part, n.to_be_bytes());
    batch.commit().unwrap();
    (n..count).for_each(|n| part.remove(n.to_be_bytes()).unwrap());
    assert!(part.is_empty().unwrap());
}

/// After a snapshot was dropped, the versions that it had retained stayed until thousands of records were replaced.
#[test]
fn retained_versions_are_freed_with_snapshot() {
    let (db, part) = open(&MemFs::new(), &pool_options(16 << 20, 64 << 10));
    (0..10_000u32).for_each(|n| part.insert(n.to_be_bytes(), [1; 50]).unwrap());
    let snapshot = db.snapshot();
    (0..10_000u32).for_each(|n| part.insert(n.to_be_bytes(), [2; 50]).unwrap());
    let with_snapshot = part.metrics().pool.unwrap();
    drop(snapshot);
    // By background work, without any write.
    while db.step().unwrap() {}
    let after_drop = part.metrics().pool.unwrap();
    assert!(
        after_drop.version_bytes < with_snapshot.version_bytes / 4 && after_drop.free_bytes > with_snapshot.free_bytes,
        "{with_snapshot:?} {after_drop:?}"
    );
}

/// A batch checked the limit on retained versions once: a pool retained 45.7 MB with a limit of 4 MiB.
#[test]
fn a_batch_keeps_no_more_than_is_allowed() {
    let machine = MemFs::new();
    let (db, part) = open(&machine, &pool_options(2 << 20, 64 << 10));
    let batch_of = |keys: std::ops::Range<u32>, value: Option<&str>| {
        let mut batch = db.batch();
        keys.for_each(|n| match value {
            Some(value) => batch.insert(&part, n.to_be_bytes(), value),
            None => batch.remove(&part, n.to_be_bytes()),
        });
        batch.commit()
    };
    let retained_bytes = || part.metrics().pool.unwrap().version_bytes;
    batch_of(0..16_000, Some("v")).expect("a batch that replaces nothing retains nothing");
    // No snapshot is needed: replaced versions are retained until the whole batch is visible.
    for value in [None, Some("w")] {
        let error = batch_of(0..16_000, value).unwrap_err();
        assert!(error.kind() == ErrorKind::OutOfSpace && error.to_string().contains("several batches"), "{error}");
        assert_eq!((retained_bytes(), part.len().unwrap()), (0, 16_000), "nothing was changed");
    }
    let mut twice = db.batch();
    (0..16_000u32).for_each(|n| twice.insert(&part, (n % 10 + 20_000).to_be_bytes(), ""));
    assert_eq!(twice.commit().unwrap_err().kind(), ErrorKind::OutOfSpace, "a batch replaces its own records, too");
    let snapshot = db.snapshot();
    let refused = (0..16_000u32).step_by(1000).find_map(|n| Some((n, batch_of(n..n + 1000, None).err()?)));
    let (n, error) = refused.expect("the bound on versions refuses a removal");
    assert!(n >= 2000 && error.to_string().contains("snapshot"), "{n}: {error}");
    assert!(retained_bytes() <= (1 << 20) + (128 << 10), "{} bytes are retained", retained_bytes());
    assert_eq!((snapshot.len(&part).unwrap(), part.len().unwrap()), (16_000, u64::from(16_000 - n)));
    drop(snapshot);
    (n..16_000).step_by(1000).for_each(|n| batch_of(n..n + 1000, None).unwrap());
    assert!(part.is_empty().unwrap());
    // Replay retains no versions, so the bound refuses no acknowledged write.
    let (_db, part) = open(&after_kill(&machine), &pool_options(64 << 10, 64 << 10));
    assert!(part.is_empty().unwrap());
}

/// Each of two batches leaves no memory for the versions of the other. One waits for the other, and neither is refused.
#[test]
fn batches_wait_for_memory_of_each_other() {
    let (db, part) = open(&MemFs::new(), &pool_options(2 << 20, 64 << 10));
    let commit_all = |first: u32| {
        for round in 0..10u8 {
            let mut batch = db.batch();
            (first..first + 2500).for_each(|n| match round % 3 {
                2 => batch.remove(&part, n.to_be_bytes()),
                _ => batch.insert(&part, n.to_be_bytes(), [round]),
            });
            batch.commit().unwrap();
        }
    };
    std::thread::scope(|threads| {
        [0, 100_000, 200_000].into_iter().for_each(|first| drop(threads.spawn(move || commit_all(first))));
    });
    assert_eq!(part.len().unwrap(), 7500);
}

/// A batch reserved one leaf for each of its records, also if all of them belong to one leaf.
#[test]
fn a_batch_needs_leaves_where_its_keys_belong() {
    let (db, part) = open(&MemFs::new(), &pool_options(2 << 20, 64 << 10));
    let count = insert_until_full(&part, 0, b"12345678");
    // The remaining leaves are full: none of them can be compacted.
    (count - 1000..count).for_each(|n| part.remove(n.to_be_bytes()).unwrap());
    for first in [count, count + 300] {
        let commit = || {
            let mut batch = db.batch();
            (first..first + 300).for_each(|n| batch.insert(&part, n.to_be_bytes(), "12345678"));
            batch.commit()
        };
        let done = commit().or_else(|_| {
            wait_for_readers();
            commit()
        });
        assert!(done.is_ok(), "300 records where 1000 were removed: {done:?} {:?}", part.metrics().pool);
    }
}

/// A batch counted the free slots of existing leaves as space, and then leaf compaction filled these slots. The batch
/// was already in the WAL and split more leaves than it had reserved. That poisoned the database, which had the batch
/// after reopening.
#[test]
fn a_batch_needs_no_slots_that_packing_fills() {
    const MAX: u64 = 1 << 20;
    for (raised, spread, behind) in [(true, 8, 600), (true, 8, 1500), (true, 6, 600), (false, 8, 600)] {
        let machine = MemFs::new();
        let (db, part) = open(&machine, &pool_options(if raised { MAX / 2 } else { MAX }, 64 << 10));
        if raised {
            part.set_options(pool_options(MAX, 64 << 10)).unwrap();
        }
        let mut count = 0;
        while part.insert(format!("{count:06}0"), [7; 70]).is_ok() {
            count += 1;
        }
        (1..count).step_by(2).for_each(|n| part.remove(format!("{n:06}0")).unwrap());
        let mut batch = db.batch();
        (0..behind).for_each(|n| batch.insert(&part, format!("y{n:06}"), ""));
        for n in (1..count).step_by(2).filter(|n| n / 2 % 10 < spread) {
            batch.insert(&part, format!("{n:06}5"), "");
        }
        match batch.commit() {
            Ok(()) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::OutOfSpace, "{raised} {spread} {behind}: {error}"),
        }
        assert!(part.metrics().pool.unwrap().bytes <= MAX, "{raised} {spread} {behind}");
        part.remove("0000000").unwrap();
    }
}

/// The upper bound of a reverse range was the last key of its leaf. The iterator of the pool had ended there, so the
/// range began at the last key of the pool.
#[test]
fn reverse_range_begins_at_its_upper_bound() {
    let machine = MemFs::new();
    let (db, part) = open(&machine, &pool_options(64 << 20, 1 << 20));
    let key = |i: u32| i.wrapping_mul(0x9e37_79b9).to_be_bytes();
    let mut keys: Vec<[u8; 4]> = (0..1000).map(key).collect();
    keys.iter().for_each(|key| part.insert(key, "value").unwrap());
    keys.sort_unstable();
    for pair in keys.windows(2) {
        let last = |range: &mut dyn DoubleEndedIterator<Item = azekura::Result<_>>| range.next_back().unwrap().unwrap();
        let (included, _): (azekura::Slice, azekura::Slice) = last(&mut part.range(..=pair[1]));
        let (excluded, _): (azekura::Slice, azekura::Slice) = last(&mut part.range(..pair[1]));
        assert_eq!((&*included, &*excluded), (&pair[1][..], &pair[0][..]));
    }
    db.close().unwrap();
}

/// The pool reused the space of expired records while an iterator still had their slots. The iterator read other
/// records there.
#[test]
fn iterator_outlives_removal_of_expired_records() {
    let (machine, env) = (MemFs::new(), TestEnv::new(1));
    let fs: Arc<dyn Fs> = Arc::new(machine);
    let db = Config::new(Path::new("/db")).fs(fs).env(Arc::new(env.clone())).workers(0).open().unwrap();
    let part = db.open_partition("p", pool_options(64 << 10, 4 << 10)).unwrap();
    let lasting = |n: u32| n < 8 || n.is_multiple_of(4);
    for n in 0..40u32 {
        match lasting(n) {
            true => part.insert(n.to_be_bytes(), [1; 200]).unwrap(),
            false => part.insert_with_ttl(n.to_be_bytes(), [2; 200], Duration::from_secs(1)).unwrap(),
        }
    }
    env.advance(Duration::from_secs(2));
    let mut iter = part.iter();
    let mut found = vec![iter.next().unwrap().unwrap()];
    part.major_compact().unwrap();
    let others = std::cell::RefCell::new(1000u32..);
    // As many others fit as into a pool without the expired records, although the iterator exists.
    let equal = db.open_partition("q", pool_options(64 << 10, 4 << 10)).unwrap();
    (0..40u32).filter(|n| lasting(*n)).for_each(|n| equal.insert(n.to_be_bytes(), [1; 200]).unwrap());
    while equal.insert(others.borrow_mut().next().unwrap().to_be_bytes(), [0xff; 200]).is_ok() {}
    wait_until("the space of expired records is free", || {
        while part.insert(others.borrow_mut().next().unwrap().to_be_bytes(), [0xff; 200]).is_ok() {}
        part.len().unwrap() + 8 >= equal.len().unwrap()
    });
    found.extend(iter.by_ref().map(|pair| pair.unwrap()));
    let expected: Vec<u32> = (0..40).filter(|n| lasting(*n)).collect();
    assert_eq!(found.len(), expected.len());
    assert!(found.iter().zip(expected).all(|((key, value), n)| **key == n.to_be_bytes() && **value == [1; 200]));
}
