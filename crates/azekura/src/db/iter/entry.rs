//! An entry whose value is read on request.

use std::fmt;
use std::sync::Arc;

use crate::base::Result;
use crate::db::handle::DbHandle;
use crate::engine::EngineView;
use crate::mem::slice::Slice;

/// An entry of a partition: key and value. A value in a blob file is read on request; such an entry prevents the
/// removal of the file and keeps the database open until it is dropped.
///
/// ```
/// # use azekura::{Config, KvSeparationOptions, PartitionCreateOptions};
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = Config::new(dir.path().join("db")).open()?;
/// # let separation = KvSeparationOptions::default().automatic_gc(None);
/// # let pages = db.open_partition("pages", PartitionCreateOptions::default().with_kv_separation(separation))?;
/// pages.insert("page", vec![1; 5_000])?;
/// pages.flush()?;
/// for entry in pages.entries() {
///     let entry = entry?;
///     assert_eq!((&**entry.key(), entry.size()), (&b"page"[..], 5_000)); // reads no blob file
///     assert_eq!(entry.value()?, [1; 5_000]);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Entry {
    pub(crate) key: Slice,
    pub(crate) value: EntryValue,
    pub(crate) expiry_ms: Option<u64>,
}

#[derive(Clone)]
pub(crate) enum EntryValue {
    Inline(Slice),
    Blob(Arc<UnreadBlob>),
}

/// A value in a blob file.
pub(crate) struct UnreadBlob {
    pub(crate) len: u32,
    pub(crate) pointer: Vec<u8>,
    pub(crate) view: Arc<dyn EngineView>,
    /// Keeps the database open, so that its files remain. Must be the last field, as in `DbIter`.
    pub(crate) handle: Arc<DbHandle>,
}

impl Drop for UnreadBlob {
    /// In a forked child, keeps what would take locks when it is dropped, because the child may wait forever for them.
    fn drop(&mut self) {
        if self.handle.inner.is_forked() {
            std::mem::forget(Arc::clone(&self.view));
        }
    }
}

impl Entry {
    /// Returns the key.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// # fruit.insert("apple", "red")?;
    /// let entry = fruit.entries().next().unwrap()?;
    /// assert_eq!(*entry.key(), "apple");
    /// # Ok(()) }
    /// ```
    pub fn key(&self) -> &Slice {
        &self.key
    }

    /// Returns the value; reads it from disk if it is in a blob file.
    ///
    /// # Errors
    /// `Io` or `Corruption` from reading the blob file; `Closed`.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "green")?;
    /// let entry = fruit.entries().next().unwrap()?;
    /// fruit.insert("apple", "red")?;
    /// assert_eq!(entry.value()?, "green"); // the value when the iterator was created
    /// # Ok(()) }
    /// ```
    pub fn value(&self) -> Result<Slice> {
        match &self.value {
            EntryValue::Inline(value) => Ok(value.clone()),
            EntryValue::Blob(value) => {
                value.handle.inner.check_process()?; // first, because a forked child may wait forever for a lock
                value.handle.inner.check_open()?;
                let mut read = value.view.blob_resolver().resolve(&value.pointer);
                value.handle.inner.check_read(&mut read);
                read
            }
        }
    }

    /// Returns when the entry expires, in milliseconds since 1970; see
    /// [`Partition::insert_with_ttl`](crate::Partition::insert_with_ttl). `None` if it does not expire.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let sessions = db.open_partition("sessions", Default::default())?;
    /// sessions.insert_with_ttl("ada", "logged in", std::time::Duration::from_secs(3600))?;
    /// sessions.insert("users", "1")?;
    /// let expiry: Vec<Option<u64>> = sessions.entries().map(|entry| entry.unwrap().expiry_ms()).collect();
    /// assert!(expiry[0] > Some(3_600_000) && expiry[1].is_none());
    /// # Ok(()) }
    /// ```
    pub fn expiry_ms(&self) -> Option<u64> {
        self.expiry_ms
    }

    /// Returns the length of the value in bytes without reading it.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let photos = db.open_partition("photos", Default::default())?;
    /// photos.insert("sky", vec![7; 100_000])?;
    /// let total: u64 = photos.entries().map(|photo| u64::from(photo.unwrap().size())).sum();
    /// assert_eq!(total, 100_000);
    /// # Ok(()) }
    /// ```
    pub fn size(&self) -> u32 {
        match &self.value {
            // Values are at most 4 GiB - 1, so the cast loses nothing.
            EntryValue::Inline(value) => value.len() as u32,
            EntryValue::Blob(value) => value.len,
        }
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry").field("key", &self.key).field("size", &self.size()).finish_non_exhaustive()
    }
}
