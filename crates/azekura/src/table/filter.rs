//! The filter: which user keys are surely not in a table. Two levels; its rules are drawn in `docs/format/table.md`.

use crate::base::{KeyOrder, KeyRef, Result, SeqNo};
use crate::block::cached::FilterTop;
use crate::block::{BlockKind, FilterBlock};
use crate::mem::epoch::Pin;
use crate::table::index::{Piece, entry_at_or_behind};
use crate::table::options::FilterPolicy;
use crate::table::source::{Held, Slot, Source};

/// Collects the hashes of user keys into pieces, which are kept until the data is written.
pub(crate) struct FilterBuilder {
    bits_per_key: f32,
    /// None: all in one piece.
    keys_per_piece: Option<usize>,
    hashes: Vec<u64>,
    keys: u64,
    pieces: Vec<Piece>,
    pieces_bytes: u64,
}

impl FilterBuilder {
    /// `None` where the policy or the order allows no filter.
    pub(crate) fn new(policy: FilterPolicy, piece_size: Option<u32>, order: &KeyOrder) -> Option<FilterBuilder> {
        let FilterPolicy::Bloom { bits_per_key } = policy else { return None };
        if !order.hashes_keys() {
            return None;
        }
        let keys_per_piece = piece_size.map(|size| ((size as f32 * 8.0 / bits_per_key) as usize).max(1));
        Some(FilterBuilder {
            bits_per_key,
            keys_per_piece,
            hashes: Vec::new(),
            keys: 0,
            pieces: Vec::new(),
            pieces_bytes: 0,
        })
    }

    /// Adds a user key that differs from the one before, which is `before`.
    pub(crate) fn add(&mut self, hash: u64, before: &[u8], user: &[u8], order: &KeyOrder) {
        if self.keys_per_piece.is_some_and(|keys| self.hashes.len() >= keys) {
            let mut bound = Vec::new();
            order.separator(before, user, &mut bound);
            self.cut(bound);
        }
        self.hashes.push(hash);
        self.keys += 1;
    }

    fn cut(&mut self, bound: Vec<u8>) {
        let raw = FilterBlock::build(&self.hashes, self.bits_per_key);
        self.pieces_bytes += raw.len() as u64;
        self.pieces.push(Piece { key: bound, seqno: SeqNo::ZERO, tag: 0, raw });
        self.hashes.clear();
    }

    /// All pieces, the last one up to `largest`.
    pub(crate) fn finish(mut self, largest: &[u8]) -> Vec<Piece> {
        self.cut(largest.to_vec());
        self.pieces
    }

    /// User keys added.
    pub(crate) fn keys(&self) -> u64 {
        self.keys
    }

    /// Bytes collected so far, about.
    pub(crate) fn bytes(&self) -> u64 {
        let open = self.hashes.len() as f64 * f64::from(self.bits_per_key) / 8.0;
        self.pieces_bytes + open as u64
    }
}

/// The filter of an open table.
pub(crate) enum Filter {
    /// One piece; its top says nothing more than where it is.
    One(Slot<FilterBlock>),
    /// The top, which leads to pieces in the cache.
    Many(Slot<FilterTop>),
}

impl Filter {
    /// False only if no entry has this user key, whose hash under the table's seed is `hash`.
    #[inline]
    pub(crate) fn may_contain(
        &self,
        source: &Source,
        user: &[u8],
        hash: u64,
        order: &KeyOrder,
        pin: &Pin,
    ) -> Result<bool> {
        let piece: Held<'_, FilterBlock> = match self {
            Filter::One(piece) => piece.get(source, pin)?,
            Filter::Many(top) => {
                let top = top.get(source, pin)?;
                // Bounds have sequence number 0, so no version of a key lies behind a bound of the same key.
                let Some(at) = entry_at_or_behind(&top, KeyRef::first_of(user), order)? else { return Ok(false) };
                source.follow(&top, at, BlockKind::Filter, pin)?
            }
        };
        Ok(piece.may_contain(hash))
    }

    pub(crate) fn held_bytes(&self) -> u64 {
        match self {
            Filter::One(slot) => slot.held_bytes(),
            Filter::Many(slot) => slot.held_bytes(),
        }
    }
}
