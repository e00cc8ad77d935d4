//! A seeded generator: splitmix64, one multiplication chain per number.

/// The finalizer of splitmix64: a bijection of 64-bit numbers that leaves no pattern.
pub(crate) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(MIX_A);
    x = (x ^ (x >> 27)).wrapping_mul(MIX_B);
    x ^ (x >> 31)
}

/// The inverse of [`mix`].
pub(crate) fn unmix(mut x: u64) -> u64 {
    x = unshift(x, 31).wrapping_mul(inverse(MIX_B));
    x = unshift(x, 27).wrapping_mul(inverse(MIX_A));
    unshift(x, 30)
}

const MIX_A: u64 = 0xbf58_476d_1ce4_e5b9;
const MIX_B: u64 = 0x94d0_49bb_1331_11eb;

/// Undoes `x ^ (x >> by)`.
const fn unshift(x: u64, by: u32) -> u64 {
    let twice = x ^ (x >> by);
    if by >= 32 { twice } else { x ^ (x >> by) ^ (x >> (2 * by)) }
}

/// The inverse of an odd number modulo 2^64, by Newton's method.
const fn inverse(odd: u64) -> u64 {
    let mut guess = odd; // right in the lowest three bits; each step doubles them
    let mut step = 0;
    while step < 5 {
        guess = guess.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(guess)));
        step += 1;
    }
    guess
}

/// A generator of 64-bit numbers; the same seed gives the same numbers.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    /// A generator for `seed`; seeds that differ by little give unrelated numbers.
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(mix(seed ^ 0x9e37_79b9_7f4a_7c15))
    }

    /// The next number.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `n`, which must not be 0.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }

    /// A number in `0.0..1.0`.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::{Rng, mix, unmix};

    #[test]
    fn unmix_undoes_mix() {
        let mut rng = Rng::new(7);
        for x in (0..1000).chain([u64::MAX, 1 << 63]) {
            assert_eq!(unmix(mix(x)), x);
        }
        for _ in 0..1000 {
            let x = rng.next();
            assert_eq!(unmix(mix(x)), x);
        }
    }

    #[test]
    fn below_is_even_and_in_range() {
        let mut rng = Rng::new(3);
        let mut hits = [0u32; 10];
        for _ in 0..100_000 {
            hits[rng.below(10) as usize] += 1;
        }
        assert!(hits.iter().all(|&n| (9_500..10_500).contains(&n)), "{hits:?}");
        assert!((0..1000).all(|_| (0.0..1.0).contains(&rng.unit())));
    }
}
