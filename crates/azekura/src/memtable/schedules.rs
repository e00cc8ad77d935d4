//! Readers of a memtable and its writer under explored thread schedules.
//!
//! In schedule exploration nodes, segments, directories and retry limits are small (see the constants), so that the
//! few records of a scenario split all of them and readers also use the slow paths.

use std::ops::Bound;
use std::sync::Arc;

use crate::base::{EntryRef, KeyOrder, RecordKind, SeqNo};
use crate::iter::InternalIter;
use crate::mem::atomic::{AtomicU64, Ordering};
use crate::mem::explorer::{explore, spawn};
use crate::memtable::Memtable;

/// A memtable and its last visible sequence number: readers rely on all records up to that number.
struct SharedMemtable {
    table: Arc<Memtable>,
    visible: AtomicU64,
}

impl SharedMemtable {
    fn new() -> Arc<SharedMemtable> {
        Arc::new(SharedMemtable { table: Arc::new(Memtable::new(KeyOrder::bytewise(), 7)), visible: AtomicU64::new(0) })
    }

    /// Inserts one record for each of `keys`.
    fn insert(&self, keys: impl IntoIterator<Item = u8>) {
        for key in keys {
            let seqno = self.visible.load(Ordering::Relaxed) + 1;
            let entry = EntryRef { user_key: &[key], seqno: SeqNo(seqno), kind: RecordKind::Put, value: &[key; 3] };
            self.table.insert(entry).unwrap();
            self.visible.store(seqno, Ordering::Release);
        }
    }

    /// Returns the records that are visible now, as (key, sequence number), of a writer that inserts `keys` in this
    /// order.
    fn visible_records(&self, keys: &[u8]) -> Vec<(u8, u64)> {
        let visible = self.visible.load(Ordering::Acquire);
        keys[..visible as usize].iter().copied().zip(1..).collect()
    }

    /// Looks up each key of `wanted` through both indexes and compares the result with the newest visible version.
    fn check_gets(&self, keys: &[u8], wanted: &[u8]) {
        for key in wanted {
            let visible = self.visible_records(keys);
            let at = SeqNo(visible.len() as u64);
            let newest = visible.iter().rev().find(|(k, _)| k == key).map(|(_, seqno)| SeqNo(*seqno));
            for hash in [self.table.hash_of(&[*key]), None] {
                let found = self.table.get(&[*key], hash, at);
                assert_eq!(found.map(|entry| entry.seqno), newest, "key {key} at {at:?} by {hash:?}");
                assert!(found.is_none_or(|entry| entry.user_key == [*key] && entry.value == [*key; 3]));
            }
        }
    }

    /// Iterates over the memtable. The entries must be in order, without duplicates, and include all records that
    /// were visible at the start.
    fn check_iteration(&self, keys: &[u8], backward: bool) {
        let visible = self.visible_records(keys);
        let mut iter = self.table.iter();
        if backward { iter.seek_to_last() } else { iter.seek_to_first() }.unwrap();
        let mut returned = Vec::new();
        while iter.valid() {
            let entry = iter.entry();
            returned.push((entry.user_key[0], entry.seqno.0));
            if backward { iter.prev() } else { iter.next() }.unwrap();
        }
        if backward {
            returned.reverse();
        }
        let order = |(key, seqno): &(u8, u64)| (*key, u64::MAX - seqno);
        assert!(returned.is_sorted_by(|a, b| order(a) < order(b)), "not in order, or with duplicates: {returned:?}");
        assert!(
            visible.iter().all(|entry| returned.contains(entry)),
            "{visible:?} was visible, {returned:?} was returned"
        );
        assert!(
            returned.iter().all(|(key, seqno)| keys[*seqno as usize - 1] == *key),
            "{returned:?} contains records that were never written"
        );
    }
}

impl SharedMemtable {
    /// Looks for each key of `wanted` among the last records, for each earlier snapshot. A record that is visible must
    /// not be missed.
    fn check_recent(&self, keys: &[u8], wanted: &[u8]) {
        for key in wanted {
            for since in 0..3 {
                let visible = self.visible_records(keys);
                let since = (visible.len() as u64).saturating_sub(since);
                let exists = visible.iter().any(|(k, seqno)| k == key && *seqno > since);
                let bound = vec![*key];
                match self.table.find_recent_key((Bound::Included(&bound), Bound::Included(&bound)), SeqNo(since)) {
                    Some(Some(found)) => assert_eq!(found, bound),
                    Some(None) => assert!(!exists, "key {key} above {since} was missed, {visible:?} was visible"),
                    None => {}
                }
            }
        }
    }
}

/// Inserts the first `before` of `keys`, starts the readers, and inserts the other keys meanwhile.
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

/// These keys split leaves. The seventh key doubles the directory of the hash index and splits its segment.
const SPLITTING: &[u8] = &[50, 20, 80, 60, 10, 70, 30, 90, 40, 65];

#[test]
fn published_records_are_found_during_splits() {
    explore(|| {
        race(
            SPLITTING,
            6,
            &[
                |shared, keys| shared.check_gets(keys, &[60, 80, 90]),
                |shared, keys| shared.check_gets(keys, &[50, 10, 99]),
            ],
        );
    });
}

#[test]
fn iteration_is_complete_while_leaves_split() {
    explore(|| {
        race(
            SPLITTING,
            4,
            &[|shared, keys| shared.check_iteration(keys, false), |shared, keys| shared.check_iteration(keys, true)],
        )
    });
}

/// Ten versions of two keys: version chains, and overwritten references in the hash index.
#[test]
fn every_version_is_found_during_overwrites() {
    const VERSIONS: &[u8] = &[5, 5, 9, 5, 9, 5, 5, 9, 9, 5];
    explore(|| {
        race(
            VERSIONS,
            2,
            &[
                |shared, keys| shared.check_gets(keys, &[5, 9, 5]),
                |shared, keys| {
                    shared.check_gets(keys, &[9]);
                    shared.check_iteration(keys, false);
                },
            ],
        );
    });
}

/// Enough records to split inner nodes and to add a level to the tree during reads.
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
                |shared, keys| shared.check_gets(keys, &[136, 121, 100]),
                |shared, keys| {
                    shared.check_gets(keys, &[118]);
                    shared.check_iteration(keys, true);
                },
            ],
        );
    });
}

/// More records than are remembered, so that a reader may see a reference that has replaced an older one.
#[test]
fn recent_records_are_not_missed() {
    explore(|| {
        race(
            SPLITTING,
            2,
            &[
                |shared, keys| shared.check_recent(keys, &[80, 60, 10, 65]),
                |shared, keys| shared.check_recent(keys, &[20, 30]),
            ],
        );
    });
}
