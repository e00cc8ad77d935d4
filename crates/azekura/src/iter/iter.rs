//! The interface of every internal iterator, from a block to a merged tree.

use crate::base::shared_bytes::SharedBytes;
use crate::base::{EntryRef, InternalKey, RecordKind, Result};

/// A position among entries in internal order (see [`InternalKey`]). An iterator is *valid* while it is at an entry.
///
/// It becomes valid by a seek, and invalid by a step past either end; then only a seek makes it valid again. `next`
/// and `prev` may be called on a valid iterator only.
pub(crate) trait InternalIter: Send {
    /// Moves to the first entry.
    fn seek_to_first(&mut self) -> Result<()>;

    /// Moves to the last entry.
    fn seek_to_last(&mut self) -> Result<()>;

    /// Moves to the first entry at or after `target`.
    fn seek(&mut self, target: InternalKey<'_>) -> Result<()>;

    /// Moves to the last entry before `target`.
    fn seek_before(&mut self, target: InternalKey<'_>) -> Result<()>;

    /// Moves to the next entry.
    fn next(&mut self) -> Result<()>;

    /// Moves to the previous entry.
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

    /// Whether the iterator is at an entry.
    fn valid(&self) -> bool;

    /// The current entry. The iterator must be valid.
    fn entry(&self) -> EntryRef<'_>;

    /// The current entry, if the iterator is valid.
    fn current(&self) -> Option<EntryRef<'_>> {
        self.valid().then(|| self.entry())
    }

    /// Key and kind of the current entry, if the iterator is valid, for callers that do not read the value.
    fn head(&self) -> Option<(InternalKey<'_>, RecordKind)> {
        self.current().map(|entry| (entry.key(), entry.kind))
    }

    /// Key and kind of the current entry, if the iterator knows that no entry of the same key precedes it. Then it is
    /// the newest version of its key.
    fn newest_version(&self) -> Option<(InternalKey<'_>, RecordKind)> {
        None
    }

    /// Whether the iterator returns every key at most once, in its newest visible version with its value, and no
    /// tombstones. Then the caller need not skip older versions.
    fn is_visibility_resolved(&self) -> bool {
        false
    }

    /// The value of the current entry as shared bytes. `None` if the shared memory is more than twice as large as the
    /// value, or does not outlive the iterator. The call is useful for values of at least
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

    fn newest_version(&self) -> Option<(InternalKey<'_>, RecordKind)> {
        (**self).newest_version()
    }

    fn is_visibility_resolved(&self) -> bool {
        (**self).is_visibility_resolved()
    }

    fn shared_value(&self) -> Option<SharedBytes> {
        (**self).shared_value()
    }
}
