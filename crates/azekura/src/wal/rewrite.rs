//! Rewrites the write-ahead log (WAL) after a replay that skipped damage, so that every later replay, in every mode,
//! finds the same commits.
//!
//! The new segments contain the applied and still needed commits, and gaps for the sequence numbers in between. They
//! are linked to no other segment. They become part of the WAL only when the manifest lists them, which it must do in
//! the edit that drops the old segments.

use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::base::sync::lock;
use crate::base::version_edit::{FileNumber, WalEpoch};
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::vfs::{Env, Fs};
use crate::wal::format::{segment_path, seqno_gap_commits};
use crate::wal::options::{WalCallbacks, WalCommit, WalOptions, WalReplayOptions, WalReplayReport, WalSegmentInfo};
use crate::wal::reader::replay;
use crate::wal::writer::Wal;

/// Assigns epochs and file numbers to segments that the manifest does not list yet.
struct RewriteSegmentAllocator {
    next_epoch: Arc<AtomicU32>,
    next_file: Arc<AtomicU64>,
    /// The files for which a number was assigned.
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

    /// No other process reads the segments of a rewrite.
    fn end_wal_in_manifest(&self, _epoch: WalEpoch, _seqno: SeqNo) -> Result<()> {
        Ok(())
    }

    fn sync_dependencies(&self) -> Result<()> {
        Ok(())
    }
}

fn epochs_exhausted_error() -> Error {
    Error::new(ErrorKind::Unsupported, "the database has used up its log epochs")
}

/// Inputs of a rewrite that the report of the replay does not have.
pub(crate) struct WalRewriteOptions {
    pub(crate) options: WalReplayOptions,
    pub(crate) wal: WalOptions,
    /// The next epoch and the next file number: no segment has them or higher ones. A rewrite increases both, also if
    /// it fails, because a file that it cannot remove must not have the same epoch as a segment of the next rewrite.
    pub(crate) next_epoch: Arc<AtomicU32>,
    pub(crate) next_file: Arc<AtomicU64>,
}

/// Writes the commits of `report` into new segments, durably. Returns the report that a replay of the new segments
/// would return. `was_applied` returns for the first sequence number of a commit whether the commit was applied.
///
/// # Errors
/// Those of reading the WAL again, `OutOfSpace` and `Io`. The old WAL is unchanged, and the new segments are removed.
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
    // The manifest records the end of the new WAL, which states that all of it is durable. Watermarks would state this
    // before the manifest does: after a salvage that was killed, a torn tail of the old WAL would look damaged.
    let wal_options = WalOptions { marks: false, ..wal_options };
    // An epoch that no segment has, so that the first new segment has no predecessor.
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
    let read = read.and_then(|again| match again.last_seqno >= report.last_seqno {
        true => Ok(()),
        false => Err(Error::corruption("the log ended earlier when it was read again").in_file(dir)),
    });
    let segments = match read.and_then(|()| finish_rewrite(wal, report.last_seqno)) {
        Ok(segments) => segments,
        Err(error) => {
            for file in &*lock(&host.created_files) {
                let _next_open_finds_it = fs.remove_file(&segment_path(dir, *file));
            }
            return Err(error);
        }
    };
    debug_assert!(segments.iter().all(|segment| segment.epoch > unused_epoch), "the new segments have new epochs");
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

/// Adds a gap up to `last` and makes the new segments durable.
fn finish_rewrite(wal: Option<Wal>, last: SeqNo) -> Result<Vec<WalSegmentInfo>> {
    let Some(wal) = wal else { return Ok(Vec::new()) };
    append_after_gap(&wal, SeqNo(last.0 + 1), &[])?;
    debug_assert_eq!(wal.appended(), last, "the new segments end where the old ones do");
    wal.sync(wal.appended(), true)?;
    wal.release_space();
    Ok(wal.segments())
}

/// Appends a gap up to `first` and then the commits.
fn append_after_gap(wal: &Wal, first: SeqNo, commits: &[WalCommit<'_>]) -> Result<()> {
    debug_assert!(first > wal.appended(), "commits are appended in the order of their sequence numbers");
    let frames: Vec<WalCommit<'_>> =
        seqno_gap_commits(SeqNo(wal.appended().0 + 1), first).chain(commits.iter().copied()).collect();
    if frames.is_empty() { Ok(()) } else { wal.append(&frames) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::wal::wal_fixture::{
        DATABASE, WalFixture, dir, load_manifest_state, replay_from, replay_with_mode, wal_options,
        wal_with_flushed_damage,
    };
    use crate::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, TestEnv};
    use crate::wal::options::{PartitionSeqno, RecoveryMode};

    /// A rewrite that ran out of space left segments, and the next rewrite used their epochs again: each looked like a
    /// copy of the other. The remaining files also used the space that the next rewrite needed.
    #[test]
    fn failed_attempts_leave_no_files_or_epochs() {
        let faulty = FaultFs::new(Arc::new(MemFs::new()));
        let fs: Arc<dyn Fs> = Arc::new(faulty.clone());
        let fixture = WalFixture::open(Arc::clone(&fs), wal_options(4096, false), 1).unwrap();
        for n in 0..6 {
            fixture.append(1, &[n; 3000]).unwrap();
        }
        fixture.sync();
        drop(fixture);
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

    /// Regression: an I/O error while the log was read again ended the new log at damage in the flushed part. The next
    /// open lacked the synced commits behind it.
    #[test]
    fn failed_read_fails_the_rewrite() {
        for mode in [RecoveryMode::Strict, RecoveryMode::PointInTime, RecoveryMode::Salvage] {
            let mut failed = 0;
            for nth in 1.. {
                let faulty = FaultFs::new(Arc::new(MemFs::new()));
                let fs: Arc<dyn Fs> = Arc::new(faulty.clone());
                wal_with_flushed_damage(&fs);
                let (_, report) = replay_from(&fs, mode, SeqNo(3), u64::MAX).unwrap();
                let known = load_manifest_state(&fs).unwrap();
                let anew = WalRewriteOptions {
                    options: WalReplayOptions {
                        mode,
                        listed_segments: known.listed_segments.into_iter().collect(),
                        wal_end: known.wal_end,
                        flushed_through: SeqNo(3),
                        durable_through: PartitionSeqno { seqno: SeqNo(3), partition: "p".into() },
                        ..WalReplayOptions::default()
                    },
                    wal: wal_options(16 << 20, false),
                    next_epoch: Arc::new(AtomicU32::new(known.next_id as u32)),
                    next_file: Arc::new(AtomicU64::new(known.next_id)),
                };
                let env: Arc<dyn Env> = Arc::new(TestEnv::new(2));
                faulty.inject(FaultPlan::new(OpKind::Read, nth, Fault::Error(std::io::ErrorKind::Other)));
                let rewritten = rewrite_wal(&fs, dir(), &env, DATABASE, anew, report, &|_| true);
                if faulty.fault_count() == 0 {
                    break;
                }
                assert_eq!(rewritten.unwrap_err().kind(), ErrorKind::Io, "{mode:?}, read {nth}");
                failed += 1;
            }
            assert!(failed > 3, "{mode:?}: {failed} reads");
        }
    }
}
