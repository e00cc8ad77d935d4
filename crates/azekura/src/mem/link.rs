//! Links: pointers to values that somebody else keeps, which a reader follows without a lock, a count or a hash.
//!
//! A [`Hub`] is a value with a row of links. A [`Keeper`] owns a count of a value, and may have one link of one hub
//! lead to it. Whoever drops the keeper takes the link away first, and lets the count go by way of the epochs: readers
//! that followed the link before are still pinned then.
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
const MARK: usize = 1;

/// A value and its links, all of which lead nowhere at first. Thread safe.
pub(crate) struct Hub<T, H: ?Sized> {
    links: Box<[AtomicPtr<T>]>,
    head: H,
}

/// A hub whose links lead to `T`, whatever its value is.
pub(crate) type AnyHub<T> = Hub<T, dyn Send + Sync>;

fn unmarked<T>(link: *mut T) -> *mut T {
    const { assert!(align_of::<T>() > MARK, "the mark needs a bit that no address has") };
    link.map_addr(|address| address & !MARK)
}

fn is_marked<T>(link: *mut T) -> bool {
    link.addr() & MARK != 0
}

impl<T, H> Hub<T, H> {
    pub(crate) fn new(head: H, links: usize) -> Hub<T, H> {
        Hub { links: (0..links).map(|_| AtomicPtr::new(null_mut())).collect(), head }
    }

    /// Memory held beside the value's own, in bytes.
    pub(crate) fn links_memory(&self) -> usize {
        size_of::<Hub<T, ()>>() + size_of_val(&*self.links)
    }
}

impl<T, H> Deref for Hub<T, H> {
    type Target = H;

    #[inline]
    fn deref(&self) -> &H {
        &self.head
    }
}

impl<T: Send + Sync + 'static, H> Hub<T, H> {
    /// Where the link `at` leads, if it leads anywhere; marks it as followed, which writes only the first time.
    #[inline]
    pub(crate) fn follow<'p>(&self, at: usize, pin: &'p Pin) -> Option<Pinned<'p, T>> {
        let link = self.links.get(at)?;
        let to = link.load(Ordering::SeqCst);
        if !is_marked(to) && !to.is_null() {
            // It fails where the link was taken away or marked by another meanwhile: then there is nothing to mark.
            let marked = to.map_addr(|address| address | MARK);
            let _ = link.compare_exchange(to, marked, Ordering::Relaxed, Ordering::Relaxed);
        }
        Pinned::new(to, pin)
    }

    /// The same without a mark.
    pub(crate) fn peek<'p>(&self, at: usize, pin: &'p Pin) -> Option<Pinned<'p, T>> {
        Pinned::new(self.links.get(at)?.load(Ordering::SeqCst), pin)
    }
}

/// A value that stays for as long as the reader is pinned, or is held otherwise.
pub(crate) struct Pinned<'p, T> {
    /// Of an `Arc`, as `Arc::into_raw` would give it.
    value: *const T,
    while_pinned: PhantomData<&'p T>,
}

impl<T> Clone for Pinned<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Pinned<'_, T> {}

impl<'p, T> Pinned<'p, T> {
    #[inline]
    fn new(link: *mut T, _: &'p Pin) -> Option<Pinned<'p, T>> {
        let value = unmarked(link).cast_const();
        (!value.is_null()).then_some(Pinned { value, while_pinned: PhantomData })
    }

    /// What somebody holds for as long as it is borrowed.
    #[inline]
    pub(crate) fn held(value: &'p Arc<T>) -> Pinned<'p, T> {
        Pinned { value: Arc::as_ptr(value), while_pinned: PhantomData }
    }

    #[inline]
    pub(crate) fn get(self) -> &'p T {
        // SAFETY: either a borrowed `Arc` holds it for 'p, or the pointer was read from a link after the pin was set,
        // and the pin lives for 'p. The link was its keeper's then, who takes it away (SeqCst) before it retires its
        // count, so the count is freed only after the pin is gone: see `Pin::new` and `Keeper::unlink`.
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

impl<T> Deref for Pinned<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.get()
    }
}

/// Owns a count of a value that a link may lead to; `with` is dropped after that count.
pub(crate) struct Keeper<T: Send + Sync + 'static, W: Send + 'static> {
    /// None only while it is dropped.
    kept: Option<(Arc<T>, W)>,
    /// The link that leads here. The hub itself is not kept; its links go with its last count.
    home: Option<(Weak<AnyHub<T>>, usize)>,
}

/// What a keeper owned. No link leads to it; readers may still be at it, so it is dropped by way of the epochs.
pub(crate) struct Retired(Option<Box<dyn Send>>);

impl<T: Send + Sync + 'static, W: Send + 'static> Keeper<T, W> {
    pub(crate) fn new(value: Arc<T>, with: W) -> Keeper<T, W> {
        Keeper { kept: Some((value, with)), home: None }
    }

    pub(crate) fn value(&self) -> &Arc<T> {
        &self.kept.as_ref().expect("taken out only when it is dropped").0
    }

    /// Has the link `at` of `hub` lead here, and no other; whatever it led to before is only found elsewhere now.
    pub(crate) fn link(&mut self, hub: Weak<AnyHub<T>>, at: usize) {
        self.unlink();
        let Some(strong) = hub.upgrade() else { return };
        if let Some(link) = strong.links.get(at) {
            link.store(Arc::as_ptr(self.value()).cast_mut(), Ordering::SeqCst);
            self.home = Some((hub, at));
        }
    }

    /// Whether the link was followed since this was last asked.
    pub(crate) fn take_mark(&self) -> bool {
        let Some((hub, at)) = &self.home else { return false };
        let Some(hub) = hub.upgrade() else { return false };
        let value = Arc::as_ptr(self.value()).cast_mut();
        let marked = value.map_addr(|address| address | MARK);
        hub.links[*at].compare_exchange(marked, value, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Takes the link away, unless another keeper has taken it over. A hub without counts has no readers: nobody can
    /// come by its links any more.
    fn unlink(&mut self) {
        let Some((hub, at)) = self.home.take() else { return };
        let Some(hub) = hub.upgrade() else {
            // Who gave up the last count may still be at the value: then its pin happened before what follows here.
            return fence(Ordering::Acquire);
        };
        let value = Arc::as_ptr(self.value()).cast_mut();
        let link = &hub.links[at];
        // SeqCst, as all that changes where a link leads: see `Pin::new`. Also where another keeper has taken it over:
        // who still saw our value did so before that, and is seen pinned by us.
        let mut seen = link.load(Ordering::SeqCst);
        while unmarked(seen) == value {
            match link.compare_exchange(seen, null_mut(), Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return,
                Err(now) => seen = now, // somebody followed it
            }
        }
    }

    /// Takes the link away and gives up what it owned, to be dropped together with others.
    pub(crate) fn retire(mut self) -> Retired {
        self.unlink();
        Retired(self.kept.take().map(|kept| Box::new(kept) as Box<dyn Send>))
    }
}

impl<T: Send + Sync + 'static, W: Send + 'static> Drop for Keeper<T, W> {
    fn drop(&mut self) {
        self.unlink();
        if let Some(kept) = self.kept.take() {
            retire(Box::new(kept));
        }
    }
}

impl Retired {
    /// Drops all of them as soon as no reader can be at one.
    pub(crate) fn drop_all(all: Vec<Retired>) {
        if !all.is_empty() {
            let all: Vec<_> = all.into_iter().map(|mut retired| retired.0.take()).collect();
            retire(Box::new(all));
        }
    }
}

impl Drop for Retired {
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
    use crate::mem::epoch::tests::eventually;

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

    fn hub(links: usize) -> Arc<Hub<Tracked, &'static str>> {
        Arc::new(Hub::new("head", links))
    }

    fn any(hub: &Arc<Hub<Tracked, &'static str>>) -> Weak<AnyHub<Tracked>> {
        let weak: Weak<Hub<Tracked, &'static str>> = Arc::downgrade(hub);
        weak
    }

    #[test]
    fn a_link_leads_to_what_is_kept_and_nowhere_after() {
        let count = Arc::new(AtomicUsize::new(0));
        let hub = hub(3);
        assert_eq!(**hub, "head");
        let pin = Pin::new();
        assert!((0..4).all(|at| hub.follow(at, &pin).is_none()));
        let mut keeper = Keeper::new(Tracked::new(7, &count), ());
        keeper.link(any(&hub), 1);
        assert!(!keeper.take_mark());
        assert_eq!(hub.peek(1, &pin).unwrap().number, 7);
        assert!(!keeper.take_mark());
        let pinned = hub.follow(1, &pin).unwrap();
        hub.follow(1, &pin).unwrap();
        assert!(keeper.take_mark() && !keeper.take_mark());
        keeper.link(any(&hub), 2);
        assert!(hub.follow(1, &pin).is_none());
        assert_eq!(hub.follow(2, &pin).unwrap().number, 7);
        keeper.link(any(&hub), 3);
        assert!(hub.follow(2, &pin).is_none(), "there is no such link, and the old one is gone");
        keeper.link(any(&hub), 0);
        hub.follow(0, &pin).unwrap();
        let counted = pinned.to_arc();
        drop(keeper);
        assert!(hub.follow(0, &pin).is_none());
        pinned.check();
        drop(pin);
        eventually(|| Arc::strong_count(&counted) == 1);
        counted.check();
        drop(counted);
        assert_eq!(count.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_link_that_was_taken_over_is_left_alone() {
        let count = Arc::new(AtomicUsize::new(0));
        let hub = hub(1);
        let pin = Pin::new();
        let mut first = Keeper::new(Tracked::new(1, &count), ());
        let mut second = Keeper::new(Tracked::new(2, &count), ());
        first.link(any(&hub), 0);
        second.link(any(&hub), 0);
        assert!(!first.take_mark());
        Retired::drop_all(vec![first.retire()]);
        assert_eq!(hub.follow(0, &pin).unwrap().number, 2);
        drop(pin);
        eventually(|| count.load(Ordering::SeqCst) == 1);
        drop(second.retire());
        eventually(|| count.load(Ordering::SeqCst) == 0);
    }

    #[test]
    fn hubs_and_what_they_lead_to_may_go_in_any_order() {
        let count = Arc::new(AtomicUsize::new(0));
        let gone = hub(1);
        let mut keeper = Keeper::new(Tracked::new(1, &count), ());
        keeper.link(any(&gone), 0);
        let weak = any(&gone);
        drop(gone);
        assert!(!keeper.take_mark());
        keeper.link(weak, 0);
        let next = hub(1);
        keeper.link(any(&next), 0);
        assert_eq!(next.follow(0, &Pin::new()).unwrap().number, 1);
        drop(keeper);
        assert!(next.follow(0, &Pin::new()).is_none());
        eventually(|| count.load(Ordering::SeqCst) == 0);
    }

    #[test]
    fn what_goes_with_a_value_goes_after_it() {
        struct After(Arc<AtomicUsize>, Arc<AtomicUsize>);
        impl Drop for After {
            fn drop(&mut self) {
                self.1.store(1 + self.0.load(Ordering::SeqCst), Ordering::SeqCst);
            }
        }
        let (count, seen) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let after = After(Arc::clone(&count), Arc::clone(&seen));
        drop(Keeper::new(Tracked::new(1, &count), after));
        eventually(|| seen.load(Ordering::SeqCst) == 1);
    }

    /// Readers walk two steps, hub to hub to value, while both are replaced, moved between links and dropped.
    #[test]
    fn readers_only_ever_see_what_is_alive() {
        type Inner = Hub<Tracked, u64>;
        let count = Arc::new(AtomicUsize::new(0));
        let top: Arc<Hub<Inner, ()>> = Arc::new(Hub::new((), 2));
        let stop = AtomicBool::new(false);
        let seen = AtomicUsize::new(0);
        let rounds: u64 = if cfg!(miri) { 40 } else { 30_000 };
        let values: Mutex<Vec<Keeper<Tracked, ()>>> = Mutex::new(Vec::new());
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let pin = Pin::new();
                        for at in 0..2 {
                            let Some(inner) = top.follow(at, &pin) else { continue };
                            for value in (0..4).filter_map(|at| inner.follow(at, &pin)) {
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
                let mut inners: [Option<Keeper<Inner, ()>>; 2] = [None, None];
                for round in 0..rounds {
                    let at = (round % 2) as usize;
                    let inner = Arc::new(Inner::new(round, 4));
                    let mut keeper = Keeper::new(Arc::clone(&inner), ());
                    keeper.link(Arc::downgrade(&top) as Weak<AnyHub<Inner>>, at);
                    let mut values = values.lock().unwrap();
                    for i in 0..4 {
                        values.push(Keeper::new(Tracked::new(4 * round + i, &count), ()));
                        values.last_mut().unwrap().link(Arc::downgrade(&inner) as Weak<AnyHub<Tracked>>, i as usize);
                    }
                    inners[at] = Some(keeper);
                }
                stop.store(true, Ordering::Relaxed);
            });
            s.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let mut values = values.lock().unwrap();
                    let half = values.len() / 2;
                    let gone: Vec<Retired> = values.drain(..half).map(Keeper::retire).collect();
                    values.retain(|keeper| !keeper.take_mark());
                    drop(values);
                    Retired::drop_all(gone);
                    std::thread::yield_now();
                }
            });
        });
        values.lock().unwrap().clear();
        assert!(cfg!(miri) || seen.load(Ordering::Relaxed) > 0);
        eventually(|| count.load(Ordering::SeqCst) == 0);
    }
}
