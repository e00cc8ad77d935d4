//! Who syncs, who waits, and whether to wait for more of them.

use crate::base::SeqNo;

/// The longest that a leader waits for company, in nanoseconds.
const BATCHING_WINDOW_MAX_NS: u64 = 2_000_000;
/// Less than this is not worth it.
const BATCHING_WINDOW_MIN_NS: u64 = 20_000;
/// Who syncs and who waits.
#[derive(Debug)]
pub(crate) struct SyncState {
    /// Whether some thread syncs or gathers.
    pub(super) has_leader: bool,
    /// Up to where the running sync reaches, once that is settled.
    pub(super) sync_target: Option<SeqNo>,
    /// Callers that the next sync will serve.
    pub(super) waiters: u32,
    /// Whether one of them wants all metadata synced.
    pub(super) wants_metadata: bool,
    /// Up to here all metadata is synced too.
    pub(super) durable_with_metadata: SeqNo,
    /// Callers that the last two syncs served.
    pub(super) last_group_sizes: [u32; 2],
    /// Groups for which company is still expected.
    pub(super) batching_groups_left: u32,
    /// Running average of a sync, in nanoseconds.
    pub(super) average_sync_ns: u64,
}

impl SyncState {
    pub(super) fn new(durable: SeqNo) -> SyncState {
        SyncState {
            has_leader: false,
            sync_target: None,
            waiters: 0,
            wants_metadata: false,
            durable_with_metadata: durable,
            last_group_sizes: [0; 2],
            batching_groups_left: 0,
            average_sync_ns: 0,
        }
    }

    /// How many callers to wait for, and for how many nanoseconds at most; pure.
    ///
    /// Writers that commit in a closed loop otherwise fall into two half groups that take turns, each waiting for the
    /// other's sync.
    pub(super) fn batching_window(&self) -> Option<(u32, u64)> {
        let wanted = self.last_group_sizes[0] + self.last_group_sizes[1];
        let patience = (self.average_sync_ns / 4).min(BATCHING_WINDOW_MAX_NS);
        let worth_it = self.batching_groups_left > 0 && self.waiters < wanted && patience >= BATCHING_WINDOW_MIN_NS;
        worth_it.then_some((wanted, patience))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batching_window_opens_for_concurrent_writers() {
        let mut state = SyncState::new(SeqNo::ZERO);
        (state.last_group_sizes, state.waiters, state.average_sync_ns) = ([4, 4], 3, 1_000_000);
        assert_eq!(state.batching_window(), None, "one thread alone");
        state.batching_groups_left = 1;
        assert_eq!(state.batching_window(), Some((8, 250_000)));
        state.waiters = 8;
        assert_eq!(state.batching_window(), None, "everyone is here");
        (state.waiters, state.average_sync_ns) = (1, 60_000);
        assert_eq!(state.batching_window(), None, "not worth it");
        state.average_sync_ns = 1 << 40;
        assert_eq!(state.batching_window(), Some((8, BATCHING_WINDOW_MAX_NS)));
    }
}
