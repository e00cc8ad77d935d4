//! The memtable against a model, and with a writer and readers at once.

use std::cmp::{Ordering, Reverse};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use crate::base::comparator::Comparator;
use crate::base::{EntryRef, InternalKey, KeyOrder, RecordKind, SeqNo};
use crate::iter::InternalIter;
use crate::memtable::Memtable;
use crate::memtable::iter::MemtableIter;

struct Reversed;

impl Comparator for Reversed {
    fn name(&self) -> &str {
        "reversed"
    }
    fn compare(&self, a: &[u8], b: &[u8]) -> Ordering {
        b.cmp(a)
    }
    fn can_keys_with_different_byte_contents_be_equal(&self) -> bool {
        false
    }
}

/// Upper and lower case are the same; says the common form only if asked to.
struct CaseBlind {
    canonical: bool,
}

impl Comparator for CaseBlind {
    fn name(&self) -> &str {
        "case-blind"
    }
    fn compare(&self, a: &[u8], b: &[u8]) -> Ordering {
        a.to_ascii_lowercase().cmp(&b.to_ascii_lowercase())
    }
    fn canonical(&self, key: &[u8], out: &mut Vec<u8>) -> bool {
        out.extend(key.iter().map(u8::to_ascii_lowercase));
        self.canonical
    }
}

fn orders() -> Vec<KeyOrder> {
    vec![
        KeyOrder::bytewise(),
        KeyOrder::custom(Arc::new(Reversed)),
        KeyOrder::custom(Arc::new(CaseBlind { canonical: false })),
        KeyOrder::custom(Arc::new(CaseBlind { canonical: true })),
    ]
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 11) % n
    }
}

/// Keys of one shape: `n` says which, out of `0..`.
type Keys = fn(u64) -> Vec<u8>;

fn mixed(n: u64) -> u64 {
    n.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

const SHAPES: &[(&str, Keys)] = &[
    ("few letters, many beginnings of others", |n| {
        let n = mixed(n);
        (0..n % 7).map(|i| b"aAb\0"[(n >> (8 + 2 * i)) as usize % 4]).collect()
    }),
    ("random", |n| [mixed(n), mixed(!n)].iter().flat_map(|word| word.to_be_bytes()).collect()),
    ("ascending", |n| n.to_be_bytes().to_vec()),
    ("descending", |n| (!n).to_be_bytes().to_vec()),
    ("decimal", |n| format!("{:016}", mixed(n) % 100_000).into_bytes()),
    ("runs side by side", |n| format!("Run{:02}/{:06}", n % 5, n / 5).into_bytes()),
    ("long common beginning", |n| format!("{}{:08}", "/a/long/path".repeat(5), mixed(n) % 50_000).into_bytes()),
    ("all lengths", |n| vec![b'x'; (mixed(n) % 300) as usize]),
];

struct ModelKey {
    user: Vec<u8>,
    seqno: SeqNo,
    order: KeyOrder,
}

impl Ord for ModelKey {
    fn cmp(&self, other: &ModelKey) -> Ordering {
        self.order.cmp(&self.user, &other.user).then(Reverse(self.seqno).cmp(&Reverse(other.seqno)))
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
    random: Random,
    keys: Keys,
}

impl Model {
    fn new(order: KeyOrder, keys: Keys) -> Model {
        let table = Arc::new(Memtable::new(order.clone(), 42));
        Model { order, entries: BTreeMap::new(), table, random: Random(88_172_645_463_325_252), keys }
    }

    fn key(&self, user: &[u8], seqno: SeqNo) -> ModelKey {
        ModelKey { user: user.to_vec(), seqno, order: self.order.clone() }
    }

    fn insert(&mut self, n: u64, seqno: u64) {
        let user = (self.keys)(n);
        let kind = if self.random.below(5) == 0 { RecordKind::Delete } else { RecordKind::Put };
        let value = if kind.is_tombstone() { Vec::new() } else { vec![seqno as u8; self.random.below(40) as usize] };
        self.table.insert(EntryRef { user_key: &user, seqno: SeqNo(seqno), kind, value: &value }).unwrap();
        self.entries.insert(self.key(&user, SeqNo(seqno)), (kind, value));
    }

    /// The first entry at or behind `target`, or the last one before it.
    fn at_or_behind(&self, target: &ModelKey) -> Option<(&ModelKey, &(RecordKind, Vec<u8>))> {
        self.entries.range(target..).next()
    }

    fn before(&self, target: &ModelKey) -> Option<(&ModelKey, &(RecordKind, Vec<u8>))> {
        self.entries.range(..target).next_back()
    }

    /// A key that may be in, or lie beside one that is, or anywhere.
    fn some_key(&mut self, keys: u64) -> Vec<u8> {
        let n = self.random.below(keys + keys / 4 + 1);
        let mut user = (self.keys)(n);
        match self.random.below(6) {
            0 => user.push(0),
            1 => user.truncate(user.len() / 2),
            2 => user.make_ascii_uppercase(),
            _ => {}
        }
        user
    }

    fn check_gets(&mut self, keys: u64, highest: u64) {
        for _ in 0..if cfg!(miri) { 20 } else { 300 } {
            let user = self.some_key(keys);
            let at = SeqNo(self.random.below(highest + 2));
            let target = self.key(&user, at);
            let expected = self.at_or_behind(&target).filter(|(key, _)| self.order.cmp(&key.user, &user).is_eq());
            let expected = expected.map(|(key, (kind, value))| (&key.user[..], key.seqno, *kind, &value[..]));
            for hash in [self.table.hash_of(&user), None] {
                let got = self.table.get(&user, hash, at).map(|e| (e.user_key, e.seqno, e.kind, e.value));
                assert_eq!(got, expected, "{user:?} at {at}, hash {hash:?}");
            }
        }
    }

    fn check_at(&self, cursor: &MemtableIter, expected: Option<(&ModelKey, &(RecordKind, Vec<u8>))>) {
        let entry = cursor.valid().then(|| cursor.entry());
        let entry = entry.map(|e| (e.user_key, e.seqno, e.kind, e.value));
        assert_eq!(entry, expected.map(|(key, (kind, value))| (&key.user[..], key.seqno, *kind, &value[..])));
    }

    fn check_walks(&mut self, keys: u64, highest: u64) {
        let mut cursor = self.table.iter();
        assert!(!cursor.valid());
        cursor.seek_to_first().unwrap();
        for expected in &self.entries {
            self.check_at(&cursor, Some(expected));
            cursor.next().unwrap();
        }
        self.check_at(&cursor, None);
        cursor.seek_to_last().unwrap();
        for expected in self.entries.iter().rev() {
            self.check_at(&cursor, Some(expected));
            cursor.prev().unwrap();
        }
        self.check_at(&cursor, None);
        for _ in 0..if cfg!(miri) { 10 } else { 200 } {
            let user = self.some_key(keys);
            let seqno = if self.random.below(3) == 0 { SeqNo::MAX } else { SeqNo(self.random.below(highest + 2)) };
            let target = self.key(&user, seqno);
            let behind = self.random.below(2) == 0;
            let start = if behind { self.at_or_behind(&target) } else { self.before(&target) };
            if behind {
                cursor.seek(InternalKey::new(&user, seqno)).unwrap();
            } else {
                cursor.seek_before(InternalKey::new(&user, seqno)).unwrap();
            }
            let mut here = start.map(|(key, value)| (self.key(&key.user, key.seqno), value.clone()));
            for _ in 0..self.random.below(if cfg!(miri) { 15 } else { 100 }) {
                self.check_at(&cursor, here.as_ref().map(|(key, value)| (key, value)));
                let Some((key, _)) = &here else { break };
                let next = if self.random.below(5) < 3 {
                    cursor.next().unwrap();
                    self.entries.range((std::ops::Bound::Excluded(key), std::ops::Bound::Unbounded)).next()
                } else {
                    cursor.prev().unwrap();
                    self.before(key)
                };
                here = next.map(|(key, value)| (self.key(&key.user, key.seqno), value.clone()));
            }
        }
    }

    /// Everything once as readers normally see it and once as if the writer were stopped in the middle of all nodes.
    fn check(&mut self, keys: u64, highest: u64) {
        for _ in 0..2 {
            self.check_gets(keys, highest);
            self.check_walks(keys, highest);
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
                // Most keys are new, every third is a version of one that may be there.
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
            let user = keys(n);
            table
                .insert(EntryRef { user_key: &user, seqno: SeqNo(n + 1), kind: RecordKind::Put, value: b"v" })
                .unwrap();
        }
        assert!(table.tree().height() >= 2);
        assert!(table.tree().fill() > if ascending { 0.95 } else { 0.6 }, "{}", table.tree().fill());
        for n in (0..count).step_by(101) {
            let user = keys(n);
            assert_eq!(table.get(&user, table.hash_of(&user), SeqNo::MAX).unwrap().seqno, SeqNo(n + 1));
            assert_eq!(table.get(&user, None, SeqNo::MAX).unwrap().seqno, SeqNo(n + 1));
        }
    }
}

/// What the writer of the stress test inserts, known to its readers: record `n` has sequence number `n + 1`.
struct WriteSchedule {
    users: Vec<Vec<u8>>,
    /// For each record that of the same key before it.
    older: Vec<Option<usize>>,
    newest: BTreeMap<Vec<u8>, usize>,
}

impl WriteSchedule {
    fn new(count: u64, keys: Keys) -> WriteSchedule {
        let (mut users, mut older, mut newest) = (Vec::new(), Vec::new(), BTreeMap::new());
        for n in 0..count {
            let user = keys(if n % 4 == 3 { mixed(n) % n } else { n });
            older.push(newest.insert(user.clone(), n as usize));
            users.push(user);
        }
        WriteSchedule { users, older, newest }
    }

    /// The number of the record that a get at `at` must give.
    fn expected(&self, user: &[u8], at: SeqNo) -> Option<usize> {
        let mut n = *self.newest.get(user)?;
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

    fn check_get(&self, table: &Memtable, random: &mut Random, at: SeqNo) {
        let user = &self.users[random.below(self.users.len() as u64) as usize];
        let hash = if random.below(3) == 0 { None } else { table.hash_of(user) };
        let entry = table.get(user, hash, at);
        let expected = self.expected(user, at);
        assert_eq!(entry.map(|entry| entry.seqno.0 as usize - 1), expected, "{user:?} at {at} by {hash:?}");
        if let Some(entry) = entry {
            self.check_entry(entry);
        }
    }

    /// A cursor made at `at` meets each record up to there once, in order, on any stretch of the way.
    fn check_walk(&self, table: &Arc<Memtable>, random: &mut Random, at: SeqNo) {
        let mut cursor = table.iter();
        let whole = random.below(4) == 0;
        let forward = random.below(2) == 0;
        let start = InternalKey::before_versions_of(&self.users[random.below(self.users.len() as u64) as usize]);
        match (whole, forward) {
            (true, true) => cursor.seek_to_first().unwrap(),
            (true, false) => cursor.seek_to_last().unwrap(),
            (false, true) => cursor.seek(start).unwrap(),
            (false, false) => cursor.seek_before(start).unwrap(),
        }
        let mut met = 0;
        let mut last: Option<(Vec<u8>, SeqNo)> = None;
        let mut end = None;
        for step in 0.. {
            if !cursor.valid() || !whole && step == 500 {
                end = cursor.valid().then(|| (cursor.entry().user_key.to_vec(), cursor.entry().seqno));
                break;
            }
            let entry = cursor.entry();
            self.check_entry(entry);
            if let Some((user, seqno)) = &last {
                let order = InternalKey::new(user, *seqno).cmp(&entry.key(), &KeyOrder::bytewise());
                assert_eq!(order, if forward { Ordering::Less } else { Ordering::Greater });
            }
            last = Some((entry.user_key.to_vec(), entry.seqno));
            met += usize::from(entry.seqno <= at);
            if forward { cursor.next().unwrap() } else { cursor.prev().unwrap() }
        }
        let position = |n: usize| (&self.users[n][..], Reverse(SeqNo(n as u64 + 1)));
        let start = (!whole).then_some((start.user_key, Reverse(SeqNo::MAX)));
        let end = end.as_ref().map(|(user, seqno)| (&user[..], Reverse(*seqno)));
        let within = |n: &usize| {
            let here = position(*n);
            if forward {
                start.is_none_or(|s| here >= s) && end.is_none_or(|e| here < e)
            } else {
                start.is_none_or(|s| here < s) && end.is_none_or(|e| here > e)
            }
        };
        assert_eq!(met, (0..at.0 as usize).filter(within).count(), "forward {forward}, whole {whole}, at {at}");
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
                    let mut random = Random(reader * 7_919);
                    let mut last_round = false;
                    while !last_round {
                        last_round = done.load(std::sync::atomic::Ordering::Acquire);
                        for _ in 0..if cfg!(miri) { 3 } else { 50 } {
                            let at = SeqNo(visible.load(std::sync::atomic::Ordering::Acquire));
                            plan.check_get(table, &mut random, at);
                        }
                        let at = SeqNo(visible.load(std::sync::atomic::Ordering::Acquire));
                        plan.check_walk(table, &mut random, at);
                    }
                });
            }
            for n in 0..count {
                let value = (n + 1).to_le_bytes();
                let user = &plan.users[n as usize];
                let entry = EntryRef { user_key: user, seqno: SeqNo(n + 1), kind: RecordKind::Put, value: &value };
                table.insert(entry).unwrap();
                visible.store(n + 1, std::sync::atomic::Ordering::Release);
            }
            done.store(true, std::sync::atomic::Ordering::Release);
        });
    }
}
