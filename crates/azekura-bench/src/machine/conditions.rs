//! The conditions of a run: without them its figures mean nothing.

use crate::failure::Result;
use crate::machine::device::{self, DeviceLimits};
use crate::machine::harness::{self, HarnessCost};
use crate::workload::Shape;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::Duration;

/// Where and under what load a run was made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Conditions {
    /// One, five and fifteen minute load averages before the first measurement.
    pub(crate) load_average_before: [f64; 3],
    /// The same behind the last.
    pub(crate) load_average_after: [f64; 3],
    /// Device limits before the first measurement.
    pub(crate) device_before: DeviceLimits,
    /// Device limits behind the last: how far the machine drifted.
    pub(crate) device_after: DeviceLimits,
    /// What the harness costs per operation on records of this size.
    pub(crate) harness: HarnessCost,
    /// Processors.
    pub(crate) cpus: usize,
    /// Their model.
    pub(crate) cpu_model: String,
    /// Bytes of memory.
    pub(crate) memory_bytes: u64,
    /// Kernel release.
    pub(crate) kernel: String,
    /// Type of the file system measured on.
    pub(crate) file_system: String,
}

impl Conditions {
    /// Measures before the run; what comes after it is filled in by [`Conditions::finish`].
    pub(crate) fn begin(dir: &Path, shape: &Shape, each: Duration) -> Result<Conditions> {
        let device = device::measure(dir, each)?;
        let cpuinfo = read("/proc/cpuinfo");
        let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
        let meminfo = read("/proc/meminfo");
        let memory = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap_or_default();
        let kilobytes: u64 = memory.trim().trim_end_matches(" kB").parse().unwrap_or(0);
        Ok(Conditions {
            load_average_before: load_average(),
            load_average_after: load_average(),
            device_before: device,
            device_after: device,
            harness: harness::measure(shape),
            cpus: std::thread::available_parallelism().map_or(1, |n| n.get()),
            cpu_model: model.trim_start_matches([' ', '\t', ':']).to_owned(),
            memory_bytes: kilobytes * 1024,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            file_system: file_system(dir),
        })
    }

    /// Measures once more, behind the run.
    pub(crate) fn finish(&mut self, dir: &Path, each: Duration) -> Result<()> {
        self.load_average_after = load_average();
        self.device_after = device::measure(dir, each)?;
        Ok(())
    }
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// One, five and fifteen minute load averages.
pub(crate) fn load_average() -> [f64; 3] {
    let text = read("/proc/loadavg");
    let mut numbers = text.split_whitespace().map(|number| number.parse().unwrap_or(0.0));
    [(); 3].map(|()| numbers.next().unwrap_or(0.0))
}

/// The type of the file system that `dir` lies on: that of the longest mount point above it.
fn file_system(dir: &Path) -> String {
    let Ok(dir) = dir.canonicalize() else { return String::new() };
    let mounts = read("/proc/self/mounts");
    let mut best = (0, "");
    for line in mounts.lines() {
        let mut words = line.split(' ').skip(1);
        if let (Some(point), Some(kind)) = (words.next(), words.next())
            && dir.starts_with(point)
            && point.len() >= best.0
        {
            best = (point.len(), kind);
        }
    }
    best.1.to_owned()
}
