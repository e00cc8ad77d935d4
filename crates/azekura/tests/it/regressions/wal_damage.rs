//! Recovery from damaged logs, in every recovery mode.

use std::path::Path;
use std::sync::Arc;

use azekura::fs::{Fs, OpenMode};
use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, Survival, TestEnv};
use azekura::{
    Config, Database, EngineType, ErrorKind, Partition, PartitionCreateOptions, PersistMode, PmemOptions, RecoveryMode,
    Result,
};

use crate::testkit::test_dir::{read_file, write_file};

const MODES: [RecoveryMode; 3] = [RecoveryMode::Strict, RecoveryMode::PointInTime, RecoveryMode::Salvage];

fn open_as(machine: &MemFs, salt: u64, mode: RecoveryMode) -> Result<Database> {
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    Config::new(Path::new("/db"))
        .fs(fs)
        .env(Arc::new(TestEnv::new(salt)))
        .workers(0)
        .wal_segment_size(64 << 10)
        .recovery_mode(mode)
        .open()
}

/// Partitions called "pool…" are pools.
fn open_partition(db: &Database, name: &str) -> Partition {
    let small = PmemOptions::default().max_size(1 << 20).growth_step(4 << 10);
    let options = match name.starts_with("pool") {
        true => PartitionCreateOptions::default().engine(EngineType::Pmem(small)),
        false => PartitionCreateOptions::default(),
    };
    db.open_partition(name, options).unwrap()
}

fn partition_keys(db: &Database, name: &str) -> Vec<String> {
    open_partition(db, name).keys().map(|key| String::from_utf8(key.unwrap().to_vec()).unwrap()).collect()
}

/// The files that a killed process leaves.
fn after_kill(machine: &MemFs) -> MemFs {
    let copy = machine.fork();
    copy.crash(Survival::Everything, 0);
    copy
}

fn marker_value(n: u32) -> String {
    format!("MARKER-{n:08}-")
}

/// The segment that contains the bytes, its length up to the last nonzero byte, and the offset of the bytes.
fn find_in_wal(machine: &MemFs, what: &[u8]) -> (String, u64, u64) {
    for entry in machine.read_dir(Path::new("/db")).unwrap().into_iter().filter(|e| e.name.ends_with(".wal")) {
        let bytes = read_file(machine, &Path::new("/db").join(&entry.name));
        if let Some(at) = bytes.windows(what.len()).position(|window| window == what) {
            let used = bytes.iter().rposition(|byte| *byte != 0).unwrap() + 1;
            return (entry.name, used as u64, at as u64);
        }
    }
    panic!("no segment holds {what:?}")
}

fn overwrite_file(machine: &MemFs, name: &str, at: u64, bytes: &[u8]) {
    let file = machine.open(&Path::new("/db").join(name), OpenMode::Write).unwrap();
    file.write_at(bytes, at).unwrap();
    file.sync_data().unwrap();
}

fn truncate_file(machine: &MemFs, name: &str, len: u64) {
    let file = machine.open(&Path::new("/db").join(name), OpenMode::Write).unwrap();
    file.set_length(len).unwrap();
    file.sync_all().unwrap();
}

fn damage_record(machine: &MemFs, n: u32) {
    let (name, _, at) = find_in_wal(machine, marker_value(n).as_bytes());
    overwrite_file(machine, &name, at, b"damaged");
}

/// Batches `from..=to` over two partitions, all of them synced.
fn write_batches(db: &Database, names: [&str; 2], numbers: std::ops::RangeInclusive<u32>) {
    for n in numbers {
        let mut batch = db.batch();
        batch.durability(PersistMode::SyncData);
        names.iter().for_each(|name| batch.insert(&open_partition(db, name), format!("k{n:03}"), marker_value(n)));
        batch.commit().unwrap();
    }
}

/// Two partitions with `count` batches over both, of which those in `flushed` are in permanent files.
fn database_with_uneven_flushes(names: [&str; 2], count: u32, flushed: &[&str]) -> MemFs {
    let machine = MemFs::new();
    let db = open_as(&machine, 1, RecoveryMode::Strict).unwrap();
    write_batches(&db, names, 1..=count);
    flushed.iter().for_each(|name| open_partition(&db, name).flush().unwrap());
    after_kill(&machine)
}

/// Writes and syncs on the files of `machine` repeatedly, killing the process each time. Every open, in every mode,
/// must find all of it.
fn check_recovery_is_stable(machine: &MemFs, first_mode: RecoveryMode) {
    let (mut machine, mut wrote) = (machine.fork(), Vec::new());
    for (n, mode) in [first_mode].into_iter().chain(MODES).chain([first_mode]).enumerate() {
        let db = open_as(&machine, 10 + n as u64, mode).unwrap_or_else(|e| panic!("{mode:?} in round {n}: {e}"));
        let found = partition_keys(&db, "after");
        assert_eq!(found, wrote, "{mode:?} in round {n} after {first_mode:?}");
        open_partition(&db, "after").insert(format!("{n}"), "v").unwrap();
        db.persist(PersistMode::SyncData).unwrap();
        wrote.push(format!("{n}"));
        for survival in [Survival::Nothing, Survival::Everything] {
            let crashed = machine.fork();
            crashed.crash(survival, n as u64);
            for mode in MODES {
                let db = open_as(&crashed.fork(), 90, mode).unwrap_or_else(|e| panic!("{mode:?}, {survival:?}: {e}"));
                assert_eq!(partition_keys(&db, "after"), wrote, "{mode:?} after {first_mode:?}, {survival:?}");
            }
        }
        machine = after_kill(&machine);
    }
}

/// Half of a batch survived: the flushed partition had all of it, the other one nothing after the damage. The manifest
/// recorded an end of the WAL above the highest sequence number in tables. Therefore every later open in `Strict`
/// failed, and `PointInTime` dropped commits that were synced after the recovery.
#[test]
fn half_batches_are_refused_or_salvaged() {
    for names in [["a", "b"], ["pool a", "b"], ["a", "pool b"]] {
        let machine = database_with_uneven_flushes(names, 6, &names[..1]);
        damage_record(&machine, 3);
        for mode in [RecoveryMode::Strict, RecoveryMode::PointInTime] {
            let error = open_as(&machine.fork(), 2, mode).unwrap_err();
            let text = error.to_string();
            assert_eq!(error.kind(), ErrorKind::Corruption, "{text}");
            assert!(error.file().is_some() && error.offset().is_some(), "{text}");
            assert!(text.contains(&format!("{:?}", names[0])) && text.contains("Salvage"), "{text}");
        }
        let db = open_as(&machine.fork(), 2, RecoveryMode::Salvage).unwrap();
        assert_eq!(partition_keys(&db, names[0]).len(), 6, "{names:?}");
        assert_eq!(partition_keys(&db, names[1]), ["k001", "k002", "k004", "k005", "k006"], "{names:?}");
        drop(db);
        check_recovery_is_stable(&machine, RecoveryMode::Salvage);
    }
}

/// The manifest of a checkpoint states the end of the WAL, and so does that of a database that was opened again. Damage
/// below it made `PointInTime` refuse, although no permanent file had the commits behind the damage.
#[test]
fn point_in_time_goes_back_before_a_recorded_end() {
    for is_checkpoint in [true, false] {
        let machine = database_with_uneven_flushes(["a", "b"], 6, &[]);
        let db = open_as(&machine, 2, RecoveryMode::Strict).unwrap();
        if is_checkpoint {
            db.checkpoint("/copy").unwrap();
        }
        let machine = after_kill(&machine);
        if is_checkpoint {
            machine.rename(Path::new("/db"), Path::new("/original")).unwrap();
            machine.rename(Path::new("/copy"), Path::new("/db")).unwrap();
            machine.sync_dir(Path::new("/")).unwrap();
        }
        damage_record(&machine, 4);
        assert!(open_as(&machine.fork(), 3, RecoveryMode::Strict).is_err());
        let db = open_as(&machine.fork(), 3, RecoveryMode::PointInTime).unwrap();
        assert_eq!((partition_keys(&db, "a").len(), partition_keys(&db, "b").len()), (3, 3));
        drop(db);
        for mode in [RecoveryMode::PointInTime, RecoveryMode::Salvage] {
            check_recovery_is_stable(&machine, mode);
        }
    }
}

/// A WAL that was truncated or zeroed from an offset on has no watermark that shows how far it was durable, but the
/// tables of one partition do. It opened with all of one partition and half of the other.
#[test]
fn wal_ending_below_flushed_seqno_is_damaged() {
    for is_cut in [true, false] {
        let machine = database_with_uneven_flushes(["a", "b"], 100, &["a"]);
        let (name, used, at) = find_in_wal(&machine, marker_value(45).as_bytes());
        if is_cut {
            truncate_file(&machine, &name, at);
        } else {
            overwrite_file(&machine, &name, at, &vec![0; (used - at) as usize]);
        }
        for mode in [RecoveryMode::Strict, RecoveryMode::PointInTime] {
            let error = open_as(&machine.fork(), 2, mode).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corruption);
            assert!(error.to_string().contains("partition \"a\""), "{error}");
        }
        check_recovery_is_stable(&machine, RecoveryMode::Salvage);
    }
}

/// `Strict` refused damage in a part of the WAL that no partition needs.
#[test]
fn unneeded_damage_is_no_obstacle() {
    for mode in MODES {
        let machine = MemFs::new();
        let db = open_as(&machine, 1, RecoveryMode::Strict).unwrap();
        write_batches(&db, ["a", "b"], 1..=6);
        ["a", "b"].iter().for_each(|name| open_partition(&db, name).flush().unwrap());
        write_batches(&db, ["a", "b"], 7..=9);
        let machine = after_kill(&machine);
        damage_record(&machine, 3);
        let db = open_as(&machine.fork(), 2, mode).unwrap_or_else(|e| panic!("{mode:?}: {e}"));
        assert_eq!((partition_keys(&db, "a").len(), partition_keys(&db, "b").len()), (9, 9), "{mode:?}");
        drop(db);
        check_recovery_is_stable(&machine, mode);
        damage_record(&machine, 8);
        assert!(open_as(&machine.fork(), 2, RecoveryMode::Strict).is_err(), "this record is needed");
        let db = open_as(&machine.fork(), 2, RecoveryMode::PointInTime).unwrap();
        assert_eq!((partition_keys(&db, "a").len(), partition_keys(&db, "b").len()), (7, 7));
        drop(db);
        check_recovery_is_stable(&machine, RecoveryMode::PointInTime);
    }
}

/// The WAL is lost from a position that all partitions have flushed to its end. Because nothing proves that no commit
/// followed, `Strict` refuses; `PointInTime` opens the state in the tables.
#[test]
fn lost_wal_is_replaced_by_flushed_tables() {
    let machine = database_with_uneven_flushes(["a", "b"], 6, &["a", "b"]);
    let (name, used, at) = find_in_wal(&machine, marker_value(3).as_bytes());
    overwrite_file(&machine, &name, at, &vec![0; (used - at) as usize]);
    assert!(open_as(&machine.fork(), 2, RecoveryMode::Strict).is_err());
    for mode in [RecoveryMode::PointInTime, RecoveryMode::Salvage] {
        let db = open_as(&machine.fork(), 2, mode).unwrap();
        assert_eq!((partition_keys(&db, "a").len(), partition_keys(&db, "b").len()), (6, 6));
        drop(db);
        check_recovery_is_stable(&machine, mode);
    }
}

/// Segments that `PointInTime` dropped became spares and kept their old headers. When power loss removed the header of
/// the only newer segment, the spares looked like a WAL that was synced beyond its end.
#[test]
fn spares_of_dropped_segments_are_no_damage() {
    let machine = MemFs::new();
    let db = open_as(&machine, 1, RecoveryMode::Strict).unwrap();
    let long = "x".repeat(20_000);
    for n in 1..=12 {
        open_partition(&db, "a").insert(format!("k{n:03}"), marker_value(n) + &long).unwrap();
        db.persist(PersistMode::SyncData).unwrap();
    }
    let machine = after_kill(&machine);
    damage_record(&machine, 5);
    let db = open_as(&machine, 2, RecoveryMode::PointInTime).unwrap();
    assert_eq!(partition_keys(&db, "a").len(), 4);
    open_partition(&db, "a").flush().unwrap();
    while db.step().unwrap() {}
    for salt in 0..12 {
        let survival = if salt == 0 { Survival::Nothing } else { Survival::Random };
        let crashed = machine.fork();
        crashed.crash(survival, salt);
        for mode in MODES {
            let db = open_as(&crashed.fork(), 3, mode).unwrap_or_else(|e| panic!("{mode:?}, salt {salt}: {e}"));
            assert_eq!(partition_keys(&db, "a").len(), 4);
        }
    }
}

/// Power fails at every operation of an open that accepts damage. A later open in the same mode finds the same content;
/// `Strict` refuses, or finds it too.
#[test]
fn a_recovery_cut_short_can_be_begun_again() {
    for (flushed, mode) in [(&["a"][..], RecoveryMode::Salvage), (&["a", "b"], RecoveryMode::PointInTime)] {
        let machine = database_with_uneven_flushes(["a", "b"], 6, flushed);
        damage_record(&machine, 3);
        let mut accepted = 0;
        let whole = machine.fork();
        let before = whole.op_count();
        let wanted = [
            partition_keys(&open_as(&whole, 2, mode).unwrap(), "a"),
            partition_keys(&open_as(&after_kill(&whole), 2, mode).unwrap(), "b"),
        ];
        for op in 0..=whole.op_count() - before {
            for survival in [Survival::Nothing, Survival::Everything, Survival::Random] {
                let crashed = machine.fork();
                crashed.freeze_after(Some(op));
                drop(open_as(&crashed, 2, mode));
                crashed.crash(survival, op);
                let db =
                    open_as(&crashed.fork(), 3, mode).unwrap_or_else(|e| panic!("operation {op}, {survival:?}: {e}"));
                assert_eq!(
                    [partition_keys(&db, "a"), partition_keys(&db, "b")],
                    wanted,
                    "operation {op}, {survival:?}"
                );
                drop(db);
                match open_as(&crashed.fork(), 3, RecoveryMode::Strict) {
                    Ok(db) => {
                        let found = [partition_keys(&db, "a"), partition_keys(&db, "b")];
                        assert_eq!(found, wanted, "operation {op}, {survival:?}, Strict");
                        accepted += 1;
                    }
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Corruption, "operation {op}, {survival:?}"),
                }
            }
        }
        assert!(accepted > 0, "{mode:?}: a whole recovery leaves no damage");
    }
}

/// A read-only open follows the same rules and writes nothing.
#[test]
fn readers_follow_the_same_rules() {
    let machine = database_with_uneven_flushes(["a", "b"], 6, &["a"]);
    damage_record(&machine, 3);
    for mode in MODES {
        let fs: Arc<dyn Fs> = Arc::new(machine.fork());
        let config = Config::new("/db").fs(Arc::clone(&fs)).env(Arc::new(TestEnv::new(4))).recovery_mode(mode);
        let before = crate::testkit::test_dir::dir_contents(&*fs, Path::new("/db"));
        assert_eq!(config.open_read_only().is_ok(), mode == RecoveryMode::Salvage, "{mode:?}");
        assert!(crate::testkit::test_dir::dir_contents(&*fs, Path::new("/db")) == before, "{mode:?}");
    }
}

/// Two partitions have flushed different parts of the WAL. At many offsets, one byte is flipped, the WAL is cut, or it
/// is zeroed from there on. In `Strict` and `PointInTime` the open gives one snapshot of both partitions or an error;
/// in `Salvage` it succeeds. Records that are synced afterwards survive.
#[test]
fn any_wal_damage_gives_one_snapshot_or_error() {
    let (mut opened, mut refused) = (0, 0);
    for (seed, names) in [["a", "b"], ["pool a", "b"], ["a", "pool b"]].into_iter().enumerate() {
        let machine = MemFs::new();
        let db = open_as(&machine, 1, RecoveryMode::Strict).unwrap();
        write_batches(&db, names, 1..=4);
        open_partition(&db, names[1]).flush().unwrap();
        write_batches(&db, names, 5..=8);
        open_partition(&db, names[0]).flush().unwrap();
        write_batches(&db, names, 9..=11);
        let machine = after_kill(&machine);
        let (name, used, _) = find_in_wal(&machine, marker_value(1).as_bytes());
        for at in (512 + seed as u64..used).step_by(41) {
            for how in 0..3 {
                let damaged = machine.fork();
                match how {
                    0 => overwrite_file(&damaged, &name, at, b"\xa5"),
                    1 => truncate_file(&damaged, &name, at),
                    _ => overwrite_file(&damaged, &name, at, &vec![0; (used - at) as usize]),
                }
                for mode in MODES {
                    let what = format!("{names:?}, damage {how} at {at}, {mode:?}");
                    let copy = damaged.fork();
                    let db = match open_as(&copy, 2, mode) {
                        Ok(db) => db,
                        Err(e) => {
                            assert!(mode != RecoveryMode::Salvage && e.kind() == ErrorKind::Corruption, "{what}: {e}");
                            refused += 1;
                            continue;
                        }
                    };
                    opened += 1;
                    let (one, other) = (partition_keys(&db, names[0]), partition_keys(&db, names[1]));
                    if mode != RecoveryMode::Salvage {
                        assert_eq!(one, other, "{what}");
                        assert!(one.len() >= 8 && one.last() == Some(&format!("k{:03}", one.len())), "{what}: {one:?}");
                    }
                    open_partition(&db, "after").insert("k", "v").unwrap();
                    db.persist(PersistMode::SyncData).unwrap();
                    for later in MODES {
                        let again = copy.fork();
                        again.crash(Survival::Nothing, at);
                        let db = open_as(&again, 3, later).unwrap_or_else(|e| panic!("{what}, then {later:?}: {e}"));
                        assert_eq!(partition_keys(&db, "after").len(), 1, "{what}, then {later:?}");
                        assert_eq!(
                            (partition_keys(&db, names[0]), partition_keys(&db, names[1])),
                            (one.clone(), other.clone()),
                            "{what}"
                        );
                    }
                }
            }
        }
    }
    assert!(opened > 100 && refused > 100, "{opened} opened, {refused} refused");
}

/// Opening counted the number of a stray file as one of the database. The next file number overflowed, or started at 0
/// again.
#[test]
fn stray_files_use_up_no_numbers() {
    for stray in [u64::MAX, u64::MAX - 1, 1 << 62] {
        let machine = MemFs::new();
        let db = open_as(&machine, 1, RecoveryMode::Strict).unwrap();
        open_partition(&db, "a").insert("k", "v").unwrap();
        db.close().unwrap();
        let names = ["sst", "blob", "wal", "pool"].map(|kind| match kind {
            "pool" => format!("p{stray}.pool"),
            kind => format!("{stray}.{kind}"),
        });
        for name in &names {
            machine.open(&Path::new("/db").join(name), OpenMode::Create).unwrap().write_at(b"junk", 0).unwrap();
        }
        for life in 2..5 {
            let db = open_as(&machine, life, RecoveryMode::Strict).unwrap();
            open_partition(&db, "a").insert(format!("{life}"), "v").unwrap();
            open_partition(&db, "a").flush().unwrap();
            open_partition(&db, &format!("pool {life}"));
            db.close().unwrap();
        }
        for name in &names {
            assert!(machine.exists(&Path::new("/db").join(name)).unwrap(), "{name} was removed");
        }
        let entries = machine.read_dir(Path::new("/db")).unwrap();
        let mine = entries.into_iter().filter(|entry| !names.contains(&entry.name));
        assert!(mine.into_iter().all(|entry| entry.name.len() < 20), "file numbers continue after {stray}");
    }
}

/// A database was closed twice, the second time without a write. The header of the segment that the second open had
/// started was not durable, and nothing else recorded that the earlier segments were retired. After power loss the WAL
/// looked damaged.
#[test]
fn wal_is_complete_after_closes_and_power_loss() {
    let machine = MemFs::new();
    let write = |salt: u64, key: &str| {
        let db = super::open(&machine, "/db", salt);
        let (a, _idle) = (super::open_partition(&db, "a"), super::open_partition(&db, "idle"));
        if !key.is_empty() {
            a.insert(key, "v").unwrap();
        }
        db.close().unwrap();
    };
    for (salt, key) in ["one", "", "two", "", ""].into_iter().enumerate() {
        write(salt as u64, key);
        let after = super::after_power_loss(&machine);
        let db = super::open(&after, "/db", 9);
        assert_eq!(super::open_partition(&db, "a").len().unwrap(), if salt < 2 { 1 } else { 2 }, "after life {salt}");
    }
}

/// A partition without records to flush kept its position at the start of the WAL, so that all of the WAL counted as
/// needed: `Strict` and `PointInTime` refused damage although every record was in tables or images.
#[test]
fn unneeded_damage_is_skipped_if_partitions_idle() {
    for names in [["a", "b"], ["pool a", "b"]] {
        for idle in [&[][..], &["idle"], &["idle", "pool idle"]] {
            let machine = MemFs::new();
            let db = open_as(&machine, 1, RecoveryMode::Strict).unwrap();
            idle.iter().for_each(|name| drop(open_partition(&db, name)));
            // One partition had records before.
            if let Some(name) = idle.last() {
                open_partition(&db, name).insert("k", "v").unwrap();
                open_partition(&db, name).flush().unwrap();
            }
            write_batches(&db, names, 1..=6);
            names.iter().for_each(|name| open_partition(&db, name).flush().unwrap());
            let machine = after_kill(&machine);
            damage_record(&machine, 3);
            for mode in MODES {
                let what = format!("{names:?} with {idle:?} idle, {mode:?}");
                let db = open_as(&machine.fork(), 2, mode).unwrap_or_else(|e| panic!("{what}: {e}"));
                assert_eq!(
                    (partition_keys(&db, names[0]).len(), partition_keys(&db, names[1]).len()),
                    (6, 6),
                    "{what}"
                );
            }
            check_recovery_is_stable(&machine, RecoveryMode::Strict);
        }
    }
}

/// The flushed position that the manifest records for all partitions covers partitions that have a commit in the WAL
/// only, and excludes commits that are not durable. No record is lost, and a WAL that power loss truncated does not
/// look damaged.
#[test]
fn unflushed_commits_are_needed_after_flushes() {
    for survival in [Survival::Nothing, Survival::Everything] {
        let machine = MemFs::new();
        let db = open_as(&machine, 1, RecoveryMode::Strict).unwrap();
        let (a, b) = (open_partition(&db, "a"), open_partition(&db, "b"));
        open_partition(&db, "idle");
        for n in 0..20 {
            a.insert(format!("{n:02}"), "v").unwrap();
            if n % 3 == 0 {
                b.insert(format!("{n:02}"), "v").unwrap();
            }
            if n % 4 == 1 {
                a.flush().unwrap();
            }
            let crashed = machine.fork();
            crashed.crash(survival, n);
            for mode in MODES {
                let db = open_as(&crashed.fork(), 2, mode).unwrap_or_else(|e| panic!("{survival:?} {n} {mode:?}: {e}"));
                let (in_a, in_b) = (partition_keys(&db, "a"), partition_keys(&db, "b"));
                assert_eq!(in_b.len(), in_a.len().div_ceil(3), "{survival:?} {n} {mode:?}: not one point in time");
                assert!(survival == Survival::Nothing || in_a.len() as u64 == n + 1, "{n} {mode:?}");
            }
        }
    }
}

/// A flush writes one short edit to the manifest, however many other partitions have nothing to flush.
#[test]
fn manifest_stays_small_with_idle_partitions() {
    let machine = MemFs::new();
    let db = open_as(&machine, 1, RecoveryMode::Strict).unwrap();
    (0..60).for_each(|n| drop(open_partition(&db, &format!("idle {n}"))));
    let length = || machine.open(Path::new("/db/MANIFEST"), OpenMode::Read).unwrap().length().unwrap();
    let before = length();
    for n in 0..20 {
        open_partition(&db, "a").insert(format!("{n}"), "v").unwrap();
        open_partition(&db, "a").flush().unwrap();
    }
    assert!(length() - before < 20 * 400, "{} bytes for a flush", (length() - before) / 20);
}

/// `Salvage` ended the WAL at a commit of a partition that the manifest had lost, but wrote that commit and later ones
/// to the new WAL. The next open found the commit again, and refused.
#[test]
fn salvage_leaves_out_commits_of_lost_partitions() {
    let machine = MemFs::new();
    let db = open_as(&machine, 1, RecoveryMode::Strict).unwrap();
    write_batches(&db, ["pool a", "b"], 1..=2);
    open_partition(&db, "pool a").flush().unwrap();
    let manifest = || machine.open(Path::new("/db/MANIFEST"), OpenMode::Write).unwrap();
    let len = manifest().length().unwrap();
    open_partition(&db, "lost").insert("k", "v").unwrap();
    write_batches(&db, ["pool a", "b"], 3..=4);
    // The image of the pool records that the WAL was durable beyond this commit.
    open_partition(&db, "pool a").flush().unwrap();
    let machine = after_kill(&machine);
    truncate_file(&machine, "MANIFEST", len);
    assert!(open_as(&machine.fork(), 2, RecoveryMode::Strict).is_err());
    let db = open_as(&machine.fork(), 2, RecoveryMode::Salvage).unwrap();
    assert_eq!((partition_keys(&db, "pool a").len(), partition_keys(&db, "b").len()), (4, 4));
    assert_eq!(partition_keys(&db, "lost"), Vec::<String>::new());
    drop(db);
    check_recovery_is_stable(&machine, RecoveryMode::Salvage);
}

/// Batches over two partitions, whose WAL takes many pages.
fn long_batches(db: &Database, numbers: std::ops::RangeInclusive<u32>, mode: PersistMode) {
    for n in numbers {
        let mut batch = db.batch();
        batch.durability(mode);
        for name in ["a", "b"] {
            batch.insert(&open_partition(db, name), format!("k{n:03}"), marker_value(n) + &"x".repeat(3_000));
        }
        batch.commit().unwrap();
    }
}

/// Both partitions have flushed the damaged part of the WAL, and need the rest of it. Their tables make the manifest
/// large.
fn long_log(count: u32) -> MemFs {
    let machine = MemFs::new();
    let db = open_as(&machine, 1, RecoveryMode::Strict).unwrap();
    ["a", "b"].iter().for_each(|name| open_partition(&db, name).insert(vec![b'z'; 65_000], "v").unwrap());
    long_batches(&db, 1..=6, PersistMode::SyncData);
    ["a", "b"].iter().for_each(|name| open_partition(&db, name).flush().unwrap());
    long_batches(&db, 7..=count, PersistMode::SyncData);
    let machine = after_kill(&machine);
    damage_record(&machine, 3);
    machine
}

/// Damage in a part of the WAL that all partitions had flushed made every position stale, though no commit behind it
/// was lost.
#[test]
fn skipped_damage_leaves_positions_valid() {
    let machine = MemFs::new();
    let db = open_as(&machine, 1, RecoveryMode::Strict).unwrap();
    let start = db.change_position().unwrap();
    long_batches(&db, 1..=6, PersistMode::SyncData);
    ["a", "b"].iter().for_each(|name| open_partition(&db, name).flush().unwrap());
    long_batches(&db, 7..=8, PersistMode::SyncData);
    let position = db.change_position().unwrap();
    long_batches(&db, 9..=12, PersistMode::SyncData);
    let machine = after_kill(&machine);
    damage_record(&machine, 3);
    let db = open_as(&machine, 2, RecoveryMode::Strict).unwrap();
    let commits: Result<Vec<_>, _> = db.changes_since(position).unwrap().collect();
    assert_eq!(commits.unwrap().len(), 4);
    assert_eq!(db.changes_since(start).unwrap_err().kind(), ErrorKind::Stale, "the WAL begins later now");
}

fn counts(db: &Database) -> (u64, u64) {
    (open_partition(db, "a").len().unwrap(), open_partition(db, "b").len().unwrap())
}

/// A WAL with 12 commits, of which 6 were synced and the 9th is damaged.
fn log_with_torn_tail() -> MemFs {
    let machine = MemFs::new();
    let db = open_as(&machine, 1, RecoveryMode::Strict).unwrap();
    long_batches(&db, 1..=6, PersistMode::SyncData);
    long_batches(&db, 7..=12, PersistMode::Buffer);
    damage_record(&machine, 9);
    after_kill(&machine)
}

/// The new WAL that a killed `Salvage` had started was marked as durable. So the torn tail of the old WAL, which
/// `Salvage` had skipped, looked damaged, and `Strict` refused a WAL that it would have opened before.
#[test]
fn strict_opens_when_a_salvage_was_killed() {
    let base = log_with_torn_tail();
    let whole = base.fork();
    let before = whole.op_count();
    assert_eq!(counts(&open_as(&whole, 3, RecoveryMode::Salvage).unwrap()), (11, 11));
    let mut salvaged = 0;
    for op in 0..=whole.op_count() - before {
        let cut_short = base.fork();
        cut_short.freeze_after(Some(op));
        drop(open_as(&cut_short, 3, RecoveryMode::Salvage));
        for (survival, seed) in [(Survival::Everything, 0), (Survival::Random, op), (Survival::Random, op + 1_000)] {
            let later = cut_short.fork();
            later.crash(survival, seed);
            let db = open_as(&later, 4, RecoveryMode::Strict).unwrap_or_else(|e| panic!("{op}, {survival:?}: {e}"));
            let found = counts(&db);
            assert!(found == (8, 8) || found == (11, 11), "{op}, {survival:?}: {found:?}");
            salvaged += u32::from(found == (11, 11));
        }
    }
    assert!(salvaged > 0);
}

/// Opens a copy of the database of a killed process, whose manifest is lost and was built anew.
fn open_rebuilt(machine: &MemFs, mode: RecoveryMode) -> Database {
    let rebuilt = after_kill(machine);
    let fs: Arc<dyn Fs> = Arc::new(rebuilt.clone());
    write_file(&*fs, Path::new("/db/MANIFEST"), b"not a manifest");
    let bytes = azekura::inspect::rebuilt_manifest(&fs, Path::new("/db")).unwrap().bytes;
    write_file(&*fs, Path::new("/db/MANIFEST"), &bytes);
    open_as(&rebuilt, 4, mode).unwrap()
}

/// The keys of all partitions, whose names may be lost.
fn keys_of(db: &Database) -> Vec<String> {
    let partitions = db.list_partitions().into_iter().map(|name| db.partition(&name).unwrap());
    let keys = partitions.flat_map(|part| part.keys().collect::<Result<Vec<_>, _>>().unwrap());
    let mut keys: Vec<_> = keys.map(|key| String::from_utf8_lossy(&key).into_owned()).collect();
    keys.sort();
    keys
}

/// A manifest that was built anew named the WAL that a killed `Salvage` had started to write anew. It is newer than the
/// old one and has fewer commits, so every mode lost synced commits. Power loss can also take some from its middle.
#[test]
fn manifest_is_lost_when_a_salvage_was_stopped() {
    let base = log_with_torn_tail();
    let whole = base.fork();
    let before = whole.op_count();
    let db = open_as(&whole, 3, RecoveryMode::Salvage).unwrap();
    let ops = whole.op_count() - before;
    for op in 0..=ops {
        let cut_short = base.fork();
        cut_short.freeze_after(Some(op));
        drop(open_as(&cut_short, 3, RecoveryMode::Salvage));
        let killed = after_kill(&cut_short);
        for mode in [RecoveryMode::Strict, RecoveryMode::PointInTime] {
            let found = keys_of(&open_rebuilt(&killed, mode)).len();
            assert!(found == 16 || found == 22, "{op}, {mode:?}: {found}");
        }
        let power_losses = (0..6).map(|seed| {
            let off = cut_short.fork();
            off.crash(Survival::Random, op * 100 + seed);
            off
        });
        for machine in power_losses.chain([killed]) {
            assert_eq!(keys_of(&open_rebuilt(&machine, RecoveryMode::Salvage)).len(), 22, "{op}");
        }
    }
    // The files of the old WAL may still be there.
    long_batches(&db, 13..=14, PersistMode::Buffer);
    assert_eq!(keys_of(&open_rebuilt(&whole, RecoveryMode::Strict)).len(), 26);
}

/// The newest segment is empty behind a flush, and the one before it is gone. It was taken for what a killed `Salvage`
/// had written, and old spare files for the WAL: records of a deleted partition were back, or the open was refused.
#[test]
fn manifest_is_lost_behind_a_flush() {
    let machine = MemFs::new();
    let db = open_as(&machine, 1, RecoveryMode::Strict).unwrap();
    let keep = open_partition(&db, "keep");
    let insert = |part: &Partition, key: &str, count: u32| {
        (0..count).for_each(|n| part.insert(format!("{key}{n}"), "x".repeat(30_000)).unwrap());
    };
    insert(&keep, "k", 8);
    keep.flush().unwrap();
    while db.step().unwrap() {}
    let gone = open_partition(&db, "gone");
    insert(&gone, "secret", 6);
    drop(gone);
    db.delete_partition_by_name("gone").unwrap();
    insert(&keep, "l", 4);
    db.persist(PersistMode::SyncData).unwrap();
    let machine = after_kill(&machine);
    // The next process flushes what it has replayed, and makes no commit.
    let db = open_as(&machine, 2, RecoveryMode::Strict).unwrap();
    open_partition(&db, "keep").flush().unwrap();
    while db.step().unwrap() {}
    for mode in MODES {
        let found = keys_of(&open_rebuilt(&machine, mode));
        assert!(found.len() == 12 && found == keys_of(&db), "{mode:?}: {found:?}");
    }
}

/// A recovery to a point in time has abandoned the second segment of a new database, whose first one has no watermark.
#[test]
fn manifest_is_lost_beside_an_abandoned_segment() {
    let machine = MemFs::new();
    let db = open_as(&machine, 1, RecoveryMode::Strict).unwrap();
    let p = open_partition(&db, "p");
    for n in 1..=6 {
        let len = if n == 3 || n == 4 { 0 } else { 20_000 };
        p.insert(format!("k{n}"), marker_value(n) + &"x".repeat(len)).unwrap();
    }
    // As a worker does: syncs the first segment, and creates a spare file.
    while db.step().unwrap() {}
    p.insert("k7", marker_value(7)).unwrap();
    db.persist(PersistMode::SyncData).unwrap();
    let machine = after_kill(&machine);
    damage_record(&machine, 3);
    let db = open_as(&machine, 2, RecoveryMode::PointInTime).unwrap();
    assert_eq!(keys_of(&db), ["k1", "k2"]);
    for mode in MODES {
        assert_eq!(keys_of(&open_rebuilt(&machine, mode)), ["k1", "k2"], "{mode:?}");
    }
}

/// Each process that was killed during a rewrite of the WAL left segments that used the disk reserve. After a few
/// kills, a full disk had no space for the next rewrite. Two attempts of one open, the second with space from the
/// reserve, also used the same epochs, so one segment looked like a copy of the other.
#[test]
fn damaged_logs_open_when_killed_on_full_disks() {
    let base = long_log(100);
    base.set_capacity(Some(base.used_space()));
    let whole = base.fork();
    let before = whole.op_count();
    drop(open_as(&whole, 3, RecoveryMode::Strict).unwrap());
    let ops = whole.op_count() - before;
    for op in (0..ops).step_by(ops as usize / 8) {
        let mut machine = base.fork();
        for life in 0..12 {
            machine.freeze_after(Some(op + life % 3));
            let _killed = open_as(&machine, 3 + life, RecoveryMode::Strict).map(std::mem::forget);
            machine = after_kill(&machine);
        }
        let db = open_as(&machine, 50, RecoveryMode::Strict).unwrap_or_else(|e| panic!("killed at {op} of {ops}: {e}"));
        assert_eq!(counts(&db), (101, 101), "killed at {op} of {ops}");
    }
}

/// On a full disk, opening truncated the old WAL after the damage to free space, before the manifest named the new WAL.
/// A process that was killed then left no WAL.
#[test]
fn old_logs_stay_until_the_new_is_named() {
    let base = long_log(60);
    let capacity = base.used_space() + (384 << 10);
    let whole = base.fork();
    whole.set_capacity(Some(capacity));
    let before = whole.op_count();
    drop(open_as(&whole, 3, RecoveryMode::Strict));
    let ops = whole.op_count() - before;
    for op in (0..=ops).rev().step_by(3) {
        let machine = base.fork();
        machine.set_capacity(Some(capacity));
        machine.freeze_after(Some(op));
        drop(open_as(&machine, 3, RecoveryMode::Strict));
        let later = after_kill(&machine);
        later.set_capacity(None);
        let db = open_as(&later, 4, RecoveryMode::Strict).unwrap_or_else(|e| panic!("killed at {op} of {ops}: {e}"));
        assert_eq!(counts(&db), (61, 61), "killed at {op} of {ops}");
    }
}

/// The end of the WAL was not synced when the process was killed. The new WAL marked its copies of these commits as
/// durable. Power loss during the rewrite made the originals look damaged.
#[test]
fn originals_are_durable_before_their_copies() {
    let machine = MemFs::new();
    let db = open_as(&machine, 1, RecoveryMode::Strict).unwrap();
    long_batches(&db, 1..=6, PersistMode::SyncData);
    ["a", "b"].iter().for_each(|name| open_partition(&db, name).flush().unwrap());
    damage_record(&machine, 3); // needed by no partition
    long_batches(&db, 7..=20, PersistMode::Buffer);
    for op in 0..400 {
        let cut_short = machine.fork(); // the process is killed, the system keeps running
        cut_short.freeze_after(Some(op));
        let done = open_as(&cut_short, 3, RecoveryMode::Strict).map(std::mem::forget).is_ok();
        for seed in 0..4 {
            let crashed = cut_short.fork();
            crashed.crash(if seed == 0 { Survival::Nothing } else { Survival::Random }, op * 4 + seed);
            let db = open_as(&crashed, 4, RecoveryMode::Strict).unwrap_or_else(|e| panic!("operation {op}: {e}"));
            let (a, b) = counts(&db);
            assert!(a == b && a >= 6, "operation {op}: {a} and {b}");
        }
        if done {
            return;
        }
    }
    panic!("the database does not open");
}

/// The end of the manifest was lost, the WAL was damaged, and the disk was full. `PointInTime` removed segments that
/// the manifest no longer listed, and then failed or was killed. `Salvage` would have read these segments, and for
/// `Strict` they proved that the WAL continued. `Strict` then opened without their commits.
#[test]
fn failed_open_removes_no_segment_of_the_log() {
    let machine = MemFs::new();
    let db = open_as(&machine, 1, RecoveryMode::Strict).unwrap();
    write_batches(&db, ["a", "b"], 1..=2);
    ["a", "b"].iter().for_each(|name| open_partition(&db, name).flush().unwrap());
    let len = machine.open(Path::new("/db/MANIFEST"), OpenMode::Read).unwrap().length().unwrap();
    long_batches(&db, 3..=60, PersistMode::SyncData);
    let base = after_kill(&machine);
    truncate_file(&base, "MANIFEST", len);
    damage_record(&base, 1); // needed by no partition
    let (name, used, at) = find_in_wal(&base, marker_value(5).as_bytes());
    overwrite_file(&base, &name, at, &vec![0; (used - at) as usize]);
    let names = |machine: &MemFs| machine.read_dir(Path::new("/db")).unwrap().into_iter().map(|entry| entry.name);
    assert!(names(&base).filter(|name| name.ends_with(".wal")).count() > 3);
    let manifest = |machine: &MemFs| read_file(machine, Path::new("/db/MANIFEST"));
    let salvaged = counts(&open_as(&base.fork(), 2, RecoveryMode::Salvage).unwrap());
    let check = |machine: &MemFs, when: &str| {
        assert!(open_as(&machine.fork(), 4, RecoveryMode::Strict).is_err(), "{when}: Strict opens");
        let db = open_as(&machine.fork(), 4, RecoveryMode::Salvage).unwrap();
        assert_eq!(counts(&db), salvaged, "{when}");
    };
    check(&base, "before");
    let mut failures = 0;
    for space in (0..40).map(|pages| pages * 4096) {
        let full = base.fork();
        full.remove_file(Path::new("/db/RESERVE")).unwrap();
        full.set_capacity(Some(full.used_space() + space));
        let failed = open_as(&full, 3, RecoveryMode::PointInTime).is_err();
        full.set_capacity(None);
        if failed {
            failures += 1;
            check(&full, &format!("{space} bytes of space"));
        }
    }
    for op in 0.. {
        let killed = base.fork();
        killed.set_capacity(Some(killed.used_space()));
        killed.freeze_after(Some(op));
        let done = open_as(&killed, 3, RecoveryMode::PointInTime).map(std::mem::forget).is_ok();
        let killed = after_kill(&killed);
        killed.set_capacity(None);
        if done || manifest(&killed) != manifest(&base) {
            assert!(op > 5);
            break;
        }
        check(&killed, &format!("killed after {op} operations"));
    }
    assert!(failures > 0, "no open failed");
}

/// Recovery dropped WAL frames after damage, in a directory whose name is not UTF-8. `serde` refused the path of the
/// damaged file, and all metrics with it.
#[cfg(unix)]
#[test]
fn metrics_serialize_when_a_path_is_not_utf8() {
    use std::os::unix::ffi::OsStrExt;

    let machine = database_with_uneven_flushes(["a", "b"], 5, &[]);
    damage_record(&machine, 3);
    let (segment, ..) = find_in_wal(&machine, marker_value(4).as_bytes());
    let dir = Path::new(std::ffi::OsStr::from_bytes(b"/db-\xff"));
    machine.rename(Path::new("/db"), dir).unwrap();
    let config = Config::new(dir).fs(Arc::new(machine)).env(Arc::new(TestEnv::new(2))).workers(0);
    let db = config.recovery_mode(RecoveryMode::PointInTime).open().unwrap();
    let json = serde_json::to_value(db.metrics()).unwrap();
    assert_eq!(json["dropped_after_damage"]["file"], format!("/db-\u{fffd}/{segment}"));
}

/// A sync of the WAL failed. The system may count pages as clean that it could not write, and report success at the
/// next sync. The next open only synced the WAL, and recorded it as durable. Power loss then removed a part of it,
/// with commits that were synced after that open: no strict open succeeded.
#[test]
fn wal_of_a_failed_sync_is_written_again() {
    for (mapped, commits) in [(false, 3), (true, 3), (true, 300)] {
        let machine = MemFs::new();
        let faults = FaultFs::new(Arc::new(machine.clone()));
        let open = |fs: Arc<dyn Fs>, salt| {
            let config = Config::new(Path::new("/db")).fs(fs).env(Arc::new(TestEnv::new(salt))).workers(0);
            config.wal_segment_size(64 << 10).mapped_wal(mapped).open().unwrap()
        };
        let insert = |db: &Database, n: u32| open_partition(db, "a").insert(format!("{n:03}"), [7; 1000]).unwrap();
        let db = open(Arc::new(faults.clone()), 1);
        insert(&db, 0);
        db.persist(PersistMode::SyncAll).unwrap();
        (1..commits).for_each(|n| insert(&db, n));
        let fault = Fault::Error(std::io::ErrorKind::Other);
        faults.inject(FaultPlan::new(OpKind::Sync, 1, fault).in_path(".wal"));
        assert_eq!(db.persist(PersistMode::SyncData).unwrap_err().kind(), ErrorKind::Poisoned);
        machine.lose_unsynced_writes(".wal");
        let killed = after_kill(&machine);
        let db_after = open(Arc::new(killed.clone()), 2);
        insert(&db_after, commits);
        db_after.persist(PersistMode::SyncAll).unwrap();
        let lost = killed.fork();
        lost.crash(Survival::Nothing, 0);
        for mode in MODES {
            let db = open_as(&lost.fork(), 3, mode).unwrap_or_else(|e| panic!("{mode:?}, mapped {mapped}: {e}"));
            assert_eq!(partition_keys(&db, "a").len() as u32, commits + 1, "{mode:?}, mapped {mapped}");
        }
        drop((db, db_after));
    }
}
