//! The persistence backends of a pool: storing words, and making them durable in the order that the tree requires.
//!
//! Reads access the [`Region`] directly on every backend. Only changes use the trait [`PersistenceBackend`].

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::{Error, Result};
use crate::mem::atomic::{Mutex, MutexGuard, lock};
use crate::mem::pages::PAGE;
use crate::mem::persist::{self, LINE};
use crate::mem::region::Region;
use crate::pmem::dirty_pages::{DirtyPages, PageSnapshot};
use crate::vfs::File;
use crate::vfs::fs::PersistenceLevel;

/// The unit in which stores become durable in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PersistGranularity {
    /// Stores to one line of 64 bytes become durable in their order.
    Line,
    /// Stores to different words become durable in any order.
    Word,
}

/// A place in the code that flushes, fences or orders two stores. A test can skip each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum PersistSite {
    FormatHeader,
    FormatLeaf,
    FormatDone,
    PutRecord,
    PutSlot,
    PutFingerprint,
    PutReady,
    PutCommit,
    PutDone,
    RemoveCommit,
    RemoveDone,
    SplitLeaf,
    SplitReady,
    SplitLink,
    SplitCommit,
    SplitDone,
    MergeHeader,
    MergeSlots,
    MergeReady,
    MergeLink,
    MergeCommit,
    MergeDone,
    UnlinkCommit,
    UnlinkDone,
    RepairCommit,
    RepairDone,
    SeqnoFieldWord,
    SeqnoFieldDone,
    SetCleanMarkWord,
    SetCleanMarkDone,
    ClearCleanMarkWord,
    ClearCleanMarkDone,
}

/// A persistence backend. Thread safe; the tree coordinates changes of the same bytes.
pub(crate) trait PersistenceBackend: Send + Sync + 'static {
    /// The current bytes of the pool, whether durable or not.
    fn region(&self) -> &Region;

    /// Stores a word that is unreachable until it is published.
    fn store(&self, at: u64, word: u64);

    /// Stores a word that makes earlier stores reachable, and may make older data unreachable.
    fn publish(&self, at: u64, word: u64);

    /// Writes bytes that are unreachable until they are published.
    fn write(&self, at: u64, parts: &[&[u8]]);

    /// Starts making the lines of a range durable.
    fn flush(&self, at: u64, len: u64, site: PersistSite);

    /// Returns once every range that this thread has flushed is durable.
    fn fence(&self, site: PersistSite);

    fn granularity(&self) -> PersistGranularity;

    fn level(&self) -> PersistenceLevel;

    /// Makes the pool at least `len` bytes long, a multiple of [`PAGE`]. The new bytes are zero.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no space; then nothing was changed.
    fn grow(&self, len: u64) -> Result<()>;

    /// Prevents growth until the guard is dropped. `None` if the backend cannot [`shrink`](PersistenceBackend::shrink).
    fn block_growth(&self) -> Option<MutexGuard<'_, ()>> {
        None
    }

    /// Makes the pool `len` bytes long, a multiple of [`PAGE`], and gives the memory behind back. Nothing behind is in
    /// use. `growth`: the guard of [`block_growth`](PersistenceBackend::block_growth).
    fn shrink(&self, _len: u64, _growth: &MutexGuard<'_, ()>) {}

    /// Flushes a range on backends that do not keep the order of stores within a line.
    #[inline]
    fn flush_words(&self, at: u64, len: u64, site: PersistSite) {
        if self.granularity() == PersistGranularity::Word {
            self.flush(at, len, site);
        }
    }

    /// Publishes two words of one line, each (offset, word), so that the second is never durable without the first.
    fn publish_both(&self, first: (u64, u64), second: (u64, u64), site: PersistSite) {
        self.publish(first.0, first.1);
        if self.granularity() == PersistGranularity::Word {
            self.flush(first.0, 8, site);
            self.fence(site);
        }
        self.publish(second.0, second.1);
    }
}

/// The order in which stores to one line become durable on this processor.
fn cpu_granularity() -> PersistGranularity {
    if cfg!(target_arch = "x86_64") { PersistGranularity::Line } else { PersistGranularity::Word }
}

/// Calls `reserve` with `len_max`, then with less each time it fails, down to `len`: existing data must fit, growth
/// may be limited.
fn reserve_with_fallback<T>(len: u64, len_max: u64, mut reserve: impl FnMut(u64) -> Result<T>) -> Result<T> {
    let mut wanted = len_max.max(len);
    loop {
        match reserve(wanted) {
            Err(_) if wanted > len => wanted = (wanted / 2 / PAGE * PAGE).max(len),
            tried => return tried,
        }
    }
}

/// An image in the memory of this process, which tracks the pages that were changed. The WAL and checkpoints make it
/// durable; flushes and fences do nothing.
pub(crate) struct PoolImage {
    region: Region,
    dirty_pages: DirtyPages,
    /// Held while the length changes.
    resize_lock: Mutex<()>,
}

impl PoolImage {
    /// An empty image that may grow to `len_max` bytes.
    ///
    /// # Errors
    /// `OutOfSpace` if the address space is too small.
    pub(crate) fn new(len_max: u64) -> Result<PoolImage> {
        let (region, dirty_pages) = (Region::private(len_max)?, DirtyPages::new(len_max)?);
        Ok(PoolImage { region, dirty_pages, resize_lock: Mutex::new(()) })
    }

    /// An empty image into which an existing one of `len` bytes is loaded. It may grow to `len_max` bytes, or as far
    /// as there is address space.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no address space for `len` bytes.
    pub(crate) fn for_existing(len: u64, len_max: u64) -> Result<PoolImage> {
        reserve_with_fallback(len, len_max, PoolImage::new)
    }

    /// Stores whole words from a file while the image is loaded. Marks no page.
    pub(crate) fn load_words(&self, at: u64, bytes: &[u8]) {
        self.region.write_words(at, bytes);
    }

    /// Clears all marks, as if the file contained every change.
    #[cfg(test)]
    pub(crate) fn clear_dirty_pages(&self) {
        self.dirty_pages.clear_dirty(self.region.len());
    }

    /// Number of page copies that writers have stored or reserved.
    #[cfg(test)]
    pub(crate) fn before_image_count(&self) -> usize {
        self.dirty_pages.before_image_count()
    }

    /// Number of pages changed since they were last written to a file. Approximate while other threads write.
    #[cfg(test)]
    pub(crate) fn dirty_page_count(&self) -> u64 {
        self.dirty_pages.dirty_count(self.region.len())
    }

    /// Number of pages changed since they were last written to a file, or a few more.
    pub(crate) fn pages_to_write(&self) -> u64 {
        self.dirty_pages.changed()
    }

    /// Takes a snapshot of the image, from which a checkpoint writes the changed pages to the file.
    ///
    /// # Errors
    /// `Invalid` while there is another snapshot.
    pub(crate) fn snapshot_pages(&self) -> Result<PageSnapshot<'_>> {
        PageSnapshot::new(&self.dirty_pages, &self.region)
    }
}

impl PersistenceBackend for PoolImage {
    #[inline]
    fn region(&self) -> &Region {
        &self.region
    }

    #[inline]
    fn store(&self, at: u64, word: u64) {
        self.dirty_pages.before_store(&self.region, at, 8);
        self.region.store(at, word);
        self.dirty_pages.after_store(at, 8);
    }

    #[inline]
    fn publish(&self, at: u64, word: u64) {
        self.dirty_pages.before_publish(&self.region, at);
        self.region.store_seqcst(at, word);
        self.dirty_pages.after_publish(at);
    }

    #[inline]
    fn write(&self, at: u64, parts: &[&[u8]]) {
        let len = parts.iter().map(|part| part.len() as u64).sum();
        self.dirty_pages.before_store(&self.region, at, len);
        self.region.write(at, parts, |_, _| ());
        self.dirty_pages.after_store(at, len);
    }

    #[inline]
    fn flush(&self, _at: u64, _len: u64, _site: PersistSite) {}

    #[inline]
    fn fence(&self, _site: PersistSite) {}

    fn granularity(&self) -> PersistGranularity {
        PersistGranularity::Line
    }

    fn level(&self) -> PersistenceLevel {
        PersistenceLevel::WalOnly
    }

    fn grow(&self, len: u64) -> Result<()> {
        let _resizing = lock(&self.resize_lock);
        self.dirty_pages.grow(len)?;
        let old = self.region.len();
        self.region.grow(len)?;
        debug_assert!(len >= old, "an image only grows here");
        self.dirty_pages.count_marks(old, len);
        Ok(())
    }

    fn block_growth(&self) -> Option<MutexGuard<'_, ()>> {
        Some(lock(&self.resize_lock))
    }

    fn shrink(&self, len: u64, _growth: &MutexGuard<'_, ()>) {
        let old = self.region.len();
        debug_assert!(len <= old, "an image that gets shorter");
        self.region.shrink(len);
        // If the image grows again, its file must not keep the old pages.
        self.dirty_pages.mark_uncounted(len, old);
    }
}

/// A mapped file: on persistent memory its content survives power loss, on tmpfs the end of the process.
pub(crate) struct MappedPoolFile {
    region: Region,
    file: Arc<dyn File>,
    level: PersistenceLevel,
}

impl MappedPoolFile {
    /// Maps the whole pages of `file`, with address space to grow to `len_max` bytes, or to the current length if
    /// that is more. If the level is [`PersistenceLevel::ProcessCrash`] and the system writes pages back to a device
    /// at any time, the file is undefined after power loss.
    ///
    /// # Errors
    /// `Unsupported` where files cannot be mapped as memory, and those of the system.
    pub(crate) fn new(file: Arc<dyn File>, len_max: u64) -> Result<MappedPoolFile> {
        MappedPoolFile::map_reserving(file, len_max, len_max)
    }

    /// As [`new`](MappedPoolFile::new), for an existing pool: it may grow to `len_max`, or as far as there is address
    /// space.
    ///
    /// # Errors
    /// As [`new`](MappedPoolFile::new).
    pub(crate) fn for_existing(file: Arc<dyn File>, len_max: u64) -> Result<MappedPoolFile> {
        MappedPoolFile::map_reserving(file, 0, len_max)
    }

    fn map_reserving(file: Arc<dyn File>, least: u64, len_max: u64) -> Result<MappedPoolFile> {
        // Bytes behind the last whole page were being added when the process ended, and are not in use.
        let len = file.length()? / PAGE * PAGE;
        let reserved = len_max.max(len).max(1).checked_next_multiple_of(PAGE);
        let reserved = reserved.ok_or_else(|| Error::invalid("a pool must be shorter than 2^64 bytes"))?;
        let least = len.max(least).max(PAGE).min(reserved).next_multiple_of(PAGE);
        let words = reserve_with_fallback(least, reserved, |len| file.map_memory(len))?;
        let words = words.ok_or_else(|| Error::unsupported("files cannot be mapped on this platform"))?;
        let region = Region::shared(words)?;
        file.allocate(len)?;
        region.grow(len)?;
        let level =
            if region.survives_power_loss() { PersistenceLevel::PowerLoss } else { PersistenceLevel::ProcessCrash };
        Ok(MappedPoolFile { region, file, level })
    }
}

impl PersistenceBackend for MappedPoolFile {
    #[inline]
    fn region(&self) -> &Region {
        &self.region
    }

    #[inline]
    fn store(&self, at: u64, word: u64) {
        self.region.store(at, word);
    }

    #[inline]
    fn publish(&self, at: u64, word: u64) {
        self.region.store_seqcst(at, word);
    }

    #[inline]
    fn write(&self, at: u64, parts: &[&[u8]]) {
        self.region.write(at, parts, |_, _| ());
    }

    #[inline]
    fn flush(&self, at: u64, len: u64, _site: PersistSite) {
        if self.level == PersistenceLevel::PowerLoss {
            self.region.flush(at, len);
        }
    }

    #[inline]
    fn fence(&self, _site: PersistSite) {
        if self.level == PersistenceLevel::PowerLoss {
            persist::drain();
        }
    }

    fn granularity(&self) -> PersistGranularity {
        cpu_granularity()
    }

    fn level(&self) -> PersistenceLevel {
        self.level
    }

    fn grow(&self, len: u64) -> Result<()> {
        // The file system allocates all blocks first, because a store into a hole of a full file system ends the
        // process.
        self.file.allocate_from(self.region.len(), len)?;
        self.region.grow(len)
    }
}

/// Counts of stores, flushes and fences. Flushes and fences count also on backends where they do nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PersistCounts {
    pub(crate) stored_bytes: u64,
    pub(crate) flushed_lines: u64,
    pub(crate) fences: u64,
}

/// The counts of all splits since the tree was opened, and the number of splits.
#[derive(Default)]
pub(crate) struct SplitStats {
    count: AtomicU64,
    stored_bytes: AtomicU64,
    flushed_lines: AtomicU64,
    fences: AtomicU64,
}

impl SplitStats {
    pub(crate) fn add(&self, moved: PersistCounts) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.stored_bytes.fetch_add(moved.stored_bytes, Ordering::Relaxed);
        self.flushed_lines.fetch_add(moved.flushed_lines, Ordering::Relaxed);
        self.fences.fetch_add(moved.fences, Ordering::Relaxed);
    }

    pub(crate) fn totals(&self) -> (u64, PersistCounts) {
        let moved = PersistCounts {
            stored_bytes: self.stored_bytes.load(Ordering::Relaxed),
            flushed_lines: self.flushed_lines.load(Ordering::Relaxed),
            fences: self.fences.load(Ordering::Relaxed),
        };
        (self.count.load(Ordering::Relaxed), moved)
    }
}

/// A backend that counts the operations of one thread.
pub(crate) struct CountingBackend<'a, M> {
    backend: &'a M,
    counts: Cell<PersistCounts>,
}

impl<'a, M: PersistenceBackend> CountingBackend<'a, M> {
    pub(crate) fn new(backend: &'a M) -> CountingBackend<'a, M> {
        CountingBackend { backend, counts: Cell::default() }
    }

    fn add_counts(&self, stored_bytes: u64, flushed_lines: u64, fences: u64) {
        let moved = self.counts.get();
        self.counts.set(PersistCounts {
            stored_bytes: moved.stored_bytes + stored_bytes,
            flushed_lines: moved.flushed_lines + flushed_lines,
            fences: moved.fences + fences,
        });
    }

    pub(crate) fn store(&self, at: u64, word: u64) {
        self.add_counts(8, 0, 0);
        self.backend.store(at, word);
    }

    pub(crate) fn publish(&self, at: u64, word: u64) {
        self.add_counts(8, 0, 0);
        self.backend.publish(at, word);
    }

    pub(crate) fn publish_both(&self, first: (u64, u64), second: (u64, u64), site: PersistSite) {
        let between = u64::from(self.backend.granularity() == PersistGranularity::Word);
        self.add_counts(16, between, between);
        self.backend.publish_both(first, second, site);
    }

    pub(crate) fn flush(&self, at: u64, len: u64, site: PersistSite) {
        self.add_counts(0, (at + len).div_ceil(LINE as u64) - at / LINE as u64, 0);
        self.backend.flush(at, len, site);
    }

    pub(crate) fn fence(&self, site: PersistSite) {
        self.add_counts(0, 0, 1);
        self.backend.fence(site);
    }

    pub(crate) fn counts(&self) -> PersistCounts {
        self.counts.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::vfs::disk::DiskFs;
    use crate::vfs::disk::tests::temp_dir;
    use crate::vfs::{Fs, OpenMode};

    /// The numbers of the pages in a snapshot, sorted.
    fn dirty_page_numbers(image: &PoolImage) -> Vec<u64> {
        let (mut cut, mut out) = (image.snapshot_pages().unwrap(), [0; PAGE as usize]);
        let mut pages: Vec<u64> = std::iter::from_fn(|| cut.next_page(&mut out)).collect();
        cut.finish();
        pages.sort_unstable();
        pages
    }

    #[test]
    fn image_tracks_dirty_pages() {
        let image = PoolImage::new(300 * PAGE).unwrap();
        image.grow(300 * PAGE).unwrap();
        assert!(dirty_page_numbers(&image).is_empty());
        image.store(8, 1);
        image.publish(70 * PAGE, 2);
        image.write(200 * PAGE - 8, &[b"12345678", b"9"]);
        assert_eq!(image.dirty_page_count(), 4);
        assert_eq!(dirty_page_numbers(&image), [0, 70, 199, 200]);
        assert!(dirty_page_numbers(&image).is_empty());
        image.store(PAGE, 1);
        image.clear_dirty_pages();
        assert!(dirty_page_numbers(&image).is_empty());
        assert_eq!(image.level(), PersistenceLevel::WalOnly);
        assert_eq!(image.grow(301 * PAGE).unwrap_err().kind(), ErrorKind::OutOfSpace);
    }

    /// Regression: each growth step allocated the whole file, and the operating system visited all existing pages.
    /// Inserting a million records of 820 bytes took three times as long as necessary.
    #[test]
    #[expect(clippy::disallowed_methods, reason = "only the system knows how much space a file has")]
    fn grow_allocates_only_new_bytes() {
        use std::os::unix::fs::MetadataExt;
        let root = temp_dir(false);
        let path = root.path().join("pool");
        let file = DiskFs::new().open(&path, OpenMode::Create).unwrap();
        let shared = MappedPoolFile::new(Arc::clone(&file), 64 * PAGE).unwrap();
        shared.grow(32 * PAGE).unwrap();
        // The space of the old pool is released and must not be requested again.
        file.set_length(0).unwrap();
        file.set_length(32 * PAGE).unwrap();
        shared.grow(36 * PAGE).unwrap();
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!((metadata.len(), metadata.blocks() * 512), (36 * PAGE, 4 * PAGE));
    }

    #[test]
    fn mapped_file_keeps_stored_bytes() {
        let root = temp_dir(false);
        let path = root.path().join("pool");
        let fs = DiskFs::new();
        let open = |mode| fs.open(&path, mode).unwrap();
        let shared = MappedPoolFile::new(open(OpenMode::Create), 16 * PAGE).unwrap();
        assert!(shared.region().len() == 0 && shared.level() >= PersistenceLevel::ProcessCrash);
        shared.grow(2 * PAGE).unwrap();
        shared.write(PAGE, &[b"hello, pool"]);
        shared.publish(0, 7);
        shared.flush(PAGE, 11, PersistSite::PutRecord);
        shared.fence(PersistSite::PutReady);
        drop(shared);
        let again = MappedPoolFile::new(open(OpenMode::Write), 16 * PAGE).unwrap();
        assert_eq!((again.region().len(), again.region().load(0)), (2 * PAGE, 7));
        assert_eq!(again.region().slice(PAGE, 11), "hello, pool");
        assert!(again.grow(17 * PAGE).is_err());
        drop(again);
        open(OpenMode::Write).set_length(PAGE + 5).unwrap();
        let cut = MappedPoolFile::new(open(OpenMode::Write), 0).unwrap();
        assert_eq!((cut.region().len(), cut.region().load(0)), (PAGE, 7));
        let nothing = crate::testing::MemFs::new();
        let file = nothing.open("/pool".as_ref(), OpenMode::Create).unwrap();
        assert_eq!(MappedPoolFile::new(file, PAGE).map(|_| ()).unwrap_err().kind(), ErrorKind::Unsupported);
    }
}
