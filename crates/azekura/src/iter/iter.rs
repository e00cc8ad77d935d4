//! The contract of every cursor, from a block to a merged tree.

use crate::base::shared_bytes::SharedBytes;
use crate::base::{EntryRef, InternalKey, RecordKind, Result};

/// A position among entries in internal order (see [`InternalKey`]); not valid until the first seek.
///
/// Stepping off either end makes it not valid; then only a seek brings it back. `next` and `prev` must only be called
/// on a valid cursor.
pub(crate) trait InternalIter: Send {
    /// To the first entry.
    fn seek_to_first(&mut self) -> Result<()>;

    /// To the last entry.
    fn seek_to_last(&mut self) -> Result<()>;

    /// To the first entry at or behind `target`.
    fn seek(&mut self, target: InternalKey<'_>) -> Result<()>;

    /// To the last entry strictly before `target`.
    fn seek_before(&mut self, target: InternalKey<'_>) -> Result<()>;

    /// One entry on.
    fn next(&mut self) -> Result<()>;

    /// One entry back.
    fn prev(&mut self) -> Result<()>;

    /// Moves to the next entry and returns its key and kind, in one call.
    fn next_key(&mut self) -> Result<Option<(InternalKey<'_>, RecordKind)>> {
        self.next()?;
        Ok(self.current().map(|entry| (entry.key(), entry.kind)))
    }

    /// Moves to the next entry and returns all of it, in one call.
    fn next_ref(&mut self) -> Result<Option<EntryRef<'_>>> {
        self.next()?;
        Ok(self.current())
    }

    /// Whether it stands on an entry.
    fn valid(&self) -> bool;

    /// The entry it stands on; only on a valid cursor.
    fn entry(&self) -> EntryRef<'_>;

    /// The current entry, if the iterator is valid.
    fn current(&self) -> Option<EntryRef<'_>> {
        self.valid().then(|| self.entry())
    }

    /// Key and kind of the entry it stands on, if it stands on one: for callers that do not read the value.
    fn head(&self) -> Option<(InternalKey<'_>, RecordKind)> {
        self.current().map(|entry| (entry.key(), entry.kind))
    }

    /// Whether it returns every key at most once, in its newest visible version with its value, and no tombstones.
    /// Then the caller need not look for older versions of an entry.
    fn is_visibility_resolved(&self) -> bool {
        false
    }

    /// The value of the entry it stands on, to keep without a copy; none where what it stands in is more than twice as
    /// large, or does not outlive the cursor. Worth the call for values of at least
    /// [`SHARED_LEN_MIN`](crate::base::shared_bytes::SHARED_LEN_MIN) bytes.
    fn shared_value(&self) -> Option<SharedBytes> {
        None
    }
}

impl InternalIter for Box<dyn InternalIter> {
    fn seek_to_first(&mut self) -> Result<()> {
        (**self).seek_to_first()
    }

    fn seek_to_last(&mut self) -> Result<()> {
        (**self).seek_to_last()
    }

    fn seek(&mut self, target: InternalKey<'_>) -> Result<()> {
        (**self).seek(target)
    }

    fn seek_before(&mut self, target: InternalKey<'_>) -> Result<()> {
        (**self).seek_before(target)
    }

    fn next(&mut self) -> Result<()> {
        (**self).next()
    }

    fn prev(&mut self) -> Result<()> {
        (**self).prev()
    }

    fn next_key(&mut self) -> Result<Option<(InternalKey<'_>, RecordKind)>> {
        (**self).next_key()
    }

    fn next_ref(&mut self) -> Result<Option<EntryRef<'_>>> {
        (**self).next_ref()
    }

    fn valid(&self) -> bool {
        (**self).valid()
    }

    fn entry(&self) -> EntryRef<'_> {
        (**self).entry()
    }

    fn current(&self) -> Option<EntryRef<'_>> {
        (**self).current()
    }

    fn head(&self) -> Option<(InternalKey<'_>, RecordKind)> {
        (**self).head()
    }

    fn is_visibility_resolved(&self) -> bool {
        (**self).is_visibility_resolved()
    }

    fn shared_value(&self) -> Option<SharedBytes> {
        (**self).shared_value()
    }
}
