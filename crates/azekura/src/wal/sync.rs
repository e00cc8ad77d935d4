//! Group syncs of the WAL: one thread leads, other threads that requested a sync wait for it, and appending threads
//! do not wait.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::thread;

use crate::base::sync::lock;
use crate::base::version_edit::WalEpoch;
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::vfs::File;
use crate::wal::writer::{SealedWalSegment, SyncState, Wal};

/// Maximum number of times that a leader checks for more sync requests, in case the clock is slow.
const BATCHING_POLLS_MAX: u32 = 4_000;
/// After two sync requests overlapped, the leaders of this many groups wait for more requests.
const BATCHING_GROUPS: u32 = 8;

/// Files to sync, oldest first, and the last sequence number that is durable then.
struct UnsyncedSegments {
    sealed: Vec<(WalEpoch, Arc<dyn File>)>,
    active: Option<(WalEpoch, Arc<dyn File>)>,
    target: SeqNo,
}

impl Wal {
    /// Returns once everything up to `through` survives power loss; with `all`, the files' metadata is durable too.
    /// Concurrent callers share one sync.
    ///
    /// # Errors
    /// `Poisoned` for every call after a sync or a write failed. `Io` if the process has too many open files: nothing
    /// was synced, and a later call may succeed.
    pub(crate) fn sync(&self, through: SeqNo, all: bool) -> Result<()> {
        self.poison.check()?;
        let through = through.min(self.appended());
        if !all && self.durable() >= through {
            return Ok(());
        }
        let mut state = self.sync_state();
        self.register_waiter(&mut state, through, all);
        loop {
            self.poison.check()?;
            if self.durable() >= through && (!all || state.durable_with_metadata >= through) {
                return Ok(());
            }
            if !state.has_leader {
                state.has_leader = true;
                self.lead_sync(state)?;
                state = self.sync_state();
            } else {
                state = self.sync_done.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn sync_state(&self) -> MutexGuard<'_, SyncState> {
        lock(&self.sync)
    }

    /// Adds the caller to the threads that the next sync serves, unless the running sync covers `through`.
    fn register_waiter(&self, state: &mut SyncState, through: SeqNo, all: bool) {
        debug_assert!(state.has_leader || state.sync_target.is_none(), "only a leader sets a target");
        debug_assert!(state.durable_with_metadata <= self.durable(), "metadata is synced with the data");
        if state.has_leader {
            state.batching_groups_left = BATCHING_GROUPS;
        }
        if !all && state.sync_target.is_some_and(|reaches| reaches >= through) {
            return;
        }
        state.waiters += 1;
        state.wants_metadata |= all;
    }

    /// Syncs everything appended so far for all waiting threads.
    fn lead_sync<'a>(&'a self, mut state: MutexGuard<'a, SyncState>) -> Result<()> {
        debug_assert!(state.has_leader && state.sync_target.is_none(), "the caller leads the next sync");
        let role = SyncLeaderGuard { wal: self, finished: false };
        if let Some((wanted, window_ns)) = state.batching_window() {
            drop(state);
            self.wait_for_followers(wanted, window_ns);
            state = self.sync_state();
        }
        let (group, all) = (std::mem::take(&mut state.waiters), std::mem::take(&mut state.wants_metadata));
        let batch = self.unsynced_segments(true);
        let target = batch.target;
        debug_assert!(target >= self.durable(), "a sync never goes back");
        state.sync_target = Some(target);
        state.last_group_sizes = [state.last_group_sizes[1], group];
        state.batching_groups_left = state.batching_groups_left.saturating_sub(1);
        drop(state);

        let start = self.env.monotonic_ns();
        let ran = self.sync_files(&role, batch, all);
        let took = self.env.monotonic_ns().saturating_sub(start);
        let mut state = self.sync_state();
        debug_assert_eq!(state.sync_target, Some(target), "one thread at a time leads");
        debug_assert!(
            ran.is_err() || self.durable() == target,
            "exactly the commits that were appended before the sync are durable"
        );
        if let Err(error) = ran {
            state.wants_metadata |= all; // a waiting thread leads the next sync
            drop(state);
            role.release();
            return Err(error);
        }
        state.average_sync_ns = if state.average_sync_ns == 0 { took } else { (state.average_sync_ns * 7 + took) / 8 };
        if all {
            state.durable_with_metadata = state.durable_with_metadata.max(target);
        }
        drop(state);
        role.release();
        self.append_watermark();
        Ok(())
    }

    /// Yields to other threads until `wanted` callers wait or `window_ns` nanoseconds have passed.
    fn wait_for_followers(&self, wanted: u32, window_ns: u64) {
        let start = self.env.monotonic_ns();
        for _ in 0..BATCHING_POLLS_MAX {
            thread::yield_now();
            if self.sync_state().waiters >= wanted || self.env.monotonic_ns().saturating_sub(start) >= window_ns {
                return;
            }
        }
    }

    /// Syncs the unsynced sealed segments, and the active one if `with_active`, while no other thread syncs. False if
    /// there is no file to sync.
    pub(super) fn sync_exclusively(&self, with_active: bool) -> Result<bool> {
        let mut state = self.sync_state();
        while state.has_leader {
            state = self.sync_done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        self.poison.check()?;
        debug_assert!(state.sync_target.is_none(), "no sync is running");
        let batch = self.unsynced_segments(with_active);
        if batch.sealed.is_empty() && batch.active.is_none() {
            return Ok(false);
        }
        state.has_leader = true;
        state.sync_target = Some(batch.target);
        drop(state);
        let role = SyncLeaderGuard { wal: self, finished: false };
        let ran = self.sync_files(&role, batch, false);
        role.release();
        ran?;
        self.append_watermark();
        Ok(true)
    }

    fn unsynced_segments(&self, with_active: bool) -> UnsyncedSegments {
        let mut state = self.lock_writer();
        // Unmapped before the sync. Otherwise each page that the system writes is write-protected in the mapping, which
        // interrupts all processors.
        let sealed_mapping = state.sealed_mapping.take();
        let unsynced =
            |sealed: &SealedWalSegment| sealed.unsynced_file.as_ref().map(|file| (sealed.info.epoch, Arc::clone(file)));
        let sealed = state.sealed.iter().filter_map(unsynced).collect();
        let target = if with_active { state.last_seqno() } else { SeqNo(state.active().first_seqno.0 - 1) };
        let active = with_active.then(|| (state.active().epoch, Arc::clone(&state.active().handle)));
        debug_assert!(target <= self.appended(), "only appended commits are synced");
        drop(state);
        drop(sealed_mapping); // after the lock is released, so that appending threads do not wait
        UnsyncedSegments { sealed, active, target }
    }

    /// Syncs the files and advances the last durable sequence number. Only the leader runs this, because the operating
    /// system reports a failed write-back once per open file, so of two concurrent syncs one would wrongly succeed.
    fn sync_files(&self, _leader: &SyncLeaderGuard<'_>, batch: UnsyncedSegments, all: bool) -> Result<()> {
        debug_assert!(batch.sealed.is_sorted_by_key(|(epoch, _)| *epoch), "the oldest segment is synced first");
        debug_assert!(
            batch.active.as_ref().is_none_or(|(active, _)| batch.sealed.iter().all(|(epoch, _)| epoch < active)),
            "the active segment is synced last"
        );
        self.host.sync_dependencies().map_err(|e| if e.is_too_many_open_files() { e } else { self.poison.set(e) })?;
        let sync_all_files = || {
            let mut files = batch.sealed.iter().chain(&batch.active);
            files.try_for_each(|(_, file)| if all { file.sync_all() } else { file.sync_data() })
        };
        sync_all_files().map_err(|e| self.poison.set(e))?;
        self.syncs.fetch_add(1, Ordering::Relaxed);
        let mut state = self.lock_writer();
        for (epoch, _) in &batch.sealed {
            if let Some(sealed) = state.sealed.iter_mut().find(|sealed| sealed.info.epoch == *epoch) {
                sealed.unsynced_file = None;
            }
        }
        let active = batch.active.map(|(epoch, _)| epoch);
        if active == Some(state.active().epoch) {
            state.active().header_synced = true;
        }
        debug_assert!(batch.target <= state.last_seqno(), "only appended commits are durable");
        debug_assert!(
            state.sealed.iter().rev().take(2).all(|sealed| {
                // A segment without commits, which was begun and sealed meanwhile, is synced later.
                let has_commits = sealed.info.first_seqno <= sealed.info.last_seqno;
                let is_covered =
                    has_commits && sealed.info.last_seqno <= batch.target && Some(sealed.info.epoch) != active;
                !is_covered || sealed.unsynced_file.is_none()
            }),
            "every segment up to the target is synced"
        );
        drop(state);
        self.durable.fetch_max(batch.target.0, Ordering::AcqRel);
        Ok(())
    }

    /// Background work: syncs sealed segments. With `keep_spare`, creates a spare file for the next segment, if there
    /// is none and the WAL has begun at least two segments. False if there was nothing to do.
    ///
    /// # Errors
    /// `Poisoned` if a sync failed; `OutOfSpace` and `Io` if no spare segment could be made, which has no effect on
    /// commits yet.
    pub(crate) fn sync_sealed(&self, keep_spare: bool) -> Result<bool> {
        let synced = self.sync_exclusively(false)?;
        let state = self.lock_writer();
        if !keep_spare || state.segments_started < 2 || !state.spare_files.is_empty() {
            return Ok(synced);
        }
        drop(state);
        let (_, file) = self.host.allocate_segment()?;
        self.create_spare_file(file)?;
        let mut state = self.lock_writer();
        state.spare_files.push(file);
        self.check_invariants(&state);
        Ok(true)
    }
}

/// Releases the leader role and wakes all waiting threads, also if the leader panics. After a panic the WAL is
/// poisoned.
struct SyncLeaderGuard<'a> {
    wal: &'a Wal,
    finished: bool,
}

impl SyncLeaderGuard<'_> {
    fn release(mut self) {
        self.finished = true;
    }
}

impl Drop for SyncLeaderGuard<'_> {
    fn drop(&mut self) {
        if !self.finished {
            self.wal.poison.set(Error::new(ErrorKind::Poisoned, "a sync of the log did not complete"));
        }
        let mut state = self.wal.sync_state();
        debug_assert!(state.has_leader || thread::panicking(), "the leader role is released once");
        state.has_leader = false;
        state.sync_target = None;
        drop(state);
        self.wal.sync_done.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Mutex;

    use super::*;
    use crate::testing::MemFs;
    use crate::testing::wal::wal_fixture::{WalFixture, replay_with_mode, wal_options};
    use crate::testing::{Fault, FaultFs, FaultPlan, OpKind};
    use crate::vfs::Env;
    use crate::vfs::env::SystemEnv;
    use crate::wal::options::{RecoveryMode, WalCommit};

    fn open_on_fault_fs() -> (FaultFs, WalFixture) {
        let fs = FaultFs::new(Arc::new(MemFs::new()));
        let fixture = WalFixture::open(Arc::new(fs.clone()), wal_options(1 << 20, true), 1).unwrap();
        (fs, fixture)
    }

    #[test]
    fn sync_is_skipped_when_already_durable() {
        let (fs, fixture) = open_on_fault_fs();
        fixture.append(1, b"a").unwrap();
        fixture.append(1, b"b").unwrap();
        let syncs = fs.count(OpKind::Sync);
        fixture.wal.sync(SeqNo(1), false).unwrap();
        assert_eq!(fixture.wal.durable(), SeqNo(2), "the sync covers everything appended");
        fixture.wal.sync(SeqNo(2), false).unwrap();
        fixture.wal.sync(SeqNo(99), false).unwrap();
        assert_eq!(
            (fixture.wal.stats().syncs, fixture.callbacks.sync_dependencies_calls.load(Ordering::Relaxed)),
            (1, 1)
        );
        assert_eq!(fs.count(OpKind::Sync), syncs + 2, "manifest and segment");
        fixture.wal.sync(SeqNo(2), true).unwrap();
        fixture.wal.sync(SeqNo(2), true).unwrap();
        assert_eq!(fixture.wal.stats().syncs, 2, "one more sync, for the metadata");
    }

    /// Regression: a single change of a pool begins a segment and finds allocation closed, so the segment has no
    /// commit. The next commit does not fit and seals it. A sync that had begun before failed an assertion.
    #[test]
    fn an_empty_segment_is_sealed_during_a_sync() {
        let mini = WalFixture::open(Arc::new(MemFs::new()), wal_options(4096, false), 1).unwrap();
        mini.append(1, &[1; 3000]).unwrap();
        mini.sync();
        let wal = Arc::clone(&mini.wal);
        let appends = move || {
            assert_eq!(wal.append_with_assigned_seqno(&[2; 3000], SeqNo(2), || None).unwrap(), None);
            wal.append(&[WalCommit { first_seqno: SeqNo(2), seqno_count: 1, payload: &[3; 9000] }]).unwrap();
        };
        *mini.callbacks.call_in_sync.lock().unwrap() = Some(Box::new(appends));
        mini.wal.sync(SeqNo(1), true).unwrap();
        assert_eq!((mini.wal.durable(), mini.wal.segments().len()), (SeqNo(1), 3));
        mini.sync();
        assert_eq!(mini.wal.durable(), SeqNo(2));
    }

    #[test]
    fn failed_sync_poisons_the_wal() {
        for path in [".wal", "MANIFEST"] {
            let (fs, fixture) = open_on_fault_fs();
            fixture.append(1, b"a").unwrap();
            let syncs = fs.count(OpKind::Sync);
            fs.inject(FaultPlan::new(OpKind::Sync, 1, Fault::Error(io::ErrorKind::Other)).in_path(path));
            for _ in 0..3 {
                assert_eq!(fixture.wal.sync(SeqNo(1), false).unwrap_err().kind(), ErrorKind::Poisoned);
                assert_eq!(fixture.append(1, b"b").unwrap_err().kind(), ErrorKind::Poisoned);
                assert_eq!(fixture.wal.sync_sealed(true).unwrap_err().kind(), ErrorKind::Poisoned);
            }
            assert_eq!((fixture.wal.durable(), fs.fault_count()), (SeqNo(0), 1));
            let tried = if path == "MANIFEST" { 1 } else { 2 };
            assert_eq!(fs.count(OpKind::Sync), syncs + tried, "the sync is not repeated");
        }
    }

    /// Runs closed-loop writers. A lock keeps the order of the commits, as in the database.
    fn run_closed_loop_writers(fixture: &WalFixture, threads: usize, each: u64) -> Vec<Result<()>> {
        let env = SystemEnv::new();
        let (order, results) = (Arc::new(Mutex::new(())), Arc::new(Mutex::new(Vec::new())));
        let start = |_| {
            let (wal, order, results) = (Arc::clone(&fixture.wal), Arc::clone(&order), Arc::clone(&results));
            let write = move || {
                let turn = lock(&order);
                let first = wal.appended().plus(1);
                wal.append(&[WalCommit { first_seqno: first, seqno_count: 1, payload: &[5; 140] }])?;
                drop(turn);
                wal.sync(first, false)?;
                assert!(wal.durable() >= first);
                Ok(())
            };
            let body = move || {
                let result = (0..each).try_for_each(|_| write());
                lock(&results).push(result);
            };
            env.spawn("writer", Box::new(body)).unwrap()
        };
        let running: Vec<_> = (0..threads).map(start).collect();
        assert!(running.into_iter().all(|thread| thread.join()));
        std::mem::take(&mut *lock(&results))
    }

    #[test]
    fn eight_writers_share_syncs() {
        let env = Arc::new(SystemEnv::new());
        let fixture = WalFixture::open_with_env(Arc::new(MemFs::new()), wal_options(1 << 20, true), env).unwrap();
        fixture.callbacks.sync_delay_us.store(1000, Ordering::Relaxed);
        let results = run_closed_loop_writers(&fixture, 8, 40);
        assert!(results.len() == 8 && results.iter().all(Result::is_ok));
        let stats = fixture.wal.stats();
        assert_eq!((stats.commits, fixture.wal.durable()), (320, SeqNo(320)));
        assert!(stats.syncs < 160, "{} syncs for 320 commits", stats.syncs);
        assert_eq!(replay_with_mode(&fixture.fs, RecoveryMode::Strict).unwrap().0.len(), 320);
    }

    #[test]
    fn every_waiter_wakes_when_a_sync_fails() {
        let (fs, fixture) = open_on_fault_fs();
        fs.inject(FaultPlan::new(OpKind::Sync, 20, Fault::Error(io::ErrorKind::Other)).in_path(".wal").forever());
        let results = run_closed_loop_writers(&fixture, 8, 1000);
        assert!(results.len() == 8);
        assert!(results.iter().all(|result| result.as_ref().unwrap_err().kind() == ErrorKind::Poisoned));
    }
}
