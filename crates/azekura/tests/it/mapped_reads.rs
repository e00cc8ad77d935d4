//! `Config::mapped_reads`: reads of mapped files return what reads without mappings return.

use std::path::Path;
use std::sync::Arc;

use azekura::fs::{Fs, OpenMode};
use azekura::testing::{Fault, FaultFs, FaultPlan, OpKind, TestEnv};
use azekura::{
    CompressionType, Config, Database, DirectIo, ErrorKind, Gc, KvSeparationOptions, Partition, PartitionCreateOptions,
    Slice,
};

use crate::testkit::test_dir::{TestDir, read_file, write_file};

const KEYS: u32 = 400;

fn key(n: u32) -> Vec<u8> {
    format!("key {:05}", n * 7_919 % 10_007).into_bytes()
}

/// Short values, values of several blocks, and values that are separated.
fn value(n: u32) -> Vec<u8> {
    let len = match n % 4 {
        0 => 9_000,
        1 => 700,
        _ => 20,
    };
    (0..len).map(|at: u32| ((at / 7) ^ n) as u8).collect()
}

fn config(place: &TestDir, fs: &Arc<dyn Fs>) -> Config {
    let config = Config::new(&place.dir).fs(Arc::clone(fs)).env(Arc::new(TestEnv::new(5)));
    config.workers(0).direct_io(DirectIo::Never)
}

/// The file system of `place` with faults, as its own type and as a file system.
fn with_faults(place: &TestDir) -> (Arc<FaultFs>, Arc<dyn Fs>) {
    let faults = Arc::new(FaultFs::new(Arc::clone(&place.fs)));
    (Arc::clone(&faults), faults)
}

fn mapped(place: &TestDir, cache: u64) -> Database {
    config(place, &place.fs).mapped_reads(true).cache_size(cache).open().unwrap()
}

fn options(codec: CompressionType, separates: bool) -> PartitionCreateOptions {
    let options = PartitionCreateOptions::default().block_size(1_000).metadata_block_size(256).compression(codec);
    let separation = KvSeparationOptions::default().separation_threshold(500).compression(codec).automatic_gc(None);
    if separates { options.with_kv_separation(separation) } else { options }
}

const CODECS: [CompressionType; 2] = [CompressionType::None, CompressionType::Lz4];

fn name(codec: CompressionType, separates: bool) -> String {
    format!("{codec:?} {separates}")
}

/// Creates partitions with two runs each, in which every fifth key is removed.
fn fill(place: &TestDir) {
    let db = config(place, &place.fs).open().unwrap();
    for (codec, separates) in CODECS.into_iter().flat_map(|codec| [(codec, false), (codec, true)]) {
        let partition = db.open_partition(&name(codec, separates), options(codec, separates)).unwrap();
        (0..KEYS).for_each(|n| partition.insert(key(n), value(n)).unwrap());
        partition.flush().unwrap();
        (0..KEYS).step_by(5).for_each(|n| partition.remove(key(n)).unwrap());
        partition.flush().unwrap();
    }
}

/// Reads everything by every kind of read.
fn check(partition: &Partition) {
    let expected = |n: u32| (!n.is_multiple_of(5)).then(|| value(n));
    for n in 0..KEYS {
        let wanted = expected(n);
        assert_eq!(partition.get(key(n)).unwrap().as_deref(), wanted.as_deref(), "{n}");
        assert_eq!(partition.get_with(key(n), <[u8]>::to_vec).unwrap(), wanted);
        assert_eq!(partition.size_of(key(n)).unwrap(), wanted.map(|value| value.len() as u32));
    }
    let found = partition.multi_get((0..KEYS + 9).map(key)).unwrap();
    let wanted: Vec<_> = (0..KEYS).map(expected).chain((0..9).map(|_| None)).collect();
    assert!(found.iter().map(|value| value.as_deref()).eq(wanted.iter().map(|value| value.as_deref())));
    let mut records: Vec<(Vec<u8>, Vec<u8>)> = (0..KEYS).filter_map(|n| Some((key(n), expected(n)?))).collect();
    records.sort();
    let pairs =
        |pair: azekura::Result<(Slice, Slice)>| pair.map(|(key, value)| (key.to_vec(), value.to_vec())).unwrap();
    assert!(partition.iter().map(pairs).eq(records.iter().cloned()));
    assert!(partition.iter().rev().map(pairs).eq(records.iter().rev().cloned()));
    let from = records[records.len() / 2].0.as_slice();
    assert!(partition.range::<&[u8]>(from..).map(pairs).eq(records[records.len() / 2..].iter().cloned()));
}

#[test]
fn reads_agree_with_and_without_mappings() {
    for place in [TestDir::on_disk(), TestDir::in_memory()] {
        fill(&place);
        for cache in [0, 16 << 10, 8 << 20] {
            let db = mapped(&place, cache);
            for name in db.list_partitions() {
                let partition = db.partition(&name).unwrap();
                check(&partition);
                check(&partition);
                partition.major_compact().unwrap();
                check(&partition);
                (0..KEYS).step_by(5).for_each(|n| partition.insert(key(n), value(n)).unwrap());
                partition.flush().unwrap();
                (0..KEYS).step_by(5).for_each(|n| partition.remove(key(n)).unwrap());
                if name.ends_with("true") {
                    assert!(partition.gc_with_space_amp_target(1.0).unwrap() > 0, "stale values are removed");
                }
                check(&partition);
            }
            let copy = place.dir.with_extension(format!("copy{cache}"));
            db.checkpoint(&copy).unwrap();
            drop(db);
            let copied = Config::new(&copy).fs(Arc::clone(&place.fs)).mapped_reads(true).open_read_only().unwrap();
            copied.list_partitions().iter().for_each(|name| check(&copied.partition(name).unwrap()));
        }
    }
}

#[test]
fn slices_outlive_files_and_database() {
    for place in [TestDir::on_disk(), TestDir::in_memory()] {
        fill(&place);
        let db = mapped(&place, 8 << 20);
        let partition = db.partition(&name(CompressionType::None, true)).unwrap();
        let read: Vec<(u32, Slice)> =
            (0..KEYS).filter_map(|n| Some((n, partition.get(key(n)).unwrap()?))).filter(|(n, _)| n % 4 == 0).collect();
        let mut iter = partition.iter();
        let first = iter.next().unwrap().unwrap();
        db.delete_partition(partition).unwrap();
        while db.step().unwrap() {}
        assert!(read.len() > 50 && read.iter().all(|(n, slice)| **slice == *value(*n)));
        assert!(iter.next().is_some_and(|next| next.unwrap().0 > first.0));
        drop((iter, db));
        assert!(read.iter().all(|(n, slice)| **slice == *value(*n)));
    }
}

/// A small cache has references to all uncompressed blocks and values of a much larger partition.
#[test]
fn cache_holds_references_to_mapped_blocks() {
    let place = TestDir::in_memory();
    fill(&place);
    let (faults, fs) = with_faults(&place);
    for separates in [false, true] {
        let db = config(&place, &fs).mapped_reads(true).cache_size(400 << 10).open().unwrap();
        let partition = db.partition(&name(CompressionType::None, separates)).unwrap();
        check(&partition);
        let used = db.metrics().cache.used;
        assert!(partition.disk_space() > 3 * used && used < 400 << 10, "{} and {used}", partition.disk_space());
        let reads = faults.count(OpKind::Read);
        check(&partition);
        assert_eq!(faults.count(OpKind::Read), reads, "every block is in the cache or in place");
        db.close().unwrap();
    }
}

#[test]
fn file_that_cannot_be_mapped_is_read() {
    let place = TestDir::in_memory();
    fill(&place);
    let (faults, fs) = with_faults(&place);
    let db = config(&place, &fs).mapped_reads(true).mapped_wal(false).open().unwrap();
    faults.inject(FaultPlan::new(OpKind::Map, 1, Fault::Error(std::io::ErrorKind::OutOfMemory)).forever());
    for name in db.list_partitions() {
        check(&db.partition(&name).unwrap());
    }
    assert!(faults.fault_count() > 4, "each file was tried");
}

#[test]
fn damaged_mapped_block_is_an_error() {
    // The second place is in the value of the fifth key, which is not removed.
    for (suffix, offset) in [(".sst", 700), (".blob", 12_000)] {
        let place = TestDir::in_memory();
        fill(&place);
        let memory = place.mem_fs.as_ref().unwrap();
        let partition_name = name(CompressionType::None, true);
        let path = {
            let db = config(&place, &place.fs).open().unwrap();
            let others: Vec<String> = db.list_partitions().into_iter().filter(|name| *name != partition_name).collect();
            others.iter().for_each(|name| db.delete_partition_by_name(name).unwrap());
            db.partition(&partition_name).unwrap().major_compact().unwrap();
            while db.step().unwrap() {}
            db.close().unwrap();
            let files = memory.read_dir(Path::new("/srv/db")).unwrap().into_iter().map(|entry| entry.name);
            place.dir.join(files.filter(|file| file.ends_with(suffix)).min().unwrap())
        };
        let mut bytes = read_file(memory, &path);
        bytes[offset] ^= 1;
        write_file(memory, &path, &bytes);
        let db = mapped(&place, 8 << 20);
        let partition = db.partition(&partition_name).unwrap();
        let results: Vec<_> = (0..KEYS).map(|n| partition.get(key(n))).collect();
        let failed: Vec<_> = results.iter().filter_map(|result| result.as_ref().err()).collect();
        let count = failed.len();
        assert!((1..KEYS as usize / 2).contains(&count), "{count} reads of {suffix} fail");
        assert!(failed.iter().all(|error| error.kind() == ErrorKind::Corruption && error.file() == Some(&*path)));
    }
}

/// The kernel may drop a page of a mapping and read it again, damaged, while the block cache refers to it. A compaction
/// once copied such a block from the mapping, and so gave its damage a valid checksum.
#[test]
fn compaction_does_not_copy_changed_pages() {
    let place = TestDir::on_disk();
    let partition_name = name(CompressionType::None, false);
    let db = mapped(&place, 8 << 20);
    let partition = db.open_partition(&partition_name, options(CompressionType::None, false)).unwrap();
    (0..KEYS).for_each(|n| partition.insert(key(n), value(n)).unwrap());
    partition.flush().unwrap();
    assert_eq!(partition.iter().count(), KEYS as usize); // every block is in the cache
    (0..KEYS).for_each(|n| assert_eq!(*partition.get(key(n)).unwrap().unwrap(), *value(n)));
    let files = place.fs.read_dir(&place.dir).unwrap().into_iter().map(|entry| entry.name);
    let table = place.dir.join(files.filter(|file| file.ends_with(".sst")).max().unwrap());
    let file = place.fs.open(&table, OpenMode::Write).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 5_000).unwrap();
    file.write_at(&[byte[0] ^ 1], 5_000).unwrap();
    (0..KEYS).step_by(2).for_each(|n| partition.remove(key(n)).unwrap());
    let error = partition.major_compact().unwrap_err();
    assert_eq!((error.kind(), error.file()), (ErrorKind::Corruption, Some(&*table)));
}

#[test]
fn direct_io_excludes_mappings() {
    let place = TestDir::in_memory();
    let opened = config(&place, &place.fs).mapped_reads(true).direct_io(DirectIo::Always).open();
    assert_eq!(opened.unwrap_err().kind(), ErrorKind::Invalid);
    let db = config(&place, &place.fs).mapped_reads(true).direct_io(DirectIo::Automatic).open().unwrap();
    assert!(db.settings().mapped_reads);
}
