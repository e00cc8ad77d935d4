//! Concurrent writers that allocate sequence numbers, under every schedule of the explorer.
//!
//! Each change records its sequence number when it gets it. So the expected state at a sequence number is known: all
//! changes up to it, in order, and nothing else.
//!
//! The scenarios at the end skip one of the steps that writers rely on. The checks must fail then.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::fixture::PoolFixture;
use super::model::{new_fixture, options};
use crate::base::{Error, RecordKind, Result, SeqNo};
use crate::engine::SeqnoAllocator;
use crate::iter::InternalIter;
use crate::mem::atomic::{Mutex, yield_now};
use crate::mem::explorer::{explore, spawn};
use crate::mem::pages::PAGE;
use crate::pmem::persistence::PoolImage;

/// The step that a test skips.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SeqnoFault {
    None,
    /// A change is published as soon as it is made, although earlier changes are in progress.
    PublishOutOfOrder,
    /// A sequence number is allocated before the leaf is locked.
    AssignBeforeLock,
    /// The thread that closes the sequence number allocator (`close_gate`) does not wait for changes in progress.
    SkipGateWait,
}

/// Sequence number, key and value of a change; `None` is a removal.
type NumberedChange = (u64, u8, Option<u8>);

struct SeqnoScheduleFixture {
    fixture: PoolFixture<PoolImage>,
    seqno_allocator: SeqnoAllocator,
    changes: Mutex<Vec<NumberedChange>>,
    fault: SeqnoFault,
}

/// A value that identifies the change, too long to be stored inline in a `Slice`.
fn value(change: u8) -> Vec<u8> {
    vec![change; 40]
}

impl SeqnoScheduleFixture {
    /// A fixture that contains the keys 10 and 20.
    fn new(fault: SeqnoFault) -> Arc<SeqnoScheduleFixture> {
        let fixture = new_fixture(&options(16 * PAGE, 4));
        let numbers = SeqnoAllocator::new(fixture.visible.clone());
        numbers.resume(true);
        let shared = SeqnoScheduleFixture { fixture, seqno_allocator: numbers, changes: Mutex::new(Vec::new()), fault };
        assert!(shared.put(10, 1) && shared.put(20, 2));
        Arc::new(shared)
    }

    fn record_change(&self, seqno: SeqNo, key: u8, change: Option<u8>) {
        self.changes.lock().unwrap().push((seqno.0, key, change));
    }

    /// Makes a change, which is visible when this returns. Returns false if the allocator is closed.
    fn apply_change(&self, key: u8, change: Option<u8>) -> bool {
        let (tree, mut allocated, mut early) = (&self.fixture.tree, None, None);
        if self.fault == SeqnoFault::AssignBeforeLock {
            early = self.seqno_allocator.try_allocate();
        }
        let mut assign_seqno = || {
            allocated =
                if self.fault == SeqnoFault::AssignBeforeLock { early } else { self.seqno_allocator.try_allocate() };
            allocated.into_iter().for_each(|seqno| self.record_change(seqno, key, change));
            Ok(allocated)
        };
        let made = match change {
            Some(change) => tree.put_assigning_seqno(RecordKind::Put, &[key], &value(change), &mut assign_seqno),
            None => tree.remove_assigning_seqno(&[key], &mut assign_seqno),
        };
        assert_eq!(made.unwrap(), allocated.is_some());
        let Some(seqno) = allocated else { return false };
        if self.fault == SeqnoFault::PublishOutOfOrder {
            self.fixture.visible.publish(seqno);
        } else {
            self.seqno_allocator.finish(seqno);
            assert!(self.seqno_allocator.wait_until_visible(seqno));
        }
        assert!(self.fixture.visible.get() >= seqno);
        true
    }

    fn put(&self, key: u8, change: u8) -> bool {
        self.apply_change(key, Some(change))
    }

    /// Makes changes that become visible together.
    fn batch(&self, puts: &[(u8, u8)]) {
        match self.fault {
            SeqnoFault::SkipGateWait => {}
            _ => self.seqno_allocator.close_gate(),
        }
        let mut seqno = self.fixture.visible.get();
        for (key, change) in puts {
            seqno = seqno.plus(1);
            self.record_change(seqno, *key, Some(*change));
            self.fixture.tree.put(&[*key], seqno, &value(*change)).unwrap();
        }
        self.fixture.visible.publish(seqno);
        self.seqno_allocator.resume(true);
    }

    /// The expected content at a sequence number.
    fn contents_at(&self, point: SeqNo) -> BTreeMap<Vec<u8>, Vec<u8>> {
        let mut made: Vec<NumberedChange> =
            self.changes.lock().unwrap().iter().filter(|made| made.0 <= point.0).copied().collect();
        made.sort_unstable();
        assert!((1..=point.0).eq(made.iter().map(|made| made.0)), "unused or used twice: {made:?}");
        let mut there = BTreeMap::new();
        for (_, key, change) in made {
            match change {
                Some(change) => drop(there.insert(vec![key], value(change))),
                None => drop(there.remove(&[key][..])),
            }
        }
        there
    }

    /// Checks that one sequence number shows the changes up to it, by iteration and by gets, at each read.
    fn check_scan(&self) {
        let pin = self.fixture.snapshots.register();
        let there = self.contents_at(pin.seqno());
        let mut iter = self.fixture.tree.iter(pin.seqno());
        for _ in 0..2 {
            let mut found = BTreeMap::new();
            iter.seek_to_first().unwrap();
            while let Some(entry) = iter.current() {
                found.insert(entry.user_key.to_vec(), entry.value.to_vec());
                iter.next().unwrap();
            }
            assert_eq!(found, there, "at {:?}", pin.seqno());
        }
        for (key, value) in &there {
            let got = self.fixture.tree.get_at(key, pin.seqno()).unwrap();
            assert_eq!(got.as_deref(), Some(value.as_slice()));
        }
    }

    /// Checks the final state, once all changes are made and all readers have ended.
    fn check_final_state(&self, changes: u64) {
        self.seqno_allocator.close_gate();
        assert_eq!(self.fixture.visible.get(), SeqNo(changes));
        self.check_scan();
        self.fixture.check_invariants();
        // The step before dropped all versions, so only the leaves contain records now.
        self.check_scan();
    }
}

type ScheduledThread = fn(&SeqnoScheduleFixture);

/// Runs `threads` concurrently, the last one on this thread. Then `changes` changes must have been made.
fn race(shared: &Arc<SeqnoScheduleFixture>, threads: &[ScheduledThread], changes: u64) {
    let (last, others) = threads.split_last().expect("there is at least one thread");
    let others = others.iter().copied().map(|part| {
        let shared = Arc::clone(shared);
        spawn(move || part(&shared))
    });
    let others: Vec<_> = others.collect();
    last(shared);
    others.into_iter().for_each(|thread| thread.join().unwrap());
    shared.check_final_state(changes);
}

const CHECK_SCANS: ScheduledThread = |shared| (0..2).for_each(|_| shared.check_scan());

fn race_on_one_key(fault: SeqnoFault) {
    let threads: [ScheduledThread; 3] = [
        CHECK_SCANS,
        |shared| assert!(shared.put(20, 3) && shared.apply_change(20, None)),
        |shared| assert!(shared.put(20, 4) && shared.put(20, 5)),
    ];
    race(&SeqnoScheduleFixture::new(fault), &threads, 6);
}

#[test]
fn two_writers_of_one_key() {
    explore(|| race_on_one_key(SeqnoFault::None));
}

fn race_on_different_keys(fault: SeqnoFault) {
    let threads: [ScheduledThread; 3] = [
        CHECK_SCANS,
        |shared| assert!(shared.put(15, 3) && shared.put(10, 4)),
        // This put splits the leaf.
        |shared| assert!(shared.put(25, 5) && shared.put(30, 6)),
    ];
    race(&SeqnoScheduleFixture::new(fault), &threads, 6);
}

#[test]
fn read_during_writes_of_different_keys() {
    explore(|| race_on_different_keys(SeqnoFault::None));
}

/// More changes finish before the oldest unfinished one than the completion ring has entries.
#[test]
fn three_writers_overflow_completion_ring() {
    explore(|| {
        let threads: [ScheduledThread; 3] = [
            |shared| assert!(shared.put(10, 3) && shared.put(20, 4)),
            |shared| assert!(shared.put(20, 5) && shared.put(10, 6)),
            |shared| assert!(shared.put(30, 7) && shared.put(30, 8)),
        ];
        race(&SeqnoScheduleFixture::new(SeqnoFault::None), &threads, 8);
    });
}

fn race_with_batches(fault: SeqnoFault) {
    let threads: [ScheduledThread; 3] = [
        CHECK_SCANS,
        |shared| shared.batch(&[(10, 3), (20, 4)]),
        |shared| {
            for (key, change) in [(20, 5), (10, 6)] {
                while !shared.put(key, change) {
                    yield_now();
                }
            }
        },
    ];
    race(&SeqnoScheduleFixture::new(fault), &threads, 6);
}

#[test]
fn batch_during_single_changes() {
    explore(|| race_with_batches(SeqnoFault::None));
}

fn race_with_close(fault: SeqnoFault) {
    let shared = SeqnoScheduleFixture::new(fault);
    let writers = [30, 20].map(|key| {
        let shared = Arc::clone(&shared);
        spawn(move || u64::from(shared.put(key, key)) + u64::from(shared.put(key, key + 1)))
    });
    if fault != SeqnoFault::SkipGateWait {
        shared.seqno_allocator.close_gate();
    }
    // No sequence number after this one becomes visible.
    let (last, made) = (shared.fixture.visible.get(), shared.changes.lock().unwrap().len() as u64);
    assert_eq!(last.0, made);
    let puts: u64 = writers.into_iter().map(|writer| writer.join().unwrap()).sum();
    assert_eq!((shared.fixture.visible.get(), puts + 2), (last, made));
    shared.check_scan();
}

#[test]
fn closing_during_single_changes() {
    explore(|| race_with_close(SeqnoFault::None));
}

/// A change fails after it got its sequence number. Waits for later changes end, and earlier changes become visible.
#[test]
fn waiters_end_when_seqno_is_lost() {
    explore(|| {
        let shared = SeqnoScheduleFixture::new(SeqnoFault::None);
        let loses = {
            let shared = Arc::clone(&shared);
            spawn(move || {
                let Some(lost) = shared.seqno_allocator.try_allocate() else { panic!("the gate is open") };
                shared.seqno_allocator.fail(lost);
                lost
            })
        };
        let others = [30, 20].map(|key| {
            let shared = Arc::clone(&shared);
            spawn(move || {
                let mut allocated = None;
                let take = || -> Result<_> {
                    allocated = shared.seqno_allocator.try_allocate();
                    Ok(allocated)
                };
                let made = shared.fixture.tree.put_assigning_seqno(RecordKind::Put, &[key], &value(key), take);
                assert_eq!(made.unwrap(), allocated.is_some());
                allocated.into_iter().for_each(|seqno| shared.seqno_allocator.finish(seqno));
                allocated.map(|seqno| (seqno, shared.seqno_allocator.wait_until_visible(seqno)))
            })
        });
        let lost = loses.join().unwrap();
        for (seqno, seen) in others.into_iter().filter_map(|other| other.join().unwrap()) {
            assert_eq!(seen, seqno < lost);
        }
        shared.seqno_allocator.close_gate();
        shared.seqno_allocator.resume(true);
        assert_eq!((shared.fixture.visible.get().plus(1), shared.seqno_allocator.try_allocate()), (lost, None));
    });
}

/// A change that fails before it got a sequence number changes nothing and uses none.
#[test]
fn refused_change_takes_no_seqno() {
    explore(|| {
        let shared = SeqnoScheduleFixture::new(SeqnoFault::None);
        let other = {
            let shared = Arc::clone(&shared);
            spawn(move || assert!(shared.put(30, 3)))
        };
        let refuse = || Err(Error::invalid("refused"));
        assert!(shared.fixture.tree.put_assigning_seqno(RecordKind::Put, &[20], &value(9), refuse).is_err());
        assert!(shared.fixture.tree.remove_assigning_seqno(&[10], refuse).is_err());
        assert!(
            shared
                .fixture
                .tree
                .put_assigning_seqno(RecordKind::Put, &[40], &[0; 1 << 17], || panic!("there is no space"))
                .is_err()
        );
        other.join().unwrap();
        shared.check_final_state(3);
    });
}

#[cfg(azekura_explore)]
mod skipped_steps {
    use super::*;

    #[test]
    #[should_panic]
    fn change_visible_too_early_is_detected() {
        explore(|| race_on_different_keys(SeqnoFault::PublishOutOfOrder));
    }

    #[test]
    #[should_panic]
    fn seqno_allocated_before_lock_is_detected() {
        explore(|| race_on_one_key(SeqnoFault::AssignBeforeLock));
    }

    #[test]
    #[should_panic]
    fn batch_without_gate_wait_is_detected() {
        explore(|| race_with_batches(SeqnoFault::SkipGateWait));
    }

    #[test]
    #[should_panic]
    fn close_without_gate_wait_is_detected() {
        explore(|| race_with_close(SeqnoFault::SkipGateWait));
    }
}
