//! The end of a segment's life: retired when nothing in it is needed, written over or removed when the manifest says so.

use crate::base::edit::Epoch;
use crate::base::{Result, SeqNo};
use crate::wal::format::segment_path;
use crate::wal::log::Wal;

/// Spare files that are kept.
const SPARES_MAX: usize = 2;

impl Wal {
    /// Takes the sealed segments that hold nothing above `flushed_through` off the live list. The caller makes their
    /// retirement durable in the manifest and then calls [`Wal::recycle`].
    pub(crate) fn retire(&self, flushed_through: SeqNo) -> Result<Vec<Epoch>> {
        let mut log = self.log();
        // Oldest first, and never around one that stays: the chain must not get a hole.
        let stays =
            |sealed: &crate::wal::log::SealedSegment| sealed.info.last > flushed_through || sealed.unsynced.is_some();
        let count = log.sealed.iter().position(stays).unwrap_or(log.sealed.len());
        let leaving: Vec<_> = log.sealed.drain(..count).map(|sealed| sealed.info).collect();
        log.retired.extend(&leaving);
        Ok(leaving.iter().map(|info| info.epoch).collect())
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
