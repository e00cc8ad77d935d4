//! Walking over a memtable.

use std::sync::Arc;

use crate::base::{EntryRef, InternalKey, Result};
use crate::iter::InternalIter;
use crate::memtable::memtable::Memtable;
use crate::memtable::tree::{MemtableLeafCopy, MemtableSeekTarget};

/// How many entries ahead records are fetched into the cache.
const PREFETCH_DISTANCE: usize = 8;

/// A cursor over all versions of all keys. It walks over copies of leaves, so a writer never disturbs it: what was
/// inserted before a leaf was copied is there once, what comes later may be missing.
pub(crate) struct MemtableIter {
    table: Arc<Memtable>,
    leaf: MemtableLeafCopy,
    /// Index in `leaf`; `None` = not valid.
    at: Option<usize>,
}

impl Memtable {
    /// A cursor over what is in now; what is inserted later may or may not appear.
    pub(crate) fn iter(self: &Arc<Self>) -> MemtableIter {
        MemtableIter::new(Arc::clone(self))
    }
}

impl MemtableIter {
    pub(crate) fn new(table: Arc<Memtable>) -> MemtableIter {
        MemtableIter { table, leaf: MemtableLeafCopy::new(), at: None }
    }

    fn seek_to(&mut self, goal: MemtableSeekTarget<'_>) {
        self.at = self.table.tree().seek(self.table.records(), goal, &mut self.leaf);
        if let (Some(at), MemtableSeekTarget::LowerBound(_)) = (self.at, goal) {
            self.prefetch(at, at + PREFETCH_DISTANCE);
        }
    }

    /// Asks for the records of entries `from..to` of the leaf, as far as it reaches.
    fn prefetch(&self, from: usize, to: usize) {
        for &bits in self.leaf.refs().iter().take(to).skip(from) {
            self.table.records().prefetch(bits);
        }
    }

    fn at(&self) -> usize {
        self.at.expect("a cursor is asked for entries and steps only where it is valid")
    }

    /// To the first entry of the leaf to the right. Copies never overlap, because a split is one store: a leaf is
    /// copied with all its entries and its old neighbour, or without those that moved and with the new one.
    #[cold]
    fn next_leaf(&mut self) {
        self.at = self.table.tree().right_of(self.table.records(), &mut self.leaf).then_some(0);
        self.prefetch(0, PREFETCH_DISTANCE);
    }
}

impl InternalIter for MemtableIter {
    fn seek_to_first(&mut self) -> Result<()> {
        self.at = self.table.tree().first(self.table.records(), &mut self.leaf).then_some(0);
        self.prefetch(0, PREFETCH_DISTANCE);
        Ok(())
    }

    fn seek_to_last(&mut self) -> Result<()> {
        self.seek_to(MemtableSeekTarget::Last);
        Ok(())
    }

    fn seek(&mut self, target: InternalKey<'_>) -> Result<()> {
        self.seek_to(MemtableSeekTarget::LowerBound(target));
        Ok(())
    }

    fn seek_before(&mut self, target: InternalKey<'_>) -> Result<()> {
        self.seek_to(MemtableSeekTarget::Before(target));
        Ok(())
    }

    #[inline]
    fn next(&mut self) -> Result<()> {
        let next = self.at() + 1;
        if next < self.leaf.refs().len() {
            self.at = Some(next);
            self.prefetch(next + PREFETCH_DISTANCE - 1, next + PREFETCH_DISTANCE);
        } else {
            self.next_leaf();
        }
        Ok(())
    }

    #[inline]
    fn prev(&mut self) -> Result<()> {
        match self.at().checked_sub(1) {
            Some(at) => {
                self.at = Some(at);
                if let Some(ahead) = at.checked_sub(PREFETCH_DISTANCE) {
                    self.prefetch(ahead, ahead + 1);
                }
            }
            None => {
                let table = Arc::clone(&self.table);
                let key = table.records().get_by_bits(self.leaf.refs()[0]).key();
                self.seek_to(MemtableSeekTarget::Before(key));
            }
        }
        Ok(())
    }

    #[inline]
    fn valid(&self) -> bool {
        self.at.is_some()
    }

    #[inline]
    fn entry(&self) -> EntryRef<'_> {
        self.table.records().get_by_bits(self.leaf.refs()[self.at()]).entry()
    }
}
