//! Seeds of random tests, and messages that say how to repeat a failure.

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
