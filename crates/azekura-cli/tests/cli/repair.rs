//! repair: what is intact of a damaged database is recovered, and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use azekura::{Config, EngineType, KvSeparationOptions, PartitionCreateOptions, PmemOptions};
use serde_json::Value;

use super::fixture::{CliFixture, CliResult};

const ENTRIES: u32 = 6000;

fn key(n: u32) -> Vec<u8> {
    format!("key{n:06}").into_bytes()
}

fn value(n: u32) -> Vec<u8> {
    n.to_string().repeat(40).into_bytes()
}

/// Values above the threshold of the partition "blobs".
fn blob(n: u32) -> Vec<u8> {
    n.to_le_bytes().repeat(500)
}

/// A database with one table of "plain", a table and a blob file of "blobs", and entries of "plain" in the WAL only.
fn make_database(p: &CliFixture) {
    let db = Config::new(p.path("live")).workers(0).open().unwrap();
    let options = PartitionCreateOptions::default().block_size(1 << 10);
    let plain = db.open_partition("plain", options.clone()).unwrap();
    (0..ENTRIES).for_each(|n| plain.insert(key(n), value(n)).unwrap());
    plain.major_compact().unwrap();
    let blobs = db.open_partition("blobs", options.with_kv_separation(KvSeparationOptions::default())).unwrap();
    (0..200).for_each(|n| blobs.insert(key(n), blob(n)).unwrap());
    blobs.major_compact().unwrap();
    (ENTRIES..ENTRIES + 500).for_each(|n| plain.insert(key(n), value(n)).unwrap());
    // Closing the database would flush the memtable.
    db.persist(azekura::PersistMode::SyncAll).unwrap();
    std::fs::create_dir(p.path("d")).unwrap();
    for entry in std::fs::read_dir(p.path("live")).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), p.path("d").join(entry.file_name())).unwrap();
    }
}

/// The files of "d" with this extension, by length.
fn files(p: &CliFixture, extension: &str) -> Vec<PathBuf> {
    let mut files = p.files("d", extension);
    files.sort_by_key(|path| std::fs::metadata(path).unwrap().len());
    files
}

fn flip(path: &Path, offsets: &[usize]) {
    let mut bytes = std::fs::read(path).unwrap();
    offsets.iter().for_each(|at| bytes[*at] ^= 0x20);
    std::fs::write(path, bytes).unwrap();
}

/// Runs `repair`, and checks that the result contains only values that were written. Returns the run, the report and
/// the numbers of the recovered entries by partition.
fn repair(p: &CliFixture, out: &str) -> (CliResult, Value, BTreeMap<String, Vec<u32>>) {
    let ran = p.run(&format!("repair d --out {out} --json"));
    let report: Value = serde_json::from_slice(&ran.out).unwrap_or_default();
    let mut recovered = BTreeMap::new();
    if p.path(out).exists() {
        let db = Config::new(p.path(out)).open_read_only().unwrap();
        for name in db.list_partitions() {
            let partition = db.partition(&name).unwrap();
            let mut numbers = Vec::new();
            for entry in partition.iter() {
                let (k, v) = entry.unwrap();
                let n = std::str::from_utf8(&k[3..]).unwrap().parse().unwrap();
                let expected = if name == "blobs" { blob(n) } else { value(n) };
                assert!(*k == *key(n) && *v == *expected, "{name}: a wrong value of {n}");
                numbers.push(n);
            }
            recovered.insert(name, numbers);
        }
    }
    (ran, report, recovered)
}

#[test]
fn intact_database_is_copied_completely() {
    let p = CliFixture::new();
    make_database(&p);
    let (ran, report, recovered) = repair(&p, "out");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!((recovered["plain"].len(), recovered["blobs"].len()), (ENTRIES as usize + 500, 200), "{report}");
    let open = |name: &str| Config::new(p.path(name)).open_read_only().unwrap();
    let options = |db: &str| open(db).partition("blobs").unwrap().options();
    assert_eq!(options("out"), options("d"));
    assert_eq!(p.run("repair d --out out").code, Some(3), "the target exists");
    assert_eq!(p.run("repair d --out d/inside").code, Some(3));
    assert_eq!(p.run("repair none --out new").code, Some(3));
}

/// `--out` was compared with the source as text, so `./d/new` and links created a database inside of the damaged one.
#[cfg(unix)]
#[test]
fn target_inside_of_source_is_refused() {
    let p = CliFixture::new();
    p.ok("put --create --db d key value");
    std::fs::create_dir(p.path("other")).unwrap();
    std::os::unix::fs::symlink(p.path("d"), p.path("link")).unwrap();
    let names = || std::fs::read_dir(p.path("d")).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
    let before = names();
    let absolute = p.path("d/new").display().to_string();
    for (source, out) in [
        ("d", "./d/new"),
        ("./d", "d/new"),
        ("d", &*absolute),
        ("d", "other/../d/new/deeper"),
        ("d", "link/new"),
        ("link", "d/new"),
    ] {
        let ran = p.run(&format!("repair {source} --out {out}"));
        assert!(ran.code == Some(3) && ran.err.contains("must not be in"), "{source} {out}: {ran:?}");
        assert_eq!(names(), before, "{source} {out}");
    }
    assert_eq!(p.run("repair d --out missing/../d/new").code, Some(3));
    assert_eq!(names(), before);
    p.ok("repair link --out other");
}

#[test]
fn entries_of_undamaged_blocks_are_recovered() {
    let p = CliFixture::new();
    make_database(&p);
    let table = files(&p, "sst").pop().unwrap();
    let good = std::fs::read(&table).unwrap();
    // Data blocks come first in a table. A block holds about 1 KiB before compression. Padding ends at multiples of
    // 4096, so no byte right behind one is padding.
    for (i, offsets) in
        [vec![100], vec![20_490], vec![4_106, 28_682, 61_450], vec![40_970, 41_000, 45_066], vec![90_122, 90_123]]
            .iter()
            .enumerate()
    {
        flip(&table, offsets);
        let (ran, report, recovered) = repair(&p, &format!("out{i}"));
        assert_eq!(ran.code, Some(1), "{offsets:?}: {ran:?}");
        let plain = &report["partitions"][1];
        let ranges = plain["lost_ranges"].as_array().unwrap();
        assert!(!ranges.is_empty() && ranges.len() <= offsets.len(), "{offsets:?}: {plain}");
        for range in ranges {
            assert!(range["problem"]["offset"].is_u64(), "{range}");
        }
        // Each damaged block loses its own entries only: at most 30 of 1 KiB.
        let lost = ENTRIES as usize + 500 - recovered["plain"].len();
        assert!(lost > 0 && lost <= 30 * offsets.len(), "{offsets:?}: {lost} lost: {plain}");
        assert_eq!(recovered["blobs"].len(), 200);
        std::fs::write(&table, &good).unwrap();
    }
}

#[test]
fn flipped_bytes_never_give_wrong_values() {
    let p = CliFixture::new();
    make_database(&p);
    let mut run = 0;
    for extension in ["sst", "blob", "wal"] {
        for file in files(&p, extension) {
            let good = std::fs::read(&file).unwrap();
            for at in [0, 70, 600, good.len() / 3, good.len() / 2, good.len() - 300, good.len() - 1] {
                flip(&file, &[at]);
                run += 1;
                let (ran, report, recovered) = repair(&p, &format!("out{run}"));
                let place = format!("{} at {at}", file.display());
                assert!(matches!(ran.code, Some(0 | 1)), "{place}: {ran:?}");
                let others = match extension {
                    "sst" => "",
                    "blob" => "plain",
                    _ => "blobs",
                };
                let all = if others == "plain" { ENTRIES as usize + 500 } else { 200 };
                assert!(others.is_empty() || recovered[others].len() == all, "{place}: {report}");
                if extension == "blob" {
                    assert!(recovered["blobs"].len() >= 198 || at == 0 || at + 300 >= good.len(), "{place}: {report}");
                }
                if extension == "wal" {
                    assert!(recovered["plain"].len() >= ENTRIES as usize, "{place}: {report}");
                }
                std::fs::write(&file, &good).unwrap();
            }
        }
    }
}

#[test]
fn damaged_files_lose_only_their_own_entries() {
    let p = CliFixture::new();
    make_database(&p);
    let mut run = 0;
    for (extension, intact) in [("sst", ""), ("blob", "plain"), ("wal", "blobs")] {
        let file = files(&p, extension).pop().unwrap();
        let good = std::fs::read(&file).unwrap();
        for length in [None, Some(0), Some(good.len() / 2), Some(good.len() + 10)] {
            match length {
                None => std::fs::remove_file(&file).unwrap(),
                Some(length) => {
                    let mut bytes = good.clone();
                    bytes.resize(length, 1);
                    std::fs::write(&file, bytes).unwrap();
                }
            }
            run += 1;
            let (ran, report, recovered) = repair(&p, &format!("out{run}"));
            assert!(matches!(ran.code, Some(0 | 1)), "{extension} {length:?}: {ran:?}");
            if !intact.is_empty() {
                let all = if intact == "plain" { ENTRIES as usize + 500 } else { 200 };
                assert_eq!(recovered[intact].len(), all, "{extension} {length:?}: {report}");
            }
            if extension == "sst" {
                // The WAL contains the newest entries of "plain", behind the keys of its table.
                assert_eq!(recovered["blobs"].len(), 200, "{length:?}");
                assert!(recovered["plain"].len() >= 500, "{length:?}: {report}");
            }
            std::fs::write(&file, &good).unwrap();
        }
    }
}

/// A flipped bit in the manifest made `repair` omit intact tables. Now `repair` builds a manifest from the properties
/// of the tables.
#[test]
fn damaged_manifest_is_rebuilt() {
    let p = CliFixture::new();
    make_database(&p);
    let manifest = p.path("d/MANIFEST");
    let good = std::fs::read(&manifest).unwrap();
    let mut rebuilt = 0;
    for at in (0..good.len()).step_by(good.len() / 12) {
        flip(&manifest, &[at]);
        let (ran, report, recovered) = repair(&p, &format!("out{at}"));
        assert!(matches!(ran.code, Some(0 | 1)), "{at}: {ran:?}");
        assert_eq!(
            (recovered["plain"].len(), recovered["blobs"].len()),
            (ENTRIES as usize + 500, 200),
            "{at}: {report}"
        );
        if report["manifest_rebuilt"] == true {
            rebuilt += 1;
            assert_eq!(ran.code, Some(1), "{at}: {report}");
        }
        std::fs::write(&manifest, &good).unwrap();
    }
    assert!(rebuilt > 0);
    std::fs::remove_file(&manifest).unwrap();
    let (ran, report, recovered) = repair(&p, "none");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert_eq!((recovered["plain"].len(), recovered["blobs"].len()), (ENTRIES as usize + 500, 200), "{report}");
    // Without the manifest, damage of other files loses no more than with it.
    let table = files(&p, "sst").pop().unwrap();
    flip(&table, &[20_000]);
    let blob = files(&p, "blob").pop().unwrap();
    flip(&blob, &[std::fs::metadata(&blob).unwrap().len() as usize - 5]);
    let (ran, report, recovered) = repair(&p, "both");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(recovered["plain"].len() >= ENTRIES as usize + 470, "{report}");
    assert!(report["damaged_files"].as_array().unwrap().len() >= 2, "{report}");
}

/// The bisection for the next readable key used keys of at most two bytes more than the longest key before the damage.
/// It found no key after short keys, or if keys have long common prefixes.
#[test]
fn damage_loses_one_block_whatever_keys() {
    type Keys = fn(u32) -> String;
    let with_last: Keys = |n| if n == 2000 { "z".into() } else { format!("key/{n:030}") };
    let with_prefix: Keys = |n| format!("{}{n:06}", "p".repeat(260));
    for keys in [with_last, with_prefix] {
        let p = CliFixture::new();
        let db = Config::new(p.path("d")).workers(0).open().unwrap();
        let partition = db.open_partition("default", PartitionCreateOptions::default().block_size(1 << 10)).unwrap();
        (0..=2000).for_each(|n| partition.insert(keys(n), [7; 60]).unwrap());
        partition.major_compact().unwrap();
        drop(partition);
        db.close().unwrap();
        flip(&files(&p, "sst")[0], &[600]);
        assert_eq!(p.run("repair d --out out").code, Some(1));
        let count: u32 = p.ok("count --db out").trim().parse().unwrap();
        assert!((1950..2001).contains(&count), "{count}");
    }
}

/// A damaged block of a small new table hid the older versions of its keys, which no command could read.
#[test]
fn older_versions_are_recovered_if_asked() {
    let p = CliFixture::new();
    let db = Config::new(p.path("d")).workers(0).open().unwrap();
    let partition = db.open_partition("default", PartitionCreateOptions::default()).unwrap();
    (0..1000).for_each(|n| partition.insert(key(n), "old").unwrap());
    partition.major_compact().unwrap();
    (0..1000).step_by(100).for_each(|n| partition.insert(key(n), "new").unwrap());
    partition.flush().unwrap();
    drop(partition);
    db.close().unwrap();
    flip(&files(&p, "sst")[0], &[100]);
    assert_eq!(p.run("repair d --out without").code, Some(1));
    assert_eq!(p.ok("count --db without"), "990\n");
    let ran = p.run("repair d --out with --older-versions --json");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert_eq!(p.ok("count --db with"), "1000\n");
    let report: Value = serde_json::from_slice(&ran.out).unwrap();
    let older = report["partitions"][0]["lost_ranges"][0]["older_versions_hex"].as_array().unwrap();
    assert_eq!((older.len(), older[1].as_str()), (10, Some("6b6579303030313030")), "{report}");
    let text = p.run("repair d --out again --older-versions").text();
    assert!(text.contains("older version of key000100: a newer one, or its removal, may be lost"), "{text}");
}

/// A key is in the damaged block of one table. It got the expiry time of an older version with the same value, because
/// the table with its newest version is damaged in another place. The report did not say so.
#[test]
fn unknown_expiry_times_are_reported() {
    let p = CliFixture::new();
    let db = Config::new(p.path("d")).workers(0).open().unwrap();
    let partition = db.open_partition("default", PartitionCreateOptions::default().block_size(1 << 10)).unwrap();
    for (hours, step) in [(1, 1), (2, 2), (3, 1)] {
        let ttl = std::time::Duration::from_secs(3600 * hours);
        (0..1000).step_by(step).for_each(|n| partition.insert_with_ttl(key(n), "session", ttl).unwrap());
        partition.flush().unwrap();
    }
    drop(partition);
    db.close().unwrap();
    let by_length = files(&p, "sst");
    let newest = by_length.iter().max().unwrap();
    flip(&by_length[0], &[600]);
    let report = || -> Value { serde_json::from_slice(&p.run("repair d --out out --json").out).unwrap() };
    let unknown = |report: &Value| -> usize {
        let ranges = report["partitions"][0]["lost_ranges"].as_array().unwrap();
        ranges.iter().map(|range| range["unknown_expiry_hex"].as_array().unwrap().len()).sum()
    };
    let first = report();
    assert!(unknown(&first) == 0 && first["partitions"][0]["entries"] == 1000, "{first}");
    flip(newest, &[std::fs::metadata(newest).unwrap().len() as usize / 2]);
    std::fs::remove_dir_all(p.path("out")).unwrap();
    let second = report();
    assert!((1..1000).contains(&unknown(&second)), "{second}");
    let text = p.run("repair d --out again").text();
    assert!(text.contains("it may be that of an older version, or missing"), "{text}");
}

/// A read-only command created the file `LOCK` in its source.
#[cfg(target_os = "linux")]
#[test]
fn source_without_lock_file_stays_unchanged() {
    let p = CliFixture::new();
    p.ok("put --create --db d key value");
    std::fs::remove_file(p.path("d/LOCK")).unwrap();
    for line in ["get --db d key", "stats --db d", "export --db d x.csv", "repair d --out out", "verify --db d"] {
        p.ok(line);
        assert!(!p.path("d/LOCK").exists(), "{line}");
    }
}

#[test]
fn error_lists_are_capped() {
    let p = CliFixture::new();
    let db = Config::new(p.path("d")).workers(0).open().unwrap();
    let partition = db.open_partition("default", PartitionCreateOptions::default().block_size(64)).unwrap();
    (0..3000).for_each(|n| partition.insert(key(n), value(n)).unwrap());
    partition.major_compact().unwrap();
    drop(partition);
    db.close().unwrap();
    let table = files(&p, "sst").pop().unwrap();
    let length = std::fs::metadata(&table).unwrap().len() as usize;
    flip(&table, &(1..60).map(|i| i * length / 100).collect::<Vec<_>>());
    let short = p.run("repair d --out a").text();
    let long = p.run("repair d --out b --all-errors").text();
    let count = |text: &str| text.lines().filter(|line| line.contains("lost: all keys")).count();
    assert_eq!(count(&short), 20, "{short}");
    assert!(short.contains("--all-errors") && !long.contains("--all-errors") && count(&long) > 40, "{long}");
}

/// Overlapping tables have several versions of each key. If the newest version is lost, no older one is recovered.
#[test]
fn no_older_version_replaces_a_lost_one() {
    let p = CliFixture::new();
    let versioned = |n: u32, version: u32| format!("{n}-{version}-").repeat(20).into_bytes();
    let db = Config::new(p.path("d")).workers(0).open().unwrap();
    let options = PartitionCreateOptions::default().block_size(512).max_memtable_size(64 << 10);
    let partition = db.open_partition("default", options).unwrap();
    let newest = |n: u32| 3 - n % 3;
    for version in 0..4 {
        (0..2000)
            .filter(|n| version <= newest(*n))
            .for_each(|n| partition.insert(key(n), versioned(n, version)).unwrap());
        partition.flush().unwrap();
    }
    (0..2000).filter(|n| n % 7 == 0).for_each(|n| partition.remove(key(n)).unwrap());
    partition.flush().unwrap();
    drop(partition);
    db.close().unwrap();
    let tables = files(&p, "sst");
    assert!(tables.len() > 1);
    let mut random = 88_172_645_463_325_252u64;
    let mut next = |end: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random % end as u64) as usize
    };
    for run in 0..40 {
        let table = &tables[next(tables.len())];
        let good = std::fs::read(table).unwrap();
        // Data blocks come first, behind the file header.
        let offsets: Vec<usize> = (0..1 + run % 4).map(|_| 64 + next(good.len() * 3 / 4)).collect();
        flip(table, &offsets);
        let report = p.run(&format!("repair d --out out{run} --json"));
        assert!(matches!(report.code, Some(0 | 1)), "{report:?}");
        let recovered = Config::new(p.path(format!("out{run}"))).open_read_only().unwrap();
        let mut missing: BTreeSet<u32> = (0..2000).filter(|n| n % 7 != 0).collect();
        for entry in recovered.partition("default").unwrap().iter() {
            let (k, v) = entry.unwrap();
            let n: u32 = std::str::from_utf8(&k[3..]).unwrap().parse().unwrap();
            assert!(*v == *versioned(n, newest(n)), "{offsets:?}: an older version of {n}");
            assert!(missing.remove(&n), "{offsets:?}: {n} was removed");
        }
        let json: Value = serde_json::from_slice(&report.out).unwrap();
        let ranges = json["partitions"][0]["lost_ranges"].as_array().unwrap();
        assert!(ranges.len() <= offsets.len(), "{offsets:?}: {json}");
        let hex = |n: u32| key(n).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let is_lost = |n: u32, range: &Value| {
            range["after_hex"].as_str().is_none_or(|after| *after < *hex(n))
                && range["before_hex"].as_str().is_none_or(|before| *hex(n) < *before)
        };
        let unreported: Vec<_> = missing.iter().filter(|n| !ranges.iter().any(|range| is_lost(**n, range))).collect();
        assert!(unreported.is_empty(), "{offsets:?}: {unreported:?}: {json}");
        std::fs::write(table, good).unwrap();
    }
}

/// The log and a newer table have a new version of each key. Damage in the old table loses none of those keys.
#[test]
fn keys_with_newer_versions_are_recovered() {
    let p = CliFixture::new();
    let db = Config::new(p.path("live")).workers(0).open().unwrap();
    let plain = db.open_partition("plain", PartitionCreateOptions::default().block_size(1 << 10)).unwrap();
    (0..ENTRIES).for_each(|n| plain.insert(key(n), "old").unwrap());
    plain.major_compact().unwrap();
    let newer = |n: &u32| !n.is_multiple_of(3);
    (0..ENTRIES / 2).filter(newer).for_each(|n| plain.insert(key(n), value(n)).unwrap());
    (0..ENTRIES / 2).filter(|n| n % 9 == 0).for_each(|n| plain.remove(key(n)).unwrap());
    plain.flush().unwrap();
    (ENTRIES / 2..ENTRIES).filter(newer).for_each(|n| plain.insert(key(n), value(n)).unwrap());
    (ENTRIES / 2..ENTRIES).filter(|n| n % 9 == 0).for_each(|n| plain.remove(key(n)).unwrap());
    db.persist(azekura::PersistMode::SyncAll).unwrap();
    std::fs::create_dir(p.path("d")).unwrap();
    for entry in std::fs::read_dir(p.path("live")).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), p.path("d").join(entry.file_name())).unwrap();
    }
    let fs: std::sync::Arc<dyn azekura::fs::Fs> = std::sync::Arc::new(azekura::fs::DiskFs::new());
    let tables = azekura::inspect::tables(&fs, &p.path("d")).unwrap();
    let oldest = tables.iter().max_by_key(|table| table.level).unwrap();
    assert!(oldest.level > 0 && tables.len() == 2, "{tables:?}");
    let table = p.path(format!("d/{:06}.sst", oldest.id));
    let good = std::fs::read(&table).unwrap();
    let mut run = 0;
    let blocks = good.len() * 3 / 4;
    for offsets in [
        vec![100],
        vec![blocks / 2],
        vec![blocks / 5, blocks / 2, blocks - 1],
        (0..20).map(|n| 100 + n * blocks / 20).collect(),
    ] {
        flip(&table, &offsets);
        run += 1;
        let report = p.run(&format!("repair d --out out{run} --json"));
        assert_eq!(report.code, Some(1), "{offsets:?}: {report:?}");
        let json: Value = serde_json::from_slice(&report.out).unwrap();
        let ranges = json["partitions"][0]["lost_ranges"].as_array().unwrap();
        assert!(!ranges.is_empty() && ranges.iter().all(|range| range["recovered"].as_u64().unwrap() > 0), "{json}");
        let out = Config::new(p.path(format!("out{run}"))).open_read_only().unwrap().partition("plain").unwrap();
        for n in 0..ENTRIES {
            let found = out.get(key(n)).unwrap();
            match n % 9 {
                0 => assert_eq!(found, None, "{offsets:?}: {n} was removed"),
                3 | 6 => assert!(found.is_none_or(|found| found == "old"), "{offsets:?}: {n}"),
                _ => assert_eq!(found.as_deref(), Some(&*value(n)), "{offsets:?}: {n} is in a newer table or the log"),
            }
        }
        std::fs::write(&table, &good).unwrap();
    }
}

/// `repair` ended at a partition that it could not create. In this test, the process may not reserve the address space
/// of a pool.
#[cfg(target_os = "linux")]
#[test]
fn partition_that_cannot_be_created_is_reported() {
    let p = CliFixture::new();
    p.ok("put --create --db d --partition users ada 1");
    for (db, partitions) in [("d", 2), ("only", 1)] {
        p.ok(&format!("partitions create --db {db} zz --engine pmem --pool-max-size 8TiB"));
        let command = format!("ulimit -v 8000000; exec \"$0\" repair {db} --out {db}-out --json");
        let mut shell = std::process::Command::new("sh");
        let ran =
            shell.args(["-c", &command, env!("CARGO_BIN_EXE_azekura")]).current_dir(p.dir.path()).output().unwrap();
        assert_eq!(ran.status.code(), Some(1), "{ran:?}");
        let report: Value = serde_json::from_slice(&ran.stdout).unwrap();
        let reports = report["partitions"].as_array().unwrap();
        let why = reports[partitions - 1]["unreadable"].as_str().unwrap();
        assert!(reports.len() == partitions && why.contains("cannot be created"), "{report}");
    }
    assert_eq!(p.ok("partitions list --db d-out"), "users\n");
    assert_eq!(p.ok("count --db d-out --partition users"), "1\n");
    assert_eq!(p.ok("partitions list --db only-out"), "");
}

/// The merge operator of one key failed, and all keys after it were lost.
#[test]
fn failing_merges_lose_one_value_each() {
    let p = CliFixture::new();
    p.ok("partitions create --db d default --merge-operator u64-add");
    let db = Config::new(p.path("d")).open().unwrap();
    let components = azekura::PartitionComponents::default().merge_operator(azekura::merge_operators::u64_add());
    let counts = db.open_partition_with("default", PartitionCreateOptions::default(), components).unwrap();
    for n in 0..100 {
        let base = if n % 30 == 5 { b"no number".to_vec() } else { u64::from(n).to_le_bytes().to_vec() };
        counts.insert(key(n), base).unwrap();
        counts.merge(key(n), 1u64.to_le_bytes()).unwrap();
    }
    drop(counts);
    db.close().unwrap();
    let ran = p.run("repair d --out out --json");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let report: Value = serde_json::from_slice(&ran.out).unwrap();
    let partition = &report["partitions"][0];
    let lost: Vec<_> = partition["lost_values"].as_array().unwrap().iter().map(|value| &value["key_hex"]).collect();
    let hex = |n: u32| key(n).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert_eq!(lost, [5, 35, 65, 95].map(hex).iter().collect::<Vec<_>>(), "{report}");
    assert_eq!(
        (&partition["entries"], partition["lost_ranges"].as_array().unwrap().len()),
        (&96.into(), 0),
        "{report}"
    );
    let out = Config::new(p.path("out")).open_read_only().unwrap().partition("default").unwrap();
    assert_eq!(out.get(key(99)).unwrap().unwrap(), 100u64.to_le_bytes()[..]);
}

/// The end of the manifest is lost. `repair` recovers no wrong value, and succeeds only if it recovers all entries.
#[test]
fn truncated_manifest_loses_nothing_silently() {
    let p = CliFixture::new();
    make_database(&p);
    let manifest = p.path("d/MANIFEST");
    let good = std::fs::read(&manifest).unwrap();
    let used = good.iter().rposition(|byte| *byte != 0).unwrap() + 1;
    for length in (0..used).step_by(used / 14) {
        std::fs::write(&manifest, &good[..length]).unwrap();
        let (ran, report, recovered) = repair(&p, &format!("out{length}"));
        assert!(matches!(ran.code, Some(0 | 1 | 3 | 5)), "{length}: {ran:?}");
        if ran.code == Some(0) {
            let count = recovered.get("plain").map_or(0, Vec::len);
            assert_eq!(count, ENTRIES as usize + 500, "{length}: {report}");
        }
    }
}

/// One pool cannot be read. `repair` recovers the other partitions, and the records of the pool that were written after
/// its last checkpoint.
#[test]
fn damaged_pool_does_not_stop_the_others() {
    let p = CliFixture::new();
    let db = Config::new(p.path("live")).workers(0).open().unwrap();
    let pool = EngineType::Pmem(PmemOptions::default());
    let memory = db.open_partition("memory", PartitionCreateOptions::default().engine(pool)).unwrap();
    let plain = db.open_partition("plain", PartitionCreateOptions::default()).unwrap();
    (0..1500).for_each(|n| memory.insert(key(n), value(n)).unwrap());
    (1500..2000).for_each(|n| memory.insert(key(n), "old").unwrap());
    (0..2000).for_each(|n| plain.insert(key(n), value(n)).unwrap());
    let is_mapped = memory.metrics().pool.unwrap().persistence != azekura::PersistenceLevel::WalOnly;
    memory.flush().unwrap();
    (1500..2500).for_each(|n| memory.insert(key(n), value(n)).unwrap());
    (1600..1700).for_each(|n| memory.remove(key(n)).unwrap());
    db.persist(azekura::PersistMode::SyncAll).unwrap();
    std::fs::create_dir(p.path("d")).unwrap();
    for entry in std::fs::read_dir(p.path("live")).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), p.path("d").join(entry.file_name())).unwrap();
    }
    let pool = files(&p, "pool").pop().unwrap();
    let good = std::fs::read(&pool).unwrap();
    let mut run = 0;
    let mut harmless = 0;
    for damage in [Some(0), Some(70), Some(5000), Some(good.len() / 2), None] {
        match damage {
            Some(at) => flip(&pool, &[at]),
            None => std::fs::remove_file(&pool).unwrap(),
        }
        run += 1;
        let (ran, report, recovered) = repair(&p, &format!("out{run}"));
        assert_eq!(recovered["plain"].len(), 2000, "{damage:?}: {report}");
        if ran.code == Some(0) {
            assert_eq!(recovered["memory"].len(), 2400, "{damage:?}: the byte has no meaning: {report}");
            harmless += 1;
            std::fs::write(&pool, &good).unwrap();
            continue;
        }
        assert_eq!(ran.code, Some(1), "{damage:?}: {ran:?}");
        let memory = &report["partitions"][0];
        assert_eq!(memory["name"], "memory");
        if is_mapped {
            assert!(memory["unreadable"].is_string() && !recovered.contains_key("memory"), "{damage:?}: {report}");
        } else {
            let expected: Vec<u32> = (1500..2500).filter(|n| !(1600..1700).contains(n)).collect();
            assert_eq!(recovered["memory"], expected, "{damage:?}: {report}");
            let range = &memory["lost_ranges"][0];
            assert!(range["after_hex"].is_null() && range["before_hex"].is_null(), "{damage:?}: {report}");
            assert_eq!(range["recovered"], 900);
        }
        let file = report["damaged_files"][0]["file"].as_str().unwrap_or_default();
        assert!(file.ends_with(".pool"), "{damage:?}: {report}");
        std::fs::write(&pool, &good).unwrap();
    }
    assert!(harmless <= 2, "{harmless}");
}
