//! Group commit: one leader at a time writes the log for everybody who waits.
//!
//! The steps of a commit:
//! 1. a thread that finds no leader becomes it; any other queues its commit and waits;
//! 2. the leader takes every queued commit, gives each its sequence numbers, and appends all to the log in one call;
//! 3. it applies them to the memtables in order and publishes the last sequence number: only now are they seen;
//! 4. it wakes its followers and hands the lead to the first of those that queued meanwhile;
//! 5. whoever asked for more than [`Buffer`](crate::PersistMode::Buffer) waits for the log's sync by itself: syncs are
//!    shared among all who wait, and nobody who did not ask waits for one: but who comes behind a batch for a pool that
//!    survives power loss by itself, because that is synced before it is applied.
//!
//! A single change of a pool goes past all this ([`Committer::change`]): its own thread makes it, beside others that do
//! the same. Numbers are given out and made visible in their order by [`Numbers`]; where the log gets the change, it
//! gets it in the moment in which the number is taken. Whoever leads has closed the gate of the numbers and waited
//! until no such change is under way. Those that find it closed wait outside and try again when it is opened, which is
//! whenever the lead is handed over while somebody waits outside; who tries in vain for too long queues for the lead.
//!
//! Thread safety: `leading` is the lock. Whoever set it may append, apply and publish, and must hand over or clear it,
//! also when something panics.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::base::sync::lock;
use crate::base::{EntryRef, Error, ErrorKind, Result, SeqNo};
use crate::db::catalog::PartitionState;
use crate::db::state::poison::Poison;
use crate::db::state::reserve::Reserve;
use crate::engine::{Engine, Numbers, Room, Visible};
use crate::pmem::engine::{PmemTree, TakeNumber};
use crate::wal::payload::{Record, Records, gap};
use crate::wal::{LogCommit, Wal};

/// A commit that is ready to be written.
#[derive(Clone, Copy)]
pub(crate) struct Commit<'a> {
    pub(crate) payload: &'a [u8],
    /// Records in the payload, at least 1.
    pub(crate) count: u32,
    /// Every partition that the payload names.
    pub(crate) partitions: &'a [Arc<PartitionState>],
    /// What pools have set aside for the values they get, in the order of the payload.
    pub(crate) rooms: &'a [Room],
    pub(crate) path: Path,
}

/// How a commit becomes durable; single changes of pools are none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// By the log.
    Logged,
    /// By the log, which must be durable before the commit is applied: a pool that is durable by itself may not have
    /// the half of it.
    Ahead,
}

/// What became of a commit, or of the group it was written with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Committed {
    /// The last sequence number.
    pub(crate) last: SeqNo,
    /// Whether a memtable was filled, so that there is work.
    pub(crate) sealed: bool,
}

impl<'a> Commit<'a> {
    /// Whether it takes something away, and adds no value.
    pub(crate) fn only_removes(&self) -> bool {
        Records::new(self.payload).all(|record| record.is_ok_and(|record| record.kind.is_removal()))
    }

    /// Takes its sequence numbers.
    fn numbered(&self, next: &mut SeqNo) -> LogCommit<'a> {
        let first = *next;
        *next = first.plus(u64::from(self.count));
        LogCommit { first, count: self.count, payload: self.payload }
    }
}

/// A queued commit, owned because its thread sleeps.
struct Waiter {
    payload: Vec<u8>,
    count: u32,
    partitions: Vec<Arc<PartitionState>>,
    rooms: Vec<Room>,
    path: Path,
    state: Mutex<Turn>,
    woken: Condvar,
}

enum Turn {
    Waiting,
    Lead,
    /// Nobody leads, or did not for a moment: what needs no lead may try again.
    Again,
    Done(Result<Committed>),
}

#[derive(Default)]
struct Queue {
    leading: bool,
    /// Who gets the lead, one after the other.
    waiting: VecDeque<Arc<Waiter>>,
    /// Single changes that found the gate closed: they want no lead, and queued for it they would keep the gate closed
    /// for each other for as long as there is always one. One for each thread at most.
    outside: Vec<Arc<Waiter>>,
}

/// How often a single change waits for the gate before it queues for the lead.
const PATIENCE: usize = 3;

/// The path of every write. Thread safe.
pub(crate) struct Committer {
    queue: Mutex<Queue>,
    wal: Arc<Wal>,
    visible: Visible,
    numbers: Numbers,
    poison: Arc<Poison>,
    reserve: Arc<Reserve>,
    /// Set between two commits, so that none comes after what closing takes for the last.
    closed: AtomicBool,
    /// What was visible when it began to count.
    start: SeqNo,
    /// Of those who led.
    commits: AtomicU64,
    records: AtomicU64,
}

impl Committer {
    /// Continues behind what is visible.
    pub(crate) fn new(wal: Arc<Wal>, visible: Visible, poison: Arc<Poison>, reserve: Arc<Reserve>) -> Committer {
        let (commits, records) = (AtomicU64::new(0), AtomicU64::new(0));
        let (closed, start, numbers) = (AtomicBool::new(false), visible.get(), Numbers::new(visible.clone()));
        let queue = Mutex::default();
        Committer { queue, wal, visible, numbers, poison, reserve, closed, start, commits, records }
    }

    /// Writes, applies and publishes a commit; says where it stands.
    ///
    /// # Errors
    /// Those of the log; `Poisoned` if the log has the commit but memory may not, which ends all writing.
    pub(crate) fn commit(&self, commit: Commit<'_>) -> Result<Committed> {
        let mut queue = lock(&self.queue);
        if !queue.leading {
            queue.leading = true;
            drop(queue);
            let _lead = Lead::begin(self);
            return self.write_or_make_space(&[commit]);
        }
        let waiter = Arc::new(Waiter {
            payload: commit.payload.to_vec(),
            count: commit.count,
            partitions: commit.partitions.to_vec(),
            rooms: commit.rooms.to_vec(),
            path: commit.path,
            state: Mutex::new(Turn::Waiting),
            woken: Condvar::new(),
        });
        queue.waiting.push_back(Arc::clone(&waiter));
        drop(queue);
        match waiter.wait() {
            Turn::Done(result) => result,
            Turn::Lead | Turn::Again | Turn::Waiting => self.lead_group(&waiter),
        }
    }

    /// Makes a single change of a pool, beside others; gives its number when it is visible. The log gets the `payload`,
    /// if there is one. On a full disk a removal gets space from the disk reserve.
    ///
    /// # Errors
    /// `OutOfSpace` from the pool or the log, and others of the log: nothing was changed. `Poisoned` if nobody knows.
    pub(crate) fn change(&self, pool: &dyn PmemTree, record: &Record<'_>, payload: Option<&[u8]>) -> Result<SeqNo> {
        loop {
            let done = self.change_once(pool, record, payload);
            let removes = payload.is_some() && record.kind.is_removal();
            if !(removes && is_full(&done) && self.make_space()) {
                return done;
            }
        }
    }

    fn change_once(&self, pool: &dyn PmemTree, record: &Record<'_>, payload: Option<&[u8]>) -> Result<SeqNo> {
        for _ in 0..PATIENCE {
            for _ in 0..2 {
                if let Some(seqno) = self.change_beside(pool, record, payload)? {
                    return Ok(seqno);
                }
                self.numbers.linger();
            }
            self.wait_outside();
        }
        self.alone(|| self.change_leading(pool, record, payload))
    }

    /// Waits until who leads has ended, if anybody does.
    fn wait_outside(&self) {
        let mut queue = lock(&self.queue);
        if queue.leading {
            let waiter = Arc::new(Waiter::empty());
            queue.outside.push(Arc::clone(&waiter));
            drop(queue);
            waiter.wait();
        }
    }

    /// The same, unless somebody leads.
    fn change_beside(&self, pool: &dyn PmemTree, record: &Record<'_>, payload: Option<&[u8]>) -> Result<Option<SeqNo>> {
        let (mut taken, mut unused) = (None, None);
        let made = self.make(pool, record, &mut || {
            let mut take = || {
                taken = self.numbers.take();
                taken
            };
            let Some(payload) = payload else { return Ok(take()) };
            let appended = self.wal.append_taking(payload, self.numbers.next(), take);
            if let Err(error) = &appended
                && error.kind() != ErrorKind::Poisoned
            {
                unused = taken.take();
            }
            appended
        });
        if let Some(unused) = unused {
            // Nobody has it, and the log will say so. Not before the leaf is let go of, because this may wait; and
            // where it never becomes visible it has to be counted.
            self.numbers.finish(unused);
            self.numbers.wait(unused);
        }
        match (made, taken) {
            (Ok(_), None) => Ok(None),
            (Ok(_), Some(seqno)) => {
                self.numbers.finish(seqno);
                if self.numbers.wait(seqno) { Ok(taken) } else { self.poison.check().map(|()| None) }
            }
            (Err(error), None) => Err(error),
            (Err(error), Some(seqno)) => {
                let error = self.poison.set(error);
                self.numbers.lose(seqno);
                Err(error)
            }
        }
    }

    /// The same for who leads.
    fn change_leading(&self, pool: &dyn PmemTree, record: &Record<'_>, payload: Option<&[u8]>) -> Result<SeqNo> {
        let seqno = self.next(1)?;
        let mut taken = false;
        let made = self.make(pool, record, &mut || {
            if let Some(payload) = payload {
                self.poison.watch(self.wal.append_taking(payload, seqno, || Some(seqno)))?;
            }
            taken = true;
            Ok(Some(seqno))
        });
        made.map_err(|error| if taken { self.poison.set(error) } else { error })?;
        self.visible.publish(seqno);
        Ok(seqno)
    }

    fn make(&self, pool: &dyn PmemTree, record: &Record<'_>, turn: &mut TakeNumber<'_>) -> Result<bool> {
        let Record { kind, key, value, .. } = *record;
        catch_unwind(AssertUnwindSafe(|| pool.change(kind, key, value, turn)))
            .unwrap_or_else(|_| Err(self.poison.set(Error::new(ErrorKind::Poisoned, "a comparator panicked"))))
    }

    /// The next number, for who leads and wants so many.
    fn next(&self, count: u64) -> Result<SeqNo> {
        self.poison.check()?;
        if self.closed.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Closed, "the database is closed"));
        }
        let next = self.visible.get().plus(1);
        if SeqNo::MAX.0 - next.0 < count {
            return Err(Error::unsupported("the database has used up its sequence numbers"));
        }
        Ok(next)
    }

    /// Runs `work` while nobody else commits: what it sees is the state between two commits.
    pub(crate) fn alone<R>(&self, work: impl FnOnce() -> R) -> R {
        let mut queue = lock(&self.queue);
        if queue.leading {
            let waiter = Arc::new(Waiter::empty());
            queue.waiting.push_back(Arc::clone(&waiter));
            drop(queue);
            waiter.wait();
        } else {
            queue.leading = true;
            drop(queue);
        }
        let _lead = Lead::begin(self);
        work()
    }

    /// Lets no further commit in. What is visible when this returns is the last there is.
    pub(crate) fn close(&self) {
        self.alone(|| self.closed.store(true, Ordering::Relaxed));
    }

    /// The new leader takes everybody who queued behind it along.
    fn lead_group(&self, own: &Arc<Waiter>) -> Result<Committed> {
        let lead = Lead::begin(self);
        let mut group = vec![Arc::clone(own)];
        {
            let mut queue = lock(&self.queue);
            while queue.waiting.front().is_some_and(|next| next.count > 0) {
                group.extend(queue.waiting.pop_front());
            }
        }
        let commits: Vec<Commit<'_>> = group.iter().map(|waiter| waiter.commit()).collect();
        let guarded = |work: &dyn Fn() -> Result<Committed>| {
            catch_unwind(AssertUnwindSafe(work))
                .unwrap_or_else(|_| Err(self.poison.set(Error::new(ErrorKind::Poisoned, "a commit panicked"))))
        };
        let result = guarded(&|| self.write_or_make_space(&commits));
        // On a full disk, those that only remove need not fail with the others.
        let removals: Vec<bool> = commits.iter().map(|commit| is_full(&result) && commit.only_removes()).collect();
        let mut removed = result.clone();
        if removals.contains(&true) && removals.contains(&false) {
            let chosen: Vec<_> =
                commits.iter().zip(&removals).filter(|(_, chosen)| **chosen).map(|(c, _)| *c).collect();
            removed = guarded(&|| self.write_or_make_space(&chosen));
        }
        drop(lead);
        let outcome = |removal: &bool| if *removal { removed.clone() } else { result.clone() };
        for (follower, removal) in group.iter().zip(&removals).skip(1) {
            follower.finish(Turn::Done(outcome(removal)));
        }
        outcome(&removals[0])
    }

    /// Writes a group; if the disk is full and all of it only removes, with space from the disk reserve.
    fn write_or_make_space(&self, commits: &[Commit<'_>]) -> Result<Committed> {
        loop {
            let written = self.write(commits);
            if !(is_full(&written) && commits.iter().all(Commit::only_removes) && self.make_space()) {
                return written;
            }
        }
    }

    /// Makes some space for a commit that only removes; false if there is none left to give.
    fn make_space(&self) -> bool {
        self.wal.drop_spares() || self.reserve.release_for_removes()
    }

    /// Steps 2 and 3, for the leader. What ends all writing is known to everybody before the lead is handed over.
    fn write(&self, commits: &[Commit<'_>]) -> Result<Committed> {
        let first = self.next(commits.iter().map(|commit| u64::from(commit.count)).sum())?;
        let mut next = first;
        match commits {
            [one] if one.path == Path::Logged && self.wal.appended().plus(1) == next => {
                self.poison.watch(self.wal.append(&[one.numbered(&mut next)]))?;
            }
            many => self.append(many, next)?,
        }
        let applied = catch_unwind(AssertUnwindSafe(|| apply_all(commits, first)))
            .unwrap_or_else(|_| Err(Error::new(ErrorKind::Poisoned, "a comparator panicked")));
        // The log has these sequence numbers now; going on without them in memory would use them twice.
        let committed = applied.map_err(|error| self.poison.set(error))?;
        let last = committed.last;
        // Before that is visible: see `counts`.
        self.commits.fetch_add(commits.len() as u64, Ordering::Relaxed);
        self.records.fetch_add(last.0 + 1 - first.0, Ordering::Relaxed);
        self.visible.publish(last);
        Ok(committed)
    }

    /// Appends those of a group that the log is to have, with what it must know of the others.
    fn append(&self, commits: &[Commit<'_>], mut next: SeqNo) -> Result<()> {
        let mut frames = Vec::with_capacity(commits.len());
        let mut in_log = self.wal.appended().plus(1);
        for commit in commits {
            frames.extend(gap(in_log, next));
            frames.push(commit.numbered(&mut next));
            in_log = next;
        }
        self.poison.watch(self.wal.append(&frames))?;
        match commits.iter().any(|commit| commit.path == Path::Ahead) {
            true => self.poison.watch(self.wal.sync(self.wal.appended(), false)),
            false => Ok(()),
        }
    }

    /// Brings the log to what is visible, although pools have used the last numbers without it.
    pub(crate) fn close_gap(&self) -> Result<()> {
        self.alone(|| {
            let frames: Vec<_> = gap(self.wal.appended().plus(1), self.visible.get().plus(1)).collect();
            if frames.is_empty() { Ok(()) } else { self.poison.watch(self.wal.append(&frames)) }
        })
    }

    /// Commits and records written since the database was opened.
    pub(crate) fn counts(&self) -> (u64, u64) {
        // What is visible and came in no group were single changes.
        let visible = self.visible.get().0 - self.start.0;
        let (commits, grouped) = (self.commits.load(Ordering::Relaxed), self.records.load(Ordering::Relaxed));
        let single = visible.saturating_sub(grouped);
        (commits + single, grouped + single)
    }
}

/// Whether it failed because the disk is full, or a pool.
pub(crate) fn is_full<T>(result: &Result<T>) -> bool {
    matches!(result, Err(error) if error.kind() == ErrorKind::OutOfSpace)
}

/// Puts the records of all commits into their trees.
fn apply_all(commits: &[Commit<'_>], first: SeqNo) -> Result<Committed> {
    let mut seqno = first;
    let mut sealed = false;
    for commit in commits {
        let mut at = 0;
        let mut rooms = commit.rooms.iter();
        for record in Records::new(commit.payload) {
            let record = record?;
            if commit.partitions[at].id != record.partition {
                at = commit
                    .partitions
                    .iter()
                    .position(|partition| partition.id == record.partition)
                    .ok_or_else(|| Error::invalid("a commit names a partition that it did not bring"))?;
            }
            let entry = EntryRef { user: record.key, seqno, kind: record.kind, value: record.value };
            if let Some(tree) = commit.partitions[at].tree_if_built() {
                let room = if tree.takes_room(record.kind) { rooms.next().copied() } else { None };
                sealed |= tree.apply(entry, room)?;
            }
            seqno = seqno.plus(1);
        }
    }
    Ok(Committed { last: SeqNo(seqno.0 - 1), sealed })
}

/// The lead, handed over when dropped, also by a panic.
struct Lead<'a>(&'a Committer);

impl<'a> Lead<'a> {
    /// For who has set `leading`, or got the lead from another.
    fn begin(committer: &'a Committer) -> Lead<'a> {
        let lead = Lead(committer);
        committer.numbers.close();
        lead
    }
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.poison.set(Error::new(ErrorKind::Poisoned, "a commit panicked"));
        }
        // Otherwise it stays closed: what comes finds out why.
        let may_open = !self.0.closed.load(Ordering::Relaxed) && !self.0.poison.is_set();
        let mut queue = lock(&self.0.queue);
        let (next, outside) = (queue.waiting.pop_front(), std::mem::take(&mut queue.outside));
        // For a moment at least, if somebody waits for that.
        self.0.numbers.open(may_open && (next.is_none() || !outside.is_empty()));
        queue.leading = next.is_some();
        drop(queue);
        outside.iter().for_each(|waiter| waiter.finish(Turn::Again));
        if let Some(next) = next {
            next.finish(Turn::Lead);
        }
    }
}

impl Waiter {
    /// One with nothing to commit.
    fn empty() -> Waiter {
        Waiter {
            payload: Vec::new(),
            count: 0,
            partitions: Vec::new(),
            rooms: Vec::new(),
            path: Path::Logged,
            state: Mutex::new(Turn::Waiting),
            woken: Condvar::new(),
        }
    }

    fn commit(&self) -> Commit<'_> {
        Commit {
            payload: &self.payload,
            count: self.count,
            partitions: &self.partitions,
            rooms: &self.rooms,
            path: self.path,
        }
    }

    fn wait(&self) -> Turn {
        let mut state = lock(&self.state);
        while matches!(*state, Turn::Waiting) {
            state = self.woken.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        std::mem::replace(&mut *state, Turn::Waiting)
    }

    fn finish(&self, turn: Turn) {
        *lock(&self.state) = turn;
        self.woken.notify_one();
    }
}
