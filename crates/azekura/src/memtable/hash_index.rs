//! The hash index: from a key to its newest record.
//!
//! Extendible hashing: a directory of 2^depth entries, by the upper bits of the hash, names segments of 512 slots; a
//! segment that is three quarters full is split in two, so that growing never stops anyone for long. A slot is the
//! upper 32 bits of the hash and the reference of the record; directory and place in the segment follow from those bits
//! alone, so that splitting looks at no record.
//!
//! A record that is found is compared with the key, so a hit is always true. A miss is true if the directory entry did
//! not change meanwhile; it carries a version that is odd while its segment is rewritten.

use std::sync::OnceLock;

use crate::mem::append_vec::AppendVec;
use crate::mem::arena::ArenaRef;
use crate::mem::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, SCHEDULE_EXPLORATION, fence, spin_loop};
use crate::mem::simd::prefetch;

/// Slots of a segment: 4 KiB. Few where schedules are explored, so that a short test splits segments.
const SLOTS: usize = if SCHEDULE_EXPLORATION { 8 } else { 512 };
/// A segment with more used slots is split.
const USED_MAX: usize = SLOTS / 4 * 3;
/// The bits of a tag that are not needed for the place in a segment can tell segments apart.
const DEPTH_MAX: u32 = 32 - SLOTS.ilog2();
/// How often a reader tries again before it leaves the answer to the ordered index.
const READ_RETRIES_MAX: usize = if SCHEDULE_EXPLORATION { 2 } else { 32 };

#[repr(align(64))]
struct HashSegment([AtomicU64; SLOTS]);

/// What a lookup found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HashLookup {
    Hit(ArenaRef),
    Miss,
    /// The index cannot say: ask the ordered one.
    Unknown,
}

/// What the writer knows of each segment: depth and used slots.
#[derive(Default)]
pub(crate) struct HashIndexWriter {
    segments: Vec<(u32, usize)>,
}

/// Where the writer may put a reference; valid until the index changes.
#[derive(Clone, Copy)]
pub(crate) struct HashInsertPosition {
    segment: u32,
    slot: usize,
    tag: u32,
    /// The record that stands there: an older version of the same key.
    pub(crate) older: Option<ArenaRef>,
}

/// Any number of readers beside one writer.
pub(crate) struct MemtableHashIndex {
    /// Binary logarithm of the length of the directory in use. The smaller ones of before stay for readers that are in
    /// them; together they take no more than the newest.
    depth: AtomicU32,
    /// Number of the segment << 32 | version.
    directories: [OnceLock<Box<[AtomicU64]>>; DEPTH_MAX as usize + 1],
    segments: AppendVec<HashSegment>,
    /// Set when a key could not be put in: nothing that is not here is known to be nowhere any more.
    incomplete: AtomicBool,
}

impl MemtableHashIndex {
    pub(crate) fn new() -> MemtableHashIndex {
        MemtableHashIndex {
            depth: AtomicU32::new(0),
            directories: [const { OnceLock::new() }; DEPTH_MAX as usize + 1],
            segments: AppendVec::new(),
            incomplete: AtomicBool::new(false),
        }
    }

    /// The bytes that segments and directories take.
    pub(crate) fn bytes(&self) -> u64 {
        let directories: usize = self.directories.iter().filter_map(OnceLock::get).map(|d| d.len() * 8).sum();
        self.segments.bytes() + directories as u64
    }

    /// Looks for the record under `hash` for which `is_key` holds.
    #[inline]
    pub(crate) fn find(&self, hash: u64, is_key: impl Fn(ArenaRef) -> bool) -> HashLookup {
        let tag = (hash >> 32) as u32;
        for _ in 0..READ_RETRIES_MAX {
            let depth = self.depth.load(Ordering::Acquire);
            let Some(directory) = self.directories[depth as usize].get() else { return self.miss() };
            let entry = &directory[index_of(tag, depth)];
            let before = entry.load(Ordering::Acquire);
            let Some(segment) = self.segments.get((before >> 32) as u32) else { return self.miss() };
            if let (_, Some(record)) = segment.probe(tag, &is_key) {
                return HashLookup::Hit(record);
            }
            fence(Ordering::Acquire);
            let same = entry.load(Ordering::Relaxed) == before && self.depth.load(Ordering::Relaxed) == depth;
            if same && before.is_multiple_of(2) {
                return self.miss();
            }
            spin_loop();
        }
        HashLookup::Unknown
    }

    /// Fetches the slot that a search for `hash` begins with beside what is done next.
    #[inline]
    pub(crate) fn prefetch(&self, hash: u64) {
        let tag = (hash >> 32) as u32;
        let depth = self.depth.load(Ordering::Acquire);
        let entry = self.directories[depth as usize].get().map(|directory| &directory[index_of(tag, depth)]);
        let segment = entry.and_then(|entry| self.segments.get((entry.load(Ordering::Acquire) >> 32) as u32));
        if let Some(segment) = segment {
            prefetch(&segment.0[tag as usize % SLOTS]);
        }
    }

    fn miss(&self) -> HashLookup {
        if self.is_complete() { HashLookup::Miss } else { HashLookup::Unknown }
    }

    /// Whether every key that should be here is, with all its versions.
    #[inline]
    pub(crate) fn is_complete(&self) -> bool {
        !self.incomplete.load(Ordering::Acquire)
    }

    /// Finds the place of the key of which `is_key` tells the records, making room if need be. `None` if there is no
    /// room to be made: then [`MemtableHashIndex::mark_incomplete`].
    pub(crate) fn find_position(
        &self,
        writer: &mut HashIndexWriter,
        hash: u64,
        is_key: impl Fn(ArenaRef) -> bool,
    ) -> Option<HashInsertPosition> {
        let tag = (hash >> 32) as u32;
        if self.segments.len() == 0 {
            self.segments.push(HashSegment::new())?;
            writer.segments.push((0, 0));
            self.directories[0].get_or_init(|| Box::new([AtomicU64::new(0)]));
        }
        loop {
            let depth = self.depth.load(Ordering::Relaxed);
            let entry = self.directory(depth)[index_of(tag, depth)].load(Ordering::Relaxed);
            let number = (entry >> 32) as u32;
            let (slot, older) = self.segment(number).probe(tag, &is_key);
            let full = writer.segments[number as usize].1 >= USED_MAX;
            if older.is_none() && full && self.split(writer, number, index_of(tag, depth)) {
                continue;
            }
            return slot.map(|slot| HashInsertPosition { segment: number, slot, tag, older });
        }
    }

    /// Puts `record` where [`MemtableHashIndex::find_position`] said.
    pub(crate) fn put(&self, writer: &mut HashIndexWriter, place: HashInsertPosition, record: ArenaRef) {
        if place.older.is_none() {
            writer.segments[place.segment as usize].1 += 1;
        }
        let slot = &self.segment(place.segment).0[place.slot];
        // Release: a reader of the reference also reads the record.
        slot.store(u64::from(place.tag) << 32 | u64::from(record.to_bits()), Ordering::Release);
    }

    /// Says that a key is missing here for good.
    pub(crate) fn mark_incomplete(&self) {
        self.incomplete.store(true, Ordering::Release);
    }

    fn segment(&self, number: u32) -> &HashSegment {
        self.segments.get(number).expect("the directory names segments that exist")
    }

    fn directory(&self, depth: u32) -> &[AtomicU64] {
        self.directories[depth as usize].get().expect("a depth is set after its directory")
    }

    /// Splits segment `number`, which the directory names at `index`; false if that cannot be.
    fn split(&self, writer: &mut HashIndexWriter, number: u32, index: usize) -> bool {
        let (local, _) = writer.segments[number as usize];
        let depth = self.depth.load(Ordering::Relaxed);
        if local == depth {
            // Hashes spread evenly, or something is wrong with them and the directory would grow without an end.
            let even = 1 << depth <= 64 + 16 * u64::from(self.segments.len());
            if even && depth < DEPTH_MAX {
                self.double_directory(depth);
            }
            return even && depth < DEPTH_MAX;
        }
        // The tag's bit below those that all of the segment's keys share says which half a key goes to.
        let upper_half = |slot: &u64| slot >> (63 - local) & 1 == 1;
        let old = self.segment(number);
        let used: Vec<u64> = old.0.iter().map(|slot| slot.load(Ordering::Relaxed)).filter(|slot| *slot != 0).collect();
        let (upper, lower): (Vec<u64>, Vec<u64>) = used.into_iter().partition(upper_half);
        let fresh = HashSegment::new();
        fresh.fill(&upper);
        let Some(fresh) = self.segments.push(fresh) else { return false };
        let span = 1 << (depth - local);
        let entries = &self.directory(depth)[index / span * span..][..span];
        for entry in entries {
            entry.store(entry.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
        fence(Ordering::Release);
        for slot in &old.0 {
            slot.store(0, Ordering::Relaxed);
        }
        old.fill(&lower);
        for (n, entry) in entries.iter().enumerate() {
            let version = (entry.load(Ordering::Relaxed) as u32).wrapping_add(1);
            let named = if n < span / 2 { number } else { fresh };
            entry.store(u64::from(named) << 32 | u64::from(version), Ordering::Release);
        }
        writer.segments[number as usize] = (local + 1, lower.len());
        writer.segments.push((local + 1, upper.len()));
        true
    }

    fn double_directory(&self, depth: u32) {
        let old = self.directory(depth);
        let twice = old.iter().flat_map(|entry| [entry.load(Ordering::Relaxed); 2]).map(AtomicU64::new);
        self.directories[depth as usize + 1].get_or_init(|| twice.collect());
        self.depth.store(depth + 1, Ordering::Release);
    }
}

/// The place of `tag` in a directory.
#[inline]
fn index_of(tag: u32, depth: u32) -> usize {
    (u64::from(tag) << depth >> 32) as usize
}

impl HashSegment {
    fn new() -> HashSegment {
        HashSegment([const { AtomicU64::new(0) }; SLOTS])
    }

    /// The slots in the order in which `tag` tries them.
    #[inline]
    fn order(tag: u32) -> impl Iterator<Item = usize> {
        (0..SLOTS).map(move |n| (tag as usize + n) % SLOTS)
    }

    /// The slot of the key with its record, or the free slot where it would go (`None` if all are used).
    #[inline]
    fn probe(&self, tag: u32, is_key: impl Fn(ArenaRef) -> bool) -> (Option<usize>, Option<ArenaRef>) {
        for n in HashSegment::order(tag) {
            let slot = self.0[n].load(Ordering::Acquire);
            let Some(record) = ArenaRef::from_bits(slot as u32) else { return (Some(n), None) };
            if (slot >> 32) as u32 == tag && is_key(record) {
                return (Some(n), Some(record));
            }
        }
        (None, None)
    }

    /// Puts slots, which all fit, into an empty segment.
    fn fill(&self, slots: &[u64]) {
        for &slot in slots {
            let free = HashSegment::order((slot >> 32) as u32).find(|n| self.0[*n].load(Ordering::Relaxed) == 0);
            self.0[free.expect("no more slots than fit")].store(slot, Ordering::Release);
        }
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests race threads, and in vfs none are scoped")]
mod tests {
    use super::*;

    fn record(n: u32) -> ArenaRef {
        ArenaRef::from_bits(n + 1).unwrap()
    }

    fn hash(n: u32) -> u64 {
        crate::base::checksum::key_hash(1, &n.to_le_bytes())
    }

    fn insert(index: &MemtableHashIndex, writer: &mut HashIndexWriter, n: u32, hash: u64) -> bool {
        let Some(place) = index.find_position(writer, hash, |at| at == record(n)) else { return false };
        assert_eq!(place.older, None);
        index.put(writer, place, record(n));
        true
    }

    #[test]
    fn find_returns_inserted_records_at_every_size() {
        let count = if cfg!(miri) { 900 } else { 50_000 };
        let (index, mut writer) = (MemtableHashIndex::new(), HashIndexWriter::default());
        assert_eq!(index.find(hash(0), |_| true), HashLookup::Miss);
        for n in 0..count {
            assert!(insert(&index, &mut writer, n, hash(n)));
            if n % 7 == 0 {
                let m = n / 2;
                assert_eq!(index.find(hash(m), |at| at == record(m)), HashLookup::Hit(record(m)));
                assert_eq!(index.find(hash(count + n), |_| false), HashLookup::Miss);
            }
        }
        for n in 0..count {
            assert_eq!(index.find(hash(n), |at| at == record(n)), HashLookup::Hit(record(n)));
        }
        assert!(index.bytes() < u64::from(count) * 8 * 3 + 16_384, "{}", index.bytes());
    }

    #[test]
    fn newer_record_replaces_older() {
        let (index, mut writer) = (MemtableHashIndex::new(), HashIndexWriter::default());
        insert(&index, &mut writer, 3, hash(3));
        let place = index.find_position(&mut writer, hash(3), |_| true).unwrap();
        assert_eq!(place.older, Some(record(3)));
        index.put(&mut writer, place, record(9));
        assert_eq!(index.find(hash(3), |_| true), HashLookup::Hit(record(9)));
        assert_eq!(writer.segments, [(0, 1)]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "tries a quarter of a million slots")]
    fn index_is_incomplete_when_segment_is_full() {
        let (index, mut writer) = (MemtableHashIndex::new(), HashIndexWriter::default());
        let full = (0..=SLOTS as u32).find(|n| !insert(&index, &mut writer, *n, 77 << 32)).unwrap();
        assert_eq!(full, SLOTS as u32);
        index.mark_incomplete();
        assert_eq!(index.find(77 << 32, |at| at == record(5)), HashLookup::Hit(record(5)));
        assert_eq!(index.find(77 << 32, |_| false), HashLookup::Unknown);
        assert_eq!(index.find(hash(1), |_| false), HashLookup::Unknown);
    }

    #[test]
    fn no_key_is_missed_while_index_grows() {
        let count = if cfg!(miri) { 600 } else { 200_000 };
        let (index, mut writer) = (MemtableHashIndex::new(), HashIndexWriter::default());
        let done = AtomicU32::new(0);
        std::thread::scope(|s| {
            for reader in 1..=2 {
                let (index, done) = (&index, &done);
                s.spawn(move || {
                    let mut n = 0u32;
                    loop {
                        let seen = done.load(Ordering::Acquire);
                        if seen == count {
                            break;
                        }
                        if seen > 0 {
                            n = n.wrapping_mul(1_664_525).wrapping_add(1_013_904_223 + reader);
                            let m = (n >> 8) % seen;
                            let found = index.find(hash(m), |at| at == record(m));
                            assert!(
                                matches!(found, HashLookup::Unknown) || found == HashLookup::Hit(record(m)),
                                "{m} {seen}"
                            );
                        }
                    }
                });
            }
            for n in 0..count {
                insert(&index, &mut writer, n, hash(n));
                done.store(n + 1, Ordering::Release);
            }
        });
    }
}
