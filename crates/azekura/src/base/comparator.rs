//! The order of user keys.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

/// An order of keys, given by the user for one partition.
///
/// Must be a total order, the same for ever: its [`name`](Comparator::name) is stored with the partition, and opening
/// the partition with a comparator of another name is an error. A comparator that panics poisons the database.
///
/// # Which byte strings it is given
/// - keys that were inserted, removed or asked for, and bounds of ranges;
/// - keys that its own [`shortest_separator`](Comparator::shortest_separator) wrote;
/// - to [`canonical`](Comparator::canonical) alone, the empty key, by the default
///   [`has_canonical`](Comparator::has_canonical).
///
/// It is given no others: a comparator of keys of one length may rely on that length. One that says that it is
/// [bytewise](Comparator::is_bytewise) may be given any byte string.
///
/// The question
/// [`can_keys_with_different_byte_contents_be_equal`](Comparator::can_keys_with_different_byte_contents_be_equal) is
/// RocksDB's: structures that hash keys are only sound if equal keys have equal bytes.
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
    /// 1..=255 bytes; stored with the partition and checked at every open.
    fn name(&self) -> &str;

    /// Compares two user keys. It may read the database. It must not write to it, nor wait for a thread that does: it
    /// is called while a write holds locks that the other one would wait for.
    ///
    /// Flushes, compactions and blob GC call it, too. Inside of those, calls that wait for such work return `Invalid`,
    /// on other databases of the process too: `flush`, `major_compact`, blob GC, `checkpoint`, opening and deleting
    /// partitions, `step` and `close`. If it drops the last handle of a database with workers there, a worker of that
    /// database closes it, after the piece of work has ended that it is in.
    fn compare(&self, a: &[u8], b: &[u8]) -> Ordering;

    /// Whether two keys of different bytes may compare equal. True unless the implementation says otherwise, because
    /// a wrong `false` loses keys and a wrong `true` only costs speed.
    fn can_keys_with_different_byte_contents_be_equal(&self) -> bool {
        true
    }

    /// Whether the order is that of the bytes.
    fn is_bytewise(&self) -> bool {
        false
    }

    /// Writes the form that all keys equal to `key` share into `out` and returns true; returns false if there is none.
    /// With a canonical form hashing works although different bytes may be equal.
    fn canonical(&self, key: &[u8], out: &mut Vec<u8>) -> bool {
        let _ = (key, out);
        false
    }

    /// Whether [`canonical`](Comparator::canonical) has a form for every key. It is asked only where different bytes
    /// may be equal, also before there is a key: the default asks for the form of the empty key.
    fn has_canonical(&self) -> bool {
        self.canonical(b"", &mut Vec::new())
    }

    /// Writes a key `s` with `start <= s < limit` into `out`, as short as possible; the default copies `start`.
    fn shortest_separator(&self, start: &[u8], limit: &[u8], out: &mut Vec<u8>) {
        let _ = limit;
        out.clear();
        out.extend_from_slice(start);
    }

    /// Writes a key `s >= key` into `out`, as short as possible; the default copies `key`.
    fn short_successor(&self, key: &[u8], out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(key);
    }
}

/// The order of one partition: bytes, or a user's comparator.
#[derive(Clone, Default)]
pub(crate) struct KeyOrder(Option<Arc<dyn Comparator>>);

/// The stored name of the bytewise order.
pub(crate) const BYTEWISE_NAME: &str = "azekura.bytewise";

impl KeyOrder {
    /// The order of the bytes.
    pub(crate) fn bytewise() -> KeyOrder {
        KeyOrder(None)
    }

    /// A user's order. One that says it is bytewise is treated as such, under its own name.
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

    /// Whether the two are one key.
    #[inline]
    pub(crate) fn keys_equal(&self, a: &[u8], b: &[u8]) -> bool {
        match &self.0 {
            // Neighbours differ at their ends more often than not, and eight bytes are compared without a call.
            None => a.len() == b.len() && a.last_chunk::<8>() == b.last_chunk() && a == b,
            Some(c) => c.compare(a, b).is_eq(),
        }
    }

    #[inline]
    pub(crate) fn is_bytewise(&self) -> bool {
        self.0.as_ref().is_none_or(|c| c.is_bytewise())
    }

    /// Whether a hash of a key's own bytes is a sound stand-in for the key: filters and hash indexes ask this.
    pub(crate) fn equality_is_bytewise(&self) -> bool {
        self.0.as_ref().is_none_or(|c| c.is_bytewise() || !c.can_keys_with_different_byte_contents_be_equal())
    }

    /// The bytes to hash for `key`: the key's own, its canonical form (written to `scratch`), or `None` when nothing
    /// that hashes keys may be used.
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

    /// Whether keys may be hashed at all: [`hashable`](KeyOrder::hash_input) has bytes for every key.
    pub(crate) fn can_hash_keys(&self) -> bool {
        self.equality_is_bytewise() || self.0.as_ref().is_some_and(|c| c.has_canonical())
    }

    /// Writes a separator `s` with `start <= s < limit`, short if the order allows, into `out`.
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

/// The shortest prefix-based separator: after the common prefix, the first byte of `start` that can be raised by one
/// and still stay below `limit` ends it.
fn bytewise_separator(start: &[u8], limit: &[u8], out: &mut Vec<u8>) {
    out.clear();
    out.extend_from_slice(start);
    let shared = start.iter().zip(limit).take_while(|(a, b)| a == b).count();
    if shared >= start.len() || shared >= limit.len() {
        return; // one is a prefix of the other: nothing shorter lies between
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
        assert!(!order.equality_is_bytewise(), "the default answer is the safe one");
        assert_eq!(order.hash_input(b"k", &mut Vec::new()), None);
    }
}
