//! Sequence numbers: the order of every write in the database.

use std::fmt;

/// The position of one record in the history of the database, 0..2^56.
///
/// The first record ever written has 1; 0 belongs to records that are older than every reader (a bottom
/// compaction sets it) and to an empty history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SeqNo(pub(crate) u64);

impl SeqNo {
    /// Older than every record that can still be told from its neighbours.
    pub(crate) const ZERO: SeqNo = SeqNo(0);
    /// The largest that fits the formats (56 bits); seeking with it finds the newest version of a key.
    pub(crate) const MAX: SeqNo = SeqNo((1 << 56) - 1);

    /// The number `n` later.
    #[must_use]
    pub(crate) fn plus(self, n: u64) -> SeqNo {
        debug_assert!(self.0 + n <= SeqNo::MAX.0, "sequence numbers are used up");
        SeqNo(self.0 + n)
    }
}

impl fmt::Display for SeqNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
