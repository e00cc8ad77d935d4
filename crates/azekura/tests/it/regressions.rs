//! Bugs that the proofs found, each as the shortest story that shows it.

use std::path::Path;
use std::sync::Arc;

use azekura::fs::{Fs, MemFs, Survival, TestEnv};
use azekura::{Config, Database, Partition, PersistMode};

/// A database that works by hand only, in a machine that can lose power.
fn open(machine: &MemFs, dir: &str, salt: u64) -> Database {
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    Config::new(Path::new(dir)).fs(fs).env(Arc::new(TestEnv::new(salt))).workers(0).open().unwrap()
}

fn part(db: &Database, name: &str) -> Partition {
    db.open_partition(name, Default::default()).unwrap()
}

/// What the machine holds after a power failure in which nothing unsynced survives.
fn power_lost(machine: &MemFs) -> MemFs {
    let after = machine.fork();
    after.crash(Survival::Nothing, 0);
    after
}

#[test]
fn a_partition_without_records_does_not_hold_the_start_of_the_log() {
    let machine = MemFs::new();
    for life in 0..4 {
        let db = open(&machine, "/db", life);
        assert_eq!(db.metrics().replayed_records, 0, "in life {life}");
        part(&db, "empty");
        let full = part(&db, "full");
        assert_eq!(full.len().unwrap(), life);
        full.insert(life.to_string(), "v").unwrap();
        db.close().unwrap();
    }
}

#[test]
fn new_directories_above_a_new_database_are_durable() {
    let machine = MemFs::new();
    let db = open(&machine, "/new/too/db", 1);
    let p = part(&db, "p");
    p.insert("k", "v").unwrap();
    db.persist(PersistMode::SyncAll).unwrap();
    let db = open(&power_lost(&machine), "/new/too/db", 2);
    assert_eq!(part(&db, "p").get("k").unwrap().as_deref(), Some(&b"v"[..]));
}

#[test]
fn a_new_database_below_the_working_directory_is_durable() {
    let machine = MemFs::new();
    let db = open(&machine, "db", 1);
    let p = part(&db, "p");
    p.insert("k", "v").unwrap();
    db.persist(PersistMode::SyncAll).unwrap();
    let db = open(&power_lost(&machine), "db", 2);
    assert_eq!(part(&db, "p").get("k").unwrap().as_deref(), Some(&b"v"[..]));
}

#[test]
fn a_deletion_does_not_outlive_the_commits_before_it() {
    let machine = MemFs::new();
    let db = open(&machine, "/db", 1);
    let (old, new) = (part(&db, "old"), part(&db, "new"));
    old.insert("k", "v").unwrap();
    db.persist(PersistMode::SyncData).unwrap();
    let mut moving = db.batch();
    moving.remove(&old, "k");
    moving.insert(&new, "k", "v");
    moving.commit().unwrap();
    db.delete_partition(old).unwrap();
    let db = open(&power_lost(&machine), "/db", 2);
    assert!(!db.partition_exists("old"), "a deletion is durable when it returns");
    let moved = part(&db, "new").get("k").unwrap();
    assert_eq!(moved.as_deref(), Some(&b"v"[..]), "the deletion is there, the commit before it is lost");
}
