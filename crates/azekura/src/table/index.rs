//! The index: which data block a key is in. Two levels; its rules are drawn in `docs/format/table.md`.

use std::sync::Arc;

use crate::base::{Error, KeyOrder, KeyRef, Result, SeqNo};
use crate::block::cached::{IndexPiece, IndexTop};
use crate::block::restarts::RestartBlock;
use crate::block::{BlockBuilder, BlockHandle, BlockKind};
use crate::mem::epoch::Pin;
use crate::table::source::{Held, Slot, Source};

/// Bit of an index entry's tag: the next block begins with an older version of the user key that this one ends with.
pub(crate) const CONTINUES: u8 = 1;
/// Index blocks are searched more than they are stored: every entry is a restart, and has the link of its number.
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
    pieces_bytes: u64,
    value: Vec<u8>,
}

impl IndexBuilder {
    pub(crate) fn new(piece_size: Option<u32>) -> IndexBuilder {
        IndexBuilder {
            piece: BlockBuilder::new(RESTART_INTERVAL),
            piece_size: piece_size.map(|size| size as usize),
            last: (Vec::new(), SeqNo::ZERO, 0),
            pieces: Vec::new(),
            pieces_bytes: 0,
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
        let raw = self.piece.finish().to_vec();
        self.pieces_bytes += raw.len() as u64;
        self.pieces.push(Piece { key, seqno, tag, raw });
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
        self.pieces_bytes + self.piece.len() as u64
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
pub(crate) fn only_piece(top: &RestartBlock) -> Result<Option<BlockHandle>> {
    if top.count() > 1 { Ok(None) } else { BlockHandle::decode(top.parse_restart(0)?.value).map(Some) }
}

/// The index of an open table.
pub(crate) enum Index {
    /// One piece; its top says nothing more than where it is.
    One(Slot<IndexPiece>),
    /// The top, which leads to pieces in the cache.
    Many(Slot<IndexTop>),
}

/// The first entry of an index block at or behind `target`; its number is also that of its link.
#[inline]
pub(crate) fn entry_at_or_behind(block: &RestartBlock, target: KeyRef<'_>, order: &KeyOrder) -> Result<Option<usize>> {
    let before = block.restarts_before(target, order)?;
    Ok((before < block.restarts()).then_some(before))
}

/// Whether the user key at the end of the block that the `at`-th entry names goes on in the next one.
pub(crate) fn continues(piece: &RestartBlock, at: usize) -> Result<bool> {
    Ok(piece.parse_restart(at)?.tag & CONTINUES != 0)
}

impl Index {
    /// The piece, and its entry, for the block that the first entry at or behind `target` is in; `None` if all entries
    /// are before `target`.
    #[inline]
    pub(crate) fn find<'a>(
        &'a self,
        source: &Source,
        target: KeyRef<'_>,
        order: &KeyOrder,
        pin: &'a Pin,
    ) -> Result<Option<(Held<'a, IndexPiece>, usize)>> {
        let piece = match self {
            Index::One(piece) => piece.get(source, pin)?,
            Index::Many(top) => {
                let top = top.get(source, pin)?;
                let Some(at) = entry_at_or_behind(&top, target, order)? else { return Ok(None) };
                source.follow(&top, at, BlockKind::Index, pin)?
            }
        };
        match entry_at_or_behind(&piece, target, order)? {
            Some(at) => Ok(Some((piece, at))),
            None if matches!(self, Index::One(_)) => Ok(None),
            None => Err(beyond_its_top()),
        }
    }

    /// What the open table holds of it outside of the cache, in bytes.
    pub(crate) fn held_bytes(&self) -> u64 {
        match self {
            Index::One(slot) => slot.held_bytes(),
            Index::Many(slot) => slot.held_bytes(),
        }
    }
}

/// A cursor over the data blocks of a table, in the order of the index. Not valid until the first seek; after an error
/// only a seek that succeeds makes it mean anything again.
pub(crate) struct IndexCursor {
    /// Top and place in it; none where there is one piece only.
    top: Option<(Arc<IndexTop>, usize)>,
    /// Piece and place in it, while it is valid.
    piece: Option<(Arc<IndexPiece>, usize)>,
    fill_cache: bool,
}

impl IndexCursor {
    pub(crate) fn new(fill_cache: bool) -> IndexCursor {
        IndexCursor { top: None, piece: None, fill_cache }
    }

    /// The piece that names the block it stands on, and which entry does; `None` where it is not valid.
    pub(crate) fn place(&self) -> Option<(&Arc<IndexPiece>, usize)> {
        self.piece.as_ref().map(|(piece, at)| (piece, *at))
    }

    /// The block it stands on, with separator and tag of its entry.
    pub(crate) fn entry(&self) -> Result<Option<(BlockHandle, KeyRef<'_>, u8)>> {
        let Some((piece, at)) = &self.piece else { return Ok(None) };
        let entry = piece.parse_restart(*at)?;
        Ok(Some((BlockHandle::decode(entry.value)?, KeyRef::new(entry.rest, entry.seqno), entry.tag)))
    }

    pub(crate) fn seek_to_first(&mut self, index: &Index, source: &Source) -> Result<()> {
        self.enter(index, source, |_| Ok(Some(0)))
    }

    pub(crate) fn seek_to_last(&mut self, index: &Index, source: &Source) -> Result<()> {
        self.enter(index, source, |block| Ok(block.count().checked_sub(1)))
    }

    /// To the block with the first entry at or behind `target`.
    pub(crate) fn seek(&mut self, index: &Index, source: &Source, target: KeyRef<'_>, order: &KeyOrder) -> Result<()> {
        self.enter(index, source, |block| entry_at_or_behind(block, target, order))
    }

    pub(crate) fn next(&mut self, source: &Source) -> Result<()> {
        self.step(source, |at, count| Some(at + 1).filter(|at| *at < count), |_| Some(0))
    }

    pub(crate) fn prev(&mut self, source: &Source) -> Result<()> {
        self.step(source, |at, _| at.checked_sub(1), |count| count.checked_sub(1))
    }

    /// Finds the place in the top, then that in the piece that it leads to.
    fn enter(
        &mut self,
        index: &Index,
        source: &Source,
        find: impl Fn(&RestartBlock) -> Result<Option<usize>>,
    ) -> Result<()> {
        (self.top, self.piece) = (None, None);
        match index {
            Index::One(slot) => {
                let piece = slot.keep(source)?;
                self.piece = find(&piece)?.map(|at| (piece, at));
            }
            Index::Many(slot) => {
                let top = slot.keep(source)?;
                let Some(at) = find(&top)? else { return Ok(()) };
                let piece: Arc<IndexPiece> = source.keep(&top, at, BlockKind::Index, self.fill_cache, None)?;
                let in_piece = find(&piece)?.ok_or_else(beyond_its_top)?;
                (self.top, self.piece) = (Some((top, at)), Some((piece, in_piece)));
            }
        }
        Ok(())
    }

    /// One on in the piece, or else in the top and to the near end of the piece there.
    fn step(
        &mut self,
        source: &Source,
        on: impl Fn(usize, usize) -> Option<usize>,
        near_end: impl FnOnce(usize) -> Option<usize>,
    ) -> Result<()> {
        let Some((piece, at)) = &mut self.piece else { return Ok(()) };
        if let Some(next) = on(*at, piece.count()) {
            *at = next;
            return Ok(());
        }
        self.piece = None;
        let Some((top, at)) = &mut self.top else { return Ok(()) };
        let Some(next) = on(*at, top.count()) else { return Ok(()) };
        *at = next;
        let piece: Arc<IndexPiece> = source.keep(top, next, BlockKind::Index, self.fill_cache, None)?;
        self.piece = near_end(piece.count()).map(|at| (piece, at));
        Ok(())
    }
}

#[cold]
fn beyond_its_top() -> Error {
    Error::corruption("piece of the index ends before its top says")
}
