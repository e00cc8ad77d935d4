//! A loaded block of entries, of any layout.

use std::ops::Range;
use std::sync::Arc;

use crate::base::shared_bytes::{BytesOwner, SHARED_LEN_MIN, SharedBytes};
use crate::base::{InternalKey, KeyOrder, Result};
use crate::block::fingerprint_block::FingerprintBlock;
use crate::block::frame::BlockContents;
use crate::block::frame::BlockKind;
use crate::block::restart_block::RestartBlock;
use crate::block::search::BlockLookup;
use crate::mem::simd::prefetch;

/// Maximum number of bytes that are prefetched at the beginning of a block. In a longer block the hardware prefetcher
/// follows the iteration from there.
const PREFETCHED_MAX: usize = 4 << 10;

/// An immutable block of entries in memory.
pub(crate) enum Block {
    /// Restart points, with or without a hash index.
    Restart(RestartBlock),
    /// Offset slots and fingerprints.
    Fingerprint(FingerprintBlock),
}

impl std::fmt::Debug for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Block({} entries)", self.count())
    }
}

impl BytesOwner for Block {
    fn bytes(&self) -> &[u8] {
        self.entries()
    }
}

impl Block {
    /// Decodes a block. The kind of the contents determines the layout. Checks everything that can be checked without
    /// reading all entries.
    ///
    /// # Errors
    /// `Corruption` if the block is malformed, `Unsupported` if a newer version wrote it.
    pub(crate) fn decode(body: BlockContents) -> Result<Block> {
        match body.kind() {
            BlockKind::FingerprintData => FingerprintBlock::decode(body).map(Block::Fingerprint),
            _ => RestartBlock::decode(body).map(Block::Restart),
        }
    }

    /// Number of entries, as stored in the trailer.
    pub(crate) fn count(&self) -> usize {
        match self {
            Block::Restart(block) => block.count(),
            Block::Fingerprint(block) => block.count(),
        }
    }

    /// Memory use in bytes.
    pub(crate) fn memory(&self) -> usize {
        let heap = match self {
            Block::Restart(block) => block.heap(),
            Block::Fingerprint(block) => block.heap(),
        };
        heap + size_of::<Block>()
    }

    /// The bytes of a range of the block.
    #[inline]
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        match self {
            Block::Restart(block) => block.bytes(range),
            Block::Fingerprint(block) => block.bytes(range),
        }
    }

    /// Prefetches the bytes of the block, before an iteration over it.
    #[inline]
    pub(crate) fn prefetch(&self) {
        let bytes = self.entries();
        prefetch(&bytes[..bytes.len().min(PREFETCHED_MAX)]);
    }

    /// Prefetches what [`lookup`](Block::lookup) reads first.
    #[inline]
    pub(crate) fn prefetch_lookup(&self) {
        match self {
            Block::Restart(block) => block.prefetch_lookup(),
            Block::Fingerprint(block) => block.prefetch_lookup(),
        }
    }

    /// Prefetches the entry that [`lookup`](Block::lookup) will probably return, if the layout finds it without reading
    /// entries.
    #[inline]
    pub(crate) fn prefetch_entry(&self, hash: Option<u64>) {
        if let (Block::Fingerprint(block), Some(hash)) = (self, hash) {
            block.prefetch_entry(hash);
        }
    }

    #[inline]
    fn entries(&self) -> &[u8] {
        match self {
            Block::Restart(block) => block.bytes(0..block.end()),
            Block::Fingerprint(block) => block.bytes(0..block.end()),
        }
    }

    /// Returns a value of this block without a copy. The result keeps the block alive, so the value must have at
    /// least [`SHARED_LEN_MIN`] bytes, take at least half of the block's memory, and end before 4 GiB. Otherwise the
    /// result is `None`. `to_arc` returns this block.
    pub(crate) fn shared_value(&self, value: &[u8], to_arc: impl FnOnce() -> Arc<Block>) -> Option<SharedBytes> {
        if value.len() < SHARED_LEN_MIN || 2 * value.len() < self.memory() {
            return None;
        }
        let start = value.as_ptr().addr().checked_sub(self.entries().as_ptr().addr())?;
        SharedBytes::new(to_arc(), start..start + value.len())
    }

    /// The first entry at or after `target`.
    #[inline]
    pub(crate) fn lower_bound(&self, target: InternalKey<'_>, order: &KeyOrder) -> Result<Option<BlockLookup<'_>>> {
        match self {
            Block::Restart(block) => block.lower_bound(target, order),
            Block::Fingerprint(block) => block.lower_bound(target, order),
        }
    }

    /// The newest version of the target's user key that is not newer than the target, found by the fastest method of
    /// the layout. `hash` is the hash of the key with the seed of the block's writer; `None` if the order allows none.
    ///
    /// If the block does not contain such a version, the result is `None` or an entry with another key.
    #[inline]
    pub(crate) fn lookup(
        &self,
        target: InternalKey<'_>,
        hash: Option<u64>,
        order: &KeyOrder,
    ) -> Result<Option<BlockLookup<'_>>> {
        match (self, hash) {
            (Block::Restart(block), hash) => block.lookup(target, hash, order),
            (Block::Fingerprint(block), Some(hash)) => block.lookup(target, hash, order),
            (Block::Fingerprint(block), None) => block.lower_bound(target, order),
        }
    }
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::base::checksum::key_hash;
    use crate::base::comparator::Comparator;
    use crate::base::{ErrorKind, SeqNo};
    use crate::block::{BlockIter, DataBlockBuilder, FingerprintBlockBuilder, RestartBlockBuilder};
    use crate::testing::{SeededRng, TestComparator, TestOrder};

    fn orders() -> [KeyOrder; 4] {
        let custom = |comparator: Arc<dyn Comparator>| KeyOrder::custom(comparator);
        [
            KeyOrder::bytewise(),
            custom(Arc::new(TestComparator::minimal(TestOrder::Bytes))), // keys have no hashes
            custom(Arc::new(TestOrder::Reversed)),
            custom(Arc::new(TestOrder::AnyCaseHashed)),
        ]
    }

    /// Every layout that a data block can have.
    #[derive(Clone, Copy, Debug)]
    enum Layout {
        Restarts(u8),
        Hashed(u8, f64),
        Slots,
    }

    const LAYOUTS: [Layout; 9] = [
        Layout::Restarts(1),
        Layout::Restarts(2),
        Layout::Restarts(3),
        Layout::Restarts(16),
        Layout::Hashed(1, 0.75),
        Layout::Hashed(2, 10.0),
        Layout::Hashed(3, 0.1),
        Layout::Hashed(16, 1.0),
        Layout::Slots,
    ];

    impl Layout {
        fn builder(self) -> DataBlockBuilder {
            match self {
                Layout::Restarts(interval) => DataBlockBuilder::Restart(RestartBlockBuilder::new(interval)),
                Layout::Hashed(interval, ratio) => {
                    DataBlockBuilder::Restart(RestartBlockBuilder::with_hash_index(interval, ratio))
                }
                Layout::Slots => DataBlockBuilder::Fingerprint(FingerprintBlockBuilder::new()),
            }
        }

        fn kind(self) -> BlockKind {
            match self {
                Layout::Restarts(_) => BlockKind::Data,
                Layout::Hashed(..) => BlockKind::DataWithHashIndex,
                Layout::Slots => BlockKind::FingerprintData,
            }
        }
    }

    type Entry = (Vec<u8>, u64, u8, Vec<u8>);

    fn sort(mut entries: Vec<Entry>, order: &KeyOrder) -> Vec<Entry> {
        let key = |entry: &Entry| (entry.0.clone(), SeqNo(entry.1));
        let cmp = |a: &Entry, b: &Entry| {
            let (a, b) = (key(a), key(b));
            InternalKey::new(&a.0, a.1).cmp(&InternalKey::new(&b.0, b.1), order)
        };
        entries.sort_by(cmp);
        entries.dedup_by(|a, b| cmp(a, b).is_eq());
        entries
    }

    /// Keys with common prefixes, the empty key, letters of both cases, several versions of some keys, and every tag.
    fn entries(n: u64, random: &mut SeededRng, order: &KeyOrder) -> Vec<Entry> {
        let stem: &[u8] = if random.below(2) == 0 { b"" } else { b"a common stem/" };
        let mut entries = Vec::new();
        for _ in 0..n {
            let len = if random.below(20) == 0 { 150 } else { random.below(6) };
            let mut key = stem.to_vec();
            key.extend((0..len).map(|_| b"abcAB"[random.below(5) as usize]));
            let len = if random.below(10) == 0 { 200 } else { random.below(20) as usize };
            entries.push((key, random.below(40), random.below(8) as u8, vec![random.below(256) as u8; len]));
        }
        sort(entries, order)
    }

    /// The hash of a key. `weak` reduces hashes to four values, so that most keys share theirs.
    fn hash_of(key: &[u8], order: &KeyOrder, weak: bool) -> Option<u64> {
        let hash = key_hash(5, order.hash_input(key, &mut Vec::new())?);
        Some(if weak { hash & 0x4000_0001 } else { hash })
    }

    fn build(builder: &mut DataBlockBuilder, entries: &[Entry], order: &KeyOrder, weak: bool) -> (BlockKind, Vec<u8>) {
        for (key, seqno, tag, value) in entries {
            let hash = hash_of(key, order, weak);
            let key = InternalKey::new(key, SeqNo(*seqno));
            let expected = builder.len_with(key, value.len());
            builder.add(key, hash, *tag, value);
            assert_eq!(builder.len(), expected);
        }
        let expected = builder.len();
        let (kind, bytes) = builder.finish();
        let longest = entries.iter().map(|entry| entry.0.len()).max().unwrap();
        assert!(bytes.len() <= expected && (bytes.len() == expected || longest >= 128 || bytes.len() > 1 << 16));
        let built = (kind, bytes.to_vec());
        builder.clear();
        built
    }

    fn block_of(layout: Layout, entries: &[Entry], order: &KeyOrder, weak: bool) -> Arc<Block> {
        let (kind, bytes) = build(&mut layout.builder(), entries, order, weak);
        assert_eq!(kind, layout.kind());
        Arc::new(Block::decode(BlockContents::new(kind, bytes)).unwrap())
    }

    fn key(entry: &Entry) -> InternalKey<'_> {
        InternalKey::new(&entry.0, SeqNo(entry.1))
    }

    /// Checks that every method of searching `target` returns the expected entry.
    fn check(block: &Arc<Block>, entries: &[Entry], target: InternalKey<'_>, order: &KeyOrder, weak: bool) {
        let at = entries.partition_point(|entry| key(entry).cmp(&target, order).is_lt());
        let expected = entries.get(at);
        let same = expected.is_some_and(|entry| order.cmp(&entry.0, target.user_key).is_eq());
        let located = block.lower_bound(target, order).unwrap();
        assert_eq!(located.is_some(), expected.is_some());
        let found = block.lookup(target, hash_of(target.user_key, order, weak), order).unwrap();
        assert_eq!(found.is_some_and(|found| found.key_matches), same);
        for (i, found) in [located, found.filter(|found| found.key_matches)].into_iter().enumerate() {
            let (Some(found), Some(entry)) = (found, expected) else { continue };
            assert_eq!((found.seqno, found.tag, found.value), (SeqNo(entry.1), entry.2, &*entry.3), "way {i}");
            assert_eq!(found.key_matches, same);
        }
        let mut iter = BlockIter::new(Arc::clone(block));
        let assert_entry = |iter: &BlockIter, expected: Option<&Entry>| match expected {
            None => assert!(!iter.valid()),
            Some(entry) => {
                assert!(iter.valid());
                assert_eq!((iter.key(), iter.tag(), iter.value()), (key(entry), entry.2, &*entry.3));
            }
        };
        iter.seek(target, order).unwrap();
        assert_entry(&iter, expected);
        iter.seek_before(target, order).unwrap();
        assert_entry(&iter, at.checked_sub(1).map(|at| &entries[at]));
    }

    #[test]
    fn every_lookup_method_finds_every_target() {
        let mut random = SeededRng::new(88);
        for round in 0..144 {
            let (layout, order) = (LAYOUTS[round % 9], &orders()[round / 9 % 4]);
            let weak = random.below(3) == 0;
            let n = if round % 7 == 0 { 1 } else { 1 + random.below(90) };
            let entries = entries(n, &mut random, order);
            let block = block_of(layout, &entries, order, weak);
            assert_eq!(block.count(), entries.len());
            let mut targets: Vec<(Vec<u8>, u64)> = Vec::new();
            for (key, seqno, ..) in &entries {
                targets.extend([*seqno, seqno + 1, seqno.saturating_sub(1), 99].map(|seqno| (key.clone(), seqno)));
                targets.push((key.to_ascii_uppercase(), *seqno));
                targets.push(([key, &b"\0"[..]].concat(), *seqno));
                targets.push((key[..key.len().saturating_sub(1)].to_vec(), *seqno));
            }
            for _ in 0..50 {
                let len = random.below(7) as usize;
                targets.push(((0..len).map(|_| b'`' + random.below(5) as u8).collect(), random.below(42)));
            }
            for (user_key, seqno) in &targets {
                check(&block, &entries, InternalKey::new(user_key, SeqNo(*seqno)), order, weak);
            }
        }
    }

    #[test]
    fn empty_key_and_many_versions_are_found() {
        let order = KeyOrder::bytewise();
        let alone = vec![(vec![], 7, 1, vec![])];
        let equal: Vec<Entry> =
            (0..70u8).map(|i| (vec![9, i / 10, i % 10, 4], 300 - u64::from(i), 1, vec![i])).collect();
        let versions: Vec<Entry> = (0..60).map(|i| (b"one".to_vec(), 600 - 10 * i, 2, vec![i as u8])).collect();
        let around = [(b"on".to_vec(), 5, 1, vec![]), (b"onf".to_vec(), 5, 1, vec![])];
        let around = sort([versions.clone(), around.to_vec()].concat(), &order);
        for entries in [alone, equal, versions, around] {
            for layout in LAYOUTS {
                let block = block_of(layout, &entries, &order, false);
                for (user_key, seqno, ..) in &entries {
                    for seqno in [0, seqno - 1, *seqno, seqno + 1, seqno + 5] {
                        check(&block, &entries, InternalKey::new(user_key, SeqNo(seqno)), &order, false);
                    }
                }
                for user_key in [&b""[..], b"o", b"onea", b"z", &[9, 3], &[9, 3, 4, 4, 4], &[255; 9]] {
                    check(&block, &entries, InternalKey::new(user_key, SeqNo(1000)), &order, false);
                }
            }
        }
    }

    #[test]
    fn blocks_over_64_kib_have_wide_slots() {
        let order = KeyOrder::bytewise();
        // The last slot is at 65,535, one byte above it, and far above it.
        for last in [65_535usize, 65_536, 300_000] {
            let mut entries: Vec<Entry> = (0..20u8).map(|i| (vec![b'k', i], 100, 1, vec![i; last / 20 - 20])).collect();
            let before = |entries: &[Entry]| entries[..19].iter().map(|entry| 4 + entry.3.len()).sum::<usize>();
            let len = entries[0].3.len() + last - before(&entries);
            entries[0].3.resize(len, 7);
            assert_eq!(before(&entries), last);
            let (_, bytes) = build(&mut Layout::Slots.builder(), &entries, &order, false);
            assert_eq!(bytes[bytes.len() - 2], if last > 65_535 { 4 } else { 2 });
            for layout in LAYOUTS {
                let block = block_of(layout, &entries, &order, false);
                entries.iter().for_each(|entry| check(&block, &entries, key(entry), &order, false));
                check(&block, &entries, InternalKey::new(b"kk", SeqNo(5)), &order, false);
            }
        }
    }

    #[test]
    fn hash_index_is_omitted_above_253_intervals() {
        let order = KeyOrder::bytewise();
        let entries = |n: u64| -> Vec<Entry> {
            (0..n).map(|i| (format!("key {i:04}").into_bytes(), i + 1, 1, vec![i as u8])).collect()
        };
        for interval in [1, 3] {
            let mut builder = Layout::Hashed(interval, 0.75).builder();
            let full = 253 * u64::from(interval);
            let all =
                [(1, BlockKind::DataWithHashIndex), (full, BlockKind::DataWithHashIndex), (full + 1, BlockKind::Data)];
            for (n, kind) in all.into_iter().chain(all) {
                let entries = entries(n);
                let (built, bytes) = build(&mut builder, &entries, &order, false);
                assert_eq!(built, kind, "{n} entries");
                let block = Arc::new(Block::decode(BlockContents::new(kind, bytes)).unwrap());
                for entry in &entries {
                    check(&block, &entries, key(entry), &order, false);
                }
                check(&block, &entries, InternalKey::new(b"key 0004a", SeqNo(9)), &order, false);
            }
        }
    }

    #[test]
    fn empty_bucket_ends_lookup_without_reading() {
        let order = KeyOrder::bytewise();
        let entries = vec![(b"a".to_vec(), 1, 1, vec![]), (b"b".to_vec(), 1, 1, vec![])];
        let (kind, mut bytes) = build(&mut Layout::Hashed(16, 0.1).builder(), &entries, &order, false);
        bytes[6..12].fill(0xff); // the second entry: parsing it fails
        let block = Block::decode(BlockContents::new(kind, bytes)).unwrap();
        let find = |user_key: &[u8]| {
            block.lookup(InternalKey::new(user_key, SeqNo(9)), hash_of(user_key, &order, false), &order)
        };
        assert!(find(b"b").is_err());
        let empty = (0..100u8).filter(|i| matches!(find(&[b'b', *i]), Ok(None))).count();
        assert!(empty > 80, "{empty} of 100 absent keys have an empty bucket, of 20 with two taken");
    }

    #[test]
    fn iteration_reverses_at_every_entry() {
        let mut random = SeededRng::new(7);
        let order = KeyOrder::bytewise();
        let entries = entries(50, &mut random, &order);
        for layout in LAYOUTS {
            let mut iter = BlockIter::new(block_of(layout, &entries, &order, false));
            iter.seek_to_last().unwrap();
            let mut at = entries.len() - 1;
            for _ in 0..2000 {
                assert_eq!((iter.key(), iter.value()), (key(&entries[at]), &*entries[at].3));
                let forward = random.below(2) == 0;
                if forward {
                    iter.next().unwrap()
                } else {
                    iter.prev().unwrap()
                }
                match at.checked_add_signed(if forward { 1 } else { -1 }).filter(|at| *at < entries.len()) {
                    Some(next) => at = next,
                    None => {
                        assert!(!iter.valid());
                        if forward { iter.seek_to_last().unwrap() } else { iter.seek_to_first().unwrap() }
                    }
                }
            }
        }
    }

    /// Scans backwards do not look for a newer version before an entry that begins a key.
    #[test]
    fn only_newest_versions_begin_a_key() {
        let mut random = SeededRng::new(31);
        for order in orders() {
            let entries = entries(200, &mut random, &order);
            for (layout, weak) in LAYOUTS.into_iter().flat_map(|layout| [(layout, false), (layout, true)]) {
                let mut iter = BlockIter::new(block_of(layout, &entries, &order, weak));
                assert!(!iter.begins_key(), "not valid");
                iter.seek_to_last().unwrap();
                let mut found = 0;
                for at in (0..entries.len()).rev() {
                    if iter.begins_key() {
                        found += 1;
                        assert!(order.cmp(&entries[at - 1].0, &entries[at].0).is_lt(), "{layout:?} at {at}");
                    }
                    iter.prev().unwrap();
                }
                let has_hashes = matches!(layout, Layout::Slots) && hash_of(b"a", &order, weak).is_some();
                assert_eq!(found > 0, has_hashes, "{layout:?}, {order:?}");
            }
        }
    }

    /// Iterates and searches a block of arbitrary bytes. Only errors may result.
    fn exercise(kind: BlockKind, bytes: Vec<u8>) {
        let Ok(block) = Block::decode(BlockContents::new(kind, bytes.clone())) else { return };
        let block = Arc::new(block);
        for order in orders() {
            let mut iter = BlockIter::new(Arc::clone(&block));
            for user_key in [&b""[..], b"abc", b"b", b"cccccc", &[255; 9]] {
                let target = InternalKey::new(user_key, SeqNo(20));
                let _ = block.lower_bound(target, &order);
                for hash in [0, 1, 0xff, 0x7f00_0000, u64::MAX] {
                    let _ = block.lookup(target, Some(hash), &order);
                }
                let _ = iter.seek(target, &order);
                let _ = iter.seek_before(target, &order);
            }
            let mut steps = iter.seek_to_first().is_ok() as usize;
            while iter.valid() && iter.next().is_ok() {
                steps += 1;
            }
            assert!(steps <= bytes.len());
            steps = iter.seek_to_last().is_ok() as usize;
            while iter.valid() && iter.prev().is_ok() {
                steps += 1;
            }
            assert!(steps <= bytes.len() + 1);
        }
    }

    #[test]
    fn damaged_and_random_blocks_never_panic() {
        const KINDS: [BlockKind; 3] = [BlockKind::Data, BlockKind::DataWithHashIndex, BlockKind::FingerprintData];
        let mut random = SeededRng::new(5);
        let order = KeyOrder::bytewise();
        for layout in [Layout::Restarts(3), Layout::Hashed(3, 0.75), Layout::Slots] {
            let mut entries = entries(40, &mut random, &order);
            entries.iter_mut().for_each(|entry| entry.3.truncate(20));
            let (_, good) = build(&mut layout.builder(), &entries, &order, false);
            for kind in KINDS {
                for at in 0..good.len() {
                    for change in [1, 0x80, 0xff] {
                        let mut bad = good.clone();
                        bad[at] ^= change;
                        exercise(kind, bad);
                    }
                    exercise(kind, good[..at].to_vec());
                    exercise(kind, good[at..].to_vec());
                }
            }
        }
        for round in 0..6000 {
            let len = random.below(120) as usize;
            let mut bytes: Vec<u8> = (0..len).map(|_| random.below(256) as u8 >> random.below(8)).collect();
            let small = 1 + random.below(2) as u8;
            match KINDS[round % 3] {
                BlockKind::FingerprintData => {
                    bytes.extend_from_slice(&[random.below(3) as u8, 0, small, 0]);
                    bytes.extend_from_slice(&[small + 1, 0, 0, 0, random.below(9) as u8, 0, 2, 0]);
                }
                BlockKind::DataWithHashIndex => {
                    bytes.extend_from_slice(&[0, 0, 0, 0, 255, 0, 254]);
                    bytes.extend_from_slice(&[1, 0, 0, 0, 4, 0, 0, 0, 1, 0, 3, 0]);
                }
                _ => {
                    bytes.extend_from_slice(&0u32.to_le_bytes());
                    bytes.extend_from_slice(&[small, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]);
                }
            }
            exercise(KINDS[round % 3], bytes);
        }
    }

    #[test]
    fn decode_fails_when_trailer_is_out_of_range() {
        let order = KeyOrder::bytewise();
        let entries: Vec<Entry> = (0..9).map(|i| (vec![b'a', i], 2, 1, vec![i])).collect();
        let outcome = |layout: Layout, from_end: usize, byte: u8| {
            let (kind, mut bytes) = build(&mut layout.builder(), &entries, &order, false);
            let at = bytes.len() - from_end;
            bytes[at] = byte;
            Block::decode(BlockContents::new(kind, bytes)).map(drop).map_err(|error| error.kind())
        };
        let (plain, hashed) = (Layout::Restarts(2), Layout::Hashed(2, 1.0));
        assert_eq!(outcome(plain, 4, 0), Ok(()));
        assert_eq!(outcome(plain, 4, 1), Err(ErrorKind::Unsupported));
        assert_eq!(outcome(hashed, 4, 1), Ok(()));
        assert_eq!(outcome(hashed, 4, 0), Err(ErrorKind::Unsupported));
        assert_eq!(outcome(hashed, 4, 3), Err(ErrorKind::Unsupported));
        assert_eq!(outcome(hashed, 2, 0), Err(ErrorKind::Corruption), "no buckets");
        assert_eq!(outcome(hashed, 1, 255), Err(ErrorKind::Corruption), "more buckets than bytes");
        assert_eq!(outcome(hashed, 13, 5), Err(ErrorKind::Corruption), "an interval after the last");
        assert_eq!(outcome(Layout::Slots, 1, 1), Err(ErrorKind::Unsupported));
        assert_eq!(outcome(Layout::Slots, 2, 3), Err(ErrorKind::Corruption), "no such width");
        assert_eq!(outcome(Layout::Slots, 8, 0), Err(ErrorKind::Corruption), "no entries");
        assert_eq!(outcome(Layout::Slots, 7, 1), Err(ErrorKind::Corruption), "more slots than bytes");
    }
}
