//! Picks the blob files of a blob GC: a pure function of plain values.

use crate::base::version_edit::FileNumber;
use crate::lsm::blob::map::BlobFileStats;

/// How stale a blob file is. Bytes are those of frames. Each count is a part of the one before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlobGarbageStats {
    pub(crate) id: FileNumber,
    /// Number of values.
    pub(crate) values: u64,
    pub(crate) bytes: u64,
    /// Bytes that tables refer to, which blob GC would copy.
    pub(crate) referenced_bytes: u64,
    /// The visible ones of these: the references that tables would have after compacting all of them.
    pub(crate) retained_values: u64,
    pub(crate) retained_bytes: u64,
    /// The bytes of these that a new reader can see. Older readers pin the others.
    pub(crate) live_bytes: u64,
}

impl BlobGarbageStats {
    /// Bytes that blob GC of this file would free.
    fn reclaimable(&self) -> u64 {
        self.bytes.saturating_sub(self.referenced_bytes)
    }

    /// Bytes that tables refer to and no reader can see.
    fn hidden(&self) -> u64 {
        self.referenced_bytes.saturating_sub(self.retained_bytes)
    }

    /// Bytes that no reader can see.
    pub(crate) fn stale(&self) -> u64 {
        self.bytes.saturating_sub(self.retained_bytes)
    }

    pub(crate) fn pinned(&self) -> u64 {
        self.retained_bytes.saturating_sub(self.live_bytes)
    }

    /// As if every value that tables refer to were visible to all readers.
    pub(crate) fn from_file_stats(uses: &BlobFileStats) -> BlobGarbageStats {
        let referenced = uses.referenced_bytes;
        BlobGarbageStats {
            id: uses.id,
            values: uses.values,
            bytes: uses.bytes,
            referenced_bytes: referenced,
            retained_values: uses.referenced_values,
            retained_bytes: referenced,
            live_bytes: referenced,
        }
    }

    /// The same if all of it were visible: without exact figures there is nothing to gain.
    pub(crate) fn assume_all_live(self) -> BlobGarbageStats {
        let (values, bytes) = (self.values, self.bytes);
        BlobGarbageStats {
            referenced_bytes: bytes,
            retained_values: values,
            retained_bytes: bytes,
            live_bytes: bytes,
            ..self
        }
    }

    /// The same if invisible references could not be removed.
    pub(crate) fn without_hidden(self) -> BlobGarbageStats {
        BlobGarbageStats { retained_bytes: self.referenced_bytes, ..self }
    }
}

/// The goal of a blob GC.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum BlobGcGoal {
    /// Maximum ratio of bytes, without pinned ones, to live bytes; at least 1.
    SpaceAmp(f64),
    /// No file has this share of stale bytes or more; 0 to 1.
    Staleness(f64),
    /// No file consists of stale values only.
    NoFullyStaleFile,
}

/// The next step of a blob GC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BlobGcStep {
    /// The goal is reached.
    Done,
    /// Tables refer to invisible values, and have to be compacted first.
    CompactTables,
    /// Copies the referenced values of these files and removes the files.
    RewriteFiles(Vec<FileNumber>),
}

pub(crate) fn next_blob_gc_step(files: &[BlobGarbageStats], goal: BlobGcGoal) -> BlobGcStep {
    match goal {
        BlobGcGoal::SpaceAmp(target) => files_for_space_amp(files, target),
        BlobGcGoal::Staleness(threshold) => {
            let share = |file: &BlobGarbageStats| file.stale() as f64 / file.bytes as f64;
            files_matching(files, |file| file.stale() > 0 && share(file) >= threshold)
        }
        BlobGcGoal::NoFullyStaleFile => files_matching(files, |file| file.retained_bytes == 0),
    }
}

/// Picks every file that is `wanted`.
fn files_matching(files: &[BlobGarbageStats], wanted: impl Fn(&BlobGarbageStats) -> bool) -> BlobGcStep {
    let chosen: Vec<&BlobGarbageStats> = files.iter().filter(|file| wanted(file)).collect();
    if chosen.is_empty() {
        return BlobGcStep::Done;
    }
    match chosen.iter().any(|file| file.hidden() > 0) {
        true => BlobGcStep::CompactTables,
        false => BlobGcStep::RewriteFiles(chosen.iter().map(|file| file.id).collect()),
    }
}

fn files_for_space_amp(files: &[BlobGarbageStats], target: f64) -> BlobGcStep {
    let sum = |of: fn(&BlobGarbageStats) -> u64| files.iter().map(of).sum::<u64>();
    let (total, pinned, live) = (sum(|file| file.bytes), sum(BlobGarbageStats::pinned), sum(|file| file.live_bytes));
    // Without live bytes no byte is allowed. An infinite target times 0 would not be a number.
    let allowed = if live == 0 { 0 } else { (target * live as f64) as u64 };
    let wanted = (total - pinned).saturating_sub(allowed);
    if wanted == 0 {
        return BlobGcStep::Done;
    }
    let known = sum(BlobGarbageStats::reclaimable);
    if known < wanted && sum(BlobGarbageStats::hidden) > 0 {
        return BlobGcStep::CompactTables;
    }
    match cheapest_files(files, wanted) {
        chosen if chosen.is_empty() => BlobGcStep::Done,
        chosen => BlobGcStep::RewriteFiles(chosen),
    }
}

/// Files that free `wanted` bytes, or all that free any: the files that free the most per copied byte, without those
/// that are not needed for the goal.
fn cheapest_files(files: &[BlobGarbageStats], wanted: u64) -> Vec<FileNumber> {
    let mut stale: Vec<&BlobGarbageStats> = files.iter().filter(|file| file.reclaimable() > 0).collect();
    let share = |file: &BlobGarbageStats| (u128::from(file.reclaimable()) << 64) / u128::from(file.bytes);
    stale.sort_by_key(|file| (std::cmp::Reverse(share(file)), file.id));
    let mut freed = 0;
    let enough = stale.iter().position(|file| {
        freed += file.reclaimable();
        freed >= wanted
    });
    stale.truncate(enough.map_or(stale.len(), |last| last + 1));
    stale.sort_by_key(|file| (std::cmp::Reverse(file.referenced_bytes), file.id));
    stale.retain(|file| {
        let dispensable = freed - file.reclaimable() >= wanted;
        freed -= if dispensable { file.reclaimable() } else { 0 };
        !dispensable
    });
    let mut chosen: Vec<FileNumber> = stale.iter().map(|file| file.id).collect();
    chosen.sort_unstable();
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes, referenced bytes, retained bytes, live bytes.
    fn file(id: u64, bytes: u64, referenced: u64, kept: u64, live: u64) -> BlobGarbageStats {
        let (values, kept_values) = (bytes / 10, kept / 10);
        let id = FileNumber(id);
        BlobGarbageStats {
            id,
            values,
            bytes,
            referenced_bytes: referenced,
            retained_values: kept_values,
            retained_bytes: kept,
            live_bytes: live,
        }
    }

    fn known(id: u64, bytes: u64, live: u64) -> BlobGarbageStats {
        file(id, bytes, live, live, live)
    }

    fn rewrite(ids: &[u64]) -> BlobGcStep {
        BlobGcStep::RewriteFiles(ids.iter().map(|&id| FileNumber(id)).collect())
    }

    #[test]
    fn picks_fewest_stalest_files() {
        let files = [known(1, 100, 90), known(2, 100, 20), known(3, 100, 50), known(4, 100, 100)];
        for (target, step) in [
            (2.0, BlobGcStep::Done),
            (1.54, BlobGcStep::Done),
            (1.5, rewrite(&[2])),
            (1.25, rewrite(&[2])),
            (1.2, rewrite(&[2, 3])),
            (1.0, rewrite(&[1, 2, 3])),
            (f64::INFINITY, BlobGcStep::Done),
        ] {
            assert_eq!(next_blob_gc_step(&files, BlobGcGoal::SpaceAmp(target)), step, "{target}");
        }
        // The second file frees enough alone, and the first one is only slightly staler.
        let files = [known(1, 10, 1), known(2, 1000, 200), known(3, 1000, 1000)];
        assert_eq!(
            next_blob_gc_step(&files, BlobGcGoal::SpaceAmp(1.0 + 9.0 / 1201.0)),
            rewrite(&[2]),
            "both are needed by a byte"
        );
        assert_eq!(
            next_blob_gc_step(&[known(1, 10, 1), known(2, 1000, 800)], BlobGcGoal::SpaceAmp(1.02)),
            rewrite(&[2])
        );
    }

    #[test]
    fn pinned_bytes_do_not_count_as_stale() {
        let files = [file(1, 100, 80, 80, 20), known(2, 100, 100)];
        assert_eq!(next_blob_gc_step(&files, BlobGcGoal::SpaceAmp(1.17)), BlobGcStep::Done, "140 of 120");
        assert_eq!(next_blob_gc_step(&files, BlobGcGoal::SpaceAmp(1.16)), rewrite(&[1]));
        let pinned = [file(1, 100, 100, 100, 0)];
        assert_eq!(next_blob_gc_step(&pinned, BlobGcGoal::SpaceAmp(1.0)), BlobGcStep::Done);
        assert_eq!(next_blob_gc_step(&pinned, BlobGcGoal::Staleness(0.5)), BlobGcStep::Done);
        assert_eq!(next_blob_gc_step(&pinned, BlobGcGoal::NoFullyStaleFile), BlobGcStep::Done);
    }

    #[test]
    fn compacts_only_when_hidden_bytes_block_goal() {
        let files = [known(1, 100, 10), file(2, 100, 100, 50, 50)];
        assert_eq!(
            next_blob_gc_step(&files, BlobGcGoal::SpaceAmp(2.0)),
            rewrite(&[1]),
            "the first file alone is enough"
        );
        assert_eq!(next_blob_gc_step(&files, BlobGcGoal::SpaceAmp(1.5)), BlobGcStep::CompactTables);
        assert_eq!(next_blob_gc_step(&files, BlobGcGoal::Staleness(0.8)), rewrite(&[1]));
        assert_eq!(next_blob_gc_step(&files, BlobGcGoal::Staleness(0.5)), BlobGcStep::CompactTables);
        assert_eq!(next_blob_gc_step(&files, BlobGcGoal::NoFullyStaleFile), BlobGcStep::Done);
        assert_eq!(
            next_blob_gc_step(&[file(1, 100, 100, 0, 0)], BlobGcGoal::NoFullyStaleFile),
            BlobGcStep::CompactTables
        );
        assert_eq!(next_blob_gc_step(&[file(1, 100, 0, 0, 0)], BlobGcGoal::NoFullyStaleFile), rewrite(&[1]));
        let without_hidden = files.map(BlobGarbageStats::without_hidden);
        assert_eq!(next_blob_gc_step(&without_hidden, BlobGcGoal::Staleness(0.5)), rewrite(&[1]));
    }

    #[test]
    fn thresholds_hold_at_their_ends() {
        let files = [known(1, 100, 0), known(2, 100, 30), known(3, 100, 100)];
        assert_eq!(next_blob_gc_step(&files, BlobGcGoal::Staleness(f64::from(0.7f32))), rewrite(&[1, 2]));
        assert_eq!(next_blob_gc_step(&files, BlobGcGoal::Staleness(1.0)), rewrite(&[1]));
        assert_eq!(
            next_blob_gc_step(&files, BlobGcGoal::Staleness(0.0)),
            rewrite(&[1, 2]),
            "the third file frees nothing"
        );
        assert_eq!(next_blob_gc_step(&[], BlobGcGoal::Staleness(0.0)), BlobGcStep::Done);
        assert_eq!(next_blob_gc_step(&[], BlobGcGoal::SpaceAmp(1.0)), BlobGcStep::Done);
        assert_eq!(
            next_blob_gc_step(&[known(1, 100, 0)], BlobGcGoal::SpaceAmp(50.0)),
            rewrite(&[1]),
            "nothing is live"
        );
    }
}
