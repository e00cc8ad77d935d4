//! Blocks with offset slots and fingerprints: every entry is reached at once, by its number or by its key's hash.

use std::cmp::Ordering;
use std::ops::Range;

use crate::base::coding::{ByteReader, put_varint, varint_len};
use crate::base::key::KEY_LEN_MAX;
use crate::base::{Error, InternalKey, KeyOrder, Result, SeqNo};
use crate::block::frame::BlockContents;
use crate::block::search::{BlockLookup, common_prefix, fence_of, fence_range, unpack_varint};
use crate::mem::buffer_pool::Buffer;
use crate::mem::simd::{LANES, matches, prefetch};

/// Entry count, length of the prefix, width of a slot and flags at the end of a block, in bytes.
const TRAILER_LEN: usize = 8;
const NARROW: usize = 2;
const WIDE: usize = 4;
/// Bytes of slots that are asked for beforehand; blocks of 16 KiB with records of 100 bytes have half as many.
const SLOTS_FETCHED: usize = 512;
/// Number of entries per fence: the memory of a fence is one byte for each entry.
const ENTRIES_PER_FENCE: usize = 8;

/// A block of entries with slots in memory, immutable. All keys begin with its prefix, which is stored once.
///
/// Behind the block as it was stored lie the fences of every eighth entry, made at load, of what follows the prefix.
pub(crate) struct FingerprintBlock {
    /// Maybe a frame's header, the block, fences.
    bytes: Buffer,
    /// Where the block begins; all other places count from here.
    start: usize,
    count: usize,
    /// Where the entries end and the fingerprints begin.
    entries_end: usize,
    /// Of one slot, in bytes.
    width: usize,
    /// A key behind the prefix has its length in one byte if it is not longer.
    short: usize,
    prefix: Range<usize>,
    /// 0: there are none.
    fences_at: usize,
}

/// The fingerprint of a key with that hash: one byte. Filters take other bits of it.
#[inline]
fn fingerprint_of(hash: u64) -> u8 {
    hash as u8
}

/// An entry as it lies in the block.
#[derive(Clone, Debug)]
pub(crate) struct FingerprintBlockEntry<'a> {
    /// The key behind the prefix.
    pub(crate) rest: &'a [u8],
    pub(crate) seqno: SeqNo,
    pub(crate) tag: u8,
    pub(crate) value: Range<usize>,
}

impl FingerprintBlock {
    /// Checks the trailer and the slots.
    ///
    /// # Errors
    /// `Corruption` if they cannot be, `Unsupported` for flags of a newer version.
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
            return Err(Error::corruption("block has no entries, or slots of no width"));
        }
        let behind = count.checked_mul(1 + width).and_then(|len| len.checked_add(prefix_len));
        let entries_end = behind.and_then(|len| front.len().checked_sub(len));
        let entries_end = entries_end.ok_or_else(|| Error::corruption("block has more slots than bytes"))?;
        let prefix = front.len() - prefix_len..front.len();
        let (bytes, start) = body.into_parts();
        let short = KEY_LEN_MAX.saturating_sub(prefix_len).min(0x7f);
        let mut block = FingerprintBlock { bytes, start, count, entries_end, width, short, prefix, fences_at: 0 };
        let mut before = 0;
        for i in 0..count {
            let at = block.slot(i);
            if (i == 0) != (at == 0) || (i > 0 && at <= before) || at >= entries_end {
                return Err(Error::corruption("slots of a block do not ascend within its entries"));
            }
            before = at;
        }
        if count > ENTRIES_PER_FENCE {
            block.put_fences()?;
        }
        Ok(block)
    }

    fn put_fences(&mut self) -> Result<()> {
        let mut fences = Vec::with_capacity(8 * self.count.div_ceil(ENTRIES_PER_FENCE));
        for i in (0..self.count).step_by(ENTRIES_PER_FENCE) {
            fences.extend_from_slice(&fence_of(self.rest(i)?.0).to_le_bytes());
        }
        self.fences_at = self.bytes.len() - self.start;
        self.bytes.extend_from_slice(&fences);
        Ok(())
    }

    /// Entries.
    #[inline]
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Memory held on the heap, in bytes.
    pub(crate) fn heap(&self) -> usize {
        self.bytes.capacity()
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

    /// What every key begins with.
    #[inline]
    pub(crate) fn prefix(&self) -> &[u8] {
        &self.raw()[self.prefix.clone()]
    }

    #[inline]
    pub(crate) fn prefix_len(&self) -> usize {
        self.prefix.len()
    }

    /// Where the `i`-th entry begins.
    #[inline]
    pub(crate) fn slot(&self, i: usize) -> usize {
        let at = self.entries_end + self.count + self.width * i;
        let slots = &self.raw()[at..];
        if self.width == NARROW {
            usize::from(u16::from_le_bytes(*slots.first_chunk().expect("slots are followed by the trailer")))
        } else {
            u32::from_le_bytes(*slots.first_chunk().expect("slots are followed by the trailer")) as usize
        }
    }

    /// Where the entries end.
    #[inline]
    pub(crate) fn end(&self) -> usize {
        self.entries_end
    }

    /// Where the `i`-th entry ends.
    #[inline]
    pub(crate) fn end_of(&self, i: usize) -> usize {
        if i + 1 < self.count { self.slot(i + 1) } else { self.entries_end }
    }

    /// The key of the `i`-th entry behind the prefix, and where the tag behind it is.
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
            return Err(Error::corruption("key is longer than any can be"));
        }
        Ok((rest, self.entries_end - d.rest().len()))
    }

    /// Tag and sequence number at `at`, and where the value behind them begins; the entry ends at `end`.
    #[inline(always)]
    fn tail_at(&self, at: usize, end: usize) -> Result<(u8, SeqNo, usize)> {
        // Behind the last entry there is always the trailer: eight bytes can be taken from anywhere in the entries.
        if let Some(([tag, seqno @ ..], _)) = self.raw()[at..].split_first_chunk::<9>() {
            let packed = u64::from_le_bytes(*seqno);
            let len = (!packed & 0x8080_8080_8080_8080).trailing_zeros() as usize / 8 + 1;
            let value = at + 1 + len;
            if len <= 8 && value <= end {
                return Ok((*tag, SeqNo(unpack_varint(packed, len)), value));
            }
        }
        Err(Error::corruption("entry has no tag or no sequence number, or ends before them"))
    }

    /// The entry from `at` to `end`.
    #[inline(always)]
    pub(crate) fn entry_at(&self, at: usize, end: usize) -> Result<FingerprintBlockEntry<'_>> {
        let (rest, tail) = self.rest_at(at)?;
        let (tag, seqno, value) = self.tail_at(tail, end)?;
        Ok(FingerprintBlockEntry { rest, seqno, tag, value: value..end })
    }

    /// The `i`-th entry.
    #[inline]
    pub(crate) fn entry(&self, i: usize) -> Result<FingerprintBlockEntry<'_>> {
        self.entry_at(self.slot(i), self.end_of(i))
    }

    /// How many entries stand before `target`.
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
            let (before, behind) = fence_range(&self.raw()[self.fences_at..], fence_of(wanted));
            low = if before == 0 { 0 } else { ENTRIES_PER_FENCE * (before - 1) + 1 };
            high = self.count.min(ENTRIES_PER_FENCE * behind);
        }
        while low < high {
            let middle = low + (high - low) / 2;
            let (rest, tail) = self.rest(middle)?;
            // Most are told apart by their first eight bytes.
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

    /// The first entry at or behind `target`.
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

    /// The newest version of the target's key, which has that hash, that is not newer than the target.
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

    /// The same where keys of different bytes may be equal.
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
            let is_it = entry.seqno <= target.seqno && order.cmp(&key, target.user_key).is_eq();
            Ok(is_it.then(|| self.located(entry, true)))
        })
    }

    /// Asks the entries with the fingerprint of that hash, in their order. The versions of a key stand newest first, so
    /// the first that is old enough is the one.
    #[inline(always)]
    fn find_by_fingerprint<'a>(
        &'a self,
        hash: u64,
        mut ask: impl FnMut(usize) -> Result<Option<BlockLookup<'a>>>,
    ) -> Result<Option<BlockLookup<'a>>> {
        let wanted = fingerprint_of(hash);
        // Slots follow the fingerprints, so that nearly always there are bytes for whole groups.
        let lanes = &self.raw()[self.entries_end..];
        // They arrive while fingerprints are compared.
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

    /// The `i`-th entry, if what follows the prefix in its key is `wanted` and it is not newer than `newest`.
    #[inline(always)]
    fn entry_if_match(&self, i: usize, wanted: &[u8], newest: SeqNo) -> Result<Option<BlockLookup<'_>>> {
        let (rest, tail) = self.rest(i)?;
        if rest != wanted {
            return Ok(None);
        }
        let end = self.end_of(i);
        let (tag, seqno, value) = self.tail_at(tail, end)?;
        let is_it = seqno <= newest;
        Ok(is_it.then(|| BlockLookup { key_matches: true, seqno, tag, value: self.bytes(value..end) }))
    }
}

/// Builds one block with slots after the other; its buffers are kept from block to block.
///
/// Entries are collected with their whole keys; what all keys begin with is known, and taken out, at the end.
pub(crate) struct FingerprintBlockBuilder {
    out: Vec<u8>,
    slots: Vec<u32>,
    fingerprints: Vec<u8>,
    first_key: Vec<u8>,
    /// How many bytes all keys begin with.
    common: usize,
}

impl FingerprintBlockBuilder {
    pub(crate) fn new() -> FingerprintBlockBuilder {
        let (out, slots, fingerprints, first_key) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        FingerprintBlockBuilder { out, slots, fingerprints, first_key, common: 0 }
    }

    /// Appends an entry; the caller keeps internal order, and gives a value that reaches past 4 GiB a block of its own.
    /// A key that cannot be hashed has any fingerprint: it is found by its order, and so is every key that equals it.
    pub(crate) fn add(&mut self, key: InternalKey<'_>, hash: Option<u64>, tag: u8, value: &[u8]) {
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

    fn common_with(&self, user: &[u8]) -> usize {
        if self.slots.is_empty() { user.len() } else { self.common.min(common_prefix(&self.first_key, user)) }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The length of the block as it stands, in bytes, or a little more: keys of 128 bytes and more, and the last slots
    /// of blocks of more than 64 KiB, may take less once the prefix is out.
    pub(crate) fn len(&self) -> usize {
        let last = self.slots.last().map_or(0, |last| *last as usize);
        len_of(self.out.len(), self.slots.len(), last, self.common)
    }

    /// The same with one more entry.
    pub(crate) fn len_with(&self, key: InternalKey<'_>, value_len: usize) -> usize {
        let key_len = key.user_key.len();
        let entry = varint_len(key_len as u64) + key_len + 1 + varint_len(key.seqno.0) + value_len;
        len_of(self.out.len() + entry, self.slots.len() + 1, self.out.len(), self.common_with(key.user_key))
    }

    /// The whole block, which must not be empty; call [`FingerprintBlockBuilder::clear`] before the next one.
    pub(crate) fn finish(&mut self) -> &[u8] {
        assert!(!self.slots.is_empty(), "an empty block is never written");
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
        &self.out
    }

    /// Takes the first bytes out of every key, and moves the entries together.
    fn strip_prefix(&mut self, prefix: usize) {
        let (end, mut to) = (self.out.len(), 0);
        for i in 0..self.slots.len() {
            let at = self.slots[i] as usize;
            let next = self.slots.get(i + 1).map_or(end, |next| *next as usize);
            let mut d = ByteReader::new(&self.out[at..next]);
            let len = d.varint().expect("just written") as usize;
            let key_at = next - d.rest().len();
            self.slots[i] = to as u32;
            let mut rest_len = len - prefix;
            while rest_len >= 0x80 {
                self.out[to] = rest_len as u8 | 0x80;
                (to, rest_len) = (to + 1, rest_len >> 7);
            }
            self.out[to] = rest_len as u8; // never longer than the length that stood here
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

/// One entry keeps its whole key: there is nothing to share.
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
