//! The hash index: maps a key to its newest record.
//!
//! The index uses extendible hashing. A directory of 2^depth entries, indexed by the upper bits of the hash, maps to
//! segments of 512 slots. A segment that is three quarters full is split in two, so that growing the index never
//! takes long. A slot contains the upper 32 bits of the hash (the tag) and the reference of the record. The tag alone
//! determines the directory entry and the position in the segment, so a split reads no records.
//!
//! A lookup compares the record that it finds with the key, so a hit is always right. A miss is right if the
//! directory entry did not change during the lookup. A directory entry contains a version, which is odd while its
//! segment is rewritten.

use std::sync::OnceLock;

use crate::mem::append_vec::AppendVec;
use crate::mem::arena::ArenaRef;
use crate::mem::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, SCHEDULE_EXPLORATION, fence, spin_loop};
use crate::mem::simd::prefetch;

/// Slots of a segment, which takes 4 KiB. Few in schedule exploration, so that a short test splits segments.
const SLOTS: usize = if SCHEDULE_EXPLORATION { 8 } else { 512 };
/// A segment with this many used slots is split before another key is added to it.
const USED_MAX: usize = SLOTS / 4 * 3;
/// Maximum depth: a tag selects the segment by the bits that the position in a segment does not use.
const DEPTH_MAX: u32 = 32 - SLOTS.ilog2();
/// Number of attempts of a lookup before it returns [`HashLookup::Unknown`].
const READ_RETRIES_MAX: usize = if SCHEDULE_EXPLORATION { 2 } else { 32 };

#[repr(align(64))]
struct HashSegment([AtomicU64; SLOTS]);

/// Result of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HashLookup {
    Hit(ArenaRef),
    Miss,
    /// The hash index has no answer: the caller must search the ordered index.
    Unknown,
}

/// The writer's state for each segment: its depth and its number of used slots.
#[derive(Default)]
pub(crate) struct HashIndexWriter {
    segments: Vec<(u32, usize)>,
}

/// The slot in which the writer may store a reference; valid until the index changes.
#[derive(Clone, Copy)]
pub(crate) struct HashInsertPosition {
    segment: u32,
    slot: usize,
    tag: u32,
    /// The record that the slot refers to: an older version of the same key.
    pub(crate) older: Option<ArenaRef>,
}

/// The hash index. Any number of readers may use it during the insertions of one writer.
pub(crate) struct MemtableHashIndex {
    /// Binary logarithm of the length of the directory in use. Smaller directories are kept for readers that still
    /// use them; together they take no more memory than the newest one.
    depth: AtomicU32,
    /// One directory for each depth. An entry is the number of the segment << 32 | version.
    directories: [OnceLock<Box<[AtomicU64]>>; DEPTH_MAX as usize + 1],
    segments: AppendVec<HashSegment>,
    /// Set when a key could not be added. From then on, a key that is not found here may still be in the memtable.
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

    /// Bytes that segments and directories take.
    pub(crate) fn bytes(&self) -> u64 {
        // A directory of each depth up to the current one, once there is a segment.
        let directory_entries =
            if self.segments.len() == 0 { 0 } else { (2 << self.depth.load(Ordering::Relaxed)) - 1 };
        self.segments.bytes() + directory_entries * size_of::<AtomicU64>() as u64
    }

    /// Finds the record with this hash for which `is_key` returns true.
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

    /// Prefetches the slot at which a search for `hash` begins.
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

    /// Whether no key of the memtable is missing in the index.
    #[inline]
    pub(crate) fn is_complete(&self) -> bool {
        !self.incomplete.load(Ordering::Acquire)
    }

    /// Finds the slot for a key; `is_key` recognizes the records of that key. Splits segments to get a free slot if
    /// necessary. Returns `None` if there is no slot: then the caller calls [`MemtableHashIndex::mark_incomplete`].
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

    /// Stores `record` in the slot that [`MemtableHashIndex::find_position`] returned.
    pub(crate) fn put(&self, writer: &mut HashIndexWriter, position: HashInsertPosition, record: ArenaRef) {
        if position.older.is_none() {
            writer.segments[position.segment as usize].1 += 1;
        }
        debug_assert!(writer.segments[position.segment as usize].1 <= SLOTS, "a segment has a slot for each key");
        let slot = &self.segment(position.segment).0[position.slot];
        debug_assert_eq!(
            ArenaRef::from_bits(slot.load(Ordering::Relaxed) as u32),
            position.older,
            "the slot is free, or refers to an older version"
        );
        // Release: a reader that loads the reference also reads the record.
        slot.store(u64::from(position.tag) << 32 | u64::from(record.to_bits()), Ordering::Release);
    }

    /// Marks the index as incomplete, permanently, because a key could not be added.
    pub(crate) fn mark_incomplete(&self) {
        self.incomplete.store(true, Ordering::Release);
    }

    fn segment(&self, number: u32) -> &HashSegment {
        self.segments.get(number).expect("the directory refers to existing segments")
    }

    fn directory(&self, depth: u32) -> &[AtomicU64] {
        self.directories[depth as usize].get().expect("a directory is stored before its depth")
    }

    /// Splits segment `number`, to which the directory entry at `index` refers. If this is the only entry that refers
    /// to it, doubles the directory instead, so that the next call can split. False if neither is possible.
    fn split(&self, writer: &mut HashIndexWriter, number: u32, index: usize) -> bool {
        let (local, used_slots) = writer.segments[number as usize];
        let depth = self.depth.load(Ordering::Relaxed);
        debug_assert!(local <= depth, "a directory entry refers to each segment");
        if local == depth {
            // The directory is doubled only while it is in proportion to the number of segments, because uneven
            // hashes would make it grow without bound.
            let even = 1 << depth <= 64 + 16 * u64::from(self.segments.len());
            if even && depth < DEPTH_MAX {
                self.double_directory(depth);
            }
            return even && depth < DEPTH_MAX;
        }
        // The keys of the segment have the first `local` bits of the tag in common. The next bit selects the half for
        // a key.
        let upper_half = |slot: &u64| slot >> (63 - local) & 1 == 1;
        let old = self.segment(number);
        let used: Vec<u64> = old.0.iter().map(|slot| slot.load(Ordering::Relaxed)).filter(|slot| *slot != 0).collect();
        debug_assert_eq!(used.len(), used_slots, "the writer knows the number of used slots");
        let (upper, lower): (Vec<u64>, Vec<u64>) = used.into_iter().partition(upper_half);
        let fresh = HashSegment::new();
        fresh.fill(&upper);
        let Some(fresh) = self.segments.push(fresh) else { return false };
        let span = 1 << (depth - local);
        let entries = &self.directory(depth)[index / span * span..][..span];
        debug_assert!(
            entries.iter().all(|entry| (entry.load(Ordering::Relaxed) >> 32) as u32 == number),
            "the entries with the bits of the segment refer to it"
        );
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
            let segment = if n < span / 2 { number } else { fresh };
            entry.store(u64::from(segment) << 32 | u64::from(version), Ordering::Release);
        }
        writer.segments[number as usize] = (local + 1, lower.len());
        writer.segments.push((local + 1, upper.len()));
        debug_assert_eq!(writer.segments.len(), self.segments.len() as usize, "the writer knows every segment");
        true
    }

    fn double_directory(&self, depth: u32) {
        let old = self.directory(depth);
        let doubled = old.iter().flat_map(|entry| [entry.load(Ordering::Relaxed); 2]).map(AtomicU64::new);
        self.directories[depth as usize + 1].get_or_init(|| doubled.collect());
        self.depth.store(depth + 1, Ordering::Release);
    }
}

/// Returns the index of `tag` in a directory of 2^depth entries.
#[inline]
fn index_of(tag: u32, depth: u32) -> usize {
    (u64::from(tag) << depth >> 32) as usize
}

impl HashSegment {
    fn new() -> HashSegment {
        HashSegment([const { AtomicU64::new(0) }; SLOTS])
    }

    /// The indexes of the slots in the probing order of `tag`.
    #[inline]
    fn order(tag: u32) -> impl Iterator<Item = usize> {
        (0..SLOTS).map(move |n| (tag as usize + n) % SLOTS)
    }

    /// Returns the slot of the key with its record, or the first free slot in probing order (`None` if all slots are
    /// used).
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

    /// Adds slots to an empty segment, which has space for all of them.
    fn fill(&self, slots: &[u64]) {
        for &slot in slots {
            let free = HashSegment::order((slot >> 32) as u32).find(|n| self.0[*n].load(Ordering::Relaxed) == 0);
            self.0[free.expect("the segment has space for these slots")].store(slot, Ordering::Release);
        }
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests race scoped threads, which vfs does not provide")]
mod tests {
    use super::*;

    fn record(n: u32) -> ArenaRef {
        ArenaRef::from_bits(n + 1).unwrap()
    }

    fn hash(n: u32) -> u64 {
        crate::base::checksum::key_hash(1, &n.to_le_bytes())
    }

    fn insert(index: &MemtableHashIndex, writer: &mut HashIndexWriter, n: u32, hash: u64) -> bool {
        let Some(position) = index.find_position(writer, hash, |at| at == record(n)) else { return false };
        assert_eq!(position.older, None);
        index.put(writer, position, record(n));
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
        let position = index.find_position(&mut writer, hash(3), |_| true).unwrap();
        assert_eq!(position.older, Some(record(3)));
        index.put(&mut writer, position, record(9));
        assert_eq!(index.find(hash(3), |_| true), HashLookup::Hit(record(9)));
        assert_eq!(writer.segments, [(0, 1)]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "probes a quarter of a million slots")]
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
                        let inserted = done.load(Ordering::Acquire);
                        if inserted == count {
                            break;
                        }
                        if inserted > 0 {
                            n = n.wrapping_mul(1_664_525).wrapping_add(1_013_904_223 + reader);
                            let m = (n >> 8) % inserted;
                            let found = index.find(hash(m), |at| at == record(m));
                            assert!(
                                matches!(found, HashLookup::Unknown) || found == HashLookup::Hit(record(m)),
                                "{m} of {inserted}"
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
