//! The memory of a mapped file. A file system implements it, and a pool uses it.

use std::fmt;
use std::sync::atomic::AtomicU64;

/// Memory of a mapped file as atomic words.
///
/// An implementation must return the same words at every call, because callers keep references to them.
pub trait MappedMemory: Send + Sync + fmt::Debug {
    /// All words. Words after the end of the file must not be accessed.
    fn atomic_words(&self) -> &[AtomicU64];

    /// Whether stores survive power loss once they are flushed from the processor's caches.
    fn survives_power_loss(&self) -> bool;
}
