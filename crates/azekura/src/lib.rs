//! azekura: an embeddable key-value storage engine.

pub(crate) mod base;
pub(crate) mod block;
pub(crate) mod cursor;
pub(crate) mod engine;
pub(crate) mod mem;
pub(crate) mod table;
pub(crate) mod vfs;

pub use base::comparator::Comparator;
pub use base::error::{Error, ErrorKind, Result};
pub use mem::slice::Slice;
pub use table::options::FilterPolicy;
/// File systems and environments to build a database on.
pub mod fs {
    pub use crate::vfs::fs::*;
}
