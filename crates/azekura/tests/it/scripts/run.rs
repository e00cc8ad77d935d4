//! The state of a script on one engine, and its commands.
//!
//! The database has manual background work (`step`, `steps`) and runs in memory, so the output of a script is the same
//! every time. A failed call prints the kind of its error; a call without a result prints nothing.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use azekura::fs::Fs;
use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, Survival, TestEnv, TestOrder, wait_for_readers};
use azekura::{Config, Database, Entry, Gc, Iter, Partition, PersistMode, Result, Snapshot, inspect};

use super::engines::{ScriptEngine, ScriptOptions};
use super::text::{ScriptBounds, append_wrapped, parse_bounds, parse_keys, parse_number, parse_ttl, show_bytes};
use super::transactions::ScriptTransactions;

/// The partition that commands use until `use` names another one.
const FIRST_PARTITION: &str = "p";

/// Far more steps of background work than a script needs.
const MAX_STEPS: u32 = 10_000;

pub(super) struct ScriptRun {
    engine: ScriptEngine,
    fs: MemFs,
    /// `fs` with the faults of the script. The database uses this one.
    faults: FaultFs,
    /// The number of failed operations up to the last `fault off`.
    shown_faults: u64,
    dir: String,
    /// Number of opens so far: each gets its own random numbers.
    opens: u64,
    env: TestEnv,
    /// How far `clock` has moved the wall clock, in milliseconds.
    clock_ms: i64,
    options: ScriptOptions,
    wal_segment_size: u64,
    max_wal_size: u64,
    db: Option<Database>,
    partition: String,
    /// Engines of partitions that do not have the engine of the script.
    other_engines: BTreeMap<String, ScriptEngine>,
    snapshots: BTreeMap<String, Snapshot>,
    iters: BTreeMap<String, Iter>,
    entries: BTreeMap<String, Vec<Entry>>,
    transactions: ScriptTransactions,
}

impl ScriptRun {
    /// A new database with one partition.
    pub(super) fn new(engine: ScriptEngine) -> ScriptRun {
        let fs = MemFs::new();
        let mut run = ScriptRun {
            engine,
            faults: FaultFs::new(Arc::new(fs.clone())),
            shown_faults: 0,
            fs,
            dir: "/db".into(),
            opens: 0,
            env: TestEnv::new(0),
            clock_ms: 0,
            options: ScriptOptions::default(),
            wal_segment_size: 64 << 10,
            max_wal_size: 1 << 20,
            db: None,
            partition: FIRST_PARTITION.into(),
            other_engines: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            iters: BTreeMap::new(),
            entries: BTreeMap::new(),
            transactions: ScriptTransactions::default(),
        };
        engine.prepare_fs(&run.fs);
        run.open().unwrap();
        run.open_partition(FIRST_PARTITION).unwrap();
        run
    }

    /// Runs one command and appends its output.
    pub(super) fn run_command(&mut self, command: &str, output: &mut String) {
        wait_for_readers();
        let (name, rest) = command.split_once(' ').unwrap_or((command, ""));
        let words: Vec<&str> = rest.split_whitespace().collect();
        let done = match name {
            "put" | "put-ttl" | "merge" | "remove" | "remove-weak" | "batch" | "persist" => self.write(name, rest),
            "clock" => self.move_clock(words[0]),
            "fault" | "disk-full" => {
                self.make_fail(name, &words, output);
                Ok(())
            }
            "remove-range" | "clear" => self.remove_range(&words),
            "ingest" | "bulk" => self.load(name, rest, output),
            "get" | "match" | "match-many" | "len" | "size" | "first" | "last" | "contains" => {
                self.read(name, &words, output)
            }
            "scan" | "keys" | "iter" | "next" | "back" => self.iterate(name, &words, output),
            "entries" | "value" | "snapshot" | "drop" => self.hold(name, &words, output),
            "flush" | "compact" | "step" | "steps" | "gc" => self.maintain(name, &words, output),
            "create" | "use" | "delete" | "options" | "config" | "comparator" => self.configure(name, &words),
            "begin" | "tx" => {
                let db = self.db.as_ref().expect("the script opened the database");
                self.transactions.run(db, &self.partition, name, &words, output)
            }
            "kind" | "shape" | "persistence" | "blobs" | "metrics" | "partitions" | "files" | "verify" => {
                self.report(name, &words, output)
            }
            _ => self.restart(name, &words, output),
        };
        if let Err(error) = done {
            writeln!(output, "{name}: {:?}", error.kind()).unwrap();
        }
    }

    fn config(&self) -> Config {
        Config::new(&self.dir)
            .fs(Arc::new(self.faults.clone()))
            .env(Arc::new(self.env.clone()))
            .workers(0)
            .wal_segment_size(self.wal_segment_size)
            .max_wal_size(self.max_wal_size)
    }

    fn open(&mut self) -> Result<()> {
        self.opens += 1;
        self.env = TestEnv::new(self.opens);
        self.env.jump_wall_clock(self.clock_ms);
        self.db = Some(self.config().open()?);
        Ok(())
    }

    /// `clock MS`: moves the wall clock by this many milliseconds, also across reopening.
    fn move_clock(&mut self, ms: &str) -> Result<()> {
        let ms: i64 = parse_number(ms);
        self.clock_ms += ms;
        self.env.jump_wall_clock(ms);
        Ok(())
    }

    /// `fault OP [NTH] [forever] [in=PATH] [full | files]`: the NTH next operation of this kind, on a path that
    /// contains PATH, fails: with an I/O error, because the disk is full, or because too many files are open.
    /// `fault off`: shows how many operations have failed since the last one. `disk-full [BYTES]`: this number of bytes
    /// is free, none by default. `disk-full off`.
    fn make_fail(&mut self, name: &str, words: &[&str], output: &mut String) {
        match (name, words[..].first().copied()) {
            ("fault", Some("off")) => {
                self.faults.clear_faults();
                let failed = self.faults.fault_count();
                writeln!(output, "{} failed", failed - self.shown_faults).unwrap();
                self.shown_faults = failed;
            }
            ("disk-full", Some("off")) => self.fs.set_capacity(None),
            ("disk-full", free) => {
                let free = free.map_or(0, parse_number::<u64>);
                self.fs.set_capacity(Some(self.fs.used_space() + free));
            }
            (_, op) => {
                let op = match op.expect("a fault has an operation") {
                    "create" => OpKind::Create,
                    "read" => OpKind::Read,
                    "rename" => OpKind::Rename,
                    "sync" => OpKind::Sync,
                    "sync-dir" => OpKind::SyncDir,
                    "write" => OpKind::Write,
                    other => panic!("{other:?} does not fail"),
                };
                let (mut nth, mut fault) = (1, Fault::Error(ErrorKind::Other));
                let (mut path, mut is_forever) = (None, false);
                for word in &words[1..] {
                    match *word {
                        "forever" => is_forever = true,
                        "full" => fault = Fault::Error(ErrorKind::StorageFull),
                        "files" => fault = Fault::TooManyOpenFiles,
                        word => match word.strip_prefix("in=") {
                            Some(part) => path = Some(part),
                            None => nth = parse_number(word),
                        },
                    }
                }
                let is_store = op == OpKind::Write && path.is_some_and(|path| path.ends_with(".wal"));
                assert!(!is_store, "the WAL is mapped: a store into it cannot fail");
                let plan = FaultPlan::new(op, nth, fault);
                let plan = path.map_or(plan.clone(), |path| plan.in_path(path));
                self.faults.inject(if is_forever { plan.forever() } else { plan });
            }
        }
    }

    fn db(&self) -> &Database {
        self.db.as_ref().expect("the script opened the database")
    }

    fn engine_of(&self, name: &str) -> ScriptEngine {
        *self.other_engines.get(name).unwrap_or(&self.engine)
    }

    /// Opens a partition, or creates it with the present options.
    fn open_partition(&self, name: &str) -> Result<Partition> {
        let engine = self.engine_of(name);
        let (options, components) = (engine.partition_options(&self.options), self.options.components());
        self.db().open_partition_with(name, options, components)
    }

    fn current(&self) -> Result<Partition> {
        self.db().partition(&self.partition)
    }

    /// The partition and the key of a word: `key`, or `partition:key`.
    fn target<'a>(&self, word: &'a str) -> Result<(Partition, &'a str)> {
        match word.split_once(':') {
            Some((name, key)) => Ok((self.db().partition(name)?, key)),
            None => Ok((self.current()?, word)),
        }
    }

    /// Drops everything that is open.
    fn drop_handles(&mut self) {
        self.transactions.clear();
        self.snapshots.clear();
        self.iters.clear();
        self.entries.clear();
    }

    /// `checkpoint PATH`; the end of one open database, and the next: `reopen`, `read-only`, `cd PATH`,
    /// `kill [read-only]`, `power-loss [data-only | metadata-only]`.
    fn restart(&mut self, name: &str, words: &[&str], output: &mut String) -> Result<()> {
        if name == "checkpoint" {
            return self.db().checkpoint(words[0]);
        }
        self.drop_handles();
        let db = self.db.take().expect("the script opened the database");
        match name {
            "reopen" | "read-only" => db.close()?,
            "cd" => {
                db.close()?;
                self.dir = words[0].into();
            }
            "kill" | "power-loss" => {
                self.fs.freeze_after(Some(0));
                drop(db);
                self.fs.freeze_after(None);
            }
            _ => panic!("there is no command {name:?}"),
        }
        if name == "power-loss" {
            let survival = match words.first().copied() {
                Some("data-only") => Survival::DataOnly,
                Some("metadata-only") => Survival::MetadataOnly,
                None => Survival::Nothing,
                Some(other) => panic!("there is no survival {other:?}"),
            };
            self.fs.crash(survival, 0);
            self.engine.prepare_fs(&self.fs);
        }
        if name == "read-only" || words.contains(&"read-only") {
            self.db = Some(self.config().open_read_only()?);
        } else {
            self.open()?;
        }
        writeln!(output, "replayed {} records", self.db().metrics().replayed_records).unwrap();
        Ok(())
    }

    /// `put KEY VALUE`, `put-ttl KEY VALUE MS`, `merge KEY OPERAND`, `remove KEY`, `remove-weak KEY`;
    /// `batch [sync] WRITE; WRITE …`, whose writes are `put`, `put-ttl`, `merge`, `remove` and `remove-range BOUNDS`;
    /// `persist`.
    fn write(&self, name: &str, rest: &str) -> Result<()> {
        if name == "persist" {
            return self.db().persist(PersistMode::SyncData);
        }
        if name == "batch" {
            let (mode, writes) = match rest.strip_prefix("sync ") {
                Some(writes) => (PersistMode::SyncData, writes),
                None => (PersistMode::Buffer, rest),
            };
            let mut batch = self.db().batch();
            batch.durability(mode);
            for write in writes.split(';') {
                let words: Vec<&str> = write.split_whitespace().collect();
                if let ["remove-range", bounds] = words[..]
                    && let Some(ScriptBounds::Range(low, high)) = parse_bounds(bounds)
                {
                    batch.remove_range::<String>(&self.current()?, (low, high));
                    continue;
                }
                let (partition, keys) = self.target(words[1])?;
                for key in parse_keys(keys) {
                    match words[0] {
                        "put" => batch.insert(&partition, &key.key, key.value(words[2])),
                        "merge" => batch.merge(&partition, &key.key, key.value(words[2])),
                        "put-ttl" => {
                            let ttl = parse_ttl(words[3]);
                            batch.insert_with_ttl(&partition, &key.key, key.value(words[2]), ttl);
                        }
                        "remove" => batch.remove(&partition, &key.key),
                        other => panic!("a batch has no {other:?}"),
                    }
                }
            }
            return batch.commit();
        }
        let words: Vec<&str> = rest.split_whitespace().collect();
        let (partition, keys) = self.target(words[0])?;
        for key in parse_keys(keys) {
            match name {
                "put" => partition.insert(&key.key, key.value(words.get(1).unwrap_or(&"")))?,
                "merge" => partition.merge(&key.key, key.value(words.get(1).unwrap_or(&"")))?,
                "put-ttl" => partition.insert_with_ttl(&key.key, key.value(words[1]), parse_ttl(words[2]))?,
                "remove" => partition.remove(&key.key)?,
                _ => partition.remove_weak(&key.key)?,
            }
        }
        Ok(())
    }

    /// `remove-range BOUNDS`, `clear`.
    fn remove_range(&self, words: &[&str]) -> Result<()> {
        let partition = self.current()?;
        match words.first().map(|word| parse_bounds(word).expect("bounds of a range")) {
            None => partition.clear(),
            Some(ScriptBounds::All) => partition.remove_range::<String>(..),
            Some(ScriptBounds::Prefix(prefix)) => partition.remove_prefix(prefix),
            Some(ScriptBounds::Range(low, high)) => partition.remove_range::<String>((low, high)),
        }
    }

    /// `ingest KEY VALUE; KEY VALUE …`, `bulk KEY VALUE; KEY VALUE …`.
    fn load(&self, name: &str, rest: &str, output: &mut String) -> Result<()> {
        let mut entries = Vec::new();
        for write in rest.split(';') {
            let words: Vec<&str> = write.split_whitespace().collect();
            if let Some(keys) = words.first() {
                let value = words.get(1).unwrap_or(&"");
                entries.extend(parse_keys(keys).into_iter().map(|key| (key.key.clone(), key.value(value))));
            }
        }
        let partition = self.current()?;
        let count = match name {
            "ingest" => partition.ingest(entries)?,
            _ => partition.bulk(entries)?,
        };
        writeln!(output, "{count} keys").unwrap();
        Ok(())
    }

    /// The snapshot that a last word `@name` names.
    fn snapshot(&self, words: &[&str]) -> Option<&Snapshot> {
        let name = words.last()?.strip_prefix('@')?;
        Some(self.snapshots.get(name).unwrap_or_else(|| panic!("there is no snapshot {name:?}")))
    }

    /// `get KEY`, `match KEYS VALUE`, `match-many KEYS` (those that exist), `len`, `size KEY`, `contains KEY`, `first`,
    /// `last`; each with `@SNAPSHOT`.
    fn read(&self, name: &str, words: &[&str], output: &mut String) -> Result<()> {
        let snapshot = self.snapshot(words);
        let words = if snapshot.is_some() { &words[..words.len() - 1] } else { words };
        let (part, keys) = self.target(words.first().unwrap_or(&""))?;
        let get = |key: &str| snapshot.map_or_else(|| part.get(key), |snapshot| snapshot.get(&part, key));
        match name {
            "get" => {
                for key in parse_keys(keys) {
                    let found = get(&key.key)?.map_or("(none)".into(), |value| show_bytes(&value));
                    writeln!(output, "{}={found}", key.key).unwrap();
                }
            }
            "match" => {
                let keys = parse_keys(keys);
                let mut matches = 0;
                for key in &keys {
                    matches += usize::from(get(&key.key)?.is_some_and(|value| value[..] == key.value(words[1])));
                }
                writeln!(output, "{matches} of {}", keys.len()).unwrap();
            }
            "match-many" => {
                let keys = parse_keys(keys);
                let keys = keys.iter().map(|key| &key.key);
                let found = match snapshot {
                    Some(snapshot) => snapshot.multi_get(&part, keys)?,
                    None => part.multi_get(keys)?,
                };
                writeln!(output, "{} of {}", found.iter().flatten().count(), found.len()).unwrap();
            }
            "len" => {
                let len = snapshot.map_or_else(|| part.len(), |snapshot| snapshot.len(&part))?;
                writeln!(output, "{len}").unwrap();
            }
            "size" => {
                let size = snapshot.map_or_else(|| part.size_of(keys), |snapshot| snapshot.size_of(&part, keys))?;
                writeln!(output, "{keys}: {}", size.map_or("(none)".into(), |size| size.to_string())).unwrap();
            }
            "contains" => {
                let is_there =
                    snapshot.map_or_else(|| part.contains_key(keys), |snapshot| snapshot.contains_key(&part, keys))?;
                writeln!(output, "{keys}: {is_there}").unwrap();
            }
            _ => {
                let pair = match (snapshot, name) {
                    (None, "first") => part.first_key_value(),
                    (None, _) => part.last_key_value(),
                    (Some(snapshot), "first") => snapshot.first_key_value(&part),
                    (Some(snapshot), _) => snapshot.last_key_value(&part),
                }?;
                writeln!(output, "{}", pair.map_or("(end)".into(), |(key, value)| show_pair(&key, &value))).unwrap();
            }
        }
        Ok(())
    }

    /// The iterator over the bounds among `words`, of a snapshot if they name one.
    fn open_iter(&self, words: &[&str]) -> Result<Iter> {
        let part = self.current()?;
        let bounds = words.iter().find_map(|word| parse_bounds(word)).unwrap_or(ScriptBounds::All);
        Ok(match (self.snapshot(words), bounds) {
            (None, ScriptBounds::All) => part.iter(),
            (None, ScriptBounds::Prefix(prefix)) => part.prefix(prefix),
            (None, ScriptBounds::Range(low, high)) => part.range::<String>((low, high)),
            (Some(snapshot), ScriptBounds::All) => snapshot.iter(&part),
            (Some(snapshot), ScriptBounds::Prefix(prefix)) => snapshot.prefix(&part, prefix),
            (Some(snapshot), ScriptBounds::Range(low, high)) => snapshot.range::<String>(&part, (low, high)),
        })
    }

    /// `scan [BOUNDS] [rev] [@SNAPSHOT]`; `keys [rev]`; `iter NAME [BOUNDS] [@SNAPSHOT]`; `next NAME [COUNT] [ref]`,
    /// `back NAME [COUNT] [ref]`.
    fn iterate(&mut self, name: &str, words: &[&str], output: &mut String) -> Result<()> {
        let mut found = Vec::new();
        match name {
            "iter" => {
                let iter = self.open_iter(&words[1..])?;
                self.iters.insert(words[0].into(), iter);
                return Ok(());
            }
            "scan" => {
                let iter = self.open_iter(words)?;
                found = collect_texts(iter, words.contains(&"rev"), |(key, value)| show_pair(&key, &value))?;
            }
            "keys" => {
                let keys = self.current()?.keys();
                found = collect_texts(keys, words.contains(&"rev"), |key| show_bytes(&key))?;
            }
            _ => {
                let iter = self.iters.get_mut(words[0]).unwrap_or_else(|| panic!("there is no iterator {}", words[0]));
                let count = words.get(1).filter(|word| **word != "ref").map_or(1, |count| parse_number(count));
                for _ in 0..count {
                    let item = step_iter(iter, name == "next", words.contains(&"ref")).transpose()?;
                    found.push(item.unwrap_or_else(|| "(end)".into()));
                }
            }
        }
        if found.is_empty() {
            found.push("(empty)".into());
        }
        append_wrapped(output, &found);
        Ok(())
    }

    /// `entries NAME`, `value NAME NUMBER`: entries without their values, and one of their values; `snapshot NAME`;
    /// `drop NAME`: of a snapshot, an iterator or entries.
    fn hold(&mut self, name: &str, words: &[&str], output: &mut String) -> Result<()> {
        match name {
            "entries" => {
                let entries = self.current()?.entries().collect::<Result<Vec<Entry>>>()?;
                let bytes: u64 = entries.iter().map(|entry| u64::from(entry.size())).sum();
                writeln!(output, "{} entries, {bytes} bytes", entries.len()).unwrap();
                self.entries.insert(words[0].into(), entries);
            }
            "value" => {
                let entry = &self.entries[words[0]][parse_number::<usize>(words[1])];
                writeln!(output, "{}", show_pair(entry.key(), &entry.value()?)).unwrap();
            }
            "snapshot" => _ = self.snapshots.insert(words[0].into(), self.db().snapshot()),
            _ => {
                let snapshot = self.snapshots.remove(words[0]).is_some();
                let iter = self.iters.remove(words[0]).is_some();
                let entries = self.entries.remove(words[0]).is_some();
                assert!(snapshot || iter || entries, "{} does not exist", words[0]);
            }
        }
        Ok(())
    }

    /// `flush`, `compact`; `step [COUNT]`, `steps` (until no work is left); `gc scan`, `gc space-amp TARGET`,
    /// `gc staleness THRESHOLD`, `gc drop-stale`.
    fn maintain(&self, name: &str, words: &[&str], output: &mut String) -> Result<()> {
        match name {
            "flush" => self.current()?.flush()?,
            "compact" => self.current()?.major_compact()?,
            "step" => {
                for _ in 0..words.first().map_or(1, |count| parse_number(count)) {
                    self.db().step()?;
                }
            }
            "steps" => {
                let mut steps = 0;
                while self.db().step()? {
                    steps += 1;
                    assert!(steps < MAX_STEPS, "background work does not end");
                }
            }
            _ if words[0] == "scan" => {
                let report = self.current()?.gc_scan()?;
                let pinned = report.pinned_bytes;
                writeln!(
                    output,
                    "{} files ({} stale), {} values ({} stale), {} of {} bytes stale, {pinned} pinned, amp {:.2}",
                    report.segment_count,
                    report.stale_segment_count,
                    report.total_blobs,
                    report.stale_blobs,
                    report.stale_bytes,
                    report.total_bytes,
                    report.space_amp()
                )
                .unwrap();
            }
            _ => {
                let part = self.current()?;
                let freed = match words[0] {
                    "space-amp" => part.gc_with_space_amp_target(parse_number(words[1]))?,
                    "staleness" => part.gc_with_staleness_threshold(parse_number(words[1]))?,
                    "drop-stale" => part.gc_drop_stale_segments()?,
                    other => panic!("there is no blob GC {other:?}"),
                };
                writeln!(output, "freed {freed} bytes").unwrap();
            }
        }
        Ok(())
    }

    /// `create NAME [ENGINE]`, `use NAME`, `delete NAME`; `comparator ORDER` (`bytes`, `reversed`, `any-case`) for the
    /// partitions that are created or opened by `create` from then on; `options NAME=VALUE …`, which apply to later
    /// data of the partition; `config NAME=VALUE …`, which applies from the next open.
    fn configure(&mut self, name: &str, words: &[&str]) -> Result<()> {
        match name {
            "create" => {
                if let Some(engine) = words.get(1) {
                    self.other_engines.insert(words[0].into(), ScriptEngine::named(engine)[0]);
                }
                self.open_partition(words[0])?;
            }
            "use" => self.partition = words[0].into(),
            "delete" => self.db().delete_partition_by_name(words[0])?,
            "comparator" => {
                self.options.order = match words[0] {
                    "bytes" => TestOrder::Bytes,
                    "reversed" => TestOrder::Reversed,
                    "any-case" => TestOrder::AnyCase,
                    other => panic!("there is no order {other:?}"),
                };
            }
            _ => {
                for word in words {
                    let (option, value) = word.split_once('=').expect("an option has a value");
                    self.set_option(option, value);
                }
                if name == "options" {
                    let partition = self.open_partition(&self.partition)?;
                    partition.set_options(self.engine_of(&self.partition).partition_options(&self.options))?;
                }
            }
        }
        Ok(())
    }

    fn set_option(&mut self, option: &str, value: &str) {
        let options = &mut self.options;
        let leveled = options.leveled.clone();
        match option {
            "memtable" => options.max_memtable_size = parse_number(value),
            "l0-trigger" => options.leveled = leveled.l0_compaction_trigger(parse_number(value)),
            "table-size" => options.leveled = leveled.target_file_size(parse_number(value)),
            "level-multiplier" => options.leveled = leveled.level_size_multiplier(parse_number(value)),
            "base-level" => options.leveled = leveled.base_level_size(parse_number(value)),
            "threshold" => options.separation_threshold = (value != "none").then(|| parse_number(value)),
            "direct-write" => options.direct_write_threshold = parse_number(value),
            "auto-gc" => options.automatic_gc = (value != "none").then(|| parse_number(value)),
            "operator" => options.merge_operator = (value != "none").then(|| value.into()),
            "ttl" => options.default_ttl = (value != "none").then(|| parse_ttl(value)),
            "pool-size" => options.pool_max_size = parse_number(value),
            "wal-segment" => self.wal_segment_size = parse_number(value),
            "max-wal" => self.max_wal_size = parse_number(value),
            _ => panic!("there is no option {option:?}"),
        }
    }

    /// `kind`; `shape` (levels or pool); `persistence` (of a pool); `blobs`; `metrics NAME …`; `partitions`; `files`
    /// (numbers of files); `verify`.
    fn report(&self, name: &str, words: &[&str], output: &mut String) -> Result<()> {
        match name {
            "kind" => writeln!(output, "{}", self.engine.kind()).unwrap(),
            "shape" => output.push_str(&show_shape(&self.current()?)),
            "persistence" => {
                let pool = self.current()?.metrics().pool.expect("the partition is a pool");
                writeln!(output, "{:?}", pool.persistence).unwrap();
            }
            "blobs" => {
                let files = self.current()?.metrics().blob_files;
                let values: u64 = files.iter().map(|file| file.values).sum();
                let referenced: u64 = files.iter().map(|file| file.referenced_values).sum();
                writeln!(output, "{} files, {values} values, {referenced} referenced", files.len()).unwrap();
            }
            "metrics" => {
                let found: Vec<String> = words.iter().map(|word| format!("{word}={}", self.metric(word))).collect();
                append_wrapped(output, &found);
            }
            "partitions" => append_wrapped(output, &self.db().list_partitions()),
            "files" => append_wrapped(output, &self.count_files()),
            _ => {
                let fs: Arc<dyn Fs> = Arc::new(self.fs.clone());
                let report = inspect::verify(&fs, Path::new(&self.dir), &mut |_, _| {})?;
                for file in report.files.iter().filter(|file| file.problem.is_some()) {
                    writeln!(output, "{}: {:?}", file.path.display(), file.problem).unwrap();
                }
                writeln!(output, "{}", if report.is_clean() { "clean" } else { "damaged" }).unwrap();
            }
        }
        Ok(())
    }

    fn metric(&self, name: &str) -> u64 {
        let metrics = self.db().metrics();
        match name {
            "flushes" => metrics.flushes,
            "ingests" => metrics.ingests,
            "compactions" => metrics.compactions,
            "trivial-moves" => metrics.trivial_moves,
            "blob-gc-runs" => metrics.blob_gc_runs,
            "wal-syncs" => metrics.wal_syncs,
            "oldest-snapshot-age" => metrics.oldest_snapshot_age,
            "approximate-len" => self.current().map_or(0, |part| part.approximate_len()),
            _ => panic!("there is no metric {name:?}"),
        }
    }

    /// The number of files of each kind. Use it after an open, which removes obsolete files: until then a reader of
    /// another test may keep one.
    fn count_files(&self) -> Vec<String> {
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for entry in self.fs.read_dir(Path::new(&self.dir)).unwrap() {
            if let Some((_, kind)) = entry.name.rsplit_once('.') {
                *counts.entry(kind.into()).or_default() += 1;
            }
        }
        counts.into_iter().map(|(kind, count)| format!("{kind}={count}")).collect()
    }
}

fn show_pair(key: &[u8], value: &[u8]) -> String {
    format!("{}={}", show_bytes(key), show_bytes(value))
}

/// The items of an iterator as text.
fn collect_texts<T>(
    iter: impl DoubleEndedIterator<Item = Result<T>>,
    reversed: bool,
    show: impl Fn(T) -> String,
) -> Result<Vec<String>> {
    let items: Result<Vec<T>> = if reversed { iter.rev().collect() } else { iter.collect() };
    Ok(items?.into_iter().map(show).collect())
}

/// The next pair as text, by the copying or the borrowing call.
fn step_iter(iter: &mut Iter, forward: bool, borrows: bool) -> Option<Result<String>> {
    let copied = |pair: Result<(azekura::Slice, azekura::Slice)>| pair.map(|(key, value)| show_pair(&key, &value));
    let borrowed = |pair: Result<(&[u8], &[u8])>| pair.map(|(key, value)| show_pair(key, value));
    match (forward, borrows) {
        (true, false) => iter.next().map(copied),
        (false, false) => iter.next_back().map(copied),
        (true, true) => iter.next_ref().map(borrowed),
        (false, true) => iter.next_back_ref().map(borrowed),
    }
}

/// Levels, or the contents of a pool.
fn show_shape(part: &Partition) -> String {
    let metrics = part.metrics();
    if let Some(pool) = metrics.pool {
        return format!("pool: {} records, {} leaves, {} checkpoints\n", pool.records, pool.leaves, pool.checkpoints);
    }
    let mut text = String::new();
    for level in metrics.levels.iter().filter(|level| level.tables > 0) {
        writeln!(
            text,
            "L{}: {} runs, {} tables, {} entries, {} tombstones",
            level.level, level.runs, level.tables, level.entries, level.tombstones
        )
        .unwrap();
    }
    if metrics.sealed_memtables > 0 {
        writeln!(text, "{} sealed memtables", metrics.sealed_memtables).unwrap();
    }
    if text.is_empty() { "(no tables)\n".into() } else { text }
}
