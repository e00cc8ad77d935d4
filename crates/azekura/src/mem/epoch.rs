//! A pointer that readers follow without a lock and without a write to a line that others write.
//!
//! Each thread has a slot. Pinning stores the global epoch in it; replacing a value raises the epoch, and the old value
//! is freed once every slot is idle or was pinned at a later epoch. The thread that replaced the value frees it, or, if
//! a reader was pinned at that epoch or before, that reader when it unpins. That may be a reader of anything, under any
//! lock: dropping a value may give memory back and little else, and must not wait.
//!
//! A reader that was pinned later than the oldest replaced value cannot be what keeps it, so it does not look: while
//! one reader waits for a device, the others unpin without a shared write. No unpin ever waits for a lock.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::null_mut;
use std::sync::Arc;

use crate::mem::atomic::{
    AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError, SCHEDULE_EXPLORATION,
    TryLockError, process_wide, spin_loop, thread_local,
};

/// What a slot holds while its thread is not pinned; no epoch gets here.
const IDLE: u64 = u64::MAX;

/// How often `store` looks again whether the readers have left, before it leaves the freeing to them.
const COLLECT_ATTEMPTS_MAX: usize = if SCHEDULE_EXPLORATION { 2 } else { 64 };

process_wide! {
    static EPOCH: AtomicU64 = AtomicU64::new(0);

    /// The list of all slots there ever were. Slots are never freed, only claimed again, so it is as long as the most
    /// threads that were ever pinned at once.
    static SLOTS: AtomicPtr<EpochSlot> = AtomicPtr::new(null_mut());

    /// Replaced values that are not freed yet, with the epoch of their replacement: in the order of epochs, so that a
    /// freeing thread reads the ones to free and one more.
    static GARBAGE: Mutex<VecDeque<(u64, Box<dyn Send>)>> = Mutex::new(VecDeque::new());

    /// The first epoch that does not keep the front of [`GARBAGE`], 0 if that is empty, so that unpinning needs no lock
    /// to see that there is nothing to free. Written under the lock.
    static OLDEST_GARBAGE_END: AtomicU64 = AtomicU64::new(0);

    /// A thread wants to free something. The holder of the lock looks again after it has released it.
    static COLLECT_REQUESTED: AtomicBool = AtomicBool::new(false);
}

/// Number of unpins of a thread after which it frees what it can although it has kept nothing. An unpin may see the
/// state of a moment ago, so the rule alone could leave a value until the next one is replaced.
const UNPINS_PER_COLLECT: usize = if SCHEDULE_EXPLORATION { 2 } else { 64 };

/// One thread's place; two cache lines, because processors fetch lines in pairs.
#[repr(align(128))]
struct EpochSlot {
    /// The epoch of the outermost pin, or [`IDLE`]. Written by the owner, read by freeing threads.
    epoch: AtomicU64,
    /// How many pins are nested. Only the owner touches it.
    depth: AtomicUsize,
    /// Unpins while there was something to free. Only the owner touches it.
    unpins: AtomicUsize,
    /// Whether the slot goes back with its last pin, because its thread's handle is gone. Only the owner touches it.
    release_on_unpin: AtomicBool,
    in_use: AtomicBool,
    /// Set before the slot is in the list, never changed after.
    next: *const EpochSlot,
    /// How many slots come after it in the list: its own number for good.
    number: usize,
}

// SAFETY: everything but `next` and `number` is atomic, and these are not changed once the slot is shared.
unsafe impl Sync for EpochSlot {}

impl EpochSlot {
    /// A slot for this thread only: a free one, or a new one at the head of the list.
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
            // SAFETY: list members are leaked, and were complete before they were published with SeqCst.
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

    /// Gives the slot to the next thread that needs one.
    fn release(&self) {
        self.release_on_unpin.store(false, Ordering::Relaxed);
        self.in_use.store(false, Ordering::Release);
    }
}

/// All slots, claimed or not.
fn slots() -> impl Iterator<Item = &'static EpochSlot> {
    let mut next: *const EpochSlot = SLOTS.load(Ordering::SeqCst);
    std::iter::from_fn(move || {
        // SAFETY: list members are leaked, and were complete before they were published with SeqCst.
        let slot = unsafe { next.as_ref() }?;
        next = slot.next;
        Some(slot)
    })
}

/// A thread's hold on its slot.
struct EpochSlotHandle(&'static EpochSlot);

impl Drop for EpochSlotHandle {
    fn drop(&mut self) {
        if self.0.depth.load(Ordering::Relaxed) == 0 {
            self.0.release();
        } else {
            // A guard outlives the handle; it gives the slot back.
            self.0.release_on_unpin.store(true, Ordering::Relaxed);
        }
    }
}

thread_local! {
    static HANDLE: EpochSlotHandle = EpochSlotHandle(EpochSlot::acquire());
}

/// While it lives, nothing that the thread can reach through an [`EpochCell`] or a link is freed. Stays on its thread;
/// pins of one thread may nest, and only the outermost costs something.
pub(crate) struct Pin {
    slot: &'static EpochSlot,
    on_this_thread: PhantomData<*const ()>,
}

impl Pin {
    /// Hold it inside one call only: nothing at all is freed that is replaced meanwhile.
    #[inline]
    pub(crate) fn new() -> Pin {
        // While a thread ends its handle may be gone already: then the pin has a slot of its own.
        let slot = HANDLE.try_with(|handle| handle.0).unwrap_or_else(|_| {
            let slot = EpochSlot::acquire();
            slot.release_on_unpin.store(true, Ordering::Relaxed);
            slot
        });
        let depth = slot.depth.load(Ordering::Relaxed);
        slot.depth.store(depth + 1, Ordering::Relaxed);
        if depth == 0 {
            // Acquire: a thread that reads an epoch also reads the pointers that were replaced before it began.
            // SeqCst, as is the load of the pointer that follows: either the replacing thread sees this slot pinned,
            // or this thread sees the new pointer.
            slot.epoch.store(EPOCH.load(Ordering::Acquire), Ordering::SeqCst);
        }
        Pin { slot, on_this_thread: PhantomData }
    }

    /// A small number that no other pinned thread has; the earlier owner of the number happened before.
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

/// Frees what no pinned thread can still see, or leaves it to the thread that does so now. True if nothing is left.
#[cold]
fn collect() -> bool {
    COLLECT_REQUESTED.store(true, Ordering::SeqCst);
    while COLLECT_REQUESTED.load(Ordering::SeqCst) {
        let garbage = match GARBAGE.try_lock() {
            Ok(garbage) => garbage,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        COLLECT_REQUESTED.store(false, Ordering::SeqCst);
        drop(take_free(garbage)); // without the lock: dropping a value may replace or free others
    }
    OLDEST_GARBAGE_END.load(Ordering::Relaxed) == 0
}

/// Takes out what no pinned thread can still see.
fn take_free(mut garbage: MutexGuard<'_, VecDeque<(u64, Box<dyn Send>)>>) -> Vec<(u64, Box<dyn Send>)> {
    let mut free = Vec::new();
    loop {
        // SeqCst: see `Pin::new`. A value that reads as pinned or idle after a reader left was stored with Release by
        // that reader, so what it read happened before what is freed here.
        let oldest = slots().map(|slot| slot.epoch.load(Ordering::SeqCst)).min().unwrap_or(IDLE);
        let count = garbage.iter().take_while(|(replaced_at, _)| *replaced_at < oldest).count();
        if count == 0 {
            return free;
        }
        free.extend(garbage.drain(..count));
        // And look again: a reader that kept the new front may have left before it could know.
        OLDEST_GARBAGE_END.store(garbage.front().map_or(0, |(replaced_at, _)| replaced_at + 1), Ordering::SeqCst);
    }
}

/// Keeps `value` until no thread that was pinned before now is pinned any more.
pub(in crate::mem) fn retire(value: Box<dyn Send>) {
    {
        let mut garbage = GARBAGE.lock().unwrap_or_else(PoisonError::into_inner);
        // Pins of a later epoch began after the pointer was replaced.
        let now = EPOCH.fetch_add(1, Ordering::SeqCst);
        garbage.push_back((now, value));
        if garbage.len() == 1 {
            OLDEST_GARBAGE_END.store(now + 1, Ordering::SeqCst);
        }
    }
    // Pins last microseconds, and freeing is no work for readers. But a pinned thread cannot wait for itself.
    let pinned = HANDLE.try_with(|handle| handle.0.depth.load(Ordering::Relaxed) > 0).unwrap_or(true);
    for _ in 0..if pinned { 1 } else { COLLECT_ATTEMPTS_MAX } {
        if collect() {
            break;
        }
        spin_loop();
    }
}

/// A point in time that readers may have to pass, for callers that reuse memory themselves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RetireEpoch(u64);

impl RetireEpoch {
    /// Now: what cannot be come by any more may still be read by threads that were pinned before.
    pub(crate) fn advance() -> RetireEpoch {
        // Pins of a later epoch began after it could not be come by.
        RetireEpoch(EPOCH.fetch_add(1, Ordering::SeqCst))
    }

    /// Whether every thread that was pinned at `self` has unpinned. Never true for a thread that is itself pinned.
    pub(crate) fn all_unpinned(self) -> bool {
        // SeqCst: see `collect`.
        slots().all(|slot| slot.epoch.load(Ordering::SeqCst) > self.0)
    }

    /// Whether no other thread that was pinned before is pinned any more.
    pub(crate) fn others_unpinned(self) -> bool {
        let own = HANDLE.try_with(|handle| handle.0.number).ok();
        slots().all(|slot| Some(slot.number) == own || slot.epoch.load(Ordering::SeqCst) > self.0)
    }
}

/// A shared value that is replaced as a whole; readers never wait and share no cache line with each other.
pub(crate) struct EpochCell<T: Send + Sync + 'static> {
    /// From `Arc::into_raw`; the cell owns one count.
    value: AtomicPtr<T>,
    owned: PhantomData<Arc<T>>,
}

impl<T: Send + Sync + 'static> EpochCell<T> {
    pub(crate) fn new(value: Arc<T>) -> EpochCell<T> {
        EpochCell { value: AtomicPtr::new(Arc::into_raw(value).cast_mut()), owned: PhantomData }
    }

    /// The value of now. The guard keeps it, and everything else that is replaced meanwhile in any cell, from being
    /// freed: hold it inside one call only, and clone what must live longer.
    #[inline]
    pub(crate) fn load(&self) -> EpochGuard<'_, T> {
        let pin = Pin::new();
        EpochGuard { value: self.value.load(Ordering::SeqCst).cast_const(), pin, cell: PhantomData }
    }

    /// The current value, for a caller that is pinned already.
    #[inline]
    pub(crate) fn load_pinned<'p>(&'p self, _pinned: &'p Pin) -> &'p T {
        // SAFETY: as in `EpochGuard::deref`: the pointer is the cell's after the pin was set, and the pin lives for 'p;
        // the cell itself is borrowed for 'p, so it is not dropped with the count that it owns.
        unsafe { &*self.value.load(Ordering::SeqCst) }
    }

    /// The value of now, to keep.
    pub(crate) fn load_arc(&self) -> Arc<T> {
        let _pin = Pin::new();
        let value = self.value.load(Ordering::SeqCst).cast_const();
        // SAFETY: from `Arc::into_raw`, and while this thread is pinned the count that the cell owns, or owned when
        // it was read, exists: `store` leaves it to freeing threads, and `drop` needs the cell exclusively.
        unsafe {
            Arc::increment_strong_count(value);
            Arc::from_raw(value)
        }
    }

    /// Puts `value` in; the old one is freed as soon as no reader can see it. Never waits for readers.
    pub(crate) fn store(&self, value: Arc<T>) {
        let old = self.value.swap(Arc::into_raw(value).cast_mut(), Ordering::SeqCst);
        // SAFETY: from `Arc::into_raw`, and the swap took over the one count that the cell owned.
        retire(Box::new(unsafe { Arc::from_raw(old.cast_const()) }));
    }
}

impl<T: Send + Sync + 'static> Drop for EpochCell<T> {
    fn drop(&mut self) {
        // SAFETY: the cell owns one count, and guards borrow the cell, so there are none.
        drop(unsafe { Arc::from_raw(self.value.get_mut().cast_const()) });
    }
}

/// A pinned reference to the value of an [`EpochCell`].
pub(crate) struct EpochGuard<'a, T> {
    /// No `&T`: that would have to stay good until a function that takes the guard returns, though it drops the guard.
    value: *const T,
    pin: Pin,
    cell: PhantomData<&'a T>,
}

impl<T> EpochGuard<'_, T> {
    /// The pin, for what is reached from the value by links.
    #[inline]
    pub(crate) fn pin(&self) -> &Pin {
        &self.pin
    }
}

impl<T> Deref for EpochGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the pointer was the cell's after the pin was set, so a thread that replaces it frees it only after
        // the pin ends (see `Pin::new`), and the pin lives as long as the borrow of the guard. It comes from an
        // `Arc`, so it is aligned and no `&mut` to its target exists.
        unsafe { &*self.value }
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests race threads, and in vfs none are scoped")]
pub(crate) mod tests {
    use super::*;

    /// Knows how many of its kind are alive, and whether it is.
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

    /// Other tests of this process may hold a pin at any moment; they let go soon.
    pub(crate) fn wait_until(mut what: impl FnMut() -> bool) {
        for _ in 0..1_000_000 {
            drop(Pin::new()); // frees what can be freed
            if what() {
                return;
            }
            std::thread::yield_now();
        }
        panic!("was never so");
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
            assert!(nested.alive.load(Ordering::SeqCst), "the inner guard still pins");
        }
        wait_until(|| alive() == 1);
        cell.store(Tracked::new(12, &count));
        wait_until(|| alive() == 1);
        drop(cell);
        wait_until(|| alive() == 0);
    }

    /// While a reader waited for a device with its pin held, every unpin of every thread took one lock.
    #[test]
    fn unpin_takes_no_lock_while_reader_is_pinned() {
        let cell = EpochCell::new(Arc::new(1));
        let asleep = cell.load();
        cell.store(Arc::new(2));
        let lock = GARBAGE.lock().unwrap_or_else(PoisonError::into_inner);
        let (tell, told) = std::sync::mpsc::channel();
        let others = std::thread::spawn(move || {
            (0..1_000).for_each(|_| drop(Pin::new()));
            tell.send(()).unwrap();
        });
        let unpinned = told.recv_timeout(std::time::Duration::from_secs(20));
        drop(lock);
        others.join().unwrap();
        assert!(unpinned.is_ok() && *asleep == 1);
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
            // Threads come and go with every round.
            std::thread::scope(|s| {
                for reader in 0..4 {
                    let cell = &cell;
                    s.spawn(move || {
                        let mut seen = 0;
                        while seen < last {
                            let guard = cell.load();
                            assert!(guard.alive.load(Ordering::SeqCst), "freed under a guard");
                            assert!(guard.number >= seen, "an older value came back");
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
                    barrier.wait(); // everyone is pinned
                    barrier.wait(); // it was replaced
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
                    // One is destroyed before the slot's handle and one after it, in whatever order the system has.
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
