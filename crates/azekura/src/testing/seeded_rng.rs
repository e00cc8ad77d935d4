//! Seeded pseudo-random numbers for simulations and tests: the same seed gives the same numbers on every machine. Not
//! for production randomness.

/// A small pseudo-random generator (splitmix64).
///
/// ```
/// let mut rng = azekura::testing::SeededRng::new(7);
/// assert_eq!(rng.clone().random_bytes(9), rng.random_bytes(9));
/// ```
#[derive(Clone, Debug)]
pub struct SeededRng(u64);

impl SeededRng {
    /// Creates a generator.
    pub fn new(seed: u64) -> SeededRng {
        SeededRng::with_stream(seed, 0)
    }

    /// Creates a generator with its own sequence for every pair of `seed` and `stream`.
    pub fn with_stream(seed: u64, stream: u64) -> SeededRng {
        let mut rng = SeededRng(seed);
        SeededRng(rng.next_u64() ^ stream.wrapping_mul(0xD6E8_FEB8_6659_FD93))
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`; 0 if `n` is 0.
    ///
    /// # Panics
    /// If `n` is negative.
    pub fn below<N: TryInto<u64> + TryFrom<u64>>(&mut self, n: N) -> N {
        let n = n.try_into().ok().expect("a number of values is not negative");
        let below = if n == 0 { 0 } else { self.next_u64() % n };
        N::try_from(below).ok().expect("a number below `n` fits into the type of `n`")
    }

    /// True in `hits` of 8 cases.
    pub fn chance_in_8(&mut self, hits: usize) -> bool {
        self.below(8) < hits
    }

    /// True once in `n` times.
    pub fn chance_one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// One of a list that is not empty.
    pub fn pick<T: Clone>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())].clone()
    }

    /// Bytes that no codec compresses.
    pub fn random_bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            bytes.extend_from_slice(&self.next_u64().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_repeats_and_streams_differ() {
        let draws = |seed, stream| {
            let mut rng = SeededRng::with_stream(seed, stream);
            [rng.next_u64(), rng.next_u64(), rng.next_u64()]
        };
        assert_eq!(draws(7, 1), draws(7, 1));
        assert_ne!(draws(7, 1), draws(7, 2));
        assert_ne!(draws(7, 1), draws(8, 1));
    }

    #[test]
    fn below_returns_every_value() {
        let mut rng = SeededRng::new(1);
        let mut seen = [0u32; 6];
        (0..600).for_each(|_| seen[rng.below(6)] += 1);
        assert!(seen.iter().all(|n| (50..200).contains(n)), "{seen:?}");
        assert_eq!(rng.below(0), 0);
        assert!((0..50).all(|_| rng.chance_in_8(8)) && !(0..50).any(|_| rng.chance_in_8(0)));
    }
}
