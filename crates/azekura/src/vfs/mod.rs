//! The one door to the outside: files, mappings, clocks, threads, randomness.
//!
//! Nothing above this floor touches `std::fs`, `std::thread`, `Instant` or random sources (`clippy.toml` bans them), so a
//! test that brings its own [`Fs`] and [`Env`] is deterministic.
//!
//! Invariants:
//! - every error names the file;
//! - `write_at` writes everything or fails; `read_at` retries interrupted calls;
//! - unsafe code stands only in `mmap.rs`.
//!
//! Rooms in reading order: [`fs`] (the contract), [`env`], [`disk`], `mmap`, [`mem`] (with `crash()`), [`fault`].

pub(crate) mod env;
pub(crate) mod fs;

pub(crate) use env::Env;
pub(crate) use fs::{DirEntry, File, FileLock, Fs, LockMode, Mapping, OpenMode};
