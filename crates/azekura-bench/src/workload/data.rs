//! Records of a data set and random choices among them.
//!
//! Key: the big-endian index, scrambled or not, padded with the digit zero as `db_bench` pads. Value:
//!
//! ```text
//! | generation, 8 bytes LE | noise words, up to half the size | one byte repeated to the end |
//! ```

use crate::engine::Engine;
use crate::error::{Result, wrong};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use rand_distr::{Distribution, Zipf};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Generation of a record when it is first written.
pub(crate) const FIRST_GENERATION: u64 = 1;
/// Indices from here on are never written.
pub(crate) const MISSING: u64 = 1 << 48;
/// Exponent of every zipfian choice.
pub(crate) const THETA: f64 = 0.99;
/// Most records of one batch.
pub(crate) const BATCH_RECORDS: u64 = 1000;
/// Bytes after which a batch ends early, so that blobs do not make it huge.
const BATCH_BYTES: u64 = 4 << 20;
/// Increment of the noise words.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
/// The multipliers of [`mix`].
const ODD: [u64; 2] = [0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb];

/// A bijection of 64-bit numbers whose results show no order (the finalizer of splitmix64).
pub(crate) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(ODD[0]);
    x = (x ^ (x >> 27)).wrapping_mul(ODD[1]);
    x ^ (x >> 31)
}

/// The inverse of [`mix`].
fn unmix(mut x: u64) -> u64 {
    // Inverses of the multipliers modulo 2^64.
    const INVERSES: [u64; 2] = [0x96de_1b17_3f11_9089, 0x3196_42b2_d24d_8ec3];
    x ^= (x >> 31) ^ (x >> 62);
    x = x.wrapping_mul(INVERSES[1]);
    x ^= (x >> 27) ^ (x >> 54);
    x = x.wrapping_mul(INVERSES[0]);
    x ^ (x >> 30) ^ (x >> 60)
}

/// The size and layout of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shape {
    /// Records; indices `0..n`.
    pub(crate) n: u64,
    /// Bytes per key, at least 8.
    pub(crate) key_size: usize,
    /// Bytes of the smallest value, at least 8.
    pub(crate) least_value: usize,
    /// Bytes of the largest value. Sizes between are drawn log-uniformly.
    pub(crate) value_size: usize,
    /// Whether ascending indices give ascending keys. Otherwise their keys are spread over the key space.
    pub(crate) sequential: bool,
}

/// Records of 16 + 100 bytes in scrambled order, as many as wanted.
pub(crate) const SMALL_RECORDS: Shape =
    Shape { n: u64::MAX, key_size: 16, least_value: 100, value_size: 100, sequential: false };

impl Shape {
    /// The first eight bytes of the key of `index`, which determine the key order.
    pub(crate) fn number(&self, index: u64) -> u64 {
        if self.sequential { index } else { mix(index) }
    }

    /// Writes the key of `index` over `out`.
    pub(crate) fn key(&self, index: u64, out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(&self.number(index).to_be_bytes());
        out.resize(self.key_size, b'0');
    }

    /// The index whose key this is; `None` if there is none.
    pub(crate) fn index_of(&self, key: &[u8]) -> Option<u64> {
        let (head, padding) = key.split_first_chunk::<8>()?;
        if key.len() != self.key_size || padding.iter().any(|&byte| byte != b'0') {
            return None;
        }
        let number = u64::from_be_bytes(*head);
        Some(if self.sequential { number } else { unmix(number) })
    }

    /// Bytes of the values of `index`, the same in all generations.
    pub(crate) fn size_of(&self, index: u64) -> usize {
        if self.least_value >= self.value_size {
            return self.value_size;
        }
        let unit = (mix(index ^ STEP) >> 11) as f64 / (1u64 << 53) as f64;
        let factor = ((self.value_size as f64 / self.least_value as f64).ln() * unit).exp();
        ((self.least_value as f64 * factor) as usize).clamp(self.least_value, self.value_size)
    }

    /// Writes the value of `index` in its `generation` over `out`.
    pub(crate) fn value(&self, index: u64, generation: u64, out: &mut Vec<u8>) {
        let (size, seed) = (self.size_of(index), value_seed(index, generation));
        out.clear();
        out.resize(size, seed as u8);
        let (words, _) = out[..noise_end(size)].as_chunks_mut::<8>();
        words[0] = generation.to_le_bytes();
        words[1..].iter_mut().zip(noise_words(seed)).for_each(|(chunk, word)| *chunk = word.to_le_bytes());
    }

    /// The generation of `value` if every byte of it is that of a value of `index`.
    pub(crate) fn check(&self, index: u64, value: &[u8]) -> Option<u64> {
        if value.len() != self.size_of(index) {
            return None;
        }
        let (noise, fill) = value.split_at_checked(noise_end(value.len()))?;
        let (words, _) = noise.as_chunks::<8>();
        let generation = u64::from_le_bytes(words[0]);
        let seed = value_seed(index, generation);
        let pairs = words[1..].iter().zip(noise_words(seed));
        let difference = pairs.fold(0, |all, (chunk, word)| all | (u64::from_le_bytes(*chunk) ^ word));
        let fill_difference = fill.iter().fold(0, |all, byte| all | (byte ^ seed as u8));
        (difference == 0 && fill_difference == 0).then_some(generation)
    }

    /// Bytes of the record of `index`.
    pub(crate) fn record_bytes(&self, index: u64) -> u64 {
        (self.key_size + self.size_of(index)) as u64
    }

    /// Bytes of all records.
    pub(crate) fn total_bytes(&self) -> u64 {
        if self.least_value == self.value_size {
            return self.n * self.record_bytes(0);
        }
        (0..self.n).map(|index| self.record_bytes(index)).sum()
    }

    /// Mean bytes of a record.
    pub(crate) fn mean_record_bytes(&self) -> f64 {
        let (min, max) = (self.least_value as f64, self.value_size as f64);
        self.key_size as f64 + if max <= min { min } else { (max - min) / (max / min).ln() }
    }

    /// Reads `index`, which must exist, and returns its generation.
    pub(crate) fn get(&self, engine: &dyn Engine, index: u64, key: &mut Vec<u8>) -> Result<u64> {
        self.find(engine, index, key)?.ok_or_else(|| wrong(format!("record {index} was not found")))
    }

    /// Reads `index` and returns its generation if it exists.
    pub(crate) fn find(&self, engine: &dyn Engine, index: u64, key: &mut Vec<u8>) -> Result<Option<u64>> {
        self.key(index, key);
        let mut generation = None;
        let found = engine.get(key, &mut |value| generation = self.check(index, value))?;
        match generation {
            None if found => Err(wrong(format!("record {index} was returned with a wrong value"))),
            generation => Ok(generation),
        }
    }
}

/// End of generation and noise in a value of that size: whole words, half of the value.
fn noise_end(size: usize) -> usize {
    (size / 2 / 8 * 8).max(8)
}

/// The noise words of a value.
fn noise_words(seed: u64) -> impl Iterator<Item = u64> {
    (1..).map(move |i: u64| seed.wrapping_add(STEP.wrapping_mul(i)))
}

fn value_seed(index: u64, generation: u64) -> u64 {
    mix(index.wrapping_mul(0xff51_afd7_ed55_8ccd) ^ generation)
}

/// Buffers for one batch, reused from one batch to the next.
#[derive(Debug, Default)]
pub(crate) struct BatchBuffer(Vec<(Vec<u8>, Vec<u8>)>);

impl BatchBuffer {
    /// Writes the first records of `indices` as one batch; returns how many, and their bytes.
    pub(crate) fn put(
        &mut self,
        engine: &dyn Engine,
        shape: &Shape,
        indices: impl Iterator<Item = u64>,
    ) -> Result<(u64, u64)> {
        let (mut count, mut bytes) = (0, 0);
        let mut indices = indices.take(BATCH_RECORDS as usize);
        while bytes < BATCH_BYTES
            && let Some(index) = indices.next()
        {
            if count == self.0.len() {
                self.0.push((Vec::new(), Vec::new()));
            }
            let (key, value) = &mut self.0[count];
            shape.key(index, key);
            shape.value(index, FIRST_GENERATION, value);
            bytes += (key.len() + value.len()) as u64;
            count += 1;
        }
        engine.put_batch(&self.0[..count])?;
        Ok((count as u64, bytes))
    }
}

/// Writes records in batches, because a transaction for each record would take some engines minutes.
pub(crate) fn load(engine: &dyn Engine, shape: &Shape, mut indices: Range<u64>) -> Result<()> {
    let mut batch = BatchBuffer::default();
    while !indices.is_empty() {
        indices.start += batch.put(engine, shape, indices.clone())?.0;
    }
    Ok(())
}

/// Draws ranks in `0..n` by a zipfian distribution; rank 0 is the most frequent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Zipfian {
    n: u64,
    law: Zipf<f64>,
}

impl Zipfian {
    /// A distribution over `n` ranks, at least 1.
    pub(crate) fn new(n: u64) -> Zipfian {
        Zipfian { n: n.max(1), law: Zipf::new(n.max(1) as f64, THETA).expect("n and the exponent are positive") }
    }

    pub(crate) fn rank(&self, rng: &mut SmallRng) -> u64 {
        (self.law.sample(rng) as u64 - 1).min(self.n - 1)
    }

    /// A rank spread over `0..n`, so that frequent records are not adjacent; like YCSB's, not a bijection.
    pub(crate) fn index(&self, rng: &mut SmallRng) -> u64 {
        scramble(self.rank(rng), self.n)
    }
}

fn scramble(rank: u64, n: u64) -> u64 {
    ((u128::from(mix(rank ^ 0x51ed_270b_3c0f_92a1)) * u128::from(n)) >> 64) as u64
}

/// A generator for `seed`.
pub(crate) fn rng(seed: u64) -> SmallRng {
    SmallRng::seed_from_u64(seed)
}

/// Shuffles a slice; the same seed gives the same order.
pub(crate) fn shuffle<T>(all: &mut [T], seed: u64) {
    rand::seq::SliceRandom::shuffle(all, &mut rng(seed));
}

/// A number below `n`.
pub(crate) fn below(rng: &mut SmallRng, n: u64) -> u64 {
    rng.random_range(0..n)
}

#[cfg(test)]
mod tests {
    use super::{Shape, THETA, Zipfian, mix, rng, scramble, unmix};

    fn shape(key_size: usize, value_size: usize, sequential: bool) -> Shape {
        Shape { n: 10, key_size, least_value: value_size, value_size, sequential }
    }

    fn key(shape: &Shape, index: u64) -> Vec<u8> {
        let mut out = Vec::new();
        shape.key(index, &mut out);
        out
    }

    #[test]
    fn unmix_inverts_mix() {
        for x in (0..1000).chain([u64::MAX, 1 << 63]).chain((0..1000).map(mix)) {
            assert_eq!(unmix(mix(x)), x);
        }
    }

    #[test]
    fn keys_have_their_size_and_index() {
        for sequential in [true, false] {
            for size in [8, 16, 24] {
                let shape = shape(size, 8, sequential);
                for index in [0, 1, 2, 255, 256, 1 << 40, u64::MAX] {
                    assert_eq!((key(&shape, index).len(), shape.index_of(&key(&shape, index))), (size, Some(index)));
                }
            }
        }
        let scrambled = shape(16, 8, false);
        for foreign in [&b"short"[..], &[b'1'; 16], &[b'0'; 17]] {
            assert_eq!(scrambled.index_of(foreign), None);
        }
    }

    #[test]
    fn only_sequential_keys_ascend() {
        let rises = |shape: Shape| (0..10_000).filter(|&i| key(&shape, i) < key(&shape, i + 1)).count();
        assert_eq!(rises(shape(16, 8, true)), 10_000);
        assert!((4_500..5_500).contains(&rises(shape(16, 8, false))));
    }

    #[test]
    fn values_have_their_size_and_generation() {
        for size in [8, 9, 16, 100, 101, 4096] {
            for (index, generation) in [(0, 1), (1, 1), (77, 3), (u64::MAX, 1 << 31)] {
                let (shape, mut bytes) = (shape(16, size, false), Vec::new());
                shape.value(index, generation, &mut bytes);
                assert_eq!((bytes.len(), shape.check(index, &bytes)), (size, Some(generation)));
            }
        }
    }

    #[test]
    fn every_changed_byte_is_detected() {
        let (shape, mut good) = (shape(16, 100, false), Vec::new());
        shape.value(42, 7, &mut good);
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert_ne!(shape.check(42, &bad), Some(7), "byte {at}");
        }
        assert!(shape.check(43, &good) != Some(7) && shape.check(42, &good[..99]).is_none());
    }

    #[test]
    fn totals_are_the_sums_of_the_records() {
        let fixed = shape(16, 84, false);
        assert_eq!((fixed.total_bytes(), fixed.mean_record_bytes()), (1000, 100.0));
        let blobs = Shape { n: 20_000, least_value: 4 << 10, value_size: 1 << 20, ..fixed };
        let mean = blobs.total_bytes() as f64 / 20_000.0;
        assert!((mean / blobs.mean_record_bytes() - 1.0).abs() < 0.03, "{mean}");
        assert!((150_000.0..230_000.0).contains(&mean), "{mean}");
    }

    #[test]
    fn zipfian_frequencies_follow_the_law() {
        let (n, draws) = (1000u64, 500_000u32);
        let (zipf, mut rng) = (Zipfian::new(n), rng(11));
        let mut hits = vec![0u32; n as usize];
        (0..draws).for_each(|_| hits[zipf.rank(&mut rng) as usize] += 1);
        let weight = |from: usize, to: usize| (from..to).map(|i| (i as f64 + 1.0).powf(-THETA)).sum::<f64>();
        for (from, to) in [(0, 1), (1, 2), (0, 10), (10, 100), (100, 1000)] {
            let got = f64::from(hits[from..to].iter().sum::<u32>()) / f64::from(draws);
            let expected = weight(from, to) / weight(0, 1000);
            assert!((got / expected - 1.0).abs() < 0.03, "{from}..{to}: {got} instead of {expected}");
        }
    }

    #[test]
    fn zipfian_choices_stay_in_range_and_spread() {
        let mut rng = rng(1);
        for n in [1, 2, 3, 10] {
            let zipf = Zipfian::new(n);
            assert!((0..1000).all(|_| zipf.rank(&mut rng) < n && zipf.index(&mut rng) < n));
        }
        let near = (0..1000).filter(|&r| scramble(r, 1 << 20).abs_diff(scramble(r + 1, 1 << 20)) < 1 << 10).count();
        assert!(near < 20, "{near}");
    }
}
