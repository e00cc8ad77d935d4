//! Growth of lists whose memory is limited: a vector that grows by itself doubles its capacity.

/// A list shorter than this many bytes doubles its capacity when it grows.
const DOUBLING_BYTES_MAX: usize = 256 << 10;
/// The capacity of a long list is at most 1 / `SPARE_SHARE` more than its length.
const SPARE_SHARE: usize = 4;

/// Memory in bytes of `list` with `more` elements more, for which [`reserve_more`] makes space.
pub(crate) fn list_bytes<T>(list: &Vec<T>, more: usize) -> u64 {
    let capacity = if more > list.capacity() - list.len() { grown_capacity(list, more) } else { list.capacity() };
    (capacity * size_of::<T>()) as u64
}

fn grown_capacity<T>(list: &[T], more: usize) -> usize {
    let len = list.len() + more;
    len + len.min(DOUBLING_BYTES_MAX / size_of::<T>()).max(len / SPARE_SHARE)
}

/// Makes space for `more` elements, unless there is.
#[inline]
pub(crate) fn reserve_more<T>(list: &mut Vec<T>, more: usize) {
    if more > list.capacity() - list.len() {
        grow(list, more);
    }
}

#[cold]
fn grow<T>(list: &mut Vec<T>, more: usize) {
    debug_assert!(more > list.capacity() - list.len(), "a list with space for the elements does not grow");
    list.reserve_exact(grown_capacity(list, more) - list.len());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_take_the_memory_that_is_counted() {
        let (mut bytes, mut words) = (Vec::new(), Vec::new());
        let mut growths = 0;
        for n in 0..400_000_u64 {
            let before = bytes.capacity();
            let counted = (list_bytes(&bytes, 10), list_bytes(&words, 1));
            reserve_more(&mut bytes, 10);
            bytes.extend_from_slice(&[7u8; 10]);
            growths += u32::from(bytes.capacity() > before);
            reserve_more(&mut words, 1);
            words.push(n);
            assert_eq!(counted, (bytes.capacity() as u64, 8 * words.capacity() as u64), "{n}");
            assert!(bytes.capacity() <= bytes.len() * 5 / 4 + DOUBLING_BYTES_MAX, "{n}");
        }
        assert!(growths < 40, "{growths}");
    }
}
