//! A cursor over a table; it owns what it walks, and holds one data block at a time.

use std::sync::Arc;

use crate::base::part::Part;
use crate::base::{EntryRef, KeyRef, RecordKind, Result};
use crate::block::{Block, BlockCursor, BlockKind};
use crate::cursor::Cursor;
use crate::mem::epoch::Pin;
use crate::table::index::IndexCursor;
use crate::table::reader::Table;
use crate::vfs::ahead::ReadAhead;

/// A position in a table.
pub(crate) struct TableCursor {
    table: Arc<Table>,
    fill_cache: bool,
    index: IndexCursor,
    data: Option<BlockCursor>,
    ahead: ReadAhead,
    /// Of the entry it stands on; `None` where it stands on none.
    kind: Option<RecordKind>,
}

impl Table {
    /// A cursor over all entries. `fill_cache` puts the blocks that it reads into the cache; a compaction does not, and
    /// reads ahead from the start.
    pub(crate) fn cursor(self: &Arc<Self>, fill_cache: bool) -> TableCursor {
        TableCursor::new(Arc::clone(self), fill_cache)
    }
}

impl TableCursor {
    pub(crate) fn new(table: Arc<Table>, fill_cache: bool) -> TableCursor {
        let ahead = if fill_cache { ReadAhead::adaptive() } else { ReadAhead::eager() };
        TableCursor { table, fill_cache, index: IndexCursor::new(fill_cache), data: None, ahead, kind: None }
    }

    /// Loads the data block that the index stands on and takes a position in it.
    fn load(&mut self, place: impl FnOnce(&mut BlockCursor) -> Result<()>) -> Result<()> {
        let Some((piece, at)) = self.index.place() else {
            self.data = None;
            return Ok(());
        };
        let source = &self.table.source;
        let block: Arc<Block> = source.keep(piece, at, BlockKind::Data, self.fill_cache, Some(&mut self.ahead))?;
        let cursor = match &mut self.data {
            Some(cursor) => {
                cursor.set_block(block);
                cursor
            }
            None => self.data.insert(BlockCursor::new(block)),
        };
        place(cursor).map_err(|error| source.locate_entry(error, piece, at))
    }

    /// Key and kind of the entry it stands on.
    #[inline]
    pub(crate) fn head(&self) -> Option<(KeyRef<'_>, RecordKind)> {
        Some((self.data.as_ref()?.key(), self.kind?))
    }

    fn off_the_block(&self) -> bool {
        self.data.as_ref().is_some_and(|data| !data.valid())
    }

    /// On to the blocks behind until there is an entry.
    fn go_on(&mut self) -> Result<()> {
        while self.off_the_block() {
            self.index.next(&self.table.source)?;
            self.load(BlockCursor::seek_to_first)?;
            self.expect(|at| Some(at + 1));
        }
        Ok(())
    }

    /// Back to the blocks before until there is an entry.
    fn go_back(&mut self) -> Result<()> {
        while self.off_the_block() {
            self.ahead.jump();
            self.index.prev(&self.table.source)?;
            self.load(BlockCursor::seek_to_last)?;
            self.expect(|at| at.checked_sub(1));
        }
        Ok(())
    }

    /// Has the next block come nearer, if it is in the cache, while this one is walked over.
    fn expect(&self, next: impl FnOnce(usize) -> Option<usize>) {
        if let Some((piece, at)) = self.index.place()
            && let Some(next) = next(at)
            && let Some(block) = piece.peek(next, &Pin::new())
        {
            block.prefetch();
        }
    }

    /// Ends every movement: an entry is shown only if it is of a kind that is known, and nothing is after an error.
    fn settle(&mut self, moved: Result<()>) -> Result<()> {
        self.kind = None;
        let settled = moved.and_then(|()| match &self.data {
            Some(data) if data.valid() => RecordKind::from_byte(data.tag()).map(Some),
            _ => Ok(None),
        });
        match settled {
            Ok(kind) => {
                self.kind = kind;
                Ok(())
            }
            Err(error) => {
                self.data = None;
                Err(error.in_file(self.table.source.path()))
            }
        }
    }

    fn go_first(&mut self) -> Result<()> {
        self.ahead.jump();
        self.index.seek_to_first(&self.table.index, &self.table.source)?;
        self.load(BlockCursor::seek_to_first)
    }

    fn go_last(&mut self) -> Result<()> {
        self.ahead.jump();
        self.index.seek_to_last(&self.table.index, &self.table.source)?;
        self.load(BlockCursor::seek_to_last)
    }

    fn go(&mut self, target: KeyRef<'_>) -> Result<()> {
        self.ahead.jump();
        let table = Arc::clone(&self.table);
        self.index.seek(&table.index, &table.source, target, &table.order)?;
        self.load(|data| data.seek(target, &table.order))?;
        self.go_on()
    }

    fn go_before(&mut self, target: KeyRef<'_>) -> Result<()> {
        self.ahead.jump();
        let table = Arc::clone(&self.table);
        self.index.seek(&table.index, &table.source, target, &table.order)?;
        if self.index.place().is_none() {
            return self.go_last();
        }
        self.load(|data| data.seek_before(target, &table.order))?;
        self.go_back()
    }
}

impl Cursor for TableCursor {
    fn seek_to_first(&mut self) -> Result<()> {
        let moved = self.go_first();
        self.settle(moved)
    }

    fn seek_to_last(&mut self) -> Result<()> {
        let moved = self.go_last();
        self.settle(moved)
    }

    fn seek(&mut self, target: KeyRef<'_>) -> Result<()> {
        let moved = self.go(target);
        self.settle(moved)
    }

    fn seek_before(&mut self, target: KeyRef<'_>) -> Result<()> {
        let moved = self.go_before(target);
        self.settle(moved)
    }

    #[inline]
    fn next(&mut self) -> Result<()> {
        let mut moved = self.data.as_mut().map_or(Ok(()), BlockCursor::next);
        if let (Ok(()), Some(data)) = (&moved, &self.data)
            && data.valid()
            && let Ok(kind) = RecordKind::from_byte(data.tag())
        {
            self.kind = Some(kind);
            return Ok(());
        }
        if moved.is_ok() && self.off_the_block() {
            moved = self.go_on();
        }
        self.settle(moved)
    }

    #[inline]
    fn prev(&mut self) -> Result<()> {
        let mut moved = self.data.as_mut().map_or(Ok(()), BlockCursor::prev);
        if moved.is_ok() && self.off_the_block() {
            moved = self.go_back();
        }
        self.settle(moved)
    }

    #[inline]
    fn valid(&self) -> bool {
        self.kind.is_some()
    }

    #[inline]
    fn entry(&self) -> EntryRef<'_> {
        self.peek().expect("only a valid cursor is asked for its entry")
    }

    #[inline]
    fn peek(&self) -> Option<EntryRef<'_>> {
        let (kind, data) = (self.kind?, self.data.as_ref()?);
        let KeyRef { user, seqno } = data.key();
        Some(EntryRef { user, seqno, kind, value: data.value() })
    }

    fn share(&self) -> Option<Part> {
        self.data.as_ref()?.share()
    }
}
