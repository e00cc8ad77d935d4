//! Direct blob writes: how their files are created, finished and removed.

use std::sync::atomic::Ordering;

use crate::base::compression::CompressionType;
use crate::base::version_edit::BlobFileMeta;
use crate::base::{ErrorKind, KeyOrder};
use crate::engine::{Engine, ReadSeqno, Staged, Task};
use crate::lsm::options::{KvSeparationOptions, LsmOptions};
use crate::lsm::tests::harness::{LsmFixture, files_in, replay, small_options};
use crate::mem::epoch::tests::wait_until;
use crate::testing::{Fault, FaultPlan, OpKind};
use crate::vfs::open_files::DataFileKind;

const EIO: Fault = Fault::Error(std::io::ErrorKind::Other);

fn direct_write_options(target_size: u64) -> LsmOptions {
    let separation = KvSeparationOptions::default().separation_threshold(50).blob_file_target_size(target_size);
    let separation = separation.compression(CompressionType::None).automatic_gc(None).direct_write_threshold(50);
    LsmOptions { kv_separation: Some(separation), ..small_options() }
}

fn world(target_size: u64) -> LsmFixture {
    let fixture = LsmFixture::new(KeyOrder::bytewise(), direct_write_options(target_size), 1);
    fixture.host.allow_unreferenced_blobs.store(true, Ordering::SeqCst);
    fixture
}

fn value(n: u32) -> String {
    format!("value {n:04} ").repeat(10)
}

/// A table refers to the value of `a` in a blob file, for a snapshot before its removal, and a memtable to that of `b`
/// in the same file.
fn with_pointers_of_table_and_memtable() -> LsmFixture {
    let mut fixture = world(1 << 20);
    fixture.put_direct("a", &value(1));
    let snapshot = fixture.visible();
    fixture.host.snapshots.lock().unwrap().push(snapshot);
    fixture.delete("a");
    fixture.tree.seal();
    fixture.put_direct("b", &value(2)); // to the same file, from the next memtable
    fixture.run(Task::Flush, false).unwrap();
    fixture
}

fn named_blob_files(fixture: &LsmFixture) -> Vec<BlobFileMeta> {
    replay(&fixture.host.edits.lock().unwrap()).1
}

fn blob_files(fixture: &LsmFixture) -> usize {
    files_in(&fixture.fs).keys().filter(|(kind, _)| *kind == DataFileKind::Blob).count()
}

/// Waits for files that epoch pins of other threads keep a little longer.
fn wait_for_blob_file_count(fixture: &LsmFixture, count: usize) {
    wait_until(|| {
        fixture.tree.context.obsolete_files.remove_all();
        blob_files(fixture) == count
    });
}

#[test]
fn direct_file_is_named_once_tables_refer_to_it() {
    let mut fixture = world(1 << 10);
    for n in 0..30 {
        fixture.put_direct(&format!("key {n:02}"), &value(n));
    }
    fixture.check_reads();
    let begun = blob_files(&fixture);
    assert!((4..8).contains(&begun), "{begun}");
    assert_eq!((named_blob_files(&fixture).len(), fixture.tree.direct_blobs.files_with_pointers().len()), (0, begun));
    fixture.flush();
    assert_eq!((named_blob_files(&fixture).len(), fixture.tree.direct_blobs.files_with_pointers().len()), (begun, 0));
    assert!(fixture.tree.direct_blob_extents().is_empty());
    fixture.check_reads();
    fixture.major_compact();
    fixture.check_reads();
    fixture.check_files();
    fixture.reopen();
    fixture.check_reads();
}

#[test]
fn file_stays_while_memtable_points_into_it() {
    let fixture = with_pointers_of_table_and_memtable();
    assert_eq!((named_blob_files(&fixture).len(), fixture.tree.direct_blobs.files_with_pointers().len()), (1, 1));
    let file = named_blob_files(&fixture)[0].clone();
    assert_eq!(file.sections[0].values, 2);
    fixture.host.snapshots.lock().unwrap().clear();
    // No table refers to it now, and the references of memtables are unknown: neither a compaction nor blob GC takes
    // it.
    while fixture.tree.compact(true, &fixture.host).unwrap() != Default::default() {}
    assert_eq!(fixture.tree.version().blobs().stats()[0].referenced_values, 0);
    fixture.tree.run_blob_gc(&[file.number], true, &fixture.host).unwrap();
    fixture.tree.run_automatic_blob_gc(true, &fixture.host).unwrap();
    assert_eq!(named_blob_files(&fixture), std::slice::from_ref(&file));
    fixture.check_reads();
    let mut scan = fixture.tree.begin_blob_scan(vec![fixture.host.visible.get()], false);
    while !scan.step(100).unwrap() {}
    let scanned = fixture.tree.finish_blob_scan(scan);
    assert_eq!((scanned.files[0].stale(), scanned.files[0].bytes), (0, file.sections[0].bytes));
    fixture.flush();
    assert!(fixture.tree.direct_blobs.files_with_pointers().is_empty());
    fixture.check_reads();
    fixture.tree.run_blob_gc(&[file.number], true, &fixture.host).unwrap();
    assert_eq!(named_blob_files(&fixture)[0].sections[0].values, 1, "the value without a pointer is dropped");
    fixture.check_reads();
    fixture.check_files();
}

/// Regression: the tables that referred to the file were removed while a memtable still pointed into it. The memtable
/// was flushed without the value, `clear` found no table to remove, and the file remained.
#[test]
fn file_goes_when_memtable_had_last_pointer() {
    let mut fixture = with_pointers_of_table_and_memtable();
    fixture.host.snapshots.lock().unwrap().clear();
    while fixture.tree.compact(true, &fixture.host).unwrap() != Default::default() {}
    fixture.delete("b");
    fixture.flush();
    assert_eq!((fixture.tree.version().tables().count(), named_blob_files(&fixture).len()), (0, 1));
    assert!(fixture.tree.drop_whole_tables(true, &fixture.host).unwrap().is_some());
    assert_eq!(fixture.tree.drop_whole_tables(true, &fixture.host).unwrap(), None);
    assert_eq!(named_blob_files(&fixture), []);
    fixture.check_files();
}

#[test]
fn unreferenced_direct_file_is_never_named() {
    let mut fixture = world(1 << 10);
    let claims: Vec<_> = (0..20).map(|n| fixture.tree.write_blob_directly(value(n).as_bytes()).unwrap()).collect();
    let begun = blob_files(&fixture);
    assert!(begun > 2);
    claims.into_iter().for_each(|claim| fixture.tree.release(Staged::Blob(claim), false));
    wait_for_blob_file_count(&fixture, 1); // the file that is open for values
    for n in 0..20 {
        fixture.put_direct("the same key", &value(n));
    }
    fixture.flush();
    assert_eq!(named_blob_files(&fixture).len(), 1, "a flush drops superseded values");
    fixture.check_reads();
    fixture.check_files();
}

/// A single key that is overwritten leaves almost nothing but stale values, which only the memtable knows.
#[test]
fn memtable_of_superseded_values_is_sealed() {
    let mut fixture = world(1 << 20);
    let set_options = |fixture: &LsmFixture, target| {
        let mut options = LsmOptions { max_memtable_size: 2 << 20, ..direct_write_options(1 << 20) };
        options.kv_separation = options.kv_separation.map(|separation| separation.automatic_gc(target));
        fixture.tree.set_options(options);
    };
    let is_sealed = |fixture: &LsmFixture| fixture.tree.pressure().sealed_memtables > 0;
    set_options(&fixture, None);
    (0..511).for_each(|n| fixture.put_direct("key", &value(n).repeat(10)));
    assert!(fixture.tree.memtable_hiding_seqno().is_none(), "there is no background blob GC");
    set_options(&fixture, Some(600.0));
    assert!(fixture.tree.memtable_hiding_seqno().is_none(), "511 values of which one is live");
    set_options(&fixture, Some(1.5));
    assert_eq!(fixture.tree.memtable_hiding_seqno(), Some(fixture.host.visible.get()));
    assert!(!is_sealed(&fixture));
    fixture.put_direct("key", &value(511).repeat(10));
    assert!(is_sealed(&fixture), "more than an eighth of the size of a memtable is stale");
    fixture.flush();
    fixture.check_reads();
    fixture.check_files();
}

/// Regression: values of dropped batches stayed in a file as long as a memtable pointed to one live value in it. No
/// figure counted them, so background blob GC never began.
#[test]
fn values_of_failed_commits_count_as_hidden() {
    let mut fixture = world(1 << 20);
    let mut options = direct_write_options(1 << 20);
    options.kv_separation = options.kv_separation.map(|separation| separation.automatic_gc(Some(1.5)));
    fixture.tree.set_options(options);
    fixture.put_direct("live", &value(1));
    let fail = || {
        let staged = Staged::Blob(fixture.tree.write_blob_directly(value(2).as_bytes()).unwrap());
        fixture.tree.release(staged, false);
    };
    assert!(fixture.tree.memtable_hiding_seqno().is_none());
    (0..3).for_each(|_| fail());
    assert_eq!(fixture.tree.memtable_hiding_seqno(), Some(fixture.host.visible.get()));
    fixture.flush();
    assert!(fixture.tree.needs_blob_gc(), "one of four values is referenced");
    fixture.run_all_tasks(false);
    assert_eq!(named_blob_files(&fixture).iter().flat_map(|file| &file.sections).map(|s| s.values).sum::<u64>(), 1);
    fixture.check_reads();
}

/// Regression: a file that was open for values and had only stale ones stayed until the next large value.
#[test]
fn stale_open_file_is_removed_by_a_flush() {
    let mut fixture = world(1 << 20);
    (0..30).for_each(|n| fixture.put_direct(&format!("key {n:02}"), &value(n)));
    (0..30).for_each(|n| fixture.delete(&format!("key {n:02}")));
    assert_eq!(blob_files(&fixture), 1);
    fixture.flush();
    wait_for_blob_file_count(&fixture, 0);
    fixture.put_direct("key", &value(1));
    fixture.flush();
    fixture.check_reads();
    fixture.check_files();
}

#[test]
fn pointed_bytes_count_towards_memtable_size() {
    let mut fixture = world(1 << 20);
    let mut options = direct_write_options(1 << 20);
    options.max_memtable_size = 128 << 10;
    fixture.tree.set_options(options);
    for n in 0..400 {
        fixture.put_direct("key", &value(n).repeat(10));
    }
    let pressure = fixture.tree.pressure();
    assert!((3..=5).contains(&pressure.sealed_memtables), "400 values of 1,200 bytes: {pressure:?}");
    fixture.flush();
    fixture.check_reads();
}

#[test]
fn unfinished_file_is_finished_by_next_flush() {
    for op in [OpKind::Write, OpKind::Sync] {
        let mut fixture = world(1 << 20);
        fixture.put_direct("a", &value(1));
        fixture.put_direct("b", &value(2));
        // As a sync of the WAL does.
        fixture.tree.context.unsynced_blobs.sync_all().unwrap();
        fixture.tree.seal();
        fixture.faults.inject(FaultPlan::new(op, 1, EIO).in_path(".blob"));
        fixture.run(Task::Flush, false).unwrap_err();
        assert_eq!(named_blob_files(&fixture), []);
        fixture.check_reads();
        fixture.put_direct("c", &value(3));
        fixture.run(Task::Flush, false).unwrap();
        assert_eq!(named_blob_files(&fixture).len(), 1, "{op:?}");
        assert_eq!(
            named_blob_files(&fixture)[0].sections[0].rewritten,
            op == OpKind::Sync,
            "after a failed sync the values are in another file"
        );
        fixture.check_reads();
        fixture.flush();
        fixture.check_reads();
        fixture.check_files();
    }
}

#[test]
fn failed_sync_poisons_only_if_shared() {
    let mut fixture = world(1 << 20);
    fixture.put_direct("a", &value(1));
    fixture.tree.context.unsynced_blobs.sync_all().unwrap();
    // Only this value follows the durable part of the file.
    let claim = fixture.tree.write_blob_directly(value(2).as_bytes()).unwrap();
    fixture.faults.inject(FaultPlan::new(OpKind::Sync, 1, EIO).in_path(".blob"));
    let error = fixture.tree.sync_staged_values([claim].into_iter()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    fixture.tree.release(Staged::Blob(claim), false);
    fixture.tree.context.unsynced_blobs.sync_all().unwrap();
    fixture.put_direct("c", &value(3));
    assert_eq!(blob_files(&fixture), 2, "the file is closed for values");
    fixture.flush();
    assert_eq!(
        named_blob_files(&fixture).iter().map(|file| file.sections[0].values).sum::<u64>(),
        2,
        "the failed value was not copied"
    );
    fixture.check_reads();
    fixture.check_files();
    // The value of another commit, which may be acknowledged, is before this one.
    fixture.put_direct("d", &value(4));
    let claim = fixture.tree.write_blob_directly(value(5).as_bytes()).unwrap();
    fixture.faults.inject(FaultPlan::new(OpKind::Sync, 1, EIO).in_path(".blob"));
    let error = fixture.tree.sync_staged_values([claim].into_iter()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Poisoned);
    fixture.check_reads();
    // A sync of the WAL that began before the database was poisoned must not succeed without that value.
    fixture.tree.context.unsynced_blobs.sync_all().unwrap_err();
}

/// The directory could not be opened for a sync of a direct blob file, which is no failed sync. Nevertheless the file
/// counted as synced from then on, with the acknowledged values in it: by a commit, and by a flush.
#[test]
fn file_stays_unsynced_if_no_file_may_open() {
    let fail_once = |fixture: &LsmFixture, nth| {
        fixture.faults.inject(FaultPlan::new(OpKind::SyncDir, nth, Fault::TooManyOpenFiles));
    };
    let is_synced_now = |fixture: &LsmFixture| {
        let before = fixture.faults.count(OpKind::SyncDir);
        fixture.tree.context.unsynced_blobs.sync_all().unwrap();
        fixture.faults.count(OpKind::SyncDir) > before
    };
    let mut fixture = world(1 << 20);
    fixture.put_direct("a", &value(1));
    let claim = fixture.tree.write_blob_directly(value(2).as_bytes()).unwrap();
    fail_once(&fixture, 1);
    assert!(fixture.tree.sync_staged_values([claim].into_iter()).unwrap_err().is_too_many_open_files());
    assert!(is_synced_now(&fixture), "after a commit");

    let mut fixture = world(1 << 20);
    fixture.put_direct("a", &value(1));
    fixture.tree.seal();
    fail_once(&fixture, 2); // the first one is for the table
    assert!(fixture.run(Task::Flush, false).unwrap_err().is_too_many_open_files());
    assert!(is_synced_now(&fixture), "after a flush");
    fixture.run(Task::Flush, false).unwrap();
    fixture.check_reads();
    fixture.check_files();
}

#[test]
fn failed_append_keeps_earlier_values() {
    let mut fixture = world(1 << 20);
    fixture.put_direct("a", &value(1));
    // A long value is written in two calls.
    for (n, (nth, repeat)) in (0..).zip([(1, 3), (1, 700), (2, 700)]) {
        fixture.faults.inject(FaultPlan::new(OpKind::Write, nth, Fault::Short).in_path(".blob"));
        fixture.tree.write_blob_directly(value(999).repeat(repeat).as_bytes()).map(drop).unwrap_err();
        fixture.check_reads();
        fixture.put_direct(&format!("b{n}"), &value(n));
    }
    fixture.flush();
    fixture.check_reads();
    fixture.check_files();
    assert_eq!(named_blob_files(&fixture)[0].sections[0].values, 4);
    fixture.reopen();
    fixture.check_reads();
}

#[test]
fn discarded_tree_removes_direct_files() {
    let mut fixture = world(1 << 10);
    (0..20).for_each(|n| fixture.put_direct(&format!("{n}"), &value(n)));
    let view = fixture.tree.view();
    fixture.tree.discard();
    assert_eq!(fixture.tree.write_blob_directly(value(1).as_bytes()).map(drop).unwrap_err().kind(), ErrorKind::Closed);
    assert!(blob_files(&fixture) > 0, "an iterator may still read them");
    drop(view);
    wait_for_blob_file_count(&fixture, 0);
}

#[expect(clippy::disallowed_methods, reason = "the test races threads, and in vfs none are scoped")]
#[test]
fn readers_find_files_created_during_reads() {
    let fixture = world(1 << 10);
    let tree = &fixture.tree;
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::SeqCst) {
                    if let Some(found) = tree.get(b"key", ReadSeqno::Latest).unwrap() {
                        assert!(found.starts_with(b"value "));
                    }
                    std::thread::yield_now();
                }
            });
        }
        let mut pointer = Vec::new();
        for n in 1..600u64 {
            let claim = tree.write_blob_directly(value(n as u32 % 9_999).repeat(8).as_bytes()).unwrap();
            pointer.clear();
            claim.encode(&mut pointer);
            let (kind, seqno) = (crate::base::RecordKind::BlobPointer, crate::base::SeqNo(n));
            tree.apply(crate::base::EntryRef { user_key: b"key", seqno, kind, value: &pointer }, Staged::Nothing)
                .unwrap();
            fixture.host.visible.publish(seqno);
            if n.is_multiple_of(100) {
                tree.seal();
                tree.run(Task::Flush, false, &fixture.host).unwrap();
                tree.context.obsolete_files.remove_all();
            }
        }
        done.store(true, Ordering::SeqCst);
    });
}
