//! Appending: the hottest path of every write.

use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

use crate::base::{Error, Result, SeqNo};
use crate::record::frame::Place;
use crate::record::writer::{FrameWriter, Record, Sink};
use crate::wal::log::{Log, Wal};
use crate::wal::options::LogCommit;
use crate::wal::payload::{GAP, gap};

impl Wal {
    /// Appends commits as one group: afterwards they survive the death of the process, and power loss after
    /// [`Wal::sync`]. Their sequence numbers must follow on [`Wal::appended`]; the caller sees to the order.
    ///
    /// Begins a segment if the group does not fit the one being written, and waits for the sync of an earlier one only
    /// if two are unsynced.
    ///
    /// # Errors
    /// `OutOfSpace` and `Io` if there is no room: nothing was appended, and a later call may succeed. `Poisoned` after
    /// a failed write or sync, for ever. `Invalid` if the sequence numbers don't follow.
    pub(crate) fn append(&self, commits: &[LogCommit<'_>]) -> Result<()> {
        self.poison.check()?;
        let durable = if self.marks { self.durable() } else { SeqNo::ZERO };
        let mut log = self.log();
        let need = check(&log, commits, durable)?;
        if log.active().room() < need {
            log = self.make_room(log, need)?;
            // The log was let go of in between.
            check(&log, commits, durable)?;
        }
        // Who had the log before may have failed.
        self.poison.check()?;
        log.active().reserve(need)?;
        if let Err(error) = log.write(commits, durable) {
            // Frames of this group may be whole in the file already, with sequence numbers that a later group would use
            // again; a replay could not tell which were acknowledged. So nothing may follow in this segment, and unless
            // the disk was merely full, nothing at all.
            return Err(log.active().give_up(error).unwrap_or_else(|error| self.poison.set(error)));
        }
        self.appended.store(log.last().0, Ordering::Release);
        Ok(())
    }

    /// Appends one commit of one record under the number that `take` gives it while nobody else appends, so that the
    /// order of the log is that of the numbers; none if `take` has none. Numbers that were given out since and are not
    /// in the log, up to about `next`, are told by a frame before it.
    ///
    /// # Errors
    /// As [`Wal::append`]. Where `take` was called the number is used up all the same: the next commit tells of it.
    pub(crate) fn append_taking(
        &self,
        payload: &[u8],
        next: SeqNo,
        take: impl FnOnce() -> Option<SeqNo>,
    ) -> Result<Option<SeqNo>> {
        self.poison.check()?;
        let durable = self.durable();
        let mut log = self.log();
        // What they take is the longest for the highest numbers.
        let longest = LogCommit { first: SeqNo::MAX, count: u32::MAX, payload: GAP };
        let gaps = 1 + (next.0.saturating_sub(log.next.0) + 1) / u64::from(u32::MAX);
        let one = LogCommit { first: SeqNo::MAX, count: 1, payload };
        let need = log.writer.stored_len(&record(&one, SeqNo::ZERO));
        let need = need + gaps * log.writer.stored_len(&record(&longest, SeqNo::ZERO));
        if log.active().room() < need {
            log = self.make_room(log, need)?;
        }
        // Who had the log before may have failed.
        self.poison.check()?;
        log.active().reserve(need)?;
        let Some(first) = take() else { return Ok(None) };
        let commit = LogCommit { first, count: 1, payload };
        let written = if log.next == first {
            log.write(&[commit], durable)
        } else {
            let frames: Vec<_> = gap(log.next, first).chain([commit]).collect();
            log.write(&frames, durable)
        };
        if let Err(error) = written {
            // As in `append`.
            return Err(log.active().give_up(error).unwrap_or_else(|error| self.poison.set(error)));
        }
        self.appended.store(log.last().0, Ordering::Release);
        Ok(Some(first))
    }

    /// Begins a segment if the active one has no room for `need` bytes.
    #[cold]
    fn make_room<'a>(&'a self, mut log: MutexGuard<'a, Log>, need: u64) -> Result<MutexGuard<'a, Log>> {
        while log.active().room() < need {
            log = self.begin_when_allowed(log, need)?;
        }
        Ok(log)
    }

    /// Begins a segment, unless another thread was quicker; only once all sealed ones are synced, so that damage in any
    /// but the last two segments cannot be a torn tail.
    fn begin_when_allowed<'a>(&'a self, mut log: MutexGuard<'a, Log>, need: u64) -> Result<MutexGuard<'a, Log>> {
        let begun = log.begun;
        while log.sealed.iter().any(|sealed| sealed.unsynced.is_some()) {
            drop(log);
            self.sync_alone(false)?;
            log = self.log();
            if log.begun != begun {
                return Ok(log);
            }
        }
        self.poison.check()?;
        self.begin(&mut log, need)?;
        Ok(log)
    }

    /// Ends the active segment and begins the next, so that everything appended so far is in sealed segments; does
    /// nothing if the active one is empty.
    ///
    /// # Errors
    /// As [`Wal::append`].
    pub(crate) fn seal(&self) -> Result<()> {
        self.poison.check()?;
        let mut log = self.log();
        let last = log.last();
        if log.active().first > last {
            return Ok(());
        }
        self.begin_when_allowed(log, 0).map(drop)
    }

    /// Appends an unsynced note of how far the log is durable, if the active segment does not say so yet. It only helps
    /// to tell damage from a torn tail, so where there is no room, and on an error, it is left out.
    pub(super) fn note_durable(&self) {
        let durable = self.durable();
        let mut log = self.log();
        let len = FrameWriter::watermark_len_max();
        if !self.marks || log.ended || log.marked >= durable || self.poison.check().is_err() {
            return;
        }
        let fits = log.active().room() >= len && log.active().reserve(len).is_ok();
        if fits && log.write_watermark(durable).is_ok() {
            log.marked = durable;
        }
    }
}

/// Bytes that the group takes, if it follows on what was appended.
#[inline]
fn check(log: &Log, commits: &[LogCommit<'_>], durable: SeqNo) -> Result<u64> {
    let (mut need, mut next) = (0, log.next);
    for commit in commits {
        if commit.first != next || commit.count == 0 || SeqNo::MAX.0 - next.0 < u64::from(commit.count) {
            return Err(out_of_order(commit, next));
        }
        next = SeqNo(next.0 + u64::from(commit.count));
        need += log.writer.stored_len(&record(commit, durable));
    }
    Ok(need)
}

#[cold]
fn out_of_order(commit: &LogCommit<'_>, next: SeqNo) -> Error {
    let (first, count) = (commit.first, commit.count);
    Error::invalid(format!(
        "commit of {count} records from sequence number {first} on, but the log goes on with {next}"
    ))
}

#[inline]
fn record<'a>(commit: &LogCommit<'a>, durable: SeqNo) -> Record<'a> {
    Record { first: commit.first, count: commit.count, durable, payload: commit.payload }
}

impl Log {
    /// Writes a group for which there is room.
    #[inline]
    fn write(&mut self, commits: &[LogCommit<'_>], durable: SeqNo) -> Result<()> {
        let next = commits.last().map_or(self.next, |commit| SeqNo(commit.first.0 + u64::from(commit.count)));
        self.write_frames(|writer, place, sink| {
            commits.iter().try_for_each(|commit| writer.put(place, &record(commit, durable), sink))
        })?;
        self.commits += commits.len() as u64;
        (self.next, self.marked) = (next, self.marked.max(durable));
        Ok(())
    }

    fn write_watermark(&mut self, durable: SeqNo) -> Result<()> {
        let last = self.last();
        self.write_frames(|writer, place, sink| writer.put_watermark(place, last, durable, sink))
    }

    #[inline]
    fn write_frames(&mut self, put: impl FnOnce(&mut FrameWriter, &Place, &mut Sink<'_>) -> Result<()>) -> Result<()> {
        let active = self.active.as_mut().expect("the log begins a segment when it is started");
        let start = active.end;
        self.writer.begin(start);
        let mut sink = |bytes: &[u8], offset: u64| active.write(bytes, offset);
        put(&mut self.writer, &active.place, &mut sink)?;
        self.writer.flush(&mut sink)?;
        active.end = self.writer.position();
        self.bytes += active.end - start;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::sync::Arc;

    use crate::base::ErrorKind;
    use crate::vfs::Fs;
    use crate::vfs::fault::{Fault, FaultFs, FaultPlan, OpKind};
    use crate::vfs::mem::MemFs;
    use crate::wal::options::RecoveryMode;
    use crate::wal::testing::{Mini, options, overwrite, read};

    fn faulty(size: u64, mapped: bool) -> (FaultFs, Mini) {
        let fs = FaultFs::new(Arc::new(MemFs::new()));
        let mini = Mini::open(Arc::new(fs.clone()), options(size, mapped), 1).unwrap();
        (fs, mini)
    }

    fn full(op: OpKind) -> FaultPlan {
        FaultPlan::new(op, 1, Fault::Error(io::ErrorKind::StorageFull))
    }

    #[test]
    fn a_group_is_one_write_and_numbers_must_follow() {
        let (fs, mini) = faulty(1 << 20, false);
        let commit = |first: u64, count| LogCommit { first: SeqNo(first), count, payload: b"abc" };
        mini.wal.append(&[commit(1, 1)]).unwrap();
        let before = fs.count(OpKind::Write);
        mini.wal.append(&[commit(2, 3), commit(5, 1), commit(6, 2)]).unwrap();
        assert_eq!(fs.count(OpKind::Write), before + 1);
        mini.wal.append(&[]).unwrap();
        for bad in [vec![commit(9, 1)], vec![commit(7, 1)], vec![commit(8, 0)], vec![commit(8, 1), commit(10, 1)]] {
            assert_eq!(mini.wal.append(&bad).unwrap_err().kind(), ErrorKind::Invalid);
        }
        assert_eq!((mini.wal.appended(), mini.wal.durable()), (SeqNo(7), SeqNo(0)));
        let stats = mini.wal.stats();
        assert_eq!((stats.commits, stats.bytes), (4, 4 * 32));
        assert_eq!(read(&mini.fs, RecoveryMode::Strict).unwrap().0.len(), 4);
    }

    #[test]
    fn mapped_appends_write_nothing_through_the_file_and_survive_a_failed_populate() {
        let (fs, mini) = faulty(1 << 20, true);
        mini.append(1, &[1; 1000]).unwrap();
        let before = fs.count(OpKind::Write);
        for _ in 0..100 {
            mini.append(1, &[2; 1000]).unwrap();
        }
        assert_eq!(fs.count(OpKind::Write), before);
        fs.fail(full(OpKind::Populate));
        for _ in 0..600 {
            mini.append(1, &[3; 1000]).unwrap();
        }
        assert_eq!(fs.struck(), 1);
        assert!(fs.count(OpKind::Write) > before + 400, "the rest goes the other way");
        assert_eq!(read(&mini.fs, RecoveryMode::Strict).unwrap().0.len(), 701);
    }

    #[test]
    fn groups_larger_than_a_segment_get_one_of_their_size() {
        let (_, mini) = faulty(4096, true);
        for len in [0, 3000, 100_000, 1, 300_000, 40] {
            mini.append(1, &vec![7; len]).unwrap();
        }
        let (commits, report) = read(&mini.fs, RecoveryMode::Strict).unwrap();
        assert_eq!(
            commits.iter().map(|(.., payload)| payload.len()).collect::<Vec<_>>(),
            [0, 3000, 100_000, 1, 300_000, 40]
        );
        let found: Vec<SeqNo> = report.segments.iter().map(|info| info.last).collect();
        assert_eq!(found, mini.wal.segments().iter().map(|info| info.last).collect::<Vec<_>>());
        assert!(mini.wal.live_bytes() > 400_000);
    }

    #[test]
    fn a_full_disk_changes_nothing_and_writing_resumes() {
        for (op, mapped) in
            [(OpKind::Allocate, false), (OpKind::Allocate, true), (OpKind::Create, false), (OpKind::SyncDir, false)]
        {
            let (fs, mini) = faulty(128 << 10, mapped);
            let mut appended = 0u64;
            let mut refused = 0;
            for i in 0..400 {
                if i % 10 == 0 {
                    fs.fail(full(op).in_path(if op == OpKind::SyncDir { "/" } else { ".wal" }));
                }
                match mini.append(1, &[i as u8; 2000]) {
                    Ok(_) => appended += 1,
                    Err(e) => {
                        assert_eq!(e.kind(), ErrorKind::OutOfSpace, "{op:?}");
                        refused += 1;
                    }
                }
                assert_eq!(mini.wal.appended(), SeqNo(appended));
            }
            fs.repair();
            assert!(refused > 3, "{op:?} {refused}");
            assert_eq!(read(&mini.fs, RecoveryMode::Strict).unwrap().0.len() as u64, appended);
            mini.sync();
        }
    }

    #[test]
    fn a_full_manifest_changes_nothing_either() {
        let (fs, mini) = faulty(4096, false);
        mini.append(1, &[1; 2000]).unwrap();
        fs.fail(full(OpKind::Write).in_path("MANIFEST"));
        assert_eq!(mini.append(1, &[2; 3000]).unwrap_err().kind(), ErrorKind::OutOfSpace);
        mini.append(1, &[3; 3000]).unwrap();
        mini.sync();
        let (commits, report) = read(&mini.fs, RecoveryMode::Strict).unwrap();
        assert_eq!(commits.iter().map(|(.., payload)| payload[0]).collect::<Vec<_>>(), [1, 3]);
        assert_eq!((report.segments.len(), report.spares.len()), (2, 0));
    }

    #[test]
    fn a_failed_write_of_frames_or_of_a_header_poisons() {
        for what in [Fault::Short, Fault::Error(io::ErrorKind::Other)] {
            for seal in [false, true] {
                let (fs, mini) = faulty(1 << 20, false);
                mini.append(1, b"kept").unwrap();
                mini.sync();
                let nth = if seal { 2 } else { 1 }; // a fresh spare's header comes first, and may fail
                fs.fail(FaultPlan::new(OpKind::Write, nth, what).in_path(".wal"));
                let error = if seal { mini.wal.seal().unwrap_err() } else { mini.append(1, &[1; 600]).unwrap_err() };
                assert_eq!(error.kind(), ErrorKind::Poisoned);
                for result in [mini.append(1, b"x").map(drop), mini.wal.sync(SeqNo(1), false), mini.wal.seal()] {
                    assert_eq!(result.unwrap_err().kind(), ErrorKind::Poisoned);
                }
                assert_eq!(mini.wal.appended(), SeqNo(1));
            }
        }
    }

    #[test]
    fn frames_or_a_header_that_a_full_disk_refused_are_never_replayed() {
        for half_written in [false, true] {
            let full = |fs: &FaultFs, nth| {
                fs.fail(FaultPlan::new(OpKind::Write, nth, Fault::Error(io::ErrorKind::StorageFull)).in_path(".wal"));
            };
            let (fs, mini) = faulty(1 << 20, false);
            mini.append(1, b"kept").unwrap();
            if half_written {
                // What a write that ran out of space in the middle leaves: whole frames of the group.
                let place = mini.wal.log().active().place;
                let end = mini.wal.log().active().end;
                let mut writer = FrameWriter::new();
                writer.begin(end);
                let path = mini.path(0);
                let mut sink = |bytes: &[u8], offset: u64| {
                    overwrite(&mini.fs, &path, offset, bytes);
                    Ok(())
                };
                for first in 2..4 {
                    let record = Record { first: SeqNo(first), count: 1, durable: SeqNo::ZERO, payload: b"refused" };
                    writer.put(&place, &record, &mut sink).unwrap();
                }
                writer.flush(&mut sink).unwrap();
                assert_eq!(read(&mini.fs, RecoveryMode::Strict).unwrap().0.len(), 3);
            }
            full(&fs, 1);
            let first = mini.wal.appended().plus(1);
            let group: Vec<LogCommit<'_>> =
                (0..4).map(|i| LogCommit { first: SeqNo(first.0 + i), count: 1, payload: b"refused" }).collect();
            assert_eq!(mini.wal.append(&group).unwrap_err().kind(), ErrorKind::OutOfSpace);
            assert_eq!(read(&mini.fs, RecoveryMode::Strict).unwrap().0.len(), 1);
            // The header of the next segment is refused, too, then all is well.
            full(&fs, 2);
            assert_eq!(mini.append(1, b"again").unwrap_err().kind(), ErrorKind::OutOfSpace);
            mini.append(1, b"refuse2").unwrap();
            mini.sync();
            let (commits, report) = read(&mini.fs, RecoveryMode::Strict).unwrap();
            assert_eq!(commits, [(1, 1, b"kept".to_vec()), (2, 1, b"refuse2".to_vec())]);
            assert_eq!((report.segments.len(), report.dropped_after_damage), (2, None));
            assert_eq!(read(&mini.fs, RecoveryMode::Salvage).unwrap().0, commits);
        }
    }

    #[test]
    fn a_failed_note_of_the_durable_point_hurts_nobody() {
        let (fs, mini) = faulty(1 << 20, false);
        mini.append(1, b"one").unwrap();
        fs.fail(FaultPlan::new(OpKind::Write, 1, Fault::Short).in_path(".wal"));
        mini.sync();
        assert_eq!(fs.struck(), 1);
        mini.append(1, b"two").unwrap();
        mini.sync();
        assert_eq!(read(&mini.fs, RecoveryMode::Strict).unwrap().0.len(), 2);
    }

    #[test]
    fn a_third_segment_waits_for_the_sync_of_the_first() {
        let (_, mini) = faulty(4096, false);
        for i in 0..12 {
            mini.append(1, &[i; 1500]).unwrap();
            let segments = mini.wal.segments();
            if segments.len() > 2 {
                assert!(mini.wal.durable() >= segments[segments.len() - 3].last);
            }
        }
        assert!(mini.wal.segments().len() >= 6);
        let fs: Arc<dyn Fs> = Arc::clone(&mini.fs);
        assert_eq!(read(&fs, RecoveryMode::Strict).unwrap().0.len(), 12);
    }
}
