//! The contract of a tree: what a partition asks of the engine behind it.
//!
//! `db` owns sequence numbers, the log and the manifest; a tree owns where its records lie. Work that takes long is
//! split in two: the tree *chooses* a [`Task`] from plain values, and *runs* it when told to, so that background
//! threads and a test that runs one task at a time are the same thing.

use std::ops::Bound;
use std::sync::Arc;

use crate::base::sync::{CachePadded, WakeSignal};
use crate::base::version_edit::VersionEdit;
use crate::base::{EntryRef, Result, SeqNo};
use crate::iter::InternalIter;
use crate::mem::atomic::{
    AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError, SCHEDULE_EXPLORATION, spin_loop, yield_now,
};
use crate::mem::slice::Slice;

/// What a tree tells `db` about its state when asked whether writers should be slowed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Pressure {
    /// Bytes held in memory that wait to be flushed (sealed memtables).
    pub(crate) sealed_bytes: u64,
    /// Sealed memtables that wait to be flushed.
    pub(crate) sealed_memtables: usize,
    /// Bytes that compaction should move before reads are back to normal.
    pub(crate) compaction_debt: u64,
    /// Runs that a point lookup may have to look into on the youngest level.
    pub(crate) l0_runs: usize,
}

/// One piece of maintenance that a tree wants done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Task {
    /// Turn the oldest sealed memtables into tables.
    Flush,
    /// Merge or move tables.
    Compact,
    /// Copy live values out of stale blob files.
    BlobGc,
}

/// The moment a read sees.
///
/// A plain read must take the tree's state **first** and the visible sequence number **after** it: the other way round,
/// a flush in between may drop the version that the older number still needs. So the tree itself resolves `Latest`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadSeqno {
    /// The newest published commit at the time the tree's state was taken.
    Latest,
    /// A registered snapshot's sequence number.
    At(SeqNo),
}

/// The newest sequence number whose commit every reader may see; moved by `db`, by whole commits, read by the trees.
#[derive(Clone, Debug, Default)]
pub(crate) struct LastVisibleSeqno(Arc<CachePadded<AtomicU64>>);

impl LastVisibleSeqno {
    #[inline]
    pub(crate) fn get(&self) -> SeqNo {
        SeqNo(self.0.0.load(Ordering::Acquire))
    }

    pub(crate) fn publish(&self, seqno: SeqNo) {
        self.0.0.store(seqno.0, Ordering::Release);
    }
}

/// So many numbers may be done before one that is not: a power of two.
const COMPLETION_RING_SIZE: u64 = if SCHEDULE_EXPLORATION { 2 } else { 256 };
/// The bit of [`SeqnoAllocator::next`] that says that the gate is closed; numbers have 56 bits.
const GATE_CLOSED: u64 = 1 << 63;
/// Who takes numbers one by one stops so far before the last one, and leaves these to who holds the gate.
const LEADER_SEQNO_HEADROOM: u64 = 1 << 20;
/// Who waits for another thread spins so often, gives its turn away so often, and then sleeps so long at a time, in
/// milliseconds.
const SPIN_ROUNDS: usize = if SCHEDULE_EXPLORATION { 0 } else { 64 };
const YIELD_ROUNDS: usize = if SCHEDULE_EXPLORATION { usize::MAX } else { 256 };
const SLEEP_MS: u64 = 10;

/// Sequence numbers for single changes that are made beside each other: who takes which, and when they are seen.
///
/// A change takes a number, is made, and is then done; what is visible goes on from one number to the next, so nobody
/// sees a change before all that have lower numbers are made. Between a number's taking and its being visible its
/// change is *under way*. Who wants none under way (the leader of a group, who gives out numbers of its own) closes
/// the gate and waits for those who are inside. There need be no count of these: it is what lies between the last
/// number taken and the visible one.
///
/// A number whose change failed midway is *lost*: nothing behind it ever becomes visible, and the gate stays closed.
/// Thread safe.
#[derive(Debug)]
pub(crate) struct SeqnoAllocator {
    /// The next number, with [`GATE_CLOSED`].
    next: CachePadded<AtomicU64>,
    visible: LastVisibleSeqno,
    /// At a number's place stands the number if it is done and was not the one after the visible one.
    finished: Box<[AtomicU64]>,
    /// The lowest number that was lost, `u64::MAX` if none was.
    lowest_failed: AtomicU64,
    /// Those under way that nobody makes visible any more: the lost ones, and those above them whose threads have left.
    abandoned: AtomicU64,
    /// Threads that sleep.
    sleepers: AtomicUsize,
    wakeup: WakeSignal,
}

impl SeqnoAllocator {
    /// Goes on behind what is visible. Nobody else may publish but who holds the gate.
    pub(crate) fn new(visible: LastVisibleSeqno) -> SeqnoAllocator {
        let next = visible.get().0 + 1;
        SeqnoAllocator {
            next: CachePadded(AtomicU64::new(next)),
            visible,
            finished: (0..COMPLETION_RING_SIZE).map(|_| AtomicU64::new(0)).collect(),
            lowest_failed: AtomicU64::new(u64::MAX),
            abandoned: AtomicU64::new(0),
            sleepers: AtomicUsize::new(0),
            wakeup: WakeSignal::default(),
        }
    }

    /// The next number, which the caller has to [finish](SeqnoAllocator::finish) or [lose](SeqnoAllocator::fail); none
    /// while the gate is closed.
    #[inline]
    pub(crate) fn try_allocate(&self) -> Option<SeqNo> {
        let mut next = self.next.0.load(Ordering::Relaxed);
        // With the gate closed it is beyond all numbers.
        while next < SeqNo::MAX.0 - LEADER_SEQNO_HEADROOM {
            match self.next.0.compare_exchange_weak(next, next + 1, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Some(SeqNo(next)),
                Err(other) => next = other,
            }
        }
        None
    }

    /// About the next number.
    pub(crate) fn next(&self) -> SeqNo {
        SeqNo(self.next.0.load(Ordering::Relaxed) & !GATE_CLOSED)
    }

    /// The change of `seqno` is made. It is visible at once, or when the last one before it is done.
    #[inline]
    pub(crate) fn finish(&self, seqno: SeqNo) {
        let visible = &self.visible.0.0;
        if visible.load(Ordering::Acquire) + 1 == seqno.0 {
            // Nobody else goes on from there: that this one is done stands nowhere.
            visible.store(seqno.0, Ordering::SeqCst);
        } else {
            // Its place may be that of another which nobody has seen to be done yet.
            if !self.wait_for(seqno, |now| now + COMPLETION_RING_SIZE >= seqno.0) {
                return;
            }
            self.finished[(seqno.0 % COMPLETION_RING_SIZE) as usize].store(seqno.0, Ordering::SeqCst);
        }
        // Either this sees that the next one is done, or its thread sees what is visible now: all four are in one
        // order.
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

    /// Waits until `seqno`, which is done, is visible; false if it never will be.
    #[inline]
    pub(crate) fn wait_until_visible(&self, seqno: SeqNo) -> bool {
        self.visible.get() >= seqno || self.wait_for(seqno, |now| now >= seqno.0) || {
            self.abandon();
            false
        }
    }

    /// The change of `seqno` failed, and nobody knows how much of it was made.
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

    /// Closes the gate, and waits until no change is under way: what is visible then is the last number there is, or
    /// some were lost. For one thread at a time.
    pub(crate) fn close_gate(&self) {
        let next = self.next.0.fetch_or(GATE_CLOSED, Ordering::SeqCst) & !GATE_CLOSED;
        if self.visible.get().0 + 1 != next {
            self.wait_for(SeqNo::ZERO, |now| next - 1 - now == self.abandoned.load(Ordering::SeqCst));
        }
    }

    /// Ends what [`close`](SeqnoAllocator::close_gate) began: numbers go on behind what is visible. The gate is open
    /// then, if it shall be and no number was lost.
    pub(crate) fn open_gate(&self, open: bool) {
        if self.lowest_failed.load(Ordering::Relaxed) == u64::MAX {
            let next = self.visible.get().0 + 1;
            self.next.0.store(if open { next } else { next | GATE_CLOSED }, Ordering::Release);
        }
    }

    /// Waits a little while for the gate to be open.
    pub(crate) fn spin_until_open(&self) {
        for _ in 0..SPIN_ROUNDS {
            if self.next.0.load(Ordering::Relaxed) & GATE_CLOSED == 0 {
                return;
            }
            spin_loop();
        }
    }

    /// Waits until what is visible is as wanted; false if it will not be, because a number below `seqno` was lost.
    fn wait_for(&self, seqno: SeqNo, wanted: impl Fn(u64) -> bool) -> bool {
        for round in 0usize.. {
            // First: what was done before the loss may still become visible, and nothing behind it.
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

/// The sequence numbers at which snapshots and iterators read, each with the number of its readers.
///
/// A reader registers *while* it chooses its number: flushes and compactions ask for the list under the same lock, so a
/// version is dropped only if no present reader needs it and every later reader looks at a later moment.
#[derive(Debug)]
pub(crate) struct SnapshotList {
    visible: LastVisibleSeqno,
    /// Ascending; a vector, because most readers come and go at its end.
    registered: Mutex<Vec<(SeqNo, usize)>>,
}

impl SnapshotList {
    pub(crate) fn new(visible: LastVisibleSeqno) -> Arc<SnapshotList> {
        Arc::new(SnapshotList { visible, registered: Mutex::default() })
    }

    fn lock_registered(&self) -> MutexGuard<'_, Vec<(SeqNo, usize)>> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a reader of the newest published commit.
    pub(crate) fn register(self: &Arc<Self>) -> SnapshotGuard {
        let mut held = self.lock_registered();
        let at = self.visible.get();
        match held.last_mut() {
            Some((last, readers)) if *last == at => *readers += 1,
            _ => held.push((at, 1)), // what is visible only rises
        }
        SnapshotGuard { seqno: at, list: Arc::clone(self) }
    }

    /// All moments that are looked at, ascending, ending with the newest published commit.
    pub(crate) fn seqnos(&self) -> Vec<SeqNo> {
        let held = self.lock_registered();
        let mut list: Vec<SeqNo> = held.iter().map(|(at, _)| *at).collect();
        let newest = self.visible.get();
        if list.last() != Some(&newest) {
            list.push(newest);
        }
        list
    }

    /// No reader looks, or will look, at a moment before this.
    pub(crate) fn oldest(&self) -> SeqNo {
        let held = self.lock_registered();
        held.first().map_or_else(|| self.visible.get(), |(at, _)| *at)
    }

    /// The newest published commit.
    #[inline]
    pub(crate) fn visible(&self) -> SeqNo {
        self.visible.get()
    }

    /// Readers that are registered.
    pub(crate) fn count(&self) -> usize {
        self.lock_registered().iter().map(|(_, readers)| readers).sum()
    }
}

/// One reader's registration; ends when dropped.
#[derive(Debug)]
pub(crate) struct SnapshotGuard {
    seqno: SeqNo,
    list: Arc<SnapshotList>,
}

impl SnapshotGuard {
    pub(crate) fn seqno(&self) -> SeqNo {
        self.seqno
    }
}

impl Clone for SnapshotGuard {
    fn clone(&self) -> SnapshotGuard {
        let mut held = self.list.lock_registered();
        if let Ok(i) = held.binary_search_by_key(&self.seqno, |(at, _)| *at) {
            held[i].1 += 1;
        }
        drop(held);
        SnapshotGuard { seqno: self.seqno, list: Arc::clone(&self.list) }
    }
}

impl Drop for SnapshotGuard {
    fn drop(&mut self) {
        let mut held = self.list.lock_registered();
        if let Ok(i) = held.binary_search_by_key(&self.seqno, |(at, _)| *at) {
            held[i].1 -= 1;
            if held[i].1 == 0 {
                held.remove(i);
            }
        }
    }
}

/// What a tree needs from `db` while it runs a task.
pub(crate) trait EngineHost: Send + Sync {
    /// Returns once every record up to `seqno` is durable in the log. An edit that makes records permanent may only be
    /// committed after this, or power loss could keep half of a commit.
    fn sync_wal_through(&self, through: SeqNo) -> Result<()>;

    /// The last sequence number that the log has; pools may have used later ones.
    fn wal_end(&self) -> SeqNo;

    /// Every record up to here is durable in the log already.
    fn wal_synced_through(&self) -> SeqNo {
        SeqNo::ZERO
    }

    /// Writes the edits to the manifest as one batch and syncs it.
    fn commit_edits(&self, edits: &[VersionEdit]) -> Result<()>;

    /// The sequence numbers that snapshots read at, ascending, ending with the one that new readers get now. Taken
    /// before the output of a task is decided. A version may go if it is neither the newest at or below one of these
    /// points nor above the last of them: readers that come later choose a point at or above the last.
    fn snapshot_seqnos(&self) -> Vec<SeqNo>;

    /// Milliseconds since 1970.
    fn now_ms(&self) -> u64;

    /// Whether the task should stop soon because the database closes or more urgent work waits.
    fn should_yield(&self) -> bool;
}

/// What a task did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TaskReport {
    pub(crate) level: u8,
    pub(crate) tables: u64,
    pub(crate) bytes_read: u64,
    pub(crate) bytes_written: u64,
    /// Of blob files, those written again taken off.
    pub(crate) bytes_freed: u64,
}

impl TaskReport {
    /// It yielded, or found nothing to do: another was at it.
    pub(crate) fn is_idle(&self) -> bool {
        self.tables == 0 && self.bytes_read == 0 && self.bytes_written == 0
    }
}

/// Where the keys that a reader wants begin and end.
pub(crate) type KeyBounds<'a> = (Bound<&'a Vec<u8>>, Bound<&'a Vec<u8>>);

/// One moment of a tree, from which any number of cursors can be made at any later time. What is written meanwhile may
/// show in it, under sequence numbers above those that were published when it was taken.
pub(crate) trait EngineView: Send + Sync {
    /// A cursor over the versions of all keys of that moment: all that a reader at `at`, which is registered for as
    /// long as the cursor lives, may have to see within `bounds`, and perhaps others. It owns what it walks. A tree
    /// that steps over keys by itself does so within `bounds` only.
    fn iter(&self, at: SeqNo, bounds: KeyBounds<'_>) -> Result<Box<dyn InternalIter>>;

    /// Reads what entries of that moment point to. It owns what it needs.
    fn blob_resolver(&self) -> Box<dyn BlobResolver>;
}

/// Values that stand elsewhere than their entries do, for one who asks for one after the other.
pub(crate) trait BlobResolver: Send {
    /// The value of an entry of kind [`BlobPointer`](crate::base::RecordKind::BlobPointer) that holds `pointer`.
    ///
    /// # Errors
    /// `Corruption` if there is no such value, and those of reading it.
    fn resolve(&mut self, pointer: &[u8]) -> Result<Slice>;
}

/// Space that a tree has set aside for one record: where it begins, and how long it is.
pub(crate) type RecordReservation = (u64, u64);

/// What stands behind a partition.
pub(crate) trait Engine: Send + Sync {
    /// Puts one record into memory. The caller holds the commit order: records arrive with rising sequence numbers, and
    /// become visible only when `db` publishes them. `room` is what was set aside for it, by a tree that does so. True
    /// if a memtable is full now and wants to be flushed.
    fn apply(&self, entry: EntryRef<'_>, reservation: Option<RecordReservation>) -> Result<bool>;

    /// The value of `key` as of `at`.
    fn get(&self, key: &[u8], at: ReadSeqno) -> Result<Option<Slice>>;

    /// The length of the value of `key` as of `at`.
    fn size_of(&self, key: &[u8], at: ReadSeqno) -> Result<Option<u32>>;

    /// The tree as it is now, kept for as long as it is held.
    fn view(&self) -> Box<dyn EngineView>;

    /// Every record of this tree up to here was in tables already at the last flush: replay skips those.
    fn flushed_through(&self) -> SeqNo;

    /// The lowest sequence number among the records that only memory (and the log) holds; `None` if there are none.
    fn first_unflushed(&self) -> Option<SeqNo>;

    /// Makes everything applied so far a candidate for [`Task::Flush`].
    fn seal(&self);

    /// The most urgent piece of maintenance, if there is any that is not of a kind that is `held` back; `forced` also
    /// chooses compactions that only `major_compact` wants.
    fn next_task(&self, forced: bool, held: &[Task]) -> Option<Task>;

    /// Runs one task to its end.
    fn run(&self, task: Task, forced: bool, host: &dyn EngineHost) -> Result<TaskReport>;

    /// How far behind maintenance is.
    fn pressure(&self) -> Pressure;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_each_moment_once_and_the_newest_always() {
        let visible = LastVisibleSeqno::default();
        let points = SnapshotList::new(visible.clone());
        assert_eq!(points.seqnos(), [SeqNo(0)]);
        visible.publish(SeqNo(5));
        let (a, b) = (points.register(), points.register());
        visible.publish(SeqNo(9));
        let c = points.register();
        assert_eq!(points.seqnos(), [SeqNo(5), SeqNo(9)]);
        assert_eq!((points.oldest(), points.visible()), (SeqNo(5), SeqNo(9)));
        drop(a);
        let d = b.clone();
        drop(b);
        visible.publish(SeqNo(12));
        assert_eq!(points.seqnos(), [SeqNo(5), SeqNo(9), SeqNo(12)]);
        assert_eq!(points.count(), 2);
        drop((c, d));
        assert_eq!(points.seqnos(), [SeqNo(12)]);
        assert_eq!(points.oldest(), SeqNo(12));
    }
}
