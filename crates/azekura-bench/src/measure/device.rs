//! The machine: limits of the device below a directory without any engine, and the conditions of a run.

use crate::error::Result;
use crate::measure::meter::{histogram, percentile_us};
use crate::measure::process::repeat;
use anyhow::Context;
use procfs::{CpuInfo, Current, LoadAverage, Meminfo};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use rustix::system::uname;
use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Instant;
use tempfile::NamedTempFile;

/// Seconds for each of the measurements of the device.
const SECONDS: f64 = 0.2;
const FILE_BYTES: u64 = 128 << 20;
const CHUNK: usize = 1 << 20;
const PAGE: usize = 4096;

/// Measures the limits of the device below `dir` in about four times [`SECONDS`] and the writing of 128 MiB. Rates per
/// second and times of: 1 MiB writes into a new file with the closing `fdatasync` (MB/s); 128-byte writes into an
/// existing file without a sync; 4 KiB writes followed by `fdatasync`; random 4 KiB reads past the page cache, null if
/// `O_DIRECT` is not offered; random 4 KiB reads from the page cache.
fn device_limits(dir: &Path) -> Result<Value> {
    let named = NamedTempFile::new_in(dir)?;
    let file = named.as_file();
    let mut chunk = vec![0; CHUNK];
    SmallRng::seed_from_u64(1).fill(&mut chunk[..]);
    let start = Instant::now();
    for at in (0..FILE_BYTES).step_by(CHUNK) {
        file.write_all_at(&chunk, at)?;
    }
    file.sync_data()?;
    let pwrite_mb_per_s = FILE_BYTES as f64 / 1e6 / start.elapsed().as_secs_f64();
    let small = repeat(SECONDS, 1, |i| Ok(file.write_all_at(&[7; 128], i * 128 % FILE_BYTES)?))?;
    let mut syncs = histogram();
    repeat(SECONDS, 1, |i| {
        let start = Instant::now();
        file.write_all_at(&chunk[..PAGE], i * PAGE as u64 % FILE_BYTES)?;
        file.sync_data()?;
        syncs.saturating_record(start.elapsed().as_nanos() as u64);
        Ok(())
    })?;
    let direct =
        OpenOptions::new().read(true).custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32).open(named.path());
    let direct = direct.ok().and_then(|file| random_reads(&file).ok());
    Ok(json!({
        "pwrite_mb_per_s": pwrite_mb_per_s, "small_pwrite_per_s": small.per_s(),
        "fdatasync_mean_us": syncs.mean() / 1000.0, "fdatasync_p50_us": percentile_us(&syncs, 50.0),
        "direct_pread_per_s": direct, "cached_pread_per_s": random_reads(file)?,
    }))
}

/// Random reads of 4 KiB per second.
fn random_reads(file: &File) -> Result<f64> {
    let mut rng = SmallRng::seed_from_u64(2);
    let mut buffer = vec![0; PAGE * 2];
    let skip = buffer.as_ptr().align_offset(PAGE); // O_DIRECT needs an aligned buffer
    let page = buffer.get_mut(skip..skip + PAGE).context("a buffer cannot be aligned")?;
    let mut read = |_| Ok(file.read_exact_at(page, rng.random_range(0..FILE_BYTES / PAGE as u64) * PAGE as u64)?);
    Ok(repeat(SECONDS, 1, &mut read)?.per_s())
}

/// Carries out `act`. Returns its result with the conditions that are printed with every answer: the machine, and its
/// load and its device before and after.
pub(crate) fn with_conditions<T>(dir: &Path, act: impl FnOnce() -> Result<T>) -> Result<(T, Value)> {
    let limits = device_limits(dir)?;
    let mut conditions = json!({
        "load_average_before": load_average()?, "device_before": limits, "cpus": processors(),
        "cpu_model": CpuInfo::current()?.model_name(0), "memory_bytes": Meminfo::current()?.mem_total,
        "kernel": uname().release().to_str()?, "file_system": file_system(dir)?,
    });
    let result = act()?;
    conditions["load_average_after"] = json!(load_average()?);
    conditions["device_after"] = device_limits(dir)?;
    Ok((result, conditions))
}

/// Number of processors.
pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn load_average() -> Result<[f64; 3]> {
    let LoadAverage { one, five, fifteen, .. } = LoadAverage::current()?;
    Ok([one, five, fifteen].map(|load| (f64::from(load) * 100.0).round() / 100.0))
}

/// The type of the file system at `dir`: that of the longest mount point above it.
fn file_system(dir: &Path) -> Result<Option<String>> {
    let dir = dir.canonicalize()?;
    let above = procfs::mounts()?.into_iter().filter(|mount| dir.starts_with(&mount.fs_file));
    Ok(above.max_by_key(|mount| mount.fs_file.len()).map(|mount| mount.fs_vfstype))
}
