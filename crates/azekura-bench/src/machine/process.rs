//! What this process has used, as the kernel counts it. Every measurement runs in a process of its own, so these are
//! clean.

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::ops::Sub;

/// CPU time and bytes moved since the process began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Usage {
    /// CPU seconds of all threads.
    pub(crate) cpu_s: f64,
    /// Calls of `read` and its kin.
    pub(crate) reads: u64,
    /// Bytes handed to `write` and its kin.
    pub(crate) syscall_write_bytes: u64,
    /// Bytes of pages made dirty (or written directly), stores to mapped files included.
    pub(crate) dirtied_bytes: u64,
    /// Bytes fetched from the device.
    pub(crate) device_read_bytes: u64,
}

impl Usage {
    /// Up to now.
    pub(crate) fn now() -> Usage {
        let cpu_s = seconds(ClockId::ProcessCPUTime);
        let io = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
        Usage {
            cpu_s,
            reads: field(&io, "syscr:"),
            syscall_write_bytes: field(&io, "wchar:"),
            dirtied_bytes: field(&io, "write_bytes:"),
            device_read_bytes: field(&io, "read_bytes:"),
        }
    }
}

impl Sub for Usage {
    type Output = Usage;

    fn sub(self, earlier: Usage) -> Usage {
        Usage {
            cpu_s: self.cpu_s - earlier.cpu_s,
            reads: self.reads.saturating_sub(earlier.reads),
            syscall_write_bytes: self.syscall_write_bytes.saturating_sub(earlier.syscall_write_bytes),
            dirtied_bytes: self.dirtied_bytes.saturating_sub(earlier.dirtied_bytes),
            device_read_bytes: self.device_read_bytes.saturating_sub(earlier.device_read_bytes),
        }
    }
}

/// CPU seconds of this thread.
pub(crate) fn thread_cpu_s() -> f64 {
    seconds(ClockId::ThreadCPUTime)
}

fn seconds(clock: ClockId) -> f64 {
    let time = clock_gettime(clock);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Highest resident bytes since the process began, mapped files included.
pub(crate) fn peak_rss_bytes() -> u64 {
    field(&status(), "VmHWM:") * 1024
}

/// Resident bytes now.
pub(crate) fn rss_bytes() -> u64 {
    field(&status(), "VmRSS:") * 1024
}

/// Resident bytes now that are not pages of files.
pub(crate) fn anonymous_rss_bytes() -> u64 {
    field(&status(), "RssAnon:") * 1024
}

fn status() -> String {
    std::fs::read_to_string("/proc/self/status").unwrap_or_default()
}

/// The number behind `name` at the beginning of a line; 0 if there is none.
fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()).and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::{Usage, field, peak_rss_bytes, thread_cpu_s};

    #[test]
    fn fields_are_found_at_the_beginning_of_a_line() {
        let io = "rchar: 5\nwchar: 7\nread_bytes: 1\nwrite_bytes: 12\ncancelled_write_bytes: 3\n";
        assert_eq!(field(io, "write_bytes:"), 12);
        assert_eq!(field(io, "wchar:"), 7);
        assert_eq!(field("VmHWM:\t  2048 kB\n", "VmHWM:"), 2048);
        assert_eq!(field(io, "nothing:"), 0);
    }

    #[test]
    fn usage_grows_with_work() {
        let (before, thread) = (Usage::now(), thread_cpu_s());
        let mut x = 1u64;
        while (Usage::now() - before).cpu_s < 0.001 || thread_cpu_s() - thread < 0.001 {
            x = std::hint::black_box(x.wrapping_mul(3));
        }
        assert!(Usage::now().cpu_s > before.cpu_s);
        let awake = thread_cpu_s();
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(thread_cpu_s() - awake < 0.025, "a thread that sleeps uses no CPU");
        assert!(peak_rss_bytes() > 0);
    }
}
