//! What the device below a directory can do, measured without any engine: the limits that figures are read against.

use crate::failure::Result;
use crate::machine::meter::{histogram, percentile_us};
use crate::workload::rng::Rng;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

const FILE_BYTES: u64 = 128 << 20;
const CHUNK: usize = 1 << 20;
const PAGE: usize = 4096;

/// Raw limits of the device and file system.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct DeviceLimits {
    /// Buffered 1 MiB `pwrite`s into a new file, the closing `fdatasync` included, MB/s.
    pub(crate) pwrite_mb_per_s: f64,
    /// `pwrite` of 128 bytes into a file already written, without a sync, operations per second.
    pub(crate) small_pwrite_per_s: f64,
    /// `pwrite` of 4 KiB into a file already written, then `fdatasync`: mean microseconds.
    pub(crate) fdatasync_mean_us: f64,
    /// The same, median.
    pub(crate) fdatasync_p50_us: f64,
    /// Random 4 KiB `pread`s past the page cache (`O_DIRECT`), one at a time, per second; `None` where that is not
    /// offered.
    pub(crate) direct_pread_per_s: Option<f64>,
    /// Random 4 KiB `pread`s from the page cache, per second.
    pub(crate) cached_pread_per_s: f64,
}

/// Measures the limits below `dir`, in about four times `each` and the writing of 128 MiB.
pub(crate) fn measure(dir: &Path, each: Duration) -> Result<DeviceLimits> {
    let path = dir.join("device-limits");
    let limits = measure_file(&path, each);
    let _ = std::fs::remove_file(&path); // it may not exist
    limits
}

fn measure_file(path: &Path, each: Duration) -> Result<DeviceLimits> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
    let pwrite_mb_per_s = fill(&file)?;
    let mut rng = Rng::new(1);
    let small = rate(each, |i| file.write_all_at(&[7; 128], i * 128 % FILE_BYTES))?;
    let mut syncs = histogram();
    let page = [9; PAGE];
    rate(each, |i| {
        let start = Instant::now();
        file.write_all_at(&page, i * PAGE as u64 % FILE_BYTES)?;
        file.sync_data()?;
        syncs.saturating_record(start.elapsed().as_nanos() as u64);
        Ok(())
    })?;
    let mut page = [0; PAGE];
    let cached = rate(each, |_| file.read_exact_at(&mut page, random_page(&mut rng)))?;
    Ok(DeviceLimits {
        pwrite_mb_per_s,
        small_pwrite_per_s: small,
        fdatasync_mean_us: syncs.mean() / 1000.0,
        fdatasync_p50_us: percentile_us(&syncs, 50.0),
        direct_pread_per_s: direct_preads(path, each, &mut rng),
        cached_pread_per_s: cached,
    })
}

/// Writes the whole file and gives MB/s.
fn fill(file: &File) -> Result<f64> {
    let mut rng = Rng::new(2);
    let chunk: Vec<u8> = (0..CHUNK / 8).flat_map(|_| rng.next().to_le_bytes()).collect();
    let start = Instant::now();
    for at in (0..FILE_BYTES).step_by(CHUNK) {
        file.write_all_at(&chunk, at)?;
    }
    file.sync_data()?;
    Ok(FILE_BYTES as f64 / 1e6 / start.elapsed().as_secs_f64())
}

fn direct_preads(path: &Path, each: Duration, rng: &mut Rng) -> Option<f64> {
    let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    let mut buffer = vec![0; PAGE * 2];
    let skip = buffer.as_ptr().align_offset(PAGE);
    let page = buffer.get_mut(skip..skip + PAGE)?;
    rate(each, |_| file.read_exact_at(page, random_page(rng))).ok()
}

fn random_page(rng: &mut Rng) -> u64 {
    rng.below(FILE_BYTES / PAGE as u64) * PAGE as u64
}

/// Repeats `act` for a while and gives its rate per second.
fn rate(each: Duration, mut act: impl FnMut(u64) -> std::io::Result<()>) -> Result<f64> {
    let start = Instant::now();
    let mut count = 0;
    while start.elapsed() < each {
        act(count)?;
        count += 1;
    }
    Ok(count as f64 / start.elapsed().as_secs_f64())
}
