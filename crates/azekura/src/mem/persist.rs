//! Pushing cache lines out to memory that keeps its bytes without power.
#![allow(unsafe_code)]

use std::sync::atomic::AtomicU64;

/// The bytes that are written back together.
pub(crate) const LINE: usize = 64;

/// Whether this machine can push lines out. Without it a mapping is never taken for one that survives power loss.
pub(crate) fn can_flush() -> bool {
    arch::can_flush()
}

/// Starts writing the lines of `words` back. They are there once [`drain`] has returned on the same thread.
#[inline]
pub(crate) fn flush(words: &[AtomicU64]) {
    let start: *const u8 = words.as_ptr().cast();
    let gap = start.addr() % LINE;
    for at in (0..gap + size_of_val(words)).step_by(LINE) {
        // Moved to the first byte of the line it stands in: an address with the bytes of `words` in its line.
        arch::flush_line(start.wrapping_sub(gap).wrapping_add(at));
    }
}

/// Returns once all lines that this thread has flushed are where they survive.
#[inline]
pub(crate) fn drain() {
    arch::drain();
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod arch {
    use std::arch::asm;
    use std::arch::x86_64::{__cpuid, __cpuid_count, _mm_clflush, _mm_sfence};
    use std::sync::atomic::{AtomicU8, Ordering};

    const UNKNOWN: u8 = 0;
    const CLFLUSH: u8 = 1;
    const CLFLUSHOPT: u8 = 2;
    const CLWB: u8 = 3;

    static WAY: AtomicU8 = AtomicU8::new(UNKNOWN);

    /// Of the ways that the processor has, the one that disturbs its caches least.
    #[cold]
    fn choose() -> u8 {
        // Leaf 7 exists only if leaf 0 says that there are that many.
        let features = if __cpuid(0).eax >= 7 { __cpuid_count(7, 0).ebx } else { 0 };
        let way = match (features >> 24 & 1, features >> 23 & 1) {
            (1, _) => CLWB,
            (_, 1) => CLFLUSHOPT,
            _ => CLFLUSH,
        };
        WAY.store(way, Ordering::Relaxed);
        way
    }

    pub(super) fn can_flush() -> bool {
        true
    }

    #[inline]
    pub(super) fn flush_line(at: *const u8) {
        let way = match WAY.load(Ordering::Relaxed) {
            UNKNOWN => choose(),
            way => way,
        };
        // SAFETY: the line holds bytes of a slice that is borrowed, so the address is mapped; writing a line back
        // changes no byte of it. The two instructions are used only where the processor says that it has them, and
        // every x86-64 has clflush.
        unsafe {
            match way {
                CLWB => asm!("clwb [{}]", in(reg) at, options(nostack, preserves_flags)),
                CLFLUSHOPT => asm!("clflushopt [{}]", in(reg) at, options(nostack, preserves_flags)),
                _ => _mm_clflush(at),
            }
        }
    }

    #[inline]
    pub(super) fn drain() {
        // SAFETY: SSE is part of the architecture, and a fence has no other condition.
        unsafe { _mm_sfence() }
    }
}

#[cfg(all(target_arch = "aarch64", target_os = "linux", not(miri)))]
mod arch {
    use std::arch::asm;

    pub(super) fn can_flush() -> bool {
        std::arch::is_aarch64_feature_detected!("dpb")
    }

    #[inline]
    pub(super) fn flush_line(at: *const u8) {
        if can_flush() {
            // SAFETY: the line holds bytes of a slice that is borrowed; cleaning it to the point of persistence changes
            // no byte. By its encoding, since the assembler may not know the name (`dc cvap`).
            unsafe { asm!("sys #3, c7, c12, #1, {}", in(reg) at, options(nostack, preserves_flags)) }
        }
    }

    #[inline]
    pub(super) fn drain() {
        // SAFETY: a barrier has no condition.
        unsafe { asm!("dsb sy", options(nostack, preserves_flags)) }
    }
}

#[cfg(any(miri, not(any(target_arch = "x86_64", all(target_arch = "aarch64", target_os = "linux")))))]
mod arch {
    use std::sync::atomic::{Ordering, fence};

    pub(super) fn can_flush() -> bool {
        false
    }

    pub(super) fn flush_line(_at: *const u8) {}

    pub(super) fn drain() {
        fence(Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn flushing_changes_nothing() {
        let words: Vec<AtomicU64> = (0..100).map(AtomicU64::new).collect();
        for from in 0..20 {
            for to in from..100 {
                flush(&words[from..to]);
            }
            drain();
        }
        assert!(words.iter().enumerate().all(|(n, word)| word.load(Ordering::Relaxed) == n as u64));
        assert!(can_flush() || cfg!(any(miri, not(target_arch = "x86_64"))));
    }
}
