//! Buffers that a thread uses again and again for bytes that live only within a call.

use std::cell::RefCell;

/// Longest buffer that a thread keeps, in bytes.
pub(crate) const KEPT_SCRATCH_MAX: usize = 256 << 10;
/// Number of buffers that a thread keeps, because calls nest.
const KEPT_COUNT_MAX: usize = 2;

thread_local! {
    static KEPT: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// Calls `with` with `len` bytes of arbitrary content: a caller writes before it reads. A buffer is cleared once, when
/// it is allocated. Calls may nest, and each has a buffer of its own.
pub(crate) fn with_scratch<R>(len: usize, with: impl FnOnce(&mut [u8]) -> R) -> R {
    // A destructor of the thread may run after the buffers were destroyed.
    let kept = KEPT.try_with(|kept| kept.borrow_mut().pop()).ok().flatten();
    let mut bytes = kept.filter(|kept| kept.len() >= len).unwrap_or_else(|| {
        let kept_len = len.next_power_of_two();
        vec![0; if kept_len <= KEPT_SCRATCH_MAX { kept_len } else { len }]
    });
    let result = with(&mut bytes[..len]);
    if bytes.len() <= KEPT_SCRATCH_MAX {
        let _ends_with_its_thread = KEPT.try_with(|kept| {
            let mut kept = kept.borrow_mut();
            if kept.len() < KEPT_COUNT_MAX {
                kept.push(bytes);
            }
        });
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept_lens() -> Vec<usize> {
        KEPT.with_borrow(|kept| kept.iter().map(Vec::len).collect())
    }

    #[test]
    fn nested_buffers_do_not_overlap() {
        let sum = with_scratch(5000, |outer| {
            outer.fill(1);
            with_scratch(5000, |inner| inner.fill(2));
            with_scratch(10, |third| with_scratch(0, |empty| third.fill(empty.len() as u8 + 3)));
            outer.iter().map(|byte| usize::from(*byte)).sum::<usize>()
        });
        assert_eq!(sum, 5000);
    }

    #[test]
    fn kept_buffers_are_few_and_bounded() {
        with_scratch(KEPT_SCRATCH_MAX + 1, |bytes| assert_eq!(bytes.len(), KEPT_SCRATCH_MAX + 1));
        assert!(kept_lens().is_empty(), "too long to keep");
        with_scratch(4000, |bytes| bytes.fill(7));
        with_scratch(4096, |bytes| assert_eq!((bytes[0], bytes.len()), (7, 4096), "the same buffer, not cleared"));
        with_scratch(1, |_| with_scratch(1, |_| with_scratch(1, |_| ())));
        assert_eq!(kept_lens().len(), KEPT_COUNT_MAX);
        with_scratch(KEPT_SCRATCH_MAX, |_| ());
        assert!(kept_lens().iter().all(|len| *len <= KEPT_SCRATCH_MAX));
    }
}
