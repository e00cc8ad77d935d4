//! The programs run to their end, and do what they say.

use std::path::Path;
use std::process::{Command, Output};

use azekura::{Config, GarbageCollection};

/// Runs a program in a directory of its own, which is also its temporary one.
fn run(program: &str, dir: &Path) -> Output {
    let output = Command::new(program).current_dir(dir).env("TMPDIR", dir).output().unwrap();
    assert!(output.status.success(), "{program}: {output:?}");
    output
}

#[test]
fn the_announcements_program_leaves_a_database() {
    let dir = tempfile::tempdir().unwrap();
    // The second time it finds what the first has left.
    for _ in 0..2 {
        let output = run(env!("CARGO_BIN_EXE_announcement"), dir.path());
        let told = String::from_utf8(output.stderr).unwrap();
        // It ends at once, perhaps before its task has begun, or in the middle of it: then the runtime may cancel what
        // the program unwraps.
        assert!(told.is_empty() || told.contains("Running GC for partition \"blobs\""), "{told}");
        assert!(!told.contains("GC failed") && told.contains("panicked") == told.contains("JoinError::Cancelled"));
    }
    let db = Config::new(dir.path().join(".azekura_data")).open().unwrap();
    let blobs = db.partition("blobs").unwrap();
    assert!(blobs.metrics().separated);
    assert_eq!(blobs.gc_scan().unwrap().segment_count, 0);
}

#[test]
fn with_tokio_stale_values_are_collected() {
    let dir = tempfile::tempdir().unwrap();
    let told = String::from_utf8(run(env!("CARGO_BIN_EXE_collect_with_tokio"), dir.path()).stdout).unwrap();
    let freed = told.lines().filter_map(|line| line.split_once(" bytes were freed")).map(|(freed, _)| freed);
    let freed: Vec<u64> = freed.map(|freed| freed.parse().unwrap()).collect();
    assert!(freed.len() == 1 && freed[0] > 0, "{told}");
    assert!(told.lines().filter(|line| line.contains("bytes freed in")).count() >= 2, "{told}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "something is left behind");
}
