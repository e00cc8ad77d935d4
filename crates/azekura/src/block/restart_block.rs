//! A loaded block with restart points: checked at its ends when it is loaded, and entry by entry as it is read.

use std::cmp::Ordering;
use std::ops::Range;

use crate::base::coding::ByteReader;
use crate::base::key::KEY_LEN_MAX;
use crate::base::{Error, InternalKey, KeyOrder, Result, SeqNo};
use crate::block::frame::BlockContents;
use crate::block::hash_index::{self, HashBucket};
use crate::block::kind::BlockKind;
use crate::block::search::{BlockLookup, FENCE_LEN, common_prefix, fence_of, fence_range, unpack_varint};
use crate::mem::buffer_pool::Buffer;
use crate::mem::simd::prefetch;

/// Restart count, entry count, flags and zeros at the end of a block, in bytes.
pub(crate) const TRAILER_LEN: usize = 12;
/// Bytes of restarts that are asked for beforehand.
const RESTARTS_FETCHED: usize = 512;
/// Bytes of an interval that are asked for before its first entry is read.
const ENTRIES_FETCHED: usize = 512;
/// Bit of the flags: there are buckets behind the restarts, as many as the upper half of the flags says.
pub(crate) const HASHED: u32 = 1;

/// A block of entries with restart points in memory, immutable.
///
/// Behind the block as it was stored lie its fences, made at load: for each restart key the eight bytes behind the
/// prefix that all restart keys share, as one number, and that prefix.
pub(crate) struct RestartBlock {
    /// Maybe a frame's header, the block, fences, prefix.
    bytes: Buffer,
    /// Where the block begins; all other places count from here.
    start: usize,
    /// Where the entries end and the restarts begin.
    entries_end: usize,
    restarts: usize,
    count: usize,
    /// Of the hash index, behind the restarts; 0: there is none.
    buckets: usize,
    /// 0: there are none.
    fences_at: usize,
}

/// An entry as it lies in the block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RestartEntry<'a> {
    /// Bytes that the key shares with the key before.
    pub(crate) shared: usize,
    /// The rest of the key.
    pub(crate) rest: &'a [u8],
    pub(crate) seqno: SeqNo,
    pub(crate) tag: u8,
    pub(crate) value: &'a [u8],
    /// Where the next entry begins.
    pub(crate) next: usize,
}

impl<'a> RestartEntry<'a> {
    fn located(&self, same_key: bool) -> BlockLookup<'a> {
        BlockLookup { key_matches: same_key, seqno: self.seqno, tag: self.tag, value: self.value }
    }
}

impl RestartBlock {
    /// Checks the trailer, the restarts and the buckets.
    ///
    /// # Errors
    /// `Corruption` if they cannot be, `Unsupported` for flags of a newer version.
    pub(crate) fn decode(body: BlockContents) -> Result<RestartBlock> {
        let Some((front, trailer)) = body.split_last_chunk::<TRAILER_LEN>() else {
            return Err(Error::corruption("block is shorter than its trailer"));
        };
        let mut d = ByteReader::new(trailer);
        let (restarts, count, flags) = (d.u32()? as usize, d.u32()? as usize, d.u32()?);
        let buckets = match body.kind() {
            BlockKind::DataWithHashIndex if flags & 0xffff == HASHED => (flags >> 16) as usize,
            BlockKind::DataWithHashIndex => usize::MAX,
            _ if flags == 0 => 0,
            _ => usize::MAX,
        };
        if buckets == usize::MAX {
            return Err(Error::unsupported(format!("block flags {flags:#x} need a newer version")));
        }
        let behind = restarts.checked_mul(4).and_then(|len| len.checked_add(buckets));
        let entries_end = behind.and_then(|len| front.len().checked_sub(len));
        let entries_end = entries_end.ok_or_else(|| Error::corruption("block has more restarts than bytes"))?;
        let (points, named) = front[entries_end..].split_at(4 * restarts);
        let mut before = None;
        for bytes in points.chunks_exact(4) {
            let restart = u32::from_le_bytes(bytes.try_into().expect("four bytes"));
            if before.map_or(restart != 0, |b| b >= restart) || restart as usize >= entries_end {
                return Err(Error::corruption("restarts of a block do not ascend within it"));
            }
            before = Some(restart);
        }
        if restarts == 0 || count < restarts {
            return Err(Error::corruption("block has fewer entries than restarts, or none"));
        }
        if body.kind() == BlockKind::DataWithHashIndex {
            hash_index::check(named, restarts)?;
        }
        let (bytes, start) = body.into_parts();
        let mut block = RestartBlock { bytes, start, entries_end, restarts, count, buckets, fences_at: 0 };
        if restarts > 1 {
            block.put_fences()?;
        }
        Ok(block)
    }

    fn put_fences(&mut self) -> Result<()> {
        let (first, last) = (self.parse_restart(0)?.rest, self.parse_restart(self.restarts - 1)?.rest);
        let prefix = first[..common_prefix(first, last)].to_vec();
        let mut fences = Vec::with_capacity(FENCE_LEN * self.restarts + prefix.len());
        for i in 0..self.restarts {
            let key = self.parse_restart(i)?.rest;
            fences.extend_from_slice(&fence_of(key.get(prefix.len()..).unwrap_or_default()).to_le_bytes());
        }
        fences.extend_from_slice(&prefix);
        self.fences_at = self.bytes.len() - self.start;
        self.bytes.extend_from_slice(&fences);
        Ok(())
    }

    /// Entries, as the trailer says.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Memory held on the heap, in bytes.
    pub(crate) fn heap(&self) -> usize {
        self.bytes.capacity()
    }

    /// Memory held, in bytes.
    pub(crate) fn memory(&self) -> usize {
        self.heap() + size_of::<RestartBlock>()
    }

    #[inline]
    fn raw(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    /// Bytes of the block.
    #[inline]
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.raw()[range]
    }

    /// Where the entries end.
    #[inline]
    pub(crate) fn end(&self) -> usize {
        self.entries_end
    }

    #[inline]
    pub(crate) fn restarts(&self) -> usize {
        self.restarts
    }

    /// Where the `i`-th restart entry begins.
    #[inline]
    pub(crate) fn restart(&self, i: usize) -> usize {
        let at = self.entries_end + 4 * i;
        u32::from_le_bytes(self.raw()[at..at + 4].try_into().expect("four bytes")) as usize
    }

    /// Asks for the restarts, which arrive while it is found out which of them is needed.
    #[inline]
    fn prefetch_restarts(&self) {
        let len = (4 * self.restarts).min(RESTARTS_FETCHED);
        prefetch(&self.raw()[self.entries_end..self.entries_end + len]);
    }

    /// The entry at `at`, which must be where an entry begins.
    #[inline]
    pub(crate) fn parse(&self, at: usize) -> Result<RestartEntry<'_>> {
        let entries = &self.raw()[..self.entries_end];
        let bytes = &entries[at..];
        // One byte for each length: keys and values below 128 bytes; and eight more behind the tag, among which the
        // sequence number ends.
        if let Some(([shared, unshared, value_len, tag, seqno @ ..], _)) = bytes.split_first_chunk::<12>()
            && (shared | unshared | value_len) & 0x80 == 0
        {
            let packed = u64::from_le_bytes(*seqno);
            let len = (!packed & 0x8080_8080_8080_8080).trailing_zeros() as usize / 8 + 1;
            let key_at = 4 + len;
            let value_at = key_at + usize::from(*unshared);
            let end = value_at + usize::from(*value_len);
            if len <= 8 && end <= bytes.len() {
                return Ok(RestartEntry {
                    shared: usize::from(*shared),
                    rest: &bytes[key_at..value_at],
                    seqno: SeqNo(unpack_varint(packed, len)),
                    tag: *tag,
                    value: &bytes[value_at..end],
                    next: at + end,
                });
            }
        }
        self.parse_long(bytes)
    }

    fn parse_long<'a>(&'a self, bytes: &'a [u8]) -> Result<RestartEntry<'a>> {
        let mut d = ByteReader::new(bytes);
        let (shared, unshared, value_len) = (d.varint_u32()? as usize, d.varint_u32()? as usize, d.varint_u32()?);
        let tag = d.u8()?;
        let seqno = SeqNo(d.varint()?);
        let rest = d.take(unshared)?;
        let value = d.take(value_len as usize)?;
        if shared.saturating_add(unshared) > KEY_LEN_MAX || seqno > SeqNo::MAX {
            return Err(Error::corruption("entry is longer or later than any can be"));
        }
        Ok(RestartEntry { shared, rest, seqno, tag, value, next: self.entries_end - d.rest().len() })
    }

    /// The entry at the `i`-th restart; its key is whole.
    #[inline]
    pub(crate) fn parse_restart(&self, i: usize) -> Result<RestartEntry<'_>> {
        let entry = self.parse(self.restart(i))?;
        if entry.shared == 0 { Ok(entry) } else { Err(Error::corruption("restart entry has no whole key")) }
    }

    /// How many restart entries stand before `target`.
    #[inline]
    pub(crate) fn restarts_before(&self, target: InternalKey<'_>, order: &KeyOrder) -> Result<usize> {
        let fenced = self.fences_at != 0 && order.is_bytewise();
        let (mut low, mut high) = if fenced { self.between_fences(target.user_key) } else { (0, self.restarts) };
        while low < high {
            let middle = low + (high - low) / 2;
            let entry = self.parse_restart(middle)?;
            match InternalKey::new(entry.rest, entry.seqno).cmp(&target, order) {
                Ordering::Less => low = middle + 1,
                Ordering::Equal => return Ok(middle),
                Ordering::Greater => high = middle,
            }
        }
        Ok(low)
    }

    /// The restarts that the fences cannot tell from `user`: those before are before it, those behind are behind.
    #[inline]
    fn between_fences(&self, user: &[u8]) -> (usize, usize) {
        let (fences, prefix) = self.raw()[self.fences_at..].split_at(FENCE_LEN * self.restarts);
        let (head, rest) = user.split_at(prefix.len().min(user.len()));
        match head.cmp(prefix) {
            Ordering::Less => (0, 0),
            Ordering::Greater => (self.restarts, self.restarts),
            Ordering::Equal => fence_range(fences, fence_of(rest)),
        }
    }

    /// The first entry at or behind `target`.
    #[inline]
    pub(crate) fn lower_bound(&self, target: InternalKey<'_>, order: &KeyOrder) -> Result<Option<BlockLookup<'_>>> {
        self.prefetch_restarts();
        let before = self.restarts_before(target, order)?;
        if self.restarts == self.count || before == 0 {
            if before == self.restarts {
                return Ok(None);
            }
            let entry = self.parse_restart(before)?;
            return Ok(Some(entry.located(order.cmp(entry.rest, target.user_key).is_eq())));
        }
        self.scan(self.restart(before - 1)..self.entries_end, target, order)
    }

    /// The entry that `target` names, its key having that hash: the first at or behind it, or none if the block does
    /// not have the key.
    #[inline]
    pub(crate) fn lookup(
        &self,
        target: InternalKey<'_>,
        hash: Option<u64>,
        order: &KeyOrder,
    ) -> Result<Option<BlockLookup<'_>>> {
        let Some(hash) = hash.filter(|_| self.buckets != 0) else { return self.lower_bound(target, order) };
        self.prefetch_restarts();
        let at = self.entries_end + 4 * self.restarts;
        match hash_index::look_up(&self.raw()[at..at + self.buckets], hash) {
            HashBucket::Empty => Ok(None),
            HashBucket::Collision => self.lower_bound(target, order),
            HashBucket::Interval(i) => {
                let end = if i + 1 < self.restarts { self.restart(i + 1) } else { self.entries_end };
                self.scan(self.restart(i)..end, target, order)
            }
        }
    }

    /// The first entry at or behind `target` among those in `range`, which begins with a restart entry.
    #[inline]
    fn scan(&self, range: Range<usize>, target: InternalKey<'_>, order: &KeyOrder) -> Result<Option<BlockLookup<'_>>> {
        // Where an entry begins the one before says: without this, one would arrive after the other.
        prefetch(&self.raw()[range.start..range.end.min(range.start + ENTRIES_FETCHED)]);
        if order.is_bytewise() { self.scan_bytes(range, target) } else { self.scan_keys(range, target, order) }
    }

    /// In byte order no key is put together: it is enough to know how many bytes of the target the key before had.
    fn scan_bytes(&self, range: Range<usize>, target: InternalKey<'_>) -> Result<Option<BlockLookup<'_>>> {
        let (mut at, mut matched) = (range.start, 0);
        while at < range.end {
            let entry = self.parse(at)?;
            at = entry.next;
            if entry.shared > matched {
                continue; // differs from the target where the smaller key before it did
            }
            let tail = &target.user_key[entry.shared..];
            let common = common_prefix(entry.rest, tail);
            match (entry.rest.get(common), tail.get(common)) {
                (None, None) if entry.seqno <= target.seqno => return Ok(Some(entry.located(true))),
                (Some(_), None) => return Ok(Some(entry.located(false))),
                (Some(mine), Some(wanted)) if mine > wanted => return Ok(Some(entry.located(false))),
                _ => matched = entry.shared + common,
            }
        }
        Ok(None)
    }

    /// The same in any order.
    fn scan_keys(
        &self,
        range: Range<usize>,
        target: InternalKey<'_>,
        order: &KeyOrder,
    ) -> Result<Option<BlockLookup<'_>>> {
        let (mut at, mut key) = (range.start, Vec::new());
        while at < range.end {
            let entry = self.parse(at)?;
            at = entry.next;
            put_key(&mut key, &entry)?;
            let by_user = order.cmp(&key, target.user_key);
            if by_user.then_with(|| target.seqno.cmp(&entry.seqno)).is_ge() {
                return Ok(Some(entry.located(by_user.is_eq())));
            }
        }
        Ok(None)
    }
}

/// Makes `key`, which held the key before, that of `entry`.
#[inline]
pub(crate) fn put_key(key: &mut Vec<u8>, entry: &RestartEntry<'_>) -> Result<()> {
    if entry.shared > key.len() {
        return Err(Error::corruption("entry shares more of a key than there is"));
    }
    key.truncate(entry.shared);
    key.extend_from_slice(entry.rest);
    Ok(())
}
