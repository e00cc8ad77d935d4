//! Which stored commits a recovery of the database has lost. Later commits have their sequence numbers.

use std::borrow::Borrow;

use azekura::inspect::WalEnds;

use crate::layout::BackupManifest;

/// Epochs in which the database was stored, with the ends of the log that were known then. The last end is what was
/// stored.
pub(crate) struct History(Vec<(u32, WalEnds)>);

impl History {
    /// The epochs of backups.
    pub(crate) fn of<'m>(manifests: impl IntoIterator<Item = &'m BackupManifest>) -> History {
        let with_end = |of: &BackupManifest| WalEnds {
            known: of.wal_ends.iter().copied().chain([(u32::MAX, Some(of.sequence))]).collect(),
            forgotten: of.forgotten_ends,
        };
        History(manifests.into_iter().map(|of| (of.epoch(), with_end(of))).collect())
    }

    /// The epochs of log objects that are later than all of these, with the sequence numbers before them: the database
    /// may have ended there.
    pub(crate) fn of_later_logs(&self, logs: impl Iterator<Item = (u32, u64)>) -> History {
        let newest = self.0.iter().map(|(epoch, _)| *epoch).max();
        let later = logs.filter(|(epoch, _)| newest.is_none_or(|newest| *epoch > newest));
        let of_log = |after| WalEnds { known: vec![(u32::MAX, Some(after))], forgotten: None };
        History(later.map(|(epoch, after)| (epoch, of_log(after))).collect())
    }

    /// Whether commits up to `end`, which were stored in `epoch`, were lost: in a later epoch, the database ended
    /// before. Exact if at most 64 opens that followed commits are between the two. If more, and for manifests of an
    /// older version, those are found that end behind the later state, or behind the oldest end that it knows.
    pub(crate) fn has_lost(&self, epoch: u32, end: u64) -> bool {
        self.has_lost_before(epoch, end, u32::MAX)
    }

    /// As [`has_lost`](History::has_lost), if it is known that they were lost before the epoch `later`.
    pub(crate) fn has_lost_before(&self, epoch: u32, end: u64, later: u32) -> bool {
        self.kept_before(epoch, end, later) < end
    }

    /// The last of the commits up to `end`, which were stored in `epoch`, of which it is not known that they were lost
    /// before the epoch `later`.
    pub(crate) fn kept_before(&self, epoch: u32, end: u64, later: u32) -> u64 {
        let later_ends = self.0.iter().filter(|(of, _)| *of > epoch);
        let known = later_ends.filter_map(|(of, ends)| ends.first(epoch).map(|recorded| (*of, recorded)));
        let before = known.filter(|(of, (recorded, _))| (*of).min(recorded.saturating_add(1)) <= later);
        before.map(|(_, (_, valid))| valid.unwrap_or(0)).min().map_or(end, |valid| valid.min(end))
    }

    /// Whether it is known that commits up to `end`, which were stored in `epoch`, are in a later state.
    pub(crate) fn has_kept(&self, epoch: u32, end: u64) -> bool {
        self.kept_until(epoch, end) > epoch
    }

    /// The last epoch in which commits up to `end`, which were stored in `epoch`, are known to be in the database.
    pub(crate) fn kept_until(&self, epoch: u32, end: u64) -> u32 {
        let later = self.0.iter().filter(|(later, ends)| *later > epoch && ends.known.len() > 1);
        let known = later.filter(|(_, ends)| ends.knows_first(epoch));
        let has = known.filter(|(_, ends)| ends.first(epoch).is_some_and(|(_, valid)| valid >= Some(end)));
        has.map(|(later, _)| *later).max().unwrap_or(epoch)
    }
}

/// Sorts backups by their sequence numbers. Those with lost commits come first.
pub(crate) fn sort_backups<M: Borrow<(String, BackupManifest)>>(manifests: &mut [M]) {
    let history = History::of(manifests.iter().map(|of| &of.borrow().1));
    manifests.sort_by_cached_key(|of| {
        let (_, of) = of.borrow();
        (!history.has_lost(of.epoch(), of.sequence), of.sequence, of.epoch(), of.id.clone())
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: a manifest with few ends counted as one that has forgotten none, although the database had forgotten
    /// some and then lost commits, which removed others. Lost commits counted as kept.
    #[test]
    fn few_ends_may_follow_forgotten_ones() {
        let history = |forgotten| {
            let ends = WalEnds { known: vec![(80, Some(40)), (u32::MAX, Some(90))], forgotten };
            History(vec![(90, ends)])
        };
        for epoch in [1, 70, 71, 80] {
            assert!(history(None).has_kept(epoch, 40), "{epoch}");
            assert_eq!(history(Some(70)).has_kept(epoch, 40), epoch > 70, "{epoch}");
            assert!(!history(None).has_kept(epoch, 41) && history(Some(70)).has_lost(epoch, 41), "{epoch}");
        }
    }
}
