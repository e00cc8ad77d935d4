//! The search must find what it is there for: with a rule of the engine left out, or a device that lies, it goes red.

use azekura::fs::{Fault, FaultPlan, OpKind};

use super::STEPS;
use super::script::Script;
use super::search::{Planted, Search};

/// Scripts tried before a gate counts as broken, and crash points of each.
const SCRIPTS: u64 = 8;
const POINTS: u64 = 150;

/// Searches until the first finding, and prints it.
fn red(what: &str, planted: &Planted) -> bool {
    let mut search = Search::default();
    for seed in 0..SCRIPTS {
        search.explore(&Script::new(seed, STEPS), planted, POINTS, 1);
        if let Some(finding) = search.findings.first() {
            println!("{what}: red after {} crash points: {finding}", search.points);
            return true;
        }
    }
    false
}

fn lying(op: OpKind) -> FaultPlan {
    FaultPlan::new(op, 1, Fault::LyingSync).forever()
}

#[test]
fn a_flush_before_the_logs_sync_is_found() {
    let planted = Planted::Engine(|config| config.plant_bug(azekura::PlantedBug::FlushBeforeLogSync));
    assert!(red("permanence rule left out", &planted), "half a batch over two partitions was not noticed");
}

#[test]
fn a_log_that_is_durable_before_its_values_is_found() {
    let planted = Planted::Engine(|config| config.plant_bug(azekura::PlantedBug::LogSyncBeforeValues));
    assert!(red("values left out", &planted), "a pointer without its value was not noticed");
}

#[test]
fn a_lying_sync_of_the_log_is_found() {
    assert!(red("log", &Planted::Fault(lying(OpKind::Sync).in_path(".wal"))));
}

#[test]
fn a_lying_sync_of_tables_is_found() {
    assert!(red("tables", &Planted::Fault(lying(OpKind::Sync).in_path(".sst"))));
}

#[test]
fn a_lying_sync_of_blob_files_is_found() {
    assert!(red("blob files", &Planted::Fault(lying(OpKind::Sync).in_path(".blob"))));
}

#[test]
fn a_lying_sync_of_pools_is_found() {
    assert!(red("pools", &Planted::Fault(lying(OpKind::Sync).in_path(".pool"))));
}

#[test]
fn a_lying_sync_of_what_is_written_before_pools_is_found() {
    assert!(red("shadows", &Planted::Fault(lying(OpKind::Sync).in_path(".shadow"))));
}

#[test]
fn a_lying_sync_of_the_manifest_is_found() {
    assert!(red("manifest", &Planted::Fault(lying(OpKind::Sync).in_path("MANIFEST"))));
}

#[test]
fn a_lying_sync_of_directories_is_found() {
    assert!(red("directories", &Planted::Fault(lying(OpKind::SyncDir))));
}
