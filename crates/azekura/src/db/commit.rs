//! Group commit: one leader at a time appends the commits of all waiting threads to the write-ahead log (WAL).
//!
//! The steps of a commit:
//! 1. A thread that finds no leader becomes the leader; any other thread queues its commit and waits.
//! 2. The leader takes every queued commit, assigns sequence numbers, and appends all of them to the WAL in one call.
//! 3. The leader applies them to the trees in order and publishes the last sequence number: they are now visible. Then
//!    it [completes](Engine::complete_range_deletes) range deletes.
//! 4. The leader wakes its followers and hands leadership to the first commit that was queued meanwhile.
//! 5. A thread that requested more than [`Buffer`](crate::PersistMode::Buffer) waits for the WAL sync itself; threads
//!    share syncs. A commit that did not request a sync never waits for one, unless it is queued behind a batch for a
//!    pool that is durable without the WAL, because that batch is synced before it is applied.
//!
//! Some trees commit a single record concurrently ([`SingleCommit::Concurrent`](crate::engine::SingleCommit)). Such a
//! change bypasses these steps ([`Committer::commit_single`]): its own thread makes it, concurrently with other single
//! changes. [`SeqnoAllocator`] allocates their sequence numbers and publishes them in order. If the change is logged,
//! it is appended when its number is allocated. The leader closes allocation and waits until no single change is in
//! progress. A thread that finds allocation closed waits and retries after it is opened; the leader opens it at each
//! handover while such threads wait. After `GATE_ATTEMPTS` attempts the thread queues for leadership. Until the first
//! single change, allocation stays closed and leaders do not touch it.
//!
//! A deletion runs between two commits too. A leader refuses a commit to a deleted partition: nothing of it is logged.
//!
//! A commit with a [`CommitCheck`] is validated by the leader when all earlier commits are applied, and is appended and
//! applied alone. A conflict fails only this commit, and nothing of it was logged.
//!
//! An exclusive turn ([`Committer::begin_turn`]) keeps all other threads from committing, so that its owner has no
//! conflict. It is no leadership: administrative work between two commits still runs. Commits of other threads return
//! before they are queued; their threads release all reservations, wait until the turn ends, and try again.
//!
//! A commit reserves space in trees before it is queued ([`StagedGuard`]). The reservations are undone unless the
//! commit is applied.
//!
//! Thread safety: `has_leader` is the lock. The thread that set it may append, apply and publish, and must hand
//! leadership over or clear it, also after a panic.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::ThreadId;

use crate::base::sync::{WakeSignal, lock};
use crate::base::{EntryRef, Error, ErrorKind, RecordKind, Result, SeqNo};
use crate::db::partition_state::PartitionState;
use crate::db::state::disk_reserve::DiskReserve;
use crate::db::state::poison::DbPoison;
use crate::db::writes::commit_check::CommitCheck;
use crate::db::writes::staged_records::{StagedByNumber, StagedGuard, StagedRecords};
use crate::db::writes::write_batch::WriteBatch;
use crate::engine::{AssignSeqnoFn, LastVisibleSeqno, SeqnoAllocator, SingleCommit};
use crate::tree::partition_tree::PartitionTree;
use crate::wal::format::{IngestMarker, WalRecord, seqno_gap_commits};
use crate::wal::{Wal, WalCommit};

/// Result of a commit, or of the group it was written with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommitOutcome {
    /// The last sequence number in the WAL, which must be synced through it to make the commit durable.
    /// [`SeqNo::ZERO`] if the commit is durable without the WAL.
    pub(crate) wal_end: SeqNo,
    /// Whether a memtable became full and needs a flush.
    pub(crate) sealed: bool,
    /// Estimated number of pages that the commit has changed in pools: one for each record, `u64::MAX` for a range
    /// delete.
    pub(crate) changed_pages: u64,
    has_range_deletes: bool,
}

/// A change of one pool that is made by its own thread.
struct SingleChange<'a> {
    partition: &'a PartitionState,
    record: WalRecord<'a>,
    /// Whether the WAL gets the change.
    is_logged: bool,
    /// The encoded record; may be empty if the WAL does not get it.
    payload: &'a [u8],
}

impl<'a> SingleChange<'a> {
    /// The only record of `batch`, if its tree commits it without a group.
    #[inline]
    fn of(batch: &WriteBatch<'a>) -> Result<Option<SingleChange<'a>>> {
        let ([partition], 1, None) = (batch.partitions(), batch.count, batch.check) else { return Ok(None) };
        let SingleCommit::Concurrent { logged: is_logged } = partition.single_commit() else { return Ok(None) };
        let record = batch.only_record()?.filter(|record| record.kind != RecordKind::RangeDelete);
        Ok(record.map(|record| SingleChange { partition, record, is_logged, payload: batch.payload }))
    }
}

/// A queued commit, owned because its thread sleeps.
struct QueuedCommit {
    payload: Vec<u8>,
    count: u32,
    staged: StagedRecords<'static>,
    check: Option<Arc<CommitCheck>>,
    state: Mutex<QueuedCommitState>,
    woken: Condvar,
}

enum QueuedCommitState {
    Waiting,
    BecomeLeader,
    /// A leader has ended: a single change may retry. Or an exclusive turn has begun: a commit retries after it.
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
    /// The thread that holds the exclusive turn, if there is one. Then only its commits are queued, and allocation
    /// stays closed.
    turn_owner: Option<ThreadId>,
}

/// Attempts of a single change while allocation is closed, before it queues for leadership.
const GATE_ATTEMPTS: usize = 3;
/// A thread that waits for the end of an exclusive turn checks after this many milliseconds whether the database was
/// closed or poisoned.
const TURN_WAIT_MS: u64 = 100;
/// Maximum number of records, and of bytes without the last one, that are applied under one lock.
const RUN_RECORDS_MAX: usize = 64;
const RUN_BYTES_MAX: usize = 64 << 10;

/// Serializes all writes: group commit and single changes. Thread safe.
pub(crate) struct Committer {
    queue: Mutex<CommitQueue>,
    /// Notified when an exclusive turn ends.
    turn_ended: WakeSignal,
    wal: Arc<Wal>,
    last_visible: LastVisibleSeqno,
    seqnos: SeqnoAllocator,
    /// Whether a single change was attempted since open. Before, allocation is closed and leaders do not touch it.
    /// Set by a leader.
    has_single_changes: AtomicBool,
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
        Committer {
            queue: Mutex::default(),
            turn_ended: WakeSignal::default(),
            wal,
            seqnos: SeqnoAllocator::new(visible.clone()),
            has_single_changes: AtomicBool::new(false),
            poison,
            reserve,
            closed: AtomicBool::new(false),
            start: visible.get(),
            last_visible: visible,
            commits: AtomicU64::new(0),
            records: AtomicU64::new(0),
        }
    }

    /// Writes, applies and publishes a batch, or makes a single change, which is visible when this returns. Waits
    /// while an exclusive turn of another thread is running.
    ///
    /// # Errors
    /// Those of the check, of the WAL, and of [preparing](crate::engine::Engine::prepare) the trees: nothing was
    /// changed. `Poisoned` if the WAL has the commit but the trees may not have it; then no later commit succeeds.
    pub(crate) fn commit(&self, batch: &WriteBatch<'_>) -> Result<CommitOutcome> {
        loop {
            let committed = match SingleChange::of(batch)? {
                Some(change) if !change.is_logged => self.commit_single(&change)?,
                Some(change) => batch
                    .with_payload(|batch| self.commit_single(&SingleChange { payload: batch.payload, ..change }))?,
                None => batch.with_payload(|batch| self.commit_prepared(batch))?,
            };
            match committed {
                Some(outcome) => return Ok(outcome),
                None => self.wait_for_turn_end()?,
            }
        }
    }

    /// Commits a batch in a group. Its trees reserve space before, so that applying it cannot fail. Returns `None`, and
    /// has changed nothing, if an exclusive turn of another thread is running.
    #[inline(never)]
    fn commit_prepared(&self, batch: &WriteBatch<'_>) -> Result<Option<CommitOutcome>> {
        let mut prepared = StagedGuard::of(batch.partitions());
        let reserved = self.poison.catch_panics("a comparator panicked", || prepared.prepare(batch.payload));
        self.poison.poison_on_failure(reserved)?;
        let committed = self.commit_in_group(&WriteBatch { staged: &prepared, ..*batch });
        let committed = self.poison.poison_on_failure(committed);
        if matches!(committed, Ok(Some(_))) || self.poison.is_set() {
            prepared.mark_applied();
        }
        let count_pages = |outcome: CommitOutcome| {
            let changed_pages = match outcome.has_range_deletes {
                _ if prepared.is_empty() => 0,
                true => u64::MAX,
                false => u64::from(batch.count),
            };
            CommitOutcome { changed_pages, ..outcome }
        };
        Ok(committed?.map(count_pages))
    }

    fn commit_in_group(&self, batch: &WriteBatch<'_>) -> Result<Option<CommitOutcome>> {
        let mut queue = lock(&self.queue);
        if queue.turn_owner.is_some() && !batch.is_in_turn() {
            return Ok(None);
        }
        if !queue.has_leader {
            queue.has_leader = true;
            drop(queue);
            let lead = LeaderGuard::begin(self);
            let written = self.write_validated(batch);
            lead.end();
            return written.map(Some);
        }
        let waiter = Arc::new(QueuedCommit {
            payload: batch.payload.to_vec(),
            count: batch.count,
            staged: batch.staged.to_owned(),
            check: batch.check.cloned(),
            state: Mutex::new(QueuedCommitState::Waiting),
            woken: Condvar::new(),
        });
        queue.waiting.push_back(Arc::clone(&waiter));
        drop(queue);
        match waiter.wait() {
            QueuedCommitState::Done(result) => result.map(Some),
            QueuedCommitState::Retry => Ok(None),
            QueuedCommitState::BecomeLeader | QueuedCommitState::Waiting => self.lead_group(&waiter).map(Some),
        }
    }

    /// Makes a single change, concurrently with others; it is visible when this returns. On a full disk a removal gets
    /// space from the disk reserve. Returns `None`, and has changed nothing, if an exclusive turn is running.
    ///
    /// # Errors
    /// `OutOfSpace` from the tree or the WAL, `Closed`, and other errors of the WAL: nothing was changed. `Poisoned` if
    /// the state is unknown.
    fn commit_single(&self, change: &SingleChange<'_>) -> Result<Option<CommitOutcome>> {
        loop {
            let done = self.try_commit_single(change);
            let removes = change.is_logged && change.record.kind.is_removal();
            if removes && is_out_of_space(&done) && self.release_disk_space() {
                continue;
            }
            let outcome = |seqno| CommitOutcome {
                wal_end: if change.is_logged { seqno } else { SeqNo::ZERO },
                sealed: false,
                changed_pages: 1,
                has_range_deletes: false,
            };
            return Ok(self.poison.poison_on_failure(done)?.map(outcome));
        }
    }

    /// Makes a single change. Returns `None`, and has changed nothing, if an exclusive turn is running.
    fn try_commit_single(&self, change: &SingleChange<'_>) -> Result<Option<SeqNo>> {
        if !self.has_single_changes.load(Ordering::Relaxed) {
            // The end of this leadership opens allocation.
            self.run_exclusively(|| self.has_single_changes.store(true, Ordering::Relaxed));
        }
        for _ in 0..GATE_ATTEMPTS {
            for _ in 0..2 {
                if let Some(seqno) = self.commit_single_concurrently(change)? {
                    return Ok(Some(seqno));
                }
                self.seqnos.spin_until_open();
            }
            self.wait_for_leader();
        }
        self.run_exclusively(|| {
            if lock(&self.queue).turn_owner.is_some() {
                return Ok(None);
            }
            self.commit_single_as_leader(change).map(Some)
        })
    }

    /// Waits until the current leader has ended, if there is one.
    fn wait_for_leader(&self) {
        let mut queue = lock(&self.queue);
        if queue.has_leader {
            let waiter = Arc::new(QueuedCommit::without_commit());
            queue.gate_waiters.push(Arc::clone(&waiter));
            drop(queue);
            waiter.wait();
        }
    }

    /// Makes the change without leadership. Returns `None` if allocation is closed.
    fn commit_single_concurrently(&self, change: &SingleChange<'_>) -> Result<Option<SeqNo>> {
        let (mut assigned, mut unused) = (None, None);
        let result = self.write_single(change, &mut || {
            let mut allocate = || {
                let seqno = self.seqnos.try_allocate();
                // Read behind the allocation: a deletion closes allocation, and waits for all changes in progress.
                (assigned, unused) = if change.partition.is_open() { (seqno, None) } else { (None, seqno) };
                assigned
            };
            if !change.is_logged {
                return Ok(allocate());
            }
            let appended = self.wal.append_with_assigned_seqno(change.payload, self.seqnos.next(), allocate);
            if let Err(error) = &appended
                && error.kind() != ErrorKind::Poisoned
            {
                unused = assigned.take();
            }
            appended
        });
        if let Some(unused) = unused {
            // The number was assigned but no commit has it; the next group appends a gap record for it. It is finished
            // after the tree has released its locks, because finishing may wait. It must be finished, because later
            // numbers become visible only after it.
            self.seqnos.finish(unused);
            self.seqnos.wait_until_visible(unused);
        }
        match (result, assigned) {
            (Ok(_), None) => Ok(None),
            (Ok(_), Some(seqno)) => {
                self.seqnos.finish(seqno);
                if self.seqnos.wait_until_visible(seqno) { Ok(assigned) } else { self.poison.check().map(|()| None) }
            }
            (Err(error), None) => Err(error),
            (Err(error), Some(seqno)) => {
                let error = self.poison.set(error);
                self.seqnos.fail(seqno);
                Err(error)
            }
        }
    }

    /// Makes the change as the leader.
    fn commit_single_as_leader(&self, change: &SingleChange<'_>) -> Result<SeqNo> {
        let seqno = self.next_seqno(1)?;
        let mut assigned = false;
        let result = self.write_single(change, &mut || {
            if change.is_logged {
                self.poison
                    .poison_on_failure(self.wal.append_with_assigned_seqno(change.payload, seqno, || Some(seqno)))?;
            }
            assigned = true;
            Ok(Some(seqno))
        });
        result.map_err(|error| if assigned { self.poison.set(error) } else { error })?;
        self.last_visible.publish(seqno);
        Ok(seqno)
    }

    #[inline]
    fn write_single(&self, change: &SingleChange<'_>, assign_seqno: &mut AssignSeqnoFn<'_>) -> Result<bool> {
        let WalRecord { kind, key, value, .. } = change.record;
        let tree = change.partition.tree()?;
        self.poison.catch_panics("a comparator panicked", || tree.write_single(kind, key, value, assign_seqno))
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
        let lead = LeaderGuard::begin(self);
        let result = work();
        lead.end();
        result
    }

    /// Between two commits, calls `install` with the result of `prepare` and a new sequence number, and publishes the
    /// number afterwards. Does nothing if `prepare` returns `None`, or while an exclusive turn is running.
    ///
    /// The WAL has `note` as the commit of the new sequence number, before `install`, so that no reader of changes
    /// misses what `install` makes visible, also after a crash. Recovery skips the note.
    ///
    /// After `install`, a commit names the partition of `marker`, which never exists: `install` has recorded in the
    /// manifest that this id is used up. Recovery refuses a commit that names an id which the manifest does not know,
    /// so a manifest that has lost the edits of `install` is noticed.
    ///
    /// # Errors
    /// Those of the WAL and of the two calls. The number is used up if `install` was called, also after an error.
    pub(crate) fn install_exclusively<P, T>(
        &self,
        note: &[u8],
        marker: IngestMarker,
        prepare: impl FnOnce() -> Result<Option<P>>,
        install: impl FnOnce(P, SeqNo) -> Result<T>,
    ) -> Result<Option<T>> {
        self.run_exclusively(|| {
            let seqno = self.next_seqno(2)?;
            if lock(&self.queue).turn_owner.is_some() {
                return Ok(None);
            }
            let Some(prepared) = prepare()? else { return Ok(None) };
            let note = WalCommit { first_seqno: seqno, seqno_count: 1, payload: note };
            let frames: Vec<_> = seqno_gap_commits(self.wal.appended().plus(1), seqno).chain([note]).collect();
            self.poison.poison_on_failure(self.wal.append(&frames))?;
            let installed = install(prepared, seqno);
            self.commits.fetch_add(1, Ordering::Relaxed);
            self.records.fetch_add(1, Ordering::Relaxed);
            if installed.is_err() {
                self.last_visible.publish(seqno);
                return installed.map(Some);
            }
            let mut payload = Vec::new();
            marker.put(&mut payload);
            let commit = WalCommit { first_seqno: seqno.plus(1), seqno_count: 1, payload: &payload };
            let appended = self.poison.poison_on_failure(self.wal.append(&[commit]));
            self.last_visible.publish(if appended.is_ok() { seqno.plus(1) } else { seqno });
            match appended {
                // Nothing but a later damage of the manifest needs the marker, and the entries are installed.
                Err(error) if error.kind() == ErrorKind::OutOfSpace => installed.map(Some),
                appended => appended.and(installed.map(Some)),
            }
        })
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
        let commits: Vec<WriteBatch<'_>> = group.iter().map(|waiter| waiter.commit()).collect();
        let mut outcomes = Vec::with_capacity(commits.len());
        let may_share = |commit: &WriteBatch<'_>| commit.check.is_none() && commit.check_partitions().is_ok();
        for run in commits.chunk_by(|a, b| may_share(a) && may_share(b)) {
            self.write_run(run, &mut outcomes);
        }
        lead.end();
        let mut outcomes = outcomes.into_iter();
        let own_outcome = outcomes.next().expect("the group has the leader's own commit");
        for (follower, outcome) in group.iter().skip(1).zip(outcomes) {
            follower.finish(QueuedCommitState::Done(outcome));
        }
        own_outcome
    }

    /// Writes a part of a group: commits without checks to existing partitions, or any one commit. Adds the result of
    /// each to `outcomes`.
    fn write_run(&self, commits: &[WriteBatch<'_>], outcomes: &mut Vec<Result<CommitOutcome>>) {
        let guarded = |work: &dyn Fn() -> Result<CommitOutcome>| self.poison.catch_panics("a commit panicked", work);
        if let [commit] = commits {
            return outcomes.push(guarded(&|| self.write_validated(commit)));
        }
        let result = guarded(&|| self.write_with_reserve(commits));
        // On a full disk, commits that only remove must not fail with the others.
        let removals: Vec<bool> =
            commits.iter().map(|commit| is_out_of_space(&result) && commit.only_removes()).collect();
        let mut removed = result.clone();
        if removals.contains(&true) && removals.contains(&false) {
            let chosen: Vec<_> =
                commits.iter().zip(&removals).filter(|(_, chosen)| **chosen).map(|(c, _)| *c).collect();
            removed = guarded(&|| self.write_with_reserve(&chosen));
        }
        outcomes.extend(removals.iter().map(|removal| if *removal { removed.clone() } else { result.clone() }));
    }

    /// Validates a commit and writes it, as the leader. A failed validation changes nothing.
    fn write_validated(&self, commit: &WriteBatch<'_>) -> Result<CommitOutcome> {
        self.next_seqno(0)?; // a closed or poisoned database gets no validation
        commit.check_partitions()?;
        if let Some(check) = commit.check {
            check.validate(commit.payload, commit.partitions(), self.last_visible.get())?;
        }
        self.write_with_reserve(std::slice::from_ref(commit))
    }

    /// Begins an exclusive turn, after any other one has ended. All commits that are queued then wait for its end.
    ///
    /// # Errors
    /// `Invalid` if this thread holds an exclusive turn; `Poisoned`, `Closed`.
    pub(crate) fn begin_turn(&self) -> Result<()> {
        loop {
            self.wait_for_turn_end()?;
            let begun = self.run_exclusively(|| {
                self.next_seqno(0)?;
                let mut queue = lock(&self.queue);
                if queue.turn_owner.is_some() {
                    return Ok(false);
                }
                queue.turn_owner = Some(std::thread::current().id());
                let (commits, others): (VecDeque<_>, VecDeque<_>) =
                    queue.waiting.drain(..).partition(|waiter| waiter.count > 0);
                queue.waiting = others;
                drop(queue);
                commits.iter().for_each(|waiter| waiter.finish(QueuedCommitState::Retry));
                Ok(true)
            })?;
            if begun {
                return Ok(());
            }
        }
    }

    /// The exclusive turn belongs to the calling thread from now on.
    pub(crate) fn move_turn_to_this_thread(&self) {
        let mut queue = lock(&self.queue);
        if queue.turn_owner.is_some() {
            queue.turn_owner = Some(std::thread::current().id());
        }
    }

    /// Ends the exclusive turn. May be called while the thread panics: it is no leadership.
    pub(crate) fn end_turn(&self) {
        let mut queue = lock(&self.queue);
        queue.turn_owner = None;
        // A running leader opens allocation at its end. Without a leader, nothing is in progress: only a leader closes
        // the database, so this is read behind the lock.
        if !queue.has_leader && self.has_single_changes.load(Ordering::Relaxed) {
            self.seqnos.resume(!self.closed.load(Ordering::Relaxed) && !self.poison.is_set());
        }
        drop(queue);
        self.turn_ended.notify_all();
    }

    /// Waits until no exclusive turn is running.
    ///
    /// # Errors
    /// `Invalid` if this thread holds the turn, because it would wait for itself. `Poisoned`, `Closed`.
    pub(crate) fn wait_for_turn_end(&self) -> Result<()> {
        loop {
            let seen = self.turn_ended.generation();
            let Some(owner) = lock(&self.queue).turn_owner else { return Ok(()) };
            if owner == std::thread::current().id() {
                let message = "the write would wait for the exclusive transaction of its own thread: write with the \
                               transaction, or end it first";
                return Err(Error::invalid(message));
            }
            self.next_seqno(0)?;
            self.turn_ended.wait_past(seen, TURN_WAIT_MS);
        }
    }

    /// Writes a group; if the disk is full and all of it only removes, with space from the disk reserve.
    fn write_with_reserve(&self, commits: &[WriteBatch<'_>]) -> Result<CommitOutcome> {
        loop {
            let written = self.write(commits);
            if !(is_out_of_space(&written) && commits.iter().all(WriteBatch::only_removes) && self.release_disk_space())
            {
                return written;
            }
        }
    }

    /// Releases disk space for a commit that only removes; returns false if no space is left to release.
    fn release_disk_space(&self) -> bool {
        self.wal.remove_spare_files() || self.reserve.release_for_removes()
    }

    /// Steps 2 and 3, for the leader. An error that poisons the database is set before leadership is handed over.
    fn write(&self, commits: &[WriteBatch<'_>]) -> Result<CommitOutcome> {
        let first = self.next_seqno(commits.iter().map(|commit| u64::from(commit.count)).sum())?;
        let mut next = first;
        match commits {
            [one] if !one.syncs_before_apply() && self.wal.appended().plus(1) == next => {
                self.poison.poison_on_failure(self.wal.append(&[one.wal_commit(&mut next)]))?;
            }
            many => self.append_to_wal(many, next)?,
        }
        let applied = self.poison.catch_panics("a comparator panicked", || apply_all(commits, first));
        // The WAL contains these sequence numbers now; continuing without them in memory would use them twice.
        let committed = applied.map_err(|error| self.poison.set(error))?;
        let last = committed.wal_end;
        // Before the commit is visible, so that `counts` does not count its records as single changes.
        self.commits.fetch_add(commits.len() as u64, Ordering::Relaxed);
        self.records.fetch_add(last.0 + 1 - first.0, Ordering::Relaxed);
        self.last_visible.publish(last);
        if committed.has_range_deletes {
            let completed = self.poison.catch_panics("a comparator panicked", || complete_range_deletes(commits));
            completed.map_err(|error| self.poison.set(error))?;
        }
        Ok(committed)
    }

    /// Appends the commits of a group to the WAL, and gap records for sequence numbers that single changes used without
    /// the WAL.
    fn append_to_wal(&self, commits: &[WriteBatch<'_>], mut next: SeqNo) -> Result<()> {
        let mut frames = Vec::with_capacity(commits.len());
        let mut in_log = self.wal.appended().plus(1);
        for commit in commits {
            frames.extend(seqno_gap_commits(in_log, next));
            frames.push(commit.wal_commit(&mut next));
            in_log = next;
        }
        self.poison.poison_on_failure(self.wal.append(&frames))?;
        match commits.iter().any(WriteBatch::syncs_before_apply) {
            // The WAL has the commits, so going on without them would use their sequence numbers twice.
            true => self.wal.sync(self.wal.appended(), false).map_err(|error| self.poison.set(error)),
            false => Ok(()),
        }
    }

    /// Appends gap records, so that the WAL reaches the last visible sequence number although single changes used the
    /// last ones without it.
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

/// Whether the result is an error because the disk or a pool is full.
pub(crate) fn is_out_of_space<T>(result: &Result<T>) -> bool {
    matches!(result, Err(error) if error.kind() == ErrorKind::OutOfSpace)
}

/// Applies the records of all commits to their trees.
fn apply_all(commits: &[WriteBatch<'_>], first: SeqNo) -> Result<CommitOutcome> {
    let mut seqno = first;
    let (mut sealed, mut has_range_deletes) = (false, false);
    for commit in commits {
        let mut staged = StagedByNumber::new(commit.staged.records());
        let mut partition = &commit.partitions()[0];
        let mut tree = partition.tree_if_built();
        let mut run = RecordRun::default();
        commit.try_for_each_record(|record, number| {
            if partition.id != record.partition {
                sealed |= run.apply(tree)?;
                partition = commit.partition(record.partition)?;
                tree = partition.tree_if_built();
            }
            let entry = EntryRef { user_key: record.key, seqno, kind: record.kind, value: record.value };
            if let Some(tree) = tree {
                let staged = staged.take(number);
                match tree.lsm() {
                    Some(_) if commit.count > 1 => {
                        if run.push(entry) {
                            sealed |= run.apply(Some(tree))?;
                        }
                    }
                    _ => sealed |= tree.apply(entry, staged)?,
                }
                has_range_deletes |= record.kind == RecordKind::RangeDelete;
            }
            seqno = seqno.plus(1);
            Ok(())
        })?;
        sealed |= run.apply(tree)?;
    }
    Ok(CommitOutcome { wal_end: SeqNo(seqno.0 - 1), sealed, changed_pages: 0, has_range_deletes })
}

/// Successive records of a batch for one LSM tree, which are applied under one lock. Bounded, so that a thread that
/// seals the memtable does not wait for a large batch.
#[derive(Default)]
struct RecordRun<'a> {
    entries: Vec<EntryRef<'a>>,
    bytes: usize,
}

impl<'a> RecordRun<'a> {
    /// Adds a record. Returns whether the run must be applied.
    #[inline]
    fn push(&mut self, entry: EntryRef<'a>) -> bool {
        if self.entries.is_empty() {
            self.entries.reserve(RUN_RECORDS_MAX);
        }
        self.bytes += entry.user_key.len() + entry.value.len();
        self.entries.push(entry);
        self.entries.len() >= RUN_RECORDS_MAX || self.bytes >= RUN_BYTES_MAX
    }

    /// Applies the records to the tree that they are for. True if this sealed a memtable.
    fn apply(&mut self, tree: Option<&PartitionTree>) -> Result<bool> {
        let sealed = match tree.and_then(PartitionTree::lsm) {
            Some(tree) if !self.entries.is_empty() => tree.insert_run(&self.entries)?,
            _ => false,
        };
        self.entries.clear();
        self.bytes = 0;
        Ok(sealed)
    }
}

/// Completes the range deletes of all commits, which are visible.
#[cold]
fn complete_range_deletes(commits: &[WriteBatch<'_>]) -> Result<()> {
    let partitions = commits.iter().flat_map(|commit| commit.partitions());
    partitions.filter_map(|partition| partition.tree_if_built()).try_for_each(|tree| tree.complete_range_deletes())
}

/// Guard of the leadership; hands it over on drop. A drop without [`end`](LeaderGuard::end) is a panic of the leader.
/// A leader may be a destructor that runs because its thread panicked earlier; that is no panic of the leader.
struct LeaderGuard<'a> {
    committer: &'a Committer,
    has_ended: bool,
}

impl<'a> LeaderGuard<'a> {
    /// Begins the leadership of a thread that has set `has_leader`, or to which it was handed over.
    fn begin(committer: &'a Committer) -> LeaderGuard<'a> {
        let lead = LeaderGuard { committer, has_ended: false };
        if committer.has_single_changes.load(Ordering::Relaxed) {
            committer.seqnos.close_gate();
        }
        lead
    }

    /// Ends the leadership of a thread that did not panic in it.
    fn end(mut self) {
        self.has_ended = true;
    }
}

impl Drop for LeaderGuard<'_> {
    fn drop(&mut self) {
        let committer = self.committer;
        if !self.has_ended {
            committer.poison.set(Error::new(ErrorKind::Poisoned, "a commit panicked"));
        }
        // After close and poison allocation stays closed, so that a single change becomes the leader and gets the
        // error.
        let may_open = !committer.closed.load(Ordering::Relaxed) && !committer.poison.is_set();
        let mut queue = lock(&committer.queue);
        let next = queue.waiting.pop_front();
        let gate_waiters = std::mem::take(&mut queue.gate_waiters);
        if committer.has_single_changes.load(Ordering::Relaxed) {
            // If threads wait for it, allocation opens for a short time even if there is a next leader.
            let may_open = may_open && queue.turn_owner.is_none();
            committer.seqnos.resume(may_open && (next.is_none() || !gate_waiters.is_empty()));
        }
        queue.has_leader = next.is_some();
        drop(queue);
        gate_waiters.iter().for_each(|waiter| waiter.finish(QueuedCommitState::Retry));
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
            staged: StagedRecords::default(),
            check: None,
            state: Mutex::new(QueuedCommitState::Waiting),
            woken: Condvar::new(),
        }
    }

    fn commit(&self) -> WriteBatch<'_> {
        WriteBatch { check: self.check.as_ref(), ..WriteBatch::new(&self.payload, self.count, &self.staged) }
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

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the test uses scoped threads, which `Env` does not offer")]
mod tests {
    use super::*;
    use crate::db::config::{Config, PersistMode};
    use crate::db::options::{EngineType, PartitionCreateOptions};
    use crate::db::transaction::transaction_options::TransactionOptions;
    use crate::lsm::options::KvSeparationOptions;
    use crate::pmem::options::PmemOptions;
    use crate::testing::{MemFs, TestEnv};

    type Write<'a> = Box<dyn Fn() -> Result<()> + Send + Sync + 'a>;

    fn wait_until_queued(committer: &Committer, commits: usize) {
        while lock(&committer.queue).waiting.len() < commits {
            std::thread::yield_now();
        }
    }

    /// Regression: a commit checked only before it was queued whether its partitions were deleted. A commit that was
    /// queued behind a deletion returned `Ok` after `delete_partition` had returned. Of a batch, only the records of
    /// the other partition were written.
    #[test]
    fn commits_behind_a_deletion_write_nothing() {
        let separated = KvSeparationOptions::default().direct_write_threshold(1 << 10);
        let pool = EngineType::Pmem(PmemOptions::default().max_size(4 << 20));
        let options_of_both = [
            PartitionCreateOptions::default().with_kv_separation(separated),
            PartitionCreateOptions::default().engine(pool),
        ];
        for options in options_of_both {
            let shown = format!("{options:?}");
            let db = Config::new("/db").fs(Arc::new(MemFs::new())).workers(0).open().unwrap();
            let deleted = db.open_partition("deleted", options).unwrap();
            let other = db.open_partition("other", Default::default()).unwrap();
            let batch = |durability, value: &[u8]| {
                let mut batch = db.batch();
                batch.durability(durability);
                batch.insert(&other, "half", value);
                batch.insert(&deleted, "half", value);
                batch
            };
            let is_pool = deleted.state.tree_if_built().is_some_and(|tree| tree.pmem().is_some());
            let writes: Vec<Write<'_>> = vec![
                Box::new(|| batch(PersistMode::Buffer, b"short").commit()),
                Box::new(|| batch(PersistMode::SyncAll, &[7; 4096]).commit()),
                Box::new(|| deleted.remove_range("a".."b")),
                Box::new(|| if is_pool { batch(PersistMode::Buffer, b"").commit() } else { deleted.insert("k", "v") }),
                Box::new(|| {
                    let mut expecting = batch(PersistMode::Buffer, b"expected");
                    expecting.expect(&other, "k", None);
                    expecting.commit()
                }),
                Box::new(|| {
                    let mut tx = db.transaction();
                    assert_eq!(tx.get(&other, "half")?, None);
                    tx.insert(&other, "half", "v")?;
                    tx.insert(&deleted, "half", "v")?;
                    tx.commit()
                }),
                Box::new(|| {
                    let mut tx = db.transaction();
                    assert!(tx.iter(&deleted).next().is_none());
                    tx.insert(&other, "half", "v")?;
                    tx.commit()
                }),
            ];
            let committer = &deleted.handle.inner.writer.as_ref().unwrap().committer;
            let results: Vec<Result<()>> = std::thread::scope(|scope| {
                let mut threads = Vec::new();
                committer.run_exclusively(|| {
                    threads.push(scope.spawn(|| db.delete_partition(deleted.clone())));
                    wait_until_queued(committer, 1);
                    for (at, write) in writes.iter().enumerate() {
                        threads.push(scope.spawn(write));
                        wait_until_queued(committer, at + 2);
                    }
                });
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            results[0].as_ref().unwrap();
            let kinds: Vec<_> =
                results[1..].iter().map(|result| result.clone().map_err(|error| error.kind())).collect();
            assert_eq!(kinds, vec![Err(ErrorKind::Closed); writes.len()], "{shown}");
            assert!(other.is_empty().unwrap() && !db.metrics().poisoned);
            other.insert("k", "v").unwrap();
        }
    }

    /// Regression: calls of an exclusive transaction in a forked child locked the commit queue. If another thread of
    /// the parent had locked it at the fork, they waited forever, and so did the end of the transaction.
    #[test]
    fn forked_child_does_not_lock_the_queue() {
        let env = TestEnv::new(1);
        let config = Config::new("/db").fs(Arc::new(MemFs::new())).env(Arc::new(env.clone()));
        let db = config.workers(0).open().unwrap();
        let part = db.open_partition("p", Default::default()).unwrap();
        let mut tx = db.transaction_with(TransactionOptions::default().exclusive(true)).unwrap();
        let committer = &part.handle.inner.writer.as_ref().unwrap().committer;
        let queue_lock = lock(&committer.queue);
        env.set_process(2);
        assert_eq!(tx.get(&part, "k").unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(tx.insert(&part, "k", "v").unwrap_err().kind(), ErrorKind::Closed);
        tx.savepoint();
        drop(tx);
        assert_eq!(part.insert("k", "v").unwrap_err().kind(), ErrorKind::Closed);
        env.set_process(1);
        drop(queue_lock);
        committer.end_turn(); // the transaction ended in the child only
    }
}
