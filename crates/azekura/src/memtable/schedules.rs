//! The memtable's readers beside its writer, under every schedule that the explorer can think of.
//!
//! Where schedules are explored nodes, segments and directories are small (see the constants), and patience is short:
//! the few records of a scenario split all of them, and readers come to the slow ways as well.

use std::sync::Arc;

use crate::base::{EntryRef, KeyOrder, RecordKind, SeqNo};
use crate::iter::InternalIter;
use crate::mem::atomic::{AtomicU64, Ordering};
use crate::mem::explorer::{explore, spawn};
use crate::memtable::Memtable;

/// A memtable, and how much of it everybody may rely on: all records up to that sequence number.
struct SharedMemtable {
    table: Arc<Memtable>,
    visible: AtomicU64,
}

impl SharedMemtable {
    fn new() -> Arc<SharedMemtable> {
        Arc::new(SharedMemtable { table: Arc::new(Memtable::new(KeyOrder::bytewise(), 7)), visible: AtomicU64::new(0) })
    }

    /// Inserts `keys`, one record each.
    fn insert(&self, keys: impl IntoIterator<Item = u8>) {
        for key in keys {
            let seqno = self.visible.load(Ordering::Relaxed) + 1;
            let entry = EntryRef { user_key: &[key], seqno: SeqNo(seqno), kind: RecordKind::Put, value: &[key; 3] };
            self.table.insert(entry).unwrap();
            self.visible.store(seqno, Ordering::Release);
        }
    }

    /// What is visible at a moment, of a writer that inserts `keys` in this order.
    fn now(&self, keys: &[u8]) -> Vec<(u8, u64)> {
        let visible = self.visible.load(Ordering::Acquire);
        keys[..visible as usize].iter().copied().zip(1..).collect()
    }

    /// Each of the keys `wanted` is found, by both indexes, with the version of now.
    fn get(&self, keys: &[u8], wanted: &[u8]) {
        for key in wanted {
            let there = self.now(keys);
            let at = SeqNo(there.len() as u64);
            let newest = there.iter().rev().find(|(k, _)| k == key).map(|(_, seqno)| SeqNo(*seqno));
            for hash in [self.table.hash_of(&[*key]), None] {
                let found = self.table.get(&[*key], hash, at);
                assert_eq!(found.map(|entry| entry.seqno), newest, "key {key} at {at:?} by {hash:?}");
                assert!(found.is_none_or(|entry| entry.user_key == [*key] && entry.value == [*key; 3]));
            }
        }
    }

    /// A walk meets in order, once each, what was there when it began.
    fn walk(&self, keys: &[u8], backward: bool) {
        let there = self.now(keys);
        let mut cursor = self.table.iter();
        if backward { cursor.seek_to_last() } else { cursor.seek_to_first() }.unwrap();
        let mut met = Vec::new();
        while cursor.valid() {
            let entry = cursor.entry();
            met.push((entry.user_key[0], entry.seqno.0));
            if backward { cursor.prev() } else { cursor.next() }.unwrap();
        }
        if backward {
            met.reverse();
        }
        let order = |(key, seqno): &(u8, u64)| (*key, u64::MAX - seqno);
        assert!(met.is_sorted_by(|a, b| order(a) < order(b)), "not in order, or twice: {met:?}");
        assert!(there.iter().all(|entry| met.contains(entry)), "{there:?} was there, {met:?} was met");
        assert!(met.iter().all(|(key, seqno)| keys[*seqno as usize - 1] == *key), "{met:?} was never written");
    }
}

/// The first `before` of `keys` are in when the readers begin.
fn race(keys: &'static [u8], before: usize, readers: &'static [fn(&SharedMemtable, &'static [u8])]) {
    let shared = SharedMemtable::new();
    shared.insert(keys[..before].iter().copied());
    let threads: Vec<_> = readers
        .iter()
        .map(|reader| {
            let shared = Arc::clone(&shared);
            spawn(move || reader(&shared, keys))
        })
        .collect();
    shared.insert(keys[before..].iter().copied());
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    readers.iter().for_each(|reader| reader(&shared, keys));
}

/// Leaves split, and with the seventh key the directory of the hash index doubles and its segment splits.
const SPLITTING: &[u8] = &[50, 20, 80, 60, 10, 70, 30, 90, 40, 65];

#[test]
fn published_records_are_found_during_splits() {
    explore(|| {
        race(
            SPLITTING,
            6,
            &[|shared, keys| shared.get(keys, &[60, 80, 90]), |shared, keys| shared.get(keys, &[50, 10, 99])],
        );
    });
}

#[test]
fn iteration_is_complete_while_leaves_split() {
    explore(|| race(SPLITTING, 4, &[|shared, keys| shared.walk(keys, false), |shared, keys| shared.walk(keys, true)]));
}

/// Ten versions of two keys: chains, and the newest record's place in the hash index.
#[test]
fn every_version_is_found_during_overwrites() {
    const VERSIONS: &[u8] = &[5, 5, 9, 5, 9, 5, 5, 9, 9, 5];
    explore(|| {
        race(
            VERSIONS,
            2,
            &[
                |shared, keys| shared.get(keys, &[5, 9, 5]),
                |shared, keys| {
                    shared.get(keys, &[9]);
                    shared.walk(keys, false);
                },
            ],
        );
    });
}

/// Enough records that inner nodes split and the tree grows a level during reads.
#[test]
fn no_key_is_missed_while_tree_grows() {
    const GROWING: &[u8] = &[
        100, 104, 108, 112, 116, 120, 124, 128, 132, 136, 102, 106, 110, 114, 118, 122, 126, 130, 134, 101, 105, 109,
        113, 117, 121, 125,
    ];
    explore(|| {
        race(
            GROWING,
            19,
            &[
                |shared, keys| shared.get(keys, &[136, 121, 100]),
                |shared, keys| {
                    shared.get(keys, &[118]);
                    shared.walk(keys, true);
                },
            ],
        );
    });
}
