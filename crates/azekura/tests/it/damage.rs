//! Damage of every kind to the files of a small database: reads return correct data or an error that names the file.
//!
//! The only exception is the WAL above its highest durable watermark, where damage looks like power loss: the log ends
//! there, and valid commits behind it are reported.
//!
//! - `AZEKURA_FLIP_STRIDE`: flips only every n-th byte; 11 by default.
//! - `AZEKURA_CUT_STRIDE`: truncates at every n-th length; 31 by default.
//!
//! Modules, in reading order: `sample` (the database), `reused_files` (the same after several opens), `check` (the
//! permitted effects).

mod check;
mod reused_files;
mod sample;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use azekura::fs::{Fs, OpenMode};
use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind};
use azekura::{ErrorKind, RecoveryMode, inspect};

use crate::testkit::env_u64;
use crate::testkit::test_dir::{dir_contents, write_file};
use check::{DamageOpenMode, DamageOutcome, DamagedDatabase};
use sample::{DIR, SampleDatabase};

fn file_path(name: &str) -> PathBuf {
    Path::new(DIR).join(name)
}

/// Counts of each outcome by kind of file, and the violations.
#[derive(Default)]
struct DamageOutcomes {
    outcomes: BTreeMap<(String, DamageOutcome), u64>,
    total: u64,
    wrong: Vec<String>,
}

impl DamageOutcomes {
    fn record_outcome(
        &mut self,
        file: &str,
        what: &str,
        outcome: Result<DamageOutcome, String>,
    ) -> Option<DamageOutcome> {
        self.total += 1;
        let kind = file.rsplit('.').next().unwrap_or(file).to_owned();
        match outcome {
            Ok(outcome) => {
                *self.outcomes.entry((kind, outcome)).or_default() += 1;
                Some(outcome)
            }
            Err(wrong) => {
                self.wrong.push(format!("{file}, {what}: {wrong}"));
                None
            }
        }
    }

    fn assert_no_failures(self, name: &str) {
        println!("{name}: {} damaged files: {:?}", self.total, self.outcomes);
        let shown: Vec<&String> = self.wrong.iter().take(12).collect();
        assert!(self.wrong.is_empty(), "{name}: {} of {} wrong: {shown:#?}", self.wrong.len(), self.total);
    }
}

/// Damage to one file that moves no frame behind it.
fn damage_in_place<'a>(sample: &'a SampleDatabase, file: &str) -> DamagedDatabase<'a> {
    let floor = sample.history.durable;
    DamagedDatabase { sample, files: vec![file.into()], floor, is_cut: false, reports_dropped: file.ends_with(".wal") }
}

/// The problems that `verify` finds in a file.
fn verify_finds_damage_in(machine: &MemFs, file: &str) -> bool {
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    let report = inspect::verify(&fs, Path::new(DIR), &mut |_, _| {}).unwrap();
    report.dropped_after_damage.is_some()
        || report.files.iter().any(|found| found.path == file_path(file) && found.problem.is_some())
}

/// Flips every `stride`-th byte of every file in two ways, opens and reads. Readers are read-only handles and followers
/// in turn.
fn check_flipped_bytes(name: &str, sample: &SampleDatabase, stride: usize) {
    let machine = sample.machine();
    let mut outcomes = DamageOutcomes::default();
    let mut unseen = Vec::new();
    for (name, bytes) in &sample.files {
        let damage = damage_in_place(sample, name);
        // Whole pages under one checksum each, most of them empty.
        let stride = if name.ends_with(".pool") || name.ends_with(".shadow") { 5 * stride } else { stride };
        for at in (0..bytes.len()).step_by(stride) {
            let reader =
                if (at / stride).is_multiple_of(2) { DamageOpenMode::ReadOnly } else { DamageOpenMode::Follower };
            for (pattern, how) in [(0x01, DamageOpenMode::Writing), (0xff, reader)] {
                let flipped = machine.fork();
                let file = flipped.open(&file_path(name), OpenMode::Write).unwrap();
                file.write_at(&[bytes[at] ^ pattern], at as u64).unwrap();
                drop(file);
                let seen = !(at / stride).is_multiple_of(5) || verify_finds_damage_in(&flipped, name);
                let outcome = damage.check(&flipped, how);
                let outcome = outcomes.record_outcome(name, &format!("byte {at} ^ {pattern:#x}"), outcome);
                // A torn tail is not damage.
                let harmless = [Some(DamageOutcome::Unaffected), Some(DamageOutcome::WalEndsEarly)].contains(&outcome);
                if !seen && (name.ends_with(".sst") || name.ends_with(".blob") || !harmless) {
                    unseen.push(format!("{name} byte {at} ^ {pattern:#x} ({outcome:?})"));
                }
            }
        }
    }
    outcomes.assert_no_failures(name);
    let shown = &unseen[..unseen.len().min(9)];
    assert!(unseen.is_empty(), "{name}: verify finds nothing wrong with {}: {shown:#?}", unseen.len());
}

fn flip_stride() -> usize {
    env_u64("AZEKURA_FLIP_STRIDE", 11).max(1) as usize
}

#[test]
fn flipped_byte_is_harmless_or_reported() {
    check_flipped_bytes("flips", &SampleDatabase::new(1), flip_stride());
}

#[test]
fn flipped_bytes_in_reused_files_are_reported() {
    check_flipped_bytes("flips, worn", &SampleDatabase::with_reused_files(1), flip_stride() * 50);
}

/// Recovery modes that permit damage open every damaged WAL, and return no pair that was never written.
#[test]
fn forgiving_modes_open_and_make_nothing_up() {
    let sample = SampleDatabase::without_ingests(7);
    let machine = sample.machine();
    let mut opened = 0;
    for (name, bytes) in sample.files.iter().filter(|(name, _)| name.ends_with(".wal")) {
        for at in (0..bytes.len()).step_by(13) {
            let flipped = machine.fork();
            let file = flipped.open(&file_path(name), OpenMode::Write).unwrap();
            file.write_at(&[bytes[at] ^ 0x10], at as u64).unwrap();
            drop(file);
            for mode in [RecoveryMode::PointInTime, RecoveryMode::Salvage] {
                let fs: Arc<dyn Fs> = Arc::new(flipped.fork());
                let db = sample::config(fs, 3).recovery_mode(mode).open();
                let db = db.unwrap_or_else(|e| panic!("{mode:?}, byte {at}: {e}"));
                opened += 1;
                check::check_only_written_pairs(&db, &sample, mode == RecoveryMode::PointInTime)
                    .unwrap_or_else(|e| panic!("{mode:?}, byte {at}: {e}"));
            }
        }
    }
    println!("{opened} damaged logs opened");
}

#[test]
fn truncation_is_harmless_or_reported() {
    let stride = env_u64("AZEKURA_CUT_STRIDE", 31).max(1) as usize;
    let mut outcomes = DamageOutcomes::default();
    for (sample, stride) in [
        (SampleDatabase::new(2), stride),
        (SampleDatabase::closed(2), stride),
        (SampleDatabase::with_reused_files(2), stride * 50),
    ] {
        let machine = sample.machine();
        for (name, bytes) in &sample.files {
            // A truncated WAL loses the watermarks at its end, so truncation looks like power loss.
            let whole = damage_in_place(&sample, name);
            let damage = DamagedDatabase { floor: sample.flushed, is_cut: true, reports_dropped: false, ..whole };
            let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
            let modes = [DamageOpenMode::Writing, DamageOpenMode::ReadOnly, DamageOpenMode::Follower];
            for (len, how) in (0..used.min(bytes.len())).step_by(stride).zip(modes.into_iter().cycle()) {
                let cut = machine.fork();
                cut.open(&file_path(name), OpenMode::Write).unwrap().set_length(len as u64).unwrap();
                outcomes.record_outcome(name, &format!("cut to {len} of {}", bytes.len()), damage.check(&cut, how));
            }
        }
    }
    outcomes.assert_no_failures("truncations");
}

#[test]
fn missing_empty_and_longer_files_are_reported() {
    let mut outcomes = DamageOutcomes::default();
    for sample in [SampleDatabase::new(3), SampleDatabase::closed(3)] {
        let machine = sample.machine();
        for name in sample.files.keys() {
            let damage =
                DamagedDatabase { floor: sample.flushed, reports_dropped: false, ..damage_in_place(&sample, name) };
            for how in [DamageOpenMode::Writing, DamageOpenMode::ReadOnly, DamageOpenMode::Follower] {
                let missing = machine.fork();
                missing.remove_file(&file_path(name)).unwrap();
                outcomes.record_outcome(name, "missing", damage.check(&missing, how));
                let empty = machine.fork();
                write_file(&empty, &file_path(name), b"");
                outcomes.record_outcome(name, "empty", damage.check(&empty, how));
                let zeros = machine.fork();
                write_file(&zeros, &file_path(name), &vec![0; sample.files[name].len()]);
                outcomes.record_outcome(name, "zeros", damage.check(&zeros, how));
                let longer = machine.fork();
                let file = longer.open(&file_path(name), OpenMode::Write).unwrap();
                file.write_at(&[7; 100], file.length().unwrap()).unwrap();
                drop(file);
                outcomes.record_outcome(name, "longer", damage.check(&longer, how));
            }
        }
    }
    outcomes.assert_no_failures("missing, empty, zeros, longer");
}

#[test]
fn swapped_and_foreign_files_are_reported() {
    let mut outcomes = DamageOutcomes::default();
    let (sample, twin) = (SampleDatabase::new(4), SampleDatabase::new(5));
    let machine = sample.machine();
    let names: Vec<&String> = sample.files.keys().collect();
    for (i, one) in names.iter().enumerate() {
        for other in &names[i + 1..] {
            let swapped = machine.fork();
            write_file(&swapped, &file_path(one), &sample.files[*other]);
            write_file(&swapped, &file_path(other), &sample.files[*one]);
            let mut damage = damage_in_place(&sample, one);
            damage.files.push(other.to_string());
            outcomes.record_outcome(
                one,
                &format!("swapped with {other}"),
                damage.check(&swapped, DamageOpenMode::Writing),
            );
        }
        if let Some(bytes) = twin.files.get(*one) {
            let foreign = machine.fork();
            write_file(&foreign, &file_path(one), bytes);
            // The error may name any file, because each may be the foreign one.
            let files = sample.files.keys().cloned().collect();
            let damage = DamagedDatabase { files, ..damage_in_place(&sample, one) };
            outcomes.record_outcome(one, "of another database", damage.check(&foreign, DamageOpenMode::Writing));
        }
    }
    outcomes.assert_no_failures("swapped, foreign");
}

/// The files of a database with two pools, each of which has a shadow whose pages have not reached the image.
fn pools_at(salt: u64, checkpoints: u32) -> BTreeMap<String, Vec<u8>> {
    let mem = MemFs::new();
    let faulty = FaultFs::new(Arc::new(mem.clone()));
    let db = sample::config(Arc::new(faulty.clone()), salt).open().unwrap();
    let partitions = ["one", "two"].map(|name| db.open_partition(name, sample::options("pooled")).unwrap());
    let filler = db.open_partition("filler", Default::default()).unwrap();
    for n in 0..=checkpoints {
        // The flush retires the log of earlier checkpoints, so that replay cannot bring an older image up to date.
        filler.insert("k", vec![n as u8; 70_000]).unwrap();
        filler.flush().unwrap();
        for (part, name) in partitions.iter().zip(["one", "two"]) {
            (0..40).for_each(|k| part.insert(format!("{k:02}"), format!("{salt} {name} {n}")).unwrap());
            // A record that no later round replaces.
            part.insert(format!("round {n}"), name).unwrap();
            if n == checkpoints {
                let broken = Fault::Error(std::io::ErrorKind::Other);
                faulty.inject(FaultPlan::new(OpKind::Write, 1, broken).in_path(".pool").forever());
            }
            assert_eq!(part.flush().is_err(), n == checkpoints);
        }
    }
    dir_contents(&mem.fork(), Path::new(DIR))
}

/// The contents of the pools on a machine with `files`.
fn pools_in(files: &BTreeMap<String, Vec<u8>>) -> azekura::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let machine = MemFs::new();
    machine.create_dir_all(Path::new(DIR))?;
    files.iter().for_each(|(name, bytes)| write_file(&machine, &file_path(name), bytes));
    let db = sample::config(Arc::new(machine), 1).open()?;
    let mut pairs = Vec::new();
    for name in ["one", "two"] {
        for pair in db.open_partition(name, sample::options("pooled"))?.iter() {
            let (key, value) = pair?;
            pairs.push((key.to_vec(), value.to_vec()));
        }
    }
    Ok(pairs)
}

/// Images and shadows replaced by those of other partitions, of another database, and of earlier states.
#[test]
fn swapped_pool_files_are_right_or_refused() {
    let now = pools_at(8, 3);
    let others = [pools_at(8, 1), pools_at(8, 2), pools_at(9, 3)];
    let names: Vec<&String> = now.keys().filter(|name| name.ends_with(".pool") || name.ends_with(".shadow")).collect();
    assert_eq!(names.len(), 4);
    let all: Vec<&Vec<u8>> =
        others.iter().chain([&now]).flat_map(|files| names.iter().map(move |n| &files[*n])).collect();
    let wanted = pools_in(&now).unwrap();
    assert_eq!(wanted.len(), 2 * (40 + 4));
    let mut seen = [0; 2];
    for (i, place) in names.iter().enumerate() {
        // The other file of the same pool may be replaced too.
        for (bytes, other) in all.iter().flat_map(|bytes| all.iter().map(move |other| (bytes, other))) {
            let mut files = now.clone();
            files.insert(place.to_string(), bytes.to_vec());
            files.insert(names[i ^ 1].clone(), other.to_vec());
            let opened = pools_in(&files);
            seen[usize::from(opened.is_err())] += 1;
            match opened {
                Ok(found) => assert!(found == wanted, "{place}: wrong records"),
                Err(error) => assert!(error.kind() == ErrorKind::Corruption && error.file().is_some(), "{error}"),
            }
        }
    }
    println!("{seen:?} correct and refused");
    assert!(seen[0] > 0 && seen[1] > 500, "{seen:?}");
}

#[test]
fn unknown_files_are_neither_read_nor_removed() {
    let sample = SampleDatabase::new(6);
    let table = sample.files.iter().find(|(name, _)| name.ends_with(".sst")).map(|(_, bytes)| bytes.clone()).unwrap();
    let extras: [(&str, &[u8], bool); 8] = [
        ("notes.txt", b"mine", true),
        ("000007.sst.bak", &table, true),
        ("7.sst", &table, true),
        ("manifest", b"", true),
        ("MANIFEST.tmp", b"half a manifest", false),
        ("009999.sst", &table, false),
        ("009998.sst", b"", false),
        ("009997.wal", b"no segment", false),
    ];
    let machine = sample.machine();
    machine.create_dir_all(&file_path("directory")).unwrap();
    for (name, bytes, _) in extras {
        write_file(&machine, &file_path(name), bytes);
    }
    let damage = damage_in_place(&sample, "");
    let readers = [DamageOpenMode::ReadOnly, DamageOpenMode::Follower];
    for how in readers.into_iter().chain([DamageOpenMode::Writing; 2]) {
        assert_eq!(damage.check(&machine, how), Ok(DamageOutcome::Unaffected), "{how:?}");
    }
    for (name, _, stays) in extras {
        assert!(!stays || machine.exists(&file_path(name)).unwrap(), "{name} is not obsolete and was removed");
    }
    assert!(machine.exists(&file_path("directory")).unwrap());
}
