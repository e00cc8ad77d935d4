//! A process is killed with SIGKILL repeatedly, also while it creates and while it opens the database: no
//! acknowledged write is lost, and every batch is whole.
//!
//! The test starts itself as the writer; the writer records acknowledged commits in files outside of the database. A
//! third process, which has no other database, checks the files. In a second run one of the writer's partitions
//! has key-value separation, and the writer runs blob GC continuously. In further runs its partitions are pools: on
//! disk with continuous checkpoints, and mapped in `/dev/shm`. In a last run its partitions have comparators, which the
//! writer gives while flushes of another partition retire segments of the WAL. In all runs but the last one, the whole
//! content of one more partition is ingested and cleared continuously.
//!
//! Module `followers`: processes that follow the writer and read its change feed, and are killed too.
//!
//! - `AZEKURA_KILLS`: number of kills; the other runs have half as many, and those with followers a quarter.

mod followers;

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread;
use std::time::{Duration, Instant};

use azekura::fs::{DiskFs, Fs};
use azekura::testing::{SeededRng, TestComparator, TestOrder};
use azekura::{
    CompactionStrategy, Config, Database, EngineType, GarbageCollection, KvSeparationOptions, LeveledOptions,
    Partition, PartitionCreateOptions, PersistMode, PersistenceLevel, PmemOptions, Values,
};
use tempfile::TempDir;

use crate::testkit::atomic_writes::{AtomicWrites, ttl_of, write_conditionally};

use crate::testkit::{FailureReport, Map, env_u64};

/// Set in the writer process; the value is the directory.
const WRITER_ENV: &str = "AZEKURA_KILL_WRITER";
/// Set in the checking process; the value is the directory.
const CHECKER_ENV: &str = "AZEKURA_KILL_CHECKER";
/// Each partition has distinct keys.
const WRITERS: u64 = 2;
const KEYS: u64 = 40;
const PARTITION_NAMES: [&str; 2] = ["left", "right"];
/// A file that exists if the writer runs blob GC.
const BLOB_GC_FLAG_FILE: &str = "collects";
/// A file that exists if the partitions are pools.
const POOLS_FLAG_FILE: &str = "pools";
/// A file that exists if the partitions have comparators.
const COMPARATORS_FLAG_FILE: &str = "comparators";
/// A file that exists if other processes follow the writer. Then the first partition is a pool, the second is not, and
/// each commit sets its number in both.
const FOLLOWERS_FLAG_FILE: &str = "followers";
/// A file that exists if the writer keeps all segments of the WAL.
const RETENTION_FLAG_FILE: &str = "retention";
/// The partition whose flushes retire segments of the WAL while the comparators are given.
const FLUSHED_PARTITION: &str = "flushed";
/// If the partitions are pools, there is one more, for single changes.
const SINGLE_WRITE_PARTITION: &str = "alone";
/// The writer appends one byte for each blob GC that has finished.
const BLOB_GC_COUNT_FILE: &str = "collected";

/// A partition whose whole content is loaded or cleared in each step.
const LOADED_PARTITION: &str = "loaded";
const LOADED_KEYS: u64 = 60;
/// The writer appends the number of each step that was acknowledged.
const LOAD_COUNT_FILE: &str = "loads";

/// The `n`-th commit of the writer, from 1, which does the same in both partitions.
fn commit_contents(writer: u64, n: u64) -> Vec<(String, Option<Vec<u8>>)> {
    let mut rng = SeededRng::new(writer << 40 | n);
    let mut writes = Vec::new();
    for _ in 0..1 + rng.below(4) {
        let key = format!("w{writer} {:02}", rng.below(KEYS));
        let len = if rng.chance_one_in(30) { 20_000 } else { rng.below(300) };
        let value =
            (!rng.chance_one_in(5)).then(|| [format!("{n:08} ").into_bytes(), rng.random_bytes(len as usize)].concat());
        writes.push((key, value));
    }
    writes
}

/// The writer's keys and values after this number of commits.
fn expected_state(writer: u64, commits: u64) -> Map {
    let (mut state, mut decided) = (Map::new(), BTreeSet::new());
    // From the last commit back, until every key was written.
    for n in (1..=commits).rev() {
        for (key, value) in commit_contents(writer, n).into_iter().rev() {
            if decided.insert(key.clone()) {
                state.extend(value.map(|value| (key.into(), value)));
            }
        }
        if decided.len() as u64 == KEYS {
            break;
        }
    }
    state
}

fn config(dir: &Path) -> Config {
    let config = Config::new(dir.join("db")).workers(2).wal_segment_size(128 << 10).cache_size(1 << 20);
    match dir.join(RETENTION_FLAG_FILE).exists() {
        true => config.wal_retention(Duration::from_secs(3600)).max_retained_wal_size(1 << 40),
        false => config,
    }
}

fn open(dir: &Path) -> azekura::Result<Database> {
    config(dir).open()
}

fn runs_blob_gc(dir: &Path) -> bool {
    dir.join(BLOB_GC_FLAG_FILE).exists()
}

fn has_pools(dir: &Path) -> bool {
    dir.join(POOLS_FLAG_FILE).exists()
}

fn has_comparators(dir: &Path) -> bool {
    dir.join(COMPARATORS_FLAG_FILE).exists()
}

fn has_followers(dir: &Path) -> bool {
    dir.join(FOLLOWERS_FLAG_FILE).exists()
}

/// Flushes of [`FLUSHED_PARTITION`] by this process.
static FLUSHES: AtomicU64 = AtomicU64::new(0);
/// A comparison waits at most this long for a flush.
const FLUSH_WAIT: Duration = Duration::from_millis(300);

/// The order of bytes, as an order that only the test knows. In the writer, the first comparison waits for a flush, so
/// that WAL segments are retired while the tree of the partition is built. Only while it is built.
fn waiting_comparator(has_waited: &Arc<AtomicBool>) -> TestComparator {
    let has_waited = Arc::clone(has_waited);
    TestComparator::new(TestOrder::Bytes).named("waiting").with_hook(move |_, _| {
        if std::env::var_os(WRITER_ENV).is_some() && !has_waited.swap(true, Relaxed) {
            let (before, start) = (FLUSHES.load(Relaxed), Instant::now());
            // The flush that runs now may have looked at the WAL already, so the end of the next one counts.
            while FLUSHES.load(Relaxed) < before + 2 && start.elapsed() < FLUSH_WAIT {
                thread::yield_now();
            }
        }
    })
}

/// Both partitions have direct blob writes; in the last one, more values go to blob files, for blob GC.
fn open_partitions(dir: &Path, db: &Database) -> azekura::Result<Vec<Partition>> {
    let small = PmemOptions::default().max_size(64 << 20).growth_step(64 << 10);
    let pool = PartitionCreateOptions::default().engine(EngineType::Pmem(small));
    if has_pools(dir) {
        return PARTITION_NAMES
            .into_iter()
            .chain([SINGLE_WRITE_PARTITION])
            .map(|name| db.open_partition(name, pool.clone()))
            .collect();
    }
    let separation = KvSeparationOptions::default().separation_threshold(150).blob_file_target_size(64 << 10);
    let separation = separation.direct_write_threshold(200);
    let collected = separation.clone().separation_threshold(100).blob_file_target_size(16 << 10);
    let last = if runs_blob_gc(dir) { collected } else { separation.clone() };
    let options = PartitionCreateOptions::default().max_memtable_size(24 << 10).block_size(512);
    if has_followers(dir) {
        let options = options.with_kv_separation(last);
        return Ok(vec![db.open_partition(PARTITION_NAMES[0], pool)?, open_lsm(dir, db, PARTITION_NAMES[1], options)?]);
    }
    let open = |(name, separation)| open_lsm(dir, db, name, options.clone().with_kv_separation(separation));
    PARTITION_NAMES.into_iter().zip([separation, last]).map(open).collect()
}

/// If the partitions have comparators, the first one is flushed, so that only the last one has records that are
/// nowhere but in the WAL.
fn open_lsm(dir: &Path, db: &Database, name: &str, options: PartitionCreateOptions) -> azekura::Result<Partition> {
    if !has_comparators(dir) {
        return db.open_partition(name, options);
    }
    let has_waited = Arc::default();
    let part = db.open_partition_with_comparator(name, options, Arc::new(waiting_comparator(&has_waited)))?;
    has_waited.store(true, Relaxed); // a comparison in a write would keep the flushes from writing
    if name == PARTITION_NAMES[0] && std::env::var_os(WRITER_ENV).is_some() {
        part.flush()?;
    }
    Ok(part)
}

fn ack_file(dir: &Path, writer: u64) -> PathBuf {
    dir.join(format!("acknowledged {writer}"))
}

/// The number of commits that the writer has recorded as acknowledged.
fn acknowledged_commits(dir: &Path, writer: u64) -> u64 {
    fs::read(ack_file(dir, writer)).map_or(0, |bytes| bytes.len() as u64 / 8)
}

/// The writer: continues after the last recorded commit until it is killed.
#[test]
fn writer() {
    let Some(dir) = std::env::var_os(WRITER_ENV).map(PathBuf::from) else { return };
    end_with_parent();
    say("opening");
    let db = open(&dir).unwrap();
    thread::scope(|scope| {
        if has_comparators(&dir) {
            scope.spawn(|| fill_segments_until_killed(&dir, &db));
        }
        let partitions = open_partitions(&dir, &db).unwrap();
        say("open");
        write_in_threads_until_killed(&dir, &db, &partitions);
    });
}

/// Tells the parent process.
fn say(what: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\nsays {what}").and_then(|()| out.flush()).unwrap();
}

/// Ends this process when the parent process has ended.
fn end_with_parent() {
    thread::spawn(|| {
        std::io::stdin().read_to_end(&mut Vec::new()).ok();
        std::process::exit(0);
    });
}

fn write_in_threads_until_killed(dir: &Path, db: &Database, partitions: &[Partition]) {
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            scope.spawn(move || write_until_killed(dir, db, partitions, writer));
        }
        if runs_blob_gc(dir) {
            scope.spawn(|| run_blob_gc_until_killed(dir, &partitions[1]));
        }
        if has_pools(dir) {
            scope.spawn(|| flush_until_killed(dir, partitions));
        }
        if has_followers(dir) {
            scope.spawn(|| followers::change_files_until_killed(dir, db, partitions));
        }
        if !has_comparators(dir) {
            scope.spawn(|| load_until_killed(dir, db));
        }
    });
}

fn open_loaded_partition(dir: &Path, db: &Database) -> azekura::Result<Partition> {
    let options = match has_pools(dir) {
        true => PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default().max_size(64 << 20))),
        false => {
            let separation = KvSeparationOptions::default().separation_threshold(300).blob_file_target_size(8 << 10);
            let small = LeveledOptions::default().target_file_size(8 << 10).l0_compaction_trigger(4);
            let strategy = CompactionStrategy::Leveled(small);
            PartitionCreateOptions::default().with_kv_separation(separation).compaction_strategy(strategy)
        }
    };
    db.open_partition(LOADED_PARTITION, options)
}

/// The number of the load that is there after the `n`-th step, from 1; 0 if the partition is empty.
fn load_after(n: u64) -> u64 {
    if n % 4 == 3 { 0 } else { n }
}

/// The number of the load that is there; 0 if the partition is empty.
fn find_load(part: &Partition) -> Result<u64, String> {
    find_load_in(part.values())
}

fn find_load_in(values: Values) -> Result<u64, String> {
    let values: Vec<_> = values.collect::<azekura::Result<_>>().map_err(|error| error.to_string())?;
    let loads: BTreeSet<u64> =
        values.iter().filter_map(|value| value.first_chunk().copied().map(u64::from_le_bytes)).collect();
    match (values.len() as u64, loads.first()) {
        (0, None) => Ok(0),
        (LOADED_KEYS, Some(load)) if loads.len() == 1 => Ok(*load),
        (count, _) => Err(format!("{count} entries of the loads {loads:?}")),
    }
}

fn load_until_killed(dir: &Path, db: &Database) {
    let part = open_loaded_partition(dir, db).unwrap();
    let mut notes = OpenOptions::new().append(true).create(true).open(dir.join(LOAD_COUNT_FILE)).unwrap();
    let mut n = acknowledged_loads(dir);
    if find_load(&part) == Ok(load_after(n + 1)) {
        n += 1; // the step in progress was completed
        notes.write_all(&n.to_le_bytes()).unwrap();
    }
    loop {
        n += 1;
        // Some values go to blob files.
        let value = |key: u64| [&n.to_le_bytes()[..], &vec![key as u8; (key * 61 % 500) as usize]].concat();
        let entries = (0..LOADED_KEYS).map(|key| (key.to_be_bytes(), value(key)));
        match n % 4 {
            2 => drop(part.bulk(entries.rev()).unwrap()),
            3 => part.clear().unwrap(),
            _ => drop(part.ingest(entries).unwrap()),
        }
        notes.write_all(&n.to_le_bytes()).unwrap();
    }
}

fn acknowledged_loads(dir: &Path) -> u64 {
    fs::read(dir.join(LOAD_COUNT_FILE)).map_or(0, |bytes| bytes.len() as u64 / 8)
}

/// Each round fills a segment of the WAL, and its flush retires all segments that no partition needs.
fn fill_segments_until_killed(dir: &Path, db: &Database) {
    let mut notes = OpenOptions::new().append(true).create(true).open(dir.join(BLOB_GC_COUNT_FILE)).unwrap();
    let part = db.open_partition(FLUSHED_PARTITION, PartitionCreateOptions::default()).unwrap();
    loop {
        part.insert("key", vec![7; 130 << 10]).unwrap();
        part.flush().unwrap();
        FLUSHES.fetch_add(1, Relaxed);
        notes.write_all(b".").unwrap();
    }
}

fn run_blob_gc_until_killed(dir: &Path, part: &Partition) {
    let mut notes = OpenOptions::new().append(true).create(true).open(dir.join(BLOB_GC_COUNT_FILE)).unwrap();
    for n in 0u64.. {
        let freed = match n % 4 {
            0 => part.gc_with_space_amp_target(1.0),
            1 => part.gc_with_space_amp_target(1.5),
            2 => part.gc_with_staleness_threshold(0.3),
            _ => part.gc_drop_stale_segments(),
        };
        if let Err(error) = freed {
            eprintln!("blob GC failed: {error}");
            std::process::exit(1);
        }
        notes.write_all(b".").unwrap();
    }
}

fn flush_until_killed(dir: &Path, partitions: &[Partition]) {
    let mut notes = OpenOptions::new().append(true).create(true).open(dir.join(BLOB_GC_COUNT_FILE)).unwrap();
    loop {
        for part in partitions {
            part.flush().unwrap();
            notes.write_all(b".").unwrap();
        }
    }
}

fn counter_key(writer: u64) -> String {
    format!("n {writer}")
}

/// The number that is stored as a value; 0 if there is none.
fn number_of(value: Option<&[u8]>) -> u64 {
    value.map_or(0, |value| u64::from_le_bytes(value.try_into().expect("eight bytes")))
}

fn odd_round_key(writer: u64) -> String {
    format!("odd {writer}")
}

/// Two single changes of a pool.
fn write_single_changes(single_changes: &Partition, writer: u64, n: u64) {
    let counter = n.to_le_bytes();
    match ttl_of(&counter) {
        Some(ttl) => single_changes.insert_with_ttl(counter_key(writer), counter, ttl).unwrap(),
        None if n.is_multiple_of(5) => {
            write_conditionally(single_changes, counter_key(writer).as_bytes(), Some(&counter), n).unwrap();
        }
        None => single_changes.insert(counter_key(writer), counter).unwrap(),
    }
    match n % 2 {
        1 => single_changes.insert(odd_round_key(writer), n.to_le_bytes()).unwrap(),
        _ => single_changes.remove(odd_round_key(writer)).unwrap(),
    }
}

/// The single changes that must exist after this number of acknowledged commits.
fn check_single_changes(single_changes: &Partition, writer: u64, acknowledged: u64) {
    let read = |key: String| number_of(single_changes.get(key).unwrap().as_deref());
    let n = read(counter_key(writer));
    assert!(n == acknowledged || n == acknowledged + 1, "{n} where {acknowledged} were acknowledged");
    let odd = |n: u64| if n % 2 == 1 { n } else { 0 };
    let last_round = read(odd_round_key(writer));
    assert!(last_round == odd(n) || last_round == odd(n.saturating_sub(1)), "{last_round} with the counter {n}");
}

/// Whether removals of this key are range deletes. So batches contain range deletes and removals in any order.
fn removes_as_range(key: &str) -> bool {
    !key.ends_with(['0', '3', '6'])
}

fn write_until_killed(dir: &Path, db: &Database, partitions: &[Partition], writer: u64) {
    let mut notes = OpenOptions::new().append(true).create(true).open(ack_file(dir, writer)).unwrap();
    // The database may have one more commit than the records: the one in progress.
    let mut n = acknowledged_commits(dir, writer);
    let has_one_more = match has_followers(dir) {
        true => number_of(partitions[0].get(counter_key(writer)).unwrap().as_deref()) == n + 1,
        false => {
            writer_state(partitions, writer).as_ref() == Ok(&expected_state(writer, n + 1))
                && expected_state(writer, n) != expected_state(writer, n + 1)
        }
    };
    if has_one_more {
        n += 1;
        notes.write_all(&n.to_le_bytes()).unwrap();
    }
    let mut has_acknowledged = false;
    loop {
        n += 1;
        if let Some(single_changes) = partitions.get(2) {
            write_single_changes(single_changes, writer, n);
        }
        let mode = if n.is_multiple_of(50) { PersistMode::SyncData } else { PersistMode::Buffer };
        let mut commit = AtomicWrites::begin(db, n, mode);
        if has_followers(dir) {
            partitions.iter().for_each(|part| commit.insert(part, counter_key(writer).as_bytes(), &n.to_le_bytes()));
        }
        for (key, value) in commit_contents(writer, n) {
            for part in &partitions[..2] {
                match &value {
                    Some(value) => commit.insert(part, key.as_bytes(), value),
                    None if n.is_multiple_of(5) => commit.expire(part, key.as_bytes()),
                    None if removes_as_range(&key) => commit.remove_range(part, key.as_bytes()),
                    None => commit.remove(part, key.as_bytes()),
                }
            }
        }
        commit.commit().unwrap();
        notes.write_all(&n.to_le_bytes()).unwrap();
        if !has_acknowledged {
            say("acknowledged");
            has_acknowledged = true;
        }
    }
}

/// The writer's keys and values; the partitions must agree.
fn writer_state(partitions: &[Partition], writer: u64) -> Result<Map, String> {
    let read = |part: &Partition| -> Result<Map, String> {
        let keys = format!("w{writer} ")..format!("w{writer}!");
        let pairs = part.range(keys).map(|pair| pair.map(|(k, v)| (k.to_vec(), v.to_vec())));
        pairs.collect::<azekura::Result<Map>>().map_err(|e| e.to_string())
    };
    let (left, right) = (read(&partitions[0])?, read(&partitions[1])?);
    if left == right { Ok(left) } else { Err(format!("half a batch of writer {writer}")) }
}

/// Counts of kills and of their effects.
#[derive(Debug, Default)]
struct KillCounters {
    kills: u64,
    before_opening: u64,
    while_creating: u64,
    while_opening: u64,
    while_writing: u64,
    acknowledged: u64,
    replayed: u64,
    blob_gc_runs: u64,
    /// Kills that left blob files without an owner: a flush, an ingest or blob GC was in progress.
    orphaned_blob_files: u64,
    loads: u64,
}

/// Runs one of the tests of this program as another process, in the directory that the variable `role` names.
pub(crate) fn test_process(test: &str, role: &str, dir: &Path) -> Command {
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(role, dir);
    program
}

/// Another process of this test. Killed when this is dropped.
struct ChildProcess {
    child: Child,
    out: BufReader<ChildStdout>,
    said: Vec<String>,
}

impl ChildProcess {
    fn start(test: &str, role: &str, dir: &Path) -> ChildProcess {
        let mut program = test_process(test, role, dir);
        let child = program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = child.unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        ChildProcess { child, out, said: Vec::new() }
    }

    /// Waits until the process says `word`, unless it did.
    fn wait_for(&mut self, word: &str) {
        let mut line = String::new();
        while !self.said.iter().any(|said| said == word) {
            line.clear();
            if self.out.read_line(&mut line).unwrap() == 0 {
                panic!("the process ended by itself: {}", self.errors());
            }
            self.said.extend(line.trim().strip_prefix("says ").map(str::to_owned));
        }
    }

    /// Kills the process, which must not have ended by itself. Returns what it has said.
    fn kill(mut self) -> Vec<String> {
        self.child.kill().unwrap();
        let errors = self.errors();
        assert_eq!(self.child.wait().unwrap().code(), None, "the process ended by itself: {errors}");
        let rest = self.out.by_ref().lines().map_while(Result::ok);
        let words = rest.filter_map(|line| line.trim().strip_prefix("says ").map(str::to_owned));
        self.said.extend(words);
        std::mem::take(&mut self.said)
    }

    /// The standard error of a process that has ended.
    fn errors(&mut self) -> String {
        let mut errors = Vec::new();
        self.child.stderr.as_mut().unwrap().read_to_end(&mut errors).unwrap();
        String::from_utf8_lossy(&errors).into_owned()
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Starts the writer and kills it some time after it prints `word`.
fn start_and_kill(dir: &Path, word: &str, delay: Duration) -> Vec<String> {
    let mut writer = ChildProcess::start("kill::writer", WRITER_ENV, dir);
    writer.wait_for(word);
    thread::sleep(delay);
    writer.kill()
}

/// Starts another process that checks the state after the kill.
fn check(dir: &Path, counters: &mut KillCounters) {
    let output = test_process("kill::checker", CHECKER_ENV, dir).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    let figures = out.lines().find_map(|line| line.strip_prefix("found ")?.split_once(' '));
    let (interrupted, replayed) = figures.expect("the checking process prints its counts");
    counters.orphaned_blob_files += interrupted.parse::<u64>().unwrap();
    counters.replayed += replayed.parse::<u64>().unwrap();
}

/// The checking process. It has no other database, because a reader of another database in the same process may delay
/// the removal of an obsolete file until after this database is closed; the next open removes it then.
#[test]
fn checker() {
    let Some(dir) = std::env::var_os(CHECKER_ENV).map(PathBuf::from) else { return };
    let (interrupted, replayed) = check_database(&dir);
    println!("\nfound {} {replayed}", u64::from(interrupted));
    if has_comparators(&dir) {
        std::process::exit(0);
    }
}

/// Opens the database after the kill and compares it with the records. Returns whether there were blob files without
/// an owner, and the number of replayed records.
fn check_database(dir: &Path) -> (bool, u64) {
    let interrupted = blob_files(dir).is_ok_and(|(owned, on_disk)| owned != on_disk);
    let db = open(dir).unwrap_or_else(|e| panic!("the database does not open: {e}"));
    let partitions = open_partitions(dir, &db).unwrap();
    let states: Vec<Map> = (0..WRITERS).map(|writer| writer_state(&partitions, writer).unwrap()).collect();
    for (writer, state) in (0..WRITERS).zip(&states) {
        let noted = acknowledged_commits(dir, writer);
        let whole = *state == expected_state(writer, noted) || *state == expected_state(writer, noted + 1);
        assert!(
            whole,
            "writer {writer}: {noted} commits were acknowledged, and the content is neither their state nor the next"
        );
        if let Some(single_changes) = partitions.get(2) {
            check_single_changes(single_changes, writer, noted);
        }
    }
    if db.partition_exists(LOADED_PARTITION) {
        let load = find_load(&open_loaded_partition(dir, &db).unwrap()).unwrap();
        let noted = acknowledged_loads(dir);
        assert!([noted, noted + 1].map(load_after).contains(&load), "load {load}, and {noted} were acknowledged");
    }
    let replayed = db.metrics().replayed_records;
    for name in PARTITION_NAMES {
        assert!(db.partition_exists(name));
    }
    if runs_blob_gc(dir) {
        // Blob GC ignores the files of an interrupted one.
        partitions[1].gc_with_space_amp_target(1.0).unwrap();
        let report = partitions[1].gc_scan().unwrap();
        assert_eq!(report.stale_bytes, 0, "{report}");
        (0..WRITERS)
            .zip(&states)
            .for_each(|(writer, before)| assert_eq!(writer_state(&partitions, writer).as_ref(), Ok(before)));
    }
    if has_comparators(dir) {
        // This process dies too, so that the next writer finds records in the WAL.
        std::mem::forget((partitions, db));
        return (interrupted, replayed);
    }
    drop(partitions);
    db.close().unwrap();
    let (owned, on_disk) = blob_files(dir).unwrap();
    assert_eq!(on_disk, owned);
    (interrupted, replayed)
}

/// The blob files that have an owner, and the blob files in the directory.
fn blob_files(dir: &Path) -> azekura::Result<(BTreeSet<String>, BTreeSet<String>)> {
    let db = Config::new(dir.join("db")).open_read_only()?;
    let mut owned = BTreeSet::new();
    let names = PARTITION_NAMES.iter().chain([&LOADED_PARTITION]);
    for name in names.filter(|name| db.partition_exists(name)) {
        let part = match has_comparators(dir) {
            true => open_lsm(dir, &db, name, PartitionCreateOptions::default())?,
            false => db.partition(name)?,
        };
        owned.extend(part.metrics().blob_files.iter().map(|file| format!("{:06}.blob", file.id)));
    }
    let on_disk = fs::read_dir(dir.join("db")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    Ok((owned, on_disk.filter(|name| name.ends_with(".blob")).collect()))
}

#[test]
fn nothing_acknowledged_is_lost_by_kill() {
    let counters =
        kill_repeatedly("kill::nothing_acknowledged_is_lost_by_kill", env_u64("AZEKURA_KILLS", 80), &plain_dir);
    println!("{counters:?}");
}

#[test]
fn kill_during_blob_gc_loses_nothing() {
    let test = "kill::kill_during_blob_gc_loses_nothing";
    let collects = || new_test_dir(std::env::temp_dir(), Some(BLOB_GC_FLAG_FILE));
    let counters = kill_repeatedly(test, env_u64("AZEKURA_KILLS", 80).div_ceil(2), &collects);
    println!("{counters:?}");
    // The number of blob GCs between two kills, and the number that a kill interrupts, depend on the load of the
    // machine.
    assert!(counters.acknowledged > 0 && counters.blob_gc_runs > 0, "{counters:?}");
}

#[test]
fn nothing_is_lost_by_kill_of_pools_on_disk() {
    let test = "kill::nothing_is_lost_by_kill_of_pools_on_disk";
    let pools = || new_test_dir(std::env::temp_dir(), Some(POOLS_FLAG_FILE));
    let counters = kill_repeatedly(test, env_u64("AZEKURA_KILLS", 80).div_ceil(2), &pools);
    println!("{counters:?}, `collections` counts the checkpoints");
    // The number of checkpoints between two kills depends on the device.
    assert!(counters.acknowledged > 0, "{counters:?}");
}

#[test]
fn nothing_is_lost_by_kill_of_pools_in_memory() {
    let memory = Path::new("/dev/shm");
    if !memory.is_dir() || DiskFs::new().persistence_level(memory) != PersistenceLevel::ProcessCrash {
        return println!("skipped: there is no file system in memory");
    }
    let test = "kill::nothing_is_lost_by_kill_of_pools_in_memory";
    let pools = || new_test_dir(memory.into(), Some(POOLS_FLAG_FILE));
    let counters = kill_repeatedly(test, env_u64("AZEKURA_KILLS", 80).div_ceil(2), &pools);
    println!("{counters:?}");
    assert!(counters.acknowledged > 0, "{counters:?}");
}

#[test]
fn nothing_is_lost_with_late_comparators() {
    let test = "kill::nothing_is_lost_with_late_comparators";
    let late = || new_test_dir(std::env::temp_dir(), Some(COMPARATORS_FLAG_FILE));
    let counters = kill_repeatedly(test, env_u64("AZEKURA_KILLS", 80).div_ceil(2), &late);
    println!("{counters:?}, `blob_gc_runs` counts the flushes");
    assert!(counters.acknowledged > 0 && counters.blob_gc_runs > 0, "{counters:?}");
}

fn plain_dir() -> TempDir {
    new_test_dir(std::env::temp_dir(), None)
}

/// A directory below `root`, with the files that configure the writer.
fn new_test_dir(root: PathBuf, scene: Option<&str>) -> TempDir {
    let place = tempfile::tempdir_in(root).unwrap();
    if let Some(scene) = scene {
        fs::write(place.path().join(scene), "").unwrap();
    }
    place
}

fn kill_repeatedly(test: &'static str, kills: u64, fresh_place: &dyn Fn() -> TempDir) -> KillCounters {
    let seed = env_u64("AZEKURA_SEED", 1);
    let replay = FailureReport::new(test, seed);
    let mut rng = SeededRng::new(seed);
    let mut counters = KillCounters::default();
    let mut place = fresh_place();
    for kill in 0..kills {
        replay.set_progress(format!("kill {kill}"));
        // Every fourth time a new database, every second of which is killed shortly after its creation.
        let fresh = kill % 4 == 0;
        if fresh {
            count_acknowledged(place.path(), &mut counters);
            place = fresh_place();
        }
        // Every fourth kill comes after a commit, however slow the machine is.
        let word = ["opening", "open", "opening", "acknowledged"][(kill % 4) as usize];
        let longest = if word == "opening" { rng.pick(&[300, 1_000, 3_000, 10_000]) } else { 60_000 };
        let said = start_and_kill(place.path(), word, Duration::from_micros(rng.below(longest)));
        counters.kills += 1;
        let existed = place.path().join("db").exists();
        match (said.iter().any(|word| word == "open"), fresh) {
            (true, _) => counters.while_writing += 1,
            (false, _) if !existed => counters.before_opening += 1,
            (false, true) => counters.while_creating += 1,
            (false, false) => counters.while_opening += 1,
        }
        // Every third time the next writer opens the database.
        if kill % 3 != 0 || kill + 1 == kills || (kill + 1) % 4 == 0 {
            check(place.path(), &mut counters);
        }
    }
    count_acknowledged(place.path(), &mut counters);
    counters
}

fn count_acknowledged(dir: &Path, counters: &mut KillCounters) {
    counters.loads += acknowledged_loads(dir);
    counters.acknowledged += (0..WRITERS).map(|writer| acknowledged_commits(dir, writer)).sum::<u64>();
    counters.blob_gc_runs += fs::read(dir.join(BLOB_GC_COUNT_FILE)).map_or(0, |notes| notes.len() as u64);
}
