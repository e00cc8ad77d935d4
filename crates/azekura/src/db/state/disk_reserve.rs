//! The disk reserve: space on the database's file system that ordinary writes cannot use.
//!
//! The file `RESERVE` in the database directory has allocated space and no content. When the disk is full, the database
//! truncates the file, and the operation that needs space uses the freed space. The reserve has four parts, so that no
//! use but that of a flush takes the space of another:
//! - `open`: opening the database writes a manifest and starts a segment of the write-ahead log (WAL). A manifest is
//!   also written behind a commit that has failed after readers could see it;
//! - `removes`: the WAL grows for commits that only remove keys;
//! - `flush`: flushes, and checkpoints of pools, write the records of the WAL to files before they retire its segments;
//! - `compaction`: compactions and blob GC write their output before they remove their input. They may write more than
//!   any reserve holds, so they must not use the space of flushes.
//!
//! While the reserve is smaller than its wanted size, ordinary writes fail, and the database tries to fill the reserve
//! again. Only the length of the file is stored; opening the database divides it into parts again.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::base::sync::lock;
use crate::base::{ErrorKind, Result};
use crate::vfs::fs::DISK_RESERVE_FILE_NAME;
use crate::vfs::{File, Fs, OpenMode};

/// Bytes that opening a database needs besides two manifests: the first allocation of a WAL segment, and slack.
const OPEN_PART_BYTES: u64 = 256 << 10;
/// Minimum bytes for commits that only remove keys.
const REMOVES_PART_MIN: u64 = 256 << 10;
/// Maximum bytes for commits that only remove keys.
const REMOVES_PART_MAX: u64 = 4 << 20;
/// Bytes that a flush needs besides the data that it writes; also the minimum for compactions.
const WORK_PART_MIN: u64 = 512 << 10;
/// Bytes that the WAL gets at a time from the part for removals.
const RELEASE_STEP_BYTES: u64 = 256 << 10;
/// The sizes of the parts are multiples of this many bytes.
const RESERVE_PAGE_BYTES: u64 = 4096;

/// Work that may use the reserve, besides commits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReserveUse {
    /// Work that retires WAL segments (flushes, pool checkpoints), and version edits.
    Flush,
    /// Compactions and blob GC.
    Compaction,
}

/// Sizes of the four parts, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReserveParts {
    open: u64,
    removes: u64,
    flush: u64,
    compaction: u64,
}

impl ReserveParts {
    /// Returns the wanted sizes for a database with `wal_bytes` of WAL to replay, whose next pool checkpoints write
    /// `checkpoint_bytes`, and whose manifest has `manifest_bytes`. All parts except `open` have at most `max` bytes
    /// together. Pure.
    pub(crate) fn wanted(max: u64, wal_bytes: u64, checkpoint_bytes: u64, manifest_bytes: u64) -> ReserveParts {
        if max == 0 {
            return ReserveParts::default();
        }
        // A flush writes about as many bytes as its records have in the WAL, plus indexes and filters.
        let flush =
            wal_bytes.saturating_add(wal_bytes / 4).saturating_add(WORK_PART_MIN).saturating_add(checkpoint_bytes);
        let round_down = |bytes: u64| bytes / RESERVE_PAGE_BYTES * RESERVE_PAGE_BYTES;
        let compaction = round_down((wal_bytes / 4).saturating_add(WORK_PART_MIN).min(max / 4));
        let removes = round_down((flush / 4).clamp(REMOVES_PART_MIN, REMOVES_PART_MAX).min(max / 4));
        let flush = round_down(flush.min(max - removes - compaction));
        debug_assert!(flush + removes + compaction <= max, "the parts but `open` keep the limit");
        let open = OPEN_PART_BYTES.saturating_add(manifest_bytes.saturating_mul(2));
        ReserveParts { open: round_down(open.saturating_add(RESERVE_PAGE_BYTES - 1)), removes, flush, compaction }
    }

    /// Divides a reserve of `len` bytes into parts, as [`grown_by`](ReserveParts::grown_by) does.
    fn divide(len: u64, wanted: ReserveParts) -> ReserveParts {
        ReserveParts::default().grown_by(len, wanted)
    }

    /// Adds `more` bytes to the parts that are smaller than `wanted`: first to `open`, then `flush`, then `removes`.
    /// The rest goes to `compaction`.
    fn grown_by(self, more: u64, wanted: ReserveParts) -> ReserveParts {
        let open = more.min(wanted.open.saturating_sub(self.open));
        let flush = (more - open).min(wanted.flush.saturating_sub(self.flush));
        let removes = (more - open - flush).min(wanted.removes.saturating_sub(self.removes));
        let compaction = more - open - flush - removes;
        let grown = ReserveParts {
            open: self.open + open,
            removes: self.removes + removes,
            flush: self.flush + flush,
            compaction: self.compaction + compaction,
        };
        debug_assert_eq!(grown.total(), self.total().saturating_add(more), "each byte belongs to one part");
        grown
    }

    fn total(self) -> u64 {
        self.open.saturating_add(self.removes).saturating_add(self.flush).saturating_add(self.compaction)
    }
}

/// The reserve of one database. Thread safe.
#[derive(Debug)]
pub(crate) struct DiskReserve {
    fs: Arc<dyn Fs>,
    path: PathBuf,
    /// Maximum size in bytes without the part `open`; 0 disables the reserve.
    max: u64,
    state: Mutex<DiskReserveState>,
    /// Whether the reserve is smaller than wanted.
    short: AtomicBool,
}

#[derive(Debug, Default)]
struct DiskReserveState {
    parts: ReserveParts,
    /// Whether the space of the whole file is known to be allocated.
    allocated: bool,
}

impl DiskReserve {
    /// Returns the reserve of a directory, which may be smaller than wanted, or empty. Changes no file.
    ///
    /// The reserve is divided according to [`wanted`](ReserveParts::wanted). On a full disk it is not divided again
    /// until it is filled, and compactions must not get the space that flushes and checkpoints need.
    ///
    /// # Errors
    /// `Io` if the directory or the file cannot be read.
    pub(crate) fn open_existing(
        fs: Arc<dyn Fs>,
        dir: &Path,
        max: u64,
        wal_bytes: u64,
        checkpoint_bytes: u64,
        manifest_bytes: u64,
    ) -> Result<DiskReserve> {
        let path = dir.join(DISK_RESERVE_FILE_NAME);
        let len = if fs.exists(&path)? { fs.open(&path, OpenMode::Read)?.length()? } else { 0 };
        let parts = ReserveParts::divide(len, ReserveParts::wanted(max, wal_bytes, checkpoint_bytes, manifest_bytes));
        let state = Mutex::new(DiskReserveState { parts, allocated: false });
        Ok(DiskReserve { fs, path, max, state, short: AtomicBool::new(false) })
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the wanted sizes; see [`ReserveParts::wanted`].
    pub(crate) fn wanted(&self, wal_bytes: u64, checkpoint_bytes: u64, manifest_bytes: u64) -> ReserveParts {
        ReserveParts::wanted(self.max, wal_bytes, checkpoint_bytes, manifest_bytes)
    }

    /// Returns whether the reserve is smaller than wanted, so that ordinary writes fail.
    #[inline]
    pub(crate) fn is_short(&self) -> bool {
        self.short.load(Ordering::Relaxed)
    }

    /// Grows the reserve towards the wanted size as far as there is space; never shrinks it. Returns false if the
    /// reserve stays too small because the disk is full. If the file cannot be created or allocated for another reason,
    /// returns true, and the database works without a full reserve.
    pub(crate) fn fill(&self, wanted: ReserveParts) -> bool {
        let mut state = lock(&self.state);
        if self.max == 0 {
            self.remove_file(&mut state);
            return true;
        }
        let (len, goal) = (state.parts.total(), wanted.total());
        if len < goal || !state.allocated && len > 0 {
            let file = match self.open_file() {
                Ok(file) => file,
                Err(error) => {
                    // A full disk may not have space for the directory entry either.
                    let disk_full = error.kind() == ErrorKind::OutOfSpace;
                    self.short.fetch_or(disk_full, Ordering::Relaxed);
                    return !disk_full;
                }
            };
            let mut missing = goal.saturating_sub(len);
            loop {
                let end = state.parts.total();
                match file.allocate_from(if state.allocated { end } else { 0 }, end + missing) {
                    Ok(()) => {
                        debug_assert!(
                            end + missing <= goal.max(len),
                            "the reserve does not grow beyond the wanted size"
                        );
                        state.parts = state.parts.grown_by(missing, wanted);
                        state.allocated = true;
                    }
                    Err(error) if error.kind() != ErrorKind::OutOfSpace => return true,
                    // Some file systems keep the partial allocation of a failed call.
                    Err(_) => drop(file.set_length(end)),
                }
                // Half of the missing bytes may still fit.
                missing = (missing / 2 / RESERVE_PAGE_BYTES * RESERVE_PAGE_BYTES)
                    .min(goal.saturating_sub(state.parts.total()));
                if missing < RELEASE_STEP_BYTES {
                    break;
                }
            }
        }
        let is_full = state.parts.total() >= goal;
        if is_full {
            state.parts = ReserveParts::divide(state.parts.total(), wanted);
        }
        self.short.store(!is_full, Ordering::Relaxed);
        is_full
    }

    /// Frees up to 256 KiB of the part for commits that only remove keys; returns false if that part is empty or the
    /// file cannot be truncated.
    pub(crate) fn release_for_removes(&self) -> bool {
        self.release(|parts| parts.removes -= parts.removes.min(RELEASE_STEP_BYTES))
    }

    /// Frees the part for `need`; returns false if it is empty or the file cannot be truncated. A flush gets all parts
    /// except `open`, because it retires WAL segments.
    pub(crate) fn release_for(&self, need: ReserveUse) -> bool {
        self.release(|parts| match need {
            ReserveUse::Flush => *parts = ReserveParts { open: parts.open, ..ReserveParts::default() },
            ReserveUse::Compaction => parts.compaction = 0,
        })
    }

    /// Frees all parts, while the database is opened; returns false if they are empty or the file cannot be truncated.
    pub(crate) fn release_all(&self) -> bool {
        self.release(|parts| *parts = ReserveParts::default())
    }

    /// Frees space for a manifest that replaces the one of `manifest_bytes`. Leaves what opening the database needs,
    /// with the space that the old manifest gives back. Returns false if that part is too small or the file cannot be
    /// truncated.
    pub(crate) fn release_for_manifest(&self, manifest_bytes: u64) -> bool {
        let kept = manifest_bytes.saturating_add(OPEN_PART_BYTES / 2).next_multiple_of(RESERVE_PAGE_BYTES);
        self.release(|parts| parts.open = parts.open.min(kept))
    }

    fn release(&self, take: impl FnOnce(&mut ReserveParts)) -> bool {
        let mut state = lock(&self.state);
        let mut remaining = state.parts;
        take(&mut remaining);
        if remaining == state.parts {
            return false;
        }
        debug_assert!(remaining.total() < state.parts.total(), "a release makes the reserve smaller");
        self.short.store(true, Ordering::Relaxed);
        let truncated = self.open_file().and_then(|file| file.set_length(remaining.total()));
        if truncated.is_ok() {
            state.parts = remaining;
        }
        truncated.is_ok()
    }

    /// Shrinks the reserve to the wanted size of a cleanly closed database, which has no WAL to replay.
    pub(crate) fn shrink(&self, manifest_bytes: u64) {
        let wanted = ReserveParts::wanted(self.max, 0, 0, manifest_bytes);
        let len = lock(&self.state).parts.total();
        if len > wanted.total() {
            let remaining = ReserveParts::divide(wanted.total(), wanted);
            self.release(|parts| *parts = remaining);
        }
    }

    /// Removes a file that was created when the reserve was enabled. If that fails, the next open tries again.
    fn remove_file(&self, state: &mut DiskReserveState) {
        if !state.allocated && self.fs.exists(&self.path).unwrap_or(false) {
            let _retried_at_next_open = self.fs.remove_file(&self.path);
        }
        *state = DiskReserveState { allocated: true, ..DiskReserveState::default() };
    }

    fn open_file(&self) -> Result<Arc<dyn File>> {
        let mode = if self.fs.exists(&self.path)? { OpenMode::Write } else { OpenMode::Create };
        self.fs.open(&self.path, mode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::MemFs;
    use crate::testing::{Fault, FaultFs, FaultPlan, OpKind};

    const MAX: u64 = 8 << 20;

    fn open_reserve(fs: &MemFs) -> DiskReserve {
        DiskReserve::open_existing(Arc::new(fs.clone()), Path::new("/"), MAX, 0, 0, 0).unwrap()
    }

    #[test]
    fn wanted_parts_grow_with_wal_up_to_max() {
        let (without_need, with_all_needs) =
            (ReserveParts::wanted(MAX, 0, 0, 0), ReserveParts::wanted(MAX, u64::MAX, 0, 100));
        assert_eq!(
            without_need,
            ReserveParts {
                open: OPEN_PART_BYTES,
                removes: REMOVES_PART_MIN,
                flush: WORK_PART_MIN,
                compaction: WORK_PART_MIN
            }
        );
        assert_eq!(
            (with_all_needs.removes, with_all_needs.removes + with_all_needs.flush + with_all_needs.compaction),
            (2 << 20, MAX)
        );
        assert_eq!(with_all_needs.open, OPEN_PART_BYTES + RESERVE_PAGE_BYTES);
        assert_eq!(ReserveParts::wanted(0, 1 << 20, 1 << 20, 1 << 20).total(), 0);
        assert_eq!(ReserveParts::wanted(MAX, 0, 1 << 20, 0).flush, WORK_PART_MIN + (1 << 20));
        let mut before = 0;
        for wal_bytes in (0..(16 << 20)).step_by(100_000) {
            let total = ReserveParts::wanted(MAX, wal_bytes, 0, 0).total();
            assert!(total >= before && total <= MAX + OPEN_PART_BYTES, "{wal_bytes}");
            before = total;
        }
    }

    #[test]
    fn parts_are_released_one_by_one_and_filled() {
        let fs = MemFs::new();
        let reserve = open_reserve(&fs);
        let wanted = reserve.wanted(4 << 20, 0, 0);
        assert!(!reserve.release_all() && reserve.fill(wanted) && !reserve.is_short());
        assert_eq!(fs.used_space(), wanted.total());
        fs.set_capacity(Some(wanted.total()));
        assert!(
            reserve.release_for(ReserveUse::Compaction)
                && !reserve.release_for(ReserveUse::Compaction)
                && reserve.is_short()
        );
        assert_eq!(fs.used_space(), wanted.total() - wanted.compaction);
        let mut steps = 0;
        while reserve.release_for_removes() {
            steps += 1;
        }
        assert_eq!((steps, fs.used_space()), (wanted.removes.div_ceil(RELEASE_STEP_BYTES), wanted.open + wanted.flush));
        assert!(reserve.release_for(ReserveUse::Flush) && !reserve.release_for(ReserveUse::Flush));
        assert_eq!(fs.used_space(), wanted.open);
        // After reopening, the rest of the file is divided again. The reserve grows as far as there is space.
        let next = open_reserve(&fs);
        fs.set_capacity(Some(wanted.total() - (1 << 20)));
        assert!(!next.fill(wanted) && next.is_short());
        assert!(fs.used_space() > wanted.total() - (1 << 20) - 2 * RELEASE_STEP_BYTES);
        fs.set_capacity(None);
        assert!(next.fill(wanted) && !next.is_short());
        next.shrink(0);
        assert_eq!(fs.used_space(), next.wanted(0, 0, 0).total());
        assert!(next.release_all());
        assert_eq!(fs.used_space(), 0);
    }

    #[test]
    fn file_is_removed_when_reserve_is_disabled() {
        let fs = MemFs::new();
        open_reserve(&fs).fill(ReserveParts::wanted(MAX, 0, 0, 0));
        let none = DiskReserve::open_existing(Arc::new(fs.clone()), Path::new("/"), 0, 0, 0, 9).unwrap();
        assert!(none.fill(none.wanted(1 << 30, 0, 9)) && !none.is_short());
        assert!(fs.read_dir(Path::new("/")).unwrap().is_empty());
    }

    /// Regression: opening divided the reserve as for an empty WAL and gave the rest to compactions. After an open on a
    /// full disk, flushes had no space.
    #[test]
    fn parts_are_divided_for_wal_after_reopening() {
        let fs = MemFs::new();
        let reserve = open_reserve(&fs);
        let wanted = reserve.wanted(2 << 20, 0, 0);
        assert!(reserve.fill(wanted) && reserve.release_for_removes());
        fs.set_capacity(Some(fs.used_space()));
        let next = DiskReserve::open_existing(Arc::new(fs.clone()), Path::new("/"), MAX, 2 << 20, 0, 0).unwrap();
        assert!(!next.fill(wanted));
        next.release_for(ReserveUse::Compaction);
        while next.release_for_removes() {}
        assert_eq!(fs.used_space(), wanted.open + wanted.flush, "the part for flushes was released");
    }

    /// Regression: if the file could not be created on a full disk, the reserve counted as full, and ordinary writes
    /// were accepted.
    #[test]
    fn reserve_is_short_when_its_file_does_not_fit() {
        let fs = MemFs::new();
        let faulty = FaultFs::new(Arc::new(fs.clone()));
        let reserve = DiskReserve::open_existing(Arc::new(faulty.clone()), Path::new("/"), MAX, 0, 0, 0).unwrap();
        let wanted = reserve.wanted(0, 0, 0);
        let full = Fault::Error(std::io::ErrorKind::StorageFull);
        faulty.inject(FaultPlan::new(OpKind::Create, 1, full).in_path(DISK_RESERVE_FILE_NAME).forever());
        assert!(!reserve.fill(wanted) && reserve.is_short());
        faulty.clear_faults();
        assert!(reserve.fill(wanted) && !reserve.is_short());
        assert_eq!(fs.used_space(), wanted.total());
    }
}
