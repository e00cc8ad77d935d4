//! Pool files: creation, images, close and reopen, comparators.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::thread;

use azekura::fs::{DiskFs, Fs};
use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, Survival, TestComparator, TestEnv, TestOrder};
use azekura::{
    Comparator, Config, Database, EngineType, ErrorKind, Partition, PartitionCreateOptions, PersistMode,
    PersistenceLevel, PmemOptions, Result, inspect,
};

use crate::testkit::test_dir::{read_file, write_file};

fn config(fs: &MemFs, salt: u64) -> Config {
    Config::new(Path::new("/db")).fs(Arc::new(fs.clone())).env(Arc::new(TestEnv::new(salt))).workers(0)
}

fn pool_options() -> PartitionCreateOptions {
    let options = PmemOptions::default().max_size(4 << 20).growth_step(64 << 10);
    PartitionCreateOptions::default().engine(EngineType::Pmem(options))
}

/// A file system whose files can be mapped, as on tmpfs.
fn tmpfs_machine() -> MemFs {
    let fs = MemFs::new();
    fs.set_mapped_memory(PersistenceLevel::ProcessCrash);
    fs
}

/// The order of bytes, with the default of every optional method.
fn plain_order() -> Arc<TestComparator> {
    Arc::new(TestComparator::minimal(TestOrder::Bytes))
}

const KEYS: u64 = 60;

fn key(n: u64) -> [u8; 8] {
    n.to_be_bytes()
}

/// Every byte of a value depends on its key; long values are copied separately from their keys.
fn value(n: u64) -> Vec<u8> {
    vec![n as u8; if n.is_multiple_of(2) { 40 } else { 3000 }]
}

fn insert_all(part: &Partition) {
    (0..KEYS).for_each(|n| part.insert(key(n), value(n)).unwrap());
}

/// Overwrites the space of all values with the values of other keys.
fn overwrite_freed_space(part: &Partition) {
    for round in 0..3 {
        (0..KEYS).for_each(|n| part.insert(key(KEYS + n), value(n + 100 + round)).unwrap());
        (0..KEYS).for_each(|n| part.remove(key(n)).unwrap());
    }
}

fn assert_closed<T: std::fmt::Debug>(read: Result<T>) {
    let error = read.expect_err("the database was closed and another process uses its files");
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
}

/// A read of a pool on tmpfs was in progress while the database was closed, opened again and written to. The read
/// copied bytes of the new writes. It returned the value of another key, or `None` for a key that was never removed. In
/// this test, the comparator of the read closes, opens and writes.
#[test]
fn read_is_closed_when_pool_is_reopened_under_it() {
    type ReadCall = fn(&Partition) -> Result<Option<Vec<u8>>>;
    let reads: [ReadCall; 5] = [
        |part| Ok(part.get(key(31))?.map(|value| value.to_vec())),
        |part| Ok(part.size_of(key(31))?.map(|size| vec![31; size as usize])),
        |part| Ok(part.range(key(31)..).next().transpose()?.map(|(_, value)| value.to_vec())),
        |part| Ok(part.range(..=key(31)).next_back().transpose()?.map(|(_, value)| value.to_vec())),
        |part| {
            let mut iter = part.range(key(31)..);
            let borrowed = iter.next_ref().transpose()?.map(|(_, value)| value.to_vec());
            Ok(borrowed)
        },
    ];
    for read in reads {
        let (fs, order) = (tmpfs_machine(), plain_order());
        let db = config(&fs, 1).open().unwrap();
        let part = db.open_partition_with_comparator("p", pool_options(), order.clone()).unwrap();
        insert_all(&part);
        assert_eq!(read(&part).unwrap(), Some(value(31)));
        let after = fs.clone();
        order.call_once(move || {
            db.close().unwrap();
            let db = config(&after, 2).open().unwrap();
            let part = db.open_partition_with_comparator("p", pool_options(), plain_order()).unwrap();
            overwrite_freed_space(&part);
            drop(part);
            db.close().unwrap();
        });
        assert_closed(read(&part));
        assert!(!order.cancel_call(), "the read called the comparator");
    }
}

/// As the test above, but another thread closes the database. The lock on the directory is not released while a read
/// uses a mapped pool, so the read finds the old content.
#[test]
fn close_waits_for_reads_inside_a_memory_pool() {
    let (fs, order) = (tmpfs_machine(), plain_order());
    let db = config(&fs, 1).open().unwrap();
    let part = db.open_partition_with_comparator("p", pool_options(), order.clone()).unwrap();
    insert_all(&part);
    let closer = Arc::new(Mutex::new(None));
    let (closing, other_handle, after) = (Arc::clone(&closer), part.clone(), fs.clone());
    order.call_once(move || {
        *closing.lock().unwrap() = Some(thread::spawn(move || db.close().unwrap()));
        // Gives the closing thread time to wait for the read.
        while other_handle.get(key(1)).is_ok() {
            thread::yield_now();
        }
        for salt in 0..20 {
            thread::yield_now();
            assert_eq!(config(&after, salt).open().unwrap_err().kind(), ErrorKind::Locked, "a read is in progress");
        }
    });
    assert_closed(part.get(key(31)));
    closer.lock().unwrap().take().unwrap().join().unwrap();
    config(&fs, 2).open().unwrap();
}

/// An iterator of a mapped pool read bytes of a database that had opened the file later.
#[test]
fn iters_are_closed_when_database_is_reopened() {
    let lsm = PartitionCreateOptions::default;
    for (fs, options) in [(tmpfs_machine(), pool_options()), (MemFs::new(), pool_options()), (MemFs::new(), lsm())] {
        let db = config(&fs, 1).open().unwrap();
        let part = db.open_partition("p", options.clone()).unwrap();
        insert_all(&part);
        part.flush().unwrap();
        let snapshot = db.snapshot();
        let (mut up, mut down, mut both, mut entries) =
            (part.iter(), part.iter(), snapshot.iter(&part), part.entries());
        let (mut fresh, mut borrowed) = (part.iter(), part.iter());
        up.next().unwrap().unwrap();
        down.next_back().unwrap().unwrap();
        both.next().unwrap().unwrap();
        both.next_back().unwrap().unwrap();
        borrowed.next_ref().unwrap().unwrap();
        let entry = entries.next().unwrap().unwrap();
        db.close().unwrap();
        let db = config(&fs, 2).open().unwrap();
        overwrite_freed_space(&db.open_partition("p", options).unwrap());
        assert_closed(up.next().unwrap());
        assert_closed(down.next_back().unwrap());
        assert_closed(both.next_back().unwrap());
        assert_closed(entries.next().unwrap());
        assert_closed(fresh.next().unwrap());
        assert_closed(borrowed.next_ref().unwrap());
        assert_closed(snapshot.get(&part, key(3)));
        assert_closed(part.insert(key(3), "v"));
        assert!([up.next(), down.next(), both.next(), fresh.next_back()].iter().all(Option::is_none), "it has ended");
        assert_eq!(entry.value().unwrap(), value(0), "the value was read before");
    }
}

/// A partition is deleted and created again under its name. Readers of the deleted partition get its old content.
#[test]
fn pool_iters_continue_when_partition_is_deleted() {
    for (fs, options) in [
        (tmpfs_machine(), pool_options()),
        (MemFs::new(), pool_options()),
        (MemFs::new(), PartitionCreateOptions::default()),
    ] {
        let db = config(&fs, 1).open().unwrap();
        let part = db.open_partition("p", options.clone()).unwrap();
        insert_all(&part);
        let (mut up, mut down) = (part.iter(), part.iter());
        up.next().unwrap().unwrap();
        down.next_back().unwrap().unwrap();
        db.delete_partition(part.clone()).unwrap();
        let again = db.open_partition("p", options).unwrap();
        overwrite_freed_space(&again);
        assert_closed(part.get(key(1)));
        let right = |pair: Result<(azekura::Slice, azekura::Slice)>, n: u64| {
            let (found, bytes) = pair.unwrap();
            assert!(found == key(n) && bytes == value(n), "key {n}");
        };
        (1..KEYS).for_each(|n| right(up.next().unwrap(), n));
        (0..KEYS - 1).rev().for_each(|n| right(down.next_back().unwrap(), n));
    }
}

/// State shared by the readers and the thread that closes, opens and deletes.
struct ConcurrentReaders {
    current_partition: RwLock<Partition>,
    stop: AtomicBool,
    reads: AtomicU64,
}

impl ConcurrentReaders {
    /// Reads in one of several ways, and checks that each value belongs to its key, in any round.
    fn read_randomly(&self, way: u64) {
        let right = |n: u64, bytes: &[u8]| {
            assert!(
                bytes.len() == 2000 && bytes.iter().all(|byte| *byte == n as u8),
                "way {way}: the value of another key than {n}"
            );
        };
        let number = |key: &[u8]| u64::from_be_bytes(key.try_into().expect("keys have eight bytes"));
        let mut n = way;
        while !self.stop.load(Ordering::Relaxed) {
            n = (n * 13 + 7) % 50;
            let part = self.current_partition.read().unwrap().clone();
            let read = || -> Result<()> {
                match way % 4 {
                    0 => right(n, &part.get(key(n))?.expect("the key is never removed")),
                    1 => {
                        let (found, bytes) =
                            part.range(key(n)..).next().transpose()?.expect("the key is never removed");
                        assert_eq!(number(&found), n);
                        right(n, &bytes);
                    }
                    2 => {
                        for (pair, n) in part.iter().rev().zip((0..50).rev()) {
                            let (found, bytes) = pair?;
                            assert_eq!(number(&found), n);
                            right(n, &bytes);
                        }
                    }
                    _ => {
                        let (mut iter, mut n) = (part.iter(), 0);
                        while let Some(pair) = iter.next_ref() {
                            let (found, bytes) = pair?;
                            assert_eq!(number(found), n);
                            right(n, bytes);
                            n += 1;
                        }
                        assert_eq!(n, 50);
                    }
                }
                Ok(())
            };
            if let Err(error) = read() {
                assert_eq!(error.kind(), ErrorKind::Closed, "way {way}: {error}");
            }
            self.reads.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Ends the readers, also when a check has failed.
struct StopReadersGuard<'a>(&'a ConcurrentReaders);

impl Drop for StopReadersGuard<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

fn fill(part: &Partition) {
    (0..50).for_each(|n| part.insert(key(n), vec![n as u8; 2000]).unwrap());
}

fn rounds() -> u64 {
    crate::testkit::env_u64("AZEKURA_REOPENINGS", 9)
}

/// Closes, opens and fills the database while readers run. In every second round the partition is deleted and created
/// again; readers that find no key then have a handle of the deleted partition.
fn reopen_during_reads(fs: &Arc<dyn Fs>, dir: &Path, options: &PartitionCreateOptions) {
    let open = || {
        let db = Config::new(dir).fs(Arc::clone(fs)).workers(1).open().unwrap();
        let part = db.open_partition("p", options.clone()).unwrap();
        fill(&part);
        (db, part)
    };
    let (mut db, part): (Database, Partition) = open();
    let readers = ConcurrentReaders {
        current_partition: RwLock::new(part),
        stop: AtomicBool::new(false),
        reads: AtomicU64::new(0),
    };
    thread::scope(|scope| {
        let _stopped = StopReadersGuard(&readers);
        let readers = &readers;
        let threads: Vec<_> = (0..4).map(|way| scope.spawn(move || readers.read_randomly(way))).collect();
        for round in 0..rounds() {
            let before = readers.reads.load(Ordering::Relaxed);
            while readers.reads.load(Ordering::Relaxed) < before + 4
                && !threads.iter().any(|thread| thread.is_finished())
            {
                thread::yield_now();
            }
            let part = match round % 3 {
                0 => {
                    let old = readers.current_partition.read().unwrap().clone();
                    db.delete_partition(old).unwrap();
                    let part = db.open_partition("p", options.clone()).unwrap();
                    fill(&part);
                    part
                }
                _ => {
                    db.close().unwrap();
                    let (next, part) = open();
                    db = next;
                    part
                }
            };
            *readers.current_partition.write().unwrap() = part;
        }
    });
    println!("{} reads", readers.reads.load(Ordering::Relaxed));
}

#[test]
fn reads_are_right_or_closed_during_reopening() {
    let disk: Arc<dyn Fs> = Arc::new(DiskFs::new());
    for place in [tempfile::tempdir_in("/dev/shm").ok(), tempfile::tempdir().ok()].into_iter().flatten() {
        reopen_during_reads(&disk, &place.path().join("pool"), &pool_options());
        reopen_during_reads(&disk, &place.path().join("lsm"), &PartitionCreateOptions::default());
    }
    reopen_during_reads(&(Arc::new(tmpfs_machine()) as Arc<dyn Fs>), Path::new("/db"), &pool_options());
}

const POOL_PATH: &str = "/db/p000001.pool";

fn open_pool_database(fs: &MemFs) -> Result<Database> {
    config(fs, 9).open()
}

/// Opening, read-only opening and `verify` return an error for the wrong file of the pool.
fn assert_refused(fs: &MemFs, what: &str) {
    for opened in [open_pool_database(fs), config(fs, 8).open_read_only()] {
        let error = opened.expect_err(what);
        assert_eq!(
            (error.kind(), error.file()),
            (ErrorKind::Corruption, Some(Path::new(POOL_PATH))),
            "{what}: {error}"
        );
    }
    let report = inspect::verify(&(Arc::new(fs.clone()) as Arc<dyn Fs>), Path::new("/db"), &mut |_, _| {}).unwrap();
    assert!(!report.is_clean(), "{what}: verify finds nothing");
}

/// A database with a pool that was written to and closed this number of times; the files of its pool after each
/// close.
fn pool_images_after_reopens(fs: &MemFs, count: u8, salt: u64) -> Vec<Vec<u8>> {
    let mut files = Vec::new();
    for life in 0..count {
        let db = config(fs, salt + u64::from(life)).open().unwrap();
        let part = db.open_partition("p", pool_options()).unwrap();
        part.insert([life], [life; 100]).unwrap();
        drop(part);
        db.close().unwrap();
        files.push(read_file(fs, Path::new(POOL_PATH)));
    }
    files
}

/// An image of a pool from before its last checkpoint was opened as the newest one. The changes of the last flush were
/// lost without an error, because their records were no longer in the WAL.
#[test]
fn older_image_is_refused() {
    let fs = MemFs::new();
    let files = pool_images_after_reopens(&fs, 3, 1);
    for (life, bytes) in files.iter().enumerate().take(2) {
        write_file(&fs, Path::new(POOL_PATH), bytes);
        assert_refused(&fs, &format!("the image of open {life}"));
    }
    write_file(&fs, Path::new(POOL_PATH), &files[2]);
    assert_eq!(open_pool_database(&fs).unwrap().partition("p").unwrap().len().unwrap(), 3);
}

/// The pool of another database, with the same name and the same partition number, was opened.
#[test]
fn pool_of_another_database_is_refused() {
    for level in [PersistenceLevel::WalOnly, PersistenceLevel::ProcessCrash, PersistenceLevel::PowerLoss] {
        let (fs, other) = (MemFs::new(), MemFs::new());
        [&fs, &other].into_iter().for_each(|fs| fs.set_mapped_memory(level));
        let own = pool_images_after_reopens(&fs, 2, 1).pop().unwrap();
        let foreign = pool_images_after_reopens(&other, 4, 50).pop().unwrap();
        write_file(&fs, Path::new(POOL_PATH), &foreign);
        assert_refused(&fs, &format!("{level:?}"));
        write_file(&fs, Path::new(POOL_PATH), &own);
        assert_eq!(open_pool_database(&fs).unwrap().partition("p").unwrap().len().unwrap(), 2);
    }
}

/// After a crash between a checkpoint of a pool and its edit, the image is newer than the manifest. A copy that
/// `checkpoint` made has the files of its point in time. Both open.
#[test]
fn newer_image_and_copies_open() {
    for nth in 1..6 {
        let machine = MemFs::new();
        let faulty = FaultFs::new(Arc::new(machine.clone()));
        let db = Config::new("/db").fs(Arc::new(faulty.clone())).env(Arc::new(TestEnv::new(1))).workers(0);
        let db = db.open().unwrap();
        let part = db.open_partition("p", pool_options()).unwrap();
        part.insert("a", "1").unwrap();
        part.flush().unwrap();
        db.checkpoint("/copy").unwrap();
        part.insert("b", "2").unwrap();
        db.persist(PersistMode::SyncData).unwrap();
        faulty.inject(
            FaultPlan::new(OpKind::Write, nth, Fault::Error(std::io::ErrorKind::StorageFull)).in_path("MANIFEST"),
        );
        drop(part.flush());
        for survival in [Survival::Nothing, Survival::Everything] {
            let after = machine.fork();
            after.crash(survival, nth);
            assert_eq!(open_pool_database(&after).unwrap().partition("p").unwrap().len().unwrap(), 2, "write {nth}");
            let copy = Config::new("/copy").fs(Arc::new(after)).env(Arc::new(TestEnv::new(3))).workers(0);
            assert_eq!(copy.open().unwrap().partition("p").unwrap().len().unwrap(), 1);
        }
    }
}

/// The manifest had a new pool before its address space was reserved. When the reservation failed, the call failed, and
/// the database did not open any more.
#[test]
fn pool_that_cannot_be_reserved_is_not_created() {
    for level in [PersistenceLevel::WalOnly, PersistenceLevel::ProcessCrash] {
        let fs = MemFs::new();
        let db = config(&fs, 1).open().unwrap();
        super::open_partition(&db, "tables").insert("important", "yes").unwrap();
        fs.set_mapped_memory(level);
        let huge = |n: u32| {
            let options = PmemOptions::default().max_size(8 << 40).growth_step(64 << 10);
            db.open_partition(&format!("huge {n}"), PartitionCreateOptions::default().engine(EngineType::Pmem(options)))
        };
        // An address space of 47 bits does not hold eight of them.
        let made: Vec<_> = (0..9).map_while(|n| huge(n).ok()).collect();
        assert!(made.len() < 9 && huge(99).is_err(), "the address space of all pools was reserved");
        assert_eq!(db.list_partitions().len(), 1 + made.len(), "a failed creation creates no partition");
        made.iter().for_each(|part| part.insert("k", "v").unwrap());
        let count = made.len();
        drop(made);
        db.close().unwrap();
        let db = open_pool_database(&fs).unwrap();
        assert_eq!(db.list_partitions().len(), 1 + count);
        assert_eq!(db.partition("tables").unwrap().get("important").unwrap().unwrap(), "yes");
    }
}

/// 330 keys that `order` accepts, in its order.
fn ordered_keys(order: TestOrder) -> Vec<Vec<u8>> {
    let mut keys: Vec<_> = (0..330u32).map(|n| order.valid_key(&n.to_be_bytes())).collect();
    keys.sort_by(|a, b| order.compare(a, b));
    keys
}

/// Compares a partition with its expected content: gets of existing and missing keys, iterators, ranges. `wanted` has
/// the positions of the keys and the bytes of their values.
fn check_partition(part: &Partition, wanted: &std::collections::BTreeMap<usize, u8>, keys: &[Vec<u8>]) {
    let rows: Vec<(Vec<u8>, Vec<u8>)> = wanted.iter().map(|(n, round)| (keys[*n].clone(), vec![*round; 9])).collect();
    let pairs = |iter: azekura::Iter| iter.map(|pair| pair.map(|(k, v)| (k.to_vec(), v.to_vec())).unwrap());
    assert!(pairs(part.iter()).eq(rows.iter().cloned()), "forward");
    assert!(part.iter().rev().map(|pair| pair.unwrap().0.to_vec()).eq(rows.iter().rev().map(|row| row.0.clone())));
    for n in (0..330).step_by(3) {
        assert_eq!(part.get(&keys[n]).unwrap().map(|v| v[0]), wanted.get(&n).copied(), "key {n}");
        assert_eq!(part.range(keys[n].clone()..).count(), wanted.range(n..).count(), "range from {n}");
    }
}

/// At opening, the first leaf with records after an empty leaf got the empty key as its separator. Under an order other
/// than that of bytes, reads missed the keys of leaves, writes stored keys twice, and the pool did not open again. A
/// comparator that accepts only its own keys panicked. The test empties leaves at either end and in the middle, and
/// opens the pool again.
#[test]
fn empty_leaves_at_open_show_no_invented_key() {
    let (up, down) = (TestOrder::ChecksummedNumbers, TestOrder::ChecksummedReversed);
    for (order, level) in
        [(up, PersistenceLevel::WalOnly), (down, PersistenceLevel::WalOnly), (down, PersistenceLevel::PowerLoss)]
    {
        let keys = ordered_keys(order);
        for gap in [0..47, 0..100, 200..300, 100..250, 0..300] {
            let fs = MemFs::new();
            fs.set_mapped_memory(level);
            let open = |salt| {
                let db = config(&fs, salt).open().unwrap();
                let part = db.open_partition_with_comparator("p", pool_options(), Arc::new(order)).unwrap();
                (db, part)
            };
            let mut wanted = std::collections::BTreeMap::new();
            let (mut db, mut part) = open(1);
            for (n, key) in keys[..300].iter().enumerate() {
                part.insert(key, [0; 9]).unwrap();
                wanted.insert(n, 0);
            }
            for round in 1..4u8 {
                for n in gap.clone() {
                    part.remove(&keys[n]).unwrap();
                    wanted.remove(&n);
                }
                check_partition(&part, &wanted, &keys);
                drop(part);
                db.close().unwrap();
                (db, part) = open(u64::from(round) + 1);
                check_partition(&part, &wanted, &keys);
                for n in (0..300).step_by(7) {
                    part.insert(&keys[n], [round; 9]).unwrap();
                    wanted.insert(n, round);
                }
                check_partition(&part, &wanted, &keys);
            }
        }
    }
}

/// A pool whose comparator comes late was built with its new options. If the new `max_size` was smaller, the pool
/// refused its records in the WAL. The half restored pool was unusable until the database was reopened.
#[test]
fn late_comparator_with_smaller_max_size_opens() {
    let fs = MemFs::new();
    let order = || Arc::new(TestOrder::ChecksummedReversed);
    let key = |n: u32| order().valid_key(&n.to_be_bytes());
    let db = config(&fs, 1).open().unwrap();
    let part = db.open_partition_with_comparator("p", pool_options(), order()).unwrap();
    (0..300).for_each(|n| part.insert(key(n), vec![1; 4000]).unwrap());
    db.persist(PersistMode::SyncData).unwrap();
    let killed = fs.fork();
    killed.crash(Survival::Everything, 0);
    let db = config(&killed, 2).open().unwrap();
    let small = PmemOptions::default().max_size(64 << 10).growth_step(4 << 10);
    let small = PartitionCreateOptions::default().engine(EngineType::Pmem(small));
    let part = db.open_partition_with_comparator("p", small.clone(), order()).unwrap();
    part.set_options(small).unwrap();
    assert_eq!(part.len().unwrap(), 300);
    // New records get only space that is free in the pool already.
    let refused = (400..600).find_map(|n| part.insert(key(n), vec![1; 4000]).err()).expect("the pool is full");
    assert_eq!(refused.kind(), ErrorKind::OutOfSpace);
}

/// A write locks a leaf and calls a comparator that reads and writes its own database. These calls may need the lock of
/// that leaf. None of them waits forever: each is refused or succeeds, and no record is lost.
#[test]
fn comparator_that_reads_its_own_pool_is_served() {
    let (fs, order) = (MemFs::new(), plain_order());
    let db = config(&fs, 1).open().unwrap();
    let part = db.open_partition_with_comparator("p", pool_options(), order.clone()).unwrap();
    insert_all(&part);
    let other_handle = part.clone();
    order.call_once(move || {
        assert_eq!(other_handle.get(key(7)).unwrap().unwrap(), value(7));
        assert_eq!(other_handle.len().unwrap(), KEYS);
    });
    part.insert(key(7), "new").unwrap();
    assert_eq!(part.get(key(7)).unwrap().unwrap(), "new");
}

/// The manifest got the creation of a pool and its file number as two batches. If the disk was full at the second
/// batch, the call failed. The partition existed again after a partition of the same name was deleted.
#[test]
fn creation_is_whole_when_manifest_is_full() {
    let machine = tmpfs_machine();
    let faulty = FaultFs::new(Arc::new(machine.clone()));
    let open = |salt| {
        let fs: Arc<dyn Fs> = Arc::new(faulty.clone());
        Config::new(Path::new("/db")).fs(fs).env(Arc::new(TestEnv::new(salt))).workers(0).open().unwrap()
    };
    for nth in 1..5 {
        let db = open(nth);
        faulty.inject(
            FaultPlan::new(OpKind::Write, nth, Fault::Error(std::io::ErrorKind::StorageFull)).in_path("MANIFEST"),
        );
        let first = db.open_partition("pool", pool_options());
        faulty.clear_faults();
        assert_eq!(first.is_ok(), db.partition_exists("pool"), "write {nth}");
        drop(first);
        db.open_partition("pool", pool_options()).unwrap().insert("k", "v").unwrap();
        db.close().unwrap();
        let db = open(10 + nth);
        assert!(db.partition("pool").unwrap().get("k").unwrap().is_some(), "write {nth}");
        db.delete_partition_by_name("pool").unwrap();
        db.close().unwrap();
        assert!(!open(20 + nth).partition_exists("pool"), "write {nth}");
    }
}

/// Checkpoints a pool and kills the process after `stop` operations of the checkpoint; the written bytes stay in the
/// page cache. The next process reads the pool, and continues to write if `goes_on`; then power fails, after `cut`
/// operations of the next checkpoint if `cut` is given. Returns the state that a third process finds, and the number
/// of operations of the first checkpoint.
fn kill_in_checkpoint(stop: Option<u64>, has_image: bool, goes_on: bool, cut: Option<u64>) -> (Result<Vec<u8>>, u64) {
    let fs = MemFs::new();
    let open = |salt| config(&fs, salt).wal_segment_size(64 << 10).max_wal_size(128 << 10).open();
    let pool = |db: &Database| db.open_partition("pool", pool_options());
    let keys = |db: &Database| pool(db)?.keys().map(|key| Ok(key?[0])).collect::<Result<Vec<u8>>>();
    let db = open(1).unwrap();
    pool(&db).unwrap().insert([1], vec![1; 500]).unwrap();
    if has_image {
        pool(&db).unwrap().flush().unwrap();
    }
    (2..6).for_each(|n| pool(&db).unwrap().insert([n], vec![n; 500]).unwrap());
    db.persist(PersistMode::SyncAll).unwrap();
    let before = fs.op_count();
    fs.freeze_after(stop);
    drop(pool(&db).unwrap().flush());
    let ops = fs.op_count() - before;
    fs.freeze_after(Some(0));
    drop(db);
    fs.freeze_after(None);
    let db = open(2).unwrap();
    assert_eq!(keys(&db).unwrap(), [1, 2, 3, 4, 5], "killed after {stop:?} operations");
    if goes_on {
        let plain = db.open_partition("plain", Default::default()).unwrap();
        (0..200u8).for_each(|n| plain.insert([n % 10], vec![n; 2_000]).unwrap());
        plain.flush().unwrap();
        while db.step().unwrap() {}
    }
    if let Some(cut) = cut {
        pool(&db).unwrap().insert([1], "new").unwrap();
        fs.freeze_after(Some(cut));
        drop(pool(&db).unwrap().flush());
    }
    fs.crash(Survival::Nothing, 0);
    drop(db);
    (open(3).and_then(|db| keys(&db)), ops)
}

/// The shadow of a killed process was complete but not synced, and counted as permanent. The next process freed the WAL
/// segments that the shadow covered, and wrote its pages over the image. Power loss then lost the records, or the pool.
#[test]
fn shadow_of_a_killed_process_is_made_durable() {
    for (has_image, goes_on) in [(false, false), (false, true), (true, false), (true, true)] {
        let (found, ops) = kill_in_checkpoint(None, has_image, goes_on, None);
        assert_eq!(found.unwrap(), [1, 2, 3, 4, 5]);
        for stop in 0..=ops {
            for cut in [None, Some(1), Some(2), Some(4), Some(6)] {
                let (found, _) = kill_in_checkpoint(Some(stop), has_image, goes_on, cut);
                let when = format!("image {has_image}, log {goes_on}, killed after {stop} operations, cut {cut:?}");
                assert_eq!(found.unwrap_or_else(|e| panic!("{when}: {e}")), [1, 2, 3, 4, 5], "{when}");
            }
        }
    }
}

/// A checkpoint failed because the sync of its shadow failed. The page cache contained the whole shadow. The system may
/// drop pages that it could not write, and report success at the next sync. The process after a kill therefore counted
/// the shadow as durable, and freed the WAL that the shadow replaced. Power loss then lost synced records.
#[test]
fn shadow_of_a_failed_checkpoint_is_not_used() {
    for has_image in [false, true] {
        let fs = MemFs::new();
        let faulty = FaultFs::new(Arc::new(fs.clone()));
        let open = |salt| {
            let config = config(&fs, salt).fs(Arc::new(faulty.clone())).mapped_wal(false);
            config.wal_segment_size(64 << 10).max_wal_size(128 << 10).open().unwrap()
        };
        let fault_at_sync = |fault| faulty.inject(FaultPlan::new(OpKind::Sync, 1, fault).in_path(".shadow").forever());
        let pool = |db: &Database| db.open_partition("pool", pool_options()).unwrap();
        let db = open(1);
        pool(&db).insert([1], vec![1; 500]).unwrap();
        if has_image {
            pool(&db).flush().unwrap();
        }
        (2..6).for_each(|n| pool(&db).insert([n], vec![n; 500]).unwrap());
        db.persist(PersistMode::SyncAll).unwrap();
        fault_at_sync(Fault::Error(std::io::ErrorKind::Other));
        assert!(pool(&db).flush().is_err());
        faulty.clear_faults();
        fs.freeze_after(Some(0));
        drop(db);
        fs.freeze_after(None);
        // The next sync does not write the pages that the failed sync did not write.
        fault_at_sync(Fault::LyingSync);
        let db = open(2);
        assert_eq!(pool(&db).len().unwrap(), 5);
        faulty.clear_faults();
        let plain = db.open_partition("plain", Default::default()).unwrap();
        (0..200u8).for_each(|n| plain.insert([n % 10], vec![n; 2_000]).unwrap());
        plain.flush().unwrap();
        while db.step().unwrap() {}
        fs.crash(Survival::Nothing, 0);
        drop(db);
        let found: Vec<u8> = pool(&open(3)).keys().map(|key| key.unwrap()[0]).collect();
        assert_eq!(found, [1, 2, 3, 4, 5], "image {has_image}");
    }
}
