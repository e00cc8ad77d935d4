//! Epochs and child links under explored thread schedules.
//!
//! A read of a freed value is not observable by itself. So in explored schedules the scenario holds a count of each
//! value itself, and a value counts as freed when no other count is left. Without the explorer there is no such
//! count, and Miri detects a late read.

use std::sync::{Arc, Weak};

use crate::mem::atomic::{AtomicUsize, Ordering};
use crate::mem::epoch::tests::wait_until;
use crate::mem::epoch::{EpochCell, Pin};
use crate::mem::explorer::{explore, spawn, yield_point};
use crate::mem::parent_block::{AnyParentBlock, CacheHandle, ParentBlock, RetiredBlock};

/// A value that readers check. Its drop makes `number` and `again` inconsistent.
struct TrackedValue {
    number: usize,
    again: usize,
    freed: Arc<AtomicUsize>,
}

impl Drop for TrackedValue {
    fn drop(&mut self) {
        self.again = self.number;
        self.freed.fetch_add(1, Ordering::SeqCst);
    }
}

/// Tracks all values of a scenario.
#[derive(Clone)]
struct FreeTracker {
    values: Arc<Vec<Weak<TrackedValue>>>,
    owned: Arc<Vec<Arc<TrackedValue>>>,
    freed: Arc<AtomicUsize>,
}

impl FreeTracker {
    /// Returns a tracker and this many values; a thread of the scenario owns each of them.
    fn new(count: usize) -> (FreeTracker, Vec<Arc<TrackedValue>>) {
        let freed = Arc::new(AtomicUsize::new(0));
        let value = |number| Arc::new(TrackedValue { number, again: !number, freed: Arc::clone(&freed) });
        let values: Vec<Arc<TrackedValue>> = (0..count).map(value).collect();
        let owned = if cfg!(azekura_explore) { values.clone() } else { Vec::new() };
        let weak = values.iter().map(Arc::downgrade).collect();
        (FreeTracker { values: Arc::new(weak), owned: Arc::new(owned), freed }, values)
    }

    /// Checks a value, lets other threads run, and checks it again.
    fn check(&self, value: &TrackedValue) {
        for _ in 0..2 {
            assert_eq!(value.number, !value.again);
            assert!(self.strong_count(value.number) > 0, "value {} was freed under a reader", value.number);
            yield_point();
        }
    }

    /// Returns the strong counts of a value, without that of the tracker.
    fn strong_count(&self, number: usize) -> usize {
        self.values[number].strong_count() - usize::from(!self.owned.is_empty())
    }

    /// Waits until the values `live` have one count and the others none, and checks that each freed value was freed
    /// once.
    fn wait_until_freed_except(&self, live: &[usize]) {
        let expected = |number| if live.contains(&number) { 1 } else { 0 };
        wait_until(|| (0..self.values.len()).all(|number| self.strong_count(number) == expected(number)));
        let freed = if self.owned.is_empty() { self.values.len() - live.len() } else { 0 };
        wait_until(|| self.freed.load(Ordering::SeqCst) == freed);
    }
}

type TestParent = ParentBlock<TrackedValue, ()>;

fn as_any_parent(parent: &Arc<TestParent>) -> Weak<AnyParentBlock<TrackedValue>> {
    Arc::downgrade(parent) as Weak<AnyParentBlock<TrackedValue>>
}

fn linked_handle(value: &Arc<TrackedValue>, parent: &Arc<TestParent>, at: usize) -> CacheHandle<TrackedValue, ()> {
    let mut handle = CacheHandle::new(Arc::clone(value), ());
    handle.link(as_any_parent(parent), at);
    handle
}

/// Follows two links of `parent` under one pin, checks the values, and returns their number.
fn read(parent: &TestParent, tracker: &FreeTracker) -> usize {
    let pin = Pin::new();
    let found = [0, 1].map(|at| parent.child(at, &pin));
    found.iter().flatten().for_each(|value| tracker.check(value));
    found.iter().flatten().count()
}

#[test]
fn value_is_not_freed_while_reader_is_pinned() {
    explore(|| {
        let (tracker, values) = FreeTracker::new(2);
        let parent = Arc::new(TestParent::new((), 2));
        let handles: Vec<_> = (0..2).map(|n| linked_handle(&values[n], &parent, n)).collect();
        drop(values);
        let readers = [0; 2].map(|_| {
            let (parent, tracker) = (Arc::clone(&parent), tracker.clone());
            spawn(move || (read(&parent, &tracker), read(&parent, &tracker)))
        });
        let mut handles = handles.into_iter();
        drop(handles.next());
        RetiredBlock::drop_all(handles.map(CacheHandle::retire).collect());
        for reader in readers {
            let (first, second) = reader.join().unwrap();
            assert!(first >= second, "a cleared link was set again");
        }
        assert_eq!(read(&parent, &tracker), 0);
        tracker.wait_until_freed_except(&[]);
    });
}

#[test]
fn reader_may_keep_a_counted_reference() {
    explore(|| {
        let (tracker, values) = FreeTracker::new(1);
        let parent = Arc::new(TestParent::new((), 1));
        let handle = linked_handle(&values[0], &parent, 0);
        drop(values);
        let reader = spawn({
            let (parent, tracker) = (Arc::clone(&parent), tracker.clone());
            move || {
                let pin = Pin::new();
                let child = parent.child(0, &pin).map(|found| {
                    tracker.check(&found);
                    found.to_arc()
                });
                drop(pin);
                yield_point();
                child.iter().for_each(|child| tracker.check(child));
            }
        });
        drop(handle);
        reader.join().unwrap();
        tracker.wait_until_freed_except(&[]);
    });
}

/// A second handle overwrites a link so that it points to another value. The first handle is dropped without changing
/// the link.
#[test]
fn value_outlives_overwritten_link_for_readers() {
    explore(|| {
        let (tracker, values) = FreeTracker::new(2);
        let parent = Arc::new(TestParent::new((), 1));
        let first = linked_handle(&values[0], &parent, 0);
        let mut second = CacheHandle::new(Arc::clone(&values[1]), ());
        drop(values);
        let reader = spawn({
            let (parent, tracker) = (Arc::clone(&parent), tracker.clone());
            move || {
                read(&parent, &tracker);
                read(&parent, &tracker);
            }
        });
        let other = spawn(move || {
            first.take_referenced();
            drop(first);
        });
        second.link(as_any_parent(&parent), 0);
        other.join().unwrap();
        reader.join().unwrap();
        assert_eq!(parent.peek(0, &Pin::new()).unwrap().number, 1);
        tracker.wait_until_freed_except(&[1]);
    });
}

#[test]
fn referenced_bits_taken_do_not_exceed_reads() {
    explore(|| {
        let (tracker, values) = FreeTracker::new(1);
        let parent = Arc::new(TestParent::new((), 1));
        let handle = linked_handle(&values[0], &parent, 0);
        drop(values);
        let readers = [0; 2].map(|_| {
            let (parent, tracker) = (Arc::clone(&parent), tracker.clone());
            spawn(move || read(&parent, &tracker) + read(&parent, &tracker))
        });
        let mut bits_taken = (0..3).filter(|_| handle.take_referenced()).count();
        // As in the clock algorithm: blocks without hits are evicted.
        let retired = (!handle.take_referenced()).then(|| handle.retire());
        let evicted = retired.is_some();
        bits_taken += usize::from(!evicted);
        drop(retired);
        let followed: usize = readers.into_iter().map(|reader| reader.join().unwrap()).sum();
        assert!(bits_taken <= followed, "{bits_taken} bits of {followed} reads");
        assert!(parent.peek(0, &Pin::new()).is_none());
        tracker.wait_until_freed_except(&[]);
    });
}

#[test]
fn every_link_read_sets_the_reference_bit() {
    explore(|| {
        let (tracker, values) = FreeTracker::new(1);
        let parent = Arc::new(TestParent::new((), 1));
        let handle = Arc::new(linked_handle(&values[0], &parent, 0));
        drop(values);
        let readers = [0; 2].map(|_| {
            let (parent, tracker) = (Arc::clone(&parent), tracker.clone());
            spawn(move || assert_eq!(read(&parent, &tracker), 1))
        });
        let clock = spawn({
            let handle = Arc::clone(&handle);
            move || usize::from(handle.take_referenced())
        });
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        let during = clock.join().unwrap();
        let after = usize::from(handle.take_referenced());
        assert!((1..=2).contains(&(during + after)), "{during} during, {after} after");
        assert!(!handle.take_referenced());
        drop(handle);
        tracker.wait_until_freed_except(&[]);
    });
}

/// A reader owns the last count of a parent block and reads a value of it, when the value's handle finds that the
/// parent block was freed.
#[test]
fn parent_may_drop_while_children_are_read() {
    explore(|| {
        let (tracker, values) = FreeTracker::new(2);
        let parent = Arc::new(TestParent::new((), 2));
        let handles: Vec<_> = (0..2).map(|n| linked_handle(&values[n], &parent, n)).collect();
        drop(values);
        let reader = spawn({
            let (parent, tracker) = (Arc::clone(&parent), tracker.clone());
            move || {
                let pin = Pin::new();
                let found = [0, 1].map(|at| parent.child(at, &pin));
                yield_point();
                drop(parent);
                yield_point();
                found.iter().flatten().for_each(|value| tracker.check(value));
            }
        });
        let clock = spawn(move || {
            for handle in handles {
                handle.take_referenced();
                drop(handle);
            }
        });
        drop(parent);
        clock.join().unwrap();
        reader.join().unwrap();
        tracker.wait_until_freed_except(&[]);
    });
}

/// Readers go from the top level to an index partition and on to its value while both are freed, as for every block
/// in the cache.
#[test]
fn index_partition_and_block_drop_in_any_order() {
    explore(|| {
        let (tracker, values) = FreeTracker::new(2);
        let top: Arc<ParentBlock<TestParent, ()>> = Arc::new(ParentBlock::new((), 1));
        let partition = Arc::new(TestParent::new((), 2));
        let mut partition_handle = CacheHandle::new(Arc::clone(&partition), ());
        partition_handle.link(Arc::downgrade(&top) as Weak<AnyParentBlock<TestParent>>, 0);
        let handle = linked_handle(&values[0], &partition, 0);
        let readers = [0; 2].map(|_| {
            let (top, tracker) = (Arc::clone(&top), tracker.clone());
            spawn(move || {
                let pin = Pin::new();
                let Some(partition) = top.child(0, &pin) else { return };
                let found = [0, 1].map(|at| partition.child(at, &pin));
                found.iter().flatten().for_each(|value| tracker.check(value));
            })
        });
        let clock = spawn(move || drop(partition_handle));
        // A block is read while its index partition is evicted: the link is set in an unreachable partition.
        let late = linked_handle(&values[1], &partition, 1);
        drop((partition, values));
        drop(handle);
        clock.join().unwrap();
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        drop(late);
        tracker.wait_until_freed_except(&[]);
    });
}

#[test]
fn replaced_value_is_not_freed_while_guarded() {
    explore(|| {
        let (tracker, mut values) = FreeTracker::new(4);
        let cell = Arc::new(EpochCell::new(values.remove(0)));
        let readers = [0; 2].map(|_| {
            let (cell, tracker) = (Arc::clone(&cell), tracker.clone());
            spawn(move || {
                let outer = cell.load();
                tracker.check(&outer);
                let inner = cell.load();
                tracker.check(&inner);
                assert!(outer.number <= inner.number, "a reader saw an older value after a newer one");
                drop(outer);
                tracker.check(&inner);
            })
        });
        for value in values {
            cell.store(value);
        }
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        tracker.wait_until_freed_except(&[3]);
        drop(cell);
        tracker.wait_until_freed_except(&[]);
    });
}

/// Threads start and end, so that slots are released while others acquire them, and two threads store at the same
/// time.
#[test]
fn slots_are_reused_while_two_threads_store() {
    explore(|| {
        let (tracker, mut values) = FreeTracker::new(3);
        let cell = Arc::new(EpochCell::new(values.remove(0)));
        let numbers = Arc::new([const { AtomicUsize::new(0) }; 8]);
        let read = {
            let (cell, tracker, numbers) = (Arc::clone(&cell), tracker.clone(), Arc::clone(&numbers));
            move || {
                let guard = cell.load();
                let own = &numbers[guard.pin().slot_index() % 8];
                // Like the hit counters of the cache: no increment is lost, because the slot number belongs to this
                // thread alone.
                own.store(own.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                tracker.check(&guard);
            }
        };
        spawn(read.clone()).join().unwrap(); // leaves one free slot, for which the next threads race
        let readers = [0; 2].map(|_| spawn(read.clone()));
        let last = values.pop().unwrap();
        let writer = spawn({
            let cell = Arc::clone(&cell);
            move || values.into_iter().for_each(|value| cell.store(value))
        });
        cell.store(last);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        writer.join().unwrap();
        let last = cell.load().number;
        tracker.wait_until_freed_except(&[last]);
        let sum: usize = numbers.iter().map(|number| number.load(Ordering::Relaxed)).sum();
        // Without the explorer, threads of other tests have slots too, and slot numbers are larger.
        assert!(cfg!(not(azekura_explore)) || sum == 3, "{sum} of 3 counted");
    });
}
