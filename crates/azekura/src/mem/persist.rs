//! Flushes cache lines to persistent memory, which keeps its contents without power.
#![allow(unsafe_code)]

use std::sync::atomic::AtomicU64;

/// Length of a cache line in bytes, the unit that is written back.
pub(crate) const LINE: usize = 64;

/// Whether this machine can flush cache lines. If not, no mapping is treated as one that survives power loss.
pub(crate) fn can_flush() -> bool {
    arch::can_flush()
}

/// Starts to write back the cache lines of `words`. They are persistent once [`drain`] has returned on the same
/// thread.
#[inline]
pub(crate) fn flush(words: &[AtomicU64]) {
    let start: *const u8 = words.as_ptr().cast();
    let gap = start.addr() % LINE;
    for at in (0..gap + size_of_val(words)).step_by(LINE) {
        // The start of the cache line. It may be before `words`, but the line contains bytes of `words`.
        arch::flush_line(start.wrapping_sub(gap).wrapping_add(at));
    }
}

/// Waits until all lines that this thread has flushed are persistent.
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

    static FLUSH_INSTRUCTION: AtomicU8 = AtomicU8::new(UNKNOWN);

    /// Chooses, of the instructions that the processor has, the one that affects its caches least.
    #[cold]
    #[allow(unused_unsafe, reason = "the functions are safe since Rust 1.93")]
    fn choose() -> u8 {
        // SAFETY: every x86-64 processor has the instruction. Leaf 7 exists only if leaf 0 reports a maximum leaf of at
        // least 7.
        let features = unsafe { if __cpuid(0).eax >= 7 { __cpuid_count(7, 0).ebx } else { 0 } };
        let instruction = match (features >> 24 & 1, features >> 23 & 1) {
            (1, _) => CLWB,
            (_, 1) => CLFLUSHOPT,
            _ => CLFLUSH,
        };
        FLUSH_INSTRUCTION.store(instruction, Ordering::Relaxed);
        instruction
    }

    pub(super) fn can_flush() -> bool {
        true
    }

    #[inline]
    pub(super) fn flush_line(at: *const u8) {
        let instruction = match FLUSH_INSTRUCTION.load(Ordering::Relaxed) {
            UNKNOWN => choose(),
            instruction => instruction,
        };
        // SAFETY: the line contains bytes of a slice that is borrowed, so the address is mapped, and writing a line
        // back changes no byte of it. `clwb` and `clflushopt` are used only if the processor reports them, and every
        // x86-64 processor has `clflush`.
        unsafe {
            match instruction {
                CLWB => asm!("clwb [{}]", in(reg) at, options(nostack, preserves_flags)),
                CLFLUSHOPT => asm!("clflushopt [{}]", in(reg) at, options(nostack, preserves_flags)),
                _ => _mm_clflush(at),
            }
        }
    }

    #[inline]
    pub(super) fn drain() {
        // SAFETY: SSE is part of the architecture, and a fence has no other precondition.
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
            // SAFETY: the line contains bytes of a slice that is borrowed, so the address is mapped, and cleaning the
            // line to the point of persistence changes no byte. The instruction (`dc cvap`) is given by its encoding,
            // because the assembler may not support its name.
            unsafe { asm!("sys #3, c7, c12, #1, {}", in(reg) at, options(nostack, preserves_flags)) }
        }
    }

    #[inline]
    pub(super) fn drain() {
        // SAFETY: a barrier has no precondition.
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
