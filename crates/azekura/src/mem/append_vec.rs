//! A vector that grows while other threads read it.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::mem::needs_drop;
use std::ptr::{NonNull, null_mut};

use crate::mem::atomic::{AtomicPtr, AtomicU32, Mutex, Ordering, lock};
use crate::mem::pages::PageAllocation;

/// Number of segments. Segment `n` holds `2^n` items, so item `i` is in segment `log2(i + 1)`.
const SEGMENTS: usize = 31;

/// An append-only vector. Items never move, so a `&T` stays valid while more items are pushed, and readers never
/// wait.
///
/// An empty vector owns no memory. A push takes a lock; the vector is meant for items that are large or rarely
/// pushed.
pub(crate) struct AppendVec<T> {
    segments: [AtomicPtr<T>; SEGMENTS],
    /// Items below this index are written and never written again, except through their own interior mutability.
    len: AtomicU32,
    push_lock: Mutex<()>,
    owned: PhantomData<T>,
}

// SAFETY: shared access returns `&T` (needs `T: Sync`) and moves items into the vector (needs `T: Send`); see `push`
// and `get`.
unsafe impl<T: Send + Sync> Sync for AppendVec<T> {}
// SAFETY: the vector owns its items, so sending the vector sends the items.
unsafe impl<T: Send> Send for AppendVec<T> {}

impl<T> AppendVec<T> {
    pub(crate) const fn new() -> AppendVec<T> {
        const { assert!(size_of::<T>() > 0 && align_of::<T>() <= 64, "segments are aligned to 64 bytes") };
        AppendVec {
            segments: [const { AtomicPtr::new(null_mut()) }; SEGMENTS],
            len: AtomicU32::new(0),
            push_lock: Mutex::new(()),
            owned: PhantomData,
        }
    }

    pub(crate) fn len(&self) -> u32 {
        self.len.load(Ordering::Acquire)
    }

    /// Bytes of the items. The unused part of a segment is not counted, because it was not touched yet.
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.len()) * size_of::<T>() as u64
    }

    /// The item at `index`, or `None` if it was not pushed yet.
    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        if index >= self.len.load(Ordering::Acquire) {
            return None;
        }
        let (segment, at) = locate(index);
        let start = self.segments[segment].load(Ordering::Relaxed);
        // SAFETY: `index` is below a `len` that was loaded with Acquire, so the segment was allocated and the item
        // was written before. Both stay in place until the vector is dropped, and no `&mut` to an item exists.
        Some(unsafe { &*start.add(at) })
    }

    /// Appends `value` and returns its index. Returns `None` and drops `value` if there is no memory or the vector
    /// has 2^31 − 1 items.
    pub(crate) fn push(&self, value: T) -> Option<u32> {
        let _pushing = lock(&self.push_lock);
        let index = self.len.load(Ordering::Relaxed);
        let (segment, at) = locate(index);
        debug_assert!(at < 1 << segment, "an item is within its segment");
        let slot = self.segments.get(segment)?;
        if slot.load(Ordering::Relaxed).is_null() {
            let pages = PageAllocation::new(segment_bytes::<T>(segment)?)?;
            slot.store(pages.into_raw().as_ptr().cast(), Ordering::Relaxed);
        }
        // SAFETY: the segment has space for `2^segment` items, aligned for T, and `at` is less. This thread holds the
        // lock, so it is the only writer, and readers read only items below `len`.
        unsafe { slot.load(Ordering::Relaxed).add(at).write(value) };
        self.len.store(index + 1, Ordering::Release);
        Some(index)
    }
}

impl<T> Drop for AppendVec<T> {
    fn drop(&mut self) {
        let len = *self.len.get_mut();
        for index in 0..if needs_drop::<T>() { len } else { 0 } {
            let (segment, at) = locate(index);
            // SAFETY: items below `len` are written, and the owner of the vector drops each of them once.
            unsafe { self.segments[segment].get_mut().add(at).drop_in_place() };
        }
        for (n, segment) in self.segments.iter_mut().enumerate() {
            if let (Some(start), Some(bytes)) = (NonNull::new(*segment.get_mut()), segment_bytes::<T>(n)) {
                // SAFETY: `push` gave up the ownership of the segment with this length, and it is restored only here.
                drop(unsafe { PageAllocation::from_raw(start.cast(), bytes) });
            }
        }
    }
}

/// Returns the segment of an item and the index in that segment.
#[inline]
fn locate(index: u32) -> (usize, usize) {
    let n = (index + 1).ilog2();
    (n as usize, (index + 1 - (1 << n)) as usize)
}

fn segment_bytes<T>(segment: usize) -> Option<usize> {
    size_of::<T>().checked_mul(1 << segment)
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests race scoped threads, which vfs does not provide")]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn items_do_not_move_and_are_dropped_once() {
        let item = Arc::new(());
        let vec = AppendVec::new();
        assert!(vec.get(0).is_none());
        vec.push((0usize, Arc::clone(&item))).unwrap();
        let first: *const _ = vec.get(0).unwrap();
        for n in 1..1000 {
            assert_eq!(vec.push((n, Arc::clone(&item))), Some(n as u32));
        }
        assert!((0..1000).all(|n| vec.get(n).unwrap().0 == n as usize));
        assert!(vec.get(1000).is_none() && vec.get(u32::MAX - 1).is_none() && vec.get(u32::MAX).is_none());
        assert!(std::ptr::eq(first, vec.get(0).unwrap()));
        assert_eq!(Arc::strong_count(&item), 1001);
        drop(vec);
        assert_eq!(Arc::strong_count(&item), 1);
    }

    #[test]
    fn readers_see_whole_items_during_push() {
        let count = if cfg!(miri) { 200 } else { 20_000 };
        let vec = AppendVec::new();
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    while vec.len() < count {
                        let len = vec.len();
                        for n in len.saturating_sub(50)..len {
                            assert_eq!(vec.get(n), Some(&[u64::from(n); 5]));
                        }
                    }
                });
            }
            for n in 0..count {
                vec.push([u64::from(n); 5]).unwrap();
            }
        });
    }
}
