//! The public iterators over a partition, usable from both ends.

use std::fmt;
use std::sync::{Arc, Mutex};

use crate::base::sync::lock;
use crate::base::{Error, Result};
use crate::db::iter::db_iter::{DbIter, IterEnd};
use crate::db::iter::entry::Entry;
use crate::db::state::scanned_range::ScannedRange;
use crate::mem::slice::Slice;

/// An iterator, or the error that prevented its creation.
pub(crate) enum IterState {
    Active(Box<DbIter>),
    /// An iterator of a transaction, which records what it reads.
    Tracked(Box<DbIter>, Arc<Mutex<ScannedRange>>),
    Failed {
        error: Error,
        /// Whether a step has returned the error. A seek makes the next step return it again, because `None` would
        /// mean that there is no such key.
        is_returned: bool,
    },
}

impl IterState {
    pub(crate) fn new(iter: Result<DbIter>) -> IterState {
        match iter {
            Ok(iter) => IterState::Active(Box::new(iter)),
            Err(error) => IterState::Failed { error, is_returned: false },
        }
    }

    /// Moves an end and returns the iterator; `None` if that end has no more entries.
    #[inline]
    fn step(&mut self, end: IterEnd) -> Option<Result<&mut DbIter>> {
        match self {
            IterState::Failed { is_returned: true, .. } => None,
            IterState::Failed { error, is_returned } => {
                *is_returned = true;
                Some(Err(error.clone()))
            }
            IterState::Active(iter) => match iter.step(end) {
                Ok(true) => Some(Ok(iter)),
                Ok(false) => None,
                Err(error) => Some(Err(error)),
            },
            IterState::Tracked(iter, range) => IterState::step_tracked(iter, range, end),
        }
    }

    #[cold]
    fn step_tracked<'a>(
        iter: &'a mut DbIter,
        range: &Mutex<ScannedRange>,
        end: IterEnd,
    ) -> Option<Result<&'a mut DbIter>> {
        let stepped = match iter.step(end) {
            Ok(stepped) => stepped,
            Err(error) => return Some(Err(error)),
        };
        let key = stepped.then(|| iter.key(end));
        match end {
            IterEnd::Front => lock(range).step_front(key),
            IterEnd::Back => lock(range).step_back(key),
        }
        stepped.then_some(Ok(iter))
    }

    fn seek(&mut self, end: IterEnd, key: &[u8]) {
        match self {
            IterState::Active(iter) => iter.seek(end, key),
            IterState::Failed { is_returned, .. } => *is_returned = false,
            IterState::Tracked(iter, range) => {
                let mut range = lock(range);
                if iter.has_failed() {
                    range.restart();
                }
                match end {
                    IterEnd::Front => range.seek_front(key),
                    IterEnd::Back => range.seek_back(key),
                }
                drop(range);
                iter.seek(end, key);
            }
        }
    }

    /// Moves an end and returns the key, borrowed until the next step.
    fn step_key_ref(&mut self, end: IterEnd) -> Option<Result<&[u8]>> {
        self.step(end).map(|iter| iter.map(|iter| iter.key(end)))
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

    /// Moves to the next pair like [`next_ref`](Iter::next_ref), and borrows its key only. Reads no blob value.
    ///
    /// # Errors
    /// `Io`, `Corruption` or `Closed` from reading; the iterator ends after an error.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let photos = db.open_partition("photos", Default::default())?;
    /// photos.insert("moon", vec![7; 100_000])?;
    /// photos.insert("sky", vec![7; 200_000])?;
    /// let (mut key_bytes, mut names) = (0, photos.iter());
    /// while let Some(name) = names.next_key_ref() {
    ///     key_bytes += name?.len();
    /// }
    /// assert_eq!(key_bytes, 7);
    /// # Ok(()) }
    /// ```
    pub fn next_key_ref(&mut self) -> Option<Result<&[u8]>> {
        self.0.step_key_ref(IterEnd::Front)
    }

    /// Moves to the next pair from the back like [`next_back_ref`](Iter::next_back_ref), and borrows its key only.
    ///
    /// # Errors
    /// As [`next_key_ref`](Iter::next_key_ref).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// fruit.insert("pear", "green")?;
    /// assert_eq!(fruit.iter().next_back_key_ref().unwrap()?, b"pear");
    /// # Ok(()) }
    /// ```
    pub fn next_back_key_ref(&mut self) -> Option<Result<&[u8]>> {
        self.0.step_key_ref(IterEnd::Back)
    }

    /// Turns this iterator into one over the keys, within the same bounds and from the same position. It reads no blob
    /// value.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let users = db.open_partition("users", Default::default())?;
    /// users.insert("ada/name", "Ada")?;
    /// users.insert("ada/photo", vec![7; 100_000])?;
    /// users.insert("adam/name", "Adam")?;
    /// let keys = users.prefix("ada/").keys().collect::<azekura::Result<Vec<_>>>()?;
    /// assert_eq!(keys, ["ada/name", "ada/photo"]);
    /// assert_eq!(db.snapshot().range(&users, "adam".."b").keys().count(), 1); // also of a snapshot or transaction
    /// # Ok(()) }
    /// ```
    pub fn keys(self) -> Keys {
        Keys(self.0)
    }

    /// Turns this iterator into one over the values, within the same bounds and from the same position.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// fruit.insert("pear", "green")?;
    /// assert_eq!(fruit.range("b"..).values().next().unwrap()?, "green");
    /// # Ok(()) }
    /// ```
    pub fn values(self) -> Values {
        Values(self.0)
    }

    /// Turns this iterator into one over entries, within the same bounds and from the same position. Blob values are
    /// read on request.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let photos = db.open_partition("photos", Default::default())?;
    /// photos.insert("2026/moon", vec![7; 100_000])?;
    /// photos.insert("2025/sky", vec![7; 200_000])?;
    /// let sizes: Vec<u32> = photos.prefix("2026/").entries().map(|photo| photo.unwrap().size()).collect();
    /// assert_eq!(sizes, [100_000]); // reads no value
    /// # Ok(()) }
    /// ```
    pub fn entries(self) -> Entries {
        Entries(self.0)
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
    Keys, Slice, |iter: &mut DbIter, end| Ok(Slice::from(iter.key(end))));
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
