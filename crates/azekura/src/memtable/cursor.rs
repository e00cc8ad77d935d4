//! Walking over a memtable.

use std::sync::Arc;

use crate::base::{EntryRef, KeyRef, Result};
use crate::cursor::Cursor;
use crate::memtable::memtable::Memtable;
use crate::memtable::tree::{Goal, LeafCopy};

/// How many entries ahead records are fetched into the cache.
const AHEAD: usize = 8;

/// A cursor over all versions of all keys. It walks over copies of leaves, so a writer never disturbs it: what was
/// inserted before a leaf was copied is there once, what comes later may be missing.
pub(crate) struct MemtableCursor {
    table: Arc<Memtable>,
    leaf: LeafCopy,
    /// Index in `leaf`; `None` = not valid.
    at: Option<usize>,
}

impl Memtable {
    /// A cursor over what is in now; what is inserted later may or may not appear.
    pub(crate) fn cursor(self: &Arc<Self>) -> MemtableCursor {
        MemtableCursor::new(Arc::clone(self))
    }
}

impl MemtableCursor {
    pub(crate) fn new(table: Arc<Memtable>) -> MemtableCursor {
        MemtableCursor { table, leaf: LeafCopy::new(), at: None }
    }

    fn go(&mut self, goal: Goal<'_>) {
        self.at = self.table.tree().seek(self.table.records(), goal, &mut self.leaf);
        if let (Some(at), Goal::AtOrBehind(_)) = (self.at, goal) {
            self.fetch(at, at + AHEAD);
        }
    }

    /// Asks for the records of entries `from..to` of the leaf, as far as it reaches.
    fn fetch(&self, from: usize, to: usize) {
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
        self.fetch(0, AHEAD);
    }
}

impl Cursor for MemtableCursor {
    fn seek_to_first(&mut self) -> Result<()> {
        self.at = self.table.tree().first(self.table.records(), &mut self.leaf).then_some(0);
        self.fetch(0, AHEAD);
        Ok(())
    }

    fn seek_to_last(&mut self) -> Result<()> {
        self.go(Goal::Last);
        Ok(())
    }

    fn seek(&mut self, target: KeyRef<'_>) -> Result<()> {
        self.go(Goal::AtOrBehind(target));
        Ok(())
    }

    fn seek_before(&mut self, target: KeyRef<'_>) -> Result<()> {
        self.go(Goal::Before(target));
        Ok(())
    }

    #[inline]
    fn next(&mut self) -> Result<()> {
        let next = self.at() + 1;
        if next < self.leaf.refs().len() {
            self.at = Some(next);
            self.fetch(next + AHEAD - 1, next + AHEAD);
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
                if let Some(ahead) = at.checked_sub(AHEAD) {
                    self.fetch(ahead, ahead + 1);
                }
            }
            None => {
                let table = Arc::clone(&self.table);
                let key = table.records().of_bits(self.leaf.refs()[0]).key();
                self.go(Goal::Before(key));
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
        self.table.records().of_bits(self.leaf.refs()[self.at()]).entry()
    }
}
