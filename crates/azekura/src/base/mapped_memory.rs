//! The memory of mapped files: as words that a pool changes, and as bytes that readers of tables and blob files share.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::base::shared_bytes::BytesOwner;

/// Memory of a mapped file as atomic words.
///
/// An implementation must return the same words at every call, because callers keep references to them.
pub trait MappedMemory: Send + Sync + fmt::Debug {
    /// All words. Words after the end of the file must not be accessed.
    fn atomic_words(&self) -> &[AtomicU64];

    /// Whether stores survive power loss once they are flushed from the processor's caches.
    fn survives_power_loss(&self) -> bool;
}

/// The bytes of a file, mapped for reading. They are unmapped when the last reference is dropped.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// use azekura::fs::{DiskFs, File, Fs, OpenMode};
/// let file = DiskFs::new().open(&dir.path().join("notes"), OpenMode::Create)?;
/// file.write_at(b"text", 0)?;
/// if let Some(mapped) = file.map_for_reading(4)? {
///     assert_eq!(mapped.to_vec(), b"text");
/// }
/// # Ok(()) }
/// ```
pub struct MappedBytes(Box<dyn BytesOwner>);

impl MappedBytes {
    pub(crate) fn new(owner: impl BytesOwner + 'static) -> Arc<MappedBytes> {
        Arc::new(MappedBytes(Box::new(owner)))
    }

    /// Returns a copy of the bytes of a file, for a file system whose files are not mapped by the operating system.
    ///
    /// ```
    /// assert_eq!(azekura::fs::MappedBytes::copied(b"text").to_vec(), b"text");
    /// ```
    pub fn copied(bytes: &[u8]) -> Arc<MappedBytes> {
        MappedBytes::new(Box::<[u8]>::from(bytes))
    }

    /// The bytes in place. Only the engine reads them so, because it knows which files never change.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    /// Returns a copy of the bytes.
    ///
    /// ```
    /// let mapped = azekura::fs::MappedBytes::copied(b"text");
    /// assert_eq!(mapped.to_vec(), b"text");
    /// ```
    pub fn to_vec(&self) -> Vec<u8> {
        self.bytes().to_vec()
    }
}

impl fmt::Debug for MappedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MappedBytes({})", self.bytes().len())
    }
}
