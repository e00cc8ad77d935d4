//! The records that were added to a memtable last, in the order in which they were added. The validation of a commit
//! looks at those above its snapshot, which are few, instead of at all records of a range that it has read.
//!
//! A ring of references. The writer stores a reference first and counts it second. A reader that sees a reference
//! which has replaced an older one sees the count before it, too, and notices that it may have missed the older one.

use crate::base::SeqNo;
use crate::mem::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, SCHEDULE_EXPLORATION};

/// Number of records that are remembered. A power of two.
const RECENT_LEN: usize = if SCHEDULE_EXPLORATION { 4 } else { 512 };

/// The last records of a memtable. Thread safe: one writer at a time, readers never wait.
pub(in crate::memtable) struct RecentRecords {
    /// All records above this sequence number were pushed.
    complete_above: SeqNo,
    /// The bits of references to records, each at the number of its push modulo the length.
    refs: Box<[AtomicU32]>,
    pushed: AtomicU64,
    last_seqno: AtomicU64,
    /// Whether each record was above the one before it.
    is_ascending: AtomicBool,
}

impl RecentRecords {
    /// `complete_above`: the highest sequence number of a record that is not pushed.
    pub(in crate::memtable) fn new(complete_above: SeqNo) -> RecentRecords {
        RecentRecords {
            complete_above,
            refs: (0..RECENT_LEN).map(|_| AtomicU32::new(0)).collect(),
            pushed: AtomicU64::new(0),
            last_seqno: AtomicU64::new(complete_above.0),
            is_ascending: AtomicBool::new(true),
        }
    }

    /// Adds a record that readers find by its reference. Only one thread at a time may call this.
    pub(in crate::memtable) fn push(&self, bits: u32, seqno: SeqNo) {
        if seqno.0 <= self.last_seqno.load(Ordering::Relaxed) {
            self.is_ascending.store(false, Ordering::Release);
        }
        self.last_seqno.store(seqno.0, Ordering::Relaxed);
        let number = self.pushed.load(Ordering::Relaxed);
        self.refs[number as usize % RECENT_LEN].store(bits, Ordering::Release);
        self.pushed.store(number + 1, Ordering::Release);
    }

    /// Calls `visit` for each record above `since` that was pushed before the call, from the last one. Returns false if
    /// there may be such records that are not remembered.
    pub(in crate::memtable) fn visit_above(
        &self,
        since: SeqNo,
        seqno_of: impl Fn(u32) -> SeqNo,
        mut visit: impl FnMut(u32),
    ) -> bool {
        let pushed = self.pushed.load(Ordering::Acquire);
        let first_kept = pushed.saturating_sub(RECENT_LEN as u64);
        let mut first_read = pushed;
        let mut reaches_since = first_kept == 0;
        while first_read > first_kept {
            first_read -= 1;
            let bits = self.refs[first_read as usize % RECENT_LEN].load(Ordering::Acquire);
            if seqno_of(bits) <= since {
                reaches_since = true;
                break;
            }
            visit(bits);
        }
        let is_replaced =
            first_read < pushed && first_read + (RECENT_LEN as u64) <= self.pushed.load(Ordering::Acquire);
        self.complete_above <= since && reaches_since && !is_replaced && self.is_ascending.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::SeededRng;

    /// The records above `since`, if they are known. The bits of a reference are its sequence number here.
    fn above(recent: &RecentRecords, since: u64) -> Option<Vec<u64>> {
        let mut found = Vec::new();
        let is_complete =
            recent.visit_above(SeqNo(since), |bits| SeqNo(u64::from(bits)), |bits| found.push(u64::from(bits)));
        found.reverse();
        is_complete.then_some(found)
    }

    #[test]
    fn newer_records_are_found_or_unknown() {
        let mut rng = SeededRng::new(1);
        for first in [0u64, 100] {
            let (recent, mut all) = (RecentRecords::new(SeqNo(first)), Vec::new());
            for _ in 0..3 * RECENT_LEN as u64 {
                let seqno = all.last().unwrap_or(&first) + 1 + rng.below(3);
                recent.push(seqno as u32, SeqNo(seqno));
                all.push(seqno);
                let since = first.saturating_sub(5) + rng.below(seqno - first + 10);
                let newer = &all[all.partition_point(|seqno| *seqno <= since)..];
                let is_known = since >= first && newer.len() < RECENT_LEN - 1;
                match above(&recent, since) {
                    None => assert!(!is_known, "{} records above {since}", newer.len()),
                    Some(found) => assert_eq!(found, newer, "above {since}"),
                }
            }
        }
    }

    #[test]
    fn records_out_of_order_are_unknown() {
        let recent = RecentRecords::new(SeqNo(4));
        assert_eq!(above(&recent, 4), Some(vec![]));
        assert_eq!(above(&recent, 3), None, "records that were not pushed may be newer");
        recent.push(7, SeqNo(7));
        assert_eq!((above(&recent, 4), above(&recent, 7)), (Some(vec![7]), Some(vec![])));
        recent.push(6, SeqNo(6));
        assert_eq!(above(&recent, 4), None);
    }
}
