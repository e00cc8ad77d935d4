//! Who syncs, who waits, and whether to wait for more of them.

use crate::base::SeqNo;

/// The longest that a leader waits for company, in nanoseconds.
const GATHER_MAX_NS: u64 = 2_000_000;
/// Less than this is not worth it.
const GATHER_MIN_NS: u64 = 20_000;
/// Who syncs and who waits.
#[derive(Debug)]
pub(crate) struct SyncState {
    /// Whether some thread syncs or gathers.
    pub(super) leading: bool,
    /// Up to where the running sync reaches, once that is settled.
    pub(super) reaches: Option<SeqNo>,
    /// Callers that the next sync will serve.
    pub(super) joined: u32,
    /// Whether one of them wants all metadata synced.
    pub(super) want_all: bool,
    /// Up to here all metadata is synced too.
    pub(super) durable_all: SeqNo,
    /// Callers that the last two syncs served.
    pub(super) groups: [u32; 2],
    /// Groups for which company is still expected.
    pub(super) sociable: u32,
    /// Running average of a sync, in nanoseconds.
    pub(super) average_ns: u64,
}

impl SyncState {
    pub(super) fn new(durable: SeqNo) -> SyncState {
        SyncState {
            leading: false,
            reaches: None,
            joined: 0,
            want_all: false,
            durable_all: durable,
            groups: [0; 2],
            sociable: 0,
            average_ns: 0,
        }
    }

    /// How many callers to wait for, and for how many nanoseconds at most; pure.
    ///
    /// Writers that commit in a closed loop otherwise fall into two half groups that take turns, each waiting for the
    /// other's sync.
    pub(super) fn company(&self) -> Option<(u32, u64)> {
        let wanted = self.groups[0] + self.groups[1];
        let patience = (self.average_ns / 4).min(GATHER_MAX_NS);
        let worth_it = self.sociable > 0 && self.joined < wanted && patience >= GATHER_MIN_NS;
        worth_it.then_some((wanted, patience))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn company_is_awaited_only_where_threads_meet_and_a_sync_takes_time() {
        let mut state = SyncState::new(SeqNo::ZERO);
        (state.groups, state.joined, state.average_ns) = ([4, 4], 3, 1_000_000);
        assert_eq!(state.company(), None, "one thread alone");
        state.sociable = 1;
        assert_eq!(state.company(), Some((8, 250_000)));
        state.joined = 8;
        assert_eq!(state.company(), None, "everyone is here");
        (state.joined, state.average_ns) = (1, 60_000);
        assert_eq!(state.company(), None, "not worth it");
        state.average_ns = 1 << 40;
        assert_eq!(state.company(), Some((8, GATHER_MAX_NS)));
    }
}
