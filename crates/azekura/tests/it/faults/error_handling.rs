//! The effect of each kind of failure: a failed sync ends writing, a full disk interrupts it.

use std::io;
use std::path::Path;
use std::sync::Arc;

use azekura::fs::Fs;
use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, Survival, TestEnv};
use azekura::{Config, Database, ErrorKind, Partition, PersistMode};

const EIO: Fault = Fault::Error(io::ErrorKind::Other);
const ENOSPC: Fault = Fault::Error(io::ErrorKind::StorageFull);

struct FaultFixture {
    machine: MemFs,
    fs: FaultFs,
    db: Database,
    partition: Partition,
}

fn config(fs: Arc<dyn Fs>, mapped: bool) -> Config {
    Config::new(Path::new("/db")).fs(fs).env(Arc::new(TestEnv::new(1))).workers(0).mapped_wal(mapped)
}

impl FaultFixture {
    fn new(mapped: bool) -> FaultFixture {
        let machine = MemFs::new();
        let fs = FaultFs::new(Arc::new(machine.clone()));
        let db = config(Arc::new(fs.clone()), mapped).wal_segment_size(64 << 10).open().unwrap();
        let p = db.open_partition("p", Default::default()).unwrap();
        p.insert("old", "v").unwrap();
        FaultFixture { machine, fs, db, partition: p }
    }

    fn synced_insert(&self, key: &str) -> Result<(), ErrorKind> {
        let mut batch = self.db.batch();
        batch.durability(PersistMode::SyncData);
        batch.insert(&self.partition, key, "v");
        batch.commit().map_err(|e| e.kind())
    }

    /// Drops all handles and repairs the device; then the database must have all acknowledged writes.
    fn reopen(self, keys: &[&str]) -> Database {
        let FaultFixture { machine, fs, db, partition: p } = self;
        fs.clear_faults();
        drop((p, db));
        let db = config(Arc::new(machine), false).open().unwrap();
        let p = db.open_partition("p", Default::default()).unwrap();
        for key in keys {
            assert!(p.contains_key(key).unwrap(), "{key} was acknowledged");
        }
        p.insert("again", "v").unwrap();
        db
    }
}

fn assert_poisoned(fixture: &FaultFixture) {
    assert_eq!(fixture.partition.insert("no", "v").unwrap_err().kind(), ErrorKind::Poisoned);
    assert_eq!(fixture.synced_insert("no"), Err(ErrorKind::Poisoned));
    assert_eq!(fixture.db.persist(PersistMode::SyncAll).unwrap_err().kind(), ErrorKind::Poisoned);
    assert_eq!(fixture.partition.flush().unwrap_err().kind(), ErrorKind::Poisoned);
    assert_eq!(fixture.db.open_partition("new", Default::default()).unwrap_err().kind(), ErrorKind::Poisoned);
    assert!(fixture.partition.contains_key("old").unwrap(), "reads continue");
    assert_eq!(fixture.partition.iter().count() as u64, fixture.partition.len().unwrap());
    assert!(fixture.db.metrics().poisoned);
}

#[test]
fn failed_wal_or_manifest_sync_poisons() {
    for mapped in [true, false] {
        for file in [".wal", "MANIFEST"] {
            let fixture = FaultFixture::new(mapped);
            // A new partition leaves something to sync in the manifest.
            fixture.db.open_partition("other", Default::default()).unwrap();
            fixture.fs.inject(FaultPlan::new(OpKind::Sync, 1, EIO).in_path(file));
            assert!(fixture.synced_insert("lost or not").is_err(), "{file}");
            assert_eq!(fixture.fs.fault_count(), 1, "{file}");
            let syncs = fixture.fs.count(OpKind::Sync);
            assert_poisoned(&fixture);
            while fixture.db.step().is_ok_and(|worked| worked) {}
            assert_eq!(fixture.fs.count(OpKind::Sync), syncs, "{file}: a sync was tried again");
            fixture.reopen(&["old"]);
        }
    }
}

#[test]
fn close_after_failed_sync_does_not_sync_again() {
    let fixture = FaultFixture::new(true);
    fixture.fs.inject(FaultPlan::new(OpKind::Sync, 1, EIO).in_path(".wal"));
    assert!(fixture.synced_insert("lost or not").is_err());
    let syncs = fixture.fs.count(OpKind::Sync);
    let FaultFixture { machine, fs, db, partition: p } = fixture;
    drop(p);
    assert!(db.close().is_err(), "close returned no error");
    assert_eq!(fs.count(OpKind::Sync), syncs, "a sync was tried again");
    // The next power failure loses the unsynced writes; the result must be a prefix, without damage.
    machine.crash(Survival::Nothing, 0);
    config(Arc::new(machine), false).open().unwrap();
}

#[test]
fn table_is_rewritten_when_its_sync_fails() {
    let fixture = FaultFixture::new(true);
    fixture.fs.inject(FaultPlan::new(OpKind::Sync, 1, EIO).in_path(".sst"));
    assert!(fixture.partition.flush().is_err());
    assert!(!fixture.db.metrics().poisoned, "a failed table sync poisons nothing");
    let tables = |machine: &MemFs| -> Vec<String> {
        let names = machine.read_dir(Path::new("/db")).unwrap().into_iter().map(|entry| entry.name);
        names.filter(|name| name.ends_with(".sst")).collect()
    };
    let bad = tables(&fixture.machine);
    fixture.partition.flush().unwrap();
    let good = tables(&fixture.machine);
    assert!(good.len() == 1 && bad != good, "{bad:?}, then {good:?}");
    fixture.synced_insert("new").unwrap();
    fixture.machine.crash(Survival::Nothing, 0);
    fixture.reopen(&["old", "new"]);
}

/// Fills the disk: every allocation of new space fails until the disk is repaired. Writes to allocated space succeed.
fn fill_disk(fs: &FaultFs) {
    for op in [OpKind::Allocate, OpKind::Create, OpKind::Populate, OpKind::SetLength] {
        fs.inject(FaultPlan::new(op, 1, ENOSPC).forever());
    }
    for file in [".sst", "MANIFEST"] {
        fs.inject(FaultPlan::new(OpKind::Write, 1, ENOSPC).in_path(file).forever());
    }
}

#[test]
fn writes_resume_when_full_disk_has_space_again() {
    for mapped in [true, false] {
        let fixture = FaultFixture::new(mapped);
        fill_disk(&fixture.fs);
        // Space that was reserved before may still be used.
        let value = vec![7; 10_000];
        let mut written = Vec::new();
        let refused = (0..1_000).find_map(|n| match fixture.partition.insert(format!("{n}"), &value) {
            Ok(()) => {
                written.push(format!("{n}"));
                None
            }
            Err(error) => Some(error),
        });
        assert_eq!(refused.expect("10 MB do not fit on the disk").kind(), ErrorKind::OutOfSpace, "mapped {mapped}");
        assert_eq!(fixture.partition.insert("still full", &value).unwrap_err().kind(), ErrorKind::OutOfSpace);
        assert_eq!(fixture.partition.flush().unwrap_err().kind(), ErrorKind::OutOfSpace);
        assert_eq!(fixture.db.checkpoint("/copy").unwrap_err().kind(), ErrorKind::OutOfSpace);
        assert!(!fixture.machine.exists(Path::new("/copy")).unwrap());
        assert!(!fixture.db.metrics().poisoned, "a full disk poisons nothing");
        assert_eq!(fixture.partition.len().unwrap(), written.len() as u64 + 1, "only accepted writes are visible");
        fixture.fs.clear_faults();
        fixture.partition.insert("space is back", &value).unwrap();
        fixture.synced_insert("synced").unwrap();
        fixture.partition.flush().unwrap();
        fixture.db.checkpoint("/copy").unwrap();
        assert!(!fixture.partition.contains_key("still full").unwrap());
        let keys: Vec<&str> = written.iter().map(String::as_str).chain(["old", "space is back", "synced"]).collect();
        let db = fixture.reopen(&keys);
        assert!(!db.open_partition("p", Default::default()).unwrap().contains_key("still full").unwrap());
    }
}

/// On a copy-on-write file system, overwriting needs space too.
#[test]
fn disk_full_in_wal_does_not_poison() {
    let fixture = FaultFixture::new(false);
    fixture.fs.inject(FaultPlan::new(OpKind::Write, 1, ENOSPC).in_path(".wal").forever());
    for _ in 0..3 {
        let refused = fixture.partition.insert("refused", "v").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::OutOfSpace);
    }
    assert!(!fixture.partition.contains_key("refused").unwrap());
    fixture.fs.clear_faults();
    fixture.partition.insert("space is back", "v").unwrap();
    fixture.synced_insert("synced").unwrap();
    let db = fixture.reopen(&["old", "space is back", "synced"]);
    assert!(!db.open_partition("p", Default::default()).unwrap().contains_key("refused").unwrap());
}

#[test]
fn failed_creation_on_full_disk_can_be_retried() {
    for nth in 1..12 {
        for op in [OpKind::Write, OpKind::Allocate, OpKind::Create] {
            let machine = MemFs::new();
            let fs = FaultFs::new(Arc::new(machine.clone()));
            fs.inject(FaultPlan::new(op, nth, ENOSPC).forever());
            match config(Arc::new(fs), true).open() {
                Ok(db) => drop(db),
                Err(error) => assert_eq!(error.kind(), ErrorKind::OutOfSpace, "{op:?} {nth}"),
            }
            config(Arc::new(machine), true).open().unwrap_or_else(|e| panic!("{op:?} {nth}: {e}"));
        }
    }
}

#[test]
fn read_error_names_file_and_offset() {
    let fixture = FaultFixture::new(true);
    (0..500u32).for_each(|n| fixture.partition.insert(n.to_be_bytes(), [7; 100]).unwrap());
    fixture.partition.major_compact().unwrap();
    let db = {
        let FaultFixture { fs, db, partition: p, .. } = &fixture;
        fs.inject(FaultPlan::new(OpKind::Read, 1, EIO).in_path(".sst").forever());
        let error = p.iter().find_map(|pair| pair.err()).expect("nothing can be read");
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(error.file().is_some_and(|file| file.extension().is_some_and(|e| e == "sst")), "{error}");
        fs.clear_faults();
        assert_eq!(p.len().unwrap(), 501);
        db.clone()
    };
    assert!(!db.metrics().poisoned);
    fixture.partition.insert("new", "v").unwrap();
}
