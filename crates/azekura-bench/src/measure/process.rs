//! Counters of this process, as the kernel reports them. Each measurement has a process of its own.

use derive_more::Sub;
use rustix::time::{ClockId, clock_gettime};

/// CPU time and I/O since the process began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Sub)]
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
        let io = read("self/io");
        Usage {
            cpu_s: cpu_seconds(ClockId::ProcessCPUTime),
            reads: number(&io, "syscr:"),
            syscall_write_bytes: number(&io, "wchar:"),
            dirtied_bytes: number(&io, "write_bytes:"),
            device_read_bytes: number(&io, "read_bytes:"),
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

/// A memory figure of `/proc/self/status` in bytes: `VmHWM` (peak), `VmRSS` (now), `RssAnon` (now, without files).
pub(crate) fn memory_bytes(field: &str) -> u64 {
    number(&read("self/status"), &format!("{field}:")) * 1024
}

/// A file of `/proc`; empty if there is none.
pub(crate) fn read(path: &str) -> String {
    std::fs::read_to_string(format!("/proc/{path}")).unwrap_or_default()
}

/// The text after `name` at the beginning of a line; empty if there is none.
pub(crate) fn field<'a>(text: &'a str, name: &str) -> &'a str {
    text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim_matches([' ', '\t', ':'])
}

/// The number after `name` at the beginning of a line; 0 if there is none.
pub(crate) fn number(text: &str, name: &str) -> u64 {
    field(text, name).split_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::{Usage, memory_bytes, number, thread_cpu_s};

    #[test]
    fn numbers_are_read_at_the_start_of_a_line() {
        let io = "rchar: 5\nwchar: 7\nread_bytes: 1\nwrite_bytes: 12\ncancelled_write_bytes: 3\n";
        assert_eq!((number(io, "write_bytes:"), number(io, "wchar:"), number(io, "nothing:")), (12, 7, 0));
        assert_eq!(number("VmHWM:\t  2048 kB\n", "VmHWM:"), 2048);
    }

    #[test]
    fn usage_grows_with_work() {
        let (before, thread) = (Usage::now(), thread_cpu_s());
        let mut x = 1u64;
        while (Usage::now() - before).cpu_s < 0.001 || thread_cpu_s() - thread < 0.001 {
            x = std::hint::black_box(x.wrapping_mul(3));
        }
        assert!(Usage::now().cpu_s > before.cpu_s && memory_bytes("VmHWM") > 0);
    }
}
