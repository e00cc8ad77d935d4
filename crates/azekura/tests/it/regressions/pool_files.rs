//! Pool files: creation, images, close and reopen, comparators.

use std::cmp::Ordering as Order;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::thread;

use azekura::fs::{DiskFs, Fs, MemFs, TestEnv};
use azekura::{
    Comparator, Config, Database, EngineType, ErrorKind, Partition, PartitionCreateOptions, PersistenceLevel,
    PmemOptions, Result,
};

fn config(fs: &MemFs, salt: u64) -> Config {
    Config::new(Path::new("/db")).fs(Arc::new(fs.clone())).env(Arc::new(TestEnv::new(salt))).workers(0)
}

fn pool() -> PartitionCreateOptions {
    let options = PmemOptions::default().max_size(4 << 20).growth_step(64 << 10);
    PartitionCreateOptions::default().engine(EngineType::Pmem(options))
}

/// A file system whose files are used as memory, as tmpfs files are.
fn tmpfs() -> MemFs {
    let fs = MemFs::new();
    fs.offer_memory(PersistenceLevel::Process);
    fs
}

type Errand = Box<dyn FnOnce() + Send>;

/// Orders by bytes. Runs an errand, once, in the middle of the next comparison.
#[derive(Default)]
struct Errands(Mutex<Option<Errand>>);

impl Errands {
    fn set(&self, errand: impl FnOnce() + Send + 'static) {
        *self.0.lock().unwrap() = Some(Box::new(errand));
    }
}

impl Comparator for Errands {
    fn name(&self) -> &str {
        "errands"
    }

    fn compare(&self, a: &[u8], b: &[u8]) -> Order {
        let errand = self.0.lock().unwrap().take();
        errand.into_iter().for_each(|errand| errand());
        a.cmp(b)
    }
}

const KEYS: u64 = 60;

fn key(n: u64) -> [u8; 8] {
    n.to_be_bytes()
}

/// Every byte of a value tells the key that it belongs to; long ones are copied apart from their keys.
fn value(n: u64) -> Vec<u8> {
    vec![n as u8; if n.is_multiple_of(2) { 40 } else { 3000 }]
}

fn put_all(part: &Partition) {
    (0..KEYS).for_each(|n| part.insert(key(n), value(n)).unwrap());
}

/// Overwrites the space of all values: what they stood in holds those of other keys then.
fn put_others(part: &Partition) {
    for round in 0..3 {
        (0..KEYS).for_each(|n| part.insert(key(KEYS + n), value(n + 100 + round)).unwrap());
        (0..KEYS).for_each(|n| part.remove(key(n)).unwrap());
    }
}

fn is_closed<T: std::fmt::Debug>(read: Result<T>) {
    let error = read.expect_err("the database was closed and its files are another's");
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
}

/// A read in a pool on tmpfs was under way when the database was closed, opened again and written to: it copied what
/// the new writes had left there, and returned the value of another key, or `None` for one that was never removed. Here
/// the comparator of the read does all of it.
#[test]
fn read_is_closed_when_pool_is_reopened_under_it() {
    type Read = fn(&Partition) -> Result<Option<Vec<u8>>>;
    let reads: [Read; 5] = [
        |part| Ok(part.get(key(31))?.map(|value| value.to_vec())),
        |part| Ok(part.size_of(key(31))?.map(|size| vec![31; size as usize])),
        |part| Ok(part.range(key(31)..).next().transpose()?.map(|(_, value)| value.to_vec())),
        |part| Ok(part.range(..=key(31)).next_back().transpose()?.map(|(_, value)| value.to_vec())),
        |part| {
            let mut walk = part.range(key(31)..);
            let lent = walk.lend().transpose()?.map(|(_, value)| value.to_vec());
            Ok(lent)
        },
    ];
    for read in reads {
        let (fs, order) = (tmpfs(), Arc::new(Errands::default()));
        let db = config(&fs, 1).open().unwrap();
        let part = db.open_partition_with_comparator("p", pool(), order.clone()).unwrap();
        put_all(&part);
        assert_eq!(read(&part).unwrap(), Some(value(31)));
        let after = fs.clone();
        order.set(move || {
            db.close().unwrap();
            let db = config(&after, 2).open().unwrap();
            let part = db.open_partition_with_comparator("p", pool(), Arc::new(Errands::default())).unwrap();
            put_others(&part);
            drop(part);
            db.close().unwrap();
        });
        is_closed(read(&part));
        assert!(order.0.lock().unwrap().is_none(), "the read compared");
    }
}

/// The same with the reader in another thread than the one that closes: the directory is not given free while a read is
/// inside a pool that is memory, so the read finds what was there.
#[test]
fn close_waits_for_reads_inside_a_memory_pool() {
    let (fs, order) = (tmpfs(), Arc::new(Errands::default()));
    let db = config(&fs, 1).open().unwrap();
    let part = db.open_partition_with_comparator("p", pool(), order.clone()).unwrap();
    put_all(&part);
    let closer = Arc::new(Mutex::new(None));
    let (closing, beside, after) = (Arc::clone(&closer), part.clone(), fs.clone());
    order.set(move || {
        *closing.lock().unwrap() = Some(thread::spawn(move || db.close().unwrap()));
        // Until the closing thread has come to where it waits.
        while beside.get(key(1)).is_ok() {
            thread::yield_now();
        }
        for salt in 0..20 {
            thread::yield_now();
            assert_eq!(config(&after, salt).open().unwrap_err().kind(), ErrorKind::Locked, "a read is under way");
        }
    });
    is_closed(part.get(key(31)));
    closer.lock().unwrap().take().unwrap().join().unwrap();
    config(&fs, 2).open().unwrap();
}

/// An iterator of a pool that is memory went on over the bytes of whatever opened the file after it.
#[test]
fn iterators_are_closed_when_database_is_reopened() {
    let lsm = PartitionCreateOptions::default;
    for (fs, options) in [(tmpfs(), pool()), (MemFs::new(), pool()), (MemFs::new(), lsm())] {
        let db = config(&fs, 1).open().unwrap();
        let part = db.open_partition("p", options.clone()).unwrap();
        put_all(&part);
        part.flush().unwrap();
        let snapshot = db.snapshot();
        let (mut up, mut down, mut both, mut entries) =
            (part.iter(), part.iter(), snapshot.iter(&part), part.entries());
        let (mut fresh, mut lent) = (part.iter(), part.iter());
        up.next().unwrap().unwrap();
        down.next_back().unwrap().unwrap();
        both.next().unwrap().unwrap();
        both.next_back().unwrap().unwrap();
        lent.lend().unwrap().unwrap();
        let entry = entries.next().unwrap().unwrap();
        db.close().unwrap();
        let db = config(&fs, 2).open().unwrap();
        put_others(&db.open_partition("p", options).unwrap());
        is_closed(up.next().unwrap());
        is_closed(down.next_back().unwrap());
        is_closed(both.next_back().unwrap());
        is_closed(entries.next().unwrap());
        is_closed(fresh.next().unwrap());
        is_closed(lent.lend().unwrap());
        is_closed(snapshot.get(&part, key(3)));
        is_closed(part.insert(key(3), "v"));
        assert!([up.next(), down.next(), both.next(), fresh.next_back()].iter().all(Option::is_none), "it has ended");
        assert_eq!(entry.value().unwrap(), value(0), "it was read before");
    }
}

/// A partition that is deleted under its readers, and made again under its name, shows them what was there, or `Closed`.
#[test]
fn iterators_go_on_when_their_partition_is_deleted() {
    for (fs, options) in [(tmpfs(), pool()), (MemFs::new(), pool()), (MemFs::new(), PartitionCreateOptions::default())]
    {
        let db = config(&fs, 1).open().unwrap();
        let part = db.open_partition("p", options.clone()).unwrap();
        put_all(&part);
        let (mut up, mut down) = (part.iter(), part.iter());
        up.next().unwrap().unwrap();
        down.next_back().unwrap().unwrap();
        db.delete_partition(part.clone()).unwrap();
        let again = db.open_partition("p", options).unwrap();
        put_others(&again);
        is_closed(part.get(key(1)));
        let right = |pair: Result<(azekura::Slice, azekura::Slice)>, n: u64| {
            let (found, bytes) = pair.unwrap();
            assert!(found == key(n) && bytes == value(n), "key {n}");
        };
        (1..KEYS).for_each(|n| right(up.next().unwrap(), n));
        (0..KEYS - 1).rev().for_each(|n| right(down.next_back().unwrap(), n));
    }
}

/// What readers beside closing, opening and deleting share.
struct Stage {
    now: RwLock<Partition>,
    stop: AtomicBool,
    reads: AtomicU64,
}

impl Stage {
    /// Reads in one of several ways; what is found is the value of its key, of any round.
    fn read(&self, way: u64) {
        let right = |n: u64, bytes: &[u8]| {
            assert!(bytes.len() == 2000 && bytes.iter().all(|byte| *byte == n as u8), "way {way}: not of key {n}");
        };
        let number = |key: &[u8]| u64::from_be_bytes(key.try_into().expect("keys have eight bytes"));
        let mut n = way;
        while !self.stop.load(Ordering::Relaxed) {
            n = (n * 13 + 7) % 50;
            let part = self.now.read().unwrap().clone();
            let read = || -> Result<()> {
                match way % 4 {
                    0 => right(n, &part.get(key(n))?.expect("it is never removed")),
                    1 => {
                        let (found, bytes) = part.range(key(n)..).next().transpose()?.expect("it is never removed");
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
                        let (mut walk, mut n) = (part.iter(), 0);
                        while let Some(pair) = walk.lend() {
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
struct Stop<'a>(&'a Stage);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

fn fill(part: &Partition) {
    (0..50).for_each(|n| part.insert(key(n), vec![n as u8; 2000]).unwrap());
}

fn rounds() -> u64 {
    crate::world::number("AZEKURA_REOPENINGS", 9)
}

/// Closes, opens and fills beside readers; every other time the partition is deleted and made again, so that its keys
/// are missing for a moment: then readers have their handle of the one before.
fn reopened_beside_readers(fs: &Arc<dyn Fs>, dir: &Path, options: &PartitionCreateOptions) {
    let open = || {
        let db = Config::new(dir).fs(Arc::clone(fs)).workers(1).open().unwrap();
        let part = db.open_partition("p", options.clone()).unwrap();
        fill(&part);
        (db, part)
    };
    let (mut db, part): (Database, Partition) = open();
    let stage = Stage { now: RwLock::new(part), stop: AtomicBool::new(false), reads: AtomicU64::new(0) };
    thread::scope(|scope| {
        let _stopped = Stop(&stage);
        let stage = &stage;
        let readers: Vec<_> = (0..4).map(|way| scope.spawn(move || stage.read(way))).collect();
        for round in 0..rounds() {
            let before = stage.reads.load(Ordering::Relaxed);
            while stage.reads.load(Ordering::Relaxed) < before + 4 && !readers.iter().any(|reader| reader.is_finished())
            {
                thread::yield_now();
            }
            let part = match round % 3 {
                0 => {
                    let old = stage.now.read().unwrap().clone();
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
            *stage.now.write().unwrap() = part;
        }
    });
    println!("{} reads", stage.reads.load(Ordering::Relaxed));
}

#[test]
fn readers_are_right_or_closed_beside_reopening() {
    let disk: Arc<dyn Fs> = Arc::new(DiskFs::new());
    for place in [tempfile::tempdir_in("/dev/shm").ok(), tempfile::tempdir().ok()].into_iter().flatten() {
        reopened_beside_readers(&disk, &place.path().join("pool"), &pool());
        reopened_beside_readers(&disk, &place.path().join("lsm"), &PartitionCreateOptions::default());
    }
    reopened_beside_readers(&(Arc::new(tmpfs()) as Arc<dyn Fs>), Path::new("/db"), &pool());
}
