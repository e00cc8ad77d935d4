//! A blocked Bloom filter: all probes of a key are in one cache line, so a lookup costs at most one cache miss.
//!
//! Layout: `docs/format/block.md`.

use crate::base::coding::ByteReader;
use crate::base::{Error, Result};
use crate::block::frame::BlockContents;
use crate::mem::buffer_pool::Buffer;
use crate::mem::simd::prefetch_line;

const LINE_LEN: usize = 64;
const LINE_WORDS: usize = LINE_LEN / 8;
const LINE_BITS: f64 = 512.0;
const TRAILER_LEN: usize = 8;
/// The only layout of a filter.
const BLOCKED_BLOOM: u8 = 1;
/// The probes of a key use two words of 63 bits, nine bits for each probe.
const PROBES_MAX: u8 = 14;
const PROBES_PER_WORD: u8 = 7;

/// A loaded, immutable filter partition.
#[derive(Debug)]
pub(crate) struct FilterBlock {
    /// The filter's cache lines. The buffer is aligned, so that each of them is one cache line of the processor.
    bits: Buffer,
    lines: usize,
    probes: u8,
}

/// The two words from which the probes of a key are taken.
#[inline]
fn words(hash: u64) -> [u64; 2] {
    let mixed = (hash ^ (hash >> 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let first = mixed ^ (mixed >> 32);
    [first, first.wrapping_mul(0xD6E8_FEB8_6659_FD93)]
}

#[inline]
fn line_of(hash: u64, lines: usize) -> usize {
    debug_assert!(lines > 0 && u32::try_from(lines).is_ok(), "a filter has at least one line");
    (((hash >> 32) * lines as u64) >> 32) as usize
}

/// Calls `probe` with a word index and a bit for each probe until it returns false. Returns whether it never did.
#[inline]
fn all_probes(hash: u64, probes: u8, mut probe: impl FnMut(usize, u64) -> bool) -> bool {
    debug_assert!((1..=PROBES_MAX).contains(&probes), "two words have the probes of a key");
    let mut probes_left = probes;
    for mut bits in words(hash) {
        for _ in 0..probes_left.min(PROBES_PER_WORD) {
            if !probe((bits >> 6 & 7) as usize, 1 << (bits & 63)) {
                return false;
            }
            bits >>= 9;
        }
        probes_left = probes_left.saturating_sub(PROBES_PER_WORD);
    }
    true
}

impl FilterBlock {
    /// Builds the filter for the keys with these hashes. It has at least one line.
    pub(crate) fn build(hashes: &[u64], bits_per_key: f32) -> Vec<u8> {
        let bits_per_key = f64::from(bits_per_key);
        let lines = (hashes.len() as f64 * bits_per_key / LINE_BITS).ceil().clamp(1.0, f64::from(u32::MAX)) as usize;
        // Within one line fewer probes suffice than in an unblocked filter (0.69 for each bit of a key), and each
        // probe costs time.
        let probes = ((bits_per_key * 0.6).round() as u8).clamp(1, PROBES_MAX);
        let mut words = vec![0u64; lines * LINE_WORDS];
        for hash in hashes {
            let line = &mut words[LINE_WORDS * line_of(*hash, lines)..][..LINE_WORDS];
            all_probes(*hash, probes, |word, bit| {
                line[word] |= bit;
                true
            });
        }
        let mut out = Vec::with_capacity(lines * LINE_LEN + TRAILER_LEN);
        words.iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
        out.extend_from_slice(&(lines as u32).to_le_bytes());
        out.extend_from_slice(&[probes, BLOCKED_BLOOM, 0, 0]);
        debug_assert_eq!(out.len(), lines * LINE_LEN + TRAILER_LEN, "a filter is its lines and its trailer");
        out
    }

    /// Length in bytes of the lines of the longest filter of up to `len` bytes, trailer included: at least one line.
    pub(crate) fn bits_len_within(len: usize) -> usize {
        (len.saturating_sub(TRAILER_LEN) / LINE_LEN * LINE_LEN).max(LINE_LEN)
    }

    /// # Errors
    /// `Corruption` if the bytes are not a filter, `Unsupported` for another layout.
    pub(crate) fn decode(body: BlockContents) -> Result<FilterBlock> {
        let Some((bits, trailer)) = body.split_last_chunk::<TRAILER_LEN>() else {
            return Err(Error::corruption("filter is shorter than its trailer"));
        };
        let mut d = ByteReader::new(trailer);
        let (lines, probes, layout, zero) = (d.u32()? as usize, d.u8()?, d.u8()?, d.u16()?);
        if layout != BLOCKED_BLOOM || zero != 0 {
            return Err(Error::unsupported(format!("filter layout {layout} needs a newer version")));
        }
        if lines == 0 || lines.checked_mul(LINE_LEN) != Some(bits.len()) || !(1..=PROBES_MAX).contains(&probes) {
            return Err(Error::corruption("filter has a wrong length or an invalid number of probes"));
        }
        let len = bits.len();
        let (mut bits, start) = body.into_parts();
        if start > 0 {
            bits.copy_within(start..start + len, 0);
        }
        bits.truncate(len);
        Ok(FilterBlock { bits, lines, probes })
    }

    /// Prefetches the cache line that [`may_contain`](FilterBlock::may_contain) reads.
    #[inline]
    pub(crate) fn prefetch(&self, hash: u64) {
        prefetch_line(self.bits.as_ptr().wrapping_add(LINE_LEN * line_of(hash, self.lines)));
    }

    /// Returns false only if no key with this hash was added.
    #[inline]
    pub(crate) fn may_contain(&self, hash: u64) -> bool {
        let from = LINE_LEN * line_of(hash, self.lines);
        let line: &[u8; LINE_LEN] = self.bits[from..].first_chunk().expect("every line is complete");
        // A word is stored as eight bytes, least significant first.
        all_probes(hash, self.probes, |word, bit| {
            let bytes = line[8 * word..8 * word + 8].try_into().expect("eight bytes");
            u64::from_le_bytes(bytes) & bit != 0
        })
    }

    /// Memory use in bytes.
    pub(crate) fn memory(&self) -> usize {
        self.bits.memory() + size_of::<FilterBlock>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::checksum::key_hash;
    use crate::block::BlockKind;

    #[test]
    fn filter_contains_keys_and_few_false_positives() {
        for (bits, n, limit) in
            [(10.0f32, 50_000u64, 0.012), (10.0, 3000, 0.015), (5.0, 20_000, 0.12), (16.0, 20_000, 0.0025)]
        {
            let hash = |i: u64| key_hash(9, &i.to_le_bytes());
            let hashes: Vec<u64> = (0..n).map(hash).collect();
            let filter =
                FilterBlock::decode(BlockContents::new(BlockKind::FilterPartition, FilterBlock::build(&hashes, bits)))
                    .unwrap();
            assert!(hashes.iter().all(|h| filter.may_contain(*h)));
            let wrong = (n..n + 200_000).filter(|i| filter.may_contain(hash(*i))).count();
            let rate = wrong as f64 / 200_000.0;
            assert!(rate < limit, "{bits} bits: {rate}");
            assert!(filter.memory() as f64 <= n as f64 * f64::from(bits) / 8.0 + 200.0);
        }
    }

    #[test]
    fn tiny_and_extreme_filters_work() {
        for bits in [0.01f32, 1.0, 24.0, 1000.0] {
            for n in [0u64, 1, 2, 100] {
                let hashes: Vec<u64> = (0..n).map(|i| key_hash(i, b"")).collect();
                let filter = FilterBlock::decode(BlockContents::new(
                    BlockKind::FilterPartition,
                    FilterBlock::build(&hashes, bits),
                ))
                .unwrap();
                assert!(hashes.iter().all(|h| filter.may_contain(*h)));
            }
        }
    }

    #[test]
    fn any_bytes_decode_or_fail() {
        let good = FilterBlock::build(&[1, 2, 3], 10.0);
        for at in 0..good.len() {
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[at] ^= 1 << bit;
                if let Ok(filter) = FilterBlock::decode(BlockContents::new(BlockKind::FilterPartition, bad)) {
                    filter.may_contain(u64::MAX);
                    filter.may_contain(0);
                }
            }
            assert!(FilterBlock::decode(BlockContents::new(BlockKind::FilterPartition, good[..at].to_vec())).is_err());
        }
    }
}
