//! Compares a complete tree with a model.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::base::compression::CompressionType;
use crate::base::sync::lock;
use crate::base::version_edit::VersionEdit;
use crate::base::{EntryRef, ErrorKind, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::{Engine, EngineHost, ReadSeqno, Staged, Task};
use crate::lsm::tests::harness::{ALL, LsmFixture, small_options, tables_in};
use crate::lsm::tree::check_files;
use crate::lsm::version::BOTTOM_LEVEL;
use crate::testing::{Fault, FaultPlan, OpKind, TestOrder};
use crate::vfs::open_files::DataFileKind;

pub(crate) fn key_orders() -> [KeyOrder; 2] {
    [KeyOrder::bytewise(), KeyOrder::custom(Arc::new(TestOrder::ReversedAnyCase))]
}

/// Writes one random record. A `SingleDelete` is written only for a key that was put exactly once since its last
/// removal.
fn write_random_record(fixture: &mut LsmFixture) {
    let number = fixture.random(120);
    let value: Vec<u8> = (0..fixture.random(100)).map(|_| fixture.random(256) as u8).collect();
    if fixture.random(5) == 0 {
        let key = format!("weak{:03}", number % 30).into_bytes();
        match (fixture.random(8), fixture.puts_since_removal(&key)) {
            (0..5, 1) => fixture.write(RecordKind::SingleDelete, &key, b""),
            (5, _) => fixture.write(RecordKind::Delete, &key, b""),
            _ => fixture.write(RecordKind::Put, &key, &value),
        }
        return;
    }
    let key = if fixture.random(2) == 0 { format!("key{number:03}") } else { format!("KEY{number:03}") };
    match fixture.random(4) {
        0 => fixture.write(RecordKind::Delete, key.as_bytes(), b""),
        _ => fixture.write(RecordKind::Put, key.as_bytes(), &value),
    }
}

pub(crate) fn run_random_operations(fixture: &mut LsmFixture, rounds: usize) {
    for round in 0..rounds {
        for _ in 0..fixture.random(60) {
            write_random_record(fixture);
        }
        match fixture.random(12) {
            0 | 1 => {
                let at = fixture.visible();
                fixture.host.snapshots.lock().unwrap().push(at);
            }
            2 | 3 => {
                let count = fixture.host.snapshots.lock().unwrap().len() as u64;
                if count > 0 {
                    let which = fixture.random(count) as usize;
                    fixture.host.snapshots.lock().unwrap().swap_remove(which);
                }
            }
            4..=6 => fixture.flush(),
            7 => fixture.tree.seal(),
            8 | 9 => fixture.run_all_tasks(false),
            10 if round % 4 == 0 => fixture.major_compact(),
            _ => {
                let yields = fixture.random(2) == 0;
                fixture.host.yields.store(yields, Ordering::SeqCst);
                if let Some(task) = fixture.tree.next_task(false, &[]) {
                    fixture.run(task, false).unwrap();
                }
            }
        }
        if fixture.random(8) == 0 {
            fixture.check_reads();
        }
        if fixture.random(15) == 0 {
            fixture.reopen();
            fixture.check_reads();
        }
    }
}

#[test]
fn snapshots_agree_with_model() {
    for (order, seeds) in key_orders().into_iter().zip([1..4u64, 100..102]) {
        for seed in seeds {
            let mut fixture = LsmFixture::new(order.clone(), small_options(), seed);
            run_random_operations(&mut fixture, 120);
            fixture.check_reads();
            fixture.host.snapshots.lock().unwrap().clear();
            fixture.major_compact();
            fixture.check_reads();
            let tables = fixture.tables();
            assert!(tables.iter().all(|(level, table)| *level == BOTTOM_LEVEL && table.tombstones == 0), "{tables:?}");
            assert!(tables.len() > 1, "tables are cut");
            fixture.reopen();
            fixture.check_reads();
            fixture.check_files();
            let metrics = fixture.tree.metrics();
            assert_eq!(metrics.levels.iter().map(|level| level.tables).sum::<usize>(), tables.len());
        }
    }
}

/// A refused record once sealed the memtable like a full one did, and was then added to the next memtable, where
/// nothing showed that it is older than the sealed ones.
#[test]
fn only_full_memtable_is_sealed_on_error() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), small_options(), 5);
    let large = [7; 300 << 10]; // takes a chunk of its own
    let memtables = |fixture: &LsmFixture| fixture.tree.current.with(|now| (now.sealed.len(), now.active.len()));
    let limit_chunks = |fixture: &LsmFixture| lock(&fixture.tree.active_memtable).limit_chunks(2);
    limit_chunks(&fixture);
    (0..2).for_each(|n| fixture.write(RecordKind::Put, &[n], &large));
    assert_eq!(memtables(&fixture), (0, 2));
    fixture.write(RecordKind::Put, &[2], &large);
    assert_eq!(memtables(&fixture), (1, 1));
    limit_chunks(&fixture);
    let record = |key, n| EntryRef { user_key: key, seqno: SeqNo(n), kind: RecordKind::Put, value: &large };
    assert!(fixture.tree.insert_run(&[record(b"a", 4), record(b"b", 5), record(b"c", 6)]).unwrap(), "one was sealed");
    assert_eq!(memtables(&fixture), (2, 2));
    let refused = [fixture.tree.insert(record(b"c", 6)), fixture.tree.insert_run(&[record(b"c", 5)])];
    for error in refused.map(Result::unwrap_err) {
        assert_eq!((error.kind(), memtables(&fixture)), (ErrorKind::Invalid, (2, 2)), "{error}");
    }
    fixture.host.visible.publish(SeqNo(6));
    fixture.flush();
    let found = |key: &[u8]| fixture.tree.get(key, ReadSeqno::Latest).unwrap().map(|value| value.len());
    for key in [&[0][..], &[1], &[2], b"a", b"b", b"c"] {
        assert_eq!(found(key), Some(large.len()), "{}", key.escape_ascii());
    }
}

#[test]
fn tombstones_stay_until_snapshot_ends() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), small_options(), 5);
    for i in 0..50 {
        fixture.put(&format!("{i:03}"), "value");
    }
    let at = fixture.visible();
    fixture.host.snapshots.lock().unwrap().push(at);
    for i in 0..50 {
        fixture.delete(&format!("{i:03}"));
    }
    fixture.major_compact();
    fixture.check_reads();
    assert_eq!(fixture.tables().iter().map(|(_, table)| table.tombstones).sum::<u64>(), 50);
    fixture.major_compact();
    assert_eq!(fixture.host.compactions(), 1, "without a change there is no compaction");
    fixture.host.snapshots.lock().unwrap().clear();
    fixture.major_compact();
    fixture.check_reads();
    assert_eq!(fixture.tables(), [], "an empty table is never written");
    fixture.check_files();
}

#[test]
fn unpublished_record_survives_flush() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), small_options(), 5);
    fixture.put("a", "1");
    fixture.write_unpublished(RecordKind::Put, b"a", b"2");
    fixture.write_unpublished(RecordKind::Put, b"a", b"3");
    fixture.major_compact();
    fixture.check_reads();
    assert_eq!(fixture.tree.get(b"a", ReadSeqno::Latest).unwrap().unwrap(), b"1");
    fixture.host.visible.publish(SeqNo(2));
    assert_eq!(fixture.tree.get(b"a", ReadSeqno::Latest).unwrap().unwrap(), b"2");
    fixture.host.visible.publish(SeqNo(3));
    fixture.check_reads();
}

/// Writes and seals while a flush waits for the WAL.
struct WriteDuringFlushHost<'a>(&'a LsmFixture);

impl EngineHost for WriteDuringFlushHost<'_> {
    fn wal_end(&self) -> SeqNo {
        SeqNo::MAX
    }

    fn sync_wal_through(&self, through: SeqNo) -> Result<()> {
        let entry = EntryRef { user_key: b"b", seqno: SeqNo(2), kind: RecordKind::Put, value: b"later" };
        self.0.tree.apply(entry, Staged::Nothing)?;
        self.0.tree.seal();
        self.0.host.sync_wal_through(through)
    }
    fn commit_edits(&self, edits: &[VersionEdit]) -> Result<()> {
        self.0.host.commit_edits(edits)
    }
    fn snapshot_seqnos(&self) -> Vec<SeqNo> {
        self.0.host.snapshot_seqnos()
    }
    fn now_ms(&self) -> u64 {
        self.0.host.now_ms()
    }
    fn should_yield(&self) -> bool {
        false
    }
}

#[test]
fn memtable_sealed_during_flush_waits() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), small_options(), 5);
    fixture.put("a", "1");
    fixture.tree.seal();
    fixture.tree.run(Task::Flush, false, &WriteDuringFlushHost(&fixture)).unwrap();
    assert_eq!((fixture.tree.flushed_through(), fixture.tree.first_unflushed()), (SeqNo(1), Some(SeqNo(2))));
    assert_eq!(fixture.tree.next_task(false, &[]), Some(Task::Flush));
    assert_eq!(fixture.tree.get(b"b", ReadSeqno::At(SeqNo(2).into())).unwrap().unwrap(), b"later");
    fixture.run(Task::Flush, false).unwrap();
    assert_eq!((fixture.tree.flushed_through(), fixture.tree.first_unflushed()), (SeqNo(2), None));
}

#[test]
fn disjoint_tables_move_without_rewrite() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), small_options(), 5);
    for table in 0..12 {
        for i in 0..40 {
            fixture.put(&format!("{table:03}-{i:03}"), "some value that makes it a little longer");
        }
        fixture.flush();
        fixture.run_all_tasks(false);
    }
    fixture.major_compact();
    fixture.check_reads();
    assert!(fixture.host.trivial_moves() >= 12, "{}", fixture.host.trivial_moves());
    assert_eq!(fixture.host.compactions(), 0, "ascending keys are never rewritten");
    assert_eq!(fixture.tree.metrics().levels[usize::from(BOTTOM_LEVEL)].runs, 1);
    fixture.check_files();
}

#[test]
fn a_merge_leaves_out_the_tables_between() {
    let mut options = small_options();
    options.compaction.base_level_size = 1 << 20;
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), options, 5);
    for part in ["a", "g", "m"] {
        for i in 0..20 {
            fixture.put(&format!("{part}{i:03}"), "value");
        }
        fixture.flush();
        fixture.major_compact();
    }
    let between = fixture.tables().into_iter().find(|(_, table)| table.smallest_key.0.starts_with(b"g")).unwrap();
    for part in ["a", "m", "a"] {
        fixture.put(&format!("{part}007"), "newer");
        fixture.flush();
    }
    fixture.run_all_tasks(false);
    fixture.check_reads();
    assert_eq!(fixture.host.compactions(), 1);
    assert!(fixture.tables().contains(&between), "it does not overlap the others");
    assert!(fixture.tables().iter().all(|(level, _)| *level == BOTTOM_LEVEL));
    fixture.reopen();
    fixture.check_reads();
}

#[test]
fn table_is_rewritten_when_codec_differs() {
    let mut options = small_options();
    options.compression_per_level = vec![CompressionType::None, CompressionType::Miniz(6)];
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), options, 5);
    for i in 0..400 {
        fixture.put(&format!("{i:05}"), "some value that repeats itself, some value that repeats itself");
    }
    fixture.flush();
    let table_bytes: u64 = fixture.tables().iter().map(|(_, table)| table.size).sum();
    fixture.major_compact();
    fixture.check_reads();
    let tight: u64 = fixture.tables().iter().map(|(_, table)| table.size).sum();
    assert!(fixture.host.compactions() > 0 && fixture.host.trivial_moves() == 0);
    assert!(tight < table_bytes / 2, "{tight} and before {table_bytes}");
}

#[test]
fn iterators_keep_the_files_they_walk() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), small_options(), 5);
    for i in 0..300 {
        fixture.put(&format!("{i:05}"), "first");
    }
    fixture.flush();
    let mut cursor = fixture.tree.view().iter(SeqNo::MAX.into(), ALL).unwrap();
    let before = fixture.tables();
    for i in 0..300 {
        fixture.put(&format!("{i:05}"), "second");
    }
    fixture.major_compact();
    assert!(
        before.iter().all(|(_, table)| tables_in(&fixture.fs).contains_key(&table.number)),
        "the iterator needs them"
    );
    let mut walked = 0;
    cursor.seek_to_first().unwrap();
    while cursor.valid() {
        walked += usize::from(cursor.entry().value == b"first");
        cursor.next().unwrap();
    }
    assert_eq!(walked, 300);
    drop(cursor);
    assert!(
        before.iter().all(|(_, table)| tables_in(&fixture.fs).contains_key(&table.number)),
        "a reader removes nothing"
    );
    fixture.check_files();
}

/// Injects a fault into the first operation of a kind, then into the second one, and so on until the task succeeds.
/// Returns the number of failures. After each failure the tree must be unchanged and no new file may exist.
fn fail_until_through(fixture: &LsmFixture, op: OpKind, task: Task) -> u64 {
    for nth in 0..1000 {
        let before = fixture.tables();
        let struck = fixture.faults.fault_count();
        fixture.faults.inject(FaultPlan::new(op, nth, Fault::Error(io::ErrorKind::StorageFull)));
        let result = fixture.run(task, true);
        fixture.faults.clear_faults();
        match result {
            Ok(_) => {
                assert!(fixture.faults.fault_count() == struck || op == OpKind::Read, "a failure was not noticed");
                return nth;
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::OutOfSpace),
        }
        assert_eq!(fixture.tables(), before);
        fixture.check_files();
        if nth % 8 == 0 {
            fixture.check_reads();
        }
    }
    panic!("the task never succeeds");
}

#[test]
fn a_flush_that_fails_leaves_the_tree_as_it_was() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), small_options(), 9);
    for op in [OpKind::Create, OpKind::Write, OpKind::Sync, OpKind::SyncDir] {
        for _ in 0..300 {
            write_random_record(&mut fixture);
        }
        fixture.tree.seal();
        assert!(fail_until_through(&fixture, op, Task::Flush) > 0, "{op:?}");
        assert_eq!(fixture.tree.next_task(false, &[]).filter(|task| *task == Task::Flush), None);
        fixture.check_reads();
    }
    fixture.reopen();
    fixture.check_reads();
}

#[test]
fn a_merge_that_fails_leaves_the_tree_as_it_was() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), small_options(), 9);
    for op in [OpKind::Create, OpKind::Write, OpKind::Sync, OpKind::SyncDir, OpKind::Open, OpKind::Read] {
        for _ in 0..2 {
            for _ in 0..300 {
                write_random_record(&mut fixture);
            }
            fixture.flush();
        }
        fixture.reopen(); // no table is open, and the cache is empty
        let (mut failures, before) = (0, fixture.host.compactions());
        while fixture.host.compactions() == before {
            assert_eq!(fixture.tree.next_task(true, &[]), Some(Task::Compact));
            failures += fail_until_through(&fixture, op, Task::Compact);
        }
        assert!(failures > 0, "{op:?}");
        fixture.check_reads();
    }
    fixture.run_all_tasks(true);
    fixture.check_reads();
    fixture.check_files();
    fixture.reopen();
    fixture.check_reads();
}

#[test]
fn uncommitted_edits_are_retried() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), small_options(), 9);
    for round in 0..2 {
        for _ in 0..200 {
            write_random_record(&mut fixture);
        }
        fixture.tree.seal();
        fixture.host.refuse_edits.store(true, Ordering::SeqCst);
        for _ in 0..3 {
            assert_eq!(fixture.run(Task::Flush, false).unwrap_err().kind(), ErrorKind::OutOfSpace);
        }
        fixture.check_reads();
        fixture.host.refuse_edits.store(false, Ordering::SeqCst);
        assert_eq!(fixture.tree.next_task(false, &[]), Some(Task::Flush));
        fixture.run(Task::Flush, false).unwrap();
        fixture.check_files();
        if round == 1 {
            fixture.host.refuse_edits.store(true, Ordering::SeqCst);
            for _ in 0..3 {
                assert_eq!(fixture.run(Task::Compact, true).unwrap_err().kind(), ErrorKind::OutOfSpace);
            }
            fixture.check_reads();
            fixture.host.refuse_edits.store(false, Ordering::SeqCst);
            fixture.run_all_tasks(true);
        }
        fixture.check_reads();
        fixture.check_files();
    }
}

#[test]
fn a_merge_yields_and_goes_on() {
    let mut options = small_options();
    options.compaction.base_level_size = 1 << 20;
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), options, 11);
    for _ in 0..3 {
        for i in 0..400 {
            fixture.put(&format!("{i:05}"), "a value of some length, so that there is more than one step to do");
        }
        fixture.flush();
    }
    fixture.host.yields.store(true, Ordering::SeqCst);
    let mut steps = 0;
    while fixture.host.compactions() == 0 {
        assert_eq!(fixture.tree.next_task(false, &[]), Some(Task::Compact));
        fixture.run(Task::Compact, false).unwrap();
        fixture.put("00001", "written between two steps");
        fixture.flush();
        fixture.check_reads();
        steps += 1;
    }
    assert!(steps > 3, "{steps}");
    fixture.host.yields.store(false, Ordering::SeqCst);
    fixture.run_all_tasks(true);
    fixture.check_reads();
    fixture.check_files();
}

#[test]
fn paused_compaction_leaves_no_files_on_close() {
    let mut options = small_options();
    options.compaction.base_level_size = 1 << 20;
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), options, 11);
    for _ in 0..3 {
        for i in 0..400 {
            fixture.put(&format!("{i:05}"), "a value of some length, so that there is more than one step to do");
        }
        fixture.flush();
    }
    fixture.host.yields.store(true, Ordering::SeqCst);
    fixture.run(Task::Compact, true).unwrap();
    assert!(fixture.host.trivial_moves() > 0, "the oldest run moves, the others are merged");
    fixture.run(Task::Compact, true).unwrap();
    assert!(tables_in(&fixture.fs).len() > fixture.tables().len());
    drop(fixture.tree.take_paused());
    fixture.check_files();
    fixture.reopen();
    fixture.check_files();
    fixture.check_reads();
}

#[test]
fn restore_reports_missing_files() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), small_options(), 3);
    fixture.put("a", "1");
    fixture.flush();
    let (tables, files) = (fixture.tables(), Arc::clone(&fixture.tree.context.files));
    let check =
        |listing: &HashMap<_, _>| check_files(tables.iter().map(|(_, table)| table), [].iter(), listing, &files);
    let mut listing: HashMap<_, _> =
        tables_in(&fixture.fs).into_iter().map(|(id, len)| ((DataFileKind::Table, id), len)).collect();
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
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), options, 3);
    assert_eq!((fixture.tree.next_task(false, &[]), fixture.tree.first_unflushed()), (None, None));
    fixture.tree.seal();
    assert_eq!(fixture.tree.next_task(false, &[]), None, "nothing to seal");
    let value = "x".repeat(1000);
    for i in 0..200 {
        fixture.put(&format!("{i:05}"), &value);
    }
    let pressure = fixture.tree.pressure();
    assert!(pressure.sealed_memtables >= 2 && pressure.sealed_bytes >= 128 << 10, "{pressure:?}");
    assert_eq!(fixture.tree.first_unflushed(), Some(SeqNo(1)));
    assert_eq!(fixture.tree.next_task(false, &[]), Some(Task::Flush));
    fixture.run(Task::Flush, false).unwrap();
    assert_eq!(fixture.tree.pressure().sealed_memtables, 0);
    let flushed = fixture.tree.flushed_through();
    assert_eq!(fixture.tree.first_unflushed(), Some(SeqNo(flushed.0 + 1)));
    assert_eq!(fixture.host.flushes(), 1);
    assert_eq!(fixture.tree.pressure().l0_runs, 1, "all sealed memtables become one run");
    fixture.check_reads();
}

#[test]
fn a_discarded_tree_removes_its_files_and_stops() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), small_options(), 3);
    for i in 0..300 {
        fixture.put(&format!("{i:05}"), "value");
    }
    fixture.flush();
    let cursor = fixture.tree.view().iter(SeqNo::MAX.into(), ALL).unwrap();
    fixture.tree.discard();
    assert_eq!(fixture.tree.next_task(true, &[]), None);
    assert_eq!(fixture.run(Task::Flush, true).unwrap_err().kind(), ErrorKind::Closed);
    assert!(!tables_in(&fixture.fs).is_empty(), "the iterator still reads them");
    drop(cursor);
    assert!(!tables_in(&fixture.fs).is_empty(), "a reader removes nothing");
    for _ in 0..2_000_000 {
        fixture.tree.context.obsolete_files.remove_all();
        if tables_in(&fixture.fs).is_empty() {
            return;
        }
        fixture.tree.flushed_through();
        std::thread::yield_now();
    }
    panic!("files remain");
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the test is about concurrent threads")]
fn readers_never_miss_a_key_while_tasks_run() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), small_options(), 3);
    for i in 0..200 {
        fixture.put(&format!("{i:03}"), "0000");
    }
    let done = AtomicBool::new(false);
    let (tree, host) = (&fixture.tree, &fixture.host);
    std::thread::scope(|scope| {
        for start in 0..2 {
            let done = &done;
            scope.spawn(move || {
                let mut seen = vec![0u64; 200];
                let mut i = start;
                while !done.load(Ordering::SeqCst) {
                    i = (i + 7) % 200;
                    let value = tree
                        .get(format!("{i:03}").as_bytes(), ReadSeqno::Latest)
                        .unwrap()
                        .expect("the key is never deleted");
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
                    user_key: key.as_bytes(),
                    seqno: SeqNo(seqno),
                    kind: RecordKind::Put,
                    value: value.as_bytes(),
                };
                tree.apply(entry, Staged::Nothing).unwrap();
                host.visible.publish(SeqNo(seqno));
            }
            if round % 3 == 0 {
                tree.seal();
                while tree.pressure().sealed_memtables > 2 {
                    std::thread::yield_now();
                }
            }
        }
        done.store(true, Ordering::SeqCst);
    });
    assert!(fixture.host.flushes() > 0);
    fixture.major_compact();
    for i in 0..200 {
        assert_eq!(fixture.tree.get(format!("{i:03}").as_bytes(), ReadSeqno::Latest).unwrap().unwrap(), b"0059");
    }
}

/// Regression: damaged spilled tables had records that are newer than those of the WAL. Recovery created memtables that
/// are not in the order of their sequence numbers.
#[test]
fn replayed_record_must_be_newer() {
    let fixture = LsmFixture::new(KeyOrder::bytewise(), small_options(), 1);
    let replay = |user_key: &[u8], seqno| {
        fixture.tree.replay(EntryRef { user_key, seqno: SeqNo(seqno), kind: RecordKind::Put, value: b"v" })
    };
    replay(b"b", 5).unwrap();
    fixture.tree.seal();
    for (key, seqno) in [(b"a", 4), (b"c", 5)] {
        assert_eq!(replay(key, seqno).unwrap_err().kind(), ErrorKind::Corruption);
    }
    replay(b"a", 6).unwrap();
}
