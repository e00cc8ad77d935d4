//! Lifetimes: handles, iterators and snapshots after partitions and databases are closed.

use std::sync::Arc;

use azekura::testing::MemFs;
use azekura::{Database, ErrorKind, Partition, PartitionCreateOptions};

use super::{config, error_kind, open, open_partition};
use crate::testkit::watchdog::run_with_timeout;

fn fill(p: &Partition, keys: std::ops::Range<u32>) {
    keys.for_each(|n| p.insert(format!("{n:04}"), format!("value {n}")).unwrap());
}

#[test]
fn handles_of_a_deleted_partition_are_closed() {
    let machine = MemFs::new();
    let db = open(&machine);
    let p = open_partition(&db, "p");
    fill(&p, 0..50);
    p.flush().unwrap();
    let (other, snapshot) = (p.clone(), db.snapshot());
    let mut batch = db.batch();
    batch.insert(&open_partition(&db, "q"), "k", "v");
    batch.insert(&other, "k", "v");
    db.delete_partition(p.clone()).unwrap();
    let closed = [
        error_kind(other.get("0001")),
        error_kind(other.contains_key("0001")),
        error_kind(other.size_of("0001")),
        error_kind(other.multi_get(["0001"])),
        error_kind(other.insert("k", "v")),
        error_kind(other.remove("k")),
        error_kind(other.remove_weak("k")),
        error_kind(other.first_key_value()),
        error_kind(other.len()),
        error_kind(other.is_empty()),
        error_kind(other.flush()),
        error_kind(other.major_compact()),
        error_kind(other.iter().next().unwrap()),
        error_kind(other.range("a"..).next_back().unwrap()),
        error_kind(other.prefix("a").next().unwrap()),
        error_kind(db.snapshot().get(&other, "0001")),
        error_kind(db.snapshot().iter(&other).next().unwrap()),
        error_kind(batch.commit()),
        error_kind(db.delete_partition(p)),
    ];
    assert!(closed.iter().all(|kind| *kind == ErrorKind::Closed), "{closed:?}");
    assert_eq!(snapshot.get(&other, "0001").unwrap().unwrap(), "value 1", "it was created before");
    assert!(open_partition(&db, "q").is_empty().unwrap(), "half a batch");
    let again = open_partition(&db, "p");
    assert!(again.is_empty().unwrap() && other.get("0001").is_err(), "a new partition with the same name is distinct");
    again.insert("k", "v").unwrap();
    while db.step().unwrap() {}
    drop((again, other, snapshot, batch, db));
    let db = open(&machine);
    assert_eq!((open_partition(&db, "p").len().unwrap(), db.list_partitions().len()), (1, 2));
}

#[test]
fn last_handle_of_any_kind_closes_cleanly() {
    let machine = MemFs::new();
    for last in 0..4 {
        let db = open(&machine);
        assert_eq!(db.metrics().replayed_records, 0, "before {last}");
        let p = open_partition(&db, "p");
        fill(&p, 0..20);
        p.insert("last", [last]).unwrap();
        let (copy, snapshot, batch) = (db.clone(), db.snapshot(), db.batch());
        let mut handles: Vec<Box<dyn std::any::Any>> =
            vec![Box::new(db), Box::new(p), Box::new(snapshot), Box::new(copy)];
        drop(batch);
        let last_handle = handles.swap_remove(usize::from(last));
        drop(handles);
        assert_eq!(error_kind(config(&machine).open()), ErrorKind::Locked, "a handle still exists");
        drop(last_handle);
    }
    let db = open(&machine);
    assert_eq!(db.metrics().replayed_records, 0);
    assert_eq!(open_partition(&db, "p").get("last").unwrap().as_deref(), Some(&[3][..]));
}

#[test]
fn last_handle_closes_cleanly_with_workers() {
    let machine = MemFs::new();
    for life in 0..4u8 {
        let env: std::sync::Arc<dyn azekura::fs::Env> = std::sync::Arc::new(azekura::fs::SystemEnv::new());
        let db = config(&machine).workers(2).env(env).open().unwrap();
        assert_eq!(db.metrics().replayed_records, 0);
        let options = azekura::PartitionCreateOptions::default().max_memtable_size(4 << 10);
        let p = db.open_partition("p", options).unwrap();
        (0..500u32).for_each(|n| p.insert(n.to_be_bytes(), [life; 40]).unwrap());
        if life % 2 == 0 { drop(p) } else { db.close().unwrap() }
    }
    assert_eq!(open_partition(&open(&machine), "p").len().unwrap(), 500);
}

/// A listener that holds a handle and drops it on a worker's thread.
#[derive(Default)]
struct HandleDroppingListener(std::sync::Mutex<Option<Database>>);

impl azekura::Listener for HandleDroppingListener {
    fn on_event(&self, event: &azekura::Event) {
        if matches!(event, azekura::Event::Flushed { .. }) {
            let last = self.0.lock().unwrap().take();
            drop(last);
        }
    }
}

#[test]
fn the_last_handle_may_be_dropped_by_a_worker() {
    run_with_timeout("a worker that waits for itself", || {
        let machine = MemFs::new();
        let env: Arc<dyn azekura::fs::Env> = Arc::new(azekura::fs::SystemEnv::new());
        let holder = Arc::new(HandleDroppingListener::default());
        let db = config(&machine).workers(1).env(env).listener(holder.clone()).open().unwrap();
        let p = db.open_partition("p", PartitionCreateOptions::default().max_memtable_size(4 << 10)).unwrap();
        *holder.0.lock().unwrap() = Some(db.clone());
        drop(db);
        (0..200u32).for_each(|n| p.insert(n.to_be_bytes(), [7; 40]).unwrap());
        drop(p);
        // The last handle closes the database.
        while config(&machine).open().is_err_and(|e| e.kind() == ErrorKind::Locked) {
            std::thread::yield_now();
        }
        assert_eq!(open_partition(&open(&machine), "p").len().unwrap(), 200);
    });
}

#[test]
fn close_under_load_stops_writers_without_loss() {
    run_with_timeout("a close under load", || {
        let machine = MemFs::new();
        let env: Arc<dyn azekura::fs::Env> = Arc::new(azekura::fs::SystemEnv::new());
        let db = config(&machine).workers(2).env(env).open().unwrap();
        let p = db.open_partition("p", PartitionCreateOptions::default().max_memtable_size(16 << 10)).unwrap();
        let write = |writer: u8, p: &Partition| -> u32 {
            let mut written = 0u32;
            while p.insert([&[writer][..], &written.to_be_bytes()].concat(), [7; 30]).is_ok() {
                written += 1;
            }
            assert_eq!(error_kind(p.insert("late", "v")), ErrorKind::Closed);
            written
        };
        let written: Vec<u32> = std::thread::scope(|scope| {
            let p = &p;
            let writers: Vec<_> = (0..3).map(|writer| scope.spawn(move || write(writer, p))).collect();
            while p.approximate_len() < 3_000 {
                std::thread::yield_now();
            }
            db.close().unwrap();
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        drop(p);
        let p = open_partition(&open(&machine), "p");
        for (writer, written) in written.into_iter().enumerate() {
            assert_eq!(p.prefix([writer as u8]).count() as u32, written, "of writer {writer}");
        }
    });
}

/// Calls in progress on other threads end before the lock of the directory is released.
#[test]
fn close_waits_for_work_of_other_threads() {
    run_with_timeout("a close during background work", || {
        for round in 0..60u64 {
            let machine = MemFs::new();
            let options = || PartitionCreateOptions::default().max_memtable_size(8 << 10).block_size(256);
            let db = config(&machine).open().unwrap();
            let p = db.open_partition("p", options()).unwrap();
            fill(&p, 0..300);
            let began = std::sync::atomic::AtomicBool::new(false);
            std::thread::scope(|scope| {
                let (p, began) = (&p, &began);
                let compacting = scope.spawn(move || {
                    loop {
                        began.store(true, std::sync::atomic::Ordering::SeqCst);
                        if let Err(error) = p.major_compact() {
                            return error.kind();
                        }
                        fill_until_closed(p);
                    }
                });
                while !began.load(std::sync::atomic::Ordering::SeqCst) {}
                std::thread::sleep(std::time::Duration::from_micros(round * 37 % 900));
                db.close().unwrap();
                let files = || crate::testkit::test_dir::dir_contents(&machine, std::path::Path::new("/db"));
                let before = files();
                let again = config(&machine).open_read_only().unwrap();
                assert!(open_partition(&again, "p").len().unwrap() >= 300);
                assert_eq!(compacting.join().unwrap(), ErrorKind::Closed);
                let pairs: azekura::Result<Vec<_>> = open_partition(&again, "p").iter().collect();
                assert_eq!(pairs.unwrap().len() as u64, open_partition(&again, "p").len().unwrap());
                assert!(before == files(), "round {round}: work continued after the close");
            });
        }
    });
}

fn fill_until_closed(p: &Partition) {
    for n in 0..50u32 {
        if p.insert(format!("{n:04}"), n.to_be_bytes()).is_err() {
            return;
        }
    }
}

#[test]
fn after_close_every_other_handle_is_closed() {
    let machine = MemFs::new();
    let db = open(&machine);
    let p = open_partition(&db, "p");
    fill(&p, 0..20);
    let (copy, snapshot) = (db.clone(), db.snapshot());
    let mut batch = copy.batch();
    batch.insert(&p, "k", "v");
    db.close().unwrap();
    let closed = [
        error_kind(p.insert("k", "v")),
        error_kind(batch.commit()),
        error_kind(p.flush()),
        error_kind(copy.persist(azekura::PersistMode::SyncAll)),
        error_kind(copy.open_partition("new", Default::default())),
        error_kind(copy.checkpoint("/copy")),
        error_kind(copy.step()),
        error_kind(p.get("0001")),
        error_kind(snapshot.get(&p, "0001")),
        error_kind(p.len()),
    ];
    assert!(closed.iter().all(|kind| *kind == ErrorKind::Closed), "{closed:?}");
    assert_eq!(open_partition(&open(&machine), "p").len().unwrap(), 20, "the directory is unlocked");
    copy.close().unwrap();
}

#[test]
fn iterators_outlive_every_handle() {
    let machine = MemFs::new();
    let db = open(&machine);
    let p = open_partition(&db, "p");
    fill(&p, 0..100);
    p.flush().unwrap();
    fill(&p, 100..200);
    let (fresh, mut begun) = (p.iter(), p.iter());
    let range = db.snapshot().range(&p, "0050".."0150");
    begun.next().unwrap().unwrap();
    begun.next_back().unwrap().unwrap();
    drop((p, db));
    rewrite_all_tables(&machine);
    let keys = |iter: azekura::Iter| iter.map(|pair| pair.unwrap().0.to_vec()).collect::<Vec<_>>();
    let wanted = |keys: std::ops::Range<u32>| keys.map(|n| format!("{n:04}").into_bytes()).collect::<Vec<_>>();
    assert_eq!(keys(fresh), wanted(0..200), "an iterator that had not moved");
    assert_eq!(keys(begun), wanted(1..199), "an iterator that had moved");
    assert_eq!(keys(range), wanted(50..150), "a range of a snapshot");
}

/// The next open of the directory, if it is not locked, rewrites every table.
fn rewrite_all_tables(machine: &MemFs) {
    let opened: azekura::Result<Database> = config(machine).open();
    match opened {
        Err(error) => assert_eq!(error.kind(), ErrorKind::Locked, "only an iterator may keep the database open"),
        Ok(db) => {
            let p = open_partition(&db, "p");
            fill(&p, 0..200);
            p.major_compact().unwrap();
            (0..200).for_each(|n| p.remove(format!("{n:04}")).unwrap());
            p.major_compact().unwrap();
            db.close().unwrap();
        }
    }
}

/// Regression: a snapshot could not read a partition that was deleted after it, although iterators could. The reads of
/// one snapshot failed one after the other. Later, an iterator over another partition pinned all of the deleted one.
#[test]
fn snapshot_outlives_delete_partition() {
    let machine = MemFs::new();
    let db = open(&machine);
    let separation = azekura::KvSeparationOptions::default().separation_threshold(1_000);
    let separated = azekura::PartitionCreateOptions::default().with_kv_separation(separation);
    let other = open_partition(&db, "other");
    other.insert("k", "v").unwrap();
    let mut elsewhere = other.iter();
    for (name, options) in [("tree", separated), ("pool", crate::pools::pool_options(8 << 20))] {
        let p = db.open_partition(name, options).unwrap();
        let value = |n: u8, round: u8| vec![n ^ round; if n.is_multiple_of(3) { 2_000 } else { 20 }];
        (0..50u8).for_each(|n| p.insert([n / 10, n], value(n, 1)).unwrap());
        p.flush().unwrap();
        let before = db.snapshot();
        (0..50u8).step_by(2).for_each(|n| p.insert([n / 10, n], value(n, 2)).unwrap());
        p.remove([4, 49]).unwrap();
        p.insert([9], "new").unwrap();
        let (last, tx, mut lazy) = (db.snapshot(), db.transaction(), before.keys(&p));
        let other_handle = p.clone();
        db.delete_partition(p).unwrap();
        let (p, later) = (other_handle, db.snapshot());
        while db.step().unwrap() {} // removes what is obsolete
        assert_eq!(error_kind(p.get([0, 0])), ErrorKind::Closed);
        assert_eq!(error_kind(later.get(&p, [0, 0])), ErrorKind::Closed, "a snapshot after the deletion");
        assert_eq!(error_kind(later.multi_get(&p, [[0, 0]])), ErrorKind::Closed);
        assert_eq!(error_kind(later.keys(&p).next().unwrap()), ErrorKind::Closed);
        assert_eq!(error_kind(tx.get(&p, [0, 0])), ErrorKind::Closed, "its commit would fail");
        let copy = last.clone(); // reads on after the first one was dropped
        drop(last);
        for (snapshot, round, len) in [(&before, 1, 50), (&copy, 2, 50)] {
            assert_eq!(snapshot.len(&p).unwrap(), len);
            let keys: Vec<[u8; 2]> = (0..49u8).map(|n| [n / 10, n]).collect();
            let wanted = |n: u8| value(n, if n.is_multiple_of(2) { round } else { 1 });
            for (key, found) in keys.iter().zip(snapshot.multi_get(&p, &keys).unwrap()) {
                assert_eq!(found.unwrap(), wanted(key[1]));
                assert_eq!(snapshot.get(&p, key).unwrap().unwrap(), wanted(key[1]));
                assert_eq!(snapshot.get_with(&p, key, <[u8]>::len).unwrap(), Some(wanted(key[1]).len()));
                assert_eq!(snapshot.size_of(&p, key).unwrap(), Some(wanted(key[1]).len() as u32));
            }
            assert_eq!(snapshot.contains_key(&p, [4, 49]).unwrap(), round == 1);
            assert_eq!(snapshot.get(&p, [9]).unwrap().is_some(), round == 2);
            assert!(snapshot.get(&p, "absent").unwrap().is_none());
            let third: Vec<_> = snapshot.prefix(&p, [3]).rev().map(|pair| pair.unwrap().1).collect();
            assert_eq!(third, (30..40u8).rev().map(wanted).collect::<Vec<_>>());
            let sizes = snapshot.range(&p, [2u8]..[3]).map(|pair| pair.unwrap().1.len()).sum::<usize>();
            assert_eq!(sizes, (20..30u8).map(|n| wanted(n).len()).sum::<usize>());
            assert_eq!(snapshot.first_key_value(&p).unwrap().unwrap().0, [0, 0]);
        }
        assert!(lazy.next().unwrap().is_ok() && lazy.count() == 49);
        drop((before, copy, tx, later));
        crate::regressions::run_until_no_obsolete_tables(&machine, &db, &[]);
    }
    assert!(elsewhere.next().is_some());
}
