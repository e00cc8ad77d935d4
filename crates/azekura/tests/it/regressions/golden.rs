//! Databases that earlier versions wrote, byte for byte: every later version reads them.
//!
//! `testdata/golden/N` is the directory of a database as a killed process left it, in format generation N: a few
//! partitions with tables on two levels, blob files, pools, and a WAL with records that are in no table. A change of
//! a format adds a directory and leaves the old ones.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use azekura::fs::{DiskFs, Fs};
use azekura::testing::TestEnv;
use azekura::{
    CompressionType, Config, DataBlockIndexType, Database, EngineType, KvSeparationOptions, Partition,
    PartitionComponents, PartitionCreateOptions, PersistMode, PmemOptions, inspect, merge_operators,
};

/// The generation that this build writes.
const NEWEST_GENERATION: u32 = 10;
const HOUR_MS: i64 = 3_600_000;

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

/// The clock is an hour later than when the databases were written.
fn config(dir: &Path) -> Config {
    let env = TestEnv::new(1);
    env.jump_wall_clock(HOUR_MS);
    config_with_clock(dir, &env)
}

fn config_with_clock(dir: &Path, env: &TestEnv) -> Config {
    Config::new(dir).workers(0).wal_segment_size(64 << 10).env(Arc::new(env.clone()))
}

fn options(codec: CompressionType) -> PartitionCreateOptions {
    PartitionCreateOptions::default().compression(codec).block_size(256).metadata_block_size(128)
}

/// Content of the golden databases of a generation: from the second on, data blocks of every layout; from the third
/// on, blob files; from the fourth on, a blob file that only the WAL points into; from the fifth on, a pool; from the
/// sixth on, range deletes in the manifest and in the WAL; from the seventh on, ingested tables; from the eighth on,
/// operands in tables and in the WAL; from the ninth on, records that expire, in tables, blob files, a pool and
/// the WAL; from the tenth on, a table with padding.
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
        let mut separated: BTreeMap<_, _> = (0..60).map(|n| (number(n), large_value(n, 0))).collect();
        separated.extend((0..60).step_by(4).map(|n| (number(n), large_value(n, 1))));
        separated.insert(number(60), b"small".to_vec());
        separated.insert(number(61), large_value(61, 2));
        if generation > 3 {
            separated.extend((62..66).map(|n| (number(n), large_value(n, 3))));
        }
        contents.insert(separated_name(generation), separated);
    }
    if generation > 4 {
        let mut pool: BTreeMap<_, _> = (0..400).map(|n| (number(n), value(n, 4))).collect();
        pool.retain(|key, _| key.last() != Some(&b'3'));
        pool.extend((0..400).step_by(9).map(|n| (number(n), value(n, 5))));
        pool.insert(number(401), large_value(61, 2));
        pool.remove(&number(8));
        contents.insert("pool", pool);
    }
    if generation > 5 {
        let is_removed = |n: &u32| (3..7).contains(n) && *n != 4 || (50..=52).contains(n) || *n >= 98;
        let ranges = (0..100).filter(|n| !is_removed(n)).map(|n| (number(n), value(n, u32::from(n == 4))));
        contents.insert("ranges", ranges.collect());
    }
    if generation > 6 {
        let mut ingested: BTreeMap<_, _> = (0..100).map(|n| (number(n), value(n, 6))).collect();
        ingested.extend((20..40).map(|n| (number(n), large_value(n, 7))));
        ingested.insert(number(30), value(30, 8));
        contents.insert("ingested", ingested);
    }
    if generation > 7 {
        let with_tables = |n: u32| [value(n, 0), b"+table+again".to_vec()].concat();
        let mut merged: BTreeMap<_, _> = (0..40).map(|n| (number(n), with_tables(n))).collect();
        merged.extend((40..60).map(|n| (number(n), b"table+again".to_vec())));
        (0..60).step_by(3).for_each(|n| merged.entry(number(n)).or_default().extend_from_slice(b"+WAL"));
        contents.insert("merged", merged);
    }
    if generation > 8 {
        let mut expiring: BTreeMap<_, _> = (0..60).step_by(2).map(|n| (number(n), value(n, 9))).collect();
        expiring.extend((60..80).map(|n| (number(n), large_value(n, 9))));
        expiring.extend((0..60).step_by(3).map(|n| (number(n), value(n, 10))));
        let in_pool: BTreeMap<_, _> = expiring.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
        contents.extend([("expiring", expiring), ("expiring pool", in_pool)]);
    }
    if generation > 9 {
        contents.insert("padded", (0..300).map(|n| (number(n), value(n, 11))).collect());
    }
    contents
}

/// The name of the partition with blob files.
fn separated_name(generation: u32) -> &'static str {
    if generation > 5 { "separated" } else { "apart" }
}

/// A value that is stored in a blob file.
fn large_value(n: u32, generation: u32) -> Vec<u8> {
    (0..40 + n).flat_map(|i| (i * 7 + generation).to_le_bytes()).collect()
}

/// Whether the end of a page of a table is padding.
fn has_padding(dir: &Path) -> bool {
    let tables = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    tables.filter(|path| path.extension().is_some_and(|ending| ending == "sst")).any(|path| {
        let bytes = std::fs::read(path).unwrap();
        bytes.chunks_exact(4096).any(|page| page[4096 - 16..] == [0; 16])
    })
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
    assert_eq!(layouts, if generation == 1 { &[][..] } else { &all }, "generation 1 does not record it");
    assert_eq!(has_padding(&dir), generation > 9);
    let blobs = inspect::blobs(&fs, &dir).unwrap();
    assert_eq!(blobs.len() > 2, generation > 2);
    assert_eq!(report.files.iter().any(|file| file.kind == "pool" && file.entries > 100), generation > 4);
    let is_separated =
        |name: &str| name == separated_name(generation) || name == "ingested" && generation > 6 || name == "expiring";
    assert!(blobs.iter().all(|file| is_separated(&file.partition) && file.referenced_values > 0));
    assert_eq!(inspect::tables(&fs, &dir).unwrap().iter().map(|table| table.level).max(), Some(6));
    let read_only = config(&dir).open_read_only().unwrap();
    assert!(read_only.metrics().replayed_records > 0, "some records are in the WAL only");
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
    let env = TestEnv::new(1);
    let db = config_with_clock(&dir, &env).open().unwrap();
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
    let open_apart = |separated| {
        let options = options(CompressionType::Lz4).with_kv_separation(separated);
        db.open_partition(separated_name(NEWEST_GENERATION), options).unwrap()
    };
    let separated = open_apart(separation.clone());
    (0..60).for_each(|n| separated.insert(number(n), large_value(n, 0)).unwrap());
    separated.major_compact().unwrap();
    (0..60).step_by(4).for_each(|n| separated.insert(number(n), large_value(n, 1)).unwrap());
    separated.insert(number(60), "small").unwrap();
    separated.flush().unwrap();
    for plain in &plain {
        (0..200).step_by(7).for_each(|n| plain.insert(number(n), value(n, 1)).unwrap());
        plain.flush().unwrap();
    }
    let ranges = open("ranges", CompressionType::None, DataBlockIndexType::Fingerprint);
    write_range_deletes(&ranges, &number, &value);
    let sizes = PmemOptions::default().max_size(1 << 20).growth_step(4 << 10);
    let pool = db.open_partition("pool", PartitionCreateOptions::default().engine(EngineType::Pmem(sizes))).unwrap();
    (0..400).for_each(|n| pool.insert(number(n), value(n, 4)).unwrap());
    (3..400).step_by(10).for_each(|n| pool.remove(number(n)).unwrap());
    pool.flush().unwrap();
    ingest_entries(&db, separation.clone());
    let padded = open("padded", CompressionType::None, DataBlockIndexType::Fingerprint);
    padded.ingest((0..300).map(|n| (number(n), value(n, 11)))).unwrap();
    let merged = write_operands(&db);
    write_expiring(&db, separation.clone());
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
    (0..60).step_by(3).for_each(|n| batch.merge(&merged, number(n), "WAL"));
    batch.remove_range(&ranges, number(98)..);
    batch.insert(&separated, number(61), large_value(61, 2));
    batch.commit().unwrap();
    let separated = open_apart(separation.direct_write_threshold(1));
    (62..66).for_each(|n| separated.insert(number(n), large_value(n, 3)).unwrap());
    db.persist(PersistMode::SyncData).unwrap();
    env.jump_wall_clock(HOUR_MS);
    check_contents(&db, NEWEST_GENERATION);
    replace_newest_generation_if_requested(&dir);
}

/// Two ingests, of which the second one overlaps the first, and a later record.
fn ingest_entries(db: &Database, separation: KvSeparationOptions) {
    let number = |n: u32| format!("key {n:04}");
    let value = |n: u32, generation: u32| format!("value {generation} of {n}, and of {n} again");
    let ingested = options(CompressionType::Lz4).with_kv_separation(separation);
    let ingested = db.open_partition("ingested", ingested).unwrap();
    ingested.ingest((0..100).map(|n| (number(n), value(n, 6)))).unwrap();
    ingested.ingest((20..40).map(|n| (number(n), large_value(n, 7)))).unwrap();
    ingested.insert(number(30), value(30, 8)).unwrap();
}

/// Operands in tables, above values in other tables, and a snapshot that keeps them apart.
fn write_operands(db: &Database) -> Partition {
    let number = |n: u32| format!("key {n:04}");
    let components = PartitionComponents::default().merge_operator(merge_operators::append("+"));
    let merged = db.open_partition_with("merged", options(CompressionType::Lz4), components).unwrap();
    (0..40).for_each(|n| merged.insert(number(n), format!("value 0 of {n}, and of {n} again")).unwrap());
    merged.major_compact().unwrap();
    (0..60).for_each(|n| merged.merge(number(n), "table").unwrap());
    let _snapshot = db.snapshot();
    (0..60).for_each(|n| merged.merge(number(n), "again").unwrap());
    merged.flush().unwrap();
    merged
}

const LONG_TTL: Duration = Duration::from_secs(1000 * 365 * 24 * 3600);

/// Records that expire, of which one half lives for a minute, in an LSM partition and in a pool. Newer values of a
/// third of the keys are only in the WAL; half of these expire.
fn write_expiring(db: &Database, separation: KvSeparationOptions) {
    let number = |n: u32| format!("key {n:04}");
    let sizes = PmemOptions::default().max_size(1 << 20).growth_step(4 << 10);
    let pool = PartitionCreateOptions::default().engine(EngineType::Pmem(sizes));
    let lsm = options(CompressionType::Lz4).with_kv_separation(separation).default_ttl(LONG_TTL);
    let lsm = db.open_partition("expiring", lsm).unwrap();
    let expiring = [lsm.clone(), db.open_partition("expiring pool", pool).unwrap()];
    for partition in &expiring {
        for n in 0..60 {
            let ttl = if n % 2 == 0 { LONG_TTL } else { Duration::from_secs(60) };
            let value = format!("value 9 of {n}, and of {n} again");
            partition.insert_with_ttl(number(n), value, ttl).unwrap();
        }
        (60..80).for_each(|n| partition.insert_with_ttl(number(n), large_value(n, 9), LONG_TTL).unwrap());
        partition.flush().unwrap();
    }
    let mut batch = db.batch();
    for (partition, n) in expiring.iter().flat_map(|partition| (0..60).step_by(3).map(move |n| (partition, n))) {
        let (key, value) = (number(n), format!("value 10 of {n}, and of {n} again"));
        match n % 2 {
            0 => batch.insert_with_ttl(partition, key, value, LONG_TTL),
            _ => batch.insert(partition, key, value),
        }
    }
    batch.commit().unwrap();
}

/// Records and range deletes in tables and in the manifest.
fn write_range_deletes(ranges: &Partition, number: &dyn Fn(u32) -> String, value: &dyn Fn(u32, u32) -> String) {
    (0..100).for_each(|n| ranges.insert(number(n), value(n, 0)).unwrap());
    ranges.flush().unwrap();
    ranges.remove_range(number(3)..number(7)).unwrap();
    ranges.insert(number(4), value(4, 1)).unwrap();
    ranges.remove_range(number(50)..=number(52)).unwrap();
    ranges.flush().unwrap();
}

fn replace_newest_generation_if_requested(dir: &Path) {
    if std::env::var("UPDATE").is_ok_and(|what| what == "golden") {
        replace_newest_generation(dir);
    }
}

fn replace_newest_generation(dir: &Path) {
    let newest = golden_dir(NEWEST_GENERATION);
    let _none_yet = std::fs::remove_dir_all(&newest);
    copy_dir(dir, &newest);
    ["LOCK", "RESERVE"].iter().for_each(|name| std::fs::remove_file(newest.join(name)).unwrap());
}
