//! Random transactions of one thread against an oracle, which knows the state after every commit.
//!
//! A commit must fail if a read would have another result now. It may fail only if a commit since the begin wrote a
//! key that the transaction has read, also if that changed nothing.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;

use azekura::testing::{SeededRng, TestEnv, TestOrder};
use azekura::{Database, ErrorKind, Isolation, Iter, Partition, Savepoint, Transaction, TransactionOptions};

use crate::testkit::property::{RandomOp, check_property, random_ops};
use crate::testkit::seeds::test_seeds;
use crate::testkit::test_dir::TestDir;
use crate::testkit::{Map, RandomOptions};

const PARTITIONS: [&str; 3] = ["one", "two", "three"];
const KEYS: u64 = 12;
const TRANSACTIONS_MAX: usize = 4;

const OPS: &[(&str, u32)] = &[
    ("begin", 6),
    ("get", 16),
    ("write", 16),
    ("scan", 12),
    ("remove-range", 3),
    ("savepoint", 2),
    ("rollback", 2),
    ("commit", 8),
    ("drop", 1),
    ("plain", 4),
    ("conditional", 2),
    ("ingest", 1),
    ("plain-range", 1),
    ("flush", 1),
    ("compact", 1),
    ("step", 2),
];

/// A read of a key, or of a consumed range. Keys are canonical.
enum ModelRead {
    Key(usize, Vec<u8>),
    Range(usize, Bound<Vec<u8>>, Bound<Vec<u8>>),
}

impl ModelRead {
    fn partition(&self) -> usize {
        match self {
            ModelRead::Key(at, _) | ModelRead::Range(at, ..) => *at,
        }
    }

    fn includes(&self, partition: usize, key: &[u8]) -> bool {
        match self {
            ModelRead::Key(at, read) => *at == partition && read == key,
            ModelRead::Range(at, low, high) => {
                let is_after = match low {
                    Bound::Unbounded => true,
                    Bound::Included(low) => key >= &low[..],
                    Bound::Excluded(low) => key > &low[..],
                };
                let is_before = match high {
                    Bound::Unbounded => true,
                    Bound::Included(high) => key <= &high[..],
                    Bound::Excluded(high) => key < &high[..],
                };
                *at == partition && is_after && is_before
            }
        }
    }
}

type ModelState = [Map; 3];

struct OpenTransaction {
    tx: Transaction,
    isolation: Isolation,
    begun_at: u64,
    snapshot: ModelState,
    /// The snapshot with the writes.
    state: ModelState,
    /// Keys that were written, also by a range delete; with the operand of a merge.
    written: Vec<(usize, Vec<u8>, Option<Vec<u8>>)>,
    /// The partitions of range deletes, also of those that were undone.
    removed_ranges: Vec<usize>,
    reads: Vec<ModelRead>,
    savepoints: Vec<(Savepoint, ModelState, usize)>,
}

struct ModelRun {
    db: Database,
    partitions: Vec<(TestOrder, Partition)>,
    state: ModelState,
    /// Number of commits, and the last one that wrote each key.
    commits: u64,
    written_at: BTreeMap<(usize, Vec<u8>), u64>,
    /// The last commit that removed a range of each partition: it may interfere with reads of gaps in the range.
    range_removed_at: [u64; 3],
    open: Vec<OpenTransaction>,
}

impl ModelRun {
    fn new(seed: u64) -> ModelRun {
        let (dir, shape) = (TestDir::in_memory(), RandomOptions::with_orders(seed));
        let db = shape.config(&dir.dir, dir.fs.clone(), &TestEnv::new(seed)).open().unwrap();
        let open = |name: &&str| (shape.order(name), shape.open(&db, name).unwrap());
        let partitions = PARTITIONS.iter().map(open).collect();
        let (state, written_at) = (ModelState::default(), BTreeMap::new());
        ModelRun { db, partitions, state, commits: 0, written_at, range_removed_at: [0; 3], open: Vec::new() }
    }

    fn run(&mut self, op: &RandomOp) {
        let mut rng = SeededRng::new(op.seed);
        match op.name {
            "begin" if self.open.len() < TRANSACTIONS_MAX => self.begin(&mut rng),
            "plain" => self.write_plainly(&mut rng),
            "conditional" => self.write_conditionally(&mut rng),
            "ingest" => self.ingest(&mut rng),
            "plain-range" => self.remove_range_plainly(&mut rng),
            "flush" => self.partitions[rng.below(3)].1.flush().unwrap(),
            "compact" => self.partitions[rng.below(3)].1.major_compact().unwrap(),
            "step" => drop(self.db.step().unwrap()),
            _ if self.open.is_empty() => {}
            "commit" | "drop" => {
                let open = self.open.swap_remove(rng.below(self.open.len()));
                if op.name == "commit" {
                    self.commit(open);
                }
            }
            name => {
                let at = rng.below(self.open.len());
                let open = &mut self.open[at];
                match name {
                    "get" => open.get(&self.partitions, &mut rng),
                    "write" => open.write(&self.partitions, &mut rng),
                    "scan" => open.scan(&self.partitions, &mut rng),
                    "remove-range" => open.remove_range(&self.partitions, &mut rng),
                    "savepoint" => {
                        let point = open.tx.savepoint();
                        open.savepoints.push((point, open.state.clone(), open.written.len()));
                    }
                    "rollback" if !open.savepoints.is_empty() => {
                        let at = rng.below(open.savepoints.len());
                        open.savepoints.truncate(at + 1);
                        let (point, state, written) = &open.savepoints[at];
                        open.tx.rollback_to(point).unwrap();
                        open.state = state.clone();
                        open.written.truncate(*written);
                    }
                    _ => {}
                }
            }
        }
    }

    fn begin(&mut self, rng: &mut SeededRng) {
        let isolation = rng.pick(&[Isolation::Serializable, Isolation::Serializable, Isolation::Snapshot]);
        self.open.push(OpenTransaction {
            tx: self.db.transaction_with(TransactionOptions::default().isolation(isolation)).unwrap(),
            isolation,
            begun_at: self.commits,
            snapshot: self.state.clone(),
            state: self.state.clone(),
            written: Vec::new(),
            removed_ranges: Vec::new(),
            reads: Vec::new(),
            savepoints: Vec::new(),
        });
    }

    fn write_plainly(&mut self, rng: &mut SeededRng) {
        let at = rng.below(3);
        let (order, p) = &self.partitions[at];
        let key = random_key(*order, rng);
        let value = (!rng.chance_one_in(3)).then(|| random_value(rng));
        if rng.chance_one_in(4) && p.merge(&key, b"+").is_ok() {
            self.commits += 1;
            let key = order.canonical(&key);
            append(&mut self.state[at], &key, b"+");
            self.written_at.insert((at, key), self.commits);
            return;
        }
        match &value {
            Some(value) => p.insert(&key, value).unwrap(),
            None => p.remove(&key).unwrap(),
        }
        self.commits += 1;
        let key = order.canonical(&key);
        set(&mut self.state[at], &key, value);
        self.written_at.insert((at, key), self.commits);
    }

    /// A write that depends on the present value of a key.
    fn write_conditionally(&mut self, rng: &mut SeededRng) {
        let at = rng.below(3);
        let (order, p) = &self.partitions[at];
        let key = random_key(*order, rng);
        let canonical = order.canonical(&key);
        let present = self.state[at].get(&canonical).map(Vec::as_slice);
        let new = (!rng.chance_one_in(3)).then(|| random_value(rng));
        match rng.below(3) {
            0 => assert!(p.compare_and_swap(&key, present, new.as_deref()).unwrap()),
            1 => assert_eq!(p.fetch_update(&key, |_| new.clone()).unwrap().as_deref(), present),
            _ => {
                let mut batch = self.db.batch();
                batch.expect(p, &key, present);
                match &new {
                    Some(new) => batch.insert(p, &key, new),
                    None => batch.remove(p, &key),
                }
                batch.commit().unwrap();
            }
        }
        self.commits += 1;
        set(&mut self.state[at], &canonical, new);
        self.written_at.insert((at, canonical), self.commits);
    }

    fn ingest(&mut self, rng: &mut SeededRng) {
        let at = rng.below(3);
        let (order, p) = &self.partitions[at];
        let mut entries = BTreeMap::new();
        for _ in 0..1 + rng.below(4) {
            let key = random_key(*order, rng);
            entries.insert(order.canonical(&key), (key, random_value(rng)));
        }
        p.ingest(entries.values().cloned()).unwrap();
        self.commits += 1;
        for (canonical, (_, value)) in entries {
            set(&mut self.state[at], &canonical, Some(value));
            self.written_at.insert((at, canonical), self.commits);
        }
    }

    fn remove_range_plainly(&mut self, rng: &mut SeededRng) {
        let at = rng.below(3);
        let (order, p) = &self.partitions[at];
        let (low, high) = random_range(*order, rng);
        let removed = canonical_keys_between(*order, &low, &high);
        p.remove_range(low..high).unwrap();
        self.commits += 1;
        self.range_removed_at[at] = self.commits;
        for canonical in removed {
            set(&mut self.state[at], &canonical, None);
            self.written_at.insert((at, canonical), self.commits);
        }
    }

    fn commit(&mut self, mut open: OpenTransaction) {
        let checked: Vec<ModelRead> = match open.isolation {
            Isolation::Snapshot => open.written.iter().map(|(at, key, _)| ModelRead::Key(*at, key.clone())).collect(),
            _ => std::mem::take(&mut open.reads),
        };
        let view = |state: &ModelState| -> Vec<(usize, Vec<u8>, Vec<u8>)> {
            let pairs = state.iter().enumerate().flat_map(|(at, map)| map.iter().map(move |(k, v)| (at, k, v)));
            let read = pairs.filter(|(at, key, _)| checked.iter().any(|read| read.includes(*at, key)));
            read.map(|(at, key, value)| (at, key.clone(), value.clone())).collect()
        };
        let must_conflict = view(&open.snapshot) != view(&self.state);
        let is_later = |when: u64| when > open.begun_at;
        let mut written = self.written_at.iter().filter(|(_, when)| is_later(**when));
        let may_conflict = written.any(|((at, key), _)| checked.iter().any(|read| read.includes(*at, key)))
            || checked.iter().any(|read| is_later(self.range_removed_at[read.partition()]));
        let tx = std::mem::replace(&mut open.tx, self.db.transaction());
        match tx.commit() {
            Ok(()) => {
                assert!(
                    !must_conflict || open.written.is_empty(),
                    "a commit with outdated reads succeeded: {:?}, {:?}",
                    open.isolation,
                    self.partitions
                );
                self.commits += 1;
                open.removed_ranges.iter().for_each(|at| self.range_removed_at[*at] = self.commits);
                for (at, key, operand) in open.written.clone() {
                    match operand {
                        // The value may have changed since the begin.
                        Some(operand) if !open.has_set(at, &key) => append(&mut self.state[at], &key, &operand),
                        _ => set(&mut self.state[at], &key, open.state[at].get(&key).cloned()),
                    }
                    self.written_at.insert((at, key), self.commits);
                }
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
                assert!(may_conflict && !open.written.is_empty(), "a conflict without a commit: {error}");
                assert!(error.conflicting_key().is_some());
            }
        }
    }

    fn check_state(&self) {
        for ((order, p), wanted) in self.partitions.iter().zip(&self.state) {
            let found = p.iter().map(|pair| pair.map(|(key, value)| (order.canonical(&key), value.to_vec())).unwrap());
            assert_eq!(&found.collect::<Map>(), wanted);
        }
    }
}

fn set(map: &mut Map, key: &[u8], value: Option<Vec<u8>>) {
    match value {
        Some(value) => _ = map.insert(key.to_vec(), value),
        None => _ = map.remove(key),
    }
}

fn append(map: &mut Map, key: &[u8], operand: &[u8]) {
    map.entry(key.to_vec()).or_default().extend_from_slice(operand);
}

fn random_key(order: TestOrder, rng: &mut SeededRng) -> Vec<u8> {
    order.valid_key(format!("Key {}", rng.below(KEYS)).as_bytes())
}

/// Two keys, of which the first one is not above the second one.
fn random_range(order: TestOrder, rng: &mut SeededRng) -> (Vec<u8>, Vec<u8>) {
    let (a, b) = (random_key(order, rng), random_key(order, rng));
    if order.canonical(&a) <= order.canonical(&b) { (a, b) } else { (b, a) }
}

/// The canonical forms of all keys from `low` on and before `high`.
fn canonical_keys_between(order: TestOrder, low: &[u8], high: &[u8]) -> Vec<Vec<u8>> {
    let (low, high) = (order.canonical(low), order.canonical(high));
    let keys = (0..KEYS).map(|n| order.canonical(&order.valid_key(format!("Key {n}").as_bytes())));
    keys.filter(|key| low <= *key && *key < high).collect()
}

fn random_value(rng: &mut SeededRng) -> Vec<u8> {
    let len = if rng.chance_one_in(8) { 3000 } else { rng.below(60) };
    [rng.next_u64().to_le_bytes().to_vec(), rng.random_bytes(len as usize)].concat()
}

impl OpenTransaction {
    /// Whether the transaction has set or removed a key itself, so that a lookup does not depend on the snapshot.
    fn has_set(&self, at: usize, key: &[u8]) -> bool {
        self.written.iter().any(|(set_at, set, operand)| *set_at == at && set == key && operand.is_none())
    }

    fn get(&mut self, partitions: &[(TestOrder, Partition)], rng: &mut SeededRng) {
        let at = rng.below(3);
        let (order, p) = &partitions[at];
        let key = random_key(*order, rng);
        let canonical = order.canonical(&key);
        let wanted = self.state[at].get(&canonical);
        if rng.chance_one_in(5) {
            assert_eq!(self.tx.untracked().get(p, &key).unwrap().as_deref(), wanted.map(Vec::as_slice));
            return;
        }
        match rng.chance_one_in(2) {
            true => assert_eq!(self.tx.get(p, &key).unwrap().as_deref(), wanted.map(Vec::as_slice)),
            false => assert_eq!(self.tx.size_of(p, &key).unwrap(), wanted.map(|value| value.len() as u32)),
        }
        if !self.has_set(at, &canonical) {
            self.reads.push(ModelRead::Key(at, canonical));
        }
    }

    fn write(&mut self, partitions: &[(TestOrder, Partition)], rng: &mut SeededRng) {
        for _ in 0..rng.pick(&[1, 1, 1, 20]) {
            let at = rng.below(3);
            let (order, p) = &partitions[at];
            let key = random_key(*order, rng);
            let value = (!rng.chance_one_in(3)).then(|| random_value(rng));
            if rng.chance_one_in(4) && self.tx.merge(p, &key, b"-").is_ok() {
                let key = order.canonical(&key);
                append(&mut self.state[at], &key, b"-");
                self.written.push((at, key, Some(b"-".to_vec())));
                continue;
            }
            match &value {
                Some(value) => self.tx.insert(p, &key, value).unwrap(),
                None => self.tx.remove(p, &key).unwrap(),
            }
            let key = order.canonical(&key);
            set(&mut self.state[at], &key, value);
            self.written.push((at, key, None));
        }
    }

    /// A range delete; all keys of the range count as written.
    fn remove_range(&mut self, partitions: &[(TestOrder, Partition)], rng: &mut SeededRng) {
        let at = rng.below(3);
        let (order, p) = &partitions[at];
        let (low, high) = random_range(*order, rng);
        let removed = canonical_keys_between(*order, &low, &high);
        self.tx.remove_range(p, low..high).unwrap();
        self.removed_ranges.push(at);
        for key in removed {
            self.state[at].remove(&key);
            self.written.push((at, key, None));
        }
    }

    /// Some steps of an iterator over a range: of one end, which seeks, or of both ends.
    fn scan(&mut self, partitions: &[(TestOrder, Partition)], rng: &mut SeededRng) {
        let at = rng.below(3);
        let (order, p) = &partitions[at];
        let mut bound = || match rng.below(3) {
            0 => Bound::Unbounded,
            1 => Bound::Included(random_key(*order, rng)),
            _ => Bound::Excluded(random_key(*order, rng)),
        };
        let bounds = (bound(), bound());
        let mut iter: Iter = self.tx.range::<Vec<u8>>(p, bounds.clone());
        let canonical = |bound: Bound<Vec<u8>>| bound.map(|key| order.canonical(&key));
        let (low, high) = (canonical(bounds.0), canonical(bounds.1));
        let inside = ModelRead::Range(at, low.clone(), high.clone());
        let all: Vec<_> = self.state[at].iter().filter(|(key, _)| inside.includes(at, key)).collect();
        let steps = rng.below(KEYS as usize + 2);
        let mut ends = [ScannedEnd::new(true, &low), ScannedEnd::new(false, &high)];
        let (only_end, seeks) = (rng.below(3), rng.chance_one_in(2));
        // What is left for both ends. A seek of the only end that is used begins anew.
        let mut left: VecDeque<_> = all.iter().copied().collect();
        for _ in 0..steps {
            let n = if only_end < 2 { only_end } else { rng.below(2) };
            let end = &mut ends[n];
            if only_end < 2 && seeks && rng.chance_one_in(4) {
                let key = random_key(*order, rng);
                if end.is_front {
                    iter.seek(&key);
                } else {
                    iter.seek_back(&key);
                }
                let key = order.canonical(&key);
                self.reads.extend(end.read(at, &low, &high));
                let beyond = |other: &[u8]| if end.is_front { other >= &key[..] } else { other <= &key[..] };
                left = all.iter().copied().filter(|(key, _)| beyond(key)).collect();
                *end = match if end.is_front { &low } else { &high } {
                    Bound::Included(start) | Bound::Excluded(start) if *start == key || beyond(start) => {
                        ScannedEnd::new(end.is_front, if end.is_front { &low } else { &high })
                    }
                    _ => ScannedEnd::new(end.is_front, &Bound::Included(key)),
                };
            }
            let end = &mut ends[n];
            let found = if end.is_front { iter.next() } else { iter.next_back() };
            let wanted = if end.is_front { left.pop_front() } else { left.pop_back() };
            let found = found.transpose().unwrap().map(|(key, value)| (order.canonical(&key), value.to_vec()));
            assert_eq!(found, wanted.map(|(key, value)| (key.clone(), value.clone())));
            end.last = Some(found.map(|(key, _)| key));
        }
        self.reads.extend(ends.iter().filter_map(|end| end.read(at, &low, &high)));
    }
}

/// What one end of an iterator has read since its last seek.
struct ScannedEnd {
    is_front: bool,
    start: Bound<Vec<u8>>,
    /// The last key that it returned, or `None` at the end.
    last: Option<Option<Vec<u8>>>,
}

impl ScannedEnd {
    fn new(is_front: bool, start: &Bound<Vec<u8>>) -> ScannedEnd {
        ScannedEnd { is_front, start: start.clone(), last: None }
    }

    /// The keys and gaps that it has passed, in an iterator over `low` to `high`.
    fn read(&self, at: usize, low: &Bound<Vec<u8>>, high: &Bound<Vec<u8>>) -> Option<ModelRead> {
        let last = self.last.clone()?;
        let through = |bound: &Bound<Vec<u8>>| last.clone().map_or(bound.clone(), Bound::Included);
        Some(match self.is_front {
            true => ModelRead::Range(at, self.start.clone(), through(high)),
            false => ModelRead::Range(at, through(low), self.start.clone()),
        })
    }
}

#[test]
fn transactions_agree_with_the_oracle() {
    for seed in test_seeds(40) {
        check_property("transactions_agree_with_the_oracle", seed, &random_ops(OPS, 300), |ops| {
            let mut run = ModelRun::new(seed);
            for op in &ops {
                run.run(op);
            }
            run.open.clear();
            run.check_state();
        });
    }
}
