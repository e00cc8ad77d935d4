//! The machine: what the device below a directory can do without any engine, and the conditions of a run.

use crate::error::Result;
use crate::measure::clock::{Timed, repeat};
use crate::measure::meter::{histogram, percentile_us};
use crate::measure::process::{field, number, read};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Instant;

const FILE_BYTES: u64 = 128 << 20;
const CHUNK: usize = 1 << 20;
const PAGE: usize = 4096;

/// Raw limits of the device and file system.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct DeviceLimits {
    /// Buffered 1 MiB `pwrite`s into a new file, the closing `fdatasync` included, MB/s.
    pub(crate) pwrite_mb_per_s: f64,
    /// `pwrite` of 128 bytes into a file already written, without a sync, operations per second.
    pub(crate) small_pwrite_per_s: f64,
    /// `pwrite` of 4 KiB into a file already written, then `fdatasync`: mean microseconds.
    pub(crate) fdatasync_mean_us: f64,
    /// The same, median.
    pub(crate) fdatasync_p50_us: f64,
    /// Random 4 KiB `pread`s past the page cache (`O_DIRECT`), one at a time, per second; `None` if not offered.
    pub(crate) direct_pread_per_s: Option<f64>,
    /// Random 4 KiB `pread`s from the page cache, per second.
    pub(crate) cached_pread_per_s: f64,
}

impl DeviceLimits {
    /// Measures the limits below `dir` in about four times `seconds` and the writing of 128 MiB.
    pub(crate) fn measure(dir: &Path, seconds: f64) -> Result<DeviceLimits> {
        let path = dir.join("device-limits");
        let limits = DeviceLimits::measure_file(&path, seconds);
        let _ = std::fs::remove_file(&path); // it may not exist
        limits
    }

    fn measure_file(path: &Path, seconds: f64) -> Result<DeviceLimits> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
        let mut rng = SmallRng::seed_from_u64(1);
        let mut chunk = vec![0; CHUNK];
        rng.fill(&mut chunk[..]);
        let start = Instant::now();
        for at in (0..FILE_BYTES).step_by(CHUNK) {
            file.write_all_at(&chunk, at)?;
        }
        file.sync_data()?;
        let pwrite_mb_per_s = FILE_BYTES as f64 / 1e6 / start.elapsed().as_secs_f64();
        let small = repeat(seconds, 1, |i| Ok(file.write_all_at(&[7; 128], i * 128 % FILE_BYTES)?))?;
        let mut syncs = histogram();
        repeat(seconds, 1, |i| {
            let start = Instant::now();
            file.write_all_at(&chunk[..PAGE], i * PAGE as u64 % FILE_BYTES)?;
            file.sync_data()?;
            syncs.saturating_record(start.elapsed().as_nanos() as u64);
            Ok(())
        })?;
        let direct = OpenOptions::new().read(true).custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32).open(path);
        Ok(DeviceLimits {
            pwrite_mb_per_s,
            small_pwrite_per_s: small.per_s(),
            fdatasync_mean_us: syncs.mean() / 1000.0,
            fdatasync_p50_us: percentile_us(&syncs, 50.0),
            direct_pread_per_s: direct
                .ok()
                .and_then(|file| random_reads(&file, seconds).ok())
                .map(|timed| timed.per_s()),
            cached_pread_per_s: random_reads(&file, seconds)?.per_s(),
        })
    }
}

fn random_reads(file: &File, seconds: f64) -> Result<Timed> {
    let mut rng = SmallRng::seed_from_u64(2);
    let mut buffer = vec![0; PAGE * 2];
    let skip = buffer.as_ptr().align_offset(PAGE); // O_DIRECT needs an aligned buffer
    let page = buffer.get_mut(skip..skip + PAGE).ok_or("a buffer cannot be aligned")?;
    repeat(seconds, 1, |_| Ok(file.read_exact_at(page, rng.random_range(0..FILE_BYTES / PAGE as u64) * PAGE as u64)?))
}

/// What the bench itself costs for each operation; included in the figures of every engine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct HarnessCost {
    /// Making a key and a value, reading the clock, counting: nanoseconds.
    pub(crate) put_ns: f64,
    /// Making a key, checking a value, reading the clock, counting: nanoseconds.
    pub(crate) get_ns: f64,
}

/// The machine of a run, its load and its device, before and after.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Conditions {
    pub(crate) load_average_before: [f64; 3],
    pub(crate) load_average_after: [f64; 3],
    pub(crate) device_before: DeviceLimits,
    pub(crate) device_after: DeviceLimits,
    pub(crate) harness: HarnessCost,
    pub(crate) cpus: usize,
    pub(crate) cpu_model: String,
    pub(crate) memory_bytes: u64,
    pub(crate) kernel: String,
    pub(crate) file_system: String,
}

impl Conditions {
    /// Measures before the run; [`Conditions::finish`] completes it afterwards.
    pub(crate) fn begin(dir: &Path, harness: HarnessCost, seconds: f64) -> Result<Conditions> {
        let device = DeviceLimits::measure(dir, seconds)?;
        Ok(Conditions {
            load_average_before: load_average(),
            load_average_after: load_average(),
            device_before: device,
            device_after: device,
            harness,
            cpus: processors(),
            cpu_model: field(&read("cpuinfo"), "model name").to_owned(),
            memory_bytes: number(&read("meminfo"), "MemTotal:") * 1024,
            kernel: read("sys/kernel/osrelease").trim().to_owned(),
            file_system: file_system(dir),
        })
    }

    /// Measures once more, after the run.
    pub(crate) fn finish(&mut self, dir: &Path, seconds: f64) -> Result<()> {
        self.load_average_after = load_average();
        self.device_after = DeviceLimits::measure(dir, seconds)?;
        Ok(())
    }
}

/// Number of processors.
pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

fn load_average() -> [f64; 3] {
    let text = read("loadavg");
    let mut numbers = text.split_whitespace().map(|number| number.parse().unwrap_or(0.0));
    [(); 3].map(|()| numbers.next().unwrap_or(0.0))
}

/// The type of the file system at `dir`: that of the longest mount point above it.
fn file_system(dir: &Path) -> String {
    let (mounts, dir) = (read("self/mounts"), dir.canonicalize().unwrap_or_default());
    let mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let above = mounts.filter(|mount| mount.len() > 2 && dir.starts_with(mount[1]));
    above.max_by_key(|mount| mount[1].len()).map_or_else(String::new, |mount| mount[2].to_owned())
}
