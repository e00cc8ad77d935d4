//! Making the log durable: one leads, the others wait for it, and nobody who appends does.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use crate::base::edit::Epoch;
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::vfs::File;
use crate::wal::log::Wal;

/// The longest that a leader waits for company, in nanoseconds.
const GATHER_MAX_NS: u64 = 2_000_000;
/// Less than this is not worth going to sleep for.
const GATHER_MIN_NS: u64 = 20_000;
/// For so many groups after two threads last met, a leader expects company.
const SOCIABLE_GROUPS: u32 = 8;

/// Who syncs and who waits.
#[derive(Debug)]
pub(crate) struct SyncState {
    /// Whether some thread syncs or gathers.
    leading: bool,
    /// Up to where the running sync reaches, once that is settled.
    reaches: Option<SeqNo>,
    /// Callers that the next sync will serve.
    joined: u32,
    /// Whether one of them wants all metadata synced.
    want_all: bool,
    /// Up to here all metadata is synced too.
    durable_all: SeqNo,
    /// Callers that the last two syncs served.
    groups: [u32; 2],
    /// Groups for which company is still expected.
    sociable: u32,
    /// Running average of a sync, in nanoseconds.
    average_ns: u64,
    /// The leader waits for this many.
    awaited: u32,
}

impl SyncState {
    pub(super) fn new(durable: SeqNo) -> SyncState {
        SyncState {
            leading: false,
            reaches: None,
            joined: 0,
            want_all: false,
            durable_all: durable,
            groups: [0; 2],
            sociable: 0,
            average_ns: 0,
            awaited: 0,
        }
    }

    /// How many callers to wait for, and for how long at most; pure.
    ///
    /// Writers that commit in a closed loop otherwise fall into two half groups that take turns, each waiting for the
    /// other's sync.
    fn company(&self) -> Option<(u32, Duration)> {
        let wanted = self.groups[0] + self.groups[1];
        let patience = (self.average_ns / 4).min(GATHER_MAX_NS);
        let worth_it = self.sociable > 0 && self.joined < wanted && patience >= GATHER_MIN_NS;
        worth_it.then_some((wanted, Duration::from_nanos(patience)))
    }
}

/// Files to sync, in order.
struct Batch {
    sealed: Vec<(Epoch, Arc<dyn File>)>,
    active: Option<Arc<dyn File>>,
    target: SeqNo,
}

impl Wal {
    /// Returns once everything up to `through` survives power loss; with `all`, the files' metadata too. Callers at the
    /// same time share one sync.
    ///
    /// # Errors
    /// `Poisoned`, for ever, once a sync or a write failed.
    pub(crate) fn sync(&self, through: SeqNo, all: bool) -> Result<()> {
        self.poison.check()?;
        let through = through.min(self.appended());
        if !all && self.durable() >= through {
            return Ok(());
        }
        let mut state = self.sync_state();
        self.join(&mut state, through, all);
        loop {
            self.poison.check()?;
            if self.durable() >= through && (!all || state.durable_all >= through) {
                return Ok(());
            }
            if !state.leading {
                state.leading = true;
                self.lead(state)?;
                state = self.sync_state();
            } else {
                state = self.synced.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn sync_state(&self) -> MutexGuard<'_, SyncState> {
        self.sync.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the caller among those whom the next sync serves, unless the running one does.
    fn join(&self, state: &mut SyncState, through: SeqNo, all: bool) {
        if state.leading {
            state.sociable = SOCIABLE_GROUPS;
        }
        if !all && state.reaches.is_some_and(|reaches| reaches >= through) {
            return;
        }
        state.joined += 1;
        state.want_all |= all;
        if state.awaited > 0 && state.joined >= state.awaited {
            self.gathered.notify_one();
        }
    }

    /// Syncs everything appended so far, for all who joined.
    fn lead(&self, mut state: MutexGuard<'_, SyncState>) -> Result<()> {
        let role = LeaderRole { wal: self, done: false };
        if let Some((wanted, patience)) = state.company() {
            state.awaited = wanted;
            let (woken, _) = self
                .gathered
                .wait_timeout_while(state, patience, |state| state.joined < state.awaited)
                .unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.awaited = 0;
        }
        let (group, all) = (std::mem::take(&mut state.joined), std::mem::take(&mut state.want_all));
        let batch = self.batch(true);
        let target = batch.target;
        state.reaches = Some(target);
        state.groups = [state.groups[1], group];
        state.sociable = state.sociable.saturating_sub(1);
        drop(state);

        let start = self.env.monotonic_ns();
        self.run(batch, all)?;
        let took = self.env.monotonic_ns().saturating_sub(start);
        let mut state = self.sync_state();
        state.average_ns = if state.average_ns == 0 { took } else { (state.average_ns * 7 + took) / 8 };
        if all {
            state.durable_all = state.durable_all.max(target);
        }
        drop(state);
        role.finish();
        self.note_durable();
        Ok(())
    }

    /// Syncs sealed segments that are not synced yet, as the only one who syncs; false if there were none.
    pub(super) fn sync_sealed_segments(&self) -> Result<bool> {
        let mut state = self.sync_state();
        while state.leading {
            state = self.synced.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        self.poison.check()?;
        let batch = self.batch(false);
        if batch.sealed.is_empty() {
            return Ok(false);
        }
        state.leading = true;
        state.reaches = Some(batch.target);
        drop(state);
        let role = LeaderRole { wal: self, done: false };
        self.run(batch, false)?;
        role.finish();
        self.note_durable();
        Ok(true)
    }

    fn batch(&self, with_active: bool) -> Batch {
        let mut log = self.log();
        let unsynced = |sealed: &crate::wal::log::SealedSegment| {
            sealed.unsynced.as_ref().map(|file| (sealed.info.epoch, Arc::clone(file)))
        };
        let sealed = log.sealed.iter().filter_map(unsynced).collect();
        let target = if with_active { log.last() } else { SeqNo(log.active().first.0 - 1) };
        let active = with_active.then(|| Arc::clone(&log.active().handle));
        Batch { sealed, active, target }
    }

    /// Syncs the files and moves the durable point. Only one thread at a time may be in here: the system reports a failed
    /// write-back once per open file, so of two syncs at the same time one would wrongly succeed.
    fn run(&self, batch: Batch, all: bool) -> Result<()> {
        let sync_all_files = || {
            self.host.before_sync()?;
            let files = batch.sealed.iter().map(|(_, file)| file).chain(&batch.active);
            files.into_iter().try_for_each(|file| if all { file.sync_all() } else { file.sync_data() })
        };
        sync_all_files().map_err(|e| self.poison.set(e))?;
        self.syncs.fetch_add(1, Ordering::Relaxed);
        let mut log = self.log();
        for (epoch, _) in &batch.sealed {
            if let Some(sealed) = log.sealed.iter_mut().find(|sealed| sealed.info.epoch == *epoch) {
                sealed.unsynced = None;
            }
        }
        drop(log);
        self.durable.fetch_max(batch.target.0, Ordering::AcqRel);
        Ok(())
    }

    /// Background work: syncs sealed segments, and once the log has needed a second segment keeps a spare file ready for
    /// the next. False if there was nothing to do.
    ///
    /// # Errors
    /// `Poisoned` if a sync failed; `OutOfSpace` and `Io` if no spare could be made, which hurts nobody yet.
    pub(crate) fn sync_sealed(&self) -> Result<bool> {
        let synced = self.sync_sealed_segments()?;
        let log = self.log();
        if log.begun < 2 || !log.spares.is_empty() {
            return Ok(synced);
        }
        drop(log);
        let (_, file) = self.host.new_segment()?;
        self.create_spare(file)?;
        self.log().spares.push(file);
        Ok(true)
    }
}

/// Gives the leadership back and wakes everyone, however the leader ended; after a panic the log is poisoned.
struct LeaderRole<'a> {
    wal: &'a Wal,
    done: bool,
}

impl LeaderRole<'_> {
    fn finish(mut self) {
        self.done = true;
    }
}

impl Drop for LeaderRole<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.wal.poison.set(Error::new(ErrorKind::Poisoned, "a sync of the log did not come to its end"));
        }
        let mut state = self.wal.sync_state();
        state.leading = false;
        state.reaches = None;
        drop(state);
        self.wal.synced.notify_all();
    }
}
