//! Trees that keep large values apart: they show what others do, and blob files come and go as they should.

use std::sync::atomic::Ordering;

use crate::base::blob_ref::BlobRef;
use crate::base::compression::CompressionType;
use crate::base::edit::{BlobMeta, Edit};
use crate::base::{ErrorKind, KeyOrder, RecordKind, SeqNo};
use crate::engine::{Engine, ReadPoint, Task};
use crate::lsm::blobs::options::KvSeparationOptions;
use crate::lsm::options::LsmOptions;
use crate::lsm::tests::harness::{ALL, World, files_in, replay, small_options};
use crate::lsm::tests::model::{churn, orders};
use crate::lsm::tree::LsmTree;
use crate::mem::slice::Slice;
use crate::vfs::fault::{Fault, FaultPlan, OpKind};
use crate::vfs::files::DataKind;

fn separated(threshold: u32) -> LsmOptions {
    let apart = KvSeparationOptions::default().separation_threshold(threshold).blob_file_target_size(2 << 10);
    let apart = apart.compression(CompressionType::None);
    LsmOptions { kv_separation: Some(apart), ..small_options() }
}

fn blobs(world: &World) -> Vec<BlobMeta> {
    replay(&world.host.edits.lock().unwrap()).1
}

fn blob_files(world: &World) -> usize {
    files_in(&world.fs).keys().filter(|(kind, _)| *kind == DataKind::Blob).count()
}

fn latest(world: &World, key: &str) -> crate::base::Result<Option<Slice>> {
    world.tree.get(key.as_bytes(), ReadPoint::Latest)
}

/// Values of 100 bytes under `count` keys, which differ by round.
fn fill(world: &mut World, count: u32, round: u32) {
    for i in 0..count {
        world.put(&format!("key{i:03}"), &format!("{round:05}{i:05}").repeat(10));
    }
    world.flush();
}

#[test]
fn whatever_stands_apart_every_moment_stays_as_it_was() {
    let codecs = [CompressionType::None, CompressionType::Lz4, CompressionType::Miniz(6)];
    for (order, seeds) in orders().into_iter().zip([1..4u64, 100..102]) {
        for (seed, codec) in seeds.zip(codecs) {
            let mut options = separated([16, 1, 50][seed as usize % 3]);
            options.kv_separation = options.kv_separation.map(|apart| apart.compression(codec));
            let mut world = World::new(order.clone(), options, seed);
            for round in 0..4 {
                churn(&mut world, 30);
                // Options that change apply to what is flushed from then on.
                let threshold = 1 + world.random(90) as u32;
                world.options = if round == 2 { small_options() } else { separated(threshold) };
                world.reopen();
            }
            world.check();
            assert!(!blobs(&world).is_empty(), "values stand apart");
            world.host.snapshots.lock().unwrap().clear();
            world.major_compact();
            world.check();
            world.check_files();
            world.reopen();
            world.check();
            world.check_files();
        }
    }
}

#[test]
fn compaction_carries_pointers_and_leaves_values_where_they_are() {
    let mut world = World::new(KeyOrder::bytewise(), separated(50), 3);
    for round in 0..4 {
        (0..40).for_each(|i| world.put(&format!("{round} key{i:03}"), &"v".repeat(100)));
        (0..40).for_each(|i| world.put(&format!("{round} small{i:03}"), "inline"));
        world.flush();
    }
    let before = blobs(&world);
    assert!(before.len() >= 4);
    world.major_compact();
    assert_eq!(blobs(&world), before);
    world.check();
    let uses = world.tree.version().blobs().uses();
    assert!(uses.iter().all(|file| file.referenced_bytes == file.bytes && file.referenced_values == file.values));
    assert_eq!(uses.iter().map(|file| file.values).sum::<u64>(), 160, "only the large ones");
}

#[test]
fn the_last_reference_takes_its_file_along_and_a_reader_keeps_it() {
    let mut world = World::new(KeyOrder::bytewise(), separated(50), 3);
    fill(&mut world, 60, 1);
    let old: Vec<_> = blobs(&world).iter().map(|file| file.id).collect();
    let view = world.tree.view();
    let mut cursor = view.cursor(SeqNo::MAX, ALL).unwrap();
    cursor.seek_to_first().unwrap();
    fill(&mut world, 60, 2);
    let is_named = |world: &World| blobs(world).iter().any(|file| old.contains(&file.id));
    assert!(is_named(&world), "nobody knows yet that they are stale");
    world.major_compact();
    assert!(!is_named(&world), "the edit that took the last reference away named them for the last time");
    assert!(old.iter().all(|id| files_in(&world.fs).contains_key(&(DataKind::Blob, *id))), "the view reads them");
    let entry = cursor.entry();
    assert_eq!(entry.kind, RecordKind::BlobPointer);
    assert_eq!(view.values().read(entry.value).unwrap(), "0000100000".repeat(10));
    drop((cursor, view));
    world.check_files();
    world.check();
    for i in 0..60 {
        world.delete(&format!("key{i:03}"));
    }
    world.major_compact();
    world.check_files();
    assert_eq!((blob_files(&world), world.tree.metrics().blob_files), (0, vec![]));
}

#[test]
fn a_snapshot_keeps_the_values_it_sees() {
    let mut world = World::new(KeyOrder::bytewise(), separated(50), 3);
    fill(&mut world, 30, 1);
    let at = world.visible();
    world.host.snapshots.lock().unwrap().push(at);
    fill(&mut world, 30, 2);
    world.major_compact();
    world.check();
    let uses = world.tree.version().blobs().uses();
    assert_eq!(uses.iter().map(|file| file.referenced_values).sum::<u64>(), 60);
    world.host.snapshots.lock().unwrap().clear();
    fill(&mut world, 30, 3);
    world.major_compact();
    assert_eq!(world.tree.version().blobs().uses().iter().map(|file| file.referenced_values).sum::<u64>(), 30);
    world.check_files();
}

#[test]
fn a_flush_that_fails_leaves_no_blob_file_and_can_be_tried_again() {
    let mut deepest = 0;
    for nth in 1..8 {
        for op in [OpKind::Write, OpKind::Sync, OpKind::Create] {
            let mut world = World::new(KeyOrder::bytewise(), separated(50), 3);
            fill(&mut world, 30, 1);
            (0..30).for_each(|i| world.put(&format!("key{i:03}"), &"x".repeat(200)));
            world.tree.seal();
            world.faults.fail(FaultPlan::new(op, nth, Fault::Error(std::io::ErrorKind::StorageFull)));
            let failed = world.run(Task::Flush, false);
            if world.faults.struck() > 0 {
                deepest = nth;
                assert_eq!(failed.unwrap_err().kind(), ErrorKind::OutOfSpace);
                world.check_files();
                world.check();
                world.run(Task::Flush, false).unwrap();
            }
            world.check_files();
            world.check();
            assert!(blob_files(&world) > 2);
        }
    }
    assert!(deepest > 3, "several files are written by one flush");
}

#[test]
fn an_edit_that_is_refused_is_committed_later_with_its_blob_files() {
    let mut world = World::new(KeyOrder::bytewise(), separated(50), 3);
    fill(&mut world, 30, 1);
    (0..30).for_each(|i| world.put(&format!("key{i:03}"), &"x".repeat(200)));
    world.tree.seal();
    world.host.refuse_edits.store(true, Ordering::SeqCst);
    assert!(world.run(Task::Flush, false).is_err());
    world.check();
    world.host.refuse_edits.store(false, Ordering::SeqCst);
    world.run(Task::Flush, false).unwrap();
    world.check();
    world.check_files();
    world.host.refuse_edits.store(true, Ordering::SeqCst);
    while let Some(task) = world.tree.next_task(true, &[]) {
        if world.run(task, true).is_err() {
            break;
        }
    }
    world.host.refuse_edits.store(false, Ordering::SeqCst);
    world.major_compact();
    world.check();
    world.check_files();
}

#[test]
fn lengths_are_known_without_the_values() {
    let mut world = World::new(KeyOrder::bytewise(), separated(50), 3);
    fill(&mut world, 20, 1);
    world.reopen();
    for file in blobs(&world) {
        let path = world.tree.context.files.blobs().path(file.id);
        crate::vfs::Fs::remove_file(&world.fs, &path).unwrap();
    }
    let (mut cursor, mut keys) = (world.tree.view().cursor(SeqNo::MAX, ALL).unwrap(), 0);
    cursor.seek_to_first().unwrap();
    while cursor.valid() {
        assert_eq!(BlobRef::decode(cursor.entry().value).unwrap().len, 100);
        keys += 1;
        cursor.next().unwrap();
    }
    assert_eq!(keys, 20);
    assert_eq!(world.tree.size_of(b"key007", ReadPoint::Latest).unwrap(), Some(100));
    let error = latest(&world, "key007").unwrap_err();
    assert!(error.file().is_some_and(|file| file.extension().is_some_and(|e| e == "blob")), "{error}");
}

#[test]
fn a_manifest_whose_tables_and_blob_files_do_not_fit_is_refused() {
    let mut world = World::new(KeyOrder::bytewise(), separated(50), 3);
    fill(&mut world, 60, 1);
    let (tables, blobs, flushed) = replay(&world.host.edits.lock().unwrap());
    assert!(blobs.len() > 1);
    let restore = |blobs: Vec<BlobMeta>| {
        let context = (*world.tree.context).clone();
        LsmTree::restore(context, world.options.clone(), tables.clone(), blobs, flushed).map(drop).map_err(|e| e.kind())
    };
    restore(blobs.clone()).unwrap();
    let corrupt = Err(ErrorKind::Corruption);
    assert_eq!(restore(blobs[1..].to_vec()), corrupt, "a file that tables point to is missing");
    let with = |change: fn(&mut Vec<BlobMeta>)| {
        let mut changed = blobs.clone();
        change(&mut changed);
        changed
    };
    assert_eq!(restore(with(|b| b[1].sections[0].logical = b[0].id)), corrupt, "a logical file in two places");
    assert_eq!(restore(with(|b| b[0].sections[0].values -= 1)), corrupt, "fewer values than are pointed to");
    assert_eq!(restore(with(|b| b[0].sections[0].bytes -= 1)), corrupt, "fewer bytes");
}

#[test]
fn a_deleted_tree_leaves_no_blob_files() {
    let mut world = World::new(KeyOrder::bytewise(), separated(50), 3);
    fill(&mut world, 60, 1);
    (0..30).for_each(|i| world.put(&format!("key{i:03}"), &"x".repeat(200)));
    world.tree.seal();
    world.host.refuse_edits.store(true, Ordering::SeqCst);
    assert!(world.run(Task::Flush, false).is_err());
    world.tree.discard();
    for _ in 0..2_000_000 {
        if files_in(&world.fs).is_empty() {
            return;
        }
        world.tree.flushed_through(); // whoever unpins frees
        world.tree.context.graveyard.remove_all();
        std::thread::yield_now();
    }
    panic!("{:?} are left", files_in(&world.fs));
}

#[test]
fn edits_name_blob_files_before_the_tables_that_need_them() {
    let mut world = World::new(KeyOrder::bytewise(), separated(50), 3);
    fill(&mut world, 60, 1);
    let edits = world.host.edits.lock().unwrap().clone();
    let first = |wanted: fn(&Edit) -> bool| edits.iter().position(wanted).unwrap();
    let blob = first(|edit| matches!(edit, Edit::BlobFileAdded { .. }));
    assert!(blob < first(|edit| matches!(edit, Edit::TableAdded { .. })));
}
