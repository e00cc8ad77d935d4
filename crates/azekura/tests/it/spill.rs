//! Records of the WAL that wait for a comparator are spilled to tables if they hold a WAL that is too large.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use azekura::fs::{Fs, OpenMode};
use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, Survival, TestEnv, TestOrder};
use azekura::{
    CompressionType, Config, Database, EngineType, ErrorKind, KvSeparationOptions, Partition, PartitionCreateOptions,
    PersistMode, PmemOptions, Result, inspect,
};

use crate::testkit::watchdog::wait_until;

const DIR: &str = "/db";
const MAX_LOG: u64 = 128 << 10;
/// Partitions with a comparator: an LSM partition with direct blob writes, and a pool.
const LATE: [&str; 2] = ["tables", "pool"];

type State = BTreeMap<(&'static str, Vec<u8>), Vec<u8>>;

fn config(machine: &MemFs, salt: u64) -> Config {
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    Config::new(Path::new(DIR))
        .fs(fs)
        .env(Arc::new(TestEnv::new(salt)))
        .workers(0)
        .wal_segment_size(64 << 10)
        .max_wal_size(MAX_LOG)
}

fn late(db: &Database, name: &str) -> Result<Partition> {
    let separation =
        KvSeparationOptions::default().separation_threshold(500).direct_write_threshold(2_000).automatic_gc(None);
    let options = match name {
        "pool" => PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default().max_size(1 << 20))),
        _ => PartitionCreateOptions::default()
            .max_memtable_size(48 << 10)
            .compression(CompressionType::None)
            .with_kv_separation(separation),
    };
    db.open_partition_with_comparator(name, options, TestOrder::Reversed.comparator().unwrap())
}

/// Content of the partitions with a comparator.
fn contents(db: &Database) -> Result<State> {
    let mut state = State::new();
    for name in LATE {
        for entry in late(db, name)?.iter() {
            let (key, value) = entry?;
            state.insert((name, key.to_vec()), value.to_vec());
        }
    }
    Ok(state)
}

/// Writes to a partition without a comparator until the WAL has been too large, and does all background work.
fn fill(db: &Database, salt: u8) -> Result<()> {
    let plain = db.open_partition("plain", Default::default())?;
    for n in 0..200u8 {
        plain.insert([n % 10], vec![salt ^ n; 2_000])?;
        if n % 40 == 39 {
            plain.flush()?;
        }
    }
    plain.flush()?;
    while db.step()? {}
    Ok(())
}

/// Tables that the manifest names but that are on no level of a partition.
fn spilled_tables(machine: &MemFs) -> Vec<String> {
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    let listed = inspect::tables(&fs, Path::new(DIR)).unwrap();
    let files = inspect::verify(&fs, Path::new(DIR), &mut |_, _| {}).unwrap().files;
    let tables = files.iter().filter(|file| file.kind == "table");
    let names = tables.map(|file| file.path.file_name().unwrap().to_str().unwrap().to_owned());
    names.filter(|name| !listed.iter().any(|table| *name == format!("{:06}.sst", table.id))).collect()
}

/// A database that is reopened several times, with and without its comparators, on a machine that may stop at any
/// operation.
struct Lives {
    machine: MemFs,
    stop_at: Option<u64>,
    salt: u64,
    /// The synced state, and the state with the commit in progress.
    synced: State,
    under_way: State,
}

impl Lives {
    fn new(machine: MemFs, ops: Option<u64>) -> Lives {
        machine.freeze_after(ops);
        let stop_at = ops.map(|ops| machine.op_count() + ops);
        Lives { machine, stop_at, salt: 0, synced: State::new(), under_way: State::new() }
    }

    fn open(&mut self) -> Result<Database> {
        self.salt += 1;
        config(&self.machine, self.salt).open()
    }

    /// Kills the process.
    fn kill(&mut self, db: Database) {
        self.machine.freeze_after(Some(0));
        drop(db);
        self.machine.crash(Survival::Everything, 0);
        self.machine.freeze_after(self.stop_at.map(|at| at.saturating_sub(self.machine.op_count())));
    }

    /// Commits one batch to both partitions, synced.
    fn commit(&mut self, db: &Database, writes: &[(&[u8], Option<Vec<u8>>)]) -> Result<()> {
        let partitions = [late(db, LATE[0])?, late(db, LATE[1])?];
        let mut batch = db.batch();
        batch.durability(PersistMode::SyncData);
        for (name, part) in LATE.into_iter().zip(&partitions) {
            for (key, value) in writes {
                match value {
                    Some(value) => {
                        batch.insert(part, key, value);
                        self.under_way.insert((name, key.to_vec()), value.clone());
                    }
                    None => {
                        match (name == LATE[0]) ^ key.ends_with(&[5]) {
                            true => batch.remove_range(part, *key..=*key),
                            false => batch.remove(part, key),
                        }
                        self.under_way.remove(&(name, key.to_vec()));
                    }
                }
            }
        }
        batch.commit()?;
        self.synced.clone_from(&self.under_way);
        Ok(())
    }

    fn check(&self, db: &Database) -> Result<()> {
        assert!(contents(db)? == self.synced, "in life {}", self.salt);
        Ok(())
    }

    fn play(&mut self) -> Result<()> {
        let db = self.open()?;
        let long = vec![7; 65_535];
        for n in 0..12u8 {
            let key = [b'k', n % 8];
            self.commit(&db, &[(&key, Some(vec![n; 300 * usize::from(n)])), (&[n, 1], Some(vec![n; 20]))])?;
        }
        self.commit(&db, &[(&long, Some(vec![1; 3_000])), (b"k\x03", None), (b"", Some(vec![2; 9]))])?;
        self.commit(&db, &[(b"last", Some(vec![5; 5]))])?;
        self.kill(db);
        // Spilled twice: the tables of both spills have to be read.
        let db = self.open()?;
        fill(&db, 1)?;
        self.kill(db);
        assert!(self.machine.is_frozen() || spilled_tables(&self.machine).len() == 2);
        let db = config(&self.machine, 90).max_wal_size(1 << 20).open()?;
        self.check(&db)?;
        self.commit(&db, &[(b"k\x01", Some(vec![9; 50])), (b"k\x05", None)])?;
        // The full memtables were sealed, and only those are flushed: the last of the spilled records is not flushed.
        db.step()?;
        self.kill(db);
        for salt in 2..4 {
            let db = self.open()?;
            fill(&db, salt)?;
            self.kill(db);
            // One table of each spill for both partitions: the older ones are still needed.
            assert!(self.machine.is_frozen() || spilled_tables(&self.machine).len() == 4);
        }
        let db = self.open()?;
        self.check(&db)?;
        self.commit(&db, &[(b"k\x02", Some(vec![4; 700])), (b"", None), (&long, Some(vec![3; 10]))])?;
        fill(&db, 4)?;
        db.close()?;
        let db = self.open()?;
        self.check(&db)?;
        db.close()
    }
}

fn is_clean(machine: &MemFs) {
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    let report = inspect::verify(&fs, Path::new(DIR), &mut |_, _| {}).unwrap();
    assert!(report.is_clean(), "{report:?}");
}

/// A partition without its comparator pinned the WAL. The WAL grew without bound, and every open read all of it.
#[test]
fn abandoned_partition_does_not_hold_the_log() {
    let mut runs = Lives::new(MemFs::new(), None);
    let db = runs.open().unwrap();
    runs.commit(&db, &[(b"key", Some(vec![1; 3_000]))]).unwrap();
    runs.kill(db);
    for salt in 0..5 {
        let db = runs.open().unwrap();
        fill(&db, salt).unwrap();
        let live = db.metrics().wal_live_bytes;
        assert!(live <= 2 * MAX_LOG, "{live} bytes of WAL in open {salt}");
        assert_eq!(db.partition("tables").unwrap_err().kind(), ErrorKind::Invalid);
        runs.kill(db);
        is_clean(&runs.machine);
    }
    let db = runs.open().unwrap();
    runs.check(&db).unwrap();
}

#[test]
fn spilled_records_survive_crash_anywhere() {
    let mut whole = Lives::new(MemFs::new(), None);
    whole.play().unwrap();
    is_clean(&whole.machine);
    assert_eq!(spilled_tables(&whole.machine), [""; 0]);
    let (ops, points) = (whole.machine.op_count(), 250);
    for i in 0..points {
        let mut runs = Lives::new(MemFs::new(), Some(i * ops / points + i % (ops / points)));
        if let Err(error) = runs.play() {
            assert!(runs.machine.is_frozen(), "point {i}: {error}");
        }
        let survival = [Survival::Nothing, Survival::Everything, Survival::Random][i as usize % 3];
        runs.machine.crash(survival, i);
        runs.stop_at = None;
        let machine = runs.machine.clone();
        let read = |synced: &State, under_way: &State, salt| {
            let db = config(&machine, salt).open().unwrap();
            let found = contents(&db).unwrap();
            assert!(found == *synced || found == *under_way, "point {i} of {ops}, {survival:?}");
            (db, found)
        };
        let (db, found) = read(&runs.synced, &runs.under_way, 1_000);
        // First with the comparators and a kill, then without them, so that the records that were read are spilled
        // again.
        runs.kill(db);
        let db = config(&runs.machine, 1_001).open().unwrap();
        fill(&db, 7).unwrap();
        drop(db);
        let (db, _) = read(&found, &found, 1_002);
        db.close().unwrap();
        is_clean(&runs.machine);
    }
}

/// A database with spilled records, and these records.
fn spilled() -> (MemFs, State) {
    let mut runs = Lives::new(MemFs::new(), None);
    let db = runs.open().unwrap();
    for n in 0..9u8 {
        runs.commit(&db, &[(&[n], Some(vec![n; 1_000 * usize::from(n)]))]).unwrap();
    }
    runs.kill(db);
    let db = runs.open().unwrap();
    fill(&db, 1).unwrap();
    db.close().unwrap();
    assert_eq!(spilled_tables(&runs.machine).len(), 2);
    (runs.machine, runs.synced)
}

#[test]
fn spilled_records_are_in_a_checkpoint() {
    let (machine, state) = spilled();
    let db = config(&machine, 50).open().unwrap();
    db.checkpoint("/copy").unwrap();
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    let copy = Config::new(Path::new("/copy")).fs(Arc::clone(&fs)).env(Arc::new(TestEnv::new(51))).workers(0);
    assert!(inspect::verify(&fs, Path::new("/copy"), &mut |_, _| {}).unwrap().is_clean());
    assert!(contents(&copy.clone().open_read_only().unwrap()).unwrap() == state, "read only");
    assert!(contents(&copy.open().unwrap()).unwrap() == state);
    assert!(contents(&db).unwrap() == state);
}

/// After the comparator was given, no tree listed the spilled tables, so they stayed until the next open.
#[test]
fn spilled_tables_are_removed_on_deletion() {
    let machine = MemFs::new();
    let db = config(&machine, 1).open().unwrap();
    for name in LATE {
        let part = late(&db, name).unwrap();
        (0..20u8).for_each(|n| part.insert([n], [n; 300]).unwrap());
    }
    db.persist(PersistMode::SyncData).unwrap();
    let killed = machine.fork();
    let db = config(&killed, 2).open().unwrap();
    fill(&db, 3).unwrap();
    let before = spilled_tables(&killed);
    assert!(!before.is_empty(), "tables were spilled");
    for name in LATE {
        drop(late(&db, name).unwrap());
        db.delete_partition_by_name(name).unwrap();
    }
    let fs = Arc::new(killed.clone()) as Arc<dyn Fs>;
    let files_and_tables = || {
        let names = killed.read_dir(Path::new(DIR)).unwrap().into_iter().map(|entry| entry.name);
        let files = names.filter(|name| name.ends_with(".sst")).count();
        (files, inspect::tables(&fs, Path::new(DIR)).unwrap().len())
    };
    // A thread of another test may be pinned in an epoch, which keeps the removed files a little longer.
    wait_until("all tables have an owner", || {
        let more = db.step().unwrap();
        let (files, tables) = files_and_tables();
        !more && files == tables
    });
}

#[test]
fn spilled_tables_go_with_deleted_partition() {
    let (machine, _) = spilled();
    let names = spilled_tables(&machine);
    let db = config(&machine, 50).open().unwrap();
    LATE.iter().for_each(|name| db.delete_partition_by_name(name).unwrap());
    db.close().unwrap();
    assert_eq!(spilled_tables(&machine), [""; 0]);
    config(&machine, 51).open().unwrap();
    for name in names {
        assert!(!machine.exists(&Path::new(DIR).join(&name)).unwrap(), "{name} still exists");
    }
}

/// One failed read lost the pool. A checkpoint had no file of it and did not open, and the deletion of the partition
/// did not remove its files.
#[test]
fn unread_spilled_table_loses_no_pool() {
    let (machine, mut state) = spilled();
    let faults = FaultFs::new(Arc::new(machine.clone()));
    let open = |dir: &str, salt| {
        let config = Config::new(Path::new(dir)).fs(Arc::new(faults.clone())).env(Arc::new(TestEnv::new(salt)));
        config.workers(0).open().unwrap()
    };
    let db = open(DIR, 50);
    faults.inject(FaultPlan::new(OpKind::Read, 1, Fault::Error(io::ErrorKind::Other)).in_path(".sst"));
    assert_eq!(late(&db, "pool").unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(faults.fault_count(), 1);
    assert_eq!(db.partition("pool").unwrap_err().kind(), ErrorKind::Io);
    db.checkpoint("/copy").unwrap();
    assert!(contents(&open("/copy", 51)).unwrap() == state);
    db.delete_partition_by_name("pool").unwrap();
    db.delete_partition_by_name("plain").unwrap();
    let names = machine.read_dir(Path::new(DIR)).unwrap().into_iter().map(|entry| entry.name);
    assert_eq!(names.filter(|name| name.contains(".pool")).collect::<Vec<_>>(), [""; 0]);
    state.retain(|(name, _), _| *name == "tables");
    let count = late(&db, "tables").unwrap().iter().count();
    assert_eq!(count, state.len());
}

#[test]
fn damaged_spilled_table_closes_one_partition() {
    let (machine, state) = spilled();
    for name in spilled_tables(&machine) {
        let damaged = machine.fork();
        let file = damaged.open(&Path::new(DIR).join(&name), OpenMode::Write).unwrap();
        file.write_at(&[0xFF; 64], file.length().unwrap() / 2).unwrap();
        let db = config(&damaged, 50).open().unwrap();
        let opened = LATE.map(|late_name| late(&db, late_name));
        let refused = opened.iter().filter_map(|part| part.as_ref().err()).collect::<Vec<_>>();
        assert_eq!(refused.len(), 1, "{name}");
        assert_eq!(refused[0].kind(), ErrorKind::Corruption);
        assert!(refused[0].file().is_some_and(|file| file.ends_with(&name)), "{:?}", refused[0]);
        let right = opened.iter().position(|part| part.is_ok()).unwrap();
        let found = opened[right].as_ref().unwrap().iter().count();
        assert_eq!(found, state.keys().filter(|(partition, _)| *partition == LATE[right]).count());
        damaged.remove_file(&Path::new(DIR).join(&name)).unwrap();
        drop((opened, db));
        assert_eq!(config(&damaged, 51).open().unwrap_err().kind(), ErrorKind::Corruption, "a missing file");
    }
}
