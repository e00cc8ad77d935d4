//! Walking over the keys of a partition, from both ends.

use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use crate::base::{Error, KeyOrder, Result};
use crate::cursor::Cursor;
use crate::cursor::visible::{Ascending, Descending};
use crate::db::handle::Handle;
use crate::db::state::read_points::ReadPin;
use crate::engine::{Engine, View};
use crate::lsm::tree::LsmTree;
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

/// One walk: two cursors that come towards each other, each made when first needed from the moment that the walk holds.
/// Keys and values are borrowed until the next step.
pub(crate) struct Walk {
    view: Box<dyn View>,
    order: KeyOrder,
    bounds: Bounds,
    pin: ReadPin,
    front: Option<Ascending<Box<dyn Cursor>>>,
    back: Option<Descending<Box<dyn Cursor>>>,
    /// The last key that each end gave.
    front_key: Option<Vec<u8>>,
    back_key: Option<Vec<u8>>,
    /// Set by an error or by the meeting of the ends: nothing comes any more.
    ended: bool,
    /// Keeps the database open, and so its files where they are. The last field: closing removes the files of tables
    /// that only this walk held.
    handle: Arc<Handle>,
}

impl Walk {
    pub(crate) fn new(handle: Arc<Handle>, tree: &LsmTree, bounds: Bounds, pin: ReadPin) -> Walk {
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
            view: tree.view(),
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

    /// Steps the front end; true if it stands on an entry.
    pub(crate) fn advance(&mut self) -> Result<bool> {
        if self.ended {
            return Ok(false);
        }
        let stepped = self.handle.shared.check_open().and_then(|()| self.step_front());
        self.ended = !matches!(stepped, Ok(true));
        stepped
    }

    fn step_front(&mut self) -> Result<bool> {
        let front = match &mut self.front {
            Some(front) => {
                front.next()?;
                front
            }
            empty => {
                let cursor = Ascending::new(self.view.cursor()?, self.order.clone(), self.pin.at());
                let front = empty.insert(cursor);
                front.seek(self.bounds.0.as_ref().map(Vec::as_slice))?;
                front
            }
        };
        if !front.valid() {
            return Ok(false);
        }
        if matches!(self.bounds.1, Bound::Unbounded) && self.back.is_none() {
            return Ok(true);
        }
        let (key, _) = front.entry();
        let inside = match &self.bounds.1 {
            Bound::Unbounded => true,
            Bound::Included(end) => self.order.cmp(key, end).is_le(),
            Bound::Excluded(end) => self.order.cmp(key, end).is_lt(),
        };
        if !inside || self.back_key.as_ref().is_some_and(|back| self.order.cmp(key, back).is_ge()) {
            return Ok(false);
        }
        if self.back.is_some() {
            remember(&mut self.front_key, key);
        }
        Ok(true)
    }

    /// Steps the back end; true if it stands on an entry.
    pub(crate) fn advance_back(&mut self) -> Result<bool> {
        if self.ended {
            return Ok(false);
        }
        let stepped = self.handle.shared.check_open().and_then(|()| self.step_back());
        self.ended = !matches!(stepped, Ok(true));
        stepped
    }

    fn step_back(&mut self) -> Result<bool> {
        if self.back.is_none() {
            // From now on the front has to say where it stands.
            if let Some(front) = self.front.as_ref().filter(|front| front.valid()) {
                remember(&mut self.front_key, front.entry().0);
            }
        }
        let back = match &mut self.back {
            Some(back) => {
                back.prev()?;
                back
            }
            empty => {
                let cursor = Descending::new(self.view.cursor()?, self.order.clone(), self.pin.at());
                let back = empty.insert(cursor);
                back.seek(self.bounds.1.as_ref().map(Vec::as_slice))?;
                back
            }
        };
        if !back.valid() {
            return Ok(false);
        }
        let key = back.key();
        let inside = match &self.bounds.0 {
            Bound::Unbounded => true,
            Bound::Included(start) => self.order.cmp(key, start).is_ge(),
            Bound::Excluded(start) => self.order.cmp(key, start).is_gt(),
        };
        if !inside || self.front_key.as_ref().is_some_and(|front| self.order.cmp(key, front).is_le()) {
            return Ok(false);
        }
        remember(&mut self.back_key, key);
        Ok(true)
    }

    /// The entry at the front; only after `advance` said true.
    pub(crate) fn front(&self) -> (&[u8], &[u8]) {
        self.front.as_ref().expect("advance said true").entry()
    }

    /// The entry at the back; only after `advance_back` said true.
    pub(crate) fn back(&self) -> (&[u8], &[u8]) {
        let back = self.back.as_ref().expect("advance_back said true");
        (back.key(), back.value())
    }
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

    /// The next key and value, borrowed until the next step.
    #[inline]
    fn lend(&mut self) -> Option<Result<(&[u8], &[u8])>> {
        match self {
            Source::Failed(error) => error.take().map(Err),
            Source::Walk(walk) => match walk.advance() {
                Ok(true) => Some(Ok(walk.front())),
                Ok(false) => None,
                Err(error) => Some(Err(error)),
            },
        }
    }

    /// The same from the other end.
    fn lend_back(&mut self) -> Option<Result<(&[u8], &[u8])>> {
        match self {
            Source::Failed(error) => error.take().map(Err),
            Source::Walk(walk) => match walk.advance_back() {
                Ok(true) => Some(Ok(walk.back())),
                Ok(false) => None,
                Err(error) => Some(Err(error)),
            },
        }
    }
}

/// An entry of a partition: key and value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    key: Slice,
    value: Slice,
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
        Ok(self.value.clone())
    }

    /// Length of the value in bytes, without reading it.
    pub fn size(&self) -> u32 {
        self.value.len() as u32
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
                self.0.lend().map(|lent| lent.map(|(key, value)| $shape(key, value)))
            }
        }

        impl DoubleEndedIterator for $name {
            fn next_back(&mut self) -> Option<Result<$item>> {
                self.0.lend_back().map(|lent| lent.map(|(key, value)| $shape(key, value)))
            }
        }

        impl std::iter::FusedIterator for $name {}
    };
}

iterator!(
    /// Pairs of key and value, in the order of the keys.
    Iter, (Slice, Slice), |key, value| (Slice::from(key), Slice::from(value)));
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
        self.0.lend()
    }

    /// As [`next_back`](DoubleEndedIterator::next_back), but key and value are lent, as by [`lend`](Iter::lend).
    ///
    /// # Errors
    /// Those of reading; behind an error it ends.
    pub fn lend_back(&mut self) -> Option<Result<(&[u8], &[u8])>> {
        self.0.lend_back()
    }
}

iterator!(
    /// Keys in order; values are not read.
    Keys, Slice, |key, _| Slice::from(key));
iterator!(
    /// Values in the order of their keys.
    Values, Slice, |_, value| Slice::from(value));
iterator!(
    /// Entries in the order of the keys.
    Entries, Entry, |key, value| Entry { key: Slice::from(key), value: Slice::from(value) });

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_end_before_the_next_string() {
        assert_eq!(prefix_bounds(b"ab"), (Bound::Included(b"ab".to_vec()), Bound::Excluded(b"ac".to_vec())));
        assert_eq!(prefix_bounds(b"a\xff"), (Bound::Included(b"a\xff".to_vec()), Bound::Excluded(b"b".to_vec())));
        assert_eq!(prefix_bounds(b"\xff\xff"), (Bound::Included(b"\xff\xff".to_vec()), Bound::Unbounded));
        assert_eq!(prefix_bounds(b""), (Bound::Included(vec![]), Bound::Unbounded));
    }
}
