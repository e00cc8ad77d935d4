//! Collecting blob files from an asynchronous program: a task that sleeps between collections, each of which runs where
//! blocking is allowed. It ends when it is told to, between two collections.

use std::time::{Duration, Instant};

use azekura::{Config, Error, GarbageCollection, KvSeparationOptions, Partition, PartitionCreateOptions, Result};
use tokio::sync::watch;
use tokio::task::{self, JoinHandle};
use tokio::time;

/// Every day would do in earnest.
const INTERVAL: Duration = Duration::from_millis(200);

#[tokio::main]
async fn main() -> Result<()> {
    let path = std::env::temp_dir().join(format!("azekura-tokio-{}", std::process::id()));
    let db = Config::new(&path).open()?;
    // Nothing is collected but by the task below.
    let apart = KvSeparationOptions::default().blob_file_target_size(1 << 20).automatic_gc(None);
    let blobs = db.open_partition("blobs", PartitionCreateOptions::default().with_kv_separation(apart))?;

    let (stop, stopped) = watch::channel(false);
    let collector = collect_every(INTERVAL, blobs.clone(), stopped);

    for round in 0..6u8 {
        let blobs = blobs.clone();
        blocking(move || (0..200u8).try_for_each(|n| blobs.insert([n], [round ^ n; 10_000]))).await?;
        time::sleep(INTERVAL).await;
    }

    stop.send_replace(true);
    let freed = collector.await.expect("the task does not panic")?;
    println!("{freed} bytes were freed; at the end {}", blocking(move || blobs.gc_scan()).await?);

    // Closing waits for the disk too.
    blocking(move || db.close()).await?;
    std::fs::remove_dir_all(&path).map_err(|error| Error::invalid(format!("{}: {error}", path.display())))
}

/// Collects until `stopped` says so; gives the bytes that were freed.
fn collect_every(interval: Duration, blobs: Partition, mut stopped: watch::Receiver<bool>) -> JoinHandle<Result<u64>> {
    task::spawn(async move {
        let mut all = 0;
        while time::timeout(interval, stopped.wait_for(|stop| *stop)).await.is_err() {
            let (start, blobs) = (Instant::now(), blobs.clone());
            let freed = blocking(move || blobs.gc_with_space_amp_target(1.5)).await?;
            println!("{freed} bytes freed in {:?}", start.elapsed());
            all += freed;
        }
        Ok(all)
    })
}

/// Calls of the database wait for the disk, so they belong where blocking is allowed.
async fn blocking<T: Send + 'static>(call: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    task::spawn_blocking(call).await.expect("the call does not panic")
}
