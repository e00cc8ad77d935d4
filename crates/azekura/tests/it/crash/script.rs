//! A workload drawn from a seed, and its player, who keeps the history.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use azekura::fs::{Fs, MemFs, OpenMode, Survival, TestEnv};
use azekura::{Config, Database, ErrorKind, Gc, Partition, PersistMode, Result};

use crate::world::reading::read_all;
use crate::world::{Dice, Event, History, Shape, State, Write};

/// Two directories above it are new, too.
pub(super) const DIR: &str = "/srv/data/db";

/// One call, or what happens to the machine.
#[derive(Clone, Debug)]
pub(super) enum Step {
    Create(String),
    Delete(String),
    /// One write by the partition's own call; `true` removes weakly.
    Single(Write, bool),
    Batch(Vec<Write>, PersistMode),
    Persist(PersistMode),
    Flush(String),
    Compact(String),
    /// Garbage collection, in one of its ways.
    Collect(String, u64),
    /// One piece of background work.
    Work,
    Checkpoint(u32),
    /// Closes (or drops all handles) and opens again.
    Reopen {
        close: bool,
    },
    /// The process dies and comes back.
    Kill,
    /// The power fails and comes back; the script goes on with what is left.
    Cut(Survival, u64),
}

#[derive(Clone, Debug)]
pub(super) struct Script {
    pub(super) seed: u64,
    pub(super) shape: Shape,
    pub(super) steps: Vec<Step>,
}

const NAMES: [&str; 4] = ["a", "b", "../c", "d\u{0}\u{2713}"];
const SYNCED: [PersistMode; 2] = [PersistMode::SyncData, PersistMode::SyncAll];
const KEYS: u64 = 14;

/// What the generator knows of the partitions, so that each step makes sense.
struct Drawing {
    dice: Dice,
    alive: BTreeSet<String>,
    /// How often a key was inserted since it was last removed.
    inserts: BTreeMap<(String, Vec<u8>), u32>,
    copies: u32,
    count: u64,
}

impl Script {
    /// The script of a seed: a prelude in which a batch over two partitions is followed by a flush of one of them, then
    /// chance.
    pub(super) fn new(seed: u64, length: usize) -> Script {
        let mut drawing = Drawing::new(seed);
        let mut steps = vec![drawing.create("a"), drawing.create("b")];
        steps.push(drawing.batch(PersistMode::Buffer));
        steps.push(Step::Flush("a".into()));
        steps.push(drawing.batch(PersistMode::SyncData));
        while steps.len() < length {
            let step = drawing.step();
            steps.push(step);
        }
        Script { seed, shape: Shape::new(seed), steps }
    }

    /// Keys so long that a few flushes make the manifest grow until it is written anew.
    pub(super) fn with_a_fat_manifest(seed: u64) -> Script {
        let mut drawing = Drawing::new(seed);
        let mut steps = vec![drawing.create("a"), drawing.create("b")];
        for round in 0..12u8 {
            let put = |partition: &str, byte: u8| Write {
                partition: partition.into(),
                key: [&[byte, round][..], &[byte; 65_533]].concat(),
                value: Some(vec![round]),
            };
            steps.push(Step::Batch(vec![put("a", 1), put("a", 2), put("b", 3)], PersistMode::Buffer));
            steps.push(Step::Flush("a".into()));
            steps.push(Step::Work);
        }
        steps.extend([Step::Work, Step::Flush("b".into()), Step::Work, Step::Kill]);
        Script { seed, shape: Shape::new(seed), steps }
    }

    /// Whether every call is synced that does not say otherwise.
    fn is_synced(&self) -> bool {
        self.seed % 4 == 3
    }

    pub(super) fn config(&self, fs: Arc<dyn Fs>, env: &TestEnv) -> Config {
        let mode = if self.is_synced() { PersistMode::SyncData } else { PersistMode::Buffer };
        self.shape.config(Path::new(DIR), fs, env).durability(mode)
    }
}

impl Drawing {
    fn new(seed: u64) -> Drawing {
        let dice = Dice::new(seed ^ 0x5C21);
        Drawing { dice, alive: BTreeSet::new(), inserts: BTreeMap::new(), copies: 0, count: 0 }
    }

    fn create(&mut self, name: &str) -> Step {
        self.alive.insert(name.into());
        Step::Create(name.into())
    }

    fn name(&mut self) -> String {
        let alive: Vec<String> = self.alive.iter().cloned().collect();
        self.dice.pick(&alive)
    }

    fn value(&mut self) -> Vec<u8> {
        self.count += 1;
        let len = match self.dice.below(24) {
            0 => 20_000 + self.dice.below(50_000),
            1..=3 => 1_000 + self.dice.below(4_000),
            4 => 0,
            _ => 10 + self.dice.below(150),
        };
        let mut value = format!("{:06} ", self.count).into_bytes();
        value.extend(self.dice.noise(len as usize));
        value
    }

    fn write(&mut self, partition: String) -> Write {
        let key = format!("key {:02}", self.dice.below(KEYS)).into_bytes();
        let inserts = self.inserts.entry((partition.clone(), key.clone())).or_default();
        let removes = *inserts > 0 && self.dice.one_in(4);
        *inserts = if removes { 0 } else { *inserts + 1 };
        let value = (!removes).then(|| self.value());
        Write { partition, key, value }
    }

    fn single(&mut self) -> Step {
        let once = self.inserts.iter().find(|((name, _), count)| **count == 1 && self.alive.contains(name));
        if let Some(((partition, key), _)) = once.map(|(place, count)| (place.clone(), count))
            && self.dice.one_in(4)
        {
            self.inserts.insert((partition.clone(), key.clone()), 0);
            return Step::Single(Write { partition, key, value: None }, true);
        }
        let name = self.name();
        Step::Single(self.write(name), false)
    }

    fn batch(&mut self, mode: PersistMode) -> Step {
        let mut writes: Vec<Write> = self.alive.clone().into_iter().map(|name| self.write(name)).collect();
        for _ in 0..self.dice.below(4) {
            let name = self.name();
            writes.push(self.write(name));
        }
        Step::Batch(writes, mode)
    }

    fn step(&mut self) -> Step {
        match self.dice.below(43) {
            0..=9 => self.single(),
            10..=16 => self.batch(PersistMode::Buffer),
            17..=20 => {
                let mode = self.dice.pick(&SYNCED);
                self.batch(mode)
            }
            21 => Step::Persist(self.dice.pick(&SYNCED)),
            22..=25 => Step::Flush(self.name()),
            26 => Step::Compact(self.name()),
            27..=30 => Step::Work,
            31 => {
                self.copies += 1;
                Step::Checkpoint(self.copies)
            }
            32 | 33 => Step::Reopen { close: self.dice.one_in(2) },
            34 => Step::Kill,
            35 | 36 => {
                let survival = self.dice.pick(&[Survival::Nothing, Survival::Random, Survival::Random]);
                // What the generator counts may be gone: then nothing is removed weakly any more.
                self.inserts.values_mut().for_each(|count| *count = (*count).max(2));
                Step::Cut(survival, self.dice.throw())
            }
            37 | 38 if self.alive.len() < NAMES.len() => {
                let free = NAMES.iter().find(|name| !self.alive.contains(**name)).expect("fewer are alive");
                self.create(free)
            }
            39 if self.alive.len() > 2 => {
                let name = self.name();
                self.alive.remove(&name);
                self.inserts.retain(|(partition, _), _| *partition != name);
                Step::Delete(name)
            }
            40..=42 => {
                let name = self.name();
                Step::Collect(name, self.dice.below(4))
            }
            _ => self.single(),
        }
    }
}

/// A checkpoint that was begun.
#[derive(Clone, Debug)]
pub(super) struct Copy {
    pub(super) path: PathBuf,
    pub(super) state: State,
    pub(super) acknowledged: bool,
}

/// How far a script came, and the machine as it stood then.
pub(super) struct Played {
    pub(super) history: History,
    pub(super) copies: Vec<Copy>,
    /// With everything unsynced still open.
    pub(super) machine: MemFs,
    /// Operations of the file system.
    pub(super) ops: u64,
    /// What went wrong before the machine stood still.
    pub(super) failed: Option<String>,
}

/// Plays `script` on `machine`, seen through `fs`, until it stands still after `ops` operations.
pub(super) fn play(
    script: &Script,
    machine: &MemFs,
    fs: &Arc<dyn Fs>,
    ops: Option<u64>,
    tune: &dyn Fn(Config) -> Config,
) -> Played {
    let mut player = Player {
        script,
        machine,
        fs,
        tune,
        stop_at: ops.map(|ops| machine.op_count() + ops),
        env: TestEnv::new(script.seed),
        db: None,
        parts: BTreeMap::new(),
        history: History::default(),
        copies: Vec::new(),
    };
    machine.freeze_after(ops);
    let failed = player.run();
    let ops = machine.op_count();
    let machine = machine.fork();
    Played { history: player.history, copies: player.copies, machine, ops, failed }
}

fn collect(part: &Partition, way: u64) -> Result<()> {
    match way {
        0 => part.gc_with_space_amp_target(1.0).map(drop),
        1 => part.gc_with_space_amp_target(1.5).map(drop),
        2 => part.gc_with_staleness_threshold(0.3).map(drop),
        _ => part.gc_drop_stale_segments().map(drop),
    }
}

/// A file of the user beside the checkpoint at `path`, in a directory that older versions took for their own.
pub(super) fn foreign_file(path: &Path) -> PathBuf {
    path.with_extension("tmp").join("mine")
}

/// Puts it there, durably.
fn put_foreign_file(fs: &dyn Fs, path: &Path) -> Result<()> {
    let foreign = foreign_file(path);
    let dir = foreign.parent().expect("it is in a directory");
    fs.create_dir_all(dir)?;
    let file = fs.open(&foreign, OpenMode::Create)?;
    file.write_at(b"mine", 0)?;
    file.sync_data()?;
    fs.sync_dir(dir)?;
    fs.sync_dir(dir.parent().expect("it is beside the checkpoint"))
}

struct Player<'a> {
    script: &'a Script,
    machine: &'a MemFs,
    fs: &'a Arc<dyn Fs>,
    tune: &'a dyn Fn(Config) -> Config,
    stop_at: Option<u64>,
    env: TestEnv,
    db: Option<Database>,
    parts: BTreeMap<String, Partition>,
    history: History,
    copies: Vec<Copy>,
}

impl Player<'_> {
    /// What went wrong, if the machine did not stand still.
    fn run(&mut self) -> Option<String> {
        let mut played = self.open().map_err(|e| e.to_string());
        for (i, step) in self.script.steps.iter().enumerate() {
            if self.machine.is_frozen() {
                return None;
            }
            played = played.and_then(|()| self.step(step).map_err(|e| format!("step {i} {step:.60?}: {e}")));
            if let Err(error) = played {
                return (!self.machine.is_frozen()).then_some(error);
            }
        }
        None
    }

    fn open(&mut self) -> Result<()> {
        self.db = Some((self.tune)(self.script.config(Arc::clone(self.fs), &self.env)).open()?);
        Ok(())
    }

    fn db(&self) -> &Database {
        self.db.as_ref().expect("it is open between two steps")
    }

    /// Asks for an event and keeps the history.
    fn event(&mut self, event: Event, durable: bool, act: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        self.history.ask(event);
        act(self)?;
        // A store through a mapping cannot fail: when the machine stands still, it may or may not have been done.
        if !durable && self.machine.is_frozen() {
            return Err(azekura::Error::new(azekura::ErrorKind::Io, "the machine stands still"));
        }
        self.history.acknowledge();
        if durable {
            self.history.promise();
        }
        Ok(())
    }

    fn step(&mut self, step: &Step) -> Result<(), String> {
        self.ensure(step).map_err(|e| e.to_string())?;
        let synced = self.script.is_synced();
        let done = match step {
            Step::Create(name) => self.create(name),
            Step::Delete(name) => self.event(Event::Drop(name.clone()), true, |player| {
                let part = player.parts.remove(name).expect("it is alive");
                player.db().delete_partition(part)
            }),
            Step::Single(write, weak) => {
                self.event(Event::Commit(vec![write.clone()]), synced, |player| player.single(write, *weak))
            }
            Step::Batch(writes, mode) => {
                let durable = *mode != PersistMode::Buffer;
                self.event(Event::Commit(writes.clone()), durable, |player| player.batch(writes, *mode))
            }
            Step::Persist(mode) => self.db().persist(*mode).map(|()| self.history.promise()),
            Step::Flush(name) => self.parts[name].flush(),
            Step::Compact(name) => self.parts[name].major_compact(),
            Step::Collect(name, way) => match collect(&self.parts[name], *way) {
                Err(error) if error.kind() == ErrorKind::Invalid => Ok(()), // nothing stands apart there
                other => other,
            },
            Step::Work => self.db().step().map(|_| ()),
            Step::Checkpoint(n) => self.checkpoint(*n),
            Step::Reopen { close } => return self.reopen(*close),
            Step::Kill => return self.outage(Survival::Everything, 0),
            Step::Cut(survival, salt) => return self.outage(*survival, *salt),
        };
        done.map_err(|e| e.to_string())
    }

    fn create(&mut self, name: &str) -> Result<()> {
        // A creation may be durable ahead of commits that nobody asked to sync; those it does not promise.
        let durable = self.script.is_synced() && self.history.durable == self.history.acknowledged;
        self.event(Event::Create(name.into()), durable, |player| player.open_part(name))
    }

    fn open_part(&mut self, name: &str) -> Result<()> {
        let part = self.db().open_partition(name, self.script.shape.partition(name))?;
        self.parts.insert(name.into(), part);
        Ok(())
    }

    fn single(&mut self, write: &Write, weak: bool) -> Result<()> {
        let part = &self.parts[&write.partition];
        match &write.value {
            Some(value) => part.insert(&write.key, value),
            None if weak => part.remove_weak(&write.key),
            None => part.remove(&write.key),
        }
    }

    fn batch(&mut self, writes: &[Write], mode: PersistMode) -> Result<()> {
        let mut batch = self.db().batch().durability(mode);
        for write in writes {
            match &write.value {
                Some(value) => batch.insert(&self.parts[&write.partition], &write.key, value),
                None => batch.remove(&self.parts[&write.partition], &write.key),
            }
        }
        batch.commit()
    }

    fn checkpoint(&mut self, n: u32) -> Result<()> {
        let path = PathBuf::from(format!("/srv/data/copy {n}"));
        let state = self.history.state(self.history.acknowledged);
        put_foreign_file(&**self.fs, &path)?;
        self.copies.push(Copy { path: path.clone(), state, acknowledged: false });
        self.db().checkpoint(&path)?;
        self.copies.last_mut().expect("just pushed").acknowledged = true;
        Ok(())
    }

    fn reopen(&mut self, close: bool) -> Result<(), String> {
        self.parts.clear();
        let db = self.db.take().expect("it is open between two steps");
        if close {
            db.close().map_err(|e| e.to_string())?;
        } else {
            drop(db);
        }
        if self.machine.is_frozen() {
            return Err("stands still".into());
        }
        self.history.promise();
        self.come_back(self.history.acknowledged)?;
        match self.db().metrics().replayed_records {
            0 => Ok(()),
            n => Err(format!("{n} records were replayed after a clean close")),
        }
    }

    /// The machine or the process stops dead, and the script goes on with what is left.
    fn outage(&mut self, survival: Survival, salt: u64) -> Result<(), String> {
        self.machine.freeze_after(Some(0));
        self.parts.clear();
        self.db = None;
        self.machine.crash(survival, salt);
        self.machine.freeze_after(self.stop_at.map(|at| at.saturating_sub(self.machine.op_count())));
        if survival != Survival::Everything {
            self.history.acknowledged = self.history.durable;
        }
        self.come_back(self.history.acknowledged)
    }

    /// Opens what an earlier life left; the history ends where that ends, and the open has made it durable.
    fn come_back(&mut self, floor: usize) -> Result<(), String> {
        let context = |e: azekura::Error| format!("opening again: {e}");
        self.open().map_err(context)?;
        let found = read_all(self.db(), &self.script.shape).map_err(context)?;
        let count = self.history.judge(&found, floor)?;
        self.history.events.truncate(count);
        let expected = self.history.state(count);
        let fresh = found.keys().filter(|name| !expected.contains_key(*name)).cloned().map(Event::Create);
        let gone = expected.keys().filter(|name| !found.contains_key(*name)).cloned().map(Event::Drop);
        self.history.events.extend(fresh.chain(gone));
        self.history.acknowledge();
        self.history.promise();
        for name in found.keys() {
            self.open_part(name).map_err(context)?;
        }
        Ok(())
    }

    /// An outage may have taken a partition that the script goes on to use.
    fn ensure(&mut self, step: &Step) -> Result<()> {
        let names: Vec<&String> = match step {
            Step::Single(write, _) => vec![&write.partition],
            Step::Batch(writes, _) => writes.iter().map(|write| &write.partition).collect(),
            Step::Delete(name) | Step::Flush(name) | Step::Compact(name) | Step::Collect(name, _) => vec![name],
            _ => Vec::new(),
        };
        for name in names {
            if !self.parts.contains_key(name) {
                self.create(name)?;
            }
        }
        Ok(())
    }
}
