//! An arena: byte records that are written once and never move.
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::num::NonZeroU32;
use std::ptr::copy_nonoverlapping;
use std::slice;
use std::sync::Arc;

use crate::base::{Error, ErrorKind, Result};
use crate::mem::append_vec::AppendVec;
use crate::mem::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::mem::chunk_pool::ChunkPool;
use crate::mem::pages::{HUGE_PAGE, PageAllocation};
use crate::mem::simd::prefetch;

/// Length of the first chunk in bytes. Each further chunk is twice as long, up to [`HUGE_PAGE`].
const FIRST_CHUNK: usize = 16 << 10;
/// Records longer than this, in bytes, get a chunk of their own, so that the rest of the current chunk is not wasted.
const SHARED_CHUNK_RECORD_MAX: usize = HUGE_PAGE / 8;
/// Records start at multiples of this, in bytes.
const ALIGN: usize = 8;
/// Number of bits for the offset in a reference. A reference is a chunk number and an offset / [`ALIGN`]; these bits
/// cover a huge page.
const OFFSET_BITS: u32 = (HUGE_PAGE / ALIGN).ilog2();
const CHUNKS_MAX: u32 = 1 << (u32::BITS - OFFSET_BITS);

/// Position of a record in its [`Arena`].
///
/// It is only a number: [`Arena::bytes_from`] checks it against the published bytes. So a reference made of arbitrary
/// bits, or of another arena, results in `None` or in wrong bytes, but never in a read of other memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ArenaRef(NonZeroU32);

impl ArenaRef {
    /// Returns the reference as bits, which are never 0.
    #[inline]
    pub(crate) fn to_bits(self) -> u32 {
        self.0.get()
    }

    /// Returns the reference with these bits; `None` for 0.
    #[inline]
    pub(crate) fn from_bits(bits: u32) -> Option<ArenaRef> {
        NonZeroU32::new(bits).map(ArenaRef)
    }

    fn new(chunk: u32, offset: usize) -> ArenaRef {
        debug_assert!(chunk < CHUNKS_MAX, "a chunk has a number of a few bits");
        debug_assert!(
            offset.is_multiple_of(ALIGN) && offset < HUGE_PAGE,
            "records start aligned, in the first huge page"
        );
        let bits = chunk << OFFSET_BITS | (offset / ALIGN) as u32;
        ArenaRef(NonZeroU32::new(bits).expect("chunk 0 starts with a gap"))
    }

    #[inline]
    fn chunk(self) -> u32 {
        self.0.get() >> OFFSET_BITS
    }

    #[inline]
    fn offset(self) -> usize {
        (self.0.get() & ((1 << OFFSET_BITS) - 1)) as usize * ALIGN
    }
}

/// The read side of an arena. One [`ArenaWriter`] appends, while any number of threads read without waiting.
pub(crate) struct Arena {
    chunks: AppendVec<ArenaChunk>,
    bytes: AtomicU64,
}

/// A chunk starts at a cache line of its own, so that appending to the last chunk does not disturb readers of the
/// others.
#[repr(align(64))]
struct ArenaChunk {
    /// Bytes below this offset are written and never change, except the gap at the start of chunk 0, which no
    /// reference points to.
    published: AtomicUsize,
    pages: ManuallyDrop<PageAllocation>,
    pool: Arc<ChunkPool>,
}

impl Drop for ArenaChunk {
    fn drop(&mut self) {
        // SAFETY: `pages` is taken only here, and the chunk is being dropped.
        let pages = unsafe { ManuallyDrop::take(&mut self.pages) };
        if pages.len() == HUGE_PAGE {
            self.pool.put(pages);
        }
    }
}

impl Arena {
    /// Returns an empty arena, which owns no chunk, and its writer. Chunks of [`HUGE_PAGE`] bytes come from `pool` if
    /// it has spare ones, and are returned to it with the last handle of the arena.
    pub(crate) fn new(pool: Arc<ChunkPool>) -> (Arc<Arena>, ArenaWriter) {
        let arena = Arc::new(Arena { chunks: AppendVec::new(), bytes: AtomicU64::new(0) });
        let (chunk, used, chunk_capacity, next_chunk) = (0, 0, 0, FIRST_CHUNK);
        let writer = ArenaWriter {
            arena: Arc::clone(&arena),
            pool,
            chunk,
            used,
            chunk_capacity,
            next_chunk,
            chunks_max: CHUNKS_MAX,
        };
        (arena, writer)
    }

    /// Returns the published bytes from `at` to the end of its chunk: the record at `at` and the records after it. A
    /// record must encode its own length. `None` if `at` is beyond the published bytes.
    #[inline]
    pub(crate) fn bytes_from(&self, at: ArenaRef) -> Option<&[u8]> {
        let chunk = self.chunks.get(at.chunk())?;
        let published = chunk.published.load(Ordering::Acquire);
        let len = published.checked_sub(at.offset())?;
        // SAFETY: `offset..published` is within the chunk. These bytes were written before `published` was stored
        // with Release, and they are never written again, because the writer writes only behind `published`. Offset 0
        // of chunk 0, where nothing is written, would be the reference 0, which does not exist. The arena owns the
        // chunk, so the bytes are not freed while `self` is borrowed.
        Some(unsafe { slice::from_raw_parts(chunk.pages.start().as_ptr().add(at.offset()), len) })
    }

    /// Prefetches the first two cache lines of the record at `at`; does nothing for an invalid reference.
    #[inline]
    pub(crate) fn prefetch(&self, at: ArenaRef) {
        if let Some(bytes) = self.bytes_from(at) {
            prefetch(&bytes[..bytes.len().min(128)]);
        }
    }

    /// Bytes of all chunks, used or unused.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// Why a record was not appended.
#[derive(Debug)]
pub(crate) enum AppendError {
    /// The arena has as many chunks as references can number (they hold between 4 and 32 GiB). An empty arena may have
    /// space for the record.
    Full,
    /// Another arena would not help.
    Failed(Error),
}

impl From<Error> for AppendError {
    fn from(error: Error) -> AppendError {
        AppendError::Failed(error)
    }
}

impl AppendError {
    /// The error for a caller that has no other arena: `Invalid` if this one is full.
    #[cold]
    pub(crate) fn into_error(self) -> Error {
        match self {
            AppendError::Full => Error::invalid("memtable is full: flush it first"),
            AppendError::Failed(error) => error,
        }
    }
}

/// The only writer of an [`Arena`].
pub(crate) struct ArenaWriter {
    arena: Arc<Arena>,
    pool: Arc<ChunkPool>,
    /// The chunk that is being filled, its used bytes and its length. `chunk_capacity` is 0 before the first chunk.
    chunk: u32,
    used: usize,
    chunk_capacity: usize,
    next_chunk: usize,
    /// Maximum number of chunks; lower in some tests.
    chunks_max: u32,
}

impl ArenaWriter {
    /// Appends the concatenation of `parts` as one record.
    ///
    /// # Errors
    /// `Full`; `OutOfSpace` if there is no memory.
    #[inline]
    pub(crate) fn append(&mut self, parts: &[&[u8]]) -> Result<ArenaRef, AppendError> {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let padded = len.next_multiple_of(ALIGN).max(ALIGN);
        if padded > SHARED_CHUNK_RECORD_MAX {
            let (chunk, start, _) = self.add_chunk(0, padded)?;
            return Ok(self.write(chunk, start, padded, parts));
        }
        debug_assert!(self.used <= self.chunk_capacity, "a chunk is not filled beyond its end");
        if padded > self.chunk_capacity - self.used {
            (self.chunk, self.used, self.chunk_capacity) = self.add_chunk(self.next_chunk, padded)?;
            self.next_chunk = (self.next_chunk * 2).min(HUGE_PAGE);
        }
        let at = self.write(self.chunk, self.used, padded, parts);
        self.used += padded;
        Ok(at)
    }

    /// Adds a chunk of `usual` bytes, or of more bytes if `need` bytes would not fit. Returns its number, its first
    /// usable offset and its length.
    fn add_chunk(&mut self, usual: usize, need: usize) -> Result<(u32, usize, usize), AppendError> {
        let number = self.arena.chunks.len();
        if number >= self.chunks_max {
            return Err(AppendError::Full);
        }
        let gap = if number == 0 { ALIGN } else { 0 };
        let chunk_len = usual.max(need + gap);
        let no_memory = || Error::new(ErrorKind::OutOfSpace, format!("no memory for {chunk_len} bytes"));
        let spare = if chunk_len == HUGE_PAGE { self.pool.take() } else { None };
        let pages = spare.or_else(|| PageAllocation::new(chunk_len)).ok_or_else(no_memory)?;
        let (published, pages) = (AtomicUsize::new(0), ManuallyDrop::new(pages));
        let chunk = ArenaChunk { published, pages, pool: Arc::clone(&self.pool) };
        self.arena.chunks.push(chunk).ok_or_else(no_memory)?;
        debug_assert_eq!(number + 1, self.arena.chunks.len(), "an arena has one writer");
        self.arena.bytes.fetch_add(chunk_len as u64, Ordering::Relaxed);
        Ok((number, gap, chunk_len))
    }

    /// Makes the arena full once it has `chunks_max` chunks.
    #[cfg(test)]
    pub(crate) fn limit_chunks(&mut self, chunks_max: u32) {
        self.chunks_max = chunks_max;
    }

    /// Copies `parts` to `offset`, fills the record up to `padded` bytes with zeros and publishes it.
    #[inline]
    fn write(&self, chunk: u32, offset: usize, padded: usize, parts: &[&[u8]]) -> ArenaRef {
        let at = ArenaRef::new(chunk, offset);
        debug_assert!(
            parts.iter().map(|part| part.len()).sum::<usize>() <= padded,
            "the record has space for its parts"
        );
        let chunk = self.arena.chunks.get(chunk).expect("the writer added this chunk");
        assert!(offset + padded <= chunk.pages.len() && offset >= chunk.published.load(Ordering::Relaxed));
        // SAFETY: the assertion keeps `offset..offset + padded` within the chunk and behind the published bytes,
        // which are the only ones that readers read. An arena has one writer, and `append` borrows it mutably. The
        // parts have at most `padded` bytes in total. They cannot overlap the target, because no reference to the
        // target was ever returned.
        unsafe {
            let mut to = chunk.pages.start().as_ptr().add(offset);
            let end = to.add(padded);
            for part in parts {
                copy_nonoverlapping(part.as_ptr(), to, part.len());
                to = to.add(part.len());
            }
            to.write_bytes(0, end.offset_from_unsigned(to));
        }
        chunk.published.store(offset + padded, Ordering::Release);
        at
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests race scoped threads, which vfs does not provide")]
mod tests {
    use super::*;

    fn record(n: usize, len: usize) -> Vec<u8> {
        (0..len).map(|i| (n * 31 + i) as u8).collect()
    }

    #[test]
    fn records_of_all_sizes_stay_readable() {
        let (arena, mut writer) = Arena::new(Arc::default());
        assert_eq!(arena.bytes(), 0);
        let sizes = [0, 1, 7, 8, 9, 100, 4096, 16 << 10, SHARED_CHUNK_RECORD_MAX, SHARED_CHUNK_RECORD_MAX + 1, 5 << 20];
        let sizes = if cfg!(miri) { &sizes[..6] } else { &sizes[..] };
        let mut written = Vec::new();
        for n in 0..sizes.len() * if cfg!(miri) { 3 } else { 20 } {
            let bytes = record(n, sizes[n % sizes.len()]);
            let (head, tail) = bytes.split_at(bytes.len() / 3);
            let at = writer.append(&[head, tail]).unwrap();
            assert_eq!(ArenaRef::from_bits(at.to_bits()), Some(at));
            written.push((at, bytes));
            arena.prefetch(at);
        }
        for (at, bytes) in &written {
            assert_eq!(&arena.bytes_from(*at).unwrap()[..bytes.len()], bytes);
        }
        let sum: usize = written.iter().map(|(_, bytes)| bytes.len()).sum();
        assert!(arena.bytes() >= sum as u64);
    }

    #[test]
    fn full_arena_refuses_only_what_needs_a_chunk() {
        let (arena, mut writer) = Arena::new(Arc::default());
        writer.limit_chunks(1);
        writer.append(&[b"a"]).unwrap();
        let before = arena.bytes();
        assert!(matches!(writer.append(&[&[7; SHARED_CHUNK_RECORD_MAX + 1]]), Err(AppendError::Full)));
        assert!(matches!(writer.append(&[&[7; FIRST_CHUNK]]), Err(AppendError::Full)));
        let at = writer.append(&[b"b"]).unwrap();
        assert_eq!((arena.bytes_from(at).unwrap()[0], arena.bytes()), (b'b', before));
    }

    #[test]
    fn large_first_record_fits_in_small_first_chunk() {
        let (arena, mut writer) = Arena::new(Arc::default());
        writer.append(&[b"a"]).unwrap();
        assert_eq!(arena.bytes(), FIRST_CHUNK as u64);
        let (arena, mut writer) = Arena::new(Arc::default());
        let at = writer.append(&[&[7; SHARED_CHUNK_RECORD_MAX + 1]]).unwrap();
        assert_eq!(arena.bytes_from(at).unwrap()[SHARED_CHUNK_RECORD_MAX], 7);
        let (arena, mut writer) = Arena::new(Arc::default());
        let at = writer.append(&[&[7; FIRST_CHUNK]]).unwrap();
        assert_eq!(arena.bytes_from(at).unwrap()[..], [7; FIRST_CHUNK]);
        assert!(arena.bytes() < FIRST_CHUNK as u64 + 4096);
    }

    /// A chunk is used again with the bytes of the arena before. Readers see only those that were published since.
    #[test]
    fn reused_chunk_shows_no_earlier_bytes() {
        let pool = ChunkPool::new(16 * HUGE_PAGE as u64);
        let records = HUGE_PAGE / SHARED_CHUNK_RECORD_MAX * 2;
        let fill = |byte: u8| {
            let (arena, mut writer) = Arena::new(Arc::clone(&pool));
            let record = vec![byte; SHARED_CHUNK_RECORD_MAX];
            let refs: Vec<ArenaRef> = (0..records).map(|_| writer.append(&[&record]).unwrap()).collect();
            for at in &refs {
                let bytes = arena.bytes_from(*at).unwrap();
                assert!(bytes.len() >= record.len() && bytes.iter().all(|b| *b == byte || *b == 0));
            }
            assert!(arena.bytes_from(ArenaRef::new(refs.last().unwrap().chunk(), HUGE_PAGE - ALIGN)).is_none());
        };
        fill(1);
        let spare = pool.spare_bytes();
        assert!(spare >= HUGE_PAGE as u64, "the arena has given its chunks back");
        fill(2);
        assert_eq!((pool.spare_bytes(), pool.taken() > 0), (spare, true));
    }

    #[test]
    fn any_bits_are_safe_to_look_up() {
        let (arena, mut writer) = Arena::new(Arc::default());
        let last = (0..100).map(|n| writer.append(&[&record(n, 50)]).unwrap()).last().unwrap();
        let len = if cfg!(miri) { 30 } else { 1 << 20 };
        for bits in (0..len).chain((0..32).map(|n| 1 << n)).chain([u32::MAX]) {
            let sum = ArenaRef::from_bits(bits)
                .and_then(|at| arena.bytes_from(at))
                .map(|bytes| bytes.iter().map(|&b| u64::from(b)).sum::<u64>());
            assert!(bits <= last.to_bits() + 7 || sum.is_none(), "{bits}");
        }
    }

    #[test]
    fn readers_see_whole_records_while_it_grows() {
        let count = if cfg!(miri) { 100 } else { 50_000 };
        let (arena, mut writer) = Arena::new(Arc::default());
        let newest = AtomicU64::new(0);
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    loop {
                        let last = newest.load(Ordering::Acquire);
                        if let Some(at) = ArenaRef::from_bits(last as u32) {
                            let bytes = arena.bytes_from(at).unwrap();
                            let n = (last >> 32) as usize;
                            assert_eq!(bytes[..n % 300], record(n, n % 300));
                            if n == count - 1 {
                                break;
                            }
                        }
                    }
                });
            }
            for n in 0..count {
                let at = writer.append(&[&record(n, n % 300)]).unwrap();
                newest.store((n as u64) << 32 | u64::from(at.to_bits()), Ordering::Release);
            }
        });
    }
}
