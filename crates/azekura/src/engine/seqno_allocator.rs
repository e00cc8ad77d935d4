//! Sequence numbers of concurrent single changes.

use crate::base::SeqNo;
use crate::base::sync::{CachePadded, WakeSignal};
use crate::engine::LastVisibleSeqno;
use crate::mem::atomic::{AtomicU64, AtomicUsize, Ordering, SCHEDULE_EXPLORATION, spin_loop, yield_now};

/// Size of the completion ring: how many sequence numbers may be finished ahead of the oldest unfinished one. A power
/// of two.
const COMPLETION_RING_SIZE: u64 = if SCHEDULE_EXPLORATION { 2 } else { 256 };
/// Bit of [`SeqnoAllocator::next`] that is set while allocation is closed. Sequence numbers have 56 bits.
const GATE_CLOSED: u64 = 1 << 63;
/// Sequence numbers below the maximum that are reserved for the thread that closed allocation (the group-commit
/// leader).
const LEADER_SEQNO_HEADROOM: u64 = 1 << 20;
/// A waiting thread spins `SPIN_ROUNDS` times, yields `YIELD_ROUNDS` times, and then sleeps `SLEEP_MS` milliseconds
/// per round.
const SPIN_ROUNDS: usize = if SCHEDULE_EXPLORATION { 0 } else { 64 };
const YIELD_ROUNDS: usize = if SCHEDULE_EXPLORATION { usize::MAX } else { 256 };
const SLEEP_MS: u64 = 10;

/// Allocates sequence numbers to concurrent single changes, and publishes them in order.
///
/// A thread allocates a sequence number, makes its change, and finishes the number. Numbers become visible in
/// ascending order without gaps, so no reader sees a change before all changes with lower numbers are made. From its
/// allocation until it is visible a change is *in progress*. The group-commit leader assigns numbers of its own: it
/// closes allocation and waits until no change is in progress. No counter is needed, because the changes in progress
/// are the numbers between the last visible and the last allocated one. Before the first single change, allocation is
/// closed and the leader need not close it.
///
/// A number whose change failed partway is *failed*: no higher number ever becomes visible, and allocation stays
/// closed. Thread safe.
#[derive(Debug)]
pub(crate) struct SeqnoAllocator {
    /// The next sequence number to allocate, and [`GATE_CLOSED`].
    next: CachePadded<AtomicU64>,
    visible: LastVisibleSeqno,
    /// Completion ring: slot `n % COMPLETION_RING_SIZE` holds `n` if `n` was finished while a lower number was
    /// unfinished.
    finished: Box<[AtomicU64]>,
    /// The lowest failed sequence number; `u64::MAX` if there is none.
    lowest_failed: AtomicU64,
    /// Allocated numbers that will never be visible and have no thread any more: the failed ones, and higher ones
    /// whose threads gave up waiting.
    abandoned: AtomicU64,
    /// Number of sleeping threads.
    sleepers: AtomicUsize,
    wakeup: WakeSignal,
}

impl SeqnoAllocator {
    /// Starts after the last visible sequence number, with allocation closed until the first
    /// [`resume`](SeqnoAllocator::resume). Only the thread that closed allocation may publish directly.
    pub(crate) fn new(visible: LastVisibleSeqno) -> SeqnoAllocator {
        let next = visible.get().0 + 1;
        SeqnoAllocator {
            next: CachePadded(AtomicU64::new(next | GATE_CLOSED)),
            visible,
            finished: (0..COMPLETION_RING_SIZE).map(|_| AtomicU64::new(0)).collect(),
            lowest_failed: AtomicU64::new(u64::MAX),
            abandoned: AtomicU64::new(0),
            sleepers: AtomicUsize::new(0),
            wakeup: WakeSignal::default(),
        }
    }

    /// Allocates the next sequence number, or returns `None` while allocation is closed. The caller must
    /// [finish](SeqnoAllocator::finish) or [fail](SeqnoAllocator::fail) it.
    #[inline]
    pub(crate) fn try_allocate(&self) -> Option<SeqNo> {
        let mut next = self.next.0.load(Ordering::Relaxed);
        // While allocation is closed, `next` is above every sequence number.
        while next < SeqNo::MAX.0 - LEADER_SEQNO_HEADROOM {
            match self.next.0.compare_exchange_weak(next, next + 1, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Some(SeqNo(next)),
                Err(other) => next = other,
            }
        }
        None
    }

    /// Returns the next sequence number; it may already be outdated.
    pub(crate) fn next(&self) -> SeqNo {
        SeqNo(self.next.0.load(Ordering::Relaxed) & !GATE_CLOSED)
    }

    /// Marks the change of `seqno` as made. It becomes visible at once, or when all lower numbers are finished.
    #[inline]
    pub(crate) fn finish(&self, seqno: SeqNo) {
        let visible = &self.visible.0.0;
        if visible.load(Ordering::Acquire) + 1 == seqno.0 {
            // No other thread advances from here, because this number was not entered in the ring.
            visible.store(seqno.0, Ordering::SeqCst);
        } else {
            // Waits until the slot is free: a lower number that shares it may be finished but not yet visible.
            if !self.wait_for(seqno, |now| now + COMPLETION_RING_SIZE >= seqno.0) {
                return;
            }
            self.finished[(seqno.0 % COMPLETION_RING_SIZE) as usize].store(seqno.0, Ordering::SeqCst);
        }
        // Either this thread sees that the next number is finished, or the thread of that number sees the new visible
        // number, because the four accesses have one total order (`SeqCst`).
        loop {
            let now = visible.load(Ordering::SeqCst);
            let next = now + 1;
            if self.finished[(next % COMPLETION_RING_SIZE) as usize].load(Ordering::SeqCst) != next {
                break;
            }
            let _another_did = visible.compare_exchange(now, next, Ordering::SeqCst, Ordering::Relaxed);
        }
        self.wake_sleepers();
    }

    /// Waits until the finished number `seqno` is visible; returns false if a lower number failed.
    #[inline]
    pub(crate) fn wait_until_visible(&self, seqno: SeqNo) -> bool {
        self.visible.get() >= seqno || self.wait_for(seqno, |now| now >= seqno.0) || {
            self.abandon();
            false
        }
    }

    /// Marks the change of `seqno` as failed; it may have been made in part.
    #[cold]
    pub(crate) fn fail(&self, seqno: SeqNo) {
        self.next.0.fetch_or(GATE_CLOSED, Ordering::SeqCst);
        self.lowest_failed.fetch_min(seqno.0, Ordering::SeqCst);
        self.abandon();
    }

    #[cold]
    fn abandon(&self) {
        self.abandoned.fetch_add(1, Ordering::SeqCst);
        self.wakeup.notify_all();
    }

    /// Closes allocation, and waits until no change is in progress. Afterwards the last allocated number is visible,
    /// unless a number failed. At most one thread may call this at a time.
    pub(crate) fn close_gate(&self) {
        let next = self.next.0.fetch_or(GATE_CLOSED, Ordering::SeqCst) & !GATE_CLOSED;
        if self.visible.get().0 + 1 != next {
            self.wait_for(SeqNo::ZERO, |now| next - 1 - now == self.abandoned.load(Ordering::SeqCst));
        }
    }

    /// Resumes after [`close_gate`](SeqnoAllocator::close_gate): the next number follows the last visible one.
    /// Allocation opens if `allow` is true. Does nothing if a number failed.
    pub(crate) fn resume(&self, allow: bool) {
        if self.lowest_failed.load(Ordering::Relaxed) == u64::MAX {
            let next = self.visible.get().0 + 1;
            self.next.0.store(if allow { next } else { next | GATE_CLOSED }, Ordering::Release);
        }
    }

    /// Spins for at most `SPIN_ROUNDS` rounds until allocation is open.
    pub(crate) fn spin_until_open(&self) {
        for _ in 0..SPIN_ROUNDS {
            if self.next.0.load(Ordering::Relaxed) & GATE_CLOSED == 0 {
                return;
            }
            spin_loop();
        }
    }

    /// Waits until `wanted` is true of the visible number; returns false if a number below `seqno` failed.
    fn wait_for(&self, seqno: SeqNo, wanted: impl Fn(u64) -> bool) -> bool {
        for round in 0usize.. {
            // Read before the visible number: numbers below the failed one may still become visible.
            let lost = self.lowest_failed.load(Ordering::SeqCst) < seqno.0;
            if wanted(self.visible.0.0.load(Ordering::SeqCst)) {
                return true;
            }
            if lost {
                return false;
            }
            match round {
                _ if round < SPIN_ROUNDS => spin_loop(),
                _ if round < SPIN_ROUNDS.saturating_add(YIELD_ROUNDS) => yield_now(),
                _ => self.sleep(&wanted),
            }
        }
        false
    }

    #[cold]
    fn sleep(&self, wanted: &impl Fn(u64) -> bool) {
        let rings = self.wakeup.generation();
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        if !wanted(self.visible.0.0.load(Ordering::SeqCst)) {
            self.wakeup.wait_past(rings, SLEEP_MS);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    #[inline]
    fn wake_sleepers(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wakeup.notify_all();
        }
    }
}
