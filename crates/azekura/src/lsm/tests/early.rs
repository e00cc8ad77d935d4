//! Values that are written ahead of their commit: how their files begin, end and go.

use std::sync::atomic::Ordering;

use crate::base::compression::CompressionType;
use crate::base::edit::BlobMeta;
use crate::base::{ErrorKind, KeyOrder};
use crate::engine::{Engine, ReadPoint, Task};
use crate::lsm::blobs::options::KvSeparationOptions;
use crate::lsm::options::LsmOptions;
use crate::lsm::tests::harness::{World, files_in, replay, small_options};
use crate::mem::epoch::tests::eventually;
use crate::vfs::fault::{Fault, FaultPlan, OpKind};
use crate::vfs::files::DataKind;

const EIO: Fault = Fault::Error(std::io::ErrorKind::Other);

fn early(target_size: u64) -> LsmOptions {
    let apart = KvSeparationOptions::default().separation_threshold(50).blob_file_target_size(target_size);
    let apart = apart.compression(CompressionType::None).automatic_gc(None).early_from(50);
    LsmOptions { kv_separation: Some(apart), ..small_options() }
}

fn world(target_size: u64) -> World {
    let world = World::new(KeyOrder::bytewise(), early(target_size), 1);
    world.host.counts.store(true, Ordering::SeqCst);
    world
}

fn value(n: u32) -> String {
    format!("value {n:04} ").repeat(10)
}

fn named(world: &World) -> Vec<BlobMeta> {
    replay(&world.host.edits.lock().unwrap()).1
}

fn blob_files(world: &World) -> usize {
    files_in(&world.fs).keys().filter(|(kind, _)| *kind == DataKind::Blob).count()
}

/// Waits for files that other threads' pins keep a little longer.
fn comes_to(world: &World, count: usize) {
    eventually(|| {
        world.tree.context.graveyard.remove_all();
        blob_files(world) == count
    });
}

#[test]
fn files_end_when_they_are_full_and_are_named_when_tables_refer_to_them() {
    let mut world = world(1 << 10);
    for n in 0..30 {
        world.put_early(&format!("key {n:02}"), &value(n));
    }
    world.check();
    let begun = blob_files(&world);
    assert!((4..8).contains(&begun), "{begun}");
    assert_eq!((named(&world).len(), world.tree.early.counted().len()), (0, begun));
    world.flush();
    assert_eq!((named(&world).len(), world.tree.early.counted().len()), (begun, 0));
    assert!(world.tree.metrics().early_files.is_empty());
    world.check();
    world.major_compact();
    world.check();
    world.check_files();
    world.reopen();
    world.check();
}

#[test]
fn a_file_that_memory_points_into_outlives_its_references() {
    let mut world = world(1 << 20);
    world.put_early("a", &value(1));
    let snapshot = world.visible();
    world.host.snapshots.lock().unwrap().push(snapshot);
    world.delete("a");
    world.tree.seal();
    world.put_early("b", &value(2)); // to the same file, from the next memtable
    world.run(Task::Flush, false).unwrap();
    assert_eq!((named(&world).len(), world.tree.early.counted().len()), (1, 1));
    let file = named(&world)[0].clone();
    assert_eq!(file.sections[0].values, 2);
    world.host.snapshots.lock().unwrap().clear();
    // Nothing refers to it now, and nobody knows what of it memory needs: neither a merge nor a collection takes it.
    while world.tree.compact(true, &world.host).unwrap() != Default::default() {}
    assert_eq!(world.tree.version().blobs().uses()[0].referenced_values, 0);
    world.tree.collect(&[file.id], true, &world.host).unwrap();
    world.tree.collect_by_itself(true, &world.host).unwrap();
    assert_eq!(named(&world), std::slice::from_ref(&file));
    world.check();
    let mut scan = world.tree.begin_scan(vec![world.host.visible.get()], false);
    while !scan.step(100).unwrap() {}
    let scanned = world.tree.end_scan(scan);
    assert_eq!((scanned.files[0].stale(), scanned.files[0].bytes), (0, file.sections[0].bytes));
    world.flush();
    assert!(world.tree.early.counted().is_empty());
    world.check();
    world.tree.collect(&[file.id], true, &world.host).unwrap();
    assert_eq!(named(&world)[0].sections[0].values, 1, "what nothing points to any more is collected as usual");
    world.check();
    world.check_files();
}

#[test]
fn what_nobody_points_to_goes_without_ever_being_named() {
    let mut world = world(1 << 10);
    let claims: Vec<_> = (0..20).map(|n| world.tree.put_early(value(n).as_bytes()).unwrap()).collect();
    let begun = blob_files(&world);
    assert!(begun > 2);
    claims.into_iter().for_each(|claim| world.tree.release(&claim));
    comes_to(&world, 1); // the one that takes values
    for n in 0..20 {
        world.put_early("the same key", &value(n));
    }
    world.flush();
    assert_eq!(named(&world).len(), 1, "flushes drop what is hidden");
    world.check();
    world.check_files();
}

#[test]
fn one_key_written_over_and_over_fills_memtables_by_what_it_points_to() {
    let mut world = world(1 << 20);
    let mut options = early(1 << 20);
    options.max_memtable_size = 128 << 10;
    world.tree.set_options(options);
    for n in 0..400 {
        world.put_early("key", &value(n).repeat(10));
    }
    let metrics = world.tree.metrics();
    assert!(metrics.sealed >= 3 && metrics.sealed <= 5, "400 values of 1,200 bytes: {metrics:?}");
    world.flush();
    world.check();
}

#[test]
fn a_file_that_cannot_be_ended_is_ended_by_the_next_flush() {
    for op in [OpKind::Write, OpKind::Sync] {
        let mut world = world(1 << 20);
        world.put_early("a", &value(1));
        world.put_early("b", &value(2));
        // As the sync of the log would have it.
        world.tree.context.unsynced.sync_all().unwrap();
        world.tree.seal();
        world.faults.fail(FaultPlan::new(op, 1, EIO).in_path(".blob"));
        world.run(Task::Flush, false).unwrap_err();
        assert_eq!(named(&world), []);
        world.check();
        world.put_early("c", &value(3));
        world.run(Task::Flush, false).unwrap();
        assert_eq!(named(&world).len(), 1, "{op:?}");
        assert_eq!(
            named(&world)[0].sections[0].rewritten,
            op == OpKind::Sync,
            "after a failed sync it is another file"
        );
        world.check();
        world.flush();
        world.check();
        world.check_files();
    }
}

#[test]
fn a_failed_sync_concerns_its_commit_alone_unless_others_may_have_lost_something() {
    let mut world = world(1 << 20);
    world.put_early("a", &value(1));
    world.tree.context.unsynced.sync_all().unwrap();
    // Alone behind what is durable.
    let claim = world.tree.put_early(value(2).as_bytes()).unwrap();
    world.faults.fail(FaultPlan::new(OpKind::Sync, 1, EIO).in_path(".blob"));
    let error = world.tree.sync_claims([&claim]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    world.tree.release(&claim);
    drop(claim);
    world.tree.context.unsynced.sync_all().unwrap();
    world.put_early("c", &value(3));
    assert_eq!(blob_files(&world), 2, "the file takes nothing any more");
    world.flush();
    assert_eq!(named(&world).iter().map(|file| file.sections[0].values).sum::<u64>(), 2, "the failed one is gone");
    world.check();
    world.check_files();
    // Behind somebody's who may have been told that it is done.
    world.put_early("d", &value(4));
    let claim = world.tree.put_early(value(5).as_bytes()).unwrap();
    world.faults.fail(FaultPlan::new(OpKind::Sync, 1, EIO).in_path(".blob"));
    let error = world.tree.sync_claims([&claim]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Poisoned);
    world.check();
}

#[test]
fn a_write_that_fails_leaves_the_values_before_it_and_the_place_behind_them() {
    let mut world = world(1 << 20);
    world.put_early("a", &value(1));
    for nth in 1..=2 {
        world.faults.fail(FaultPlan::new(OpKind::Write, nth, Fault::Short).in_path(".blob"));
        world.tree.put_early(value(999).repeat(3).as_bytes()).unwrap_err();
        world.check();
        world.put_early(&format!("b{nth}"), &value(nth as u32));
    }
    world.flush();
    world.check();
    world.check_files();
    assert_eq!(named(&world)[0].sections[0].values, 3);
    world.reopen();
    world.check();
}

#[test]
fn a_tree_that_is_discarded_leaves_no_file_and_takes_no_value() {
    let mut world = world(1 << 10);
    (0..20).for_each(|n| world.put_early(&format!("{n}"), &value(n)));
    let view = world.tree.view();
    world.tree.discard();
    assert_eq!(world.tree.put_early(value(1).as_bytes()).unwrap_err().kind(), ErrorKind::Closed);
    assert!(blob_files(&world) > 0, "an iterator may go on");
    drop(view);
    comes_to(&world, 0);
}

#[expect(clippy::disallowed_methods, reason = "the test races threads, and in vfs none are scoped")]
#[test]
fn readers_find_files_that_are_begun_while_they_look() {
    let world = world(1 << 10);
    let tree = &world.tree;
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::SeqCst) {
                    if let Some(found) = tree.get(b"key", ReadPoint::Latest).unwrap() {
                        assert!(found.starts_with(b"value "));
                    }
                    std::thread::yield_now();
                }
            });
        }
        let mut pointer = Vec::new();
        for n in 1..600u64 {
            let claim = tree.put_early(value(n as u32 % 9_999).repeat(8).as_bytes()).unwrap();
            pointer.clear();
            claim.pointer.encode(&mut pointer);
            let (kind, seqno) = (crate::base::RecordKind::BlobPointer, crate::base::SeqNo(n));
            tree.apply(crate::base::EntryRef { user: b"key", seqno, kind, value: &pointer }, None).unwrap();
            world.host.visible.publish(seqno);
            if n.is_multiple_of(100) {
                tree.seal();
                tree.run(Task::Flush, false, &world.host).unwrap();
                tree.context.graveyard.remove_all();
            }
        }
        done.store(true, Ordering::SeqCst);
    });
}
