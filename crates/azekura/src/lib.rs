//! azekura: an embeddable key-value storage engine.

#![allow(dead_code, unused_imports)]
pub(crate) mod base;
pub(crate) mod cursor;
pub(crate) mod engine;
pub(crate) mod mem;
pub(crate) mod vfs;

pub use base::comparator::Comparator;
pub use base::error::{Error, ErrorKind, Result};
pub use mem::slice::Slice;

/// File systems, and the world beside them: what a database stands on, and what stands in for it in tests.
///
/// - [`DiskFs`](fs::DiskFs) and [`SystemEnv`](fs::SystemEnv) are the machine.
/// - [`MemFs`](fs::MemFs) keeps files in memory and can lose power in every way a machine can.
/// - [`FaultFs`](fs::FaultFs) stands around another file system and fails where it is told to.
/// - [`TestEnv`](fs::TestEnv) has random bytes from a seed and a clock that waits for nobody.
pub mod fs {
    pub use crate::vfs::disk::DiskFs;
    pub use crate::vfs::env::{Env, SystemEnv, TestEnv, Thread};
    pub use crate::vfs::fault::{Fault, FaultFs, FaultPlan, OpKind, Times};
    pub use crate::vfs::fs::{DirEntry, File, FileLock, Fs, LockMode, Mapping, OpenMode};
    pub use crate::vfs::mem::{MemFs, Survival};
}
