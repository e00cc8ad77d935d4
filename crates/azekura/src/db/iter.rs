//! Iterators over a partition, usable from both ends.

use std::fmt;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::shared_bytes::SHARED_LEN_MIN;
use crate::base::{Error, KeyOrder, RecordKind, Result};
use crate::db::handle::DbHandle;
use crate::db::inner::closed_error;
use crate::db::state::partition_tree::PartitionTree;
use crate::engine::{self, EngineView, SnapshotGuard};
use crate::iter::InternalIter;
use crate::iter::visible::{BackwardVisibleIter, ForwardVisibleIter, is_after_start, is_before_end};
use crate::mem::slice::Slice;

/// Owned bounds of an iterator.
pub(crate) type OwnedBounds = (Bound<Vec<u8>>, Bound<Vec<u8>>);

/// Copies the bounds of a key range.
pub(crate) fn own_bounds<K: AsRef<[u8]>, R: RangeBounds<K>>(range: &R) -> OwnedBounds {
    let own = |bound: Bound<&K>| bound.map(|key| key.as_ref().to_vec());
    (own(range.start_bound()), own(range.end_bound()))
}

/// Returns the bounds from `prefix` to the next byte string that does not begin with it.
pub(crate) fn prefix_bounds(prefix: &[u8]) -> OwnedBounds {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return (Bound::Included(prefix.to_vec()), Bound::Excluded(end));
        }
    }
    (Bound::Included(prefix.to_vec()), Bound::Unbounded)
}

/// Panic message of a read at an end that has no current entry.
const STEPPED: &str = "the last step of this end returned true";

/// One of the two ends of an iterator.
#[derive(Clone, Copy, Debug)]
pub(crate) enum IterEnd {
    Front,
    Back,
}

type FrontIter = Option<ForwardVisibleIter<Box<dyn InternalIter>>>;
type BackIter = Option<BackwardVisibleIter<Box<dyn InternalIter>>>;

/// A double-ended iterator: a forward and a backward internal iterator over one tree view, each created at its first
/// step. Blob values are read on request.
pub(crate) struct DbIter {
    view: Arc<dyn EngineView>,
    /// Created when the first blob value is read.
    blob_resolver: Option<Box<dyn engine::BlobResolver>>,
    /// The blob value that was returned by reference last.
    last_blob_value: Slice,
    order: KeyOrder,
    bounds: OwnedBounds,
    snapshot: SnapshotGuard,
    front: FrontIter,
    back: BackIter,
    /// The last key returned by each end; set once both ends are in use.
    front_key: Option<Vec<u8>>,
    back_key: Option<Vec<u8>>,
    /// Where the next step of each end seeks to, instead of moving on from the current entry.
    front_target: Option<Bound<Vec<u8>>>,
    back_target: Option<Bound<Vec<u8>>>,
    /// Whether an end was ever sought.
    has_sought: bool,
    /// Set by an error, or when the ends meet: the iterator returns nothing more until it seeks.
    ended: bool,
    /// Whether an error ended the iteration. A seek then starts again, with both ends at the bounds.
    failed: bool,
    /// Keeps the database open, so that its files remain. Must be the last field, because closing removes the
    /// obsolete tables that only this iterator held.
    handle: Arc<DbHandle>,
}

impl DbIter {
    pub(crate) fn new(
        handle: Arc<DbHandle>,
        tree: &PartitionTree,
        bounds: OwnedBounds,
        snapshot: SnapshotGuard,
    ) -> DbIter {
        let order = tree.key_order().clone();
        // An empty or reversed range has no entries; it is not an error.
        let ended = DbIter::is_range_empty(&order, &bounds);
        DbIter {
            view: Arc::from(tree.view()),
            blob_resolver: None,
            last_blob_value: Slice::new(),
            order,
            bounds,
            snapshot,
            front: None,
            back: None,
            front_key: None,
            back_key: None,
            front_target: None,
            back_target: None,
            has_sought: false,
            ended,
            failed: false,
            handle,
        }
    }

    /// Whether no key is within the bounds.
    fn is_range_empty(order: &KeyOrder, bounds: &OwnedBounds) -> bool {
        match (&bounds.0, &bounds.1) {
            (Bound::Included(low), Bound::Included(high)) => order.cmp(low, high).is_gt(),
            (Bound::Included(low) | Bound::Excluded(low), Bound::Included(high) | Bound::Excluded(high)) => {
                order.cmp(low, high).is_ge()
            }
            _ => false,
        }
    }

    /// Sets the position of an end. The next step of that end returns the first entry at or after `key`, or for the
    /// back the last one at or before it.
    pub(crate) fn seek(&mut self, end: IterEnd, key: &[u8]) {
        if DbIter::is_range_empty(&self.order, &self.bounds) {
            return;
        }
        if std::mem::take(&mut self.failed) {
            (self.front, self.front_key, self.front_target) = (None, None, None);
            (self.back, self.back_key, self.back_target) = (None, None, None);
        }
        let (start, stop) = &self.bounds;
        (self.ended, self.has_sought) = (false, true);
        match end {
            IterEnd::Front => {
                if let Some(back) = self.back.as_ref().filter(|back| back.valid() && self.back_target.is_none()) {
                    copy_key_to(&mut self.back_key, back.key());
                }
                let inside = is_after_start(&self.order, start, key);
                self.front_target = Some(if inside { Bound::Included(key.to_vec()) } else { start.clone() });
                self.front_key = None;
            }
            IterEnd::Back => {
                if let Some(front) = self.front.as_ref().filter(|front| front.valid() && self.front_target.is_none()) {
                    copy_key_to(&mut self.front_key, front.key());
                }
                let inside = is_before_end(&self.order, stop, key);
                self.back_target = Some(if inside { Bound::Included(key.to_vec()) } else { stop.clone() });
                self.back_key = None;
            }
        }
    }

    /// Moves an end to its next entry; returns false if there is none.
    pub(crate) fn step(&mut self, end: IterEnd) -> Result<bool> {
        if self.ended {
            return Ok(false);
        }
        let stepped = self.handle.inner.check_open().and_then(|()| match end {
            IterEnd::Front => self.step_front(),
            IterEnd::Back => self.step_back(),
        });
        // Without `check_read`, because a result that is borrowed is stored and loaded again.
        match stepped {
            Ok(true) if self.handle.inner.is_open_after_read() => Ok(true),
            stepped => self.end(stepped),
        }
    }

    /// Ends the iteration with the result of the last step.
    #[cold]
    fn end(&mut self, mut stepped: Result<bool>) -> Result<bool> {
        self.handle.inner.check_read(&mut stepped);
        (self.ended, self.failed) = (true, stepped.is_err());
        stepped
    }

    #[inline]
    fn step_front(&mut self) -> Result<bool> {
        match &mut self.front {
            Some(front) if self.back.is_none() && !self.has_sought => {
                front.next()?;
                Ok(front.valid())
            }
            _ => self.step_front_to_back(),
        }
    }

    /// Moves the front to its first entry, to its target, or to its next entry if that is before the back.
    fn step_front_to_back(&mut self) -> Result<bool> {
        if self.back_target.is_none() && self.back.as_ref().is_some_and(|back| !back.valid()) {
            return Ok(false); // the back has passed every key
        }
        if self.front.is_none() {
            // The back has recorded no key while it was the only end in use.
            if let Some(back) = self.back.as_ref().filter(|back| back.valid() && self.back_target.is_none()) {
                copy_key_to(&mut self.back_key, back.key());
            }
        }
        let front = match (&mut self.front, &self.front_target) {
            (Some(front), None) => {
                if !front.valid() {
                    return Ok(false);
                }
                front.next()?;
                front
            }
            (front, target) => {
                let (at, (start, end)) = (self.snapshot.seqno(), &self.bounds);
                let target = target.as_ref().unwrap_or(start);
                if let Bound::Included(key) | Bound::Excluded(key) = target
                    && !is_before_end(&self.order, end, key)
                {
                    return Ok(false); // the target remains
                }
                let front = match front {
                    Some(front) => front,
                    None => {
                        let inner = self.view.iter(at, (start.as_ref(), end.as_ref()))?;
                        front.insert(ForwardVisibleIter::new(inner, self.order.clone(), at, end.clone()))
                    }
                };
                front.seek(target.as_ref().map(Vec::as_slice))?;
                if front.valid() {
                    self.front_target = None;
                }
                front
            }
        };
        if !front.valid() {
            return Ok(false);
        }
        if self.back.is_none() && self.back_target.is_none() {
            return Ok(true);
        }
        let key = front.key();
        let is_behind_back = self.back_target.as_ref().is_some_and(|back| !is_before_end(&self.order, back, key))
            || self.back_key.as_ref().is_some_and(|back| self.order.cmp(key, back).is_ge());
        if is_behind_back {
            self.front_target = Some(Bound::Included(key.to_vec()));
            return Ok(false);
        }
        copy_key_to(&mut self.front_key, key);
        Ok(true)
    }

    fn step_back(&mut self) -> Result<bool> {
        if self.front_target.is_none() && self.front.as_ref().is_some_and(|front| !front.valid()) {
            return Ok(false); // the front has passed every key
        }
        if self.back.is_none() {
            // The front has recorded no key while it was the only end in use.
            if let Some(front) = self.front.as_ref().filter(|front| front.valid() && self.front_target.is_none()) {
                copy_key_to(&mut self.front_key, front.key());
            }
        }
        let back = match (&mut self.back, &self.back_target) {
            (Some(back), None) => {
                if !back.valid() {
                    return Ok(false);
                }
                back.prev()?;
                back
            }
            (back, target) => {
                let (at, (start, end)) = (self.snapshot.seqno(), &self.bounds);
                let target = target.as_ref().unwrap_or(end);
                if let Bound::Included(key) | Bound::Excluded(key) = target
                    && !is_after_start(&self.order, start, key)
                {
                    return Ok(false); // the target remains
                }
                let back = match back {
                    Some(back) => back,
                    None => {
                        let inner = self.view.iter(at, (start.as_ref(), end.as_ref()))?;
                        back.insert(BackwardVisibleIter::new(inner, self.order.clone(), at, start.clone()))
                    }
                };
                back.seek(target.as_ref().map(Vec::as_slice))?;
                if back.valid() {
                    self.back_target = None;
                }
                back
            }
        };
        if !back.valid() {
            return Ok(false);
        }
        if self.front.is_none() && self.front_target.is_none() {
            return Ok(true);
        }
        let key = back.key();
        let is_before_front = self.front_target.as_ref().is_some_and(|front| !is_after_start(&self.order, front, key))
            || self.front_key.as_ref().is_some_and(|front| self.order.cmp(key, front).is_le());
        if is_before_front {
            self.back_target = Some(Bound::Included(key.to_vec()));
            return Ok(false);
        }
        copy_key_to(&mut self.back_key, key);
        Ok(true)
    }

    /// Returns the key at an end. This and the following methods require that the last [`step`](DbIter::step) of that
    /// end returned true.
    fn key(&self, end: IterEnd) -> Slice {
        let key = match end {
            IterEnd::Front => self.front.as_ref().map(ForwardVisibleIter::key),
            IterEnd::Back => self.back.as_ref().map(BackwardVisibleIter::key),
        };
        Slice::from(key.expect(STEPPED))
    }

    /// Returns `own(key)` and the value at an end; reads a blob value. After an error the iterator has ended.
    #[inline]
    fn pair<K>(&mut self, end: IterEnd, own: impl FnOnce(&[u8]) -> K) -> Result<(K, Slice)> {
        let (key, kind, bytes) = entry_at(&self.front, &self.back, end);
        if kind != RecordKind::BlobPointer {
            // Before the copy, because `bytes` are in memory of the iterator, and without `check_read`, as in `step`.
            if self.handle.inner.is_open_after_read() {
                return Ok((own(key), to_slice(&self.front, &self.back, end, bytes)));
            }
            (self.ended, self.failed) = (true, true);
            return Err(closed_error());
        }
        let mut value = read_blob(&mut self.blob_resolver, &self.view, bytes);
        self.handle.inner.check_read(&mut value);
        match value {
            Ok(value) => Ok((own(key), value)),
            Err(error) => {
                (self.ended, self.failed) = (true, true);
                Err(error)
            }
        }
    }

    /// Returns whether [`next_pair_ref`](DbIter::next_pair_ref) may be used: the back is unused, and the front
    /// resolves visibility without copying.
    #[inline]
    fn is_forward_only(&self) -> bool {
        self.back.is_none() && !self.has_sought && self.front.as_ref().is_some_and(ForwardVisibleIter::has_next_ref)
    }

    /// Moves the front and returns its entry by reference. Requires [`is_forward_only`](DbIter::is_forward_only).
    fn next_pair_ref(&mut self) -> Result<Option<(&[u8], &[u8])>> {
        let DbIter { front: Some(front), ended, failed, handle, .. } = self else { return Ok(None) };
        let was_ended = std::mem::replace(ended, true);
        if was_ended {
            return Ok(None);
        }
        *failed = true;
        handle.inner.check_open()?;
        let mut entry = front.next_ref();
        handle.inner.check_read(&mut entry);
        let entry = entry?;
        *failed = false;
        *ended = entry.is_none();
        Ok(entry.map(|entry| (entry.user_key, entry.value)))
    }

    /// Returns key and value at an end by reference.
    fn pair_ref(&mut self, end: IterEnd) -> Result<(&[u8], &[u8])> {
        let (key, kind, bytes) = entry_at(&self.front, &self.back, end);
        let mut blob_value = match kind {
            RecordKind::BlobPointer => read_blob(&mut self.blob_resolver, &self.view, bytes).map(Some),
            _ => Ok(None),
        };
        self.handle.inner.check_read(&mut blob_value);
        Ok(match blob_value.inspect_err(|_| (self.ended, self.failed) = (true, true))? {
            Some(value) => {
                self.last_blob_value = value;
                (key, &self.last_blob_value)
            }
            None => (key, bytes),
        })
    }

    /// Returns the entry at an end without reading a blob value.
    fn entry(&self, end: IterEnd) -> Result<Entry> {
        let (key, kind, bytes) = entry_at(&self.front, &self.back, end);
        let value = match kind {
            RecordKind::BlobPointer => EntryValue::Blob(Arc::new(UnreadBlob {
                len: BlobPointer::decode(bytes)?.value_len,
                pointer: bytes.to_vec(),
                view: Arc::clone(&self.view),
                handle: Arc::clone(&self.handle),
            })),
            _ => EntryValue::Inline(to_slice(&self.front, &self.back, end, bytes)),
        };
        let mut entry = Ok(Entry { key: Slice::from(key), value });
        self.handle.inner.check_read(&mut entry);
        entry
    }
}

/// Reads the blob value that `pointer` refers to.
fn read_blob(
    resolver: &mut Option<Box<dyn engine::BlobResolver>>,
    view: &Arc<dyn EngineView>,
    pointer: &[u8],
) -> Result<Slice> {
    resolver.get_or_insert_with(|| view.blob_resolver()).resolve(pointer)
}

/// Returns key, record kind, and value or blob pointer at an end.
#[inline(always)]
fn entry_at<'a>(front: &'a FrontIter, back: &'a BackIter, end: IterEnd) -> (&'a [u8], RecordKind, &'a [u8]) {
    let (key, (kind, value)) = match end {
        IterEnd::Front => {
            front.as_ref().map(|front| front.entry()).map(|entry| (entry.user_key, (entry.kind, entry.value)))
        }
        IterEnd::Back => back.as_ref().map(|back| (back.key(), back.value())),
    }
    .expect(STEPPED);
    (key, kind, value)
}

/// Returns an owned value: shares the bytes of the block if the value has at least [`SHARED_LEN_MIN`] bytes and the
/// iterator can share it, else copies it.
fn to_slice(front: &FrontIter, back: &BackIter, end: IterEnd, bytes: &[u8]) -> Slice {
    let shared = match end {
        _ if bytes.len() < SHARED_LEN_MIN => None,
        IterEnd::Front => front.as_ref().and_then(ForwardVisibleIter::shared_value),
        IterEnd::Back => back.as_ref().and_then(BackwardVisibleIter::shared_value),
    };
    shared.map_or_else(|| Slice::from(bytes), Slice::from)
}

fn copy_key_to(target: &mut Option<Vec<u8>>, key: &[u8]) {
    let buffer = target.get_or_insert_default();
    buffer.clear();
    buffer.extend_from_slice(key);
}

/// An iterator, or the error that prevented its creation.
pub(crate) enum IterState {
    Active(Box<DbIter>),
    Failed(Option<Error>),
}

impl IterState {
    pub(crate) fn new(iter: Result<DbIter>) -> IterState {
        match iter {
            Ok(iter) => IterState::Active(Box::new(iter)),
            Err(error) => IterState::Failed(Some(error)),
        }
    }

    /// Moves an end and returns the iterator; `None` if that end has no more entries.
    #[inline]
    fn step(&mut self, end: IterEnd) -> Option<Result<&mut DbIter>> {
        match self {
            IterState::Failed(error) => error.take().map(Err),
            IterState::Active(iter) => match iter.step(end) {
                Ok(true) => Some(Ok(iter)),
                Ok(false) => None,
                Err(error) => Some(Err(error)),
            },
        }
    }

    fn seek(&mut self, end: IterEnd, key: &[u8]) {
        if let IterState::Active(iter) = self {
            iter.seek(end, key);
        }
    }

    /// Moves an end and returns key and value, borrowed until the next step.
    fn step_ref(&mut self, end: IterEnd) -> Option<Result<(&[u8], &[u8])>> {
        if let (IterState::Active(iter), IterEnd::Front) = (&mut *self, end)
            && iter.is_forward_only()
        {
            let IterState::Active(iter) = self else { return None };
            return iter.next_pair_ref().transpose();
        }
        self.step(end).map(|iter| iter.and_then(|iter| iter.pair_ref(end)))
    }
}

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
    key: Slice,
    value: EntryValue,
}

#[derive(Clone)]
enum EntryValue {
    Inline(Slice),
    Blob(Arc<UnreadBlob>),
}

struct UnreadBlob {
    len: u32,
    pointer: Vec<u8>,
    view: Arc<dyn EngineView>,
    /// Must be the last field, as in [`DbIter`].
    handle: Arc<DbHandle>,
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
                value.handle.inner.check_open()?;
                let mut read = value.view.blob_resolver().resolve(&value.pointer);
                value.handle.inner.check_read(&mut read);
                read
            }
        }
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

macro_rules! iterator {
    ($(#[$doc:meta])* $name:ident, $item:ty, $shape:expr) => {
        $(#[$doc])*
        ///
        /// Reads one snapshot for its whole lifetime. Owns its tables and memtables, and keeps the database open.
        /// Ends after an error; a seek starts it again, with the other end at its bound.
        #[must_use = "iterators do nothing unless consumed"]
        pub struct $name(pub(crate) IterState);

        impl $name {
            /// Moves the front of the iterator to `key`: the next step returns the first item whose key is at or
            /// after `key`, within the bounds of the iterator.
            ///
            /// The front can move in both directions, also after the iterator has ended. The back keeps its position;
            /// the iterator then has the items from `key` up to the back.
            ///
            /// ```
            /// # fn main() -> azekura::Result<()> {
            /// # let dir = tempfile::tempdir().unwrap();
            /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
            /// let words = db.open_partition("words", Default::default())?;
            /// for word in ["ant", "bee", "cat"] {
            ///     words.insert(word, "")?;
            /// }
            /// let mut keys = words.keys();
            /// keys.seek("bat");
            /// assert_eq!(keys.next().transpose()?.as_deref(), Some(&b"bee"[..]));
            /// # Ok(()) }
            /// ```
            pub fn seek(&mut self, key: impl AsRef<[u8]>) {
                self.0.seek(IterEnd::Front, key.as_ref());
            }

            /// Moves the back of the iterator to `key`: the next step from the back returns the last item whose key
            /// is at or before `key`, within the bounds of the iterator. The front keeps its position.
            ///
            /// ```
            /// # fn main() -> azekura::Result<()> {
            /// # let dir = tempfile::tempdir().unwrap();
            /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
            /// let words = db.open_partition("words", Default::default())?;
            /// for word in ["ant", "bee", "cat"] {
            ///     words.insert(word, "")?;
            /// }
            /// let mut keys = words.keys();
            /// keys.seek_back("bat");
            /// assert_eq!(keys.next_back().transpose()?.as_deref(), Some(&b"ant"[..]));
            /// # Ok(()) }
            /// ```
            pub fn seek_back(&mut self, key: impl AsRef<[u8]>) {
                self.0.seek(IterEnd::Back, key.as_ref());
            }
        }

        impl Iterator for $name {
            type Item = Result<$item>;

            fn next(&mut self) -> Option<Result<$item>> {
                self.0.step(IterEnd::Front).map(|iter| iter.and_then(|iter| $shape(iter, IterEnd::Front)))
            }
        }

        impl DoubleEndedIterator for $name {
            fn next_back(&mut self) -> Option<Result<$item>> {
                self.0.step(IterEnd::Back).map(|iter| iter.and_then(|iter| $shape(iter, IterEnd::Back)))
            }
        }

        impl std::iter::FusedIterator for $name {}

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        }
    };
}

iterator!(
    /// Iterates over key-value pairs in key order.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// fruit.insert("pear", "green")?;
    /// let mut pairs = fruit.iter();
    /// let (first, last) = (pairs.next().unwrap()?, pairs.next_back().unwrap()?);
    /// assert_eq!((first.0, last.0), ("apple".into(), "pear".into()));
    /// assert!(pairs.next().is_none()); // the ends have met
    /// # Ok(()) }
    /// ```
    Iter, (Slice, Slice), |iter: &mut DbIter, end| iter.pair(end, |key| Slice::from(key)));
impl Iter {
    /// Returns the next pair like [`next`](Iterator::next), but borrows key and value until the next step instead of
    /// copying them.
    ///
    /// This is the fastest way to read many records. Both methods advance the same position.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let words = db.open_partition("words", azekura::PartitionCreateOptions::default())?;
    /// words.insert("a", "1")?;
    /// words.insert("b", "22")?;
    /// let (mut bytes, mut records) = (0, words.iter());
    /// while let Some(record) = records.next_ref() {
    ///     let (_key, value) = record?;
    ///     bytes += value.len();
    /// }
    /// assert_eq!(bytes, 3);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Io`, `Corruption` or `Closed` from reading; the iterator ends after an error.
    pub fn next_ref(&mut self) -> Option<Result<(&[u8], &[u8])>> {
        self.0.step_ref(IterEnd::Front)
    }

    /// Returns the next pair from the back like [`next_back`](DoubleEndedIterator::next_back), but borrows key and
    /// value, as [`next_ref`](Iter::next_ref) does.
    ///
    /// # Errors
    /// `Io`, `Corruption` or `Closed` from reading; the iterator ends after an error.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let log = db.open_partition("log", Default::default())?;
    /// for second in [10u64, 20, 30] {
    ///     log.insert(second.to_be_bytes(), "event")?;
    /// }
    /// let mut newest_first = log.iter();
    /// let (second, _event) = newest_first.next_back_ref().unwrap()?;
    /// assert_eq!(second, 30u64.to_be_bytes());
    /// # Ok(()) }
    /// ```
    pub fn next_back_ref(&mut self) -> Option<Result<(&[u8], &[u8])>> {
        self.0.step_ref(IterEnd::Back)
    }
}

iterator!(
    /// Iterates over keys in order; blob values are not read.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let users = db.open_partition("users", Default::default())?;
    /// users.insert("ada", "mathematician")?;
    /// users.insert("grace", "admiral")?;
    /// let descending: Vec<_> = users.keys().rev().map(|key| key.unwrap()).collect();
    /// assert_eq!(descending, ["grace", "ada"]);
    /// # Ok(()) }
    /// ```
    Keys, Slice, |iter: &mut DbIter, end| Ok(iter.key(end)));
iterator!(
    /// Iterates over values in the order of their keys.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let stock = db.open_partition("stock", Default::default())?;
    /// stock.insert("apples", 41u64.to_le_bytes())?;
    /// stock.insert("pears", 7u64.to_le_bytes())?;
    /// let mut total = 0;
    /// for count in stock.values() {
    ///     total += u64::from_le_bytes((&*count?).try_into().unwrap());
    /// }
    /// assert_eq!(total, 48);
    /// # Ok(()) }
    /// ```
    Values, Slice, |iter: &mut DbIter, end| iter.pair(end, |_| ()).map(|(_, value)| value));
iterator!(
    /// Iterates over entries in key order; blob values are read on request.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let photos = db.open_partition("photos", Default::default())?;
    /// photos.insert("moon", vec![7; 2_000])?;
    /// photos.insert("sky", vec![7; 100_000])?;
    /// let largest = photos.entries().map(|photo| photo.unwrap()).max_by_key(|photo| photo.size()).unwrap();
    /// assert_eq!((&**largest.key(), largest.value()?.len()), (&b"sky"[..], 100_000)); // reads one value
    /// # Ok(()) }
    /// ```
    Entries, Entry, |iter: &mut DbIter, end| iter.entry(end));

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::config::Config;
    use crate::db::options::{EngineType, PartitionCreateOptions};
    use crate::pmem::options::PmemOptions;
    use crate::pmem::pool_iter::VALUES_READ;
    use crate::testing::MemFs;

    /// Regression: `keys()` of a pool read and copied each value above 1 KiB.
    #[test]
    fn keys_of_a_pool_read_no_values() {
        let fs = Arc::new(MemFs::new());
        let db = Config::new(std::path::Path::new("/db")).fs(fs).workers(0).open().unwrap();
        let options = PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default()));
        let part = db.open_partition("p", options).unwrap();
        (0..50u8).for_each(|n| part.insert([n], [n; 3000]).unwrap());
        let reads = |iter: &dyn Fn() -> usize, count: usize| {
            let before = VALUES_READ.get();
            assert_eq!(iter(), count);
            VALUES_READ.get() - before
        };
        assert_eq!(reads(&|| part.keys().count(), 50), 0);
        assert_eq!(reads(&|| part.keys().rev().count(), 50), 0);
        let both_ends = || {
            let mut keys = part.keys();
            std::iter::from_fn(|| Some((keys.next()?, keys.next_back()?))).count()
        };
        assert_eq!(reads(&both_ends, 25), 0);
        assert_eq!(reads(&|| part.len().unwrap() as usize, 50), 0);
        assert_eq!(reads(&|| part.iter().count(), 50), 50, "the counter does not count");
        assert_eq!(reads(&|| part.iter().rev().count(), 50), 50);
    }

    #[test]
    fn prefix_bounds_end_before_next_prefix() {
        assert_eq!(prefix_bounds(b"ab"), (Bound::Included(b"ab".to_vec()), Bound::Excluded(b"ac".to_vec())));
        assert_eq!(prefix_bounds(b"a\xff"), (Bound::Included(b"a\xff".to_vec()), Bound::Excluded(b"b".to_vec())));
        assert_eq!(prefix_bounds(b"\xff\xff"), (Bound::Included(b"\xff\xff".to_vec()), Bound::Unbounded));
        assert_eq!(prefix_bounds(b""), (Bound::Included(vec![]), Bound::Unbounded));
    }
}
