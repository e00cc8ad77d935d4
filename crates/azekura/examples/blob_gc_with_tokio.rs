//! Blob GC in an asynchronous program: a tokio task runs it at an interval, on the threads for blocking calls. When
//! `main` sets the watch channel to true, the task ends after its current run.
#![expect(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "clippy.toml bans system calls in the engine; an example may use them"
)]

use std::time::{Duration, Instant};

use azekura::{Config, Error, GarbageCollection, KvSeparationOptions, Partition, PartitionCreateOptions, Result};
use tokio::sync::watch;
use tokio::task::{self, JoinHandle};
use tokio::time;

/// Interval between two runs. A production program would use hours.
const INTERVAL: Duration = Duration::from_millis(200);

// `#[tokio::main]` does the same.
fn main() -> Result<()> {
    tokio::runtime::Runtime::new().expect("the runtime starts").block_on(run())
}

async fn run() -> Result<()> {
    let path = std::env::temp_dir().join(format!("azekura-tokio-{}", std::process::id()));
    let db = Config::new(&path).open()?;
    // Only the task below runs blob GC.
    let separation = KvSeparationOptions::default().blob_file_target_size(1 << 20).automatic_gc(None);
    let blobs = db.open_partition("blobs", PartitionCreateOptions::default().with_kv_separation(separation))?;

    let (stop, stopped) = watch::channel(false);
    let gc_task = run_gc_every(INTERVAL, blobs.clone(), stopped);

    for round in 0..6u8 {
        let blobs = blobs.clone();
        blocking(move || (0..200u8).try_for_each(|n| blobs.insert([n], [round ^ n; 10_000]))).await?;
        time::sleep(INTERVAL).await;
    }

    stop.send_replace(true);
    let freed = gc_task.await.expect("the task does not panic")?;
    let report = blocking(move || blobs.gc_scan()).await?;
    println!("{freed} bytes freed in total; at the end {report}");
    assert_eq!(report.total_blobs - report.stale_blobs, 200);

    // `close` blocks too, because it flushes and syncs.
    blocking(move || db.close()).await?;
    std::fs::remove_dir_all(&path).map_err(|error| Error::invalid(format!("{}: {error}", path.display())))
}

/// Runs blob GC until `stopped` is true; returns the number of freed bytes.
fn run_gc_every(interval: Duration, blobs: Partition, mut stopped: watch::Receiver<bool>) -> JoinHandle<Result<u64>> {
    task::spawn(async move {
        let mut total = 0;
        while time::timeout(interval, stopped.wait_for(|stop| *stop)).await.is_err() {
            let (start, blobs) = (Instant::now(), blobs.clone());
            let freed = blocking(move || blobs.gc_with_space_amp_target(1.5)).await?;
            println!("{freed} bytes freed in {:?}", start.elapsed());
            total += freed;
        }
        Ok(total)
    })
}

/// Runs a call of the database on a thread for blocking calls, because the call may wait for the disk.
async fn blocking<T: Send + 'static>(call: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    task::spawn_blocking(call).await.expect("the call does not panic")
}
