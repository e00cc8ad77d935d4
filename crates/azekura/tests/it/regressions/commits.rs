//! Commits during deletions, and comparators that read their own partition or end an ingest.

use std::cell::Cell;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use azekura::testing::{MemFs, TestComparator, TestOrder};
use azekura::{Config, Database, EngineType, ErrorKind, Partition, PartitionCreateOptions, PmemOptions};

use super::open_partition;
use crate::testkit::watchdog::run_with_timeout;

fn open() -> Database {
    Config::new("/db").fs(Arc::new(MemFs::new())).workers(0).open().unwrap()
}

fn lsm_and_pool() -> [PartitionCreateOptions; 2] {
    let pool = EngineType::Pmem(PmemOptions::default().max_size(4 << 20));
    [PartitionCreateOptions::default(), PartitionCreateOptions::default().engine(pool)]
}

/// Deletes the partition on another thread in the middle of the next comparison.
fn delete_in_next_comparison(comparator: &TestComparator, db: &Database, deleted: &Partition) {
    let (db, deleted) = (db.clone(), deleted.clone());
    comparator.call_once(move || {
        std::thread::spawn(move || db.delete_partition(deleted)).join().unwrap().unwrap();
    });
}

/// A commit checked once, before its validation, whether a partition was deleted. One of the two partitions of a
/// transaction was deleted after that check. The commit returned `Ok`, and only the records of the other partition were
/// written.
#[test]
fn commit_during_deletion_is_whole_or_closed() {
    run_with_timeout("a commit during a deletion", || {
        for (at, gate_options) in lsm_and_pool().into_iter().chain(lsm_and_pool()).enumerate() {
            let deleted_options = lsm_and_pool()[at / 2].clone();
            let (db, comparator) = (open(), Arc::new(TestComparator::new(TestOrder::Reversed)));
            let gate = db.open_partition_with_comparator("gate", gate_options, comparator.clone()).unwrap();
            let deleted = db.open_partition("deleted", deleted_options).unwrap();
            gate.insert("b", "old").unwrap();
            let mut tx = db.transaction();
            assert_eq!(tx.range(&gate, "b"..).count(), 1);
            tx.insert(&gate, "b", "new").unwrap();
            tx.insert(&deleted, "b", "new").unwrap();
            gate.insert("c", "beyond what the transaction has read").unwrap();
            // The validation of the range compares keys.
            delete_in_next_comparison(&comparator, &db, &deleted);
            let committed = tx.commit();
            assert!(!db.partition_exists("deleted"), "nothing was compared");
            assert_eq!(committed.unwrap_err().kind(), ErrorKind::Closed);
            assert_eq!(gate.get("b").unwrap().unwrap(), "old", "half of a commit was written");
            gate.insert("d", "not poisoned").unwrap();
        }
    });
}

/// As the test above, for a single change of a pool, which its own thread applies.
#[test]
fn pool_change_during_deletion_is_closed() {
    run_with_timeout("a change during a deletion", || {
        let (db, comparator) = (open(), Arc::new(TestComparator::new(TestOrder::Reversed)));
        let [_, options] = lsm_and_pool();
        for change in [|p: &Partition| p.insert([9; 4], "new"), |p: &Partition| p.remove([0; 4])] {
            let pool = db.open_partition_with_comparator("pool", options.clone(), comparator.clone()).unwrap();
            (0..300u32).for_each(|n| pool.insert(n.to_be_bytes(), "old").unwrap());
            delete_in_next_comparison(&comparator, &db, &pool);
            let changed = change(&pool);
            assert!(!db.partition_exists("pool"), "nothing was compared");
            assert_eq!(changed.unwrap_err().kind(), ErrorKind::Closed);
            let other = open_partition(&db, "other");
            other.insert("k", "not poisoned").unwrap();
        }
    });
}

thread_local! {
    static IS_SCANNING: Cell<bool> = const { Cell::new(false) };
}

/// Each comparison scans the partition in `slot`, unless a scan has called it.
fn scanning_comparator(slot: &Arc<Mutex<Option<Partition>>>) -> TestComparator {
    let slot = Arc::clone(slot);
    TestComparator::minimal(TestOrder::Bytes).with_hook(move |_, _| {
        if !IS_SCANNING.replace(true) {
            let own = slot.lock().unwrap().clone();
            if let Some(own) = own {
                own.iter().for_each(|pair| drop(pair.unwrap()));
                own.iter().rev().for_each(|pair| drop(pair.unwrap()));
            }
            IS_SCANNING.set(false);
        }
    })
}

/// Scans remember ranges of deleted keys, and compared them under a lock. A comparator that scanned its own partition
/// waited for that lock of its own thread.
#[test]
fn a_comparator_may_scan_its_own_partition() {
    run_with_timeout("a scan by a comparator", || {
        let (db, slot) = (open(), Arc::new(Mutex::new(None)));
        let comparator = Arc::new(scanning_comparator(&slot));
        let p = db.open_partition_with_comparator("p", Default::default(), comparator).unwrap();
        let insert = |n: u8| p.insert([n], [n]).unwrap();
        (0..120).for_each(insert);
        (20..100).for_each(|n: u8| p.remove([n]).unwrap());
        *slot.lock().unwrap() = Some(p.clone());
        let found = || p.keys().map(|key| key.unwrap()[0]).collect::<Vec<u8>>();
        let mut keys: Vec<u8> = (0..20).chain(100..120).collect();
        assert_eq!(found(), keys, "learns the range of deleted keys");
        for n in [60, 20, 99, 61] {
            insert(n);
            keys.push(n);
            keys.sort_unstable();
            assert_eq!(found(), keys, "inserted {n}");
            assert_eq!(p.keys().rev().count(), keys.len());
        }
        p.remove([60]).unwrap();
        p.flush().unwrap();
        assert_eq!(found().len(), keys.len() - 1);
        *slot.lock().unwrap() = None; // it keeps the database open
    });
}

/// A write called a comparator that called `Ingest::commit`. The call waited for the group-commit leader, which was its
/// own thread. Only the begin of an ingest was refused there.
#[test]
fn an_ingest_may_not_end_in_a_comparator() {
    run_with_timeout("the end of an ingest", || {
        for ends_empty in [true, false] {
            let (db, comparator) = (open(), Arc::new(TestComparator::new(TestOrder::Reversed)));
            let p = db.open_partition_with_comparator("p", Default::default(), comparator.clone()).unwrap();
            p.insert("b", "1").unwrap();
            let leaked: &'static Partition = Box::leak(Box::new(p.clone()));
            let mut ingest = leaked.start_ingest().unwrap();
            if !ends_empty {
                ingest.insert("c", "2").unwrap();
            }
            let (send, results) = channel();
            comparator.call_once(move || send.send(ingest.commit()).unwrap());
            p.insert("a", "3").unwrap();
            assert_eq!(results.recv().unwrap().unwrap_err().kind(), ErrorKind::Invalid);
            assert_eq!(p.len().unwrap(), 2);
            p.ingest([("c", "2")]).unwrap();
        }
    });
}
