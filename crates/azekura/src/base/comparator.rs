//! The order of user keys.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

/// An order of keys that the user defines for a partition.
///
/// It must be a total order and must never change. Its [`name`](Comparator::name) is stored with the partition, and
/// opening the partition with a comparator of another name is an error. A comparator that panics poisons the
/// database.
///
/// # Byte strings that are passed to a comparator
/// - keys that were inserted, removed or read, and bounds of ranges;
/// - keys that its own [`shortest_separator`](Comparator::shortest_separator) wrote;
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
/// use std::cmp::Ordering;
/// struct Reversed;
/// impl azekura::Comparator for Reversed {
///     fn name(&self) -> &str { "reversed" }
///     fn compare(&self, a: &[u8], b: &[u8]) -> Ordering { b.cmp(a) }
///     fn can_keys_with_different_byte_contents_be_equal(&self) -> bool { false }
/// }
/// ```
pub trait Comparator: Send + Sync {
    /// The name: 1..=255 bytes, stored with the partition and checked at every open.
    fn name(&self) -> &str;

    /// Compares two user keys. The comparator may read the database. It must not write to it, and must not wait for a
    /// thread that writes, because a writer may hold locks while it calls the comparator.
    ///
    /// Flushes, compactions and blob GC also call the comparator. Inside these tasks, calls that wait for such tasks
    /// return `Invalid`, also on other databases of the process: `flush`, `major_compact`, blob GC, `checkpoint`,
    /// opening and deleting partitions, `step` and `close`. If the comparator drops the last handle of a database
    /// with workers inside a task, a worker of that database closes it after the task has ended.
    fn compare(&self, a: &[u8], b: &[u8]) -> Ordering;

    /// Whether two keys with different bytes may compare equal. Default: true, because a wrong `false` loses keys and
    /// a wrong `true` only costs speed.
    fn can_keys_with_different_byte_contents_be_equal(&self) -> bool {
        true
    }

    /// Whether the order is the order of bytes. Default: false.
    fn is_bytewise(&self) -> bool {
        false
    }

    /// Writes to `out` the form that all keys equal to `key` share, and returns true; returns false if there is none.
    /// With a canonical form, keys can be hashed although different bytes may be equal.
    fn canonical(&self, key: &[u8], out: &mut Vec<u8>) -> bool {
        let _ = (key, out);
        false
    }

    /// Whether [`canonical`](Comparator::canonical) has a form for every key. Called only if different bytes may be
    /// equal, also before any key exists. The default calls `canonical` with the empty key.
    fn has_canonical(&self) -> bool {
        self.canonical(b"", &mut Vec::new())
    }

    /// Writes to `out` a key `s` with `start <= s < limit`, as short as possible. The default copies `start`.
    fn shortest_separator(&self, start: &[u8], limit: &[u8], out: &mut Vec<u8>) {
        let _ = limit;
        out.clear();
        out.extend_from_slice(start);
    }

    /// Writes to `out` a key `s >= key`, as short as possible. The default copies `key`.
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

    /// Whether `a` and `b` are the same key.
    #[inline]
    pub(crate) fn keys_equal(&self, a: &[u8], b: &[u8]) -> bool {
        match &self.0 {
            // Adjacent keys usually differ at their ends, and eight bytes are compared without a call.
            None => a.len() == b.len() && a.last_chunk::<8>() == b.last_chunk() && a == b,
            Some(c) => c.compare(a, b).is_eq(),
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

    struct Lying;
    impl Comparator for Lying {
        fn name(&self) -> &str {
            "lying"
        }
        fn compare(&self, a: &[u8], b: &[u8]) -> Ordering {
            b.cmp(a)
        }
        fn shortest_separator(&self, _: &[u8], limit: &[u8], out: &mut Vec<u8>) {
            out.clear();
            out.extend_from_slice(limit);
        }
    }

    #[test]
    fn invalid_user_separator_is_not_used() {
        let order = KeyOrder::custom(Arc::new(Lying));
        let mut out = Vec::new();
        order.separator(b"z", b"a", &mut out);
        assert_eq!(out, b"z");
        assert!(!order.equality_is_bytewise(), "the default is the safe result");
        assert_eq!(order.hash_input(b"k", &mut Vec::new()), None);
    }
}
