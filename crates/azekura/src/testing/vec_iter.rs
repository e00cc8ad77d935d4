//! An iterator over entries in memory.

use std::cmp::Ordering;

use crate::base::{EntryRef, InternalKey, KeyOrder, RecordKind, Result, SeqNo};
use crate::iter::InternalIter;

/// User key, sequence number, kind and value.
pub(crate) type VecEntry = (Vec<u8>, SeqNo, RecordKind, Vec<u8>);

/// Iterates over a sorted vector, for tests of the iterators above it.
pub(crate) struct VecIter {
    pub(crate) entries: Vec<VecEntry>,
    order: KeyOrder,
    at: Option<usize>,
}

impl VecIter {
    pub(crate) fn new(order: KeyOrder, mut entries: Vec<VecEntry>) -> VecIter {
        entries.sort_by(|a, b| InternalKey::new(&a.0, a.1).cmp(&InternalKey::new(&b.0, b.1), &order));
        VecIter { entries, order, at: None }
    }

    fn lower_bound(&self, target: InternalKey<'_>) -> usize {
        self.entries.partition_point(|e| InternalKey::new(&e.0, e.1).cmp(&target, &self.order) == Ordering::Less)
    }
}

impl InternalIter for VecIter {
    fn seek_to_first(&mut self) -> Result<()> {
        self.at = (!self.entries.is_empty()).then_some(0);
        Ok(())
    }
    fn seek_to_last(&mut self) -> Result<()> {
        self.at = self.entries.len().checked_sub(1);
        Ok(())
    }
    fn seek(&mut self, target: InternalKey<'_>) -> Result<()> {
        let at = self.lower_bound(target);
        self.at = (at < self.entries.len()).then_some(at);
        Ok(())
    }
    fn seek_before(&mut self, target: InternalKey<'_>) -> Result<()> {
        self.at = self.lower_bound(target).checked_sub(1);
        Ok(())
    }
    fn next(&mut self) -> Result<()> {
        self.at = self.at.map(|at| at + 1).filter(|at| *at < self.entries.len());
        Ok(())
    }
    fn prev(&mut self) -> Result<()> {
        self.at = self.at.and_then(|at| at.checked_sub(1));
        Ok(())
    }
    fn valid(&self) -> bool {
        self.at.is_some()
    }
    fn entry(&self) -> EntryRef<'_> {
        let (user, seqno, kind, value) = &self.entries[self.at.expect("valid")];
        EntryRef { user_key: user, seqno: *seqno, kind: *kind, value }
    }
    /// Knows it for two of three entries.
    fn newest_version(&self) -> Option<(InternalKey<'_>, RecordKind)> {
        let before = &self.entries[self.at?.checked_sub(1)?];
        let begins_key = !self.order.keys_equal(&before.0, self.entry().user_key);
        (begins_key && self.at? % 3 != 0).then(|| (self.entry().key(), self.entry().kind))
    }
}
