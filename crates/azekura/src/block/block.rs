//! A loaded block of entries: checked at its ends when it is loaded, and entry by entry as it is read.

use std::cmp::Ordering;
use std::ops::Range;

use crate::base::coding::Decoder;
use crate::base::key::KEY_LEN_MAX;
use crate::base::{Error, KeyOrder, KeyRef, Result, SeqNo};
use crate::block::frame::Body;

/// Restart count, entry count, flags and zeros at the end of a block, in bytes.
pub(crate) const TRAILER_LEN: usize = 12;

/// A block of entries in memory, immutable.
///
/// Behind the block as it was stored lie its **fences**, made at load: for each restart key the eight bytes behind the
/// prefix that all restart keys share, as one number, and that prefix. In byte order a search among them is a few
/// comparisons of numbers in one or two cache lines, where a search among the keys would touch two lines for each.
pub(crate) struct Block {
    /// Maybe a frame's header, the block, fences, prefix.
    bytes: Vec<u8>,
    /// Where the block begins; all other places count from here.
    start: usize,
    /// Where the entries end and the restarts begin.
    entries_end: usize,
    restarts: usize,
    count: usize,
    /// 0: there are none.
    fences_at: usize,
}

/// An entry as it lies in the block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parsed<'a> {
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

/// The first entry at or behind a target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Located<'a> {
    /// Whether its user key equals the target's.
    pub(crate) same_key: bool,
    pub(crate) seqno: SeqNo,
    pub(crate) tag: u8,
    pub(crate) value: &'a [u8],
}

impl<'a> Located<'a> {
    fn new(entry: &Parsed<'a>, same_key: bool) -> Located<'a> {
        Located { same_key, seqno: entry.seqno, tag: entry.tag, value: entry.value }
    }
}

impl std::fmt::Debug for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Block({} entries)", self.count)
    }
}

impl Block {
    /// Checks the trailer and the restarts.
    ///
    /// # Errors
    /// `Corruption` if they cannot be, `Unsupported` for flags of a newer version.
    pub(crate) fn decode(body: Body) -> Result<Block> {
        let Some((front, trailer)) = body.split_last_chunk::<TRAILER_LEN>() else {
            return Err(Error::corruption("block is shorter than its trailer"));
        };
        let mut d = Decoder::new(trailer);
        let (restarts, count, flags) = (d.u32()? as usize, d.u32()? as usize, d.u32()?);
        if flags != 0 {
            return Err(Error::unsupported(format!("block flags {flags:#x} need a newer version")));
        }
        let entries_end = restarts.checked_mul(4).and_then(|len| front.len().checked_sub(len));
        let entries_end = entries_end.ok_or_else(|| Error::corruption("block has more restarts than bytes"))?;
        let mut before = None;
        for bytes in front[entries_end..].chunks_exact(4) {
            let restart = u32::from_le_bytes(bytes.try_into().expect("four bytes"));
            if before.map_or(restart != 0, |b| b >= restart) || restart as usize >= entries_end {
                return Err(Error::corruption("restarts of a block do not ascend within it"));
            }
            before = Some(restart);
        }
        if restarts == 0 || count < restarts {
            return Err(Error::corruption("block has fewer entries than restarts, or none"));
        }
        let (bytes, start) = body.into_parts();
        let mut block = Block { bytes, start, entries_end, restarts, count, fences_at: 0 };
        if restarts > 1 {
            block.put_fences()?;
        }
        Ok(block)
    }

    fn put_fences(&mut self) -> Result<()> {
        let (first, last) = (self.parse_restart(0)?.rest, self.parse_restart(self.restarts - 1)?.rest);
        let prefix = first[..common_prefix(first, last)].to_vec();
        let mut fences = Vec::with_capacity(8 * self.restarts + prefix.len());
        for i in 0..self.restarts {
            let key = self.parse_restart(i)?.rest;
            fences.extend_from_slice(&fence_of(key.get(prefix.len()..).unwrap_or_default()).to_le_bytes());
        }
        fences.extend_from_slice(&prefix);
        self.fences_at = self.bytes.len() - self.start;
        self.bytes.reserve_exact(fences.len());
        self.bytes.extend_from_slice(&fences);
        Ok(())
    }

    /// Entries, as the trailer says.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Memory held, in bytes.
    pub(crate) fn memory(&self) -> usize {
        self.bytes.capacity() + size_of::<Block>()
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

    /// The entry at `at`, which must be where an entry begins.
    #[inline]
    pub(crate) fn parse(&self, at: usize) -> Result<Parsed<'_>> {
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
                return Ok(Parsed {
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

    fn parse_long<'a>(&'a self, bytes: &'a [u8]) -> Result<Parsed<'a>> {
        let mut d = Decoder::new(bytes);
        let (shared, unshared, value_len) = (d.varint_u32()? as usize, d.varint_u32()? as usize, d.varint_u32()?);
        let tag = d.u8()?;
        let seqno = SeqNo(d.varint()?);
        let rest = d.take(unshared)?;
        let value = d.take(value_len as usize)?;
        if shared.saturating_add(unshared) > KEY_LEN_MAX || seqno > SeqNo::MAX {
            return Err(Error::corruption("entry is longer or later than any can be"));
        }
        Ok(Parsed { shared, rest, seqno, tag, value, next: self.entries_end - d.rest().len() })
    }

    /// The entry at the `i`-th restart; its key is whole.
    #[inline]
    pub(crate) fn parse_restart(&self, i: usize) -> Result<Parsed<'_>> {
        let entry = self.parse(self.restart(i))?;
        if entry.shared == 0 { Ok(entry) } else { Err(Error::corruption("restart entry has no whole key")) }
    }

    /// How many restart entries stand before `target`.
    #[inline]
    pub(crate) fn restarts_before(&self, target: KeyRef<'_>, order: &KeyOrder) -> Result<usize> {
        let fenced = self.fences_at != 0 && order.is_bytewise();
        let (mut low, mut high) = if fenced { self.between_fences(target.user) } else { (0, self.restarts) };
        while low < high {
            let middle = low + (high - low) / 2;
            let entry = self.parse_restart(middle)?;
            match KeyRef::new(entry.rest, entry.seqno).cmp(&target, order) {
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
        let (fences, prefix) = self.raw()[self.fences_at..].split_at(8 * self.restarts);
        let (head, rest) = user.split_at(prefix.len().min(user.len()));
        match head.cmp(prefix) {
            Ordering::Less => (0, 0),
            Ordering::Greater => (self.restarts, self.restarts),
            Ordering::Equal => {
                let wanted = fence_of(rest);
                let low = fences_before(fences, |fence| fence < wanted);
                let equal = fence_at(fences, low) == Some(wanted);
                (low, if equal { fences_before(fences, |fence| fence <= wanted) } else { low })
            }
        }
    }

    /// The first entry at or behind `target`.
    #[inline]
    pub(crate) fn locate(&self, target: KeyRef<'_>, order: &KeyOrder) -> Result<Option<Located<'_>>> {
        let before = self.restarts_before(target, order)?;
        if self.restarts == self.count || before == 0 {
            if before == self.restarts {
                return Ok(None);
            }
            let entry = self.parse_restart(before)?;
            return Ok(Some(Located::new(&entry, order.cmp(entry.rest, target.user).is_eq())));
        }
        let from = self.restart(before - 1);
        if order.is_bytewise() { self.scan_bytes(from, target) } else { self.scan_keys(from, target, order) }
    }

    /// Walks on from a restart entry before `target`, in byte order, without putting any key together: it is enough to
    /// know how many bytes of the target the key before had.
    fn scan_bytes(&self, from: usize, target: KeyRef<'_>) -> Result<Option<Located<'_>>> {
        let (mut at, mut matched) = (from, 0);
        while at < self.entries_end {
            let entry = self.parse(at)?;
            at = entry.next;
            if entry.shared > matched {
                continue; // differs from the target where the smaller key before it did
            }
            let tail = &target.user[entry.shared..];
            let common = common_prefix(entry.rest, tail);
            match (entry.rest.get(common), tail.get(common)) {
                (None, None) if entry.seqno <= target.seqno => return Ok(Some(Located::new(&entry, true))),
                (Some(_), None) => return Ok(Some(Located::new(&entry, false))),
                (Some(mine), Some(wanted)) if mine > wanted => return Ok(Some(Located::new(&entry, false))),
                _ => matched = entry.shared + common,
            }
        }
        Ok(None)
    }

    /// The same in any order.
    fn scan_keys(&self, from: usize, target: KeyRef<'_>, order: &KeyOrder) -> Result<Option<Located<'_>>> {
        let (mut at, mut key) = (from, Vec::new());
        while at < self.entries_end {
            let entry = self.parse(at)?;
            at = entry.next;
            put_key(&mut key, &entry)?;
            let by_user = order.cmp(&key, target.user);
            if by_user.then_with(|| target.seqno.cmp(&entry.seqno)).is_ge() {
                return Ok(Some(Located::new(&entry, by_user.is_eq())));
            }
        }
        Ok(None)
    }
}

/// The first eight bytes as a number in their order; what is missing counts as zero.
#[inline]
fn fence_of(bytes: &[u8]) -> u64 {
    match bytes.first_chunk::<8>() {
        Some(head) => u64::from_be_bytes(*head),
        None => {
            let mut head = [0; 8];
            head[..bytes.len()].copy_from_slice(bytes);
            u64::from_be_bytes(head)
        }
    }
}

#[inline]
fn fence_at(fences: &[u8], i: usize) -> Option<u64> {
    fences.get(8 * i..8 * i + 8).map(|bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
}

/// How many fences are on the near side; there is at least one fence.
#[inline]
fn fences_before(fences: &[u8], near: impl Fn(u64) -> bool) -> usize {
    let (mut base, mut size) = (0, fences.len() / 8);
    let is_near = |i| fence_at(fences, i).is_some_and(&near);
    while size > 1 {
        let half = size / 2;
        base = if is_near(base + half) { base + half } else { base };
        size -= half;
    }
    base + usize::from(is_near(base))
}

/// The value of a varint of `len` bytes, 1..=8, at the low end of `packed`.
#[inline]
fn unpack_varint(packed: u64, len: usize) -> u64 {
    let x = packed & (u64::MAX >> (64 - 8 * len)) & 0x7f7f_7f7f_7f7f_7f7f;
    let x = (x & 0x007f_007f_007f_007f) | ((x & 0x7f00_7f00_7f00_7f00) >> 1);
    let x = (x & 0x0000_3fff_0000_3fff) | ((x & 0x3fff_0000_3fff_0000) >> 2);
    (x & 0x0fff_ffff) | ((x & 0x0fff_ffff_0000_0000) >> 4)
}

/// Makes `key`, which held the key before, that of `entry`.
#[inline]
pub(crate) fn put_key(key: &mut Vec<u8>, entry: &Parsed<'_>) -> Result<()> {
    if entry.shared > key.len() {
        return Err(Error::corruption("entry shares more of a key than there is"));
    }
    key.truncate(entry.shared);
    key.extend_from_slice(entry.rest);
    Ok(())
}

/// The length of the longest common prefix.
#[inline]
pub(crate) fn common_prefix(a: &[u8], b: &[u8]) -> usize {
    let len = a.len().min(b.len());
    let mut at = 0;
    while let (Some(x), Some(y)) = (a[at..len].first_chunk::<8>(), b[at..len].first_chunk::<8>()) {
        let differ = u64::from_le_bytes(*x) ^ u64::from_le_bytes(*y);
        if differ != 0 {
            return at + differ.trailing_zeros() as usize / 8;
        }
        at += 8;
    }
    at + a[at..len].iter().zip(&b[at..len]).take_while(|(x, y)| x == y).count()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use super::*;
    use crate::base::comparator::Comparator;
    use crate::block::{BlockBuilder, BlockCursor};

    struct Random(u64);

    impl Random {
        fn below(&mut self, n: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 >> 11) % n
        }
    }

    /// Compares as bytes, but is not known to.
    struct Opaque;
    impl Comparator for Opaque {
        fn name(&self) -> &str {
            "opaque"
        }
        fn compare(&self, a: &[u8], b: &[u8]) -> Ordering {
            a.cmp(b)
        }
    }

    /// Keys with common prefixes, the empty key and several versions of some.
    fn entries(n: u64, random: &mut Random) -> Vec<(Vec<u8>, u64, Vec<u8>)> {
        let mut map = BTreeMap::new();
        for _ in 0..n {
            let len = random.below(6) as usize;
            let key: Vec<u8> = (0..len).map(|_| b'a' + random.below(3) as u8).collect();
            let seqno = random.below(40);
            let value = vec![random.below(256) as u8; random.below(200) as usize];
            map.insert((key, u64::MAX - seqno), value);
        }
        map.into_iter().map(|((key, seqno), value)| (key, u64::MAX - seqno, value)).collect()
    }

    fn block_of(entries: &[(Vec<u8>, u64, Vec<u8>)], interval: u8) -> Arc<Block> {
        let mut builder = BlockBuilder::new(interval);
        for (key, seqno, value) in entries {
            let key = KeyRef::new(key, SeqNo(*seqno));
            let expected = builder.len_with(key, value.len());
            builder.add(key, value.len() as u8, value);
            assert_eq!(builder.len(), expected);
        }
        let bytes = builder.finish().to_vec();
        Arc::new(Block::decode(Body::from(bytes)).unwrap())
    }

    #[test]
    fn every_target_is_found_in_every_way() {
        let mut random = Random(88);
        for round in 0..60 {
            let entries = entries(1 + random.below(60), &mut random);
            let interval = [1, 2, 3, 16][round % 4];
            let block = block_of(&entries, interval);
            assert_eq!(block.count(), entries.len());
            let order = if round % 2 == 0 { KeyOrder::bytewise() } else { KeyOrder::custom(Arc::new(Opaque)) };
            let mut cursor = BlockCursor::new(Arc::clone(&block));
            let mut targets: Vec<(Vec<u8>, u64)> = entries.iter().map(|(k, s, _)| (k.clone(), *s)).collect();
            for _ in 0..100 {
                let len = random.below(7) as usize;
                targets.push(((0..len).map(|_| b'`' + random.below(5) as u8).collect(), random.below(42)));
            }
            for (user, seqno) in &targets {
                let target = KeyRef::new(user, SeqNo(*seqno));
                let at = entries.partition_point(|(k, s, _)| KeyRef::new(k, SeqNo(*s)).cmp(&target, &order).is_lt());
                let located = block.locate(target, &order).unwrap();
                cursor.seek(target, &order).unwrap();
                match entries.get(at) {
                    None => assert!(located.is_none() && !cursor.valid()),
                    Some((key, seqno, value)) => {
                        let located = located.unwrap();
                        assert_eq!((located.seqno, located.value), (SeqNo(*seqno), value.as_slice()));
                        assert_eq!(located.same_key, key == user);
                        assert_eq!((cursor.key(), cursor.value()), (KeyRef::new(key, SeqNo(*seqno)), value.as_slice()));
                    }
                }
                cursor.seek_before(target, &order).unwrap();
                assert_eq!(cursor.valid(), at > 0);
                if at > 0 {
                    assert_eq!(cursor.key(), KeyRef::new(&entries[at - 1].0, SeqNo(entries[at - 1].1)));
                }
            }
        }
    }

    #[test]
    fn walks_both_ways_and_turns() {
        let mut random = Random(7);
        let entries = entries(50, &mut random);
        for interval in [1, 4, 16] {
            let mut cursor = BlockCursor::new(block_of(&entries, interval));
            cursor.seek_to_last().unwrap();
            let mut at = entries.len() - 1;
            for _ in 0..2000 {
                assert_eq!((cursor.key().user, cursor.value()), (&*entries[at].0, &*entries[at].2));
                let forward = random.below(2) == 0;
                if forward {
                    cursor.next().unwrap()
                } else {
                    cursor.prev().unwrap()
                }
                match at.checked_add_signed(if forward { 1 } else { -1 }).filter(|at| *at < entries.len()) {
                    Some(next) => at = next,
                    None => {
                        assert!(!cursor.valid());
                        if forward { cursor.seek_to_last().unwrap() } else { cursor.seek_to_first().unwrap() }
                    }
                }
            }
        }
    }

    /// Walks and searches a block that may be anything; only errors are allowed to come of it.
    fn exercise(bytes: Vec<u8>) {
        let Ok(block) = Block::decode(Body::from(bytes)) else { return };
        let block = Arc::new(block);
        for order in [KeyOrder::bytewise(), KeyOrder::custom(Arc::new(Opaque))] {
            let mut cursor = BlockCursor::new(Arc::clone(&block));
            for user in [&b""[..], b"abc", b"b", b"cccccc", &[255; 9]] {
                let target = KeyRef::new(user, SeqNo(20));
                let _ = block.locate(target, &order);
                let _ = cursor.seek(target, &order);
                let _ = cursor.seek_before(target, &order);
            }
            let mut steps = cursor.seek_to_first().is_ok() as usize;
            while cursor.valid() && cursor.next().is_ok() {
                steps += 1;
            }
            assert!(steps <= block.end());
            steps = cursor.seek_to_last().is_ok() as usize;
            while cursor.valid() && cursor.prev().is_ok() {
                steps += 1;
            }
            assert!(steps <= block.end() + 1);
        }
    }

    #[test]
    fn damaged_and_random_blocks_give_errors_at_worst() {
        let mut random = Random(5);
        let mut builder = BlockBuilder::new(3);
        for (key, seqno, value) in entries(40, &mut random) {
            builder.add(KeyRef::new(&key, SeqNo(seqno)), 1, &value[..value.len() / 10]);
        }
        let good = builder.finish().to_vec();
        for at in 0..good.len() {
            for change in [1, 0x80, 0xff] {
                let mut bad = good.clone();
                bad[at] ^= change;
                exercise(bad);
            }
            exercise(good[..at].to_vec());
            exercise(good[at..].to_vec());
        }
        for _ in 0..3000 {
            let len = random.below(120) as usize;
            let mut bytes: Vec<u8> = (0..len).map(|_| random.below(256) as u8 >> random.below(8)).collect();
            bytes.extend_from_slice(&0u32.to_le_bytes());
            bytes.extend_from_slice(&[1 + random.below(2) as u8, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]);
            exercise(bytes);
        }
    }

    #[test]
    fn reserved_flags_are_unsupported() {
        let mut bytes = block_of(&[(vec![1], 2, vec![3])], 1).raw().to_vec();
        let at = bytes.len() - 4;
        bytes[at] = 1;
        assert_eq!(Block::decode(Body::from(bytes)).unwrap_err().kind(), crate::base::ErrorKind::Unsupported);
    }

    #[test]
    fn packed_varints_are_what_the_decoder_reads() {
        for shift in 0..56 {
            for value in [(1u64 << shift) - 1, 1 << shift, (1 << 56) - 1, 0x5A_5A5A_5A5A_5A5A >> (55 - shift)] {
                let mut bytes = Vec::new();
                crate::base::coding::put_varint(&mut bytes, value);
                let len = bytes.len();
                bytes.resize(8, 0xff);
                assert_eq!(unpack_varint(u64::from_le_bytes(bytes.try_into().unwrap()), len), value);
            }
        }
    }

    #[test]
    fn common_prefixes_of_every_length() {
        for len in 0..40usize {
            let a: Vec<u8> = (0..40).collect();
            let mut b = a.clone();
            assert_eq!(common_prefix(&a, &b[..len]), len);
            b[len] ^= 0x80;
            assert_eq!(common_prefix(&a, &b), len);
        }
    }
}
