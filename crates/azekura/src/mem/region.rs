//! Memory addressed by offsets, that grows where it stands.
//!
//! A region is a row of words. It is read and written by copying, through atomics alone: no reference into it is ever
//! given out, so whatever threads do to each other's bytes, what they read is bytes, and never a data race. What the
//! bytes mean is the users' agreement: they publish an offset with Release after they have written what stands there,
//! and don't write there again before every reader that may have the offset has left (see `epoch.rs`).
//!
//! Addresses for all that it may grow to are reserved at once, so growing moves nothing, and an offset needs no table.
//! Bytes in a word are little-endian, as they are in files.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cmp::Ordering as Order;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mapped::ReservedMapping;

use crate::base::sync::MappedMemory;
use crate::base::{Error, ErrorKind, Result};
use crate::mem::persist;
use crate::mem::simd::prefetch_line;
use crate::mem::slice::Slice;

/// Values up to this length are copied by way of the stack: a [`Slice`] holds them itself.
const STACK_COPY_LEN_MAX: usize = 32;

/// A row of words. Thread safe; growing is the business of one thread at a time.
pub(crate) struct Region {
    start: NonNull<AtomicU64>,
    /// In bytes, a multiple of [`PAGE`]; only ever grows.
    len: AtomicU64,
    reserved: u64,
    memory: RegionMemory,
}

enum RegionMemory {
    Private(AddressReservation),
    Shared(Box<dyn MappedMemory>),
}

// SAFETY: the words are atomics, in memory that belongs to the region or is held by it; both kinds of memory are thread
// safe.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// A region of zeros in private memory that may grow to `reserved` bytes, rounded up to whole pages.
    ///
    /// # Errors
    /// `OutOfSpace` if the address space is too small.
    pub(crate) fn private(reserved: u64) -> Result<Region> {
        let rounded = reserved.max(1).checked_next_multiple_of(PAGE);
        let bytes = rounded.and_then(|bytes| usize::try_from(bytes).ok());
        let reserve = bytes.and_then(AddressReservation::new).ok_or_else(|| out_of_memory(reserved))?;
        let start = reserve.start().cast();
        let reserved = reserve.len() as u64;
        Ok(Region { start, len: AtomicU64::new(0), reserved, memory: RegionMemory::Private(reserve) })
    }

    /// The words of `words`; it holds none until it is grown, which is the caller's word that the file is as long.
    ///
    /// # Errors
    /// `Invalid` if they do not begin with a cache line.
    pub(crate) fn shared(words: Box<dyn MappedMemory>) -> Result<Region> {
        let all = words.atomic_words();
        let start = NonNull::from(all).cast::<AtomicU64>();
        if start.addr().get() % persist::LINE != 0 {
            return Err(Error::invalid("mapped memory begins in the middle of a cache line"));
        }
        let reserved = size_of_val(all) as u64 / PAGE * PAGE;
        Ok(Region { start, len: AtomicU64::new(0), reserved, memory: RegionMemory::Shared(words) })
    }

    /// In bytes.
    #[inline]
    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    /// Bytes that it may grow to.
    pub(crate) fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Whether what was flushed survives power loss.
    pub(crate) fn survives_power_loss(&self) -> bool {
        match &self.memory {
            RegionMemory::Private(_) => false,
            RegionMemory::Shared(words) => words.survives_power_loss() && persist::can_flush(),
        }
    }

    /// Makes it `len` bytes long, a multiple of [`PAGE`]; it never gets shorter.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no memory, or more than was reserved; then nothing was changed.
    pub(crate) fn grow(&self, len: u64) -> Result<()> {
        assert!(len.is_multiple_of(PAGE), "a region has whole pages");
        let old = self.len();
        if len > self.reserved {
            return Err(out_of_memory(len));
        }
        if len <= old {
            return Ok(());
        }
        if let RegionMemory::Private(reserve) = &self.memory {
            // Both are at most `reserved`, which is a usize.
            reserve.commit(old as usize, len as usize).ok_or_else(|| out_of_memory(len))?;
        }
        self.len.store(len, Ordering::Release);
        Ok(())
    }

    #[inline]
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the first `len` bytes are memory of this region: `grow` opened them, or the caller of `grow` stated
        // that the file has them, and `reserved` is their upper bound. They stay as long as `self.memory` does. Every
        // word is a valid atomic, aligned (the memory begins with a cache line), and no other kind of reference to it
        // exists.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), (self.len() / 8) as usize) }
    }

    /// The words that `len` bytes from `at` on stand in.
    #[inline]
    fn span(&self, at: u64, len: u64) -> &[AtomicU64] {
        let end = at.checked_add(len).expect("offsets are far below 2^64");
        &self.words()[(at / 8) as usize..end.div_ceil(8) as usize]
    }

    /// Whether `len` bytes from `at` on are in it.
    #[inline]
    pub(crate) fn contains(&self, at: u64, len: u64) -> bool {
        at.checked_add(len).is_some_and(|end| end <= self.len())
    }

    /// The word at `at`, a multiple of 8. Sees what was written before the store that it reads.
    #[inline]
    pub(crate) fn load(&self, at: u64) -> u64 {
        debug_assert!(at.is_multiple_of(8));
        yield_point();
        u64::from_le(self.words()[(at / 8) as usize].load(Ordering::Acquire))
    }

    /// As [`read`](Region::read), in one order with all [`publish`](Region::store_seqcst) and all pins: either the
    /// publishing thread sees this thread pinned, or this thread sees the published word.
    #[inline]
    pub(crate) fn load_seqcst(&self, at: u64) -> u64 {
        debug_assert!(at.is_multiple_of(8));
        yield_point();
        u64::from_le(self.words()[(at / 8) as usize].load(Ordering::SeqCst))
    }

    /// The words from `at` on, a multiple of 8, each as by [`read`](Region::read).
    #[inline]
    pub(crate) fn load_array<const N: usize>(&self, at: u64) -> [u64; N] {
        debug_assert!(at.is_multiple_of(8));
        yield_point();
        let words: &[AtomicU64; N] = self.words()[(at / 8) as usize..].first_chunk().expect("it is in the region");
        std::array::from_fn(|n| u64::from_le(words[n].load(Ordering::Acquire)))
    }

    /// Stores `new` at `at`, a multiple of 8, if `old` stands there; whether it did.
    #[inline]
    pub(crate) fn exchange(&self, at: u64, old: u64, new: u64) -> bool {
        debug_assert!(at.is_multiple_of(8));
        yield_point();
        let word = &self.words()[(at / 8) as usize];
        word.compare_exchange(old.to_le(), new.to_le(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Stores the word at `at`, a multiple of 8, after all that this thread wrote before.
    #[inline]
    pub(crate) fn store(&self, at: u64, word: u64) {
        debug_assert!(at.is_multiple_of(8));
        yield_point();
        self.words()[(at / 8) as usize].store(word.to_le(), Ordering::Release);
    }

    /// As [`store`](Region::store), for a word after which something old cannot be come by any more.
    #[inline]
    pub(crate) fn store_seqcst(&self, at: u64, word: u64) {
        debug_assert!(at.is_multiple_of(8));
        yield_point();
        self.words()[(at / 8) as usize].store(word.to_le(), Ordering::SeqCst);
    }

    /// Writes `parts` one behind the other from `at` on, a multiple of 8; what is left of the last word becomes zero.
    /// `wrote` is told of every word.
    #[inline]
    pub(crate) fn write(&self, at: u64, parts: &[&[u8]], mut wrote: impl FnMut(u64, u64)) {
        debug_assert!(at.is_multiple_of(8));
        yield_point();
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let span = self.span(at, len as u64);
        let (mut next, mut filled, mut pending) = (0, 0, 0u64);
        let mut put = |word: u64| {
            span[next].store(word.to_le(), Ordering::Relaxed);
            wrote(at + 8 * next as u64, word);
            next += 1;
        };
        for part in parts {
            let mut chunks = part.chunks_exact(8);
            for chunk in &mut chunks {
                let word = u64::from_le_bytes(chunk.try_into().expect("eight bytes"));
                put(pending | word << filled);
                pending = if filled == 0 { 0 } else { word >> (64 - filled) };
            }
            for byte in chunks.remainder() {
                pending |= u64::from(*byte) << filled;
                filled += 8;
                if filled == 64 {
                    put(pending);
                    (pending, filled) = (0, 0);
                }
            }
        }
        if filled > 0 {
            put(pending);
        }
    }

    /// As [`write`](Region::write), of whole words.
    pub(crate) fn write_words(&self, at: u64, bytes: &[u8]) {
        debug_assert!(at.is_multiple_of(8) && bytes.len().is_multiple_of(8));
        yield_point();
        let span = &self.words()[(at / 8) as usize..][..bytes.len() / 8];
        for (to, from) in span.iter().zip(bytes.as_chunks().0) {
            // Words are little-endian in memory, too.
            to.store(u64::from_ne_bytes(*from), Ordering::Relaxed);
        }
    }

    /// Copies the bytes from `at` on to `out`.
    #[inline]
    pub(crate) fn read(&self, at: u64, out: &mut [u8]) {
        // SAFETY: the same bytes; `copy` writes nothing there but bytes.
        self.copy(at, unsafe { &mut *(ptr::from_mut(out) as *mut [MaybeUninit<u8>]) });
    }

    /// As [`read`](Region::read), of whole words from a multiple of 8 on.
    #[inline]
    pub(crate) fn read_words(&self, at: u64, out: &mut [u8]) {
        debug_assert!(at.is_multiple_of(8) && out.len().is_multiple_of(8));
        yield_point();
        let span = &self.words()[(at / 8) as usize..][..out.len() / 8];
        // SAFETY: `out` has eight bytes for each word of the span.
        unsafe { copy_words(span, out.as_mut_ptr().cast()) };
    }

    /// As [`read`](Region::read); all of `out` is written.
    #[inline]
    fn copy(&self, at: u64, out: &mut [MaybeUninit<u8>]) {
        yield_point();
        let (span, bits) = (self.span(at, out.len() as u64), at % 8 * 8);
        let (whole, rest) = (out.len() / 8, out.len() % 8);
        let to = out.as_mut_ptr().cast::<[u8; 8]>();
        if bits == 0 {
            for (n, from) in span[..whole].iter().enumerate() {
                // SAFETY: `out` has `whole` times eight bytes.
                unsafe { to.add(n).write(load_relaxed(from).to_le_bytes()) };
            }
        } else if let Some((first, behind)) = span.split_first() {
            let mut low = load_relaxed(first);
            for (n, from) in behind[..whole].iter().enumerate() {
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

    /// The bytes from `at` on as a string of their own.
    #[inline]
    pub(crate) fn slice(&self, at: u64, len: usize) -> Slice {
        if len <= STACK_COPY_LEN_MAX {
            let mut bytes = [0; STACK_COPY_LEN_MAX];
            self.read(at, &mut bytes[..len]);
            return Slice::from(&bytes[..len]);
        }
        // Whole words, which need no shifting; a few bytes more than are asked for.
        yield_point();
        let (span, skip) = (self.span(at, len as u64), (at % 8) as usize);
        let mut bytes = Arc::<[u8]>::new_uninit_slice(8 * span.len());
        let to = Arc::get_mut(&mut bytes).expect("nobody else has it yet");
        // SAFETY: there are eight bytes for each word of the span.
        unsafe { copy_words(span, to.as_mut_ptr().cast()) };
        // SAFETY: all of it was written.
        Slice::from_arc_range(unsafe { bytes.assume_init() }, skip, len)
    }

    /// Whether the bytes from `at` on are `other`.
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

    /// Up to eight of the `len` bytes from `at` on as a big-endian number, as if zeros followed them. Of two strings
    /// the numbers are never in the opposite order.
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
            let theirs = u64::from_be_bytes(chunk.try_into().expect("eight bytes"));
            let order = unaligned_word(span, n, bits).swap_bytes().cmp(&theirs);
            if order.is_ne() {
                return order;
            }
            n += 1;
        }
        let rest = chunks.remainder();
        if !rest.is_empty() {
            let mut theirs = [0; 8];
            theirs[..rest.len()].copy_from_slice(rest);
            let mine = unaligned_word(span, n, bits).swap_bytes() & (u64::MAX << (64 - 8 * rest.len()));
            let order = mine.cmp(&u64::from_be_bytes(theirs));
            if order.is_ne() {
                return order;
            }
        }
        len.cmp(&other.len())
    }

    /// Compares two byte strings of the region.
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

    /// Asks the processor to fetch the lines of a range; only a hint, and nothing happens where there is no memory.
    #[inline]
    pub(crate) fn prefetch(&self, at: u64, len: u64) {
        let start = self.start.as_ptr().cast::<u8>();
        for line in (at / 64..(at + len).div_ceil(64)).map(|line| line * 64) {
            prefetch_line(start.wrapping_add(line as usize));
        }
    }

    /// Starts writing the lines of a range back.
    #[inline]
    pub(crate) fn flush(&self, at: u64, len: u64) {
        persist::flush(self.span(at, len));
    }
}

/// Where schedules are explored others may go on here. The words are the standard library's atomics all the same: the
/// explorer knows one order of memory only, and a region of its atomics would be too large to make anew each time.
#[inline]
fn yield_point() {
    #[cfg(azekura_explore)]
    crate::mem::atomic::spin_loop();
}

/// Copies words to `to`.
///
/// # Safety
/// There must be memory of the caller's alone for as many.
#[inline]
unsafe fn copy_words(from: &[AtomicU64], to: *mut [u8; 8]) {
    // Two at a time, because of atomics the compiler makes no more of it than is said.
    let (pairs, rest) = from.as_chunks::<2>();
    for (n, pair) in pairs.iter().enumerate() {
        let words = pair.each_ref().map(|word| load_relaxed(word).to_le_bytes());
        // SAFETY: there is room for all words of `from`.
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

/// Eight bytes from `bits` behind the start of word `n` on, as far as there are words.
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
#[expect(clippy::disallowed_methods, reason = "the tests race threads, and in vfs none are scoped")]
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
    fn bytes_come_back_from_any_offset() {
        let region = region(PAGE);
        let bytes = pattern(100);
        for cut in [0, 1, 7, 8, 9, 50, 100] {
            for second in [cut, (cut + 3).min(100), 100] {
                let mut told = Vec::new();
                let parts: [&[u8]; 3] = [&bytes[..cut], &bytes[cut..second], &bytes[second..]];
                region.write(64, &parts, |at, word| told.push((at, word)));
                assert!(told.iter().all(|(at, word)| region.load(*at) == *word));
                assert_eq!((told.len(), told[0].0), (13, 64));
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
        assert_eq!(region.load(64 + 96) >> 32, 0, "what is left of the last word is zero");
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
                    // Not overwritten yet, or it would be at least fifty stores later.
                    assert!(n == 0 || bytes == [n as u8; 100] || region.load(0) > n + 40);
                    seen = n;
                }
            });
        });
    }
}

/// Lengths of regions are multiples of this, in bytes.
pub(crate) const PAGE: u64 = 4096;

/// Zeros from the allocator, aligned to a page.
pub(crate) struct ZeroedAllocation {
    start: NonNull<u8>,
    len: usize,
}

impl ZeroedAllocation {
    fn new(len: usize) -> Option<ZeroedAllocation> {
        let layout = Layout::from_size_align(len, PAGE as usize).ok().filter(|layout| layout.size() > 0)?;
        // SAFETY: the size is not zero.
        NonNull::new(unsafe { alloc_zeroed(layout) }).map(|start| ZeroedAllocation { start, len })
    }
}

impl Drop for ZeroedAllocation {
    fn drop(&mut self) {
        // SAFETY: `new` allocated it with this very layout, and the owner is going.
        unsafe { dealloc(self.start.as_ptr(), Layout::from_size_align_unchecked(self.len, PAGE as usize)) }
    }
}

/// Addresses for all that a private region may become. Small ones come from the allocator, with memory, which costs no
/// call of the system.
pub(crate) enum AddressReservation {
    Zeros(ZeroedAllocation),
    Mapped(ReservedMapping),
}

impl AddressReservation {
    const SMALL: usize = 256 << 10;

    pub(crate) fn new(len: usize) -> Option<AddressReservation> {
        if len <= AddressReservation::SMALL {
            ZeroedAllocation::new(len).map(AddressReservation::Zeros)
        } else {
            ReservedMapping::new(len).map(AddressReservation::Mapped)
        }
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        match self {
            AddressReservation::Zeros(zeros) => zeros.start,
            AddressReservation::Mapped(mapped) => mapped.start(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            AddressReservation::Zeros(zeros) => zeros.len,
            AddressReservation::Mapped(mapped) => mapped.len(),
        }
    }

    /// Gives memory to `from..to`, zeros that may be read and written.
    pub(crate) fn commit(&self, from: usize, to: usize) -> Option<()> {
        assert!(from <= to && to <= self.len());
        match self {
            AddressReservation::Zeros(_) => Some(()),
            AddressReservation::Mapped(mapped) => mapped.open(from, to),
        }
    }
}

/// Addresses without memory, which are given memory piece by piece.
#[cfg(all(unix, not(miri)))]
mod mapped {
    use std::ffi::c_void;
    use std::ptr::{self, NonNull};

    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

    use crate::mem::pages::HUGE_PAGE;

    pub(crate) struct ReservedMapping {
        /// The mapping, and where the reserve begins in it.
        base: NonNull<u8>,
        whole: usize,
        start: NonNull<u8>,
        len: usize,
    }

    impl ReservedMapping {
        pub(super) fn new(len: usize) -> Option<ReservedMapping> {
            let whole = len.checked_add(HUGE_PAGE)?;
            // SAFETY: a private anonymous mapping at an address of the system's choice touches nothing that exists.
            let base = unsafe { mmap_anonymous(ptr::null_mut(), whole, ProtFlags::empty(), MapFlags::PRIVATE).ok()? };
            let base = NonNull::new(base.cast::<u8>())?;
            // SAFETY: the mapping is longer than `len` by what aligning takes off.
            let start = unsafe { base.add(base.align_offset(HUGE_PAGE)) };
            Some(ReservedMapping { base, whole, start, len })
        }

        pub(super) fn start(&self) -> NonNull<u8> {
            self.start
        }

        pub(super) fn len(&self) -> usize {
            self.len
        }

        /// As [`AddressReservation::commit`](crate::mem::region::AddressReservation::commit), for a range
        /// that was looked at there.
        pub(super) fn open(&self, from: usize, to: usize) -> Option<()> {
            assert!(from <= to && to <= self.len);
            // SAFETY: the range lies in the mapping, which is ours; opened pages stay open, and no reference to those
            // that are not open exists.
            unsafe {
                let at: *mut c_void = self.start.add(from).as_ptr().cast();
                mprotect(at, to - from, MprotectFlags::READ | MprotectFlags::WRITE).ok()?;
                advise_huge(at, to - from);
            }
            Some(())
        }
    }

    /// # Safety
    /// The range is mapped.
    #[cfg(target_os = "linux")]
    unsafe fn advise_huge(start: *mut c_void, len: usize) {
        // SAFETY: passed on to the caller. The advice changes how the pages are backed, not what they hold; a system
        // without huge pages refuses it.
        let _ = unsafe { rustix::mm::madvise(start, len, rustix::mm::Advice::LinuxHugepage) };
    }

    /// # Safety
    /// None.
    #[cfg(not(target_os = "linux"))]
    unsafe fn advise_huge(_start: *mut c_void, _len: usize) {}

    impl Drop for ReservedMapping {
        fn drop(&mut self) {
            // SAFETY: the whole of one mapping of ours, and the owner is going. A failure leaves it mapped, no more.
            let _ = unsafe { munmap(self.base.as_ptr().cast(), self.whole) };
        }
    }
}

/// Where there is no way to reserve addresses: memory at once.
#[cfg(any(not(unix), miri))]
mod mapped {
    use std::ptr::NonNull;

    use crate::mem::region::ZeroedAllocation;

    pub(crate) struct ReservedMapping(ZeroedAllocation);

    impl ReservedMapping {
        pub(super) fn new(len: usize) -> Option<ReservedMapping> {
            ZeroedAllocation::new(len).map(ReservedMapping)
        }

        pub(super) fn start(&self) -> NonNull<u8> {
            self.0.start
        }

        pub(super) fn len(&self) -> usize {
            self.0.len
        }

        pub(super) fn open(&self, _from: usize, _to: usize) -> Option<()> {
            Some(())
        }
    }
}
