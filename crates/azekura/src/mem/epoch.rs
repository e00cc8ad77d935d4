//! A pointer that readers follow without a lock and without a write to a cache line that other threads write.
//!
//! Each thread has a slot. A pin stores the global epoch in it. Replacing a value raises the epoch, and the old value
//! is freed once every slot is idle or was pinned at a later epoch. The thread that replaced the value frees it, or,
//! if a reader was pinned at that epoch or before, that reader frees it when it unpins. The reader may hold any lock
//! at that time, so dropping a value may free memory but do little else, and must not wait.
//!
//! A reader that was pinned after the oldest replaced value was replaced cannot be the one that delays its freeing.
//! So it does not collect garbage when it unpins, except at every [`UNPINS_PER_COLLECT`]th unpin: while one reader
//! waits for a device, the others unpin without a shared write. No unpin ever waits for a lock.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::null_mut;
use std::sync::Arc;

#[cfg(any(test, feature = "testing"))]
use crate::mem::atomic::yield_now;
use crate::mem::atomic::{
    AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, SCHEDULE_EXPLORATION, lock,
    process_wide, spin_loop, thread_local, try_lock,
};

/// Value of a slot while its thread is not pinned; no epoch reaches it.
const IDLE: u64 = u64::MAX;

/// How often [`retire`] tries to free all garbage before it leaves the rest to the readers that keep it.
const COLLECT_ATTEMPTS_MAX: usize = if SCHEDULE_EXPLORATION { 2 } else { 64 };

process_wide! {
    static EPOCH: AtomicU64 = AtomicU64::new(0);

    /// The list of all slots. Slots are never freed, only reused, so the list is as long as the largest number of
    /// threads that had a slot at the same time.
    static SLOTS: AtomicPtr<EpochSlot> = AtomicPtr::new(null_mut());

    /// Replaced values that are not freed yet, each with the epoch of its replacement, in the order of epochs, so
    /// that a freeing thread reads only the values to free and one more.
    static GARBAGE: Mutex<VecDeque<(u64, Box<dyn Send>)>> = Mutex::new(VecDeque::new());

    /// The first epoch at which a pin does not keep the front of [`GARBAGE`]; 0 if there is no garbage, so that an
    /// unpin needs no lock to find that there is nothing to free. Written under the lock.
    static OLDEST_GARBAGE_END: AtomicU64 = AtomicU64::new(0);

    /// A thread wants to free garbage. The thread that holds the lock checks this again after it has released the
    /// lock.
    static COLLECT_REQUESTED: AtomicBool = AtomicBool::new(false);
}

/// After this many unpins that found garbage, a thread collects it even if its own pins have kept none. An unpin may
/// load an outdated [`OLDEST_GARBAGE_END`], so without this rule a value could stay until the next one is replaced.
const UNPINS_PER_COLLECT: usize = if SCHEDULE_EXPLORATION { 2 } else { 64 };

/// The slot of one thread. It takes two cache lines, because processors fetch lines in pairs.
#[repr(align(128))]
struct EpochSlot {
    /// The epoch of the outermost pin, or [`IDLE`]. Written by the owner, read by freeing threads.
    epoch: AtomicU64,
    /// Number of nested pins. Used only by the owner.
    depth: AtomicUsize,
    /// Number of unpins that found garbage which their pin had not kept. Used only by the owner.
    unpins: AtomicUsize,
    /// Whether the last unpin releases the slot, because the thread's handle was dropped before. Used only by the
    /// owner.
    release_on_unpin: AtomicBool,
    in_use: AtomicBool,
    /// Set before the slot is published in the list, and never changed afterwards.
    next: *const EpochSlot,
    /// Number of slots after this one in the list, which never changes and is unique.
    number: usize,
}

// SAFETY: all fields but `next` and `number` are atomic, and these two are not changed once the slot is shared.
unsafe impl Sync for EpochSlot {}

impl EpochSlot {
    /// Returns a slot for the calling thread only: a free one, or a new one at the head of the list.
    #[cold]
    fn acquire() -> &'static EpochSlot {
        for slot in slots() {
            let free = !slot.in_use.load(Ordering::Relaxed);
            if free && slot.in_use.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return slot;
            }
        }
        let slot = Box::leak(Box::new(EpochSlot {
            epoch: AtomicU64::new(IDLE),
            depth: AtomicUsize::new(0),
            unpins: AtomicUsize::new(0),
            release_on_unpin: AtomicBool::new(false),
            in_use: AtomicBool::new(true),
            next: SLOTS.load(Ordering::SeqCst),
            number: 0,
        }));
        loop {
            // SAFETY: slots in the list are leaked, and were initialized before they were published with SeqCst.
            slot.number = unsafe { slot.next.as_ref() }.map_or(0, |next| next.number + 1);
            match SLOTS.compare_exchange(slot.next.cast_mut(), slot, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return slot,
                Err(head) => slot.next = head,
            }
        }
    }

    /// Counts an unpin. True for every [`UNPINS_PER_COLLECT`]th.
    fn should_collect(&self) -> bool {
        let unpins = self.unpins.load(Ordering::Relaxed).wrapping_add(1);
        self.unpins.store(unpins, Ordering::Relaxed);
        unpins.is_multiple_of(UNPINS_PER_COLLECT)
    }

    /// Makes the slot available to other threads.
    fn release(&self) {
        debug_assert!(SCHEDULE_EXPLORATION || self.depth.load(Ordering::Relaxed) == 0, "no pin uses a free slot");
        self.release_on_unpin.store(false, Ordering::Relaxed);
        self.in_use.store(false, Ordering::Release);
    }
}

/// All slots, in use or free.
fn slots() -> impl Iterator<Item = &'static EpochSlot> {
    let mut next: *const EpochSlot = SLOTS.load(Ordering::SeqCst);
    std::iter::from_fn(move || {
        // SAFETY: slots in the list are leaked, and were initialized before they were published with SeqCst.
        let slot = unsafe { next.as_ref() }?;
        next = slot.next;
        Some(slot)
    })
}

/// Owns the slot of a thread until the thread ends.
struct EpochSlotHandle(&'static EpochSlot);

impl Drop for EpochSlotHandle {
    fn drop(&mut self) {
        if self.0.depth.load(Ordering::Relaxed) == 0 {
            self.0.release();
        } else {
            // A pin still exists after the handle; its drop releases the slot.
            self.0.release_on_unpin.store(true, Ordering::Relaxed);
        }
    }
}

thread_local! {
    static HANDLE: EpochSlotHandle = EpochSlotHandle(EpochSlot::acquire());
}

/// While a pin exists, no value is freed that its thread can reach through an [`EpochCell`] or a child link. A pin
/// stays on its thread. Pins of one thread may nest; only the outermost one stores an epoch.
pub(crate) struct Pin {
    slot: &'static EpochSlot,
    on_this_thread: PhantomData<*const ()>,
}

impl Pin {
    /// Pins the thread. Hold the pin only within one call, because no value that is replaced meanwhile is freed
    /// before it ends.
    #[inline]
    pub(crate) fn new() -> Pin {
        // While a thread ends, its handle may be dropped already. Then the pin takes a slot of its own.
        let slot = HANDLE.try_with(|handle| handle.0).unwrap_or_else(|_| {
            let slot = EpochSlot::acquire();
            slot.release_on_unpin.store(true, Ordering::Relaxed);
            slot
        });
        let depth = slot.depth.load(Ordering::Relaxed);
        slot.depth.store(depth + 1, Ordering::Relaxed);
        if depth == 0 {
            debug_assert!(
                SCHEDULE_EXPLORATION || slot.epoch.load(Ordering::Relaxed) == IDLE,
                "a slot without a pin is idle"
            );
            // Acquire: a thread that loads an epoch also sees the pointers that were replaced before that epoch
            // began. SeqCst, like the load of the pointer that follows: either the replacing thread sees this slot
            // pinned, or this thread sees the new pointer.
            slot.epoch.store(EPOCH.load(Ordering::Acquire), Ordering::SeqCst);
        }
        Pin { slot, on_this_thread: PhantomData }
    }

    /// A small number that no other pinned thread has. Operations of its previous owner happened before this pin.
    #[inline]
    pub(crate) fn slot_index(&self) -> usize {
        self.slot.number
    }
}

impl Drop for Pin {
    #[inline]
    fn drop(&mut self) {
        let depth = self.slot.depth.load(Ordering::Relaxed) - 1;
        self.slot.depth.store(depth, Ordering::Relaxed);
        if depth == 0 {
            let pinned_at = self.slot.epoch.load(Ordering::Relaxed);
            debug_assert!(pinned_at != IDLE, "the outermost pin has stored an epoch");
            self.slot.epoch.store(IDLE, Ordering::Release);
            let free_from = OLDEST_GARBAGE_END.load(Ordering::Relaxed);
            if free_from != 0 && (pinned_at < free_from || self.slot.should_collect()) {
                collect();
            }
            if self.slot.release_on_unpin.load(Ordering::Relaxed) {
                self.slot.release();
            }
        }
    }
}

/// Frees the values that no pinned thread can reach, or leaves that to the thread that is doing it. True if no
/// garbage is left.
#[cold]
fn collect() -> bool {
    COLLECT_REQUESTED.store(true, Ordering::SeqCst);
    while COLLECT_REQUESTED.load(Ordering::SeqCst) {
        let Some(garbage) = try_lock(&GARBAGE) else { return false };
        COLLECT_REQUESTED.store(false, Ordering::SeqCst);
        drop(take_free(garbage)); // after the lock is released, because dropping a value may replace or free others
    }
    OLDEST_GARBAGE_END.load(Ordering::Relaxed) == 0
}

/// Removes the values that no pinned thread can reach from the queue, and returns them.
fn take_free(mut garbage: MutexGuard<'_, VecDeque<(u64, Box<dyn Send>)>>) -> Vec<(u64, Box<dyn Send>)> {
    let mut free = Vec::new();
    loop {
        // SeqCst: see `Pin::new`. If a reader has unpinned, the loaded value of its slot was stored with Release, by
        // the unpin or later. So the reads of that reader happened before the values are freed.
        let oldest = slots().map(|slot| slot.epoch.load(Ordering::SeqCst)).min().unwrap_or(IDLE);
        let count = garbage.iter().take_while(|(replaced_at, _)| *replaced_at < oldest).count();
        if count == 0 {
            return free;
        }
        debug_assert!(
            garbage.iter().skip(count).take(1).all(|(replaced_at, _)| *replaced_at >= oldest),
            "a pinned thread keeps what was replaced since"
        );
        free.extend(garbage.drain(..count));
        // Check again: a reader that kept the new front may have unpinned before it could load this new value.
        OLDEST_GARBAGE_END.store(garbage.front().map_or(0, |(replaced_at, _)| replaced_at + 1), Ordering::SeqCst);
    }
}

/// Drops `value` once every thread that was pinned before this call has unpinned.
pub(in crate::mem) fn retire(value: Box<dyn Send>) {
    {
        let mut garbage = lock(&GARBAGE);
        // A pin at a later epoch began after the pointer was replaced.
        let now = EPOCH.fetch_add(1, Ordering::SeqCst);
        debug_assert!(
            garbage.back().is_none_or(|(replaced_at, _)| *replaced_at < now),
            "garbage is in order of epochs"
        );
        garbage.push_back((now, value));
        if garbage.len() == 1 {
            OLDEST_GARBAGE_END.store(now + 1, Ordering::SeqCst);
        }
    }
    // Pins last microseconds, and readers should not spend time on freeing, so this thread tries again. If it is
    // pinned itself, it tries only once, because it would wait for itself.
    let pinned = HANDLE.try_with(|handle| handle.0.depth.load(Ordering::Relaxed) > 0).unwrap_or(true);
    for _ in 0..if pinned { 1 } else { COLLECT_ATTEMPTS_MAX } {
        if collect() {
            break;
        }
        spin_loop();
    }
}

/// A point in time for callers that reuse memory themselves: they wait until the readers of that time have unpinned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RetireEpoch(u64);

impl RetireEpoch {
    /// Raises the epoch and returns the current point in time. Threads that were pinned before it may still read
    /// objects that are unreachable now.
    pub(crate) fn advance() -> RetireEpoch {
        // A pin at a later epoch began after the objects became unreachable.
        RetireEpoch(EPOCH.fetch_add(1, Ordering::SeqCst))
    }

    /// Whether every thread that was pinned at `self` has unpinned. Never true for a thread that is itself pinned.
    pub(crate) fn all_unpinned(self) -> bool {
        // SeqCst: see `take_free`.
        slots().all(|slot| slot.epoch.load(Ordering::SeqCst) > self.0)
    }

    /// Whether every other thread that was pinned at `self` has unpinned.
    pub(crate) fn others_unpinned(self) -> bool {
        let own = HANDLE.try_with(|handle| handle.0.number).ok();
        slots().all(|slot| Some(slot.number) == own || slot.epoch.load(Ordering::SeqCst) > self.0)
    }
}

/// Waits until every other thread that is pinned now has unpinned, and what only they could reach is freed. The calling
/// thread is not pinned.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn wait_for_readers() {
    let now = RetireEpoch::advance();
    loop {
        if now.others_unpinned() {
            collect();
            let free_from = OLDEST_GARBAGE_END.load(Ordering::SeqCst);
            if free_from == 0 || free_from > now.0 {
                return;
            }
        }
        yield_now();
    }
}

/// A shared value that is replaced as a whole. Readers never wait, and do not write to shared cache lines.
pub(crate) struct EpochCell<T: Send + Sync + 'static> {
    /// From `Arc::into_raw`; the cell owns one strong count.
    value: AtomicPtr<T>,
    owned: PhantomData<Arc<T>>,
}

impl<T: Send + Sync + 'static> EpochCell<T> {
    pub(crate) fn new(value: Arc<T>) -> EpochCell<T> {
        EpochCell { value: AtomicPtr::new(Arc::into_raw(value).cast_mut()), owned: PhantomData }
    }

    /// Returns the current value. The guard keeps it, and every other value that is replaced meanwhile in any cell,
    /// from being freed. So hold it only within one call, and use [`EpochCell::load_arc`] to keep the value longer.
    #[inline]
    pub(crate) fn load(&self) -> EpochGuard<'_, T> {
        let pin = Pin::new();
        EpochGuard { value: self.value.load(Ordering::SeqCst).cast_const(), pin, cell: PhantomData }
    }

    /// The current value, for a caller that is pinned already.
    #[inline]
    pub(crate) fn load_pinned<'p>(&'p self, _pinned: &'p Pin) -> &'p T {
        // SAFETY: as in `EpochGuard::deref`: the pointer was loaded from the cell after the pin was set, and the pin
        // exists for 'p. The cell is borrowed for 'p, so it is not dropped with the count that it owns.
        unsafe { &*self.value.load(Ordering::SeqCst) }
    }

    /// Returns a strong count of the current value.
    pub(crate) fn load_arc(&self) -> Arc<T> {
        let _pin = Pin::new();
        let value = self.value.load(Ordering::SeqCst).cast_const();
        // SAFETY: the pointer is from `Arc::into_raw`. The strong count that the cell owned when the pointer was
        // loaded exists while this thread is pinned: `store` releases it through `retire`, and `drop` needs the cell
        // exclusively.
        unsafe {
            Arc::increment_strong_count(value);
            Arc::from_raw(value)
        }
    }

    /// Replaces the value. The old value is freed once no reader can reach it. Never waits for readers.
    pub(crate) fn store(&self, value: Arc<T>) {
        let old = self.value.swap(Arc::into_raw(value).cast_mut(), Ordering::SeqCst);
        // SAFETY: the pointer is from `Arc::into_raw`, and the swap transferred the one count that the cell owned.
        retire(Box::new(unsafe { Arc::from_raw(old.cast_const()) }));
    }
}

impl<T: Send + Sync + 'static> Drop for EpochCell<T> {
    fn drop(&mut self) {
        // SAFETY: the cell owns one count, and no guard exists, because guards borrow the cell.
        drop(unsafe { Arc::from_raw(self.value.get_mut().cast_const()) });
    }
}

/// A pinned reference to the value of an [`EpochCell`].
pub(crate) struct EpochGuard<'a, T> {
    /// Not a `&T`: a function that takes the guard as an argument may drop it, and a reference would have to stay
    /// valid until that function returns.
    value: *const T,
    pin: Pin,
    cell: PhantomData<&'a T>,
}

impl<T> EpochGuard<'_, T> {
    /// The pin, for following child links of the value.
    #[inline]
    pub(crate) fn pin(&self) -> &Pin {
        &self.pin
    }
}

impl<T> Deref for EpochGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the pointer was loaded from the cell after the pin was set, so a thread that replaces the value
        // frees it only after the pin ends (see `Pin::new`), and the pin exists as long as the guard is borrowed. The
        // pointer is from an `Arc`, so it is aligned and no `&mut` to its target exists.
        unsafe { &*self.value }
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests race scoped threads, which vfs does not provide")]
pub(crate) mod tests {
    use super::*;

    /// A value that counts the existing values of its kind, and records whether it was dropped.
    struct Tracked {
        number: u64,
        alive: AtomicBool,
        count: Arc<AtomicUsize>,
    }

    impl Tracked {
        fn new(number: u64, count: &Arc<AtomicUsize>) -> Arc<Tracked> {
            count.fetch_add(1, Ordering::SeqCst);
            Arc::new(Tracked { number, alive: AtomicBool::new(true), count: Arc::clone(count) })
        }
    }

    impl Drop for Tracked {
        fn drop(&mut self) {
            self.alive.store(false, Ordering::SeqCst);
            self.count.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Time limit, far above the time that a slow machine needs.
    const WAIT_SECONDS_MAX: u64 = 600;

    /// Waits for a condition on freed values. Other tests of this process may hold a pin at any time.
    #[expect(clippy::disallowed_types, reason = "the wait has a time limit, and this folder imports no clock")]
    pub(crate) fn wait_until(mut condition: impl FnMut() -> bool) {
        let start = std::time::Instant::now();
        loop {
            drop(Pin::new()); // collects garbage
            if condition() {
                return;
            }
            assert!(start.elapsed().as_secs() < WAIT_SECONDS_MAX, "the condition did not become true");
            std::thread::yield_now();
        }
    }

    #[test]
    fn guard_keeps_its_value_until_dropped() {
        let count = Arc::new(AtomicUsize::new(0));
        let alive = || count.load(Ordering::SeqCst);
        let cell = EpochCell::new(Tracked::new(0, &count));
        let first = cell.load();
        for n in 1..=10 {
            cell.store(Tracked::new(n, &count));
        }
        assert!(first.alive.load(Ordering::SeqCst));
        assert_eq!((first.number, cell.load().number), (0, 10));
        assert_eq!(alive(), 11, "all of them were replaced while the guard was held");
        {
            let nested = cell.load();
            drop(first);
            cell.store(Tracked::new(11, &count));
            assert!(nested.alive.load(Ordering::SeqCst), "the inner guard is still a pin");
        }
        wait_until(|| alive() == 1);
        cell.store(Tracked::new(12, &count));
        wait_until(|| alive() == 1);
        drop(cell);
        wait_until(|| alive() == 0);
    }

    /// Regression: a pinned reader waited for a device. Meanwhile every unpin of every thread locked the same mutex.
    #[test]
    fn unpin_takes_no_lock_while_reader_is_pinned() {
        let cell = EpochCell::new(Arc::new(1));
        let reader = cell.load();
        cell.store(Arc::new(2));
        let lock = lock(&GARBAGE);
        let (sender, receiver) = std::sync::mpsc::channel();
        let others = std::thread::spawn(move || {
            (0..1_000).for_each(|_| drop(Pin::new()));
            sender.send(()).unwrap();
        });
        let unpinned = receiver.recv_timeout(std::time::Duration::from_secs(20));
        drop(lock);
        others.join().unwrap();
        assert!(unpinned.is_ok() && *reader == 1);
    }

    #[test]
    fn retire_epoch_ends_when_threads_have_unpinned() {
        let cell = EpochCell::new(Arc::new(5));
        let pin = Pin::new();
        let before = RetireEpoch::advance();
        let read: &i32 = cell.load_pinned(&pin);
        cell.store(Arc::new(6));
        assert_eq!((*read, *cell.load_pinned(&pin)), (5, 6));
        assert!(!before.all_unpinned() && !before.all_unpinned());
        drop(pin);
        wait_until(|| before.all_unpinned());
        let after = RetireEpoch::advance();
        wait_until(|| after.all_unpinned());
    }

    #[test]
    fn readers_see_whole_values_during_store() {
        let count = Arc::new(AtomicUsize::new(0));
        let cell = EpochCell::new(Tracked::new(0, &count));
        let (rounds, last) = if cfg!(miri) { (2, 30) } else { (8, 3_000) };
        for _ in 0..rounds {
            cell.store(Tracked::new(0, &count));
            // Each round starts new threads.
            std::thread::scope(|s| {
                for reader in 0..4 {
                    let cell = &cell;
                    s.spawn(move || {
                        let mut seen = 0;
                        while seen < last {
                            let guard = cell.load();
                            assert!(guard.alive.load(Ordering::SeqCst), "freed under a guard");
                            assert!(guard.number >= seen, "a reader saw an older value after a newer one");
                            seen = guard.number;
                            if reader == 0 {
                                let inner = cell.load();
                                assert!(inner.number >= seen && guard.alive.load(Ordering::SeqCst));
                            }
                        }
                    });
                }
                for n in 1..=last {
                    cell.store(Tracked::new(n, &count));
                }
            });
        }
        wait_until(|| count.load(Ordering::SeqCst) == 1);
    }

    #[test]
    fn concurrent_threads_have_distinct_slots() {
        let threads = if cfg!(miri) { 8 } else { 100 };
        let count = Arc::new(AtomicUsize::new(0));
        let cell = EpochCell::new(Tracked::new(0, &count));
        let barrier = std::sync::Barrier::new(threads + 1);
        std::thread::scope(|s| {
            for _ in 0..threads {
                s.spawn(|| {
                    let guard = cell.load();
                    barrier.wait(); // all threads are pinned
                    barrier.wait(); // the value was replaced
                    assert!(guard.number == 0 && guard.alive.load(Ordering::SeqCst));
                });
            }
            barrier.wait();
            cell.store(Tracked::new(1, &count));
            assert_eq!(count.load(Ordering::SeqCst), 2);
            barrier.wait();
        });
        wait_until(|| count.load(Ordering::SeqCst) == 1);
    }

    #[test]
    fn pins_work_while_a_thread_ends() {
        struct Late(Option<&'static EpochCell<u64>>);
        impl Drop for Late {
            fn drop(&mut self) {
                let cell = self.0.expect("set");
                let outer = cell.load();
                cell.store(Arc::new(*outer + 1));
                assert_eq!(*cell.load(), *outer + 1);
            }
        }
        std::thread_local! {
            static BEFORE: std::cell::RefCell<Late> = const { std::cell::RefCell::new(Late(None)) };
            static AFTER: std::cell::RefCell<Late> = const { std::cell::RefCell::new(Late(None)) };
        }
        static CELL: std::sync::OnceLock<EpochCell<u64>> = std::sync::OnceLock::new();
        let cell = CELL.get_or_init(|| EpochCell::new(Arc::new(0)));
        for _ in 0..3 {
            std::thread::scope(|s| {
                let thread = s.spawn(|| {
                    // One of the two is destroyed before the slot's handle and one after it, in the order that the
                    // platform uses.
                    BEFORE.with(|late| late.borrow_mut().0 = Some(cell));
                    drop(cell.load());
                    AFTER.with(|late| late.borrow_mut().0 = Some(cell));
                });
                thread.join().unwrap(); // the end of the scope alone does not wait for destructors
            });
        }
        assert_eq!(*cell.load(), 6);
    }
}
