//! Pools whose files are mapped: single changes are durable without the WAL, batches through the WAL.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use azekura::fs::{DiskFs, Fs, OpenMode};
use azekura::testing::{MemFs, SeededRng, Survival, TestComparator, TestOrder};
use azekura::{Config, Database, ErrorKind, Partition, PersistMode, PersistenceLevel, inspect};

use super::{DIR, config, open_pool, pool_options};
use crate::testkit::env_u64;
use crate::testkit::property::{check_property, random_seeds};
use crate::testkit::seeds::test_seeds;

/// A machine with persistent memory.
pub(super) fn persistent_memory_fs() -> MemFs {
    let fs = MemFs::new();
    fs.set_mapped_memory(PersistenceLevel::PowerLoss);
    fs
}

fn partition_contents(part: &Partition) -> BTreeMap<Vec<u8>, Vec<u8>> {
    part.iter().map(|pair| pair.map(|(k, v)| (k.to_vec(), v.to_vec())).unwrap()).collect()
}

/// One operation on two mapped pools and an LSM partition.
fn random_action(
    db: &Database,
    partitions: &[Partition],
    rng: &mut SeededRng,
    models: &mut [BTreeMap<Vec<u8>, Vec<u8>>],
) {
    let key = |rng: &mut SeededRng| format!("key {:02}", rng.below(40)).into_bytes();
    let value = |rng: &mut SeededRng| {
        let len = rng.below(200) as usize;
        rng.random_bytes(len)
    };
    match rng.below(10) {
        0..=3 => {
            let (at, key, value) = (rng.below(2) as usize, key(rng), value(rng));
            partitions[at].insert(&key, &value).unwrap();
            models[at].insert(key, value);
        }
        4 | 5 => {
            let (at, key) = (rng.below(2) as usize, key(rng));
            partitions[at].remove(&key).unwrap();
            models[at].remove(&key);
        }
        6 => {
            // Commits of an LSM partition extend the WAL and sync it.
            let (key, value) = (key(rng), value(rng));
            partitions[2].insert(&key, &value).unwrap();
            db.persist(PersistMode::SyncData).unwrap();
            models[2].insert(key, value);
        }
        7 => {
            partitions.iter().for_each(|part| part.flush().unwrap());
            while db.step().unwrap() {}
        }
        _ => {
            let mut batch = db.batch();
            for _ in 0..1 + rng.below(5) {
                let (at, key, value) = (rng.below(3) as usize, key(rng), value(rng));
                if rng.chance_one_in(4) {
                    batch.remove(&partitions[at], &key);
                    models[at].remove(&key);
                } else {
                    batch.insert(&partitions[at], &key, &value);
                    models[at].insert(key, value);
                }
            }
            // A commit to LSM partitions only is as durable as its mode says; a commit with a mapped pool is always
            // durable.
            batch.durability(PersistMode::SyncData).commit().unwrap();
        }
    }
}

fn open(fs: &MemFs) -> (Database, Vec<Partition>) {
    let db = config(fs).wal_segment_size(64 << 10).open().unwrap();
    let mut partitions = vec![open_pool(&db, "left"), open_pool(&db, "right")];
    partitions.push(db.open_partition("tree", Default::default()).unwrap());
    (db, partitions)
}

/// Random operations, each followed by power losses of copies of the machine. Returns the number of power losses.
fn check_power_losses(seed: u64, steps: &[u64]) -> u64 {
    let mut crashes = 0;
    let fs = persistent_memory_fs();
    let (mut db, mut partitions) = open(&fs);
    db.persist(PersistMode::SyncData).unwrap();
    let mut models = vec![BTreeMap::new(); 3];
    for (at, step) in (0u64..).zip(steps) {
        let mut rng = SeededRng::new(*step);
        random_action(&db, &partitions, &mut rng, &mut models);
        for survival in [Survival::Nothing, Survival::Everything, Survival::Random] {
            if !rng.chance_one_in(4) {
                continue;
            }
            let crashed = fs.fork();
            crashed.crash(survival, at);
            crashed.set_mapped_memory(PersistenceLevel::PowerLoss);
            let (again, found) = open(&crashed);
            for (part, model) in found.iter().zip(&models) {
                let is_same = partition_contents(part) == *model;
                assert!(is_same, "seed {seed}, step {at}, {survival:?}: {}", part.name);
            }
            // The database accepts writes, and opens again.
            let mut after = models.clone();
            (0..5).for_each(|_| random_action(&again, &found, &mut rng.clone(), &mut after));
            drop((found, again));
            let (_again, found) = open(&crashed);
            found.iter().zip(&after).for_each(|(part, model)| assert!(partition_contents(part) == *model));
            crashes += 1;
        }
        if rng.chance_one_in(15) {
            drop(partitions);
            match rng.chance_one_in(2) {
                true => db.close().unwrap(),
                false => drop(db),
            }
            (db, partitions) = open(&fs);
        }
    }
    crashes
}

/// All acknowledged changes survive power loss, whatever part of the unsynced WAL survives.
#[test]
fn power_loss_keeps_acknowledged_pool_writes() {
    let crashes = Cell::new(0);
    let seeds = test_seeds((env_u64("AZEKURA_CRASH_POINTS", 3_000) / 1_000).max(1));
    for seed in &seeds {
        let seed = *seed;
        check_property("power_loss_keeps_acknowledged_pool_writes", seed, &random_seeds(128), |steps| {
            crashes.set(crashes.get() + check_power_losses(seed, &steps));
        });
    }
    println!("{} power losses", crashes.get());
    assert!(seeds.len() < 3 || crashes.get() > 150);
}

/// A database that is copied to a file system without persistent memory has images from then on.
#[test]
fn checkpoint_on_other_fs_continues_with_images() {
    let fs = persistent_memory_fs();
    let db = config(&fs).open().unwrap();
    let part = open_pool(&db, "pool");
    (0..500u32).for_each(|n| part.insert(n.to_be_bytes(), [1; 50]).unwrap());
    let copy = Path::new("/copy");
    db.checkpoint(copy).unwrap();
    part.insert("later", "1").unwrap();
    let disk = fs.fork();
    disk.set_mapped_memory(PersistenceLevel::WalOnly);
    let open = |dir: &str| {
        let db = config(&disk).open();
        let _ = dir;
        db
    };
    {
        let read = Config::new(DIR).fs(Arc::new(disk.clone())).open_read_only().unwrap();
        assert_eq!(read.partition("pool").unwrap().len().unwrap(), 501);
    }
    for round in 0..3u8 {
        let db = open(DIR).unwrap();
        let part = open_pool(&db, "pool");
        assert_eq!(part.metrics().pool.unwrap().persistence, PersistenceLevel::WalOnly);
        assert_eq!(part.len().unwrap(), 501 + u64::from(round));
        part.insert([round; 9], "new").unwrap();
        db.persist(PersistMode::SyncData).unwrap();
        if round > 0 {
            part.flush().unwrap();
        }
        let report = inspect::verify(&(Arc::new(disk.clone()) as Arc<dyn Fs>), Path::new(DIR), &mut |_, _| {}).unwrap();
        assert!(report.is_clean(), "{report:?}");
        disk.crash(Survival::Nothing, u64::from(round));
    }
    let db =
        Config::new(copy).fs(Arc::new(fs.clone())).env(Arc::new(azekura::testing::TestEnv::new(5))).open().unwrap();
    assert_eq!(db.partition("pool").unwrap().len().unwrap(), 500);
}

/// The file of a pool, and the offset of these bytes in it.
fn find_in_pool_file(fs: &MemFs, bytes: &[u8]) -> (PathBuf, u64) {
    let name = fs.read_dir(Path::new(DIR)).unwrap().into_iter().find(|entry| entry.name.ends_with(".pool")).unwrap();
    let path = Path::new(DIR).join(name.name);
    let mut all = vec![0; name.len as usize];
    fs.open(&path, OpenMode::Read).unwrap().read_exact_at(&mut all, 0).unwrap();
    let at = all.windows(bytes.len()).position(|window| window == bytes).unwrap();
    (path, at as u64)
}

fn verifies_clean(fs: &MemFs) -> bool {
    inspect::verify(&(Arc::new(fs.clone()) as Arc<dyn Fs>), Path::new(DIR), &mut |_, _| {}).unwrap().is_clean()
}

/// A pool that was closed cleanly is opened without reading every value; `verify` reads each. A pool that was not
/// closed cleanly is checked fully, also if nothing was changed since it was opened.
#[test]
fn open_trusts_closed_pool_but_verify_does_not() {
    for backwards in [false, true] {
        let fs = persistent_memory_fs();
        let part_of = |db: &Database| match backwards {
            true => {
                let order = Arc::new(TestComparator::minimal(TestOrder::Reversed));
                db.open_partition_with_comparator("pool", pool_options(4 << 20), order)
            }
            false => db.open_partition("pool", pool_options(4 << 20)),
        };
        let value = |n: u32| format!("the value that only {n:04} has");
        let db = config(&fs).open().unwrap();
        let part = part_of(&db).unwrap();
        (0..500u32).for_each(|n| part.insert(n.to_be_bytes(), value(n)).unwrap());
        (0..500u32).step_by(3).for_each(|n| part.remove(n.to_be_bytes()).unwrap());
        drop(part);
        db.close().unwrap();
        assert!(verifies_clean(&fs));
        let (path, at) = find_in_pool_file(&fs, value(301).as_bytes());
        fs.open(&path, OpenMode::Write).unwrap().write_at(b"T", at).unwrap();
        assert!(!verifies_clean(&fs), "a changed byte was not found");
        for _ in 0..2 {
            let db = config(&fs).open().unwrap();
            let part = part_of(&db).unwrap();
            assert_eq!(part.len().unwrap(), 333);
            assert_eq!(part.get(301u32.to_be_bytes()).unwrap().unwrap(), value(301).replacen('t', "T", 1));
            assert_eq!(part.get(302u32.to_be_bytes()).unwrap().unwrap(), value(302));
            drop(part);
            db.close().unwrap();
            assert!(!verifies_clean(&fs), "a close hid the changed byte");
        }
        // Opened and not closed: no change was made, but the pool cannot know that.
        let db = config(&fs).open().unwrap();
        let part = part_of(&db).unwrap();
        let after_kill = fs.fork();
        after_kill.crash(Survival::Everything, 0);
        after_kill.set_mapped_memory(PersistenceLevel::PowerLoss);
        let opened = config(&after_kill).open().and_then(|db| part_of(&db).map(drop));
        let error = opened.unwrap_err();
        assert_eq!((error.kind(), error.file()), (ErrorKind::Corruption, Some(&*path)));
        // A read-only open does not change the mark.
        drop(part);
        db.close().unwrap();
        drop(Config::new(DIR).fs(Arc::new(fs.clone())).open_read_only().unwrap());
        config(&fs).open().unwrap();
    }
}

#[test]
fn missing_pool_file_is_reported() {
    let fs = persistent_memory_fs();
    let db = config(&fs).open().unwrap();
    open_pool(&db, "pool").insert("k", "v").unwrap();
    db.close().unwrap();
    let name = fs.read_dir(Path::new(DIR)).unwrap().into_iter().find(|entry| entry.name.ends_with(".pool")).unwrap();
    let path = Path::new(DIR).join(name.name);
    fs.remove_file(&path).unwrap();
    let error = config(&fs).open().unwrap_err();
    assert_eq!(error.file(), Some(&*path), "{error}");
}

#[test]
fn tmpfs_pool_survives_process_and_reports_it() {
    let root = Path::new("/dev/shm");
    if !root.is_dir() || DiskFs::new().persistence_level(root) != PersistenceLevel::ProcessCrash {
        return println!("skipped: there is no file system in memory");
    }
    let place = tempfile::tempdir_in(root).unwrap();
    let open = || Config::new(place.path().join("db")).open().unwrap();
    let db = open();
    let part = open_pool(&db, "pool");
    assert_eq!(part.metrics().pool.unwrap().persistence, PersistenceLevel::ProcessCrash);
    (0..5_000u32).for_each(|n| part.insert(n.to_be_bytes(), n.to_le_bytes()).unwrap());
    (0..1_000u32).for_each(|n| part.remove(n.to_be_bytes()).unwrap());
    drop(part);
    db.close().unwrap();
    let part = open_pool(&open(), "pool");
    assert_eq!(part.len().unwrap(), 4_000);
    assert_eq!(part.get(4_321u32.to_be_bytes()).unwrap().unwrap(), 4_321u32.to_le_bytes());
}

/// A put under the key of a record must have a higher sequence number than the record, or it counts as a replayed
/// put and ignored. So an impossible sequence number is found at open, after a clean close or not.
#[test]
fn unassigned_seqno_in_pool_is_corruption() {
    let fs = persistent_memory_fs();
    let db = config(&fs).open().unwrap();
    let part = open_pool(&db, "pool");
    let value = |n: u32| format!("the value that only {n:04} has");
    (0..500u32).for_each(|n| part.insert(n.to_be_bytes(), value(n)).unwrap());
    drop(part);
    db.close().unwrap();
    // In the record, the key precedes the value, and the sequence number precedes the key, its highest byte last.
    let (path, at) = find_in_pool_file(&fs, value(301).as_bytes());
    fs.open(&path, OpenMode::Write).unwrap().write_at(&[0x7F], at - 5).unwrap();
    let opened = config(&fs).open().and_then(|db| db.open_partition("pool", pool_options(4 << 20)).map(drop));
    let error = opened.unwrap_err();
    assert_eq!((error.kind(), error.file()), (ErrorKind::Corruption, Some(&*path)));
}
