//! The only access to the operating system: files, mappings, clocks, threads, random numbers.
//!
//! Nothing above this layer uses `std::fs`, `Instant` or random sources, or starts or delays threads by `std::thread`
//! (`clippy.toml` bans them), so a test with its own [`Fs`] and [`Env`] is deterministic. Threads may yield and ask for
//! their ids, because neither reads a clock.
//!
//! Invariants:
//! - Every error names the file.
//! - `write_at` writes everything or fails. `read_at` and `write_at` retry interrupted calls.
//! - Unsafe code is in `mmap.rs` only.
//!
//! Modules, in reading order: [`fs`] (the interface), [`env`](mod@env), [`expiry_clock`], [`lock_holder`], [`disk`]
//! with [`disk_file`] and [`platform`]; on Linux `direct_io` and `mmap`; above the interface: [`open_files`] (open
//! handles and their limit), [`read_ahead`], [`read_many`], [`buffered_writer`].

#![expect(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "this folder implements the access that clippy.toml bans elsewhere"
)]

pub(crate) mod buffered_writer;
#[cfg(target_os = "linux")]
pub(crate) mod direct_io;
pub(crate) mod disk;
pub(crate) mod disk_file;
pub(crate) mod env;
pub(crate) mod expiry_clock;
pub(crate) mod fs;
pub(crate) mod lock_holder;
#[cfg(target_os = "linux")]
pub(crate) mod mmap;
pub(crate) mod open_files;
pub(crate) mod platform;
pub(crate) mod read_ahead;
pub(crate) mod read_many;

pub(crate) use env::Env;
pub(crate) use fs::{File, FileLock, Fs, LockMode, Mapping, OpenMode};
