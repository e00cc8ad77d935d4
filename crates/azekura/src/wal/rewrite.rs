//! Writes the log anew after a replay that passed over damage, so that every later replay, in every mode, finds what
//! this one found.
//!
//! The new segments hold the commits that were applied and are needed, and gaps for the numbers in between. They link
//! to no other segment: until the manifest lists them, which it must do in the edit that drops the old ones, they are
//! no part of the log.

use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::base::sync::lock;
use crate::base::version_edit::{FileNumber, WalEpoch};
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::vfs::{Env, Fs};
use crate::wal::batch_codec::seqno_gap_commits;
use crate::wal::format::segment_path;
use crate::wal::options::{WalCallbacks, WalCommit, WalOptions, WalReplayOptions, WalReplayReport, WalSegmentInfo};
use crate::wal::reader::replay;
use crate::wal::writer::Wal;

/// Numbers for segments that the manifest does not list yet.
struct RewriteSegmentAllocator {
    next_epoch: Arc<AtomicU32>,
    next_file: Arc<AtomicU64>,
    /// The files that were begun.
    created_files: Mutex<Vec<FileNumber>>,
}

impl WalCallbacks for RewriteSegmentAllocator {
    fn allocate_segment(&self) -> Result<(WalEpoch, FileNumber)> {
        let epoch = self.next_epoch.load(Ordering::Relaxed);
        let next = epoch.checked_add(1).ok_or_else(epochs_exhausted_error)?;
        self.next_epoch.store(next, Ordering::Relaxed);
        let file = FileNumber(self.next_file.fetch_add(1, Ordering::Relaxed));
        lock(&self.created_files).push(file);
        Ok((WalEpoch(epoch), file))
    }

    fn add_segment_to_manifest(&self, _epoch: WalEpoch, _file: FileNumber) -> Result<()> {
        Ok(())
    }

    fn sync_dependencies(&self) -> Result<()> {
        Ok(())
    }
}

fn epochs_exhausted_error() -> Error {
    Error::new(ErrorKind::Unsupported, "the database has used up its log epochs")
}

/// What a rewrite needs to know beside what the replay did.
pub(crate) struct WalRewriteOptions {
    pub(crate) options: WalReplayOptions,
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
pub(crate) fn rewrite_wal(
    fs: &Arc<dyn Fs>,
    dir: &Path,
    env: &Arc<dyn Env>,
    database_id: [u8; 16],
    rewrite: WalRewriteOptions,
    report: WalReplayReport,
    was_applied: &dyn Fn(SeqNo) -> bool,
) -> Result<WalReplayReport> {
    let WalRewriteOptions { options, wal: wal_options, next_epoch, next_file } = rewrite;
    // The manifest notes the end of the new log, which says that all of it is durable. Watermarks would say so before
    // the manifest does: after a salvage that was killed, a torn tail of the old log would look damaged.
    let wal_options = WalOptions { marks: false, ..wal_options };
    // An epoch that no segment has: what follows on it follows on none.
    let unused_epoch =
        WalEpoch(next_epoch.load(Ordering::Relaxed)).max(WalEpoch(report.highest_epoch.0.saturating_add(1)));
    next_epoch.store(unused_epoch.0.checked_add(1).ok_or_else(epochs_exhausted_error)?, Ordering::Relaxed);
    let host = Arc::new(RewriteSegmentAllocator { next_epoch, next_file, created_files: Mutex::default() });
    let mut wal: Option<Wal> = None;
    let mut append = |commit: WalCommit<'_>| {
        let last = commit.first_seqno.0 + u64::from(commit.seqno_count) - 1;
        let is_needed = last > report.flushed_through.0 && last <= report.last_seqno.0;
        if !is_needed || !was_applied(commit.first_seqno) {
            return Ok(None);
        }
        let wal = match &mut wal {
            Some(wal) => wal,
            None => {
                let before = WalReplayReport {
                    last_epoch: unused_epoch,
                    highest_epoch: unused_epoch,
                    ..WalReplayReport::default()
                };
                let first = commit.first_seqno.min(SeqNo(report.flushed_through.0 + 1));
                let (fs, env, host) = (Arc::clone(fs), Arc::clone(env), Arc::clone(&host));
                let started = Wal::start(fs, dir, env, database_id, wal_options.clone(), host, &before, first)?;
                started.start_first_segment()?;
                wal.insert(started)
            }
        };
        append_after_gap(wal, commit.first_seqno, &[commit]).map(|()| None)
    };
    let read = replay(Arc::clone(fs), dir, database_id, options, &mut append);
    let segments = match read.and_then(|_| finish_rewrite(wal, report.last_seqno)) {
        Ok(segments) => segments,
        Err(error) => {
            for file in &*lock(&host.created_files) {
                let _left_to_the_next_open = fs.remove_file(&segment_path(dir, *file));
            }
            return Err(error);
        }
    };
    let old = report.segments.iter().map(|segment| segment.file);
    let last_epoch = segments.last().map_or(unused_epoch, |segment| segment.epoch);
    Ok(WalReplayReport {
        last_epoch,
        highest_epoch: last_epoch,
        spare_files: report.spare_files.iter().copied().chain(old).collect(),
        segments,
        has_gaps: false,
        ..report
    })
}

/// Makes the new segments durable, with a gap up to `last`.
fn finish_rewrite(wal: Option<Wal>, last: SeqNo) -> Result<Vec<WalSegmentInfo>> {
    let Some(wal) = wal else { return Ok(Vec::new()) };
    append_after_gap(&wal, SeqNo(last.0 + 1), &[])?;
    wal.sync(wal.appended(), true)?;
    wal.release_space();
    Ok(wal.segments())
}

/// Appends commits, and before them a gap up to `first`.
fn append_after_gap(wal: &Wal, first: SeqNo, commits: &[WalCommit<'_>]) -> Result<()> {
    let frames: Vec<WalCommit<'_>> =
        seqno_gap_commits(SeqNo(wal.appended().0 + 1), first).chain(commits.iter().copied()).collect();
    if frames.is_empty() { Ok(()) } else { wal.append(&frames) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vfs::env::TestEnv;
    use crate::vfs::fault::{Fault, FaultFs, FaultPlan, OpKind};
    use crate::vfs::mem::MemFs;
    use crate::wal::options::RecoveryMode;
    use crate::wal::testing::{DATABASE, WalFixture, dir, load_manifest_state, replay_with_mode, wal_options};

    /// An attempt that ran out of space left segments, and the next attempt used their epochs again: each of the two
    /// looked like a copy of the other. What was left also took the space that the next attempt needed.
    #[test]
    fn failed_attempts_leave_no_files_or_epochs() {
        let faulty = FaultFs::new(Arc::new(MemFs::new()));
        let fs: Arc<dyn Fs> = Arc::new(faulty.clone());
        let mini = WalFixture::open(Arc::clone(&fs), wal_options(4096, false), 1).unwrap();
        for n in 0..6 {
            mini.append(1, &[n; 3000]).unwrap();
        }
        mini.sync();
        drop(mini);
        let (wrote, report) = replay_with_mode(&fs, RecoveryMode::Strict).unwrap();
        let known = load_manifest_state(&fs).unwrap();
        let (next_epoch, next_file) =
            (Arc::new(AtomicU32::new(known.next_id as u32)), Arc::new(AtomicU64::new(known.next_id)));
        let env: Arc<dyn Env> = Arc::new(TestEnv::new(2));
        let replay_options =
            |live, log_end| WalReplayOptions { listed_segments: live, wal_end: log_end, ..WalReplayOptions::default() };
        let attempt = || {
            let anew = WalRewriteOptions {
                options: replay_options(known.listed_segments.clone().into_iter().collect(), known.wal_end),
                wal: wal_options(4096, false),
                next_epoch: Arc::clone(&next_epoch),
                next_file: Arc::clone(&next_file),
            };
            rewrite_wal(&fs, dir(), &env, DATABASE, anew, report.clone(), &|_| true)
        };
        let files = || fs.read_dir(dir()).unwrap().len();
        let (full, before) = (|| Fault::Error(std::io::ErrorKind::StorageFull), files());
        for can_remove in [true, false] {
            faulty.inject(FaultPlan::new(OpKind::Allocate, 5, full()).in_path(".wal"));
            if !can_remove {
                faulty.inject(FaultPlan::new(OpKind::RemoveFile, 1, full()).in_path(".wal").forever());
            }
            assert_eq!(attempt().unwrap_err().kind(), ErrorKind::OutOfSpace);
            assert_eq!(files() == before, can_remove, "removals succeed: {can_remove}");
            faulty.clear_faults();
        }
        let anew = attempt().unwrap();
        let live = anew.segments.iter().map(|segment| (segment.epoch, segment.file)).collect();
        let mut found = Vec::new();
        let options = replay_options(live, Some(anew.wal_end()));
        replay(Arc::clone(&fs), dir(), DATABASE, options, &mut |commit| {
            found.push((commit.first_seqno.0, commit.seqno_count, commit.payload.to_vec()));
            Ok(None)
        })
        .unwrap();
        assert_eq!(found, wrote);
    }
}
