//! Readers and writers of the tree, under every schedule of the explorer.
//!
//! Leaves have three records, there are two leaf locks, and buffers are reused as soon as possible. So a few changes
//! split, merge and unlink leaves, and overwrite slots and records. The expected state after each change is known, so
//! a reader can check that everything it reads existed together at one time.
//!
//! The scenarios at the end skip one of the steps that readers or writers rely on. The checks must fail then.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::fixture::{PoolFixture, range_record};
use super::model::{new_fixture, options};
use crate::base::{EntryRef, RecordKind, SeqNo};
use crate::iter::InternalIter;
use crate::mem::atomic::Mutex;
use crate::mem::explorer::{explore, spawn};
use crate::mem::pages::PAGE;
use crate::pmem::persistence::PoolImage;
use crate::pmem::tree::TreeStep;

/// A put or a removal of a key, or of the keys from one up to another.
#[derive(Clone, Copy)]
enum ScheduledChange {
    Put(u8),
    Remove(u8),
    RemoveRange(u8, u8),
}
use ScheduledChange::{Put, Remove, RemoveRange};

/// A tree, and all changes that are made to it. The change at index `n` has the sequence number `n + 1`.
struct ScheduleFixture {
    fixture: PoolFixture<PoolImage>,
    changes: &'static [ScheduledChange],
    done: Mutex<Vec<u64>>,
}

/// A value that identifies the change, too long to be stored inline in a `Slice`.
fn value(key: u8, seqno: u64) -> Vec<u8> {
    [key, seqno as u8].repeat(20)
}

impl ScheduleFixture {
    /// A fixture to which the first `before` changes were applied.
    fn new(changes: &'static [ScheduledChange], before: usize, without: Option<TreeStep>) -> Arc<ScheduleFixture> {
        let fixture = new_fixture(&options(16 * PAGE, 4));
        let shared = ScheduleFixture { fixture, changes, done: Mutex::new(Vec::new()) };
        (1..=before as u64).for_each(|seqno| shared.apply_change(seqno));
        shared.fixture.tree.skip_step(without);
        Arc::new(shared)
    }

    /// Applies the change of `seqno`. It becomes visible once all changes before it are applied.
    fn apply_change(&self, seqno: u64) {
        match self.changes[seqno as usize - 1] {
            Put(key) => self.fixture.tree.put(&[key], SeqNo(seqno), &value(key, seqno)).unwrap(),
            Remove(key) => assert!(self.fixture.tree.remove(&[key], SeqNo(seqno)).unwrap(), "{key} did not exist"),
            RemoveRange(low, high) => {
                let (key, value) = range_record(&[low], &[high]);
                let entry =
                    EntryRef { user_key: &key, seqno: SeqNo(seqno), kind: RecordKind::RangeDelete, value: &value };
                self.fixture.tree.add_range_delete(entry).unwrap();
            }
        }
        let mut done = self.done.lock().unwrap();
        done.push(seqno);
        while done.contains(&(self.visible() + 1)) {
            self.fixture.visible.publish(SeqNo(self.visible() + 1));
        }
        drop(done);
        self.fixture.tree.remove_covered(SeqNo(seqno)).unwrap();
    }

    fn visible(&self) -> u64 {
        self.fixture.visible.get().0
    }

    /// The expected content at a sequence number: for each key, the change that put it.
    fn contents_at(&self, point: u64) -> BTreeMap<u8, u64> {
        let mut there = BTreeMap::new();
        for (change, seqno) in self.changes[..point as usize].iter().zip(1..) {
            match change {
                Put(key) => drop(there.insert(*key, seqno)),
                Remove(key) => drop(there.remove(key)),
                RemoveRange(low, high) => there.retain(|key, _| key < low || key >= high),
            }
        }
        there
    }

    fn check_get(&self, key: u8) {
        let from = self.visible();
        let found = self.fixture.tree.get(&[key]).unwrap();
        let to = self.visible();
        let right =
            |point| found.as_deref() == self.contents_at(point).get(&key).map(|seqno| value(key, *seqno)).as_deref();
        assert!((from..=to).any(right), "key {key} had {found:?} at no sequence number from {from} to {to}");
    }

    /// Checks that one sequence number shows the same state to forward iteration, backward iteration and gets.
    fn check_scan(&self) {
        let pin = self.fixture.snapshots.register();
        let point = pin.seqno();
        let there: Vec<_> =
            self.contents_at(point.0).into_iter().map(|(key, seqno)| (vec![key], value(key, seqno))).collect();
        let mut iter = self.fixture.tree.iter(point);
        let (mut up, mut down) = (Vec::new(), Vec::new());
        iter.seek_to_first().unwrap();
        while let Some(entry) = iter.current() {
            up.push((entry.user_key.to_vec(), entry.value.to_vec()));
            iter.next().unwrap();
        }
        assert_eq!(up, there, "forward iteration at {:?}", point);
        iter.seek_to_last().unwrap();
        while let Some(entry) = iter.current() {
            down.push((entry.user_key.to_vec(), entry.value.to_vec()));
            iter.prev().unwrap();
        }
        down.reverse();
        assert_eq!(down, there, "backward iteration at {:?}", point);
        for (key, value) in there {
            assert_eq!(self.fixture.tree.get_at(&key, point).unwrap().as_deref(), Some(value.as_slice()));
        }
    }

    /// Checks the final state, once all changes are applied and all readers have ended.
    fn check_final_state(&self) {
        assert_eq!(self.visible(), self.changes.len() as u64);
        self.check_scan();
        self.fixture.check_invariants();
        // The step before dropped all versions, so only the leaves contain records now.
        self.check_scan();
    }
}

type ScheduledReader = fn(&ScheduleFixture);

const GET_20: ScheduledReader = |shared| (0..4).for_each(|_| shared.check_get(20));

/// Runs readers concurrently with writers. Each writer applies the changes of its own sequence numbers.
fn race(shared: &Arc<ScheduleFixture>, readers: &'static [ScheduledReader], writers: &'static [&'static [u64]]) {
    let (first, others) = writers.split_first().expect("there is a writer");
    let read = readers.iter().map(|read| {
        let shared = Arc::clone(shared);
        spawn(move || read(&shared))
    });
    let read: Vec<_> = read.collect();
    let write = others.iter().map(|own| {
        let shared = Arc::clone(shared);
        spawn(move || own.iter().for_each(|seqno| shared.apply_change(*seqno)))
    });
    let write: Vec<_> = write.collect();
    first.iter().for_each(|seqno| shared.apply_change(*seqno));
    read.into_iter().chain(write).for_each(|thread| thread.join().unwrap());
    shared.check_final_state();
}

/// The leaf is split twice. The key that readers look up is once on the left and once on the right side.
const SPLITS: &[ScheduledChange] = &[Put(10), Put(20), Put(30), Put(15), Put(25), Put(12)];

#[test]
fn read_while_leaf_splits() {
    explore(|| {
        let shared = ScheduleFixture::new(SPLITS, 3, None);
        race(
            &shared,
            &[|shared| [30, 10, 15].into_iter().for_each(|key| shared.check_get(key)), ScheduleFixture::check_scan],
            &[&[4, 5, 6]],
        );
    });
}

/// A record is replaced. Its old slot is overwritten by another key, which is then removed.
const REPLACES: &[ScheduledChange] = &[Put(10), Put(20), Put(20), Put(15), Remove(15), Put(20), Put(10)];

#[test]
fn read_while_record_is_replaced() {
    explore(|| {
        let shared = ScheduleFixture::new(REPLACES, 2, None);
        const GET: ScheduledReader = |shared| [20, 15, 20].into_iter().for_each(|key| shared.check_get(key));
        race(&shared, &[GET, ScheduleFixture::check_scan], &[&[3, 4, 5, 6, 7]]);
    });
}

/// A record is replaced. Another key takes its old slot, then its space, once no version is needed any more.
const REUSES: &[ScheduledChange] = &[
    Put(20),
    Put(20),
    Put(15),
    Put(15),
    Put(15),
    Put(20),
    Put(15),
    Put(15),
    Put(15),
    Put(15),
    Put(20),
    Put(15),
    Put(15),
];

#[test]
fn read_while_space_is_reused() {
    explore(|| {
        let shared = ScheduleFixture::new(REUSES, 1, None);
        race(&shared, &[GET_20, ScheduleFixture::check_scan], &[&[2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]);
    });
}

/// A scan at the first change finds slots of newer records. These are replaced, and their space is reused.
const NEWER: &[ScheduledChange] = &[Put(10), Put(20), Put(20), Put(20), Put(15), Put(20), Put(15), Put(20)];

#[test]
fn scan_while_newer_records_are_reused() {
    explore(|| {
        let shared = ScheduleFixture::new(NEWER, 1, None);
        race(&shared, &[ScheduleFixture::check_scan, ScheduleFixture::check_scan], &[&[2, 3, 4, 5, 6, 7, 8]]);
    });
}

/// Two keys exchange their slots, so that the order of the slots is reversed.
const SWAPS: &[ScheduledChange] = &[Put(10), Put(20), Put(20), Put(10), Put(20)];

#[test]
fn scan_while_slot_order_changes() {
    explore(|| {
        let shared = ScheduleFixture::new(SWAPS, 2, None);
        race(&shared, &[ScheduleFixture::check_scan, ScheduleFixture::check_scan], &[&[3, 4, 5]]);
    });
}

/// Of three leaves, two are merged, the remaining one is unlinked, and the freed leaves are used again.
const MERGES: &[ScheduledChange] = &[
    Put(10),
    Put(20),
    Put(30),
    Put(40),
    Put(50),
    Put(60),
    Put(70),
    Remove(40),
    Remove(50),
    Remove(60),
    Remove(70),
    Put(45),
    Put(35),
];

#[test]
fn read_while_leaves_merge_and_unlink() {
    explore(|| {
        let shared = ScheduleFixture::new(MERGES, 7, None);
        const GET: ScheduledReader = |shared| [60, 70, 10].into_iter().for_each(|key| shared.check_get(key));
        race(&shared, &[GET, ScheduleFixture::check_scan], &[&[8, 9, 10, 11, 12, 13]]);
    });
}

/// One writer removes records until two leaves are merged, and the other writes to these leaves.
const TWO_WRITERS: &[ScheduledChange] = &[
    Put(10),
    Put(20),
    Put(30),
    Put(40),
    Remove(10),
    Put(45),
    Remove(20),
    Remove(45),
    Put(12),
    Put(55),
    Remove(30),
    Put(41),
];

#[test]
fn two_writers_of_disjoint_keys() {
    explore(|| {
        let shared = ScheduleFixture::new(TWO_WRITERS, 4, None);
        race(&shared, &[ScheduleFixture::check_scan], &[&[5, 7, 9, 11], &[6, 8, 10, 12]]);
    });
}

/// Every record that is read existed, also while two threads split the same leaf.
#[test]
fn two_writers_split_one_leaf() {
    explore(|| {
        let shared = ScheduleFixture::new(SPLITS, 3, None);
        race(&shared, &[|shared| [30, 25].into_iter().for_each(|key| shared.check_get(key))], &[&[4, 6], &[5]]);
    });
}

/// Of four leaves, range deletes unlink two and remove records from others, while no snapshot is older and while one
/// is. The freed leaves and records are used again.
const RANGES: &[ScheduledChange] = &[
    Put(10),
    Put(20),
    Put(30),
    Put(40),
    Put(50),
    Put(60),
    Put(70),
    Put(80),
    RemoveRange(20, 75),
    Put(30),
    Put(50),
    RemoveRange(30, 31),
    Put(40),
    RemoveRange(0, 90),
    Put(20),
];

#[test]
fn read_while_range_delete_completes() {
    explore(|| {
        let shared = ScheduleFixture::new(RANGES, 8, None);
        const GET: ScheduledReader = |shared| [30, 50, 80, 30].into_iter().for_each(|key| shared.check_get(key));
        race(&shared, &[GET, ScheduleFixture::check_scan], &[&[9, 10, 11, 12, 13, 14, 15]]);
    });
}

/// Checks that the scenarios split and merge leaves as intended. It uses one thread, so it does not run under the
/// explorer.
#[cfg(not(azekura_explore))]
#[test]
fn scenarios_split_and_merge_leaves() {
    for (changes, splits, joins) in [(SPLITS, 2, 0), (MERGES, 2, 2), (TWO_WRITERS, 1, 1), (RANGES, 2, 2)] {
        let shared = ScheduleFixture::new(changes, 0, None);
        let mut leaves = vec![1];
        for seqno in 1..=changes.len() as u64 {
            shared.apply_change(seqno);
            leaves.push(shared.fixture.tree.usage().unwrap().1);
        }
        let more = leaves.windows(2).filter(|pair| pair[0] < pair[1]).count();
        let fewer = leaves.windows(2).filter(|pair| pair[0] > pair[1]).count();
        assert!(more >= splits && fewer >= joins, "{leaves:?}");
    }
}

#[cfg(azekura_explore)]
mod skipped_steps {
    use super::*;

    #[test]
    #[should_panic]
    fn reader_misses_key_without_version_bump() {
        explore(|| {
            let shared = ScheduleFixture::new(SPLITS, 3, Some(TreeStep::StructureVersion));
            race(&shared, &[|shared| (0..8).for_each(|_| shared.check_get(30))], &[&[4, 5, 6]]);
        });
    }

    #[test]
    #[should_panic]
    fn writer_uses_freed_leaf_without_version_bump() {
        explore(|| {
            let shared = ScheduleFixture::new(TWO_WRITERS, 4, Some(TreeStep::StructureVersion));
            race(&shared, &[], &[&[5, 7, 9, 11], &[6, 8, 10, 12]]);
        });
    }

    #[test]
    #[should_panic]
    fn stale_order_is_used_without_version_bump() {
        explore(|| {
            let shared = ScheduleFixture::new(SWAPS, 2, Some(TreeStep::LeafOrderVersion));
            race(&shared, &[ScheduleFixture::check_scan], &[&[3, 4, 5]]);
        });
    }

    #[test]
    #[should_panic]
    fn reader_sees_reused_space_without_epochs() {
        explore(|| {
            let shared = ScheduleFixture::new(REUSES, 1, Some(TreeStep::EpochReclaim));
            race(
                &shared,
                &[GET_20, |shared| (0..12).for_each(|_| shared.check_get(20))],
                &[&[2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]],
            );
        });
    }

    #[test]
    #[should_panic]
    fn reader_sees_covered_record_without_hiding() {
        explore(|| {
            let shared = ScheduleFixture::new(RANGES, 8, Some(TreeStep::HideCovered));
            race(&shared, &[|shared| [30, 50].into_iter().for_each(|key| shared.check_get(key))], &[&[9]]);
        });
    }

    #[test]
    #[should_panic]
    fn snapshot_loses_record_without_retention() {
        explore(|| {
            let shared = ScheduleFixture::new(REPLACES, 2, Some(TreeStep::RetainVersions));
            race(&shared, &[ScheduleFixture::check_scan], &[&[3, 4, 5, 6, 7]]);
        });
    }
}
