//! Trees with key-value separation show the same values as trees without, and remove blob files without references.

use std::sync::atomic::Ordering;

use crate::base::blob_pointer::BlobPointer;
use crate::base::compression::CompressionType;
use crate::base::version_edit::{BlobFileMeta, BlobFileSection, PartitionEdit, VersionEdit};
use crate::base::{ErrorKind, KeyOrder, RecordKind, SeqNo};
use crate::engine::{Engine, ReadSeqno, Task};
use crate::lsm::blob_map::BlobMap;
use crate::lsm::options::{KvSeparationOptions, LsmOptions};
use crate::lsm::tests::harness::{ALL, LsmFixture, files_in, replay, small_options};
use crate::lsm::tests::model::{key_orders, run_random_operations};
use crate::lsm::tree::LsmTree;
use crate::mem::slice::Slice;
use crate::testing::{Fault, FaultPlan, OpKind};
use crate::vfs::open_files::DataFileKind;

fn separated(threshold: u32) -> LsmOptions {
    let separation = KvSeparationOptions::default().separation_threshold(threshold).blob_file_target_size(2 << 10);
    let separation = separation.compression(CompressionType::None);
    LsmOptions { kv_separation: Some(separation), ..small_options() }
}

fn blobs(fixture: &LsmFixture) -> Vec<BlobFileMeta> {
    replay(&fixture.host.edits.lock().unwrap()).1
}

fn blob_files(fixture: &LsmFixture) -> usize {
    files_in(&fixture.fs).keys().filter(|(kind, _)| *kind == DataFileKind::Blob).count()
}

fn latest(fixture: &LsmFixture, key: &str) -> crate::base::Result<Option<Slice>> {
    fixture.tree.get(key.as_bytes(), ReadSeqno::Latest)
}

/// Puts values of 100 bytes under `count` keys. The values differ by round.
fn fill(fixture: &mut LsmFixture, count: u32, round: u32) {
    for i in 0..count {
        fixture.put(&format!("key{i:03}"), &format!("{round:05}{i:05}").repeat(10));
    }
    fixture.flush();
}

/// Regression: the sums of damaged figures of blob files overflowed.
#[test]
fn impossible_blob_figures_are_corruption() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), separated(16), 1);
    (0..2).for_each(|round| fill(&mut fixture, 9, round));
    let restore = |change: &dyn Fn(&mut BlobFileSection)| {
        let mut files = blobs(&fixture);
        files.iter_mut().flat_map(|file| &mut file.sections).for_each(change);
        let handles = files.into_iter().map(|file| fixture.tree.context.blob_handle(file));
        BlobMap::restore(handles, []).map(|map| map.stats().len())
    };
    assert_eq!(restore(&|_| ()).unwrap(), 2);
    for error in [restore(&|section| section.bytes = u64::MAX), restore(&|section| section.values = 1 << 48)] {
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Corruption);
    }
}

#[test]
fn reads_agree_with_model_when_separated() {
    let codecs = [CompressionType::None, CompressionType::Lz4, CompressionType::Miniz(6)];
    let mut with_blobs = 0;
    for (order, seeds) in key_orders().into_iter().zip([1..4u64, 100..102]) {
        for (seed, codec) in seeds.zip(codecs) {
            let mut options = separated([16, 1, 50][seed as usize % 3]);
            options.kv_separation = options.kv_separation.map(|separation| separation.compression(codec));
            let mut fixture = LsmFixture::new(order.clone(), options, seed);
            for round in 0..4 {
                run_random_operations(&mut fixture, 30);
                // Changed options apply to values that are flushed from then on.
                let threshold = 1 + fixture.random(90) as u32;
                fixture.options = if round == 2 { small_options() } else { separated(threshold) };
                fixture.reopen();
            }
            fixture.check_reads();
            with_blobs += usize::from(!blobs(&fixture).is_empty());
            fixture.host.snapshots.lock().unwrap().clear();
            fixture.major_compact();
            fixture.check_reads();
            fixture.check_files();
            fixture.reopen();
            fixture.check_reads();
            fixture.check_files();
        }
    }
    assert!(with_blobs >= 3, "of 5 databases, {with_blobs} have values in blob files");
}

#[test]
fn compaction_copies_pointers_not_values() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), separated(50), 3);
    for round in 0..4 {
        (0..40).for_each(|i| fixture.put(&format!("{round} key{i:03}"), &"v".repeat(100)));
        (0..40).for_each(|i| fixture.put(&format!("{round} small{i:03}"), "inline"));
        fixture.flush();
    }
    let before = blobs(&fixture);
    assert!(before.len() >= 4);
    fixture.major_compact();
    assert_eq!(blobs(&fixture), before);
    fixture.check_reads();
    let uses = fixture.tree.version().blobs().stats();
    assert!(uses.iter().all(|file| file.referenced_bytes == file.value_bytes && file.referenced_values == file.values));
    assert_eq!(uses.iter().map(|file| file.values).sum::<u64>(), 160, "only the large ones");
}

#[test]
fn blob_file_lives_until_last_reader_ends() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), separated(50), 3);
    fill(&mut fixture, 60, 1);
    let old: Vec<_> = blobs(&fixture).iter().map(|file| file.number).collect();
    let view = fixture.tree.view();
    let mut cursor = view.iter(SeqNo::MAX.into(), ALL).unwrap();
    cursor.seek_to_first().unwrap();
    fill(&mut fixture, 60, 2);
    let is_named = |fixture: &LsmFixture| blobs(fixture).iter().any(|file| old.contains(&file.number));
    assert!(is_named(&fixture), "no compaction has dropped the references yet");
    fixture.major_compact();
    assert!(!is_named(&fixture), "the edit that removed the last reference removed them");
    assert!(old.iter().all(|id| files_in(&fixture.fs).contains_key(&(DataFileKind::Blob, *id))), "the view reads them");
    let entry = cursor.entry();
    assert_eq!(entry.kind, RecordKind::BlobPointer);
    assert_eq!(view.blob_resolver().resolve(entry.value).unwrap(), "0000100000".repeat(10));
    drop((cursor, view));
    fixture.check_files();
    fixture.check_reads();
    for i in 0..60 {
        fixture.delete(&format!("key{i:03}"));
    }
    fixture.major_compact();
    fixture.check_files();
    assert_eq!((blob_files(&fixture), fixture.tree.metrics().blob_files), (0, vec![]));
}

#[test]
fn failed_flush_leaves_no_blob_file() {
    let mut deepest = 0;
    for nth in 1..8 {
        for op in [OpKind::Write, OpKind::Sync, OpKind::Create] {
            let mut fixture = LsmFixture::new(KeyOrder::bytewise(), separated(50), 3);
            fill(&mut fixture, 30, 1);
            (0..30).for_each(|i| fixture.put(&format!("key{i:03}"), &"x".repeat(200)));
            fixture.tree.seal();
            fixture.faults.inject(FaultPlan::new(op, nth, Fault::Error(std::io::ErrorKind::StorageFull)));
            let failed = fixture.run(Task::Flush, false);
            if fixture.faults.fault_count() > 0 {
                deepest = nth;
                assert_eq!(failed.unwrap_err().kind(), ErrorKind::OutOfSpace);
                fixture.check_files();
                fixture.check_reads();
                fixture.run(Task::Flush, false).unwrap();
            }
            fixture.check_files();
            fixture.check_reads();
            assert!(blob_files(&fixture) > 2);
        }
    }
    assert!(deepest > 3, "several files are written by one flush");
}

#[test]
fn refused_edit_is_retried_with_blob_files() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), separated(50), 3);
    fill(&mut fixture, 30, 1);
    (0..30).for_each(|i| fixture.put(&format!("key{i:03}"), &"x".repeat(200)));
    fixture.tree.seal();
    fixture.host.refuse_edits.store(true, Ordering::SeqCst);
    assert!(fixture.run(Task::Flush, false).is_err());
    fixture.check_reads();
    fixture.host.refuse_edits.store(false, Ordering::SeqCst);
    fixture.run(Task::Flush, false).unwrap();
    fixture.check_reads();
    fixture.check_files();
    fixture.host.refuse_edits.store(true, Ordering::SeqCst);
    while let Some(task) = fixture.tree.next_task(true, &[]) {
        if fixture.run(task, true).is_err() {
            break;
        }
    }
    fixture.host.refuse_edits.store(false, Ordering::SeqCst);
    fixture.major_compact();
    fixture.check_reads();
    fixture.check_files();
}

#[test]
fn lengths_are_known_without_the_values() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), separated(50), 3);
    fill(&mut fixture, 20, 1);
    fixture.reopen();
    for file in blobs(&fixture) {
        let path = fixture.tree.context.files.blob_files().path(file.number);
        crate::vfs::Fs::remove_file(&fixture.fs, &path).unwrap();
    }
    let (mut cursor, mut keys) = (fixture.tree.view().iter(SeqNo::MAX.into(), ALL).unwrap(), 0);
    cursor.seek_to_first().unwrap();
    while cursor.valid() {
        assert_eq!(BlobPointer::decode(cursor.entry().value).unwrap().value_len, 100);
        keys += 1;
        cursor.next().unwrap();
    }
    assert_eq!(keys, 20);
    assert_eq!(fixture.tree.size_of(b"key007", ReadSeqno::Latest).unwrap(), Some(100));
    let error = latest(&fixture, "key007").unwrap_err();
    assert!(error.file().is_some_and(|file| file.extension().is_some_and(|e| e == "blob")), "{error}");
}

#[test]
fn manifest_with_bad_blob_references_is_refused() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), separated(50), 3);
    fill(&mut fixture, 60, 1);
    let (tables, blobs, flushed) = replay(&fixture.host.edits.lock().unwrap());
    assert!(blobs.len() > 1);
    let restore = |blobs: Vec<BlobFileMeta>| {
        let context = (*fixture.tree.context).clone();
        LsmTree::restore(context, fixture.options.clone(), tables.clone(), blobs, Vec::new(), flushed)
            .map(drop)
            .map_err(|e| e.kind())
    };
    restore(blobs.clone()).unwrap();
    let corrupt = Err(ErrorKind::Corruption);
    assert_eq!(restore(blobs[1..].to_vec()), corrupt, "a referenced file is missing");
    let with = |change: fn(&mut Vec<BlobFileMeta>)| {
        let mut changed = blobs.clone();
        change(&mut changed);
        changed
    };
    assert_eq!(restore(with(|b| b[1].sections[0].logical_file = b[0].number)), corrupt, "a logical file in two places");
    assert_eq!(restore(with(|b| b[0].sections[0].values -= 1)), corrupt, "fewer values than references");
    assert_eq!(restore(with(|b| b[0].sections[0].bytes -= 1)), corrupt, "fewer bytes");
}

#[test]
fn a_deleted_tree_leaves_no_blob_files() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), separated(50), 3);
    fill(&mut fixture, 60, 1);
    (0..30).for_each(|i| fixture.put(&format!("key{i:03}"), &"x".repeat(200)));
    fixture.tree.seal();
    fixture.host.refuse_edits.store(true, Ordering::SeqCst);
    assert!(fixture.run(Task::Flush, false).is_err());
    fixture.tree.discard();
    for _ in 0..2_000_000 {
        if files_in(&fixture.fs).is_empty() {
            return;
        }
        fixture.tree.flushed_through(); // releasing an epoch pin frees files
        fixture.tree.context.obsolete_files.remove_all();
        std::thread::yield_now();
    }
    panic!("{:?} exist", files_in(&fixture.fs));
}

#[test]
fn edits_add_blob_files_before_tables() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), separated(50), 3);
    fill(&mut fixture, 60, 1);
    let edits = fixture.host.edits.lock().unwrap().clone();
    let first = |wanted: fn(&VersionEdit) -> bool| edits.iter().position(wanted).unwrap();
    let blob = first(|edit| matches!(edit, VersionEdit::Partition { edit: PartitionEdit::BlobFileAdded { .. }, .. }));
    assert!(blob < first(|edit| matches!(edit, VersionEdit::Partition { edit: PartitionEdit::TableAdded { .. }, .. })));
}
