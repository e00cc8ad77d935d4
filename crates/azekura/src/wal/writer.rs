//! The writer of the write-ahead log (WAL): the state that its callers share, the state of group syncs, and appending.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use crate::base::sync::lock;
use crate::base::version_edit::{FileNumber, WalEpoch};
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::record_log::frame::LogFileIdentity;
use crate::record_log::writer::LogPoison;
use crate::record_log::writer::{LogRecord, LogSink, RecordLogWriter};
use crate::vfs::{Env, File, Fs, Mapping, OpenMode};
use crate::wal::format::{SEGMENT_HEADER_LEN, WalSegmentHeader, segment_path};
use crate::wal::format::{SEQNO_GAP_PAYLOAD, seqno_gap_commits};
use crate::wal::options::{WalCallbacks, WalCommit, WalOptions, WalReplayReport, WalSegmentInfo, WalStats};
use crate::wal::segment::{ActiveWalSegment, PopulateStep, WAL_PAGE_SIZE, create_spare_segment, random_file_id};

/// Maximum difference between the highest epoch in a segment header and the highest one in the manifest. A larger one
/// is corruption.
pub(crate) const SKIPPED_EPOCHS_MAX: u32 = 1 << 16;

/// A write-ahead log that is open for appending. Thread safe.
///
/// Lock order: `sync`, then `writer_state`. Neither is held during a sync.
pub(crate) struct Wal {
    pub(super) fs: Arc<dyn Fs>,
    pub(super) dir: PathBuf,
    pub(super) env: Arc<dyn Env>,
    pub(super) host: Arc<dyn WalCallbacks>,
    database_id: [u8; 16],
    pub(super) segment_size: u64,
    use_mmap: bool,
    populates_ahead: bool,
    /// Set when the active segment asks for a worker that populates its mapping.
    populate_requested: AtomicBool,
    pub(super) marks: bool,
    pub(super) writer_state: Mutex<WalWriterState>,
    pub(super) sync: Mutex<SyncState>,
    /// Notified when a sync has ended.
    pub(super) sync_done: Condvar,
    pub(super) appended: AtomicU64,
    pub(super) durable: AtomicU64,
    pub(super) syncs: AtomicU64,
    pub(super) poison: LogPoison,
}

/// The state that appending changes.
pub(super) struct WalWriterState {
    /// `None` only until the first segment is begun.
    pub(super) active: Option<ActiveWalSegment>,
    /// The sequence number of the next commit.
    pub(super) next_seqno: SeqNo,
    /// The highest watermark in the frames of the active segment.
    pub(super) watermark_written: SeqNo,
    pub(super) frame_writer: RecordLogWriter,
    /// Oldest first.
    pub(super) sealed: Vec<SealedWalSegment>,
    /// Sealed segments without needed records that are kept for readers of changes, oldest first, each with the time
    /// until which it was needed, in nanoseconds of the monotonic clock.
    pub(super) retained: Vec<(WalSegmentInfo, u64)>,
    /// Sealed segments that neither a partition nor a reader needs, until the manifest has dropped them.
    pub(super) retired: Vec<WalSegmentInfo>,
    /// The last sequence number of the segments that were retired since the WAL was started.
    pub(super) retired_through: SeqNo,
    pub(super) spare_files: Vec<FileNumber>,
    /// The mapping of the last sealed segment, until a thread unmaps it without the lock.
    pub(super) sealed_mapping: Option<Arc<dyn Mapping>>,
    /// A segment that the manifest lists already, but whose header could not be written yet.
    listed_without_header: Option<(WalEpoch, FileNumber)>,
    /// The epoch of the segment that the next one follows.
    previous_epoch: WalEpoch,
    /// The highest epoch in the header of any segment.
    highest_epoch: WalEpoch,
    /// Number of segments begun since the WAL was started.
    pub(super) segments_started: u64,
    /// Nothing is written any more, because another process may own the files.
    pub(super) writes_stopped: bool,
    pub(super) bytes: u64,
    pub(super) commits: u64,
}

/// A segment that is no longer written to.
pub(super) struct SealedWalSegment {
    pub(super) info: WalSegmentInfo,
    /// The open file, until it is synced.
    pub(super) unsynced_file: Option<Arc<dyn File>>,
}

impl WalWriterState {
    /// The segment being written.
    pub(super) fn active(&mut self) -> &mut ActiveWalSegment {
        self.active.as_mut().expect("the log begins a segment when it is started")
    }

    /// The last sequence number appended.
    pub(super) fn last_seqno(&self) -> SeqNo {
        SeqNo(self.next_seqno.0 - 1)
    }

    /// The sealed segments that were begun since the WAL was started, oldest first. A replay in salvage mode may find
    /// older ones that are not consecutive.
    fn own_sealed_segments(&self) -> &[SealedWalSegment] {
        let begun = usize::try_from(self.segments_started.saturating_sub(1)).unwrap_or(usize::MAX);
        &self.sealed[self.sealed.len() - begun.min(self.sealed.len())..]
    }
}

/// Number of the newest sealed segments that [`Wal::check_invariants`] visits.
const SEALED_CHECKS_MAX: usize = 8;

impl Wal {
    /// Continues the WAL after a replay, at the sequence number `next`. All replayed records must be synced. The caller
    /// calls [`Wal::start_first_segment`] before it appends.
    ///
    /// # Errors
    /// `Io`; the WAL is not started.
    #[expect(clippy::too_many_arguments, reason = "called in one place, and each is another kind of thing")]
    pub(crate) fn start(
        fs: Arc<dyn Fs>,
        dir: &Path,
        env: Arc<dyn Env>,
        database_id: [u8; 16],
        options: WalOptions,
        host: Arc<dyn WalCallbacks>,
        replayed: &WalReplayReport,
        next: SeqNo,
    ) -> Result<Wal> {
        debug_assert!(next > replayed.last_seqno, "the next commit follows the replayed ones");
        debug_assert!(replayed.segments.is_sorted_by(|a, b| a.epoch < b.epoch), "the oldest segment is the first");
        if !replayed.spare_files.is_empty() {
            // A spare file must be durable, header and name, before the manifest lists it. A killed process may have
            // left both only in the page cache.
            for spare in &replayed.spare_files {
                fs.open(&segment_path(dir, *spare), OpenMode::Write)?.sync_data()?;
            }
            fs.sync_dir(dir)?;
        }
        let use_mmap = options.mapped && fs.overwrites_in_place(dir);
        let sealed =
            replayed.segments.iter().map(|info| SealedWalSegment { info: *info, unsynced_file: None }).collect();
        let state = WalWriterState {
            active: None,
            next_seqno: SeqNo(next.0.max(1)),
            watermark_written: SeqNo::ZERO,
            frame_writer: RecordLogWriter::new(),
            sealed,
            retained: replayed.retained.iter().map(|info| (*info, env.monotonic_ns())).collect(),
            retired: Vec::new(),
            retired_through: SeqNo::ZERO,
            spare_files: replayed.spare_files.clone(),
            sealed_mapping: None,
            listed_without_header: None,
            previous_epoch: replayed.last_epoch,
            highest_epoch: replayed.highest_epoch.max(replayed.last_epoch),
            segments_started: 0,
            writes_stopped: false,
            bytes: 0,
            commits: 0,
        };
        let last = state.last_seqno();
        Ok(Wal {
            fs,
            dir: dir.to_path_buf(),
            env,
            host,
            database_id,
            segment_size: options.segment_size.max(WAL_PAGE_SIZE).next_multiple_of(WAL_PAGE_SIZE),
            use_mmap,
            populates_ahead: options.populates_ahead,
            populate_requested: AtomicBool::new(false),
            marks: options.marks,
            writer_state: Mutex::new(state),
            sync: Mutex::new(SyncState { durable_with_metadata: last, ..SyncState::default() }),
            sync_done: Condvar::new(),
            appended: AtomicU64::new(last.0),
            durable: AtomicU64::new(last.0),
            syncs: AtomicU64::new(0),
            poison: LogPoison::default(),
        })
    }

    /// Begins the first segment.
    ///
    /// # Errors
    /// `OutOfSpace` and `Io`; the call can be repeated.
    pub(crate) fn start_first_segment(&self) -> Result<()> {
        self.start_segment(&mut self.lock_writer(), 0)
    }

    pub(super) fn lock_writer(&self) -> MutexGuard<'_, WalWriterState> {
        lock(&self.writer_state)
    }

    /// Checks the state in builds with debug assertions. Called after each change of the lists of segments and files.
    pub(super) fn check_invariants(&self, state: &WalWriterState) {
        if !cfg!(debug_assertions) {
            return;
        }
        assert!(self.durable() <= self.appended(), "only appended commits are durable");
        assert!(self.appended() <= state.last_seqno(), "only written commits are appended");
        assert!(state.watermark_written <= state.last_seqno(), "a watermark is not above the last commit");
        assert!(state.previous_epoch <= state.highest_epoch, "no epoch is above the highest one");
        let newest = state.sealed.len().saturating_sub(SEALED_CHECKS_MAX);
        let sealed = &state.sealed[newest..];
        assert!(sealed.is_sorted_by(|a, b| a.info.epoch < b.info.epoch), "epochs of sealed segments rise");
        if let Some((_, synced)) = sealed.split_last() {
            assert!(synced.iter().all(|one| one.unsynced_file.is_none()), "all segments but the last two are synced");
        }
        let retired_before = |epoch| state.retired.last().is_none_or(|info| info.epoch < epoch);
        let retained_before = |epoch| state.retained.last().is_none_or(|(info, _)| info.epoch < epoch);
        let is_first = |epoch| retired_before(epoch) && retained_before(epoch);
        assert!(state.sealed.first().is_none_or(|one| is_first(one.info.epoch)), "the oldest are retired first");
        let oldest_retained = state.retained.first().map(|(info, _)| info.epoch);
        assert!(oldest_retained.is_none_or(retired_before), "the oldest are retired first");
        assert!(state.retired.is_sorted_by(|a, b| a.epoch < b.epoch), "segments are retired in order");
        let own = state.own_sealed_segments();
        let own = &own[own.len().saturating_sub(SEALED_CHECKS_MAX)..];
        let ends_before = |a: &WalSegmentInfo, first: SeqNo| a.last_seqno.0 + 1 == first.0;
        assert!(
            own.is_sorted_by(|a, b| ends_before(&a.info, b.info.first_seqno)),
            "sequence numbers of sealed segments are consecutive"
        );
        let is_live = |file: FileNumber| {
            sealed.iter().any(|one| one.info.file == file)
                || state.retained.iter().any(|(info, _)| info.file == file)
                || state.active.as_ref().is_some_and(|one| one.file == file)
        };
        let spare = &state.spare_files;
        assert!(spare.iter().all(|file| !is_live(*file)), "a spare file is not a live segment");
        assert!(spare.iter().enumerate().all(|(n, file)| !spare[..n].contains(file)), "a file is listed as spare once");
        if let Some((epoch, file)) = state.listed_without_header {
            assert!(epoch > state.highest_epoch, "the next segment has a new epoch");
            assert!(!spare.contains(&file) && !is_live(file), "the next segment has a file of its own");
        }
        let Some(active) = &state.active else { return };
        assert_eq!(active.epoch, state.previous_epoch, "the next segment follows the active one");
        assert!(
            state.sealed.last().is_none_or(|last| last.info.epoch < active.epoch),
            "the active segment is the last"
        );
        assert!(
            own.last().is_none_or(|last| ends_before(&last.info, active.first_seqno)),
            "the active segment continues the sealed ones"
        );
        assert!(active.first_seqno <= state.next_seqno, "the active segment begins at or before the next commit");
        assert!(active.header_synced || self.durable() < active.first_seqno, "a durable commit is in a synced segment");
    }

    /// Begins a segment with space for `need` bytes and seals the active one.
    ///
    /// # Errors
    /// `OutOfSpace` and `Io`: nothing has changed. `Poisoned` if the header may be partly written, because then the
    /// content of a listed segment is unknown.
    pub(super) fn start_segment(&self, state: &mut WalWriterState, need: u64) -> Result<()> {
        let mut segment = match state.listed_without_header {
            Some(numbers) => self.open_spare_segment(numbers, need)?,
            None => self.add_segment(state, need)?,
        };
        let epoch = segment.epoch;
        debug_assert!(epoch > state.highest_epoch, "a segment gets an epoch that no header has");
        debug_assert!(segment.remaining_bytes() >= need, "the segment has space for the group that begins it");
        let header = WalSegmentHeader {
            file_id: random_file_id(&*self.env),
            database_id: self.database_id,
            epoch,
            previous_epoch: state.previous_epoch,
            first_seqno: state.next_seqno,
        };
        let usual = need + SEGMENT_HEADER_LEN as u64 <= self.segment_size;
        if let Err(error) = segment.write_header(&header, self.use_mmap && usual, self.populates_ahead) {
            // As long as the file has the old header, replay treats the segment as absent, and it can be begun later.
            let is_as_before = error.kind() == ErrorKind::OutOfSpace && segment.has_stale_header();
            return Err(if is_as_before { error } else { self.poison.set(error) });
        }
        state.listed_without_header = None;
        self.seal_active(state);
        (state.previous_epoch, state.highest_epoch, state.watermark_written) = (epoch, epoch, SeqNo::ZERO);
        state.segments_started += 1;
        state.active = Some(segment);
        self.check_invariants(state);
        Ok(())
    }

    fn open_spare_segment(&self, numbers: (WalEpoch, FileNumber), need: u64) -> Result<ActiveWalSegment> {
        ActiveWalSegment::open(&*self.fs, &self.dir, numbers, self.segment_size, need)
    }

    /// Takes or creates a spare file, and adds a segment in this file to the manifest.
    fn add_segment(&self, state: &mut WalWriterState, need: u64) -> Result<ActiveWalSegment> {
        debug_assert!(state.listed_without_header.is_none(), "the listed segment is begun first");
        let (epoch, fresh) = self.allocate_segment_above(state.highest_epoch)?;
        let file = match state.spare_files.pop() {
            Some(spare) => spare,
            None => self.create_spare_file(fresh).map(|()| fresh)?,
        };
        let segment = self.open_spare_segment((epoch, file), need);
        let listed = segment.and_then(|segment| self.host.add_segment_to_manifest(epoch, file).map(|()| segment));
        match &listed {
            Ok(_) => state.listed_without_header = Some((epoch, file)),
            Err(e) if e.kind() == ErrorKind::OutOfSpace || e.is_too_many_open_files() => state.spare_files.push(file),
            // The file is not used again in this process. The next open of the database finds it.
            Err(_) => {}
        }
        listed
    }

    /// Allocates an epoch above `highest` and a file number. Power loss may have removed the manifest entry of an epoch
    /// that the header of a file still has.
    fn allocate_segment_above(&self, highest: WalEpoch) -> Result<(WalEpoch, FileNumber)> {
        let mut last = WalEpoch(0);
        for _ in 0..SKIPPED_EPOCHS_MAX {
            let numbers = self.host.allocate_segment()?;
            debug_assert!(numbers.0 > last, "epochs rise with every call");
            last = numbers.0;
            if numbers.0 > highest {
                return Ok(numbers);
            }
        }
        Err(Error::corruption(format!("a log segment has epoch {}, far beyond what the manifest knows", highest.0)))
    }

    fn seal_active(&self, state: &mut WalWriterState) {
        let last = state.last_seqno();
        let Some(mut old) = state.active.take() else { return };
        if self.populates_ahead {
            state.sealed_mapping = old.take_mapping();
        }
        let info = old.segment_info(last);
        debug_assert!(info.first_seqno.0 <= last.0 + 1, "a segment begins at most one after its last commit");
        // Frames after the last synced commit can only be watermarks, which are never synced for their own sake.
        let synced = info.first_seqno <= last && self.durable() >= last;
        state.sealed.push(SealedWalSegment { info, unsynced_file: (!synced).then_some(old.handle) });
    }

    pub(super) fn create_spare_file(&self, file: FileNumber) -> Result<()> {
        create_spare_segment(&*self.fs, &self.dir, file, self.database_id, &*self.env)
    }

    /// The last sequence number appended.
    #[inline]
    pub(crate) fn appended(&self) -> SeqNo {
        SeqNo(self.appended.load(Ordering::Acquire))
    }

    /// Everything up to here survives power loss.
    #[inline]
    pub(crate) fn durable(&self) -> SeqNo {
        SeqNo(self.durable.load(Ordering::Acquire))
    }

    /// Bytes in live segments, which a replay would read.
    pub(crate) fn live_bytes(&self) -> u64 {
        self.segments().iter().map(|segment| segment.end_offset).sum()
    }

    /// The live segments, oldest first; the active one is the last.
    pub(crate) fn segments(&self) -> Vec<WalSegmentInfo> {
        let state = self.lock_writer();
        let active = state.active.as_ref().map(|active| active.segment_info(state.last_seqno()));
        state.sealed.iter().map(|sealed| sealed.info).chain(active).collect()
    }

    /// The segments that are kept for readers of changes, oldest first.
    pub(crate) fn retained_segments(&self) -> Vec<WalSegmentInfo> {
        self.lock_writer().retained.iter().map(|(info, _)| *info).collect()
    }

    /// Whether a commit after `seqno` was in a segment that has been retired. If not, and a reader that needs the
    /// commits after `seqno` is registered, [`Wal::retire`] keeps them.
    pub(crate) fn has_retired_after(&self, seqno: SeqNo) -> bool {
        self.lock_writer().retired_through > seqno
    }

    pub(crate) fn stats(&self) -> WalStats {
        let state = self.lock_writer();
        WalStats { bytes: state.bytes, commits: state.commits, syncs: self.syncs.load(Ordering::Relaxed) }
    }
}

/// Maximum time that a leader waits for more sync requests, in nanoseconds.
const BATCHING_WINDOW_MAX_NS: u64 = 2_000_000;
/// A leader does not wait if the window is shorter than this, in nanoseconds.
const BATCHING_WINDOW_MIN_NS: u64 = 20_000;
/// The state of group syncs: the leader and the waiting threads.
#[derive(Debug, Default)]
pub(crate) struct SyncState {
    /// Whether a thread syncs, or waits for more requests before it syncs.
    pub(super) has_leader: bool,
    /// The last sequence number that the running sync covers, once it is known.
    pub(super) sync_target: Option<SeqNo>,
    /// Number of callers that the next sync serves.
    pub(super) waiters: u32,
    /// Whether one of the waiting callers requested a sync of all metadata.
    pub(super) wants_metadata: bool,
    /// All file metadata is durable up to here too.
    pub(super) durable_with_metadata: SeqNo,
    /// Numbers of callers that the last two syncs served.
    pub(super) last_group_sizes: [u32; 2],
    /// Number of groups for which the leader still waits for more sync requests.
    pub(super) batching_groups_left: u32,
    /// Moving average of the duration of a sync, in nanoseconds.
    pub(super) average_sync_ns: u64,
}

impl SyncState {
    /// The number of callers that the leader waits for, and the maximum time in nanoseconds. `None` if it does not
    /// wait. A pure function.
    ///
    /// Without this window, writers that commit in a closed loop form two half groups that alternate, each waiting for
    /// the sync of the other.
    pub(super) fn batching_window(&self) -> Option<(u32, u64)> {
        let wanted = self.last_group_sizes[0] + self.last_group_sizes[1];
        let window_ns = (self.average_sync_ns / 4).min(BATCHING_WINDOW_MAX_NS);
        let worth_it = self.batching_groups_left > 0 && self.waiters < wanted && window_ns >= BATCHING_WINDOW_MIN_NS;
        worth_it.then_some((wanted, window_ns))
    }
}

impl Wal {
    /// Appends commits as one group. Afterwards they survive the death of the process; after [`Wal::sync`] they survive
    /// power loss. The first sequence number must be the one after [`Wal::appended`]; the caller ensures the order.
    ///
    /// Begins a segment if the group does not fit into the active one. Waits for the sync of sealed segments only if
    /// one of them is unsynced then.
    ///
    /// # Errors
    /// `OutOfSpace` and `Io` if there is no space: nothing was appended, and a later call may succeed. `Poisoned` for
    /// every call after a failed write or sync. `Invalid` if the sequence numbers do not continue those of the WAL.
    pub(crate) fn append(&self, commits: &[WalCommit<'_>]) -> Result<()> {
        self.poison.check()?;
        let durable = if self.marks { self.durable() } else { SeqNo::ZERO };
        let mut state = self.lock_writer();
        let need = check_group(&state, commits, durable)?;
        if state.active().remaining_bytes() < need {
            state = self.ensure_segment_space(state, need)?;
            // The lock was released in between.
            check_group(&state, commits, durable)?;
        }
        // An earlier holder of the lock may have failed.
        self.poison.check()?;
        self.reserve_space(&mut state, need)?;
        self.write_reserved(&mut state, commits, durable)
    }

    /// Allocates space for `need` bytes in the active segment, and wakes a worker if it should populate the mapping.
    #[inline]
    fn reserve_space(&self, state: &mut WalWriterState, need: u64) -> Result<()> {
        let active = state.active();
        active.reserve_space(need)?;
        if active.requests_populate() && !self.populate_requested.load(Ordering::Relaxed) {
            self.populate_requested.store(true, Ordering::Release);
            self.host.request_populate();
        }
        Ok(())
    }

    /// Whether a worker should call [`Wal::populate_ahead`]. Takes no lock.
    #[inline]
    pub(crate) fn populate_is_requested(&self) -> bool {
        self.populate_requested.load(Ordering::Acquire)
    }

    /// Makes the mapping of the active segment resident ahead of its end, so that appending threads do not wait for it,
    /// and unmaps that of the last sealed segment. The lock is not held meanwhile: the segment may be sealed, and its
    /// file recycled, shortened or removed, while its mapping is populated. The mapping stays mapped until the end of
    /// the step, and populating changes no bytes. Returns false if no thread has asked for it.
    pub(crate) fn populate_ahead(&self) -> bool {
        if !self.populate_requested.swap(false, Ordering::AcqRel) {
            return false;
        }
        let mut next = self.begin_populate();
        while let Some(step) = next {
            let result = step.run();
            next = self.end_populate_step(&step, result);
        }
        true
    }

    fn begin_populate(&self) -> Option<PopulateStep> {
        let mut state = self.lock_writer();
        let sealed_mapping = state.sealed_mapping.take();
        let step = state.active.as_mut().and_then(ActiveWalSegment::begin_populate);
        drop(state);
        drop(sealed_mapping); // after the lock is released, because it unmaps memory
        step
    }

    /// Records the result of a step, and returns the next one.
    fn end_populate_step(&self, step: &PopulateStep, result: Result<()>) -> Option<PopulateStep> {
        self.lock_writer().active.as_mut().and_then(|active| active.end_populate_step(step, result))
    }

    /// Writes a group for which space was reserved.
    #[inline]
    fn write_reserved(&self, state: &mut WalWriterState, commits: &[WalCommit<'_>], durable: SeqNo) -> Result<()> {
        if let Err(error) = state.write_group(commits, durable) {
            // The file may already contain complete frames of this group, with sequence numbers that a later group
            // would use again. A replay could not tell which of them were acknowledged. So nothing may follow in this
            // segment, and nothing at all unless the disk was full.
            return Err(state.active().close_after_failed_write(error).unwrap_or_else(|error| self.poison.set(error)));
        }
        debug_assert!(state.last_seqno() >= self.appended(), "the appended sequence numbers rise");
        self.appended.store(state.last_seqno().0, Ordering::Release);
        debug_assert!(state.watermark_written <= state.last_seqno(), "a watermark is not above the last commit");
        debug_assert!(self.durable() <= self.appended(), "only appended commits are durable");
        Ok(())
    }

    /// Appends one commit of one record with the sequence number that `take` returns; no other thread appends
    /// meanwhile, so the order of the WAL is the order of the sequence numbers. Appends nothing if `take` returns
    /// none. A frame before it states which sequence numbers, up to about `next`, were assigned since and are not in
    /// the WAL.
    ///
    /// # Errors
    /// As [`Wal::append`]. If `take` was called, its sequence number is used up all the same: the next commit writes a
    /// gap frame for it.
    pub(crate) fn append_with_assigned_seqno(
        &self,
        payload: &[u8],
        next: SeqNo,
        take: impl FnOnce() -> Option<SeqNo>,
    ) -> Result<Option<SeqNo>> {
        self.poison.check()?;
        let durable = self.durable();
        let mut state = self.lock_writer();
        // Upper bound: gap frames with the highest numbers have the longest encoding.
        let longest = WalCommit { first_seqno: SeqNo::MAX, seqno_count: u32::MAX, payload: SEQNO_GAP_PAYLOAD };
        let gaps = 1 + (next.0.saturating_sub(state.next_seqno.0) + 1) / u64::from(u32::MAX);
        let one = WalCommit { first_seqno: SeqNo::MAX, seqno_count: 1, payload };
        let need = state.frame_writer.stored_len(&frame_record(&one, SeqNo::ZERO));
        let need = need + gaps * state.frame_writer.stored_len(&frame_record(&longest, SeqNo::ZERO));
        if state.active().remaining_bytes() < need {
            state = self.ensure_segment_space(state, need)?;
        }
        // An earlier holder of the lock may have failed.
        self.poison.check()?;
        self.reserve_space(&mut state, need)?;
        let Some(first) = take() else { return Ok(None) };
        debug_assert!(first >= state.next_seqno, "assigned sequence numbers rise");
        let commit = WalCommit { first_seqno: first, ..one };
        if state.next_seqno == first {
            self.write_reserved(&mut state, &[commit], durable)?;
        } else {
            let frames: Vec<_> = seqno_gap_commits(state.next_seqno, first).chain([commit]).collect();
            self.write_reserved(&mut state, &frames, durable)?;
        }
        Ok(Some(first))
    }

    /// Begins a segment if the active one has no space for `need` bytes.
    #[cold]
    fn ensure_segment_space<'a>(
        &'a self,
        mut state: MutexGuard<'a, WalWriterState>,
        need: u64,
    ) -> Result<MutexGuard<'a, WalWriterState>> {
        while state.active().remaining_bytes() < need {
            state = self.start_segment_after_sync(state, need)?;
        }
        Ok(state)
    }

    /// Begins a segment unless another thread has just begun one. First syncs all sealed segments, so that damage in
    /// any segment before the last two cannot be a torn tail. If a reader may have returned a failed commit of the
    /// active segment, first records that the segment ends before it, because later commits get its sequence numbers.
    fn start_segment_after_sync<'a>(
        &'a self,
        mut state: MutexGuard<'a, WalWriterState>,
        need: u64,
    ) -> Result<MutexGuard<'a, WalWriterState>> {
        let begun = state.segments_started;
        loop {
            let (epoch, last) = (state.active().epoch, state.last_seqno());
            let records_end = state.active().failed_commit_was_readable;
            if !records_end && state.sealed.iter().all(|sealed| sealed.unsynced_file.is_none()) {
                break;
            }
            drop(state);
            // A recorded end states that the WAL is durable up to it.
            self.sync_exclusively(records_end)?;
            if records_end {
                self.host.end_wal_in_manifest(epoch, last)?;
            }
            state = self.lock_writer();
            if state.segments_started != begun {
                return Ok(state);
            }
            if records_end {
                debug_assert_eq!(state.last_seqno(), last, "nothing is appended to a closed segment");
                state.active().failed_commit_was_readable = false;
            }
        }
        self.poison.check()?;
        self.start_segment(&mut state, need)?;
        Ok(state)
    }

    /// Seals the active segment and begins the next one, so that everything appended so far is in sealed segments. Does
    /// nothing if the active segment is empty.
    ///
    /// # Errors
    /// As [`Wal::append`].
    pub(crate) fn seal(&self) -> Result<()> {
        self.poison.check()?;
        let mut state = self.lock_writer();
        let last = state.last_seqno();
        if state.active().first_seqno > last {
            return Ok(());
        }
        self.start_segment_after_sync(state, 0).map(drop)
    }

    /// Appends a watermark frame, unsynced, if the active segment does not have the current watermark yet. A watermark
    /// only helps a replay to distinguish damage from a torn tail, so it is omitted if there is no space, or on an
    /// error.
    pub(super) fn append_watermark(&self) {
        let durable = self.durable();
        let mut state = self.lock_writer();
        let len = RecordLogWriter::watermark_len_max();
        if !self.marks || state.writes_stopped || state.watermark_written >= durable || self.poison.check().is_err() {
            return;
        }
        debug_assert!(durable <= state.last_seqno(), "only appended commits are durable");
        let fits = state.active().remaining_bytes() >= len && state.active().reserve_space(len).is_ok();
        if fits && state.write_watermark(durable).is_ok() {
            state.watermark_written = durable;
        }
    }
}

/// Checks that the group continues the appended sequence numbers, and returns the bytes that it needs.
#[inline]
fn check_group(state: &WalWriterState, commits: &[WalCommit<'_>], durable: SeqNo) -> Result<u64> {
    let (mut need, mut next) = (0, state.next_seqno);
    for commit in commits {
        if commit.first_seqno != next
            || commit.seqno_count == 0
            || SeqNo::MAX.0 - next.0 < u64::from(commit.seqno_count)
        {
            return Err(out_of_order_error(commit, next));
        }
        next = SeqNo(next.0 + u64::from(commit.seqno_count));
        need += state.frame_writer.stored_len(&frame_record(commit, durable));
    }
    Ok(need)
}

#[cold]
fn out_of_order_error(commit: &WalCommit<'_>, next: SeqNo) -> Error {
    let (first, count) = (commit.first_seqno, commit.seqno_count);
    Error::invalid(format!("commit of {count} records begins at sequence number {first}, but the next one is {next}"))
}

#[inline]
fn frame_record<'a>(commit: &WalCommit<'a>, durable: SeqNo) -> LogRecord<'a> {
    LogRecord {
        first_seqno: commit.first_seqno,
        count: commit.seqno_count,
        durable_seqno: durable,
        payload: commit.payload,
    }
}

impl WalWriterState {
    /// Writes a group for which space was reserved.
    #[inline]
    fn write_group(&mut self, commits: &[WalCommit<'_>], durable: SeqNo) -> Result<()> {
        let next = commits
            .last()
            .map_or(self.next_seqno, |commit| SeqNo(commit.first_seqno.0 + u64::from(commit.seqno_count)));
        debug_assert!(
            commits.is_sorted_by(|a, b| a.first_seqno.0 + u64::from(a.seqno_count) == b.first_seqno.0),
            "a group has consecutive sequence numbers"
        );
        debug_assert!(
            commits.first().is_none_or(|commit| commit.first_seqno == self.next_seqno),
            "a group leaves no gap"
        );
        self.write_frames(|writer, place, sink| {
            commits.iter().try_for_each(|commit| writer.add_record(place, &frame_record(commit, durable), sink))
        })?;
        self.commits += commits.len() as u64;
        (self.next_seqno, self.watermark_written) = (next, self.watermark_written.max(durable));
        Ok(())
    }

    fn write_watermark(&mut self, durable: SeqNo) -> Result<()> {
        let last = self.last_seqno();
        self.write_frames(|writer, place, sink| writer.add_watermark(place, last, durable, sink))
    }

    #[inline]
    fn write_frames(
        &mut self,
        put: impl FnOnce(&mut RecordLogWriter, &LogFileIdentity, &mut LogSink<'_>) -> Result<()>,
    ) -> Result<()> {
        let active = self.active.as_mut().expect("the log begins a segment when it is started");
        let start = active.end_offset;
        self.frame_writer.reset(start);
        let mut sink = |bytes: &[u8], offset: u64| active.write(bytes, offset);
        put(&mut self.frame_writer, &active.identity, &mut sink)?;
        self.frame_writer.flush(&mut sink)?;
        active.end_offset = self.frame_writer.position();
        debug_assert!(active.end_offset >= start, "frames are appended");
        self.bytes += active.end_offset - start;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use super::*;
    use crate::base::ErrorKind;
    use crate::testing::MemFs;
    use crate::testing::wal::wal_fixture::{WalFixture, load_manifest_state, overwrite, replay_with_mode, wal_options};
    use crate::testing::{Fault, FaultFs, FaultPlan, OpKind};
    use crate::vfs::Fs;
    use crate::wal::options::RecoveryMode;

    #[test]
    fn batching_window_opens_for_concurrent_writers() {
        let mut state = SyncState::default();
        (state.last_group_sizes, state.waiters, state.average_sync_ns) = ([4, 4], 3, 1_000_000);
        assert_eq!(state.batching_window(), None, "a single thread");
        state.batching_groups_left = 1;
        assert_eq!(state.batching_window(), Some((8, 250_000)));
        state.waiters = 8;
        assert_eq!(state.batching_window(), None, "all callers have joined");
        (state.waiters, state.average_sync_ns) = (1, 60_000);
        assert_eq!(state.batching_window(), None, "the window is too short");
        state.average_sync_ns = 1 << 40;
        assert_eq!(state.batching_window(), Some((8, BATCHING_WINDOW_MAX_NS)));
    }

    fn open_on_fault_fs(size: u64, mapped: bool) -> (FaultFs, WalFixture) {
        let fs = FaultFs::new(Arc::new(MemFs::new()));
        let fixture = WalFixture::open(Arc::new(fs.clone()), wal_options(size, mapped), 1).unwrap();
        (fs, fixture)
    }

    fn disk_full_fault(op: OpKind) -> FaultPlan {
        FaultPlan::new(op, 1, Fault::Error(io::ErrorKind::StorageFull))
    }

    #[test]
    fn group_append_is_one_write_in_seqno_order() {
        let (fs, fixture) = open_on_fault_fs(1 << 20, false);
        let commit = |first: u64, count| WalCommit { first_seqno: SeqNo(first), seqno_count: count, payload: b"abc" };
        fixture.wal.append(&[commit(1, 1)]).unwrap();
        let before = fs.count(OpKind::Write);
        fixture.wal.append(&[commit(2, 3), commit(5, 1), commit(6, 2)]).unwrap();
        assert_eq!(fs.count(OpKind::Write), before + 1);
        fixture.wal.append(&[]).unwrap();
        for bad in [vec![commit(9, 1)], vec![commit(7, 1)], vec![commit(8, 0)], vec![commit(8, 1), commit(10, 1)]] {
            assert_eq!(fixture.wal.append(&bad).unwrap_err().kind(), ErrorKind::Invalid);
        }
        assert_eq!((fixture.wal.appended(), fixture.wal.durable()), (SeqNo(7), SeqNo(0)));
        let stats = fixture.wal.stats();
        assert_eq!((stats.commits, stats.bytes), (4, 4 * 32));
        assert_eq!(replay_with_mode(&fixture.fs, RecoveryMode::Strict).unwrap().0.len(), 4);
    }

    #[test]
    fn mapped_append_falls_back_when_populate_fails() {
        let (fs, fixture) = open_on_fault_fs(1 << 20, true);
        fixture.append(1, &[1; 1000]).unwrap();
        let before = fs.count(OpKind::Write);
        for _ in 0..100 {
            fixture.append(1, &[2; 1000]).unwrap();
        }
        assert_eq!(fs.count(OpKind::Write), before);
        fs.inject(disk_full_fault(OpKind::Populate));
        for _ in 0..600 {
            fixture.append(1, &[3; 1000]).unwrap();
        }
        assert_eq!(fs.fault_count(), 1);
        assert!(fs.count(OpKind::Write) > before + 400, "later frames are written without a mapping");
        assert_eq!(replay_with_mode(&fixture.fs, RecoveryMode::Strict).unwrap().0.len(), 701);
    }

    #[test]
    fn oversized_group_gets_its_own_segment() {
        let (_, fixture) = open_on_fault_fs(4096, true);
        for len in [0, 3000, 100_000, 1, 300_000, 40] {
            fixture.append(1, &vec![7; len]).unwrap();
        }
        let (commits, report) = replay_with_mode(&fixture.fs, RecoveryMode::Strict).unwrap();
        assert_eq!(
            commits.iter().map(|(.., payload)| payload.len()).collect::<Vec<_>>(),
            [0, 3000, 100_000, 1, 300_000, 40]
        );
        let found: Vec<SeqNo> = report.segments.iter().map(|info| info.last_seqno).collect();
        assert_eq!(found, fixture.wal.segments().iter().map(|info| info.last_seqno).collect::<Vec<_>>());
        assert!(fixture.wal.live_bytes() > 400_000);
    }

    #[test]
    fn append_resumes_after_disk_full() {
        for (op, mapped) in
            [(OpKind::Allocate, false), (OpKind::Allocate, true), (OpKind::Create, false), (OpKind::SyncDir, false)]
        {
            let (fs, fixture) = open_on_fault_fs(128 << 10, mapped);
            let mut appended = 0u64;
            let mut refused = 0;
            for i in 0..400 {
                if i % 10 == 0 {
                    fs.inject(disk_full_fault(op).in_path(if op == OpKind::SyncDir { "/" } else { ".wal" }));
                }
                match fixture.append(1, &[i as u8; 2000]) {
                    Ok(_) => appended += 1,
                    Err(e) => {
                        assert_eq!(e.kind(), ErrorKind::OutOfSpace, "{op:?}");
                        refused += 1;
                    }
                }
                assert_eq!(fixture.wal.appended(), SeqNo(appended));
            }
            fs.clear_faults();
            assert!(refused > 3, "{op:?} {refused}");
            assert_eq!(replay_with_mode(&fixture.fs, RecoveryMode::Strict).unwrap().0.len() as u64, appended);
            fixture.sync();
        }
    }

    #[test]
    fn a_full_manifest_changes_nothing_either() {
        let (fs, fixture) = open_on_fault_fs(4096, false);
        fixture.append(1, &[1; 2000]).unwrap();
        fs.inject(disk_full_fault(OpKind::Write).in_path("MANIFEST"));
        assert_eq!(fixture.append(1, &[2; 3000]).unwrap_err().kind(), ErrorKind::OutOfSpace);
        fixture.append(1, &[3; 3000]).unwrap();
        fixture.sync();
        let (commits, report) = replay_with_mode(&fixture.fs, RecoveryMode::Strict).unwrap();
        assert_eq!(commits.iter().map(|(.., payload)| payload[0]).collect::<Vec<_>>(), [1, 3]);
        assert_eq!((report.segments.len(), report.spare_files.len()), (2, 0));
    }

    #[test]
    fn failed_frame_or_header_write_poisons() {
        for what in [Fault::Short, Fault::Error(io::ErrorKind::Other)] {
            for seal in [false, true] {
                let (fs, fixture) = open_on_fault_fs(1 << 20, false);
                fixture.append(1, b"kept").unwrap();
                fixture.sync();
                let nth = if seal { 2 } else { 1 }; // the first header is that of the new spare file
                fs.inject(FaultPlan::new(OpKind::Write, nth, what).in_path(".wal"));
                let error =
                    if seal { fixture.wal.seal().unwrap_err() } else { fixture.append(1, &[1; 600]).unwrap_err() };
                assert_eq!(error.kind(), ErrorKind::Poisoned);
                for result in [fixture.append(1, b"x").map(drop), fixture.wal.sync(SeqNo(1), false), fixture.wal.seal()]
                {
                    assert_eq!(result.unwrap_err().kind(), ErrorKind::Poisoned);
                }
                assert_eq!(fixture.wal.appended(), SeqNo(1));
            }
        }
    }

    #[test]
    fn refused_write_is_not_replayed_after_disk_full() {
        for half_written in [false, true] {
            let full = |fs: &FaultFs, nth| {
                fs.inject(FaultPlan::new(OpKind::Write, nth, Fault::Error(io::ErrorKind::StorageFull)).in_path(".wal"));
            };
            let (fs, fixture) = open_on_fault_fs(1 << 20, false);
            fixture.append(1, b"kept").unwrap();
            if half_written {
                // The content that a write leaves if it runs out of space in the middle: complete frames of the group.
                let place = fixture.wal.lock_writer().active().identity;
                let end = fixture.wal.lock_writer().active().end_offset;
                let mut writer = RecordLogWriter::new();
                writer.reset(end);
                let path = fixture.segment_path_at(0);
                let mut sink = |bytes: &[u8], offset: u64| {
                    overwrite(&fixture.fs, &path, offset, bytes);
                    Ok(())
                };
                for first in 2..4 {
                    let record = LogRecord {
                        first_seqno: SeqNo(first),
                        count: 1,
                        durable_seqno: SeqNo::ZERO,
                        payload: b"refused",
                    };
                    writer.add_record(&place, &record, &mut sink).unwrap();
                }
                writer.flush(&mut sink).unwrap();
                assert_eq!(replay_with_mode(&fixture.fs, RecoveryMode::Strict).unwrap().0.len(), 3);
            }
            full(&fs, 1);
            let first = fixture.wal.appended().plus(1);
            let group: Vec<WalCommit<'_>> = (0..4)
                .map(|i| WalCommit { first_seqno: SeqNo(first.0 + i), seqno_count: 1, payload: b"refused" })
                .collect();
            assert_eq!(fixture.wal.append(&group).unwrap_err().kind(), ErrorKind::OutOfSpace);
            assert_eq!(replay_with_mode(&fixture.fs, RecoveryMode::Strict).unwrap().0.len(), 1);
            // The header of the next segment is refused too; later writes succeed.
            full(&fs, 2);
            assert_eq!(fixture.append(1, b"again").unwrap_err().kind(), ErrorKind::OutOfSpace);
            fixture.append(1, b"refuse2").unwrap();
            let recorded = load_manifest_state(&fixture.fs).unwrap().wal_end;
            let (ended, end) = if half_written { (fixture.wal.segments()[0].epoch, 1) } else { (WalEpoch(0), 0) };
            assert_eq!(recorded, Some((ended, SeqNo(end))), "readers may have the refused commits");
            assert_eq!(fixture.wal.durable(), SeqNo(end), "a recorded end is durable");
            fixture.sync();
            let (commits, report) = replay_with_mode(&fixture.fs, RecoveryMode::Strict).unwrap();
            assert_eq!(commits, [(1, 1, b"kept".to_vec()), (2, 1, b"refuse2".to_vec())]);
            assert_eq!((report.segments.len(), report.dropped_after_damage), (2, None));
            assert_eq!(replay_with_mode(&fixture.fs, RecoveryMode::Salvage).unwrap().0, commits);
        }
    }

    #[test]
    fn failed_watermark_write_is_ignored() {
        let (fs, fixture) = open_on_fault_fs(1 << 20, false);
        fixture.append(1, b"one").unwrap();
        fs.inject(FaultPlan::new(OpKind::Write, 1, Fault::Short).in_path(".wal"));
        fixture.sync();
        assert_eq!(fs.fault_count(), 1);
        fixture.append(1, b"two").unwrap();
        fixture.sync();
        assert_eq!(replay_with_mode(&fixture.fs, RecoveryMode::Strict).unwrap().0.len(), 2);
    }

    #[test]
    fn third_segment_waits_for_sync_of_first() {
        let (_, fixture) = open_on_fault_fs(4096, false);
        for i in 0..12 {
            fixture.append(1, &[i; 1500]).unwrap();
            let segments = fixture.wal.segments();
            if segments.len() > 2 {
                assert!(fixture.wal.durable() >= segments[segments.len() - 3].last_seqno);
            }
        }
        assert!(fixture.wal.segments().len() >= 6);
        let fs: Arc<dyn Fs> = Arc::clone(&fixture.fs);
        assert_eq!(replay_with_mode(&fs, RecoveryMode::Strict).unwrap().0.len(), 12);
    }
    fn open_with_workers(size: u64) -> (FaultFs, WalFixture) {
        let fs = FaultFs::new(Arc::new(MemFs::new()));
        let options = WalOptions { populates_ahead: true, ..wal_options(size, true) };
        (fs.clone(), WalFixture::open(Arc::new(fs), options, 1).unwrap())
    }

    /// Appends `commits` small commits, of 2 KiB each.
    fn append_small(fixture: &WalFixture, commits: u64) {
        (0..commits).for_each(|n| _ = fixture.append(1, &[n as u8; 2000]).unwrap());
    }

    #[test]
    fn worker_populates_ahead_of_appends() {
        let (fs, fixture) = open_with_workers(1 << 20);
        let append = |kib: u64| {
            let before = fs.count(OpKind::Populate);
            append_small(&fixture, kib / 2);
            fs.count(OpKind::Populate) - before
        };
        let writes = fs.count(OpKind::Write);
        assert_eq!((append(30), fixture.wal.populate_is_requested()), (1, false), "half is left");
        assert_eq!((append(20), fixture.wal.populate_is_requested()), (0, true));
        assert!(fixture.wal.populate_ahead() && !fixture.wal.populate_is_requested() && !fixture.wal.populate_ahead());
        assert_eq!((append(30), fixture.wal.populate_ahead(), append(60)), (0, true, 0), "it was in time");
        assert!(fixture.wal.populate_is_requested());
        assert!(append(100) > 0, "the worker is late");
        assert!(fixture.wal.populate_ahead());
        let populated = (0..75).map(|_| (append(8), fixture.wal.populate_ahead()).0).sum::<u64>();
        assert_eq!(populated, 0, "the worker was always in time");
        assert_eq!(fs.count(OpKind::Write), writes, "all frames are in the mapping");
        append(300); // in the next segment too
        assert_eq!(fixture.wal.segments().len(), 2);
        assert!(fixture.wal.lock_writer().sealed_mapping.is_some() && fixture.wal.populate_ahead());
        assert!(fixture.wal.lock_writer().sealed_mapping.is_none(), "the worker unmaps");
        fixture.wal.seal().unwrap();
        fixture.sync();
        assert!(fixture.wal.lock_writer().sealed_mapping.is_none(), "a sync unmaps, before it writes the pages");
        assert_eq!(replay_with_mode(&fixture.fs, RecoveryMode::Strict).unwrap().0.len(), 570);
    }

    #[test]
    fn large_group_is_written_without_the_mapping() {
        for workers in [false, true] {
            let (fs, fixture) = if workers { open_with_workers(8 << 20) } else { open_on_fault_fs(8 << 20, true) };
            let ops = || (fs.count(OpKind::Populate), fs.count(OpKind::Write));
            append_small(&fixture, 5);
            let (populated, written) = ops();
            fixture.append(1, &[1; 20_000]).unwrap();
            assert_eq!(ops(), (populated, written), "the mapping is resident");
            for _ in 0..3 {
                fixture.append(1, &[2; 100_001]).unwrap();
            }
            assert_eq!((ops().0, fixture.wal.populate_is_requested()), (populated, false));
            assert!(ops().1 >= written + 3);
            let (populated, written) = ops();
            append_small(&fixture, 10); // in the middle of a page
            assert_eq!(ops(), (populated + 1, written), "small groups are in the mapping again");
            assert_eq!(fixture.wal.populate_ahead(), workers);
            append_small(&fixture, 200);
            assert_eq!(replay_with_mode(&fixture.fs, RecoveryMode::Strict).unwrap().0.len(), 219);
        }
    }

    #[test]
    fn failed_populate_of_a_worker_ends_the_mapping() {
        let (fs, fixture) = open_with_workers(1 << 20);
        append_small(&fixture, 30);
        fs.inject(disk_full_fault(OpKind::Populate));
        assert!(fixture.wal.populate_ahead());
        assert_eq!(fs.fault_count(), 1);
        let before = fs.count(OpKind::Write);
        append_small(&fixture, 100);
        assert_eq!((fs.count(OpKind::Write), fixture.wal.populate_is_requested()), (before + 100, false));
        assert_eq!(replay_with_mode(&fixture.fs, RecoveryMode::Strict).unwrap().0.len(), 130);
    }

    /// Allocating ahead of the end is not needed by the commit that asks for it. The first commit without space fails.
    #[test]
    fn full_disk_ahead_of_the_end_fails_no_commit() {
        let (fs, fixture) = open_with_workers(4 << 20);
        fs.inject(disk_full_fault(OpKind::Allocate).forever());
        let appended = (0..30).take_while(|n| fixture.append(1, &[*n; 6_000]).is_ok()).count();
        assert_eq!(appended, 10, "64 KiB are allocated");
        assert!(fs.fault_count() >= 4, "one allocation ahead failed, and that of the commit");
        assert_eq!(fixture.append(1, &[7; 6_000]).unwrap_err().kind(), ErrorKind::OutOfSpace);
        fs.clear_faults();
        fixture.append(1, &[8; 600_000]).unwrap();
        assert_eq!(replay_with_mode(&fixture.fs, RecoveryMode::Strict).unwrap().0.len(), 11);
    }

    /// A worker ends its step after the segment was sealed, and its file was recycled, shortened or removed.
    #[test]
    fn late_populate_step_changes_no_other_segment() {
        for release in [false, true] {
            let (_, fixture) = open_with_workers(256 << 10);
            append_small(&fixture, 25);
            let step = fixture.wal.begin_populate().unwrap();
            match release {
                true => fixture.wal.release_space(),
                false => {
                    fixture.wal.seal().unwrap();
                    fixture.sync();
                    fixture.retire(SeqNo(25)).unwrap();
                    append_small(&fixture, 1);
                    fixture.wal.seal().unwrap(); // the next segment has the file of the first one
                }
            }
            let result = step.run();
            assert!(!release || result.is_err(), "the file is shorter than the step");
            assert!(fixture.wal.end_populate_step(&step, result).is_none());
            append_small(&fixture, 300);
            let replayed = replay_with_mode(&fixture.fs, RecoveryMode::Strict).unwrap().0;
            assert_eq!((replayed.len(), replayed.last().unwrap().0), if release { (325, 325) } else { (301, 326) });
        }
    }
}

#[cfg(test)]
mod schedules {
    use std::sync::Arc;

    use super::*;
    use crate::mem::explorer::{explore, spawn, yield_point};
    use crate::testing::MemFs;
    use crate::testing::wal::wal_fixture::{WalFixture, load_manifest_state, replay_with_mode, wal_options};
    use crate::wal::options::{RecoveryMode, WalRetention};

    /// A worker populates the mapping while another thread appends over several segments, and the files of flushed
    /// segments are written again. The mapping of `MemFs` panics if bytes are stored where it was not populated.
    #[test]
    fn populate_during_rotation_and_recycling() {
        explore(|| {
            let options = WalOptions { populates_ahead: true, ..wal_options(128 << 10, true) };
            let fixture = Arc::new(WalFixture::open(Arc::new(MemFs::new()), options, 1).unwrap());
            let worker = {
                let fixture = Arc::clone(&fixture);
                spawn(move || {
                    for _ in 0..3 {
                        let mut next = fixture.wal.begin_populate();
                        while let Some(step) = next {
                            yield_point();
                            let result = step.run();
                            yield_point();
                            next = fixture.wal.end_populate_step(&step, result);
                        }
                        yield_point();
                    }
                })
            };
            for n in 1..=20 {
                fixture.append(1, &[n as u8; 16_000]).unwrap();
                yield_point();
                if n == 12 {
                    fixture.sync();
                    fixture.retire(SeqNo(n)).unwrap();
                }
            }
            worker.join().unwrap();
            let replayed = replay_with_mode(&fixture.fs, RecoveryMode::Strict).unwrap().0;
            assert_eq!(replayed.last().unwrap().0, 20);
        });
    }

    /// Two threads append behind a failed commit that was readable. Its number is used again in a segment that is begun
    /// behind the recorded end.
    #[test]
    fn two_appends_behind_a_failed_commit() {
        explore(|| {
            let fixture = Arc::new(WalFixture::open(Arc::new(MemFs::new()), wal_options(4096, true), 1).unwrap());
            fixture.append(1, &[0; 3000]).unwrap();
            let failed = Error::new(ErrorKind::OutOfSpace, "");
            let mut state = fixture.wal.lock_writer();
            state.active().close_after_failed_write(failed).unwrap();
            state.active().failed_commit_was_readable = true;
            let ended = state.active().epoch;
            drop(state);
            let next = Arc::new(AtomicU64::new(2));
            let append = || {
                let (fixture, next) = (Arc::clone(&fixture), Arc::clone(&next));
                move || {
                    let take = || {
                        assert_eq!(load_manifest_state(&fixture.fs).unwrap().wal_end, Some((ended, SeqNo(1))));
                        Some(SeqNo(next.fetch_add(1, Ordering::Relaxed)))
                    };
                    yield_point();
                    fixture.wal.append_with_assigned_seqno(&[1; 1000], SeqNo(3), take).unwrap();
                }
            };
            let other = spawn(append());
            append()();
            other.join().unwrap();
            assert_eq!(replay_with_mode(&fixture.fs, RecoveryMode::Strict).unwrap().0.len(), 3);
        });
    }

    /// A reader registers while another thread retires flushed segments. Either it is told that what it needs is
    /// retired, or the segments are kept.
    #[test]
    fn retirement_meets_a_new_reader() {
        explore(|| {
            let fixture = WalFixture::open(Arc::new(MemFs::new()), wal_options(4096, true), 1).unwrap();
            (0..6u8).for_each(|n| _ = fixture.append(1, &[n; 3000]).unwrap());
            fixture.sync();
            let fixture = Arc::new(fixture);
            let readers = Arc::new(AtomicU64::new(u64::MAX));
            let needed = SeqNo(2);
            let reader = {
                let (fixture, readers) = (Arc::clone(&fixture), Arc::clone(&readers));
                spawn(move || {
                    yield_point();
                    readers.store(needed.0, Ordering::Relaxed);
                    yield_point();
                    fixture.wal.has_retired_after(needed)
                })
            };
            for through in 1..=5 {
                let read_through = || Some(readers.load(Ordering::Relaxed)).filter(|n| *n < u64::MAX).map(SeqNo);
                let retention =
                    || WalRetention { max_bytes: u64::MAX, needed_after_ns: None, read_through: read_through() };
                fixture.retire_unless_retained(SeqNo(through), retention).unwrap();
                yield_point();
            }
            let was_told = reader.join().unwrap();
            let kept = fixture.wal.retained_segments();
            let is_kept = kept.first().is_some_and(|segment| segment.first_seqno.0 <= needed.0 + 1);
            assert!(was_told || is_kept, "{kept:?}");
        });
    }
}
