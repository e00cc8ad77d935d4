//! Fingerprint blocks: blocks with offset slots and fingerprints, in which a reader reaches every entry directly, by
//! its index or by the hash of its key.

use std::cmp::Ordering;
use std::ops::Range;

use crate::base::coding::{ByteReader, put_varint, varint_len};
use crate::base::key::KEY_LEN_MAX;
use crate::base::{Error, InternalKey, KeyOrder, Result, SeqNo};
use crate::block::frame::BlockContents;
use crate::block::search::{BlockLookup, common_prefix, fence_of, fence_range, unpack_varint};
use crate::mem::buffer_pool::Buffer;
use crate::mem::simd::{LANES, matches, prefetch};

/// Length in bytes of the trailer: entry count, prefix length, slot width and flags.
const TRAILER_LEN: usize = 8;
const NARROW: usize = 2;
const WIDE: usize = 4;
/// Maximum number of slot bytes that are prefetched. A block of 16 KiB with records of 100 bytes has half as many.
const SLOTS_FETCHED: usize = 512;
/// Maximum number of bytes of an entry that are prefetched.
const ENTRY_FETCHED: usize = 192;
/// Entries for each fence. A fence has eight bytes, so fences use one byte of memory for each entry.
const ENTRIES_PER_FENCE: usize = 8;

/// An immutable fingerprint block in memory. All keys begin with a common prefix, which is stored once.
///
/// Decoding appends a fence for every eighth entry after the stored block, unless the block is in a mapped file. The
/// fence is made of the key bytes after the prefix.
pub(crate) struct FingerprintBlock {
    /// The header of the frame if the block was stored uncompressed, then the block, then the fences.
    bytes: Buffer,
    /// Start of the block in `bytes`. All other offsets are relative to it.
    start: usize,
    count: usize,
    /// End of the entries and start of the fingerprints.
    entries_end: usize,
    /// Length of a slot in bytes.
    width: usize,
    /// The largest length of a key without the prefix that is stored in one byte and does not exceed the key limit.
    short: usize,
    prefix: Range<usize>,
    /// Start of the fences; 0 if there are none.
    fences_at: usize,
}

/// The fingerprint of a key with that hash: one byte. Filters use other bits of the hash.
#[inline]
fn fingerprint_of(hash: u64) -> u8 {
    hash as u8
}

/// A parsed entry.
#[derive(Clone, Debug)]
pub(crate) struct FingerprintBlockEntry<'a> {
    /// The key without the prefix.
    pub(crate) rest: &'a [u8],
    pub(crate) seqno: SeqNo,
    pub(crate) tag: u8,
    pub(crate) value: Range<usize>,
}

impl FingerprintBlock {
    /// Decodes a block. Checks the trailer and the slots.
    ///
    /// # Errors
    /// `Corruption` if they are malformed, `Unsupported` for flags of a newer version.
    pub(crate) fn decode(body: BlockContents) -> Result<FingerprintBlock> {
        let Some((front, trailer)) = body.split_last_chunk::<TRAILER_LEN>() else {
            return Err(Error::corruption("block is shorter than its trailer"));
        };
        let mut d = ByteReader::new(trailer);
        let (count, prefix_len, width) = (d.u32()? as usize, usize::from(d.u16()?), usize::from(d.u8()?));
        let flags = d.u8()?;
        if flags != 0 {
            return Err(Error::unsupported(format!("block flags {flags:#x} need a newer version")));
        }
        if count == 0 || (width != NARROW && width != WIDE) {
            return Err(Error::corruption("block has no entries or an invalid slot width"));
        }
        let tail_len = count.checked_mul(1 + width).and_then(|len| len.checked_add(prefix_len));
        let entries_end = tail_len.and_then(|len| front.len().checked_sub(len));
        let entries_end = entries_end.ok_or_else(|| Error::corruption("block is too short for its slots"))?;
        let prefix = front.len() - prefix_len..front.len();
        let (bytes, start) = body.into_parts();
        let short = KEY_LEN_MAX.saturating_sub(prefix_len).min(0x7f);
        let mut block = FingerprintBlock { bytes, start, count, entries_end, width, short, prefix, fences_at: 0 };
        let mut before = 0;
        for i in 0..count {
            let at = block.slot(i);
            if (i == 0) != (at == 0) || (i > 0 && at <= before) || at >= entries_end {
                return Err(Error::corruption("slots of a block are not ascending offsets of its entries"));
            }
            before = at;
        }
        if count > ENTRIES_PER_FENCE && !block.bytes.is_mapped() {
            block.put_fences()?;
        }
        Ok(block)
    }

    fn put_fences(&mut self) -> Result<()> {
        self.fences_at = self.bytes.len() - self.start;
        self.bytes.reserve(8 * self.count.div_ceil(ENTRIES_PER_FENCE));
        for i in (0..self.count).step_by(ENTRIES_PER_FENCE) {
            let fence = fence_of(self.rest(i)?.0);
            self.bytes.extend_from_slice(&fence.to_le_bytes());
        }
        Ok(())
    }

    /// Number of entries.
    #[inline]
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Heap memory use in bytes.
    pub(crate) fn heap(&self) -> usize {
        self.bytes.memory()
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

    /// The common prefix of all keys.
    #[inline]
    pub(crate) fn prefix(&self) -> &[u8] {
        &self.raw()[self.prefix.clone()]
    }

    #[inline]
    pub(crate) fn prefix_len(&self) -> usize {
        self.prefix.len()
    }

    /// Whether the fingerprint of the `i`-th entry differs from that of the entry before it, which then has another
    /// key, because equal keys have the same hash.
    #[inline]
    pub(crate) fn begins_key(&self, i: usize) -> bool {
        debug_assert!(i > 0 && i < self.count, "there is an entry before it");
        let fingerprints = &self.raw()[self.entries_end..];
        fingerprints[i] != fingerprints[i - 1]
    }

    /// Offset of the `i`-th entry.
    #[inline]
    pub(crate) fn slot(&self, i: usize) -> usize {
        debug_assert!(i < self.count, "each slot belongs to an entry");
        let at = self.entries_end + self.count + self.width * i;
        let slots = &self.raw()[at..];
        if self.width == NARROW {
            usize::from(u16::from_le_bytes(*slots.first_chunk().expect("slots are followed by the trailer")))
        } else {
            u32::from_le_bytes(*slots.first_chunk().expect("slots are followed by the trailer")) as usize
        }
    }

    /// End of the entries.
    #[inline]
    pub(crate) fn end(&self) -> usize {
        self.entries_end
    }

    /// End of the `i`-th entry.
    #[inline]
    pub(crate) fn end_of(&self, i: usize) -> usize {
        if i + 1 < self.count { self.slot(i + 1) } else { self.entries_end }
    }

    /// The key of the `i`-th entry without the prefix, and the offset of the tag after it.
    #[inline]
    fn rest(&self, i: usize) -> Result<(&[u8], usize)> {
        self.rest_at(self.slot(i))
    }

    #[inline(always)]
    fn rest_at(&self, at: usize) -> Result<(&[u8], usize)> {
        let entries = &self.raw()[..self.entries_end];
        let len = usize::from(entries[at]);
        if len <= self.short
            && let Some(rest) = entries.get(at + 1..at + 1 + len)
        {
            return Ok((rest, at + 1 + len));
        }
        self.long_rest_at(at)
    }

    #[inline(never)]
    fn long_rest_at(&self, at: usize) -> Result<(&[u8], usize)> {
        let mut d = ByteReader::new(&self.raw()[at..self.entries_end]);
        let len = d.varint_u32()? as usize;
        let rest = d.take(len)?;
        if self.prefix.len() + len > KEY_LEN_MAX {
            return Err(Error::corruption("key exceeds the maximum length"));
        }
        Ok((rest, self.entries_end - d.rest().len()))
    }

    /// Tag and sequence number at `at`, and the offset of the value after them. The entry ends at `end`.
    #[inline(always)]
    fn tail_at(&self, at: usize, end: usize) -> Result<(u8, SeqNo, usize)> {
        // The trailer follows the last entry, so nine bytes can be read at any offset in the entries.
        if let Some(([tag, seqno @ ..], _)) = self.raw()[at..].split_first_chunk::<9>() {
            let packed = u64::from_le_bytes(*seqno);
            let len = (!packed & 0x8080_8080_8080_8080).trailing_zeros() as usize / 8 + 1;
            let value = at + 1 + len;
            if len <= 8 && value <= end {
                return Ok((*tag, SeqNo(unpack_varint(packed, len)), value));
            }
        }
        Err(Error::corruption("entry is too short for its tag and sequence number"))
    }

    /// Parses the entry from `at` to `end`.
    #[inline(always)]
    pub(crate) fn entry_at(&self, at: usize, end: usize) -> Result<FingerprintBlockEntry<'_>> {
        let (rest, tail) = self.rest_at(at)?;
        let (tag, seqno, value) = self.tail_at(tail, end)?;
        Ok(FingerprintBlockEntry { rest, seqno, tag, value: value..end })
    }

    /// Parses the `i`-th entry.
    #[inline]
    pub(crate) fn entry(&self, i: usize) -> Result<FingerprintBlockEntry<'_>> {
        self.entry_at(self.slot(i), self.end_of(i))
    }

    /// Number of entries before `target`.
    #[inline]
    pub(crate) fn entries_before(&self, target: InternalKey<'_>, order: &KeyOrder) -> Result<usize> {
        if !order.is_bytewise() {
            return self.entries_before_in_order(target, order);
        }
        let prefix = self.prefix();
        let (head, wanted) = target.user_key.split_at(prefix.len().min(target.user_key.len()));
        match head.cmp(prefix) {
            Ordering::Less => return Ok(0),
            Ordering::Greater => return Ok(self.count),
            Ordering::Equal => {}
        }
        let (mut low, mut high) = (0, self.count);
        if self.fences_at != 0 {
            let (start, end) = fence_range(&self.raw()[self.fences_at..], fence_of(wanted));
            low = if start == 0 { 0 } else { ENTRIES_PER_FENCE * (start - 1) + 1 };
            high = self.count.min(ENTRIES_PER_FENCE * end);
        }
        while low < high {
            let middle = low + (high - low) / 2;
            let (rest, tail) = self.rest(middle)?;
            // The first eight bytes decide most comparisons.
            let by_key = fence_of(rest).cmp(&fence_of(wanted)).then_with(|| rest.cmp(wanted));
            if by_key.is_lt() || (by_key.is_eq() && self.tail_at(tail, self.end_of(middle))?.1 > target.seqno) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        Ok(low)
    }

    fn entries_before_in_order(&self, target: InternalKey<'_>, order: &KeyOrder) -> Result<usize> {
        let mut key = self.prefix().to_vec();
        let (mut low, mut high) = (0, self.count);
        while low < high {
            let middle = low + (high - low) / 2;
            let entry = self.entry(middle)?;
            key.truncate(self.prefix.len());
            key.extend_from_slice(entry.rest);
            if InternalKey::new(&key, entry.seqno).cmp(&target, order).is_lt() {
                low = middle + 1
            } else {
                high = middle
            }
        }
        Ok(low)
    }

    fn located(&self, entry: FingerprintBlockEntry<'_>, same_key: bool) -> BlockLookup<'_> {
        BlockLookup { key_matches: same_key, seqno: entry.seqno, tag: entry.tag, value: self.bytes(entry.value) }
    }

    /// The first entry at or after `target`.
    pub(crate) fn lower_bound(&self, target: InternalKey<'_>, order: &KeyOrder) -> Result<Option<BlockLookup<'_>>> {
        let at = self.entries_before(target, order)?;
        if at == self.count {
            return Ok(None);
        }
        let entry = self.entry(at)?;
        let same_key = if order.equality_is_bytewise() {
            target.user_key.strip_prefix(self.prefix()) == Some(entry.rest)
        } else {
            order.cmp(&[self.prefix(), entry.rest].concat(), target.user_key).is_eq()
        };
        Ok(Some(self.located(entry, same_key)))
    }

    /// The newest version of the target's key that is not newer than the target. `hash` is the hash of the key.
    #[inline]
    pub(crate) fn lookup(
        &self,
        target: InternalKey<'_>,
        hash: u64,
        order: &KeyOrder,
    ) -> Result<Option<BlockLookup<'_>>> {
        if !order.equality_is_bytewise() {
            return self.lookup_with_comparator(target, hash, order);
        }
        let Some(wanted) = target.user_key.strip_prefix(self.prefix()) else { return Ok(None) };
        self.find_by_fingerprint(hash, |i| self.entry_if_match(i, wanted, target.seqno))
    }

    /// Looks up a key in an order in which keys with different bytes may be equal.
    #[inline(never)]
    fn lookup_with_comparator(
        &self,
        target: InternalKey<'_>,
        hash: u64,
        order: &KeyOrder,
    ) -> Result<Option<BlockLookup<'_>>> {
        let mut key = self.prefix().to_vec();
        self.find_by_fingerprint(hash, |i| {
            let entry = self.entry(i)?;
            key.truncate(self.prefix.len());
            key.extend_from_slice(entry.rest);
            let is_match = entry.seqno <= target.seqno && order.cmp(&key, target.user_key).is_eq();
            Ok(is_match.then(|| self.located(entry, true)))
        })
    }

    /// Prefetches the fingerprints and the slots.
    #[inline]
    pub(crate) fn prefetch_lookup(&self) {
        let len = (self.count * (1 + self.width)).min(SLOTS_FETCHED);
        prefetch(&self.raw()[self.entries_end..self.entries_end + len]);
    }

    /// Prefetches the first entry with the fingerprint of `hash`.
    #[inline]
    pub(crate) fn prefetch_entry(&self, hash: u64) {
        let wanted = fingerprint_of(hash);
        let lanes = &self.raw()[self.entries_end..];
        for first in (0..self.count).step_by(LANES) {
            let found = matches(&lanes[first..], wanted);
            if found != 0 {
                let i = first + found.trailing_zeros() as usize;
                if i < self.count {
                    let at = self.slot(i);
                    prefetch(&self.raw()[at..self.end_of(i).min(at + ENTRY_FETCHED)]);
                }
                return;
            }
        }
    }

    /// Calls `ask` for each entry with the fingerprint of `hash`, in order, until it returns a result. The versions
    /// of a key are ordered from newest to oldest, so the first version that is old enough is the result.
    #[inline(always)]
    fn find_by_fingerprint<'a>(
        &'a self,
        hash: u64,
        mut ask: impl FnMut(usize) -> Result<Option<BlockLookup<'a>>>,
    ) -> Result<Option<BlockLookup<'a>>> {
        let wanted = fingerprint_of(hash);
        // The slots follow the fingerprints, so there are nearly always enough bytes for a whole group of lanes.
        let lanes = &self.raw()[self.entries_end..];
        // The slots arrive while the fingerprints are compared.
        prefetch(&lanes[self.count..self.count + (self.width * self.count).min(SLOTS_FETCHED)]);
        let mut first = 0;
        while first < self.count {
            let mut found = matches(&lanes[first..], wanted);
            while found != 0 {
                let i = first + found.trailing_zeros() as usize;
                found &= found - 1;
                if i >= self.count {
                    return Ok(None);
                }
                if let Some(located) = ask(i)? {
                    return Ok(Some(located));
                }
            }
            first += LANES;
        }
        Ok(None)
    }

    /// The `i`-th entry, if its key without the prefix is `wanted` and the entry is not newer than `newest`.
    #[inline(always)]
    fn entry_if_match(&self, i: usize, wanted: &[u8], newest: SeqNo) -> Result<Option<BlockLookup<'_>>> {
        let (rest, tail) = self.rest(i)?;
        if rest != wanted {
            return Ok(None);
        }
        let end = self.end_of(i);
        let (tag, seqno, value) = self.tail_at(tail, end)?;
        let is_match = seqno <= newest;
        Ok(is_match.then(|| BlockLookup { key_matches: true, seqno, tag, value: self.bytes(value..end) }))
    }
}

/// Builds fingerprint blocks, one after another. The buffers are reused.
///
/// Entries are collected with their complete keys. The common prefix is known, and removed from the keys, when the
/// block is finished.
pub(crate) struct FingerprintBlockBuilder {
    out: Vec<u8>,
    slots: Vec<u32>,
    fingerprints: Vec<u8>,
    first_key: Vec<u8>,
    /// Length in bytes of the common prefix of all keys.
    common: usize,
}

impl FingerprintBlockBuilder {
    pub(crate) fn new() -> FingerprintBlockBuilder {
        let (out, slots, fingerprints, first_key) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        FingerprintBlockBuilder { out, slots, fingerprints, first_key, common: 0 }
    }

    /// Appends an entry. The caller adds entries in internal order, and starts a new block for a value that would end
    /// past 4 GiB. The fingerprint of a key that cannot be hashed is not used: lookups of it, and of every key that
    /// is equal to it, have no hash either and use binary search.
    pub(crate) fn add(&mut self, key: InternalKey<'_>, hash: Option<u64>, tag: u8, value: &[u8]) {
        debug_assert!(key.user_key.len() <= KEY_LEN_MAX && key.seqno <= SeqNo::MAX, "a reader accepts the entry");
        self.common = self.common_with(key.user_key);
        if self.slots.is_empty() {
            self.first_key.extend_from_slice(key.user_key);
        }
        self.slots.push(u32::try_from(self.out.len()).expect("a block of several entries is far below 4 GiB"));
        self.fingerprints.push(hash.map_or(0, fingerprint_of));
        put_varint(&mut self.out, key.user_key.len() as u64);
        self.out.extend_from_slice(key.user_key);
        self.out.push(tag);
        put_varint(&mut self.out, key.seqno.0);
        self.out.extend_from_slice(value);
    }

    fn common_with(&self, user_key: &[u8]) -> usize {
        if self.slots.is_empty() { user_key.len() } else { self.common.min(common_prefix(&self.first_key, user_key)) }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Current length of the block in bytes, or slightly more: keys of 128 bytes or more, and the slots of blocks
    /// above 64 KiB, may need fewer bytes once the prefix is removed.
    pub(crate) fn len(&self) -> usize {
        let last = self.slots.last().map_or(0, |last| *last as usize);
        len_of(self.out.len(), self.slots.len(), last, self.common)
    }

    /// Length of the block in bytes after one more entry, with the same inaccuracy as
    /// [`len`](FingerprintBlockBuilder::len).
    pub(crate) fn len_with(&self, key: InternalKey<'_>, value_len: usize) -> usize {
        let key_len = key.user_key.len();
        let entry = varint_len(key_len as u64) + key_len + 1 + varint_len(key.seqno.0) + value_len;
        len_of(self.out.len() + entry, self.slots.len() + 1, self.out.len(), self.common_with(key.user_key))
    }

    /// Returns the complete block. Call [`FingerprintBlockBuilder::clear`] before the next block.
    pub(crate) fn finish(&mut self) -> &[u8] {
        assert!(!self.slots.is_empty(), "an empty block is never written");
        debug_assert_eq!(self.slots.len(), self.fingerprints.len(), "each entry has a fingerprint");
        debug_assert!(self.common <= self.first_key.len(), "every key begins with the common prefix");
        let len = self.len();
        let prefix = prefix_of(self.slots.len(), self.common);
        if prefix > 0 {
            self.strip_prefix(prefix);
        }
        self.out.extend_from_slice(&self.fingerprints);
        let width = width_for(self.slots.last().map_or(0, |last| *last as usize));
        for slot in &self.slots {
            self.out.extend_from_slice(&slot.to_le_bytes()[..width]);
        }
        self.out.extend_from_slice(&self.first_key[..prefix]);
        self.out.extend_from_slice(&(self.slots.len() as u32).to_le_bytes());
        self.out.extend_from_slice(&(prefix as u16).to_le_bytes());
        self.out.extend_from_slice(&[width as u8, 0]);
        debug_assert!(self.slots.is_sorted_by(|a, b| a < b), "slots are ascending offsets");
        debug_assert!(self.out.len() <= len, "removing the prefix never makes a block longer than it was estimated");
        &self.out
    }

    /// Removes the first `prefix` bytes of every key, and closes the gaps between the entries.
    fn strip_prefix(&mut self, prefix: usize) {
        let (end, mut to) = (self.out.len(), 0);
        for i in 0..self.slots.len() {
            let at = self.slots[i] as usize;
            let next = self.slots.get(i + 1).map_or(end, |next| *next as usize);
            let mut d = ByteReader::new(&self.out[at..next]);
            let len = d.varint().expect("just written") as usize;
            let key_at = next - d.rest().len();
            debug_assert!(prefix <= len && to <= at, "entries move towards the start of the block");
            self.slots[i] = to as u32;
            let mut rest_len = len - prefix;
            while rest_len >= 0x80 {
                self.out[to] = rest_len as u8 | 0x80;
                (to, rest_len) = (to + 1, rest_len >> 7);
            }
            self.out[to] = rest_len as u8;
            debug_assert!(to < key_at + prefix, "a shorter length fits where the length was");
            self.out.copy_within(key_at + prefix..next, to + 1);
            to += 1 + next - key_at - prefix;
        }
        self.out.truncate(to);
    }

    pub(crate) fn clear(&mut self) {
        const KEPT: usize = 1 << 20;
        self.out.clear();
        self.out.shrink_to(KEPT);
        self.slots.clear();
        self.fingerprints.clear();
        self.first_key.clear();
    }
}

/// Length of the prefix that is removed. A single entry keeps its complete key, because there is no other key to
/// share it with.
fn prefix_of(count: usize, common: usize) -> usize {
    if count > 1 { common } else { 0 }
}

fn width_for(last_slot: usize) -> usize {
    if last_slot <= usize::from(u16::MAX) { NARROW } else { WIDE }
}

fn len_of(entries_len: usize, count: usize, last_slot: usize, common: usize) -> usize {
    let prefix = prefix_of(count, common);
    let saved = prefix * count.saturating_sub(1);
    entries_len - saved + count * (1 + width_for(last_slot)) + TRAILER_LEN
}
