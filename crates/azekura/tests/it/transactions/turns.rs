//! Exclusive transactions: no other commit runs, and every wait ends.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use azekura::testing::{FaultFs, MemFs};
use azekura::{Config, ErrorKind, Isolation, Partition, PersistMode, Transaction, TransactionOptions};

use super::Fixture;
use crate::testkit::watchdog::run_with_timeout;

fn exclusive() -> TransactionOptions {
    TransactionOptions::default().exclusive(true)
}

type Write = fn(&Fixture, &Partition);

/// All kinds of writes, which set `k` to `other`.
const WRITES: &[(&str, Write)] = &[
    ("insert", |_, p| p.insert("k", "other").unwrap()),
    ("batch", |fixture, p| {
        let mut batch = fixture.db.batch();
        batch.insert(p, "k", "other");
        batch.insert(p, "k2", "other");
        batch.commit().unwrap();
    }),
    ("transaction", |fixture, p| {
        fixture.db.transact(|tx| tx.insert(p, "k", "other")).unwrap();
    }),
    ("exclusive", |fixture, p| {
        let mut tx = fixture.db.transaction_with(exclusive()).unwrap();
        tx.insert(p, "k", "other").unwrap();
        tx.commit().unwrap();
    }),
    ("fetch_update", |_, p| drop(p.fetch_update("k", |_| Some("other")).unwrap())),
];

#[test]
fn other_writes_wait_for_the_turn() {
    run_with_timeout("other_writes_wait_for_the_turn", || {
        let fixture = Fixture::new();
        for p in fixture.partitions() {
            p.insert("warm", "up").unwrap(); // opens the path of single changes
            for (name, write) in WRITES {
                p.insert("k", "before").unwrap();
                let mut tx = fixture.db.transaction_with(exclusive()).unwrap();
                let (begins, begun) = channel();
                thread::scope(|threads| {
                    let fixture = &fixture;
                    threads.spawn(move || {
                        begins.send(()).unwrap();
                        write(fixture, p);
                    });
                    begun.recv().unwrap();
                    thread::sleep(Duration::from_millis(5));
                    assert_eq!(p.get("k").unwrap().unwrap(), "before", "{name} does not wait in {}", p.name);
                    assert_eq!(tx.get(p, "k").unwrap().unwrap(), "before");
                    tx.insert(p, "k", "mine").unwrap();
                    tx.commit().unwrap();
                });
                assert_eq!(p.get("k").unwrap().unwrap(), "other", "{name} in {}", p.name);
            }
        }
    });
}

/// Other writes once waited for the end of the turn, and the turn for the sync of its commit.
#[test]
fn writes_do_not_wait_for_the_sync_of_a_turn() {
    run_with_timeout("writes_do_not_wait_for_the_sync_of_a_turn", || {
        let fs = FaultFs::new(Arc::new(MemFs::new()));
        let config = Config::new("/db").fs(Arc::new(fs.clone())).workers(0).mapped_wal(false);
        let db = config.durability(PersistMode::SyncData).open().unwrap();
        let p = db.open_partition("p", super::lsm_options()).unwrap();
        let mut tx = db.transaction_with(exclusive()).unwrap();
        tx.insert(&p, "k", "1").unwrap();
        fs.hold_syncs(true);
        thread::scope(|threads| {
            threads.spawn(|| {
                let mut batch = db.batch();
                batch.durability(PersistMode::Buffer);
                batch.insert(&p, "other", "2");
                batch.commit().unwrap();
                fs.hold_syncs(false);
            });
            tx.commit().unwrap(); // its sync waits for the other write
        });
        assert_eq!(p.len().unwrap(), 2);
    });
}

#[test]
fn write_of_the_same_thread_is_invalid() {
    let fixture = Fixture::new();
    for p in fixture.partitions() {
        p.insert("k", "1").unwrap();
        let mut tx = fixture.db.transaction_with(exclusive()).unwrap();
        tx.insert(p, "k", "2").unwrap();
        let mut batch = fixture.db.batch();
        batch.insert(p, "k", "3");
        batch.insert(p, "l", "3");
        let errors = [
            p.insert("k", "3").unwrap_err(),
            p.remove("k").unwrap_err(),
            batch.commit().unwrap_err(),
            p.fetch_update("k", |_| Some("3")).unwrap_err(),
            fixture.db.transact(|other| other.insert(p, "k", "3")).unwrap_err(),
            fixture.db.transaction_with(exclusive()).unwrap_err(),
        ];
        assert!(errors.iter().all(|error| error.kind() == ErrorKind::Invalid), "{errors:?}");
        tx.commit().unwrap();
        assert_eq!(p.get("k").unwrap().unwrap(), "2");
        p.insert("k", "4").unwrap();
    }
}

#[test]
fn turn_moves_with_its_transaction() {
    let fixture = Fixture::new();
    let p = &fixture.pool;
    let mut tx = fixture.db.transaction_with(exclusive()).unwrap();
    thread::scope(|threads| {
        threads.spawn(|| {
            tx.insert(p, "k", "mine").unwrap();
            assert_eq!(p.insert("k", "other").unwrap_err().kind(), ErrorKind::Invalid);
            tx.commit().unwrap();
        });
    });
    p.insert("k", "later").unwrap();
}

/// A transaction that had moved to another thread and only read there still belonged to the first thread: a write
/// without the transaction waited for itself on the second thread, and was refused on the first one.
#[test]
fn reads_move_the_turn_to_their_thread() {
    type Call = fn(&mut Transaction, &Partition);
    let calls: [(&str, Call); 7] = [
        ("get", |tx, p| drop(tx.get(p, "k").unwrap())),
        ("size_of", |tx, p| _ = tx.size_of(p, "k").unwrap()),
        ("iter", |tx, p| drop(tx.iter(p))),
        ("untracked", |tx, p| drop(tx.untracked().prefix(p, "k"))),
        ("multi_get", |tx, p| drop(tx.multi_get(p, ["k"]).unwrap())),
        ("savepoint", |tx, _| drop(tx.savepoint())),
        ("durability", |tx, _| _ = tx.durability(PersistMode::SyncAll)),
    ];
    for (name, call) in calls {
        run_with_timeout(name, move || {
            let fixture = Fixture::new();
            for p in fixture.partitions() {
                let mut tx = fixture.db.transaction_with(exclusive()).unwrap();
                thread::scope(|threads| {
                    threads.spawn(|| {
                        call(&mut tx, p);
                        assert_eq!(p.insert("k", "other").unwrap_err().kind(), ErrorKind::Invalid, "{name}");
                    });
                });
                call(&mut tx, p);
                assert_eq!(p.insert("k", "other").unwrap_err().kind(), ErrorKind::Invalid, "{name}, back again");
            }
        });
    }
}

#[test]
fn panic_releases_the_turn() {
    let fixture = Fixture::new();
    for p in fixture.partitions() {
        p.insert("k", "1").unwrap();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut tx = fixture.db.transaction_with(exclusive()).unwrap();
            tx.insert(p, "k", "2").unwrap();
            panic!("in the turn");
        }));
        assert!(panicked.is_err());
        assert_eq!(p.get("k").unwrap().unwrap(), "1");
        p.insert("k", "3").unwrap(); // not poisoned, and no turn
        fixture.db.transaction_with(exclusive()).unwrap().commit().unwrap();
    }
}

#[test]
fn closing_ends_the_wait_for_a_turn() {
    run_with_timeout("closing_ends_the_wait_for_a_turn", || {
        for pool in [false, true] {
            let fixture = Fixture::new();
            let p = fixture.partitions()[usize::from(pool)];
            p.insert("k", "1").unwrap();
            let mut tx = fixture.db.transaction_with(exclusive()).unwrap();
            tx.insert(p, "k", "2").unwrap();
            thread::scope(|threads| {
                let waits = threads.spawn(|| p.insert("k", "3").unwrap_err().kind());
                thread::sleep(Duration::from_millis(5));
                fixture.db.clone().close().unwrap();
                assert_eq!(waits.join().unwrap(), ErrorKind::Closed);
            });
            assert_eq!(tx.commit().unwrap_err().kind(), ErrorKind::Closed);
        }
    });
}

/// The transaction reads two hot keys that other threads change all the time.
#[test]
fn transact_makes_progress_under_contention() {
    run_with_timeout("transact_makes_progress_under_contention", || {
        let fixture = Fixture::new();
        let stop = std::sync::atomic::AtomicBool::new(false);
        let is_stopped = || stop.load(std::sync::atomic::Ordering::Relaxed);
        thread::scope(|threads| {
            for p in fixture.partitions() {
                p.insert("hot", "also if the thread gets no turn").unwrap();
                threads.spawn(move || {
                    (0u64..).take_while(|_| !is_stopped()).for_each(|n| p.insert("hot", n.to_le_bytes()).unwrap())
                });
            }
            let mut rounds = 0;
            for n in 0..20u8 {
                fixture
                    .db
                    .transact(|tx| {
                        rounds += 1;
                        assert!(rounds <= 4 * (usize::from(n) + 1), "a fifth round");
                        for p in fixture.partitions() {
                            tx.get(p, "hot")?;
                        }
                        thread::yield_now();
                        tx.insert(&fixture.lsm, [n], "done")
                    })
                    .unwrap();
                rounds = 4 * (usize::from(n) + 1);
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        assert_eq!(fixture.lsm.len().unwrap(), 21);
    });
}

/// One commit of another thread in each of the first three rounds.
#[test]
fn conflicts_and_turns_are_counted() {
    for pool in [false, true] {
        let fixture = Fixture::new();
        let p = fixture.partitions()[usize::from(pool)];
        let counted = || (fixture.db.metrics().conflicts, fixture.db.metrics().exclusive_turns);
        let interfere = |round: &mut u8| {
            *round += 1;
            if *round <= 3 {
                p.insert("k", [*round]).unwrap();
            }
        };
        let mut round = 0;
        let update = |tx: &mut Transaction| {
            tx.get(p, "k")?;
            interfere(&mut round);
            tx.insert(p, "k", "done")
        };
        fixture.db.transact(update).unwrap();
        assert_eq!(counted(), (3, 1));
        let mut round = 0;
        p.fetch_update("k", |_| {
            interfere(&mut round);
            Some("done")
        })
        .unwrap();
        assert_eq!(counted(), (6, 2));
        let mut batch = fixture.db.batch();
        batch.expect(p, "k", Some(b"something else"));
        assert_eq!(batch.commit().unwrap_err().kind(), ErrorKind::Conflict);
        assert_eq!(counted(), (7, 2));
        fixture.db.transaction_with(exclusive()).unwrap().commit().unwrap();
        assert_eq!(counted(), (7, 3));
    }
}

#[test]
fn transact_with_keeps_the_options_in_each_round() {
    let fixture = Fixture::new();
    for p in fixture.partitions() {
        let other = fixture.other(p);
        let counted = || (fixture.db.metrics().conflicts, fixture.db.metrics().exclusive_turns);
        let before = counted();
        // At snapshot isolation only the change of a key that is written interferes.
        let mut round = 0u8;
        let update = |tx: &mut Transaction| {
            round += 1;
            tx.get(other, "read")?;
            other.insert("read", [round])?;
            if round <= 2 {
                p.insert("k", [round])?;
            }
            tx.insert(p, "k", "done")
        };
        let snapshot = TransactionOptions::default().isolation(Isolation::Snapshot);
        fixture.db.transact_with(snapshot, update).unwrap();
        assert_eq!((round, p.get("k").unwrap().unwrap()), (3, "done".into()));
        assert_eq!(counted(), (before.0 + 2, before.1));
        let refused = fixture.db.transact_with(exclusive(), |tx| {
            tx.insert(p, "k", "exclusive")?;
            p.insert("k", "by the same thread")
        });
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(counted(), (before.0 + 2, before.1 + 1));
        assert_eq!(p.get("k").unwrap().unwrap(), "done");
    }
}

#[test]
fn errors_of_the_closure_end_transact() {
    let fixture = Fixture::new();
    let mut calls = 0;
    let error = fixture.db.transact(|tx| -> azekura::Result<()> {
        calls += 1;
        tx.insert(&fixture.lsm, "k", "v")?;
        Err(azekura::Error::invalid("given up"))
    });
    assert_eq!((error.unwrap_err().message(), calls), ("given up", 1));
    let mut calls = 0;
    let error = fixture.db.transact(|_| -> azekura::Result<()> {
        calls += 1;
        Err(azekura::Error::new(ErrorKind::Conflict, "not for this transaction"))
    });
    assert_eq!((error.unwrap_err().kind(), calls), (ErrorKind::Conflict, 4));
    assert!(fixture.lsm.is_empty().unwrap());
}
