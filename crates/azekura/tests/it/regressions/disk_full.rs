//! Full disks and exhausted file descriptors.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use azekura::fs::{Fs, OpenMode};
use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, SeededRng, TestEnv};
use azekura::{
    Config, Database, EngineType, ErrorKind, GarbageCollection, KvSeparationOptions, Partition, PartitionCreateOptions,
    PersistMode, PmemOptions,
};

use crate::testkit::watchdog::wait_until;

fn config(fs: Arc<dyn Fs>) -> Config {
    Config::new("/db").fs(fs).env(Arc::new(TestEnv::new(1))).workers(0).wal_segment_size(64 << 10)
}

fn separated() -> PartitionCreateOptions {
    let separation = KvSeparationOptions::default().separation_threshold(100).blob_file_target_size(64 << 10);
    PartitionCreateOptions::default()
        .max_memtable_size(16 << 10)
        .with_kv_separation(separation.direct_write_threshold(4_000))
}

/// Many small tables and blob files in two partitions.
fn open_with_many_files(db: &Database, rounds: u8) -> (Partition, Partition) {
    let plain = db.open_partition("plain", PartitionCreateOptions::default()).unwrap();
    let separation = db.open_partition("apart", separated()).unwrap();
    for round in 0..rounds {
        plain.insert([round], [round; 50]).unwrap();
        plain.flush().unwrap();
        separation.insert([round], [round; 300]).unwrap();
        separation.flush().unwrap();
    }
    (plain, separation)
}

/// Every kind of call, in an order in which each needs files that the one before does not.
fn call_every_api(db: &Database, rounds: u8) {
    let plain = db.partition("plain").unwrap();
    let separation = db.partition("apart").unwrap();
    for _ in 0..2 {
        for round in 0..rounds {
            assert_eq!(plain.get([round]).unwrap().as_deref(), Some(&[round; 50][..]));
            assert_eq!(separation.get([round]).unwrap().as_deref(), Some(&[round; 300][..]));
        }
        // Segments are begun, direct blob writes are made, everything is synced.
        let mut rng = SeededRng::new(3);
        for n in 0..30u8 {
            let mut batch = db.batch();
            batch.durability(PersistMode::SyncData);
            batch.insert(&plain, [200, n], rng.random_bytes(7_000));
            batch.insert(&separation, [200, n], rng.random_bytes(5_000));
            batch.commit().unwrap();
        }
        plain.flush().unwrap();
        separation.flush().unwrap();
        db.open_partition("another", Default::default()).unwrap().insert("k", "v").unwrap();
        assert_eq!(plain.iter().count(), usize::from(rounds) + 30);
    }
    plain.major_compact().unwrap();
    separation.gc_scan().unwrap();
    separation.gc_with_space_amp_target(1.0).unwrap();
    assert_eq!(separation.iter().filter(|pair| pair.is_ok()).count(), usize::from(rounds) + 30);
    while db.step().unwrap() {}
}

/// The database never closed cached file handles of tables. Once a process had too many open files, every read and
/// write failed until the process ended.
#[test]
fn every_call_succeeds_when_few_files_may_open() {
    const ROUNDS: u8 = 40;
    let machine = MemFs::new();
    let fs = FaultFs::new(Arc::new(machine.clone()));
    let shared: Arc<dyn Fs> = Arc::new(fs.clone());
    let db = config(Arc::clone(&shared)).open().unwrap();
    open_with_many_files(&db, ROUNDS);
    call_every_api(&db, ROUNDS);
    assert!(fs.open_count() > 40, "too few open files for the test: {}", fs.open_count());
    // The rest of the process suddenly needs most of the file handles.
    fs.limit_open(Some(14));
    call_every_api(&db, ROUNDS);
    db.checkpoint("/copy").unwrap();
    db.close().unwrap();
    // Handles of replaced file sets close when readers of other tests in this process unpin.
    wait_until("all files are closed", || fs.open_count() == 0);
    // The limit does not keep a database from opening.
    for dir in ["/db", "/copy"] {
        let reader = Config::new(dir).fs(Arc::clone(&shared)).env(Arc::new(TestEnv::new(2))).open_read_only().unwrap();
        assert_eq!(reader.partition("plain").unwrap().iter().count(), usize::from(ROUNDS) + 30);
        drop(reader);
        let db = Config::new(dir).fs(Arc::clone(&shared)).env(Arc::new(TestEnv::new(3))).workers(0).open().unwrap();
        db.partition("plain").unwrap().insert("after", "v").unwrap();
        db.close().unwrap();
    }
}

/// While no more file may be opened, calls fail or succeed. Afterwards the database works as before, and no commit with
/// a requested sync is lost. Earlier, a directory that could not be opened counted as a failed sync.
#[test]
fn calls_work_again_when_files_may_open_again() {
    for extra in 0..6 {
        let machine = MemFs::new();
        let fs = FaultFs::new(Arc::new(machine.clone()));
        let db = config(Arc::new(fs.clone())).open().unwrap();
        let (plain, separation) = open_with_many_files(&db, 3);
        let mut rng = SeededRng::new(9);
        let (mut sure, mut failed) = (Vec::new(), 0);
        for n in 0..60u8 {
            // A few free descriptors at some times, none at others.
            fs.limit_open(Some(3 + usize::from(n % (extra + 1))));
            let mut batch = db.batch();
            batch.durability(PersistMode::SyncData);
            batch.insert(&plain, [100, n], rng.random_bytes(4_000));
            batch.insert(&separation, [100, n], rng.random_bytes(4_000 + 20 * usize::from(n)));
            match batch.commit() {
                Ok(()) => sure.push(n),
                Err(_) => failed += 1,
            }
            // Durable with the next sync that succeeds, also if the sync of another value of its blob file fails.
            let buffered = separation.insert([101, n], rng.random_bytes(4_000)).is_ok();
            let mut batch = db.batch();
            batch.durability(PersistMode::SyncData);
            batch.insert(&separation, [102, n], rng.random_bytes(4_000));
            let _ = batch.commit();
            fs.limit_open(None);
            if db.persist(PersistMode::SyncData).is_ok() && buffered && n % 7 == 0 {
                let after = super::open(&super::after_power_loss(&machine), "/db", 7);
                assert!(after.partition("apart").unwrap().get([101, n]).unwrap().is_some(), "{extra} more files: {n}");
            }
            fs.limit_open(Some(3 + usize::from(n % (extra + 1))));
            let _ = (plain.flush(), separation.flush(), db.step());
        }
        assert!(failed > 0, "{extra} more files: the limit had no effect");
        fs.limit_open(None);
        assert!(!db.metrics().poisoned, "{extra} more files");
        plain.insert("after", "v").unwrap();
        db.persist(PersistMode::SyncAll).unwrap();
        plain.major_compact().unwrap();
        separation.major_compact().unwrap();
        let db = super::open(&super::after_power_loss(&machine), "/db", 7);
        let (plain, separation) = (db.partition("plain").unwrap(), db.partition("apart").unwrap());
        for n in sure {
            assert!(
                plain.contains_key([100, n]).unwrap() && separation.get([100, n]).unwrap().is_some(),
                "{extra} more files: {n}"
            );
        }
        assert!(plain.contains_key("after").unwrap());
    }
}

/// A commit with a requested sync must make the name of a blob file durable, and could not open the directory. From
/// then on the file counted as synced, so a later sync did not make its acknowledged values durable. Power loss removed
/// the file.
#[test]
fn persist_covers_a_blob_file_that_failed_before() {
    let machine = MemFs::new();
    let fs = FaultFs::new(Arc::new(machine.clone()));
    let db = config(Arc::new(fs.clone())).open().unwrap();
    let separation = db.open_partition("apart", separated()).unwrap();
    db.persist(PersistMode::SyncAll).unwrap();
    separation.insert("buffered", [1; 5_000]).unwrap();
    fs.inject(FaultPlan::new(OpKind::SyncDir, 1, Fault::TooManyOpenFiles));
    let mut batch = db.batch();
    batch.durability(PersistMode::SyncData);
    batch.insert(&separation, "synced", [2; 5_000]);
    assert_eq!(batch.commit().unwrap_err().kind(), ErrorKind::Io);
    db.persist(PersistMode::SyncAll).unwrap();
    let after = super::open(&super::after_power_loss(&machine), "/db", 7);
    assert_eq!(after.partition("apart").unwrap().get("buffered").unwrap().as_deref(), Some(&[1; 5_000][..]));
}

/// Before a sync of the WAL, the database makes the name of a blob file durable. If it could not open the directory,
/// that counted as a failed sync, and all later writes failed.
#[test]
fn writes_go_on_when_a_directory_did_not_open() {
    let machine = MemFs::new();
    let fs = FaultFs::new(Arc::new(machine.clone()));
    let db = config(Arc::new(fs.clone())).open().unwrap();
    let separation = db.open_partition("apart", separated()).unwrap();
    for round in 0..3u8 {
        separation.insert([round], [round; 5_000]).unwrap();
        fs.limit_open(Some(fs.open_count()));
        assert_eq!(db.persist(PersistMode::SyncAll).unwrap_err().kind(), ErrorKind::Io, "{round}");
        fs.limit_open(None);
        db.persist(PersistMode::SyncAll).unwrap();
        separation.flush().unwrap();
    }
    separation.insert("last", [7; 5_000]).unwrap();
    db.persist(PersistMode::SyncData).unwrap();
    let db = super::open(&super::after_power_loss(&machine), "/db", 7);
    assert_eq!(db.partition("apart").unwrap().iter().filter(|pair| pair.is_ok()).count(), 4);
}

/// Set in the process with few file handles; the value is the directory.
const FEW_FILES_ENV: &str = "AZEKURA_FEW_FILES";

#[test]
fn few_files_child() {
    let Some(dir) = std::env::var_os(FEW_FILES_ENV) else { return };
    let dir = Path::new(&dir);
    let config = || Config::new(dir.join("db")).workers(2).wal_segment_size(64 << 10);
    let db = config().open().unwrap();
    open_with_many_files(&db, 40);
    call_every_api(&db, 40);
    db.close().unwrap();
    let db = config().open().unwrap();
    assert_eq!(db.partition("plain").unwrap().iter().count(), 70);
}

/// Runs a child process with a real limit of 64 file handles, and the default of `max_open_files`.
#[test]
fn a_process_may_open_64_files() {
    let dir = tempfile::tempdir().unwrap();
    let program = std::env::current_exe().unwrap();
    let script = "ulimit -n 64 && exec \"$0\" --exact regressions::disk_full::few_files_child --nocapture";
    let child = Command::new("sh").arg("-c").arg(script).arg(program).env(FEW_FILES_ENV, dir.path()).output().unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
}

fn insert_until_full(p: &Partition, rng: &mut SeededRng) -> Vec<[u8; 4]> {
    insert_from_until_full(p, rng, 0)
}

/// Inserts the numbers from `first` on, and returns those before the first refused one.
fn insert_from_until_full(p: &Partition, rng: &mut SeededRng, first: u32) -> Vec<[u8; 4]> {
    let mut keys = Vec::new();
    for n in first..first + 100_000 {
        match p.insert(n.to_be_bytes(), rng.random_bytes(1_000)) {
            Ok(()) => keys.push(n.to_be_bytes()),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::OutOfSpace, "{error}");
                assert!(!p.contains_key(n.to_be_bytes()).unwrap(), "a refused write is visible");
                return keys;
            }
        }
    }
    panic!("the disk never becomes full");
}

/// Inserts as soon as writing resumes: a task that uses the reserve delays that until it ends.
fn insert_when_resumed(p: &Partition, key: &str, value: &str) {
    wait_until("writing resumes, because there is space", || {
        p.insert(key, value).inspect_err(|error| assert_eq!(error.kind(), ErrorKind::OutOfSpace)).is_ok()
    });
}

/// Removes a key as soon as the reserve has space for it: a flush that is repeated takes all of it until it ends.
fn remove_when_reserved(p: &Partition, key: &[u8]) {
    wait_until("no flush uses the reserve", || {
        p.remove(key).inspect_err(|error| assert_eq!(error.kind(), ErrorKind::OutOfSpace)).is_ok()
    });
}

/// On a full disk, the database refused removals. So no call could free space, and the database did not open again.
#[test]
fn full_disk_empties_when_all_is_removed() {
    let machine = MemFs::new();
    machine.set_capacity(Some(16 << 20));
    let open = || {
        let fs: Arc<dyn Fs> = Arc::new(machine.clone());
        Config::new("/db").fs(fs).workers(2).wal_segment_size(1 << 20).max_wal_size(4 << 20).open().unwrap()
    };
    let options = PartitionCreateOptions::default().max_memtable_size(512 << 10);
    let db = open();
    let p = db.open_partition("p", options).unwrap();
    let keys = insert_until_full(&p, &mut SeededRng::new(1));
    keys.iter().for_each(|key| remove_when_reserved(&p, key));
    p.flush().unwrap();
    p.major_compact().unwrap();
    insert_when_resumed(&p, "small", "value");
    // Inserts may be refused for a moment, while a flush or a compaction uses the reserve and the space of its input.
    let (mut again, mut rng) = (Vec::new(), SeededRng::new(2));
    wait_until("half as many keys fit again", || {
        again.extend(insert_from_until_full(&p, &mut rng, again.len() as u32));
        again.len() > keys.len() / 2
    });
    drop(p);
    let _full = db.close();
    let db = open();
    let p = db.partition("p").unwrap();
    assert_eq!(p.len().unwrap(), again.len() as u64 + 1);
    p.remove("small").unwrap();
    machine.set_capacity(Some(20 << 20));
    insert_when_resumed(&p, "space", "is back");
}

/// A process is killed on a full disk repeatedly, after a few removals or while it opens. The attempts do not use up
/// the space that opening needs.
#[test]
fn full_disk_opens_when_killed_many_times() {
    let machine = MemFs::new();
    machine.set_capacity(Some(4 << 20));
    let open = |machine: &MemFs, salt: u64| {
        let fs: Arc<dyn Fs> = Arc::new(machine.clone());
        config(fs).env(Arc::new(TestEnv::new(salt))).open()
    };
    let db = open(&machine, 0).unwrap();
    let p = db.open_partition("p", PartitionCreateOptions::default()).unwrap();
    let mut keys = insert_until_full(&p, &mut SeededRng::new(3));
    keys.reverse();
    let (mut machine, mut refused) = (machine.fork(), 0);
    for life in 0..80 {
        let db = open(&machine, life).unwrap_or_else(|error| panic!("life {life}: {error}"));
        let p = db.partition("p").unwrap();
        assert_eq!(p.len().unwrap(), keys.len() as u64, "life {life}");
        match p.remove(keys.last().unwrap()) {
            Ok(()) => drop(keys.pop()),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::OutOfSpace);
                refused += 1;
            }
        }
        machine = machine.fork();
        // Killed while it opens, after this number of operations.
        machine.freeze_after(Some(life % 40));
        let _killed = open(&machine, life + 1_000);
        machine.crash(azekura::testing::Survival::Everything, 0);
    }
    assert!(refused < 80, "no removal was accepted");
    machine.set_capacity(Some(8 << 20));
    let db = open(&machine, 999).unwrap();
    db.partition("p").unwrap().insert("space", "is back").unwrap();
}

/// On a full disk, an insert and a removal are in one commit group. The insert is refused, and the removal succeeds.
#[test]
fn removals_pass_when_inserts_are_refused() {
    let machine = MemFs::new();
    machine.set_capacity(Some(8 << 20));
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    // No worker, because a flush may use the space that is reserved for removals.
    let db = Config::new("/db").fs(fs).workers(0).wal_segment_size(256 << 10).max_wal_size(1 << 20).open().unwrap();
    let p = db.open_partition("p", PartitionCreateOptions::default().max_memtable_size(256 << 10)).unwrap();
    let keys = insert_until_full(&p, &mut SeededRng::new(4));
    std::thread::scope(|scope| {
        for writer in 0..2u8 {
            let p = p.clone();
            scope.spawn(move || {
                let mut rng = SeededRng::new(u64::from(writer));
                for n in 0..200u8 {
                    let refused = p.insert([writer, n], rng.random_bytes(20_000));
                    assert!(refused.is_ok() || refused.is_err_and(|error| error.kind() == ErrorKind::OutOfSpace));
                }
            });
        }
        keys.iter().take(1_000).for_each(|key| p.remove(key).unwrap());
    });
}

/// A checkpoint of a pool writes each page twice. Small changes in many places change more bytes of pages than of the
/// WAL. The size of the reserve followed that of the WAL only, so no checkpoint ran on a full disk.
#[test]
fn pools_reach_their_files_on_full_disks() {
    // Many records, or few changes of a large image; alone, or two in a batch.
    for (records, len, then) in [(1_000, 3_000, 0), (1_000, 1_000, 0), (3_000, 1_000, 150)] {
        for single in [false, true] {
            let what = format!("{records} of {len} bytes, then {then}, single {single}");
            let machine = MemFs::new();
            let fs: Arc<dyn Fs> = Arc::new(machine.clone());
            let db = config(fs).mapped_wal(false).open().unwrap();
            let pool = EngineType::Pmem(PmemOptions::default().max_size(64 << 20));
            let p = db.open_partition("pool", PartitionCreateOptions::default().engine(pool)).unwrap();
            let write = |n: u64, len: usize| {
                let (one, other) = ((2 * n).to_be_bytes(), (2 * n + 1).to_be_bytes());
                if single {
                    [one, other].iter().for_each(|key| p.insert(key, vec![7; len]).unwrap());
                } else {
                    let mut batch = db.batch();
                    [one, other].iter().for_each(|key| batch.insert(&p, key, vec![7; len]));
                    batch.commit().unwrap();
                }
            };
            (0..records).for_each(|n| write(n, len));
            if then > 0 {
                p.flush().unwrap();
                (0..then).for_each(|n| write(n * records / then, 10));
            }
            let reserve = machine.open(Path::new("/db/RESERVE"), OpenMode::Read).unwrap().length().unwrap();
            machine.set_capacity(Some(machine.used_space()));
            p.flush().unwrap_or_else(|e| panic!("{what}, with a reserve of {reserve} bytes: {e}"));
        }
    }
}

/// At opening, the existing reserve was divided as if checkpoints of pools needed no space. Compactions got the part
/// for checkpoints. After a reopen on a full disk, no checkpoint ran.
#[test]
fn reserve_of_pools_is_the_same_after_reopening() {
    let machine = MemFs::new();
    let open = || config(Arc::new(machine.clone())).mapped_wal(false).open().unwrap();
    let db = open();
    let tables = db.open_partition("tables", Default::default()).unwrap();
    let mut rng = SeededRng::new(1);
    for round in 0..6u8 {
        (0..40u8).for_each(|n| tables.insert([n, round], rng.random_bytes(20_000)).unwrap());
        tables.flush().unwrap();
    }
    let pool = EngineType::Pmem(PmemOptions::default().max_size(64 << 20));
    let pool = db.open_partition("pool", PartitionCreateOptions::default().engine(pool)).unwrap();
    (0..1_000u32).for_each(|n| pool.insert(n.to_be_bytes(), vec![7; 1_000]).unwrap());
    machine.set_capacity(Some(machine.used_space()));
    let reserve = || machine.open(Path::new("/db/RESERVE"), OpenMode::Read).unwrap().length().unwrap();
    let full = reserve();
    (0..).take_while(|_| reserve() == full).for_each(|n: u64| tables.remove(n.to_be_bytes()).unwrap());
    machine.freeze_after(Some(0));
    drop((tables, pool, db));
    machine.freeze_after(None);

    let db = open();
    let found = reserve();
    assert!(found < full && found > 0, "{found} of {full} bytes");
    // The input files of a compaction stay on disk while an iterator uses them.
    let tables = db.partition("tables").unwrap();
    let mut iter = tables.iter();
    iter.next().unwrap().unwrap();
    assert_eq!(tables.major_compact().map_err(|error| error.kind()), Err(ErrorKind::OutOfSpace));
    let reserve_bytes = reserve();
    db.partition("pool")
        .unwrap()
        .flush()
        .unwrap_or_else(|e| panic!("the reserve has {reserve_bytes} of {found} bytes: {e}"));
}

/// Each blob file of direct writes has an open file handle until a flush names it. There are few such files, because
/// the bytes that pointers refer to count as bytes of the memtable.
#[test]
fn few_files_stay_open_when_values_are_large() {
    for workers in [0, 2] {
        let machine = MemFs::new();
        let fs = FaultFs::new(Arc::new(machine.clone()));
        let db = config(Arc::new(fs.clone())).workers(workers).open().unwrap();
        // The pointers alone would fit one memtable.
        let separation = db.open_partition("apart", separated().max_memtable_size(4 << 20)).unwrap();
        let (mut rng, mut max_open) = (SeededRng::new(5), 0);
        for n in 0..3_000u32 {
            separation.insert(n.to_be_bytes(), rng.random_bytes(5_000)).unwrap();
            if workers == 0 {
                db.step().unwrap();
            }
            max_open = max_open.max(fs.open_count());
        }
        // Workers may lag behind on a busy machine; without the rule there would be 3,000.
        let bound = if workers == 0 { 120 } else { 600 };
        assert!(max_open < bound, "{max_open} open files with {workers} workers");
    }
}
