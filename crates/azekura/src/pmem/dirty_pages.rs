//! Tracks the changed pages of an image, and takes the snapshot of all its pages that a checkpoint writes to its
//! file.
//!
//! **The cut** is the time at which the number of a snapshot is stored in `snapshot_number`; it stops no thread. A
//! writer reads the number before it stores into a page. If there is a snapshot, the page is marked, and no thread
//! has handled the page since the cut, the writer copies the page before it stores. The checkpointing thread walks
//! over all pages and copies those that are still marked. So a page is copied as it was at the cut, except for stores
//! in progress at the cut: if a writer read the number before the cut and stored after it, the copy may contain its
//! store or not.
//!
//! **Why the copies form a state that a crash could have left.** Every change of a pool becomes valid by a published
//! word. Let T be a store that the copies do not contain. Let U be a word that is published by a thread that had
//! stored T before, or that had learned of T from a writer whose call had returned: in the tree, by taking a lock
//! that this writer held until then. (A thread that reads a word in the middle of such a call, without a lock, may
//! see a store whose page is not marked yet. Readers do, but they store nothing.) Then the copies do not contain U
//! either:
//! - The copies do not contain T, so its writer stored it, or marked its page, after the cut. A fence precedes each
//!   check of the number for a word to be published. Both the mark behind a published word and these checks are in
//!   the single order of all sequentially consistent operations, in which the walk over the pages comes after the
//!   cut. So a thread that goes from T to U checks after the cut, reads the number, and has U's page copied before U
//!   is stored.
//! - A page that was handled is not copied again before the next cut.
//!
//! So there is a point in time for each thread: the copies contain the words that it published before that point, and
//! none that it published later. Between two published words, the copies may contain any subset of the plain stores,
//! as memory may after power loss: the simulator shows that the tree relies on no more.
//!
//! **No mark is lost.** A writer stores, then marks the page, whether or not it is marked already. The two stores
//! become visible in their order (Release), so a thread that clears a mark sees the stores that the mark stands for,
//! and a later mark remains for the next checkpoint. A writer must not skip the mark because it finds the page
//! marked: that check could be executed before its store is visible.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use crate::base::sync::WakeSignal;
use crate::base::{Error, ErrorKind, Result};
use crate::mem::atomic::{AtomicU8, Mutex, MutexGuard, Ordering, SCHEDULE_EXPLORATION, fence, lock, yield_now};
use crate::mem::pages::PAGE;
use crate::mem::region::Region;

/// A copy of one page of an image.
pub(crate) type PageCopy = Box<[u8; PAGE as usize]>;

/// Number of pages whose states are allocated together.
const PAGES_PER_CHUNK: u64 = if SCHEDULE_EXPLORATION { 4 } else { 1 << 15 };

/// Maximum number of copies that writers store before they wait for the checkpointing thread to take some: 16 MiB.
const BEFORE_IMAGES_MAX: usize = if SCHEDULE_EXPLORATION { 1 } else { 4096 };

/// Snapshots are numbered from 1 to this number, then from 1 again.
const SNAPSHOT_NUMBER_MAX: u8 = 254;
/// Value of `snapshot_done` while a thread handles the page.
const PAGE_BUSY: u8 = 255;

/// Maximum time, in milliseconds, that a writer sleeps before it checks again whether there is space for a copy.
const BEFORE_IMAGE_WAIT_MS: u64 = 10;

/// The state of a page.
struct DirtyPageState {
    /// 1 (the page is marked) if it was changed since it was last copied.
    dirty: AtomicU8,
    /// The number of the last snapshot for which the page was handled, or [`PAGE_BUSY`].
    snapshot_done: AtomicU8,
}

/// The states of all pages of an image.
pub(crate) struct DirtyPages {
    /// Chunks are allocated as the image grows, so a high limit of its length costs little memory.
    chunks: Box<[OnceLock<Box<[DirtyPageState]>>]>,
    /// The number of the snapshot that is being copied, 0 if there is none.
    snapshot_number: AtomicU8,
    before_images: Mutex<BeforeImages>,
    /// An estimate of the number of marked pages of the image. It may be too high, because two writers may count the
    /// same page. Pages behind the end are marked when an image gets shorter, and counted when it grows again.
    changed: AtomicU64,
    /// Signaled when there is space for copies again.
    before_image_freed: WakeSignal,
}

/// Copies of pages that writers stored for the current snapshot.
#[derive(Default)]
struct BeforeImages {
    /// As [`DirtyPages::snapshot_number`].
    snapshot_number: u8,
    last_number: u8,
    /// Number of copies that are stored or reserved.
    reserved: usize,
    copies: Vec<(u64, PageCopy)>,
}

fn no_memory() -> Error {
    Error::new(ErrorKind::OutOfSpace, "no memory for the map of changed pages")
}

impl DirtyPages {
    /// The page states of an empty image that may grow to `len_max` bytes.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no memory.
    pub(crate) fn new(len_max: u64) -> Result<DirtyPages> {
        let count = usize::try_from(len_max.div_ceil(PAGE).div_ceil(PAGES_PER_CHUNK)).map_err(|_| no_memory())?;
        let mut chunks = Vec::new();
        chunks.try_reserve_exact(count).map_err(|_| no_memory())?;
        chunks.resize_with(count, OnceLock::new);

        Ok(DirtyPages {
            chunks: chunks.into_boxed_slice(),
            snapshot_number: AtomicU8::new(0),
            before_images: Mutex::new(BeforeImages::default()),
            changed: AtomicU64::new(0),
            before_image_freed: WakeSignal::default(),
        })
    }

    /// Allocates the page states of an image of `len` bytes.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no memory, or if `len` exceeds the limit.
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
        let chunk = self.chunks[(page / PAGES_PER_CHUNK) as usize].get().expect("an image grows before it is written");
        &chunk[(page % PAGES_PER_CHUNK) as usize]
    }

    fn lock_before_images(&self) -> MutexGuard<'_, BeforeImages> {
        lock(&self.before_images)
    }

    /// Called before `len` bytes from `at` on are stored.
    #[inline]
    pub(crate) fn before_store(&self, region: &Region, at: u64, len: u64) {
        debug_assert!(region.contains(at, len), "stores are within the image");
        if self.snapshot_number.load(Ordering::SeqCst) != 0 {
            for page in at / PAGE..(at + len).div_ceil(PAGE) {
                self.keep_before_image(region, page);
            }
        }
    }

    /// Called after `len` bytes from `at` on were stored.
    #[inline]
    pub(crate) fn after_store(&self, at: u64, len: u64) {
        for page in at / PAGE..(at + len).div_ceil(PAGE) {
            self.mark(page, Ordering::Release);
        }
    }

    /// Marks a page. The mark is stored even if the page is marked already; the load serves the count only.
    #[inline]
    fn mark(&self, page: u64, order: Ordering) {
        let mark = &self.state_of(page).dirty;
        if mark.load(Ordering::Relaxed) == 0 {
            self.changed.fetch_add(1, Ordering::Relaxed);
        }
        mark.store(1, order);
    }

    /// Marks the pages from `from` up to `to` (bytes), which are not part of the image any more.
    pub(crate) fn mark_uncounted(&self, from: u64, to: u64) {
        debug_assert!(from <= to && from.is_multiple_of(PAGE), "the end of an image that gets shorter");
        let marks = (from / PAGE..to / PAGE).map(|page| self.state_of(page).dirty.swap(1, Ordering::Release));
        let counted: u64 = marks.map(u64::from).sum();
        self.changed.fetch_sub(counted.min(self.changed.load(Ordering::Relaxed)), Ordering::Relaxed);
    }

    /// Counts the marked pages from `from` up to `to` (bytes), which are part of the image from now on.
    pub(crate) fn count_marks(&self, from: u64, to: u64) {
        debug_assert!(from.is_multiple_of(PAGE) && to.is_multiple_of(PAGE), "an image has whole pages");
        let marks = (from / PAGE..to / PAGE).map(|page| self.state_of(page).dirty.load(Ordering::Relaxed));
        self.changed.fetch_add(marks.map(u64::from).sum(), Ordering::Relaxed);
    }

    /// Number of pages that the next checkpoint copies, or a few more.
    pub(crate) fn changed(&self) -> u64 {
        self.changed.load(Ordering::Relaxed)
    }

    /// As [`before_store`](DirtyPages::before_store), for a word that is published next.
    #[inline]
    pub(crate) fn before_publish(&self, region: &Region, at: u64) {
        fence(Ordering::SeqCst);
        self.before_store(region, at, 8);
    }

    /// As [`after_store`](DirtyPages::after_store), for a word that was published.
    #[inline]
    pub(crate) fn after_publish(&self, at: u64) {
        self.mark(at / PAGE, Ordering::SeqCst);
    }

    /// Number of marked pages. Approximate while other threads write.
    #[cfg(test)]
    pub(crate) fn dirty_count(&self, len: u64) -> u64 {
        (0..len / PAGE).filter(|page| self.state_of(*page).dirty.load(Ordering::Relaxed) == 1).count() as u64
    }

    /// Clears all marks, as if the file contained the image.
    #[cfg(test)]
    pub(crate) fn clear_dirty(&self, len: u64) {
        (0..len / PAGE).for_each(|page| self.state_of(page).dirty.store(0, Ordering::Release));
        self.changed.store(0, Ordering::Relaxed);
    }

    /// Number of copies that are stored or reserved.
    #[cfg(test)]
    pub(crate) fn before_image_count(&self) -> usize {
        self.lock_before_images().reserved
    }

    /// Stores a copy of a page if the current snapshot needs one.
    #[cold]
    fn keep_before_image(&self, region: &Region, number: u64) {
        let page = self.state_of(number);
        loop {
            let cut = self.snapshot_number.load(Ordering::SeqCst);
            let seen = page.snapshot_done.load(Ordering::Acquire);
            if cut == 0 || seen == cut {
                return;
            }
            // Without a mark no copy is needed, unless the page is marked between this check and `copy_once`.
            let reserved = page.dirty.load(Ordering::SeqCst) == 1;
            if reserved && !self.reserve_before_image(cut) {
                continue;
            }
            let mut copy = None;
            let outcome = self.copy_once(page, cut, || {
                let mut bytes = Box::new([0; PAGE as usize]);
                region.read(number * PAGE, &mut bytes[..]);
                copy = Some(bytes);
                reserved
            });
            if reserved {
                self.store_before_image(cut, number, copy);
            }
            match outcome {
                CopyOutcome::Done => return page.end_handling(cut),
                CopyOutcome::NotNeeded(seen) => page.end_handling(seen),
                CopyOutcome::Busy => yield_now(),
            }
        }
    }

    /// Handles a page for the snapshot `cut`. If the page is marked, calls `copy`; meanwhile, no thread that has
    /// checked the number since the cut stores into the page. Except for `Busy`, the caller then stores a value into
    /// `snapshot_done`.
    fn copy_once(&self, page: &DirtyPageState, cut: u8, copy: impl FnOnce() -> bool) -> CopyOutcome {
        let seen = page.snapshot_done.load(Ordering::Acquire);
        let mark_busy =
            |seen| page.snapshot_done.compare_exchange(seen, PAGE_BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok();
        if seen == PAGE_BUSY || !mark_busy(seen) {
            return CopyOutcome::Busy;
        }
        if seen == cut || self.snapshot_number.load(Ordering::SeqCst) != cut {
            return CopyOutcome::NotNeeded(seen);
        }
        if page.dirty.swap(0, Ordering::SeqCst) == 1 && !copy() {
            // A writer that had checked the number before the cut has marked the page since.
            page.dirty.store(1, Ordering::SeqCst);
            return CopyOutcome::NotNeeded(seen);
        }
        CopyOutcome::Done
    }

    /// Reserves space for one copy, and waits for it. Returns false if the snapshot has ended.
    fn reserve_before_image(&self, cut: u8) -> bool {
        loop {
            let rings = self.before_image_freed.generation();
            {
                let mut before_images = self.lock_before_images();
                if before_images.snapshot_number != cut {
                    return false;
                }
                if before_images.reserved < BEFORE_IMAGES_MAX {
                    before_images.reserved += 1;
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

    /// Stores a copy in the reserved space, or releases the reservation.
    fn store_before_image(&self, cut: u8, number: u64, copy: Option<PageCopy>) {
        let mut before_images = self.lock_before_images();
        if before_images.snapshot_number != cut {
            // The snapshot has ended without this copy, so its page is marked again.
            if copy.is_some() {
                self.state_of(number).dirty.store(1, Ordering::SeqCst);
            }
            return;
        }
        match copy {
            Some(copy) => {
                before_images.copies.push((number, copy));
                debug_assert!(before_images.copies.len() <= before_images.reserved, "each copy has reserved space");
            }
            None => {
                debug_assert!(before_images.reserved > before_images.copies.len(), "the reserved space was not used");
                before_images.reserved -= 1;
                drop(before_images);
                self.before_image_freed.notify_all();
            }
        }
    }
}

/// Result of handling a page.
enum CopyOutcome {
    /// The page was handled. It is busy until the caller stores the number of the snapshot.
    Done,
    /// No copy was needed, or none could be made now. The page is busy until the caller stores this value again.
    NotNeeded(u8),
    /// Another thread handles the page.
    Busy,
}

/// A snapshot of an image that is being copied. When dropped before it is [finished](PageSnapshot::finish), all
/// copied pages are marked again.
pub(crate) struct PageSnapshot<'a> {
    pages: &'a DirtyPages,
    region: &'a Region,
    number: u8,
    /// Number of pages that the image had at the cut.
    page_count: u64,
    /// Value of `DirtyPages::changed` at the cut.
    changed: u64,
    next_page: u64,
    copied: Vec<u64>,
    is_open: bool,
    is_finished: bool,
}

impl<'a> PageSnapshot<'a> {
    /// Makes the cut. The snapshot contains every store that was made before this call by this thread, or by a thread
    /// whose stores this thread has observed.
    ///
    /// # Errors
    /// `Invalid` while there is another snapshot.
    pub(crate) fn new(pages: &'a DirtyPages, region: &'a Region) -> Result<PageSnapshot<'a>> {
        let last = {
            let mut before_images = pages.lock_before_images();
            if before_images.snapshot_number != 0 {
                return Err(Error::invalid("a checkpoint of this image is running"));
            }
            // `PAGE_BUSY` is the number of no snapshot. It prevents a second snapshot, and copies of writers are
            // refused.
            before_images.snapshot_number = PAGE_BUSY;
            before_images.last_number
        };
        if last == SNAPSHOT_NUMBER_MAX {
            // The numbers start again at 1, so a number that an earlier round left in a page must not match a new
            // one.
            pages.chunks.iter().filter_map(|chunk| chunk.get()).flatten().for_each(DirtyPageState::reset_snapshot);
        }
        let number = last % SNAPSHOT_NUMBER_MAX + 1;
        debug_assert!(number != last, "two snapshots in a row have different numbers");
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

    /// The length of the image at the cut, in bytes.
    pub(crate) fn image_len(&self) -> u64 {
        self.page_count * PAGE
    }

    /// Copies the next changed page to `out` and returns its number; `None` if there are no more. Pages that writers
    /// have copied come first.
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
                // The image has grown since the cut, and this page is not part of the snapshot.
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
        debug_assert!(page < self.page_count, "the page was part of the image at the cut");
        self.copied.push(page);
        Some(page)
    }

    /// Handles the next page. Returns whether it was copied.
    fn copy_next(&mut self, out: &mut [u8]) -> bool {
        let page = self.pages.state_of(self.next_page);
        if page.dirty.load(Ordering::SeqCst) == 0 && page.snapshot_done.load(Ordering::Acquire) != PAGE_BUSY {
            // A writer that stores into the page from now on was in progress at the cut, or has checked after it.
            self.next_page += 1;
            return false;
        }
        let mut copied = false;
        let outcome = self.pages.copy_once(page, self.number, || {
            self.region.read(self.next_page * PAGE, out);
            copied = true;
            true
        });
        match outcome {
            CopyOutcome::Done => page.end_handling(self.number),
            CopyOutcome::NotNeeded(seen) => page.end_handling(seen),
            CopyOutcome::Busy => {
                yield_now();
                return false;
            }
        }
        self.next_page += 1;
        copied
    }

    /// Ends the copying. From now on writers store without checking pages.
    fn close(&mut self) {
        if !self.is_open {
            return;
        }
        self.is_open = false;
        debug_assert!(self.next_page <= self.page_count, "no page behind the image is visited");
        self.pages.snapshot_number.store(0, Ordering::SeqCst);
        let uncopied = {
            let mut before_images = self.pages.lock_before_images();
            before_images.snapshot_number = 0;
            before_images.reserved = 0;
            std::mem::take(&mut before_images.copies)
        };
        for (page, _) in uncopied {
            self.pages.state_of(page).dirty.store(1, Ordering::SeqCst);
        }
        self.pages.before_image_freed.notify_all();
    }

    /// Ends the snapshot after the copies were written to the file: their pages are not marked again.
    pub(crate) fn finish(mut self) {
        debug_assert!(!self.is_open, "all pages are copied");
        debug_assert!(
            self.copied.len() as u64 <= self.page_count,
            "a page that was handled is not copied again before the next cut"
        );
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
    /// Ends the handling of the page, and stores the number of the last snapshot for which it was handled.
    fn end_handling(&self, number: u8) {
        debug_assert!(number <= SNAPSHOT_NUMBER_MAX, "the number of a snapshot, or 0");
        debug_assert!(
            SCHEDULE_EXPLORATION || self.snapshot_done.load(Ordering::Relaxed) == PAGE_BUSY,
            "one thread at a time handles a page"
        );
        self.snapshot_done.store(number, Ordering::Release);
    }

    /// Resets the number of the last snapshot, while there is none.
    fn reset_snapshot(&self) {
        loop {
            let seen = self.snapshot_done.load(Ordering::Acquire);
            // A thread that handles the page finds, now or soon, that there is no snapshot.
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
    use crate::testing::seeded_rng::SeededRng;

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
        let (image, mut rng) = (image(20), SeededRng::with_stream(3, 3));
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

    /// Regression: an image became shorter and marked the pages after its end. The next snapshot did not count them.
    /// When the image grew again, the pages were copied but not counted, so too little disk space was reserved.
    #[test]
    fn pages_of_a_regrown_image_are_counted() {
        let (image, mut page) = (image(20), vec![0; PAGE as usize]);
        (0..20).for_each(|page| image.store(page * PAGE, 1));
        image.shrink(8 * PAGE, &image.block_growth().unwrap());
        assert_eq!((image.pages_to_write(), image.dirty_page_count()), (8, 8));
        let mut cut = image.snapshot_pages().unwrap();
        while cut.next_page(&mut page).is_some() {}
        cut.finish();
        assert_eq!((image.pages_to_write(), image.dirty_page_count()), (0, 0));
        image.grow(16 * PAGE).unwrap();
        image.store(9 * PAGE, 1);
        assert_eq!((image.pages_to_write(), image.dirty_page_count()), (8, 8));
    }

    /// A snapshot shows the image at the cut, whatever is stored while it is copied, also after the numbers start
    /// again.
    #[test]
    fn snapshot_has_the_image_at_its_start() {
        let image = PoolImage::new(40 * PAGE).unwrap();
        image.grow(4 * PAGE).unwrap();
        let (mut rng, mut file, mut page) = (SeededRng::new(5), Vec::new(), vec![0; PAGE as usize]);
        let mut copied = 0;
        for round in 0..700 {
            (0..rng.below(6)).for_each(|_| change(&image, &mut rng));
            let (expected, before) = (bytes_of(&image), file.clone());
            let mut cut = image.snapshot_pages().unwrap();
            assert_eq!(cut.image_len(), expected.len() as u64);
            assert!(image.snapshot_pages().is_err(), "two snapshots at the same time");
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
                // The copies are lost, and their pages are marked again.
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

    /// Number of words in a chain. Each is in a page of its own, and is written after the writer saw the word before
    /// it.
    const CHAIN: u64 = 4;

    /// Stores `n` in this thread's words of the chain, each after the word before it was stored.
    fn store_chain_words(image: &PoolImage, told: &[AtomicU64], thread: u64, rounds: u64) {
        for n in 1..=rounds {
            for link in (thread..CHAIN).step_by(2) {
                let (before, wanted) = if link > 0 { (link - 1, n) } else { (CHAIN - 1, n - 1) };
                while told[before as usize].load(Ordering::Acquire) < wanted {
                    yield_now();
                }
                // This plain store precedes the published word, and is in another page.
                image.store((CHAIN + link) * PAGE, n);
                image.publish(link * PAGE, n);
                told[link as usize].store(n, Ordering::Release);
            }
        }
    }

    /// Checks the words of a snapshot. A word whose page was not copied has its value of the snapshot before.
    fn assert_causal(words: &[u64]) {
        let (published, plain) = words.split_at(CHAIN as usize);
        assert!(published.windows(2).all(|pair| pair[0] >= pair[1]), "an earlier store is missing: {words:?}");
        assert!(published[0] <= published[CHAIN as usize - 1] + 1, "an earlier store is missing: {words:?}");
        assert!(
            plain.iter().zip(published).all(|(plain, word)| plain >= word),
            "a published word without the plain store before it: {words:?}"
        );
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
    fn snapshot_during_stores_in_all_schedules() {
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
