//! Simulated file systems and environments for tests, behind the feature `testing`.
//!
//! With them a test is deterministic, loses power at a chosen operation, or fails a chosen call. No code of the engine
//! outside of tests uses this folder.
//!
//! - [`MemFs`] keeps files in memory and can lose power in every way that a machine can.
//! - [`FaultFs`] wraps another file system and fails chosen calls.
//! - [`decode`] runs one decoder of bytes from disk, for fuzzing.
//! - [`wait_for_readers`] waits for calls on other threads, whose readers delay the reuse of space and file handles.
//! - [`flushes_waiting_for_space`] counts flushes that wait for another task on a full disk.
//! - [`TestEnv`] has random bytes from a seed and a clock that the test sets.
//!
//! Modules, in reading order: `seeded_rng`, `test_env`, `mem_fs`, `fault_fs`, `fuzz_decoders`.

#![expect(clippy::disallowed_methods, reason = "this folder implements the access that clippy.toml bans elsewhere")]

pub(crate) mod fault_fs;
pub(crate) mod fuzz_decoders;
pub(crate) mod mem_fs;
pub(crate) mod seeded_rng;
pub(crate) mod test_env;

use crate::db::database::Database;

pub use fault_fs::{Fault, FaultFrequency, FaultFs, FaultPlan, OpKind};
pub use fuzz_decoders::{FuzzDecoder, decode};
pub use mem_fs::{MemFs, Survival};
pub use test_env::TestEnv;

/// Waits until every call that reads a database on another thread of this process has ended, and its memory is freed.
///
/// The threads of a process share the epochs that delay the reuse of memory, pool space and file handles. A test that
/// expects something to be reusable calls this first, because other tests read at the same time.
///
/// # Example
///
/// ```
/// let reader = std::thread::spawn(|| azekura::testing::wait_for_readers());
/// assert!(reader.join().is_ok());
/// ```
pub fn wait_for_readers() {
    crate::mem::epoch::wait_for_readers();
}

/// The number of flushes of `db` that wait because another task runs alone with the disk reserve.
///
/// # Example
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// let db = azekura::Config::new(dir.path().join("db")).open()?;
/// assert_eq!(azekura::testing::flushes_waiting_for_space(&db), 0);
/// # Ok(()) }
/// ```
pub fn flushes_waiting_for_space(db: &Database) -> usize {
    db.handle.inner.flushes_waiting_for_space()
}
