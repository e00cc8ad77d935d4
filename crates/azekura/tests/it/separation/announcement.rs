//! The code of the announcement of explicit garbage collection, with nothing but the crate's name changed.

use std::process::Command;

use azekura::{Config, Database, KvSeparationOptions, Partition, PartitionCreateOptions};

/// "Key-value separation is disabled by default, but can be toggled on a per-partition basis".
#[rustfmt::skip]
fn enable_separation(keyspace: &Database) -> azekura::Result<Partition> {
let opts = PartitionCreateOptions::default().with_kv_separation(KvSeparationOptions::default());
let blobs = keyspace.open_partition("blobs", opts)?;
    Ok(blobs)
}

/// "Scanning can be performed at any time".
#[rustfmt::skip]
fn run_scan(blobs: &Partition) -> azekura::Result<()> {
use azekura::GarbageCollection;

// blobs is the partition from earlier

let report = blobs.gc_scan()?;

println!("{report}");
    Ok(())
}

/// The two strategies, each by itself.
#[rustfmt::skip]
fn run_each_strategy(blobs: &Partition) -> azekura::Result<()> {
use azekura::GarbageCollection;
blobs.gc_with_space_amp_target(2.0)?;

// Defragment segments with 70% or more stale data
blobs.gc_with_staleness_threshold(0.7)?;
    Ok(())
}

/// "The garbage collection strategies can be mixed and matched".
#[rustfmt::skip]
fn combine_strategies(blobs: &Partition) -> azekura::Result<()> {
use azekura::GarbageCollection;
#[expect(unused_variables, reason = "it is printed that way")]
// First, run scan
let report = blobs.gc_scan()?;

// We never want to surpass 3x space amp
blobs.gc_with_space_amp_target(3.0)?;

// But even if our space amp is low, we may want to
// get rid of very fragmented segments
blobs.gc_with_staleness_threshold(0.9)?;
    Ok(())
}

/// The methods that the text calls by other names: `Gc::scan`, `with_space_amp_target` and so on.
fn call_by_short_names(blobs: &Partition) -> azekura::Result<()> {
    use azekura::Gc;
    let report = Gc::scan(blobs)?;
    assert_eq!(report, blobs.gc_scan()?);
    blobs.with_space_amp_target(1.5)?;
    blobs.with_staleness_threshold(0.9)?;
    blobs.drop_stale_segments()?;
    Ok(())
}

/// The options under "Configuration".
fn configured_options() -> PartitionCreateOptions {
    let options = KvSeparationOptions::default().blob_file_separation_threshold(2_048);
    PartitionCreateOptions::default().with_kv_separation(options.blob_file_target_size(256 * 1_024 * 1_024))
}

/// Half of all values are overwritten or removed, and each call does what the announcement says.
#[test]
fn announcement_example_compiles_and_runs() {
    let dir = tempfile::tempdir().unwrap();
    // Without workers, because a compaction between two calls changes what the second one reports.
    let keyspace = Config::new(dir.path().join("db")).workers(0).open().unwrap();
    let blobs = enable_separation(&keyspace).unwrap();
    assert_eq!(format!("{:?}", blobs.name), "\"blobs\"");
    let steps = [run_scan, run_each_strategy, combine_strategies, call_by_short_names];
    for (round, step) in (0u8..).zip(steps) {
        (0..200u8).for_each(|n| blobs.insert([n], vec![n ^ round; 5_000]).unwrap());
        blobs.flush().unwrap();
        (0..100u8).for_each(|n| blobs.remove([n]).unwrap());
        step(&blobs).unwrap();
        assert_eq!(blobs.get([150]).unwrap().unwrap(), vec![150 ^ round; 5_000]);
        assert_eq!(blobs.len().unwrap(), 100);
    }
    let report = azekura::Gc::scan(&blobs).unwrap();
    assert!(report.space_amp() <= 1.5 && report.stale_segment_count == 0, "{report}");
    let other = keyspace.open_partition("other", configured_options()).unwrap();
    other.insert("small", vec![1; 2_047]).unwrap();
    other.insert("large", vec![2; 2_048]).unwrap();
    other.flush().unwrap();
    assert_eq!(other.metrics().blob_files[0].values, 1);
}

/// The program with tokio; its database is `.azekura_data` below the current directory.
#[rustfmt::skip]
#[expect(unused_imports, reason = "it is printed that way")]
async fn program() -> azekura::Result<()> {
    use azekura::GarbageCollection;
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

/// Runs the program in another process, because it uses the current directory. The second run opens the database of
/// the first run.
#[test]
fn announced_program_leaves_a_database() {
    const IN_CHILD: &str = "AZEKURA_ANNOUNCEMENT";
    if std::env::var_os(IN_CHILD).is_some() {
        return tokio::runtime::Runtime::new().unwrap().block_on(program()).unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["separation::announcement::announced_program_leaves_a_database", "--exact", "--nocapture"]);
        let output = child.current_dir(&dir).env(IN_CHILD, "1").output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{text}");
        // The program ends without waiting for its task, so the runtime may cancel the call that the task unwraps.
        assert!(
            !text.contains("GC failed") && text.contains("panicked") == text.contains("JoinError::Cancelled"),
            "{text}"
        );
    }
    let db = Config::new(dir.path().join(".azekura_data")).open().unwrap();
    let blobs = db.partition("blobs").unwrap();
    assert!(blobs.metrics().has_kv_separation);
    assert_eq!(azekura::GarbageCollection::gc_scan(&blobs).unwrap().segment_count, 0);
}
