//! Appending: the hottest path of every write.

use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

use crate::base::{Error, Result, SeqNo};
use crate::record::frame::Place;
use crate::record::writer::{FrameWriter, Record, Sink};
use crate::wal::log::{Log, Wal};
use crate::wal::options::LogCommit;

impl Wal {
    /// Appends commits as one group: afterwards they survive the death of the process, and power loss after
    /// [`Wal::sync`]. Their sequence numbers must follow on [`Wal::appended`]; the caller sees to the order.
    ///
    /// Begins a segment if the group does not fit the one being written, and waits for the sync of an earlier one only if
    /// two are unsynced.
    ///
    /// # Errors
    /// `OutOfSpace` and `Io` if there is no room: nothing was appended, and a later call may succeed. `Poisoned` after a
    /// failed write or sync, for ever. `Invalid` if the sequence numbers don't follow.
    pub(crate) fn append(&self, commits: &[LogCommit<'_>]) -> Result<()> {
        self.poison.check()?;
        let durable = self.durable();
        let mut log = self.log();
        let need = check(&log, commits, durable)?;
        if log.active().room() < need {
            log = self.make_room(log, need)?;
            // The log was let go of in between.
            check(&log, commits, durable)?;
        }
        log.active().reserve(need)?;
        log.write(commits, durable).map_err(|e| {
            // Frames of this group may be whole in the file already, with sequence numbers that a later group would use
            // again behind or around them; a replay could not tell which were acknowledged. So nothing may follow.
            self.poison.set(e)
        })?;
        self.appended.store(log.last().0, Ordering::Release);
        Ok(())
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
            self.sync_sealed_segments()?;
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
        if log.marked >= durable || self.poison.check().is_err() {
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
