//! Trees whose blob files are collected: they show what they did, in fewer bytes.

use std::sync::atomic::Ordering;

use crate::base::compression::CompressionType;
use crate::base::edit::FileId;
use crate::base::{ErrorKind, KeyOrder, SeqNo};
use crate::engine::{Engine, Host, TaskReport};
use crate::lsm::blobs::options::KvSeparationOptions;
use crate::lsm::collect::plan::{Goal, Step, next_step};
use crate::lsm::collect::scan::Scanned;
use crate::lsm::options::LsmOptions;
use crate::lsm::tests::harness::{ALL, World, small_options};
use crate::lsm::tests::model::{churn, orders};
use crate::lsm::version::{BOTTOM, Described};
use crate::vfs::fault::{Fault, FaultPlan, OpKind};

fn separated(threshold: u32, target_size: u64) -> LsmOptions {
    let apart = KvSeparationOptions::default().separation_threshold(threshold).blob_file_target_size(target_size);
    let apart = apart.compression(CompressionType::None).automatic_gc(None);
    LsmOptions { kv_separation: Some(apart), ..small_options() }
}

/// Values of 100 bytes under every `nth` key of 60.
fn fill(world: &mut World, nth: u32, round: u32) {
    for i in (0..60).filter(|i| i % nth == 0) {
        world.put(&format!("key{i:03}"), &format!("{round:05}{i:05}").repeat(10));
    }
    world.flush();
}

/// Half of each file is stale, and known to be.
fn half_stale() -> World {
    let mut world = World::new(KeyOrder::bytewise(), separated(50, 2 << 10), 3);
    fill(&mut world, 1, 1);
    fill(&mut world, 2, 2);
    world.major_compact();
    world
}

fn stale_files(world: &World) -> Vec<FileId> {
    let uses = world.tree.version().blobs().uses();
    uses.iter().filter(|file| file.referenced_bytes < file.bytes).map(|file| file.id).collect()
}

fn collect(world: &World, chosen: &[FileId]) -> crate::base::Result<TaskReport> {
    let result = world.tree.collect(chosen, true, &world.host);
    world.tree.context.graveyard.remove_all();
    result
}

fn collect_all(world: &World, mut chosen: Vec<FileId>) {
    for _ in 0..1000 {
        if chosen.is_empty() {
            return;
        }
        collect(world, &chosen).unwrap();
        chosen.retain(|file| world.tree.version().blobs().has(*file));
    }
    panic!("{chosen:?} do not go");
}

fn scan(world: &World) -> std::sync::Arc<Scanned> {
    let mut scan = world.tree.begin_scan(world.host.read_points(), false);
    while !scan.step(7).unwrap() {}
    world.tree.end_scan(scan)
}

#[test]
fn whatever_is_collected_every_moment_stays_as_it_was() {
    for (order, seeds) in orders().into_iter().zip([1..4u64, 100..102]) {
        for seed in seeds {
            let options = separated([16, 1, 50][seed as usize % 3], [1 << 10, 4 << 10, 1 << 20][seed as usize % 3]);
            let mut world = World::new(order.clone(), options, seed);
            for round in 0..5 {
                churn(&mut world, 30);
                let known = stale_files(&world);
                collect_all(&world, known);
                assert_eq!(stale_files(&world), [], "what is left is referenced");
                world.check();
                world.check_files();
                if round % 2 == 1 {
                    world.reopen();
                }
            }
            world.host.snapshots.lock().unwrap().clear();
            world.major_compact();
            let known = stale_files(&world);
            collect_all(&world, known);
            world.check();
            world.check_files();
            world.reopen();
            world.check();
            world.check_files();
        }
    }
}

#[test]
fn a_scan_says_what_a_merge_and_a_collection_make_of_it() {
    for seed in 1..6 {
        let mut world = World::new(KeyOrder::bytewise(), separated(20, 2 << 10), seed);
        churn(&mut world, 60);
        world.flush();
        let before = scan(&world);
        assert!(world.tree.scanned(&world.host.read_points()).is_some(), "it is remembered");
        let kept: u64 = before.files.iter().map(|file| file.kept_bytes).sum();
        while world.tree.push_to_bottom(world.host.visible.get(), &world.host).unwrap().is_some() {}
        while world.tree.rewrite_at_bottom(&scan(&world).hiding, &world.host).unwrap().is_some() {}
        let after = scan(&world);
        assert!(after.files.iter().all(|file| file.kept_bytes == file.referenced_bytes), "nothing hides, seed {seed}");
        assert_eq!(after.files.iter().map(|file| file.kept_bytes).sum::<u64>(), kept, "seed {seed}");
        let Step::Rewrite(chosen) = next_step(&after.files, Goal::SpaceAmp(1.0)) else { continue };
        collect_all(&world, chosen);
        let files = &scan(&world).files;
        assert!(files.iter().all(|file| file.bytes == file.kept_bytes));
        assert_eq!(files.iter().map(|file| file.bytes).sum::<u64>(), kept);
        world.check();
        world.check_files();
    }
}

#[test]
fn small_remains_share_a_file_and_pointers_find_them() {
    let mut world = half_stale();
    let before = world.tree.version().blobs().uses().len();
    world.options = separated(50, 64 << 10);
    world.tree.set_options(world.options.clone());
    let stale = stale_files(&world);
    assert!(stale.len() > 2);
    collect_all(&world, stale.clone());
    let version = world.tree.version();
    assert_eq!(version.blobs().uses().len(), before - stale.len() + 1);
    let sections = version.blobs().handles().map(|file| file.meta().sections.len()).max();
    assert_eq!(sections, Some(stale.len()));
    drop(version);
    world.check();
    world.check_files();
    // What was copied once can be copied again.
    (0..30).for_each(|i| world.delete(&format!("key{i:03}")));
    world.major_compact();
    let stale = stale_files(&world);
    collect_all(&world, stale);
    world.check();
    world.reopen();
    world.check();
    world.check_files();
}

#[test]
fn one_that_yields_goes_on_and_flushes_and_merges_go_on_beside() {
    let mut world = half_stale();
    let chosen = stale_files(&world);
    world.host.yields.store(true, Ordering::SeqCst);
    let mut calls = 0;
    while chosen.iter().any(|file| world.tree.version().blobs().has(*file)) {
        collect(&world, &chosen).unwrap();
        calls += 1;
        fill(&mut world, 7, 3 + calls);
        if calls % 3 == 0 {
            world.major_compact();
        }
        world.check();
        assert!(calls < 1000);
    }
    assert!(calls > 2, "{calls}");
    // Before it is closed: then what pins of other tests keep a little longer would stay.
    world.tree.give_up_paused();
    world.check_files();
    world.reopen();
    world.check();
}

#[test]
fn one_whose_files_go_meanwhile_is_given_up() {
    let mut world = half_stale();
    let chosen = stale_files(&world);
    world.host.yields.store(true, Ordering::SeqCst);
    collect(&world, &chosen).unwrap();
    (0..60).for_each(|i| world.delete(&format!("key{i:03}")));
    world.major_compact();
    assert_eq!(collect(&world, &chosen).unwrap(), TaskReport::default());
    world.check();
    world.check_files();
    assert_eq!(world.tree.version().blobs().uses(), []);
}

#[test]
fn an_edit_that_is_refused_is_committed_later_or_given_up() {
    for deletes in [false, true] {
        let mut world = half_stale();
        let chosen = stale_files(&world);
        world.host.refuse_edits.store(true, Ordering::SeqCst);
        assert_eq!(collect(&world, &chosen).unwrap_err().kind(), ErrorKind::OutOfSpace);
        world.check();
        world.host.refuse_edits.store(false, Ordering::SeqCst);
        if deletes {
            (0..60).for_each(|i| world.delete(&format!("key{i:03}")));
            world.major_compact();
        }
        collect_all(&world, chosen.clone());
        collect(&world, &chosen).unwrap();
        world.check();
        world.check_files();
    }
    let world = half_stale();
    world.host.refuse_edits.store(true, Ordering::SeqCst);
    assert!(collect(&world, &stale_files(&world)).is_err());
    world.tree.discard();
    assert_eq!(collect(&world, &[]).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn one_that_fails_leaves_nothing_and_can_be_tried_again() {
    let mut deepest = 0;
    for nth in 1..12 {
        for op in [OpKind::Read, OpKind::Write, OpKind::Sync, OpKind::Create] {
            let mut world = half_stale();
            world.reopen(); // nothing is open
            let chosen = stale_files(&world);
            world.faults.fail(FaultPlan::new(op, nth, Fault::Error(std::io::ErrorKind::Other)));
            let failed = collect(&world, &chosen);
            if world.faults.struck() > 0 {
                deepest = deepest.max(nth);
                assert_eq!(failed.unwrap_err().kind(), ErrorKind::Io);
                world.check_files();
            }
            world.faults.repair();
            collect_all(&world, chosen);
            world.check();
            world.check_files();
        }
    }
    assert!(deepest > 3, "{deepest}");
}

#[test]
fn a_reader_keeps_the_files_that_it_reads() {
    let world = half_stale();
    let view = world.tree.view();
    let mut cursor = view.cursor(SeqNo::MAX, ALL).unwrap();
    cursor.seek_to_first().unwrap();
    let held = stale_files(&world);
    collect_all(&world, held.clone());
    let mut values = view.values();
    let mut seen = 0;
    while cursor.valid() {
        assert_eq!(values.read(cursor.entry().value).unwrap().len(), 100);
        seen += 1;
        cursor.next().unwrap();
    }
    assert_eq!(seen, 60);
    drop((cursor, values, view));
    world.check();
    world.check_files();
}

#[test]
fn a_scan_names_the_tables_of_the_bottom_that_hide_something() {
    let mut world = World::new(KeyOrder::bytewise(), separated(50, 2 << 10), 3);
    fill(&mut world, 1, 1);
    world.major_compact();
    assert!(scan(&world).hiding.is_empty());
    let at = world.host.visible.get();
    world.host.snapshots.lock().unwrap().push(at.0);
    // The last ten keys only; the snapshot keeps what they had, down to the bottom.
    (50..60).for_each(|i| world.put(&format!("key{i:03}"), &"later".repeat(20)));
    world.flush();
    world.major_compact();
    let pinned = scan(&world);
    assert!(pinned.hiding.is_empty(), "the snapshot sees it");
    world.host.snapshots.lock().unwrap().clear();
    let hidden = scan(&world);
    let version = world.tree.version();
    let run = version.run(BOTTOM).unwrap();
    let holders = run.tables().iter().map(|table| table.meta());
    let holders = holders.filter(|meta| &*meta.largest.0 >= b"key050").map(|meta| meta.id);
    assert_eq!(hidden.hiding, holders.collect());
    assert!(hidden.hiding.len() < run.tables().len() || run.tables().len() == 1);
    assert_eq!(world.tree.hiding_in_memory(), None, "nothing is collected by itself");
    drop(version);
    while world.tree.rewrite_at_bottom(&hidden.hiding, &world.host).unwrap().is_some() {}
    assert!(scan(&world).hiding.is_empty());
    world.check();
    world.check_files();
}

#[test]
fn a_memtable_that_may_hide_too_much_is_told_by_its_last_record() {
    let mut options = separated(50, 2 << 10);
    options.kv_separation = options.kv_separation.map(|apart| apart.automatic_gc(Some(1.5)));
    let mut world = World::new(KeyOrder::bytewise(), options, 3);
    (0..10).for_each(|i| world.put(&format!("key{i:03}"), "small"));
    assert_eq!(world.tree.hiding_in_memory(), None, "there are no blob files");
    fill(&mut world, 1, 1);
    assert_eq!(world.tree.hiding_in_memory(), None, "nothing is in memory");
    // 60 values, each as long as the next: 20 entries may hide a third of what tables refer to, which is just allowed.
    (0..20).for_each(|i| world.delete(&format!("key{i:03}")));
    assert_eq!(world.tree.hiding_in_memory(), None);
    world.delete("key020");
    assert_eq!(world.tree.hiding_in_memory(), Some(world.host.visible.get()));
    world.put("another", "small");
    assert_eq!(world.tree.hiding_in_memory(), Some(world.host.visible.get()), "the last record");
}

fn automatic(target: f32) -> LsmOptions {
    let mut options = separated(50, 2 << 10);
    options.kv_separation = options.kv_separation.map(|apart| apart.automatic_gc(Some(target)));
    options
}

/// A truncation removes much with few bytes: the memtable would be full long after.
#[test]
fn a_memtable_that_hides_too_much_is_sealed_while_others_write() {
    let sealed_at = |target| {
        let mut world =
            World::new(KeyOrder::bytewise(), LsmOptions { max_memtable_size: 1 << 20, ..automatic(target) }, 3);
        (0..2_000).for_each(|i| world.put(&format!("key{i:04}"), &"v".repeat(100)));
        world.flush();
        world.major_compact();
        let sealed = |world: &World| world.tree.current.with(|now| !now.sealed.is_empty());
        let found = (0..2_000).find(|i| {
            world.delete(&format!("key{i:04}"));
            sealed(&world)
        });
        world.settle(false);
        world.check();
        found.map(|last| last + 1)
    };
    // More than a third hidden is too much for 1.5; it is looked at every 256 records.
    assert_eq!(sealed_at(1.5), Some(768));
    assert_eq!(sealed_at(1.1), Some(256));
    assert_eq!(sealed_at(100.0), None);
}

#[test]
fn what_may_be_hidden_makes_known_staleness_go_earlier() {
    let mut world = World::new(KeyOrder::bytewise(), automatic(1.5), 3);
    fill(&mut world, 1, 1);
    fill(&mut world, 3, 2);
    world.major_compact();
    let amp = |world: &World| {
        let totals = world.tree.version().blobs().totals();
        totals.bytes as f64 / totals.referenced as f64
    };
    assert!((1.3..1.35).contains(&amp(&world)) && !world.tree.wants_collection(), "80 values of which 60 are seen");
    (0..4).for_each(|i| world.delete(&format!("key{i:03}")));
    assert!(!world.tree.wants_collection(), "1.33 beside 56 of 60 is 1.43");
    (4..40).for_each(|i| world.delete(&format!("key{i:03}")));
    assert!(world.tree.wants_collection());
    let chosen = stale_files(&world);
    while world.tree.wants_collection() {
        world.tree.collect_by_itself(true, &world.host).unwrap();
        world.tree.context.graveyard.remove_all();
    }
    // Half of what the target allows, however much may be hidden: not all that is stale goes.
    assert!((1.05..=1.25).contains(&amp(&world)), "{}", amp(&world));
    assert!(chosen.iter().any(|file| world.tree.version().blobs().has(*file)), "{chosen:?}");
    world.settle(false);
    world.check();
    world.check_files();
    assert!(amp(&world) <= 1.5);
}
