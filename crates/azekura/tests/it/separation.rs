//! Partitions with key-value separation, through the public interface.

mod announcement;
mod blob_gc;
mod direct_writes;
mod freed_bytes;

use std::path::Path;
use std::sync::Arc;

use azekura::fs::Fs;
use azekura::testing::{FaultFs, MemFs, OpKind, TestEnv};
use azekura::{CompressionType, Config, Database, ErrorKind, KvSeparationOptions, Partition, PartitionCreateOptions};

const DIR: &str = "/db";

fn config(fs: Arc<dyn Fs>) -> Config {
    Config::new(DIR).fs(fs).env(Arc::new(TestEnv::new(1))).workers(0).wal_segment_size(64 << 10)
}

fn separated_options(threshold: u32) -> PartitionCreateOptions {
    let options = KvSeparationOptions::default().separation_threshold(threshold).blob_file_target_size(16 << 10);
    PartitionCreateOptions::default().with_kv_separation(options.compression(CompressionType::None))
}

fn value(n: u32, round: u32, len: usize) -> Vec<u8> {
    (0..len).map(|i| (n as usize * 31 + round as usize * 7 + i) as u8).collect()
}

fn blob_files(fs: &dyn Fs) -> usize {
    fs.read_dir(Path::new(DIR)).unwrap().iter().filter(|entry| entry.name.ends_with(".blob")).count()
}

/// A partition of 100 values of 1,000 bytes, flushed.
fn open_filled(fs: &Arc<dyn Fs>) -> (Database, Partition) {
    let db = config(Arc::clone(fs)).open().unwrap();
    let part = db.open_partition("p", separated_options(500)).unwrap();
    (0..100).for_each(|n| part.insert(format!("key {n:03}"), value(n, 0, 1000)).unwrap());
    part.flush().unwrap();
    (db, part)
}

#[test]
fn keys_and_sizes_read_no_blob_file() {
    let machine = MemFs::new();
    let (db, part) = open_filled(&(Arc::new(machine.clone()) as Arc<dyn Fs>));
    drop(part);
    db.close().unwrap();
    // Reads that need no blob file work without the blob files.
    let db = config(Arc::new(machine.clone())).open().unwrap();
    let part = db.partition("p").unwrap();
    for entry in machine.read_dir(Path::new(DIR)).unwrap() {
        if entry.name.ends_with(".blob") {
            machine.remove_file(&Path::new(DIR).join(entry.name)).unwrap();
        }
    }
    assert_eq!(part.keys().map(Result::unwrap).count(), 100);
    assert_eq!(part.len().unwrap(), 100);
    assert!(!part.is_empty().unwrap() && part.contains_key("key 007").unwrap());
    assert_eq!(part.size_of("key 007").unwrap(), Some(1000));
    let entries: Vec<azekura::Entry> = part.entries().map(Result::unwrap).collect();
    assert!(entries.iter().all(|entry| entry.size() == 1000));
    for error in [
        part.get("key 007").unwrap_err(),
        entries[7].value().unwrap_err(),
        part.iter().next().unwrap().unwrap_err(),
        part.values().next_back().unwrap().unwrap_err(),
        part.iter().next_ref().unwrap().unwrap_err(),
    ] {
        assert!(error.file().is_some_and(|file| file.extension().is_some_and(|e| e == "blob")), "{error}");
    }
    let mut iter = part.iter();
    assert!(iter.next().unwrap().is_err() && iter.next().is_none(), "an error ends the iterator");
}

#[test]
fn blobs_survive_snapshot_checkpoint_and_reopen() {
    let machine = MemFs::new();
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    let (db, part) = open_filled(&fs);
    let snapshot = db.snapshot();
    db.checkpoint("/copy").unwrap();
    (0..100).for_each(|n| part.insert(format!("key {n:03}"), value(n, 1, 1000)).unwrap());
    part.major_compact().unwrap();
    for n in 0..100 {
        assert_eq!(snapshot.get(&part, format!("key {n:03}")).unwrap().unwrap(), value(n, 0, 1000));
        assert_eq!(part.get(format!("key {n:03}")).unwrap().unwrap(), value(n, 1, 1000));
    }
    let metrics = part.metrics();
    assert_eq!(metrics.stale_blob_bytes(), 0, "the snapshot sees the old values");
    assert!(metrics.blob_bytes() > 200_000 && metrics.disk_bytes > metrics.blob_bytes());
    drop(snapshot);
    (0..50).for_each(|n| part.insert(format!("key {n:03}"), "small now").unwrap());
    part.major_compact().unwrap();
    let metrics = part.metrics();
    assert!(metrics.referenced_blob_bytes() < 60_000, "{metrics:?}");
    assert!(metrics.blob_bytes() < 80_000, "files without references are removed: {metrics:?}");
    drop(part);
    db.close().unwrap();
    let before = blob_files(&*fs);
    let db = config(Arc::clone(&fs)).open().unwrap();
    let part = db.partition("p").unwrap();
    assert_eq!(part.metrics().blob_files, metrics.blob_files, "references are known after a restart");
    assert_eq!(blob_files(&*fs), before);
    assert_eq!(part.get("key 099").unwrap().unwrap(), value(99, 1, 1000));
    let copy = Config::new("/copy").fs(fs).env(Arc::new(TestEnv::new(2))).workers(0).open().unwrap();
    let part = copy.partition("p").unwrap();
    assert!((0..100).all(|n| part.get(format!("key {n:03}")).unwrap().unwrap() == value(n, 0, 1000)));
}

#[test]
fn adjacent_blobs_are_read_ahead() {
    let faults = FaultFs::new(Arc::new(MemFs::new()));
    let fs: Arc<dyn Fs> = Arc::new(faults.clone());
    let (db, part) = open_filled(&fs);
    drop(part);
    db.close().unwrap();
    let db = config(fs).cache_size(0).open().unwrap();
    let part = db.partition("p").unwrap();
    let before = faults.count(OpKind::Read);
    assert_eq!(part.values().map(Result::unwrap).count(), 100);
    let scanned = faults.count(OpKind::Read) - before;
    let before = faults.count(OpKind::Read);
    (0..100).for_each(|n| assert!(part.get(format!("key {n:03}")).unwrap().is_some()));
    let one_by_one = faults.count(OpKind::Read) - before;
    assert!(scanned * 3 < one_by_one, "{scanned} reads by a scan, {one_by_one} one by one");
}

#[test]
fn large_cached_blob_is_not_copied() {
    let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
    let (db, part) = open_filled(&fs);
    part.insert("large", [7; 5000]).unwrap();
    part.flush().unwrap();
    let (one, two) = (part.get("large").unwrap().unwrap(), part.get("large").unwrap().unwrap());
    assert_eq!(one.as_ptr(), two.as_ptr());
    let cache = db.metrics().cache.blob;
    assert!((cache.hits, cache.misses, cache.blocks) == (1, 1, 1), "{cache:?}");
    part.major_compact().unwrap();
    assert_eq!(part.get("large").unwrap().unwrap().as_ptr(), one.as_ptr(), "compaction moves no value");
}

#[test]
fn damaged_blob_is_reported_others_are_readable() {
    let machine = MemFs::new();
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    let (db, part) = open_filled(&fs);
    drop(part);
    db.close().unwrap();
    let first = machine.read_dir(Path::new(DIR)).unwrap().into_iter().find(|e| e.name.ends_with(".blob")).unwrap();
    let file = machine.open(&Path::new(DIR).join(&first.name), azekura::fs::OpenMode::Write).unwrap();
    file.write_at(b"!", 64 + 16 + 100).unwrap();
    let db = config(fs).open().unwrap();
    let part = db.partition("p").unwrap();
    let damaged = (0..100).filter(|n| match part.get(format!("key {n:03}")) {
        Ok(found) => {
            assert_eq!(found.unwrap(), value(*n, 0, 1000));
            false
        }
        Err(error) => {
            assert_eq!((error.kind(), error.offset()), (ErrorKind::Corruption, Some(64)));
            true
        }
    });
    assert_eq!(damaged.count(), 1);
}
