//! The crash search must find planted bugs: a durability rule that is disabled, and syncs that do nothing.

use azekura::testing::{Fault, FaultPlan, OpKind};

use super::SCRIPT_STEPS;
use super::script::CrashScript;
use super::search::{CrashSearch, InjectedBug};

/// Number of scripts that are searched for a planted bug, and number of crash points of each.
const SCRIPTS_MAX: u64 = 8;
const CRASH_POINTS_MAX: u64 = 150;

/// Searches until the first finding, and prints it.
fn finds_planted_bug(what: &str, planted: &InjectedBug) -> bool {
    let mut search = CrashSearch::default();
    for seed in 0..SCRIPTS_MAX {
        search.explore(&CrashScript::new(seed, SCRIPT_STEPS), planted, CRASH_POINTS_MAX, 1);
        if let Some(finding) = search.findings.first() {
            println!("{what}: red after {} crash points: {finding}", search.points);
            return true;
        }
    }
    false
}

fn ignored_sync(op: OpKind) -> FaultPlan {
    FaultPlan::new(op, 1, Fault::LyingSync).forever()
}

#[test]
fn search_finds_flush_before_wal_sync() {
    let planted = InjectedBug::Engine(|config| config.plant_bug(azekura::PlantedBug::FlushBeforeWalSync));
    assert!(
        finds_planted_bug("flush edit before the WAL sync", &planted),
        "half a batch over two partitions was not noticed"
    );
}

#[test]
fn search_finds_wal_durable_before_its_blobs() {
    let planted = InjectedBug::Engine(|config| config.plant_bug(azekura::PlantedBug::WalSyncBeforeBlobs));
    assert!(finds_planted_bug("values omitted", &planted), "a pointer without its value was not noticed");
}

#[test]
fn search_finds_changes_beyond_durable() {
    let planted = InjectedBug::Engine(|config| config.plant_bug(azekura::PlantedBug::ChangesBeyondDurable));
    assert!(finds_planted_bug("changes", &planted), "a reader of durable changes read a commit that was lost");
}

#[test]
fn search_finds_unnoticed_recycling() {
    let planted = InjectedBug::Engine(|config| config.plant_bug(azekura::PlantedBug::UnnoticedRecycling));
    // In scripts that fill several segments.
    let mut search = CrashSearch::default();
    for seed in 0..100 {
        search.explore(&CrashScript::new(seed, 4 * SCRIPT_STEPS), &planted, 1, 1);
        if let Some(finding) = search.findings.first() {
            return println!("recycling: red: {finding}");
        }
    }
    panic!("a reader of changes passed over commits");
}

#[test]
fn search_finds_bugs_of_followers() {
    let tears = InjectedBug::Engine(|config| config.plant_bug(azekura::PlantedBug::FollowerTearsCommits));
    assert!(finds_planted_bug("followers", &tears), "a follower showed a part of a commit");
    let forgets = InjectedBug::Engine(|config| config.plant_bug(azekura::PlantedBug::FollowerForgetsSnapshots));
    assert!(finds_planted_bug("followers", &forgets), "a snapshot of a follower changed");
}

#[test]
fn search_finds_ignored_wal_sync() {
    assert!(finds_planted_bug("log", &InjectedBug::Fault(ignored_sync(OpKind::Sync).in_path(".wal"))));
}

#[test]
fn search_finds_ignored_table_sync() {
    assert!(finds_planted_bug("tables", &InjectedBug::Fault(ignored_sync(OpKind::Sync).in_path(".sst"))));
}

#[test]
fn search_finds_ignored_blob_file_sync() {
    assert!(finds_planted_bug("blob files", &InjectedBug::Fault(ignored_sync(OpKind::Sync).in_path(".blob"))));
}

#[test]
fn search_finds_ignored_pool_sync() {
    assert!(finds_planted_bug("pools", &InjectedBug::Fault(ignored_sync(OpKind::Sync).in_path(".pool"))));
}

#[test]
fn search_finds_ignored_shadow_sync() {
    assert!(finds_planted_bug("shadows", &InjectedBug::Fault(ignored_sync(OpKind::Sync).in_path(".shadow"))));
}

#[test]
fn search_finds_ignored_manifest_sync() {
    assert!(finds_planted_bug("manifest", &InjectedBug::Fault(ignored_sync(OpKind::Sync).in_path("MANIFEST"))));
}

#[test]
fn search_finds_ignored_directory_sync() {
    assert!(finds_planted_bug("directories", &InjectedBug::Fault(ignored_sync(OpKind::SyncDir))));
}
