//! Group commit: one leader at a time appends the commits of all waiting threads to the write-ahead log (WAL).
//!
//! The steps of a commit:
//! 1. A thread that finds no leader becomes the leader; any other thread queues its commit and waits.
//! 2. The leader takes every queued commit, assigns sequence numbers, and appends all of them to the WAL in one call.
//! 3. The leader applies them to the memtables in order and publishes the last sequence number: they are now visible.
//! 4. The leader wakes its followers and hands leadership to the first commit that was queued meanwhile.
//! 5. A thread that requested more than [`Buffer`](crate::PersistMode::Buffer) waits for the WAL sync itself; threads
//!    share syncs. A commit that did not request a sync never waits for one, unless it is queued behind a batch for a
//!    pool that is durable without the WAL, because that batch is synced before it is applied.
//!
//! A single change of a pool bypasses these steps ([`Committer::commit_single`]): its own thread makes it, concurrently
//! with other single changes. [`SeqnoAllocator`] allocates their sequence numbers and publishes them in order. If the
//! change is logged, it is appended when its number is allocated. The leader closes allocation and waits until no
//! single change is in progress. A thread that finds allocation closed waits and retries after it is opened; the leader
//! opens it at each handover while such threads wait. After `GATE_ATTEMPTS` attempts the thread queues for leadership.
//!
//! Thread safety: `leading` is the lock. The thread that set it may append, apply and publish, and must hand leadership
//! over or clear it, also after a panic.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::base::sync::lock;
use crate::base::{EntryRef, Error, ErrorKind, Result, SeqNo};
use crate::db::catalog::PartitionState;
use crate::db::state::disk_reserve::DiskReserve;
use crate::db::state::event_queue::DbPoison;
use crate::engine::{Engine, LastVisibleSeqno, RecordReservation, SeqnoAllocator};
use crate::pmem::pool::{AssignSeqnoFn, PmemEngine};
use crate::wal::batch_codec::{WalRecord, WalRecordIter, seqno_gap_commits};
use crate::wal::{Wal, WalCommit};

/// A commit that is ready to be written.
#[derive(Clone, Copy)]
pub(crate) struct CommitRequest<'a> {
    pub(crate) payload: &'a [u8],
    /// Records in the payload, at least 1.
    pub(crate) count: u32,
    /// All partitions in the payload.
    pub(crate) partitions: &'a [Arc<PartitionState>],
    /// Space that pools reserved for the values, in payload order.
    pub(crate) reservations: &'a [RecordReservation],
    pub(crate) path: CommitPath,
}

/// How a commit becomes durable. Single changes of pools use [`Committer::commit_single`] instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommitPath {
    /// Through the WAL.
    Logged,
    /// Through the WAL, which must be durable before the commit is applied, because a pool that is durable without
    /// the WAL must not contain part of a commit.
    SyncBeforeApply,
}

/// Result of a commit, or of the group it was written with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommitOutcome {
    /// The last sequence number.
    pub(crate) last: SeqNo,
    /// Whether a memtable became full and needs a flush.
    pub(crate) sealed: bool,
}

impl<'a> CommitRequest<'a> {
    /// Returns whether the commit contains only removals.
    pub(crate) fn only_removes(&self) -> bool {
        WalRecordIter::new(self.payload).all(|record| record.is_ok_and(|record| record.kind.is_removal()))
    }

    /// Assigns the commit's sequence numbers.
    fn wal_commit(&self, next: &mut SeqNo) -> WalCommit<'a> {
        let first = *next;
        *next = first.plus(u64::from(self.count));
        WalCommit { first_seqno: first, seqno_count: self.count, payload: self.payload }
    }
}

/// A queued commit, owned because its thread sleeps.
struct QueuedCommit {
    payload: Vec<u8>,
    count: u32,
    partitions: Vec<Arc<PartitionState>>,
    reservations: Vec<RecordReservation>,
    path: CommitPath,
    state: Mutex<QueuedCommitState>,
    woken: Condvar,
}

enum QueuedCommitState {
    Waiting,
    BecomeLeader,
    /// There is no leader, or there was none for a moment: single changes may retry.
    Retry,
    Done(Result<CommitOutcome>),
}

#[derive(Default)]
struct CommitQueue {
    has_leader: bool,
    /// Commits that wait for the leader, in queue order.
    waiting: VecDeque<Arc<QueuedCommit>>,
    /// Single changes that found allocation closed, at most one per thread. They do not queue for leadership, because
    /// allocation would then stay closed as long as one of them is queued.
    gate_waiters: Vec<Arc<QueuedCommit>>,
}

/// Attempts of a single change while allocation is closed, before it queues for leadership.
const GATE_ATTEMPTS: usize = 3;

/// Serializes all writes: group commit and single changes of pools. Thread safe.
pub(crate) struct Committer {
    queue: Mutex<CommitQueue>,
    wal: Arc<Wal>,
    last_visible: LastVisibleSeqno,
    seqnos: SeqnoAllocator,
    poison: Arc<DbPoison>,
    reserve: Arc<DiskReserve>,
    /// Set between two commits, so that no commit follows the one that closing takes as the last.
    closed: AtomicBool,
    /// Last visible sequence number at creation.
    start: SeqNo,
    /// Used by leaders.
    commits: AtomicU64,
    records: AtomicU64,
}

impl Committer {
    /// Starts after the last visible sequence number.
    pub(crate) fn new(
        wal: Arc<Wal>,
        visible: LastVisibleSeqno,
        poison: Arc<DbPoison>,
        reserve: Arc<DiskReserve>,
    ) -> Committer {
        let (commits, records) = (AtomicU64::new(0), AtomicU64::new(0));
        let (closed, start, numbers) = (AtomicBool::new(false), visible.get(), SeqnoAllocator::new(visible.clone()));
        let queue = Mutex::default();
        Committer {
            queue,
            wal,
            last_visible: visible,
            seqnos: numbers,
            poison,
            reserve,
            closed,
            start,
            commits,
            records,
        }
    }

    /// Writes, applies and publishes a commit; says where it stands.
    ///
    /// # Errors
    /// Those of the log; `Poisoned` if the log has the commit but memory may not, which ends all writing.
    pub(crate) fn commit(&self, commit: CommitRequest<'_>) -> Result<CommitOutcome> {
        let mut queue = lock(&self.queue);
        if !queue.has_leader {
            queue.has_leader = true;
            drop(queue);
            let _lead = LeaderGuard::begin(self);
            return self.write_with_reserve(&[commit]);
        }
        let waiter = Arc::new(QueuedCommit {
            payload: commit.payload.to_vec(),
            count: commit.count,
            partitions: commit.partitions.to_vec(),
            reservations: commit.reservations.to_vec(),
            path: commit.path,
            state: Mutex::new(QueuedCommitState::Waiting),
            woken: Condvar::new(),
        });
        queue.waiting.push_back(Arc::clone(&waiter));
        drop(queue);
        match waiter.wait() {
            QueuedCommitState::Done(result) => result,
            QueuedCommitState::BecomeLeader | QueuedCommitState::Retry | QueuedCommitState::Waiting => {
                self.lead_group(&waiter)
            }
        }
    }

    /// Makes a single change of a pool, beside others; gives its number when it is visible. The log gets the `payload`,
    /// if there is one. On a full disk a removal gets space from the disk reserve.
    ///
    /// # Errors
    /// `OutOfSpace` from the pool or the WAL, and other errors of the WAL: nothing was changed. `Poisoned` if the
    /// state is unknown.
    pub(crate) fn commit_single(
        &self,
        pool: &dyn PmemEngine,
        record: &WalRecord<'_>,
        payload: Option<&[u8]>,
    ) -> Result<SeqNo> {
        loop {
            let done = self.try_commit_single(pool, record, payload);
            let removes = payload.is_some() && record.kind.is_removal();
            if !(removes && is_out_of_space(&done) && self.release_disk_space()) {
                return done;
            }
        }
    }

    fn try_commit_single(
        &self,
        pool: &dyn PmemEngine,
        record: &WalRecord<'_>,
        payload: Option<&[u8]>,
    ) -> Result<SeqNo> {
        for _ in 0..GATE_ATTEMPTS {
            for _ in 0..2 {
                if let Some(seqno) = self.commit_single_concurrently(pool, record, payload)? {
                    return Ok(seqno);
                }
                self.seqnos.spin_until_open();
            }
            self.wait_for_leader();
        }
        self.run_exclusively(|| self.commit_single_as_leader(pool, record, payload))
    }

    /// Waits until there is no leader.
    fn wait_for_leader(&self) {
        let mut queue = lock(&self.queue);
        if queue.has_leader {
            let waiter = Arc::new(QueuedCommit::without_commit());
            queue.gate_waiters.push(Arc::clone(&waiter));
            drop(queue);
            waiter.wait();
        }
    }

    /// The same, unless a thread leads.
    fn commit_single_concurrently(
        &self,
        pool: &dyn PmemEngine,
        record: &WalRecord<'_>,
        payload: Option<&[u8]>,
    ) -> Result<Option<SeqNo>> {
        let (mut taken, mut unused) = (None, None);
        let made = self.apply_to_pool(pool, record, &mut || {
            let mut take = || {
                taken = self.seqnos.try_allocate();
                taken
            };
            let Some(payload) = payload else { return Ok(take()) };
            let appended = self.wal.append_with_assigned_seqno(payload, self.seqnos.next(), take);
            if let Err(error) = &appended
                && error.kind() != ErrorKind::Poisoned
            {
                unused = taken.take();
            }
            appended
        });
        if let Some(unused) = unused {
            // The number was assigned and is in no commit, and the WAL will say so. This happens after the leaf is
            // unlocked, because it may wait; a number that never becomes visible has to be counted.
            self.seqnos.finish(unused);
            self.seqnos.wait_until_visible(unused);
        }
        match (made, taken) {
            (Ok(_), None) => Ok(None),
            (Ok(_), Some(seqno)) => {
                self.seqnos.finish(seqno);
                if self.seqnos.wait_until_visible(seqno) { Ok(taken) } else { self.poison.check().map(|()| None) }
            }
            (Err(error), None) => Err(error),
            (Err(error), Some(seqno)) => {
                let error = self.poison.set(error);
                self.seqnos.fail(seqno);
                Err(error)
            }
        }
    }

    /// As `commit_single_concurrently`, for the leader.
    fn commit_single_as_leader(
        &self,
        pool: &dyn PmemEngine,
        record: &WalRecord<'_>,
        payload: Option<&[u8]>,
    ) -> Result<SeqNo> {
        let seqno = self.next_seqno(1)?;
        let mut taken = false;
        let made = self.apply_to_pool(pool, record, &mut || {
            if let Some(payload) = payload {
                self.poison.poison_on_failure(self.wal.append_with_assigned_seqno(payload, seqno, || Some(seqno)))?;
            }
            taken = true;
            Ok(Some(seqno))
        });
        made.map_err(|error| if taken { self.poison.set(error) } else { error })?;
        self.last_visible.publish(seqno);
        Ok(seqno)
    }

    fn apply_to_pool(
        &self,
        pool: &dyn PmemEngine,
        record: &WalRecord<'_>,
        turn: &mut AssignSeqnoFn<'_>,
    ) -> Result<bool> {
        let WalRecord { kind, key, value, .. } = *record;
        catch_unwind(AssertUnwindSafe(|| pool.write_single(kind, key, value, turn)))
            .unwrap_or_else(|_| Err(self.poison.set(Error::new(ErrorKind::Poisoned, "a comparator panicked"))))
    }

    /// Assigns `count` sequence numbers to the leader.
    fn next_seqno(&self, count: u64) -> Result<SeqNo> {
        self.poison.check()?;
        if self.closed.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Closed, "the database is closed"));
        }
        let next = self.last_visible.get().plus(1);
        if SeqNo::MAX.0 - next.0 < count {
            return Err(Error::unsupported("the database has used up its sequence numbers"));
        }
        Ok(next)
    }

    /// Runs `work` between two commits, while no other thread can commit.
    pub(crate) fn run_exclusively<R>(&self, work: impl FnOnce() -> R) -> R {
        let mut queue = lock(&self.queue);
        if queue.has_leader {
            let waiter = Arc::new(QueuedCommit::without_commit());
            queue.waiting.push_back(Arc::clone(&waiter));
            drop(queue);
            waiter.wait();
        } else {
            queue.has_leader = true;
            drop(queue);
        }
        let _lead = LeaderGuard::begin(self);
        work()
    }

    /// Rejects further commits. When this returns, the visible sequence number is final.
    pub(crate) fn close(&self) {
        self.run_exclusively(|| self.closed.store(true, Ordering::Relaxed));
    }

    /// As the new leader, writes a group of its own commit and all queued commits.
    fn lead_group(&self, own: &Arc<QueuedCommit>) -> Result<CommitOutcome> {
        let lead = LeaderGuard::begin(self);
        let mut group = vec![Arc::clone(own)];
        {
            let mut queue = lock(&self.queue);
            while queue.waiting.front().is_some_and(|next| next.count > 0) {
                group.extend(queue.waiting.pop_front());
            }
        }
        let commits: Vec<CommitRequest<'_>> = group.iter().map(|waiter| waiter.commit()).collect();
        let guarded = |work: &dyn Fn() -> Result<CommitOutcome>| {
            catch_unwind(AssertUnwindSafe(work))
                .unwrap_or_else(|_| Err(self.poison.set(Error::new(ErrorKind::Poisoned, "a commit panicked"))))
        };
        let result = guarded(&|| self.write_with_reserve(&commits));
        // On a full disk, commits that only remove must not fail with the others.
        let removals: Vec<bool> =
            commits.iter().map(|commit| is_out_of_space(&result) && commit.only_removes()).collect();
        let mut removed = result.clone();
        if removals.contains(&true) && removals.contains(&false) {
            let chosen: Vec<_> =
                commits.iter().zip(&removals).filter(|(_, chosen)| **chosen).map(|(c, _)| *c).collect();
            removed = guarded(&|| self.write_with_reserve(&chosen));
        }
        drop(lead);
        let outcome = |removal: &bool| if *removal { removed.clone() } else { result.clone() };
        for (follower, removal) in group.iter().zip(&removals).skip(1) {
            follower.finish(QueuedCommitState::Done(outcome(removal)));
        }
        outcome(&removals[0])
    }

    /// Writes a group; if the disk is full and all of it only removes, with space from the disk reserve.
    fn write_with_reserve(&self, commits: &[CommitRequest<'_>]) -> Result<CommitOutcome> {
        loop {
            let written = self.write(commits);
            if !(is_out_of_space(&written)
                && commits.iter().all(CommitRequest::only_removes)
                && self.release_disk_space())
            {
                return written;
            }
        }
    }

    /// Releases disk space for a commit that only removes; returns false if no space is left to release.
    fn release_disk_space(&self) -> bool {
        self.wal.remove_spare_files() || self.reserve.release_for_removes()
    }

    /// Steps 2 and 3, for the leader. What ends all writing is known to everybody before the lead is handed over.
    fn write(&self, commits: &[CommitRequest<'_>]) -> Result<CommitOutcome> {
        let first = self.next_seqno(commits.iter().map(|commit| u64::from(commit.count)).sum())?;
        let mut next = first;
        match commits {
            [one] if one.path == CommitPath::Logged && self.wal.appended().plus(1) == next => {
                self.poison.poison_on_failure(self.wal.append(&[one.wal_commit(&mut next)]))?;
            }
            many => self.append_to_wal(many, next)?,
        }
        let applied = catch_unwind(AssertUnwindSafe(|| apply_all(commits, first)))
            .unwrap_or_else(|_| Err(Error::new(ErrorKind::Poisoned, "a comparator panicked")));
        // The WAL contains these sequence numbers now; continuing without them in memory would use them twice.
        let committed = applied.map_err(|error| self.poison.set(error))?;
        let last = committed.last;
        // Before that is visible: see `counts`.
        self.commits.fetch_add(commits.len() as u64, Ordering::Relaxed);
        self.records.fetch_add(last.0 + 1 - first.0, Ordering::Relaxed);
        self.last_visible.publish(last);
        Ok(committed)
    }

    /// Appends the commits of a group to the WAL, and gap records for sequence numbers that pools used without the
    /// WAL.
    fn append_to_wal(&self, commits: &[CommitRequest<'_>], mut next: SeqNo) -> Result<()> {
        let mut frames = Vec::with_capacity(commits.len());
        let mut in_log = self.wal.appended().plus(1);
        for commit in commits {
            frames.extend(seqno_gap_commits(in_log, next));
            frames.push(commit.wal_commit(&mut next));
            in_log = next;
        }
        self.poison.poison_on_failure(self.wal.append(&frames))?;
        match commits.iter().any(|commit| commit.path == CommitPath::SyncBeforeApply) {
            true => self.poison.poison_on_failure(self.wal.sync(self.wal.appended(), false)),
            false => Ok(()),
        }
    }

    /// Appends gap records, so that the WAL reaches the last visible sequence number although pools used the last
    /// ones without it.
    pub(crate) fn append_seqno_gap(&self) -> Result<()> {
        self.run_exclusively(|| {
            let frames: Vec<_> =
                seqno_gap_commits(self.wal.appended().plus(1), self.last_visible.get().plus(1)).collect();
            if frames.is_empty() { Ok(()) } else { self.poison.poison_on_failure(self.wal.append(&frames)) }
        })
    }

    /// Returns the commits and records written since the database was opened.
    pub(crate) fn counts(&self) -> (u64, u64) {
        // Visible sequence numbers that belong to no group are single changes.
        let visible = self.last_visible.get().0 - self.start.0;
        let (commits, grouped) = (self.commits.load(Ordering::Relaxed), self.records.load(Ordering::Relaxed));
        let single = visible.saturating_sub(grouped);
        (commits + single, grouped + single)
    }
}

/// Whether it failed because the disk is full, or a pool.
pub(crate) fn is_out_of_space<T>(result: &Result<T>) -> bool {
    matches!(result, Err(error) if error.kind() == ErrorKind::OutOfSpace)
}

/// Applies the records of all commits to their trees.
fn apply_all(commits: &[CommitRequest<'_>], first: SeqNo) -> Result<CommitOutcome> {
    let mut seqno = first;
    let mut sealed = false;
    for commit in commits {
        let mut at = 0;
        let mut reservations = commit.reservations.iter();
        for record in WalRecordIter::new(commit.payload) {
            let record = record?;
            if commit.partitions[at].id != record.partition {
                at = commit
                    .partitions
                    .iter()
                    .position(|partition| partition.id == record.partition)
                    .ok_or_else(|| Error::invalid("a commit names a partition that it did not bring"))?;
            }
            let entry = EntryRef { user_key: record.key, seqno, kind: record.kind, value: record.value };
            if let Some(tree) = commit.partitions[at].tree_if_built() {
                let reservation = if tree.needs_reservation(record.kind) { reservations.next().copied() } else { None };
                sealed |= tree.apply(entry, reservation)?;
            }
            seqno = seqno.plus(1);
        }
    }
    Ok(CommitOutcome { last: SeqNo(seqno.0 - 1), sealed })
}

/// Leadership; handed over on drop, also after a panic.
struct LeaderGuard<'a>(&'a Committer);

impl<'a> LeaderGuard<'a> {
    /// For the thread that has set `leading`, or got the lead from another thread.
    fn begin(committer: &'a Committer) -> LeaderGuard<'a> {
        let lead = LeaderGuard(committer);
        committer.seqnos.close_gate();
        lead
    }
}

impl Drop for LeaderGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.poison.set(Error::new(ErrorKind::Poisoned, "a commit panicked"));
        }
        // Otherwise it stays closed: what comes finds out why.
        let may_open = !self.0.closed.load(Ordering::Relaxed) && !self.0.poison.is_set();
        let mut queue = lock(&self.0.queue);
        let (next, outside) = (queue.waiting.pop_front(), std::mem::take(&mut queue.gate_waiters));
        // For a short time at least, if a thread waits for that.
        self.0.seqnos.open_gate(may_open && (next.is_none() || !outside.is_empty()));
        queue.has_leader = next.is_some();
        drop(queue);
        outside.iter().for_each(|waiter| waiter.finish(QueuedCommitState::Retry));
        if let Some(next) = next {
            next.finish(QueuedCommitState::BecomeLeader);
        }
    }
}

impl QueuedCommit {
    /// A queued request for leadership without a commit.
    fn without_commit() -> QueuedCommit {
        QueuedCommit {
            payload: Vec::new(),
            count: 0,
            partitions: Vec::new(),
            reservations: Vec::new(),
            path: CommitPath::Logged,
            state: Mutex::new(QueuedCommitState::Waiting),
            woken: Condvar::new(),
        }
    }

    fn commit(&self) -> CommitRequest<'_> {
        CommitRequest {
            payload: &self.payload,
            count: self.count,
            partitions: &self.partitions,
            reservations: &self.reservations,
            path: self.path,
        }
    }

    fn wait(&self) -> QueuedCommitState {
        let mut state = lock(&self.state);
        while matches!(*state, QueuedCommitState::Waiting) {
            state = self.woken.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        std::mem::replace(&mut *state, QueuedCommitState::Waiting)
    }

    fn finish(&self, turn: QueuedCommitState) {
        *lock(&self.state) = turn;
        self.woken.notify_one();
    }
}
