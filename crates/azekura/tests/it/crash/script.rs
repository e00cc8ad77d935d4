//! A random workload from a seed, and the code that runs it and records the history.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use azekura::fs::{Fs, OpenMode};
use azekura::testing::{MemFs, SeededRng, Survival, TestEnv};
use azekura::{BulkOptions, Changes, Config, Database, ErrorKind, Gc, Partition, PersistMode, Result};

use super::beside::FollowerBeside;
use super::feed::{ChangeFollower, FeedLoss};
use crate::testkit::atomic_writes::{AtomicWrites, ttl_of, write_conditionally};
use crate::testkit::read_database::read_database;
use crate::testkit::test_dir::crash_or_kill;
use crate::testkit::{HistoryEvent, HistoryWrite, RandomOptions, State, WriteHistory};

/// The two directories above it are created with it.
pub(super) const DIR: &str = "/srv/data/db";

/// One call, or one event of the machine.
#[derive(Clone, Debug)]
pub(super) enum CrashStep {
    Create(String),
    Delete(String),
    /// One write by a method of the partition; `true` means `remove_weak`.
    Single(HistoryWrite, bool),
    Batch(Vec<HistoryWrite>, PersistMode),
    /// A merge of this operand, which a history records as the value that it leads to.
    Merge(HistoryWrite),
    /// Removes the keys from the first to the last of these removals, by one range delete.
    RemoveRange(Vec<HistoryWrite>),
    /// Removes all keys, which are those of these removals.
    Clear(Vec<HistoryWrite>),
    /// Sorted or, if `true`, unsorted entries for one partition.
    Ingest(Vec<HistoryWrite>, bool),
    Persist(PersistMode),
    Flush(String),
    Compact(String),
    /// One of the calls of blob GC.
    BlobGc(String, u64),
    /// One background task.
    BackgroundStep,
    Checkpoint(u32),
    /// Closes (or drops all handles) and opens again.
    Reopen {
        close: bool,
    },
    /// Kills the process and opens the database again.
    Kill,
    /// Cuts power and opens the database again.
    PowerLoss(Survival, u64),
}

#[derive(Clone, Debug)]
pub(super) struct CrashScript {
    pub(super) seed: u64,
    pub(super) options: RandomOptions,
    pub(super) steps: Vec<CrashStep>,
    /// Whether a reader of changes follows the script. It copies the state for each commit.
    pub(super) is_followed: bool,
}

const NAMES: [&str; 4] = ["a", "b", "../c", "d\u{0}\u{2713}"];
const SYNCED: [PersistMode; 2] = [PersistMode::SyncData, PersistMode::SyncAll];
const KEYS: u64 = 14;

/// Generates steps that are valid in the expected state of the partitions.
struct ScriptGenerator {
    rng: SeededRng,
    options: RandomOptions,
    live_partitions: BTreeSet<String>,
    /// How often a key was inserted since it was last removed.
    inserts: BTreeMap<(String, Vec<u8>), u32>,
    checkpoints: u32,
    count: u64,
}

impl CrashScript {
    /// The script of a seed: first a batch over two partitions and a flush of one of them, then random steps.
    pub(super) fn new(seed: u64, length: usize) -> CrashScript {
        let options = RandomOptions::with_orders(seed);
        let mut drawing = ScriptGenerator::new(options);
        let mut steps = vec![drawing.create_step("a"), drawing.create_step("b")];
        steps.push(drawing.batch_step(PersistMode::Buffer));
        steps.push(CrashStep::Flush("a".into()));
        steps.push(drawing.batch_step(PersistMode::SyncData));
        steps.push(drawing.batch_step(PersistMode::Buffer));
        steps.push(drawing.ingest_step());
        while steps.len() < length {
            let step = drawing.random_step();
            steps.push(step);
        }
        CrashScript { seed, options, steps, is_followed: true }
    }

    /// Keys so long that a few flushes make the manifest grow until it is rewritten: by a background task, or at the
    /// next open.
    pub(super) fn with_large_manifest(seed: u64) -> CrashScript {
        let options = RandomOptions::new(seed);
        let mut drawing = ScriptGenerator::new(options);
        let mut steps = vec![drawing.create_step("a"), drawing.create_step("b")];
        for round in 0..12u8 {
            let put = |partition: &str, byte: u8| HistoryWrite {
                partition: partition.into(),
                key: [&[byte, round][..], &[byte; 65_533]].concat(),
                value: Some(vec![round]),
            };
            steps.push(CrashStep::Batch(vec![put("a", 1), put("a", 2), put("b", 3)], PersistMode::Buffer));
            steps.push(CrashStep::Flush("a".into()));
            steps.push(CrashStep::BackgroundStep);
        }
        steps.extend([CrashStep::BackgroundStep, CrashStep::Flush("b".into())]);
        // The manifest is rewritten when no tree needs a task.
        steps.extend((0..12).map(|_| CrashStep::BackgroundStep));
        steps.push(CrashStep::Kill);
        CrashScript { seed, options, steps, is_followed: false }
    }

    /// Whether calls are synced unless they specify otherwise.
    fn syncs_by_default(&self) -> bool {
        self.seed % 4 == 3
    }

    pub(super) fn config(&self, fs: Arc<dyn Fs>, env: &TestEnv) -> Config {
        let mode = if self.syncs_by_default() { PersistMode::SyncData } else { PersistMode::Buffer };
        ChangeFollower::new(self).config(self.options.config(Path::new(DIR), fs, env).durability(mode))
    }
}

impl ScriptGenerator {
    fn new(options: RandomOptions) -> ScriptGenerator {
        let rng = SeededRng::new(options.seed ^ 0x5C21);
        ScriptGenerator {
            rng,
            options,
            live_partitions: BTreeSet::new(),
            inserts: BTreeMap::new(),
            checkpoints: 0,
            count: 0,
        }
    }

    fn create_step(&mut self, name: &str) -> CrashStep {
        self.live_partitions.insert(name.into());
        CrashStep::Create(name.into())
    }

    fn random_partition_name(&mut self) -> String {
        let alive: Vec<String> = self.live_partitions.iter().cloned().collect();
        self.rng.pick(&alive)
    }

    fn random_value(&mut self) -> Vec<u8> {
        self.count += 1;
        let len = match self.rng.below(24) {
            0 => 20_000 + self.rng.below(50_000),
            1..=3 => 1_000 + self.rng.below(4_000),
            4 => 0,
            _ => 10 + self.rng.below(150),
        };
        let mut value = format!("{:06} ", self.count).into_bytes();
        value.extend(self.rng.random_bytes(len as usize));
        value
    }

    fn random_write(&mut self, partition: String) -> HistoryWrite {
        let key = format!("key {:02}", self.rng.below(KEYS));
        let key = self.options.order(&partition).valid_key(key.as_bytes());
        let inserts = self.inserts.entry((partition.clone(), key.clone())).or_default();
        let removes = *inserts > 0 && self.rng.chance_one_in(4);
        *inserts = if removes { 0 } else { *inserts + 1 };
        let value = (!removes).then(|| self.random_value());
        HistoryWrite { partition, key, value }
    }

    fn single_write_step(&mut self) -> CrashStep {
        let once = self.inserts.iter().find(|((name, _), count)| **count == 1 && self.live_partitions.contains(name));
        if let Some(((partition, key), _)) = once.map(|(place, count)| (place.clone(), count))
            && self.rng.chance_one_in(4)
        {
            self.inserts.insert((partition.clone(), key.clone()), 0);
            return CrashStep::Single(HistoryWrite { partition, key, value: None }, true);
        }
        let name = self.random_partition_name();
        CrashStep::Single(self.random_write(name), false)
    }

    /// Merges, if the partition has an operator.
    fn merge_step(&mut self) -> CrashStep {
        let partition = self.random_partition_name();
        if self.options.merge_operator(&partition).is_none() {
            return self.single_write_step();
        }
        let key = self.options.order(&partition).valid_key(format!("key {:02}", self.rng.below(KEYS)).as_bytes());
        let inserts = self.inserts.entry((partition.clone(), key.clone())).or_default();
        *inserts = (*inserts).max(1);
        self.count += 1;
        CrashStep::Merge(HistoryWrite { partition, key, value: Some(format!("+{}", self.count).into_bytes()) })
    }

    fn batch_step(&mut self, mode: PersistMode) -> CrashStep {
        let mut writes: Vec<HistoryWrite> =
            self.live_partitions.clone().into_iter().map(|name| self.random_write(name)).collect();
        for _ in 0..self.rng.below(4) {
            let name = self.random_partition_name();
            writes.push(self.random_write(name));
        }
        CrashStep::Batch(writes, mode)
    }

    /// Removals of all keys that a partition may have, in their order.
    fn removals(&mut self, partition: &str) -> Vec<HistoryWrite> {
        let order = self.options.order(partition);
        let mut keys: Vec<Vec<u8>> = (0..KEYS).map(|n| order.valid_key(format!("key {n:02}").as_bytes())).collect();
        keys.sort_by_key(|key| order.canonical(key));
        keys.into_iter().map(|key| HistoryWrite { partition: partition.into(), key, value: None }).collect()
    }

    /// Removes a range of keys, or all, of a partition.
    fn remove_range_step(&mut self) -> CrashStep {
        let name = self.random_partition_name();
        let mut removals = self.removals(&name);
        let clears = self.rng.chance_one_in(6);
        if !clears {
            let first = self.rng.below(removals.len());
            let len = 1 + self.rng.below(6);
            removals = removals.into_iter().skip(first).take(len).collect();
        }
        for HistoryWrite { partition, key, .. } in &removals {
            self.inserts.insert((partition.clone(), key.clone()), 0);
        }
        if clears { CrashStep::Clear(removals) } else { CrashStep::RemoveRange(removals) }
    }

    fn ingest_step(&mut self) -> CrashStep {
        let (name, is_unsorted) = (self.random_partition_name(), self.rng.chance_one_in(3));
        let order = self.options.order(&name);
        let mut entries: BTreeMap<Vec<u8>, HistoryWrite> = BTreeMap::new();
        for _ in 0..1 + self.rng.below(12) {
            let key = order.valid_key(format!("key {:02}", self.rng.below(KEYS)).as_bytes());
            *self.inserts.entry((name.clone(), key.clone())).or_default() += 1;
            let value = Some(self.random_value());
            entries.insert(order.canonical(&key), HistoryWrite { partition: name.clone(), key, value });
        }
        let mut entries: Vec<HistoryWrite> = entries.into_values().collect();
        if is_unsorted {
            entries.reverse();
        }
        CrashStep::Ingest(entries, is_unsorted)
    }

    fn random_step(&mut self) -> CrashStep {
        match self.rng.below(58) {
            0..=9 => self.single_write_step(),
            10..=16 => self.batch_step(PersistMode::Buffer),
            17..=20 => {
                let mode = self.rng.pick(&SYNCED);
                self.batch_step(mode)
            }
            21 => CrashStep::Persist(self.rng.pick(&SYNCED)),
            22..=25 => CrashStep::Flush(self.random_partition_name()),
            26 => CrashStep::Compact(self.random_partition_name()),
            27..=30 => CrashStep::BackgroundStep,
            31 => {
                self.checkpoints += 1;
                CrashStep::Checkpoint(self.checkpoints)
            }
            32 | 33 => CrashStep::Reopen { close: self.rng.chance_one_in(2) },
            34 => CrashStep::Kill,
            35 | 36 => {
                let survival = self.rng.pick(&[Survival::Nothing, Survival::Random, Survival::Random]);
                // Counted inserts may be lost, so the generator makes no more weak removals.
                self.inserts.values_mut().for_each(|count| *count = (*count).max(2));
                CrashStep::PowerLoss(survival, self.rng.next_u64())
            }
            37 | 38 if self.live_partitions.len() < NAMES.len() => {
                let free = NAMES
                    .iter()
                    .find(|name| !self.live_partitions.contains(**name))
                    .expect("there are more names than partitions");
                self.create_step(free)
            }
            39 if self.live_partitions.len() > 2 => {
                let name = self.random_partition_name();
                self.live_partitions.remove(&name);
                self.inserts.retain(|(partition, _), _| *partition != name);
                CrashStep::Delete(name)
            }
            40..=42 => {
                let name = self.random_partition_name();
                CrashStep::BlobGc(name, self.rng.below(4))
            }
            43..=46 => self.remove_range_step(),
            47..=50 => self.ingest_step(),
            51..=57 => self.merge_step(),
            _ => self.single_write_step(),
        }
    }
}

/// A checkpoint that was begun.
#[derive(Clone, Debug)]
pub(super) struct CheckpointRecord {
    pub(super) path: PathBuf,
    pub(super) state: State,
    pub(super) acknowledged: bool,
}

/// The progress of a script, and the machine at that point.
pub(super) struct ScriptOutcome {
    pub(super) history: WriteHistory,
    pub(super) checkpoints: Vec<CheckpointRecord>,
    pub(super) follower: ChangeFollower,
    /// A follower that lives on, and the machine that it reads, on which the writer was killed.
    pub(super) beside: Option<(FollowerBeside, MemFs)>,
    /// A copy of the machine, with its unsynced changes pending.
    pub(super) machine: MemFs,
    /// Operations of the file system.
    pub(super) ops: u64,
    /// The first violation before the machine froze.
    pub(super) failed: Option<String>,
}

impl ScriptOutcome {
    /// The partitions that were created.
    pub(super) fn names(&self) -> BTreeSet<String> {
        let created = |run_event: &HistoryEvent| {
            if let HistoryEvent::Create(name) = run_event { Some(name.clone()) } else { None }
        };
        self.history.events.iter().filter_map(created).collect()
    }
}

/// Runs `script` on `machine`, accessed through `fs`, until `machine` freezes after `ops` operations.
pub(super) fn run_script(
    script: &CrashScript,
    machine: &MemFs,
    fs: &Arc<dyn Fs>,
    ops: Option<u64>,
    tune: &dyn Fn(Config) -> Config,
) -> ScriptOutcome {
    let mut player = ScriptRunner {
        script,
        machine,
        fs,
        adjust_config: tune,
        stop_at: ops.map(|ops| machine.op_count() + ops),
        env: TestEnv::new(script.seed),
        db: None,
        partitions: BTreeMap::new(),
        history: WriteHistory::default(),
        checkpoints: Vec::new(),
        follower: ChangeFollower::new(script),
        changes: None,
        beside: None,
    };
    machine.freeze_after(ops);
    let failed = player.run_steps();
    let (ops, live) = (machine.op_count(), machine.clone());
    let machine = machine.fork();
    let ScriptRunner { history, checkpoints, follower, beside, .. } = player;
    let beside = beside.map(|beside| (beside, live));
    ScriptOutcome { history, checkpoints, follower, beside, machine, ops, failed }
}

fn run_blob_gc(part: &Partition, way: u64) -> Result<()> {
    match way {
        0 => part.gc_with_space_amp_target(1.0).map(drop),
        1 => part.gc_with_space_amp_target(1.5).map(drop),
        2 => part.gc_with_staleness_threshold(0.3).map(drop),
        _ => part.gc_drop_stale_segments().map(drop),
    }
}

/// A file of the user next to the checkpoint at `path`, in a directory that older versions removed.
pub(super) fn foreign_file(path: &Path) -> PathBuf {
    path.with_extension("tmp").join("mine")
}

/// Writes the file durably.
fn put_foreign_file(fs: &dyn Fs, path: &Path) -> Result<()> {
    let foreign = foreign_file(path);
    let dir = foreign.parent().expect("it is in a directory");
    fs.create_dir_all(dir)?;
    let file = fs.open(&foreign, OpenMode::Create)?;
    file.write_at(b"mine", 0)?;
    file.sync_data()?;
    fs.sync_dir(dir)?;
    fs.sync_dir(dir.parent().expect("it is next to the checkpoint"))
}

struct ScriptRunner<'a> {
    script: &'a CrashScript,
    machine: &'a MemFs,
    fs: &'a Arc<dyn Fs>,
    adjust_config: &'a dyn Fn(Config) -> Config,
    stop_at: Option<u64>,
    env: TestEnv,
    db: Option<Database>,
    partitions: BTreeMap<String, Partition>,
    history: WriteHistory,
    checkpoints: Vec<CheckpointRecord>,
    follower: ChangeFollower,
    /// The reader of the follower while it is open.
    changes: Option<Changes>,
    beside: Option<FollowerBeside>,
}

impl ScriptRunner<'_> {
    /// The error, unless the machine was frozen.
    fn run_steps(&mut self) -> Option<String> {
        let (mut rng, mut beside_rng) =
            (SeededRng::new(self.script.seed ^ 0xFEED), SeededRng::new(self.script.seed ^ 0xBE51DE));
        let mut played = self.open().map_err(|e| e.to_string()).and_then(|()| self.resume_follower(FeedLoss::Nothing));
        for (i, step) in self.script.steps.iter().enumerate() {
            if self.machine.is_frozen() {
                return None;
            }
            let read_after = self.follower.reads_behind_step(&mut rng);
            played = played
                .and_then(|()| self.run_step(step))
                .and_then(|()| read_after.map_or(Ok(()), |max| self.read_changes(max, FeedLoss::Nothing)))
                .and_then(|()| self.check_beside(&mut beside_rng))
                .map_err(|e| format!("step {i} {step:.60?}: {e}"));
            if let Err(error) = played {
                return (!self.machine.is_frozen()).then_some(error);
            }
        }
        None
    }

    fn open(&mut self) -> Result<()> {
        self.db = Some((self.adjust_config)(self.script.config(Arc::clone(self.fs), &self.env)).open()?);
        Ok(())
    }

    fn db(&self) -> &Database {
        self.db.as_ref().expect("the database is open between two steps")
    }

    /// Opens, closes or checks the follower, or does nothing.
    fn check_beside(&mut self, rng: &mut SeededRng) -> Result<(), String> {
        if self.machine.is_frozen() || !self.script.is_followed {
            return Ok(());
        }
        match &mut self.beside {
            Some(_) if rng.chance_one_in(16) => self.beside = None,
            Some(beside) => beside.check_some(rng, &self.history.state_after(self.history.acknowledged))?,
            None if rng.chance_one_in(4) => {
                let config = self.script.config(Arc::clone(self.fs), &TestEnv::new(rng.next_u64()));
                self.beside = Some(FollowerBeside::open((self.adjust_config)(config), self.script.options)?);
            }
            None => {}
        }
        Ok(())
    }

    /// Requests an event and records it in the history.
    fn run_event(
        &mut self,
        event: HistoryEvent,
        durable: bool,
        act: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        self.history.begin_event(event);
        act(self)?;
        // A store through a mapping cannot fail. When the machine is frozen, the store may have been made or not.
        if !durable && self.machine.is_frozen() {
            return Err(azekura::Error::new(azekura::ErrorKind::Io, "the machine is frozen"));
        }
        self.history.acknowledge_event();
        if durable {
            self.history.mark_durable();
        }
        Ok(())
    }

    fn run_step(&mut self, step: &CrashStep) -> Result<(), String> {
        self.ensure_partition_exists(step).map_err(|e| e.to_string())?;
        let synced = self.script.syncs_by_default();
        let done = match step {
            CrashStep::Create(name) => self.create(name),
            CrashStep::Delete(name) => self.run_event(HistoryEvent::Drop(name.clone()), true, |player| {
                let part = player.partitions.remove(name).expect("the partition exists");
                player.db().delete_partition(part)
            }),
            CrashStep::Single(write, weak) => {
                self.run_event(HistoryEvent::Commit(vec![write.clone()]), synced, |player| {
                    player.write_single(write, *weak)
                })
            }
            CrashStep::Merge(merge) => {
                self.run_event(HistoryEvent::Commit(vec![self.merged(merge)]), synced, |player| {
                    player.partitions[&merge.partition].merge(&merge.key, merge.value.as_deref().unwrap_or_default())
                })
            }
            CrashStep::Batch(writes, mode) => {
                let durable = *mode != PersistMode::Buffer;
                self.run_event(HistoryEvent::Commit(writes.clone()), durable, |player| player.batch(writes, *mode))
            }
            CrashStep::RemoveRange(removals) => {
                self.run_event(HistoryEvent::Commit(removals.clone()), synced, |player| {
                    let (first, last) = (&removals[0], &removals[removals.len() - 1]);
                    player.partitions[&first.partition].remove_range(first.key.clone()..=last.key.clone())
                })
            }
            CrashStep::Clear(removals) => self.run_event(HistoryEvent::Commit(removals.clone()), synced, |player| {
                player.partitions[&removals[0].partition].clear()
            }),
            CrashStep::Ingest(writes, is_unsorted) => {
                self.run_event(HistoryEvent::Commit(writes.clone()), true, |player| player.ingest(writes, *is_unsorted))
            }
            CrashStep::Persist(mode) => self.db().persist(*mode).map(|()| self.history.mark_durable()),
            CrashStep::Flush(name) => self.partitions[name].flush(),
            CrashStep::Compact(name) => self.partitions[name].major_compact(),
            CrashStep::BlobGc(name, way) => match run_blob_gc(&self.partitions[name], *way) {
                Err(error) if error.kind() == ErrorKind::Invalid => Ok(()), // a partition without key-value separation
                other => other,
            },
            CrashStep::BackgroundStep => self.db().step().map(|_| ()),
            CrashStep::Checkpoint(n) => self.checkpoint(*n),
            CrashStep::Reopen { close } => return self.reopen(*close),
            CrashStep::Kill => return self.crash_and_continue(Survival::Everything, 0),
            CrashStep::PowerLoss(survival, salt) => return self.crash_and_continue(*survival, *salt),
        };
        done.map_err(|e| e.to_string())
    }

    fn create(&mut self, name: &str) -> Result<()> {
        // A creation may be durable ahead of commits without a requested sync; it does not make those durable.
        let durable = self.script.syncs_by_default() && self.history.durable == self.history.acknowledged;
        self.run_event(HistoryEvent::Create(name.into()), durable, |player| player.open_part(name))
    }

    fn open_part(&mut self, name: &str) -> Result<()> {
        let part = self.script.options.open(self.db(), name)?;
        self.partitions.insert(name.into(), part);
        Ok(())
    }

    fn write_single(&mut self, write: &HistoryWrite, weak: bool) -> Result<()> {
        let (part, n) = (&self.partitions[&write.partition], self.history.events.len() as u64);
        let is_conditional = n.is_multiple_of(5);
        match &write.value {
            Some(value) => match ttl_of(value) {
                Some(ttl) => part.insert_with_ttl(&write.key, value, ttl),
                None if is_conditional => write_conditionally(part, &write.key, Some(value), n),
                None => part.insert(&write.key, value),
            },
            None if weak => part.remove_weak(&write.key),
            None if is_conditional => write_conditionally(part, &write.key, None, n),
            None => part.remove(&write.key),
        }
    }

    /// The value that a merge leads to, as a write.
    fn merged(&self, merge: &HistoryWrite) -> HistoryWrite {
        let state = self.history.state_after(self.history.acknowledged);
        let order = self.script.options.order(&merge.partition);
        let pairs = state.get(&merge.partition).into_iter().flatten();
        let mut before = pairs.filter(|(key, _)| order.canonical(key) == order.canonical(&merge.key));
        let mut value = before.next().map(|(_, value)| value.clone()).unwrap_or_default();
        value.extend_from_slice(merge.value.as_deref().unwrap_or_default());
        HistoryWrite { value: Some(value), ..merge.clone() }
    }

    fn batch(&mut self, writes: &[HistoryWrite], mode: PersistMode) -> Result<()> {
        let mut commit = AtomicWrites::begin(self.db(), self.history.events.len() as u64, mode);
        for write in writes {
            match &write.value {
                Some(value) => commit.insert(&self.partitions[&write.partition], &write.key, value),
                None if write.key.ends_with(b"1") => {
                    commit.remove_range(&self.partitions[&write.partition], &write.key)
                }
                None => commit.remove(&self.partitions[&write.partition], &write.key),
            }
        }
        commit.commit()
    }

    fn ingest(&mut self, writes: &[HistoryWrite], is_unsorted: bool) -> Result<()> {
        let partition = &self.partitions[&writes[0].partition];
        let entries = writes.iter().map(|write| Ok((&write.key, write.value.as_deref().unwrap_or_default())));
        match is_unsorted {
            false => partition.try_ingest(entries).map(drop),
            true => partition.bulk_with_options(entries, &BulkOptions::default().memory(64 << 10)).map(drop),
        }
    }

    fn checkpoint(&mut self, n: u32) -> Result<()> {
        let path = PathBuf::from(format!("/srv/data/copy {n}"));
        let state = self.history.state_after(self.history.acknowledged);
        put_foreign_file(&**self.fs, &path)?;
        self.checkpoints.push(CheckpointRecord { path: path.clone(), state, acknowledged: false });
        self.db().checkpoint(&path)?;
        self.checkpoints.last_mut().expect("just pushed").acknowledged = true;
        Ok(())
    }

    fn reopen(&mut self, close: bool) -> Result<(), String> {
        self.partitions.clear();
        self.changes = None;
        let db = self.db.take().expect("the database is open between two steps");
        if close {
            db.close().map_err(|e| e.to_string())?;
        } else {
            drop(db);
        }
        if self.machine.is_frozen() {
            return Err("stands still".into());
        }
        self.history.mark_durable();
        self.reopen_after_crash(self.history.acknowledged, None)?;
        match self.db().metrics().replayed_records {
            0 => Ok(()),
            n => Err(format!("{n} records were replayed after a clean close")),
        }
    }

    /// Crashes the machine or the process, and opens the database again.
    fn crash_and_continue(&mut self, survival: Survival, salt: u64) -> Result<(), String> {
        self.machine.freeze_after(Some(0));
        self.partitions.clear();
        self.changes = None;
        self.db = None;
        self.beside = self.beside.take().filter(|_| survival == Survival::Everything);
        crash_or_kill(self.machine, survival, salt);
        self.machine.freeze_after(self.stop_at.map(|at| at.saturating_sub(self.machine.op_count())));
        let at_least = (survival != Survival::Everything).then_some(self.history.durable);
        self.history.acknowledged = at_least.unwrap_or(self.history.acknowledged);
        self.reopen_after_crash(self.history.acknowledged, at_least)
    }

    /// Opens the database after a crash and truncates the history to the commits that survived, which are at least
    /// `at_least`. After power loss, `durable` events must have survived. Opening has made them durable.
    fn reopen_after_crash(&mut self, at_least: usize, durable: Option<usize>) -> Result<(), String> {
        let context = |e: azekura::Error| format!("opening again: {e}");
        self.open().map_err(context)?;
        let found = read_database(self.db(), &self.script.options).map_err(context)?;
        let surviving = self.history.matching_prefix(&found, at_least)?;
        let fewest = self.history.recover(&found, at_least, surviving);
        for name in found.keys() {
            self.open_part(name).map_err(context)?;
        }
        let loss = durable.map_or(FeedLoss::Nothing, |durable| FeedLoss::Events { durable, fewest, surviving });
        self.resume_follower(loss)?;
        if durable.is_some() { self.read_changes(None, loss) } else { Ok(()) }
    }

    fn resume_follower(&mut self, loss: FeedLoss) -> Result<(), String> {
        let db = self.db.as_ref().expect("the database is open between two steps");
        self.changes = self.follower.resume(db, &self.history, loss)?;
        Ok(())
    }

    /// Reads at most `max` commits.
    fn read_changes(&mut self, max: Option<usize>, loss: FeedLoss) -> Result<(), String> {
        if self.machine.is_frozen() {
            return Ok(());
        }
        if self.changes.is_none() {
            return self.resume_follower(FeedLoss::Nothing);
        }
        let db = self.db.as_ref().expect("the database is open between two steps");
        let changes = self.changes.as_mut().expect("a reader is open");
        if !self.follower.read(changes, db, &self.history, loss, max)? {
            self.changes = None;
        }
        Ok(())
    }

    /// Creates a partition that the next step uses, if a power loss removed it.
    fn ensure_partition_exists(&mut self, step: &CrashStep) -> Result<()> {
        let names: Vec<&String> = match step {
            CrashStep::Single(write, _) | CrashStep::Merge(write) => vec![&write.partition],
            CrashStep::Ingest(writes, _) => vec![&writes[0].partition],
            CrashStep::Batch(writes, _) | CrashStep::RemoveRange(writes) | CrashStep::Clear(writes) => {
                writes.iter().map(|write| &write.partition).collect()
            }
            CrashStep::Delete(name)
            | CrashStep::Flush(name)
            | CrashStep::Compact(name)
            | CrashStep::BlobGc(name, _) => vec![name],
            _ => Vec::new(),
        };
        for name in names {
            if !self.partitions.contains_key(name) {
                self.create(name)?;
            }
        }
        Ok(())
    }
}
