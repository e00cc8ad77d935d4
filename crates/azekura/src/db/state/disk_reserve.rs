//! The disk reserve: space on the database's file system that ordinary writes cannot use.
//!
//! A file `RESERVE` in the database's directory has space allocated and no content. When the disk is full, a part of
//! the file is cut off, and what needs space takes what became free. The reserve has four parts, so that none of its
//! users takes what another one needs:
//! - `open`: opening the database writes a manifest and begins a log segment;
//! - `removes`: the log grows for commits that only remove;
//! - `flush`: flushes, and checkpoints of pools, write what the log has before they give the log back;
//! - `merge`: compactions and blob GC write their output before they remove their input. Most of what they may write is
//!   more than any reserve, so they must not use up what flushes need.
//!
//! While the reserve is shorter than wanted, ordinary writes are refused and every chance is used to fill it again.
//! The length of the file is all that survives; how it is divided is decided anew when the database is opened.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::base::sync::lock;
use crate::base::{ErrorKind, Result};
use crate::vfs::fs::DISK_RESERVE_FILE_NAME;
use crate::vfs::{File, Fs, OpenMode};

/// What opening a database takes beside two manifests: a log segment's first step and some slack.
const OPEN_PART_BYTES: u64 = 256 << 10;
/// The least for commits that only remove, …
const REMOVES_PART_MIN: u64 = 256 << 10;
/// … and the most.
const REMOVES_PART_MAX: u64 = 4 << 20;
/// What a flush takes beside the data that it writes, and the least for compactions.
const WORK_PART_MIN: u64 = 512 << 10;
/// The log gets so much at a time.
const RELEASE_STEP_BYTES: u64 = 256 << 10;
/// Sizes are multiples of this.
const RESERVE_PAGE_BYTES: u64 = 4096;

/// What needs space beside commits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReserveUse {
    /// What gives the log back, and edits of the manifest.
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
    /// What a database wants whose log would be replayed from `log_bytes`, whose pools take `pool_bytes` at their next
    /// checkpoints, and whose manifest has `manifest_bytes`; at most `max` beside the part for opening. Pure.
    pub(crate) fn wanted(max: u64, log_bytes: u64, pool_bytes: u64, manifest_bytes: u64) -> ReserveParts {
        if max == 0 {
            return ReserveParts::default();
        }
        // Flushing what is in the log writes as much, with indexes and filters.
        let flush = log_bytes.saturating_add(log_bytes / 4).saturating_add(WORK_PART_MIN).saturating_add(pool_bytes);
        let whole = |bytes: u64| bytes / RESERVE_PAGE_BYTES * RESERVE_PAGE_BYTES;
        let merge = whole((log_bytes / 4).saturating_add(WORK_PART_MIN).min(max / 4));
        let removes = whole((flush / 4).clamp(REMOVES_PART_MIN, REMOVES_PART_MAX).min(max / 4));
        let flush = whole(flush.min(max - removes - merge));
        let open = OPEN_PART_BYTES.saturating_add(manifest_bytes.saturating_mul(2));
        ReserveParts { open: whole(open.saturating_add(RESERVE_PAGE_BYTES - 1)), removes, flush, compaction: merge }
    }

    /// Divides `len` bytes where `wanted` bytes are needed.
    fn divide(len: u64, wanted: ReserveParts) -> ReserveParts {
        ReserveParts::default().grown_by(len, wanted)
    }

    /// Distributes additional bytes where `wanted` bytes are needed: opening first, then flushes.
    fn grown_by(self, more: u64, wanted: ReserveParts) -> ReserveParts {
        let open = more.min(wanted.open.saturating_sub(self.open));
        let flush = (more - open).min(wanted.flush.saturating_sub(self.flush));
        let removes = (more - open - flush).min(wanted.removes.saturating_sub(self.removes));
        let merge = more - open - flush - removes;
        ReserveParts {
            open: self.open + open,
            removes: self.removes + removes,
            flush: self.flush + flush,
            compaction: self.compaction + merge,
        }
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
    /// 0: there is no reserve.
    max: u64,
    state: Mutex<DiskReserveState>,
    short: AtomicBool,
}

#[derive(Debug, Default)]
struct DiskReserveState {
    parts: ReserveParts,
    /// Whether it was made sure that there is space behind the file's length.
    allocated: bool,
}

impl DiskReserve {
    /// The reserve that the directory has, which may be less than is wanted, or nothing. Changes nothing. It is divided
    /// for a log of `log_bytes`, and for pools that take `pool_bytes` at their next checkpoints: on a full disk it is
    /// not divided again until it is filled, and compactions must not get what flushes and checkpoints need.
    ///
    /// # Errors
    /// `Io` if the directory cannot be read.
    pub(crate) fn open_existing(
        fs: Arc<dyn Fs>,
        dir: &Path,
        max: u64,
        log_bytes: u64,
        pool_bytes: u64,
        manifest_bytes: u64,
    ) -> Result<DiskReserve> {
        let path = dir.join(DISK_RESERVE_FILE_NAME);
        let len = if fs.exists(&path)? { fs.open(&path, OpenMode::Read)?.length()? } else { 0 };
        let parts = ReserveParts::divide(len, ReserveParts::wanted(max, log_bytes, pool_bytes, manifest_bytes));
        let held = Mutex::new(DiskReserveState { parts, allocated: false });
        Ok(DiskReserve { fs, path, max, state: held, short: AtomicBool::new(false) })
    }

    /// Where the file is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// What the database wants now.
    pub(crate) fn wanted(&self, log_bytes: u64, pool_bytes: u64, manifest_bytes: u64) -> ReserveParts {
        ReserveParts::wanted(self.max, log_bytes, pool_bytes, manifest_bytes)
    }

    /// Whether it is shorter than wanted, so that ordinary writes are refused.
    #[inline]
    pub(crate) fn is_short(&self) -> bool {
        self.short.load(Ordering::Relaxed)
    }

    /// Grows the reserve to what is wanted, as far as there is space; never shrinks it. False if it stays short. Where
    /// the file cannot be made for another reason than a full disk, the database goes on without.
    pub(crate) fn fill(&self, wanted: ReserveParts) -> bool {
        let mut held = lock(&self.state);
        if self.max == 0 {
            self.remove_file(&mut held);
            return true;
        }
        let (len, goal) = (held.parts.total(), wanted.total());
        if len < goal || !held.allocated && len > 0 {
            let file = match self.open_file() {
                Ok(file) => file,
                Err(error) => {
                    // A full disk may have no space for the name either.
                    let full = error.kind() == ErrorKind::OutOfSpace;
                    self.short.fetch_or(full, Ordering::Relaxed);
                    return !full;
                }
            };
            let mut missing = goal.saturating_sub(len);
            loop {
                let end = held.parts.total();
                match file.allocate_from(if held.allocated { end } else { 0 }, end + missing) {
                    Ok(()) => {
                        held.parts = held.parts.grown_by(missing, wanted);
                        held.allocated = true;
                    }
                    Err(error) if error.kind() != ErrorKind::OutOfSpace => return true,
                    // Some file systems keep a part of what they could not do as a whole.
                    Err(_) => drop(file.set_length(end)),
                }
                // A part of it may still fit.
                missing = (missing / 2 / RESERVE_PAGE_BYTES * RESERVE_PAGE_BYTES)
                    .min(goal.saturating_sub(held.parts.total()));
                if missing < RELEASE_STEP_BYTES {
                    break;
                }
            }
        }
        let full = held.parts.total() >= goal;
        if full {
            held.parts = ReserveParts::divide(held.parts.total(), wanted);
        }
        self.short.store(!full, Ordering::Relaxed);
        full
    }

    /// Cuts off some of what is kept for commits that only remove; false if nothing is left.
    pub(crate) fn release_for_removes(&self) -> bool {
        self.release(|parts| parts.removes -= parts.removes.min(RELEASE_STEP_BYTES))
    }

    /// Cuts off what is kept for such work; false if nothing is left. A flush gets all but the part for opening,
    /// because it gives back the log.
    pub(crate) fn release_for(&self, need: ReserveUse) -> bool {
        self.release(|parts| match need {
            ReserveUse::Flush => *parts = ReserveParts { open: parts.open, ..ReserveParts::default() },
            ReserveUse::Compaction => parts.compaction = 0,
        })
    }

    /// Cuts off everything, for a database that is being opened; false if there was nothing.
    pub(crate) fn release_all(&self) -> bool {
        self.release(|parts| *parts = ReserveParts::default())
    }

    fn release(&self, take: impl FnOnce(&mut ReserveParts)) -> bool {
        let mut held = lock(&self.state);
        let mut left = held.parts;
        take(&mut left);
        if left == held.parts {
            return false;
        }
        self.short.store(true, Ordering::Relaxed);
        let cut = self.open_file().and_then(|file| file.set_length(left.total()));
        if cut.is_ok() {
            held.parts = left;
        }
        cut.is_ok()
    }

    /// Cuts off what a database does not want that is closed and has nothing to replay.
    pub(crate) fn shrink(&self, manifest_bytes: u64) {
        let wanted = ReserveParts::wanted(self.max, 0, 0, manifest_bytes);
        let len = lock(&self.state).parts.total();
        if len > wanted.total() {
            let left = ReserveParts::divide(wanted.total(), wanted);
            self.release(|parts| *parts = left);
        }
    }

    /// Removes the file that an earlier life had.
    fn remove_file(&self, held: &mut DiskReserveState) {
        if !held.allocated && self.fs.exists(&self.path).unwrap_or(false) {
            let _takes_space_until_the_next_open = self.fs.remove_file(&self.path);
        }
        *held = DiskReserveState { allocated: true, ..DiskReserveState::default() };
    }

    fn open_file(&self) -> Result<Arc<dyn File>> {
        let mode = if self.fs.exists(&self.path)? { OpenMode::Write } else { OpenMode::Create };
        self.fs.open(&self.path, mode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vfs::fault::{Fault, FaultFs, FaultPlan, OpKind};
    use crate::vfs::mem::MemFs;

    const MAX: u64 = 8 << 20;

    fn open_reserve(machine: &MemFs) -> DiskReserve {
        DiskReserve::open_existing(Arc::new(machine.clone()), Path::new("/"), MAX, 0, 0, 0).unwrap()
    }

    #[test]
    fn parts_follow_the_log_up_to_the_bound() {
        let (least, most) = (ReserveParts::wanted(MAX, 0, 0, 0), ReserveParts::wanted(MAX, u64::MAX, 0, 100));
        assert_eq!(
            least,
            ReserveParts {
                open: OPEN_PART_BYTES,
                removes: REMOVES_PART_MIN,
                flush: WORK_PART_MIN,
                compaction: WORK_PART_MIN
            }
        );
        assert_eq!((most.removes, most.removes + most.flush + most.compaction), (2 << 20, MAX));
        assert_eq!(most.open, OPEN_PART_BYTES + RESERVE_PAGE_BYTES);
        assert_eq!(ReserveParts::wanted(0, 1 << 20, 1 << 20, 1 << 20).total(), 0);
        assert_eq!(ReserveParts::wanted(MAX, 0, 1 << 20, 0).flush, WORK_PART_MIN + (1 << 20));
        let mut before = 0;
        for log in (0..(16 << 20)).step_by(100_000) {
            let total = ReserveParts::wanted(MAX, log, 0, 0).total();
            assert!(total >= before && total <= MAX + OPEN_PART_BYTES, "{log}");
            before = total;
        }
    }

    #[test]
    fn parts_are_released_one_by_one_and_filled() {
        let machine = MemFs::new();
        let kept = open_reserve(&machine);
        let wanted = kept.wanted(4 << 20, 0, 0);
        assert!(!kept.release_all() && kept.fill(wanted) && !kept.is_short());
        assert_eq!(machine.used_space(), wanted.total());
        machine.set_capacity(Some(wanted.total()));
        assert!(
            kept.release_for(ReserveUse::Compaction) && !kept.release_for(ReserveUse::Compaction) && kept.is_short()
        );
        assert_eq!(machine.used_space(), wanted.total() - wanted.compaction);
        let mut steps = 0;
        while kept.release_for_removes() {
            steps += 1;
        }
        assert_eq!(
            (steps, machine.used_space()),
            (wanted.removes.div_ceil(RELEASE_STEP_BYTES), wanted.open + wanted.flush)
        );
        assert!(kept.release_for(ReserveUse::Flush) && !kept.release_for(ReserveUse::Flush));
        assert_eq!(machine.used_space(), wanted.open);
        // Another life finds what is left and divides it anew; what is missing comes back as there is space.
        let next = open_reserve(&machine);
        machine.set_capacity(Some(wanted.total() - (1 << 20)));
        assert!(!next.fill(wanted) && next.is_short());
        assert!(machine.used_space() > wanted.total() - (1 << 20) - 2 * RELEASE_STEP_BYTES);
        machine.set_capacity(None);
        assert!(next.fill(wanted) && !next.is_short());
        next.shrink(0);
        assert_eq!(machine.used_space(), next.wanted(0, 0, 0).total());
        assert!(next.release_all());
        assert_eq!(machine.used_space(), 0);
    }

    #[test]
    fn no_file_is_left_when_there_is_no_reserve() {
        let machine = MemFs::new();
        open_reserve(&machine).fill(ReserveParts::wanted(MAX, 0, 0, 0));
        let none = DiskReserve::open_existing(Arc::new(machine.clone()), Path::new("/"), 0, 0, 0, 9).unwrap();
        assert!(none.fill(none.wanted(1 << 30, 0, 9)) && !none.is_short());
        assert!(machine.read_dir(Path::new("/")).unwrap().is_empty());
    }

    /// The file was divided for an empty log: what it had beyond that went to compactions, which left flushes without
    /// space after a database was opened on a full disk.
    #[test]
    fn parts_follow_the_log_after_reopening() {
        let machine = MemFs::new();
        let kept = open_reserve(&machine);
        let wanted = kept.wanted(2 << 20, 0, 0);
        assert!(kept.fill(wanted) && kept.release_for_removes());
        machine.set_capacity(Some(machine.used_space()));
        let next = DiskReserve::open_existing(Arc::new(machine.clone()), Path::new("/"), MAX, 2 << 20, 0, 0).unwrap();
        assert!(!next.fill(wanted));
        next.release_for(ReserveUse::Compaction);
        while next.release_for_removes() {}
        assert_eq!(machine.used_space(), wanted.open + wanted.flush, "flushes keep their part");
    }

    /// A disk so full that the file could not be made counted as a reserve that is full: ordinary writes were accepted.
    #[test]
    fn reserve_is_short_when_its_file_does_not_fit() {
        let machine = MemFs::new();
        let faulty = FaultFs::new(Arc::new(machine.clone()));
        let kept = DiskReserve::open_existing(Arc::new(faulty.clone()), Path::new("/"), MAX, 0, 0, 0).unwrap();
        let wanted = kept.wanted(0, 0, 0);
        let full = Fault::Error(std::io::ErrorKind::StorageFull);
        faulty.inject(FaultPlan::new(OpKind::Create, 1, full).in_path(DISK_RESERVE_FILE_NAME).forever());
        assert!(!kept.fill(wanted) && kept.is_short());
        faulty.clear_faults();
        assert!(kept.fill(wanted) && !kept.is_short());
        assert_eq!(machine.used_space(), wanted.total());
    }
}
