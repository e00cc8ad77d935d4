//! The change feed: replicas that only read changes equal the database, also after crashes, or are told that they are
//! stale.

mod retention;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use azekura::fs::{Fs, OpenMode};
use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, SeededRng, Survival, TestEnv};
use azekura::{
    ChangePosition, CommittedBatch, Config, Database, ErrorKind, Gc, Operation, Partition, PersistMode,
    PersistenceLevel, Result,
};

use crate::pools::pool_options;
use crate::testkit::atomic_writes::AtomicWrites;
use crate::testkit::history::differences;
use crate::testkit::read_database::read_database;
use crate::testkit::seeds::test_seeds;
use crate::testkit::test_dir::{crash_or_kill, file_bytes, write_file};
use crate::testkit::watchdog::wait_until;
use crate::testkit::{FailureReport, RandomOptions, State};

pub(crate) const NAMES: [&str; 3] = ["a", "b", "c"];
pub(crate) const DIR: &str = "/db";

/// A copy of a database that changes build.
#[derive(Clone)]
struct Replica {
    state: State,
    /// Keys whose value was gone, until a later change sets them.
    unknown: BTreeSet<(String, Vec<u8>)>,
    position: ChangePosition,
    is_durable_only: bool,
    commits: u64,
    /// Number of values that were gone.
    gone: u64,
    /// Whether values were read that contain changes after the position, so that operands may not be applied again.
    has_read_ahead: bool,
}

impl Replica {
    /// Copies the present state.
    fn of(db: &Database, options: &RandomOptions, is_durable_only: bool) -> Result<Replica> {
        db.persist(PersistMode::SyncData)?;
        let (state, unknown) = (read_database(db, options)?, BTreeSet::new());
        Ok(Replica {
            state,
            unknown,
            position: db.change_position()?,
            is_durable_only,
            commits: 0,
            gone: 0,
            has_read_ahead: false,
        })
    }

    /// Applies all changes since the position, which is stored as text meanwhile.
    fn catch_up(&mut self, db: &Database) -> Result<()> {
        let stored = self.position.to_string();
        let mut changes = db.changes_since(stored.parse()?)?;
        if self.is_durable_only {
            changes = changes.durable_only()?;
        }
        for commit in changes.by_ref() {
            let commit = commit?;
            assert!(commit.position() > self.position, "a commit is returned once");
            assert!(commit.position() <= db.change_position()?, "a commit is visible when it is returned");
            self.apply(db, &commit)?;
            self.position = commit.position();
            self.commits += 1;
        }
        assert!(changes.position() >= self.position);
        self.position = changes.position();
        self.has_read_ahead &= self.is_durable_only && self.position < db.change_position()?;
        Ok(())
    }

    fn apply(&mut self, db: &Database, commit: &CommittedBatch) -> Result<()> {
        for change in commit.changes() {
            let name = change.partition.to_string();
            let map = self.state.entry(name.clone()).or_default();
            match change.operation {
                Operation::Insert { key, value, .. } => {
                    self.unknown.remove(&(name.clone(), key.to_vec()));
                    match value.get()? {
                        Some(found) => {
                            assert_eq!(found.len() as u64, value.size());
                            map.insert(key.to_vec(), found.to_vec());
                        }
                        None => {
                            self.gone += 1;
                            self.unknown.insert((name, key.to_vec()));
                        }
                    }
                }
                Operation::Remove { key } => {
                    map.remove(key);
                    self.unknown.remove(&(name, key.to_vec()));
                }
                Operation::RemoveRange { start, end } => {
                    let is_in = |key: &Vec<u8>| {
                        let above = match start {
                            Bound::Included(start) => &key[..] >= start,
                            Bound::Excluded(start) => &key[..] > start,
                            Bound::Unbounded => true,
                        };
                        above
                            && match end {
                                Bound::Included(end) => &key[..] <= end,
                                Bound::Excluded(end) => &key[..] < end,
                                Bound::Unbounded => true,
                            }
                    };
                    map.retain(|key, _| !is_in(key));
                    self.unknown.retain(|(partition, key)| *partition != name || !is_in(key));
                }
                Operation::Merge { key, .. } if self.has_read_ahead => {
                    let found = db.partition(change.partition)?.get(key)?;
                    map.extend(found.map(|value| (key.to_vec(), value.to_vec())));
                }
                Operation::Merge { key, operand } => {
                    map.entry(key.to_vec()).or_default().extend_from_slice(operand);
                }
                Operation::Ingest { first, last } => {
                    // What is read may contain later changes, which power loss must not take.
                    db.persist(PersistMode::SyncData)?;
                    self.has_read_ahead = true;
                    map.retain(|key, _| &key[..] < first || &key[..] > last);
                    for pair in db.partition(change.partition)?.range(first..=last) {
                        let (key, value) = pair?;
                        map.insert(key.to_vec(), value.to_vec());
                    }
                }
                _ => panic!("an unknown change"),
            }
        }
        Ok(())
    }

    /// # Panics
    /// If the replica differs from the database, where no value is unknown.
    fn check(&self, db: &Database, options: &RandomOptions) {
        let mut wanted = read_database(db, options).unwrap();
        wanted.retain(|_, map| !map.is_empty());
        let mut found = self.state.clone();
        found.retain(|_, map| !map.is_empty());
        assert_eq!(self.unknown, BTreeSet::new(), "a value is gone only if a later change follows");
        let differences = differences(&wanted, &found);
        assert!(differences.is_empty(), "{differences:?}");
    }
}

/// A database on a simulated machine, and what the test needs to write to it.
pub(crate) struct Fixture {
    pub(crate) machine: MemFs,
    pub(crate) options: RandomOptions,
    pub(crate) env: TestEnv,
    /// `None` while nothing has it open.
    pub(crate) db: Option<Database>,
    pub(crate) rng: SeededRng,
    max_retained: u64,
    writes: u64,
}

impl Fixture {
    pub(crate) fn new(seed: u64, max_retained: u64) -> Fixture {
        let (machine, options, env) = (MemFs::new(), RandomOptions::new(seed), TestEnv::new(seed));
        let db = open(&machine, &options, &env, max_retained);
        for name in NAMES {
            options.open(&db, name).unwrap();
        }
        db.persist(PersistMode::SyncAll).unwrap();
        Fixture { machine, options, env, db: Some(db), rng: SeededRng::new(seed), max_retained, writes: 0 }
    }

    pub(crate) fn db(&self) -> &Database {
        self.db.as_ref().expect("the database is open")
    }

    fn partition(&self, name: &str) -> Result<Partition> {
        self.options.open(self.db(), name)
    }

    fn key(&mut self) -> Vec<u8> {
        format!("key{:03}", self.rng.below(60)).into_bytes()
    }

    fn value(&mut self) -> Vec<u8> {
        self.writes += 1;
        let len = self.rng.pick(&[3, 20, 70, 300, 5_000]);
        let mut value = format!("value {} ", self.writes).into_bytes();
        value.resize(value.len().max(len), b'v');
        value
    }

    /// One random change, or one event that concerns the log.
    pub(crate) fn step(&mut self) -> Result<()> {
        let name = self.rng.pick(&NAMES);
        let p = self.partition(name)?;
        match self.rng.below(20) {
            0..=5 => {
                let (key, value) = (self.key(), self.value());
                p.insert(key, value)
            }
            6 | 7 => {
                let key = self.key();
                p.remove(key)
            }
            8..=11 => {
                let mode = self.rng.pick(&[PersistMode::Buffer, PersistMode::SyncData]);
                let mut writes = AtomicWrites::begin(self.db.as_ref().expect("open"), self.rng.below(12) as u64, mode);
                for _ in 0..self.rng.below(6) {
                    let (p, key, value) = (self.partition(self.rng.clone().pick(&NAMES))?, self.key(), self.value());
                    match self.rng.below(4) {
                        0 => writes.remove(&p, &key),
                        1 => writes.remove_range(&p, &key),
                        _ => writes.insert(&p, &key, &value),
                    }
                }
                writes.commit()
            }
            12 => {
                let (a, b) = (self.key(), self.key());
                p.remove_range(a.clone().min(b.clone())..a.max(b))
            }
            13 if self.options.merge_operator(name).is_some() => {
                let key = self.key();
                p.merge(key, "+")
            }
            14 => {
                let pairs: BTreeMap<_, _> = (0..self.rng.below(20)).map(|_| (self.key(), self.value())).collect();
                p.ingest(pairs).map(drop)
            }
            15 | 16 => p.flush(),
            17 => p.major_compact(),
            18 => match p.gc_with_space_amp_target(1.0) {
                Err(error) if error.kind() == ErrorKind::Invalid => Ok(()), // without blob files
                done => done.map(drop),
            },
            _ => self.db().step().map(drop),
        }
    }

    /// Closes the database, or drops it without effect on a machine that has stopped, and opens it again.
    pub(crate) fn reopen(&mut self, crash: Option<(Survival, u64)>) {
        if let Some((survival, seed)) = crash {
            self.db = None;
            crash_or_kill(&self.machine, survival, seed);
        } else if let Some(db) = self.db.take() {
            db.close().unwrap();
        }
        self.db = Some(open(&self.machine, &self.options, &self.env, self.max_retained));
    }
}

fn open(machine: &MemFs, options: &RandomOptions, env: &TestEnv, max_retained: u64) -> Database {
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    let config = options.config(DIR.as_ref(), fs, env).wal_retention(Duration::from_secs(1 << 20));
    config.max_retained_wal_size(max_retained).open().unwrap()
}

/// Two replicas of one database. After a crash, the one that reads durable commits only goes on; the other one is told
/// if it has read a commit that is lost.
fn check_replicas(seed: u64, max_retained: u64) -> [u64; 4] {
    let report = FailureReport::new("changes::", seed);
    let mut fixture = Fixture::new(seed, max_retained);
    let (mut crashes, mut stale) = (0, 0);
    let mut replicas =
        [true, false].map(|durable_only| Replica::of(fixture.db(), &fixture.options, durable_only).unwrap());
    for n in 0..120 {
        report.set_progress(format!("step {n}"));
        let event = fixture.rng.below(30);
        if event < 3 {
            // The machine stops within the next steps.
            fixture.machine.freeze_after(Some(fixture.rng.below(60) as u64));
        }
        let stepped = fixture.step();
        if let Err(error) = &stepped {
            assert!(fixture.machine.is_frozen(), "{error}");
        }
        let is_lossy = fixture.rng.chance_one_in(2);
        if fixture.machine.is_frozen() {
            let survival = match is_lossy {
                true => fixture.rng.pick(&[Survival::Nothing, Survival::Random, Survival::DataOnly]),
                false => Survival::Everything,
            };
            let seed = fixture.rng.next_u64();
            fixture.reopen(Some((survival, seed)));
            crashes += 1;
        } else if event == 3 {
            fixture.machine.freeze_after(None);
            fixture.reopen(None);
        }
        if fixture.rng.chance_one_in(4) || fixture.machine.op_count() == 0 {
            fixture.machine.freeze_after(None);
            let syncs = fixture.rng.chance_one_in(2);
            for replica in &mut replicas {
                let is_behind = replica.is_durable_only;
                match replica.catch_up(fixture.db()) {
                    Ok(()) if is_behind && !syncs => {}
                    Ok(()) if is_behind => {
                        fixture.db().persist(PersistMode::SyncData).unwrap();
                        replica.catch_up(fixture.db()).unwrap();
                        replica.check(fixture.db(), &fixture.options);
                    }
                    Ok(()) => replica.check(fixture.db(), &fixture.options),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
                        assert!(!is_behind || max_retained < 1 << 30, "durable commits are not lost: {error}");
                        stale += 1;
                        *replica = Replica::of(fixture.db(), &fixture.options, is_behind).unwrap();
                    }
                }
            }
        }
    }
    let sum = |count: fn(&Replica) -> u64| replicas.iter().map(count).sum();
    [sum(|replica| replica.commits), crashes, stale, sum(|replica| replica.gone)]
}

#[test]
fn replicas_follow_through_crashes() {
    let mut sums = [0; 4];
    let seeds = test_seeds(60);
    for seed in &seeds {
        let counts = check_replicas(*seed, 1 << 30);
        sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    if seeds.len() > 1 {
        let [commits, crashes, stale, gone] = sums;
        let sums = format!("{commits} commits, {crashes} crashes, {stale} stale, {gone} values gone");
        assert!(commits > 1_000 && crashes > 50 && stale > 0 && gone > 0, "{sums}");
    }
}

#[test]
fn slow_readers_are_told_what_is_gone() {
    let mut sums = [0; 4];
    let seeds = test_seeds(30);
    for seed in &seeds {
        let counts = check_replicas(*seed, 70_000); // about one segment
        sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    assert!(seeds.len() == 1 || sums[2] > 0, "no reader was stale");
}

/// Writers, a reader of all changes, and one of a partition, while workers flush and recycle the log.
#[test]
fn every_commit_is_read_once_beside_writers() {
    let machine = MemFs::new();
    let config = Config::new(DIR).fs(Arc::new(machine)).workers(2).wal_segment_size(64 << 10);
    let db = config.memory_budget(1 << 20).open().unwrap();
    let (a, b) =
        (db.open_partition("a", Default::default()).unwrap(), db.open_partition("b", Default::default()).unwrap());
    let start = db.change_position().unwrap();
    let mut all = db.changes_since(start).unwrap().named("all");
    let mut one = db.changes_since(start).unwrap().partition(&b).unwrap().named("one");
    let (threads, rounds) = (4u8, 600u32);
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut next = [0u32; 4];
            let mut take = |commit: CommittedBatch| {
                let changes: Vec<_> = commit.changes().collect();
                assert_eq!(changes.iter().map(|change| change.partition).collect::<Vec<_>>(), ["a", "b"]);
                let Operation::Insert { key, value, .. } = &changes[1].operation else { panic!("an insert") };
                let thread = usize::from(key[0]);
                let round = u32::from_be_bytes(value.get().unwrap().unwrap()[..4].try_into().unwrap());
                assert_eq!(round, next[thread], "commits of a thread are in order, each once");
                next[thread] += 1;
            };
            while !is_done.load(Ordering::Acquire) {
                all.wait(Duration::from_millis(5)).unwrap();
                all.by_ref().for_each(|commit| take(commit.unwrap()));
            }
            all.by_ref().for_each(|commit| take(commit.unwrap()));
            assert_eq!(next, [rounds; 4]);
        });
        let writers: Vec<_> = (0..threads)
            .map(|thread| {
                let (db, a, b) = (&db, &a, &b);
                scope.spawn(move || {
                    for round in 0..rounds {
                        let mut batch = db.batch();
                        let mut value = round.to_be_bytes().to_vec();
                        value.resize(500, thread);
                        batch.insert(a, [thread, (round % 50) as u8], &value);
                        batch.insert(b, [thread], value);
                        batch.commit().unwrap();
                    }
                })
            })
            .collect();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        is_done.store(true, Ordering::Release);
        reader.join().unwrap();
    });
    a.flush().unwrap();
    b.flush().unwrap();
    wait_until("segments are kept for readers only", || db.metrics().wal_retained_bytes > 0);
    let metrics = db.metrics();
    let reader = &metrics.change_readers[1];
    assert_eq!((&*reader.name, reader.records_behind), ("one", u64::from(threads) * u64::from(rounds) * 2));
    assert!(reader.retained_bytes > 0 && reader.retained_bytes == metrics.wal_retained_bytes, "{reader:?}");
    let mut commits = 0;
    for commit in one.by_ref() {
        let commit = commit.unwrap();
        assert!(commit.changes().all(|change| change.partition == "b"));
        commits += 1;
    }
    assert_eq!(commits, u64::from(threads) * u64::from(rounds));
    drop((all, one));
    a.flush().unwrap();
    assert_eq!(db.metrics().change_readers, []);
}

/// Readers that the log does not wait for: what they return is right and in order, until they are told to be stale.
#[test]
fn recycling_is_noticed() {
    let machine = MemFs::new();
    let config = Config::new(DIR).fs(Arc::new(machine)).workers(2).wal_segment_size(64 << 10).memory_budget(1 << 20);
    let db = config.max_retained_wal_size(0).open().unwrap();
    let p = db.open_partition("p", Default::default()).unwrap();
    let (is_done, has_read) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The reader may begin late.
            for n in (0u32..).take_while(|n| *n < 4_000 || !has_read.load(Ordering::Relaxed)) {
                p.insert("counter", [&n.to_be_bytes()[..], &[7; 400]].concat()).unwrap();
                if n % 100 == 99 {
                    p.flush().unwrap();
                }
            }
            is_done.store(true, Ordering::Release);
        });
        // The next commits may be recycled before they are found.
        let begin = || loop {
            match db.change_position().and_then(|now| db.changes_since(now)) {
                Err(error) if error.kind() == ErrorKind::Stale => {}
                begun => return begun.unwrap(),
            }
        };
        let mut changes = begin();
        let mut last = None;
        while !is_done.load(Ordering::Acquire) {
            match changes.next() {
                None => _ = changes.wait(Duration::from_millis(1)).unwrap(),
                Some(Ok(commit)) => {
                    let change = commit.changes().next().unwrap();
                    let Operation::Insert { value, .. } = change.operation else { panic!("an insert") };
                    let n = u32::from_be_bytes(value.get().unwrap().unwrap()[..4].try_into().unwrap());
                    assert!(last.is_none_or(|last| n == last + 1), "{n} after {last:?}");
                    last = Some(n);
                    has_read.store(true, Ordering::Relaxed);
                    if n % 500 == 0 {
                        // Falls behind: the writer may recycle the segment that is read.
                        let behind = db.metrics().flushes + 3;
                        while db.metrics().flushes < behind && !is_done.load(Ordering::Acquire) {
                            std::thread::yield_now();
                        }
                    }
                }
                Some(Err(error)) => {
                    assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
                    changes = begin();
                    last = None;
                }
            }
        }
    });
    // One that is certainly behind.
    let start = db.change_position().unwrap();
    let old = db.changes_since(start).unwrap();
    for n in 0..1_000u32 {
        p.insert("counter", [&n.to_be_bytes()[..], &[7; 400]].concat()).unwrap();
        if n % 100 == 99 {
            p.flush().unwrap();
        }
    }
    wait_until("the log is recycled", || db.changes_since(start).is_err());
    let last = old.map(|commit| commit.map(drop)).find(Result::is_err);
    assert_eq!(last.unwrap().unwrap_err().kind(), ErrorKind::Stale);
}

#[test]
fn positions_belong_to_one_database() {
    let machine = MemFs::new();
    let open = |name: &str| Config::new(name).fs(Arc::new(machine.clone())).workers(0).open().unwrap();
    let (a, b) = (open("/a"), open("/b"));
    let p = a.open_partition("p", Default::default()).unwrap();
    let start = a.change_position().unwrap();
    p.insert("k", "v").unwrap();
    assert_eq!(b.changes_since(start).unwrap_err().kind(), ErrorKind::Invalid);
    a.checkpoint("/copy").unwrap();
    let copy = open("/copy");
    assert_eq!(copy.changes_since(start).unwrap_err().kind(), ErrorKind::Invalid, "a copy has another future");
    assert_eq!(start.partial_cmp(&b.change_position().unwrap()), None);
    // From the future: of the database before it was restored from an older copy of its files.
    let older = machine.fork();
    p.insert("k", "w").unwrap();
    let future = a.change_position().unwrap();
    older.freeze_after(None);
    let restored = Config::new("/a").fs(Arc::new(older)).workers(0).open().unwrap();
    let error = restored.changes_since(future).unwrap_err();
    assert!([ErrorKind::Stale, ErrorKind::Invalid].contains(&error.kind()), "{error}");
    let q = b.open_partition("q", Default::default()).unwrap();
    assert_eq!(a.changes_since(start).unwrap().partition(&q).unwrap_err().kind(), ErrorKind::Invalid);
    b.close().unwrap();
    assert_eq!(q.get("k").unwrap_err().kind(), ErrorKind::Closed);
    let mut changes = a.changes_since(start).unwrap();
    a.close().unwrap();
    assert_eq!(changes.next().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(changes.wait(Duration::ZERO).unwrap_err().kind(), ErrorKind::Closed);
    for text in ["", "00", &"zz".repeat(32), &"ä".repeat(32), &"00".repeat(32)] {
        assert_eq!(text.parse::<ChangePosition>().unwrap_err().kind(), ErrorKind::Invalid, "{text}");
    }
}

/// A position stays valid over any number of opens of an idle database.
#[test]
fn idle_opens_keep_a_position() {
    let machine = MemFs::new();
    let open = || Config::new(DIR).fs(Arc::new(machine.clone())).workers(0).open().unwrap();
    let db = open();
    db.open_partition("p", Default::default()).unwrap().insert("k", "v").unwrap();
    let position = db.change_position().unwrap();
    db.close().unwrap();
    for n in 0..100 {
        let db = open();
        assert!(db.changes_since(position).unwrap().next().is_none(), "open {n}");
        if n % 3 > 0 {
            db.close().unwrap();
        } else {
            machine.freeze_after(Some(0)); // a crash
            drop(db);
            machine.freeze_after(None);
        }
    }
    let db = open();
    db.partition("p").unwrap().insert("k", "w").unwrap();
    assert_eq!(db.changes_since(position).unwrap().count(), 1);
}

#[test]
fn filters_pass_what_concerns_their_keys() {
    let db = Config::new(DIR).fs(Arc::new(MemFs::new())).workers(0).open().unwrap();
    let (p, q) =
        (db.open_partition("p", Default::default()).unwrap(), db.open_partition("q", Default::default()).unwrap());
    let start = db.change_position().unwrap();
    for key in ["a1", "a2", "b1"] {
        p.insert(key, key).unwrap();
        q.insert(key, key).unwrap();
    }
    p.remove_range("a3".."b").unwrap(); // touches no key below "a3"
    p.remove_range("a2"..).unwrap();
    p.remove("b1").unwrap();
    p.ingest([("b2", "")]).unwrap();
    p.ingest([("a0", ""), ("c", "")]).unwrap();
    q.clear().unwrap();
    let count = |changes: azekura::Changes| changes.map(|commit| commit.unwrap().changes().count()).sum::<usize>();
    let all = || db.changes_since(start).unwrap();
    assert_eq!(count(all()), 12);
    assert_eq!(count(all().partition(&p).unwrap()), 8);
    assert_eq!(count(all().prefix(&p, "a").unwrap()), 5, "two inserts, two ranges, one ingest");
    assert_eq!(count(all().prefix(&p, "a2").unwrap()), 3);
    assert_eq!(count(all().prefix(&p, "b").unwrap().prefix(&q, "a").unwrap()), 8);
    // A filter that is added while a commit is held.
    let mut changes = all();
    let held = changes.next().unwrap().unwrap();
    let rest = count(changes.partition(&p).unwrap());
    assert_eq!((held.changes().count(), rest), (1, 7));
    let mut none = all().prefix(&p, "zz").unwrap().prefix(&q, "y").unwrap();
    assert_eq!(none.by_ref().count(), 2, "two ranges without an end");
    assert_eq!(none.position(), db.change_position().unwrap(), "the position passes what no filter lets pass");
    db.delete_partition(q).unwrap();
    assert_eq!(count(all()), 8, "changes of deleted partitions are left out");
}

/// Regression: power loss removed a segment and the entry of the manifest that names it. The next segment got the same
/// epoch, so the end of the log that the recovery had recorded did not concern the position.
#[test]
fn position_in_a_lost_segment_is_stale() {
    for rotates in [false, true] {
        let machine = MemFs::new();
        let open = || {
            let config = Config::new(DIR).fs(Arc::new(machine.clone())).workers(0).wal_segment_size(64 << 10);
            config.wal_retention(Duration::from_secs(3600)).open().unwrap()
        };
        let db = open();
        let p = db.open_partition("p", Default::default()).unwrap();
        db.persist(PersistMode::SyncAll).unwrap();
        let db = if rotates {
            db
        } else {
            drop(p);
            db.close().unwrap();
            open()
        };
        let p = db.partition("p").unwrap();
        for n in 0..30u32 {
            p.insert(n.to_be_bytes(), [7; 4000]).unwrap();
        }
        let position = db.change_position().unwrap();
        machine.freeze_after(Some(0));
        drop((db, p));
        crash_or_kill(&machine, Survival::Nothing, 1);
        machine.freeze_after(None);
        let db = open();
        let p = db.partition("p").unwrap();
        for n in 0..40u32 {
            p.insert(n.to_be_bytes(), "other").unwrap();
        }
        let found = db.changes_since(position).map(|changes| changes.count());
        assert_eq!(found.unwrap_err().kind(), ErrorKind::Stale, "rotates: {rotates}");
    }
}

/// Regression: power loss kept the log and lost the end of the manifest, so a recovery abandoned the first commits of a
/// segment. A reader of changes before them returned them, because the segment that had replaced theirs was recycled.
#[test]
fn abandoned_commits_are_no_changes() {
    let machine = MemFs::new();
    let open = || {
        let config = Config::new(DIR).fs(Arc::new(machine.clone())).workers(0).sync_interval(None);
        config.wal_segment_size(64 << 10).max_retained_wal_size(0).open().unwrap()
    };
    let db = open();
    let p = db.open_partition("p", Default::default()).unwrap();
    let start = db.change_position().unwrap();
    p.insert("k", [1; 50_000]).unwrap();
    db.persist(PersistMode::SyncData).unwrap();
    let manifest = std::path::Path::new(DIR).join("MANIFEST");
    let len = machine.open(&manifest, OpenMode::Read).unwrap().length().unwrap();
    let q = db.open_partition("q", Default::default()).unwrap();
    q.insert("first in the next segment", [2; 20_000]).unwrap();
    p.insert("k", "abandoned").unwrap();
    machine.freeze_after(Some(0));
    drop((p, q, db));
    machine.freeze_after(None);
    machine.open(&manifest, OpenMode::Write).unwrap().set_length(len).unwrap();
    let db = open();
    let p = db.partition("p").unwrap();
    let mut changes = db.changes_since(start).unwrap();
    assert_eq!(changes.by_ref().map(Result::unwrap).count(), 1);
    for n in 0..6u8 {
        p.insert([n], [n; 30_000]).unwrap();
    }
    p.flush().unwrap();
    while db.step().unwrap() {}
    let kind = changes.next().unwrap().map(drop).unwrap_err().kind();
    assert_eq!(kind, ErrorKind::Stale);
}

/// Regression: a recent position was stale if the commits after it are from more than 64 opens before, because the ends
/// of their segments are forgotten.
#[test]
fn commits_of_many_opens_are_changes() {
    let machine = MemFs::new();
    let open = || {
        let config = Config::new(DIR).fs(Arc::new(machine.clone())).workers(0).wal_segment_size(64 << 10);
        config.wal_retention(Duration::from_secs(3600)).open().unwrap()
    };
    let db = open();
    let mut position = db.change_position().unwrap();
    db.open_partition("p", Default::default()).unwrap();
    drop(db);
    for n in 0..100u32 {
        let db = open();
        db.partition("p").unwrap().insert(n.to_be_bytes(), "").unwrap();
        if n == 50 {
            let mut changes = db.changes_since(position).unwrap();
            changes.next().unwrap().unwrap();
            position = changes.position();
        }
    }
    assert_eq!(open().changes_since(position).unwrap().map(Result::unwrap).count(), 99);
}

/// Regression: changes of a pool without the log advance the sequence number, but not the end of the log, so a fresh
/// position was stale.
#[test]
fn fresh_position_is_valid_beside_a_pool() {
    let machine = MemFs::new();
    machine.set_mapped_memory(PersistenceLevel::ProcessCrash);
    let config = Config::new(DIR).fs(Arc::new(machine)).workers(0).wal_retention(Duration::from_secs(3600));
    let open = || config.clone().open().unwrap();
    let db = open();
    let pool = db.open_partition("pool", pool_options(4 << 20)).unwrap();
    let p = db.open_partition("p", Default::default()).unwrap();
    p.insert("a", "1").unwrap();
    let mut positions = Vec::new();
    for n in 0..5u32 {
        pool.insert(n.to_be_bytes(), "x").unwrap();
        positions.push(db.change_position().unwrap());
    }
    let count = |db: &Database, position| {
        let changes = db.changes_since(position)?.partition(&db.partition("p")?)?;
        changes.map(|commit| commit.map(drop)).collect::<Result<Vec<()>>>().map(|commits| commits.len())
    };
    assert_eq!(positions.iter().map(|p| count(&db, *p).unwrap()).collect::<Vec<_>>(), [0; 5]);
    p.insert("b", "2").unwrap();
    assert_eq!(positions.iter().map(|p| count(&db, *p).unwrap()).collect::<Vec<_>>(), [1; 5]);
    pool.insert("c", "x").unwrap();
    let last = db.change_position().unwrap();
    drop((p, pool));
    db.close().unwrap();
    let db = open();
    assert_eq!(count(&db, last).unwrap(), 0);
    db.partition("p").unwrap().insert("d", "4").unwrap();
    assert_eq!(count(&db, last).unwrap(), 1);
    assert_eq!(db.changes_since(last).unwrap().next().unwrap().unwrap_err().kind(), ErrorKind::Unsupported);
}

/// Commits in memory share the partitions that they name, of which there are more than one commit may share.
#[test]
fn commits_of_many_partitions_are_read() {
    let db = Config::new(DIR).fs(Arc::new(MemFs::new())).workers(0).open().unwrap();
    let start = db.change_position().unwrap();
    let parts: Vec<_> = (0..100).map(|n| db.open_partition(&format!("p{n}"), Default::default()).unwrap()).collect();
    let mut batch = db.batch();
    for part in &parts {
        part.insert("a", "1").unwrap();
        batch.insert(part, "b", "2");
    }
    batch.commit().unwrap();
    for part in &parts {
        part.insert("c", "3").unwrap();
    }
    let mut seen = Vec::new();
    for commit in db.changes_since(start).unwrap().map(Result::unwrap).collect::<Vec<_>>() {
        seen.extend(commit.changes().map(|change| change.partition.to_owned()));
    }
    let names: Vec<_> = parts.iter().map(|part| part.name.to_string()).collect();
    assert_eq!(seen, [&names[..], &names, &names].concat());
}

/// Regression: `wait` did not return the error of a database that has no further commit.
#[test]
fn wait_ends_when_the_database_is_poisoned() {
    let faults = FaultFs::new(Arc::new(MemFs::new()));
    let db = Config::new(DIR).fs(Arc::new(faults.clone())).env(Arc::new(TestEnv::new(1))).workers(0).open().unwrap();
    let p = db.open_partition("p", Default::default()).unwrap();
    let start = db.change_position().unwrap();
    let (mut all, durable) =
        (db.changes_since(start).unwrap(), db.changes_since(start).unwrap().durable_only().unwrap());
    p.insert("a", "1").unwrap();
    faults.inject(FaultPlan::new(OpKind::Sync, 1, Fault::Error(std::io::ErrorKind::Other)));
    assert_eq!(db.persist(PersistMode::SyncData).unwrap_err().kind(), ErrorKind::Poisoned);
    let longest = Duration::from_secs(1 << 20);
    assert!(all.wait(longest).unwrap(), "the commit before the failure");
    assert_eq!(all.by_ref().map(Result::unwrap).count(), 1);
    for changes in [all, durable] {
        assert_eq!(changes.wait(longest).unwrap_err().kind(), ErrorKind::Poisoned);
    }
}

/// Positions of a database whose manifest was built anew: commits may be missing, and numbers be used again.
#[test]
fn positions_end_with_a_repair() {
    let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
    let open =
        || Config::new(DIR).fs(Arc::clone(&fs)).workers(0).wal_retention(Duration::from_secs(3600)).open().unwrap();
    let db = open();
    db.open_partition("p", Default::default()).unwrap().insert("a", "1").unwrap();
    let position = db.change_position().unwrap();
    db.close().unwrap();
    assert!(open().changes_since(position).is_ok());
    let manifest = std::path::Path::new(DIR).join("MANIFEST");
    for rebuilt in [false, true] {
        let bytes = match rebuilt {
            false => azekura::inspect::partial_manifest(&fs, DIR.as_ref(), &[]).unwrap().bytes,
            true => azekura::inspect::rebuilt_manifest(&fs, DIR.as_ref()).unwrap().bytes,
        };
        write_file(&*fs, &manifest, &bytes);
        let db = open();
        assert_eq!(db.changes_since(position).unwrap_err().kind(), ErrorKind::Invalid, "rebuilt: {rebuilt}");
        assert_eq!(db.partition("p").unwrap().get("a").unwrap().unwrap(), "1");
        db.close().unwrap();
    }
}

/// Damage at the end of the log is an error: the commits behind it were written.
#[test]
fn damage_of_the_newest_commits_is_no_end() {
    let machine = MemFs::new();
    let db = Config::new(DIR).fs(Arc::new(machine.clone())).workers(0).open().unwrap();
    let p = db.open_partition("p", Default::default()).unwrap();
    let mut changes = db.changes_since(db.change_position().unwrap()).unwrap();
    for value in *b"abc" {
        p.insert("k", [value; 100]).unwrap();
    }
    for entry in machine.read_dir(DIR.as_ref()).unwrap().iter().filter(|entry| entry.name.ends_with(".wal")) {
        let file = machine.open(&std::path::Path::new(DIR).join(&entry.name), OpenMode::Write).unwrap();
        let at = file_bytes(&*file).windows(100).position(|window| window == [b'b'; 100]);
        at.into_iter().for_each(|at| file.write_at(b"x", at as u64).unwrap());
    }
    assert!(changes.next().unwrap().is_ok(), "the commit before the damage");
    for _ in 0..3 {
        assert_eq!(changes.next().unwrap().unwrap_err().kind(), ErrorKind::Corruption);
    }
}

/// Regression: a feed of a follower that had found its segment before a recovery returned the commits of it that the
/// recovery had abandoned, after more than 64 opens.
#[test]
fn a_feed_ends_where_the_end_is_forgotten() {
    for opens in [3u32, 80] {
        let machine = MemFs::new();
        let config = || {
            let config = Config::new(DIR).fs(Arc::new(machine.clone())).workers(0).sync_interval(None);
            config.wal_segment_size(64 << 10).wal_retention(Duration::from_secs(3600))
        };
        let db = config().open().unwrap();
        let p = db.open_partition("p", Default::default()).unwrap();
        p.insert("k", "kept").unwrap();
        db.persist(PersistMode::SyncData).unwrap();
        let manifest = std::path::Path::new(DIR).join("MANIFEST");
        let len = machine.open(&manifest, OpenMode::Read).unwrap().length().unwrap();
        let follower = config().follow_interval(None).open_follower().unwrap();
        let mut changes = follower.changes_since(follower.change_position().unwrap()).unwrap();
        let q = db.open_partition("q", Default::default()).unwrap();
        q.insert("abandoned", "2").unwrap();
        p.insert("k", "abandoned").unwrap();
        machine.freeze_after(Some(0));
        drop((p, q, db));
        machine.freeze_after(None);
        // Power loss kept the log and lost the end of the manifest.
        machine.open(&manifest, OpenMode::Write).unwrap().set_length(len).unwrap();
        for n in 0..opens {
            let db = config().open().unwrap();
            let p = db.partition("p").unwrap();
            assert_eq!(p.get("k").unwrap().as_deref(), Some(&b"kept"[..]));
            p.insert(n.to_be_bytes(), "new").unwrap();
            assert_eq!(follower.catch_up().unwrap(), db.change_position().unwrap());
        }
        for commit in changes.by_ref().map_while(Result::ok).take(200) {
            let keys = commit.changes().map(|change| match change.operation {
                Operation::Insert { key, .. } => key.to_vec(),
                _ => Vec::new(),
            });
            assert!(keys.into_iter().all(|key| key != b"k" && key != b"abandoned"), "{opens} opens");
        }
    }
}

/// Regression: a follower publishes the commits of a new partition before the partition is in its catalog. A feed that
/// read them meanwhile took the partition for a deleted one, for good.
#[test]
fn a_feed_has_the_changes_of_partitions_that_are_installed() {
    let machine = MemFs::new();
    let config = || Config::new(DIR).fs(Arc::new(machine.clone())).workers(0).wal_retention(Duration::from_secs(3600));
    let db = config().open().unwrap();
    let fill: Vec<_> = (0..40).map(|n| db.open_partition(&format!("fill{n}"), Default::default()).unwrap()).collect();
    fill.iter().for_each(|p| p.insert("a", "1").unwrap());
    let follower = config().follow_interval(None).open_follower().unwrap();
    let mut changes = follower.changes_since(follower.change_position().unwrap()).unwrap();
    let is_done = AtomicBool::new(false);
    let expected: BTreeSet<String> = (0..20).map(|n| format!("new{n}")).collect();
    let seen = std::thread::scope(|scope| {
        let feed = scope.spawn(|| {
            let mut seen = BTreeSet::new();
            loop {
                let ends = is_done.load(Ordering::SeqCst);
                for commit in changes.by_ref().map(Result::unwrap) {
                    seen.extend(commit.changes().map(|change| change.partition.to_owned()));
                }
                if ends {
                    return seen;
                }
            }
        });
        for name in &expected {
            for p in &fill {
                (0..20u8).for_each(|k| p.insert(format!("{name} {k}"), [1; 100]).unwrap());
            }
            follower.catch_up().unwrap();
            fill.iter().for_each(|p| p.flush().unwrap());
            db.open_partition(name, Default::default()).unwrap().insert("k", "1").unwrap();
            assert_eq!(follower.catch_up().unwrap(), db.change_position().unwrap());
        }
        is_done.store(true, Ordering::SeqCst);
        feed.join().unwrap()
    });
    assert!(seen.is_superset(&expected), "{:?} are missing", expected.difference(&seen));
}

/// Regression: a feed of a follower at the end of the log was stale after a clean open without commits, because the
/// segments that link the next one to its own are removed. A watcher made a whole backup.
#[test]
fn a_feed_goes_on_after_opens_without_commits() {
    for (idle_opens, flushes) in (0..4).flat_map(|idle| [(idle, false), (idle, true)]) {
        let machine = MemFs::new();
        let config = || Config::new(DIR).fs(Arc::new(machine.clone())).workers(0).wal_segment_size(64 << 10);
        let mut db = config().open().unwrap();
        db.open_partition("p", Default::default()).unwrap().insert("k", "1").unwrap();
        let follower = config().follow_interval(None).open_follower().unwrap();
        let mut changes = follower.changes_since(follower.change_position().unwrap()).unwrap();
        for round in 0..4u8 {
            let p = db.partition("p").unwrap();
            p.insert([round], "1").unwrap();
            follower.catch_up().unwrap();
            let seen: Vec<_> = changes.by_ref().map(|commit| commit.map(drop)).take(2).collect();
            assert!(matches!(seen[..], [Ok(())]), "round {round}, {idle_opens} idle opens, {flushes}: {seen:?}");
            if flushes {
                p.flush().unwrap();
            }
            drop(p);
            for _ in 0..=idle_opens {
                db.close().unwrap();
                db = config().open().unwrap();
            }
        }
    }
}
