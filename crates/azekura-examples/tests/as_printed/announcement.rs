//! The program that the announcement of explicit garbage collection shows, with nothing but the crate's name changed.
//! It works in `.azekura_data` below the current directory.
#![allow(unused_imports, reason = "the program stands here as it was printed")]

use azekura::{Config, GarbageCollection, KvSeparationOptions, PartitionCreateOptions};

#[rustfmt::skip]
#[tokio::main]
async fn main() -> azekura::Result<()> {
    let keyspace = Config::default().open()?;

    let opts = PartitionCreateOptions::default()
        .with_kv_separation(KvSeparationOptions::default());

    let blobs = keyspace.open_partition("blobs", opts)?;

    {
        let blobs = blobs.clone();

        tokio::spawn(async move {
            use azekura::{Error, Gc};
            use std::time::{Duration, Instant};

            loop {
                eprintln!("Running GC for partition {:?}", blobs.name);
                let start = Instant::now();

                let blobs = blobs.clone();
                let result = tokio::task::spawn_blocking(move || {
                    let _report = blobs.gc_scan()?;
                    blobs.gc_with_space_amp_target(3.0)?;
                    Ok::<_, Error>(())
                })
                .await
                .unwrap();

                if let Err(e) = result {
                    // error handling
                    eprintln!("GC failed: {e:?}");
                } else {
                    eprintln!("GC done in {:?}", start.elapsed());
                }

                // Sleep 24 hours
                tokio::time::sleep(Duration::from_secs(60 * 60 * 24)).await;
            }
        });
    }

    Ok(())
}
