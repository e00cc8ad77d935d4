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
use crate::vfs::fs::RESERVE;
use crate::vfs::{File, Fs, OpenMode};

/// What opening a database takes beside two manifests: a log segment's first step and some slack.
const OPEN_BYTES: u64 = 256 << 10;
/// The least for commits that only remove, …
const REMOVES_MIN: u64 = 256 << 10;
/// … and the most.
const REMOVES_MAX: u64 = 4 << 20;
/// What a flush takes beside the data that it writes, and the least for compactions.
const WORK_BYTES: u64 = 512 << 10;
/// The log gets so much at a time.
const STEP: u64 = 256 << 10;
/// Sizes are multiples of this.
const PAGE: u64 = 4096;

/// What needs space beside commits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// What gives the log back, and edits of the manifest.
    Flush,
    /// Compactions and blob GC.
    Merge,
}

/// Sizes of the four parts, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Parts {
    open: u64,
    removes: u64,
    flush: u64,
    merge: u64,
}

impl Parts {
    /// What a database wants whose log would be replayed from `log_bytes`, whose pools take `pool_bytes` at their next
    /// checkpoints, and whose manifest has `manifest_bytes`; at most `max` beside the part for opening. Pure.
    pub(crate) fn wanted(max: u64, log_bytes: u64, pool_bytes: u64, manifest_bytes: u64) -> Parts {
        if max == 0 {
            return Parts::default();
        }
        // Flushing what is in the log writes as much, with indexes and filters.
        let flush = log_bytes.saturating_add(log_bytes / 4).saturating_add(WORK_BYTES).saturating_add(pool_bytes);
        let whole = |bytes: u64| bytes / PAGE * PAGE;
        let merge = whole((log_bytes / 4).saturating_add(WORK_BYTES).min(max / 4));
        let removes = whole((flush / 4).clamp(REMOVES_MIN, REMOVES_MAX).min(max / 4));
        let flush = whole(flush.min(max - removes - merge));
        let open = OPEN_BYTES.saturating_add(manifest_bytes.saturating_mul(2));
        Parts { open: whole(open.saturating_add(PAGE - 1)), removes, flush, merge }
    }

    /// How `len` bytes are divided where so many are `wanted`.
    fn divide(len: u64, wanted: Parts) -> Parts {
        Parts::default().with(len, wanted)
    }

    /// With so many bytes more, where so many are `wanted`: opening comes first, then flushes.
    fn with(self, more: u64, wanted: Parts) -> Parts {
        let open = more.min(wanted.open.saturating_sub(self.open));
        let flush = (more - open).min(wanted.flush.saturating_sub(self.flush));
        let removes = (more - open - flush).min(wanted.removes.saturating_sub(self.removes));
        let merge = more - open - flush - removes;
        Parts {
            open: self.open + open,
            removes: self.removes + removes,
            flush: self.flush + flush,
            merge: self.merge + merge,
        }
    }

    fn total(self) -> u64 {
        self.open.saturating_add(self.removes).saturating_add(self.flush).saturating_add(self.merge)
    }
}

/// The reserve of one database. Thread safe.
#[derive(Debug)]
pub(crate) struct Reserve {
    fs: Arc<dyn Fs>,
    path: PathBuf,
    /// 0: there is no reserve.
    max: u64,
    held: Mutex<Held>,
    short: AtomicBool,
}

#[derive(Debug, Default)]
struct Held {
    parts: Parts,
    /// Whether it was made sure that there is space behind the file's length.
    allocated: bool,
}

impl Reserve {
    /// The reserve that the directory has, which may be less than is wanted, or nothing. Changes nothing. It is divided
    /// for a log of `log_bytes`: on a full disk it is not divided again until it is filled, and compactions must not
    /// get what flushes of that log need.
    ///
    /// # Errors
    /// `Io` if the directory cannot be read.
    pub(crate) fn find(fs: Arc<dyn Fs>, dir: &Path, max: u64, log_bytes: u64, manifest_bytes: u64) -> Result<Reserve> {
        let path = dir.join(RESERVE);
        let len = if fs.exists(&path)? { fs.open(&path, OpenMode::Read)?.length()? } else { 0 };
        let parts = Parts::divide(len, Parts::wanted(max, log_bytes, 0, manifest_bytes));
        let held = Mutex::new(Held { parts, allocated: false });
        Ok(Reserve { fs, path, max, held, short: AtomicBool::new(false) })
    }

    /// Where the file is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// What the database wants now.
    pub(crate) fn wanted(&self, log_bytes: u64, pool_bytes: u64, manifest_bytes: u64) -> Parts {
        Parts::wanted(self.max, log_bytes, pool_bytes, manifest_bytes)
    }

    /// Whether it is shorter than wanted, so that ordinary writes are refused.
    #[inline]
    pub(crate) fn is_short(&self) -> bool {
        self.short.load(Ordering::Relaxed)
    }

    /// Grows the reserve to what is wanted, as far as there is space; never shrinks it. False if it stays short. Where
    /// the file cannot be made for another reason than a full disk, the database goes on without.
    pub(crate) fn fill(&self, wanted: Parts) -> bool {
        let mut held = lock(&self.held);
        if self.max == 0 {
            self.remove(&mut held);
            return true;
        }
        let (len, goal) = (held.parts.total(), wanted.total());
        if len < goal || !held.allocated && len > 0 {
            let file = match self.file() {
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
                        held.parts = held.parts.with(missing, wanted);
                        held.allocated = true;
                    }
                    Err(error) if error.kind() != ErrorKind::OutOfSpace => return true,
                    // Some file systems keep a part of what they could not do as a whole.
                    Err(_) => drop(file.set_length(end)),
                }
                // A part of it may still fit.
                missing = (missing / 2 / PAGE * PAGE).min(goal.saturating_sub(held.parts.total()));
                if missing < STEP {
                    break;
                }
            }
        }
        let full = held.parts.total() >= goal;
        if full {
            held.parts = Parts::divide(held.parts.total(), wanted);
        }
        self.short.store(!full, Ordering::Relaxed);
        full
    }

    /// Cuts off some of what is kept for commits that only remove; false if nothing is left.
    pub(crate) fn release_for_removes(&self) -> bool {
        self.release(|parts| parts.removes -= parts.removes.min(STEP))
    }

    /// Cuts off what is kept for such work; false if nothing is left. A flush gets all but the part for opening,
    /// because it gives back the log.
    pub(crate) fn release_for(&self, need: Need) -> bool {
        self.release(|parts| match need {
            Need::Flush => *parts = Parts { open: parts.open, ..Parts::default() },
            Need::Merge => parts.merge = 0,
        })
    }

    /// Cuts off everything, for a database that is being opened; false if there was nothing.
    pub(crate) fn release_all(&self) -> bool {
        self.release(|parts| *parts = Parts::default())
    }

    fn release(&self, take: impl FnOnce(&mut Parts)) -> bool {
        let mut held = lock(&self.held);
        let mut left = held.parts;
        take(&mut left);
        if left == held.parts {
            return false;
        }
        self.short.store(true, Ordering::Relaxed);
        let cut = self.file().and_then(|file| file.set_length(left.total()));
        if cut.is_ok() {
            held.parts = left;
        }
        cut.is_ok()
    }

    /// Cuts off what a database does not want that is closed and has nothing to replay.
    pub(crate) fn shrink(&self, manifest_bytes: u64) {
        let wanted = Parts::wanted(self.max, 0, 0, manifest_bytes);
        let len = lock(&self.held).parts.total();
        if len > wanted.total() {
            let left = Parts::divide(wanted.total(), wanted);
            self.release(|parts| *parts = left);
        }
    }

    /// Removes the file that an earlier life had.
    fn remove(&self, held: &mut Held) {
        if !held.allocated && self.fs.exists(&self.path).unwrap_or(false) {
            let _takes_space_until_the_next_open = self.fs.remove_file(&self.path);
        }
        *held = Held { allocated: true, ..Held::default() };
    }

    fn file(&self) -> Result<Arc<dyn File>> {
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

    fn reserve(machine: &MemFs) -> Reserve {
        Reserve::find(Arc::new(machine.clone()), Path::new("/"), MAX, 0, 0).unwrap()
    }

    #[test]
    fn parts_follow_the_log_up_to_the_bound() {
        let (least, most) = (Parts::wanted(MAX, 0, 0, 0), Parts::wanted(MAX, u64::MAX, 0, 100));
        assert_eq!(least, Parts { open: OPEN_BYTES, removes: REMOVES_MIN, flush: WORK_BYTES, merge: WORK_BYTES });
        assert_eq!((most.removes, most.removes + most.flush + most.merge), (2 << 20, MAX));
        assert_eq!(most.open, OPEN_BYTES + PAGE);
        assert_eq!(Parts::wanted(0, 1 << 20, 1 << 20, 1 << 20).total(), 0);
        assert_eq!(Parts::wanted(MAX, 0, 1 << 20, 0).flush, WORK_BYTES + (1 << 20));
        let mut before = 0;
        for log in (0..(16 << 20)).step_by(100_000) {
            let total = Parts::wanted(MAX, log, 0, 0).total();
            assert!(total >= before && total <= MAX + OPEN_BYTES, "{log}");
            before = total;
        }
    }

    #[test]
    fn parts_are_released_one_by_one_and_filled() {
        let machine = MemFs::new();
        let kept = reserve(&machine);
        let wanted = kept.wanted(4 << 20, 0, 0);
        assert!(!kept.release_all() && kept.fill(wanted) && !kept.is_short());
        assert_eq!(machine.used_space(), wanted.total());
        machine.set_capacity(Some(wanted.total()));
        assert!(kept.release_for(Need::Merge) && !kept.release_for(Need::Merge) && kept.is_short());
        assert_eq!(machine.used_space(), wanted.total() - wanted.merge);
        let mut steps = 0;
        while kept.release_for_removes() {
            steps += 1;
        }
        assert_eq!((steps, machine.used_space()), (wanted.removes.div_ceil(STEP), wanted.open + wanted.flush));
        assert!(kept.release_for(Need::Flush) && !kept.release_for(Need::Flush));
        assert_eq!(machine.used_space(), wanted.open);
        // Another life finds what is left and divides it anew; what is missing comes back as there is space.
        let next = reserve(&machine);
        machine.set_capacity(Some(wanted.total() - (1 << 20)));
        assert!(!next.fill(wanted) && next.is_short());
        assert!(machine.used_space() > wanted.total() - (1 << 20) - 2 * STEP);
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
        reserve(&machine).fill(Parts::wanted(MAX, 0, 0, 0));
        let none = Reserve::find(Arc::new(machine.clone()), Path::new("/"), 0, 0, 9).unwrap();
        assert!(none.fill(none.wanted(1 << 30, 0, 9)) && !none.is_short());
        assert!(machine.read_dir(Path::new("/")).unwrap().is_empty());
    }

    /// The file was divided for an empty log: what it had beyond that went to compactions, which left flushes without
    /// space after a database was opened on a full disk.
    #[test]
    fn parts_follow_the_log_after_reopening() {
        let machine = MemFs::new();
        let kept = reserve(&machine);
        let wanted = kept.wanted(2 << 20, 0, 0);
        assert!(kept.fill(wanted) && kept.release_for_removes());
        machine.set_capacity(Some(machine.used_space()));
        let next = Reserve::find(Arc::new(machine.clone()), Path::new("/"), MAX, 2 << 20, 0).unwrap();
        assert!(!next.fill(wanted));
        next.release_for(Need::Merge);
        while next.release_for_removes() {}
        assert_eq!(machine.used_space(), wanted.open + wanted.flush, "flushes keep their part");
    }

    /// A disk so full that the file could not be made counted as a reserve that is full: ordinary writes were accepted.
    #[test]
    fn reserve_is_short_when_its_file_does_not_fit() {
        let machine = MemFs::new();
        let faulty = FaultFs::new(Arc::new(machine.clone()));
        let kept = Reserve::find(Arc::new(faulty.clone()), Path::new("/"), MAX, 0, 0).unwrap();
        let wanted = kept.wanted(0, 0, 0);
        let full = Fault::Error(std::io::ErrorKind::StorageFull);
        faulty.fail(FaultPlan::new(OpKind::Create, 1, full).in_path(RESERVE).forever());
        assert!(!kept.fill(wanted) && kept.is_short());
        faulty.repair();
        assert!(kept.fill(wanted) && !kept.is_short());
        assert_eq!(machine.used_space(), wanted.total());
    }
}
