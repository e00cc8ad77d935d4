//! Blob GC does not change the visible values of a tree, and reduces its bytes.

use std::sync::atomic::Ordering;

use crate::base::compression::CompressionType;
use crate::base::version_edit::FileNumber;
use crate::base::{ErrorKind, KeyOrder, SeqNo};
use crate::engine::{Engine, EngineHost, FULL_MEMTABLE, TaskReport};
use crate::lsm::blob_gc::{BlobGcGoal, BlobGcStep, BlobScanResult, next_blob_gc_step};
use crate::lsm::options::{KvSeparationOptions, LsmOptions};
use crate::lsm::tests::harness::{ALL, LsmFixture, small_options};
use crate::lsm::tests::model::{key_orders, run_random_operations};
use crate::lsm::version::{BOTTOM_LEVEL, HasTableMeta};
use crate::testing::{Fault, FaultPlan, OpKind};

fn separated(threshold: u32, target_size: u64) -> LsmOptions {
    let separation = KvSeparationOptions::default().separation_threshold(threshold).blob_file_target_size(target_size);
    let separation = separation.compression(CompressionType::None).automatic_gc(None);
    LsmOptions { kv_separation: Some(separation), ..small_options() }
}

/// Puts values of 100 bytes under every `nth` key of 60.
fn fill(fixture: &mut LsmFixture, nth: u32, round: u32) {
    for i in (0..60).filter(|i| i % nth == 0) {
        fixture.put(&format!("key{i:03}"), &format!("{round:05}{i:05}").repeat(10));
    }
    fixture.flush();
}

/// A tree in which half of each blob file is known to be stale.
fn half_stale() -> LsmFixture {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), separated(50, 2 << 10), 3);
    fill(&mut fixture, 1, 1);
    fill(&mut fixture, 2, 2);
    fixture.major_compact();
    fixture
}

fn stale_files(fixture: &LsmFixture) -> Vec<FileNumber> {
    let uses = fixture.tree.version().blobs().stats();
    uses.iter().filter(|file| file.stale_bytes() > 0).map(|file| FileNumber(file.id)).collect()
}

fn collect(fixture: &LsmFixture, chosen: &[FileNumber]) -> crate::base::Result<TaskReport> {
    let result = fixture.tree.run_blob_gc(chosen, true, &fixture.host);
    fixture.tree.context.obsolete_files.remove_all();
    result
}

fn collect_all(fixture: &LsmFixture, mut chosen: Vec<FileNumber>) {
    for _ in 0..1000 {
        if chosen.is_empty() {
            return;
        }
        collect(fixture, &chosen).unwrap();
        chosen.retain(|file| fixture.tree.version().blobs().contains(*file));
    }
    panic!("{chosen:?} are not removed");
}

fn scan(fixture: &LsmFixture) -> std::sync::Arc<BlobScanResult> {
    let mut scan = fixture.tree.begin_blob_scan(fixture.host.snapshot_seqnos(), false);
    while !scan.step(7).unwrap() {}
    fixture.tree.finish_blob_scan(scan)
}

#[test]
fn reads_agree_with_model_after_blob_gc() {
    for (order, seeds) in key_orders().into_iter().zip([1..4u64, 100..102]) {
        for seed in seeds {
            let options = separated([16, 1, 50][seed as usize % 3], [1 << 10, 4 << 10, 1 << 20][seed as usize % 3]);
            let mut fixture = LsmFixture::new(order.clone(), options, seed);
            for round in 0..5 {
                run_random_operations(&mut fixture, 30);
                let known = stale_files(&fixture);
                collect_all(&fixture, known);
                assert_eq!(stale_files(&fixture), [], "the other values are referenced");
                fixture.check_reads();
                fixture.check_files();
                if round % 2 == 1 {
                    fixture.reopen();
                }
            }
            fixture.host.snapshots.lock().unwrap().clear();
            fixture.major_compact();
            let known = stale_files(&fixture);
            collect_all(&fixture, known);
            fixture.check_reads();
            fixture.check_files();
            fixture.reopen();
            fixture.check_reads();
            fixture.check_files();
        }
    }
}

#[test]
fn scan_predicts_compaction_and_blob_gc() {
    for seed in 1..6 {
        let mut fixture = LsmFixture::new(KeyOrder::bytewise(), separated(20, 2 << 10), seed);
        run_random_operations(&mut fixture, 60);
        fixture.flush();
        let before = scan(&fixture);
        assert!(fixture.tree.cached_blob_scan(&fixture.host.snapshot_seqnos()).is_some(), "the scan is cached");
        let retained_bytes_before: u64 = before.files.iter().map(|file| file.retained_bytes).sum();
        while fixture.tree.compact_to_bottom(fixture.host.visible.get(), &fixture.host).unwrap().is_some() {}
        while fixture
            .tree
            .rewrite_bottom_tables(&scan(&fixture).tables_hiding_garbage, &fixture.host)
            .unwrap()
            .is_some()
        {}
        let after = scan(&fixture);
        assert!(
            after.files.iter().all(|file| file.retained_bytes == file.referenced_bytes),
            "no value is hidden, seed {seed}"
        );
        assert_eq!(
            after.files.iter().map(|file| file.retained_bytes).sum::<u64>(),
            retained_bytes_before,
            "seed {seed}"
        );
        let BlobGcStep::RewriteFiles(chosen) = next_blob_gc_step(&after.files, BlobGcGoal::SpaceAmp(1.0)) else {
            continue;
        };
        collect_all(&fixture, chosen);
        let files = &scan(&fixture).files;
        assert!(files.iter().all(|file| file.bytes == file.retained_bytes));
        assert_eq!(files.iter().map(|file| file.bytes).sum::<u64>(), retained_bytes_before);
        fixture.check_reads();
        fixture.check_files();
    }
}

#[test]
fn small_live_sections_share_one_blob_file() {
    let mut fixture = half_stale();
    let before = fixture.tree.version().blobs().stats().len();
    fixture.options = separated(50, 64 << 10);
    fixture.tree.set_options(fixture.options.clone());
    let stale = stale_files(&fixture);
    assert!(stale.len() > 2);
    collect_all(&fixture, stale.clone());
    let version = fixture.tree.version();
    assert_eq!(version.blobs().stats().len(), before - stale.len() + 1);
    let sections = version.blobs().handles().map(|file| file.meta().sections.len()).max();
    assert_eq!(sections, Some(stale.len()));
    drop(version);
    fixture.check_reads();
    fixture.check_files();
    // Values that were copied once can be copied again.
    (0..30).for_each(|i| fixture.delete(&format!("key{i:03}")));
    fixture.major_compact();
    let stale = stale_files(&fixture);
    collect_all(&fixture, stale);
    fixture.check_reads();
    fixture.reopen();
    fixture.check_reads();
    fixture.check_files();
}

#[test]
fn paused_gc_resumes_between_other_tasks() {
    let mut fixture = half_stale();
    let chosen = stale_files(&fixture);
    fixture.host.yields.store(true, Ordering::SeqCst);
    let mut calls = 0;
    while chosen.iter().any(|file| fixture.tree.version().blobs().contains(*file)) {
        collect(&fixture, &chosen).unwrap();
        calls += 1;
        fill(&mut fixture, 7, 3 + calls);
        if calls % 3 == 0 {
            fixture.major_compact();
        }
        fixture.check_reads();
        assert!(calls < 1000);
    }
    assert!(calls > 2, "{calls}");
    // Check the files before the close: later, files that epoch pins of other tests keep a little longer would stay.
    drop(fixture.tree.take_paused());
    fixture.check_files();
    fixture.reopen();
    fixture.check_reads();
}

/// A blob GC of the returned files has paused, and then all keys were removed.
fn paused_gc_without_live_values() -> (LsmFixture, Vec<FileNumber>) {
    let mut fixture = half_stale();
    let chosen = stale_files(&fixture);
    fixture.host.yields.store(true, Ordering::SeqCst);
    collect(&fixture, &chosen).unwrap();
    (0..60).for_each(|i| fixture.delete(&format!("key{i:03}")));
    fixture.major_compact();
    (fixture, chosen)
}

#[test]
fn gc_is_abandoned_when_inputs_were_removed() {
    let (fixture, chosen) = paused_gc_without_live_values();
    assert_eq!(collect(&fixture, &chosen).unwrap(), TaskReport::default());
    fixture.check_reads();
    fixture.check_files();
    assert_eq!(fixture.tree.version().blobs().stats(), []);
}

/// Regression: `clear` returned while a paused blob GC pinned the removed files. Their space was freed at the next task
/// only.
#[test]
fn removal_of_all_tables_abandons_a_paused_gc() {
    let (fixture, _) = paused_gc_without_live_values();
    while fixture.tree.drop_whole_tables(true, &fixture.host).unwrap().is_some() {}
    fixture.tree.context.obsolete_files.remove_all();
    fixture.check_files();
}

#[test]
fn refused_gc_edit_is_retried_or_abandoned() {
    for deletes in [false, true] {
        let mut fixture = half_stale();
        let chosen = stale_files(&fixture);
        fixture.host.refuse_edits.store(true, Ordering::SeqCst);
        assert_eq!(collect(&fixture, &chosen).unwrap_err().kind(), ErrorKind::OutOfSpace);
        fixture.check_reads();
        fixture.host.refuse_edits.store(false, Ordering::SeqCst);
        if deletes {
            (0..60).for_each(|i| fixture.delete(&format!("key{i:03}")));
            fixture.major_compact();
        }
        collect_all(&fixture, chosen.clone());
        collect(&fixture, &chosen).unwrap();
        fixture.check_reads();
        fixture.check_files();
    }
    let fixture = half_stale();
    fixture.host.refuse_edits.store(true, Ordering::SeqCst);
    assert!(collect(&fixture, &stale_files(&fixture)).is_err());
    fixture.tree.discard();
    assert_eq!(collect(&fixture, &[]).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn failed_gc_leaves_no_files_and_is_retried() {
    let mut deepest = 0;
    for nth in 1..12 {
        for op in [OpKind::Read, OpKind::Write, OpKind::Sync, OpKind::Create] {
            let mut fixture = half_stale();
            fixture.reopen(); // no file is open
            let chosen = stale_files(&fixture);
            fixture.faults.inject(FaultPlan::new(op, nth, Fault::Error(std::io::ErrorKind::Other)));
            let failed = collect(&fixture, &chosen);
            if fixture.faults.fault_count() > 0 {
                deepest = deepest.max(nth);
                assert_eq!(failed.unwrap_err().kind(), ErrorKind::Io);
                fixture.check_files();
            }
            fixture.faults.clear_faults();
            collect_all(&fixture, chosen);
            fixture.check_reads();
            fixture.check_files();
        }
    }
    assert!(deepest > 3, "{deepest}");
}

#[test]
fn a_reader_keeps_the_files_that_it_reads() {
    let fixture = half_stale();
    let view = fixture.tree.view();
    let mut cursor = view.iter(SeqNo::MAX.into(), ALL).unwrap();
    cursor.seek_to_first().unwrap();
    let stale = stale_files(&fixture);
    collect_all(&fixture, stale.clone());
    let mut values = view.blob_resolver();
    let mut seen = 0;
    while cursor.valid() {
        assert_eq!(values.resolve(cursor.entry().value).unwrap().len(), 100);
        seen += 1;
        cursor.next().unwrap();
    }
    assert_eq!(seen, 60);
    drop((cursor, values, view));
    fixture.check_reads();
    fixture.check_files();
}

#[test]
fn scan_names_bottom_tables_hiding_garbage() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), separated(50, 2 << 10), 3);
    fill(&mut fixture, 1, 1);
    fixture.major_compact();
    assert!(scan(&fixture).tables_hiding_garbage.is_empty());
    let at = fixture.host.visible.get();
    fixture.host.snapshots.lock().unwrap().push(at.0);
    // Only the last ten keys. The snapshot keeps their old values, also at the bottom.
    (50..60).for_each(|i| fixture.put(&format!("key{i:03}"), &"later".repeat(20)));
    fixture.flush();
    fixture.major_compact();
    let pinned = scan(&fixture);
    assert!(pinned.tables_hiding_garbage.is_empty(), "the snapshot sees the values");
    fixture.host.snapshots.lock().unwrap().clear();
    let hidden = scan(&fixture);
    let version = fixture.tree.version();
    let run = version.run(BOTTOM_LEVEL).unwrap();
    let holders = run.tables().iter().map(|table| table.meta());
    let holders = holders.filter(|meta| &*meta.largest_key.0 >= b"key050").map(|meta| meta.number);
    assert_eq!(hidden.tables_hiding_garbage, holders.collect());
    assert!(hidden.tables_hiding_garbage.len() < run.tables().len() || run.tables().len() == 1);
    assert_eq!(fixture.tree.memtable_hiding_seqno(), None, "there is no background blob GC");
    drop(version);
    while fixture.tree.rewrite_bottom_tables(&hidden.tables_hiding_garbage, &fixture.host).unwrap().is_some() {}
    assert!(scan(&fixture).tables_hiding_garbage.is_empty());
    fixture.check_reads();
    fixture.check_files();
}

#[test]
fn memtable_hiding_too_much_is_reported() {
    let mut options = separated(50, 2 << 10);
    options.kv_separation = options.kv_separation.map(|separation| separation.automatic_gc(Some(1.5)));
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), options, 3);
    (0..10).for_each(|i| fixture.put(&format!("key{i:03}"), "small"));
    assert_eq!(fixture.tree.memtable_hiding_seqno(), None, "there are no blob files");
    fill(&mut fixture, 1, 1);
    assert_eq!(fixture.tree.memtable_hiding_seqno(), None, "the memtable is empty");
    // 60 values of equal length: 20 entries may hide a third of the referenced bytes, which the target just allows.
    (0..20).for_each(|i| fixture.delete(&format!("key{i:03}")));
    assert_eq!(fixture.tree.memtable_hiding_seqno(), None);
    fixture.delete("key020");
    assert_eq!(fixture.tree.memtable_hiding_seqno(), Some(fixture.host.visible.get()));
    fixture.put("another", "small");
    assert_eq!(fixture.tree.memtable_hiding_seqno(), Some(fixture.host.visible.get()), "the last record");
}

fn automatic(target: f32) -> LsmOptions {
    let mut options = separated(50, 2 << 10);
    options.kv_separation = options.kv_separation.map(|separation| separation.automatic_gc(Some(target)));
    options
}

/// The number of records after which the second memtable of a tree is sealed. The first one has 2,000 values of 1,000
/// bytes, and `write` adds a record to the second one.
fn records_until_sealed(options: LsmOptions, write: impl Fn(&mut LsmFixture, &str)) -> Option<u32> {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), LsmOptions { max_memtable_size: 8 << 20, ..options }, 3);
    (0..2_000).for_each(|i| fixture.put(&format!("key{i:04}"), &"v".repeat(1_000)));
    fixture.flush();
    fixture.major_compact();
    let found = (0..2_000).find(|i| {
        write(&mut fixture, &format!("key{i:04}"));
        fixture.tree.current.with(|now| !now.sealed.is_empty())
    });
    fixture.run_all_tasks(false);
    fixture.check_reads();
    found.map(|last| last + 1)
}

/// A range of deletes removes many blob bytes with few entries, long before the memtable is full.
#[test]
fn memtable_of_tombstones_is_sealed_early() {
    let sealed_at = |target| records_until_sealed(automatic(target), |fixture, key| fixture.delete(key));
    // An eighth of the memtable size is 1,024 KiB. The check runs every 256 records.
    assert_eq!(sealed_at(1.5), Some(1_280));
    assert_eq!(sealed_at(4.0), Some(1_536), "three quarters of the bytes are hidden");
    assert_eq!(sealed_at(100.0), None);
}

/// Regression: while no flush ran, every 256 tombstones were sealed. Gets searched hundreds of memtables.
#[test]
fn one_sealed_memtable_waits_for_an_early_flush() {
    let options = LsmOptions { max_memtable_size: 8 << 20, ..automatic(1.1) };
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), options, 3);
    (0..2_000).for_each(|i| fixture.put(&format!("key{i:04}"), &"v".repeat(1_000)));
    fixture.flush();
    fixture.major_compact();
    (0..10_000).for_each(|i| fixture.delete(&format!("absent{i:05}")));
    let pressure = fixture.tree.pressure();
    assert_eq!(pressure.sealed_memtables, 1);
    assert_eq!(pressure.sealed_load, FULL_MEMTABLE / 8, "reads search the smallest memtable too");
    fixture.flush();
    fixture.check_reads();
}

/// Flushing values early would write them to more and smaller tables.
#[test]
fn memtable_of_values_is_not_sealed_early() {
    let write = |fixture: &mut LsmFixture, key: &str| fixture.put(key, &"w".repeat(1_000));
    assert_eq!(records_until_sealed(automatic(1.5), write), None);
}

#[test]
fn hidden_bytes_make_blob_gc_start_earlier() {
    let mut fixture = LsmFixture::new(KeyOrder::bytewise(), automatic(1.5), 3);
    fill(&mut fixture, 1, 1);
    fill(&mut fixture, 3, 2);
    fixture.major_compact();
    let amp = |fixture: &LsmFixture| {
        let totals = fixture.tree.version().blobs().totals();
        totals.bytes as f64 / totals.referenced as f64
    };
    assert!((1.3..1.35).contains(&amp(&fixture)) && !fixture.tree.needs_blob_gc(), "80 values of which 60 are seen");
    (0..4).for_each(|i| fixture.delete(&format!("key{i:03}")));
    assert!(!fixture.tree.needs_blob_gc(), "1.33, and with 56 of 60 it is 1.43");
    (4..40).for_each(|i| fixture.delete(&format!("key{i:03}")));
    assert!(fixture.tree.needs_blob_gc());
    let chosen = stale_files(&fixture);
    while fixture.tree.needs_blob_gc() {
        fixture.tree.run_automatic_blob_gc(true, &fixture.host).unwrap();
        fixture.tree.context.obsolete_files.remove_all();
    }
    // Half of the excess that the target allows, even if more bytes may be hidden: some stale bytes stay.
    assert!((1.05..=1.25).contains(&amp(&fixture)), "{}", amp(&fixture));
    assert!(chosen.iter().any(|file| fixture.tree.version().blobs().contains(*file)), "{chosen:?}");
    fixture.run_all_tasks(false);
    fixture.check_reads();
    fixture.check_files();
    assert!(amp(&fixture) <= 1.5);
}
