//! Which pages of an image were changed, and the cut through all of them that a checkpoint brings to its file.
//!
//! **The cut** is the moment at which its number is stored in `cut`; it stops nobody. A writer looks at the number
//! before it stores into a page. If there is one, and nobody has dealt with the page since, the writer puts a copy of
//! the page aside, provided that it is marked, before it stores. The one who makes the checkpoint walks over all pages
//! and copies those that are marked still. So a page is copied as it was at the cut, but for stores that were under way
//! there: of those, whose writers had looked before and stored after, each may be in the copy or not.
//!
//! **Why what is copied is a state that a crash could have left.** Whatever counts in a pool, counts by a word that is
//! published. Say T is a store that is not in the copies, and U a word published by one who had stored T before, or
//! had heard of T from a writer for whom the call had returned: in the tree, by taking a lock that this writer held
//! until then. (Who reads a word in the middle of such a call, without a lock, may see what has no mark yet. Readers
//! do, but they store nothing.) Then U is not in them either:
//! - T was left out, so its writer stored it, or marked its page, after the cut; a fence stands before each look that a
//!   word to be published takes, and both the mark behind a published word and the looks are in the one order of all
//!   sequentially consistent operations, in which the walk over the pages comes behind the cut. So whoever comes from T
//!   to U looks after the cut, sees the number, and has U's page copied before U is stored;
//! - a page that is dealt with is not copied again before the next cut.
//!
//! What is left out is the future of some moment, for each thread one; what is put in is what stood before. Between two
//! words that are published, plain stores may be in or out in any order, as they may after power loss: the simulator
//! shows that the tree asks for no more.
//!
//! **No mark is lost.** A writer stores, then marks, without looking whether there is a mark already: stores become
//! visible in their order (Release), so whoever takes a mark away sees what it stands for, and a mark that comes later
//! stays for the next time. A look at the mark could be done before the store is visible.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use crate::base::sync::Bell;
use crate::base::{Error, ErrorKind, Result};
use crate::mem::atomic::{AtomicU8, EXPLORED, Mutex, MutexGuard, Ordering, PoisonError, fence, yield_now};
use crate::mem::region::{PAGE, Region};

/// One page of an image, copied.
pub(crate) type Copy = Box<[u8; PAGE as usize]>;

/// Pages whose state is allocated together.
const CHUNK: u64 = if EXPLORED { 4 } else { 1 << 15 };

/// Copies that writers put aside before they wait for the checkpoint to take some: 16 MiB.
const ROOM: usize = if EXPLORED { 1 } else { 4096 };

/// Cuts are numbered 1..=LAST, over and over.
const LAST: u8 = 254;
/// Somebody deals with the page.
const BUSY: u8 = 255;

/// For this long a writer sleeps at most before it looks again whether there is room for a copy, in milliseconds.
const PATIENCE_MS: u64 = 10;

/// What is known of a page.
struct Page {
    /// 1 if it was changed since it was copied.
    mark: AtomicU8,
    /// The last cut in which somebody dealt with it, or [`BUSY`].
    seen: AtomicU8,
}

/// The pages of an image.
pub(crate) struct Pages {
    /// Filled as the image grows: a large bound costs nothing by itself.
    chunks: Box<[OnceLock<Box<[Page]>>]>,
    /// The number of the cut that is being copied, 0 if there is none.
    cut: AtomicU8,
    aside: Mutex<Aside>,
    /// Pages with a mark, or a few more: two writers may count the same page. Nothing but an estimate comes from it.
    changed: AtomicU64,
    /// Rung when there is room again.
    room: Bell,
}

/// What writers have put aside.
#[derive(Default)]
struct Aside {
    /// As [`Pages::cut`].
    cut: u8,
    last: u8,
    /// Copies that are here or about to come.
    taken: usize,
    copies: Vec<(u64, Copy)>,
}

fn no_memory() -> Error {
    Error::new(ErrorKind::OutOfSpace, "no memory for the map of changed pages")
}

impl Pages {
    /// For an image that may grow to `len_max` bytes and has none.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no memory.
    pub(crate) fn new(len_max: u64) -> Result<Pages> {
        let count = usize::try_from(len_max.div_ceil(PAGE).div_ceil(CHUNK)).map_err(|_| no_memory())?;
        let mut chunks = Vec::new();
        chunks.try_reserve_exact(count).map_err(|_| no_memory())?;
        chunks.resize_with(count, OnceLock::new);
        let (cut, aside) = (AtomicU8::new(0), Mutex::new(Aside::default()));
        Ok(Pages { chunks: chunks.into_boxed_slice(), cut, aside, changed: AtomicU64::new(0), room: Bell::default() })
    }

    /// There is room for the pages of an image of `len` bytes from now on.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no memory, or that is more than the bound.
    pub(crate) fn grow(&self, len: u64) -> Result<()> {
        let count = usize::try_from(len.div_ceil(PAGE).div_ceil(CHUNK)).map_err(|_| no_memory())?;
        for chunk in self.chunks.get(..count).ok_or_else(no_memory)? {
            if chunk.get().is_none() {
                let mut pages = Vec::new();
                pages.try_reserve_exact(CHUNK as usize).map_err(|_| no_memory())?;
                pages.resize_with(CHUNK as usize, || Page { mark: AtomicU8::new(0), seen: AtomicU8::new(0) });
                // Should somebody else have been faster, theirs is as good.
                let _ = chunk.set(pages.into_boxed_slice());
            }
        }
        Ok(())
    }

    #[inline]
    fn page(&self, page: u64) -> &Page {
        let chunk = self.chunks[(page / CHUNK) as usize].get().expect("an image has grown before it is written to");
        &chunk[(page % CHUNK) as usize]
    }

    fn lock(&self) -> MutexGuard<'_, Aside> {
        self.aside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To be called before `len` bytes from `at` on are stored into.
    #[inline]
    pub(crate) fn before(&self, region: &Region, at: u64, len: u64) {
        if self.cut.load(Ordering::SeqCst) != 0 {
            for page in at / PAGE..(at + len).div_ceil(PAGE) {
                self.keep(region, page);
            }
        }
    }

    /// To be called after `len` bytes from `at` on were stored into.
    #[inline]
    pub(crate) fn after(&self, at: u64, len: u64) {
        for page in at / PAGE..(at + len).div_ceil(PAGE) {
            self.mark(page, Ordering::Release);
        }
    }

    /// Marks a page. The mark is stored whatever was seen before: the look is for the count only.
    #[inline]
    fn mark(&self, page: u64, order: Ordering) {
        let mark = &self.page(page).mark;
        if mark.load(Ordering::Relaxed) == 0 {
            self.changed.fetch_add(1, Ordering::Relaxed);
        }
        mark.store(1, order);
    }

    /// Pages that the next checkpoint copies, or a few more.
    pub(crate) fn changed(&self) -> u64 {
        self.changed.load(Ordering::Relaxed)
    }

    /// As [`before`](Pages::before), for a word that is about to be published.
    #[inline]
    pub(crate) fn before_publishing(&self, region: &Region, at: u64) {
        fence(Ordering::SeqCst);
        self.before(region, at, 8);
    }

    /// As [`after`](Pages::after), for a word that was published.
    #[inline]
    pub(crate) fn after_publishing(&self, at: u64) {
        self.mark(at / PAGE, Ordering::SeqCst);
    }

    /// Pages that are marked; for tests and figures, while others may change that.
    #[cfg(test)]
    pub(crate) fn marked(&self, len: u64) -> u64 {
        (0..len / PAGE).filter(|page| self.page(*page).mark.load(Ordering::Relaxed) == 1).count() as u64
    }

    /// Takes all marks away: the image is what its file is.
    #[cfg(test)]
    pub(crate) fn forget(&self, len: u64) {
        (0..len / PAGE).for_each(|page| self.page(page).mark.store(0, Ordering::Release));
        self.changed.store(0, Ordering::Relaxed);
    }

    /// Copies that are put aside, or about to be.
    #[cfg(test)]
    pub(crate) fn aside(&self) -> usize {
        self.lock().taken
    }

    /// Puts a copy of a page aside if the cut under way needs one.
    #[cold]
    fn keep(&self, region: &Region, number: u64) {
        let page = self.page(number);
        loop {
            let cut = self.cut.load(Ordering::SeqCst);
            let seen = page.seen.load(Ordering::Acquire);
            if cut == 0 || seen == cut {
                return;
            }
            // Without a mark no copy is needed, but for one that comes between now and later.
            let reserved = page.mark.load(Ordering::SeqCst) == 1;
            if reserved && !self.reserve(cut) {
                continue;
            }
            let mut copy = None;
            let dealt = self.deal_with(page, cut, || {
                let mut bytes = Box::new([0; PAGE as usize]);
                region.read(number * PAGE, &mut bytes[..]);
                copy = Some(bytes);
                reserved
            });
            if reserved {
                self.settle(cut, number, copy);
            }
            match dealt {
                Dealt::Done => {
                    page.seen.store(cut, Ordering::Release);
                    return;
                }
                Dealt::Free(seen) => page.seen.store(seen, Ordering::Release),
                Dealt::Busy => yield_now(),
            }
        }
    }

    /// Deals with a page for the cut `cut`: if it is marked, `copy` is called, and nobody stores into it meanwhile who
    /// has looked since the cut. What is returned says who has to store what into `seen`.
    fn deal_with(&self, page: &Page, cut: u8, copy: impl FnOnce() -> bool) -> Dealt {
        let seen = page.seen.load(Ordering::Acquire);
        let taken = |seen| page.seen.compare_exchange(seen, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok();
        if seen == BUSY || !taken(seen) {
            return Dealt::Busy;
        }
        if seen == cut || self.cut.load(Ordering::SeqCst) != cut {
            return Dealt::Free(seen);
        }
        if page.mark.swap(0, Ordering::SeqCst) == 1 && !copy() {
            // It was marked a moment ago, by one who had looked before the cut.
            page.mark.store(1, Ordering::SeqCst);
            return Dealt::Free(seen);
        }
        Dealt::Done
    }

    /// Takes room for one copy, once there is some; false if the cut is over.
    fn reserve(&self, cut: u8) -> bool {
        loop {
            let rings = self.room.count();
            {
                let mut aside = self.lock();
                if aside.cut != cut {
                    return false;
                }
                if aside.taken < ROOM {
                    aside.taken += 1;
                    return true;
                }
            }
            if EXPLORED {
                yield_now();
            } else {
                self.room.wait(rings, PATIENCE_MS);
            }
        }
    }

    /// Fills the room that was taken with a copy, or gives it back.
    fn settle(&self, cut: u8, number: u64, copy: Option<Copy>) {
        let mut aside = self.lock();
        if aside.cut != cut {
            // The cut is over, and what belongs to it was counted without this one.
            if copy.is_some() {
                self.page(number).mark.store(1, Ordering::SeqCst);
            }
            return;
        }
        match copy {
            Some(copy) => aside.copies.push((number, copy)),
            None => {
                aside.taken -= 1;
                drop(aside);
                self.room.ring();
            }
        }
    }
}

/// What came of dealing with a page.
enum Dealt {
    /// It is dealt with; it is busy until the caller says so.
    Done,
    /// There was no need, or not now; it is busy until the caller puts this back.
    Free(u8),
    /// Somebody else is at it.
    Busy,
}

/// A cut through an image, being copied. Unless it is [kept](Cut::keep), all pages that were copied are marked again.
pub(crate) struct Cut<'a> {
    pages: &'a Pages,
    region: &'a Region,
    number: u8,
    /// Pages that the image had.
    count: u64,
    /// Pages that were counted as changed.
    changed: u64,
    next: u64,
    copied: Vec<u64>,
    open: bool,
    kept: bool,
}

impl<'a> Cut<'a> {
    /// Cuts now. Everything that was stored before this call, by whomever this thread has heard of, is in it.
    ///
    /// # Errors
    /// `Invalid` while there is another one.
    pub(crate) fn new(pages: &'a Pages, region: &'a Region) -> Result<Cut<'a>> {
        let last = {
            let mut aside = pages.lock();
            if aside.cut != 0 {
                return Err(Error::invalid("a checkpoint of this image is under way"));
            }
            // No writer's number: this one comes first, and others are refused.
            aside.cut = BUSY;
            aside.last
        };
        if last == LAST {
            // Numbers come again: none that was left from the last time may be taken for the new one.
            pages.chunks.iter().filter_map(|chunk| chunk.get()).flatten().for_each(Page::forget_cut);
        }
        let number = last % LAST + 1;
        *pages.lock() = Aside { cut: number, last: number, ..Aside::default() };
        pages.cut.store(number, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let (count, changed) = (region.len() / PAGE, pages.changed.swap(0, Ordering::Relaxed));
        Ok(Cut { pages, region, number, count, changed, next: 0, copied: Vec::new(), open: true, kept: false })
    }

    /// Of the image at the cut, in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.count * PAGE
    }

    /// The number of the next page that was changed, which is copied to `out`; none if there are no more. What writers
    /// have put aside comes first.
    pub(crate) fn next(&mut self, out: &mut [u8]) -> Option<u64> {
        let page = loop {
            let aside = self.pages.lock().copies.pop();
            if let Some((page, copy)) = aside {
                self.pages.lock().taken -= 1;
                self.pages.room.ring();
                if page < self.count {
                    out.copy_from_slice(&copy[..]);
                    break page;
                }
                // Grown since: not of this cut.
                self.pages.page(page).mark.store(1, Ordering::SeqCst);
                continue;
            }
            if self.next == self.count {
                self.close();
                return None;
            }
            if self.copy_next(out) {
                break self.next - 1;
            }
        };
        self.copied.push(page);
        Some(page)
    }

    /// Deals with the next page; whether it was copied.
    fn copy_next(&mut self, out: &mut [u8]) -> bool {
        let page = self.pages.page(self.next);
        if page.mark.load(Ordering::SeqCst) == 0 && page.seen.load(Ordering::Acquire) != BUSY {
            // Who stores into it from now on was under way at the cut, or has looked after it.
            self.next += 1;
            return false;
        }
        let mut copied = false;
        let dealt = self.pages.deal_with(page, self.number, || {
            self.region.read(self.next * PAGE, out);
            copied = true;
            true
        });
        match dealt {
            Dealt::Done => page.seen.store(self.number, Ordering::Release),
            Dealt::Free(seen) => page.seen.store(seen, Ordering::Release),
            Dealt::Busy => {
                yield_now();
                return false;
            }
        }
        self.next += 1;
        copied
    }

    /// Ends the copying: writers store again without looking at pages.
    fn close(&mut self) {
        if !self.open {
            return;
        }
        self.open = false;
        self.pages.cut.store(0, Ordering::SeqCst);
        let left = {
            let mut aside = self.pages.lock();
            aside.cut = 0;
            aside.taken = 0;
            std::mem::take(&mut aside.copies)
        };
        for (page, _) in left {
            self.pages.page(page).mark.store(1, Ordering::SeqCst);
        }
        self.pages.room.ring();
    }

    /// The copies are where they belong.
    pub(crate) fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Cut<'_> {
    fn drop(&mut self) {
        self.close();
        if !self.kept {
            self.copied.iter().for_each(|page| self.pages.page(*page).mark.store(1, Ordering::SeqCst));
            self.pages.changed.fetch_add(self.changed, Ordering::Relaxed);
        }
    }
}

impl Page {
    /// Forgets in which cut it was seen last, while there is none.
    fn forget_cut(&self) {
        loop {
            let seen = self.seen.load(Ordering::Acquire);
            // Who is at it found out that there is no cut, or is about to.
            if seen != BUSY && self.seen.compare_exchange(seen, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                return;
            }
            yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::mem::atomic::AtomicU64;
    use crate::mem::explorer::{explore, spawn};
    use crate::pmem::medium::{Image, Medium};
    use crate::vfs::dice::Dice;

    fn image(pages: u64) -> Image {
        let image = Image::new(pages * PAGE).unwrap();
        image.grow(pages * PAGE).unwrap();
        image
    }

    fn bytes_of(image: &Image) -> Vec<u8> {
        let mut bytes = vec![0; image.region().len() as usize];
        image.region().read(0, &mut bytes);
        bytes
    }

    fn put(file: &mut Vec<u8>, page: u64, bytes: &[u8]) {
        let at = (page * PAGE) as usize;
        file.resize(file.len().max(at + PAGE as usize), 0);
        file[at..at + PAGE as usize].copy_from_slice(bytes);
    }

    fn change(image: &Image, dice: &mut Dice) {
        let at = 8 * dice.below(image.region().len() as usize / 8 - 200) as u64;
        match dice.below(3) {
            0 => image.store(at, dice.throw()),
            1 => image.publish(at, dice.throw()),
            _ => image.write(at, &[&vec![dice.throw() as u8; dice.below(1600)]]),
        }
    }

    #[test]
    fn changed_pages_are_counted() {
        let (image, mut dice) = (image(20), Dice::new(3, 3));
        let mut page = vec![0; PAGE as usize];
        for is_kept in [true, false, true, false, false] {
            (0..9).for_each(|_| change(&image, &mut dice));
            let counted = image.pages_to_write();
            assert_eq!(counted, image.changed_pages());
            let mut cut = image.cut().unwrap();
            while cut.next(&mut page).is_some() {}
            if is_kept {
                cut.keep();
            } else {
                drop(cut);
            }
            assert_eq!(image.pages_to_write(), if is_kept { 0 } else { counted });
        }
    }

    /// Whatever is stored while it is copied, a cut is what there was at its moment; and numbers come again.
    #[test]
    fn a_cut_is_one_moment() {
        let image = Image::new(40 * PAGE).unwrap();
        image.grow(4 * PAGE).unwrap();
        let (mut dice, mut file, mut page) = (Dice::new(5, 0), Vec::new(), vec![0; PAGE as usize]);
        let mut copied = 0;
        for round in 0..700 {
            (0..dice.below(6)).for_each(|_| change(&image, &mut dice));
            let (expected, before) = (bytes_of(&image), file.clone());
            let mut cut = image.cut().unwrap();
            assert_eq!(cut.len(), expected.len() as u64);
            assert!(image.cut().is_err(), "two at once");
            let fails = dice.below(5) == 0;
            while let Some(number) = cut.next(&mut page) {
                put(&mut file, number, &page);
                copied += 1;
                if round % 20 == 0 && image.region().len() < 40 * PAGE {
                    image.grow(image.region().len() + PAGE).unwrap();
                    image.store(image.region().len() - 8, 9);
                }
                (0..dice.below(5)).for_each(|_| change(&image, &mut dice));
                if fails && dice.below(3) == 0 {
                    break;
                }
            }
            if fails {
                // What was copied is lost, and marked again.
                file = before;
                drop(cut);
            } else {
                cut.keep();
                file.resize(expected.len(), 0);
                assert!(file == expected, "round {round}");
            }
        }
        assert!(copied > 3000, "{copied}");
    }

    /// Chains of words in pages far apart, each written by another thread once it has seen the one before.
    const CHAIN: u64 = 4;

    /// Stores `n` in the words of the chain that are this thread's, one behind the other, when those before are told.
    fn go_on(image: &Image, told: &[AtomicU64], thread: u64, rounds: u64) {
        for n in 1..=rounds {
            for link in (thread..CHAIN).step_by(2) {
                let (before, wanted) = if link > 0 { (link - 1, n) } else { (CHAIN - 1, n - 1) };
                while told[before as usize].load(Ordering::Acquire) < wanted {
                    yield_now();
                }
                // What is not published is behind it in another page.
                image.store((CHAIN + link) * PAGE, n);
                image.publish(link * PAGE, n);
                told[link as usize].store(n, Ordering::Release);
            }
        }
    }

    /// What a cut has of a word, if it is in a page that was changed; else what the one before had.
    fn is_a_past(words: &[u64]) {
        let (published, plain) = words.split_at(CHAIN as usize);
        assert!(published.windows(2).all(|pair| pair[0] >= pair[1]), "an effect without its cause: {words:?}");
        assert!(published[0] <= published[CHAIN as usize - 1] + 1, "a cause is missing: {words:?}");
        assert!(plain.iter().zip(published).all(|(plain, word)| plain >= word), "published before it was: {words:?}");
    }

    fn race(rounds: u64, cuts: u64) {
        let image = Arc::new(image(2 * CHAIN));
        let told: Arc<Vec<AtomicU64>> = Arc::new((0..CHAIN).map(|_| AtomicU64::new(0)).collect());
        let threads = [0, 1].map(|thread| {
            let (image, told) = (Arc::clone(&image), Arc::clone(&told));
            spawn(move || go_on(&image, &told, thread, rounds))
        });
        let (mut words, mut page) = (vec![0; 2 * CHAIN as usize], vec![0; PAGE as usize]);
        let mut take = || {
            let mut cut = image.cut().unwrap();
            let all: Vec<_> = std::iter::from_fn(|| {
                cut.next(&mut page).map(|n| (n, u64::from_le_bytes(page[..8].try_into().unwrap())))
            })
            .collect();
            all.into_iter().for_each(|(n, word)| words[n as usize] = word);
            cut.keep();
            is_a_past(&words);
            words[CHAIN as usize - 1]
        };
        if cuts > 0 {
            (0..cuts).for_each(|_| _ = take());
        } else {
            while take() < rounds {}
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(take(), rounds, "a mark was lost");
    }

    #[test]
    fn threads_never_leave_an_effect_without_its_cause() {
        race(10_000, 0);
    }

    #[test]
    fn schedules_of_stores_beside_cuts() {
        explore(|| race(2, 2));
    }

    #[test]
    fn who_waits_for_room_goes_on_when_the_cut_is_given_up() {
        let count = ROOM as u64 + 3;
        let image = Arc::new(image(count));
        (0..count).for_each(|page| image.store(page * PAGE, 1));
        let cut = image.cut().unwrap();
        let writer = spawn({
            let image = Arc::clone(&image);
            move || (0..count).for_each(|page| image.store(page * PAGE, 2))
        });
        while image.pages_aside() < ROOM {
            yield_now();
        }
        drop(cut);
        writer.join().unwrap();
        assert_eq!(image.changed_pages(), count);
        assert_eq!(image.pages_aside(), 0);
    }
}
