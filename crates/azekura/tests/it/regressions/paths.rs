//! Paths, working directories, locks, checkpoint targets.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;

use azekura::fs::{Fs, OpenMode};
use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, Survival, TestComparator, TestEnv, TestOrder};
use azekura::{
    Batch, Config, Database, EngineType, ErrorKind, GarbageCollection, KvSeparationOptions, Partition, PersistMode,
    PmemOptions, TransactionOptions,
};

use super::{after_power_loss, open, open_partition};
use crate::kill::test_process;
use crate::testkit::test_dir::{read_file, write_file};
use crate::testkit::watchdog::run_with_timeout;

fn error_kind<T>(result: azekura::Result<T>) -> ErrorKind {
    result.map(drop).unwrap_err().kind()
}

/// Set in the child process of a test; the value is the directory.
const CHILD_ENV: &str = "AZEKURA_PATHS_CHILD";

/// Runs `test` of this file in another process, because the working directory belongs to the whole process.
fn run_in_child(test: &str, body: impl FnOnce(&Path)) {
    if let Some(dir) = std::env::var_os(CHILD_ENV) {
        return body(Path::new(&dir));
    }
    let root = tempfile::tempdir().unwrap();
    let output = test_process(&format!("regressions::paths::{test}"), CHILD_ENV, root.path()).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{out}{err}");
}

/// A database at the relative path `data`, with a partition of each kind.
struct RelativePathDatabase {
    db: Database,
    partitions: Vec<Partition>,
}

const NAMES: [&str; 3] = ["plain", "apart", "pool"];

impl RelativePathDatabase {
    fn open() -> RelativePathDatabase {
        let db = Config::new("data").workers(0).wal_segment_size(64 << 10).max_open_files(8).open().unwrap();
        let separation = KvSeparationOptions::default().separation_threshold(100).blob_file_target_size(4 << 10);
        let options = |name: &str| match name {
            "apart" => azekura::PartitionCreateOptions::default().with_kv_separation(separation.clone()),
            "pool" => azekura::PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default())),
            _ => Default::default(),
        };
        let partitions = NAMES.iter().map(|name| db.open_partition(name, options(name)).unwrap()).collect();
        RelativePathDatabase { db, partitions }
    }

    /// The value of each key in round `n`, in the database called `name`.
    fn write(&self, name: &str, n: u64) {
        for part in &self.partitions {
            for key in 0..20 {
                part.insert(format!("{name} {key:02}"), format!("{n} ").repeat(100)).unwrap();
            }
        }
    }

    fn check(&self, name: &str, n: u64) {
        for part in &self.partitions {
            let found: Vec<_> = part.iter().map(|pair| pair.unwrap()).collect();
            assert_eq!(found.len(), 20, "{name}: {}", part.name);
            for (key, value) in found {
                assert!(key.starts_with(name.as_bytes()) && *value == *format!("{n} ").repeat(100).as_bytes());
            }
        }
    }
}

/// Calls that use every kind of file by its path.
const FILE_ACCESS_CALLS: [fn(&RelativePathDatabase); 9] = [
    |r| r.partitions.iter().for_each(|part| part.flush().unwrap()),
    |r| r.db.persist(PersistMode::SyncAll).unwrap(),
    |r| r.partitions[..2].iter().for_each(|part| part.major_compact().unwrap()),
    |r| _ = azekura::Gc::gc_with_space_amp_target(&r.partitions[1], 1.0).unwrap(),
    |r| r.db.open_partition("short-lived", Default::default()).unwrap().insert("k", "v").unwrap(),
    |r| r.db.delete_partition(r.db.partition("short-lived").unwrap()).unwrap(),
    |r| while r.db.step().unwrap() {},
    |r| assert!(r.db.disk_space() > 0),
    |r| r.partitions[0].insert("large", vec![7; 200 << 10]).and_then(|()| r.partitions[0].remove("large")).unwrap(),
];

/// The database did not make its path absolute, and opened files by that path later. After `set_current_dir`, it
/// created, renamed and removed files in another directory, here that of another database. Neither database opened
/// afterwards.
#[test]
fn databases_stay_when_the_directory_changes() {
    run_in_child("databases_stay_when_the_directory_changes", |root| {
        let dirs = ["one", "two", "three"].map(|name| root.join(name));
        dirs.iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
        let go = |n: usize| std::env::set_current_dir(&dirs[n % dirs.len()]).unwrap();
        let open = |n: usize| {
            go(n);
            let opened = RelativePathDatabase::open();
            assert_eq!(opened.db.path(), dirs[n].join("data"));
            opened
        };
        let names = ["one", "two"];
        for round in 0..3 {
            let databases = [open(0), open(1)];
            for (call, n) in FILE_ACCESS_CALLS.iter().zip(round..) {
                for (database, name) in databases.iter().zip(names) {
                    go(n);
                    database.write(name, round as u64);
                    go(n + 1);
                    call(database);
                }
            }
            // The targets of checkpoints are relative to the working directory at the start of the call.
            go(2);
            for (database, name) in databases.iter().zip(names) {
                database.db.checkpoint(format!("{name} {round}")).unwrap();
                database.check(name, round as u64);
            }
            let [one, two] = databases;
            drop(one.partitions);
            one.db.close().unwrap();
            drop(two);
        }
        for (n, name) in names.iter().enumerate() {
            open(n).check(name, 2);
            let report = azekura::inspect::verify(&disk_fs(), Path::new("data"), &mut |_, _| go(2)).unwrap();
            assert!(report.is_clean(), "{report:?}");
            assert_eq!(file_names_in(&dirs[n]), ["data"]);
        }
        let copies = file_names_in(&dirs[2]);
        assert_eq!(copies.len(), 6, "{copies:?}");
        copies.iter().for_each(|copy| drop(Config::new(dirs[2].join(copy)).open_read_only().unwrap()));
    });
}

fn file_names_in(dir: &Path) -> Vec<std::ffi::OsString> {
    std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect()
}

fn disk_fs() -> Arc<dyn Fs> {
    Arc::new(azekura::fs::DiskFs::new())
}

#[test]
fn a_removed_working_directory_is_an_error() {
    run_in_child("a_removed_working_directory_is_an_error", |root| {
        let removed_dir = root.join("gone");
        std::fs::create_dir(&removed_dir).unwrap();
        std::env::set_current_dir(&removed_dir).unwrap();
        let db = Config::new("../db").workers(0).open().unwrap();
        std::fs::remove_dir(&removed_dir).unwrap();
        for error in [Config::default().open().unwrap_err(), db.checkpoint("copy").unwrap_err()] {
            assert_eq!(error.os_kind(), Some(io::ErrorKind::NotFound));
            assert!(error.message().contains("working directory"), "{error}");
        }
    });
}

/// A dangling link gave the error "cannot list the directory: No such file or directory", although `ls` shows the link.
#[test]
fn a_dangling_link_is_named_in_the_error() {
    let root = tempfile::tempdir().unwrap();
    let link = root.path().join("link");
    std::os::unix::fs::symlink(root.path().join("nowhere"), &link).unwrap();
    let db = Config::new(root.path().join("db")).workers(0).open().unwrap();
    let errors = [
        Config::new(&link).open().unwrap_err(),
        Config::new(&link).open_read_only().unwrap_err(),
        Config::new(link.join("db")).open().unwrap_err(),
        db.checkpoint(link.join("copy")).unwrap_err(),
    ];
    for error in errors {
        assert!(error.message().contains("symbolic link to a path that does not exist"), "{error}");
        assert!(error.file().is_some_and(|file| file.starts_with(&link)), "{error}");
    }
}

const FOREIGN_FILES: [&str; 3] =
    ["/backups/one.tmp/2024/wedding", "/backups/azekura-checkpoint-0.tmp/mine", "/backups/mine"];

/// A machine with a database, and with files of the user next to the target of a checkpoint, all of them durable.
fn machine_with_foreign_files() -> MemFs {
    let machine = MemFs::new();
    for file in FOREIGN_FILES.map(Path::new) {
        machine.create_dir_all(file.parent().unwrap()).unwrap();
        write_file(&machine, file, b"mine");
        machine.open(file, OpenMode::Write).unwrap().sync_data().unwrap();
        file.ancestors().skip(1).for_each(|dir| machine.sync_dir(dir).unwrap());
    }
    let db = open(&machine, "/db", 1);
    open_partition(&db, "p").insert("k", "v").unwrap();
    open_partition(&db, "p").flush().unwrap();
    open_partition(&db, "p").insert("l", "w").unwrap();
    db.close().unwrap();
    machine
}

fn check_foreign_files(machine: &MemFs) {
    FOREIGN_FILES.iter().for_each(|file| assert_eq!(read_file(machine, Path::new(file)), b"mine", "{file}"));
}

fn check_checkpoint(machine: &MemFs, copy: &str) {
    let copy = open(machine, copy, 9);
    let pairs: Vec<_> = open_partition(&copy, "p").keys().map(|key| key.unwrap().to_vec()).collect();
    assert_eq!(pairs, [b"k", b"l"]);
}

/// `checkpoint(PATH)` mistook a directory `PATH.tmp` of the user for the remains of an earlier attempt, and removed it
/// with all its files.
#[test]
fn a_checkpoint_removes_no_foreign_directory() {
    let machine = machine_with_foreign_files();
    let db = open(&machine, "/db", 2);
    db.checkpoint("/backups/one").unwrap();
    check_foreign_files(&machine);
    machine.create_dir_all(Path::new("/backups/empty")).unwrap();
    for existing in ["/backups/one", "/backups/empty", "/backups/mine", "/backups/one.tmp", "/db", "/db/LOCK"] {
        assert_eq!(error_kind(db.checkpoint(existing)), ErrorKind::Invalid, "{existing}");
    }
    for nameless in ["/", "/backups/.."] {
        assert_eq!(error_kind(db.checkpoint(nameless)), ErrorKind::Invalid, "{nameless}");
    }
    check_foreign_files(&machine);
    let there = machine.read_dir(Path::new("/backups")).unwrap();
    assert_eq!(there.len(), 5, "{there:?}");
}

/// The last directory syncs of a checkpoint failed. The call returned the error, but the copy existed, and the next
/// attempt was refused.
#[test]
fn a_failed_checkpoint_leaves_nothing() {
    let (mut failed, mut passed) = (0, false);
    for nth in 1.. {
        let machine = machine_with_foreign_files();
        let fs = FaultFs::new(Arc::new(machine.clone()));
        let config = Config::new("/db").fs(Arc::new(fs.clone())).env(Arc::new(TestEnv::new(2))).workers(0);
        let db = config.open().unwrap();
        fs.inject(FaultPlan::new(OpKind::Any, nth, Fault::Error(io::ErrorKind::Other)));
        let made = db.checkpoint("/backups/new/one");
        let struck = fs.fault_count() > 0;
        fs.clear_faults();
        check_foreign_files(&machine);
        let new = Path::new("/backups/new");
        let entries = if machine.exists(new).unwrap() { machine.read_dir(new).unwrap() } else { Vec::new() };
        if made.is_err() {
            failed += 1;
            assert!(entries.is_empty(), "operation {nth} failed, and there are {entries:?}");
            db.checkpoint("/backups/new/one").unwrap();
        }
        check_checkpoint(&after_power_loss(&machine), "/backups/new/one");
        if !struck {
            passed = true;
            break;
        }
    }
    assert!(passed && failed > 20, "{failed}");
}

/// Power fails at each operation of a checkpoint. The target path has the whole copy or does not exist, and files of
/// the user are unchanged. The same holds if a failed sync of a directory precedes the power loss.
#[test]
fn a_crashed_checkpoint_is_whole_or_absent() {
    // The first sync after the rename.
    let third_sync = FaultPlan::new(OpKind::SyncDir, 3, Fault::Error(io::ErrorKind::Other));
    let plans = [None, Some(third_sync.clone()), Some(third_sync.forever())];
    let try_one = |plan: Option<&FaultPlan>, stop: Option<u64>| {
        let machine = machine_with_foreign_files();
        let fs = FaultFs::new(Arc::new(machine.clone()));
        let config = Config::new("/db").fs(Arc::new(fs.clone())).env(Arc::new(TestEnv::new(2))).workers(0);
        let db = config.open().unwrap();
        let before = machine.op_count();
        machine.freeze_after(stop);
        plan.into_iter().for_each(|plan| fs.inject(plan.clone()));
        let made = db.checkpoint("/backups/new/one");
        (machine.op_count() - before, made.is_ok(), machine.fork())
    };
    for plan in &plans {
        let (all, ..) = try_one(plan.as_ref(), None);
        let mut there = 0;
        for ops in 0..=all {
            let (_, made, machine) = try_one(plan.as_ref(), Some(ops));
            for seed in 0..6 {
                let ways = [Survival::Nothing, Survival::Everything, Survival::Random];
                let crashed = machine.fork();
                crashed.crash(ways[(seed as usize).min(2)], ops * 8 + seed);
                check_foreign_files(&crashed);
                if crashed.exists(Path::new("/backups/new/one")).unwrap() {
                    check_checkpoint(&crashed, "/backups/new/one");
                    there += 1;
                } else {
                    assert!(!made, "operation {ops}: it was acknowledged");
                }
            }
        }
        assert!(there > 0);
    }
}

/// The call synced every ancestor of the directory up to the root. An ancestor that cannot be synced (autofs, squashfs,
/// procfs) failed the call, although it had not changed. The test uses `/proc/self` as such a directory.
#[test]
fn ancestor_that_cannot_sync_is_skipped() {
    let root = tempfile::tempdir().unwrap();
    let through = PathBuf::from(format!("/proc/self/root{}", root.path().display()));
    if !through.exists() {
        return println!("skipped: there is no /proc");
    }
    let db = Config::new(through.join("new/db")).workers(0).open().unwrap();
    open_partition(&db, "p").insert("k", "v").unwrap();
    db.checkpoint(through.join("newer/copy")).unwrap();
    db.close().unwrap();
    Config::new(root.path().join("newer/copy")).workers(0).open().unwrap();
}

/// The sync of a parent in which the call has created an entry must succeed: the name is not durable otherwise.
#[test]
fn parents_of_new_directories_must_be_synced() {
    let sync_fails = |nth, error, existing: &str| {
        let machine = MemFs::new();
        machine.create_dir_all(Path::new(existing)).unwrap();
        let fs = FaultFs::new(Arc::new(machine));
        fs.inject(FaultPlan::new(OpKind::SyncDir, nth, Fault::Error(error)));
        let config = Config::new("/old/new/db").fs(Arc::new(fs.clone())).env(Arc::new(TestEnv::new(1)));
        let failed = config.workers(0).open().is_err();
        assert_eq!(fs.fault_count(), 1);
        failed
    };
    let unsyncable = io::ErrorKind::InvalidInput;
    assert!(sync_fails(1, unsyncable, "/old"), "/old/new got a new name");
    assert!(sync_fails(2, unsyncable, "/old"), "/old got a new name");
    assert!(!sync_fails(3, unsyncable, "/old"), "the root did not");
    assert!(!sync_fails(1, unsyncable, "/old/new/db"), "/old/new did not");
    assert!(sync_fails(3, io::ErrorKind::Other, "/old"), "the device of the root fails");
}

/// Only the file `LOCK` was locked. After that file was removed or replaced, a second writer could open the directory,
/// and the two writers destroyed each other's files.
#[test]
fn a_removed_lock_file_lets_no_second_writer_in() {
    let on_disk = tempfile::tempdir().unwrap();
    let places = [(disk_fs(), on_disk.path().join("db")), (Arc::new(MemFs::new()) as Arc<dyn Fs>, "/db".into())];
    for (fs, dir) in places {
        let config = || Config::new(&dir).fs(Arc::clone(&fs)).workers(0);
        let db = config().open().unwrap();
        let refused = || {
            assert_eq!(error_kind(config().open()), ErrorKind::Locked);
            assert_eq!(error_kind(config().open_read_only()), ErrorKind::Locked);
        };
        refused();
        fs.remove_file(&dir.join("LOCK")).unwrap();
        refused();
        write_file(&*fs, &dir.join("LOCK"), b"");
        refused();
        db.close().unwrap();
        let (reader, second_reader) = (config().open_read_only().unwrap(), config().open_read_only().unwrap());
        fs.remove_file(&dir.join("LOCK")).unwrap();
        assert_eq!(error_kind(config().open()), ErrorKind::Locked);
        drop(reader);
        assert_eq!(error_kind(config().open()), ErrorKind::Locked);
        drop(second_reader);
        config().open().unwrap();
    }
}

#[test]
fn other_names_of_a_directory_are_locked_too() {
    let root = tempfile::tempdir().unwrap();
    let db = Config::new(root.path().join("db")).workers(0).open().unwrap();
    std::os::unix::fs::symlink("db", root.path().join("link")).unwrap();
    for other in ["link", "db/../db", "./db/", "link/../link"] {
        assert_eq!(error_kind(Config::new(root.path().join(other)).workers(0).open()), ErrorKind::Locked, "{other}");
    }
    drop(db);
    let db = Config::new(root.path().join("link")).workers(0).open().unwrap();
    assert_eq!(error_kind(Config::new(root.path().join("db")).workers(0).open()), ErrorKind::Locked);
    drop(db);
}

/// Every call that reads, writes, flushes or closes returns `Closed`, and others return nothing.
fn check_calls_of_child(db: &Database, p: &Partition, pool: &Partition, mut batch: Batch) {
    let outcomes: BTreeMap<&str, ErrorKind> = BTreeMap::from([
        ("insert", error_kind(p.insert("no", "v"))),
        ("large", error_kind(p.insert("no", vec![1; 2 << 20]))),
        ("remove", error_kind(p.remove("k"))),
        ("pool", error_kind(pool.insert("no", "v"))),
        ("batch", error_kind(batch.commit())),
        ("flush", error_kind(p.flush())),
        ("pool flush", error_kind(pool.flush())),
        ("compact", error_kind(p.major_compact())),
        ("blob GC", error_kind(p.gc_with_space_amp_target(1.0))),
        ("clear", error_kind(p.clear())),
        ("ingest", error_kind(p.ingest([("no", "v")]))),
        ("exclusive", error_kind(db.transaction_with(TransactionOptions::default().exclusive(true)))),
        ("persist", error_kind(db.persist(PersistMode::SyncAll))),
        ("step", error_kind(db.step())),
        ("open", error_kind(db.open_partition("new", Default::default()))),
        ("again", error_kind(db.open_partition("p", Default::default()))),
        ("delete", error_kind(db.delete_partition(p.clone()))),
        ("delete by name", error_kind(db.delete_partition_by_name("p"))),
        ("checkpoint", error_kind(db.checkpoint("/copy"))),
        ("close", error_kind(db.clone().close())),
        ("partition", error_kind(db.partition("p"))),
        ("get", error_kind(p.get("k"))),
        ("pool get", error_kind(pool.get("k"))),
        ("multi_get", error_kind(p.multi_get(["k"]))),
        ("iter", error_kind(p.iter().next().unwrap())),
        ("len", error_kind(pool.len())),
        ("snapshot", error_kind(db.snapshot().get(p, "k"))),
        ("snapshot iter", error_kind(db.snapshot().keys(p).next().unwrap())),
        ("transaction", error_kind(db.transaction().get(p, "k"))),
        ("transact", error_kind(db.transact(|tx| tx.insert(p, "no", "v")))),
        ("swap", error_kind(p.compare_and_swap("k", None, Some(b"v")))),
        ("time to live", error_kind(p.insert_with_ttl("no", "v", std::time::Duration::from_secs(1)))),
    ]);
    assert!(outcomes.values().all(|kind| *kind == ErrorKind::Closed), "{outcomes:?}");
    let mut expecting = db.batch();
    expecting.insert(p, "no", "v");
    expecting.expect(p, "k", None);
    assert_eq!(error_kind(expecting.commit()), ErrorKind::Closed);
    assert!(db.list_partitions().is_empty() && !db.partition_exists("p"));
    assert_eq!((db.metrics().partitions, p.metrics().disk_bytes), (0, 0));
}

/// Calls that open or delete a partition acquired a lock before they checked whether the process was forked. If a
/// thread of the parent held the lock at the fork, the child waited forever.
#[test]
fn a_forked_child_waits_for_no_lock() {
    run_with_timeout("a call of the child", || {
        let machine = MemFs::new();
        let comparator = Arc::new(TestComparator::new(TestOrder::Reversed));
        let late =
            |db: &Database| db.open_partition_with_comparator("late", Default::default(), comparator.clone()).map(drop);
        let db = open(&machine, "/db", 1);
        let p = db.open_partition_with_comparator("late", Default::default(), comparator.clone()).unwrap();
        (0..2u8).for_each(|n| p.insert([n], "v").unwrap());
        let killed = machine.fork();
        killed.crash(Survival::Everything, 0);
        let env = TestEnv::new(2);
        let db = Config::new("/db").fs(Arc::new(killed)).env(Arc::new(env.clone())).workers(0).open().unwrap();
        let (p, pool) = (open_partition(&db, "p"), db.open_partition("pool", pool_options()).unwrap());
        let mut batch = db.batch();
        batch.insert(&p, "no", "v");
        let ((started, is_inside), (let_return, may_return)) = (channel(), channel());
        comparator.call_once(move || {
            started.send(()).unwrap();
            may_return.recv().unwrap();
        });
        std::thread::scope(|scope| {
            let opening = scope.spawn(|| late(&db));
            is_inside.recv().unwrap();
            env.set_process(2);
            check_calls_of_child(&db, &p, &pool, batch);
            env.set_process(1);
            let_return.send(()).unwrap();
            opening.join().unwrap().unwrap();
        });
        db.close().unwrap();
    });
}

/// In a forked child, an entry whose value is in a blob file read that file. The read needs locks that a thread of the
/// parent may have held at the fork.
#[test]
fn entry_in_a_forked_child_reads_no_file() {
    let machine = MemFs::new();
    let env = TestEnv::new(1);
    let db = Config::new("/db").fs(Arc::new(machine.clone())).env(Arc::new(env.clone())).workers(0).open().unwrap();
    let separated = azekura::PartitionCreateOptions::default().with_kv_separation(Default::default());
    let part = db.open_partition("p", separated).unwrap();
    part.insert("k", [7; 10_000]).unwrap();
    part.flush().unwrap();
    let entry = part.entries().next().unwrap().unwrap();
    let ops = machine.op_count();
    env.set_process(2);
    assert_eq!(error_kind(entry.value()), ErrorKind::Closed);
    assert_eq!((entry.size(), machine.op_count()), (10_000, ops));
    drop(entry.clone());
    env.set_process(1);
    assert_eq!(entry.value().unwrap(), [7; 10_000]);
}

/// A forked child wrote to the WAL of its parent, flushed to the files of its parent when it ended, and released the
/// lock of its parent.
#[test]
fn a_forked_child_cannot_touch_the_files() {
    let machine = MemFs::new();
    let env = TestEnv::new(1);
    let db = Config::new("/db").fs(Arc::new(machine.clone())).env(Arc::new(env.clone())).workers(0).open().unwrap();
    let (p, pool) = (open_partition(&db, "p"), db.open_partition("pool", pool_options()).unwrap());
    p.insert("k", "v").unwrap();
    let mut batch = db.batch();
    batch.insert(&p, "no", "v");
    let (mut iter, snapshot, mut tx) = (p.iter(), db.snapshot(), db.transaction());
    iter.next().unwrap().unwrap();
    tx.insert(&p, "no", "v").unwrap();
    let ingest = p.start_ingest().unwrap();
    let ops = machine.op_count();
    // The calls of the child.
    env.set_process(2);
    check_calls_of_child(&db, &p, &pool, batch);
    assert_eq!((error_kind(tx.commit()), error_kind(ingest.commit())), (ErrorKind::Closed, ErrorKind::Closed));
    drop((iter, snapshot, p, pool, db));
    assert_eq!(machine.op_count(), ops);
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    assert_eq!(
        error_kind(Config::new("/db").fs(fs).env(Arc::new(TestEnv::new(2))).workers(0).open()),
        ErrorKind::Locked
    );
    // The process ends, and a new one finds the writes of the parent.
    machine.crash(Survival::Everything, 0);
    let db = open(&machine, "/db", 3);
    assert_eq!(open_partition(&db, "p").keys().map(|key| key.unwrap().to_vec()).collect::<Vec<_>>(), [b"k"]);
}

fn pool_options() -> azekura::PartitionCreateOptions {
    azekura::PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default()))
}
