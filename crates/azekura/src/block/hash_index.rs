//! The hash index of a block with restart points: which restart interval a key is in.
//!
//! One byte for each bucket. Only lookups of one key use it; what it cannot say is left to the search.

use crate::base::{Error, Result};

/// No key has this bucket.
const EMPTY: u8 = 255;
/// Keys of several intervals have this bucket, or one key whose versions span two.
const COLLISION: u8 = 254;
/// A block of more restart intervals has no index.
const INTERVALS_MAX: usize = 253;
const BUCKETS_MAX: usize = u16::MAX as usize;

/// What a bucket says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HashBucket {
    /// The block does not have the key.
    Empty,
    /// Look for it by its order.
    Collision,
    /// If the block has the key, every version of it is in this interval.
    Interval(usize),
}

/// Collects the keys of one block after the other; what one block is too large for, the next one has again.
pub(crate) struct BlockHashIndexBuilder {
    util_ratio: f64,
    /// The hash of each entry that has one, and its interval.
    keys: Vec<(u64, u8)>,
    entries: usize,
    intervals: usize,
}

impl BlockHashIndexBuilder {
    /// For `util_ratio` entries in each bucket, on average.
    pub(crate) fn new(util_ratio: f64) -> BlockHashIndexBuilder {
        BlockHashIndexBuilder { util_ratio, keys: Vec::new(), entries: 0, intervals: 0 }
    }

    /// The next entry, which lies in the interval of that number. A key that cannot be hashed is found by its order,
    /// and so is every key that equals it.
    pub(crate) fn add(&mut self, hash: Option<u64>, interval: usize) {
        self.entries += 1;
        self.intervals = interval + 1;
        if let (Some(hash), true) = (hash, self.fits()) {
            self.keys.push((hash, interval as u8));
        }
    }

    /// Whether the block as it stands gets an index.
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

    /// Appends the buckets, and returns how many.
    pub(crate) fn put(&self, out: &mut Vec<u8>) -> u16 {
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

/// The bucket of a hash; there is at least one. The low half of the hash, as filters take the high one.
#[inline]
fn bucket_index(hash: u64, buckets: usize) -> usize {
    (((hash & 0xffff_ffff) * buckets as u64) >> 32) as usize
}

/// # Errors
/// `Corruption` if a bucket names an interval that the block does not have, or if there is no bucket.
pub(crate) fn check(buckets: &[u8], intervals: usize) -> Result<()> {
    let named = buckets.iter().copied().filter(|bucket| *bucket < COLLISION).max();
    if buckets.is_empty() || intervals > INTERVALS_MAX || named.is_some_and(|last| usize::from(last) >= intervals) {
        return Err(Error::corruption("hash index of a block names intervals that it does not have"));
    }
    Ok(())
}

/// What checked buckets say of a key with that hash.
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
