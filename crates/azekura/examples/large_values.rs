//! Large values in blob files: values are separated from their keys, overwritten, and their space is reclaimed by blob
//! GC on request.
#![expect(clippy::disallowed_methods, reason = "clippy.toml bans system calls in the engine; an example may use them")]

use azekura::{CompressionType, Config, Error, GarbageCollection, KvSeparationOptions, PartitionCreateOptions, Result};

fn main() -> Result<()> {
    let path = std::env::temp_dir().join(format!("azekura-large-values-{}", std::process::id()));
    let db = Config::new(&path).open()?;

    let separation = KvSeparationOptions::default()
        .separation_threshold(4 << 10) // smaller values stay in the tables
        .blob_file_target_size(1 << 20) // small, so that this example has several files; the default is 64 MiB
        .compression(CompressionType::None) // the values are compressed already, as pictures are
        .automatic_gc(None); // the calls below are the only blob GC
    let options = PartitionCreateOptions::default().with_kv_separation(separation);
    let pictures = db.open_partition("pictures", options)?;

    // 100 values of 64 KiB go through the WAL, and a flush writes them to blob files. The value of 2 MiB is written to
    // its blob file by `insert`; the WAL has a pointer only.
    (0..100u8).try_for_each(|n| pictures.insert([n], vec![n; 64 << 10]))?;
    pictures.insert("large", vec![1; 2 << 20])?;
    pictures.flush()?;
    assert!(db.metrics().direct_blob_bytes >= 2 << 20);
    println!("{} blob files with {} bytes", pictures.metrics().blob_files.len(), pictures.metrics().blob_bytes());

    // These calls read keys and pointers, but no blob file.
    assert_eq!(pictures.size_of("large")?, Some(2 << 20));
    assert_eq!(pictures.keys().count(), 101);
    let sizes = pictures.entries().map(|entry| Ok(u64::from(entry?.size()))).sum::<Result<u64>>()?;
    assert_eq!(sizes, 100 * (64 << 10) + (2 << 20));

    // Overwritten and removed values become stale. A snapshot keeps those that it can read.
    let snapshot = db.snapshot();
    (0..60u8).try_for_each(|n| pictures.insert([n], vec![0; 64 << 10]))?;
    (60..80u8).try_for_each(|n| pictures.remove([n]))?;
    let report = pictures.gc_scan()?; // exact; flushes the memtable first
    println!("{report}");
    assert!(report.pinned_bytes > 0, "the snapshot reads the old values");
    assert_eq!(snapshot.get(&pictures, [5])?.expect("was inserted")[0], 5);
    drop(snapshot);

    // First the files without any live value, which costs no copy; then as many files as the target requires. A
    // compaction that a worker runs meanwhile also deletes files without live values.
    let dropped = pictures.gc_drop_stale_segments()?;
    let collected = pictures.gc_with_space_amp_target(1.2)?;
    let report = pictures.gc_scan()?;
    println!("{dropped} bytes freed without a copy, {collected} more by blob GC; now\n{report}");
    assert!(report.space_amp() <= 1.2);
    assert_eq!(pictures.get([99])?.expect("was not changed"), vec![99; 64 << 10]);

    drop(pictures);
    db.close()?;
    std::fs::remove_dir_all(&path).map_err(|error| Error::io("remove", &error).in_file(&path))
}
