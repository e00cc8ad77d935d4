//! Workers, budgets, listeners, deletion of partitions.

use std::cell::RefCell;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering as Memory};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use azekura::fs::{Fs, SystemEnv};
use azekura::testing::{
    Fault, FaultFs, FaultPlan, MemFs, OpKind, SeededRng, TestComparator, TestEnv, TestOrder, flushes_waiting_for_space,
};
use azekura::{
    CompactionStrategy, Config, Database, EngineType, ErrorKind, Event, GarbageCollection, KvSeparationOptions,
    LeveledOptions, Listener, Partition, PartitionCreateOptions, PersistMode, PmemOptions, Result, TransactionOptions,
};

use super::{open, open_partition, table_files};
use crate::testkit::watchdog::{run_with_timeout, wait_until};

fn manual_config(fs: impl Fs + 'static) -> Config {
    Config::new("/db").fs(Arc::new(fs)).env(Arc::new(SystemEnv::new()))
}

fn is_worker() -> bool {
    thread::current().name().is_some_and(|name| name.starts_with("azekura-"))
}

/// Orders by bytes. While it is blocked, workers wait in a comparison.
fn worker_gate() -> TestComparator {
    TestComparator::minimal(TestOrder::Bytes).named("gate").waits_if(|_, _| is_worker())
}

/// The same, only in the comparison of equal keys. A flush of a memtable in which no key is twice makes none.
fn equal_keys_gate() -> TestComparator {
    TestComparator::minimal(TestOrder::Bytes).named("gate").waits_if(|a, b| a == b && is_worker())
}

/// Writes to `p`, which has [small memtables](small_memtable_options), until a flush of it waits in a comparison: when
/// it merges two memtables. Leaves fewer sealed memtables than stop a writer, because the flush cannot free any.
fn wait_until_a_flush_compares(p: &Partition, gate: &TestComparator) {
    wait_until("a flush compares", || {
        if p.metrics().sealed_memtables < 3 {
            (0..2u8).for_each(|n| p.insert([n], [n; 500]).unwrap());
        }
        thread::sleep(Duration::from_millis(10));
        gate.waiting() > 0
    });
}

/// Level 0 is compacted as soon as it has `trigger` runs.
fn l0_trigger_options(trigger: u32) -> PartitionCreateOptions {
    let leveled = LeveledOptions::default().l0_compaction_trigger(trigger);
    PartitionCreateOptions::default().compaction_strategy(CompactionStrategy::Leveled(leveled))
}

/// The first worker checked the sync interval only between two tasks. During a long compaction, an interval of 50 ms
/// became 13 seconds.
#[test]
fn wal_is_synced_during_a_long_compaction() {
    let gate = Arc::new(equal_keys_gate());
    let db = manual_config(MemFs::new()).workers(2).sync_interval(Some(Duration::from_millis(5))).open().unwrap();
    let slow = db.open_partition_with_comparator("slow", l0_trigger_options(2), gate.clone()).unwrap();
    let _closed = gate.block();
    for round in 0..2u8 {
        (0..50u8).for_each(|n| slow.insert([n], [round]).unwrap());
        slow.flush().unwrap();
    }
    wait_until("a worker compacts", || gate.waiting() > 0);
    for _ in 0..3 {
        let syncs = db.metrics().wal_syncs;
        open_partition(&db, "other").insert("k", "v").unwrap();
        wait_until("the log is synced", || db.metrics().wal_syncs > syncs);
    }
}

/// In a database without workers, no call synced the WAL after the sync interval.
#[test]
fn steps_sync_the_wal_when_there_are_no_workers() {
    let env = TestEnv::new(1);
    let config = Config::new("/db").fs(Arc::new(MemFs::new())).env(Arc::new(env.clone()));
    let db = config.workers(0).sync_interval(Some(Duration::from_millis(50))).open().unwrap();
    let p = open_partition(&db, "p");
    env.advance(Duration::from_millis(50));
    assert!(!db.step().unwrap(), "there is nothing to sync");
    for _ in 0..3 {
        env.advance(Duration::from_millis(50));
        p.insert("k", "v").unwrap();
        let syncs = db.metrics().wal_syncs;
        assert!(db.step().unwrap() && !db.step().unwrap());
        assert_eq!(db.metrics().wal_syncs, syncs + 1);
        p.insert("k", "v").unwrap();
        assert!(!db.step().unwrap(), "the interval has not passed");
    }
}

/// A call that a listener makes at an event.
type ListenerAction = fn(Database) -> Result<()>;

const LISTENER_ACTIONS: &[(&str, ListenerAction)] = &[
    ("drop the handle", |db| {
        drop(db);
        Ok(())
    }),
    ("close", Database::close),
    ("read", |db| {
        let p = db.partition("p")?;
        p.get("k")?;
        p.iter().try_for_each(|pair| pair.map(drop))?;
        db.snapshot().get(&p, "k").map(drop)
    }),
    ("write", |db| {
        let p = db.partition("p")?;
        p.insert("k", [1; 3_000])?;
        let mut batch = db.batch();
        batch.durability(PersistMode::SyncData);
        batch.insert(&p, "batch", [2; 3_000]);
        batch.commit()
    }),
    ("write much", |db| {
        let p = db.partition("p")?;
        // More sealed memtables than may wait for a flush.
        (0..200u32).try_for_each(|n| p.insert(n.to_be_bytes(), [3; 2_000]))
    }),
    ("open a partition", |db| db.open_partition("new", Default::default())?.insert("k", "v")),
    ("delete a partition", |db| db.delete_partition(db.partition("p")?)),
    ("flush", |db| db.partition("p")?.flush()),
    ("compact", |db| db.partition("p")?.major_compact()),
    ("collect", |db| db.partition("p")?.gc_with_space_amp_target(1.0).map(drop)),
    ("checkpoint", |db| db.checkpoint("/copy")),
    ("persist", |db| db.persist(PersistMode::SyncAll)),
    ("step", |db| db.step().map(drop)),
    ("metrics", |db| {
        println!("{} {}", db.metrics(), db.disk_space());
        Ok(())
    }),
];

/// Makes one call at the first event of a kind.
struct ActionListener {
    event_kind: &'static str,
    action: ListenerAction,
    db: Mutex<Option<Database>>,
    result: Mutex<Option<Result<()>>>,
    events: Mutex<Vec<&'static str>>,
}

fn event_kind_of(event: &Event) -> &'static str {
    match event {
        Event::Opened { .. } => "opened",
        Event::Flushed { .. } => "flushed",
        Event::Compacted { .. } => "compacted",
        Event::BlobGcCompleted { .. } => "collected",
        Event::BackgroundError { .. } => "error",
        Event::Poisoned { .. } => "poisoned",
        Event::Closed => "closed",
        other => panic!("{other:?}"),
    }
}

impl Listener for ActionListener {
    fn on_event(&self, event: &Event) {
        let kind = event_kind_of(event);
        self.events.lock().unwrap().push(kind);
        if kind == self.event_kind {
            let db = self.db.lock().unwrap().take();
            if let Some(db) = db {
                let done = (self.action)(db);
                *self.result.lock().unwrap() = Some(done);
            }
        }
    }
}

/// Causes events of all kinds; the wanted event is the last but one if it ends all writing.
fn trigger_events(at: &str, db: &Database, faults: &FaultFs, workers: usize) -> Result<()> {
    let apart = KvSeparationOptions::default().separation_threshold(1_000).automatic_gc(None);
    let options = PartitionCreateOptions::default().max_memtable_size(16 << 10).with_kv_separation(apart);
    let p = db.open_partition("p", options)?;
    let fault = Fault::Error(io::ErrorKind::Other);
    match at {
        "error" => faults.inject(FaultPlan::new(OpKind::Write, 1, fault).in_path(".sst")),
        "poisoned" => faults.inject(FaultPlan::new(OpKind::Sync, 1, fault).in_path(".wal")),
        _ => {}
    }
    if at == "error" && workers > 0 {
        // The memtable is full. If this thread flushed it too, the fault could be an error of that call.
        return (0..10u8).try_for_each(|n| p.insert([n], [n; 2_000]));
    }
    for round in 0..4u8 {
        // Half of the older values stay, so that blob GC has work.
        (0..10u8).step_by(1 + usize::from(round / 3)).try_for_each(|n| p.insert([n], [round; 2_000]))?;
        p.insert("k", "v")?;
        p.flush()?;
        p.major_compact()?;
    }
    p.gc_with_space_amp_target(1.0).map(drop)
}

fn check_action_at(at: &'static str, what: &'static str, action: ListenerAction, workers: usize) {
    run_with_timeout(&format!("{what} at {at} with {workers} workers"), move || {
        let machine = MemFs::new();
        let faults = FaultFs::new(Arc::new(machine.clone()));
        let (db, done, events) = Default::default();
        let listener = Arc::new(ActionListener { event_kind: at, action, db, result: done, events });
        let db = manual_config(faults.clone()).workers(workers).listener(listener.clone()).open().unwrap();
        *listener.db.lock().unwrap() = Some(db.clone());
        let result = trigger_events(at, &db, &faults, workers);
        if let Err(error) = &result {
            let kinds = [ErrorKind::Closed, ErrorKind::Poisoned, ErrorKind::Io, ErrorKind::Invalid];
            assert!(kinds.contains(&error.kind()), "{what} at {at}: {:?}: {error}", error.kind());
        }
        if at == "closed" {
            drop(db.close());
        } else if at != "error" || workers > 0 {
            let was_called = || listener.result.lock().unwrap().is_some();
            let events = listener.events.lock().unwrap().clone();
            let p = db.partition("p").map(|p| p.metrics());
            wait_until(&format!("{what} at {at} with {workers} workers: {result:?} {events:?} {p:?}"), was_called);
            drop(db);
        } else {
            drop(db); // without workers, calls return errors and send no event
        }
        drop(listener.db.lock().unwrap().take());
        if let Some(Err(error)) = &*listener.result.lock().unwrap() {
            let kinds = [ErrorKind::Closed, ErrorKind::Poisoned, ErrorKind::Io];
            assert!(kinds.contains(&error.kind()), "{what} at {at}: {:?}: {error}", error.kind());
        }
        // The lock is released, possibly a little later: the listener has dropped the last handle.
        wait_until("the directory is unlocked", || manual_config(machine.clone()).workers(0).open().is_ok());
        // If the listener has called `close`, its thread delivers `Closed` after that call.
        wait_until("`Closed` is delivered", || listener.events.lock().unwrap().contains(&"closed"));
        let mut events = listener.events.lock().unwrap().clone();
        assert_eq!((events.remove(0), events.pop()), ("opened", Some("closed")), "{what} at {at}: {events:?}");
    });
}

/// The database delivered the event `Poisoned` under a lock that closing needs. A listener that dropped the last handle
/// there waited for its own thread, and the directory stayed locked. A listener that wrote on the only worker waited
/// for its own thread, too.
#[test]
fn a_listener_does_anything_at_any_event() {
    for at in ["flushed", "compacted", "collected", "error", "poisoned", "closed"] {
        for &(what, action) in LISTENER_ACTIONS {
            for workers in [0, 1, 2] {
                check_action_at(at, what, action, workers);
            }
        }
    }
}

/// Opens the directory again at the event `Closed`.
#[derive(Default)]
struct ReopeningListener(MemFs, Mutex<Option<Result<()>>>);

impl Listener for ReopeningListener {
    fn on_event(&self, event: &Event) {
        if matches!(event, Event::Closed) {
            *self.1.lock().unwrap() = Some(manual_config(self.0.clone()).workers(0).open().map(drop));
        }
    }
}

/// The database delivered the event `Closed` before it released the lock on the directory.
#[test]
fn a_listener_opens_again_when_it_is_closed() {
    for workers in [0, 2] {
        let opener = Arc::new(ReopeningListener::default());
        let db = manual_config(opener.0.clone()).workers(workers).listener(opener.clone()).open().unwrap();
        open_partition(&db, "p").insert("k", "v").unwrap();
        db.close().unwrap();
        let opened = opener.1.lock().unwrap().take();
        opened.expect("`Closed` was delivered before close returned").unwrap();
    }
}

/// Writes when its thread ends.
struct WriteOnThreadExit(Option<Partition>);

impl Drop for WriteOnThreadExit {
    fn drop(&mut self) {
        if let Some(p) = self.0.take() {
            p.insert("last", [0; 100]).unwrap();
            let mut batch = p.clone();
            batch.name = "other name".into();
            assert!(batch.get("last").unwrap().is_some() && p.iter().count() == 2);
        }
    }
}

thread_local! {
    static WRITE_ON_EXIT: RefCell<WriteOnThreadExit> = const { RefCell::new(WriteOnThreadExit(None)) };
}

/// A write in the destructor of a thread-local value needs the thread-local write buffer. The buffer was already
/// destroyed, and the process was aborted.
#[test]
fn a_destructor_of_a_thread_local_may_write() {
    let db = open(&MemFs::new(), "/db", 1);
    let p = open_partition(&db, "p");
    let there = p.clone();
    let thread = thread::spawn(move || {
        // Created before the buffer, so it is destroyed after the buffer.
        WRITE_ON_EXIT.with(|last| last.borrow_mut().0 = Some(there.clone()));
        there.insert("k", "v").unwrap();
    });
    thread.join().unwrap();
    assert_eq!(p.get("last").unwrap().map(|value| value.len()), Some(100));
}

fn small_memtable_options() -> PartitionCreateOptions {
    PartitionCreateOptions::default().max_memtable_size(4 << 10)
}

fn separated_options() -> PartitionCreateOptions {
    small_memtable_options()
        .with_kv_separation(KvSeparationOptions::default().separation_threshold(16).automatic_gc(None))
}

/// A flush that ended because its partition was deleted counted as failed. A writer of another partition that waited
/// for a flush got the error of that flush: `Closed`, or `Corruption` with key-value separation.
#[test]
fn writer_gets_no_error_of_deleted_partition() {
    let leveled = LeveledOptions::default().l0_compaction_trigger(1_000);
    for options in [small_memtable_options(), separated_options()] {
        let options = options.compaction_strategy(CompactionStrategy::Leveled(leveled.clone()));
        let gate = Arc::new(worker_gate());
        let db = manual_config(MemFs::new()).workers(1).open().unwrap();
        let deleted_partition = db.open_partition_with_comparator("gone", options, gate.clone()).unwrap();
        let live = db.open_partition("live", small_memtable_options()).unwrap();
        let closed = gate.block();
        wait_until_a_flush_compares(&deleted_partition, &gate);
        thread::scope(|scope| {
            let closed = closed;
            let writer = scope.spawn(|| (0..200u8).try_for_each(|n| live.insert([n], [n; 500])));
            wait_until("the writer waits for a flush", || live.metrics().sealed_memtables >= 5);
            let deleted = scope.spawn(|| db.delete_partition(deleted_partition));
            wait_until("the partition is deleted", || !db.partition_exists("gone"));
            drop(closed);
            writer.join().unwrap().unwrap();
            deleted.join().unwrap().unwrap();
        });
        assert_eq!(live.len().unwrap(), 200);
    }
}

type PartitionWork = fn(&Partition) -> Result<()>;

/// A flush or a blob GC that ran after the deletion of its partition returned `Corruption`.
#[test]
fn work_on_a_deleted_partition_says_closed() {
    let work: &[(&str, PartitionWork)] = &[
        ("flush", Partition::flush),
        ("compact", Partition::major_compact),
        ("scan", |p| p.gc_scan().map(drop)),
        ("collect", |p| p.gc_with_space_amp_target(1.0).map(drop)),
        ("insert", |p| (0..50u8).try_for_each(|n| p.insert([n, 1], [n; 500]))),
        ("insert large", |p| p.insert("large", vec![1; 1 << 20])),
        ("read", |p| (0..50u8).try_for_each(|n| p.get([n])?.map(drop).ok_or_else(|| panic!("{n} is not found")))),
        ("walk", |p| p.iter().try_for_each(|pair| pair.map(drop))),
    ];
    let machine = MemFs::new();
    let db = manual_config(machine.clone()).workers(1).open().unwrap();
    for round in 0..8 {
        for (what, work) in work {
            let deleted_partition = db.open_partition("gone", separated_options()).unwrap();
            (0..2).for_each(|_| (0..50u8).for_each(|n| deleted_partition.insert([n], [n; 500]).unwrap()));
            let other = deleted_partition.clone();
            thread::scope(|scope| {
                let worked = scope.spawn(move || (0..100).try_for_each(|_| work(&other)));
                (0..round).for_each(|_| thread::yield_now());
                db.delete_partition(deleted_partition).unwrap();
                if let Err(error) = worked.join().unwrap() {
                    assert_eq!(error.kind(), ErrorKind::Closed, "{what}: {error}");
                }
            });
        }
    }
    let data_files = || {
        let names = machine.read_dir(Path::new("/db")).unwrap().into_iter().map(|entry| entry.name);
        names.filter(|name| name.ends_with(".blob")).count() + table_files(&machine, Path::new("/db")).len()
    };
    wait_until("the space of deleted partitions is freed", || {
        open_partition(&db, "p").get("k").unwrap();
        data_files() == 0
    });
}

fn wal_bound(max_log: u64, segment: u64) -> u64 {
    max_log + 2 * segment
}

/// `step` flushed for the size of the WAL only if no compaction was pending. With constant compactions, the WAL grew
/// without bound.
#[test]
fn wal_is_retired_while_compactions_are_pending() {
    let (segment, max_log) = (64 << 10, 256 << 10);
    let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
    let config = Config::new("/db").fs(fs).env(Arc::new(TestEnv::new(1)));
    let db = config.workers(0).wal_segment_size(segment).max_wal_size(max_log).open().unwrap();
    let leveled =
        LeveledOptions::default().l0_compaction_trigger(1).base_level_size(64 << 10).target_file_size(16 << 10);
    let options = small_memtable_options().compaction_strategy(CompactionStrategy::Leveled(leveled));
    let hot = db.open_partition("hot", options).unwrap();
    open_partition(&db, "cold").insert("one record", "that is not flushed for its own sake").unwrap();
    let mut max_wal_bytes = 0;
    for n in 0..2_000u32 {
        hot.insert((n.wrapping_mul(2_654_435_761)).to_be_bytes(), [7; 1_000]).unwrap();
        if n % 16 == 0 {
            // The flush, and one step of the compaction that is always pending.
            assert!(db.step().unwrap() && db.step().unwrap());
        }
        max_wal_bytes = max_wal_bytes.max(db.metrics().wal_live_bytes);
    }
    // The bytes written between two rounds of steps, and steps for the segments that they begin.
    assert!(max_wal_bytes <= 2 * wal_bound(max_log, segment), "{max_wal_bytes} bytes of log");
    assert!(db.metrics().compactions > 0);
}

/// A compaction on the only worker yielded only to a flush that had waited before the compaction began. So it never
/// yielded.
#[test]
fn single_worker_flushes_before_compacting() {
    let gate = Arc::new(equal_keys_gate());
    let order = Arc::new(WorkOrderListener::default());
    let db = manual_config(MemFs::new()).workers(1).listener(order.clone()).open().unwrap();
    let slow = db.open_partition_with_comparator("slow", l0_trigger_options(2), gate.clone()).unwrap();
    // A compaction checks after each MiB whether it should yield.
    let write = |salt| (0..200u8).for_each(|n| slow.insert([n], SeededRng::new(salt).random_bytes(10_000)).unwrap());
    write(1);
    slow.flush().unwrap();
    wait_until("the first table is moved down", || db.metrics().trivial_moves == 1);
    let closed = gate.block();
    write(2);
    slow.flush().unwrap(); // by this thread or by the worker
    wait_until("the worker compacts", || gate.waiting() > 0);
    let other = db.open_partition("other", small_memtable_options()).unwrap();
    other.insert("k", [0; 5_000]).unwrap();
    assert_eq!(other.metrics().sealed_memtables, 1);
    drop(closed);
    wait_until("both are done", || order.0.lock().unwrap().len() >= 5);
    let heard = order.0.lock().unwrap();
    assert_eq!(heard[3..5], ["other flushed", "slow compacted"], "{heard:?}");
}

/// Records which partition was flushed or compacted.
#[derive(Default)]
struct WorkOrderListener(Mutex<Vec<String>>);

impl Listener for WorkOrderListener {
    fn on_event(&self, event: &Event) {
        match event {
            Event::Flushed { partition, .. } | Event::Compacted { partition, .. } => {
                self.0.lock().unwrap().push(format!("{partition} {}", event_kind_of(event)));
            }
            _ => {}
        }
    }
}

const BUDGET: u64 = 4 << 20;
/// Bytes that a partition may have in addition to the budget.
const PARTITION_MEMORY_ALLOWANCE: u64 = 64 << 10;

/// The budget did not limit active memtables. 64 idle partitions used 136 MB with a budget of 8 MiB.
#[test]
fn active_memtables_are_within_the_budget() {
    for workers in [0, 1, 2] {
        let db = manual_config(MemFs::new()).workers(workers).memory_budget(BUDGET).open().unwrap();
        let partitions: Vec<_> = (0..40).map(|n| open_partition(&db, &format!("p{n}"))).collect();
        let mut max_bytes = 0;
        for round in 0..500u32 {
            partitions.iter().for_each(|p| p.insert(round.to_be_bytes(), [7; 1_000]).unwrap());
            if workers == 0 {
                while db.step().unwrap() {}
            }
            max_bytes = max_bytes.max(db.metrics().memtable_bytes);
        }
        // One memtable is active while writers are stopped: it may allocate once more.
        let bound = BUDGET + 40 * PARTITION_MEMORY_ALLOWANCE + (2 << 20);
        assert!(max_bytes <= bound, "{workers} workers: {max_bytes} bytes of memtables");
        wait_until("all flushes have ended", || {
            while workers == 0 && db.step().unwrap() {}
            let metrics = db.metrics();
            metrics.sealed_memtable_bytes == 0
                && metrics.active_memtable_bytes <= BUDGET / 2 + 40 * PARTITION_MEMORY_ALLOWANCE
        });
        let metrics = db.metrics();
        assert!(
            metrics.flushes < 2 * 20_000_000 / PARTITION_MEMORY_ALLOWANCE,
            "{} flushes are too many: their memtables are tiny",
            metrics.flushes
        );
        let sum = metrics.active_memtable_bytes + metrics.sealed_memtable_bytes + metrics.pinned_memtable_bytes;
        assert_eq!(metrics.memtable_bytes, sum);
    }
}

/// No metric counted the memory that iterators pin. Now a metric counts it, and writes continue when it exceeds the
/// budget.
#[test]
fn writes_continue_when_iters_pin_the_budget() {
    let db = manual_config(MemFs::new()).workers(2).memory_budget(BUDGET).open().unwrap();
    let p = db.open_partition("p", PartitionCreateOptions::default().max_memtable_size(8 << 20)).unwrap();
    let mut walks = Vec::new();
    for round in 0..8u32 {
        (0..800u32).for_each(|n| p.insert([round.to_be_bytes(), n.to_be_bytes()].concat(), [7; 1_000]).unwrap());
        walks.push(p.iter());
        p.flush().unwrap();
    }
    let pinned = db.metrics().pinned_memtable_bytes;
    assert!(pinned > BUDGET, "{pinned}");
    (0..8_000u32).for_each(|n| p.insert(n.to_be_bytes(), [7; 1_000]).unwrap());
    assert_eq!(walks.iter_mut().map(|walk| walk.count()).max(), Some(8 * 800));
    drop(walks);
    wait_until("memory is freed", || {
        p.get("k").unwrap();
        db.metrics().pinned_memtable_bytes == 0
    });
}

fn open_reversed(db: &Database) -> Partition {
    db.open_partition_with_comparator(
        "reversed",
        separated_options(),
        Arc::new(TestComparator::minimal(TestOrder::Reversed)),
    )
    .unwrap()
}

/// A machine that was killed with records of a partition in its WAL.
fn machine_killed_with_late_comparator() -> MemFs {
    let machine = MemFs::new();
    let db = open(&machine, "/db", 1);
    let p = open_reversed(&db);
    p.insert("flushed", [1; 100]).unwrap();
    p.flush().unwrap();
    p.insert("logged", [2; 100]).unwrap();
    machine.fork()
}

/// A partition whose comparator is not available any more could not be deleted.
#[test]
fn a_partition_is_deleted_by_its_name() {
    let machine = machine_killed_with_late_comparator();
    let db = open(&machine, "/db", 2);
    assert_eq!(db.delete_partition_by_name("none").unwrap_err().kind(), ErrorKind::NotFound);
    assert!(!table_files(&machine, Path::new("/db")).is_empty());
    db.delete_partition_by_name("reversed").unwrap();
    assert_eq!(db.delete_partition_by_name("reversed").unwrap_err().kind(), ErrorKind::NotFound);
    assert!(!db.partition_exists("reversed") && table_files(&machine, Path::new("/db")).is_empty());
    let p = open_partition(&db, "p");
    p.insert("k", "v").unwrap();
    db.delete_partition_by_name("p").unwrap();
    assert_eq!(p.get("k").unwrap_err().kind(), ErrorKind::Closed);
    db.close().unwrap();
    let db = open(&machine, "/db", 3);
    assert_eq!((db.list_partitions().len(), db.metrics().replayed_records), (0, 0));
    assert!(open_reversed(&db).is_empty().unwrap());
}

type Call = fn(&Database, &Partition) -> Result<()>;

/// Every call that writes or waits for background work, or for a lock that another thread holds while it waits for
/// these.
const WAITING_CALLS: &[(&str, Call)] = &[
    ("flush", |_, p| p.flush()),
    ("compact", |_, p| p.major_compact()),
    ("scan", |_, p| p.gc_scan().map(drop)),
    ("collect", |_, p| p.gc_with_space_amp_target(1.0).map(drop)),
    ("checkpoint", |db, _| db.checkpoint("/copy")),
    ("open", |db, _| db.open_partition("other", small_memtable_options()).map(drop)),
    ("delete", |db, p| db.delete_partition(p.clone())),
    ("delete by name", |db, _| db.delete_partition_by_name("p")),
    ("step", |db, _| db.step().map(drop)),
    ("close", |db, _| db.clone().close()),
    ("insert", |_, p| p.insert("nested", "v")),
    ("large insert", |_, p| p.insert("nested", vec![1; 2 << 20])),
    ("insert with a time to live", |_, p| p.insert_with_ttl("nested", "v", Duration::from_secs(1))),
    ("remove", |_, p| p.remove("nested")),
    ("remove range", |_, p| p.remove_range("a".."b")),
    ("clear", |_, p| p.clear()),
    ("ingest", |_, p| p.ingest([("nested", "v")]).map(drop)),
    ("batch", |db, p| {
        let mut batch = db.batch();
        batch.insert(p, "nested", "v");
        batch.insert(p, "nested, too", "v");
        batch.commit()
    }),
    ("transaction", |db, p| db.transact(|tx| tx.insert(p, "nested", "v"))),
    ("exclusive", |db, _| db.transaction_with(TransactionOptions::default().exclusive(true)).map(drop)),
];

type CallResults = Arc<Mutex<Vec<(&'static str, Result<()>)>>>;

/// The next comparison, on any thread, makes all calls.
fn call_in_comparison(comparator: &TestComparator, db: &Database, p: &Partition, results: &CallResults) {
    let (db, p, results) = (db.clone(), p.clone(), Arc::clone(results));
    comparator.call_once(move || {
        let found = WAITING_CALLS.iter().map(|(what, call)| (*what, call(&db, &p)));
        results.lock().unwrap().extend(found);
    });
}

/// A flush called a comparator that requested another flush or closed the database. The comparator waited for the flush
/// that had called it. Now such a call is refused, on a worker and on the thread of a caller, and the flush continues.
#[test]
fn a_comparator_in_a_flush_may_not_wait_for_it() {
    for workers in [0, 1] {
        let (caller, results) = (Arc::new(TestComparator::minimal(TestOrder::Bytes)), CallResults::default());
        let db = manual_config(MemFs::new()).workers(workers).open().unwrap();
        let p = db.open_partition_with_comparator("p", separated_options(), caller.clone()).unwrap();
        let (there, caller, handle, heard) = (p.clone(), caller.clone(), db.clone(), results.clone());
        // On another thread, so that a flush that hangs fails the test.
        let flusher = thread::spawn(move || {
            while heard.lock().unwrap().is_empty() {
                // Several memtables, so that a flush compares their keys; insertions compare, too.
                (0..20u8).for_each(|n| there.insert([n], vec![n; 1_000]).unwrap());
                call_in_comparison(&caller, &handle, &there, &heard);
                there.flush().unwrap();
                caller.cancel_call();
            }
        });
        wait_until("the flush has ended", || flusher.is_finished());
        flusher.join().unwrap();
        let results = std::mem::take(&mut *results.lock().unwrap());
        assert_eq!(results.len(), WAITING_CALLS.len());
        for (what, result) in results {
            assert_eq!(result.expect_err(what).kind(), ErrorKind::Invalid, "{what} with {workers} workers");
        }
        p.flush().unwrap();
        assert_eq!((p.len().unwrap(), db.list_partitions().len()), (20, 1));
    }
}

/// A write called a comparator that wrote, or waited for writes. The comparator waited for the group-commit leader,
/// which was its own thread, and so did every later write. Now such a call is refused, and the write continues.
#[test]
fn a_comparator_in_a_write_may_not_wait_for_it() {
    let pool = PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default().max_size(4 << 20)));
    let separated = PartitionCreateOptions::default().with_kv_separation(KvSeparationOptions::default());
    for options in [separated, pool] {
        run_with_timeout("a write", move || {
            let (caller, results) = (Arc::new(TestComparator::minimal(TestOrder::Bytes)), CallResults::default());
            let db = manual_config(MemFs::new()).workers(0).open().unwrap();
            let p = db.open_partition_with_comparator("p", options, caller.clone()).unwrap();
            (0..50u8).for_each(|n| p.insert([n], "v").unwrap());
            let single = || p.insert([7], "new");
            let several = || {
                let mut batch = db.batch();
                (7..9u8).for_each(|n| batch.insert(&p, [n], "newer"));
                batch.commit()
            };
            let writes: [&dyn Fn() -> Result<()>; 2] = [&single, &several];
            for write in writes {
                call_in_comparison(&caller, &db, &p, &results);
                write().unwrap();
                let results = std::mem::take(&mut *results.lock().unwrap());
                assert_eq!(results.len(), WAITING_CALLS.len());
                for (what, result) in results {
                    assert_eq!(result.expect_err(what).kind(), ErrorKind::Invalid, "{what}");
                }
            }
            assert_eq!((p.len().unwrap(), db.list_partitions().len(), db.metrics().poisoned), (50, 1, false));
        });
    }
}

type HandleSlot = Arc<Mutex<Option<(Database, Partition)>>>;

/// The first comparison on a worker drops the value in the slot, and panics then if `panics`.
fn dropping_comparator(slot: &HandleSlot, panics: bool) -> TestComparator {
    let slot = Arc::clone(slot);
    worker_gate().with_hook(move |_, _| {
        if is_worker() {
            let handle = slot.lock().unwrap().take();
            let panics = panics && handle.is_some();
            drop(handle);
            assert!(!panics, "a comparator panics");
        }
    })
}

/// Closing waits for the work of all workers. A comparator dropped the last handle on a worker, so the worker waited
/// for its own work, and the directory stayed locked.
#[test]
fn a_comparator_drops_the_last_handle() {
    for (workers, panics) in [(1, false), (2, false), (3, false), (1, true), (2, true)] {
        let machine = MemFs::new();
        let slot = HandleSlot::default();
        let dropper = Arc::new(dropping_comparator(&slot, panics));
        let db = manual_config(machine.clone()).workers(workers).open().unwrap();
        let p = db.open_partition_with_comparator("p", small_memtable_options(), dropper.clone()).unwrap();
        let closed = dropper.block();
        wait_until_a_flush_compares(&p, &dropper);
        *slot.lock().unwrap() = Some((db, p));
        drop(closed);
        let opened = Mutex::new(None);
        wait_until("the directory is unlocked", || {
            *opened.lock().unwrap() = manual_config(machine.clone()).workers(0).open().ok();
            opened.lock().unwrap().is_some()
        });
        let db = opened.into_inner().unwrap().unwrap();
        assert!(panics || db.metrics().replayed_records == 0, "closing has flushed all");
        let p = db.open_partition_with_comparator("p", small_memtable_options(), dropper).unwrap();
        assert_eq!(p.len().unwrap(), 2);
    }
}

/// Orders by bytes. While it is blocked, comparisons wait once a fault has struck: they belong to a second attempt.
fn second_attempt_gate(faults: &FaultFs) -> Arc<TestComparator> {
    let faults = faults.clone();
    Arc::new(TestComparator::minimal(TestOrder::Bytes).waits_if(move |_, _| faults.fault_count() > 0))
}

/// Makes the next write of a table fail, as on a full disk.
fn fill_disk(faults: &FaultFs) {
    let full = Fault::Error(io::ErrorKind::StorageFull);
    faults.inject(FaultPlan::new(OpKind::Write, 1, full).in_path(".sst"));
}

/// The second attempt of a compaction on a full disk has exclusive use of the reserve. Flushes waited until it ended.
/// Now the compaction yields to them.
#[test]
fn a_merge_yields_when_a_flush_waits_for_space() {
    let faults = FaultFs::new(Arc::new(MemFs::new()));
    let gate = second_attempt_gate(&faults);
    let db = manual_config(faults.clone()).workers(0).open().unwrap();
    let leveled = LeveledOptions::default().l0_compaction_trigger(2);
    let options = PartitionCreateOptions::default().compaction_strategy(CompactionStrategy::Leveled(leveled));
    let slow = db.open_partition_with_comparator("slow", options, gate.clone()).unwrap();
    // A compaction checks after each MiB whether it should yield.
    for salt in [1, 2] {
        (0..200u8).for_each(|n| slow.insert([n], SeededRng::new(salt).random_bytes(10_000)).unwrap());
        slow.flush().unwrap();
    }
    let other = open_partition(&db, "other");
    other.insert("k", "v").unwrap();
    fill_disk(&faults);
    let blocked = gate.block();
    thread::scope(|scope| {
        // The first steps have less to do.
        let merge = scope.spawn(|| while faults.fault_count() == 0 && db.step().unwrap() {});
        let blocked = blocked;
        wait_until("the second attempt compares", || gate.waiting() > 0);
        let flush = scope.spawn(|| other.flush());
        wait_until("the flush waits", || flushes_waiting_for_space(&db) == 1);
        drop(blocked);
        merge.join().unwrap();
        assert_eq!(db.metrics().compactions, 0, "the compaction did not yield");
        flush.join().unwrap().unwrap();
    });
    while db.step().unwrap() {}
    assert_eq!((db.metrics().compactions, slow.len().unwrap()), (1, 200));
}

/// For the second attempt of a flush on a full disk, the disk reserve releases space. A writer filled the reserve with
/// that space again, and the flush failed.
#[test]
fn writers_leave_released_space_to_the_flush() {
    let machine = MemFs::new();
    let faults = FaultFs::new(Arc::new(machine.clone()));
    let gate = second_attempt_gate(&faults);
    let db = manual_config(faults.clone()).workers(0).open().unwrap();
    let options = PartitionCreateOptions::default().max_memtable_size(512 << 10);
    let p = db.open_partition_with_comparator("p", options, gate.clone()).unwrap();
    // Several memtables, so that the flush compares, and more bytes than a reserve that takes its space back leaves.
    (0..1_500u32).for_each(|n| p.insert(n.to_be_bytes(), SeededRng::new(n.into()).random_bytes(1_000)).unwrap());
    let other = open_partition(&db, "other");
    machine.set_capacity(Some(machine.used_space()));
    fill_disk(&faults);
    let blocked = gate.block();
    thread::scope(|scope| {
        let flush = scope.spawn(|| p.flush());
        let blocked = blocked;
        wait_until("the second attempt compares", || gate.waiting() > 0);
        assert_eq!(other.insert("k", "v").unwrap_err().kind(), ErrorKind::OutOfSpace);
        drop(blocked);
        flush.join().unwrap().expect("the space was released for it");
    });
}

/// Opens a partition at each flush.
#[derive(Default)]
struct OpensAtFlush(Mutex<Option<Database>>, AtomicUsize);

impl Listener for OpensAtFlush {
    fn on_event(&self, event: &Event) {
        let db = self.0.lock().unwrap().clone();
        if let (Event::Flushed { .. }, Some(db)) = (event, db) {
            db.open_partition("listener", Default::default()).unwrap();
            self.1.fetch_add(1, Memory::SeqCst);
        }
    }
}

/// `set_options` with a lower `max_size` flushes under the lock on partition names. It called the listener under that
/// lock. A listener that opened a partition waited for the lock.
#[test]
fn a_listener_opens_when_a_pool_is_lowered() {
    run_with_timeout("lowering", || {
        let opens = Arc::new(OpensAtFlush::default());
        let db = manual_config(MemFs::new()).workers(0).listener(opens.clone()).open().unwrap();
        let sized =
            |max| PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default().max_size(max)));
        let p = db.open_partition("p", sized(4 << 20)).unwrap();
        p.insert("k", "v").unwrap();
        *opens.0.lock().unwrap() = Some(db.clone());
        p.set_options(sized(1 << 20)).unwrap();
        drop(opens.0.lock().unwrap().take());
        assert!(opens.1.load(Memory::SeqCst) > 0 && db.partition_exists("listener"));
    });
}

/// If all memtables are too small to be sealed, the database raises the total size below which it looks for one. After
/// they were flushed, it did not lower that size, so one large memtable could grow up to it.
#[test]
fn budget_holds_after_small_memtables_flush() {
    const SMALL_BUDGET: u64 = 1 << 20;
    let db = manual_config(MemFs::new()).workers(0).memory_budget(SMALL_BUDGET).open().unwrap();
    let partitions: Vec<_> = (0..100).map(|n| open_partition(&db, &format!("p{n}"))).collect();
    partitions.iter().for_each(|p| p.insert("k", [7; 40_000]).unwrap());
    assert!(db.metrics().active_memtable_bytes > 3 * SMALL_BUDGET, "the memtables were sealed");
    partitions.iter().for_each(|p| p.flush().unwrap());
    let mut max_bytes = 0;
    for n in 0..3_000u32 {
        partitions[0].insert(n.to_be_bytes(), [7; 1_000]).unwrap();
        max_bytes = max_bytes.max(db.metrics().active_memtable_bytes);
    }
    assert!(max_bytes <= 2 * SMALL_BUDGET, "{max_bytes} bytes of active memtables");
}

/// A partition to flush, and the result of its flush.
#[derive(Default)]
struct OtherFlush {
    partition: Mutex<Option<Partition>>,
    flushed: Mutex<Option<Result<()>>>,
}

/// Orders by bytes. The first comparison on a worker flushes the partition in `other`.
fn flushing_comparator(other: &Arc<OtherFlush>, running_flushes: &Arc<AtomicUsize>) -> TestComparator {
    let (other, running_flushes) = (Arc::clone(other), Arc::clone(running_flushes));
    TestComparator::minimal(TestOrder::Bytes).with_hook(move |_, _| {
        if is_worker()
            && let Some(partition) = { other.partition.lock().unwrap().take() }
        {
            running_flushes.fetch_add(1, Memory::SeqCst);
            wait_until("both flushes are running", || running_flushes.load(Memory::SeqCst) == 2);
            *other.flushed.lock().unwrap() = Some(partition.flush());
        }
    })
}

/// Two databases each called a comparator in a flush, and the comparator flushed the other database. Each flush waited
/// for the other one.
#[test]
fn comparators_may_not_flush_each_others_work() {
    run_with_timeout("flushing each other", || {
        let running_flushes = Arc::new(AtomicUsize::new(0));
        let others: [Arc<OtherFlush>; 2] = Default::default();
        let partitions: Vec<_> = others
            .iter()
            .map(|other| {
                let comparator = Arc::new(flushing_comparator(other, &running_flushes));
                let db = manual_config(MemFs::new()).workers(1).open().unwrap();
                db.open_partition_with_comparator("p", small_memtable_options(), comparator).unwrap()
            })
            .collect();
        *others[0].partition.lock().unwrap() = Some(partitions[1].clone());
        *others[1].partition.lock().unwrap() = Some(partitions[0].clone());
        thread::scope(|scope| {
            for p in &partitions {
                scope.spawn(|| (0..500u32).for_each(|n| p.insert(n.to_be_bytes(), [0; 500]).unwrap()));
            }
        });
        for other in others {
            wait_until("a flush has asked for another", || other.flushed.lock().unwrap().is_some());
            let flushed = other.flushed.lock().unwrap().take().unwrap();
            assert_eq!(flushed.unwrap_err().kind(), ErrorKind::Invalid);
        }
        assert!(partitions.iter().all(|p| p.flush().is_ok() && p.len().unwrap() == 500));
    });
}

/// Inserts a record when dropped.
struct InsertOnDrop(Partition);

impl Drop for InsertOnDrop {
    fn drop(&mut self) {
        self.0.insert("dropped", "v").unwrap();
    }
}

/// A program panics, and a destructor that runs during unwinding writes to the database. The write returned `Ok`, but
/// the group-commit leader mistook the panic of the program for its own, and poisoned the database for all threads.
#[test]
fn commit_during_unwinding_does_not_poison() {
    let db = open(&MemFs::new(), "/db", 1);
    let p = open_partition(&db, "p");
    let guard = InsertOnDrop(p.clone());
    let unwound = thread::spawn(move || {
        let _guard = guard;
        panic!("the program");
    });
    assert!(unwound.join().is_err());
    p.insert("later", "v").unwrap();
    assert_eq!(p.len().unwrap(), 2);
    db.close().unwrap();
}
