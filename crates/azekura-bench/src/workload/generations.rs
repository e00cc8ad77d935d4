//! Remembers the newest acknowledged generation of every record, so that a stale read is noticed.

use std::sync::atomic::{AtomicU32, Ordering};

/// The acknowledged generation of each index; shared by all threads, each index written by one thread only.
#[derive(Debug)]
pub(crate) struct Generations(Vec<AtomicU32>);

impl Generations {
    /// All of `n` indices at generation `start`.
    pub(crate) fn new(n: u64, start: u32) -> Generations {
        Generations((0..n).map(|_| AtomicU32::new(start)).collect())
    }

    /// The newest acknowledged generation of `index`.
    pub(crate) fn acknowledged(&self, index: u64) -> u64 {
        u64::from(self.0[index as usize].load(Ordering::Acquire))
    }

    /// Records that `generation` of `index` was acknowledged.
    pub(crate) fn acknowledge(&self, index: u64, generation: u64) {
        self.0[index as usize].store(u32::try_from(generation).unwrap_or(u32::MAX), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::Generations;

    #[test]
    fn remembers_each_index() {
        let generations = Generations::new(3, 1);
        generations.acknowledge(1, 5);
        assert_eq!([0, 1, 2].map(|index| generations.acknowledged(index)), [1, 5, 1]);
    }
}
