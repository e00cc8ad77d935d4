//! Segments that are kept for readers of changes only, over opens with other options, with damage, and on a full disk.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use azekura::fs::{Fs, OpenMode};
use azekura::testing::{FaultFs, MemFs, TestEnv};
use azekura::{ChangePosition, Config, Database, ErrorKind, RecoveryMode, Result};

use super::DIR;
use crate::testkit::test_dir::read_file;

const LONG: Duration = Duration::from_secs(1 << 20);
const MODES: [RecoveryMode; 3] = [RecoveryMode::Strict, RecoveryMode::PointInTime, RecoveryMode::Salvage];

fn config(machine: &MemFs) -> Config {
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    Config::new(DIR).fs(fs).env(Arc::new(TestEnv::new(7))).workers(0).wal_segment_size(64 << 10).wal_retention(LONG)
}

/// Inserts `count` values, of which a few fill a segment, and flushes them. Returns the position before each.
fn write(db: &Database, count: u32) -> Vec<ChangePosition> {
    let p = db.open_partition("p", Default::default()).unwrap();
    let positions = (0..count).map(|n| {
        let position = db.change_position().unwrap();
        p.insert(n.to_be_bytes(), [7; 9_000]).unwrap();
        position
    });
    let positions = positions.collect();
    p.flush().unwrap();
    while db.step().unwrap() {}
    positions
}

/// The number of commits after a position.
fn count(db: &Database, position: ChangePosition) -> Result<usize> {
    db.changes_since(position)?.map(|commit| commit.map(drop)).collect::<Result<Vec<()>>>().map(|commits| commits.len())
}

/// Checks that every position gives all commits after it, or is `Stale`. Returns how many are not.
fn readable(db: &Database, positions: &[ChangePosition]) -> usize {
    let mut readable = 0;
    for (at, position) in positions.iter().enumerate() {
        match count(db, *position) {
            Ok(found) => {
                assert_eq!(found, positions.len() - at, "position {at}");
                readable += 1;
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Stale, "position {at}: {error}");
                assert_eq!(readable, 0, "what is kept are the newest");
            }
        }
    }
    readable
}

/// A reader of changes, and an open, had all segments open at once. With many of them, the process had too many files.
#[test]
fn many_segments_need_few_open_files() {
    let machine = MemFs::new();
    let limited = || FaultFs::new(Arc::new(machine.clone()));
    let open = |fs: &FaultFs| {
        let fs: Arc<dyn Fs> = Arc::new(fs.clone());
        config(&machine).fs(fs).max_open_files(8).max_retained_wal_size(1 << 30).open().unwrap()
    };
    let (first, second) = (limited(), limited());
    let db = open(&first);
    let positions = write(&db, 400);
    first.limit_open(Some(30));
    assert_eq!(count(&db, positions[0]).unwrap(), 400);
    let segments = machine.read_dir(Path::new(DIR)).unwrap().iter().filter(|file| file.name.ends_with(".wal")).count();
    assert!(segments > 50, "{segments}");
    db.close().unwrap();
    second.limit_open(Some(30));
    assert_eq!(count(&open(&second), positions[0]).unwrap(), 400);
}

#[test]
fn retention_changes_over_opens() {
    let retentions = [LONG, Duration::ZERO];
    for seed in 0..32u32 {
        let machine = MemFs::new();
        let mut positions = Vec::new();
        let mut kept_from = 0;
        for open in 0..5 {
            let retention = retentions[(seed >> open & 1) as usize];
            let db = config(&machine).wal_retention(retention).open().unwrap();
            let written_before = positions.len();
            if retention.is_zero() {
                kept_from = written_before;
            }
            assert!(readable(&db, &positions) >= written_before - kept_from, "seed {seed}, open {open}");
            positions.extend(write(&db, 20));
            let found = readable(&db, &positions);
            assert!(retention.is_zero() || found >= positions.len() - kept_from, "seed {seed}, open {open}: {found}");
            if retention.is_zero() {
                kept_from = positions.len();
            }
            if (seed + open) % 3 == 0 {
                machine.freeze_after(Some(0)); // killed
                drop(db);
                machine.freeze_after(None);
            } else {
                db.close().unwrap();
            }
        }
    }
}

/// Damage of a retained segment costs positions before its end, and nothing else.
#[test]
fn damaged_retained_segments_are_not_needed() {
    let machine = MemFs::new();
    let db = config(&machine).open().unwrap();
    let positions = write(&db, 60);
    assert_eq!(readable(&db, &positions), 60);
    db.close().unwrap();
    let mut names: Vec<_> = machine.read_dir(DIR.as_ref()).unwrap().into_iter().map(|entry| entry.name).collect();
    names.retain(|name| name.ends_with(".wal"));
    names.sort();
    names.pop(); // it has the end of the log
    assert!(names.len() > 5, "{names:?}");
    let mut fewer = 0;
    for name in &names {
        let path = Path::new(DIR).join(name);
        for (at, mode) in [0, 20, 45, 600, 30_000].into_iter().flat_map(|at| MODES.map(|mode| (at, mode))) {
            let machine = machine.fork();
            machine.freeze_after(None);
            let file = machine.open(&path, OpenMode::Write).unwrap();
            let byte = read_file(&machine, &path).get(at).copied();
            let Some(byte) = byte else { continue };
            file.write_at(&[!byte], at as u64).unwrap();
            let what = format!("{name} at {at}, {mode:?}");
            let db = config(&machine).recovery_mode(mode).open().unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(db.partition("p").unwrap().len().unwrap(), 60, "{what}");
            for (at, position) in positions.iter().enumerate() {
                match count(&db, *position) {
                    Ok(found) => assert_eq!(found, 60 - at, "{what}"),
                    Err(error) => {
                        let kinds = [ErrorKind::Stale, ErrorKind::Corruption];
                        assert!(kinds.contains(&error.kind()), "{what}: {error}");
                        fewer += 1;
                    }
                }
            }
            let last = db.change_position().unwrap();
            write(&db, 20);
            assert_eq!(count(&db, last).unwrap(), 20, "{what}");
            db.close().unwrap();
            let db = config(&machine).open().unwrap_or_else(|error| panic!("{what}, opened again: {error}"));
            assert_eq!(count(&db, last).unwrap(), 20, "{what}");
        }
    }
    assert!(fewer > 0, "damage has an effect");
}

/// Regression: a salvage lost a commit in the middle of the log. The position before the first commit, whose number is
/// 0, stayed valid, and its reader passed over the lost commit.
#[test]
fn first_position_is_stale_after_a_salvage() {
    for mode in MODES {
        let machine = MemFs::new();
        let db = config(&machine).open().unwrap();
        let p = db.open_partition("p", Default::default()).unwrap();
        let start = db.change_position().unwrap();
        assert_eq!(start.sequence_number(), 0);
        for value in *b"abc" {
            p.insert([value], [value; 100]).unwrap();
        }
        machine.freeze_after(Some(0)); // killed
        drop((db, p));
        machine.freeze_after(None);
        let mut damaged = 0;
        for entry in machine.read_dir(DIR.as_ref()).unwrap().iter().filter(|entry| entry.name.ends_with(".wal")) {
            let path = Path::new(DIR).join(&entry.name);
            if let Some(at) = read_file(&machine, &path).windows(100).position(|window| window == [b'b'; 100]) {
                machine.open(&path, OpenMode::Write).unwrap().write_at(b"x", at as u64).unwrap();
                damaged += 1;
            }
        }
        assert_eq!(damaged, 1);
        let Ok(db) = config(&machine).recovery_mode(mode).open() else {
            assert_eq!(mode, RecoveryMode::Strict);
            continue;
        };
        match (mode, db.partition("p").unwrap().len().unwrap()) {
            (RecoveryMode::Salvage, 2) => assert_eq!(count(&db, start).unwrap_err().kind(), ErrorKind::Stale),
            (_, len) => assert_eq!(count(&db, start).unwrap() as u64, len, "{mode:?}"),
        }
        let next = db.change_position().unwrap();
        db.partition("p").unwrap().insert("d", "4").unwrap();
        assert_eq!(count(&db, next).unwrap(), 1, "{mode:?}");
    }
}

/// On a full disk, the database opens if retained segments have the space that opening needs, also if it is killed
/// while it opens.
#[test]
fn full_disk_frees_retained_segments_at_open() {
    for (reserve, life) in [0, 1 << 20].into_iter().flat_map(|reserve| (0..40).map(move |life| (reserve, life))) {
        let machine = MemFs::new();
        let open = || config(&machine).disk_reserve(reserve).open();
        let db = open().unwrap();
        let positions = write(&db, 60);
        db.close().unwrap();
        let used = machine.used_space();
        machine.set_capacity(Some(used));
        let what = format!("reserve {reserve}, life {life}");
        for kill in 0..5 {
            if kill > 0 {
                machine.freeze_after(Some(life));
                drop(open());
                machine.freeze_after(None);
            }
            let db = open().unwrap_or_else(|error| panic!("{what}, open {kill}: {error}"));
            assert_eq!(db.partition("p").unwrap().len().unwrap(), 60, "{what}");
            for (at, position) in positions.iter().enumerate() {
                match count(&db, *position) {
                    Ok(found) => assert_eq!(found, 60 - at + 2 * kill, "{what}"),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Stale, "{what}: {error}"),
                }
            }
            let last = db.change_position().unwrap();
            db.partition("p").unwrap().remove(0u32.to_be_bytes()).unwrap();
            db.partition("p").unwrap().insert(0u32.to_be_bytes(), "x").unwrap();
            assert_eq!(count(&db, last).unwrap(), 2, "{what}");
            machine.freeze_after(Some(0)); // killed
            drop(db);
            machine.freeze_after(None);
        }
    }
}
