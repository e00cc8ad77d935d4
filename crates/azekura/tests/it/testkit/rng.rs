//! Random numbers from a seed, and messages that say how to repeat a failure.

/// A small pseudo-random generator (splitmix64): the same seed gives the same numbers on every machine.
#[derive(Clone, Debug)]
pub(crate) struct SeededRng(u64);

impl SeededRng {
    pub(crate) fn new(seed: u64) -> SeededRng {
        let mut rng = SeededRng(seed.wrapping_mul(0x2545_F491_4F6C_DD1D) ^ 0x5DEE_CE66);
        rng.next_u64();
        rng
    }

    /// 64 random bits.
    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`, which is at least 1.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next_u64() % n
    }

    /// The same as an index.
    pub(crate) fn index(&mut self, n: usize) -> usize {
        self.below(n as u64) as usize
    }

    /// True once in `n` times.
    pub(crate) fn chance_one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// One of a list.
    pub(crate) fn pick<T: Clone>(&mut self, list: &[T]) -> T {
        list[self.index(list.len())].clone()
    }

    /// Bytes that no codec compresses.
    pub(crate) fn random_bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            bytes.extend_from_slice(&self.next_u64().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }
}

/// The number in an environment variable, or `default`.
pub(crate) fn env_u64(variable: &str, default: u64) -> u64 {
    match std::env::var(variable) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{variable}={text} is no number")),
        Err(_) => default,
    }
}

/// Prints how to repeat the failure if the thread panics.
pub(crate) struct FailureReport {
    pub(crate) test: &'static str,
    pub(crate) seed: u64,
    /// The current step of the run; the test updates it.
    pub(crate) progress: std::cell::RefCell<String>,
}

impl FailureReport {
    pub(crate) fn new(test: &'static str, seed: u64) -> FailureReport {
        FailureReport { test, seed, progress: std::cell::RefCell::default() }
    }

    /// Records the current step.
    pub(crate) fn set_progress(&self, place: impl std::fmt::Display) {
        *self.progress.borrow_mut() = place.to_string();
    }
}

impl Drop for FailureReport {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let place = self.progress.borrow();
            eprintln!("failed at {place}");
            eprintln!("again: AZEKURA_SEED={} cargo test -p azekura --test it -- {}", self.seed, self.test);
        }
    }
}

/// The seeds of a test: `count` of them, or the single one that `AZEKURA_SEED` names.
pub(crate) fn test_seeds(count: u64) -> Vec<u64> {
    match std::env::var("AZEKURA_SEED") {
        Ok(_) => vec![env_u64("AZEKURA_SEED", 0)],
        Err(_) => (0..count).collect(),
    }
}
