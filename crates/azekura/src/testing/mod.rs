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
//! - [`is_in_own_process`] runs a test that no other test may disturb.
//! - [`check_script`] runs a data-driven script.
//! - [`TestOrder`] and [`TestComparator`] are the comparators of all tests.
//! - [`SeededRng`] gives the random numbers of all tests.
//! - [`TestEnv`] has random bytes from a seed and a clock that the test sets.
//! - `vec_iter` has an iterator over entries in memory, for unit tests of the iterators above it.
//! - `wal` has a database that consists of a write-ahead log and a small manifest, for unit tests.
//!
//! Modules, in reading order: `seeded_rng`, `comparators`, `script`, `test_env`, `mem_fs`, `fault_fs`, `fuzz_decoders`,
//! `test_isolation`, `vec_iter`, `wal`.

#![expect(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "this folder implements the access that clippy.toml bans elsewhere"
)]

pub(crate) mod comparators;
pub(crate) mod fault_fs;
pub(crate) mod fuzz_decoders;
pub(crate) mod mem_fs;
pub(crate) mod script;
pub(crate) mod seeded_rng;
pub(crate) mod test_env;
pub(crate) mod test_isolation;
#[cfg(test)]
pub(crate) mod vec_iter;
#[cfg(test)]
pub(crate) mod wal;

pub use comparators::{BlockedComparator, FnComparator, TestComparator, TestOrder};
pub use fault_fs::{Fault, FaultFrequency, FaultFs, FaultPlan, OpKind};
pub use fuzz_decoders::{FuzzDecoder, decode};
pub use mem_fs::{MemFs, Survival};
pub use script::{SCRIPT_SEPARATOR, check_script, parse_script};
pub use seeded_rng::SeededRng;
pub use test_env::TestEnv;
pub use test_isolation::{flushes_waiting_for_space, is_in_own_process, wait_for_readers};
