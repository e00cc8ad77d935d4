//! Prefix extractors: which part of a key goes into the filter of a table besides the whole key.

use std::ops::Bound;

use crate::base::checksum::key_hash;
use crate::base::{Error, Result};

/// Longest fixed prefix in bytes.
const FIXED_LEN_MAX: u16 = 4096;
/// Makes the hashes of prefixes differ from those of keys with the same bytes.
const PREFIX_SEED: u64 = 0x7072_6566_6978_2e31;

/// Defines the prefix of a key that the filters of tables contain besides whole keys.
///
/// A scan whose bounds admit only keys with one such prefix skips the tables whose filters exclude it. Those are
/// [`prefix`](crate::Partition::prefix) with at least the extractor's prefix, and
/// [`range`](crate::Partition::range) from and to keys with it. Each distinct prefix takes as much of the filter as a
/// key.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// use azekura::{PartitionCreateOptions, PrefixExtractor};
/// let options = PartitionCreateOptions::default().prefix_extractor(PrefixExtractor::Delimiter(b'/'));
/// let users = db.open_partition("users", options)?;
/// users.insert("ada/mail", "ada@example.org")?;
/// users.flush()?;
/// assert_eq!(users.prefix("ada/").count(), 1);
/// assert_eq!(users.prefix("grace/").count(), 0); // reads a filter, and no data
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum PrefixExtractor {
    /// The first bytes of the key, 1 to 4096. Shorter keys have no prefix.
    Fixed(u16),
    /// The bytes up to the first one with this value, inclusive. Keys without it have no prefix.
    Delimiter(u8),
}

impl PrefixExtractor {
    /// Returns the prefix of a key, if it has one.
    ///
    /// ```
    /// use azekura::PrefixExtractor;
    /// assert_eq!(PrefixExtractor::Fixed(3).extract(b"abcd"), Some(&b"abc"[..]));
    /// assert_eq!(PrefixExtractor::Fixed(3).extract(b"ab"), None);
    /// assert_eq!(PrefixExtractor::Delimiter(b'/').extract(b"a/b/c"), Some(&b"a/"[..]));
    /// ```
    pub fn extract<'k>(&self, key: &'k [u8]) -> Option<&'k [u8]> {
        match *self {
            PrefixExtractor::Fixed(len) => key.get(..usize::from(len)),
            PrefixExtractor::Delimiter(byte) => {
                let at = key.iter().position(|other| *other == byte)?;
                Some(&key[..=at])
            }
        }
    }

    /// The prefix that every key within the bounds has, if the bounds show it. Keys are in the order of bytes.
    pub(crate) fn common_prefix<'k>(&self, lower: Bound<&'k [u8]>, upper: Bound<&[u8]>) -> Option<&'k [u8]> {
        let (Bound::Included(first) | Bound::Excluded(first)) = lower else { return None };
        let prefix = self.extract(first)?;
        // The keys from `first` to a key with the prefix have it, and so have those before the next prefix.
        let has_prefix = match upper {
            Bound::Included(last) => last.starts_with(prefix),
            Bound::Excluded(end) => end.starts_with(prefix) || is_next_prefix(prefix, end),
            Bound::Unbounded => false,
        };
        has_prefix.then_some(prefix)
    }

    /// The name in table properties and stored options.
    pub(crate) fn name(&self) -> String {
        match self {
            PrefixExtractor::Fixed(len) => format!("fixed:{len}"),
            PrefixExtractor::Delimiter(byte) => format!("delimiter:{byte}"),
        }
    }

    /// The extractor of that name; `None` for a name of a newer version.
    pub(crate) fn from_name(name: &[u8]) -> Option<PrefixExtractor> {
        let (kind, value) = std::str::from_utf8(name).ok()?.split_once(':')?;
        let extractor = match kind {
            "fixed" => PrefixExtractor::Fixed(value.parse().ok()?),
            "delimiter" => PrefixExtractor::Delimiter(value.parse().ok()?),
            _ => return None,
        };
        (extractor.name().as_bytes() == name && extractor.check().is_ok()).then_some(extractor)
    }

    /// `Invalid` for a length out of its range.
    pub(crate) fn check(&self) -> Result<()> {
        match self {
            PrefixExtractor::Fixed(len) if !(1..=FIXED_LEN_MAX).contains(len) => {
                Err(Error::invalid(format!("prefix_extractor is of {len} bytes, out of its range 1..={FIXED_LEN_MAX}")))
            }
            _ => Ok(()),
        }
    }
}

/// The hash of a prefix in a filter. `seed` is that of the hashes of keys.
pub(crate) fn prefix_hash(seed: u64, prefix: &[u8]) -> u64 {
    key_hash(seed ^ PREFIX_SEED, prefix)
}

/// Whether `end` is the first byte string after all that begin with `prefix`.
fn is_next_prefix(prefix: &[u8], end: &[u8]) -> bool {
    let Some((last, front)) = end.split_last() else { return false };
    let Some((same, rest)) = prefix.split_at_checked(end.len()) else { return false };
    let (Some((before, head)), true) = (same.split_last(), rest.iter().all(|byte| *byte == u8::MAX)) else {
        return false;
    };
    front == head && before.checked_add(1) == Some(*last)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::testing::seeded_rng::SeededRng;

    #[test]
    fn names_are_read_back_and_others_ignored() {
        for extractor in [PrefixExtractor::Fixed(1), PrefixExtractor::Fixed(4096), PrefixExtractor::Delimiter(0)] {
            assert_eq!(PrefixExtractor::from_name(extractor.name().as_bytes()), Some(extractor));
        }
        for other in ["", "fixed", "fixed:", "fixed:0", "fixed:4097", "fixed:+8", "fixed:08", "delimiter:256", "x:1"] {
            assert_eq!(PrefixExtractor::from_name(other.as_bytes()), None, "{other}");
        }
        assert!(PrefixExtractor::Fixed(0).check().is_err() && PrefixExtractor::Fixed(4097).check().is_err());
        assert_ne!(prefix_hash(7, b"ab"), key_hash(7, b"ab"));
    }

    #[test]
    fn next_prefix_is_recognized() {
        for (prefix, end, is_next) in [
            (&b"a"[..], &b"b"[..], true),
            (b"a", b"c", false),
            (b"ab", b"ac", true),
            (b"ab", b"b", false),
            (b"a\xff", b"b", true),
            (b"a\xff\xff", b"b", true),
            (b"a\xffa", b"b", false),
            (b"a", b"a\0", false),
            (b"\xff", b"", false),
            (b"", b"a", false),
        ] {
            assert_eq!(is_next_prefix(prefix, end), is_next, "{prefix:?} {end:?}");
        }
    }

    /// All strings of up to three of a few bytes: every key within bounds with a common prefix has that prefix.
    #[test]
    fn common_prefix_holds_for_every_key_in_bounds() {
        let bytes = [0, b'/', b'a', 0xfe, 0xff];
        let mut keys: BTreeSet<Vec<u8>> = BTreeSet::from([Vec::new()]);
        for _ in 0..3 {
            let longer = keys.iter().flat_map(|key| bytes.map(|byte| [&key[..], &[byte]].concat()));
            keys = longer.collect::<Vec<_>>().into_iter().chain(keys).collect();
        }
        let keys: Vec<Vec<u8>> = keys.into_iter().collect();
        let mut rng = SeededRng::new(4);
        let mut found = 0;
        for _ in 0..40_000 {
            let mut pick = || &keys[rng.below(keys.len())][..];
            let (low, high) = (pick(), pick());
            for extractor in [PrefixExtractor::Fixed(1), PrefixExtractor::Fixed(2), PrefixExtractor::Delimiter(b'/')] {
                for upper in [Bound::Included(high), Bound::Excluded(high)] {
                    let Some(prefix) = extractor.common_prefix(Bound::Included(low), upper) else { continue };
                    found += 1;
                    let below = |key: &[u8]| match upper {
                        Bound::Included(end) => key <= end,
                        _ => key < high,
                    };
                    let inside = keys.iter().filter(|key| &key[..] >= low && below(key));
                    assert!(inside.into_iter().all(|key| extractor.extract(key) == Some(prefix)), "{low:?} {upper:?}");
                }
            }
        }
        assert!(found > 1_000, "{found}");
        assert_eq!(PrefixExtractor::Fixed(1).common_prefix(Bound::Unbounded, Bound::Included(b"a")), None);
        assert_eq!(PrefixExtractor::Fixed(1).common_prefix(Bound::Included(b"a"), Bound::Unbounded), None);
    }
}
