//! Search for entries that are newer than a sequence number.

use std::ops::Bound;

use crate::base::{InternalKey, KeyOrder, Result, SeqNo};
use crate::iter::iter::InternalIter;

/// Returns the first key within `bounds` that has an entry above `since`. Passes every entry within the bounds up to
/// that one. Reversed bounds contain no key.
pub(crate) fn find_newer_key(
    iter: &mut impl InternalIter,
    order: &KeyOrder,
    (start, end): (Bound<&Vec<u8>>, Bound<&Vec<u8>>),
    since: SeqNo,
) -> Result<Option<Vec<u8>>> {
    match start {
        Bound::Unbounded => iter.seek_to_first()?,
        Bound::Included(key) => iter.seek(InternalKey::before_versions_of(key))?,
        Bound::Excluded(key) => iter.seek(InternalKey::new(key, SeqNo::ZERO))?,
    }
    while let Some((key, _)) = iter.head() {
        let is_past_end = match end {
            Bound::Unbounded => false,
            Bound::Included(end) => order.cmp(key.user_key, end).is_gt(),
            Bound::Excluded(end) => order.cmp(key.user_key, end).is_ge(),
        };
        if is_past_end {
            return Ok(None);
        }
        // The seek past an excluded key may end at its version with sequence number 0, which is never above `since`.
        if key.seqno > since {
            return Ok(Some(key.user_key.to_vec()));
        }
        iter.next()?;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::RecordKind;
    use crate::testing::vec_iter::VecIter;

    #[test]
    fn newer_keys_are_found_within_their_bounds() {
        let entry = |key: &str, seqno| (key.as_bytes().to_vec(), SeqNo(seqno), RecordKind::Put, Vec::new());
        let entries = vec![entry("a", 9), entry("b", 1), entry("c", 0), entry("d", 7), entry("d", 2), entry("e", 6)];
        let order = KeyOrder::bytewise();
        let find = |start: Bound<&str>, end: Bound<&str>, since| {
            let own = |bound: Bound<&str>| bound.map(|key| key.as_bytes().to_vec());
            let (start, end) = (own(start), own(end));
            let mut iter = VecIter::new(order.clone(), entries.clone());
            let found = find_newer_key(&mut iter, &order, (start.as_ref(), end.as_ref()), SeqNo(since)).unwrap();
            found.map(|key| String::from_utf8(key).unwrap())
        };
        use Bound::{Excluded, Included, Unbounded};
        assert_eq!(find(Unbounded, Unbounded, 5).as_deref(), Some("a"));
        assert_eq!(find(Unbounded, Unbounded, 9), None);
        assert_eq!(find(Excluded("a"), Unbounded, 5).as_deref(), Some("d"));
        assert_eq!(find(Included("b"), Excluded("d"), 1), None);
        assert_eq!(find(Included("b"), Included("d"), 1).as_deref(), Some("d"));
        assert_eq!(find(Excluded("d"), Included("e"), 6), None);
        assert_eq!(find(Excluded("c"), Excluded("d"), 0), None);
        assert_eq!(find(Included("e"), Included("a"), 0), None, "reversed bounds contain no key");
    }
}
