//! User code that panics: the database is poisoned, other reads continue, no call hangs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use azekura::fs::SystemEnv;
use azekura::testing::{MemFs, Survival, TestComparator, TestOrder};
use azekura::{
    CompressionType, Database, EngineType, ErrorKind, Event, KvSeparationOptions, Listener, PartitionComponents,
    PartitionCreateOptions, PersistMode, PmemOptions, merge_operators,
};

use super::{config, error_kind, open_partition};
use crate::testkit::watchdog::run_with_timeout;

fn pool_options() -> PartitionCreateOptions {
    PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default().max_size(4 << 20)))
}

/// The order of bytes, with the default of every optional method.
fn moody_comparator() -> Arc<TestComparator> {
    Arc::new(TestComparator::minimal(TestOrder::Bytes).named("moody"))
}

/// A listener that panics at flushes.
struct PanicOnFlushListener;

impl Listener for PanicOnFlushListener {
    fn on_event(&self, event: &Event) {
        assert!(!matches!(event, Event::Flushed { .. }), "the listener panics");
    }
}

/// Writes fail, reads succeed, and all waits end.
fn assert_poisoned(db: Database) {
    let p = open_partition(&db, "calm");
    assert_eq!(error_kind(p.insert("k", "new")), ErrorKind::Poisoned);
    assert_eq!(error_kind(p.flush()), ErrorKind::Poisoned);
    assert_eq!(error_kind(db.persist(PersistMode::SyncAll)), ErrorKind::Poisoned);
    assert_eq!(error_kind(db.checkpoint("/copy")), ErrorKind::Poisoned);
    assert_eq!(p.get("k").unwrap().as_deref(), Some(&b"v"[..]), "reads continue");
    assert_eq!(p.len().unwrap(), 1);
    assert!(db.metrics().poisoned);
    drop(p);
    db.close().unwrap_err();
}

fn check_comparator_panic(workers: usize) {
    let machine = MemFs::new();
    let comparator = moody_comparator();
    let env = || -> Arc<dyn azekura::fs::Env> { Arc::new(SystemEnv::new()) };
    let db = config(&machine).workers(workers).env(env()).open().unwrap();
    open_partition(&db, "calm").insert("k", "v").unwrap();
    let p = db.open_partition_with_comparator("moody", Default::default(), comparator.clone()).unwrap();
    (0..50u8).for_each(|n| p.insert([n], [n]).unwrap());
    comparator.set_panicking(true);
    assert_eq!(error_kind(p.insert([7], "new")), ErrorKind::Poisoned);
    comparator.set_panicking(false);
    assert_eq!(p.len().unwrap(), 50, "reads succeed once the comparator no longer panics");
    drop(p);
    assert_poisoned(db);
    let db = config(&machine).open().unwrap();
    assert_eq!(open_partition(&db, "calm").get("k").unwrap().as_deref(), Some(&b"v"[..]));
    let p = db.open_partition_with_comparator("moody", Default::default(), comparator).unwrap();
    assert_eq!(p.len().unwrap(), 50);
}

#[test]
fn a_comparator_that_panics_in_a_write_poisons() {
    run_with_timeout("by hand", || check_comparator_panic(0));
    run_with_timeout("with workers", || check_comparator_panic(2));
}

/// A comparator that panicked while its partition was opened did not poison the database. A mutex stayed poisoned.
/// Background work treated it as locked by another thread, so the WAL grew without bound.
#[test]
fn comparator_panic_while_opening_poisons() {
    run_with_timeout("opening", || {
        let comparator = moody_comparator();
        let open = |db: &Database| db.open_partition_with_comparator("moody", Default::default(), comparator.clone());
        let machine = MemFs::new();
        let db = config(&machine).open().unwrap();
        open_partition(&db, "calm").insert("k", "v").unwrap();
        let p = open(&db).unwrap();
        (0..50u8).for_each(|n| p.insert([n], [n]).unwrap());
        let killed = machine.fork();
        killed.crash(Survival::Everything, 0);
        let db = config(&killed).open().unwrap();
        comparator.set_panicking(true);
        assert_eq!(error_kind(open(&db)), ErrorKind::Poisoned);
        comparator.set_panicking(false);
        assert_poisoned(db);
        let db = config(&killed).open().unwrap();
        assert_eq!(open(&db).unwrap().len().unwrap(), 50);
    });
}

#[test]
fn comparator_panic_in_background_poisons() {
    run_with_timeout("a compaction", || {
        let machine = MemFs::new();
        let comparator = moody_comparator();
        let db = config(&machine).open().unwrap();
        open_partition(&db, "calm").insert("k", "v").unwrap();
        let p = db.open_partition_with_comparator("moody", Default::default(), comparator.clone()).unwrap();
        for round in 0..3u8 {
            (0..50u8).for_each(|n| p.insert([n], [round]).unwrap());
            p.flush().unwrap();
        }
        comparator.set_panicking(true);
        assert_eq!(error_kind(p.major_compact()), ErrorKind::Poisoned);
        drop(p);
        assert_poisoned(db);
        comparator.set_panicking(false);
        let db = config(&machine).open().unwrap();
        let p = db.open_partition_with_comparator("moody", Default::default(), comparator).unwrap();
        assert!(p.iter().all(|pair| pair.unwrap().1[..] == [2]));
        assert_eq!(p.len().unwrap(), 50);
    });
}

#[test]
fn a_listener_that_panics_poisons() {
    for workers in [0, 2] {
        run_with_timeout("a listener", move || {
            let machine = MemFs::new();
            let env: Arc<dyn azekura::fs::Env> = Arc::new(SystemEnv::new());
            let db =
                config(&machine).workers(workers).env(env).listener(Arc::new(PanicOnFlushListener)).open().unwrap();
            open_partition(&db, "calm").insert("k", "v").unwrap();
            // The flush itself may have succeeded before the listener was called.
            drop(open_partition(&db, "calm").flush());
            while !db.metrics().poisoned {
                std::thread::yield_now();
            }
            assert_poisoned(db);
            assert!(open_partition(&config(&machine).open().unwrap(), "calm").contains_key("k").unwrap());
        });
    }
}

/// Regression: a comparator panicked in a step of an iterator. The iterator had stopped between two entries, and the
/// next step continued from there.
#[test]
fn iter_ends_after_a_comparator_panic() {
    for options in [PartitionCreateOptions::default(), pool_options()] {
        let mood = moody_comparator();
        let db = config(&MemFs::new()).open().unwrap();
        let p = db.open_partition_with_comparator("moody", options, mood.clone()).unwrap();
        for round in 0..3u8 {
            (0..50u8).for_each(|n| p.insert([n], [round]).unwrap());
            p.flush().unwrap(); // an LSM iterator merges three tables
        }
        let mut panics = 0;
        for (step, is_backward, is_sought) in
            (0..9).flat_map(|step| [(step, false, false), (step, true, false), (step, false, true), (step, true, true)])
        {
            let mut iter = p.iter();
            let mut next = || if is_backward { iter.next_back() } else { iter.next() };
            (0..step).for_each(|_| drop(next().unwrap().unwrap()));
            if is_sought {
                iter.seek([20]);
                iter.seek_back([30]);
            }
            mood.set_panicking(true);
            let caught = catch_unwind(AssertUnwindSafe(|| if is_backward { iter.next_back() } else { iter.next() }));
            mood.set_panicking(false);
            if caught.is_err() {
                panics += 1;
                assert!(iter.next().is_none() && iter.next_back().is_none() && iter.next_ref().is_none());
            }
            iter.seek([10]);
            iter.seek_back([40]);
            let keys: Vec<u8> =
                iter.map(|pair| pair.unwrap()).inspect(|pair| assert_eq!(*pair.1, [2])).map(|pair| pair.0[0]).collect();
            assert_eq!(keys, (10..=40).collect::<Vec<u8>>(), "{step} {is_backward} {is_sought}");
        }
        assert!(panics >= 9, "{panics}");
    }
}

/// Nothing is written yet when a transaction is validated, and when the operands of a batch for a pool are computed: a
/// panic of the comparator is an error of the commit. In the second case it went on to the caller.
#[test]
fn comparator_panic_before_the_log_is_invalid() {
    let mood = moody_comparator();
    let db = config(&MemFs::new()).open().unwrap();
    let components = PartitionComponents::default().comparator(mood.clone());
    let components = components.merge_operator(merge_operators::append(","));
    let moody = db.open_partition_with("moody", pool_options(), components).unwrap();
    (0..50u8).for_each(|n| moody.insert([n], [n]).unwrap());
    let mut batch = db.batch();
    (0..9u8).for_each(|n| batch.merge(&moody, [n], "operand"));
    let mut tx = db.transaction();
    assert_eq!(tx.range(&moody, [3]..[9]).count(), 6);
    tx.insert(&moody, [60], "new").unwrap();
    moody.insert([70], "newer than the transaction").unwrap();
    mood.set_panicking(true);
    let results = [catch_unwind(AssertUnwindSafe(|| batch.commit())), catch_unwind(AssertUnwindSafe(|| tx.commit()))];
    mood.set_panicking(false);
    for result in results {
        assert_eq!(error_kind(result.expect("the panic is caught")), ErrorKind::Invalid);
    }
    assert!(!db.metrics().poisoned && batch.is_empty());
    assert_eq!(moody.get([3]).unwrap().unwrap(), [3]);
}

/// A comparator that panics while a batch is applied: the commit returns an error, and no pointer to a blob value stays
/// in the batch.
#[test]
fn batch_is_empty_after_a_comparator_panic() {
    let mood = moody_comparator();
    let db = config(&MemFs::new()).open().unwrap();
    let separation = KvSeparationOptions::default().compression(CompressionType::None);
    let blobs = db.open_partition("blobs", PartitionCreateOptions::default().with_kv_separation(separation)).unwrap();
    let moody = db.open_partition_with_comparator("moody", pool_options(), mood.clone()).unwrap();
    (0..50u8).for_each(|n| moody.insert([n], [n]).unwrap());
    let mut batch = db.batch();
    batch.insert(&blobs, "k", vec![7; 1 << 20]);
    batch.insert(&moody, [7], "new");
    mood.set_panicking(true);
    let caught = catch_unwind(AssertUnwindSafe(|| batch.commit()));
    mood.set_panicking(false);
    assert_eq!(error_kind(caught.expect("the panic is caught")), ErrorKind::Poisoned);
    assert!(batch.is_empty());
    assert_eq!(error_kind(batch.commit()), ErrorKind::Poisoned);
    assert!(!blobs.contains_key("k").unwrap());
}

/// Regression: a comparator panicked while a commit reserved space in a pool. The panic reached the caller of the
/// commit, and the database was not poisoned.
#[test]
fn commit_is_poisoned_by_a_panic_in_reservation() {
    let mood = moody_comparator();
    let db = config(&MemFs::new()).open().unwrap();
    let moody = db.open_partition_with_comparator("moody", pool_options(), mood.clone()).unwrap();
    (0..200u8).for_each(|n| moody.insert([n], [n]).unwrap());
    let mut batch = db.batch();
    batch.remove_range(&moody, [1]..[100]);
    mood.set_panicking(true);
    let caught = catch_unwind(AssertUnwindSafe(|| batch.commit()));
    mood.set_panicking(false);
    assert_eq!(error_kind(caught.expect("the panic is caught")), ErrorKind::Poisoned);
    assert!(db.metrics().poisoned);
    assert_eq!(moody.len().unwrap(), 200, "nothing of the batch is applied");
}

/// Regression: a comparator panicked in `insert` of an ingest, and the caller caught the panic. The ingest then
/// committed the other entries.
#[test]
fn ingest_fails_after_a_comparator_panic() {
    for options in [PartitionCreateOptions::default(), pool_options()] {
        let mood = moody_comparator();
        let db = config(&MemFs::new()).open().unwrap();
        let p = db.open_partition_with_comparator("moody", options, mood.clone()).unwrap();
        let mut ingest = p.start_ingest().unwrap();
        ingest.insert("a", "1").unwrap();
        mood.set_panicking(true);
        catch_unwind(AssertUnwindSafe(|| ingest.insert("b", "2"))).unwrap_err();
        mood.set_panicking(false);
        ingest.insert("c", "3").unwrap();
        assert_eq!(ingest.commit().unwrap_err().kind(), ErrorKind::Invalid);
        assert!(p.is_empty().unwrap());
    }
}
