//! Memory addressed by offsets, which grows without moving.
//!
//! A region is an array of words. It is read and written only by copying, through atomics: it never returns a
//! reference into its memory. So whatever bytes other threads write at the same time, a read returns bytes and is
//! never a data race. The users define what the bytes mean: they publish an offset with Release after they have
//! written the bytes at it, and do not write there again before every reader that may have the offset has unpinned
//! (see `epoch.rs`).
//!
//! Addresses for the maximum length are reserved at once, so growing moves nothing, and an offset needs no lookup
//! table. The bytes of a word are little-endian, as in files.
#![allow(unsafe_code)]

use std::cmp::Ordering as Order;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::mapped_memory::MappedMemory;
use crate::base::{Error, ErrorKind, Result};
use crate::mem::address_reservation::AddressReservation;
use crate::mem::pages::PAGE;
use crate::mem::persist;
use crate::mem::simd::prefetch_line;
use crate::mem::slice::Slice;

/// Values up to this length, in bytes, are copied through the stack, because a [`Slice`] stores values of up to 30
/// bytes inline.
const STACK_COPY_LEN_MAX: usize = 32;

/// An array of words. Thread safe, but only one thread at a time may grow it.
pub(crate) struct Region {
    start: NonNull<AtomicU64>,
    /// Length in bytes, a multiple of [`PAGE`].
    len: AtomicU64,
    /// The highest length so far. The memory below can be accessed, because a thread may follow an outdated offset.
    accessible: AtomicU64,
    reserved: u64,
    memory: RegionMemory,
}

enum RegionMemory {
    Private(AddressReservation),
    Shared(Box<dyn MappedMemory>),
}

// SAFETY: `start` points to atomic words in memory that `memory` owns; both kinds of memory are thread safe.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Returns an empty region in private memory that may grow to `reserved` bytes, rounded up to whole pages. New
    /// memory contains zeros.
    ///
    /// # Errors
    /// `OutOfSpace` if the address space is too small.
    pub(crate) fn private(reserved: u64) -> Result<Region> {
        let rounded = reserved.max(1).checked_next_multiple_of(PAGE);
        let bytes = rounded.and_then(|bytes| usize::try_from(bytes).ok());
        let reserve = bytes.and_then(AddressReservation::new).ok_or_else(|| out_of_memory(reserved))?;
        let start = reserve.start().cast();
        let reserved = reserve.len() as u64;
        let (len, accessible) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Region { start, len, accessible, reserved, memory: RegionMemory::Private(reserve) })
    }

    /// Returns a region over `words`. Its length is 0 until it is grown; by growing it the caller states that the
    /// file is at least as long.
    ///
    /// # Errors
    /// `Invalid` if the words do not start at a cache line.
    pub(crate) fn shared(words: Box<dyn MappedMemory>) -> Result<Region> {
        let all = words.atomic_words();
        let start = NonNull::from(all).cast::<AtomicU64>();
        if start.addr().get() % persist::LINE != 0 {
            return Err(Error::invalid("mapped memory does not start at a cache line"));
        }
        let reserved = size_of_val(all) as u64 / PAGE * PAGE;
        let (len, accessible) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Region { start, len, accessible, reserved, memory: RegionMemory::Shared(words) })
    }

    /// Length in bytes.
    #[inline]
    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    /// Maximum length in bytes.
    pub(crate) fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Whether flushed words survive power loss.
    pub(crate) fn survives_power_loss(&self) -> bool {
        match &self.memory {
            RegionMemory::Private(_) => false,
            RegionMemory::Shared(words) => words.survives_power_loss() && persist::can_flush(),
        }
    }

    /// Grows the region to `len` bytes, a multiple of [`PAGE`]. Does nothing if it is longer.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no memory, or `len` exceeds the reserved length; then the region is unchanged.
    pub(crate) fn grow(&self, len: u64) -> Result<()> {
        assert!(len.is_multiple_of(PAGE), "the length of a region is a multiple of the page size");
        let old = self.len();
        if len > self.reserved {
            return Err(out_of_memory(len));
        }
        if len <= old {
            return Ok(());
        }
        let accessible = self.accessible.load(Ordering::Acquire);
        debug_assert!(accessible >= old, "the memory of the region can be accessed");
        if let RegionMemory::Private(reserve) = &self.memory
            && len > accessible
        {
            // Both lengths are at most `reserved`, which fits in a usize.
            reserve.commit(accessible as usize, len as usize).ok_or_else(|| out_of_memory(len))?;
        }
        self.accessible.store(len.max(accessible), Ordering::Release);
        self.len.store(len, Ordering::Release);
        Ok(())
    }

    /// Shortens a private region to `len` bytes, a multiple of [`PAGE`], and gives the memory behind to the system
    /// where the system can take parts. Nothing behind is used any more. Only the thread that may grow the region may
    /// call this.
    pub(crate) fn shrink(&self, len: u64) {
        assert!(len.is_multiple_of(PAGE), "the length of a region is a multiple of the page size");
        let old = self.len();
        debug_assert!(old <= self.accessible.load(Ordering::Acquire), "the memory of the region can be accessed");
        if let RegionMemory::Private(reserve) = &self.memory
            && len < old
        {
            self.len.store(len, Ordering::Release);
            reserve.release(len as usize, old as usize);
        }
    }

    #[inline]
    fn words(&self) -> &[AtomicU64] {
        let accessible = self.accessible.load(Ordering::Acquire);
        // SAFETY: the first `accessible` bytes are memory of this region: `grow` committed them, or the caller of
        // `grow` stated that the file contains them, and `reserved` is their upper bound. They exist as long as
        // `self.memory`; `shrink` changes their values only. Every word is a valid atomic, aligned (the memory starts
        // at a cache line), and no reference of another type to it exists.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), (accessible / 8) as usize) }
    }

    /// The words that contain the `len` bytes from `at` on.
    #[inline]
    fn span(&self, at: u64, len: u64) -> &[AtomicU64] {
        let end = at.checked_add(len).expect("offsets are far below 2^64");
        &self.words()[(at / 8) as usize..end.div_ceil(8) as usize]
    }

    /// Whether the `len` bytes from `at` on are within the region.
    #[inline]
    pub(crate) fn contains(&self, at: u64, len: u64) -> bool {
        at.checked_add(len).is_some_and(|end| end <= self.len())
    }

    /// Loads the word at `at`, a multiple of 8, with Acquire: writes before the store of this word are visible
    /// afterwards.
    #[inline]
    pub(crate) fn load(&self, at: u64) -> u64 {
        debug_assert!(at.is_multiple_of(8));
        yield_point();
        u64::from_le(self.words()[(at / 8) as usize].load(Ordering::Acquire))
    }

    /// As [`load`](Region::load), in one total order with every [`store_seqcst`](Region::store_seqcst) and every pin:
    /// either the storing thread sees this thread pinned, or this thread sees the stored word.
    #[inline]
    pub(crate) fn load_seqcst(&self, at: u64) -> u64 {
        debug_assert!(at.is_multiple_of(8));
        yield_point();
        u64::from_le(self.words()[(at / 8) as usize].load(Ordering::SeqCst))
    }

    /// Loads the words from `at` on, a multiple of 8, each as [`load`](Region::load) does.
    #[inline]
    pub(crate) fn load_array<const N: usize>(&self, at: u64) -> [u64; N] {
        debug_assert!(at.is_multiple_of(8));
        yield_point();
        let words: &[AtomicU64; N] =
            self.words()[(at / 8) as usize..].first_chunk().expect("the words are within the region");
        std::array::from_fn(|n| u64::from_le(words[n].load(Ordering::Acquire)))
    }

    /// Stores `new` at `at`, a multiple of 8, if the word there is `old`. Returns whether it was.
    #[inline]
    pub(crate) fn exchange(&self, at: u64, old: u64, new: u64) -> bool {
        debug_assert!(at.is_multiple_of(8));
        yield_point();
        let word = &self.words()[(at / 8) as usize];
        word.compare_exchange(old.to_le(), new.to_le(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Stores the word at `at`, a multiple of 8, with Release: a thread that loads it sees all earlier writes of this
    /// thread.
    #[inline]
    pub(crate) fn store(&self, at: u64, word: u64) {
        debug_assert!(at.is_multiple_of(8));
        debug_assert!(self.contains(at, 8), "stores are within the region");
        yield_point();
        self.words()[(at / 8) as usize].store(word.to_le(), Ordering::Release);
    }

    /// As [`store`](Region::store), for a word whose change makes an old object unreachable.
    #[inline]
    pub(crate) fn store_seqcst(&self, at: u64, word: u64) {
        debug_assert!(at.is_multiple_of(8));
        debug_assert!(self.contains(at, 8), "stores are within the region");
        yield_point();
        self.words()[(at / 8) as usize].store(word.to_le(), Ordering::SeqCst);
    }

    /// Writes `parts` one after another from `at` on, a multiple of 8; the rest of the last word becomes zero. Calls
    /// `wrote` with the offset and the value of each word.
    #[inline]
    pub(crate) fn write(&self, at: u64, parts: &[&[u8]], mut wrote: impl FnMut(u64, u64)) {
        debug_assert!(at.is_multiple_of(8));
        yield_point();
        let len: usize = parts.iter().map(|part| part.len()).sum();
        debug_assert!(self.contains(at, len as u64), "stores are within the region");
        let span = self.span(at, len as u64);
        let (mut next, mut filled, mut pending) = (0, 0, 0u64);
        let mut put = |word: u64| {
            span[next].store(word.to_le(), Ordering::Relaxed);
            wrote(at + 8 * next as u64, word);
            next += 1;
        };
        for part in parts {
            // The first bytes complete the word that the previous part began, so that the other words need no shifting.
            let head_len = ((8 - filled) % 8).min(part.len());
            if filled > 0 {
                pending |= low_bytes(part, head_len) << (8 * filled);
                filled += head_len;
                if filled < 8 {
                    continue;
                }
                put(pending);
            }
            let (chunks, rest) = part[head_len..].as_chunks();
            chunks.iter().for_each(|chunk| put(u64::from_le_bytes(*chunk)));
            filled = rest.len();
            pending = match part.last_chunk() {
                Some(last) if filled > 0 => u64::from_le_bytes(*last) >> (64 - 8 * filled),
                _ => low_bytes(rest, filled),
            };
        }
        if filled > 0 {
            put(pending);
        }
    }

    /// As [`write`](Region::write), for whole words.
    pub(crate) fn write_words(&self, at: u64, bytes: &[u8]) {
        debug_assert!(at.is_multiple_of(8) && bytes.len().is_multiple_of(8));
        yield_point();
        let span = &self.words()[(at / 8) as usize..][..bytes.len() / 8];
        for (to, from) in span.iter().zip(bytes.as_chunks().0) {
            // The bytes are not swapped, because words are little-endian in memory too.
            to.store(u64::from_ne_bytes(*from), Ordering::Relaxed);
        }
    }

    /// Copies the bytes from `at` on to `out`.
    #[inline]
    pub(crate) fn read(&self, at: u64, out: &mut [u8]) {
        // SAFETY: `MaybeUninit<u8>` has the same layout as `u8`, and `copy` stores only initialized bytes.
        self.copy(at, unsafe { &mut *(ptr::from_mut(out) as *mut [MaybeUninit<u8>]) });
    }

    /// As [`read`](Region::read), for whole words from a multiple of 8 on.
    #[inline]
    pub(crate) fn read_words(&self, at: u64, out: &mut [u8]) {
        debug_assert!(at.is_multiple_of(8) && out.len().is_multiple_of(8));
        yield_point();
        let span = &self.words()[(at / 8) as usize..][..out.len() / 8];
        // SAFETY: `out` has eight bytes for each word of the span.
        unsafe { copy_words(span, out.as_mut_ptr().cast()) };
    }

    /// As [`read`](Region::read), into uninitialized memory; initializes all of `out`.
    #[inline]
    fn copy(&self, at: u64, out: &mut [MaybeUninit<u8>]) {
        yield_point();
        let (span, bits) = (self.span(at, out.len() as u64), at % 8 * 8);
        let (whole, rest) = (out.len() / 8, out.len() % 8);
        let to = out.as_mut_ptr().cast::<[u8; 8]>();
        if bits == 0 {
            for (n, from) in span[..whole].iter().enumerate() {
                // SAFETY: `out` has at least `whole` times eight bytes.
                unsafe { to.add(n).write(load_relaxed(from).to_le_bytes()) };
            }
        } else if let Some((first, following)) = span.split_first() {
            let mut low = load_relaxed(first);
            for (n, from) in following[..whole].iter().enumerate() {
                let high = load_relaxed(from);
                // SAFETY: as above.
                unsafe { to.add(n).write((low >> bits | high << (64 - bits)).to_le_bytes()) };
                low = high;
            }
        }
        if rest > 0 {
            let last = unaligned_word(span, whole, bits).to_le_bytes();
            out[8 * whole..].iter_mut().zip(last).for_each(|(byte, last)| *byte = MaybeUninit::new(last));
        }
    }

    /// Returns a copy of the `len` bytes from `at` on.
    #[inline]
    pub(crate) fn slice(&self, at: u64, len: usize) -> Slice {
        if len <= STACK_COPY_LEN_MAX {
            let mut bytes = [0; STACK_COPY_LEN_MAX];
            self.read(at, &mut bytes[..len]);
            return Slice::from(&bytes[..len]);
        }
        // Copies whole words, because they need no shifting. These are up to 14 bytes more than requested.
        yield_point();
        let (span, skip) = (self.span(at, len as u64), (at % 8) as usize);
        debug_assert!(skip + len <= 8 * span.len(), "the words contain the bytes");
        let mut bytes = Arc::<[u8]>::new_uninit_slice(8 * span.len());
        let to = Arc::get_mut(&mut bytes).expect("the new `Arc` has one owner");
        // SAFETY: `bytes` has eight bytes for each word of the span.
        unsafe { copy_words(span, to.as_mut_ptr().cast()) };
        // SAFETY: `copy_words` has written all bytes.
        Slice::from_arc_range(unsafe { bytes.assume_init() }, skip, len)
    }

    /// Whether the bytes from `at` on equal `other`.
    #[inline]
    pub(crate) fn equals(&self, at: u64, other: &[u8]) -> bool {
        yield_point();
        let (span, bits) = (self.span(at, other.len() as u64), at % 8 * 8);
        let (chunks, rest) = other.as_chunks::<8>();
        if chunks.iter().enumerate().any(|(n, chunk)| unaligned_word(span, n, bits) != u64::from_le_bytes(*chunk)) {
            return false;
        }
        if rest.is_empty() {
            return true;
        }
        let last = unaligned_word(span, chunks.len(), bits).to_le_bytes();
        last[..rest.len()] == *rest
    }

    /// Returns up to eight of the `len` bytes from `at` on as a big-endian number, as if zeros followed them. The
    /// numbers of two strings are never in the opposite order of the strings.
    #[inline]
    pub(crate) fn prefix_u64(&self, at: u64, len: usize) -> u64 {
        yield_point();
        let len = len.min(8);
        if len == 0 {
            return 0;
        }
        let word = unaligned_word(self.span(at, len as u64), 0, at % 8 * 8).swap_bytes();
        word & (u64::MAX << (64 - 8 * len))
    }

    /// Compares the `len` bytes from `at` on with `other`.
    #[inline]
    pub(crate) fn cmp(&self, at: u64, len: usize, other: &[u8]) -> Order {
        yield_point();
        let common = len.min(other.len());
        let span = self.span(at, common as u64);
        let bits = at % 8 * 8;
        let mut chunks = other[..common].chunks_exact(8);
        let mut n = 0;
        for chunk in &mut chunks {
            let other_word = u64::from_be_bytes(chunk.try_into().expect("eight bytes"));
            let order = unaligned_word(span, n, bits).swap_bytes().cmp(&other_word);
            if order.is_ne() {
                return order;
            }
            n += 1;
        }
        let rest = chunks.remainder();
        if !rest.is_empty() {
            let mut other_bytes = [0; 8];
            other_bytes[..rest.len()].copy_from_slice(rest);
            let own_word = unaligned_word(span, n, bits).swap_bytes() & (u64::MAX << (64 - 8 * rest.len()));
            let order = own_word.cmp(&u64::from_be_bytes(other_bytes));
            if order.is_ne() {
                return order;
            }
        }
        len.cmp(&other.len())
    }

    /// Compares two byte strings within the region.
    pub(crate) fn cmp_within(&self, (a, a_len): (u64, usize), (b, b_len): (u64, usize)) -> Order {
        let common = a_len.min(b_len);
        for done in (0..common).step_by(8) {
            let len = (common - done).min(8);
            let order = self.prefix_u64(a + done as u64, len).cmp(&self.prefix_u64(b + done as u64, len));
            if order.is_ne() {
                return order;
            }
        }
        a_len.cmp(&b_len)
    }

    /// Prefetches the cache lines of a range. Only a hint, without effect where there is no memory.
    #[inline]
    pub(crate) fn prefetch(&self, at: u64, len: u64) {
        let start = self.start.as_ptr().cast::<u8>();
        for line in (at / 64..(at + len).div_ceil(64)).map(|line| line * 64) {
            prefetch_line(start.wrapping_add(line as usize));
        }
    }

    /// Starts to write back the cache lines of a range.
    #[inline]
    pub(crate) fn flush(&self, at: u64, len: u64) {
        persist::flush(self.span(at, len));
    }
}

/// A point where the schedule explorer may switch threads. The words are atomics of the standard library even in
/// explored schedules, because the explorer models only one memory ordering, and a region of its atomics would be too
/// large to create for each schedule.
#[inline]
fn yield_point() {
    #[cfg(azekura_explore)]
    crate::mem::atomic::spin_loop();
}

/// Copies words to `to`.
///
/// # Safety
/// `to` must point to writable memory of eight bytes for each word, which no other thread uses.
#[inline]
unsafe fn copy_words(from: &[AtomicU64], to: *mut [u8; 8]) {
    // Two words at a time, because the compiler does not combine the stores of atomically loaded words itself.
    let (pairs, rest) = from.as_chunks::<2>();
    for (n, pair) in pairs.iter().enumerate() {
        let words = pair.each_ref().map(|word| load_relaxed(word).to_le_bytes());
        // SAFETY: the caller ensures space for all words of `from`.
        unsafe { to.add(2 * n).cast::<[[u8; 8]; 2]>().write(words) };
    }
    if let [last] = rest {
        // SAFETY: as above.
        unsafe { to.add(2 * pairs.len()).write(load_relaxed(last).to_le_bytes()) };
    }
}

#[inline]
fn load_relaxed(word: &AtomicU64) -> u64 {
    u64::from_le(word.load(Ordering::Relaxed))
}

/// Returns the first `len < 8` bytes of `bytes` as a number, the first one lowest.
#[inline]
fn low_bytes(bytes: &[u8], len: usize) -> u64 {
    match bytes.first_chunk() {
        Some(word) => u64::from_le_bytes(*word) & ((1 << (8 * len)) - 1),
        None => bytes[..len].iter().rfold(0, |word, byte| word << 8 | u64::from(*byte)),
    }
}

/// Returns the eight bytes that start `bits` bits after the start of word `n`; bytes after the span are zeros.
#[inline]
fn unaligned_word(span: &[AtomicU64], n: usize, bits: u64) -> u64 {
    let word = load_relaxed(&span[n]);
    if bits == 0 {
        return word;
    }
    let next = span.get(n + 1).map_or(0, load_relaxed);
    word >> bits | next << (64 - bits)
}

#[cold]
fn out_of_memory(len: u64) -> Error {
    Error::new(ErrorKind::OutOfSpace, format!("no memory for {len} bytes"))
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests race scoped threads, which vfs does not provide")]
mod tests {
    use super::*;

    fn region(len: u64) -> Region {
        let region = Region::private(len).unwrap();
        region.grow(len).unwrap();
        region
    }

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 31 + i / 7) as u8).collect()
    }

    #[test]
    fn bytes_round_trip_at_any_offset() {
        let region = region(PAGE);
        let bytes = pattern(100);
        for cut in [0, 1, 7, 8, 9, 50, 100] {
            for second in [cut, (cut + 3).min(100), 100] {
                let mut written = Vec::new();
                let pieces: [&[u8]; 3] = [&bytes[..cut], &bytes[cut..second], &bytes[second..]];
                region.write(64, &pieces, |at, word| written.push((at, word)));
                assert!(written.iter().all(|(at, word)| region.load(*at) == *word));
                assert_eq!((written.len(), written[0].0), (13, 64));
                for from in 0..100 {
                    for len in [0, 1, 5, 8, 11, 100 - from] {
                        let (at, len) = (64 + from as u64, len.min(100 - from));
                        let expected = &bytes[from..from + len];
                        let mut out = vec![0xEE; len];
                        region.read(at, &mut out);
                        assert_eq!(out, expected);
                        assert_eq!(region.slice(at, len), expected);
                        assert_eq!(region.cmp(at, len, expected), Order::Equal);
                    }
                }
            }
        }
        assert_eq!(region.load(64 + 96) >> 32, 0, "the rest of the last word is zero");
        region.write(8, &[&bytes[..16]], |_, _| ());
        assert_eq!(region.load(8).to_le_bytes(), bytes[..8]);
        region.write_words(16, &bytes[..32]);
        assert_eq!(region.slice(8, 40), [&bytes[..8], &bytes[..32]].concat().as_slice());
        let long = pattern(3000);
        region.write(1000, &[&long], |_, _| ());
        assert_eq!(region.slice(1000, 3000), long.as_slice());
    }

    #[test]
    fn comparison_is_bytewise() {
        let region = region(PAGE);
        let strings: Vec<Vec<u8>> =
            ["", "\0", "a", "a\0", "abcdefgh", "abcdefghi", "abcdefgi", "b", "\u{7ff}zzzzzzzzz"]
                .iter()
                .map(|s| s.as_bytes().to_vec())
                .chain([vec![0xff; 9], vec![0xff; 17], vec![0; 9]])
                .collect();
        for (n, a) in strings.iter().enumerate() {
            for b in &strings {
                for gap in [0, 3, 4, 7] {
                    let head = vec![b'x'; gap];
                    region.write(0, &[&head, a], |_, _| ());
                    region.write(256, &[&head, b"y", b], |_, _| ());
                    let (a_at, b_at) = ((gap as u64, a.len()), (257 + gap as u64, b.len()));
                    assert_eq!(region.cmp(a_at.0, a_at.1, b), a.cmp(b), "{n} {a:?} {b:?}");
                    assert_eq!(region.cmp_within(a_at, b_at), a.cmp(b));
                    let heads = region.prefix_u64(a_at.0, a_at.1).cmp(&region.prefix_u64(b_at.0, b_at.1));
                    assert!(heads.is_eq() || heads == a.cmp(b));
                }
            }
        }
    }

    #[test]
    fn grow_does_not_move_and_respects_reservation() {
        for reserved in [16 * PAGE, 64 << 20] {
            let region = Region::private(reserved).unwrap();
            assert!(region.len() == 0 && !region.contains(0, 1) && region.contains(0, 0));
            region.grow(PAGE).unwrap();
            region.store(0, 7);
            region.grow(3 * PAGE).unwrap();
            region.grow(2 * PAGE).unwrap();
            assert_eq!((region.len(), region.load(0), region.load(3 * PAGE - 8)), (3 * PAGE, 7, 0));
            assert_eq!(region.grow(reserved + PAGE).unwrap_err().kind(), ErrorKind::OutOfSpace);
            region.grow(reserved).unwrap();
            region.store_seqcst(reserved - 8, 9);
            assert_eq!((region.load_seqcst(reserved - 8), region.len()), (9, reserved));
            region.flush(0, 3 * PAGE);
            region.prefetch(reserved - 8, 64);
            assert!(!region.contains(reserved - 8, 9) && !region.contains(u64::MAX, 9));
        }
        assert_eq!(Region::private(u64::MAX).map(|_| ()).unwrap_err().kind(), ErrorKind::OutOfSpace);
    }

    #[test]
    #[should_panic(expected = "out of range")]
    fn read_outside_region_panics() {
        region(PAGE).read(PAGE - 4, &mut [0; 5]);
    }

    #[test]
    fn load_sees_writes_before_the_store() {
        let region = region(64 * PAGE);
        let rounds = if cfg!(miri) { 50 } else { 20_000 };
        std::thread::scope(|s| {
            s.spawn(|| {
                for n in 1..=rounds {
                    region.write(1024 + n % 50 * 128, &[&[n as u8; 100]], |_, _| ());
                    region.store(0, n);
                }
            });
            s.spawn(|| {
                let mut seen = 0;
                while seen < rounds {
                    let n = region.load(0);
                    let mut bytes = [0; 100];
                    region.read(1024 + n % 50 * 128, &mut bytes);
                    // If the bytes were overwritten already, the writer has made about fifty more stores.
                    assert!(n == 0 || bytes == [n as u8; 100] || region.load(0) > n + 40);
                    seen = n;
                }
            });
        });
    }
}
