//! Child links: pointers to values of other owners, which a reader follows without a lock, a count or a hash lookup.
//!
//! A [`ParentBlock`] is a value with a row of child links. A [`CacheHandle`] owns a count of a value, and may have
//! one link of one parent block point to it. Dropping the handle clears the link first, and releases the count
//! through the epochs: readers that followed the link before are still pinned then.
//!
//! Invariant: a link that is not null leads to a value of which a living keeper has a count, and it is that keeper's
//! link. So a hub may go before what its links lead to, and the values may go before the hub.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::null_mut;
use std::sync::{Arc, Weak};

use crate::mem::atomic::{AtomicPtr, Ordering, fence};
use crate::mem::epoch::{Pin, retire};

/// The lowest bit of a link: it was followed since the keeper last asked.
const REFERENCED_BIT: usize = 1;

/// A value and its links, all of which lead nowhere at first. Thread safe.
pub(crate) struct ParentBlock<T, H: ?Sized> {
    links: Box<[AtomicPtr<T>]>,
    block: H,
}

/// A hub whose links lead to `T`, whatever its value is.
pub(crate) type AnyParentBlock<T> = ParentBlock<T, dyn Send + Sync>;

fn without_referenced_bit<T>(link: *mut T) -> *mut T {
    const { assert!(align_of::<T>() > REFERENCED_BIT, "the mark needs a bit that no address has") };
    link.map_addr(|address| address & !REFERENCED_BIT)
}

fn has_referenced_bit<T>(link: *mut T) -> bool {
    link.addr() & REFERENCED_BIT != 0
}

impl<T, H> ParentBlock<T, H> {
    pub(crate) fn new(head: H, links: usize) -> ParentBlock<T, H> {
        ParentBlock { links: (0..links).map(|_| AtomicPtr::new(null_mut())).collect(), block: head }
    }

    /// Memory held beside the value's own, in bytes.
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
    /// Where the link `at` leads, if it leads anywhere; marks it as followed, which writes only the first time.
    #[inline]
    pub(crate) fn child<'p>(&self, at: usize, pin: &'p Pin) -> Option<PinnedRef<'p, T>> {
        let link = self.links.get(at)?;
        let to = link.load(Ordering::SeqCst);
        if !has_referenced_bit(to) && !to.is_null() {
            // It fails where the link was taken away or marked by another meanwhile: then there is nothing to mark.
            let marked = to.map_addr(|address| address | REFERENCED_BIT);
            let _ = link.compare_exchange(to, marked, Ordering::Relaxed, Ordering::Relaxed);
        }
        PinnedRef::new(to, pin)
    }

    /// The same without a mark.
    pub(crate) fn peek<'p>(&self, at: usize, pin: &'p Pin) -> Option<PinnedRef<'p, T>> {
        PinnedRef::new(self.links.get(at)?.load(Ordering::SeqCst), pin)
    }
}

/// A value that stays for as long as the reader is pinned, or is held otherwise.
pub(crate) struct PinnedRef<'p, T> {
    /// Of an `Arc`, as `Arc::into_raw` would give it.
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

    /// A reference to a value for the time of a borrow.
    #[inline]
    pub(crate) fn from_borrowed_arc(value: &'p Arc<T>) -> PinnedRef<'p, T> {
        PinnedRef { value: Arc::as_ptr(value), while_pinned: PhantomData }
    }

    #[inline]
    pub(crate) fn get(self) -> &'p T {
        // SAFETY: either a borrowed `Arc` holds it for 'p, or the pointer was read from a link after the pin was set,
        // and the pin lives for 'p. The link belonged to its cache handle then, which clears it (SeqCst) before it
        // retires its count, so the count is freed only after the pin ends: see `Pin::new` and `CacheHandle::unlink`.
        unsafe { &*self.value }
    }

    /// A count of it, which may be kept.
    pub(crate) fn to_arc(self) -> Arc<T> {
        // SAFETY: the pointer is that of an `Arc`, and as in `get` one count of it at least is there for 'p.
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

/// Owns a count of a value that a link may lead to; `with` is dropped after that count.
pub(crate) struct CacheHandle<T: Send + Sync + 'static, W: Send + 'static> {
    /// None only while it is dropped.
    value_and_charge: Option<(Arc<T>, W)>,
    /// The link that leads here. The hub itself is not kept; its links go with its last count.
    parent_link: Option<(Weak<AnyParentBlock<T>>, usize)>,
}

/// What a keeper owned. No link leads to it; readers may still be at it, so it is dropped by way of the epochs.
pub(crate) struct RetiredBlock(Option<Box<dyn Send>>);

impl<T: Send + Sync + 'static, W: Send + 'static> CacheHandle<T, W> {
    pub(crate) fn new(value: Arc<T>, with: W) -> CacheHandle<T, W> {
        CacheHandle { value_and_charge: Some((value, with)), parent_link: None }
    }

    pub(crate) fn value(&self) -> &Arc<T> {
        &self.value_and_charge.as_ref().expect("taken out only when it is dropped").0
    }

    /// Has the link `at` of `test_parent` lead here, and no other; whatever it led to before is only found elsewhere
    /// now.
    pub(crate) fn link(&mut self, parent: Weak<AnyParentBlock<T>>, at: usize) {
        self.unlink();
        let Some(strong) = parent.upgrade() else { return };
        if let Some(link) = strong.links.get(at) {
            link.store(Arc::as_ptr(self.value()).cast_mut(), Ordering::SeqCst);
            self.parent_link = Some((parent, at));
        }
    }

    /// Whether the link was followed since this was last asked.
    pub(crate) fn take_referenced(&self) -> bool {
        let Some((parent, at)) = &self.parent_link else { return false };
        let Some(parent) = parent.upgrade() else { return false };
        let value = Arc::as_ptr(self.value()).cast_mut();
        let marked = value.map_addr(|address| address | REFERENCED_BIT);
        parent.links[*at].compare_exchange(marked, value, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Clears the link, unless another handle has taken it over. A parent block without counts has no readers, so its
    /// links are unreachable.
    fn unlink(&mut self) {
        let Some((parent, at)) = self.parent_link.take() else { return };
        let Some(parent) = parent.upgrade() else {
            // The thread that dropped the last count may still read the value: then its pin happened before the
            // following step.
            return fence(Ordering::Acquire);
        };
        let value = Arc::as_ptr(self.value()).cast_mut();
        let link = &parent.links[at];
        // SeqCst, as all changes of a link's target: see `Pin::new`. Also if another handle has taken it over: a
        // reader that still saw our value did so before that, and is seen pinned by this thread.
        let mut seen = link.load(Ordering::SeqCst);
        while without_referenced_bit(seen) == value {
            match link.compare_exchange(seen, null_mut(), Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return,
                Err(now) => seen = now, // a reader followed it
            }
        }
    }

    /// Takes the link away and gives up what it owned, to be dropped together with others.
    pub(crate) fn retire(mut self) -> RetiredBlock {
        self.unlink();
        RetiredBlock(self.value_and_charge.take().map(|kept| Box::new(kept) as Box<dyn Send>))
    }
}

impl<T: Send + Sync + 'static, W: Send + 'static> Drop for CacheHandle<T, W> {
    fn drop(&mut self) {
        self.unlink();
        if let Some(kept) = self.value_and_charge.take() {
            retire(Box::new(kept));
        }
    }
}

impl RetiredBlock {
    /// Drops all of them as soon as no reader can be at one.
    pub(crate) fn drop_all(all: Vec<RetiredBlock>) {
        if !all.is_empty() {
            let all: Vec<_> = all.into_iter().map(|mut retired| retired.0.take()).collect();
            retire(Box::new(all));
        }
    }
}

impl Drop for RetiredBlock {
    fn drop(&mut self) {
        if let Some(kept) = self.0.take() {
            retire(kept);
        }
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests race threads, and in vfs none are scoped")]
mod tests {
    use super::*;
    use crate::mem::atomic::{AtomicBool, AtomicUsize, Mutex};
    use crate::mem::epoch::tests::wait_until;

    /// Knows whether it is alive, and its number twice.
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
        assert!(parent.child(2, &pin).is_none(), "there is no such link, and the old one is gone");
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
        let gone = test_parent(1);
        let mut handle = CacheHandle::new(Tracked::new(1, &count), ());
        handle.link(as_any_parent(&gone), 0);
        let weak = as_any_parent(&gone);
        drop(gone);
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

    /// Readers walk two steps, hub to hub to value, while both are replaced, moved between links and dropped.
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
                                value.check();
                                seen.fetch_add(1, Ordering::Relaxed);
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
                for round in 0..rounds {
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
                    let gone: Vec<RetiredBlock> = values.drain(..half).map(CacheHandle::retire).collect();
                    values.retain(|handle| !handle.take_referenced());
                    drop(values);
                    RetiredBlock::drop_all(gone);
                    std::thread::yield_now();
                }
            });
        });
        values.lock().unwrap().clear();
        assert!(cfg!(miri) || seen.load(Ordering::Relaxed) > 0);
        wait_until(|| count.load(Ordering::SeqCst) == 0);
    }
}
