//! An iterator over one block, in both directions.

use std::ops::Range;
use std::sync::Arc;

use crate::base::shared_bytes::SharedBytes;
use crate::base::{Error, InternalKey, KeyOrder, Result, SeqNo};
use crate::block::block::Block;
use crate::block::restart_block::put_key;

/// Initial capacity of the key buffer in bytes, enough for most keys.
const KEY_LEN: usize = 64;

/// An iterator over the entries of a block. It owns the block. The key buffer is reused from block to block.
///
/// After an error the iterator is not valid.
pub(crate) struct BlockIter {
    block: Arc<Block>,
    key: Vec<u8>,
    seqno: SeqNo,
    tag: u8,
    value: Range<usize>,
    /// Offset of the entry in the block, and offset of the next entry.
    at: usize,
    next: usize,
    /// Index of the entry, in a fingerprint block.
    number: usize,
    valid: bool,
}

impl BlockIter {
    pub(crate) fn new(block: Arc<Block>) -> BlockIter {
        let (key, seqno) = (Vec::with_capacity(KEY_LEN), SeqNo::ZERO);
        BlockIter { block, key, seqno, tag: 0, value: 0..0, at: 0, next: 0, number: 0, valid: false }
    }

    /// Changes to another block. The iterator is not valid until a seek.
    pub(crate) fn set_block(&mut self, block: Arc<Block>) {
        self.block = block;
        self.valid = false;
    }

    #[inline]
    pub(crate) fn valid(&self) -> bool {
        self.valid
    }

    #[inline]
    pub(crate) fn key(&self) -> InternalKey<'_> {
        InternalKey::new(&self.key, self.seqno)
    }

    /// Whether the entry before the current one is known to have another key. False at the first entry of a block, for
    /// one in 256 other entries, and in blocks with restart points.
    #[inline]
    pub(crate) fn begins_key(&self) -> bool {
        match &*self.block {
            Block::Fingerprint(block) if self.valid && self.number > 0 => block.begins_key(self.number),
            _ => false,
        }
    }

    #[inline]
    pub(crate) fn tag(&self) -> u8 {
        debug_assert!(self.valid, "only a valid iterator has a tag");
        self.tag
    }

    #[inline]
    pub(crate) fn value(&self) -> &[u8] {
        debug_assert!(self.valid, "only a valid iterator has a value");
        self.block.bytes(self.value.clone())
    }

    /// The value without a copy, if it may keep the block alive: see [`Block::shared_value`].
    pub(crate) fn shared_value(&self) -> Option<SharedBytes> {
        self.block.shared_value(self.value(), || Arc::clone(&self.block))
    }

    pub(crate) fn seek_to_first(&mut self) -> Result<()> {
        match &*self.block {
            Block::Restart(_) => self.go_to_restart(0),
            Block::Fingerprint(_) => self.go_to_slot(0),
        }
    }

    pub(crate) fn seek_to_last(&mut self) -> Result<()> {
        let (last, end) = match &*self.block {
            Block::Restart(block) => (block.restarts() - 1, block.end()),
            Block::Fingerprint(block) => return self.go_to_slot(block.count() - 1),
        };
        self.go_to_restart(last)?;
        while self.next < end {
            self.step()?;
        }
        Ok(())
    }

    /// Moves to the first entry at or after `target`.
    pub(crate) fn seek(&mut self, target: InternalKey<'_>, order: &KeyOrder) -> Result<()> {
        self.valid = false;
        let block = match &*self.block {
            Block::Restart(block) => block,
            Block::Fingerprint(block) => {
                let before = block.entries_before(target, order)?;
                return if before < block.count() { self.go_to_slot(before) } else { Ok(()) };
            }
        };
        let before = block.restarts_before(target, order)?;
        if block.restarts() == block.count() {
            return if before < block.restarts() { self.go_to_restart(before) } else { Ok(()) };
        }
        self.go_to_restart(before.saturating_sub(1))?;
        while self.valid && self.key().cmp(&target, order).is_lt() {
            self.next()?;
        }
        Ok(())
    }

    /// Moves to the last entry before `target`.
    pub(crate) fn seek_before(&mut self, target: InternalKey<'_>, order: &KeyOrder) -> Result<()> {
        self.seek(target, order)?;
        if self.valid { self.prev() } else { self.seek_to_last() }
    }

    #[inline]
    pub(crate) fn next(&mut self) -> Result<()> {
        if !self.valid {
            return Ok(());
        }
        match &*self.block {
            Block::Restart(block) if self.next < block.end() => self.step(),
            Block::Fingerprint(block) if self.number + 1 < block.count() => {
                self.number += 1;
                self.step_slot(self.next)
            }
            _ => {
                self.valid = false;
                Ok(())
            }
        }
    }

    pub(crate) fn prev(&mut self) -> Result<()> {
        let here = self.at;
        if here == 0 || !self.valid {
            self.valid = false;
            return Ok(());
        }
        let block = match &*self.block {
            Block::Restart(block) => block,
            Block::Fingerprint(block) => {
                self.number -= 1; // only the first entry is at 0
                return self.step_slot(block.slot(self.number));
            }
        };
        let (mut low, mut high) = (0, block.restarts());
        while low < high {
            let middle = low + (high - low) / 2;
            if block.restart(middle) < here { low = middle + 1 } else { high = middle }
        }
        self.go_to_restart(low - 1)?; // the first restart is at 0, so at least one is before
        while self.next < here {
            self.step()?;
        }
        if self.next != here {
            self.valid = false;
            return Err(Error::corruption("entries of a block do not end where the next ones begin"));
        }
        Ok(())
    }

    fn go_to_restart(&mut self, i: usize) -> Result<()> {
        self.key.clear();
        if let Block::Restart(block) = &*self.block {
            self.next = block.restart(i);
        }
        self.step()
    }

    fn go_to_slot(&mut self, i: usize) -> Result<()> {
        let Block::Fingerprint(block) = &*self.block else { return Ok(()) };
        self.key.clear();
        self.key.extend_from_slice(block.prefix());
        self.number = i;
        self.step_slot(block.slot(i))
    }

    /// Reads the entry at `next`, in a block with restart points.
    fn step(&mut self) -> Result<()> {
        self.valid = false;
        let Block::Restart(block) = &*self.block else { return Ok(()) };
        let entry = block.parse(self.next)?;
        put_key(&mut self.key, &entry)?;
        self.seqno = entry.seqno;
        self.tag = entry.tag;
        self.value = entry.next - entry.value.len()..entry.next;
        self.at = self.next;
        self.next = entry.next;
        self.valid = true;
        Ok(())
    }

    /// Reads the `number`-th entry, which begins at `at`, in a fingerprint block. `key` already begins with the
    /// prefix.
    #[inline]
    fn step_slot(&mut self, at: usize) -> Result<()> {
        self.valid = false;
        let Block::Fingerprint(block) = &*self.block else { return Ok(()) };
        let end = block.end_of(self.number);
        let entry = block.entry_at(at, end)?;
        self.key.truncate(block.prefix_len());
        self.key.extend_from_slice(entry.rest);
        self.seqno = entry.seqno;
        self.tag = entry.tag;
        self.value = entry.value;
        self.at = at;
        self.next = end;
        self.valid = true;
        Ok(())
    }
}
