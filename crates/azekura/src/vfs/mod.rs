//! The only access to the operating system: files, mappings, clocks, threads, random numbers.
//!
//! Nothing above this layer uses `std::fs`, `std::thread`, `Instant` or random sources (`clippy.toml` bans them), so
//! a test with its own [`Fs`] and [`Env`] is deterministic.
//!
//! Invariants:
//! - Every error names the file.
//! - `write_at` writes everything or fails. `read_at` and `write_at` retry interrupted calls.
//! - Unsafe code is in `mmap.rs` only.
//!
//! Modules, in reading order: [`fs`] (the interface), [`env`](mod@env), [`disk`] with [`disk_file`], [`direct_io`]
//! and [`mmap`], [`mem`] (a simulation with `crash()`), [`fault`], [`seeded_rng`] (for the simulations); above the
//! interface: [`open_files`] (open handles and their limit), [`read_ahead`], [`buffered_writer`].

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
pub(crate) mod mem;
pub(crate) mod mmap;
pub(crate) mod open_files;
pub(crate) mod read_ahead;
pub(crate) mod seeded_rng;

pub(crate) use env::Env;
pub(crate) use fs::{File, FileLock, Fs, LockMode, Mapping, OpenMode};
