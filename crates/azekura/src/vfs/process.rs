//! Which process runs: a forked child has the memory of its parent, its open files too, and must not act on them.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::vfs::mmap::wiped_on_fork;

/// A number that is the same in all threads of this process, and another one in every child that it forks.
///
/// Costs a load from memory where the kernel wipes a page on fork (Linux 4.14), a system call elsewhere.
pub(crate) fn process_token() -> u64 {
    static WORD: OnceLock<Option<&'static AtomicU64>> = OnceLock::new();
    let Some(word) = WORD.get_or_init(wiped_on_fork) else { return u64::from(std::process::id()) };
    match word.load(Ordering::Relaxed) {
        0 => assign_token(word),
        token => token,
    }
}

/// Draws the number of a new process. The clock is in it because a process id alone comes again, in another namespace
/// even at the same time.
#[cold]
fn assign_token(word: &AtomicU64) -> u64 {
    let now_ns = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
    let token = (u64::from(std::process::id()) << 32 ^ now_ns) | 1;
    word.compare_exchange(0, token, Ordering::Relaxed, Ordering::Relaxed).map_or_else(|other| other, |_| token)
}
