//! Which pages of an image were changed, and the cut through all of them that a checkpoint brings to its file.
//!
//! **The cut** is the time at which its number is stored in `cut`; it stops no thread. A writer reads the number
//! before it stores into a page. If there is a cut, the page is marked, and no thread has handled the page since the
//! cut, the writer copies the page before it stores. The checkpointing thread walks over all pages and copies those
//! that are still marked. So a page is copied as it was at the cut, except for stores in progress at the cut: if a
//! writer had read the number before the cut and stored after it, its store may be in the copy or not.
//!
//! **Why the copies form a state that a crash could have left.** Every change of a pool becomes valid by a published
//! word. Let T be a store that is not in the copies, and U a word that is published by a thread that had stored T
//! before, or that had learned of T from a writer whose call had returned: in the tree, by taking a lock that this
//! writer held until then. (A thread that reads a word in the middle of such a call, without a lock, may see a store
//! without a mark. Readers do, but they store nothing.) Then U is not in the copies either:
//! - T was left out, so its writer stored it, or marked its page, after the cut. A fence precedes each check of a
//!   word to be published, and both the mark behind a published word and the checks are in the single order of all
//!   sequentially consistent operations, in which the walk over the pages comes after the cut. So a thread that goes
//!   from T to U checks after the cut, sees the number, and has U's page copied before U is stored.
//! - A page that was handled is not copied again before the next cut.
//!
//! What is left out is the future of some moment, for each thread one; what is put in is what stood before. Between two
//! words that are published, plain stores may be in or out in any order, as they may after power loss: the simulator
//! shows that the tree asks for no more.
//!
//! **No mark is lost.** A writer stores, then marks, without checking for an existing mark: stores become visible in
//! their order (Release), so a thread that clears a mark sees the stores that it stands for, and a later mark stays
//! for the next checkpoint. A check for an existing mark could be executed before the store is visible.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use crate::base::sync::WakeSignal;
use crate::base::{Error, ErrorKind, Result};
use crate::mem::atomic::{AtomicU8, Mutex, MutexGuard, Ordering, PoisonError, SCHEDULE_EXPLORATION, fence, yield_now};
use crate::mem::region::{PAGE, Region};

/// One page of an image, copied.
pub(crate) type PageCopy = Box<[u8; PAGE as usize]>;

/// Pages whose state is allocated together.
const PAGES_PER_CHUNK: u64 = if SCHEDULE_EXPLORATION { 4 } else { 1 << 15 };

/// Copies that writers put aside before they wait for the checkpoint to take some: 16 MiB.
const BEFORE_IMAGES_MAX: usize = if SCHEDULE_EXPLORATION { 1 } else { 4096 };

/// Cuts are numbered 1..=LAST, over and over.
const SNAPSHOT_NUMBER_MAX: u8 = 254;
/// A thread handles the page.
const PAGE_BUSY: u8 = 255;

/// For this long a writer sleeps at most before it looks again whether there is room for a copy, in milliseconds.
const BEFORE_IMAGE_WAIT_MS: u64 = 10;

/// What is known of a page.
struct DirtyPageState {
    /// 1 if it was changed since it was copied.
    dirty: AtomicU8,
    /// The last cut for which the page was handled, or [`PAGE_BUSY`].
    snapshot_done: AtomicU8,
}

/// The pages of an image.
pub(crate) struct DirtyPages {
    /// Filled as the image grows: a large bound costs nothing by itself.
    chunks: Box<[OnceLock<Box<[DirtyPageState]>>]>,
    /// The number of the cut that is being copied, 0 if there is none.
    snapshot_number: AtomicU8,
    before_images: Mutex<BeforeImages>,
    /// Pages with a mark, or a few more: two writers may count the same page. Nothing but an estimate comes from it.
    changed: AtomicU64,
    /// Rung when there is room again.
    before_image_freed: WakeSignal,
}

/// What writers have put aside.
#[derive(Default)]
struct BeforeImages {
    /// As [`DirtyPages::snapshot_number`].
    snapshot_number: u8,
    last_number: u8,
    /// Copies that are here or about to come.
    reserved: usize,
    copies: Vec<(u64, PageCopy)>,
}

fn no_memory() -> Error {
    Error::new(ErrorKind::OutOfSpace, "no memory for the map of changed pages")
}

impl DirtyPages {
    /// For an image that may grow to `len_max` bytes and has none.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no memory.
    pub(crate) fn new(len_max: u64) -> Result<DirtyPages> {
        let count = usize::try_from(len_max.div_ceil(PAGE).div_ceil(PAGES_PER_CHUNK)).map_err(|_| no_memory())?;
        let mut chunks = Vec::new();
        chunks.try_reserve_exact(count).map_err(|_| no_memory())?;
        chunks.resize_with(count, OnceLock::new);
        let (cut, aside) = (AtomicU8::new(0), Mutex::new(BeforeImages::default()));
        Ok(DirtyPages {
            chunks: chunks.into_boxed_slice(),
            snapshot_number: cut,
            before_images: aside,
            changed: AtomicU64::new(0),
            before_image_freed: WakeSignal::default(),
        })
    }

    /// There is room for the pages of an image of `len` bytes from now on.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no memory, or that is more than the bound.
    pub(crate) fn grow(&self, len: u64) -> Result<()> {
        let count = usize::try_from(len.div_ceil(PAGE).div_ceil(PAGES_PER_CHUNK)).map_err(|_| no_memory())?;
        for chunk in self.chunks.get(..count).ok_or_else(no_memory)? {
            if chunk.get().is_none() {
                let mut pages = Vec::new();
                pages.try_reserve_exact(PAGES_PER_CHUNK as usize).map_err(|_| no_memory())?;
                pages.resize_with(PAGES_PER_CHUNK as usize, || DirtyPageState {
                    dirty: AtomicU8::new(0),
                    snapshot_done: AtomicU8::new(0),
                });
                // If another thread was faster, its result is equal.
                let _ = chunk.set(pages.into_boxed_slice());
            }
        }
        Ok(())
    }

    #[inline]
    fn state_of(&self, page: u64) -> &DirtyPageState {
        let chunk =
            self.chunks[(page / PAGES_PER_CHUNK) as usize].get().expect("an image has grown before it is written to");
        &chunk[(page % PAGES_PER_CHUNK) as usize]
    }

    fn lock_before_images(&self) -> MutexGuard<'_, BeforeImages> {
        self.before_images.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To be called before `len` bytes from `at` on are stored into.
    #[inline]
    pub(crate) fn before_store(&self, region: &Region, at: u64, len: u64) {
        if self.snapshot_number.load(Ordering::SeqCst) != 0 {
            for page in at / PAGE..(at + len).div_ceil(PAGE) {
                self.keep_before_image(region, page);
            }
        }
    }

    /// To be called after `len` bytes from `at` on were stored into.
    #[inline]
    pub(crate) fn after_store(&self, at: u64, len: u64) {
        for page in at / PAGE..(at + len).div_ceil(PAGE) {
            self.mark(page, Ordering::Release);
        }
    }

    /// Marks a page. The mark is stored whatever was seen before: the look is for the count only.
    #[inline]
    fn mark(&self, page: u64, order: Ordering) {
        let mark = &self.state_of(page).dirty;
        if mark.load(Ordering::Relaxed) == 0 {
            self.changed.fetch_add(1, Ordering::Relaxed);
        }
        mark.store(1, order);
    }

    /// Pages that the next checkpoint copies, or a few more.
    pub(crate) fn changed(&self) -> u64 {
        self.changed.load(Ordering::Relaxed)
    }

    /// As [`before`](DirtyPages::before_store), for a word that is about to be published.
    #[inline]
    pub(crate) fn before_publish(&self, region: &Region, at: u64) {
        fence(Ordering::SeqCst);
        self.before_store(region, at, 8);
    }

    /// As [`after`](DirtyPages::after_store), for a word that was published.
    #[inline]
    pub(crate) fn after_publish(&self, at: u64) {
        self.mark(at / PAGE, Ordering::SeqCst);
    }

    /// Pages that are marked; for tests and figures, while others may change that.
    #[cfg(test)]
    pub(crate) fn dirty_count(&self, len: u64) -> u64 {
        (0..len / PAGE).filter(|page| self.state_of(*page).dirty.load(Ordering::Relaxed) == 1).count() as u64
    }

    /// Takes all marks away: the image is what its file is.
    #[cfg(test)]
    pub(crate) fn clear_dirty(&self, len: u64) {
        (0..len / PAGE).for_each(|page| self.state_of(page).dirty.store(0, Ordering::Release));
        self.changed.store(0, Ordering::Relaxed);
    }

    /// Copies that are put aside, or about to be.
    #[cfg(test)]
    pub(crate) fn before_image_count(&self) -> usize {
        self.lock_before_images().reserved
    }

    /// Puts a copy of a page aside if the cut under way needs one.
    #[cold]
    fn keep_before_image(&self, region: &Region, number: u64) {
        let page = self.state_of(number);
        loop {
            let cut = self.snapshot_number.load(Ordering::SeqCst);
            let seen = page.snapshot_done.load(Ordering::Acquire);
            if cut == 0 || seen == cut {
                return;
            }
            // Without a mark no copy is needed, but for one that comes between now and later.
            let reserved = page.dirty.load(Ordering::SeqCst) == 1;
            if reserved && !self.reserve_before_image(cut) {
                continue;
            }
            let mut copy = None;
            let dealt = self.copy_once(page, cut, || {
                let mut bytes = Box::new([0; PAGE as usize]);
                region.read(number * PAGE, &mut bytes[..]);
                copy = Some(bytes);
                reserved
            });
            if reserved {
                self.store_before_image(cut, number, copy);
            }
            match dealt {
                CopyOutcome::Done => {
                    page.snapshot_done.store(cut, Ordering::Release);
                    return;
                }
                CopyOutcome::NotNeeded(seen) => page.snapshot_done.store(seen, Ordering::Release),
                CopyOutcome::Busy => yield_now(),
            }
        }
    }

    /// Handles a page for the cut `cut`: if the page is marked, calls `copy`, and no thread that has checked since
    /// the cut stores into it meanwhile. Returns the value that the caller has to store into `seen`.
    fn copy_once(&self, page: &DirtyPageState, cut: u8, copy: impl FnOnce() -> bool) -> CopyOutcome {
        let seen = page.snapshot_done.load(Ordering::Acquire);
        let taken =
            |seen| page.snapshot_done.compare_exchange(seen, PAGE_BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok();
        if seen == PAGE_BUSY || !taken(seen) {
            return CopyOutcome::Busy;
        }
        if seen == cut || self.snapshot_number.load(Ordering::SeqCst) != cut {
            return CopyOutcome::NotNeeded(seen);
        }
        if page.dirty.swap(0, Ordering::SeqCst) == 1 && !copy() {
            // A writer that had checked before the cut has marked it since.
            page.dirty.store(1, Ordering::SeqCst);
            return CopyOutcome::NotNeeded(seen);
        }
        CopyOutcome::Done
    }

    /// Takes room for one copy, once there is some; false if the cut is over.
    fn reserve_before_image(&self, cut: u8) -> bool {
        loop {
            let rings = self.before_image_freed.generation();
            {
                let mut aside = self.lock_before_images();
                if aside.snapshot_number != cut {
                    return false;
                }
                if aside.reserved < BEFORE_IMAGES_MAX {
                    aside.reserved += 1;
                    return true;
                }
            }
            if SCHEDULE_EXPLORATION {
                yield_now();
            } else {
                self.before_image_freed.wait_past(rings, BEFORE_IMAGE_WAIT_MS);
            }
        }
    }

    /// Fills the room that was taken with a copy, or gives it back.
    fn store_before_image(&self, cut: u8, number: u64, copy: Option<PageCopy>) {
        let mut aside = self.lock_before_images();
        if aside.snapshot_number != cut {
            // The cut is over, and what belongs to it was counted without this one.
            if copy.is_some() {
                self.state_of(number).dirty.store(1, Ordering::SeqCst);
            }
            return;
        }
        match copy {
            Some(copy) => aside.copies.push((number, copy)),
            None => {
                aside.reserved -= 1;
                drop(aside);
                self.before_image_freed.notify_all();
            }
        }
    }
}

/// What came of dealing with a page.
enum CopyOutcome {
    /// It is dealt with; it is busy until the caller says so.
    Done,
    /// There was no need, or not now; it is busy until the caller puts this back.
    NotNeeded(u8),
    /// Another thread handles it.
    Busy,
}

/// A cut through an image, being copied. Unless it is [kept](PageSnapshot::finish), all pages that were copied are
/// marked again.
pub(crate) struct PageSnapshot<'a> {
    pages: &'a DirtyPages,
    region: &'a Region,
    number: u8,
    /// Pages that the image had.
    page_count: u64,
    /// Pages that were counted as changed.
    changed: u64,
    next_page: u64,
    copied: Vec<u64>,
    is_open: bool,
    is_finished: bool,
}

impl<'a> PageSnapshot<'a> {
    /// Cuts now. Everything that was stored before this call, by whomever this thread has heard of, is in it.
    ///
    /// # Errors
    /// `Invalid` while there is another one.
    pub(crate) fn new(pages: &'a DirtyPages, region: &'a Region) -> Result<PageSnapshot<'a>> {
        let last = {
            let mut aside = pages.lock_before_images();
            if aside.snapshot_number != 0 {
                return Err(Error::invalid("a checkpoint of this image is under way"));
            }
            // No writer's number: this one comes first, and others are refused.
            aside.snapshot_number = PAGE_BUSY;
            aside.last_number
        };
        if last == SNAPSHOT_NUMBER_MAX {
            // Numbers come again: none that was left from the last time may be taken for the new one.
            pages.chunks.iter().filter_map(|chunk| chunk.get()).flatten().for_each(DirtyPageState::reset_snapshot);
        }
        let number = last % SNAPSHOT_NUMBER_MAX + 1;
        *pages.lock_before_images() =
            BeforeImages { snapshot_number: number, last_number: number, ..BeforeImages::default() };
        pages.snapshot_number.store(number, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let (count, changed) = (region.len() / PAGE, pages.changed.swap(0, Ordering::Relaxed));
        Ok(PageSnapshot {
            pages,
            region,
            number,
            page_count: count,
            changed,
            next_page: 0,
            copied: Vec::new(),
            is_open: true,
            is_finished: false,
        })
    }

    /// Of the image at the cut, in bytes.
    pub(crate) fn image_len(&self) -> u64 {
        self.page_count * PAGE
    }

    /// The number of the next page that was changed, which is copied to `out`; none if there are no more. What writers
    /// have put aside comes first.
    pub(crate) fn next_page(&mut self, out: &mut [u8]) -> Option<u64> {
        let page = loop {
            let aside = self.pages.lock_before_images().copies.pop();
            if let Some((page, copy)) = aside {
                self.pages.lock_before_images().reserved -= 1;
                self.pages.before_image_freed.notify_all();
                if page < self.page_count {
                    out.copy_from_slice(&copy[..]);
                    break page;
                }
                // Grown since: not of this cut.
                self.pages.state_of(page).dirty.store(1, Ordering::SeqCst);
                continue;
            }
            if self.next_page == self.page_count {
                self.close();
                return None;
            }
            if self.copy_next(out) {
                break self.next_page - 1;
            }
        };
        self.copied.push(page);
        Some(page)
    }

    /// Deals with the next page; whether it was copied.
    fn copy_next(&mut self, out: &mut [u8]) -> bool {
        let page = self.pages.state_of(self.next_page);
        if page.dirty.load(Ordering::SeqCst) == 0 && page.snapshot_done.load(Ordering::Acquire) != PAGE_BUSY {
            // A writer that stores into it from now on was in progress at the cut, or has checked after it.
            self.next_page += 1;
            return false;
        }
        let mut copied = false;
        let dealt = self.pages.copy_once(page, self.number, || {
            self.region.read(self.next_page * PAGE, out);
            copied = true;
            true
        });
        match dealt {
            CopyOutcome::Done => page.snapshot_done.store(self.number, Ordering::Release),
            CopyOutcome::NotNeeded(seen) => page.snapshot_done.store(seen, Ordering::Release),
            CopyOutcome::Busy => {
                yield_now();
                return false;
            }
        }
        self.next_page += 1;
        copied
    }

    /// Ends the copying: writers store again without looking at pages.
    fn close(&mut self) {
        if !self.is_open {
            return;
        }
        self.is_open = false;
        self.pages.snapshot_number.store(0, Ordering::SeqCst);
        let left = {
            let mut aside = self.pages.lock_before_images();
            aside.snapshot_number = 0;
            aside.reserved = 0;
            std::mem::take(&mut aside.copies)
        };
        for (page, _) in left {
            self.pages.state_of(page).dirty.store(1, Ordering::SeqCst);
        }
        self.pages.before_image_freed.notify_all();
    }

    /// The copies are where they belong.
    pub(crate) fn finish(mut self) {
        self.is_finished = true;
    }
}

impl Drop for PageSnapshot<'_> {
    fn drop(&mut self) {
        self.close();
        if !self.is_finished {
            self.copied.iter().for_each(|page| self.pages.state_of(*page).dirty.store(1, Ordering::SeqCst));
            self.pages.changed.fetch_add(self.changed, Ordering::Relaxed);
        }
    }
}

impl DirtyPageState {
    /// Forgets in which cut it was seen last, while there is none.
    fn reset_snapshot(&self) {
        loop {
            let seen = self.snapshot_done.load(Ordering::Acquire);
            // The thread that handles it has found that there is no cut, or is about to.
            if seen != PAGE_BUSY
                && self.snapshot_done.compare_exchange(seen, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            {
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
    use crate::pmem::persistence::{PersistenceBackend, PoolImage};
    use crate::vfs::seeded_rng::SeededRng;

    fn image(pages: u64) -> PoolImage {
        let image = PoolImage::new(pages * PAGE).unwrap();
        image.grow(pages * PAGE).unwrap();
        image
    }

    fn bytes_of(image: &PoolImage) -> Vec<u8> {
        let mut bytes = vec![0; image.region().len() as usize];
        image.region().read(0, &mut bytes);
        bytes
    }

    fn put(file: &mut Vec<u8>, page: u64, bytes: &[u8]) {
        let at = (page * PAGE) as usize;
        file.resize(file.len().max(at + PAGE as usize), 0);
        file[at..at + PAGE as usize].copy_from_slice(bytes);
    }

    fn change(image: &PoolImage, rng: &mut SeededRng) {
        let at = 8 * rng.below(image.region().len() as usize / 8 - 200) as u64;
        match rng.below(3) {
            0 => image.store(at, rng.next_u64()),
            1 => image.publish(at, rng.next_u64()),
            _ => image.write(at, &[&vec![rng.next_u64() as u8; rng.below(1600)]]),
        }
    }

    #[test]
    fn changed_pages_are_counted() {
        let (image, mut rng) = (image(20), SeededRng::new(3, 3));
        let mut page = vec![0; PAGE as usize];
        for is_kept in [true, false, true, false, false] {
            (0..9).for_each(|_| change(&image, &mut rng));
            let counted = image.pages_to_write();
            assert_eq!(counted, image.dirty_page_count());
            let mut cut = image.snapshot_pages().unwrap();
            while cut.next_page(&mut page).is_some() {}
            if is_kept {
                cut.finish();
            } else {
                drop(cut);
            }
            assert_eq!(image.pages_to_write(), if is_kept { 0 } else { counted });
        }
    }

    /// Whatever is stored while it is copied, a cut is what there was at its moment; and numbers come again.
    #[test]
    fn snapshot_shows_one_moment() {
        let image = PoolImage::new(40 * PAGE).unwrap();
        image.grow(4 * PAGE).unwrap();
        let (mut rng, mut file, mut page) = (SeededRng::new(5, 0), Vec::new(), vec![0; PAGE as usize]);
        let mut copied = 0;
        for round in 0..700 {
            (0..rng.below(6)).for_each(|_| change(&image, &mut rng));
            let (expected, before) = (bytes_of(&image), file.clone());
            let mut cut = image.snapshot_pages().unwrap();
            assert_eq!(cut.image_len(), expected.len() as u64);
            assert!(image.snapshot_pages().is_err(), "two at once");
            let fails = rng.below(5) == 0;
            while let Some(number) = cut.next_page(&mut page) {
                put(&mut file, number, &page);
                copied += 1;
                if round % 20 == 0 && image.region().len() < 40 * PAGE {
                    image.grow(image.region().len() + PAGE).unwrap();
                    image.store(image.region().len() - 8, 9);
                }
                (0..rng.below(5)).for_each(|_| change(&image, &mut rng));
                if fails && rng.below(3) == 0 {
                    break;
                }
            }
            if fails {
                // What was copied is lost, and marked again.
                file = before;
                drop(cut);
            } else {
                cut.finish();
                file.resize(expected.len(), 0);
                assert!(file == expected, "round {round}");
            }
        }
        assert!(copied > 3000, "{copied}");
    }

    /// Chains of words in pages far apart, each written by another thread once it has seen the one before.
    const CHAIN: u64 = 4;

    /// Stores `n` in the words of the chain that are this thread's, one behind the other, when those before are told.
    fn store_chain_words(image: &PoolImage, told: &[AtomicU64], thread: u64, rounds: u64) {
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
    fn assert_causal(words: &[u64]) {
        let (published, plain) = words.split_at(CHAIN as usize);
        assert!(published.windows(2).all(|pair| pair[0] >= pair[1]), "an effect without its cause: {words:?}");
        assert!(published[0] <= published[CHAIN as usize - 1] + 1, "a cause is missing: {words:?}");
        assert!(plain.iter().zip(published).all(|(plain, word)| plain >= word), "published before it was: {words:?}");
    }

    fn race_stores_with_snapshots(rounds: u64, cuts: u64) {
        let image = Arc::new(image(2 * CHAIN));
        let told: Arc<Vec<AtomicU64>> = Arc::new((0..CHAIN).map(|_| AtomicU64::new(0)).collect());
        let threads = [0, 1].map(|thread| {
            let (image, told) = (Arc::clone(&image), Arc::clone(&told));
            spawn(move || store_chain_words(&image, &told, thread, rounds))
        });
        let (mut words, mut page) = (vec![0; 2 * CHAIN as usize], vec![0; PAGE as usize]);
        let mut take = || {
            let mut cut = image.snapshot_pages().unwrap();
            let all: Vec<_> = std::iter::from_fn(|| {
                cut.next_page(&mut page).map(|n| (n, u64::from_le_bytes(page[..8].try_into().unwrap())))
            })
            .collect();
            all.into_iter().for_each(|(n, word)| words[n as usize] = word);
            cut.finish();
            assert_causal(&words);
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
    fn snapshot_is_causally_consistent() {
        race_stores_with_snapshots(10_000, 0);
    }

    #[test]
    fn snapshot_beside_stores_in_all_schedules() {
        explore(|| race_stores_with_snapshots(2, 2));
    }

    #[test]
    fn waiting_writer_goes_on_when_snapshot_drops() {
        let count = BEFORE_IMAGES_MAX as u64 + 3;
        let image = Arc::new(image(count));
        (0..count).for_each(|page| image.store(page * PAGE, 1));
        let cut = image.snapshot_pages().unwrap();
        let writer = spawn({
            let image = Arc::clone(&image);
            move || (0..count).for_each(|page| image.store(page * PAGE, 2))
        });
        while image.before_image_count() < BEFORE_IMAGES_MAX {
            yield_now();
        }
        drop(cut);
        writer.join().unwrap();
        assert_eq!(image.dirty_page_count(), count);
        assert_eq!(image.before_image_count(), 0);
    }
}
