//! Retires segments that no partition needs any more, and recycles or removes their files once the manifest has dropped
//! them.

use crate::base::version_edit::WalEpoch;
use crate::base::{Result, SeqNo};
use crate::wal::format::segment_path;
use crate::wal::options::WalRetention;
use crate::wal::writer::{SealedWalSegment, Wal, WalWriterState};

/// Maximum number of spare files.
const SPARE_FILES_MAX: usize = 2;

impl Wal {
    /// Takes the sealed segments without a record above `flushed_through` off the list of live segments, and retires
    /// those that `retention` does not keep. Returns the epochs of all retired segments that are not recycled yet. The
    /// caller makes their retirement durable in the manifest and then calls [`Wal::recycle`]. `retention` is called
    /// under the lock of the list, so a reader that registers later finds out by [`Wal::has_retired_after`].
    ///
    /// # Errors
    /// `Poisoned` if a sync was needed and failed; no segment was retired.
    pub(crate) fn retire(
        &self,
        flushed_through: SeqNo,
        retention: impl FnOnce() -> WalRetention,
    ) -> Result<Vec<WalEpoch>> {
        let mut state = self.lock_writer();
        if state.retirable_segments(flushed_through) > 0 && !state.oldest_kept_start_is_durable(flushed_through) {
            // Power loss could remove the header of the new oldest segment. Then no durable record would state where
            // the WAL ends.
            drop(state);
            self.sync_exclusively(true)?;
            state = self.lock_writer();
        }
        let count = state.retirable_segments(flushed_through);
        let now = self.env.monotonic_ns();
        let unneeded: Vec<_> = state.sealed.drain(..count).map(|sealed| (sealed.info, now)).collect();
        state.retained.extend(unneeded);
        let surplus = retention().surplus(&state.retained);
        state.retire_oldest(surplus);
        self.check_invariants(&state);
        // Includes the segments whose earlier retirement could not be written: if the manifest lists such a segment
        // while its successors disappear, the WAL has a gap.
        Ok(state.retired.iter().map(|info| info.epoch).collect())
    }

    /// Retires all segments that are kept for readers of changes only, and returns the epochs of all retired segments,
    /// as [`Wal::retire`] does.
    pub(crate) fn retire_retained(&self) -> Vec<WalEpoch> {
        let mut state = self.lock_writer();
        let all = state.retained.len();
        state.retire_oldest(all);
        self.check_invariants(&state);
        state.retired.iter().map(|info| info.epoch).collect()
    }

    /// Recycles the files of retired segments: up to two become spare files, the others are removed.
    ///
    /// # Errors
    /// The first failure to remove a file. The other files are removed all the same, and the next open finds the
    /// remaining ones.
    pub(crate) fn recycle(&self, epochs: &[WalEpoch]) -> Result<()> {
        let mut surplus = Vec::new();
        let mut state = self.lock_writer();
        // A mapping would keep the space of a removed file.
        let sealed_mapping = state.sealed_mapping.take();
        debug_assert!(
            state.sealed.iter().all(|sealed| !epochs.contains(&sealed.info.epoch)),
            "a live segment is not recycled"
        );
        let (released, remaining) = state.retired.drain(..).partition(|info| epochs.contains(&info.epoch));
        state.retired = remaining;
        for info in Vec::from_iter::<Vec<_>>(released) {
            if state.spare_files.len() < SPARE_FILES_MAX && info.end_offset <= self.segment_size {
                state.spare_files.push(info.file);
            } else {
                surplus.push(info.file);
            }
        }
        while state.spare_files.len() > SPARE_FILES_MAX {
            surplus.extend(state.spare_files.pop());
        }
        self.check_invariants(&state);
        drop(state);
        drop(sealed_mapping);
        let mut result = Ok(());
        for file in surplus {
            result = result.and(self.fs.remove_file(&segment_path(&self.dir, file)));
        }
        result
    }

    /// Removes the spare files because their space is needed; false if there are none. The next open finds files that
    /// could not be removed.
    pub(crate) fn remove_spare_files(&self) -> bool {
        let spares = std::mem::take(&mut self.lock_writer().spare_files);
        for file in &spares {
            let _next_open_finds_it = self.fs.remove_file(&segment_path(&self.dir, *file));
        }
        !spares.is_empty()
    }

    /// Stops all writes, including the watermark of a running sync. A database calls this before it releases the lock
    /// of its directory.
    pub(crate) fn stop_writes(&self) {
        self.lock_writer().writes_stopped = true;
    }

    /// Releases space that later appends would use: the spare files, and the unused part of the active segment. Called
    /// before a database closes. The next open finds space that could not be released.
    pub(crate) fn release_space(&self) {
        let _kept = self.lock_writer().active.as_mut().map(|active| active.release_unused_space());
        self.remove_spare_files();
    }
}

impl WalWriterState {
    /// Retires this many of the segments that are kept for readers of changes.
    fn retire_oldest(&mut self, count: usize) {
        self.retired.extend(self.retained.drain(..count).map(|(info, _)| info));
        self.retired_through = self.retired.last().map_or(self.retired_through, |info| info.last_seqno);
    }

    /// How many of the oldest sealed segments can be retired. Segments are retired from the oldest on, so that the
    /// chain has no gap.
    fn retirable_segments(&self, flushed_through: SeqNo) -> usize {
        let is_retirable =
            |sealed: &&SealedWalSegment| sealed.info.last_seqno <= flushed_through && sealed.unsynced_file.is_none();
        self.sealed.iter().take_while(is_retirable).count()
    }

    /// Whether the start of the oldest kept segment is known after power loss: from the header of this segment, or, for
    /// the first segment since open, from the end of the WAL that the manifest recorded at open.
    fn oldest_kept_start_is_durable(&self, flushed_through: SeqNo) -> bool {
        match self.sealed.get(self.retirable_segments(flushed_through)) {
            Some(sealed) => sealed.unsynced_file.is_none(),
            None => self.segments_started == 1 || self.active.as_ref().is_some_and(|active| active.header_synced),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::base::SeqNo;
    use crate::testing::MemFs;
    use crate::testing::wal::wal_fixture::{WalFixture, dir, replay_with_mode, wal_options};
    use crate::wal::format::parse_segment_name;
    use crate::wal::options::RecoveryMode;

    fn segment_file_count(fixture: &WalFixture) -> usize {
        fixture.fs.read_dir(dir()).unwrap().iter().filter(|entry| parse_segment_name(&entry.name).is_some()).count()
    }

    #[test]
    fn retired_files_are_written_over_or_removed() {
        let fixture = WalFixture::open(Arc::new(MemFs::new()), wal_options(4096, true), 1).unwrap();
        for _ in 0..10 {
            fixture.append(1, &[1; 3000]).unwrap();
        }
        fixture.sync();
        assert_eq!((fixture.wal.segments().len(), segment_file_count(&fixture)), (10, 10));
        assert_eq!(fixture.retire(SeqNo(0)).unwrap(), 0);
        assert_eq!(fixture.retire(SeqNo(4)).unwrap(), 4, "only segments that are flushed completely");
        assert_eq!(
            (fixture.wal.segments()[0].first_seqno, segment_file_count(&fixture)),
            (SeqNo(5), 8),
            "two spares remain"
        );
        assert_eq!(fixture.retire(SeqNo(99)).unwrap(), 5, "never the active one");
        assert_eq!(segment_file_count(&fixture), 3);
        let (commits, report) = replay_with_mode(&fixture.fs, RecoveryMode::Strict).unwrap();
        assert_eq!((commits[0].0, commits.len(), report.spare_files.len()), (10, 1, 2));
        for _ in 0..2 {
            fixture.append(1, &[2; 3000]).unwrap();
        }
        assert_eq!(segment_file_count(&fixture), 3, "the spares are in use now");
        assert_eq!(
            replay_with_mode(&fixture.fs, RecoveryMode::Strict).unwrap().0.len(),
            3,
            "no record of an earlier incarnation remains"
        );
    }

    #[test]
    fn after_seal_everything_can_be_retired() {
        let fixture = WalFixture::open(Arc::new(MemFs::new()), wal_options(4096, false), 1).unwrap();
        fixture.wal.seal().unwrap();
        assert_eq!(fixture.wal.segments().len(), 1, "nothing to seal");
        fixture.append(3, b"x").unwrap();
        fixture.sync();
        fixture.wal.seal().unwrap();
        assert_eq!(fixture.retire(SeqNo(3)).unwrap(), 1);
        let (commits, report) = replay_with_mode(&fixture.fs, RecoveryMode::Strict).unwrap();
        assert_eq!((commits.len(), report.last_seqno), (0, SeqNo(3)));
        let again = WalFixture::open(Arc::clone(&fixture.fs), wal_options(4096, false), 2).unwrap();
        assert_eq!(again.append(1, b"y").unwrap().0, 4);
    }

    /// A small closed database must not use the space of a complete segment.
    #[test]
    fn append_continues_after_release_space() {
        for mapped in [false, true] {
            let fixture = WalFixture::open(Arc::new(MemFs::new()), wal_options(1 << 20, mapped), 1).unwrap();
            let length = |fixture: &WalFixture| {
                let files = fixture
                    .fs
                    .read_dir(dir())
                    .unwrap()
                    .into_iter()
                    .filter(|entry| parse_segment_name(&entry.name).is_some());
                files.map(|entry| entry.len).sum::<u64>()
            };
            for _ in 0..30 {
                fixture.append(1, &[1; 100_000]).unwrap();
            }
            fixture.sync();
            fixture.retire(SeqNo(99)).unwrap();
            assert_eq!(segment_file_count(&fixture), 3);
            let before = length(&fixture);
            fixture.wal.release_space();
            assert!(
                segment_file_count(&fixture) == 1 && length(&fixture) < before / 2,
                "{before} {}",
                length(&fixture)
            );
            // Appending continues, and so does a WAL that is opened again.
            for _ in 0..30 {
                fixture.append(1, &[2; 100_000]).unwrap();
            }
            fixture.sync();
            fixture.wal.seal().unwrap();
            fixture.retire(SeqNo(99)).unwrap();
            fixture.wal.release_space();
            assert_eq!((segment_file_count(&fixture), length(&fixture)), (1, 4096), "one page for the header");
            let again = WalFixture::open(Arc::clone(&fixture.fs), wal_options(1 << 20, mapped), 2).unwrap();
            assert_eq!(again.append(1, b"y").unwrap().0, 61);
            assert_eq!(replay_with_mode(&again.fs, RecoveryMode::Strict).unwrap().0.len(), 1);
        }
    }

    /// A close whose flush failed released the lock of the directory while a thread in `persist` was about to write a
    /// watermark. The next process could already use that segment for other frames.
    #[test]
    fn no_watermark_is_written_after_the_end() {
        let fixture = WalFixture::open(Arc::new(MemFs::new()), wal_options(4096, false), 1).unwrap();
        fixture.append(1, b"x").unwrap();
        let end = fixture.wal.segments()[0].end_offset;
        fixture.wal.stop_writes();
        fixture.sync();
        assert_eq!((fixture.wal.durable(), fixture.wal.segments()[0].end_offset), (SeqNo(1), end));
    }

    #[test]
    fn spare_file_is_created_after_first_rotation() {
        let fixture = WalFixture::open(Arc::new(MemFs::new()), wal_options(4096, false), 1).unwrap();
        fixture.append(1, &[1; 3000]).unwrap();
        assert!(!fixture.wal.sync_sealed(true).unwrap());
        fixture.append(1, &[1; 3000]).unwrap();
        assert!(fixture.wal.sync_sealed(true).unwrap());
        assert_eq!((fixture.wal.durable(), segment_file_count(&fixture)), (SeqNo(1), 3));
        assert!(!fixture.wal.sync_sealed(true).unwrap());
        fixture.append(1, &[1; 3000]).unwrap();
        assert_eq!(segment_file_count(&fixture), 3);
    }
}
