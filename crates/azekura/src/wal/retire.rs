//! The end of a segment's life: retired when nothing in it is needed, written over or removed when the manifest says
//! so.

use crate::base::edit::Epoch;
use crate::base::{Result, SeqNo};
use crate::wal::format::segment_path;
use crate::wal::log::{Log, SealedSegment, Wal};

/// Spare files that are kept.
const SPARES_MAX: usize = 2;

impl Wal {
    /// Takes the sealed segments that hold nothing above `flushed_through` off the live list, and tells all that are
    /// off it and not recycled. The caller makes their retirement durable in the manifest and then calls
    /// [`Wal::recycle`].
    ///
    /// # Errors
    /// `Poisoned` if a sync was needed and failed; nothing was retired.
    pub(crate) fn retire(&self, flushed_through: SeqNo) -> Result<Vec<Epoch>> {
        let mut log = self.log();
        if log.retirable(flushed_through) > 0 && !log.next_is_anchored(flushed_through) {
            // Power loss could take the header of the new oldest segment; then nothing would say any more where the log
            // ends.
            drop(log);
            self.sync_alone(true)?;
            log = self.log();
        }
        let count = log.retirable(flushed_through);
        let leaving: Vec<_> = log.sealed.drain(..count).map(|sealed| sealed.info).collect();
        log.retired.extend(&leaving);
        // Those whose retirement could not be written the last time are told again: one that the manifest goes on to
        // list while its successors vanish would be a hole in the log.
        Ok(log.retired.iter().map(|info| info.epoch).collect())
    }

    /// Frees the files of retired segments: up to two are kept to be written over, the others removed.
    ///
    /// # Errors
    /// The first failure to remove a file; all others are still tried, and what is left over is found at the next open.
    pub(crate) fn recycle(&self, epochs: &[Epoch]) -> Result<()> {
        let mut surplus = Vec::new();
        let mut log = self.log();
        let (gone, kept) = log.retired.drain(..).partition(|info| epochs.contains(&info.epoch));
        log.retired = kept;
        for info in Vec::from_iter::<Vec<_>>(gone) {
            if log.spares.len() < SPARES_MAX && info.end <= self.segment_size {
                log.spares.push(info.file);
            } else {
                surplus.push(info.file);
            }
        }
        while log.spares.len() > SPARES_MAX {
            surplus.extend(log.spares.pop());
        }
        drop(log);
        let mut result = Ok(());
        for file in surplus {
            result = result.and(self.fs.remove_file(&segment_path(&self.dir, file)));
        }
        result
    }
}

impl Wal {
    /// Removes the spare files, because their space is needed; false if there were none. What cannot be removed is
    /// found by the next open.
    pub(crate) fn drop_spares(&self) -> bool {
        let spares = std::mem::take(&mut self.log().spares);
        for file in &spares {
            let _found_by_the_next_open = self.fs.remove_file(&segment_path(&self.dir, *file));
        }
        !spares.is_empty()
    }

    /// Writes nothing any more, not even the watermark of a sync that is under way: a database gives its directory free
    /// after this.
    pub(crate) fn end(&self) {
        self.log().ended = true;
    }

    /// Gives back the space that is kept for what comes, for a database that is about to close: the spare files, and
    /// the rest of the active segment. What cannot be given back is found by the next open.
    pub(crate) fn release_space(&self) {
        let _kept = self.log().active.as_mut().map(|active| active.trim());
        self.drop_spares();
    }
}

impl Log {
    /// How many segments can go: oldest first, and never around one that stays, so that the chain gets no hole.
    fn retirable(&self, flushed_through: SeqNo) -> usize {
        let goes = |sealed: &&SealedSegment| sealed.info.last <= flushed_through && sealed.unsynced.is_none();
        self.sealed.iter().take_while(goes).count()
    }

    /// Whether the start of the oldest segment that stays is known after power loss too: from its own header, or, for
    /// the first that was begun, from the end of the log that the manifest notes when the database is opened.
    fn next_is_anchored(&self, flushed_through: SeqNo) -> bool {
        match self.sealed.get(self.retirable(flushed_through)) {
            Some(sealed) => sealed.unsynced.is_none(),
            None => self.begun == 1 || self.active.as_ref().is_some_and(|active| active.header_synced),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::base::SeqNo;
    use crate::vfs::mem::MemFs;
    use crate::wal::format::parse_name;
    use crate::wal::options::RecoveryMode;
    use crate::wal::testing::{Mini, dir, options, read};

    fn files(mini: &Mini) -> usize {
        mini.fs.read_dir(dir()).unwrap().iter().filter(|entry| parse_name(&entry.name).is_some()).count()
    }

    #[test]
    fn retired_files_are_written_over_or_removed() {
        let mini = Mini::open(Arc::new(MemFs::new()), options(4096, true), 1).unwrap();
        for _ in 0..10 {
            mini.append(1, &[1; 3000]).unwrap();
        }
        mini.sync();
        assert_eq!((mini.wal.segments().len(), files(&mini)), (10, 10));
        assert_eq!(mini.retire(SeqNo(0)).unwrap(), 0);
        assert_eq!(mini.retire(SeqNo(4)).unwrap(), 4, "only what is flushed as a whole");
        assert_eq!((mini.wal.segments()[0].first, files(&mini)), (SeqNo(5), 8), "two spares are kept");
        assert_eq!(mini.retire(SeqNo(99)).unwrap(), 5, "never the active one");
        assert_eq!(files(&mini), 3);
        let (commits, report) = read(&mini.fs, RecoveryMode::Strict).unwrap();
        assert_eq!((commits[0].0, commits.len(), report.spares.len()), (10, 1, 2));
        for _ in 0..2 {
            mini.append(1, &[2; 3000]).unwrap();
        }
        assert_eq!(files(&mini), 3, "the spares are in use now");
        assert_eq!(read(&mini.fs, RecoveryMode::Strict).unwrap().0.len(), 3, "nothing of their old lives is left");
    }

    #[test]
    fn after_seal_everything_can_be_retired() {
        let mini = Mini::open(Arc::new(MemFs::new()), options(4096, false), 1).unwrap();
        mini.wal.seal().unwrap();
        assert_eq!(mini.wal.segments().len(), 1, "nothing to seal");
        mini.append(3, b"x").unwrap();
        mini.sync();
        mini.wal.seal().unwrap();
        assert_eq!(mini.retire(SeqNo(3)).unwrap(), 1);
        let (commits, report) = read(&mini.fs, RecoveryMode::Strict).unwrap();
        assert_eq!((commits.len(), report.last), (0, SeqNo(3)));
        let again = Mini::open(Arc::clone(&mini.fs), options(4096, false), 2).unwrap();
        assert_eq!(again.append(1, b"y").unwrap().0, 4);
    }

    /// A small database that is closed shall not take the space of a whole segment.
    #[test]
    fn what_is_kept_for_more_is_given_back_and_the_log_goes_on() {
        for mapped in [false, true] {
            let mini = Mini::open(Arc::new(MemFs::new()), options(1 << 20, mapped), 1).unwrap();
            let length = |mini: &Mini| {
                let files =
                    mini.fs.read_dir(dir()).unwrap().into_iter().filter(|entry| parse_name(&entry.name).is_some());
                files.map(|entry| entry.len).sum::<u64>()
            };
            for _ in 0..30 {
                mini.append(1, &[1; 100_000]).unwrap();
            }
            mini.sync();
            mini.retire(SeqNo(99)).unwrap();
            assert_eq!(files(&mini), 3);
            let before = length(&mini);
            mini.wal.release_space();
            assert!(files(&mini) == 1 && length(&mini) < before / 2, "{before} {}", length(&mini));
            // Appending goes on where it was, as does a log that is opened again.
            for _ in 0..30 {
                mini.append(1, &[2; 100_000]).unwrap();
            }
            mini.sync();
            mini.wal.seal().unwrap();
            mini.retire(SeqNo(99)).unwrap();
            mini.wal.release_space();
            assert_eq!((files(&mini), length(&mini)), (1, 4096), "one page for the header");
            let again = Mini::open(Arc::clone(&mini.fs), options(1 << 20, mapped), 2).unwrap();
            assert_eq!(again.append(1, b"y").unwrap().0, 61);
            assert_eq!(read(&again.fs, RecoveryMode::Strict).unwrap().0.len(), 1);
        }
    }

    /// A close whose flush failed gave the directory free while a thread in `persist` was about to write a watermark:
    /// into a segment that the next process may have begun to use for other frames.
    #[test]
    fn no_watermark_is_written_after_the_end() {
        let mini = Mini::open(Arc::new(MemFs::new()), options(4096, false), 1).unwrap();
        mini.append(1, b"x").unwrap();
        let end = mini.wal.segments()[0].end;
        mini.wal.end();
        mini.sync();
        assert_eq!((mini.wal.durable(), mini.wal.segments()[0].end), (SeqNo(1), end));
    }

    #[test]
    fn a_worker_keeps_a_spare_ready_once_the_log_has_rotated() {
        let mini = Mini::open(Arc::new(MemFs::new()), options(4096, false), 1).unwrap();
        mini.append(1, &[1; 3000]).unwrap();
        assert!(!mini.wal.sync_sealed(true).unwrap());
        mini.append(1, &[1; 3000]).unwrap();
        assert!(mini.wal.sync_sealed(true).unwrap());
        assert_eq!((mini.wal.durable(), files(&mini)), (SeqNo(1), 3));
        assert!(!mini.wal.sync_sealed(true).unwrap());
        mini.append(1, &[1; 3000]).unwrap();
        assert_eq!(files(&mini), 3);
    }
}
