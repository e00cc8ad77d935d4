//! A loaded block with restart points. Trailer and restarts are checked when it is loaded, and each entry when it is
//! read.

use std::cmp::Ordering;
use std::ops::Range;

use crate::base::coding::ByteReader;
use crate::base::key::KEY_LEN_MAX;
use crate::base::{Error, InternalKey, KeyOrder, Result, SeqNo};
use crate::block::frame::BlockContents;
use crate::block::frame::BlockKind;
use crate::block::hash_index::{self, HashBucket};
use crate::block::search::{BlockLookup, FENCE_LEN, common_prefix, fence_of, fence_range, unpack_varint};
use crate::mem::buffer_pool::Buffer;
use crate::mem::simd::prefetch;

/// Length in bytes of the trailer: restart count, entry count, flags, and number of buckets.
pub(crate) const TRAILER_LEN: usize = 12;
/// Maximum number of restart bytes that are prefetched.
const RESTARTS_FETCHED: usize = 512;
/// Maximum number of bytes of an interval that are prefetched before its first entry is read.
const ENTRIES_FETCHED: usize = 512;
/// Bit of the flags: a hash index follows the restarts. The upper half of the flags is its number of buckets.
pub(crate) const HASHED: u32 = 1;

/// An immutable block with restart points in memory.
///
/// Decoding appends the fences after the stored block: for each restart key, the eight bytes after the common prefix
/// of all restart keys as one number. The prefix follows the fences. A block in a mapped file has none.
pub(crate) struct RestartBlock {
    /// The header of the frame if the block was stored uncompressed, then the block, the fences and the prefix.
    bytes: Buffer,
    /// Start of the block in `bytes`. All other offsets are relative to it.
    start: usize,
    /// End of the entries and start of the restarts.
    entries_end: usize,
    restarts: usize,
    count: usize,
    /// Number of buckets of the hash index after the restarts; 0 if there is no hash index.
    buckets: usize,
    /// Start of the fences; 0 if there are none.
    fences_at: usize,
}

/// A parsed entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RestartEntry<'a> {
    /// Number of bytes that the key shares with the previous key.
    pub(crate) shared: usize,
    /// The rest of the key.
    pub(crate) rest: &'a [u8],
    pub(crate) seqno: SeqNo,
    pub(crate) tag: u8,
    pub(crate) value: &'a [u8],
    /// Offset of the next entry.
    pub(crate) next: usize,
}

impl<'a> RestartEntry<'a> {
    fn located(&self, same_key: bool) -> BlockLookup<'a> {
        BlockLookup { key_matches: same_key, seqno: self.seqno, tag: self.tag, value: self.value }
    }
}

impl RestartBlock {
    /// Decodes a block. Checks the trailer, the restarts and the buckets.
    ///
    /// # Errors
    /// `Corruption` if they are malformed, `Unsupported` for flags of a newer version.
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
        let tail_len = restarts.checked_mul(4).and_then(|len| len.checked_add(buckets));
        let entries_end = tail_len.and_then(|len| front.len().checked_sub(len));
        let entries_end = entries_end.ok_or_else(|| Error::corruption("block is too short for its restarts"))?;
        let (points, named) = front[entries_end..].split_at(4 * restarts);
        let mut before = None;
        for bytes in points.chunks_exact(4) {
            let restart = u32::from_le_bytes(bytes.try_into().expect("four bytes"));
            if before.map_or(restart != 0, |b| b >= restart) || restart as usize >= entries_end {
                return Err(Error::corruption("restarts of a block are not ascending offsets of its entries"));
            }
            before = Some(restart);
        }
        if restarts == 0 || count < restarts {
            return Err(Error::corruption("block has fewer entries than restarts, or no restarts"));
        }
        if body.kind() == BlockKind::DataWithHashIndex {
            hash_index::check(named, restarts)?;
        }
        let (bytes, start) = body.into_parts();
        let mut block = RestartBlock { bytes, start, entries_end, restarts, count, buckets, fences_at: 0 };
        if restarts > 1 && !block.bytes.is_mapped() {
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

    /// Number of entries, as stored in the trailer.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Heap memory use in bytes.
    pub(crate) fn heap(&self) -> usize {
        self.bytes.memory()
    }

    /// Memory use in bytes.
    pub(crate) fn memory(&self) -> usize {
        self.heap() + size_of::<RestartBlock>()
    }

    #[inline]
    fn raw(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    /// The bytes of a range of the block.
    #[inline]
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.raw()[range]
    }

    /// End of the entries.
    #[inline]
    pub(crate) fn end(&self) -> usize {
        self.entries_end
    }

    #[inline]
    pub(crate) fn restarts(&self) -> usize {
        self.restarts
    }

    /// Offset of the `i`-th restart entry.
    #[inline]
    pub(crate) fn restart(&self, i: usize) -> usize {
        debug_assert!(i < self.restarts, "the block has this restart");
        let at = self.entries_end + 4 * i;
        u32::from_le_bytes(self.raw()[at..at + 4].try_into().expect("four bytes")) as usize
    }

    /// Prefetches the restarts, which arrive while the fences are searched.
    #[inline]
    fn prefetch_restarts(&self) {
        let len = (4 * self.restarts).min(RESTARTS_FETCHED);
        prefetch(&self.raw()[self.entries_end..self.entries_end + len]);
    }

    /// Prefetches the fences that a search compares first, or the restarts if there are no fences.
    #[inline]
    pub(crate) fn prefetch_search(&self) {
        if self.fences_at == 0 {
            return self.prefetch_restarts();
        }
        let fences = &self.raw()[self.fences_at..self.fences_at + FENCE_LEN * self.restarts];
        for quarter in 1..4 {
            prefetch(&fences[fences.len() / 4 * quarter]);
        }
    }

    /// Prefetches what a lookup by hash reads first: the bucket and the restarts, or as
    /// [`prefetch_search`](RestartBlock::prefetch_search) without a hash index.
    #[inline]
    pub(crate) fn prefetch_lookup(&self) {
        self.prefetch_search();
        if self.buckets > 0 {
            let from = self.entries_end + 4 * self.restarts;
            prefetch(&self.raw()[from..from + self.buckets.min(RESTARTS_FETCHED)]);
            self.prefetch_restarts();
        }
    }

    /// Parses the entry at `at`, which must be the offset of an entry.
    #[inline]
    pub(crate) fn parse(&self, at: usize) -> Result<RestartEntry<'_>> {
        debug_assert!(at < self.entries_end, "an entry begins before the end of the entries");
        let entries = &self.raw()[..self.entries_end];
        let bytes = &entries[at..];
        // Fast path: each length has one byte (keys and values below 128 bytes), and eight bytes follow the tag, in
        // which the sequence number ends.
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
            return Err(Error::corruption("entry exceeds the maximum key length or sequence number"));
        }
        Ok(RestartEntry { shared, rest, seqno, tag, value, next: self.entries_end - d.rest().len() })
    }

    /// Parses the entry at the `i`-th restart, which stores its complete key.
    #[inline]
    pub(crate) fn parse_restart(&self, i: usize) -> Result<RestartEntry<'_>> {
        let entry = self.parse(self.restart(i))?;
        if entry.shared == 0 {
            Ok(entry)
        } else {
            Err(Error::corruption("restart entry does not store its complete key"))
        }
    }

    /// Number of restart entries before `target`.
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

    /// The range of restarts that the fences cannot order relative to `user_key`. Earlier restarts are before it,
    /// later ones after it.
    #[inline]
    fn between_fences(&self, user_key: &[u8]) -> (usize, usize) {
        let (fences, prefix) = self.raw()[self.fences_at..].split_at(FENCE_LEN * self.restarts);
        let (head, rest) = user_key.split_at(prefix.len().min(user_key.len()));
        match head.cmp(prefix) {
            Ordering::Less => (0, 0),
            Ordering::Greater => (self.restarts, self.restarts),
            Ordering::Equal => fence_range(fences, fence_of(rest)),
        }
    }

    /// The first entry at or after `target`.
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

    /// The first entry at or after `target`; `hash` is the hash of its key. `None` if the block does not contain the
    /// key.
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

    /// The first entry at or after `target` in `range`, which begins with a restart entry.
    #[inline]
    fn scan(&self, range: Range<usize>, target: InternalKey<'_>, order: &KeyOrder) -> Result<Option<BlockLookup<'_>>> {
        // Each entry determines the offset of the next one, so without a prefetch their cache lines would arrive one
        // by one.
        prefetch(&self.raw()[range.start..range.end.min(range.start + ENTRIES_FETCHED)]);
        if order.is_bytewise() { self.scan_bytes(range, target) } else { self.scan_keys(range, target, order) }
    }

    /// Scans in byte order without assembling keys: the scan only tracks how many bytes of the target the previous
    /// key matched.
    fn scan_bytes(&self, range: Range<usize>, target: InternalKey<'_>) -> Result<Option<BlockLookup<'_>>> {
        let (mut at, mut matched) = (range.start, 0);
        while at < range.end {
            let entry = self.parse(at)?;
            at = entry.next;
            if entry.shared > matched {
                continue; // differs from the target at the same byte as the previous, smaller key
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

    /// Scans in any order, and assembles each key.
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

/// Changes `key` from the previous key to the key of `entry`.
#[inline]
pub(crate) fn put_key(key: &mut Vec<u8>, entry: &RestartEntry<'_>) -> Result<()> {
    if entry.shared > key.len() {
        return Err(Error::corruption("entry shares more bytes than the previous key has"));
    }
    key.truncate(entry.shared);
    key.extend_from_slice(entry.rest);
    Ok(())
}
