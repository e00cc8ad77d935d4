//! Collecting blob files on a thread of one's own: scan and collect on an interval, and stop cleanly.
#![expect(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the bans of clippy.toml are for the engine; a program asks the system"
)]

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use azekura::{Config, GarbageCollection, KvSeparationOptions, Partition, PartitionCreateOptions, Result};

/// Every day would do in earnest.
const INTERVAL: Duration = Duration::from_millis(200);

fn main() -> Result<()> {
    let path = std::env::temp_dir().join(format!("azekura-timer-{}", std::process::id()));
    let db = Config::new(&path).open()?;
    // Nothing is collected but by the thread below.
    let apart = KvSeparationOptions::default().blob_file_target_size(1 << 20).automatic_gc(None);
    let blobs = db.open_partition("blobs", PartitionCreateOptions::default().with_kv_separation(apart))?;

    let (stop, stopped) = mpsc::channel();
    let collector = thread::spawn({
        let blobs = blobs.clone();
        move || collect_every(INTERVAL, &blobs, &stopped)
    });

    // Meanwhile values are written over and over.
    for round in 0..6u8 {
        (0..200u8).try_for_each(|n| blobs.insert([n], [round ^ n; 10_000]))?;
        thread::sleep(INTERVAL);
    }

    drop(stop); // wakes the thread, which ends after what it is at
    let freed = collector.join().expect("the thread does not panic")?;
    println!("{freed} bytes were freed; at the end\n{}", blobs.gc_scan()?);
    drop(blobs);
    db.close()?;
    drop(std::fs::remove_dir_all(&path));
    Ok(())
}

/// Collects until the other end of `stopped` is gone; gives the bytes that were freed.
fn collect_every(interval: Duration, blobs: &Partition, stopped: &Receiver<()>) -> Result<u64> {
    let mut all = 0;
    while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
        let report = blobs.gc_scan()?;
        if report.stale_ratio() < 0.1 {
            println!("{:.0} % stale: not worth it", report.stale_ratio() * 100.0);
            continue;
        }
        let start = Instant::now();
        let freed = blobs.gc_with_space_amp_target(1.5)?;
        println!("{:.0} % stale: {freed} bytes freed in {:?}", report.stale_ratio() * 100.0, start.elapsed());
        all += freed;
    }
    Ok(all)
}
