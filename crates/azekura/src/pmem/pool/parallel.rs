//! Runs one task on several threads while a pool is opened.

use std::sync::Arc;

use crate::base::{Error, ErrorKind, Result};
use crate::vfs::Env;

/// Number of bytes of a pool per additional thread, up to a maximum; few in tests.
const BYTES_PER_HELPER: u64 = if cfg!(all(test, debug_assertions)) { 16 << 10 } else { 16 << 20 };
const HELPERS_MAX: u64 = 3;

/// The error if one of the threads panicked.
pub(crate) fn thread_panicked_error() -> Error {
    Error::new(ErrorKind::Poisoned, "a thread panicked while it read a pool")
}

/// Lets others work on `shared`, as many threads of `env` as `bytes` are worth but no more than `most`, while this one
/// leads; gives it back once all of them are done.
///
/// # Errors
/// `Poisoned` if one of the others panicked.
pub(crate) fn run_with_helpers<T: Send + Sync + 'static>(
    shared: T,
    env: Option<&dyn Env>,
    bytes: u64,
    most: u64,
    lead: impl FnOnce(&T),
    work: fn(&T),
) -> Result<T> {
    let shared = Arc::new(shared);
    let helpers = (bytes / BYTES_PER_HELPER).min(HELPERS_MAX).min(most);
    let mut threads = Vec::new();
    for env in (0..helpers).filter_map(|_| env) {
        let theirs = Arc::clone(&shared);
        // Without a thread this one does their share.
        threads.extend(env.spawn("azekura-open", Box::new(move || work(&theirs))));
    }
    lead(&shared);
    let panics = threads.into_iter().map(|thread| thread.join()).filter(|ended| !ended).count();
    Arc::into_inner(shared).filter(|_| panics == 0).ok_or_else(thread_panicked_error)
}
