//! Ranks drawn from a zipfian distribution, as YCSB draws them (Gray et al., "Quickly generating billion-record
//! databases").

use crate::workload::rng::{Rng, mix};

/// The exponent of every zipfian workload.
pub(crate) const THETA: f64 = 0.99;

/// Sums up to here are added term by term; the rest is an integral, good to nine digits.
const EXACT_TERMS: u64 = 1 << 20;

/// Draws ranks in `0..n`; rank 0 is the most frequent.
#[derive(Clone, Debug)]
pub(crate) struct Zipf {
    n: u64,
    theta: f64,
    zeta: f64,
    alpha: f64,
    eta: f64,
}

impl Zipf {
    /// A distribution over `n` ranks (at least 1) with exponent `theta` in `0.0..1.0`.
    pub(crate) fn new(n: u64, theta: f64) -> Zipf {
        let n = n.max(1);
        let zeta_n = zeta(n, theta);
        let eta = (1.0 - (2.0 / n as f64).powf(1.0 - theta)) / (1.0 - zeta(2, theta) / zeta_n);
        Zipf { n, theta, zeta: zeta_n, alpha: 1.0 / (1.0 - theta), eta }
    }

    /// The next rank.
    pub(crate) fn rank(&self, rng: &mut Rng) -> u64 {
        let u = rng.unit();
        let uz = u * self.zeta;
        if uz < 1.0 {
            return 0;
        }
        if uz < 1.0 + 0.5f64.powf(self.theta) {
            return 1.min(self.n - 1);
        }
        let rank = (self.n as f64 * (self.eta * u - self.eta + 1.0).powf(self.alpha)) as u64;
        rank.min(self.n - 1)
    }

    /// The next index: the rank scrambled over `0..n`, so that frequent records are not neighbours.
    pub(crate) fn scrambled(&self, rng: &mut Rng) -> u64 {
        scramble(self.rank(rng), self.n)
    }
}

/// The index in `0..n` at which `rank` is found; like YCSB's, not a bijection.
pub(crate) fn scramble(rank: u64, n: u64) -> u64 {
    ((u128::from(mix(rank ^ 0x51ed_270b_3c0f_92a1)) * u128::from(n)) >> 64) as u64
}

/// The sum of `1 / i^theta` for `i` in `1..=n`.
fn zeta(n: u64, theta: f64) -> f64 {
    let exact = n.min(EXACT_TERMS);
    let head: f64 = (1..=exact).map(|i| (i as f64).powf(-theta)).sum();
    if n == exact {
        return head;
    }
    let (a, b) = (exact as f64, n as f64);
    let integral = (b.powf(1.0 - theta) - a.powf(1.0 - theta)) / (1.0 - theta);
    head + integral + (b.powf(-theta) - a.powf(-theta)) / 2.0
}

#[cfg(test)]
mod tests {
    use super::{EXACT_TERMS, THETA, Zipf, scramble, zeta};
    use crate::workload::rng::Rng;

    #[test]
    fn frequencies_follow_the_law() {
        let n = 1000;
        let zipf = Zipf::new(n, THETA);
        let mut rng = Rng::new(11);
        let draws = 1_000_000;
        let mut hits = vec![0u32; n as usize];
        for _ in 0..draws {
            hits[zipf.rank(&mut rng) as usize] += 1;
        }
        let sum = zeta(n, THETA);
        for rank in [0u64, 1] {
            let expected = f64::from(draws) / ((rank + 1) as f64).powf(THETA) / sum;
            let got = f64::from(hits[rank as usize]);
            assert!((got / expected - 1.0).abs() < 0.02, "rank {rank}: {got} instead of {expected}");
        }
        // Gray's formula is an approximation from rank 2 on: the shares of whole stretches must fit.
        let share = |from: usize, to: usize| f64::from(hits[from..to].iter().sum::<u32>()) / f64::from(draws);
        let law = |from: u64, to: u64| (from..to).map(|i| ((i + 1) as f64).powf(-THETA)).sum::<f64>() / sum;
        for (from, to) in [(0, 10), (10, 100), (100, 1000)] {
            let (got, expected) = (share(from, to), law(from as u64, to as u64));
            assert!((got / expected - 1.0).abs() < 0.06, "{from}..{to}: {got} instead of {expected}");
        }
    }

    #[test]
    fn tail_of_the_sum_agrees_with_adding_it_up() {
        let n = EXACT_TERMS * 2;
        let exact: f64 = (1..=n).map(|i| (i as f64).powf(-THETA)).sum();
        assert!((zeta(n, THETA) - exact).abs() < 1e-9 * exact);
    }

    #[test]
    fn small_ranges_stay_in_range() {
        let mut rng = Rng::new(1);
        for n in [1, 2, 3, 10] {
            let zipf = Zipf::new(n, THETA);
            assert!((0..1000).all(|_| zipf.rank(&mut rng) < n && zipf.scrambled(&mut rng) < n));
        }
    }

    #[test]
    fn scrambling_spreads_neighbours() {
        let near = (0..1000).filter(|&r| scramble(r, 1 << 20).abs_diff(scramble(r + 1, 1 << 20)) < 1 << 10).count();
        assert!(near < 20, "{near}");
    }
}
