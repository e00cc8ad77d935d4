//! The one door to the outside: files, mappings, clocks, threads, randomness.
//!
//! Nothing above this floor touches `std::fs`, `std::thread`, `Instant` or random sources (`clippy.toml` bans them), so
//! a test that brings its own [`Fs`] and [`Env`] is deterministic.
//!
//! Invariants:
//! - every error names the file;
//! - `write_at` writes everything or fails; `read_at` and `write_at` retry interrupted calls;
//! - unsafe code stands only in `mmap.rs`.
//!
//! Rooms in reading order: [`fs`] (the contract), [`env`](mod@env), [`disk`] with its [`disk_file`], [`direct_io`] and
//! [`mmap`], [`process`] (which process runs), [`mem`] (with `crash()`), [`fault`], [`seeded_rng`] (seeded chance for
//! the simulators); over the contract: [`handle_limit`] (the limit on open files), [`open_files`] (which are open),
//! [`read_ahead`] (few large reads), [`buffered_writer`] (few large writes).

#![expect(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "what clippy.toml bans everywhere else is what this folder is for"
)]

pub(crate) mod buffered_writer;
pub(crate) mod direct_io;
pub(crate) mod disk;
pub(crate) mod disk_file;
pub(crate) mod env;
pub(crate) mod fault;
pub(crate) mod fs;
pub(crate) mod handle_limit;
pub(crate) mod mem;
pub(crate) mod mmap;
pub(crate) mod open_files;
pub(crate) mod process;
pub(crate) mod read_ahead;
pub(crate) mod seeded_rng;

pub(crate) use env::Env;
pub(crate) use fs::{File, FileLock, Fs, LockMode, Mapping, OpenMode};
