//! Child links: pointers to values with other owners, which a reader follows without a lock, a count or a hash
//! lookup.
//!
//! A [`ParentBlock`] is a value with an array of child links. A [`CacheHandle`] owns a strong count of a value, and
//! may make one link of one parent block point to it. A handle that is dropped clears the link first, and then
//! releases the count through the epochs, because readers that have followed the link may still be pinned.
//!
//! Invariant: a link that is not null points to a value of which an existing cache handle owns a count, and the link
//! belongs to that handle. So a parent block may be freed before the values that its links point to, and the values
//! may be freed before the parent block.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::null_mut;
use std::sync::{Arc, Weak};

use crate::mem::atomic::{AtomicPtr, Ordering, fence};
use crate::mem::epoch::{Pin, retire};
use crate::mem::simd::prefetch;

/// The lowest bit of a link: a reader has followed it since the last [`CacheHandle::take_referenced`].
const REFERENCED_BIT: usize = 1;

/// A value and its child links, which are null at first. Thread safe.
pub(crate) struct ParentBlock<T, H: ?Sized> {
    links: Box<[AtomicPtr<T>]>,
    block: H,
}

/// A parent block of any type whose links point to values of type `T`.
pub(crate) type AnyParentBlock<T> = ParentBlock<T, dyn Send + Sync>;

fn without_referenced_bit<T>(link: *mut T) -> *mut T {
    const { assert!(align_of::<T>() > REFERENCED_BIT, "the referenced bit must be 0 in every address") };
    link.map_addr(|address| address & !REFERENCED_BIT)
}

fn has_referenced_bit<T>(link: *mut T) -> bool {
    link.addr() & REFERENCED_BIT != 0
}

impl<T, H> ParentBlock<T, H> {
    pub(crate) fn new(block: H, links: usize) -> ParentBlock<T, H> {
        ParentBlock { links: (0..links).map(|_| AtomicPtr::new(null_mut())).collect(), block }
    }

    #[inline]
    pub(crate) fn link_count(&self) -> usize {
        self.links.len()
    }

    /// Memory in addition to that of the value, in bytes.
    pub(crate) fn links_memory(&self) -> usize {
        size_of::<ParentBlock<T, ()>>() + size_of_val(&*self.links)
    }
}

impl<T, H> Deref for ParentBlock<T, H> {
    type Target = H;

    #[inline]
    fn deref(&self) -> &H {
        &self.block
    }
}

impl<T: Send + Sync + 'static, H> ParentBlock<T, H> {
    /// Returns the value that link `at` points to, if any. Sets the referenced bit, and writes only if it is not set
    /// yet.
    #[inline]
    pub(crate) fn child<'p>(&self, at: usize, pin: &'p Pin) -> Option<PinnedRef<'p, T>> {
        let link = self.links.get(at)?;
        let to = link.load(Ordering::SeqCst);
        if !has_referenced_bit(to) && !to.is_null() {
            // The exchange fails if another thread cleared the link or set the bit meanwhile. Then there is nothing
            // to set.
            let marked = to.map_addr(|address| address | REFERENCED_BIT);
            let _ = link.compare_exchange(to, marked, Ordering::Relaxed, Ordering::Relaxed);
        }
        PinnedRef::new(to, pin)
    }

    /// Prefetches link `at`.
    #[inline]
    pub(crate) fn prefetch_link(&self, at: usize) {
        if let Some(link) = self.links.get(at) {
            prefetch(link);
        }
    }

    /// As [`child`](ParentBlock::child), without setting the referenced bit.
    pub(crate) fn peek<'p>(&self, at: usize, pin: &'p Pin) -> Option<PinnedRef<'p, T>> {
        PinnedRef::new(self.links.get(at)?.load(Ordering::SeqCst), pin)
    }
}

/// A reference to a value that exists while the reader is pinned, or while the `Arc` of the value is borrowed.
pub(crate) struct PinnedRef<'p, T> {
    /// The pointer of an `Arc`, as `Arc::into_raw` returns it.
    value: *const T,
    while_pinned: PhantomData<&'p T>,
}

impl<T> Clone for PinnedRef<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for PinnedRef<'_, T> {}

impl<'p, T> PinnedRef<'p, T> {
    #[inline]
    fn new(link: *mut T, _: &'p Pin) -> Option<PinnedRef<'p, T>> {
        let value = without_referenced_bit(link).cast_const();
        (!value.is_null()).then_some(PinnedRef { value, while_pinned: PhantomData })
    }

    /// Returns a reference to a value for the duration of a borrow.
    #[inline]
    pub(crate) fn from_borrowed_arc(value: &'p Arc<T>) -> PinnedRef<'p, T> {
        PinnedRef { value: Arc::as_ptr(value), while_pinned: PhantomData }
    }

    #[inline]
    pub(crate) fn get(self) -> &'p T {
        // SAFETY: either an `Arc` that is borrowed for 'p owns the value, or the pointer was loaded from a link after
        // the pin was set, and the pin exists for 'p. The link belonged to its cache handle at that time. The handle
        // clears the link (SeqCst) before it retires its count, so the count is released only after the pin ends: see
        // `Pin::new` and `CacheHandle::unlink`.
        unsafe { &*self.value }
    }

    /// Returns a strong count of the value, which the caller may keep.
    pub(crate) fn to_arc(self) -> Arc<T> {
        // SAFETY: the pointer is that of an `Arc`, and as in `get` at least one count of it exists for 'p.
        unsafe {
            Arc::increment_strong_count(self.value);
            Arc::from_raw(self.value)
        }
    }
}

impl<T> Deref for PinnedRef<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.get()
    }
}

/// Owns a strong count of a value that a child link may point to, and a charge, which is dropped after that count.
pub(crate) struct CacheHandle<T: Send + Sync + 'static, W: Send + 'static> {
    /// `None` only while the handle is dropped or retired.
    value_and_charge: Option<(Arc<T>, W)>,
    /// The link that points to the value. The handle does not keep the parent block; its links are freed with its
    /// last count.
    parent_link: Option<(Weak<AnyParentBlock<T>>, usize)>,
}

/// The value and the charge of a retired cache handle. No link points to the value, but readers may still use it, so
/// it is dropped through the epochs. The charge is dropped after the count of the value.
pub(crate) struct RetiredBlock<W: Send + 'static>(Option<(Arc<dyn Send + Sync>, W)>);

impl<T: Send + Sync + 'static, W: Send + 'static> CacheHandle<T, W> {
    pub(crate) fn new(value: Arc<T>, charge: W) -> CacheHandle<T, W> {
        CacheHandle { value_and_charge: Some((value, charge)), parent_link: None }
    }

    pub(crate) fn value(&self) -> &Arc<T> {
        &self.value_and_charge.as_ref().expect("present until the handle is dropped or retired").0
    }

    /// Clears the link of this handle, and makes link `at` of `parent` point to the value instead. If link `at` pointed
    /// to another value before, no link points to that value any more.
    pub(crate) fn link(&mut self, parent: Weak<AnyParentBlock<T>>, at: usize) {
        self.unlink();
        debug_assert!(self.parent_link.is_none(), "a handle owns one link");
        let Some(strong) = parent.upgrade() else { return };
        if let Some(link) = strong.links.get(at) {
            link.store(Arc::as_ptr(self.value()).cast_mut(), Ordering::SeqCst);
            self.parent_link = Some((parent, at));
        }
    }

    /// Whether a reader has followed the link since the last call.
    pub(crate) fn take_referenced(&self) -> bool {
        let Some((parent, at)) = &self.parent_link else { return false };
        let Some(parent) = parent.upgrade() else { return false };
        let value = Arc::as_ptr(self.value()).cast_mut();
        let marked = value.map_addr(|address| address | REFERENCED_BIT);
        parent.links[*at].compare_exchange(marked, value, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Clears the link, unless another handle has overwritten it. If the parent block has no counts left, no reader
    /// can reach its links.
    fn unlink(&mut self) {
        let Some((parent, at)) = self.parent_link.take() else { return };
        let Some(parent) = parent.upgrade() else {
            // The thread that dropped the last count may still read the value. The fence makes its pin happen before
            // the steps that follow.
            return fence(Ordering::Acquire);
        };
        let value = Arc::as_ptr(self.value()).cast_mut();
        let link = &parent.links[at];
        // SeqCst, as all changes of a link's target: see `Pin::new`. The load is necessary even if another handle has
        // overwritten the link: a reader that loaded this value did so before that store, and this thread sees it
        // pinned.
        let mut current = link.load(Ordering::SeqCst);
        while without_referenced_bit(current) == value {
            match link.compare_exchange(current, null_mut(), Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return,
                Err(changed) => current = changed, // a reader set the referenced bit
            }
        }
    }

    /// Clears the link and returns the value and the charge, to be dropped together with others.
    pub(crate) fn retire(mut self) -> RetiredBlock<W> {
        self.unlink();
        RetiredBlock(self.value_and_charge.take().map(|(value, charge)| (value as Arc<dyn Send + Sync>, charge)))
    }
}

impl<T: Send + Sync + 'static, W: Send + 'static> Drop for CacheHandle<T, W> {
    fn drop(&mut self) {
        self.unlink();
        if let Some(owned) = self.value_and_charge.take() {
            retire(Box::new(owned));
        }
    }
}

impl<W: Send + 'static> RetiredBlock<W> {
    /// Drops all values and charges once no reader can use any of the values.
    pub(crate) fn drop_all(all: Vec<RetiredBlock<W>>) {
        if !all.is_empty() {
            let all: Vec<_> = all.into_iter().map(|mut retired| retired.0.take()).collect();
            retire(Box::new(all));
        }
    }
}

impl<W: Send + 'static> Drop for RetiredBlock<W> {
    fn drop(&mut self) {
        if let Some(owned) = self.0.take() {
            retire(Box::new(owned));
        }
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests race scoped threads, which vfs does not provide")]
mod tests {
    use super::*;
    use crate::mem::atomic::{AtomicBool, AtomicUsize, Mutex};
    use crate::mem::epoch::tests::wait_until;

    /// A value that records whether it was dropped, and contains its number and the complement.
    struct Tracked {
        number: u64,
        alive: AtomicBool,
        again: u64,
        count: Arc<AtomicUsize>,
    }

    impl Tracked {
        fn new(number: u64, count: &Arc<AtomicUsize>) -> Arc<Tracked> {
            count.fetch_add(1, Ordering::SeqCst);
            let count = Arc::clone(count);
            Arc::new(Tracked { number, alive: AtomicBool::new(true), again: !number, count })
        }

        fn check(&self) {
            assert!(self.alive.load(Ordering::SeqCst) && self.number == !self.again);
        }
    }

    impl Drop for Tracked {
        fn drop(&mut self) {
            self.alive.store(false, Ordering::SeqCst);
            self.number = self.again;
            self.count.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn test_parent(links: usize) -> Arc<ParentBlock<Tracked, &'static str>> {
        Arc::new(ParentBlock::new("head", links))
    }

    fn as_any_parent(parent: &Arc<ParentBlock<Tracked, &'static str>>) -> Weak<AnyParentBlock<Tracked>> {
        let weak: Weak<ParentBlock<Tracked, &'static str>> = Arc::downgrade(parent);
        weak
    }

    #[test]
    fn link_is_null_after_cache_handle_is_dropped() {
        let count = Arc::new(AtomicUsize::new(0));
        let parent = test_parent(3);
        assert_eq!(**parent, "head");
        let pin = Pin::new();
        assert!((0..4).all(|at| parent.child(at, &pin).is_none()));
        let mut handle = CacheHandle::new(Tracked::new(7, &count), ());
        handle.link(as_any_parent(&parent), 1);
        assert!(!handle.take_referenced());
        assert_eq!(parent.peek(1, &pin).unwrap().number, 7);
        assert!(!handle.take_referenced());
        let pinned = parent.child(1, &pin).unwrap();
        parent.child(1, &pin).unwrap();
        assert!(handle.take_referenced() && !handle.take_referenced());
        handle.link(as_any_parent(&parent), 2);
        assert!(parent.child(1, &pin).is_none());
        assert_eq!(parent.child(2, &pin).unwrap().number, 7);
        handle.link(as_any_parent(&parent), 3);
        assert!(parent.child(2, &pin).is_none(), "link 3 does not exist, and the old link was cleared");
        handle.link(as_any_parent(&parent), 0);
        parent.child(0, &pin).unwrap();
        let counted = pinned.to_arc();
        drop(handle);
        assert!(parent.child(0, &pin).is_none());
        pinned.check();
        drop(pin);
        wait_until(|| Arc::strong_count(&counted) == 1);
        counted.check();
        drop(counted);
        assert_eq!(count.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn unlink_keeps_link_that_was_overwritten() {
        let count = Arc::new(AtomicUsize::new(0));
        let parent = test_parent(1);
        let pin = Pin::new();
        let mut first = CacheHandle::new(Tracked::new(1, &count), ());
        let mut second = CacheHandle::new(Tracked::new(2, &count), ());
        first.link(as_any_parent(&parent), 0);
        second.link(as_any_parent(&parent), 0);
        assert!(!first.take_referenced());
        RetiredBlock::drop_all(vec![first.retire()]);
        assert_eq!(parent.child(0, &pin).unwrap().number, 2);
        drop(pin);
        wait_until(|| count.load(Ordering::SeqCst) == 1);
        drop(second.retire());
        wait_until(|| count.load(Ordering::SeqCst) == 0);
    }

    #[test]
    fn parents_and_children_may_drop_in_any_order() {
        let count = Arc::new(AtomicUsize::new(0));
        let dropped = test_parent(1);
        let mut handle = CacheHandle::new(Tracked::new(1, &count), ());
        handle.link(as_any_parent(&dropped), 0);
        let weak = as_any_parent(&dropped);
        drop(dropped);
        assert!(!handle.take_referenced());
        handle.link(weak, 0);
        let next = test_parent(1);
        handle.link(as_any_parent(&next), 0);
        assert_eq!(next.child(0, &Pin::new()).unwrap().number, 1);
        drop(handle);
        assert!(next.child(0, &Pin::new()).is_none());
        wait_until(|| count.load(Ordering::SeqCst) == 0);
    }

    #[test]
    fn charge_is_dropped_after_value() {
        struct After(Arc<AtomicUsize>, Arc<AtomicUsize>);
        impl Drop for After {
            fn drop(&mut self) {
                self.1.store(1 + self.0.load(Ordering::SeqCst), Ordering::SeqCst);
            }
        }
        let (count, seen) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let after = After(Arc::clone(&count), Arc::clone(&seen));
        drop(CacheHandle::new(Tracked::new(1, &count), after));
        wait_until(|| seen.load(Ordering::SeqCst) == 1);
    }

    /// Readers follow two links, from parent block to parent block to value, while other threads replace both, move
    /// the values between links and drop them.
    #[test]
    fn readers_never_see_freed_values() {
        type Inner = ParentBlock<Tracked, u64>;
        let count = Arc::new(AtomicUsize::new(0));
        let top: Arc<ParentBlock<Inner, ()>> = Arc::new(ParentBlock::new((), 2));
        let stop = AtomicBool::new(false);
        let seen = AtomicUsize::new(0);
        let rounds: u64 = if cfg!(miri) { 40 } else { 30_000 };
        let values: Mutex<Vec<CacheHandle<Tracked, ()>>> = Mutex::new(Vec::new());
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let pin = Pin::new();
                        for at in 0..2 {
                            let Some(inner) = top.child(at, &pin) else { continue };
                            for value in (0..4).filter_map(|at| inner.child(at, &pin)) {
                                seen.fetch_add(1, Ordering::Relaxed);
                                value.check();
                                if value.number % 16 == 0 {
                                    let counted = value.to_arc();
                                    counted.check();
                                }
                            }
                        }
                    }
                });
            }
            s.spawn(|| {
                let mut inners: [Option<CacheHandle<Inner, ()>>; 2] = [None, None];
                for round in 0.. {
                    // The scheduler decides when the readers begin.
                    if round >= rounds && (cfg!(miri) || seen.load(Ordering::Relaxed) > 0) {
                        break;
                    }
                    let at = (round % 2) as usize;
                    let inner = Arc::new(Inner::new(round, 4));
                    let mut handle = CacheHandle::new(Arc::clone(&inner), ());
                    handle.link(Arc::downgrade(&top) as Weak<AnyParentBlock<Inner>>, at);
                    let mut values = values.lock().unwrap();
                    for i in 0..4 {
                        values.push(CacheHandle::new(Tracked::new(4 * round + i, &count), ()));
                        values
                            .last_mut()
                            .unwrap()
                            .link(Arc::downgrade(&inner) as Weak<AnyParentBlock<Tracked>>, i as usize);
                    }
                    inners[at] = Some(handle);
                }
                stop.store(true, Ordering::Relaxed);
            });
            s.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let mut values = values.lock().unwrap();
                    let half = values.len() / 2;
                    let retired: Vec<RetiredBlock<()>> = values.drain(..half).map(CacheHandle::retire).collect();
                    values.retain(|handle| !handle.take_referenced());
                    drop(values);
                    RetiredBlock::drop_all(retired);
                    std::thread::yield_now();
                }
            });
        });
        values.lock().unwrap().clear();
        wait_until(|| count.load(Ordering::SeqCst) == 0);
    }
}
