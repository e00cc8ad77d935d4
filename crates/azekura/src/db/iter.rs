//! Walking over the keys of a partition, from both ends.

use std::fmt;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use crate::base::blob_ref::BlobRef;
use crate::base::part::LARGE;
use crate::base::{Error, KeyOrder, RecordKind, Result};
use crate::cursor::Cursor;
use crate::cursor::visible::{Ascending, Descending};
use crate::db::handle::Handle;
use crate::db::state::tree::Tree;
use crate::engine::{self, Engine, ReadPin, View};
use crate::mem::slice::Slice;

/// The bounds of a walk, owned.
pub(crate) type Bounds = (Bound<Vec<u8>>, Bound<Vec<u8>>);

/// Copies the bounds of a range of keys.
pub(crate) fn own_bounds<K: AsRef<[u8]>, R: RangeBounds<K>>(range: &R) -> Bounds {
    let own = |bound: Bound<&K>| bound.map(|key| key.as_ref().to_vec());
    (own(range.start_bound()), own(range.end_bound()))
}

/// The keys that begin with `prefix` lie between it and the next string that does not begin with it.
pub(crate) fn prefix_bounds(prefix: &[u8]) -> Bounds {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return (Bound::Included(prefix.to_vec()), Bound::Excluded(end));
        }
    }
    (Bound::Included(prefix.to_vec()), Bound::Unbounded)
}

/// Why an end that is asked stands on an entry.
const STEPPED: &str = "the step to this entry said true";

/// One of the two ends of a walk.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    Front,
    Back,
}

type Front = Option<Ascending<Box<dyn Cursor>>>;
type Back = Option<Descending<Box<dyn Cursor>>>;

/// One walk: two cursors that come towards each other, each made when first needed from the moment that the walk holds.
/// Values that stand elsewhere are read when they are asked for.
pub(crate) struct Walk {
    view: Arc<dyn View>,
    /// Made when the first value is read that stands elsewhere.
    values: Option<Box<dyn engine::Values>>,
    /// The value that was lent last, if it stood elsewhere.
    lent: Slice,
    order: KeyOrder,
    bounds: Bounds,
    pin: ReadPin,
    front: Front,
    back: Back,
    /// The last key that each end gave, since there are two.
    front_key: Option<Vec<u8>>,
    back_key: Option<Vec<u8>>,
    /// Set by an error or by the meeting of the ends: nothing comes any more.
    ended: bool,
    /// Keeps the database open, and so its files where they are. The last field: closing removes the files of tables
    /// that only this walk held.
    handle: Arc<Handle>,
}

impl Walk {
    pub(crate) fn new(handle: Arc<Handle>, tree: &Tree, bounds: Bounds, pin: ReadPin) -> Walk {
        let order = tree.order().clone();
        // An empty or reversed range is empty, not a panic.
        let ended = match (&bounds.0, &bounds.1) {
            (Bound::Included(low), Bound::Included(high)) => order.cmp(low, high).is_gt(),
            (Bound::Included(low) | Bound::Excluded(low), Bound::Included(high) | Bound::Excluded(high)) => {
                order.cmp(low, high).is_ge()
            }
            _ => false,
        };
        Walk {
            view: Arc::from(tree.view()),
            values: None,
            lent: Slice::new(),
            order,
            bounds,
            pin,
            front: None,
            back: None,
            front_key: None,
            back_key: None,
            ended,
            handle,
        }
    }

    /// Steps an end; true if it stands on an entry.
    pub(crate) fn step(&mut self, end: End) -> Result<bool> {
        if self.ended {
            return Ok(false);
        }
        let mut stepped = self.handle.shared.check_open().and_then(|()| match end {
            End::Front => self.step_front(),
            End::Back => self.step_back(),
        });
        self.handle.shared.check_read(&mut stepped);
        self.ended = !matches!(stepped, Ok(true));
        stepped
    }

    fn step_front(&mut self) -> Result<bool> {
        if self.front.is_none() {
            // From now on the back has to say where it stands.
            if let Some(back) = self.back.as_ref().filter(|back| back.valid()) {
                remember(&mut self.back_key, back.key());
            }
        }
        let front = match &mut self.front {
            Some(front) => {
                front.next()?;
                front
            }
            empty => {
                let (at, (start, end)) = (self.pin.at(), &self.bounds);
                let inner = self.view.cursor(at, (start.as_ref(), end.as_ref()))?;
                let front = empty.insert(Ascending::new(inner, self.order.clone(), at, end.clone()));
                front.seek(self.bounds.0.as_ref().map(Vec::as_slice))?;
                front
            }
        };
        if !front.valid() {
            return Ok(false);
        }
        if self.back.is_none() {
            return Ok(true);
        }
        let key = front.key();
        if self.back_key.as_ref().is_some_and(|back| self.order.cmp(key, back).is_ge()) {
            return Ok(false);
        }
        remember(&mut self.front_key, key);
        Ok(true)
    }

    fn step_back(&mut self) -> Result<bool> {
        if self.back.is_none() {
            // From now on the front has to say where it stands.
            if let Some(front) = self.front.as_ref().filter(|front| front.valid()) {
                remember(&mut self.front_key, front.key());
            }
        }
        let back = match &mut self.back {
            Some(back) => {
                back.prev()?;
                back
            }
            empty => {
                let (at, (start, end)) = (self.pin.at(), &self.bounds);
                let inner = self.view.cursor(at, (start.as_ref(), end.as_ref()))?;
                let back = empty.insert(Descending::new(inner, self.order.clone(), at, start.clone()));
                back.seek(self.bounds.1.as_ref().map(Vec::as_slice))?;
                back
            }
        };
        if !back.valid() {
            return Ok(false);
        }
        if self.front.is_none() {
            return Ok(true);
        }
        let key = back.key();
        if self.front_key.as_ref().is_some_and(|front| self.order.cmp(key, front).is_le()) {
            return Ok(false);
        }
        remember(&mut self.back_key, key);
        Ok(true)
    }

    /// The key at an end; this and what follows only after [`step`](Walk::step) said true.
    fn key(&self, end: End) -> Slice {
        let key = match end {
            End::Front => self.front.as_ref().map(Ascending::key),
            End::Back => self.back.as_ref().map(Descending::key),
        };
        Slice::from(key.expect(STEPPED))
    }

    /// Key and value at an end, read if it stands elsewhere; after a failure the walk has ended.
    fn pair(&mut self, end: End) -> Result<(&[u8], Slice)> {
        let (key, kind, bytes) = stored(&self.front, &self.back, end);
        let mut value = match kind {
            RecordKind::BlobPointer => read(&mut self.values, &self.view, bytes),
            _ => Ok(keep(&self.front, &self.back, end, bytes)),
        };
        self.handle.shared.check_read(&mut value);
        match value {
            Ok(value) => Ok((key, value)),
            Err(error) => {
                self.ended = true;
                Err(error)
            }
        }
    }

    /// Whether the next pair at the front may be lent in one step: nobody comes towards it, and what is walked over
    /// shows what is visible by itself.
    #[inline]
    fn is_plain(&self) -> bool {
        self.back.is_none() && self.front.as_ref().is_some_and(Ascending::lends)
    }

    /// Steps the front and lends what it stands on then; only where [`is_plain`](Walk::is_plain) says so.
    fn lend_next(&mut self) -> Result<Option<(&[u8], &[u8])>> {
        let Walk { front: Some(front), ended, handle, .. } = self else { return Ok(None) };
        let was_ended = std::mem::replace(ended, true);
        if was_ended {
            return Ok(None);
        }
        handle.shared.check_open()?;
        let mut lent = front.lend();
        handle.shared.check_read(&mut lent);
        let entry = lent?;
        *ended = entry.is_none();
        Ok(entry.map(|entry| (entry.user, entry.value)))
    }

    /// The same without a copy.
    fn lend(&mut self, end: End) -> Result<(&[u8], &[u8])> {
        let (key, kind, bytes) = stored(&self.front, &self.back, end);
        let mut elsewhere = match kind {
            RecordKind::BlobPointer => read(&mut self.values, &self.view, bytes).map(Some),
            _ => Ok(None),
        };
        self.handle.shared.check_read(&mut elsewhere);
        Ok(match elsewhere.inspect_err(|_| self.ended = true)? {
            Some(value) => {
                self.lent = value;
                (key, &self.lent)
            }
            None => (key, bytes),
        })
    }

    /// The entry at an end; its value is not read.
    fn entry(&self, end: End) -> Result<Entry> {
        let (key, kind, bytes) = stored(&self.front, &self.back, end);
        let value = match kind {
            RecordKind::BlobPointer => EntryValue::Elsewhere(Arc::new(Elsewhere {
                len: BlobRef::decode(bytes)?.len,
                pointer: bytes.to_vec(),
                view: Arc::clone(&self.view),
                handle: Arc::clone(&self.handle),
            })),
            _ => EntryValue::Here(keep(&self.front, &self.back, end, bytes)),
        };
        let mut entry = Ok(Entry { key: Slice::from(key), value });
        self.handle.shared.check_read(&mut entry);
        entry
    }
}

/// The value that a pointer of `view` leads to.
fn read(values: &mut Option<Box<dyn engine::Values>>, view: &Arc<dyn View>, pointer: &[u8]) -> Result<Slice> {
    values.get_or_insert_with(|| view.values()).read(pointer)
}

/// What an end stands on: key, kind, and the value or the pointer to it.
fn stored<'a>(front: &'a Front, back: &'a Back, end: End) -> (&'a [u8], RecordKind, &'a [u8]) {
    let (key, (kind, value)) = match end {
        End::Front => front.as_ref().map(|front| front.entry()).map(|entry| (entry.user, (entry.kind, entry.value))),
        End::Back => back.as_ref().map(|back| (back.key(), back.value())),
    }
    .expect(STEPPED);
    (key, kind, value)
}

/// The value that an end stands on, to keep.
fn keep(front: &Front, back: &Back, end: End, bytes: &[u8]) -> Slice {
    let shared = match end {
        _ if bytes.len() < LARGE => None,
        End::Front => front.as_ref().and_then(Ascending::share),
        End::Back => back.as_ref().and_then(Descending::share),
    };
    shared.map_or_else(|| Slice::from(bytes), Slice::from)
}

fn remember(place: &mut Option<Vec<u8>>, key: &[u8]) {
    let kept = place.get_or_insert_default();
    kept.clear();
    kept.extend_from_slice(key);
}

/// A walk, or the reason why there is none.
pub(crate) enum Source {
    Walk(Box<Walk>),
    Failed(Option<Error>),
}

impl Source {
    pub(crate) fn new(walk: Result<Walk>) -> Source {
        match walk {
            Ok(walk) => Source::Walk(Box::new(walk)),
            Err(error) => Source::Failed(Some(error)),
        }
    }

    /// The walk, one step on at that end; none where it ends.
    #[inline]
    fn step(&mut self, end: End) -> Option<Result<&mut Walk>> {
        match self {
            Source::Failed(error) => error.take().map(Err),
            Source::Walk(walk) => match walk.step(end) {
                Ok(true) => Some(Ok(walk)),
                Ok(false) => None,
                Err(error) => Some(Err(error)),
            },
        }
    }

    /// The next key and value at that end, borrowed until the next step.
    fn lend(&mut self, end: End) -> Option<Result<(&[u8], &[u8])>> {
        if let (Source::Walk(walk), End::Front) = (&mut *self, end)
            && walk.is_plain()
        {
            let Source::Walk(walk) = self else { return None };
            return walk.lend_next().transpose();
        }
        self.step(end).map(|walk| walk.and_then(|walk| walk.lend(end)))
    }
}

/// An entry of a partition: key and value. A value that stands in a blob file is read when it is asked for; until then
/// the entry keeps that file, and the database open.
///
/// ```
/// # use azekura::{Config, KvSeparationOptions, PartitionCreateOptions};
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = Config::new(dir.path().join("db")).open()?;
/// # let apart = KvSeparationOptions::default().automatic_gc(None);
/// # let pages = db.open_partition("pages", PartitionCreateOptions::default().with_kv_separation(apart))?;
/// pages.insert("page", vec![1; 5_000])?;
/// pages.flush()?;
/// for entry in pages.entries() {
///     let entry = entry?;
///     assert_eq!((&**entry.key(), entry.size()), (&b"page"[..], 5_000)); // nothing but the table was read
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
    Here(Slice),
    Elsewhere(Arc<Elsewhere>),
}

struct Elsewhere {
    len: u32,
    pointer: Vec<u8>,
    view: Arc<dyn View>,
    /// The last field, as in [`Walk`].
    handle: Arc<Handle>,
}

impl Entry {
    /// The key.
    pub fn key(&self) -> &Slice {
        &self.key
    }

    /// The value.
    ///
    /// # Errors
    /// Those of reading, where the value does not stand beside the key.
    pub fn value(&self) -> Result<Slice> {
        match &self.value {
            EntryValue::Here(value) => Ok(value.clone()),
            EntryValue::Elsewhere(value) => {
                value.handle.shared.check_open()?;
                let mut read = value.view.values().read(&value.pointer);
                value.handle.shared.check_read(&mut read);
                read
            }
        }
    }

    /// Length of the value in bytes, without reading it.
    pub fn size(&self) -> u32 {
        match &self.value {
            // Values are at most 4 GiB - 1, so the cast loses nothing.
            EntryValue::Here(value) => value.len() as u32,
            EntryValue::Elsewhere(value) => value.len,
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
        /// Shows one moment, however long it lives; owns what it needs and keeps the database open; after an error it
        /// ends.
        #[must_use = "iterators do nothing unless consumed"]
        pub struct $name(pub(crate) Source);

        impl Iterator for $name {
            type Item = Result<$item>;

            fn next(&mut self) -> Option<Result<$item>> {
                self.0.step(End::Front).map(|walk| walk.and_then(|walk| $shape(walk, End::Front)))
            }
        }

        impl DoubleEndedIterator for $name {
            fn next_back(&mut self) -> Option<Result<$item>> {
                self.0.step(End::Back).map(|walk| walk.and_then(|walk| $shape(walk, End::Back)))
            }
        }

        impl std::iter::FusedIterator for $name {}
    };
}

iterator!(
    /// Pairs of key and value, in the order of the keys.
    Iter, (Slice, Slice), |walk: &mut Walk, end| walk.pair(end).map(|(key, value)| (Slice::from(key), value)));
impl Iter {
    /// As [`next`](Iterator::next), but key and value are lent until the next step instead of being copied: the
    /// quickest way over many records. What is skipped or given by the one is skipped by the other.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let words = db.open_partition("words", azekura::PartitionCreateOptions::default())?;
    /// words.insert("a", "1")?;
    /// words.insert("b", "22")?;
    /// let (mut bytes, mut records) = (0, words.iter());
    /// while let Some(record) = records.lend() {
    ///     let (_key, value) = record?;
    ///     bytes += value.len();
    /// }
    /// assert_eq!(bytes, 3);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Those of reading; behind an error it ends.
    pub fn lend(&mut self) -> Option<Result<(&[u8], &[u8])>> {
        self.0.lend(End::Front)
    }

    /// As [`next_back`](DoubleEndedIterator::next_back), but key and value are lent, as by [`lend`](Iter::lend).
    ///
    /// # Errors
    /// Those of reading; behind an error it ends.
    pub fn lend_back(&mut self) -> Option<Result<(&[u8], &[u8])>> {
        self.0.lend(End::Back)
    }
}

iterator!(
    /// Keys in order; values are not read.
    Keys, Slice, |walk: &mut Walk, end| Ok(walk.key(end)));
iterator!(
    /// Values in the order of their keys.
    Values, Slice, |walk: &mut Walk, end| walk.pair(end).map(|(_, value)| value));
iterator!(
    /// Entries in the order of the keys; values in blob files are read when they are asked for.
    Entries, Entry, |walk: &mut Walk, end| walk.entry(end));

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::config::Config;
    use crate::db::options::{EngineType, PartitionCreateOptions};
    use crate::pmem::options::PmemOptions;
    use crate::pmem::walk::VALUES_READ;
    use crate::vfs::mem::MemFs;

    /// `keys()` of a pool read and copied each value above 1 KiB.
    #[test]
    fn keys_of_a_pool_read_no_values() {
        let fs = Arc::new(MemFs::new());
        let db = Config::new(std::path::Path::new("/db")).fs(fs).workers(0).open().unwrap();
        let options = PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default()));
        let part = db.open_partition("p", options).unwrap();
        (0..50u8).for_each(|n| part.insert([n], [n; 3000]).unwrap());
        let reads = |walk: &dyn Fn() -> usize, count: usize| {
            let before = VALUES_READ.get();
            assert_eq!(walk(), count);
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
        assert_eq!(reads(&|| part.iter().count(), 50), 50, "the counter counts");
        assert_eq!(reads(&|| part.iter().rev().count(), 50), 50);
    }

    #[test]
    fn prefixes_end_before_the_next_string() {
        assert_eq!(prefix_bounds(b"ab"), (Bound::Included(b"ab".to_vec()), Bound::Excluded(b"ac".to_vec())));
        assert_eq!(prefix_bounds(b"a\xff"), (Bound::Included(b"a\xff".to_vec()), Bound::Excluded(b"b".to_vec())));
        assert_eq!(prefix_bounds(b"\xff\xff"), (Bound::Included(b"\xff\xff".to_vec()), Bound::Unbounded));
        assert_eq!(prefix_bounds(b""), (Bound::Included(vec![]), Bound::Unbounded));
    }
}
