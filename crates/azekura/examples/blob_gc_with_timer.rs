//! Blob GC in a program with threads: a thread scans the blob files at an interval, and runs blob GC if at least 10 %
//! of the bytes are stale. When `main` drops the channel, the thread ends after its current run.
#![expect(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "clippy.toml bans system calls in the engine; an example may use them"
)]

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use azekura::{Config, Error, GarbageCollection, KvSeparationOptions, Partition, PartitionCreateOptions, Result};

/// Interval between two runs. A production program would use hours.
const INTERVAL: Duration = Duration::from_millis(200);

fn main() -> Result<()> {
    let path = std::env::temp_dir().join(format!("azekura-timer-{}", std::process::id()));
    let db = Config::new(&path).open()?;
    // Only the thread below runs blob GC.
    let separation = KvSeparationOptions::default().blob_file_target_size(1 << 20).automatic_gc(None);
    let blobs = db.open_partition("blobs", PartitionCreateOptions::default().with_kv_separation(separation))?;

    let (stop, stopped) = mpsc::channel();
    let gc_thread = thread::spawn({
        let blobs = blobs.clone();
        move || run_gc_every(INTERVAL, &blobs, &stopped)
    });

    for round in 0..6u8 {
        (0..200u8).try_for_each(|n| blobs.insert([n], [round ^ n; 10_000]))?;
        thread::sleep(INTERVAL);
    }

    drop(stop); // the thread ends after its current run
    let freed = gc_thread.join().expect("the thread does not panic")?;
    println!("{freed} bytes freed in total; at the end\n{}", blobs.gc_scan()?);
    assert_eq!(blobs.len()?, 200);
    drop(blobs);
    db.close()?;
    std::fs::remove_dir_all(&path).map_err(|error| Error::invalid(format!("{}: {error}", path.display())))
}

/// Runs blob GC until the sender of `stopped` is dropped; returns the number of freed bytes.
fn run_gc_every(interval: Duration, blobs: &Partition, stopped: &Receiver<()>) -> Result<u64> {
    let mut total = 0;
    while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
        let stale_percent = blobs.gc_scan()?.stale_ratio() * 100.0;
        if stale_percent < 10.0 {
            println!("{stale_percent:.0} % stale: no blob GC");
            continue;
        }
        let start = Instant::now();
        let freed = blobs.gc_with_space_amp_target(1.5)?;
        println!("{stale_percent:.0} % stale: {freed} bytes freed in {:?}", start.elapsed());
        total += freed;
    }
    Ok(total)
}
