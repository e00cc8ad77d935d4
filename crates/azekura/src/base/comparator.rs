//! The order of user keys.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

/// An order of keys that the user defines for a partition.
///
/// It must be a total order and must never change. Its [`name`](Comparator::name) is stored with the partition, and
/// opening the partition with a comparator of another name is an error. A comparator that panics in a write or in
/// background work poisons the database. Nothing is written yet while a commit is validated and while the operands of
/// a batch for pools are computed: the commit returns `Invalid`. A read passes the panic on to its caller.
///
/// # Byte strings that are passed to a comparator
/// - keys that were inserted, removed or read, and bounds of ranges;
/// - keys that its own [`shortest_separator`](Comparator::shortest_separator) and
///   [`short_successor`](Comparator::short_successor) wrote;
/// - to [`canonical`](Comparator::canonical) only, the empty key, by the default
///   [`has_canonical`](Comparator::has_canonical).
///
/// No others are passed: a comparator of keys of a fixed length may rely on that length. A comparator that is
/// [bytewise](Comparator::is_bytewise) must accept any byte string.
///
/// [`can_keys_with_different_byte_contents_be_equal`](Comparator::can_keys_with_different_byte_contents_be_equal) has
/// the meaning that it has in RocksDB: structures that hash keys are correct only if equal keys have equal bytes.
///
/// ```
/// use std::{cmp::Ordering, sync::Arc};
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// struct Reversed;
/// impl azekura::Comparator for Reversed {
///     fn name(&self) -> &str { "reversed" }
///     fn compare(&self, a: &[u8], b: &[u8]) -> Ordering { b.cmp(a) }
///     fn can_keys_with_different_byte_contents_be_equal(&self) -> bool { false }
/// }
/// let fruit = db.open_partition_with_comparator("fruit", Default::default(), Arc::new(Reversed))?;
/// fruit.insert("apple", "red")?;
/// fruit.insert("pear", "green")?;
/// assert_eq!(fruit.first_key_value()?.unwrap().0, "pear");
/// # Ok(()) }
/// ```
pub trait Comparator: Send + Sync {
    /// The name: 1..=255 bytes, stored with the partition and checked at every open.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # use std::{cmp::Ordering, sync::Arc};
    /// struct ByLength(&'static str);
    /// impl azekura::Comparator for ByLength {
    ///     fn name(&self) -> &str { self.0 }
    ///     fn compare(&self, a: &[u8], b: &[u8]) -> Ordering { a.len().cmp(&b.len()).then(a.cmp(b)) }
    /// }
    /// db.open_partition_with_comparator("words", Default::default(), Arc::new(ByLength("length, then bytes")))?;
    /// let renamed = db.open_partition_with_comparator("words", Default::default(), Arc::new(ByLength("by length")));
    /// assert_eq!(renamed.unwrap_err().kind(), azekura::ErrorKind::Invalid);
    /// # Ok(()) }
    /// ```
    fn name(&self) -> &str;

    /// Compares two user keys. The comparator may read the database. It must not write to it, and must not wait for a
    /// thread that writes, because a writer may hold locks while it calls the comparator.
    ///
    /// Writes, flushes, compactions and blob GC call the comparator. Inside of them, calls that write, or that wait for
    /// writes or such tasks, return `Invalid`, also on other databases of the process: `insert` and all other writes,
    /// commits, exclusive transactions, `flush`, `major_compact`, blob GC, `checkpoint`, opening and deleting
    /// partitions, `step` and `close`. The write or the task continues. If the comparator drops the last handle of a
    /// database with workers inside a task, a worker of that database closes it after the task has ended.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # use std::{cmp::Ordering, sync::Arc};
    /// /// Little-endian numbers of 8 bytes, in the order of the numbers.
    /// struct Numbers;
    /// impl azekura::Comparator for Numbers {
    ///     fn name(&self) -> &str { "u64, little-endian" }
    ///     fn compare(&self, a: &[u8], b: &[u8]) -> Ordering {
    ///         let number = |key: &[u8]| u64::from_le_bytes(key.try_into().expect("keys have 8 bytes"));
    ///         number(a).cmp(&number(b))
    ///     }
    ///     fn can_keys_with_different_byte_contents_be_equal(&self) -> bool { false }
    /// }
    /// let numbers = db.open_partition_with_comparator("numbers", Default::default(), Arc::new(Numbers))?;
    /// for n in [256u64, 1, 255] {
    ///     numbers.insert(n.to_le_bytes(), "")?;
    /// }
    /// let keys: Vec<_> = numbers.keys().map(|key| key.unwrap()).collect();
    /// assert_eq!(keys, [1, 255, 256].map(u64::to_le_bytes)); // the order of bytes would be 256, 1, 255
    /// # Ok(()) }
    /// ```
    fn compare(&self, a: &[u8], b: &[u8]) -> Ordering;

    /// Whether two keys with different bytes may compare equal. Default: true, because a wrong `false` loses keys and
    /// a wrong `true` only costs speed.
    ///
    /// ```
    /// # use std::cmp::Ordering;
    /// use azekura::Comparator;
    /// struct IgnoreCase;
    /// impl Comparator for IgnoreCase {
    ///     fn name(&self) -> &str { "ignores the case of ASCII letters" }
    ///     fn compare(&self, a: &[u8], b: &[u8]) -> Ordering {
    ///         a.to_ascii_lowercase().cmp(&b.to_ascii_lowercase())
    ///     }
    ///     // The default, `true`, is right here: "Ada" and "ada" are the same key.
    /// }
    /// assert!(IgnoreCase.compare(b"Ada", b"ada").is_eq());
    /// assert!(IgnoreCase.can_keys_with_different_byte_contents_be_equal());
    /// ```
    fn can_keys_with_different_byte_contents_be_equal(&self) -> bool {
        true
    }

    /// Whether the order is the order of bytes. Default: false.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # use std::{cmp::Ordering, sync::Arc};
    /// /// The order of bytes, under a name of the program's own.
    /// struct Versioned;
    /// impl azekura::Comparator for Versioned {
    ///     fn name(&self) -> &str { "keys, format 2" }
    ///     fn compare(&self, a: &[u8], b: &[u8]) -> Ordering { a.cmp(b) }
    ///     fn is_bytewise(&self) -> bool { true }
    /// }
    /// let users = db.open_partition_with_comparator("users", Default::default(), Arc::new(Versioned))?;
    /// users.insert("ada/name", "Ada")?;
    /// assert_eq!(users.prefix("ada/").count(), 1); // requires bytewise order
    /// # Ok(()) }
    /// ```
    fn is_bytewise(&self) -> bool {
        false
    }

    /// Writes to `out` the form that all keys equal to `key` share, and returns true; returns false if there is none.
    /// With a canonical form, keys can be hashed although different bytes may be equal.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # use std::{cmp::Ordering, sync::Arc};
    /// struct IgnoreCase;
    /// impl azekura::Comparator for IgnoreCase {
    ///     fn name(&self) -> &str { "ignores the case of ASCII letters" }
    ///     fn compare(&self, a: &[u8], b: &[u8]) -> Ordering {
    ///         a.to_ascii_lowercase().cmp(&b.to_ascii_lowercase())
    ///     }
    ///     fn canonical(&self, key: &[u8], out: &mut Vec<u8>) -> bool {
    ///         out.extend_from_slice(&key.to_ascii_lowercase());
    ///         true // so tables have filters
    ///     }
    /// }
    /// let users = db.open_partition_with_comparator("users", Default::default(), Arc::new(IgnoreCase))?;
    /// users.insert("Ada", "mathematician")?;
    /// users.flush()?;
    /// assert_eq!(users.get("ADA")?.unwrap(), "mathematician");
    /// # Ok(()) }
    /// ```
    fn canonical(&self, key: &[u8], out: &mut Vec<u8>) -> bool {
        let _ = (key, out);
        false
    }

    /// Whether [`canonical`](Comparator::canonical) has a form for every key. Called only if different bytes may be
    /// equal, also before any key exists. The default calls `canonical` with the empty key.
    ///
    /// ```
    /// # use std::cmp::Ordering;
    /// use azekura::Comparator;
    /// /// Numbers of 4 bytes: the first byte is a flag that the order ignores.
    /// struct Flagged;
    /// impl Comparator for Flagged {
    ///     fn name(&self) -> &str { "flagged numbers" }
    ///     fn compare(&self, a: &[u8], b: &[u8]) -> Ordering { a[1..].cmp(&b[1..]) }
    ///     fn canonical(&self, key: &[u8], out: &mut Vec<u8>) -> bool {
    ///         out.extend_from_slice(&key[1..]); // the default of `has_canonical` would panic here
    ///         true
    ///     }
    ///     fn has_canonical(&self) -> bool { true }
    /// }
    /// assert!(Flagged.has_canonical());
    /// ```
    fn has_canonical(&self) -> bool {
        self.canonical(b"", &mut Vec::new())
    }

    /// Writes to `out` a key `s` with `start <= s < limit`, as short as possible. The default copies `start`.
    ///
    /// ```
    /// # use std::cmp::Ordering;
    /// use azekura::Comparator;
    /// struct Reversed;
    /// impl Comparator for Reversed {
    ///     fn name(&self) -> &str { "reversed" }
    ///     fn compare(&self, a: &[u8], b: &[u8]) -> Ordering { b.cmp(a) }
    ///     fn shortest_separator(&self, start: &[u8], limit: &[u8], out: &mut Vec<u8>) {
    ///         // A prefix of `start` is a larger key in this order, so take the shortest one that is below `limit`.
    ///         let separates = |len: &usize| self.compare(&start[..*len], limit).is_lt();
    ///         let len = (0..start.len()).find(separates).unwrap_or(start.len());
    ///         out.clear();
    ///         out.extend_from_slice(&start[..len]);
    ///     }
    /// }
    /// let mut separator = Vec::new();
    /// Reversed.shortest_separator(b"pear, green", b"apple, red", &mut separator);
    /// assert_eq!(separator, b"p"); // an index block stores one byte instead of eleven
    /// ```
    fn shortest_separator(&self, start: &[u8], limit: &[u8], out: &mut Vec<u8>) {
        let _ = limit;
        out.clear();
        out.extend_from_slice(start);
    }

    /// Writes to `out` a key `s >= key`, as short as possible. The default copies `key`.
    ///
    /// The index of a table stores it in place of the largest key of the table. Not called for a comparator that is
    /// [bytewise](Comparator::is_bytewise).
    ///
    /// ```
    /// # use std::cmp::Ordering;
    /// use azekura::Comparator;
    /// struct Reversed;
    /// impl Comparator for Reversed {
    ///     fn name(&self) -> &str { "reversed" }
    ///     fn compare(&self, a: &[u8], b: &[u8]) -> Ordering { b.cmp(a) }
    ///     fn short_successor(&self, _key: &[u8], out: &mut Vec<u8>) {
    ///         out.clear(); // the empty key is the last one in this order
    ///     }
    /// }
    /// let mut successor = Vec::new();
    /// Reversed.short_successor(b"pear", &mut successor);
    /// assert!(successor.is_empty() && Reversed.compare(&successor, b"pear").is_ge());
    /// ```
    fn short_successor(&self, key: &[u8], out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(key);
    }
}

/// The order of a partition: bytes, or a comparator.
#[derive(Clone, Default)]
pub(crate) struct KeyOrder(Option<Arc<dyn Comparator>>);

/// The stored name of the bytewise order.
pub(crate) const BYTEWISE_NAME: &str = "azekura.bytewise";

impl KeyOrder {
    /// The order of bytes.
    pub(crate) fn bytewise() -> KeyOrder {
        KeyOrder(None)
    }

    /// The order of a comparator. If it is bytewise, structures that require bytewise order are used too.
    pub(crate) fn custom(comparator: Arc<dyn Comparator>) -> KeyOrder {
        KeyOrder(Some(comparator))
    }

    pub(crate) fn name(&self) -> &str {
        self.0.as_ref().map_or(BYTEWISE_NAME, |c| c.name())
    }

    #[inline]
    pub(crate) fn cmp(&self, a: &[u8], b: &[u8]) -> Ordering {
        match &self.0 {
            None => a.cmp(b),
            Some(c) => c.compare(a, b),
        }
    }

    /// Whether the order is that of a comparator of the user. Assertions about the order of keys hold for the others
    /// only, because a comparator may contradict itself, and must not be called more often in debug builds.
    #[inline]
    pub(crate) fn is_custom(&self) -> bool {
        self.0.is_some()
    }

    /// Whether `a` and `b` are the same key.
    #[inline]
    pub(crate) fn keys_equal(&self, a: &[u8], b: &[u8]) -> bool {
        match &self.0 {
            // Adjacent keys usually differ at their ends, and eight bytes are compared without a call.
            None => a.len() == b.len() && a.last_chunk::<8>() == b.last_chunk() && a == b,
            // A key equals itself also for a comparator that never returns `Equal`. Otherwise a loop over the versions
            // of a key would not end.
            Some(c) => a == b || c.compare(a, b).is_eq(),
        }
    }

    #[inline]
    pub(crate) fn is_bytewise(&self) -> bool {
        self.0.as_ref().is_none_or(|c| c.is_bytewise())
    }

    /// Whether equal keys have equal bytes, so that a hash of the bytes identifies a key. Filters and hash indexes
    /// require this.
    pub(crate) fn equality_is_bytewise(&self) -> bool {
        self.0.as_ref().is_none_or(|c| c.is_bytewise() || !c.can_keys_with_different_byte_contents_be_equal())
    }

    /// The bytes to hash for `key`: its own, or its canonical form (written to `scratch`). `None` if keys must not be
    /// hashed.
    #[inline]
    pub(crate) fn hash_input<'a>(&self, key: &'a [u8], scratch: &'a mut Vec<u8>) -> Option<&'a [u8]> {
        match &self.0 {
            None => Some(key),
            Some(_) if self.equality_is_bytewise() => Some(key),
            Some(c) => {
                scratch.clear();
                c.canonical(key, scratch).then_some(scratch.as_slice())
            }
        }
    }

    /// Whether keys may be hashed: [`hash_input`](KeyOrder::hash_input) has bytes for every key.
    pub(crate) fn can_hash_keys(&self) -> bool {
        self.equality_is_bytewise() || self.0.as_ref().is_some_and(|c| c.has_canonical())
    }

    /// Writes to `out` a separator `s` with `start <= s < limit`, short if the order permits.
    pub(crate) fn separator(&self, start: &[u8], limit: &[u8], out: &mut Vec<u8>) {
        match &self.0 {
            Some(c) if !c.is_bytewise() => {
                c.shortest_separator(start, limit, out);
                let sound = c.compare(start, out).is_le() && c.compare(out, limit).is_lt();
                if !sound || out.len() > start.len() {
                    out.clear();
                    out.extend_from_slice(start);
                }
            }
            _ => bytewise_separator(start, limit, out),
        }
        debug_assert!(self.is_custom() || start < limit, "a separator lies between two different keys");
        debug_assert!(self.is_custom() || (start <= &out[..] && &out[..] < limit), "the separator separates the keys");
    }

    /// Writes to `out` the last separator of a table: a key `s >= key`. In bytewise order that is `key`, so that a seek
    /// behind the last key reads no block.
    pub(crate) fn successor(&self, key: &[u8], out: &mut Vec<u8>) {
        out.clear();
        if let Some(c) = self.0.as_ref().filter(|c| !c.is_bytewise()) {
            c.short_successor(key, out);
            if out.len() < key.len() && c.compare(key, out).is_le() {
                return;
            }
            out.clear();
        }
        out.extend_from_slice(key);
    }
}

impl fmt::Debug for KeyOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyOrder({})", self.name())
    }
}

/// The shortest separator in bytewise order: the common prefix, and then the first byte of `start` that can be
/// increased by one and stays below that of `limit`.
fn bytewise_separator(start: &[u8], limit: &[u8], out: &mut Vec<u8>) {
    out.clear();
    out.extend_from_slice(start);
    let shared = start.iter().zip(limit).take_while(|(a, b)| a == b).count();
    if shared >= start.len() || shared >= limit.len() {
        return; // one is a prefix of the other, so there is no shorter separator
    }
    let byte = start[shared];
    if byte < u8::MAX && byte + 1 < limit[shared] && shared + 1 < start.len() {
        out.truncate(shared + 1);
        out[shared] = byte + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{FnComparator, TestComparator, TestOrder};

    /// Regression: with a comparator that never returns `Equal`, an iterator that moved backward, or merged operands,
    /// never left a key.
    #[test]
    fn a_key_equals_itself_in_every_order() {
        let order = KeyOrder::custom(Arc::new(FnComparator(|_: &[u8], _: &[u8]| Ordering::Less)));
        assert!(order.keys_equal(b"a", b"a") && !order.keys_equal(b"a", b"b"));
    }

    #[test]
    fn separators_lie_between() {
        let order = KeyOrder::bytewise();
        let keys: &[&[u8]] =
            &[b"", b"a", b"abc", b"abd", b"abzzzz", b"b", b"bz", b"c", b"\xff", b"\xff\xff", b"\xff\xffa"];
        let mut out = Vec::new();
        for (i, a) in keys.iter().enumerate() {
            for b in &keys[i + 1..] {
                order.separator(a, b, &mut out);
                assert!(out.as_slice() >= *a && out.as_slice() < *b, "{a:?} <= {out:?} < {b:?}");
                assert!(out.len() <= a.len());
            }
        }
        order.separator(b"abcdefgh", b"abzz", &mut out);
        assert_eq!(out, b"abd");
    }

    #[test]
    fn invalid_user_separator_is_not_used() {
        let order = KeyOrder::custom(Arc::new(TestComparator::minimal(TestOrder::Reversed).with_wrong_separators()));
        let mut out = Vec::new();
        order.separator(b"z", b"a", &mut out);
        assert_eq!(out, b"z");
        assert!(!order.equality_is_bytewise(), "the default is the safe result");
        assert_eq!(order.hash_input(b"k", &mut Vec::new()), None);
        order.successor(b"za", &mut out);
        assert_eq!(out, b"za", "\"zz\" is before it");
    }
}
