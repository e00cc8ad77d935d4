//! Concurrent transactions, recorded as histories and judged by the checker `adya`, which implements the analysis of
//! Elle: it infers the order of transactions from lists to which they append, and searches for cycles.
//!
//! Six hot keys at a time, half of them in an LSM partition and half of them in a pool. A key is replaced by a new one
//! after a number of transactions, so that lists stay short. Lists are read by calls of every kind. Some transactions
//! that only append are conditional batches or operations on a single key.
//!
//! - `AZEKURA_TRANSACTIONS`: number of transactions of each history (default 2,000; the long run has 100,000).

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use adya::{History, Opts, Report, Valid, Workload};
use azekura::{
    Config, Database, ErrorKind, Isolation, Partition, PlantedBug, Result, Slice, Transaction, TransactionOptions,
};

use super::{lsm_options, pool_options};
use crate::testkit::watchdog::wait_until;
use azekura::testing::SeededRng;

use crate::testkit::env_u64;

const THREADS: u64 = 8;
const HOT_KEYS: u64 = 6;
/// Transactions after which the hot keys are replaced.
const TRANSACTIONS_PER_KEYS: u64 = 200;
/// Set in a child process; the value is the directory.
const CHILD_ENV: &str = "AZEKURA_HISTORY_CHILD";
const KILLS: u64 = 3;

/// A step of a transaction: a read of a list, or an append of a unique number.
#[derive(Clone, Copy)]
enum Step {
    Read(u64, Lookup),
    Append(u64, u64, Lookup),
}

/// The call that reads a list. An iterator also finds an absent key.
#[derive(Clone, Copy)]
enum Lookup {
    Get,
    MultiGet,
    /// A tracked size, then an untracked value.
    Size,
    Range,
    ReversedRange,
    Prefix,
    Seek,
}

const LOOKUPS: [Lookup; 7] =
    [Lookup::Get, Lookup::MultiGet, Lookup::Size, Lookup::Range, Lookup::ReversedRange, Lookup::Prefix, Lookup::Seek];

/// The events of a history, one line of JSON each, in their order.
struct Recorder {
    lines: Mutex<Vec<String>>,
    /// Each event is also written here, for a process that is killed.
    file: Option<Mutex<File>>,
}

impl Recorder {
    fn in_memory() -> Recorder {
        Recorder { lines: Mutex::default(), file: None }
    }

    fn record(&self, kind: &str, process: u64, value: &str) {
        let line = format!("{{\"type\":\"{kind}\",\"process\":{process},\"value\":[{value}]}}\n");
        match &self.file {
            Some(file) => file.lock().unwrap().write_all(line.as_bytes()).unwrap(),
            None => self.lines.lock().unwrap().push(line),
        }
    }

    fn history(&self) -> History {
        History::from_json(&self.lines.lock().unwrap().concat()).unwrap()
    }
}

struct Lists {
    db: Database,
    partitions: [Partition; 2],
    isolation: Isolation,
}

impl Lists {
    fn open(config: Config, isolation: Isolation) -> Lists {
        let db = config.open().unwrap();
        let lsm = db.open_partition("lsm", lsm_options().max_memtable_size(64 << 10)).unwrap();
        let pool = db.open_partition("pool", pool_options()).unwrap();
        Lists { db, partitions: [lsm, pool], isolation }
    }

    fn begin(&self) -> Transaction {
        self.db.transaction_with(TransactionOptions::default().isolation(self.isolation)).unwrap()
    }

    fn partition(&self, key: u64) -> &Partition {
        &self.partitions[(key % 2) as usize]
    }

    fn read(&self, tx: &Transaction, key: u64, lookup: Lookup) -> Result<Vec<u64>> {
        let (p, key) = (self.partition(key), key.to_be_bytes());
        let value =
            |pair: Option<Result<(Slice, Slice)>>| -> Result<_> { Ok(pair.transpose()?.map(|(_, value)| value)) };
        let bytes = match lookup {
            Lookup::Get => tx.get(p, key)?,
            Lookup::MultiGet => tx.multi_get(p, [key])?.remove(0),
            Lookup::Size => match tx.size_of(p, key)? {
                Some(_) => tx.untracked().get(p, key)?,
                None => None,
            },
            Lookup::Range => value(tx.range(p, key..=key).next())?,
            Lookup::ReversedRange => value(tx.range(p, key..=key).next_back())?,
            Lookup::Prefix => value(tx.prefix(p, key).next())?,
            Lookup::Seek => {
                let mut entries = tx.entries(p);
                entries.seek(key);
                let found = entries.next().transpose()?.filter(|entry| **entry.key() == key);
                found.map(|entry| entry.value()).transpose()?
            }
        };
        Ok(numbers(bytes.as_deref()))
    }

    /// Runs one step, and returns it with its result as JSON.
    fn run(&self, tx: &mut Transaction, step: Step) -> Result<String> {
        match step {
            Step::Read(key, lookup) => {
                let list: Vec<String> = self.read(tx, key, lookup)?.iter().map(ToString::to_string).collect();
                Ok(format!("[\"r\",{key},[{}]]", list.join(",")))
            }
            Step::Append(key, number, lookup) => {
                let mut list = self.read(tx, key, lookup)?;
                list.push(number);
                tx.insert(self.partition(key), key.to_be_bytes(), bytes(&list))?;
                Ok(format!("[\"append\",{key},{number}]"))
            }
        }
    }

    /// Appends as a conditional write, and records it as a transaction.
    fn append_conditionally(&self, recorder: &Recorder, process: u64, steps: &[Step]) {
        recorder.record("invoke", process, &show_steps(steps));
        let appends = steps.iter().filter_map(|step| match step {
            Step::Append(key, number, _) => Some((*key, *number)),
            Step::Read(..) => None,
        });
        let appended = |list: Option<&[u8]>, number| bytes(&[numbers(list), vec![number]].concat());
        let done = match steps {
            [Step::Append(key, number, Lookup::Get | Lookup::Size)] => {
                let update = |list: Option<&[u8]>| Some(appended(list, *number));
                self.partition(*key).fetch_update(key.to_be_bytes(), update).map(|_| true)
            }
            [Step::Append(key, number, Lookup::Range | Lookup::Seek)] => {
                let present = self.partition(*key).get(key.to_be_bytes()).unwrap();
                let new = appended(present.as_deref(), *number);
                self.partition(*key).compare_and_swap(key.to_be_bytes(), present.as_deref(), Some(&new))
            }
            _ => {
                let (mut batch, mut lists) = (self.db.batch(), BTreeMap::new());
                for (key, number) in appends {
                    let list = lists.entry(key).or_insert_with(|| {
                        let present = self.partition(key).get(key.to_be_bytes()).unwrap();
                        batch.expect(self.partition(key), key.to_be_bytes(), present.as_deref());
                        numbers(present.as_deref())
                    });
                    list.push(number);
                }
                lists.iter().for_each(|(key, list)| batch.insert(self.partition(*key), key.to_be_bytes(), bytes(list)));
                match batch.commit() {
                    Err(error) if error.kind() == ErrorKind::Conflict => Ok(false),
                    done => done.map(|()| true),
                }
            }
        };
        recorder.record(if done.unwrap() { "ok" } else { "fail" }, process, &show_steps(steps));
    }

    /// Runs and records a transaction.
    fn transact(&self, recorder: &Recorder, process: u64, steps: &[Step]) {
        recorder.record("invoke", process, &show_steps(steps));
        let mut tx = self.begin();
        let results: Result<Vec<String>> = steps.iter().map(|step| self.run(&mut tx, *step)).collect();
        let results = results.unwrap();
        thread::yield_now();
        self.finish(recorder, process, tx, &results);
    }

    fn finish(&self, recorder: &Recorder, process: u64, tx: Transaction, results: &[String]) {
        match tx.commit() {
            Ok(()) => recorder.record("ok", process, &results.join(",")),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
                recorder.record("fail", process, &results.join(","));
            }
        }
    }

    /// Two transactions, one of which reads what the other one writes, in turns.
    fn write_skew(&self, recorder: &Recorder, process: u64, keys: [u64; 2]) {
        let steps = |n: usize| {
            let number = 1_000_000_000 + keys[n];
            [Step::Read(keys[n], Lookup::Get), Step::Append(keys[1 - n], number, Lookup::Get)]
        };
        let mut open = Vec::new();
        for n in 0..2 {
            recorder.record("invoke", process + n as u64, &show_steps(&steps(n)));
            let mut tx = self.begin();
            let results = steps(n).map(|step| match step {
                Step::Read(..) => self.run(&mut tx, step).unwrap(),
                // Without a read of the own key, so that only the other read can conflict.
                Step::Append(key, number, _) => {
                    tx.insert(self.partition(key), key.to_be_bytes(), number.to_le_bytes()).unwrap();
                    format!("[\"append\",{key},{number}]")
                }
            });
            open.push((tx, results));
        }
        for (n, (tx, results)) in open.into_iter().enumerate() {
            self.finish(recorder, process + n as u64, tx, &results);
        }
    }

    /// Runs transactions of all threads. `first` is the number of the first one: numbers determine the hot keys.
    fn run_threads(&self, recorder: &Recorder, first: u64, count: u64) {
        let next = AtomicU64::new(first);
        let next = &next;
        thread::scope(|threads| {
            for thread in 0..THREADS {
                threads.spawn(move || {
                    let process = first * THREADS + thread;
                    let mut rng = SeededRng::new(process);
                    loop {
                        let n = next.fetch_add(1, Ordering::Relaxed);
                        if n >= first + count {
                            break;
                        }
                        let steps = random_steps(&mut rng, n);
                        let only_appends = steps.iter().all(|step| matches!(step, Step::Append(..)));
                        if only_appends && rng.chance_one_in(2) {
                            self.append_conditionally(recorder, process, &steps);
                        } else {
                            self.transact(recorder, process, &steps);
                        }
                    }
                });
            }
        });
    }
}

/// The numbers of a list.
fn numbers(bytes: Option<&[u8]>) -> Vec<u64> {
    let numbers = bytes.unwrap_or_default().chunks(8);
    numbers.map(|number| u64::from_le_bytes(number.try_into().unwrap())).collect()
}

fn bytes(list: &[u64]) -> Vec<u8> {
    list.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn show_steps(steps: &[Step]) -> String {
    let steps = steps.iter().map(|step| match step {
        Step::Read(key, _) => format!("[\"r\",{key},null]"),
        Step::Append(key, number, _) => format!("[\"append\",{key},{number}]"),
    });
    steps.collect::<Vec<_>>().join(",")
}

fn random_steps(rng: &mut SeededRng, n: u64) -> Vec<Step> {
    let count = 1 + rng.below(4);
    let step = |i: u64| {
        let key = n / TRANSACTIONS_PER_KEYS * HOT_KEYS + rng.below(HOT_KEYS);
        let lookup = rng.pick(&LOOKUPS);
        if rng.chance_one_in(2) { Step::Read(key, lookup) } else { Step::Append(key, n * 4 + i, lookup) }
    };
    (0..count).map(step).collect()
}

fn judge(history: &History, model: &str) -> Report {
    let timeout = Duration::from_secs(3600);
    let opts = Opts { models: vec![model.into()], timeout, ..Opts::default() };
    adya::check(history, Workload::ListAppend, &opts)
}

/// A history of transactions at `isolation`, with one pair that is a write skew if it commits.
fn recorded(isolation: Isolation, bug: Option<PlantedBug>) -> History {
    let directory = tempfile::tempdir().unwrap();
    let mut config = Config::new(directory.path().join("db"));
    if let Some(bug) = bug {
        config = config.plant_bug(bug);
    }
    let (lists, recorder) = (Lists::open(config, isolation), Recorder::in_memory());
    lists.write_skew(&recorder, 1 << 40, [1 << 40, (1 << 40) + 1]);
    lists.run_threads(&recorder, 0, env_u64("AZEKURA_TRANSACTIONS", 2_000));
    recorder.history()
}

#[test]
fn serializable_histories_have_no_anomaly() {
    let history = recorded(Isolation::Serializable, None);
    let report = judge(&history, "strict-serializable");
    assert_eq!(report.valid, Valid::True, "{:?}", report.anomaly_types);
    let committed = history.ops.iter().filter(|op| op.kind == adya::history::OpType::Ok).count() as u64;
    assert!(committed > env_u64("AZEKURA_TRANSACTIONS", 2_000) / 10, "{committed} commits are too few");
}

#[test]
fn snapshot_histories_have_only_write_skew() {
    let history = recorded(Isolation::Snapshot, None);
    let report = judge(&history, "strong-snapshot-isolation");
    assert_eq!(report.valid, Valid::True, "{:?}", report.anomaly_types);
    let report = judge(&history, "serializable");
    assert_eq!(report.valid, Valid::False, "no write skew");
    assert!(report.anomaly_types.iter().all(|name| name.starts_with("G2")), "{:?}", report.anomaly_types);
}

#[test]
fn untracked_reads_are_found_by_the_checker() {
    let report = judge(&recorded(Isolation::Serializable, Some(PlantedBug::UntrackedTransactions)), "serializable");
    assert_eq!(report.valid, Valid::False);
    assert!(report.anomaly_types.iter().any(|name| name.starts_with("G2")), "{:?}", report.anomaly_types);
}

/// Histories with one anomaly each, to show that the checker finds it.
#[test]
fn checker_finds_planted_anomalies() {
    let history = |transactions: &[(&str, &str)]| {
        let recorder = Recorder::in_memory();
        for (process, (_, value)) in transactions.iter().enumerate() {
            recorder.record("invoke", process as u64, value);
        }
        for (process, (kind, value)) in transactions.iter().enumerate() {
            recorder.record(kind, process as u64, value);
        }
        judge(&recorder.history(), "serializable")
    };
    let a = |key: u64, number: u64| format!("[\"append\",{key},{number}]");
    let r = |key: u64, list: &str| format!("[\"r\",{key},[{list}]]");
    let all = |steps: &[String]| steps.join(",");
    let g0 =
        [("ok", all(&[a(1, 1), a(2, 1)])), ("ok", all(&[a(1, 2), a(2, 2)])), ("ok", all(&[r(1, "1,2"), r(2, "2,1")]))];
    let g1a = [("fail", a(1, 1)), ("ok", r(1, "1"))];
    let g1b = [("ok", all(&[a(1, 1), a(1, 2)])), ("ok", r(1, "1"))];
    let g1c = [("ok", all(&[a(1, 1), r(2, "1")])), ("ok", all(&[a(2, 1), r(1, "1")]))];
    let g_single = [("ok", all(&[a(1, 1), a(2, 1)])), ("ok", all(&[r(1, ""), r(2, "1")]))];
    let g2 =
        [("ok", all(&[r(1, ""), a(2, 1)])), ("ok", all(&[r(2, ""), a(1, 1)])), ("ok", all(&[r(1, "1"), r(2, "1")]))];
    let cases: [(&str, &[(&str, String)]); 6] =
        [("G0", &g0), ("G1a", &g1a), ("G1b", &g1b), ("G1c", &g1c), ("G-single", &g_single), ("G2", &g2)];
    for (name, transactions) in cases {
        let transactions: Vec<(&str, &str)> = transactions.iter().map(|(kind, value)| (*kind, &**value)).collect();
        let report = history(&transactions);
        assert_eq!(report.valid, Valid::False, "{name}");
        assert!(report.anomaly_types.iter().any(|found| found.starts_with(name)), "{name}: {:?}", report.anomaly_types);
    }
    let clean = [("ok", &*a(1, 1)), ("ok", &*r(1, "1"))];
    assert_eq!(history(&clean).valid, Valid::True);
}

fn events_file(directory: &Path) -> PathBuf {
    directory.join("events")
}

/// The process that is killed: runs transactions until then. Each event is in the file before the next step.
#[test]
fn history_child() {
    let Some(directory) = std::env::var_os(CHILD_ENV).map(PathBuf::from) else { return };
    let file = OpenOptions::new().append(true).create(true).open(events_file(&directory)).unwrap();
    let recorder = Recorder { lines: Mutex::default(), file: Some(Mutex::new(file)) };
    let lists = Lists::open(Config::new(directory.join("db")), Isolation::Serializable);
    // The numbers follow those of the process before, of which some may not be in the file. The hot keys continue.
    let invoked = fs::read_to_string(events_file(&directory)).unwrap().matches("\"invoke\"").count() as u64;
    lists.run_threads(&recorder, invoked + 2 * THREADS, 1 << 40);
}

/// The history continues across processes that are killed. On a disk the pool is durable by the WAL only; in `/dev/shm`
/// it is mapped, and survives a kill by itself.
#[test]
fn killed_processes_leave_a_serializable_history() {
    let places = [Some(tempfile::tempdir().unwrap()), tempfile::tempdir_in("/dev/shm").ok()];
    places.iter().flatten().for_each(|directory| check_history_across_kills(directory.path()));
}

fn check_history_across_kills(directory: &Path) {
    let count = |path: &Path| fs::read_to_string(events_file(path)).map_or(0, |text| text.lines().count() as u64);
    // Each transaction has two events.
    let events = 2 * env_u64("AZEKURA_TRANSACTIONS", 2_000) / KILLS;
    for _ in 0..KILLS {
        let before = count(directory);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["transactions::histories::history_child", "--exact", "--nocapture", "--test-threads", "1"])
            .env(CHILD_ENV, directory)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        wait_until("enough transactions", || count(directory) >= before + events);
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let recorder = Recorder::in_memory();
    let text = fs::read_to_string(events_file(directory)).unwrap();
    // The last line may be torn.
    recorder.lines.lock().unwrap().extend(text.split_inclusive('\n').filter(|l| l.ends_with('\n')).map(str::to_owned));
    let lists = Lists::open(Config::new(directory.join("db")), Isolation::Serializable);
    let last = text.matches("\"invoke\"").count() as u64 / TRANSACTIONS_PER_KEYS * HOT_KEYS + HOT_KEYS;
    let steps: Vec<Step> = (0..last + HOT_KEYS).map(|key| Step::Read(key, Lookup::Get)).collect();
    lists.transact(&recorder, 1 << 40, &steps);
    let report = judge(&recorder.history(), "strict-serializable");
    assert_eq!(report.valid, Valid::True, "{:?}", report.anomaly_types);
}
