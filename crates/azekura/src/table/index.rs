//! The index: which data block a key is in. Two levels; its rules are drawn in `docs/format/table.md`.

use crate::base::{Error, KeyOrder, KeyRef, Result, SeqNo};
use crate::block::{Block, BlockBuilder, BlockCursor, BlockHandle, BlockKind};
use crate::table::source::{Held, Slot, Source};

/// Bit of an index entry's tag: the next block begins with an older version of the user key that this one ends with.
pub(crate) const CONTINUES: u8 = 1;
/// Index blocks are searched more than they are stored: every entry is a restart.
const RESTART_INTERVAL: u8 = 1;

/// A finished piece of an index or a filter, and the entry of the top that will lead to it.
pub(crate) struct Piece {
    pub(crate) key: Vec<u8>,
    pub(crate) seqno: SeqNo,
    pub(crate) tag: u8,
    pub(crate) raw: Vec<u8>,
}

/// Collects the entries of the index into pieces, which are kept until the data is written.
pub(crate) struct IndexBuilder {
    piece: BlockBuilder,
    /// None: all in one piece.
    piece_size: Option<usize>,
    last: (Vec<u8>, SeqNo, u8),
    pieces: Vec<Piece>,
    value: Vec<u8>,
}

impl IndexBuilder {
    pub(crate) fn new(piece_size: Option<u32>) -> IndexBuilder {
        IndexBuilder {
            piece: BlockBuilder::new(RESTART_INTERVAL),
            piece_size: piece_size.map(|size| size as usize),
            last: (Vec::new(), SeqNo::ZERO, 0),
            pieces: Vec::new(),
            value: Vec::new(),
        }
    }

    /// The block at `handle` ends at or before `separator`.
    pub(crate) fn add(&mut self, separator: KeyRef<'_>, continues: bool, handle: BlockHandle) {
        self.value.clear();
        handle.encode(&mut self.value);
        let full = self.piece_size.is_some_and(|size| self.piece.len_with(separator, self.value.len()) > size);
        if full && !self.piece.is_empty() {
            self.cut();
        }
        let tag = if continues { CONTINUES } else { 0 };
        self.piece.add(separator, tag, &self.value);
        self.last.0.clear();
        self.last.0.extend_from_slice(separator.user);
        (self.last.1, self.last.2) = (separator.seqno, tag);
    }

    fn cut(&mut self) {
        let (key, seqno, tag) = self.last.clone();
        self.pieces.push(Piece { key, seqno, tag, raw: self.piece.finish().to_vec() });
        self.piece.clear();
    }

    /// All pieces; there is at least one if there was an entry.
    pub(crate) fn finish(mut self) -> Vec<Piece> {
        if !self.piece.is_empty() {
            self.cut();
        }
        self.pieces
    }

    /// Bytes collected so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.raw.len() as u64).sum::<u64>() + self.piece.len() as u64
    }
}

/// Builds the block that leads to `pieces`, which lie at `handles`.
pub(crate) fn build_top(pieces: &[Piece], handles: &[BlockHandle]) -> Vec<u8> {
    let mut top = BlockBuilder::new(RESTART_INTERVAL);
    let mut value = Vec::new();
    for (piece, handle) in pieces.iter().zip(handles) {
        value.clear();
        handle.encode(&mut value);
        top.add(KeyRef::new(&piece.key, piece.seqno), piece.tag, &value);
    }
    top.finish().to_vec()
}

/// The handle in the only entry of a top that has just one.
pub(crate) fn only_piece(top: &Block) -> Result<Option<BlockHandle>> {
    if top.count() > 1 { Ok(None) } else { BlockHandle::decode(top.first_value()?).map(Some) }
}

/// The index of an open table.
pub(crate) enum Index {
    /// One piece; its top says nothing more than where it is.
    One(Slot<Block>),
    /// The top, which leads to pieces in the cache.
    Many(Slot<Block>),
}

impl Index {
    /// The block that the first entry at or behind `target` is in, and whether the user key at its end goes on in the
    /// next one; `None` if all entries are before `target`.
    #[inline]
    pub(crate) fn find(
        &self,
        source: &Source,
        target: KeyRef<'_>,
        order: &KeyOrder,
    ) -> Result<Option<(BlockHandle, bool)>> {
        let piece = match self {
            Index::One(piece) => piece.get(source)?,
            Index::Many(top) => {
                let top = top.get(source)?;
                let Some(entry) = top.locate(target, order)? else { return Ok(None) };
                Held::Shared(source.cached(BlockHandle::decode(entry.value)?, BlockKind::Index, true)?)
            }
        };
        let Some(entry) = piece.locate(target, order)? else {
            return if matches!(self, Index::One(_)) { Ok(None) } else { Err(beyond_its_top()) };
        };
        Ok(Some((BlockHandle::decode(entry.value)?, entry.tag & CONTINUES != 0)))
    }

    pub(crate) fn slot(&self) -> &Slot<Block> {
        match self {
            Index::One(slot) | Index::Many(slot) => slot,
        }
    }
}

/// A cursor over the data blocks of a table, in the order of the index. Not valid until the first seek; after an error
/// only a seek that succeeds makes it mean anything again.
pub(crate) struct IndexCursor {
    /// None where there is one piece only.
    top: Option<BlockCursor>,
    piece: Option<BlockCursor>,
    fill_cache: bool,
}

impl IndexCursor {
    pub(crate) fn new(fill_cache: bool) -> IndexCursor {
        IndexCursor { top: None, piece: None, fill_cache }
    }

    /// The block it stands on; `None` where it is not valid.
    pub(crate) fn block(&self) -> Result<Option<BlockHandle>> {
        match &self.piece {
            Some(piece) if piece.valid() => BlockHandle::decode(piece.value()).map(Some),
            _ => Ok(None),
        }
    }

    /// The separator and the tag of the entry it stands on.
    pub(crate) fn entry(&self) -> Option<(KeyRef<'_>, u8)> {
        self.piece.as_ref().filter(|piece| piece.valid()).map(|piece| (piece.key(), piece.tag()))
    }

    pub(crate) fn seek_to_first(&mut self, index: &Index, source: &Source) -> Result<()> {
        self.enter(index, source, BlockCursor::seek_to_first, BlockCursor::seek_to_first)
    }

    pub(crate) fn seek_to_last(&mut self, index: &Index, source: &Source) -> Result<()> {
        self.enter(index, source, BlockCursor::seek_to_last, BlockCursor::seek_to_last)
    }

    /// To the block with the first entry at or behind `target`.
    pub(crate) fn seek(&mut self, index: &Index, source: &Source, target: KeyRef<'_>, order: &KeyOrder) -> Result<()> {
        self.enter(index, source, |top| top.seek(target, order), |piece| piece.seek(target, order))
    }

    pub(crate) fn next(&mut self, source: &Source) -> Result<()> {
        self.step(source, BlockCursor::next, BlockCursor::seek_to_first)
    }

    pub(crate) fn prev(&mut self, source: &Source) -> Result<()> {
        self.step(source, BlockCursor::prev, BlockCursor::seek_to_last)
    }

    /// Places the top, then the piece that it leads to.
    fn enter(
        &mut self,
        index: &Index,
        source: &Source,
        in_top: impl FnOnce(&mut BlockCursor) -> Result<()>,
        in_piece: impl FnOnce(&mut BlockCursor) -> Result<()>,
    ) -> Result<()> {
        let held = index.slot().get(source)?.to_arc();
        match index {
            Index::One(_) => in_piece(put(&mut self.piece, held)),
            Index::Many(_) => {
                in_top(put(&mut self.top, held))?;
                self.load(source, in_piece)
            }
        }
    }

    fn step(
        &mut self,
        source: &Source,
        on: impl Fn(&mut BlockCursor) -> Result<()>,
        into_next: impl FnOnce(&mut BlockCursor) -> Result<()>,
    ) -> Result<()> {
        let Some(piece) = &mut self.piece else { return Ok(()) };
        on(piece)?;
        match &mut self.top {
            Some(top) if !piece.valid() => {
                on(top)?;
                self.load(source, into_next)
            }
            _ => Ok(()),
        }
    }

    /// Loads the piece that the top stands on.
    fn load(&mut self, source: &Source, place: impl FnOnce(&mut BlockCursor) -> Result<()>) -> Result<()> {
        let Some(top) = self.top.as_ref().filter(|top| top.valid()) else {
            self.piece = None;
            return Ok(());
        };
        let block = source.cached(BlockHandle::decode(top.value())?, BlockKind::Index, self.fill_cache)?;
        let piece = put(&mut self.piece, block);
        place(piece)?;
        if piece.valid() { Ok(()) } else { Err(beyond_its_top()) }
    }
}

#[cold]
fn beyond_its_top() -> Error {
    Error::corruption("piece of the index ends before its top says")
}

/// Puts a block under a cursor that may exist already.
fn put(place: &mut Option<BlockCursor>, block: std::sync::Arc<Block>) -> &mut BlockCursor {
    match place {
        Some(cursor) => {
            cursor.set_block(block);
            cursor
        }
        None => place.insert(BlockCursor::new(block)),
    }
}
