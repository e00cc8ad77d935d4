//! An iterator over a table. It holds an `Arc` of the table, and one data block at a time.

use std::sync::Arc;

use crate::base::shared_bytes::SharedBytes;
use crate::base::{EntryRef, InternalKey, RecordKind, Result, SeqNo};
use crate::block::{Block, BlockIter, BlockKind};
use crate::iter::InternalIter;
use crate::mem::epoch::Pin;
use crate::table::index::IndexIter;
use crate::table::reader::TableReader;
use crate::vfs::read_ahead::ReadAhead;

/// An iterator over the entries of a table.
pub(crate) struct TableIter {
    table: Arc<TableReader>,
    /// The sequence number of every entry, if the table was ingested.
    global_seqno: Option<SeqNo>,
    fill_cache: bool,
    index: IndexIter,
    data: Option<BlockIter>,
    read_ahead: ReadAhead,
    /// Kind of the current entry; `None` if the iterator is not valid.
    kind: Option<RecordKind>,
}

impl TableReader {
    /// Creates an iterator over all entries. With `fill_cache`, the blocks that it reads are inserted into the cache.
    /// A compaction does not set it: then the iterator reads ahead from its first read.
    pub(crate) fn iter(self: &Arc<Self>, fill_cache: bool) -> TableIter {
        TableIter::new(Arc::clone(self), fill_cache)
    }
}

impl TableIter {
    pub(crate) fn new(table: Arc<TableReader>, fill_cache: bool) -> TableIter {
        let read_ahead = if fill_cache { ReadAhead::adaptive() } else { ReadAhead::eager() };
        let (global_seqno, index) = (table.meta.global_seqno, IndexIter::new(fill_cache));
        TableIter { table, global_seqno, fill_cache, index, data: None, read_ahead, kind: None }
    }

    /// The position in the file that `target` has among the entries. The only entry of a user key in an ingested table
    /// is before the target if its sequence number is above that of the target.
    fn position_in_file<'k>(&self, target: InternalKey<'k>) -> InternalKey<'k> {
        match self.global_seqno {
            Some(global) if global > target.seqno => InternalKey::new(target.user_key, SeqNo::ZERO),
            Some(_) => InternalKey::before_versions_of(target.user_key),
            None => target,
        }
    }

    /// Loads the current data block of the index, and positions the block iterator with `position`.
    fn load_block(&mut self, position: impl FnOnce(&mut BlockIter) -> Result<()>) -> Result<()> {
        let Some((partition, at)) = self.index.position() else {
            self.data = None;
            return Ok(());
        };
        let fetcher = &self.table.fetcher;
        debug_assert!(at < partition.count(), "the index is at an entry of its partition");
        let block: Arc<Block> =
            fetcher.fetch_child_arc(partition, at, BlockKind::Data, self.fill_cache, Some(&mut self.read_ahead))?;
        let block_iter = match &mut self.data {
            Some(block_iter) => {
                block_iter.set_block(block);
                block_iter
            }
            None => self.data.insert(BlockIter::new(block)),
        };
        position(block_iter).map_err(|error| fetcher.with_entry_location(error, partition, at))
    }

    /// Key and kind of the current entry.
    #[inline]
    pub(crate) fn key_and_kind(&self) -> Option<(InternalKey<'_>, RecordKind)> {
        let InternalKey { user_key, seqno } = self.data.as_ref()?.key();
        Some((InternalKey::new(user_key, self.global_seqno.unwrap_or(seqno)), self.kind?))
    }

    fn is_past_block(&self) -> bool {
        self.data.as_ref().is_some_and(|data| !data.valid())
    }

    /// Moves to the following blocks until there is an entry.
    fn skip_forward(&mut self) -> Result<()> {
        while self.is_past_block() {
            self.index.next(&self.table.fetcher)?;
            self.load_block(BlockIter::seek_to_first)?;
            self.prefetch_next(|at| Some(at + 1));
        }
        Ok(())
    }

    /// Moves to the preceding blocks until there is an entry.
    fn skip_backward(&mut self) -> Result<()> {
        while self.is_past_block() {
            self.read_ahead.reset();
            self.index.prev(&self.table.fetcher)?;
            self.load_block(BlockIter::seek_to_last)?;
            self.prefetch_next(|at| at.checked_sub(1));
        }
        Ok(())
    }

    /// Prefetches the next block into the processor's caches, if it is in the block cache.
    fn prefetch_next(&self, next: impl FnOnce(usize) -> Option<usize>) {
        if let Some((partition, at)) = self.index.position()
            && let Some(next) = next(at)
            && let Some(block) = partition.peek(next, &Pin::new())
        {
            block.prefetch();
        }
    }

    /// Ends every movement. The iterator is valid only if the movement succeeded and the entry has a known kind.
    fn finish_move(&mut self, moved: Result<()>) -> Result<()> {
        self.kind = None;
        let kind = moved.and_then(|()| match &self.data {
            Some(data) if data.valid() => RecordKind::from_byte(data.tag()).map(Some),
            _ => Ok(None),
        });
        match kind {
            Ok(kind) => {
                debug_assert!(kind.is_none() || self.index.position().is_some(), "an entry is in a block of the index");
                self.kind = kind;
                Ok(())
            }
            Err(error) => {
                self.data = None;
                Err(error.in_file(self.table.fetcher.path()))
            }
        }
    }

    fn move_to_first(&mut self) -> Result<()> {
        self.read_ahead.reset();
        self.index.seek_to_first(&self.table.index, &self.table.fetcher)?;
        self.load_block(BlockIter::seek_to_first)
    }

    fn move_to_last(&mut self) -> Result<()> {
        self.read_ahead.reset();
        self.index.seek_to_last(&self.table.index, &self.table.fetcher)?;
        self.load_block(BlockIter::seek_to_last)
    }

    fn move_to(&mut self, target: InternalKey<'_>) -> Result<()> {
        let target = self.position_in_file(target);
        self.read_ahead.reset();
        let table = Arc::clone(&self.table);
        self.index.seek(&table.index, &table.fetcher, target, &table.order)?;
        self.load_block(|data| data.seek(target, &table.order))?;
        self.skip_forward()
    }

    fn move_before(&mut self, target: InternalKey<'_>) -> Result<()> {
        let target = self.position_in_file(target);
        self.read_ahead.reset();
        let table = Arc::clone(&self.table);
        self.index.seek(&table.index, &table.fetcher, target, &table.order)?;
        if self.index.position().is_none() {
            return self.move_to_last();
        }
        self.load_block(|data| data.seek_before(target, &table.order))?;
        self.skip_backward()
    }
}

impl InternalIter for TableIter {
    fn seek_to_first(&mut self) -> Result<()> {
        let moved = self.move_to_first();
        self.finish_move(moved)
    }

    fn seek_to_last(&mut self) -> Result<()> {
        let moved = self.move_to_last();
        self.finish_move(moved)
    }

    fn seek(&mut self, target: InternalKey<'_>) -> Result<()> {
        let moved = self.move_to(target);
        self.finish_move(moved)
    }

    fn seek_before(&mut self, target: InternalKey<'_>) -> Result<()> {
        let moved = self.move_before(target);
        self.finish_move(moved)
    }

    #[inline]
    fn next(&mut self) -> Result<()> {
        let mut moved = self.data.as_mut().map_or(Ok(()), BlockIter::next);
        if let (Ok(()), Some(data)) = (&moved, &self.data)
            && data.valid()
            && let Ok(kind) = RecordKind::from_byte(data.tag())
        {
            self.kind = Some(kind);
            return Ok(());
        }
        if moved.is_ok() && self.is_past_block() {
            moved = self.skip_forward();
        }
        self.finish_move(moved)
    }

    #[inline]
    fn prev(&mut self) -> Result<()> {
        let mut moved = self.data.as_mut().map_or(Ok(()), BlockIter::prev);
        if let (Ok(()), Some(data)) = (&moved, &self.data)
            && data.valid()
            && let Ok(kind) = RecordKind::from_byte(data.tag())
        {
            self.kind = Some(kind);
            return Ok(());
        }
        if moved.is_ok() && self.is_past_block() {
            moved = self.skip_backward();
        }
        self.finish_move(moved)
    }

    #[inline]
    fn valid(&self) -> bool {
        self.kind.is_some()
    }

    #[inline]
    fn entry(&self) -> EntryRef<'_> {
        self.current().expect("the iterator is valid")
    }

    #[inline(always)]
    fn current(&self) -> Option<EntryRef<'_>> {
        let (kind, data) = (self.kind?, self.data.as_ref()?);
        let InternalKey { user_key, seqno } = data.key();
        Some(EntryRef { user_key, seqno: self.global_seqno.unwrap_or(seqno), kind, value: data.value() })
    }

    #[inline]
    fn newest_version(&self) -> Option<(InternalKey<'_>, RecordKind)> {
        if self.data.as_ref()?.begins_key() { self.key_and_kind() } else { None }
    }

    fn shared_value(&self) -> Option<SharedBytes> {
        self.data.as_ref()?.shared_value()
    }
}
