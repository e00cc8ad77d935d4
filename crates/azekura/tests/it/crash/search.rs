//! Explores the crash points of a script with several survivals of each, and checks the results.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use azekura::fs::{Fs, OpenMode};
use azekura::testing::{FaultFs, FaultPlan, MemFs, SeededRng, Survival, TestEnv};
use azekura::{Config, Database, ErrorKind, PersistMode, RecoveryMode};

use super::beside::FollowerBeside;
use super::feed::{ChangeFollower, FeedLoss};
use super::script::{CrashScript, DIR, ScriptOutcome, foreign_file, run_script};
use crate::testkit::read_database::read_database;
use crate::testkit::test_dir::crash_or_kill;
use crate::testkit::{HistoryEvent, HistoryWrite, State, WriteHistory};

const MODES: [RecoveryMode; 3] = [RecoveryMode::Strict, RecoveryMode::PointInTime, RecoveryMode::Salvage];

/// A change of the machine before a script runs: the bug that the search must find.
pub(super) enum InjectedBug {
    Nothing,
    Fault(FaultPlan),
    Engine(fn(Config) -> Config),
}

/// A crash that violated a rule, and how to repeat it.
pub(super) struct CrashFinding {
    pub(super) seed: u64,
    pub(super) point: u64,
    pub(super) survival: Option<(Survival, u64)>,
    pub(super) what: String,
}

impl fmt::Display for CrashFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {} after {} operations, {:?}: {}", self.seed, self.point, self.survival, self.what)
    }
}

/// Counts of the explored states.
#[derive(Default)]
pub(super) struct CrashSearch {
    pub(super) scripts: u64,
    pub(super) points: u64,
    pub(super) states: u64,
    /// Crashes during the recovery from a crash.
    pub(super) recovery_crashes: u64,
    /// States with more than the synced commits and fewer than all.
    pub(super) partial_states: u64,
    pub(super) checkpoints: u64,
    /// Opens of a damaged log that were accepted, and that were refused.
    pub(super) accepted: u64,
    pub(super) refused: u64,
    /// Partitions whose comparators panic on a key that was not inserted: LSM partitions, and pools.
    pub(super) strict: [u64; 2],
    /// Commits that readers of changes found after a crash, and readers that were told that the next one is gone.
    pub(super) changes_read: u64,
    pub(super) stale_readers: u64,
    /// Followers that went on after a kill of the writer, that were opened before a recovery, and after it.
    pub(super) followers: [u64; 3],
    pub(super) findings: Vec<CrashFinding>,
}

impl fmt::Display for CrashSearch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} scripts, {} crash points, {} states, of them {} after a second crash during recovery and {} with more \
             than the durable commits and less than all; {} checkpoints opened; {} damaged logs accepted, {} refused; \
             {:?} LSM partitions and pools with strict comparators; {} commits read as changes, {} readers stale; \
             {:?} followers; {} wrong",
            self.scripts,
            self.points,
            self.states,
            self.recovery_crashes,
            self.partial_states,
            self.checkpoints,
            self.accepted,
            self.refused,
            self.strict,
            self.changes_read,
            self.stale_readers,
            self.followers,
            self.findings.len()
        )
    }
}

/// The survivals of one crash point: each deterministic mode, and `random` random ones.
fn choose_survivals(rng: &mut SeededRng, random: usize) -> Vec<(Survival, u64)> {
    let mut list =
        vec![(Survival::Nothing, 0), (Survival::Everything, 0), (Survival::DataOnly, 0), (Survival::MetadataOnly, 0)];
    list.extend((0..random).map(|_| (Survival::Random, rng.next_u64())));
    list
}

fn run_to_crash(script: &CrashScript, planted: &InjectedBug, ops: Option<u64>) -> ScriptOutcome {
    let machine = MemFs::new();
    let inner: Arc<dyn Fs> = Arc::new(machine.clone());
    let outcome = catch_unwind(AssertUnwindSafe(|| match planted {
        InjectedBug::Nothing => run_script(script, &machine, &inner, ops, &|config| config),
        InjectedBug::Engine(bug) => run_script(script, &machine, &inner, ops, bug),
        InjectedBug::Fault(plan) => {
            let faulty = FaultFs::new(inner);
            faulty.inject(plan.clone());
            let fs: Arc<dyn Fs> = Arc::new(faulty);
            run_script(script, &machine, &fs, ops, &|config| config)
        }
    }));
    outcome.unwrap_or_else(|panic| ScriptOutcome {
        history: Default::default(),
        checkpoints: Vec::new(),
        follower: ChangeFollower::new(script),
        beside: None,
        machine: MemFs::new(),
        ops: 0,
        failed: Some(format!("panicked: {}", panic_message(&*panic))),
    })
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or(panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
}

impl CrashSearch {
    /// Explores at most `points` crash points of `script`, spread evenly, and returns their number. Stops at `enough`
    /// findings.
    pub(super) fn explore(&mut self, script: &CrashScript, planted: &InjectedBug, points: u64, enough: usize) -> u64 {
        self.scripts += 1;
        let full_run = run_to_crash(script, planted, None);
        if let Some(what) = full_run.failed {
            self.findings.push(CrashFinding { seed: script.seed, point: full_run.ops, survival: None, what });
            return 1;
        }
        for name in full_run.names().into_iter().filter(|name| script.options.order(name).is_strict()) {
            self.strict[usize::from(script.options.is_pool(&name))] += 1;
        }
        let total = full_run.ops + 1;
        let points = points.min(total);
        let mut rng = SeededRng::new(script.seed ^ 0x0005_EA2C);
        for i in 0..points {
            // All of them if there are few, else a random one of each interval.
            let interval = (i * total / points, (i + 1) * total / points);
            let point = interval.0 + rng.below(interval.1 - interval.0);
            self.check_crash_point(script, planted, point, &mut rng);
            if self.findings.len() >= enough {
                return i + 1;
            }
        }
        points
    }

    /// Explores every crash point around the rewrite of the manifest in the steps of `script` before its last one, the
    /// `Kill`. Panics if they do not rewrite it.
    pub(super) fn explore_manifest_rewrite(&mut self, script: &mut CrashScript) {
        let kill = script.steps.pop();
        let run = |point| run_to_crash(script, &InjectedBug::Nothing, point);
        let (mut after, path) = (run(None).ops, Path::new(DIR).join("MANIFEST"));
        let header = |point| {
            let mut header = [0; 64]; // with the id of the file
            let crashed = run(Some(point)).machine.fork();
            crash_or_kill(&crashed, Survival::Everything, 0);
            let file = crashed.open(&path, OpenMode::Read).expect("there is a manifest");
            file.read_exact_at(&mut header, 0).expect("a manifest has a header");
            header
        };
        let mut before = after / 2;
        let old = header(before);
        assert_ne!(header(after), old, "the steps rewrite the manifest");
        while after - before > 1 {
            let middle = (before + after) / 2;
            if header(middle) == old { before = middle } else { after = middle }
        }
        let mut rng = SeededRng::new(script.seed);
        for point in before - 5..after + 3 {
            self.check_crash_point(script, &InjectedBug::Nothing, point, &mut rng);
        }
        script.steps.extend(kill);
    }

    /// Explores one crash point, and describes the steps before it.
    pub(super) fn reproduce(&mut self, script: &CrashScript, point: u64) {
        let outcome = run_to_crash(script, &InjectedBug::Nothing, Some(point));
        for (i, step) in script.steps.iter().enumerate() {
            println!("step {i}: {step:.150?}");
        }
        for (i, event) in outcome.history.events.iter().enumerate() {
            println!("event {}: {event:.150?}", i + 1);
        }
        println!("{} acknowledged, {} durable", outcome.history.acknowledged, outcome.history.durable);
        self.check_crash_point(script, &InjectedBug::Nothing, point, &mut SeededRng::new(point));
    }

    fn check_crash_point(&mut self, script: &CrashScript, planted: &InjectedBug, point: u64, rng: &mut SeededRng) {
        self.points += 1;
        let mut outcome = run_to_crash(script, planted, Some(point));
        let beside = outcome.beside.take();
        let mut failed = outcome.failed.clone();
        if let (None, Some((beside, machine))) = (&failed, beside) {
            failed = catch_panic(|| self.check_living_follower(script, &outcome, beside, &machine)).err();
        }
        if let Some(what) = failed {
            self.findings.push(CrashFinding { seed: script.seed, point, survival: None, what });
            return;
        }
        for (survival, salt) in choose_survivals(rng, 3) {
            let floor = match survival {
                Survival::Everything => outcome.history.acknowledged,
                _ => outcome.history.durable,
            };
            let crashed = outcome.machine.fork();
            crash_or_kill(&crashed, survival, salt);
            let second_salt = rng.chance_one_in(4).then(|| rng.next_u64());
            self.states += 1;
            let mut result = catch_panic(|| self.check_recovery(script, &outcome, &crashed, floor, rng.next_u64()));
            if let (Ok(()), Some(salt)) = (&result, second_salt) {
                result = catch_panic(|| self.check_crash_during_recovery(script, &outcome, &crashed, floor, salt));
            }
            let damage_salt = SeededRng::new(script.seed << 32 ^ point << 8 ^ self.states).next_u64();
            if result.is_ok() && damage_salt.is_multiple_of(5) {
                result = catch_panic(|| self.check_damaged_wal(script, &outcome, &crashed, damage_salt));
            }
            if let Err(what) = result {
                self.findings.push(CrashFinding { seed: script.seed, point, survival: Some((survival, salt)), what });
            }
        }
    }

    /// Opens the database after a crash, compares it with the history, and continues to write.
    fn check_recovery(
        &mut self,
        script: &CrashScript,
        outcome: &ScriptOutcome,
        crashed: &MemFs,
        floor: usize,
        salt: u64,
    ) -> CheckOutcome {
        let machine = crashed.fork();
        let fs: Arc<dyn Fs> = Arc::new(machine.clone());
        let env = TestEnv::new(salt);
        let glance = salt.is_multiple_of(3).then(|| read_only_state(script, crashed, &env)).transpose()?;
        let open = |fs: &Arc<dyn Fs>| script.config(Arc::clone(fs), &env).open().map_err(|e| format!("open: {e}"));
        let follows_early =
            salt % 8 == 1 && machine.exists(&Path::new(DIR).join("MANIFEST")).is_ok_and(|exists| exists);
        let mut early = follows_early.then(|| self.open_follower(script, &fs, 1)).transpose()?;
        early.as_mut().map_or(Ok(()), |early| early.catch_up().map(drop))?;
        let db = open(&fs)?;
        let found = read_database(&db, &script.options).map_err(|e| format!("read: {e}"))?;
        let count = outcome.history.matching_prefix(&found, floor)?;
        if let Some(early) = &early {
            assert_same_state(&found, early.visible(), "a follower that was opened before the recovery")?;
        }
        // The recovery may have ended the log before a commit that has lost its value. The follower has not shown it.
        let goes_on = early.as_mut().map(|early| early.is_stale()).transpose()? == Some(false);
        let mut beside = match early.filter(|_| goes_on) {
            None if follows_early || salt % 8 == 5 => Some(self.open_follower(script, &fs, 2)?),
            early => early,
        };
        beside.as_mut().map_or(Ok(()), |beside| beside.catch_up_with(&found))?;
        self.partial_states += u64::from(count > floor && count < outcome.history.events.len());
        glance.map_or(Ok(()), |glance| assert_same_state(&found, &glance, "the state of the read-only open before"))?;
        check_no_orphans(&db, &*fs, script)?;
        if salt.is_multiple_of(4) {
            // The state that an open has returned is durable.
            let again = machine.fork();
            again.crash(Survival::Nothing, 0);
            let fs: Arc<dyn Fs> = Arc::new(again);
            let later = read_database(&open(&fs)?, &script.options).map_err(|e| format!("read: {e}"))?;
            assert_same_state(&found, &later, "the state that was read after the crash, after the next crash")?;
        }
        self.check_checkpoints(script, outcome, &fs, &env)?;
        let (mut follower, mut history) = (outcome.follower.clone(), outcome.history.clone());
        // An ingest that the crash has prevented may have left a note in the log.
        let fewest = history.recover(&found, floor, count);
        let loss = FeedLoss::Events { durable: floor, fewest, surviving: count };
        self.follow(&mut follower, &db, &history, loss)?;
        let mut state = found;
        let written = write_after_recovery(&db, script, &mut state).map_err(|e| format!("going on: {e}"))?;
        beside.as_mut().map_or(Ok(()), |beside| beside.catch_up_with(&state))?;
        db.close().map_err(|e| format!("close: {e}"))?;
        let db = open(&fs)?;
        beside.as_mut().map_or(Ok(()), |beside| beside.catch_up_with(&state))?;
        history.events.extend(written);
        history.acknowledge_event();
        history.mark_durable();
        self.follow(&mut follower, &db, &history, FeedLoss::Nothing)?;
        let last = read_database(&db, &script.options).map_err(|e| format!("read: {e}"))?;
        assert_same_state(&state, &last, "after more writes and a clean close")?;
        match db.metrics().replayed_records {
            0 => Ok(()),
            n => Err(format!("{n} records were replayed after a clean close")),
        }
    }

    /// Opens a follower on the machine, and counts it.
    fn open_follower(&mut self, script: &CrashScript, fs: &Arc<dyn Fs>, way: usize) -> Result<FollowerBeside, String> {
        self.followers[way] += 1;
        FollowerBeside::open(script.config(Arc::clone(fs), &TestEnv::new(7)), script.options)
    }

    /// The writer was killed, and the follower beside it goes on: without a writer, and with the next one.
    fn check_living_follower(
        &mut self,
        script: &CrashScript,
        outcome: &ScriptOutcome,
        mut beside: FollowerBeside,
        machine: &MemFs,
    ) -> CheckOutcome {
        self.followers[0] += 1;
        crash_or_kill(machine, Survival::Everything, 0);
        beside.check_unchanged()?;
        let acknowledged = outcome.history.acknowledged;
        let seen = outcome.history.matching_prefix(beside.catch_up()?, acknowledged)?;
        let config = script.config(Arc::new(machine.clone()), &TestEnv::new(script.seed));
        let db = config.clone().open().map_err(|e| format!("open beside a follower: {e}"))?;
        beside.check_unchanged()?;
        let mut state = read_database(&db, &script.options).map_err(|e| format!("read: {e}"))?;
        let recovered = outcome.history.matching_prefix(&state, acknowledged)?;
        if recovered < seen {
            return Err(format!("a follower saw {seen} events, of which a kill has left {recovered}"));
        }
        beside.catch_up_with(&state)?;
        write_after_recovery(&db, script, &mut state).map_err(|e| format!("going on: {e}"))?;
        beside.catch_up_with(&state)?;
        db.close().map_err(|e| format!("close: {e}"))?;
        beside.catch_up_with(&state)
    }

    /// Reads the changes after an open to their end.
    fn follow(
        &mut self,
        follower: &mut ChangeFollower,
        db: &Database,
        history: &WriteHistory,
        loss: FeedLoss,
    ) -> CheckOutcome {
        let (commits, stale) = (follower.commits, follower.stale);
        if let Some(mut changes) = follower.resume(db, history, loss)? {
            follower.read(&mut changes, db, history, loss, None)?;
        }
        self.changes_read += follower.commits - commits;
        self.stale_readers += follower.stale - stale;
        Ok(())
    }

    /// An acknowledged checkpoint exists, and every existing checkpoint is complete.
    fn check_checkpoints(
        &mut self,
        script: &CrashScript,
        outcome: &ScriptOutcome,
        fs: &Arc<dyn Fs>,
        env: &TestEnv,
    ) -> CheckOutcome {
        for copy in &outcome.checkpoints {
            let foreign = fs.open(&foreign_file(&copy.path), OpenMode::Read).and_then(|file| file.length());
            if foreign.as_ref().ok() != Some(&4) {
                return Err(format!("a file of the user next to {}: {foreign:?}", copy.path.display()));
            }
            let exists = fs.exists(&copy.path).map_err(|e| e.to_string())?;
            if !exists && !copy.acknowledged {
                continue;
            }
            self.checkpoints += 1;
            let config = script.options.config(&copy.path, Arc::clone(fs), env);
            let db = config.open_read_only().map_err(|e| format!("open of {}: {e}", copy.path.display()))?;
            let found =
                read_database(&db, &script.options).map_err(|e| format!("read of {}: {e}", copy.path.display()))?;
            assert_same_state(&copy.state, &found, "in the checkpoint")?;
        }
        Ok(())
    }

    /// Crashes again during recovery, and checks the result of the second recovery.
    fn check_crash_during_recovery(
        &mut self,
        script: &CrashScript,
        outcome: &ScriptOutcome,
        crashed: &MemFs,
        floor: usize,
        salt: u64,
    ) -> CheckOutcome {
        let mut rng = SeededRng::new(salt);
        let opening = |machine: &MemFs, salt: u64| {
            let env = TestEnv::new(salt);
            let opened = script.config(Arc::new(machine.clone()), &env).open();
            let ops = machine.op_count();
            machine.freeze_after(Some(0));
            (opened.map(drop), ops)
        };
        let first = crashed.fork();
        let before = first.op_count();
        let (opened, after) = opening(&first, salt);
        opened.map_err(|e| format!("open: {e}"))?;
        let second = crashed.fork();
        second.freeze_after(Some(rng.below(after - before + 1)));
        drop(opening(&second, salt));
        let survival = rng.pick(&[Survival::Nothing, Survival::Everything, Survival::Random, Survival::Random]);
        crash_or_kill(&second, survival, rng.next_u64());
        // Unsynced commits of a killed process must survive only after an open has succeeded.
        let floor = if survival == Survival::Everything { floor } else { outcome.history.durable };
        self.states += 1;
        self.recovery_crashes += 1;
        let result = self.check_recovery(script, outcome, &second, floor, rng.next_u64());
        result.map_err(|what| format!("after a second crash ({survival:?}) during recovery: {what}"))
    }
}

impl CrashSearch {
    /// Damages the WAL of a crashed database and opens it in each recovery mode. Each open gives one prefix of the
    /// history over all partitions, or an error. Records that are synced afterwards are present in every later open.
    fn check_damaged_wal(
        &mut self,
        script: &CrashScript,
        outcome: &ScriptOutcome,
        crashed: &MemFs,
        salt: u64,
    ) -> CheckOutcome {
        let machine = crashed.fork();
        let done = damage_wal(&machine, &mut SeededRng::new(salt));
        let open = |machine: &MemFs, mode: RecoveryMode| {
            let config = script.config(Arc::new(machine.clone()), &TestEnv::new(salt)).recovery_mode(mode);
            config.open()
        };
        for mode in MODES {
            let when = format!("{done}, then {mode:?}");
            let machine = machine.fork();
            let db = match open(&machine, mode) {
                Err(e) if mode != RecoveryMode::Salvage && e.kind() == ErrorKind::Corruption && e.file().is_some() => {
                    self.refused += 1;
                    continue;
                }
                opened => opened.map_err(|e| format!("{when}: {e}"))?,
            };
            self.accepted += 1;
            let mut state = read_database(&db, &script.options).map_err(|e| format!("{when}: read: {e}"))?;
            let mut follower = outcome.follower.clone();
            let opened =
                follower.resume(&db, &outcome.history, FeedLoss::Damage).map_err(|e| format!("{when}: {e}"))?;
            if let Some(mut changes) = opened
                && follower
                    .read(&mut changes, &db, &outcome.history, FeedLoss::Damage, None)
                    .map_err(|e| format!("{when}: {e}"))?
            {
                follower.check_state(&state, &outcome.history).map_err(|e| format!("{when}: {e}"))?;
            }
            if mode != RecoveryMode::Salvage && !is_single_state(&state, outcome) {
                return Err(format!("{when}: not one point in time of all partitions"));
            }
            write_after_recovery(&db, script, &mut state).map_err(|e| format!("{when}: going on: {e}"))?;
            db.persist(PersistMode::SyncData).map_err(|e| format!("{when}: {e}"))?;
            for later in MODES {
                let again = machine.fork();
                again.crash(Survival::Nothing, 0);
                let db = open(&again, later).map_err(|e| format!("{when}, then {later:?}: {e}"))?;
                let found =
                    read_database(&db, &script.options).map_err(|e| format!("{when}, then {later:?}: read: {e}"))?;
                assert_same_state(&state, &found, &format!("{when}, synced, then {later:?}"))?;
            }
        }
        Ok(())
    }
}

/// Flips a byte of a WAL segment, truncates it, or zeroes it from an offset on; returns a description.
fn damage_wal(machine: &MemFs, rng: &mut SeededRng) -> String {
    let Ok(entries) = machine.read_dir(Path::new(DIR)) else { return "no database".into() };
    let logs: Vec<_> = entries.into_iter().filter(|entry| entry.name.ends_with(".wal") && entry.len > 512).collect();
    if logs.is_empty() {
        return "no log".into();
    }
    let entry = rng.pick(&logs);
    let file = machine.open(&Path::new(DIR).join(&entry.name), OpenMode::Write).expect("the file was listed");
    let mut bytes = vec![0; entry.len as usize];
    file.read_exact_at(&mut bytes, 0).expect("the file has this length");
    let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    let at = if rng.chance_one_in(12) { rng.below(512) } else { 512 + rng.below((used as u64).max(521) - 512) };
    let way = rng.below(4);
    let done = match way {
        0 => file.write_at(&[!bytes[at as usize]], at),
        1 => file.set_length(at),
        2 => file.write_at(&vec![0; bytes.len() - at as usize], at),
        _ => Ok(()),
    };
    done.expect("a file system in memory");
    format!("{} {} at {at}", ["flipped", "cut", "zeroed", "left"][way as usize], entry.name)
}

/// Whether the state is that after some event, except for partitions that were created or deleted since.
fn is_single_state(found: &State, outcome: &ScriptOutcome) -> bool {
    let events = &outcome.history.events;
    let created =
        |name: &str| events.iter().rposition(|event| matches!(event, HistoryEvent::Create(other) if other == name));
    (0..=events.len()).any(|count| {
        let state = outcome.history.state_after(count);
        found.iter().all(|(name, map)| {
            let is_new = map.is_empty() && created(name).is_some_and(|at| at >= count);
            is_new || state.get(name) == Some(map)
        })
    })
}

type CheckOutcome = Result<(), String>;

/// Turns a panic into a finding.
fn catch_panic(body: impl FnOnce() -> CheckOutcome) -> CheckOutcome {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(format!("panicked: {}", panic_message(&*panic))))
}

fn assert_same_state(wanted: &State, found: &State, when: &str) -> CheckOutcome {
    if wanted == found {
        return Ok(());
    }
    Err(format!("{when}: {:.5?}", crate::testkit::history::differences(wanted, found)))
}

/// The state that a read-only open returns. It changes nothing, and a tolerant recovery mode finds no damage.
fn read_only_state(script: &CrashScript, crashed: &MemFs, env: &TestEnv) -> Result<State, String> {
    let machine = crashed.fork();
    if !machine.exists(&Path::new(DIR).join("MANIFEST")).map_err(|e| e.to_string())? {
        return Ok(State::new());
    }
    let config = script.config(Arc::new(machine.clone()), env).recovery_mode(azekura::RecoveryMode::PointInTime);
    let db = config.open_read_only().map_err(|e| format!("read-only open: {e}"))?;
    let found = read_database(&db, &script.options).map_err(|e| format!("read of a read-only database: {e}"))?;
    drop(db);
    let untouched = crate::testkit::test_dir::dir_contents(&machine, Path::new(DIR))
        == crate::testkit::test_dir::dir_contents(crashed, Path::new(DIR));
    if untouched { Ok(found) } else { Err("a reader wrote".into()) }
}

/// After an open, every table and every pool file belongs to a partition.
fn check_no_orphans(db: &Database, fs: &dyn Fs, script: &CrashScript) -> CheckOutcome {
    let (mut named, mut pools) = (0, 0);
    for name in db.list_partitions() {
        let part = script.options.open(db, &name).map_err(|e| e.to_string())?;
        pools += usize::from(part.metrics().pool.is_some());
        named += part.metrics().levels.iter().map(|level| level.tables).sum::<usize>();
    }
    let entries = fs.read_dir(Path::new(DIR)).map_err(|e| e.to_string())?;
    let names: Vec<String> = entries.into_iter().map(|entry| entry.name).collect();
    if names.iter().filter(|name| name.ends_with(".pool")).count() > pools {
        return Err(format!("there are {pools} partitions with pools, and {names:?}"));
    }
    let tables: Vec<String> = names.into_iter().filter(|name| name.ends_with(".sst")).collect();
    if tables.len() == named { Ok(()) } else { Err(format!("{named} tables are named, there are {tables:?}")) }
}

/// Five more operations, in a new partition and in an old one. Returns them as events, and applies these to `state`.
fn write_after_recovery(db: &Database, script: &CrashScript, state: &mut State) -> azekura::Result<Vec<HistoryEvent>> {
    let write = |partition: &str, key: &str, value: Option<&str>| HistoryWrite {
        partition: partition.into(),
        key: script.options.order(partition).valid_key(key.as_bytes()),
        value: value.map(Into::into),
    };
    let old = state.keys().next().cloned();
    let (one, two) = (write("after", "one", Some("1")), write("after", "two", Some("2")));
    let after = script.options.open(db, "after")?;
    after.insert(&one.key, "1")?;
    let mut batch = db.batch();
    batch.durability(PersistMode::SyncData);
    batch.insert(&after, &two.key, "2");
    let mut writes = vec![two];
    if let Some(name) = &old {
        let two = write(name, "two", Some("2"));
        batch.insert(&script.options.open(db, name)?, &two.key, "2");
        writes.push(two);
    }
    batch.commit()?;
    after.flush()?;
    after.remove(&one.key)?;
    let removal = HistoryWrite { value: None, ..one.clone() };
    let mut events = vec![HistoryEvent::Create("after".into())];
    events.extend([vec![one], writes, vec![removal]].map(HistoryEvent::Commit));
    events.iter().for_each(|event| event.apply(state));
    Ok(events)
}
