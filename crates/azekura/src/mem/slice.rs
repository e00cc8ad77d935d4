//! The byte string that reads return.

use std::borrow::Borrow;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::{Bound, Deref, RangeBounds};
use std::sync::Arc;

use crate::base::shared_bytes::SharedBytes;

/// An immutable byte string that is cheap to clone: up to 30 bytes are stored inline, longer strings are shared.
///
/// The design follows the `Slice` of Fjall. Sub-slices share the same bytes. A large value that was read from the
/// cache keeps its cached memory, at most twice its length, until the last slice of it is dropped. The cache does not
/// count this memory any more after it has evicted the block.
///
/// ```
/// use azekura::Slice;
/// let s = Slice::from("a rather long string that is shared");
/// let word = s.slice(2..8);
/// assert_eq!(&*word, b"rather");
/// assert_eq!(word, Slice::from("rather"));
/// ```
#[derive(Clone)]
pub struct Slice(Repr);

/// Maximum length without heap memory, in bytes: the space that remains beside tag and length in the 32 bytes of a
/// shared slice.
const INLINE_LEN_MAX: usize = 30;

#[derive(Clone)]
enum Repr {
    Inline { len: u8, bytes: [u8; INLINE_LEN_MAX] },
    Shared { bytes: Arc<[u8]>, start: u32, len: u32 },
    External(SharedBytes),
}

impl Slice {
    /// Returns the empty string.
    ///
    /// ```
    /// assert!(azekura::Slice::new().is_empty());
    /// ```
    pub const fn new() -> Slice {
        Slice(Repr::Inline { len: 0, bytes: [0; INLINE_LEN_MAX] })
    }

    /// Returns the bytes of `range`, shared without a copy; up to 30 bytes are copied into the returned value.
    ///
    /// # Panics
    /// If the range is out of bounds, as indexing does.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let users = db.open_partition("users", Default::default())?;
    /// users.insert("ada", "1815 mathematician, author of the first published program")?;
    /// let value = users.get("ada")?.unwrap();
    /// let (year, text) = (value.slice(..4), value.slice(5..));
    /// assert_eq!(year, "1815"); // copied
    /// assert_eq!(text.as_ptr(), value[5..].as_ptr()); // longer than 30 bytes: shared
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Slice {
        let from = match range.start_bound() {
            Bound::Included(&n) => n,
            Bound::Excluded(&n) => n + 1,
            Bound::Unbounded => 0,
        };
        let to = match range.end_bound() {
            Bound::Included(&n) => n + 1,
            Bound::Excluded(&n) => n,
            Bound::Unbounded => self.len(),
        };
        let part = &self[from..to];
        match &self.0 {
            Repr::Shared { bytes, start, .. } if part.len() > INLINE_LEN_MAX => {
                Slice(Repr::Shared { bytes: Arc::clone(bytes), start: start + from as u32, len: part.len() as u32 })
            }
            Repr::External(whole) if part.len() > INLINE_LEN_MAX => Slice(Repr::External(whole.subrange(from..to))),
            _ => Slice::from(part),
        }
    }

    /// Returns a copy of the bytes.
    ///
    /// ```
    /// let mut name = azekura::Slice::from("ada").to_vec(); // can be changed
    /// name[0] = b'A';
    /// assert_eq!(name, b"Ada");
    /// ```
    pub fn to_vec(&self) -> Vec<u8> {
        self.deref().to_vec()
    }

    /// Returns the `len` bytes of `bytes` from `start` on, shared.
    ///
    /// # Panics
    /// If the range is out of bounds, or an offset or length is 4 GiB or more.
    #[inline]
    pub(crate) fn from_arc_range(bytes: Arc<[u8]>, start: usize, len: usize) -> Slice {
        assert!(start <= bytes.len() && len <= bytes.len() - start, "the range of a slice is within the shared bytes");
        let in_range = |n: usize| u32::try_from(n).expect("a slice is shorter than 4 GiB");
        Slice(Repr::Shared { start: in_range(start), len: in_range(len), bytes })
    }

    fn inline(value: &[u8]) -> Option<Slice> {
        let mut bytes = [0; INLINE_LEN_MAX];
        bytes.get_mut(..value.len())?.copy_from_slice(value);
        Some(Slice(Repr::Inline { len: value.len() as u8, bytes }))
    }
}

impl Deref for Slice {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match &self.0 {
            Repr::Inline { len, bytes } => &bytes[..usize::from(*len)],
            Repr::Shared { bytes, start, len } => &bytes[*start as usize..][..*len as usize],
            Repr::External(bytes) => bytes,
        }
    }
}

impl From<&[u8]> for Slice {
    /// Copies; the value must be shorter than 4 GiB, as every value of a database is.
    fn from(value: &[u8]) -> Slice {
        assert!(u32::try_from(value.len()).is_ok(), "a slice is shorter than 4 GiB");
        Slice::inline(value)
            .unwrap_or_else(|| Slice(Repr::Shared { bytes: Arc::from(value), start: 0, len: value.len() as u32 }))
    }
}

impl From<SharedBytes> for Slice {
    /// Keeps the owner of the shared bytes.
    fn from(part: SharedBytes) -> Slice {
        Slice(Repr::External(part))
    }
}

impl From<Vec<u8>> for Slice {
    fn from(value: Vec<u8>) -> Slice {
        Slice::from(value.as_slice())
    }
}

impl From<&str> for Slice {
    fn from(value: &str) -> Slice {
        Slice::from(value.as_bytes())
    }
}

impl From<String> for Slice {
    fn from(value: String) -> Slice {
        Slice::from(value.as_bytes())
    }
}

impl<const N: usize> From<[u8; N]> for Slice {
    fn from(value: [u8; N]) -> Slice {
        Slice::from(value.as_slice())
    }
}

impl<const N: usize> From<&[u8; N]> for Slice {
    fn from(value: &[u8; N]) -> Slice {
        Slice::from(value.as_slice())
    }
}

#[cfg(feature = "bytes")]
impl From<Slice> for bytes::Bytes {
    fn from(value: Slice) -> bytes::Bytes {
        bytes::Bytes::from_owner(value)
    }
}

impl Default for Slice {
    fn default() -> Slice {
        Slice::new()
    }
}

impl AsRef<[u8]> for Slice {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Borrow<[u8]> for Slice {
    fn borrow(&self) -> &[u8] {
        self
    }
}

impl Eq for Slice {}

impl PartialOrd for Slice {
    fn partial_cmp(&self, other: &Slice) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Slice {
    fn cmp(&self, other: &Slice) -> std::cmp::Ordering {
        (**self).cmp(&**other)
    }
}

impl Hash for Slice {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

impl<T: AsRef<[u8]> + ?Sized> PartialEq<T> for Slice {
    fn eq(&self, other: &T) -> bool {
        **self == *other.as_ref()
    }
}

impl fmt::Debug for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "b\"{}\"", self.escape_ascii())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::shared_bytes::BytesOwner;

    #[test]
    fn a_slice_takes_32_bytes() {
        assert_eq!((size_of::<Slice>(), size_of::<Option<Slice>>()), (32, 32));
    }

    #[test]
    fn every_length_round_trips_and_sub_slices() {
        for len in 0..if cfg!(miri) { 34 } else { 64usize } {
            let bytes: Vec<u8> = (0..len as u8).collect();
            let slice = Slice::from(bytes.as_slice());
            assert_eq!(slice.to_vec(), bytes);
            for from in 0..=len {
                for to in from..=len {
                    let part = slice.slice(from..to);
                    assert_eq!(&*part, &bytes[from..to]);
                    assert_eq!(part.slice(..), part);
                }
            }
        }
    }

    #[test]
    fn subslices_of_shared_bytes_share_when_long() {
        struct Letters(Vec<u8>);
        impl BytesOwner for Letters {
            fn bytes(&self) -> &[u8] {
                &self.0
            }
        }
        let whole = Arc::new(Letters((0..200).collect()));
        let slice = Slice::from(SharedBytes::new(Arc::clone(&whole) as Arc<dyn BytesOwner>, 50..150).unwrap());
        let inner = slice.slice(10..=60);
        assert_eq!((&*slice, &*inner), (&whole.0[50..150], &whole.0[60..111]));
        assert_eq!((slice.as_ptr(), inner.as_ptr()), (whole.0[50..].as_ptr(), whole.0[60..].as_ptr()));
        assert_eq!(slice.slice(..9), whole.0[50..59]);
        assert_eq!(Arc::strong_count(&whole), 3, "short slices are stored inline");
    }

    #[test]
    fn long_sub_slices_share_the_bytes() {
        let whole = Slice::from(vec![7u8; 100]);
        let part = whole.slice(10..90).slice(5..=60);
        assert_eq!(part.as_ptr(), whole[15..].as_ptr());
    }
}
