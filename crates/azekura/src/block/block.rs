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
#[derive(Debug)]
pub(crate) struct Block {
    body: Body,
    /// Where the entries end and the restarts begin.
    entries_end: usize,
    restarts: usize,
    count: usize,
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
        Ok(Block { body, entries_end, restarts, count })
    }

    /// Entries, as the trailer says.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Memory held, in bytes.
    pub(crate) fn memory(&self) -> usize {
        self.body.memory() + size_of::<Block>()
    }

    /// Bytes of the block.
    #[inline]
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.body[range]
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
        u32::from_le_bytes(self.body[at..at + 4].try_into().expect("four bytes")) as usize
    }

    /// The entry at `at`, which must be where an entry begins.
    #[inline]
    pub(crate) fn parse(&self, at: usize) -> Result<Parsed<'_>> {
        let bytes = &self.body[at..self.entries_end];
        let (shared, unshared, value_len, mut d) = match bytes {
            // One byte each: keys and values below 128 bytes.
            [s @ 0..0x80, u @ 0..0x80, v @ 0..0x80, rest @ ..] => {
                (usize::from(*s), usize::from(*u), usize::from(*v), Decoder::new(rest))
            }
            _ => {
                let mut d = Decoder::new(bytes);
                let (shared, unshared, value_len) = (d.varint_u32()?, d.varint_u32()?, d.varint_u32()?);
                (shared as usize, unshared as usize, value_len as usize, d)
            }
        };
        let tag = d.u8()?;
        let seqno = SeqNo(d.varint()?);
        let rest = d.take(unshared)?;
        let value = d.take(value_len)?;
        if shared + unshared > KEY_LEN_MAX || seqno > SeqNo::MAX {
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
        let (mut low, mut high) = (0, self.restarts);
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
        let mut bytes = block_of(&[(vec![1], 2, vec![3])], 1).body.to_vec();
        let at = bytes.len() - 4;
        bytes[at] = 1;
        assert_eq!(Block::decode(Body::from(bytes)).unwrap_err().kind(), crate::base::ErrorKind::Unsupported);
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
