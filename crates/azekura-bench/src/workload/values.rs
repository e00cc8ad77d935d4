//! Values: a pure function of (index, generation), half of it incompressible, checked without a copy.
//!
//! ```text
//! | generation, 8 bytes LE | words without pattern, up to half the size | one byte repeated to the end |
//! ```

use crate::workload::rng::mix;

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Makes sizes choices of their own, not those of keys.
const SIZES: u64 = 0x6a09_e667_f3bc_c909;

/// Turns (index, generation) into a value and back. All generations of an index have the same size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Values {
    /// Bytes of the smallest value, at least 8.
    pub(crate) least: usize,
    /// Bytes of the largest value.
    pub(crate) most: usize,
}

impl Values {
    /// Bytes of the values of `index`.
    pub(crate) fn size_of(&self, index: u64) -> usize {
        if self.least >= self.most {
            return self.most;
        }
        let unit = (mix(index ^ SIZES) >> 11) as f64 / (1u64 << 53) as f64;
        let factor = ((self.most as f64 / self.least as f64).ln() * unit).exp();
        ((self.least as f64 * factor) as usize).clamp(self.least, self.most)
    }

    /// Writes the value of `index` in its `generation` over `out`.
    pub(crate) fn write(&self, index: u64, generation: u64, out: &mut Vec<u8>) {
        let seed = seed(index, generation);
        let size = self.size_of(index);
        out.clear();
        out.resize(size, seed as u8);
        let (words, _) = out[..noise_end(size)].as_chunks_mut::<8>();
        let Some((first, words)) = words.split_first_mut() else { return };
        *first = generation.to_le_bytes();
        let mut word = seed;
        for chunk in words {
            word = word.wrapping_add(STEP);
            *chunk = word.to_le_bytes();
        }
    }

    /// The generation of `value` if it is, to the last byte, a value of `index`.
    pub(crate) fn check(&self, index: u64, value: &[u8]) -> Option<u64> {
        let (head, rest) = value.split_first_chunk::<8>()?;
        let size = self.size_of(index);
        if value.len() != size {
            return None;
        }
        let generation = u64::from_le_bytes(*head);
        let seed = seed(index, generation);
        let (noise, fill) = rest.split_at(noise_end(size) - 8);
        let (words, _) = noise.as_chunks::<8>();
        let mut word = seed;
        let mut difference = 0;
        for chunk in words {
            word = word.wrapping_add(STEP);
            difference |= u64::from_le_bytes(*chunk) ^ word;
        }
        let fill_difference = fill.iter().fold(0, |all, byte| all | (byte ^ seed as u8));
        (difference == 0 && fill_difference == 0).then_some(generation)
    }
}

/// Where the words end and the repeated byte begins in a value of `size` bytes: a multiple of 8.
fn noise_end(size: usize) -> usize {
    ((size / 2) & !7).max(8)
}

fn seed(index: u64, generation: u64) -> u64 {
    mix(index.wrapping_mul(STEP) ^ generation.rotate_left(32))
}

#[cfg(test)]
mod tests {
    use super::Values;

    fn value(values: &Values, index: u64, generation: u64) -> Vec<u8> {
        let mut out = Vec::new();
        values.write(index, generation, &mut out);
        out
    }

    #[test]
    fn values_have_their_size_and_tell_their_generation() {
        for size in [8, 9, 16, 100, 101, 4096] {
            let values = Values { least: size, most: size };
            for (index, generation) in [(0, 1), (1, 1), (77, 3), (u64::MAX, 1 << 31)] {
                let bytes = value(&values, index, generation);
                assert_eq!(bytes.len(), size);
                assert_eq!(values.check(index, &bytes), Some(generation));
            }
        }
    }

    #[test]
    fn every_changed_byte_is_noticed() {
        let values = Values { least: 100, most: 100 };
        let good = value(&values, 42, 7);
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert_ne!(values.check(42, &bad), Some(7), "byte {at}");
            assert_eq!(values.check(42, &bad), None, "byte {at}");
        }
        assert_eq!(values.check(43, &good), None);
        assert_eq!(values.check(42, &good[..99]), None);
        assert_eq!(values.check(42, b""), None);
    }

    #[test]
    fn half_of_a_value_is_one_byte_and_half_is_noise() {
        let values = Values { least: 1000, most: 1000 };
        let bytes = value(&values, 5, 1);
        let fill = bytes[999];
        assert!(bytes[496..].iter().all(|&byte| byte == fill));
        let mut seen = [false; 256];
        bytes[..496].iter().for_each(|&byte| seen[usize::from(byte)] = true);
        assert!(seen.iter().filter(|&&hit| hit).count() > 150);
    }

    #[test]
    fn sizes_are_log_uniform_and_the_same_for_ever() {
        let values = Values { least: 4 << 10, most: 1 << 20 };
        let mut octaves = [0u32; 8];
        for index in 0..80_000 {
            octaves[(values.size_of(index) >> 12).ilog2().min(7) as usize] += 1;
        }
        assert!(octaves.iter().all(|&n| (9_500..10_500).contains(&n)), "{octaves:?}");
        let (first, second) = (value(&values, 9, 1), value(&values, 9, 2));
        assert_eq!(first.len(), second.len());
        assert_eq!((values.check(9, &first), values.check(9, &second)), (Some(1), Some(2)));
    }
}
