//! The whole tree against a model.

use std::cmp::Ordering as KeyOrdering;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::base::comparator::Comparator;
use crate::base::compression::CompressionType;
use crate::base::edit::Edit;
use crate::base::{EntryRef, ErrorKind, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::{Engine, Host, ReadPoint, Task};
use crate::lsm::tests::harness::{ALL, World, small_options, tables_in};
use crate::lsm::tree::check_files;
use crate::lsm::version::BOTTOM;
use crate::vfs::fault::{Fault, FaultPlan, OpKind};
use crate::vfs::files::DataKind;

/// Keys of different case are equal, and the order is backwards.
struct Odd;
impl Comparator for Odd {
    fn name(&self) -> &str {
        "odd"
    }
    fn compare(&self, a: &[u8], b: &[u8]) -> KeyOrdering {
        b.to_ascii_lowercase().cmp(&a.to_ascii_lowercase())
    }
}

pub(crate) fn orders() -> [KeyOrder; 2] {
    [KeyOrder::bytewise(), KeyOrder::custom(Arc::new(Odd))]
}

/// One random write that keeps the rule of weak removal: only what was put exactly once since it was last removed, in
/// either way.
fn write_something(world: &mut World) {
    let number = world.random(120);
    let value: Vec<u8> = (0..world.random(100)).map(|_| world.random(256) as u8).collect();
    if world.random(5) == 0 {
        let key = format!("weak{:03}", number % 30).into_bytes();
        match (world.random(8), world.puts_since_removal(&key)) {
            (0..5, 1) => world.write(RecordKind::SingleDelete, &key, b""),
            (5, _) => world.write(RecordKind::Delete, &key, b""),
            _ => world.write(RecordKind::Put, &key, &value),
        }
        return;
    }
    let key = if world.random(2) == 0 { format!("key{number:03}") } else { format!("KEY{number:03}") };
    match world.random(4) {
        0 => world.write(RecordKind::Delete, key.as_bytes(), b""),
        _ => world.write(RecordKind::Put, key.as_bytes(), &value),
    }
}

pub(crate) fn churn(world: &mut World, rounds: usize) {
    for round in 0..rounds {
        for _ in 0..world.random(60) {
            write_something(world);
        }
        match world.random(12) {
            0 | 1 => {
                let at = world.visible();
                world.host.snapshots.lock().unwrap().push(at);
            }
            2 | 3 => {
                let count = world.host.snapshots.lock().unwrap().len() as u64;
                if count > 0 {
                    let which = world.random(count) as usize;
                    world.host.snapshots.lock().unwrap().swap_remove(which);
                }
            }
            4..=6 => world.flush(),
            7 => world.tree.seal(),
            8 | 9 => world.settle(false),
            10 if round % 4 == 0 => world.major_compact(),
            _ => {
                let yields = world.random(2) == 0;
                world.host.yields.store(yields, Ordering::SeqCst);
                if let Some(task) = world.tree.next_task(false, &[]) {
                    world.run(task, false).unwrap();
                }
            }
        }
        if world.random(8) == 0 {
            world.check();
        }
        if world.random(15) == 0 {
            world.reopen();
            world.check();
        }
    }
}

#[test]
fn every_moment_that_somebody_looks_at_stays_as_it_was() {
    for (order, seeds) in orders().into_iter().zip([1..4u64, 100..102]) {
        for seed in seeds {
            let mut world = World::new(order.clone(), small_options(), seed);
            churn(&mut world, 120);
            world.check();
            world.host.snapshots.lock().unwrap().clear();
            world.major_compact();
            world.check();
            let tables = world.tables();
            assert!(tables.iter().all(|(level, table)| *level == BOTTOM && table.tombstones == 0), "{tables:?}");
            assert!(tables.len() > 1, "tables are cut");
            world.reopen();
            world.check();
            world.check_files();
            let metrics = world.tree.metrics();
            assert_eq!(metrics.levels.iter().map(|level| level.tables).sum::<u64>(), tables.len() as u64);
        }
    }
}

#[test]
fn tombstones_that_a_snapshot_needs_stay_and_go_later() {
    let mut world = World::new(KeyOrder::bytewise(), small_options(), 5);
    for i in 0..50 {
        world.put(&format!("{i:03}"), "value");
    }
    let at = world.visible();
    world.host.snapshots.lock().unwrap().push(at);
    for i in 0..50 {
        world.delete(&format!("{i:03}"));
    }
    world.major_compact();
    world.check();
    assert_eq!(world.tables().iter().map(|(_, table)| table.tombstones).sum::<u64>(), 50);
    world.major_compact();
    assert_eq!(world.tree.metrics().compactions, 1, "nothing has changed, nothing is done");
    world.host.snapshots.lock().unwrap().clear();
    world.major_compact();
    world.check();
    assert_eq!(world.tables(), [], "an empty table is never written");
    world.check_files();
}

#[test]
fn a_record_that_is_not_published_yet_survives_a_flush() {
    let mut world = World::new(KeyOrder::bytewise(), small_options(), 5);
    world.put("a", "1");
    world.write_unpublished(RecordKind::Put, b"a", b"2");
    world.write_unpublished(RecordKind::Put, b"a", b"3");
    world.major_compact();
    world.check();
    assert_eq!(world.tree.get(b"a", ReadPoint::Latest).unwrap().unwrap(), b"1");
    world.host.visible.publish(SeqNo(2));
    assert_eq!(world.tree.get(b"a", ReadPoint::Latest).unwrap().unwrap(), b"2");
    world.host.visible.publish(SeqNo(3));
    world.check();
}

/// Writes and seals while a flush waits for the log.
struct Meanwhile<'a>(&'a World);

impl Host for Meanwhile<'_> {
    fn log_end(&self) -> SeqNo {
        SeqNo::MAX
    }

    fn make_log_durable(&self, through: SeqNo) -> Result<()> {
        let entry = EntryRef { user: b"b", seqno: SeqNo(2), kind: RecordKind::Put, value: b"later" };
        self.0.tree.apply(entry, None)?;
        self.0.tree.seal();
        self.0.host.make_log_durable(through)
    }
    fn commit_edits(&self, edits: &[Edit]) -> Result<()> {
        self.0.host.commit_edits(edits)
    }
    fn read_points(&self) -> Vec<SeqNo> {
        self.0.host.read_points()
    }
    fn now_ms(&self) -> u64 {
        self.0.host.now_ms()
    }
    fn should_yield(&self) -> bool {
        false
    }
}

#[test]
fn what_is_sealed_while_a_flush_runs_waits_for_the_next() {
    let mut world = World::new(KeyOrder::bytewise(), small_options(), 5);
    world.put("a", "1");
    world.tree.seal();
    world.tree.run(Task::Flush, false, &Meanwhile(&world)).unwrap();
    assert_eq!((world.tree.flushed_through(), world.tree.first_unflushed()), (SeqNo(1), Some(SeqNo(2))));
    assert_eq!(world.tree.next_task(false, &[]), Some(Task::Flush));
    assert_eq!(world.tree.get(b"b", ReadPoint::At(SeqNo(2))).unwrap().unwrap(), b"later");
    world.run(Task::Flush, false).unwrap();
    assert_eq!((world.tree.flushed_through(), world.tree.first_unflushed()), (SeqNo(2), None));
}

#[test]
fn what_does_not_overlap_moves() {
    let mut world = World::new(KeyOrder::bytewise(), small_options(), 5);
    for table in 0..12 {
        for i in 0..40 {
            world.put(&format!("{table:03}-{i:03}"), "some value that makes it a little longer");
        }
        world.flush();
        world.settle(false);
    }
    world.major_compact();
    world.check();
    let metrics = world.tree.metrics();
    assert!(metrics.moved_tables >= 12, "{metrics:?}");
    assert_eq!((metrics.compactions, metrics.compacted_written), (0, 0), "ascending keys are never rewritten");
    assert_eq!(metrics.levels[usize::from(BOTTOM)].runs, 1);
    world.check_files();
}

#[test]
fn a_merge_leaves_out_the_tables_between() {
    let mut options = small_options();
    options.compaction.base_size = 1 << 20;
    let mut world = World::new(KeyOrder::bytewise(), options, 5);
    for part in ["a", "g", "m"] {
        for i in 0..20 {
            world.put(&format!("{part}{i:03}"), "value");
        }
        world.flush();
        world.major_compact();
    }
    let between = world.tables().into_iter().find(|(_, table)| table.smallest.0.starts_with(b"g")).unwrap();
    for part in ["a", "m", "a"] {
        world.put(&format!("{part}007"), "newer");
        world.flush();
    }
    world.settle(false);
    world.check();
    assert_eq!(world.tree.metrics().compactions, 1);
    assert!(world.tables().contains(&between), "no need to touch it");
    assert!(world.tables().iter().all(|(level, _)| *level == BOTTOM));
    world.reopen();
    world.check();
}

#[test]
fn another_codec_is_not_reached_by_moving() {
    let mut options = small_options();
    options.compression_per_level = vec![CompressionType::None, CompressionType::Miniz(6)];
    let mut world = World::new(KeyOrder::bytewise(), options, 5);
    for i in 0..400 {
        world.put(&format!("{i:05}"), "some value that repeats itself, some value that repeats itself");
    }
    world.flush();
    let loose: u64 = world.tables().iter().map(|(_, table)| table.size).sum();
    world.major_compact();
    world.check();
    let tight: u64 = world.tables().iter().map(|(_, table)| table.size).sum();
    assert!(world.tree.metrics().compactions > 0 && world.tree.metrics().moved_tables == 0);
    assert!(tight < loose / 2, "{tight} and before {loose}");
}

#[test]
fn iterators_keep_the_files_they_walk() {
    let mut world = World::new(KeyOrder::bytewise(), small_options(), 5);
    for i in 0..300 {
        world.put(&format!("{i:05}"), "first");
    }
    world.flush();
    let mut cursor = world.tree.view().cursor(SeqNo::MAX, ALL).unwrap();
    let before = world.tables();
    for i in 0..300 {
        world.put(&format!("{i:05}"), "second");
    }
    world.major_compact();
    assert!(before.iter().all(|(_, table)| tables_in(&world.fs).contains_key(&table.id)), "the cursor needs them");
    let mut walked = 0;
    cursor.seek_to_first().unwrap();
    while cursor.valid() {
        walked += usize::from(cursor.entry().value == b"first");
        cursor.next().unwrap();
    }
    assert_eq!(walked, 300);
    drop(cursor);
    assert!(before.iter().all(|(_, table)| tables_in(&world.fs).contains_key(&table.id)), "a reader removes nothing");
    world.check_files();
}

/// Lets the first operation of a kind fail, then the second, and so on until the task gets through; gives how often it
/// failed. Each time the tree must be as it was, and no file left behind.
fn fail_until_through(world: &World, op: OpKind, task: Task) -> u64 {
    for nth in 0..1000 {
        let before = world.tables();
        let struck = world.faults.struck();
        world.faults.fail(FaultPlan::new(op, nth, Fault::Error(io::ErrorKind::StorageFull)));
        let result = world.run(task, true);
        world.faults.repair();
        match result {
            Ok(_) => {
                assert!(world.faults.struck() == struck || op == OpKind::Read, "a failure was not noticed");
                return nth;
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::OutOfSpace),
        }
        assert_eq!(world.tables(), before);
        world.check_files();
        if nth % 8 == 0 {
            world.check();
        }
    }
    panic!("it never gets through");
}

#[test]
fn a_flush_that_fails_leaves_the_tree_as_it_was() {
    let mut world = World::new(KeyOrder::bytewise(), small_options(), 9);
    for op in [OpKind::Create, OpKind::Write, OpKind::Sync, OpKind::SyncDir] {
        for _ in 0..300 {
            write_something(&mut world);
        }
        world.tree.seal();
        assert!(fail_until_through(&world, op, Task::Flush) > 0, "{op:?}");
        assert_eq!(world.tree.next_task(false, &[]).filter(|task| *task == Task::Flush), None);
        world.check();
    }
    world.reopen();
    world.check();
}

#[test]
fn a_merge_that_fails_leaves_the_tree_as_it_was() {
    let mut world = World::new(KeyOrder::bytewise(), small_options(), 9);
    for op in [OpKind::Create, OpKind::Write, OpKind::Sync, OpKind::SyncDir, OpKind::Open, OpKind::Read] {
        for _ in 0..2 {
            for _ in 0..300 {
                write_something(&mut world);
            }
            world.flush();
        }
        world.reopen(); // no table is open, nothing is in the cache
        let mut failures = 0;
        while world.tree.metrics().compactions == 0 {
            assert_eq!(world.tree.next_task(true, &[]), Some(Task::Compact));
            failures += fail_until_through(&world, op, Task::Compact);
        }
        assert!(failures > 0, "{op:?}");
        world.check();
    }
    world.settle(true);
    world.check();
    world.check_files();
    world.reopen();
    world.check();
}

#[test]
fn edits_that_cannot_be_committed_are_tried_again() {
    let mut world = World::new(KeyOrder::bytewise(), small_options(), 9);
    for round in 0..2 {
        for _ in 0..200 {
            write_something(&mut world);
        }
        world.tree.seal();
        world.host.refuse_edits.store(true, Ordering::SeqCst);
        for _ in 0..3 {
            assert_eq!(world.run(Task::Flush, false).unwrap_err().kind(), ErrorKind::OutOfSpace);
        }
        world.check();
        world.host.refuse_edits.store(false, Ordering::SeqCst);
        assert_eq!(world.tree.next_task(false, &[]), Some(Task::Flush));
        world.run(Task::Flush, false).unwrap();
        world.check_files();
        if round == 1 {
            world.host.refuse_edits.store(true, Ordering::SeqCst);
            for _ in 0..3 {
                assert_eq!(world.run(Task::Compact, true).unwrap_err().kind(), ErrorKind::OutOfSpace);
            }
            world.check();
            world.host.refuse_edits.store(false, Ordering::SeqCst);
            world.settle(true);
        }
        world.check();
        world.check_files();
    }
}

#[test]
fn a_merge_yields_and_goes_on() {
    let mut options = small_options();
    options.compaction.base_size = 1 << 20;
    let mut world = World::new(KeyOrder::bytewise(), options, 11);
    for _ in 0..3 {
        for i in 0..400 {
            world.put(&format!("{i:05}"), "a value of some length, so that there is more than one step to do");
        }
        world.flush();
    }
    world.host.yields.store(true, Ordering::SeqCst);
    let mut parts = 0;
    while world.tree.metrics().compactions == 0 {
        assert_eq!(world.tree.next_task(false, &[]), Some(Task::Compact));
        world.run(Task::Compact, false).unwrap();
        world.put("00001", "written between two steps");
        world.flush();
        world.check();
        parts += 1;
    }
    assert!(parts > 3, "{parts}");
    world.host.yields.store(false, Ordering::SeqCst);
    world.settle(true);
    world.check();
    world.check_files();
}

#[test]
fn a_paused_merge_leaves_no_files_when_the_tree_closes() {
    let mut options = small_options();
    options.compaction.base_size = 1 << 20;
    let mut world = World::new(KeyOrder::bytewise(), options, 11);
    for _ in 0..3 {
        for i in 0..400 {
            world.put(&format!("{i:05}"), "a value of some length, so that there is more than one step to do");
        }
        world.flush();
    }
    world.host.yields.store(true, Ordering::SeqCst);
    world.run(Task::Compact, true).unwrap();
    assert!(world.tree.metrics().moved_tables > 0, "the oldest run moves, the others are merged");
    world.run(Task::Compact, true).unwrap();
    assert!(tables_in(&world.fs).len() > world.tables().len());
    world.tree.give_up_paused();
    world.check_files();
    world.reopen();
    world.check_files();
    world.check();
}

#[test]
fn restore_misses_what_is_missing() {
    let mut world = World::new(KeyOrder::bytewise(), small_options(), 3);
    world.put("a", "1");
    world.flush();
    let (tables, files) = (world.tables(), Arc::clone(&world.tree.context.files));
    let check =
        |listing: &HashMap<_, _>| check_files(tables.iter().map(|(_, table)| table), [].iter(), listing, &files);
    let mut listing: HashMap<_, _> =
        tables_in(&world.fs).into_iter().map(|(id, len)| ((DataKind::Table, id), len)).collect();
    check(&listing).unwrap();
    *listing.values_mut().next().unwrap() += 1;
    assert_eq!(check(&listing).unwrap_err().kind(), ErrorKind::Corruption);
    let error = check(&HashMap::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corruption);
    assert!(error.file().is_some_and(|file| file.ends_with("000001.sst")), "{error}");
}

#[test]
fn a_full_memtable_is_sealed_and_pressure_tells() {
    let mut options = small_options();
    options.max_memtable_size = 64 << 10;
    let mut world = World::new(KeyOrder::bytewise(), options, 3);
    assert_eq!((world.tree.next_task(false, &[]), world.tree.first_unflushed()), (None, None));
    world.tree.seal();
    assert_eq!(world.tree.next_task(false, &[]), None, "nothing to seal");
    let value = "x".repeat(1000);
    for i in 0..200 {
        world.put(&format!("{i:05}"), &value);
    }
    let pressure = world.tree.pressure();
    assert!(pressure.sealed >= 2 && pressure.sealed_bytes >= 128 << 10, "{pressure:?}");
    assert_eq!(world.tree.first_unflushed(), Some(SeqNo(1)));
    assert_eq!(world.tree.next_task(false, &[]), Some(Task::Flush));
    world.run(Task::Flush, false).unwrap();
    assert_eq!(world.tree.pressure().sealed, 0);
    let flushed = world.tree.flushed_through();
    assert_eq!(world.tree.first_unflushed(), Some(SeqNo(flushed.0 + 1)));
    assert_eq!(world.tree.metrics().flushes, 1);
    assert_eq!(world.tree.pressure().young_runs, 1, "what was sealed becomes one run");
    world.check();
}

#[test]
fn a_discarded_tree_removes_its_files_and_stops() {
    let mut world = World::new(KeyOrder::bytewise(), small_options(), 3);
    for i in 0..300 {
        world.put(&format!("{i:05}"), "value");
    }
    world.flush();
    let cursor = world.tree.view().cursor(SeqNo::MAX, ALL).unwrap();
    world.tree.discard();
    assert_eq!(world.tree.next_task(true, &[]), None);
    assert_eq!(world.run(Task::Flush, true).unwrap_err().kind(), ErrorKind::Closed);
    assert!(!tables_in(&world.fs).is_empty(), "the cursor still walks them");
    drop(cursor);
    assert!(!tables_in(&world.fs).is_empty(), "a reader removes nothing");
    for _ in 0..2_000_000 {
        world.tree.context.graveyard.remove_all();
        if tables_in(&world.fs).is_empty() {
            return;
        }
        world.tree.flushed_through();
        std::thread::yield_now();
    }
    panic!("files are left");
}

#[test]
#[expect(clippy::disallowed_methods, reason = "what threads do to each other is what is tested")]
fn readers_never_miss_a_key_while_tasks_run() {
    let mut world = World::new(KeyOrder::bytewise(), small_options(), 3);
    for i in 0..200 {
        world.put(&format!("{i:03}"), "0000");
    }
    let done = AtomicBool::new(false);
    let (tree, host) = (&world.tree, &world.host);
    std::thread::scope(|scope| {
        for start in 0..2 {
            let done = &done;
            scope.spawn(move || {
                let mut seen = vec![0u64; 200];
                let mut i = start;
                while !done.load(Ordering::SeqCst) {
                    i = (i + 7) % 200;
                    let value = tree.get(format!("{i:03}").as_bytes(), ReadPoint::Latest).unwrap().expect("never gone");
                    let number: u64 = std::str::from_utf8(&value).unwrap().parse().unwrap();
                    assert!(number >= seen[i], "an older value came back");
                    seen[i] = number;
                }
            });
        }
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                match tree.next_task(false, &[]) {
                    Some(task) => drop(tree.run(task, false, host).unwrap()),
                    None => std::thread::yield_now(),
                }
            }
        });
        let mut seqno = 200;
        for round in 1..60u64 {
            for i in 0..200 {
                seqno += 1;
                let (key, value) = (format!("{i:03}"), format!("{round:04}"));
                let entry = EntryRef {
                    user: key.as_bytes(),
                    seqno: SeqNo(seqno),
                    kind: RecordKind::Put,
                    value: value.as_bytes(),
                };
                tree.apply(entry, None).unwrap();
                host.visible.publish(SeqNo(seqno));
            }
            if round % 3 == 0 {
                tree.seal();
                while tree.pressure().sealed > 2 {
                    std::thread::yield_now();
                }
            }
        }
        done.store(true, Ordering::SeqCst);
    });
    assert!(world.tree.metrics().flushes > 0);
    world.major_compact();
    for i in 0..200 {
        assert_eq!(world.tree.get(format!("{i:03}").as_bytes(), ReadPoint::Latest).unwrap().unwrap(), b"0059");
    }
}
