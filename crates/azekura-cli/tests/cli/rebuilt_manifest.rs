//! repair of a database whose manifest is lost: what the tables, pools and the log still tell.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use azekura::fs::{DirEntry, DiskFs, File, FileLock, Fs, LockMode, Mapping, OpenMode};
use azekura::{
    CompactionStrategy, CompressionType, Config, Database, EngineType, LeveledOptions, Partition,
    PartitionCreateOptions, PersistMode, PersistenceLevel, PmemOptions,
};
use serde_json::Value;

use super::fixture::CliFixture;

fn key(n: u32) -> String {
    format!("key{n:04}")
}

fn put(partition: &Partition, keys: std::ops::Range<u32>, value: &str) {
    keys.for_each(|n| partition.insert(key(n), value).unwrap());
}

fn open(p: &CliFixture) -> Database {
    Config::new(p.path("live")).workers(0).open().unwrap()
}

fn partition(db: &Database, name: &str) -> Partition {
    db.open_partition(name, PartitionCreateOptions::default()).unwrap()
}

/// Copies the files that `to` does not have.
fn copy_missing(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        if !target.exists() && entry.file_name() != "LOCK" {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// Copies the open database to "d".
fn copy_database(p: &CliFixture, db: &Database) {
    db.persist(PersistMode::SyncAll).unwrap();
    copy_missing(&p.path("live"), &p.path("d"));
}

/// Length of the manifest of the live database: the offset of its next record.
fn manifest_len(p: &CliFixture) -> usize {
    std::fs::metadata(p.path("live/MANIFEST")).unwrap().len() as usize
}

/// Damages the records in this part of the manifest of "d".
fn damage_manifest(p: &CliFixture, part: std::ops::Range<usize>) {
    let mut manifest = std::fs::read(p.path("d/MANIFEST")).unwrap();
    manifest[part].iter_mut().for_each(|byte| *byte ^= 0x55);
    std::fs::write(p.path("d/MANIFEST"), manifest).unwrap();
}

/// Removes the log of "d".
fn remove_wal(p: &CliFixture) {
    p.files("d", "wal").iter().for_each(|segment| std::fs::remove_file(segment).unwrap());
}

/// The report of a repair of "d", and the entries of its result by partition.
fn repair(p: &CliFixture, out: &str) -> (Value, BTreeMap<String, BTreeMap<String, String>>) {
    let ran = p.run(&format!("repair d --out {out} --json"));
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let report: Value = serde_json::from_slice(&ran.out).unwrap();
    assert_eq!(report["manifest_rebuilt"], true, "{report}");
    let db = Config::new(p.path(out)).open_read_only().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let read = |name: &String| {
        let entries = db.partition(name).unwrap().iter().map(Result::unwrap);
        (name.clone(), entries.map(|(key, value)| (text(&key), text(&value))).collect())
    };
    let recovered = db.list_partitions().iter().map(read).collect();
    (report, recovered)
}

fn expected(ranges: &[(std::ops::Range<u32>, &str)]) -> BTreeMap<String, String> {
    ranges.iter().flat_map(|(keys, value)| keys.clone().map(|n| (key(n), (*value).to_owned()))).collect()
}

fn notes(report: &Value) -> String {
    report["manifest_notes"].to_string()
}

/// An ingest, with older and newer writes of the same keys in tables, removes and a range delete.
fn make_ingest(db: &Database) -> BTreeMap<String, String> {
    let plain = partition(db, "plain");
    put(&plain, 0..100, "old");
    plain.flush().unwrap();
    plain.ingest((0..50).map(|n| (key(n), "ingested"))).unwrap();
    put(&plain, 0..10, "newer");
    (80..90).for_each(|n| plain.remove(key(n)).unwrap());
    plain.flush().unwrap();
    plain.remove_range(key(60)..key(70)).unwrap();
    plain.flush().unwrap();
    put(&plain, 95..120, "log");
    expected(&[
        (0..10, "newer"),
        (10..50, "ingested"),
        (50..60, "old"),
        (70..80, "old"),
        (90..95, "old"),
        (95..120, "log"),
    ])
}

/// Ingested tables got sequence number 1, so older data hid their entries. A flushed range delete was lost, although
/// the log has it. The commit after an ingest in the log became an empty partition.
#[test]
fn order_of_ingest_is_found_in_the_log() {
    let p = CliFixture::new();
    let db = open(&p);
    let plain = make_ingest(&db);
    let pool = EngineType::Pmem(PmemOptions::default());
    let memory = db.open_partition("memory", PartitionCreateOptions::default().engine(pool)).unwrap();
    put(&memory, 0..50, "pool");
    memory.flush().unwrap();
    copy_database(&p, &db);
    std::fs::remove_file(p.path("d/MANIFEST")).unwrap();
    let (report, recovered) = repair(&p, "out");
    let names: Vec<_> = recovered.keys().cloned().collect();
    // Partition 2 is the id of the commit behind the ingest.
    assert_eq!(names, ["partition-3", "plain"], "{report}");
    assert_eq!(recovered["plain"], plain, "{report}");
    assert_eq!(recovered["partition-3"], expected(&[(0..50, "pool")]), "{report}");
    assert!(notes(&report).contains("the name of this partition is lost"), "{report}");
    assert!(!notes(&report).contains("ingest"), "{report}");
}

/// Without the log, commits that were flushed after the ingest was written count as newer, and the report says so.
#[test]
fn unknown_order_of_ingest_is_reported() {
    let p = CliFixture::new();
    let db = open(&p);
    let plain = partition(&db, "plain");
    put(&plain, 0..100, "old");
    plain.flush().unwrap();
    plain.ingest((0..50).map(|n| (key(n), "ingested"))).unwrap();
    put(&plain, 0..10, "newer");
    plain.flush().unwrap();
    copy_database(&p, &db);
    remove_wal(&p);
    std::fs::remove_file(p.path("d/MANIFEST")).unwrap();
    let (report, recovered) = repair(&p, "out");
    let plain = expected(&[(0..10, "newer"), (10..50, "ingested"), (50..100, "old")]);
    assert_eq!(recovered["plain"], plain, "{report}");
    assert!(notes(&report).contains("the place of this ingest among the commits is lost"), "{report}");
}

/// The files are those of an ingest that was not committed. The log shows that the commit after it is missing.
#[test]
fn uncommitted_ingest_is_reported() {
    let p = CliFixture::new();
    let db = open(&p);
    let plain = partition(&db, "plain");
    put(&plain, 0..10, "old");
    copy_database(&p, &db);
    plain.ingest((5..20).map(|n| (key(n), "ingested"))).unwrap();
    for table in p.files("live", "sst") {
        std::fs::copy(&table, p.path("d").join(table.file_name().unwrap())).unwrap();
    }
    std::fs::remove_file(p.path("d/MANIFEST")).unwrap();
    let (report, _) = repair(&p, "out");
    assert!(notes(&report).contains("may not have been committed"), "{report}");
}

/// A compaction sets sequence numbers to 0 and drops tombstones. Its inputs are still on disk. The repair used them, so
/// removed keys and older values were recovered. It also used log segments that were recycled.
#[test]
fn replaced_tables_do_not_come_back() {
    let p = CliFixture::new();
    let db = open(&p);
    let plain = partition(&db, "plain");
    put(&plain, 0..100, "old");
    plain.flush().unwrap();
    (0..50).for_each(|n| plain.remove(key(n)).unwrap());
    put(&plain, 50..60, "new");
    plain.flush().unwrap();
    db.persist(PersistMode::SyncAll).unwrap();
    copy_missing(&p.path("live"), &p.path("before"));
    plain.major_compact().unwrap();
    put(&plain, 60..70, "log");
    copy_database(&p, &db);
    let tables = || p.files("d", "sst").len();
    assert_eq!(tables(), 1);
    for entry in std::fs::read_dir(p.path("before")).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.extension().is_none_or(|extension| extension != "sst") {
            std::fs::remove_file(entry).unwrap();
        }
    }
    copy_missing(&p.path("before"), &p.path("d"));
    assert_eq!(tables(), 3);
    std::fs::remove_file(p.path("d/MANIFEST")).unwrap();
    let (report, recovered) = repair(&p, "out");
    assert_eq!(recovered["plain"], expected(&[(50..60, "new"), (60..70, "log"), (70..100, "old")]), "{report}");
    let first_report = report;
    // Without the log and the table with the tombstones, the first input has removed keys and older values.
    remove_wal(&p);
    std::fs::remove_file(&p.files("d", "sst")[1]).unwrap();
    let (report, recovered) = repair(&p, "without");
    assert_eq!(recovered["plain"], expected(&[(50..60, "new"), (60..100, "old")]), "{report}");
    assert!(
        notes(&first_report).contains("not used: the table was removed, or a compaction has replaced it"),
        "{first_report}"
    );
    // Without the compacted table, its input is all there is.
    std::fs::write(&p.files("d", "sst")[1], "damaged").unwrap();
    let (report, recovered) = repair(&p, "input");
    assert_eq!(recovered["plain"], expected(&[(0..100, "old")]), "{report}");
}

/// A dropped partition whose tables are still on disk was recovered. If a new partition had its name, the new one was
/// renamed.
#[test]
fn dropped_partitions_do_not_come_back() {
    let p = CliFixture::new();
    let db = open(&p);
    for name in ["again", "gone", "kept"] {
        let partition = partition(&db, name);
        put(&partition, 0..50, "first");
        partition.flush().unwrap();
    }
    db.persist(PersistMode::SyncAll).unwrap();
    copy_missing(&p.path("live"), &p.path("before"));
    for name in ["again", "gone"] {
        db.delete_partition_by_name(name).unwrap();
    }
    let again = partition(&db, "again");
    put(&again, 10..20, "second");
    again.flush().unwrap();
    copy_database(&p, &db);
    copy_missing(&p.path("before"), &p.path("d"));
    let manifest = std::fs::read(p.path("d/MANIFEST")).unwrap();
    let mut damaged = manifest;
    // The first record. Those of this session are behind it.
    damaged[100] ^= 1;
    std::fs::write(p.path("d/MANIFEST"), damaged).unwrap();
    let (report, recovered) = repair(&p, "out");
    let all =
        [("again".to_owned(), expected(&[(10..20, "second")])), ("kept".to_owned(), expected(&[(0..50, "first")]))];
    assert_eq!(recovered, all.clone().into(), "{report}");
    assert!(notes(&report).contains("not used: its partition was dropped"), "{report}");
    // Without the manifest nothing tells that "gone" was dropped, but "again" is the new one.
    std::fs::remove_file(p.path("d/MANIFEST")).unwrap();
    let (report, recovered) = repair(&p, "none");
    assert_eq!((&recovered["again"], &recovered["kept"]), (&all[0].1, &all[1].1), "{report}");
    assert!(!recovered.keys().any(|name| name.starts_with("again") && name != "again"), "{report}");
}

/// A table that an earlier version has written names no partition. The repair gave it the id of a pool, and then
/// omitted the pool without a message.
#[test]
fn unnamed_table_takes_no_id_of_a_pool() {
    let p = CliFixture::new();
    let db = open(&p);
    let users = partition(&db, "users");
    put(&users, 0..10, "user");
    users.flush().unwrap();
    let pool = EngineType::Pmem(PmemOptions::default());
    let memory = db.open_partition("memory", PartitionCreateOptions::default().engine(pool)).unwrap();
    put(&memory, 0..50, "pool");
    memory.flush().unwrap();
    copy_database(&p, &db);
    std::fs::write(p.path("d/000900.sst"), include_bytes!("unnamed_table.sst")).unwrap();
    std::fs::remove_file(p.path("d/MANIFEST")).unwrap();
    let (report, _) = repair(&p, "out");
    let found = report["partitions"].as_array().unwrap().iter().map(|found| (&found["name"], &found["entries"]));
    let expected = [("partition-2", 50), ("table-000900", 60), ("users", 10)];
    let expected = expected.map(|(name, entries)| (Value::from(name), Value::from(entries)));
    assert_eq!(found.collect::<Vec<_>>(), expected.iter().map(|(a, b)| (a, b)).collect::<Vec<_>>(), "{report}");
    assert!(notes(&report).contains("the table names no partition"), "{report}");
}

/// A partition whose tables have about 4 KiB, and whose level 0 is compacted from two runs on.
fn small_tables(db: &Database, name: &str) -> Partition {
    let leveled = LeveledOptions::default().target_file_size(4 << 10).l0_compaction_trigger(2);
    let options = PartitionCreateOptions::default().compaction_strategy(CompactionStrategy::Leveled(leveled));
    db.open_partition(name, options.compression(CompressionType::None)).unwrap()
}

/// The numbers of the tables in a directory.
fn tables(dir: &Path) -> BTreeSet<u64> {
    let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter_map(|name| name.strip_suffix(".sst")?.parse().ok()).collect()
}

fn table_name(number: u64) -> String {
    format!("{number:06}.sst")
}

/// The tables that the live database has written since the copy to "d".
fn new_tables(p: &CliFixture) -> Vec<u64> {
    tables(&p.path("live")).difference(&tables(&p.path("d"))).copied().collect()
}

fn copy_table(p: &CliFixture, number: u64) {
    std::fs::copy(p.path("live").join(table_name(number)), p.path("d").join(table_name(number))).unwrap();
}

/// The sequence number of an ingest is above those of records that are only in the log. A compaction of ingested tables
/// wrote the same number to its output, and the repair skipped the log up to it.
#[test]
fn compacted_ingest_does_not_skip_the_log() {
    let p = CliFixture::new();
    let db = open(&p);
    let plain = small_tables(&db, "plain");
    let snapshot = db.snapshot();
    put(&plain, 0..1, "log");
    for value in ["first", "second", "third"] {
        plain.ingest((5..10).map(|n| (key(n), value))).unwrap();
    }
    while db.step().unwrap() {}
    copy_database(&p, &db);
    assert_eq!(plain.metrics().levels[0].runs, 0);
    drop(snapshot);
    std::fs::remove_file(p.path("d/MANIFEST")).unwrap();
    let (report, recovered) = repair(&p, "out");
    assert_eq!(recovered["plain"], expected(&[(0..1, "log"), (5..10, "third")]), "{report}");
}

/// Kills a flush of two or more tables after the first one. `damaged`: the start of the manifest is damaged, instead of
/// all of it lost.
fn interrupt_flush(p: &CliFixture, damaged: bool) -> (Database, Partition) {
    let db = open(p);
    let leveled = LeveledOptions::default().target_file_size(4 << 10);
    let options = PartitionCreateOptions::default().compaction_strategy(CompactionStrategy::Leveled(leveled));
    let components = azekura::PartitionComponents::default().merge_operator(azekura::merge_operators::u64_add());
    let counts = db.open_partition_with("counts", options.compression(CompressionType::None), components).unwrap();
    (0..300).for_each(|n| counts.insert(key(n), 7u64.to_le_bytes()).unwrap());
    counts.flush().unwrap();
    let times = if damaged { 2 } else { 0 };
    (0..times).for_each(|_| (0..300).for_each(|n| counts.merge(key(n), 1u64.to_le_bytes()).unwrap()));
    // The first table has the highest sequence numbers.
    (300..600).rev().for_each(|n| counts.insert(key(n), 7u64.to_le_bytes()).unwrap());
    copy_database(p, &db);
    counts.flush().unwrap();
    let written = new_tables(p);
    assert!(written.len() > 1, "{written:?}");
    copy_table(p, written[0]);
    let mut manifest = std::fs::read(p.path("d/MANIFEST")).unwrap();
    manifest[100] ^= 1;
    match damaged {
        true => std::fs::write(p.path("d/MANIFEST"), manifest).unwrap(),
        false => std::fs::remove_file(p.path("d/MANIFEST")).unwrap(),
    }
    (db, counts)
}

/// A flush was killed after its first table. Because of that table, the repair skipped the records of the other tables
/// in the log.
#[test]
fn interrupted_flush_does_not_skip_the_log() {
    let p = CliFixture::new();
    let _db = interrupt_flush(&p, false);
    let (report, recovered) = repair(&p, "out");
    assert_eq!(recovered["counts"].len(), 600, "{report}");
    assert_eq!(notes(&report), "[]", "{report}");
    // Without the log, the table has what is left of them.
    remove_wal(&p);
    let (report, recovered) = repair(&p, "without");
    assert!((301..600).contains(&recovered["counts"].len()), "{report}");
    assert!(notes(&report).contains("the flush of this table has not ended"), "{report}");
}

/// A flush was killed after its first table. The operands in that table must not be applied again when the log is
/// replayed.
#[test]
fn interrupted_flush_applies_operands_once() {
    let p = CliFixture::new();
    let _db = interrupt_flush(&p, true);
    let (report, recovered) = repair(&p, "out");
    let value = |n: u64| String::from_utf8(n.to_le_bytes().to_vec()).unwrap();
    let sums: BTreeSet<&String> = recovered["counts"].iter().take(300).map(|(_, value)| value).collect();
    assert_eq!((sums, recovered["counts"].len()), ([&value(9)].into(), 600), "{report}");
    assert!(notes(&report).contains("the flush has not ended, and the log has its records"), "{report}");
}

/// A flush finishes the blob files of direct writes after its tables. Because of a table of a killed flush, the repair
/// skipped the log, and it does not use a blob file without an end.
#[test]
fn flush_without_its_blob_file_is_not_complete() {
    let p = CliFixture::new();
    let db = open(&p);
    let options = PartitionCreateOptions::default().with_kv_separation(Default::default());
    let blobs = db.open_partition("blobs", options).unwrap();
    let value = "v".repeat(200_000);
    put(&blobs, 0..5, &value);
    copy_database(&p, &db);
    blobs.flush().unwrap();
    new_tables(&p).iter().for_each(|number| copy_table(&p, *number));
    std::fs::remove_file(p.path("d/MANIFEST")).unwrap();
    let (report, recovered) = repair(&p, "out");
    assert_eq!(recovered["blobs"], expected(&[(0..5, &value)]), "{}", notes(&report));
}

/// A flush was killed before it finished the blob file of direct writes. Because of its tables, the file counted as
/// finished. The values were lost, although the log refers to them.
#[test]
fn values_of_killed_flush_are_read_by_the_log() {
    let p = CliFixture::new();
    let db = open(&p);
    let options = PartitionCreateOptions::default().with_kv_separation(Default::default());
    let blobs = db.open_partition("blobs", options).unwrap();
    let value = "v".repeat(2 << 20);
    put(&blobs, 0..3, &value);
    put(&blobs, 3..5, "small");
    copy_database(&p, &db);
    blobs.flush().unwrap();
    new_tables(&p).iter().for_each(|number| copy_table(&p, *number));
    std::fs::remove_file(p.path("d/MANIFEST")).unwrap();
    let (report, recovered) = repair(&p, "out");
    let all = expected(&[(0..3, &value), (3..5, "small")]);
    assert!(recovered["blobs"] == all, "{report}");
    assert!(notes(&report).contains("the flush has not ended, and the log has its records"), "{report}");
    // If a value is damaged, the table still has the other records.
    damage_blob_file(&p);
    let (report, recovered) = repair(&p, "damaged");
    assert_eq!(recovered["blobs"], expected(&[(3..5, "small")]), "{report}");
    assert_eq!(report["partitions"][0]["lost_values"].as_array().unwrap().len(), 3, "{report}");
}

/// The names of the damaged files that a report contains.
fn damaged_files(report: &Value) -> Vec<&str> {
    let files = report["damaged_files"].as_array().unwrap().iter().map(|damaged| damaged["file"].as_str().unwrap());
    files.map(|file| file.rsplit('/').next().unwrap()).collect()
}

/// A blob file of direct writes has no end before a flush. The report listed it as damaged and unused, although its
/// values were recovered.
#[test]
fn growing_blob_file_is_not_damaged() {
    let p = CliFixture::new();
    let db = open(&p);
    let options = PartitionCreateOptions::default().with_kv_separation(Default::default());
    let blobs = db.open_partition("blobs", options).unwrap();
    let value = "v".repeat(2 << 20);
    put(&blobs, 0..2, &value);
    copy_database(&p, &db);
    std::fs::remove_file(p.path("d/MANIFEST")).unwrap();
    let (report, recovered) = repair(&p, "out");
    assert!(recovered["partition-1"] == expected(&[(0..2, &value)]), "{report}");
    assert_eq!(damaged_files(&report), ["MANIFEST"], "{report}");
    damage_blob_file(&p);
    let (report, recovered) = repair(&p, "damaged");
    assert!(recovered["partition-1"] == expected(&[(1..2, &value)]), "{report}");
    assert_eq!(damaged_files(&report), ["MANIFEST", "000002.blob"], "{report}");
}

/// Damages the first value in the only blob file of "d".
fn damage_blob_file(p: &CliFixture) {
    let path = &p.files("d", "blob")[0];
    let mut bytes = std::fs::read(path).unwrap();
    bytes[1000] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

/// The repair used tables of a killed compaction in addition to their inputs.
#[test]
fn outputs_of_killed_compaction_are_not_used() {
    let p = CliFixture::new();
    let db = open(&p);
    let plain = small_tables(&db, "plain");
    for value in ["old", "new"] {
        put(&plain, 0..1000, value);
        plain.flush().unwrap();
    }
    copy_database(&p, &db);
    plain.major_compact().unwrap();
    let written = new_tables(&p);
    assert!(written.len() > 1, "{written:?}");
    copy_table(&p, written[0]);
    std::fs::remove_file(p.path("d/MANIFEST")).unwrap();
    let (report, recovered) = repair(&p, "out");
    assert_eq!(recovered["plain"], expected(&[(0..1000, "new")]), "{report}");
    assert!(notes(&report).contains("the compaction has not ended"), "{report}");
    assert!(!notes(&report).contains("may be back"), "{report}");
}

/// The repair used an input of a compaction whose outputs were replaced, without a note. No file states that the input
/// was replaced, and the newer value has sequence number 0, which is below that of the input.
#[test]
fn stale_input_of_replaced_output_is_reported() {
    let p = CliFixture::new();
    let db = open(&p);
    let plain = partition(&db, "plain");
    for value in ["older", "old"] {
        put(&plain, 0..1, value);
        plain.flush().unwrap();
    }
    db.persist(PersistMode::SyncAll).unwrap();
    copy_missing(&p.path("live"), &p.path("before"));
    plain.major_compact().unwrap();
    put(&plain, 0..1, "new");
    plain.major_compact().unwrap();
    copy_database(&p, &db);
    let stale = table_name(*tables(&p.path("before")).last().unwrap());
    std::fs::copy(p.path("before").join(&stale), p.path("d").join(&stale)).unwrap();
    std::fs::remove_file(p.path("d/MANIFEST")).unwrap();
    let (report, _) = repair(&p, "out");
    assert!(notes(&report).contains("may have replaced this table before a later one"), "{report}");
}

/// If only ingested tables state the name of a partition, and the log has records of it, the name was lost.
#[test]
fn ingested_tables_name_their_partition() {
    let p = CliFixture::new();
    let db = open(&p);
    let named = partition(&db, "named");
    named.ingest((0..10).map(|n| (key(n), "ingested"))).unwrap();
    put(&named, 10..20, "log");
    copy_database(&p, &db);
    std::fs::remove_file(p.path("d/MANIFEST")).unwrap();
    let (report, recovered) = repair(&p, "out");
    let named = expected(&[(0..10, "ingested"), (10..20, "log")]);
    assert_eq!(recovered, [("named".to_owned(), named)].into(), "{report}");
}

/// A remove of a key of eight bytes looks like the commit after an ingest. The tables of the ingest have its sequence
/// number.
#[test]
fn remove_is_not_read_as_an_ingest_marker() {
    let p = CliFixture::new();
    let db = open(&p);
    let plain = small_tables(&db, "plain");
    let ghost = partition(&db, "ghost");
    plain.ingest((0..300).map(|n| (key(n), "ingested"))).unwrap();
    let (first, last) = (*tables(&p.path("live")).first().unwrap(), *tables(&p.path("live")).last().unwrap());
    assert!(first < last);
    put(&plain, 299..300, "newer");
    plain.flush().unwrap();
    (0..2).for_each(|_| ghost.remove(first.to_le_bytes()).unwrap());
    copy_database(&p, &db);
    (first..last).for_each(|number| std::fs::remove_file(p.path("d").join(table_name(number))).unwrap());
    std::fs::remove_file(p.path("d/MANIFEST")).unwrap();
    let (report, recovered) = repair(&p, "out");
    assert_eq!(recovered["plain"][&key(299)], "newer", "{report}");
    assert!(recovered["plain"].len() > 1 && !notes(&report).contains("ingest"), "{report}");
}

/// The position of an ingest in the log was lost. A range delete of the log hid its entries, and the report did not say
/// so.
#[test]
fn range_delete_behind_lost_ingest_is_reported() {
    let p = CliFixture::new();
    let db = Config::new(p.path("live")).workers(0).wal_segment_size(1 << 20).open().unwrap();
    let (plain, other) = (partition(&db, "plain"), partition(&db, "other"));
    plain.ingest((0..10).map(|n| (key(n), "ingested"))).unwrap();
    put(&other, 0..1000, &"v".repeat(4000));
    plain.remove_range(key(0)..key(5)).unwrap();
    copy_database(&p, &db);
    std::fs::remove_file(&p.files("d", "wal")[0]).unwrap();
    std::fs::remove_file(p.path("d/MANIFEST")).unwrap();
    let (report, _) = repair(&p, "out");
    assert!(notes(&report).contains("the place of this ingest among the commits is lost"), "{report}");
}

/// A compaction sets sequence numbers to 0 once it has applied all range deletes. The edit that removed the range
/// tombstone was lost. The tombstone of the edits before it hid the newer value in the table of a later compaction.
#[test]
fn applied_range_delete_hides_no_newer_value() {
    let p = CliFixture::new();
    let db = open(&p);
    let plain = partition(&db, "plain");
    put(&plain, 5..6, "old");
    plain.flush().unwrap();
    plain.remove_range(key(0)..key(10)).unwrap();
    plain.flush().unwrap();
    put(&plain, 5..6, "new");
    plain.flush().unwrap();
    let lost_from = manifest_len(&p);
    plain.major_compact().unwrap();
    let lost = lost_from..manifest_len(&p);
    put(&plain, 0..1, "other");
    put(&plain, 9..20, "other");
    plain.flush().unwrap();
    plain.major_compact().unwrap();
    // A range delete that no compaction has seen stays.
    plain.remove_range(key(15)..key(20)).unwrap();
    plain.flush().unwrap();
    copy_database(&p, &db);
    damage_manifest(&p, lost);
    let with_log = repair(&p, "out");
    remove_wal(&p);
    for (report, recovered) in [with_log, repair(&p, "without")] {
        assert_eq!(recovered["plain"], expected(&[(0..1, "other"), (5..6, "new"), (9..15, "other")]), "{report}");
        assert!(notes(&report).contains("are not used: a compaction may have applied them"), "{report}");
    }
}

/// The edit that removed a range tombstone was lost. A later range delete overlaps the tombstone, and the repair
/// recovered no entry.
#[test]
fn overlapping_range_deletes_are_merged() {
    let p = CliFixture::new();
    let db = open(&p);
    let plain = partition(&db, "plain");
    put(&plain, 0..8, "old");
    plain.flush().unwrap();
    plain.remove_range(key(0)..key(8)).unwrap();
    plain.flush().unwrap();
    // Keeps the sequence numbers of the newer values.
    let _snapshot = db.snapshot();
    put(&plain, 0..10, "new");
    plain.flush().unwrap();
    let lost_from = manifest_len(&p);
    plain.major_compact().unwrap();
    let lost = lost_from..manifest_len(&p);
    plain.remove_range(key(5)..key(9)).unwrap();
    plain.flush().unwrap();
    copy_database(&p, &db);
    damage_manifest(&p, lost);
    remove_wal(&p);
    let (report, recovered) = repair(&p, "out");
    assert_eq!(recovered["plain"], expected(&[(0..5, "new"), (9..10, "new")]), "{report}");
    assert_eq!(notes(&report), "[]", "{report}");
}

/// Waits until records with a time to live of 1 ms have expired.
fn wait_for_expiry() {
    let written = SystemTime::now();
    while written.elapsed().is_ok_and(|elapsed| elapsed < Duration::from_millis(2)) {}
}

/// The numbers of recovered entries by partition.
fn entry_counts(report: &Value) -> Vec<(&str, u64)> {
    let found = report["partitions"].as_array().unwrap().iter();
    found.map(|found| (found["name"].as_str().unwrap(), found["entries"].as_u64().unwrap())).collect()
}

/// Scans of a partition read the clock only if the manifest states that records may expire. If only the log or a pool
/// had such records, the repair recovered the expired ones.
#[test]
fn expired_records_of_log_and_pools_stay_away() {
    let p = CliFixture::new();
    let db = open(&p);
    let log = partition(&db, "log");
    let pool = EngineType::Pmem(PmemOptions::default());
    let memory = db.open_partition("memory", PartitionCreateOptions::default().engine(pool)).unwrap();
    for partition in [&log, &memory] {
        put(partition, 0..1, "kept");
        partition.insert_with_ttl(key(1), "expired", Duration::from_millis(1)).unwrap();
    }
    memory.flush().unwrap();
    wait_for_expiry();
    copy_database(&p, &db);
    std::fs::remove_file(p.path("d/MANIFEST")).unwrap();
    let (report, _) = repair(&p, "out");
    assert_eq!(entry_counts(&report), [("partition-1", 1), ("partition-2", 1)], "{report}");
}

/// The edit that states that a partition has records that expire was lost. A table that a readable edit names did not
/// restore that fact.
#[test]
fn expired_records_of_known_tables_stay_away() {
    let p = CliFixture::new();
    let db = open(&p);
    let plain = partition(&db, "plain");
    let lost_from = manifest_len(&p);
    plain.insert_with_ttl(key(1), "expired", Duration::from_millis(1)).unwrap();
    let lost = lost_from..manifest_len(&p);
    plain.flush().unwrap();
    put(&plain, 0..1, "kept");
    plain.flush().unwrap();
    wait_for_expiry();
    copy_database(&p, &db);
    damage_manifest(&p, lost);
    let (report, _) = repair(&p, "out");
    assert_eq!(entry_counts(&report), [("plain", 1)], "{report}");
}

/// A file system that records the length of the longest read.
#[derive(Debug)]
struct MeasuredFs(Arc<dyn Fs>, Arc<AtomicUsize>);

#[derive(Debug)]
struct MeasuredFile(Arc<dyn File>, Arc<AtomicUsize>);

impl Fs for MeasuredFs {
    fn open(&self, path: &Path, mode: OpenMode) -> azekura::Result<Arc<dyn File>> {
        Ok(Arc::new(MeasuredFile(self.0.open(path, mode)?, Arc::clone(&self.1))))
    }

    fn create_dir_all(&self, path: &Path) -> azekura::Result<()> {
        self.0.create_dir_all(path)
    }

    fn read_dir(&self, path: &Path) -> azekura::Result<Vec<DirEntry>> {
        self.0.read_dir(path)
    }

    fn exists(&self, path: &Path) -> azekura::Result<bool> {
        self.0.exists(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> azekura::Result<()> {
        self.0.rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> azekura::Result<()> {
        self.0.remove_file(path)
    }

    fn remove_dir_all(&self, path: &Path) -> azekura::Result<()> {
        self.0.remove_dir_all(path)
    }

    fn hard_link(&self, from: &Path, to: &Path) -> azekura::Result<()> {
        self.0.hard_link(from, to)
    }

    fn sync_dir(&self, path: &Path) -> azekura::Result<()> {
        self.0.sync_dir(path)
    }

    fn lock(&self, path: &Path, mode: LockMode) -> azekura::Result<Box<dyn FileLock>> {
        self.0.lock(path, mode)
    }

    fn overwrites_in_place(&self, dir: &Path) -> bool {
        self.0.overwrites_in_place(dir)
    }

    fn persistence_level(&self, dir: &Path) -> PersistenceLevel {
        self.0.persistence_level(dir)
    }
}

impl File for MeasuredFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> azekura::Result<usize> {
        self.1.fetch_max(buf.len(), Ordering::Relaxed);
        self.0.read_at(buf, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> azekura::Result<()> {
        self.0.write_at(bytes, offset)
    }

    fn length(&self) -> azekura::Result<u64> {
        self.0.length()
    }

    fn set_length(&self, len: u64) -> azekura::Result<()> {
        self.0.set_length(len)
    }

    fn allocate(&self, len: u64) -> azekura::Result<()> {
        self.0.allocate(len)
    }

    fn sync_data(&self) -> azekura::Result<()> {
        self.0.sync_data()
    }

    fn sync_all(&self) -> azekura::Result<()> {
        self.0.sync_all()
    }

    fn map(&self, len: u64) -> azekura::Result<Option<Box<dyn Mapping>>> {
        self.0.map(len)
    }
}

/// The repair read all segments of the WAL into memory at the same time.
#[test]
fn wal_segments_are_read_in_windows() {
    let p = CliFixture::new();
    let db = Config::new(p.path("live")).workers(0).wal_segment_size(8 << 20).open().unwrap();
    put(&partition(&db, "users"), 0..1000, &"v".repeat(4000));
    let longest = Arc::new(AtomicUsize::new(0));
    let fs: Arc<dyn Fs> = Arc::new(MeasuredFs(Arc::new(DiskFs::new()), Arc::clone(&longest)));
    copy_database(&p, &db);
    std::fs::remove_file(p.path("d/MANIFEST")).unwrap();
    azekura::inspect::rebuilt_manifest(&fs, &p.path("d")).unwrap();
    let longest = longest.load(Ordering::Relaxed);
    assert!((512..2 << 20).contains(&longest), "{longest}");
}
