//! The database in an asynchronous program. Calls may wait for the disk, so they run on the threads for blocking calls:
//! one `spawn_blocking` for each unit of work, not one for each read. A scan streams through a bounded channel.
#![expect(clippy::disallowed_methods, reason = "clippy.toml bans system calls in the engine; an example may use them")]

use azekura::{Config, Database, Error, Partition, PersistMode, Result, Slice};
use tokio::sync::mpsc;
use tokio::task;

// `#[tokio::main]` does the same.
fn main() -> Result<()> {
    tokio::runtime::Runtime::new().expect("the runtime starts").block_on(run())
}

async fn run() -> Result<()> {
    let path = std::env::temp_dir().join(format!("azekura-async-use-{}", std::process::id()));
    let config = Config::new(&path);
    let db = blocking(move || config.open()).await?;
    let orders = {
        let db = db.clone();
        blocking(move || db.open_partition("orders", Default::default())).await?
    };

    // Tasks that commit at the same time share one sync of the WAL.
    let commits: Vec<_> = (0..32u32).map(|n| task::spawn(place_order(db.clone(), orders.clone(), n))).collect();
    for commit in commits {
        commit.await.expect("the task does not panic")?;
    }
    let metrics = db.metrics(); // reads counters in memory, and never waits for the disk
    println!("{} commits, {} syncs", metrics.commits, metrics.wal_syncs);

    let mut received = 0;
    let mut pairs = stream(orders.clone());
    while let Some(pair) = pairs.recv().await {
        let (key, _value) = pair?;
        assert_eq!(*key, u32::to_be_bytes(received));
        received += 1;
    }
    assert_eq!(received, 32);

    drop(orders);
    blocking(move || db.close()).await?; // flushes and syncs
    std::fs::remove_dir_all(&path).map_err(|error| Error::io("remove", &error).in_file(&path))
}

/// Reads, decides and writes in one call on a blocking thread. Returns when the order survives power loss.
async fn place_order(db: Database, orders: Partition, n: u32) -> Result<()> {
    blocking(move || {
        if orders.contains_key(n.to_be_bytes())? {
            return Ok(());
        }
        let mut batch = db.batch();
        batch.insert(&orders, n.to_be_bytes(), "one apple");
        batch.durability(PersistMode::SyncData).commit()
    })
    .await
}

/// Scans a partition on a blocking thread. At most 16 pairs wait in the channel. The scan ends if the receiver is
/// dropped.
fn stream(partition: Partition) -> mpsc::Receiver<Result<(Slice, Slice)>> {
    let (sender, receiver) = mpsc::channel(16);
    task::spawn_blocking(move || {
        for pair in &partition {
            if sender.blocking_send(pair).is_err() {
                break;
            }
        }
    });
    receiver
}

/// Runs a call of the database on a thread for blocking calls.
async fn blocking<T: Send + 'static>(call: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    task::spawn_blocking(call).await.expect("the call does not panic")
}
