//! Defects that were found and repaired, each as the shortest program that shows it.
//!
//! Modules: `golden` (databases written by older versions), and by part of the engine `log_damage`, `pool_files`,
//! `pool_space`, `tables`, `background`, `paths`, `disk_full`.

mod background;
mod disk_full;
mod golden;
mod log_damage;
mod paths;
mod pool_files;
mod pool_space;
mod tables;

use std::path::Path;
use std::sync::Arc;

use azekura::fs::{Fs, MemFs, Survival, TestEnv};
use azekura::{Config, Database, KvSeparationOptions, Partition, PartitionCreateOptions, PersistMode};

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

/// A machine that stood still after so many operations of opening the database.
fn stopped(machine: &MemFs, ops: u64, salt: u64) -> MemFs {
    let stopped = machine.fork();
    stopped.freeze_after(Some(ops));
    let fs: Arc<dyn Fs> = Arc::new(stopped.clone());
    drop(Config::new("/db").fs(fs).env(Arc::new(TestEnv::new(salt))).workers(0).open());
    stopped
}

#[test]
fn a_half_made_segment_is_not_used_as_it_is() {
    let header_lost = |machine: &MemFs| {
        let file = machine.open(Path::new("/db/000001.wal"), azekura::fs::OpenMode::Read);
        file.is_ok_and(|file| {
            file.read_exact_at(&mut [0; 8], 0).is_err() || crate::world::disk::bytes_of(&*file)[0] == 0
        })
    };
    let machines = (0..60).map(|ops| stopped(&MemFs::new(), ops, 1)).inspect(|m| m.crash(Survival::MetadataOnly, 0));
    let half = machines.into_iter().find(header_lost).expect("a segment is made at the first open");
    for ops in 0..60 {
        let again = stopped(&half, ops, 2);
        for seed in 0..20 {
            let after = again.fork();
            after.crash(Survival::Random, seed);
            let fs: Arc<dyn Fs> = Arc::new(after);
            let opened = Config::new("/db").fs(fs).env(Arc::new(TestEnv::new(3))).workers(0).open();
            assert!(opened.is_ok(), "second stop after {ops} operations, seed {seed}: {:?}", opened.err());
        }
    }
}

#[test]
fn an_iterator_goes_on_when_its_partition_is_deleted() {
    let machine = MemFs::new();
    let db = open(&machine, "/db", 1);
    let p = part(&db, "p");
    (0..9).for_each(|n| p.insert(n.to_string(), "v").unwrap());
    p.flush().unwrap();
    (9..20).for_each(|n| p.insert(n.to_string(), "v").unwrap());
    let (fresh, mut begun) = (p.iter(), p.iter());
    begun.next().unwrap().unwrap();
    db.delete_partition(p).unwrap();
    while db.step().unwrap() {}
    assert_eq!(fresh.map(Result::unwrap).collect::<Vec<_>>().len(), 20, "an iterator that had not moved yet");
    assert_eq!(begun.rev().map(Result::unwrap).collect::<Vec<_>>().len(), 19, "an iterator that had moved at one end");
}

#[test]
fn a_manifest_that_lost_its_end_does_not_take_synced_commits_along() {
    let machine = MemFs::new();
    let db = open(&machine, "/db", 1);
    part(&db, "p").insert("k", "v").unwrap();
    db.persist(PersistMode::SyncAll).unwrap();
    let cut = machine.fork();
    let fs: Arc<dyn Fs> = Arc::new(cut);
    let manifest = fs.open(Path::new("/db/MANIFEST"), azekura::fs::OpenMode::Write).unwrap();
    for len in (1..manifest.length().unwrap()).rev() {
        manifest.set_length(len).unwrap();
        match Config::new("/db").fs(Arc::clone(&fs)).env(Arc::new(TestEnv::new(2))).workers(0).open_read_only() {
            Err(error) => assert_eq!(error.kind(), azekura::ErrorKind::Corruption, "{error}"),
            Ok(db) => {
                assert!(db.partition_exists("p"), "cut to {len}: the partition is gone without a word");
                assert!(part(&db, "p").contains_key("k").unwrap(), "cut to {len}");
            }
        }
    }
}

#[test]
fn a_weak_removal_does_not_uncover_what_a_removal_had_hidden() {
    let machine = MemFs::new();
    let db = open(&machine, "/db", 1);
    let p = part(&db, "p");
    p.insert("k", "first").unwrap();
    p.major_compact().unwrap();
    p.remove("k").unwrap();
    // Inserted exactly once since it was last removed.
    p.insert("k", "second").unwrap();
    p.flush().unwrap();
    p.remove_weak("k").unwrap();
    p.flush().unwrap();
    assert_eq!(p.get("k").unwrap(), None);
    p.major_compact().unwrap();
    assert_eq!(p.get("k").unwrap(), None, "the first value is back");
}

#[test]
fn a_segment_whose_retirement_was_not_written_stays_in_line() {
    use azekura::fs::{Fault, FaultFs, FaultPlan, OpKind};
    for nth in 1..8 {
        let machine = MemFs::new();
        let faulty = FaultFs::new(Arc::new(machine.clone()));
        let config = |fs: Arc<dyn Fs>| Config::new("/db").fs(fs).workers(0).log_segment_size(64 << 10);
        let db = config(Arc::new(faulty.clone())).open().unwrap();
        let p = part(&db, "p");
        let fill = |round: u8| (0..9).for_each(|n: u8| p.insert([round, n], [round; 10_000]).unwrap());
        fill(0);
        db.persist(PersistMode::SyncData).unwrap();
        let full = Fault::Error(std::io::ErrorKind::StorageFull);
        faulty.fail(FaultPlan::new(OpKind::Write, nth, full).in_path("MANIFEST"));
        drop(p.flush());
        faulty.repair();
        for round in 1..5 {
            fill(round);
            db.persist(PersistMode::SyncData).unwrap();
            p.flush().unwrap();
        }
        p.insert("last", "v").unwrap();
        db.persist(PersistMode::SyncData).unwrap();
        let killed = machine.fork();
        drop((p, db));
        let db = config(Arc::new(killed)).open().unwrap_or_else(|e| panic!("write {nth}: {e}"));
        assert_eq!(part(&db, "p").len().unwrap(), 46, "write {nth}");
    }
}

#[test]
fn tables_that_nobody_needs_are_removed_soon() {
    let machine = MemFs::new();
    let db = open(&machine, "/db", 1);
    let p = part(&db, "p");
    for round in 0..6u8 {
        (0..20u8).for_each(|n| p.insert([n], [round; 100]).unwrap());
        p.flush().unwrap();
        if round % 3 == 2 {
            p.major_compact().unwrap();
        }
        settle(&machine, &db, std::slice::from_ref(&p));
    }
}

/// The names of the tables that are there.
fn tables(machine: &MemFs, dir: &Path) -> Vec<String> {
    let names = machine.read_dir(dir).unwrap().into_iter().map(|entry| entry.name);
    names.filter(|name| name.ends_with(".sst")).collect()
}

/// Works until there is no table that no partition names: readers of now may hold one for a moment.
pub(crate) fn settle(machine: &MemFs, db: &Database, parts: &[Partition]) {
    for patience in (0..1_000).rev() {
        while db.step().unwrap() {}
        let named: usize = parts.iter().flat_map(|p| p.metrics().levels).map(|level| level.tables).sum();
        let tables = tables(machine, db.path());
        if tables.len() == named {
            return;
        }
        assert!(patience > 0, "{named} tables are named, there are {tables:?}");
        parts.iter().for_each(|p| drop(p.get("k").unwrap()));
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// A partition of several tables that all hold the same keys, and nothing to do.
fn of_tables(db: &Database, rounds: u8) -> Partition {
    let p = part(db, "p");
    for round in 0..rounds {
        (0..20u8).for_each(|n| p.insert([n], [round; 100]).unwrap());
        p.flush().unwrap();
    }
    p
}

type Errand = Box<dyn FnOnce() + Send>;

/// Orders by bytes, and runs an errand while it compares: a reader is in the middle of a read then.
#[derive(Default)]
struct Busy(std::sync::Mutex<Option<Errand>>);

impl azekura::Comparator for Busy {
    fn name(&self) -> &str {
        "busy"
    }

    fn compare(&self, a: &[u8], b: &[u8]) -> std::cmp::Ordering {
        let errand = self.0.lock().unwrap().take();
        errand.into_iter().for_each(|errand| errand());
        a.cmp(b)
    }
}

#[test]
fn a_reader_of_another_database_removes_no_files() {
    let (machine, other) = (MemFs::new(), MemFs::new());
    let (db, away) = (open(&machine, "/db", 1), open(&other, "/away", 2));
    let p = of_tables(&db, 3);
    let busy = Arc::new(Busy::default());
    let read = away.open_partition_with_comparator("read", Default::default(), busy.clone()).unwrap();
    read.insert("a", "v").unwrap();
    let (compacted, after) = (p.clone(), machine.clone());
    *busy.0.lock().unwrap() = Some(Box::new(move || {
        compacted.major_compact().unwrap();
        assert_eq!(tables(&after, Path::new("/db")).len(), 4, "the reader keeps what may be freed");
    }));
    assert_eq!(read.get("a").unwrap().as_deref(), Some(&b"v"[..]));
    assert!(busy.0.lock().unwrap().is_none(), "the read compared");
    assert_eq!(tables(&machine, Path::new("/db")).len(), 4, "a reader of another database removed files");
    settle(&machine, &db, std::slice::from_ref(&p));
    assert_eq!(tables(&machine, Path::new("/db")).len(), 1);
}

/// Closing left a blob file that no partition had now and then: another database of the process was reading.
#[test]
fn what_a_reader_of_another_database_keeps_at_closing_goes_with_the_next_open() {
    let (machine, other) = (MemFs::new(), MemFs::new());
    let (db, away) = (open(&machine, "/db", 1), open(&other, "/away", 2));
    let apart = KvSeparationOptions::default().separation_threshold(50);
    let p = db.open_partition("p", PartitionCreateOptions::default().with_kv_separation(apart)).unwrap();
    for round in 0..3u8 {
        p.insert("k", [round; 100]).unwrap();
        p.flush().unwrap();
    }
    let files = {
        let machine = machine.clone();
        move || {
            let names = machine.read_dir(Path::new("/db")).unwrap().into_iter().map(|entry| entry.name);
            let blobs = names.filter(|name| name.ends_with(".blob")).count();
            (tables(&machine, Path::new("/db")).len(), blobs)
        }
    };
    assert_eq!(files(), (3, 3));
    let busy = Arc::new(Busy::default());
    let read = away.open_partition_with_comparator("read", Default::default(), busy.clone()).unwrap();
    read.insert("a", "v").unwrap();
    let closed = files.clone();
    *busy.0.lock().unwrap() = Some(Box::new(move || {
        p.major_compact().unwrap();
        drop(p);
        db.close().unwrap();
        assert_eq!(closed(), (4, 3), "the reader keeps what may be freed");
    }));
    assert_eq!(read.get("a").unwrap().as_deref(), Some(&b"v"[..]));
    assert!(busy.0.lock().unwrap().is_none(), "the read compared");
    assert_eq!(files(), (4, 3), "the directory was given free: it may be another's");
    let db = open(&machine, "/db", 3);
    assert_eq!(files(), (1, 1), "opening removes what nobody has");
    assert_eq!(part(&db, "p").get("k").unwrap().as_deref(), Some(&[2; 100][..]));
    db.close().unwrap();
    assert_eq!(files(), (1, 1));
}

#[test]
fn an_iterator_that_outlives_closing_removes_no_files() {
    for deleted in [false, true] {
        let machine = MemFs::new();
        let db = open(&machine, "/db", 1);
        let p = of_tables(&db, 3);
        let mut walk = p.iter();
        walk.next().unwrap().unwrap();
        match deleted {
            true => db.delete_partition(p).unwrap(),
            false => {
                p.major_compact().unwrap();
                drop(p);
            }
        }
        while db.step().unwrap() {}
        db.close().unwrap();
        let kept = tables(&machine, Path::new("/db"));
        assert_eq!(kept.len(), if deleted { 3 } else { 4 }, "the walk needs them: {kept:?}");
        drop(walk);
        assert_eq!(tables(&machine, Path::new("/db")), kept, "files were removed after the directory was given free");
        let db = open(&machine, "/db", 2);
        assert_eq!(tables(&machine, Path::new("/db")).len(), usize::from(!deleted), "the next open finds them");
        assert_eq!(part(&db, "p").len().unwrap(), if deleted { 0 } else { 20 });
    }
}

#[test]
fn the_last_handle_takes_along_what_only_it_held() {
    let left = || {
        let machine = MemFs::new();
        let db = open(&machine, "/db", 1);
        let p = of_tables(&db, 3);
        let mut walk = p.iter();
        walk.next().unwrap().unwrap();
        p.major_compact().unwrap();
        while db.step().unwrap() {}
        drop((db, p));
        assert_eq!(tables(&machine, Path::new("/db")).len(), 4);
        drop(walk); // it closes
        tables(&machine, Path::new("/db")).len()
    };
    // A reader of another test may hold them a moment longer; then they are left to the next open.
    assert!((0..100).any(|_| left() == 1));
}

#[test]
fn a_worker_that_sleeps_comes_for_a_table_that_a_reader_let_go() {
    let machine = MemFs::new();
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    let db = Config::new("/db").fs(fs).workers(2).open().unwrap();
    let p = of_tables(&db, 3);
    let mut walk = p.iter();
    walk.next().unwrap().unwrap();
    p.major_compact().unwrap();
    drop(walk);
    for patience in (0..2_000).rev() {
        let left = tables(&machine, Path::new("/db"));
        if left.len() == 1 {
            return;
        }
        assert!(patience > 0, "nobody removed {left:?}");
        drop(p.get([1]).unwrap());
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Tables were given the options of the time when the database was opened, and kept them: a program that had index and
/// filters live in the cache from now on saw them held until it was started once more.
#[test]
fn how_index_and_filters_are_held_is_what_the_opening_of_the_partition_says() {
    let machine = MemFs::new();
    let options = |cached| {
        PartitionCreateOptions::default().partition_index_and_filters(false).cache_index_and_filter_blocks(cached)
    };
    let mut held = Vec::new();
    for (life, cached) in [false, true, true, false].into_iter().enumerate() {
        let db = open(&machine, "/db", life as u64);
        let p = db.open_partition("p", options(cached)).unwrap();
        if life == 0 {
            (0..20_000).for_each(|i| p.insert(format!("key {i:05}"), "value").unwrap());
            p.flush().unwrap();
        }
        assert_eq!(p.get("key 00777").unwrap().as_deref(), Some(&b"value"[..]));
        held.push(p.metrics().pinned_bytes);
        db.close().unwrap();
    }
    assert!(held[0] > held[1] + 20_000 && held[1] == held[2] && held[3] == held[0], "{held:?}");
}
