//! A follower reads a commit whose write fails, because a file system that does not overwrite in place is full.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use azekura::fs::{File, Fs, Mapping, OpenMode};
use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, SeededRng, Survival, TestEnv, TestOrder};
use azekura::{Batch, Config, Database, Error, ErrorKind, Partition, PersistMode, Result, Slice, Snapshot, inspect};

use super::faults::{config, partition, text};
use super::open_hook::OpenHookFs;
use super::windows::recycle_the_log;
use crate::pools::pool_options;
use crate::testkit::env_u64;
use crate::testkit::ordered_partitions::open_ordered;
use crate::testkit::seeds::test_seeds;
use crate::testkit::test_dir::crash_or_kill;

type WriteHook = Arc<Mutex<Option<Box<dyn FnOnce() + Send>>>>;

/// A file of the log. Once a hook is set, the next write is made, calls the hook, and fails as on a full disk, as if
/// only a later part of it had failed.
struct FullDiskFile {
    inner: Arc<dyn File>,
    hook: WriteHook,
}

impl std::fmt::Debug for FullDiskFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FullDiskFile")
    }
}

impl File for FullDiskFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        self.inner.read_at(buf, offset)
    }
    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.inner.write_at(bytes, offset)?;
        // A header of which a part may be written would poison the database.
        let hook = (offset > 0).then(|| self.hook.lock().unwrap().take()).flatten();
        hook.map_or(Ok(()), |hook| {
            hook();
            Err(Error::io("write", &io::Error::from(io::ErrorKind::StorageFull)))
        })
    }
    fn length(&self) -> Result<u64> {
        self.inner.length()
    }
    fn set_length(&self, len: u64) -> Result<()> {
        self.inner.set_length(len)
    }
    fn allocate(&self, len: u64) -> Result<()> {
        self.inner.allocate(len)
    }
    fn sync_data(&self) -> Result<()> {
        self.inner.sync_data()
    }
    fn sync_all(&self) -> Result<()> {
        self.inner.sync_all()
    }
    fn map(&self, _: u64) -> Result<Option<Box<dyn Mapping>>> {
        Ok(None)
    }
}

/// A writer with the tables `p` and the pool `q`, and a follower that reads a commit which then fails.
struct FailingWriter {
    machine: MemFs,
    env: Arc<TestEnv>,
    hook: WriteHook,
    /// Those of the follower, and those of the writer.
    faults: FaultFs,
    writer_faults: FaultFs,
    writer_fs: OpenHookFs,
    config: Config,
    writer: Database,
    p: Partition,
    q: Partition,
    follower: Database,
}

/// The writes of a commit.
type Writes<'a> = &'a dyn Fn(&mut Batch, [&Partition; 2]);

/// Writes this value of `k` in both partitions.
fn put_in_both(value: &'static str) -> impl Fn(&mut Batch, [&Partition; 2]) {
    move |batch, parts| parts.iter().for_each(|part| batch.insert(part, "k", value))
}

impl FailingWriter {
    /// `base`: commits that the follower has when it is opened.
    fn new(base: &[Writes<'_>]) -> FailingWriter {
        let (machine, env) = (MemFs::new(), Arc::new(TestEnv::new(1)));
        let faults = FaultFs::new(Arc::new(machine.clone()));
        let hook = WriteHook::default();
        let failing = Arc::clone(&hook);
        let full = OpenHookFs::new(machine.clone()).copying_on_write(move |path, inner| {
            match path.extension().is_some_and(|ending| ending == "wal") {
                true => Arc::new(FullDiskFile { inner, hook: Arc::clone(&failing) }),
                false => inner,
            }
        });
        let writer_faults = FaultFs::new(Arc::new(full.clone()));
        let of_writer = config(Arc::new(writer_faults.clone())).env(env.clone()).wal_segment_size(64 << 10);
        let writer = of_writer.clone().open().unwrap();
        let (p, q) = (partition(&writer, "p"), writer.open_partition("q", pool_options(8 << 20)).unwrap());
        let commit = |writes: &Writes<'_>| {
            let mut batch = writer.batch();
            writes(&mut batch, [&p, &q]);
            batch.commit().unwrap();
        };
        base.iter().for_each(commit);
        let follower = config(Arc::new(faults.clone())).env(env.clone()).open_follower().unwrap();
        FailingWriter {
            machine,
            env,
            hook,
            faults,
            writer_faults,
            writer_fs: full,
            config: of_writer,
            writer,
            p,
            q,
            follower,
        }
    }

    /// Ends the writer, by a kill or not, and opens the database again.
    fn reopen(&mut self, is_killed: bool) {
        self.machine.freeze_after(is_killed.then_some(0));
        let closed = self.writer.clone().close();
        self.machine.freeze_after(None);
        assert!(is_killed || closed.is_ok(), "{closed:?}");
        self.open();
    }

    fn open(&mut self) {
        self.writer = self.config.clone().open().unwrap();
        [self.p, self.q] = ["p", "q"].map(|name| self.writer.partition(name).unwrap());
    }

    fn commit(&self, writes: Writes<'_>) -> Result<()> {
        let mut batch = self.writer.batch();
        writes(&mut batch, [&self.p, &self.q]);
        batch.commit()
    }

    /// The follower cannot open the tables of an ingest, so it holds all commits from here on.
    fn hold(&self) {
        self.p.ingest([("i", "ingested")]).unwrap();
        let eio = Fault::Error(io::ErrorKind::Other);
        self.faults.inject(FaultPlan::new(OpKind::Open, 1, eio).in_path(".sst").forever());
    }

    /// Calls `work` on another thread when the next write of the log is made, which then fails.
    fn fail_after(&self, work: impl FnOnce() + Send + 'static) {
        *self.hook.lock().unwrap() = Some(Box::new(|| std::thread::spawn(work).join().unwrap()));
    }

    /// Makes a commit that the follower reads before it fails. Returns whether the follower has caught up.
    fn fail(&self, writes: Writes<'_>) -> bool {
        let (reader, caught_up) = (self.follower.clone(), Arc::new(AtomicBool::new(false)));
        let seen = Arc::clone(&caught_up);
        self.fail_after(move || seen.store(reader.catch_up().is_ok(), Ordering::SeqCst));
        let failed = self.commit(&|batch, parts| {
            batch.insert(parts[0], "x", "failed"); // a commit that only removes uses the reserve
            writes(batch, parts);
        });
        assert_eq!(failed.unwrap_err().kind(), ErrorKind::OutOfSpace);
        caught_up.load(Ordering::SeqCst)
    }

    /// Recycles the segments that tell what has failed.
    fn recycle(&self) {
        [&self.p, &self.q].iter().for_each(|part| part.flush().unwrap());
        recycle_the_log(&self.writer);
    }

    fn followed(&self) -> [Partition; 2] {
        ["p", "q"].map(|name| self.follower.partition(name).unwrap())
    }
}

/// Regression: a follower showed such a commit, and then took other ones with the same sequence numbers for it. It went
/// on without an error: a pool kept the value that was never committed.
#[test]
fn a_commit_that_failed_was_read() {
    for (is_held, later_key) in [(false, "k"), (true, "k"), (false, "other"), (true, "other")] {
        let put = |batch: &mut Batch, parts: [&Partition; 2], key: &str, value: &str| {
            parts.iter().for_each(|part| batch.insert(part, key, value));
        };
        let failing = FailingWriter::new(&[&|batch, parts| put(batch, parts, "k", "old")]);
        if is_held {
            failing.hold();
        }
        assert_eq!(failing.fail(&|batch, parts| put(batch, parts, "k", "failed")), !is_held);
        let shown = if is_held { "old" } else { "failed" };
        assert_eq!(failing.followed().map(|part| text(&part, "k").unwrap()), [shown; 2]);
        failing.commit(&|batch, parts| put(batch, parts, later_key, "committed")).unwrap();
        (0..3).for_each(|n| failing.p.insert("later", n.to_string()).unwrap());
        if later_key == "other" {
            failing.recycle();
        }
        failing.faults.clear_faults();
        for _ in 0..2 {
            let caught_up = failing.follower.catch_up().map_err(|error| error.kind());
            assert_eq!(caught_up, Err(ErrorKind::Stale), "held: {is_held}, {later_key}");
        }
        let follower = config(Arc::new(failing.faults.clone())).open_follower().unwrap();
        let followed = ["p", "q"].map(|name| text(&follower.partition(name).unwrap(), later_key).unwrap());
        assert_eq!(followed, ["committed"; 2]);
    }
}

/// A commit that fails, and those around it.
struct FailedCommit<'a> {
    is_held: bool,
    base: &'a [Writes<'a>],
    /// Commits behind the opening of the follower, and behind the one that fails.
    before: &'a [Writes<'a>],
    fails: Writes<'a>,
    after: &'a [Writes<'a>],
    is_recycled: bool,
}

/// Regression: pools have commits that are held, but only visible ones were compared when the database was read again.
/// They keep replaced records up to the number of the failed commit, and other commits get that number.
#[test]
fn a_failed_change_of_a_pool_is_stale() {
    let put: Writes<'_> = &|batch, [_, q]| batch.insert(q, "c", "old");
    let put_with_ttl: Writes<'_> = &|batch, [_, q]| batch.insert_with_ttl(q, "c", "old", Duration::from_secs(86_400));
    let remove: Writes<'_> = &|batch, [_, q]| batch.remove(q, "c");
    let remove_range: Writes<'_> = &|batch, [_, q]| batch.remove_range(q, "b"..="e");
    let none = || FailedCommit { is_held: true, base: &[], before: &[], fails: remove, after: &[], is_recycled: false };
    let cases = [
        // A key was removed with the number of the failed put, and was back.
        FailedCommit {
            base: &[put],
            fails: &|batch, [_, q]| {
                batch.insert(q, "d", "failed");
                batch.remove_range(q, "a"..="d");
            },
            after: &[remove],
            ..none()
        },
        // The second value has a number behind the end, so it was not removed.
        FailedCommit {
            fails: &|batch, [_, q]| ["e", "d"].iter().for_each(|key| batch.insert(q, key, "failed")),
            after: &[&|batch, [_, q]| batch.insert(q, "z", "1")],
            ..none()
        },
        // The value with an expiry time has the last number, and stayed.
        FailedCommit {
            fails: &|batch, [_, q]| batch.insert_with_ttl(q, "d", "failed", Duration::from_secs(86_400)),
            after: &[&|batch, [p, _]| ["y", "z"].iter().for_each(|key| batch.insert(p, key, "1"))],
            ..none()
        },
        // A snapshot lost the key when it was changed later.
        FailedCommit { before: &[put], fails: remove_range, is_recycled: true, ..none() },
        FailedCommit { before: &[put], is_recycled: true, ..none() },
        FailedCommit { base: &[put], is_held: false, is_recycled: true, ..none() },
        FailedCommit { base: &[put_with_ttl], is_held: false, is_recycled: true, ..none() },
        // The follower failed with `Invalid` for good: the numbers of the versions of the key did not rise.
        FailedCommit {
            fails: &|batch, [_, q]| {
                ["z", "c"].iter().for_each(|key| batch.insert(q, key, "failed"));
                batch.remove(q, "c");
            },
            after: &[&|batch, [_, q]| ["c", "y", "w", "v"].iter().for_each(|key| batch.insert(q, key, "1"))],
            ..none()
        },
    ];
    for (n, FailedCommit { is_held, base, before, fails, after, is_recycled }) in cases.into_iter().enumerate() {
        let failing = FailingWriter::new(base);
        if is_held {
            failing.hold();
        }
        before.iter().for_each(|writes| failing.commit(writes).unwrap());
        failing.fail(fails);
        after.iter().for_each(|writes| failing.commit(writes).unwrap());
        if is_recycled {
            failing.recycle();
        }
        failing.faults.clear_faults();
        let caught_up = failing.follower.catch_up().map_err(|error| error.kind());
        assert_eq!(caught_up, Err(ErrorKind::Stale), "case {n}");
    }
}

/// Regression: the last commit had expired for the writer, which had removed it, and not for a snapshot of the
/// follower, which was stale for good.
#[test]
fn an_expired_record_of_a_snapshot_is_not_stale() {
    for missing in 0..12 {
        let (machine, env) = (MemFs::new(), Arc::new(TestEnv::new(1)));
        let faults = FaultFs::new(Arc::new(machine.clone()));
        let open = || config(Arc::new(machine.clone())).env(env.clone()).wal_segment_size(64 << 10);
        let mut writer = open().open().unwrap();
        let q = writer.open_partition("q", pool_options(8 << 20)).unwrap();
        q.insert("a", "1").unwrap();
        let follower = open().fs(Arc::new(faults.clone())).open_follower().unwrap();
        q.insert_with_ttl("k", "v", Duration::from_secs(10)).unwrap();
        drop(q);
        follower.catch_up().unwrap();
        let (followed, snapshot) = (follower.partition("q").unwrap(), follower.snapshot());
        env.advance(Duration::from_secs(3600));
        for _ in 0..3 {
            let q = writer.partition("q").unwrap();
            while writer.step().unwrap() {}
            q.flush().unwrap();
            drop((q, writer));
            writer = open().open().unwrap();
        }
        for nth in 1..=missing {
            faults.inject(FaultPlan::new(OpKind::Open, nth, Fault::Error(io::ErrorKind::NotFound)).in_path(".wal"));
        }
        (0..3).for_each(|_| _ = follower.catch_up().unwrap_or_else(|error| panic!("{missing} missing: {error}")));
        assert_eq!(snapshot.get(&followed, "k").unwrap().as_deref(), Some(&b"v"[..]));
        assert_eq!(text(&followed, "k"), None);
    }
}

const KEYS: [&str; 5] = ["a", "b", "c", "d", "e"];

/// What a snapshot finds, which is the same forward, backward and by each key.
fn found_in(snapshot: &Snapshot, part: &Partition) -> Vec<(Slice, Slice)> {
    let found: Vec<_> = snapshot.iter(part).collect::<Result<_>>().unwrap();
    let mut backward: Vec<_> = snapshot.iter(part).rev().collect::<Result<_>>().unwrap();
    backward.reverse();
    assert_eq!(backward, found);
    for key in KEYS {
        let value = found.iter().find(|(of, _)| *of == *key.as_bytes()).map(|(_, value)| value.clone());
        assert_eq!(snapshot.get(part, key).unwrap(), value, "{key}");
    }
    found
}

/// A random history of a writer with commits that fail, and of a follower that reads in between.
struct History {
    failing: FailingWriter,
    rng: SeededRng,
    story: Vec<String>,
    /// How many more commits may fail.
    failures: u32,
    has_failed: bool,
    /// Snapshots of the follower, and what they find.
    snapshots: Vec<(Snapshot, Vec<(Slice, Slice)>)>,
}

impl History {
    fn new(seed: u64, failures: u32) -> History {
        // History 75 fails if only segments tell that a commit has failed: they are removed.
        let (failing, rng) = (FailingWriter::new(&[]), SeededRng::with_stream(220 + seed, 8));
        let story = vec![format!("seed {seed}, {failures} failures")];
        History { failing, rng, story, failures, has_failed: false, snapshots: Vec::new() }
    }

    /// Random writes in the pool, and at times in the tables.
    fn commit(&mut self, fails: bool) {
        let rng = &mut self.rng;
        let writes: Vec<_> = (0..1 + rng.below(3)).map(|_| (rng.below(6), rng.pick(&KEYS), rng.pick(&KEYS))).collect();
        let number = self.story.len().to_string();
        let lives = Duration::from_secs(1 + rng.below(8));
        let commit: Writes<'_> = &|batch, [p, q]| {
            for (kind, key, other) in &writes {
                match kind {
                    0 | 1 => batch.insert(q, key, &number),
                    2 => batch.remove(q, key),
                    3 => batch.insert_with_ttl(q, key, &number, lives),
                    4 => batch.insert(p, key, &number),
                    _ => batch.remove_range(q, *key.min(other)..=*key.max(other)),
                }
            }
        };
        if fails {
            self.failing.fail(commit);
        } else {
            self.failing.commit(commit).unwrap();
        }
        self.story.push(format!("{number}: {writes:?}, {lives:?}, fails: {fails}"));
    }

    /// Returns whether the follower has caught up. It may be `Stale` only after a failure.
    fn catch_up(&mut self) -> bool {
        let caught_up = self.failing.follower.catch_up();
        self.story.push(format!("catch up: {caught_up:?}"));
        let is_stale = caught_up.as_ref().is_err_and(|error| error.kind() == ErrorKind::Stale);
        assert!(self.has_failed || !is_stale, "{:#?}", self.story);
        caught_up.is_ok()
    }

    /// Compares all reads with those of the writer, if the follower has all commits, and all snapshots with before.
    fn check(&mut self) {
        let FailingWriter { writer, q, follower, .. } = &self.failing;
        let followed = follower.partition("q").unwrap();
        if follower.change_position().unwrap() == writer.change_position().unwrap() {
            self.snapshots.push((follower.snapshot(), found_in(&writer.snapshot(), q)));
            for key in KEYS {
                assert_eq!(text(&followed, key), text(q, key), "{:#?}", self.story);
            }
        }
        for (snapshot, found) in &self.snapshots {
            assert_eq!(found_in(snapshot, &followed), *found, "{:#?}", self.story);
        }
    }

    fn step(&mut self) {
        let failing = &mut self.failing;
        let done = match self.rng.below(16) {
            0 if self.failures > 0 => {
                (self.failures, self.has_failed) = (self.failures - 1, true);
                return self.commit(true);
            }
            1 => {
                failing.hold();
                "hold"
            }
            2 => {
                failing.faults.clear_faults();
                "hold no more"
            }
            3 => {
                failing.p.ingest([("j", "ingested")]).unwrap();
                "ingest"
            }
            4 => {
                failing.q.flush().unwrap();
                "flush"
            }
            5 if self.rng.below(2) == 0 => {
                failing.recycle();
                "recycle"
            }
            6 => {
                failing.reopen(false);
                "close and open"
            }
            7 => {
                failing.reopen(true);
                "kill and open"
            }
            8 => {
                failing.env.advance(Duration::from_secs(2));
                "two seconds"
            }
            9 | 10 => {
                self.catch_up();
                return;
            }
            _ => return self.commit(false),
        };
        self.story.push(done.into());
    }

    /// Returns whether the follower is stale in the end.
    fn run(mut self) -> bool {
        for n in 0..8 + self.rng.below(8) {
            self.step();
            if n == 4 {
                self.catch_up();
                let (snapshot, followed) =
                    (self.failing.follower.snapshot(), self.failing.follower.partition("q").unwrap());
                let found = found_in(&snapshot, &followed);
                self.snapshots.push((snapshot, found));
            }
        }
        self.failing.faults.clear_faults();
        for _ in 0..4 {
            // One of the writer may have the number of the failed one then.
            self.commit(false);
            if !self.catch_up() {
                assert!(self.has_failed, "{:#?}", self.story);
                return true;
            }
            self.check();
        }
        let FailingWriter { writer, follower, .. } = &self.failing;
        assert_eq!(follower.change_position().unwrap(), writer.change_position().unwrap(), "{:#?}", self.story);
        false
    }
}

/// A follower of a pool shows the state of the writer whatever fails, or is stale. Without a failure it is never stale.
#[test]
fn pools_have_no_change_that_failed() {
    let seeds = test_seeds(10 * env_u64("AZEKURA_FOLLOWER_RUNS", 8));
    let stale = |failures| seeds.iter().filter(|seed| History::new(**seed, failures).run()).count();
    let found = [1, 2].map(stale);
    assert!(
        seeds.len() == 1 || found.iter().all(|stale| (1..seeds.len()).contains(stale)),
        "{found:?} of {}",
        seeds.len()
    );
    assert_eq!(stale(0), 0);
}

/// Regression: a follower that was opened while a commit was in the log that then failed kept it for good, and lacked
/// the one that got its numbers.
#[test]
fn opened_while_a_commit_fails() {
    for records in 1..=3 {
        let failing = FailingWriter::new(&[&put_in_both("old")]);
        let fs = OpenHookFs::new(failing.machine.clone());
        let (start, started) = channel();
        let (read, was_read) = channel();
        let (go, may_go) = channel();
        let (mut has_read_log, mut is_done) = (false, false);
        // The open has read the log, and looks whether the manifest is the same.
        fs.set(move |path| {
            has_read_log |= path.extension().is_some_and(|end| end == "wal");
            if has_read_log && !is_done && path.ends_with("MANIFEST") {
                is_done = true;
                read.send(()).unwrap();
                may_go.recv().unwrap();
            }
        });
        let env = failing.env.clone();
        let opener = std::thread::spawn(move || {
            started.recv().unwrap();
            config(Arc::new(fs)).env(env).open_follower().unwrap()
        });
        failing.fail_after(move || {
            start.send(()).unwrap();
            was_read.recv().unwrap();
        });
        let failed = failing.commit(&put_in_both("failed"));
        assert_eq!(failed.unwrap_err().kind(), ErrorKind::OutOfSpace);
        let commit: Writes<'_> =
            &|batch, [p, _]| (0..records).for_each(|n| batch.insert(p, format!("y{n}"), "committed"));
        failing.commit(commit).unwrap();
        go.send(()).unwrap();
        let follower = opener.join().unwrap();
        let [p, q] = ["p", "q"].map(|name| follower.partition(name).unwrap());
        for n in 0..3 {
            assert_eq!(follower.catch_up().unwrap(), failing.writer.change_position().unwrap(), "{records} records");
            assert_eq!(
                [text(&p, "k"), text(&q, "k"), text(&p, "y0")],
                ["old", "old", "committed"].map(|v| Some(v.into()))
            );
            failing.p.insert("later", n.to_string()).unwrap();
        }
    }
}

/// Regression: a position behind a commit that failed was taken for that behind the commit that got its numbers, which
/// was then missing in the feed. A feed of the follower that shows the failed commit was `Corruption`.
#[test]
fn position_behind_a_commit_that_failed() {
    for records in 1..=3 {
        let failing = FailingWriter::new(&[&|batch, [p, _]| batch.insert(p, "k", "old")]);
        let start = failing.follower.change_position().unwrap();
        let (reader, sent) = (failing.follower.clone(), Arc::new(Mutex::new(None)));
        let to = Arc::clone(&sent);
        failing.fail_after(move || {
            reader.catch_up().unwrap();
            let mut feed = reader.changes_since(start).unwrap();
            *to.lock().unwrap() = Some(feed.next().unwrap().unwrap().position());
        });
        let failed = failing.commit(&|batch, [p, _]| ["x", "k"].iter().for_each(|key| batch.insert(p, key, "failed")));
        assert_eq!(failed.unwrap_err().kind(), ErrorKind::OutOfSpace);
        let position = sent.lock().unwrap().take().unwrap();
        let first =
            |db: &Database, position| db.changes_since(position).map(|mut feed| feed.next().map(|of| of.map(drop)));
        let of_follower = first(&failing.follower, start).unwrap().unwrap().unwrap_err();
        assert_eq!(of_follower.kind(), ErrorKind::Stale, "{of_follower}");
        let commit: Writes<'_> =
            &|batch, [p, _]| (0..records).for_each(|n| batch.insert(p, format!("y{n}"), "committed"));
        failing.commit(commit).unwrap();
        for is_recycled in [false, true] {
            if is_recycled {
                failing.recycle();
            }
            failing.p.insert("later", "1").unwrap();
            let again = config(Arc::new(failing.machine.clone())).open_follower().unwrap();
            for db in [&failing.writer, &again, &failing.follower] {
                let found = first(db, position).map_err(|error| error.kind());
                assert_eq!(found.unwrap_err(), ErrorKind::Stale, "{records} records");
            }
        }
    }
}

/// Regression: the writer opened a feed behind a single change that had failed, while the next commit got its number.
/// The feed went on behind the change, which readers of the feed had seen.
#[test]
fn feed_is_opened_beside_the_commit_behind_a_failed_one() {
    let failing = FailingWriter::new(&[&put_in_both("old")]);
    let reader = failing.follower.clone();
    failing.fail_after(move || _ = reader.catch_up().unwrap());
    assert_eq!(failing.q.insert("x", "failed").unwrap_err().kind(), ErrorKind::OutOfSpace);
    let behind_failed = failing.follower.change_position().unwrap();
    let p = failing.p.clone();
    // Before the feed looks for its place in the log.
    let is_reached = failing.writer_fs.once("", 0, move || p.insert("y", "committed").unwrap());
    let opened = failing.writer.changes_since(behind_failed).map(drop);
    assert_eq!(opened.unwrap_err().kind(), ErrorKind::Stale);
    assert!(is_reached.load(Ordering::SeqCst));
}

/// Regression: a checkpoint of a follower had a commit that then failed, and nothing told it from the one that got its
/// numbers, so a backup of it counted as durable.
#[test]
fn checkpoint_while_a_commit_fails() {
    let failing = FailingWriter::new(&[&|batch, [p, _]| batch.insert(p, "k", "old")]);
    let position = failing.follower.change_position().unwrap();
    let reader = failing.follower.clone();
    failing.fail_after(move || reader.checkpoint("/copy").unwrap());
    let failed = failing.commit(&|batch, [p, _]| ["x", "k"].iter().for_each(|key| batch.insert(p, key, "failed")));
    assert_eq!(failed.unwrap_err().kind(), ErrorKind::OutOfSpace);
    failing.commit(&|batch, [p, _]| (0..2).for_each(|n| batch.insert(p, format!("y{n}"), "committed"))).unwrap();
    failing.writer.persist(PersistMode::SyncAll).unwrap();
    failing.p.flush().unwrap();
    let fs: Arc<dyn Fs> = Arc::new(failing.machine.clone());
    let copied = inspect::wal_end(&fs, Path::new("/copy")).unwrap().unwrap();
    assert_eq!(copied, failing.follower.catch_up().unwrap().sequence_number());
    let durable = failing.follower.durable_position().unwrap();
    assert!(durable.sequence_number() >= copied && durable.epoch() > position.epoch(), "{durable} {position}");
    let ends = inspect::wal_ends(&fs, failing.writer.path()).unwrap();
    assert_eq!(ends.first(position.epoch()), Some((durable.epoch() - 1, Some(position.sequence_number()))));
}

/// Regression: a follower of a pool whose comparator it was not given was `Stale` for good if the writer was opened
/// twice without a commit in between.
#[test]
fn pending_pool_behind_opens_without_commits() {
    for reopens in 1..4 {
        let machine = MemFs::new();
        let pool = |db: &Database| open_ordered(TestOrder::Reversed, db, "q", pool_options(8 << 20), None).unwrap();
        let open = || config(Arc::new(machine.clone())).open().unwrap();
        let mut writer = open();
        let mut q = pool(&writer);
        q.insert("a", "1").unwrap();
        let follower = config(Arc::new(machine.clone())).open_follower().unwrap();
        for _ in 0..reopens {
            drop((q, writer));
            writer = open();
            q = pool(&writer);
        }
        q.insert("b", "1").unwrap();
        q.flush().unwrap();
        q.insert("c", "1").unwrap();
        (0..2).for_each(|_| assert_eq!(follower.catch_up().unwrap(), writer.change_position().unwrap()));
    }
}

/// The commit behind one that failed waits for the manifest that tells so, which gets space from the reserve. If it has
/// no space all the same, the commit fails, and a later one succeeds.
#[test]
fn manifest_behind_a_failed_commit_has_no_space() {
    // The present manifest was created under the same name, and is synced before.
    for (op, nth) in [(OpKind::Create, 1), (OpKind::Write, 2), (OpKind::Sync, 2), (OpKind::Rename, 1)] {
        for (is_lasting, is_killed) in [(false, false), (true, true), (true, false)] {
            let mut failing = FailingWriter::new(&[&put_in_both("old")]);
            let before = failing.writer.change_position().unwrap();
            failing.fail(&put_in_both("failed"));
            let full = FaultPlan::new(op, nth, Fault::Error(io::ErrorKind::StorageFull)).in_path("MANIFEST.tmp");
            failing.writer_faults.inject(if is_lasting { full.forever() } else { full });
            if is_lasting {
                let failed = failing.commit(&put_in_both("no space")).map_err(|error| error.kind());
                assert_eq!(failed, Err(ErrorKind::OutOfSpace), "{op:?}");
                failing.writer_faults.clear_faults();
            }
            failing.commit(&put_in_both("committed")).unwrap();
            assert_eq!(failing.writer_faults.fault_count(), if is_lasting { 2 } else { 1 }, "{op:?}");
            let fs: Arc<dyn Fs> = Arc::new(failing.machine.clone());
            let ends = inspect::wal_ends(&fs, failing.writer.path()).unwrap();
            assert_eq!(ends.first(before.epoch()).unwrap().1, Some(before.sequence_number()), "{op:?}");
            for _ in 0..2 {
                assert_eq!(failing.follower.catch_up().unwrap_err().kind(), ErrorKind::Stale);
                assert_eq!([&failing.p, &failing.q].map(|part| text(part, "k").unwrap()), ["committed"; 2]);
                failing.reopen(is_killed);
            }
        }
    }
}

/// The machine stops, or loses power, at every operation behind a failed commit that a follower has read.
#[test]
fn crashes_behind_a_failed_commit() {
    const VALUES: [&str; 5] = ["old", "unsynced", "1", "2", "3"];
    let mut stopped = [0, 0];
    for (n, survival) in [Survival::Everything, Survival::Nothing, Survival::Random].into_iter().enumerate() {
        // Before the first sync, power loss may keep the write that has failed, and not that which undoes it.
        for ops in u64::from(survival == Survival::Random)..200 {
            let mut failing = FailingWriter::new(&[&put_in_both(VALUES[0])]);
            failing.writer.persist(PersistMode::SyncAll).unwrap();
            failing.commit(&put_in_both(VALUES[1])).unwrap();
            failing.fail(&put_in_both("failed"));
            failing.machine.freeze_after(Some(ops));
            let (mut written, mut synced) = (1, 0);
            for (value, n) in VALUES.iter().zip(0..).skip(2) {
                written = if failing.commit(&put_in_both(value)).is_ok() { n } else { break };
                synced = if failing.writer.persist(PersistMode::SyncData).is_ok() { n } else { synced };
            }
            let is_over = !failing.machine.is_frozen();
            failing.machine.freeze_after(Some(0));
            drop(failing.writer.clone().close());
            crash_or_kill(&failing.machine, survival, ops);
            failing.open();
            let found = [&failing.p, &failing.q].map(|part| text(part, "k").unwrap());
            assert_eq!(found[0], found[1]);
            let found = VALUES.iter().position(|value| *value == found[0]).expect("not the failed one");
            // The commit at which the machine stops may be there.
            let least = if survival == Survival::Everything { written } else { synced };
            assert!((least..=written + 1).contains(&found), "{survival:?} after {ops}: {found}, {synced} are synced");
            assert_eq!(failing.follower.catch_up().unwrap_err().kind(), ErrorKind::Stale);
            stopped[usize::from(n > 0)] += u32::from(!is_over);
            if is_over {
                break;
            }
        }
    }
    assert!(stopped[0] > 5 && stopped[1] > 10, "{stopped:?}");
}

/// Regression: the manifest behind a failed commit used up the space for removals. They were refused, and closing too.
#[test]
fn large_manifest_behind_a_failed_commit() {
    for tables in [4, 48] {
        let failing =
            FailingWriter::new(&[&|batch, [p, _]| ["k", "l"].iter().for_each(|key| batch.insert(p, key, "old"))]);
        let FailingWriter { machine, config, .. } = &failing;
        failing.writer.delete_partition_by_name("q").unwrap();
        for n in 0..tables {
            let part = partition(&failing.writer, &format!("t{n}"));
            for first in 0..3u8 {
                [first, 200 - first].iter().for_each(|key| part.insert(vec![*key; 60_000], "1").unwrap());
                part.flush().unwrap();
            }
        }
        while failing.writer.step().unwrap() {}
        // The reserve shrinks to what a database with a short log needs.
        failing.writer.clone().close().unwrap();
        let writer = config.clone().open().unwrap();
        let p = writer.partition("p").unwrap();
        let manifest = machine.open(&writer.path().join("MANIFEST"), OpenMode::Read).unwrap().length().unwrap();
        assert!(manifest > tables * 100_000, "{manifest}");
        machine.set_capacity(Some(machine.used_space()));
        failing.fail_after(|| ());
        assert_eq!(p.insert("x", "failed").unwrap_err().kind(), ErrorKind::OutOfSpace);
        p.remove("k").unwrap();
        p.flush().unwrap();
        p.remove("l").unwrap();
        drop(p);
        writer.close().unwrap();
        let p = config.clone().open().unwrap().partition("p").unwrap();
        assert!(p.is_empty().unwrap());
    }
}

/// Regression: a follower was stale behind a gap whose write had failed, though no commit had failed that it had read.
#[test]
fn gap_that_failed_is_no_commit() {
    let failing = FailingWriter::new(&[&put_in_both("old")]);
    // A single change that fails leaves out its number.
    failing.fail_after(|| ());
    assert_eq!(failing.q.insert("x", "failed").unwrap_err().kind(), ErrorKind::OutOfSpace);
    let follower = config(Arc::new(failing.machine.clone())).open_follower().unwrap();
    let reader = follower.clone();
    failing.fail_after(move || _ = reader.catch_up().unwrap());
    failing.writer.clone().close().unwrap();
    assert!(failing.hook.lock().unwrap().is_none(), "the gap was written");
    for _ in 0..2 {
        follower.catch_up().unwrap();
    }
}
