//! Which blob files to collect: a pure function of plain values.

use crate::base::edit::FileId;
use crate::lsm::blobs::map::BlobFileUse;

/// How stale a blob file is. Bytes are those of frames; each figure counts what the one before does, or less.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FileFigures {
    pub(crate) id: FileId,
    /// Values in it.
    pub(crate) values: u64,
    pub(crate) bytes: u64,
    /// Of those, what tables refer to: what a collection would copy.
    pub(crate) referenced_bytes: u64,
    /// Of those, what somebody can see: what tables would refer to after merging all of them.
    pub(crate) kept_values: u64,
    pub(crate) kept_bytes: u64,
    /// Of those, what a new reader can see; the rest is pinned by older ones.
    pub(crate) live_bytes: u64,
}

impl FileFigures {
    /// Bytes that a collection would win.
    fn known(&self) -> u64 {
        self.bytes.saturating_sub(self.referenced_bytes)
    }

    /// Bytes that tables refer to and nobody can see.
    fn hidden(&self) -> u64 {
        self.referenced_bytes.saturating_sub(self.kept_bytes)
    }

    /// Bytes that nobody can see.
    pub(crate) fn stale(&self) -> u64 {
        self.bytes.saturating_sub(self.kept_bytes)
    }

    pub(crate) fn pinned(&self) -> u64 {
        self.kept_bytes.saturating_sub(self.live_bytes)
    }

    /// As if all that tables refer to could be seen by everybody.
    pub(crate) fn of_use(uses: &BlobFileUse) -> FileFigures {
        let referenced = uses.referenced_bytes;
        FileFigures {
            id: uses.id,
            values: uses.values,
            bytes: uses.bytes,
            referenced_bytes: referenced,
            kept_values: uses.referenced_values,
            kept_bytes: referenced,
            live_bytes: referenced,
        }
    }

    /// The same if all of it could be seen by everybody: what nobody knows better has nothing to be won.
    pub(crate) fn as_if_live(self) -> FileFigures {
        let (values, bytes) = (self.values, self.bytes);
        FileFigures { referenced_bytes: bytes, kept_values: values, kept_bytes: bytes, live_bytes: bytes, ..self }
    }

    /// The same if what tables refer to and nobody can see could not be helped.
    pub(crate) fn without_hidden(self) -> FileFigures {
        FileFigures { kept_bytes: self.referenced_bytes, ..self }
    }
}

/// What shall be reached.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Goal {
    /// Bytes, without pinned ones, at most so many times the live ones; at least 1.
    SpaceAmp(f64),
    /// No file of whose bytes this share or more is stale; 0 to 1.
    Staleness(f64),
    /// No file that is stale as a whole.
    Dropped,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The goal is reached.
    Done,
    /// Tables refer to what nobody can see, and have to be merged first.
    Reveal,
    /// These files have to go; what tables refer to in them is copied.
    Rewrite(Vec<FileId>),
}

pub(crate) fn next_step(files: &[FileFigures], goal: Goal) -> Step {
    match goal {
        Goal::SpaceAmp(target) => towards(files, target),
        Goal::Staleness(threshold) => {
            let share = |file: &FileFigures| file.stale() as f64 / file.bytes as f64;
            all(files, |file| file.stale() > 0 && share(file) >= threshold)
        }
        Goal::Dropped => all(files, |file| file.kept_bytes == 0),
    }
}

/// Every file that is `wanted`.
fn all(files: &[FileFigures], wanted: impl Fn(&FileFigures) -> bool) -> Step {
    let chosen: Vec<&FileFigures> = files.iter().filter(|file| wanted(file)).collect();
    if chosen.is_empty() {
        return Step::Done;
    }
    match chosen.iter().any(|file| file.hidden() > 0) {
        true => Step::Reveal,
        false => Step::Rewrite(chosen.iter().map(|file| file.id).collect()),
    }
}

fn towards(files: &[FileFigures], target: f64) -> Step {
    let sum = |of: fn(&FileFigures) -> u64| files.iter().map(of).sum::<u64>();
    let (total, pinned, live) = (sum(|file| file.bytes), sum(FileFigures::pinned), sum(|file| file.live_bytes));
    // Without anything live, nothing is allowed; a target without bound times nothing would be no number.
    let allowed = if live == 0 { 0 } else { (target * live as f64) as u64 };
    let wanted = (total - pinned).saturating_sub(allowed);
    if wanted == 0 {
        return Step::Done;
    }
    let known = sum(FileFigures::known);
    if known < wanted && sum(FileFigures::hidden) > 0 {
        return Step::Reveal;
    }
    match cheapest(files, wanted) {
        chosen if chosen.is_empty() => Step::Done,
        chosen => Step::Rewrite(chosen),
    }
}

/// Files that win `wanted` bytes, or all that win any: those that win most for each byte copied, without those that
/// turn out to be dispensable.
fn cheapest(files: &[FileFigures], wanted: u64) -> Vec<FileId> {
    let mut stale: Vec<&FileFigures> = files.iter().filter(|file| file.known() > 0).collect();
    let share = |file: &FileFigures| (u128::from(file.known()) << 64) / u128::from(file.bytes);
    stale.sort_by_key(|file| (std::cmp::Reverse(share(file)), file.id));
    let mut won = 0;
    let enough = stale.iter().position(|file| {
        won += file.known();
        won >= wanted
    });
    stale.truncate(enough.map_or(stale.len(), |last| last + 1));
    stale.sort_by_key(|file| (std::cmp::Reverse(file.referenced_bytes), file.id));
    stale.retain(|file| {
        let dispensable = won - file.known() >= wanted;
        won -= if dispensable { file.known() } else { 0 };
        !dispensable
    });
    let mut chosen: Vec<FileId> = stale.iter().map(|file| file.id).collect();
    chosen.sort_unstable();
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes, referenced, kept, live.
    fn file(id: u64, bytes: u64, referenced: u64, kept: u64, live: u64) -> FileFigures {
        let (values, kept_values) = (bytes / 10, kept / 10);
        let id = FileId(id);
        FileFigures { id, values, bytes, referenced_bytes: referenced, kept_values, kept_bytes: kept, live_bytes: live }
    }

    fn known(id: u64, bytes: u64, live: u64) -> FileFigures {
        file(id, bytes, live, live, live)
    }

    fn rewrite(ids: &[u64]) -> Step {
        Step::Rewrite(ids.iter().map(|&id| FileId(id)).collect())
    }

    #[test]
    fn the_stalest_files_go_first_and_no_more_than_needed() {
        let files = [known(1, 100, 90), known(2, 100, 20), known(3, 100, 50), known(4, 100, 100)];
        for (target, step) in [
            (2.0, Step::Done),
            (1.54, Step::Done),
            (1.5, rewrite(&[2])),
            (1.25, rewrite(&[2])),
            (1.2, rewrite(&[2, 3])),
            (1.0, rewrite(&[1, 2, 3])),
            (f64::INFINITY, Step::Done),
        ] {
            assert_eq!(next_step(&files, Goal::SpaceAmp(target)), step, "{target}");
        }
        // The second wins enough alone, the first is only a little staler.
        let files = [known(1, 10, 1), known(2, 1000, 200), known(3, 1000, 1000)];
        assert_eq!(next_step(&files, Goal::SpaceAmp(1.0 + 9.0 / 1201.0)), rewrite(&[2]), "both are needed by a byte");
        assert_eq!(next_step(&[known(1, 10, 1), known(2, 1000, 800)], Goal::SpaceAmp(1.02)), rewrite(&[2]));
    }

    #[test]
    fn what_is_pinned_counts_for_nobody() {
        let files = [file(1, 100, 80, 80, 20), known(2, 100, 100)];
        assert_eq!(next_step(&files, Goal::SpaceAmp(1.17)), Step::Done, "140 of 120");
        assert_eq!(next_step(&files, Goal::SpaceAmp(1.16)), rewrite(&[1]));
        let pinned = [file(1, 100, 100, 100, 0)];
        assert_eq!(next_step(&pinned, Goal::SpaceAmp(1.0)), Step::Done);
        assert_eq!(next_step(&pinned, Goal::Staleness(0.5)), Step::Done);
        assert_eq!(next_step(&pinned, Goal::Dropped), Step::Done);
    }

    #[test]
    fn tables_are_merged_only_if_that_is_in_the_way() {
        let files = [known(1, 100, 10), file(2, 100, 100, 50, 50)];
        assert_eq!(next_step(&files, Goal::SpaceAmp(2.0)), rewrite(&[1]), "one will do without");
        assert_eq!(next_step(&files, Goal::SpaceAmp(1.5)), Step::Reveal);
        assert_eq!(next_step(&files, Goal::Staleness(0.8)), rewrite(&[1]));
        assert_eq!(next_step(&files, Goal::Staleness(0.5)), Step::Reveal);
        assert_eq!(next_step(&files, Goal::Dropped), Step::Done);
        assert_eq!(next_step(&[file(1, 100, 100, 0, 0)], Goal::Dropped), Step::Reveal);
        assert_eq!(next_step(&[file(1, 100, 0, 0, 0)], Goal::Dropped), rewrite(&[1]));
        let helpless = files.map(FileFigures::without_hidden);
        assert_eq!(next_step(&helpless, Goal::Staleness(0.5)), rewrite(&[1]));
    }

    #[test]
    fn thresholds_hold_at_their_ends() {
        let files = [known(1, 100, 0), known(2, 100, 30), known(3, 100, 100)];
        assert_eq!(next_step(&files, Goal::Staleness(f64::from(0.7f32))), rewrite(&[1, 2]));
        assert_eq!(next_step(&files, Goal::Staleness(1.0)), rewrite(&[1]));
        assert_eq!(next_step(&files, Goal::Staleness(0.0)), rewrite(&[1, 2]), "nothing is won by the third");
        assert_eq!(next_step(&[], Goal::Staleness(0.0)), Step::Done);
        assert_eq!(next_step(&[], Goal::SpaceAmp(1.0)), Step::Done);
        assert_eq!(next_step(&[known(1, 100, 0)], Goal::SpaceAmp(50.0)), rewrite(&[1]), "nothing is live");
    }
}
