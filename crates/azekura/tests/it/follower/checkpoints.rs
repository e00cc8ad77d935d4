//! Copies that a follower makes while the writer goes on writing.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use azekura::testing::MemFs;
use azekura::{CompressionType, Config, Database, KvSeparationOptions, Partition, PartitionCreateOptions, PersistMode};

use super::faults::config;
use super::interleaved::padded;
use super::open_hook::OpenHookFs;
use crate::changes::DIR;

/// A partition whose values are written to blob files before their commits.
fn open_direct(db: &Database) -> Partition {
    let separation = KvSeparationOptions::default().separation_threshold(100).direct_write_threshold(500);
    let separation = separation.compression(CompressionType::None).automatic_gc(None);
    let options = PartitionCreateOptions::default().with_kv_separation(separation);
    let p = db.open_partition("p", options.clone()).unwrap();
    p.set_options(options).unwrap();
    p
}

/// The keys `0..n` of a partition have values.
fn check_keys(p: &Partition, at_least: u32) {
    let keys: Vec<u32> = p.keys().map(|key| u32::from_be_bytes(key.unwrap()[..].try_into().unwrap())).collect();
    let wanted: Vec<u32> = (0..keys.len() as u32).collect();
    assert_eq!(keys, wanted, "the first commits");
    assert!(keys.len() >= at_least as usize, "{} of {at_least} commits", keys.len());
    for key in keys {
        assert!(p.get(key.to_be_bytes()).unwrap().unwrap().starts_with(format!("{key} ").as_bytes()), "{key}");
    }
}

/// When the writer works.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Meanwhile {
    Open,
    Checkpoint,
}

/// Opens a follower and makes a checkpoint with it. Meanwhile the writer makes two durable commits of large values
/// whenever the follower opens a file whose name ends with `ending`.
fn check_beside_commits(meanwhile: Meanwhile, ending: &'static str) {
    let machine = MemFs::new();
    let writer = config(Arc::new(machine.clone())).wal_segment_size(64 << 10).open().unwrap();
    let p = open_direct(&writer);
    let next = Arc::new(AtomicU32::new(0));
    let writing = Arc::clone(&next);
    let commit = move || {
        let n = writing.fetch_add(1, Ordering::Relaxed);
        p.insert(n.to_be_bytes(), padded(n.into(), 5_000)).unwrap();
        writer.persist(PersistMode::SyncData).unwrap();
    };
    (0..3).for_each(|_| commit());
    let mut hook = Some(move |path: &Path| {
        if path.starts_with(DIR) && path.to_str().unwrap().ends_with(ending) {
            (0..2).for_each(|_| commit());
        }
    });
    let fs = OpenHookFs::new(machine.clone());
    if meanwhile == Meanwhile::Open {
        hook.take().into_iter().for_each(|hook| fs.set(hook));
    }
    let follower = config(Arc::new(fs.clone())).open_follower().unwrap();
    let written = next.load(Ordering::Relaxed);
    fs.clear();
    hook.into_iter().for_each(|hook| fs.set(hook));
    follower.checkpoint("/copies/1").unwrap();
    fs.clear();
    let copy = Config::new("/copies/1").fs(Arc::new(machine)).workers(0).open().unwrap();
    check_keys(&copy.partition("p").unwrap(), written);
    check_keys(&follower.partition("p").unwrap(), 3);
    follower.catch_up().unwrap();
    check_keys(&follower.partition("p").unwrap(), next.load(Ordering::Relaxed));
}

/// Regression: the blob files were copied before the log, which then had durable commits whose values the copy lacked.
/// No attempt could succeed beside a writer of large values.
#[test]
fn large_values_are_written_meanwhile() {
    for ending in [".wal", ".blob"] {
        check_beside_commits(Meanwhile::Checkpoint, ending);
        check_beside_commits(Meanwhile::Open, ending);
    }
}
