//! Writes the log anew after a replay that passed over damage, so that every later replay, in every mode, finds what
//! this one found.
//!
//! The new segments hold the commits that were applied and are needed, and gaps for the numbers in between. They link
//! to no other segment: until the manifest lists them, which it must do in the edit that drops the old ones, they are
//! no part of the log.

use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::base::edit::{Epoch, FileId};
use crate::base::sync::lock;
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::vfs::{Env, Fs};
use crate::wal::format::segment_path;
use crate::wal::host::WalHost;
use crate::wal::log::Wal;
use crate::wal::options::{LogCommit, ReplayOptions, ReplayReport, SegmentInfo, WalOptions};
use crate::wal::payload::gap;
use crate::wal::replay::replay;

/// Numbers for segments that the manifest does not list yet.
struct Unlisted {
    next_epoch: Arc<AtomicU32>,
    next_file: Arc<AtomicU64>,
    /// The files that were begun.
    files: Mutex<Vec<FileId>>,
}

impl WalHost for Unlisted {
    fn new_segment(&self) -> Result<(Epoch, FileId)> {
        let epoch = self.next_epoch.load(Ordering::Relaxed);
        let next = epoch.checked_add(1).ok_or_else(no_epochs)?;
        self.next_epoch.store(next, Ordering::Relaxed);
        let file = FileId(self.next_file.fetch_add(1, Ordering::Relaxed));
        lock(&self.files).push(file);
        Ok((Epoch(epoch), file))
    }

    fn segment_added(&self, _epoch: Epoch, _file: FileId) -> Result<()> {
        Ok(())
    }

    fn before_sync(&self) -> Result<()> {
        Ok(())
    }
}

fn no_epochs() -> Error {
    Error::new(ErrorKind::Unsupported, "the database has used up its log epochs")
}

/// What a rewrite needs to know beside what the replay did.
pub(crate) struct Rewrite {
    pub(crate) options: ReplayOptions,
    pub(crate) wal: WalOptions,
    /// No segment ever had this epoch or a later one, nor has a file this number or a later one. Both are raised, also
    /// by a rewrite that fails: a file of it that cannot be removed must not share its epoch with the next one.
    pub(crate) next_epoch: Arc<AtomicU32>,
    pub(crate) next_file: Arc<AtomicU64>,
}

/// Writes what `report` tells of into new segments, durably, and gives the report that a replay of these would give.
/// `was_applied` says of a commit, by its first number, whether it counted.
///
/// # Errors
/// Those of reading the log again, `OutOfSpace` and `Io`: the log is as it was, and the new segments are removed.
pub(crate) fn rewrite(
    fs: &Arc<dyn Fs>,
    dir: &Path,
    env: &Arc<dyn Env>,
    database_id: [u8; 16],
    rewrite: Rewrite,
    report: ReplayReport,
    was_applied: &dyn Fn(SeqNo) -> bool,
) -> Result<ReplayReport> {
    let Rewrite { options, wal: wal_options, next_epoch, next_file } = rewrite;
    // The manifest notes the end of the new log, which says that all of it is durable. Watermarks would say so before
    // the manifest does: after a salvage that was killed, a torn tail of the old log would look damaged.
    let wal_options = WalOptions { marks: false, ..wal_options };
    // An epoch that no segment has: what follows on it follows on none.
    let burned = Epoch(next_epoch.load(Ordering::Relaxed)).max(Epoch(report.highest_epoch.0.saturating_add(1)));
    next_epoch.store(burned.0.checked_add(1).ok_or_else(no_epochs)?, Ordering::Relaxed);
    let host = Arc::new(Unlisted { next_epoch, next_file, files: Mutex::default() });
    let mut wal: Option<Wal> = None;
    let mut append = |commit: LogCommit<'_>| {
        let last = commit.first.0 + u64::from(commit.count) - 1;
        let is_needed = last > report.unneeded.0 && last <= report.last.0;
        if !is_needed || !was_applied(commit.first) {
            return Ok(None);
        }
        let wal = match &mut wal {
            Some(wal) => wal,
            None => {
                let before = ReplayReport { last_epoch: burned, highest_epoch: burned, ..ReplayReport::default() };
                let first = commit.first.min(SeqNo(report.unneeded.0 + 1));
                let (fs, env, host) = (Arc::clone(fs), Arc::clone(env), Arc::clone(&host));
                let started = Wal::start(fs, dir, env, database_id, wal_options.clone(), host, &before, first)?;
                started.begin_first()?;
                wal.insert(started)
            }
        };
        append_behind_gap(wal, commit.first, &[commit]).map(|()| None)
    };
    let read = replay(Arc::clone(fs), dir, database_id, options, &mut append);
    let segments = match read.and_then(|_| finish(wal, report.last)) {
        Ok(segments) => segments,
        Err(error) => {
            for file in &*lock(&host.files) {
                let _left_to_the_next_open = fs.remove_file(&segment_path(dir, *file));
            }
            return Err(error);
        }
    };
    let old = report.segments.iter().map(|segment| segment.file);
    let last_epoch = segments.last().map_or(burned, |segment| segment.epoch);
    Ok(ReplayReport {
        last_epoch,
        highest_epoch: last_epoch,
        spares: report.spares.iter().copied().chain(old).collect(),
        segments,
        has_holes: false,
        ..report
    })
}

/// Makes the new segments durable, with a gap up to `last`.
fn finish(wal: Option<Wal>, last: SeqNo) -> Result<Vec<SegmentInfo>> {
    let Some(wal) = wal else { return Ok(Vec::new()) };
    append_behind_gap(&wal, SeqNo(last.0 + 1), &[])?;
    wal.sync(wal.appended(), true)?;
    wal.release_space();
    Ok(wal.segments())
}

/// Appends commits, and before them a gap up to `first`.
fn append_behind_gap(wal: &Wal, first: SeqNo, commits: &[LogCommit<'_>]) -> Result<()> {
    let frames: Vec<LogCommit<'_>> = gap(SeqNo(wal.appended().0 + 1), first).chain(commits.iter().copied()).collect();
    if frames.is_empty() { Ok(()) } else { wal.append(&frames) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vfs::env::TestEnv;
    use crate::vfs::fault::{Fault, FaultFs, FaultPlan, OpKind};
    use crate::vfs::mem::MemFs;
    use crate::wal::options::RecoveryMode;
    use crate::wal::testing::{DATABASE, Mini, dir, known, options, read};

    /// An attempt that ran out of space left segments, and the next attempt used their epochs again: each of the two
    /// looked like a copy of the other. What was left also took the space that the next attempt needed.
    #[test]
    fn failed_attempts_leave_no_files_or_epochs() {
        let faulty = FaultFs::new(Arc::new(MemFs::new()));
        let fs: Arc<dyn Fs> = Arc::new(faulty.clone());
        let mini = Mini::open(Arc::clone(&fs), options(4096, false), 1).unwrap();
        for n in 0..6 {
            mini.append(1, &[n; 3000]).unwrap();
        }
        mini.sync();
        drop(mini);
        let (wrote, report) = read(&fs, RecoveryMode::Strict).unwrap();
        let known = known(&fs).unwrap();
        let (next_epoch, next_file) =
            (Arc::new(AtomicU32::new(known.next as u32)), Arc::new(AtomicU64::new(known.next)));
        let env: Arc<dyn Env> = Arc::new(TestEnv::new(2));
        let replay_options = |live, log_end| ReplayOptions { live, log_end, ..ReplayOptions::default() };
        let attempt = || {
            let anew = Rewrite {
                options: replay_options(known.live.clone().into_iter().collect(), known.log_end),
                wal: options(4096, false),
                next_epoch: Arc::clone(&next_epoch),
                next_file: Arc::clone(&next_file),
            };
            rewrite(&fs, dir(), &env, DATABASE, anew, report.clone(), &|_| true)
        };
        let files = || fs.read_dir(dir()).unwrap().len();
        let (full, before) = (|| Fault::Error(std::io::ErrorKind::StorageFull), files());
        for can_remove in [true, false] {
            faulty.fail(FaultPlan::new(OpKind::Allocate, 5, full()).in_path(".wal"));
            if !can_remove {
                faulty.fail(FaultPlan::new(OpKind::RemoveFile, 1, full()).in_path(".wal").forever());
            }
            assert_eq!(attempt().unwrap_err().kind(), ErrorKind::OutOfSpace);
            assert_eq!(files() == before, can_remove, "removals succeed: {can_remove}");
            faulty.repair();
        }
        let anew = attempt().unwrap();
        let live = anew.segments.iter().map(|segment| (segment.epoch, segment.file)).collect();
        let mut found = Vec::new();
        let options = replay_options(live, Some(anew.log_end()));
        replay(Arc::clone(&fs), dir(), DATABASE, options, &mut |commit| {
            found.push((commit.first.0, commit.count, commit.payload.to_vec()));
            Ok(None)
        })
        .unwrap();
        assert_eq!(found, wrote);
    }
}
