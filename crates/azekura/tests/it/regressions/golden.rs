//! Databases that earlier versions wrote, byte for byte: every later version reads them.
//!
//! `testdata/golden/N` is the directory of a database as a killed process left it, in format generation N: a few
//! partitions with tables on two levels, blob files, pools, and a WAL with records that are in no table. A change of
//! a format adds a directory and leaves the old ones.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use azekura::fs::{DiskFs, Fs};
use azekura::testing::TestEnv;
use azekura::{
    CompressionType, Config, DataBlockIndexType, Database, EngineType, KvSeparationOptions, PartitionCreateOptions,
    PersistMode, PmemOptions, inspect,
};

/// The generation that this build writes.
const NEWEST_GENERATION: u32 = 5;

fn golden_dir(generation: u32) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/golden").join(generation.to_string())
}

fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

fn config(dir: &Path) -> Config {
    Config::new(dir).workers(0).wal_segment_size(64 << 10).env(Arc::new(TestEnv::new(1)))
}

fn options(codec: CompressionType) -> PartitionCreateOptions {
    PartitionCreateOptions::default().compression(codec).block_size(256).metadata_block_size(128)
}

/// Content of the golden databases of a generation: from the second on, data blocks of every layout; from the third
/// on, blob files; from the fourth on, a blob file that only the WAL points into; from the fifth on, a pool.
fn expected_contents(generation: u32) -> BTreeMap<&'static str, BTreeMap<Vec<u8>, Vec<u8>>> {
    let number = |n: u32| format!("key {n:04}").into_bytes();
    let value = |n: u32, generation: u32| format!("value {generation} of {n}, and of {n} again").into_bytes();
    let mut plain: BTreeMap<_, _> = (0..200).map(|n| (number(n), value(n, 0))).collect();
    plain.extend((0..200).step_by(7).map(|n| (number(n), value(n, 1))));
    plain.retain(|key, _| *key != number(5));
    plain.insert(Vec::new(), b"of the empty key".to_vec());
    let mut zlib: BTreeMap<_, _> = (0..60).map(|n| (number(n), value(n, 2))).collect();
    zlib.insert(number(9), value(9, 3));
    let mut contents = BTreeMap::from([("plain", plain.clone()), ("zlib", zlib)]);
    if generation > 1 {
        contents.extend([("hashed", plain.clone()), ("fingerprints", plain)]);
    }
    if generation > 2 {
        let mut apart: BTreeMap<_, _> = (0..60).map(|n| (number(n), large_value(n, 0))).collect();
        apart.extend((0..60).step_by(4).map(|n| (number(n), large_value(n, 1))));
        apart.insert(number(60), b"small".to_vec());
        apart.insert(number(61), large_value(61, 2));
        if generation > 3 {
            apart.extend((62..66).map(|n| (number(n), large_value(n, 3))));
        }
        contents.insert("apart", apart);
    }
    if generation > 4 {
        let mut pool: BTreeMap<_, _> = (0..400).map(|n| (number(n), value(n, 4))).collect();
        pool.retain(|key, _| key.last() != Some(&b'3'));
        pool.extend((0..400).step_by(9).map(|n| (number(n), value(n, 5))));
        pool.insert(number(401), large_value(61, 2));
        pool.remove(&number(8));
        contents.insert("pool", pool);
    }
    contents
}

/// A value that is stored in a blob file.
fn large_value(n: u32, generation: u32) -> Vec<u8> {
    (0..40 + n).flat_map(|i| (i * 7 + generation).to_le_bytes()).collect()
}

fn check_contents(db: &Database, generation: u32) {
    for (name, expected) in expected_contents(generation) {
        let partition = db.partition(name).unwrap();
        let found: BTreeMap<Vec<u8>, Vec<u8>> =
            partition.iter().map(|pair| pair.map(|(key, value)| (key.to_vec(), value.to_vec())).unwrap()).collect();
        assert!(found == expected, "partition {name:?} has other contents");
        for (key, value) in &expected {
            assert_eq!(partition.get(key).unwrap().as_deref(), Some(value.as_slice()));
        }
    }
}

#[test]
fn every_generation_opens_and_can_be_written_on() {
    for generation in 1..=NEWEST_GENERATION {
        open_and_continue(generation);
    }
}

fn open_and_continue(generation: u32) {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("db");
    copy_dir(&golden_dir(generation), &dir);
    let fs: Arc<dyn Fs> = Arc::new(DiskFs::new());
    let report = inspect::verify(&fs, &dir, &mut |_, _| {}).unwrap();
    assert!(report.is_clean(), "{report:?}");
    let mut layouts: Vec<String> =
        report.files.iter().filter_map(|file| Some(format!("{:?}", file.data_block_index_type?))).collect();
    layouts.sort();
    layouts.dedup();
    let all = ["BinaryAndHash", "BinarySearch", "Fingerprint"];
    assert_eq!(layouts, if generation == 1 { &[][..] } else { &all }, "the first generation does not say");
    let blobs = inspect::blobs(&fs, &dir).unwrap();
    assert_eq!(blobs.len() > 2, generation > 2);
    assert_eq!(report.files.iter().any(|file| file.kind == "pool" && file.entries > 100), generation > 4);
    assert!(blobs.iter().all(|file| file.partition == "apart" && file.referenced_values > 0));
    assert_eq!(inspect::tables(&fs, &dir).unwrap().iter().map(|table| table.level).max(), Some(6));
    let read_only = config(&dir).open_read_only().unwrap();
    assert!(read_only.metrics().replayed_records > 0, "part of it is in the log alone");
    check_contents(&read_only, generation);
    drop(read_only);
    let db = config(&dir).open().unwrap();
    check_contents(&db, generation);
    for name in expected_contents(generation).keys() {
        db.partition(name).unwrap().major_compact().unwrap();
    }
    db.close().unwrap();
    check_contents(&config(&dir).open().unwrap(), generation);
}

/// Writes a database of the newest generation, and checks it. `UPDATE=golden` in the environment replaces the golden
/// files of that generation by it; only for a format that is not released.
#[test]
fn newest_generation_is_written() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("db");
    let db = config(&dir).open().unwrap();
    let open = |name: &str, codec, index_type| {
        db.open_partition(name, options(codec).data_block_index_type(index_type)).unwrap()
    };
    let zlib = open("zlib", CompressionType::Miniz(6), DataBlockIndexType::Fingerprint);
    let plain = [
        open("plain", CompressionType::Lz4, DataBlockIndexType::BinarySearch),
        open("hashed", CompressionType::Lz4, DataBlockIndexType::BinaryAndHash),
        open("fingerprints", CompressionType::None, DataBlockIndexType::Fingerprint),
    ];
    let number = |n: u32| format!("key {n:04}");
    let value = |n: u32, generation: u32| format!("value {generation} of {n}, and of {n} again");
    for plain in &plain {
        (0..200).for_each(|n| plain.insert(number(n), value(n, 0)).unwrap());
        plain.major_compact().unwrap();
    }
    (0..60).for_each(|n| zlib.insert(number(n), value(n, 2)).unwrap());
    zlib.flush().unwrap();
    let separation = KvSeparationOptions::default().separation_threshold(100).blob_file_target_size(4 << 10);
    let separation = separation.compression(CompressionType::Miniz(6));
    let open_apart =
        |apart| db.open_partition("apart", options(CompressionType::Lz4).with_kv_separation(apart)).unwrap();
    let apart = open_apart(separation.clone());
    (0..60).for_each(|n| apart.insert(number(n), large_value(n, 0)).unwrap());
    apart.major_compact().unwrap();
    (0..60).step_by(4).for_each(|n| apart.insert(number(n), large_value(n, 1)).unwrap());
    apart.insert(number(60), "small").unwrap();
    apart.flush().unwrap();
    for plain in &plain {
        (0..200).step_by(7).for_each(|n| plain.insert(number(n), value(n, 1)).unwrap());
        plain.flush().unwrap();
    }
    let sizes = PmemOptions::default().max_size(1 << 20).growth_step(4 << 10);
    let pool = db.open_partition("pool", PartitionCreateOptions::default().engine(EngineType::Pmem(sizes))).unwrap();
    (0..400).for_each(|n| pool.insert(number(n), value(n, 4)).unwrap());
    (3..400).step_by(10).for_each(|n| pool.remove(number(n)).unwrap());
    pool.flush().unwrap();
    let mut batch = db.batch();
    batch.durability(PersistMode::SyncData);
    (0..400).step_by(9).for_each(|n| batch.insert(&pool, number(n), value(n, 5)));
    batch.insert(&pool, number(401), large_value(61, 2));
    batch.remove(&pool, number(8));
    for plain in &plain {
        batch.remove(plain, number(5));
        batch.insert(plain, "", "of the empty key");
    }
    batch.insert(&zlib, number(9), value(9, 3));
    batch.insert(&apart, number(61), large_value(61, 2));
    batch.commit().unwrap();
    let apart = open_apart(separation.direct_write_threshold(1));
    (62..66).for_each(|n| apart.insert(number(n), large_value(n, 3)).unwrap());
    db.persist(PersistMode::SyncData).unwrap();
    check_contents(&db, NEWEST_GENERATION);
    if std::env::var("UPDATE").is_ok_and(|what| what == "golden") {
        replace_newest_generation(&dir);
    }
}

fn replace_newest_generation(dir: &Path) {
    let newest = golden_dir(NEWEST_GENERATION);
    let _none_yet = std::fs::remove_dir_all(&newest);
    copy_dir(dir, &newest);
    std::fs::remove_file(newest.join("LOCK")).unwrap();
}
