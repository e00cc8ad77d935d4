//! The hash index of a block with restart points: maps a key to its restart interval.
//!
//! Each bucket is one byte. Only point lookups use the index; after a collision they use binary search.

use crate::base::{Error, Result};

/// The value of a bucket without keys.
const EMPTY: u8 = 255;
/// The value of a bucket with keys of several intervals, or with a key whose versions span several intervals.
const COLLISION: u8 = 254;
/// A block with more restart intervals gets no index.
const INTERVALS_MAX: usize = 253;
const BUCKETS_MAX: usize = u16::MAX as usize;

/// The content of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HashBucket {
    /// The block does not contain the key.
    Empty,
    /// The bucket does not determine the interval. The caller uses binary search.
    Collision,
    /// If the block contains the key, all versions of the key are in this interval.
    Interval(usize),
}

/// Collects the keys of a block and writes its hash index. Reused for one block after another.
pub(crate) struct BlockHashIndexBuilder {
    util_ratio: f64,
    /// The hash of each entry that has one, and its interval.
    keys: Vec<(u64, u8)>,
    entries: usize,
    intervals: usize,
}

impl BlockHashIndexBuilder {
    /// Creates a builder with `util_ratio` entries for each bucket on average.
    pub(crate) fn new(util_ratio: f64) -> BlockHashIndexBuilder {
        BlockHashIndexBuilder { util_ratio, keys: Vec::new(), entries: 0, intervals: 0 }
    }

    /// Adds the next entry, which is in the restart interval of that number. A key that cannot be hashed is not
    /// added: lookups of it, and of every key that is equal to it, have no hash either and use binary search.
    pub(crate) fn add(&mut self, hash: Option<u64>, interval: usize) {
        debug_assert!(interval == self.intervals || interval + 1 == self.intervals, "intervals follow each other");
        self.entries += 1;
        self.intervals = interval + 1;
        if let (Some(hash), true) = (hash, self.fits()) {
            self.keys.push((hash, interval as u8));
        }
    }

    /// Number of entries of the current block.
    pub(crate) fn entry_count(&self) -> usize {
        self.entries
    }

    /// Whether the current block gets an index.
    pub(crate) fn fits(&self) -> bool {
        self.intervals <= INTERVALS_MAX
    }

    /// Number of buckets for this number of entries and intervals; 0 if the block gets no hash index.
    pub(crate) fn buckets_of(&self, entries: usize, intervals: usize) -> usize {
        if intervals > INTERVALS_MAX {
            return 0;
        }
        ((entries as f64 / self.util_ratio).ceil() as usize).clamp(1, BUCKETS_MAX)
    }

    /// Appends the buckets. Returns their number.
    pub(crate) fn put(&self, out: &mut Vec<u8>) -> u16 {
        debug_assert!(self.entries > 0 && self.fits(), "the block gets a hash index");
        let len = self.buckets_of(self.entries, self.intervals);
        let start = out.len();
        out.resize(start + len, EMPTY);
        for (hash, interval) in &self.keys {
            let bucket = &mut out[start + bucket_index(*hash, len)];
            *bucket = match *bucket {
                EMPTY => *interval,
                same if same == *interval => same,
                _ => COLLISION,
            };
        }
        len as u16
    }

    pub(crate) fn clear(&mut self) {
        self.keys.clear();
        self.entries = 0;
        self.intervals = 0;
    }
}

/// The bucket of a hash. Uses the low half of the hash, because filters use the high half.
#[inline]
fn bucket_index(hash: u64, buckets: usize) -> usize {
    debug_assert!((1..=BUCKETS_MAX).contains(&buckets), "a hash index has a bucket");
    (((hash & 0xffff_ffff) * buckets as u64) >> 32) as usize
}

/// Checks the buckets of a block with `intervals` restart intervals.
///
/// # Errors
/// `Corruption` if there is no bucket, if the block has too many intervals for a hash index, or if a bucket names an
/// interval that the block does not have.
pub(crate) fn check(buckets: &[u8], intervals: usize) -> Result<()> {
    let named = buckets.iter().copied().filter(|bucket| *bucket < COLLISION).max();
    if buckets.is_empty() || intervals > INTERVALS_MAX || named.is_some_and(|last| usize::from(last) >= intervals) {
        return Err(Error::corruption("hash index of a block refers to missing intervals"));
    }
    Ok(())
}

/// Looks up a key with that hash in buckets that were checked.
#[inline]
pub(crate) fn look_up(buckets: &[u8], hash: u64) -> HashBucket {
    match buckets[bucket_index(hash, buckets.len())] {
        EMPTY => HashBucket::Empty,
        COLLISION => HashBucket::Collision,
        interval => HashBucket::Interval(usize::from(interval)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(n: u64) -> u64 {
        n.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(31)
    }

    #[test]
    fn every_key_maps_to_its_interval_or_collision() {
        for (entries, interval, ratio) in
            [(1u64, 1u64, 0.75), (100, 16, 0.75), (253, 1, 1.0), (900, 4, 0.5), (40, 9, 10.0)]
        {
            let mut builder = BlockHashIndexBuilder::new(ratio);
            (0..entries).for_each(|n| builder.add(Some(hash(n)), (n / interval) as usize));
            let mut out = vec![1, 2, 3];
            let len = usize::from(builder.put(&mut out));
            assert_eq!(out.len(), 3 + len);
            assert_eq!(len, (entries as f64 / ratio).ceil() as usize);
            let buckets = &out[3..];
            check(buckets, entries.div_ceil(interval) as usize).unwrap();
            let mut straight = 0;
            for n in 0..entries {
                match look_up(buckets, hash(n)) {
                    HashBucket::Empty => panic!("key {n} is lost"),
                    HashBucket::Collision => {}
                    HashBucket::Interval(i) => {
                        assert_eq!(i as u64, n / interval);
                        straight += 1;
                    }
                }
            }
            assert!(ratio > 1.0 || straight * 3 > entries, "{straight} of {entries} need no search");
        }
    }

    #[test]
    fn key_with_versions_in_two_intervals_collides() {
        let mut builder = BlockHashIndexBuilder::new(0.75);
        builder.add(Some(5), 0);
        builder.add(Some(5), 0);
        let mut out = Vec::new();
        builder.put(&mut out);
        assert_eq!(look_up(&out, 5), HashBucket::Interval(0));
        builder.add(Some(5), 1);
        out.clear();
        builder.put(&mut out);
        assert_eq!(look_up(&out, 5), HashBucket::Collision);
    }

    #[test]
    fn index_is_omitted_above_253_intervals() {
        let mut builder = BlockHashIndexBuilder::new(1.0);
        (0..253).for_each(|n| builder.add(Some(hash(n)), n as usize));
        assert!(builder.fits() && builder.buckets_of(254, 254) == 0);
        builder.add(Some(hash(253)), 253);
        assert!(!builder.fits());
        builder.clear();
        builder.add(Some(1), 0);
        assert!(builder.fits());
        assert_eq!(builder.put(&mut Vec::new()), 1);
    }

    #[test]
    fn invalid_buckets_are_refused() {
        check(&[EMPTY, COLLISION, 252], 253).unwrap();
        assert!(check(&[], 1).is_err());
        assert!(check(&[1], 1).is_err());
        assert!(check(&[253, 0], 253).is_err());
        assert!(check(&[0], 254).is_err());
    }
}
