//! User code that panics: the database is poisoned, other reads continue, no call hangs.

use std::cmp::Ordering;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering as Memory};

use azekura::fs::SystemEnv;
use azekura::testing::MemFs;
use azekura::{Comparator, Database, ErrorKind, Event, Listener, PersistMode};

use super::{config, error_kind, open_partition};
use crate::testkit::watchdog::run_with_timeout;

/// A comparator that panics when a flag is set.
#[derive(Clone, Default)]
struct PanicOnDemandComparator(Arc<AtomicBool>);

impl Comparator for PanicOnDemandComparator {
    fn name(&self) -> &str {
        "moody"
    }
    fn compare(&self, a: &[u8], b: &[u8]) -> Ordering {
        assert!(!self.0.load(Memory::SeqCst), "a comparator in a bad mood");
        a.cmp(b)
    }
}

/// A listener that panics at flushes.
struct PanicOnFlushListener;

impl Listener for PanicOnFlushListener {
    fn on_event(&self, event: &Event) {
        assert!(!matches!(event, Event::Flushed { .. }), "a listener in a bad mood");
    }
}

/// Writes fail, reads succeed, and all waits end.
fn assert_poisoned(db: Database) {
    let p = open_partition(&db, "calm");
    assert_eq!(error_kind(p.insert("k", "new")), ErrorKind::Poisoned);
    assert_eq!(error_kind(p.flush()), ErrorKind::Poisoned);
    assert_eq!(error_kind(db.persist(PersistMode::SyncAll)), ErrorKind::Poisoned);
    assert_eq!(error_kind(db.checkpoint("/copy")), ErrorKind::Poisoned);
    assert_eq!(p.get("k").unwrap().as_deref(), Some(&b"v"[..]), "reads go on");
    assert_eq!(p.len().unwrap(), 1);
    assert!(db.metrics().poisoned);
    drop(p);
    db.close().unwrap_err();
}

fn check_comparator_panic(workers: usize) {
    let machine = MemFs::new();
    let mood = PanicOnDemandComparator::default();
    let env = || -> Arc<dyn azekura::fs::Env> { Arc::new(SystemEnv::new()) };
    let db = config(&machine).workers(workers).env(env()).open().unwrap();
    open_partition(&db, "calm").insert("k", "v").unwrap();
    let p = db.open_partition_with_comparator("moody", Default::default(), Arc::new(mood.clone())).unwrap();
    (0..50u8).for_each(|n| p.insert([n], [n]).unwrap());
    mood.0.store(true, Memory::SeqCst);
    assert_eq!(error_kind(p.insert([7], "new")), ErrorKind::Poisoned);
    mood.0.store(false, Memory::SeqCst);
    assert_eq!(p.len().unwrap(), 50, "reads of the partition go on when the comparator has calmed down");
    drop(p);
    assert_poisoned(db);
    let db = config(&machine).open().unwrap();
    assert_eq!(open_partition(&db, "calm").get("k").unwrap().as_deref(), Some(&b"v"[..]));
    let p = db.open_partition_with_comparator("moody", Default::default(), Arc::new(mood)).unwrap();
    assert_eq!(p.len().unwrap(), 50);
}

#[test]
fn a_comparator_that_panics_in_a_write_poisons() {
    run_with_timeout("by hand", || check_comparator_panic(0));
    run_with_timeout("with workers", || check_comparator_panic(2));
}

#[test]
fn comparator_panic_in_background_poisons() {
    run_with_timeout("a compaction", || {
        let machine = MemFs::new();
        let mood = PanicOnDemandComparator::default();
        let db = config(&machine).open().unwrap();
        open_partition(&db, "calm").insert("k", "v").unwrap();
        let p = db.open_partition_with_comparator("moody", Default::default(), Arc::new(mood.clone())).unwrap();
        for round in 0..3u8 {
            (0..50u8).for_each(|n| p.insert([n], [round]).unwrap());
            p.flush().unwrap();
        }
        mood.0.store(true, Memory::SeqCst);
        assert_eq!(error_kind(p.major_compact()), ErrorKind::Poisoned);
        drop(p);
        assert_poisoned(db);
        mood.0.store(false, Memory::SeqCst);
        let db = config(&machine).open().unwrap();
        let p = db.open_partition_with_comparator("moody", Default::default(), Arc::new(mood)).unwrap();
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
