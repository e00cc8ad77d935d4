//! The memtable compared with a model, and with one writer and several readers at the same time.

use std::cmp::{Ordering, Reverse};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use crate::base::{EntryRef, InternalKey, KeyOrder, RecordKind, SeqNo};
use crate::iter::InternalIter;
use crate::memtable::Memtable;
use crate::memtable::memtable::MemtableIter;
use crate::testing::{SeededRng, TestOrder};

fn orders() -> Vec<KeyOrder> {
    vec![
        KeyOrder::bytewise(),
        KeyOrder::custom(Arc::new(TestOrder::Reversed)),
        KeyOrder::custom(Arc::new(TestOrder::AnyCase)),
        KeyOrder::custom(Arc::new(TestOrder::AnyCaseHashed)),
    ]
}

/// A pattern of keys: maps a number from 0 on to a key.
type Keys = fn(u64) -> Vec<u8>;

fn mixed(n: u64) -> u64 {
    n.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

const SHAPES: &[(&str, Keys)] = &[
    ("few letters, many keys are prefixes of others", |n| {
        let n = mixed(n);
        (0..n % 7).map(|i| b"aAb\0"[(n >> (8 + 2 * i)) as usize % 4]).collect()
    }),
    ("random", |n| [mixed(n), mixed(!n)].iter().flat_map(|word| word.to_be_bytes()).collect()),
    ("ascending", |n| n.to_be_bytes().to_vec()),
    ("descending", |n| (!n).to_be_bytes().to_vec()),
    ("decimal", |n| format!("{:016}", mixed(n) % 100_000).into_bytes()),
    ("interleaved ascending runs", |n| format!("Run{:02}/{:06}", n % 5, n / 5).into_bytes()),
    ("long common prefix", |n| format!("{}{:08}", "/a/long/path".repeat(5), mixed(n) % 50_000).into_bytes()),
    ("all lengths", |n| vec![b'x'; (mixed(n) % 300) as usize]),
];

struct ModelKey {
    user_key: Vec<u8>,
    seqno: SeqNo,
    order: KeyOrder,
}

impl Ord for ModelKey {
    fn cmp(&self, other: &ModelKey) -> Ordering {
        self.order.cmp(&self.user_key, &other.user_key).then(Reverse(self.seqno).cmp(&Reverse(other.seqno)))
    }
}

impl PartialOrd for ModelKey {
    fn partial_cmp(&self, other: &ModelKey) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for ModelKey {
    fn eq(&self, other: &ModelKey) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for ModelKey {}

struct Model {
    order: KeyOrder,
    entries: BTreeMap<ModelKey, (RecordKind, Vec<u8>)>,
    table: Arc<Memtable>,
    random: SeededRng,
    keys: Keys,
}

impl Model {
    fn new(order: KeyOrder, keys: Keys) -> Model {
        let table = Arc::new(Memtable::new(order.clone(), 42));
        Model { order, entries: BTreeMap::new(), table, random: SeededRng::new(88_172_645_463_325_252), keys }
    }

    fn key(&self, user_key: &[u8], seqno: SeqNo) -> ModelKey {
        ModelKey { user_key: user_key.to_vec(), seqno, order: self.order.clone() }
    }

    fn insert(&mut self, n: u64, seqno: u64) {
        let user_key = (self.keys)(n);
        let kind = if self.random.below(5) == 0 { RecordKind::Delete } else { RecordKind::Put };
        let value = if kind.is_tombstone() { Vec::new() } else { vec![seqno as u8; self.random.below(40) as usize] };
        self.table.insert(EntryRef { user_key: &user_key, seqno: SeqNo(seqno), kind, value: &value }).unwrap();
        self.entries.insert(self.key(&user_key, SeqNo(seqno)), (kind, value));
    }

    /// Returns the first entry at or after `target`.
    fn at_or_after(&self, target: &ModelKey) -> Option<(&ModelKey, &(RecordKind, Vec<u8>))> {
        self.entries.range(target..).next()
    }

    fn before(&self, target: &ModelKey) -> Option<(&ModelKey, &(RecordKind, Vec<u8>))> {
        self.entries.range(..target).next_back()
    }

    /// Returns a key that may be in the memtable, a variation of such a key, or another key.
    fn random_key(&mut self, keys: u64) -> Vec<u8> {
        let n = self.random.below(keys + keys / 4 + 1);
        let mut user_key = (self.keys)(n);
        match self.random.below(6) {
            0 => user_key.push(0),
            1 => user_key.truncate(user_key.len() / 2),
            2 => user_key.make_ascii_uppercase(),
            _ => {}
        }
        user_key
    }

    fn check_gets(&mut self, keys: u64, highest: u64) {
        for _ in 0..if cfg!(miri) { 20 } else { 300 } {
            let user_key = self.random_key(keys);
            let at = SeqNo(self.random.below(highest + 2));
            let target = self.key(&user_key, at);
            let expected =
                self.at_or_after(&target).filter(|(key, _)| self.order.cmp(&key.user_key, &user_key).is_eq());
            let expected = expected.map(|(key, (kind, value))| (&key.user_key[..], key.seqno, *kind, &value[..]));
            for hash in [self.table.hash_of(&user_key), None] {
                let got = self.table.get(&user_key, hash, at).map(|e| (e.user_key, e.seqno, e.kind, e.value));
                assert_eq!(got, expected, "{user_key:?} at {at}, hash {hash:?}");
            }
        }
    }

    fn check_at(&self, iter: &MemtableIter, expected: Option<(&ModelKey, &(RecordKind, Vec<u8>))>) {
        let entry = iter.valid().then(|| iter.entry());
        let entry = entry.map(|e| (e.user_key, e.seqno, e.kind, e.value));
        assert_eq!(entry, expected.map(|(key, (kind, value))| (&key.user_key[..], key.seqno, *kind, &value[..])));
    }

    fn check_iteration(&mut self, keys: u64, highest: u64) {
        let mut iter = self.table.iter();
        assert!(!iter.valid());
        iter.seek_to_first().unwrap();
        for expected in &self.entries {
            self.check_at(&iter, Some(expected));
            iter.next().unwrap();
        }
        self.check_at(&iter, None);
        iter.seek_to_last().unwrap();
        for expected in self.entries.iter().rev() {
            self.check_at(&iter, Some(expected));
            iter.prev().unwrap();
        }
        self.check_at(&iter, None);
        for _ in 0..if cfg!(miri) { 10 } else { 200 } {
            let user_key = self.random_key(keys);
            let seqno = if self.random.below(3) == 0 { SeqNo::MAX } else { SeqNo(self.random.below(highest + 2)) };
            let target = self.key(&user_key, seqno);
            let forward = self.random.below(2) == 0;
            let start = if forward { self.at_or_after(&target) } else { self.before(&target) };
            if forward {
                iter.seek(InternalKey::new(&user_key, seqno)).unwrap();
            } else {
                iter.seek_before(InternalKey::new(&user_key, seqno)).unwrap();
            }
            let mut current = start.map(|(key, value)| (self.key(&key.user_key, key.seqno), value.clone()));
            for _ in 0..self.random.below(if cfg!(miri) { 15 } else { 100 }) {
                self.check_at(&iter, current.as_ref().map(|(key, value)| (key, value)));
                let Some((key, _)) = &current else { break };
                let next = if self.random.below(5) < 3 {
                    iter.next().unwrap();
                    self.entries.range((std::ops::Bound::Excluded(key), std::ops::Bound::Unbounded)).next()
                } else {
                    iter.prev().unwrap();
                    self.before(key)
                };
                current = next.map(|(key, value)| (self.key(&key.user_key, key.seqno), value.clone()));
            }
        }
    }

    /// Checks lookups and iteration twice: with closed nodes, and as if the writer had stopped in the middle of
    /// changing every node.
    fn check(&mut self, keys: u64, highest: u64) {
        for _ in 0..2 {
            self.check_gets(keys, highest);
            self.check_iteration(keys, highest);
            self.table.tree().toggle_write_in_progress();
        }
    }
}

#[test]
fn behaves_like_a_sorted_map() {
    let count = if cfg!(miri) { 64 } else { 2_500 };
    let every = if cfg!(miri) { 4 } else { 1 };
    for order in orders().into_iter().step_by(every.min(2)) {
        for (name, keys) in SHAPES.iter().step_by(every) {
            eprintln!("{order:?}: {name}");
            let mut model = Model::new(order.clone(), *keys);
            model.check(1, 0);
            for n in 0..count {
                // Two of three keys are new. Every third is a version of a key that may exist.
                let which = if n % 3 == 2 { model.random.below(n) } else { n };
                model.insert(which, n + 1);
                if n == 0 || n == 57 || n == 60 && !cfg!(miri) {
                    model.check(n + 1, n + 1);
                }
            }
            model.check(count, count);
            assert_eq!(model.table.len(), count);
            assert_eq!((model.table.smallest_seqno(), model.table.largest_seqno()), (SeqNo(1), SeqNo(count)));
        }
    }
}

#[test]
fn ascending_inserts_fill_leaves_of_high_tree() {
    if cfg!(miri) {
        return;
    }
    for (keys, ascending) in [(SHAPES[1].1, false), (SHAPES[2].1, true), (SHAPES[5].1, true)] {
        let table = Memtable::new(KeyOrder::bytewise(), 3);
        let count = 250_000;
        for n in 0..count {
            let user_key = keys(n);
            table
                .insert(EntryRef { user_key: &user_key, seqno: SeqNo(n + 1), kind: RecordKind::Put, value: b"v" })
                .unwrap();
        }
        assert!(table.tree().height() >= 2);
        assert!(table.tree().fill() > if ascending { 0.95 } else { 0.6 }, "{}", table.tree().fill());
        for n in (0..count).step_by(101) {
            let user_key = keys(n);
            assert_eq!(table.get(&user_key, table.hash_of(&user_key), SeqNo::MAX).unwrap().seqno, SeqNo(n + 1));
            assert_eq!(table.get(&user_key, None, SeqNo::MAX).unwrap().seqno, SeqNo(n + 1));
        }
    }
}

/// The records that the writer of the stress test inserts. Readers compute expected results from it. Record `n` has
/// sequence number `n + 1`.
struct WriteSchedule {
    users: Vec<Vec<u8>>,
    /// For each record the previous record of the same key.
    older: Vec<Option<usize>>,
    newest: BTreeMap<Vec<u8>, usize>,
}

impl WriteSchedule {
    fn new(count: u64, keys: Keys) -> WriteSchedule {
        let (mut users, mut older, mut newest) = (Vec::new(), Vec::new(), BTreeMap::new());
        for n in 0..count {
            let user_key = keys(if n % 4 == 3 { mixed(n) % n } else { n });
            older.push(newest.insert(user_key.clone(), n as usize));
            users.push(user_key);
        }
        WriteSchedule { users, older, newest }
    }

    /// Returns the number of the record that a get at `at` must return.
    fn expected(&self, user_key: &[u8], at: SeqNo) -> Option<usize> {
        let mut n = *self.newest.get(user_key)?;
        while n as u64 >= at.0 {
            n = self.older[n]?;
        }
        Some(n)
    }

    fn check_entry(&self, entry: EntryRef<'_>) {
        let n = entry.seqno.0 as usize - 1;
        assert_eq!(entry.user_key, self.users[n]);
        assert_eq!(entry.value, entry.seqno.0.to_le_bytes());
    }

    fn check_get(&self, table: &Memtable, random: &mut SeededRng, at: SeqNo) {
        let user_key = &self.users[random.below(self.users.len() as u64) as usize];
        let hash = if random.below(3) == 0 { None } else { table.hash_of(user_key) };
        let entry = table.get(user_key, hash, at);
        let expected = self.expected(user_key, at);
        assert_eq!(entry.map(|entry| entry.seqno.0 as usize - 1), expected, "{user_key:?} at {at} by {hash:?}");
        if let Some(entry) = entry {
            self.check_entry(entry);
        }
    }

    /// An iterator that is created at `at` returns each record up to `at` once and in order, in any part of the key
    /// range.
    fn check_iteration(&self, table: &Arc<Memtable>, random: &mut SeededRng, at: SeqNo) {
        let mut iter = table.iter();
        let whole = random.below(4) == 0;
        let forward = random.below(2) == 0;
        let start = InternalKey::before_versions_of(&self.users[random.below(self.users.len() as u64) as usize]);
        match (whole, forward) {
            (true, true) => iter.seek_to_first().unwrap(),
            (true, false) => iter.seek_to_last().unwrap(),
            (false, true) => iter.seek(start).unwrap(),
            (false, false) => iter.seek_before(start).unwrap(),
        }
        let mut returned = 0;
        let mut last: Option<(Vec<u8>, SeqNo)> = None;
        let mut end = None;
        for step in 0.. {
            if !iter.valid() || !whole && step == 500 {
                end = iter.valid().then(|| (iter.entry().user_key.to_vec(), iter.entry().seqno));
                break;
            }
            let entry = iter.entry();
            self.check_entry(entry);
            if let Some((user_key, seqno)) = &last {
                let order = InternalKey::new(user_key, *seqno).cmp(&entry.key(), &KeyOrder::bytewise());
                assert_eq!(order, if forward { Ordering::Less } else { Ordering::Greater });
            }
            last = Some((entry.user_key.to_vec(), entry.seqno));
            returned += usize::from(entry.seqno <= at);
            if forward { iter.next().unwrap() } else { iter.prev().unwrap() }
        }
        let position = |n: usize| (&self.users[n][..], Reverse(SeqNo(n as u64 + 1)));
        let start = (!whole).then_some((start.user_key, Reverse(SeqNo::MAX)));
        let end = end.as_ref().map(|(user_key, seqno)| (&user_key[..], Reverse(*seqno)));
        let within = |n: &usize| {
            let current = position(*n);
            if forward {
                start.is_none_or(|s| current >= s) && end.is_none_or(|e| current < e)
            } else {
                start.is_none_or(|s| current < s) && end.is_none_or(|e| current > e)
            }
        };
        assert_eq!(returned, (0..at.0 as usize).filter(within).count(), "forward {forward}, whole {whole}, at {at}");
    }
}

#[test]
fn readers_see_published_records_during_writes() {
    let count = if cfg!(miri) { 120 } else { 20_000 };
    for shape in if cfg!(miri) { &SHAPES[1..2] } else { &SHAPES[1..7] } {
        eprintln!("{}", shape.0);
        let plan = WriteSchedule::new(count, shape.1);
        let table = Arc::new(Memtable::new(KeyOrder::bytewise(), 7));
        let (visible, done) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|s| {
            for reader in 1..=3 {
                let (plan, table, visible, done) = (&plan, &table, &visible, &done);
                s.spawn(move || {
                    let mut random = SeededRng::new(reader * 7_919);
                    let mut last_round = false;
                    while !last_round {
                        last_round = done.load(std::sync::atomic::Ordering::Acquire);
                        for _ in 0..if cfg!(miri) { 3 } else { 50 } {
                            let at = SeqNo(visible.load(std::sync::atomic::Ordering::Acquire));
                            plan.check_get(table, &mut random, at);
                        }
                        let at = SeqNo(visible.load(std::sync::atomic::Ordering::Acquire));
                        plan.check_iteration(table, &mut random, at);
                    }
                });
            }
            for n in 0..count {
                let value = (n + 1).to_le_bytes();
                let user_key = &plan.users[n as usize];
                let entry = EntryRef { user_key, seqno: SeqNo(n + 1), kind: RecordKind::Put, value: &value };
                table.insert(entry).unwrap();
                visible.store(n + 1, std::sync::atomic::Ordering::Release);
            }
            done.store(true, std::sync::atomic::Ordering::Release);
        });
    }
}

/// Runs of any length and of all key patterns give the same memtable as single insertions, also when a run ends with a
/// refused record.
#[test]
fn runs_insert_what_single_insertions_do() {
    let count = if cfg!(miri) { 80 } else { 3_000 };
    for order in orders() {
        for (name, keys) in SHAPES {
            eprintln!("{name}");
            let (single, runs) = (Arc::new(Memtable::new(order.clone(), 7)), Arc::new(Memtable::new(order.clone(), 7)));
            let users: Vec<Vec<u8>> = (0..count).map(keys).collect();
            let entry =
                |n: u64, kind| EntryRef { user_key: &users[n as usize], seqno: SeqNo(n + 1), kind, value: b"v" };
            let entries: Vec<_> = (0..count).map(|n| entry(n, RecordKind::Put)).collect();
            let mut random = SeededRng::new(11);
            let mut rest = &entries[..];
            while !rest.is_empty() {
                let (run, others) = rest.split_at(rest.len().min(random.below(70)));
                let due = run.len().min(random.below(200));
                let due_len = runs.len() + due as u64;
                let (added, result) = runs.insert_run(run, || runs.len() == due_len);
                assert_eq!((added, result.is_ok()), (if due > 0 { due } else { run.len() }, true));
                let refused = entry(0, RecordKind::RangeDelete);
                let last = &run[added..];
                let with_refused: Vec<_> = last.iter().copied().chain([refused]).collect();
                let (added, result) = runs.insert_run(&with_refused, || false);
                assert_eq!((added, result.is_err()), (last.len(), true));
                rest = others;
            }
            entries.iter().for_each(|entry| single.insert(*entry).unwrap());
            assert_eq!((runs.len(), runs.superseded()), (single.len(), single.superseded()));
            let (mut expected, mut found) = (single.iter(), runs.iter());
            expected.seek_to_first().unwrap();
            found.seek_to_first().unwrap();
            while let Some((key, kind)) = expected.head() {
                assert_eq!(found.head(), Some((key, kind)));
                assert!(runs.get(key.user_key, runs.hash_of(key.user_key), key.seqno).is_some());
                expected.next().unwrap();
                found.next().unwrap();
            }
            assert!(found.head().is_none());
        }
    }
}
