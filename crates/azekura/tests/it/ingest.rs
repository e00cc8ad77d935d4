//! `ingest` and `bulk`: bad input, iterators that use the database, deletion and close meanwhile, writers of the same
//! keys, files that a crash leaves, and failures of every file-system call.

mod faults;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use azekura::fs::{Fs, SystemEnv};
use azekura::testing::{MemFs, SeededRng, Survival, TestEnv, TestOrder};
use azekura::{
    BulkOptions, CompactionStrategy, Comparator, Config, Database, EngineType, Error, ErrorKind, Event,
    KvSeparationOptions, LeveledOptions, Listener, Partition, PartitionCreateOptions, PmemOptions, Result, inspect,
};

use crate::testkit::ordered_partitions::{open_ordered, supported_options};

const DIR: &str = "/db";

fn config(machine: &MemFs) -> Config {
    Config::new(DIR).fs(Arc::new(machine.clone())).env(Arc::new(TestEnv::new(1))).workers(0)
}

fn small_tables() -> PartitionCreateOptions {
    let leveled = LeveledOptions::default().target_file_size(8 << 10).l0_compaction_trigger(4);
    PartitionCreateOptions::default().compaction_strategy(CompactionStrategy::Leveled(leveled))
}

fn pool() -> PartitionCreateOptions {
    PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default().max_size(64 << 20)))
}

/// One partition of each kind.
fn both_kinds(db: &Database) -> [Partition; 2] {
    [db.open_partition("tables", small_tables()).unwrap(), db.open_partition("pool", pool()).unwrap()]
}

fn key(n: u32) -> Vec<u8> {
    format!("key {n:06}").into_bytes()
}

fn pairs(part: &Partition) -> Vec<(Vec<u8>, Vec<u8>)> {
    part.iter().map(|pair| pair.map(|(key, value)| (key.to_vec(), value.to_vec())).unwrap()).collect()
}

/// Numbers of tables and blob files in the directory.
fn data_files(machine: &MemFs) -> usize {
    let entries = machine.read_dir(Path::new(DIR)).unwrap();
    entries.iter().filter(|entry| entry.name.ends_with(".sst") || entry.name.ends_with(".blob")).count()
}

fn assert_clean(machine: &MemFs) {
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    let report = inspect::verify(&fs, Path::new(DIR), &mut |_, _| {}).unwrap();
    assert!(report.is_clean(), "{report:?}");
}

#[test]
fn bad_entries_are_invalid_and_change_nothing() {
    let machine = MemFs::new();
    let db = config(&machine).open().unwrap();
    for part in both_kinds(&db) {
        part.insert("a", "before").unwrap();
        let many = |last: &[u8]| {
            let sorted = (0..3_000).map(|n| (key(n), vec![7; 100]));
            sorted.chain([(last.to_vec(), Vec::new())]).collect::<Vec<_>>()
        };
        let long = vec![b'z'; 65_536];
        for (last, problem) in [(key(2_999), "entry 3000"), (key(5), "entry 3000"), (long, "65536 bytes")] {
            let error = part.ingest(many(&last)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.message().contains(problem), "{error}");
        }
        let error = part.bulk(many(&[b'z'; 65_536])).unwrap_err();
        assert!(error.kind() == ErrorKind::Invalid && error.message().contains("entry 3000"), "{error}");
        assert_eq!((part.ingest::<&str, &str>([]).unwrap(), part.bulk::<&str, &str>([]).unwrap()), (0, 0));
        assert_eq!(pairs(&part), [(b"a".to_vec(), b"before".to_vec())]);
    }
    let tiny = BulkOptions::default().memory(1);
    let refused = both_kinds(&db)[0].bulk_with_options::<&str, &str, Error>([], &tiny);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(data_files(&machine), 0, "the tables of failed calls are removed");
    assert_eq!(db.metrics().ingests, 0);
}

/// Entries in an order that the comparator of the partition does not agree with.
#[test]
fn another_order_than_the_comparators_is_invalid() {
    for order in TestOrder::ALL {
        let machine = MemFs::new();
        let db = config(&machine).open().unwrap();
        let options = supported_options(order, PartitionCreateOptions::default());
        let part = open_ordered(order, &db, "p", options, None).unwrap();
        let mut keys: Vec<_> = (0..3_000).map(|n| order.valid_key(&key(n))).collect();
        keys.sort_by_key(|key| std::cmp::Reverse(order.canonical(key)));
        keys.dedup_by_key(|key| order.canonical(key));
        let before = db.metrics();
        for entries in [&keys[..], &keys[..2], &[keys[0].clone(), keys[0].clone()]] {
            let error = part.ingest(entries.iter().map(|key| (key, "v"))).unwrap_err();
            assert!(error.kind() == ErrorKind::Invalid && error.message().contains("entry 1 "), "{order:?}: {error}");
        }
        let after = db.metrics();
        assert_eq!((after.commits, after.wal_bytes, data_files(&machine)), (before.commits, before.wal_bytes, 0));
        assert!(part.is_empty().unwrap());
        keys.reverse();
        assert_eq!(part.ingest(keys.iter().map(|key| (key, "v"))).unwrap(), keys.len() as u64);
        assert!(part.keys().map(Result::unwrap).eq(keys.iter().map(|key| key.as_slice())));
    }
}

/// Keys of one digit, each of which is below the next one, also 9 below 0.
struct RoundOrder;

impl Comparator for RoundOrder {
    fn name(&self) -> &str {
        "round"
    }

    fn compare(&self, a: &[u8], b: &[u8]) -> std::cmp::Ordering {
        let digit = |key: &[u8]| i32::from(key[0] - b'0');
        ((digit(a) - digit(b) + 15) % 10).cmp(&5)
    }
}

/// Regression: an ingest compares neighbouring keys only. With a comparator that contradicts itself it wrote a table
/// whose smallest key is above its largest one, and the database could not be opened again.
#[test]
fn contradicting_comparator_keeps_the_database() {
    let machine = MemFs::new();
    let db = config(&machine).open().unwrap();
    let open = |db: &Database| db.open_partition_with_comparator("p", small_tables(), Arc::new(RoundOrder)).unwrap();
    let part = open(&db);
    let refused = part.ingest((0..8u8).map(|n| ([b'0' + n], "v"))).unwrap_err();
    assert!(refused.kind() == ErrorKind::Corruption && refused.message().contains("contradicts itself"), "{refused}");
    assert_eq!(part.ingest((0..3u8).map(|n| ([b'0' + n], "v"))).unwrap(), 3);
    drop(part);
    db.close().unwrap();
    let db = config(&machine).open().unwrap();
    assert_eq!(open(&db).len().unwrap(), 3);
}

#[test]
fn failing_or_panicking_source_changes_nothing() {
    let machine = MemFs::new();
    let db = config(&machine).open().unwrap();
    for part in both_kinds(&db) {
        let entries = |fails: bool| {
            (0..3_000).map(move |n| match n {
                2_500 if fails => Err("the source fails".to_owned()),
                2_500 => panic!("the source panics"),
                _ => Ok((key(n), vec![7; 100])),
            })
        };
        let own_error = |entry: std::result::Result<(Vec<u8>, Vec<u8>), String>| entry.map_err(Failure::Source);
        for sorts in [false, true] {
            let load = |fails: bool| match sorts {
                false => part.try_ingest(entries(fails).map(own_error)),
                true => part.bulk_with_options(entries(fails).map(own_error), &BulkOptions::default().memory(64 << 10)),
            };
            assert!(matches!(load(true), Err(Failure::Source(_))));
            catch_unwind(AssertUnwindSafe(|| load(false))).unwrap_err();
        }
        assert!(part.is_empty().unwrap());
        part.ingest((0..10).map(|n| (key(n), "v"))).unwrap();
        assert_eq!(part.len().unwrap(), 10, "the database is not poisoned");
    }
    assert_eq!(data_files(&machine), 1);
}

#[derive(Debug)]
enum Failure {
    Source(#[expect(dead_code, reason = "shown by a failing test")] String),
    Database(#[expect(dead_code, reason = "shown by a failing test")] Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Database(error)
    }
}

#[test]
fn source_may_use_the_database() {
    let machine = MemFs::new();
    let db = config(&machine).open().unwrap();
    let [part, pool] = both_kinds(&db);
    let entries = (0..3_000).map(|n| {
        if n % 100 == 0 {
            // In the range of the entries, so that it is flushed, and before the commit, so that it is replaced.
            part.insert(key(n), "old").unwrap();
            part.insert(key(n + 5_000), "beside").unwrap();
            pool.insert(key(n), "beside").unwrap();
            assert_eq!(part.get(key(1)).unwrap(), None, "not visible yet");
        }
        if n % 1_000 == 0 {
            part.flush().unwrap();
            part.ingest([(format!("inner {n}"), "x")]).unwrap();
            db.step().unwrap();
        }
        (key(n), n.to_string())
    });
    assert_eq!(part.ingest(entries).unwrap(), 3_000);
    assert_eq!(part.get(key(200)).unwrap().unwrap(), "200");
    assert_eq!(part.len().unwrap(), 3_000 + 30 + 3);
    assert_eq!(pool.len().unwrap(), 30);
    let metrics = db.metrics();
    assert_eq!(metrics.ingests, 4);
    assert!(metrics.ingested_bytes > 30_000);
    drop((part, pool));
    db.close().unwrap();
    assert_clean(&machine);
}

#[test]
fn deletion_or_close_meanwhile_is_closed() {
    for closes in [false, true] {
        for sorts in [false, true] {
            let machine = MemFs::new();
            let db = config(&machine).open().unwrap();
            let part = db.open_partition("p", small_tables()).unwrap();
            let entries = (0..3_000).map(|n| {
                if n == 2_900 {
                    match closes {
                        true => db.clone().close().unwrap(),
                        false => db.delete_partition(part.clone()).unwrap(),
                    }
                }
                Ok::<_, Error>((key(n), vec![7; 100]))
            });
            let done = match sorts {
                false => part.try_ingest(entries),
                true => part.bulk_with_options(entries, &BulkOptions::default().memory(64 << 10)),
            };
            assert_eq!(done.unwrap_err().kind(), ErrorKind::Closed, "{closes} {sorts}");
            drop((part, db));
            let db = config(&machine).open().unwrap();
            assert_eq!(data_files(&machine), 0, "the open removes all files");
            assert!(!closes || db.partition("p").unwrap().is_empty().unwrap());
        }
    }
}

#[test]
fn read_only_database_refuses_ingest() {
    let machine = MemFs::new();
    let db = config(&machine).open().unwrap();
    let part = db.open_partition("p", small_tables()).unwrap();
    part.ingest([("a", "1")]).unwrap();
    drop((part, db));
    let db = config(&machine).open_read_only().unwrap();
    let part = db.partition("p").unwrap();
    assert_eq!(part.get("a").unwrap().unwrap(), "1");
    for done in [part.ingest([("b", "2")]), part.bulk([("b", "2")])] {
        assert_eq!(done.unwrap_err().kind(), ErrorKind::Invalid);
    }
    assert_eq!(data_files(&machine), 1);
}

/// Records the events of ingests.
#[derive(Default)]
struct IngestListener(Mutex<Vec<(u64, bool)>>);

impl Listener for IngestListener {
    fn on_event(&self, event: &Event) {
        if let Event::Ingested { partition, entries, tables, bytes } = event {
            assert_eq!(partition, "p");
            self.0.lock().unwrap().push((*entries, *tables > 1 && *bytes > 100_000));
        }
    }
}

#[test]
fn listener_gets_event_of_each_ingest() {
    let machine = MemFs::new();
    let listener = Arc::new(IngestListener::default());
    let db = config(&machine).listener(listener.clone()).open().unwrap();
    let part = db.open_partition("p", small_tables()).unwrap();
    let mut rng = SeededRng::new(1);
    part.ingest((0..2_000).map(|n| (key(n), rng.random_bytes(100)))).unwrap();
    part.ingest((0..1).map(|n| (key(n), "small"))).unwrap();
    part.ingest([("b", "2"), ("a", "1")]).unwrap_err();
    assert_eq!(*listener.0.lock().unwrap(), [(2_000, true), (1, false)]);
}

/// A compaction set the sequence number of an ingested entry to 0, because no flushed range delete covered its key. An
/// older range delete that was still in the memtable then covered the entry.
#[test]
fn range_delete_in_memory_spares_later_ingest() {
    let machine = MemFs::new();
    let db = config(&machine).open().unwrap();
    let part = db.open_partition("p", small_tables()).unwrap();
    for _ in 0..5 {
        (0..3).for_each(|n| part.insert(key(n), "old").unwrap());
        part.flush().unwrap();
    }
    part.remove_range("a".."m").unwrap();
    part.ingest([(key(1), "new")]).unwrap();
    while db.step().unwrap() {}
    assert_eq!(part.get(key(1)).unwrap().unwrap(), "new");
    assert_eq!(pairs(&part), [(key(1), b"new".to_vec())]);
}

#[test]
fn bulk_sorts_more_than_its_memory() {
    for (seed, order) in (0..).zip(TestOrder::ALL) {
        let machine = MemFs::new();
        let db = config(&machine).open().unwrap();
        let apart = KvSeparationOptions::default().separation_threshold(500);
        let part = open_ordered(order, &db, "p", small_tables().with_kv_separation(apart), None).unwrap();
        let mut rng = SeededRng::new(seed);
        let mut entries: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        for n in 0..6_000u32 {
            let key = order.valid_key(&key(rng.below(3_000) as u32));
            let len = if rng.chance_one_in(50) { 3_000 } else { rng.below(150) };
            entries.push((key, [&n.to_be_bytes()[..], &rng.random_bytes(len as usize)].concat()));
        }
        let mut expected = BTreeMap::new();
        entries.iter().for_each(|(key, value)| _ = expected.insert(order.canonical(key), value.clone()));
        let given = entries.iter().map(|(key, value)| Ok::<_, Error>((key, value)));
        let keys = part.bulk_with_options(given, &BulkOptions::default().memory(64 << 10)).unwrap();
        assert_eq!(keys, expected.len() as u64);
        let found: Vec<Vec<u8>> = part.values().map(|value| value.unwrap().to_vec()).collect();
        assert!(found.iter().eq(expected.values()), "{order:?}");
        drop(part);
        assert_eq!(db.metrics().ingests, 1);
        db.close().unwrap();
        assert_clean(&machine);
        let fs: Arc<dyn Fs> = Arc::new(machine.clone());
        let named =
            inspect::tables(&fs, Path::new(DIR)).unwrap().len() + inspect::blobs(&fs, Path::new(DIR)).unwrap().len();
        assert_eq!(data_files(&machine), named, "the run files are removed");
    }
}

#[test]
fn crash_during_bulk_leaves_files_for_the_open() {
    let machine = MemFs::new();
    let db = config(&machine).open().unwrap();
    let part = db.open_partition("p", small_tables()).unwrap();
    part.insert("a", "before").unwrap();
    db.persist(azekura::PersistMode::SyncData).unwrap();
    let files_at_crash = Cell::new(0);
    let entries = (0..6_000u32).rev().map(|n| {
        if n == 500 {
            files_at_crash.set(data_files(&machine));
            machine.freeze_after(Some(0));
        }
        Ok::<_, Error>((key(n), vec![7; 100]))
    });
    part.bulk_with_options(entries, &BulkOptions::default().memory(64 << 10)).unwrap_err();
    drop((part, db));
    machine.crash(Survival::Everything, 1);
    assert!(
        files_at_crash.get() > 0 && data_files(&machine) >= files_at_crash.get(),
        "run files exist after the crash"
    );
    let db = config(&machine).open().unwrap();
    assert_eq!(data_files(&machine), 0);
    assert_eq!(pairs(&db.partition("p").unwrap()), [(b"a".to_vec(), b"before".to_vec())]);
}

/// Threads write keys of the range while ingests run. The last write of each key counts, whether it is a commit or an
/// ingest, and a snapshot sees all entries of an ingest or none.
#[test]
fn writers_of_the_same_keys_lose_nothing() {
    let machine = MemFs::new();
    let options = Config::new(DIR).fs(Arc::new(machine.clone())).env(Arc::new(SystemEnv::new())).workers(2);
    let db = options.open().unwrap();
    let part = db.open_partition("p", small_tables().max_memtable_size(16 << 10)).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for writer in 0..2u32 {
            let (part, stop) = (&part, &stop);
            scope.spawn(move || {
                let mut written = 0u64;
                while !stop.load(Ordering::Relaxed) || written == 0 {
                    written += 1;
                    // Odd keys belong to the writers, between the even ones of the ingests.
                    let own = key(2 * (written as u32 % 50) * 2 + 1 + 2 * writer);
                    part.insert(&own, written.to_be_bytes()).unwrap();
                    assert_eq!(part.get(&own).unwrap().unwrap(), written.to_be_bytes()[..]);
                }
            });
        }
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let snapshot = db.snapshot();
                let mut rounds_seen: Vec<Vec<u8>> = Vec::new();
                for n in (0..100).step_by(2) {
                    rounds_seen.push(snapshot.get(&part, key(n)).unwrap().unwrap_or_default().to_vec());
                }
                rounds_seen.dedup();
                assert_eq!(rounds_seen.len(), 1, "a part of an ingest");
                let again = snapshot.range::<Vec<u8>>(&part, ..).filter_map(|pair| {
                    let (key, value) = pair.unwrap();
                    let number: u32 = std::str::from_utf8(&key[4..]).unwrap().parse().unwrap();
                    (number.is_multiple_of(2) && number < 100).then(|| value.to_vec())
                });
                assert!(again.into_iter().all(|value| value == rounds_seen[0]));
            }
        });
        for round in 0..30u64 {
            let entries = (0..100).step_by(2).map(|n| (key(n), round.to_be_bytes()));
            match round % 2 {
                0 => part.ingest(entries).unwrap(),
                _ => part.bulk(entries.rev()).unwrap(),
            };
            assert_eq!(part.get(key(98)).unwrap().unwrap(), round.to_be_bytes()[..]);
        }
        stop.store(true, Ordering::Relaxed);
    });
    let before = pairs(&part);
    drop(part);
    db.close().unwrap();
    assert_clean(&machine);
    let db = config(&machine).open().unwrap();
    assert!(pairs(&db.partition("p").unwrap()) == before);
}

#[test]
fn batch_limit_holds_for_pools() -> Result<()> {
    let machine = MemFs::new();
    let db = config(&machine).memory_budget(4 << 20).open()?;
    let [part, pool] = both_kinds(&db);
    let entries = || (0..3_000).map(|n| (key(n), vec![7; 1_000]));
    let entries_read = Cell::new(0);
    let counted = entries().inspect(|_| entries_read.set(entries_read.get() + 1));
    let error = pool.ingest(counted).unwrap_err();
    // Regression: the error had a position in a batch, although the caller made no batch.
    assert_eq!((error.kind(), error.batch_position()), (ErrorKind::Invalid, None));
    assert_eq!(pool.bulk(entries()).unwrap_err().batch_position(), None);
    assert!(entries_read.get() < 2_500, "the call ends with the first entry that does not fit");
    assert!(pool.is_empty()?);
    part.ingest(entries())?;
    assert_eq!(part.len()?, 3_000);
    Ok(())
}
