//! Values: a pure function of (index, generation), half of it incompressible, checked without a copy.
//!
//! ```text
//! | generation, 8 bytes LE | words without pattern, up to half the size | one byte repeated to the end |
//! ```

use crate::workload::rng::mix;

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Turns (index, generation) into a value and back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Values {
    /// Bytes of each value, at least 8.
    pub(crate) size: usize,
}

impl Values {
    /// Writes the value of `index` in its `generation` over `out`.
    pub(crate) fn write(&self, index: u64, generation: u64, out: &mut Vec<u8>) {
        let seed = seed(index, generation);
        out.clear();
        out.extend_from_slice(&generation.to_le_bytes());
        let mut word = seed;
        while out.len() < self.noise_end() {
            word = word.wrapping_add(STEP);
            out.extend_from_slice(&word.to_le_bytes());
        }
        out.resize(self.size, seed as u8);
    }

    /// The generation of `value` if it is, to the last byte, a value of `index`.
    pub(crate) fn check(&self, index: u64, value: &[u8]) -> Option<u64> {
        let (head, rest) = value.split_first_chunk::<8>()?;
        if value.len() != self.size {
            return None;
        }
        let generation = u64::from_le_bytes(*head);
        let seed = seed(index, generation);
        let (noise, fill) = rest.split_at(self.noise_end() - 8);
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

    /// Where the words end and the repeated byte begins: a multiple of 8.
    fn noise_end(&self) -> usize {
        ((self.size / 2) & !7).max(8)
    }
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
            let values = Values { size };
            for (index, generation) in [(0, 1), (1, 1), (77, 3), (u64::MAX, 1 << 31)] {
                let bytes = value(&values, index, generation);
                assert_eq!(bytes.len(), size);
                assert_eq!(values.check(index, &bytes), Some(generation));
            }
        }
    }

    #[test]
    fn every_changed_byte_is_noticed() {
        let values = Values { size: 100 };
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
        let values = Values { size: 1000 };
        let bytes = value(&values, 5, 1);
        let fill = bytes[999];
        assert!(bytes[496..].iter().all(|&byte| byte == fill));
        let mut seen = [false; 256];
        bytes[..496].iter().for_each(|&byte| seen[usize::from(byte)] = true);
        assert!(seen.iter().filter(|&&hit| hit).count() > 150);
    }
}
