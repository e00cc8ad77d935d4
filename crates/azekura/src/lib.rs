//! azekura: an embeddable key-value storage engine.

#![allow(dead_code, unused_imports)]
pub(crate) mod base;
pub(crate) mod cursor;
pub(crate) mod engine;
pub(crate) mod manifest;
pub(crate) mod mem;
pub(crate) mod record;
pub(crate) mod vfs;
pub(crate) mod wal;

pub use base::comparator::Comparator;
pub use base::error::{Error, ErrorKind, Result};
pub use mem::slice::Slice;
pub use wal::RecoveryMode;
/// File systems and environments to build a database on.
pub mod fs {
    pub use crate::vfs::fs::*;
}
