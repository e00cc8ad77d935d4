//! Counters of this process, as the kernel reports them, and repeated work on a clock, with the processor's instruction
//! counter where the system offers it. Each measurement has a process of its own.

use crate::error::Result;
use derive_more::{Add, Sub};
use perf_event::Builder;
use procfs::process::{Process, Status};
use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// CPU time and I/O since the process began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Add, Sub)]
pub(crate) struct Usage {
    /// CPU seconds of all threads.
    pub(crate) cpu_s: f64,
    /// Calls of `read` and similar.
    pub(crate) reads: u64,
    /// Bytes passed to `write` and similar.
    pub(crate) syscall_write_bytes: u64,
    /// Bytes of pages made dirty or written directly, stores to mapped files included.
    pub(crate) dirtied_bytes: u64,
    /// Bytes read from the device.
    pub(crate) device_read_bytes: u64,
}

impl Usage {
    /// Usage up to now.
    pub(crate) fn now() -> Usage {
        let io = Process::myself().and_then(|own| own.io()).expect("a process can read its own counters");
        Usage {
            cpu_s: cpu_seconds(ClockId::ProcessCPUTime),
            reads: io.syscr,
            syscall_write_bytes: io.wchar,
            dirtied_bytes: io.write_bytes,
            device_read_bytes: io.read_bytes,
        }
    }

    /// Bytes written: the larger of both counts, so that neither a mapped log nor small writes are missed.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.dirtied_bytes.max(self.syscall_write_bytes)
    }
}

/// CPU seconds on a clock of the kernel.
pub(crate) fn cpu_seconds(clock: ClockId) -> f64 {
    let time = clock_gettime(clock);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// CPU seconds of this thread.
pub(crate) fn thread_cpu_s() -> f64 {
    cpu_seconds(ClockId::ThreadCPUTime)
}

/// A memory figure of this process in bytes: `vmhwm` (peak), `vmrss` (now), `rssanon` (now, without files).
pub(crate) fn memory_bytes(figure: impl FnOnce(Status) -> Option<u64>) -> u64 {
    let status = Process::myself().and_then(|own| own.status()).expect("a process can read its own status");
    figure(status).unwrap_or(0) * 1024
}

/// Milliseconds since `start`, rounded to microseconds.
pub(crate) fn millis(start: Instant) -> f64 {
    (start.elapsed().as_secs_f64() * 1e6).round() / 1e3
}

/// Repetitions and the time they took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timed {
    pub(crate) count: u64,
    pub(crate) seconds: f64,
    /// Instructions of this thread in user mode, where the system lets a process count them.
    pub(crate) instructions: Option<u64>,
}

impl Timed {
    pub(crate) fn per_s(&self) -> f64 {
        self.count as f64 / self.seconds
    }

    /// Nanoseconds for each repetition.
    pub(crate) fn ns(&self) -> f64 {
        self.seconds * 1e9 / self.count as f64
    }

    /// Instructions for each repetition.
    pub(crate) fn instructions_each(&self) -> Option<f64> {
        self.instructions.map(|count| count as f64 / self.count as f64)
    }
}

/// Calls `act` with 0, 1, 2, … in bundles until `seconds` have passed on the clock `now`; at least one bundle.
pub(crate) fn repeat_on(
    now: impl Fn() -> f64,
    seconds: f64,
    bundle: u64,
    mut act: impl FnMut(u64) -> Result<()>,
) -> Result<Timed> {
    let mut counter = Builder::new().build().ok();
    let counting = counter.as_mut().is_some_and(|counter| counter.reset().and_then(|()| counter.enable()).is_ok());
    let start = now();
    let mut count = 0;
    while count == 0 || now() - start < seconds {
        for _ in 0..bundle {
            act(count)?;
            count += 1;
        }
    }
    let seconds = now() - start;
    let counted =
        counter.filter(|_| counting).and_then(|mut counter| counter.disable().and_then(|()| counter.read()).ok());
    // A machine that offers the counter but counts nothing has none.
    Ok(Timed { count, seconds, instructions: counted.filter(|count| *count > 0) })
}

/// The same on the clock of the wall.
pub(crate) fn repeat(seconds: f64, bundle: u64, act: impl FnMut(u64) -> Result<()>) -> Result<Timed> {
    let start = Instant::now();
    repeat_on(|| start.elapsed().as_secs_f64(), Duration::try_from_secs_f64(seconds)?.as_secs_f64(), bundle, act)
}

#[cfg(test)]
mod tests {
    use super::{Usage, memory_bytes, repeat, thread_cpu_s};

    #[test]
    fn usage_grows_with_work() {
        let (before, thread) = (Usage::now(), thread_cpu_s());
        let mut x = 1u64;
        while (Usage::now() - before).cpu_s < 0.001 || thread_cpu_s() - thread < 0.001 {
            x = std::hint::black_box(x.wrapping_mul(3));
        }
        assert!(Usage::now().cpu_s > before.cpu_s && memory_bytes(|own| own.vmhwm) > 0);
    }

    #[test]
    fn more_work_needs_more_instructions() {
        let work = |n: u64| (0..n).fold(1u64, |x, i| std::hint::black_box(x.wrapping_mul(i | 1)));
        let count = |n: u64| {
            repeat(0.0, 1, |_| {
                work(n);
                Ok(())
            })
            .unwrap()
        };
        let (few, many) = (count(1000), count(1_000_000));
        assert_eq!((few.count, few.instructions.is_some()), (1, many.instructions.is_some()));
        if let Some((few, many)) = few.instructions.zip(many.instructions) {
            assert!(few >= 1000 && many > 10 * few, "{few} {many}");
        }
    }
}
