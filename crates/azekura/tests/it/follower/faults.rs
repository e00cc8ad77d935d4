//! Followers whose files fail, and defects of followers that a reading of the source found.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use azekura::fs::{Fs, OpenMode};
use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, Survival, TestOrder};
use azekura::{
    CompressionType, Config, Database, ErrorKind, Event, KvSeparationOptions, Listener, Partition, PartitionComponents,
    PartitionCreateOptions, PersistMode, RecoveryMode, merge_operators,
};

use super::interleaved::{padded, separated};
use crate::changes::DIR;
use crate::pools::pool_options;
use crate::testkit::ordered_partitions::open_ordered;
use crate::testkit::test_dir::crash_or_kill;
use crate::testkit::watchdog::{run_with_timeout, wait_until};

pub(super) fn config(fs: Arc<dyn Fs>) -> Config {
    Config::new(DIR).fs(fs).workers(0)
}

/// A machine, and a file system of the follower that fails on request.
fn machines() -> (MemFs, FaultFs) {
    let machine = MemFs::new();
    (machine.clone(), FaultFs::new(Arc::new(machine)))
}

pub(super) fn open_writer(machine: &MemFs) -> Database {
    config(Arc::new(machine.clone())).open().unwrap()
}

pub(super) fn partition(db: &Database, name: &str) -> Partition {
    db.open_partition(name, Default::default()).unwrap()
}

fn eio() -> Fault {
    Fault::Error(std::io::ErrorKind::Other)
}

pub(super) fn text(partition: &Partition, key: &str) -> Option<String> {
    partition.get(key).unwrap().map(|value| String::from_utf8_lossy(&value).into_owned())
}

/// Counts the errors of background work.
#[derive(Default)]
struct ErrorCounter(AtomicU64);

impl Listener for ErrorCounter {
    fn on_event(&self, event: &Event) {
        if let Event::BackgroundError { error } = event {
            assert_eq!(error.kind(), ErrorKind::Io, "{error}");
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// The listener hears of an error that lasts once. An interval that never ends does not keep a follower from closing.
#[test]
fn a_follower_catches_up_at_its_interval() {
    let (machine, faults) = machines();
    let (writer, errors) = (open_writer(&machine), Arc::new(ErrorCounter::default()));
    let p = partition(&writer, "p");
    p.insert("k", "0").unwrap();
    let open = |interval| {
        let config = config(Arc::new(faults.clone())).listener(Arc::clone(&errors) as _);
        config.follow_interval(Some(interval)).open_follower().unwrap()
    };
    let follower = open(Duration::from_millis(1));
    let followed = follower.partition("p").unwrap();
    for round in 1..4u64 {
        p.insert("k", round.to_string()).unwrap();
        wait_until("the commit is visible", || text(&followed, "k") == Some(round.to_string()));
        faults.inject(FaultPlan::new(OpKind::Any, 1, eio()).forever());
        p.insert("k", "meanwhile").unwrap();
        wait_until("the listener hears of the error", || errors.0.load(Ordering::SeqCst) >= round);
        let before = faults.fault_count();
        wait_until("several attempts have failed", || faults.fault_count() > before + 3);
        assert_eq!(errors.0.load(Ordering::SeqCst), round);
        faults.clear_faults();
        wait_until("the next attempt succeeds", || text(&followed, "k").as_deref() == Some("meanwhile"));
    }
    follower.close().unwrap();
    p.insert("k", "later").unwrap();
    let idle = open(Duration::MAX);
    assert_eq!(text(&idle.partition("p").unwrap(), "k").as_deref(), Some("later"));
    run_with_timeout("closing an idle follower", || idle.close().unwrap());
}

#[test]
fn a_transaction_reads_the_state_of_its_begin() {
    let (machine, faults) = machines();
    let writer = open_writer(&machine);
    let p = partition(&writer, "p");
    p.insert("k", "old").unwrap();
    let follower = config(Arc::new(faults)).open_follower().unwrap();
    let followed = follower.partition("p").unwrap();
    let transaction = follower.transaction();
    p.insert("k", "new").unwrap();
    p.flush().unwrap();
    p.major_compact().unwrap();
    follower.catch_up().unwrap();
    assert_eq!(text(&followed, "k").as_deref(), Some("new"));
    assert_eq!(transaction.get(&followed, "k").unwrap().as_deref(), Some(&b"old"[..]));
    assert_eq!(transaction.size_of(&followed, "k").unwrap(), Some(3));
}

#[test]
fn an_unbuilt_partition_is_opened_late() {
    let (machine, faults) = machines();
    let writer = open_writer(&machine);
    let order = TestOrder::Reversed;
    let p = open_ordered(order, &writer, "p", Default::default(), None).unwrap();
    p.insert("a", "1").unwrap();
    p.flush().unwrap();
    let follower = config(Arc::new(faults)).open_follower().unwrap();
    p.insert("b", "2").unwrap();
    p.flush().unwrap();
    p.major_compact().unwrap();
    writer.step().unwrap();
    let first = open_ordered(order, &follower, "p", Default::default(), None).map(|part| part.len().unwrap());
    follower.catch_up().unwrap();
    let opened = open_ordered(order, &follower, "p", Default::default(), None);
    assert_eq!(opened.map(|part| part.len().unwrap()).unwrap(), 2, "first: {first:?}");
}

/// Regression: of a partition whose comparator the follower did not know yet, values in direct blob files could not be
/// read when it was given, and neither could tables that the writer had removed; a pool lacked what the writer had
/// flushed meanwhile.
#[test]
fn an_unbuilt_partition_is_followed() {
    for options in [separated(), Default::default(), pool_options(8 << 20)] {
        let (machine, faults) = machines();
        let writer = open_writer(&machine);
        let order = TestOrder::Reversed;
        let follower = config(Arc::new(faults)).open_follower().unwrap();
        let p = open_ordered(order, &writer, "p", options.clone(), None).unwrap();
        for (n, key) in (0..).zip(["a", "b", "c", "d"]) {
            p.insert(key, padded(n, 5_000)).unwrap();
            if n > 0 {
                p.flush().unwrap();
            }
            follower.catch_up().unwrap();
        }
        p.major_compact().unwrap();
        while writer.step().unwrap() {}
        let followed = open_ordered(order, &follower, "p", options, None).unwrap();
        let read = |key| followed.get(key).unwrap().map(|value| value.to_vec());
        assert_eq!(["a", "b", "c", "d"].map(read), [0, 1, 2, 3].map(|n| Some(padded(n, 5_000))));
    }
}

/// Regression: power loss took the blob file of a commit, and left its record in the log. A follower that was opened
/// before the recovery showed the commit, and failed to read the value.
#[test]
fn a_commit_without_its_value_is_not_shown() {
    for survival in [Survival::DataOnly, Survival::Everything] {
        let (machine, faults) = machines();
        let writer = open_writer(&machine);
        let (p, q) = (writer.open_partition("p", separated()).unwrap(), partition(&writer, "q"));
        p.set_options(separated()).unwrap();
        p.insert("k", "1").unwrap();
        writer.persist(PersistMode::SyncAll).unwrap();
        p.insert("large", padded(1, 5_000)).unwrap();
        q.insert("after", "1").unwrap();
        machine.freeze_after(Some(0));
        drop((writer, p, q));
        crash_or_kill(&machine, survival, 1);
        let is_lost = survival != Survival::Everything;
        let follower = config(Arc::new(faults)).open_follower().unwrap();
        let [fp, fq] = ["p", "q"].map(|name| follower.partition(name).unwrap());
        let check = || {
            let found = (fp.get("large").unwrap().is_some(), fq.get("after").unwrap().is_some());
            assert_eq!(found, (!is_lost, !is_lost));
            assert_eq!(text(&fp, "k").as_deref(), Some("1"));
        };
        check();
        (0..2).for_each(|_| _ = follower.catch_up().unwrap());
        check();
        let mut changes = follower.changes_since(follower.change_position().unwrap()).unwrap();
        let writer = open_writer(&machine);
        let p = writer.open_partition("p", separated()).unwrap();
        p.insert("k", "2").unwrap();
        p.flush().unwrap();
        partition(&writer, "q").insert("k", "2").unwrap();
        assert_eq!(follower.catch_up().unwrap(), writer.change_position().unwrap());
        assert_eq!([text(&fp, "k"), text(&fq, "k")].map(Option::unwrap), ["2", "2"]);
        assert_eq!((fp.len().unwrap(), fq.len().unwrap()), if is_lost { (1, 1) } else { (2, 2) });
        let read: Vec<_> = changes.by_ref().map(|commit| commit.unwrap().changes().next().is_some()).collect();
        assert_eq!(read, [true; 2], "no abandoned commit");
    }
}

#[test]
fn states_are_freed_that_no_snapshot_reads() {
    let (machine, faults) = machines();
    let writer = open_writer(&machine);
    let p = partition(&writer, "p");
    p.insert("k", "0").unwrap();
    p.flush().unwrap();
    let follower = config(Arc::new(faults.clone())).open_follower().unwrap();
    let followed = follower.partition("p").unwrap();
    let oldest = follower.snapshot();
    for n in 1..40 {
        p.insert("k", n.to_string()).unwrap();
        p.flush().unwrap();
        p.major_compact().unwrap();
        let short = follower.snapshot();
        follower.catch_up().unwrap();
        drop(short);
    }
    follower.catch_up().unwrap();
    assert_eq!(oldest.get(&followed, "k").unwrap().as_deref(), Some(&b"0"[..]));
    assert!(faults.open_count() < 12, "{} files are open for one snapshot", faults.open_count());
}

/// The tables of an ingest cannot be opened, so no later commit may be visible.
#[test]
fn held_commits_wait_until_tables_are_installed() {
    let (machine, faults) = machines();
    let writer = open_writer(&machine);
    let (p, q) = (partition(&writer, "p"), partition(&writer, "q"));
    let follower = config(Arc::new(faults.clone())).open_follower().unwrap();
    let [fp, fq] = ["p", "q"].map(|name| follower.partition(name).unwrap());
    p.ingest([("k", "ingested")]).unwrap();
    q.insert("k", "1").unwrap();
    faults.inject(FaultPlan::new(OpKind::Open, 1, eio()).in_path(".sst").forever());
    follower.catch_up().unwrap_err();
    let check = || {
        let (later, before) = (text(&fq, "k"), text(&fp, "k"));
        assert!(later.is_none() || before.is_some(), "{later:?} without the ingest before it");
    };
    check();
    q.insert("k", "2").unwrap();
    follower.catch_up().unwrap_err();
    check();
}

/// Partition `n` was created, and the state that contains it cannot be installed.
#[test]
fn a_commit_waits_for_its_new_partition() {
    let (machine, faults) = machines();
    let writer = open_writer(&machine);
    let (p, q) = (partition(&writer, "p"), partition(&writer, "q"));
    let follower = config(Arc::new(faults.clone())).open_follower().unwrap();
    let fp = follower.partition("p").unwrap();
    q.insert("k", "1").unwrap();
    q.flush().unwrap();
    let n = partition(&writer, "n");
    let mut batch = writer.batch();
    batch.insert(&p, "k", "both");
    batch.insert(&n, "k", "both");
    batch.commit().unwrap();
    faults.inject(FaultPlan::new(OpKind::Open, 1, eio()).in_path(".sst").forever());
    follower.catch_up().unwrap_err();
    let in_n = follower.partition("n").ok().and_then(|n| text(&n, "k"));
    assert_eq!(text(&fp, "k"), in_n, "both or none");
}

/// A recovery ends the WAL before a commit that the follower has shown.
#[test]
fn another_history_is_stale() {
    let (machine, faults) = machines();
    let writer = open_writer(&machine);
    let p = partition(&writer, "p");
    p.insert("a", "kept").unwrap();
    let follower = config(Arc::new(faults)).open_follower().unwrap();
    let followed = follower.partition("p").unwrap();
    p.insert("lost", "a value that is lost").unwrap();
    follower.catch_up().unwrap();
    assert!(followed.get("lost").unwrap().is_some());
    machine.freeze_after(Some(0));
    drop((writer, p));
    crash_or_kill(&machine, Survival::Everything, 1);
    let mut found = 0;
    for entry in machine.read_dir(Path::new(DIR)).unwrap().into_iter().filter(|entry| entry.name != "LOCK") {
        let file = machine.open(&Path::new(DIR).join(&entry.name), OpenMode::Write).unwrap();
        let mut bytes = vec![0; file.length().unwrap() as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        let at = bytes.windows(20).position(|window| window == b"a value that is lost");
        if let Some(at) = at {
            file.write_at(b"X", at as u64).unwrap();
            found += 1;
        }
    }
    assert_eq!(found, 1);
    let config = config(Arc::new(machine)).recovery_mode(RecoveryMode::PointInTime);
    let writer = config.open().unwrap();
    let p = partition(&writer, "p");
    for n in 0..5 {
        p.insert(format!("new {n}"), "new").unwrap();
    }
    let caught_up = follower.catch_up();
    assert_eq!(caught_up.map_err(|error| error.kind()).unwrap_err(), ErrorKind::Stale);
}

/// A commit whose last record cannot be applied is applied again, once.
#[test]
fn an_operand_is_applied_once_after_a_fault() {
    let (machine, faults) = machines();
    let writer = open_writer(&machine);
    let operator = || PartitionComponents::default().merge_operator(merge_operators::append(""));
    let separation = KvSeparationOptions::default().separation_threshold(100).blob_file_target_size(16 << 10);
    let separation = separation.compression(CompressionType::None).automatic_gc(None).direct_write_threshold(500);
    let options = PartitionCreateOptions::default().with_kv_separation(separation);
    let p = writer.open_partition_with("p", options.clone(), operator()).unwrap();
    p.set_options(options.clone()).unwrap();
    p.merge("k", "0").unwrap();
    let follower = config(Arc::new(faults.clone())).open_follower().unwrap();
    let followed = follower.open_partition_with("p", options, operator()).unwrap();
    let mut batch = writer.batch();
    batch.merge(&p, "k", "+");
    batch.insert(&p, "large", vec![7; 5_000]);
    batch.commit().unwrap();
    faults.inject(FaultPlan::new(OpKind::Open, 1, eio()).in_path("blob").forever());
    let failed = follower.catch_up();
    faults.clear_faults();
    failed.unwrap_err();
    follower.catch_up().unwrap();
    assert_eq!(text(&followed, "k").as_deref(), Some("0+"));
    assert_eq!(followed.get("large").unwrap().map(|value| value.len()), Some(5_000));
}

/// A read of the latest state of one partition, and then of another, may not go back.
#[test]
fn a_later_get_is_not_older() {
    let (machine, faults) = machines();
    let writer = config(Arc::new(machine)).wal_segment_size(64 << 10).open().unwrap();
    let parts = ["p", "q", "r"].map(|name| partition(&writer, name));
    let commit = |value: &str| {
        let mut batch = writer.batch();
        parts.iter().for_each(|part| batch.insert(part, "k", value));
        batch.commit().unwrap();
    };
    commit("old");
    parts.iter().for_each(|part| part.flush().unwrap());
    let follower = config(Arc::new(faults)).open_follower().unwrap();
    let [p, q, r] = ["p", "q", "r"].map(|name| follower.partition(name).unwrap());
    commit("new");
    parts.iter().for_each(|part| part.flush().unwrap());
    // The segments that the follower would read next are recycled, so it reads the database again.
    let fill = partition(&writer, "fill");
    for n in 0..200 {
        fill.insert("k", padded(n, 5_000)).unwrap();
        if n % 20 == 0 {
            fill.flush().unwrap();
            while writer.step().unwrap() {}
        }
    }
    let (is_reading, goes_on) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            p.get_with("k", |_| {
                is_reading.store(true, Ordering::SeqCst);
                wait_until("the test has read", || goes_on.load(Ordering::SeqCst));
            })
        });
        wait_until("a reader is pinned", || is_reading.load(Ordering::SeqCst));
        let caught_up = scope.spawn(|| follower.catch_up().map(drop));
        wait_until("the first is installed", || text(&p, "k").as_deref() == Some("new") || caught_up.is_finished());
        let last = [text(&q, "k"), text(&r, "k")];
        goes_on.store(true, Ordering::SeqCst);
        caught_up.join().unwrap().unwrap();
        assert_eq!(last.map(Option::unwrap), ["new", "new"]);
    });
    drop(writer);
}

/// Regression: a follower that had read the database again, because it was too slow, lost the latest records of
/// partitions with comparators.
#[test]
fn partitions_with_comparators_are_read_again() {
    let (machine, faults) = machines();
    let writer = config(Arc::new(machine)).wal_segment_size(64 << 10).open().unwrap();
    let order = TestOrder::Reversed;
    let open_all = |db: &Database| {
        let open = |name, options| open_ordered(order, db, name, options, None).unwrap();
        [open("lsm", separated()), open("pool", pool_options(8 << 20))]
    };
    let parts = open_all(&writer);
    let follower = config(Arc::new(faults)).open_follower().unwrap();
    let followed = open_all(&follower);
    let fill = partition(&writer, "fill");
    for round in 0..3 {
        for n in 0..100 {
            parts.iter().for_each(|part| part.insert(format!("k{}", n % 7), padded(round * 100 + n, 600)).unwrap());
            fill.insert("k", padded(n, 5_000)).unwrap();
            if n % 20 == 0 {
                parts.iter().chain([&fill]).for_each(|part| part.flush().unwrap());
                while writer.step().unwrap() {}
            }
        }
        parts.iter().for_each(|part| part.remove_range("k3"..="k1").unwrap());
        follower.catch_up().unwrap();
        let pairs = |part: &Partition| part.iter().map(|pair| pair.unwrap()).collect::<Vec<_>>();
        parts.iter().zip(&followed).for_each(|(part, followed)| assert_eq!(pairs(followed), pairs(part)));
    }
}
