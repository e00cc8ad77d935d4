//! Foreign code that panics: the database is poisoned, other reads go on, nothing hangs.

use std::cmp::Ordering;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering as Memory};

use azekura::fs::{MemFs, SystemEnv};
use azekura::{Comparator, Database, ErrorKind, Event, Listener, PersistMode};

use super::{config, kind, part};
use crate::world::watchdog::within_ten_seconds;

/// A comparator that panics when told to.
#[derive(Clone, Default)]
struct Moody(Arc<AtomicBool>);

impl Comparator for Moody {
    fn name(&self) -> &str {
        "moody"
    }
    fn compare(&self, a: &[u8], b: &[u8]) -> Ordering {
        assert!(!self.0.load(Memory::SeqCst), "a comparator in a bad mood");
        a.cmp(b)
    }
}

/// A listener that panics at flushes.
struct Grumpy;

impl Listener for Grumpy {
    fn on_event(&self, event: &Event) {
        assert!(!matches!(event, Event::Flushed { .. }), "a listener in a bad mood");
    }
}

/// Writing has ended, reading has not, and all waits end.
fn is_poisoned(db: Database) {
    let p = part(&db, "calm");
    assert_eq!(kind(p.insert("k", "new")), ErrorKind::Poisoned);
    assert_eq!(kind(p.flush()), ErrorKind::Poisoned);
    assert_eq!(kind(db.persist(PersistMode::SyncAll)), ErrorKind::Poisoned);
    assert_eq!(kind(db.checkpoint("/copy")), ErrorKind::Poisoned);
    assert_eq!(p.get("k").unwrap().as_deref(), Some(&b"v"[..]), "reads go on");
    assert_eq!(p.len().unwrap(), 1);
    assert!(db.metrics().poisoned);
    drop(p);
    db.close().unwrap_err();
}

fn moody(workers: usize) {
    let machine = MemFs::new();
    let mood = Moody::default();
    let env = || -> Arc<dyn azekura::fs::Env> { Arc::new(SystemEnv::new()) };
    let db = config(&machine).workers(workers).env(env()).open().unwrap();
    part(&db, "calm").insert("k", "v").unwrap();
    let p = db.open_partition_with_comparator("moody", Default::default(), Arc::new(mood.clone())).unwrap();
    (0..50u8).for_each(|n| p.insert([n], [n]).unwrap());
    mood.0.store(true, Memory::SeqCst);
    assert_eq!(kind(p.insert([7], "new")), ErrorKind::Poisoned);
    mood.0.store(false, Memory::SeqCst);
    assert_eq!(p.len().unwrap(), 50, "reads of the partition go on when the comparator has calmed down");
    drop(p);
    is_poisoned(db);
    let db = config(&machine).open().unwrap();
    assert_eq!(part(&db, "calm").get("k").unwrap().as_deref(), Some(&b"v"[..]));
    let p = db.open_partition_with_comparator("moody", Default::default(), Arc::new(mood)).unwrap();
    assert_eq!(p.len().unwrap(), 50);
}

#[test]
fn a_comparator_that_panics_in_a_write_poisons() {
    within_ten_seconds("by hand", || moody(0));
    within_ten_seconds("with workers", || moody(2));
}

#[test]
fn a_comparator_that_panics_in_background_work_poisons() {
    within_ten_seconds("a compaction", || {
        let machine = MemFs::new();
        let mood = Moody::default();
        let db = config(&machine).open().unwrap();
        part(&db, "calm").insert("k", "v").unwrap();
        let p = db.open_partition_with_comparator("moody", Default::default(), Arc::new(mood.clone())).unwrap();
        for round in 0..3u8 {
            (0..50u8).for_each(|n| p.insert([n], [round]).unwrap());
            p.flush().unwrap();
        }
        mood.0.store(true, Memory::SeqCst);
        assert_eq!(kind(p.major_compact()), ErrorKind::Poisoned);
        drop(p);
        is_poisoned(db);
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
        within_ten_seconds("a listener", move || {
            let machine = MemFs::new();
            let env: Arc<dyn azekura::fs::Env> = Arc::new(SystemEnv::new());
            let db = config(&machine).workers(workers).env(env).listener(Arc::new(Grumpy)).open().unwrap();
            part(&db, "calm").insert("k", "v").unwrap();
            // The flush itself may have succeeded before the listener heard of it.
            drop(part(&db, "calm").flush());
            while !db.metrics().poisoned {
                std::thread::yield_now();
            }
            is_poisoned(db);
            assert!(part(&config(&machine).open().unwrap(), "calm").contains_key("k").unwrap());
        });
    }
}
