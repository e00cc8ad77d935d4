//! A cursor over one block, in both directions.

use std::ops::Range;
use std::sync::Arc;

use crate::base::{Error, KeyOrder, KeyRef, Result, SeqNo};
use crate::block::block::{Block, put_key};

/// A position in a block; it owns its block and keeps its key buffer from block to block.
///
/// An error leaves it not valid.
pub(crate) struct BlockCursor {
    block: Arc<Block>,
    key: Vec<u8>,
    seqno: SeqNo,
    tag: u8,
    value: Range<usize>,
    /// Where the entry begins, and where the next one does.
    at: usize,
    next: usize,
    valid: bool,
}

impl BlockCursor {
    pub(crate) fn new(block: Arc<Block>) -> BlockCursor {
        BlockCursor { block, key: Vec::new(), seqno: SeqNo::ZERO, tag: 0, value: 0..0, at: 0, next: 0, valid: false }
    }

    /// Changes to another block; not valid until a seek.
    pub(crate) fn set_block(&mut self, block: Arc<Block>) {
        self.block = block;
        self.valid = false;
    }

    pub(crate) fn valid(&self) -> bool {
        self.valid
    }

    pub(crate) fn key(&self) -> KeyRef<'_> {
        KeyRef::new(&self.key, self.seqno)
    }

    pub(crate) fn tag(&self) -> u8 {
        self.tag
    }

    pub(crate) fn value(&self) -> &[u8] {
        self.block.bytes(self.value.clone())
    }

    pub(crate) fn seek_to_first(&mut self) -> Result<()> {
        self.go_to_restart(0)
    }

    pub(crate) fn seek_to_last(&mut self) -> Result<()> {
        self.go_to_restart(self.block.restarts() - 1)?;
        while self.next < self.block.end() {
            self.step()?;
        }
        Ok(())
    }

    /// To the first entry at or behind `target`.
    pub(crate) fn seek(&mut self, target: KeyRef<'_>, order: &KeyOrder) -> Result<()> {
        self.valid = false;
        let before = self.block.restarts_before(target, order)?;
        if self.block.restarts() == self.block.count() {
            return if before < self.block.restarts() { self.go_to_restart(before) } else { Ok(()) };
        }
        self.go_to_restart(before.saturating_sub(1))?;
        while self.valid && self.key().cmp(&target, order).is_lt() {
            self.next()?;
        }
        Ok(())
    }

    /// To the last entry strictly before `target`.
    pub(crate) fn seek_before(&mut self, target: KeyRef<'_>, order: &KeyOrder) -> Result<()> {
        self.seek(target, order)?;
        if self.valid { self.prev() } else { self.seek_to_last() }
    }

    pub(crate) fn next(&mut self) -> Result<()> {
        if self.next < self.block.end() {
            return self.step();
        }
        self.valid = false;
        Ok(())
    }

    pub(crate) fn prev(&mut self) -> Result<()> {
        let here = self.at;
        if here == 0 {
            self.valid = false;
            return Ok(());
        }
        let (mut low, mut high) = (0, self.block.restarts());
        while low < high {
            let middle = low + (high - low) / 2;
            if self.block.restart(middle) < here { low = middle + 1 } else { high = middle }
        }
        self.go_to_restart(low - 1)?; // the first restart is at 0, so at least one lies before
        while self.next < here {
            self.step()?;
        }
        if self.next != here {
            self.valid = false;
            return Err(Error::corruption("entries of a block do not end where its restarts begin"));
        }
        Ok(())
    }

    fn go_to_restart(&mut self, i: usize) -> Result<()> {
        self.key.clear();
        self.next = self.block.restart(i);
        self.step()
    }

    /// Reads the entry at `next`.
    fn step(&mut self) -> Result<()> {
        self.valid = false;
        let entry = self.block.parse(self.next)?;
        put_key(&mut self.key, &entry)?;
        self.seqno = entry.seqno;
        self.tag = entry.tag;
        self.value = entry.next - entry.value.len()..entry.next;
        self.at = self.next;
        self.next = entry.next;
        self.valid = true;
        Ok(())
    }
}
